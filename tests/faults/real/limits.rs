//! Limits of the process and of its control group: descriptors and memory.

use super::child::{Given, Outcome, Running, Task, finish, say, skip};
use super::denied::skipped_here;
use super::set::Set;
use crate::common::{Dir, READERS, descriptors, rows};
use feedline::Error;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::{Path, PathBuf};

/// More descriptors than any of these loaders needs.
const ENOUGH: u64 = 32;

/// The role of a child: a loader and an epoch under every limit, from the standard streams alone
/// upwards.
pub fn sweep_descriptors(given: &Given) {
    let set = given.set();
    let before = descriptors();
    say("start", "");
    let maximum = getrlimit(Resource::Nofile).maximum;
    let allow = |current| setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
    for limit in 3..3 + ENOUGH {
        allow(Some(limit));
        let result = one_epoch(given, &set);
        allow(maximum);
        match result {
            Ok(()) => say("enough", limit),
            Err(error) => say("few", format!("{limit} {error}")),
        }
    }
    finish(&before);
}

fn one_epoch(given: &Given, set: &Set) -> Result<(), Error> {
    let loader = given.builder(set)?.build()?;
    let mut count = 0;
    for batch in loader.epoch(0)? {
        for (id, bytes) in rows(&batch?) {
            assert!(set.is_sample(id, &bytes), "sample {id}");
            count += 1;
        }
    }
    assert_eq!(count, set.samples());
    Ok(())
}

#[test]
fn too_few_descriptors_are_an_error_that_names_the_limit() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).sized(12, 4).write();
    for (reader, way) in READERS.iter().enumerate() {
        let ended = Task::on("sweep descriptors", &set, reader).run();
        assert!(ended.status.success(), "{way:?}: {ended:#?}");
        let few: Vec<&str> = ended.all("few").collect();
        if few.iter().any(|text| text.contains("setup refused with E")) {
            skip("descriptors", format!("{way:?}: no io_uring here"));
            continue;
        }
        for text in &few {
            let named = text.contains("open files") || text.contains("(os error 24)");
            assert!(named, "{way:?}: {text}");
        }
        ended.left_nothing();
        let limit = |text: &str| text.split(' ').next().unwrap().parse::<u64>().unwrap();
        let last = few.iter().map(|text| limit(text)).max();
        // Near the limit the number of open files varies, but only in a small range.
        let last = last.unwrap_or_else(|| panic!("{way:?}: no limit was too low: {ended:#?}"));
        assert!(last < ENOUGH / 2, "{way:?}: {last} are too few: {ended:#?}");
        let first = ended.all("enough").map(limit).min().unwrap();
        let words = few.last().unwrap();
        eprintln!("{way:?}: a limit of {first} can do, one of {last} does not: {words}");
    }
}

/// A control group that limits memory; removed on drop.
struct Group {
    dir: PathBuf,
}

impl Group {
    /// Reason for a missing group.
    fn new(name: &str, limit: u64) -> Result<Self, String> {
        let groups =
            std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let name = format!("feedline-{name}-{}", std::process::id());
        let mut why = "no memory controller".to_string();
        for line in groups.lines() {
            let parts: Vec<&str> = line.splitn(3, ':').collect();
            let [_, controllers, path] = parts[..] else {
                continue;
            };
            let (root, file) = match controllers {
                "" => ("/sys/fs/cgroup", "memory.max"),
                list if list.split(',').any(|name| name == "memory") => {
                    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
                }
                _ => continue,
            };
            // In a container the path may belong to the host's hierarchy.
            let root = Path::new(root);
            let own = root.join(path.trim_start_matches('/'));
            for parent in [own.as_path(), root] {
                let dir = parent.join(&name);
                if let Err(error) = std::fs::create_dir(&dir) {
                    why = format!("{}: {error}", dir.display());
                    continue;
                }
                let group = Self { dir };
                match std::fs::write(group.dir.join(file), limit.to_string()) {
                    Ok(()) => return Ok(group),
                    Err(error) => why = format!("{}: {error}", group.dir.display()),
                }
            }
        }
        Err(why)
    }

    /// Runs the task in it: a shell enters the group and becomes the child.
    fn run(&self, task: &Task) -> super::child::Ended {
        let dir = self.dir.display();
        let script = format!("echo $$ >'{dir}/cgroup.procs' && exec \"$@\"");
        let words = ["/bin/sh", "-c", &script, "sh"].map(String::from);
        Running::start(task.behind(&words)).end()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its last process may still be ending.
        for _ in 0..200 {
            if std::fs::remove_dir(&self.dir).is_ok() || !self.dir.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        eprintln!("{} could not be removed", self.dir.display());
    }
}

/// Memory of a process with a loader beside the loader's budget: the binary, stacks, page tables,
/// and page cache that the kernel cannot reclaim at once.
const BESIDE: u64 = 24 << 20;

#[test]
fn a_loader_runs_in_a_control_group_of_its_budget() {
    let dir = Dir::new();
    let budget: u64 = 32 << 20;
    // More than the budget, in batches of 2 MiB.
    let set = Set {
        record: 128 << 10,
        batch: 16,
        ..Set::usual(dir.path("")).sized(12, 32)
    };
    let set = set.write();
    let task = |reader| {
        Task::pull(&set, reader)
            .with("budget", budget)
            .with("slots", 6)
    };
    let test = "a memory limit by control group";
    for (reader, way) in READERS.iter().enumerate() {
        let group = match Group::new("fits", budget + BESIDE) {
            Ok(group) => group,
            Err(why) => return skip(test, why),
        };
        let ended = group.run(&task(reader).with("depth", 32));
        if skipped_here(test, reader, &ended) {
            continue;
        }
        let killed = ended.was_killed();
        assert!(
            !killed,
            "{way:?}: out of memory with {BESIDE} beside {budget}: {ended:#?}"
        );
        ended.whole();
    }
    let group = Group::new("small", 16 << 20).unwrap();
    let ended = group.run(&task(4));
    let Outcome::Failed(fault) = ended.outcome_leaking() else {
        panic!("{ended:#?}")
    };
    assert_eq!(fault.kind, "memory budget too small", "{ended:#?}");
}
