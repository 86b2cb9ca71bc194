//! Whether a dataset is still the one that a run was started with, in a few hundred bytes; if not, which shard changed.
//!
//! ```text
//! shard i of n ──name, length, first and last 4 KiB──► h_i ─┬─► S_k = Σ (i+1)^k · h_i  mod 2^61 - 1,  k = 0 … 3
//!                                                           ├─► 16 bucket hashes, shard i in bucket i · 16 / n
//!                                                           └─► one hash of all
//! number of samples, schema, chunk starts, identity() ─────────► beside them
//! ```
//!
//! The sums are the syndromes of a Reed-Solomon code. When one shard changed, S_k moved by (i+1)^k · d: the quotient of two
//! of these is its number, the others confirm it. When two changed, four of them determine the quadratic whose roots are
//! their numbers. Shards that were added in one run, or one that is missing, are found by trying every place. Of anything
//! else the buckets tell where it begins.
//!
//! Moving the data to another folder, mount or machine changes nothing: there are no folders, times or inodes in it.
//!
//! Limits: the bytes between the first and the last 4 KiB are not read, and of more than 256 shards only 256, evenly
//! chosen, are opened (the others count by name and length). A shard that was rewritten with its name, length and both ends
//! as they were is not noticed; [`Checked`](super::Checked) notices. Cost: at most 256 files opened and 512 reads of 4
//! KiB, on at most 32 threads; then some 100 ns for each shard, and what [`Dataset::identity`] takes.

use super::Dataset;
use super::digest::Digest;
use super::input::Input;
use super::parallel::parallel;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::{SourceId, Sources};
use crate::tensor::{EncodedField, Encoding, Shape};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// Bytes at either end of a shard that are read.
const ENDS: u64 = 4096;
/// Shards that are opened at most.
const LOOKS: u64 = 256;
const BUCKETS: usize = 16;
const SUMS: usize = 4;
/// 64-bit words of a fingerprint.
pub(crate) const WORDS: usize = 6 + SUMS + BUCKETS / 2;

/// Tells whether a dataset is still the one that a run was started with, and if not, which shard changed. It is part of
/// every [`State`](crate::State).
///
/// It holds the number of samples, and hashes of the fields, of the chunks, of [`Dataset::identity`], and of every
/// shard's name, length and (for at most 256 shards) first and last 4 KiB. Where the data lies does not matter: moved or
/// mounted elsewhere it is the same.
///
/// ```
/// use feedline::dataset::{DatasetExt, Fingerprint, Records};
/// let records = |bytes: [u8; 8]| Records::builder(2).open_bytes(bytes).unwrap();
/// let then = Fingerprint::of(&records([1; 8]))?;
/// let now = records([2; 8]);
/// let error = Fingerprint::of(&now)?.compare(&then, &now).unwrap_err();
/// assert_eq!(error.kind(), feedline::ErrorKind::FingerprintMismatch);
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "Text")]
pub struct Fingerprint {
    samples: u64,
    shards: u64,
    fields: u64,
    chunks: u64,
    identity: u64,
    total: u64,
    sums: Sums,
    buckets: [u32; BUCKETS],
}

impl Fingerprint {
    /// Looks at a dataset: opens at most 256 of its files and reads their first and last 4 KiB.
    ///
    /// Errors: those of the file system, and [`ErrorKind::Changed`] for a file that is not as long as when it was
    /// indexed; all name the path.
    pub fn of(dataset: &dyn Dataset) -> Result<Self> {
        let sources = dataset.sources();
        let count = sources.count() as u64;
        let looks = Looks::of(count);
        let shards = Shards::read(sources, looks.0.iter().map(|place| *place as usize))?;
        let (mut sums, mut total) = (Sums::default(), Digest::new("shards"));
        let mut buckets = [Digest::new("bucket"); BUCKETS];
        for place in 0..count {
            let hash = shards.hash(place as usize, looks.has(place));
            sums.put(place, hash);
            total = total.word(hash);
            let bucket = &mut buckets[bucket_of(place, count)];
            *bucket = bucket.word(hash);
        }
        Ok(Self {
            samples: dataset.len(),
            shards: count,
            fields: fields(dataset.schema()),
            chunks: dataset.chunked().map_or(0, |chunks| Digest::new("chunks").words(chunks.starts()).end()),
            identity: dataset.identity(),
            total: total.end(),
            sums,
            buckets: buckets.map(|bucket| (bucket.end() >> 32) as u32),
        })
    }

