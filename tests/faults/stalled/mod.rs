//! A component that does not answer is named within the deadline, and the loader can still be
//! dropped; a merely slow one is not stalled.

mod hooked;

/// Names and details in stall errors.
mod named;

/// Slow cases that are no stalls.
mod patient;

/// Storage that stalls in a second read: a retry, a substitute, the page cache.
mod storage;

use crate::common::gate::Gate;
use crate::common::*;
use feedline::dataset::Records;
use feedline::error::Stage;
use feedline::{Error, ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Result};
use std::task::Poll;
use std::time::{Duration, Instant};

const DEADLINE: Duration = ms(400);
/// No stall, drop or hang takes longer on any machine.
const LATE: Duration = Duration::from_secs(60);
const ALL: OnBadSample = OnBadSample::Substitute { budget: u64::MAX };

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A hundred records in a file.
fn file(dir: &Dir) -> LoaderBuilder {
    let (path, _) = records_file(dir, 100, 64);
    Loader::builder(records(&path, 64))
        .batch_size(4)
        .workers(2)
        .tuning(|t| t.stall_deadline(DEADLINE))
}

/// Four hundred records in memory.
fn memory() -> LoaderBuilder {
    Loader::builder(Records::builder(64).open_bytes(vec![7; 64 * 400]).unwrap())
        .batch_size(4)
        .workers(2)
}

/// Pulls an epoch that must end with a stall; gives the error.
fn stall(loader: &Loader) -> Error {
    let error = end_of(loader, 0);
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    error
}

#[test]
fn a_deadline_of_less_than_20_ms_is_refused() {
    for deadline in [Duration::ZERO, Duration::from_nanos(3), ms(19)] {
        let builder = memory().tuning(|t| t.stall_deadline(deadline));
        let error = builder.build().unwrap_err();
        assert_error(&error, ErrorKind::Config, &["stall_deadline"]);
        assert_eq!(error.stage(), Stage::Build, "{error}");
    }
    // On a busy machine the build itself may take longer.
    let built = memory().tuning(|t| t.stall_deadline(ms(20))).build();
    assert!(
        built
            .as_ref()
            .err()
            .is_none_or(|error| error.kind() == ErrorKind::Stalled),
        "{built:?}"
    );
}

#[test]
fn polling_and_substitution_do_not_hide_a_stall() {
    let dir = Dir::new();
    let gate = Gate::default();
    let inside = gate.clone();
    let loader = build(
        file(&dir)
            .order(Order::sequential())
            .on_bad_sample(OnBadSample::Substitute { budget: 9 })
            .map(move |_, ctx| {
                if ctx.id() == 0 {
                    inside.pass();
                }
                Ok(())
            }),
    );
    let mut epoch = loader.epoch(0).unwrap();
    let started = Instant::now();
    let error = loop {
        match epoch.next_within(ms(5)) {
            Poll::Pending => assert!(started.elapsed() < LATE),
            Poll::Ready(Some(Err(error))) => break error,
            Poll::Ready(other) => {
                panic!("{:?}", other.map(|batch| batch.map(|batch| batch.index())))
            }
        }
    };
    assert_eq!(
        (error.kind(), error.stage(), error.site().sample),
        (ErrorKind::Stalled, Stage::Map, Some(0))
    );
    assert!(loader.ledger().samples.is_empty());
    gate.open();
}

#[test]
fn a_loader_can_start_an_epoch_after_a_stall() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, 400, 64);
    for (mode, direct) in readers() {
        let gate = Gate::default();
        let inside = gate.clone();
        let builder = Loader::builder(records(&path, 64))
            .batch_size(4)
            .workers(2)
            .tuning(|t| t.slots(4));
        let loader = build(
            builder
                .tuning(|t| t.reader(mode).direct(direct).stall_deadline(ms(300)))
                .map(move |_, ctx| {
                    if ctx.id() == 41 {
                        inside.pass();
                    }
                    Ok(())
                }),
        );
        let mut epoch = loader.epoch(0).unwrap();
        let held = epoch.next().unwrap().unwrap();
        let error = epoch.find_map(Result::err).unwrap();
        assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
        assert_eq!(stall(&loader).site().sample, Some(41));
        gate.open();
        assert_eq!(pull(&loader, 1).unwrap().len(), 400);
        drop(loader);
        let field = held.fields().next().unwrap();
        assert_eq!(field.as_bytes().unwrap(), &bytes[..256]);
    }
}
