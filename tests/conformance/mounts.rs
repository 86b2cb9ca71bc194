//! Files on network mounts through the local cache: the same bytes as from the files, and those of
//! one version. Each test runs on a folder that counts as a mount, and on a FUSE mount where
//! `bindfs` is installed and may mount.

use crate::common::cached::{counts, fill_blocks, wait_for};
use crate::common::got::{Got, bytes_of, same};
use crate::common::{DEADLINE, Dir, answer, assert_says, noise};
use feedline::dataset::{Dataset, Records};
use feedline::storage::{Cache, Mode};
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, FileTimes};
use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

const RECORD: usize = 1000;
const COUNT: usize = 300;
const BLOCK: u64 = 16 << 10;
/// Blocks of both files.
const BLOCKS: u64 = 2 * (RECORD as u64 * COUNT as u64 / 2).div_ceil(BLOCK);

/// Two files on a mount.
struct Mount {
    files: [PathBuf; 2],
    /// The program that serves the mount.
    fuse: Option<Child>,
    dir: Dir,
}

/// The kinds of mounts that are to be had here.
fn mounts() -> Vec<Mount> {
    let fuse = Mount::fuse();
    if fuse.is_none() {
        eprintln!("bindfs is not installed, or may not mount: no test on a FUSE mount");
    }
    std::iter::once(Mount::folder()).chain(fuse).collect()
}

impl Mount {
    fn folder() -> Self {
        let dir = Dir::new();
        std::fs::create_dir_all(dir.path("mount")).unwrap();
        Self {
            files: ["a.bin", "b.bin"].map(|name| dir.path("mount").join(name)),
            fuse: None,
            dir,
        }
        .filled()
    }

    fn fuse() -> Option<Self> {
        let mut mount = Self::folder();
        let behind = mount.dir.path("mount");
        let on = mount.dir.path("fuse");
        std::fs::create_dir_all(&on).unwrap();
        let mut command = Command::new("bindfs");
        command
            .arg("-f")
            .args([&behind, &on])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        mount.fuse = Some(command.spawn().ok()?);
        let device = |path: &PathBuf| path.metadata().map_or(0, |meta| meta.dev());
        while device(&on) == device(&behind) {
            if mount.fuse.as_mut().unwrap().try_wait().unwrap().is_some() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        mount.files = ["a.bin", "b.bin"].map(|name| on.join(name));
        Some(mount)
    }

    fn filled(self) -> Self {
        let bytes = noise(RECORD * COUNT, 21);
        let (a, b) = bytes.split_at(bytes.len() / 2);
        self.write(0, a, 100);
        self.write(1, b, 100);
        self
    }

    /// Writes a file in place, with a time so many seconds ago.
    fn write(&self, file: usize, bytes: &[u8], seconds: u64) {
        std::fs::write(&self.files[file], bytes).unwrap();
        self.date(file, seconds);
    }

    fn date(&self, file: usize, seconds: u64) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 - seconds);
        self.set_time(file, time);
    }

    fn set_time(&self, file: usize, time: SystemTime) {
        // bindfs leaves a time as it is unless both are set.
        let times = FileTimes::new().set_accessed(time).set_modified(time);
        File::options()
            .write(true)
            .open(&self.files[file])
            .unwrap()
            .set_times(times)
            .unwrap();
        assert_eq!(
            self.files[file].metadata().unwrap().modified().unwrap(),
            time
        );
    }

    fn cache(&self) -> Cache {
        let cache = Cache::at(self.dir.path("cache")).block_bytes(BLOCK);
        match self.fuse {
            Some(_) => cache,
            None => cache.mount(self.dir.path("mount").canonicalize().unwrap()),
        }
    }

    fn builder(&self, order: &Order) -> LoaderBuilder {
        let records = Records::builder(RECORD).open_files(&self.files).unwrap();
        Loader::builder(records).order(order.clone()).batch_size(7)
    }

    fn loader(&self, order: &Order) -> Loader {
        self.builder(order).cache(self.cache()).build().unwrap()
    }

    fn expected(&self, order: &Order) -> Vec<Got> {
        Got::epoch(&self.builder(order).build().unwrap(), 0)
    }

    fn signal(&self, signal: Signal) {
        let pid = self.fuse.as_ref().map(Pid::from_child).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(fuse) = &mut self.fuse {
            let _ = Command::new("umount")
                .arg("-l")
                .arg(self.dir.path("fuse"))
                .stderr(Stdio::null())
                .status();
            let _ = fuse.kill();
            let _ = fuse.wait();
        }
    }
}

/// Epochs until all blocks are there.
fn fill(loader: &Loader) {
    fill_blocks(loader, BLOCKS);
}

