//! DLPack: exports the arrays of a batch to another framework, without a copy.
//!
//! ```text
//! Batch ──into_dlpack──► Tensors: a Dlpack per array, each with an Arc of the batch
//!                                     │ into_versioned, into_legacy
//!                                     ▼
//!                          a C struct owned by the consumer ──its deleter: any thread, once──► Arc dropped
//!                                                               the last one: the batch's memory is reused
//! ```
//!
//! The structs follow `dlpack.h`: version 1.0, and the unversioned ("legacy") form for consumers
//! without `max_version`. Python wraps their address in a capsule named `dltensor_versioned` or
//! `dltensor`.
//!
//! Consumers write in place. That is sound for these reasons:
//! * The export consumes the batch, so no slice of it is or can be borrowed: the `Arc`s are only
//!   dropped. The pipeline has no access to a delivered slot.
//! * Arrays of one batch do not overlap (tested in `tensor`), so tensors do not see each other's
//!   writes.
//! * The pointers derive from the memory itself, never from a shared slice.
//! * No consumer's write survives, because the next use of the slot rewrites every array.
//!   (`.map_batch` requires the same.)
//! * The owner is `Send`. Its deleter never blocks: it decrements a count, and returns a slot or
//!   buffer. A separate thread frees the device memory of a dropped loader: `cuMemFree` waits for
//!   the device, and the device's work may need the consumer's lock (the GIL).
//!
//! Limits: nothing here reads or writes `data`. The code that makes a [`Dlpack`] promises that the
//! memory lives as long as the owner.

#![allow(unsafe_code)]

use feedline_base::error::Result;
use feedline_core::tensor::DType;
use feedline_device::{Stream, StreamUse};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

pub use raw::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};

/// The structs of `dlpack.h`.
pub(crate) mod raw {
    use feedline_core::tensor::DType;
    use std::ffi::c_void;

    /// Location of memory: `DLDevice`.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct DLDevice {
        /// 1: the host (`kDLCPU`). 2: a CUDA GPU (`kDLCUDA`).
        pub device_type: i32,
        /// Number of the device; 0 for the host.
        pub device_id: i32,
    }

    impl DLDevice {
        /// Host memory.
        pub const CPU: Self = Self {
            device_type: 1,
            device_id: 0,
        };

        /// The GPU with this number.
        pub const fn cuda(device_id: i32) -> Self {
            Self {
                device_type: 2,
                device_id,
            }
        }
    }

    /// Element type: `DLDataType`.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct DLDataType {
        /// 0: signed, 1: unsigned, 2: IEEE float, 4: bfloat, 6: bool.
        pub code: u8,
        /// Bits of one element.
        pub bits: u8,
        /// Elements of a vector type; always 1 here.
        pub lanes: u16,
    }

    impl From<DType> for DLDataType {
        fn from(dtype: DType) -> Self {
            Self {
                code: dtype.dlpack_code(),
                bits: 8 * dtype.size() as u8,
                lanes: 1,
            }
        }
    }

    /// An array: `DLTensor`.
    #[repr(C)]
    #[derive(Debug)]
    pub struct DLTensor {
        /// First element; arrays of a batch are aligned to 256 bytes.
        pub data: *mut c_void,
        /// Device of `data`.
        pub device: DLDevice,
        /// Dimensions.
        pub ndim: i32,
        /// Element type.
        pub dtype: DLDataType,
        /// `ndim` sizes; never null.
        pub shape: *mut i64,
        /// `ndim` strides in elements; never null.
        pub strides: *mut i64,
        /// Offset from `data` to the first element; always 0 here.
        pub byte_offset: u64,
    }

    /// `DLManagedTensor`, the unversioned form.
    #[repr(C)]
    #[derive(Debug)]
    pub struct DLManagedTensor {
        /// The array.
        pub dl_tensor: DLTensor,
        /// Private data of the deleter.
        pub manager_ctx: *mut c_void,
        /// Frees the struct and releases the memory. Called once, from any thread.
        pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
    }

    /// `DLPackVersion`. All structs of the same major version have the same layout.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DLPackVersion {
        /// Changes with the layout.
        pub major: u32,
        /// Changes with the features.
        pub minor: u32,
    }

    impl DLPackVersion {
        /// Version of [`Dlpack::into_versioned`](super::Dlpack::into_versioned).
        pub const OURS: Self = Self { major: 1, minor: 0 };
    }

    /// `DLManagedTensorVersioned`.
    #[repr(C)]
    #[derive(Debug)]
    pub struct DLManagedTensorVersioned {
        /// Version of this struct. A consumer that does not know the major version may only call
        /// the deleter.
        pub version: DLPackVersion,
        /// Private data of the deleter.
        pub manager_ctx: *mut c_void,
        /// Frees the struct and releases the memory. Called once, from any thread.
        pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
        /// 1: the memory is read-only.
        pub flags: u64,
        /// The array.
        pub dl_tensor: DLTensor,
    }
}

