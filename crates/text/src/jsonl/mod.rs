//! JSON lines: files with one object a line; values by key path as fields.
//!
//! ```text
//! plain       {"text": …}⏎  {"text": …}⏎        each line an extent: random access
//!             └─ entry of the index: offset, length, number of the line
//! compressed  [member or frame][member or frame]…   a run of them is a chunk: unpacked as a whole
//! line ──check──► one object, UTF-8 ──key path──► text, numbers or lists ──► the field's bytes
//! ```
//!
//! The first opening finds the line starts, reading each file once, and keeps them beside it
//! (`.fdx`). Lines are checked and values found when they are read, on the workers, over the bytes:
//! nothing is allocated for a plain string or a row of numbers. Compressed files
//! are unpacked and their values measured once, so that the memory of every chunk is known.
//!
//! Left out and counted: empty lines. Damage: the half line at a file's end, lines of zeros or over
//! 64 MiB, and in compressed files every line that cannot be read. Elsewhere such a line is a bad
//! sample, under the loader's policy.
//!
//! Limits: 2^32 - 1 lines per file; lines of 64 MiB; 128 levels. Invariants: a line counts only if
//! it is one object and UTF-8, whatever its fields are; of equal keys the last counts, as in
//! Python's `json`; a compressed chunk gives exactly the rows of its index, or an error.

pub(crate) mod json;
mod path;
mod unpack;
mod value;

#[cfg(test)]
mod tests;

use self::path::KeyPath;
use self::unpack::{Plans, is_packed};
use self::value::{Numbers, Take};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::contract::chunk_member;
use feedline_core::dataset::forward::own;
use feedline_core::dataset::index::{
    Entry, Index, Place, Rows, Scan, Settings, index_getters, index_setters,
};
use feedline_core::dataset::{
    ChunkBuf, ChunkBytes, Chunked, Damage, DamageKind, Dataset, Digest, Framed, Parts, Sizes,
};
use feedline_core::decode::Scratch;
use feedline_core::storage::listing::{expand, others};
use feedline_core::storage::{Extent, Listed, Sources};
use feedline_core::tensor::{EncodedField, Field, Spec};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum bytes of a line.
const LINE_MAX: usize = 64 << 20;

/// Bytes per step of the walk.
const STEP: u64 = 1 << 20;

/// Endings of files that a folder's listing takes. `.json` alone is often one document.
const ENDINGS: [&str; 8] = [
    ".jsonl",
    ".ndjson",
    ".jsonl.gz",
    ".ndjson.gz",
    ".json.gz",
    ".jsonl.zst",
    ".ndjson.zst",
    ".json.zst",
];

/// Why a line is left out.
const EMPTY: &str = "empty lines";

/// Dataset of JSON lines: a sample is a line, which is one object.
///
/// Fields are values by key path: `text`, `meta.score`, `messages[].content`, `boxes[0]`,
/// `"a.b".c` (quotes as in JSON). A field asks for text, numbers or a list of texts; without any,
/// the field `line` has each line as it is stored.
///
/// ```no_run
/// # use feedline_core::tensor::{DType, Field}; use feedline_text::Jsonl;
/// let train = Jsonl::builder()
///     .text("text")
///     .numbers(Field::up_to("ids", DType::I32, 2048), "ids")
///     .numbers(Field::fixed("label", DType::I64, []), "meta.label")
///     .texts("messages[].content", 16)
///     .open("train-*.jsonl")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
///
/// Plain files have random access to lines, so every order is possible. Files that end in `.gz` or
/// `.zst` are unpacked in chunks: each is a gzip member or zstd frame, or a run of small ones. A
/// file of one member is one chunk.
pub struct Jsonl {
    index: Index,
    schema: Vec<EncodedField>,
    takes: Arc<[Take]>,
    missing_zero: bool,
    /// The chunks, if a file is compressed.
    plans: Option<Plans>,
    opened_bytes_max: u64,
    name: String,
}

/// Builder of [`Jsonl`]: maps values to fields. Made by [`Jsonl::builder`].
#[derive(Clone, Debug, Default)]
pub struct JsonlBuilder {
    fields: Vec<(EncodedField, String, JsonlKind)>,
    missing_zero: bool,
    place: Place,
    skip_damage: bool,
}

