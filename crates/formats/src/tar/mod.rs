//! WebDataset shards: tar files whose consecutive members with one key form a sample.
//!
//! ```text
//! n01/0001.jpg  n01/0001.cls  n01/0002.jpg  n01/0002.cls  end marker
//! └─key──┘ └─ending─► field
//! ```
//!
//! A sample is a run of members with one key: the path up to the first dot after the last slash. An
//! index, made once (see [`Tar::open`]), gives random access to samples. Adjacent members of a
//! sample are read with one read. Names are keys, never paths: no file is written or opened by
//! these names.
//!
//! Members with a number in their endings can be the elements of one field: see [`TarBuilder::images`].
//!
//! Left out, and counted in [`Tar::left_out`]: members with endings that no field asks for, members
//! without ending, hidden members (`._x.jpg`), WebDataset's notes (`__name__`), folders, links and
//! devices. Damage: everything that loses samples, mixes them up, or makes another reader see
//! different samples; see [`DamageKind`](feedline_core::dataset::DamageKind).
//!
//! Limits: 16 fields; names of 64 KiB; plain tar (no gzip, no sparse files, no volumes). Two kinds
//! of damaged shards look intact: one that lost its end on a member's boundary *and* got a new end
//! marker there, and one with less than 10 KiB zeroed at its very end. Only an index made before
//! the damage detects either kind.

mod ahead;
mod elements;
mod member;
mod samples;

use self::member::split;
use self::samples::{Len, RECORD, Rule, TarSamples};
use crate::images::EXTENSIONS;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::is_url;
use feedline_base::setting::Setting;
use feedline_base::sync::Hold;
use feedline_core::dataset::damage::cost;
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::index::{
    FIELDS_MAX, Index, Place, Rows, Scan, Settings, index_getters, index_setters,
};
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::{Damage, Dataset, Digest, Framed, Parts, Sizes, Strings};
use feedline_core::storage::listing::{expand, others};
use feedline_core::storage::{Blob, Listed};
use feedline_core::tensor::{DType, EncodedField, Encoding, Field, Shape, Spec};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Format and version of the scan.
const FORMAT: &str = "tar 1";

/// Dataset of tar shards in WebDataset's layout.
///
/// A sample is a run of members with one key (`n01/0001`): the path up to the first dot after the
/// last slash. The text after that dot is the ending (`jpg`, `seg.png`). A field asks for one or
/// more endings; members with other endings are left out and counted, see [`Tar::left_out`]. Access
/// is random, so every order is possible. Limits: 16 fields; plain tar, no gzip.
///
/// ```no_run
/// # use feedline_core::tensor::EncodedField; use feedline_formats::Tar;
/// let train = Tar::open("train-{0000..0127}.tar")?; // `image` from .jpg, .png, …; `label` from .cls
/// let pairs = Tar::builder().image("jpg;png").field(EncodedField::image("mask"), "seg.png").open("pairs/")?;
/// let clips = Tar::builder().images("frames.*.jpg", 16).class("cls").open("clips/")?; // .frames.0.jpg, .frames.1.jpg, …
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Tar {
    index: Index,
    schema: Vec<EncodedField>,
    /// Bit set of the fields that hold a class as text.
    classes: u32,
    /// Bit set of the fields whose bytes may be read in place.
    plain: u32,
    endings: Vec<String>,
    /// The endings of each list; none for other fields.
    lists: Vec<Vec<String>>,
    name: String,
}

/// Builder of [`Tar`]: maps members to fields and selects the checks. Made by [`Tar::builder`].
#[derive(Clone, Debug)]
pub struct TarBuilder {
    fields: Vec<TarField>,
    checksums: Option<bool>,
    place: Place,
    skip_damage: bool,
    padding: u64,
}

#[derive(Clone, Debug)]
struct TarField {
    field: EncodedField,
    rule: Rule,
}

impl Tar {
    index_getters!();

