//! feedline's errors as Python's: the class of the kind (`feedline.errors`), with the whole line as
//! message.

use feedline::error::{Amounts, Stage};
use feedline::process::Process;
use feedline::{Error, ErrorKind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// The exception of an error.
pub fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    // At the interpreter's end the module may be gone.
    of_class(py, error, &message).unwrap_or_else(|_| PyRuntimeError::new_err(message))
}

fn of_class(py: Python<'_>, error: &Error, message: &str) -> PyResult<PyErr> {
    static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let classes = CLASSES.get_or_try_init(py, || {
        let classes = py.import("feedline.errors")?.getattr("CLASSES")?;
        Ok::<_, PyErr>(classes.cast_into::<PyDict>()?.unbind())
    })?;
    let class = classes.bind(py).as_any().get_item(error.kind().as_str())?;
    let raised = class.call1((message,))?;
    raised.setattr("stage", error.stage().as_str())?;
    if let Some(Amounts { need, have }) = error.amounts() {
        raised.setattr("need", need)?;
        raised.setattr("have", have)?;
    }
    Ok(PyErr::from_value(raised))
}

/// Errors: in a forked child of the process. First of all, as another thread may have had a lock at
/// the fork.
pub fn check(py: Python<'_>, process: Process) -> PyResult<()> {
    process.check().map_err(|error| exception(py, &error))
}

/// A setting of this package that is not legal.
pub fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}