#[derive(Clone, Copy, Debug)]
enum JsonlKind {
    Text,
    Json,
    Texts(usize),
    Numbers,
}

impl Jsonl {
    index_getters!();

    /// Opens a file, a folder (its `.jsonl` and `.ndjson` files, also compressed) or a pattern
    /// (`train-*.jsonl`) with one field: `line`, the bytes of the line.
    ///
    /// Errors: as [`JsonlBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Starts a builder.
    pub fn builder() -> JsonlBuilder {
        JsonlBuilder::default()
    }

    /// Counts of the lines left out, by reason.
    pub fn left_out(&self) -> &BTreeMap<String, u64> {
        self.index.left_out()
    }
}

impl JsonlBuilder {
    index_setters!(Jsonl);

    /// Adds a field with the name of the path: the text of a string, with its escapes resolved.
    #[must_use]
    pub fn text(self, path: &str) -> Self {
        self.push(EncodedField::bytes(path), path, JsonlKind::Text)
    }

    /// Adds a field with the name of the path: any value, as it is stored.
    #[must_use]
    pub fn json(self, path: &str) -> Self {
        self.push(EncodedField::bytes(path), path, JsonlKind::Json)
    }

    /// Adds a list field with the name of the path: the texts of up to `max` strings, as in
    /// `texts("messages[].content", 16)`. Decode the field with [`Each`](feedline_core::decode::Each).
    #[must_use]
    pub fn texts(self, path: &str, max: usize) -> Self {
        self.push(EncodedField::list(path, max), path, JsonlKind::Texts(max))
    }

    /// Adds `field`: a number, boolean or nested lists of them, in the field's shape. Integers must
    /// be whole and in range. Floats are read as Python does: rounded to `f64`, then to the dtype;
    /// `NaN` and `Infinity` are floats.
    #[must_use]
    pub fn numbers(self, field: Field, path: &str) -> Self {
        self.push(EncodedField::raw(field), path, JsonlKind::Numbers)
    }

    fn push(mut self, field: EncodedField, path: &str, kind: JsonlKind) -> Self {
        self.fields.push((field, path.to_string(), kind));
        self
    }

    /// `true` reads a value that is missing or null as zeros (as many as a fixed shape needs), as
    /// an empty text or as no elements. Default: an error of the sample.
    #[must_use]
    pub fn missing_zero(mut self, zero: bool) -> Self {
        self.missing_zero = zero;
        self
    }

