//! Files of facts with checksums: kept, compared, damaged and made again.

use super::*;
use crate::dataset::DatasetExt;
use feedline_core::dataset::{Framed, Sizes};
use feedline_core::storage::{Extent, SourceId, Sources};
use feedline_core::tensor::{DType, EncodedField};
use feedline_formats::{Images, Records, Tar};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("feedline-checked-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|k| (k * k / 7 + k) as u8).collect()
}

fn all(dataset: &impl Dataset) -> Vec<Result<Vec<Vec<u8>>>> {
    let samples = 0..dataset.len();
    samples.map(|sample| dataset.read_sample(sample)).collect()
}

fn right(dataset: &impl Dataset) -> Vec<Vec<Vec<u8>>> {
    all(dataset).into_iter().map(Result::unwrap).collect()
}

/// Files of facts with checksums of a dataset.
fn checked<D: Dataset>(dataset: D, place: &Path) -> Result<Facts<D>> {
    dataset.facts(place).checksums().open()
}

fn anew<D: Dataset>(dataset: D, place: &Path) -> Facts<D> {
    dataset.facts(place).checksums().anew().open().unwrap()
}

#[track_caller]
fn assert_error(error: &Error, kind: ErrorKind, words: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(words), "{words}: {error}");
}

fn set_modified(path: &Path, time: std::time::SystemTime) {
    let file = File::options().append(true).open(path).unwrap();
    file.set_modified(time).unwrap();
}

#[test]
fn every_flip_and_cut_of_records_names_its_sample() {
    let dir = Dir::new();
    let path = dir.0.join("records");
    let place = dir.0.join("records.crc");
    let shard = bytes(16 + 40 * 32);
    std::fs::write(&path, &shard).unwrap();
    let labelled = || Records::builder(32).header(16).classes((0..40).collect());
    let open = || checked(labelled().open(&path).unwrap(), &place).unwrap();
    let checked = open();
    assert!(checked.built() && !open().built());
    let expected = right(checked.inner());
    assert_eq!(right(&checked), expected);
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let write = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        set_modified(&path, modified);
    };
    for at in 0..shard.len() {
        for bits in [0x01, 0x10, 0xff] {
            let mut bytes = shard.clone();
            bytes[at] ^= bits;
            write(&bytes);
            let mut wrong = Vec::new();
            for (sample, found) in all(&checked).into_iter().enumerate() {
                match found {
                    Ok(found) => assert_eq!(found, expected[sample], "byte {at}"),
                    Err(error) => {
                        assert_error(&error, ErrorKind::Decode, "field `record`: CRC32C");
                        assert_eq!(error.site().sample, Some(sample as u64));
                        wrong.push(sample);
                    }
                }
            }
            // The header belongs to no sample.
            let hit = Vec::from_iter(at.checked_sub(16).map(|at| at / 32));
            assert_eq!(wrong, hit, "byte {at}");
        }
    }
    // Time and length are the same: the index still applies.
    let again = open();
    assert!(!again.built() && all(&again).iter().any(Result::is_err));
    for len in 0..shard.len() {
        write(&shard[..len]);
        for found in all(&checked) {
            let kind = found.unwrap_err().kind();
            assert_eq!(kind, ErrorKind::Changed, "cut at {len}");
        }
        // 40 labels for fewer records.
        let kind = labelled().open(&path).err().unwrap().kind();
        let legal = [ErrorKind::Truncated, ErrorKind::Shape, ErrorKind::Empty];
        assert!(legal.contains(&kind), "cut at {len}: {kind:?}");
    }
}

