//! Orders of groups: batches of one group on all ranks, their shapes, and resumes on other numbers of ranks.

use crate::common::runs::*;
use crate::common::*;
use feedline::dataset::{DatasetExt, Images};
use feedline::decode::Bytes;
use feedline::order::Groups;
use feedline::{ErrorKind, LastBatch, Loader, LoaderBuilder, OnBadSample, Order, Rank, State};

/// 100 samples, sample i in group i % 3, in batches of 8, 13 and 10.
fn groups() -> Groups {
    Groups::of((0..100).map(|id| id % 3)).unwrap().batch_sizes([8, 13, 10])
}

fn builder(data: &Data, last: LastBatch, rank: Rank) -> LoaderBuilder {
    data.builder().order(Order::shuffled(7).grouped(groups())).last_batch(last).rank(rank).workers(2)
}

/// Real samples of every batch of all ranks, which must be of one group: (epoch, batch, group, ids).
type Union = Vec<(u64, u64, usize, Vec<u64>)>;

/// Takes `steps` batches of every rank.
fn take(loaders: &[Loader], steps: u64) -> Union {
    let mut all: Union = Vec::new();
    for (rank, loader) in loaders.iter().enumerate() {
        for (step, batch) in loader.steps(steps).unwrap().enumerate() {
            let batch = batch.unwrap();
            if rank == 0 {
                all.push((batch.epoch(), batch.index(), batch.group().unwrap(), Vec::new()));
            }
            let of_all = &mut all[step];
            assert_eq!((batch.epoch(), batch.index(), batch.group()), (of_all.0, of_all.1, Some(of_all.2)));
            let ids = &batch.ids()[..batch.valid()];
            assert!(ids.iter().all(|id| *id as usize % 3 == of_all.2), "{ids:?} in group {}", of_all.2);
            of_all.3.extend(ids);
        }
    }
    assert_eq!(all.len() as u64, steps);
    all
}

fn resumed(data: &Data, last: LastBatch, world: u32, state: &State) -> Vec<Loader> {
    let state = State::from_bytes(&state.to_bytes()).unwrap();
    every_rank(world).map(|rank| build(builder(data, last, rank).resume(state.clone()))).collect()
}

