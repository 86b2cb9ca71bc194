//! Opaque bytes and text, delivered as they are.

use super::{Ctx, Decoder};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::Row;
use crate::tensor::{DType, EncodedField, Encoding, Field};

/// Delivers encoded bytes (text, JSON, a file of any kind) undecoded: a `u8` vector of up to `max` bytes, padded with
/// zeros, with its true length beside it ([`FieldView::lens`](crate::FieldView::lens)).
///
/// `builder.decode_field("caption", Bytes::up_to(512))`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    max: usize,
    cut: bool,
}

impl Bytes {
    /// Rows of at most `max` bytes; a longer sample is an error ([`ErrorKind::Shape`]).
    pub fn up_to(max: usize) -> Self {
        Self { max, cut: false }
    }

    /// Rows of at most `max` bytes; of a longer sample the first ones.
    pub fn cut_to(max: usize) -> Self {
        Self { max, cut: true }
    }
}

impl Decoder for Bytes {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        if self.max == 0 {
            let message = format!("field `{}` as at most 0 bytes", input.name);
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        match input.encoding {
            Encoding::Bytes | Encoding::Image => Ok(vec![Field::up_to(&input.name, DType::U8, self.max)]),
            _ => {
                let message = format!("field `{}` is raw and needs no decoder", input.name);
                Err(Error::new(ErrorKind::Config, Stage::Build, message))
            }
        }
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let input = if self.cut { &input[..input.len().min(self.max)] } else { input };
        out.copy_from(ctx.fields().start, input)
    }
}
