//! Keys, the keyed permutation and keyed random draws: all randomness of the crate, as pure
//! functions of a seed.
//!
//! ```text
//! seed ─► Key ─derive(epoch)─► Key ─┬─► Permutation: position ─► index, no array of n entries
//!                                   └─derive(id), label─► Draws: the random numbers of one transform of one sample
//! ```
//!
//! The quality is **statistical, not cryptographic**: for a training run, results are independent
//! and uniform, but the seed can be recovered from enough of them. In return an index takes
//! nanoseconds, and a shuffle needs no secret.

use std::sync::Arc;

/// A 128-bit key: the root of a permutation or of a stream of draws.
///
/// Keys form a tree: a sub-key depends on its parent and on every word on the way, in order. Two
/// lanes of 64 bits make accidental equality improbable. Among 2^40 keys, two are equal with
/// probability 2^-49; with one lane, some 30 000 pairs would be equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    low: u64,
    high: u64,
}

impl Key {
    /// The root key of a seed. Nearby seeds (0, 1, 2, …) give unrelated keys.
    #[inline]
    pub fn new(seed: u64) -> Self {
        // Digits of pi: any constants without structure will do.
        Self {
            low: 0x243f_6a88_85a3_08d3,
            high: 0x1319_8a2e_0370_7344,
        }
        .derive(seed)
    }

    /// The sub-key for a number (an epoch, a sample id, …). Different words never give the same
    /// sub-key.
    #[must_use]
    #[inline]
    pub fn derive(self, word: u64) -> Self {
        // A bijection of the key for a fixed word, and from word to `low` for a fixed key: no
        // entropy is lost.
        let low = mix(self.low ^ word);
        Self {
            low,
            high: mix(self.high.wrapping_add(low)),
        }
    }

    /// The sub-key for a name, so that two purposes never share random numbers.
    #[must_use]
    pub fn named(self, label: &str) -> Self {
        let mut key = self.derive(label.len() as u64 ^ LABEL);
        for chunk in label.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            key = key.derive(u64::from_le_bytes(word));
        }
        key
    }
}

/// Distinguishes names from small numbers: `named("")` is not `derive(0)`.
const LABEL: u64 = 0xa409_3822_299f_31d0;

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({:016x}{:016x})", self.high, self.low)
    }
}

/// A bijection of 64-bit words in which every input bit flips every output bit with probability
/// close to 1/2 (Stafford's "Mix13", the finaliser of SplitMix64).
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Maps a uniform word to `0..size` by its high bits; the bias is below `size` / 2^64.
fn scale(word: u64, size: u64) -> u64 {
    ((u128::from(word) * u128::from(size)) >> 64) as u64
}

/// A keyed bijection of `0..n`: a shuffle computed entry by entry and never stored.
///
/// Memory and the time to the first index are bounded by constants: 10^12 entries need no more than
/// 10^3. Any `n` of 64 bits is legal, 0 and 1 too.
///
/// A `Sampler` shuffles its batches with one, without a table for each epoch:
///
/// ```
/// use feedline_core::order::Permutation;
/// let shuffle = Permutation::of(1_000_000_000_000, 7, 0);
/// assert_ne!(shuffle.get(0), shuffle.get(1));
/// ```
#[derive(Clone, Debug)]
pub struct Permutation {
    n: u64,
    method: Method,
}

#[derive(Clone, Debug)]
enum Method {
    Table(Arc<[u16]>),
    Feistel(Feistel),
}

impl Permutation {
    /// Up to this size the permutation is a table (2 bytes per entry, so 2 KiB at most) made by an
    /// exact shuffle: on small domains a Feistel network is measurably not uniform, and there are
    /// too few entries to average over.
    pub const TABLE_MAX: u64 = 1024;

    /// The permutation of `0..n` for a seed and an epoch.
    pub fn of(n: u64, seed: u64, epoch: u64) -> Self {
        Self::new(n, Key::new(seed).named("permutation").derive(epoch))
    }

    /// The permutation of `0..n` that belongs to `key`; another `n` gives an unrelated one.
    #[doc(hidden)]
    pub fn new(n: u64, key: Key) -> Self {
        let key = key.derive(n);
        let method = if n <= Self::TABLE_MAX {
            Method::Table(table(n as u16, key))
        } else {
            Method::Feistel(Feistel::new(n, key))
        };
        Self { n, method }
    }