    /// Opens shards: a file, a folder (its `.tar` files) or a pattern such as
    /// `train-{0000..0127}.tar` or `*.tar`. The first sample decides the fields: a picture (an
    /// ending of [`Images`](crate::Images)) becomes `image`, `cls` becomes `label`
    /// (`i64`). [`Tar::builder`] names fields explicitly.
    ///
    /// The first `open` reads every shard once, in parallel on all cores, to make the index: each
    /// member's offset, length and CRC32C. The index is saved beside each shard (`SHARD.….fdx`).
    /// Later calls read only the index. Every read of a member is then verified against it, and a
    /// shard that was written to is indexed again.
    ///
    /// Errors: no file; no sample; no field recognised ([`ErrorKind::Config`]); damage
    /// ([`ErrorKind::Decode`] or [`ErrorKind::Truncated`], with path and offset).
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Starts a builder.
    pub fn builder() -> TarBuilder {
        TarBuilder {
            fields: Vec::new(),
            checksums: None,
            place: Place::Beside,
            skip_damage: false,
            padding: RECORD,
        }
    }

    /// Counts of the members left out, by an ending that no field asks for (`.json`) or by another
    /// reason.
    pub fn left_out(&self) -> &BTreeMap<String, u64> {
        self.index.left_out()
    }

    /// Offset and length of a field in its shard, for tests.
    #[cfg(feature = "unstable")]
    pub fn place(&self, sample: u64, field: usize) -> Option<(u64, u64)> {
        self.index
            .entry(sample, field)
            .ok()?
            .map(|(_, entry)| (entry.offset, entry.len))
    }

    /// Name of the member that holds field `field` of a sample, as in its own header (the first 100
    /// bytes of a longer name). Reads 512 bytes of the shard.
    ///
    /// Errors: file system errors; [`ErrorKind::Empty`] if the sample lacks the field.
    pub fn member_name(&self, sample: u64, field: usize) -> Result<String> {
        let none =
            || Error::new(ErrorKind::Empty, Stage::Index, "no such member").with_sample(sample);
        if sample >= self.len() || field >= self.schema.len() {
            return Err(none());
        }
        let (source, entry) = self.index.entry(sample, field)?.ok_or_else(none)?;
        let is_list = !self.lists[field].is_empty();
        // The entry of a list begins at a header, that of one member behind it.
        let mut at = match is_list {
            true => entry.offset,
            false => entry.offset.saturating_sub(member::BLOCK),
        };
        let mut block = [0; member::BLOCK as usize];
        let sources = self.index.sources();
        let blob = Blob::of_source(sources, source)?;
        loop {
            let site = |error: Error| {
                error
                    .with_path(sources.path(source))
                    .with_range(at, member::BLOCK)
                    .with_sample(sample)
            };
            blob.fill(at, &mut block, "the header").map_err(site)?;
            let header = member::MemberHeader::parse(&block);
            let header = header
                .map_err(|(_, what)| site(Error::new(ErrorKind::Decode, Stage::Index, what)))?;
            if is_list && header.extends() {
                at = at
                    .saturating_add(member::BLOCK)
                    .saturating_add(header.size.next_multiple_of(member::BLOCK));
                continue;
            }
            let name = header.regular().ok_or_else(|| site(none()))?.0;
            return Ok(String::from_utf8_lossy(name).into_owned());
        }
    }

    /// Keys of the samples of a shard, by a walk over its headers: the index does not keep names.
    fn keys_of(&self, shard: usize) -> Result<Strings> {
        let mut samples = self.index.ids_of(shard);
        self.index.walk_headers(shard, |input| {
            ahead::bring_headers(input)?;
            let mut keys = Strings::new();
            let mut at = 0;
            let mut next = samples.next();
            let mut first = self.first_byte_of(next)?;
            while next.is_some() {
                let member = match member::next(input, at) {
                    Ok(member::Step::Member(member)) => member,
                    Err(member::Stop::Failed(error)) => return Err(error),
                    Ok(member::Step::End) | Err(member::Stop::Damage(_)) => break,
                };
                // A list begins with the headers of its first member, another field with its data.
                let places = [Some(at), Some(member.data)];
                at = member.next;
                if !places.contains(&first) {
                    continue;
                }
                let Ok((key, _)) = split(&member.name) else {
                    break;
                };
                keys.push(key);
                next = samples.next();
                first = self.first_byte_of(next)?;
            }
            match next {
                None => Ok(keys),
                Some(sample) => {
                    let message = "the member of a sample is not where it was indexed";
                    let error = Error::new(ErrorKind::Changed, Stage::Index, message);
                    Err(error.with_sample(sample))
                }
            }
        })
    }

