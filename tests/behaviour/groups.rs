//! Orders of groups: batches of one group on all ranks, their shapes, and resumes on other numbers
//! of ranks.

use crate::common::runs::*;
use crate::common::*;
use feedline::dataset::{DatasetExt, Images};
use feedline::decode::{Bytes, Image};
use feedline::memory::MemoryTerm;
use feedline::order::{Draws, Groups};
use feedline::{
    ErrorKind, LastBatch, Loader, LoaderBuilder, OnBadSample, Order, Rank, State, Status,
};
use std::sync::Arc;

/// 100 samples, sample i in group i % 3, in batches of 8, 13 and 10.
fn groups() -> Groups {
    Groups::of((0..100).map(|id| id % 3))
        .unwrap()
        .batch_sizes([8, 13, 10])
}

fn builder(data: &Data, last: LastBatch, rank: Rank) -> LoaderBuilder {
    let builder = data
        .builder()
        .order(Order::shuffled(7).grouped(groups()))
        .last_batch(last)
        .last_batch_share(1.0);
    builder.rank(rank).workers(2)
}

/// Real samples of every batch of all ranks, which must be of one group: (epoch, batch, group,
/// ids).
type Union = Vec<(u64, u64, usize, Vec<u64>)>;

/// Takes `steps` batches of every rank.
fn take(loaders: &[Loader], steps: u64) -> Union {
    take_of(loaders, steps, &|id| id as usize % 3)
}

fn take_of(loaders: &[Loader], steps: u64, group_of: &dyn Fn(u64) -> usize) -> Union {
    let mut all: Union = Vec::new();
    for (rank, loader) in loaders.iter().enumerate() {
        let next = loader.next_ids().unwrap();
        for (step, batch) in loader.steps(steps).unwrap().enumerate() {
            let batch = batch.unwrap();
            if rank == 0 {
                all.push((
                    batch.epoch(),
                    batch.index(),
                    batch.group().unwrap(),
                    Vec::new(),
                ));
            }
            let of_all = &mut all[step];
            assert!(step > 0 || batch.ids() == next, "the batch announced");
            assert_eq!(
                (batch.epoch(), batch.index(), batch.group()),
                (of_all.0, of_all.1, Some(of_all.2))
            );
            let ids = &batch.ids()[..batch.valid()];
            assert!(
                ids.iter().all(|id| group_of(*id) <= of_all.2),
                "{ids:?} in group {}",
                of_all.2
            );
            of_all.3.extend(ids);
        }
    }
    assert_eq!(all.len() as u64, steps);
    all
}

fn resumed(data: &Data, last: LastBatch, world: u32, state: &State) -> Vec<Loader> {
    let state = stored(state);
    every_rank(world)
        .map(|rank| build(builder(data, last, rank).resume(state.clone())))
        .collect()
}

#[test]
fn grouped_runs_resume_exactly_after_any_batch_on_any_world() {
    for data in [
        Data::memory(100, 4),
        Data::chunks(&Dir::new(), &[30, 1, 49, 20], false, false),
    ] {
        for last in ALL_LAST {
            let loader = build(builder(&data, last, Rank::single()));
            let count = loader.batches_per_epoch();
            assert_eq!(
                count,
                if last == LastBatch::Drop {
                    4 + 2 + 3
                } else {
                    5 + 3 + 4
                }
            );
            let all = take(std::slice::from_ref(&loader), 2 * count);
            let mut ids: Vec<u64> = all[..count as usize]
                .iter()
                .flat_map(|batch| batch.3.clone())
                .collect();
            assert_eq!(ids.len() as u64, loader.samples_per_epoch());
            assert_eq!(loader.preview(0, u64::MAX).unwrap(), ids);
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(
                ids.len() as u64,
                loader.samples_per_epoch(),
                "no sample twice"
            );
            assert!(
                all.iter()
                    .zip(&all[1..])
                    .any(|(one, next)| one.2 != next.2 && one.0 == next.0),
                "mixed"
            );
            assert!(
                all.iter()
                    .all(|batch| batch.3.iter().all(|id| *id as usize % 3 == batch.2)),
                "of one group"
            );

            // 1 → 3 → 8 → 2: after each batch by one, and the rest by another.
            let worlds = [1, 3, 8, 2];
            let mut state = build(builder(&data, last, Rank::single())).state().unwrap();
            for done in 0..2 * count as usize {
                let loaders = resumed(&data, last, worlds[done % 4], &state);
                assert_eq!(take(&loaders, 1), all[done..=done], "{last:?} after {done}");
                state = agreed(&loaders);
                assert!(
                    state.to_bytes().len() < 1024 && state.batch() == (done as u64 + 1) % count
                );
                if done % 5 > 0 {
                    continue;
                }
                let rest = resumed(&data, last, worlds[(done + 1) % 4], &state);
                let left = 2 * count - done as u64 - 1;
                assert_eq!(take(&rest, left), all[done + 1..], "{last:?} after {done}");
            }
        }
    }
}

