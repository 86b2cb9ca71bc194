//! Draws by weights: the sample at a position of an epoch, in constant time and from any position.
//!
//! ```text
//! with replacement:     weights ──► alias table; (key of the epoch, position) ──► column, fraction ──► sample or its alias
//! without replacement:  (key of the epoch, sample), weight ──► time; samples by time, the earliest first
//! ```
//!
//! Invariants, tested:
//! - A sample of weight 0 is never drawn.
//! - The table is exact to 2^-32 of the mean weight. It is the same on every machine, because it is
//!   computed by additions and divisions alone, in a fixed order.
//! - With replacement an epoch costs nothing at its start. Without replacement, it computes a
//!   random number for each sample and sorts these numbers, and it keeps 4 bytes for each position
//!   while the epoch lives.

#[cfg(doc)]
use feedline_base::error::ErrorKind;
use feedline_base::error::{Result, config};
use feedline_core::order::{Draws, Key, identity_of};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

/// Weights of the samples of a dataset, for [`Order::weighted`](super::Order::weighted). Cheap to
/// clone; 8 bytes for each sample.
///
/// ```
/// use feedline::order::{Order, Weights};
///
/// // Sample 0 three times as often as sample 1, sample 2 never.
/// let order = Order::weighted(7, Weights::new(&[3.0, 1.0, 0.0])?.draws(1000));
/// let ids = order.preview(3, 0, 1000)?;
/// let often = ids.iter().filter(|id| **id == 0).count();
/// assert!((700..800).contains(&often) && !ids.contains(&2), "{often}");
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone)]
pub struct Weights {
    by: By,
    draws: u64,
    /// Hash of the weights.
    hash: u64,
    /// Number of samples with a weight above 0.
    possible: u64,
}

#[derive(Clone)]
enum By {
    /// With replacement.
    Table(Arc<[Column]>),
    /// Without replacement: the weights themselves.
    Times(Arc<[f64]>),
}

/// A column of the alias table: all columns are equally likely.
#[derive(Clone, Copy)]
pub(super) struct Column {
    /// Fractions below this threshold, in units of 2^-32, give the column's own sample.
    own: u32,
    /// The sample that all other fractions give.
    alias: u32,
}

/// Number of units in a column: a fraction is counted in units of 2^-32.
const FRACTION: f64 = 4_294_967_296.0;

impl Weights {
    /// A weight for each sample of the dataset, in any unit: a sample of weight 2 is drawn twice as
    /// often as one of weight 1. An epoch has as many draws as samples, unless
    /// [`draws`](Self::draws) sets another number.
    ///
    /// Errors: [`ErrorKind::Config`] for a negative or non-finite weight (the message names its
    /// sample), if the sum of the weights is 0 or infinite, and for 2^32 or more samples.
    pub fn new(weights: &[f64]) -> Result<Self> {
        let sum = checked_sum(weights)?;
        let mean = sum / weights.len() as f64;
        Ok(Self::drawn(By::Table(table(weights, mean)), weights))
    }

    /// Like [`new`](Self::new), but an epoch draws each sample at most once: the first by the
    /// weights, the next by the weights of the remaining samples, and so on. Sorts the samples at
    /// the start of each epoch.
    ///
    /// Errors: see [`new`](Self::new).
    pub fn without_replacement(weights: impl Into<Arc<[f64]>>) -> Result<Self> {
        let weights = weights.into();
        checked_sum(&weights)?;
        Ok(Self::drawn(By::Times(Arc::clone(&weights)), &weights))
    }

    fn drawn(by: By, weights: &[f64]) -> Self {
        Self {
            by,
            draws: weights.len() as u64,
            hash: identity_of(weights.iter().map(|weight| weight.to_bits())),
            possible: weights.iter().filter(|weight| **weight > 0.0).count() as u64,
        }
    }

    /// Weights that draw every class equally often, and within a class every sample equally often.
    /// `classes[i]` is the class of sample `i`.
    ///
    /// Errors: [`ErrorKind::Config`] for no samples, and for 2^32 or more samples.
    pub fn balanced<C: Eq + Hash>(classes: &[C]) -> Result<Self> {
        let mut counts = HashMap::new();
        for class in classes {
            *counts.entry(class).or_insert(0_u64) += 1;
        }
        let weights: Vec<f64> = classes
            .iter()
            .map(|class| 1.0 / counts[class] as f64)
            .collect();
        Self::new(&weights)
    }

