//! The GPU kernels, run on the CPU from their own source, against `Finish` on the host and a plain
//! copy; and `Finish` against the image decoder, which follows the same rule. Every buffer lies
//! between canaries and inaccessible pages.

use crate::common::kernels;
use crate::common::kernels::{At, Guarded, place};
use crate::common::noise;
use crate::common::sweep;
use feedline::device::Finish;
use feedline::tensor::{DType, Field};
use proptest::prelude::*;

/// Output dtypes and layouts of pictures.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Pictures to finish, with settings.
#[derive(Clone, Debug)]
struct Pictures {
    dtype: DType,
    channels_first: bool,
    /// Rows, height, width, channels.
    sizes: [usize; 4],
    mean: Vec<f32>,
    std: Vec<f32>,
    flips: Option<Vec<u8>>,
    bytes: Vec<u8>,
}

impl Pictures {
    fn finish(&self) -> Finish {
        let finish = Finish::to(self.dtype).mean_std(&self.mean, &self.std);
        if self.channels_first {
            finish.channels_first()
        } else {
            finish
        }
    }

    fn expected(&self) -> Vec<u8> {
        let [rows, height, width, channels] = self.sizes;
        let input = Field::fixed("image", DType::U8, [height, width, channels]);
        let mut out = vec![0; self.bytes.len() * self.dtype.size()];
        self.finish()
            .apply(&input, rows, &self.bytes, self.flips.as_deref(), &mut out)
            .unwrap();
        out
    }

    /// The kernel's table: the planes of a picture in which every channel has every value.
    fn table(&self) -> Vec<u8> {
        let channels = self.sizes[3];
        let input = Field::fixed("image", DType::U8, [1, 256, channels]);
        let bytes: Vec<u8> = (0..=255)
            .flat_map(|x| std::iter::repeat_n(x, channels))
            .collect();
        let mut table = vec![0; bytes.len() * self.dtype.size()];
        self.finish()
            .channels_first()
            .apply(&input, 1, &bytes, None, &mut table)
            .unwrap();
        table
    }

    /// Output of the kernel; `None` without a compiler. `out` is aligned to the dtype.
    fn by_kernel(&self, input: At, out: At, launch: [[u32; 2]; 2]) -> Option<Vec<u8>> {
        let name = format!("feedline_finish_{}", self.dtype.size());
        let mut input = Guarded::new(&self.bytes, input);
        let mut out = Guarded::new(&vec![0x5a; self.bytes.len() * self.dtype.size()], out);
        let mut flips = Guarded::new(self.flips.as_deref().unwrap_or_default(), At::End(0));
        let sizes = self.sizes.map(|size| size as u32);
        let table = Guarded::new(&self.table(), At::End(0));
        let channels_first = i32::from(self.channels_first);
        let pointers = (input.as_ptr(), out.as_mut_ptr(), table.as_ptr());
        let flips_pointer = if self.flips.is_some() {
            flips.as_ptr()
        } else {
            std::ptr::null()
        };
        let params = [
            place(&pointers.0),
            place(&pointers.1),
            place(&flips_pointer),
            place(&pointers.2),
            place(&sizes[0]),
            place(&sizes[1]),
            place(&sizes[2]),
            place(&sizes[3]),
            place(&channels_first),
        ];
        // SAFETY: the parameters are those of the kernel; the arrays have the lengths that `sizes`
        // says.
        #[allow(unsafe_code)]
        unsafe {
            kernels::run(&name, launch, &params, Some(&input))?;
        }
        input.check();
        flips.check();
        out.check();
        assert_eq!(*input, self.bytes[..]);
        Some(out.to_vec())
    }
}

fn pictures() -> impl Strategy<Value = Pictures> {
    // Widths of whole groups of four and others, lines and planes of one value.
    let width = prop_oneof![1usize..14, (1usize..6).prop_map(|groups| 4 * groups)];
    let flips = |rows: usize| proptest::option::of(proptest::collection::vec(0u8..3, rows));
    (1usize..5, 1usize..6, width, 1usize..5).prop_flat_map(
        move |(rows, height, width, channels)| {
            (
                proptest::sample::select(DTYPES.to_vec()),
                any::<bool>(),
                proptest::collection::vec(-2.0f32..2.0, channels),
                proptest::collection::vec(prop_oneof![0.001f32..3.0, 100.0f32..60_000.0], channels),
                flips(rows),
                proptest::collection::vec(any::<u8>(), rows * height * width * channels),
            )
                .prop_map(move |(dtype, channels_first, mean, std, flips, bytes)| {
                    let sizes = [rows, height, width, channels];
                    Pictures {
                        dtype,
                        channels_first,
                        sizes,
                        mean,
                        std,
                        flips,
                        bytes,
                    }
                })
        },
    )
}

fn at(apart: impl Strategy<Value = usize> + Clone) -> impl Strategy<Value = At> {
    prop_oneof![apart.clone().prop_map(At::Start), apart.prop_map(At::End)]
}

