//! Files that change under a loader in the middle of an epoch: each delivered sample is wholly of
//! one version, or an error names the file.

use super::child::{Given, Outcome, Task, pull, skip, some_at_a_time};
use super::denied::skipped_here;
use super::set::Set;
use crate::common::sweep;
use crate::common::{Dir, READERS};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;

/// Number of batches before the change.
const AFTER: u64 = 3;

/// The role of a child: it pulls, and changes all files itself in between.
pub fn change(given: &Given) {
    let set = given.set();
    let how = given.text("change").unwrap().to_string();
    pull(given, |delivered| {
        if delivered == AFTER {
            (0..set.files).for_each(|file| change_one(&set, file, &how));
        }
    });
}

fn change_one(set: &Set, file: usize, how: &str) {
    let path = set.path(file);
    let open = || File::options().write(true).open(&path).unwrap();
    let len = std::fs::metadata(&path).unwrap().len();
    match how {
        "truncate" => open().set_len(len / 2).unwrap(),
        "empty" => open().set_len(0).unwrap(),
        "cut inside of a sample" => open().set_len(len - 1).unwrap(),
        "grow" => open().set_len(len + 1).unwrap(),
        "remove" => std::fs::remove_file(&path).unwrap(),
        "forbid" => std::fs::set_permissions(&path, Permissions::from_mode(0o0)).unwrap(),
        "replace" | "replace by a shorter one" => {
            std::fs::write(set.dir.join("replaced"), "").unwrap();
            let fresh = path.with_extension("new");
            let mut bytes = set.bytes(file, 1);
            if how == "replace by a shorter one" {
                bytes.truncate(bytes.len() / 2);
            }
            std::fs::write(&fresh, &bytes).unwrap();
            std::fs::rename(&fresh, &path).unwrap();
        }
        "become a folder" => {
            std::fs::remove_file(&path).unwrap();
            std::fs::create_dir(&path).unwrap();
        }
        other => panic!("{other}"),
    }
}

/// A change of the files, whether an epoch must fail, and the allowed errors.
const CHANGES: [(&str, bool, &[&str]); 9] = [
    ("truncate", true, &["truncated", CHANGED]),
    ("empty", true, &["truncated", CHANGED]),
    ("cut inside of a sample", true, &["truncated", CHANGED]),
    ("grow", false, &[CHANGED]),
    ("remove", false, &["not found"]),
    ("forbid", false, &["permission denied"]),
    ("replace", false, &[CHANGED]),
    ("replace by a shorter one", false, &[CHANGED]),
    (
        "become a folder",
        false,
        &["not a regular file", "not found"],
    ),
];
const CHANGED: &str = "changed since it was indexed";

/// Every reader, with files that stay open (8) and with files opened for each read (48, more than a
/// limit of 64 descriptors keeps open); by default with one or the other.
#[test]
fn a_file_that_changes_gives_one_version_or_a_named_error() {
    some_at_a_time(&CHANGES, |(how, must_fail, kinds)| {
        let mut tally = Vec::new();
        for reader in 0..READERS.len() {
            let first = sweep::size((reader + how.len()) % 2, 0, 0);
            let sizes = [(8, 32), (48, 6)].into_iter().skip(first);
            for (files, per_file) in sizes.step_by(sweep::size(2, 1, 1)) {
                tally.extend(changed(how, *must_fail, kinds, reader, files, per_file));
            }
        }
        tally.sort();
        let runs = tally.chunk_by(|a, b| a == b);
        let counted = runs.map(|run| format!("{} {}", run.len(), run[0]));
        eprintln!("{how}: {}", counted.collect::<Vec<_>>().join(", "));
    });
}

/// Description of one run; nothing if it was skipped.
fn changed(
    how: &str,
    must_fail: bool,
    kinds: &[&str],
    reader: usize,
    files: usize,
    per_file: usize,
) -> Option<String> {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).sized(files, per_file).write_warm();
    let mut task = Task::on("change files", &set, reader);
    if files > 8 {
        task = task.with("nofile", 64);
    }
    // Root may read files without permissions.
    if how == "forbid" {
        task = task.with("plain", 1);
    }
    let ended = task.with("change", how).run();
    let what = format!("{how}, {:?}, {files} files", READERS[reader]);
    if let Some(why) = ended.skipped() {
        skip(&what, why);
        return None;
    }
    if skipped_here(&what, reader, &ended) {
        return None;
    }
    match ended.outcome(false) {
        Outcome::Whole => {
            assert!(!must_fail, "{what}: nothing failed: {ended:#?}");
            Some("whole".to_string())
        }
        Outcome::Failed(fault) => {
            assert!(kinds.contains(&fault.kind.as_str()), "{what}: {fault:?}");
            assert!(fault.is_placed(), "{what}: {fault:?}");
            assert!(ended.number("delivered") >= AFTER, "{what}: {ended:#?}");
            Some(fault.kind)
        }
    }
}