#[test]
fn skipped_batches_of_groups_are_whole_batches() {
    let data = Data::memory(100, 4);
    let loader = build(builder(&data, LastBatch::Keep, Rank::single()));
    let all = take(std::slice::from_ref(&loader), 60);
    let fresh = build(builder(&data, LastBatch::Keep, Rank::single()))
        .state()
        .unwrap();
    assert_eq!(
        take(
            &resumed(&data, LastBatch::Keep, 2, &fresh.clone().advance(5)),
            3
        ),
        all[5..8]
    );
    assert_eq!(
        take(&resumed(&data, LastBatch::Keep, 2, &fresh.advance(50)), 3),
        all[50..53]
    );
}

/// One random run of two epochs over lengths, with ranges left out, resumed at random places by
/// other numbers of ranks.
fn check_random(number: u64) {
    let mut draws = Draws::new(number, 0, 0, "groups");
    let len = 60 + draws.below(200) as usize;
    let last = ALL_LAST[draws.below(4) as usize];
    let data = Data::memory(len, 4);
    let lengths: Vec<u64> = (0..len)
        .map(|_| 1 + draws.below(100) * draws.below(100) / 99)
        .collect();
    let groups = Groups::by_length(&lengths, 1 + draws.below(6) as usize)
        .unwrap()
        .budget(800 + draws.below(400));
    let groups = if draws.bool(0.5) {
        groups.multiple_of(8)
    } else {
        groups
    };
    let group_of = |id: u64| {
        groups
            .bounds()
            .partition_point(|bound| *bound < lengths[id as usize])
    };
    let order = Order::shuffled(number).grouped(groups.clone());
    let loaders = |world, state: Option<State>| -> Vec<Loader> {
        let builder = |rank| {
            data.builder()
                .order(order.clone())
                .last_batch(last)
                .rank(rank)
                .workers(2)
        };
        let resumed = |rank| {
            state.iter().fold(builder(rank), |builder, state| {
                builder.resume(state.clone())
            })
        };
        every_rank(world).map(|rank| build(resumed(rank))).collect()
    };
    let alone = data.builder().order(order.clone()).last_batch(last);
    if alone
        .build()
        .is_err_and(|error| error.kind() == ErrorKind::Empty)
    {
        return;
    }
    let single = loaders(1, None);
    let count = single[0].batches_per_epoch();
    let whole = take_of(&single, 2 * count, &group_of);
    assert!(
        whole
            .iter()
            .all(|batch| batch.3.len() as u64 <= single[0].global_batch())
    );
    let mut ids: Vec<u64> = whole[..count as usize]
        .iter()
        .flat_map(|batch| batch.3.clone())
        .collect();
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(
        (ids.len(), ids.len() as u64),
        (all, single[0].samples_per_epoch()),
        "{number}: no sample twice"
    );
    assert!(
        last == LastBatch::Drop || all == len,
        "{number}: none is missing"
    );

    let skips: Vec<(u64, std::ops::Range<u64>)> = (0..2)
        .map(|epoch| {
            let start = draws.below(count);
            (epoch, start..start + 1 + draws.below(count - start))
        })
        .collect();
    let right: Union = whole
        .iter()
        .filter(|batch| {
            !skips
                .iter()
                .any(|(epoch, range)| batch.0 == *epoch && range.contains(&batch.1))
        })
        .cloned()
        .collect();
    let mut done = 0;
    let mut state = None;
    for world in [1, 3, 8, 2] {
        let ranks = loaders(world, state);
        if world == 1 {
            skips
                .iter()
                .for_each(|(epoch, range)| ranks[0].skip(*epoch, range.clone()).unwrap());
        }
        let left = right.len() - done;
        let steps = if world == 2 {
            left
        } else {
            draws.below(left as u64 + 1) as usize
        };
        let found = take_of(&ranks, steps as u64, &group_of);
        assert_eq!(
            found,
            right[done..done + steps],
            "{number}: {world} ranks from {done}, without {skips:?}, {last:?}"
        );
        done += steps;
        state = Some(stored(&agreed(&ranks)));
    }
}

