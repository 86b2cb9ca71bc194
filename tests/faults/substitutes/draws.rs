use super::datasets::{Frames, Mixed, labelled_pictures, numbered};
use super::*;
use crate::common::toys::Chunks;
use feedline::dataset::{Concat, DatasetExt, TfRecord};
use feedline::order::LastBatch;
use feedline::tensor::{DType, Field};
use feedline::{Loader, LoaderBuilder, Order, Rank};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The bytes of an extent count once, however many fields are cut from it.
#[test]
fn samples_with_fields_of_one_extent_have_substitutes() {
    let dir = Dir::new();
    let builder = Loader::builder(Frames::new(&dir, 40, 64 << 10)).batch_size(8);
    let loader = build(builder.on_bad_sample(ALL).map(refuse(&[9])));
    assert_eq!(pulled(loader.epoch(0).unwrap()), 40);
    let ledger = loader.ledger();
    assert_eq!(
        ledger.samples.len(),
        1,
        "good samples are in the ledger: {:?}",
        ledger.samples
    );
}

#[test]
fn tfrecords_of_two_features_have_substitutes() {
    let dir = Dir::new();
    let dataset = TfRecord::builder()
        .index(false)
        .raw_bytes(Field::fixed("image", DType::U8, [60_000]), "image")
        .ints(Field::fixed("label", DType::I64, []), "label")
        .open(labelled_pictures(&dir, 40, 60_000))
        .map(Arc::new)
        .unwrap();
    let plain = build(Loader::builder(dataset.clone()).batch_size(8));
    assert_eq!(pulled(plain.epoch(0).unwrap()), 40);
    let loader = build(
        Loader::builder(dataset)
            .batch_size(8)
            .on_bad_sample(ALL)
            .map(refuse(&[9])),
    );
    assert_eq!(pulled(loader.epoch(0).unwrap()), 40);
    assert_eq!(loader.ledger().samples.len(), 1);
}

#[test]
fn chunks_partly_in_memory_are_read() {
    let dir = Dir::new();
    let dataset = Mixed::new(numbered(&dir, &[10; 6], &[]));
    let loader = build(Loader::builder(dataset).batch_size(6).on_bad_sample(ALL));
    assert_eq!(delivered(loader.epoch(0).unwrap()).len(), 10);
}

#[test]
fn chunks_partly_in_memory_can_be_substitutes() {
    let dir = Dir::new();
    let dataset = Mixed::new(numbered(&dir, &[10; 6], &[0]));
    let loader = build(
        Loader::builder(dataset)
            .batch_size(6)
            .order(Order::sequential())
            .on_bad_sample(ALL),
    );
    assert_eq!(delivered(loader.epoch(0).unwrap()).len(), 10);
    assert_eq!(
        loader.ledger().samples.len(),
        10,
        "{:?}",
        loader.ledger().samples
    );
}

fn lanes(toy: &Arc<Chunks>) -> LoaderBuilder {
    Loader::builder(toy.clone())
        .order(Order::windowed(5, 2).lanes(4))
        .global_batch(8)
        .on_bad_sample(ALL)
        .map(refuse(&[3, 30, 61, 90, 111, 140, 170, 171]))
}

/// The draw ignores which chunks are open, since that depends on the lanes of a rank.
#[test]
fn substitutes_of_lanes_are_the_same_in_any_world() {
    let dir = Dir::new();
    let toy = numbered(&dir, &[10; 20], &[]);
    let whole = build(lanes(&toy));
    let mut one: Vec<Vec<_>> = delivered(whole.epoch(0).unwrap());
    one.iter_mut().for_each(|batch| batch.sort_unstable());
    let halves: Vec<_> = (0..2)
        .map(|rank| {
            delivered(
                build(lanes(&toy).rank(Rank::new(rank, 2).unwrap()))
                    .epoch(0)
                    .unwrap(),
            )
        })
        .collect();
    let mut two: Vec<Vec<_>> = halves[0]
        .iter()
        .zip(&halves[1])
        .map(|(a, b)| [&a[..], b].concat())
        .collect();
    two.iter_mut().for_each(|batch| batch.sort_unstable());
    assert!(one.iter().flatten().filter(|row| row.1 == 2).count() == 8);
    assert_eq!(one, two);
}

#[test]
fn substitutes_of_lanes_do_not_depend_on_the_steps() {
    let dir = Dir::new();
    let toy = numbered(&dir, &[10; 20], &[]);
    let whole = delivered(build(lanes(&toy)).epoch(0).unwrap());
    let loader = build(lanes(&toy));
    let mut cut = Vec::new();
    while cut.len() < whole.len() {
        cut.extend(delivered(loader.steps(1).unwrap()));
    }
    assert_eq!(whole, cut);
}

#[test]
fn substitutes_do_not_depend_on_the_place_of_resume() {
    let dir = Dir::new();
    let toy = numbered(&dir, &[10; 20], &[4, 11]);
    let whole = delivered(build(lanes(&toy)).epoch(0).unwrap());
    for taken in 1..whole.len() - 1 {
        let loader = build(lanes(&toy).workers(2));
        let head = delivered(loader.epoch(0).unwrap().take(taken));
        let state = loader.state().unwrap();
        let tail = delivered(build(lanes(&toy).resume(state)).epoch(0).unwrap());
        assert_eq!([head, tail].concat(), whole, "{taken}");
    }
    for order in [Order::sequential(), Order::windowed(5, 3)] {
        let make = || {
            lanes(&toy)
                .order(order.clone())
                .tuning(|t| t.slots(1))
                .workers(1)
        };
        let whole = delivered(build(make()).epoch(0).unwrap());
        let loader = build(make());
        let cut: Vec<_> = (0..whole.len())
            .flat_map(|_| delivered(loader.steps(1).unwrap()))
            .collect();
        assert_eq!(whole, cut);
    }
}

