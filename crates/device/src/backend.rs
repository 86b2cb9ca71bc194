//! The interface between loader and device: the host, or a GPU.
//!
//! ```text
//! Backend              the device: address, streams
//!   └─ lane() ──► Lane          one loader: memory of its batches, registered for direct reads
//!        └─ open() ──► Copier        on the transfer thread: pins slots, runs the operations of a batch
//!        │    └─ copy() ──► OnDevice     a batch that the consumer holds
//!        └────────► DirectReader, IdleMeter
//! ```
//!
//! The operations on a batch are a list of [`DeviceOp`]. To add a kind of step, add a variant,
//! which `pipeline/recipe.rs` makes and the copier runs.

use super::DeviceKind;
use crate::{Buffer, DeviceOp, Lane, Stream};
use crossbeam_channel::Sender;
use feedline_base::error::{Error, Result};
use feedline_base::meter::Clock;
use feedline_base::sync::Hold;
use feedline_core::ledger::BadSample;
use feedline_core::memory::{Array, Filled, Ticket};
use feedline_core::tensor::Layout;
use rustix::fd::OwnedFd;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// An address in device memory.
pub type DevicePtr = u64;

/// A device: the host or a GPU.
pub trait Backend: Send + Sync {
    fn kind(&self) -> DeviceKind;

    /// Human-readable name.
    fn name(&self) -> &str;

    /// PCI address, as in `/sys/bus/pci/devices`.
    fn pci_bus_id(&self) -> Option<&str>;

    /// Refuses a stream that cannot order work on this device.
    fn check_stream(&self, stream: &Stream) -> Result<()>;

    /// Refuses a stream that is capturing a graph: no batch may be bound to it now.
    fn check_uncaptured(&self, stream: &Stream) -> Result<()>;

    /// Runs `work`, which makes many calls to the device, on this thread.
    fn within(&self, work: &mut dyn FnMut());

    /// Like [`within`](Self::within), but makes the calls so that they do not end another thread's
    /// graph capture.
    fn beside_captures(&self, work: &mut dyn FnMut());

    /// The batch memory of a new loader. `None`: batches are delivered in their slots.
    fn lane(self: Arc<Self>) -> Option<Lane>;
}

/// The host: delivers slots unchanged.
pub(crate) struct Host;

impl Backend for Host {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn name(&self) -> &str {
        "host"
    }

    fn pci_bus_id(&self) -> Option<&str> {
        None
    }

    fn check_stream(&self, _: &Stream) -> Result<()> {
        Ok(())
    }

    fn check_uncaptured(&self, _: &Stream) -> Result<()> {
        Ok(())
    }

    fn within(&self, work: &mut dyn FnMut()) {
        work();
    }

    fn beside_captures(&self, work: &mut dyn FnMut()) {
        work();
    }

    fn lane(self: Arc<Self>) -> Option<Lane> {
        None
    }
}

/// Why batch memory could not be reserved.
pub enum Unreserved {
    /// Direct reads cannot use the memory, for this reason. Reads through the host still can.
    ForDirect(Error),
    Failed(Error),
}

/// A trial read that shows the actual route of the bytes.
pub struct DirectTrial {
    /// Opens a file with O_DIRECT, or returns the reason why it cannot.
    pub file: Box<dyn FnOnce() -> Result<OwnedFd, String>>,
    pub offset: u64,
    pub len: u64,
    /// Whether to accept a route that cuFile does not count.
    pub required: bool,
    /// For tests: a library, and the root of the file system that it sees.
    pub library: Option<(PathBuf, PathBuf)>,
    /// For tests: whether to accept a route through host memory.
    pub any_route: bool,
}

/// Parameters of a copier.
pub struct Setup {
    /// The arrays of the slot.
    pub slot: Layout,
    /// The arrays of a device batch: the slot's fields under the same numbers, then the fields made
    /// on the device.
    pub contents: Layout,
    /// The slot's fields to copy, and the operations on the batch after the copy, in order.
    pub copied: Vec<usize>,
    pub ops: Vec<DeviceOp>,
    /// The slot's fields that only operations read, and the layout of their arrays under the same
    /// numbers. `copied` does not contain these fields.
    pub staged: Vec<usize>,
    pub staging: Layout,
    /// Number of staging areas with that layout.
    pub areas: usize,
    /// Numbers of device batches and of slots.
    pub batches: usize,
    pub slots: usize,
    /// Receives a message when device work has ended.
    pub bell: Sender<()>,
    pub clock: Clock,
    /// Whether to measure idle time.
    pub measured: bool,
}

/// Outcome of a copy request.
pub enum Copied {
    /// The copy of this many bytes is in flight. The slot is freed when the copy ends.
    Started(OnDevice, usize),
    /// The copy failed, but the next copy may succeed.
    Failed(Filled, Error),
    /// The device is unusable, and still owns the slot.
    Broken(Error),
}

/// Work that has ended on the device.
pub enum Landed {
    /// The copy of a batch: its time on the bus by the host's clock, if known.
    Copy(Option<Range<u64>>),
    /// The operations on a batch: their duration in nanoseconds.
    Operations(u64),
}

/// State of the oldest copy in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oldest {
    /// Nothing is in flight.
    Nothing,
    /// The copy waits for consumers' work on the previous batch in its buffer.
    Blocked,
    /// The copy waits only for the device: copies have been running since this time by the host's
    /// clock.
    Runs(u64),
}

