//! Samples of several files, one file after the other: which file a sample is of.

use crate::error::{Error, ErrorKind, Result, Stage};

/// The first sample of every file, then the number of all.
#[derive(Debug, Default)]
pub(super) struct Starts(Vec<u64>);

impl Starts {
    /// By how many samples each file has. Errors: [`ErrorKind::Limit`] for more than 2^64.
    pub(super) fn of(counts: impl IntoIterator<Item = u64>) -> Result<Self> {
        let limit = || Error::new(ErrorKind::Limit, Stage::Index, "more than 2^64 samples");
        let mut starts = vec![0_u64];
        for count in counts {
            starts.push(starts[starts.len() - 1].checked_add(count).ok_or_else(limit)?);
        }
        starts.shrink_to_fit();
        Ok(Self(starts))
    }

    /// Number of all samples.
    pub(super) fn len(&self) -> u64 {
        self.0[self.0.len() - 1]
    }

    /// The file of a sample, which is below `len`, and its number there.
    pub(super) fn locate(&self, sample: u64) -> (usize, u64) {
        let file = locate(&self.0, sample).unwrap_or(0);
        (file, sample - self.0[file])
    }

    /// The starts, and the number of all as the last.
    pub(super) fn all(&self) -> &[u64] {
        &self.0
    }

    /// Heap bytes.
    pub(super) fn heap(&self) -> usize {
        self.0.capacity() * size_of::<u64>()
    }
}

/// Which of ascending starts a sample belongs to; none when all are behind it. Of files without samples, which start where the next
/// one does, the last is found: the one with the sample. Files are few, as a rule.
pub(super) fn locate(starts: &[u64], sample: u64) -> Option<usize> {
    starts.partition_point(|start| *start <= sample).checked_sub(1)
}
