//! Saved states and fingerprints of datasets: a loaded state equals the saved one or is an error,
//! whatever happens to the file or the process; and the error of a changed dataset names the
//! changed shard.

use crate::common::formats::tar_member;
use crate::common::{Dir, build, noise};
use crate::common::{child, here, in_child, run};
use feedline::dataset::{
    Concat, Dataset, DatasetExt, Images, Megatron, Parts, Records, Sizes, Tar, TfRecord, Tokens,
};
use feedline::error::Stage;
use feedline::storage::Sources;
use feedline::tensor::{DType, EncodedField};
use feedline::unstable::Fingerprint;
use feedline::{ErrorKind, Loader, Result, State};
use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const BYTES: [&[u8]; 2] = [
    include_bytes!("../fixtures/state/step-1200.json"),
    include_bytes!("../fixtures/state/step-1201.json"),
];

fn states() -> [State; 2] {
    BYTES.map(|bytes| State::from_bytes(bytes).unwrap())
}

/// Names in a folder.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_saved_state_replaces_the_old_one_and_loads_unchanged() {
    let dir = Dir::new();
    let path = dir.path("état de la course.json");
    let [first, second] = states();
    assert_eq!(first.to_bytes(), BYTES[0]);
    type Save = fn(&State, &Path) -> Result<()>;
    let saves: [Save; 2] = [
        |state, path| state.save(path),
        |state, path| state.save_unsynced(path),
    ];
    for save in saves {
        for state in [&first, &second, &first] {
            save(state, &path).unwrap();
            assert_eq!(State::load(&path).unwrap(), *state);
            assert_eq!(std::fs::read(&path).unwrap(), state.to_bytes());
        }
    }
    assert_eq!(names(&dir.path("")), ["état de la course.json"]);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let umask = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))
        .unwrap()
        .trim();
    let umask = u32::from_str_radix(umask, 8).unwrap();
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
        0o644 & !umask
    );
}

#[test]
fn every_cut_of_a_saved_file_is_refused_with_its_path() {
    let dir = Dir::new();
    let path = dir.path("state");
    for bytes in BYTES {
        for len in 0..bytes.len() {
            std::fs::write(&path, &bytes[..len]).unwrap();
            let error = State::load(&path).unwrap_err();
            assert_eq!(
                (error.kind(), error.stage()),
                (ErrorKind::State, Stage::State),
                "{len}"
            );
            assert_eq!(error.site().path.as_deref(), Some(&*path), "{len}");
        }
    }
}

#[test]
fn every_flipped_bit_of_a_saved_file_is_refused() {
    for bytes in BYTES {
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let error = State::from_bytes(&flipped).unwrap_err();
            assert_eq!(
                (error.kind(), error.stage()),
                (ErrorKind::State, Stage::State),
                "bit {bit}"
            );
        }
    }
}

#[test]
fn two_flipped_bytes_never_make_another_state() {
    let state = &states()[0];
    for at in 0..BYTES[0].len() - 1 {
        for by in 1..=255_u8 {
            let mut flipped = BYTES[0].to_vec();
            flipped[at] ^= by;
            flipped[at + 1] ^= by.rotate_left(3);
            if let Ok(found) = State::from_bytes(&flipped) {
                assert_eq!(found, *state, "{at} {by}");
            }
        }
    }
}

#[test]
fn a_huge_or_irregular_state_file_is_refused_unread() {
    let dir = Dir::new();
    let error = State::load(dir.path("gone")).unwrap_err();
    assert_eq!(
        (error.kind(), error.stage()),
        (ErrorKind::NotFound, Stage::State)
    );
    assert_eq!(error.site().path, Some(dir.path("gone")));

    let fifo = dir.path("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    for path in [&fifo, &dir.path(""), Path::new("/dev/zero")] {
        let error = State::load(path).unwrap_err();
        assert_eq!(
            (error.kind(), error.site().path.as_deref()),
            (ErrorKind::NotAFile, Some(path))
        );
    }

    let large = dir.path("large");
    std::fs::File::create(&large)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let error = State::load(&large).unwrap_err();
    assert_eq!(
        (error.kind(), error.site().path.as_deref()),
        (ErrorKind::State, Some(&*large))
    );
    assert_eq!(
        error.message(),
        "1099511627776 bytes or more; a state has less than 1 KiB"
    );
    std::fs::write(
        &large,
        [BYTES[0], &vec![b' '; 65_536 - BYTES[0].len()]].concat(),
    )
    .unwrap();
    State::load(&large).unwrap();
}

