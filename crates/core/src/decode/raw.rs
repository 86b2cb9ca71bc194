//! Raw fields: the bytes are the row. The pipeline reads such fields in place where alignment
//! allows.

use super::{Ctx, Decoder};
use crate::memory::Row;
use crate::tensor::{EncodedField, Field};
use feedline_base::error::{Error, ErrorKind, Result, Stage};

/// Copies the bytes of a raw field into its row. They must fill the row of a fixed field exactly,
/// and may be shorter than the row of an `UpTo` field.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raw;

impl Decoder for Raw {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        input.as_raw().map(|field| vec![field]).ok_or_else(|| {
            let message = format!(
                "field `{}` is {} and needs a decoder",
                input.name, input.encoding
            );
            Error::new(ErrorKind::Config, Stage::Build, message)
        })
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        out.copy_from(ctx.fields().start, input)
    }
}
