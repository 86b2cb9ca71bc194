//! Ranks: together they deliver exactly what one rank would deliver, each sample at its place, for
//! every dataset, order, world and last batch. The oracle is `common/runs.rs`.

use crate::common::runs::*;
use crate::common::sweep;
use crate::common::*;
#[cfg(feature = "parquet")]
use feedline::dataset::Parquet;
use feedline::dataset::{Dataset, DatasetExt, Mix};
use feedline::order::Draws;
use feedline::tensor::DType;
use feedline::{Batch, ErrorKind, FieldView, LastBatch, Loader, MicroBatch, Order, Rank};
use std::sync::atomic::Ordering;
use std::time::Duration;
#[cfg(feature = "parquet")]
use {std::path::Path, std::sync::Arc};

/// Compares each rank's rows of two epochs with the oracle.
fn check(run: &Run, cut: Cut, draws: &mut Draws, what: &str) {
    let what = format!("{what}, {cut:?}, {:?}", run.naive);
    let order = run.ids(0);
    let len = order.len() as u64;
    let batches = cut.count(len);
    if batches == 0 {
        // It would train on nothing, silently.
        for rank in every_rank(cut.world) {
            let error = cut.builder(run, rank).build().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Empty, "{what}");
        }
        return;
    }
    let delivered = match cut.last {
        LastBatch::Drop => batches * cut.global,
        _ => len,
    };
    run.mapped.store(0, Ordering::Relaxed);
    let mut with_samples = 0;
    let mut all = Vec::new();
    for (rank, loader) in (0..).zip(cut.loaders(run, draws)) {
        assert_eq!(loader.batches_per_epoch(), batches, "{what}");
        assert_eq!(loader.samples_per_epoch(), delivered, "{what}");
        let own = loader.rank();
        assert_eq!(loader.global_batch(), cut.global);
        assert_eq!((own.number(), own.world()), (rank, cut.world));
        assert_eq!(loader.preview(1, u64::MAX).unwrap(), run.ids(1), "{what}");
        let epochs = loader.epochs(0..2).unwrap();
        assert_eq!(epochs.len() as u64, 2 * batches, "{what}");
        let found = parts(epochs);
        let right = run.epochs(&cut, 0..2, rank);
        same(&found, &right, &format!("{what}, rank {rank}"));
        let valid: u64 = found.iter().map(|part| part.valid as u64).sum();
        let samples = loader.report().total.consumer.samples;
        assert_eq!(samples, valid, "{what}");
        let rows = found.iter().flat_map(|part| &part.rows);
        with_samples += rows.filter(|row| row.id != u64::MAX).count() as u64;
        let first = found.into_iter().filter(|part| part.epoch == 0);
        all.extend(first.flat_map(|part| part.rows));
    }
    if run.map {
        let seen = run.mapped.load(Ordering::Relaxed);
        assert_eq!(seen, with_samples, "{what}: all rows but blank ones");
    }
    // The same check without positions: no sample is lost, none is doubled.
    let mut real = real_ids(&all);
    let mut right = order[..delivered as usize].to_vec();
    real.sort_unstable();
    right.sort_unstable();
    assert_eq!(real, right, "{what}");
}

#[test]
fn all_ranks_together_deliver_every_sample_once() {
    let dirs = [Dir::new(), Dir::new(), Dir::new()];
    let sets = [
        ("file", Data::file(&dirs[0], 37, 24)),
        ("file, in place", Data::file(&dirs[0], 33, 512)),
        ("memory", Data::memory(41, 8)),
        (
            "chunks",
            Data::chunks(&dirs[1], &[7, 1, 0, 13, 2, 9, 5], true, false),
        ),
        (
            "chunks in memory",
            Data::chunks(&dirs[2], &[3, 11, 0, 1, 8, 2], false, true),
        ),
    ];
    let mut draws = Draws::new(1, 0, 0, "ranks");
    for (name, data) in &sets {
        for world in 1..=8_u32 {
            for last in ALL_LAST {
                // One batch size that the world divides, one that it does not, and one above the
                // dataset's size.
                let odd = [world + 1, 2 * world + 3, 50][draws.below(3) as usize];
                for global in [world * (1 + draws.below(2) as u32), odd] {
                    let naive = match draws.below(4) {
                        0 => Naive::Shuffled { seed: 3 },
                        1 if data.toy.is_some() => Naive::windowed(3, 2, 1),
                        _ => Naive::Sequential { lanes: 1 },
                    };
                    let run = Run {
                        map: draws.bool(0.3),
                        map_batch: draws.bool(0.3),
                        ..Run::new(data, naive)
                    };
                    let cut = Cut::whole(global.into(), last, world);
                    check(&run, cut, &mut draws, name);
                }
            }
        }
    }
}

