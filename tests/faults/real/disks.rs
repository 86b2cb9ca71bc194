//! Disks that fail: a file system on a file that was cut under it, and one that is full when a
//! state is saved.

use super::child::{Given, Task, alone_with_mounts, ran, say, skip, tool};
use super::denied::denied_here;
use super::set::Set;
use super::sys;
use crate::common::{Dir, READERS};
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
        let set = Set {
            per_file: 128,
            files: 16,
            ..Set::usual(at.join("data"))
        };
        std::fs::create_dir(&set.dir).map_err(|error| error.to_string())?;
        for file in 0..set.files {
            std::fs::write(set.path(file), set.bytes(file, 0))
                .map_err(|error| error.to_string())?;
        }
        rustix::fs::syncfs(File::open(&at).map_err(|error| error.to_string())?)
            .map_err(|errno| errno.to_string())?;
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
        let cut = match Cut::new(&dir) {
            Ok(cut) => cut,
            Err(why) => return skip("an ext4 on a truncated file", why),
        };
        let ended = Task::pull(&cut.set, reader).run();
        if denied_here(&ended) && reader != 0 {
            skip(
                "an ext4 on a truncated file",
                format!("{way:?}: no io_uring here"),
            );
            continue;
        }
        let fault = ended.failed();
        assert_eq!(fault.kind, "I/O error", "{way:?}: {fault:?}");
        assert!(
            fault.is_placed() && fault.has_code(Errno::IO.raw_os_error()),
            "{way:?}: {fault:?}"
        );
        eprintln!(
            "{way:?}: {} batches, then {}",
            ended.number("delivered"),
            fault.text
        );
    }
}

/// The role of a child: saves until the disk is full, and on.
pub fn save(given: &Given) {
    let path = PathBuf::from(given.text("path").unwrap());
    let filler = PathBuf::from(given.text("filler").unwrap());
    let records = feedline::dataset::Records::builder(4)
        .open_bytes(vec![7; 400])
        .unwrap();
    let loader = Loader::builder(records)
        .batch_size(10)
        .workers(1)
        .build()
        .unwrap();
    let mut batches = loader.epoch(0).unwrap();
    drop(batches.next());
    let old = loader.state().unwrap();
    old.save(&path).unwrap();
    say("start", "");
    // Until no more bytes or names fit.
    let mut count = 0;
    while std::fs::write(filler.join(format!("filler-{count}")), vec![0; 4096]).is_ok()
        && count < 10_000
    {
        count += 1;
    }
    drop(batches.next());
    let fresh = loader.state().unwrap();
    assert!(fresh.steps() > old.steps());
    for sync in [true, false] {
        let error = if sync {
            fresh.save(&path)
        } else {
            fresh.save_unsynced(&path)
        }
        .unwrap_err();
        say("refused", &error);
        assert_eq!(error.kind(), ErrorKind::Io);
        assert_eq!(error.site().path.as_deref(), Some(path.as_path()));
        assert!(error.to_string().contains("(os error 28)"), "{error}");
        assert_eq!(
            State::load(&path).unwrap(),
            old,
            "the old state is not whole"
        );
        let left = std::fs::read_dir(path.parent().unwrap()).unwrap().flatten();
        let left: Vec<_> = left
            .filter(|entry| entry.path().extension().is_some_and(|end| end == "tmp"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
    // With free space it continues.
    (0..count).for_each(|number| {
        drop(std::fs::remove_file(
            filler.join(format!("filler-{number}")),
        ))
    });
    let _ = std::fs::remove_file(filler.join(format!("filler-{count}")));
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
        let mounted = alone_with_mounts().and_then(|()| {
            sys::mount_at("none", &at, "tmpfs", options)
                .map_err(|error| format!("no tmpfs: {error}"))
        });
        if let Err(why) = mounted {
            return skip("a full disk", why);
        }
        let _mount = Mount(at.clone());
        let path = at.join("run.state");
        let ended = Task::new("save")
            .with("path", path.display())
            .with("filler", at.display())
            .run();
        assert!(
            ended.status.success() && ended.said("end").is_some(),
            "{options}: {ended:#?}"
        );
        eprintln!("{options}: {}", ended.said("refused").unwrap());
    }
}
