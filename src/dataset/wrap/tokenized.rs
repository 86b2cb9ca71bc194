//! Texts as tokens: a field of texts becomes the field `input_ids`, and with conversations a last field
//! `loss`, which has a number for each token.
//!
//! ```text
//! inner.extents ──► bytes ──inner.check──► inner.open ──text──► ids (i32)        on the workers
//! inner chunk   ──► inner.open_chunk ──texts──► ids of all its rows
//! ```
//!
//! Nothing is kept: the lengths of the tokens are known after a pass ([`Facts`](super::Facts)), and
//! the tokens themselves where they are [copied](super::Copied).
//!
//! Limits: the texts are stored in files, not in the index. A text that cannot be tokenised is a
//! bad sample; in a chunk, it is the error of all rows of the chunk. Memory: a text and its tokens,
//! for each worker; a chunk and its tokens. The loss of a text is kept, by each thread, from the
//! opening of its tokens to that of its loss.

use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::{
    ChunkBuf, ChunkBytes, Chunked, Dataset, Digest, Framed, Part, Parts, Sizes, chunks, frames,
    member, no_field,
};
use feedline_core::decode::{Scratch, ToIds};
use feedline_core::tensor::{DType, EncodedField, Encoding, Field};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names of the fields.
const NAME: &str = "input_ids";
const LOSS: &str = "loss";
/// Bytes of a token.
const TOKEN: u64 = 4;
/// Tokens that a tokenizer may add to a text.
const AROUND: u64 = 64;

thread_local!(static LAST: RefCell<LastLoss> = RefCell::default());

/// The loss of the text that a thread tokenised last.
#[derive(Default)]
struct LastLoss {
    /// The wrapper, and 1 + the sample; 0 if the loss was taken.
    of: (u64, u64),
    loss: Vec<u8>,
}

/// Texts as tokens; made by [`DatasetExt::tokenized`](crate::dataset::DatasetExt::tokenized).
pub struct Tokenized<D> {
    inner: D,
    schema: Vec<EncodedField>,
    field: usize,
    ids: Arc<dyn ToIds>,
    /// Maximum tokens of a text.
    most: u64,
    /// Whether the inner dataset opens the texts.
    is_framed: bool,
    /// The field of the loss.
    loss: Option<usize>,
    /// Distinguishes the wrappers of a process.
    number: u64,
}

impl<D: Dataset> Tokenized<D> {
    pub(crate) fn new(inner: D, name: &str, ids: Arc<dyn ToIds>) -> Result<Self> {
        let mut schema = inner.schema().to_vec();
        let Some(field) = schema.iter().position(|known| known.name == name) else {
            return refused(no_field(&schema, name));
        };
        if schema[field].encoding != Encoding::Bytes {
            let encoding = &schema[field].encoding;
            return refused(format!("field `{name}` is {encoding}; a text is expected"));
        }
        let has_loss = ids.has_loss();
        let mut names = schema.iter().map(|known| known.name.as_str());
        if let Some(taken) = names.find(|name| *name == NAME || has_loss && *name == LOSS) {
            return refused(format!("the dataset has a field `{taken}` already"));
        }
        let mut is_framed = false;
        if inner.chunked().is_none() && inner.len() > 0 {
            let mut parts = Parts::new();
            inner.extents(0, &mut parts)?;
            let part = parts.iter().find(|one| one.field == field);
            is_framed = match part.map(|one| one.part) {
                Some(Part::Framed(_)) => true,
                Some(Part::Extent(_) | Part::Checked(_)) => false,
                _ => return refused(format!("the texts of field `{name}` are in the index")),
            };
        }
        let sizes = inner.sizes();
        let stored = sizes.sample_bytes_max.max(sizes.opened_bytes_max);
        let stored = match inner.chunked() {
            Some(_) => frames(&inner).field_bytes_max(field)?.unwrap_or(stored),
            None => stored,
        };
        let most = match ids.most() {
            usize::MAX => stored.saturating_add(AROUND),
            most => most as u64,
        };
        let loss = has_loss.then_some(schema.len());
        if has_loss {
            let own = Field::up_to(LOSS, DType::U8, most.max(1) as usize);
            schema.push(EncodedField::raw(own));
        }
        static NEXT: AtomicU64 = AtomicU64::new(1);
        schema[field] = EncodedField::raw(Field::up_to(NAME, DType::I32, most.max(1) as usize));
        Ok(Self {
            inner,
            schema,
            field,
            ids,
            most,
            is_framed,
            loss,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Appends the tokens of a text to `out`, and their loss to `loss`.
    fn put(&self, text: &[u8], out: &mut Vec<u8>, loss: &mut Vec<u8>) -> Result<()> {
        let text = std::str::from_utf8(text).map_err(|error| {
            let at = error.valid_up_to();
            Error::decode(format!("not UTF-8 at byte {at} of the text"))
        })?;
        let mut ids = Vec::new();
        self.ids.ids_and_loss(text, &mut ids, loss)?;
        if ids.len() as u64 > self.most {
            let message = format!(
                "{} tokens of a text of {} bytes; at most {} are expected",
                ids.len(),
                text.len(),
                self.most
            );
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        out.extend_from_slice(bytemuck::cast_slice(&ids));
        Ok(())
    }
}

fn refused<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Index, message))
}

impl<D: Dataset> Dataset for Tokenized<D> {
    own!(schema framed);
    forward!(self => self.inner; len sources sampler keys);

