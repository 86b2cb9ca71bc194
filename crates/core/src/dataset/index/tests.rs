//! Index files: used, refused, made again.

use super::file::{ENDING, NOTES_MAX};
use super::table::ShardRecord;
use super::*;
use crate::dataset::{DamageKind, FieldPart, Part};
use crate::storage::listing;
use proptest::prelude::*;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

const VERSION: Version = Version {
    len: 1 << 20,
    modified: 1,
    ends: 2,
};

/// Loads a file of these sections as the index of a shard.
fn load(record: ShardRecord, entries: &[u8], notes: &[u8]) -> Option<Table> {
    let record = bytemuck::bytes_of(&record);
    let side = Arc::new(Sidefile::held(&[record, entries, notes]));
    file::load(&side, Path::new("shard"), true, &VERSION, 7, 2)
}

fn record() -> ShardRecord {
    let mut record = ShardRecord {
        fields: 2,
        ..ShardRecord::default()
    };
    file::seal(&mut record, &VERSION, 7);
    record
}

#[test]
fn a_forged_count_of_samples_takes_no_memory() {
    assert!(load(record(), &[], &[]).is_some());
    let entries = vec![0; 24 * 10];
    for (rows, taken) in [
        (10, true),
        (11, false),
        (1 << 20, false),
        (u64::from(u32::MAX), false),
        (u64::MAX, false),
    ] {
        let table = load(ShardRecord { rows, ..record() }, &entries, &[]);
        assert_eq!(table.is_some(), taken, "{rows} rows");
    }
    // A valid file except for the size of its ledger, which is accepted up to the limit.
    for (notes_bytes, taken) in [(NOTES_MAX, true), (NOTES_MAX + 4, false)] {
        let mut text = br#"{"damage":[],"left_out":{}}"#.to_vec();
        text.resize(notes_bytes as usize, b' ');
        let mut record = record();
        record.notes_bytes = notes_bytes;
        let table = load(record, &[], &text);
        assert_eq!(table.is_some(), taken, "{notes_bytes}");
    }
}

struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("feedline-index-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn shard(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn index_files(&self) -> Vec<PathBuf> {
        index_files(&self.0)
    }
}

fn index_files(dir: &Path) -> Vec<PathBuf> {
    let ending = ENDING.as_bytes();
    let names = listing::names_in(dir).unwrap_or_default().into_iter();
    names
        .map(|(name, _)| dir.join(name))
        .filter(|path| path.as_os_str().as_encoded_bytes().ends_with(ending))
        .collect()
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn settings(place: Place) -> Settings<'static> {
    Settings {
        format: "test 1",
        options: "",
        fields: 2,
        checksums: true,
        place,
        skip_damage: true,
    }
}

/// A test format: samples of 10 bytes with a field of 6 and a field of 4 bytes, missing if it
/// starts with `-`.
fn scan(input: &mut Scan<'_>, rows: &mut Rows) -> Result<()> {
    for start in (0..input.len() / 10 * 10).step_by(10) {
        let entry = |input: &mut Scan<'_>, offset, len| {
            Ok::<_, Error>(Some(Entry {
                offset,
                len,
                crc: input.crc(offset, len)?,
            }))
        };
        let missing = input.bytes(start + 6, 1)? == b"-";
        let first = entry(input, start, 6)?;
        let second = match missing {
            true => None,
            false => entry(input, start + 6, 4)?,
        };
        rows.push(&[first, second])?;
    }
    let over = input.len() % 10;
    if over > 0 {
        let at = input.len() - over;
        let what = format!("{over} bytes \"over\"");
        rows.damage(Damage::new(DamageKind::Cut, at, over, 1, what));
    }
    rows.leave_out("nothing");
    Ok(())
}

