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
//! * Nothing here knows a device or a ring; whoever registers a [`Region`] keeps it alive by its `Arc`.

pub(crate) mod pool;
pub(crate) mod region;
pub(crate) mod ring;

pub(crate) use pool::{Filled, FreeSlot, Hooks, Pool, Rows};
pub use pool::{BatchMut, Row, Status};
pub(crate) use region::Region;
pub(crate) use ring::{ByteRing, RingSpan};

use pool::RowSpan;

/// Memory that an I/O operation owns until the kernel has let go of it.
pub(crate) enum IoBuf {
    /// One field's row of a slot: the bytes are read where the batch will be.
    Row(RowSpan),
    /// Encoded bytes on their way to a decoder.
    Ring(RingSpan),
}

impl IoBuf {
    /// The bytes.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Row(span) => span.as_mut_slice(),
            Self::Ring(span) => span.as_mut_slice(),
        }
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Row(span) => span.len(),
            Self::Ring(span) => span.len(),
        }
    }

    /// The region it lies in, and at which offset: what a registered-buffer read needs.
    pub(crate) fn place(&self) -> (u64, usize) {
        match self {
            Self::Row(span) => span.place(),
            Self::Ring(span) => span.place(),
        }
    }
}