#[test]
fn a_save_that_fails_leaves_the_old_file_and_nothing_else() {
    let dir = Dir::new();
    let [old, new] = states();
    let path = dir.path("state");
    old.save(&path).unwrap();

    let error = new.save(dir.path("gone/state")).unwrap_err();
    assert_eq!(
        (error.kind(), error.stage()),
        (ErrorKind::NotFound, Stage::State)
    );
    assert_eq!(error.site().path, Some(dir.path("gone")));
    assert_eq!(
        new.save_unsynced(dir.path("gone/state"))
            .unwrap_err()
            .site()
            .path,
        Some(dir.path("gone"))
    );
    assert_eq!(
        new.save(path.join("state")).unwrap_err().stage(),
        Stage::State
    );
    for nameless in ["", "/", ".."] {
        assert_eq!(
            new.save(nameless).unwrap_err().kind(),
            ErrorKind::Config,
            "{nameless}"
        );
    }

    std::fs::create_dir(dir.path("folder")).unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(dir.path("fifo"))
            .status()
            .unwrap()
            .success()
    );
    for name in ["folder", "fifo"] {
        let error = new.save(dir.path(name)).unwrap_err();
        assert_eq!(
            (error.kind(), error.site().path.clone()),
            (ErrorKind::NotAFile, Some(dir.path(name)))
        );
    }
    assert!(
        std::fs::metadata(dir.path("fifo"))
            .unwrap()
            .file_type()
            .is_fifo()
    );

    // Its temporary file can be made, but not renamed.
    let error = new.save(dir.path(&"n".repeat(300))).unwrap_err();
    assert_eq!((error.kind(), error.stage()), (ErrorKind::Io, Stage::State));
    new.save(dir.path(&"n".repeat(255))).unwrap();

    assert_eq!(State::load(&path).unwrap(), old);
    assert_eq!(
        names(&dir.path("")),
        ["fifo", "folder", &"n".repeat(255), "state"]
    );
}

#[test]
fn a_full_disk_leaves_the_old_file_and_nothing_else() {
    let [old, new] = states();
    if let Some(dir) = in_child() {
        // A limit on file sizes imitates the full disk: a write ends early, the next one fails.
        let limit = rustix::process::Rlimit {
            current: Some(100),
            maximum: Some(100),
        };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        for _ in 0..3 {
            let error = new.save(dir.join("state")).unwrap_err();
            assert_eq!((error.kind(), error.stage()), (ErrorKind::Io, Stage::State));
            assert_eq!(error.site().path, Some(dir.join("state")));
            assert_eq!(
                new.save_unsynced(dir.join("state")).unwrap_err().kind(),
                ErrorKind::Io
            );
        }
        return;
    }
    let dir = Dir::new();
    old.save(dir.path("state")).unwrap();
    // The error comes with a signal that ends the process unless it is ignored.
    run(child(&here!(), &dir.path(""), "trap '' 25"));
    assert_eq!(State::load(dir.path("state")).unwrap(), old);
    assert_eq!(names(&dir.path("")), ["state"]);
}

#[test]
fn a_path_without_a_folder_is_in_the_current_one() {
    let state = &states()[0];
    if in_child().is_some() {
        state.save("state").unwrap();
        state.save_unsynced("./state").unwrap();
        assert_eq!(State::load("state").unwrap(), *state);
        return;
    }
    let dir = Dir::new();
    run(child(&here!(), &dir.path(""), ":"));
    assert_eq!(names(&dir.path("")), ["state"]);
}

