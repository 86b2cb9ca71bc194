//! The decode workers: tasks on a private rayon pool that never block.
//!
//! A rayon task (a "drain") takes from the queues until they are empty, then ends. So rayon
//! allocates per drain, not per sample. A drain prefers rows to look up over bytes to decode. Then
//! misses reach storage early, and the device works while the workers decode. Rows that wait for a
//! substitute come first if the substitute's chunk is open, otherwise after all rows with open
//! chunks.

use super::chunks::{Encoded, Opening};
use super::drains::Switch;
use super::exchange::ToFill;
use super::fetch::{Fetch, Whose};
use super::substitute::{SpareRoom, Substitutes};
use super::task::Sample;
use super::watchdog::Doing;
use super::worker::Worker;
use super::{Core, gather, rows};
use feedline_base::error::{Error, Result, Stage};
use feedline_base::sync::Mutex;
use feedline_core::decode::{Ctx, Running};
use feedline_core::memory::Filled;
use feedline_reader::Cached;
use feedline_report::meter::Work;
use std::sync::Arc;

/// The pool and the state of each worker.
pub(crate) struct Workers {
    core: Arc<Core>,
    pub(crate) pool: rayon::ThreadPool,
    each: Vec<Mutex<Worker>>,
    substitutes: Substitutes,
    cached_bytes: usize,
}

impl Workers {
    /// Starts the workers; they run as soon as the queues of `core` have work. `cached_bytes` and
    /// `chunk_bytes` size each worker's buffers for a sample and for a chunk from the page cache.
    pub(crate) fn start(
        core: Arc<Core>,
        pool: rayon::ThreadPool,
        room: SpareRoom,
        cached_bytes: usize,
        chunk_bytes: usize,
    ) -> Result<Arc<Self>> {
        let each = (0..pool.current_num_threads())
            .map(|number| {
                let chunk = Encoded::new(chunk_bytes, "a worker's encoded chunk")?;
                Ok(Mutex::new(Worker::new(number, cached_bytes, chunk)))
            })
            .collect::<Result<_>>()?;
        let workers = Arc::new(Self {
            core,
            pool,
            each,
            substitutes: Substitutes::new(room),
            cached_bytes,
        });
        let weak = Arc::downgrade(&workers);
        workers.core.to_workers.drains.spawn_by(move || {
            // The workers are gone, so no thread waits.
            let Some(workers) = weak.upgrade() else {
                return;
            };
            // Costs one allocation in rayon per drain.
            let own = workers.clone();
            workers.pool.spawn(move || own.drain());
        });
        Ok(workers)
    }

    fn drain(&self) {
        let core = &*self.core;
        let to_workers = &self.core.to_workers;
        let index = rayon::current_thread_index().unwrap_or(0);
        // A decoder that uses rayon may run this drain on its thread, nested in its own call. Then
        // the worker's state is already taken.
        let mut own = self
            .each
            .get(index)
            .and_then(|worker| worker.try_lock().ok());
        // The interrupted activity of this thread, restored afterwards.
        let outer = own
            .is_none()
            .then(|| core.watch.workers.get(index).map(|cell| cell.now()))
            .flatten();
        let mut spare = None;
        let worker = match &mut own {
            Some(worker) => &mut **worker,
            // This worker has no chunk buffer: its chunks go through the ring.
            None => spare.insert(Worker::new(index, self.cached_bytes, Encoded::default())),
        };
        let meters = &core.meters;
        to_workers.drains.drain(
            || {
                let mut before = meters.clock.now();
                meters.change_working(1, before);
                while let Some(what) = self.step(worker, before) {
                    let now = meters.clock.now();
                    if meters.on {
                        meters.decode.latency.record(now.saturating_sub(before));
                        meters.rings.worked(index, before, now, what);
                    }
                    before = now;
                }
                meters.change_working(-1, before);
                if let Some(cell) = core.watch.workers.get(index) {
                    // A nested drain returns to its caller, which continues.
                    match outer {
                        Some((doing, sample)) => cell.begin(doing, sample),
                        None => cell.end(),
                    }
                }
            },
            || to_workers.is_empty() && to_workers.bad.is_idle(),
        );
    }

