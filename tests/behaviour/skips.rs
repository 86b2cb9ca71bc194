//! Skipped batches: the batches around them stay the same, by any number of ranks, before and after
//! a resume. The oracle is `common/runs.rs`.

use crate::common::runs::*;
use crate::common::sweep;
use crate::common::*;
use feedline::dataset::{Dataset, Mix};
use feedline::order::Draws;
use feedline::{ErrorKind, LastBatch, Loader, LoaderBuilder, State};
use std::ops::Range;

const EPOCHS: u64 = 3;

/// Up to four ranges, not overlapping, some of them side by side or up to the end of an epoch.
fn any_skips(count: u64, draws: &mut Draws) -> Vec<(u64, Range<u64>)> {
    let mut skips: Vec<(u64, Range<u64>)> = Vec::new();
    for _ in 0..1 + draws.below(4) {
        let epoch = draws.below(EPOCHS);
        let start = draws.below(count);
        let end = start + 1 + draws.below(count - start);
        if skips
            .iter()
            .all(|(other, range)| *other != epoch || range.end <= start || end <= range.start)
        {
            skips.push((epoch, start..end));
        }
    }
    skips
}

/// One random run: delivered in whole with the states between, then resumed and advanced from
/// random ones of these.
fn check(data: &Data, number: u64, what: &str) {
    let mut draws = Draws::new(number, 0, 0, "skips");
    let lanes = 1 + draws.below(3) as u32;
    let naive = match draws.below(if data.toy.is_some() { 4 } else { 2 }) {
        0 => Naive::Shuffled { seed: number },
        1 => Naive::Sequential { lanes },
        _ => Naive::windowed(number, 1 + draws.below(3) as usize, lanes),
    };
    let run = Run {
        map: draws.bool(0.5),
        ..Run::new(data, naive)
    };
    let global = 3 + draws.below(5);
    let last = ALL_LAST[draws.below(4) as usize];
    let cut = Cut::whole(global, last, 1 + draws.below(3) as u32);
    let count = cut.count(data.len());
    let skips = any_skips(count, &mut draws);
    let left_out = |batch: &Global| {
        skips
            .iter()
            .any(|(epoch, range)| batch.epoch == *epoch && range.contains(&batch.index))
    };
    let all = run.union(&cut, 0..EPOCHS);
    let right: Vec<Global> = all
        .iter()
        .filter(|batch| !left_out(batch))
        .cloned()
        .collect();
    let what = format!(
        "{what} {number}, {:?}, {cut:?}, without {skips:?}",
        run.naive
    );

    let ranks = cut.loaders(&run, &mut draws);
    for loader in &ranks {
        skips
            .iter()
            .for_each(|(epoch, range)| loader.skip(*epoch, range.clone()).unwrap());
        assert_eq!(loader.batches_per_epoch(), count);
    }
    let mut epochs: Vec<_> = ranks
        .iter()
        .map(|loader| loader.epochs(0..EPOCHS).unwrap())
        .collect();
    let mut found = vec![Vec::new(); ranks.len()];
    let mut states = Vec::new();
    for done in 0..=right.len() {
        let left = right.len() - done;
        assert!(epochs.iter().all(|epoch| epoch.len() == left), "{what}");
        states.push(stored(&agreed(&ranks)));
        if done == right.len() {
            break;
        }
        let next: Vec<Vec<u64>> = ranks
            .iter()
            .map(|loader| loader.next_ids().unwrap())
            .collect();
        for ((found, epoch), next) in found.iter_mut().zip(&mut epochs).zip(next) {
            let part = part(&epoch.next().unwrap().unwrap());
            assert!(part.rows.iter().map(|row| row.id).eq(next), "{what}");
            found.push(part);
        }
    }
    assert!(epochs.iter_mut().all(|epoch| epoch.next().is_none()));
    same(&union(&found, run.naive.in_turn()), &right, &what);
    for loader in &ranks {
        let consumer = loader.report().total.consumer;
        let left = EPOCHS * count - consumer.batches - consumer.skipped_batches;
        let counts = (consumer.batches, left);
        let words = "planned = delivered + skipped + outstanding";
        assert_eq!(counts, (right.len() as u64, 0), "{what}: {words}");
    }
    drop((epochs, ranks));

    for _ in 0..3 {
        let world = 1 + draws.below(3) as u32;
        let done = draws.below(states.len() as u64) as usize;
        // Also from places in the middle of a skipped range.
        let further = draws.below(3) * draws.below(2 * count);
        let state = stored(&states[done].clone().advance(further));
        let from = all
            .iter()
            .position(|batch| done < right.len() && *batch == right[done])
            .unwrap_or(all.len());
        let rest: Vec<Global> = all
            .iter()
            .skip(from + further as usize)
            .filter(|batch| !left_out(batch))
            .cloned()
            .collect();
        let mut ranks = Vec::new();
        let cut = Cut { world, ..cut };
        for loader in cut.loaders(&run, &mut draws) {
            loader.resume(&state).unwrap();
            let next = loader.next_epoch();
            let more = match draws.below(2) {
                0 if next < EPOCHS => parts(loader.epochs(next..EPOCHS).unwrap()),
                _ => parts(loader.steps(rest.len() as u64).unwrap()),
            };
            ranks.push(more);
        }
        let what = format!("{what}, from {state} by {world} ranks");
        same(&union(&ranks, run.naive.in_turn()), &rest, &what);
    }
}

