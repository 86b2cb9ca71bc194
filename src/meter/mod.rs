//! The meters of all stages: numbers without a judgement, and no lock per sample. Stages are only labels here; the module
//! imports `error` and `sync` alone.
//!
//! ```text
//! stages ──► Meters ──┬─► Snapshot   sums until a moment, for the verdict of `report`
//!                     ├─► Timeline   the last batches, each with its times
//!                     └─► Copies, DirectReads, ReadStats
//! ```
//!
//! Two times matter to the user: the wait of `next()` for a batch (the device idles because of the loader), and the time of the
//! user's own code between two calls.

mod clock;
mod counters;
mod cpu;
#[cfg(feature = "remote")]
mod network;
mod reads;
mod snapshot;
mod timeline;
mod tracks;

pub(crate) use clock::Clock;
pub use counters::Latency;
pub(crate) use counters::{Area, Counter, Flow, Histogram, Lone, Pool, States};
pub(crate) use cpu::{Role, Threads};
#[cfg(feature = "remote")]
pub(crate) use network::NetworkMeter;
pub use reads::{CacheReads, Copies, DirectReads, Network, ReadStats};
pub use snapshot::{
    Consumer, CopyStage, Cpu, DecodeStage, Effort, GpuIdle, Handed, OrderStage, ReaderInUse, ReaderKind, Slots,
    Snapshot, StorageStage, Unmeasured,
};
pub(crate) use timeline::Recorder;
pub use timeline::{BatchRecord, Gauges, Timeline};
pub(crate) use tracks::Ring;
pub(crate) use tracks::Rings;
pub use tracks::{Span, Track, Work};

use crate::sync::Hold;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// State of the planner's thread; the first is that of the beginning, here and below.
pub(crate) enum Planning {
    Waiting,
    Busy,
    /// Waiting for a slot, with more to plan.
    NoSlot,
}

/// State of the consumer.
pub(crate) enum Consuming {
    /// Its own work, or the wait for a first batch.
    Own,
    Waiting,
}

/// State of the transfer thread and the copy stream.
pub(crate) enum Copying {
    Starved,
    Busy,
    /// A full slot waits for device memory, or the oldest copy for the consumer's streams.
    Blocked,
}

/// All meters of a loader.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    pub(crate) clock: Clock,
    /// Whether anything is measured. Off only in benchmarks of the meters' own cost.
    pub(crate) on: bool,
    pub(crate) batches: Counter,
    pub(crate) samples: Counter,
    /// Bytes of the batches' fields.
    pub(crate) bytes: Counter,
    /// By [`Consuming`]: whether the consumer waits in `next()`, not for the first batch of an iterator. The one live iterator writes this and its
    /// counters.
    pub(crate) consumer: States<2>,
    /// Waits for the first batch of each iterator.
    pub(crate) first_wait_ns: Counter,
    /// Between two calls of `next()`: the user's own work.
    pub(crate) user_ns: Counter,
    /// Waits that were not for a first batch.
    pub(crate) waits: Histogram,
    /// By [`Planning`].
    pub(crate) planner: States<3>,
    /// Reads in flight.
    pub(crate) reading: Flow,
    /// The time of the consumer's last batch, and the sum of the reads in flight until then.
    moment: [AtomicU64; 2],
    /// Whether rows wait for room for their bytes.
    pub(crate) no_room: States<2>,
    /// Rows that reads finished, without a worker.
    pub(crate) read_in_place: Lone<Counter>,
    pub(crate) read_latency: Histogram,
    /// Bytes that workers copied from the page cache.
    pub(crate) cached_bytes: Lone<Counter>,
    pub(crate) pool: Pool,
    /// Pieces of work in the queues to the workers.
    pub(crate) queued: Area,
    pub(crate) work_latency: Histogram,
    /// Rows given to workers.
    pub(crate) worked: Lone<Counter>,
    pub(crate) slots: SlotMeters,
    pub(crate) threads: Threads,
    pub(crate) recorder: Recorder,
    pub(crate) rings: Rings,
    /// Chunks opened, and the samples in them.
    pub(crate) chunks: Counter,
    pub(crate) chunk_rows: Counter,
    pub(crate) device: DeviceMeters,
    /// Written at each of the planner's turns.
    reads: Lone<Mutex<ReadStats>>,
}

