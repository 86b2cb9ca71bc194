//! The transfer thread: copies full slots, in order, onto the device.
//!
//! ```text
//! full slots ──► order restored ──► a free buffer? ──► direct reads ──► copy ──► ready ─► Epoch::next
//!                     ▲                  ▲             (if any)          └──► in flight ──its copy ended──► free slot
//!                 the next one       dropped batches
//! ```
//!
//! Only this thread takes buffers, in the order of the batches. So the oldest batch that was not
//! delivered gets the next free buffer, and no later batch holds a buffer that an earlier one
//! needs. If the consumer holds every buffer, `next()` reports that.
//!
//! The thread never waits for the device. It queues copies while there are full slots and free
//! buffers. While slots are short, a bell rings after each copy. Otherwise the thread checks at the
//! time when the copy should have ended, because a bell is a host function, and the driver may run
//! it after the program's own host functions. A broken context rings no bell, so the thread also
//! polls at intervals.

use super::Core;
use super::direct::{DirectReads, Reading};
use super::watchdog::Doing;
use crate::batch::{Contents, Reorder};
use crossbeam_channel::{Receiver, Select, Sender};
use feedline_base::error::Result;
use feedline_core::memory::{Filled, Pool, Unused};
use feedline_device::backend::{Backend, Copied, Landed, Oldest};
use feedline_device::{Buffer, Copier};
use feedline_report::meter::{Copying, Work};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum time between polls: a broken context rings no bell.
const LOOK: Duration = Duration::from_millis(250);

/// Time between polls of direct reads while the loader ends.
const AGAIN: Duration = Duration::from_millis(1);

/// The state of the transfer thread.
pub(crate) struct Transfer {
    pub(crate) core: Arc<Core>,
    pub(crate) copier: Copier,
    /// For fields that are read directly from storage into the device.
    pub(crate) reads: Option<DirectReads>,
    /// Full slots of the current run, in any order.
    pub(crate) full: Receiver<Filled>,
    /// Rings after the end of a copy, a read or a run.
    pub(crate) bell: Receiver<()>,
    pub(crate) ready: Sender<Contents>,
    /// Maximum number of slots.
    pub(crate) slots: usize,
    /// Some slot could not be pinned.
    pub(crate) pageable: bool,
}

/// The channels that the transfer thread waits on, for tests in virtual time.
#[cfg(test)]
#[derive(Default)]
pub(crate) struct Dozing(std::sync::Mutex<Option<Doors>>);

#[cfg(test)]
type Doors = (
    Receiver<()>,
    Receiver<Filled>,
    Option<Receiver<Box<Buffer>>>,
);

#[cfg(test)]
impl Dozing {
    fn begin(
        &self,
        bell: &Receiver<()>,
        full: &Receiver<Filled>,
        free: Option<&Receiver<Box<Buffer>>>,
    ) {
        *self.0.lock().unwrap() = Some((bell.clone(), full.clone(), free.cloned()));
    }

    fn end(&self) {
        *self.0.lock().unwrap() = None;
    }

    /// Whether the thread waits and its channels are empty.
    pub(crate) fn is_asleep(&self) -> bool {
        let waits = self.0.lock().unwrap();
        waits.as_ref().is_some_and(|(bell, full, free)| {
            bell.is_empty() && full.is_empty() && free.as_ref().is_none_or(Receiver::is_empty)
        })
    }
}

/// Full slots of a run that arrived before their turn.
struct WaitingSlots {
    generation: u64,
    reorder: Reorder<Filled>,
    /// The next slot in order.
    next: Option<Filled>,
}

impl WaitingSlots {
    fn new(generation: u64, slots: usize) -> Self {
        Self {
            generation,
            reorder: Reorder::new(slots),
            next: None,
        }
    }
}

/// A batch with a buffer that is not copied yet.
struct Flight {
    slot: Filled,
    /// `None` for a failed slot, which only waits for its turn.
    buffer: Option<Box<Buffer>>,
    /// The batch's direct reads, once its buffer is idle.
    reading: Option<Arc<Reading>>,
}

