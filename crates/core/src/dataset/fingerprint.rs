//! Fingerprint of a dataset in a few hundred bytes: detects a changed dataset and finds the changed
//! shard.
//!
//! ```text
//! shard i of n ──name, length, first and last 4 KiB──► h_i ─┬─► one hash of all
//!                                                           └─► 64 bucket hashes, shard i in bucket i · 64 / n
//! number of samples, schema, chunk starts, identity() ─────────► beside them
//! ```
//!
//! With up to 64 shards, each shard has its own bucket, and an error names the changed shard. With
//! more, it names a bucket's range of shards. If shards were added or removed, the saved buckets
//! show up to which shard nothing changed.
//!
//! Data may move to another folder, mount or machine: folders, times and inodes are not hashed. For
//! objects in a store, the listed version (etag) is hashed instead of the ends; no request is made.
//! The commits of repositories of the Hugging Face Hub are kept beside, for errors: another commit
//! with the same files is the same dataset.
//!
//! Limits: bytes between the first and the last 4 KiB are not read. If there are more than 256
//! shards, only 256 evenly spaced ones are opened; for the others, only name and length are hashed.
//! A shard rewritten with the same name, length and ends goes unnoticed; checksums detect it. Cost:
//! at most 256 opened files and 512 reads of 4 KiB, on at most 32 threads; then some 100 ns per
//! shard, and the time of [`Dataset::identity`].

use super::digest::Digest;
use super::parallel::parallel;
use crate::dataset::Dataset;
use crate::storage::{Blob, SourceId, Sources, patiently};
use crate::tensor::{DType, EncodedField, Encoding, Shape};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use serde::{Deserialize, Serialize};
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::PathBuf;

/// Bytes read at each end of a shard.
const ENDS: u64 = 4096;
/// Maximum number of opened shards.
const LOOKS: u64 = 256;
const BUCKETS: usize = 64;
/// Maximum number of commits, so that a state stays small.
const COMMITS: usize = 4;
/// Number of 64-bit words for the buckets' hashes, four hashes to a word.
const BUCKET_WORDS: usize = BUCKETS / 4;
/// Number of 64-bit words in a fingerprint.
pub(crate) const WORDS: usize = 6 + BUCKET_WORDS;

/// Fingerprint of a dataset: tells whether a run still has the dataset it started with, and if not,
/// where it changed. Part of every `State`.
///
/// It holds the number of samples and hashes: of the fields, of the chunks, of
/// [`Dataset::identity`], and of every shard's name, length and (for at most 256 shards) first and
/// last 4 KiB. The data's location does not matter: it may move or be mounted elsewhere.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "FingerprintText", into = "FingerprintText")]
pub struct Fingerprint {
    samples: u64,
    shards: u64,
    fields: u64,
    chunks: u64,
    identity: u64,
    hashes: Hashes,
    /// Of the first [`COMMITS`] repositories of the Hub, in the order of the sources.
    commits: Vec<String>,
}

impl PartialEq for Fingerprint {
    fn eq(&self, other: &Self) -> bool {
        self.words() == other.words()
    }
}

impl Eq for Fingerprint {}

impl Hash for Fingerprint {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.words().hash(state);
    }
}

impl Fingerprint {
    /// Makes the fingerprint: opens at most 256 of the files and reads their first and last 4 KiB.
    ///
    /// Errors: file system errors, and [`ErrorKind::Changed`] for a file whose length differs from
    /// the index; all with the path.
    pub fn of(dataset: &dyn Dataset) -> Result<Self> {
        let shards = dataset.sources().count() as u64;
        Ok(Self {
            samples: dataset.len(),
            shards,
            fields: fields(dataset.schema()),
            chunks: dataset.chunked().map_or(0, |chunks| {
                Digest::new("chunks").words(chunks.starts()).end()
            }),
            identity: dataset.identity(),
            hashes: Hashes::of(dataset.sources(), shards)?,
            commits: dataset
                .sources()
                .commits()?
                .into_iter()
                .take(COMMITS)
                .map(|(commit, _)| commit)
                .collect(),
        })
    }

