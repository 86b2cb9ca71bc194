//! Under the memory limit of a real control group: what does not fit is refused, what fits runs,
//! nothing is killed.

use crate::common::*;
use feedline::dataset::DatasetExt;
use feedline::memory::MemoryTerm;
use feedline::{Error, ErrorKind, Loader};
use std::path::{Path, PathBuf};

const MIB: usize = 1 << 20;
const LIMIT: usize = 192 * MIB;
const RECORD: usize = MIB;

/// A new group below this process's own with the limit, if this process may make one. Dropping it
/// removes it.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        let groups =
            std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let mut why = String::from("no memory controller");
        let mut named = Vec::new();
        for line in groups.lines() {
            let parts: Vec<&str> = line.splitn(3, ':').collect();
            let (root, limit) = match parts[1] {
                "" => ("/sys/fs/cgroup", "memory.max"),
                list if list.split(',').any(|name| name == "memory") => {
                    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
                }
                _ => continue,
            };
            named.push((
                Path::new(root).join(parts[2].trim_start_matches('/')),
                limit,
            ));
        }
        for (own, limit) in named {
            let name = std::thread::current()
                .name()
                .unwrap_or("")
                .replace(':', "-");
            let name = format!("feedline-test-{}-{name}", std::process::id());
            let group = Self(own.join(name));
            match std::fs::create_dir(&group.0)
                .and_then(|()| std::fs::write(group.0.join(limit), LIMIT.to_string()))
            {
                Ok(()) => return Ok(group),
                Err(error) => why = format!("{}: {error}", group.0.display()),
            }
        }
        Err(why)
    }

    /// `None` where no group can be made; `memory::available` has tests of the same rules on the files
    /// of such groups.
    fn or_skip() -> Option<Self> {
        Self::new()
            .inspect_err(|why| {
                println!("skipped: no group with a memory limit can be made here: {why}");
            })
            .ok()
    }

    /// The command that puts a shell into the group.
    fn entered(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.0.display())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn no_plan_or_data_over_a_containers_limit_is_killed() {
    if let Some(dir) = in_child() {
        return under_the_limit(&dir);
    }
    let Some(group) = Group::or_skip() else {
        return;
    };
    let dir = Dir::new();
    run(child(&here!(), &dir.path(""), &group.entered()));
}

#[test]
fn the_sum_over_ranks_must_fit_a_containers_limit() {
    if let Some(dir) = in_child() {
        return one_of_four(&dir);
    }
    let Some(group) = Group::or_skip() else {
        return;
    };
    let dir = Dir::new();
    let file = std::fs::File::create(dir.path("data.bin")).unwrap();
    file.set_len((64 * MIB) as u64).unwrap();
    for temporary in [dir.path("").to_str().unwrap(), "/proc/none"] {
        let ranks: Vec<_> = (0..4)
            .map(|_| {
                let mut rank = child(&here!(), &dir.path(""), &group.entered());
                rank.env("LOCAL_WORLD_SIZE", "4").env("TMPDIR", temporary);
                std::thread::spawn(move || run(rank))
            })
            .collect();
        for rank in ranks {
            rank.join().unwrap();
        }
    }
}

/// Of four ranks that share their data, or that each want a copy.
fn one_of_four(dir: &Path) {
    let memory = records(&dir.join("data.bin"), RECORD).in_memory();
    if std::env::var("TMPDIR").unwrap() == "/proc/none" {
        let words = [
            "the files have 64.0 MiB, and the 4 ranks here need 256.0 MiB for a copy each",
            "the limit of all ranks is 192.0 MiB, and ",
        ];
        return refused(memory, &words);
    }
    let builder = Loader::builder(memory.unwrap()).batch_size(1);
    let loader = build(builder.tuning(|t| t.slots(2)).workers(1));
    assert_eq!(loader.plan().term(MemoryTerm::DATA).bytes(), 16 * MIB);
    assert_eq!(rows_of(&loader), 64);
}

fn rows_of(loader: &Loader) -> usize {
    let batches = loader.epoch(0).unwrap();
    batches.map(|batch| batch.unwrap().len()).sum()
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, words: &[&str]) {
    let error = result.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Budget, "{error}");
    assert!(
        words.iter().all(|word| error.to_string().contains(word)),
        "{words:?} in {error}"
    );
}

fn under_the_limit(dir: &Path) {
    let file = |name: &str, mib: usize| {
        let path = dir.join(name);
        std::fs::File::create(&path)
            .unwrap()
            .set_len((mib * MIB) as u64)
            .unwrap();
        path
    };
    let large = file("large.bin", 256);
    let small = file("small.bin", 80);
    let loader = |path: &Path| Loader::builder(records(path, RECORD)).workers(1);
    refused(
        records(&large, RECORD).in_memory(),
        &[
            "the files have 256.0 MiB, but the free memory",
            "`in_memory`",
        ],
    );
    refused(
        loader(&large).batch_size(32).tuning(|t| t.slots(8)).build(),
        &["are free, limits of the container included", "8 × 34.0 MiB"],
    );
    // Around the limit: the whole plan counts, not the slots alone.
    let mut ran = 0;
    let mut least = 0;
    for rows in 30..50 {
        match loader(&large)
            .batch_size(rows)
            .tuning(|t| t.slots(4))
            .build()
        {
            Ok(loader) => {
                assert_eq!(rows_of(&loader), 256);
                ran += 1;
            }
            Err(error) => {
                refused::<()>(Err(error), &["are needed"]);
                least += 1;
            }
        }
    }
    assert!(ran > 0 && least > 0, "{ran} {least}");
    // Four slots are the default, two have room.
    let fewer = build(loader(&large).batch_size(64));
    assert_eq!(
        fewer.plan().term(MemoryTerm::SLOTS).count,
        2,
        "{}",
        fewer.plan()
    );
    assert_eq!(rows_of(&fewer), 256);
    drop(fewer);
    // The page cache fills the group, and counts as free.
    assert_eq!(
        std::io::copy(
            &mut std::fs::File::open(&large).unwrap(),
            &mut std::io::sink()
        )
        .unwrap(),
        256 << 20
    );
    let memory = std::sync::Arc::new(records(&small, RECORD).in_memory().unwrap());
    let both: Vec<_> = (0..2)
        .map(|_| {
            build(
                Loader::builder(memory.clone())
                    .batch_size(8)
                    .tuning(|t| t.slots(3))
                    .workers(1),
            )
        })
        .collect();
    for loader in &both {
        assert_eq!(rows_of(loader), 80);
    }
    refused(
        Loader::builder(memory)
            .batch_size(40)
            .tuning(|t| t.slots(3))
            .build(),
        &["data in memory", "80.0 MiB"],
    );
}
