//! Decoders: bytes of one encoded field in, rows of the batch out.
//!
//! ```text
//! bytes of one field ──Decoder::decode──► its rows in the slot     (on a decode worker; never waits)
//!        ▲                    │
//!   untrusted            Ctx: sample id, random draws, the worker's scratch memory
//! ```
//!
//! Invariants:
//! * All workers share a decoder. What it holds, such as a tokenizer, does not change; memory of a worker is in [`Scratch`].
//! * All randomness comes from [`Ctx::draws`], so a sample's row depends on (seed, epoch, id, number of the draw) alone.
//! * A decoder checks sizes against limits before it takes memory.
//! * The pipeline catches a panic and reports its sample.

mod bytes;
#[cfg(feature = "image")]
mod image;
mod raw;
#[cfg_attr(
    not(feature = "unstable"),
    allow(dead_code, reason = "the crate alone reads no rows")
)]
pub(crate) mod single;

#[cfg(feature = "image")]
pub use self::image::{Filter, Image, Limits, PixelLayout};
pub use bytes::Bytes;
pub use raw::Raw;
pub(crate) use single::Single;

use crate::error::{Result, Stage, panicked};
use crate::memory::Row;
use crate::order::Draws;
use crate::tensor::{EncodedField, Field};
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Turns the bytes of one encoded field into rows. Implement it for your own formats.
pub trait Decoder: Send + Sync + 'static {
    /// The fields that it writes for this input. `build()` returns its error for an input that it cannot decode: of
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) and [`Stage::Build`].
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>>;

    /// Maximum heap bytes of one call, besides the row.
    ///
    /// The loader's memory sum counts `workers ×` this. A tight memory budget may leave less: see
    /// [`Ctx::scratch_limit`].
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Decodes `input` into the fields `ctx.fields()` of `out`.
    ///
    /// It must write all of them, because the row still holds an earlier sample. (Lengths of `UpTo` fields start at 0.)
    /// `input` is untrusted. An error becomes the sample's error; the caller adds path and sample id.
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

/// The sample's identity and the worker's scratch memory, for a decoder or transform.
pub struct Ctx<'a> {
    seed: u64,
    epoch: u64,
    id: u64,
    draw: u64,
    fields: Range<usize>,
    scratch: &'a mut Scratch,
    scratch_limit: usize,
    seek_points: &'a [u8],
}

impl<'a> Ctx<'a> {
    /// A context. Public for tests and benchmarks of single decoders.
    pub fn new(
        seed: u64,
        epoch: u64,
        id: u64,
        fields: Range<usize>,
        scratch: &'a mut Scratch,
    ) -> Self {
        Self {
            seed,
            epoch,
            id,
            draw: 0,
            fields,
            scratch,
            scratch_limit: usize::MAX,
            seek_points: &[],
        }
    }

    /// For this draw of the sample in the epoch.
    pub(crate) fn with_draw(mut self, draw: u64) -> Self {
        self.draw = draw;
        self
    }

    pub(crate) fn with_scratch_limit(mut self, bytes: usize) -> Self {
        self.scratch_limit = bytes;
        self
    }

    /// With the seek points of the input, of [`Framed::seek_points`](crate::dataset::Framed::seek_points).
    #[must_use]
    pub fn with_seek_points(mut self, points: &'a [u8]) -> Self {
        self.seek_points = points;
        self
    }

    /// Seek points of the input; empty without any. They are what
    /// [`Framed::seek_points`](crate::dataset::Framed::seek_points) gave.
    pub fn seek_points(&self) -> &'a [u8] {
        self.seek_points
    }

    /// Heap bytes that this call may take: [`Decoder::scratch_bytes`], or less under a tight memory budget.
    ///
    /// A decoder that needs more for this sample returns [`ErrorKind::Limit`](crate::ErrorKind::Limit) before it takes
    /// any.
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

    /// Indices of the fields to write, in the batch's spec.
    ///
    /// A decoder writes those of [`Decoder::outputs`], in that order; a transform writes any.
    pub fn fields(&self) -> Range<usize> {
        self.fields.clone()
    }

    /// Random draws that depend on (seed, epoch, sample id, purpose) alone, and on the number of the draw where an order
    /// repeats samples within an epoch: equal entries of a list of indices, later passes over a source of a mix, and what
    /// [`Sampler::draw`](crate::order::Sampler::draw) says. Rows that fill up the last batch are copies.
    ///
    /// Independent uses need different purposes; a purpose is any name.
    pub fn draws(&self, purpose: &str) -> Draws {
        Draws::of_draw(self.seed, self.epoch, self.id, self.draw, purpose)
    }

    /// The worker's memory, kept from sample to sample.
    pub fn scratch(&mut self) -> &mut Scratch {
        self.scratch
    }
}

/// Code of the user's, or of a format, that a row passes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Running {
    /// A decoder, or none.
    #[default]
    Decoder,
    /// [`Framed::check`](crate::dataset::Framed::check).
    Check,
    /// [`Framed::open`](crate::dataset::Framed::open).
    Open,
    /// A transform.
    Map,
}

/// Reusable per-worker state, one value per type.
#[derive(Default)]
pub struct Scratch {
    /// The code under way: a panic is its.
    pub(crate) running: Running,
    /// The dataset's field that it works on. After a panic the one that failed, until the next row.
    pub(crate) field: Option<usize>,
    /// Bytes that a dataset unpacks from their frame; see `Framed::open`.
    pub(crate) opened: Vec<u8>,
    /// Seek points of a field.
    pub(crate) points: Vec<u8>,
    /// Number of the worker that owns it, if a worker does.
    pub(crate) worker: Option<usize>,
    values: Vec<Box<dyn Any + Send>>,
}

impl Scratch {
    /// Runs `work` on the scratch of `owner`. A panic becomes an error of the code under way, and the scratch is made
    /// anew. One catch for a whole row: one for each call costs time.
    pub(crate) fn guarded<O, R>(
        owner: &mut O,
        scratch: fn(&mut O) -> &mut Self,
        work: impl FnOnce(&mut O) -> Result<R>,
    ) -> Result<R> {
        scratch(owner).running = Running::Decoder;
        scratch(owner).field = None;
        catch_unwind(AssertUnwindSafe(|| work(owner))).unwrap_or_else(|panic| {
            let scratch = scratch(owner);
            let running = scratch.running;
            let worker = scratch.worker;
            let field = scratch.field;
            *scratch = Self {
                worker,
                field,
                ..Self::default()
            };
            Err(match running {
                Running::Decoder => panicked(panic, Stage::Decode),
                Running::Check => panicked(panic, Stage::Decode).within("the dataset's `check`"),
                Running::Open => panicked(panic, Stage::Decode).within("the dataset's `open`"),
                Running::Map => panicked(panic, Stage::Map),
            })
        })
    }

    /// The worker's value of type `T`, created on first use.
    pub fn get<T: Default + Send + 'static>(&mut self) -> &mut T {
        let index = match self.values.iter().position(|value| value.is::<T>()) {
            Some(index) => index,
            None => {
                self.values.push(Box::<T>::default());
                self.values.len() - 1
            }
        };
        self.values[index]
            .downcast_mut()
            .expect("found by its type")
    }
}