/// The state of the copies that was last reported to the meters and to the watchdog.
#[derive(Default)]
struct Said {
    /// Start of the meters' state.
    since: u64,
    doing: Option<Doing>,
    /// Copies on the stream and rows being read, at that time.
    before: (usize, u64),
}

impl Transfer {
    /// Pins the slots one by one and copies until the loader ends; the first copies do not wait
    /// until the last slots are pinned.
    pub(crate) fn run(mut self, backend: &dyn Backend, pool: Pool, pinning: Sender<Infallible>) {
        let mut start = Some((pool, pinning));
        backend.within(&mut || {
            if let Some((pool, pinning)) = start.take() {
                self.copy_all(pool, pinning);
            }
        });
    }

    /// Pins a slot and puts it into use.
    fn pin(&mut self, slot: Unused) {
        if !self.core.to_io.is_ending() {
            self.core.watch.device.begin(Doing::Copying, None);
            match self.copier.pin(slot.region()) {
                Ok(()) => self.core.meters.copy.pinned_slots.add(1),
                Err(error) => {
                    self.core.meters.copy.note_pageable(&error);
                    self.pageable = true;
                }
            }
            self.core.watch.device.end();
        }
        slot.announce();
    }

    fn copy_all(&mut self, pool: Pool, pinning: Sender<Infallible>) {
        let core = self.core.clone();
        let mut slots = pool.into_unused();
        let mut pinning = Some(pinning);
        let mut said = Said::default();
        let mut waiting = WaitingSlots::new(0, self.slots);
        let mut flights = Flights(VecDeque::with_capacity(self.slots));
        let bell = self.bell.clone();
        let full = self.full.clone();
        let free = self.copier.free.clone();
        // The events to wait for: one set if the device has room, another if it has none.
        let mut roomy = Select::new();
        let mut short = Select::new();
        for select in [&mut roomy, &mut short] {
            select.recv(&bell);
            select.recv(&full);
        }
        short.recv(&free);
        while !core.to_io.is_ending() {
            self.forget_old(&mut waiting);
            while let Ok(slot) = self.full.try_recv() {
                self.take(&mut waiting, slot);
            }
            if matches!(said.doing, None | Some(Doing::Blocked)) {
                // Driver calls may never return, so the watchdog must see them.
                core.watch.device.begin(Doing::Copying, None);
                said.doing = None;
            }
            let room = self.begin_all(&mut waiting, &mut flights.0);
            let read = flights
                .0
                .iter_mut()
                .try_for_each(|flight| self.read(flight));
            let landed = self.land_all(&mut flights.0);
            if let Err(error) = read.and(landed).and(self.look(&mut said, &flights, room)) {
                core.fail(error);
            }
            if let Some(slot) = slots.next() {
                self.pin(slot);
                // `pin` ended the watchdog's activity, so copies in flight are reported anew.
                said.doing = None;
                continue;
            }
            drop(pinning.take());
            #[cfg(test)]
            core.dozing.begin(&bell, &full, (!room).then_some(&free));
            // This call receives nothing: items stay in their channel until this thread runs again.
            let look = self
                .copier
                .next_look(core.meters.clock.now())
                .unwrap_or(LOOK);
            let _ = if room { &mut roomy } else { &mut short }.ready_timeout(look);
            #[cfg(test)]
            core.dozing.end();
            let _ = self.bell.try_recv();
        }
        // The idle reading threads end here.
        drop(self.reads.take());
    }

