//! Decoders: bytes of one encoded field in, rows of the batch out.
//!
//! ```text
//! bytes of one field ──Decoder::decode──► its rows in the slot     (on a decode worker; never waits)
//!        ▲                    │
//!   untrusted            Ctx: sample id, random draws, the worker's scratch memory
//! ```
//!
//! Invariants:
//! * All workers share a decoder. Its state, such as a tokenizer, does not change; per-worker
//!   memory is in [`Scratch`].
//! * All randomness comes from [`Ctx::draws`], so a sample's row depends only on (seed, epoch, id,
//!   draw number).
//! * A decoder checks sizes against limits before it allocates memory.
//! * The pipeline catches a panic and reports its sample.

pub mod bytes;
pub mod each;
pub mod ids;
pub mod many;
pub mod raw;
pub mod single;

pub use bytes::Bytes;
pub use each::Each;
pub use ids::ToIds;
pub use many::Many;
pub use raw::Raw;
pub use single::Single;

use crate::memory::Row;
use crate::order::Draws;
use crate::tensor::{EncodedField, Field};
use feedline_base::error::{Result, Stage, panicked};
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Turns the bytes of one encoded field into rows. Implement it for your own formats.
pub trait Decoder: Send + Sync + 'static {
    /// Returns the fields that the decoder writes for this input. For an input that it cannot
    /// decode, it returns an error of [`ErrorKind::Config`](feedline_base::error::ErrorKind::Config) and
    /// [`Stage::Build`], which `build()` returns.
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>>;

    /// Maximum heap bytes of one call, besides the row.
    ///
    /// The loader counts this once per worker in its memory plan. A tight memory budget may leave
    /// less: see [`Ctx::scratch_limit`].
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Decodes `input` into the fields `ctx.fields()` of `out`.
    ///
    /// It must write all of them, because the row still holds an earlier sample. (Lengths of `UpTo`
    /// fields start at 0.) `input` is untrusted. An error becomes the sample's error; the caller
    /// adds path and sample id.
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
    /// A context, for tests and benchmarks of single decoders; see [`Single`].
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

    /// Sets the draw number, which distinguishes repeated draws of one sample in the epoch.
    #[doc(hidden)]
    pub fn with_draw(mut self, draw: u64) -> Self {
        self.draw = draw;
        self
    }

    #[doc(hidden)]
    pub fn with_scratch_limit(mut self, bytes: usize) -> Self {
        self.scratch_limit = bytes;
        self
    }

    /// Sets the seek points of the input, as returned by
    /// [`Framed::seek_points`](crate::dataset::Framed::seek_points).
    #[must_use]
    pub fn with_seek_points(mut self, points: &'a [u8]) -> Self {
        self.seek_points = points;
        self
    }

    /// Seek points of the input, as returned by
    /// [`Framed::seek_points`](crate::dataset::Framed::seek_points); empty if there are none.
    pub fn seek_points(&self) -> &'a [u8] {
        self.seek_points
    }

    /// Heap bytes that this call may allocate: [`Decoder::scratch_bytes`], or less under a tight
    /// memory budget.
    ///
    /// A decoder that needs more for this sample returns
    /// [`ErrorKind::Limit`](feedline_base::error::ErrorKind::Limit) before it allocates any.
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
    /// A decoder writes those of [`Decoder::outputs`], in that order; a transform may write any.
    pub fn fields(&self) -> Range<usize> {
        self.fields.clone()
    }

    /// Random draws that depend only on (seed, epoch, sample id, purpose), and on the draw number
    /// if an order repeats samples within an epoch. The draw number differs between equal entries
    /// of a list of indices, and between passes over a source of a mix. A sampler sets it by
    /// `Sampler::draw`. Rows that fill up the last batch are copies.
    ///
    /// Independent uses need different purposes; a purpose can be any name.
    pub fn draws(&self, purpose: &str) -> Draws {
        Draws::of_draw(self.seed, self.epoch, self.id, self.draw, purpose)
    }

    /// The worker's memory, kept from sample to sample.
    pub fn scratch(&mut self) -> &mut Scratch {
        self.scratch
    }
}

/// The code of the user or of a format that is processing a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Running {
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
    /// The code that is running; a panic is attributed to it.
    #[doc(hidden)]
    pub running: Running,
    /// The dataset's field being processed. After a panic, the field that failed, until the next
    /// row.
    #[doc(hidden)]
    pub field: Option<usize>,
    /// Bytes that a dataset unpacks from their frame; see `Framed::open`.
    #[doc(hidden)]
    pub opened: Vec<u8>,
    /// Seek points of a field.
    #[doc(hidden)]
    pub points: Vec<u8>,
    /// Number of the worker that owns the scratch, if any.
    #[doc(hidden)]
    pub worker: Option<usize>,
    values: Vec<Box<dyn Any + Send>>,
}

impl Scratch {
    /// Runs `work` on the scratch of `owner`. A panic becomes an error of the code that was
    /// running, and the scratch is replaced. There is one `catch_unwind` per row, because one per
    /// call would cost time.
    #[doc(hidden)]
    pub fn guarded<O, R>(
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
