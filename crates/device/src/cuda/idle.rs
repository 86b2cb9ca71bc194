//! Idle time of the consumer's stream, from events on it. The consumer records them and the
//! transfer thread reads them once they are reached. No thread waits.
//!
//! ```text
//! consumer's stream ── step k-1 ──● marked(k-1) ······· ● asked(k) ····· ● start(k) ── step k ──● marked(k)
//!                                  \__ host late ______/ \_ starvation _/
//! an empty stream                                        ● now(k)
//! ```
//!
//! `asked` is recorded on entry to `next()`. `now` is recorded at the same moment, on a stream
//! without work: it gives the device's time of the request. `start` follows the stream's wait for
//! the copy of the returned batch. `marked` follows the work of a step, if the program marks it.
//! `released` follows the drop of a batch, which may come in the middle of its step, or after the
//! next request (Python's `for`).
//!
//! * **Starvation**: from `asked` to `start` the stream only waits. Exact. The work of the previous
//!   step may end after the request, on another stream; then starvation begins at that end.
//! * **Host late**: if `asked` is not later than `now`, the stream had run dry at the request, and
//!   the host was late from the end of the stream's work. Only a mark shows that end: a drop may
//!   come before most of the work, or long after a synchronisation. So the lateness is exact with a
//!   mark after the last work of the step, and unknown without one. If work ends after the request,
//!   the lateness is exactly 0. The number of dry requests is exact.
//! * Work between the first mark and the last mark, or the drop, counts if the stream was still
//!   busy at that later point.
//! * A batch may be bound long after its copy. From its delivery or the end of its copy, whichever
//!   is later, until its binding, the host is late.
//! * **Pause**: an evaluation or a checkpoint between two steps is not a step. A step is a pause if
//!   its time without starvation is at least [`PAUSE_TIMES`] times the median and at least
//!   [`PAUSE_LEAST_NS`]. Pauses are only counted.
//! * **Span**: from the first `start` of an iterator to its last, by the device's clock, without
//!   pauses. The shares above are relative to the span.
//!
//! The first batch of an iterator only begins the span, because nothing could be ready.
//!
//! The same events give the stream's track in a trace: `now` relates the device's clock to the
//! host's at each step.
//!
//! A step is measured on the first stream that takes its batch. The builder's streams, streams that
//! come with their owner, and the default stream stay alive, so `asked` is recorded on them. A bare
//! handle is valid until the drop of the batch bound to it. After the drop, `asked` is `now`, and
//! idle time counts from `released` or `marked` if that is later.
//!
//! Limits:
//! * Two events recorded at the same moment on an idle device can be [`JITTER_NS`] apart, so work
//!   that ends within this time after the request counts as done before it.
//! * Idle time before the drop, between two kernels of a step, is not attributed here.
//! * Work enqueued between requesting a batch and receiving it (between two polls with a limit, or
//!   before a late binding) falls between `asked` and `start`, and counts as starvation.
//! * A batch that no stream takes is only counted, not measured.
//! * Events are shared by the steps, the buffers and the copies that need them. `build` makes as
//!   many as are in use at once with one stream; each further stream adds its own.

use super::driver::{Gpu, Handle};
use crate::Stream;
use crate::backend::DevicePtr;
use crate::cuda::driver::{CopyStream, Event};
use feedline_base::error::Result;
use feedline_base::meter::Clock;
use feedline_base::sync::Hold;
use feedline_report::meter::{GpuIdle, Ring, Track, Work};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// See the limits above. This is more than the time between two marks, even where streams are
/// threads that a busy machine must wake. If it were too small, a dry stream would count as busy,
/// and the host's whole lateness would be lost. The opposite mistake occurs only if work ends
/// within this interval.
const JITTER_NS: u64 = 100_000;

/// A pause takes at least this many times the median of the steps before it, and at least this
/// long. Shorter delays count as the program's own.
const PAUSE_TIMES: u64 = 20;
const PAUSE_LEAST_NS: u64 = 1_000_000_000;

