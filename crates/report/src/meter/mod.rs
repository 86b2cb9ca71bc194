//! The meters of all stages. They only count and do not interpret, and they take no lock per
//! sample. Stages are only labels here; the module imports only `cgroup`, `error`,
//! `order` and `sync`.
//!
//! ```text
//! stages ──► Meters ──┬─► Snapshot   sums until a moment, for the verdict of `report`
//!                     └─► Timeline   the last batches, each with its times
//! ```
//!
//! Two times matter to the user: the wait of `next()` for a batch (the device idles because of the
//! loader), and the time of the user's own code between two calls.

mod cpu;
pub mod nvtx;
mod reads;
mod snapshot;
mod stages;
mod timeline;
mod tracks;

pub use cpu::{Threads, device_bytes};
use feedline_base::meter::Clock;
use feedline_base::meter::counters::{Area, Pool, States};
pub use reads::{CacheReads, DirectReads, ReadStats};
pub use snapshot::{
    Chunks, Consumer, CopyStage, Cpu, DecodeStage, Effort, EpochCounts, GpuIdle, Handed, Lookups,
    OrderStage, ReaderInUse, ReaderKind, Slots, Snapshot, SourceCount, StorageStage, Unmeasured,
};
pub use stages::{Consuming, Copying, PipelineStage, Planning};
pub(crate) use timeline::Recorder;
pub use timeline::{BatchRecord, Gauges, Timeline};
pub(crate) use tracks::Rings;
pub use tracks::{Ring, Span, Track, Work};

use feedline_base::sync::Hold;
use feedline_core::memory::SlotTimes;
use stages::{ConsumerMeters, CopyMeters, CpuTimes, DecodeMeters, StorageMeters};

/// All meters of a loader.
#[derive(Debug, Default)]
pub struct Meters {
    pub clock: Clock,
    /// Whether anything is measured. Off only in benchmarks of the meters' own cost.
    pub on: bool,
    pub consumer: ConsumerMeters,
    pub planner: States<Planning, 3>,
    pub storage: StorageMeters,
    pub decode: DecodeMeters,
    pub copy: CopyMeters,
    pub slots: SlotMeters,
    pub threads: Threads,
    pub recorder: Recorder,
    pub rings: Rings,
}

/// The number of slots in each state, over time.
#[derive(Debug, Default)]
pub struct SlotMeters {
    /// Indexed by [`Stay`]; the entry `Free` counts all announced slots.
    areas: [Area; 4],
}

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    Free = 0,
    Filling = 1,
    Full = 2,
    Held = 3,
}