#[test]
fn a_link_is_followed_to_load_and_replaced_to_save() {
    let dir = Dir::new();
    let [old, new] = states();
    old.save(dir.path("step-1200")).unwrap();
    symlink("step-1200", dir.path("latest")).unwrap();
    assert_eq!(State::load(dir.path("latest")).unwrap(), old);
    new.save(dir.path("latest")).unwrap();
    assert_eq!(
        (
            State::load(dir.path("latest")).unwrap(),
            State::load(dir.path("step-1200")).unwrap()
        ),
        (new, old)
    );
    assert!(
        std::fs::symlink_metadata(dir.path("latest"))
            .unwrap()
            .is_file()
    );
    symlink("nowhere", dir.path("broken")).unwrap();
    states()[0].save(dir.path("broken")).unwrap();
    assert_eq!(names(&dir.path("")), ["broken", "latest", "step-1200"]);
}

#[test]
fn many_threads_save_to_one_path_and_readers_see_whole_states() {
    let dir = Dir::new();
    let path = dir.path("state");
    let states = states();
    states[0].save(&path).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let path = &path;
            let state = &states[thread % 2];
            scope.spawn(move || (0..50).for_each(|_| state.save_unsynced(path).unwrap()));
        }
        for _ in 0..200 {
            assert!(states.contains(&State::load(&path).unwrap()));
        }
    });
    assert_eq!(names(&dir.path("")), ["state"]);
}

#[test]
fn a_kill_during_a_save_leaves_the_old_or_the_new_state() {
    let states = states();
    if let Some(dir) = in_child() {
        println!("saving");
        loop {
            for state in &states {
                state.save_unsynced(dir.join("state")).unwrap();
                state.save(dir.join("state")).unwrap();
            }
        }
    }
    let dir = Dir::new();
    let path = dir.path("state");
    states[0].save(&path).unwrap();
    let mut seen = HashSet::new();
    for round in 0..40 {
        let mut child = child(&here!(), &dir.path(""), ":")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(
            lines
                .map(|line| line.unwrap())
                .any(|line| line.ends_with("saving"))
        );
        std::thread::sleep(Duration::from_micros(round * 137 % 5000));
        child.kill().unwrap();
        child.wait().unwrap();
        let state = State::load(&path).unwrap();
        assert!(states.contains(&state), "{state}");
        seen.insert(state);
    }
    let left = names(&dir.path(""));
    assert!(
        left.iter()
            .all(|name| name == "state" || name.starts_with(".state.") && name.ends_with(".tmp"))
    );
    eprintln!(
        "{} of 2 states seen, {} temporary files left by 40 kills",
        seen.len(),
        left.len() - 1
    );
}

// Fingerprints.

/// Bytes of a record.
const RECORD: usize = 64;

/// Shards of some 200 records, so that the ends are a small part of a shard.
fn shard(number: usize) -> Vec<u8> {
    noise(RECORD * (200 + number % 7), number as u64 + 1)
}

fn name(number: usize) -> String {
    format!("shard-{number:04}.bin")
}

/// A folder of shards.
fn shards(count: usize) -> Dir {
    let dir = Dir::new();
    (0..count).for_each(|number| drop(dir.write(&name(number), &shard(number))));
    dir
}

fn open(dir: &Dir) -> Records {
    Records::builder(RECORD).open(dir.path("")).unwrap()
}

/// Result of `compare` for the dataset in its present state.
fn difference(then: &Fingerprint, now: &dyn Dataset) -> feedline::Error {
    let error = Fingerprint::of(now)
        .unwrap()
        .compare(then, now)
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.stage()),
        (ErrorKind::FingerprintMismatch, Stage::State)
    );
    assert!(!error.to_string().contains('\n'));
    error
}

/// The same after `change`, in a folder of `count` shards.
fn after(count: usize, change: impl FnOnce(&Dir)) -> (Dir, feedline::Error) {
    let dir = shards(count);
    let then = Fingerprint::of(&open(&dir)).unwrap();
    change(&dir);
    let error = difference(&then, &open(&dir));
    (dir, error)
}

