//! How long the consumer's stream had nothing to do: by events on it, read when they have been reached. The CPU never waits.
//!
//! ```text
//! stream  ── step k-1's work ──● released(k-1)   ● asked(k)      ● start(k) ── step k's work ──● released(k)
//!                               \\_ host late _/  \\_ starvation _/
//! ```
//!
//! `asked` is recorded when `next()` is entered, `start` right after the stream's wait for the copy of the batch that it
//! returns, `released` when that batch is dropped. What lies between `asked` and `start` on the stream is nothing but the
//! wait: starvation, exact. From the last `released` to `asked` the stream may have been idle because the host was late, or
//! may still have worked on what was given to it after the drop: an upper bound.
//!
//! The same events give the track of the stream in a trace. The device's clock is not the host's: `asked` is reached no earlier
//! than it is recorded, and no later than it is seen to be, and what lies between two events is exact; so the track is right in
//! its lengths, and where it stands as soon as the stream has once been idle.
//!
//! Limits: one stream, the first one that batches are bound to and that surely lives on: one of the builder's, one that
//! comes with its owner, or the default one. A bare handle that a single batch is bound to may be gone with that batch. At most [`UNREAD`] steps wait for being read; the oldest is
//! given up beyond, and not counted as measured. Events are made with the loader and used again; none is made for a step.

use super::Stream;
use super::driver::{Event, Gpu, Handle};
use crate::error::Result;
use crate::profile::{Clock, GpuIdle, Ring, Track, Work};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Steps whose events have not been reached.
const UNREAD: usize = 16;
/// Events: three for each of these steps, and for the one that is being made; and the start of the step before them.
const EVENTS: usize = 3 * (UNREAD + 1) + 1;

/// The measurement of a loader. The consumer's threads alone use it; its lock is theirs.
pub(crate) struct IdleMeter {
    gpu: Arc<Gpu>,
    clock: Clock,
    /// What the stream did.
    ring: Ring,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The stream that is measured; held, so that it lives.
    stream: Option<Stream>,
    spare: Vec<Event>,
    /// Asked, when by the host's clock, and not yet attached to a batch.
    asked: Option<(Event, u64)>,
    last_released: Option<Event>,
    unread: VecDeque<Step>,
    /// The start of the last step that was read, and when that was by the host's clock.
    last_start: Option<(Event, u64)>,
    totals: GpuIdle,
}

/// The events of one step.
struct Step {
    before: Option<Event>,
    asked: Event,
    asked_ns: u64,
    start: Event,
}

impl IdleMeter {
    /// Makes the events.
    pub(crate) fn new(gpu: &Arc<Gpu>, clock: Clock) -> Result<Self> {
        let spare = (0..EVENTS).map(|_| Event::timed(gpu)).collect::<Result<_>>()?;
        let inner = Mutex::new(Inner { spare, ..Inner::default() });
        Ok(Self { gpu: gpu.clone(), clock, ring: Ring::default(), inner })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `next()` was entered. Errors are those of a broken device, and say so elsewhere: then nothing is measured.
    pub(crate) fn asked(&self) {
        let Ok(_bound) = self.gpu.bind() else { return };
        let mut inner = self.lock();
        let Some(stream) = inner.stream.as_ref().map(Stream::raw) else { return };
        let now = self.clock.now();
        inner.read(&self.ring, now);
        let former = inner.asked.take().map(|(event, _)| event);
        inner.spare.extend(former);
        inner.asked = inner.record(stream).map(|event| (event, now));
    }

    /// A batch was bound to `stream`, which waits for its copy now; `lives` says that it does so at least as long as the
    /// loader.
    pub(crate) fn started(&self, stream: &Stream, lives: bool) {
        let mut inner = self.lock();
        match &inner.stream {
            // The first step of all has no `asked`.
            None if lives || stream.keeps_itself() => inner.stream = Some(stream.clone()),
            Some(measured) if measured.raw() == stream.raw() => {}
            _ => return,
        }
        let stream = stream.raw();
        let Some((asked, asked_ns)) = inner.asked.take() else { return };
        if let Some(start) = inner.record(stream) {
            let before = inner.last_released.take();
            inner.unread.push_back(Step { before, asked, asked_ns, start });
            if inner.unread.len() > UNREAD {
                inner.forget_oldest();
            }
        }
    }

    /// A batch that was bound to `stream` is dropped.
    pub(crate) fn released(&self, stream: Handle) {
        let mut inner = self.lock();
        if inner.stream.as_ref().map(Stream::raw) != Some(stream) {
            return;
        }
        let former = inner.last_released.take();
        inner.spare.extend(former);
        inner.last_released = inner.record(stream);
    }

    /// What was measured so far.
    pub(crate) fn totals(&self) -> GpuIdle {
        let _bound = self.gpu.bind();
        let mut inner = self.lock();
        inner.read(&self.ring, self.clock.now());
        inner.totals.clone()
    }

    /// What the stream did last.
    pub(crate) fn track(&self) -> Track {
        self.totals();
        Track::new("stream of the consumer", self.ring.read())
    }
}

impl Inner {
    /// Marks where the stream is; nothing without an event to spare, or on a broken device.
    fn record(&mut self, stream: Handle) -> Option<Event> {
        let event = self.spare.pop()?;
        match event.record(stream) {
            Ok(()) => Some(event),
            Err(_) => {
                self.spare.push(event);
                None
            }
        }
    }