#[test]
fn a_tiny_dataset_gives_every_rank_as_many_batches() {
    let dir = Dir::new();
    let mut draws = Draws::new(2, 0, 0, "ranks");
    for count in sweep::size(vec![1, 3], vec![1, 2, 3], vec![1, 2, 3]) {
        let chunks = Dir::new();
        let sets = [
            Data::file(&dir, count, 40),
            Data::chunks(&chunks, &vec![1; count], true, false),
        ];
        for data in sets {
            let list = |ids: &[u64]| Naive::Indices {
                ids: ids.to_vec(),
                shuffled: None,
            };
            let naives = [
                Naive::Shuffled { seed: 1 },
                Naive::Sequential { lanes: 7 },
                list(&[0, 0, 0]),
                list(&[]),
            ];
            for (naive, last) in naives
                .iter()
                .flat_map(|naive| ALL_LAST.map(|last| (naive, last)))
            {
                for (world, global) in [(1, 1), (8, 8), (8, 17), (5, 64)] {
                    let run = Run::new(&data, naive.clone()).mapped();
                    let cut = Cut::whole(global, last, world);
                    check(&run, cut, &mut draws, "few samples");
                }
            }
        }
    }
}

/// Few and many samples in a chunk, and none.
fn many_chunks(dir: &Dir, seed: u64, samples: u64, most: u64, ragged: bool) -> Data {
    let rows = uneven(&mut Draws::new(seed, 0, 0, "chunks"), samples, most);
    Data::chunks(dir, &rows, ragged, false)
}

#[test]
fn lanes_give_every_rank_its_positions() {
    let dirs = [Dir::new(), Dir::new()];
    let sets = [
        many_chunks(&dirs[0], 1, 211, 9, true),
        many_chunks(&dirs[1], 2, 90, 30, false),
    ];
    let mut draws = Draws::new(3, 0, 0, "ranks");
    for world in 1..=8_u32 {
        for lanes in [1, 2, 3, 4, 8, 12, 300] {
            for window in [0, 1, 3] {
                if sweep::is_short() && !(world + lanes + window as u32).is_multiple_of(4) {
                    continue;
                }
                let naive = match window {
                    0 => Naive::Sequential { lanes },
                    _ => Naive::windowed(draws.next_u64(), window, lanes),
                };
                let data = &sets[draws.below(2) as usize];
                let last = ALL_LAST[draws.below(4) as usize];
                let globals = [world, world + 1, 3 * world, 2 * world + 3, 100];
                let global = u64::from(globals[draws.below(5) as usize]);
                let run = Run {
                    map: draws.bool(0.2),
                    map_batch: draws.bool(0.2),
                    ..Run::new(data, naive)
                };
                let mut own = draws.clone();
                let what = format!("{} samples in chunks", data.len());
                let cut = Cut::whole(global, last, world);
                within_a_minute(&format!("{what}, {world}, {:?}", run.naive), move || {
                    check(&run, cut, &mut own, &what);
                });
                draws.next_u64();
            }
        }
    }
}

#[test]
fn lanes_of_a_dataset_without_chunks_are_the_same_order() {
    let dir = Dir::new();
    let mut draws = Draws::new(4, 0, 0, "ranks");
    for data in [Data::file(&dir, 53, 20), Data::memory(64, 4)] {
        for (world, lanes) in [(1, 8), (2, 8), (3, 5), (8, 8), (4, 60), (4, 65_536)] {
            for last in ALL_LAST {
                let run = Run::new(&data, Naive::Sequential { lanes });
                let cut = Cut::whole(12, last, world);
                check(&run, cut, &mut draws, "no chunks");
            }
        }
    }
}