    fn sizes(&self) -> Sizes {
        let inner = self.inner.sizes();
        Sizes {
            opened_bytes_max: inner.opened_bytes_max.max(TOKEN * self.most),
            ..inner
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.inner.extents(sample, parts)?;
        parts.frame(self.field);
        if let Some(loss) = self.loss {
            let own = parts.iter().find(|one| one.field == self.field);
            if let Some(extent) = own.and_then(|one| one.part.extent()) {
                parts.framed(loss, extent);
            }
        }
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.inner.chunked().map(|_| self as &dyn Chunked)
    }

    fn identity(&self) -> u64 {
        let words = [
            self.inner.identity(),
            self.ids.identity(),
            self.field as u64,
        ];
        Digest::new("tokenized").words(&words).end()
    }

    fn describe(&self) -> String {
        let field = &self.inner.schema()[self.field].name;
        format!("{}; `{field}` tokenised", self.inner.describe())
    }
}

impl<D: Dataset> Framed for Tokenized<D> {
    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let is_loss = Some(field) == self.loss;
        if field != self.field && !is_loss {
            return frames(&self.inner).open(sample, field, bytes, buffer);
        }
        LAST.with_borrow_mut(|last| {
            let of = (self.number, sample + 1);
            if is_loss && std::mem::take(&mut last.of) == of {
                buffer.extend_from_slice(&last.loss);
                return Ok(());
            }
            last.of = (0, 0);
            last.loss.clear();
            let mut unpacked = Vec::new();
            let text = match self.is_framed {
                true => frames(&self.inner).open(sample, self.field, bytes, &mut unpacked)?,
                false => bytes,
            };
            if is_loss {
                return self.put(text, &mut Vec::new(), buffer);
            }
            self.put(text, buffer, &mut last.loss)?;
            last.of = of;
            Ok(())
        })?;
        Ok(buffer)
    }

    /// The text's check serves its loss, too.
    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let field = if Some(field) == self.loss {
            self.field
        } else {
            field
        };
        frames(&self.inner).check(sample, field, bytes)
    }

    fn make(&self, sample: u64, field: usize, out: &mut [u8]) -> Result<()> {
        frames(&self.inner).make(sample, field, out)
    }

    fn member(&self, sample: u64, field: Option<usize>) -> Option<String> {
        let field = field.map(|field| {
            if Some(field) == self.loss {
                self.field
            } else {
                field
            }
        });
        member(&self.inner, sample, field)
    }

    fn seek_points<'a>(
        &'a self,
        sample: u64,
        field: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        match Some(field) == self.loss {
            true => Ok(&[]),
            false => frames(&self.inner).seek_points(sample, field, buffer),
        }
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        match field == self.field || Some(field) == self.loss {
            true => Ok(None),
            false => frames(&self.inner).field_bytes(sample, field),
        }
    }

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        match field {
            field if field == self.field => Ok(Some(TOKEN * self.most)),
            field if Some(field) == self.loss => Ok(Some(self.most)),
            field => frames(&self.inner).field_bytes_max(field),
        }
    }
}

impl<D: Dataset> Chunked for Tokenized<D> {
    forward!(self => chunks(&self.inner); starts is_whole inner chunk_extents chunk_name);

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        let inner = chunks(&self.inner).chunk_bytes(chunk);
        let rows = self.starts()[chunk + 1] - self.starts()[chunk];
        let added = rows.saturating_mul((TOKEN + 1) * AROUND);
        let tokens = inner.opened.saturating_mul(TOKEN + 1).saturating_add(added);
        ChunkBytes {
            opened: inner.opened.saturating_add(tokens),
            scratch: inner.scratch.saturating_add(inner.opened),
            ..inner
        }
    }

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let chunks = chunks(&self.inner);
        let fields = self.inner.schema().len();
        let opened = chunks.chunk_bytes(chunk).opened;
        let opened = opened.saturating_add(64 * fields as u64);
        let mut inner = ChunkBuf::new(usize::try_from(opened).unwrap_or(usize::MAX))?;
        inner.begin(out.rows(), fields);
        chunks.open_chunk(chunk, pieces, scratch, &mut inner)?;
        let mut tokens = Vec::new();
        let mut loss = Vec::new();
        for field in 0..fields {
            if let Some((rows, row_bytes)) = inner.array(field) {
                out.fixed(field, row_bytes)?.copy_from_slice(rows);
                continue;
            }
            for row in 0..out.rows() {
                let own = inner.row(field, row).unwrap_or_default();
                if field != self.field {
                    out.push(field, own)?;
                    continue;
                }
                tokens.clear();
                loss.clear();
                self.put(own, &mut tokens, &mut loss)
                    .map_err(|error| error.with_sample(self.starts()[chunk] + row as u64))?;
                out.push(field, &tokens)?;
                if let Some(number) = self.loss {
                    out.push(number, &loss)?;
                }
            }
        }
        Ok(())
    }
}
