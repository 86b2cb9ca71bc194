//! What a loader asks of a device. The host and CUDA are the two backends; both are there in every build, CUDA's only when it was
//! compiled in.
//!
//! ```text
//! Backend              the device: its place, its streams
//!   └─ lane() ──► Lane          one loader: memory of its batches, offered to direct reads
//!        └─ open() ──► Engine        the transfer thread's: pins slots, runs the operations of a batch
//!        │    └─ copy() ──► OnDevice     a batch in the consumer's hands
//!        └────────► DirectReader, IdleMeter
//! ```
//!
//! What happens to a batch on its way is one list, [`DeviceOp`]: a new step is a variant there, made by `pipeline/recipe.rs`, run
//! by the engine.

#![allow(unsafe_code)]

use super::{DeviceKind, DeviceOp, Stream};
use crate::error::{Error, Result};
use crate::ledger::BadSample;
use crate::memory::{Array, Filled, Region, Ticket};
use crate::meter::{Clock, GpuIdle, Track};
use crate::sync::Hold;
use crate::tensor::Layout;
use crossbeam_channel::{Receiver, Sender};
use rustix::fd::OwnedFd;
use std::any::Any;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// An address in device memory.
pub(crate) type DevicePtr = u64;

/// A device: the host or a GPU.
pub(crate) trait Backend: Send + Sync {
    fn kind(&self) -> DeviceKind;

    /// What it is called, for people.
    fn name(&self) -> &str;

    /// Where it sits, as in `/sys/bus/pci/devices`.
    fn pci_bus_id(&self) -> Option<&str>;

    /// Refuses a stream that could order nothing on this device.
    fn check_stream(&self, stream: &Stream) -> Result<()>;

    /// Refuses a stream that is captured into a graph: no batch may be bound to it now.
    fn check_uncaptured(&self, stream: &Stream) -> Result<()>;

    /// Does what makes many calls of the device on this thread.
    fn within(&self, work: &mut dyn FnMut());

    /// The memory of a new loader's batches. None: batches are handed out in their slots.
    fn lane(self: Arc<Self>) -> Option<Box<dyn Lane>>;
}

/// The host: slots are handed out as they are.
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

    fn lane(self: Arc<Self>) -> Option<Box<dyn Lane>> {
        None
    }
}

/// A loader's part of a device, while `build` decides.
pub(crate) trait Lane: Send {
    /// Opens a way from files into device memory and reads a little by it; says how the bytes went, or why it is not used.
    fn open_direct(&mut self, trial: DirectTrial) -> Result<String, String>;

    /// Direct reads are not used after all.
    fn close_direct(&mut self);

    /// Reserves the memory of `count` batches of `bytes` bytes, where it is to be offered to direct reads.
    fn reserve(&mut self, count: usize, bytes: usize) -> Result<(), Unreserved>;

    /// The direct reads that were opened.
    fn direct(&self) -> Option<Arc<dyn DirectReader>>;

    /// Reserves what is missing, and opens the streams.
    fn open(self: Box<Self>, setup: Setup) -> Result<Opened>;
}

/// Why batches have no memory.
pub(crate) enum Unreserved {
    /// Direct reads cannot take it, the reason; other ways can.
    ForDirect(Error),
    Failed(Error),
}

/// A read that shows which way bytes take.
pub(crate) struct DirectTrial {
    /// A file opened with O_DIRECT, or why there is none.
    pub(crate) file: Box<dyn FnOnce() -> Result<OwnedFd, String>>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Whatever way the bytes take.
    pub(crate) required: bool,
    /// A library and the root of the file system that it shall see, for tests.
    pub(crate) library: Option<(PathBuf, PathBuf)>,
}

/// What an engine is made for.
pub(crate) struct Setup {
    /// The arrays of the slot.
    pub(crate) slot: Layout,
    /// The arrays of a batch on the device: the fields of the slot under the same numbers, then those that are made there.
    pub(crate) contents: Layout,
    /// The fields of the slot that are copied, then what happens to the batch, in order.
    pub(crate) copied: Vec<usize>,
    pub(crate) ops: Vec<DeviceOp>,
    /// Batches on the device, and slots.
    pub(crate) batches: usize,
    pub(crate) slots: usize,
    /// Rings when something ended.
    pub(crate) bell: Sender<()>,
    pub(crate) clock: Clock,
    /// Whether idle time is measured.
    pub(crate) measured: bool,
}

/// An open lane.
pub(crate) struct Opened {
    pub(crate) engine: Box<dyn Engine>,
    pub(crate) idle: Arc<dyn IdleMeter>,
}

/// Runs the operations of batches. Lives on the transfer thread.
pub(crate) trait Engine: Send {
    /// Pins a slot's memory for as long as it lives.
    fn pin(&self, region: &Region) -> Result<()>;

    /// Where buffers that are free again arrive.
    fn free(&self) -> &Receiver<Box<dyn DeviceBatch>>;

    /// A buffer for a batch, if one is free.
    fn take(&mut self) -> Option<Box<dyn DeviceBatch>>;