    /// Opens a file, a folder or a pattern.
    ///
    /// Errors: no such file; no lines; [`ErrorKind::Truncated`] for a half line at a file's end,
    /// [`ErrorKind::Decode`] for other damage and for files that are not JSON lines, all with path
    /// and offset; [`ErrorKind::Config`] for impossible fields.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<Jsonl> {
        let pattern = pattern.as_ref();
        let Listed { files, name, .. } = expand(pattern, &ENDINGS)?;
        let name = match files.len() {
            1 => name,
            count => format!("{count} files of {name}"),
        };
        self.open_as(&files, name)
    }

    fn open_as(self, files: &[PathBuf], name: String) -> Result<Jsonl> {
        let takes: Arc<[Take]> = self.takes()?.into();
        if files.iter().any(|path| is_packed(path)) {
            let options = format!("{takes:?} {}", self.missing_zero);
            let settings = self.settings("jsonl chunks 1", &options, unpack::FIELDS);
            let index = Index::open_or_build(files, &settings, |input, rows| {
                unpack::walk(input, rows, &takes, self.missing_zero)
            })?;
            let plans = Plans::of(&index)?;
            return self.finish(index, takes, Some(plans), name);
        }
        let index = Index::open_or_build(files, &self.settings("jsonl 1", "", 1), walk)?;
        self.finish(index, takes, None, name)
    }

    /// Opens lines in memory, plain or compressed: decode workers copy them, without I/O.
    ///
    /// Errors: as [`open`](Self::open).
    pub fn open_bytes(self, bytes: impl Into<Arc<[u8]>>) -> Result<Jsonl> {
        let bytes = bytes.into();
        let takes: Arc<[Take]> = self.takes()?.into();
        let name = "<memory>".to_string();
        if unpack::Packing::of(&bytes) != unpack::Packing::Plain {
            let settings = self.settings("jsonl chunks 1", "", unpack::FIELDS);
            let index = Index::of_bytes(bytes, &settings, |input, rows| {
                unpack::walk(input, rows, &takes, self.missing_zero)
            })?;
            let plans = Plans::of(&index)?;
            return self.finish(index, takes, Some(plans), name);
        }
        let index = Index::of_bytes(bytes, &self.settings("jsonl 1", "", 1), walk)?;
        self.finish(index, takes, None, name)
    }

    fn settings<'a>(&self, format: &'a str, options: &'a str, fields: usize) -> Settings<'a> {
        let mut settings = Settings::new(format, fields);
        settings.options = options;
        settings.place = self.place.clone();
        settings.skip_damage = self.skip_damage;
        settings
    }

    fn takes(&self) -> Result<Vec<Take>> {
        if self.fields.is_empty() {
            return Ok(vec![Take::Line]);
        }
        if self.fields.len() > Spec::FIELDS_MAX {
            let count = self.fields.len();
            return Err(refused(format!(
                "{count} fields, at most {} are possible",
                Spec::FIELDS_MAX
            )));
        }
        (0..self.fields.len())
            .map(|number| self.take(number))
            .collect()
    }

    fn take(&self, number: usize) -> Result<Take> {
        let (field, words, kind) = &self.fields[number];
        let name = &field.name;
        let mut before = self.fields[..number].iter();
        if before.any(|(other, ..)| other.name == *name) {
            return Err(refused(format!("two fields are called `{name}`")));
        }
        let path = KeyPath::parse(words)?;
        Ok(match kind {
            JsonlKind::Text | JsonlKind::Json if path.is_list() => {
                let how = Setting::Texts.hint(|texts| format!(": read it by {texts}"));
                return Err(refused(format!("path {words:?} leads to a list{how}")));
            }
            JsonlKind::Text => Take::Text(path),
            JsonlKind::Json => Take::Json(path),
            JsonlKind::Texts(_) if !path.is_list() => {
                return Err(refused(format!(
                    "path {words:?} leads to one value: add [] behind the list, as in \"{words}[]\""
                )));
            }
            JsonlKind::Texts(max) => Take::Texts(path, *max),
            JsonlKind::Numbers => {
                let own = field.as_raw().expect("made of a raw field");
                Take::Numbers(path, Numbers::of(&own)?)
            }
        })
    }

    fn finish(
        self,
        index: Index,
        takes: Arc<[Take]>,
        plans: Option<Plans>,
        name: String,
    ) -> Result<Jsonl> {
        index.not_empty("there are no lines", &name)?;
        let line = match plans {
            Some(_) => 0,
            None => index.sizes().sample_bytes_max,
        };
        let made = takes.iter().map(|take| take.made_max(line));
        let opened_bytes_max = match plans {
            Some(_) => 0,
            None => made.max().unwrap_or(0),
        };
        let schema = match self.fields.is_empty() {
            true => vec![EncodedField::bytes("line")],
            false => self.fields.into_iter().map(|(field, ..)| field).collect(),
        };
        Ok(Jsonl {
            index,
            schema,
            takes,
            missing_zero: self.missing_zero,
            plans,
            opened_bytes_max,
            name,
        })
    }
}

/// Finds the lines of a plain file.
fn walk(input: &mut Scan<'_>, rows: &mut Rows) -> Result<()> {
    let len = input.len();
    let front = input.bytes(0, len.min(STEP) as usize)?;
    let mut line = LineWalk {
        start: bom_len(front) as u64,
        number: 1,
        first: None,
    };
    if let Some(what) = foreign(&front[line.start as usize..]) {
        rows.damage(Damage::new(DamageKind::Unsupported, 0, len, 1, what));
        return Ok(());
    }
    let mut at = line.start;
    let mut before = b' ';
    while at < len {
        let block = input.bytes(at, (len - at).min(STEP) as usize)?;
        let mut begun = 0;
        for end in memchr::memchr_iter(b'\n', block) {
            line.look(&block[begun..end]);
            let last = if end > 0 { block[end - 1] } else { before };
            let end_of_text = at + end as u64 - u64::from(last == b'\r');
            line.end(end_of_text, at + end as u64 + 1, rows)?;
            begun = end + 1;
        }
        line.look(&block[begun..]);
        before = *block.last().expect("not empty");
        at += block.len() as u64;
    }
    // The last line may have no end; if it is whole, it counts.
    let left = len - line.start;
    match line.first {
        Some(first) if first != 0 && left <= LINE_MAX as u64 => {
            match json::check(input.bytes(line.start, left as usize)?) {
                Ok(()) => line.end(len, len, rows),
                Err(error) => {
                    let message = format!("line {}: {}", line.number, error.message());
                    rows.damage(Damage::new(DamageKind::Cut, line.start, left, 1, message));
                    Ok(())
                }
            }
        }
        _ if left > 0 => line.end(len, len, rows),
        _ => Ok(()),
    }
}