/// A batch as tensors, from [`Batch::into_dlpack`](crate::Batch::into_dlpack). The first dimension
/// of each is the rows.
#[derive(Debug)]
#[non_exhaustive]
pub struct Tensors {
    /// The fields by name, in order.
    pub fields: Vec<(String, Dlpack)>,
    /// True row lengths of each `UpTo` field, by field name: `u64`.
    pub lens: Vec<(String, Dlpack)>,
    /// Bounds of the rows of packed fields, by field name: `u64`, one more than rows.
    pub offsets: Vec<(String, Dlpack)>,
    /// Sample ids: `u64`.
    pub ids: Dlpack,
    /// Validity of each row, as values of [`Status`](crate::Status): `u8`.
    pub status: Dlpack,
    /// The streams of the batch, even after its tensors were handed over.
    pub streams: BatchStreams,
}

/// The streams of an exported batch, while one of its tensors is alive. Does not keep the batch
/// alive.
#[derive(Clone, Debug)]
pub struct BatchStreams(Weak<dyn Streams>);

/// Access to the streams of an exported batch.
pub(crate) trait Streams: Send + Sync {
    fn bind_as(&self, stream: &Stream, how: StreamUse) -> Result<()>;

    /// Handles and uses of the bound streams; `None` on the host.
    fn bound(&self) -> Option<Vec<(usize, StreamUse)>>;

    /// Whether this device address is in the batch's memory.
    fn holds(&self, address: u64) -> bool;
}

impl BatchStreams {
    pub(crate) fn of(batch: &Arc<impl Streams + 'static>) -> Self {
        let batch: Arc<dyn Streams> = batch.clone();
        Self(Arc::downgrade(&batch))
    }

    /// Binds a stream, as [`Batch::bind_as`](crate::Batch::bind_as) does. Returns false if every
    /// tensor was freed.
    ///
    /// Errors: see [`Batch::bind_as`](crate::Batch::bind_as).
    pub fn bind_as(
        &self,
        stream: impl std::borrow::Borrow<Stream>,
        how: StreamUse,
    ) -> Result<bool> {
        let Some(batch) = self.0.upgrade() else {
            return Ok(false);
        };
        batch.bind_as(stream.borrow(), how).map(|()| true)
    }

    /// Whether a tensor of the batch is still alive.
    pub fn lives(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Handle and use of each bound stream; `None` if the batch is on the host, or every tensor was
    /// freed.
    pub fn bound(&self) -> Option<Vec<(usize, StreamUse)>> {
        self.0.upgrade()?.bound()
    }

    /// Whether this device address is in the batch's memory.
    pub fn holds(&self, address: u64) -> bool {
        self.0.upgrade().is_some_and(|batch| batch.holds(address))
    }
}

/// The parts of a [`Dlpack`].
pub(crate) struct Parts {
    /// First element; null only for an array without elements. While `owner` lives, any thread may
    /// read and write it; it has no other user.
    pub(crate) data: *mut c_void,
    pub(crate) device: DLDevice,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<i64>,
    /// Strides in elements, one per dimension.
    pub(crate) strides: Vec<i64>,
    /// Dropped on any thread when the last user of the memory is done.
    pub(crate) owner: Box<dyn Owner>,
    /// The counter given to [`Dlpack::counted_by`].
    pub(crate) counted: Option<Arc<()>>,
}

/// Keeps the memory alive, and on a device orders its use.
pub(crate) trait Owner: Send {
    /// Orders the memory's use with the work of a device stream. The caller of [`Dlpack::bind`]
    /// promises that the stream lives until the owner is dropped.
    fn bind(&self, _stream: usize) -> Result<()> {
        Ok(())
    }