#[test]
fn a_cold_half_filled_and_full_cache_deliver_the_files_bytes() {
    for order in [Order::sequential(), Order::shuffled(4)] {
        for mode in [Mode::Auto, Mode::Uring, Mode::Pread, Mode::Mmap] {
            for mount in mounts() {
                let expected = mount.expected(&order);
                let open = |cache| {
                    mount
                        .builder(&order)
                        .tuning(|t| t.reader(mode))
                        .cache(cache)
                        .build()
                        .unwrap()
                };
                let half = open(mount.cache().capacity(BLOCKS / 2 * BLOCK));
                same(&Got::epoch(&half, 0), &expected, "cold");
                same(&Got::epoch(&half, 0), &expected, "half filled");
                drop(half);
                let loader = open(mount.cache());
                same(&Got::epoch(&loader, 0), &expected, "on its way");
                settle(&loader);
                let full = open(mount.cache());
                same(&Got::epoch(&full, 0), &expected, "full");
                assert_eq!(
                    (counts(&full).misses, counts(&full).blocks),
                    (0, 0),
                    "{mode:?}: {}",
                    counts(&full)
                );
                let why = full.report().choice.why.join("; ");
                assert_says(&why, "is kept in the cache");
            }
        }
    }
}

/// Epochs until one needs no read of the mount.
fn settle(loader: &Loader) {
    wait_for(loader, |before| {
        Got::epoch(loader, 0);
        counts(loader).misses == before.misses
    });
}

#[test]
fn a_replaced_file_is_never_read_from_its_old_blocks() {
    let order = Order::sequential();
    for mount in mounts() {
        fill(&mount.loader(&order));
        let new = |seed| noise(RECORD * COUNT / 2, seed);
        type Replace = fn(&Mount, &[u8]);
        let ways: [(&str, Replace); 3] = [
            ("written in place", |mount, bytes| mount.write(0, bytes, 50)),
            (
                "written in place, with the time of before",
                |mount, bytes| mount.write(0, bytes, 50),
            ),
            ("renamed, with the time of before", |mount, bytes| {
                let other = mount.files[0].with_extension("new");
                std::fs::write(&other, bytes).unwrap();
                std::fs::rename(&other, &mount.files[0]).unwrap();
                mount.date(0, 50);
            }),
        ];
        for ((way, replace), seed) in ways.into_iter().zip(30..) {
            replace(&mount, &new(seed));
            let loader = mount.loader(&order);
            let got = bytes_of(&Got::epoch(&loader, 0), "record");
            assert!(got[..RECORD * COUNT / 2] == new(seed), "{way}");
            same(&Got::epoch(&loader, 0), &mount.expected(&order), way);
            assert!(counts(&loader).hits > 0, "{way}: {}", counts(&loader));
        }
    }
}

#[test]
fn a_file_that_changes_in_a_run_is_an_error_that_names_it() {
    for (order, in_the_past) in [(Order::sequential(), true), (Order::shuffled(3), false)] {
        for mount in mounts() {
            // Some blocks of the file fit, so that some reads come from the cache and some from the
            // mount.
            let records = Records::builder(RECORD).open(&mount.files[0]).unwrap();
            let cache = mount.cache().capacity(6 * BLOCK);
            let loader = Loader::builder(records)
                .order(order.clone())
                .batch_size(7)
                .cache(cache)
                .build()
                .unwrap();
            Got::epoch(&loader, 0);
            // Of the same length, and longer.
            std::fs::write(
                &mount.files[0],
                noise(RECORD * COUNT / 2 + usize::from(!in_the_past), 77),
            )
            .unwrap();
            if in_the_past {
                mount.date(0, 50);
            }
            let error = answer(|| counts(&loader), || Got::try_epoch(&loader, 0).err());
            assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
            assert_says(&error, "a.bin");
            let again = Got::try_epoch(&loader, 0).unwrap_err();
            assert_eq!(
                again.kind(),
                ErrorKind::Changed,
                "it does not pass: {again}"
            );
        }
    }
}

#[test]
fn changed_attributes_of_a_file_fail_no_read() {
    for mount in mounts() {
        // Most of it is not read ahead, nor kept, when its attributes change.
        mount.write(0, &noise(4000 * RECORD, 7), 100);
        let order = Order::sequential();
        let expected = mount.expected(&order);
        let loader = mount
            .builder(&order)
            .tuning(|t| t.slots(2))
            .cache(mount.cache())
            .build()
            .unwrap();
        let mut epoch = loader.epoch(0).unwrap();
        let mut got = vec![Got::of(&epoch.next().unwrap().unwrap()).unwrap()];
        std::fs::set_permissions(&mount.files[0], std::fs::Permissions::from_mode(0o600)).unwrap();
        got.extend(Got::all(epoch));
        same(&got, &expected, "changed in the run");
        let counts = counts(&loader);
        assert!(
            counts
                .why
                .as_ref()
                .is_some_and(|why| why.contains("attributes changed")),
            "{counts}"
        );
        same(&Got::epoch(&loader, 0), &expected, "from the mount");
    }
}

#[test]
fn a_file_that_was_just_written_is_read_and_not_kept() {
    for mount in mounts() {
        let order = Order::sequential();
        let expected = mount.expected(&order);
        for (ahead, word) in [(0, "just now"), (3600, "in the future")] {
            let time = SystemTime::now() + Duration::from_secs(ahead);
            (0..2).for_each(|file| mount.set_time(file, time));
            let loader = mount.loader(&order);
            same(&Got::epoch(&loader, 0), &expected, word);
            let counts = counts(&loader);
            let late = time.elapsed().is_ok_and(|age| age > Duration::from_secs(1));
            assert!(
                late || (counts.blocks == 0 && counts.why.is_some_and(|why| why.contains(word))),
                "{word}"
            );
        }
    }
}

