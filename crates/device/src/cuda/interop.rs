//! Conversion to and from cudarc: contexts and streams come in, fields go out as slices.

#![allow(unsafe_code)]

use super::driver::{Gpu, Handle};
use crate::Stream;
use crate::backend::{DevicePtr, OnDevice};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The device of the user's own context.
pub(crate) fn open(context: Arc<CudaContext>) -> Result<Arc<Gpu>> {
    Gpu::of_user(
        super::driver()?,
        context.ordinal(),
        context.cu_ctx() as Handle,
        context,
    )
}

impl From<&Arc<CudaStream>> for Stream {
    fn from(stream: &Arc<CudaStream>) -> Self {
        Self::owned(
            stream.cu_stream() as Handle,
            stream.context().cu_ctx() as Handle,
            stream.clone(),
        )
    }
}

impl From<Arc<CudaStream>> for Stream {
    fn from(stream: Arc<CudaStream>) -> Self {
        Self::from(&stream)
    }
}

/// A field of a batch in device memory, for cudarc's kernels and copies: `&*slice` is a
/// [`CudaSlice`].
///
/// The memory belongs to the batch; dropping the slice frees nothing. Use it on its own stream;
/// bind other streams to the batch first (`Batch::bind`).
pub struct FieldSlice<'a, T> {
    /// Taken only by `drop`.
    slice: ManuallyDrop<CudaSlice<T>>,
    batch: PhantomData<&'a ()>,
}

impl<'a, T> FieldSlice<'a, T> {
    /// `len` elements at `ptr` in a batch's buffer. `stream` is bound to the batch.
    #[doc(hidden)]
    pub fn of(
        _batch: &'a OnDevice,
        stream: &Arc<CudaStream>,
        ptr: DevicePtr,
        len: usize,
    ) -> Result<Self> {
        let failed = || {
            Error::new(
                ErrorKind::Device,
                Stage::Device,
                "cudarc cannot create an event",
            )
        };
        // With event tracking, `upgrade_device_ptr` creates two events, and panics if it cannot.
        // This is rare after the check.
        if stream.context().is_event_tracking() {
            stream
                .context()
                .new_event(None)
                .map_err(|source| failed().with_source(source))?;
        }
        let slice = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the elements are in the buffer of `batch`, which is initialised and lives for
            // `'a`; `drop` leaks the slice, so that it frees nothing. Only shared views are handed
            // out.
            unsafe { stream.upgrade_device_ptr(ptr, len) }
        }))
        .map_err(|_| failed())?;
        Ok(Self {
            slice: ManuallyDrop::new(slice),
            batch: PhantomData,
        })
    }
}

impl<T> Deref for FieldSlice<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &Self::Target {
        &self.slice
    }
}

impl<T> Drop for FieldSlice<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // The slice's stream waits for other streams' work on it, so that the batch's event covers
        // all of it.
        let _ = slice.leak();
    }
}

impl<T> std::fmt::Debug for FieldSlice<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} elements on cuda:{}",
            self.slice.len(),
            self.slice.ordinal()
        )
    }
}