#[test]
fn the_smallest_legal_budget_serves_lanes_on_any_world() {
    let dir = Dir::new();
    let data = many_chunks(&dir, 5, 150, 7, true);
    let mut draws = Draws::new(5, 0, 0, "ranks");
    let worlds = [1, 1, 2, 3, 4, 5, 6, 8, 4];
    let lanes = [1, 8, 8, 8, 6, 5, 4, 8, 3];
    for (world, lanes) in worlds.into_iter().zip(lanes) {
        for window in [0, 1, 2, 50] {
            let naive = match window {
                0 => Naive::Sequential { lanes },
                _ => Naive::windowed(draws.next_u64(), window, lanes),
            };
            let run = Run::new(&data, naive);
            let slots = 1 + draws.below(2) as usize;
            let global = u64::from([world, 2 * world + 1, 400][draws.below(3) as usize]);
            let last = [LastBatch::Pad, LastBatch::Keep][draws.below(2) as usize];
            let cut = Cut::whole(global, last, world);
            let what = format!("{world} ranks, {cut:?}, {slots} slots, {:?}", run.naive);
            within_a_minute(&what.clone(), move || {
                for rank in every_rank(world) {
                    let make = |budget| {
                        let builder = cut.builder(&run, rank).workers(1);
                        let builder = builder.tuning(|t| t.slots(slots).depth(2));
                        builder.memory_budget(budget).build()
                    };
                    let mut refused = 0;
                    let mut legal = 64 << 20;
                    while legal - refused > 64 {
                        let middle = (refused + legal) / 2;
                        if make(middle).is_ok() {
                            legal = middle
                        } else {
                            refused = middle
                        }
                    }
                    let error = make(refused).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Budget, "{what}");
                    let loader = make(legal).unwrap();
                    assert!(loader.plan().total() <= legal, "{what}");
                    let right = run.epochs(&cut, 0..2, rank.number());
                    gives(loader.epochs(0..2), &right, &what);
                }
            });
        }
    }
}

/// Samples opened by all ranks in an epoch: planned, and measured by their reports (samples in
/// opened chunks, samples).
fn amplification(run: &Run, cut: Cut, draws: &mut Draws) -> (f64, f64) {
    let mut opened = 0;
    let mut samples = 0;
    let mut planned = Vec::new();
    for loader in cut.loaders(run, draws) {
        let right = run.parts(&cut, 0, loader.rank().number());
        gives(loader.epoch(0), &right, "amplification");
        let report = loader.report();
        let chunks = report.total.decode.chunks.unwrap();
        let received = report.total.consumer.samples;
        let told = report.total.read_amplification().unwrap();
        assert_eq!(told, chunks.samples as f64 / received as f64);
        opened += chunks.samples;
        samples += received;
        planned.push(report.planned_amplification.unwrap());
    }
    assert!(planned.iter().all(|one| *one == planned[0]), "{planned:?}");
    assert_eq!(samples, run.data.len());
    (planned[0], opened as f64 / samples as f64)
}

#[test]
fn eight_lanes_read_at_most_a_twentieth_twice() {
    let dir = Dir::new();
    let mut draws = Draws::new(6, 0, 0, "ranks");
    let rows: Vec<u64> = (0..420).map(|_| 20 + draws.below(60)).collect();
    let data = Data::chunks(&dir, &rows, false, false);
    let toy = data.toy.clone().unwrap();
    let opened = || -> Vec<u64> {
        let counts = toy.opened.iter();
        counts
            .map(|opened| opened.swap(0, Ordering::Relaxed))
            .collect()
    };
    for naive in [Naive::Sequential { lanes: 8 }, Naive::windowed(7, 4, 8)] {
        let run = Run::new(&data, naive);
        for world in [1, 2, 4, 8] {
            let cut = Cut::whole(64, LastBatch::Keep, world);
            let (planned, found) = amplification(&run, cut, &mut draws);
            assert!((1.0..=1.05).contains(&found), "{found} over {world} ranks");
            let what = format!("{planned} planned, {found} found over {world} ranks");
            assert!((planned - found).abs() < 1e-9, "{what}");
            // The toy's own count: only chunks on the seven cuts are opened twice.
            let opened = opened();
            let twice = opened.iter().filter(|times| **times == 2).count();
            let once = opened.iter().filter(|times| **times == 1).count();
            assert!(once + twice == opened.len() && twice <= 7, "{opened:?}");
        }
        // Worlds that do not divide the lanes, and batches not divisible by the world, open more,
        // but as planned.
        for (world, global, least) in [(3, 63, 3.0), (6, 60, 3.0), (4, 66, 2.0), (5, 64, 5.0)] {
            let cut = Cut::whole(global, LastBatch::Keep, world);
            let (planned, found) = amplification(&run, cut, &mut draws);
            let what = format!("{planned} planned, {found} found over {world} ranks");
            assert!((least..=least * 1.05).contains(&found), "{what}");
            assert!((planned - found).abs() < 1e-9, "{what}");
            opened();
        }
    }
    // Without lanes every rank opens every chunk.
    let run = Run::new(&data, Naive::windowed(7, 4, 1));
    let cut = Cut::whole(64, LastBatch::Keep, 4);
    let (planned, found) = amplification(&run, cut, &mut draws);
    assert_eq!((planned, found), (4.0, 4.0));
}

