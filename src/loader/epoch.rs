//! The iterator over batches.

use super::Report;
use super::{Life, Place, config};
use crate::batch::{Batch, BatchInfo, Contents, Reorder};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::Ticket;
use crate::meter::consuming;
use crate::order::Batches;
use crate::pipeline::Start;
use crate::pipeline::runtime::placed;
use crate::pipeline::watchdog::{LOOKS, Watcher};
use crate::report::spans;
use crate::report::{Cause, Verdict};
use crate::state::Cursor;
use crossbeam_channel::RecvTimeoutError;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

/// How often a waiting `next()` looks for errors that no batch can carry.
const TICK: Duration = Duration::from_millis(100);

/// Iterator over the batches of an epoch (or several), in order. Owned: it keeps the loader's threads alive.
///
/// After an error it ends, except after [`ErrorKind::BatchesHeld`]: drop a batch and go on. Dropping it at any point
/// cancels what was planned.
pub struct Epoch {
    shared: Life,
    generation: u64,
    reorder: Reorder<Contents>,
    /// The epoch that it starts with, and that one's batches; the others have those of a whole epoch.
    first: (u64, Batches),
    total: u64,
    delivered: u64,
    ended: bool,
    /// When the user got the last answer, by the loader's clock: from then on the time is the user's.
    handed_out: Option<u64>,
    /// How long the calls that had a limit have waited for the next batch so far.
    waited_ns: u64,
    /// When the next batch was asked for first: for deadlines.
    asked: Option<Instant>,
    /// Finds what does not answer.
    watcher: Watcher,
    /// For who collects `tracing` spans.
    span: Option<spans::Epoch>,
    /// No other iterator of the loader while this one lives: its own doing.
    keeps_others_away: bool,
}

/// Where an iterator starts.
#[derive(Clone, Copy)]
pub(super) enum From {
    /// At the beginning of this epoch, or where it was resumed.
    Epoch(u64),
    /// After the last batch received.
    Here,
}

impl From {
    fn cursor(self, place: Place) -> Result<Cursor> {
        let Place { cursor, resumed } = place;
        match self {
            Self::Epoch(u64::MAX) => Err(config("there is no epoch after the last number")),
            Self::Here => Ok(cursor),
            Self::Epoch(epoch) if resumed && epoch == cursor.epoch => Ok(cursor),
            Self::Epoch(epoch) if resumed => Err(config(&format!(
                "the state that was resumed stands in epoch {}, not {epoch}: go on with `loader.next_epoch()`",
                cursor.epoch
            ))),
            Self::Epoch(epoch) => Ok(Cursor { epoch, position: 0, batch: 0, steps: cursor.steps }),
        }
    }
}

/// Batches of `epochs` epochs of which the first is not whole.
fn total(first: &Batches, whole: &Batches, epochs: u64) -> u64 {
    whole.count().saturating_mul(epochs - 1).saturating_add(first.count())
}

/// Refuses to hand out a batch while a stream that it would be bound to is captured.
fn check_streams(info: &BatchInfo) -> Result<()> {
    // What else is wrong is told in its place.
    let captured =
        |stream| info.device.backend().check_uncaptured(stream).err().filter(|error| error.kind() == ErrorKind::Config);
    info.streams.iter().find_map(captured).map_or(Ok(()), Err)
}

impl Epoch {
    /// Starts a run of `epochs` epochs and `steps` batches at most.
    pub(super) fn start(shared: Life, from: From, epochs: u64, steps: u64) -> Result<Self> {
        shared.info.process.check()?;
        if shared.live.swap(true, Ordering::AcqRel) {
            let message = "drop the iterator of the last epoch before the next is started";
            return Err(Error::new(ErrorKind::EpochLive, Stage::Batch, message));
        }
        Self::begin(shared, from, epochs, steps, true)
    }

