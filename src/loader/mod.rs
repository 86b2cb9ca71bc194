//! The loader: [`settings`], [`build`], the iterator over batches ([`epoch`]), reports, and
//! [`resume`].

mod build;
mod device_stage;
mod epoch;
mod frontier;
mod log;
mod origin;
mod report;
mod resume;
#[cfg(test)]
mod scenarios;
mod settings;
mod skips;
mod terms;
mod tuning;

pub use epoch::Epoch;
pub use log::Log;
pub use origin::Origin;
pub use report::Report;
pub use settings::LoaderBuilder;
pub use tuning::Tuning;

use crate::batch::{BatchInfo, Contents};
use crate::order::{Batches, ChunkStarts, Counts, LastBatch, Order, Skips, Weights};
use crate::pipeline::runtime::Runtime;
use crate::pipeline::watchdog::Watcher;
use crate::pipeline::{EpochJob, FieldRoute, runtime};
use crate::state::{Cursor, State};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught, config};
use feedline_base::stop::Stop;
use feedline_base::sync::Hold;
use feedline_base::thread;
use feedline_core::dataset::Dataset;
use feedline_core::ledger::{Ledger, LedgerWriter};
use feedline_core::memory::MemoryPlan;
use feedline_core::order::{Cores, Rank};
use feedline_core::tensor::Field;
use feedline_device::{DirectReader, IdleMeter, Stream};
use feedline_report::meter::{
    Consumer, EpochCounts, Handed, Lookups, Settings, Snapshot, SourceCount, Timeline,
};
use feedline_report::{EpochCost, Estimate, RankReport, Verdict};
use feedline_store::Choice;
use std::ops::{Bound, RangeBounds};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The run that a job belongs to, and the run that the iterator currently wants.
type Run<'a> = (u64, &'a Arc<AtomicU64>);

/// Makes the jobs of epochs.
#[derive(Clone)]
struct JobMaker {
    order: Order,
    dataset_len: u64,
    chunks: Option<ChunkStarts>,
    /// Number of positions of an epoch, once known.
    positions: Option<u64>,
    /// Rows of a full batch on all ranks together; in a grouped order, rows of the largest batch.
    global: u64,
    last: LastBatch,
    rank: Rank,
}

impl JobMaker {
    /// The job of an epoch from `cursor` up to batch `end`, limited to `most` batches.
    ///
    /// The sampler is the user's code: it may panic, or change its length between epochs.
    fn job(
        &self,
        cursor: &Cursor,
        end: u64,
        most: u64,
        (generation, current): Run<'_>,
    ) -> Result<Arc<EpochJob>> {
        let (order, batches) = caught(Stage::Order, || {
            let order =
                self.order
                    .epoch_in(self.dataset_len, self.chunks.as_ref(), cursor.epoch)?;
            let batches = Batches::new(order.len(), self.global, self.last, self.rank)?;
            let batches = batches
                .in_lanes(self.order.lane_count())
                .in_groups(order.groups());
            Ok((
                order,
                batches.starting(cursor.position, cursor.batch).until(end),
            ))
        })?;
        let then = self.positions.unwrap_or(batches.len());
        let now = batches.len();
        if now != then {
            let message = format!(
                "epoch {} has {now} positions, but epoch 0 had {then}: the sampler must not \
                 change its length",
                cursor.epoch
            );
            return Err(Error::new(ErrorKind::Config, Stage::Order, message));
        }
        let order = order.visited_by(&batches, most);
        Ok(Arc::new(EpochJob {
            generation,
            current: current.clone(),
            epoch: cursor.epoch,
            order,
            batches,
        }))
    }
}

/// Turns a dataset into batches. `Send + Sync`; its threads and memory live until it and its
/// [`Epoch`]s are dropped.
///
/// Build it in the process that uses it: a child forked later inherits none of its threads. In such
/// a child, calls fail with [`ErrorKind::Forked`], calls that cannot fail return no measurements,
/// and drops return at once. The child can build its own loader.
pub struct Loader {
    shared: Life,
}

/// Shared ownership of a loader's threads and memory. A forked child leaks them: it has no threads
/// to join, and rings and the device belong to the parent.
#[derive(Clone)]
struct Life(Arc<LoaderState>);

