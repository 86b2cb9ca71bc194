//! The profiler around another loader, as `_observe.py` calls it.

use crate::loader::unserialized;
use crate::python::wait_for_gil;
use feedline::profile::observed::{self, GpuTime, LoaderFacts, WorkerId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Measures a loop over another loader.
#[pyclass(frozen, module = "feedline._native")]
pub struct Observer(observed::Observer);

#[pymethods]
impl Observer {
    /// `facts`: the loader's settings as JSON.
    #[new]
    fn new(facts: &str) -> PyResult<Self> {
        let facts: LoaderFacts = serde_json::from_str(facts)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let probe = Box::new(wait_for_gil);
        Ok(Self(observed::Observer::new(facts, Some(probe))))
    }

    /// An epoch starts.
    fn starts(&self, py: Python<'_>) {
        py.detach(|| self.0.starts());
    }

    /// The worker processes: their process ids and numbers.
    fn works_with(&self, workers: Vec<(u32, u32)>) {
        let workers = workers
            .into_iter()
            .map(|(process, number)| WorkerId { process, number });
        self.0.works_with(workers.collect());
    }

    /// The loop asks for a batch.
    fn asks(&self) {
        self.0.asks();
    }

    /// The loop has a batch of so many samples; 0 if unknown.
    fn got(&self, samples: u64) {
        self.0.got(samples);
    }

    /// The loop does something else until it asks again.
    fn leaves(&self) {
        self.0.leaves();
    }

    /// The epoch ended. Waits for the sampler, which may want the GIL.
    fn ends(&self, py: Python<'_>) {
        py.detach(|| self.0.ends());
    }

    /// Steps on the GPU, the time from the first to the last, and the time without one.
    fn set_gpu(&self, steps: u64, span_ns: u64, idle_ns: u64) {
        let mut gpu = GpuTime::default();
        (gpu.steps, gpu.span_ns, gpu.idle_ns) = (steps, span_ns, idle_ns);
        self.0.set_gpu(gpu);
    }

    /// All measurements, as JSON.
    fn observation(&self, py: Python<'_>) -> PyResult<String> {
        let observation = py.detach(|| self.0.observation());
        serde_json::to_string(&observation).map_err(unserialized)
    }

    /// The diagnosis: its headline, and JSON.
    fn diagnosis(&self, py: Python<'_>) -> PyResult<(String, String)> {
        let diagnosis = py.detach(|| self.0.diagnosis());
        let json = serde_json::to_string(&diagnosis).map_err(unserialized)?;
        Ok((diagnosis.headline(), json))
    }

    /// The diagnosis and the numbers, as text.
    fn report(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.report())
    }
}