/// Every field of every sample, as a loader gets it.
fn all(index: &Index, read: impl Fn(Extent) -> Vec<u8>) -> Result<Vec<Vec<Vec<u8>>>> {
    (0..index.len())
        .map(|sample| {
            let mut parts = Parts::new();
            index.extents(sample, 0, &mut parts)?;
            let mut fields = vec![Vec::new(); 2];
            for FieldPart { field, part, .. } in parts.iter() {
                let Part::Framed(extent) = part else { continue };
                fields[field] = index.open(sample, field, &read(extent))?.to_vec();
            }
            Ok(fields)
        })
        .collect()
}

fn from(bytes: &[u8]) -> impl Fn(Extent) -> Vec<u8> + '_ {
    |extent| bytes[extent.offset as usize..(extent.offset + extent.len) as usize].to_vec()
}

const SHARD: &[u8] = b"aaaaaabbbbccccccddddeeeeee----ffffffgggg---";

/// The index of files of the test format.
fn opened(files: &[PathBuf], place: Place) -> Index {
    Index::open_or_build(files, &settings(place), scan).unwrap()
}

fn set_len(file: &Path, len: u64) {
    let file = File::options().write(true).open(file).unwrap();
    file.set_len(len).unwrap();
}

#[test]
fn a_second_open_finds_all_samples_in_the_cache() {
    let dir = Dir::new();
    let empty: &[u8] = b"";
    let shards = [empty, SHARD, empty, b"1234567890", empty];
    let files: Vec<_> = (0..5)
        .map(|k| dir.shard(&format!("s{k}"), shards[k]))
        .collect();
    for round in 0..2 {
        let index = opened(&files, Place::Beside);
        assert_eq!(index.len(), 5);
        assert_eq!(index.scanned(), if round == 0 { 5 } else { 0 });
        let places = [0, 1, 2, 3, 4].map(|id| index.locate(id));
        assert_eq!(places, [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0)]);
        assert_eq!(index.sizes().sample_bytes_max, 10);
        assert_eq!(index.sizes().largest_sample, Some(0));
        let fields = all(&index, |extent| from(shards[extent.source.index()])(extent)).unwrap();
        assert_eq!(fields[2], [b"eeeeee".to_vec(), vec![]]);
        assert_eq!(fields[4], [b"123456".to_vec(), b"7890".to_vec()]);
        let [damage] = index.damage() else {
            panic!("{:?}", index.damage())
        };
        let path = files[1].display();
        let text = format!("cut: 3 bytes \"over\": path={path} offset=40 len=3 samples>=1");
        assert_eq!(damage.to_string(), text);
        assert_eq!(index.left_out().get("nothing"), Some(&5));
    }
    let refuse = Settings {
        skip_damage: false,
        ..settings(Place::Beside)
    };
    let error = Index::open_or_build(&files, &refuse, scan).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Truncated);
    assert_eq!(error.site().offset, Some(40));
}

#[test]
fn adjacent_fields_share_a_read_and_flips_are_named() {
    let index = Index::of_bytes(SHARD.into(), &settings(Place::Off), scan).unwrap();
    let mut parts = Parts::new();
    index.extents(1, 0, &mut parts).unwrap();
    let shared = Part::Framed(Extent {
        source: SourceId::at(0),
        offset: 10,
        len: 10,
    });
    let found: Vec<_> = parts.iter().map(|one| (one.field, one.part)).collect();
    assert_eq!(found, [(0, shared), (1, shared)]);
    for at in 0..40 {
        let mut bytes = SHARD.to_vec();
        bytes[at] ^= 1;
        let error = all(&index, from(&bytes));
        // The missing field's bytes belong to no sample.
        assert_eq!(error.is_ok(), (26..30).contains(&at), "byte {at}");
        if let Err(error) = error {
            assert_eq!(error.site().sample, Some(at as u64 / 10), "{error}");
        }
    }
}

