//! All measurements as numbers: the input of the verdict, the what-if model and the exports. Pure
//! data.
//!
//! ```text
//! order ──► storage ──► decode ──► copy ──► consumer
//! planning   reading     busy       busy     user's own work        a stage is limited by itself, unless it
//! slots ◄────────────────────────────────────── held                starves (no input) or is blocked (no room)
//! ```
//!
//! Times are in nanoseconds, summed over the threads of a stage if it has several. They cover the
//! *steady* time: from the first batch of each iterator on. All numbers except the histograms can
//! be subtracted, see [`Snapshot::since`].

use crate::meter::{CacheReads, DirectReads, ReadStats};
use feedline_base::meter::{Latency, Network};
use serde::{Deserialize, Serialize};
use std::fmt;

/// All measurements until one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Time since the loader was built.
    pub at_ns: u64,
    /// The part of `at_ns` in which an iterator was alive and had delivered its first batch. All
    /// shares are relative to this time.
    pub steady_ns: u64,
    /// The totals of an epoch over all ranks, known before its first batch.
    #[serde(default)]
    pub epoch: EpochCounts,
    /// The consumer of the batches.
    pub consumer: Consumer,
    /// Planning: the choice of samples, and their locations.
    pub order: OrderStage,
    /// Reads.
    pub storage: StorageStage,
    /// Decode workers: decoding, transforms, and copies from memory and the page cache.
    pub decode: DecodeStage,
    /// Copies to a device; `None` on the host.
    pub copy: Option<CopyStage>,
    /// Batch slots, whose number bounds how far the loader is ahead.
    pub slots: Slots,
    /// CPU time of the whole process; `None` where the kernel does not count it.
    #[serde(default)]
    pub cpu: Option<Cpu>,
}

/// The totals of a whole epoch over all ranks, calculated in advance. [`Snapshot::since`] leaves
/// this unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EpochCounts {
    /// Samples of the order.
    pub samples: u64,
    /// Batches, on every rank.
    pub batches: u64,
    /// Rows that pad batches with samples that the epoch already contains.
    pub repeated: u64,
    /// Samples that fill no batch and are dropped.
    pub left_out: u64,
}

impl EpochCounts {
    #[doc(hidden)]
    pub fn new(samples: u64, batches: u64, repeated: u64, left_out: u64) -> Self {
        Self {
            samples,
            batches,
            repeated,
            left_out,
        }
    }
}

/// CPU time of the process, and the quota of its control groups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Cpu {
    /// CPU time of all threads.
    pub process_ns: u64,
    /// CPU time of the threads of all loaders in the process, including the threads of readers and
    /// stores.
    pub loaders_ns: u64,
    /// CPU time of others on the cores that the process may use: other programs, the kernel, guests
    /// of the same host. `None` where the kernel does not report it.
    #[serde(default)]
    pub others_ns: Option<u64>,
    /// Ranks of the job on this machine, by the launcher's variables; 1 where they do not tell.
    #[serde(default)]
    pub local_ranks: u32,
    /// The ranks that share the cores of this process: 1 where the launcher gave each its own; 0 in
    /// snapshots of earlier versions.
    #[serde(default)]
    pub sharing_ranks: u32,
    /// The tightest quota, in cores.
    pub quota: Option<f64>,
    /// Periods of the quota.
    pub periods: u64,
    /// Periods in which the quota was used up, so that threads waited.
    pub throttled: u64,
    /// Time for which the quota withheld a core from ready threads: the mean over the cores that
    /// the process may use.
    #[serde(default)]
    pub throttled_ns: u64,
}

/// The consumer's side.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Consumer {
    /// Batches handed out.
    pub batches: u64,
    /// Samples handed out, without those that pad the last batch.
    pub samples: u64,
    /// Bytes of the fields in delivered batches.
    pub bytes: u64,
    /// Rows filled by substitutes for bad samples.
    #[serde(default)]
    pub substituted: u64,
    /// Batches of the order that were left out, see `Loader::skip`.
    #[serde(default)]
    pub skipped_batches: u64,
    /// For a mixture: what each source has delivered up to the run's current position.
    /// [`Snapshot::since`] leaves this unchanged.
    #[serde(default)]
    pub sources: Vec<SourceCount>,
    /// Batches and samples of the steady time: all but the first batch of each iterator. `None` if
    /// they were not counted separately.
    pub steady: Option<Handed>,
    /// Waits in `next()` for batches other than the first of an iterator, including the current
    /// wait and waits that ended without a batch. On the host, this is starvation.
    pub waited_ns: u64,
    /// Waits for the first batch of each iterator; not part of the steady time.
    pub first_ns: u64,
    /// Time between calls of `next()`: the consumer's own work.
    pub user_ns: u64,
    /// Durations of the waits in `next()`.
    pub waits: Latency,
    /// CPU time of the threads that call `next()`.
    #[serde(default)]
    pub cpu_ns: Option<u64>,
    /// Time for which these threads were runnable without a core.
    #[serde(default)]
    pub delay_ns: Option<u64>,
    /// Idle time on a GPU, from events on the consumer's stream.
    pub gpu: Option<GpuIdle>,
}

