//! The view over ranks against a model of a synchronous job: batches from a queue, an own part of
//! the step, a meeting of all ranks.

use super::{Across, HowMany, RankReport};
use crate::Cause;
use crate::meter::{BatchRecord, Cpu, DecodeStage, Snapshot, Timeline};

const MS: f64 = 1e6;
const RANKS: usize = 8;
const BATCHES: usize = 120;

/// One rank: nanoseconds of its stages for a batch.
#[derive(Clone, Copy)]
struct Rank {
    read: f64,
    decode: f64,
    map: f64,
    own: f64,
    workers: usize,
    slots: usize,
    /// The process stops for so long, in one of five steps.
    stops: f64,
    /// Its quota keeps it from a core in each step for so long.
    throttled: f64,
}

const USUAL: Rank = Rank {
    read: 2.0 * MS,
    decode: 40.0 * MS,
    map: MS,
    own: 100.0 * MS,
    workers: 4,
    slots: 4,
    stops: 0.0,
    throttled: 0.0,
};

/// Numbers that look random, from 0 to 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A time that varies by a fifth, and now and then is twice as long.
    fn about(&mut self, ns: f64) -> f64 {
        let stall = if self.next() < 0.01 { 1.0 } else { 0.0 };
        ns * (0.9 + 0.2 * self.next() + stall)
    }

    /// The time of a step, which varies by 2 %.
    fn nearly(&mut self, ns: f64) -> f64 {
        ns * (0.99 + 0.02 * self.next())
    }
}

/// A rank in the model, with what its meters have.
struct Modelled {
    rank: Rank,
    random: Random,
    read_until: f64,
    workers: Vec<f64>,
    asked: Vec<f64>,
    records: Vec<BatchRecord>,
    busy: [f64; 3],
}

impl Modelled {
    /// Takes its next batch at `now`; returns the time when its own part of the step is done.
    fn step(&mut self, now: f64) -> f64 {
        let rank = self.rank;
        let batch = self.asked.len();
        self.asked.push(now);
        // All slots are free at the start; the one of an earlier batch is when the batch behind it
        // is asked for.
        let slot = if batch < rank.slots {
            0.0
        } else {
            self.asked[batch + 1 - rank.slots]
        };
        let times = [rank.read, rank.decode, rank.map].map(|ns| self.random.about(ns));
        for (busy, ns) in self.busy.iter_mut().zip(times) {
            *busy += ns;
        }
        self.read_until = self.read_until.max(slot) + times[0];
        let worker = self
            .workers
            .iter_mut()
            .min_by(|a, b| a.total_cmp(b))
            .unwrap();
        *worker = worker.max(self.read_until) + times[1] + times[2];
        let got = now.max(*worker);
        let stop = if self.random.next() < 0.2 {
            rank.stops
        } else {
            0.0
        };
        let arrived = got + self.random.nearly(rank.own) + rank.throttled + stop;
        let [asked_ns, got_ns, arrived_ns] = [now, got, arrived].map(|ns| ns as u64);
        let times = BatchRecord {
            asked_ns,
            got_ns,
            arrived_ns,
            ..BatchRecord::default()
        };
        self.records.push(BatchRecord {
            batch: batch as u64,
            first: batch == 0,
            ..times
        });
        arrived
    }

    fn report(mut self, number: usize, arrives: bool) -> RankReport {
        let batches = self.records.len() as u64;
        let [first, end] = [0, BATCHES - 1].map(|at| self.records[at].got_ns);
        let [read, decode, map] = self.busy.map(|ns| ns as u64);
        let waits = self
            .records
            .iter()
            .skip(1)
            .map(|record| record.got_ns - record.asked_ns);
        let mut snapshot = Snapshot {
            steady_ns: end - first,
            ..Snapshot::default()
        };
        snapshot.consumer.waited_ns = waits.sum();
        (snapshot.consumer.batches, snapshot.consumer.samples) = (batches, 4 * batches);
        snapshot.consumer.delay_ns = Some((0.6 * self.rank.throttled) as u64 * batches);
        snapshot.storage.busy_ns = read;
        snapshot.storage.in_flight_ns = 4 * read;
        snapshot.storage.depth = 64;
        let workers = self.rank.workers as u32;
        let samples = 4 * batches;
        let decode = DecodeStage {
            busy_ns: decode + map,
            map_batch_ns: map,
            workers,
            cores: 64,
            samples,
            ..Default::default()
        };
        snapshot.decode = decode;
        snapshot.slots.count = self.rank.slots as u32;
        let throttled_ns = self.rank.throttled as u64 * batches;
        let throttled = u64::from(self.rank.throttled > 0.0) * batches;
        snapshot.cpu = Some(Cpu {
            periods: batches,
            throttled,
            throttled_ns,
            ..Cpu::default()
        });
        if !arrives {
            self.records
                .iter_mut()
                .for_each(|record| record.arrived_ns = 0);
        }
        let timeline = Timeline {
            batches: self.records,
            ..Timeline::default()
        };
        RankReport::of(number as u32, RANKS as u32, "node", &snapshot, &timeline)
    }
}

