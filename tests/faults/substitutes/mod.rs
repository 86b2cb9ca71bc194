//! Substitutes for bad samples: their choice, the content of their rows, and other work during the
//! search. The causes of bad samples, the budget and the ledger's entries are in `bad_samples.rs`.

mod datasets;

/// Choice of substitutes, for every kind of dataset and order.
mod draws;

/// Content of the rows.
mod rows;

/// The ledger, its file and its messages.
mod ledger;

/// Duration and end of the search.
mod ends;

use crate::common::*;
use feedline::dataset::Records;
use feedline::decode::Ctx;
use feedline::{Batch, Error, OnBadSample, Result, Row};

const ALL: OnBadSample = OnBadSample::Substitute { budget: u64::MAX };

/// A transform that refuses these samples.
fn refuse(
    bad: &[u64],
) -> impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static {
    let bad = bad.to_vec();
    move |_, ctx| {
        if bad.contains(&ctx.id()) {
            Err(Error::user("refused"))
        } else {
            Ok(())
        }
    }
}

/// Samples of one byte, in memory.
fn bytes(count: usize) -> Records {
    Records::builder(1).open_bytes(vec![7; count]).unwrap()
}

/// Delivered ids and status of each batch, for samples that hold their ids.
fn delivered(batches: impl Iterator<Item = Result<Batch>>) -> Vec<Vec<(u64, u8)>> {
    let mut out = Vec::new();
    for batch in batches {
        let batch = batch.unwrap();
        assert!(
            rows(&batch)
                .iter()
                .all(|(id, bytes)| *bytes == id.to_ne_bytes()),
            "a row holds another sample"
        );
        out.push(
            batch
                .ids()
                .iter()
                .copied()
                .zip(batch.status().iter().copied())
                .collect(),
        );
    }
    out
}

/// Samples of an epoch without an error.
fn pulled(batches: impl Iterator<Item = Result<Batch>>) -> usize {
    batches
        .map(|batch| batch.unwrap_or_else(|error| panic!("{error}")).len())
        .sum()
}