#[test]
fn grouped_runs_with_skips_resume_at_random_places() {
    // Each at four places.
    (0..50).for_each(check_random);
}

#[test]
fn the_plan_counts_the_table_of_groups() {
    let data = Data::memory(100_000, 4);
    let tables = |order| {
        build(data.builder().order(order).batch_size(8))
            .plan()
            .term(MemoryTerm::TABLES)
    };
    let plain = tables(Order::shuffled(1)).bytes();
    let grouped = tables(
        Order::shuffled(1).grouped(Groups::of((0..100_000).map(|id| (id % 7) as u8)).unwrap()),
    );
    assert!(
        (100_000..140_000).contains(&(grouped.bytes() - plain)),
        "{plain}, {}",
        grouped.bytes()
    );
    assert_eq!(grouped.why(), "samples in flight, groups of the order");
}

#[test]
fn another_grouping_or_batch_size_does_not_resume() {
    let data = Data::memory(100, 4);
    let state = build(builder(&data, LastBatch::Keep, Rank::single()))
        .state()
        .unwrap();
    let other = |groups: Groups, last| {
        let builder = data
            .builder()
            .order(Order::shuffled(7).grouped(groups))
            .last_batch(last);
        builder
            .resume_rebatched(state.clone())
            .build()
            .map(drop)
            .map_err(|error| error.message().to_owned())
    };
    assert_eq!(other(groups(), LastBatch::Pad), Ok(()));
    for (changed, words) in [
        (
            groups().batch_sizes([8, 12, 10]),
            "the largest batch of the groups is 13 in the state, 12 in the loader: give the groups",
        ),
        (
            groups().batch_sizes([8, 13, 9]),
            "the state and the loader have different batch sizes of the groups: give the groups",
        ),
        (
            Groups::of((0..100).map(|id| id % 2))
                .unwrap()
                .batch_sizes([8, 13]),
            "the groups are 3 in the state, 2 in the loader: give the groups",
        ),
    ] {
        let said = other(changed, LastBatch::Keep).unwrap_err();
        assert!(said.starts_with(words), "{said}");
    }
    let plain = data
        .builder()
        .order(Order::shuffled(7))
        .resume_rebatched(state.clone())
        .build()
        .unwrap_err();
    assert_eq!(
        plain.message(),
        "the order is grouped in the state, shuffled in the loader"
    );
}

/// Rows of all ranks in an epoch that repeat a sample, and samples in none.
fn uneven(loaders: &[Loader], samples: usize) -> (u64, u64) {
    let mut repeated = 0;
    let mut seen = vec![false; samples];
    for batch in loaders
        .iter()
        .flat_map(|loader| loader.epoch(0).unwrap())
        .map(Result::unwrap)
    {
        // Not the blank rows.
        let rows = batch.status().iter().zip(batch.ids());
        let again =
            rows.filter(|(status, id)| **status == Status::Padding as u8 && **id != u64::MAX);
        repeated += again.count() as u64;
        batch.ids()[..batch.valid()]
            .iter()
            .for_each(|id| seen[*id as usize] = true);
    }
    (repeated, seen.iter().filter(|seen| !**seen).count() as u64)
}

