//! The loader and its iterator as Python classes.

use crate::error::{config, exception};
use crate::source::{Normalize, Pictures, Source};
use crate::stream::Handle;
use crate::tensor::Tensor;
use feedline::device::DeviceKind;
use feedline::dlpack::Tensors;
use feedline::{BadSample, Batch, Device, Gds, LastBatch, LoaderBuilder, OnBadSample, Order, Result, Shard, State};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

/// How often a wait for a batch looks at Python's signals.
const LOOK: Duration = Duration::from_millis(100);

/// Reads a dataset and hands out batches; the package's README has a table of each source's fields.
///
/// Loader(source, path, *, batch_size=32, seed=None, ...)
///
/// source        "images": a folder of pictures, a folder per class. "records": fixed-size records in one file or a
///               folder. "tokens": flat files of tokens. "wds": tar shards as WebDataset writes them.
/// path          File, folder or pattern, as in "train-{0000..0127}.tar".
/// batch_size    Rows of a batch of this rank.
/// seed          Shuffles, and augments pictures. None: in order, as for validation.
/// shard         "env": rank and world from torchrun, Slurm, MPI. (rank, world): these. None: the only one.
/// last_batch    What becomes of samples that fill no batch: "keep", "mask", "pad", "drop".
/// workers       Decode threads; one per core by default.
/// slots         Batches in memory at once, yours included.
/// memory_budget Most bytes of memory.
/// held_deadline Seconds that next() waits while you hold every batch; 10 by default.
/// stall_deadline Seconds that one read, decode or copy may take before next() raises TimeoutError, which names it; 300 by
///               default.
/// substitute    Other samples stand in for those that cannot be had, for so many distinct ones at most; see `bad_samples`. None:
///               the first one is an error.
/// ledger        With `substitute`: a file that gets a line of JSON each time that a sample could not be had.
/// device        Where batches are handed out: "auto" (a GPU where one is usable; of several the one of the local rank), "cpu" or
///               "host", "cuda" (the first), "cuda:N"; or a torch.device.
/// device_batches GPU: batches in its memory at once, yours included; 3 by default.
/// streams       GPU: streams that work on every batch beside the one that takes it, see Batch.bind. They must live as long
///               as the batches.
/// gds           "auto", "require" or "off": GPUDirect Storage.
/// ids           Also hands out "ids" and "status", one per row; they lie on the host.
/// decode_size   Pictures: pixels of a side.
/// augment       Pictures: random part and flip, or the middle. By default the first when there is a seed.
/// float_dtype   Pictures: "f32", "f16" or "bf16", 0 to 1 before `normalize`. None: bytes. Floats are made at the very end,
///               on a GPU behind the copy, so that the bus carries bytes; the values are the same everywhere.
/// normalize     Pictures as floats: (mean, std), a list of one number or of one per channel each; see IMAGENET.
/// channels_first Pictures: [rows, channels, height, width], not [rows, height, width, channels].
/// record_bytes  Records: bytes of one.
/// token, seq_len Tokens: "u16", "u32", "i32", "i64"; how many to a sample.
/// image, columns wds: endings of the picture ("jpg;png"); of the other members, "cls" being a class. By default the
///               first sample tells.
#[pyclass(frozen, module = "feedline_torch")]
pub struct Loader {
    inner: feedline::Loader,
    ids: bool,
    device: String,
}