    /// Compares with the fingerprint `saved` of an earlier run. `self` is the fingerprint of
    /// `dataset`, whose files are read again if their number changed.
    ///
    /// Errors: [`ErrorKind::FingerprintMismatch`] with the differences: the shard (counted from 0,
    /// with its path) or the range of shards, the numbers of shards or samples, the fields, or the
    /// choice of samples.
    pub fn compare(&self, saved: &Self, dataset: &dyn Dataset) -> Result<()> {
        if self == saved {
            return Ok(());
        }
        let mut differences = Vec::new();
        let mut shard = None;
        let same_shards = (self.shards, self.hashes) == (saved.shards, saved.hashes);
        if !same_shards {
            let (difference, number) = self.differing_shards(saved, dataset.sources());
            differences.push(difference);
            shard = number.map(|number| dataset.sources().path(SourceId::at(number as usize)));
        }
        if self.samples != saved.samples {
            differences.push(format!(
                "{} samples, {} when saved",
                self.samples, saved.samples
            ));
        }
        if self.fields != saved.fields {
            differences.push(format!(
                "other fields than when saved; now they are {}",
                described(dataset.schema())
            ));
        }
        // Other shards imply other chunks and identities: do not report those too.
        if same_shards && self.chunks != saved.chunks {
            differences.push("the samples are cut into other chunks".into());
        }
        if same_shards && self.identity != saved.identity {
            let what = "the ids mean other samples of the same files: another split, subset or \
                 window, other classes or labels, another choice of columns or members, or another \
                 snapshot of a table";
            differences.push(what.into());
        }
        let message = format!(
            "{}; {}, or start a new run",
            differences.join("; "),
            self.way_back(saved, dataset.sources())
        );
        let error = Error::new(ErrorKind::FingerprintMismatch, Stage::State, message);
        Err(match shard {
            Some(path) => error.with_path(path),
            None => error,
        })
    }

    /// What to open instead, with both commits if a repository of the Hub has moved.
    fn way_back(&self, saved: &Self, sources: &Sources) -> String {
        let names = sources.commits().unwrap_or_default();
        let pairs = self.commits.iter().zip(&saved.commits).zip(&names);
        let moved = pairs.filter(|((now, then), _)| now != then);
        let moved: Vec<_> = moved
            .map(|((now, then), (_, name))| format!("{name}@{then} (commit {now} is open)"))
            .collect();
        match moved.is_empty() {
            true => "open the dataset that the run began with".into(),
            false => format!(
                "open the commit that the run began with, {}",
                moved.join(", ")
            ),
        }
    }

    /// Commits of the Hub's repositories, in the order of the sources.
    pub fn commits(&self) -> &[String] {
        &self.commits
    }

    /// Whether data was only appended since `saved`: the first shards of `self`, in `sources`, are
    /// all the shards of `saved`, and there are more samples.
    pub fn appends_to(&self, saved: &Self, sources: &Sources) -> bool {
        let more = self.samples > saved.samples
            && self.shards >= saved.shards
            && self.fields == saved.fields;
        more && Hashes::of(sources, saved.shards).is_ok_and(|hashes| hashes == saved.hashes)
    }

    /// Number of samples.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Number of shards (sources: files, or memory).
    pub fn shards(&self) -> u64 {
        self.shards
    }

    /// Describes the difference of the shards. Also returns the number of the first differing
    /// shard, if it is certain.
    fn differing_shards(&self, saved: &Self, sources: &Sources) -> (String, Option<u64>) {
        let then = saved.shards;
        let now = self.shards;
        if then == now {
            let differing = self.hashes.differing(&saved.hashes);
            let Some(first) = differing.first() else {
                return ("other shards than when saved".into(), None);
            };
            let (place, number) = named(&places_in(*first, now), sources);
            let have = if differing.len() > 1 {
                "and others have"
            } else {
                "has"
            };
            let what = "another name, length or content than when saved";
            return (
                format!("{place} of {now} (counted from 0) {have} {what}"),
                number,
            );
        }
        let counts = format!("{now} shards, {then} when saved");
        // The numbers of shards differ anyway, so an error of this second read does not matter.
        let Ok(hashes) = Hashes::of(sources, then) else {
            return (counts, None);
        };
        let both = then.min(now);
        let first = hashes
            .differing(&saved.hashes)
            .first()
            .map_or(both..both, |bucket| places_in(*bucket, then));
        let difference = match first.start..first.end.min(both) {
            first if first.is_empty() => format!("the first {both} are the same"),
            first => format!(
                "the first difference is {} (counted from 0)",
                named(&first, sources).0
            ),
        };
        (format!("{counts}; {difference}"), None)
    }