    /// Refuses a dataset that is not the one of `saved`; `self` is the fingerprint of `dataset`, which is looked at again
    /// to name what changed.
    ///
    /// Errors: [`ErrorKind::FingerprintMismatch`], which says what differs: the shard by number (from 0) and path, the
    /// numbers of shards or samples then and now, the fields, or the choice of samples.
    pub fn compare(&self, saved: &Self, dataset: &dyn Dataset) -> Result<()> {
        if self == saved {
            return Ok(());
        }
        let (mut differences, mut shard) = (Vec::new(), None);
        let same_shards = (self.shards, self.total, self.sums, self.buckets)
            == (saved.shards, saved.total, saved.sums, saved.buckets);
        if !same_shards {
            let (difference, number) = self.shards_that_differ(saved, dataset.sources());
            differences.push(difference);
            shard = number.map(|number| dataset.sources().path(SourceId::at(number)));
        }
        if self.samples != saved.samples {
            differences.push(format!("{} samples then, {} now", saved.samples, self.samples));
        }
        if self.fields != saved.fields {
            differences.push(format!("other fields than then; now they are {}", described(dataset.schema())));
        }
        // What follows from other shards is no difference of its own.
        if same_shards && self.chunks != saved.chunks {
            differences.push("the samples are cut into other chunks".into());
        }
        if same_shards && self.identity != saved.identity {
            let what = "the ids mean other samples of the same files: another split, subset or window, other classes or \
                        labels, or another choice of columns or members";
            differences.push(what.into());
        }
        let message = format!("{}; open the dataset that the run began with, or begin anew", differences.join("; "));
        let error = Error::new(ErrorKind::FingerprintMismatch, Stage::Build, message);
        Err(match shard {
            Some(path) => error.with_path(path),
            None => error,
        })
    }

    /// Number of samples.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Number of shards (sources: files, or memory).
    pub fn shards(&self) -> u64 {
        self.shards
    }

    /// What is different about the shards, in words, and the first of them if its number is certain.
    fn shards_that_differ(&self, saved: &Self, sources: &Sources) -> (String, Option<usize>) {
        let (then, now) = (saved.shards, self.shards);
        let counts = || (format!("{then} shards then, {now} now"), None);
        if sources.count() as u64 != now {
            return counts();
        }
        if now == then {
            return self.replaced(saved, sources);
        }
        // What happens to files while they are looked at again does not change that something differs.
        if now > then
            && let Ok(Some(first)) = added(sources, then, saved.sums)
        {
            let (more, name) = (now - then, shown(sources, first));
            let which = match more {
                1 => format!("number {first}, {name}, is new"),
                _ => format!("numbers {first} (first {name}) to {} are new", first + more - 1),
            };
            return (format!("{now} shards, {then} then: {which} (counted from 0)"), Some(first as usize));
        }
        if now + 1 == then
            && let Ok(Some(place)) = missing(sources, then, saved.sums)
        {
            let beside = match place.checked_sub(1) {
                _ if place < now => format!("it stood before {}", shown(sources, place)),
                Some(last) => format!("it stood behind {}", shown(sources, last)),
                None => "there is no other".into(),
            };
            return (format!("{now} shards, {then} then: number {place} (counted from 0) is missing, {beside}"), None);
        }
        counts()
    }

