//! The memory of a loader as a sum: one line and one reason per term. Pure. `build()` reserves all of it except the
//! scratch of third-party decoders. That term is a limit, and is allocated when a picture needs it.

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::Part;
use crate::setting::Setting;
use std::fmt;

/// Heap bytes that every decoder gets on each worker, even under a small budget: enough for a picture of two
/// megapixels.
const SCRATCH_LEAST: usize = 8 << 20;
/// A worker copies encoded samples up to this size from the page cache, and decodes them itself. The buffer of each
/// worker has at most this size. Larger samples go through the ring.
const CACHED_MAX: usize = 4 << 20;
/// Default total of the slots if single slots are small: enough to hide the hops between threads.
const SLOTS_TOTAL: usize = 64 << 20;
const SLOTS_MOST: usize = 16;
/// Bounds of the ring's default size, in bytes.
const RING_LEAST: usize = 8 << 20;
const RING_MOST: usize = 256 << 20;
/// Number of threads that read directly into device memory, and the bounce buffer of each.
pub(crate) const DIRECT_THREADS: usize = 8;
pub(crate) const DIRECT_BOUNCE: usize = 1 << 20;
/// Touched stack of a thread; measured, not reserved.
const STACK: usize = 256 << 10;

/// The inputs of the sum.
#[derive(Clone, Debug, Default)]
pub(crate) struct Demand {
    pub(crate) slot_bytes: usize,
    pub(crate) slots: Option<usize>,
    pub(crate) workers: usize,
    /// Limit of operations in flight.
    pub(crate) depth: usize,
    /// Largest buffer outside of the slot that the reads of one sample need, in bytes; 0 if none need any.
    pub(crate) encoded_max: usize,
    /// The average of the same.
    pub(crate) encoded_mean: usize,
    /// Whether the page cache is asked first.
    pub(crate) cached: bool,
    pub(crate) scratch: usize,
    /// Bytes that the dataset allocates on each worker when it opens a sample.
    pub(crate) opened: usize,
    /// For chunked datasets; then `encoded_max` is the largest of a chunk.
    pub(crate) chunks: Option<ChunkDemand>,
    /// Limit of samples in flight, and bytes of each.
    pub(crate) pending: usize,
    pub(crate) pending_bytes: usize,
    pub(crate) index_bytes: usize,
    /// Bytes of the data in memory, which are there already.
    pub(crate) data_bytes: usize,
    /// Bytes that the process can still get, if known.
    pub(crate) free: Option<usize>,
    pub(crate) budget: Option<usize>,
    /// The share of a shared budget.
    pub(crate) part: Option<Part>,
    pub(crate) largest: Option<u64>,
    /// Number of batches in device memory, and bytes of each.
    pub(crate) device_batches: usize,
    pub(crate) device_bytes: usize,
    /// Threads that read directly into device memory.
    pub(crate) direct_threads: usize,
    /// Bytes of the reader beside the destinations of its reads.
    pub(crate) reader_bytes: usize,
    /// Bytes to read and open one sample or chunk as a substitute; 0 without substitution.
    pub(crate) substitute: usize,
}

/// The demand of open chunks.
#[derive(Clone, Debug)]
pub(crate) struct ChunkDemand {
    /// Bytes of a buffer, which must hold the largest chunk.
    pub(crate) bytes: usize,
    /// Limit of bytes beside each buffer, for the positions of the rows in it.
    pub(crate) lists: usize,
    /// Smallest number of buffers that works, and the preferred number.
    pub(crate) least: usize,
    pub(crate) wanted: usize,
    /// Encoded bytes of the largest chunk.
    pub(crate) encoded: usize,
    /// Heap of each worker while it opens a chunk.
    pub(crate) scratch: usize,
    /// The sequences of chunks of this epoch and the next.
    pub(crate) tables: usize,
    /// For errors: the name of the largest chunk, and the reason for `least`.
    pub(crate) largest: String,
    pub(crate) why: &'static str,
}

