//! The loader and its iterator as Python classes.

use crate::error::{config, exception};
use crate::given::Given;
use crate::python::{self, Code, Declared};
use crate::source::{Paths, Pictures, Source};
use crate::stream::Handle;
use crate::tensor::Tensor;
use feedline::device::DeviceKind;
use feedline::dlpack::Tensors;
use feedline::profile::{Change, Names, WhatIf, prometheus, trace};
use feedline::storage::{Cache, Direct, Mode};
use feedline::{
    BadSample, Batch, Device, Gds, LastBatch, LoaderBuilder, Numa, OnBadSample, Order, Result, Shard, State, Stop,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

/// How often a wait for a batch looks at Python's signals.
const LOOK: Duration = Duration::from_millis(100);

/// The native part of `feedline.Loader`, which has the documentation.
#[pyclass(frozen, subclass, module = "feedline")]
pub struct Loader {
    /// `None` while it is dropped.
    inner: Option<feedline::Loader>,
    code: Arc<Code>,
    ids: bool,
    device: String,
    stop: Option<Stop>,
}

#[pymethods]
impl Loader {
    #[new]
    #[pyo3(signature = (source, path, **settings))]
    fn new(py: Python<'_>, source: String, path: Paths, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let code = Arc::new(Code::default());
        let mut given = Given::new(py, settings)?;
        let source = Source::of(source, path, &mut given, &code)?;
        let pictures = Pictures::of(&mut given)?;
        let settings = Settings::of(&mut given, &code)?;
        given.finish()?;
        // Opening may read much of the dataset, and building takes memory: other threads go on meanwhile.
        let built = py.detach(|| {
            let ids = settings.ids;
            let (builder, mixed) = source.builder(&pictures, settings.seed)?;
            let (builder, device, stop) = settings.apply(builder, mixed)?;
            let loader = builder.build()?;
            no_doubled_names(&loader, ids)?;
            Ok(Self { inner: Some(loader), code, ids, device, stop })
        });
        built.map_err(|error| exception(py, &error))
    }

    /// The batches of epoch `epoch`, by default of the one that comes next; an iterator. Only one may be open at a time:
    /// one that was not read to its end ends by `close()`, `with`, or with its last reference.
    #[pyo3(signature = (epoch=None))]
    fn epoch(&self, py: Python<'_>, epoch: Option<u64>) -> PyResult<Epoch> {
        let loader = self.inner();
        self.code.check(py)?;
        let started = py.detach(|| loader.epoch(epoch.unwrap_or_else(|| loader.next_epoch())));
        let inner = started.map_err(|error| exception(py, &error))?;
        Ok(Epoch { inner: Mutex::new(Some(inner)), next: Mutex::new(()), code: self.code.clone(), ids: self.ids })
    }

    /// Where the run stands, after the last batch received, or at the beginning of `epoch`: bytes (under 1 KiB) for a
    /// checkpoint. The same on every rank.
    #[pyo3(signature = (epoch=None))]
    fn state<'py>(&self, py: Python<'py>, epoch: Option<u64>) -> PyResult<Bound<'py, PyBytes>> {
        let state = self.inner().state().map_err(|error| exception(py, &error))?;
        Ok(PyBytes::new(py, &epoch.into_iter().fold(state, State::at_epoch).to_bytes()))
    }

    /// Goes on from what `state()` gave, with the same settings on any number of ranks: the next epoch (`next_epoch`) starts
    /// after the last batch that was received. With `rebatched`, the global batch and `last_batch` may differ.
    #[pyo3(signature = (state, rebatched=false))]
    fn resume(&self, py: Python<'_>, state: &[u8], rebatched: bool) -> PyResult<()> {
        let loader = self.inner();
        let go = |state| if rebatched { loader.resume_rebatched(&state) } else { loader.resume(&state) };
        py.detach(|| State::from_bytes(state).and_then(go)).map_err(|error| exception(py, &error))
    }

    /// Whether a signal of `stop_on` arrived: finish the step, save, and leave.
    #[getter]
    fn stop_requested(&self) -> bool {
        self.stop.as_ref().is_some_and(Stop::requested)
    }

    /// Rank and world.
    #[getter]
    fn shard(&self) -> (u32, u32) {
        let shard = self.inner().shard();
        (shard.rank(), shard.world())
    }

    /// Samples of an epoch, of all ranks together.
    #[getter]
    fn samples_per_epoch(&self) -> u64 {
        self.inner().samples_per_epoch()
    }

    /// What the loader did so far and what limits it, as text.
    fn report(&self) -> String {
        self.inner().report().to_string()
    }

    /// All measurements so far, as JSON.
    fn _snapshot(&self) -> PyResult<String> {
        serde_json::to_string(&self.inner().snapshot()).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The predicted effect of a change, given and returned as JSON; None when nothing was measured yet.
    fn _what_if(&self, change: &str) -> PyResult<Option<String>> {
        let change: Change = serde_json::from_str(change).map_err(|error| PyTypeError::new_err(error.to_string()))?;
        let Some(model) = WhatIf::from(&self.inner().snapshot()) else { return Ok(None) };
        let said = serde_json::to_string(&model.with(&change));
        said.map(Some).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The totals so far as text for Prometheus, with `name` as label.
    #[pyo3(signature = (name="train"))]
    fn metrics(&self, name: &str) -> String {
        prometheus(&[(self.names(name), &self.inner().snapshot())])
    }

    /// The last batches and the work of each thread as JSON for ui.perfetto.dev.
    #[pyo3(signature = (name="train"))]
    fn trace(&self, name: &str) -> String {
        trace(&self.inner().timeline(), &self.inner().snapshot(), self.names(name))
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
        self.inner().ledger().samples.into_iter().map(entry).collect()
    }

    /// The fields of a batch: (name, element type, shape of one row). Where lengths vary the first size is the largest,
    /// and the batch has the true ones under `name + ".lens"`.
    fn spec<'py>(&self, py: Python<'py>) -> PyResult<Vec<(String, &'static str, Bound<'py, PyTuple>)>> {
        let spec = self.inner().spec();
        spec.iter().map(|f| Ok((f.name().to_string(), f.dtype().name(), PyTuple::new(py, f.dims())?))).collect()
    }

    /// Whether the lengths of a field vary: then the batch has them under `name + ".lens"`.
    fn varies(&self, name: &str) -> bool {
        self.inner().spec().iter().any(|field| field.name() == name && field.is_up_to())
    }

    /// Where batches are handed out, as `torch.device` takes it: "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    /// The epoch of the batch that comes next.
    #[getter]
    fn next_epoch(&self) -> u64 {
        self.inner().next_epoch()
    }

    /// Batches of one epoch.
    fn __len__(&self) -> usize {
        usize::try_from(self.inner().batches_per_epoch()).unwrap_or(usize::MAX)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner())
    }
}

