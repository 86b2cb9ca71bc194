//! Samples joined by name to the rows of another dataset: labels, captions or latents kept apart.
//!
//! ```text
//! left   a.jpg  b.jpg  c.jpg                 keys ──one rule for all──► pairs
//! right  c  b  d   (file names without ending)        sample 0 = (b.jpg, row 1), sample 1 = (c.jpg, row 0)
//!                                                     told: a.jpg has no row, row d has no sample
//! ```
//!
//! Fields are those of the left side, then those of the right one. Keys are compared when the join
//! is opened, from names alone, and are not kept: a pair takes 4 bytes, 8 if samples are left out.
//!
//! Rules: equal keys; the sample's file name; its path without ending; its file name without ending;
//! the file names of both sides; those without ending. One rule holds for all: the first that finds a
//! partner for most of the smaller side, else the one that finds the most.
//!
//! Limits: 2^32 - 2 samples on each side; samples with random access. Invariants: a sample has at
//! most one row and a row at most one sample, else the join is refused; nothing is left out that
//! [`Missing`] does not allow, and the description tells what was.

use crate::dataset::DatasetExt;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::{frames_of, own};
use feedline_core::dataset::{
    Chunked, Dataset, Digest, Framed, Parts, Sizes, Strings, lie, member, unordered,
};
use feedline_core::storage::Sources;
use feedline_core::tensor::EncodedField;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Maximum number of misses of each kind in a message.
const SHOWN: usize = 5;
/// No partner.
const NONE: u32 = u32::MAX;

/// What a join does with samples without a row, and rows without a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// They are an error that counts both and names the first of them.
    #[default]
    Error,
    /// They are left out, and the description counts both and names the first of them.
    Skip,
}

/// Samples with the fields of another dataset's rows of the same names. Made by
/// [`DatasetExt::join`].
pub struct Joined {
    left: Arc<dyn Dataset>,
    right: Arc<dyn Dataset>,
    schema: Vec<EncodedField>,
    sources: Arc<Sources>,
    /// Offset of the right side's source ids in the common table of sources.
    base: usize,
    pairs: Pairs,
    identity: u64,
    /// The rule, and what was left out.
    told: String,
}

/// Builder of [`Joined`], by [`DatasetExt::join`].
#[must_use]
pub struct JoinBuilder {
    left: Arc<dyn Dataset>,
    right: Arc<dyn Dataset>,
    missing: Missing,
}

/// Ids of both sides, for each sample.
struct Pairs {
    /// `None` if every sample of the left side has a row.
    lefts: Option<Box<[u32]>>,
    rights: Box<[u32]>,
}

/// A part of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Whole,
    /// After the last slash.
    Name,
    /// Before the last dot of the name.
    Stem,
    NameStem,
}

/// The forms of a sample's key and of a row's key that must be equal, and their name.
struct Rule {
    left: Form,
    right: Form,
    name: &'static str,
}

const RULES: [Rule; 6] = [
    Rule::new(Form::Whole, Form::Whole, "key"),
    Rule::new(Form::Name, Form::Whole, "file name"),
    Rule::new(Form::Stem, Form::Whole, "path without ending"),
    Rule::new(Form::NameStem, Form::Whole, "file name without ending"),
    Rule::new(Form::Name, Form::Name, "file name on both sides"),
    Rule::new(
        Form::NameStem,
        Form::NameStem,
        "file name without ending on both sides",
    ),
];

impl Rule {
    const fn new(left: Form, right: Form, name: &'static str) -> Self {
        Self { left, right, name }
    }
}

impl Form {
    fn of(self, key: &[u8]) -> &[u8] {
        // Tables made on Windows have backslashes.
        let slash = key.iter().rposition(|byte| matches!(byte, b'/' | b'\\'));
        let start = slash.map_or(0, |slash| slash + 1);
        let dot = key[start..].iter().rposition(|byte| *byte == b'.');
        let end = match dot {
            Some(dot) if dot > 0 => start + dot,
            _ => key.len(),
        };
        match self {
            Self::Whole => key,
            Self::Name => &key[start..],
            Self::Stem => &key[..end],
            Self::NameStem => &key[start..end],
        }
    }
}

impl JoinBuilder {
    pub(crate) fn new(left: impl Dataset, right: impl Dataset) -> Self {
        Self {
            left: Arc::new(left),
            right: Arc::new(right),
            missing: Missing::Error,
        }
    }