/// Every kind of order over a dataset.
fn orders(data: &Data) -> Vec<Naive> {
    let samples = data.len();
    let ids: Vec<u64> = (0..40).map(|k| k * 7 % samples).collect();
    let steps = Steps {
        len: 45,
        samples,
        step: 4,
    };
    let indices = |shuffled| Naive::Indices {
        ids: ids.clone(),
        shuffled,
    };
    let sampler = |shuffled| Naive::Sampler {
        steps: steps.clone(),
        shuffled,
    };
    let weighted = |once| Naive::Weighted {
        weights: (0..samples).map(|id| 0.5 + (id % 5) as f64).collect(),
        draws: samples * 9 / 10,
        once,
        seed: 5,
    };
    let mut orders = vec![
        Naive::Sequential { lanes: 1 },
        Naive::Sequential { lanes: 4 },
        Naive::Shuffled { seed: 5 },
        indices(None),
        indices(Some(5)),
        sampler(None),
        sampler(Some(5)),
        weighted(false),
        weighted(true),
    ];
    if data.toy.is_some() {
        orders.extend([1, 6].map(|lanes| Naive::windowed(5, 3, lanes)));
    }
    orders
}

#[test]
fn any_world_gives_the_global_batches_of_one_rank() {
    let dirs = [Dir::new(), Dir::new()];
    let mut draws = Draws::new(7, 0, 0, "ranks");
    for data in [
        Data::file(&dirs[0], 51, 12),
        many_chunks(&dirs[1], 7, 51, 6, true),
    ] {
        for naive in orders(&data) {
            let run = Run::new(&data, naive).mapped();
            let last = ALL_LAST[draws.below(4) as usize];
            let mut of = |world| {
                let loaders = Cut::whole(10, last, world).loaders(&run, &mut draws);
                let ranks: Vec<_> = loaders
                    .iter()
                    .map(|loader| parts(loader.epochs(1..3).unwrap()))
                    .collect();
                union(&ranks, run.naive.in_turn())
            };
            let alone = of(1);
            assert!(alone.len() >= 8);
            for world in [2, 3, 5, 8] {
                let what = format!("{:?}, {last:?}, {world} ranks", run.naive);
                same(&of(world), &alone, &what);
            }
        }
    }
}

#[test]
fn a_mix_keeps_its_proportions_over_any_world() {
    let counts = [90, 10, 33];
    let records = |number: usize| noise_records(counts[number], 4, number as u64 + 1);
    let mix = || {
        let parts = [(records(0), 5.0), (records(1), 1.0), (records(2), 2.0)];
        Mix::new(parts, 11).unwrap().epoch_len(168).unwrap()
    };
    let bytes: Vec<u8> = (1..)
        .zip(counts)
        .flat_map(|(seed, count)| noise(count * 4, seed))
        .collect();
    assert_eq!(mix().block(), [5, 1, 2]);
    let mut draws = Draws::new(8, 0, 0, "ranks");
    let globals = [8, 8, 16, 24, 56, 10, 21, 13];
    let worlds = [1, 3, 8, 5, 4, 4, 7, 13];
    for (global, world) in globals.into_iter().zip(worlds) {
        for last in ALL_LAST {
            let mut ranks = Vec::new();
            for rank in every_rank(world) {
                let builder = Loader::builder(mix()).rank(rank);
                let builder = builder.global_batch(global).last_batch(last);
                let loader = build(any_settings(builder, &mut draws));
                ranks.push(parts(loader.epochs(0..3).unwrap()));
            }
            let mix = mix();
            for batch in union(&ranks, false) {
                let what = format!(
                    "batch {} of epoch {}, {global} {world} {last:?}",
                    batch.index, batch.epoch
                );
                let real = real_ids(&batch.rows);
                let positions = batch.index * global..168.min((batch.index + 1) * global);
                let id = |position| mix.sampler().unwrap().id(batch.epoch, position);
                let right: Vec<u64> = positions.map(id).collect();
                assert_eq!(real, right, "{what}");
                let own = |row: &Sample| row.bytes == bytes[row.id as usize * 4..][..4];
                assert!(batch.rows.iter().all(own), "{what}");
                for (source, share) in mix.block().iter().enumerate() {
                    let ids = mix.concat().ids_of(source);
                    let found = real.iter().filter(|id| ids.contains(id)).count() as u64;
                    if global % 8 == 0 && real.len() as u64 == global {
                        assert_eq!(found, share * global / 8, "{what}, source {source}");
                    } else {
                        let off = (found * 8).abs_diff(share * real.len() as u64);
                        assert!(off < 4 * 8, "{what}, source {source}");
                    }
                }
            }
        }
    }
}

