//! What may happen to the whole process: it is stopped for a while, or it forks.

use crate::child::{Given, Running, Task, pull, say};
use crate::common::{Dir, READERS};
use crate::denied::denied_here;
use crate::set::Set;
use crate::sys::{Forked, forked, interrupt, over};
use rustix::process::{Signal, kill_process};
use std::time::{Duration, Instant};

#[test]
fn a_process_that_is_stopped_for_a_second_and_goes_on_loses_nothing() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    // All readers at a time: they mostly sleep.
    std::thread::scope(|scope| {
        for (reader, way) in READERS.iter().enumerate() {
            let set = &set;
            scope.spawn(move || {
                let task = Task::pull(set, reader).with("epochs", 40).with("pause_us", 1000);
                let mut child = Running::start(task.command());
                if child.until("planned") {
                    for (pause, stop) in [(100, 1000), (37, 50), (1, 1)] {
                        std::thread::sleep(Duration::from_millis(pause));
                        kill_process(child.pid(), Signal::STOP).unwrap();
                        std::thread::sleep(Duration::from_millis(stop));
                        kill_process(child.pid(), Signal::CONT).unwrap();
                    }
                }
                let ended = child.end();
                if denied_here(&ended) && reader != 0 {
                    return crate::child::skip("a stopped process", format!("{way:?}: no io_uring here"));
                }
                ended.whole();
            });
        }
    });
}

/// The role of a child: it forks in the middle of an epoch, as Python's `subprocess` and `multiprocessing` do, and goes on.
pub fn fork_and_go_on(given: &Given) {
    let mut forks = 0;
    pull(given, |delivered| {
        for what in [Forked::Leaves, Forked::Becomes] {
            let process = forked(what).unwrap();
            let begun = Instant::now();
            let status = loop {
                match over(process).unwrap() {
                    Some(status) => break status,
                    None if begun.elapsed() > Duration::from_secs(20) => {
                        let pid = rustix::process::Pid::from_raw(process).unwrap();
                        let _ = kill_process(pid, Signal::KILL);
                        panic!("batch {delivered}: a forked process that {what:?} hangs");
                    }
                    None => std::thread::sleep(Duration::from_micros(100)),
                }
            };
            assert_eq!(status, 0, "batch {delivered}: {what:?}");
            forks += 1;
        }
    });
    say("forks", forks);
}

#[test]
fn a_process_that_forks_while_a_loader_is_alive_goes_on_and_its_child_ends() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    for (reader, way) in READERS.iter().enumerate() {
        set.cool();
        let task = Task::new("fork").with("set", set.to_text()).with("reader", reader).with("epochs", 2);
        let ended = task.run();
        if denied_here(&ended) && reader != 0 {
            crate::child::skip("a fork", format!("{way:?}: no io_uring here"));
            continue;
        }
        ended.whole();
        assert_eq!(ended.number("forks"), 2 * 2 * set.batches(), "{way:?}");
    }
}

/// Every wait of every thread ends with EINTR again and again: opening, building, reading, sleeping, joining.
#[test]
fn signals_that_interrupt_all_threads_all_the_time_cost_nothing_but_time() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    let number = Signal::USR2.as_raw();
    std::thread::scope(|scope| {
        for (reader, way) in READERS.iter().enumerate() {
            let set = &set;
            scope.spawn(move || {
                let task = Task::pull(set, reader).with("interrupted", number).with("epochs", 10);
                let mut child = Running::start(task.command());
                if !child.until("start") {
                    panic!("{way:?}: {:#?}", child.end());
                }
                let (pid, mut sent) = (child.pid().as_raw_nonzero().get(), 0);
                while !child.over() {
                    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
                    for thread in tasks.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
                        sent += u32::from(interrupt(pid, thread, number));
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                let ended = child.end();
                if denied_here(&ended) && reader != 0 {
                    return crate::child::skip("signals", format!("{way:?}: no io_uring here"));
                }
                ended.whole();
                eprintln!("{way:?}: {sent} signals");
            });
        }
    });
}
