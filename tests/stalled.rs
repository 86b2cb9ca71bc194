//! Whoever does not answer is named within the deadline, and the loader can be dropped all the same.

mod common;
#[path = "common/gate.rs"]
mod gate;

use common::*;
use feedline::dataset::{Dataset, Parts};
use feedline::read::{Extent, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Result, Stage};
use gate::Gate;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_millis(400);
/// No stall, drop or hang takes longer than that, whatever the machine does.
const LATE: Duration = Duration::from_secs(60);

/// Records in a file, of which one has no place for as long as the gate is closed.
struct Gated {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    gate: Gate,
    at: u64,
}

impl Dataset for Gated {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        100
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sample_bytes_max(&self) -> u64 {
        64
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        if sample == self.at {
            self.gate.pass();
        }
        parts.extent(0, Extent { source: SourceId::at(0), offset: sample * 64, len: 64 });
        Ok(())
    }
}

fn file(dir: &Dir) -> LoaderBuilder {
    let (path, _) = records_file(dir, 100, 64);
    Loader::builder(records(&path, 64)).batch_size(4).workers(2).stall_deadline(DEADLINE)
}

/// Pulls until the error, which must be the stall, and drops the loader. What was stalled goes on only then.
fn stalls(loader: Loader, gate: &Gate, stage: Stage, sample: Option<u64>) {
    let started = Instant::now();
    let mut epoch = loader.epoch(0).unwrap();
    let error = epoch.by_ref().find_map(|batch| batch.err()).expect("it ended well");
    assert_eq!((error.kind(), error.stage()), (ErrorKind::Stalled, stage), "{error}");
    assert_eq!(error.site().sample, sample, "{error}");
    assert!(epoch.next().is_none());
    assert!(started.elapsed() < LATE);
    let before = loader.report().leaked;
    // Somebody looks at what was left behind after the loader is gone.
    let other = build(file(&Dir::new()).workers(1));
    drop(epoch);
    drop(loader);
    assert!(started.elapsed() < LATE);
    assert!(other.report().leaked > before, "the thread was left behind and not counted");
    gate.open();
}

#[test]
fn a_transform_that_does_not_come_back_is_named_with_its_sample() {
    let (dir, gate) = (Dir::new(), Gate::default());
    let inside = gate.clone();
    let loader = build(file(&dir).map(move |_, ctx| {
        if ctx.id() == 41 {
            inside.pass();
        }
        Ok(())
    }));
    stalls(loader, &gate, Stage::Map, Some(41));
}

#[test]
fn a_transform_of_batches_that_does_not_come_back_is_named() {
    let (dir, gate) = (Dir::new(), Gate::default());
    let inside = gate.clone();
    let loader = build(file(&dir).map_batch(move |batch, _| {
        if batch.index() == 7 {
            inside.pass();
        }
        Ok(())
    }));
    stalls(loader, &gate, Stage::Map, None);
}

#[test]
fn a_dataset_that_does_not_say_where_a_sample_is_is_named_with_it() {
    for mode in [feedline::read::Mode::Pread, feedline::read::Mode::Auto] {
        let (dir, gate) = (Dir::new(), Gate::default());
        let (path, bytes) = records_file(&dir, 100, 64);
        let mut sources = Sources::new();
        sources.file(path, bytes.len() as u64).unwrap();
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [64]))];
        let dataset = Gated { sources: Arc::new(sources), schema, gate: gate.clone(), at: 30 };
        let builder = Loader::builder(dataset).batch_size(4).workers(2).reader(mode).stall_deadline(DEADLINE);
        // The planner's, when the reader is asked at once; a worker's, when the page cache is asked first.
        let stage = if mode == feedline::read::Mode::Auto { Stage::Decode } else { Stage::Order };
        stalls(build(builder), &gate, stage, Some(30));
    }
}

#[test]
fn who_is_slow_with_every_sample_is_not_stalled() {
    let dir = Dir::new();
    let loader = build(file(&dir).batch_size(50).stall_deadline(Duration::from_millis(200)).map(|_, _| {
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    }));
    assert_eq!(pull(&loader, 0).unwrap().len(), 100);
}

#[test]
fn a_stall_is_found_by_who_polls_too_and_by_a_policy_that_substitutes_not_hidden() {
    let (dir, gate) = (Dir::new(), Gate::default());
    let inside = gate.clone();
    let loader = build(file(&dir).order(Order::sequential()).on_bad_sample(OnBadSample::Substitute { budget: 9 }).map(
        move |_, ctx| {
            if ctx.id() == 0 {
                inside.pass();
            }
            Ok(())
        },
    ));
    let mut epoch = loader.epoch(0).unwrap();
    let started = Instant::now();
    let error = loop {
        match epoch.next_within(Duration::from_millis(5)) {
            Poll::Pending => assert!(started.elapsed() < LATE),
            Poll::Ready(Some(Err(error))) => break error,
            Poll::Ready(other) => panic!("{:?}", other.map(|batch| batch.map(|batch| batch.index()))),
        }
    };
    assert_eq!((error.kind(), error.stage(), error.site().sample), (ErrorKind::Stalled, Stage::Map, Some(0)));
    assert!(loader.ledger().samples.is_empty());
    gate.open();
}

#[test]
fn a_consumer_that_holds_every_batch_is_told_that_and_not_that_something_stalls() {
    let dir = Dir::new();
    let held = Duration::from_secs(2);
    let loader = build(file(&dir).slots(2).stall_deadline(Duration::from_millis(100)).held_deadline(held));
    let mut epoch = loader.epoch(0).unwrap();
    let first = epoch.next().unwrap().unwrap();
    let second = epoch.next().unwrap().unwrap();
    assert_eq!(epoch.next().unwrap().err().map(|error| error.kind()), Some(ErrorKind::BatchesHeld));
    drop((first, second));
    assert_eq!(epoch.map(|batch| batch.unwrap().len()).sum::<usize>(), 92);
}
