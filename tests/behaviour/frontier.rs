//! Loops that consume late: three kinds of consumers, each killed at random moments and resumed
//! from its frontier by other numbers of ranks. Over all lives together, each sample is trained as
//! often as in a run without a kill. The oracle is `common/runs.rs`; for groups and a mix, one loader.

use crate::common::runs::*;
use crate::common::sweep;
use crate::common::*;
use feedline::dataset::Mix;
use feedline::order::{Draws, Groups};
use feedline::{ErrorKind, LastBatch, Loader, LoaderBuilder, Order, Rank, State};

const EPOCHS: u64 = 2;
const WORLDS: [u32; 4] = [1, 2, 3, 8];

#[derive(Clone, Copy, Debug)]
enum Consumer {
    /// Trains batches in order, and saves the state that came with the last one.
    Queue,
    /// Draws batches from a buffer, some of them several times; a first use counts.
    Replay,
    /// Trains steps of five prompts that a filter passes; a step may end within a batch.
    Filter,
}

enum Kind {
    Naive(Naive),
    /// With batch sizes of their own.
    Grouped(Order),
    Mix(Mix),
}

struct Case {
    data: Data,
    kind: Kind,
    global: u64,
    last: LastBatch,
}

impl Case {
    fn draw(draws: &mut Draws) -> Self {
        let global = 8 + draws.below(6);
        let samples = global + draws.below(40);
        let seed = draws.next_u64();
        let data = Data::memory(samples as usize, 8);
        let last = ALL_LAST[draws.below(4) as usize];
        let kind = match draws.below(6) {
            0 => Kind::Naive(Naive::Shuffled { seed }),
            1 => Kind::Naive(Naive::Sequential { lanes: 3 }),
            2 => Kind::Naive(Naive::Weighted {
                weights: (0..samples).map(|_| 0.1 + draws.next_f64()).collect(),
                draws: global + draws.below(samples - global + 1),
                once: draws.bool(0.5),
                seed,
            }),
            3 => Kind::Naive(Naive::Indices {
                ids: (0..global + draws.below(30))
                    .map(|_| draws.below(samples))
                    .collect(),
                shuffled: draws.bool(0.5).then_some(seed),
            }),
            4 => {
                let groups = Groups::of((0..samples).map(|id| (id % 2) as u8)).unwrap();
                Kind::Grouped(Order::shuffled(seed).grouped(groups.batch_sizes([8, 9])))
            }
            _ => {
                let parts = [20, 30].map(|count| noise_records(count, 8, seed));
                let segments = [(0, vec![0.7, 0.3]), (samples / 2, vec![0.1, 0.9])];
                let mix = Mix::scheduled(parts, segments, seed).unwrap();
                Kind::Mix(mix.epoch_len(samples).unwrap())
            }
        };
        Self {
            data,
            kind,
            global,
            last,
        }
    }

    fn builder(&self, rank: Rank) -> LoaderBuilder {
        let builder = match &self.kind {
            Kind::Naive(naive) => self.data.builder().order(naive.order()),
            Kind::Grouped(order) => self.data.builder().order(order.clone()),
            Kind::Mix(mix) => Loader::builder(mix.clone()),
        };
        let builder = builder.last_batch(self.last).rank(rank).workers(2);
        if self.is_grouped() {
            builder.last_batch_share(1.0)
        } else {
            builder.global_batch(self.global)
        }
    }

    fn is_grouped(&self) -> bool {
        matches!(self.kind, Kind::Grouped(_))
    }

    /// Batches of all ranks, in a run without a kill.
    fn right(&self) -> Vec<Global> {
        let cut = Cut::whole(self.global, self.last, 1);
        match &self.kind {
            Kind::Naive(naive) => Run::new(&self.data, naive.clone()).union(&cut, 0..EPOCHS),
            _ => {
                let loader = build(self.builder(Rank::single()));
                union(&[parts(loader.epochs(0..EPOCHS).unwrap())], false)
            }
        }
    }

    /// The next `most` batches of a run that `world` ranks resume, and the state after each.
    fn received(&self, from: &State, world: u32, most: usize) -> (Vec<Global>, Vec<State>) {
        let ranks = every_rank(world).map(|rank| self.builder(rank).resume(from.clone()));
        let loaders: Vec<Loader> = ranks.map(build).collect();
        let next = loaders[0].next_epoch();
        if next >= EPOCHS {
            return (Vec::new(), Vec::new());
        }
        let mut epochs: Vec<_> = loaders
            .iter()
            .map(|loader| loader.epochs(next..EPOCHS).unwrap())
            .collect();
        let mut found = vec![Vec::new(); loaders.len()];
        let mut states = Vec::new();
        while states.len() < most && epochs[0].len() > 0 {
            for (found, epoch) in found.iter_mut().zip(&mut epochs) {
                found.push(part(&epoch.next().unwrap().unwrap()));
            }
            states.push(agreed(&loaders));
        }
        let in_turn = matches!(&self.kind, Kind::Naive(naive) if naive.in_turn());
        (union(&found, in_turn), states)
    }
}