#[test]
fn a_dataset_that_was_moved_copied_or_linked_is_the_same() {
    let dir = shards(300);
    let then = Fingerprint::of(&open(&dir)).unwrap();
    assert_eq!((then.samples(), then.shards()), (open(&dir).len(), 300));
    let other = Dir::new();
    std::fs::rename(dir.path(""), other.path("moved")).unwrap();
    symlink("moved", other.path("link")).unwrap();
    std::fs::create_dir(other.path("copy")).unwrap();
    for number in 0..300 {
        std::fs::write(other.path("copy").join(name(number)), shard(number)).unwrap();
    }
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    std::fs::File::options()
        .write(true)
        .open(other.path("moved").join(name(7)))
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    for folder in ["moved", "link", "copy"] {
        let now = Records::builder(RECORD).open(other.path(folder)).unwrap();
        let print = Fingerprint::of(&now).unwrap();
        assert_eq!(print, then, "{folder}");
        print.compare(&then, &now).unwrap();
    }
}

#[test]
fn a_fingerprint_does_not_depend_on_threads_or_memory() {
    let dir = shards(100);
    let then = Fingerprint::of(&open(&dir)).unwrap();
    let crcs = Dir::new();
    let same: [Arc<dyn Dataset>; 5] = [
        Arc::new(open(&dir)),
        Arc::new(
            open(&dir)
                .facts(crcs.path("crc"))
                .checksums()
                .open()
                .unwrap(),
        ),
        Arc::new(
            open(&dir)
                .facts(crcs.path("crc"))
                .checksums()
                .open()
                .unwrap(),
        ),
        Arc::new(open(&dir).in_memory().unwrap()),
        Arc::new(
            Arc::new(open(&dir).in_memory().unwrap())
                .facts(crcs.path("crc of memory"))
                .checksums()
                .open()
                .unwrap(),
        ),
    ];
    for (index, dataset) in same.iter().enumerate() {
        let print = Fingerprint::of(dataset).unwrap();
        assert_eq!(print, then, "{index}");
        print.compare(&then, dataset).unwrap();
    }
    let one = std::thread::spawn(move || {
        let mut cpus = rustix::thread::CpuSet::new();
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        cpus.set((0..1024).find(|cpu| allowed.is_set(*cpu)).unwrap());
        rustix::thread::sched_setaffinity(None, &cpus).unwrap();
        Fingerprint::of(&open(&dir)).unwrap()
    });
    assert_eq!(one.join().unwrap(), then);
}

#[test]
fn a_changed_shard_is_named_or_its_range_is() {
    type Change = fn(&Path);
    fn edit(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(path).unwrap();
        edit(&mut bytes);
        std::fs::write(path, bytes).unwrap();
    }
    let changes: [(&str, Change); 6] = [
        ("its first byte", |path| edit(path, |bytes| bytes[0] ^= 1)),
        ("its last byte", |path| {
            edit(path, |bytes| *bytes.last_mut().unwrap() ^= 1)
        }),
        ("rewritten", |path| {
            edit(path, |bytes| *bytes = noise(bytes.len(), 12_345))
        }),
        ("cut", |path| {
            edit(path, |bytes| bytes.truncate(bytes.len() - RECORD))
        }),
        ("grown", |path| {
            edit(path, |bytes| bytes.extend([7; RECORD]))
        }),
        ("reversed", |path| edit(path, |bytes| bytes.reverse())),
    ];
    // The last numbers of a row are the first and last shard of its bucket. Of 300 shards number
    // 117 is opened.
    let rows = [
        (1, 0, [0, 0]),
        (12, 0, [0, 0]),
        (12, 7, [7, 7]),
        (64, 63, [63, 63]),
        (65, 64, [64, 64]),
        (100, 1, [0, 1]),
        (100, 99, [99, 99]),
        (300, 117, [113, 117]),
    ];
    for (count, number, [first, last]) in rows {
        let expected = |dir: &Dir| match first == last {
            true => format!(
                "shard {number} of {count} (counted from 0) has another name, length or content"
            ),
            false => {
                let path = dir.path(&name(first));
                format!(
                    "a shard between {first} ({}) and {last} of {count} (counted from 0) has another",
                    path.display()
                )
            }
        };
        let path = |path: PathBuf| (first == last).then_some(path);
        for (what, change) in changes {
            let (dir, error) = after(count, |dir| change(&dir.path(&name(number))));
            assert_eq!(
                error.site().path,
                path(dir.path(&name(number))),
                "{what} {number} of {count}: {error}"
            );
            assert!(
                error.message().starts_with(&expected(&dir)),
                "{what} {number} of {count}: {error}"
            );
            let samples: usize = (0..count).map(|number| 200 + number % 7).sum();
            let resized = format!(" samples, {samples} when saved");
            assert_eq!(
                error.message().contains(&resized),
                ["cut", "grown"].contains(&what),
                "{error}"
            );
        }
        let renamed = name(number).replace(".bin", "x.bin");
        let (dir, error) = after(count, |dir| {
            std::fs::rename(dir.path(&name(number)), dir.path(&renamed)).unwrap()
        });
        assert_eq!(
            error.site().path,
            path(dir.path(&renamed)),
            "renamed {number} of {count}: {error}"
        );
        assert!(
            error.message().starts_with(&expected(&dir)),
            "renamed {number} of {count}: {error}"
        );
    }
}

