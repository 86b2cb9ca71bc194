//! The loader and its iterator as Python classes.

use crate::error::{check, config, exception};
use crate::given::{Chosen, Given};
use crate::python::{self, Code, Declared};
use crate::source::{Paths, Pictures, Source};
use crate::stream::Handle;
use crate::tensor::Tensor;
use feedline::dataset::{Dataset, DatasetExt, stoppable};
use feedline::device::Gds;
use feedline::device::{DeviceKind, StreamUse};
use feedline::dlpack::{BatchStreams, Dlpack, Tensors};
use feedline::error::Stage;
use feedline::memory::{Budget, Numa};
use feedline::order::{Groups, Weights};
use feedline::process::Process;
use feedline::profile::ranks::RankReport;
use feedline::profile::{Across, Change, Names, WhatIf, prometheus, trace};
use feedline::storage::{Cache, Direct, Mode};
use feedline::tensor::Shape;
use feedline::{
    BadSample, Batch, Device, ErrorKind, LastBatch, LoaderBuilder, OnBadSample, Order, Rank,
    Result, State, Stop,
};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyTuple, PyType};
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

/// How often a wait looks at Python's signals.
const LOOK: Duration = Duration::from_millis(100);
/// The same of a wait for a batch. In free-threaded Python what another thread lets go of, such as
/// the tensors of a batch, is freed only when the thread that made it runs Python code.
const TURN: Duration = if cfg!(Py_GIL_DISABLED) {
    Duration::from_millis(5)
} else {
    LOOK
};

/// The native part of `feedline.Loader`, which has the documentation.
///
/// Rank and world are asked of the process when something depends on them. A loader that has said
/// nothing of the kind is built again where they differ from those that it was built with; one that
/// has is an error.
#[pyclass(frozen, subclass, module = "feedline")]
pub struct Loader {
    recipe: Arc<Recipe>,
    /// One of several of a process: its rank does not come from the process.
    beside: bool,
    process: Process,
    /// Locked by threads of Python only, and for no call.
    built: Mutex<Built>,
}

/// A loader, and the ranks that it was built for.
struct Built {
    /// `None` while it is dropped or built again.
    loader: Option<Arc<feedline::Loader>>,
    device: String,
    shard: Rank,
    /// Lengths, batches or states of this rank were given.
    told: bool,
    arrays: Arc<Arrays>,
}

/// Counts of the arrays that live, by name.
struct Arrays(BTreeMap<String, Arc<()>>);

impl Arrays {
    fn of(loader: &feedline::Loader) -> Self {
        let fields = loader
            .spec()
            .into_iter()
            .map(|field| field.name().to_string());
        Self(fields.map(|name| (name, Arc::default())).collect())
    }

    /// The tensor of a field, counted as long as it or a view of it lives.
    fn tensor(&self, name: &str, dlpack: Dlpack, streams: &BatchStreams) -> Tensor {
        let dlpack = match self.0.get(name) {
            Some(count) => dlpack.counted_by(count),
            None => dlpack,
        };
        Tensor::new(dlpack, streams)
    }

