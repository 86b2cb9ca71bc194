//! The iterator over batches.
//!
//! ```text
//! Loader::epoch ──► Live (the only iterator) ──► EpochJob ──► Start ──► planner
//! full slots, or batches on the device ──► of this generation? ──► Reorder ──► hand_out ──► Batch
//! ```

use super::{BatchPlace, Life, Live, Report};
use crate::batch::{Batch, BatchInfo, Contents, Reorder};
use crate::order::Batches;
use crate::pipeline::Start;
use crate::pipeline::runtime::{placed, within};
use crate::pipeline::watchdog::{Doing, LOOKS, Watcher};
use crate::state::Cursor;
use crossbeam_channel::RecvTimeoutError;
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught, config};
use feedline_base::setting::Setting;
use feedline_core::dataset::member;
use feedline_core::memory::{MemoryTerm, Ticket};
use feedline_device::StreamUse;
use feedline_report::meter::{Consuming, nvtx};
use feedline_report::{Cause, Verdict, spans};
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Interval at which a waiting `next()` checks for errors that no batch carries.
const TICK: Duration = Duration::from_millis(100);

/// Iterator over the batches of one or several epochs, in order. Owned: it keeps the loader's
/// threads alive.
///
/// It ends after an error, except [`ErrorKind::BatchesHeld`]: drop a batch and continue. Dropping
/// the iterator cancels the batches planned ahead.
pub struct Epoch {
    shared: Life,
    generation: u64,
    reorder: Reorder<Contents>,
    /// The first epoch and its remaining batches; later epochs are whole.
    first: (u64, Batches),
    total: u64,
    delivered: u64,
    ended: bool,
    /// Loader time of the last answer; the user's time starts then.
    handed_out: Option<u64>,
    /// Wait for the next batch so far, over several calls with a limit.
    waited_ns: u64,
    /// Time of the first request for the next batch; deadlines count from here.
    asked: Option<Instant>,
    /// Finds operations that do not return.
    watcher: Watcher,
    /// Whether a warning was given that the caller's own work on the device exceeded the stall
    /// deadline.
    hangs: bool,
    /// The `tracing` span, for subscribers.
    span: Option<tracing::Span>,
    /// The NVTX range, for a tool that listens to NVTX.
    range: Option<nvtx::Range>,
    /// Excludes other iterators until this one ends.
    live: Option<Live>,
}

/// Where an iterator starts.
#[derive(Clone, Copy)]
pub(super) enum From {
    /// The beginning of this epoch, or its resumed position.
    Epoch(u64),
    /// After the last batch received.
    Here,
}

impl From {
    fn cursor(
        self,
        &BatchPlace {
            cursor, resumed, ..
        }: &BatchPlace,
    ) -> Result<Cursor> {
        match self {
            Self::Epoch(u64::MAX) => Err(config(format!("epoch {} cannot be used", u64::MAX))),
            Self::Here => Ok(cursor),
            Self::Epoch(epoch) if resumed && epoch == cursor.epoch => Ok(cursor),
            Self::Epoch(epoch) if resumed => {
                let next = Setting::NextEpoch.hint(|next| format!(": continue with {next}"));
                Err(config(format!(
                    "the resumed state is in epoch {}, not {epoch}{next}",
                    cursor.epoch
                )))
            }
            Self::Epoch(epoch) => Ok(Cursor {
                epoch,
                position: 0,
                batch: 0,
                steps: cursor.steps,
            }),
        }
    }
}

/// Refuses to deliver a batch while a bound stream is capturing a graph.
fn check_streams(info: &BatchInfo) -> Result<()> {
    // Other stream errors are reported where they occur.
    let waiting = info
        .streams
        .iter()
        .filter(|bound| bound.how > StreamUse::Releases);
    for error in
        waiting.filter_map(|bound| info.device.backend().check_uncaptured(&bound.stream).err())
    {
        if error.kind() == ErrorKind::Config {
            return Err(error);
        }
    }
    Ok(())
}