    /// Sets the policy for samples without a row and rows without a sample. Default:
    /// [`Missing::Error`].
    pub fn missing(mut self, missing: Missing) -> Self {
        self.missing = missing;
        self
    }

    /// Compares the keys of both sides.
    ///
    /// Errors: those of [`Dataset::keys`]; [`ErrorKind::Config`] for
    /// - samples without a row or rows without a sample, unless they may be left out;
    /// - a key that occurs twice on a side, or a row that fits two samples;
    /// - a side without keys, with chunks, or with an order of its own;
    /// - a field that both sides have.
    pub fn open(self) -> Result<Joined> {
        let schema = self.schema()?;
        let matching = Matching {
            left: &*self.left,
            right: &*self.right,
            samples: keys_of(&*self.left)?,
            rows: keys_of(&*self.right)?,
        };
        let matched = matching.run()?;
        let misses = matching.misses(&matched);
        if let (Missing::Error, Some(misses)) = (self.missing, &misses) {
            let skip = Setting::Missing.hint(|skip| format!(", or leave both out by {skip}"));
            let message = format!(
                "{misses} (compared by {}): correct the keys{skip}",
                matched.rule.name
            );
            return Err(refused(message));
        }
        let told = misses.map_or(String::new(), |misses| format!("; left out: {misses}"));
        let told = format!("{}{told}", matched.rule.name);
        let pairs = matched.pairs();
        drop(matching);
        let (sources, base) = joined_sources(&*self.left, &*self.right)?;
        let identity = pairs.digest(
            Digest::new("joined")
                .word(self.left.identity())
                .word(self.right.identity())
                .word(self.left.len())
                .word(self.left.sources().count() as u64),
        );
        Ok(Joined {
            left: self.left,
            right: self.right,
            schema,
            sources,
            base,
            pairs,
            identity: identity.end(),
            told,
        })
    }

    /// The fields of both sides, which must be fit to be joined.
    fn schema(&self) -> Result<Vec<EncodedField>> {
        for side in [&self.left, &self.right] {
            unordered(side, "join its sources, then mix them")?;
            if side.chunked().is_some() {
                let message = format!(
                    "{}: rows in chunks have no random access, which a join needs: read them whole \
                     as a table on its other side",
                    side.describe()
                );
                return Err(refused(message));
            }
        }
        let mut schema = self.left.schema().to_vec();
        for field in self.right.schema() {
            if schema.iter().any(|own| own.name == field.name) {
                let way = Setting::JoinColumns.hint(|columns| format!(" by {columns}"));
                let message = format!(
                    "both sides of the join have a field `{}`: choose other columns{way}",
                    field.name
                );
                return Err(refused(message));
            }
            schema.push(field.clone());
        }
        Ok(schema)
    }
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}

fn keys_of(side: &dyn Dataset) -> Result<Strings> {
    let keys = side.keys()?.ok_or_else(|| {
        refused(format!(
            "{}: its samples have no names to join by; folders of pictures, tar shards and tables \
             have",
            side.describe()
        ))
    })?;
    if keys.len() as u64 != side.len() {
        return lie(format!(
            "the dataset gave {} keys for {} samples",
            keys.len(),
            side.len()
        ));
    }
    let most = (NONE - 1) as usize;
    if keys.len() > most {
        let message = format!("{} samples; a join takes at most {most}", keys.len());
        return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
    }
    Ok(keys)
}

/// The table of both sides' sources, and the offset of the right side's. A table in memory has
/// none, and the left side's are then shared.
fn joined_sources(left: &dyn Dataset, right: &dyn Dataset) -> Result<(Arc<Sources>, usize)> {
    let own = left.sources();
    if right.sources().count() == 0 {
        return Ok((own.clone(), own.count()));
    }
    let mut sources = Sources::clone(own);
    let base = sources.append(right.sources())?;
    Ok((Arc::new(sources), base))
}

/// The keys of both sides, while they are compared.
struct Matching<'d> {
    left: &'d dyn Dataset,
    right: &'d dyn Dataset,
    samples: Strings,
    rows: Strings,
}

/// The partner of each sample and of each row, or `NONE`.
struct Matched {
    rule: &'static Rule,
    pairs: usize,
    row_of: Vec<u32>,
    sample_of: Vec<u32>,
}

/// The rows of one form of their keys, and those whose key another row has, too.
struct RowsByKey<'k> {
    form: Form,
    rows: HashMap<&'k [u8], u32>,
    twice: HashMap<&'k [u8], u32>,
}