/// The sum of a loader's memory in bytes. Print it with `println!("{}", loader.plan())`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Number of batch slots.
    pub slots: usize,
    /// Bytes of one batch slot.
    pub slot_bytes: usize,
    /// Bytes of the ring of encoded bytes.
    pub ring_bytes: usize,
    /// Decode workers.
    pub workers: usize,
    /// Buffer of each worker for encoded samples from the page cache.
    pub cached_bytes: usize,
    /// Limit of heap bytes for third-party decoders on each worker.
    pub scratch_bytes: usize,
    /// Limit of further bytes on each worker to open samples or chunks.
    pub opened_bytes: usize,
    /// Chunks in memory at once, for chunked datasets.
    pub chunks: usize,
    /// Bytes of one open chunk, with the lists of its rows.
    pub chunk_bytes: usize,
    /// The lists' share of that.
    pub(crate) chunk_lists: usize,
    /// Tables of samples in flight, and the sequences of chunks of two epochs.
    pub table_bytes: usize,
    /// Touched stacks of all threads.
    pub stack_bytes: usize,
    /// The dataset's index. It exists before the loader and is not part of the budget.
    pub index_bytes: usize,
    /// The dataset's data in memory, as of `.in_memory()`. All loaders of the dataset share it.
    pub data_bytes: usize,
    /// Batches in device memory; not part of the budget. 0 on the host.
    pub device_batches: usize,
    /// Bytes of device memory of one batch.
    pub device_bytes: usize,
    /// Bounce buffers of the threads that read directly into device memory.
    pub bounce_bytes: usize,
    /// Buffers of connections to object stores; with a local cache, its blocks in memory and its tables.
    pub network_bytes: usize,
    /// For one substitute sample or chunk; allocated at the first substitution.
    pub substitute_bytes: usize,
    /// The limit of `memory_budget`, if set, or the share of the `shared_budget`, if smaller.
    pub budget: Option<usize>,
    /// The share of the `shared_budget`, if any.
    pub(crate) part: Option<Part>,
    /// The free memory, if the defaults did not fit it.
    pub(crate) free: Option<usize>,
}

impl MemoryPlan {
    /// Bytes of all terms that the budget bounds.
    pub fn total(&self) -> usize {
        self.terms().iter().fold(0_usize, |sum, (_, bytes, _)| sum.saturating_add(*bytes))
    }

