//! Decoding of single samples outside a loader, for tests, benchmarks and inspection.

use super::{Ctx, Decoder, Scratch};
use crate::memory::{Filled, FreeSlot, Hooks, Pool, Ticket};
use crate::tensor::{EncodedField, Field, Layout, Spec};
use feedline_base::error::Result;
use feedline_base::sync::Hold;
use std::sync::{Arc, Mutex};

/// A decoder with its own row and scratch memory.
pub struct Single {
    decoder: Box<dyn Decoder>,
    spec: Spec,
    scratch: Scratch,
    mailbox: Arc<Mailbox>,
    /// The row of the last call.
    row: Option<Filled>,
}

/// Holds the only slot between two uses.
#[derive(Default)]
struct Mailbox {
    free: Mutex<Option<FreeSlot>>,
    full: Mutex<Option<Filled>>,
}

struct Post(Arc<Mailbox>);

impl Hooks for Post {
    fn full(&self, slot: Filled) {
        *self.0.full.hold() = Some(slot);
    }

    fn free(&self, slot: FreeSlot) {
        *self.0.free.hold() = Some(slot);
    }
}

impl Drop for Single {
    /// Slot and mailbox refer to each other; this breaks the cycle, which would keep both alive.
    fn drop(&mut self) {
        self.row = None;
        drop(self.mailbox.full.hold().take());
        let slot = self.mailbox.free.hold().take();
        drop(slot);
    }
}

impl Single {
    /// Reserves a row for the outputs of `decoder` for `input`. Errors: those of
    /// [`Decoder::outputs`].
    pub fn new(decoder: impl Decoder, input: &EncodedField) -> Result<Self> {
        let spec = Spec::new(decoder.outputs(input)?)?;
        let layout = Layout::new(&spec, 1)?;
        let mailbox = Arc::new(Mailbox::default());
        Pool::new(spec.clone(), layout, 1, Box::new(Post(mailbox.clone())))?.announce();
        Ok(Self {
            decoder: Box::new(decoder),
            spec,
            scratch: Scratch::default(),
            mailbox,
            row: None,
        })
    }

    /// Decodes one sample. Errors: those of the decoder.
    pub fn decode(&mut self, input: &[u8], seed: u64, epoch: u64, id: u64) -> Result<()> {
        self.decode_seeking(input, &[], seed, epoch, id)
    }

    /// Decodes one sample with its [seek points](crate::dataset::Framed::seek_points). Errors:
    /// those of the decoder.
    #[doc(hidden)]
    pub fn decode_seeking(
        &mut self,
        input: &[u8],
        points: &[u8],
        seed: u64,
        epoch: u64,
        id: u64,
    ) -> Result<()> {
        // Dropping the last row frees the slot. After a panic of the decoder, the slot has already
        // been returned as failed.
        self.row = None;
        drop(self.mailbox.full.hold().take());
        let slot = self.mailbox.free.hold().take();
        let mut rows = slot
            .expect("every use of the slot ends in the mailbox")
            .begin(Ticket::default(), 1, 1);
        let fields = 0..self.spec.fields().len();
        let mut row = rows.row();
        row.mark(id);
        let mut ctx = Ctx::new(seed, epoch, id, fields, &mut self.scratch).with_seek_points(points);
        self.decoder.decode(input, &mut ctx, &mut row)?;
        row.pad_new(u64::MAX)?;
        rows.finish_row();
        drop(rows);
        self.row = self.mailbox.full.hold().take();
        Ok(())
    }

    /// The fields of the row.
    pub fn fields(&self) -> &[Field] {
        self.spec.fields()
    }

    /// The bytes of field `field` after the last [`Single::decode`]; empty if it failed.
    pub fn bytes(&self, field: usize) -> &[u8] {
        self.row.as_ref().map_or(&[], |row| row.bytes(field))
    }

    /// Length of an `UpTo` field after the last [`Single::decode`]; `None` for a fixed shape, or if
    /// it failed.
    pub fn len_of(&self, field: usize) -> Option<usize> {
        Some(self.row.as_ref()?.lens(field)?[0] as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::Raw;
    use crate::tensor::DType;

    #[test]
    fn dropping_a_single_returns_its_memory() {
        let mut single =
            Single::new(Raw, &EncodedField::raw(Field::fixed("x", DType::U8, [3]))).unwrap();
        single.decode(&[1, 2, 3], 0, 0, 0).unwrap();
        let mailbox = Arc::downgrade(&single.mailbox);
        drop(single);
        assert!(mailbox.upgrade().is_none());
    }
}