    /// The fields of which arrays live, and how many.
    fn held(&self) -> BTreeMap<&str, usize> {
        let counts = self
            .0
            .iter()
            .map(|(name, count)| (name.as_str(), Arc::strong_count(count) - 1));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

#[pymethods]
impl Loader {
    #[new]
    #[classmethod]
    #[pyo3(signature = (source, path, **settings))]
    fn new(
        class: &Bound<'_, PyType>,
        source: String,
        path: Paths,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let py = class.py();
        let code = Arc::new(Code::default());
        let mut given = Given::new(py, settings)?;
        let source = Source::of(source, path, &mut given, &code)?;
        let pictures = Pictures::of(&mut given)?;
        let settings = Settings::of(&mut given, &code, &pictures)?;
        let found = given.take("ranks")?;
        given.finish()?;
        if source.is_packed() && settings.order.names_samples() {
            let message = "indices and sample_weights are of samples, and samples of packed are rows of several documents: subset, take and leave \
                           choose documents, before they are packed into bins of their own";
            return Err(exception(py, &config(message)));
        }
        // A launcher's variables that contradict each other count when a rank is needed: until then
        // there may be better ones.
        let shard = settings
            .shard(found)
            .or_else(|error| match settings.shard {
                Some(ShardArg::From(ref launcher)) if launcher == "env" => Ok(Rank::single()),
                _ => Err(exception(py, &error)),
            })?;
        let seed = settings.seed;
        let budget = settings.budget;
        let open = move || source.open(seed, budget).map(|dataset| (source, dataset));
        let (source, dataset) = interruptible(py, open)?.map_err(|error| exception(py, &error))?;
        let recipe = Arc::new(Recipe {
            source,
            dataset,
            pictures,
            settings,
            code,
        });
        let built = recipe
            .build_for(class, shard, None)
            .map_err(|error| exception(py, &error))?;
        Ok(Self {
            recipe,
            beside: false,
            process: Process::current(),
            built: Mutex::new(built),
        })
    }

    /// A loader of the same data and settings for another rank, on a device of its own.
    fn _beside(slf: &Bound<'_, Self>, shard: (u32, u32), device: &str) -> PyResult<Self> {
        let py = slf.py();
        let own = slf.get();
        own._check_fork(py)?;
        let recipe = own.recipe.clone();
        let built = Rank::new(shard.0, shard.1)
            .and_then(|shard| recipe.build_for(slf.as_any(), shard, Some(device)));
        let built = Mutex::new(built.map_err(|error| exception(py, &error))?);
        Ok(Self {
            recipe,
            beside: true,
            process: own.process,
            built,
        })
    }

    /// The batches of epoch `epoch`, by default of the one that comes next; an iterator. Only one
    /// may be open at a time: one that was not read to its end ends by `close()`, `with`, or with
    /// its last reference.
    #[pyo3(signature = (epoch=None))]
    fn epoch(slf: &Bound<'_, Self>, epoch: Option<u64>) -> PyResult<Epoch> {
        let py = slf.py();
        let loader = Self::settled(slf)?;
        slf.get().recipe.code.check(py)?;
        let started = py.detach(|| loader.epoch(epoch.unwrap_or_else(|| loader.next_epoch())));
        let inner = started.map_err(|error| exception(py, &error))?;
        let Recipe { settings, code, .. } = &*slf.get().recipe;
        // One rank that leaves its loop alone would keep the others waiting in their next
        // collective operation.
        let stop = settings.stop.clone().filter(|_| loader.rank().world() == 1);
        let inner = Mutex::new(Some(inner));
        let next = Mutex::new(());
        Ok(Epoch {
            inner,
            kept: Mutex::default(),
            received: Mutex::default(),
            next,
            process: slf.get().process,
            code: code.clone(),
            arrays: slf.get().built().arrays.clone(),
            ids: settings.ids,
            stop,
        })
    }

    /// Draws the samples of the next epochs by these weights.
    fn _reweight(slf: &Bound<'_, Self>, weights: Vec<f64>) -> PyResult<()> {
        let py = slf.py();
        let loader = Self::settled(slf)?;
        let drawn = slf.get().recipe.settings.order.drawn.as_ref();
        let drawn = drawn.ok_or_else(|| {
            exception(
                py,
                &config("this loader was not made with sample_weights or weights_of"),
            )
        })?;
        let set = || loader.weights(drawn.of_samples(weights.into())?);
        py.detach(set).map_err(|error| exception(py, &error))
    }

    /// Where the run stands, after the last batch received, or `advance` batches into `epoch`:
    /// bytes (under 1 KiB) for a checkpoint. The same on every rank.
    #[pyo3(signature = (epoch=None, advance=0))]
    fn state<'py>(
        slf: &Bound<'py, Self>,
        epoch: Option<u64>,
        advance: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let py = slf.py();
        let state = Self::settled(slf)?
            .state()
            .map_err(|error| exception(py, &error))?;
        Ok(PyBytes::new(
            py,
            &epoch
                .into_iter()
                .fold(state, State::at_epoch)
                .advance(advance)
                .to_bytes(),
        ))
    }

    /// Goes on from what `state()` gave, with the same settings on any number of ranks: the next
    /// epoch (`next_epoch`) starts after the last batch that was received. With `rebatched`, the
    /// global batch and `last_batch` may differ.
    #[pyo3(signature = (state, rebatched=false))]
    fn resume(slf: &Bound<'_, Self>, state: &[u8], rebatched: bool) -> PyResult<()> {
        let py = slf.py();
        let loader = Self::settled(slf)?;
        py.detach(|| {
            State::from_bytes(state).and_then(|state| {
                if rebatched {
                    loader.resume_rebatched(&state)
                } else {
                    loader.resume(&state)
                }
            })
        })
        .map_err(|error| exception(py, &error))
    }

    /// Asks for the end of loops, as a signal does with `stop_on_signals`.
    fn _request_stop(&self) {
        self.recipe.settings.stop.iter().for_each(Stop::request);
    }

    /// Whether a signal of `stop_on_signals` arrived: finish the step, save, and leave.
    #[getter]
    fn stop_requested(&self, py: Python<'_>) -> PyResult<bool> {
        self._check_fork(py)?;
        Ok(self
            .recipe
            .settings
            .stop
            .as_ref()
            .is_some_and(Stop::requested))
    }

    /// Rank and world.
    #[getter]
    fn shard(slf: &Bound<'_, Self>) -> PyResult<(u32, u32)> {
        let shard = Self::settled(slf)?.rank();
        Ok((shard.number(), shard.world()))
    }

    /// Samples of an epoch, of all ranks together.
    #[getter]
    fn samples_per_epoch(slf: &Bound<'_, Self>) -> PyResult<u64> {
        Ok(Self::settled(slf)?.samples_per_epoch())
    }

    /// Rows of a full batch of this rank, and of all ranks together.
    #[getter]
    fn _batch_sizes(slf: &Bound<'_, Self>) -> PyResult<(u64, u64)> {
        let loader = Self::settled(slf)?;
        let global = loader.global_batch();
        let shard = loader.rank();
        Ok((
            global
                .saturating_sub(shard.number().into())
                .div_ceil(shard.world().into()),
            global,
        ))
    }

    /// Leaves out batches `start` to before `stop` of an epoch.
    fn _skip(slf: &Bound<'_, Self>, epoch: u64, start: u64, stop: u64) -> PyResult<()> {
        let py = slf.py();
        let loader = Self::settled(slf)?;
        py.detach(|| loader.skip(epoch, start..stop))
            .map_err(|error| exception(py, &error))
    }

    /// Ids of this rank's rows in the next batch.
    fn _next_ids(slf: &Bound<'_, Self>) -> PyResult<Vec<u64>> {
        let py = slf.py();
        let loader = Self::settled(slf)?;
        py.detach(|| loader.next_ids())
            .map_err(|error| exception(py, &error))
    }

    /// Checks rank, world, state and next ids of all processes.
    #[staticmethod]
    fn _agree(py: Python<'_>, processes: Vec<(u32, u32, Vec<u8>, Vec<u64>)>) -> PyResult<()> {
        let check = || {
            let states = processes
                .iter()
                .map(|(.., state, _)| State::from_bytes(state))
                .collect::<Result<Vec<_>>>()?;
            State::agree(&states)?;
            let ranks = processes
                .iter()
                .map(|(rank, world, _, ids)| Ok((Rank::new(*rank, *world)?, ids.clone())));
            Rank::agree(&ranks.collect::<Result<Vec<_>>>()?)
        };
        check().map_err(|error| exception(py, &error))
    }

    /// Lengths of a field of all samples of the source, as the bytes of 64-bit numbers.
    fn _lengths<'py>(&self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyByteArray>> {
        check(py, self.process)?;
        let dataset = self.recipe.dataset.clone();
        let lengths = interruptible(py, move || dataset.lengths(&name))?
            .map_err(|error| exception(py, &error))?;
        bytes_of(py, lengths.into_iter().map(u64::to_ne_bytes))
    }