    fn forget_oldest(&mut self) {
        if let Some(Step { before, asked, start, .. }) = self.unread.pop_front() {
            self.spare.extend([asked, start]);
            self.spare.extend(before);
        }
        // What follows cannot be placed behind a step that was not read.
        self.spare.extend(self.last_start.take().map(|(event, _)| event));
    }

    /// Reads the steps whose events have been reached by `now`, oldest first.
    fn read(&mut self, ring: &Ring, now: u64) {
        while let Some(step) = self.unread.front() {
            match step.start.is_done() {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => return self.unread.clear(),
            }
            let Some(Step { before, asked, asked_ns, start }) = self.unread.pop_front() else { return };
            let former = self.last_start.take();
            if let Ok(starved) = asked.until(&start) {
                let late = before.as_ref().and_then(|before| before.until(&asked).ok()).unwrap_or(0);
                self.totals.steps += 1;
                self.totals.starved_ns += starved;
                self.totals.host_late_ns += late;
                let before = former.as_ref().and_then(|(event, at)| Some((*at, event.until(&asked).ok()?)));
                let start_ns = place(ring, before, (late, starved), asked_ns..=now.saturating_sub(starved));
                self.last_start = Some((start, start_ns));
            } else {
                self.spare.push(start);
            }
            self.spare.push(asked);
            self.spare.extend(former.map(|(event, _)| event));
            self.spare.extend(before);
        }
    }
}

/// Puts a step on the track: `before` is when the last one started and how long before this one was asked for, which was
/// within `asked`. When this one started.
fn place(ring: &Ring, before: Option<(u64, u64)>, (late, starved): (u64, u64), asked: RangeInclusive<u64>) -> u64 {
    let (least, most) = asked.into_inner();
    let expected = before.map_or(least, |(start, until)| start.saturating_add(until));
    let asked = expected.clamp(least, most.max(least));
    // The length of the last step is exact, also where it was not known well when it began.
    let began = before.map_or(asked, |(_, until)| asked.saturating_sub(until));
    let (idle, start) = (asked.saturating_sub(late).max(began), asked.saturating_add(starved));
    for (begin, end, what) in [(began, idle, Work::Step), (idle, asked, Work::HostLate), (asked, start, Work::Starved)]
    {
        if begin < end {
            ring.note(begin.max(ring.end()), end, what);
        }
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_stand_on_the_track_with_their_lengths_where_both_clocks_allow() {
        let ring = Ring::default();
        // The first one is where it was asked for, the stream being idle.
        let start = place(&ring, None, (0, 2_000_000), 10_000_000..=90_000_000);
        assert_eq!(start, 12_000_000);
        // Asked for 5 ms after it by the device's clock, at 16 at the earliest by the host's.
        let start = place(&ring, Some((start, 5_000_000)), (1_000_000, 0), 16_000_000..=90_000_000);
        assert_eq!(start, 17_000_000);
        // Seen before it could have been.
        let start = place(&ring, Some((start, 30_000_000)), (0, 3_000_000), 20_000_000..=40_000_000);
        assert_eq!(start, 43_000_000);
        let spans: Vec<_> =
            ring.read().iter().map(|span| (span.what, span.begin_ns / 1000, span.end_ns / 1000)).collect();
        use Work::{HostLate, Starved, Step};
        let expected = [
            (Starved, 10_000, 12_000),
            (Step, 12_000, 16_000),
            (HostLate, 16_000, 17_000),
            (Step, 17_000, 40_000),
            (Starved, 40_000, 43_000),
        ];
        assert_eq!(spans, expected);
    }

    #[test]
    fn absurd_times_do_no_harm() {
        let ring = Ring::default();
        for before in [None, Some((u64::MAX, u64::MAX)), Some((0, u64::MAX))] {
            place(&ring, before, (u64::MAX, u64::MAX), 5..=1);
            place(&ring, before, (0, u64::MAX), u64::MAX..=u64::MAX);
        }
        assert!(ring.read().iter().all(|span| span.begin_ns <= span.end_ns));
    }
}
