//! Delivered batches, and the restoration of their order.

use crate::dlpack;
use crate::dlpack::raw::DLDevice;
use crate::dlpack::{BatchStreams, Dlpack, Parts, Tensors};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::process::Process;
use feedline_base::setting::Setting;
use feedline_core::ledger::BadSample;
use feedline_core::memory::{Array, Filled, Ticket};
use feedline_core::tensor::{DType, Element, Field, Shape};
use feedline_device::backend::OnDevice;
#[cfg(feature = "cudarc")]
use feedline_device::cuda::FieldSlice;
use feedline_device::{Bound, Device, DeviceKind, Stream, StreamUse};
use feedline_report::meter::{BatchRecord, Meters, Stay};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Data that all batches of a loader share.
pub(crate) struct BatchInfo {
    /// Delivered fields.
    pub(crate) keep: Vec<KeptField>,
    pub(crate) device: Device,
    /// Maximum number of batches that the user can hold, and the setting that limits it.
    pub(crate) most: usize,
    pub(crate) permit: Setting,
    /// Streams bound to every batch.
    pub(crate) streams: Vec<Bound>,
    /// Batches that the user holds.
    pub(crate) held: AtomicUsize,
    pub(crate) meters: Arc<Meters>,
    /// The process that built the loader.
    pub(crate) process: Process,
}

impl BatchInfo {
    /// Whether one of the builder's streams takes the batches.
    pub(crate) fn takes(&self) -> bool {
        self.streams
            .iter()
            .any(|bound| bound.how == StreamUse::Takes)
    }
}

/// A delivered field.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeptField {
    /// Index in the contents.
    pub(crate) index: usize,
    /// The field as the user sees it.
    pub(crate) field: Field,
}

/// A copy of a host list, made for a consumer. It counts as a tensor of its batch.
struct HostList {
    #[expect(dead_code, reason = "the consumer has its address")]
    list: Vec<u64>,
    batch: Arc<Batch>,
}

impl dlpack::Owner for HostList {
    fn bind(&self, stream: usize) -> Result<()> {
        dlpack::Owner::bind(&self.batch, stream)
    }
}

impl dlpack::Owner for Arc<Batch> {
    fn bind(&self, stream: usize) -> Result<()> {
        Batch::bind(self, Stream::promised(stream))
    }

    fn bind_any(&self) -> Result<()> {
        self.info.process.check()?;
        match self.contents() {
            Contents::Host(_) => Ok(()),
            Contents::Device(on_device) => on_device.memory().bind_any(),
        }
    }
}

impl dlpack::Streams for Batch {
    fn bind_as(&self, stream: &Stream, how: StreamUse) -> Result<()> {
        Batch::bind_as(self, stream, how)
    }

    fn bound(&self) -> Option<Vec<(usize, StreamUse)>> {
        match self.contents() {
            Contents::Host(_) => None,
            Contents::Device(on_device) => Some(on_device.memory().bound()),
        }
    }

    fn holds(&self, address: u64) -> bool {
        let Contents::Device(on_device) = self.contents() else {
            return false;
        };
        let start = on_device.memory().base();
        (start..start + on_device.memory().layout().bytes() as u64).contains(&address)
    }
}

/// The arrays of a batch, on the host or on a device.
pub(crate) enum Contents {
    Host(Filled),
    Device(OnDevice),
}

/// Calls the same method on either variant.
macro_rules! on {
    ($contents:expr, $inner:ident => $call:expr) => {
        match $contents {
            Contents::Host($inner) => $call,
            Contents::Device($inner) => $call,
        }
    };
}

impl Contents {
    pub(crate) fn ticket(&self) -> Ticket {
        on!(self, inner => inner.ticket())
    }

    fn row_bytes(&self, field: usize) -> usize {
        on!(self, inner => inner.row_bytes(field))
    }

    /// Records that the consumer received the batch. On a device, its slot is released separately.
    fn held(&self, meters: &Meters) {
        match self {
            Self::Host(filled) => {
                filled.hand_out();
                meters
                    .slots
                    .move_to(filled.times(), Stay::Held, meters.clock.now());
            }
            Self::Device(_) => {}
        }
    }

    /// When the batch was planned, its last read ended and its slot was full; then (0 on the host)
    /// when its copy was submitted.
    fn times(&self) -> ([u64; 3], u64) {
        match self {
            Self::Host(filled) => (filled.times().read_all(), 0),
            Self::Device(on_device) => on_device.times(),
        }
    }

