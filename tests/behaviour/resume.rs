//! Resume: a run interrupted between any two batches and continued by other loaders, with another
//! number of ranks and other settings, continues as if uninterrupted. The oracle is
//! `common/runs.rs`.
//!
//! With `FEEDLINE_SWEEP=ci` the first four tests make 240 random runs. Each is resumed at every
//! batch boundary, and again in a chain of five random boundaries: some 3,500 resumes by 8,000
//! loaders. 60 more runs are resumed 500 times with other batches. Each test prints its count
//! (`-- --nocapture`). By default there is a tenth of the random runs; `full` makes 1000 in each
//! test.

use crate::common::runs::*;
use crate::common::sweep;
use crate::common::*;
use feedline::dataset::{Concat, Dataset, DatasetExt, Mix, Records};
use feedline::order::{Draws, Sampler, Weights};
use feedline::storage::{Direct, Mode};
use feedline::tensor::DType;
use feedline::{Epoch, Error, ErrorKind, LastBatch, Loader, LoaderBuilder, Order, Rank, State};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// The kinds of datasets of the random runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    File,
    Memory,
    Chunks,
    ChunksInMemory,
}

/// A random run, its division into batches, and the batches that all ranks get together.
#[derive(Clone)]
struct Case {
    run: Run,
    global: u64,
    last: LastBatch,
    epochs: u64,
    /// Ranks at the start; later worlds are limited by this number and by the global batch.
    world: u32,
    worlds: u64,
    /// Number of loaders built for it.
    loaders: Arc<AtomicU64>,
}

/// Policy for the last batch, chosen so that an epoch of `positions` has at least one batch.
fn with_a_batch(positions: u64, global: u64, draws: &mut Draws) -> LastBatch {
    match ALL_LAST[draws.below(4) as usize] {
        LastBatch::Drop if positions < global => LastBatch::Mask,
        last => last,
    }
}

impl Case {
    fn draw(kind: Kind, dir: &Dir, draws: &mut Draws) -> Self {
        let samples = 1 + draws.below(36);
        let data = match kind {
            Kind::File => {
                let record = [12, 512, 700][draws.below(3) as usize];
                Data::file(dir, samples as usize, record)
            }
            Kind::Memory => Data::memory(samples as usize, 1 + draws.below(20) as usize),
            Kind::Chunks | Kind::ChunksInMemory => {
                let most = [2, 9, 40][draws.below(3) as usize];
                let rows = uneven(draws, samples, most);
                let in_memory = kind == Kind::ChunksInMemory;
                Data::chunks(dir, &rows, draws.bool(0.5), in_memory)
            }
        };
        let naive = naive(&data, draws);
        let map_batch = draws.bool(0.2);
        // A transform of batches sees another batch on every rank.
        let worlds = if map_batch { 1 } else { 5 };
        let global = 1 + draws.below(12) + draws.below(2) * draws.below(30);
        let seed = draws.bool(0.3).then(|| draws.next_u64());
        let run = Run {
            seed,
            map: draws.bool(0.5),
            map_batch,
            ..Run::new(&data, naive)
        };
        let last = with_a_batch(run.ids(0).len() as u64, global, draws);
        let world = 1 + draws.below(worlds.min(global)) as u32;
        Self {
            run,
            global,
            last,
            epochs: 1 + draws.below(3),
            world,
            worlds,
            loaders: Arc::default(),
        }
    }

    fn any_world(&self, draws: &mut Draws) -> u32 {
        1 + draws.below(self.worlds.min(self.global)) as u32
    }

    fn positions(&self) -> u64 {
        self.run.ids(0).len() as u64
    }

    /// Expected batches of all ranks, by definition.
    fn right(&self) -> Vec<Global> {
        let cut = Cut::whole(self.global, self.last, self.world);
        self.run.union(&cut, 0..self.epochs)
    }

    /// Place of the run after `batch` of an epoch: epoch, position, batch.
    fn after(&self, batch: &Global) -> [u64; 3] {
        let count = Cut::whole(self.global, self.last, 1).count(self.positions());
        match batch.index + 1 {
            next if next == count => [batch.epoch + 1, 0, 0],
            next => [batch.epoch, next * self.global, next],
        }
    }

    fn builder(&self, rank: Rank, draws: &mut Draws) -> LoaderBuilder {
        self.loaders.fetch_add(1, Ordering::Relaxed);
        any_settings(self.run.builder().last_batch(self.last).rank(rank), draws)
    }

    /// Loaders of all ranks that resume `state`, each in one of the possible ways.
    fn resumed(&self, state: &State, world: u32, draws: &mut Draws) -> Vec<Loader> {
        let loader = |rank| {
            let builder = self.builder(rank, draws);
            match draws.below(3) {
                // The global batch is that of the state.
                0 => build(builder.resume(state.clone())),
                1 => build(builder.global_batch(self.global).resume(state.clone())),
                _ => {
                    let loader = build(builder.global_batch(self.global));
                    loader.resume(state).unwrap();
                    loader
                }
            }
        };
        every_rank(world).map(loader).collect()
    }

    /// The next `steps` batches of a loader that was resumed, through one of the possible calls;
    /// the run ends after `left`.
    fn take(&self, loader: &Loader, steps: u64, left: u64, draws: &mut Draws) -> Vec<Part> {
        let next = loader.next_epoch();
        match draws.below(4) {
            0 => parts(loader.steps(steps).unwrap()),
            1 => parts(loader.epochs(next..).unwrap().take(steps as usize)),
            2 if next < self.epochs => {
                let epochs = loader.epochs(next..self.epochs).unwrap();
                assert_eq!(epochs.len() as u64, left);
                parts(epochs.take(steps as usize))
            }
            _ => {
                // Epoch by epoch.
                let mut found = Vec::new();
                while (found.len() as u64) < steps {
                    let more = steps as usize - found.len();
                    found.extend(parts(loader.epoch(loader.next_epoch()).unwrap().take(more)));
                }
                found
            }
        }
    }
}

fn naive(data: &Data, draws: &mut Draws) -> Naive {
    let samples = data.len();
    let seed = draws.next_u64();
    let lanes = [1, 2, 3, 4, 8][draws.below(5) as usize];
    let shuffled = draws.bool(0.5).then_some(seed);
    match draws.below(if data.toy.is_some() { 10 } else { 7 }) {
        0 => Naive::Sequential { lanes: 1 },
        1 => Naive::Sequential { lanes },
        2 | 3 => Naive::Shuffled { seed },
        4 => {
            let ids = (0..1 + draws.below(30))
                .map(|_| draws.below(samples))
                .collect();
            Naive::Indices { ids, shuffled }
        }
        5 => {
            let steps = Steps {
                len: 1 + draws.below(30),
                samples,
                step: draws.below(5),
            };
            Naive::Sampler { steps, shuffled }
        }
        6 => {
            let weights = (0..samples).map(|_| 0.1 + draws.next_f64()).collect();
            Naive::Weighted {
                weights,
                draws: 1 + draws.below(samples),
                once: draws.bool(0.5),
                seed,
            }
        }
        _ => Naive::windowed(seed, 1 + draws.below(4) as usize, lanes),
    }
}