    /// Height and width of the picture of all samples of the source, as the bytes of 32-bit
    /// numbers, the low ones first.
    fn _picture_sizes<'py>(
        &self,
        py: Python<'py>,
        name: String,
        file: PathBuf,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        check(py, self.process)?;
        let dataset = self.recipe.dataset.clone();
        let image = self.recipe.pictures.upright();
        let sizes = move || {
            let facts = dataset.facts(file).picture_sizes(&name, &image).open()?;
            facts.picture_sizes()
        };
        let sizes = interruptible(py, sizes)?.map_err(|error| exception(py, &error))?;
        let pair = |(width, height)| u64::from(height) | u64::from(width) << 32;
        bytes_of(py, sizes.into_iter().map(|size| pair(size).to_le_bytes()))
    }

    /// Ids of the first `count` samples of an epoch, in the order of all ranks together.
    fn _preview(&self, py: Python<'_>, epoch: u64, count: u64) -> PyResult<Vec<u64>> {
        let loader = self.inner(py)?;
        py.detach(|| loader.preview(epoch, count))
            .map_err(|error| exception(py, &error))
    }

    /// Says that this rank's own part of a step is done, and that it waits for the other ranks from
    /// here on: before the first collective operation of each step, for `across`. On a GPU it has
    /// no effect.
    fn arrive(&self, py: Python<'_>) -> PyResult<()> {
        self.inner(py)?.arrive();
        Ok(())
    }

    /// On a GPU, says that all work of a step was given to `stream`, or else to the stream that
    /// took the last batch, so that the report tells how long this program leaves it idle.
    /// `feedline.torch` calls it after each step of an optimizer.
    #[pyo3(signature = (stream=None))]
    fn mark(&self, py: Python<'_>, stream: Option<Handle>) -> PyResult<()> {
        let loader = self.inner(py)?;
        py.detach(|| match stream {
            None => loader.mark(),
            Some(stream) => loader.mark_on(stream.stream()),
        });
        Ok(())
    }

    /// What the loader did so far and what limits it, as text.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        self.asked(py, |loader| loader.report().to_string())
    }

    /// All measurements so far, as JSON.
    fn _snapshot(&self, py: Python<'_>) -> PyResult<String> {
        serde_json::to_string(&self.asked(py, feedline::Loader::snapshot)?).map_err(unserialized)
    }

    /// The verdict so far and its headline, as JSON.
    fn _verdict(&self, py: Python<'_>) -> PyResult<(String, String)> {
        let verdict = self.asked(py, |loader| loader.report().verdict)?;
        let json = serde_json::to_string(&verdict).map_err(unserialized)?;
        Ok((verdict.headline(), json))
    }

    /// The estimate of a run with this step: text, and JSON; None without two batches.
    fn _estimate(&self, py: Python<'_>, step_s: f64) -> PyResult<Option<(String, String)>> {
        let step = Duration::try_from_secs_f64(step_s)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let Some(estimate) = self.asked(py, |loader| loader.estimate(step))? else {
            return Ok(None);
        };
        let json = serde_json::to_string(&estimate).map_err(unserialized)?;
        Ok(Some((estimate.to_string(), json)))
    }

    /// What this process tells the others, as JSON.
    fn _rank_report(&self, py: Python<'_>, process: u32, processes: u32) -> PyResult<String> {
        let report = self.asked(py, |loader| loader.rank_report(process, processes))?;
        serde_json::to_string(&report).map_err(unserialized)
    }

    /// The rank and world that the launcher of this process gives.
    #[staticmethod]
    fn _launched(py: Python<'_>) -> PyResult<(u32, u32)> {
        let rank = Rank::from_env().map_err(|error| exception(py, &error))?;
        Ok((rank.number(), rank.world()))
    }

    /// The view of these reports: text, and JSON.
    #[staticmethod]
    fn _across(py: Python<'_>, reports: Vec<String>) -> PyResult<(String, String)> {
        let reports: Result<Vec<RankReport>, _> = reports
            .iter()
            .map(|report| serde_json::from_str(report))
            .collect();
        let reports = reports
            .map_err(|error| PyValueError::new_err(format!("a report of a rank: {error}")))?;
        let view = py.detach(|| Across::of(reports));
        let json = serde_json::to_string(&view).map_err(unserialized)?;
        Ok((view.to_string(), json))
    }

    /// The predicted effect of a change, given and returned as JSON; None when nothing was measured
    /// yet.
    fn _what_if(&self, py: Python<'_>, change: &str) -> PyResult<Option<String>> {
        let change: Change = serde_json::from_str(change).map_err(|_| {
            PyTypeError::new_err(format!(
                "what_if takes numbers, and True or False: {change}"
            ))
        })?;
        let Some(model) = WhatIf::from(&self.asked(py, feedline::Loader::snapshot)?) else {
            return Ok(None);
        };
        let said = serde_json::to_string(&model.with(&change));
        said.map(Some).map_err(unserialized)
    }

    /// The totals so far as text for Prometheus, with `name` as label.
    #[pyo3(signature = (name="train"))]
    fn metrics(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        self.asked(py, |loader| {
            prometheus(&[(names(loader, name), &loader.snapshot())])
        })
    }

    /// Scalars of the time since the last call, for a training log. Meant for every step.
    ///
    /// `seconds` in which an epoch was open, without pauses for an evaluation, `samples_per_s`,
    /// `starved_share` (time without a ready batch; on a GPU of its stream), `host_late_share` (on
    /// a GPU: its stream ran dry because of this program), `wait_p99_s`, `read_bytes_per_s`,
    /// `from_memory_share` (bytes that no device read), `decode_busy_share` and
    /// `map_batch_busy_share` (of the workers' time), and `bad_samples` (rows for which others
    /// stood in). A value that was not measured is left out. `epoch_repeated` and `epoch_left_out`
    /// are exact before the first batch: rows of a whole epoch of all ranks that repeat a sample to
    /// fill up a batch, and samples that are dropped.
    #[pyo3(signature = (prefix="feedline/"))]
    fn log<'py>(&self, py: Python<'py>, prefix: &str) -> PyResult<Bound<'py, PyDict>> {
        let scalars = PyDict::new(py);
        for (name, value) in self.asked(py, feedline::Loader::log)?.scalars() {
            scalars.set_item(format!("{prefix}{name}"), value)?;
        }
        Ok(scalars)
    }

    /// The last batches and the work of each thread as JSON for ui.perfetto.dev.
    #[pyo3(signature = (name="train"))]
    fn trace(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        self.asked(py, |loader| {
            trace(&loader.timeline(), &loader.snapshot(), names(loader, name))
        })
    }

    /// The samples that could not be had and that others stand in for so far, each once, as it was
    /// the first time: a list of dicts with `epoch`, `batch`, `row`, `sample`, `substitute` (None
    /// for one that was tried as a substitute itself), `path`, `member`, `offset`, `length`,
    /// `kind`, `stage`, `cause` and `times` (rows of delivered batches that wanted it).
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
        self.inner(py)?
            .ledger()
            .samples
            .into_iter()
            .map(entry)
            .collect()
    }

    /// The fields of a batch: (name, element type, shape of one row). Where lengths vary the first
    /// size is the largest, and the batch has the true ones under `name + ".lens"`.
    fn spec<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(String, &'static str, Bound<'py, PyTuple>)>> {
        let spec = self.inner(py)?.spec();
        spec.iter()
            .map(|f| {
                Ok((
                    f.name().to_string(),
                    f.dtype().name(),
                    PyTuple::new(py, f.dims())?,
                ))
            })
            .collect()
    }

    /// Whether the lengths of a field vary: then the batch has them under `name + ".lens"`.
    fn varies(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        Ok(self
            .inner(py)?
            .spec()
            .iter()
            .any(|field| field.name() == name && field.is_up_to()))
    }

    /// Where batches are handed out, as `torch.device` takes it: "cpu" or "cuda:N".
    #[getter]
    fn device(slf: &Bound<'_, Self>) -> PyResult<String> {
        Self::settled(slf)?;
        Ok(slf.get().built().device.clone())
    }

    /// The epoch of the batch that comes next.
    #[getter]
    fn next_epoch(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.inner(py)?.next_epoch())
    }

    /// Batches of one epoch.
    fn __len__(slf: &Bound<'_, Self>) -> PyResult<usize> {
        Ok(usize::try_from(Self::settled(slf)?.batches_per_epoch()).unwrap_or(usize::MAX))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        self.inner(py).map_or_else(
            |_| "Loader of the parent process".into(),
            |loader| format!("{loader:?}"),
        )
    }

    /// Raises in a forked child.
    fn _check_fork(&self, py: Python<'_>) -> PyResult<()> {
        check(py, self.process)
    }
}