/// Slots by their place, over time.
#[derive(Debug, Default)]
pub(crate) struct SlotMeters {
    /// By [`Stay`]; at `Free` all announced slots.
    areas: [Area; 4],
}

/// The place of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stay {
    Free = 0,
    Filling = 1,
    Full = 2,
    Held = 3,
}

/// The place of one slot, and the times of its batch (nanoseconds; 0 for a step that did not happen).
#[derive(Debug, Default)]
pub(crate) struct SlotTimes {
    /// One more than the [`Stay`]; 0 before the slot is announced.
    stay: AtomicU8,
    pub(crate) planned: AtomicU64,
    pub(crate) read: AtomicU64,
    pub(crate) full: AtomicU64,
}

impl SlotMeters {
    /// From `now` on the slot is at `stay`. One thread at a time has a slot.
    pub(crate) fn move_to(&self, slot: &SlotTimes, stay: Stay, now: u64) {
        if now == 0 {
            return;
        }
        let before = slot.stay.load(Ordering::Relaxed);
        slot.stay.store(stay as u8 + 1, Ordering::Relaxed);
        match before.checked_sub(1).map(usize::from) {
            None => self.areas[Stay::Free as usize].enter(1, now),
            Some(before) if before != Stay::Free as usize => self.areas[before].leave(1, now),
            Some(_) => {}
        }
        if stay != Stay::Free {
            self.areas[stay as usize].enter(1, now);
        }
    }

    pub(crate) fn inside(&self, stay: Stay) -> u64 {
        self.of(stay, Area::inside)
    }

    fn total_ns(&self, stay: Stay, now: u64) -> u64 {
        self.of(stay, |area| area.total_ns(now))
    }

    fn of(&self, stay: Stay, read: impl Fn(&Area) -> u64) -> u64 {
        let (number, elsewhere) = (read(&self.areas[stay as usize]), &self.areas[1..]);
        // Free slots are those at no other place.
        if stay == Stay::Free { number.saturating_sub(elsewhere.iter().map(read).sum()) } else { number }
    }
}

impl SlotTimes {
    /// A batch begins in the slot.
    pub(crate) fn begin(&self, now: u64) {
        if now == 0 {
            return;
        }
        self.planned.store(now, Ordering::Relaxed);
        self.read.store(0, Ordering::Relaxed);
        self.full.store(0, Ordering::Relaxed);
    }

    /// The times of its batch.
    pub(crate) fn read_all(&self) -> [u64; 3] {
        [&self.planned, &self.read, &self.full].map(|time| time.load(Ordering::Relaxed))
    }
}

/// Meters of the way onto the device.
#[derive(Debug, Default)]
pub(crate) struct DeviceMeters {
    /// By [`Copying`].
    pub(crate) states: States<3>,
    /// Time with copies on the bus, by the device's clock; and the duration of each copy.
    pub(crate) bus_ns: Counter,
    /// Time of the operations on batches, by the same clock.
    pub(crate) ops_ns: Counter,
    pub(crate) latency: Histogram,
    pub(crate) copies: Counter,
    pub(crate) bytes: Counter,
    pub(crate) pinned_slots: Counter,
    pub(crate) pageable_slots: Counter,
    /// Direct reads, their bytes, and rows that came by the host instead.
    pub(crate) reads: Counter,
    pub(crate) direct_bytes: Counter,
    pub(crate) host_rows: Counter,
    /// The reason of the first of these rows.
    by_host: Mutex<Option<String>>,
    /// The reason why a slot could not be pinned.
    pageable: Mutex<Option<String>>,
}

impl DeviceMeters {
    fn snapshot(&self, buffers: u32, now: u64) -> CopyStage {
        let (states, busy_ns, ops_ns) = (self.states.read(now), self.bus_ns.get(), self.ops_ns.get());
        let (starved_ns, blocked_ns) = (states[Copying::Starved as usize], states[Copying::Blocked as usize]);
        let (batches, bytes, latency) = (self.copies.get(), self.bytes.get(), self.latency.read());
        CopyStage {
            busy_ns,
            ops_ns,
            starved_ns,
            blocked_ns,
            cpu_ns: None,
            delay_ns: None,
            batches,
            bytes,
            buffers,
            latency,
        }
    }