    /// Takes back what was taken and not used.
    fn give_back(&mut self, buffer: Box<dyn DeviceBatch>);

    /// Whether nobody uses the buffer any more: for those who write to it beside the engine. When not, the bell rings when
    /// that is so.
    fn is_idle(&self, buffer: &mut dyn DeviceBatch) -> Result<bool>;

    /// Whether a buffer that is not idle waits for consumers' streams, not for its own last copy.
    fn awaits_consumer(&self, buffer: &dyn DeviceBatch) -> bool;

    /// Gives the operations of a batch to the device.
    fn copy(&mut self, slot: Filled, buffer: Box<dyn DeviceBatch>, now: u64) -> Copied;

    /// Copies in flight.
    fn in_flight(&self) -> usize;

    /// Lets go of the slots whose copies are done; `done` gets when each was on the bus, where that is known.
    fn let_go_done(&mut self, now: u64, done: &mut dyn FnMut(Option<Range<u64>>)) -> Result<()>;

    /// What the oldest copy in flight does.
    fn oldest(&mut self, now: u64) -> Result<Oldest>;
}

/// What became of a slot.
pub(crate) enum Copied {
    /// Its copy, of so many bytes, is on its way; the slot is free again when it is done.
    Started(OnDevice, usize),
    /// It could not be copied; the next one may be.
    Failed(Filled, Error),
    /// The device is of no use any more, and still has the slot.
    Broken(Error),
}

/// What the oldest copy in flight does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Oldest {
    /// Nothing is in flight.
    Nothing,
    /// It waits for work that consumers gave their streams before they dropped the batch in its buffer.
    Blocked,
    /// The device owes it: the copies run since this time of the host's clock, or nothing but the device delays them.
    Runs(u64),
}

/// Measures how long the consumer's stream is idle.
pub(crate) trait IdleMeter: Send + Sync {
    /// `next()` was entered, for the first batch of an iterator or another one.
    fn asked(&self, first: bool);

    /// What was measured so far.
    fn totals(&self) -> GpuIdle;

    /// What the stream did last.
    fn track(&self) -> Track;
}

/// Reads from files straight into the memory of batches.
pub(crate) trait DirectReader: Send + Sync {
    /// What offsets and lengths must be multiples of.
    fn align(&self) -> u64;

    /// A file that was opened with O_DIRECT.
    fn open(&self, file: OwnedFd) -> Result<Box<dyn DirectFile>, String>;

    /// Host memory and a stream, for what cannot go directly.
    fn bounce(&self, bytes: usize) -> Result<Box<dyn Bounce>>;

    /// Which way the bytes went since it was opened.
    fn mode(&self) -> String;
}

/// A file for direct reads.
pub(crate) trait DirectFile: Send + Sync {
    /// Reads `len` bytes at `offset` of the file to `base + place`; how many there were. `base` is where a buffer begins.
    ///
    /// # Safety
    /// The bytes belong to that buffer, and nobody else uses them until the call returns; ever after, if its thread is abandoned.
    unsafe fn read(&self, base: DevicePtr, len: usize, offset: u64, place: u64) -> Result<usize, String>;
}

/// Host memory, and the way from there to the device.
pub(crate) trait Bounce: Send {
    /// All of it.
    fn bytes(&mut self) -> &mut [u8];

    /// Copies the first `len` bytes to the device and waits for that. An error says whether they may still be on their way.
    ///
    /// # Safety
    /// `[to, to + len)` belongs to a buffer, and nobody else uses it until the call returns.
    unsafe fn send(&mut self, to: DevicePtr, len: usize) -> Result<(), (Error, bool)>;
}

/// Memory of one batch on a device.
pub(crate) trait DeviceBatch: Any + Send + Sync {
    fn head(&self) -> &BatchHead;

    /// Its arrays.
    fn layout(&self) -> &Layout;

    /// Where it begins.
    fn base(&self) -> DevicePtr;

    fn kind(&self) -> DeviceKind;

    /// What `stream` is given from here on finds the data; the memory is not used again before what it was given until the
    /// batch is dropped is done. Takes `&self`, under a lock that nobody else wants.
    fn bind(&self, stream: &Stream) -> Result<()>;

    /// Binds the default stream, unless some stream is bound.
    fn bind_any(&self) -> Result<()>;

    /// Binds the streams of the builder, which `build` has checked. On a broken device no batch is handed out: its bytes may
    /// never come.
    fn hand_out(&self, streams: &[Stream]) -> Result<()>;

    /// Copies `to.len()` bytes from `from` of the batch to the host, and waits for them.
    fn read_back(&self, from: usize, to: &mut [u8]) -> Result<()>;

    /// The consumer has let go, and the same contents will be handed out again.
    fn rest(&mut self);

    /// The consumer has let go: it comes back to the engine.
    fn release(self: Box<Self>);

    /// Leaves it to the device, which may write to it for ever.
    fn leak(self: Box<Self>);
}