    fn terms(&self) -> [(&'static str, usize, String); 12] {
        let Self { slots, slot_bytes, workers, cached_bytes, scratch_bytes, opened_bytes, chunks, chunk_bytes, .. } =
            self;
        [
            ("data in memory", self.data_bytes, "the dataset's; all of its loaders share it".into()),
            ("batch slots", slots.saturating_mul(*slot_bytes), format!("{slots} × {}", Bytes(*slot_bytes))),
            ("open chunks", chunks.saturating_mul(*chunk_bytes), format!("{chunks} × {}", Bytes(*chunk_bytes))),
            ("encoded bytes", self.ring_bytes, "ring for reads in flight that are decoded later".into()),
            (
                "cached reads",
                workers.saturating_mul(*cached_bytes),
                format!("{workers} workers × {}, for samples from the page cache", Bytes(*cached_bytes)),
            ),
            (
                "decoder scratch",
                workers.saturating_mul(*scratch_bytes),
                format!("{workers} workers × at most {}, taken when a picture needs it", Bytes(*scratch_bytes)),
            ),
            (
                "opening",
                workers.saturating_mul(*opened_bytes),
                format!("{workers} workers × at most {}, while they unpack", Bytes(*opened_bytes)),
            ),
            (
                "tables",
                self.table_bytes,
                if *chunks > 0 { "samples in flight, order of chunks" } else { "samples in flight" }.into(),
            ),
            ("bounce", self.bounce_bytes, "for rows that cannot be read directly into device memory".into()),
            (
                "network",
                self.network_bytes,
                "connections with a request in flight; blocks and tables of a cache".into(),
            ),
            (
                "substitutes",
                self.substitute_bytes,
                "for the substitute of a bad sample, allocated at the first one".into(),
            ),
            ("stacks", self.stack_bytes, "touched part".into()),
        ]
    }

    /// Bytes that `build` takes at once. The other terms are limits, which few runs reach.
    fn populated(&self) -> usize {
        let chunk = self.chunk_bytes.saturating_sub(self.chunk_lists);
        let cached = if self.chunks > 0 { self.cached_bytes } else { 0 };
        let all = [(self.slots, self.slot_bytes), (self.chunks, chunk), (1, self.ring_bytes), (self.workers, cached)];
        all.iter().fold(0, |sum, (count, bytes)| sum.saturating_add(count.saturating_mul(*bytes)))
    }

    /// Plans for a demand: the defaults, or as much of them as the budget and the free memory allow.
    ///
    /// Errors: [`ErrorKind::Budget`] with the sum of the smallest legal plan.
    pub(crate) fn new(demand: &Demand) -> Result<Self> {
        let most = Self::with(demand, demand.slots_default(), demand.ring_default(), demand.scratch);
        let lacking = |plan: &Self| demand.free.filter(|free| plan.populated() > *free);
        let budget = demand.allowed().unwrap_or(usize::MAX);
        if most.total() <= budget && lacking(&most).is_none() {
            return Ok(most);
        }
        let scratch_least = demand.scratch.min(SCRATCH_LEAST);
        let mut plan = Self::with(demand, demand.slots.unwrap_or(2), demand.ring_least(), scratch_least);
        plan.chunks = demand.chunks.as_ref().map_or(0, |chunks| chunks.least);
        if plan.total() > budget {
            return Err(plan.too_small(demand, (budget, "allowed"), plan.total()));
        }
        if let Some(free) = lacking(&plan) {
            return Err(plan.too_small(demand, (free, "free, limits of the container included"), plan.populated()));
        }
        plan.free = lacking(&most);
        let limit = plan.free.map_or(budget, |free| budget.min(free.saturating_add(plan.data_bytes)));
        // The rest goes to slots first (they hide latency), then to the ring (depth), then to large pictures.
        let room = |plan: &Self| limit.saturating_sub(plan.total());
        let more = room(&plan).checked_div(plan.chunk_bytes).unwrap_or(0);
        plan.chunks += more.min(most.chunks.saturating_sub(plan.chunks));
        plan.slots += (room(&plan) / plan.slot_bytes).min(most.slots.saturating_sub(plan.slots));
        plan.ring_bytes += page_down(room(&plan)).min(most.ring_bytes - plan.ring_bytes);
        plan.scratch_bytes += (room(&plan) / plan.workers).min(most.scratch_bytes - plan.scratch_bytes);
        Ok(plan)
    }

    fn with(demand: &Demand, slots: usize, ring_bytes: usize, scratch_bytes: usize) -> Self {
        Self {
            slots,
            slot_bytes: demand.slot_bytes,
            ring_bytes,
            workers: demand.workers,
            cached_bytes: demand.cached_bytes(),
            opened_bytes: demand.opened.saturating_add(demand.chunks.as_ref().map_or(0, |chunks| chunks.scratch)),
            chunks: demand.chunks.as_ref().map_or(0, |chunks| chunks.wanted),
            chunk_lists: demand.chunks.as_ref().map_or(0, |chunks| chunks.lists),
            chunk_bytes: demand.chunks.as_ref().map_or(0, |chunks| chunks.bytes.saturating_add(chunks.lists)),
            scratch_bytes,
            table_bytes: (demand.pending.saturating_mul(demand.pending_bytes))
                .saturating_add(demand.chunks.as_ref().map_or(0, |chunks| chunks.tables)),
            stack_bytes: (demand.workers + 1 + usize::from(demand.device_batches > 0) + demand.direct_threads) * STACK,
            index_bytes: demand.index_bytes,
            data_bytes: demand.data_bytes,
            device_batches: demand.device_batches,
            device_bytes: demand.device_bytes,
            bounce_bytes: demand.direct_threads.saturating_mul(DIRECT_BOUNCE),
            network_bytes: demand.reader_bytes,
            substitute_bytes: demand.substitute,
            budget: demand.allowed(),
            part: demand.part,
            free: None,
        }
    }

    fn budget_in_words(&self) -> String {
        let Some(budget) = self.budget else { return "no budget set".into() };
        let Some(part) = self.part else { return format!("budget {}", Bytes(budget)) };
        let relation = if budget < part.bytes.saturating_add(self.data_bytes) { ", less than" } else { ":" };
        let data = if self.data_bytes > 0 { " the data and" } else { "" };
        let share = if part.parts == 1 { "all".into() } else { format!("1/{}", part.parts) };
        let (free, whole) = (Bytes(part.free), Bytes(part.whole));
        let loaders = part.loaders;
        format!(
            "budget {}{relation}{data} {share} of the {free} free in a budget of {whole} for {loaders} loaders",
            Bytes(budget)
        )
    }

    /// The error: `have` bytes are `what`.
    fn too_small(&self, demand: &Demand, (have, what): (usize, &str), need: usize) -> Error {
        let largest = match &demand.chunks {
            Some(ChunkDemand { bytes, least, largest, why, .. }) => {
                format!("largest chunk: {largest}, {} when open, {least} at once: {why}", Bytes(*bytes))
            }
            None => {
                let sample = demand.largest.map_or(String::new(), |id| format!(", sample {id}"));
                format!("largest encoded sample: {}{sample}", Bytes(demand.encoded_max))
            }
        };
        let later = match self.part {
            Some(part) if part.bytes.saturating_add(self.data_bytes) == have && part.parts > 1 => {
                ", and loaders that need less, built first, leave more"
            }
            _ => "",
        };
        let data = format!(", and data in storage, without {}, none", Setting::InMemory);
        let message = format!(
            "{} are {what}, {} are needed at least ({largest}); fewer workers, smaller batches or fewer slots need \
             less{later}{}:\n{self}",
            Bytes(have),
            Bytes(need),
            if self.data_bytes > 0 { &data } else { "" },
        );
        Error::new(ErrorKind::Budget, Stage::Build, message)
    }
}

impl Demand {
    /// The smaller limit of the loader's and the shared budget.
    fn allowed(&self) -> Option<usize> {
        // A shared budget takes the data off before it is divided.
        let part = self.part.map(|part| part.bytes.saturating_add(self.data_bytes));
        self.budget.into_iter().chain(part).min()
    }