    /// All words of the fingerprint, for checksums.
    pub fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[..6].copy_from_slice(&[
            self.samples,
            self.shards,
            self.fields,
            self.chunks,
            self.identity,
            self.hashes.total,
        ]);
        words[6..].copy_from_slice(&self.hashes.buckets);
        words
    }

    /// A fingerprint of arbitrary words, for tests of types that hold one.
    #[cfg(any(test, feature = "unstable"))]
    pub fn of_words(words: [u64; WORDS]) -> Self {
        let [samples, shards, fields, chunks, identity, total, ..] = words;
        let buckets = std::array::from_fn(|k| words[6 + k]);
        Self {
            samples,
            shards,
            fields,
            chunks,
            identity,
            hashes: Hashes { total, buckets },
            commits: Vec::new(),
        }
    }

    /// The same fingerprint with these commits.
    #[cfg(any(test, feature = "unstable"))]
    pub fn with_commits(self, commits: Vec<String>) -> Self {
        Self { commits, ..self }
    }
}

/// Hashes of all shards: one hash of all in order, and 16 bits per bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Hashes {
    total: u64,
    buckets: [u64; BUCKET_WORDS],
}

impl Hashes {
    /// Hashes the shards as if there were `count` of them. `count` determines the opened shards and
    /// the buckets, and may differ from the real number.
    fn of(sources: &Sources, count: u64) -> Result<Self> {
        let here = count.min(sources.count() as u64);
        let looks: Vec<u64> = looks(count).filter(|place| *place < here).collect();
        let ends = parallel(&looks, |_, place| {
            ends_of(sources, SourceId::at(*place as usize))
        })?;
        let mut ends = looks.into_iter().zip(ends).peekable();
        let shard = Digest::new("shard");
        let mut total = Digest::new("shards");
        let mut buckets = [Digest::new("bucket"); BUCKETS];
        for place in 0..here {
            let id = SourceId::at(place as usize);
            let digest = shard
                .bytes(sources.name_of(id).unwrap_or_default())
                .word(sources.len_of(id));
            let ends = ends.next_if(|(looked, _)| *looked == place);
            let hash = ends.map_or(digest, |(_, ends)| digest.word(ends)).end();
            total = total.word(hash);
            let bucket = &mut buckets[bucket_of(place, count)];
            *bucket = bucket.word(hash);
        }
        let mut words = buckets.as_chunks::<4>().0.iter().map(|four| {
            four.iter()
                .fold(0, |word, bucket| word << 16 | bucket.end() >> 48)
        });
        Ok(Self {
            total: total.end(),
            buckets: std::array::from_fn(|_| words.next().unwrap_or_default()),
        })
    }

    /// Numbers of the buckets whose hashes differ, ascending.
    fn differing(&self, other: &Self) -> Vec<usize> {
        let hash = |hashes: &Self, bucket: usize| {
            (hashes.buckets[bucket / 4] >> (48 - 16 * (bucket % 4))) as u16
        };
        (0..BUCKETS)
            .filter(|bucket| hash(self, *bucket) != hash(other, *bucket))
            .collect()
    }
}

/// Numbers of the shards to open among `count` shards, ascending.
fn looks(count: u64) -> impl Iterator<Item = u64> {
    (0..count.min(LOOKS)).map(move |k| match count <= LOOKS {
        true => k,
        false => (u128::from(k) * u128::from(count - 1) / u128::from(LOOKS - 1)) as u64,
    })
}