#[test]
fn grouped_runs_resume_exactly_after_any_batch_on_any_world() {
    for data in [Data::memory(100, 4), Data::chunks(&Dir::new(), &[30, 1, 49, 20], false, false)] {
        for last in ALL_LAST {
            let loader = build(builder(&data, last, Rank::single()));
            let count = loader.batches_per_epoch();
            assert_eq!(count, if last == LastBatch::Drop { 4 + 2 + 3 } else { 5 + 3 + 4 });
            let all = take(std::slice::from_ref(&loader), 2 * count);
            let mut ids: Vec<u64> = all[..count as usize].iter().flat_map(|batch| batch.3.clone()).collect();
            assert_eq!(ids.len() as u64, loader.samples_per_epoch());
            assert_eq!(loader.preview(0, u64::MAX).unwrap(), ids);
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len() as u64, loader.samples_per_epoch(), "no sample twice");
            assert!(all.iter().zip(&all[1..]).any(|(one, next)| one.2 != next.2 && one.0 == next.0), "mixed");

            // 1 → 3 → 8 → 2: after each batch by one, and the rest by another.
            let worlds = [1, 3, 8, 2];
            let mut state = build(builder(&data, last, Rank::single())).state().unwrap();
            for done in 0..2 * count as usize {
                let loaders = resumed(&data, last, worlds[done % 4], &state);
                assert_eq!(take(&loaders, 1), all[done..=done], "{last:?} after {done}");
                let states: Vec<State> = loaders.iter().map(|loader| loader.state().unwrap()).collect();
                State::agree(&states).unwrap();
                state = states[0].clone();
                assert!(state.to_bytes().len() < 1024 && state.batch() == (done as u64 + 1) % count);
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
    let all = take(std::slice::from_ref(&loader), 24);
    let fresh = build(builder(&data, LastBatch::Keep, Rank::single())).state().unwrap();
    assert_eq!(take(&resumed(&data, LastBatch::Keep, 2, &fresh.clone().advance(5)), 3), all[5..8]);
    assert_eq!(take(&resumed(&data, LastBatch::Keep, 2, &fresh.advance(50)), 3), all[12..15]);
}

#[test]
fn another_grouping_or_batch_size_does_not_resume() {
    let data = Data::memory(100, 4);
    let state = build(builder(&data, LastBatch::Keep, Rank::single())).state().unwrap();
    let other = |groups: Groups, last| {
        let builder = data.builder().order(Order::shuffled(7).grouped(groups)).last_batch(last);
        builder.resume_rebatched(state.clone()).build().map(drop).map_err(|error| error.message().to_owned())
    };
    let differs = Err("the state has other groups or batch sizes than the loader".to_owned());
    assert_eq!(other(groups(), LastBatch::Pad), Ok(()));
    assert_eq!(other(groups().batch_sizes([8, 13, 9]), LastBatch::Keep), differs);
    assert_eq!(other(Groups::of((0..100).map(|id| id % 2)).unwrap().batch_sizes([8, 13]), LastBatch::Keep), differs);
    let plain = data.builder().order(Order::shuffled(7)).resume_rebatched(state.clone()).build().unwrap_err();
    assert_eq!(plain.message(), "the order is grouped in the state, shuffled in the loader");
}

#[test]
fn groups_without_sizes_take_the_loaders_batch() {
    let data = Data::memory(100, 4);
    let groups = Groups::of((0..100).map(|id| id / 60)).unwrap();
    let order = Order::sequential().grouped(groups);
    let loader = build(data.builder().order(order).batch_size(25));
    let batches: Vec<_> = loader.epoch(0).unwrap().map(|batch| batch.unwrap()).collect();
    let found: Vec<_> = batches.iter().map(|batch| (batch.group(), batch.len(), batch.ids()[0])).collect();
    let right = [(0, 25, 0), (0, 25, 25), (0, 10, 50), (1, 25, 60), (1, 15, 85)];
    assert_eq!(found, right.map(|(group, len, first)| (Some(group), len, first)));
    let error = data.builder().order(Order::shuffled(1).grouped(self::groups())).batch_size(3).build().unwrap_err();
    let words = "`batch_size` is set, and the groups of the order have batch sizes of their own: omit one of them";
    assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    let error = data.builder().order(Order::shuffled(1).grouped(self::groups().batch_sizes([99; 3])));
    let error = error.last_batch(LastBatch::Drop).build().unwrap_err();
    assert!(error.kind() == ErrorKind::Empty && error.message().starts_with("no group of the order"), "{error}");
}

/// Files of bytes, in groups of 10, 100 and 1000 bytes at most.
fn texts(dir: &Dir, lens: &[usize]) -> (LoaderBuilder, Groups, Vec<Vec<u8>>) {
    let files: Vec<Vec<u8>> = (0..).zip(lens).map(|(number, len)| noise(*len, number)).collect();
    for (number, bytes) in files.iter().enumerate() {
        dir.write(&format!("class/{number:05}.jpg"), bytes);
    }
    let images = Images::open(dir.path("")).unwrap();
    let groups = Groups::by(images.lengths("image").unwrap(), &[10, 100, 1000]).unwrap();
    (Loader::builder(images).decode_field("image", Bytes::up_to(1000)), groups, files)
}

#[test]
fn batches_have_the_shape_of_their_group() {
    let (dir, lens) =
        (Dir::new(), (0..200).map(|n| [3 + n % 8, 11 + n % 90, 101 + n % 900][n % 3]).collect::<Vec<_>>());
    let (builder, groups, files) = texts(&dir, &lens);
    let groups = groups.budget(2000).up_to("image", &[10, 100, 1000]);
    let loader =
        builder.order(Order::shuffled(3).grouped(groups)).last_batch(LastBatch::Pad).workers(3).build().unwrap();
    // Some reuse of slots, so that rows of one stride overwrite those of another.
    for epoch in 0..3 {
        for batch in loader.epoch(epoch).unwrap() {
            let batch = batch.unwrap();
            let (most, rows) = [(10, 200), (100, 20), (1000, 2)][batch.group().unwrap()];
            let field = batch.field("image").unwrap();
            assert_eq!((batch.len(), field.shape(), field.strides()), (rows, vec![rows, most], vec![most, 1]));
            let all = field.as_slice::<u8>().unwrap();
            for (row, id) in batch.ids().iter().enumerate() {
                let file = &files[*id as usize];
                assert_eq!(field.row::<u8>(row).unwrap(), file);
                assert_eq!(field.lens().unwrap()[row], file.len() as u64);
                let row = &all[row * most..(row + 1) * most];
                assert!(row[..file.len()] == *file && row[file.len()..].iter().all(|byte| *byte == 0));
            }
            let part = batch.micro(2).unwrap().nth(1).unwrap();
            assert_eq!(part.field("image").unwrap().shape(), [rows / 2, most]);
            let tensors = batch.into_dlpack();
            let image = tensors.fields.iter().find(|(name, _)| name == "image").unwrap();
            assert_eq!(image.1.shape(), [rows as i64, most as i64]);
        }
    }
    // Room for the largest batch, not for the most rows of the longest: 2000 bytes, and not 200,000.
    let slot = loader.plan().term(feedline::MemoryTerm::SLOTS).each;
    assert!(slot < 32 << 10, "{slot}");
}

#[test]
fn transforms_see_the_shape_of_the_group() {
    let (dir, lens) = (Dir::new(), [5, 50, 500, 7, 70, 700]);
    let (builder, groups, files) = texts(&dir, &lens);
    let groups = groups.batch_sizes([2, 2, 2]).up_to("image", &[10, 100, 1000]);
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
        let (field, group) = (batch.field("image").unwrap(), batch.group().unwrap());
        let width = [10, 100, 1000][group];
        for (row, id) in field.as_slice::<u8>().unwrap().chunks(width).zip(batch.ids()) {
            let len = files[*id as usize].len();
            assert!(row[0] == group as u8 + 1 && row[1..len].iter().all(|byte| *byte == 9));
            assert!(row[len..].iter().all(|byte| *byte == 0), "padding is zero after transforms");
        }
    }
}

#[test]
fn a_substitute_is_of_the_same_group() {
    let (dir, lens) = (Dir::new(), (0..60).map(|n| [5, 50, 500][n % 3]).collect::<Vec<_>>());
    let (builder, groups, _) = texts(&dir, &lens);
    let groups = groups.batch_sizes([4, 4, 4]).up_to("image", &[10, 100, 1000]);
    let loader = builder
        .order(Order::shuffled(3).grouped(groups))
        .map(|_, ctx| if ctx.id() % 7 == 0 { Err(feedline::Error::user("a bad one")) } else { Ok(()) })
        .on_bad_sample(OnBadSample::Substitute { budget: 20 })
        .build()
        .unwrap();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        assert!(batch.ids().iter().all(|id| *id as usize % 3 == batch.group().unwrap()));
    }
    let bad: std::collections::BTreeSet<u64> = loader.ledger().samples.iter().map(|bad| bad.sample).collect();
    assert_eq!(bad, (0..60).step_by(7).collect());
}