/// Runs it uninterrupted, all ranks in step: gives the batches, and the states before each and
/// after the last.
fn uninterrupted(case: &Case, draws: &mut Draws) -> (Vec<Global>, Vec<State>) {
    let loader = |rank| build(case.builder(rank, draws).global_batch(case.global));
    let loaders: Vec<Loader> = every_rank(case.world).map(loader).collect();
    let states = || {
        let states = loaders
            .iter()
            .map(|loader| loader.state().unwrap().to_bytes());
        let states: Vec<_> = states.collect();
        assert!(states.iter().all(|state| *state == states[0]));
        stored(&agreed(&loaders))
    };
    let mut between = vec![states()];
    let mut found = vec![Vec::new(); loaders.len()];
    let mut iterators: Vec<Epoch> = loaders
        .iter()
        .map(|loader| loader.epochs(0..case.epochs).unwrap())
        .collect();
    while iterators[0].len() > 0 {
        for (found, iterator) in found.iter_mut().zip(&mut iterators) {
            found.push(part(&iterator.next().unwrap().unwrap()));
        }
        between.push(states());
    }
    assert!(iterators.iter_mut().all(|all| all.next().is_none()));
    let cut = Cut::whole(case.global, case.last, case.world);
    for (rank, found) in (0..).zip(&found) {
        let right = case.run.epochs(&cut, 0..case.epochs, rank);
        same(
            found,
            &right,
            &format!("rank {rank}, without an interruption"),
        );
    }
    (union(&found, case.run.naive.in_turn()), between)
}

/// Resumes at every boundary; gives the number of resumes.
fn resume_everywhere(case: &Case, all: &[Global], states: &[State], draws: &mut Draws) -> u64 {
    for (done, state) in states.iter().enumerate() {
        let before = done.checked_sub(1);
        let right = before.map_or([0; 3], |last| case.after(&all[last]));
        assert_eq!(place(state)[..3], right, "after {done} batches");
        assert_eq!(state.steps(), done as u64);
        assert_eq!(state.global_batch(), case.global);
        let world = case.any_world(draws);
        let left = (all.len() - done) as u64;
        let mut ranks = Vec::new();
        for loader in case.resumed(state, world, draws) {
            assert_eq!(loader.state().unwrap(), *state);
            assert_eq!(loader.next_epoch(), state.epoch());
            ranks.push(case.take(&loader, left, left, draws));
            // Without any batch, only some calls ask for epochs, which are then over.
            let at_the_end = || loader.state().unwrap() == states[all.len()];
            assert!(all.is_empty() || at_the_end(), "where all others end");
        }
        let found = union(&ranks, case.run.naive.in_turn());
        let what = format!("resumed after {done} batches by {world} ranks");
        same(&found, &all[done..], &what);
    }
    states.len() as u64
}

/// Resumes five times, each time after some batches; gives the number of resumes.
fn resume_in_a_chain(case: &Case, all: &[Global], states: &[State], draws: &mut Draws) -> u64 {
    let mut state = states[0].clone();
    let mut done = 0;
    if all.is_empty() {
        return 0;
    }
    for link in 0..6 {
        let left = all.len() - done;
        let steps = if link == 5 {
            left
        } else {
            draws.below(left as u64 + 1).min(1 + draws.below(6)) as usize
        };
        let world = case.any_world(draws);
        let mut ranks = Vec::new();
        let mut after = Vec::new();
        for loader in case.resumed(&state, world, draws) {
            ranks.push(case.take(&loader, steps as u64, left as u64, draws));
            after.push(loader.state().unwrap());
        }
        let found = union(&ranks, case.run.naive.in_turn());
        let what = format!("link {link} after {done} batches by {world} ranks");
        same(&found, &all[done..done + steps], &what);
        State::agree(&after).unwrap();
        done += steps;
        state = stored(&after[0]);
        assert_eq!(state, states[done], "link {link}, after {done} batches");
    }
    5
}

/// Number of runs in each test.
fn random_runs() -> u64 {
    sweep::size(6, 60, 1000)
}

/// Makes random runs, resumes them, and prints the counts.
fn resume_random_runs(kind: Kind) {
    let runs = random_runs();
    let start = Instant::now();
    let mut resumes = 0;
    let mut batches = 0;
    let mut loaders = 0;
    for number in 0..runs {
        let dir = Dir::new();
        let mut draws = Draws::new(number, 0, kind as u64, "resume");
        let case = Case::draw(kind, &dir, &mut draws);
        let run = &case.run;
        let cut = Cut::whole(case.global, case.last, case.world);
        let transforms = [run.map, run.map_batch];
        let what = format!(
            "{kind:?} {number}: {cut:?}, {} epochs, {:?}, chunks at {:?}, map and map_batch {:?}, seed {:?}",
            case.epochs, run.naive, run.data.starts, transforms, run.seed
        );
        let built = case.loaders.clone();
        let (more, count) = within_a_minute(&what, move || {
            let (all, states) = uninterrupted(&case, &mut draws);
            same(&all, &case.right(), "all ranks together");
            let everywhere = resume_everywhere(&case, &all, &states, &mut draws);
            let chain = resume_in_a_chain(&case, &all, &states, &mut draws);
            (everywhere + chain, all.len())
        });
        resumes += more;
        batches += count;
        loaders += built.load(Ordering::Relaxed);
    }
    println!(
        "{kind:?}: {resumes} resumes of {runs} runs of {batches} batches by {loaders} loaders in {:?}",
        start.elapsed()
    );
}

#[test]
fn a_run_over_a_file_resumes_exactly_from_any_batch() {
    resume_random_runs(Kind::File);
}

#[test]
fn a_run_in_memory_resumes_exactly_from_any_batch() {
    resume_random_runs(Kind::Memory);
}

#[test]
fn a_run_over_chunks_resumes_exactly_from_any_batch() {
    resume_random_runs(Kind::Chunks);
}

#[test]
fn a_run_over_chunks_in_memory_resumes_exactly() {
    resume_random_runs(Kind::ChunksInMemory);
}

/// 50 samples in memory, shuffled, in 5 batches of 12 by 3 ranks.
fn shuffled_run() -> (Run, Cut) {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    (run, Cut::whole(12, LastBatch::Keep, 3))
}

fn ranks(run: &Run, cut: Cut) -> Vec<Loader> {
    let loader = |rank| build(cut.builder(run, rank).workers(2));
    every_rank(cut.world).map(loader).collect()
}

#[test]
fn a_state_counts_received_batches_not_prefetched_ones() {
    let run = Run::new(&Data::memory(200, 8), Naive::Shuffled { seed: 4 }).mapped();
    let loader = build(run.builder().batch_size(10).tuning(|t| t.slots(8)));
    let mut epoch = loader.epoch(0).unwrap();
    for received in 0..20_u64 {
        // Read-ahead is as far as possible: 8 batches less the ones just received, or all batches.
        let ahead = (received + 8).min(20) * 10;
        until("the samples ahead are read", || {
            run.mapped.load(Ordering::Relaxed) >= ahead
        });
        let state = loader.state().unwrap();
        assert_eq!(place(&state), [0, received * 10, received, received]);
        drop(epoch.next().unwrap().unwrap());
    }
    let state = loader.state().unwrap();
    assert_eq!(place(&state), [1, 0, 0, 20]);
    assert_eq!(loader.next_epoch(), 1);
    let words = "epoch 1, step 20 (batch 0 of the epoch, position 0)";
    assert_eq!(state.to_string(), words);
}