fn bucket_of(place: u64, count: u64) -> usize {
    (u128::from(place) * BUCKETS as u128 / u128::from(count.max(1))) as usize
}

/// Numbers of the shards in a bucket, if there are `count` shards in all.
fn places_in(bucket: usize, count: u64) -> Range<u64> {
    let start =
        |bucket: usize| (bucket as u128 * u128::from(count)).div_ceil(BUCKETS as u128) as u64;
    start(bucket)..start(bucket + 1)
}

/// Text such as `shard 3` or `a shard between 8 (data/8.bin) and 11`. Also returns the shard's
/// number if the range has only one shard.
fn named(places: &Range<u64>, sources: &Sources) -> (String, Option<u64>) {
    let first = places.start;
    let last = places.end.saturating_sub(1);
    if first >= last {
        return (format!("shard {first}"), Some(first));
    }
    (
        format!(
            "a shard between {first} ({}) and {last}",
            shown(sources, first)
        ),
        None,
    )
}

/// Hash of the names, lengths, and first and last 4 KiB of all sources. If there are more than 256,
/// the ends of only 256 of them are read.
pub fn ends_of_all(sources: &Sources) -> Result<u64> {
    Ok(Hashes::of(sources, sources.count() as u64)?.total)
}

/// Hash of the first and last bytes of a source; for an object, of its version.
fn ends_of(sources: &Sources, id: SourceId) -> Result<u64> {
    let digest = Digest::new("ends");
    let sizes = |len: u64| (len.min(ENDS), (len - len.min(ENDS)).min(ENDS));
    if let Some(bytes) = sources.bytes_of(id) {
        let (first, last) = sizes(bytes.len() as u64);
        return Ok(digest
            .bytes(&bytes[..first as usize])
            .bytes(&bytes[bytes.len() - last as usize..])
            .end());
    }
    if sources.is_remote(id) {
        return Ok(digest
            .bytes(sources.pin(id).unwrap_or_default().as_bytes())
            .end());
    }
    patiently(|| {
        let input = Blob::of_source(sources, id)?;
        let len = sources.len_of(id);
        let (first, last) = sizes(len);
        let head = input.read(0, first, "its first bytes")?;
        let tail = input.read(len - last, last, "its last bytes")?;
        Ok(digest.bytes(&head).bytes(&tail).end())
    })
}

/// Hash of the schema.
fn fields(schema: &[EncodedField]) -> u64 {
    let dims = |digest: Digest, dims: &[usize]| {
        let start = digest.word(dims.len() as u64);
        dims.iter()
            .fold(start, |digest, dim| digest.word(*dim as u64))
    };
    // Booleans used to be stored as bytes. They hash like bytes, so that states from that time stay
    // valid.
    let name = |dtype: DType| {
        if dtype == DType::Bool {
            DType::U8.name()
        } else {
            dtype.name()
        }
        .as_bytes()
    };
    schema
        .iter()
        .fold(
            Digest::new("fields").word(schema.len() as u64),
            |digest, field| {
                let digest = digest.bytes(field.name.as_bytes());
                match &field.encoding {
                    Encoding::Image => digest.word(0),
                    Encoding::Bytes => digest.word(1),
                    Encoding::List { pictures, max } => {
                        digest.word(4).word(u64::from(*pictures)).word(*max as u64)
                    }
                    Encoding::Raw {
                        dtype,
                        shape: Shape::Fixed(fixed),
                    } => dims(digest.word(2).bytes(name(*dtype)), fixed),
                    Encoding::Raw {
                        dtype,
                        shape: Shape::UpTo { max, inner },
                    } => dims(digest.word(3).bytes(name(*dtype)).word(*max as u64), inner),
                }
            },
        )
        .end()
}

