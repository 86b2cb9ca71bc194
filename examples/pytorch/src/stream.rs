//! CUDA streams as Python names them: a number, or an object that knows its own.

#![allow(unsafe_code)]

use feedline::device::cuda::Stream;
use feedline::dlpack::Dlpack;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// `CU_STREAM_LEGACY`.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// The handle of a stream: an int (`cudaStream_t`; 0 and 1 are the legacy default stream, 2 the per-thread one), or an object
/// with `__cuda_stream__` (cuda.core, CuPy, recent PyTorch) or `cuda_stream` (PyTorch).
///
/// The per-thread default stream goes by the legacy one: all of them and that one wait for each other, and the thread that
/// drops a batch, or takes its next tensor, may be another one than the one whose stream was meant.
#[derive(Clone, Copy)]
pub struct Handle(usize);

impl<'a, 'py> FromPyObject<'a, 'py> for Handle {
    type Error = PyErr;

    fn extract(stream: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let number: i64 = if let Ok(protocol) = stream.getattr("__cuda_stream__") {
            protocol.call0()?.extract::<(u32, i64)>()?.1
        } else if let Ok(number) = stream.getattr("cuda_stream") {
            number.extract()?
        } else {
            stream.extract()?
        };
        match usize::try_from(number) {
            Ok(number) => Ok(Self::new(number)),
            Err(_) => Err(PyValueError::new_err(format!("{number} is no CUDA stream"))),
        }
    }
}

impl Handle {
    fn new(number: usize) -> Self {
        Self(if number == PER_THREAD { LEGACY } else { number })
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

    /// For [`LoaderBuilder::stream`](feedline::LoaderBuilder::stream).
    pub fn stream(self) -> Stream {
        // SAFETY: that the stream lives as long as the batches is the promise of who passes it, as `Loader` documents.
        unsafe { Stream::from_raw(self.0) }
    }

    /// Orders the use of a tensor's batch with the work of this stream.
    pub fn bind(self, tensor: &Dlpack) -> feedline::Result<()> {
        // SAFETY: that the stream lives as long as the batch is the promise of who passes it, as `Tensor` documents.
        unsafe { tensor.bind(self.0) }
    }
}