/// Compares a part of a batch with its rows in the batch.
fn check_micro(batch: &Batch, micro: &MicroBatch<'_>) {
    let rows = micro.rows();
    assert_eq!(micro.len(), rows.len());
    assert_eq!(micro.ids(), &batch.ids()[rows.clone()]);
    assert_eq!(micro.status(), &batch.status()[rows.clone()]);
    let valid = (0..batch.valid()).filter(|row| rows.contains(row)).count();
    assert_eq!(micro.valid(), valid);
    let samples = micro.status().iter().map(|status| *status == 0);
    assert!(samples.eq((0..rows.len()).map(|row| row < valid)));
    let names = |fields: Vec<FieldView<'_>>| -> Vec<String> {
        fields.iter().map(|field| field.name().into()).collect()
    };
    assert_eq!(
        names(micro.fields().collect()),
        names(batch.fields().collect())
    );
    for whole in batch.fields() {
        let field = micro.field(whole.name()).unwrap();
        let each = whole.size_bytes() / batch.len();
        assert_eq!(field.dtype(), whole.dtype());
        assert_eq!(field.shape()[0], rows.len());
        assert_eq!(field.shape()[1..], whole.shape()[1..]);
        assert_eq!(field.strides(), whole.strides());
        let bytes = field.as_bytes().unwrap();
        let right = &whole.as_bytes().unwrap()[rows.start * each..rows.end * each];
        assert_eq!(bytes, right);
        // A view, not a copy.
        assert_eq!(bytes.as_ptr(), right.as_ptr());
        assert_eq!(field.lens(), whole.lens().map(|lens| &lens[rows.clone()]));
        for (row, number) in rows.clone().enumerate() {
            match field.dtype() {
                DType::U8 => assert_eq!(
                    field.row::<u8>(row).unwrap(),
                    whole.row::<u8>(number).unwrap()
                ),
                _ => assert_eq!(
                    field.row::<u64>(row).unwrap(),
                    whole.row::<u64>(number).unwrap()
                ),
            }
        }
        for row in [rows.len(), usize::MAX] {
            let error = match field.dtype() {
                DType::U8 => field.row::<u8>(row).unwrap_err(),
                _ => field.row::<u64>(row).unwrap_err(),
            };
            let words = format!("no row {row} in a batch of {}", rows.len());
            assert_eq!(error.message(), words);
        }
    }
    let words = "no field `nothing` in the batch; its fields are record, head, drawn";
    must_say(micro.field("nothing"), words);
}

#[test]
fn micro_batches_cover_a_batch_exactly() {
    let dir = Dir::new();
    let data = Data::chunks(&dir, &[7, 6, 11], true, false);
    for last in ALL_LAST {
        for (global, world) in [(10, 1), (10, 3), (23, 2), (64, 4)] {
            if (last, global) == (LastBatch::Drop, 64) {
                continue;
            }
            let run = Run::new(&data, Naive::Shuffled { seed: 1 }).mapped();
            let mut draws = Draws::new(9, 0, 0, "ranks");
            for loader in Cut::whole(global, last, world).loaders(&run, &mut draws) {
                for batch in loader.epoch(0).unwrap() {
                    let batch = batch.unwrap();
                    for count in (1..batch.len() + 4).chain([1000, usize::MAX]) {
                        let micro = batch.micro(count).unwrap();
                        assert_eq!(micro.len(), count.min(batch.len()));
                        let micro: Vec<MicroBatch<'_>> = micro.collect();
                        let rows = micro.iter().flat_map(MicroBatch::rows);
                        assert!(rows.eq(0..batch.len()));
                        let lens: Vec<usize> = micro.iter().map(MicroBatch::len).collect();
                        let least = *lens.iter().min().unwrap();
                        assert!(least > 0 && lens.iter().max().unwrap() - least <= 1);
                        let valid: usize = micro.iter().map(MicroBatch::valid).sum();
                        assert_eq!(valid, batch.valid());
                        micro.iter().for_each(|micro| check_micro(&batch, micro));
                    }
                    let words = "a batch cannot be split into 0 parts; use 1 or more";
                    let error = batch.micro(0).err().unwrap();
                    assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
                }
            }
        }
    }
}

#[test]
fn the_last_parts_of_a_masked_batch_hold_no_sample() {
    // 3 samples are left for the second batch, all for rank 0, in 10 rows.
    for (last, ids) in [(LastBatch::Mask, [u64::MAX; 2]), (LastBatch::Pad, [5, 6])] {
        let run = Run::new(&Data::memory(23, 4), Naive::Sequential { lanes: 1 });
        let cut = Cut::whole(20, last, 2);
        let loader = &cut.loaders(&run, &mut Draws::new(1, 0, 0, ""))[0];
        let batch = loader.epoch(0).unwrap().last().unwrap().unwrap();
        assert_eq!((batch.len(), batch.valid()), (10, 3));
        let valid: Vec<usize> = batch.micro(5).unwrap().map(|micro| micro.valid()).collect();
        assert_eq!(valid, [2, 1, 0, 0, 0]);
        // The last two rows of rank 0 stand at positions 28 and 29 of 23.
        assert_eq!(batch.micro(5).unwrap().last().unwrap().ids(), ids);
    }
}