/// The line at which the walk is.
struct LineWalk {
    start: u64,
    number: u64,
    /// The first byte that is no space.
    first: Option<u8>,
}

impl LineWalk {
    #[inline]
    fn look(&mut self, bytes: &[u8]) {
        if self.first.is_none() {
            self.first = bytes.iter().copied().find(|byte| !is_space(*byte));
        }
    }

    /// Adds the line, whose text ends at `end`, and goes to the next one.
    fn end(&mut self, end: u64, next: u64, rows: &mut Rows) -> Result<()> {
        let Self { start, number, .. } = *self;
        let len = end - start.min(end);
        let damage =
            |kind, what: &str| Damage::new(kind, start, len, 1, format!("line {number}: {what}"));
        match self.first.take() {
            None => rows.leave_out(EMPTY),
            Some(0) => rows.damage(damage(DamageKind::Zeroed, "zeros instead of an object")),
            Some(_) if len > LINE_MAX as u64 => {
                let what = format!("{len} bytes, the limit is {LINE_MAX}");
                rows.damage(damage(DamageKind::Unsupported, &what));
            }
            Some(_) => rows.push(&[Some(Entry {
                offset: start,
                len,
                // There are no checksums: the number of the line, for errors.
                crc: u32::try_from(number).unwrap_or(u32::MAX),
            })])?,
        }
        self.start = next;
        self.number += 1;
        Ok(())
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

fn bom_len(front: &[u8]) -> usize {
    if front.starts_with(b"\xef\xbb\xbf") {
        3
    } else {
        0
    }
}

/// What a file is instead of JSON lines, by its first bytes.
fn foreign(front: &[u8]) -> Option<&'static str> {
    let at = json::after_space(front, 0);
    let text = &front[at..];
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or(text);
    Some(match text {
        [0x1f, 0x8b, ..] => "a gzip file whose name does not end in .gz: rename it",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "a zstd file whose name does not end in .zst: rename it",
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [b'{', 0, ..] | [0, b'{', ..] => {
            "UTF-16: write it as UTF-8"
        }
        [b'[', ..] => "one JSON list: write one object a line, as by jq -c '.[]'",
        [b'{', ..] if line.trim_ascii() == b"{" && line.len() < text.len() => {
            "an object over several lines: write one object a line, as by jq -c ."
        }
        [b'P', b'A', b'R', b'1', ..] => "a Parquet file: read it as source parquet",
        _ if text.starts_with(b"version https://git-lfs") => {
            "a git-lfs pointer instead of the file: run git lfs pull"
        }
        _ => return None,
    })
}

impl Dataset for Jsonl {
    own!(schema framed);

    fn len(&self) -> u64 {
        match &self.plans {
            Some(plans) => plans.starts.len(),
            None => self.index.len(),
        }
    }

    fn sources(&self) -> &Arc<Sources> {
        self.index.sources()
    }