impl std::ops::Deref for Life {
    type Target = LoaderState;

    fn deref(&self) -> &LoaderState {
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

/// The exclusive right to iterate over a loader; released on drop.
struct Live(Life);

impl Live {
    /// Errors: [`ErrorKind::EpochLive`] with `message` while another holder is alive;
    /// [`ErrorKind::Forked`].
    fn claim(life: &Life, message: &str) -> Result<Self> {
        life.info.process.check()?;
        match life.live.swap(true, Ordering::AcqRel) {
            true => Err(Error::new(ErrorKind::EpochLive, Stage::Batch, message)),
            false => Ok(Self(life.clone())),
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.live.store(false, Ordering::Release);
    }
}

struct LoaderState {
    runtime: Runtime,
    ready: Receiver<Contents>,
    /// Disconnected once every slot is pinned.
    pinned: Receiver<std::convert::Infallible>,
    info: Arc<BatchInfo>,
    /// Locked by [`Loader::weights`], and at the start of an epoch and by states.
    jobs: Mutex<Arc<JobMaker>>,
    /// Batches of a whole epoch. Only their number and positions are the same in every epoch.
    whole: Batches,
    facts: LoaderFacts,
    /// Idle time of the consumer's stream, on a GPU.
    idle: Option<Arc<IdleMeter>>,
    deadlines: Deadlines,
    /// Snapshots of the steady time. Locked at an iterator's first batch, at its end, and by
    /// snapshots.
    steady: Mutex<Steady>,
    /// Locked by [`Loader::log`] alone.
    logged: Mutex<log::Logged>,
    /// Whether an iterator is alive.
    live: AtomicBool,
    /// Substituted samples. Locked by substitutions and by readers of the ledger.
    ledger: Mutex<LedgerWriter>,
    /// Position after the last batch received. Locked once per batch; contended only while a state
    /// is taken.
    place: Mutex<BatchPlace>,
    /// Set by `build`, or by the first state after a failure.
    run_identity: OnceLock<resume::RunIdentity>,
    stop: Option<Stop>,
}

/// Decisions of `build`, for reports.
struct LoaderFacts {
    choice: Choice,
    remote: Option<feedline_store::RemoteCounts>,
    /// Placement of threads and memory.
    numa: Option<String>,
    /// Cores of the ranks of this machine, if there are several.
    cores: Option<Cores>,
    plan: MemoryPlan,
    /// Routes of the fields to the device.
    routes: Vec<FieldRoute>,
    direct: Option<Arc<DirectReader>>,
    /// For datasets in chunks: samples of opened chunks per sample, over all ranks.
    planned_amplification: Option<f64>,
    /// The kernel's counters at `build`, to determine the origin of the bytes.
    before: origin::Before,
    /// Values of a snapshot that do not come from the meters.
    settings: Settings,
}

/// How long `next()` waits for the caller to drop a batch, and for any other operation.
struct Deadlines {
    held: Duration,
    stall: Duration,
}

/// Measurements from the first batches of iterators to their ends.
#[derive(Default)]
struct Steady {
    /// Sum over ended iterators.
    sum: Option<Snapshot>,
    /// Snapshot at the current iterator's first batch.
    since: Option<Snapshot>,
    /// The last published snapshot: counters must not decrease.
    said: Option<Snapshot>,
}

/// The loader's position in the run.
#[derive(Clone, Debug, Default)]
struct BatchPlace {
    cursor: Cursor,
    /// Whether a state set the position, and no batch has been received since.
    resumed: bool,
    /// Batches that are not delivered.
    skips: Skips,
    /// Number of skipped batches that the run has passed.
    skipped: u64,
}

impl BatchPlace {
    /// Moves to `cursor`, or past the skipped batches that begin there.
    fn arrive(&mut self, whole: &Batches, cursor: Cursor) {
        let (cursor, skipped) = self.skips.past(whole, cursor);
        self.cursor = cursor;
        self.skipped = self.skipped.saturating_add(skipped);
    }
}

impl Loader {
    /// Settings for a loader of `dataset`.
    pub fn builder(dataset: impl Dataset) -> LoaderBuilder {
        LoaderBuilder::new(Arc::new(dataset))
    }

    /// The batches of epoch `epoch`, in order. Their contents depend on (seed, epoch, position)
    /// alone.
    ///
    /// After a [resume](LoaderBuilder::resume), the first epoch must be the interrupted one
    /// ([`next_epoch`](Self::next_epoch)); it continues at the point of interruption. After the
    /// first batch, epochs are whole again.
    ///
    /// Errors: [`ErrorKind::EpochLive`] while another iterator of this loader is alive;
    /// [`ErrorKind::Config`] for any epoch other than the resumed one.
    pub fn epoch(&self, epoch: u64) -> Result<Epoch> {
        self.epochs(epoch..=epoch)
    }

    /// The batches of several epochs in one iterator, which reads ahead across epoch boundaries.
    ///
    /// `3..` never ends. An empty range has no batches.
    ///
    /// Errors: see [`epoch`](Self::epoch).
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
        Epoch::start(
            self.shared.clone(),
            epoch::From::Epoch(start),
            u64::try_from(count).unwrap_or(u64::MAX),
            u64::MAX,
        )
    }

    /// The next `steps` batches, across epoch boundaries.
    ///
    /// They start at the resumed state, after the last batch received, or at the beginning. The
    /// loader reads nothing beyond them, except the rest of their chunks (and windows of chunks).
    /// An order that keeps all chunks open reads everything.
    ///
    /// Errors: [`ErrorKind::EpochLive`] while another iterator of this loader is alive.
    pub fn steps(&self, steps: u64) -> Result<Epoch> {
        Epoch::start(self.shared.clone(), epoch::From::Here, u64::MAX, steps)
    }

    /// The epoch of the next batch: 0 for a new run, the interrupted epoch after a resume.
    ///
    /// After the last batch of an epoch this is the following epoch.
    pub fn next_epoch(&self) -> u64 {
        if self.shared.info.process.is_forked() {
            return 0;
        }
        self.shared.place.hold().cursor.epoch
    }

    /// Batches per epoch, the same on every rank; known before the first epoch.
    pub fn batches_per_epoch(&self) -> u64 {
        self.shared.whole.count()
    }

    /// Samples that one epoch delivers to all ranks together. They are fewer than the order's
    /// length only if the last batch is dropped. The [snapshot](crate::profile::Snapshot::epoch)
    /// also has the numbers of repeated and left-out samples.
    pub fn samples_per_epoch(&self) -> u64 {
        self.shared.whole.samples()
    }

    /// Rows of a full batch over all ranks; in a grouped order, rows of the largest batch.
    pub fn global_batch(&self) -> u64 {
        self.shared.jobs().global
    }

    /// This loader's rank and the world size.
    pub fn rank(&self) -> Rank {
        self.shared.jobs().rank
    }

    /// Ids of the first `count` samples of `epoch`, in the order of all ranks together. Reads
    /// nothing.
    ///
    /// Errors: [`ErrorKind::Config`] if a sampler names a sample that does not exist.
    pub fn preview(&self, epoch: u64, count: u64) -> Result<Vec<u64>> {
        self.shared.info.process.check()?;
        let jobs = self.shared.jobs();
        caught(Stage::Order, || {
            jobs.order
                .epoch_in(jobs.dataset_len, jobs.chunks.as_ref(), epoch)?
                .first_ids(count)
        })
    }

    /// Ids of the rows of this rank in the next batch; `u64::MAX` for blank rows. Reads nothing.
    ///
    /// Processes that must receive the same data return the same ids, see [`Rank::agree`]. Errors:
    /// see [`preview`](Self::preview).
    pub fn next_ids(&self) -> Result<Vec<u64>> {
        self.shared.info.process.check()?;
        let BatchPlace { cursor, skips, .. } = self.shared.place();
        let (at, _) = skips.past(&self.shared.whole, cursor);
        let job = self
            .shared
            .jobs()
            .job(&at, u64::MAX, 1, (0, &Arc::default()))?;
        caught(Stage::Order, || {
            (0..job.batches.rows(at.batch))
                .map(|row| match row < job.batches.filled(at.batch) {
                    true => job.order.id(job.batches.position(at.batch, row)),
                    false => Ok(u64::MAX),
                })
                .collect()
        })
    }

    /// Sets the weights by which the next epochs draw their samples, without a new loader. The
    /// order must be [weighted](Order::weighted), and the call must come between two epochs.
    ///
    /// Every rank must set the same weights before the same epoch; [`State::agree`] names ranks
    /// that differ. A run that resumes within an epoch needs the weights of that epoch.
    ///
    /// Errors: [`ErrorKind::EpochLive`] while an iterator of this loader is alive;
    /// [`ErrorKind::Config`] if the order is not weighted, if the number of weights or draws
    /// changes, and within an epoch.
    pub fn weights(&self, weights: Weights) -> Result<()> {
        self.shared.info.process.check()?;
        let _live = Live::claim(
            &self.shared,
            "an iterator of this loader is alive: drop it before you set weights",
        )?;
        let Cursor {
            epoch, position, ..
        } = self.shared.place().cursor;
        if position > 0 && position < self.shared.whole.len() {
            return Err(config(format!(
                "the run is within epoch {epoch}, at position {position}: set weights between two \
                 epochs"
            )));
        }
        let mut jobs = self.shared.jobs.hold();
        let order = jobs.order.reweighted(weights, jobs.dataset_len)?;
        *jobs = Arc::new(JobMaker {
            order,
            ..JobMaker::clone(&jobs)
        });
        Ok(())
    }

    /// The state of the run after the last batch received, regardless of read-ahead.
    ///
    /// Ranks that received equally many batches have the same state. A loop that trains later than
    /// it receives must save another one: see [`State::at`], [`State::trained`] and the guide
    /// [late](crate::guide::late).
    ///
    /// Errors: the dataset cannot be fingerprinted. If that failed during `build`, this call tries
    /// again, on the file versions that were indexed.
    pub fn state(&self) -> Result<State> {
        self.shared.info.process.check()?;
        self.shared.state()
    }

    /// Resumes from `state`: the next [`epoch`](Self::epoch) or [`steps`](Self::steps) starts
    /// there.
    ///
    /// With the loader's own [`state`](Self::state), an epoch that failed continues after the last
    /// batch received.
    ///
    /// Errors: those of [`LoaderBuilder::resume`]; [`ErrorKind::EpochLive`] while an iterator of
    /// this loader is alive. After an error, the iterator and the position are unchanged.
    pub fn resume(&self, state: &State) -> Result<()> {
        self.go_to(state, false)
    }

    /// Like [`resume`](Self::resume), but the global batch and the last batch may differ, as in
    /// [`LoaderBuilder::resume_rebatched`].
    pub fn resume_rebatched(&self, state: &State) -> Result<()> {
        self.go_to(state, true)
    }

    fn go_to(&self, state: &State, any_batch: bool) -> Result<()> {
        self.shared.info.process.check()?;
        let place = self.shared.place_in(state, any_batch)?;
        // Without this, an iterator of another thread could start at the old place and overwrite
        // the new one.
        let _live = Live::claim(
            &self.shared,
            "another iterator of this loader is alive: drop it before you resume a state",
        )?;
        self.shared.set_place(place);
        Ok(())
    }

    /// Whether the builder's [`Stop`] was requested, by a signal or by the program.
    ///
    /// Ranks see a signal at different steps: all-reduce this flag in each step before the ranks
    /// save and leave.
    pub fn stop_requested(&self) -> bool {
        self.shared.stop.as_ref().is_some_and(Stop::requested)
    }

    /// Waits until all slots are pinned. Optional; useful before measuring the first batches.
    ///
    /// With a GPU, slots are pinned one by one after `build` (about a second for 2 GB), and used as
    /// soon as pinned.
    ///
    /// Errors: any failure of the loader; [`ErrorKind::Stalled`] if pinning one slot takes longer
    /// than the [`stall_deadline`](Tuning::stall_deadline).
    pub fn ready(&self) -> Result<()> {
        self.shared.info.process.check()?;
        let core = self.shared.runtime.core();
        let mut watcher = Watcher::default();
        // The channel carries no messages: it disconnects when the last slot is pinned.
        while let Err(RecvTimeoutError::Timeout) =
            self.shared.pinned.recv_timeout(Duration::from_millis(100))
        {
            let trouble = core.trouble().or_else(|| {
                watcher.look(
                    &core.watch,
                    self.shared.deadlines.stall,
                    &core.samples.sources,
                )
            });
            if let Some(error) = trouble {
                return Err(error);
            }
        }
        Ok(())
    }

    /// The fields of a batch, in order.
    pub fn spec(&self) -> Vec<Field> {
        self.shared
            .info
            .keep
            .iter()
            .map(|kept| kept.field.clone())
            .collect()
    }

    /// The memory plan: every buffer, and the total.
    pub fn plan(&self) -> &MemoryPlan {
        &self.shared.facts.plan
    }

    /// Measurements so far, as numbers. Callable at any time.
    ///
    /// Times cover the steady time of all iterators, from their first batches on. Batches received
    /// and histograms count from the beginning.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.measurements().1
    }

    /// The last batches one by one, the fill levels of the queues, and the activity of each thread.
    pub fn timeline(&self) -> Timeline {
        if self.shared.info.process.is_forked() {
            return Timeline::default();
        }
        let meters = &self.shared.runtime.core().meters;
        let stream = self.shared.idle.as_ref().map(|idle| idle.track());
        let mut timeline = meters.recorder.read();
        timeline.tracks = meters.rings.read().into_iter().chain(stream).collect();
        timeline
    }

    /// Failed samples and their substitutes, of all batches delivered so far.
    ///
    /// See [`LoaderBuilder::on_bad_sample`].
    pub fn ledger(&self) -> Ledger {
        self.shared.bad()
    }

    /// The report of this process for the other processes of its job, as input of
    /// [`Across::of`](crate::profile::Across::of): below 6 KiB as JSON.
    ///
    /// `process` is this process's number among the `processes` that report, as the launcher counts
    /// them. A replicated rank has several processes. Make the report in all processes after the
    /// same step.
    pub fn rank_report(&self, process: u32, processes: u32) -> RankReport {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        RankReport::of(
            process,
            processes,
            host.trim(),
            &self.snapshot(),
            &self.timeline(),
        )
    }

    /// Estimates the rate and the bottleneck of a run whose step takes `step`, and the cost of an
    /// epoch, from the batches so far. Before the call, take batches for some seconds without work
    /// of your own. Returns `None` if there is no batch after the first.
    ///
    /// ```no_run
    /// # use feedline::{Loader, dataset::Records};
    /// # use std::time::{Duration, Instant};
    /// let loader = Loader::builder(Records::builder(4096).open("records.bin")?).build()?;
    /// let began = Instant::now();
    /// for batch in loader.epoch(0)?.take_while(|_| began.elapsed() < Duration::from_secs(3)) {
    ///     batch?;
    /// }
    /// println!("{}", loader.estimate(Duration::from_millis(80)).expect("some batches"));
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn estimate(&self, step: Duration) -> Option<Estimate> {
        let samples = self.samples_per_epoch() / u64::from(self.rank().world());
        let mut epoch = EpochCost::default();
        epoch.samples = samples;
        epoch.batches = self.batches_per_epoch();
        let report = self.report();
        let snapshot = self.snapshot();
        let memory = self.plan().total() as u64;
        Estimate::of(
            &report.total,
            &snapshot,
            step.as_nanos() as f64,
            epoch,
            report.origin.from_memory(),
            memory,
        )
    }

    /// Marks that this rank's own part of a step is done, and that it waits for the other ranks
    /// from now on. Call it before the first collective operation of each step.
    ///
    /// If all ranks call it, [`Across`](crate::profile::Across) names a rank that finishes that
    /// part late. Otherwise such a rank is not visible: all others wait for it, so between two
    /// batches all ranks take the same time. The call runs on the host only: it reads the clock and
    /// takes an uncontended lock.
    pub fn arrive(&self) {
        if !self.shared.info.process.is_forked() {
            let meters = &self.shared.runtime.core().meters;
            meters.recorder.arrived(meters.clock.now());
        }
    }

    /// Marks that all work of a step has been enqueued on the stream that took the last batch, so
    /// that the report shows how long the program left that stream idle.
    ///
    /// Call it at the end of each step, from any thread. Without a mark, the stream's idle time
    /// before a request for a batch is unknown if the program waits for the stream
    /// ([`GpuIdle`](crate::profile::snapshot::GpuIdle::host_late_ns)). With a GPU it makes four driver calls;
    /// a loader for the host makes none. Nothing is marked while the stream captures a graph.
    pub fn mark(&self) {
        self.mark_stream(None);
    }

    /// Like [`mark`](Self::mark), for the work of a step on this stream. It checks the stream
    /// first, with three more driver calls.
    pub fn mark_on(&self, stream: impl std::borrow::Borrow<Stream>) {
        self.mark_stream(Some(stream.borrow()));
    }

    fn mark_stream(&self, stream: Option<&Stream>) {
        let shared = &self.shared;
        let Some(idle) = shared
            .idle
            .as_ref()
            .filter(|_| !shared.info.process.is_forked())
        else {
            return;
        };
        let backend = shared.info.device.backend();
        // Checked first, because a capturing stream must not be asked for its context.
        let checked = |stream| {
            backend
                .check_uncaptured(stream)
                .and_then(|()| backend.check_stream(stream))
        };
        if stream.is_none_or(|stream| checked(stream).is_ok()) {
            idle.mark(stream);
        }
    }

    /// A report on the run so far. Callable at any time.
    pub fn report(&self) -> Report {
        self.shared.report()
    }
}

impl LoaderState {
    fn jobs(&self) -> Arc<JobMaker> {
        Arc::clone(&self.jobs.hold())
    }

