//! What the stages count: numbers without a judgement, and no lock per sample. Knows stages as labels, and no other
//! module but `error` and `sync`.
//!
//! ```text
//! stages ──► Meters ──┬─► Snapshot   sums until a moment: what `report` judges
//!                     ├─► Timeline   the last batches, each with its times
//!                     └─► Copies, DirectReads, ReadStats
//! ```
//!
//! Two clocks matter to the user: the wait of `next()` for a batch (the device had nothing to do because of the loader),
//! and the time of the user's own code between two calls.

mod clock;
mod counters;
mod cpu;
mod reads;
mod snapshot;
mod timeline;
mod tracks;

pub(crate) use clock::Clock;
pub use counters::Latency;
pub(crate) use counters::{Area, Counter, Flow, Histogram, Lone, Pool, States};
pub(crate) use cpu::{Role, Threads};
pub use reads::{Copies, DirectReads, ReadStats};
pub use snapshot::{Consumer, Copy, Decode, GpuIdle, Handed, Order, ReaderInUse, Slots, Snapshot, Storage, Unmeasured};
pub(crate) use timeline::Recorder;
pub use timeline::{BatchRecord, Gauges, Timeline};
#[cfg(feature = "cuda")]
pub(crate) use tracks::Ring;
pub(crate) use tracks::Rings;
pub use tracks::{Span, Track, Work};

use crate::sync::Hold;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// What the planner's thread does.
pub(crate) mod planner {
    pub(crate) const WAITING: usize = 0;
    pub(crate) const BUSY: usize = 1;
    /// Waiting, with more to plan and no slot for it.
    pub(crate) const NO_SLOT: usize = 2;
}

/// What the consumer does.
pub(crate) mod consuming {
    /// Its own work, or it waits for a first batch.
    pub(crate) const OWN: usize = 0;
    pub(crate) const WAITING: usize = 1;
}

/// What the transfer thread and the copy stream do.
pub(crate) mod copying {
    pub(crate) const STARVED: usize = 0;
    pub(crate) const BUSY: usize = 1;
    /// A full slot waits for device memory, or the oldest copy for the consumer's streams.
    pub(crate) const BLOCKED: usize = 2;
}

/// All that the stages of a loader write.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    pub(crate) clock: Clock,
    /// Whether anything is measured. Off only to show what measuring costs.
    pub(crate) on: bool,
    pub(crate) batches: Counter,
    pub(crate) samples: Counter,
    /// Bytes of the batches' fields.
    pub(crate) bytes: Counter,
    /// Whether the consumer waits in `next()`, not for the first batch of an iterator. This and its counters are written by
    /// whoever has the iterator, of which there is one.
    pub(crate) consumer: States<2>,
    /// Waits for the first batch of each iterator.
    pub(crate) first_wait_ns: Counter,
    /// Between two calls of `next()`: the user's own work.
    pub(crate) user_ns: Counter,
    /// Waits that were not for a first batch.
    pub(crate) waits: Histogram,
    pub(crate) planner: States<3>,
    /// Reads in flight.
    pub(crate) reading: Flow,
    /// When the consumer took a batch last, and the sum of the reads in flight until then.
    moment: [AtomicU64; 2],
    /// Whether rows wait for room for their bytes.
    pub(crate) no_room: States<2>,
    /// Rows that reads finished, without a worker.
    pub(crate) read_in_place: Lone<Counter>,
    pub(crate) read_latency: Histogram,
    /// Bytes that workers copied from the page cache.
    pub(crate) cached_bytes: Lone<Counter>,
    pub(crate) pool: Pool,
    /// Pieces of work that wait for a worker.
    pub(crate) queued: Area,
    pub(crate) work_latency: Histogram,
    /// Rows that workers were given.
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

/// Where slots are.
#[derive(Debug, Default)]
pub(crate) struct SlotMeters {
    /// By [`Stay`]; in the place of those that are free, all that were announced.
    areas: [Area; 4],
}

/// Where a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stay {
    Free = 0,
    Filling = 1,
    Full = 2,
    Held = 3,
}

/// What is noted of one slot: where it is, and when its batch got how far (nanoseconds, 0 for not).
#[derive(Debug, Default)]
pub(crate) struct SlotTimes {
    /// One more than the [`Stay`]; 0 before the slot is announced.
    stay: AtomicU8,
    pub(crate) planned: AtomicU64,
    pub(crate) read: AtomicU64,
    pub(crate) full: AtomicU64,
}

impl SlotMeters {
    /// The slot is there from `now` on. One thread at a time has a slot.
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
        // Those that are nowhere else are free.
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

    /// How far its batch got.
    pub(crate) fn read_all(&self) -> [u64; 3] {
        [&self.planned, &self.read, &self.full].map(|time| time.load(Ordering::Relaxed))
    }
}

/// What the way onto the device counted.
#[derive(Debug, Default)]
pub(crate) struct DeviceMeters {
    pub(crate) states: States<3>,
    /// Time that copies were on the bus, by the device's clock; and how long each was.
    pub(crate) bus_ns: Counter,
    pub(crate) latency: Histogram,
    pub(crate) copies: Counter,
    pub(crate) bytes: Counter,
    pub(crate) pinned_slots: Counter,
    pub(crate) pageable_slots: Counter,
    /// Direct reads, their bytes, and rows that came by the host instead.
    pub(crate) reads: Counter,
    pub(crate) direct_bytes: Counter,
    pub(crate) host_rows: Counter,
    /// Why the first of these did.
    by_host: Mutex<Option<String>>,
    /// Why a slot could not be pinned.
    pageable: Mutex<Option<String>>,
}