#[pymethods]
impl Loader {
    #[new]
    #[pyo3(signature = (source, path, *, batch_size=32, seed=None, shard=None, last_batch="keep", workers=None,
        slots=None, memory_budget=None, held_deadline=None, stall_deadline=None, substitute=None, ledger=None,
        device=Words("auto".into()), device_batches=None, streams=Vec::new(), gds="auto", ids=false, decode_size=None, augment=None, float_dtype=None, normalize=None,
        channels_first=false, record_bytes=None, token=None, seq_len=None, image=None, columns=None))]
    #[pyo3(
        text_signature = "(source, path, *, batch_size=32, seed=None, shard=None, last_batch='keep', workers=None, \
        slots=None, memory_budget=None, held_deadline=None, stall_deadline=None, substitute=None, ledger=None, \
        device='auto', device_batches=None, streams=[], gds='auto', \
        ids=False, decode_size=None, augment=None, float_dtype=None, normalize=None, channels_first=False, \
        record_bytes=None, token=None, seq_len=None, image=None, columns=None)"
    )]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        source: String,
        path: PathBuf,
        batch_size: usize,
        seed: Option<u64>,
        shard: Option<ShardArg>,
        last_batch: &str,
        workers: Option<usize>,
        slots: Option<usize>,
        memory_budget: Option<usize>,
        held_deadline: Option<f64>,
        stall_deadline: Option<f64>,
        substitute: Option<u64>,
        ledger: Option<PathBuf>,
        device: Words,
        device_batches: Option<usize>,
        streams: Vec<Handle>,
        gds: &str,
        ids: bool,
        decode_size: Option<u32>,
        augment: Option<bool>,
        float_dtype: Option<String>,
        normalize: Option<Normalize>,
        channels_first: bool,
        record_bytes: Option<usize>,
        token: Option<String>,
        seq_len: Option<usize>,
        image: Option<String>,
        columns: Option<Vec<String>>,
    ) -> PyResult<Self> {
        let source = Source { kind: source, path, record_bytes, token, seq_len, image, columns };
        let random = augment.unwrap_or(seed.is_some());
        let pictures = Pictures { size: decode_size, augment, random, float_dtype, normalize, channels_first };
        let settings = Settings {
            batch_size,
            seed,
            shard,
            workers,
            slots,
            memory_budget,
            held_deadline,
            stall_deadline,
            substitute,
            ledger,
            device_batches,
            streams,
        };
        // Opening may read much of the dataset, and building takes memory: other threads go on meanwhile.
        let built = py.detach(|| {
            let builder = settings.apply(source.builder(&pictures)?)?.last_batch(last(last_batch)?);
            let (builder, device) = place(builder, &device.0, gds)?;
            let loader = builder.build()?;
            no_doubled_names(&loader, ids)?;
            Ok(Self { inner: loader, ids, device })
        });
        built.map_err(|error| exception(py, &error))
    }

    /// The batches of epoch `epoch`, by default of the one that comes next; an iterator. Only one may be open at a time:
    /// one that was not read to its end ends by `close()`, `with`, or with its last reference.
    #[pyo3(signature = (epoch=None))]
    fn epoch(&self, py: Python<'_>, epoch: Option<u64>) -> PyResult<Epoch> {
        let started = py.detach(|| self.inner.epoch(epoch.unwrap_or_else(|| self.inner.next_epoch())));
        let inner = started.map_err(|error| exception(py, &error))?;
        Ok(Epoch { inner: Mutex::new(Some(inner)), next: Mutex::new(()), ids: self.ids })
    }

    /// Where the run stands, after the last batch received: bytes (under 1 KiB) for a checkpoint. The same on every rank.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let state = self.inner.state().map_err(|error| exception(py, &error))?;
        Ok(PyBytes::new(py, &state.to_bytes()))
    }

    /// Goes on from what `state()` gave, with the same settings on any number of ranks: the next epoch (`next_epoch`) starts
    /// after the last batch that was received.
    fn resume(&self, py: Python<'_>, state: &[u8]) -> PyResult<()> {
        let resumed = State::from_bytes(state).and_then(|state| self.inner.resume(&state));
        resumed.map_err(|error| exception(py, &error))
    }

    /// What the loader did so far and what limits it, as text.
    fn report(&self) -> String {
        self.inner.report().to_string()
    }

    /// The samples that could not be had and that others stand in for so far, each once, as it was the first time: a list of
    /// dicts with `epoch`, `batch`, `row`, `sample`, `substitute` (None for one that was tried as a substitute itself), `path`,
    /// `member`, `offset`, `length`, `kind`, `stage`, `cause` and `times` (rows of delivered batches that wanted it).
    fn bad_samples<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let entry = |bad: BadSample| {
            let dict = PyDict::new(py);
            dict.set_item("epoch", bad.epoch)?;
            dict.set_item("batch", bad.batch)?;
            dict.set_item("row", bad.row)?;
            dict.set_item("sample", bad.sample)?;
            dict.set_item("substitute", bad.substitute)?;
            dict.set_item("path", bad.path)?;
            dict.set_item("member", bad.member)?;
            dict.set_item("offset", bad.offset)?;
            dict.set_item("length", bad.length)?;
            dict.set_item("kind", bad.kind.as_str())?;
            dict.set_item("stage", bad.stage.as_str())?;
            dict.set_item("cause", bad.cause)?;
            dict.set_item("times", bad.times)?;
            Ok(dict)
        };
        self.inner.ledger().samples.into_iter().map(entry).collect()
    }

    /// The fields of a batch: (name, element type, shape of one row). Where lengths vary the first size is the largest,
    /// and the batch has the true ones under `name + ".lens"`.
    fn spec<'py>(&self, py: Python<'py>) -> PyResult<Vec<(String, &'static str, Bound<'py, PyTuple>)>> {
        let spec = self.inner.spec();
        spec.iter().map(|f| Ok((f.name().to_string(), f.dtype().name(), PyTuple::new(py, f.dims())?))).collect()
    }

    /// Where batches are handed out, as `torch.device` takes it: "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    /// The epoch of the batch that comes next.
    #[getter]
    fn next_epoch(&self) -> u64 {
        self.inner.next_epoch()
    }

    /// Batches of one epoch.
    fn __len__(&self) -> usize {
        usize::try_from(self.inner.batches_per_epoch()).unwrap_or(usize::MAX)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner)
    }
}