impl Matching<'_> {
    fn run(&self) -> Result<Matched> {
        let mut index = RowsByKey::of(&self.rows, Form::Whole);
        // In the order of the rows, so that the message is the same each time.
        let again = index.twice.values().min().copied();
        if let Some(again) = again {
            let key = self.rows.get(again as usize);
            let first = index.rows.get(key).copied().unwrap_or(NONE);
            let what = self.row(first) + " and " + &self.row(again);
            return Err(refused(format!("key {} occurs twice: {what}", shown(key))));
        }
        let most = self.samples.len().min(self.rows.len()) / 2;
        let mut best: Option<Matched> = None;
        for rule in &RULES {
            if index.form != rule.right {
                index = RowsByKey::of(&self.rows, rule.right);
            }
            let matched = match (self.by(rule, &index), &best) {
                (Err(error), None) => return Err(error),
                // A weaker rule may be ambiguous.
                (Err(_), Some(_)) => continue,
                (Ok(matched), _) => matched,
            };
            if matched.pairs > best.as_ref().map_or(0, |best| best.pairs) {
                let is_enough = matched.pairs > most;
                best = Some(matched);
                if is_enough {
                    break;
                }
            }
        }
        if let Some(best) = best {
            return Ok(best);
        }
        let message = format!(
            "no sample of {} has the key of a row of {}: samples are such as {}, rows such as {}",
            self.left.describe(),
            self.right.describe(),
            shown(self.samples.get(0)),
            shown(self.rows.get(0))
        );
        Err(refused(message))
    }

    /// The pairs by this rule. Errors: several samples or rows with one key.
    fn by(&self, rule: &'static Rule, index: &RowsByKey<'_>) -> Result<Matched> {
        let mut row_of = vec![NONE; self.samples.len()];
        let mut sample_of = vec![NONE; self.rows.len()];
        let mut pairs = 0;
        for (sample, key) in (0..).zip(self.samples.iter()) {
            let form = rule.left.of(key);
            let Some(row) = index.rows.get(form).copied() else {
                continue;
            };
            let before = sample_of[row as usize];
            let several = if before != NONE {
                self.sample(before) + " and " + &self.sample(sample)
            } else if let Some(again) = index.twice.get(form) {
                self.row(row) + " and " + &self.row(*again)
            } else {
                pairs += 1;
                row_of[sample as usize] = row;
                sample_of[row as usize] = sample;
                continue;
            };
            return Err(refused(format!(
                "key {} is ambiguous (compared by {}): {several} have it",
                shown(form),
                rule.name
            )));
        }
        Ok(Matched {
            rule,
            pairs,
            row_of,
            sample_of,
        })
    }

    /// A row, for people.
    fn row(&self, row: u32) -> String {
        let key = shown(self.rows.get(row as usize));
        let place = member(self.right, row.into(), None);
        let place = place.unwrap_or_else(|| format!("row {row}"));
        format!("{key} ({place})")
    }

    /// A sample, for people.
    fn sample(&self, sample: u32) -> String {
        format!(
            "{} (sample {sample})",
            shown(self.samples.get(sample as usize))
        )
    }

    /// Counts and first names of the samples without a row and the rows without a sample; `None`
    /// without any.
    fn misses(&self, matched: &Matched) -> Option<String> {
        let samples = misses(&matched.row_of, |sample| {
            shown(self.samples.get(sample as usize))
        });
        let rows = misses(&matched.sample_of, |row| self.row(row));
        let samples =
            samples.map(|(count, names)| format!("{count} samples without a row: {names}"));
        let rows = rows.map(|(count, names)| format!("{count} rows without a sample: {names}"));
        match (samples, rows) {
            (Some(samples), Some(rows)) => Some(samples + "; " + &rows),
            (samples, rows) => samples.or(rows),
        }
    }
}

/// Number and first names of those without a partner; `None` without any.
fn misses(partners: &[u32], name: impl Fn(u32) -> String) -> Option<(usize, String)> {
    let all = (0..).zip(partners).filter(|(_, partner)| **partner == NONE);
    let count = all.clone().count();
    let mut names: Vec<String> = all.take(SHOWN).map(|(number, _)| name(number)).collect();
    if count > SHOWN {
        names.push("…".into());
    }
    (count > 0).then(|| (count, names.join(", ")))
}

/// A key in quotes.
fn shown(key: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(key))
}