/// Description such as `image (a picture), label i64 []`.
fn described(schema: &[EncodedField]) -> String {
    schema
        .iter()
        .map(|field| match &field.encoding {
            Encoding::Image => format!("{} (a picture)", field.name),
            Encoding::Bytes => format!("{} (bytes)", field.name),
            Encoding::List { pictures, max } => {
                let what = if *pictures {
                    "pictures"
                } else {
                    "byte strings"
                };
                format!("{} (up to {max} {what})", field.name)
            }
            Encoding::Raw {
                dtype,
                shape: Shape::Fixed(dims),
            } => format!("{} {dtype} {dims:?}", field.name),
            Encoding::Raw {
                dtype,
                shape: Shape::UpTo { max, inner },
            } => {
                format!("{} {dtype} up to {max} × {inner:?}", field.name)
            }
        })
        .collect::<Vec<_>>()
        .join(", ")
}

/// The path of a shard on one line.
fn shown(sources: &Sources, number: u64) -> String {
    let path: PathBuf = sources.path(SourceId::at(number as usize));
    let text = path.display().to_string();
    if text.contains(char::is_control) {
        format!("{text:?}")
    } else {
        text
    }
}

/// Serialised form of a fingerprint: numbers, and hashes in hexadecimal.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Fingerprint")]
struct FingerprintText {
    samples: u64,
    shards: u64,
    fields: String,
    chunks: String,
    identity: String,
    total: String,
    buckets: String,
}

impl From<Fingerprint> for FingerprintText {
    fn from(print: Fingerprint) -> Self {
        let hex = |word: u64| format!("{word:016x}");
        Self {
            samples: print.samples,
            shards: print.shards,
            fields: hex(print.fields),
            chunks: hex(print.chunks),
            identity: hex(print.identity),
            total: [vec![hex(print.hashes.total)], print.commits]
                .concat()
                .join(" "),
            buckets: print.hashes.buckets.map(hex).concat(),
        }
    }
}

impl TryFrom<FingerprintText> for Fingerprint {
    type Error = Error;

    fn try_from(text: FingerprintText) -> Result<Self> {
        let [fields] = numbers(&text.fields, "fields")?;
        let [chunks] = numbers(&text.chunks, "chunks")?;
        let [identity] = numbers(&text.identity, "identity")?;
        let (total, commits) = text.total.split_once(' ').unwrap_or((&text.total, ""));
        let [total] = numbers(total, "total")?;
        let commits: Vec<_> = commits.split_terminator(' ').map(String::from).collect();
        let is_commit =
            |name: &String| name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        if commits.len() > COMMITS || !commits.iter().all(is_commit) {
            let message = "a fingerprint's `total` has commits that are not 40 hexadecimal digits";
            return Err(Error::new(ErrorKind::State, Stage::State, message));
        }
        let hashes = Hashes {
            total,
            buckets: numbers(&text.buckets, "buckets")?,
        };
        Ok(Self {
            samples: text.samples,
            shards: text.shards,
            fields,
            chunks,
            identity,
            hashes,
            commits,
        })
    }
}