/// An iterator over batches: dicts from name to `Tensor`.
///
/// next() waits without the GIL and hears Ctrl-C; it loses no batch by that. What does not answer for the `stall_deadline` ends
/// it with a TimeoutError.
#[pyclass(frozen, module = "feedline_torch")]
pub struct Epoch {
    /// `None` once it was closed. Locked for [`LOOK`] at most, without the GIL.
    inner: Mutex<Option<feedline::Epoch>>,
    /// Whose turn it is next: a thread that waits again and again must not keep the others out.
    next: Mutex<()>,
    ids: bool,
}

impl Epoch {
    fn lock(&self) -> MutexGuard<'_, Option<feedline::Epoch>> {
        let _turn = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f`, which takes [`LOOK`] at most, until it is ready; signals of Python in between end that.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        mut f: impl FnMut(&mut Option<feedline::Epoch>) -> Poll<T> + Send,
    ) -> PyResult<T> {
        loop {
            if let Poll::Ready(out) = py.detach(|| f(&mut self.lock())) {
                return Ok(out);
            }
            py.check_signals()?;
        }
    }
}

#[pymethods]
impl Epoch {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let next = self.wait(py, |epoch| epoch.as_mut().map_or(Poll::Ready(None), |epoch| epoch.next_within(LOOK)))?;
        match next.transpose().map_err(|error| exception(py, &error))? {
            Some(batch) => Ok(Some(dict(py, batch, self.ids)?)),
            None => Ok(None),
        }
    }

    /// Batches that are still to come.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.wait(py, |epoch| Poll::Ready(epoch.as_ref().map_or(0, ExactSizeIterator::len)))
    }

    /// Ends it, so that the next epoch can start. Batches that were handed out stay.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, |epoch| {
            *epoch = None;
            Poll::Ready(())
        })
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

/// The batch as Python's class `Batch`, a dict.
fn dict(py: Python<'_>, batch: Batch, ids: bool) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let dict = CLASS.import(py, "feedline_torch", "Batch")?.call0()?;
    let Tensors { fields, lens, ids: numbers, status, .. } = batch.into_dlpack();
    for (name, tensor) in fields {
        dict.set_item(name, Tensor::new(tensor))?;
    }
    for (name, tensor) in lens {
        dict.set_item(lens_name(&name), Tensor::new(tensor))?;
    }
    if ids {
        dict.set_item("ids", Tensor::new(numbers))?;
        dict.set_item("status", Tensor::new(status))?;
    }
    Ok(dict)
}

fn lens_name(field: &str) -> String {
    format!("{field}.lens")
}

/// A dict would lose one of them.
fn no_doubled_names(loader: &feedline::Loader, ids: bool) -> Result<()> {
    let spec = loader.spec();
    let lens = spec.iter().filter(|field| field.is_up_to()).map(|field| lens_name(field.name()));
    let more: Vec<_> = lens.chain(["ids", "status"].into_iter().filter(|_| ids).map(String::from)).collect();
    match spec.iter().find(|field| more.iter().any(|name| name == field.name())) {
        Some(field) => Err(config(format!("the batch would have `{}` twice", field.name()))),
        None => Ok(()),
    }
}

/// Settings of the loader whatever the source.
struct Settings {
    batch_size: usize,
    seed: Option<u64>,
    shard: Option<ShardArg>,
    workers: Option<usize>,
    slots: Option<usize>,
    memory_budget: Option<usize>,
    held_deadline: Option<f64>,
    stall_deadline: Option<f64>,
    substitute: Option<u64>,
    ledger: Option<PathBuf>,
    device_batches: Option<usize>,
    streams: Vec<Handle>,
}

#[derive(FromPyObject)]
enum ShardArg {
    From(String),
    Of(u32, u32),
}

/// What `str()` says of an object.
struct Words(String);

impl<'a, 'py> FromPyObject<'a, 'py> for Words {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(object.str()?.extract()?))
    }
}

impl Settings {
    fn apply(&self, mut builder: LoaderBuilder) -> Result<LoaderBuilder> {
        builder = builder.batch_size(self.batch_size).order(self.seed.map_or(Order::sequential(), Order::shuffled));
        match &self.shard {
            None => {}
            Some(ShardArg::From(launcher)) if launcher == "env" => builder = builder.shard(Shard::from_env()?),
            Some(ShardArg::From(other)) => {
                return Err(config(format!("shard {other:?}: there are \"env\", (rank, world) and None")));
            }
            Some(ShardArg::Of(rank, world)) => builder = builder.shard(Shard::new(*rank, *world)?),
        }
        if let Some(workers) = self.workers {
            builder = builder.workers(workers);
        }
        if let Some(budget) = self.substitute {
            builder = builder.on_bad_sample(OnBadSample::Substitute { budget });
        }
        if let Some(ledger) = &self.ledger {
            builder = builder.ledger(ledger);
        }
        if let Some(slots) = self.slots {
            builder = builder.slots(slots);
        }
        if let Some(bytes) = self.memory_budget {
            builder = builder.memory_budget(bytes);
        }
        let deadline = |name: &str, seconds: f64| {
            Duration::try_from_secs_f64(seconds).map_err(|_| config(format!("{name} of {seconds} seconds")))
        };
        if let Some(seconds) = self.held_deadline {
            builder = builder.held_deadline(deadline("held_deadline", seconds)?);
        }
        if let Some(seconds) = self.stall_deadline {
            builder = builder.stall_deadline(deadline("stall_deadline", seconds)?);
        }
        if let Some(batches) = self.device_batches {
            builder = builder.device_batches(batches);
        }
        Ok(self.streams.iter().fold(builder, |builder, stream| builder.stream(stream.stream())))
    }
}

fn last(name: &str) -> Result<LastBatch> {
    Ok(match name {
        "keep" => LastBatch::Keep,
        "mask" => LastBatch::Mask,
        "pad" => LastBatch::Pad,
        "drop" => LastBatch::Drop,
        other => return Err(config(format!("last_batch {other:?}: there are keep, mask, pad and drop"))),
    })
}

/// Where batches are handed out, also as PyTorch calls it. The only place that knows devices.
fn place(builder: LoaderBuilder, device: &str, gds: &str) -> Result<(LoaderBuilder, String)> {
    let device: Device = device.parse()?;
    let name = match device.kind() {
        DeviceKind::Cuda(ordinal) => format!("cuda:{ordinal}"),
        _ => "cpu".into(),
    };
    Ok((builder.device(device).gds(gds.parse::<Gds>()?), name))
}
