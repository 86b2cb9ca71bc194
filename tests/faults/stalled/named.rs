use super::hooked::Hooked;
use super::*;
use crate::common::toys::Chunks;
use feedline::storage::Mode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Pulls until the stall error and drops the loader. Only then the stalled code continues.
fn stalls(loader: Loader, gate: &Gate, stage: Stage, sample: Option<u64>) -> Error {
    let started = Instant::now();
    let mut epoch = loader.epoch(0).unwrap();
    let error = epoch
        .by_ref()
        .find_map(|batch| batch.err())
        .expect("it ended well");
    assert_eq!(
        (error.kind(), error.stage()),
        (ErrorKind::Stalled, stage),
        "{error}"
    );
    assert_eq!(error.site().sample, sample, "{error}");
    assert!(epoch.next().is_none());
    assert!(started.elapsed() < LATE);
    let before = loader.report().leaked;
    // Another loader reads the leak count after this one is gone.
    let other = build(file(&Dir::new()).workers(1));
    drop(epoch);
    drop(loader);
    assert!(started.elapsed() < LATE);
    assert!(
        other.report().leaked > before,
        "the thread was left behind and not counted"
    );
    gate.open();
    error
}

#[test]
fn a_hanging_transform_is_named_with_its_sample() {
    let dir = Dir::new();
    let gate = Gate::default();
    let inside = gate.clone();
    let loader = build(file(&dir).map(move |_, ctx| {
        if ctx.id() == 41 {
            inside.pass();
        }
        Ok(())
    }));
    let error = stalls(loader, &gate, Stage::Map, Some(41));
    let site = error.site();
    let place = (site.offset, site.len);
    assert_eq!(place, (Some(41 * 64), Some(64)), "{error}");
    let path = site.path.as_ref().unwrap();
    assert!(path.starts_with(dir.path("")), "{error}");
}

#[test]
fn a_hanging_transform_of_a_chunk_row_names_the_chunk() {
    let dir = Dir::new();
    let gate = Gate::default();
    let inside = gate.clone();
    let path = dir.write("chunks", &[7; 400]);
    let builder = Loader::builder(Chunks::open(&path, &[30, 70], 4))
        .batch_size(4)
        .workers(2)
        .tuning(|t| t.stall_deadline(DEADLINE));
    let loader = build(builder.map(move |_, ctx| {
        if ctx.id() == 30 {
            inside.pass();
        }
        Ok(())
    }));
    let error = stalls(loader, &gate, Stage::Map, Some(30));
    assert_eq!(
        error.site().path.as_deref(),
        Some(path.as_path()),
        "{error}"
    );
    assert!(
        error.message().starts_with("chunk 1: a transform"),
        "{error}"
    );
}

/// The stall report asks the dataset for the sample's place. The stall is reported even if the
/// dataset waits for the stuck transform.
#[test]
fn a_transform_that_locks_the_dataset_is_named() {
    let gate = Gate::default();
    let held = Arc::new(Mutex::new(()));
    let inside = gate.clone();
    let lock = held.clone();
    let dir = Dir::new();
    let dataset = Hooked {
        extents: Box::new(move |_| drop(held.lock())),
        ..Hooked::in_file(&dir.write("records", &[7; 400]))
    };
    let builder = Loader::builder(dataset)
        .batch_size(4)
        .workers(2)
        .order(Order::sequential())
        .tuning(|t| t.slots(2));
    let loader = build(
        builder
            .tuning(|t| t.stall_deadline(DEADLINE))
            .map(move |_, ctx| {
                if ctx.id() == 0 {
                    let _held = lock.lock().unwrap();
                    inside.pass();
                }
                Ok(())
            }),
    );
    let error = end_of(&loader, 0);
    gate.open();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
}