#[test]
fn a_shard_that_is_not_opened_counts_by_its_name_and_length() {
    // Of 300 shards number 6 is not one of the 256.
    let dir = shards(300);
    let then = Fingerprint::of(&open(&dir)).unwrap();
    dir.write(&name(6), &noise(shard(6).len(), 1));
    Fingerprint::of(&open(&dir))
        .unwrap()
        .compare(&then, &open(&dir))
        .unwrap();
    dir.write(&name(6), &noise(shard(6).len() + RECORD, 1));
    let error = difference(&then, &open(&dir));
    let expected = format!(
        "a shard between 5 ({}) and 9 of 300",
        dir.path(&name(5)).display()
    );
    assert!(error.message().starts_with(&expected), "{error}");
    // The same holds for the middle bytes of a shard: checksums cover them.
    let dir = shards(3);
    let then = Fingerprint::of(&open(&dir)).unwrap();
    let mut bytes = shard(1);
    bytes[4096..8192].fill(0);
    dir.write(&name(1), &bytes);
    Fingerprint::of(&open(&dir))
        .unwrap()
        .compare(&then, &open(&dir))
        .unwrap();
}

#[test]
fn missing_and_new_shards_are_named_by_the_first_difference() {
    let remove = |dir: &Dir, numbers: &[usize]| {
        numbers
            .iter()
            .for_each(|number| std::fs::remove_file(dir.path(&name(*number))).unwrap());
    };
    // `-` sorts before `.`.
    let add = |dir: &Dir, numbers: &[usize]| {
        numbers.iter().for_each(|number| {
            drop(dir.write(&name(*number).replace(".bin", "-new.bin"), &shard(*number)))
        });
    };
    let check = |count, now, change: &dyn Fn(&Dir), difference: &dyn Fn(&Dir) -> String| {
        let (dir, error) = after(count, change);
        let expected = format!("{now} shards, {count} when saved; {};", difference(&dir));
        assert!(error.message().starts_with(&expected), "{expected} {error}");
        assert_eq!(error.site().path, None);
    };
    let same = |count| move |_: &Dir| format!("the first {count} are the same");
    let shard =
        |number| move |_: &Dir| format!("the first difference is shard {number} (counted from 0)");
    let between = |first, last| {
        move |dir: &Dir| {
            let path = dir.path(&name(first));
            format!(
                "the first difference is a shard between {first} ({}) and {last} (counted from 0)",
                path.display()
            )
        }
    };
    check(2, 1, &|dir| remove(dir, &[1]), &same(1));
    check(12, 11, &|dir| remove(dir, &[5]), &shard(5));
    check(100, 98, &|dir| remove(dir, &[17, 40]), &between(16, 17));
    check(300, 299, &|dir| remove(dir, &[299]), &between(296, 298));
    check(12, 13, &|dir| add(dir, &[12]), &same(12));
    check(300, 303, &|dir| add(dir, &[300, 301, 302]), &same(300));
    check(12, 15, &|dir| add(dir, &[5, 7, 8]), &shard(5));
    check(100, 101, &|dir| add(dir, &[17]), &between(16, 17));
}

