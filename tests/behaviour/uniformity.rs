//! The evidence that a keyed permutation is a shuffle: statistics that a true shuffle passes and a
//! weak one does not.
//!
//! Every statistic is expressed as a score that is standard normal for a true shuffle: counts by
//! chi-square and the cube root of Wilson and Hilferty, sums over whole permutations by comparison
//! with as many shuffles by Fisher and Yates from an unrelated generator. A score beyond ±5 is a
//! failure; a true shuffle gives one with probability 6e-7. One family is judged by some 200
//! scores, so a true shuffle would be rejected with probability 1.2e-4. Keys are fixed: this is the
//! chance that the tests could not have been written at all, not the chance of a later failure.
//!
//! The same battery must accept the reference and reject permutations that are known to be weak.

use feedline::Order;
use feedline::order::Draws;
use feedline::unstable::{Key, Permutation};

const LIMIT: f64 = 5.0;

/// A family of permutations: gives the permutation of `0..n` for a seed, entry by entry.
type Family = fn(n: u64, seed: u64) -> Box<dyn Fn(u64) -> u64>;

fn ours(n: u64, seed: u64) -> Box<dyn Fn(u64) -> u64> {
    let permutation = Permutation::new(n, Key::new(seed));
    Box::new(move |position| permutation.get(position))
}