impl Epoch {
    /// Starts a run of `epochs` epochs and at most `steps` batches, as the only iterator of the
    /// loader.
    pub(super) fn start(shared: Life, from: From, epochs: u64, steps: u64) -> Result<Self> {
        let live = Some(Live::claim(
            &shared,
            "another iterator of this loader is alive: drop it first",
        )?);
        let current = shared.runtime.core().exchange.generation.clone();
        let generation = current.fetch_add(1, Ordering::AcqRel) + 1;
        let mut epoch = Self {
            reorder: Reorder::new(shared.facts.plan.term(MemoryTerm::SLOTS).count),
            generation,
            first: (0, shared.whole.clone()),
            total: 0,
            delivered: 0,
            ended: false,
            handed_out: None,
            waited_ns: 0,
            asked: None,
            watcher: Watcher::default(),
            hangs: false,
            live,
            span: None,
            range: None,
            shared,
        };
        if epochs == 0 {
            epoch.end();
            return Ok(epoch);
        }
        let mut place = epoch.shared.place();
        let whole = epoch.shared.whole.clone();
        let from = from.cursor(&place)?;
        place.arrive(&whole, from);
        let mut at = place.cursor;
        let skips = place.skips.clone();
        epoch.first = (at.epoch, whole.clone().starting(at.position, at.batch));
        epoch.total = skips
            .count(&whole, &at, from.epoch.saturating_add(epochs))
            .min(steps);
        epoch.span = Some(spans::epoch(at.epoch, epoch.total));
        epoch.range = nvtx::range(
            || {
                format!(
                    "{}epoch {}",
                    if epochs > 1 { "from " } else { "" },
                    at.epoch
                )
            },
            epoch.total,
        );
        let jobs = epoch.shared.jobs();
        let first = jobs.job(&at, skips.stop(&whole, &at), steps, (generation, &current))?;
        // The position stays marked as resumed until its first batch is received.
        epoch.shared.set_place(place);
        if epoch.total == 0 {
            epoch.end();
            return Ok(epoch);
        }
        let mut left = epoch.total;
        let next = Box::new(move || {
            left = left.saturating_sub(skips.stop(&whole, &at) - at.batch);
            at = skips
                .after(&whole, &at)
                .ok_or_else(|| config(format!("epoch {} cannot be used", u64::MAX)))?;
            jobs.job(&at, skips.stop(&whole, &at), left, (generation, &current))
        });
        epoch.shared.runtime.core().to_io.start(Start {
            first,
            batches: epoch.total,
            next,
        });
        Ok(epoch)
    }

    /// Number of batches received from this iterator.
    pub fn position(&self) -> u64 {
        self.delivered
    }

    /// A report on the run so far.
    pub fn report(&self) -> Report {
        self.shared.report()
    }

