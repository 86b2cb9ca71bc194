//! The transcoder loses nothing: coefficients against a naive reader, pixels against decoders; its refusals; and its
//! safety on hostile bytes.

use crate::common::naive_jpeg;
use crate::common::sweep::{self, places};
use feedline::prepare::{Outcome, Reason, RestartOptions, restart_jpeg};
use feedline::{ErrorKind, Result};
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use proptest::prelude::*;
use std::num::NonZeroU16;
use std::path::Path;

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn every(interval: u16) -> RestartOptions {
    RestartOptions::default().interval(NonZeroU16::new(interval).unwrap())
}

fn transcode(input: &[u8], options: &RestartOptions) -> Result<(Outcome, Vec<u8>)> {
    let mut out = vec![1, 2, 3];
    restart_jpeg(input, options, &mut out).map(|outcome| (outcome, out))
}

/// Transcodes, checks every invariant of the result, and returns it.
fn check(what: &str, input: &[u8], options: &RestartOptions) -> Vec<u8> {
    let (outcome, out) = transcode(input, options).unwrap_or_else(|error| panic!("{what}: {error}"));
    let Outcome::Transcoded { interval, .. } = outcome else { panic!("{what}: {outcome:?}") };
    let (before, _) = naive_jpeg::read(input).unwrap_or_else(|error| panic!("{what}: {error}"));
    let (after, found) = naive_jpeg::read(&out).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(found, usize::from(interval), "{what}");
    assert!(before == after, "{what}: coefficients or segments differ");
    let (again, twice) = transcode(&out, options).unwrap();
    assert_eq!(
        again,
        Outcome::Transcoded { interval, new_tables: false },
        "{what}: a second pass has no better tables"
    );
    assert!(twice == out, "{what}: a second pass changes something");
    out
}

/// One pixel of all channels that vary a little and sometimes a lot, as pictures do.
fn pixels(width: u16, height: u16, channels: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut noise = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut out = Vec::new();
    for y in 0..i64::from(height) {
        for x in 0..i64::from(width) {
            for channel in 0..channels as i64 {
                let edge = if (x * 2 + y + channel * 9) / 23 % 2 == 0 { 60 } else { 180 };
                out.push((edge + (x * y / 9 + channel * 7) % 40 + (noise() % 17) as i64) as u8);
            }
        }
    }
    out
}

#[derive(Clone, Debug)]
struct Case {
    size: (u16, u16),
    color: ColorType,
    factor: SamplingFactor,
    quality: u8,
    restarts: Option<u16>,
    seed: u64,
}

impl Case {
    fn encode(&self) -> Vec<u8> {
        let channels = match self.color {
            ColorType::Luma => 1,
            ColorType::Rgb => 3,
            _ => 4,
        };
        let mut out = Vec::new();
        let mut encoder = Encoder::new(&mut out, self.quality);
        encoder.set_sampling_factor(self.factor);
        if let Some(interval) = self.restarts {
            encoder.set_restart_interval(interval);
        }
        let (width, height) = self.size;
        encoder.encode(&pixels(width, height, channels, self.seed), width, height, self.color).unwrap();
        out
    }
}

/// RGB of the whole picture.
fn decode(bytes: &[u8]) -> image::RgbImage {
    image::load_from_memory_with_format(bytes, image::ImageFormat::Jpeg).unwrap().into_rgb8()
}

/// The same by the crate's own decoder, which checks more strictly for damage.
#[cfg(feature = "image")]
fn decode_strictly(bytes: &[u8], (width, height): (u32, u32)) -> Vec<u8> {
    use feedline::decode::{Filter, Image};
    use feedline::tensor::EncodedField;
    use feedline::unstable::Single;
    let image = Image::resize(width, height).filter(Filter::Nearest);
    let mut single = Single::new(image, &EncodedField::image("image")).unwrap();
    single.decode(bytes, 0, 0, 0).unwrap();
    single.bytes(0).to_vec()
}

fn check_pixels(what: &str, before: &[u8], after: &[u8]) {
    let picture = decode(before);
    assert!(picture == decode(after), "{what}: pixels differ");
    #[cfg(feature = "image")]
    {
        let size = picture.dimensions();
        assert!(decode_strictly(before, size) == decode_strictly(after, size), "{what}: pixels differ (strict)");
    }
}

