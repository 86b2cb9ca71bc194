//! The sizes of a loader's buffers: defaults, and minimum sizes under a tight budget.

use crate::pipeline::OnBadSample;
use crate::pipeline::chunks::ChunkRoom;
use crate::pipeline::recipe::Recipe;
use crate::pipeline::substitute::SpareRoom;
use feedline_base::PAGE;
use feedline_core::dataset::Dataset;
use feedline_core::memory::plan::ShownBytes;
use feedline_core::memory::{MemoryTerm, Resident};

/// Heap bytes that every decoder gets on each worker, even under a small budget: enough for a
/// picture of two megapixels.
const SCRATCH_LEAST: usize = 8 << 20;
/// A worker copies encoded samples up to this size from the page cache, and decodes them itself.
/// The buffer of each worker has at most this size. Larger samples go through the ring.
const CACHED_MAX: usize = 4 << 20;
/// Default total of the slots if single slots are small: enough to hide the latency of passing
/// slots between threads.
const SLOTS_TOTAL: usize = 64 << 20;
const SLOTS_MOST: usize = 16;
/// Bounds of the ring's default size, in bytes.
const RING_LEAST: usize = 8 << 20;
const RING_MOST: usize = 256 << 20;
/// Touched stack of a thread; measured, not reserved.
pub(super) const STACK: usize = 256 << 10;

pub(super) fn slots(set: Option<usize>, bytes: usize) -> MemoryTerm {
    let by_size = (SLOTS_TOTAL / bytes.max(1)).clamp(4, SLOTS_MOST);
    MemoryTerm::SLOTS
        .of(set.unwrap_or(by_size), bytes)
        .or_least(set.unwrap_or(2), bytes, 1)
}

/// Data in memory; of what the ranks of this machine share, this rank's part.
pub(super) fn resident(data: &[Resident]) -> MemoryTerm {
    let bytes = data.iter().map(|data| data.counted).sum();
    if data.iter().all(|data| data.counted == data.range.len()) {
        return MemoryTerm::DATA.of(1, bytes);
    }
    let why = "this rank's part: the ranks of this machine share one copy";
    MemoryTerm::new(MemoryTerm::DATA.name, why).of(1, bytes)
}

pub(super) fn scratch(workers: usize, bytes: usize) -> MemoryTerm {
    MemoryTerm::SCRATCH
        .of(workers, bytes)
        .or_least(workers, bytes.min(SCRATCH_LEAST), 3)
}

/// The reads of samples or chunks that need a buffer outside the slot.
#[derive(Clone, Copy, Default)]
pub(super) struct EncodedTerm {
    /// Bytes of the largest sample or chunk; 0 if none needs a buffer.
    max: usize,
    /// Average bytes of a sample; 0 if few samples need a buffer.
    mean: usize,
    /// Maximum bytes that a worker copies from the page cache at once; 0 if the page cache is not
    /// used.
    cached: usize,
}

impl EncodedTerm {
    pub(super) fn new(
        dataset: &dyn Dataset,
        recipe: &Recipe,
        chunks: Option<&ChunkRoom>,
        cache: bool,
    ) -> Self {
        let files = dataset.sources().total_bytes();
        if files == 0 {
            return Self::default();
        }
        // Each part may need its own pages, and the aligned bytes around it.
        let with_slack = |bytes: usize, parts: usize| bytes.saturating_add(parts * 3 * PAGE);
        if let Some(ChunkRoom {
            encoded, pieces, ..
        }) = chunks
        {
            return Self {
                max: with_slack(*encoded, *pieces),
                mean: 0,
                cached: if cache { *encoded } else { 0 },
            };
        }
        let sizes = dataset.sizes();
        let largest = usize::try_from(sizes.sample_bytes_max).unwrap_or(usize::MAX);
        let max = with_slack(largest, recipe.parts_max(&sizes));
        // Rows read in place need the ring only for files with unaligned offsets.
        if recipe.all_in_place() && !feedline_core::dataset::opens_bytes(dataset) {
            return Self {
                max,
                ..Self::default()
            };
        }
        let mean = usize::try_from(files / dataset.len().max(1)).unwrap_or(usize::MAX);
        Self {
            max,
            mean: mean.min(max),
            cached: if cache { max.min(CACHED_MAX) } else { 0 },
        }
    }

