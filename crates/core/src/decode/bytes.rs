//! Opaque bytes and text, delivered undecoded.

use super::{Ctx, Decoder};
use crate::memory::Row;
use crate::tensor::{DType, EncodedField, Encoding, Field};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;

/// Delivers encoded bytes (text, JSON, any file) undecoded, as a `u8` vector of up to `max` bytes.
///
/// Each row is padded with zeros; `FieldView::lens` gives its true length.
///
/// `builder.decode_field("caption", Bytes::up_to(512))`
///
/// [`Bytes::packed`] stores the rows side by side without padding, so pictures can stay encoded in
/// a batch:
///
/// ```
/// # use feedline_core::decode::Bytes;
/// // JPEGs of at most 16 MiB each, and at most 64 MiB per batch.
/// let encoded = Bytes::packed(16 << 20).batch_bytes(64 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    max: usize,
    cut: bool,
    /// `Some` for packed rows; the inner value is the declared maximum of bytes per batch.
    packed: Option<Option<usize>>,
}

impl Bytes {
    /// Rows of at most `max` bytes. A longer sample is an error ([`ErrorKind::Shape`]).
    pub fn up_to(max: usize) -> Self {
        Self {
            max,
            cut: false,
            packed: None,
        }
    }

    /// Rows of at most `max` bytes. A longer sample is truncated.
    pub fn cut_to(max: usize) -> Self {
        Self {
            max,
            cut: true,
            packed: None,
        }
    }

    /// Rows of at most `max` bytes, side by side without padding.
    ///
    /// The field is a `u8` vector of all bytes of the batch, with the start of each row
    /// (`FieldView::offsets`). Only these bytes are copied to a
    /// device.
    ///
    /// A slot holds rows × `max` bytes, or [`batch_bytes`](Self::batch_bytes). A sample is an error
    /// ([`ErrorKind::Shape`]) if it exceeds `max`, or does not fit into the slot. Blank rows have
    /// length 0.
    ///
    /// If the index has lengths, a sample whose length
    /// differs from its indexed length is an error, too, and substitutes have length 0.
    pub fn packed(max: usize) -> Self {
        Self {
            max,
            cut: false,
            packed: Some(None),
        }
    }

    /// Maximum bytes of all rows of a batch together; at least the `max` of one row.
    ///
    /// Use it for [`packed`](Self::packed) rows whose maximum is far above their mean. The index
    /// must have the rows' lengths: this excludes chunks (Parquet), and framed fields unless they
    /// were measured.
    #[must_use]
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.packed = Some(Some(bytes));
        self
    }
}

impl Decoder for Bytes {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        if self.max == 0 {
            let message = format!(
                "field `{}` as bytes: the maximum is 0, but it must be at least 1",
                input.name
            );
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        if let Some(Some(bytes)) = self
            .packed
            .filter(|bytes| bytes.is_some_and(|bytes| bytes < self.max))
        {
            let message = format!(
                "field `{}`: batch_bytes is {bytes}, less than the {} of one row",
                input.name, self.max
            );
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        match (&input.encoding, self.packed) {
            (Encoding::Bytes | Encoding::Image, None) => {
                Ok(vec![Field::up_to(&input.name, DType::U8, self.max)])
            }
            (Encoding::Bytes | Encoding::Image, Some(batch)) => {
                Ok(vec![Field::packed(&input.name, self.max, batch)])
            }
            (Encoding::List { .. }, _) => {
                let how = Setting::Each.hint(|each| format!(": decode it with {each}"));
                let message = format!("field `{}` is {}{how}", input.name, input.encoding);
                Err(Error::new(ErrorKind::Config, Stage::Build, message))
            }
            (Encoding::Raw { .. }, _) => {
                let message = format!("field `{}` is raw: leave out its decoder", input.name);
                Err(Error::new(ErrorKind::Config, Stage::Build, message))
            }
        }
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let input = if self.cut {
            &input[..input.len().min(self.max)]
        } else {
            input
        };
        out.copy_from(ctx.fields().start, input)
    }
}