/// A sample that was trained, and in which epoch.
type Trained = (u64, u64);

fn samples(batches: &[Global]) -> Vec<Trained> {
    let ids = |batch: &Global| {
        let epoch = batch.epoch;
        real_ids(&batch.rows).into_iter().map(move |id| (epoch, id))
    };
    batches.iter().flat_map(ids).collect()
}

/// Trains some of what was received, adds it to `trained`, and gives the frontier.
fn consume(
    consumer: Consumer,
    case: &Case,
    begin: &State,
    received: (&[Global], &[State]),
    trained: &mut Vec<Trained>,
    draws: &mut Draws,
) -> State {
    let (batches, states) = received;
    let count = draws.below(batches.len() as u64 + 1) as usize;
    match consumer {
        Consumer::Queue => {
            let done = samples(&batches[..count]);
            let mut one_by_one = begin.clone();
            for batch in &batches[..count] {
                one_by_one = one_by_one.trained(batch.epoch, batch.index).unwrap();
            }
            let carried = count.checked_sub(1).map_or(begin, |last| &states[last]);
            assert_eq!(place(&one_by_one), place(carried));
            // The past of a mix stays that of the beginning.
            if let Kind::Naive(_) = case.kind {
                assert_eq!(&one_by_one, carried);
                assert_eq!(&begin.at(done.len() as u64).unwrap(), carried);
            }
            trained.extend(done);
            carried.clone()
        }
        Consumer::Replay => {
            let mut used = vec![false; batches.len()];
            let mut frontier = begin.clone();
            for _ in 0..count + 2 {
                let drawn = draws.below(batches.len() as u64) as usize;
                let batch = &batches[drawn];
                if !std::mem::replace(&mut used[drawn], true) {
                    trained.extend(samples(std::slice::from_ref(batch)));
                    frontier = frontier.trained(batch.epoch, batch.index).unwrap();
                }
            }
            stored(&frontier)
        }
        Consumer::Filter => {
            let prompts = samples(batches);
            let passing = (1..).zip(&prompts).filter(|(_, (_, id))| id % 3 > 0);
            let ends: Vec<usize> = passing.map(|(end, _)| end).skip(4).step_by(5).collect();
            let end = draws.below(ends.len() as u64 + 1) as usize;
            // What is left of the last batches, if all of it was dropped, is done, too.
            let end = *ends.get(end).unwrap_or(&prompts.len());
            let frontier = begin.at(end as u64);
            let end = match frontier {
                Ok(_) => end,
                Err(ref error) => {
                    assert_eq!(error.kind(), ErrorKind::Config);
                    assert_eq!(case.last, LastBatch::Drop);
                    end - end % case.global as usize
                }
            };
            trained.extend(&prompts[..end]);
            stored(&frontier.unwrap_or_else(|_| begin.at(end as u64).unwrap()))
        }
    }
}

fn check(number: u64, consumer: Consumer) {
    let mut draws = Draws::new(number, 0, 0, "frontier");
    let case = Case::draw(&mut draws);
    let mut right = samples(&case.right());
    let mut trained = Vec::new();
    let mut frontier = build(case.builder(Rank::single())).state().unwrap();
    if case.is_grouped() && matches!(consumer, Consumer::Filter) {
        let error = frontier.at(1).unwrap_err();
        assert_error(&error, ErrorKind::Config, &["count batches instead"]);
        return;
    }
    loop {
        let world = WORLDS[draws.below(4) as usize];
        let most = 1 + draws.below(6) as usize;
        let (batches, states) = case.received(&frontier, world, most);
        if batches.is_empty() {
            break;
        }
        let received = (&batches[..], &states[..]);
        frontier = consume(
            consumer,
            &case,
            &frontier,
            received,
            &mut trained,
            &mut draws,
        );
    }
    if !matches!(consumer, Consumer::Replay) {
        assert_eq!(trained, right, "{consumer:?} {number}: in order");
    }
    trained.sort_unstable();
    right.sort_unstable();
    assert_eq!(trained, right, "{consumer:?} {number}");
}

#[test]
fn a_killed_loop_trains_every_sample_as_often_as_a_whole_one() {
    for number in 0..sweep::size(12, 200, 2000) {
        for consumer in [Consumer::Queue, Consumer::Replay, Consumer::Filter] {
            within_a_minute(&format!("{consumer:?} {number}"), move || {
                check(number, consumer)
            });
        }
    }
}