#[test]
fn a_flipped_or_cut_index_file_is_made_again() {
    let dir = Dir::new();
    let files = [dir.shard("s", SHARD)];
    let open = || opened(&files, Place::Beside);
    let right = all(&open(), from(SHARD)).unwrap();
    let [place] = &dir.index_files()[..] else {
        panic!("one shard, one index")
    };
    let whole = std::fs::read(place).unwrap();
    let mut hostile: Vec<Vec<u8>> = (0..whole.len()).map(|len| whole[..len].to_vec()).collect();
    for at in 0..whole.len() {
        for bits in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= bits;
            hostile.push(bytes);
        }
    }
    hostile.push([&whole[..], &[0]].concat());
    hostile.push(vec![0xff; 4096]);
    for (case, bytes) in hostile.iter().enumerate() {
        std::fs::write(place, bytes).unwrap();
        let index = open();
        let found = (index.scanned(), index.damage().len());
        assert_eq!(found, (1, 1), "case {case}");
        assert_eq!(all(&index, from(SHARD)).unwrap(), right, "case {case}");
        // Without its magic it may be a file of another program.
        let is_ours = whole.starts_with(&bytes[..bytes.len().min(8)]);
        let kept = if is_ours { &whole } else { bytes };
        assert_eq!(&std::fs::read(place).unwrap(), kept, "case {case}");
    }
}

#[test]
fn a_forged_index_file_takes_no_memory_and_never_panics() {
    let bytes: Vec<u8> = (0..200_u8).collect();
    let right: [u64; 14] = bytemuck::cast(ShardRecord {
        rows: 8,
        bytes_max: 20,
        ..record()
    });
    for at in 0..right.len() {
        for value in [
            0,
            1,
            7,
            0x7fff_ffff,
            u64::from(u32::MAX),
            1 << 40,
            u64::MAX - 1,
            u64::MAX,
        ] {
            let mut numbers = right;
            numbers[at] = value;
            if let Some(table) = load(bytemuck::cast(numbers), &bytes, &bytes) {
                (0..table.rows() as usize).for_each(|row| drop(table.row(row, &mut [0; _])));
            }
        }
    }
}

#[test]
fn a_large_index_file_is_read_in_place() {
    let dir = Dir::new();
    let files = [dir.shard("s", &[])];
    set_len(&files[0], 1 << 30);
    let entry = |row: u64, field: u64| {
        Some(Entry {
            offset: row * 999 + field * 500,
            len: 400 + row % 7,
            crc: row as u32,
        })
    };
    let rows = 1_000_000;
    let all = settings(Place::File(dir.0.join("all.fdx")));
    for (settings, scanned) in [(settings(Place::Beside), 1), (all.clone(), 0), (all, 0)] {
        let index = Index::open_or_build(&files, &settings, |_, out| {
            (0..rows).try_for_each(|row| out.push(&[entry(row, 0), entry(row, 1)]))
        });
        let index = index.unwrap();
        assert_eq!((index.scanned(), index.len()), (scanned, rows));
        let heap = index.sizes().index_bytes;
        assert!(heap < 1 << 20, "{heap} bytes for {rows} rows");
        for row in (0..rows).step_by(997) {
            for field in 0..2 {
                let found = index.entry(row, field).unwrap().map(|(_, entry)| entry);
                assert_eq!(found, entry(row, field as u64));
            }
        }
    }
    // Damage there is an error of its samples, not of others, and names the file.
    let place = dir.0.join("all.fdx");
    let mut bytes = std::fs::read(&place).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&place, &bytes).unwrap();
    let index = opened(&files, Place::File(place.clone()));
    assert_eq!(index.scanned(), 0, "the file is used");
    let wrong = (0..rows).filter_map(|row| index.entry(row, 0).err());
    let wrong: Vec<_> = wrong.collect();
    assert!((1..400).contains(&wrong.len()), "{}", wrong.len());
    assert_eq!(wrong[0].kind(), ErrorKind::Decode);
    assert_eq!(wrong[0].site().path.as_ref(), Some(&place));
}