/// The idle measurement of a loader. A batch is identified by its buffer's address.
pub struct IdleMeter {
    gpu: Arc<Gpu>,
    clock: Clock,
    /// The spans of the stream's activity, for traces.
    ring: Ring,
    /// A stream without work, on which `now` is recorded; `None` if nothing is measured.
    empty: Option<CopyStream>,
    /// Locked for each event, by the consumer's threads and the transfer thread, which both take
    /// free events and give them back.
    events: Mutex<Events>,
    /// Locked only by the consumer's threads, because a driver call under this lock may wait for
    /// room in a full launch queue.
    consumer: Mutex<IdleConsumer>,
    /// Steps that could not be measured.
    no_stream: AtomicU64,
    no_event: AtomicU64,
    /// Steps whose events may not be reached yet, oldest first.
    steps: Mutex<VecDeque<IdleStep>>,
    /// Locked by the transfer thread and by a report. It may lock `steps`, nothing else.
    reader: Mutex<IdleReader>,
}

/// All events of the loader. An event is free if this list holds the only reference to it.
struct Events {
    all: Vec<Arc<Event>>,
    next: usize,
    timed: bool,
}

impl Events {
    fn take(&mut self, gpu: &Arc<Gpu>) -> Result<Arc<Event>> {
        for _ in 0..self.all.len() {
            self.next = (self.next + 1) % self.all.len();
            if Arc::strong_count(&self.all[self.next]) == 1 {
                return Ok(self.all[self.next].clone());
            }
        }
        let new = Self::make(gpu, self.timed)?;
        self.all.push(new.clone());
        Ok(new)
    }

    fn make(gpu: &Arc<Gpu>, timed: bool) -> Result<Arc<Event>> {
        Ok(Arc::new(if timed {
            Event::timed(gpu)?
        } else {
            Event::new(gpu)?
        }))
    }
}

#[derive(Default)]
struct IdleConsumer {
    stream: On,
    /// An entry into `next()` that has not returned a batch yet.
    asked: Option<Request>,
    /// Delivered batches that no stream has taken yet.
    handed: Vec<Handed>,
    last_released: Option<Mark>,
    marks: Marks,
}

/// The first and the last mark since the last `start`.
#[derive(Default)]
struct Marks {
    first: Option<Mark>,
    last: Option<Mark>,
}

impl Marks {
    fn iter(&self) -> impl Iterator<Item = &Mark> {
        self.first.iter().chain(&self.last)
    }
}

/// The stream of the last batch, if it may still be used.
#[derive(Default)]
enum On {
    /// There is no stream yet, or it may have been destroyed.
    #[default]
    Unknown,
    /// The stream lives at least as long as the loader, or as this value.
    Lasting(Stream),
    /// The stream lives until this batch is dropped.
    Until(Handle, DevicePtr),
}

/// An event, with its stream, which may be destroyed, and the host's time of recording it.
struct Mark {
    event: Arc<Event>,
    on: Handle,
    at_ns: u64,
}

/// Entry into `next()`.
enum Request {
    /// For the first batch of an iterator.
    First,
    Later(Asked),
    /// The driver refused to record an event for the request.
    Refused,
}

struct Asked {
    mark: Mark,
    now: Mark,
}

/// A delivered batch that no stream has taken yet.
struct Handed {
    batch: DevicePtr,
    asked: Option<Request>,
    /// Delivery time, if no stream was bound at delivery.
    since: Option<u64>,
}

/// The events of one step.
struct IdleStep {
    /// `None` for the first batch of an iterator.
    asked: Option<Asked>,
    /// The last drop, and the marks since the start of the previous step.
    released: Option<Mark>,
    marks: Marks,
    start: Mark,
    /// The batch's copy, and the time from its delivery to the first binding.
    copied: Arc<Event>,
    unbound_ns: u64,
}

/// The idle time of a step, in nanoseconds by the device's clock.
struct Idle {
    /// Idle time before the request; `None` if the end of the work is not known.
    late: Option<u64>,
    starved: u64,
    unbound: u64,
    dry: bool,
    /// Time from the request to `start`.
    until_start: u64,
}