#[test]
fn repeated_and_left_out_samples_are_told_before_the_first_batch() {
    let data = Data::memory(100, 4);
    let lengths: Vec<u64> = (0..100).map(|id| 1 + id * id % 37).collect();
    let long = || Groups::by_length(&lengths, 5).unwrap();
    let orders = [
        Order::sequential(),
        Order::shuffled(3),
        Order::indices((0..70).collect::<Vec<_>>()),
        Order::shuffled(3).grouped(long()),
        Order::shuffled(3).grouped(Groups::of((0..100).map(|id| id % 3)).unwrap()),
    ];
    for (order, last, world) in orders
        .iter()
        .flat_map(|order| ALL_LAST.map(|last| (order, last)))
        .flat_map(|(order, last)| [1, 3].map(|world| (order, last, world)))
    {
        let loaders: Vec<Loader> = every_rank(world)
            .map(|rank| {
                build(
                    data.builder()
                        .order(order.clone())
                        .global_batch(7)
                        .last_batch(last)
                        .last_batch_share(1.0)
                        .rank(rank),
                )
            })
            .collect();
        let told: Vec<_> = loaders
            .iter()
            .map(|loader| loader.snapshot().epoch)
            .collect();
        assert!(told.iter().all(|one| *one == told[0]));
        let epoch = told[0];
        let log = loaders[0].log();
        assert_eq!(
            (log.epoch_repeated, log.epoch_left_out),
            (epoch.repeated, epoch.left_out)
        );
        assert_eq!(
            (epoch.batches, epoch.samples - epoch.left_out),
            (
                loaders[0].batches_per_epoch(),
                loaders[0].samples_per_epoch()
            )
        );
        let words = format!(
            "epoch     {} samples in {} batches; last batches repeat {}",
            epoch.samples, epoch.batches, epoch.repeated
        );
        let report = loaders[0].report().to_string();
        assert!(report.contains(&words), "{report}");
        let (repeated, missing) = uneven(&loaders, 100);
        assert_eq!(
            (epoch.repeated, epoch.left_out + 100 - epoch.samples),
            (repeated, missing),
            "{order:?}, {last:?}, {world}"
        );
        assert_eq!(loaders[0].snapshot().epoch, epoch);
    }
}

#[test]
fn groups_that_end_apart_may_repeat_or_leave_out_a_hundredth() {
    let data = Data::memory(2000, 4);
    let built = |groups: u64, rows, last, share: Option<f64>| {
        let order = Order::shuffled(1)
            .grouped(Groups::of((0..2000).map(|id| (id % groups) as u8)).unwrap());
        let builder = data
            .builder()
            .order(order)
            .global_batch(rows)
            .last_batch(last)
            .rank(Rank::new(0, 8).unwrap());
        let builder = share
            .into_iter()
            .fold(builder, LoaderBuilder::last_batch_share);
        builder
            .build()
            .map(|loader| loader.snapshot().epoch)
            .map_err(|error| error.message().to_owned())
    };
    // 20 groups of 100 samples: three batches of 32, and 4 more on 8 ranks.
    assert_eq!(
        built(20, 32, LastBatch::Pad, None).unwrap_err(),
        "an epoch of 2000 samples repeats 80 and leaves out 0 (4.0 %), because each group has its own last batch: use fewer groups or smaller batches, keep them with `last_batch(LastBatch::Mask)`, or allow it with `last_batch_share(0.04)`"
    );
    assert_eq!(
        built(20, 32, LastBatch::Pad, Some(0.04)).unwrap().repeated,
        80
    );
    assert!(
        built(20, 32, LastBatch::Drop, None)
            .unwrap_err()
            .contains("repeats 0 and leaves out 80 (4.0 %)")
    );
    assert_eq!(built(20, 32, LastBatch::Mask, None).unwrap().repeated, 0);
    // 1.3 %, but less than one batch: 2 groups of 1000, 13 left in each.
    assert_eq!(built(2, 47, LastBatch::Drop, None).unwrap().left_out, 26);
    assert!(
        built(2, 47, LastBatch::Drop, Some(f64::NAN))
            .unwrap_err()
            .contains("`last_batch_share` is NaN")
    );
}