#[test]
fn a_state_taken_by_another_thread_lies_between_two_batches() {
    let (run, cut) = shuffled_run();
    let loader = ranks(&run, cut).remove(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loader
                .epochs(0..40)
                .unwrap()
                .for_each(|batch| drop(batch.unwrap()));
            done.store(true, Ordering::Relaxed);
        });
        let mut before = 0;
        while !done.load(Ordering::Relaxed) {
            let state = loader.state().unwrap();
            assert!(state.steps() >= before);
            before = state.steps();
            let right = [before / 5, before % 5 * 12, before % 5, before];
            assert_eq!(place(&state), right);
        }
    });
    assert_eq!(loader.state().unwrap().steps(), 200);
}

#[test]
fn any_state_is_below_a_kibibyte() {
    struct Long;
    impl Sampler for Long {
        fn len(&self) -> u64 {
            u64::MAX
        }
        fn id(&self, _: u64, position: u64) -> u64 {
            position % 3
        }
        fn identity(&self) -> u64 {
            u64::MAX
        }
    }
    let builder = Data::memory(3, 1)
        .builder()
        .order(Order::sampler(Long).then_shuffled(u64::MAX))
        .seed(u64::MAX);
    let loader = build(builder.batch_size(1000).last_batch(LastBatch::Keep));
    assert_eq!(loader.batches_per_epoch(), u64::MAX.div_ceil(1000));
    drop(parts(loader.epochs(u64::MAX - 1..).unwrap().take(1)));
    let state = loader.state().unwrap();
    assert_eq!(place(&state), [u64::MAX - 1, 1000, 1, 1]);
    assert_eq!(stored(&state), state);
    let bytes = state.to_bytes().len();
    assert!((500..1024).contains(&bytes), "{bytes}");
}

/// A loader that resumes the run from `state`.
fn resumed(run: &Run, state: &State) -> Loader {
    build(run.builder().resume(state.clone()))
}

/// State of one rank after the first `steps` batches of 10.
fn state_after(run: &Run, steps: u64) -> State {
    let loader = build(run.builder().batch_size(10));
    assert_eq!(parts(loader.steps(steps).unwrap()).len() as u64, steps);
    loader.state().unwrap()
}

#[test]
fn a_resumed_loader_starts_with_the_interrupted_epoch() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let cut = Cut::whole(10, LastBatch::Keep, 1);
    let state = state_after(&run, 13);
    let loader = resumed(&run, &state);
    for _ in 0..2 {
        for epochs in [0..1_u64, 3..4, 0..5, 1..9, u64::MAX - 1..u64::MAX] {
            let start = epochs.start;
            let error = loader.epochs(epochs).err().unwrap();
            let words = format!(
                "the resumed state is in epoch 2, not {start}: continue with `loader.next_epoch()`"
            );
            assert_eq!(error.kind(), ErrorKind::Config);
            assert_eq!(error.message(), words);
        }
        // A range without epochs changes nothing.
        assert!(parts(loader.epochs(7..7).unwrap()).is_empty());
        assert_eq!(loader.next_epoch(), 2);
        assert_eq!(loader.state().unwrap(), state);
    }
    let whole = run.parts(&cut, 2, 0);
    gives(loader.epoch(2), &whole[3..], "what is left of epoch 2");
    assert_eq!(place(&loader.state().unwrap()), [3, 0, 0, 15]);
    assert_eq!(loader.next_epoch(), 3);
    // From here on every epoch is whole, including this one.
    for epoch in [2, 0, 3] {
        let again = loader.epoch(epoch).unwrap();
        assert_eq!(again.len(), 5);
        let what = "a second iterator of an epoch";
        same(&parts(again), &run.parts(&cut, epoch, 0), what);
    }
    // The same holds for a second iterator of an epoch whose first iterator was dropped in the
    // middle.
    let loader = resumed(&run, &state);
    let one = loader.epoch(2).unwrap().take(1);
    same(&parts(one), &whole[3..4], "one batch");
    assert_eq!(place(&loader.state().unwrap()), [2, 40, 4, 14]);
    gives(loader.epoch(2), &whole, "the whole epoch");
    // A state at the beginning of an epoch resumes with that epoch, too.
    let loader = resumed(&run, &state_after(&run, 10));
    must_say(loader.epoch(1), "is in epoch 2, not 1");
    gives(loader.epoch(2), &whole, "epoch 2");
}

#[test]
fn a_state_moved_to_another_epoch_starts_at_its_beginning() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let cut = Cut::whole(10, LastBatch::Keep, 1);
    for epoch in [0, 2, 7] {
        let state = stored(&state_after(&run, 13).at_epoch(epoch));
        assert_eq!(place(&state), [epoch, 0, 0, 13]);
        let loader = resumed(&run, &state);
        let right = run.parts(&cut, epoch, 0);
        gives(loader.epoch(epoch), &right, "the whole epoch");
        assert_eq!(place(&loader.state().unwrap()), [epoch + 1, 0, 0, 18]);
        assert_eq!(loader.next_epoch(), epoch + 1);
    }
}

#[test]
fn a_state_is_refused_while_an_iterator_is_alive() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let loader = build(run.builder().batch_size(10));
    let state = state_after(&run, 3);
    let mut epoch = loader.epoch(0).unwrap();
    drop(epoch.next().unwrap().unwrap());
    let error = loader.resume(&state).unwrap_err();
    let words = "another iterator of this loader is alive: drop it before you resume a state";
    let kind = ErrorKind::EpochLive;
    assert_eq!((error.kind(), error.message()), (kind, words));
    assert_eq!(loader.steps(1).err().unwrap().kind(), ErrorKind::EpochLive);
    // Nothing has moved.
    let right = run.parts(&Cut::whole(10, LastBatch::Keep, 1), 0, 0);
    same(&parts(epoch), &right[1..], "the rest");
    loader.resume(&state).unwrap();
    gives(loader.epoch(0), &right[3..], "resumed");
}

#[test]
fn an_epoch_ended_by_a_transform_resumes_at_its_place() {
    let dir = Dir::new();
    let chunks = Data::chunks(&dir, &[9, 1, 30, 9, 20], true, false);
    let runs = [
        Run::new(&Data::memory(69, 8), Naive::Shuffled { seed: 4 }),
        Run::new(&Data::file(&dir, 69, 512), Naive::Shuffled { seed: 4 }),
        Run::new(&chunks, Naive::windowed(4, 2, 3)),
    ];
    for run in runs {
        for fails_at in [0, 1, 7, 40, 67] {
            for panics in [false, true] {
                let cut = Cut::whole(12, LastBatch::Pad, 2);
                let mut found = Vec::new();
                for rank in every_rank(2) {
                    let bad = run.ids(1)[fails_at];
                    let failed = AtomicBool::new(false);
                    let builder = cut.builder(&run, rank).workers(2);
                    let loader = build(builder.map(move |_, ctx| {
                        let now = (ctx.id(), ctx.epoch()) == (bad, 1)
                            && !failed.swap(true, Ordering::Relaxed);
                        assert!(!now || !panics, "once");
                        fail_if(now, "once")
                    }));
                    let mut received = Vec::new();
                    let mut errors = 0;
                    let mut epochs = loader.epochs(0..3).unwrap();
                    while let Some(batch) = epochs.next() {
                        match batch {
                            Ok(batch) => received.push(part(&batch)),
                            Err(error) => {
                                assert_says(&error, "once");
                                errors += 1;
                                assert!(epochs.next().is_none());
                                drop(epochs);
                                let state = loader.state().unwrap();
                                let [epoch, .., steps] = place(&state);
                                let got = received.len() as u64;
                                assert_eq!((steps, epoch), (got, got / 6));
                                loader.resume(&state).unwrap();
                                epochs = loader.epochs(loader.next_epoch()..3).unwrap();
                            }
                        }
                    }
                    // One rank has the sample, the other one repeats the first three as padding.
                    let owner = if run.naive.in_turn() {
                        fails_at % 2
                    } else {
                        fails_at / 6 % 2
                    };
                    let hit = owner as u32 == rank.number() || fails_at < 3;
                    assert_eq!(errors, usize::from(hit), "{fails_at} {rank}");
                    let right = run.epochs(&cut, 0..3, rank.number());
                    let what = format!("{:?}, {fails_at}, {rank}", run.naive);
                    same(&received, &right, &what);
                    found.push(received);
                }
                assert_eq!(union(&found, run.naive.in_turn()).len(), 18);
            }
        }
    }
}

