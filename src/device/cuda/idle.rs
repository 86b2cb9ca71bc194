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
//! A step is measured on the stream that its batch is bound to first. A stream of the builder's, one that comes with its owner
//! and the default one live on, so `asked` is recorded on them. A bare handle is good until the batch bound to it is dropped:
//! afterwards `asked` is recorded on a stream of our own with nothing else on it, at the device's time of asking, and the idle
//! time counts from `released` where that is later.
//!
//! Limits: what the user gives to the stream between asking for a batch and having it (between two polls with a limit, or
//! before binding a batch late) is between `asked` and `start`, too, and counts as starvation. A batch that is dropped unbound
//! is not measured, and counted. A step counts when the streams have come to its events. Until then it is either one of those
//! whose copies are not done, which have a slot each, or of those whose memory a stream still uses, or that are not bound yet,
//! which have a buffer each: there is room for so many. Events are made with the loader and used again; none is made for a
//! step.

use super::Stream;
use super::driver::{CopyStream, DevicePtr, Event, Gpu, Handle};
use crate::error::Result;
use crate::meter::{Clock, GpuIdle, Ring, Track, Work};
use crate::sync::Hold;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// The measurement of a loader. The consumer's threads alone use it; its lock is theirs. Batches are told apart by where their
/// buffers begin.
pub(crate) struct IdleMeter {
    gpu: Arc<Gpu>,
    clock: Clock,
    /// What the stream did.
    ring: Ring,
    /// Steps whose `start` has not been reached, at most.
    unread: usize,
    /// With nothing on it but marks; none where nothing is measured.
    empty: Option<CopyStream>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    consumer: Consumer,
    spare: Vec<Event>,
    /// `next()` was entered, not for a first batch, and handed out none yet.
    asked: Option<Asked>,
    /// Batches that were handed out and no stream waits for yet.
    handed: Vec<Handed>,
    last_released: Option<Mark>,
    unread: VecDeque<Step>,
    /// The start of the last step that was read, and when that was by the host's clock.
    last_start: Option<(Event, u64)>,
    totals: GpuIdle,
}

/// The stream that a batch was bound to last, as far as it may be used.
#[derive(Default)]
enum Consumer {
    /// There was none, or it may be gone.
    #[default]
    Unknown,
    /// It lives at least as long as the loader, or as this value.
    Lasting(Stream),
    /// It lives until this batch is dropped.
    Until(Handle, DevicePtr),
}

/// An event, and the stream that it was recorded on, which may be gone.
struct Mark {
    event: Event,
    on: Handle,
}

/// The entry into `next()`: its mark, unless the driver refused it, and when that was by the host's clock.
struct Asked {
    mark: Option<Mark>,
    at_ns: u64,
}

/// A batch without a stream.
struct Handed {
    batch: DevicePtr,
    /// None for the first batch of an iterator.
    asked: Option<Asked>,
    /// When it was handed out, if no stream was to be bound to it at once.
    since: Option<Instant>,
}

/// The events of one step.
struct Step {
    before: Option<Mark>,
    asked: Mark,
    asked_ns: u64,
    start: Mark,
    /// How long the batch was there and bound to no stream.
    unbound_ns: u64,
}

impl Step {
    fn is_done(&self) -> Result<bool> {
        // What is before `start` on its stream is reached before it.
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

    /// How long the stream was idle, at most, before the batch was asked for, and how long after that; with the event that
    /// ends the work of the step before.
    fn idle(&self) -> Result<(u64, u64, &Event)> {
        let asked = &self.asked.event;
        let late = self.before.as_ref().map_or(Ok(0), |before| before.event.until(asked))?;
        // On another stream than `asked`, the work of the step before may end later.
        let from = self.before.as_ref().filter(|_| late == 0).map_or(asked, |before| &before.event);
        Ok((late, from.until(&self.start.event)?, from))
    }
}

impl IdleMeter {
    /// Makes the events, for a loader of so many slots and batches on the device together; nothing is measured for none.
    pub(crate) fn new(gpu: &Arc<Gpu>, clock: Clock, unread: usize) -> Result<Self> {
        // Three for each of these steps, and for the one that is being made; and the start of the one that was read last.
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

    /// `next()` was entered, for the `first` batch of an iterator or another one. Errors are those of a broken device, and say
    /// so elsewhere: then nothing is measured.
    pub(crate) fn asked(&self, first: bool) {
        let Some(empty) = &self.empty else { return };
        let Ok(_bound) = self.gpu.bind() else { return };
        let mut inner = self.lock();
        let now = self.clock.now();
        inner.read(&self.ring, now);
        let former = inner.asked.take().and_then(|asked| asked.mark);
        inner.put_back(former);
        if first {
            // What was between two iterators is nobody's.
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

    /// A batch is handed out, perhaps with no stream that is bound to it at once.
    pub(crate) fn handed(&self, batch: DevicePtr, unbound: bool) {
        if self.unread == 0 {
            return;
        }
        let mut inner = self.lock();
        let asked = inner.asked.take();
        inner.handed.push(Handed { batch, asked, since: unbound.then(Instant::now) });
    }

    /// A batch was bound to its first stream, which waits for `copied` now; `lives` says that the stream does so at least as
    /// long as the loader.
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

    /// A batch is dropped; `stream` is the first that it was bound to, which may be gone from here on.
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

    /// When a batch that has no stream yet was asked for, and since when it could have one; nothing for a first batch.
    fn take_handed(&mut self, batch: DevicePtr) -> Option<(Asked, Option<Instant>)> {
        let at = self.handed.iter().position(|handed| handed.batch == batch)?;
        let Handed { asked, since, .. } = self.handed.swap_remove(at);
        Some((asked?, since))
    }

    /// Reads the steps whose events have been reached by `now`, oldest first.
    fn read(&mut self, ring: &Ring, now: u64) {
        while let Some(step) = self.unread.front() {
            match step.is_done() {
                Ok(true) => {}
                Ok(false) => return,
                // It says nothing of any of them, now. Their events are good for others.
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
            // Of what the stream stood still for, at most: it may have worked meanwhile.
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