#[test]
fn groups_without_sizes_take_the_loaders_batch() {
    let data = Data::memory(100, 4);
    let groups = Groups::of((0..100).map(|id| id / 60)).unwrap();
    let order = Order::sequential().grouped(groups);
    let loader = build(data.builder().order(order).batch_size(25));
    let batches: Vec<_> = loader
        .epoch(0)
        .unwrap()
        .map(|batch| batch.unwrap())
        .collect();
    let found: Vec<_> = batches
        .iter()
        .map(|batch| (batch.group(), batch.len(), batch.ids()[0]))
        .collect();
    let right = [
        (0, 25, 0),
        (0, 25, 25),
        (0, 10, 50),
        (1, 25, 60),
        (1, 15, 85),
    ];
    assert_eq!(
        found,
        right.map(|(group, len, first)| (Some(group), len, first))
    );
    let error = data
        .builder()
        .order(Order::shuffled(1).grouped(self::groups()))
        .batch_size(3)
        .build()
        .unwrap_err();
    let words = "`batch_size` is set, but the groups of the order set their own batch sizes: omit one of the two";
    assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    let error = data
        .builder()
        .order(Order::shuffled(1).grouped(self::groups().batch_sizes([99; 3])));
    let error = error
        .last_batch(LastBatch::Drop)
        .last_batch_share(1.0)
        .build()
        .unwrap_err();
    assert!(
        error.kind() == ErrorKind::Empty && error.message().starts_with("no group of the order"),
        "{error}"
    );
}

/// Files of bytes, in groups of 10, 100 and 1000 bytes at most.
fn texts(dir: &Dir, lens: &[usize]) -> (LoaderBuilder, Groups, Vec<Vec<u8>>) {
    let files: Vec<Vec<u8>> = (0..)
        .zip(lens)
        .map(|(number, len)| noise(*len, number))
        .collect();
    for (number, bytes) in files.iter().enumerate() {
        dir.write(&format!("class/{number:05}.jpg"), bytes);
    }
    let images = Images::open(dir.path("")).unwrap();
    let groups = Groups::by(images.lengths("image").unwrap(), &[10, 100, 1000]).unwrap();
    (
        Loader::builder(images).decode_field("image", Bytes::up_to(1000)),
        groups,
        files,
    )
}

#[test]
fn batches_have_the_shape_of_their_group() {
    let dir = Dir::new();
    let lens = (0..200)
        .map(|n| [3 + n % 8, 11 + n % 90, 101 + n % 900][n % 3])
        .collect::<Vec<_>>();
    let (builder, groups, files) = texts(&dir, &lens);
    let groups = groups
        .batch_sizes([30, 20, 2])
        .up_to("image", &[10, 100, 1000]);
    let loader = builder
        .order(Order::shuffled(3).grouped(groups))
        .last_batch(LastBatch::Pad)
        .workers(3)
        .build()
        .unwrap();
    // Some reuse of slots, so that rows of one stride overwrite those of another.
    for epoch in 0..3 {
        for batch in loader.epoch(epoch).unwrap() {
            let batch = batch.unwrap();
            let (most, rows) = [(10, 30), (100, 20), (1000, 2)][batch.group().unwrap()];
            let field = batch.field("image").unwrap();
            assert_eq!(
                (batch.len(), field.shape(), field.strides()),
                (rows, vec![rows, most], vec![most, 1])
            );
            let all = field.as_slice::<u8>().unwrap();
            for (row, id) in batch.ids().iter().enumerate() {
                let file = &files[*id as usize];
                assert_eq!(field.row::<u8>(row).unwrap(), file);
                assert_eq!(field.lens().unwrap()[row], file.len() as u64);
                let row = &all[row * most..(row + 1) * most];
                assert!(
                    row[..file.len()] == *file && row[file.len()..].iter().all(|byte| *byte == 0)
                );
            }
            let part = batch.micro(2).unwrap().nth(1).unwrap();
            assert_eq!(part.field("image").unwrap().shape(), [rows / 2, most]);
            let tensors = batch.into_dlpack();
            let image = tensors
                .fields
                .iter()
                .find(|(name, _)| name == "image")
                .unwrap();
            assert_eq!(image.1.shape(), [rows as i64, most as i64]);
        }
    }
    // Room for the largest batch, not for the most rows of the longest: 2000 bytes, and not
    // 200,000.
    let slot = loader.plan().term(feedline::memory::MemoryTerm::SLOTS).each;
    assert!(slot < 32 << 10, "{slot}");
}

