use super::datasets::numbered;
use super::*;
use feedline::storage::Mode;
use feedline::unstable::{Fault, Faulty};
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Rows of chunks are filled in long runs; between two rows the worker checks for a cancelled
/// epoch.
#[test]
fn dropping_an_epoch_does_not_wait_for_a_run_of_rows() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let toy = numbered(&dir, &[4000], &[]);
    let begun = Arc::new(AtomicU64::new(0));
    let rows = begun.clone();
    let loader = build(
        Loader::builder(toy)
            .batch_size(2000)
            .tuning(|t| t.slots(2))
            .workers(2)
            .map(move |_, _| {
                rows.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
                Ok(())
            }),
    );
    let mut epoch = loader.epoch(0).unwrap();
    assert!(epoch.next_within(Duration::from_millis(300)).is_pending());
    let before = leaked();
    drop((epoch, loader));
    let begun = begun.load(Ordering::Relaxed);
    let left = leaked() - before;
    assert!(
        begun < 2000 && left == 0,
        "the drop came after {begun} rows and leaked {left}"
    );
}

#[test]
fn a_drop_waits_for_one_substitute_at_most() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 100, 64);
    let tries = Arc::new(AtomicU64::new(0));
    let tried = tries.clone();
    let builder = Loader::builder(records(&path, 64))
        .batch_size(4)
        .workers(1)
        .on_bad_sample(ALL);
    let loader = build(builder.map(move |_, _| {
        tried.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(200));
        Err(Error::user("all are bad"))
    }));
    let mut epoch = loader.epoch(0).unwrap();
    assert!(epoch.next_within(Duration::from_millis(1300)).is_pending());
    drop((epoch, loader));
    // Each of the 100 samples would be tried.
    let tries = tries.load(Ordering::Relaxed);
    assert!(tries < 50, "{tries} tries, one each 0.2 s");
}

/// After the first row of a batch has failed for good, the other rows are not tried: each try takes
/// the pauses of its retries.
#[test]
fn dead_storage_is_reported_after_the_tries_of_one_row() {
    const STALE: i32 = 116;
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 1000, 64);
    let mut operations = Vec::new();
    for policy in [OnBadSample::Fail, OnBadSample::Substitute { budget: 2 }] {
        let faulty = Arc::new(Faulty::new().ever(0, Fault::Error(STALE)));
        let builder = Loader::builder(records(&path, 64))
            .batch_size(64)
            .tuning(|t| t.slots(2).reader(Mode::Pread))
            .workers(2);
        let loader = build(
            builder
                .on_bad_sample(policy)
                .tuning(|t| t.faulty(faulty.clone())),
        );
        loader.epoch(0).unwrap().next().unwrap().unwrap_err();
        operations.push(faulty.seen());
    }
    // Its tries, plus the reads in flight.
    assert!(
        operations[1] < operations[0] + 300,
        "operations until the error, Fail and Substitute: {operations:?}"
    );
}

#[test]
fn an_epoch_of_bad_samples_ends_with_the_first_error() {
    let one = build(
        Loader::builder(bytes(1))
            .on_bad_sample(ALL)
            .map(refuse(&[0])),
    );
    assert_eq!(
        one.epoch(0).unwrap().next().unwrap().unwrap_err().kind(),
        ErrorKind::User
    );
    let same = Loader::builder(bytes(3)).order(Order::indices(vec![1; 9]));
    let same = build(same.on_bad_sample(ALL).map(refuse(&[1])));
    assert_eq!(
        same.epoch(0).unwrap().next().unwrap().unwrap_err().kind(),
        ErrorKind::User
    );
}

/// Sample 4 of 20, the first of the second batch of 4, fails with a user error that is itself
/// broken.
fn perverse(fail: fn() -> Result<()>) -> LoaderBuilder {
    let builder = Loader::builder(bytes(20))
        .batch_size(4)
        .order(Order::sequential())
        .on_bad_sample(ALL);
    builder.map(move |_, ctx| if ctx.id() == 4 { fail() } else { Ok(()) })
}

/// In a separate process: a panic at a forbidden place would end it.
#[test]
fn an_error_whose_words_panic_ends_the_epoch_with_an_error() {
    #[derive(Debug)]
    struct Words;
    impl std::fmt::Display for Words {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("the words")
        }
    }
    impl std::error::Error for Words {}
    if !alone(&here!()) {
        return;
    }
    let loader = build(perverse(|| Err(Error::user("").with_source(Words))));
    let ended: Vec<_> = loader
        .epoch(0)
        .unwrap()
        .map(|batch| batch.map(|batch| batch.index()))
        .collect();
    assert!(
        matches!(&ended[..], [Ok(0), Err(error)] if error.site().sample == Some(4)),
        "{}",
        ended.len()
    );
}

/// In a separate process, as above.
#[test]
fn a_panic_with_a_panicking_payload_is_a_bad_sample() {
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                panic!("the payload's drop");
            }
        }
    }
    if !alone(&here!()) {
        return;
    }
    let loader = build(perverse(|| std::panic::panic_any(Payload)));
    assert_eq!(pulled(loader.epoch(0).unwrap()), 20);
    let bad: Vec<_> = loader
        .ledger()
        .samples
        .iter()
        .map(|bad| (bad.sample, bad.kind))
        .collect();
    assert_eq!(bad, [(4, ErrorKind::Panicked)]);
}
