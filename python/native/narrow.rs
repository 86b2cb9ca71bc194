//! Integers of 64 bits as such of 32, for JAX, which has no others by default.

use feedline::decode::{Ctx, Decoder};
use feedline::error::Stage;
use feedline::tensor::{DType, EncodedField, Field, Shape};
use feedline::{Error, ErrorKind, Result, Row};

/// A decoder of raw integers. One that does not fit is an error.
pub struct Narrow;

impl Decoder for Narrow {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        Ok(input.as_raw().map(narrowed).into_iter().collect())
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        copy(input, ctx.fields().start, ctx, out)
    }
}

/// The field with 32 bits, if it has integers of 64.
pub fn narrowed(field: Field) -> Field {
    let dtype = match field.dtype() {
        DType::I64 => DType::I32,
        DType::U64 => DType::U32,
        _ => return field,
    };
    match field.shape() {
        Shape::Fixed(dims) => Field::fixed(field.name(), dtype, dims.clone()),
        Shape::UpTo { max, inner } => Field::rows_up_to(field.name(), dtype, *max, inner.clone()),
    }
}

/// Copies integers of 64 bits into a field of 32.
pub fn copy(input: &[u8], field: usize, ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
    let (values, []) = input.as_chunks() else {
        let name = out.spec().fields()[field].name();
        let bytes = input.len();
        let message = format!("field `{name}` has {bytes} bytes, and each of its numbers has 8");
        return Err(Error::new(ErrorKind::Shape, Stage::Decode, message));
    };
    let signed = out.spec().fields()[field].dtype() == DType::I32;
    let bytes: &mut Vec<u8> = ctx.scratch().get();
    bytes.clear();
    for value in values {
        let narrow = if signed {
            i32::try_from(i64::from_ne_bytes(*value)).map(i32::to_ne_bytes)
        } else {
            u32::try_from(u64::from_ne_bytes(*value)).map(u32::to_ne_bytes)
        };
        let Ok(narrow) = narrow else {
            let name = out.spec().fields()[field].name();
            let value = if signed {
                i64::from_ne_bytes(*value).into()
            } else {
                i128::from(u64::from_ne_bytes(*value))
            };
            let message = format!(
                "field `{name}` has {value}, which 32 bits do not hold: take 64 (JAX: jax_enable_x64)"
            );
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        };
        bytes.extend(narrow);
    }
    out.copy_from(field, bytes)
}