impl SlotMeters {
    /// Moves the slot to `stay` at time `now`. A slot belongs to one thread at a time.
    pub fn move_to(&self, slot: &SlotTimes, stay: Stay, now: u64) {
        if now == 0 {
            return;
        }
        match slot.enter(stay as u8).map(usize::from) {
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

    fn read(&self, now: u64) -> Slots {
        let [free_ns, filling_ns, full_ns, held_ns] =
            [Stay::Free, Stay::Filling, Stay::Full, Stay::Held]
                .map(|stay| self.of(stay, |area| area.total_ns(now)));
        Slots {
            count: 0,
            free_ns,
            filling_ns,
            full_ns,
            held_ns,
        }
    }

    fn of(&self, stay: Stay, read: impl Fn(&Area) -> u64) -> u64 {
        let number = read(&self.areas[stay as usize]);
        let elsewhere = &self.areas[1..];
        // Slots in no other state are free.
        if stay == Stay::Free {
            number.saturating_sub(elsewhere.iter().map(read).sum())
        } else {
            number
        }
    }
}

impl Meters {
    pub fn new(clock: Clock, workers: usize, on_device: bool) -> Self {
        let decode = DecodeMeters {
            pool: Pool::new(workers),
            ..DecodeMeters::default()
        };
        Self {
            on: clock.goes(),
            clock,
            decode,
            rings: Rings::new(workers, on_device),
            ..Self::default()
        }
    }

    /// Moves a slot to another state. Idle workers change from ahead to starved when the first slot
    /// begins to be filled, and back when the last is full.
    pub fn move_slot(&self, slot: &SlotTimes, stay: Stay, now: u64) {
        self.slots.move_to(slot, stay, now);
        if matches!(stay, Stay::Filling | Stay::Full) {
            self.change_working(0, now);
        }
    }

    /// Notes that one more worker is busy (`by` is 1), one fewer (-1), or that only the number of
    /// slots being filled has changed (0).
    pub fn change_working(&self, by: i64, now: u64) {
        if now == 0 {
            return;
        }
        let mut filling = self.is_filling();
        if by != 0 || self.decode.pool.filling() != filling {
            self.decode.pool.change(by, filling, now);
        }
        // Another thread may have changed the filling of slots meanwhile, and updated the pool
        // before this thread did. So the last thread checks again.
        while self.is_filling() != filling {
            filling = !filling;
            self.decode.pool.change(0, filling, now);
        }
    }

    /// Whether a batch is being filled.
    pub(crate) fn is_filling(&self) -> bool {
        self.slots.inside(Stay::Filling) > 0
    }

    /// The current lengths of all queues, and the number of busy workers.
    pub fn gauges(&self, now: u64) -> Gauges {
        let slots = |stay| self.slots.inside(stay) as u32;
        Gauges {
            at_ns: now,
            in_flight: self.storage.mean_in_flight(now),
            queued: self.decode.queued.inside() as u32,
            working: self.decode.pool.working() as u32,
            free_slots: slots(Stay::Free),
            filling_slots: slots(Stay::Filling),
            full_slots: slots(Stay::Full),
            held: slots(Stay::Held),
        }
    }

    /// CPU time and run delay of a stage's threads, if anything is measured.
    fn cpu(&self, stage: PipelineStage) -> CpuTimes {
        self.on.then(|| self.threads.times(stage)).flatten().unzip()
    }

    /// The few numbers for a training log. Makes no system call.
    pub fn totals(&self) -> Totals {
        let now = self.clock.now();
        let consumer = &self.consumer;
        let [waited_ns] = consumer.states.read([Consuming::Waiting], now);
        Totals {
            at_ns: now,
            waited_ns,
            first_ns: consumer.first_ns.get(),
            samples: consumer.samples.get(),
            // Bytes that cuFile reads into device memory do not pass through a reader.
            read_bytes: self
                .storage
                .stats
                .hold()
                .bytes_asked
                .saturating_add(self.copy.direct.bytes.get()),
            cached_bytes: self.storage.cached_bytes.get(),
            decode_ns: self.decode.pool.read(now).0,
            map_batch_ns: self.decode.map_batch_ns.get(),
        }
    }

    /// All measurements since the loader was built. `settings` adds the numbers that the meters do
    /// not have.
    pub fn snapshot(&self, settings: &Settings) -> Snapshot {
        let now = self.clock.now();
        let [busy_ns, no_slot_ns] = self.planner.read([Planning::Busy, Planning::NoSlot], now);
        let (cpu_ns, delay_ns) = self.cpu(PipelineStage::Order);
        let &Settings {
            reader,
            depth,
            effort,
            map_batch_in_turn,
            workers,
            cores,
            slots,
            buffers,
            chunks,
        } = settings;
        Snapshot {
            epoch: EpochCounts::default(),
            at_ns: now,
            // The caller subtracts snapshots.
            steady_ns: now,
            consumer: self.consumer.read(now, self.cpu(PipelineStage::Consumer)),
            order: OrderStage {
                busy_ns,
                cpu_ns,
                delay_ns,
                no_slot_ns,
            },
            storage: StorageStage {
                reader: Some(reader),
                depth,
                device_bytes: self.on.then(device_bytes).flatten(),
                ..self.storage.read(now)
            },
            decode: DecodeStage {
                effort,
                map_batch_in_turn,
                workers,
                cores,
                ..self
                    .decode
                    .read(now, self.cpu(PipelineStage::Decode), chunks)
            },
            copy: buffers.map(|buffers| CopyStage {
                buffers,
                ..self.copy.read(now, self.cpu(PipelineStage::Copy))
            }),
            slots: Slots {
                count: slots,
                ..self.slots.read(now)
            },
            cpu: self.on.then(Cpu::now),
        }
    }

    /// Stores the reader's counts. Takes a lock per wake of the I/O thread; only a report contends
    /// for it.
    pub fn note_reads(&self, stats: impl FnOnce() -> ReadStats) {
        if self.on {
            *self.storage.stats.hold() = stats();
        }
    }
}

/// Sums of the consumer, of storage and of the workers, as in a [`Snapshot`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub at_ns: u64,
    pub waited_ns: u64,
    pub first_ns: u64,
    pub samples: u64,
    pub read_bytes: u64,
    pub cached_bytes: u64,
    pub decode_ns: u64,
    pub map_batch_ns: u64,
}

/// Numbers that a snapshot needs and that the meters do not have.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub reader: ReaderInUse,
    pub depth: u32,
    pub effort: Effort,
    pub map_batch_in_turn: bool,
    pub workers: u32,
    pub cores: u32,
    pub slots: u32,
    /// Number of batches on a device.
    pub buffers: Option<u32>,
    /// Number of chunks, for datasets in chunks.
    pub chunks: Option<u64>,
}