    /// As many shards as then, but not the same ones.
    fn replaced(&self, saved: &Self, sources: &Sources) -> (String, Option<usize>) {
        let count = self.shards;
        let differs = |bucket: &usize| self.buckets[*bucket] != saved.buckets[*bucket];
        let buckets: Vec<usize> = (0..BUCKETS).filter(differs).collect();
        let what = "another name, length or content than then";
        let list = |numbers: &[u64]| {
            let named: Vec<_> =
                numbers.iter().map(|number| format!("{number} ({})", shown(sources, *number))).collect();
            let text = format!("of {count} shards, counted from 0, these have {what}: {}", named.join(", "));
            (text, numbers.first().map(|number| *number as usize))
        };
        let certain = changed(self.sums.minus(saved.sums), count);
        let fits = |number: &u64| buckets.contains(&bucket_of(*number, count));
        match certain.filter(|numbers| numbers.iter().all(fits)).as_deref() {
            Some([number]) => {
                return (format!("shard {number} of {count} (counted from 0) has {what}"), Some(*number as usize));
            }
            Some(numbers) => return list(numbers),
            None => {}
        }
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for range in buckets.into_iter().map(|bucket| places_in(bucket, count)).filter(|range| !range.is_empty()) {
            match ranges.last_mut().filter(|last| last.end == range.start && count > BUCKETS as u64) {
                Some(last) => last.end = range.end,
                None => ranges.push(range),
            }
        }
        if ranges.is_empty() {
            return ("the shards are not those of then".into(), None);
        }
        if count <= BUCKETS as u64 {
            return list(&ranges.iter().map(|range| range.start).collect::<Vec<_>>());
        }
        let named = |range: &Range<u64>| {
            format!("between number {} ({}) and {}", range.start, shown(sources, range.start), range.end - 1)
        };
        let ranges: Vec<_> = ranges.iter().map(named).collect();
        (format!("several of {count} shards, counted from 0, have {what}: {}", ranges.join(", ")), None)
    }

    /// All of it, for checksums.
    pub(crate) fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let head = [self.samples, self.shards, self.fields, self.chunks, self.identity, self.total];
        words[..6].copy_from_slice(&head);
        words[6..6 + SUMS].copy_from_slice(&self.sums.0);
        for (word, pair) in words[6 + SUMS..].iter_mut().zip(self.buckets.as_chunks::<2>().0) {
            *word = u64::from(pair[0]) << 32 | u64::from(pair[1]);
        }
        words
    }

    /// Any words at all, for tests of what holds a fingerprint.
    #[cfg(test)]
    pub(crate) fn of_words(words: [u64; WORDS]) -> Self {
        let [samples, shards, fields, chunks, identity, total, ..] = words;
        let sums = Sums(std::array::from_fn(|k| words[6 + k] % P));
        let half = |index: usize| (words[6 + SUMS + index / 2] >> (32 * (1 - index % 2))) as u32;
        Self { samples, shards, fields, chunks, identity, total, sums, buckets: std::array::from_fn(half) }
    }
}

/// The shards that are opened: their places in the list, ascending.
struct Looks(Vec<u64>);

impl Looks {
    fn of(count: u64) -> Self {
        let spread = |k: u64| (u128::from(k) * u128::from(count - 1) / u128::from(LOOKS - 1)) as u64;
        Self(if count <= LOOKS { (0..count).collect() } else { (0..LOOKS).map(spread).collect() })
    }

    fn has(&self, place: u64) -> bool {
        self.0.binary_search(&place).is_ok()
    }
}

/// The shards of a dataset, of some of which the ends were read.
struct Shards<'a> {
    sources: &'a Sources,
    ends: BTreeMap<usize, u64>,
    digest: Digest,
}

impl<'a> Shards<'a> {
    fn read(sources: &'a Sources, numbers: impl IntoIterator<Item = usize>) -> Result<Self> {
        let numbers: Vec<usize> = numbers.into_iter().filter(|number| *number < sources.count()).collect();
        let ends = parallel(&numbers, |_, number| ends_of(sources, SourceId::at(*number)))?;
        Ok(Self { sources, ends: numbers.into_iter().zip(ends).collect(), digest: Digest::new("shard") })
    }

    /// The hash of a shard, below `P`; `looked`: with what was read of it.
    fn hash(&self, number: usize, looked: bool) -> u64 {
        let id = SourceId::at(number);
        let digest = self.digest.bytes(self.sources.name_of(id).unwrap_or_default());
        let digest = digest.word(self.sources.len_of(id));
        let ends = if looked { self.ends.get(&number) } else { None };
        ends.map_or(digest, |ends| digest.word(*ends)).end() % P
    }
}