    /// Like [`next`](Iterator::next), but waits at most `limit`. `Pending` means that the batch has
    /// not arrived yet; nothing is lost, call it again.
    ///
    /// For callers that must check signals or a flag between waits. The report adds up the waits
    /// for one batch; [`held_deadline`](crate::Tuning::held_deadline) counts from the first of
    /// them.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// use std::{task::Poll, time::Duration};
    ///
    /// # let loader = Loader::builder(Records::builder(4).open_bytes([7; 400])?).batch_size(10).build()?;
    /// # let interrupted = || false;
    /// let mut epoch = loader.epoch(0)?;
    /// let mut batches = 0;
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
        // One guard for all calls to the device.
        let backend = self.shared.info.device.backend().clone();
        let mut answer = Poll::Pending;
        backend.beside_captures(&mut || answer = self.poll_device(limit));
        answer
    }

    fn poll_device(&mut self, limit: Option<Duration>) -> Poll<Option<Result<Batch>>> {
        if let Err(error) = check_streams(&self.shared.info) {
            return Poll::Ready(Some(Err(error)));
        }
        let (from, first) = self.ask();
        // A limit too large to represent means no limit.
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let contents = {
            let _waiting = self
                .span
                .as_ref()
                .map(|span| spans::wait(span, self.delivered));
            let _range = nvtx::push(nvtx::Name::Wait, self.delivered);
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
                // The awaited batch may still arrive.
                self.waited_ns = waited_ns;
                self.handed_out = Some(now);
                if error.kind() != ErrorKind::BatchesHeld {
                    self.end();
                }
                Poll::Ready(Some(Err(error)))
            }
        }
    }

    /// Records a request for the next batch, which may be a repeated one. Returns the times of this
    /// request and of the first one.
    fn ask(&mut self) -> (u64, Instant) {
        let meters = &self.shared.runtime.core().meters;
        let now = meters.clock.now();
        // Time before the first batch does not count as the user's work.
        if let (true, Some(handed_out)) = (meters.on && self.delivered > 0, self.handed_out.take())
        {
            meters
                .consumer
                .user_ns
                .add_alone(now.saturating_sub(handed_out));
        }
        if meters.on {
            meters.threads.consumes();
        }
        if self.delivered > 0 {
            meters.consumer.states.enter(Consuming::Waiting, now);
        }
        if let Some(first) = self.asked {
            return (now, first);
        }
        let first = Instant::now();
        self.asked = Some(first);
        if let Some(idle) = &self.shared.idle {
            idle.asked(self.delivered == 0, self.shared.info.takes());
        }
        (now, first)
    }

    /// Records the answer to a request. Returns the current time and the wait of this call.
    fn answered(&self, from: u64) -> (u64, u64) {
        let meters = &self.shared.runtime.core().meters;
        let now = meters.clock.now();
        let waited = now.saturating_sub(from);
        if !meters.on {
            return (now, waited);
        }
        if self.delivered > 0 {
            meters.consumer.states.enter(Consuming::Own, now);
        } else {
            meters.consumer.first_ns.add_alone(waited);
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
            let left = until.map_or(tick, |until| {
                until.saturating_duration_since(Instant::now())
            });
            #[cfg(test)]
            feedline_base::meter::Clock::waits();
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
                    return Err(Error::new(
                        ErrorKind::Cancelled,
                        Stage::Batch,
                        "the loader was shut down",
                    ));
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
            let raise = self
                .shared
                .info
                .permit
                .hint(|permit| format!("; {permit} sets their number"));
            let message = format!(
                "the caller holds all {held} batches: drop one, or copy the data you need{raise}"
            );
            let error = Error::new(ErrorKind::BatchesHeld, Stage::Batch, message);
            return Err(error.with_amounts(held as u64 + 1, held as u64));
        }
        if held >= self.shared.info.most {
            // Only the caller can end this wait.
            self.watcher.rest();
            return Ok(());
        }
        if waited >= self.shared.deadlines.stall
            && !self.hangs
            && core.watch.device.is_now(Doing::Blocked)
        {
            self.hangs = true;
            spans::consumer_hangs(waited);
        }
        let stalled = self.watcher.look(
            &core.watch,
            self.shared.deadlines.stall,
            &core.samples.sources,
        );
        stalled.map_or(Ok(()), |error| Err(placed(core, error)))
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if self.shared.info.process.is_forked() {
            // The range belongs to the parent. Full slots are leaked too, see `Batch`.
            std::mem::forget(self.range.take());
            return std::mem::forget(std::mem::replace(&mut self.reorder, Reorder::new(1)));
        }
        self.range = None;
        let core = self.shared.runtime.core();
        if self.delivered > 0 && core.meters.on {
            self.shared.mark_steady(false);
            if spans::wants_verdicts() {
                let verdict = Verdict::of(&self.shared.measurements().1);
                let starves = !matches!(verdict.cause, Cause::NotStarved | Cause::Unknown);
                let advice = verdict.advice.first().map_or("", |advice| &advice.text);
                spans::verdict(&verdict.cause.to_string(), advice, starves);
            }
        }
        // From here on, rows of this run are dropped and its full slots return at once. The loop
        // takes full slots that came earlier out of the channel.
        core.exchange.generation.fetch_add(1, Ordering::AcqRel);
        self.reorder = Reorder::new(1);
        while self.shared.ready.try_recv().is_ok() {}
        core.exchange.ring();
        self.live = None;
    }

    /// Moves the place past the batch of `ticket`.
    fn step(&self, ticket: Ticket) {
        let batches = if ticket.epoch == self.first.0 {
            &self.first.1
        } else {
            &self.shared.whole
        };
        self.shared.received(match batches.after(ticket.batch) {
            Some((position, batch)) => Cursor {
                epoch: ticket.epoch,
                position,
                batch,
                steps: 0,
            },
            None => Cursor {
                epoch: ticket.epoch.saturating_add(1),
                ..Cursor::default()
            },
        });
    }

    fn hand_out(&mut self, contents: Contents, now: u64, waited: u64) -> Result<Batch> {
        if let Some(mut error) = contents.take_failure() {
            let bad = contents.take_bad();
            drop(contents);
            // If the list of bad samples is too long, it says more than the first failure.
            error = self.shared.ledger().refuse(&bad).unwrap_or(error);
            if error.kind() == ErrorKind::Cancelled {
                // The caller did not cancel this run: the failure of the loader dropped its rows.
                error = self.shared.runtime.core().trouble().unwrap_or(error);
            }
            let error = self.with_member(error);
            spans::fault(&error, spans::Outcome::Failed);
            self.end();
            return Err(error);
        }
        let bad = contents.take_bad();
        let kept = if bad.is_empty() {
            Ok(())
        } else {
            self.shared.ledger().add(bad)
        };
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

    /// Adds the sample's name in its file to the error. The dataset may have to read for this, so
    /// it is done here, once, and for at most a second.
    fn with_member(&self, error: Error) -> Error {
        let core = self.shared.runtime.core();
        let Some(sample) = error
            .site()
            .sample
            .filter(|_| core.samples.blames_sample(&error))
        else {
            return error;
        };
        let holder = core.clone();
        let field = core.samples.field_of(&error);
        let member = move || match holder.samples.chunk_starts {
            Some(_) => None,
            None => member(&*holder.samples.dataset, sample, field),
        };
        let member = caught(Stage::Read, || {
            within(Duration::from_secs(1), "the dataset", member)
        });
        match member.ok().flatten() {
            Some(member) => error.with_member(member),
            None => error,
        }
    }

    fn note(&mut self, now: u64, waited: u64, contents: Contents) -> Result<Batch> {
        let ticket = contents.ticket();
        let mut batch = Batch::new(contents, self.shared.info.clone())?;
        self.step(ticket);
        let meters = &self.shared.runtime.core().meters;
        if meters.on {
            if self.delivered > 0 {
                if let Some(span) = &self.span {
                    spans::starved(span, self.delivered, Duration::from_nanos(waited));
                }
                meters.consumer.waits.record(waited);
            }
            // Several waits, interrupted by the user's work, are recorded as one wait that ends
            // now.
            batch.record(self.delivered == 0, now.saturating_sub(waited), now);
            meters.consumer.batches.add_alone(1);
            meters.consumer.samples.add_alone(batch.valid() as u64);
            meters.consumer.bytes.add_alone(batch.bytes() as u64);
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
            // Never pending without a limit.
            if let Poll::Ready(next) = self.poll(None) {
                return next;
            }
        }
    }

    /// Exact, unless an error ends the iterator early.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended {
            0
        } else {
            self.total - self.delivered
        };
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
