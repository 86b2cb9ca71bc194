//! The largest token id of a dataset: it shows tokens that are read with a wrong type.

use feedline::Row;
use feedline::dataset::{Dataset, DatasetExt};
use feedline::decode::{Ctx, Decoder, Raw};
use feedline::tensor::{DType, EncodedField, Field};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

pub const FIELD: &str = "tokens";

/// Samples that are looked at without --verify.
const SOME: u64 = 64;

/// Notes the largest id of the rows that pass through it.
#[derive(Clone)]
pub struct Largest {
    dtype: DType,
    most: Arc<AtomicI64>,
    /// Whether a token at an odd place is not 0.
    odd: Arc<AtomicBool>,
}

impl Largest {
    /// Of the field `tokens`, if the dataset has it.
    pub fn of(dataset: &dyn Dataset) -> Option<Self> {
        let field = dataset
            .schema()
            .iter()
            .find(|field| field.name == FIELD)?
            .as_raw()?;
        Some(Self {
            dtype: field.dtype(),
            most: Arc::new(AtomicI64::new(i64::MIN)),
            odd: Arc::default(),
        })
    }

    fn note(&self, row: &[u8]) {
        let numbers = row.chunks_exact(self.dtype.size()).map(|bytes| {
            let value = bytes
                .iter()
                .rev()
                .fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
            let signed = matches!(self.dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
            let above = 64 - 8 * bytes.len();
            if signed {
                (value << above) as i64 >> above
            } else {
                i64::try_from(value).unwrap_or(i64::MAX)
            }
        });
        if row
            .chunks_exact(self.dtype.size())
            .skip(1)
            .step_by(2)
            .any(|token| token.iter().any(|byte| *byte > 0))
        {
            self.odd.store(true, Ordering::Relaxed);
        }
        self.most
            .fetch_max(numbers.max().unwrap_or(i64::MIN), Ordering::Relaxed);
    }

    pub fn said(&self) -> String {
        match self.most.load(Ordering::Relaxed) {
            i64::MIN => "none".into(),
            most if most > 0 && !self.odd.load(Ordering::Relaxed) => {
                format!(
                    "the largest id is {most}, as {}; every second is 0: they may have twice the bytes",
                    self.dtype
                )
            }
            most => format!("the largest id is {most}, as {}", self.dtype),
        }
    }

    /// The largest id of some samples, from the first to the last.
    pub fn in_some(&self, dataset: &Arc<dyn Dataset>) -> feedline::Result<String> {
        let some = dataset.len().min(SOME);
        for number in 0..some {
            let id = number * dataset.len() / some;
            self.note(&dataset.read_sample(id)?.concat());
        }
        Ok(format!(
            "{} in {some} of {} samples; --verify looks at all",
            self.said(),
            dataset.len()
        ))
    }
}

impl Decoder for Largest {
    fn outputs(&self, input: &EncodedField) -> feedline::Result<Vec<Field>> {
        Raw.outputs(input)
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> feedline::Result<()> {
        self.note(input);
        Raw.decode(input, ctx, out)
    }
}