#[test]
fn transforms_see_the_shape_of_the_group() {
    let dir = Dir::new();
    let lens = [5, 50, 500, 7, 70, 700];
    let (builder, groups, files) = texts(&dir, &lens);
    let groups = groups
        .batch_sizes([2, 2, 2])
        .up_to("image", &[10, 100, 1000]);
    let loader = builder
        .order(Order::shuffled(3).grouped(groups))
        .map(|row, _| {
            row.bytes_mut(0).fill(9);
            Ok(())
        })
        .map_batch(|batch, _| {
            let shape = batch.shape(0);
            assert_eq!(batch.bytes_mut(0).len(), shape.iter().product::<usize>());
            for row in batch.rows_mut::<u8>(0)? {
                let width = row.len();
                row[0] = width.ilog10() as u8;
            }
            Ok(())
        })
        .build()
        .unwrap();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        let field = batch.field("image").unwrap();
        let group = batch.group().unwrap();
        let width = [10, 100, 1000][group];
        for (row, id) in field
            .as_slice::<u8>()
            .unwrap()
            .chunks(width)
            .zip(batch.ids())
        {
            let len = files[*id as usize].len();
            assert!(row[0] == group as u8 + 1 && row[1..len].iter().all(|byte| *byte == 9));
            assert!(
                row[len..].iter().all(|byte| *byte == 0),
                "padding is zero after transforms"
            );
        }
    }
}

#[test]
fn a_substitute_is_of_the_same_group() {
    let dir = Dir::new();
    let lens = (0..60).map(|n| [5, 50, 500][n % 3]).collect::<Vec<_>>();
    let (builder, groups, _) = texts(&dir, &lens);
    let groups = groups
        .batch_sizes([4, 4, 4])
        .up_to("image", &[10, 100, 1000]);
    let loader = builder
        .order(Order::shuffled(3).grouped(groups))
        .map(|_, ctx| fail_if(ctx.id() % 7 == 0, "a bad one"))
        .on_bad_sample(OnBadSample::Substitute { budget: 20 })
        .build()
        .unwrap();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        assert!(
            batch
                .ids()
                .iter()
                .all(|id| *id as usize % 3 == batch.group().unwrap())
        );
    }
    let bad: std::collections::BTreeSet<u64> = loader
        .ledger()
        .samples
        .iter()
        .map(|bad| bad.sample)
        .collect();
    assert_eq!(bad, (0..60).step_by(7).collect());
}

#[test]
fn lengths_that_do_not_match_the_data_are_named() {
    let dir = Dir::new();
    let lens = [5, 50, 500];
    let (builder, _, _) = texts(&dir, &lens);
    let groups = Groups::by([5, 7, 500], &[10, 1000])
        .unwrap()
        .batch_sizes([2, 1]);
    let fail = |groups: Groups| {
        let builder = texts(&dir, &lens)
            .0
            .order(Order::sequential().grouped(groups));
        match builder.build() {
            Ok(loader) => loader.epoch(0).unwrap().find_map(Result::err).unwrap(),
            Err(error) => error,
        }
    };
    let error = fail(groups.clone().up_to("image", &[10, 1000]));
    assert_eq!(
        (error.kind(), error.site().sample),
        (ErrorKind::Shape, Some(1))
    );
    let words = "field `image` takes at most 10 in a batch of group 0, but the sample has 50: the \
         order was made with another length";
    assert!(error.to_string().contains(words), "{error}");
    for (field, most, words) in [
        (
            "text",
            vec![10, 1000],
            "the groups name an unknown field `text`; the fields are image, label",
        ),
        (
            "label",
            vec![10, 1000],
            "field `label` has a fixed shape: groups cannot shorten it",
        ),
        (
            "image",
            vec![10],
            "1 lengths of field `image` for 2 groups: give one for each",
        ),
        (
            "image",
            vec![10, 1001],
            "field `image` has up to 1001 in group 1; 1 to 1000 are possible",
        ),
    ] {
        let error = fail(groups.clone().up_to(field, &most));
        assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    }
    drop(builder);
}

