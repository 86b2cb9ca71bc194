//! Orders over chunks: what is opened in which sequence, and which of it a run of positions needs at once. Pure.
//!
//! ```text
//! sequential   chunk 0 │ chunk 1 │ chunk 2 │ …            a piece needs its own chunk
//! windowed     permuted chunks in groups of W: │ 7 2 9 │ 0 4 5 │ …   each group's samples permuted; a piece needs W
//! any other    all chunks, always open
//! ```
//!
//! How random is a windowed order? Every sample comes once. The chunks of a group are a uniform choice; a sample comes
//! anywhere within its group, so it meets the samples of W chunks, never those of another group of the same epoch.
//! The next epoch groups other chunks together. Memory: two groups, one being used and one being opened.

use super::key::{Key, Permutation};
use std::ops::Range;
use std::sync::Arc;

/// Chunks in their sequence, in groups of `window`. O(chunks) memory.
#[derive(Clone, Debug)]
pub(crate) struct Windows(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// First sample of each chunk, and the number of all.
    starts: Arc<[u64]>,
    /// The chunks as they are opened.
    sequence: Vec<u32>,
    /// First position of each group, and the number of all.
    groups: Vec<u64>,
    window: usize,
    key: Key,
}

impl Windows {
    pub(crate) fn new(starts: &Arc<[u64]>, window: usize, key: Key) -> Self {
        let window = window.max(1);
        let chunks = starts.len().saturating_sub(1);
        let permutation = Permutation::new(chunks as u64, key.named("chunks"));
        let sequence: Vec<u32> = (0..chunks as u64).map(|k| permutation.get(k) as u32).collect();
        let mut groups = Vec::with_capacity(chunks.div_ceil(window) + 1);
        let mut first = 0;
        for group in sequence.chunks(window) {
            groups.push(first);
            first += group.iter().map(|chunk| rows_of(starts, *chunk)).sum::<u64>();
        }
        groups.push(first);
        Self(Arc::new(Inner { starts: starts.clone(), sequence, groups, window, key }))
    }

    /// The group in which `position` lies.
    pub(crate) fn group(&self, position: u64) -> Group {
        let inner = &*self.0;
        // The last group that starts at or before it: empty groups share their start with the next.
        let index = inner.groups.partition_point(|first| *first <= position) - 1;
        let (first, end) = (inner.groups[index], inner.groups[index + 1]);
        let from = index * inner.window;
        let entries = from..(from + inner.window).min(inner.sequence.len());
        let mut before = Vec::with_capacity(entries.len());
        let mut sum = 0;
        for chunk in &inner.sequence[entries.clone()] {
            before.push((sum, inner.starts[*chunk as usize]));
            sum += rows_of(&inner.starts, *chunk);
        }
        let permutation = Permutation::new(end - first, inner.key.named("group").derive(index as u64));
        Group { positions: first..end, entries, before, permutation }
    }

    /// Entry `k` of the sequence.
    pub(crate) fn chunk(&self, k: usize) -> Option<usize> {
        self.0.sequence.get(k).map(|chunk| *chunk as usize)
    }
}

fn rows_of(starts: &[u64], chunk: u32) -> u64 {
    starts[chunk as usize + 1] - starts[chunk as usize]
}

/// One group of a windowed order, ready for many lookups.
pub(crate) struct Group {
    pub(crate) positions: Range<u64>,
    /// Its entries of the sequence.
    pub(crate) entries: Range<usize>,
    /// For each chunk: samples of the group before it, and its first sample.
    before: Vec<(u64, u64)>,
    permutation: Permutation,
}

impl Group {
    /// The entry (counted from the group's first), the row in its chunk, and the sample at `position`.
    pub(crate) fn locate(&self, position: u64) -> (usize, u64, u64) {
        let index = self.permutation.get(position - self.positions.start);
        let entry = self.before.partition_point(|(before, _)| *before <= index) - 1;
        let (before, start) = self.before[entry];
        (entry, index - before, start + index - before)
    }
}

/// A run of positions that needs the same chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Positions from the one asked for to the first that needs others.
    pub(crate) len: u64,
    /// The entries of the chunk sequence that it needs.
    pub(crate) entries: Range<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_sample_comes_once_and_only_from_the_chunks_of_its_group(
            rows in prop::collection::vec(0_u64..70, 1..40), window in 1_usize..9, key in any::<u64>()
        ) {
            let mut starts = vec![0];
            rows.iter().for_each(|rows| starts.push(starts.last().unwrap() + rows));
            let total = *starts.last().unwrap();
            let starts: Arc<[u64]> = starts.into();
            let windows = Windows::new(&starts, window, Key::new(key));
            let mut seen = vec![false; total as usize];
            for position in 0..total {
                let group = windows.group(position);
                prop_assert!(group.positions.contains(&position));
                prop_assert!(group.entries.len() <= window);
                let (entry, row, id) = group.locate(position);
                let chunk = windows.chunk(group.entries.start + entry).unwrap();
                prop_assert_eq!(starts[chunk] + row, id);
                prop_assert!(id < starts[chunk + 1]);
                prop_assert!(!std::mem::replace(&mut seen[id as usize], true), "sample {} twice", id);
            }
            prop_assert!(seen.iter().all(|seen| *seen));
        }
    }

    #[test]
    fn a_window_over_everything_is_a_global_shuffle() {
        let starts: Arc<[u64]> = vec![0, 1000, 1500, 4000].into();
        let windows = Windows::new(&starts, 3, Key::new(5));
        let group = windows.group(0);
        assert_eq!(group.positions, 0..4000);
        // Neighbours of the first hundred positions come from all chunks.
        let mut from = [0; 3];
        for position in 0..1000 {
            from[group.locate(position).0] += 1;
        }
        let sizes: Vec<u64> = (0..3).map(|k| rows_of(&starts, windows.chunk(k).unwrap() as u32)).collect();
        for (from, size) in from.iter().zip(sizes) {
            let expected = size as f64 / 4.0;
            assert!((f64::from(*from) - expected).abs() < 5.0 * expected.sqrt(), "{from} of {expected}");
        }
    }
}
