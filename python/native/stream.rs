//! CUDA streams as Python names them: a number, or an object that knows its own.

#![allow(unsafe_code)]

use feedline::device::StreamUse;
use feedline::device::cuda::Stream;
use feedline::dlpack::BatchStreams;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// `CU_STREAM_LEGACY`.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// The handle of a stream: an int (`cudaStream_t`; 0 and 1 are the legacy default stream, 2 the
/// per-thread one), or an object with `__cuda_stream__` (cuda.core, CuPy, recent PyTorch) or
/// `cuda_stream` (PyTorch).
///
/// The per-thread default stream goes by the legacy one: all of them and that one wait for each
/// other, and the thread that drops a batch, or takes its next tensor, may be another one than the
/// one whose stream was meant.
#[derive(Clone)]
pub struct Handle {
    number: usize,
    /// The object, which may destroy its stream when it goes: batches keep it.
    object: Option<Arc<Py<PyAny>>>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Handle {
    type Error = PyErr;

    fn extract(stream: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let mut named = true;
        let number: i64 =
            if let Ok(protocol) = stream.getattr("__cuda_stream__") {
                protocol.call0()?.extract::<(u32, i64)>()?.1
            } else if let Ok(number) = stream.getattr("cuda_stream") {
                number.extract()?
            } else {
                named = false;
                stream.extract().map_err(|_| {
                let given = stream.repr().map_or_else(|_| "this".into(), |given| given.to_string());
                PyTypeError::new_err(format!(
                    "{given} is no CUDA stream: give one of torch, CuPy or cuda.core, or a handle"
                ))
            })?
            };
        let Ok(number) = usize::try_from(number) else {
            return Err(PyValueError::new_err(format!("{number} is no CUDA stream")));
        };
        let object = named.then(|| Arc::new(stream.to_owned().unbind()));
        Ok(Self {
            object,
            ..Self::new(number)
        })
    }
}

impl Handle {
    fn new(number: usize) -> Self {
        Self {
            number: if number == PER_THREAD { LEGACY } else { number },
            object: None,
        }
    }

    /// What `stream` of `__dlpack__` means for memory of a CUDA device; `None`: nobody is to wait.
    pub fn of_dlpack(stream: Option<i64>) -> PyResult<Option<Self>> {
        match (stream, stream.map(usize::try_from)) {
            (None, _) => Ok(Some(Self::new(LEGACY))),
            (Some(-1), _) => Ok(None),
            (Some(1..), Some(Ok(number))) => Ok(Some(Self::new(number))),
            (Some(number), _) => Err(PyValueError::new_err(format!(
                "stream {number} has no meaning on CUDA: there are None and 1 (legacy default), 2 (per-thread default), -1 (do \
                 not synchronise), and handles above"
            ))),
        }
    }

    /// The stream.
    pub fn stream(&self) -> Stream {
        // SAFETY: that the stream lives as long as the batches, or as its object, is the promise of
        // who passes it, as `Loader` and `Tensor` document.
        unsafe {
            match &self.object {
                None => Stream::from_raw(self.number),
                Some(object) => Stream::kept_by(self.number, object.clone()),
            }
        }
    }
}

/// Batches on a GPU that have tensors, to find one by an address in its memory.
static EXPORTED: Mutex<Vec<BatchStreams>> = Mutex::new(Vec::new());

/// Notes a batch.
pub fn note(batch: &BatchStreams) {
    let mut exported = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
    exported.retain(BatchStreams::lives);
    exported.push(batch.clone());
}

/// The batch with this address.
fn at(address: u64) -> Option<BatchStreams> {
    let exported = EXPORTED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    exported.into_iter().find(|batch| batch.holds(address))
}

/// Handle and use ("takes", "beside", "releases") of the streams that are bound to the batch at
/// this address of a GPU; None where there is no batch.
#[pyfunction(name = "_bound")]
pub fn bound(py: Python<'_>, address: u64) -> Option<Vec<(usize, &'static str)>> {
    let name = |how| match how {
        StreamUse::Takes => "takes",
        StreamUse::Beside => "beside",
        _ => "releases",
    };
    let bound = py.detach(|| at(address)?.bound())?;
    Some(
        bound
            .into_iter()
            .map(|(stream, how)| (stream, name(how)))
            .collect(),
    )
}

/// Says that the stream uses the batch at this address, after a stream that is bound; whether there
/// is one.
#[pyfunction(name = "_used_on")]
pub fn used_on(py: Python<'_>, address: u64, stream: Handle) -> PyResult<bool> {
    let bound =
        py.detach(|| at(address).map(|batch| batch.bind_as(stream.stream(), StreamUse::Releases)));
    bound
        .unwrap_or(Ok(false))
        .map_err(|error| crate::tensor::unbound(py, &error))
}