/// A hash of the first and last bytes of a source.
fn ends_of(sources: &Sources, id: SourceId) -> Result<u64> {
    let digest = Digest::new("ends");
    let sizes = |len: u64| (len.min(ENDS), (len - len.min(ENDS)).min(ENDS));
    if let Some(bytes) = sources.bytes_of(id) {
        let (first, last) = sizes(bytes.len() as u64);
        return Ok(digest.bytes(&bytes[..first as usize]).bytes(&bytes[bytes.len() - last as usize..]).end());
    }
    let path = sources.path(id);
    let (input, len) = (Input::of_source(sources, id, &path)?, sources.len_of(id));
    if input.len() != len {
        let message = format!("{len} bytes when it was indexed, {} now", input.len());
        return Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(path));
    }
    let (first, last) = sizes(len);
    let head = input.read(0, first, "its first bytes")?;
    let tail = input.read(len - last, last, "its last bytes")?;
    Ok(digest.bytes(&head).bytes(&tail).end())
}

/// What the fields are.
fn fields(schema: &[EncodedField]) -> u64 {
    let dims = |digest: Digest, dims: &[usize]| {
        let start = digest.word(dims.len() as u64);
        dims.iter().fold(start, |digest, dim| digest.word(*dim as u64))
    };
    let field = |digest: Digest, field: &EncodedField| {
        let digest = digest.bytes(field.name.as_bytes());
        match &field.encoding {
            Encoding::Image => digest.word(0),
            Encoding::Bytes => digest.word(1),
            Encoding::Raw { dtype, shape: Shape::Fixed(fixed) } => {
                dims(digest.word(2).bytes(dtype.name().as_bytes()), fixed)
            }
            Encoding::Raw { dtype, shape: Shape::UpTo { max, inner } } => {
                dims(digest.word(3).bytes(dtype.name().as_bytes()).word(*max as u64), inner)
            }
        }
    };
    schema.iter().fold(Digest::new("fields").word(schema.len() as u64), field).end()
}