    /// A slot is copied from pageable memory, since it could not be pinned.
    pub(crate) fn note_pageable(&self, why: &crate::Error) {
        self.pageable_slots.add(1);
        let mut reason = self.pageable.hold();
        reason.get_or_insert_with(|| why.message().to_string());
    }

    /// A direct read was not possible.
    pub(crate) fn note_by_host(&self, why: &str) {
        self.by_host.hold().get_or_insert_with(|| why.to_string());
    }

    pub(crate) fn direct(&self, how: String) -> DirectReads {
        DirectReads {
            how,
            reads: self.reads.get(),
            bytes: self.direct_bytes.get(),
            host_rows: self.host_rows.get(),
            why_host: self.by_host.hold().clone(),
        }
    }

    pub(crate) fn copies(&self, now: u64) -> Copies {
        Copies {
            blocked: Duration::from_nanos(self.states.read(now)[Copying::Blocked as usize]),
            batches: self.copies.get(),
            bytes: self.bytes.get(),
            pinned_slots: self.pinned_slots.get(),
            pageable_slots: self.pageable_slots.get(),
            why_pageable: self.pageable.hold().clone(),
        }
    }
}

impl Meters {
    pub(crate) fn new(clock: Clock, workers: usize, on_device: bool) -> Self {
        let (on, pool, rings) = (clock.goes(), Pool::new(workers), Rings::new(workers, on_device));
        Self { clock, on, pool, rings, ..Self::default() }
    }

    /// A slot is at another place. Idle workers change from ahead to starved when the first slot begins to be filled, and back when
    /// the last is full.
    pub(crate) fn move_slot(&self, slot: &SlotTimes, stay: Stay, now: u64) {
        self.slots.move_to(slot, stay, now);
        if matches!(stay, Stay::Filling | Stay::Full) {
            self.change_working(0, now);
        }
    }

    /// One more worker is busy (`by` 1), one fewer (-1), or only the filling of slots has changed (0).
    pub(crate) fn change_working(&self, by: i64, now: u64) {
        if now == 0 {
            return;
        }
        let mut filling = self.is_filling();
        if by != 0 || self.pool.filling() != filling {
            self.pool.change(by, filling, now);
        }
        // Another thread may have changed that meanwhile, and this thread may have overtaken it: the last one looks again.
        while self.is_filling() != filling {
            filling = !filling;
            self.pool.change(0, filling, now);
        }
    }

    /// Whether a batch is being filled.
    pub(crate) fn is_filling(&self) -> bool {
        self.slots.inside(Stay::Filling) > 0
    }

    /// Mean reads in flight since the last call; one thread calls this. The number at the moment itself would often be 0, since the
    /// loader hands out a batch just after its last read.
    fn mean_in_flight(&self, now: u64) -> u32 {
        let (total, _) = self.reading.read(now);
        let [at, before] = self.moment.each_ref().map(|number| number.load(Ordering::Relaxed));
        for (place, value) in self.moment.iter().zip([now, total]) {
            place.store(value, Ordering::Relaxed);
        }
        let ns = now.saturating_sub(at).max(1);
        (total.saturating_sub(before).saturating_add(ns / 2) / ns).min(u32::MAX.into()) as u32
    }

    /// How full everything is.
    pub(crate) fn gauges(&self, now: u64) -> Gauges {
        let slots = |stay| self.slots.inside(stay) as u32;
        Gauges {
            at_ns: now,
            in_flight: self.mean_in_flight(now),
            queued: self.queued.inside() as u32,
            working: self.pool.working() as u32,
            free_slots: slots(Stay::Free),
            filling_slots: slots(Stay::Filling),
            full_slots: slots(Stay::Full),
            held: slots(Stay::Held),
        }
    }

    /// Waits in `next()` for batches other than the first of an iterator, with the present wait.
    pub(crate) fn waited_ns(&self, now: u64) -> u64 {
        self.consumer.read(now)[Consuming::Waiting as usize]
    }

    /// CPU time and run delay, if anything is measured.
    fn cpu(&self, role: Role) -> Option<(u64, u64)> {
        self.on.then(|| self.threads.times(role)).flatten()
    }

