//! Python code in the pipeline: a transform of batches, decoders of fields, a dataset.
//!
//! ```text
//! decode worker ──Code::call──► waits for the GIL ──► the function ──► bytes of a row, or a batch changed in place
//! ```
//!
//! Invariants:
//! * No thread of feedline waits for the GIL but inside [`Code::call`], and no thread that holds
//!   the GIL waits for a worker.
//! * A function's arrays of a batch end with its call, see [`Lease`](crate::lent::Lease).
//! * The interpreter ends only after the last call: `_leave` refuses new ones and waits.

use crate::error::config;
use crate::lent::Lease;
use crate::narrow::{self, narrowed};
use crate::source::dtype;
use feedline::dataset::{Dataset, Parts, Sizes};
use feedline::decode::{Ctx, Decoder};
use feedline::error::Stage;
use feedline::storage::Sources;
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{BatchMut, Error, ErrorKind, Result, Row};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The interpreter is about to end.
static LEFT: AtomicBool = AtomicBool::new(false);
/// Calls of Python by workers, and the process that counts them.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Longest wait for the last call before the interpreter ends.
const PATIENCE: Duration = Duration::from_secs(10);
/// Exceptions kept for the loader's next error.
const KEPT: usize = 16;

/// What the Python functions of a loader share.
#[derive(Default)]
pub struct Code {
    /// Exceptions with their text, which become the cause of feedline's error.
    raised: Mutex<Vec<(String, PyErr)>>,
    /// A function kept an array of a batch: the loader's memory must stay for ever.
    pub kept: AtomicBool,
    /// Checks a dataset in Python before each epoch.
    check: OnceLock<Py<PyAny>>,
}

impl Code {
    /// Runs `call` with the GIL. Its exception is an error of kind `User`.
    fn call<T>(&self, call: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T> {
        let _inside = Inside::enter()?;
        Python::try_attach(|py| call(py).map_err(|error| self.failed(py, error)))
            .unwrap_or_else(|| Err(gone()))
    }

    fn failed(&self, py: Python<'_>, error: PyErr) -> Error {
        let words = error.to_string();
        let kept = (words.clone(), error.clone_ref(py));
        let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = (raised.len() == KEPT).then(|| raised.remove(0));
        raised.push(kept);
        drop(raised);
        // It may have the last reference to anything.
        drop(oldest);
        Error::user(words)
    }

    /// Errors: a dataset in Python that has another length than when the loader was built.
    pub fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.check
            .get()
            .map_or(Ok(()), |check| check.call0(py).map(drop))
    }

    /// The exception behind an error.
    pub fn cause(&self, error: &Error) -> Option<PyErr> {
        let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        let at = raised
            .iter()
            .position(|(words, _)| error.message().contains(words.as_str()))?;
        Some(raised.swap_remove(at).1)
    }
}

/// A worker's stay in Python.
struct Inside;