    /// Offset of the first of a sample's members.
    fn first_byte_of(&self, sample: Option<u64>) -> Result<Option<u64>> {
        let Some(sample) = sample else {
            return Ok(None);
        };
        let mut first = None;
        for field in 0..self.schema.len() {
            if let Some((_, entry)) = self.index.entry(sample, field)? {
                first = Some(first.map_or(entry.offset, |first: u64| first.min(entry.offset)));
            }
        }
        Ok(first)
    }

    /// Adds the member's name to an error.
    fn named(&self, error: &Error, sample: u64, field: usize) -> Error {
        // This is the error path: one more small read is harmless.
        let member = self
            .member_name(sample, field)
            .unwrap_or_else(|_| format!("*{}", self.endings[field]));
        let named = Error::new(error.kind(), error.stage(), error.message())
            .with_sample(sample)
            .with_member(member);
        match self.index.entry(sample, field) {
            Ok(Some((source, entry))) => named
                .with_path(self.sources().path(source))
                .with_range(entry.offset, entry.len),
            _ => named,
        }
    }
}

impl TarBuilder {
    index_setters!(Tar);

    /// Members with these endings become the field `image`, an encoded picture. An ending is the
    /// part of a name after its first dot, in any case. `;` separates alternatives; a sample must
    /// have exactly one of them.
    #[must_use]
    pub fn image(self, endings: &str) -> Self {
        self.field(EncodedField::image("image"), endings)
    }

    /// Members with these endings become the elements of the field `image`, encoded pictures in the
    /// order of their numbers: `images("frames.*.jpg", 8)` takes `k.frames.0.jpg`, `k.frames.1.jpg`
    /// and so on. Decode the field with [`Each`](feedline_core::decode::Each).
    ///
    /// Numbers begin at 0; a sample with a gap is damaged. One with more than `max` members is a bad
    /// sample when it is read. The members of a list are read by one read, with those in between.
    #[must_use]
    pub fn images(self, endings: &str, max: usize) -> Self {
        self.field(EncodedField::images("image", max), endings)
    }

    /// Members with these endings become byte strings in one field, as in [`images`](Self::images).
    /// The first ending names the field.
    #[must_use]
    pub fn list(self, endings: &str, max: usize) -> Self {
        let name = endings.split(';').next().unwrap_or_default().to_string();
        self.field(EncodedField::list(name, max), endings)
    }

    /// Members with these endings become the field `label`, a scalar `i64` parsed from a whole
    /// number as text.
    #[must_use]
    pub fn class(self, endings: &str) -> Self {
        self.class_named("label", endings)
    }

    /// As [`Self::class`], with a field name of your own.
    #[must_use]
    pub fn class_named(mut self, name: &str, endings: &str) -> Self {
        self.push(
            EncodedField::raw(Field::fixed(name, DType::I64, [])),
            endings,
            Len::Class,
        );
        self
    }

    /// Members with these endings become `field`; they hold exactly its bytes, in native byte
    /// order.
    #[must_use]
    pub fn raw(self, field: Field, endings: &str) -> Self {
        self.field(EncodedField::raw(field), endings)
    }

    /// Members with these endings become opaque bytes for your own decoder. The first ending names
    /// the field.
    #[must_use]
    pub fn bytes(self, endings: &str) -> Self {
        let name = endings.split(';').next().unwrap_or_default().to_string();
        self.field(EncodedField::bytes(name), endings)
    }

    /// Members with these endings become `field`.
    #[must_use]
    pub fn field(mut self, field: EncodedField, endings: &str) -> Self {
        let len = match &field.encoding {
            Encoding::Raw { dtype, shape } => {
                let bytes = |dims: &[usize]| {
                    dims.iter()
                        .fold(dtype.size() as u64, |n, dim| n.saturating_mul(*dim as u64))
                };
                match shape {
                    Shape::Fixed(dims) => Len::Exactly(bytes(dims)),
                    Shape::UpTo { max, inner } => {
                        let unit = bytes(inner).max(1);
                        Len::UpTo {
                            unit,
                            max: unit.saturating_mul(*max as u64),
                        }
                    }
                }
            }
            Encoding::List { .. } => Len::Many,
            _ => Len::Any,
        };
        self.push(field, endings, len);
        self
    }