    /// Like `bind`, with the default stream, unless a stream is already bound.
    fn bind_any(&self) -> Result<()> {
        Ok(())
    }
}

/// One array of a batch, for export to another framework. A `Dlpack` owns the memory until it is
/// exported; then the C struct does. Dropping the owner releases the memory.
pub struct Dlpack(Box<Parts>);

// SAFETY: `data` is never dereferenced here, and by the contract of `Parts` any thread may do so.
// The owner is `Send`, the rest is plain data.
unsafe impl Send for Dlpack {}

impl Dlpack {
    pub(crate) fn new(parts: Parts) -> Self {
        assert_eq!(
            parts.shape.len(),
            parts.strides.len(),
            "a stride for each dimension"
        );
        Self(Box::new(parts))
    }

    /// Holds a clone of `count` while the memory is alive. So the strong count of `count` gives the
    /// number of live arrays, here or in a consumer.
    #[must_use]
    pub fn counted_by(mut self, count: &Arc<()>) -> Self {
        self.0.counted = Some(count.clone());
        self
    }

    /// Sizes of the dimensions, rows first.
    pub fn shape(&self) -> &[i64] {
        &self.0.shape
    }

    /// Strides in elements, per dimension.
    pub fn strides(&self) -> &[i64] {
        &self.0.strides
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Location of the memory.
    pub fn device(&self) -> DLDevice {
        self.0.device
    }

    /// Makes a CUDA stream wait until the memory is filled, and orders the memory's reuse after the
    /// stream's work.
    ///
    /// All work submitted to the stream before the last tensor of the batch is freed counts. Call
    /// this before exporting: it implements the `stream` argument of Python's `__dlpack__`. The
    /// stream that JAX passes there is not the one on which it computes, so also bind JAX's compute
    /// stream. 0 and 1 mean the legacy default stream, which is also bound if this is never called.
    /// Has no effect on host memory.
    ///
    /// Errors: [`ErrorKind::Config`](crate::ErrorKind::Config) for a stream of another context,
    /// [`ErrorKind::Device`](crate::ErrorKind::Device) if the device fails.
    ///
    /// # Safety
    /// The stream must live, on the memory's device, until every tensor of the batch is freed.
    pub unsafe fn bind(&self, stream: usize) -> Result<()> {
        self.0.owner.bind(stream)
    }

    /// Returns the struct of DLPack version 1.0, which the caller then owns.
    ///
    /// The caller must call its deleter once, from any thread. During this call, it must not hold a
    /// lock that a thread of the loader could need.
    #[must_use = "only the deleter releases the memory"]
    pub fn into_versioned(mut self) -> NonNull<DLManagedTensorVersioned> {
        self.order();
        let dl_tensor = self.tensor();
        NonNull::from(Box::leak(Box::new(DLManagedTensorVersioned {
            version: DLPackVersion::OURS,
            manager_ctx: Box::into_raw(self.0).cast(),
            deleter: Some(delete_versioned),
            flags: 0,
            dl_tensor,
        })))
    }

    /// Returns the unversioned struct, for older consumers; otherwise like
    /// [`into_versioned`](Self::into_versioned).
    #[must_use = "only the deleter releases the memory"]
    pub fn into_legacy(mut self) -> NonNull<DLManagedTensor> {
        self.order();
        let dl_tensor = self.tensor();
        let manager_ctx = Box::into_raw(self.0).cast();
        NonNull::from(Box::leak(Box::new(DLManagedTensor {
            dl_tensor,
            manager_ctx,
            deleter: Some(delete_legacy),
        })))
    }

    /// Orders the use of the memory before its export: on the bound streams, or else on the default
    /// stream.
    fn order(&self) {
        // A device that fails is broken: it runs no more work, and the next batch reports the
        // error.
        let _ = self.0.owner.bind_any();
    }

    /// The C struct. It points to the shape and stride lists in [`Parts`], which do not move. Even
    /// an empty list has a non-null address.
    fn tensor(&mut self) -> raw::DLTensor {
        let Parts {
            data,
            device,
            dtype,
            shape,
            strides,
            ..
        } = &mut *self.0;
        raw::DLTensor {
            data: *data,
            device: *device,
            ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX),
            dtype: (*dtype).into(),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

impl std::fmt::Debug for Dlpack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}", self.dtype(), self.shape())
    }
}

/// The deleter of [`Dlpack::into_versioned`].
unsafe extern "C" fn delete_versioned(this: *mut DLManagedTensorVersioned) {
    if this.is_null() {
        return;
    }
    // SAFETY: by the DLPack protocol, `this` is the struct that `into_versioned` leaked. No code
    // calls the deleter again, or uses the struct later.
    let managed = unsafe { Box::from_raw(this) };
    // SAFETY: `into_versioned` made it by `Box::into_raw`, and only this struct owns it.
    drop(unsafe { Box::from_raw(managed.manager_ctx.cast::<Parts>()) });
}

/// The deleter of [`Dlpack::into_legacy`].
unsafe extern "C" fn delete_legacy(this: *mut DLManagedTensor) {
    if this.is_null() {
        return;
    }
    // SAFETY: by the DLPack protocol, `this` is the struct that `into_legacy` leaked. No code calls
    // the deleter again, or uses the struct later.
    let managed = unsafe { Box::from_raw(this) };
    // SAFETY: `into_legacy` made it by `Box::into_raw`, and only this struct owns it.
    drop(unsafe { Box::from_raw(managed.manager_ctx.cast::<Parts>()) });
}

#[cfg(test)]
mod tests {
    use super::raw::{DLDataType, DLTensor};
    use super::*;
    use proptest::prelude::*;
    use std::mem::{offset_of, size_of};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Owns bytes, and counts its drops.
    struct Bytes {
        bytes: Vec<u64>,
        gone: Arc<AtomicUsize>,
    }

