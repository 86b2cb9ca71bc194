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
//! may still have worked on what was given to it after the drop: an upper bound. Idle time before the drop, between two
//! kernels of a step, is nobody's here.
//!
//! The first step of an iterator does not count: nothing could be ready. A batch that the user binds himself may be bound late,
//! when its copy has long been there: what passed since it was handed out is the host's lateness then.
//!
//! The same events give the track of the stream in a trace. The device's clock is not the host's: `asked` is reached no earlier
//! than it is recorded, and no later than it is seen to be, and what lies between two events is exact; so the track is right in
//! its lengths, and where it stands as soon as the stream has once been idle.
//!
//! Limits: what the user gives to the stream between asking for a batch and having it (between two polls with a limit, or
//! before binding a batch late) is between `asked` and `start`, too, and counts as starvation. One stream, the first one that batches are bound to and that surely lives on: one of the builder's, one that
//! comes with its owner, or the default one. A bare handle that a single batch is bound to may be gone with that batch. A step
//! counts when the stream has come to its `start`. Until then it is either one of those whose copies are not done, which have
//! a slot each, or of those whose memory the stream still uses, which have a buffer each: there is room for so many. Events
//! are made with the loader and used again; none is made for a step.

use super::Stream;
use super::driver::{Event, Gpu, Handle};
use crate::error::Result;
use crate::profile::{Clock, GpuIdle, Ring, Track, Work};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The measurement of a loader. The consumer's threads alone use it; its lock is theirs.
pub(crate) struct IdleMeter {
    gpu: Arc<Gpu>,
    clock: Clock,
    /// What the stream did.
    ring: Ring,
    /// Steps whose `start` has not been reached, at most.
    unread: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The stream that is measured; held, so that it lives.
    stream: Option<Stream>,
    spare: Vec<Event>,
    /// Asked, when by the host's clock, and not yet attached to a batch.
    asked: Option<(Event, u64)>,
    /// When a batch was handed out that no stream waits for yet.
    unbound: Option<Instant>,
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
    /// How long the batch was there and bound to no stream.
    unbound_ns: u64,
}

