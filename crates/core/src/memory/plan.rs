//! The memory of a loader as a sum of terms. Pure. The code that makes a buffer declares its
//! [`MemoryTerm`]; this file declares only the term for data in memory, which loaders share.
//!
//! `build()` reserves all of it except the scratch of third-party decoders. That term is a limit,
//! and its memory is allocated when a picture needs it.

use crate::memory::Part;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use std::fmt;

/// Bytes that a process takes in addition to its plan from `build` on: its heap, heap memory that
/// threads keep, reports. Measured.
pub const PROCESS: usize = 6 << 20;

/// A term of a [`MemoryPlan`]: a number of equal buffers, with the reason for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryTerm {
    /// The name of its line in the plan.
    pub name: &'static str,
    /// Number of buffers.
    pub count: usize,
    /// Bytes of one buffer.
    pub each: usize,
    /// The reason; `{count}` and `{each}` stand for the numbers.
    why: &'static str,
    /// Bytes of each buffer that `build` takes immediately. The others are a limit, which few runs
    /// reach.
    #[doc(hidden)]
    pub at_once: usize,
    /// Whether the budget bounds it.
    budgeted: bool,
    /// The smallest count, and the smallest number of bytes per buffer, that work.
    least: (usize, usize),
    /// The term with the lowest turn is the first to take the bytes that a budget leaves above the
    /// minimum.
    turn: u8,
}

impl MemoryTerm {
    /// The dataset's data in memory, such as that of `.in_memory()`. All loaders of the dataset
    /// share it.
    pub const DATA: Self = Self::new(
        "data in memory",
        "the dataset's; all of its loaders share it",
    );

    /// Batch slots in host memory.
    pub const SLOTS: Self = Self::new("batch slots", "{count} × {each}");
    /// The ring of encoded bytes, in pages.
    pub const RING: Self = Self::new(
        "encoded bytes",
        "ring for reads in flight that are decoded later",
    );
    /// Buffer of each worker for encoded samples from the page cache.
    pub const CACHED: Self = Self::new(
        "cached reads",
        "{count} workers × {each}, for samples from the page cache",
    );
    /// Maximum heap bytes for third-party decoders on each worker.
    pub const SCRATCH: Self = Self::new(
        "decoder scratch",
        "{count} workers × at most {each}, taken when a picture needs it",
    );
    /// Maximum further bytes on each worker to open samples or chunks.
    pub const OPENING: Self = Self::new(
        "opening",
        "{count} workers × at most {each}, while they unpack",
    );
    /// Touched stacks of all threads.
    pub const STACKS: Self = Self::new("stacks", "touched part");
    /// Batches in device memory; not part of the budget. 0 on the host.
    pub const DEVICE: Self =
        Self::new("(device)", "{count} batches × {each}, in its own memory").outside();
    /// Arrays in device memory that only the operations on a batch read; not part of the budget.
    pub const STAGING: Self = Self::new(
        "(staging)",
        "{count} × {each} on the device, pictures before their conversion",
    )
    .outside();
    /// The dataset's index. It exists before the loader and is not part of the budget.
    pub const INDEX: Self =
        Self::new("(index)", "the dataset's own memory, not in the sum").outside();
    /// Chunks in memory at once, with the lists of their rows; for chunked datasets.
    pub const CHUNKS: Self = Self::new("open chunks", "{count} × {each}");
    /// Tables of the samples in flight, and the order of the chunks in two epochs.
    pub const TABLES: Self = Self::new("tables", "samples in flight");
    /// For one substitute sample or chunk; allocated at the first substitution.
    pub const SUBSTITUTES: Self = Self::new(
        "substitutes",
        "for the substitute of a bad sample, allocated at the first one",
    );
    /// Bounce buffers of the threads that read directly into device memory.
    pub const BOUNCE: Self = Self::new(
        "bounce",
        "for rows that cannot be read directly into device memory",
    );
    /// Buffers of connections to object stores; with a local cache, its blocks in memory and its
    /// tables.
    pub const NETWORK: Self = Self::new(
        "network",
        "connections with a request in flight; blocks and tables of a cache",
    );

    /// The name and the reason of a line of the plan.
    #[doc(hidden)]
    pub const fn new(name: &'static str, why: &'static str) -> Self {
        Self {
            name,
            count: 0,
            each: 0,
            why,
            at_once: 0,
            budgeted: true,
            least: (0, 0),
            turn: 0,
        }
    }

    /// Excludes the term from the budget: it is printed below the sum.
    pub(crate) const fn outside(self) -> Self {
        Self {
            budgeted: false,
            ..self
        }
    }