    /// Releases the slots whose copies are done, and reports the progress of copies to the meters
    /// and to the watchdog.
    fn look(&mut self, said: &mut Said, flights: &Flights, room: bool) -> Result<()> {
        let meters = &self.core.meters;
        let mut landed = false;
        let copies = &meters.copy;
        let now = meters.clock.now();
        let mut enter = |state: Copying, at: u64| {
            // Time that was already reported does not change.
            said.since = said.since.max(at);
            copies.states.enter(state, said.since);
        };
        let gone = self.copier.let_go_done(now, &mut |done| match done {
            Landed::Operations(ns) => copies.ops_ns.add_alone(ns),
            Landed::Copy(None) => landed = true,
            Landed::Copy(Some(copy)) => {
                landed = true;
                enter(Copying::Busy, copy.start);
                copies.bus_ns.add_alone(copy.end - copy.start);
                copies.latency.record(copy.end - copy.start);
                if let Some(ring) = &meters.rings.copies {
                    ring.note(copy.start.max(ring.end()), copy.end, Work::Copy);
                }
            }
        });
        let oldest = gone.and_then(|()| self.copier.oldest(now));
        let doing = match (&oldest, flights.0.front()) {
            (Ok(Oldest::Blocked), _) => Some(Doing::Blocked),
            (Ok(Oldest::Runs(_)), _) => Some(Doing::Copying),
            (
                _,
                Some(Flight {
                    reading: None,
                    buffer: Some(buffer),
                    ..
                }),
            ) if self.copier.awaits_consumer(buffer) => Some(Doing::Blocked),
            (_, Some(_)) if self.reads.is_some() => Some(Doing::ReadingDirectly),
            (_, Some(_)) => Some(Doing::Copying),
            (_, None) => None,
        };
        match (&oldest, doing) {
            (Ok(Oldest::Runs(since)), _) => enter(Copying::Busy, *since),
            (_, Some(Doing::Blocked)) => enter(Copying::Blocked, now),
            _ if !room => enter(Copying::Blocked, now),
            _ => enter(Copying::Starved, now),
        }
        let now = (self.copier.in_flight(), flights.rows_left());
        let moved = landed || now != said.before || doing != said.doing;
        said.doing = doing;
        said.before = now;
        match doing {
            Some(doing) if moved => self.core.watch.device.begin(doing, None),
            Some(_) => {}
            None => self.core.watch.device.end(),
        }
        oldest.map(|_| ())
    }

    /// Gives buffers to slots while the next slot is available and a buffer is free. Returns false
    /// if a slot waits for a buffer.
    fn begin_all(&mut self, waiting: &mut WaitingSlots, flights: &mut VecDeque<Flight>) -> bool {
        loop {
            let Some(slot) = waiting.next.take().or_else(|| waiting.reorder.take()) else {
                return true;
            };
            let buffer = if slot.failed() {
                None
            } else {
                self.copier.take()
            };
            if buffer.is_none() && !slot.failed() {
                waiting.next = Some(slot);
                return false;
            }
            let flight = Flight {
                slot,
                buffer,
                reading: None,
            };
            // Without direct reads there is nothing to wait for. But the driver would wait for the
            // buffer's last user on this thread before it copies pageable memory.
            if self.reads.is_none() && !self.pageable {
                self.land(flight)
            } else {
                flights.push_back(flight)
            }
        }
    }

    /// Starts a batch's direct reads once its buffer is idle.
    fn read(&self, flight: &mut Flight) -> Result<()> {
        let (Some(reads), Some(buffer), None) = (&self.reads, &mut flight.buffer, &flight.reading)
        else {
            return Ok(());
        };
        if self.is_present(&flight.slot) && self.copier.is_idle(buffer)? {
            flight.reading = Some(reads.read(flight.slot.ids(), buffer.base()));
        }
        Ok(())
    }

    /// Copies and delivers the oldest batches whose reads are done.
    fn land_all(&mut self, flights: &mut VecDeque<Flight>) -> Result<()> {
        while let Some(flight) = flights.front_mut() {
            let present = self.is_present(&flight.slot);
            let reading = flight.reading.as_ref();
            if let (false, Some(reading)) = (present, reading) {
                reading.cancelled.store(true, Ordering::Relaxed);
            }
            let done = match (reading, &mut flight.buffer) {
                (Some(reading), _) => reading.is_done(),
                (None, Some(buffer)) if present => {
                    self.reads.is_none() && self.copier.is_idle(buffer)?
                }
                _ => true,
            };
            if !done {
                return Ok(());
            }
            if let Some(flight) = flights.pop_front() {
                self.land(flight);
            }
        }
        Ok(())
    }