    /// The number of draws of an epoch. Default: the number of samples.
    #[must_use]
    pub fn draws(mut self, draws: u64) -> Self {
        self.draws = draws;
        self
    }

    /// Number of draws in an epoch over a dataset of `len` samples.
    ///
    /// Errors: [`ErrorKind::Config`] if the number of weights is not the number of samples, or if
    /// there are more draws without replacement than samples with a weight above 0.
    pub(super) fn len(&self, len: u64) -> Result<u64> {
        let count = self.count();
        if count != len {
            return Err(config(format!(
                "the order has {count} weights, the dataset has {len} samples: give one for each"
            )));
        }
        if self.is_once() && self.draws > self.possible {
            return Err(config(format!(
                "{} draws without replacement, and {} samples have a weight above 0: draw fewer, or \
                 with replacement",
                self.draws, self.possible
            )));
        }
        Ok(self.draws)
    }

    /// A hash of everything that decides which samples are drawn, except the seed.
    pub(super) fn identity(&self) -> u64 {
        identity_of([self.hash, self.draws, u64::from(self.is_once())])
    }

    /// The draws of an epoch.
    pub(super) fn epoch(&self, seed: u64, epoch: u64) -> Drawing {
        let key = Key::new(seed).named("weighted").derive(epoch);
        match &self.by {
            By::Table(table) => Drawing::Table(Arc::clone(table), key),
            By::Times(weights) => Drawing::Ids(earliest(weights, self.draws as usize, key)),
        }
    }

    fn is_once(&self) -> bool {
        matches!(self.by, By::Times(_))
    }

    /// The number of weights.
    fn count(&self) -> u64 {
        match &self.by {
            By::Table(table) => table.len() as u64,
            By::Times(weights) => weights.len() as u64,
        }
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} draws by {} weights", self.draws, self.count())
    }
}

/// The samples of one epoch.
#[derive(Clone)]
pub(super) enum Drawing {
    Table(Arc<[Column]>, Key),
    Ids(Arc<[u32]>),
}

impl Drawing {
    pub(super) fn id(&self, position: u64) -> u64 {
        match self {
            Self::Ids(ids) => ids[position as usize].into(),
            Self::Table(table, key) => {
                // One random word gives both column and fraction: with fewer than 2^32 columns,
                // more than 32 bits are left for the fraction.
                let word = Draws::from_key(key.derive(position)).next_u64();
                let product = u128::from(word) * table.len() as u128;
                let column = (product >> 64) as usize;
                let fraction = (product as u64 >> 32) as u32;
                let Column { own, alias } = table[column];
                if fraction < own {
                    column as u64
                } else {
                    alias.into()
                }
            }
        }
    }

    /// Heap bytes of this epoch alone.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Table(..) => 0,
            Self::Ids(ids) => size_of_val(&**ids),
        }
    }
}

impl fmt::Debug for Drawing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(table, _) => write!(f, "a table of {} weights", table.len()),
            Self::Ids(ids) => write!(f, "{} samples drawn once", ids.len()),
        }
    }
}

/// The sum of the weights. Errors: [`ErrorKind::Config`], see [`Weights::new`].
fn checked_sum(weights: &[f64]) -> Result<f64> {
    let count = weights.len();
    if count as u64 > u64::from(u32::MAX) {
        let message = format!("{count} weights; at most {} are possible", u32::MAX);
        return Err(config(message));
    }
    let illegal = weights
        .iter()
        .position(|weight| !weight.is_finite() || *weight < 0.0);
    if let Some(sample) = illegal {
        let message = format!(
            "the weight of sample {sample} is {}: give a finite number of at least 0",
            weights[sample]
        );
        return Err(config(message).with_sample(sample as u64));
    }
    let sum: f64 = weights.iter().sum();
    if sum > 0.0 && sum.is_finite() {
        Ok(sum)
    } else {
        let message = format!("the sum of {count} weights is {sum}: no sample can be drawn");
        Err(config(message))
    }
}

