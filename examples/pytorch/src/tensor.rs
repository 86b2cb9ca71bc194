//! One array of a batch as Python sees it: something that `from_dlpack` takes, once.
//!
//! ```text
//! Tensor ──__dlpack__──► capsule "dltensor_versioned" ──from_dlpack──► renamed "used_…": the consumer calls the deleter
//!                                                     ──never taken──► our destructor calls it
//! ```

#![allow(unsafe_code)]

use feedline::dlpack::{DLManagedTensor, DLManagedTensorVersioned, Dlpack};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};
use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

const VERSIONED: &CStr = c"dltensor_versioned";
const LEGACY: &CStr = c"dltensor";

/// An array of a batch. `torch.from_dlpack(t)` or `numpy.from_dlpack(t)` makes it theirs, without a copy and once: from
/// then on the memory belongs to the result, which may be written to. The batch's memory is used again when all of its
/// tensors, and all that was made of them, are gone.
#[pyclass(frozen, module = "feedline_torch")]
pub struct Tensor {
    /// `None` once it was handed over.
    dlpack: Mutex<Option<Dlpack>>,
    shape: Vec<i64>,
    dtype: &'static str,
    device: (i32, i32),
}

impl Tensor {
    pub fn new(dlpack: Dlpack) -> Self {
        let device = dlpack.device();
        Self {
            shape: dlpack.shape().to_vec(),
            dtype: dlpack.dtype().name(),
            device: (device.device_type, device.device_id),
            dlpack: Mutex::new(Some(dlpack)),
        }
    }

    /// What has to be said no to before anything is given away.
    fn check(&self, stream: bool, device: Option<(i32, i32)>, copy: Option<bool>) -> PyResult<()> {
        let no = |message: String| Err(PyBufferError::new_err(message));
        if stream {
            return no("the tensor lies in host memory, where no stream has a meaning: stream must be None".into());
        }
        if device.is_some_and(|device| device != self.device) {
            let (wanted, own) = (device.unwrap_or_default(), self.device);
            return no(format!("dl_device is {wanted:?} and the tensor lies on {own:?}: take it there, then move it"));
        }
        if copy == Some(true) {
            return no("copy=True is not offered: take the tensor, then clone it".into());
        }
        Ok(())
    }
}

#[pymethods]
impl Tensor {
    /// The DLPack capsule, once; `BufferError` afterwards. With `max_version` (1, 0) or above it is one of version 1.0.
    #[pyo3(signature = (stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        self.check(stream.is_some(), dl_device, copy)?;
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let mut place = self.dlpack.lock().unwrap_or_else(PoisonError::into_inner);
        if !versioned && place.as_ref().is_some_and(Dlpack::read_only) {
            return Err(PyBufferError::new_err("the tensor is read-only, which only DLPack 1.0 can say"));
        }
        let dlpack = place.take().ok_or_else(|| {
            PyBufferError::new_err("this tensor was handed over before: keep what the first from_dlpack made of it")
        })?;
        capsule(py, dlpack, versioned)
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

    fn __repr__(&self) -> String {
        let taken = if self.dlpack.lock().unwrap_or_else(PoisonError::into_inner).is_none() { ", taken" } else { "" };
        format!("Tensor({} {:?}{taken})", self.dtype, self.shape)
    }
}

/// The capsule owns the struct until somebody renames it.
fn capsule(py: Python<'_>, dlpack: Dlpack, versioned: bool) -> PyResult<Bound<'_, PyCapsule>> {
    let (name, destructor): (_, ffi::PyCapsule_Destructor) =
        if versioned { (VERSIONED, free_versioned) } else { (LEGACY, free_legacy) };
    let pointer = if versioned { dlpack.into_versioned().cast() } else { dlpack.into_legacy().cast() };
    // SAFETY: the struct lives until a deleter is called: by the destructor, or by whoever renames the capsule.
    // Only a lack of memory can make it fail, and then leaks the struct.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, name, Some(destructor)) }
}

unsafe extern "C" fn free_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a destructor gets its capsule, with the interpreter attached.
    let Some(managed) = (unsafe { untaken::<DLManagedTensorVersioned>(capsule, VERSIONED) }) else { return };
    // SAFETY: made by `into_versioned`; not renamed, so nobody else calls the deleter.
    unsafe {
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}

unsafe extern "C" fn free_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: a destructor gets its capsule, with the interpreter attached.
    let Some(managed) = (unsafe { untaken::<DLManagedTensor>(capsule, LEGACY) }) else { return };
    // SAFETY: made by `into_legacy`; not renamed, so nobody else calls the deleter.
    unsafe {
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}

/// The struct of a capsule that nobody has taken: it still has the name that [`capsule`] gave it. A capsule, with the
/// interpreter attached, is what the caller promises.
unsafe fn untaken<T>(capsule: *mut ffi::PyObject, name: &CStr) -> Option<*mut T> {
    // SAFETY: a capsule by contract. For one of another name the answer is 0, without an exception; the pointer of one of
    // this name is what `capsule` put there.
    unsafe {
        (ffi::PyCapsule_IsValid(capsule, name.as_ptr()) != 0)
            .then(|| ffi::PyCapsule_GetPointer(capsule, name.as_ptr()).cast())
    }
}