#[test]
fn an_epoch_over_a_cut_file_resumes_when_it_is_repaired() {
    let dirs = [Dir::new(), Dir::new()];
    for (mode, direct) in readers() {
        let files = [
            (
                Data::file(&dirs[0], 32, 4096),
                dirs[0].path("32x4096.bin"),
                18 * 4096 + 100,
            ),
            (
                Data::chunks(&dirs[1], &[300; 16], false, false),
                dirs[1].path("toy.bin"),
                9 * 300 * RECORD as u64 + 7,
            ),
        ];
        for (data, path, cut) in files {
            let bytes = std::fs::read(&path).unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            // The time of the last write stays, since a file may be opened anew at any time.
            let modified = file.metadata().unwrap().modified().unwrap();
            let run = Run::new(&data, Naive::Sequential { lanes: 1 });
            // 32 batches per file, two per chunk, so that the failed chunk is the first one needed
            // again.
            let global = data.len() / 32;
            let builder = run.builder().global_batch(global).workers(1);
            let loader = build_by(builder.tuning(|t| t.slots(2)), mode, direct);
            let mut epoch = loader.epoch(0).unwrap();
            let mut found = vec![part(&epoch.next().unwrap().unwrap())];
            file.set_len(cut).unwrap();
            file.set_modified(modified).unwrap();
            let error = loop {
                match epoch.next().unwrap() {
                    Ok(batch) => found.push(part(&batch)),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
            assert_eq!(error.site().path.as_ref(), Some(&path), "{error}");
            drop(epoch);
            // The state belongs to the dataset at the start of the run, whatever has changed since.
            let meanwhile = loader.state().unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            file.set_modified(modified).unwrap();
            let state = loader.state().unwrap();
            assert_eq!(state, meanwhile);
            let received = found.len() as u64;
            assert_eq!((state.batch(), state.steps()), (received, received));
            loader.resume(&state).unwrap();
            found.extend(parts(loader.epoch(0).unwrap()));
            let right = run.parts(&Cut::whole(global, LastBatch::Keep, 1), 0, 0);
            let what = format!("{mode:?} {direct:?} {}", path.display());
            same(&found, &right, &what);
        }
    }
}

#[test]
fn steps_deliver_the_exact_number_of_batches() {
    let dir = Dir::new();
    let data = Data::file(&dir, 50, 4096);
    for (mode, direct) in readers() {
        let run = Run::new(&data, Naive::Shuffled { seed: 4 }).mapped();
        let cut = Cut::whole(12, LastBatch::Drop, 3);
        for rank in every_rank(3) {
            let builder = cut.builder(&run, rank).tuning(|t| t.slots(6));
            let loader = build_by(builder, mode, direct);
            let right = run.epochs(&cut, 0..9, rank.number());
            let mut done = 0;
            run.mapped.store(0, Ordering::Relaxed);
            for steps in [1, 2, 0, 1, 5, 3, 9] {
                let batches = loader.steps(steps as u64).unwrap();
                assert_eq!(batches.len(), steps);
                let what = format!("{mode:?}, {steps} steps after {done}");
                same(&parts(batches), &right[done..done + steps], &what);
                done += steps;
                a_moment();
                let total = loader.report().total;
                let samples = 4 * done as u64;
                let reads = total.storage.counts.ops;
                let lookups = total.storage.page_cache;
                let mapped = run.mapped.load(Ordering::Relaxed);
                assert_eq!([mapped, total.consumer.samples], [samples; 2], "{mode:?}");
                assert!(reads <= samples, "{reads} reads for {samples}");
                let looked = lookups.map_or(0, |found| found.hits + found.misses);
                assert!(looked <= samples, "{lookups:?}");
                if direct == Direct::On && mode == Mode::Uring {
                    assert_eq!(reads + lookups.map_or(0, |found| found.hits), samples);
                }
                assert_eq!(loader.state().unwrap().steps(), done as u64);
            }
            // Batches not received do not count as steps.
            let two = loader.steps(7).unwrap().take(2);
            same(&parts(two), &right[done..done + 2], "two of seven");
            let right = &right[done + 2..done + 6];
            gives(loader.steps(4), right, "and four more");
            assert_eq!(loader.state().unwrap().steps(), done as u64 + 6);
            assert!(loader.steps(u64::MAX).unwrap().len() > 1 << 60);
        }
    }
}

#[test]
fn steps_open_no_chunk_of_later_batches() {
    let dir = Dir::new();
    let data = Data::chunks(&dir, &[10; 30], true, false);
    let toy = data.toy.clone().unwrap();
    // In windows of two chunks 20 samples need both.
    for (naive, opened) in [
        (Naive::Sequential { lanes: 1 }, [1, 1, 2, 3, 5, 30, 31]),
        (Naive::windowed(1, 2, 1), [2, 2, 2, 4, 6, 30, 32]),
    ] {
        let run = Run::new(&data, naive);
        let right = run.epochs(&Cut::whole(5, LastBatch::Keep, 1), 0..2, 0);
        for (steps, opened) in [1, 2, 3, 5, 10, 60, 61].into_iter().zip(opened) {
            let before = toy.opened();
            let builder = run.builder().batch_size(5).workers(3);
            let loader = build(builder.tuning(|t| t.slots(8)));
            gives(loader.steps(steps as u64), &right[..steps], "steps");
            a_moment();
            let what = format!("{steps} steps of {:?}", run.naive);
            assert_eq!(toy.opened() - before, opened, "{what}");
            let chunks = loader.report().total.decode.chunks.unwrap();
            assert_eq!((chunks.opened, chunks.count), (opened, 30));
        }
    }
}

#[test]
fn an_order_without_a_batch_is_refused_on_resume_too() {
    let run = |naive| Run::new(&Data::memory(5, 4), naive);
    let empty = Naive::Indices {
        ids: vec![],
        shuffled: None,
    };
    let few = run(Naive::Shuffled { seed: 1 });
    let state = build(few.builder().batch_size(2)).state().unwrap();
    let builders = [
        run(empty).builder(),
        few.builder(),
        few.builder().resume_rebatched(state),
    ];
    for builder in builders {
        let builder = builder.batch_size(6).last_batch(LastBatch::Drop);
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Empty, "{error}");
    }
}

/// Expected rows of all ranks from a state to the end of an epoch, in batches of another size: the
/// rest of the interrupted epoch, then whole epochs.
fn rebatched(case: &Case, state: &State, cut: Cut) -> Vec<Global> {
    let first = Cut {
        start: state.position(),
        first: state.batch(),
        ..cut
    };
    let epoch = state.epoch();
    let mut right = Vec::new();
    if epoch < case.epochs {
        right.extend(case.run.union(&first, epoch..epoch + 1));
        right.extend(case.run.union(&cut, epoch + 1..case.epochs));
    }
    right
}

#[test]
fn a_run_resumes_in_batches_of_another_size() {
    let mut resumes = 0;
    for number in 0..random_runs() {
        let dir = Dir::new();
        let mut draws = Draws::new(number, 0, 0, "rebatched");
        let kind = [Kind::File, Kind::Memory, Kind::Chunks][number as usize % 3];
        let case = Case::draw(kind, &dir, &mut draws);
        let (_, states) = uninterrupted(&case, &mut draws);
        for state in &states {
            // Only at some boundaries: each second one is resumed twice.
            if draws.bool(0.5) {
                continue;
            }
            let global = 1 + draws.below(20);
            let last = with_a_batch(case.positions(), global, &mut draws);
            let world = 1 + draws.below(case.worlds.min(global)) as u32;
            let right = rebatched(&case, state, Cut::whole(global, last, world));
            let what = format!(
                "{number}: {state}, {global} {last:?} of {} {:?}, {:?}",
                case.global, case.last, case.run.naive
            );
            // To the end, epoch by epoch; and some steps, then `resume` from there.
            let steps = draws.below(right.len() as u64 + 1);
            let mut ranks = Vec::new();
            let mut some = Vec::new();
            let mut after = Vec::new();
            for rank in every_rank(world) {
                let make = |draws: &mut Draws| {
                    let cut = Cut::whole(global, last, world);
                    let builder = any_settings(cut.builder(&case.run, rank), draws);
                    build(builder.resume_rebatched(stored(state)))
                };
                let loader = make(&mut draws);
                let mut found = Vec::new();
                // An epoch without a batch never ends.
                while right.len() > found.len() {
                    found.extend(parts(loader.epoch(loader.next_epoch()).unwrap()));
                }
                ranks.push(found);
                let loader = make(&mut draws);
                some.push(parts(loader.steps(steps).unwrap()));
                after.push(loader.state().unwrap());
            }
            let in_turn = case.run.naive.in_turn();
            same(&union(&ranks, in_turn), &right, &what);
            same(&union(&some, in_turn), &right[..steps as usize], &what);
            State::agree(&after).unwrap();
            assert_eq!(after[0].steps(), state.steps() + steps);
            let rebatched = Case {
                global,
                last,
                ..case.clone()
            };
            let world = rebatched.any_world(&mut draws);
            let mut ranks = Vec::new();
            for loader in rebatched.resumed(&stored(&after[0]), world, &mut draws) {
                ranks.push(parts(loader.steps(right.len() as u64 - steps).unwrap()));
            }
            let what = format!("{what}, {steps} steps later");
            same(&union(&ranks, in_turn), &right[steps as usize..], &what);
            // The same samples as in the unchanged run, except for padding and dropped samples.
            if last != LastBatch::Drop && state.epoch() < case.epochs {
                let batches = right.iter().filter(|batch| batch.epoch == state.epoch());
                let real: Vec<u64> = batches.flat_map(|batch| real_ids(&batch.rows)).collect();
                let right = &case.run.ids(state.epoch())[state.position() as usize..];
                assert_eq!(real, right, "{what}");
            }
            resumes += 3;
        }
    }
    println!("{resumes} resumes with another batch");
}

#[test]
fn a_dropped_rest_ends_an_epoch_resumed_in_larger_batches() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let state = state_after(&run, 4);
    assert_eq!((state.epoch(), state.position()), (0, 40));
    let make = || {
        let builder = run.builder().batch_size(16).last_batch(LastBatch::Drop);
        build(builder.resume_rebatched(state.clone()))
    };
    let cut = Cut::whole(16, LastBatch::Drop, 1);
    let loader = make();
    // 10 samples are left of epoch 0: no batch of 16.
    assert_eq!(loader.next_epoch(), 1);
    assert_eq!(place(&loader.state().unwrap()), [1, 0, 0, 4]);
    let right = run.epochs(&cut, 1..3, 0);
    gives(loader.epoch(1), &right[..3], "epoch 1");
    gives(make().steps(2), &right[..2], "steps");
    gives(make().epochs(1..3), &right, "epochs");
}

