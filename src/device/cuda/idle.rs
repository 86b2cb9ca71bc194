//! Idle time of the consumer's stream, from events on it, read after they are reached. The CPU never waits.
//!
//! ```text
//! stream  ── step k-1's work ──● released(k-1)   ● asked(k)      ● start(k) ── step k's work ──● released(k)
//!                               \\_ host late _/  \\_ starvation _/
//! ```
//!
//! `asked` is recorded on entry to `next()`; `start` right after the stream's wait for the copy of the returned batch;
//! `released` at the drop of that batch. Between `asked` and `start` the stream only waits: starvation, exact. From the
//! last `released` to `asked` the stream was idle because the host was late, or it still ran work enqueued after the
//! drop: an upper bound. Idle time before the drop, between two kernels of a step, is not attributed here.
//!
//! The first step of an iterator does not count, because nothing could be ready. The user may bind a batch long after
//! its copy: then the time since its delivery counts as the host's lateness.
//!
//! The same events give the stream's track in a trace. The device's clock differs from the host's. `asked` is reached
//! no earlier than it is recorded, and no later than it is seen; intervals between two events are exact. So lengths on
//! the track are right, and positions are right as soon as the stream has been idle once.
//!
//! A step is measured on the first stream that its batch is bound to. The builder's streams, streams that come with
//! their owner, and the default stream stay alive, so `asked` is recorded on them. A bare handle is valid until the
//! drop of the batch bound to it. After that, `asked` is recorded on an empty stream of our own, at the device's time
//! of asking, and idle time counts from `released` if that is later.
//!
//! Limits:
//! * Work enqueued between asking for a batch and having it (between two polls with a limit, or before a late binding)
//!   falls between `asked` and `start`, and counts as starvation.
//! * A batch dropped unbound is not measured, only counted.
//! * A step counts once the streams have reached its events. Until then its copy is in flight, and it has a slot; or a
//!   stream still uses its memory, or it is not bound yet, and it has a buffer. So there is room for that many steps.
//! * Events are made with the loader and reused; a step makes none.

use super::Stream;
use super::driver::{CopyStream, DevicePtr, Event, Gpu, Handle};
use crate::error::Result;
use crate::meter::{Clock, GpuIdle, Ring, Track, Work};
use crate::sync::Hold;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// The idle measurement of a loader. Used, and locked, only by the consumer's threads. A batch is identified by its
/// buffer's address.
pub(crate) struct IdleMeter {
    gpu: Arc<Gpu>,
    clock: Clock,
    /// The stream's activity.
    ring: Ring,
    /// Maximum steps with an unreached `start`.
    unread: usize,
    /// An empty stream for marks; `None` if nothing is measured.
    empty: Option<CopyStream>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    consumer: Consumer,
    spare: Vec<Event>,
    /// An entry into `next()`, not for a first batch, that has not returned a batch yet.
    asked: Option<Asked>,
    /// Delivered batches without a waiting stream.
    handed: Vec<Handed>,
    last_released: Option<Mark>,
    unread: VecDeque<Step>,
    /// The `start` of the last step read, and its host time.
    last_start: Option<(Event, u64)>,
    totals: GpuIdle,
}

/// The stream of the last batch, as far as it may be used.
#[derive(Default)]
enum Consumer {
    /// None yet, or possibly destroyed.
    #[default]
    Unknown,
    /// Lives at least as long as the loader, or as this value.
    Lasting(Stream),
    /// Lives until the drop of this batch.
    Until(Handle, DevicePtr),
}

/// An event, with its stream, which may be destroyed.
struct Mark {
    event: Event,
    on: Handle,
}

/// Entry into `next()`: its mark, unless the driver refused it, and its host time.
struct Asked {
    mark: Option<Mark>,
    at_ns: u64,
}

/// A batch without a stream.
struct Handed {
    batch: DevicePtr,
    /// `None` for the first batch of an iterator.
    asked: Option<Asked>,
    /// Delivery time, if no stream was bound at delivery.
    since: Option<Instant>,
}

/// The events of one step.
struct Step {
    before: Option<Mark>,
    asked: Mark,
    asked_ns: u64,
    start: Mark,
    /// Time from delivery to the first binding.
    unbound_ns: u64,
}