#[test]
fn a_shard_that_changed_is_scanned_again() {
    let dir = Dir::new();
    let mut long = vec![b'x'; 20_000];
    let files = [dir.shard("s", &long)];
    let open = || opened(&files, Place::Beside);
    assert_eq!((open().scanned(), open().scanned()), (1, 0));
    let modified = std::fs::metadata(&files[0]).unwrap().modified().unwrap();
    let set_modified = |time| {
        let file = File::options().append(true).open(&files[0]).unwrap();
        file.set_modified(time).unwrap();
    };
    // Another time, the same bytes.
    for time in [std::time::UNIX_EPOCH, modified] {
        set_modified(time);
        assert_eq!((open().scanned(), open().scanned()), (1, 0));
    }
    // Other bytes, the same time and length: the ends detect it ...
    for at in [0, 4095, 15_904, 19_999] {
        long[at] ^= 1;
        std::fs::write(&files[0], &long).unwrap();
        set_modified(modified);
        assert_eq!((open().scanned(), open().scanned()), (1, 0), "byte {at}");
    }
    // ... and in the middle the CRC of the sample detects it.
    long[10_000] ^= 1;
    std::fs::write(&files[0], &long).unwrap();
    set_modified(modified);
    let index = open();
    assert_eq!(index.scanned(), 0);
    let error = all(&index, from(&long)).unwrap_err();
    assert_eq!(error.site().sample, Some(1000));
}

#[test]
fn options_and_shard_paths_have_index_files_of_their_own() {
    let dir = Dir::new();
    let cache = Dir::new();
    std::fs::create_dir(dir.0.join("sub")).unwrap();
    let files = [dir.shard("s", SHARD), dir.shard("sub/s", b"aaaaaabbbb")];
    let beside = settings(Place::Beside);
    let mut more = settings(Place::Beside);
    more.options = "more";
    let folder = settings(Place::Folder(cache.0.join("deep/er")));
    for settings in [&beside, &more, &folder] {
        for scanned in [2, 0] {
            let index = Index::open_or_build(&files, settings, scan).unwrap();
            assert_eq!((index.scanned(), index.len()), (scanned, 5));
            assert_eq!(index.unsaved(), None);
        }
    }
    assert_eq!(dir.index_files().len(), 2);
    assert_eq!(index_files(&cache.0.join("deep/er")).len(), 2);
    assert_eq!(opened(&files, Place::Off).scanned(), 2);
    let listed = listing::expand(dir.0.join("{s,s.*}"), &[]).unwrap();
    assert_eq!(listed.files, files[..1], "an index is no data");
}

#[test]
fn an_unwritable_folder_costs_only_the_cache() {
    let dir = Dir::new();
    let files = [dir.shard("s", SHARD)];
    // Not even root can make a folder of a file.
    let index = opened(&files, Place::Folder(files[0].join("sub")));
    assert_eq!(index.len(), 4);
    let unsaved = index.unsaved().unwrap();
    assert!(unsaved.contains("s/sub"), "{unsaved}");
}

#[test]
fn open_takes_the_shared_extent_or_the_bytes_of_the_entry() {
    let dir = Dir::new();
    let bytes: Vec<u8> = (0..200).collect();
    let files = [dir.shard("s", &bytes)];
    let index = Index::open_or_build(&files, &settings(Place::Off), |_, rows| {
        let entry = |offset: usize, len| {
            let crc = crc32c::crc32c(&bytes[offset..offset + len]);
            Some(Entry {
                offset: offset as u64,
                len: len as u64,
                crc,
            })
        };
        rows.push(&[entry(10, 4), entry(30, 7)])
    });
    let index = index.unwrap();
    assert_eq!(index.open(0, 1, &bytes[10..37]).unwrap(), &bytes[30..37]);
    assert_eq!(index.open(0, 1, &bytes[30..37]).unwrap(), &bytes[30..37]);
    let error = index.open(0, 1, &bytes[10..17]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Decode);
}

#[test]
fn an_entry_past_the_end_of_its_shard_is_refused() {
    let dir = Dir::new();
    let files = [dir.shard("s", &[0; 100])];
    for (offset, len, past) in [(90, 10, false), (90, 11, true), (u64::MAX, 2, true)] {
        let scan = |_: &mut Scan<'_>, rows: &mut Rows| {
            let entry = Some(Entry {
                offset,
                len,
                crc: 0,
            });
            rows.push(&[entry, entry])
        };
        match Index::open_or_build(&files, &settings(Place::Off), scan) {
            Ok(index) => assert!(!past && index.len() == 1),
            Err(error) => {
                let is_named = error.to_string().contains("the shard ends at 100");
                assert!(past && is_named, "{error}");
            }
        }
    }
}