#[test]
fn the_first_of_several_changed_shards_is_named() {
    let check = |count: usize, numbers: &[usize], expected: &dyn Fn(&Dir) -> String| {
        let (dir, error) = after(count, |dir| {
            numbers.iter().for_each(|number| {
                drop(dir.write(&name(*number), &noise(shard(*number).len(), 99)))
            });
        });
        let expected = format!(
            "{} of {count} (counted from 0) and others have another name, length",
            expected(&dir)
        );
        assert!(error.message().starts_with(&expected), "{expected} {error}");
        error
            .site()
            .path
            .clone()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
    };
    assert_eq!(
        check(12, &[1, 5, 6, 11], &|_| "shard 1".into()),
        Some(name(1))
    );
    let range = |dir: &Dir| format!("a shard between 8 ({}) and 9", dir.path(&name(8)).display());
    assert_eq!(check(128, &[9, 10, 17, 64], &range), None);

    // Two shards that changed places.
    let dir = shards(12);
    let mut paths: Vec<PathBuf> = (0..12).map(|number| dir.path(&name(number))).collect();
    let then = Fingerprint::of(&Records::builder(RECORD).open_files(&paths).unwrap()).unwrap();
    paths.swap(3, 4);
    let error = difference(&then, &Records::builder(RECORD).open_files(&paths).unwrap());
    assert!(
        error
            .message()
            .starts_with("shard 3 of 12 (counted from 0) and others have another name"),
        "{error}"
    );
    assert_eq!(error.site().path.as_ref(), Some(&paths[3]));
}

#[test]
fn changed_sample_counts_and_fields_are_named() {
    let bytes = noise(1024, 3);
    let records = |size: usize| Records::builder(size).open_bytes(&*bytes).unwrap();
    let then = Fingerprint::of(&records(64)).unwrap();
    let error = difference(&then, &records(32));
    let expected =
        "32 samples, 16 when saved; other fields than when saved; now they are record u8 [32]";
    assert!(error.message().starts_with(expected), "{error}");
    let floats = Records::builder(64)
        .field("record", DType::F32, [16])
        .open_bytes(&*bytes)
        .unwrap();
    assert!(
        difference(&then, &floats)
            .message()
            .starts_with("other fields than when saved")
    );
}

#[test]
fn a_file_that_changes_under_the_fingerprint_is_an_error() {
    let dir = shards(3);
    let records = open(&dir);
    dir.write(&name(1), &[0; 64]);
    let error = Fingerprint::of(&records).unwrap_err();
    assert_eq!(
        (error.kind(), error.site().path.clone()),
        (ErrorKind::Changed, Some(dir.path(&name(1))))
    );
    std::fs::remove_file(dir.path(&name(1))).unwrap();
    let error = Fingerprint::of(&records).unwrap_err();
    assert_eq!(
        (error.kind(), error.site().path.clone()),
        (ErrorKind::NotFound, Some(dir.path(&name(1))))
    );
}

#[test]
fn a_failure_at_the_start_spoils_no_later_state() {
    let dir = shards(3);
    let expected = build(Loader::builder(open(&dir))).state().unwrap();
    let records = open(&dir);
    let away = dir.path("away");
    std::fs::rename(dir.path(&name(1)), &away).unwrap();
    let loader = build(Loader::builder(records));
    assert_eq!(loader.state().unwrap_err().kind(), ErrorKind::NotFound);
    std::fs::rename(&away, dir.path(&name(1))).unwrap();
    assert_eq!(loader.state().unwrap(), expected);
    // The state is never that of another file.
    let records = open(&dir);
    std::fs::rename(dir.path(&name(1)), &away).unwrap();
    let loader = build(Loader::builder(records));
    std::fs::copy(&away, dir.path(&name(1))).unwrap();
    assert_eq!(loader.state().unwrap_err().kind(), ErrorKind::Changed);
}

/// A dataset with free answers about itself.
struct Toy(Records, u64);

