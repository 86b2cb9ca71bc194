//! One array of a batch as Python sees it: something that `from_dlpack` takes, once.
//!
//! ```text
//! Tensor ──__dlpack__──► capsule "dltensor_versioned" ──from_dlpack──► renamed "used_…": the consumer calls the deleter
//!                                                     ──never taken──► our destructor calls it
//! ```
//!
//! On a GPU, `stream` of `__dlpack__` waits for the copy of the batch, and the batch's memory
//! waits, once its last tensor is gone, for that stream. Nothing here waits on the CPU.

#![allow(unsafe_code)]

use crate::error::{check, exception};
use crate::stream::Handle;
use feedline::ErrorKind;
use feedline::device::StreamUse;
use feedline::dlpack::{BatchStreams, DLDevice, DLManagedTensor, DLManagedTensorVersioned, Dlpack};
use feedline::process::Process;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyCapsule, PyTuple};
use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

const VERSIONED: &CStr = c"dltensor_versioned";
const LEGACY: &CStr = c"dltensor";

/// An array of a batch. `torch.from_dlpack(t)` or `numpy.from_dlpack(t)` makes it theirs, without a
/// copy and once: from then on the memory belongs to the result, which may be written to. The
/// batch's memory is used again when all of its tensors, and all that was made of them, are gone.
///
/// On a GPU the stream that the consumer names (torch names its current one) finds the data there,
/// and what it was given until the last tensor goes is done before the memory is used again. It
/// must live until then; torch's do. Work on other streams needs bind(), or used_on().
#[pyclass(frozen, module = "feedline")]
pub struct Tensor {
    /// `None` once it was handed over.
    dlpack: Mutex<Option<Dlpack>>,
    batch: BatchStreams,
    process: Process,
    shape: Vec<i64>,
    dtype: &'static str,
    device: (i32, i32),
}

impl Tensor {
    pub fn new(dlpack: Dlpack, batch: &BatchStreams) -> Self {
        let DLDevice {
            device_type,
            device_id,
        } = dlpack.device();
        Self {
            shape: dlpack.shape().to_vec(),
            dtype: dlpack.dtype().name(),
            device: (device_type, device_id),
            dlpack: Mutex::new(Some(dlpack)),
            batch: batch.clone(),
            process: Process::current(),
        }
    }

    fn place(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Option<Dlpack>>> {
        check(py, self.process)?;
        Ok(self
            .dlpack
            .lock_py_attached(py)
            .unwrap_or_else(PoisonError::into_inner))
    }

    /// Binds a stream to the batch. The driver may keep a call waiting, so other threads of Python
    /// go on.
    fn bind_as(&self, py: Python<'_>, stream: &Handle, how: StreamUse) -> PyResult<()> {
        check(py, self.process)?;
        match py.detach(|| self.batch.bind_as(stream.stream(), how)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(PyBufferError::new_err(
                "every tensor of the batch is gone: bind streams before the last one goes",
            )),
            Err(error) => Err(unbound(py, &error)),
        }
    }

    fn on_host(&self) -> bool {
        self.device.0 == DLDevice::CPU.device_type
    }

    /// What has to be said no to before anything is given away.
    fn refuse(
        &self,
        stream: Option<i64>,
        device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<()> {
        let no = |message: String| Err(PyBufferError::new_err(message));
        if stream.is_some() && self.on_host() {
            return no("the tensor lies in host memory, where no stream has a meaning: stream must be None".into());
        }
        if let Some(wanted) = device.filter(|wanted| *wanted != self.device) {
            let own = self.device;
            return no(format!(
                "dl_device is {wanted:?} and the tensor lies on {own:?}: take it there, then move it"
            ));
        }
        if copy == Some(true) {
            return no("copy=True is not offered: take the tensor, then clone it".into());
        }
        Ok(())
    }
}

fn taken() -> PyErr {
    PyBufferError::new_err(
        "this tensor was handed over before: keep what the first from_dlpack made of it",
    )
}

/// A stream that is not of the tensor's device is the caller's mistake; all else is the device's.
pub fn unbound(py: Python<'_>, error: &feedline::Error) -> PyErr {
    match error.kind() {
        ErrorKind::Config => PyBufferError::new_err(error.to_string()),
        _ => exception(py, error),
    }
}

#[pymethods]
impl Tensor {
    /// The DLPack capsule, once; `BufferError` afterwards. With `max_version` (1, 0) or above it is
    /// one of version 1.0.
    ///
    /// stream: on a GPU, None or 1 is the legacy default stream, 2 the per-thread default one
    /// (which goes by the legacy one), a number above the stream with that handle, -1 none beside
    /// those that are bound (or, where none is, the legacy default one). On the host it must be
    /// None.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        self.refuse(stream, dl_device, copy)?;
        let stream = if self.on_host() {
            None
        } else {
            Handle::of_dlpack(stream)?
        };
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        if let Some(stream) = stream.filter(|_| self.place(py).is_ok_and(|place| place.is_some())) {
            self.bind_as(py, &stream, StreamUse::Takes)?;
        }
        let dlpack = self.place(py)?.take();
        capsule(py, dlpack.ok_or_else(taken)?, versioned)
    }

    /// On a GPU, orders the whole batch with the work of one more stream: what it is given from
    /// here on finds the data there, and the memory is used again only behind the work that it was
    /// given until the last tensor of the batch is gone. A stream of torch, CuPy or cuda.core,
    /// which the batch keeps; or a handle, whose stream must live until then.
    fn bind(&self, py: Python<'_>, stream: Handle) -> PyResult<()> {
        self.bind_as(py, &stream, StreamUse::Beside)
    }

    /// On a GPU, says that one more stream works on the whole batch after a stream that is bound,
    /// as a step does on what a prefetcher took: the memory is used again only behind its work too.
    /// It does not wait for the batch.
    fn used_on(&self, py: Python<'_>, stream: Handle) -> PyResult<()> {
        self.bind_as(py, &stream, StreamUse::Releases)
    }

    /// As `stream` of `__dlpack__`: the stream's idle time is measured.
    fn _take(&self, py: Python<'_>, stream: Handle) -> PyResult<()> {
        self.bind_as(py, &stream, StreamUse::Takes)
    }

    /// (1, 0) is the host, (2, n) GPU n of CUDA.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device
    }