    /// The failed samples whose rows got substitutes, by row.
    pub(crate) fn take_bad(&self) -> Vec<BadSample> {
        on!(self, inner => inner.take_bad())
    }

    /// The error of the failed row with the lowest index. A failed batch is never copied to a
    /// device.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        match self {
            Self::Host(filled) => filled.take_failure(),
            Self::Device(_) => None,
        }
    }
}

/// A batch: named arrays with the same number of rows. Dropping it releases its memory for reuse.
///
/// Owned: it may outlive its [`Epoch`](crate::Epoch) and [`Loader`](crate::Loader).
///
/// A forked child has a copy of the batches that its parent held on the host, and may read and
/// write them. GPU memory does not belong to the child.
pub struct Batch {
    /// Taken only by `drop`.
    contents: Option<Contents>,
    info: Arc<BatchInfo>,
    /// The batch's number in the profiler, once recorded.
    recorded: Option<u64>,
}

impl Batch {
    /// Errors: a broken device, or a builder's stream that cannot wait for the batch.
    pub(crate) fn new(contents: Contents, info: Arc<BatchInfo>) -> Result<Self> {
        info.held.fetch_add(1, Ordering::Relaxed);
        let batch = Self {
            contents: Some(contents),
            info,
            recorded: None,
        };
        batch.contents().held(&batch.info.meters);
        if let Contents::Device(on_device) = batch.contents() {
            on_device.memory().hand_out(&batch.info.streams)?;
        }
        Ok(batch)
    }

    fn contents(&self) -> &Contents {
        self.contents.as_ref().expect("taken only by drop")
    }