impl IdleMeter {
    /// Makes the events, for a loader of so many slots and batches on the device together; nothing is measured for none.
    pub(crate) fn new(gpu: &Arc<Gpu>, clock: Clock, unread: usize) -> Result<Self> {
        // Three for each of these steps, and for the one that is being made; and the start of the one that was read last.
        let count = if unread > 0 { 3 * (unread + 1) + 1 } else { 0 };
        let spare = (0..count).map(|_| Event::timed(gpu)).collect::<Result<_>>()?;
        let inner = Mutex::new(Inner { spare, unread: VecDeque::with_capacity(unread), ..Inner::default() });
        Ok(Self { gpu: gpu.clone(), clock, ring: Ring::default(), unread, inner })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `next()` was entered, for the `first` batch of an iterator or another one. Errors are those of a broken device, and say
    /// so elsewhere: then nothing is measured.
    pub(crate) fn asked(&self, first: bool) {
        if self.unread == 0 {
            return;
        }
        let Ok(_bound) = self.gpu.bind() else { return };
        let mut inner = self.lock();
        let Some(stream) = inner.stream.as_ref().map(Stream::raw) else { return };
        let now = self.clock.now();
        inner.read(&self.ring, now);
        let former = inner.asked.take().map(|(event, _)| event);
        inner.spare.extend(former);
        if first {
            // What was between two iterators is nobody's.
            let before = inner.last_released.take();
            let start = inner.last_start.take().map(|(event, _)| event);
            inner.spare.extend(before.into_iter().chain(start));
        } else {
            inner.asked = inner.record(stream).map(|event| (event, now));
        }
    }

    /// A batch is handed out that is bound to no stream.
    pub(crate) fn unbound(&self) {
        self.lock().unbound = Some(Instant::now());
    }

    /// A batch was bound to `stream`, which waits for `copied` now; `lives` says that it does so at least as long as the
    /// loader.
    pub(crate) fn started(&self, stream: &Stream, lives: bool, copied: &Event) {
        let mut inner = self.lock();
        match &inner.stream {
            // The first step of all has no `asked`.
            None if lives || stream.keeps_itself() => inner.stream = Some(stream.clone()),
            Some(measured) if measured.raw() == stream.raw() => {}
            _ => return,
        }
        let stream = stream.raw();
        let (unbound, before) = (inner.unbound.take(), inner.last_released.take());
        let Some((asked, asked_ns)) = inner.asked.take() else { return inner.spare.extend(before) };
        let unbound = unbound.filter(|_| copied.is_done().unwrap_or(false));
        let unbound_ns = unbound.map_or(0, |since| since.elapsed().as_nanos() as u64);
        if inner.unread.len() == self.unread {
            inner.read(&self.ring, self.clock.now());
        }
        let start = if inner.unread.len() < self.unread { inner.record(stream) } else { None };
        match start {
            Some(start) => inner.unread.push_back(Step { before, asked, asked_ns, start, unbound_ns }),
            None => inner.spare.extend(before.into_iter().chain([asked])),
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

    /// Reads the steps whose events have been reached by `now`, oldest first.
    fn read(&mut self, ring: &Ring, now: u64) {
        while let Some(step) = self.unread.front() {
            match step.start.is_done() {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => return self.unread.clear(),
            }
            let Some(Step { before, asked, asked_ns, start, unbound_ns }) = self.unread.pop_front() else { return };
            let former = self.last_start.take();
            if let Ok(idle) = asked.until(&start) {
                let late = before.as_ref().and_then(|before| before.until(&asked).ok()).unwrap_or(0);
                // Of what the stream stood still for, at most: it may have worked meanwhile.
                let unbound = unbound_ns.min(idle);
                self.totals.steps += 1;
                self.totals.starved_ns += idle - unbound;
                self.totals.host_late_ns += late + unbound;
                let before = former.as_ref().and_then(|(event, at)| Some((*at, event.until(&asked).ok()?)));
                let stretches = [late, idle - unbound, unbound];
                let start_ns = place(ring, before, stretches, asked_ns..=now.saturating_sub(idle));
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
/// within `asked`. The stream was idle, perhaps, before that; waited for the batch; and had it, but was not told. When this
/// one started.
fn place(
    ring: &Ring,
    before: Option<(u64, u64)>,
    [late, starved, unbound]: [u64; 3],
    asked: RangeInclusive<u64>,
) -> u64 {
    let (least, most) = asked.into_inner();
    let expected = before.map_or(least, |(start, until)| start.saturating_add(until));
    let asked = expected.clamp(least, most.max(least));
    // The length of the last step is exact, also where it was not known well when it began.
    let began = before.map_or(asked, |(_, until)| asked.saturating_sub(until));
    let (idle, there) = (asked.saturating_sub(late).max(began), asked.saturating_add(starved));
    let start = there.saturating_add(unbound);
    for (begin, end, what) in [
        (began, idle, Work::Step),
        (idle, asked, Work::HostLate),
        (asked, there, Work::Starved),
        (there, start, Work::HostLate),
    ] {
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
        let start = place(&ring, None, [0, 2_000_000, 0], 10_000_000..=90_000_000);
        assert_eq!(start, 12_000_000);
        // Asked for 5 ms after it by the device's clock, at 16 at the earliest by the host's.
        let start = place(&ring, Some((start, 5_000_000)), [1_000_000, 0, 0], 16_000_000..=90_000_000);
        assert_eq!(start, 17_000_000);
        // Seen before it could have been.
        let start = place(&ring, Some((start, 30_000_000)), [0, 3_000_000, 0], 20_000_000..=40_000_000);
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
            place(&ring, before, [u64::MAX; 3], RangeInclusive::new(5, 1));
            place(&ring, before, [0, u64::MAX, 0], u64::MAX..=u64::MAX);
        }
        assert!(ring.read().iter().all(|span| span.begin_ns <= span.end_ns));
    }
}
