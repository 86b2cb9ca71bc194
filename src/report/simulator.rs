//! A pipeline as a discrete-event simulation, exact to the nanosecond: what the verdict and the what-if model are tested
//! against. Tests only.
//!
//! ```text
//!  S slots ─► planner ─► reads: at most D in flight, C served at once ─► W workers ─► order restored ─► copy ─► consumer
//!     ▲       1 thread   first come, first served                        a row each                     1       1
//!     └──────────────────────────── on the host: dropped; with a copy: copied ────────────────────────────────────┘
//! ```
//!
//! It writes the same [`Snapshot`] as the stages do, over the same steady time: from the first batch handed out to the
//! end of the last step.

use crate::meter::Histogram;
use crate::meter::{Consumer, Copy, Decode, GpuIdle, Slots, Snapshot, Storage};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A pipeline. Times are means in nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Pipe {
    pub(super) batches: u64,
    pub(super) rows: u64,
    pub(super) slots: u64,
    /// For each batch.
    pub(super) plan_ns: f64,
    /// For each read; one for each row. 0: nothing is read.
    pub(super) read_ns: f64,
    pub(super) depth: u64,
    pub(super) channels: u64,
    /// For each row.
    pub(super) decode_ns: f64,
    pub(super) workers: u64,
    pub(super) copy: Option<Gpu>,
    /// For each batch.
    pub(super) user_ns: f64,
    /// Reads, rows and steps take exponentially distributed times instead of always the same.
    pub(super) varies: bool,
    /// From one thread to the next.
    pub(super) wake_ns: f64,
    pub(super) seed: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Gpu {
    pub(super) copy_ns: f64,
    pub(super) buffers: u64,
}

impl Default for Pipe {
    fn default() -> Self {
        Self {
            batches: 300,
            rows: 16,
            slots: 6,
            plan_ns: 20e3,
            read_ns: 1e6,
            depth: 16,
            channels: 8,
            decode_ns: 1e6,
            workers: 4,
            copy: None,
            user_ns: 4e6,
            varies: false,
            wake_ns: 0.0,
            seed: 1,
        }
    }
}

impl Pipe {
    /// The n-th of many pipes that have nothing in common: every stage may be the slowest, by any factor.
    pub(super) fn random(n: u64) -> Self {
        let mut state = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as f64 / (1_u64 << 31) as f64
        };
        let mut one_of = |these: &[u64]| these[(uniform() * these.len() as f64) as usize];
        let (rows, slots, workers) =
            (one_of(&[4, 8, 20, 40, 64]), one_of(&[2, 3, 4, 5, 8, 16]), one_of(&[1, 2, 3, 6, 8]));
        let (channels, depth) = (one_of(&[2, 4, 8, 24]), one_of(&[8, 16, 32]));
        let (gpu, varies) = (one_of(&[0, 1]) == 1, one_of(&[0, 1]) == 1);
        // From 1 to 20 ms for each batch.
        let mut demand = || 1e6 * 20_f64.powf(uniform());
        Self {
            batches: 150,
            rows,
            slots,
            plan_ns: 0.3 * demand(),
            read_ns: demand() * channels.min(depth) as f64 / rows as f64,
            depth,
            channels,
            decode_ns: demand() * workers as f64 / rows as f64,
            workers,
            copy: gpu.then(|| Gpu { copy_ns: 0.5 * demand(), buffers: 3 }),
            user_ns: demand(),
            varies,
            wake_ns: 0.0,
            seed: n % 10_000,
        }
    }

    /// Nanoseconds that each stage needs for a batch when nothing keeps it waiting: consumer, copy, decode, storage, order.
    pub(super) fn demands(&self) -> [f64; 5] {
        let rows = self.rows as f64;
        [
            self.user_ns,
            self.copy.map_or(0.0, |gpu| gpu.copy_ns),
            rows * self.decode_ns / self.workers as f64,
            rows * self.read_ns / self.channels.min(self.depth) as f64,
            self.plan_ns,
        ]
    }

    pub(super) fn run(&self) -> Snapshot {
        Run::new(self).run()
    }

    /// Samples per second.
    pub(super) fn throughput(&self) -> f64 {
        let snapshot = self.run();
        snapshot.consumer.samples as f64 / snapshot.steady_ns as f64 * 1e9
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Planned(u64),
    /// Of a batch; submitted then.
    Read(u64, u64),
    ToDecode(u64),
    Decoded(u64, u64),
    Copied(u64),
    Ready(u64),
    Stepped(u64),
}

struct Run<'p> {
    pipe: &'p Pipe,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    /// Times of each kind: reads, rows, steps.
    drawn: [u64; 3],
    planning: bool,
    next_plan: u64,
    free: u64,
    /// Rows that no read was started for, and reads that the device has not begun.
    to_read: VecDeque<u64>,
    on_device: VecDeque<(u64, u64)>,
    served: u64,
    to_decode: VecDeque<u64>,
    working: u64,
    left: Vec<u64>,
    next_copy: u64,
    copying: bool,
    buffers: u64,
    ready: u64,
    next_step: u64,
    stepping: bool,
    steady: bool,
    asked: u64,
    out: Snapshot,
    reads: Histogram,
    rows: Histogram,
    waits: Histogram,
}

