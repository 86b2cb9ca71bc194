//! Settings that Python gives by name: each is taken once, and what nobody took is refused.

use crate::error::{config, exception};
use feedline::Result;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyTuple};
use std::any::TypeId;
use std::path::PathBuf;

/// Keyword arguments, of which None counts as absent.
pub struct Given<'py> {
    rest: Bound<'py, PyDict>,
    /// The settings that there are.
    known: Vec<String>,
}

impl<'py> Given<'py> {
    /// Of `**settings`.
    pub fn new(py: Python<'py>, settings: Option<&Bound<'py, PyDict>>) -> PyResult<Self> {
        let rest = settings.map_or_else(|| Ok(PyDict::new(py)), |settings| settings.copy())?;
        Ok(Self {
            rest,
            known: Vec::new(),
        })
    }

    pub fn py(&self) -> Python<'py> {
        self.rest.py()
    }

    /// A setting. Errors: a TypeError that names it, for a number out of range a ConfigError.
    pub fn take<T: for<'a> FromPyObject<'a, 'py> + 'static>(
        &mut self,
        name: &str,
    ) -> PyResult<Option<T>> {
        self.known.push(name.into());
        let Some(value) = self.rest.get_item(name)? else {
            return Ok(None);
        };
        self.rest.del_item(name)?;
        if value.is_none() {
            return Ok(None);
        }
        // To Python they are the numbers 1 and 0.
        let takes_bools = [
            TypeId::of::<bool>(),
            TypeId::of::<Py<PyAny>>(),
            TypeId::of::<Py<PyDict>>(),
            TypeId::of::<Chosen>(),
        ];
        if !takes_bools.contains(&TypeId::of::<T>()) && has_bool(&value) {
            return Err(refused(
                name,
                &value,
                legal(name).unwrap_or("give a number or a name, not True or False"),
            ));
        }
        let error: PyErr = match value.extract() {
            Ok(value) => return Ok(Some(value)),
            Err(error) => error.into(),
        };
        let (place, value, error) =
            wrong_entry::<T>(name, &value).unwrap_or((name.into(), value, error));
        if error.is_instance_of::<PyOverflowError>(self.py()) {
            let bits = if TypeId::of::<T>() == TypeId::of::<u32>() {
                32
            } else {
                64
            };
            let message = format!(
                "{place}={}: out of range; give a whole number from 0 to 2**{bits} - 1",
                shown(&value)
            );
            return Err(exception(self.py(), &config(message)));
        }
        let words = error.value(self.py()).to_string();
        Err(refused(
            &place,
            &value,
            legal(name).or(of_type::<T>()).unwrap_or(&words),
        ))
    }

    /// Refuses settings that were not taken.
    pub fn finish(self) -> PyResult<()> {
        match self.rest.keys().iter().next() {
            Some(name) => {
                let meant = self
                    .py()
                    .import("feedline._settings")?
                    .call_method1("meant", (&name, self.known))?;
                Err(PyTypeError::new_err(format!(
                    "there is no setting {}{meant}",
                    name.repr()?
                )))
            }
            None => Ok(()),
        }
    }
}

/// Settings that are lists of one kind of entry.
const LISTS: [&str; 12] = [
    "lengths",
    "bounds",
    "sizes",
    "buckets",
    "indices",
    "subset",
    "weights",
    "sample_weights",
    "keep",
    "columns",
    "join_columns",
    "trim",
];

/// The first entry of a list that the setting cannot have, with its place.
fn wrong_entry<'py, T: for<'a> FromPyObject<'a, 'py>>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> Option<(String, Bound<'py, PyAny>, PyErr)> {
    if !LISTS.contains(&name) {
        return None;
    }
    let list = value
        .call_method0("tolist")
        .unwrap_or_else(|_| value.clone());
    for (index, entry) in list.try_iter().ok()?.enumerate() {
        let entry = entry.ok()?;
        if let Err(error) = PyList::new(value.py(), [&entry]).ok()?.extract::<T>() {
            return Some((format!("{name}[{index}]"), entry, error.into()));
        }
    }
    None
}