#[test]
fn the_first_failing_shard_is_named() {
    let dir = Dir::new();
    let files: Vec<_> = (0..20)
        .map(|k| dir.shard(&format!("s{k:02}"), SHARD))
        .collect();
    let off = settings(Place::Off);
    let index = Index::open_or_build(&files, &off, |input, _| input.bytes(40, 4).map(drop));
    let error = index.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Truncated);
    assert!(error.to_string().contains("s00 offset=40 len=4"), "{error}");
    let gone = [files[0].clone(), dir.0.join("gone"), dir.0.clone()];
    for (files, kind) in [
        (&gone[..], ErrorKind::NotFound),
        (&gone[2..], ErrorKind::NotAFile),
    ] {
        let error = Index::open_or_build(files, &off, scan).err().unwrap();
        assert_eq!(error.kind(), kind);
    }
}

#[test]
fn two_fields_take_24_bytes_a_sample_or_40() {
    let dir = Dir::new();
    let files = [dir.shard("s", &[])];
    set_len(&files[0], 6_000_000_000);
    for (unit, stride) in [(512, 24), (1, 40)] {
        let index = Index::open_or_build(&files, &settings(Place::Off), |_, rows| {
            for row in 0..100_000_u64 {
                // Up to 5 GB: offsets need 33 bits unless they are counted in blocks.
                let entry = |offset| {
                    Some(Entry {
                        offset,
                        len: 1,
                        crc: 0,
                    })
                };
                let first = row * 49_999;
                let second = first + 25_000;
                rows.push(&[first, second].map(|at| entry(at / unit * unit)))?;
            }
            Ok(())
        });
        let index = index.unwrap();
        let bytes = index.sizes().index_bytes + index.sources().table_bytes();
        let least = 100_000 * stride;
        assert!(
            (least..least + 1000).contains(&bytes),
            "{bytes} bytes, unit {unit}"
        );
    }
}

proptest! {
    #[test]
    fn entries_survive_packing(
        entries in prop::collection::vec(prop::option::of((0_u64..1 << 60, 0_u64..1 << 60, any::<u32>())), 2..40),
        offset_shift in 0_u32..60,
        len_shift in 0_u32..60,
    ) {
        let entry = |(offset, len, crc): (u64, u64, u32)| Entry {
            offset: offset >> offset_shift, len: len >> len_shift, crc,
        };
        let entries: Vec<Option<Entry>> = entries.into_iter().map(|e| e.map(entry)).collect();
        let entries = &entries[..entries.len() / 2 * 2];
        let mut rows = Rows::new(2, u64::MAX);
        entries.chunks(2).for_each(|row| rows.push(row).unwrap());
        let table = rows.finish(Path::new("x"), |_| {}).unwrap();
        for (index, entry) in entries.iter().enumerate() {
            prop_assert_eq!(table.entry(index / 2, index % 2).unwrap(), *entry);
        }
    }

    #[test]
    fn a_scan_gives_the_shards_bytes_for_any_request(
        asks in prop::collection::vec((0_u64..30_000, 0_usize..12_000), 1..30), all in any::<bool>(),
    ) {
        let dir = Dir::new();
        let bytes: Vec<u8> = (0..25_000_u32).map(|k| (k * 7 / 3) as u8).collect();
        let file = Blob::open(dir.shard("s", &bytes)).unwrap();
        let mut input = Scan::new(&file, all);
        for (offset, len) in asks {
            let right = bytes.get(offset as usize..).and_then(|rest| rest.get(..len));
            prop_assert_eq!(input.bytes(offset, len).ok(), right);
            let crc = input.crc(offset, len as u64).ok();
            prop_assert_eq!(crc, right.map(crc32c::crc32c).or((len == 0).then_some(0)));
        }
    }
}