impl DeviceMeters {
    fn snapshot(&self, buffers: u32, now: u64) -> Copy {
        let ([starved_ns, _, blocked_ns], busy_ns) = (self.states.read(now), self.bus_ns.get());
        let (batches, bytes, latency) = (self.copies.get(), self.bytes.get(), self.latency.read());
        Copy { busy_ns, starved_ns, blocked_ns, cpu_ns: None, batches, bytes, buffers, latency }
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
            blocked: Duration::from_nanos(self.states.read(now)[2]),
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

    /// A slot is somewhere else. When the first begins to be filled or the last is full, idle workers are so for another
    /// reason.
    pub(crate) fn move_slot(&self, slot: &SlotTimes, stay: Stay, now: u64) {
        self.slots.move_to(slot, stay, now);
        if matches!(stay, Stay::Filling | Stay::Full) {
            self.change_working(0, now);
        }
    }

    /// One worker more works (`by` 1), one fewer (-1), or only what is being filled has changed (0).
    pub(crate) fn change_working(&self, by: i64, now: u64) {
        if now == 0 {
            return;
        }
        let mut filling = self.is_filling();
        if by != 0 || self.pool.filling() != filling {
            self.pool.change(by, filling, now);
        }
        // Another thread may have changed that in between, and have been overtaken here: whoever is last looks again.
        while self.is_filling() != filling {
            filling = !filling;
            self.pool.change(0, filling, now);
        }
    }

    /// Whether some batch is being filled.
    pub(crate) fn is_filling(&self) -> bool {
        self.slots.inside(Stay::Filling) > 0
    }

    /// Reads in flight, on average since this was asked last: by one thread. At the moment itself there are none too often,
    /// for batches are handed out when their last read is done.
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

    /// Waits in `next()` for batches that were not the first of an iterator, the one that is under way among them.
    pub(crate) fn waited_ns(&self, now: u64) -> u64 {
        self.consumer.read(now)[consuming::WAITING]
    }

    /// CPU time and run delay, if anything is measured.
    fn cpu(&self, role: Role) -> Option<(u64, u64)> {
        self.on.then(|| self.threads.times(role)).flatten()
    }

    /// All numbers until now. `settings` are those that meters do not know.
    pub(crate) fn snapshot(&self, settings: &Settings) -> Snapshot {
        let now = self.clock.now();
        let (waited_ns, user_ns) = (self.waited_ns(now), self.user_ns.get());
        let [_, busy_ns, no_slot_ns] = self.planner.read(now);
        let [_, blocked_ns] = self.no_room.read(now);
        let (in_flight_ns, reading_ns) = self.reading.read(now);
        let (working_ns, starved_ns, ahead_ns) = self.pool.read(now);
        let reads = self.reads();
        let slots = |stay| self.slots.total_ns(stay, now);
        let (cpu_ns, delay_ns) = self.cpu(Role::Worker).unzip();
        Snapshot {
            at_ns: now,
            // Differences of snapshots are wanted.
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
                gpu: None,
            },
            order: Order { busy_ns, cpu_ns: self.cpu(Role::Planner).map(|(cpu, _)| cpu), no_slot_ns },
            storage: Storage {
                reader: Some(ReaderInUse { name: settings.reader.to_string(), explicit: settings.explicit }),
                busy_ns: reading_ns,
                blocked_ns,
                depth: settings.depth,
                in_flight_ns,
                reads: reads.ops,
                bytes: reads.bytes_moved.max(reads.bytes_asked),
                direct_bytes: (reads.bytes_moved.max(reads.bytes_asked) as f64 * reads.direct_share()) as u64,
                cached_bytes: self.cached_bytes.get(),
                in_place: self.read_in_place.get(),
                retries: reads.retries + reads.short_reads,
                fallbacks: reads.fallbacks,
                recovered: 0,
                latency: self.read_latency.read(),
            },
            decode: Decode {
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
            },
            copy: settings.buffers.map(|buffers| Copy {
                cpu_ns: self.cpu(Role::Copier).map(|(cpu, _)| cpu),
                ..self.device.snapshot(buffers, now)
            }),
            slots: Slots {
                count: settings.slots,
                free_ns: slots(Stay::Free),
                filling_ns: slots(Stay::Filling),
                full_ns: slots(Stay::Full),
                held_ns: slots(Stay::Held),
            },
        }
    }

    /// Takes over what the reader counted. A lock per wake of the I/O thread, contended only while a report is made.
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

/// What a snapshot says beside the meters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// The reader's name, and whether the caller named it.
    pub(crate) reader: &'static str,
    pub(crate) explicit: bool,
    pub(crate) depth: u32,
    pub(crate) workers: u32,
    pub(crate) cores: u32,
    pub(crate) slots: u32,
    /// Batches on a device.
    pub(crate) buffers: Option<u32>,
}