#[test]
fn illegal_settings_of_ranks_are_refused_by_build() {
    let dir = Dir::new();
    let data = many_chunks(&dir, 1, 50, 9, false);
    let start = || data.builder();
    let records = || Data::memory(10, 4).builder();
    let rank = |rank, world| Rank::new(rank, world).unwrap();
    let windowed = |lanes| Order::windowed(1, 2).lanes(lanes);
    let only = "only windowed and sequential orders have lanes";
    let one = Order::sampler(Steps {
        len: 1,
        samples: 1,
        step: 1,
    });
    let part = data.dataset.clone().subset([1, 2]).unwrap();
    let of_ranks = |number, world| start().rank(rank(number, world));
    let with = |order| start().order(order);
    let most = u32::MAX;
    let few = "a global batch of 3 for 4 ranks: some would have no rows";
    let many = "more than 32 bits hold";
    let sequential = Order::sequential;
    let shuffled = || Order::shuffled(1);
    let cases = [
        (of_ranks(0, 4).global_batch(3), few),
        (of_ranks(1, 4).global_batch(0), "`global_batch` is 0"),
        (of_ranks(1, 4).batch_size(0), "`batch_size` is 0"),
        (
            of_ranks(0, 2).batch_size(usize::MAX),
            "`batch_size` is too large",
        ),
        (of_ranks(0, 2).global_batch(u64::MAX), many),
        (start().global_batch(1 << 33), many),
        (of_ranks(0, most).global_batch(5), "for 4294967295 ranks"),
        (with(windowed(0)), "0 lanes; 1 to 65536 are possible"),
        (
            with(windowed(65_537)),
            "65537 lanes; 1 to 65536 are possible",
        ),
        (with(windowed(u32::MAX)), "1 to 65536 are possible"),
        (with(sequential().lanes(0)), "0 lanes"),
        (records().order(sequential().lanes(65_537)), "65537 lanes"),
        (with(shuffled().lanes(0)), "0 lanes"),
        (with(shuffled().lanes(2)), only),
        (records().order(shuffled().lanes(2)), only),
        (with(windowed(4).then_shuffled(1)), only),
        (with(Order::indices([1]).lanes(2)), only),
        (with(one.lanes(2)), only),
        (with(Order::windowed(1, 0).lanes(2)), "a window of 0 chunks"),
        (Loader::builder(part).order(windowed(2)), "whole dataset"),
    ];
    for (number, (builder, words)) in cases.into_iter().enumerate() {
        println!("case {number}");
        must_fail(builder.build(), ErrorKind::Config, words);
    }
    for (rank, world, words) in [
        (0, 0, "a world of 0 ranks"),
        (4, 4, "rank 4 of a world of 4"),
        (u32::MAX, 1, "counted from 0"),
    ] {
        must_fail(Rank::new(rank, world), ErrorKind::Config, words);
    }
    // Settings at the limit are legal.
    let legal = [
        of_ranks(3, 4).global_batch(4),
        with(windowed(65_536)),
        with(sequential().lanes(65_536)),
        with(shuffled().lanes(1)),
        of_ranks(7, 8).batch_size(1),
    ];
    for (builder, global) in legal.into_iter().zip([4, 32, 32, 32, 8]) {
        let loader = build(builder);
        assert_eq!(loader.global_batch(), global);
        assert!(parts(loader.epoch(0).unwrap()).len() >= 2);
    }
}

#[test]
fn ranks_report_their_rank_and_world() {
    let rank = Rank::new(2, 3).unwrap().with_local_rank(1);
    let loader = build(Data::memory(10, 4).builder().batch_size(2).rank(rank));
    assert_eq!((loader.rank(), loader.global_batch()), (rank, 6));
    let words = "rank 2 of 3 (local rank 1)";
    assert!(
        format!("{loader:?}").ends_with(&format!(", {words}")),
        "{loader:?}"
    );
    assert_eq!(loader.report().rank.as_deref(), Some(words));
    assert!(loader.report().to_string().contains("rank 2 of 3"));
    assert_eq!(build(Data::memory(10, 4).builder()).report().rank, None);
}

