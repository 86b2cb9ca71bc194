//! Datasets made of other datasets: a part, several, in memory, with checksums; and a full verification.

pub(crate) mod checked;
pub(crate) mod memory;
pub(crate) mod several;
pub(crate) mod subset;
pub(crate) mod verify;
