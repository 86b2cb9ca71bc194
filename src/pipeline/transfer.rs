//! The transfer thread: full slots, in order, onto the device.
//!
//! ```text
//! full slots ──► order restored ──► a free buffer? ──copy──► ready ─► Epoch::next
//!                     ▲                  ▲    └──► in flight ──"copied" reached──► free slot
//!                 the next one       dropped batches
//! ```
//!
//! Buffers are taken in the order of the batches, by this thread alone, so the oldest batch that was not handed out gets
//! the next free one: a later batch can never hold what an earlier one needs. When the consumer holds every buffer,
//! `next()` says so.
//!
//! The thread never waits for the device: copies are queued as long as there are full slots and free buffers, and a bell
//! rings when one is done. A broken context rings no bells, so it also looks now and then.

use super::Core;
use crate::batch::{Contents, Reorder};
use crate::device::cuda::copy::{Copied, Copier};
use crate::memory::{Filled, Pool};
use crossbeam_channel::{Receiver, Sender, never, select};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often the thread looks at copies whose bell does not ring.
const LOOK: Duration = Duration::from_millis(250);

/// What the transfer thread is made of.
pub(crate) struct Transfer {
    pub(crate) core: Arc<Core>,
    pub(crate) copier: Copier,
    /// Full slots of the present run, in any order.
    pub(crate) full: Receiver<Filled>,
    /// Something ended: look.
    pub(crate) bell: Receiver<()>,
    pub(crate) ready: Sender<Contents>,
    /// Slots at most.
    pub(crate) slots: usize,
}

/// Slots of a run that wait for their turn.
struct Waiting {
    generation: u64,
    reorder: Reorder<Filled>,
    /// The next one in order.
    next: Option<Filled>,
}

impl Waiting {
    fn new(generation: u64, slots: usize) -> Self {
        Self { generation, reorder: Reorder::new(slots), next: None }
    }
}

impl Transfer {
    /// Pins the slots, one after the other, and then copies until the loader ends.
    pub(crate) fn run(mut self, pool: Pool) {
        let core = self.core.clone();
        pool.announce(|region| {
            if core.to_io.is_ending() {
                return;
            }
            match self.copier.pin(region) {
                Ok(()) => core.meters.device.pinned_slots.add(1),
                Err(error) => core.meters.device.note_pageable(&error),
            }
        });
        let mut waiting = Waiting::new(0, self.slots);
        while !core.to_io.is_ending() {
            self.forget_old(&mut waiting);
            while let Ok(slot) = self.full.try_recv() {
                self.take(&mut waiting, slot);
            }
            let room = self.copy_all(&mut waiting);
            if let Err(error) = self.copier.let_go_done() {
                core.fail(error);
            }
            self.wait(&mut waiting, room);
        }
    }

    /// Copies slots as long as the next one is there and a buffer is free; true when there is a free buffer left or nothing
    /// to put into it.
    fn copy_all(&mut self, waiting: &mut Waiting) -> bool {
        loop {
            let Some(slot) = waiting.next.take().or_else(|| waiting.reorder.take()) else { return true };
            if slot.failed() {
                self.hand_out(Contents::Host(slot));
                continue;
            }
            match self.copier.copy(slot) {
                Copied::Started(on_device, bytes) => {
                    self.core.meters.device.copies.add(1);
                    self.core.meters.device.bytes.add(bytes as u64);
                    self.hand_out(Contents::Cuda(on_device));
                }
                Copied::NoRoom(slot) => {
                    waiting.next = Some(slot);
                    return false;
                }
                Copied::Failed(slot, error) => {
                    slot.note_failure(error);
                    self.hand_out(Contents::Host(slot));
                }
                Copied::Broken(error) => self.core.fail(error),
            }
        }
    }

    fn wait(&mut self, waiting: &mut Waiting, room: bool) {
        let never = never();
        let freed = if room { &never } else { self.copier.free() };
        select! {
            recv(self.full) -> slot => if let Ok(slot) = slot { self.take(waiting, slot) },
            recv(self.bell) -> _ => {}
            recv(freed) -> buffer => if let Ok(buffer) = buffer { self.copier.give_back(buffer) },
            default(LOOK) => {}
        }
    }

    fn take(&self, waiting: &mut Waiting, slot: Filled) {
        let ticket = slot.ticket();
        if ticket.generation != self.generation() {
            return;
        }
        if ticket.generation != waiting.generation {
            *waiting = Waiting::new(ticket.generation, self.slots);
        }
        waiting.reorder.put(ticket.sequence, slot);
    }

    /// Slots of a run that ended must not wait here for one that comes: the next run needs them.
    fn forget_old(&self, waiting: &mut Waiting) {
        let now = self.generation();
        if waiting.generation != now {
            *waiting = Waiting::new(now, self.slots);
        }
    }

    fn generation(&self) -> u64 {
        self.core.exchange.generation.load(Ordering::Acquire)
    }

    fn hand_out(&self, contents: Contents) {
        // It has room for all slots and buffers.
        let _ = self.ready.send(contents);
        self.core.exchange.empty_if_closed();
    }
}