#[derive(Default)]
struct IdleReader {
    /// The `start` of the last step.
    last_start: Option<Arc<Event>>,
    recent: Recent,
    totals: GpuIdle,
}

/// Durations of the last steps without their starvation, to tell a pause from a step.
#[derive(Default)]
struct Recent {
    steps: VecDeque<u64>,
    /// Number of consecutive pauses.
    pauses: usize,
}

impl Recent {
    const MOST: usize = 64;
    const LEAST: usize = 8;
    /// After more consecutive pauses than this, pauses count as steps, because the program's steps
    /// have become longer.
    const PAUSES: usize = 3;

    /// Whether a step is a pause. If not, notes its duration.
    fn is_pause(&mut self, step_ns: u64) -> bool {
        if step_ns >= PAUSE_LEAST_NS && self.steps.len() >= Self::LEAST {
            let mut sorted: Vec<u64> = self.steps.iter().copied().collect();
            let middle = sorted.len() / 2;
            let (_, median, _) = sorted.select_nth_unstable(middle);
            if step_ns >= median.saturating_mul(PAUSE_TIMES) {
                self.pauses += 1;
                if self.pauses <= Self::PAUSES {
                    return true;
                }
                self.steps.clear();
            }
        }
        self.pauses = 0;
        if self.steps.len() == Self::MOST {
            self.steps.pop_front();
        }
        self.steps.push_back(step_ns);
        false
    }
}

