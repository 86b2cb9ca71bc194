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
//! Limits: one stream, the first one that batches are bound to and that surely lives on: one of the builder's, one that
//! comes with its owner, or the default one. A bare handle that a single batch is bound to may be gone with that batch. A step
//! counts when the stream has come to its `start`. Until then it is either one of those whose copies are not done, which have
//! a slot each, or of those whose memory the stream still uses, which have a buffer each: there is room for so many. Events
//! are made with the loader and used again; none is made for a step.

use super::Stream;
use super::driver::{Event, Gpu, Handle};
use crate::error::Result;
use crate::profile::GpuIdle;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The measurement of a loader. The consumer's threads alone use it; its lock is theirs.
pub(crate) struct IdleMeter {
    gpu: Arc<Gpu>,
    /// Steps whose `start` has not been reached, at most.
    unread: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The stream that is measured; held, so that it lives.
    stream: Option<Stream>,
    spare: Vec<Event>,
    /// Asked, and not yet attached to a batch.
    asked: Option<Event>,
    /// When a batch was handed out that no stream waits for yet.
    unbound: Option<Instant>,
    last_released: Option<Event>,
    unread: VecDeque<Step>,
    totals: GpuIdle,
}

/// The events of one step.
struct Step {
    before: Option<Event>,
    asked: Event,
    start: Event,
    /// How long the batch was there and bound to no stream.
    unbound_ns: u64,
}

impl IdleMeter {
    /// Makes the events, for a loader of so many slots and batches on the device together; nothing is measured for none.
    pub(crate) fn new(gpu: &Arc<Gpu>, unread: usize) -> Result<Self> {
        // Three for each of these steps, and for the one that is being made.
        let count = if unread > 0 { 3 * (unread + 1) } else { 0 };
        let spare = (0..count).map(|_| Event::timed(gpu)).collect::<Result<_>>()?;
        let inner = Mutex::new(Inner { spare, unread: VecDeque::with_capacity(unread), ..Inner::default() });
        Ok(Self { gpu: gpu.clone(), unread, inner })
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
        inner.read();
        let former = inner.asked.take();
        inner.spare.extend(former);
        if first {
            // What was between two iterators is nobody's.
            let before = inner.last_released.take();
            inner.spare.extend(before);
        } else {
            inner.asked = inner.record(stream);
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
        let Some(asked) = inner.asked.take() else { return inner.spare.extend(before) };
        let unbound = unbound.filter(|_| copied.is_done().unwrap_or(false));
        let unbound_ns = unbound.map_or(0, |since| since.elapsed().as_nanos() as u64);
        if inner.unread.len() == self.unread {
            inner.read();
        }
        let start = if inner.unread.len() < self.unread { inner.record(stream) } else { None };
        match start {
            Some(start) => inner.unread.push_back(Step { before, asked, start, unbound_ns }),
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
        inner.read();
        inner.totals.clone()
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
    }

    /// Reads the steps whose events have been reached, oldest first.
    fn read(&mut self) {
        while let Some(step) = self.unread.front() {
            match step.start.is_done() {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => return self.unread.clear(),
            }
            if let Ok(idle) = step.asked.until(&step.start) {
                let late = step.before.as_ref().and_then(|before| before.until(&step.asked).ok()).unwrap_or(0);
                // Of what the stream stood still for, at most: it may have worked meanwhile.
                let unbound = step.unbound_ns.min(idle);
                self.totals.steps += 1;
                self.totals.starved_ns += idle - unbound;
                self.totals.host_late_ns += late + unbound;
            }
            self.forget_oldest();
        }
    }
}