/// The alias table (Walker). Each column holds the mean weight: one sample of at most this weight,
/// filled up with a share of a heavier sample.
///
/// Two cursors sweep over the samples, one over the light and one over the heavy ones (Hübschle-Schneider
/// and Sanders), so that nothing but the table takes memory.
fn table(weights: &[f64], mean: f64) -> Arc<[Column]> {
    let count = weights.len();
    let next =
        |from: usize, heavy: bool| (from..count).find(|sample| (weights[*sample] > mean) == heavy);
    // A column that the code below does not fill belongs entirely to its own sample.
    let mut table: Vec<Column> = (0..count as u32)
        .map(|sample| Column {
            own: u32::MAX,
            alias: sample,
        })
        .collect();
    let own = |weight: f64| (weight / mean * FRACTION).min(f64::from(u32::MAX)) as u32;
    let mut light = next(0, false);
    let mut heavy = next(0, true);
    let mut last_heavy = heavy.unwrap_or(0);
    // The weight of the heavy sample that is not yet assigned to a column.
    let mut rest = heavy.map_or(0.0, |sample| weights[sample]);
    while let Some(donor) = heavy {
        last_heavy = donor;
        if rest > mean {
            let Some(sample) = light else { break };
            table[sample] = Column {
                own: own(weights[sample]),
                alias: donor as u32,
            };
            rest -= mean - weights[sample];
            light = next(sample + 1, false);
        } else {
            // The heavy sample has become light: the next heavy one fills its column.
            heavy = next(donor + 1, true);
            if let Some(sample) = heavy {
                table[donor] = Column {
                    own: own(rest),
                    alias: sample as u32,
                };
                rest = weights[sample] - (mean - rest);
            }
        }
    }
    // Rounding may leave light samples. Those below the mean keep their share of the column, and
    // the last heavy sample gets the rest.
    while let Some(sample) = light {
        if weights[sample] < mean {
            table[sample] = Column {
                own: own(weights[sample]),
                alias: last_heavy as u32,
            };
        }
        light = next(sample + 1, false);
    }
    table.into()
}

/// The `count` samples whose times come first. A sample's time is exponentially distributed with
/// its weight as the rate, so that the next one is always drawn by weight (Efraimidis and
/// Spirakis).
fn earliest(weights: &[f64], count: usize, key: Key) -> Arc<[u32]> {
    let mut times: Vec<(f64, u32)> = weights
        .iter()
        .enumerate()
        .filter(|(_, weight)| **weight > 0.0)
        .map(|(sample, weight)| {
            let uniform = Draws::from_key(key.derive(sample as u64)).next_f64();
            (-ln(1.0 - uniform) / weight, sample as u32)
        })
        .collect();
    let order = |a: &(f64, u32), b: &(f64, u32)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    if count < times.len() {
        times.select_nth_unstable_by(count, order);
        times.truncate(count);
    }
    times.sort_unstable_by(order);
    times.into_iter().map(|(_, sample)| sample).collect()
}