#[test]
fn skipped_batches_leave_the_others_as_they_are() {
    for number in 0..sweep::size(12, 60, 600) {
        let dirs = [Dir::new(), Dir::new(), Dir::new()];
        let samples = 9 + number % 32;
        let rows = uneven(&mut Draws::new(number, 0, 0, "rows"), samples, 9);
        let sets = [
            ("file", Data::file(&dirs[0], samples as usize, 24)),
            ("memory", Data::memory(samples as usize, 8)),
            (
                "chunks",
                Data::chunks(&dirs[1], &rows, number % 2 == 0, false),
            ),
            (
                "chunks in memory",
                Data::chunks(&dirs[2], &rows, false, true),
            ),
        ];
        for (name, data) in sets {
            within_a_minute(&format!("{name} {number}"), move || {
                check(&data, number, name)
            });
        }
    }
}

/// 100 samples in 10 batches.
fn run() -> (Run, Loader) {
    let run = Run::new(&Data::memory(100, 8), Naive::Shuffled { seed: 4 });
    let loader = build(run.builder().batch_size(10));
    (run, loader)
}

#[test]
fn a_range_that_cannot_be_skipped_is_refused() {
    let (_, loader) = run();
    loader.skip(0, 4..6).unwrap();
    drop(parts(loader.steps(3).unwrap()));
    let behind = "the run is at batch 3 of epoch 0; resume an earlier state";
    for (epoch, start, end, words) in [
        (0, 7, 7, "the range is empty or reversed"),
        (0, 8, 7, "the range is empty or reversed"),
        (0, 9, 11, "the epoch ends at 10"),
        (3, 0, u64::MAX, "the epoch ends at 10"),
        (0, 2, 5, behind),
        (0, 5, 8, "batches 4..6 of epoch 0 are already skipped"),
        (0, 4, 6, "batches 4..6 of epoch 0 are already skipped"),
        (u64::MAX, 0, 1, "this epoch cannot be used"),
    ] {
        let error = loader.skip(epoch, start..end).unwrap_err();
        let words = format!("batches {start}..{end} of epoch {epoch}: {words}");
        assert_eq!(error.kind(), ErrorKind::Config);
        assert_eq!(error.message(), words);
    }
    let live = loader.epoch(0).unwrap();
    let error = loader.skip(0, 7..8).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::EpochLive);
    drop(live);
    // A state has room for some ranges, however many there are.
    let refused = |number: u64| Some((number, loader.skip(1 + number, 3..7).err()?));
    let (number, error) = (0..1000).find_map(refused).unwrap();
    let words = "more than 940; skip fewer ranges at once";
    assert!(
        number > 10 && error.message().ends_with(words),
        "{number}: {error}"
    );
    let bytes = loader.state().unwrap().to_bytes().len();
    assert!((910..=940).contains(&bytes), "{bytes}");
}

#[test]
fn a_rank_that_skips_nothing_is_named() {
    let (run, _) = run();
    let loaders: Vec<_> = every_rank(3)
        .map(|rank| build(run.builder().global_batch(10).rank(rank)))
        .collect();
    loaders[..2]
        .iter()
        .for_each(|loader| loader.skip(0, 4..6).unwrap());
    let states = |steps| {
        loaders
            .iter()
            .for_each(|loader| drop(parts(loader.steps(steps).unwrap())));
        let states = loaders.iter().map(|loader| loader.state().unwrap());
        State::agree(&states.collect::<Vec<_>>()).unwrap_err()
    };
    let words =
        "rank 2 has different batches to skip (none; the others have batches 4..6 of epoch 0)";
    assert_eq!(states(2).message(), words);
    let words = "rank 2 is at position 50, the others at 70";
    assert_eq!(states(3).message(), words);
}

