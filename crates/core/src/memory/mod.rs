//! Host memory: regions, batch slots, the ring of encoded bytes. `build()` reserves all of it.
//!
//! ```text
//! FreeSlot ──begin──► Rows (split, filled by workers and the kernel) ──last row done──► Filled ──drop──► FreeSlot
//! ByteRing ──reserve──► RingSpan (filled by the kernel, read by a decoder) ──drop──► reused in FIFO order
//! ```
//!
//! Invariants:
//! * A byte has one writer at a time. The tokens (`FreeSlot`, `Rows`, `RowSpan`, `RingSpan`,
//!   `Filled`) are unique and not `Clone`, and each keeps its memory alive.
//! * No token can be lost: dropping a `Rows` fails its rows, so every slot returns to the pool.
//! * Loaders of one process may share a [`Budget`]; each takes the bytes of its plan from it.
//! * This module does not depend on devices or io_uring. The registrant's `Arc` keeps a registered
//!   region alive.

pub mod available;
pub mod budget;
pub mod chunk;
pub mod packed;
pub mod plan;
pub mod region;
pub mod ring;
pub mod row;
pub mod shared;
pub mod slot;
pub mod times;

pub use budget::{Budget, Lease, Part, Resident};
pub use chunk::ChunkBuf;
pub use plan::{MemoryPlan, MemoryTerm};
pub use region::{Bytes as RegionBytes, Pinned, Region, Withheld};
pub use ring::{ByteRing, RingSpan};
pub use row::{BatchFields, BatchMut, Row, RowFields};
pub use slot::{Array, Filled, FreeSlot, Hooks, Pool, RowSpan, Rows, Status, Ticket, Unused};
pub use times::SlotTimes;

/// Memory that an I/O operation owns until the kernel has finished with it.
///
/// Made from a [`RingSpan`], or by the pipeline from a row of a batch slot for reads in place.
pub struct IoBuf(BufKind);

enum BufKind {
    Row(RowSpan),
    Ring(RingSpan),
}

impl From<RingSpan> for IoBuf {
    fn from(span: RingSpan) -> Self {
        Self(BufKind::Ring(span))
    }
}

impl From<RowSpan> for IoBuf {
    fn from(span: RowSpan) -> Self {
        Self(BufKind::Row(span))
    }
}

#[allow(
    clippy::len_without_is_empty,
    reason = "an operation of no bytes has no buffer"
)]
impl IoBuf {
    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            BufKind::Row(span) => span.as_mut_slice(),
            BufKind::Ring(span) => span.as_mut_slice(),
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            BufKind::Row(span) => span.len(),
            BufKind::Ring(span) => span.len(),
        }
    }

    /// Id of the region, and the offset in it, for reads into registered buffers.
    pub fn place(&self) -> (u64, usize) {
        match &self.0 {
            BufKind::Row(span) => span.place(),
            BufKind::Ring(span) => span.place(),
        }
    }

    /// Returns the row of a slot, or the span of the ring as the error.
    pub fn into_row(self) -> Result<RowSpan, RingSpan> {
        match self.0 {
            BufKind::Row(span) => Ok(span),
            BufKind::Ring(span) => Err(span),
        }
    }

    /// Returns the span of the ring, if the memory is one.
    #[cfg(feature = "unstable")]
    pub fn into_span(self) -> Option<RingSpan> {
        self.into_row().err()
    }
}
