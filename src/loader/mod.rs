//! The loader: [`settings`] and how [`build`] turns them into threads, the iterator over batches ([`epoch`]), what can be asked
//! in mid-loop, and where a run stands ([`resume`]).

mod build;
mod ceiling;
mod device_stage;
mod epoch;
mod origin;
mod report;
mod resume;
#[cfg(all(test, feature = "cuda"))]
mod scenarios;
mod settings;

pub use ceiling::Ceiling;
pub use epoch::Epoch;
pub use origin::Origin;
pub use report::Report;
pub use settings::LoaderBuilder;

use crate::batch::{BatchInfo, Contents};
use crate::dataset::Dataset;
use crate::device::{DeviceKind, DirectReader, IdleMeter};
use crate::error::{Error, ErrorKind, Result, Stage, caught};
use crate::ledger::{Ledger, LedgerWriter};
use crate::meter::{Consumer, Handed, Settings, Snapshot, Timeline};
use crate::order::{Batches, ChunkStarts, LastBatch, Order, Shard};
use crate::pipeline::runtime::{self, Runtime};
use crate::pipeline::watchdog::Watcher;
use crate::pipeline::{FieldRoute, Job, MemoryPlan};
use crate::report::Verdict;
use crate::state::{Cursor, State};
use crate::stop::Stop;
use crate::storage::{self, Choice, PageCache};
use crate::sync::Hold;
use crate::tensor::Field;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use std::ops::{Bound, RangeBounds};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

fn config(message: &str) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}

/// Makes the jobs of epochs.
#[derive(Clone)]
struct JobMaker {
    order: Order,
    dataset_len: u64,
    chunks: Option<ChunkStarts>,
    /// Length of an epoch, once it is known.
    positions: Option<u64>,
    /// Rows of a batch on all ranks together.
    global: u64,
    last: LastBatch,
    shard: Shard,
}

impl JobMaker {
    /// The job of an epoch from a position on, of which the first `most` batches are wanted. The sampler is the user's
    /// code: it may panic, or change its mind about its length.
    fn job(&self, generation: u64, cursor: &Cursor, most: u64, current: Arc<AtomicU64>) -> Result<Arc<Job>> {
        let (order, batches) = caught(Stage::Order, || {
            let order = self.order.epoch_in(self.dataset_len, self.chunks.as_ref(), cursor.epoch)?;
            let batches = Batches::new(order.len(), self.global, self.last, self.shard)?;
            Ok((order, batches.starting(cursor.position, cursor.batch)))
        })?;
        let (then, now) = (self.positions.unwrap_or(batches.len()), batches.len());
        if now != then {
            let message = format!(
                "epoch {} has {now} positions, the loader was built for {then}: its sampler changed",
                cursor.epoch
            );
            return Err(Error::new(ErrorKind::Config, Stage::Order, message));
        }
        let order = order.visited_by(&batches, most);
        Ok(Arc::new(Job { generation, current, epoch: cursor.epoch, order, batches }))
    }
}

/// Turns a dataset into batches. `Send + Sync`; threads and memory live until it and its [`Epoch`]s are dropped.
///
/// Build it in the process that uses it: a child that is forked later has no threads of it. There calls end with
/// [`ErrorKind::Forked`], drops return at once, and a loader of the child's own works.
pub struct Loader {
    shared: Life,
}

/// The threads and memory of a loader live as long as any of these. In a forked child they are kept for ever: there are no
/// threads to join, and rings and the device are the parent's.
#[derive(Clone)]
struct Life(Arc<Shared>);

impl std::ops::Deref for Life {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        if self.info.process.is_forked() {
            std::mem::forget(self.0.clone());
        }
    }
}

struct Shared {
    runtime: Runtime,
    ready: Receiver<Contents>,
    /// Disconnected once every slot is pinned.
    pinned: Receiver<std::convert::Infallible>,
    info: Arc<BatchInfo>,
    jobs: JobMaker,
    /// The batches of a whole epoch.
    whole: Batches,
    facts: Facts,
    /// On a GPU: how long the consumer's stream is idle.
    idle: Option<Arc<dyn IdleMeter>>,
    deadlines: Deadlines,
    /// What was measured in steady times; locked at the first batch and the end of an iterator, and for snapshots.
    steady: Mutex<Steady>,
    /// Whether an iterator is alive.
    live: AtomicBool,
    /// What was substituted: locked where that happens, and to be looked at.
    ledger: Mutex<LedgerWriter>,
    /// Where the batch after the last one received is. Locked once per batch, contended only while a state is taken.
    place: Mutex<Place>,
    /// Made by `build`.
    run_identity: OnceLock<Result<resume::RunIdentity>>,
    /// States with another global batch are taken, too.
    any_batch: bool,
    stop: Option<Stop>,
}

