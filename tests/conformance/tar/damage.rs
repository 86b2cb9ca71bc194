//! Shards in memory with bytes flipped, cut off or zeroed anywhere give the right samples, an
//! error, or an entry of the ledger. By default every 7th byte and every 5th length.

use crate::common::sweep::{self, places};
use crate::common::{must_fail, must_say};
use feedline::dataset::{DamageKind, Dataset, DatasetExt, Framed, Tar, TarBuilder};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::unstable::fuzzing;
use feedline::{ErrorKind, Result};
use proptest::prelude::*;

/// Shards of some KB without padding, by Python's `tarfile`: ustar, GNU and PAX with long names.
const SMALL: [(&str, &[u8]); 3] = [
    ("ustar", include_bytes!("../../fixtures/tar/small.tar")),
    ("gnu", include_bytes!("../../fixtures/tar/small-gnu.tar")),
    ("pax", include_bytes!("../../fixtures/tar/small-pax.tar")),
];
/// Bits to flip in a byte, and bytes with a meaning in a header. (All 8 bits and 6 such bytes were
/// run once.)
const FLIPS: [u8; 4] = [0x01, 0x08, 0x20, 0xff];
const INSTEAD: [u8; 2] = [0, b'/'];

fn builder() -> TarBuilder {
    Tar::builder()
        .raw(Field::up_to("bin", DType::U8, 1000), "bin")
        .class("cls")
        .index(false)
}

/// Places of the fields of every sample.
fn rows(tar: &Tar) -> Vec<Vec<Option<(u64, u64)>>> {
    (0..tar.len())
        .map(|sample| fuzzing::tar_places(tar, sample))
        .collect()
}

/// Fields of a sample as the pipeline reads them if the shard now has these bytes; `None` for
/// fields that are cut off.
fn fields(tar: &Tar, sample: u64, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
    let mut fields = Vec::new();
    let extents = fuzzing::extents(tar, sample)?;
    assert_eq!(
        extents.len(),
        tar.schema().len(),
        "one for each field, which may be shared"
    );
    for (field, extent) in extents.into_iter().enumerate() {
        let Some(came) = bytes.get(extent.offset as usize..(extent.offset + extent.len) as usize)
        else {
            return Ok(None);
        };
        fields.push(tar.open(sample, field, came, &mut Vec::new())?.to_vec());
    }
    Ok(Some(fields))
}

fn all(tar: &Tar, bytes: &[u8]) -> Vec<Vec<Vec<u8>>> {
    (0..tar.len())
        .map(|sample| fields(tar, sample, bytes).unwrap().unwrap())
        .collect()
}

/// Every damaged version of a shard: a description of the damage, and the bytes.
fn damaged(shard: &[u8], mut see: impl FnMut(String, &[u8])) {
    let mut bytes = shard.to_vec();
    for at in places(0..shard.len(), 7) {
        let values: std::collections::BTreeSet<u8> = FLIPS
            .iter()
            .map(|bits| shard[at] ^ bits)
            .chain(INSTEAD)
            .collect();
        for value in values.into_iter().filter(|value| *value != shard[at]) {
            bytes[at] = value;
            see(format!("byte {at} is {value:#04x}"), &bytes);
        }
        bytes[at] = shard[at];
    }
    for len in places(0..shard.len(), 5) {
        see(format!("cut at {len}"), &shard[..len]);
    }
    let blocks = shard.len() / 512;
    for first in 0..blocks {
        for last in first..blocks {
            let range = first * 512..(last + 1) * 512;
            if shard[range.clone()].iter().any(|byte| *byte != 0) {
                let mut bytes = shard.to_vec();
                bytes[range].fill(0);
                see(format!("blocks {first} to {last} are zeroed"), &bytes);
            }
        }
    }
}

