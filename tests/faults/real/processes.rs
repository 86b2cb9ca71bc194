//! Events of the whole process: it is stopped for a while, or it forks.

use super::child::{DEADLINE, Given, Running, Task, leaked, pull, say};
use super::denied::skipped_here;
use super::set::Set;
use super::sys::{Forked, forked, forked_at_work, interrupt, over};
use crate::common::{Dir, READERS, assert_error, rows};
use feedline::profile::Snapshot;
use feedline::profile::snapshot::Timeline;
use feedline::{Batch, Epoch, Error, ErrorKind, Loader};
use rustix::process::{Signal, kill_process};
use std::time::{Duration, Instant};

#[test]
fn a_process_stopped_for_a_second_loses_nothing() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    // All readers at once: they mostly sleep.
    std::thread::scope(|scope| {
        for reader in 0..READERS.len() {
            let set = &set;
            scope.spawn(move || {
                let task = Task::pull(set, reader).with("epochs", 40);
                let mut child = Running::start(task.with("pause_us", 1000).command());
                if child.until("planned") {
                    for (pause, stop) in [(100, 1000), (37, 50), (1, 1)] {
                        std::thread::sleep(Duration::from_millis(pause));
                        kill_process(child.pid(), Signal::STOP).unwrap();
                        std::thread::sleep(Duration::from_millis(stop));
                        kill_process(child.pid(), Signal::CONT).unwrap();
                    }
                }
                let ended = child.end();
                if !skipped_here("a stopped process", reader, &ended) {
                    ended.whole();
                }
            });
        }
    });
}

/// The role of a child: it forks in the middle of an epoch, as Python's `subprocess` and
/// `multiprocessing` do, and continues.
pub fn fork_and_go_on(given: &Given) {
    let mut forks = 0;
    pull(given, |delivered| {
        for what in [Forked::Leaves, Forked::Becomes] {
            let status = status_of(forked(what).unwrap());
            assert_eq!(status, Some(0), "batch {delivered}: {what:?}");
            forks += 1;
        }
    });
    say("forks", forks);
}

/// Exit status of a forked process; `None` if it hangs and is killed.
fn status_of(process: i32) -> Option<i32> {
    let begun = Instant::now();
    loop {
        match over(process).unwrap() {
            Some(status) => return Some(status),
            None if begun.elapsed() > DEADLINE => {
                let pid = rustix::process::Pid::from_raw(process).unwrap();
                let _ = kill_process(pid, Signal::KILL);
                return None;
            }
            None => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

/// The role of a child: it forks in the middle of an epoch; the fork uses every object of the
/// loader, then builds its own.
pub fn use_a_loader_in_a_fork(given: &Given) {
    let set = given.set();
    let loader = given.builder(&set).unwrap().build().unwrap();
    let order = loader.preview(0, u64::MAX).unwrap();
    let mut epoch = loader.epoch(0).unwrap();
    let first = epoch.next().unwrap().unwrap();
    // So that full slots are there to be replayed.
    while loader.snapshot().slots.full_ns == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut had = Some((loader, epoch, first));
    let fork = forked_at_work(|| {
        let begun = Instant::now();
        let (loader, epoch, batch) = had.take().unwrap();
        check(&batch, given);
        check_that_a_fork_is_told(loader, epoch, batch);
        say("in_fork_ms", begun.elapsed().as_millis());
        let own = given.builder(&set).unwrap().build().unwrap();
        let batches = own.epoch(0).unwrap();
        let delivered: usize = batches.map(|batch| check(&batch.unwrap(), given)).sum();
        drop(own);
        assert_eq!((delivered, leaked()), (set.samples(), 0));
        0
    });
    assert_eq!(status_of(fork.unwrap()), Some(0));
    let (loader, epoch, first) = had.unwrap();
    let mut ids = first.ids().to_vec();
    drop(first);
    for batch in epoch {
        let batch = batch.unwrap();
        check(&batch, given);
        ids.extend(batch.ids());
    }
    assert_eq!(ids, order);
    drop(loader);
    assert_eq!(leaked(), 0);
    say("end", "");
}

/// Checks that every call names the fork, and that every drop returns.
fn check_that_a_fork_is_told(loader: Loader, mut epoch: Epoch, batch: Batch) {
    let words = "this process was forked after its loader was built";
    let told = |error: Error| drop(assert_error(&error, ErrorKind::Forked, &[words]));
    told(epoch.next().unwrap().unwrap_err());
    let ended = (1..9).all(|_| epoch.next().is_none());
    assert!(ended, "an iterator goes on behind its error");
    told(loader.epoch(1).unwrap_err());
    told(loader.steps(1).unwrap_err());
    told(loader.ready().unwrap_err());
    told(loader.state().unwrap_err());
    told(loader.preview(0, 1).unwrap_err());
    // What cannot say so has nothing to tell, and waits for no lock.
    assert_eq!(loader.snapshot(), Snapshot::default());
    assert_eq!(loader.timeline(), Timeline::default());
    assert_eq!(loader.next_epoch(), 0);
    assert!(loader.ledger().samples.is_empty());
    assert!(!epoch.report().to_string().is_empty());
    assert!(!loader.report().to_string().is_empty());
    drop(epoch);
    told(loader.epoch(1).unwrap_err());
    drop(batch);
    drop(loader);
}

/// Checks that a batch's rows hold the bytes of their samples; gives the number of rows.
fn check(batch: &Batch, given: &Given) -> usize {
    let set = given.set();
    let rows = rows(batch);
    let right = rows.iter().all(|(id, bytes)| set.is_sample(*id, bytes));
    assert!(right, "{batch:?}");
    rows.len()
}

#[test]
fn a_forked_child_is_told_to_build_its_own_loader() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    for (reader, way) in READERS.iter().enumerate() {
        let ended = Task::on("use in a fork", &set, reader).run();
        if skipped_here("a fork", reader, &ended) {
            continue;
        }
        assert!(ended.said("end").is_some(), "{way:?}: {ended:#?}");
        let ms = ended.number("in_fork_ms");
        eprintln!("{way:?}: all calls and drops in the fork took {ms} ms");
    }
}

#[test]
fn a_fork_beside_a_live_loader_leaves_both_processes_whole() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    for (reader, way) in READERS.iter().enumerate() {
        set.cool();
        let ended = Task::on("fork", &set, reader).with("epochs", 2).run();
        if skipped_here("a fork", reader, &ended) {
            continue;
        }
        ended.whole();
        assert_eq!(ended.number("forks"), 2 * 2 * set.batches(), "{way:?}");
    }
}

/// Every wait of every thread ends with EINTR again and again: opening, building, reading,
/// sleeping, joining.
#[test]
fn constant_interrupts_by_signals_cost_only_time() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    let number = Signal::USR2.as_raw();
    std::thread::scope(|scope| {
        for (reader, way) in READERS.iter().enumerate() {
            let set = &set;
            scope.spawn(move || {
                let task = Task::pull(set, reader).with("interrupted", number);
                let mut child = Running::start(task.with("epochs", 10).command());
                if !child.until("start") {
                    panic!("{way:?}: {:#?}", child.end());
                }
                let pid = child.pid().as_raw_nonzero().get();
                let mut sent = 0;
                while !child.over() {
                    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
                    let names = tasks.into_iter().flatten().flatten();
                    for thread in names.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
                    {
                        sent += u32::from(interrupt(pid, thread, number));
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                let ended = child.end();
                if !skipped_here("signals", reader, &ended) {
                    ended.whole();
                    eprintln!("{way:?}: {sent} signals");
                }
            });
        }
    });
}