    /// Does one piece of work and returns its kind; `None` if there is none.
    fn step(&self, worker: &mut Worker, now: u64) -> Option<Work> {
        let core = &*self.core;
        let queues = &self.core.to_workers;
        let meters = &self.core.meters;
        // An entry of many rows leaves the queue with its last rows.
        let took = |rows: u64, left: bool| {
            if meters.on {
                meters.decode.samples.add(rows);
            }
            if left {
                meters.decode.queued.leave(1, now);
            }
        };
        if let Some(slot) = queues.take_map() {
            map_batch(core, worker, slot);
            Some(Work::MapBatch)
        } else if self.substitutes.serve_one(core, Switch::No, worker) {
            Some(Work::Decode)
        } else if let Some((ToFill { run, held }, left)) = queues.take_rows() {
            let Some(held) = held else {
                took(0, left);
                meters
                    .decode
                    .samples
                    .add(rows::look_up(core, run, worker).into());
                return Some(Work::LookUp);
            };
            took(run.len().into(), left);
            gather::gather(core, run, &held, worker);
            Some(Work::Gather)
        } else if self.substitutes.serve_one(core, Switch::Yes, worker) {
            Some(Work::Decode)
        } else {
            let mut fetch = queues.take_fetched()?;
            let error = fetch.take_error();
            let sample = fetch.sample;
            took(matches!(fetch.whose, Whose::Row(_)).into(), true);
            Some(match fetch.whose {
                Whose::Row(run) => {
                    rows::decode(core, run, sample, error, worker);
                    Work::Decode
                }
                Whose::Chunk(opening) => {
                    open(core, opening, sample, error, worker);
                    Work::Open
                }
            })
        }
    }
}

/// Opens a chunk whose bytes were read, or are in memory or in the page cache; otherwise queues it
/// to be read.
fn open(
    core: &Core,
    opening: Opening,
    mut sample: Box<Sample>,
    error: Option<Error>,
    worker: &mut Worker,
) {
    let samples = &core.samples;
    if opening.is_forgotten() {
        return;
    }
    worker.begins(samples, Doing::Decoding, None);
    let read = error.map_or(Ok(()), |error| {
        rows::read_again(core, &error, &mut sample, None, worker)
    });
    let brought = read.and_then(|()| {
        worker.chunk.fetch(samples, &mut sample, |extent, to| {
            let found = rows::cached(core, extent, to);
            if matches!(found, Cached::Hit) {
                rows::note_cached(core, &mut { extent.len });
            }
            found
        })
    });
    match brought {
        Ok(true) => {}
        Ok(false) => {
            core.to_io
                .chunk_misses
                .push(Fetch::new(Whose::Chunk(opening), sample));
            return core.to_io.waker.wake();
        }
        Err(error) => return opening.fail(samples, &sample, error),
    }
    core.meters.decode.chunks.add(1);
    core.meters
        .decode
        .chunk_rows
        .add(samples.rows_of_chunk(opening.chunk()));
    opening.open(samples, &mut sample, &worker.chunk, &mut worker.scratch);
}

fn map_batch(core: &Core, worker: &mut Worker, mut slot: Filled) {
    let samples = &core.samples;
    let recipe = &core.samples.recipe;
    let ticket = slot.ticket();
    worker.begins(samples, Doing::Mapping, None);
    let meters = core.meters.on.then_some(&core.meters);
    let began = meters.map(|meters| meters.clock.now());
    let mapped = worker.guarded(&core.samples, |worker| {
        worker.scratch.running = Running::Map;
        let mut batch = slot.batch_mut();
        for map in &recipe.map_batches {
            let fields = 0..recipe.spec.fields().len();
            let mut ctx = Ctx::new(
                samples.seed,
                ticket.epoch,
                ticket.position,
                fields,
                &mut worker.scratch,
            );
            map(&mut batch, &mut ctx).map_err(|error| error.in_stage(Stage::Map))?;
        }
        batch.pad().map_err(|error| error.in_stage(Stage::Map))?;
        if recipe.finishes_late() {
            recipe
                .finishes
                .iter()
                .for_each(|finishing| finishing.run_late(&mut slot, samples.seed));
        }
        Ok(())
    });
    if let Some((meters, began)) = meters.zip(began) {
        meters
            .decode
            .map_batch_ns
            .add(meters.clock.now().saturating_sub(began));
    }
    if let Err(error) = mapped {
        slot.note_failure(error);
    }
    core.exchange.hand_out(slot);
}
