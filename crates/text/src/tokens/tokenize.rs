//! The decoder of a text field.
//!
//! ```text
//! text of a field ──encode──► ids ──in range?──► row of `input_ids`: │ ids │ zeros │   len: ids
//! ```
//!
//! Limits: [`Tokenize::text_max`]. Invariants: no copy of the ids but into the row; an id that the dtype
//! cannot hold is refused when the loader is built.

use super::Tokenizer;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::Digest;
use feedline_core::decode::{Ctx, Decoder, ToIds};
use feedline_core::memory::Row;
use feedline_core::tensor::{DType, Element, EncodedField, Encoding, Field};
use tokenizers::TruncationDirection;

/// Tokenizes a text: the field `input_ids` of up to `max` tokens, by default `i32` with the special
/// tokens of the tokenizer.
///
/// ```no_run
/// # use feedline_text::{Tokenize, Tokenizer};
/// let tokenizer = Tokenizer::open("models/llama/tokenizer.json")?;
/// let tokenize = Tokenize::new(tokenizer, 2048).cut();
/// # Ok::<(), feedline_core::Error>(())
/// ```
///
/// `FieldView::lens` has the numbers of tokens; zeros pad shorter rows. A text of more tokens than
/// the maximum is an error of its sample ([`ErrorKind::Shape`]) unless it is cut.
#[derive(Clone, Debug)]
pub struct Tokenize {
    tokenizer: Tokenizer,
    name: String,
    max: usize,
    dtype: DType,
    special: bool,
    cut: Option<TruncationDirection>,
    text_max: usize,
}

/// Default of `text_max`.
pub(crate) const TEXT_MAX: usize = 2 << 20;

/// Bytes of memory that the library takes for each byte of a text: offsets of all bytes, words and
/// tokens. At most 250 were measured.
pub(crate) const MEMORY: usize = 256;

impl Tokenize {
    /// Rows of up to `max` tokens.
    pub fn new(tokenizer: Tokenizer, max: usize) -> Self {
        Self {
            tokenizer,
            name: "input_ids".into(),
            max,
            dtype: DType::I32,
            special: true,
            cut: None,
            text_max: TEXT_MAX,
        }
    }

    /// The dtype of the ids: `U16`, `I32` (default), `U32` or `I64`.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// `false` leaves out the special tokens around the text. Default: `true`.
    #[must_use]
    pub fn special_tokens(mut self, special: bool) -> Self {
        self.special = special;
        self
    }

    /// Keeps the first tokens of a longer text, as `truncation=True` of `transformers` does. The
    /// special tokens stay.
    #[must_use]
    pub fn cut(mut self) -> Self {
        self.cut = Some(TruncationDirection::Right);
        self
    }

    /// Keeps the last tokens of a longer text.
    #[must_use]
    pub fn cut_left(mut self) -> Self {
        self.cut = Some(TruncationDirection::Left);
        self
    }

    /// Maximum bytes of a text; 2 MiB by default. Each worker may need 256 times as much memory, so
    /// that a tight memory budget allows less.
    #[must_use]
    pub fn text_max(mut self, bytes: usize) -> Self {
        self.text_max = bytes;
        self
    }

    /// The name of the output field instead of `input_ids`.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
}

