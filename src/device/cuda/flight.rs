//! Slots that the device reads, oldest first, with the events of their copies.
//!
//! ```text
//! copy stream ─● queued ─ waits for consumers' streams ─● began ─ copies ─● ended ─ kernels ─● made, copied (the buffer's)
//!                          └── blocked by the consumer ──┘  └─ on the bus ─┘ └─► the slot is free
//! ```
//!
//! Each slot in flight has its own events. A buffer's event would not do: a buffer dropped early gets its next copy
//! while this one runs, and the driver answers only for the last record.
//!
//! The device measures the duration on the bus; the host's clock places it. A copy ends no earlier than it can, and no
//! later than the host sees its end. Between the ends of two copies the device's clock is exact.

use super::driver::{self, Event, Gpu};
use crate::device::{Oldest, OnBus};
use crate::error::Result;
use crate::memory::Filled;
use std::collections::VecDeque;
use std::sync::Arc;

/// The events of one slot in flight.
pub(super) struct Marks {
    /// The copy stream has reached the waits for consumers' streams. Recorded only if there are waits.
    pub(super) queued: Event,
    /// Timed: the waits are over and the copies begin.
    pub(super) began: Event,
    /// Timed: the copies have ended.
    pub(super) ended: Event,
    /// Timed: the operations behind them have ended. `None` without operations.
    pub(super) made: Option<Event>,
}

struct Flying {
    slot: Filled,
    marks: Marks,
    submitted: u64,
    /// The copy has waits for consumers' streams, and the copy stream was not yet seen to reach them.
    waits: bool,
    queued: bool,
    /// Begin of the copies, once seen.
    began: Option<u64>,
}

/// Slots in flight. Belongs to the transfer thread.
pub(super) struct InFlight {
    queue: VecDeque<Flying>,
    spare: Vec<Marks>,
    /// Events of the last ended copy, and its end by the host's clock.
    last: Option<(Marks, u64)>,
}

impl InFlight {
    /// Makes events for `slots` slots, plus one set that stays with the last ended copy.
    pub(super) fn new(gpu: &Arc<Gpu>, slots: usize, ops: bool) -> Result<Self> {
        let timed = || Event::timed(gpu);
        let made = || ops.then(timed).transpose();
        let marks = || Ok(Marks { queued: Event::new(gpu)?, began: timed()?, ended: timed()?, made: made()? });
        let spare = (0..=slots).map(|_| marks()).collect::<Result<_>>()?;
        Ok(Self { queue: VecDeque::with_capacity(slots), spare, last: None })
    }

    /// Events for the next copy; return them by [`push`](Self::push) or [`give_back`](Self::give_back).
    pub(super) fn marks(&mut self) -> Marks {
        self.spare.pop().expect("one set per slot, plus one")
    }

    pub(super) fn give_back(&mut self, marks: Marks) {
        self.spare.push(marks);
    }

    /// Adds a slot with its submitted copy; `waits`: behind waits for consumers' streams.
    pub(super) fn push(&mut self, slot: Filled, marks: Marks, submitted: u64, waits: bool) {
        self.queue.push_back(Flying { slot, marks, submitted, waits, queued: false, began: None });
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Frees the slots of finished copies. Passes each one's time to `done`.
    ///
    /// `now` is 0 if nothing is measured; then there is none.
    pub(super) fn let_go_done(&mut self, now: u64, done: &mut dyn FnMut(Option<OnBus>)) -> Result<()> {
        while let Some(front) = self.queue.front() {
            if !front.marks.ended.is_done()? {
                return Ok(());
            }
            let Some(Flying { slot, marks, submitted, began, .. }) = self.queue.pop_front() else { return Ok(()) };
            drop(slot);
            let Some(bus) = (now > 0).then(|| marks.began.until(&marks.ended).ok()).flatten() else {
                self.spare.push(marks);
                done(None);
                continue;
            };
            let most = now.saturating_sub(bus);
            let begin = began.unwrap_or_else(|| self.place(&marks.began, submitted, most)).min(most);
            let former = self.last.replace((marks, begin + bus));
            // On the same stream, so its operations ended before this copy began.
            let ops = former.as_ref().and_then(|(marks, _)| marks.ended.until(marks.made.as_ref()?).ok());
            done(Some(OnBus { copy: begin..begin + bus, ops_ns: ops.unwrap_or(0) }));
            self.spare.extend(former.map(|(marks, _)| marks));
        }
        Ok(())
    }

    /// State of the oldest copy.
    pub(super) fn oldest(&mut self, now: u64) -> Result<Oldest> {
        let Some(front) = self.queue.front() else { return Ok(Oldest::Nothing) };
        let began = match front.began {
            None if front.marks.began.is_done()? => Some(self.place(&front.marks.began, front.submitted, now)),
            began => began,
        };
        let queued = front.queued || began.is_none() && front.waits && front.marks.queued.is_done()?;
        if let Some(front) = self.queue.front_mut() {
            (front.began, front.queued) = (began, queued);
        }
        Ok(match began {
            None if queued => Oldest::Blocked,
            began => Oldest::Runs(began.unwrap_or(now)),
        })
    }

    /// Host time of `event`, for a copy submitted at `submitted`: at most `most`.
    fn place(&self, event: &Event, submitted: u64, most: u64) -> u64 {
        let expected = |(last, end): &(Marks, u64)| Some(end.saturating_add(last.ended.until(event).ok()?));
        let least = self.last.as_ref().map_or(submitted, |(_, end)| submitted.max(*end));
        self.last.as_ref().and_then(expected).unwrap_or(most).max(least).min(most)
    }

    /// All copies are done, although their events do not show it.
    pub(super) fn clear(&mut self) {
        self.spare.extend(self.queue.drain(..).map(|flying| flying.marks));
    }

    /// The device can no longer tell which slots it reads: leaks them all.
    pub(super) fn leave_all(&mut self) {
        for flying in self.queue.drain(..) {
            driver::note_leak();
            std::mem::forget(flying.slot);
        }
    }
}