#[test]
fn the_index_of_the_intact_shard_finds_all_damage() {
    for (name, shard) in SMALL {
        let tar = builder().open_bytes(shard).unwrap();
        let right = all(&tar, shard);
        let mut cases = 0;
        let mut found = 0;
        damaged(shard, |what, bytes| {
            cases += 1;
            for sample in 0..tar.len() {
                match fields(&tar, sample, bytes) {
                    Ok(Some(fields)) => assert_eq!(
                        fields, right[sample as usize],
                        "{name}, sample {sample}: {what}"
                    ),
                    // A reader detects a shorter file.
                    Ok(None) => found += 1,
                    Err(error) => {
                        assert!(
                            matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated),
                            "{what}: {error}"
                        );
                        found += 1;
                    }
                }
            }
        });
        println!("{name}: {cases} damaged shards, {found} samples refused, 0 silent");
        assert!(cases > shard.len() * sweep::size(5, 35, 35) / 7 && found > 0);
    }
}

#[test]
fn no_lost_sample_is_silent_without_an_index() {
    for (name, shard) in SMALL {
        let intact = builder().open_bytes(shard).unwrap();
        let right = rows(&intact);
        let values = all(&intact, shard);
        let payload = |at: usize| {
            let mut places = right.iter().flatten().flatten();
            places.any(|(offset, len)| (*offset..offset + len).contains(&(at as u64)))
        };
        let mut cases = 0;
        let mut refused = 0;
        let mut same = 0;
        let mut other = 0;
        damaged(shard, |what, bytes| {
            cases += 1;
            match builder().open_bytes(bytes) {
                Err(error) => {
                    let kinds = [ErrorKind::Decode, ErrorKind::Truncated];
                    assert!(kinds.contains(&error.kind()), "{name}, {what}: {error}");
                    assert!(
                        error.site().offset.is_some() && error.site().path.is_some(),
                        "{error}"
                    );
                    refused += 1;
                    reported(&right, &format!("{name}, {what}"), bytes);
                }
                Ok(tar) => {
                    assert_eq!(rows(&tar), right, "{name}: {what}");
                    let is_right = |sample: u64| {
                        fields(&tar, sample, bytes).ok().flatten().as_ref()
                            == values.get(sample as usize)
                    };
                    if (0..tar.len()).all(is_right) {
                        same += 1;
                    } else {
                        other += 1;
                        let mut changed = (0..shard.len()).filter(|at| bytes[*at] != shard[*at]);
                        assert!(changed.any(payload), "{name}: {what}");
                    }
                }
            }
        });
        println!(
            "{name}: {cases} damaged shards: {refused} refused, {same} read as before, {other} with all samples in place but \
             other payload bytes (no checksum to tell), 0 with other samples"
        );
        assert!(refused > 0 && same > 0 && other > 0);
    }
}

/// Opens a refused shard with a ledger: present samples are right, missing samples are named.
fn reported(right: &[Vec<Option<(u64, u64)>>], what: &str, bytes: &[u8]) {
    match builder().skip_damage(true).open_bytes(bytes) {
        Ok(tar) => {
            assert!(
                !tar.damage().is_empty() && tar.len() <= right.len() as u64,
                "{what}"
            );
            let mut rest = right.iter();
            for row in rows(&tar) {
                assert!(
                    rest.any(|right| *right == row),
                    "{what}: {row:?} is no sample"
                );
            }
        }
        Err(error) => {
            assert!(
                error.kind() == ErrorKind::Empty && error.message().contains("damage"),
                "{what}: {error}"
            )
        }
    }
}

/// A header with a correct checksum.
fn header(name: &str, size: &[u8], flag: u8) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..124 + size.len()].copy_from_slice(size);
    block[156] = flag;
    block[257..265].copy_from_slice(b"ustar\x0000");
    sum(block)
}