    /// Number of rows. The last batch of an epoch may have fewer. In a grouped order, each group
    /// has its own number of rows.
    ///
    /// [`valid`](Self::valid) rows hold samples; the others are padding.
    #[allow(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        on!(self.contents(), inner => inner.rows())
    }

    /// Index of the batch in its epoch.
    pub fn index(&self) -> u64 {
        self.contents().ticket().batch
    }

    /// The epoch of the batch.
    pub fn epoch(&self) -> u64 {
        self.contents().ticket().epoch
    }

    /// In a [grouped order](crate::Order::grouped), the number of the group that contains all
    /// samples of the batch.
    pub fn group(&self) -> Option<usize> {
        self.contents().ticket().group.map(usize::from)
    }

    /// Rows that hold samples of the epoch; the others are padding (see
    /// [`LastBatch`](crate::LastBatch)). Samples come first.
    ///
    /// Less than [`len`](Self::len) only in the last batch of an epoch, or of a group.
    pub fn valid(&self) -> usize {
        on!(self.contents(), inner => inner.valid())
    }

    /// Sample ids, one per row: indices in the loader's dataset, `u64::MAX` for a blank row.
    pub fn ids(&self) -> &[u64] {
        on!(self.contents(), inner => inner.ids())
    }

    /// Validity of each row, as values of [`Status`](crate::Status).
    pub fn status(&self) -> &[u8] {
        on!(self.contents(), inner => inner.status())
    }

    /// Device that holds the fields.
    pub fn device(&self) -> &Device {
        &self.info.device
    }

    /// The fields, in order.
    pub fn fields(&self) -> impl Iterator<Item = FieldView<'_>> {
        self.all().fields()
    }

    /// The field named `name`.
    ///
    /// Errors: [`ErrorKind::Shape`] with the names of the fields.
    pub fn field(&self, name: &str) -> Result<FieldView<'_>> {
        self.all().field(name)
    }

    /// Splits the batch into `count` parts for gradient accumulation, as views without a copy.
    ///
    /// Each part is a range of consecutive rows, and the part lengths differ by at most one. A
    /// batch with fewer than `count` rows has one part per row.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// # let loader = Loader::builder(Records::builder(1).open_bytes([7; 10])?).batch_size(10).build()?;
    /// let batch = loader.epoch(0)?.next().unwrap()?;
    /// let rows: Vec<usize> = batch.micro(4)?.map(|part| part.len()).collect();
    /// assert_eq!(rows, [3, 3, 2, 2]);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] for 0 parts.
    pub fn micro(&self, count: usize) -> Result<impl ExactSizeIterator<Item = MicroBatch<'_>>> {
        if count == 0 {
            return Err(Error::new(
                ErrorKind::Config,
                Stage::Batch,
                "a batch cannot be split into 0 parts; use 1 or more",
            ));
        }
        let count = count.min(self.len());
        let least = self.len() / count;
        let longer = self.len() % count;
        let start = move |part: usize| part * least + part.min(longer);
        Ok((0..count).map(move |part| MicroBatch {
            batch: self,
            start: start(part),
            end: start(part + 1),
        }))
    }

    /// Makes `stream` wait for the batch's copy. The memory is reused only after the stream has
    /// finished all work submitted to it before the batch was dropped.
    ///
    /// The first stream bound this way counts as the batch's consumer, and its idle time is
    /// measured. Bind other streams with [`bind_as`](Self::bind_as). Streams of
    /// [`LoaderBuilder::stream`](crate::LoaderBuilder::stream) are bound already. Has no effect on
    /// a batch on the host.
    ///
    /// Errors: [`ErrorKind::Config`] for a stream of another context, and while a CUDA graph is
    /// captured from the stream (see [CUDA graphs](crate::device::cuda#cuda-graphs));
    /// [`ErrorKind::Device`] if the device fails; [`ErrorKind::Forked`].
    pub fn bind(&self, stream: impl std::borrow::Borrow<Stream>) -> Result<()> {
        self.bind_as(stream, StreamUse::Takes)
    }

    /// Like [`bind`](Self::bind); `how` says how the stream uses the batch.
    pub fn bind_as(&self, stream: impl std::borrow::Borrow<Stream>, how: StreamUse) -> Result<()> {
        self.info.process.check()?;
        match self.contents() {
            Contents::Host(_) => Ok(()),
            Contents::Device(on_device) => on_device.memory().bind(stream.borrow(), how),
        }
    }

    /// Declares that `stream` also works on the batch, after a bound stream. The memory is reused
    /// only after `stream` has finished all work submitted to it before the batch was dropped. The
    /// stream does not wait for the copy.
    ///
    /// This is [`StreamUse::Releases`], like PyTorch's `record_stream`. Errors: see
    /// [`bind`](Self::bind).
    pub fn used_on(&self, stream: impl std::borrow::Borrow<Stream>) -> Result<()> {
        self.bind_as(stream, StreamUse::Releases)
    }

    /// Exports the batch as tensors for another framework, without a copy. Consumers may write to
    /// them, from any thread.
    ///
    /// The batch counts as held until the last tensor is freed; then its memory is reused.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// # let loader = Loader::builder(Records::builder(4).open_bytes([7; 40])?).batch_size(10).build()?;
    /// let batch = loader.epoch(0)?.next().unwrap()?;
    /// for (name, tensor) in batch.into_dlpack().fields {
    ///     assert_eq!((name.as_str(), tensor.shape()), ("record", [10, 4].as_slice()));
    ///     let managed = tensor.into_versioned(); // for Python: into a capsule called `dltensor_versioned`
    ///     // The consumer finally calls:
    ///     unsafe { (managed.as_ref().deleter.unwrap())(managed.as_ptr()) };
    /// }
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn into_dlpack(self) -> Tensors {
        let batch = Arc::new(self);
        let rows = [batch.len()];
        let mut fields = Vec::new();
        let mut lens = Vec::new();
        let mut offsets = Vec::new();
        for field in batch.fields() {
            let name = || field.name().to_string();
            fields.push((
                name(),
                batch.export(
                    Array::Field(field.kept.index),
                    field.dtype(),
                    &field.shape(),
                ),
            ));
            if field.lens().is_some() {
                lens.push((
                    name(),
                    batch.export(Array::Lens(field.kept.index), DType::U64, &rows),
                ));
            }
        }
        for field in batch.fields().filter(|field| field.offsets().is_some()) {
            let array = batch.export(Array::Offsets(field.kept.index), DType::U64, &[rows[0] + 1]);
            offsets.push((field.name().to_string(), array));
        }
        let ids = batch.export(Array::Ids, DType::U64, &rows);
        let status = batch.export(Array::Status, DType::U8, &rows);
        Tensors {
            fields,
            lens,
            offsets,
            ids,
            status,
            streams: BatchStreams::of(&batch),
        }
    }

    /// Call only from `into_dlpack`: it consumes the batch, so no borrow of the batch exists.
    fn export(self: &Arc<Self>, array: Array, dtype: DType, shape: &[usize]) -> Dlpack {
        // No slot has 2^63 bytes.
        let numbers = |list: &[usize]| list.iter().map(|number| *number as i64).collect::<Vec<_>>();
        let strides = numbers(&dense_strides(shape));
        let shape = numbers(shape);
        let (data, device, owner): (_, _, Box<dyn dlpack::Owner>) = match self.contents() {
            Contents::Host(filled) => (
                filled.ptr(array).cast(),
                DLDevice::CPU,
                Box::new(self.clone()),
            ),
            Contents::Device(on_device) => match on_device.place(array) {
                Some(address) => (
                    address as *mut c_void,
                    dl_device(on_device.memory().kind()),
                    Box::new(self.clone()),
                ),
                // A host list that this crate still reads: consumers get a copy, which they may
                // write to.
                None => {
                    let bytes = match array {
                        Array::Status => on_device.status(),
                        _ => bytemuck::cast_slice(on_device.ids()),
                    };
                    let mut list = vec![0_u64; bytes.len().div_ceil(8)];
                    bytemuck::cast_slice_mut(&mut list)[..bytes.len()].copy_from_slice(bytes);
                    (
                        list.as_mut_ptr().cast(),
                        DLDevice::CPU,
                        Box::new(HostList {
                            list,
                            batch: self.clone(),
                        }),
                    )
                }
            },
        };
        Dlpack::new(Parts {
            data,
            device,
            dtype,
            shape,
            strides,
            owner,
            counted: None,
        })
    }

    fn all(&self) -> MicroBatch<'_> {
        MicroBatch {
            batch: self,
            start: 0,
            end: self.len(),
        }
    }

    /// Records the batch for the profiler. `asked_ns` and `got_ns` are times of the loader's clock.
    pub(crate) fn record(&mut self, first: bool, asked_ns: u64, got_ns: u64) {
        let ([planned_ns, read_ns, full_ns], copied_ns) = self.contents().times();
        let ticket = self.contents().ticket();
        let epoch = ticket.epoch;
        let batch = ticket.batch;
        let rows = self.len() as u32;
        let mut record = BatchRecord::default();
        record.epoch = epoch;
        record.batch = batch;
        record.rows = rows;
        record.planned_ns = planned_ns;
        record.read_ns = read_ns;
        record.full_ns = full_ns;
        record.copied_ns = copied_ns;
        record.first = first;
        record.asked_ns = asked_ns;
        record.got_ns = got_ns;
        let meters = &self.info.meters;
        self.recorded = Some(meters.recorder.note(record, meters.gauges(got_ns)));
    }

    /// Total bytes of the fields.
    pub(crate) fn bytes(&self) -> usize {
        self.fields().map(|field| field.size_bytes()).sum()
    }
}