/// What `build` decided, for reports.
struct Facts {
    choice: Choice,
    /// Where threads and memory are.
    numa: Option<String>,
    plan: MemoryPlan,
    /// The routes of the fields to the device.
    routes: Vec<FieldRoute>,
    direct: Option<Arc<dyn DirectReader>>,
    /// Samples of opened chunks per sample over all ranks, for datasets in chunks.
    planned_amplification: Option<f64>,
    /// For telling where the bytes came from.
    before: origin::Before,
    /// What a snapshot says that meters do not know.
    settings: Settings,
}

/// How long `next()` waits for the caller, and for anything else.
struct Deadlines {
    held: Duration,
    stall: Duration,
}

/// What was measured from the first batches of iterators to their ends.
#[derive(Default)]
struct Steady {
    /// Of those that ended.
    sum: Option<Snapshot>,
    /// When the present one had delivered its first batch.
    since: Option<Snapshot>,
    /// What was said last.
    said: Option<Snapshot>,
}

/// Where the loader stands.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    cursor: Cursor,
    /// It was set by a state, and no batch was received since.
    resumed: bool,
}

impl Loader {
    /// Settings for a loader of `dataset`.
    pub fn builder(dataset: impl Dataset) -> LoaderBuilder {
        LoaderBuilder::new(Arc::new(dataset))
    }

    /// The batches of epoch `epoch`, in order. What they hold depends on (seed, epoch, position) alone.
    ///
    /// After a [resume](LoaderBuilder::resume), the first epoch must be the one that was interrupted
    /// ([`next_epoch`](Self::next_epoch)), and goes on where it stopped; once a batch was received epochs are whole again.
    ///
    /// Errors: [`ErrorKind::EpochLive`] while another iterator of this loader is alive; [`ErrorKind::Config`] for another
    /// epoch than the one that was resumed.
    pub fn epoch(&self, epoch: u64) -> Result<Epoch> {
        self.epochs(epoch..=epoch)
    }

    /// The batches of several epochs in one iterator, which reads ahead across their boundaries. `3..` goes on for ever. An
    /// empty range has no batches.
    ///
    /// Errors: as [`epoch`](Self::epoch).
    pub fn epochs(&self, epochs: impl RangeBounds<u64>) -> Result<Epoch> {
        let start = match epochs.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let count = match epochs.end_bound() {
            Bound::Included(last) => (u128::from(*last) + 1).saturating_sub(u128::from(start)),
            Bound::Excluded(end) => u128::from(end.saturating_sub(start)),
            Bound::Unbounded => u128::from(u64::MAX),
        };
        Epoch::start(self.shared.clone(), epoch::From::Epoch(start), u64::try_from(count).unwrap_or(u64::MAX), u64::MAX)
    }

    /// The next `steps` batches, over as many epochs as that takes: from where a state was resumed, from after the last batch
    /// received, or from the beginning. Nothing is read beyond them, but for the rest of the chunks (and windows of chunks) that
    /// hold them: under an order that keeps all chunks open that is everything.
    ///
    /// Errors: [`ErrorKind::EpochLive`] while another iterator of this loader is alive.
    pub fn steps(&self, steps: u64) -> Result<Epoch> {
        Epoch::start(self.shared.clone(), epoch::From::Here, u64::MAX, steps)
    }

    /// How fast the consumer could go if the loader took no time: `steps` batches that are two of the loader's, handed out
    /// again and again. The place of the run does not change; the two batches count as delivered in the report.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// # let loader = Loader::builder(Records::builder(1).open_bytes([7; 64])?).batch_size(8).build()?;
    /// let mut ceiling = loader.ceiling(100)?;
    /// for batch in &mut ceiling {
    ///     let batch = batch?; // train(&batch), as in an epoch
    ///     # let _ = batch;
    /// }
    /// println!("at most {:.0} samples/s", ceiling.samples_per_s());
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: as [`epoch`](Self::epoch), and those of reading two batches.
    pub fn ceiling(&self, steps: u64) -> Result<Ceiling> {
        Ceiling::start(self.shared.clone(), steps)
    }

    /// The epoch of the batch that comes next: 0 for a new run, after a resume the one that was interrupted, and the one
    /// after an epoch that was received to its end.
    pub fn next_epoch(&self) -> u64 {
        self.shared.place().cursor.epoch
    }

    /// Batches of one epoch, the same on every rank; known before the first.
    ///
    /// Errors: none after `build` has checked the order.
    pub fn batches_per_epoch(&self) -> Result<u64> {
        Ok(self.shared.whole.count())
    }

    /// Samples that one epoch delivers to all ranks together: fewer than the order's length only when the last batch is
    /// dropped.
    ///
    /// Errors: none after `build` has checked the order.
    pub fn samples_per_epoch(&self) -> Result<u64> {
        Ok(self.shared.whole.positions())
    }