/// Parses `N` numbers of 16 lower-case hexadecimal digits each.
fn numbers<const N: usize>(text: &str, name: &str) -> Result<[u64; N]> {
    let mut out = [0; N];
    let read = text.len() == N * 16
        && text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        && out.iter_mut().enumerate().all(|(index, number)| {
            u64::from_str_radix(&text[index * 16..][..16], 16)
                .map(|read| *number = read)
                .is_ok()
        });
    if read {
        return Ok(out);
    }
    let message = format!(
        "a fingerprint's `{name}` must be {} hexadecimal digits in lower case",
        N * 16
    );
    Err(Error::new(ErrorKind::State, Stage::State, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::Parts;
    use crate::storage::{Extent, SourceId, Sources};
    use crate::tensor::Field;
    use proptest::prelude::*;
    use std::sync::Arc;

    /// Records of 2 bytes in memory.
    struct Pairs {
        sources: Arc<Sources>,
        schema: [EncodedField; 1],
    }

    impl Pairs {
        fn of(bytes: [u8; 8]) -> Self {
            let mut sources = Sources::new();
            sources.memory(Arc::new(bytes));
            Self {
                sources: Arc::new(sources),
                schema: [EncodedField::raw(Field::fixed("record", DType::U8, [2]))],
            }
        }
    }

    impl Dataset for Pairs {
        crate::own!(sources);

        fn schema(&self) -> &[EncodedField] {
            &self.schema
        }

        fn len(&self) -> u64 {
            4
        }

        fn sizes(&self) -> crate::dataset::Sizes {
            crate::dataset::Sizes::new(2)
        }

        fn identity(&self) -> u64 {
            0xa4a5_4abe_3fde_e47c
        }

        fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
            let extent = Extent {
                source: SourceId::at(0),
                offset: 2 * sample,
                len: 2,
            };
            parts.extent(0, extent);
            Ok(())
        }
    }

    proptest! {
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
        fn at_most_256_shards_are_opened_with_the_first_and_last(count in 1_u64..u64::MAX) {
            let looks: Vec<u64> = looks(count).collect();
            prop_assert_eq!(looks.len() as u64, count.min(LOOKS));
            prop_assert_eq!((looks[0], looks[looks.len() - 1]), (0, count - 1));
            prop_assert!(looks.windows(2).all(|pair| pair[0] < pair[1]));
        }

        #[test]
        fn any_saved_fingerprint_is_compared_without_a_panic(words in any::<[u64; WORDS]>(), shards in 0_u64..5) {
            let dataset = Pairs::of([1; 8]);
            let print = Fingerprint::of(&dataset).unwrap();
            for shards in [words[1], shards, u64::MAX] {
                let mut words = words;
                words[1] = shards;
                let saved = Fingerprint::of_words(words);
                prop_assert_eq!(saved.words(), words);
                let error = print.compare(&saved, &dataset).unwrap_err();
                prop_assert_eq!(error.kind(), ErrorKind::FingerprintMismatch);
                let text = serde_json::to_string(&saved).unwrap();
                prop_assert_eq!(serde_json::from_str::<Fingerprint>(&text).unwrap(), saved);
            }
        }
    }

    #[test]
    fn huge_shard_counts_do_not_overflow() {
        assert_eq!(
            (
                bucket_of(u64::MAX - 1, u64::MAX),
                places_in(63, u64::MAX).end
            ),
            (63, u64::MAX)
        );
    }

    #[test]
    fn the_fingerprint_is_pinned() {
        let dataset = Pairs::of([1, 2, 3, 4, 5, 6, 7, 8]);
        let text = serde_json::to_value(Fingerprint::of(&dataset).unwrap()).unwrap();
        let expected = serde_json::json!({
            "samples": 4,
            "shards": 1,
            "fields": "7165a6c97b3abf52",
            "chunks": "0000000000000000",
            "identity": "a4a54abe3fdee47c",
            "total": "9aa76e70c2d72ee2",
            "buckets": format!("7ad5{}", "dbfb".repeat(BUCKETS - 1)),
        });
        assert_eq!(text, expected);
    }

    #[test]
    fn a_state_of_booleans_as_bytes_stays_valid() {
        let of = |dtype| fields(&[EncodedField::raw(Field::fixed("x", dtype, [3]))]);
        assert_eq!(of(DType::Bool), of(DType::U8));
        assert_ne!(of(DType::Bool), of(DType::I8));
    }

    #[test]
    fn malformed_fingerprint_text_is_refused() {
        let dataset = Pairs::of([1; 8]);
        let text = serde_json::to_string(&Fingerprint::of(&dataset).unwrap()).unwrap();
        let fields = format!("\"fields\":\"{:016x}\"", fields(dataset.schema()));
        assert!(text.contains(&fields));
        for wrong in [
            "",
            "0",
            "+000000000000000",
            "000000000000000G",
            "00000000000000000",
            "00000000000000é",
            "é",
        ] {
            let text = text.replace(&fields, &format!("\"fields\":\"{wrong}\""));
            let error = serde_json::from_str::<Fingerprint>(&text)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("a fingerprint's `fields` must be 16 hexadecimal digits"),
                "{error}"
            );
        }
    }
}