#[test]
fn the_batch_size_is_that_of_the_state_when_none_is_set() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let state = state_after(&run, 2);
    for world in [1, 3, 10] {
        for rank in every_rank(world) {
            for rebatched in [false, true] {
                let builder = run.builder().rank(rank);
                let loader = build(match rebatched {
                    true => builder.resume_rebatched(state.clone()),
                    false => builder.resume(state.clone()),
                });
                assert_eq!(loader.global_batch(), 10);
                let cut = Cut::whole(10, LastBatch::Keep, world);
                let right = &run.parts(&cut, 0, rank.number())[2..];
                gives(loader.epoch(0), right, &rank.to_string());
            }
        }
    }
    let builder = run.builder().rank(Rank::new(0, 11).unwrap());
    let words = "a global batch of 10 for 11 ranks";
    must_fail(builder.resume(state).build(), ErrorKind::Config, words);
}

/// Checks that `builder` refuses `state`, in `build` and afterwards.
fn refused(
    builder: impl Fn() -> LoaderBuilder,
    state: &State,
    kind: ErrorKind,
    words: &str,
) -> Error {
    let loader = build(builder());
    let mine = loader.state().unwrap();
    let errors = [
        loader.resume(state).unwrap_err(),
        builder().resume(state.clone()).build().unwrap_err(),
    ];
    for error in &errors {
        assert_eq!(error.kind(), kind, "{error}");
        let message = error.message();
        assert!(message.contains(words), "`{words}` is not in `{message}`");
    }
    // Its place is unchanged.
    assert_eq!((loader.state().unwrap(), loader.next_epoch()), (mine, 0));
    let [_, error] = errors;
    error
}