impl<'p> Run<'p> {
    fn new(pipe: &'p Pipe) -> Self {
        let workers = pipe.workers as u32;
        let out = Snapshot {
            storage: Storage { depth: pipe.depth as u32, ..Storage::default() },
            decode: Decode { workers, cores: 64, cpu_ns: Some(0), ..Decode::default() },
            copy: pipe.copy.map(|gpu| Copy { buffers: gpu.buffers as u32, ..Copy::default() }),
            slots: Slots { count: pipe.slots as u32, ..Slots::default() },
            ..Snapshot::default()
        };
        Self {
            pipe,
            now: 0,
            events: BinaryHeap::new(),
            count: 0,
            drawn: [0; 3],
            planning: false,
            next_plan: 0,
            free: pipe.slots,
            to_read: VecDeque::new(),
            on_device: VecDeque::new(),
            served: 0,
            to_decode: VecDeque::new(),
            working: 0,
            left: vec![pipe.rows; pipe.batches as usize],
            next_copy: 0,
            copying: false,
            buffers: pipe.copy.map_or(0, |gpu| gpu.buffers),
            ready: 0,
            next_step: 0,
            stepping: false,
            steady: false,
            asked: 0,
            out,
            reads: Histogram::default(),
            rows: Histogram::default(),
            waits: Histogram::default(),
        }
    }