impl Step {
    fn is_done(&self) -> Result<bool> {
        // Earlier events on `start`'s stream are reached before it.
        let elsewhere = self.before.iter().chain([&self.asked]).filter(|mark| mark.on != self.start.on);
        for mark in [&self.start].into_iter().chain(elsewhere) {
            if !mark.event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn into_events(self) -> impl Iterator<Item = Event> {
        self.before.into_iter().chain([self.asked, self.start]).map(|mark| mark.event)
    }

    /// Idle time before the request (an upper bound) and after it, with the event that ends the previous step's work.
    fn idle(&self) -> Result<(u64, u64, &Event)> {
        let asked = &self.asked.event;
        let late = self.before.as_ref().map_or(Ok(0), |before| before.event.until(asked))?;
        // On a stream other than `asked`'s, the previous step's work may end later.
        let from = self.before.as_ref().filter(|_| late == 0).map_or(asked, |before| &before.event);
        Ok((late, from.until(&self.start.event)?, from))
    }
}

impl IdleMeter {
    /// Makes the events for `unread` steps: slots plus device batches. With 0, measures nothing.
    pub(crate) fn new(gpu: &Arc<Gpu>, clock: Clock, unread: usize) -> Result<Self> {
        // Three per unread step and for the step in the making, and the `start` of the last step read.
        let count = if unread > 0 { 3 * (unread + 1) + 1 } else { 0 };
        let spare = (0..count).map(|_| Event::timed(gpu)).collect::<Result<_>>()?;
        let empty = (unread > 0).then(|| CopyStream::new(gpu)).transpose()?;
        let (handed, steps) = (Vec::with_capacity(unread), VecDeque::with_capacity(unread));
        let inner = Mutex::new(Inner { spare, handed, unread: steps, ..Inner::default() });
        Ok(Self { gpu: gpu.clone(), clock, ring: Ring::default(), unread, empty, inner })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.hold()
    }

    /// Entry into `next()`, for the `first` batch of an iterator or a later one.
    ///
    /// Errors mean a broken device, which is reported elsewhere; then nothing is measured.
    pub(crate) fn asked(&self, first: bool) {
        let Some(empty) = &self.empty else { return };
        let Ok(_bound) = self.gpu.bind() else { return };
        let mut inner = self.lock();
        let now = self.clock.now();
        inner.read(&self.ring, now);
        let former = inner.asked.take().and_then(|asked| asked.mark);
        inner.put_back(former);
        if first {
            // Time between two iterators is not attributed.
            let before = inner.last_released.take();
            inner.put_back(before);
            let start = inner.last_start.take().map(|(event, _)| event);
            inner.spare.extend(start);
        } else {
            let stream = match &inner.consumer {
                Consumer::Unknown => empty.raw(),
                Consumer::Lasting(stream) => stream.raw(),
                Consumer::Until(stream, _) => *stream,
            };
            inner.asked = Some(Asked { mark: inner.record(stream), at_ns: now });
        }
    }

    /// A batch is delivered; `unbound`: without a stream so far.
    pub(crate) fn handed(&self, batch: DevicePtr, unbound: bool) {
        if self.unread == 0 {
            return;
        }
        let mut inner = self.lock();
        let asked = inner.asked.take();
        inner.handed.push(Handed { batch, asked, since: unbound.then(Instant::now) });
    }

    /// A batch was bound to its first stream, which now waits for `copied`. `lives`: the stream outlives the loader.
    pub(crate) fn started(&self, batch: DevicePtr, stream: &Stream, lives: bool, copied: &Event) {
        if self.unread == 0 {
            return;
        }
        let mut inner = self.lock();
        let lasts = lives || stream.keeps_itself();
        inner.consumer = if lasts { Consumer::Lasting(stream.clone()) } else { Consumer::Until(stream.raw(), batch) };
        let before = inner.last_released.take();
        let Some((Asked { mark, at_ns }, since)) = inner.take_handed(batch) else { return inner.put_back(before) };
        let since = since.filter(|_| copied.is_done().unwrap_or(false));
        let unbound_ns = since.map_or(0, |since| since.elapsed().as_nanos() as u64);
        if inner.unread.len() == self.unread {
            inner.read(&self.ring, self.clock.now());
        }
        let room = mark.is_some() && inner.unread.len() < self.unread;
        let start = if room { inner.record(stream.raw()) } else { None };
        match (mark, start) {
            (Some(asked), Some(start)) => {
                inner.unread.push_back(Step { before, asked, asked_ns: at_ns, start, unbound_ns });
            }
            (mark, _) => {
                inner.put_back(before);
                inner.put_back(mark);
                inner.totals.unmeasured.no_event += 1;
            }
        }
    }

    /// A batch is dropped. `stream`, its first binding, may be destroyed from here on.
    pub(crate) fn released(&self, batch: DevicePtr, stream: Option<Handle>) {
        if self.unread == 0 {
            return;
        }
        let mut inner = self.lock();
        if let Some((asked, _)) = inner.take_handed(batch) {
            inner.put_back(asked.mark);
            inner.totals.unmeasured.no_stream += 1;
        }
        let Some(stream) = stream else { return };
        let former = inner.last_released.take();
        inner.put_back(former);
        inner.last_released = inner.record(stream);
        if matches!(inner.consumer, Consumer::Until(_, last) if last == batch) {
            inner.consumer = Consumer::Unknown;
        }
    }

    /// Totals so far.
    pub(crate) fn totals(&self) -> GpuIdle {
        let _bound = self.gpu.bind();
        let mut inner = self.lock();
        inner.read(&self.ring, self.clock.now());
        inner.totals.clone()
    }

    /// Recent activity of the stream.
    pub(crate) fn track(&self) -> Track {
        self.totals();
        Track::new("stream of the consumer", self.ring.read())
    }
}

impl Inner {
    /// Marks the stream's present point; `None` without a spare event, or on a broken device.
    fn record(&mut self, stream: Handle) -> Option<Mark> {
        let event = self.spare.pop()?;
        match event.mark(stream) {
            Ok(()) => Some(Mark { event, on: stream }),
            Err(_) => {
                self.spare.push(event);
                None
            }
        }
    }

    fn put_back(&mut self, mark: Option<Mark>) {
        self.spare.extend(mark.map(|mark| mark.event));
    }

    /// The request for a batch without a stream, and its delivery time; `None` for a first batch.
    fn take_handed(&mut self, batch: DevicePtr) -> Option<(Asked, Option<Instant>)> {
        let at = self.handed.iter().position(|handed| handed.batch == batch)?;
        let Handed { asked, since, .. } = self.handed.swap_remove(at);
        Some((asked?, since))
    }

    /// Reads the steps with events reached by `now`, oldest first.
    fn read(&mut self, ring: &Ring, now: u64) {
        while let Some(step) = self.unread.front() {
            match step.is_done() {
                Ok(true) => {}
                Ok(false) => return,
                // The driver answers for none of these steps now. Their events are reusable.
                Err(_) => {
                    self.totals.unmeasured.no_event += self.unread.len() as u64;
                    return self.spare.extend(self.unread.drain(..).flat_map(Step::into_events));
                }
            }
            let Some(step) = self.unread.pop_front() else { return };
            let Ok((late, idle, from)) = step.idle() else {
                self.totals.unmeasured.no_event += 1;
                self.spare.extend(step.into_events());
                continue;
            };
            // Limited to the stream's idle time, because the stream may have worked meanwhile.
            let unbound = step.unbound_ns.min(idle);
            self.totals.steps += 1;
            self.totals.starved_ns += idle - unbound;
            self.totals.host_late_ns += late + unbound;
            let before = self.last_start.as_ref().and_then(|(event, at)| Some((*at, event.until(from).ok()?)));
            let start_ns =
                place(ring, before, [late, idle - unbound, unbound], step.asked_ns..=now.saturating_sub(idle));
            let former = self.last_start.replace((step.start.event, start_ns));
            self.spare.extend(former.map(|(event, _)| event));
            self.put_back(step.before);
            self.spare.push(step.asked.event);
        }
    }
}

/// Draws a step on the track; returns its start.
///
/// `before`: the start of the last step, and the time from there to this request, which was within `asked`. The track
/// shows possible idleness before the request, the wait for the batch, and the time until the batch was bound.
fn place(
    ring: &Ring,
    before: Option<(u64, u64)>,
    [late, starved, unbound]: [u64; 3],
    asked: RangeInclusive<u64>,
) -> u64 {
    let (least, most) = asked.into_inner();
    let expected = before.map_or(least, |(start, until)| start.saturating_add(until));
    let asked = expected.clamp(least, most.max(least));
    // The last step's length is exact, even if its start was not.
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
    fn track_places_steps_within_both_clocks() {
        let ring = Ring::default();
        // The stream is idle, so the first step stands at its request.
        let start = place(&ring, None, [0, 2_000_000, 0], 10_000_000..=90_000_000);
        assert_eq!(start, 12_000_000);
        // Requested 5 ms later by the device's clock; at 16 ms at the earliest by the host's.
        let start = place(&ring, Some((start, 5_000_000)), [1_000_000, 0, 0], 16_000_000..=90_000_000);
        assert_eq!(start, 17_000_000);
        // Seen before it was possible.
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
    fn track_survives_absurd_times() {
        let ring = Ring::default();
        for before in [None, Some((u64::MAX, u64::MAX)), Some((0, u64::MAX))] {
            place(&ring, before, [u64::MAX; 3], RangeInclusive::new(5, 1));
            place(&ring, before, [0, u64::MAX, 0], u64::MAX..=u64::MAX);
        }
        assert!(ring.read().iter().all(|span| span.begin_ns <= span.end_ns));
    }
}