/// A second implementation of the crate's Feistel network, with any number of double rounds and
/// without the table for small domains.
fn network<const DOUBLE: usize>(n: u64, seed: u64) -> Box<dyn Fn(u64) -> u64> {
    let bits = n.ilog2().div_ceil(2).max(1);
    let mut draws = Draws::from_key(Key::new(seed).derive(n));
    let rows = ((n - 1) >> bits) + 1;
    let rounds: [[[u64; 2]; 2]; DOUBLE] =
        std::array::from_fn(|_| std::array::from_fn(|_| std::array::from_fn(|_| draws.next_u64())));
    let hash = |[multiply, add]: [u64; 2], half: u64| {
        let word = half.wrapping_mul(multiply).wrapping_add(add);
        (word ^ (word >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    Box::new(move |position| {
        let mut cell = position;
        loop {
            let mut row = cell >> bits;
            let mut column = cell & ((1 << bits) - 1);
            for [to_row, to_column] in rounds {
                row = (row + ((u128::from(hash(to_row, column)) * u128::from(rows)) >> 64) as u64)
                    % rows;
                column ^= hash(to_column, row) >> (64 - bits);
            }
            cell = row << bits | column;
            if cell < n {
                return cell;
            }
        }
    })
}

/// x → a·x + b mod n, with `a` coprime to n: a permutation, but not a shuffle.
fn affine(n: u64, seed: u64) -> Box<dyn Fn(u64) -> u64> {
    let mut random = Xoshiro256::new(seed);
    let coprime = |factor: &u64| {
        let mut a = *factor;
        let mut b = n;
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    let factor = std::iter::repeat_with(|| random.next() % n)
        .find(coprime)
        .unwrap();
    let offset = random.next() % n;
    Box::new(move |position| {
        ((u128::from(position) * u128::from(factor) + u128::from(offset)) % u128::from(n)) as u64
    })
}

/// The reference: a stored shuffle by Fisher and Yates, with a generator that shares nothing with
/// the crate's.
fn fisher_yates(n: u64, seed: u64) -> Box<dyn Fn(u64) -> u64> {
    let mut random = Xoshiro256::new(seed);
    let mut entries: Vec<u64> = (0..n).collect();
    for last in (1..entries.len()).rev() {
        // The remainder is biased by n / 2^64, below the resolution of these tests.
        entries.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
    Box::new(move |position| entries[position as usize])
}

/// xoshiro256** (Blackman and Vigna), seeded by a Weyl sequence through a finaliser of MurmurHash3.
struct Xoshiro256([u64; 4]);

impl Xoshiro256 {
    fn new(seed: u64) -> Self {
        let word = |i: u64| {
            let word = (seed ^ 0xdead_beef)
                .wrapping_mul(4)
                .wrapping_add(i)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let word = (word ^ (word >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
            let word = (word ^ (word >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
            word ^ (word >> 33)
        };
        Self([word(1), word(2), word(3), word(4)])
    }

    fn next(&mut self) -> u64 {
        let state = &mut self.0;
        let result = state[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = state[3].rotate_left(45);
        result
    }
}

/// Result of a statistic.
type Scores = Vec<(String, f64)>;

/// Chi-square with `freedom` degrees as a standard normal score (Wilson and Hilferty).
fn normal_score(chi_square: f64, freedom: f64) -> f64 {
    let part = 2.0 / (9.0 * freedom);
    ((chi_square / freedom).cbrt() - (1.0 - part)) / part.sqrt()
}

/// Scores counts against equal expectations.
fn equal_counts(counts: &[u64]) -> f64 {
    let expected = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
    let chi_square: f64 = counts
        .iter()
        .map(|count| (*count as f64 - expected).powi(2) / expected)
        .sum();
    normal_score(chi_square, counts.len() as f64 - 1.0)
}

/// A table of counts of (row, column), scored against independence of the two.
struct Table {
    columns: usize,
    counts: Vec<u64>,
}

impl Table {
    fn new(rows: usize, columns: usize) -> Self {
        Self {
            columns,
            counts: vec![0; rows * columns],
        }
    }

    fn add(&mut self, row: u64, column: u64) {
        self.counts[row as usize * self.columns + column as usize] += 1;
    }

    /// `n`: entries of one permutation when the table holds whole permutations. Their margins are
    /// fixed, which makes chi-square larger by n / (n - 1) than that of independent entries.
    fn score(&self, n: Option<u64>) -> f64 {
        let columns: Vec<u64> = (0..self.columns)
            .map(|column| self.counts.iter().skip(column).step_by(self.columns).sum())
            .collect();
        let total = columns.iter().sum::<u64>() as f64;
        let mut chi_square = 0.0;
        for row in self.counts.chunks(self.columns) {
            let in_row = row.iter().sum::<u64>() as f64;
            for (count, in_column) in row.iter().zip(&columns) {
                let expected = in_row * *in_column as f64 / total;
                chi_square += (*count as f64 - expected).powi(2) / expected;
            }
        }
        let rows = self.counts.len() / self.columns;
        let correction = n.map_or(1.0, |n| (n - 1) as f64 / n as f64);
        normal_score(
            chi_square * correction,
            ((rows - 1) * (self.columns - 1)) as f64,
        )
    }
}

/// Which of `count` equal parts of `0..n` holds `index`.
fn part(index: u64, n: u64, count: u64) -> u64 {
    (u128::from(index) * u128::from(count) / u128::from(n)) as u64
}

/// How often each of the n! permutations comes, over 40·n! seeds in a row, for n = 2 to 6.
fn whole_permutations(family: Family) -> Scores {
    let score = |n: u64| {
        let cells: u64 = (1..=n).product();
        let mut counts = vec![0; cells as usize];
        for seed in 0..40 * cells {
            let get = family(n, seed);
            let entries: Vec<u64> = (0..n).map(get).collect();
            // The rank in the factorial number system.
            let rank = (0..entries.len()).fold(0, |rank, at| {
                let smaller = entries[at + 1..]
                    .iter()
                    .filter(|entry| **entry < entries[at])
                    .count();
                rank * (entries.len() - at) + smaller
            });
            counts[rank] += 1;
        }
        (format!("all permutations of {n}"), equal_counts(&counts))
    };
    (2..=6).map(score).collect()
}

/// Where each element goes, over many seeds: every (position, index) cell of small domains.
fn destinations(family: Family) -> Scores {
    [7, 16, 33, 64]
        .into_iter()
        .map(|n| {
            let mut table = Table::new(n as usize, n as usize);
            for seed in 0..1500 {
                let get = family(n, seed);
                (0..n).for_each(|position| table.add(position, get(position)));
            }
            (format!("destinations of {n}"), table.score(Some(n)))
        })
        .collect()
}

/// Two entries of one permutation, over many seeds: are they independent, is their difference
/// uniform? For pairs that are close in a Feistel network: neighbours, the same column, the same
/// row; also where n is far too large to list.
fn pairs(family: Family, lengths: &[u64]) -> Scores {
    const SEEDS: u64 = 6000;
    let mut scores = Scores::new();
    for n in lengths {
        let column = 1 << n.ilog2().div_ceil(2);
        for (name, from, to) in [
            ("neighbours", 0, 1),
            ("a column", 0, column),
            ("a row", 1, column - 1),
        ] {
            let mut high = Table::new(16, 16);
            let mut low = Table::new(16, 16);
            let mut differences = vec![0; 64];
            for seed in 0..SEEDS {
                let get = family(*n, seed);
                let a = get(from);
                let b = get(to);
                high.add(part(a, *n, 16), part(b, *n, 16));
                low.add(a % 16, b % 16);
                // From 1 to n-1, uniformly.
                let difference = (u128::from(b) + u128::from(*n) - u128::from(a)) % u128::from(*n);
                differences[part(difference as u64 - 1, *n - 1, 64) as usize] += 1;
            }
            scores.push((format!("high bits of {name}, n = {n}"), high.score(None)));
            scores.push((format!("low bits of {name}, n = {n}"), low.score(None)));
            scores.push((
                format!("difference of {name}, n = {n}"),
                equal_counts(&differences),
            ));
        }
    }
    scores
}

/// Sums over one whole permutation.
const SUMS: [&str; 16] = [
    "fixed points",
    "successors",
    "predecessors",
    "ascents",
    "rank correlation",
    "displacement",
    "product at lag 1",
    "product at lag 2",
    "product at lag of a column",
    "product at lag of a column + 1",
    "cycles",
    "longest ascending subsequence",
    "column to column collisions",
    "column to row collisions",
    "row to column collisions",
    "row to row collisions",
];

fn sums(entries: &[u64]) -> [f64; SUMS.len()] {
    let n = entries.len();
    let bits = n.ilog2().div_ceil(2);
    let count = |test: &dyn Fn(usize) -> bool| (0..n - 1).filter(|i| test(*i)).count() as f64;
    let centre = (n - 1) as f64 / 2.0;
    let centred: Vec<f64> = entries.iter().map(|entry| *entry as f64 - centre).collect();
    let product = |lag: usize| {
        centred
            .iter()
            .zip(&centred[lag..])
            .map(|(a, b)| a * b)
            .sum::<f64>()
    };
    let row = |cell: u64| (cell >> bits) as usize;
    let column = |cell: u64| (cell & ((1 << bits) - 1)) as usize;
    [
        count(&|i| entries[i] == i as u64),
        count(&|i| entries[i + 1] == entries[i] + 1),
        count(&|i| entries[i] == entries[i + 1] + 1),
        count(&|i| entries[i] < entries[i + 1]),
        centred
            .iter()
            .enumerate()
            .map(|(i, value)| (i as f64 - centre) * value)
            .sum(),
        entries
            .iter()
            .enumerate()
            .map(|(i, entry)| entry.abs_diff(i as u64) as f64)
            .sum(),
        product(1),
        product(2),
        product(1 << bits),
        product((1 << bits) + 1),
        cycles(entries),
        longest_ascending(entries),
        collisions(entries, column, column),
        collisions(entries, column, row),
        collisions(entries, row, column),
        collisions(entries, row, row),
    ]
}

fn cycles(entries: &[u64]) -> f64 {
    let mut seen = vec![false; entries.len()];
    let mut count = 0.0;
    for start in 0..entries.len() {
        count += f64::from(u8::from(!seen[start]));
        let mut at = start;
        while !std::mem::replace(&mut seen[at], true) {
            at = entries[at] as usize;
        }
    }
    count
}

fn longest_ascending(entries: &[u64]) -> f64 {
    // The smallest end of an ascending subsequence of each length (patience sorting).
    let mut ends: Vec<u64> = Vec::new();
    for entry in entries {
        let at = ends.partition_point(|end| end < entry);
        if at == ends.len() {
            ends.push(*entry)
        } else {
            ends[at] = *entry
        }
    }
    ends.len() as f64
}

/// Pairs of positions that share a half and whose entries share one too: what the known attacks on
/// Feistel networks of few rounds count (Patarin).
fn collisions(entries: &[u64], from: impl Fn(u64) -> usize, to: impl Fn(u64) -> usize) -> f64 {
    let width = 2 * entries.len().isqrt() + 2;
    let mut cells = vec![0_u32; width * width];
    for (position, entry) in entries.iter().enumerate() {
        cells[from(position as u64) * width + to(*entry)] += 1;
    }
    cells
        .iter()
        .map(|count| f64::from(*count) * (f64::from(*count) - 1.0) / 2.0)
        .sum()
}

/// Compares mean and variance of each sum with those of the reference, over `SEEDS` permutations of
/// each.
fn sums_against_the_reference(family: Family, lengths: &[u64]) -> Scores {
    const SEEDS: u64 = 300;
    let all = |family: Family, n: u64, first: u64| -> Vec<[f64; SUMS.len()]> {
        (first..first + SEEDS)
            .map(|seed| sums(&(0..n).map(family(n, seed)).collect::<Vec<u64>>()))
            .collect()
    };
    let mut scores = Scores::new();
    for n in lengths {
        // Seeds apart, for when the family is the reference itself.
        let tested = all(family, *n, 0);
        let reference = all(fisher_yates, *n, 1_000_000);
        for (at, name) in SUMS.iter().enumerate() {
            let tested: Vec<f64> = tested.iter().map(|sums| sums[at]).collect();
            let reference: Vec<f64> = reference.iter().map(|sums| sums[at]).collect();
            let (centre, _) = mean_and_error(&reference);
            let squares = |sums: &[f64]| {
                sums.iter()
                    .map(|sum| (sum - centre).powi(2))
                    .collect::<Vec<f64>>()
            };
            scores.push((
                format!("mean of {name}, n = {n}"),
                difference(&tested, &reference),
            ));
            let spread = difference(&squares(&tested), &squares(&reference));
            scores.push((format!("variance of {name}, n = {n}"), spread));
        }
    }
    scores
}

fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values
        .iter()
        .map(|value| (value - mean).powi(2))
        .sum::<f64>()
        / (count - 1.0);
    (mean, variance / count)
}

/// Welch's statistic for equal means; normal for hundreds of values.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    let (mean_a, error_a) = mean_and_error(a);
    let (mean_b, error_b) = mean_and_error(b);
    if mean_a == mean_b {
        0.0
    } else {
        (mean_a - mean_b) / (error_a + error_b).sqrt()
    }
}

/// One single permutation, as a training run sees it: is the stream of its entries like noise?
fn one_epoch(family: Family, lengths: &[u64]) -> Scores {
    let mut scores = Scores::new();
    for n in lengths {
        let entries: Vec<u64> = (0..*n).map(family(*n, 1)).collect();
        let mut score = |name: &str, score: f64| scores.push((format!("{name}, n = {n}"), score));
        score(
            "displacement",
            table(&entries, 64, 64, |i, entry| {
                (part(i, *n, 64), part(entry, *n, 64))
            }),
        );
        score(
            "low bits",
            table(&entries, 16, 16, |i, entry| (i % 16, entry % 16)),
        );
        // Does every stretch of 250 entries, a batch, hold its share of each part and of each low
        // bit?
        let windows = n.div_ceil(250) as usize;
        score(
            "high bits per batch",
            table(&entries, windows, 8, |i, entry| {
                (i / 250, part(entry, *n, 8))
            }),
        );
        score(
            "low bits per batch",
            table(&entries, windows, 8, |i, entry| (i / 250, entry % 8)),
        );
        let mut neighbours = Table::new(32, 32);
        entries
            .chunks_exact(2)
            .for_each(|pair| neighbours.add(part(pair[0], *n, 32), part(pair[1], *n, 32)));
        score("neighbours", neighbours.score(None));
        let mut steps = vec![0; 64];
        entries
            .chunks_exact(2)
            .for_each(|pair| steps[part((pair[1] + n - pair[0]) % n, *n, 64) as usize] += 1);
        score("steps", equal_counts(&steps));
        let mut bends = vec![0; 64];
        for triple in entries.chunks_exact(3) {
            let bend = (triple[0] + triple[2] + 2 * (n - triple[1])) % n;
            bends[part(bend, *n, 64) as usize] += 1;
        }
        score("bends", equal_counts(&bends));
        for lag in [1, 2, 3, 1 << n.ilog2().div_ceil(2)] {
            score(
                &format!("serial correlation at lag {lag}"),
                serial_correlation(&entries, lag),
            );
        }
    }
    scores
}

fn table(
    entries: &[u64],
    rows: usize,
    columns: usize,
    cell: impl Fn(u64, u64) -> (u64, u64),
) -> f64 {
    let mut table = Table::new(rows, columns);
    for (position, entry) in entries.iter().enumerate() {
        let (row, column) = cell(position as u64, *entry);
        table.add(row, column);
    }
    table.score(Some(entries.len() as u64))
}

/// The circular correlation of a permutation with itself has mean -1/(n-1) and variance near 1/n.
fn serial_correlation(entries: &[u64], lag: usize) -> f64 {
    let n = entries.len() as f64;
    let centred = |entry: u64| (entry as f64 - (n - 1.0) / 2.0) / n;
    let later = entries.iter().cycle().skip(lag);
    let sum: f64 = entries
        .iter()
        .zip(later)
        .map(|(a, b)| centred(*a) * centred(*b))
        .sum();
    let correlation = sum * 12.0 * n / (n * n - 1.0);
    (correlation + 1.0 / (n - 1.0)) * n.sqrt()
}

/// Two permutations that should have nothing to do with each other, over several pairs of them.
fn independence(name: &str, n: u64, pair: impl Fn(u64) -> [Vec<u64>; 2]) -> Scores {
    const PAIRS: u64 = 60;
    let mut table = Table::new(32, 32);
    let mut equal = 0;
    for number in 0..PAIRS {
        let [one, other] = pair(number);
        equal += one.iter().zip(&other).filter(|(a, b)| a == b).count();
        one.iter()
            .zip(&other)
            .for_each(|(a, b)| table.add(part(*a, n, 32), part(*b, n, 32)));
    }
    // Agreements of two shuffles: Poisson with mean 1 each.
    let agreements = (equal as f64 - PAIRS as f64) / (PAIRS as f64).sqrt();
    vec![
        (format!("{name}: joint"), table.score(Some(n))),
        (format!("{name}: agreements"), agreements),
    ]
}

/// The larger of two scores, with its name.
fn worst(scores: &Scores) -> &(String, f64) {
    scores
        .iter()
        .max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))
        .unwrap()
}

fn assert_accepted(scores: &Scores) {
    for (name, score) in scores {
        // A score that is not a number is a bug of the statistic.
        assert!(score.abs() < LIMIT, "{name}: {score}");
    }
    println!("{} scores, the worst: {:?}", scores.len(), worst(scores));
}

/// Asserts rejection by a wide margin, so that it does not hang on one seed.
fn assert_rejected(scores: &Scores) {
    println!("{:?}", worst(scores));
    assert!(
        worst(scores).1.abs() > 3.0 * LIMIT,
        "not rejected: {:?}",
        worst(scores)
    );
}

/// Domains just above the table, in the middle, and without entries to skip.
const LISTED: [u64; 3] = [1025, 2000, 4096];

fn few_entries(family: Family) -> Scores {
    [whole_permutations(family), destinations(family)].concat()
}

#[test]
fn the_second_implementation_equals_the_crates() {
    for n in [1025, 4096, 1_000_000_000_000, u64::MAX] {
        let ours = ours(n, 7);
        let network = network::<4>(n, 7);
        (0..1000).for_each(|step| {
            assert_eq!(
                ours(step * (n / 1000)),
                network(step * (n / 1000)),
                "{step} of {n}"
            )
        });
    }
}

#[test]
fn a_true_shuffle_is_accepted() {
    assert_accepted(&few_entries(fisher_yates));
    assert_accepted(&sums_against_the_reference(fisher_yates, &LISTED[..1]));
    assert_accepted(&one_epoch(fisher_yates, &[10_000, 250_000]));
}

#[test]
fn small_permutations_are_as_uniform_as_a_true_shuffle() {
    assert_accepted(&few_entries(ours));
}

#[test]
fn two_entries_of_a_permutation_are_independent() {
    assert_accepted(&pairs(
        ours,
        &[1000, 1025, 1_000_000, 1_000_000_000_000, 1 << 63],
    ));
}

#[test]
fn permutations_have_mean_and_variance_of_true_shuffles() {
    assert_accepted(&sums_against_the_reference(ours, &LISTED));
}

#[test]
fn the_stream_of_one_epoch_is_like_noise() {
    assert_accepted(&one_epoch(ours, &[10_000, 65_536, 250_000]));
}

#[test]
fn epochs_and_nearby_seeds_are_independent() {
    for n in [1000, 1025, 4096] {
        let ids = |seed, epoch| Order::shuffled(seed).preview(n, epoch, n).unwrap();
        assert_accepted(&independence("epochs in a row", n, |i| {
            [ids(1, i), ids(1, i + 1)]
        }));
        assert_accepted(&independence("seeds in a row", n, |i| {
            [ids(i, 0), ids(i + 1, 0)]
        }));
        assert_accepted(&independence("seed and epoch exchanged", n, |i| {
            [ids(i, i + 7), ids(i + 7, i)]
        }));
        assert_accepted(&independence("one bit of the seed", n, |i| {
            [ids(5, 0), ids(5 ^ (1 << i), 0)]
        }));
    }
}

#[test]
fn an_epoch_derived_from_the_last_is_rejected() {
    let ids = |seed| Order::shuffled(seed).preview(1025, 0, 1025).unwrap();
    let shifted = |ids: Vec<u64>| ids.into_iter().map(|id| (id + 100) % 1025).collect();
    assert_rejected(&independence("the same", 1025, |i| [ids(i), ids(i)]));
    assert_rejected(&independence("shifted ids", 1025, |i| {
        [ids(i), shifted(ids(i))]
    }));
}

#[test]
fn draws_of_samples_epochs_and_purposes_are_independent() {
    let first = |epoch, id, purpose| Draws::new(9, epoch, id, purpose).next_f64();
    let part = |value: f64| (value * 32.0) as u64;
    let mut scores = Scores::new();
    type Pair<'a> = &'a dyn Fn(u64) -> [f64; 2];
    let cases: [(&str, Pair<'_>); 4] = [
        ("samples", &|i| [first(0, i, "a"), first(0, i + 1, "a")]),
        ("epochs", &|i| [first(i, 0, "a"), first(i + 1, 0, "a")]),
        ("purposes", &|i| [first(0, i, "a"), first(0, i, "b")]),
        ("one stream", &|i| {
            let mut draws = Draws::new(9, 0, i, "a");
            [draws.next_f64(), draws.next_f64()]
        }),
    ];
    for (name, pair) in cases {
        let mut table = Table::new(32, 32);
        let mut counts = vec![0; 32];
        for i in 0..20_000 {
            let [a, b] = pair(i);
            table.add(part(a), part(b));
            counts[part(a) as usize] += 1;
        }
        scores.push((format!("{name}: joint"), table.score(None)));
        scores.push((format!("{name}: counts"), equal_counts(&counts)));
    }
    assert_accepted(&scores);
}

#[test]
fn an_affine_map_is_rejected() {
    assert_rejected(&whole_permutations(affine));
    assert_rejected(&one_epoch(affine, &[10_000]));
    assert_rejected(&sums_against_the_reference(affine, &LISTED[..1]));
}

#[test]
fn a_network_of_two_rounds_is_rejected() {
    assert_rejected(&pairs(network::<1>, &[1025]));
    assert_rejected(&sums_against_the_reference(network::<1>, &LISTED[..1]));
}

#[test]
fn a_network_without_the_table_is_rejected_on_a_small_domain() {
    // The reason for `Permutation::TABLE_MAX`.
    assert_rejected(&whole_permutations(network::<4>));
}