impl<'k> RowsByKey<'k> {
    fn of(keys: &'k Strings, form: Form) -> Self {
        let mut rows = HashMap::with_capacity(keys.len());
        let mut twice = HashMap::new();
        for (row, key) in (0..).zip(keys.iter()) {
            let key = form.of(key);
            match rows.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(row);
                }
                Entry::Occupied(_) => {
                    twice.entry(key).or_insert(row);
                }
            }
        }
        Self { form, rows, twice }
    }
}

impl Matched {
    fn pairs(self) -> Pairs {
        if !self.row_of.contains(&NONE) {
            return Pairs {
                lefts: None,
                rights: self.row_of.into(),
            };
        }
        let pairs = (0..).zip(self.row_of).filter(|(_, row)| *row != NONE);
        let (lefts, rights): (Vec<u32>, Vec<u32>) = pairs.unzip();
        Pairs {
            lefts: Some(lefts.into()),
            rights: rights.into(),
        }
    }
}

impl Pairs {
    /// Ids on the left and on the right.
    #[inline]
    fn of(&self, sample: u64) -> (u64, u64) {
        let left = match &self.lefts {
            Some(lefts) => lefts[sample as usize].into(),
            None => sample,
        };
        (left, self.rights[sample as usize].into())
    }

    fn digest(&self, digest: Digest) -> Digest {
        let lefts = self.lefts.iter().flatten();
        lefts
            .chain(&self.rights)
            .fold(digest.word(self.rights.len() as u64), |digest, id| {
                digest.word((*id).into())
            })
    }

    fn heap(&self) -> usize {
        self.lefts.as_deref().map_or(0, size_of_val) + size_of_val(&*self.rights)
    }
}

impl Joined {
    /// Ids of a sample on the left and on the right side. `sample` must be below `len`.
    pub fn origin(&self, sample: u64) -> (u64, u64) {
        self.pairs.of(sample)
    }

    /// The side that has a field, the sample's id there, and the field's number there.
    #[inline]
    fn side_of(&self, sample: u64, field: usize) -> (&dyn Dataset, u64, usize) {
        let (left, right) = self.pairs.of(sample);
        match field.checked_sub(self.left.schema().len()) {
            None => (&*self.left, left, field),
            Some(own) => (&*self.right, right, own),
        }
    }
}

impl Dataset for Joined {
    own!(schema sources framed unordered);

    fn len(&self) -> u64 {
        self.pairs.rights.len() as u64
    }

    fn sizes(&self) -> Sizes {
        let left = self.left.sizes();
        let right = self.right.sizes();
        let is_shared = Arc::ptr_eq(&self.sources, self.left.sources());
        let tables = match is_shared {
            true => 0,
            false => self.left.sources().table_bytes() + self.right.sources().table_bytes(),
        };
        let is_left_alone = self.pairs.lefts.is_none() && right.sample_bytes_max == 0;
        Sizes {
            sample_bytes_max: left.sample_bytes_max.saturating_add(right.sample_bytes_max),
            opened_bytes_max: left.opened_bytes_max.max(right.opened_bytes_max),
            largest_sample: left.largest_sample.filter(|_| is_left_alone),
            appended_max: left.appended_max.saturating_add(right.appended_max),
            index_bytes: left.index_bytes + right.index_bytes + self.pairs.heap() + tables,
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let (left, right) = self.pairs.of(sample);
        self.left.extents(left, parts)?;
        let before = parts.len();
        self.right.extents(right, parts)?;
        parts.move_fields(before, self.left.schema().len());
        parts.move_sources(before, self.base);
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        None
    }

    fn keys(&self) -> Result<Option<Strings>> {
        let Some(left) = self.left.keys()? else {
            return Ok(None);
        };
        let ids = (0..self.len()).map(|sample| self.pairs.of(sample).0 as usize);
        Ok(Some(ids.map(|id| left.get(id)).collect()))
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn describe(&self) -> String {
        format!(
            "{} samples of {}, joined to {} by {}",
            self.len(),
            self.left.describe(),
            self.right.describe(),
            self.told
        )
    }
}

impl Framed for Joined {
    frames_of!(self, sample, field => self.side_of(sample, field); check open make field_bytes member seek_points);

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        match field.checked_sub(self.left.schema().len()) {
            None => self.left.field_bytes_max(field).map(Some),
            Some(own) => self.right.field_bytes_max(own).map(Some),
        }
    }
}