    /// All numbers until now. `settings` adds those that meters do not know.
    pub(crate) fn snapshot(&self, settings: &Settings) -> Snapshot {
        let now = self.clock.now();
        let (waited_ns, user_ns) = (self.waited_ns(now), self.user_ns.get());
        let planning = self.planner.read(now);
        let (busy_ns, no_slot_ns) = (planning[Planning::Busy as usize], planning[Planning::NoSlot as usize]);
        let slots = |stay| self.slots.total_ns(stay, now);
        let (consumer, planner) = (self.cpu(Role::Consumer).unzip(), self.cpu(Role::Planner).unzip());
        Snapshot {
            at_ns: now,
            // The caller subtracts snapshots.
            steady_ns: now,
            consumer: Consumer {
                batches: self.batches.get(),
                samples: self.samples.get(),
                bytes: self.bytes.get(),
                substituted: 0,
                steady: None,
                waited_ns,
                first_ns: self.first_wait_ns.get(),
                user_ns,
                waits: self.waits.read(),
                cpu_ns: consumer.0,
                delay_ns: consumer.1,
                gpu: None,
            },
            order: OrderStage { busy_ns, cpu_ns: planner.0, delay_ns: planner.1, no_slot_ns },
            storage: self.storage(settings, now),
            decode: self.decode(settings, now),
            copy: settings.buffers.map(|buffers| {
                let (cpu_ns, delay_ns) = self.cpu(Role::Copier).unzip();
                CopyStage { cpu_ns, delay_ns, ..self.device.snapshot(buffers, now) }
            }),
            slots: Slots {
                count: settings.slots,
                free_ns: slots(Stay::Free),
                filling_ns: slots(Stay::Filling),
                full_ns: slots(Stay::Full),
                held_ns: slots(Stay::Held),
            },
            cpu: self.on.then(Cpu::now),
        }
    }

    /// Numbers of the reads.
    fn storage(&self, settings: &Settings, now: u64) -> StorageStage {
        let [_, blocked_ns] = self.no_room.read(now);
        let (in_flight_ns, reading_ns) = self.reading.read(now);
        let reads = self.reads();
        StorageStage {
            reader: Some(settings.reader),
            busy_ns: reading_ns,
            blocked_ns,
            depth: settings.depth,
            in_flight_ns,
            reads: reads.ops,
            bytes: reads.bytes_moved.max(reads.bytes_asked),
            direct_bytes: (reads.bytes_moved.max(reads.bytes_asked) as f64 * reads.direct_share()) as u64,
            device_bytes: self.on.then(cpu::device_bytes).flatten(),
            cached_bytes: self.cached_bytes.get(),
            in_place: self.read_in_place.get(),
            retries: reads.retries + reads.short_reads,
            fallbacks: reads.fallbacks,
            recovered: 0,
            network: None,
            local_cache: None,
            latency: self.read_latency.read(),
        }
    }

    /// Numbers of the decode workers.
    fn decode(&self, settings: &Settings, now: u64) -> DecodeStage {
        let (working_ns, starved_ns, ahead_ns) = self.pool.read(now);
        let (cpu_ns, delay_ns) = self.cpu(Role::Worker).unzip();
        DecodeStage {
            effort: settings.effort,
            workers: settings.workers,
            cores: settings.cores,
            busy_ns: working_ns,
            cpu_ns,
            delay_ns,
            starved_ns,
            ahead_ns,
            queued_ns: self.queued.total_ns(now),
            samples: self.worked.get(),
            latency: self.work_latency.read(),
        }
    }

    /// Takes over the reader's counts. A lock per wake of the I/O thread, contended only by a report.
    pub(crate) fn note_reads(&self, stats: impl FnOnce() -> ReadStats) {
        if !self.on {
            return;
        }
        *self.reads.hold() = stats();
    }

    pub(crate) fn reads(&self) -> ReadStats {
        *self.reads.hold()
    }
}

/// Numbers of a snapshot that are not meters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) reader: ReaderInUse,
    pub(crate) depth: u32,
    pub(crate) effort: Effort,
    pub(crate) workers: u32,
    pub(crate) cores: u32,
    pub(crate) slots: u32,
    /// Batches on a device.
    pub(crate) buffers: Option<u32>,
}
