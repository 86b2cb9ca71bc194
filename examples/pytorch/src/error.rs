//! feedline's errors as Python's: the whole line as message, the kind's words as attribute `kind`.

use feedline::{Error, ErrorKind, Stage};
use pyo3::exceptions::{
    PyFileNotFoundError, PyOSError, PyPermissionError, PyRuntimeError, PyTimeoutError, PyValueError,
};
use pyo3::prelude::*;

/// The exception of an error.
pub fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    let raised = match error.kind() {
        ErrorKind::NotFound => PyFileNotFoundError::new_err(message),
        ErrorKind::Permission => PyPermissionError::new_err(message),
        ErrorKind::Stalled => PyTimeoutError::new_err(message),
        ErrorKind::Io | ErrorKind::NotAFile | ErrorKind::Truncated | ErrorKind::Changed => PyOSError::new_err(message),
        ErrorKind::Config
        | ErrorKind::Budget
        | ErrorKind::Empty
        | ErrorKind::FingerprintMismatch
        | ErrorKind::State
        | ErrorKind::Decode
        | ErrorKind::Limit
        | ErrorKind::Shape => PyValueError::new_err(message),
        _ => PyRuntimeError::new_err(message),
    };
    // An exception without the attribute is better than none.
    let _ = raised.value(py).setattr("kind", error.kind().as_str());
    raised
}

/// A setting of this package that is not legal.
pub fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}
