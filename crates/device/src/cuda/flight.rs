//! Slots that the device reads, oldest first, with the events of their copies.
//!
//! ```text
//! copy stream  ─● queued ─ waits for consumers' streams ─● began ─ copies ─● ended ── the next copy
//!                           └── blocked by the consumer ──┘  └─ on the bus ─┘├─► the slot is free
//! made stream  ───────────────────────────────────────────── waits ──────────┴─ operations ─● made, copied (the buffer's)
//! ```
//!
//! Each slot in flight has its own events. A buffer's event would not suffice: a buffer dropped
//! early gets its next copy while this copy runs, and the driver answers only for the last record
//! of an event.
//!
//! The device measures the duration of a copy on the bus; the host's clock gives its position in
//! time. A copy begins no earlier than its submission and the end of the previous copy, and ends no
//! later than the host sees its end. The device's clock gives the exact time between the ends of
//! two copies. Operations on a batch run concurrently with the next copies, one batch after the
//! other. Their time begins at the end of the copy or of the previous operations, whichever is
//! later, and ends at their own end.

use super::driver;
use super::driver::Gpu;
use crate::backend::{Landed, Oldest};
use crate::cuda::driver::Event;
use feedline_base::error::Result;
use feedline_core::memory::Filled;
use std::collections::VecDeque;
use std::sync::Arc;

/// The events of one slot in flight.
pub(super) struct Marks {
    /// Reached when the copy stream arrives at its waits for consumers' streams. Recorded only if
    /// there are such waits.
    pub(super) queued: Event,
    /// Timed. Reached when the waits are over and the copies begin.
    pub(super) began: Event,
    /// Timed. Reached when the copies have ended.
    pub(super) ended: Event,
    /// Timed, on the stream of the operations. Reached when the operations on the batch have ended.
    /// `None` if there are none.
    pub(super) made: Option<Event>,
}

/// Shortest and longest interval between two checks of a copy without a bell, in nanoseconds. The
/// longest is also the interval while the copy is blocked.
const LEAST_NS: u64 = 100_000;
const BLOCKED_NS: u64 = 10_000_000;

struct Flying {
    slot: Filled,
    marks: Marks,
    submitted: u64,
    /// Whether the copy waits for consumers' streams.
    waits: bool,
    /// Whether the bell rings when the copy ends.
    rings: bool,
    queued: bool,
    /// Start of the copies by the host's clock, once seen.
    began: Option<u64>,
}

/// Slots in flight. Belongs to the transfer thread.
pub(super) struct InFlight {
    queue: VecDeque<Flying>,
    spare: Vec<Marks>,
    /// Ended copies, oldest first, with the time of their end by the host's clock. Contains the
    /// last copy, and copies whose operations are not counted yet.
    past: VecDeque<(Marks, u64)>,
    /// The number of entries in `past` whose operations are counted.
    counted: usize,
    /// Duration of the last copy on the bus, in nanoseconds.
    last_ns: Option<u64>,
}

impl InFlight {
    /// Makes a set of events for each of `slots` slots in flight. Ended copies need more sets: one
    /// for the last copy, and one for each of the `operations` batches whose operations may be in
    /// progress.
    pub(super) fn new(gpu: &Arc<Gpu>, slots: usize, operations: usize) -> Result<Self> {
        let timed = || Event::timed(gpu);
        let marks = || {
            Ok(Marks {
                queued: Event::new(gpu)?,
                began: timed()?,
                ended: timed()?,
                made: (operations > 0).then(timed).transpose()?,
            })
        };
        let spare = (0..slots + operations + 1)
            .map(|_| marks())
            .collect::<Result<_>>()?;
        let past = VecDeque::with_capacity(operations + 2);
        Ok(Self {
            queue: VecDeque::with_capacity(slots),
            spare,
            past,
            counted: 0,
            last_ns: None,
        })
    }

    /// Events for the next copy; return them by [`push`](Self::push) or
    /// [`give_back`](Self::give_back).
    pub(super) fn marks(&mut self) -> Marks {
        self.spare
            .pop()
            .expect("one set per slot, and for those whose operations are under way")
    }

    pub(super) fn give_back(&mut self, marks: Marks) {
        self.spare.push(marks);
    }

