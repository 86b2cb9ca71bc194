//! The report: a snapshot of the counters, with their interpretation. Pure.

use super::origin::Origin;
use crate::ledger::Ledger;
use crate::memory::MemoryPlan;
use crate::meter::{CacheReads, Copies, DirectReads, Network, ReadStats};
use crate::pipeline::FieldRoute;
use crate::report::{Cause, Verdict};
use crate::storage::Choice;
use std::fmt;
use std::time::Duration;

/// Report on a run so far. All times are wall-clock; `Display` gives the readable text.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Description of the dataset.
    pub dataset: String,
    /// Description of the device.
    pub device: String,
    /// NUMA node of threads and memory, or the reason for none; `None` if placement is off. See [`Numa`](crate::Numa).
    pub numa: Option<String>,
    /// Rank and world size; `None` for a single rank.
    pub rank: Option<String>,
    /// Batches delivered.
    pub batches: u64,
    /// Samples delivered, without padding rows.
    pub samples: u64,
    /// Bytes of the delivered fields.
    pub bytes: u64,
    /// Wait in `next()` for batches, except the first of each iterator: starvation on the host.
    ///
    /// A GPU may have work meanwhile: [`verdict`](Self::verdict) gives the wait of its stream.
    pub starved: Duration,
    /// Wait in `next()` for the first batch of each iterator.
    pub first_batches: Duration,
    /// Time between calls of `next()`: the user's own work.
    pub user: Duration,
    /// Busy time of decode workers, summed over workers.
    pub decode_busy: Duration,
    /// Number of decode workers.
    pub workers: usize,
    /// The chosen reader, and the reason.
    pub choice: Choice,
    /// Reads of the reader.
    pub reads: ReadStats,
    /// Page cache lookups before reads, in extents: hits and misses.
    pub cache: Option<(u64, u64)>,
    /// Requests to object stores.
    pub network: Option<Network>,
    /// The local cache of objects and files on network mounts; see [`storage::Cache`](crate::storage).
    pub local_cache: Option<CacheReads>,
    /// For datasets in chunks: number of chunk opens, and number of chunks.
    pub chunks: Option<(u64, u64)>,
    /// Samples of opened chunks; a chunk opened twice counts twice.
    pub chunk_samples: u64,
    /// For datasets in chunks: the planned [read amplification](Self::read_amplification) of a whole epoch over all
    /// ranks.
    pub planned_amplification: Option<f64>,
    /// Copies to the device; `None` on the host.
    pub copies: Option<Copies>,
    /// Route of each field of the dataset, with the reason; empty on the host.
    pub routes: Vec<FieldRoute>,
    /// Direct reads into device memory; `None` if no field takes that route.
    pub direct: Option<DirectReads>,
    /// Origin of the bytes: storage or memory.
    pub origin: Origin,
    /// The bottleneck, and what to change.
    pub verdict: Verdict,
    /// The memory plan.
    pub plan: MemoryPlan,
    /// Failed reads that succeeded on a retry.
    pub recovered: u64,
    /// Failed samples, and the number of substituted rows.
    pub bad: Ledger,
    /// Objects left behind in this process because the kernel or a device may still use them.
    pub leaked: u64,
}

impl Report {
    /// Time of the iterators after their first batches.
    pub fn steady(&self) -> Duration {
        self.starved + self.user
    }

    /// Share of the steady time that `next()` waited: 0 … 1.
    pub fn starved_share(&self) -> f64 {
        share(self.starved, self.steady())
    }

    /// Share of the workers' time that they were busy: 0 … 1.
    pub fn busy_share(&self) -> f64 {
        share(self.decode_busy, (self.steady() + self.first_batches) * self.workers.max(1) as u32).min(1.0)
    }

    /// For datasets in chunks: samples of opened chunks per sample delivered.
    ///
    /// Above 1, chunks were opened for only some of their samples: by several ranks, or again in another lane. Chunks
    /// open ahead of the consumer count too, so the value is meaningful after about one epoch. Summed over ranks it
    /// applies to the whole run.
    pub fn read_amplification(&self) -> Option<f64> {
        (self.chunks.is_some() && self.samples > 0).then(|| self.chunk_samples as f64 / self.samples as f64)
    }
}

impl Report {
    /// For datasets in chunks, how many were opened.
    fn chunks_opened(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((opened, all)) = self.chunks else { return Ok(()) };
        let amplified = self.read_amplification();
        let amplified = amplified.map_or(String::new(), |times| format!(", with {times:.2} × the samples delivered"));
        write!(f, "chunks    {opened} opened{amplified}; the dataset has {all}")?;
        match self.planned_amplification.filter(|_| self.rank.is_some()) {
            Some(planned) => writeln!(f, "; planned over all ranks {planned:.2} ×"),
            None => writeln!(f),
        }
    }