    /// Rows of a full batch on all ranks together.
    pub fn global_batch(&self) -> u64 {
        self.shared.jobs.global
    }

    /// Which rank of how many this is.
    pub fn shard(&self) -> Shard {
        self.shared.jobs.shard
    }

    /// The ids of the first `count` samples of `epoch` in the order of all ranks together; nothing is read.
    ///
    /// Errors: [`ErrorKind::Config`] when a sampler names a sample that does not exist.
    pub fn preview(&self, epoch: u64, count: u64) -> Result<Vec<u64>> {
        let jobs = &self.shared.jobs;
        caught(Stage::Order, || jobs.order.epoch_in(jobs.dataset_len, jobs.chunks.as_ref(), epoch)?.first_ids(count))
    }

    /// Where the run stands: after the last batch that was received, whatever was read ahead. The same on every rank that
    /// received as many.
    ///
    /// Errors: what made it impossible to look at the dataset when the loader was built.
    pub fn state(&self) -> Result<State> {
        self.shared.info.process.check()?;
        self.shared.state()
    }

    /// Goes on from `state`: the next [`epoch`](Self::epoch) or [`steps`](Self::steps) starts there. With the loader's own
    /// [`state`](Self::state) an epoch that ended by an error is taken up again after the last batch received.
    ///
    /// Errors: as [`LoaderBuilder::resume`]; [`ErrorKind::EpochLive`] while an iterator of this loader is alive.
    pub fn resume(&self, state: &State) -> Result<()> {
        self.shared.info.process.check()?;
        self.shared.resume(state)
    }

    /// Whether the [`Stop`] that the builder was given was requested, by a signal or by the program.
    ///
    /// Ranks see a signal at different steps: let them agree (all-reduce this flag each step) before they save and leave.
    pub fn stop_requested(&self) -> bool {
        self.shared.stop.as_ref().is_some_and(Stop::requested)
    }

    /// Waits until everything is ready: with a GPU slots are pinned after `build`, one after the other (about a second for
    /// 2 GB), and come into use as they are. Nobody has to call this; who measures the first batches may want to.
    ///
    /// Errors: what broke the loader; [`ErrorKind::Stalled`] when pinning one slot takes the
    /// [`stall_deadline`](LoaderBuilder::stall_deadline).
    pub fn ready(&self) -> Result<()> {
        self.shared.info.process.check()?;
        let core = self.shared.runtime.core();
        let mut watcher = Watcher::default();
        // Nothing is ever sent: it ends when the other side is gone.
        while let Err(RecvTimeoutError::Timeout) = self.shared.pinned.recv_timeout(Duration::from_millis(100)) {
            let stalled = || watcher.look(&core.watch, self.shared.deadlines.stall, &core.samples.sources);
            if let Some(error) = core.trouble().or_else(stalled) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// The fields of a batch, in order.
    pub fn spec(&self) -> Vec<Field> {
        self.shared.info.keep.iter().map(|kept| kept.field.clone()).collect()
    }

    /// All memory as a sum.
    pub fn plan(&self) -> &MemoryPlan {
        &self.shared.facts.plan
    }

    /// What was measured so far, as numbers; may be asked at any time. Times are those of the steady times of all iterators,
    /// from their first batch on; what the consumer received, and the histograms, count from the beginning.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.snapshot()
    }

    /// The last batches, one by one, how full the queues were, and what each thread did.
    pub fn timeline(&self) -> Timeline {
        let meters = &self.shared.runtime.core().meters;
        let stream = self.shared.idle.as_ref().map(|idle| idle.track());
        Timeline { tracks: meters.rings.read().into_iter().chain(stream).collect(), ..meters.recorder.read() }
    }

    /// The samples that could not be had and what stands in for them, of all batches handed out so far. See
    /// [`LoaderBuilder::on_bad_sample`].
    pub fn ledger(&self) -> Ledger {
        self.shared.ledger().ledger().clone()
    }

    /// What happened so far; may be asked at any time.
    pub fn report(&self) -> Report {
        self.shared.report()
    }
}

impl Shared {
    fn place(&self) -> Place {
        *self.place.hold()
    }

    /// A batch was received; the next one is at this epoch, position and batch number.
    fn received(&self, (epoch, position, batch): (u64, u64, u64)) {
        let mut place = self.place.hold();
        let steps = place.cursor.steps.saturating_add(1);
        *place = Place { cursor: Cursor { epoch, position, batch, steps }, resumed: false };
    }

    fn ledger(&self) -> std::sync::MutexGuard<'_, LedgerWriter> {
        self.ledger.hold()
    }

    fn set_place(&self, place: Place) {
        *self.place.hold() = place;
    }