#[test]
fn a_resume_with_another_order_or_seed_is_refused() {
    let dir = Dir::new();
    let data = Data::chunks(&dir, &[4; 10], true, false);
    let steps = |step| Steps {
        len: 30,
        samples: 40,
        step,
    };
    let windowed = |window, lanes| Order::windowed(4, window).lanes(lanes);
    let sampler = |step| Order::sampler(steps(step));
    let indices = |ids: &[u64]| Order::indices(ids.to_vec());
    let longer = Order::sampler(Steps {
        len: 31,
        ..steps(3)
    });
    let differ = |what: &str, then: &str, now: &str| {
        format!("the {what} is {then} in the state, {now} in the loader")
    };
    let order = |then, now| differ("order", then, now);
    let seed = |then, now| differ("seed of the order", then, now);
    let others = |what: &str| format!("the state and the loader have different {what}");
    let positions = |then, now| differ("number of positions in an epoch", then, now);
    let lanes = |then, now| differ("number of lanes", then, now);
    let sequential = Order::sequential;
    let shuffled = Order::shuffled;
    let list = others("indices") + ": only a state between two epochs can resume with another list";
    let mixed = indices(&[1, 2]).then_shuffled(0);
    let drawn = sampler(3).then_shuffled(0);
    let table = [
        (sequential(), shuffled(0), order("sequential", "shuffled")),
        (shuffled(4), windowed(2, 1), order("shuffled", "windowed")),
        (
            windowed(2, 1),
            sequential().with_seed(4),
            order("windowed", "sequential"),
        ),
        (
            indices(&[1, 2]),
            mixed,
            order("indices", "indices, shuffled"),
        ),
        (drawn, sampler(3), order("sampler, shuffled", "sampler")),
        (sampler(3), indices(&[1; 30]), order("sampler", "indices")),
        (shuffled(4), shuffled(5), seed("4", "5")),
        (windowed(2, 2), windowed(2, 2).with_seed(9), seed("4", "9")),
        (sequential(), sequential().with_seed(1), seed("0", "1")),
        (windowed(2, 1), windowed(3, 1), differ("window", "2", "3")),
        (windowed(2, 4), windowed(2, 8), lanes("4", "8")),
        (sequential(), sequential().lanes(2), lanes("1", "2")),
        (
            indices(&[1, 2, 4, 5]),
            indices(&[1, 2, 3]),
            positions("4", "3"),
        ),
        (indices(&[1, 2, 4, 5]), indices(&[2, 1, 4, 5]), list),
        (sampler(3), longer, positions("30", "31")),
        (sampler(3), sampler(4), others("sampler settings")),
    ];
    for (then, now, words) in table {
        let make = |order: &Order| data.builder().order(order.clone()).batch_size(2);
        let loader = build(make(&then));
        drop(loader.epoch(0).unwrap().next());
        let state = loader.state().unwrap();
        refused(|| make(&now), &state, ErrorKind::State, &words);
        // A resume with other batches refuses it, too.
        let error = make(&now)
            .resume_rebatched(state.clone())
            .build()
            .unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::State, &*words));
        build(make(&then).resume(state));
    }
    let make = || data.builder().order(shuffled(4)).batch_size(2);
    let state = build(make().seed(4)).state().unwrap();
    let words = "the seed of transforms is 4 in the state, 9 in the loader";
    refused(|| make().seed(9), &state, ErrorKind::State, words);
    build(make().resume(state));
}

#[test]
fn the_next_epoch_may_have_another_list_of_indices() {
    let data = Data::memory(30, 8);
    let make = |ids: &[u64]| {
        data.builder()
            .order(Order::indices(ids.to_vec()).then_shuffled(4))
            .batch_size(2)
    };
    let first = build(make(&[5, 5, 7, 1]));
    let begin = first.state().unwrap();
    drop(parts(first.epoch(0).unwrap()));
    // At the end, as an iterator leaves it, or as it is counted on.
    for (state, epoch, steps) in [
        (first.state().unwrap(), 1, 2),
        (begin.clone().advance(2), 1, 0),
        (begin, 0, 0),
    ] {
        let next = build(make(&[9, 9, 9, 2, 3, 2]).resume(state));
        let at = next.state().unwrap();
        assert_eq!((at.epoch(), at.position(), at.steps()), (epoch, 0, steps));
        let fresh = build(make(&[9, 9, 9, 2, 3, 2]));
        let right = parts(fresh.epoch(epoch).unwrap());
        gives(next.epoch(epoch), &right, "another list");
    }
}

#[test]
fn weights_change_between_two_epochs_alone_and_on_all_ranks() {
    let data = Data::memory(30, 8);
    let weights = |first: f64| {
        let all: Vec<f64> = (0..30)
            .map(|id| if id < 15 { first } else { 1.0 })
            .collect();
        Weights::new(&all).unwrap().draws(12)
    };
    let make = |first: f64, rank| {
        let order = Order::weighted(4, weights(first));
        data.builder().order(order).batch_size(2).rank(rank)
    };
    let alone = Rank::single();
    let loader = build(make(0.0, alone));
    let mut epoch = loader.epoch(0).unwrap();
    assert!(
        epoch
            .next()
            .unwrap()
            .unwrap()
            .ids()
            .iter()
            .all(|id| *id >= 15)
    );
    assert_eq!(
        loader.weights(weights(9.0)).unwrap_err().kind(),
        ErrorKind::EpochLive
    );
    drop(epoch);
    must_fail(
        loader.weights(weights(9.0)),
        ErrorKind::Config,
        "set weights between two epochs",
    );
    let middle = loader.state().unwrap();
    drop(parts(loader.epoch(0).unwrap()));
    loader.weights(weights(9.0)).unwrap();
    let end = loader.state().unwrap();
    // As a loader that has had the new weights all the time.
    let right = parts(build(make(9.0, alone)).epoch(1).unwrap());
    gives(loader.epoch(1), &right, "other weights");
    let resumed = build(make(9.0, alone).resume(end.clone()));
    gives(resumed.epoch(1), &right, "resumed with other weights");
    let words = "different weights: only a state between two epochs can resume with other weights";
    refused(|| make(9.0, alone), &middle, ErrorKind::State, words);
    // One of two ranks got other weights.
    let states = [9.0, 8.0].map(|first| {
        let rank = build(make(0.0, Rank::new(0, 2).unwrap()));
        rank.weights(weights(first)).unwrap();
        rank.state().unwrap()
    });
    must_say(State::agree(&states), "rank 1 has different weights");
    let other = build(make(0.0, alone));
    let fewer = weights(1.0).draws(11);
    must_fail(
        other.weights(fewer),
        ErrorKind::Config,
        "11 draws in an epoch, but the loader was built with 12",
    );
    let shuffled = build(data.builder().order(Order::shuffled(1)).batch_size(2));
    must_fail(
        shuffled.weights(weights(1.0)),
        ErrorKind::Config,
        "has no weights",
    );
}

#[test]
fn a_resume_with_another_global_batch_is_refused() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let state = state_after(&run, 2);
    let make = |rows: usize, world, last| {
        let rank = Rank::new(world - 1, world).unwrap();
        run.builder().batch_size(rows).rank(rank).last_batch(last)
    };
    let batch = "the global batch is 10 in the state, 40 in the loader: set `global_batch(10)`, or resume rebatched";
    let last = "the last batch is keep in the state, drop in the loader: set `last_batch(LastBatch::Keep)`, or resume rebatched";
    for (rows, world, policy, words) in [
        (40, 1, LastBatch::Keep, batch),
        // The same rows on every rank are another global batch.
        (10, 4, LastBatch::Keep, batch),
        (10, 1, LastBatch::Drop, last),
    ] {
        refused(
            || make(rows, world, policy),
            &state,
            ErrorKind::State,
            words,
        );
    }
    build(make(10, 1, LastBatch::Drop).resume_rebatched(state.clone()));
    // Only what fills the last batch differs.
    for last in [LastBatch::Mask, LastBatch::Pad] {
        let whole = parts(build(make(10, 1, last)).epoch(0).unwrap());
        let loader = build(make(10, 1, last).resume(state.clone()));
        gives(loader.epoch(0), &whole[2..], "what fills the last batch");
    }
    build(make(5, 2, LastBatch::Keep).resume(state.clone()));
    build(make(40, 1, LastBatch::Keep).resume_rebatched(state));
}