/// What a source of a mixture has delivered to all ranks together since epoch 0, resumes included.
/// Samples of skipped batches count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SourceCount {
    /// Samples drawn from this source.
    pub delivered: u64,
    /// Samples that the mixture's weights ask of this source, up to the run's current position.
    #[serde(default)]
    pub asked: f64,
    /// Samples in one pass over this source.
    pub samples: u64,
    /// Passes so far: 1.25 is one and a quarter.
    pub passes: f64,
}

impl SourceCount {
    #[doc(hidden)]
    pub fn new(delivered: u64, asked: f64, samples: u64) -> Self {
        Self {
            delivered,
            asked,
            samples,
            passes: delivered as f64 / samples.max(1) as f64,
        }
    }
}

/// Batches and samples handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Batches.
    pub batches: u64,
    /// Samples in these batches.
    pub samples: u64,
}

impl Consumer {
    /// Batches and samples handed out in the steady time.
    pub fn handed(&self) -> Handed {
        self.steady.unwrap_or(Handed {
            batches: self.batches,
            samples: self.samples,
        })
    }
}

/// Idle time of the consumer's stream. The guide `profiling` has the definitions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GpuIdle {
    /// Measured steps: all but the first of each iterator, as far as the stream has progressed.
    pub steps: u64,
    /// Time from the first to the last of these steps, by the device's clock. The shares are
    /// relative to it.
    #[serde(default)]
    pub span_ns: u64,
    /// Time for which the stream was idle and waited for a batch: starvation, exact.
    pub starved_ns: u64,
    /// Idle time caused by the program's own code, in the steps for which it is known: the stream
    /// had run dry when the host asked for the next batch, or a batch had arrived and no stream
    /// took it. See [`host_late_ns`](Self::host_late_ns) for the time of all steps.
    pub late_ns: u64,
    /// Steps that asked for a batch when the stream had no work left.
    #[serde(default)]
    pub dry_steps: u64,
    /// Dry steps without `Loader::mark` after their work, so it is not known how long the host was
    /// late.
    #[serde(default)]
    pub unmarked_steps: u64,
    /// Steps that were not measured, by reason, without the first of each iterator.
    #[serde(default)]
    pub unmeasured: Unmeasured,
}

impl GpuIdle {
    /// Idle time caused by the program's own code; `None` if it is not known for more than 1 % of
    /// the steps.
    ///
    /// It is known where the stream was still busy at the request, and where
    /// `Loader::mark` says that a step's work was enqueued.
    pub fn host_late_ns(&self) -> Option<u64> {
        (self.unmarked_steps.saturating_mul(100) <= self.steps).then_some(self.late_ns)
    }
}

/// Steps whose idle time could not be measured on the GPU, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Unmeasured {
    /// The batch was dropped before it was bound to any stream, so the consumer's stream is not
    /// known. Name it with `LoaderBuilder::stream` or
    /// `Batch::bind`.
    pub no_stream: u64,
    /// The driver refused an event of the step, for instance while a graph was captured, or none
    /// was free.
    pub no_event: u64,
    /// Pauses between two steps: at least 20 times the usual step and at least one second, for
    /// instance an evaluation within an epoch.
    #[serde(default)]
    pub pauses: u64,
}

/// The planner's thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OrderStage {
    /// Time in which the planner planned batches, submitted reads and took completions.
    pub busy_ns: u64,
    /// CPU time of the thread.
    pub cpu_ns: Option<u64>,
    /// Time for which this thread was runnable without a core.
    #[serde(default)]
    pub delay_ns: Option<u64>,
    /// Time in which the planner could plan nothing because no slot was free.
    pub no_slot_ns: u64,
}