impl Loader {
    fn inner(&self) -> &feedline::Loader {
        self.inner.as_ref().expect("it is there until the drop")
    }

    fn names<'a>(&self, name: &'a str) -> Names<'a> {
        Names::new(name, self.inner().shard().rank())
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if self.code.kept.load(Ordering::SeqCst) {
            // Python has an array in its memory.
            return std::mem::forget(inner);
        }
        without_the_gil(inner);
    }
}

/// Drops what may wait for workers, of which some may want the GIL.
fn without_the_gil<T: Send>(value: T) {
    // A thread of another library that asks for the GIL while Python ends is stopped by that, which may abort the process.
    if python::has_left() {
        return drop(value);
    }
    let mut value = Some(value);
    Python::try_attach(|py| py.detach(|| drop(value.take())));
}

/// An iterator over batches: dicts from name to `Tensor`.
///
/// next() waits without the GIL and hears Ctrl-C; it loses no batch by that. What does not answer for the `stall_deadline` ends
/// it with a TimeoutError.
#[pyclass(frozen, module = "feedline")]
pub struct Epoch {
    /// `None` once it was closed. Locked for [`LOOK`] at most, without the GIL.
    inner: Mutex<Option<feedline::Epoch>>,
    /// Whose turn it is next: a thread that waits again and again must not keep the others out.
    next: Mutex<()>,
    code: Arc<Code>,
    ids: bool,
}