#[test]
fn a_mix_with_another_past_or_another_length_is_refused() {
    let records = |count, seed| noise_records(count, 4, seed);
    let mix = |weights: [f64; 2], key| {
        let parts = [(records(30, 1), weights[0]), (records(20, 2), weights[1])];
        Mix::new(parts, key).unwrap().epoch_len(60).unwrap()
    };
    let make = |mix: &Mix| Loader::builder(mix.clone()).batch_size(10);
    let loader = build(make(&mix([0.7, 0.3], 5)));
    let right: Vec<Part> = parts(loader.epochs(0..2).unwrap());
    let state = {
        let loader = build(make(&mix([0.7, 0.3], 5)));
        drop(parts(loader.steps(2).unwrap()));
        loader.state().unwrap()
    };
    let same_mix = build(make(&mix([7.0, 3.0], 5)).resume(state.clone()));
    gives(same_mix.epochs(0..2), &right[2..], "the same mix");
    let refuse = |mix: &Mix, kind, words: &str| drop(refused(|| make(mix), &state, kind, words));
    let kind = ErrorKind::State;
    let other = "the mix before position 20 of epoch 0, where the state was taken, differs";
    for weights in [[0.3, 0.7], [1.0, 1.0], [0.71, 0.29]] {
        refuse(&mix(weights, 5), kind, other);
    }
    let words = "the seed of the order is 5 in the state, 6 in the loader";
    refuse(&mix([0.7, 0.3], 6), kind, words);
    let longer = mix([0.7, 0.3], 5).epoch_len(70).unwrap();
    let words = "number of positions in an epoch is 60 in the state, 70 in the loader: set `Mix::epoch_len(60)`";
    refuse(&longer, kind, words);
    let parts_of = |counts: &[usize]| -> Vec<Records> {
        let counts = counts.iter().zip(1..);
        counts.map(|(count, seed)| records(*count, seed)).collect()
    };
    let scheduled = |parts: Vec<Records>, segments: &[(u64, &[f64])]| {
        let segments = segments
            .iter()
            .map(|(start, weights)| (*start, weights.to_vec()));
        let mix = Mix::scheduled(parts, segments, 5).unwrap();
        mix.epoch_len(60).unwrap()
    };
    let two = |segments: &[(u64, &[f64])]| scheduled(parts_of(&[30, 20]), segments);
    let old: &[f64] = &[0.7, 0.3];
    let new: &[f64] = &[0.1, 0.9];
    build(make(&two(&[(0, old), (20, new), (21, old)])).resume(state.clone()));
    let before = "before position 20 of epoch 0, where the state was taken, 1 segments of the mix had begun, but 2 in the \
                  loader's schedule";
    let early = two(&[(0, old), (19, new)]);
    refuse(&early, kind, before);
    // A moved state has the past of the place where it was taken.
    let moved = state.clone().at_epoch(4);
    build(make(&two(&[(0, old), (20, new)])).resume(moved.clone()));
    refused(|| make(&early), &moved, kind, before);
    // Another length of a source is another dataset, and datasets are appended, not put before.
    let kind = ErrorKind::FingerprintMismatch;
    let larger = scheduled(parts_of(&[30, 21]), &[(0, old), (20, new)]);
    refuse(&larger, kind, "51 samples, 50 when saved");
    let three = |order: [usize; 3]| {
        let parts = order.map(|source| records([30, 20, 9][source], source as u64 + 1));
        scheduled(parts.into(), &[(0, old), (20, &[0.2, 0.3, 0.5])])
    };
    build(make(&three([0, 1, 2])).resume(state.clone()));
    for (order, shard) in [([0, 2, 1], 1), ([1, 0, 2], 0)] {
        let words = format!("3 shards, 2 when saved; the first difference is shard {shard}");
        refuse(&three(order), kind, &words);
    }
    let one = scheduled(parts_of(&[30]), &[(0, &[1.0])]);
    let keep = "a mix keeps its datasets in order: append new ones, and give weight 0 to a dataset that is to be dropped";
    refuse(&one, kind, "1 shards, 2 when saved");
    refuse(&one, kind, keep);
    // Other orders do not take more data.
    let plain = |counts: &[usize]| {
        Loader::builder(Concat::new(parts_of(counts)).unwrap())
            .order(Order::indices([3, 1, 2]))
            .batch_size(1)
    };
    let state = build(plain(&[30, 20])).state().unwrap();
    let words = "3 shards, 2 when saved; the first 2 are the same";
    refused(|| plain(&[30, 20, 9]), &state, kind, words);
}

/// A list of datasets that grows and a schedule whose future changes.
struct Changing {
    lens: Vec<usize>,
    segments: Vec<(u64, Vec<f64>)>,
    epoch_len: u64,
    key: u64,
}

impl Changing {
    fn draw(draws: &mut Draws) -> Self {
        let lens = (0..1 + draws.below(3))
            .map(|_| 1 + draws.below(60) as usize)
            .collect();
        let mut new = Self {
            lens,
            segments: Vec::new(),
            epoch_len: 30 + draws.below(200),
            key: draws.next_u64(),
        };
        new.change(0, draws);
        new
    }

    fn mix(&self) -> Mix {
        let parts = (1..).zip(&self.lens);
        let parts: Vec<Records> = parts
            .map(|(seed, len)| noise_records(*len, 4, seed))
            .collect();
        let mix = Mix::scheduled(parts, self.segments.clone(), self.key).unwrap();
        mix.epoch_len(self.epoch_len).unwrap()
    }

    /// Position in the run.
    fn position(&self, state: &State) -> u64 {
        state.epoch() * self.epoch_len + state.position()
    }

    /// Other segments from position `at` of the run on, and perhaps more sources.
    fn change(&mut self, at: u64, draws: &mut Draws) {
        if at > 0 && draws.bool(0.5) {
            self.lens.push(1 + draws.below(60) as usize);
        }
        self.segments.retain(|(start, _)| *start < at);
        let mut start = at;
        for _ in 0..1 + draws.below(4) {
            let mut weights: Vec<f64> = self.lens.iter().map(|_| draws.below(6) as f64).collect();
            let any = draws.below(weights.len() as u64) as usize;
            weights[any] += 1.0;
            self.segments.push((start, weights));
            start += 1 + draws.below(120);
        }
    }
}

