//! Several loaders of one process share a budget: their leases never exceed it, and a dropped
//! loader frees its lease.

use crate::common::*;
use feedline::dataset::{Concat, Dataset, DatasetExt};
use feedline::memory::{Budget, MemoryTerm};
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const RECORD: usize = 4096;
const COUNT: usize = 200;
const MIB: usize = 1 << 20;
/// Below the default plan of a loader, above its minimum.
const SHARE: usize = 4 * MIB;

fn loader_of(path: &Path) -> LoaderBuilder {
    Loader::builder(records(path, RECORD))
        .order(Order::shuffled(5))
        .batch_size(16)
        .workers(1)
}

fn whole(loader: &Loader, bytes: &[u8]) -> bool {
    let rows = pull(loader, 0).unwrap();
    rows.len() == COUNT
        && rows
            .iter()
            .all(|(id, row)| *row == bytes[*id as usize * RECORD..][..RECORD])
}

#[test]
fn four_loaders_share_one_budget_and_deliver_everything() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    assert!(
        loader_of(&path).build().unwrap().plan().total() > SHARE,
        "the budget would not bind"
    );
    let budget = Budget::new(4 * SHARE, 4);
    let loaders: Vec<_> = (0..4)
        .map(|_| build(loader_of(&path).shared_budget(&budget)))
        .collect();
    let taken: usize = loaders.iter().map(|loader| loader.plan().total()).sum();
    assert!(taken <= budget.bytes());
    assert_eq!(budget.free(), budget.bytes() - taken);
    let text = loaders[0].plan().to_string();
    assert!(
        text.contains(
            "budget 4.0 MiB: 1/4 of the 16.0 MiB free in a budget of 16.0 MiB for 4 loaders\n"
        ),
        "{text}"
    );
    std::thread::scope(|scope| {
        for loader in &loaders {
            scope.spawn(|| assert!(whole(loader, &bytes)));
        }
    });
    let error = loader_of(&path).shared_budget(&budget).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget);
    assert!(
        error
            .to_string()
            .contains("for 4 loaders, and all are alive"),
        "{error}"
    );
    drop(loaders);
    assert_eq!(budget.free(), budget.bytes());
}

#[test]
fn a_small_loader_leaves_the_others_more() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, COUNT, RECORD);
    let budget = Budget::new(3 * SHARE, 3);
    let small = build(
        loader_of(&path)
            .memory_budget(SHARE / 2)
            .shared_budget(&budget),
    );
    let text = small.plan().to_string();
    assert!(
        text.contains("budget 2.0 MiB, less than 1/3 of the 12.0 MiB free"),
        "{text}"
    );
    let part = (budget.bytes() - small.plan().total()) / 2;
    assert!(part > SHARE);
    let next = build(loader_of(&path).shared_budget(&budget));
    assert_eq!(next.plan().budget, Some(part));
    let last = build(loader_of(&path).shared_budget(&budget));
    assert_eq!(
        last.plan().budget,
        Some(budget.bytes() - small.plan().total() - next.plan().total())
    );
}

#[test]
fn dropping_loader_epoch_and_batches_frees_the_budget() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let budget = Budget::new(2 * SHARE, 2);
    let _other = build(loader_of(&path).shared_budget(&budget));
    let before = budget.free();
    for mapped in [false, true] {
        let mut builder = loader_of(&path).shared_budget(&budget);
        if mapped {
            builder = builder.map_batch(|_, _| Ok(()));
        }
        let loader = build(builder);
        let left = budget.free();
        assert_eq!(left, before - loader.plan().total());
        let mut epoch = loader.epoch(0).unwrap();
        let batch = epoch.next().unwrap().unwrap();
        drop(loader);
        assert_eq!(
            budget.free(),
            left,
            "an epoch keeps the loader's threads and memory"
        );
        drop(epoch);
        assert_eq!(budget.free(), left, "a batch lies in the loader's memory");
        drop(batch);
        assert_eq!(budget.free(), before);
        let again = build(loader_of(&path).shared_budget(&budget));
        assert_eq!(again.plan().budget, Some(before));
        assert!(whole(&again, &bytes));
    }
}

#[test]
fn a_loader_over_its_part_of_a_budget_is_refused() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let budget = Budget::new(2 * SHARE, 2);
    // Seven slots of 0.8 MiB are more than a half, and less than the small loader leaves.
    let large = || {
        loader_of(&path)
            .batch_size(COUNT)
            .tuning(|t| t.slots(7))
            .shared_budget(&budget)
    };
    let error = large().build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget);
    let text = error.to_string();
    let words = [
        "4.0 MiB are allowed, ",
        "build loaders with smaller plans first:",
        "batch slots",
        "  sum ",
        "budget 4.0 MiB: 1/2 of the 8.0 MiB free in a budget of 8.0 MiB for 2 loaders",
    ];
    for word in words {
        assert!(text.contains(word), "{word} is not in {text}");
    }
    assert_eq!(budget.free(), budget.bytes());
    let small = build(loader_of(&path).memory_budget(MIB).shared_budget(&budget));
    let fits = build(large());
    assert!(whole(&small, &bytes) && whole(&fits, &bytes));
}

#[test]
fn a_failed_build_returns_its_reserved_memory() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let other = dir.write("other.bin", &noise(COUNT * RECORD, 99));
    let saved = loader_of(&other).build().unwrap().state().unwrap();
    let budget = Budget::new(2 * SHARE, 2);
    for _ in 0..3 {
        let error = loader_of(&path)
            .shared_budget(&budget)
            .resume(saved.clone())
            .build()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FingerprintMismatch, "{error}");
        assert_eq!(budget.free(), budget.bytes());
    }
    let kept: Vec<_> = (0..2)
        .map(|_| build(loader_of(&path).shared_budget(&budget)))
        .collect();
    assert!(
        kept.iter()
            .all(|loader| loader.plan().budget >= Some(SHARE) && whole(loader, &bytes))
    );
}

