//! Arrays of a batch that Python has during a call, without a copy.
//!
//! ```text
//! Lease ──lend──► Lent ──__dlpack__──► capsule ──torch.from_dlpack──► tensor
//!   │               └──────numpy──────► Base ◄──────.base─────────── array: `views` counts what is alive
//!   └──end: no array can be made any more, and how many are alive
//! ```

#![allow(unsafe_code)]

use feedline::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
use feedline::tensor::DType;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The time during which arrays are lent.
pub struct Lease {
    open: AtomicBool,
    views: AtomicUsize,
}

impl Lease {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            open: AtomicBool::new(true),
            views: AtomicUsize::new(0),
        })
    }

    /// Lends memory until [`end`](Self::end). While it says that arrays are alive, the memory must
    /// stay.
    pub fn lend<T>(
        lease: &Arc<Self>,
        memory: &mut [T],
        dtype: DType,
        shape: Vec<usize>,
    ) -> PyResult<Lent> {
        debug_assert_eq!(
            size_of_val(memory),
            shape.iter().product::<usize>() * dtype.size()
        );
        let shape = shape
            .into_iter()
            .map(i64::try_from)
            .collect::<Result<_, _>>()?;
        Ok(Lent {
            lease: lease.clone(),
            data: memory.as_mut_ptr() as usize,
            dtype,
            shape,
        })
    }

    /// Ends it, and counts the arrays that are still alive.
    pub fn end(&self) -> usize {
        self.open.store(false, Ordering::SeqCst);
        self.views.load(Ordering::SeqCst)
    }
}

/// An array of a batch, for `from_dlpack`, while `map_batch` runs.
#[pyclass(frozen, module = "feedline")]
pub struct Lent {
    lease: Arc<Lease>,
    data: usize,
    dtype: DType,
    shape: Vec<i64>,
}

/// What a capsule of either version owns.
struct Owned<T> {
    managed: Option<T>,
    _view: View,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// An array that is alive.
struct View(Arc<Lease>);

impl Drop for View {
    fn drop(&mut self) {
        self.0.views.fetch_sub(1, Ordering::SeqCst);
    }
}

#[pymethods]
impl Lent {
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let host = (DLDevice::CPU.device_type, DLDevice::CPU.device_id);
        if stream.is_some() || dl_device.is_some_and(|device| device != host) || copy == Some(true)
        {
            return Err(PyBufferError::new_err(
                "the array lies in host memory, and is not copied",
            ));
        }
        let view = self.view()?;
        if max_version.is_some_and(|(major, _)| major >= 1) {
            let pointer = self.own(view, |tensor, context| DLManagedTensorVersioned {
                version: DLPackVersion::OURS,
                manager_ctx: context,
                deleter: Some(free_versioned),
                flags: 0,
                dl_tensor: tensor,
            });
            crate::tensor::versioned_capsule(py, pointer)
        } else {
            let pointer = self.own(view, |tensor, context| DLManagedTensor {
                dl_tensor: tensor,
                manager_ctx: context,
                deleter: Some(free_legacy),
            });
            crate::tensor::legacy_capsule(py, pointer)
        }
    }

    /// The NumPy array.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let DLDataType { code, bits, .. } = DLDataType::from(self.dtype);
        let kind = match code {
            0 => 'i',
            1 => 'u',
            2 => 'f',
            6 => 'b',
            _ => {
                return Err(PyBufferError::new_err(format!(
                    "NumPy has no {}",
                    self.dtype.name()
                )));
            }
        };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", format!("={kind}{}", bits / 8))?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("data", (self.data, false))?;
        let base = Base {
            interface: interface.unbind(),
            _view: self.view()?,
        };
        py.import("numpy")?.call_method1("asarray", (base,))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (DLDevice::CPU.device_type, DLDevice::CPU.device_id)
    }
}

/// The base of a NumPy array. By DLPack, which some versions of NumPy take as read-only, it could
/// not be written to.
#[pyclass(frozen, module = "feedline")]
struct Base {
    interface: Py<PyDict>,
    _view: View,
}

#[pymethods]
impl Base {
    #[getter]
    fn __array_interface__(&self, py: Python<'_>) -> Py<PyDict> {
        self.interface.clone_ref(py)
    }
}

impl Lent {
    /// Counts an array that is about to be made.
    fn view(&self) -> PyResult<View> {
        self.lease.views.fetch_add(1, Ordering::SeqCst);
        let view = View(self.lease.clone());
        if !self.lease.open.load(Ordering::SeqCst) {
            return Err(PyBufferError::new_err(
                "the call that had this array is over",
            ));
        }
        Ok(view)
    }

    /// A struct that lives until its deleter is called.
    fn own<T>(&self, view: View, make: impl FnOnce(DLTensor, *mut c_void) -> T) -> NonNull<T> {
        let shape = self.shape.clone();
        let mut strides = vec![1; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim] * shape[dim].max(1);
        }
        let owned = Box::into_raw(Box::new(Owned {
            managed: None,
            _view: view,
            shape,
            strides,
        }));
        // SAFETY: just made, and nobody else has it.
        let place = unsafe { &mut *owned };
        let tensor = DLTensor {
            data: self.data as *mut c_void,
            device: DLDevice::CPU,
            ndim: i32::try_from(place.shape.len()).unwrap_or(i32::MAX),
            dtype: DLDataType::from(self.dtype),
            shape: place.shape.as_mut_ptr(),
            strides: place.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        NonNull::from(place.managed.insert(make(tensor, owned.cast())))
    }
}

unsafe extern "C" fn free_versioned(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: a deleter is called once, with what `own` made; its context is the box of this type.
    drop(unsafe {
        Box::from_raw(
            (*managed)
                .manager_ctx
                .cast::<Owned<DLManagedTensorVersioned>>(),
        )
    });
}

unsafe extern "C" fn free_legacy(managed: *mut DLManagedTensor) {
    // SAFETY: a deleter is called once, with what `own` made; its context is the box of this type.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Owned<DLManagedTensor>>()) });
}
