//! The report: a snapshot of the counters, and what they say. Pure.

use super::origin::Origin;
use crate::ledger::Ledger;
use crate::meter::{Copies, DirectReads, ReadStats};
use crate::pipeline::{FieldRoute, MemoryPlan};
use crate::report::{Cause, Verdict};
use crate::storage::Choice;
use std::fmt;
use std::time::Duration;

/// What a loader did so far. All times are wall-clock; `Display` is the text for people.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The dataset in words.
    pub dataset: String,
    /// The device in words.
    pub device: String,
    /// On which NUMA node threads and memory are, or why on none; `None` where nobody asked. See [`Numa`](crate::Numa).
    pub numa: Option<String>,
    /// Which rank of how many; `None` when there is one.
    pub rank: Option<String>,
    /// Batches handed out.
    pub batches: u64,
    /// Samples handed out; rows that fill a batch up do not count.
    pub samples: u64,
    /// Bytes of the fields handed out.
    pub bytes: u64,
    /// Time that `next()` waited for batches other than the first of an iterator: starvation on the host. A GPU may have
    /// work meanwhile: [`verdict`](Self::verdict) says what its stream waited.
    pub starved: Duration,
    /// Time that `next()` waited for the first batch of each iterator.
    pub first_batches: Duration,
    /// Time between calls of `next()`: the user's own work.
    pub user: Duration,
    /// Time that decode workers worked, summed over workers.
    pub decode_busy: Duration,
    /// Number of decode workers.
    pub workers: usize,
    /// Which reader was chosen and why.
    pub choice: Choice,
    /// What it did.
    pub reads: ReadStats,
    /// Extents that the page cache was asked for first: held, and not held.
    pub cache: Option<(u64, u64)>,
    /// For datasets in chunks: how often a chunk was opened, and how many there are.
    pub chunks: Option<(u64, u64)>,
    /// Samples in the chunks that were opened, each time counted.
    pub chunk_samples: u64,
    /// For datasets in chunks: the [read amplification](Self::read_amplification) of a whole epoch over all ranks, as
    /// planned.
    pub planned_amplification: Option<f64>,
    /// What was copied to the device; `None` on the host.
    pub copies: Option<Copies>,
    /// Which way the fields of the dataset take, and why; empty on the host.
    pub routes: Vec<FieldRoute>,
    /// What was read directly into the device's memory, if some field is.
    pub direct: Option<DirectReads>,
    /// Where the bytes came from: storage or memory.
    pub origin: Origin,
    /// What limits the loader, and what to change.
    pub verdict: Verdict,
    /// The memory.
    pub plan: MemoryPlan,
    /// Reads that failed, and worked when they were tried again.
    pub recovered: u64,
    /// Samples that could not be had, and how many rows hold others.
    pub bad: Ledger,
    /// Things that the kernel or a device may still use, left behind in this process.
    pub leaked: u64,
}

impl Report {
    /// Time of the iterators after their first batches.
    pub fn steady(&self) -> Duration {
        self.starved + self.user
    }

    /// Share of the steady time in which `next()` had to wait: 0 … 1.
    pub fn starved_share(&self) -> f64 {
        share(self.starved, self.steady())
    }

    /// Share of the workers' time in which they worked: 0 … 1.
    pub fn busy_share(&self) -> f64 {
        share(self.decode_busy, (self.steady() + self.first_batches) * self.workers.max(1) as u32).min(1.0)
    }

    /// For datasets in chunks: samples in the chunks that were opened, for each that was handed out. Above 1, chunks were
    /// opened for the sake of a part of their samples: by several ranks, or again in another lane. What is open ahead of
    /// the consumer counts, so it means something from about an epoch on. Summed over ranks it is that of the whole run.
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

    /// How long the consumer waited: its thread, or on a GPU its stream, which the thread may run ahead of.
    fn waits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waited, steady) = (self.starved.as_secs_f64(), self.steady().as_secs_f64());
        match (&self.copies, self.verdict.cause) {
            (None, _) => {
                let percent = 100.0 * self.starved_share();
                write!(f, "waits     starved {percent:.1} % ({waited:.2} s of {steady:.2} s)")?
            }
            (Some(_), Cause::Unknown) => {
                write!(f, "waits     GPU starved: not known; next() {waited:.2} s of {steady:.2} s")?
            }
            (Some(_), _) => {
                let percent = 100.0 * self.verdict.starved_share;
                write!(f, "waits     GPU starved {percent:.1} %; next() {waited:.2} s of {steady:.2} s")?
            }
        }
        let (first, own) = (self.first_batches.as_secs_f64(), self.user.as_secs_f64());
        writeln!(f, "; first batches {first:.3} s; own work {own:.2} s")
    }
}

/// The counters that are not zero.
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
        // Of system calls or queue entries, of which a read may need several.
        (reads.direct_reads, "operations past the page cache"),
        (reads.buffered_reads, "operations through the page cache"),
        (reads.short_reads, "short and continued"),
        (reads.retries, "repeated"),
        (reads.fallbacks, "refused by O_DIRECT and read through the cache"),
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
            writeln!(f, "recovered {} reads that failed at first", self.recovered)?;
        }
        if !self.bad.samples.is_empty() {
            writeln!(f, "bad       {}", self.bad)?;
        }
        if self.leaked > 0 {
            writeln!(f, "leaked    {} things that the kernel or a device may still use", self.leaked)?;
        }
        writeln!(f, "memory\n{}", self.plan)?;
        write!(f, "verdict   {}", self.verdict)
    }
}