    /// `count` buffers of `each` bytes.
    #[doc(hidden)]
    pub const fn of(self, count: usize, each: usize) -> Self {
        Self {
            count,
            each,
            least: (count, each),
            ..self
        }
    }

    /// Sets how many bytes of each buffer `build` takes immediately.
    #[doc(hidden)]
    pub const fn taking(self, bytes: usize) -> Self {
        Self {
            at_once: bytes,
            ..self
        }
    }

    /// Under a tight budget, `count` buffers of `each` bytes are enough. Terms grow from there in
    /// the order of their turns.
    #[doc(hidden)]
    pub const fn or_least(self, count: usize, each: usize, turn: u8) -> Self {
        Self {
            least: (count, each),
            turn,
            ..self
        }
    }

    /// Bytes of all buffers.
    pub const fn bytes(&self) -> usize {
        self.count.saturating_mul(self.each)
    }

    /// The reason for the term.
    pub fn why(&self) -> String {
        self.why
            .replace("{count}", &self.count.to_string())
            .replace("{each}", &ShownBytes(self.each).to_string())
    }

    /// The smallest term that works.
    #[doc(hidden)]
    pub const fn at_least(self) -> Self {
        Self {
            count: self.least.0,
            each: self.least.1,
            ..self
        }
    }

    /// Grows the term towards `most`, by at most `room` bytes.
    fn grow(&mut self, most: &Self, room: usize) {
        let more = |other: usize, gap: usize| room.checked_div(other).unwrap_or(0).min(gap);
        match most.count.saturating_sub(self.count) {
            0 => self.each += more(self.count, most.each.saturating_sub(self.each)),
            gap => self.count += more(self.each, gap),
        }
    }

    fn line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "  {:<16} {:>10}  {}",
            self.name,
            ShownBytes(self.bytes()).to_string(),
            self.why()
        )
    }
}

/// The sum of a loader's memory in bytes. Print it with `println!("{}", loader.plan())`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// All terms, including those that are 0 here.
    pub terms: Vec<MemoryTerm>,
    /// The limit of `memory_budget`, if set, or the share of the `shared_budget`, if smaller.
    pub budget: Option<usize>,
    /// The share of the `shared_budget`, if any.
    part: Option<Part>,
    /// The free memory, if the defaults did not fit in it.
    free: Option<usize>,
}

/// The limits of a plan.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    pub budget: Option<usize>,
    /// The share of a shared budget.
    pub part: Option<Part>,
    /// Bytes that the process can still get, if known.
    pub free: Option<usize>,
    /// Ranks of this machine, each with its share of the free bytes.
    pub ranks: usize,
    /// For errors: the sample or chunk that needs the most memory.
    pub largest: String,
}

impl MemoryPlan {
    /// Bytes of all terms that the budget bounds.
    pub fn total(&self) -> usize {
        self.budgeted()
            .fold(0, |sum, term| sum.saturating_add(term.bytes()))
    }

    /// The term of this name, such as [`MemoryTerm::SLOTS`], with its numbers in this plan; 0 if
    /// the plan has no such term.
    pub fn term(&self, term: MemoryTerm) -> MemoryTerm {
        self.terms
            .iter()
            .find(|own| own.name == term.name)
            .copied()
            .unwrap_or(term)
    }

    fn budgeted(&self) -> impl Iterator<Item = &MemoryTerm> {
        self.terms.iter().filter(|term| term.budgeted)
    }

    /// Free bytes that the plan needs. Terms that are limits count in full, so that a process whose
    /// plan fits is not killed.
    #[doc(hidden)]
    pub fn needs(&self) -> usize {
        // The data is already in memory. Page tables take 1/512 more: 512 entries fill a page.
        let own = self.own();
        own.saturating_add(own / 512).saturating_add(PROCESS)
    }

    fn data(&self) -> usize {
        self.term(MemoryTerm::DATA).bytes()
    }

    /// Bytes of this loader alone.
    #[doc(hidden)]
    pub fn own(&self) -> usize {
        self.total() - self.data()
    }

