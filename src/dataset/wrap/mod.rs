//! Datasets made of other datasets: a part, several, in memory, with checksums, with seek points; and a full verification.

pub(crate) mod checked;
pub(crate) mod memory;
#[cfg(feature = "image")]
pub(crate) mod seekable;
pub(crate) mod several;
pub(crate) mod subset;
pub(crate) mod verify;
