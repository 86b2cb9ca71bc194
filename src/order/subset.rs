//! Parts of a dataset as pure maps from local index to sample id: a random split, or a list.

use super::out_of_range;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::order::{Key, Permutation};
use std::sync::Arc;

/// A random split of `0..n` into two disjoint parts that cover it, in constant memory: the first
/// entries of a keyed permutation, and the rest. The first part has `fraction` of `n` samples,
/// rounded to the nearest whole number, halves up; so either part may be empty. Above 2^53 samples
/// the size is computed from the nearest `f64`.
///
/// The split depends on (n, fraction, key) alone. With the same `n` and key, the first part of a
/// larger fraction contains the first part of a smaller fraction. So a training set can grow, and
/// the samples held out longest stay held out.
///
/// Errors: [`ErrorKind::Config`] unless 0 ≤ fraction ≤ 1.
pub(crate) fn split(n: u64, fraction: f64, key: Key) -> Result<(SplitPart, SplitPart)> {
    if !(0.0..=1.0).contains(&fraction) {
        let message = format!("the fraction of a split must lie between 0 and 1, not {fraction}");
        return Err(Error::new(ErrorKind::Config, Stage::Build, message));
    }
    // `as` saturates; the product may round to above n.
    let cut = ((n as f64 * fraction).round() as u64).min(n);
    let permutation = Permutation::new(n, key.named("split"));
    let first = SplitPart {
        permutation: permutation.clone(),
        start: 0,
        len: cut,
    };
    Ok((
        first,
        SplitPart {
            permutation,
            start: cut,
            len: n - cut,
        },
    ))
}

/// One part of a [`split`]. Local indices run through it in an **arbitrary** (random, but fixed)
/// order, not in id order: id order would take memory or a search per index.
#[derive(Clone, Debug)]
pub(crate) struct SplitPart {
    permutation: Permutation,
    start: u64,
    len: u64,
}

impl SplitPart {
    /// Samples of the part.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The sample id at `local`, which must be below `len`.
    pub(crate) fn id(&self, local: u64) -> u64 {
        assert!(local < self.len, "index {local} of a part of {}", self.len);
        self.permutation.get(self.start + local)
    }

    /// The part's first index in the permutation.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }
}

/// A listed part of a dataset of `n` samples, in the order listed; repeats are allowed. Errors:
/// [`ErrorKind::Config`] with the first id that is not below `n`.
pub(crate) fn listed(ids: Vec<u64>, n: u64) -> Result<Arc<[u64]>> {
    if ids.iter().any(|id| *id >= n) {
        return Err(out_of_range("the subset", &ids, n));
    }
    Ok(ids.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    impl SplitPart {
        /// The index of a sample (below n) in this part; `None` when it is in the other.
        fn local(&self, id: u64) -> Option<u64> {
            self.permutation
                .inverse(id)
                .checked_sub(self.start)
                .filter(|local| *local < self.len)
        }
    }

    fn members(part: &SplitPart) -> Vec<u64> {
        (0..part.len()).map(|local| part.id(local)).collect()
    }

    #[test]
    fn the_parts_of_a_split_are_disjoint_and_exhaustive() {
        for n in [0, 1, 2, 10, 1000, 1025, 2500] {
            for fraction in [0.0, 0.1, 0.5, 0.8, 1.0] {
                let (first, second) = split(n, fraction, Key::new(n)).unwrap();
                assert_eq!(first.len(), (n as f64 * fraction).round() as u64);
                let mut all = [members(&first), members(&second)].concat();
                for (local, id) in all.iter().enumerate() {
                    let local = local as u64;
                    let in_first = first.local(*id);
                    let in_second = second.local(*id);
                    assert_eq!(
                        in_first.or(in_second.map(|at| at + first.len())),
                        Some(local)
                    );
                    assert!(in_first.is_none() || in_second.is_none());
                }
                all.sort_unstable();
                assert_eq!(all, (0..n).collect::<Vec<u64>>());
            }
        }
    }

    #[test]
    fn a_split_depends_on_its_key_alone_and_grows_with_the_fraction() {
        let first = |fraction, seed| members(&split(2000, fraction, Key::new(seed)).unwrap().0);
        assert_eq!(first(0.3, 1), first(0.3, 1));
        assert_ne!(first(0.3, 1), first(0.3, 2));
        assert_eq!(first(0.3, 1)[..], first(0.5, 1)[..600]);
    }

    #[test]
    fn a_split_does_not_follow_the_shuffle_of_the_same_seed() {
        let order = super::super::Order::shuffled(1)
            .preview(2000, 0, 1000)
            .unwrap();
        let part = members(&split(2000, 0.5, Key::new(1)).unwrap().0);
        let common = order.iter().filter(|id| part.contains(id)).count();
        // Hypergeometric: mean 500, sd 11.2; 57 is 5 sd.
        assert!(common.abs_diff(500) < 57, "{common}");
    }

    #[test]
    fn a_split_of_10_to_the_18_samples_is_ready_at_once() {
        let n = 1_000_000_000_000_000_000;
        let (first, second) = split(n, 0.999, Key::new(1)).unwrap();
        assert_eq!(first.len() + second.len(), n);
        assert_eq!(first.local(second.id(0)), None);
        assert_eq!(second.local(second.id(9)), Some(9));
    }

    #[test]
    fn a_fraction_outside_of_0_to_1_is_refused() {
        for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let error = split(10, fraction, Key::new(0)).unwrap_err();
            assert_eq!(
                (error.kind(), error.stage()),
                (ErrorKind::Config, Stage::Build)
            );
        }
        let error = split(10, 1.5, Key::new(0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "build: bad configuration: the fraction of a split must lie between 0 and 1, not 1.5"
        );
    }

    #[test]
    fn halves_round_up() {
        let cut = |n, fraction| split(n, fraction, Key::new(0)).unwrap().0.len();
        assert_eq!(
            [cut(1, 0.5), cut(3, 0.5), cut(5, 0.5), cut(10, 0.04)],
            [1, 2, 3, 0]
        );
        assert_eq!(cut(u64::MAX, 1.0), u64::MAX);
    }

    #[test]
    fn a_list_keeps_its_order_and_refuses_ids_outside_the_dataset() {
        assert_eq!(*listed(vec![3, 1, 3], 4).unwrap(), [3, 1, 3]);
        let error = listed(vec![3, 4], 4).unwrap_err();
        assert_eq!(
            error.to_string(),
            "build: bad configuration: entry 1 of the subset is 4, but the dataset has 4 samples: \
             sample=4"
        );
    }
}