const BUCKETS: [(u32, u32); 5] = [(40, 40), (32, 52), (52, 32), (24, 64), (64, 24)];

/// Pictures of many shapes, with the bucket of each.
fn pictures(dir: &Dir) -> (Arc<Images>, Vec<(u32, u32)>, Vec<usize>) {
    let shapes = [
        ((80, 81), 0),
        ((33, 50), 1),
        ((155, 101), 2),
        ((40, 110), 3),
        ((300, 77), 4),
        ((41, 39), 0),
        ((9, 9), 0),
    ];
    let all: Vec<_> = (0..42).map(|n| shapes[n % shapes.len()]).collect();
    for (number, ((width, height), _)) in all.iter().enumerate() {
        dir.write(
            &format!("class/{number:02}.bmp"),
            &noisy_bmp(*width, *height, number as u64),
        );
    }
    (
        Arc::new(Images::open(dir.path("")).unwrap()),
        all.iter().map(|one| one.0).collect(),
        all.iter().map(|one| one.1).collect(),
    )
}

/// Width and height of the whole picture where it covers a bucket, and its pixels by a decoder that
/// resizes.
fn scaled(
    dir: &Dir,
    number: usize,
    (pw, ph): (u32, u32),
    (width, height): (u32, u32),
) -> ((u32, u32), Vec<u8>) {
    let whole = if pw * height >= ph * width {
        (pw * height / ph, height)
    } else {
        (width, ph * width / pw)
    };
    let images = Images::open(dir.path(""))
        .unwrap()
        .subset(vec![number as u64])
        .unwrap();
    let loader = build(
        Loader::builder(images)
            .decode(Image::resize(whole.0, whole.1))
            .batch_size(1)
            .workers(1),
    );
    let batch = first(&loader);
    (
        whole,
        batch
            .field("image")
            .unwrap()
            .as_slice::<u8>()
            .unwrap()
            .to_vec(),
    )
}

fn cut(
    (whole, pixels): &((u32, u32), Vec<u8>),
    left: i32,
    top: i32,
    (width, height): (u32, u32),
) -> Vec<u8> {
    let row = |y: usize| {
        &pixels[3 * ((top as usize + y) * whole.0 as usize + left as usize)..][..3 * width as usize]
    };
    (0..height as usize).flat_map(|y| row(y).to_vec()).collect()
}

