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
//! observe.rs  the profiler around another loader
//! narrow.rs   integers of 64 bits as such of 32
//! xla.rs      the stream on which JAX works
//! error.rs    feedline's errors as Python's
//! ```
//!
//! A thread of feedline wants the GIL only to call a function of `python.rs`, and every wait for
//! feedline is without it, so that nothing here can deadlock. Memory is given back by whichever
//! thread drops the last tensor of a batch.
//!
//! Nothing here needs the GIL to be sound, so free-threaded Python stays without one: classes are
//! frozen, and what changes is atomic or behind a lock. While a thread of Python holds such a lock
//! it calls no Python and drops none of its objects: another one that waits for the lock would keep
//! it from going on.

mod error;
mod given;
mod lent;
mod loader;
mod names;
mod narrow;
mod observe;
mod python;
mod source;
mod stream;
mod tensor;
mod texts;
mod xla;

use pyo3::exceptions::PyImportError;
use pyo3::ffi::{PyInterpreterState_Get, PyInterpreterState_GetID};
use pyo3::prelude::*;

/// feedline's loader for Python.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // First of all: the classes below are those of the process, not of an interpreter.
    if !in_main_interpreter() {
        let message = "feedline works in the main interpreter only: import it there, or in a process of its own";
        return Err(PyImportError::new_err(message));
    }
    module.add_class::<loader::Loader>()?;
    module.add_class::<loader::Epoch>()?;
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<observe::Observer>()?;
    module.add_function(wrap_pyfunction!(loader::state_at, module)?)?;
    module.add_function(wrap_pyfunction!(loader::state_trained, module)?)?;
    module.add_function(wrap_pyfunction!(python::cores, module)?)?;
    module.add_function(wrap_pyfunction!(python::enter, module)?)?;
    module.add_function(wrap_pyfunction!(python::leave, module)?)?;
    module.add_function(wrap_pyfunction!(source::ramp, module)?)?;
    module.add_function(wrap_pyfunction!(stream::bound, module)?)?;
    module.add_function(wrap_pyfunction!(stream::used_on, module)?)?;
    module.add_function(wrap_pyfunction!(xla::handler, module)?)?;
    module.add_function(wrap_pyfunction!(xla::stream, module)?)?;
    feedline::setting::speak(names::name);
    python::enter();
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// The main interpreter is the first one.
#[allow(unsafe_code)]
fn in_main_interpreter() -> bool {
    // SAFETY: a module is initialised with an interpreter attached, which both calls ask for.
    unsafe { PyInterpreterState_GetID(PyInterpreterState_Get()) == 0 }
}