    pub(super) fn ring(&self, depth: usize) -> MemoryTerm {
        // Twice the depth: one half is in flight while the other is decoded. Twice the largest
        // sample, so that the largest sample does not block.
        let flying = self
            .mean
            .saturating_mul(2 * depth)
            .clamp(RING_LEAST, RING_MOST);
        let bytes = if self.max == 0 {
            0
        } else {
            flying.max(self.max.saturating_mul(2))
        };
        MemoryTerm::RING
            .of(bytes.div_ceil(PAGE), PAGE)
            .or_least(self.max.div_ceil(PAGE), PAGE, 2)
    }

    pub(super) fn cached(&self, workers: usize) -> MemoryTerm {
        MemoryTerm::CACHED.of(workers, self.cached)
    }

    pub(super) fn largest(&self, dataset: &dyn Dataset) -> String {
        let sample = dataset
            .sizes()
            .largest_sample
            .map_or(String::new(), |id| format!(", sample {id}"));
        let largest = usize::try_from(dataset.sizes().sample_bytes_max).unwrap_or(usize::MAX);
        format!("largest encoded sample: {}{sample}", ShownBytes(largest))
    }
}

/// Memory of substitution: the largest sample or chunk, encoded and open.
pub(super) fn spare_room(
    encoded: &EncodedTerm,
    chunks: Option<&ChunkRoom>,
    policy: OnBadSample,
) -> SpareRoom {
    let OnBadSample::Substitute { budget } = policy else {
        return SpareRoom::default();
    };
    // If all bytes are in memory already, no encoded copy exists.
    let bytes = if encoded.max == 0 {
        0
    } else {
        chunks.map_or(encoded.max, |chunks| chunks.encoded)
    };
    let MemoryTerm {
        each,
        at_once: chunk,
        ..
    } = chunks.map_or(MemoryTerm::CHUNKS, |chunks| chunks.open);
    SpareRoom {
        budget,
        encoded: bytes,
        chunk,
        lists: each - chunk,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_base::error::ErrorKind;
    use feedline_core::memory::plan::{Limits, PROCESS};
    use feedline_core::memory::{MemoryPlan, Part};
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        budget: None,
        part: None,
        free: None,
        ranks: 1,
        largest: String::new(),
    };

    fn terms(slot: usize, encoded: usize, heap: usize, workers: usize) -> Vec<MemoryTerm> {
        let encoded = EncodedTerm {
            max: encoded,
            mean: encoded / 2,
            cached: encoded.min(CACHED_MAX),
        };
        vec![
            slots(None, slot.next_multiple_of(4096)),
            encoded.ring(32),
            encoded.cached(workers),
            scratch(workers, heap),
            MemoryTerm::TABLES.of(1024, 300),
            MemoryTerm::STACKS.of(workers + 1, STACK),
        ]
    }

    fn fits_slots_and_ring(plan: &MemoryPlan, encoded: usize) -> bool {
        plan.term(MemoryTerm::SLOTS).count >= 2 && plan.term(MemoryTerm::RING).bytes() >= encoded
    }

    proptest! {
        #[test]
        fn a_plan_fits_its_budget_or_is_refused_below_the_least(
            slot in 1_usize..1 << 28, encoded in 0_usize..1 << 26, scratch in 0_usize..1 << 30,
            workers in 1_usize..64, extra in 0_usize..1 << 32
        ) {
            let terms = terms(slot, encoded, scratch, workers);
            let least: usize = terms.iter().map(|term| term.at_least().bytes()).sum();
            let plan = MemoryPlan::fit(terms.clone(), Limits { budget: Some(least + extra), ..LIMITS }).unwrap();
            prop_assert!(plan.total() <= least + extra);
            prop_assert!(fits_slots_and_ring(&plan, encoded));
            let error = MemoryPlan::fit(terms, Limits { budget: Some(least - 1), ..LIMITS }).unwrap_err();
            prop_assert_eq!(error.kind(), ErrorKind::Budget);
        }
    }

    proptest! {
        #[test]
        fn free_memory_bounds_the_whole_sum(
            slot in 1_usize..1 << 28, encoded in 0_usize..1 << 26, scratch in 0_usize..1 << 30, workers in 1_usize..64,
            data in 0_usize..1 << 30, extra in 0_usize..1 << 32
        ) {
            let mut terms = terms(slot, encoded, scratch, workers);
            let own: usize = terms.iter().map(|term| term.at_least().bytes()).sum();
            let least = own + own / 512 + PROCESS;
            terms.push(MemoryTerm::DATA.of(1, data));
            let fit = |free| MemoryPlan::fit(terms.clone(), Limits { free, ..LIMITS });
            let most = fit(None).unwrap();
            let plan = fit(Some(least + extra)).unwrap();
            prop_assert!(plan.needs() <= least + extra && fits_slots_and_ring(&plan, encoded));
            prop_assert!(plan == most || most.needs() > least + extra);
            let text = fit(Some(least - 1)).unwrap_err().to_string();
            prop_assert!(text.contains("are free, limits of the container included"), "{}", text);
            prop_assert_eq!(text.contains("without `in_memory`"), data > 0);
            let text = MemoryPlan::fit(terms, Limits { free: Some(0), ranks: 4, ..LIMITS }).unwrap_err().to_string();
            prop_assert!(text.contains("0 B are free for one of the 4 ranks here, limits"), "{}", text);
            prop_assert!(text.contains(" for all ranks; "), "{}", text);
        }
    }

    #[test]
    fn the_sum_names_every_term_and_the_largest_sample() {
        let terms = terms(38 << 20, 1 << 20, 200 << 20, 2);
        let limits = Limits {
            budget: Some(1 << 20),
            largest: "largest encoded sample: 1.0 MiB, sample 3".into(),
            ..LIMITS
        };
        let text = MemoryPlan::fit(terms, limits).unwrap_err().to_string();
        for word in [
            "batch slots",
            "encoded bytes",
            "cached reads",
            "decoder scratch",
            "tables",
            "sum",
            "sample 3",
        ] {
            assert!(text.contains(word), "{word} is missing in {text}");
        }
    }

    #[test]
    fn terms_of_one_name_are_one_line() {
        let terms = vec![
            MemoryTerm::NETWORK.of(3, 100),
            MemoryTerm::STACKS.of(1, 1),
            MemoryTerm::NETWORK.of(1, 12),
        ];
        let plan = MemoryPlan::fit(terms, LIMITS).unwrap();
        assert_eq!(
            (
                plan.terms.len(),
                plan.term(MemoryTerm::NETWORK).bytes(),
                plan.total()
            ),
            (2, 312, 313)
        );
    }

    #[test]
    fn plan_and_error_name_the_share_of_a_shared_budget() {
        let part = |bytes, parts| Part {
            bytes,
            free: bytes * parts,
            parts,
            whole: 4 << 30,
            loaders: 4,
        };
        let words = "1/3 of the 3.0 GiB free in a budget of 4.0 GiB for 4 loaders\n";
        let table = [
            (None, part(1 << 30, 3), format!("budget 1.0 GiB: {words}")),
            (
                Some(2 << 30),
                part(1 << 30, 3),
                format!("budget 1.0 GiB: {words}"),
            ),
            (
                Some(1 << 29),
                part(1 << 30, 3),
                format!("budget 512.0 MiB, less than {words}"),
            ),
            (
                None,
                part(1 << 30, 1),
                "budget 1.0 GiB: all of the 1.0 GiB free in a budget of 4.0 GiB for 4".into(),
            ),
        ];
        let fit = |limits| {
            let mut terms = terms(1 << 20, 1 << 20, 8 << 20, 2);
            terms.push(MemoryTerm::INDEX);
            MemoryPlan::fit(terms, limits)
        };
        for (budget, part, words) in table {
            let plan = fit(Limits {
                budget,
                part: Some(part),
                ..LIMITS
            })
            .unwrap();
            assert!(plan.to_string().contains(&words), "{plan}");
            assert!(plan.total() <= plan.budget.unwrap());
        }
        for (parts, advice) in [(3, true), (1, false)] {
            let error = fit(Limits {
                part: Some(part(1 << 20, parts)),
                ..LIMITS
            })
            .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Budget);
            let text = error.to_string();
            assert_eq!(
                text.contains("fewer slots, build loaders with smaller plans first:\n"),
                advice,
                "{text}"
            );
            assert!(
                text.contains("1.0 MiB are allowed") && text.contains("for 4 loaders"),
                "{text}"
            );
        }
    }
}