fn sum(mut block: Vec<u8>) -> Vec<u8> {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn octal(size: usize) -> Vec<u8> {
    format!("{size:011o}\0").into_bytes()
}

fn padded(data: &[u8]) -> Vec<u8> {
    let mut bytes = data.to_vec();
    bytes.resize(data.len().next_multiple_of(512), 0);
    bytes
}

fn file(name: &str, data: &str) -> Vec<u8> {
    [
        header(name, &octal(data.len()), b'0'),
        padded(data.as_bytes()),
    ]
    .concat()
}

fn extension(flag: u8, data: &[u8]) -> Vec<u8> {
    [header("ext", &octal(data.len()), flag), padded(data)].concat()
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    extension(
        b'x',
        records
            .iter()
            .map(|(key, value)| {
                let rest = key.len() + value.len() + 3;
                let mut len = rest + 1;
                while len.to_string().len() + rest > len {
                    len += 1;
                }
                format!("{len} {key}={value}\n")
            })
            .collect::<String>()
            .as_bytes(),
    )
}

const END: [u8; 1024] = [0; 1024];

fn open(parts: &[&[u8]], skip_damage: bool) -> Result<Tar> {
    Tar::builder()
        .bytes("bin")
        .class("cls")
        .skip_damage(skip_damage)
        .open_bytes(parts.concat())
}

/// Puts `middle` between two good samples; gives the ledger and the number of samples left.
fn ledger(middle: &[&[u8]]) -> (Vec<(DamageKind, u64, u64)>, u64) {
    let before = [file("a.bin", "A"), file("a.cls", "1")].concat();
    let after = [file("z.bin", "Z"), file("z.cls", "26"), END.to_vec()].concat();
    let shard = [&[&before[..]], middle, &[&after[..]]].concat();
    let tar = open(&shard, true).unwrap();
    let refused = open(&shard, false);
    assert_eq!(refused.is_err(), !tar.damage().is_empty(), "{refused:?}");
    (
        tar.damage()
            .iter()
            .map(|damage| (damage.kind, damage.offset, damage.samples))
            .collect(),
        tar.len(),
    )
}

#[test]
fn ambiguous_members_are_damage() {
    use DamageKind::{Ambiguous, Header, Unsupported};
    let plain = file("m.bin", "M");
    let class = file("m.cls", "13");
    let ustar = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut block = header("m.bin", &octal(1), b'0');
        edit(&mut block);
        [sum(block), padded(b"M")].concat()
    };
    let cases: Vec<(&str, DamageKind, Vec<Vec<u8>>)> = vec![
        (
            "PAX size beside another size",
            Ambiguous,
            vec![pax(&[("size", "0")]), plain.clone()],
        ),
        (
            "PAX size, header 0",
            Ambiguous,
            vec![
                pax(&[("size", "1")]),
                header("m.bin", &octal(0), b'0'),
                padded(b"M"),
            ],
        ),
        (
            "GNU and PAX names",
            Ambiguous,
            vec![
                extension(b'L', b"m.bin\0"),
                pax(&[("path", "n.bin")]),
                plain.clone(),
            ],
        ),
        (
            "GNU name, PAX size",
            Ambiguous,
            vec![
                pax(&[("size", "1")]),
                extension(b'L', b"m.bin\0"),
                plain.clone(),
            ],
        ),
        (
            "two PAX headers",
            Ambiguous,
            vec![
                pax(&[("path", "m.bin")]),
                pax(&[("path", "n.bin")]),
                plain.clone(),
            ],
        ),
        (
            "two GNU names",
            Ambiguous,
            vec![
                extension(b'L', b"m.bin\0"),
                extension(b'L', b"n.bin\0"),
                plain.clone(),
            ],
        ),
        (
            "two paths in one",
            Ambiguous,
            vec![pax(&[("path", "m.bin"), ("path", "m.bin")]), plain.clone()],
        ),
        (
            "an empty path",
            Ambiguous,
            vec![pax(&[("path", "")]), plain.clone()],
        ),
        (
            "a NUL in a path",
            Ambiguous,
            vec![pax(&[("path", "m.bin\0x")]), plain.clone()],
        ),
        (
            "a path for all",
            Ambiguous,
            vec![extension(b'g', b"14 path=m.bin\n"), plain.clone()],
        ),
        (
            "a link with bytes",
            Ambiguous,
            vec![header("m.bin", &octal(1), b'1'), padded(b"M")],
        ),
        (
            "a folder with bytes",
            Ambiguous,
            vec![header("m.bin", &octal(1), b'5'), padded(b"M")],
        ),
        (
            "a file that ends like a folder",
            Ambiguous,
            vec![header("m.bin/", &octal(1), b'0'), padded(b"M")],
        ),
        (
            "a prefix in a v7 header",
            Ambiguous,
            vec![ustar(&|block| {
                block[257..265].fill(0);
                block[345] = b'p';
            })],
        ),
        (
            "a hidden long name of a short name that is not",
            Ambiguous,
            vec![pax(&[("path", ".m.bin")]), plain.clone()],
        ),
        (
            "sparse (GNU)",
            Unsupported,
            vec![header("m.bin", &octal(1), b'S'), padded(b"M")],
        ),
        (
            "sparse (PAX)",
            Unsupported,
            vec![pax(&[("GNU.sparse.major", "1")]), plain.clone()],
        ),
        (
            "a volume's rest",
            Unsupported,
            vec![header("m.bin", &octal(1), b'M'), padded(b"M")],
        ),
        (
            "an unknown flag",
            Unsupported,
            vec![header("m.bin", &octal(1), b'Q'), padded(b"M")],
        ),
        (
            "an unknown PAX keyword",
            Header,
            vec![pax(&[("pbth", "m.bin")]), plain.clone()],
        ),
        (
            "a PAX record too long",
            Header,
            vec![extension(b'x', b"99 path=m.bin\n"), plain.clone()],
        ),
        (
            "a PAX record without end",
            Header,
            vec![extension(b'x', b"14 path=m.bin "), plain.clone()],
        ),
        (
            "a PAX size in hexadecimal",
            Header,
            vec![pax(&[("size", "0x1")]), plain.clone()],
        ),
        (
            "a GNU name with more behind it",
            Header,
            vec![extension(b'L', b"m.bin\0n.bin\0"), plain.clone()],
        ),
        (
            "an endless name",
            Header,
            vec![header("ext", &octal(1 << 20), b'L'), plain.clone()],
        ),
        ("no size", Header, vec![header("m.bin", b"", b'0')]),
        (
            "a size with a letter",
            Header,
            vec![header("m.bin", b"00000000001x", b'0')],
        ),
        (
            "a size of digits with a gap",
            Header,
            vec![header("m.bin", b"0000 000001\0", b'0')],
        ),
        (
            "a negative size",
            Header,
            vec![header("m.bin", &[0xff; 12], b'0')],
        ),
        (
            "a size over 2^64",
            Header,
            vec![header("m.bin", b"\x80\0\0\x01\0\0\0\0\0\0\0\0", b'0')],
        ),
        (
            "an unknown magic",
            Header,
            vec![ustar(&|block| block[257] = b'U')],
        ),
        (
            "no name",
            Header,
            vec![header("", &octal(1), b'0'), padded(b"M")],
        ),
        (
            "a wrong checksum",
            Header,
            vec![{
                let mut block = plain.clone();
                block[0] ^= 1;
                block
            }],
        ),
    ];
    for (what, kind, mut middle) in cases {
        middle.push(class.clone());
        let middle: Vec<&[u8]> = middle.iter().map(Vec::as_slice).collect();
        let (damage, left) = ledger(&middle);
        let &[(found, offset, samples)] = &damage[..] else {
            panic!("{what}: {damage:?}")
        };
        assert_eq!(found, kind, "{what}");
        // The sample before is whole; m and z after it are lost.
        assert!(
            left == 1 && samples >= 1 && offset >= 2048,
            "{what}: {damage:?}, {left} left"
        );
    }
}