#[test]
fn substitutes_of_chunks_do_not_depend_on_workers_or_resume() {
    let dir = Dir::new();
    let toys = [
        numbered(&dir, &[1, 0, 30, 7, 1, 1, 0, 60], &[0, 3]),
        numbered(&dir, &[100], &[]),
    ];
    let thrice: Vec<u64> = (0..100).chain([3, 3, 3]).collect();
    let orders = [
        Order::sequential(),
        Order::windowed(5, 2),
        Order::shuffled(2),
        Order::indices(thrice),
    ];
    for (toy, order) in toys
        .iter()
        .flat_map(|toy| orders.iter().map(move |order| (toy, order)))
    {
        let make = |workers| {
            let builder = Loader::builder(toy.clone())
                .order(order.clone())
                .batch_size(7)
                .last_batch(LastBatch::Pad);
            builder
                .on_bad_sample(ALL)
                .workers(workers)
                .map(refuse(&[3, 44, 45]))
        };
        let mut first = None;
        for workers in [1, 4] {
            let loader = build(make(workers));
            let all = delivered(loader.epochs(0..3).unwrap());
            assert!(all.iter().flatten().any(|row| row.1 == 2));
            let again = build(make(workers));
            let one_by_one: Vec<_> = (0..3)
                .flat_map(|epoch| delivered(again.epoch(epoch).unwrap()))
                .collect();
            assert_eq!(all, one_by_one);
            let resumed = build(make(workers));
            let head = delivered(resumed.epochs(0..3).unwrap().take(5));
            let state = resumed.state().unwrap();
            drop(resumed);
            let resumed = build(make(3).resume(state));
            let tail = delivered(resumed.epochs(0..3).unwrap());
            assert_eq!([head, tail].concat(), all);
            assert_eq!(*first.get_or_insert(all.clone()), all);
        }
    }
}

#[test]
fn chunks_of_subsets_have_whole_substitutes() {
    let dir = Dir::new();
    // Samples 0 to 13, the last nine in a bad chunk; then 14 to 35, the first in a bad chunk.
    let a = numbered(&dir, &[5, 0, 9], &[2]);
    let b = numbered(&dir, &[1, 20, 0, 1], &[0]);
    let both = Arc::new(Concat::new([a, b]).unwrap());
    let subset = Arc::new(
        both.clone()
            .subset((0..36).filter(|id| id % 3 != 1).collect::<Vec<u64>>())
            .unwrap(),
    );
    let good = |id: &u64| ![1, 20].contains(id) && !(5..15).contains(id);
    let number = |id: u64| if id < 14 { id } else { id - 14 };
    for workers in [1, 3] {
        for order in [
            Order::sequential(),
            Order::shuffled(4),
            Order::windowed(4, 3),
        ] {
            let builder = Loader::builder(both.clone())
                .batch_size(6)
                .order(order)
                .workers(workers);
            let loader = build(builder.on_bad_sample(ALL).map(refuse(&[1, 20])));
            let mut real = BTreeSet::new();
            for batch in loader.epochs(0..3).unwrap() {
                let batch = batch.unwrap();
                for ((id, bytes), status) in rows(&batch).into_iter().zip(batch.status()) {
                    assert_eq!(bytes, number(id).to_ne_bytes());
                    assert!(good(&id) && *status != 1, "{id} {status}");
                    real.extend((*status == 0).then_some(id));
                }
            }
            assert!(real.into_iter().eq((0..36).filter(good)));
        }
        let loader = build(
            Loader::builder(subset.clone())
                .batch_size(6)
                .workers(workers)
                .on_bad_sample(ALL),
        );
        for batch in loader.epochs(0..3).unwrap() {
            for (id, bytes) in rows(&batch.unwrap()) {
                assert_eq!(bytes, number(subset.origin(id)).to_ne_bytes());
            }
        }
    }
}

/// A drawn bad chunk is remembered, and rows that need the same chunk are served together, even if
/// rows of several bad chunks are mixed. One opening per row would be more than a thousand.
#[test]
fn substitute_chunks_are_not_opened_for_every_row() {
    let dir = Dir::new();
    for workers in [1, 2, 8] {
        for order in [Order::sequential(), Order::windowed(5, 6)] {
            let toy = numbered(&dir, &[300; 12], &[0, 1, 2, 3, 4, 5]);
            let loader = build(
                Loader::builder(toy.clone())
                    .batch_size(300)
                    .workers(workers)
                    .order(order)
                    .on_bad_sample(ALL),
            );
            assert_eq!(loader.epoch(0).unwrap().filter(Result::is_ok).count(), 12);
            let opened = toy.opened();
            assert!(
                opened < 12 + 6 * 16,
                "{opened} chunks were opened for 12 batches by {workers} workers"
            );
        }
    }
}

/// Two thirds of the samples are in a bad chunk, the others are open in memory. If every draw
/// counted as a try, one row in hundreds would get no substitute.
#[test]
fn draws_that_fall_on_a_chunk_known_to_be_bad_are_no_tries() {
    let dir = Dir::new();
    let toy = numbered(&dir, &[50, 90], &[1]);
    let loader = build(
        Loader::builder(toy)
            .batch_size(10)
            .order(Order::shuffled(1))
            .on_bad_sample(ALL),
    );
    let end = loader
        .epochs(0..40)
        .unwrap()
        .try_for_each(|batch| batch.map(drop));
    assert!(
        end.is_ok(),
        "after {} batches: {}",
        loader.report().total.consumer.batches,
        end.unwrap_err()
    );
}