const JPEGS: [&str; 12] = [
    "420.jpg",
    "422.jpg",
    "444.jpg",
    "420-large.jpg",
    "restart.jpg",
    "gray.jpg",
    "one-pixel.jpg",
    "thin.jpg",
    "cmyk.jpg",
    "cmyk-not-adobe.jpg",
    "ycck.jpg",
    "exif.jpg",
];

#[test]
fn restarts_keep_every_coefficient_and_other_segment() {
    for name in JPEGS {
        let input = fixture(&format!("images/{name}"));
        check_pixels(name, &input, &check(name, &input, &RestartOptions::default()));
        for interval in [1, 2, 5, 7, 1000, u16::MAX] {
            let what = format!("{name} every {interval}");
            check_pixels(&what, &input, &check(&what, &input, &every(interval)));
        }
    }
}

#[test]
fn every_sampling_colour_and_quality_keeps_its_pixels() {
    use SamplingFactor::{R_4_2_0, R_4_2_2, R_4_4_0, R_4_4_4};
    let mut seed = 0;
    for color in [ColorType::Rgb, ColorType::Luma, ColorType::Cmyk, ColorType::CmykAsYcck] {
        for factor in [R_4_4_4, R_4_2_2, R_4_2_0, R_4_4_0] {
            for (quality, restarts) in [(30, None), (75, Some(3)), (92, None), (96, Some(1)), (100, None)] {
                seed += 1;
                let size = (17 + seed as u16 * 5 % 64, 9 + seed as u16 * 7 % 53);
                let case = Case { size, color, factor, quality, restarts, seed };
                let (what, input) = (format!("{case:?}"), case.encode());
                check_pixels(&what, &input, &check(&what, &input, &RestartOptions::default()));
                check_pixels(&what, &input, &check(&what, &input, &every(1 + seed as u16 % 9)));
            }
        }
    }
}

fn case() -> impl Strategy<Value = Case> {
    use SamplingFactor::{R_4_2_0, R_4_2_2, R_4_4_0, R_4_4_4};
    let color = prop::sample::select(vec![ColorType::Rgb, ColorType::Luma, ColorType::Cmyk, ColorType::CmykAsYcck]);
    let factor = prop::sample::select(vec![R_4_4_4, R_4_2_2, R_4_2_0, R_4_4_0]);
    let size = (1_u16..90, 1_u16..90);
    (size, color, factor, 1_u8..=100, prop::option::of(1_u16..20), any::<u64>()).prop_map(
        |(size, color, factor, quality, restarts, seed)| Case { size, color, factor, quality, restarts, seed },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]
    #[test]
    fn any_small_picture_keeps_its_coefficients_and_pixels(case in case(), interval in prop::option::of(1_u16..40)) {
        let input = case.encode();
        let options = interval.map_or(RestartOptions::default(), every);
        let out = check(&format!("{case:?}"), &input, &options);
        check_pixels(&format!("{case:?}"), &input, &out);
    }
}

/// Bytes `at` to `at + cut` are replaced; the numbers are taken modulo the length.
type Edit = (usize, usize, Vec<u8>);

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let bytes = prop::collection::vec(prop_oneof![any::<u8>(), Just(0xFF), Just(0), 0xC0_u8..=0xDF], 0..6);
    prop::collection::vec((any::<usize>(), 0_usize..8, bytes), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]
    #[test]
    fn an_edited_jpeg_never_gets_other_coefficients(
        name in prop::sample::select(vec!["images/cmyk.jpg", "images/exif.jpg", "prepare/422-restarts.jpg", "images/thin.jpg"]),
        edits in edits(),
    ) {
        let mut input = fixture(name);
        for (at, cut, bytes) in edits {
            let at = at % input.len();
            input.splice(at..(at + cut).min(input.len()), bytes);
        }
        if let Ok((Outcome::Transcoded { .. }, out)) = transcode(&input, &RestartOptions::default().pixels_max(1 << 20)) {
            prop_assert!(naive_jpeg::read(&input).unwrap().0 == naive_jpeg::read(&out).unwrap().0);
        }
    }
}