/// `image (a picture), label i64 []`.
fn described(schema: &[EncodedField]) -> String {
    let one = |field: &EncodedField| match &field.encoding {
        Encoding::Image => format!("{} (a picture)", field.name),
        Encoding::Bytes => format!("{} (bytes)", field.name),
        Encoding::Raw { dtype, shape: Shape::Fixed(dims) } => format!("{} {dtype} {dims:?}", field.name),
        Encoding::Raw { dtype, shape: Shape::UpTo { max, inner } } => {
            format!("{} {dtype} up to {max} of {inner:?}", field.name)
        }
    };
    schema.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The path of a shard on one line.
fn shown(sources: &Sources, number: u64) -> String {
    let path: PathBuf = sources.path(SourceId::at(number as usize));
    let text = path.display().to_string();
    if text.contains(char::is_control) { format!("{text:?}") } else { text }
}

fn bucket_of(place: u64, count: u64) -> usize {
    (u128::from(place) * BUCKETS as u128 / u128::from(count.max(1))) as usize
}

/// The places of a bucket.
fn places_in(bucket: usize, count: u64) -> Range<u64> {
    let start = |bucket: usize| (bucket as u128 * u128::from(count)).div_ceil(BUCKETS as u128) as u64;
    start(bucket)..start(bucket + 1)
}

/// The sums are taken modulo this prime.
const P: u64 = (1 << 61) - 1;

fn add(a: u64, b: u64) -> u64 {
    (a + b) % P
}

fn sub(a: u64, b: u64) -> u64 {
    (a + P - b) % P
}

fn mul(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    // 2^61 is 1 modulo P.
    add(product as u64 & P, (product >> 61) as u64)
}

/// `a / b`, by Fermat; 0 when `b` is.
fn div(a: u64, b: u64) -> u64 {
    let (mut power, mut square) = (1, b);
    for bit in 0..61 {
        if (P - 2) >> bit & 1 == 1 {
            power = mul(power, square);
        }
        square = mul(square, square);
    }
    mul(a, power)
}

/// S_k = Σ (place+1)^k · hash for k = 0 … 3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Sums([u64; SUMS]);

impl Sums {
    fn terms(place: u64, hash: u64) -> [u64; SUMS] {
        let mut terms = [hash; SUMS];
        (1..SUMS).for_each(|k| terms[k] = mul(terms[k - 1], (place + 1) % P));
        terms
    }

    fn put(&mut self, place: u64, hash: u64) {
        self.0.iter_mut().zip(Self::terms(place, hash)).for_each(|(sum, term)| *sum = add(*sum, term));
    }

    fn take(&mut self, place: u64, hash: u64) {
        self.0.iter_mut().zip(Self::terms(place, hash)).for_each(|(sum, term)| *sum = sub(*sum, term));
    }

    fn plus(self, other: Self) -> Self {
        Self(std::array::from_fn(|k| add(self.0[k], other.0[k])))
    }

    fn minus(self, other: Self) -> Self {
        Self(std::array::from_fn(|k| sub(self.0[k], other.0[k])))
    }
}

/// The one or two of `count` places whose change explains all differences; ascending.
fn changed(differences: Sums, count: u64) -> Option<Vec<u64>> {
    let [a, b, c, d] = differences.0;
    let legal = |x: u64| (1..=count).contains(&x);
    let one = div(b, a);
    if a != 0 && legal(one) && c == mul(one, b) && d == mul(one, c) {
        return Some(vec![one - 1]);
    }
    // x² - sum · x + product has the roots that two terms of a recurrence have: c = sum·b - product·a, d = sum·c - product·b.
    let determinant = sub(mul(a, c), mul(b, b));
    if determinant == 0 {
        return None;
    }
    let sum = div(sub(mul(a, d), mul(b, c)), determinant);
    let product = div(sub(mul(b, d), mul(c, c)), determinant);
    let is_root = |x: u64| add(sub(mul(x, x), mul(sum, x)), product) == 0;
    let first = (1..=count).find(|x| is_root(*x))?;
    let second = sub(sum, first);
    (legal(second) && second != first).then(|| vec![first - 1, second - 1])
}

/// The first of the shards that are more than `then`, if the others, without them, are those whose sums are `saved`.
fn added(sources: &Sources, then: u64, saved: Sums) -> Result<Option<u64>> {
    let more = sources.count() as u64 - then;
    let looks = Looks::of(then);
    let either = looks.0.iter().flat_map(|place| [*place as usize, (*place + more) as usize]);
    let shards = Shards::read(sources, either)?;
    let hash = |number: u64, place: u64| shards.hash(number as usize, looks.has(place));
    let (mut before, mut behind) = (Sums::default(), Sums::default());
    (0..then).for_each(|place| behind.put(place, hash(place + more, place)));
    for first in 0..=then {
        if before.plus(behind) == saved {
            return Ok(Some(first));
        }
        if first < then {
            before.put(first, hash(first, first));
            behind.take(first, hash(first + more, first));
        }
    }
    Ok(None)
}

/// The place of the one shard that is no more, if with it the sums of the `then` shards were `saved`.
fn missing(sources: &Sources, then: u64, saved: Sums) -> Result<Option<u64>> {
    let now = then - 1;
    let looks = Looks::of(then);
    let either = looks.0.iter().flat_map(|place| [Some(*place), place.checked_sub(1)]).flatten();
    let shards = Shards::read(sources, either.map(|number| number as usize))?;
    let hash = |number: u64, place: u64| shards.hash(number as usize, looks.has(place));
    let mut rest = Sums::default();
    (0..now).for_each(|number| rest.put(number + 1, hash(number, number + 1)));
    for gap in 0..=now {
        let lost = saved.minus(rest);
        if lost.0 == Sums::terms(gap, lost.0[0]) {
            return Ok(Some(gap));
        }
        if gap < now {
            rest.take(gap + 1, hash(gap, gap + 1));
            rest.put(gap, hash(gap, gap));
        }
    }
    Ok(None)
}

/// How a fingerprint is written: numbers, and hashes in hexadecimal.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Fingerprint")]
struct Text {
    samples: u64,
    shards: u64,
    fields: String,
    chunks: String,
    identity: String,
    total: String,
    sums: String,
    buckets: String,
}

impl From<Fingerprint> for Text {
    fn from(print: Fingerprint) -> Self {
        let hex = |word: u64| format!("{word:016x}");
        Self {
            samples: print.samples,
            shards: print.shards,
            fields: hex(print.fields),
            chunks: hex(print.chunks),
            identity: hex(print.identity),
            total: hex(print.total),
            sums: print.sums.0.map(hex).concat(),
            buckets: print.buckets.map(|bucket| format!("{bucket:08x}")).concat(),
        }
    }
}

impl TryFrom<Text> for Fingerprint {
    type Error = Error;

    fn try_from(text: Text) -> Result<Self> {
        let [fields] = numbers(&text.fields, "fields")?;
        let [chunks] = numbers(&text.chunks, "chunks")?;
        let [identity] = numbers(&text.identity, "identity")?;
        let [total] = numbers(&text.total, "total")?;
        let sums: [u64; SUMS] = numbers(&text.sums, "sums")?;
        if sums.iter().any(|sum| *sum >= P) {
            return Err(Error::new(ErrorKind::State, Stage::State, "a fingerprint's `sums` are too large"));
        }
        let buckets = numbers::<BUCKETS>(&text.buckets, "buckets")?.map(|bucket| bucket as u32);
        let (samples, shards) = (text.samples, text.shards);
        Ok(Self { samples, shards, fields, chunks, identity, total, sums: Sums(sums), buckets })
    }
}

/// `N` numbers of equally many hexadecimal digits, in lower case: 16, or 8 for buckets.
fn numbers<const N: usize>(text: &str, name: &str) -> Result<[u64; N]> {
    let wrong = || {
        let message = format!("a fingerprint's `{name}` is not the hexadecimal number that it should be");
        Error::new(ErrorKind::State, Stage::State, message)
    };
    let digits = if N == BUCKETS { 8 } else { 16 };
    let legal = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() != N * digits || !text.bytes().all(legal) {
        return Err(wrong());
    }
    let mut out = [0; N];
    for (index, number) in out.iter_mut().enumerate() {
        let part = &text[index * digits..][..digits];
        *number = u64::from_str_radix(part, 16).map_err(|_| wrong())?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::Records;
    use proptest::prelude::*;

    fn sums(hashes: &[u64]) -> Sums {
        let mut sums = Sums::default();
        hashes.iter().zip(0..).for_each(|(hash, place)| sums.put(place, *hash));
        sums
    }

    proptest! {
        #[test]
        fn one_or_two_changed_shards_are_found_by_their_sums(
            hashes in prop::collection::vec(0..P, 1..300),
            places in prop::collection::vec(any::<prop::sample::Index>(), 1..=2),
            by in prop::collection::vec(1..P, 2),
        ) {
            let mut places: Vec<usize> = places.iter().map(|place| place.index(hashes.len())).collect();
            places.sort_unstable();
            places.dedup();
            let mut changed_hashes = hashes.clone();
            places.iter().zip(by).for_each(|(place, by)| changed_hashes[*place] = add(changed_hashes[*place], by));
            let found = changed(sums(&changed_hashes).minus(sums(&hashes)), hashes.len() as u64);
            prop_assert_eq!(found, Some(places.iter().map(|place| *place as u64).collect()));
        }

        #[test]
        fn more_changed_shards_are_never_taken_for_one_or_two(
            hashes in prop::collection::vec(0..P, 3..100), by in prop::collection::vec(1..P, 3..100),
        ) {
            let changed_hashes: Vec<u64> =
                hashes.iter().zip(by.iter().chain(std::iter::repeat(&7))).map(|(hash, by)| add(*hash, *by)).collect();
            prop_assert_eq!(changed(sums(&changed_hashes).minus(sums(&hashes)), hashes.len() as u64), None);
        }

        #[test]
        fn a_division_undoes_a_multiplication(a in 0..P, b in 1..P) {
            prop_assert_eq!(div(mul(a, b), b), a);
            prop_assert_eq!(add(sub(a, b), b), a);
        }

        #[test]
        fn buckets_partition_the_places(count in 1_u64..5000) {
            let mut next = 0;
            for bucket in 0..BUCKETS {
                let places = places_in(bucket, count);
                prop_assert_eq!(places.start, next);
                prop_assert!(places.clone().all(|place| bucket_of(place, count) == bucket));
                prop_assert!(count > BUCKETS as u64 || places.end - places.start <= 1);
                next = places.end;
            }
            prop_assert_eq!(next, count);
        }

        #[test]
        fn at_most_256_shards_are_opened_the_first_and_the_last_among_them(count in 1_u64..u64::MAX) {
            let looks = Looks::of(count);
            prop_assert_eq!(looks.0.len() as u64, count.min(LOOKS));
            prop_assert!(looks.has(0) && looks.has(count - 1) && !looks.has(count));
            prop_assert!(looks.0.windows(2).all(|pair| pair[0] < pair[1]));
        }

        #[test]
        fn whatever_was_saved_is_compared_without_a_panic(words in any::<[u64; WORDS]>(), shards in 0_u64..5) {
            let dataset = Records::builder(2).open_bytes([1; 8]).unwrap();
            let print = Fingerprint::of(&dataset).unwrap();
            for shards in [words[1], shards, u64::MAX] {
                let mut words = words;
                words[1] = shards;
                let saved = Fingerprint::of_words(words);
                prop_assert_eq!(saved.words()[..6].to_vec(), words[..6].to_vec());
                let error = print.compare(&saved, &dataset).unwrap_err();
                prop_assert_eq!(error.kind(), ErrorKind::FingerprintMismatch);
                let text = serde_json::to_string(&saved).unwrap();
                prop_assert_eq!(serde_json::from_str::<Fingerprint>(&text).unwrap(), saved);
            }
        }
    }

    #[test]
    fn places_beyond_any_memory_do_not_overflow() {
        let mut sums = Sums::default();
        sums.put(u64::MAX - 1, P - 1);
        sums.take(u64::MAX - 1, P - 1);
        assert_eq!(sums, Sums::default());
        assert_eq!((bucket_of(u64::MAX - 1, u64::MAX), places_in(15, u64::MAX).end), (15, u64::MAX));
    }

    #[test]
    fn the_hash_is_pinned_so_that_states_of_other_machines_and_versions_are_read() {
        let digest = Digest::new("a");
        assert_eq!(digest.end(), 0x7b5a_84aa_31c5_6a09);
        assert_eq!(digest.word(1).words(&[2, 3]).bytes(b"0123456789").end(), 0xef0c_ae7f_5a11_6d55);
    }

    #[test]
    fn lists_that_hold_the_same_together_have_different_hashes() {
        let digest = Digest::new("a");
        let ends = [
            digest.words(&[1, 2]).words(&[]),
            digest.words(&[1]).words(&[2]),
            digest.words(&[]).words(&[1, 2]),
            digest.bytes(b"ab").bytes(b""),
            digest.bytes(b"a").bytes(b"b"),
            digest.bytes(b"a\0"),
            digest.bytes(b"a"),
            digest,
            Digest::new("b"),
        ];
        let mut ends = ends.map(Digest::end);
        ends.sort_unstable();
        assert!(ends.windows(2).all(|pair| pair[0] != pair[1]), "{ends:x?}");
    }

    #[test]
    fn the_fingerprint_is_pinned() {
        let dataset = Records::builder(2).open_bytes([1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let text = serde_json::to_value(Fingerprint::of(&dataset).unwrap()).unwrap();
        let expected = serde_json::json!({
            "samples": 4,
            "shards": 1,
            "fields": "7165a6c97b3abf52",
            "chunks": "0000000000000000",
            "identity": "a4a54abe3fdee47c",
            "total": "e472b386fa6595b6",
            // One shard, whose place plus 1 is 1.
            "sums": "14236bd69c322896".repeat(SUMS),
            "buckets": format!("0eb1287c{}", "dbfb0882".repeat(BUCKETS - 1)),
        });
        assert_eq!(text, expected);
    }

    #[test]
    fn text_that_is_no_fingerprint_is_refused() {
        let dataset = Records::builder(2).open_bytes([1; 8]).unwrap();
        let text = serde_json::to_string(&Fingerprint::of(&dataset).unwrap()).unwrap();
        let fields = format!("\"fields\":\"{:016x}\"", fields(dataset.schema()));
        assert!(text.contains(&fields));
        for wrong in ["", "0", "+000000000000000", "000000000000000G", "00000000000000000", "00000000000000é", "é"] {
            let text = text.replace(&fields, &format!("\"fields\":\"{wrong}\""));
            let error = serde_json::from_str::<Fingerprint>(&text).unwrap_err().to_string();
            assert!(error.contains("a fingerprint's `fields` is not the hexadecimal number"), "{error}");
        }
        let start = text.find("\"sums\":\"").unwrap() + 8;
        let mut large = text.clone();
        large.replace_range(start..start + 16, "ffffffffffffffff");
        assert!(serde_json::from_str::<Fingerprint>(&large).unwrap_err().to_string().contains("too large"));
    }
}
