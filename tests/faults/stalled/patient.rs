use super::hooked::Hooked;
use super::*;
use feedline::storage::{Direct, Mode};
use feedline::unstable::{Fault, Faulty};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::Arc;

/// Samples of an epoch without an error.
fn pulled(batches: impl Iterator<Item = Result<feedline::Batch>>) -> usize {
    batches
        .map(|batch| batch.unwrap_or_else(|error| panic!("{error}")).len())
        .sum()
}

#[test]
fn the_longest_deadline_means_never() {
    let loader = build(
        memory()
            .tuning(|t| t.stall_deadline(Duration::MAX))
            .map(|_, _| {
                std::thread::sleep(ms(100));
                Ok(())
            }),
    );
    assert_eq!(loader.epoch(0).unwrap().next().unwrap().unwrap().len(), 4);
}

#[test]
fn a_transform_slow_with_every_sample_is_not_stalled() {
    let dir = Dir::new();
    let loader = build(
        file(&dir)
            .batch_size(50)
            .tuning(|t| t.stall_deadline(ms(800)))
            .map(|_, _| {
                std::thread::sleep(ms(40));
                Ok(())
            }),
    );
    assert_eq!(pull(&loader, 0).unwrap().len(), 100);
}

#[test]
fn a_consumer_that_holds_every_batch_is_no_stall() {
    let dir = Dir::new();
    let held = Duration::from_secs(2);
    let loader =
        build(file(&dir).tuning(|t| t.slots(2).stall_deadline(ms(500)).held_deadline(held)));
    let mut epoch = loader.epoch(0).unwrap();
    let first = epoch.next().unwrap().unwrap();
    let second = epoch.next().unwrap().unwrap();
    assert_eq!(
        epoch.next().unwrap().err().map(|error| error.kind()),
        Some(ErrorKind::BatchesHeld)
    );
    drop((first, second));
    assert_eq!(pulled(epoch), 92);
}

#[test]
fn a_consumer_that_polls_rarely_sees_no_stall() {
    let loader = build(
        memory()
            .batch_size(50)
            .tuning(|t| t.slots(2).stall_deadline(ms(500)))
            .map(|_, _| {
                std::thread::sleep(ms(10));
                Ok(())
            }),
    );
    let mut epoch = loader.epoch(0).unwrap();
    let started = Instant::now();
    let mut got = 0;
    while started.elapsed() < LATE {
        match epoch.next_within(Duration::ZERO) {
            Poll::Ready(Some(batch)) => got += batch.unwrap().len(),
            Poll::Ready(None) => break,
            Poll::Pending => std::thread::sleep(ms(420)),
        }
    }
    assert_eq!(got, 400);
    let mut epoch = loader.epoch(1).unwrap();
    for _ in 0..3 {
        std::thread::sleep(ms(700));
        assert_eq!(epoch.next().unwrap().unwrap().len(), 50);
    }
}

/// The deadline measures silence: a read that waits behind hundreds of others is in time as long as
/// those complete.
#[test]
fn slow_storage_that_answers_is_not_stalled() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 2000, 64);
    let faulty = Arc::new(Faulty::new().ever(0, Fault::Late(ms(50))));
    let builder = Loader::builder(records(&path, 64))
        .batch_size(1000)
        .tuning(|t| t.reader(Mode::Pread).direct(Direct::Off));
    let loader = build(builder.tuning(|t| t.depth(512).stall_deadline(ms(400)).faulty(faulty)));
    assert_eq!(pulled(loader.epoch(0).unwrap()), 2000);
}

/// A transform that uses rayon may run other samples' work on its own thread, and wait for it: then
/// that work is active, not the sample beneath.
#[test]
fn transforms_on_rayon_are_not_stalled() {
    for _ in 0..5 {
        let loader = build(
            memory()
                .batch_size(40)
                .tuning(|t| t.slots(10).stall_deadline(ms(400)))
                .workers(4)
                .map(|_, ctx| {
                    let id = ctx.id();
                    rayon::join(
                        || std::thread::sleep(ms(2)),
                        || std::thread::sleep(ms(10 + id % 3)),
                    );
                    Ok(())
                }),
        );
        assert_eq!(pulled(loader.epochs(0..2).unwrap()), 800);
    }
}

#[test]
fn decoder_and_transform_have_a_deadline_each() {
    let slow = |sample| {
        if sample == 9 {
            std::thread::sleep(ms(700));
        }
    };
    let dataset = Hooked {
        open: Box::new(slow),
        ..Hooked::in_memory()
    };
    let loader = build(
        Loader::builder(dataset)
            .batch_size(4)
            .tuning(|t| t.stall_deadline(ms(1000)))
            .map(move |_, ctx| {
                slow(ctx.id());
                Ok(())
            }),
    );
    assert_eq!(pulled(loader.epoch(0).unwrap()), 100);
}

/// A pause of the whole process (a job that is suspended, a frozen cgroup) counts as a small part
/// of the deadline, however long it is.
#[test]
fn a_process_that_is_often_stopped_is_not_stalled() {
    if in_child().is_some() {
        return works_for_a_second();
    }
    let dir = Dir::new();
    let mut process = child(&here!(), &dir.path(""), ":")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    assert!(
        lines.any(|line| line.ends_with("begun")),
        "it ended before it began"
    );
    let send = |signal| kill_process(Pid::from_child(&process), signal).unwrap();
    for _ in 0..6 {
        send(Signal::STOP);
        std::thread::sleep(ms(1300));
        send(Signal::CONT);
        std::thread::sleep(ms(110));
    }
    let mut words = lines.collect::<Vec<_>>().join("\n");
    let mut errors = process.stderr.take().unwrap();
    errors.read_to_string(&mut words).unwrap();
    let status = process.wait().unwrap();
    assert!(
        status.success() && words.contains("1 passed"),
        "{status}: {words}"
    );
}

/// About 1.2 s of its own time, on one sample, with a deadline of 4 s.
fn works_for_a_second() {
    let loader = build(
        memory()
            .workers(1)
            .tuning(|t| t.stall_deadline(ms(4000)))
            .map(|_, ctx| {
                if ctx.id() == 0 {
                    println!("begun");
                    let mut own = Duration::ZERO;
                    let mut last = Instant::now();
                    while own < ms(1200) {
                        std::thread::sleep(ms(1));
                        own += last.elapsed().min(ms(50));
                        last = Instant::now();
                    }
                }
                Ok(())
            }),
    );
    assert_eq!(pulled(loader.epoch(0).unwrap()), 400);
}