    fn measured(&self) -> Snapshot {
        let mut snapshot = self.runtime.core().meters.snapshot(&self.facts.settings);
        snapshot.consumer.gpu = self.idle.as_ref().map(|idle| idle.totals());
        snapshot.storage.recovered = self.runtime.core().again.recovered();
        snapshot.consumer.substituted = self.ledger().ledger().substituted;
        snapshot
    }

    /// The steady time of an iterator begins, or ends.
    fn mark_steady(&self, begins: bool) {
        // Measured under the lock, so that nobody goes back in time.
        let mut steady = self.steady.hold();
        let now = self.measured();
        if let Some(since) = steady.since.take() {
            let stretch = now.since(&since);
            steady.sum = Some(steady.sum.take().map_or(stretch.clone(), |sum| stretch.and(&sum)));
        }
        steady.since = begins.then_some(now);
    }

    fn snapshot(&self) -> Snapshot {
        let mut steady = self.steady.hold();
        let now = self.measured();
        let stretch = steady.since.as_ref().map(|since| now.since(since));
        let sum = match (stretch, &steady.sum) {
            (Some(stretch), Some(sum)) => stretch.and(sum),
            (Some(stretch), None) => stretch,
            // Histograms go on after the last steady time; nothing else does.
            (None, Some(sum)) => sum.clone(),
            (None, None) => now.since(&now),
        };
        // What is counted, not timed, counts from the beginning.
        let mut snapshot = Snapshot { at_ns: now.at_ns, ..sum };
        let Consumer { batches, samples, .. } = snapshot.consumer;
        snapshot.consumer.steady = Some(Handed { batches, samples });
        snapshot.consumer.batches = now.consumer.batches;
        snapshot.consumer.samples = now.consumer.samples;
        snapshot.consumer.bytes = now.consumer.bytes;
        snapshot.consumer.substituted = now.consumer.substituted;
        snapshot.storage.recovered = now.storage.recovered;
        snapshot.consumer.first_ns = now.consumer.first_ns;
        // The meter leaves first steps out itself, and sees the last ones after the iterator has ended.
        snapshot.consumer.gpu = now.consumer.gpu;
        if let Some(said) = &steady.said {
            snapshot.raise(said);
        }
        // The step that is under way is the consumer's own, too.
        let own = snapshot.steady_ns.saturating_sub(snapshot.consumer.waited_ns);
        snapshot.consumer.user_ns = own.max(steady.said.as_ref().map_or(0, |said| said.consumer.user_ns));
        steady.said = Some(snapshot.clone());
        snapshot
    }

    fn report(&self) -> Report {
        let core = self.runtime.core();
        let meters = &core.meters;
        let now = meters.clock.now();
        let nanos = |counter: &crate::meter::Counter| Duration::from_nanos(counter.get());
        let shard = self.jobs.shard;
        Report {
            dataset: core.samples.dataset.describe(),
            device: self.info.device.to_string(),
            numa: self.facts.numa.clone(),
            rank: (shard.world() > 1).then(|| shard.to_string()),
            batches: meters.batches.get(),
            samples: meters.samples.get(),
            bytes: meters.bytes.get(),
            starved: Duration::from_nanos(meters.waited_ns(now)),
            first_batches: nanos(&meters.first_wait_ns),
            user: nanos(&meters.user_ns),
            decode_busy: Duration::from_nanos(meters.pool.read(now).0),
            workers: core.to_workers.drains.count(),
            choice: self.facts.choice.clone().and(core.unregistered.get()),
            chunks: core.samples.chunk_starts.as_ref().map(|starts| (meters.chunks.get(), starts.len() as u64 - 1)),
            chunk_samples: meters.chunk_rows.get(),
            planned_amplification: self.facts.planned_amplification,
            reads: meters.reads(),
            cache: core.cache.as_deref().map(|cache: &PageCache| (cache.hits(), cache.misses())),
            copies: (self.info.device.kind() != DeviceKind::Host).then(|| meters.device.copies(now)),
            routes: self.facts.routes.clone(),
            direct: self.facts.direct.as_ref().map(|reader| meters.device.direct(reader.mode())),
            origin: self.facts.before.origin(
                &meters.reads(),
                meters.cached_bytes.get(),
                meters.device.direct_bytes.get(),
            ),
            verdict: Verdict::of(&self.snapshot()),
            plan: self.facts.plan.clone(),
            recovered: core.again.recovered(),
            bad: self.ledger().ledger().clone(),
            leaked: storage::leaked() + runtime::abandoned() + crate::device::leaked(),
        }
    }
}

impl std::fmt::Debug for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loader of {}", self.shared.runtime.core().samples.dataset.describe())?;
        match self.shared.jobs.shard {
            shard if shard.world() > 1 => write!(f, ", {shard}"),
            _ => Ok(()),
        }
    }
}
