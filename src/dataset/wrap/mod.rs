//! Datasets made from other datasets: subsets, concatenations, mixes, joins, datasets in memory or with
//! facts about their samples, tokenised texts, copied and packed documents; and a full verification.

// A wrapper that omits a method would use the default instead of the inner dataset's method.
#![deny(clippy::missing_trait_methods)]

pub(crate) mod copied;
pub(crate) mod facts;
pub(crate) mod join;
pub(crate) mod memory;
pub(crate) mod mix;
pub(crate) mod packed;
pub(crate) mod several;
mod shares;
pub(crate) mod subset;
pub(crate) mod tokenized;
pub(crate) mod verify;

use feedline_core::dataset::forward::debug_by_describe;

pub use copied::Copied;
pub use facts::{Facts, FactsBuilder};
pub use join::{JoinBuilder, Joined, Missing};
pub use memory::InMemory;
pub use mix::Mix;
pub use packed::{Packed, PackedBuilder};
pub use several::Concat;
pub use subset::Subset;
pub use tokenized::Tokenized;
pub use verify::Verify;

debug_by_describe!(
    Concat,
    Copied,
    Facts<D>,
    InMemory<D>,
    Joined,
    Packed<D>,
    Subset<D>,
    Tokenized<D>
);