/// Every kind of dataset with a suitable order.
fn some_runs(dirs: &[Dir; 2]) -> Vec<Run> {
    let chunks = many_chunks(&dirs[0], 3, 131, 8, true);
    vec![
        Run::new(&Data::file(&dirs[1], 131, 512), Naive::Shuffled { seed: 2 }),
        Run::new(&Data::memory(131, 8), Naive::Sequential { lanes: 4 }).mapped(),
        Run::new(&chunks, Naive::windowed(2, 2, 4)),
        Run::new(&chunks, Naive::Sequential { lanes: 1 }),
        Run::new(&chunks, Naive::Shuffled { seed: 2 }).mapped(),
    ]
}

#[test]
fn held_batches_stop_every_rank_until_one_is_dropped() {
    let dirs = [Dir::new(), Dir::new()];
    for run in some_runs(&dirs) {
        let cut = Cut::whole(12, LastBatch::Pad, 3);
        for rank in every_rank(3) {
            let builder = cut.builder(&run, rank).tuning(|t| t.slots(3));
            let limit = Duration::from_millis(150);
            let loader = build(builder.tuning(|t| t.held_deadline(limit)));
            let mut epochs = loader.epochs(0..2).unwrap();
            let mut held: Vec<Batch> = epochs.by_ref().take(3).map(Result::unwrap).collect();
            let mut found: Vec<Part> = held.iter().map(part).collect();
            let next = epochs.next().unwrap();
            must_fail(next, ErrorKind::BatchesHeld, "all 3 batches");
            assert_eq!(loader.state().unwrap().steps(), 3);
            // Drop the middle batch, so that slots are reused in another order.
            drop(held.remove(1));
            found.extend(parts(epochs));
            let right = run.epochs(&cut, 0..2, rank.number());
            same(&found, &right, &format!("{:?}, {rank}", run.naive));
            // The held batches are unchanged.
            assert!(part(&held[0]) == right[0] && part(&held[1]) == right[2]);
        }
    }
}

#[test]
fn the_epoch_after_a_dropped_one_is_whole_on_every_rank() {
    let dirs = [Dir::new(), Dir::new()];
    let mut draws = Draws::new(10, 0, 0, "ranks");
    for run in some_runs(&dirs) {
        for last in ALL_LAST {
            let cut = Cut::whole(14, last, 4);
            for loader in cut.loaders(&run, &mut draws) {
                let rank = loader.rank().number();
                for round in 0..6 {
                    let epoch = draws.below(3);
                    let taken = draws.below(12) as usize;
                    let right = run.parts(&cut, epoch, rank);
                    let found = parts(loader.epoch(epoch).unwrap().take(taken));
                    let right = &right[..taken.min(right.len())];
                    same(&found, right, &format!("{:?}, round {round}", run.naive));
                }
                gives(loader.epoch(1), &run.parts(&cut, 1, rank), "after drops");
            }
        }
    }
}

#[test]
fn one_iterator_over_epochs_equals_single_epochs() {
    let dirs = [Dir::new(), Dir::new()];
    let mut draws = Draws::new(11, 0, 0, "ranks");
    for run in some_runs(&dirs) {
        for last in ALL_LAST {
            let cut = Cut::whole(20, last, 3);
            let of = |epoch, rank| run.parts(&cut, epoch, rank);
            let loaders = cut.loaders(&run, &mut draws);
            let batches = loaders[0].batches_per_epoch() as usize;
            // All epochs, in step.
            let mut iterators: Vec<_> = loaders
                .iter()
                .map(|loader| loader.epochs(0..3).unwrap())
                .collect();
            let mut next = |rank: usize| part(&iterators[rank].next().unwrap().unwrap());
            for epoch in 0..3 {
                let right = [0, 1, 2].map(|rank| of(epoch, rank));
                for batch in 0..batches {
                    let found = [0, 1, 2].map(&mut next);
                    let right = right.each_ref().map(|parts| parts[batch].clone());
                    assert_eq!(found, right, "{:?}", run.naive);
                }
            }
            assert!(
                iterators
                    .iter_mut()
                    .all(|iterator| iterator.next().is_none())
            );
            drop(iterators);
            for (rank, loader) in (0..).zip(&loaders) {
                // Endless from the third epoch, and the rest of an epoch after a drop.
                let right = run.epochs(&cut, 2..5, rank);
                let taken = 2 * batches + 2;
                let endless = loader.epochs(2..).unwrap().take(taken);
                same(&parts(endless), &right[..taken], "2..");
                assert_eq!(loader.next_epoch(), 4);
                let rest = loader.steps(batches as u64 - 2);
                gives(rest, &right[taken..], "steps go on");
                assert_eq!(loader.next_epoch(), 5);
                gives(loader.steps(1), &of(5, rank)[..1], "one step");
                assert!(parts(loader.epochs(3..3).unwrap()).is_empty());
                let right = run.epochs(&cut, 1..3, rank);
                gives(loader.epochs(1..=2), &right, "1..=2");
            }
        }
    }
}