impl Dataset for Toy {
    fn schema(&self) -> &[EncodedField] {
        self.0.schema()
    }
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn sources(&self) -> &Arc<Sources> {
        self.0.sources()
    }
    fn sizes(&self) -> Sizes {
        self.0.sizes()
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.0.extents(sample, parts)
    }
    fn identity(&self) -> u64 {
        self.1
    }
}

/// An option: the dataset opened twice with one value, then with another.
fn assert_options_count<D: Dataset>(what: &str, open: impl Fn(usize) -> D, options: usize) {
    let prints: Vec<Fingerprint> = (0..options)
        .map(|option| Fingerprint::of(&open(option)).unwrap())
        .collect();
    for (option, print) in prints.iter().enumerate() {
        let again = open(option);
        Fingerprint::of(&again)
            .unwrap()
            .compare(print, &again)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        for other in (0..options).filter(|other| *other != option) {
            let error = difference(print, &open(other));
            let expected = "the ids mean other samples of the same files";
            assert!(
                error.message().starts_with(expected),
                "{what} {option} {other}: {error}"
            );
            assert_eq!(error.site().path, None);
        }
    }
}

#[test]
fn options_that_change_ids_change_the_fingerprint() {
    let bytes: Arc<[u8]> = noise(640, 5).into();
    let records = || Records::builder(64).open_bytes(bytes.clone()).unwrap();
    let toy = |option: usize| Toy(records(), option as u64);
    assert_options_count("a dataset's own", toy, 3);
    let pointer = |option: usize| Arc::new(toy(option)) as Arc<dyn Dataset>;
    assert_options_count("through a pointer", pointer, 2);
    let crcs = Dir::new();
    let checked = |option: usize| {
        let facts = toy(option).facts(crcs.path(&format!("crc {option}")));
        facts.checksums().open().unwrap()
    };
    assert_options_count("checked", checked, 2);
    assert_options_count("in memory", |option| toy(option).in_memory().unwrap(), 2);

    let classes = |option: i64| (0..10).map(|k| k % 3 + option).collect::<Vec<i64>>();
    let labelled = |option: usize| {
        let records = Records::builder(64).classes(classes(option as i64));
        records.open_bytes(bytes.clone()).unwrap()
    };
    assert_options_count("labels", labelled, 2);
    let lists: [&[u64]; 4] = [&[0, 1, 2], &[0, 2, 1], &[0, 1, 3], &[0, 1, 1]];
    let subset = |option: usize| records().subset(lists[option]).unwrap();
    assert_options_count("subsets", subset, 4);
    let half = |option: usize| {
        let (first, second) = records().split(0.5, option as u64 / 2).unwrap();
        match option % 2 {
            0 => first,
            _ => second,
        }
    };
    assert_options_count("splits", half, 4);
    let subset = |option: usize| toy(option).subset([1, 2]).unwrap();
    assert_options_count("subsets of others", subset, 2);
    let parts: [[&[u64]; 2]; 3] = [[&[0, 1], &[2, 3]], [&[2, 3], &[0, 1]], [&[0], &[1, 2, 3]]];
    let joined = |option: usize| {
        let parts = parts[option].map(|ids| records().subset(ids).unwrap());
        Concat::new(parts).unwrap()
    };
    assert_options_count("parts", joined, 3);

    // 21 tokens of 2 bytes, and 20 behind a header of one: three windows each.
    let tokens = |option: usize| {
        let builder = Tokens::builder(DType::U16).window(8);
        let builder = [
            builder.clone().stride(6),
            builder.clone().stride(5),
            builder.stride(6).header(2),
        ];
        builder[option].clone().open_bytes(&bytes[..42]).unwrap()
    };
    assert_options_count("windows", tokens, 3);
    let flat = Tokens::builder(DType::U16)
        .window(8)
        .next_token()
        .open_bytes(&bytes[..42])
        .unwrap();
    let said = Tokens::builder(DType::U16)
        .window(9)
        .stride(8)
        .open_bytes(&bytes[..42])
        .unwrap();
    assert_eq!(
        Fingerprint::of(&flat).unwrap(),
        Fingerprint::of(&said).unwrap()
    );
}