#[test]
fn damaged_checksum_files_are_refused_and_kept() {
    let dir = Dir::new();
    let path = dir.0.join("records");
    let place = dir.0.join("records.crc");
    std::fs::write(&path, bytes(64)).unwrap();
    let records = || Records::builder(8).classes(vec![5; 8]).open(&path).unwrap();
    let open = || checked(records(), &place);
    let expected = right(&open().unwrap());
    let whole = std::fs::read(&place).unwrap();
    let mut hostile: Vec<Vec<u8>> = (0..whole.len()).map(|len| whole[..len].to_vec()).collect();
    for at in 0..whole.len() {
        for bits in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= bits;
            hostile.push(bytes);
        }
    }
    for (case, bytes) in hostile.iter().enumerate() {
        std::fs::write(&place, bytes).unwrap();
        match open() {
            // An empty file counts as missing.
            Ok(checked) => {
                assert_eq!(checked.built(), bytes.is_empty(), "case {case}");
                assert_eq!(right(&checked), expected, "case {case}");
            }
            Err(error) => {
                let (kind, hint) = match bytes.starts_with(&whole[..bytes.len().min(8)]) {
                    true => (ErrorKind::Decode, "FactsBuilder::anew"),
                    false => (ErrorKind::Config, "not overwritten"),
                };
                let is_named = error.to_string().contains(hint);
                assert!(error.kind() == kind && is_named, "case {case}: {error}");
                assert_eq!(std::fs::read(&place).unwrap(), *bytes, "case {case}");
            }
        }
    }
    let anew = anew(records(), &place);
    assert!(anew.built() && right(&anew) == expected);
    assert_eq!(std::fs::read(&place).unwrap(), whole);
}

#[test]
fn other_lengths_and_labels_are_refused_until_made_again() {
    let dir = Dir::new();
    let path = dir.0.join("records");
    let place = dir.0.join("sub/records.crc");
    std::fs::write(&path, bytes(64)).unwrap();
    let records = |class| {
        let builder = Records::builder(8).classes(vec![class; 8]);
        builder.open(&path).unwrap()
    };
    let open = |class| checked(records(class), &place);
    let built = |class| open(class).unwrap().built();
    assert_eq!([built(1), built(1)], [true, false]);
    // The same file with other labels is damage or another dataset. It is never accepted.
    assert_eq!(open(2).unwrap_err().kind(), ErrorKind::Changed);
    set_modified(&path, std::time::UNIX_EPOCH);
    assert_eq!(open(2).unwrap_err().kind(), ErrorKind::Changed);
    let relabelled = anew(records(2), &place);
    assert_eq!([relabelled.built(), built(2)], [true, false]);
    std::fs::write(&path, bytes(65)).unwrap();
    let kept = std::fs::read(&place).unwrap();
    let longer = || Records::builder(13).open(&path).unwrap();
    let error = checked(longer(), &place).unwrap_err();
    assert_error(&error, ErrorKind::Changed, "FactsBuilder::anew");
    assert_eq!(std::fs::read(&place).unwrap(), kept);
    let records = anew(longer(), &place);
    assert!(records.built() && right(&records).len() == 5);
    // A mistaken name does not destroy a file.
    for other in [&path, &dir.0.join("other")] {
        std::fs::write(other, bytes(65)).unwrap();
        let error = checked(longer(), other).unwrap_err();
        assert_error(&error, ErrorKind::Config, "not overwritten");
        assert_eq!(std::fs::read(other).unwrap(), bytes(65));
    }
    let unwritable = checked(longer(), &path.join("sub"));
    assert!(unwritable.unwrap_err().to_string().contains("records/sub"));
}

#[test]
fn a_copy_is_compared_and_a_damaged_copy_is_refused() {
    let dir = Dir::new();
    let place = dir.0.join("records.crc");
    let shards = [bytes(64), bytes(80)];
    let write = |folder: &str, shards: &[Vec<u8>; 2]| {
        std::fs::create_dir_all(dir.0.join(folder)).unwrap();
        for (number, shard) in shards.iter().enumerate() {
            std::fs::write(dir.0.join(folder).join(format!("{number}.bin")), shard).unwrap();
        }
    };
    let records = |folder: &str| Records::builder(8).open(dir.0.join(folder)).unwrap();
    write("data", &shards);
    let open = |folder| checked(records(folder), &place);
    assert!(open("data").unwrap().built());
    write("copy", &shards);
    let copy = open("copy").unwrap();
    assert!(!copy.built(), "{copy:?}");
    let what = copy.describe();
    assert!(what.contains("compared now with all bytes"), "{what}");
    // A compared copy is not compared again.
    assert!(open("copy").unwrap().describe().contains("CRC32Cs from"));
    let kept = std::fs::read(&place).unwrap();
    let mut damaged = shards.clone();
    for (shard, at) in [(0, 17), (1, 79), (1, 3)] {
        damaged[shard][at] = !damaged[shard][at];
    }
    write("damaged", &damaged);
    let error = open("damaged").unwrap_err();
    let site = error.site();
    assert_eq!(error.kind(), ErrorKind::Changed);
    let found = (site.offset, site.len, site.sample);
    assert_eq!(found, (Some(16), Some(8), Some(2)));
    assert_eq!(site.path, Some(dir.0.join("damaged/0.bin")));
    for words in [
        "3 of 18 checksums differ",
        "damaged/0.bin at byte 16",
        "damaged/1.bin at byte 0",
        "FactsBuilder::anew",
    ] {
        assert!(error.message().contains(words), "{error}");
    }
    assert_eq!(std::fs::read(&place).unwrap(), kept);
    assert!(anew(records("damaged"), &place).built());
    let samples = right(&open("damaged").unwrap());
    assert_eq!(samples[2][0], damaged[0][16..24]);
}

