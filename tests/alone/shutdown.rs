//! Dropping a loader at any point ends every thread, closes every descriptor and frees every slot.
//! One test function: threads and descriptors belong to the whole process.

use crate::common::*;
use feedline::{Loader, Order};
use std::time::{Duration, Instant};

#[test]
fn dropping_a_loader_at_any_point_leaves_nothing_behind() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 400, 4096);
    // The test harness has opened all its descriptors by now.
    let before = descriptors();
    let mut slowest = Duration::ZERO;
    for (mode, direct) in readers() {
        for taken in [0, 1, 2, 7, 39, 40] {
            for hold in [false, true] {
                let builder = Loader::builder(records(&path, 4096))
                    .order(Order::shuffled(1))
                    .map(move |_, ctx| {
                        if ctx.id() % 50 == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        Ok(())
                    });
                let loader = build(
                    builder
                        .batch_size(10)
                        .tuning(|t| t.slots(4).reader(mode).direct(direct))
                        .workers(3),
                );
                let mut epoch = loader.epoch(taken).unwrap();
                let mut held: Vec<_> = epoch
                    .by_ref()
                    .take(taken as usize)
                    .map(Result::unwrap)
                    .take(3)
                    .collect();
                if !hold {
                    held.clear();
                }
                let started = Instant::now();
                if taken % 2 == 0 {
                    drop(epoch);
                    drop(loader);
                } else {
                    drop(loader);
                    drop(epoch);
                }
                slowest = slowest.max(started.elapsed());
                // A joined thread stays in /proc until the kernel removes it.
                answer(
                    || format!("{mode:?} {direct:?} {taken}: {:?}", loader_threads()),
                    || loader_threads().is_empty().then_some(()),
                );
                // A batch that is still held keeps only its own memory.
                assert!(held.iter().all(|batch| batch.len() == 10));
            }
        }
        assert_eq!(descriptors(), before, "{mode:?} {direct:?}");
    }
    assert!(slowest < DEADLINE / 4, "a drop took {slowest:?}");
    assert_eq!(feedline::unstable::leaked(), 0);
}