/// Whether a value, or one inside it, is True or False.
fn has_bool(value: &Bound<'_, PyAny>) -> bool {
    if let Ok(list) = value.cast::<PyList>() {
        return list.iter().any(|item| has_bool(&item));
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return tuple.iter().any(|item| has_bool(&item));
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        return dict.iter().any(|(_, item)| has_bool(&item));
    }
    value.is_instance_of::<PyBool>()
}

/// Samples by number, or by a mask.
#[derive(Clone)]
pub enum Chosen {
    Ids(Vec<u64>),
    Mask(Vec<bool>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Chosen {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if has_bool(&object) {
            object.extract().map(Self::Mask)
        } else {
            object.extract().map(Self::Ids)
        }
    }
}

impl Chosen {
    /// The numbers of the samples, of so many.
    pub fn ids(&self, name: &str, samples: u64) -> Result<Vec<u64>> {
        match self {
            Self::Ids(ids) => Ok(ids.clone()),
            Self::Mask(mask) if mask.len() as u64 != samples => {
                let len = mask.len();
                Err(config(format!(
                    "{name}: a mask of {len} for {samples} samples: give True or False for each"
                )))
            }
            Self::Mask(mask) => Ok((0..)
                .zip(mask)
                .filter(|(_, chosen)| **chosen)
                .map(|(sample, _)| sample)
                .collect()),
        }
    }
}

/// Most letters of a value in a message.
const SHOWN_MAX: usize = 200;

/// A value as in Python's code, cut if it is long.
fn shown(value: &Bound<'_, PyAny>) -> String {
    let mut value = value
        .repr()
        .map_or_else(|_| String::from("…"), |repr| repr.to_string());
    if let Some((end, _)) = value.char_indices().nth(SHOWN_MAX) {
        value.truncate(end);
        value.push('…');
    }
    value
}

fn refused(name: &str, value: &Bound<'_, PyAny>, words: &str) -> PyErr {
    PyTypeError::new_err(format!("{name}={}: {words}", shown(value)))
}

/// What a setting of this type may be.
fn of_type<T: 'static>() -> Option<&'static str> {
    let of = TypeId::of::<T>();
    let numbers = [
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
    ];
    if numbers.contains(&of) {
        Some("give a whole number")
    } else if of == TypeId::of::<f64>() {
        Some("give a number")
    } else if of == TypeId::of::<bool>() {
        Some("give True or False")
    } else if of == TypeId::of::<String>() {
        Some("give a name")
    } else if of == TypeId::of::<PathBuf>() {
        Some("give a path")
    } else {
        None
    }
}

/// What a setting of several types may be.
fn legal(name: &str) -> Option<&'static str> {
    Some(match name {
        "shard" => {
            "give \"env\", (rank, world), a DeviceMesh of one dimension, a process group or None"
        }
        "numa" => "give \"auto\", \"off\" or the number of a node",
        "adds" => "give a dict from name to (element type, shape)",
        "decoders" => "give a dict from name to (function, element type, shape or most elements)",
        "streams" => "give a list of CUDA streams",
        "schedule" => "give a list of (first position, list of weights)",
        "take" | "leave" => "give (fraction, key), the key a whole number",
        "subset" | "indices" => "give a list of numbers, or a mask: True or False for each sample",
        "weights" | "sample_weights" => "give a list of numbers",
        "keep" | "columns" | "join_columns" | "trim" => "give a list",
        "lengths" => "give a list of whole numbers, such as loader.lengths(NAME)",
        "packed" => "give a dict, {\"tokens\": NUMBER, \"bins\": PATH}",
        "join" => "give a path, or a list of them",
        "bins" | "copy" => "give a path, in a mix a list of them",
        "field" => "give a name, or a list of the documents' and those beside it",
        "padding" => "give a whole number, or a dict from field to number",
        "buckets" | "sizes" => "give a list of (height, width)",
        "bounds" => "give a list, or a number of groups",
        "ragged" => "give a list, or a dict from field to the most bytes of a batch",
        "up_to" | "elements" => "give a number, or a dict from column to number",
        "image" => "give a name, or a list of the names of pictures that are cut alike",
        "size" => "give a number, or (height, width)",
        "patches" => "give (pixels of a side, most patches)",
        "merge" => "give (patches of a side, least patches)",
        "normalize" => "give (mean, std), each a number or one for each channel",
        _ => return None,
    })
}