/// Checks at compile time that any thread may drop the last tensor, which drops the batch.
const _: () = {
    const fn is_shared<T: Send + Sync + 'static>() {}
    is_shared::<Batch>();
};

impl Drop for Batch {
    fn drop(&mut self) {
        if self.info.process.is_forked() {
            // Returning the memory would take locks that the parent's threads may have held at the
            // fork, and wake those threads. A device belongs to the parent. This leaks only the
            // child's copy.
            return std::mem::forget((self.contents.take(), self.info.clone()));
        }
        self.info.held.fetch_sub(1, Ordering::Relaxed);
        if let Some(number) = self.recorded {
            self.info
                .meters
                .recorder
                .dropped(number, self.info.meters.clock.now());
        }
        // Contents still here are dropped now: `Filled` frees its slot, `OnDevice` releases its
        // buffer.
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch {} of epoch {}:", self.index(), self.epoch())?;
        for field in self.fields() {
            write!(f, " {field:?}")?;
        }
        Ok(())
    }
}

/// A part of a batch, see [`Batch::micro`].
#[derive(Clone, Copy)]
pub struct MicroBatch<'a> {
    batch: &'a Batch,
    start: usize,
    end: usize,
}

impl<'a> MicroBatch<'a> {
    /// Number of rows.
    #[allow(clippy::len_without_is_empty, reason = "a part is never empty")]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Rows that hold samples of the epoch; they come first. May be 0.
    pub fn valid(&self) -> usize {
        self.batch.valid().clamp(self.start, self.end) - self.start
    }

