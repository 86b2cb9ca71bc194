//! The contract of a sampler: an order that its author computes.

use super::key::{Draws, Key};
#[cfg(doc)]
use feedline_base::error::ErrorKind;

/// A user's own order: a pure function from position to sample id.
///
/// `id` must depend on its arguments and on the sampler's constants alone; randomness comes from
/// [`Draws`], keyed by epoch and position. It may be called from any thread, for any position below
/// `len`, in any order, more than once. An id outside the dataset ends the epoch with
/// [`ErrorKind::Config`], naming position and id.
#[allow(
    clippy::len_without_is_empty,
    reason = "an empty sampler is of no use to anybody"
)]
pub trait Sampler: Send + Sync + 'static {
    /// Positions per epoch. Called once per epoch.
    fn len(&self) -> u64;

    /// The sample at `position` (below `len`) of `epoch`.
    fn id(&self, epoch: u64, position: u64) -> u64;

    /// A hash of all that decides the ids: seed, weights, lists. A saved state holds it, so that a
    /// run does not resume in another order. It must be the same in every process and on every
    /// machine.
    fn identity(&self) -> u64;

    /// The seed of random choices in decoders and transforms, unless the order or the loader sets one.
    fn seed(&self) -> u64 {
        0
    }

    /// A number for the draw at `position` of `epoch`, which distinguishes the draws of one sample
    /// within the epoch. Crops, flips and all other random choices of transforms depend on it, too.
    /// The most useful value is the number of the sample's earlier draws in the epoch: with 0,
    /// transforms draw as if the sample came once.
    ///
    /// The default is the position, so that no two draws are equal.
    fn draw(&self, epoch: u64, position: u64) -> u64 {
        let _ = epoch;
        position
    }

    /// The progress of a run after the positions below `position` of `epoch`, for samplers whose
    /// later part may change between runs (`Mix::scheduled`). All other samplers keep the default,
    /// `None`.
    ///
    /// A run then resumes if [`Progress::past`] is the same, regardless of the
    /// [`identity`](Self::identity). Not called for a sampler that is shuffled.
    fn progress(&self, epoch: u64, position: u64) -> Option<Progress> {
        let _ = (epoch, position);
        None
    }
}

/// The progress of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// A hash of everything that has determined the ids so far.
    pub past: u64,
    /// Segments that have begun, for error messages.
    pub segments: u64,
    /// The counts of each source, in order; for the report.
    pub sources: Vec<Drawn>,
}

/// Counts of the draws from a source of a mixture.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Drawn {
    /// Positions that drew from the source.
    pub drawn: u64,
    /// Positions that should have drawn from the source, by its weights.
    pub asked: f64,
    /// Number of samples in one pass over the source.
    pub samples: u64,
}

/// A hash of numbers for [`Sampler::identity`] and
/// [`Dataset::identity`](crate::dataset::Dataset::identity), the same on every machine.
pub fn identity_of(numbers: impl IntoIterator<Item = u64>) -> u64 {
    let key = numbers
        .into_iter()
        .fold(Key::new(0).named("identity"), |key, number| {
            key.derive(number)
        });
    Draws::from_key(key).next_u64()
}