#[test]
fn pictures_fill_the_bucket_of_the_nearest_ratio() {
    let dir = Dir::new();
    let (images, sizes, right) = pictures(&dir);
    let resized: Vec<_> = (0..sizes.len())
        .map(|n| scaled(&dir, n, sizes[n], BUCKETS[right[n]]))
        .collect();
    for (random, flip) in [(false, 0.0), (true, 0.5), (true, 1.0)] {
        let decoder = Image::buckets(BUCKETS).random_crop(random).flip(flip);
        let groups = decoder
            .groups(sizes.iter().copied())
            .unwrap()
            .budget(6 * 1600)
            .multiple_of(2);
        let builder = Loader::builder(images.clone())
            .decode(decoder)
            .order(Order::shuffled(3).grouped(groups));
        let loader = build(builder.last_batch(LastBatch::Pad).workers(2));
        let mut seen = vec![false; sizes.len()];
        let mut moved = 0;
        for batch in loader.epochs(0..2).unwrap().map(Result::unwrap) {
            let (width, height) = BUCKETS[batch.group().unwrap()];
            let w = width as usize;
            let h = height as usize;
            let image = batch.field("image").unwrap();
            let full = (6 * 1600 / u64::from(width * height)) & !1;
            assert!(
                batch.len() as u64 <= full && batch.valid() == batch.len(),
                "one rank needs no repeated rows"
            );
            assert_eq!(image.shape(), [batch.len(), h, w, 3]);
            let geometry = batch.field("image.geometry").unwrap();
            for (row, id) in batch.ids().iter().enumerate() {
                let number = *id as usize;
                let numbers = geometry.row::<i32>(row).unwrap();
                assert_eq!(right[number], batch.group().unwrap());
                let (pw, ph) = sizes[number];
                let &[
                    original_height,
                    original_width,
                    top,
                    left,
                    target_height,
                    target_width,
                ] = numbers
                else {
                    panic!()
                };
                assert_eq!((original_width, original_height), (pw as i32, ph as i32));
                assert_eq!((target_width, target_height), (width as i32, height as i32));
                let whole = resized[number].0;
                let more = (
                    whole.0 as i32 - target_width,
                    whole.1 as i32 - target_height,
                );
                assert!(
                    (0..=more.0).contains(&left) && (0..=more.1).contains(&top),
                    "{numbers:?} of {whole:?}"
                );
                let middle = |more: i32| (f64::from(more) / 2.0).round_ties_even() as i32;
                moved += u32::from((left, top) != (middle(more.0), middle(more.1)));
                // A flipped one was cut from the other side.
                let plain = cut(&resized[number], left, top, (width, height));
                let own = image.row::<u8>(row).unwrap();
                let other = cut(&resized[number], more.0 - left, top, (width, height));
                let mirrored: Vec<u8> = other
                    .chunks(3 * w)
                    .flat_map(|line| line.chunks(3).rev().flatten().copied().collect::<Vec<_>>())
                    .collect();
                let is_plain = own == plain;
                let is_mirrored = own == mirrored;
                assert!(
                    if flip == 0.0 {
                        is_plain
                    } else {
                        is_mirrored || flip < 1.0 && is_plain
                    },
                    "{number} {numbers:?}"
                );
                seen[number] = true;
            }
        }
        assert!(
            seen.iter().all(|seen| *seen) && (moved > 0) == random,
            "{moved}"
        );
    }
}

#[test]
fn buckets_without_groups_of_these_sizes_are_refused() {
    let dir = Dir::new();
    let (images, mut sizes, _) = pictures(&dir);
    let decoder = Image::buckets(BUCKETS);
    let message = |builder: LoaderBuilder| match builder.build() {
        Ok(loader) => loader.epoch(0).unwrap().find_map(Result::err).unwrap(),
        Err(error) => error,
    };
    let with = |decoder: &Image, order| {
        Loader::builder(images.clone())
            .decode(decoder.clone())
            .order(order)
            .batch_size(2)
    };
    let error = message(with(&decoder, Order::shuffled(1)));
    let words = "field `image` has 5 shapes, but the order has 0 groups: group the order by the \
         shapes";
    assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    for (buckets, words) in [
        (vec![], "0 buckets of pictures; give 1 to 256"),
        (
            vec![(8, 8), (0, 9)],
            "an output of 0x9 pixels: each side must be 1 to 16384",
        ),
    ] {
        let error = Image::buckets(buckets).groups([(1, 1)]).unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    }
    let error = decoder.groups([(1, 1), (0, 1)]).unwrap_err();
    assert_eq!(
        (error.site().sample, error.message()),
        (Some(1), "a picture of 0x1 pixels")
    );
    assert_eq!(
        Image::resize(8, 8).groups([(1, 1)]).unwrap_err().message(),
        "these settings give pictures of one size, which have no groups: set buckets"
    );
    let grouped = |decoder: &Image, sizes: &[(u32, u32)]| {
        Order::sequential().grouped(decoder.groups(sizes.iter().copied()).unwrap())
    };
    let finish = feedline::device::Finish::to(feedline::tensor::DType::F32);
    let error = message(with(&decoder, grouped(&decoder, &sizes)).finish("image", finish));
    assert!(
        error
            .message()
            .contains("depends on the group: let the decoder make floats"),
        "{error}"
    );
    sizes[5] = (30, 90);
    let error = message(with(&decoder, grouped(&decoder, &sizes)));
    assert_eq!(
        (error.kind(), error.site().sample),
        (ErrorKind::Shape, Some(5))
    );
    let words = "the picture has 41x39 pixels and belongs to group 0, but its batch is of group 3: the order was made for another size";
    assert!(error.to_string().contains(words), "{error}");
}
