//! Opaque bytes and text, delivered undecoded.

use super::{Ctx, Decoder};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::Row;
use crate::tensor::{DType, EncodedField, Encoding, Field};

/// Delivers encoded bytes (text, JSON, any file) undecoded, as a `u8` vector of up to `max` bytes.
///
/// Zeros pad it; [`FieldView::lens`](crate::FieldView::lens) gives its true length.
///
/// `builder.decode_field("caption", Bytes::up_to(512))`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    max: usize,
    cut: bool,
}

impl Bytes {
    /// Rows of at most `max` bytes. A longer sample is an error ([`ErrorKind::Shape`]).
    pub fn up_to(max: usize) -> Self {
        Self { max, cut: false }
    }

    /// Rows of at most `max` bytes. A longer sample is truncated.
    pub fn cut_to(max: usize) -> Self {
        Self { max, cut: true }
    }
}

impl Decoder for Bytes {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        if self.max == 0 {
            let message = format!("field `{}` as bytes: the maximum is 0, but it must be at least 1", input.name);
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        match input.encoding {
            Encoding::Bytes | Encoding::Image => Ok(vec![Field::up_to(&input.name, DType::U8, self.max)]),
            _ => {
                let message = format!("field `{}` is raw: leave out its decoder", input.name);
                Err(Error::new(ErrorKind::Config, Stage::Build, message))
            }
        }
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let input = if self.cut { &input[..input.len().min(self.max)] } else { input };
        out.copy_from(ctx.fields().start, input)
    }
}