    fn slots_default(&self) -> usize {
        let by_size = (SLOTS_TOTAL / self.slot_bytes.max(1)).clamp(4, SLOTS_MOST);
        self.slots.unwrap_or(by_size)
    }

    fn cached_bytes(&self) -> usize {
        match (&self.chunks, self.cached) {
            (_, false) => 0,
            (Some(chunks), true) => chunks.encoded,
            (None, true) => self.encoded_max.min(CACHED_MAX),
        }
    }

    fn ring_least(&self) -> usize {
        self.encoded_max.next_multiple_of(crate::tensor::PAGE)
    }

    fn ring_default(&self) -> usize {
        if self.encoded_max == 0 {
            return 0;
        }
        // Twice the depth: one half is in flight while the other is decoded. Twice the largest sample, so that it does
        // not block.
        let depth = self.encoded_mean.saturating_mul(2 * self.depth).clamp(RING_LEAST, RING_MOST);
        depth.max(self.encoded_max.saturating_mul(2)).next_multiple_of(crate::tensor::PAGE)
    }
}

fn page_down(bytes: usize) -> usize {
    bytes & !(crate::tensor::PAGE - 1)
}

/// Bytes with a unit.
pub(crate) struct Bytes(pub(crate) usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", UNITS[unit]) }
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes, why) in self.terms() {
            if bytes > 0 {
                writeln!(f, "  {name:<16} {:>10}  {why}", Bytes(bytes).to_string())?;
            }
        }
        let free = self.free.map_or(String::new(), |free| format!("; {} of memory were free", Bytes(free)));
        let budget = self.budget_in_words() + &free;
        writeln!(f, "  {:<16} {:>10}  {budget}", "sum", Bytes(self.total()).to_string())?;
        if self.device_batches > 0 {
            let (count, one) = (self.device_batches, Bytes(self.device_bytes));
            let all = Bytes(count.saturating_mul(self.device_bytes)).to_string();
            writeln!(f, "  {:<16} {all:>10}  {count} batches × {one}, in its own memory", "(device)")?;
        }
        write!(
            f,
            "  {:<16} {:>10}  the dataset's own memory, not in the sum",
            "(index)",
            Bytes(self.index_bytes).to_string()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn demand(slot: usize, encoded: usize, scratch: usize, workers: usize) -> Demand {
        Demand {
            slot_bytes: slot.next_multiple_of(4096),
            workers,
            depth: 32,
            encoded_max: encoded,
            encoded_mean: encoded / 2,
            cached: true,
            scratch,
            pending: 1024,
            pending_bytes: 300,
            largest: Some(3),
            ..Demand::default()
        }
    }

    proptest! {
        #[test]
        fn a_plan_fits_its_budget_or_is_refused_below_the_least(
            slot in 1_usize..1 << 28, encoded in 0_usize..1 << 26, scratch in 0_usize..1 << 30,
            workers in 1_usize..64, extra in 0_usize..1 << 32
        ) {
            let mut demand = demand(slot, encoded, scratch, workers);
            let least = MemoryPlan::with(&demand, 2, demand.ring_least(), scratch.min(SCRATCH_LEAST)).total();
            demand.budget = Some(least + extra);
            let plan = MemoryPlan::new(&demand).unwrap();
            prop_assert!(plan.total() <= least + extra);
            prop_assert!(plan.slots >= 2 && plan.ring_bytes >= encoded);
            demand.budget = Some(least - 1);
            prop_assert_eq!(MemoryPlan::new(&demand).unwrap_err().kind(), ErrorKind::Budget);
        }
    }

    proptest! {
        #[test]
        fn free_memory_bounds_only_what_build_takes_at_once(
            slot in 1_usize..1 << 28, encoded in 0_usize..1 << 26, scratch in 0_usize..1 << 30, workers in 1_usize..64,
            data in 0_usize..1 << 30, extra in 0_usize..1 << 32
        ) {
            let mut demand = Demand { data_bytes: data, ..demand(slot, encoded, scratch, workers) };
            let (least, most) = (2 * demand.slot_bytes + demand.ring_least(), MemoryPlan::new(&demand).unwrap());
            demand.free = Some(least + extra);
            let plan = MemoryPlan::new(&demand).unwrap();
            prop_assert!(plan.populated() <= least + extra && plan.slots >= 2 && plan.ring_bytes >= encoded);
            prop_assert!(plan == most || most.populated() > least + extra);
            demand.free = Some(least - 1);
            let text = MemoryPlan::new(&demand).unwrap_err().to_string();
            prop_assert!(text.contains("are free, limits of the container included"), "{}", text);
            prop_assert_eq!(text.contains("without `in_memory`"), data > 0);
        }
    }

    #[test]
    fn the_sum_names_every_term_and_the_largest_sample() {
        let mut demand = demand(38 << 20, 1 << 20, 200 << 20, 2);
        demand.budget = Some(1 << 20);
        let text = MemoryPlan::new(&demand).unwrap_err().to_string();
        for word in ["batch slots", "encoded bytes", "cached reads", "decoder scratch", "tables", "sum", "sample 3"] {
            assert!(text.contains(word), "{word} is missing in {text}");
        }
    }

    #[test]
    fn plan_and_error_name_the_share_of_a_shared_budget() {
        let part = |bytes, parts| Part { bytes, free: bytes * parts, parts, whole: 4 << 30, loaders: 4 };
        let words = "1/3 of the 3.0 GiB free in a budget of 4.0 GiB for 4 loaders\n";
        let table = [
            (None, part(1 << 30, 3), format!("budget 1.0 GiB: {words}")),
            (Some(2 << 30), part(1 << 30, 3), format!("budget 1.0 GiB: {words}")),
            (Some(1 << 29), part(1 << 30, 3), format!("budget 512.0 MiB, less than {words}")),
            (None, part(1 << 30, 1), "budget 1.0 GiB: all of the 1.0 GiB free in a budget of 4.0 GiB for 4".into()),
        ];
        for (budget, part, words) in table {
            let demand = Demand { budget, part: Some(part), ..demand(1 << 20, 1 << 20, 8 << 20, 2) };
            let plan = MemoryPlan::new(&demand).unwrap();
            assert!(plan.to_string().contains(&words), "{plan}");
            assert!(plan.total() <= plan.budget.unwrap());
        }
        for (parts, advice) in [(3, true), (1, false)] {
            let demand = Demand { part: Some(part(1 << 20, parts)), ..demand(1 << 20, 1 << 20, 8 << 20, 2) };
            let error = MemoryPlan::new(&demand).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Budget);
            let text = error.to_string();
            assert_eq!(
                text.contains("need less, and loaders that need less, built first, leave more:\n"),
                advice,
                "{text}"
            );
            assert!(text.contains("1.0 MiB are allowed") && text.contains("for 4 loaders"), "{text}");
        }
    }

    #[test]
    fn bytes_have_units() {
        let table = [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB")];
        for (bytes, text) in table {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