fn launch() -> impl Strategy<Value = [[u32; 2]; 2]> {
    (1u32..4, 1u32..4, 1u32..70).prop_map(|(x, y, threads)| [[x, y], [threads, 1]])
}

proptest! {
    #![proptest_config(sweep::cases(2000))]

    #[test]
    fn finish_on_the_gpu_equals_finish_on_the_cpu(
        pictures in pictures(),
        input in at(0usize..17),
        out in at((0usize..9).prop_map(|apart| 4 * apart)),
        launch in launch(),
    ) {
        let made = pictures.by_kernel(input, out, launch);
        prop_assert!(made.is_none_or(|made| made == pictures.expected()));
    }

    #[test]
    fn gather_is_a_copy_of_each_row(
        (row_bytes, rows) in prop_oneof![(0usize..70, 0usize..9), (100usize..400, 1usize..5)],
        seed in any::<u64>(),
        spare in 0usize..40,
        ends in any::<bool>(),
        places in proptest::collection::vec(any::<prop::sample::Index>(), 9),
        staging in at((0usize..9).prop_map(|words| 4 * words)),
        out in at(0usize..17),
        (grid, block) in ([1u32..4, 1u32..4], [1u32..20, 1u32..5]),
    ) {
        let staging = Guarded::new(&noise(row_bytes + spare, seed), staging);
        let mut offsets: Vec<u64> = places[..rows].iter().map(|place| place.index(spare + 1) as u64).collect();
        if let (true, Some(last)) = (ends, offsets.last_mut()) {
            *last = spare as u64;
        }
        check_gather(staging, &offsets, row_bytes, out, [grid, block]);
    }
}

/// Rows of `staging` at `offsets` against copies of them.
fn check_gather(
    mut staging: Guarded,
    offsets: &[u64],
    row_bytes: usize,
    out: At,
    launch: [[u32; 2]; 2],
) {
    let before = staging.to_vec();
    let mut expected = vec![0; row_bytes * offsets.len()];
    for (row, offset) in offsets.iter().enumerate() {
        expected[row * row_bytes..][..row_bytes]
            .copy_from_slice(&before[*offset as usize..][..row_bytes]);
    }
    let mut out = Guarded::new(&vec![0x5a; expected.len()], out);
    let bytes: Vec<u8> = offsets
        .iter()
        .flat_map(|offset| offset.to_ne_bytes())
        .collect();
    let offsets = Guarded::new(&bytes, At::End(0));
    let pointers = (staging.as_ptr(), offsets.as_ptr(), out.as_mut_ptr());
    let numbers = (row_bytes as u64, (bytes.len() / 8) as u64);
    let params = [
        place(&pointers.0),
        place(&pointers.1),
        place(&pointers.2),
        place(&numbers.0),
        place(&numbers.1),
    ];
    // SAFETY: the parameters are those of the kernel; each row lies in `staging`, which ends with a
    // whole word.
    #[allow(unsafe_code)]
    let ran = unsafe { kernels::run("feedline_gather", launch, &params, Some(&staging)) };
    staging.check();
    out.check();
    assert!(*staging == before[..]);
    assert!(ran.is_none() || *out == expected[..]);
}

#[test]
fn gather_reads_no_word_outside_the_row() {
    // Rows that fill their buffer, at every alignment of both sides, next to inaccessible memory.
    for row_bytes in (1..36).chain([47, 48, 64, 255]) {
        for (apart, place) in
            (0..16).flat_map(|apart| (0..17).map(move |from| (apart, At::Start(from))))
        {
            let staging = Guarded::new(&noise(row_bytes, 7), place);
            check_gather(staging, &[0], row_bytes, At::End(apart), [[1, 1], [3, 1]]);
        }
        for apart in 0..16 {
            let staging = Guarded::new(&noise(row_bytes, 7), At::End(0));
            check_gather(
                staging,
                &[0, 0, 0],
                row_bytes,
                At::End(apart),
                [[1, 2], [3, 1]],
            );
        }
    }
}

#[test]
fn gather_finds_rows_beyond_4_gib() {
    // Memory that is never written takes no room, so the map costs a few pages.
    let len = (5 << 30) + 64;
    let mut map = memmap2::MmapOptions::new()
        .len(len)
        .no_reserve_swap()
        .map_anon()
        .unwrap();
    let row = noise(61, 3);
    let offsets = [(4u64 << 30) + 3, (5 << 30) + 1, 2];
    for offset in offsets {
        map[offset as usize..][..row.len()].copy_from_slice(&row);
    }
    let mut out = vec![0; row.len() * offsets.len()];
    let pointers = (map.as_ptr(), offsets.as_ptr(), out.as_mut_ptr());
    let numbers = (row.len() as u64, offsets.len() as u64);
    let params = [
        place(&pointers.0),
        place(&pointers.1),
        place(&pointers.2),
        place(&numbers.0),
        place(&numbers.1),
    ];
    // SAFETY: the parameters are those of the kernel; each row lies in `map`, which ends with a
    // whole word.
    #[allow(unsafe_code)]
    let ran = unsafe { kernels::run("feedline_gather", [[1, 1], [4, 4]], &params, None) };
    assert!(ran.is_none() || out == row.repeat(3));
}