    fn push(&mut self, field: EncodedField, endings: &str, len: Len) {
        let endings = endings
            .split(';')
            .map(|ending| ending.trim_start_matches('.').to_ascii_lowercase())
            .collect();
        self.fields.push(TarField {
            field,
            rule: Rule {
                endings,
                required: true,
                len,
            },
        });
    }

    /// Makes the field added last optional: a sample without it has 0 bytes there. Legal for opaque
    /// fields and for raw fields of variable length.
    #[must_use]
    pub fn optional(mut self) -> Self {
        if let Some(field) = self.fields.last_mut() {
            field.rule.required = false;
        }
        self
    }

    /// `false` makes the index from headers alone, which is faster for large members but does not
    /// detect a changed payload. All checks of structure remain. Default: `true` for files; `false`
    /// for objects in stores, where each request names the object's version, and the bytes would
    /// cross the network once more.
    #[must_use]
    pub fn checksums(mut self, on: bool) -> Self {
        self.checksums = Some(on);
        self
    }

    /// Accepts zero padding to a multiple of `bytes` (`tar -b`). Always accepted: no padding after
    /// the end marker, and padding to a multiple of 10,240. More zeros are reported as damage.
    #[must_use]
    pub fn padding(mut self, bytes: u64) -> Self {
        self.padding = bytes.max(1);
        self
    }