    /// Plans with these terms, or as much of them as the budget and the free memory allow.
    ///
    /// Errors: [`ErrorKind::Budget`] with the sum of the smallest legal plan.
    #[doc(hidden)]
    pub fn fit(terms: Vec<MemoryTerm>, limits: Limits) -> Result<Self> {
        let mut most = Self {
            terms: joined(terms),
            budget: None,
            part: limits.part,
            free: None,
        };
        let data = most.data();
        // The data is subtracted from a shared budget before the budget is divided.
        let part = limits.part.map(|part| part.bytes.saturating_add(data));
        most.budget = limits.budget.into_iter().chain(part).min();
        let budget = most.budget.unwrap_or(usize::MAX);
        let lacking = |plan: &Self| limits.free.filter(|free| plan.needs() > *free);
        if most.total() <= budget && lacking(&most).is_none() {
            return Ok(most);
        }
        let mut plan = most.clone();
        plan.terms
            .iter_mut()
            .for_each(|term| *term = term.at_least());
        if plan.total() > budget {
            return Err(plan.too_small(&limits.largest, budget, "allowed", plan.total()));
        }
        if let Some(free) = lacking(&plan) {
            let limit = "limits of the container included";
            let need = plan.needs();
            let ranks = limits.ranks;
            if ranks <= 1 {
                let have = format!("free, {limit}");
                return Err(plan.too_small(&limits.largest, free, &have, need));
            }
            let have = format!("free for one of the {ranks} ranks here, {limit}");
            let all = ShownBytes(need.saturating_mul(ranks));
            let largest = format!("{all} for all ranks; {}", limits.largest);
            return Err(plan.too_small(&largest, free, &have, need));
        }
        plan.free = lacking(&most);
        let limit = plan.free.map_or(budget, |free| {
            let usable = free - free / 512 - PROCESS;
            budget.min(usable.saturating_add(data))
        });
        let mut turns: Vec<usize> = (0..plan.terms.len()).collect();
        turns.sort_by_key(|index| plan.terms[*index].turn);
        for index in turns {
            let room = limit.saturating_sub(plan.total());
            plan.terms[index].grow(&most.terms[index], room);
        }
        Ok(plan)
    }

    fn budget_in_words(&self) -> String {
        let Some(budget) = self.budget else {
            return "no budget set".into();
        };
        let Some(part) = self.part else {
            return format!("budget {}", ShownBytes(budget));
        };
        let relation = if budget < part.bytes.saturating_add(self.data()) {
            ", less than"
        } else {
            ":"
        };
        let data = if self.data() > 0 { " the data and" } else { "" };
        let share = if part.parts == 1 {
            "all".into()
        } else {
            format!("1/{}", part.parts)
        };
        let budget = ShownBytes(budget);
        let free = ShownBytes(part.free);
        let whole = ShownBytes(part.whole);
        let loaders = part.loaders;
        format!(
            "budget {budget}{relation}{data} {share} of the {free} free in a budget of \
             {whole} for {loaders} loaders"
        )
    }

    /// The error if the plan needs `need` bytes, but only `have` bytes are allowed or free
    /// (`what`).
    fn too_small(&self, largest: &str, have: usize, what: &str, need: usize) -> Error {
        let part = self
            .part
            .filter(|part| part.bytes.saturating_add(self.data()) == have && part.parts > 1);
        let later = part.map_or("", |_| ", build loaders with smaller plans first");
        let data = format!(
            ", or leave the data in storage, without {}",
            Setting::InMemory
        );
        let message = format!(
            "{} are {what}, but at least {} are needed ({largest}): use fewer workers, smaller \
             batches or fewer slots{later}{}:\n{self}",
            ShownBytes(have),
            ShownBytes(need),
            if self.data() > 0 { &data } else { "" },
        );
        Error::new(ErrorKind::Budget, Stage::Build, message).with_amounts(need as u64, have as u64)
    }
}

/// Joins terms of the same name into one line, with the reason of the last one.
fn joined(terms: Vec<MemoryTerm>) -> Vec<MemoryTerm> {
    let mut lines: Vec<MemoryTerm> = Vec::with_capacity(terms.len());
    for term in terms {
        match lines.iter_mut().find(|line| line.name == term.name) {
            Some(line) => *line = term.of(1, line.bytes().saturating_add(term.bytes())),
            None => lines.push(term),
        }
    }
    lines
}

/// Bytes with a unit.
pub struct ShownBytes(pub usize);

impl fmt::Display for ShownBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 {
            write!(f, "{} B", self.0)
        } else {
            write!(f, "{value:.1} {}", UNITS[unit])
        }
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for term in self.budgeted().filter(|term| term.bytes() > 0) {
            term.line(f)?;
            writeln!(f)?;
        }
        let free = self.free.map_or(String::new(), |free| {
            format!("; {} of memory was free", ShownBytes(free))
        });
        let budget = self.budget_in_words() + &free;
        write!(
            f,
            "  {:<16} {:>10}  {budget}",
            "sum",
            ShownBytes(self.total()).to_string()
        )?;
        self.terms
            .iter()
            .filter(|term| !term.budgeted)
            .try_for_each(|term| {
                writeln!(f)?;
                term.line(f)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        let table = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (4 << 30, "4.0 GiB"),
        ];
        for (bytes, text) in table {
            assert_eq!(ShownBytes(bytes).to_string(), text);
        }
    }
}