/// Reads from storage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StorageStage {
    /// The reader, if it is known.
    #[serde(default)]
    pub reader: Option<ReaderInUse>,
    /// Time with at least one read in flight.
    pub busy_ns: u64,
    /// Time for which rows waited for room for their bytes, because the later stages did not
    /// consume bytes fast enough. Reads may have been in flight meanwhile.
    pub blocked_ns: u64,
    /// Maximum number of reads in flight.
    pub depth: u32,
    /// Integral over time of the number of reads in flight. Divide by the steady time for the mean.
    pub in_flight_ns: u64,
    /// The reader's counts. Serialised as fields of this stage, not as a group.
    #[serde(flatten)]
    pub counts: ReadStats,
    /// Bytes that bypassed the page cache, when known.
    pub direct_bytes: u64,
    /// Bytes that devices read for the process, including bytes of other files; `None` where the
    /// kernel does not count them.
    #[serde(default)]
    pub device_bytes: Option<u64>,
    /// Bytes that workers copied from the page cache instead of reading.
    pub cached_bytes: u64,
    /// Samples that went from their reads into their rows without a worker.
    pub in_place: u64,
    /// Reads that failed at first and succeeded when repeated, since the loader was built.
    #[serde(default)]
    pub recovered: u64,
    /// Lookups of extents in the page cache before they are read; `None` where the reader does no
    /// lookups.
    #[serde(default)]
    pub page_cache: Option<Lookups>,
    /// Durations of the reads, from their submission.
    pub latency: Latency,
    /// Requests to object stores, where there are any.
    #[serde(default)]
    pub network: Option<Network>,
    /// The local cache of objects, if there is one.
    #[serde(default)]
    pub local_cache: Option<CacheReads>,
}

/// Lookups in the page cache, in extents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Lookups {
    /// Lookups that found all bytes.
    pub hits: u64,
    /// Lookups that did not find all bytes.
    pub misses: u64,
}

impl fmt::Display for Lookups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.hits + self.misses;
        write!(
            f,
            "{} of {all} lookups before a read found its bytes in the page cache",
            self.hits
        )
    }
}

/// The reader in use. `Display` gives a readable name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReaderInUse {
    /// How the reader reads files.
    pub kind: ReaderKind,
    /// Whether the caller chose the reader, instead of leaving the choice to the loader.
    pub explicit: bool,
    /// Whether the reader reads files on a network mount without a local cache.
    pub mount: bool,
    /// Whether the reader reads objects in stores.
    pub objects: bool,
    /// Whether a local cache keeps objects and files on network mounts.
    pub cached: bool,
}

/// How a reader reads files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReaderKind {
    /// io_uring.
    Uring,
    /// Threads that call `pread`.
    Pread,
    /// Threads that copy from mapped files.
    Mmap,
    /// There are no files: all data are objects.
    Network,
}

impl ReaderInUse {
    #[doc(hidden)]
    pub fn of(kind: ReaderKind, explicit: bool) -> Self {
        Self {
            kind,
            explicit,
            mount: false,
            objects: false,
            cached: false,
        }
    }
}

impl fmt::Display for ReaderInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ReaderKind::Uring => "io_uring",
            ReaderKind::Pread => "pread",
            ReaderKind::Mmap => "mmap",
            ReaderKind::Network => return f.write_str("network"),
        };
        if self.cached {
            return write!(f, "local cache by {kind}, and network");
        }
        let mount = if self.mount {
            " on a network mount"
        } else {
            ""
        };
        write!(
            f,
            "{kind}{mount}{}",
            if self.objects { " and network" } else { "" }
        )
    }
}

/// The work of decode workers for each row, besides fetching its bytes. Each level includes the
/// lower ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Effort {
    /// None: rows are copied unchanged, many at a time.
    Copy,
    /// Little: bytes are unpacked, checked, copied, finished.
    Light,
    /// The user's decoders or transforms run.
    #[default]
    Own,
    /// Pictures are decoded.
    Pictures,
}

