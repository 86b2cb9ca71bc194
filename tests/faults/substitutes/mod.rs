//! Which samples stand in for those that cannot be had, what their rows hold, and what else goes on while they are
//! looked for. What makes a sample bad, the budget and the ledger's entries are in `bad_samples.rs`.

mod datasets;

/// Which samples stand in, for every kind of dataset and order.
mod draws;

/// What the rows hold.
mod rows;

/// The ledger, its file and its words.
mod ledger;

/// How long it may take, and how it ends.
mod ends;

use crate::common::*;
use feedline::dataset::Records;
use feedline::decode::Ctx;
use feedline::{Batch, Error, OnBadSample, Result, Row};

const ALL: OnBadSample = OnBadSample::Substitute { budget: u64::MAX };

/// A transform that has something against these samples.
fn refuse(bad: &[u64]) -> impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static {
    let bad = bad.to_vec();
    move |_, ctx| if bad.contains(&ctx.id()) { Err(Error::user("refused")) } else { Ok(()) }
}

/// Samples of one byte, in memory.
fn bytes(count: usize) -> Records {
    Records::builder(1).open_bytes(vec![7; count]).unwrap()
}

/// For each batch of samples that hold their ids: what was delivered, and its status.
fn delivered(batches: impl Iterator<Item = Result<Batch>>) -> Vec<Vec<(u64, u8)>> {
    let mut out = Vec::new();
    for batch in batches {
        let batch = batch.unwrap();
        assert!(rows(&batch).iter().all(|(id, bytes)| *bytes == id.to_ne_bytes()), "a row holds another sample");
        out.push(batch.ids().iter().copied().zip(batch.status().iter().copied()).collect());
    }
    out
}

/// Samples of an epoch that ends well.
fn pulled(batches: impl Iterator<Item = Result<Batch>>) -> usize {
    batches.map(|batch| batch.unwrap_or_else(|error| panic!("{error}")).len()).sum()
}