/// The transcoded files of `tests/fixtures/prepare`: `make_prepare.py` found that Pillow and OpenCV decode them to the
/// same pixels as the input.
#[test]
fn the_output_equals_the_files_checked_by_pillow_and_opencv() {
    let list = String::from_utf8(fixture("prepare/list.txt")).unwrap();
    let mut seen = 0;
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let (input, output) = line.split_once(' ').unwrap();
        let out = check(input, &fixture(input), &RestartOptions::default());
        assert!(out == fixture(output), "{input}: not the bytes of {output}");
        seen += 1;
    }
    assert!(seen >= 12, "{seen}");
}

#[test]
fn new_huffman_tables_are_made_only_where_they_pay() {
    // One-pixel pictures have the default tables and use almost nothing of them.
    let (outcome, out) = transcode(&fixture("images/one-pixel.jpg"), &RestartOptions::default()).unwrap();
    assert_eq!(outcome, Outcome::Transcoded { interval: 1, new_tables: true });
    assert!(out.len() + 300 < fixture("images/one-pixel.jpg").len(), "{}", out.len());
    // An optimised picture with unchanged restarts keeps its tables.
    let (_, optimal) = transcode(&fixture("images/420.jpg"), &every(2)).unwrap();
    let (outcome, same) = transcode(&optimal, &every(2)).unwrap();
    assert_eq!(outcome, Outcome::Transcoded { interval: 2, new_tables: false });
    assert!(same == optimal);
    // Differences without a code in the input's tables.
    let (_, single) = transcode(&fixture("images/420-large.jpg"), &every(u16::MAX)).unwrap();
    let (outcome, _) = transcode(&single, &every(1)).unwrap();
    assert_eq!(outcome, Outcome::Transcoded { interval: 1, new_tables: true });
}

#[test]
fn existing_restarts_are_replaced() {
    let plain = fixture("images/420-large.jpg");
    let (_, direct) = transcode(&plain, &every(5)).unwrap();
    let mut out = plain;
    for interval in [1, 3, 80, 2, 5] {
        out = transcode(&out, &every(interval)).unwrap().1;
    }
    assert_eq!(naive_jpeg::read(&out).unwrap(), naive_jpeg::read(&direct).unwrap());
}

/// Offset of the marker.
fn find(bytes: &[u8], marker: u8) -> usize {
    bytes.windows(2).position(|pair| pair == [0xFF, marker]).unwrap()
}

fn patched(name: &str, marker: u8, offset: usize, byte: u8) -> Vec<u8> {
    let mut bytes = fixture(name);
    let at = find(&bytes, marker) + offset;
    bytes[at] = byte;
    bytes
}

#[test]
fn a_picture_that_cannot_have_restarts_is_returned_unchanged() {
    let mut several = fixture("images/444.jpg");
    let at = find(&several, 0xDA);
    several.splice(at + 3..at + 11, [8, 1, 1, 0]);
    let mut two = fixture("images/444.jpg");
    let end = two.len() - 2;
    two.splice(end..end, fixture("images/444.jpg")[at..].to_vec());
    let sof = |marker| patched("images/420.jpg", 0xC0, 1, marker);
    let zero_height = {
        let mut bytes = patched("images/420.jpg", 0xC0, 5, 0);
        let at = find(&bytes, 0xC0) + 6;
        bytes[at] = 0;
        bytes
    };
    let cases = [
        (fixture("images/progressive.jpg"), Reason::Progressive),
        (fixture("images/rgb.png"), Reason::NotJpeg),
        (fixture("images/lossy.webp"), Reason::NotJpeg),
        (b"some text".to_vec(), Reason::NotJpeg),
        (sof(0xC3), Reason::Lossless),
        (sof(0xF7), Reason::Lossless),
        (sof(0xC9), Reason::Arithmetic),
        (sof(0xC5), Reason::Hierarchical),
        (patched("images/420.jpg", 0xC0, 4, 12), Reason::Bits(12)),
        (zero_height, Reason::NoHeight),
        (several, Reason::SeveralScans),
        (two, Reason::SeveralScans),
    ];
    for (input, reason) in cases {
        let (outcome, out) =
            transcode(&input, &RestartOptions::default()).unwrap_or_else(|error| panic!("{reason}: {error}"));
        assert_eq!(outcome, Outcome::Unchanged { reason });
        assert!(out == input, "{reason}");
    }
}