    /// Sizes of the dimensions, rows first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The element type as feedline calls it: u8, i64, f32, bf16 …
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype
    }

    /// Whether it was handed over.
    #[getter]
    fn taken(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.place(py)?.is_none())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let place = if self.on_host() {
            String::new()
        } else {
            format!(" on cuda:{}", self.device.1)
        };
        let taken = self.taken(py).map_or(", of the parent process", |taken| {
            if taken { ", taken" } else { "" }
        });
        format!("Tensor({} {:?}{place}{taken})", self.dtype, self.shape)
    }
}

fn capsule(py: Python<'_>, dlpack: Dlpack, versioned: bool) -> PyResult<Bound<'_, PyCapsule>> {
    if versioned {
        versioned_capsule(py, dlpack.into_versioned())
    } else {
        legacy_capsule(py, dlpack.into_legacy())
    }
}

/// A capsule that owns the struct until somebody renames it.
pub fn versioned_capsule(
    py: Python<'_>,
    managed: NonNull<DLManagedTensorVersioned>,
) -> PyResult<Bound<'_, PyCapsule>> {
    // SAFETY: the struct lives until a deleter is called: by the destructor, or by whoever renames
    // the capsule. Only a lack of memory can make it fail, and then leaks the struct.
    unsafe {
        PyCapsule::new_with_pointer_and_destructor(
            py,
            managed.cast(),
            VERSIONED,
            Some(free_versioned),
        )
    }
}

/// As [`versioned_capsule`], for consumers of older versions.
pub fn legacy_capsule(
    py: Python<'_>,
    managed: NonNull<DLManagedTensor>,
) -> PyResult<Bound<'_, PyCapsule>> {
    // SAFETY: as above.
    unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, managed.cast(), LEGACY, Some(free_legacy))
    }
}

unsafe extern "C" fn free_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a destructor gets its capsule, with the interpreter attached.
    let Some(managed) = (unsafe { untaken::<DLManagedTensorVersioned>(capsule, VERSIONED) }) else {
        return;
    };
    // SAFETY: made for `versioned_capsule`; not renamed, so nobody else calls the deleter.
    unsafe {
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}

unsafe extern "C" fn free_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: a destructor gets its capsule, with the interpreter attached.
    let Some(managed) = (unsafe { untaken::<DLManagedTensor>(capsule, LEGACY) }) else {
        return;
    };
    // SAFETY: made for `legacy_capsule`; not renamed, so nobody else calls the deleter.
    unsafe {
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}

/// The struct of a capsule that nobody has taken: it still has the name that [`capsule`] gave it. A
/// capsule, with the interpreter attached, is what the caller promises.
unsafe fn untaken<T>(capsule: *mut ffi::PyObject, name: &CStr) -> Option<*mut T> {
    // SAFETY: a capsule by contract. For one of another name the answer is 0, without an exception;
    // the pointer of one of this name is what `capsule` put there.
    unsafe {
        (ffi::PyCapsule_IsValid(capsule, name.as_ptr()) != 0)
            .then(|| ffi::PyCapsule_GetPointer(capsule, name.as_ptr()).cast())
    }
}