#[test]
fn a_dataset_that_opens_its_bytes_can_be_checked() {
    let dir = Dir::new();
    for (name, len) in [("a/1.jpg", 100), ("a/2.jpg", 5000), ("b/1.jpg", 3_000_000)] {
        let path = dir.0.join("images").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes(len)).unwrap();
    }
    let images = || Images::open(dir.0.join("images")).unwrap();
    let expected = right(&images());
    let pictures = checked(images(), &dir.0.join("images.crc")).unwrap();
    assert_eq!(right(&pictures), expected);
    std::fs::write(dir.0.join("images/b/1.jpg"), vec![1; 3_000_000]).unwrap();
    let found: Vec<_> = all(&pictures).iter().map(Result::is_ok).collect();
    assert_eq!(found, [true, true, false]);

    let shard: &[u8] = include_bytes!("../../../../tests/fixtures/tar/small.tar");
    let tar = || {
        let builder = Tar::builder().checksums(false).bytes("bin").class("cls");
        builder.open_bytes(shard).unwrap()
    };
    let open = || checked(tar(), &dir.0.join("tar.crc")).unwrap();
    assert_eq!(right(&open()), right(&tar()));
    // A split keeps the whole's checksums.
    let (first, _) = open().split(0.5, 1).unwrap();
    assert!(all(&first).iter().all(Result::is_ok));
}

#[test]
fn fields_framed_in_only_some_samples_are_checked() {
    /// Sample 0 is raw, sample 1 framed, sample 2 inline; framed bytes are opened to their reverse.
    struct Mixed(Records);
    impl Dataset for Mixed {
        fn schema(&self) -> &[EncodedField] {
            self.0.schema()
        }
        fn len(&self) -> u64 {
            3
        }
        fn sources(&self) -> &Arc<Sources> {
            self.0.sources()
        }
        fn sizes(&self) -> Sizes {
            Sizes {
                opened_bytes_max: 4,
                ..Sizes::new(4)
            }
        }
        fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
            let extent = Extent {
                source: SourceId::at(0),
                offset: sample * 4,
                len: 4,
            };
            match sample {
                0 => parts.extent(0, extent),
                1 => parts.framed(0, extent),
                _ => parts.inline(0, b"here"),
            }
            Ok(())
        }
        fn framed(&self) -> Option<&dyn Framed> {
            Some(self)
        }
    }

    impl Framed for Mixed {
        fn open<'a>(
            &self,
            _: u64,
            _: usize,
            bytes: &'a [u8],
            buffer: &'a mut Vec<u8>,
        ) -> Result<&'a [u8]> {
            buffer.extend(bytes.iter().rev());
            Ok(buffer)
        }
    }
    let dir = Dir::new();
    let records = Records::builder(4)
        .field("x", DType::U8, [4])
        .open_bytes(*b"abcdefgh")
        .unwrap();
    let place = dir.0.join("mixed.crc");
    let mixed = checked(Mixed(records), &place).unwrap();
    let expected = [b"abcd", b"hgfe", b"here"].map(|bytes| [bytes.to_vec()]);
    assert_eq!(right(&mixed), expected);
}