    /// The part's rows in the batch.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.start..self.end
    }

    /// Sample ids, one per row.
    pub fn ids(&self) -> &'a [u64] {
        &self.batch.ids()[self.rows()]
    }

    /// Validity of each row, as values of [`Status`](crate::Status).
    pub fn status(&self) -> &'a [u8] {
        &self.batch.status()[self.rows()]
    }

    /// The fields, in order.
    pub fn fields(&self) -> impl Iterator<Item = FieldView<'a>> + use<'a> {
        let Self { batch, start, end } = *self;
        batch.info.keep.iter().map(move |kept| FieldView {
            contents: batch.contents(),
            kept,
            start,
            end,
        })
    }

    /// The field named `name`.
    ///
    /// Errors: [`ErrorKind::Shape`] with the names of the fields.
    pub fn field(&self, name: &str) -> Result<FieldView<'a>> {
        self.fields()
            .find(|field| field.name() == name)
            .ok_or_else(|| {
                let names: Vec<_> = self.fields().map(|field| field.name()).collect();
                let message = format!(
                    "no field `{name}` in the batch; its fields are {}",
                    names.join(", ")
                );
                Error::new(ErrorKind::Shape, Stage::Batch, message)
            })
    }
}

impl std::fmt::Debug for MicroBatch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rows {:?} of {:?}", self.rows(), self.batch)
    }
}

/// One field of a batch or part, stored densely, row after row. The first dimension counts the
/// rows.
#[derive(Clone, Copy)]
pub struct FieldView<'a> {
    contents: &'a Contents,
    kept: &'a KeptField,
    /// First row in the batch.
    start: usize,
    end: usize,
}

