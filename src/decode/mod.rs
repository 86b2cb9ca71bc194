//! Decoders: the bytes of one encoded field in, rows of the batch out.
//!
//! ```text
//! bytes of one field ──Decoder::decode──► its rows in the slot     (on a decode worker; nothing here waits)
//!        ▲                    │
//!   untrusted            Ctx: who (sample id), which draws, scratch of this worker
//! ```
//!
//! Invariants: a decoder is shared by all workers and has no state of its own; everything random comes from
//! [`Ctx::draws`], so a sample's row depends on (seed, epoch, id) alone; sizes are checked against limits before
//! memory is taken; a panic is caught by the pipeline and named.

mod bytes;
#[cfg(feature = "image")]
mod image;
mod raw;
mod single;

#[cfg(feature = "image")]
pub use self::image::{Backend, Filter, Image, Limits, PixelLayout};
pub use bytes::Bytes;
pub use raw::Raw;
pub use single::Single;

use crate::error::Result;
use crate::memory::Row;
use crate::order::Draws;
use crate::tensor::{EncodedField, Field};
use std::any::Any;
use std::ops::Range;

/// Turns the bytes of one encoded field into rows. Open: implement it for a format of your own.
pub trait Decoder: Send + Sync + 'static {
    /// The fields it writes for such an input. Errors: whatever it cannot take, found when the loader is built.
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>>;

    /// Heap bytes that one call may need besides the row, at most. `workers ×` this is a term of the loader's sum; a
    /// tight memory budget may leave less, see [`Ctx::scratch_limit`].
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Decodes `input` into the fields `ctx.fields()` of `out`.
    ///
    /// It must write all of them: the row holds what an earlier sample left there. (Lengths of `UpTo` fields start at 0.)
    /// `input` is untrusted. Errors become errors of the sample; path and sample id are added by the caller.
    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()>;
}

impl<D: Decoder + ?Sized> Decoder for std::sync::Arc<D> {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        (**self).outputs(input)
    }

    fn scratch_bytes(&self) -> usize {
        (**self).scratch_bytes()
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        (**self).decode(input, ctx, out)
    }
}

/// What a decoder or transform may know about the sample, and the worker's scratch.
pub struct Ctx<'a> {
    seed: u64,
    epoch: u64,
    id: u64,
    fields: Range<usize>,
    scratch: &'a mut Scratch,
    scratch_limit: usize,
}

impl<'a> Ctx<'a> {
    /// A context; public so that decoders can be tested and measured alone.
    pub fn new(seed: u64, epoch: u64, id: u64, fields: Range<usize>, scratch: &'a mut Scratch) -> Self {
        Self { seed, epoch, id, fields, scratch, scratch_limit: usize::MAX }
    }

    pub(crate) fn with_scratch_limit(mut self, bytes: usize) -> Self {
        self.scratch_limit = bytes;
        self
    }

    /// Heap bytes that this call may take: [`Decoder::scratch_bytes`], or what the memory budget left of it. A decoder
    /// that would need more for this sample returns [`ErrorKind::Limit`](crate::ErrorKind::Limit) before it takes them.
    pub fn scratch_limit(&self) -> usize {
        self.scratch_limit
    }

    /// Sample id.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Indices, in the batch's spec, of the fields that are to be written: for a decoder those of
    /// [`Decoder::outputs`], in that order; for a transform all.
    pub fn fields(&self) -> Range<usize> {
        self.fields.clone()
    }

    /// Random draws that depend on (seed, epoch, sample id, purpose) alone. Give every independent use a `purpose` of
    /// its own (any name).
    pub fn draws(&self, purpose: &str) -> Draws {
        Draws::new(self.seed, self.epoch, self.id, purpose)
    }

    /// Memory of this worker that survives from sample to sample.
    pub fn scratch(&mut self) -> &mut Scratch {
        self.scratch
    }
}

/// Reusable per-worker state, one value per type.
#[derive(Default)]
pub struct Scratch {
    /// A transform of the user's is running: names the stage when it panics.
    pub(crate) mapping: bool,
    /// What a dataset makes of framed bytes; see `Dataset::open`.
    pub(crate) opened: Vec<u8>,
    /// Which worker's it is, if it is one's.
    pub(crate) worker: Option<usize>,
    values: Vec<Box<dyn Any + Send>>,
}

impl Scratch {
    /// The worker's value of type `T`, made on first use.
    pub fn get<T: Default + Send + 'static>(&mut self) -> &mut T {
        let index = match self.values.iter().position(|value| value.is::<T>()) {
            Some(index) => index,
            None => {
                self.values.push(Box::<T>::default());
                self.values.len() - 1
            }
        };
        self.values[index].downcast_mut().expect("found by its type")
    }
}
