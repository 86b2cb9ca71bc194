//! Everything that was measured, as numbers: what the verdict, the what-if model and the exports are made of. Pure data.
//!
//! ```text
//! order ──► storage ──► decode ──► copy ──► consumer
//! planning   reading     busy       busy     user's own work        what keeps a stage from going faster is itself,
//! slots ◄────────────────────────────────────── held                unless it starves (input) or is blocked (room)
//! ```
//!
//! Times are nanoseconds, summed over the threads of a stage where it has several, over the *steady* time: from the first
//! batch of each iterator on. All but the histograms can be subtracted, see [`Snapshot::since`].

use super::counters::Latency;
use serde::{Deserialize, Serialize};

/// What was measured until one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Time since the loader was built.
    pub at_ns: u64,
    /// Of that, iterators were alive and had delivered their first batch: the time that all shares are of.
    pub steady_ns: u64,
    /// Who takes batches.
    pub consumer: Consumer,
    /// Planning: which samples, where they lie.
    pub order: Order,
    /// Reads.
    pub storage: Storage,
    /// Decode workers: decoding, transforms, and copies from memory and the page cache.
    pub decode: Decode,
    /// Copies to a device; `None` on the host.
    pub copy: Option<Copy>,
    /// Batch slots, whose number bounds how far the loader is ahead.
    pub slots: Slots,
}

/// The consumer's side.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Consumer {
    /// Batches handed out.
    pub batches: u64,
    /// Samples handed out, without those that fill up the last batch.
    pub samples: u64,
    /// Bytes of the fields handed out.
    pub bytes: u64,
    /// Samples that others stand in for.
    #[serde(default)]
    pub substituted: u64,
    /// Of these, those of the steady time: all but the first of each iterator. `None` where nobody told them apart.
    pub steady: Option<Handed>,
    /// Waits in `next()` for batches that were not the first of an iterator, whether they came or not, and the one that is
    /// under way: starvation on the host.
    pub waited_ns: u64,
    /// Waits for the first batch of each iterator; not part of the steady time.
    pub first_ns: u64,
    /// Between calls of `next()`: the consumer's own work.
    pub user_ns: u64,
    /// How long each wait in `next()` was.
    pub waits: Latency,
    /// On a GPU, by events on the consumer's stream.
    pub gpu: Option<GpuIdle>,
}

/// What was handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Batches.
    pub batches: u64,
    /// Samples of them.
    pub samples: u64,
}

impl Consumer {
    /// What was handed out in the steady time.
    pub fn handed(&self) -> Handed {
        self.steady.unwrap_or(Handed { batches: self.batches, samples: self.samples })
    }
}

/// Idle time of the consumer's stream. See the definitions in [`crate::profile`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GpuIdle {
    /// Steps that were measured: all but the first of each iterator, once the stream has come to them.
    pub steps: u64,
    /// The stream had nothing to do and waited for a batch: starvation, exact.
    pub starved_ns: u64,
    /// The stream had nothing to do between the drop of a batch and the moment when the next one was asked for, or while one
    /// was there and no stream was bound to it: an upper bound of what the user's own code causes there, for work may have
    /// followed the drop.
    pub host_late_ns: u64,
    /// Steps that were not measured, by reason; the first of each iterator are not among them.
    #[serde(default)]
    pub unmeasured: Unmeasured,
}

/// Steps whose idle time could not be measured on the GPU, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Unmeasured {
    /// The batch was dropped before it was bound to any stream, so the consumer's stream is not known. Name it by
    /// [`LoaderBuilder::stream`](crate::LoaderBuilder::stream) or [`Batch::bind`](crate::Batch::bind).
    pub no_stream: u64,
    /// The driver refused an event of the step, for instance while a graph was captured, or none was free.
    pub no_event: u64,
}

/// The thread that plans.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Order {
    /// It computed: planning batches, submitting reads, taking completions.
    pub busy_ns: u64,
    /// CPU time of the thread.
    pub cpu_ns: Option<u64>,
    /// It had nothing to plan since no slot was free.
    pub no_slot_ns: u64,
}

/// Reads from storage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Storage {
    /// Which reader; `None` where nobody told.
    #[serde(default)]
    pub reader: Option<ReaderInUse>,
    /// At least one read was in flight.
    pub busy_ns: u64,
    /// Rows waited for room for their bytes: the stages behind did not take bytes away fast enough. Reads may have been in
    /// flight meanwhile.
    pub blocked_ns: u64,
    /// Reads in flight at most.
    pub depth: u32,
    /// Sum over time of the reads in flight: divide by the steady time for the mean.
    pub in_flight_ns: u64,
    /// Reads that ended, well or not.
    pub reads: u64,
    /// Bytes that reads brought.
    pub bytes: u64,
    /// Bytes of them that bypassed the page cache, when known.
    pub direct_bytes: u64,
    /// Bytes that workers copied from the page cache instead of reading.
    pub cached_bytes: u64,
    /// Samples that reads brought straight into their rows: no worker touched them.
    pub in_place: u64,
    /// Reads that were repeated or continued.
    pub retries: u64,
    /// Files or reads that `O_DIRECT` was refused for and that went through the page cache instead.
    pub fallbacks: u64,
    /// Reads that failed and worked when they were tried again, since the beginning.
    #[serde(default)]
    pub recovered: u64,
    /// How long each read took, from its submission.
    pub latency: Latency,
}

/// The reader that brings the bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReaderInUse {
    /// `io_uring`, `pread` or `mmap`.
    pub name: String,
    /// Whether the caller named it, instead of leaving the choice to the loader.
    pub explicit: bool,
}