impl<'a> FieldView<'a> {
    fn field(&self) -> &'a Field {
        &self.kept.field
    }

    /// The name.
    pub fn name(&self) -> &'a str {
        self.field().name()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.field().dtype()
    }

    /// Dimensions, rows first. The second dimension of an `UpTo` field is its maximum; in a grouped
    /// order, the maximum [given](crate::order::Groups::up_to) for the batch's group. The first
    /// dimension of a packed field is the total number of elements of all rows.
    pub fn shape(&self) -> Vec<usize> {
        if self.field().is_packed() {
            return self.field().packed_shape(self.span().len());
        }
        let mut shape: Vec<_> = std::iter::once(self.end - self.start).collect();
        shape.extend(self.field().dims_in(self.contents.ticket().group));
        if self.field().is_up_to() {
            shape[1] = self.most();
        }
        shape
    }

    /// Maximum length of the rows of an `UpTo` field in this batch.
    fn most(&self) -> usize {
        self.contents.row_bytes(self.kept.index) / self.field().unit_bytes()
    }

    /// Strides in elements, per dimension (row-major, dense).
    pub fn strides(&self) -> Vec<usize> {
        dense_strides(&self.shape())
    }

    /// Actual length (first dimension) of each row of an `UpTo` field; `None` for fixed shapes.
    pub fn lens(&self) -> Option<&'a [u64]> {
        on!(self.contents, inner => inner.lens(self.kept.index))
            .map(|lens| &lens[self.start..self.end])
    }

    /// Where the rows of a packed field begin and end: row `i` has the elements
    /// `offsets[i]..offsets[i + 1]` of the first dimension. `None` for fields that are not packed.
    ///
    /// There is one more offset than rows. In a [part](Batch::micro) of a batch, subtract
    /// `offsets[0]`. The offsets are on the host, even for a batch on a device.
    pub fn offsets(&self) -> Option<&'a [u64]> {
        on!(self.contents, inner => inner.offsets(self.kept.index))
            .map(|offsets| &offsets[self.start..=self.end])
    }

    /// All elements, row after row; booleans as `u8`.
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the dtype, [`ErrorKind::Device`] if the batch is
    /// on a device.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        self.check_dtype::<T>()?;
        self.as_bytes().map(bytemuck::cast_slice)
    }

    /// Elements of one row; for an `UpTo` field without the padding.
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the dtype or the row does not exist.
    pub fn row<T: Element>(&self, row: usize) -> Result<&'a [T]> {
        let all = self.as_slice::<T>()?;
        let rows = self.end - self.start;
        if row >= rows {
            let message = format!("no row {row} in a batch of {rows}");
            return Err(Error::new(ErrorKind::Shape, Stage::Batch, message));
        }
        if let Some(offsets) = self.offsets() {
            let each = self.field().unit_bytes() / size_of::<T>();
            let at = |row: usize| (offsets[row] - offsets[0]) as usize * each;
            return Ok(&all[at(row)..at(row + 1)]);
        }
        let row_len = all.len() / rows;
        let used = match (self.field().shape(), self.lens()) {
            (Shape::UpTo { .. }, Some(lens)) => {
                row_len / self.most() * (lens[row] as usize).min(self.most())
            }
            _ => row_len,
        };
        Ok(&all[row * row_len..row * row_len + used])
    }

    /// All bytes, row after row, in native byte order.
    ///
    /// Errors: [`ErrorKind::Device`] if the batch is on a device.
    pub fn as_bytes(&self) -> Result<&'a [u8]> {
        match self.contents {
            Contents::Host(filled) => Ok(&filled.bytes(self.kept.index)[self.span()]),
            Contents::Device(on_device) => Err(self.elsewhere(on_device)),
        }
    }

    /// Copies all elements, row after row, from the host or a device; see
    /// [`read_into`](Self::read_into).
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the dtype, [`ErrorKind::Device`] if the device
    /// fails.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.check_dtype::<T>()?;
        let mut elements = vec![T::zeroed(); self.size_bytes() / size_of::<T>()];
        self.read_into(bytemuck::cast_slice_mut(&mut elements))?;
        Ok(elements)
    }

    /// Copies all [bytes](Self::size_bytes) to `out`, from the host or a device.
    ///
    /// From a device this waits for the copy: use it to inspect data, not to train.
    ///
    /// Errors: [`ErrorKind::Shape`] if the length of `out` differs, [`ErrorKind::Device`] if the
    /// device fails.
    pub fn read_into(&self, out: &mut [u8]) -> Result<()> {
        if out.len() != self.size_bytes() {
            let message = format!(
                "field `{}` has {} bytes, but the target has {}",
                self.name(),
                self.size_bytes(),
                out.len()
            );
            return Err(Error::new(ErrorKind::Shape, Stage::Batch, message));
        }
        match self.contents {
            Contents::Host(_) => out.copy_from_slice(self.as_bytes()?),
            Contents::Device(on_device) => {
                on_device.read_back(self.kept.index, self.span().start, out)?
            }
        }
        Ok(())
    }

    /// Bytes of all elements.
    pub fn size_bytes(&self) -> usize {
        self.span().len()
    }

    /// Byte range of the field's array.
    fn span(&self) -> std::ops::Range<usize> {
        if let Some(offsets) = self.offsets() {
            let unit = self.field().unit_bytes();
            return offsets[0] as usize * unit..offsets[self.end - self.start] as usize * unit;
        }
        let row_bytes = self.contents.row_bytes(self.kept.index);
        self.start * row_bytes..self.end * row_bytes
    }

    fn check_dtype<T: Element>(&self) -> Result<()> {
        if self.dtype().is_seen_as::<T>() {
            return Ok(());
        }
        let message = format!(
            "field `{}` holds {}, not {}",
            self.name(),
            self.dtype(),
            T::DTYPE
        );
        Err(Error::new(ErrorKind::Shape, Stage::Batch, message))
    }
}