/// The natural logarithm of a number from 2^-53 to 1. The C library's logarithm may differ in the
/// last bit between machines, which would change the order of samples.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) as i64 - 1023) as f64;
    let mut mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    // Around 1 the exponent must be 0, or the difference of two large terms loses the digits.
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1.0;
    }
    // ln m = 2 artanh((m - 1) / (m + 1)), a series in at most 0.03.
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let square = ratio * ratio;
    let mut sum = 0.0;
    for term in (0..12).rev() {
        sum = sum * square + 1.0 / f64::from(2 * term + 1);
    }
    2.0 * ratio * sum + exponent * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::super::Order;
    use super::*;
    use feedline_base::error::ErrorKind;
    use proptest::prelude::*;

    fn ids(weights: Weights, len: u64, epoch: u64) -> Vec<u64> {
        let order = Order::weighted(7, weights);
        order.preview(len, epoch, u64::MAX).unwrap()
    }

    /// The weight of each sample by the table: its own part of its column, and its parts of others.
    fn shares(weights: &[f64]) -> Vec<f64> {
        let mut shares = vec![0.0; weights.len()];
        let mean = weights.iter().sum::<f64>() / weights.len() as f64;
        for (sample, column) in table(weights, mean).iter().enumerate() {
            let own = f64::from(column.own) / FRACTION;
            shares[sample] += own;
            shares[column.alias as usize] += 1.0 - own;
        }
        shares
    }

    proptest! {
        #[test]
        fn a_table_has_the_weights(weights in proptest::collection::vec(
            prop_oneof![Just(0.0), Just(1.0), 0.0..1.0, 0.0..1e9_f64], 1..300,
        )) {
            let sum: f64 = weights.iter().sum();
            prop_assume!(sum > 0.0);
            let mean = sum / weights.len() as f64;
            for (sample, share) in shares(&weights).into_iter().enumerate() {
                let right = weights[sample] / mean;
                prop_assert!((share - right).abs() <= 1e-6 * right.max(1.0), "{sample}: {share} {right}");
                prop_assert!(weights[sample] > 0.0 || share == 0.0, "{sample}: {share}");
            }
        }

        #[test]
        fn the_logarithm_is_right(x in 1e-16..1.0_f64) {
            prop_assert!((ln(x) - x.ln()).abs() <= 1e-14 * x.ln().abs());
        }

        #[test]
        fn without_replacement_no_sample_comes_twice(
            weights in proptest::collection::vec(prop_oneof![Just(0.0), 0.0..3.0_f64], 1..200),
            epoch in 0..9_u64,
        ) {
            let possible = weights.iter().filter(|weight| **weight > 0.0).count();
            prop_assume!(possible > 0);
            let len = weights.len() as u64;
            let drawn = Weights::without_replacement(weights.clone()).unwrap().draws(possible as u64);
            let mut drawn = ids(drawn, len, epoch);
            prop_assert!(drawn.iter().all(|id| weights[*id as usize] > 0.0));
            drawn.sort_unstable();
            drawn.dedup();
            prop_assert_eq!(drawn.len(), possible);
        }
    }

    /// χ² of the counts against the weights; it must stay below that of 1 % for these degrees of
    /// freedom.
    fn chi_squared(counts: &[u64], weights: &[f64]) -> f64 {
        let drawn: u64 = counts.iter().sum();
        let sum: f64 = weights.iter().sum();
        let of = |(count, weight): (&u64, &f64)| {
            let expected = drawn as f64 * weight / sum;
            (*count as f64 - expected).powi(2) / expected
        };
        counts.iter().zip(weights).map(of).sum()
    }

    #[test]
    fn ten_million_draws_have_the_frequencies_of_the_weights() {
        let weights: Vec<f64> = (1..=100).map(|weight| f64::from(weight * weight)).collect();
        let mut counts = [0; 100];
        for id in ids(Weights::new(&weights).unwrap().draws(10_000_000), 100, 3) {
            counts[id as usize] += 1;
        }
        let chi = chi_squared(&counts, &weights);
        assert!(chi < 134.6, "{chi}");
    }

    #[test]
    fn the_first_draws_without_replacement_have_the_frequencies_of_the_weights() {
        let weights = [1.0, 2.0, 3.0, 4.0];
        let mut counts = [0; 4];
        let drawn = Weights::without_replacement(weights).unwrap().draws(1);
        for epoch in 0..100_000 {
            counts[ids(drawn.clone(), 4, epoch)[0] as usize] += 1;
        }
        let chi = chi_squared(&counts, &weights);
        assert!(chi < 11.3, "{chi} {counts:?}");
    }

    #[test]
    fn every_class_is_drawn_equally_often() {
        let classes: Vec<&str> = (0..1000)
            .map(|sample| if sample < 10 { "rare" } else { "common" })
            .collect();
        let drawn = ids(Weights::balanced(&classes).unwrap().draws(100_000), 1000, 0);
        let rare = drawn.iter().filter(|id| **id < 10).count();
        assert!((49_200..50_800).contains(&rare), "{rare}");
    }

    #[test]
    fn weights_that_cannot_be_are_refused() {
        let table = [
            (&[1.0, -1.0][..], "the weight of sample 1 is -1"),
            (&[f64::NAN], "the weight of sample 0 is NaN"),
            (&[1.0, f64::INFINITY], "the weight of sample 1 is inf"),
            (&[0.0, 0.0], "the sum of 2 weights is 0"),
            (&[], "the sum of 0 weights is "),
        ];
        for (weights, part) in table {
            let error = Weights::new(weights).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(part), "{error}");
        }
        let order = Order::weighted(1, Weights::new(&[1.0, 1.0]).unwrap());
        let error = order.preview(3, 0, 1).unwrap_err().to_string();
        assert!(error.contains("2 weights, the dataset has 3"), "{error}");
        let once = Weights::without_replacement([1.0, 0.0]).unwrap();
        let error = Order::weighted(1, once).preview(2, 0, 1).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("2 draws without replacement, and 1"),
            "{error}"
        );
    }
}