impl Loader {
    fn built(&self) -> MutexGuard<'_, Built> {
        self.built.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&self, py: Python<'_>) -> PyResult<Arc<feedline::Loader>> {
        self._check_fork(py)?;
        self.built().loader.clone().ok_or_else(|| {
            PyRuntimeError::new_err(
                "another thread builds this loader again, for the ranks of the process",
            )
        })
    }

    /// What `ask` makes of the loader, without the GIL: questions to a GPU's driver may wait for
    /// another thread's call.
    fn asked<T: Send>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&feedline::Loader) -> T + Send,
    ) -> PyResult<T> {
        let loader = self.inner(py)?;
        Ok(py.detach(|| ask(&loader)))
    }

    /// The loader of this process's rank, which does not change from here on.
    fn settled(slf: &Bound<'_, Self>) -> PyResult<Arc<feedline::Loader>> {
        let py = slf.py();
        let own = slf.get();
        own._check_fork(py)?;
        if own.beside {
            return own.inner(py);
        }
        let found = match own.recipe.settings.shard {
            Some(ShardArg::From(_)) => slf.call_method0("_ranks")?.extract()?,
            _ => None,
        };
        let Built { shard, told, .. } = *own.built();
        let now = match own.recipe.settings.shard(found) {
            Err(_) if told && found.is_none() => shard,
            now => now.map_err(|error| exception(py, &error))?,
        };
        // A group of processes that ended says nothing of the ranks of this one.
        let ended = told && found.is_none() && now.world() == 1;
        let same = ended || (now.number(), now.world()) == (shard.number(), shard.world());
        if !told && found.is_some_and(|(_, world)| world > 1) {
            slf.call_method0("_check_ranks")?;
        }
        if same {
            own.built().told = true;
            return own.inner(py);
        }
        if told {
            let message = format!(
                "this loader was asked for a length, size, device, state or batch as {shard}; now this process is {now}: ask it \
                 only after the processes know each other (torch.distributed.init_process_group), or give it \
                 shard=(rank, world)"
            );
            return Err(exception(py, &config(message)));
        }
        let old = {
            let mut built = own.built();
            // What another thread has built meanwhile stays.
            if built.told {
                None
            } else {
                built.loader.take()
            }
        };
        let Some(old) = old else {
            return own.inner(py);
        };
        py.detach(|| drop(old));
        let again = own.recipe.build_for(slf.as_any(), now, None);
        *own.built() = match again {
            Ok(built) => Built {
                told: true,
                ..built
            },
            // It stays as it was, so that what follows is this error, too.
            Err(error) => {
                let before = py
                    .detach(|| own.recipe.build(shard, None))
                    .map_err(|error| exception(py, &error))?;
                *own.built() = before;
                return Err(exception(py, &error));
            }
        };
        own.inner(py)
    }
}

pub fn unserialized(error: serde_json::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn names<'a>(loader: &feedline::Loader, name: &'a str) -> Names<'a> {
    Names::new(name, loader.rank().number())
}

impl Drop for Loader {
    fn drop(&mut self) {
        let built = self.built.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(inner) = built.loader.take() else {
            return;
        };
        if self.recipe.code.kept.load(Ordering::SeqCst) {
            // Python has an array in its memory.
            return std::mem::forget(inner);
        }
        without_the_gil(inner);
    }
}

/// Everything that a loader is built of. The dataset is opened once.
struct Recipe {
    source: Source,
    dataset: Arc<dyn Dataset>,
    pictures: Pictures,
    settings: Settings,
    code: Arc<Code>,
}

impl Recipe {
    /// Builds without the GIL, since it takes memory. Where a GPU has too little, the class or
    /// loader `owner` may free what its framework keeps of it; then once more. `device`: in place
    /// of the setting.
    fn build_for(
        &self,
        owner: &Bound<'_, PyAny>,
        shard: Rank,
        device: Option<&str>,
    ) -> Result<Built> {
        let build = || owner.py().detach(|| self.build(shard, device));
        match build() {
            Err(error) if error.kind() == ErrorKind::Budget && error.stage() == Stage::Device => {
                let freed = owner
                    .call_method0("_free_device_memory")
                    .and_then(|freed| freed.is_truthy());
                if freed.unwrap_or(false) {
                    build()
                } else {
                    Err(error)
                }
            }
            built => built,
        }
    }

    fn build(&self, shard: Rank, device: Option<&str>) -> Result<Built> {
        let settings = &self.settings;
        let builder = self
            .source
            .builder(&self.dataset, &self.pictures, settings.seed)?;
        let (builder, device) = settings.apply(builder, &self.dataset, shard, device)?;
        let loader = builder.build()?;
        no_doubled_names(&loader, settings.ids)?;
        let arrays = Arc::new(Arrays::of(&loader));
        Ok(Built {
            loader: Some(Arc::new(loader)),
            device,
            shard,
            told: false,
            arrays,
        })
    }
}

fn bytes_of<const N: usize>(
    py: Python<'_>,
    numbers: impl ExactSizeIterator<Item = [u8; N]>,
) -> PyResult<Bound<'_, PyByteArray>> {
    PyByteArray::new_with(py, N * numbers.len(), |bytes| {
        bytes
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(numbers)
            .for_each(|(place, number)| *place = number);
        Ok(())
    })
}

/// Calls what may read much of a dataset, on a thread of its own. Ctrl-C ends the wait, and the
/// thread soon after it.
fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    read: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let caller = std::thread::current();
    let done = Arc::new(AtomicBool::new(false));
    let ended = done.clone();
    let stop = Stop::new();
    let own = stop.clone();
    let thread = feedline::start_thread("dataset's opening", "feedline-open", move || {
        let out = stoppable(&own, read);
        ended.store(true, Ordering::Release);
        caller.unpark();
        out
    });
    let thread = thread.map_err(|error| exception(py, &error))?;
    while !done.load(Ordering::Acquire) && !thread.is_finished() {
        py.detach(|| std::thread::park_timeout(LOOK));
        if let Err(signal) = py.check_signals() {
            stop.request();
            // It ends at once, and with it the file that it was making; but not if a store does not
            // answer.
            py.detach(|| std::thread::park_timeout(LOOK));
            return Err(signal);
        }
    }
    Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
}