    fn sizes(&self) -> Sizes {
        let sizes = self.index.sizes();
        match &self.plans {
            Some(plans) => Sizes {
                sample_bytes_max: plans.encoded_max(),
                largest_sample: None,
                index_bytes: sizes.index_bytes + plans.heap(),
                ..sizes
            },
            None => Sizes {
                opened_bytes_max: self.opened_bytes_max,
                ..sizes
            },
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        if self.plans.is_some() {
            let message = "lines of compressed files are read in chunks";
            return Err(Error::new(ErrorKind::User, Stage::Read, message));
        }
        if let Some((source, entry)) = self.index.entry(sample, 0)? {
            let extent = Extent {
                source,
                offset: entry.offset,
                len: entry.len,
            };
            (0..self.takes.len()).for_each(|field| parts.framed(field, extent));
        }
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.plans.as_ref().map(|_| self as &dyn Chunked)
    }

    fn identity(&self) -> u64 {
        let digest = Digest::new("jsonl")
            .word(self.index.places())
            .word(u64::from(self.missing_zero));
        let takes = self.takes.iter().fold(digest, |digest, take| {
            let digest = digest.word(match take {
                Take::Line => 0,
                Take::Text(_) => 1,
                Take::Json(_) => 2,
                Take::Texts(..) => 3,
                Take::Numbers(..) => 4,
            });
            take.path().map_or(digest, |path| path.digest(digest))
        });
        takes.end()
    }

    fn describe(&self) -> String {
        let chunks = match &self.plans {
            Some(plans) => format!(" ({} chunks)", plans.starts.all().len() - 1),
            None => String::new(),
        };
        let mut text = format!("{} lines{chunks} of {}", self.len(), self.name);
        if !self.damage().is_empty() {
            text += &format!("; {}", feedline_core::dataset::damage::cost(self.damage()));
        }
        if !self.left_out().is_empty() {
            text += &others(self.left_out());
        }
        text + &self.index.made()
    }
}

impl Framed for Jsonl {
    fn check(&self, _sample: u64, _field: usize, line: &[u8]) -> Result<()> {
        json::check(line)
    }

    fn open<'a>(
        &self,
        _sample: u64,
        field: usize,
        line: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        self.takes[field]
            .open(line, self.missing_zero, buffer)
            .map_err(|error| error.within(&self.schema[field].name))
    }

    /// Known for whole lines of plain files.
    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        match (&self.takes[field], &self.plans) {
            (Take::Line, None) => Ok(self.index.entry(sample, 0)?.map(|(_, entry)| entry.len)),
            _ => Ok(None),
        }
    }

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        let take = &self.takes[field];
        Ok(Some(match (&self.plans, take.fixed()) {
            (_, Some(bytes)) => bytes,
            (Some(plans), None) => plans.longest(),
            (None, None) => match take {
                Take::Line => self.index.sizes().sample_bytes_max,
                _ => self
                    .opened_bytes_max
                    .min(take.made_max(self.index.sizes().sample_bytes_max)),
            },
        }))
    }

    fn member(&self, sample: u64, _field: Option<usize>) -> Option<String> {
        match &self.plans {
            Some(_) => chunk_member(self, sample),
            None => {
                let (_, entry) = self.index.entry(sample, 0).ok()??;
                Some(format!("line {}", entry.crc))
            }
        }
    }
}

impl Jsonl {
    fn plans(&self) -> &Plans {
        self.plans
            .as_ref()
            .expect("asked only when there are chunks")
    }
}

impl Chunked for Jsonl {
    fn starts(&self) -> &[u64] {
        self.plans().starts.all()
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        extents.push(self.plans().all[chunk].extent);
        Ok(())
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        self.plans().all[chunk].bytes(self.takes.len())
    }

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let plan = &self.plans().all[chunk];
        let [piece] = pieces else {
            let message = format!("a chunk is one piece, the reader returned {}", pieces.len());
            return Err(Error::new(ErrorKind::User, Stage::Decode, message));
        };
        plan.open(piece, &self.takes, self.missing_zero, scratch, out)
            .map_err(|error| {
                error
                    .with_path(self.sources().path(plan.extent.source))
                    .with_range(plan.extent.offset, plan.extent.len)
            })
    }

    fn chunk_name(&self, chunk: usize) -> String {
        let plan = &self.plans().all[chunk];
        let path = self.sources().path(plan.extent.source);
        format!("{}, lines from {}", path.display(), plan.line)
    }
}

/// For fuzz targets: whether these bytes are one object, and the text and numbers of a path in it.
#[cfg(feature = "unstable")]
pub fn fuzz(line: &[u8], path: &str) -> Option<(bool, Option<Vec<u8>>)> {
    let path = KeyPath::parse(path).ok()?;
    let is_object = json::check(line).is_ok();
    let mut buffer = Vec::new();
    let text = Take::Text(path).open(line, true, &mut buffer);
    Some((is_object, text.ok().map(<[u8]>::to_vec)))
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}
