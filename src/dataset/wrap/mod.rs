//! Datasets made from other datasets: a part of one, several as one, in memory, with checksums,
//! seek points or lengths, copied and packed documents; and a full verification.

// A wrapper that omits a method would use the default instead of the inner dataset's method.
#![deny(clippy::missing_trait_methods)]

pub(crate) mod checked;
pub(crate) mod copied;
pub(crate) mod measured;
pub(crate) mod memory;
pub(crate) mod mix;
pub(crate) mod packed;
pub(crate) mod pass;
#[cfg(feature = "image")]
pub(crate) mod picture_sizes;
#[cfg(feature = "image")]
pub(crate) mod seekable;
pub(crate) mod several;
mod shares;
pub(crate) mod subset;
pub(crate) mod verify;

use feedline_core::dataset::forward::debug_by_describe;

pub use checked::Checked;
pub use copied::Copied;
pub use measured::Measured;
pub use memory::InMemory;
pub use mix::Mix;
pub use packed::{Packed, PackedBuilder};
#[cfg(feature = "image")]
pub use seekable::Seekable;
pub use several::Concat;
pub use subset::Subset;
pub use verify::Verify;

#[cfg(feature = "image")]
debug_by_describe!(Seekable<D>);
debug_by_describe!(
    Checked<D>,
    Concat,
    Copied,
    InMemory<D>,
    Measured<D>,
    Packed<D>,
    Subset<D>
);