/// A job of these ranks, and its mean step.
fn job(ranks: &[Rank], seed: u64) -> (Vec<Modelled>, f64) {
    let mut all: Vec<Modelled> = ranks
        .iter()
        .enumerate()
        .map(|(number, rank)| Modelled {
            rank: *rank,
            random: Random(1000 * seed + number as u64),
            read_until: 0.0,
            workers: vec![0.0; rank.workers],
            asked: Vec::new(),
            records: Vec::new(),
            busy: [0.0; 3],
        })
        .collect();
    let mut now = 0.0;
    for _ in 0..BATCHES {
        now = MS
            + all
                .iter_mut()
                .map(|rank| rank.step(now))
                .fold(0.0, f64::max);
    }
    // From the first batch of the last rank to the last one of all.
    let [begin, end] = [0, BATCHES - 1].map(|at| {
        all.iter()
            .map(|rank| rank.records[at].got_ns)
            .max()
            .unwrap() as f64
    });
    (all, (end - begin) / (BATCHES - 1) as f64)
}

struct Case {
    name: &'static str,
    slow: Rank,
    arrives: bool,
    /// What is said, unless nothing is.
    cause: Option<Cause>,
    /// Where all ranks are slow.
    of_all: Option<Cause>,
}

#[rustfmt::skip]
fn cases() -> Vec<Case> {
    let case = |name, slow, arrives, cause, of_all| Case { name, slow, arrives, cause, of_all };
    let decode = Some(Cause::Decode);
let map = Some(Cause::MapBatch);
let own = Some(Cause::Consumer);
    let storage = Some(Cause::Storage);
let quota = Some(Cause::CpuQuota);
    vec![
        case("map_batch", Rank { map: 700.0 * MS, ..USUAL }, false, map, map),
        case("a slow decoder and few slots", Rank { decode: 1000.0 * MS, slots: 3, ..USUAL }, false, decode, decode),
        case("a slower decoder", Rank { decode: 560.0 * MS, ..USUAL }, false, decode, decode),
        case("one worker", Rank { workers: 1, decode: 140.0 * MS, ..USUAL }, false, decode, decode),
        case("a slow disk", Rank { read: 250.0 * MS, ..USUAL }, false, storage, storage),
        case("a CPU quota", Rank { throttled: 150.0 * MS, ..USUAL }, false, quota, quota),
        case("a longer step, not told", Rank { own: 140.0 * MS, ..USUAL }, false, None, None),
        case("a longer step", Rank { own: 150.0 * MS, ..USUAL }, true, own, None),
        case("stops", Rank { stops: 300.0 * MS, ..USUAL }, true, own, None),
        case("a slow disk, and arrivals", Rank { read: 250.0 * MS, ..USUAL }, true, storage, storage),
        case("nothing", USUAL, false, None, None),
        case("nothing, and arrivals", USUAL, true, None, None),
    ]
}

impl Case {
    /// Whether the right ranks, the right cause and the right share are told, where so many ranks
    /// are slow; `None` where nothing is to be told.
    fn run(&self, count: usize, seed: usize) -> Option<[bool; 3]> {
        let is_slow = |rank: &usize| (rank + seed) % RANKS < count;
        let mut ranks = [Rank {
            slots: self.slow.slots,
            ..USUAL
        }; RANKS];
        let usual_ns = job(&ranks, seed as u64).1;
        (0..RANKS)
            .filter(is_slow)
            .for_each(|rank| ranks[rank] = self.slow);
        let (modelled, step_ns) = job(&ranks, seed as u64);
        let reports = modelled.into_iter().enumerate();
        let view = Across::of(reports.map(|(number, rank)| rank.report(number, self.arrives)));
        let Some(cause) = (if count == RANKS {
            self.of_all
        } else {
            self.cause
        }) else {
            assert_eq!(view.late, None, "{}, {count} of {RANKS}: {view}", self.name);
            return None;
        };
        let Some(late) = &view.late else {
            return Some([false; 3]);
        };
        let named: Vec<usize> = late.ranks.iter().map(|rank| *rank as usize).collect();
        assert!(
            named.iter().all(is_slow),
            "{}, {count} of {RANKS}: {view}",
            self.name
        );
        let how_many = match count {
            1..=4 => HowMany::Few,
            5..=7 => HowMany::Most,
            _ => HowMany::All,
        };
        let clock = (step_ns - usual_ns) / step_ns;
        let right = named.len() == count && late.how_many == how_many;
        Some([
            right,
            late.cause == cause,
            (late.share / clock - 1.0).abs() <= 0.1,
        ])
    }
}

#[test]
fn late_ranks_are_named_with_their_cost_and_cause() {
    let mut wrong = String::new();
    let mut runs = Vec::new();
    for case in cases() {
        for count in 1..=RANKS {
            let told: Vec<[bool; 3]> = (0..20).filter_map(|seed| case.run(count, seed)).collect();
            let right = [0, 1, 2].map(|what| told.iter().filter(|told| told[what]).count());
            if right != [told.len(); 3] {
                wrong += &format!(
                    "{}, {count} of {RANKS}: of {} right: {right:?}\n",
                    case.name,
                    told.len()
                );
            }
            runs.extend(told);
        }
    }
    let [ranks, cause, shares] = [0, 1, 2]
        .map(|what| runs.iter().filter(|told| told[what]).count() as f64 / runs.len() as f64);
    assert!(
        ranks >= 0.95 && cause >= 0.95 && shares >= 0.95,
        "{ranks:.3} {cause:.3} {shares:.3}\n{wrong}"
    );
}