impl IdleMeter {
    /// Makes the events for `slots` slots and `batches` device batches; measures nothing unless
    /// `measured`.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        clock: Clock,
        slots: usize,
        batches: usize,
        measured: bool,
    ) -> Result<Self> {
        // Events of each buffer: its copy and its release. Events of each step: asked, now, start,
        // two marks, and the copy and the release that its buffer has given up. A step is unread
        // while its copy is in flight and has a slot, while its buffer is in use, or since the last
        // reading, which each copy makes. One more step is in progress. In addition: the last
        // start, the last release and the last two marks; the last operations on each of two
        // staging areas.
        let count = 2 * batches
            + 2
            + if measured {
                7 * (slots + 2 * batches + 1) + 4
            } else {
                0
            };
        let all = (0..count)
            .map(|_| Events::make(gpu, measured))
            .collect::<Result<_>>()?;
        let empty = measured.then(|| CopyStream::preferred(gpu)).transpose()?;
        let consumer = IdleConsumer {
            handed: Vec::with_capacity(batches),
            ..IdleConsumer::default()
        };
        Ok(Self {
            gpu: gpu.clone(),
            clock,
            ring: Ring::default(),
            empty,
            events: Mutex::new(Events {
                all,
                next: 0,
                timed: measured,
            }),
            consumer: Mutex::new(consumer),
            no_stream: AtomicU64::new(0),
            no_event: AtomicU64::new(0),
            steps: Mutex::new(VecDeque::with_capacity(slots + 2 * batches + 2)),
            reader: Mutex::default(),
        })
    }

    /// An event that nobody else uses. Timed if steps are measured.
    pub(super) fn event(&self) -> Result<Arc<Event>> {
        self.events.hold().take(&self.gpu)
    }

    fn record(&self, stream: Handle) -> Result<Mark> {
        let event = self.event()?;
        let at_ns = self.clock.now();
        event.record(stream)?;
        Ok(Mark {
            event,
            on: stream,
            at_ns,
        })
    }

    /// Notes an entry into `next()`, for the `first` batch of an iterator or a later one.
    /// `checked`: the builder's streams were just found not to be capturing a graph.
    ///
    /// Errors mean a broken device, which is reported elsewhere; then nothing is measured.
    pub fn asked(&self, first: bool, checked: bool) {
        let Some(empty) = &self.empty else { return };
        let mut consumer = self.consumer.hold();
        if first {
            // The time between two iterators counts for neither the host nor the loader.
            consumer.last_released = None;
            consumer.marks = Marks::default();
            consumer.asked = Some(Request::First);
            return;
        }
        let stream = consumer.stream.raw();
        let marks = || {
            let mark = stream.map(|stream| {
                if !checked {
                    self.gpu.check_uncaptured(stream)?;
                }
                self.record(stream)
            });
            let mark = mark.transpose()?;
            let now = self.record(empty.raw())?;
            let same = Mark {
                event: now.event.clone(),
                ..now
            };
            Ok(Asked {
                mark: mark.unwrap_or(same),
                now,
            })
        };
        let marks: Result<Asked> = marks();
        consumer.asked = Some(marks.map_or(Request::Refused, Request::Later));
    }

    /// Notes that the program has enqueued all work of its step, on `stream` or else on the stream
    /// that took the last batch.
    ///
    /// Nothing is marked while the stream captures a graph. Other errors mean a broken device,
    /// which is reported elsewhere.
    pub fn mark(&self, stream: Option<&Stream>) {
        if self.empty.is_none() {
            return;
        }
        let mut consumer = self.consumer.hold();
        let Some(stream) = stream.map(Stream::raw).or(consumer.stream.raw()) else {
            return;
        };
        let Ok(_bound) = self.gpu.enter() else { return };
        if self.gpu.check_uncaptured(stream).is_err() {
            return;
        }
        let Ok(mark) = self.record(stream) else {
            return;
        };
        match consumer.marks.first {
            None => consumer.marks.first = Some(mark),
            Some(_) => consumer.marks.last = Some(mark),
        }
    }

    /// Notes the delivery of a batch. `unbound`: no stream has taken it so far.
    pub(crate) fn handed(&self, batch: DevicePtr, unbound: bool) {
        if self.empty.is_none() {
            return;
        }
        let mut consumer = self.consumer.hold();
        let asked = consumer.asked.take();
        consumer.handed.push(Handed {
            batch,
            asked,
            since: unbound.then(|| self.clock.now()),
        });
    }

    /// Notes that the first stream took a batch, and now waits for `copied`. `lives`: the stream
    /// outlives the loader.
    pub(crate) fn started(
        &self,
        batch: DevicePtr,
        stream: &Stream,
        lives: bool,
        copied: &Arc<Event>,
    ) {
        if self.empty.is_none() {
            return;
        }
        let mut consumer = self.consumer.hold();
        let lasts = lives || stream.keeps_itself();
        consumer.stream = if lasts {
            On::Lasting(stream.clone())
        } else {
            On::Until(stream.raw(), batch)
        };
        let (asked, since) = match consumer.take_handed(batch) {
            Some((Request::Later(asked), since)) => (Some(asked), since),
            Some((Request::First, _)) => (None, None),
            Some((Request::Refused, _)) => {
                self.no_event.fetch_add(1, Ordering::Relaxed);
                return;
            }
            None => return,
        };
        let unbound_ns = since.map_or(0, |since| self.clock.now().saturating_sub(since));
        let Ok(start) = self.record(stream.raw()) else {
            self.no_event
                .fetch_add(u64::from(asked.is_some()), Ordering::Relaxed);
            return;
        };
        let released = consumer.last_released.take().filter(|_| asked.is_some());
        let marks = std::mem::take(&mut consumer.marks);
        let step = IdleStep {
            asked,
            released,
            marks,
            start,
            copied: copied.clone(),
            unbound_ns,
        };
        self.steps.hold().push_back(step);
    }

    /// Notes the drop of a batch; `mark` was recorded after its work. The mark's stream may be
    /// destroyed from now on.
    pub(super) fn released(&self, batch: DevicePtr, mark: Option<(Arc<Event>, Handle)>) {
        if self.empty.is_none() {
            return;
        }
        let mut consumer = self.consumer.hold();
        if matches!(
            consumer.take_handed(batch),
            Some((Request::Later(_) | Request::Refused, _))
        ) {
            self.no_stream.fetch_add(1, Ordering::Relaxed);
        }
        if let Some((event, on)) = mark {
            consumer.last_released = Some(Mark {
                event,
                on,
                at_ns: self.clock.now(),
            });
        }
        if matches!(consumer.stream, On::Until(_, last) if last == batch) {
            consumer.stream = On::Unknown;
        }
    }

    /// Reads the steps whose events are reached, oldest first. For threads that may call the driver
    /// in the relaxed mode.
    pub(super) fn read(&self) {
        if self.empty.is_none() {
            return;
        }
        let mut reader = self.reader.hold();
        loop {
            let Some(step) = self.steps.hold().pop_front() else {
                return;
            };
            match step.is_done() {
                Ok(true) => reader.take(step, &self.ring),
                Ok(false) => return self.steps.hold().push_front(step),
                // After such an error the driver cannot report the times of any of these steps.
                Err(_) => {
                    let mut others = self.steps.hold();
                    let lost = std::iter::once(step).chain(others.drain(..));
                    reader.totals.unmeasured.no_event +=
                        lost.filter(|step| step.asked.is_some()).count() as u64;
                    return;
                }
            }
        }
    }

    /// Totals so far.
    pub fn totals(&self) -> GpuIdle {
        let _bound = self.gpu.bind();
        self.read();
        let mut totals = self.reader.hold().totals.clone();
        totals.unmeasured.no_event += self.no_event.load(Ordering::Relaxed);
        totals.unmeasured.no_stream += self.no_stream.load(Ordering::Relaxed);
        totals
    }

    /// Recent activity of the stream.
    pub fn track(&self) -> Track {
        self.totals();
        Track::new("stream of the consumer", self.ring.read())
    }
}