    impl super::Owner for Bytes {}

    struct Nobody;

    impl super::Owner for Nobody {}

    impl Drop for Bytes {
        fn drop(&mut self) {
            self.gone.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn dense(shape: &[i64]) -> Vec<i64> {
        (0..shape.len())
            .map(|dim| shape[dim + 1..].iter().product())
            .collect()
    }

    fn dlpack(dtype: DType, shape: Vec<i64>, gone: &Arc<AtomicUsize>) -> Dlpack {
        let elements: i64 = shape.iter().product();
        let words = (elements as usize * dtype.size()).div_ceil(8);
        let mut owner = Bytes {
            bytes: (0..words as u64).collect(),
            gone: gone.clone(),
        };
        let data = owner.bytes.as_mut_ptr().cast();
        let strides = dense(&shape);
        let device = DLDevice::CPU;
        Dlpack::new(Parts {
            data,
            device,
            dtype,
            shape,
            strides,
            owner: Box::new(owner),
            counted: None,
        })
    }

    fn count(gone: &Arc<AtomicUsize>) -> usize {
        gone.load(Ordering::SeqCst)
    }

    /// Shape and strides, read as a C consumer would: through the pointers.
    fn read(tensor: &DLTensor) -> (Vec<i64>, Vec<i64>) {
        let ndim = tensor.ndim as usize;
        assert!(!tensor.shape.is_null() && !tensor.strides.is_null());
        // SAFETY: `ndim` elements each, alive until the deleter is called.
        unsafe {
            let shape = std::slice::from_raw_parts(tensor.shape, ndim).to_vec();
            (
                shape,
                std::slice::from_raw_parts(tensor.strides, ndim).to_vec(),
            )
        }
    }

    /// A struct to send to another thread.
    struct Elsewhere<T>(NonNull<T>);

    // SAFETY: the protocol allows any thread.
    unsafe impl<T> Send for Elsewhere<T> {}

    impl Elsewhere<DLManagedTensorVersioned> {
        fn delete(self) {
            // SAFETY: the struct is ours, and this is the only call.
            unsafe { (self.0.as_ref().deleter.unwrap())(self.0.as_ptr()) }
        }
    }

    impl Elsewhere<DLManagedTensor> {
        fn delete(self) {
            // SAFETY: as above.
            unsafe { (self.0.as_ref().deleter.unwrap())(self.0.as_ptr()) }
        }
    }

    #[test]
    fn dtypes_match_the_codes_and_bits_of_the_header() {
        let table = [
            (DType::I8, 0, 8),
            (DType::I16, 0, 16),
            (DType::I32, 0, 32),
            (DType::I64, 0, 64),
            (DType::U8, 1, 8),
            (DType::U16, 1, 16),
            (DType::U32, 1, 32),
            (DType::U64, 1, 64),
            (DType::F16, 2, 16),
            (DType::F32, 2, 32),
            (DType::F64, 2, 64),
            (DType::BF16, 4, 16),
            (DType::Bool, 6, 8),
        ];
        for (dtype, code, bits) in table {
            let gone = Arc::default();
            let managed = Elsewhere(dlpack(dtype, vec![2, 3], &gone).into_versioned());
            // SAFETY: alive until `delete`.
            let seen = unsafe { managed.0.as_ref() }.dl_tensor.dtype;
            assert_eq!(
                seen,
                DLDataType {
                    code,
                    bits,
                    lanes: 1
                },
                "{dtype}"
            );
            assert_eq!(usize::from(bits), dtype.size() * 8);
            managed.delete();
        }
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn structs_match_the_layout_of_the_header() {
        // Sizes from a C compiler for dlpack.h 1.0 on a 64-bit machine.
        assert_eq!(
            (
                size_of::<DLDevice>(),
                size_of::<DLDataType>(),
                size_of::<DLPackVersion>()
            ),
            (8, 4, 8)
        );
        let tensor = [
            offset_of!(DLTensor, data),
            offset_of!(DLTensor, device),
            offset_of!(DLTensor, ndim),
            offset_of!(DLTensor, dtype),
            offset_of!(DLTensor, shape),
            offset_of!(DLTensor, strides),
            offset_of!(DLTensor, byte_offset),
            size_of::<DLTensor>(),
        ];
        assert_eq!(tensor, [0, 8, 16, 20, 24, 32, 40, 48]);
        let legacy = [
            offset_of!(DLManagedTensor, dl_tensor),
            offset_of!(DLManagedTensor, manager_ctx),
            offset_of!(DLManagedTensor, deleter),
            size_of::<DLManagedTensor>(),
        ];
        assert_eq!(legacy, [0, 48, 56, 64]);
        let versioned = [
            offset_of!(DLManagedTensorVersioned, version),
            offset_of!(DLManagedTensorVersioned, manager_ctx),
            offset_of!(DLManagedTensorVersioned, deleter),
            offset_of!(DLManagedTensorVersioned, flags),
            offset_of!(DLManagedTensorVersioned, dl_tensor),
            size_of::<DLManagedTensorVersioned>(),
        ];
        assert_eq!(versioned, [0, 8, 16, 24, 32, 80]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn consumers_read_rows_by_shape_and_strides(
            shape in prop::collection::vec(0_i64..6, 0..5),
            legacy in any::<bool>(),
        ) {
            let gone = Arc::default();
            let dlpack = dlpack(DType::U64, shape.clone(), &gone);
            prop_assert_eq!(dlpack.shape(), &shape[..]);
            let check = |tensor: &DLTensor| {
                let (seen, strides) = read(tensor);
                assert_eq!((&seen, tensor.byte_offset, tensor.device), (&shape, 0, DLDevice::CPU));
                let elements: i64 = shape.iter().product();
                for number in 0..elements {
                    // Division turns an element's number into its index; the strides turn the index
                    // into its offset.
                    let mut rest = number;
                    let mut place = 0;
                    for dim in (0..shape.len()).rev() {
                        place += rest % shape[dim] * strides[dim];
                        rest /= shape[dim];
                    }
                    // SAFETY: in bounds, since the oracle's offsets describe a dense array.
                    assert_eq!(unsafe { *tensor.data.cast::<u64>().add(place as usize) }, number as u64);
                }
            };
            if legacy {
                let managed = Elsewhere(dlpack.into_legacy());
                // SAFETY: alive until `delete`.
                check(&unsafe { managed.0.as_ref() }.dl_tensor);
                prop_assert_eq!(count(&gone), 0);
                managed.delete();
            } else {
                let managed = Elsewhere(dlpack.into_versioned());
                // SAFETY: as above.
                let seen = unsafe { managed.0.as_ref() };
                check(&seen.dl_tensor);
                prop_assert_eq!((seen.version.major, seen.flags), (1, 0));
                prop_assert_eq!(count(&gone), 0);
                managed.delete();
            }
            prop_assert_eq!(count(&gone), 1);
        }
    }

    #[test]
    fn exports_drop_the_owner_once_on_any_thread() {
        let gone = Arc::default();
        for _ in 0..50 {
            let versioned = Elsewhere(dlpack(DType::F32, vec![4, 4], &gone).into_versioned());
            let legacy = Elsewhere(dlpack(DType::F32, vec![4, 4], &gone).into_legacy());
            let never = dlpack(DType::F32, vec![4, 4], &gone);
            let before = count(&gone);
            let threads = [
                std::thread::spawn(move || versioned.delete()),
                std::thread::spawn(move || legacy.delete()),
                std::thread::spawn(move || drop(never)),
            ];
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            assert_eq!(count(&gone) - before, 3);
        }
    }

    #[test]
    fn consumers_own_the_memory_until_the_deleter() {
        let gone = Arc::default();
        let managed = Elsewhere(dlpack(DType::U64, vec![3], &gone).into_versioned());
        let managed = std::thread::spawn(move || {
            let managed = managed;
            // SAFETY: three elements, alive until `delete`, without another user.
            let data = unsafe {
                std::slice::from_raw_parts_mut(managed.0.as_ref().dl_tensor.data.cast::<u64>(), 3)
            };
            data.iter_mut().for_each(|value| *value += 10);
            managed
        })
        .join()
        .unwrap();
        // SAFETY: as above; the other thread has ended.
        let data = unsafe {
            std::slice::from_raw_parts(managed.0.as_ref().dl_tensor.data.cast::<u64>(), 3)
        };
        assert_eq!(data, [10, 11, 12]);
        managed.delete();
        assert_eq!(count(&gone), 1);
    }

    #[test]
    fn exports_name_the_gpu_and_may_be_written_to() {
        let dlpack = Dlpack::new(Parts {
            data: std::ptr::without_provenance_mut(0x1000),
            device: DLDevice::cuda(3),
            dtype: DType::F16,
            shape: vec![1],
            strides: vec![1],
            owner: Box::new(Nobody),
            counted: None,
        });
        assert_eq!(
            dlpack.device(),
            DLDevice {
                device_type: 2,
                device_id: 3
            }
        );
        let managed = Elsewhere(dlpack.into_versioned());
        // SAFETY: alive until `delete`.
        let seen = unsafe { managed.0.as_ref() };
        assert_eq!((seen.flags, seen.dl_tensor.device), (0, DLDevice::cuda(3)));
        assert_eq!(seen.dl_tensor.data.addr(), 0x1000);
        managed.delete();
    }

    #[test]
    fn an_array_is_counted_until_its_deleter_is_called() {
        let count = Arc::new(());
        let managed = Elsewhere(
            dlpack(DType::U8, vec![3], &Arc::default())
                .counted_by(&count)
                .into_versioned(),
        );
        let unread = dlpack(DType::U8, vec![3], &Arc::default()).counted_by(&count);
        assert_eq!(Arc::strong_count(&count), 3);
        managed.delete();
        drop(unread);
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn deleters_accept_null() {
        // SAFETY: null is legal, as this test shows.
        unsafe {
            delete_versioned(std::ptr::null_mut());
            delete_legacy(std::ptr::null_mut());
        }
    }
}