    fn run(mut self) -> Snapshot {
        self.start_what_can();
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.pass(at);
            self.happen(event);
            self.start_what_can();
        }
        assert_eq!(self.out.consumer.batches, self.pipe.batches, "{:?}", self.pipe);
        let mut out = self.out;
        out.at_ns = self.now;
        out.storage.latency = self.reads.read();
        out.decode.latency = self.rows.read();
        out.decode.cpu_ns = Some(out.decode.busy_ns);
        out.consumer.waits = self.waits.read();
        if self.pipe.copy.is_some() {
            let Consumer { batches, waited_ns, .. } = out.consumer;
            out.consumer.gpu = Some(GpuIdle { steps: batches, starved_ns: waited_ns, ..GpuIdle::default() });
        }
        out
    }

    /// An exponentially distributed time, or just the mean. The n-th time of a kind is the same multiple of its mean in all
    /// pipes of a seed, so that two differ in what was changed alone.
    fn time(&mut self, kind: usize, mean: f64) -> u64 {
        if !self.pipe.varies {
            return mean as u64;
        }
        self.drawn[kind] += 1;
        let mut z = (self.pipe.seed << 48) + ((kind as u64) << 40) + self.drawn[kind];
        for _ in 0..2 {
            z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
        }
        let uniform = (z >> 11) as f64 / (1_u64 << 53) as f64;
        (-mean * (1.0 - uniform).ln()) as u64
    }

    fn at(&mut self, in_ns: u64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((self.now + in_ns, self.count, event)));
    }

    /// Time passes, with everything as it is.
    fn pass(&mut self, to: u64) {
        let ns = to - self.now;
        self.now = to;
        if !self.steady {
            return;
        }
        let in_flight = self.served + self.on_device.len() as u64;
        let full = self.full();
        let held = if self.pipe.copy.is_some() { 0 } else { u64::from(self.stepping) };
        let filling = self.pipe.slots - self.free - full - held;
        let out = &mut self.out;
        out.steady_ns += ns;
        out.order.busy_ns += ns * u64::from(self.planning);
        let no_slot = !self.planning && self.free == 0 && self.next_plan < self.pipe.batches;
        out.order.no_slot_ns += ns * u64::from(no_slot);
        out.storage.busy_ns += ns * u64::from(in_flight > 0);
        out.storage.in_flight_ns += ns * in_flight;
        out.decode.busy_ns += ns * self.working;
        let idle = ns * (self.pipe.workers - self.working);
        *(if filling > 0 { &mut out.decode.starved_ns } else { &mut out.decode.ahead_ns }) += idle;
        out.decode.queued_ns += ns * self.to_decode.len() as u64;
        out.slots.free_ns += ns * self.free;
        out.slots.filling_ns += ns * filling;
        out.slots.full_ns += ns * full;
        out.slots.held_ns += ns * held;
        *(if self.stepping { &mut out.consumer.user_ns } else { &mut out.consumer.waited_ns }) += ns;
        if let Some(copy) = &mut out.copy {
            let waits = self.left.get(self.next_copy as usize) == Some(&0);
            let state = match (self.copying, waits) {
                (true, _) => &mut copy.busy_ns,
                (false, true) => &mut copy.blocked_ns,
                (false, false) => &mut copy.starved_ns,
            };
            *state += ns;
        }
    }

    /// Slots that are full and neither copied nor taken.
    fn full(&self) -> u64 {
        let from = if self.pipe.copy.is_some() { self.next_copy } else { self.next_step };
        let from = from + u64::from(self.stepping && self.pipe.copy.is_none());
        (from..self.next_plan).filter(|batch| self.left[*batch as usize] == 0).count() as u64
    }

    fn happen(&mut self, event: Event) {
        let steady = u64::from(self.steady);
        match event {
            Event::Planned(batch) => {
                self.planning = false;
                if self.pipe.read_ns > 0.0 {
                    self.to_read.extend((0..self.pipe.rows).map(|_| batch));
                } else {
                    (0..self.pipe.rows).for_each(|_| self.at(self.pipe.wake_ns as u64, Event::ToDecode(batch)));
                }
            }
            Event::Read(batch, submitted) => {
                self.served -= 1;
                self.reads.record(self.now - submitted);
                self.out.storage.reads += steady;
                self.out.storage.bytes += 100_000 * steady;
                self.at(self.pipe.wake_ns as u64, Event::ToDecode(batch));
            }
            Event::ToDecode(batch) => self.to_decode.push_back(batch),
            Event::Decoded(batch, took) => {
                self.working -= 1;
                self.rows.record(took);
                self.out.decode.samples += steady;
                self.left[batch as usize] -= 1;
            }
            Event::Copied(batch) => {
                self.copying = false;
                self.free += 1;
                self.next_copy = batch + 1;
                let copy = self.out.copy.as_mut().expect("there are copies");
                (copy.batches, copy.bytes) = (copy.batches + steady, copy.bytes + 100_000 * steady);
                self.at(self.pipe.wake_ns as u64, Event::Ready(batch));
            }
            Event::Ready(batch) => self.ready = batch + 1,
            Event::Stepped(batch) => {
                self.stepping = false;
                self.next_step = batch + 1;
                self.asked = self.now;
                match self.pipe.copy {
                    Some(_) => self.buffers += 1,
                    None => self.free += 1,
                }
                // The steady time ends with the last step.
                self.steady = self.next_step < self.pipe.batches;
            }
        }
    }

    fn start_what_can(&mut self) {
        let pipe = self.pipe;
        if !self.planning && self.free > 0 && self.next_plan < pipe.batches {
            self.free -= 1;
            self.planning = true;
            self.at(pipe.plan_ns as u64, Event::Planned(self.next_plan));
            self.next_plan += 1;
        }
        while self.served + (self.on_device.len() as u64) < pipe.depth
            && let Some(batch) = self.to_read.pop_front()
        {
            self.on_device.push_back((batch, self.now));
        }
        while self.served < pipe.channels
            && let Some((batch, submitted)) = self.on_device.pop_front()
        {
            self.served += 1;
            let ns = self.time(0, pipe.read_ns);
            self.at(ns, Event::Read(batch, submitted));
        }
        while self.working < pipe.workers
            && let Some(batch) = self.to_decode.pop_front()
        {
            self.working += 1;
            let ns = self.time(1, pipe.decode_ns);
            self.at(ns, Event::Decoded(batch, ns));
        }
        self.start_copy();
        self.start_step();
    }

    fn start_copy(&mut self) {
        let Some(gpu) = self.pipe.copy else {
            while self.ready < self.next_plan && self.left[self.ready as usize] == 0 {
                self.ready += 1;
            }
            return;
        };
        let full = self.left.get(self.next_copy as usize) == Some(&0);
        if !self.copying && full && self.buffers > 0 {
            self.copying = true;
            self.buffers -= 1;
            self.at(gpu.copy_ns as u64, Event::Copied(self.next_copy));
        }
    }

    fn start_step(&mut self) {
        if self.stepping || self.ready <= self.next_step {
            return;
        }
        let consumer = &mut self.out.consumer;
        consumer.batches += 1;
        consumer.samples += self.pipe.rows;
        if self.steady {
            self.waits.record(self.now - self.asked);
        } else {
            consumer.first_ns = self.now;
        }
        (self.steady, self.stepping) = (true, true);
        let ns = self.time(2, self.pipe.user_ns);
        self.at(ns, Event::Stepped(self.next_step));
    }
}