#[test]
fn files_on_local_disks_are_not_kept() {
    let mount = Mount::folder();
    let order = Order::sequential();
    let cache = Cache::at(mount.dir.path("cache"));
    let loader = mount.builder(&order).cache(cache).build().unwrap();
    same(&Got::epoch(&loader, 0), &mount.expected(&order), "local");
    let report = loader.report();
    assert!(report.total.storage.local_cache.is_none() && !mount.dir.path("cache").exists());
    assert!(
        report
            .choice
            .why
            .join("; ")
            .contains("the cache keeps nothing"),
        "{}",
        report.choice
    );
    // Beside files on a mount, and by a link that leads from one to a local disk.
    let local = mount.dir.write("local.bin", &noise(RECORD * 50, 5));
    let link = mount.files[0].with_file_name("link.bin");
    std::os::unix::fs::symlink(&local, &link).unwrap();
    let open = || {
        Records::builder(RECORD)
            .open_files(&[&mount.files[0], &local, &link])
            .unwrap()
    };
    let expected = Got::epoch(&Loader::builder(open()).batch_size(7).build().unwrap(), 0);
    let loader = Loader::builder(open())
        .batch_size(7)
        .cache(mount.cache())
        .build()
        .unwrap();
    same(&Got::epoch(&loader, 0), &expected, "beside");
    fill_blocks(&loader, BLOCKS / 2);
    let kept = std::fs::read_dir(mount.dir.path("cache/v1/objects"))
        .unwrap()
        .flatten();
    let files = kept.flat_map(|share| {
        std::fs::read_dir(share.path())
            .unwrap()
            .flatten()
            .collect::<Vec<_>>()
    });
    let links = files
        .filter(|file| file.file_type().unwrap().is_symlink())
        .count();
    assert_eq!(links, 1, "one entry: that of the file on the mount");
}

#[test]
fn a_damaged_cache_is_served_by_the_mount() {
    for mount in mounts() {
        let order = Order::shuffled(5);
        let expected = mount.expected(&order);
        let loader = mount.loader(&order);
        fill(&loader);
        std::fs::remove_dir_all(mount.dir.path("cache")).unwrap();
        same(&Got::epoch(&loader, 0), &expected, "without its files");
        same(
            &Got::epoch(&mount.loader(&order), 0),
            &expected,
            "made anew",
        );
    }
}

#[test]
fn a_cache_is_warmed_from_a_mount() {
    for mount in mounts() {
        let records = Records::builder(RECORD).open_files(&mount.files).unwrap();
        let warmed = mount
            .cache()
            .warm(records.sources(), |_| ControlFlow::Continue(()))
            .unwrap();
        assert_eq!(
            (warmed.objects, warmed.kept, warmed.missing()),
            (2, (RECORD * COUNT) as u64, 0),
            "{warmed:?}"
        );
        let loader = mount.loader(&Order::sequential());
        same(
            &Got::epoch(&loader, 0),
            &mount.expected(&Order::sequential()),
            "warm",
        );
        assert_eq!(
            (counts(&loader).misses, counts(&loader).blocks),
            (0, 0),
            "{}",
            counts(&loader)
        );
    }
}

#[test]
fn readers_know_a_fuse_mount() {
    let Some(mount) = Mount::fuse() else { return };
    for mode in [Mode::Auto, Mode::Pread] {
        let loader = mount
            .builder(&Order::sequential())
            .tuning(|t| t.reader(mode))
            .build()
            .unwrap();
        let choice = loader.report().choice;
        assert!(
            !choice.direct && choice.to_string().contains("on FUSE"),
            "{choice}"
        );
    }
}

#[test]
fn a_mount_that_hangs_is_a_stall_and_no_hang() {
    for (cached, at_once) in [(false, true), (false, false), (true, true), (true, false)] {
        let Some(mount) = Mount::fuse() else { return };
        // More than the kernel and the cache read ahead.
        mount.write(0, &noise(8000 * RECORD, 7), 100);
        let builder = mount
            .builder(&Order::sequential())
            .tuning(|t| t.slots(2).stall_deadline(Duration::from_secs(2)));
        let loader = if cached {
            builder.cache(mount.cache()).build()
        } else {
            builder.build()
        }
        .unwrap();
        let mut epoch = loader.epoch(0).unwrap();
        if !at_once {
            epoch.next().unwrap().unwrap();
        }
        mount.signal(Signal::STOP);
        let started = Instant::now();
        let error = epoch.find_map(Result::err);
        drop(loader);
        let took = started.elapsed();
        mount.signal(Signal::CONT);
        let error = error.expect("no batch needs the mount");
        assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
        assert!(took < DEADLINE / 2, "{took:?}");
    }
}
