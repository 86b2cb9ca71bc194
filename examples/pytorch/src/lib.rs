//! feedline in Python: a loader whose batches are DLPack tensors.
//!
//! ```text
//! given.rs    settings by name
//! source.rs   path and settings ──► dataset, decoders
//! loader.rs   Loader ──epoch(n)──► Epoch ──next, without the GIL──► {name: Tensor}
//! tensor.rs   Tensor ──__dlpack__──► capsule ──torch.from_dlpack──► the consumer's; frees the batch in the end
//! stream.rs   CUDA streams as Python names them
//! python.rs   Python functions in the pipeline: map_batch, decoders, datasets
//! lent.rs     arrays of a batch during a call of such a function
//! narrow.rs   integers of 64 bits as such of 32
//! xla.rs      the stream on which JAX works
//! error.rs    feedline's errors as Python's
//! ```
//!
//! A thread of feedline wants the GIL only to call a function of `python.rs`, and every wait for feedline is without it, so
//! that nothing here can deadlock. Memory is given back by whichever thread drops the last tensor of a batch.

mod error;
mod given;
mod lent;
mod loader;
mod narrow;
mod python;
mod source;
mod stream;
mod tensor;
mod xla;

/// feedline's loader for Python.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::loader::{Epoch, Loader};
    #[pymodule_export]
    use crate::python::{cores, enter, leave};
    #[pymodule_export]
    use crate::source::ramp;
    #[pymodule_export]
    use crate::stream::{bound, used_on};
    #[pymodule_export]
    use crate::tensor::Tensor;
    #[pymodule_export]
    use crate::xla::{handler, stream};

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        feedline::Dialect::Python.speak();
        crate::python::enter();
        pyo3::types::PyModuleMethods::add(module, "__version__", env!("CARGO_PKG_VERSION"))
    }
}