/// Refuses a dtype that cannot hold all ids.
pub(crate) fn check_dtype(tokenizer: &Tokenizer, dtype: DType) -> Result<()> {
    let end = match dtype {
        DType::U16 => 1 << 16,
        DType::I32 => 1 << 31,
        DType::U32 | DType::I64 => 1 << 32,
        _ => {
            let message = format!("tokens as {dtype}: choose u16, i32, u32 or i64");
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
    };
    if tokenizer.vocabulary() > end {
        let last = tokenizer.vocabulary() - 1;
        let message = format!("the tokenizer has ids up to {last}, more than {dtype} holds");
        return Err(Error::new(ErrorKind::Config, Stage::Build, message));
    }
    Ok(())
}

/// Writes ids that fit the dtype by `check_dtype`.
pub(crate) fn put_ids(ids: &[u32], field: usize, out: &mut Row<'_>) -> Result<()> {
    match out.spec().fields()[field].dtype() {
        DType::U16 => put(ids, |id| id as u16, field, out)?,
        DType::U32 => put(ids, |id| id, field, out)?,
        DType::I64 => put(ids, i64::from, field, out)?,
        _ => put(ids, |id| id as i32, field, out)?,
    }
    // It zeroes the rest of the row, and refuses more ids than there are places.
    out.set_len(field, ids.len())
}

fn put<T: Element>(
    ids: &[u32],
    to: impl Fn(u32) -> T,
    field: usize,
    out: &mut Row<'_>,
) -> Result<()> {
    let places = out.slice_mut::<T>(field)?;
    for (place, id) in places.iter_mut().zip(ids) {
        *place = to(*id);
    }
    Ok(())
}

/// Refuses a text for which the library may need more memory than `limit`.
pub(crate) fn check_text(text: &str, limit: usize) -> Result<()> {
    let len = text.len();
    let most = limit / MEMORY;
    if len > most {
        let message = format!(
            "a text of {len} bytes, the limit is {most}: raise text_max or the memory budget"
        );
        return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
    }
    Ok(())
}

/// The text of a field.
fn text(input: &[u8]) -> Result<&str> {
    std::str::from_utf8(input).map_err(|error| {
        let at = error.valid_up_to();
        Error::decode(format!("not UTF-8 at byte {at} of the text")).with_source(error)
    })
}

impl Decoder for Tokenize {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        let Self { tokenizer, max, .. } = self;
        if input.encoding != Encoding::Bytes {
            return refused(format!(
                "field `{}` is {}, not a text",
                input.name, input.encoding
            ));
        }
        check_dtype(tokenizer, self.dtype)?;
        let around = if self.special { tokenizer.0.around } else { 0 };
        if *max <= around {
            return refused(format!(
                "at most {max} tokens, and {around} of them are special: allow more"
            ));
        }
        Ok(vec![Field::up_to(&self.name, self.dtype, *max)])
    }

    fn scratch_bytes(&self) -> usize {
        self.text_max.saturating_mul(MEMORY)
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let text = text(input)?;
        check_text(text, self.scratch_bytes().min(ctx.scratch_limit()))?;
        let encoding = match self.cut {
            Some(side) => self.tokenizer.cut(text, self.special, self.max, side),
            None => self.tokenizer.encoding(text, self.special),
        }?;
        put_ids(encoding.get_ids(), ctx.fields().start, out)
    }
}

/// An error of the settings.
pub(crate) fn refused<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Build, message))
}

/// Refuses more tokens than a row has.
pub(crate) fn check_len(len: usize, max: usize) -> Result<()> {
    if len > max {
        let message = format!("{len} tokens, at most {max} expected");
        return Err(Error::new(ErrorKind::Shape, Stage::Decode, message));
    }
    Ok(())
}

/// How texts are cut, for an identity.
pub(crate) fn cut_words(max: usize, side: Option<TruncationDirection>) -> [u64; 2] {
    let side = match side {
        None => 0,
        Some(TruncationDirection::Right) => 1,
        Some(TruncationDirection::Left) => 2,
    };
    [max as u64, side]
}

/// The ids of the decoder's rows.
impl ToIds for Tokenize {
    fn ids(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        check_text(text, self.scratch_bytes())?;
        let encoding = match self.cut {
            Some(side) => self.tokenizer.cut(text, self.special, self.max, side),
            None => self.tokenizer.encoding(text, self.special),
        }?;
        check_len(encoding.len(), self.max)?;
        out.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn vocabulary(&self) -> u64 {
        self.tokenizer.vocabulary()
    }

    fn most(&self) -> usize {
        self.max
    }

    fn identity(&self) -> u64 {
        Digest::new("tokenize")
            .word(self.tokenizer.digest())
            .word(self.special.into())
            .words(&cut_words(self.max, self.cut))
            .end()
    }
}