    /// Opens shards as [`Tar::open`] does, with the same errors.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<Tar> {
        let pattern = pattern.as_ref();
        let Listed { files, name, .. } = expand(pattern, &[".tar"])?;
        self.open_as(&files, name)
    }

    /// Opens a shard in memory, without I/O or an index file. Errors: as [`Tar::open`].
    pub fn open_bytes(mut self, bytes: impl Into<Arc<[u8]>>) -> Result<Tar> {
        let bytes = bytes.into();
        if self.fields.is_empty() {
            let first = First::default();
            Index::of_bytes(bytes.clone(), &first.settings(), |input, rows| {
                first.scan(input, rows)
            })?;
            self = self.infer(first, Path::new("<memory>"))?;
        }
        let (rules, options) = self.checked()?;
        let index = Index::of_bytes(bytes, &self.settings(&rules, &options), |input, rows| {
            TarSamples::new(&rules, self.has_checksums(), self.padding).scan(input, rows)
        })?;
        self.finish(index, "<memory>".into())
    }

    fn open_as(mut self, files: &[PathBuf], name: String) -> Result<Tar> {
        if self.fields.is_empty() {
            self = self.infer_from(files)?;
        }
        self.checksums
            .get_or_insert(!files.iter().all(|file| is_url(file)));
        let (rules, options) = self.checked()?;
        let index =
            Index::open_or_build(files, &self.settings(&rules, &options), |input, rows| {
                TarSamples::new(&rules, self.has_checksums(), self.padding).scan(input, rows)
            })?;
        self.finish(index, name)
    }

    fn has_checksums(&self) -> bool {
        self.checksums.unwrap_or(true)
    }

    fn settings<'a>(&self, rules: &[Rule], options: &'a str) -> Settings<'a> {
        let mut settings = Settings::new(FORMAT, rules.len());
        settings.options = options;
        settings.checksums = self.has_checksums();
        settings.place = self.place.clone();
        settings.skip_damage = self.skip_damage;
        settings
    }

    /// Checks the settings. Returns the rules, and a text of all settings that the index depends
    /// on.
    fn checked(&self) -> Result<(Vec<Rule>, String)> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if self.fields.len() > FIELDS_MAX {
            return bad(format!(
                "{} fields; the limit is {FIELDS_MAX}",
                self.fields.len()
            ));
        }
        let rules: Vec<Rule> = self.fields.iter().map(|field| field.rule.clone()).collect();
        let mut known: Vec<&str> = Vec::new();
        for TarField { field, rule } in &self.fields {
            for ending in &rule.endings {
                if ending.is_empty() {
                    return bad(format!("field `{}` has an empty ending", field.name));
                }
                let numbers = ending.matches(elements::NUMBER).count();
                if rule.len == Len::Many && numbers != 1 {
                    return bad(format!(
                        "field `{}` is a list: its ending {ending:?} needs one `*`, the place of the \
                         number",
                        field.name
                    ));
                }
                if rule.len != Len::Many && numbers > 0 {
                    let elements = Setting::Elements;
                    return bad(format!(
                        "the ending {ending:?} is of a list: give the maximum number of elements \
                         with {elements}"
                    ));
                }
                let is_taken = known.iter().any(|other| {
                    *other == ending
                        || elements::number(other, ending.as_bytes()).is_some()
                        || elements::number(ending, other.as_bytes()).is_some()
                });
                if is_taken {
                    return bad(format!(
                        "two fields take members that end in {ending:?}; the second is `{}`",
                        field.name
                    ));
                }
                known.push(ending);
            }
            let may_lack = matches!(field.encoding, Encoding::Bytes | Encoding::List { .. })
                || field.as_raw().is_some_and(|raw| raw.is_up_to());
            if !rule.required && !may_lack {
                return bad(format!(
                    "field `{}` cannot be optional: 0 bytes are not a valid value",
                    field.name
                ));
            }
        }
        if rules.iter().all(|rule| !rule.required) {
            return bad("every field is optional: at least one must be required".into());
        }
        // The batch checks names and shapes; here only duplicate names matter.
        let names = self
            .fields
            .iter()
            .map(|own| Field::fixed(own.field.name.clone(), DType::U8, [1]));
        Spec::new(names.collect())?;
        let options = format!("{rules:?} {}", self.padding);
        Ok((rules, options))
    }

    /// Adds fields for the members of the first sample in the shards.
    fn infer_from(self, files: &[PathBuf]) -> Result<Self> {
        for file in files {
            let first = First::default();
            Index::open_or_build(
                std::slice::from_ref(file),
                &first.settings(),
                |input, rows| first.scan(input, rows),
            )?;
            if !first.endings().is_empty() {
                return self.infer(first, file);
            }
            // The shard is empty or damaged.
        }
        let file = files.first().map_or(Path::new(""), PathBuf::as_path);
        self.infer(First::default(), file)
    }

    fn infer(mut self, first: First, path: &Path) -> Result<Self> {
        let endings = first.endings();
        if endings.is_empty() {
            // No sample: the full scan reports the reason, whatever the fields are.
            return Ok(self.image(&EXTENSIONS.join(";")));
        }
        let pictures: Vec<&String> = endings
            .iter()
            .filter(|ending| EXTENSIONS.contains(&ending.as_str()))
            .collect();
        if pictures.len() == 1 {
            self = self.image(&EXTENSIONS.join(";"));
        }
        if endings.iter().any(|ending| ending == "cls") {
            self = self.class("cls");
        }
        if self.fields.is_empty() || pictures.len() > 1 {
            let found = endings.join(", ");
            let message = format!(
                "cannot infer the fields from the first sample, which has {found}: name them \
                 with {}",
                Setting::TarFields
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(path));
        }
        Ok(self)
    }

    fn finish(self, index: Index, name: String) -> Result<Tar> {
        index.not_empty(
            &format!("no samples in {} shards", index.sources().count()),
            &name,
        )?;
        let mask = |wanted: &dyn Fn(&TarField) -> bool| {
            let hits = self
                .fields
                .iter()
                .enumerate()
                .filter(|(_, field)| wanted(field));
            hits.fold(0_u32, |mask, (index, _)| mask | 1 << index)
        };
        Ok(Tar {
            index,
            classes: mask(&|field| field.rule.len == Len::Class),
            plain: mask(&|field| !matches!(field.rule.len, Len::Class | Len::Many)),
            lists: self
                .fields
                .iter()
                .map(|field| match field.rule.len {
                    Len::Many => field.rule.endings.clone(),
                    _ => Vec::new(),
                })
                .collect(),
            endings: self
                .fields
                .iter()
                .map(|field| field.rule.endings.join(" or "))
                .collect(),
            schema: self.fields.into_iter().map(|field| field.field).collect(),
            name,
        })
    }
}

/// Collects the endings of the first sample, then stops.
#[derive(Default)]
struct First(Mutex<Vec<String>>);