    /// Bytes of memory, heap included: at most some 2.3 kB, for any `n`.
    #[cfg(any(test, feature = "unstable"))]
    pub fn bytes(&self) -> usize {
        let heap = match &self.method {
            Method::Table(table) => size_of_val(&**table),
            Method::Feistel(_) => 0,
        };
        size_of::<Self>() + heap
    }

    /// Entry `position`. Panics unless `position < n`.
    #[inline]
    pub fn get(&self, position: u64) -> u64 {
        assert!(
            position < self.n,
            "position {position} of a permutation of {}",
            self.n
        );
        match &self.method {
            Method::Table(table) => u64::from(table[position as usize]),
            Method::Feistel(feistel) => feistel.get(position),
        }
    }
}

/// A stored permutation, for small domains.
fn table(n: u16, key: Key) -> Arc<[u16]> {
    let mut entries: Box<[u16]> = (0..n).collect();
    Draws::from_key(key).shuffle(&mut entries);
    entries.into()
}

/// Rounds in each direction; 4 + 4 in all. The battery of `tests/behaviour/uniformity.rs`, run once
/// with 30 times its seeds, rejected 2 + 2 at every length up to 4096 and 3 + 3 up to 128, but
/// neither 3 + 3 nor 4 + 4 above `TABLE_MAX`; the fourth is margin.
const DOUBLE_ROUNDS: usize = 4;

/// An unbalanced Feistel network on `rows × 2^bits ≥ n` cells, walked until it lands below `n`.
///
/// A position is a pair (row, column). Each round moves one half by a keyed hash of the other half.
/// The inverse can undo that, so a round is a bijection for any hash. The number of columns is a
/// power of two, so that splitting and joining are shifts and no round divides. There are only as
/// many rows as needed, so fewer than 2^bits ≈ √n cells are surplus, and a walk takes a second step
/// with probability below 2/√n. Only the widths depend on `n`.
#[derive(Clone, Debug)]
struct Feistel {
    n: u64,
    rows: u64,
    bits: u32,
    rounds: [[Round; 2]; DOUBLE_ROUNDS],
}

impl Feistel {
    /// `n` must not be 0.
    fn new(n: u64, key: Key) -> Self {
        // Half of the bits, rounded so that rows / columns stays within 1/2 to 2.
        let bits = n.ilog2().div_ceil(2).max(1);
        let mut draws = Draws::from_key(key);
        let rounds = std::array::from_fn(|_| std::array::from_fn(|_| Round::new(&mut draws)));
        Self {
            n,
            rows: ((n - 1) >> bits) + 1,
            bits,
            rounds,
        }
    }

    #[inline]
    fn get(&self, position: u64) -> u64 {
        let mut cell = self.forward(position);
        // The walk stays on the cycle of `position`, so it ends at the latest where it began.
        while cell >= self.n {
            cell = self.forward(cell);
        }
        cell
    }

    #[inline]
    pub fn forward(&self, cell: u64) -> u64 {
        let mut row = cell >> self.bits;
        let mut column = cell & ((1 << self.bits) - 1);
        for [to_row, to_column] in &self.rounds {
            row += scale(to_row.hash(column), self.rows);
            row = if row >= self.rows {
                row - self.rows
            } else {
                row
            };
            column ^= to_column.hash(row) >> (64 - self.bits);
        }
        row << self.bits | column
    }
}

/// The key of one round.
#[derive(Clone, Copy, Debug)]
struct Round {
    multiply: u64,
    add: u64,
}

impl Round {
    fn new(draws: &mut Draws) -> Self {
        Self {
            multiply: draws.next_u64(),
            add: draws.next_u64(),
        }
    }