    /// Wait of the consumer: of its thread, or on a GPU of its stream, because the thread may run ahead.
    fn waits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waited, steady) = (self.starved.as_secs_f64(), self.steady().as_secs_f64());
        match (&self.copies, self.verdict.cause) {
            (None, _) => {
                let percent = 100.0 * self.starved_share();
                write!(f, "waits     starved {percent:.1} % ({waited:.2} s of {steady:.2} s)")?
            }
            (Some(_), Cause::Unknown) => {
                write!(f, "waits     GPU starved: not known; consumer {waited:.2} s of {steady:.2} s")?
            }
            (Some(_), _) => {
                let percent = 100.0 * self.verdict.starved_share;
                write!(f, "waits     GPU starved {percent:.1} %; consumer {waited:.2} s of {steady:.2} s")?
            }
        }
        let (first, own) = (self.first_batches.as_secs_f64(), self.user.as_secs_f64());
        writeln!(f, "; first batches {first:.3} s; own work {own:.2} s")
    }
}

/// The nonzero counters.
fn reads_in_words(reads: &ReadStats) -> String {
    if reads.ops == 0 {
        return "no reads".into();
    }
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let mut words = vec![format!("{} reads, {:.3} GB", reads.ops, gb(reads.bytes_asked))];
    if reads.bytes_moved > reads.bytes_asked {
        words.push(format!("{:.3} GB moved", gb(reads.bytes_moved)));
    }
    let counts = [
        // Counts system calls or queue entries; one read may need several.
        (reads.direct_reads, "operations past the page cache"),
        (reads.buffered_reads, "operations through the page cache"),
        (reads.short_reads, "short reads continued"),
        (reads.retries, "repeated"),
        (reads.fallbacks, "refused by O_DIRECT, then read through the page cache"),
        (reads.failed, "failed"),
        (reads.opens, "files opened"),
    ];
    words.extend(counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")));
    if reads.registered_buffers {
        words.push("registered buffers".into());
    }
    words.join(", ")
}

fn share(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() { 0.0 } else { part.as_secs_f64() / whole.as_secs_f64() }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = (self.steady() + self.first_batches).as_secs_f64();
        let rate = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        writeln!(f, "dataset   {}", self.dataset)?;
        writeln!(f, "device    {}", self.device)?;
        if let Some(numa) = &self.numa {
            writeln!(f, "numa      {numa}")?;
        }
        if let Some(rank) = &self.rank {
            writeln!(f, "rank      {rank}")?;
        }
        writeln!(
            f,
            "delivered {} batches, {} samples, {:.3} GB in {seconds:.2} s = {:.0} samples/s, {:.3} GB/s",
            self.batches,
            self.samples,
            self.bytes as f64 / 1e9,
            rate(self.samples as f64),
            rate(self.bytes as f64 / 1e9),
        )?;
        self.waits(f)?;
        writeln!(f, "workers   {} decode workers, busy {:.0} %", self.workers, 100.0 * self.busy_share())?;
        writeln!(f, "reader    {}", self.choice)?;
        writeln!(f, "storage   {}", reads_in_words(&self.reads))?;
        if self.origin.from_memory().is_some() {
            writeln!(f, "bytes     {}", self.origin)?;
        }
        if let Some((hits, misses)) = self.cache {
            let lookups = hits + misses;
            writeln!(f, "cache     {hits} of {lookups} lookups before a read found its bytes in the page cache")?;
        }
        if let Some(network) = self.network.as_ref().filter(|network| network.requests > 0) {
            writeln!(f, "network   {network}")?;
        }
        if let Some(local) = &self.local_cache {
            writeln!(f, "local     {local}")?;
        }
        self.chunks_opened(f)?;
        for (index, route) in self.routes.iter().enumerate() {
            writeln!(f, "{:<9} {route}", if index == 0 { "routes" } else { "" })?;
        }
        if let Some(direct) = &self.direct {
            writeln!(f, "direct    {direct}")?;
        }
        if let Some(copies) = &self.copies {
            writeln!(f, "copies    {copies}")?;
        }
        if self.recovered > 0 {
            writeln!(f, "recovered {} failed reads by retrying", self.recovered)?;
        }
        if !self.bad.samples.is_empty() {
            writeln!(f, "bad       {}", self.bad)?;
        }
        if self.leaked > 0 {
            writeln!(f, "leaked    {} objects that the kernel or a device may still use", self.leaked)?;
        }
        writeln!(f, "memory\n{}", self.plan)?;
        write!(f, "verdict   {}", self.verdict)
    }
}