#[test]
fn members_that_all_readers_see_alike_are_read() {
    let long = format!("{}/m", "d".repeat(200));
    let bin = format!("{long}.bin");
    let cls = format!("{long}.cls");
    let v7 = |name: &str, data: &str| {
        let mut block = header(name, &octal(data.len()), 0);
        block[257..265].fill(0);
        [sum(block), padded(data.as_bytes())].concat()
    };
    let gnu_size = |name: &str, data: &str| {
        let mut size = [0; 12];
        size[0] = 0x80;
        size[11] = data.len() as u8;
        [header(name, &size, b'0'), padded(data.as_bytes())].concat()
    };
    let cases: Vec<Vec<Vec<u8>>> = vec![
        vec![file("m.bin", "M"), file("m.cls", "13")],
        vec![v7("m.bin", "M"), v7("m.cls", "13")],
        vec![gnu_size("m.bin", "M"), gnu_size("m.cls", "13")],
        vec![
            header("m.bin", b"          1 ", b'7'),
            padded(b"M"),
            file("m.cls", " 13\n"),
        ],
        vec![
            extension(b'L', bin.as_bytes()),
            file("x", "M"),
            extension(b'L', cls.as_bytes()),
            file("y", "13"),
        ],
        vec![
            pax(&[("path", &bin)]),
            file("x", "M"),
            pax(&[("mtime", "1.5"), ("path", &cls)]),
            file("y", "13"),
        ],
        vec![
            pax(&[("size", "1"), ("LIBARCHIVE.xattr.a", "\0")]),
            file("m.bin", "M"),
            file("m.cls", "+13"),
        ],
        vec![
            extension(b'g', b"17 comment=hello\n"),
            file("m.bin", "M"),
            file("m.cls", "13"),
        ],
        vec![
            pax(&[("mtime", "1.5")]),
            extension(b'L', b"m.bin\0"),
            file("x", "M"),
            file("m.CLS", "013"),
        ],
        vec![
            extension(b'K', b"target\0"),
            header("l", &octal(0), b'2'),
            file("m.cls", "13"),
            file("m.bin", "M"),
        ],
    ];
    for (case, middle) in cases.iter().enumerate() {
        let before = [file("a.bin", "A"), file("a.cls", "-1")].concat();
        let mut shard: Vec<&[u8]> = vec![&before];
        shard.extend(middle.iter().map(Vec::as_slice));
        shard.push(&END);
        let tar = open(&shard, false).unwrap_or_else(|error| panic!("case {case}: {error}"));
        assert_eq!(
            tar.read_sample(0).unwrap(),
            [b"A".to_vec(), (-1_i64).to_ne_bytes().to_vec()],
            "case {case}"
        );
        assert_eq!(
            tar.read_sample(1).unwrap(),
            [b"M".to_vec(), 13_i64.to_ne_bytes().to_vec()],
            "case {case}"
        );
        assert_eq!(tar.len(), 2);
    }
}