impl Drop for Epoch {
    fn drop(&mut self) {
        without_the_gil(self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Epoch {
    fn lock(&self) -> MutexGuard<'_, Option<feedline::Epoch>> {
        let _turn = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The exception of an error, with that of the Python function behind it as its cause.
    fn exception(&self, py: Python<'_>, error: &feedline::Error) -> PyErr {
        let raised = exception(py, error);
        if let Some(cause) = self.code.cause(error) {
            raised.set_cause(py, Some(cause));
        }
        raised
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
        match next.transpose().map_err(|error| self.exception(py, &error))? {
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
    let dict = CLASS.import(py, "feedline", "Batch")?.call0()?;
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

pub fn lens_name(field: &str) -> String {
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
    seed: Option<u64>,
    ids: bool,
    shard: Option<ShardArg>,
    device: Option<Words>,
    gds: Option<String>,
    stop: bool,
    order: OrderArgs,
    last: Option<LastBatch>,
    steps: Vec<Step>,
}

/// What the order depends on, beside the seed.
struct OrderArgs {
    window: Option<usize>,
    lanes: Option<u32>,
    indices: Option<Vec<u64>>,
}

/// A setting that needs no other.
type Step = Box<dyn FnOnce(LoaderBuilder) -> Result<LoaderBuilder> + Send>;

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
    fn of(given: &mut Given<'_>, code: &Arc<Code>) -> PyResult<Self> {
        let mut steps: Vec<Step> = Vec::new();
        steps.extend(step(given.take("batch_size")?.or(Some(32)), |builder, rows| Ok(builder.batch_size(rows))));
        steps.extend(step(given.take("global_batch")?, |builder, rows| Ok(builder.global_batch(rows))));
        steps.extend(step(given.take("seed")?, |builder, seed| Ok(builder.seed(seed))));
        steps.extend(step(given.take("workers")?, |builder, count| Ok(builder.workers(count))));
        steps.extend(step(given.take("slots")?, |builder, count| Ok(builder.slots(count))));
        steps.extend(step(given.take("memory_budget")?, |builder, bytes| Ok(builder.memory_budget(bytes))));
        steps.extend(step(given.take("reader")?, |builder, name: String| Ok(builder.reader(reader(&name)?))));
        steps.extend(step(given.take("direct")?, |builder, name: String| Ok(builder.direct(direct(&name)?))));
        steps.extend(step(given.take("depth")?, |builder, reads| Ok(builder.depth(reads))));
        let capacity: Option<u64> = given.take("cache_bytes")?;
        let folder: Option<PathBuf> = given.take("cache")?;
        if capacity.is_some() && folder.is_none() {
            return Err(PyValueError::new_err("cache_bytes is for a cache: say cache=FOLDER"));
        }
        steps.extend(step(folder, move |builder, folder| {
            Ok(builder.cache(capacity.into_iter().fold(Cache::at(folder), Cache::capacity)))
        }));
        steps.extend(step(given.take("substitute")?, |builder, budget| {
            Ok(builder.on_bad_sample(OnBadSample::Substitute { budget }))
        }));
        steps.extend(step(given.take("ledger")?, |builder, file: PathBuf| Ok(builder.ledger(file))));
        steps.extend(step(given.take("held_deadline")?, |builder, seconds| {
            Ok(builder.held_deadline(deadline("held_deadline", seconds)?))
        }));
        steps.extend(step(given.take("stall_deadline")?, |builder, seconds| {
            Ok(builder.stall_deadline(deadline("stall_deadline", seconds)?))
        }));
        steps.extend(step(given.take("device_batches")?, |builder, count| Ok(builder.device_batches(count))));
        steps.extend(step(given.take("streams")?, |builder, streams: Vec<Handle>| {
            Ok(streams.iter().fold(builder, |builder, stream| builder.stream(stream.stream())))
        }));
        steps.extend(step(given.take("numa")?, |builder, node: NumaArg| Ok(builder.numa(node.numa()?))));
        steps.extend(step(given.take("keep")?, |builder, names: Vec<String>| {
            Ok(builder.keep(names.iter().map(String::as_str)))
        }));
        let adds: Option<Vec<Declared>> = given.take("adds")?;
        let function: Option<Py<PyAny>> = given.take("map_batch")?;
        if adds.is_some() && function.is_none() {
            return Err(PyValueError::new_err("adds are fields that map_batch writes: say map_batch, too"));
        }
        let code = code.clone();
        steps.extend(step(function, move |builder, function| {
            let adds = adds.iter().flatten().map(Declared::field).collect::<Result<Vec<_>>>()?;
            Ok(builder.map_batch_adding(adds, python::map_batch(code, function)))
        }));
        let last_batch: Option<String> = given.take("last_batch")?;
        Ok(Self {
            last: last_batch.map(|name| last(&name)).transpose().map_err(|error| exception(given.py(), &error))?,
            seed: given.take("shuffle")?,
            ids: given.take("ids")?.unwrap_or(false),
            shard: given.take("shard")?,
            device: given.take("device")?,
            gds: given.take("gds")?,
            stop: given.take("stop_on_signals")?.unwrap_or(false),
            order: OrderArgs {
                window: given.take("window")?,
                lanes: given.take("lanes")?,
                indices: given.take("indices")?,
            },
            steps,
        })
    }

    /// The builder with all settings, the device's name and the stop.
    fn apply(self, builder: LoaderBuilder, mixed: Option<Order>) -> Result<(LoaderBuilder, String, Option<Stop>)> {
        let shard = match &self.shard {
            None => Shard::single(),
            Some(ShardArg::From(launcher)) if launcher == "env" => Shard::from_env()?,
            Some(ShardArg::From(other)) => {
                return Err(config(format!("shard {other:?}: there are \"env\", (rank, world) and None")));
            }
            Some(ShardArg::Of(rank, world)) => Shard::new(*rank, *world)?,
        };
        let last = last_or_default(self.last, shard, self.ids)?;
        let mut builder = builder.order(self.order.order(self.seed, mixed)?).shard(shard).last_batch(last);
        for step in self.steps {
            builder = step(builder)?;
        }
        let stop = if self.stop { Some(Stop::on_signals()?) } else { None };
        if let Some(stop) = &stop {
            builder = builder.stop(stop.clone());
        }
        let device = self.device.map_or_else(|| String::from("auto"), |device| device.0);
        let (builder, device) = place(builder, &device, self.gds.as_deref().unwrap_or("auto"))?;
        Ok((builder, device, stop))
    }
}

/// What is done to the builder if the setting is given.
fn step<T: Send + 'static>(
    value: Option<T>,
    set: impl FnOnce(LoaderBuilder, T) -> Result<LoaderBuilder> + Send + 'static,
) -> Option<Step> {
    value.map(|value| Box::new(move |builder| set(builder, value)) as Step)
}

impl OrderArgs {
    fn order(self, seed: Option<u64>, mixed: Option<Order>) -> Result<Order> {
        let other = self.window.is_some() || self.lanes.is_some();
        match (mixed, self.indices) {
            (Some(_), Some(_)) => return Err(config("weights give the order: indices are not for a mix")),
            (Some(_), None) | (None, Some(_)) if other => {
                return Err(config("window and lanes are not for a mix or indices"));
            }
            (Some(mixed), None) => return Ok(mixed),
            (None, Some(ids)) => {
                let order = Order::indices(ids);
                return Ok(seed.into_iter().fold(order, Order::then_shuffled));
            }
            (None, None) => {}
        }
        let order = match (seed, self.window) {
            (None, Some(_)) => return Err(config("window is for a shuffled order")),
            (None, None) => Order::sequential(),
            (Some(seed), None) => Order::shuffled(seed),
            (Some(seed), Some(chunks)) => Order::windowed(seed, chunks),
        };
        Ok(self.lanes.into_iter().fold(order, Order::lanes))
    }
}

#[derive(FromPyObject)]
enum NumaArg {
    Node(u32),
    Named(String),
}

impl NumaArg {
    fn numa(&self) -> Result<Numa> {
        match self {
            Self::Node(node) => Ok(Numa::Node(*node)),
            Self::Named(name) => choice("numa", name, &[("auto", Numa::Auto), ("off", Numa::Off)]),
        }
    }
}

fn deadline(name: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| config(format!("{name} of {seconds} seconds")))
}

/// The value of this name.
fn choice<T: Copy>(setting: &str, name: &str, all: &[(&str, T)]) -> Result<T> {
    all.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        config(format!("{setting} {name:?}: there are {}", known.join(", ")))
    })
}

fn reader(name: &str) -> Result<Mode> {
    let all = [("auto", Mode::Auto), ("uring", Mode::Uring), ("pread", Mode::Pread), ("mmap", Mode::Mmap)];
    choice("reader", name, &all)
}

fn direct(name: &str) -> Result<Direct> {
    choice("direct", name, &[("auto", Direct::Auto), ("on", Direct::On), ("off", Direct::Off)])
}

/// On one rank the last batch is smaller. On several, whose batches must have the same size, samples of the epoch fill it
/// up, as with PyTorch's DistributedSampler. Blank rows must not look like samples: only `ids` can tell.
fn last_or_default(last: Option<LastBatch>, shard: Shard, ids: bool) -> Result<LastBatch> {
    match last {
        None if shard.world() > 1 => Ok(LastBatch::Pad),
        Some(LastBatch::Mask) if !ids => {
            Err(config("last_batch \"mask\" has blank rows, which ids=True marks: set it"))
        }
        Some(LastBatch::Keep) if shard.world() > 1 && !ids => Err(config(format!(
            "last_batch \"keep\" on {} ranks may have blank rows, which ids=True marks: set it, or take \"pad\" or \"drop\"",
            shard.world()
        ))),
        last => Ok(last.unwrap_or_default()),
    }
}

fn last(name: &str) -> Result<LastBatch> {
    use LastBatch::{Drop, Keep, Mask, Pad};
    choice("last_batch", name, &[("keep", Keep), ("mask", Mask), ("pad", Pad), ("drop", Drop)])
}

/// Where batches are handed out, also as PyTorch calls it. The only place that knows devices.
fn place(builder: LoaderBuilder, device: &str, gds: &str) -> Result<(LoaderBuilder, String)> {
    let words = match device {
        "cpu:0" => "cpu".into(),
        number if number.parse::<u32>().is_ok() => format!("cuda:{number}"),
        words => words.to_string(),
    };
    let device: Device = words.parse()?;
    let name = match device.kind() {
        DeviceKind::Cuda(ordinal) => format!("cuda:{ordinal}"),
        _ => "cpu".into(),
    };
    Ok((builder.device(device).gds(gds.parse::<Gds>()?), name))
}