/// The decode workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Decode {
    /// How many there are.
    pub workers: u32,
    /// Cores that the process may use.
    pub cores: u32,
    /// They worked, summed.
    pub busy_ns: u64,
    /// CPU time of their threads, summed.
    pub cpu_ns: Option<u64>,
    /// Time that their threads could have run and had no core, summed: the kernel's run delay. The rest of `busy_ns` they were
    /// blocked by what they did: sleeps, locks, reads, page faults.
    pub delay_ns: Option<u64>,
    /// They had nothing to do while batches were being filled, summed: storage or the order kept them waiting.
    pub starved_ns: u64,
    /// They had nothing to do, and there was no batch to fill: they are ahead.
    pub ahead_ns: u64,
    /// Sum over time of the samples and runs of rows that waited for a worker.
    pub queued_ns: u64,
    /// Samples that they copied or decoded.
    pub samples: u64,
    /// How long each piece of work took.
    pub latency: Latency,
}

/// The transfer thread and the copy stream. What is left of the time belongs to kernels on the copy stream and to handing
/// over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Copy {
    /// Copies were on the bus, by events of the device around each: counted when a copy has ended.
    pub busy_ns: u64,
    /// Nothing was in flight, and no full slot was there.
    pub starved_ns: u64,
    /// The consumer had the device memory: a full slot waited for a batch to be dropped, or the oldest copy in flight for
    /// work that the consumer's streams were given before the drop.
    pub blocked_ns: u64,
    /// CPU time of the transfer thread.
    pub cpu_ns: Option<u64>,
    /// Batches whose copy was given to the device.
    pub batches: u64,
    /// Bytes that crossed the bus.
    pub bytes: u64,
    /// Batches in device memory at most.
    pub buffers: u32,
    /// How long each copy was on the bus, by the same events.
    pub latency: Latency,
}

/// The batch slots.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Slots {
    /// How many there are.
    pub count: u32,
    /// Sums over time of how many were free, being filled, full and waiting, and in the consumer's hands.
    pub free_ns: u64,
    /// Being filled.
    pub filling_ns: u64,
    /// Full, waiting for their turn.
    pub full_ns: u64,
    /// In the consumer's hands.
    pub held_ns: u64,
}

/// All numbers that grow, of two snapshots.
macro_rules! numbers {
    ($do:ident, $later:expr, $before:expr) => {
        $do!(
            $later, $before; at_ns, steady_ns, consumer.batches, consumer.samples, consumer.bytes, consumer.waited_ns,
            consumer.first_ns, consumer.user_ns, order.busy_ns, order.no_slot_ns, storage.busy_ns, storage.blocked_ns,
            storage.in_flight_ns, storage.reads, storage.bytes, storage.direct_bytes, storage.cached_bytes,
            storage.in_place, storage.retries, storage.fallbacks, storage.recovered,
            consumer.substituted, decode.busy_ns, decode.starved_ns, decode.ahead_ns, decode.queued_ns, decode.samples,
            slots.free_ns, slots.filling_ns, slots.full_ns, slots.held_ns
        );
        if let (Some(now), Some(then)) = (&mut $later.decode.cpu_ns, &$before.decode.cpu_ns) {
            $do!(one now, then);
        }
        if let (Some(now), Some(then)) = (&mut $later.decode.delay_ns, &$before.decode.delay_ns) {
            $do!(one now, then);
        }
        if let (Some(now), Some(then)) = (&mut $later.consumer.steady, &$before.consumer.steady) {
            $do!(now, then; batches, samples);
        }
        if let (Some(now), Some(then)) = (&mut $later.order.cpu_ns, &$before.order.cpu_ns) {
            $do!(one now, then);
        }
        if let (Some(gpu), Some(then)) = (&mut $later.consumer.gpu, &$before.consumer.gpu) {
            $do!(gpu, then; steps, starved_ns, host_late_ns, unmeasured.no_stream, unmeasured.no_event);
        }
        if let (Some(copy), Some(then)) = (&mut $later.copy, &$before.copy) {
            $do!(copy, then; busy_ns, starved_ns, blocked_ns, batches, bytes);
            if let (Some(now), Some(then)) = (&mut copy.cpu_ns, &then.cpu_ns) {
                $do!(one now, then);
            }
        }
    };
}

macro_rules! subtract {
    (one $later:expr, $before:expr) => { *$later = $later.saturating_sub(*$before) };
    ($later:expr, $before:expr; $($($part:ident).+),*) => {
        $($later.$($part).+ = $later.$($part).+.saturating_sub($before.$($part).+);)*
    };
}

macro_rules! add {
    (one $later:expr, $before:expr) => { *$later = $later.saturating_add(*$before) };
    ($later:expr, $before:expr; $($($part:ident).+),*) => {
        $($later.$($part).+ = $later.$($part).+.saturating_add($before.$($part).+);)*
    };
}

macro_rules! raise {
    (one $later:expr, $before:expr) => { *$later = (*$later).max(*$before) };
    ($later:expr, $before:expr; $($($part:ident).+),*) => {
        $($later.$($part).+ = $later.$($part).+.max($before.$($part).+);)*
    };
}

impl Snapshot {
    /// Nothing that was said before is taken back: what was measured while it changed can be off by a moment.
    pub(crate) fn raise(&mut self, before: &Self) {
        numbers!(raise, self, before);
    }

    /// What was measured after `before`, an earlier snapshot of the same loader. Histograms, whose quantiles cannot be
    /// subtracted, are those of the whole time.
    pub fn since(&self, before: &Self) -> Self {
        let mut later = self.clone();
        numbers!(subtract, later, before);
        later
    }

    /// Both together, with the histograms of this one.
    pub(crate) fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        numbers!(add, both, other);
        both
    }
}