#[test]
fn lengths_that_do_not_match_the_data_are_named() {
    let (dir, lens) = (Dir::new(), [5, 50, 500]);
    let (builder, _, _) = texts(&dir, &lens);
    let groups = Groups::by([5, 7, 500], &[10, 1000]).unwrap().batch_sizes([2, 1]);
    let fail = |groups: Groups| {
        let builder = texts(&dir, &lens).0.order(Order::sequential().grouped(groups));
        match builder.build() {
            Ok(loader) => loader.epoch(0).unwrap().find_map(Result::err).unwrap(),
            Err(error) => error,
        }
    };
    let error = fail(groups.clone().up_to("image", &[10, 1000]));
    assert_eq!((error.kind(), error.site().sample), (ErrorKind::Shape, Some(1)));
    let words =
        "field `image` takes at most 10 in a batch of group 0, the sample has 50: the order knows another length";
    assert!(error.to_string().contains(words), "{error}");
    for (field, most, words) in [
        ("text", vec![10, 1000], "the groups name a field `text`; there are image, label"),
        ("label", vec![10, 1000], "field `label` has one shape: groups cannot shorten it"),
        ("image", vec![10], "1 lengths of field `image` for 2 groups"),
        ("image", vec![10, 1001], "field `image` has up to 1001 in group 1; 1 to 1000 are possible"),
    ] {
        let error = fail(groups.clone().up_to(field, &most));
        assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    }
    drop(builder);
}