/// Drops what may wait for workers, of which some may want the GIL.
fn without_the_gil<T: Send>(value: T) {
    // A thread of another library that asks for the GIL while Python ends is stopped by that, which
    // may abort the process.
    if python::has_left() {
        return drop(value);
    }
    let mut value = Some(value);
    Python::try_attach(|py| py.detach(|| drop(value.take())));
}

/// `state` after `samples` more samples were trained.
#[pyfunction]
pub fn state_at<'py>(py: Python<'py>, state: &[u8], samples: u64) -> PyResult<Bound<'py, PyBytes>> {
    let after = State::from_bytes(state).and_then(|state| state.at(samples));
    let after = after.map_err(|error| exception(py, &error))?;
    Ok(PyBytes::new(py, &after.to_bytes()))
}

/// `state` after one more batch was trained.
#[pyfunction]
pub fn state_trained<'py>(
    py: Python<'py>,
    state: &[u8],
    epoch: u64,
    batch: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    let after = State::from_bytes(state).and_then(|state| state.trained(epoch, batch));
    let after = after.map_err(|error| exception(py, &error))?;
    Ok(PyBytes::new(py, &after.to_bytes()))
}

/// An iterator over batches: dicts from name to `Tensor`.
///
/// next() waits without the GIL and hears Ctrl-C; it loses no batch by that. What does not answer
/// for the `stall_deadline` ends it with a TimeoutError.
#[pyclass(frozen, module = "feedline")]
pub struct Epoch {
    /// `None` once it was closed. Locked for [`TURN`] at most, without the GIL.
    inner: Mutex<Option<feedline::Epoch>>,
    /// A batch whose call ended by a signal of Python.
    kept: Mutex<Option<Batch>>,
    /// Epoch and index of the batch handed out last.
    received: Mutex<Option<(u64, u64)>>,
    /// Whose turn it is next: a thread that waits again and again must not keep the others out.
    next: Mutex<()>,
    process: Process,
    code: Arc<Code>,
    arrays: Arc<Arrays>,
    ids: bool,
    /// Ends the loop after a whole batch.
    stop: Option<Stop>,
}

impl Drop for Epoch {
    fn drop(&mut self) {
        let kept = self
            .kept
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        without_the_gil((
            self.inner
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
            kept,
        ));
    }
}

impl Epoch {
    fn take_kept(&self) -> Option<Batch> {
        self.kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

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
        if error.kind() == ErrorKind::BatchesHeld {
            // Without it the error says less.
            let _ = raised.value(py).setattr("held", self.arrays.held());
        }
        raised
    }

    /// Calls `f`, which takes [`TURN`] at most, until it is ready; signals of Python in between end
    /// that.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        mut f: impl FnMut(&mut Option<feedline::Epoch>) -> Poll<T> + Send,
    ) -> PyResult<T> {
        check(py, self.process)?;
        loop {
            if let Poll::Ready(out) = py.detach(|| f(&mut self.lock())) {
                return Ok(out);
            }
            py.check_signals()?;
            if cfg!(Py_GIL_DISABLED) {
                py.run(c"pass", None, None)?;
            }
        }
    }

    /// The batch as Python's class `Batch`, a dict.
    fn dict<'py>(&self, py: Python<'py>, batch: Batch) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let dict = CLASS.import(py, "feedline", "Batch")?.call0()?;
        *self.received.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((batch.epoch(), batch.index()));
        let on_gpu = batch.device().kind() != DeviceKind::Host;
        let Tensors {
            fields,
            lens,
            offsets,
            ids: numbers,
            status,
            streams,
            ..
        } = batch.into_dlpack();
        if on_gpu {
            crate::stream::note(&streams);
        }
        for (name, tensor) in fields {
            let tensor = self.arrays.tensor(&name, tensor, &streams);
            dict.set_item(name, tensor)?;
        }
        for (name, tensor) in lens {
            dict.set_item(lens_name(&name), Tensor::new(tensor, &streams))?;
        }
        for (name, tensor) in offsets {
            dict.set_item(offsets_name(&name), Tensor::new(tensor, &streams))?;
        }
        if self.ids {
            dict.set_item("ids", Tensor::new(numbers, &streams))?;
            dict.set_item("status", Tensor::new(status, &streams))?;
        }
        Ok(dict)
    }
}

#[pymethods]
impl Epoch {
    fn __iter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        check(slf.py(), slf.process).map(|()| slf)
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        if let Some(batch) = self.take_kept() {
            return self.dict(py, batch).map(Some);
        }
        let stops = || self.stop.as_ref().is_some_and(Stop::requested);
        let next = self.wait(py, |epoch| match epoch {
            Some(epoch) if !stops() => epoch.next_within(TURN),
            _ => Poll::Ready(None),
        })?;
        match next
            .transpose()
            .map_err(|error| self.exception(py, &error))?
        {
            Some(batch) => {
                // A signal that came meanwhile is raised behind this call, and what it returned is
                // lost.
                if let Err(signal) = py.check_signals() {
                    *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(batch);
                    return Err(signal);
                }
                Ok(Some(self.dict(py, batch)?))
            }
            None => Ok(None),
        }
    }

    /// Batches that are still to come.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let kept = usize::from(
            self.kept
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_some(),
        );
        self.wait(py, |epoch| {
            Poll::Ready(epoch.as_ref().map_or(0, |epoch| epoch.len() + kept))
        })
    }

    /// Epoch and index of the batch that was handed out last.
    #[getter]
    fn _received(&self) -> Option<(u64, u64)> {
        *self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it, so that the next epoch can start. Batches that were handed out stay.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let kept = self.take_kept();
        self.wait(py, |epoch| {
            *epoch = None;
            Poll::Ready(())
        })?;
        py.detach(|| drop(kept));
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        check(slf.py(), slf.process).map(|()| slf)
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        // In a forked child nothing is open, and what ends the block, such as `sys.exit`, must get
        // through.
        if self.process.is_forked() {
            Ok(())
        } else {
            self.close(py)
        }
    }
}

pub fn lens_name(field: &str) -> String {
    format!("{field}.lens")
}

pub fn offsets_name(field: &str) -> String {
    format!("{field}.offsets")
}

/// A dict would lose one of them.
fn no_doubled_names(loader: &feedline::Loader, ids: bool) -> Result<()> {
    let spec = loader.spec();
    let lens = spec
        .iter()
        .filter(|field| field.is_up_to())
        .map(|field| lens_name(field.name()));
    let lens = lens.chain(
        spec.iter()
            .filter(|field| field.is_packed())
            .map(|field| offsets_name(field.name())),
    );
    let more: Vec<_> = lens
        .chain(
            ["ids", "status"]
                .into_iter()
                .filter(|_| ids)
                .map(String::from),
        )
        .collect();
    match spec
        .iter()
        .find(|field| more.iter().any(|name| name == field.name()))
    {
        Some(field) => Err(config(format!(
            "the batch would have `{}` twice",
            field.name()
        ))),
        None => Ok(()),
    }
}

