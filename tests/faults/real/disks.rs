//! Disks that fail: a file system on a file that was cut under it, and one that is full when a
//! state is saved.

use super::child::{Given, Task, alone_with_mounts, ran, say, skip, tool};
use super::denied::skipped_here;
use super::set::Set;
use super::sys;
use crate::common::{Dir, READERS, assert_error, build};
use feedline::dataset::Records;
use feedline::{ErrorKind, Loader, State};
use rustix::io::Errno;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A mount that is removed on drop.
struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = sys::unmount(&self.0);
    }
}

/// An ext4 in a file, with the set on it; its second half is then cut off.
struct Cut {
    _mount: Mount,
    set: Set,
}

impl Cut {
    fn new(dir: &Dir) -> Result<Self, String> {
        alone_with_mounts()?;
        let mkfs = tool("mkfs.ext4").ok_or("no mkfs.ext4")?;
        let mount = tool("mount").ok_or("no mount")?;
        let backing = dir.path("disk");
        let at = dir.path("mount");
        let file = File::create(&backing).map_err(|error| error.to_string())?;
        file.set_len(32 << 20).map_err(|error| error.to_string())?;
        std::fs::create_dir(&at).map_err(|error| error.to_string())?;
        let text = |path: &Path| path.to_str().unwrap().to_string();
        ran(&mkfs, &["-q", "-F", "-O", "^has_journal", &text(&backing)])?;
        // The loop device ends with its last mount.
        let attach = || ran(&mount, &["-o", "loop", &text(&backing), &text(&at)]);
        attach()?;
        let writing = Mount(at.clone());
        let set = Set::usual(at.join("data")).sized(16, 128).write_warm();
        let folder = File::open(&at).map_err(|error| error.to_string())?;
        rustix::fs::syncfs(folder).map_err(|errno| errno.to_string())?;
        drop(writing);
        // Mounted again, so that none of it is in memory.
        attach()?;
        let mount = Mount(at);
        set.open().map_err(|error| error.to_string())?;
        file.set_len(6 << 20).map_err(|error| error.to_string())?;
        Ok(Self { _mount: mount, set })
    }
}

#[test]
fn a_failing_disk_is_an_error_with_file_offset_and_code() {
    for (reader, way) in READERS.iter().enumerate() {
        let dir = Dir::new();
        let test = "an ext4 on a truncated file";
        let cut = match Cut::new(&dir) {
            Ok(cut) => cut,
            Err(why) => return skip(test, why),
        };
        let ended = Task::pull(&cut.set, reader).run();
        if skipped_here(test, reader, &ended) {
            continue;
        }
        let fault = ended.failed();
        assert_eq!(fault.kind, "I/O error", "{way:?}: {fault:?}");
        let coded = fault.has_code(Errno::IO.raw_os_error());
        assert!(coded && fault.is_placed(), "{way:?}: {fault:?}");
        let delivered = ended.number("delivered");
        eprintln!("{way:?}: {delivered} batches, then {}", fault.text);
    }
}

/// The role of a child: saves until the disk is full, and on.
pub fn save(given: &Given) {
    let path = PathBuf::from(given.text("path").unwrap());
    let filler = PathBuf::from(given.text("filler").unwrap());
    let records = Records::builder(4).open_bytes(vec![7; 400]).unwrap();
    let loader = build(Loader::builder(records).batch_size(10).workers(1));
    let mut batches = loader.epoch(0).unwrap();
    drop(batches.next());
    let old = loader.state().unwrap();
    old.save(&path).unwrap();
    say("start", "");
    // Until no more bytes or names fit.
    let mut count = 0;
    let name = |number: usize| filler.join(format!("filler-{number}"));
    while std::fs::write(name(count), vec![0; 4096]).is_ok() && count < 10_000 {
        count += 1;
    }
    drop(batches.next());
    let fresh = loader.state().unwrap();
    assert!(fresh.steps() > old.steps());
    for sync in [true, false] {
        let saved = match sync {
            true => fresh.save(&path),
            false => fresh.save_unsynced(&path),
        };
        let error = saved.unwrap_err();
        say("refused", &error);
        assert_error(&error, ErrorKind::Io, &["(os error 28)"]);
        assert_eq!(error.site().path.as_deref(), Some(path.as_path()));
        let kept = State::load(&path).unwrap();
        assert_eq!(kept, old, "the old state is not whole");
        let mut left = std::fs::read_dir(path.parent().unwrap()).unwrap().flatten();
        let unfinished =
            left.find(|entry| entry.path().extension().is_some_and(|end| end == "tmp"));
        assert!(unfinished.is_none(), "{unfinished:?}");
    }
    // With free space it continues.
    for number in 0..=count {
        let _ = std::fs::remove_file(name(number));
    }
    fresh.save(&path).unwrap();
    assert_eq!(State::load(&path).unwrap(), fresh);
    say("end", "");
}

#[test]
fn a_full_disk_leaves_the_old_state_whole() {
    for options in ["size=64k", "size=1m,nr_inodes=12"] {
        let dir = Dir::new();
        let at = dir.path("full");
        std::fs::create_dir(&at).unwrap();
        if let Err(why) = alone_with_mounts() {
            return skip("a full disk", why);
        }
        if let Err(error) = sys::mount_at("none", &at, "tmpfs", options) {
            return skip("a full disk", format!("no tmpfs: {error}"));
        }
        let _mount = Mount(at.clone());
        let path = at.join("run.state");
        let task = Task::new("save").with("path", path.display());
        let ended = task.with("filler", at.display()).run();
        let orderly = ended.status.success() && ended.said("end").is_some();
        assert!(orderly, "{options}: {ended:#?}");
        eprintln!("{options}: {}", ended.said("refused").unwrap());
    }
}