/// Fields in device memory.
impl<'a> FieldView<'a> {
    /// The field as a cudarc slice, for work on `stream`, which is [bound](Batch::bind) to the
    /// batch.
    ///
    /// The elements are dense, row after row.
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the dtype, [`ErrorKind::Device`] if the batch is
    /// on the host, [`ErrorKind::Config`] for a stream of another context.
    #[cfg(feature = "cudarc")]
    pub fn cuda_slice<T: Element>(
        &self,
        stream: &Arc<cudarc::driver::CudaStream>,
    ) -> Result<FieldSlice<'a, T>> {
        self.check_dtype::<T>()?;
        let on_device = self.on_device()?;
        on_device
            .memory()
            .bind(&Stream::from(stream), StreamUse::Takes)?;
        let ptr = on_device.ptr(self.kept.index) + self.span().start as u64;
        FieldSlice::of(on_device, stream, ptr, self.size_bytes() / size_of::<T>())
    }

    /// Device address of the first element.
    ///
    /// If no stream is bound to the batch, this binds the legacy default stream: work on other
    /// streams needs [`Batch::bind`] first.
    ///
    /// Errors: [`ErrorKind::Device`] if the batch is on the host.
    pub fn device_ptr(&self) -> Result<u64> {
        let on_device = self.on_device()?;
        on_device.memory().bind_any()?;
        Ok(on_device.ptr(self.kept.index) + self.span().start as u64)
    }

    /// Device address of the [lengths](Self::lens) of an `UpTo` field, `u64` each.
    ///
    /// Errors: see [`device_ptr`](Self::device_ptr).
    pub fn device_lens_ptr(&self) -> Result<Option<u64>> {
        let on_device = self.on_device()?;
        on_device.memory().bind_any()?;
        Ok(on_device
            .lens_ptr(self.kept.index)
            .map(|ptr| ptr + 8 * self.start as u64))
    }

    /// Device address of the [offsets](Self::offsets) of a packed field, `u64` each.
    ///
    /// Errors: see [`device_ptr`](Self::device_ptr).
    pub fn device_offsets_ptr(&self) -> Result<Option<u64>> {
        let on_device = self.on_device()?;
        on_device.memory().bind_any()?;
        Ok(on_device
            .offsets_ptr(self.kept.index)
            .map(|ptr| ptr + 8 * self.start as u64))
    }

    fn on_device(&self) -> Result<&'a OnDevice> {
        match self.contents {
            Contents::Device(on_device) => Ok(on_device),
            Contents::Host(_) => {
                let message = format!("field `{}` is on the host: use `as_slice`", self.name());
                Err(Error::new(ErrorKind::Device, Stage::Batch, message))
            }
        }
    }

    fn elsewhere(&self, on_device: &OnDevice) -> Error {
        let name = self.name();
        let device = on_device.memory().kind();
        let message =
            format!("field `{name}` is on {device}: use `device_ptr`, or copy it by `to_vec`");
        Error::new(ErrorKind::Device, Stage::Batch, message)
    }
}

impl std::fmt::Debug for FieldView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}{:?}", self.name(), self.dtype(), self.shape())
    }
}

fn dl_device(kind: DeviceKind) -> DLDevice {
    match kind.ordinal() {
        None => DLDevice::CPU,
        Some(ordinal) => DLDevice::cuda(ordinal as i32),
    }
}

/// Strides in elements of a dense array.
fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// Restores the order of items numbered 0, 1, 2 …, none of which arrives `window` or more numbers
/// early. Pure.
pub(crate) struct Reorder<T> {
    places: Vec<Option<T>>,
    next: u64,
}

impl<T> Reorder<T> {
    pub(crate) fn new(window: usize) -> Self {
        Self {
            places: (0..window).map(|_| None).collect(),
            next: 0,
        }
    }

    /// Adds item number `sequence`. Panics if the item is outside the window or already present.
    /// Callers stay inside the window, because the number of slots limits how many items are under
    /// way.
    pub(crate) fn put(&mut self, sequence: u64, item: T) {
        assert!(
            sequence >= self.next && sequence - self.next < self.places.len() as u64,
            "outside of the window"
        );
        let index = (sequence % self.places.len() as u64) as usize;
        assert!(
            self.places[index].replace(item).is_none(),
            "the same number twice"
        );
    }

    /// The next item in order, if it has arrived.
    pub(crate) fn take(&mut self) -> Option<T> {
        let index = (self.next % self.places.len() as u64) as usize;
        let item = self.places[index].take()?;
        self.next += 1;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn items_come_out_in_order_for_any_arrival(window in 1_usize..9, count in 0_u64..60, seed in any::<u64>()) {
            let mut reorder = Reorder::new(window);
            let mut waiting = Vec::new();
            let mut next_in = 0;
            let mut out = Vec::new();
            let mut state = seed;
            while (out.len() as u64) < count {
                // At most `window` numbers are in flight, one per slot.
                while next_in < count && next_in < out.len() as u64 + window as u64 {
                    waiting.push(next_in);
                    next_in += 1;
                }
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let number = waiting.swap_remove((state >> 33) as usize % waiting.len());
                reorder.put(number, number);
                out.extend(std::iter::from_fn(|| reorder.take()));
            }
            prop_assert_eq!(out, (0..count).collect::<Vec<_>>());
        }
    }
}