#[test]
fn a_mix_changes_at_any_resume_and_over_any_world() {
    let mut draws = Draws::new(12, 0, 0, "changing mixes");
    let mut resumes = 0;
    let worlds = [1, 3, 8, 2];
    let wanted = sweep::size(60, 240, 2000);
    while resumes < wanted {
        let mut changing = Changing::draw(&mut draws);
        let global = 8 + draws.below(20);
        let mut state = None::<State>;
        let mut found = Vec::new();
        for world in worlds {
            let at = state.as_ref().map_or(0, |state| changing.position(state));
            if at > 0 && draws.bool(0.8) {
                changing.change(at, &mut draws);
            }
            let loader = |rank| {
                let mix = changing.mix();
                let builder = Loader::builder(mix.clone()).rank(rank).global_batch(global);
                let builder = any_settings(builder, &mut draws);
                build(state.iter().cloned().fold(builder, LoaderBuilder::resume))
            };
            let loaders: Vec<Loader> = every_rank(world).map(loader).collect();
            let steps = 1 + draws.below(20);
            let ranks: Vec<_> = loaders
                .iter()
                .map(|loader| parts(loader.steps(steps).unwrap()))
                .collect();
            found.extend(union(&ranks, false));
            let now = agreed(&loaders);
            let sources = loaders[0].snapshot().consumer.sources;
            let delivered: u64 = sources.iter().map(|source| source.delivered).sum();
            assert_eq!(delivered, changing.position(&now));
            resumes += usize::from(state.is_some());
            state = Some(stored(&now));
        }
        // The last schedule has the whole past: no id is missing, doubled or at another place.
        let mix = changing.mix();
        let lens = (1..).zip(&changing.lens);
        let bytes: Vec<u8> = lens.flat_map(|(seed, len)| noise(len * 4, seed)).collect();
        let rows = || found.iter().flat_map(|batch| &batch.rows);
        let ids: Vec<u64> = rows().map(|row| row.id).collect();
        let id = |position: u64| {
            let epoch = position / changing.epoch_len;
            mix.sampler()
                .unwrap()
                .id(epoch, position % changing.epoch_len)
        };
        assert_eq!(
            ids,
            (0..ids.len() as u64).map(id).collect::<Vec<_>>(),
            "{mix:?}"
        );
        rows().for_each(|row| assert_eq!(row.bytes, bytes[row.id as usize * 4..][..4]));
        // Every sample of a source once in each of its passes.
        let mut times = vec![0_u64; bytes.len() / 4];
        ids.iter().for_each(|id| times[*id as usize] += 1);
        for source in 0..changing.lens.len() {
            let ids = mix.concat().ids_of(source);
            let times = &times[ids.start as usize..ids.end as usize];
            let spread = times.iter().max().unwrap() - times.iter().min().unwrap();
            assert!(spread <= 1, "{times:?}");
        }
    }
    println!("{resumes} resumes");
}

#[test]
fn ranks_with_other_schedules_do_not_agree() {
    let state = |later: f64| {
        let parts = [1, 2].map(|seed| noise_records(20, 4, seed));
        let segments = [(0, vec![1.0, 1.0]), (1000, vec![1.0, later])];
        let mix = Mix::scheduled(parts, segments, 5).unwrap();
        build(Loader::builder(mix).batch_size(10)).state().unwrap()
    };
    State::agree(&[state(2.0), state(2.0)]).unwrap();
    let agreed = State::agree(&[state(2.0), state(2.0), state(3.0)]);
    let words = "rank 2 has a different schedule of the mix, in segments that begin later";
    must_say(agreed, words);
}

#[test]
fn a_changed_dataset_is_refused_and_the_change_is_named() {
    let dir = Dir::new();
    let write = |folder: &str, files: &[Vec<u8>]| {
        let named = files.iter().enumerate().map(|(index, bytes)| {
            let name = format!("{folder}/{index}.bin");
            dir.write(&name, bytes)
        });
        named.collect::<Vec<_>>()
    };
    let files: Vec<Vec<u8>> = (0..4).map(|seed| noise(120, seed + 1)).collect();
    let open = |paths: &[PathBuf]| Records::builder(12).open_files(paths).unwrap();
    let make = |dataset: Arc<dyn Dataset>| {
        let builder = Loader::builder(dataset).order(Order::shuffled(4));
        builder.batch_size(3)
    };
    let paths = write("then", &files);
    let loader = build(make(Arc::new(open(&paths))));
    let all = parts(loader.epoch(0).unwrap());
    let start = build(make(Arc::new(open(&paths)))).state().unwrap();
    loader.resume(&start).unwrap();
    assert_eq!(parts(loader.steps(5).unwrap()).len(), 5);
    let state = loader.state().unwrap();

    // In another folder they are the same.
    let moved = open(&write("moved", &files));
    let again = build(make(Arc::new(moved)).resume(state.clone()));
    gives(again.epoch(0), &all[5..], "moved");

    let kind = ErrorKind::FingerprintMismatch;
    let open_now = |paths: &[PathBuf]| make(Arc::new(open(paths)));
    let refuse = |paths: &[PathBuf], words: &str| refused(|| open_now(paths), &state, kind, words);
    let mut flipped = files.clone();
    flipped[2][50] ^= 1;
    let now = write("flipped", &flipped);
    let error = refuse(&now, "shard 2 of 4 (counted from 0)");
    assert_eq!(error.site().path.as_ref(), Some(&now[2]));
    // The same holds if the batches may differ.
    let builder = make(Arc::new(open(&now))).resume_rebatched(state.clone());
    let error = builder.build().unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(error.site().path.as_ref(), Some(&now[2]));

    let mut longer = files.clone();
    longer[1].extend(noise(12, 9));
    let now = write("longer", &longer);
    let error = refuse(&now, "41 samples, 40 when saved");
    assert_eq!(error.site().path.as_ref(), Some(&now[1]));

    let more = write("more", &[files.clone(), vec![noise(24, 8)]].concat());
    let turned: Vec<_> = paths.iter().rev().cloned().collect();
    let more_shards = "5 shards, 4 when saved; the first 4 are the same";
    let fewer_shards = "3 shards, 4 when saved; the first 3 are the same";
    let other_order = "shard 0 of 4 (counted from 0) and others have";
    for (paths, words) in [
        (&more[..], more_shards),
        (&paths[..3], fewer_shards),
        (&turned[..], other_order),
    ] {
        refuse(paths, words);
    }
    let refuse = |dataset: Arc<dyn Dataset>, words: &str| {
        refused(|| make(dataset.clone()), &state, kind, words);
    };
    let backwards: Vec<u64> = (0..40).rev().collect();
    let part = open(&paths).subset(backwards).unwrap();
    let words = "the ids mean other samples of the same files";
    refuse(Arc::new(part), words);
    let both = Concat::new([open(&paths[..1]), open(&paths[1..])]).unwrap();
    refuse(Arc::new(both), "");
    let wider = Records::builder(12).field("other", DType::U8, [12]);
    let words = "other fields than when saved; now they are other u8 [12]";
    refuse(Arc::new(wider.open_files(&paths).unwrap()), words);

    // Chunks that are cut in another way.
    let chunks = Dir::new();
    let of = |rows: &[u64]| Data::chunks(&chunks, rows, false, false).builder();
    let state = build(of(&[5, 5, 6])).state().unwrap();
    let words = "the samples are cut into other chunks";
    refused(|| of(&[5, 6, 5]), &state, kind, words);
}

#[test]
fn an_unused_iterator_keeps_the_resumed_place() {
    let run = Run::new(&Data::memory(50, 8), Naive::Shuffled { seed: 4 });
    let rest = &run.parts(&Cut::whole(10, LastBatch::Keep, 1), 1, 0)[2..];
    let loader = resumed(&run, &state_after(&run, 7));
    assert_eq!(loader.epoch(1).unwrap().len(), 3);
    assert_eq!(loader.steps(0).unwrap().len(), 0);
    drop(loader.steps(5).unwrap());
    must_say(loader.epoch(0), "is in epoch 1, not 0");
    assert_eq!(loader.next_epoch(), 1);
    gives(loader.epoch(1), rest, "the rest");
}