impl Inside {
    fn enter() -> Result<Self> {
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let inside = Self;
        if LEFT.load(Ordering::SeqCst) {
            Err(gone())
        } else {
            Ok(inside)
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

fn gone() -> Error {
    Error::new(
        ErrorKind::Cancelled,
        Stage::Map,
        "Python is ending: its code can no longer be called",
    )
}

/// Notes the process, in which [`leave`] may wait. Again in a forked child, which has none of the
/// workers inside.
#[pyfunction(name = "_enter")]
pub fn enter() {
    INSIDE.store(0, Ordering::SeqCst);
    PROCESS.store(std::process::id(), Ordering::SeqCst);
}

/// The default number of workers of one loader: this rank's part of the cores.
#[pyfunction(name = "_cores")]
pub fn cores() -> usize {
    feedline::order::cores_of_rank()
}

/// Asks for the GIL and gives the time that it took, in nanoseconds. `None` if Python is ending.
pub fn wait_for_gil() -> Option<u64> {
    let _inside = Inside::enter().ok()?;
    let began = Instant::now();
    Python::try_attach(|_| ())?;
    Some(began.elapsed().as_nanos() as u64)
}

/// Whether no worker is, or comes, into Python any more.
pub fn has_left() -> bool {
    LEFT.load(Ordering::SeqCst)
}

/// For atexit: lets no worker into Python any more, and waits for those inside.
#[pyfunction(name = "_leave")]
pub fn leave(py: Python<'_>) {
    LEFT.store(true, Ordering::SeqCst);
    // Names go one after the other from here on, loaders and tensors among them.
    feedline::device::cuda::end_calls();
    // A child of a bare fork has none of the workers that its copy of the count knows.
    if PROCESS.load(Ordering::SeqCst) != std::process::id() {
        return;
    }
    py.detach(|| {
        let until = Instant::now() + PATIENCE;
        while INSIDE.load(Ordering::SeqCst) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

/// A field that Python declares: name, element type, and the shape of a row or, as one number, its
/// most elements.
#[derive(FromPyObject)]
pub struct Declared(pub String, pub String, pub Dims);

#[derive(FromPyObject)]
pub enum Dims {
    UpTo(usize),
    Fixed(Vec<usize>),
}

impl Declared {
    pub fn field(&self) -> Result<Field> {
        let dtype = dtype(&self.1)?;
        Ok(match &self.2 {
            Dims::UpTo(max) => Field::up_to(&self.0, dtype, *max),
            Dims::Fixed(dims) => Field::fixed(&self.0, dtype, dims.clone()),
        })
    }
}

/// A transform of whole batches: `function(arrays, seed, epoch, batch, valid)`.
pub fn map_batch(
    code: Arc<Code>,
    function: Arc<Py<PyAny>>,
) -> impl Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static {
    move |batch, ctx| {
        let seed = ctx.draws("python").next_u64();
        let epoch = ctx.epoch();
        let index = batch.index();
        let valid = batch.valid();
        code.call(|py| {
            let lease = Lease::new();
            let arrays = lend(py, batch, &lease)?;
            let called = function.call1(py, (arrays, seed, epoch, index, valid));
            if lease.end() > 0 {
                // Whoever has it may read it at any time.
                code.kept.store(true, Ordering::SeqCst);
                called?;
                return Err(PyTypeError::new_err(
                    "map_batch kept an array of the batch: its memory is used again, keep a copy",
                ));
            }
            called.map(drop)
        })?;
        lens_are_legal(batch)
    }
}

/// The arrays of a batch by name, with the lengths of those that vary.
fn lend<'py>(
    py: Python<'py>,
    batch: &mut BatchMut<'_>,
    lease: &Arc<Lease>,
) -> PyResult<Bound<'py, PyDict>> {
    let arrays = PyDict::new(py);
    let fields = batch.spec().fields().to_vec();
    for (index, field) in fields.iter().enumerate() {
        let shape = batch.shape(index);
        let array = Lease::lend(lease, batch.bytes_mut(index), field.dtype(), shape)?;
        arrays.set_item(field.name(), array)?;
        let rows = batch.len();
        if let Some(lens) = batch.lens_mut(index) {
            let array = Lease::lend(lease, lens, DType::U64, vec![rows])?;
            arrays.set_item(crate::loader::lens_name(field.name()), array)?;
        }
    }
    Ok(arrays)
}

/// The function may have written any length.
fn lens_are_legal(batch: &mut BatchMut<'_>) -> Result<()> {
    let fields = batch.spec().fields().to_vec();
    for (index, field) in fields.iter().enumerate() {
        let max = batch.shape(index).get(1).map_or(0, |max| *max as u64);
        let Some(lens) = batch.lens_mut(index) else {
            continue;
        };
        if let Some(row) = lens.iter().position(|len| *len > max) {
            let len = lens[row];
            let name = field.name();
            lens[row] = 0;
            return Err(Error::user(format!(
                "map_batch: row {row} of `{name}.lens` is {len}; the maximum is {max}"
            )));
        }
    }
    Ok(())
}

/// Decodes a field by `function(bytes, seed)`, which gives the bytes of a row.
pub struct Function {
    pub code: Arc<Code>,
    pub function: Py<PyAny>,
    pub field: Field,
}

impl Decoder for Function {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        Ok(vec![self.field.clone().renamed(&input.name)])
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let field = ctx.fields().start;
        let seed = ctx.draws("python").next_u64();
        self.code.call(|py| {
            let bytes = self
                .function
                .bind(py)
                .call1((PyBytes::new(py, input), seed))?;
            Ok(out.copy_from(field, bytes.cast::<PyBytes>()?.as_bytes()))
        })?
    }
}

/// A dataset in Python: `function(index)` gives the bytes of each field of a sample; the count of
/// samples, the name, the fields, and a function that checks it before an epoch.
#[derive(FromPyObject)]
pub struct Samples(Py<PyAny>, u64, String, Vec<Declared>, Py<PyAny>);

impl Samples {
    pub fn dataset(&self) -> Arc<dyn Dataset> {
        let schema = vec![EncodedField::bytes("sample")];
        let sources = Arc::new(Sources::new());
        Arc::new(Indices {
            count: self.1,
            name: self.2.clone(),
            schema,
            sources,
        })
    }

    /// `narrow`: integers of 64 bits come with 32.
    pub fn decoder(
        &self,
        py: Python<'_>,
        code: Arc<Code>,
        narrow: bool,
    ) -> Result<impl Decoder + use<>> {
        let declared = self
            .3
            .iter()
            .map(Declared::field)
            .collect::<Result<Vec<_>>>()?;
        code.check.get_or_init(|| self.4.clone_ref(py));
        let fields = if narrow {
            declared.iter().cloned().map(narrowed).collect()
        } else {
            declared.clone()
        };
        let narrows = declared
            .iter()
            .zip(&fields)
            .map(|(declared, field)| declared != field)
            .collect();
        Ok(Items {
            code,
            function: self.0.clone_ref(py),
            fields,
            narrows,
        })
    }
}

/// Samples without bytes: only their numbers count.
struct Indices {
    count: u64,
    name: String,
    schema: Vec<EncodedField>,
    sources: Arc<Sources>,
}

impl Dataset for Indices {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }

    fn len(&self) -> u64 {
        self.count
    }

    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    fn sizes(&self) -> Sizes {
        Sizes::new(1)
    }

    fn extents<'a>(&'a self, _sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        parts.inline(0, b"\0");
        Ok(())
    }

    fn identity(&self) -> u64 {
        self.count
    }

    fn describe(&self) -> String {
        format!("{} samples of {}", self.count, self.name)
    }
}

struct Items {
    code: Arc<Code>,
    function: Py<PyAny>,
    fields: Vec<Field>,
    /// Which fields have integers of 64 bits that come with 32.
    narrows: Vec<bool>,
}

impl Decoder for Items {
    fn outputs(&self, _input: &EncodedField) -> Result<Vec<Field>> {
        Ok(self.fields.clone())
    }

    fn decode(&self, _input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let fields = ctx.fields();
        let sample = ctx.id();
        self.code.call(|py| {
            let sample = self.function.bind(py).call1((sample,))?;
            let sample = sample.cast::<PyTuple>()?;
            for ((field, bytes), narrows) in fields.zip(sample.iter()).zip(&self.narrows) {
                let bytes = bytes.cast::<PyBytes>()?.as_bytes();
                let copied = if *narrows {
                    narrow::copy(bytes, field, ctx, out)
                } else {
                    out.copy_from(field, bytes)
                };
                if let Err(error) = copied {
                    return Ok(Err(error));
                }
            }
            Ok(Ok(()))
        })?
    }
}

/// A decoder of the setting `decoders`.
pub fn decoder(
    py: Python<'_>,
    code: &Arc<Code>,
    function: &Py<PyAny>,
    field: &Declared,
) -> Result<Function> {
    if field.0.is_empty() {
        return Err(config("a decoder needs the name of its field"));
    }
    Ok(Function {
        code: code.clone(),
        function: function.clone_ref(py),
        field: field.field()?,
    })
}