    fn place(&self) -> BatchPlace {
        self.place.hold().clone()
    }

    /// Moves the run's position to `next` after a batch was received, and counts the step.
    fn received(&self, next: Cursor) {
        let mut place = self.place.hold();
        let steps = place.cursor.steps.saturating_add(1);
        place.arrive(&self.whole, Cursor { steps, ..next });
        place.resumed = false;
    }

    fn ledger(&self) -> std::sync::MutexGuard<'_, LedgerWriter> {
        self.ledger.hold()
    }

    /// The ledger so far. It is empty in a forked child, because a lock may be held forever there.
    fn bad(&self) -> Ledger {
        if self.info.process.is_forked() {
            Ledger::default()
        } else {
            self.ledger().ledger.clone()
        }
    }

    fn set_place(&self, place: BatchPlace) {
        *self.place.hold() = place;
    }

    fn measured(&self) -> Snapshot {
        let core = self.runtime.core();
        let mut snapshot = core.meters.snapshot(&self.facts.settings);
        let Counts {
            samples,
            batches,
            repeated,
            left_out,
        } = self.whole.counts();
        snapshot.epoch = EpochCounts::new(samples, batches, repeated, left_out);
        snapshot.consumer.gpu = self.idle.as_ref().map(|idle| idle.totals());
        snapshot.consumer.substituted = self.ledger().ledger.substituted;
        snapshot.consumer.skipped_batches = self.place.hold().skipped;
        snapshot.storage.recovered = core.again.recovered();
        snapshot.storage.page_cache = core.cache.as_deref().map(|cache| {
            let mut lookups = Lookups::default();
            lookups.hits = cache.hits();
            lookups.misses = cache.misses();
            lookups
        });
        let (network, cache) = self.facts.remote.as_ref().map(|counts| counts()).unzip();
        snapshot.storage.network = network.flatten();
        snapshot.storage.local_cache = cache.flatten();
        snapshot
    }