    /// Only the high bits are used. The first line alone is the strongly universal multiply-shift
    /// hash of a 32-bit half (Dietzfelbinger): any two halves are moved independently. But it is
    /// affine, so equally spaced halves stay equally spaced; the second line breaks that.
    #[inline]
    fn hash(self, half: u64) -> u64 {
        let word = half.wrapping_mul(self.multiply).wrapping_add(self.add);
        (word ^ (word >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Random numbers that depend on (seed, epoch, sample id, purpose) alone: the only source of
/// randomness of transforms.
///
/// The numbers are the same for any worker, decode order and rank. A transform with another source
/// of randomness makes the run irreproducible. A sample that an order repeats within an epoch has
/// other numbers each time, through [`Ctx::draws`](crate::decode::Ctx::draws). Two purposes
/// (`"crop"`, `"flip"`) have unrelated numbers, so adding a transform does not change those of
/// another.
///
/// The generator is xoroshiro128++ (Blackman and Vigna): 2 words of state, period 2^128 - 1. 2^40
/// streams of 2^20 numbers overlap somewhere with probability 2^-28.
///
/// ```
/// use feedline_core::order::Draws;
/// let mut draws = Draws::new(42, 0, 1234, "flip");
/// let flip = draws.bool(0.5);
/// assert_eq!(flip, Draws::new(42, 0, 1234, "flip").bool(0.5));
/// ```
#[derive(Clone, Debug)]
pub struct Draws {
    state: [u64; 2],
}

impl Draws {
    /// The draws of one purpose for one sample in one epoch.
    pub fn new(seed: u64, epoch: u64, id: u64, purpose: &str) -> Self {
        Self::of_draw(seed, epoch, id, 0, purpose)
    }

    /// Like [`new`](Self::new), for draw number `draw` of the sample in the epoch; the first is 0.
    #[doc(hidden)]
    pub fn of_draw(seed: u64, epoch: u64, id: u64, draw: u64, purpose: &str) -> Self {
        let key = Key::new(seed).derive(epoch).derive(id);
        let key = if draw == 0 {
            key
        } else {
            key.named("draw").derive(draw)
        };
        Self::from_key(key.named(purpose))
    }

    /// The draws that belong to a key.
    #[doc(hidden)]
    pub fn from_key(key: Key) -> Self {
        // From the state zero, the generator would stay at zero for ever.
        let low = if key.low | key.high == 0 {
            LABEL
        } else {
            key.low
        };
        Self {
            state: [low, key.high],
        }
    }

    /// 64 random bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let [a, b] = self.state;
        let c = a ^ b;
        self.state = [a.rotate_left(49) ^ c ^ (c << 21), c.rotate_left(28)];
        a.wrapping_add(b).rotate_left(17).wrapping_add(a)
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    #[inline]
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
    }

    /// Uniform in `0..n`, without bias (Lemire's method: a division only when a rejection is
    /// possible, which has probability `n` / 2^64). Panics when `n` is 0.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "there is no number below 0");
        loop {
            let product = u128::from(self.next_u64()) * u128::from(n);
            let fraction = product as u64;
            // Without rejection, 2^64 mod n results would come from one word too many. Rejecting
            // fractions below that number leaves equally many words for each result.
            if fraction >= n || fraction >= n.wrapping_neg() % n {
                return (product >> 64) as u64;
            }
        }
    }

    /// Uniform in [`low`, `high`); `low` when the range is empty or not a number.
    #[inline]
    pub fn range_f64(&mut self, low: f64, high: f64) -> f64 {
        // Weighing both ends instead of `high - low`, which may overflow.
        let part = self.next_f64();
        let value = low * (1.0 - part) + high * part;
        // Rounding may reach `high` or fall below `low`.
        if value >= low && value < high {
            value
        } else {
            low
        }
    }

    /// True with probability `p`; never for `p` ≤ 0 or NaN, always for `p` ≥ 1.
    #[inline]
    pub fn bool(&mut self, p: f64) -> bool {
        self.next_f64() < p
    }

    /// Shuffles `items` into a uniformly random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// The inverse of `get`, for tests.
#[cfg(any(test, feature = "unstable"))]
impl Permutation {
    #[doc(hidden)]
    pub fn inverse(&self, index: u64) -> u64 {
        match &self.method {
            Method::Table(table) => table
                .iter()
                .position(|&entry| u64::from(entry) == index)
                .unwrap() as u64,
            Method::Feistel(feistel) => feistel.inverse(index),
        }
    }
}

#[cfg(any(test, feature = "unstable"))]
impl Feistel {
    fn inverse(&self, index: u64) -> u64 {
        let mut cell = self.backward(index);
        while cell >= self.n {
            cell = self.backward(cell);
        }
        cell
    }

    fn backward(&self, cell: u64) -> u64 {
        let mut row = cell >> self.bits;
        let mut column = cell & ((1 << self.bits) - 1);
        for [to_row, to_column] in self.rounds.iter().rev() {
            column ^= to_column.hash(row) >> (64 - self.bits);
            let step = scale(to_row.hash(column), self.rows);
            row = if row >= step {
                row - step
            } else {
                row + self.rows - step
            };
        }
        row << self.bits | column
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Asserts that `get` reaches every index of `0..n` once and `inverse` undoes it.
    fn assert_bijection(n: u64, get: impl Fn(u64) -> u64, inverse: impl Fn(u64) -> u64) {
        let mut seen = vec![false; n as usize];
        for position in 0..n {
            let index = get(position);
            assert!(
                !std::mem::replace(&mut seen[index as usize], true),
                "{index} twice, n = {n}"
            );
            assert_eq!(inverse(index), position, "n = {n}");
        }
    }

    #[test]
    fn every_length_is_a_bijection_under_several_keys() {
        let edges = [0, 1, 2, 3, 10, 1000, 1023, 1024, 1025, 1026, 1999, 2048];
        let all = (0..=2000)
            .map(|n| (n, n ^ 5))
            .chain(edges.into_iter().cycle().zip(0..60));
        for (n, seed) in all.chain([10_000, 65_535, 65_536, 65_537, 250_007].map(|n| (n, n))) {
            let permutation = Permutation::new(n, Key::new(seed));
            assert_bijection(n, |i| permutation.get(i), |i| permutation.inverse(i));
        }
    }

    #[test]
    fn the_network_is_a_bijection_on_small_domains_too() {
        for n in 1..=600 {
            for seed in 0..3 {
                let network = Feistel::new(n, Key::new(seed));
                assert_bijection(n, |i| network.get(i), |i| network.inverse(i));
            }
        }
    }

    proptest! {
        #[test]
        fn any_length_of_64_bits_maps_into_itself_and_back(shift in 0_u32..64, bits: u64, seed: u64, at: u64) {
            let n = (bits >> shift).max(1);
            let permutation = Permutation::new(n, Key::new(seed));
            for position in [at % n, 0, n - 1] {
                let index = permutation.get(position);
                prop_assert!(index < n);
                prop_assert_eq!(permutation.inverse(index), position);
                prop_assert_eq!(permutation.get(permutation.inverse(position)), position);
            }
        }
    }

    #[test]
    fn the_largest_lengths_do_not_overflow() {
        for n in [
            1 << 62,
            (1 << 63) - 1,
            1 << 63,
            (1 << 63) + 1,
            u64::MAX - 1,
            u64::MAX,
        ] {
            let permutation = Permutation::new(n, Key::new(3));
            for position in (0..100).flat_map(|i| [i, n - 1 - i]) {
                assert!(permutation.get(position) < n);
                assert_eq!(permutation.inverse(permutation.get(position)), position);
            }
        }
    }

    #[test]
    #[should_panic(expected = "position 5 of a permutation of 5")]
    fn a_position_past_the_end_panics() {
        Permutation::new(5, Key::new(0)).get(5);
    }

    #[test]
    fn the_first_index_of_10_to_the_12_takes_no_heap() {
        assert!(
            size_of::<Permutation>() <= 192,
            "{} bytes",
            size_of::<Permutation>()
        );
        // No field of the network owns heap memory: it can be copied bit by bit.
        fn is_flat<T>() -> bool {
            !std::mem::needs_drop::<T>()
        }
        assert!(is_flat::<Feistel>());
        let permutation = Permutation::new(1_000_000_000_000, Key::new(1));
        assert!(matches!(permutation.method, Method::Feistel(_)));
        assert!(permutation.get(0) < 1_000_000_000_000);
        assert_eq!(permutation.bytes(), size_of::<Permutation>());
        // The table, if there is one, is bounded.
        let table = Permutation::new(Permutation::TABLE_MAX, Key::new(1));
        assert!(matches!(table.method, Method::Table(_)));
        assert!(table.bytes() <= 2400, "{} bytes", table.bytes());
    }

    #[test]
    fn walks_are_short_on_average() {
        // The surplus is below one row of 2^bits cells, so the expected number of extra steps is
        // below 2^bits / n.
        for n in [1025_u64, 4097, 1_000_003] {
            let network = Feistel::new(n, Key::new(n));
            let surplus = (network.rows << network.bits) - n;
            assert!(surplus < 1 << network.bits);
            let extra = (0..n)
                .filter(|position| network.forward(*position) >= n)
                .count();
            assert!(extra as u64 <= surplus);
        }
    }

    #[test]
    fn sub_keys_differ_by_word_label_and_order() {
        let key = Key::new(1);
        let mut keys = vec![
            key,
            Key::new(2),
            key.derive(0),
            key.derive(1),
            key.derive(0).derive(1),
            key.derive(1).derive(0),
            key.named(""),
            key.named("a"),
            key.named("a\0"),
            key.named("abcdefgh"),
            key.named("abcdefghi"),
            key.named("abcdefg").named("h"),
        ];
        let count = keys.len();
        keys.sort_by_key(|key| (key.high, key.low));
        keys.dedup();
        assert_eq!(keys.len(), count);
    }

    #[test]
    fn every_bit_of_a_word_flips_half_of_the_key() {
        // 64 flipped bits × 128 bits out × 100 keys: the count per bit is binomial(100, 1/2), sd 5;
        // over all 819 200 the mean has sd 0.00055, so 0.003 is beyond 5 sd (false alarm 5e-8).
        let mut flipped = 0;
        for seed in 0..100 {
            for bit in 0..64 {
                let a = Key::new(seed).derive(0);
                let b = Key::new(seed).derive(1 << bit);
                flipped += (a.low ^ b.low).count_ones() + (a.high ^ b.high).count_ones();
            }
        }
        let mean = f64::from(flipped) / (100.0 * 64.0 * 128.0);
        assert!((mean - 0.5).abs() < 0.003, "{mean}");
    }

    #[test]
    fn numbers_below_n_are_unbiased() {
        // Of 3·2^62 the remainder method would give the lowest third twice as often: 0.5 instead of
        // 1/3. 30 000 draws: sd 0.0027, so 0.0136 is 5 sd (false alarm 6e-7).
        let n = 3 << 62;
        let mut draws = Draws::new(1, 0, 0, "below");
        let low = (0..30_000).filter(|_| draws.below(n) < 1 << 62).count();
        assert!((low as f64 / 30_000.0 - 1.0 / 3.0).abs() < 0.0136, "{low}");
        for n in [1, 2, 3, 7, u64::MAX] {
            assert!((0..100).all(|_| draws.below(n) < n));
        }
    }

    #[test]
    #[should_panic(expected = "no number below 0")]
    fn there_is_no_number_below_zero() {
        Draws::new(0, 0, 0, "").below(0);
    }

    #[test]
    fn ranges_hold_at_their_ends() {
        let mut draws = Draws::new(2, 0, 0, "range");
        let tight = (1.0, 1.0 + f64::EPSILON);
        for (low, high) in [
            (0.0, 1.0),
            (-3.0, -2.0),
            (f64::MIN, f64::MAX),
            tight,
            (-f64::MIN_POSITIVE, 0.0),
        ] {
            for _ in 0..1000 {
                let value = draws.range_f64(low, high);
                assert!(value >= low && value < high, "{value} of {low}..{high}");
            }
        }
        assert_eq!(draws.range_f64(2.0, 2.0), 2.0);
        assert_eq!(draws.range_f64(2.0, 1.0), 2.0);
        assert_eq!(draws.range_f64(2.0, f64::NAN), 2.0);
        assert!((0..1000).all(|_| (0.0..1.0).contains(&draws.next_f64())));
        assert!((0..1000).all(|_| draws.bool(1.0) && !draws.bool(0.0) && !draws.bool(f64::NAN)));
    }

    #[test]
    fn draws_differ_by_seed_epoch_id_and_purpose() {
        let first = |seed, epoch, id, purpose| Draws::new(seed, epoch, id, purpose).next_u64();
        let mut all = vec![
            first(1, 1, 1, "a"),
            first(2, 1, 1, "a"),
            first(1, 2, 1, "a"),
            first(1, 1, 2, "a"),
        ];
        all.push(first(1, 1, 1, "b"));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 5);
    }

    #[test]
    fn released_orders_never_change() {
        // A change here makes every saved state resume in another order: it needs a new major
        // version.
        let first = |n, count| {
            let permutation = Permutation::new(n, Key::new(42));
            (0..count).map(|i| permutation.get(i)).collect::<Vec<u64>>()
        };
        assert_eq!(first(10, 10), [1, 4, 8, 0, 9, 2, 5, 7, 3, 6]);
        assert_eq!(
            first(1_000_000, 5),
            [645042, 655679, 306721, 565904, 249240]
        );
        assert_eq!(
            first(1_000_000_000_000, 3),
            [147586165545, 526073683648, 459559828585]
        );
        let mut draws = Draws::new(42, 1, 2, "crop");
        assert_eq!(
            [draws.next_u64(), draws.below(1000)],
            [14252941919455801579, 741]
        );
    }
}