#[test]
fn pictures_in_several_scans_are_returned_unchanged() {
    let mut input = Vec::new();
    let mut encoder = Encoder::new(&mut input, 90);
    encoder.set_sampling_factor(SamplingFactor::R_4_1_1);
    encoder.encode(&pixels(50, 40, 3, 1), 50, 40, ColorType::Rgb).unwrap();
    let (outcome, out) = transcode(&input, &RestartOptions::default()).unwrap();
    assert_eq!(outcome, Outcome::Unchanged { reason: Reason::SeveralScans });
    assert!(out == input);
}

#[test]
fn extended_sequential_with_four_tables_is_accepted() {
    // The same picture with renumbered tables, as SOF1 allows.
    let mut input = fixture("images/444.jpg");
    let at = find(&input, 0xC0);
    input[at + 1] = 0xC1;
    let mut at = 2;
    loop {
        let len = usize::from(input[at + 2]) << 8 | usize::from(input[at + 3]);
        match input[at + 1] {
            0xC4 => {
                let mut table = at + 4;
                while table < at + 2 + len {
                    input[table] += 2;
                    table += 17 + input[table + 1..table + 17].iter().map(|count| usize::from(*count)).sum::<usize>();
                }
            }
            0xDA => {
                [6, 8, 10].into_iter().for_each(|selector| input[at + selector] += 0x22);
                break;
            }
            _ => {}
        }
        at += 2 + len;
    }
    check("four tables", &input, &RestartOptions::default());
}

#[test]
fn segments_around_the_scan_stay_byte_for_byte() {
    let plain = fixture("images/exif.jpg");
    let (_, expected) = transcode(&plain, &RestartOptions::default()).unwrap();
    let mut input = plain.clone();
    // A comment and a fill byte before the end marker, and a second picture after it.
    let end = input.len() - 2;
    let tail = [&[0xFF, 0xFE, 0, 5, 1, 2, 3, 0xFF, 0xFF, 0xD9], &fixture("images/gray.jpg")[..]].concat();
    input.splice(end.., tail.clone());
    // Fill bytes and a lone TEM marker in the header.
    input.splice(2..2, [0xFF, 0xFF, 0xFF, 0xFE, 0, 3, 9, 0xFF, 0x01]);
    let (outcome, out) = transcode(&input, &RestartOptions::default()).unwrap();
    assert!(matches!(outcome, Outcome::Transcoded { .. }));
    assert!(out.ends_with(&tail) && out.starts_with(&[0xFF, 0xD8, 0xFF, 0xFF, 0xFF, 0xFE, 0, 3, 9, 0xFF, 0x01]));
    assert!(out[11..out.len() - tail.len()] == expected[2..expected.len() - 2]);
    assert!(transcode(&out, &RestartOptions::default()).unwrap().1 == out);
}

/// Offset of the first entropy-coded byte.
fn data_of(bytes: &[u8]) -> usize {
    let at = find(bytes, 0xDA);
    at + 2 + usize::from(bytes[at + 3])
}