#[test]
fn a_state_with_batches_to_skip_keeps_its_batches() {
    let (run, loader) = run();
    loader.skip(0, 4..6).unwrap();
    drop(parts(loader.steps(2).unwrap()));
    let before = loader.state().unwrap();
    drop(parts(loader.steps(3).unwrap()));
    let rebatched = |state: &State| build(run.builder().batch_size(5)).resume_rebatched(state);
    let error = rebatched(&before).unwrap_err();
    let words = "the state skips batches 4..6 of epoch 0, which are not batches of this loader: resume with `global_batch(10)` until the run is past them";
    assert_eq!((error.kind(), error.message()), (ErrorKind::State, words));
    rebatched(&loader.state().unwrap()).unwrap();
    rebatched(&before.clone().at_epoch(1)).unwrap();
    rebatched(&before.advance(4)).unwrap();
}

#[test]
fn a_mix_goes_on_behind_skipped_batches() {
    let mix = |later: (u64, [f64; 2])| {
        let parts = [40, 30].map(|len| noise_records(len, 4, len as u64));
        let segments = [(0, [1.0, 1.0]), later].map(|(start, weights)| (start, weights.to_vec()));
        let mix = Mix::scheduled(parts, segments, 3).unwrap();
        mix.epoch_len(100).unwrap()
    };
    let loaders = |mix: &Mix, world, state: Option<&State>| -> Vec<Loader> {
        let builder = |rank| Loader::builder(mix.clone()).global_batch(10).rank(rank);
        let resumed = |rank| {
            state
                .cloned()
                .into_iter()
                .fold(builder(rank), LoaderBuilder::resume)
        };
        every_rank(world).map(|rank| build(resumed(rank))).collect()
    };
    let ids = |loaders: &[Loader], steps| -> Vec<u64> {
        let ranks: Vec<_> = loaders
            .iter()
            .map(|loader| parts(loader.steps(steps).unwrap()))
            .collect();
        union(&ranks, false)
            .iter()
            .flat_map(|batch| batch.rows.iter().map(|row| row.id))
            .collect()
    };
    let right = |mix: &Mix, positions: [Range<u64>; 2]| -> Vec<u64> {
        positions
            .into_iter()
            .flatten()
            .map(|place| mix.sampler().unwrap().id(place / 100, place % 100))
            .collect()
    };
    let first = mix((45, [1.0, 3.0]));
    let before = loaders(&first, 2, None);
    before
        .iter()
        .for_each(|loader| loader.skip(0, 3..6).unwrap());
    assert_eq!(ids(&before, 2), right(&first, [0..20, 0..0]));
    let state = stored(&before[1].state().unwrap());
    assert_eq!(ids(&before, 5), right(&first, [20..30, 60..100]));
    // Positions that are skipped draw, too: a segment begins where it is said, and no sample comes
    // again in its pass.
    let sources = before[0].snapshot().consumer.sources;
    let ids_of = |positions: Range<u64>| right(&first, [positions, 0..0]);
    let drawn = |source| {
        let own = first.concat().ids_of(source);
        ids_of(0..100).iter().filter(|id| own.contains(id)).count()
    };
    for (index, source) in sources.iter().enumerate() {
        assert_eq!(source.delivered, drawn(index) as u64);
        assert_eq!(source.samples, [40, 30][index]);
        assert_eq!(source.passes, drawn(index) as f64 / source.samples as f64);
        // 45 positions of 1 to 3, then 55 of another mix.
        let asked = source.asked - drawn(index) as f64;
        assert!(asked.abs() < 2.0, "{source:?}");
    }
    // The change may lie among the skipped ones.
    let other = mix((50, [3.0, 1.0]));
    let after = loaders(&other, 3, Some(&state));
    assert_eq!(ids(&after, 6), right(&other, [20..30, 60..110]));
}

#[test]
fn a_report_counts_skipped_batches() {
    let (_, loader) = run();
    assert!(!loader.report().to_string().contains("skipped"));
    loader.skip(0, 0..3).unwrap();
    loader.skip(1, 0..10).unwrap();
    assert_eq!(loader.epoch(0).unwrap().len(), 7);
    assert_eq!(parts(loader.epoch(0).unwrap()).len(), 7);
    assert_eq!(loader.next_epoch(), 2);
    assert_eq!(loader.epoch(1).unwrap().len(), 0);
    assert_says(loader.report(), "\nskipped   ");
    let builder = Data::memory(20, 8).builder().batch_size(10);
    let last = build(builder.last_batch(LastBatch::Drop));
    last.skip(0, 1..2).unwrap();
    let found = parts(last.epochs(0..2).unwrap());
    assert!(found.iter().map(|part| part.index).eq([0, 0, 1]));
}
