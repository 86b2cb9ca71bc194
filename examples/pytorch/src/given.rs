//! Settings that Python gives by name: each is taken once, and what nobody took is refused.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Keyword arguments, of which None counts as absent.
pub struct Given<'py> {
    rest: Bound<'py, PyDict>,
}

impl<'py> Given<'py> {
    /// Of `**settings`.
    pub fn new(py: Python<'py>, settings: Option<&Bound<'py, PyDict>>) -> PyResult<Self> {
        Ok(Self { rest: settings.map_or_else(|| Ok(PyDict::new(py)), |settings| settings.copy())? })
    }

    pub fn py(&self) -> Python<'py> {
        self.rest.py()
    }

    /// A setting. Errors: a TypeError that names it.
    pub fn take<T: for<'a> FromPyObject<'a, 'py>>(&mut self, name: &str) -> PyResult<Option<T>> {
        let Some(value) = self.rest.get_item(name)? else { return Ok(None) };
        self.rest.del_item(name)?;
        if value.is_none() {
            return Ok(None);
        }
        match value.extract() {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(PyTypeError::new_err(format!("{name}={}: {}", value.repr()?, error.into()))),
        }
    }

    /// Refuses settings that were not taken.
    pub fn finish(self) -> PyResult<()> {
        match self.rest.keys().iter().next() {
            Some(name) => Err(PyTypeError::new_err(format!("there is no setting {name:?}"))),
            None => Ok(()),
        }
    }
}