/// Settings of the loader whatever the source.
struct Settings {
    seed: Option<u64>,
    ids: bool,
    shard: Option<ShardArg>,
    device: Option<Words>,
    /// Why the caller's framework wants the host.
    device_why: Option<String>,
    gds: Option<String>,
    stop: Option<Stop>,
    order: OrderArgs,
    last: Option<LastBatch>,
    steps: Vec<Step>,
    /// The memory budget, which data in memory must fit before it is read.
    budget: usize,
}

/// What the order depends on, beside the seed.
struct OrderArgs {
    window: Option<usize>,
    lanes: Option<u32>,
    indices: Option<Chosen>,
    drawn: Option<Drawn>,
    groups: Option<Groups>,
    /// Batches by a budget have equally many rows on all ranks.
    evens: bool,
}

/// Draws by weights.
struct Drawn {
    by: DrawnBy,
    draws: Option<u64>,
    replacement: bool,
    /// Made once: the classes are read for it.
    weights: OnceLock<Weights>,
}

enum DrawnBy {
    Weights(Arc<[f64]>),
    /// Equally many of each value of this field.
    Classes(String),
}

impl Drawn {
    fn of(given: &mut Given<'_>) -> PyResult<Option<Self>> {
        let py = given.py();
        let bad = |message: &str| Err(exception(py, &config(message)));
        let weights: Option<Vec<f64>> = given.take("sample_weights")?;
        let classes: Option<String> = given.take("weights_of")?;
        let draws: Option<u64> = given.take("draws")?;
        let replacement: Option<bool> = given.take("replacement")?;
        let by = match (weights, classes) {
            (Some(_), Some(_)) => return bad("sample_weights or weights_of, not both"),
            (Some(weights), None) => DrawnBy::Weights(weights.into()),
            (None, Some(_)) if replacement == Some(false) => {
                return bad("replacement=False is for sample_weights: every class would run out");
            }
            (None, Some(classes)) => DrawnBy::Classes(classes),
            (None, None) if draws.is_some() || replacement.is_some() => {
                return bad("draws and replacement are for sample_weights or weights_of");
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Self {
            by,
            draws,
            replacement: replacement.unwrap_or(true),
            weights: OnceLock::new(),
        }))
    }

    fn weights(&self, dataset: &Arc<dyn Dataset>) -> Result<Weights> {
        if let Some(made) = self.weights.get() {
            return Ok(made.clone());
        }
        let made = match &self.by {
            DrawnBy::Weights(weights) => self.of_samples(weights.clone())?,
            DrawnBy::Classes(field) => self.drawn(Weights::balanced(&classes(dataset, field)?)?),
        };
        Ok(self.weights.get_or_init(|| made).clone())
    }

    fn of_samples(&self, weights: Arc<[f64]>) -> Result<Weights> {
        Ok(self.drawn(if self.replacement {
            Weights::new(&weights)?
        } else {
            Weights::without_replacement(weights)?
        }))
    }

    fn drawn(&self, weights: Weights) -> Weights {
        self.draws.into_iter().fold(weights, Weights::draws)
    }
}

/// The values of a field that is one number for each sample.
fn classes(dataset: &Arc<dyn Dataset>, field: &str) -> Result<Vec<Vec<u8>>> {
    let schema = dataset.schema();
    let Some(of) = schema.iter().find(|of| of.name == field) else {
        let names: Vec<&str> = schema.iter().map(|of| &*of.name).collect();
        let names = names.join(", ");
        return Err(config(format!(
            "weights_of={field:?}: no such field is read; there are {names}"
        )));
    };
    let raw = of.as_raw();
    if !raw.is_some_and(|raw| matches!(raw.shape(), Shape::Fixed(dims) if dims.is_empty())) {
        return Err(config(format!(
            "weights_of={field:?}: its rows are not single numbers; give sample_weights"
        )));
    }
    let loader = feedline::Loader::builder(dataset.clone())
        .keep([field])
        .batch_size(1024)
        .build()?;
    let mut classes = Vec::new();
    for batch in loader.epoch(0)? {
        let batch = batch?;
        let field = batch.field(field)?;
        let bytes = field.as_bytes()?;
        classes.extend(bytes.chunks(bytes.len() / batch.len()).map(<[u8]>::to_vec));
    }
    Ok(classes)
}

/// Bounds of groups, or how many there shall be.
#[derive(FromPyObject)]
enum Bounds {
    Count(usize),
    Of(Vec<u64>),
}

/// Groups by length, unless `bounds` says otherwise.
const GROUPS: usize = 64;

/// How batches get their rows.
enum Rows {
    /// All by the loader's batch size.
    Loader,
    /// By a budget.
    Budget,
    /// By a budget, a multiple of a number.
    Multiple,
}

/// The groups of an order.
fn groups(given: &mut Given<'_>, pictures: &Pictures) -> PyResult<(Option<Groups>, Rows)> {
    let buckets = pictures
        .groups()
        .map_err(|error| exception(given.py(), &error))?;
    let lengths: Option<Vec<u64>> = given.take("lengths")?;
    let patches = pictures
        .patch_counts()
        .map_err(|error| exception(given.py(), &error))?;
    let bounds: Option<Bounds> = given.take("bounds")?;
    let trim: Option<Vec<String>> = given.take("trim")?;
    let budget: Option<u64> = given.take("budget")?;
    let multiple: Option<u64> = given.take("multiple_of")?;
    let wrong = |words: &'static str| Err(PyValueError::new_err(words));
    if lengths.is_some() && patches.is_some() {
        return wrong("lengths and sizes are two kinds of groups: say one");
    }
    let made = match (lengths.or(patches), buckets) {
        (Some(_), Some(_)) => return wrong("lengths and buckets are two kinds of groups: say one"),
        (None, Some(_)) if bounds.is_some() || trim.is_some() => {
            return wrong("bounds and trim are for lengths");
        }
        (None, Some(buckets)) => Ok(buckets),
        (Some(lengths), None) => match bounds.unwrap_or(Bounds::Count(GROUPS)) {
            Bounds::Of(bounds) => Groups::by(lengths, &bounds),
            Bounds::Count(count) => Groups::by_length(&lengths, count),
        },
        (None, None)
            if bounds.is_some() || trim.is_some() || budget.is_some() || multiple.is_some() =>
        {
            return wrong(
                "bounds, budget, multiple_of and trim are for groups: say lengths, or sizes of patches, too",
            );
        }
        (None, None) => return Ok((None, Rows::Loader)),
    };
    let made = made.map_err(|error| exception(given.py(), &error))?;
    let bounds = made.bounds().to_vec();
    let made = trim
        .into_iter()
        .flatten()
        .fold(made, |made, field| made.up_to(field, &bounds));
    let rows = match (budget, multiple) {
        (None, _) => Rows::Loader,
        (Some(_), None) => Rows::Budget,
        (Some(_), Some(_)) => Rows::Multiple,
    };
    let made = multiple.into_iter().fold(made, Groups::multiple_of);
    Ok((Some(budget.into_iter().fold(made, Groups::budget)), rows))
}

