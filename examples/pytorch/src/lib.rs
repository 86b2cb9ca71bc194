//! feedline in Python: a loader whose batches are DLPack tensors.
//!
//! ```text
//! given.rs    settings by name
//! source.rs   path and settings ──► dataset, decoders
//! loader.rs   Loader ──epoch(n)──► Epoch ──next, without the GIL──► {name: Tensor}
//! tensor.rs   Tensor ──__dlpack__──► capsule ──torch.from_dlpack──► the consumer's; frees the batch in the end
//! stream.rs   CUDA streams as Python names them
//! error.rs    feedline's errors as Python's
//! ```
//!
//! No Python object is kept by feedline and no thread of feedline ever wants the GIL, so that nothing here can deadlock
//! with it; memory is given back by whichever thread drops the last tensor of a batch.

mod error;
mod given;
mod loader;
mod source;
mod stream;
mod tensor;

/// feedline's loader for Python.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::loader::{Epoch, Loader};
    #[pymodule_export]
    use crate::tensor::Tensor;
}