impl First {
    fn settings(&self) -> Settings<'static> {
        let mut settings = Settings::new(FORMAT, 1);
        settings.place = Place::Off;
        settings.skip_damage = true;
        settings
    }

    fn endings(&self) -> Vec<String> {
        self.0.hold().clone()
    }

    fn scan(&self, input: &mut Scan<'_>, _: &mut Rows) -> Result<()> {
        let mut found = self.0.hold();
        let mut first: Option<Vec<u8>> = None;
        let mut at = 0;
        loop {
            let member = match member::next(input, at) {
                Ok(member::Step::Member(member)) => member,
                Err(member::Stop::Failed(error)) => return Err(error),
                // The full scan finds the damage again and reports it.
                Ok(member::Step::End) | Err(member::Stop::Damage(_)) => return Ok(()),
            };
            at = member.next;
            let Ok((key, ending)) = split(&member.name) else {
                continue;
            };
            if member.kind != member::MemberKind::Regular {
                continue;
            }
            // A sample may have any number of members, but more endings than fields are useless.
            if first.get_or_insert_with(|| key.to_vec()) != key || found.len() == 64 {
                return Ok(());
            }
            found.push(String::from_utf8_lossy(&ending).into_owned());
        }
    }
}

/// Parses a class from text.
fn class(text: &[u8]) -> Result<i64> {
    let number = std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.trim_ascii().parse().ok());
    number.ok_or_else(|| {
        let shown =
            String::from_utf8_lossy(&text[..text.len().min(samples::CLASS_BYTES_MAX as usize)])
                .into_owned();
        Error::new(
            ErrorKind::Decode,
            Stage::Decode,
            format!("a whole number expected, {shown:?} found"),
        )
    })
}

impl Dataset for Tar {
    own!(schema framed);
    forward!(self => self.index; len sources);

    fn sizes(&self) -> Sizes {
        let sizes = self.index.sizes();
        // A list's head is smaller than the headers of its members.
        let lists = if self.lists.iter().any(|list| !list.is_empty()) {
            sizes.sample_bytes_max
        } else {
            0
        };
        let class = if self.classes == 0 { 0 } else { 8 };
        Sizes {
            opened_bytes_max: lists.max(class),
            ..sizes
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.index.extents(sample, self.plain, parts)
    }

    /// Keys as in WebDataset: the path of a sample's members up to the first dot.
    fn keys(&self) -> Result<Option<Strings>> {
        let shards = parallel(0..self.sources().count(), |_, shard| self.keys_of(shard))?;
        let mut all = Strings::new();
        for keys in &shards {
            all.extend(keys.iter());
        }
        Ok(Some(all))
    }

    fn identity(&self) -> u64 {
        // Hashes the members' locations, not the endings that selected them: the list of default
        // endings may grow.
        let digest = Digest::new("tar")
            .word(u64::from(self.classes))
            .word(self.index.places());
        // The place of a list does not say which of the members in it are its elements.
        let patterns = self.lists.iter().flatten();
        patterns
            .fold(digest, |digest, pattern| digest.bytes(pattern.as_bytes()))
            .end()
    }

    fn describe(&self) -> String {
        let samples = self.len();
        let shards = self.sources().count();
        let mut text = format!("{samples} samples in {shards} tar shards, {}", self.name);
        if !self.damage().is_empty() {
            text += &format!("; {}", cost(self.damage()));
        }
        if !self.left_out().is_empty() {
            text += &others(self.left_out());
        }
        if !self.index.checksums {
            text += "; without checksums";
        }
        text + &self.index.made()
    }
}

impl Framed for Tar {
    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let own = self
            .index
            .open(sample, field, bytes)
            .map_err(|error| self.named(&error, sample, field))?;
        if !self.lists[field].is_empty() {
            elements::frame(own, &self.lists[field], buffer)
                .map_err(|error| self.named(&error, sample, field))?;
            return Ok(buffer);
        }
        if self.classes & (1 << field) == 0 {
            return Ok(own);
        }
        let class = class(own).map_err(|error| self.named(&error, sample, field))?;
        buffer.extend_from_slice(&class.to_ne_bytes());
        Ok(buffer)
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        if !self.lists[field].is_empty() {
            return Ok(None);
        }
        let stored = self
            .index
            .entry(sample, field)?
            .map_or(0, |(_, entry)| entry.len);
        Ok(Some(if self.classes & (1 << field) == 0 {
            stored
        } else {
            size_of::<i64>() as u64
        }))
    }

    /// Name of the member that holds `field`, or of the first field's member.
    fn member(&self, sample: u64, field: Option<usize>) -> Option<String> {
        self.member_name(sample, field.unwrap_or(0)).ok()
    }
}