#[test]
fn eight_ranks_on_eight_threads_share_a_dataset() {
    let dirs = [Dir::new(), Dir::new()];
    for run in some_runs(&dirs) {
        let cut = Cut::whole(24, LastBatch::Pad, 8);
        let found: Vec<Vec<Part>> = std::thread::scope(|scope| {
            let loaders = cut.loaders(&run, &mut Draws::new(12, 0, 0, ""));
            let threads: Vec<_> = loaders
                .into_iter()
                .map(|loader| scope.spawn(move || parts(loader.epochs(0..3).unwrap())))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        for (rank, found) in (0..).zip(&found) {
            let right = run.epochs(&cut, 0..3, rank);
            same(found, &right, &format!("{:?}, rank {rank}", run.naive));
        }
    }
}

/// Ids and values of a real format over all ranks, in windows and lanes.
#[cfg(feature = "parquet")]
fn check_format(make: impl Fn() -> Arc<dyn Dataset>, check: impl Fn(&Batch, usize)) {
    let starts = make().chunked().unwrap().starts().to_vec();
    assert!(starts.len() > 3, "{starts:?}");
    let mut draws = Draws::new(13, 0, 0, "ranks");
    for (world, lanes) in [(1, 4), (2, 4), (3, 4), (4, 4), (5, 2), (4, 1)] {
        for naive in [Naive::Sequential { lanes }, Naive::windowed(4, 2, lanes)] {
            for last in ALL_LAST {
                let len = starts[starts.len() - 1];
                let cut = Cut::whole((len / 3).clamp(5, 100), last, world);
                for rank in every_rank(world) {
                    let builder = Loader::builder(make())
                        .order(naive.order())
                        .global_batch(cut.global)
                        .last_batch(last);
                    let loader = build(any_settings(builder.rank(rank), &mut draws));
                    let mut found = Vec::new();
                    for batch in loader.epochs(0..2).unwrap() {
                        let batch = batch.unwrap();
                        (0..batch.len())
                            .filter(|row| batch.ids()[*row] != u64::MAX)
                            .for_each(|row| check(&batch, row));
                        let mut part = part(&batch);
                        part.rows.iter_mut().for_each(|row| row.bytes.clear());
                        found.push(part);
                    }
                    let right = |epoch| {
                        let ids = naive.ids(&starts, epoch);
                        cut.parts(epoch, &ids, rank.number(), naive.in_turn(), |_| vec![])
                    };
                    let what = format!("{naive:?}, {cut:?}, {len} samples");
                    same(&found, &[right(0), right(1)].concat(), &what);
                }
            }
        }
    }
}

#[cfg(feature = "parquet")]
#[test]
fn row_groups_of_parquet_come_over_all_ranks_in_lanes() {
    let files =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/parquet/{plain,zstd_v2}.parquet");
    check_format(
        || -> Arc<dyn Dataset> {
            let builder = Parquet::builder()
                .columns(["i64"])
                .up_to("text", 12)
                .chunk_bytes(700);
            Arc::new(builder.open(&files).unwrap())
        },
        |batch, row| {
            let number = batch.ids()[row] % 150;
            let field = |name| batch.field(name).unwrap();
            let text = format!("row {number}");
            assert_eq!(
                field("i64").row::<i64>(row).unwrap(),
                [number as i64 * 1_000_003 - 5]
            );
            assert_eq!(field("text").row::<u8>(row).unwrap(), text.as_bytes());
        },
    );
}

#[test]
fn replicated_ranks_deliver_the_same_batches() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let cut = Cut::whole(12, LastBatch::Keep, 2);
    let loader = |rank| build(run.builder().global_batch(cut.global).rank(rank));
    let process = |number| Rank::new(number, 4).unwrap();
    let loaders: Vec<Loader> = (0..4)
        .map(|number| loader(process(number).replicated(2).unwrap()))
        .collect();
    for batch in 0..5 {
        let next = |loader: &Loader| (loader.rank(), loader.next_ids().unwrap());
        let mut processes: Vec<_> = loaders.iter().map(next).collect();
        Rank::agree(&processes).unwrap();
        // One process forgot it.
        processes[3] = next(&loader(process(3)));
        let error = Rank::agree(&processes).unwrap_err();
        let words = "process 0 is one of 2 data ranks, process 3 one of 4";
        assert_eq!(error.message(), words);
        for (number, loader) in (0..).zip(&loaders) {
            let right = &run.parts(&cut, 0, number / 2)[batch..batch + 1];
            let what = format!("process {number}, batch {batch}");
            gives(loader.steps(1), right, &what);
        }
    }
}