/// Fields whose rows lie side by side, with the most bytes of a batch.
#[derive(Clone, FromPyObject)]
enum Ragged {
    Each(BTreeMap<String, Option<usize>>),
    Names(Vec<String>),
}

/// A setting that needs no other.
type Step = Box<dyn Fn(LoaderBuilder) -> Result<LoaderBuilder> + Send + Sync>;

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
    fn of(given: &mut Given<'_>, code: &Arc<Code>, pictures: &Pictures) -> PyResult<Self> {
        let mut steps: Vec<Step> = Vec::new();
        let (groups, rows) = groups(given, pictures)?;
        let default = matches!(rows, Rows::Loader).then_some(32);
        steps.extend(step(
            given.take("batch_size")?.or(default),
            |builder, rows| Ok(builder.batch_size(rows)),
        ));
        steps.extend(step(given.take("global_batch")?, |builder, rows| {
            Ok(builder.global_batch(rows))
        }));
        steps.extend(step(given.take("seed")?, |builder, seed| {
            Ok(builder.seed(seed))
        }));
        steps.extend(step(given.take("workers")?, |builder, count| {
            Ok(builder.workers(count))
        }));
        steps.extend(step(given.take("slots")?, |builder, count| {
            Ok(builder.tuning(|t| t.slots(count)))
        }));
        let budget: Option<usize> = given.take("memory_budget")?;
        let shared = given
            .take("_loaders")?
            .zip(budget)
            .map(|(loaders, bytes)| Budget::new(bytes, loaders));
        steps.extend(step(budget, |builder, bytes| {
            Ok(builder.memory_budget(bytes))
        }));
        steps.extend(step(shared, |builder, budget| {
            Ok(builder.shared_budget(&budget))
        }));
        steps.extend(step(given.take("reader")?, |builder, name: String| {
            let mode = reader(&name)?;
            Ok(builder.tuning(|t| t.reader(mode)))
        }));
        steps.extend(step(given.take("direct")?, |builder, name: String| {
            let direct = direct(&name)?;
            Ok(builder.tuning(|t| t.direct(direct)))
        }));
        steps.extend(step(given.take("depth")?, |builder, reads| {
            Ok(builder.tuning(|t| t.depth(reads)))
        }));
        let capacity: Option<u64> = given.take("cache_bytes")?;
        let folder: Option<PathBuf> = given.take("cache")?;
        if capacity.is_some() && folder.is_none() {
            return Err(PyValueError::new_err(
                "cache_bytes is for a cache: say cache=FOLDER",
            ));
        }
        steps.extend(step(folder, move |builder, folder| {
            Ok(builder.cache(
                capacity
                    .into_iter()
                    .fold(Cache::at(folder), Cache::capacity),
            ))
        }));
        steps.extend(step(given.take("substitute")?, |builder, budget| {
            Ok(builder.on_bad_sample(OnBadSample::Substitute { budget }))
        }));
        steps.extend(step(given.take("ledger")?, |builder, file: PathBuf| {
            Ok(builder.ledger(file))
        }));
        steps.extend(step(given.take("held_deadline")?, |builder, seconds| {
            let deadline = deadline("held_deadline", seconds)?;
            Ok(builder.tuning(|t| t.held_deadline(deadline)))
        }));
        steps.extend(step(given.take("stall_deadline")?, |builder, seconds| {
            let deadline = deadline("stall_deadline", seconds)?;
            Ok(builder.tuning(|t| t.stall_deadline(deadline)))
        }));
        steps.extend(step(given.take("device_batches")?, |builder, count| {
            Ok(builder.tuning(|t| t.device_batches(count)))
        }));
        steps.extend(step(
            given.take("streams")?,
            |builder, streams: Vec<Handle>| {
                // Which stream takes a batch, its consumer says later.
                Ok(streams.iter().fold(builder, |builder, stream| {
                    builder.stream_as(stream.stream(), StreamUse::Beside)
                }))
            },
        ));
        steps.extend(step(given.take("numa")?, |builder, node: NumaArg| {
            let node = node.numa()?;
            Ok(builder.tuning(|t| t.numa(node)))
        }));
        steps.extend(step(given.take("ragged")?, |builder, ragged: Ragged| {
            Ok(match &ragged {
                Ragged::Each(each) => each.iter().fold(builder, |builder, (name, bytes)| {
                    builder.ragged(name, *bytes)
                }),
                Ragged::Names(names) => names
                    .iter()
                    .fold(builder, |builder, name| builder.ragged(name, None)),
            })
        }));
        steps.extend(step(given.take("keep")?, |builder, names: Vec<String>| {
            Ok(builder.keep(names.iter().map(String::as_str)))
        }));
        let adds: Option<Vec<Declared>> = given.take("adds")?;
        let function: Option<Arc<Py<PyAny>>> = given.take("map_batch")?.map(Arc::new);
        if adds.is_some() && function.is_none() {
            return Err(PyValueError::new_err(
                "adds are fields that map_batch writes: say map_batch, too",
            ));
        }
        let code = code.clone();
        steps.extend(step(function, move |builder, function| {
            let adds = adds
                .iter()
                .flatten()
                .map(Declared::field)
                .collect::<Result<Vec<_>>>()?;
            let function = python::map_batch(code.clone(), function);
            // It runs with the interpreter's lock.
            Ok(builder.map_batch_adding(adds, function).map_batch_in_turn())
        }));
        steps.extend(step(given.take("last_batch_share")?, |builder, most| {
            Ok(builder.last_batch_share(most))
        }));
        let last_batch: Option<String> = given.take("last_batch")?;
        Ok(Self {
            last: last_batch
                .map(|name| last(&name))
                .transpose()
                .map_err(|error| exception(given.py(), &error))?,
            seed: given.take("shuffle")?,
            ids: given.take("ids")?.unwrap_or(false),
            shard: given.take("shard")?,
            device: given.take("device")?,
            device_why: given.take("device_why")?,
            gds: given.take("gds")?,
            stop: given
                .take("stop_on_signals")?
                .unwrap_or(false)
                .then(Stop::new),
            order: OrderArgs {
                window: given.take("window")?,
                lanes: given.take("lanes")?,
                indices: given.take("indices")?,
                drawn: Drawn::of(given)?,
                groups,
                evens: matches!(rows, Rows::Budget),
            },
            steps,
            budget: budget.unwrap_or(usize::MAX),
        })
    }

    /// Rank and world: those given, else those `found` in the process, else the launcher's.
    fn shard(&self, found: Option<(u32, u32)>) -> Result<Rank> {
        match (&self.shard, found) {
            (None, _) => Ok(Rank::single()),
            (Some(ShardArg::From(launcher)), None) if launcher == "env" => Rank::from_env(),
            (Some(ShardArg::From(launcher)), Some((rank, world))) if launcher == "env" => {
                Rank::new(rank, world)
            }
            (Some(ShardArg::From(other)), _) => Err(config(format!(
                "shard {other:?}: there are \"env\", (rank, world) and None"
            ))),
            (Some(ShardArg::Of(rank, world)), _) => Rank::new(*rank, *world),
        }
    }

    /// The builder with all settings, and the device's name.
    fn apply(
        &self,
        builder: LoaderBuilder,
        dataset: &Arc<dyn Dataset>,
        shard: Rank,
        device: Option<&str>,
    ) -> Result<(LoaderBuilder, String)> {
        let last = last_or_default(self.last, shard, self.ids)?;
        let order = self.order.order(self.seed, dataset, shard)?;
        let builder = order.into_iter().fold(builder, LoaderBuilder::order);
        let mut builder = builder.rank(shard).last_batch(last);
        for step in &self.steps {
            builder = step(builder)?;
        }
        let device = device
            .or(self.device.as_ref().map(|device| &*device.0))
            .unwrap_or("auto");
        place(
            builder,
            device,
            self.device_why.as_deref(),
            self.gds.as_deref().unwrap_or("auto"),
        )
    }
}