/// The host's copy of a device batch's metadata, so that the end of the copy can free the slot.
#[derive(Default)]
pub(crate) struct BatchHead {
    pub(crate) ticket: Ticket,
    /// The times recorded for the slot, and the time at which the copy was submitted.
    pub(crate) times: ([u64; 3], u64),
    pub(crate) rows: usize,
    pub(crate) valid: usize,
    pub(crate) ids: Vec<u64>,
    pub(crate) status: Vec<u8>,
    /// One list per field; empty for fixed shapes.
    lens: Vec<Vec<u64>>,
    /// One list per field; empty for fields with a stride.
    offsets: Vec<Vec<u64>>,
    /// The bad samples, moved here from the slot.
    bad: Mutex<Vec<BadSample>>,
}

impl BatchHead {
    /// Makes an empty head with capacity for slots of this layout.
    pub(crate) fn new(slot: &Layout) -> Self {
        let rows = slot.rows();
        let lens = slot
            .fields()
            .iter()
            .map(|field| Vec::with_capacity(field.lens.map_or(0, |_| rows)));
        let ids = Vec::with_capacity(rows);
        let status = Vec::with_capacity(rows);
        let offsets = slot
            .fields()
            .iter()
            .map(|field| Vec::with_capacity(field.packed.map_or(0, |_| rows + 1)))
            .collect();
        Self {
            ids,
            status,
            lens: lens.collect(),
            offsets,
            ..Self::default()
        }
    }

    pub(crate) fn take(&mut self, slot: &Filled, now: u64) {
        self.times = (slot.times().read_all(), now);
        self.ticket = slot.ticket();
        self.rows = slot.rows();
        self.valid = slot.valid();
        refill(&mut self.ids, slot.ids());
        refill(&mut self.status, slot.status());
        *self.bad.get_mut().unwrap_or_else(PoisonError::into_inner) = slot.take_bad();
        for (field, lens) in self.lens.iter_mut().enumerate() {
            refill(lens, slot.lens(field).unwrap_or_default());
        }
        for (field, offsets) in self.offsets.iter_mut().enumerate() {
            refill(offsets, slot.offsets(field).unwrap_or_default());
        }
    }
}

fn refill<T: Copy>(list: &mut Vec<T>, from: &[T]) {
    list.clear();
    list.extend_from_slice(from);
}

/// A batch's contents in device memory. Dropping it releases the memory.
pub struct OnDevice(Option<Box<Buffer>>);

impl OnDevice {
    pub(crate) fn new(memory: Box<Buffer>) -> Self {
        Self(Some(memory))
    }

    fn head(&self) -> &BatchHead {
        &self.memory().head
    }

    pub fn memory(&self) -> &Buffer {
        self.0.as_deref().expect("taken only by drop")
    }

    pub fn ticket(&self) -> Ticket {
        self.head().ticket
    }

    pub fn times(&self) -> ([u64; 3], u64) {
        self.head().times
    }

    pub fn rows(&self) -> usize {
        self.head().rows
    }

    pub fn valid(&self) -> usize {
        self.head().valid
    }

    pub fn ids(&self) -> &[u64] {
        &self.head().ids
    }

    pub fn status(&self) -> &[u8] {
        &self.head().status
    }

    pub fn take_bad(&self) -> Vec<BadSample> {
        std::mem::take(&mut *self.head().bad.hold())
    }

    pub fn row_bytes(&self, field: usize) -> usize {
        self.memory()
            .layout()
            .row_bytes(field, self.head().ticket.group)
    }

    pub fn lens(&self, field: usize) -> Option<&[u64]> {
        self.memory().layout().fields()[field]
            .lens
            .map(|_| &*self.head().lens[field])
    }

    pub fn offsets(&self, field: usize) -> Option<&[u64]> {
        self.memory().layout().fields()[field]
            .packed
            .map(|_| &*self.head().offsets[field])
    }

    /// Address of row 0 of the field. Only for work on bound streams.
    pub fn ptr(&self, field: usize) -> DevicePtr {
        self.memory().base() + self.memory().layout().fields()[field].offset as DevicePtr
    }

    /// Address of the lengths of an `UpTo` field. Only for work on bound streams.
    pub fn lens_ptr(&self, field: usize) -> Option<DevicePtr> {
        let offset = self.memory().layout().fields()[field].lens?;
        Some(self.memory().base() + offset as DevicePtr)
    }

    /// Address of the offsets of a packed field. Only for work on bound streams.
    pub fn offsets_ptr(&self, field: usize) -> Option<DevicePtr> {
        let packed = self.memory().layout().fields()[field].packed?;
        Some(self.memory().base() + packed.offsets as DevicePtr)
    }

    /// Address of an array in device memory. Only for work on bound streams.
    pub fn place(&self, array: Array) -> Option<DevicePtr> {
        match array {
            Array::Field(field) => Some(self.ptr(field)),
            Array::Lens(field) => self.lens_ptr(field),
            Array::Offsets(field) => self.offsets_ptr(field),
            Array::Ids | Array::Status => None,
        }
    }

    /// Copies bytes of a field's array to the host, starting at byte `from`, and waits for them.
    pub fn read_back(&self, field: usize, from: usize, to: &mut [u8]) -> Result<()> {
        self.memory()
            .read_back(self.memory().layout().fields()[field].offset + from, to)
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Buffer::release);
    }
}