    /// As [`start`](Self::start), for who keeps other iterators away himself.
    pub(super) fn start_within(shared: Life, from: From, epochs: u64, steps: u64) -> Result<Self> {
        Self::begin(shared, from, epochs, steps, false)
    }

    fn begin(shared: Life, from: From, epochs: u64, steps: u64, keeps_others_away: bool) -> Result<Self> {
        let current = shared.runtime.core().exchange.generation.clone();
        let generation = current.fetch_add(1, Ordering::AcqRel) + 1;
        let mut epoch = Self {
            reorder: Reorder::new(shared.facts.plan.slots),
            generation,
            first: (0, shared.whole),
            total: 0,
            delivered: 0,
            ended: false,
            handed_out: None,
            waited_ns: 0,
            asked: None,
            watcher: Watcher::default(),
            keeps_others_away,
            span: None,
            shared,
        };
        if epochs == 0 {
            epoch.end();
            return Ok(epoch);
        }
        let place = epoch.shared.place();
        let cursor = from.cursor(place)?;
        let jobs = epoch.shared.jobs.clone();
        let first = jobs.job(generation, &cursor, steps, current.clone())?;
        epoch.first = (cursor.epoch, first.batches);
        epoch.total = total(&first.batches, &epoch.shared.whole, epochs).min(steps);
        epoch.span = Some(spans::epoch(cursor.epoch, epoch.total));
        // A place that was resumed is one until a batch is received from there.
        epoch.shared.set_place(Place { cursor, ..place });
        if epoch.total == 0 {
            epoch.end();
            return Ok(epoch);
        }
        let (batches, whole, all) = (first.batches, epoch.shared.whole, epoch.total);
        let next = Box::new(move |done: u64| {
            let next =
                cursor.epoch.checked_add(done).ok_or_else(|| config("there is no epoch after the last number"))?;
            let left = all.saturating_sub(total(&batches, &whole, done));
            jobs.job(generation, &Cursor { epoch: next, ..Cursor::default() }, left, current.clone())
        });
        epoch.shared.runtime.core().to_io.start(Start { first, epochs, batches: epoch.total, next });
        Ok(epoch)
    }

    /// Batches received from this iterator.
    pub fn position(&self) -> u64 {
        self.delivered
    }

    /// What the loader did so far.
    pub fn report(&self) -> Report {
        self.shared.report()
    }