/// What is done to the builder if the setting is given.
fn step<T: Clone + Send + Sync + 'static>(
    value: Option<T>,
    set: impl Fn(LoaderBuilder, T) -> Result<LoaderBuilder> + Send + Sync + 'static,
) -> Option<Step> {
    value.map(|value| Box::new(move |builder| set(builder, value.clone())) as Step)
}

impl OrderArgs {
    /// Whether it names single samples of the dataset.
    fn names_samples(&self) -> bool {
        self.indices.is_some() || self.drawn.is_some()
    }

    /// The order of the samples; none for a mix, which has its own.
    fn order(
        &self,
        seed: Option<u64>,
        dataset: &Arc<dyn Dataset>,
        shard: Rank,
    ) -> Result<Option<Order>> {
        let other = self.window.is_some() || self.lanes.is_some() || self.groups.is_some();
        let mixed = dataset.sampler().is_some();
        if mixed && self.indices.is_some() {
            return Err(config("weights give the order: indices are not for a mix"));
        }
        if other && (mixed || self.indices.is_some()) {
            return Err(config(
                "window, lanes and lengths are not for a mix or indices",
            ));
        }
        if let Some(drawn) = &self.drawn {
            if other || mixed || self.indices.is_some() {
                return Err(config(
                    "sample_weights and weights_of are not for a mix, indices, window, lanes or lengths",
                ));
            }
            let seed = seed.ok_or_else(|| {
                config("samples are drawn by weights: shuffle, the seed of the draws, is missing")
            })?;
            return Ok(Some(Order::weighted(seed, drawn.weights(dataset)?)));
        }
        if mixed {
            return Ok(None);
        }
        if let Some(chosen) = &self.indices {
            let order = Order::indices(chosen.ids("indices", dataset.len())?);
            return Ok(Some(seed.into_iter().fold(order, Order::then_shuffled)));
        }
        let order = match (seed, self.window) {
            (None, Some(_)) => return Err(config("window is for a shuffled order")),
            (None, None) => Order::sequential(),
            (Some(seed), None) => Order::shuffled(seed),
            (Some(seed), Some(chunks)) => Order::windowed(seed, chunks),
        };
        let order = self.lanes.into_iter().fold(order, Order::lanes);
        let groups = self.groups.iter().cloned();
        // Frameworks gather rows of equally many on each rank.
        let even = |groups: Groups| {
            if self.evens {
                groups.multiple_of(shard.world().into())
            } else {
                groups
            }
        };
        Ok(Some(groups.map(even).fold(order, Order::grouped)))
    }
}

#[derive(Clone, FromPyObject)]
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
    all.iter()
        .find(|(known, _)| *known == name)
        .map(|(_, value)| *value)
        .ok_or_else(|| {
            let known: Vec<_> = all.iter().map(|(name, _)| *name).collect();
            config(format!(
                "{setting} {name:?}: there are {}",
                known.join(", ")
            ))
        })
}

fn reader(name: &str) -> Result<Mode> {
    let all = [
        ("auto", Mode::Auto),
        ("uring", Mode::Uring),
        ("pread", Mode::Pread),
        ("mmap", Mode::Mmap),
    ];
    choice("reader", name, &all)
}

fn direct(name: &str) -> Result<Direct> {
    choice(
        "direct",
        name,
        &[
            ("auto", Direct::Auto),
            ("on", Direct::On),
            ("off", Direct::Off),
        ],
    )
}

/// On one rank the last batch is smaller. On several, whose batches must have the same size,
/// samples of the epoch fill it up, as with PyTorch's DistributedSampler. Blank rows must not look
/// like samples: only `ids` can tell.
fn last_or_default(last: Option<LastBatch>, shard: Rank, ids: bool) -> Result<LastBatch> {
    match last {
        None if shard.world() > 1 => Ok(LastBatch::Pad),
        Some(LastBatch::Mask) if !ids => Err(config(
            "last_batch \"mask\" has blank rows, which ids=True marks: set it",
        )),
        Some(LastBatch::Keep) if shard.world() > 1 && !ids => Err(config(format!(
            "last_batch \"keep\" on {} ranks may have blank rows, which ids=True marks: set it, or take \"pad\" or \"drop\"",
            shard.world()
        ))),
        last => Ok(last.unwrap_or_default()),
    }
}

fn last(name: &str) -> Result<LastBatch> {
    use LastBatch::{Drop, Keep, Mask, Pad};
    choice(
        "last_batch",
        name,
        &[("keep", Keep), ("mask", Mask), ("pad", Pad), ("drop", Drop)],
    )
}

/// Where batches are handed out, also as PyTorch calls it. The only place that knows devices.
fn place(
    builder: LoaderBuilder,
    device: &str,
    why: Option<&str>,
    gds: &str,
) -> Result<(LoaderBuilder, String)> {
    let words = match device {
        "cpu:0" => "cpu".into(),
        number if number.parse::<u32>().is_ok() => format!("cuda:{number}"),
        words => words.to_string(),
    };
    let device = match why {
        Some(why) if words == "cpu" => Device::host_since(why),
        _ => words.parse()?,
    };
    let name = match device.kind() {
        DeviceKind::Cuda(ordinal) => format!("cuda:{ordinal}"),
        _ => "cpu".into(),
    };
    let gds = gds.parse::<Gds>()?;
    Ok((builder.device(device).tuning(|t| t.gds(gds)), name))
}