/// The decode workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DecodeStage {
    /// The work for each row.
    #[serde(default)]
    pub effort: Effort,
    /// Number of workers.
    pub workers: u32,
    /// Cores that the process may use.
    pub cores: u32,
    /// Busy time, summed over the workers.
    pub busy_ns: u64,
    /// The part of the busy time in `map_batch`.
    #[serde(default)]
    pub map_batch_ns: u64,
    /// Whether `map_batch` holds a lock (the Python interpreter's), so that only one thread at a
    /// time runs it.
    #[serde(default)]
    pub map_batch_in_turn: bool,
    /// CPU time of their threads, summed.
    pub cpu_ns: Option<u64>,
    /// Time for which their threads were runnable without a core, summed: the kernel's run delay.
    /// In the rest of `busy_ns` their own work blocked them: sleeps, locks, reads, page faults.
    pub delay_ns: Option<u64>,
    /// Idle time while batches were being filled, summed: they waited for storage or the order.
    pub starved_ns: u64,
    /// Idle time without a batch to fill, summed over the workers: they are ahead of the consumer.
    pub ahead_ns: u64,
    /// Integral over time of the number of work items (samples or runs of rows) in the workers'
    /// queues.
    pub queued_ns: u64,
    /// Samples copied or decoded.
    pub samples: u64,
    /// Counts of chunks, for datasets in chunks.
    #[serde(default)]
    pub chunks: Option<Chunks>,
    /// Durations of the work items (samples or runs of rows).
    pub latency: Latency,
}

/// Chunks of a dataset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Chunks {
    /// Chunks opened since the loader was built.
    pub opened: u64,
    /// Samples in the opened chunks; those of a chunk opened twice count twice.
    pub samples: u64,
    /// Number of chunks in the dataset.
    pub count: u64,
}

/// The transfer thread and the copy stream. The rest of the time is spent on handing over batches.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CopyStage {
    /// Time with copies on the bus, by the device's events around each copy. A copy is counted when
    /// it has ended.
    pub busy_ns: u64,
    /// Time of the operations on batches (`finish`, moving rows to their places), by such events.
    /// They run concurrently with the copies of later batches.
    #[serde(default)]
    pub ops_ns: u64,
    /// Time with no copy in flight and no full slot.
    pub starved_ns: u64,
    /// Time for which the consumer held the device memory: a full slot waited for the drop of a
    /// batch, or the oldest copy in flight waited for the consumer's work before that drop.
    pub blocked_ns: u64,
    /// CPU time of the transfer thread.
    pub cpu_ns: Option<u64>,
    /// Time for which this thread was runnable without a core.
    #[serde(default)]
    pub delay_ns: Option<u64>,
    /// Batches whose copy was given to the device.
    pub batches: u64,
    /// Bytes that crossed the bus.
    pub bytes: u64,
    /// Batch buffers in device memory.
    pub buffers: u32,
    /// Pinned slots so far: the device copies from them without the CPU.
    #[serde(default)]
    pub pinned_slots: u64,
    /// Slots that could not be pinned; the driver copies from them through its own buffer, which is
    /// slower.
    #[serde(default)]
    pub pageable_slots: u64,
    /// The reason why a slot could not be pinned.
    #[serde(default)]
    pub why_pageable: Option<String>,
    /// Direct reads into device memory so far; `None` if no field takes that route.
    #[serde(default)]
    pub direct: Option<DirectReads>,
    /// Durations of the copies on the bus, by the same events.
    pub latency: Latency,
}

impl fmt::Display for CopyStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = self.bytes as f64 / 1e9;
        write!(f, "{} batches, {gb:.3} GB; ", self.batches)?;
        if self.blocked_ns > 0 {
            write!(
                f,
                "blocked {:.2} s by the consumer's use of the memory; ",
                self.blocked_ns as f64 / 1e9
            )?;
        }
        write!(f, "{} slots pinned", self.pinned_slots)?;
        match &self.why_pageable {
            Some(why) => write!(f, ", {} not ({why}): slower", self.pageable_slots),
            None => Ok(()),
        }
    }
}

/// The batch slots.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Slots {
    /// Number of slots.
    pub count: u32,
    /// Integral over time of the number of free slots.
    pub free_ns: u64,
    /// Integral over time of the number of slots being filled.
    pub filling_ns: u64,
    /// Integral over time of the number of full slots that wait for earlier batches.
    pub full_ns: u64,
    /// Integral over time of the number of slots held by the consumer.
    pub held_ns: u64,
}

impl Snapshot {
    /// Share of the steady time that the consumer's thread waited in `next()`: 0 … 1. On the host
    /// that is starvation; on a GPU the stream may have work meanwhile, see
    /// `Verdict::starved_share`.
    pub fn waited_share(&self) -> f64 {
        let waited = self.consumer.waited_ns;
        let steady = waited.saturating_add(self.consumer.user_ns);
        if steady > 0 {
            waited as f64 / steady as f64
        } else {
            0.0
        }
    }