    /// Begins or ends the steady time of an iterator.
    fn mark_steady(&self, begins: bool) {
        // Measured under the lock, so that snapshots stay in order.
        let mut steady = self.steady.hold();
        let now = self.measured();
        if let Some(since) = steady.since.take() {
            let stretch = now.since(&since);
            steady.sum = Some(
                steady
                    .sum
                    .take()
                    .map_or(stretch.clone(), |sum| stretch.and(&sum)),
            );
        }
        steady.since = begins.then_some(now);
    }

    /// Measurements since the loader was built, and those of the steady time. A forked child has
    /// none, because it must not take a lock.
    fn measurements(&self) -> (Snapshot, Snapshot) {
        if self.info.process.is_forked() {
            return Default::default();
        }
        // Asks cuFile, so this is not done under the lock that the consumer takes.
        let mode = self.facts.direct.as_ref().map(|reader| reader.mode());
        let mut steady = self.steady.hold();
        let mut now = self.measured();
        now.consumer.sources = self.sources();
        if let (Some(copy), Some(mode)) = (&mut now.copy, mode) {
            copy.direct = Some(self.runtime.core().meters.copy.direct.read(mode));
        }
        let stretch = steady.since.as_ref().map(|since| now.since(since));
        let sum = stretch
            .into_iter()
            .chain(steady.sum.clone())
            .reduce(|stretch, sum| stretch.and(&sum));
        // Counts start at the beginning; only times are limited to the steady time.
        let mut snapshot = sum.unwrap_or_else(|| now.since(&now));
        snapshot.at_ns = now.at_ns;
        let Consumer {
            batches,
            samples,
            waited_ns,
            cpu_ns,
            delay_ns,
            ..
        } = snapshot.consumer;
        // The GPU meter itself omits first steps. It sees the last steps only after the iterator
        // has ended.
        snapshot.consumer = now.consumer.clone();
        snapshot.consumer.steady = Some(Handed { batches, samples });
        snapshot.consumer.waited_ns = waited_ns;
        snapshot.consumer.cpu_ns = cpu_ns;
        snapshot.consumer.delay_ns = delay_ns;
        snapshot.storage.recovered = now.storage.recovered;
        snapshot.decode.chunks = now.decode.chunks;
        if let (Some(copy), Some(now)) = (&mut snapshot.copy, &now.copy) {
            copy.pinned_slots = now.pinned_slots;
            copy.pageable_slots = now.pageable_slots;
            copy.why_pageable.clone_from(&now.why_pageable);
            copy.direct.clone_from(&now.direct);
        }
        if let Some(said) = &steady.said {
            snapshot.raise(said);
        }
        // The current step counts as the consumer's own work.
        let own = snapshot
            .steady_ns
            .saturating_sub(snapshot.consumer.waited_ns);
        snapshot.consumer.user_ns =
            own.max(steady.said.as_ref().map_or(0, |said| said.consumer.user_ns));
        steady.said = Some(snapshot.clone());
        now.steady_ns = snapshot.steady_ns;
        now.consumer = snapshot.consumer.clone();
        (now, snapshot)
    }

