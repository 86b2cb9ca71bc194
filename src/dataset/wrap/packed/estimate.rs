//! Estimated lengths: documents are packed before they are tokenised.
//!
//! ```text
//! 2,048 documents ──read, opened──► bytes, tokens ──least squares──► tokens ≈ base + slope × bytes, spread
//! row of R tokens: a bin of R - spread × √(documents in a row), the rest is for bad luck
//! ```
//!
//! The numbers are kept with the bins, in 65,536ths, and are a part of the dataset's identity: all
//! processes pack alike, also after a resume.

use super::table::{self, KIND};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::sample::Plain;
use feedline_core::dataset::{Dataset, Parts, TokenFields};
use feedline_core::order::{Key, Permutation};
use feedline_core::storage::sidefile::{SideFound, Sidefile};
use std::path::Path;

/// Documents that are read.
const SAMPLE: u64 = 2048;
/// Documents that a thread reads at once.
const RUN: usize = 16;
const ONE: f64 = 65_536.0;

/// How many tokens a document has, by its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Estimate {
    base: i64,
    slope: i64,
    /// Tokens that a row keeps free.
    pub(super) margin: i64,
}

impl Estimate {
    /// The estimate that is kept with the bins, or one of the documents.
    ///
    /// Errors: reading errors; [`ErrorKind::Empty`] if no document that was tried can be read.
    pub(super) fn of(
        inner: &dyn Dataset,
        fields: &TokenFields,
        room: usize,
        place: &Path,
    ) -> Result<Self> {
        if let Ok(SideFound::Whole(file)) = Sidefile::open(place, KIND)
            && let Some(kept) = table::estimate(&file)
        {
            return Ok(bytemuck::cast(kept));
        }
        let order = Permutation::new(inner.len(), Key::new(0).named("estimate"));
        let tried: Vec<u64> = (0..inner.len().min(SAMPLE))
            .map(|at| order.get(at))
            .collect();
        let runs = parallel(tried.chunks(RUN), |_, some| {
            let mut plain = Plain::new(inner);
            let measured = some
                .iter()
                .map(|document| measure(inner, fields, &mut plain, *document));
            measured.collect::<Result<Vec<_>>>()
        })?;
        let found: Vec<(f64, f64)> = runs.into_iter().flatten().flatten().collect();
        match found.is_empty() {
            false => Ok(Self::fit(&found, room as f64)),
            true => {
                let message = "none of the documents that were tried can be read";
                Err(Error::new(ErrorKind::Empty, Stage::Index, message))
            }
        }
    }

    /// Least squares over pairs of bytes and tokens.
    fn fit(found: &[(f64, f64)], room: f64) -> Self {
        let bytes = mean(found, |one| one.0);
        let tokens = mean(found, |one| one.1);
        let variance = mean(found, |one| (one.0 - bytes) * (one.0 - bytes));
        let together = mean(found, |one| (one.0 - bytes) * (one.1 - tokens));
        let slope = if variance > 0.0 {
            (together / variance).max(0.0)
        } else {
            0.0
        };
        let base = tokens - slope * bytes;
        let square = mean(found, |one| (one.1 - base - slope * one.0).powi(2));
        let documents = room / tokens.max(1.0);
        let margin = (square * documents.max(1.0)).sqrt().ceil().min(room / 4.0);
        Self {
            base: (base * ONE).round() as i64,
            slope: (slope * ONE).round() as i64,
            margin: margin as i64,
        }
    }

    /// Tokens of a document of so many stored bytes, at least 1.
    pub(super) fn tokens(self, bytes: u64) -> u64 {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let tokens = self.slope.saturating_mul(bytes).saturating_add(self.base) >> 16;
        tokens.max(1).cast_unsigned()
    }

    /// Its numbers, for an identity.
    pub(super) fn words(self) -> [u64; 3] {
        [self.base, self.slope, self.margin].map(i64::cast_unsigned)
    }
}

fn mean(found: &[(f64, f64)], of: impl Fn(&(f64, f64)) -> f64) -> f64 {
    found.iter().map(of).sum::<f64>() / found.len() as f64
}

/// Stored bytes and tokens of a document; `None` for a damaged one.
fn measure(
    inner: &dyn Dataset,
    fields: &TokenFields,
    plain: &mut Plain<'_>,
    document: u64,
) -> Result<Option<(f64, f64)>> {
    let number = fields.numbers[0];
    let mut parts = Parts::new();
    inner.extents(document, &mut parts)?;
    let own = parts.iter().find(|one| one.field == number);
    let bytes = own.map_or(0, |one| one.part.len());
    let mut tokens = 0;
    let read = plain.sample(document, |field, bytes| {
        if field == number {
            tokens = bytes.len() / fields.fields[0].dtype().size();
        }
        Ok(())
    });
    match read {
        Ok(()) => Ok(Some((bytes as f64, tokens as f64))),
        Err(error) if error.stage() == Stage::Decode => Ok(None),
        Err(error) => Err(error),
    }
}