    /// For datasets in chunks: samples of opened chunks per sample delivered.
    ///
    /// Above 1, chunks were opened for only some of their samples: by several ranks, or again in
    /// another lane. Chunks open ahead of the consumer count too, so the value is meaningful after
    /// about one epoch. Summed over ranks it applies to the whole run.
    pub fn read_amplification(&self) -> Option<f64> {
        let chunks = self.decode.chunks?;
        let delivered = self.consumer.samples;
        (delivered > 0).then(|| chunks.samples as f64 / delivered as f64)
    }

    /// Keeps every number from falling below an earlier snapshot, because a number that is read
    /// while it changes can be slightly off.
    #[doc(hidden)]
    pub fn raise(&mut self, before: &Self) {
        self.combine(before, u64::max);
    }

    /// The measurements after `before`, an earlier snapshot of the same loader. Histograms still
    /// cover the whole time, because their quantiles cannot be subtracted.
    pub fn since(&self, before: &Self) -> Self {
        let mut later = self.clone();
        later.combine(before, u64::saturating_sub);
        later
    }

    /// The sums of both snapshots, with the histograms of this one.
    #[doc(hidden)]
    pub fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        both.combine(other, u64::saturating_add);
        both
    }

    /// Replaces every growing number with `of` of the numbers of both snapshots.
    #[rustfmt::skip]
    fn combine(&mut self, other: &Self, of: fn(u64, u64) -> u64) {
        macro_rules! all {
            ($to:expr, $from:expr; $($($part:ident).+),*) => {
                $($to.$($part).+ = of($to.$($part).+, $from.$($part).+);)*
            };
        }
        macro_rules! maybe {
            ($to:expr, $from:expr; $($($part:ident).+),*) => {
                $(if let (Some(to), Some(from)) = (&mut $to.$($part).+, $from.$($part).+) { *to = of(*to, from) })*
            };
        }
        macro_rules! group {
            ($($group:ident).+; $($($part:ident).+),*) => {
                if let (Some(to), Some(from)) = (&mut self.$($group).+, &other.$($group).+) {
                    all!(to, from; $($($part).+),*);
                }
            };
        }
        all!(
            self, other; at_ns, steady_ns, consumer.batches, consumer.samples, consumer.bytes, consumer.substituted,
            consumer.skipped_batches,
            consumer.waited_ns, consumer.first_ns, consumer.user_ns, order.busy_ns, order.no_slot_ns, storage.busy_ns,
            storage.blocked_ns, storage.in_flight_ns, storage.direct_bytes, storage.cached_bytes, storage.in_place,
            storage.recovered, decode.busy_ns, decode.map_batch_ns, decode.starved_ns, decode.ahead_ns, decode.queued_ns, decode.samples,
            slots.free_ns, slots.filling_ns, slots.full_ns, slots.held_ns
        );
        all!(
            self.storage.counts, other.storage.counts; ops, failed, bytes_asked, bytes_moved, short_reads, retries,
            direct_reads, buffered_reads, fallbacks, opens, enters
        );
        maybe!(
            self, other; decode.cpu_ns, decode.delay_ns, order.cpu_ns, order.delay_ns, consumer.cpu_ns,
            consumer.delay_ns, storage.device_bytes
        );
        group!(consumer.steady; batches, samples);
        group!(
            consumer.gpu; steps, span_ns, starved_ns, late_ns, dry_steps, unmarked_steps, unmeasured.no_stream,
            unmeasured.no_event, unmeasured.pauses
        );
        group!(storage.network; requests, bytes, in_flight_ns, waiting_ns, retries, throttled, unversioned);
        group!(storage.local_cache; hits, misses, blocks, bytes, not_kept, removed);
        group!(storage.page_cache; hits, misses);
        group!(decode.chunks; opened, samples);
        group!(cpu; process_ns, loaders_ns, periods, throttled, throttled_ns);
        if let (Some(to), Some(from)) = (&mut self.cpu, &other.cpu) {
            maybe!(to, from; others_ns);
        }
        group!(copy; busy_ns, ops_ns, starved_ns, blocked_ns, batches, bytes);
        if let (Some(to), Some(from)) = (&mut self.copy, &other.copy) {
            maybe!(to, from; cpu_ns, delay_ns);
        }
    }
}