#[test]
fn half_and_doubled_samples_cost_only_themselves() {
    use DamageKind::{Duplicate, Incomplete};
    let bin = file("m.bin", "M");
    let cls = file("m.cls", "13");
    let n_bin = file("n.bin", "N");
    let n_cls = file("n.cls", "14");
    type Expected<'a> = &'a [(DamageKind, u64, u64)];
    let cases: [(&str, &[&[u8]], Expected<'_>, u64); 8] = [
        ("whole", &[&bin, &cls], &[], 3),
        ("no class", &[&bin], &[(Incomplete, 2048, 1)], 2),
        (
            "nothing that is asked for",
            &[&file("m.txt", "x")],
            &[(Incomplete, 2048, 1)],
            2,
        ),
        (
            "a member twice",
            &[&bin, &cls, &bin],
            &[(Duplicate, 2048, 1)],
            2,
        ),
        (
            "a key twice",
            &[&bin, &cls, &n_bin, &n_cls, &bin, &cls],
            &[(Duplicate, 6144, 1)],
            4,
        ),
        (
            "sorted by ending",
            &[&bin, &n_bin, &cls, &n_cls],
            &[
                (Incomplete, 2048, 1),
                (Incomplete, 3072, 1),
                (Duplicate, 4096, 1),
                (Duplicate, 5120, 1),
            ],
            2,
        ),
        (
            "a class that is no number by its length",
            &[&bin, &file("m.cls", "")],
            &[(Incomplete, 2048, 1)],
            2,
        ),
        (
            "another case of the same ending",
            &[&bin, &cls, &file("m.BIN", "M")],
            &[(Duplicate, 2048, 1)],
            2,
        ),
    ];
    for (what, middle, damage, left) in cases {
        assert_eq!(ledger(middle), (damage.to_vec(), left), "{what}");
    }
}

#[test]
fn the_end_of_a_shard_is_checked() {
    use DamageKind::{Cut, NoEnd, Trailing, Zeroed};
    let sample = [file("a.bin", "A"), file("a.cls", "1")].concat();
    let more = [file("b.bin", "B"), file("b.cls", "2")].concat();
    let zeroes = |len: usize| vec![0_u8; len];
    let mut late = zeroes(3000);
    late[2999] = 1;
    type Expected = Option<(DamageKind, u64, u64)>;
    let cases: Vec<(&str, Vec<Vec<u8>>, Expected)> = vec![
        ("marker", vec![zeroes(1024)], None),
        ("padded to 10,240", vec![zeroes(10_240 - 2048)], None),
        ("none", vec![], Some((NoEnd, 2048, 0))),
        ("half a marker", vec![zeroes(512)], Some((Cut, 2048, 0))),
        ("a bit of a marker", vec![zeroes(100)], Some((Cut, 2048, 0))),
        (
            "too many zeroes",
            vec![zeroes(4096)],
            Some((Zeroed, 2048, 0)),
        ),
        (
            "a whole record too many",
            vec![zeroes(20_480 - 2048)],
            Some((Zeroed, 2048, 0)),
        ),
        (
            "a second archive",
            vec![zeroes(1024), more.clone(), zeroes(1024)],
            Some((Trailing, 3072, 1)),
        ),
        (
            "a zeroed header",
            vec![zeroes(512), more[512..].to_vec(), zeroes(1024)],
            Some((Zeroed, 2560, 1)),
        ),
        (
            "bytes behind the end",
            vec![late],
            Some((Trailing, 5047, 0)),
        ),
    ];
    for (what, tail, expected) in cases {
        let mut shard: Vec<&[u8]> = vec![&sample];
        shard.extend(tail.iter().map(Vec::as_slice));
        let tar = open(&shard, true).unwrap();
        let damage: Vec<_> = tar
            .damage()
            .iter()
            .map(|d| (d.kind, d.offset, d.samples))
            .collect();
        assert_eq!(damage, Vec::from_iter(expected), "{what}");
        assert_eq!(tar.len(), 1, "{what}");
        assert_eq!(open(&shard, false).is_ok(), expected.is_none(), "{what}");
    }
    let odd = [&sample[..], &zeroes(4096)].concat();
    assert!(
        Tar::builder()
            .bytes("bin")
            .padding(6144)
            .open_bytes(odd)
            .is_ok()
    );
}

#[test]
fn a_sample_before_damage_is_kept_only_if_surely_whole() {
    let mut broken = file("a.txt", "x");
    broken[3] ^= 1;
    let shard = [file("a.bin", "A"), broken, END.to_vec()].concat();
    let whole = Tar::builder().bytes("bin").skip_damage(true);
    assert_eq!(whole.clone().open_bytes(&*shard).unwrap().len(), 1);
    // The broken member may have been the optional one.
    must_fail(
        whole.bytes("txt").optional().open_bytes(&*shard),
        ErrorKind::Empty,
        "sample \"a\" is incomplete",
    );
}

#[test]
fn a_ledger_of_endless_damage_is_bounded_and_adds_up() {
    let members: Vec<Vec<u8>> = (0..3000).map(|k| file(&format!("{k}.bin"), "x")).collect();
    let shard = [
        members.concat(),
        file("z.bin", "Z"),
        file("z.cls", "1"),
        END.to_vec(),
    ]
    .concat();
    let tar = open(&[&shard], true).unwrap();
    assert_eq!((tar.len(), tar.damage().len()), (1, 1001));
    assert_eq!(
        tar.damage()
            .iter()
            .map(|damage| damage.samples)
            .sum::<u64>(),
        3000
    );
    let last = tar.damage().last().unwrap();
    assert_eq!(last.offset + last.len, 3000 * 1024);
    must_say(open(&[&shard], false), "and 1000 more");
}

#[test]
fn errors_name_the_member_and_its_place() {
    let shard = [file("k/a.bin", "A"), file("k/a.cls", "one"), END.to_vec()].concat();
    let tar = open(&[&shard], false).unwrap();
    let error = fields(&tar, 0, &shard).unwrap_err();
    let words = "decode: cannot decode: a whole number expected, \"one\" found: path=<memory> member=k/a.cls offset=1536 \
                 len=3 sample=0";
    assert_eq!(error.to_string(), words);
    let mut changed = shard.clone();
    changed[512] = b'B';
    let error = fields(&tar, 0, &changed).unwrap_err();
    assert!(error.message().starts_with("CRC32C"), "{error}");
    assert_eq!(error.site().member.as_deref(), Some("k/a.bin"));
    assert_eq!(
        (error.site().offset, error.site().len, error.site().sample),
        (Some(512), Some(1), Some(0))
    );
    assert_eq!(tar.member_name(0, 1).unwrap(), "k/a.cls");
    assert_eq!(tar.member_name(1, 0).unwrap_err().kind(), ErrorKind::Empty);
}

#[test]
fn impossible_settings_are_refused() {
    let shard = [file("a.jpg", "A"), file("a.png", "A"), END.to_vec()].concat();
    let raw = |name: &str| Field::fixed(name, DType::U8, [1]);
    let cases = [
        (
            Tar::builder(),
            "cannot infer the fields from the first sample, which has jpg, png",
        ),
        (
            Tar::builder().image("jpg").class("jpg"),
            "the second is `label`",
        ),
        (Tar::builder().image("jpg;"), "empty"),
        (
            Tar::builder()
                .image("jpg")
                .field(EncodedField::image("image"), "png"),
            "two fields are called",
        ),
        (
            Tar::builder().raw(raw("x"), "jpg").optional(),
            "cannot be optional",
        ),
        (
            Tar::builder().bytes("jpg").optional(),
            "every field is optional",
        ),
        (
            (0..17).fold(Tar::builder(), |builder, k| builder.bytes(&format!("e{k}"))),
            "17 fields",
        ),
    ];
    for (builder, words) in cases {
        let error = builder.open_bytes(&*shard).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    // The choice between two pictures is ambiguous; a builder can name one.
    assert_eq!(
        Tar::builder()
            .image("jpg;png")
            .open_bytes(&*shard)
            .unwrap_err()
            .kind(),
        ErrorKind::Decode
    );
    let one = Tar::builder().image("jpg").open_bytes(&*shard).unwrap();
    assert_eq!(one.left_out().get(".png"), Some(&1));
    assert!(
        one.describe().ends_with("; left out: 1 .png"),
        "{}",
        one.describe()
    );
    must_say(
        Tar::builder()
            .image("jpg")
            .open_bytes(&b"\x1f\x8b\x08and so on"[..]),
        "gzip",
    );
    // Without named fields the error also blames the file, not the settings.
    for (bytes, words) in [
        (&b"\x1f\x8b\x08and so on"[..], "gzip"),
        (&[b'x'; 1024][..], "not a header"),
    ] {
        for skip_damage in [false, true] {
            let error = Tar::builder()
                .skip_damage(skip_damage)
                .open_bytes(bytes)
                .unwrap_err();
            assert!(
                error.kind() != ErrorKind::Config && error.to_string().contains(words),
                "{error}"
            );
        }
    }
}

proptest! {
    #![proptest_config(sweep::cases(2000))]

    #[test]
    fn no_header_reaches_outside_the_shard(
        shard in 0_usize..3,
        edits in prop::collection::vec((0_usize..9216, any::<u8>()), 1..6),
        digits in prop::collection::vec((0_usize..18, 124_usize..136, b'0'..=b'9'), 0..4),
    ) {
        let mut bytes = SMALL[shard].1.to_vec();
        for (at, byte) in edits {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        for (block, at, digit) in digits {
            let at = block * 512 % bytes.len() + at;
            bytes[at] = digit;
        }
        for block in bytes.chunks_mut(512) {
            // Every block that can pass as a header.
            if block[257..262] == *b"ustar" {
                block.copy_from_slice(&sum(block.to_vec()));
            }
        }
        let Ok(tar) = builder().skip_damage(true).open_bytes(&*bytes) else { return Ok(()) };
        let mut end = 0;
        for row in rows(&tar) {
            for (offset, len) in row.into_iter().flatten() {
                prop_assert!(offset >= end && offset % 512 == 0 && offset + len <= bytes.len() as u64);
                end = offset + len;
            }
        }
        let lost: u64 = tar.damage().iter().map(|damage| damage.samples).sum();
        prop_assert!(tar.len() + lost <= bytes.len() as u64 / 512);
        for sample in 0..tar.len() {
            let _ = (fields(&tar, sample, &bytes), tar.member_name(sample, 0));
        }
    }
}
