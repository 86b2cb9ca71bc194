//! Parts of a dataset as pure maps from local index to sample id: a random split, or a list.

use super::{Key, Permutation, out_of_range};
use crate::error::{Error, ErrorKind, Result, Stage};
use std::sync::Arc;

/// A random cut of `0..n` in two parts, in constant memory: the first `cut` entries of a keyed permutation and the rest.
///
/// It depends on (n, fraction, key) alone. With the same `n` and key, the first part of a smaller fraction lies within
/// the first part of a larger one, so a training set can grow without taking samples from what was held out longest.
#[derive(Clone, Debug)]
pub(crate) struct Split {
    permutation: Permutation,
    cut: u64,
}

impl Split {
    /// The first part has `fraction` of `n` samples, rounded to the nearest whole number, halves up; so either part may be
    /// empty. Above 2^53 samples the size is that of the nearest `f64`. Errors: [`ErrorKind::Config`] unless
    /// 0 ≤ fraction ≤ 1.
    pub(crate) fn new(n: u64, fraction: f64, key: Key) -> Result<Self> {
        if !(0.0..=1.0).contains(&fraction) {
            let message = format!("the fraction of a split must lie between 0 and 1, not {fraction}");
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        // `as` saturates; the product may round to above n.
        let cut = ((n as f64 * fraction).round() as u64).min(n);
        Ok(Self { permutation: Permutation::new(n, key.named("split")), cut })
    }

    /// The two parts: disjoint, and together everything.
    pub(crate) fn parts(self) -> (Part, Part) {
        let (n, cut) = (self.permutation.len(), self.cut);
        let first = Part { permutation: self.permutation.clone(), start: 0, len: cut };
        (first, Part { permutation: self.permutation, start: cut, len: n - cut })
    }
}

/// One part of a [`Split`]. Local indices run through it in an **arbitrary** (random, but fixed) order, not in that of
/// the ids: ascending order would take memory or a search per index.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    permutation: Permutation,
    start: u64,
    len: u64,
}

impl Part {
    /// Samples of the part.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The sample id at `local`, which must be below `len`.
    pub(crate) fn id(&self, local: u64) -> u64 {
        assert!(local < self.len, "index {local} of a part of {}", self.len);
        self.permutation.get(self.start + local)
    }

    /// Where a sample of the whole stands in this part; `None` when it is in the other. `id` must be below n.
    pub(crate) fn local(&self, id: u64) -> Option<u64> {
        self.permutation.inverse(id).checked_sub(self.start).filter(|local| *local < self.len)
    }
}

/// A listed part of a dataset, in the order listed; repeats are allowed.
#[derive(Clone, Debug)]
pub(crate) struct Ids(Arc<[u64]>);

impl Ids {
    /// Errors: [`ErrorKind::Config`] when an id is not below `n`, naming the first.
    pub(crate) fn new(ids: impl Into<Arc<[u64]>>, n: u64) -> Result<Self> {
        let ids = ids.into();
        if ids.iter().any(|id| *id >= n) {
            return Err(out_of_range("the subset", &ids, n));
        }
        Ok(Self(ids))
    }

    /// Samples of the part.
    pub(crate) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// The sample id at `local`, which must be below `len`.
    pub(crate) fn id(&self, local: u64) -> u64 {
        self.0[local as usize]
    }
}