    /// Adds a slot with its submitted copy. `waits`: the copy waits for consumers' streams.
    /// `rings`: a bell rings at its end.
    pub(super) fn push(
        &mut self,
        slot: Filled,
        marks: Marks,
        submitted: u64,
        waits: bool,
        rings: bool,
    ) {
        self.queue.push_back(Flying {
            slot,
            marks,
            submitted,
            waits,
            rings,
            queued: false,
            began: None,
        });
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Duration of the last copy on the bus, in nanoseconds.
    pub(super) fn last_ns(&self) -> Option<u64> {
        self.last_ns
    }

    /// Nanoseconds until the next check of the oldest copy, if no bell rings at its end. The first
    /// check is at the end expected from the last copy's duration; later checks are increasingly
    /// rare. While the copy waits for a consumer, the interval is [`BLOCKED_NS`].
    pub(super) fn next_look(&self, now: u64) -> Option<u64> {
        let oldest = self.queue.front().filter(|flying| !flying.rings)?;
        let Some((began, lasts)) = oldest.began.zip(self.last_ns) else {
            return Some(BLOCKED_NS);
        };
        // After the expected end, the next check comes after as much time as the copy is late now.
        Some((began + lasts).abs_diff(now).clamp(LEAST_NS, BLOCKED_NS))
    }

    /// Frees the slots of finished copies, and passes all work that has ended to `done`.
    ///
    /// `now` is 0 if nothing is measured; then no time is known.
    pub(super) fn let_go_done(&mut self, now: u64, done: &mut dyn FnMut(Landed)) -> Result<()> {
        while let Some(front) = self.queue.front() {
            if !front.marks.ended.is_done()? {
                break;
            }
            let Some(Flying {
                slot,
                marks,
                submitted,
                began,
                ..
            }) = self.queue.pop_front()
            else {
                break;
            };
            drop(slot);
            let Some(bus) = (now > 0)
                .then(|| marks.began.until(&marks.ended).ok())
                .flatten()
            else {
                self.spare.push(marks);
                done(Landed::Copy(None));
                continue;
            };
            let most = now.saturating_sub(bus);
            let begin = began
                .unwrap_or_else(|| self.place(&marks.began, submitted, most))
                .min(most);
            self.last_ns = Some(bus);
            done(Landed::Copy(Some(begin..begin + bus)));
            self.past.push_back((marks, begin + bus));
            self.count_operations(done)?;
        }
        self.count_operations(done)
    }

    /// Passes the times of ended operations to `done`, and keeps the events of the last copy.
    fn count_operations(&mut self, done: &mut dyn FnMut(Landed)) -> Result<()> {
        while let Some((marks, _)) = self.past.get(self.counted) {
            if let Some(made) = &marks.made {
                if !made.is_done()? {
                    return Ok(());
                }
                let mut ns = marks.ended.until(made)?;
                let before = self
                    .counted
                    .checked_sub(1)
                    .and_then(|before| self.past[before].0.made.as_ref());
                if let Some(before) = before {
                    ns = ns.min(before.until(made)?);
                }
                done(Landed::Operations(ns));
            }
            self.counted += 1;
            while self.counted > 1 {
                self.spare
                    .extend(self.past.pop_front().map(|(marks, _)| marks));
                self.counted -= 1;
            }
        }
        Ok(())
    }

    /// State of the oldest copy.
    pub(super) fn oldest(&mut self, now: u64) -> Result<Oldest> {
        let Some(front) = self.queue.front() else {
            return Ok(Oldest::Nothing);
        };
        let began = match front.began {
            None if front.marks.began.is_done()? => {
                Some(self.place(&front.marks.began, front.submitted, now))
            }
            began => began,
        };
        let queued =
            front.queued || began.is_none() && front.waits && front.marks.queued.is_done()?;
        if let Some(front) = self.queue.front_mut() {
            front.began = began;
            front.queued = queued;
        }
        Ok(match began {
            None if queued => Oldest::Blocked,
            began => Oldest::Runs(began.unwrap_or(now)),
        })
    }

    /// Host time of `event`, for a copy submitted at `submitted`: at most `most`.
    fn place(&self, event: &Event, submitted: u64, most: u64) -> u64 {
        let least = self
            .past
            .back()
            .map_or(submitted, |(_, end)| submitted.max(*end));
        self.past
            .back()
            .and_then(|(last, end)| Some(end.saturating_add(last.ended.until(event).ok()?)))
            .unwrap_or(most)
            .max(least)
            .min(most)
    }

    /// Forgets all copies and operations: they are done, although their events do not show it.
    pub(super) fn clear(&mut self) {
        self.spare
            .extend(self.queue.drain(..).map(|flying| flying.marks));
        self.spare
            .extend(self.past.drain(..).map(|(marks, _)| marks));
        self.counted = 0;
    }

    /// Leaks all slots in flight, because the device can no longer report which of them it reads.
    pub(super) fn leave_all(&mut self) {
        for flying in self.queue.drain(..) {
            driver::note_leak();
            std::mem::forget(flying.slot);
        }
    }
}