#[test]
fn the_error_of_a_damaged_picture_says_where() {
    let plain = fixture("images/420.jpg");
    let restarts = fixture("images/restart.jpg");
    let (end, data) = (plain.len() - 2, data_of(&plain));
    let edit = |bytes: &[u8], edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.to_vec();
        edit(&mut bytes);
        bytes
    };
    let first = data_of(&restarts) + find(&restarts[data_of(&restarts)..], 0xD0);
    let cases = [
        ("nothing", vec![], ErrorKind::Truncated, 0, "too short to be recognised"),
        ("no end marker", plain[..end].to_vec(), ErrorKind::Truncated, end, "without an end marker"),
        ("cut in its data", plain[..data + 40].to_vec(), ErrorKind::Truncated, data + 40, "without an end marker"),
        (
            "data missing",
            edit(&plain, &|bytes| drop(bytes.drain(end - 60..end))),
            ErrorKind::Truncated,
            end - 60,
            "data ends before the picture is complete",
        ),
        (
            "data left over",
            edit(&plain, &|bytes| drop(bytes.splice(end..end, [0x55; 7]))),
            ErrorKind::Decode,
            end,
            "7 bytes of data are left",
        ),
        (
            "bytes between segments",
            edit(&plain, &|bytes| bytes.insert(find(bytes, 0xDB), 7)),
            ErrorKind::Decode,
            find(&plain, 0xDB),
            "a marker expected, 0x07 found",
        ),
        (
            "a restart marker that is missing",
            edit(&restarts, &|bytes| drop(bytes.drain(first..first + 2))),
            ErrorKind::Decode,
            0,
            "",
        ),
        (
            "a restart marker out of step",
            edit(&restarts, &|bytes| bytes[first + 1] = 0xD3),
            ErrorKind::Decode,
            first,
            "restart marker 0 expected, marker 0xd3 found",
        ),
        (
            "a restart marker that nobody announced",
            edit(&plain, &|bytes| drop(bytes.splice(end..end, [0xFF, 0xD0]))),
            ErrorKind::Decode,
            end,
            "the end of the picture expected",
        ),
        (
            "a picture that ends twice",
            edit(&plain, &|bytes| drop(bytes.drain(find(bytes, 0xDA)..end))),
            ErrorKind::Decode,
            find(&plain, 0xDA),
            "before its first scan",
        ),
    ];
    for (what, input, kind, offset, words) in cases {
        let error = transcode(&input, &RestartOptions::default()).err();
        let error = error.unwrap_or_else(|| panic!("{what} was accepted"));
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(error.to_string().contains(words), "{what}: {error}");
        assert!(offset == 0 || error.site().offset == Some(offset as u64), "{what}, expected at {offset}: {error}");
    }
}

#[test]
fn limits_are_checked_before_any_work() {
    let huge = {
        let mut bytes = fixture("images/420.jpg");
        let at = find(&bytes, 0xC0) + 5;
        bytes[at..at + 4].fill(0xFF);
        bytes
    };
    let error = transcode(&huge, &RestartOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit);
    assert!(error.to_string().contains("65535x65535"), "{error}");
    // Allowed, it ends with its data.
    let error = transcode(&huge, &RestartOptions::default().pixels_max(u64::MAX)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
    let plain = fixture("images/420.jpg");
    assert!(transcode(&plain, &RestartOptions::default().bytes_max(plain.len())).is_ok());
    let error = transcode(&plain, &RestartOptions::default().bytes_max(plain.len() - 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit);
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    for name in ["images/420.jpg", "images/restart.jpg", "images/gray.jpg"] {
        let input = fixture(name);
        for len in 0..input.len() {
            let mut out = vec![9; 10];
            let error = restart_jpeg(&input[..len], &RestartOptions::default(), &mut out).err();
            let error = error.unwrap_or_else(|| panic!("{name} cut to {len} bytes was accepted"));
            assert!(out.is_empty() && error.site().offset.is_some(), "{name} cut to {len}: {error}");
        }
    }
}

#[test]
fn a_changed_byte_never_changes_coefficients_silently() {
    let (mut transcoded, mut refused) = (0, 0);
    for name in ["images/420.jpg", "images/restart.jpg", "images/one-pixel.jpg"] {
        let plain = fixture(name);
        for at in places(0..plain.len(), 7) {
            for flip in [0x02, 0x80] {
                let mut input = plain.clone();
                input[at] ^= flip;
                match transcode(&input, &RestartOptions::default().pixels_max(1 << 20)) {
                    Ok((Outcome::Transcoded { .. }, out)) => {
                        let what = || format!("{name}, byte {at} ^ {flip:#x}");
                        let (before, _) = naive_jpeg::read(&input).unwrap_or_else(|e| panic!("{}: {e}", what()));
                        let (after, _) = naive_jpeg::read(&out).unwrap_or_else(|e| panic!("{}: {e}", what()));
                        assert!(before == after, "{}", what());
                        transcoded += 1;
                    }
                    Ok((_, out)) => assert!(out == input),
                    Err(error) => {
                        assert!(matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated | ErrorKind::Limit));
                        refused += 1;
                    }
                }
            }
        }
    }
    // Both cases must have occurred often.
    let least = sweep::size(100, 1000, 1000);
    assert!(transcoded > least && refused > least, "{transcoded} transcoded, {refused} refused");
}