#[test]
fn a_hanging_transform_of_batches_is_named() {
    let dir = Dir::new();
    let gate = Gate::default();
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
fn a_dataset_that_hangs_in_extents_is_named_with_the_sample() {
    for mode in [Mode::Pread, Mode::Auto] {
        let dir = Dir::new();
        let gate = Gate::default();
        let inside = gate.clone();
        let dataset = Hooked {
            extents: Box::new(move |sample| {
                if sample == 30 {
                    inside.pass();
                }
            }),
            ..Hooked::in_file(&dir.write("records", &[7; 400]))
        };
        let builder = Loader::builder(dataset)
            .batch_size(4)
            .workers(2)
            .tuning(|t| t.reader(mode).stall_deadline(DEADLINE));
        // The planner's thread if the read starts at once; a worker's if the page cache is probed
        // first.
        let stage = if mode == Mode::Auto {
            Stage::Decode
        } else {
            Stage::Order
        };
        stalls(build(builder), &gate, stage, Some(30));
    }
}

/// A substitute is read and decoded: the error names the stage that hangs.
#[test]
fn a_decoder_that_hangs_on_a_substitute_is_named_as_one() {
    let gate = Gate::default();
    let armed = Arc::new(AtomicBool::new(false));
    let inside = gate.clone();
    let arm = armed.clone();
    let dataset = Hooked {
        open: Box::new(move |_| {
            if armed.load(Ordering::SeqCst) {
                inside.pass();
            }
        }),
        ..Hooked::in_memory()
    };
    let builder = Loader::builder(dataset)
        .batch_size(4)
        .workers(1)
        .order(Order::sequential());
    let loader = build(
        builder
            .on_bad_sample(ALL)
            .tuning(|t| t.stall_deadline(ms(300)))
            .map(move |_, ctx| {
                if ctx.id() == 99 {
                    arm.store(true, Ordering::SeqCst);
                    return Err(Error::user("the last one"));
                }
                Ok(())
            }),
    );
    let error = stall(&loader);
    gate.open();
    assert_eq!(error.stage(), Stage::Decode, "{error}");
}

/// `Framed::member` has a deadline like the dataset's other functions.
#[test]
fn a_dataset_that_hangs_in_member_is_named() {
    let gate = Gate::default();
    let inside = gate.clone();
    let dataset = Hooked {
        member: Box::new(move |_| inside.pass()),
        ..Hooked::in_memory()
    };
    let builder = Loader::builder(dataset)
        .batch_size(10)
        .workers(1)
        .order(Order::sequential())
        .on_bad_sample(ALL);
    let loader = build(builder.tuning(|t| t.stall_deadline(ms(300))).map(
        |_, ctx| match ctx.id() {
            3 => Err(Error::user("three")),
            _ => Ok(()),
        },
    ));
    let error = stall(&loader);
    gate.open();
    assert_eq!(error.site().sample, Some(3), "{error}");
}

/// A transform that uses rayon may run other samples' work on its own thread, and then continue. If
/// it hangs afterwards, its own sample is named.
#[test]
fn a_transform_that_hangs_after_good_samples_is_named() {
    let gate = Gate::default();
    let hung = Arc::new(AtomicU64::new(u64::MAX));
    let inside = gate.clone();
    let who = hung.clone();
    let loader = build(
        memory()
            .batch_size(40)
            .tuning(|t| t.slots(4).stall_deadline(ms(2000)))
            .workers(3)
            .map(move |_, ctx| {
                let id = ctx.id();
                let began = Instant::now();
                rayon::join(|| std::thread::sleep(ms(1)), || std::thread::sleep(ms(5)));
                let nested = began.elapsed() > ms(150);
                if nested
                    && who
                        .compare_exchange(u64::MAX, id, Ordering::SeqCst, Ordering::SeqCst)
                        .is_ok()
                {
                    inside.pass();
                }
                Ok(())
            }),
    );
    let error = loader.epochs(0..20).unwrap().find_map(Result::err);
    gate.open();
    let Some(error) = error else {
        panic!("no work of others ran within a transform: nothing was tested")
    };
    assert_eq!(
        error.site().sample,
        Some(hung.load(Ordering::SeqCst)),
        "{error}"
    );
}