    /// The samples that each source of a mixture has delivered; empty for other orders.
    fn sources(&self) -> Vec<SourceCount> {
        let Cursor {
            epoch, position, ..
        } = self.place().cursor;
        // A panic of the sampler is reported by the epoch.
        let progress = self
            .jobs()
            .order
            .progress(epoch, position)
            .ok()
            .flatten()
            .unwrap_or_default();
        progress
            .sources
            .into_iter()
            .map(|of| SourceCount::new(of.drawn, of.asked, of.samples))
            .collect()
    }

    fn report(&self) -> Report {
        let core = self.runtime.core();
        let rank = self.jobs().rank;
        let (total, steady) = self.measurements();
        Report {
            dataset: core.samples.dataset.describe(),
            device: self.info.device.to_string(),
            numa: self.facts.numa.clone(),
            cores: self
                .facts
                .cores
                .map(|cores| cores.in_words(self.facts.settings.workers as usize)),
            threads: thread::fewer_in_words(),
            rank: (rank.world() > 1).then(|| rank.to_string()),
            choice: self.facts.choice.clone().and(core.unregistered.get()),
            routes: self.facts.routes.clone(),
            planned_amplification: self.facts.planned_amplification,
            origin: self.facts.before.origin(&total),
            total,
            verdict: Verdict::of(&steady),
            plan: self.facts.plan.clone(),
            bad: self.bad(),
            leaked: feedline_reader::leaked() + runtime::abandoned() + feedline_device::leaked(),
        }
    }
}

impl std::fmt::Debug for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Loader of {}",
            self.shared.runtime.core().samples.dataset.describe()
        )?;
        match self.rank() {
            rank if rank.world() > 1 => write!(f, ", {rank}"),
            _ => Ok(()),
        }
    }
}
