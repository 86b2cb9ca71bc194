//! Datasets made of other datasets: a part, several, in memory, with checksums; and the pass that verifies one.

pub(crate) mod checked;
pub(crate) mod memory;
pub(crate) mod several;
pub(crate) mod subset;
pub(crate) mod verify;
