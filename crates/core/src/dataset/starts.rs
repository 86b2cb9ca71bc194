//! Finds the file of a sample in a sequence of files.

use feedline_base::error::{Error, ErrorKind, Result, Stage};

/// First sample of every file, then the total number of samples.
#[derive(Debug, Default)]
pub struct Starts(Vec<u64>);

impl Starts {
    /// Makes the starts from the number of samples in each file. Errors: [`ErrorKind::Limit`] above
    /// 2^64 samples in all.
    pub fn of(counts: impl IntoIterator<Item = u64>) -> Result<Self> {
        let mut starts = vec![0_u64];
        for count in counts {
            starts.push(starts[starts.len() - 1].checked_add(count).ok_or_else(|| {
                Error::new(ErrorKind::Limit, Stage::Index, "more than 2^64 samples")
            })?);
        }
        starts.shrink_to_fit();
        Ok(Self(starts))
    }

    /// Total number of samples.
    pub fn len(&self) -> u64 {
        self.0[self.0.len() - 1]
    }

    /// Index of a sample's file, and the sample's position in that file. `sample` is below `len`.
    pub fn locate(&self, sample: u64) -> (usize, u64) {
        let file = locate(&self.0, sample).unwrap_or(0);
        (file, sample - self.0[file])
    }

    /// The starts, then the total number of samples.
    pub fn all(&self) -> &[u64] {
        &self.0
    }

    /// Heap bytes.
    pub fn heap(&self) -> usize {
        self.0.capacity() * size_of::<u64>()
    }
}

/// Index of the last start that is not above `sample`, in an ascending list; `None` if all starts
/// are above it. An empty file starts where the next file starts, so the last of several equal
/// starts has the sample.
pub fn locate(starts: &[u64], sample: u64) -> Option<usize> {
    starts
        .partition_point(|start| *start <= sample)
        .checked_sub(1)
}