    /// Copies and delivers a batch. A failed batch, or one of an older run, returns its buffer.
    fn land(&mut self, flight: Flight) {
        let Flight {
            mut slot,
            buffer,
            reading,
        } = flight;
        let failure = reading.as_ref().and_then(|reading| reading.take_failure());
        if reading.as_ref().is_some_and(|reading| reading.is_lost()) {
            // The device does not answer, and no later event will report that the buffer is idle.
            buffer.into_iter().for_each(|buffer| buffer.leak());
            return failure.into_iter().for_each(|error| self.core.fail(error));
        }
        if !self.is_present(&slot) || failure.is_some() {
            buffer
                .into_iter()
                .for_each(|buffer| self.copier.give_back(buffer));
            if let Some(error) = failure.filter(|_| self.is_present(&slot)) {
                slot.note_failure(error);
                self.hand_out(Contents::Host(slot));
            }
            return;
        }
        let Some(buffer) = buffer else {
            return self.hand_out(Contents::Host(slot));
        };
        if let (Some(reads), Some(reading)) = (&self.reads, &reading) {
            reads.note_offsets(reading, &mut slot);
        }
        match self.copier.copy(slot, buffer, self.core.meters.clock.now()) {
            Copied::Started(on_device, bytes) => {
                self.core.meters.copy.batches.add(1);
                self.core.meters.copy.bytes.add(bytes as u64);
                self.hand_out(Contents::Device(on_device));
            }
            Copied::Failed(slot, error) => {
                slot.note_failure(error);
                self.hand_out(Contents::Host(slot));
            }
            Copied::Broken(error) => self.core.fail(error),
        }
    }

    fn take(&self, waiting: &mut WaitingSlots, slot: Filled) {
        if !self.is_present(&slot) {
            return;
        }
        let ticket = slot.ticket();
        if ticket.generation != waiting.generation {
            *waiting = WaitingSlots::new(ticket.generation, self.slots);
        }
        waiting.reorder.put(ticket.sequence, slot);
    }

    /// Drops slots of an old run. They must not wait here for its next slot, because the next run
    /// needs them.
    fn forget_old(&self, waiting: &mut WaitingSlots) {
        let now = self.generation();
        if waiting.generation != now {
            *waiting = WaitingSlots::new(now, self.slots);
        }
    }

    fn generation(&self) -> u64 {
        self.core.exchange.generation.load(Ordering::Acquire)
    }

    /// Whether the slot belongs to the current run.
    fn is_present(&self, slot: &Filled) -> bool {
        slot.ticket().generation == self.generation()
    }

    fn hand_out(&self, contents: Contents) {
        // The channel has room for all slots and buffers.
        let _ = self.ready.send(contents);
        self.core.exchange.empty_if_closed();
    }
}

/// Batches in flight, oldest first. A buffer that storage still writes to must stay until the write
/// has ended, even if this thread panics. A device that never answers keeps this thread and all its
/// memory.
struct Flights(VecDeque<Flight>);

impl Flights {
    /// Rows that are being read.
    fn rows_left(&self) -> u64 {
        self.0
            .iter()
            .filter_map(|flight| flight.reading.as_ref())
            .map(|reading| reading.left())
            .sum()
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        let readings = || self.0.iter().filter_map(|flight| flight.reading.as_ref());
        readings().for_each(|reading| reading.cancelled.store(true, Ordering::Relaxed));
        while !readings().all(|reading| reading.is_done()) {
            std::thread::sleep(AGAIN);
        }
        for Flight {
            buffer, reading, ..
        } in self.0.drain(..)
        {
            if reading.is_some_and(|reading| reading.is_lost()) {
                buffer.into_iter().for_each(|buffer| buffer.leak());
            }
        }
    }
}