#[test]
fn the_simulation_agrees_with_what_can_be_computed_by_hand() {
    // One slot: everything in series. Two rounds of 8 reads, 4 rounds of 4 rows.
    let pipe = Pipe { slots: 1, ..Pipe::default() };
    let round = 20e3 + 2.0 * 1e6 + 4.0 * 1e6 + 4e6 - 2.0 * 1e6;
    let got = pipe.run();
    // The second half of the reads lies beside the decoding of the first, which goes on for four rounds.
    let period = got.steady_ns as f64 / 300.0;
    assert!((period - round - 1e6).abs() < 0.1e6, "{period}");
    // Many slots: the slowest stage alone.
    for (slowest, pipe) in [
        (12e6, Pipe { user_ns: 12e6, slots: 64, ..Pipe::default() }),
        (12e6, Pipe { decode_ns: 3e6, slots: 64, batches: 2000, ..Pipe::default() }),
        (12e6, Pipe { read_ns: 6e6, slots: 64, batches: 2000, ..Pipe::default() }),
    ] {
        let got = pipe.run();
        let period = got.steady_ns as f64 / pipe.batches as f64;
        assert!((period / slowest - 1.0).abs() < 0.05, "{period} for {slowest}: {got:?}");
        assert_eq!(pipe.demands().into_iter().fold(0.0, f64::max), slowest);
    }
}

#[test]
fn every_slot_and_worker_is_accounted_for_at_every_moment() {
    let gpu = Some(Gpu { copy_ns: 2e6, buffers: 3 });
    for pipe in [Pipe::default(), Pipe { varies: true, copy: gpu, ..Pipe::default() }] {
        let got = pipe.run();
        let Slots { free_ns, filling_ns, full_ns, held_ns, .. } = got.slots;
        assert_eq!(free_ns + filling_ns + full_ns + held_ns, pipe.slots * got.steady_ns);
        assert_eq!(got.decode.busy_ns + got.decode.starved_ns + got.decode.ahead_ns, pipe.workers * got.steady_ns);
        assert_eq!(got.consumer.user_ns + got.consumer.waited_ns, got.steady_ns);
        if let Some(copy) = &got.copy {
            assert_eq!(copy.busy_ns + copy.starved_ns + copy.blocked_ns, got.steady_ns);
        }
    }
}