/// What the host keeps of a batch on a device, so that the slot can go when its copy is done.
#[derive(Default)]
pub(crate) struct BatchHead {
    pub(crate) ticket: Ticket,
    /// As of the slot; and when its copy was submitted.
    pub(crate) times: ([u64; 3], u64),
    pub(crate) rows: usize,
    pub(crate) valid: usize,
    pub(crate) ids: Vec<u64>,
    pub(crate) status: Vec<u8>,
    /// By field; empty for fixed shapes.
    lens: Vec<Vec<u64>>,
    /// By field; empty for fields with a stride.
    offsets: Vec<Vec<u64>>,
    /// As of the slot.
    bad: Mutex<Vec<BadSample>>,
}

impl BatchHead {
    /// With room for the slots of this layout.
    pub(crate) fn new(slot: &Layout) -> Self {
        let rows = slot.rows();
        let lens = slot.fields().iter().map(|field| Vec::with_capacity(field.lens.map_or(0, |_| rows)));
        let (ids, status) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        let offsets =
            slot.fields().iter().map(|field| Vec::with_capacity(field.packed.map_or(0, |_| rows + 1))).collect();
        Self { ids, status, lens: lens.collect(), offsets, ..Self::default() }
    }

    pub(crate) fn take(&mut self, slot: &Filled, now: u64) {
        self.times = (slot.times().read_all(), now);
        (self.ticket, self.rows, self.valid) = (slot.ticket(), slot.rows(), slot.valid());
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

/// The contents of a batch in device memory. Dropped, its memory goes back.
pub(crate) struct OnDevice(Option<Box<dyn DeviceBatch>>);

impl OnDevice {
    pub(crate) fn new(memory: Box<dyn DeviceBatch>) -> Self {
        Self(Some(memory))
    }

    fn head(&self) -> &BatchHead {
        self.memory().head()
    }

    pub(crate) fn memory(&self) -> &dyn DeviceBatch {
        self.0.as_deref().expect("taken only by drop")
    }

    pub(crate) fn memory_mut(&mut self) -> &mut dyn DeviceBatch {
        self.0.as_deref_mut().expect("taken only by drop")
    }

    pub(crate) fn ticket(&self) -> Ticket {
        self.head().ticket
    }

    pub(crate) fn times(&self) -> ([u64; 3], u64) {
        self.head().times
    }

    pub(crate) fn rows(&self) -> usize {
        self.head().rows
    }

    pub(crate) fn valid(&self) -> usize {
        self.head().valid
    }

    pub(crate) fn ids(&self) -> &[u64] {
        &self.head().ids
    }

    pub(crate) fn status(&self) -> &[u8] {
        &self.head().status
    }

    pub(crate) fn take_bad(&self) -> Vec<BadSample> {
        std::mem::take(&mut *self.head().bad.hold())
    }

    pub(crate) fn row_bytes(&self, field: usize) -> usize {
        self.memory().layout().fields()[field].row_bytes
    }

    pub(crate) fn lens(&self, field: usize) -> Option<&[u64]> {
        self.memory().layout().fields()[field].lens.map(|_| &*self.head().lens[field])
    }

    pub(crate) fn offsets(&self, field: usize) -> Option<&[u64]> {
        self.memory().layout().fields()[field].packed.map(|_| &*self.head().offsets[field])
    }

    /// Where row 0 of the field is. Only for work on bound streams.
    pub(crate) fn ptr(&self, field: usize) -> DevicePtr {
        self.memory().base() + self.memory().layout().fields()[field].offset as DevicePtr
    }

    /// The same of the lengths of an `UpTo` field.
    pub(crate) fn lens_ptr(&self, field: usize) -> Option<DevicePtr> {
        let offset = self.memory().layout().fields()[field].lens?;
        Some(self.memory().base() + offset as DevicePtr)
    }

    /// The same of the offsets of a packed field.
    pub(crate) fn offsets_ptr(&self, field: usize) -> Option<DevicePtr> {
        let packed = self.memory().layout().fields()[field].packed?;
        Some(self.memory().base() + packed.offsets as DevicePtr)
    }

    /// Where an array begins in device memory; in the host's for what lies there. Only for work on bound streams.
    pub(crate) fn place(&self, array: Array) -> std::result::Result<DevicePtr, *const u8> {
        match array {
            Array::Field(field) => Ok(self.ptr(field)),
            Array::Lens(field) => self.lens_ptr(field).ok_or(std::ptr::null()),
            Array::Offsets(field) => self.offsets_ptr(field).ok_or(std::ptr::null()),
            Array::Ids => Err(self.ids().as_ptr().cast()),
            Array::Status => Err(self.status().as_ptr()),
        }
    }

    /// Copies bytes from `from` of a field's array to the host, and waits for them.
    pub(crate) fn read_back(&self, field: usize, from: usize, to: &mut [u8]) -> Result<()> {
        self.memory().read_back(self.memory().layout().fields()[field].offset + from, to)
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(DeviceBatch::release);
    }
}