#[test]
fn loaders_on_many_threads_never_exceed_the_budget() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let budget = Budget::new(4 * SHARE, 4);
    let alive = AtomicUsize::new(0);
    let refused = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        // One loader more than places.
        for thread in 0..5_usize {
            let path = &path;
            let bytes = &bytes;
            let budget = &budget;
            let alive = &alive;
            let refused = &refused;
            scope.spawn(move || {
                for round in 0..8 {
                    let own = if (thread + round).is_multiple_of(2) {
                        SHARE / 2
                    } else {
                        64 * MIB
                    };
                    let loader = match loader_of(path)
                        .memory_budget(own)
                        .shared_budget(budget)
                        .build()
                    {
                        Ok(loader) => loader,
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Budget, "{error}");
                            refused.fetch_add(1, Ordering::Relaxed);
                            continue;
                        }
                    };
                    let total = loader.plan().total();
                    let sum = alive.fetch_add(total, Ordering::SeqCst) + total;
                    assert!(sum <= budget.bytes(), "{sum} bytes");
                    assert!(loader.epoch(0).unwrap().all(|batch| {
                        rows(&batch.unwrap())
                            .iter()
                            .all(|(id, row)| *row == bytes[*id as usize * RECORD..][..RECORD])
                    }));
                    alive.fetch_sub(total, Ordering::SeqCst);
                    drop(loader);
                }
            });
        }
    });
    assert_eq!(budget.free(), budget.bytes());
    assert!(refused.load(Ordering::Relaxed) < 40, "nobody was built");
}

#[test]
fn data_in_memory_is_a_term_of_plan_and_budget() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let memory = Arc::new(records(&path, RECORD).in_memory().unwrap());
    let (first, rest) = memory.clone().split(0.5, 1).unwrap();
    let same = Concat::new([memory.clone(), memory.clone()]).unwrap();
    let all: [Arc<dyn Dataset>; 4] = [
        memory.clone(),
        Arc::new(first),
        Arc::new(rest),
        Arc::new(same),
    ];
    for dataset in all {
        let loader = build(Loader::builder(dataset).batch_size(16).workers(1));
        assert_eq!(
            loader.plan().term(MemoryTerm::DATA).bytes(),
            bytes.len(),
            "shared bytes count once"
        );
        assert!(loader.plan().total() > bytes.len());
        assert!(
            loader
                .plan()
                .to_string()
                .contains("  data in memory    800.0 KiB  "),
            "{}",
            loader.plan()
        );
    }
    assert_eq!(
        build(loader_of(&path))
            .plan()
            .term(MemoryTerm::DATA)
            .bytes(),
        0
    );
    // What is in memory already is not copied.
    let again: Arc<dyn Dataset> = Arc::new(memory.clone().in_memory().unwrap());
    let both = Concat::new([again, memory.clone()]).unwrap();
    assert_eq!(
        build(Loader::builder(both).workers(1))
            .plan()
            .term(MemoryTerm::DATA)
            .bytes(),
        bytes.len()
    );
    let error = Loader::builder(memory)
        .workers(1)
        .memory_budget(bytes.len())
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget);
    let text = error.to_string();
    assert!(
        text.contains("800.0 KiB are allowed, ") && text.contains("without `in_memory`"),
        "{text}"
    );
}

#[test]
fn data_over_the_budget_is_refused_before_it_is_read() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let over = records(&path, RECORD);
    let within = records(&path, RECORD);
    std::fs::remove_file(&path).unwrap();
    let error = over.in_memory_within(bytes.len() - 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget);
    let text = "the files have 0.8 MiB, but `memory_budget` is 0.8 MiB: without `in_memory` they are read from storage";
    assert!(error.to_string().contains(text), "{error}");
    assert_eq!(
        within.in_memory_within(bytes.len()).unwrap_err().kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn loaders_of_the_same_data_in_memory_count_it_once() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let memory = Arc::new(records(&path, RECORD).in_memory().unwrap());
    let budget = Budget::new(bytes.len() + 2 * SHARE, 2);
    let make = || {
        Loader::builder(memory.clone())
            .batch_size(16)
            .workers(1)
            .shared_budget(&budget)
    };
    let first = build(make());
    assert!(
        first
            .plan()
            .to_string()
            .contains("budget 4.8 MiB: the data and 1/2 of the 8.0 MiB free"),
        "{}",
        first.plan()
    );
    let own = |loader: &Loader| loader.plan().total() - bytes.len();
    assert_eq!(budget.free(), 2 * SHARE - own(&first));
    let second = build(make());
    assert_eq!(budget.free(), 2 * SHARE - own(&first) - own(&second));
    let left = own(&second);
    drop(first);
    assert_eq!(
        budget.free(),
        2 * SHARE - left,
        "the second loader still has the data"
    );
    assert!(whole(&second, &bytes));
    drop(second);
    assert_eq!(budget.free(), budget.bytes());
    let error = Loader::builder(memory)
        .shared_budget(&Budget::new(bytes.len() - 1, 1))
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget);
    assert!(
        error
            .to_string()
            .contains("819200 bytes of data in memory, 819199 of 819199 bytes are free"),
        "{error}"
    );
}