impl On {
    /// The stream, if it may be used.
    fn raw(&self) -> Option<Handle> {
        match self {
            On::Unknown => None,
            On::Lasting(stream) => Some(stream.raw()),
            On::Until(stream, _) => Some(*stream),
        }
    }
}

impl IdleConsumer {
    /// The request for a batch without a stream, and its delivery time.
    fn take_handed(&mut self, batch: DevicePtr) -> Option<(Request, Option<u64>)> {
        let at = self
            .handed
            .iter()
            .position(|handed| handed.batch == batch)?;
        let Handed { asked, since, .. } = self.handed.swap_remove(at);
        Some((asked?, since))
    }
}

impl IdleStep {
    fn is_done(&self) -> Result<bool> {
        // Earlier events on `start`'s stream are reached before it.
        let ends = self.released.iter().chain(self.marks.iter());
        let marks = ends.chain(self.asked.iter().map(|asked| &asked.mark));
        let others = marks
            .filter(|mark| mark.on != self.start.on)
            .map(|mark| &mark.event);
        let now = self.asked.iter().map(|asked| &asked.now.event);
        for event in [&self.start.event].into_iter().chain(now).chain(others) {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn idle(&self, asked: &Asked) -> Result<Idle> {
        let start = &self.start.event;
        let request = &asked.mark.event;
        let until_start = asked.now.event.until(start)?;
        // The work of the step may end after the request, on another stream.
        let mut from = request;
        let mut ends_later = 0;
        for end in self.released.iter().chain(self.marks.iter()) {
            let later = request.until(&end.event)?;
            if later > ends_later {
                from = &end.event;
                ends_later = later;
            }
        }
        let dry = ends_later == 0 && asked.now.event.until(request)? <= JITTER_NS;
        let late = if dry { self.late(asked)? } else { Some(0) };
        let idle = from.until(start)?;
        let unbound = if self.unbound_ns == 0 {
            0
        } else {
            self.unbound_ns.min(self.copied.until(start)?).min(idle)
        };
        Ok(Idle {
            late,
            starved: idle - unbound,
            unbound,
            dry,
            until_start,
        })
    }

    /// For a stream that had run dry at the request: nanoseconds from the end of its work to the
    /// request. `None` without a mark.
    fn late(&self, asked: &Asked) -> Result<Option<u64>> {
        let Some(first) = &self.marks.first else {
            return Ok(None);
        };
        let mut late = first.event.until(&asked.mark.event)?;
        // A later mark or drop shows the end of more work, unless the stream had already run dry.
        for end in self.marks.last.iter().chain(&self.released) {
            let reached_ns = asked
                .now
                .at_ns
                .saturating_sub(end.event.until(&asked.now.event)?);
            if reached_ns > end.at_ns.saturating_add(JITTER_NS) {
                late = late.min(end.event.until(&asked.mark.event)?);
            }
        }
        Ok(Some(late))
    }
}

impl IdleReader {
    fn take(&mut self, step: IdleStep, ring: &Ring) {
        let before = self.last_start.replace(step.start.event.clone());
        // The first step only begins the span.
        let Some(asked) = &step.asked else { return };
        let idle = step.idle(asked);
        let span = before.map_or(Ok(0), |before| before.until(&step.start.event));
        let (Ok(idle), Ok(span)) = (idle, span) else {
            self.totals.unmeasured.no_event += 1;
            return;
        };
        let totals = &mut self.totals;
        if self.recent.is_pause(span.saturating_sub(idle.starved)) {
            totals.unmeasured.pauses += 1;
            return;
        }
        totals.steps += 1;
        totals.span_ns += span;
        totals.starved_ns += idle.starved;
        totals.late_ns += idle.late.unwrap_or(0) + idle.unbound;
        totals.dry_steps += u64::from(idle.dry);
        totals.unmarked_steps += u64::from(idle.late.is_none());
        idle.draw(ring, asked.now.at_ns.saturating_add(idle.until_start), span);
    }
}

impl Idle {
    /// Draws the step on the track: the last step's work, possible idleness before the request, the
    /// wait for the batch, the time until the batch was bound.
    fn draw(&self, ring: &Ring, start: u64, span: u64) {
        let bound = start.saturating_sub(self.unbound);
        let asked = bound.saturating_sub(self.starved);
        let idle = asked.saturating_sub(self.late.unwrap_or(0));
        let spans = [
            (start.saturating_sub(span), idle, Work::Step),
            (idle, asked, Work::HostLate),
            (asked, bound, Work::Starved),
            (bound, start, Work::HostLate),
        ];
        for (begin, end, what) in spans {
            let begin = begin.max(ring.end());
            if begin < end {
                ring.note(begin, end, what);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::simulated::Simulated;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// When a batch is dropped. `Behind`: right after the step's work. `Before`: before other work
    /// of the step. `Held`: when the next batch has arrived. `HeldSynced`: likewise, and the host
    /// waits for the work of each step. `LateSynced`: late, after such a wait.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Drops {
        Behind,
        Before,
        Held,
        HeldSynced,
        LateSynced,
    }

    /// How the meter learns of the stream.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Told {
        /// The stream outlives the loader.
        lives: bool,
        /// Batches are bound by hand, late.
        by_hand: bool,
        /// The end of each step is marked.
        marks: bool,
    }

    /// A step, in units of 200 µs: the host waits for the batch, its copy ends later, it is bound
    /// later still; the host launches work, is busy, and launches more; then it does something
    /// else.
    type Times = [u64; 7];

    /// The true values of a consumer's steps, computed from the script.
    #[derive(Debug, Default, PartialEq)]
    struct Truth {
        steps: u64,
        span_ns: u64,
        starved_ns: u64,
        /// Idle time before the request, and until the batch was bound.
        late_ns: u64,
        unbound_ns: u64,
        dry_steps: u64,
    }

    fn play(
        steps: &[Times],
        drops: Drops,
        Told {
            lives,
            by_hand,
            marks,
        }: Told,
    ) -> (Truth, GpuIdle) {
        let now = Arc::new(AtomicU64::new(1_000_000));
        let (simulated, gpu) = Simulated::new(now.clone(), |_| 0);
        let meter = IdleMeter::new(&gpu, Clock::shown(now.clone()), 2, 2, true).unwrap();
        let stream = Stream::promised(simulated.stream());
        let copies = simulated.stream();
        let pass = |units: u64| now.fetch_add(units * 200_000, Ordering::AcqRel);
        let at = || now.load(Ordering::Acquire);
        let drop = |batch: u64| {
            let event = meter.event().unwrap();
            event.record(stream.raw()).unwrap();
            meter.released(batch, Some((event, stream.raw())));
        };
        let _bound = gpu.enter().unwrap();
        let mut truth = Truth::default();
        let mut end = 0;
        let mut first_start = 0;
        for (number, [wait, copy, bind, launch, pause, more, own]) in
            steps.iter().copied().enumerate()
        {
            let batch = number as u64 + 1;
            let asked = at();
            meter.asked(number == 0, lives);
            pass(wait);
            let copied = meter.event().unwrap();
            let copied_at = simulated.launch(copies, copy * 200_000);
            copied.record(copies).unwrap();
            meter.handed(batch, by_hand);
            let bind = if by_hand { bind } else { 0 };
            pass(bind);
            gpu.stream_waits(stream.raw(), &copied).unwrap();
            meter.started(batch, &stream, lives, &copied);
            let start = at().max(copied_at).max(end);
            if number == 0 {
                first_start = start;
            } else {
                // The stream is idle from the request, or from a later end of the work, to the
                // start. While the batch has arrived and is not bound, the host is the cause.
                let idle = start - asked.max(end);
                let unbound = (bind * 200_000)
                    .min(start.saturating_sub(copied_at))
                    .min(idle);
                truth.steps += 1;
                truth.starved_ns += idle - unbound;
                truth.late_ns += asked.saturating_sub(end);
                truth.unbound_ns += unbound;
                truth.dry_steps += u64::from(end <= asked);
                truth.span_ns = start - first_start;
            }
            if matches!(drops, Drops::Held | Drops::HeldSynced) && number > 0 {
                drop(batch - 1);
            }
            let mut run = |units: u64| {
                if units > 0 {
                    end = simulated.launch(stream.raw(), units * 200_000);
                }
            };
            run(launch + 1);
            if marks {
                // Before some of the work: the last mark counts.
                meter.mark(Some(&stream));
            }
            pass(pause);
            if drops == Drops::Before {
                drop(batch);
            }
            run(more);
            if marks {
                meter.mark(Some(&stream));
            }
            if drops == Drops::Behind {
                drop(batch);
            }
            if matches!(drops, Drops::HeldSynced | Drops::LateSynced) {
                now.fetch_max(end, Ordering::AcqRel);
            }
            pass(own);
            if drops == Drops::LateSynced {
                drop(batch);
            }
            meter.read();
        }
        pass(1_000_000);
        (truth, meter.totals())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        #[test]
        fn the_idle_time_of_any_schedule_is_the_scripts(
            steps in prop::collection::vec(prop::array::uniform7(0_u64..40), 2..30),
            drops in prop::sample::select(vec![
                Drops::Behind, Drops::Before, Drops::Held, Drops::HeldSynced, Drops::LateSynced,
            ]),
            (lives, by_hand) in prop::sample::select(vec![(true, false), (false, false), (false, true)]),
            marks: bool,
        ) {
            let (truth, found) = play(&steps, drops, Told { lives, by_hand, marks });
            // Event times have single precision.
            let near = |found: u64, truth: u64| found.abs_diff(truth) <= 100 * truth.div_ceil(1_000_000).max(steps.len() as u64);
            prop_assert_eq!((found.steps, found.unmeasured), (truth.steps, Default::default()));
            prop_assert!(near(found.span_ns, truth.span_ns), "{truth:?} {found:?}");
            // A bare handle is not used after its batch, so work after the drop is not seen without
            // a mark.
            let seen = lives || marks || drops != Drops::Before;
            if seen {
                prop_assert!(near(found.starved_ns, truth.starved_ns), "{truth:?} {found:?}");
                prop_assert_eq!(found.dry_steps, truth.dry_steps, "{:?} {:?}", truth, found);
            }
            prop_assert_eq!(found.unmarked_steps, if marks { 0 } else { found.dry_steps });
            let known = truth.unbound_ns + if marks { truth.late_ns } else { 0 };
            prop_assert!(!seen || near(found.late_ns, known), "{truth:?} {found:?}");
        }
    }

    #[test]
    fn lateness_in_synchronised_steps_is_exact_with_marks_and_else_unknown() {
        // The copy takes no time. Each step has 36 + 1 units of work; the host waits for it, and
        // then does 3 units of its own work.
        let steps = [[0, 0, 0, 36, 0, 0, 3]; 201];
        let told = |marks| Told {
            lives: true,
            by_hand: false,
            marks,
        };
        let (truth, marked) = play(&steps, Drops::HeldSynced, told(true));
        let share = |ns: u64| ns as f64 / marked.span_ns as f64;
        assert_eq!(truth.dry_steps, 200);
        assert!(
            (share(marked.host_late_ns().unwrap()) - 0.075).abs() < 0.001,
            "{marked:?}"
        );
        let (_, unmarked) = play(&steps, Drops::HeldSynced, told(false));
        assert_eq!((unmarked.host_late_ns(), unmarked.dry_steps), (None, 200));
    }

    #[test]
    fn an_evaluation_between_two_steps_is_a_pause() {
        let mut steps = vec![[1, 2, 0, 10, 0, 0, 1]; 20];
        let told = Told {
            lives: true,
            by_hand: false,
            marks: true,
        };
        let (_, usual) = play(&steps, Drops::Held, told);
        // 10 s of the host's own time. Below, an equally long wait for a batch, which is not a
        // pause.
        steps[12][6] = 50_000;
        let (_, paused) = play(&steps, Drops::Held, told);
        assert_eq!(
            (paused.unmeasured.pauses, paused.steps + 1),
            (1, usual.steps)
        );
        assert!(
            paused.span_ns < usual.span_ns && paused.late_ns <= usual.late_ns,
            "{paused:?}"
        );
        // Steps of a new length count as pauses only at first.
        let mut longer = vec![[1, 2, 0, 10, 0, 0, 1]; 20];
        longer.extend([[1, 2, 0, 20_000, 0, 0, 1]; 20]);
        let (_, adapted) = play(&longer, Drops::Held, told);
        assert_eq!((adapted.unmeasured.pauses, adapted.steps), (3, 36));
        steps[12][6] = 1;
        steps[12][0] = 50_000;
        let (_, starved) = play(&steps, Drops::Held, told);
        assert_eq!((starved.unmeasured.pauses, starved.steps), (0, usual.steps));
    }

    #[test]
    fn a_step_is_drawn_behind_the_last_one() {
        let ring = Ring::default();
        let step = |late, starved, unbound| Idle {
            late: Some(late),
            starved,
            unbound,
            dry: false,
            until_start: 0,
        };
        step(0, 2_000_000, 0).draw(&ring, 12_000_000, 0);
        step(1_000_000, 0, 0).draw(&ring, 17_000_000, 5_000_000);
        step(0, 3_000_000, 1_000_000).draw(&ring, 43_000_000, 26_000_000);
        let spans: Vec<_> = ring
            .read()
            .iter()
            .map(|span| (span.what, span.begin_ns / 1000, span.end_ns / 1000))
            .collect();
        use Work::{HostLate, Starved, Step};
        let expected = [
            (Starved, 10_000, 12_000),
            (Step, 12_000, 16_000),
            (HostLate, 16_000, 17_000),
            (Step, 17_000, 39_000),
            (Starved, 39_000, 42_000),
            (HostLate, 42_000, 43_000),
        ];
        assert_eq!(spans, expected);
        // Absurd times.
        step(u64::MAX, u64::MAX, u64::MAX).draw(&ring, 5, u64::MAX);
        step(0, u64::MAX, 0).draw(&ring, u64::MAX, 0);
        assert!(ring.read().iter().all(|span| span.begin_ns <= span.end_ns));
    }
}