#[test]
fn options_of_formats_that_change_ids_change_the_fingerprint() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let text = |option: usize| ["caption", "name"][option];
    let example = fixtures.join("tfrecord/example.tfrecord");
    let features = |option: usize| {
        let builder = TfRecord::builder().field(EncodedField::bytes("text"), text(option));
        builder.index(false).open(&example).unwrap()
    };
    assert_options_count("features", features, 2);

    let mut tar = Vec::new();
    for key in ["a", "b"] {
        tar.extend(tar_member(&format!("{key}.caption"), b"1"));
        tar.extend(tar_member(&format!("{key}.name"), b"2"));
    }
    tar.resize(tar.len() + 1024, 0);
    let members = |option| {
        Tar::builder()
            .field(EncodedField::bytes("text"), text(option))
            .open_bytes(tar.clone())
            .unwrap()
    };
    assert_options_count("members", members, 2);
    let listed = Tar::builder()
        .field(EncodedField::bytes("text"), "title;caption")
        .checksums(false);
    let listed = listed.open_bytes(tar.clone()).unwrap();
    assert_eq!(
        Fingerprint::of(&listed).unwrap(),
        Fingerprint::of(&members(0)).unwrap()
    );

    let prefix = fixtures.join("tokens/megatron-u16");
    let windows = |option: usize| {
        Megatron::builder()
            .window(16)
            .stride(16 + option)
            .open(&prefix)
            .unwrap()
    };
    let a = windows(0);
    let b = windows(1);
    assert_ne!(a.identity(), b.identity());
    let spans = [
        Megatron::builder().documents(1000),
        Megatron::builder().sequences(1000),
    ];
    let spans = spans.map(|builder| builder.cut(true).open(&prefix).unwrap().identity());
    assert_ne!(spans[0], spans[1]);

    // The last picture of one class becomes the first of the next.
    let images = |option: usize| {
        let dir = Dir::new();
        for (class, names) in [["a/1.png", "a/2.png"], ["b/3.png", "b/4.png"]]
            .iter()
            .enumerate()
        {
            for name in names {
                let moved = if option == 1 && *name == "a/2.png" {
                    "b/2.png"
                } else {
                    name
                };
                dir.write(
                    &if option == 2 && class == 1 {
                        name.replace('b', "c")
                    } else {
                        moved.into()
                    },
                    b"png",
                );
            }
        }
        let images = Images::open(dir.path("")).unwrap();
        // Its folder is gone then, and the fingerprint must not depend on it.
        images.in_memory().unwrap()
    };
    assert_options_count("classes", images, 3);
}

#[cfg(feature = "parquet")]
#[test]
fn options_of_parquet_that_change_ids_change_the_fingerprint() {
    use feedline::dataset::{Nulls, Parquet};
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/parquet/plain.parquet");
    assert_options_count(
        "columns and nulls",
        |option| {
            let columns = [["f0", "f1"], ["f1", "f0"], ["f0", "f1"]][option];
            let nulls = if option == 2 {
                Nulls::Zero
            } else {
                Nulls::Error
            };
            Parquet::builder()
                .stack("x", &columns)
                .nulls(nulls)
                .open(&file)
                .unwrap()
        },
        3,
    );
    // The first two row groups of 60 rows, the second alone, and the third; their rows differ.
    let pruned = |range: (f64, f64)| {
        Parquet::builder()
            .column("f0")
            .prune("f0", range.0, range.1)
            .open(&file)
            .unwrap()
    };
    let first = pruned((0.0, 1.0));
    let second = pruned((31.0, 32.0));
    assert_eq!((first.len(), second.len()), (60, 60));
    let error = difference(&Fingerprint::of(&first).unwrap(), &second);
    assert!(
        error.message().starts_with("the ids mean other samples"),
        "{error}"
    );
    let cut = Parquet::builder()
        .column("f0")
        .prune("f0", 0.0, 1.0)
        .chunk_bytes(1)
        .open(&file)
        .unwrap();
    let error = difference(&Fingerprint::of(&first).unwrap(), &cut);
    assert!(
        error
            .message()
            .starts_with("the samples are cut into other chunks"),
        "{error}"
    );
}