#[test]
fn every_value_of_every_channel_is_the_same_on_both_sides() {
    for dtype in DTYPES {
        for (channels_first, channels) in
            (1..5).flat_map(|channels| [(false, channels), (true, channels)])
        {
            // By four pixels and by one; more and fewer threads than a table has words.
            for (sizes, threads) in [
                ([1, 16, 16, channels], 256),
                ([1, 2, 128, channels], 5),
                ([1, 256, 1, channels], 32),
            ] {
                let value = |x: u8, c: usize| x.wrapping_add(60 * c as u8);
                let bytes = (0..=255)
                    .flat_map(|x| (0..channels).map(move |c| value(x, c)))
                    .collect();
                let mean = [0.485, 0.1, -0.2, 1.5];
                let std = [0.229, 3.0, 0.01, 1.0];
                let mean = mean[..channels].to_vec();
                let std = std[..channels].to_vec();
                let flips = Some(vec![1]);
                let pictures = Pictures {
                    dtype,
                    channels_first,
                    sizes,
                    mean,
                    std,
                    flips,
                    bytes,
                };
                let made = pictures.by_kernel(At::End(0), At::End(0), [[2, 1], [threads, 1]]);
                assert!(
                    made.is_none_or(|made| made == pictures.expected()),
                    "{dtype} {channels_first} {sizes:?}"
                );
            }
        }
    }
}

/// A BMP of 16 x 16 pixels in which every channel has every value.
fn bmp() -> Vec<u8> {
    let header = [54u32, 40, 16, 16, 1 | 24 << 16, 0, 768, 0, 0, 0, 0];
    let mut bytes = b"BM".to_vec();
    for number in [822, 0].into_iter().chain(header) {
        bytes.extend(u32::to_le_bytes(number));
    }
    bytes.extend((0..=255u8).flat_map(|x| [x, x.wrapping_mul(5), x.wrapping_add(60)]));
    bytes
}

#[test]
fn a_picture_finished_late_equals_the_decoders() {
    use feedline::decode::Single;
    use feedline::decode::{Image, PixelLayout};
    use feedline::tensor::EncodedField;

    let decoded = |image: Image, encoded: &[u8]| {
        let mut single = Single::new(image, &EncodedField::image("image")).unwrap();
        single.decode(encoded, 1, 2, 3).unwrap();
        (single.fields()[0].clone(), single.bytes(0).to_vec())
    };
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/images");
    let [photo, drawing] =
        ["420.jpg", "rgb.png"].map(|name| std::fs::read(folder.join(name)).unwrap());
    let sources = [
        (bmp(), Image::resize(16, 16)),
        (photo, Image::random_resized_crop(21)),
        (drawing, Image::center_crop(30, 24)),
    ];
    let moments = [
        None,
        Some(([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])),
        Some(([0.5, -0.1, 2.0], [0.5, 3.0, 0.01])),
    ];
    for (source, (encoded, image)) in sources.iter().enumerate() {
        let (input, pixels) = decoded(image.clone(), encoded);
        if source == 0 {
            let all = |c: usize| {
                (0..=255).all(|x| pixels.iter().skip(c).step_by(3).any(|pixel| *pixel == x))
            };
            assert!((0..3).all(all), "the decoder keeps every value");
        }
        let ways = DTYPES
            .into_iter()
            .flat_map(|dtype| [false, true].map(|channels_first| (dtype, channels_first)));
        let ways = ways.flat_map(|(dtype, first)| [false, true].map(|flip| (dtype, first, flip)));
        for ((dtype, channels_first, flip), moments) in
            ways.flat_map(|way| moments.map(|moments| (way, moments)))
        {
            let layout = if channels_first {
                PixelLayout::Nchw
            } else {
                PixelLayout::Nhwc
            };
            let mut image =
                image
                    .clone()
                    .dtype(dtype)
                    .layout(layout)
                    .flip(if flip { 1.0 } else { 0.0 });
            let mut finish = Finish::to(dtype);
            if let Some((mean, std)) = moments {
                image = image.normalize(mean, std);
                finish = finish.mean_std(&mean, &std);
            }
            let finish = if channels_first {
                finish.channels_first()
            } else {
                finish
            };
            let (field, expected) = decoded(image, encoded);
            assert_eq!(finish.output(&input).unwrap(), field);
            let mut out = vec![0x5a; expected.len()];
            finish
                .apply(&input, 1, &pixels, Some(&[u8::from(flip)]), &mut out)
                .unwrap();
            assert!(
                out == expected,
                "picture {source}, {dtype}, {layout:?}, flip {flip}, {moments:?}"
            );
        }
    }
}
