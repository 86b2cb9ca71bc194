//! Host memory: regions, the slot pool, the ring of encoded bytes. Everything is reserved in `build()`.
//!
//! ```text
//! FreeSlot ──begin──► Rows (split, filled by workers and the kernel) ──last row done──► Filled ──drop──► FreeSlot
//! ByteRing ──reserve──► RingSpan (filled by the kernel, read by a decoder) ──drop──► room again, in FIFO order
//! ```
//!
//! Invariants:
//! * A byte has one writer at a time: the tokens (`FreeSlot`, `Rows`, `RowSpan`, `RingSpan`, `Filled`) are unique,
//!   cannot be cloned, and each keeps the memory alive that it names.
//! * No token can be lost: dropping a `Rows` counts its rows as failed, so every slot comes back.
//! * Several loaders of one process share a [`Budget`], from which each takes what its plan says.
//! * Nothing here knows a device or a ring; whoever registers a region keeps it alive by its `Arc`.

mod budget;
mod chunk;
pub(crate) mod pool;
mod process;
pub(crate) mod region;
pub(crate) mod ring;

pub use budget::Budget;
pub(crate) use budget::{Lease, Part};
pub use chunk::ChunkBuf;
pub(crate) use pool::{Array, Filled, FreeSlot, Hooks, Pool, Rows, Ticket};
pub use pool::{BatchMut, Row, Status};
pub(crate) use process::Process;
#[cfg(feature = "cuda")]
pub(crate) use region::Pinned;
pub(crate) use region::{Bytes as RegionBytes, Region, Withheld};
pub use ring::{ByteRing, RingSpan};

pub(crate) use pool::RowSpan;

/// Memory that an I/O operation owns until the kernel has let go of it. Made from a [`RingSpan`], or by the pipeline
/// from a row of a batch slot, where the bytes are then read in place.
pub struct IoBuf(Kind);

enum Kind {
    Row(RowSpan),
    Ring(RingSpan),
}

impl From<RingSpan> for IoBuf {
    fn from(span: RingSpan) -> Self {
        Self(Kind::Ring(span))
    }
}

impl From<RowSpan> for IoBuf {
    fn from(span: RowSpan) -> Self {
        Self(Kind::Row(span))
    }
}

#[allow(clippy::len_without_is_empty, reason = "an operation of no bytes has no buffer")]
impl IoBuf {
    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Kind::Row(span) => span.as_mut_slice(),
            Kind::Ring(span) => span.as_mut_slice(),
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Row(span) => span.len(),
            Kind::Ring(span) => span.len(),
        }
    }

    /// The region it lies in, and at which offset: what a registered-buffer read needs.
    pub(crate) fn place(&self) -> (u64, usize) {
        match &self.0 {
            Kind::Row(span) => span.place(),
            Kind::Ring(span) => span.place(),
        }
    }

    /// The row of a slot, if it is one.
    pub(crate) fn into_row(self) -> Result<RowSpan, RingSpan> {
        match self.0 {
            Kind::Row(span) => Ok(span),
            Kind::Ring(span) => Err(span),
        }
    }
}

impl IoBuf {
    /// The ring's span back, if it is one.
    pub fn into_span(self) -> Option<RingSpan> {
        self.into_row().err()
    }
}