    /// As [`next`](Iterator::next), but waits no longer than `limit`: `Pending` says that the batch has not come, and nothing
    /// is lost; ask again. For callers that have to look up now and then, at signals or at a flag. The waits of several calls for
    /// one batch add up in the report; [`held_deadline`](crate::LoaderBuilder::held_deadline) counts from the first of them.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// use std::{task::Poll, time::Duration};
    ///
    /// # let loader = Loader::builder(Records::builder(4).open_bytes([7; 400])?).batch_size(10).build()?;
    /// # let interrupted = || false;
    /// let (mut epoch, mut batches) = (loader.epoch(0)?, 0);
    /// while !interrupted() {
    ///     match epoch.next_within(Duration::from_millis(100)) {
    ///         Poll::Ready(Some(batch)) => batches += u32::from(batch?.len() == 10),
    ///         Poll::Ready(None) => break,
    ///         Poll::Pending => {}
    ///     }
    /// }
    /// assert_eq!(batches, 10);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn next_within(&mut self, limit: Duration) -> Poll<Option<Result<Batch>>> {
        self.poll(Some(limit))
    }

    fn poll(&mut self, limit: Option<Duration>) -> Poll<Option<Result<Batch>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if let Err(forked) = self.shared.info.process.check() {
            self.end();
            return Poll::Ready(Some(Err(forked)));
        }
        if let Err(error) = check_streams(&self.shared.info) {
            return Poll::Ready(Some(Err(error)));
        }
        let (from, first) = self.ask();
        // A limit that no clock reaches is none.
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let contents = {
            let _waiting = self.span.as_ref().map(|span| span.wait(self.delivered));
            self.wait(first, until)
        };
        let (now, waited) = self.answered(from);
        let waited_ns = std::mem::take(&mut self.waited_ns) + waited;
        match contents {
            Ok(Poll::Ready(contents)) => {
                self.asked = None;
                Poll::Ready(Some(self.hand_out(contents, now, waited_ns)))
            }
            Ok(Poll::Pending) => {
                self.waited_ns = waited_ns;
                self.handed_out = Some(now);
                Poll::Pending
            }
            Err(error) => {
                // The batch that was waited for is still to come.
                self.waited_ns = waited_ns;
                self.handed_out = Some(now);
                if error.kind() != ErrorKind::BatchesHeld {
                    self.end();
                }
                Poll::Ready(Some(Err(error)))
            }
        }
    }

    /// The user is back and asks, perhaps again, for the next batch; when, and when he did so first.
    fn ask(&mut self) -> (u64, Instant) {
        let meters = &self.shared.runtime.core().meters;
        let now = meters.clock.now();
        // Before the first batch nothing is the user's work.
        if let (true, Some(handed_out)) = (meters.on && self.delivered > 0, self.handed_out.take()) {
            meters.user_ns.add_alone(now.saturating_sub(handed_out));
        }
        if self.delivered > 0 {
            meters.consumer.enter(consuming::WAITING, now);
        }
        if let Some(first) = self.asked {
            return (now, first);
        }
        let first = Instant::now();
        self.asked = Some(first);
        if let Some(idle) = &self.shared.idle {
            idle.asked(self.delivered == 0);
        }
        (now, first)
    }

    /// The user gets an answer, whatever it is: when, and how long he has waited for it.
    fn answered(&self, from: u64) -> (u64, u64) {
        let meters = &self.shared.runtime.core().meters;
        let now = meters.clock.now();
        let waited = now.saturating_sub(from);
        if !meters.on {
            return (now, waited);
        }
        if self.delivered > 0 {
            meters.consumer.enter(consuming::OWN, now);
        } else {
            meters.first_wait_ns.add_alone(waited);
        }
        (now, waited)
    }

    fn wait(&mut self, asked: Instant, until: Option<Instant>) -> Result<Poll<Contents>> {
        loop {
            if let Some(contents) = self.reorder.take() {
                self.watcher.rest();
                return Ok(Poll::Ready(contents));
            }
            let tick = TICK.min(self.shared.deadlines.stall / LOOKS);
            let left = until.map_or(tick, |until| until.saturating_duration_since(Instant::now()));
            #[cfg(all(test, feature = "cuda"))]
            crate::meter::Clock::waits();
            match self.shared.ready.recv_timeout(left.min(tick)) {
                Ok(contents) => {
                    let ticket = contents.ticket();
                    if ticket.generation == self.generation {
                        self.reorder.put(ticket.sequence, contents);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.look_for_trouble(asked.elapsed())?;
                    if left <= tick && until.is_some() {
                        return Ok(Poll::Pending);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::Cancelled, Stage::Batch, "the loader was shut down"));
                }
            }
        }
    }

    fn look_for_trouble(&mut self, waited: Duration) -> Result<()> {
        let core = self.shared.runtime.core();
        if let Some(error) = core.trouble() {
            return Err(error);
        }
        let held = self.shared.info.held.load(Ordering::Relaxed);
        if held >= self.shared.info.most && waited >= self.shared.deadlines.held {
            let message =
                format!("the caller holds all {held} batches; drop one, or raise `{}`", self.shared.info.permit());
            return Err(Error::new(ErrorKind::BatchesHeld, Stage::Batch, message));
        }
        if held >= self.shared.info.most {
            // It is the caller who must do something.
            self.watcher.rest();
            return Ok(());
        }
        let stalled = self.watcher.look(&core.watch, self.shared.deadlines.stall, &core.samples.sources);
        stalled.map_or(Ok(()), |error| Err(placed(core, error)))
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if self.shared.info.process.is_forked() {
            // Full slots, too, stay where they are, see `Batch`.
            return std::mem::forget(std::mem::replace(&mut self.reorder, Reorder::new(1)));
        }
        let core = self.shared.runtime.core();
        if self.delivered > 0 && core.meters.on {
            self.shared.mark_steady(false);
            if spans::wants_verdicts() {
                let verdict = Verdict::of(&self.shared.snapshot());
                let starves = !matches!(verdict.cause, Cause::NotStarved | Cause::Unknown);
                let advice = verdict.advice.first().map_or("", String::as_str);
                spans::verdict(&verdict.cause.to_string(), advice, starves);
            }
        }
        // From here on rows of this run are dropped, and its full slots go straight back; those that are in the channel already are taken out.
        core.exchange.generation.fetch_add(1, Ordering::AcqRel);
        self.reorder = Reorder::new(1);
        while self.shared.ready.try_recv().is_ok() {}
        core.exchange.ring();
        if self.keeps_others_away {
            self.shared.live.store(false, Ordering::Release);
        }
    }

    /// What comes after the batch of `ticket`.
    fn step(&self, ticket: Ticket) {
        let batches = if ticket.epoch == self.first.0 { &self.first.1 } else { &self.shared.whole };
        self.shared.received(match batches.after(ticket.batch) {
            Some((position, batch)) => (ticket.epoch, position, batch),
            None => (ticket.epoch.saturating_add(1), 0, 0),
        });
    }

    fn hand_out(&mut self, contents: Contents, now: u64, waited: u64) -> Result<Batch> {
        if let Some(mut error) = contents.take_failure() {
            let bad = contents.take_bad();
            drop(contents);
            // The list of what is too much says more than the first of it.
            error = self.shared.ledger().refuse(&bad).unwrap_or(error);
            if error.kind() == ErrorKind::Cancelled {
                // Nobody cancelled this run: its rows were dropped by what broke the loader.
                error = self.shared.runtime.core().trouble().unwrap_or(error);
            }
            spans::fault(&error, spans::Outcome::Failed);
            self.end();
            return Err(error);
        }
        let bad = contents.take_bad();
        let kept = if bad.is_empty() { Ok(()) } else { self.shared.ledger().add(bad) };
        if let Err(error) = kept {
            drop(contents);
            spans::fault(&error, spans::Outcome::Failed);
            self.end();
            return Err(error);
        }
        let batch = self.note(now, waited, contents);
        if batch.is_err() || self.delivered == self.total {
            self.end();
        }
        batch
    }

    fn note(&mut self, now: u64, waited: u64, contents: Contents) -> Result<Batch> {
        let ticket = contents.ticket();
        let mut batch = Batch::new(contents, self.shared.info.clone())?;
        self.step(ticket);
        let meters = &self.shared.runtime.core().meters;
        if meters.on {
            if self.delivered > 0 {
                if let Some(span) = &self.span {
                    span.starved(self.delivered, Duration::from_nanos(waited));
                }
                meters.waits.record(waited);
            }
            // Waits with the user's work between them are drawn as one that ended now.
            batch.record(self.delivered == 0, now.saturating_sub(waited), now);
            meters.batches.add_alone(1);
            meters.samples.add_alone(batch.valid() as u64);
            meters.bytes.add_alone(batch.bytes() as u64);
        }
        self.handed_out = Some(now);
        self.delivered += 1;
        if self.delivered == 1 && meters.on {
            self.shared.mark_steady(true);
        }
        Ok(batch)
    }
}

impl Iterator for Epoch {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            // Without a limit it is never pending.
            if let Poll::Ready(next) = self.poll(None) {
                return next;
            }
        }
    }

    /// Exact, unless an error ends the iterator before.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.total - self.delivered };
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Epoch {}

impl std::iter::FusedIterator for Epoch {}

impl Drop for Epoch {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Epoch at batch {} of {}", self.delivered, self.total)
    }
}
