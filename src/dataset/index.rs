//! The index of a dataset of shards: where the bytes of every field of every sample lie, and their CRC32C.
//!
//! ```text
//! shard ──scanned once, shards in parallel──► table: rows × fields of (offset, length, CRC32C) ──► SHARD.OPTIONS.fdx
//!                                               ▲                                                      │
//!                  sample id ──starts──► (shard, row)        ◄──────── read as it stands, one CRC ─────┘
//! ```
//!
//! A format gives [`Index::open_or_build`] its shards and a function that scans one of them. A table has 12 bytes per
//! entry where all offsets of the shard are multiples of a power of two that makes them fit 32 bits, and no part is
//! over 4 GiB; else 20. In a file it stands as in memory: opening is one read and one CRC32C per shard.
//!
//! Limits: 2^32 - 1 rows and 16 fields per shard. Invariants:
//! - An index file is used when its own CRC is right, it was made for the same format and options, and the shard still
//!   has the same length, modification time and first and last 4 KiB. Otherwise the shard is scanned again. So a file
//!   that is torn, cut or made up is never trusted for its length, and never an error.
//! - Index files appear by a rename. A folder that cannot be written costs the cache, not the dataset: see
//!   [`Index::unsaved`].
//! - What is left out is in the ledger ([`Index::damage`], [`Index::left_out`]), also when the index comes from a file.
//!
//! Scanning and opening run on threads that end before `open_or_build` returns.

use super::Parts;
use super::damage::{Damage, DamageKind, OnDamage};
use super::digest::Digest;
use super::parallel::parallel;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::{Extent, SourceId, Sources, open_regular};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Ending of index files.
pub(crate) const ENDING: &str = ".fdx";
/// Fields of a row.
pub(crate) const FIELDS_MAX: usize = 16;
/// Parts of a sample that lie together are read at once when the bytes between them are not more than this.
const GAP_MAX: u64 = 16 << 10;
/// Bytes that a scan reads at a time when it reads everything, and when it only follows headers.
const AHEAD_ALL: usize = 1 << 20;
const AHEAD_HEADERS: usize = 4096;
/// First and last bytes of a shard that belong to its fingerprint.
const ENDS: u64 = 4096;
/// Entries of one shard's ledger; what is over is added up in one more.
const LEDGER_MAX: usize = 1000;
/// Bytes of the ledger in an index file: JSON, which takes many times its length while it is read. An index with more is not
/// taken from its file.
const NOTES_MAX: usize = 8 << 20;
/// Different reasons for leaving something out that are counted apart.
const LEFT_OUT_MAX: usize = 64;

/// Where index files are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Cache {
    /// Beside the shard.
    #[default]
    Beside,
    /// In this folder, which is made when it is missing.
    Folder(PathBuf),
    /// Nowhere: shards are scanned each time.
    Off,
}

/// What an index is made for.
pub(crate) struct Settings<'a> {
    /// The format and the version of its scan: another one makes another index.
    pub(crate) format: &'a str,
    /// Everything that changes what the scan puts into a table, as text.
    pub(crate) options: &'a str,
    /// Fields of a row.
    pub(crate) fields: usize,
    /// Whether entries have CRCs. The scan should read every byte then.
    pub(crate) checksums: bool,
    pub(crate) cache: Cache,
    pub(crate) on_damage: OnDamage,
}

/// Where the bytes of one field of one sample lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// CRC32C of the bytes; without meaning when the index has no checksums.
    pub(crate) crc: u32,
}

/// The index of all shards.
pub(crate) struct Index {
    sources: Arc<Sources>,
    tables: Vec<Table>,
    /// First sample of every shard, then the number of samples.
    starts: Vec<u64>,
    fields: usize,
    checksums: bool,
    damage: Vec<Damage>,
    left_out: BTreeMap<String, u64>,
    scanned: usize,
    unsaved: Option<String>,
}

impl Index {
    /// The index of `files`: from its cache, or by `scan`, which gets a shard's bytes and fills its table. `scan` runs for
    /// several shards at a time; damage goes to [`Rows::damage`], its errors are those of the machine (and mean: no
    /// dataset).
    ///
    /// Errors: those of the file system; with [`OnDamage::Fail`] the first damage.
    pub(crate) fn open_or_build(
        files: &[PathBuf],
        settings: &Settings<'_>,
        scan: impl Fn(&mut Scan<'_>, &mut Rows) -> Result<()> + Sync,
    ) -> Result<Self> {
        // Files behind the first one that fails are not worth scanning.
        let failed = AtomicUsize::new(usize::MAX);
        let shards = parallel(files, |number, path| {
            if number > failed.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Cancelled, Stage::Index, ""));
            }
            let shard = open_shard(path, settings, &scan).map_err(|error| error.with_path(path));
            if shard.is_err() {
                failed.fetch_min(number, Ordering::Relaxed);
            }
            shard
        })?;
        let mut sources = Sources::new();
        for (path, shard) in files.iter().zip(&shards) {
            sources.file(path, shard.len)?;
        }
        Self::of_shards(sources, shards, settings)
    }

    /// The index of a shard that lies in memory; never cached.
    pub(crate) fn of_bytes(
        bytes: Arc<[u8]>,
        settings: &Settings<'_>,
        scan: impl Fn(&mut Scan<'_>, &mut Rows) -> Result<()>,
    ) -> Result<Self> {
        let mut input = Scan::new(Input::Bytes(&bytes), bytes.len() as u64, settings.checksums);
        let mut rows = Rows::new(settings.fields);
        scan(&mut input, &mut rows)?;
        let shard =
            Shard { len: bytes.len() as u64, table: rows.finish(Path::new("<memory>"))?, from: From::Scan(None) };
        let mut sources = Sources::new();
        sources.memory(bytes);
        Self::of_shards(sources, vec![shard], settings)
    }

    fn of_shards(sources: Sources, shards: Vec<Shard>, settings: &Settings<'_>) -> Result<Self> {
        let mut index = Self {
            sources: Arc::new(sources),
            tables: Vec::with_capacity(shards.len()),
            starts: Vec::with_capacity(shards.len() + 1),
            fields: settings.fields,
            checksums: settings.checksums,
            damage: Vec::new(),
            left_out: BTreeMap::new(),
            scanned: 0,
            unsaved: None,
        };
        let mut len = 0_u64;
        for mut shard in shards {
            index.starts.push(len);
            len += u64::from(shard.table.rows);
            index.damage.append(&mut shard.table.notes.damage);
            for (reason, count) in std::mem::take(&mut shard.table.notes.left_out) {
                let sum = index.left_out.entry(reason).or_default();
                *sum = sum.saturating_add(count);
            }
            if let From::Scan(unsaved) = shard.from {
                index.scanned += 1;
                index.unsaved = index.unsaved.or(unsaved);
            }
            index.tables.push(shard.table);
        }
        index.starts.push(len);
        match (index.damage.first(), settings.on_damage) {
            (Some(first), OnDamage::Fail) => Err(first.refused(index.damage.len() - 1)),
            _ => Ok(index),
        }
    }

    /// The shards.
    pub(crate) fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    /// Number of samples.
    pub(crate) fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Whether entries have CRCs.
    pub(crate) fn checksums(&self) -> bool {
        self.checksums
    }

    /// Damage, in the order of the shards.
    pub(crate) fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// What was left out by rule, with counts.
    pub(crate) fn left_out(&self) -> &BTreeMap<String, u64> {
        &self.left_out
    }

    /// Shards that were scanned, since no index file fitted.
    pub(crate) fn scanned(&self) -> usize {
        self.scanned
    }

    /// Why an index could not be saved, for the first shard where that failed.
    pub(crate) fn unsaved(&self) -> Option<&str> {
        self.unsaved.as_deref()
    }

    /// Most bytes of all extents of one sample.
    pub(crate) fn sample_bytes_max(&self) -> u64 {
        self.tables.iter().map(|table| table.bytes_max).max().unwrap_or(0)
    }

    /// The sample with the most bytes.
    pub(crate) fn largest_sample(&self) -> Option<u64> {
        let filled = (0..self.tables.len()).rev().filter(|shard| self.tables[*shard].rows > 0);
        let shard = filled.max_by_key(|shard| self.tables[*shard].bytes_max)?;
        Some(self.starts[shard] + u64::from(self.tables[shard].largest))
    }

    /// Heap bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(|table| table.words.capacity() * 4 + size_of::<Table>()).sum();
        tables + self.starts.capacity() * 8 + self.sources.table_bytes()
    }

    /// Shard and row of a sample. `sample` is below `len`.
    pub(crate) fn locate(&self, sample: u64) -> (usize, usize) {
        // Of shards without samples, which start where the next one does, the search skips all.
        let shard = self.starts.partition_point(|start| *start <= sample) - 1;
        (shard, (sample - self.starts[shard]) as usize)
    }

    /// Where field `field` of a sample lies; `None` when the sample lacks it.
    pub(crate) fn entry(&self, sample: u64, field: usize) -> Option<(SourceId, Entry)> {
        let (shard, row) = self.locate(sample);
        Some((SourceId::at(shard), self.tables[shard].entry(row, field)?))
    }

    /// The parts of a sample: fields that lie close together share an extent, which is read once. A field that the
    /// sample lacks has no bytes. Without checksums, fields in `plain` (a bit set) that have an extent of their own may
    /// be read in place.
    pub(crate) fn extents<'a>(&'a self, sample: u64, plain: u32, parts: &mut Parts<'a>) {
        let (shard, row) = self.locate(sample);
        let table = &self.tables[shard];
        let span = table.span(row);
        let source = SourceId::at(shard);
        for field in 0..self.fields {
            let Some(entry) = table.entry(row, field) else { continue };
            match span {
                Span::Shared { offset, len } => parts.framed(field, Extent { source, offset, len }),
                Span::Apart(_) => {
                    let extent = Extent { source, offset: entry.offset, len: entry.len };
                    if !self.checksums && plain & (1 << field) != 0 {
                        parts.extent(field, extent);
                    } else {
                        parts.framed(field, extent);
                    }
                }
            }
        }
        // Last, since shared extents must follow each other.
        (0..self.fields).filter(|field| table.entry(row, *field).is_none()).for_each(|field| parts.inline(field, &[]));
    }

    /// A hash of where everything lies; some 10 ns for each entry, the shards in parallel.
    pub(crate) fn places(&self) -> u64 {
        let shard = |_: usize, table: &Table| {
            let mut digest = Digest::new("shard's table").word(u64::from(table.rows));
            for row in 0..table.rows as usize {
                for entry in (0..self.fields).map(|field| table.entry(row, field)) {
                    let (offset, len) = entry.map_or((u64::MAX, u64::MAX), |entry| (entry.offset, entry.len));
                    digest = digest.word(offset).word(len);
                }
            }
            Ok(digest.end())
        };
        // There is nothing that could fail.
        Digest::new("tables").words(&parallel(&self.tables, shard).unwrap_or_default()).end()
    }

    /// Cuts a field's bytes out of what was read for [`extents`](Self::extents) and verifies their CRC.
    ///
    /// Errors: [`ErrorKind::Decode`] with both CRCs, [`ErrorKind::Truncated`]; both name path, offset and sample.
    pub(crate) fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8]) -> Result<&'a [u8]> {
        let (shard, row) = self.locate(sample);
        let table = &self.tables[shard];
        let Some(entry) = table.entry(row, field) else { return Ok(&[]) };
        let site = |error: Error| {
            error
                .with_path(self.sources.path(SourceId::at(shard)))
                .with_range(entry.offset, entry.len)
                .with_sample(sample)
        };
        let start = match table.span(row) {
            Span::Shared { offset, .. } => entry.offset - offset,
            Span::Apart(_) => 0,
        };
        let range = usize::try_from(start).ok().zip(usize::try_from(entry.len).ok());
        let own = range.and_then(|(start, len)| bytes.get(start..)?.get(..len)).ok_or_else(|| {
            let message = format!("{} bytes from byte {start} expected, {} came", entry.len, bytes.len());
            site(Error::new(ErrorKind::Truncated, Stage::Decode, message))
        })?;
        if self.checksums {
            let found = crc32c::crc32c(own);
            if found != entry.crc {
                let message = format!("CRC32C {:08x} in the index, {found:08x} in the shard", entry.crc);
                return Err(site(Error::new(ErrorKind::Decode, Stage::Decode, message)));
            }
        }
        Ok(own)
    }
}

/// A shard as it was opened.
struct Shard {
    len: u64,
    table: Table,
    from: From,
}

enum From {
    Cache,
    /// Scanned, and why it could not be saved.
    Scan(Option<String>),
}

fn open_shard(
    path: &Path,
    settings: &Settings<'_>,
    scan: impl Fn(&mut Scan<'_>, &mut Rows) -> Result<()>,
) -> Result<Shard> {
    let (file, _) = open_regular(path)?;
    let print = Fingerprint::of(&file)?;
    let purpose = purpose(settings);
    let place = place(path, settings, purpose);
    if let Some(table) = place.as_ref().and_then(|place| load(place, path, &print, purpose, settings.fields)) {
        return Ok(Shard { len: print.len, table, from: From::Cache });
    }
    let mut input = Scan::new(Input::File(&file), print.len, settings.checksums);
    let mut rows = Rows::new(settings.fields);
    scan(&mut input, &mut rows)?;
    if Fingerprint::of(&file)? != print {
        return Err(Error::new(ErrorKind::Changed, Stage::Index, "the shard was written to while it was indexed"));
    }
    let mut table = rows.finish(path)?;
    let unsaved = place.and_then(|place| {
        table.seal(&print, purpose);
        let failed = save(&place, bytemuck::cast_slice(&table.words)).err()?;
        Some(format!("{}: {failed}", place.display()))
    });
    Ok(Shard { len: print.len, table, from: From::Scan(unsaved) })
}

/// What tells one content of a shard from another without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fingerprint {
    len: u64,
    /// Modification time in nanoseconds, modulo 2^64.
    modified: u64,
    /// CRC32C of the first and last bytes.
    ends: u32,
}

impl Fingerprint {
    fn of(file: &File) -> Result<Self> {
        let failed = |source| Error::os(Stage::Index, "cannot read the shard", source);
        let meta = file.metadata().map_err(failed)?;
        let len = meta.len();
        let mut bytes = [0; 2 * ENDS as usize];
        let first = len.min(ENDS);
        let last = (len - first).min(ENDS);
        let bytes = &mut bytes[..(first + last) as usize];
        let (head, tail) = bytes.split_at_mut(first as usize);
        file.read_exact_at(head, 0).and_then(|()| file.read_exact_at(tail, len - last)).map_err(failed)?;
        Ok(Self { len, modified: modified(&meta), ends: crc32c::crc32c(bytes) })
    }
}

/// Modification time in nanoseconds, modulo 2^64.
pub(crate) fn modified(meta: &std::fs::Metadata) -> u64 {
    (meta.mtime() as u64).wrapping_mul(1_000_000_000).wrapping_add(meta.mtime_nsec() as u64)
}

/// FNV-1a: the same in every build, unlike the standard library's.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

fn purpose(settings: &Settings<'_>) -> u64 {
    let Settings { format, options, fields, checksums, .. } = settings;
    fnv(format!("{format}\0{options}\0{fields}\0{checksums}").as_bytes())
}

/// The index file of a shard. Its name holds the options, so that two datasets of the same shards do not overwrite each
/// other's; in a folder of its own also the shard's path.
fn place(path: &Path, settings: &Settings<'_>, purpose: u64) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let mut name = path.file_name()?.to_os_string();
    let options = (purpose ^ purpose >> 32) as u32;
    match &settings.cache {
        Cache::Off => None,
        Cache::Beside => {
            name.push(format!(".{options:08x}{ENDING}"));
            Some(path.with_file_name(name))
        }
        Cache::Folder(dir) => {
            let full = std::path::absolute(path).ok()?;
            name.push(format!(".{:016x}.{options:08x}{ENDING}", fnv(full.as_os_str().as_bytes())));
            Some(dir.join(name))
        }
    }
}

/// Leaves out index files that a pattern such as `train-*` has found.
pub(crate) fn without_indexes(mut files: Vec<PathBuf>) -> Vec<PathBuf> {
    files.retain(|path| !path.as_os_str().as_encoded_bytes().ends_with(ENDING.as_bytes()));
    files
}

/// Writes a file as a whole or not at all. Not synced: what a crash tears is found by its CRC.
pub(crate) fn save(place: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let dir = place.parent().unwrap_or(Path::new(""));
    if !dir.as_os_str().is_empty() {
        std::fs::create_dir_all(dir)?;
    }
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    let own = format!(".{name}.{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let temporary = dir.join(own);
    let written = File::options()
        .write(true)
        .create_new(true)
        .open(&temporary)
        .and_then(|mut file| std::io::Write::write_all(&mut file, bytes))
        .and_then(|()| std::fs::rename(&temporary, place));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// A shard's bytes for its scan: a window that moves forward, so that nothing is read twice.
pub(crate) struct Scan<'a> {
    input: Input<'a>,
    len: u64,
    window: Vec<u8>,
    /// Offset of the window's first byte.
    at: u64,
    ahead: usize,
}

#[derive(Clone, Copy)]
enum Input<'a> {
    File(&'a File),
    Bytes(&'a [u8]),
}

impl<'a> Scan<'a> {
    fn new(input: Input<'a>, len: u64, all: bool) -> Self {
        Self { input, len, window: Vec::new(), at: 0, ahead: if all { AHEAD_ALL } else { AHEAD_HEADERS } }
    }

    /// Length of the shard.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// `len` bytes at `offset`. Check `len` against a limit first: that much is held in memory.
    ///
    /// Errors: [`ErrorKind::Truncated`] when the shard does not have them.
    pub(crate) fn bytes(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len) {
            let message = format!("{len} bytes expected, the shard has {}", self.len);
            return Err(Error::new(ErrorKind::Truncated, Stage::Index, message).with_range(offset, len as u64));
        }
        if let Input::Bytes(bytes) = self.input {
            return Ok(&bytes[offset as usize..offset as usize + len]);
        }
        let inside = |at: u64, have: usize| offset >= at && offset + len as u64 <= at + have as u64;
        if !inside(self.at, self.window.len()) {
            self.fill(offset, len.max(self.ahead))?;
        }
        let start = (offset - self.at) as usize;
        Ok(&self.window[start..start + len])
    }

    /// CRC32C of `len` bytes at `offset`, any number of them. Errors: as [`bytes`](Self::bytes).
    pub(crate) fn crc(&mut self, offset: u64, len: u64) -> Result<u32> {
        let mut crc = 0;
        let mut done = 0;
        while done < len {
            let at = offset.saturating_add(done);
            // What the window holds already, or the next one.
            let held = (self.at + self.window.len() as u64).checked_sub(at).filter(|held| *held > 0 && at >= self.at);
            let step = (len - done).min(held.unwrap_or(self.ahead as u64));
            crc = crc32c::crc32c_append(crc, self.bytes(at, step as usize)?);
            done += step;
        }
        Ok(crc)
    }

    fn fill(&mut self, offset: u64, len: usize) -> Result<()> {
        let Input::File(file) = self.input else { return Ok(()) };
        let len = (self.len - offset).min(len as u64) as usize;
        self.window.resize(len, 0);
        self.at = offset;
        file.read_exact_at(&mut self.window, offset).map_err(|source| {
            // Nothing must be taken for bytes of the shard that was not read.
            self.window.clear();
            Error::os(Stage::Index, "cannot read the shard", source).with_range(offset, len as u64)
        })
    }
}

/// What is not in the table.
#[derive(Default)]
struct Notes {
    damage: Vec<Damage>,
    left_out: BTreeMap<String, u64>,
}

impl Notes {
    fn to_bytes(&self) -> Vec<u8> {
        if self.damage.is_empty() && self.left_out.is_empty() {
            return Vec::new();
        }
        let entry = |d: &Damage| json!([d.kind.as_str(), d.offset, d.len, d.samples, d.message]);
        let damage: Vec<Value> = self.damage.iter().map(entry).collect();
        json!({ "damage": damage, "left_out": self.left_out }).to_string().into_bytes()
    }

    fn from_bytes(bytes: &[u8], path: &Path) -> Option<Self> {
        if bytes.is_empty() {
            return Some(Self::default());
        }
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let mut notes = Self::default();
        for entry in value.get("damage")?.as_array()? {
            let number = |index: usize| entry.get(index)?.as_u64();
            let kind = DamageKind::from_str(entry.get(0)?.as_str()?)?;
            let damage = Damage::new(kind, number(1)?, number(2)?, number(3)?, entry.get(4)?.as_str()?);
            notes.damage.push(damage.at(path));
        }
        for (reason, count) in value.get("left_out")?.as_object()? {
            notes.left_out.insert(reason.clone(), count.as_u64()?);
        }
        Some(notes)
    }
}

/// The rows of one shard while it is scanned.
pub(crate) struct Rows {
    fields: usize,
    entries: Vec<Option<Entry>>,
    notes: Notes,
    /// Damage that found no entry of its own.
    surplus: u64,
}

impl Rows {
    fn new(fields: usize) -> Self {
        assert!((1..=FIELDS_MAX).contains(&fields), "a format checks its fields first");
        Self { fields, entries: Vec::new(), notes: Notes::default(), surplus: 0 }
    }

    /// The next sample: one entry per field, `None` where it lacks the field.
    pub(crate) fn push(&mut self, entries: &[Option<Entry>]) {
        assert_eq!(entries.len(), self.fields);
        self.entries.extend_from_slice(entries);
    }

    /// Takes the last sample back.
    #[allow(dead_code, reason = "for formats that find out later")]
    pub(crate) fn pop(&mut self) {
        self.entries.truncate(self.entries.len().saturating_sub(self.fields));
    }

    /// Samples so far.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() / self.fields
    }

    /// Writes an entry of the ledger.
    pub(crate) fn damage(&mut self, damage: Damage) {
        let ledger = &mut self.notes.damage;
        match ledger.get_mut(LEDGER_MAX) {
            None => ledger.push(damage),
            Some(last) => {
                self.surplus += 1;
                last.message = format!("{} entries more, the last: {}", self.surplus, damage.message);
                last.len = (damage.offset + damage.len).max(last.offset + last.len) - last.offset;
                last.samples += damage.samples;
            }
        }
    }

    /// Counts something that is left out by rule: it is no damage, but the dataset says it.
    pub(crate) fn leave_out(&mut self, reason: &str) {
        match self.notes.left_out.get_mut(reason) {
            Some(count) => *count += 1,
            None => {
                let reason = if self.notes.left_out.len() < LEFT_OUT_MAX { reason } else { "others" };
                *self.notes.left_out.entry(reason.to_string()).or_default() += 1;
            }
        }
    }

    fn finish(mut self, path: &Path) -> Result<Table> {
        let len = self.len();
        let Ok(rows) = u32::try_from(len) else {
            let message = format!("{len} samples in one shard, {} are the limit", u32::MAX);
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
        };
        self.notes.damage.iter_mut().for_each(|damage| damage.path = path.to_path_buf());
        let form = Form::for_entries(&self.entries);
        let notes = self.notes.to_bytes();
        let mut words = vec![0_u32; HEADER];
        words.reserve_exact(self.entries.len() * form.stride() + notes.len().div_ceil(4));
        self.entries.iter().for_each(|entry| form.write(*entry, &mut words));
        words.resize(words.len() + notes.len().div_ceil(4), 0);
        let end = words.len() * 4 - notes.len().next_multiple_of(4);
        bytemuck::cast_slice_mut::<u32, u8>(&mut words)[end..end + notes.len()].copy_from_slice(&notes);
        let fields = self.fields;
        let notes_bytes = notes.len();
        let mut table = Table { words, rows, fields, form, notes_bytes, bytes_max: 0, largest: 0, notes: self.notes };
        for row in 0..len {
            let bytes = table.span(row).bytes();
            if bytes > table.bytes_max {
                (table.bytes_max, table.largest) = (bytes, row as u32);
            }
        }
        Ok(table)
    }
}

/// How an entry is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Offset in units of 2^shift bytes, length, CRC.
    Compact { shift: u32 },
    /// Offset and length in two words each, the lower first; CRC.
    Wide,
}

/// The length of an entry that is not there.
const ABSENT: u32 = u32::MAX;
const WIDE: u32 = 1 << 8;

impl Form {
    fn for_entries(entries: &[Option<Entry>]) -> Self {
        let (mut bits, mut offset_max, mut len_max) = (0, 0, 0);
        for entry in entries.iter().flatten() {
            bits |= entry.offset;
            offset_max = offset_max.max(entry.offset);
            len_max = len_max.max(entry.len);
        }
        let shift = bits.trailing_zeros().min(31);
        let compact = offset_max >> shift <= u64::from(u32::MAX) && len_max < u64::from(ABSENT);
        if compact { Self::Compact { shift } } else { Self::Wide }
    }

    fn from_code(code: u32) -> Option<Self> {
        match code {
            WIDE => Some(Self::Wide),
            shift if shift < 32 => Some(Self::Compact { shift }),
            _ => None,
        }
    }

    fn code(self) -> u32 {
        match self {
            Self::Compact { shift } => shift,
            Self::Wide => WIDE,
        }
    }

    /// Words of an entry.
    fn stride(self) -> usize {
        match self {
            Self::Compact { .. } => 3,
            Self::Wide => 5,
        }
    }

    fn write(self, entry: Option<Entry>, words: &mut Vec<u32>) {
        match (self, entry) {
            (Self::Compact { .. }, None) => words.extend([0, ABSENT, 0]),
            (Self::Wide, None) => words.extend([0, 0, ABSENT, ABSENT, 0]),
            (Self::Compact { shift }, Some(e)) => words.extend([(e.offset >> shift) as u32, e.len as u32, e.crc]),
            (Self::Wide, Some(e)) => {
                words.extend([e.offset as u32, (e.offset >> 32) as u32, e.len as u32, (e.len >> 32) as u32, e.crc]);
            }
        }
    }

    fn read(self, words: &[u32]) -> Option<Entry> {
        let wide = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        match (self, words) {
            (Self::Compact { shift }, [at, len, crc]) => {
                (*len != ABSENT).then(|| Entry { offset: u64::from(*at) << shift, len: u64::from(*len), crc: *crc })
            }
            (Self::Wide, [offset, offset_high, len, len_high, crc]) => {
                let len = wide(*len, *len_high);
                (len != u64::MAX).then(|| Entry { offset: wide(*offset, *offset_high), len, crc: *crc })
            }
            _ => None,
        }
    }
}

/// How the parts of a sample are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Span {
    /// All in one extent.
    Shared { offset: u64, len: u64 },
    /// Each for itself; the bytes together.
    Apart(u64),
}

impl Span {
    fn bytes(self) -> u64 {
        match self {
            Self::Shared { len, .. } => len,
            Self::Apart(bytes) => bytes,
        }
    }
}

/// The table of one shard: the words of its index file as they stand, header, entries, notes.
struct Table {
    words: Vec<u32>,
    rows: u32,
    fields: usize,
    form: Form,
    notes_bytes: usize,
    bytes_max: u64,
    largest: u32,
    notes: Notes,
}

impl Table {
    fn entry(&self, row: usize, field: usize) -> Option<Entry> {
        let stride = self.form.stride();
        let start = HEADER + (row * self.fields + field) * stride;
        self.form.read(&self.words[start..start + stride])
    }

    fn span(&self, row: usize) -> Span {
        let (mut start, mut end, mut bytes, mut count) = (u64::MAX, 0, 0_u64, 0);
        for entry in (0..self.fields).filter_map(|field| self.entry(row, field)) {
            start = start.min(entry.offset);
            end = end.max(entry.offset.saturating_add(entry.len));
            bytes = bytes.saturating_add(entry.len);
            count += 1;
        }
        if count > 1 && end - start <= bytes.saturating_add(GAP_MAX) {
            return Span::Shared { offset: start, len: end - start };
        }
        Span::Apart(bytes)
    }

    /// Makes the words a file: fills in the header.
    fn seal(&mut self, print: &Fingerprint, purpose: u64) {
        let low_high = |n: u64| [n as u32, (n >> 32) as u32];
        let [len, modified, purpose] = [print.len, print.modified, purpose].map(low_high);
        let bytes_max = low_high(self.bytes_max);
        let head = [
            MAGIC[0],
            MAGIC[1],
            purpose[0],
            purpose[1],
            len[0],
            len[1],
            modified[0],
            modified[1],
            print.ends,
            self.fields as u32,
            self.form.code(),
            self.rows,
            bytes_max[0],
            bytes_max[1],
            self.largest,
            self.notes_bytes as u32,
            0,
        ];
        self.words[..HEADER].copy_from_slice(&head);
        self.words[CRC] = self.crc();
    }

    fn crc(&self) -> u32 {
        words_crc(&self.words)
    }
}

/// Words of the header: magic and version, purpose, the shard's length, time and ends, fields, form, rows, most bytes of
/// a sample, largest sample, bytes of notes, CRC32C of the file without this word.
const HEADER: usize = 17;
const CRC: usize = HEADER - 1;
/// "feedlix" and the version. In native order like everything else: a machine of the other order finds no index.
const MAGIC: [u32; 2] = [u32::from_be_bytes(*b"feed"), u32::from_be_bytes(*b"lix1")];

fn words_crc(words: &[u32]) -> u32 {
    let crc = crc32c::crc32c(bytemuck::cast_slice(&words[..CRC]));
    crc32c::crc32c_append(crc, bytemuck::cast_slice(&words[HEADER..]))
}

/// The table in an index file, or `None` when it is not there, not right, or not for this shard as it is now.
fn load(place: &Path, path: &Path, print: &Fingerprint, purpose: u64, fields: usize) -> Option<Table> {
    let (file, len) = open_regular(place).ok()?;
    let mut head = [0_u32; HEADER];
    file.read_exact_at(bytemuck::cast_slice_mut(&mut head), 0).ok()?;
    let wide = |at: usize| u64::from(head[at]) | u64::from(head[at + 1]) << 32;
    let found = Fingerprint { len: wide(4), modified: wide(6), ends: head[8] };
    if head[..2] != MAGIC || wide(2) != purpose || found != *print || head[9] as usize != fields {
        return None;
    }
    let form = Form::from_code(head[10])?;
    let (rows, bytes_max, largest, notes_bytes) = (head[11], wide(12), head[14], head[15] as usize);
    // Memory is taken for what the file has, and only when that is what its header says.
    let entries = (rows as usize).checked_mul(fields)?.checked_mul(form.stride())?;
    let words = HEADER.checked_add(entries)?.checked_add(notes_bytes.div_ceil(4))?;
    if words.checked_mul(4)? as u64 != len || (largest >= rows && rows > 0) {
        return None;
    }
    // A file's length may be made up, too (a sparse one takes no room): a shard has no more samples than bytes.
    if u64::from(rows) > print.len || notes_bytes > NOTES_MAX {
        return None;
    }
    let mut all = Vec::new();
    all.try_reserve_exact(words).ok()?;
    all.resize(words, 0_u32);
    file.read_exact_at(bytemuck::cast_slice_mut(&mut all), 0).ok()?;
    if all[..HEADER] != head || words_crc(&all) != head[CRC] {
        return None;
    }
    let start = (HEADER + entries) * 4;
    let notes = Notes::from_bytes(&bytemuck::cast_slice::<u32, u8>(&all)[start..start + notes_bytes], path)?;
    Some(Table { words: all, rows, fields, form, notes_bytes, bytes_max, largest, notes })
}

/// For the fuzz target: these bytes as an index file whose magic, purpose, shard and CRC are right, so that its numbers
/// are believed; every entry is looked at. True when the file is taken.
pub(super) fn fuzz(bytes: &[u8]) -> bool {
    let mut words: Vec<u32> = bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    if words.len() < HEADER {
        return false;
    }
    let print = Fingerprint { len: 1 << 20, modified: 1, ends: 2 };
    words[..10].copy_from_slice(&[MAGIC[0], MAGIC[1], 7, 0, 1 << 20, 0, 1, 0, 2, 2]);
    words[CRC] = words_crc(&words);
    let place = std::env::temp_dir().join(format!("feedline-fuzz-{}.fdx", std::process::id()));
    if std::fs::write(&place, bytemuck::cast_slice(&words)).is_err() {
        return false;
    }
    let Some(table) = load(&place, Path::new("shard"), &print, 7, 2) else { return false };
    for row in 0..table.rows as usize {
        let _ = (table.span(row), table.entry(row, 0), table.entry(row, 1));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::{Part, paths};
    use proptest::prelude::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn an_index_file_that_claims_more_samples_than_its_shard_has_bytes_takes_no_memory() {
        let dir = Dir::new();
        let print = Fingerprint { len: 1 << 20, modified: 1, ends: 2 };
        let head = |rows: u32, notes: usize| {
            vec![MAGIC[0], MAGIC[1], 7, 0, 1 << 20, 0, 1, 0, 2, 2, 0, rows, 0, 0, 0, notes as u32, 0]
        };
        // 4 billion rows of two fields in a sparse file of 103 GB.
        let rows = u32::MAX - 1;
        let place = dir.shard("rows.fdx", bytemuck::cast_slice(&head(rows, 0)));
        let len = HEADER as u64 * 4 + u64::from(rows) * 24;
        File::options().write(true).open(&place).unwrap().set_len(len).unwrap();
        assert!(load(&place, Path::new("shard"), &print, 7, 2).is_none());
        // A right file but for the size of its ledger, which is taken up to the limit.
        for (notes, taken) in [(NOTES_MAX, true), (NOTES_MAX + 4, false)] {
            let mut text = br#"{"damage":[],"left_out":{}}"#.to_vec();
            text.resize(notes, b' ');
            let mut words = head(0, notes);
            words.extend(text.chunks_exact(4).map(bytemuck::pod_read_unaligned::<u32>));
            words[CRC] = words_crc(&words);
            let place = dir.shard("notes.fdx", bytemuck::cast_slice(&words));
            assert_eq!(load(&place, Path::new("shard"), &print, 7, 2).is_some(), taken, "{notes}");
        }
    }

    struct Dir(PathBuf);

    impl Dir {
        fn new() -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let name = format!("feedline-index-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn shard(&self, name: &str, bytes: &[u8]) -> PathBuf {
            let path = self.0.join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        }

        fn index_files(&self) -> Vec<PathBuf> {
            paths::files_of(&self.0, &[ENDING]).unwrap_or_default()
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn settings(cache: Cache) -> Settings<'static> {
        Settings { format: "test 1", options: "", fields: 2, checksums: true, cache, on_damage: OnDamage::Skip }
    }

    /// A format: samples of 10 bytes, a field of 6 and one of 4, which is missing where its first byte is `-`.
    fn scan(input: &mut Scan<'_>, rows: &mut Rows) -> Result<()> {
        for start in (0..input.len() / 10 * 10).step_by(10) {
            let entry = |input: &mut Scan<'_>, offset, len| {
                Ok::<_, Error>(Some(Entry { offset, len, crc: input.crc(offset, len)? }))
            };
            let missing = input.bytes(start + 6, 1)? == b"-";
            let first = entry(input, start, 6)?;
            let second = if missing { None } else { entry(input, start + 6, 4)? };
            rows.push(&[first, second]);
        }
        let over = input.len() % 10;
        if over > 0 {
            rows.damage(Damage::new(DamageKind::Cut, input.len() - over, over, 1, format!("{over} bytes \"over\"")));
        }
        rows.leave_out("nothing");
        Ok(())
    }

    /// Every field of every sample, as a loader would get it.
    fn all(index: &Index, read: impl Fn(Extent) -> Vec<u8>) -> Result<Vec<Vec<Vec<u8>>>> {
        (0..index.len())
            .map(|sample| {
                let mut parts = Parts::new();
                index.extents(sample, 0, &mut parts);
                let mut fields = vec![Vec::new(); 2];
                for (field, part) in parts.iter() {
                    let Part::Framed(extent) = part else { continue };
                    fields[field] = index.open(sample, field, &read(extent))?.to_vec();
                }
                Ok(fields)
            })
            .collect()
    }

    fn from(bytes: &[u8]) -> impl Fn(Extent) -> Vec<u8> + '_ {
        |extent| bytes[extent.offset as usize..(extent.offset + extent.len) as usize].to_vec()
    }

    const SHARD: &[u8] = b"aaaaaabbbbccccccddddeeeeee----ffffffgggg---";

    #[test]
    fn samples_are_found_across_shards_and_come_from_the_cache_the_second_time() {
        let dir = Dir::new();
        let empty: &[u8] = b"";
        let shards = [empty, SHARD, empty, b"1234567890", empty];
        let files: Vec<_> = (0..5).map(|k| dir.shard(&format!("s{k}"), shards[k])).collect();
        for round in 0..2 {
            let index = Index::open_or_build(&files, &settings(Cache::Beside), scan).unwrap();
            assert_eq!((index.len(), index.scanned()), (5, if round == 0 { 5 } else { 0 }));
            assert_eq!((0..5).map(|id| index.locate(id)).collect::<Vec<_>>(), [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0)]);
            assert_eq!((index.sample_bytes_max(), index.largest_sample()), (10, Some(0)));
            let read = |extent: Extent| from(shards[extent.source.index()])(extent);
            let fields = all(&index, read).unwrap();
            assert_eq!(fields[2], [b"eeeeee".to_vec(), vec![]]);
            assert_eq!(fields[4], [b"123456".to_vec(), b"7890".to_vec()]);
            let [damage] = index.damage() else { panic!("{:?}", index.damage()) };
            assert_eq!(
                damage.to_string(),
                format!("cut: 3 bytes \"over\": path={} offset=40 len=3 samples>=1", files[1].display())
            );
            assert_eq!(index.left_out().get("nothing"), Some(&5));
        }
        let refuse = Settings { on_damage: OnDamage::Fail, ..settings(Cache::Beside) };
        let error = Index::open_or_build(&files, &refuse, scan).err().unwrap();
        assert_eq!((error.kind(), error.site().offset), (ErrorKind::Truncated, Some(40)));
    }

    #[test]
    fn fields_that_lie_together_are_read_once_and_every_flipped_byte_is_named() {
        let index = Index::of_bytes(SHARD.into(), &settings(Cache::Off), scan).unwrap();
        let mut parts = Parts::new();
        index.extents(1, 0, &mut parts);
        let shared = Part::Framed(Extent { source: SourceId::at(0), offset: 10, len: 10 });
        assert_eq!(parts.iter().collect::<Vec<_>>(), [(0, shared), (1, shared)]);
        for at in 0..40 {
            let mut bytes = SHARD.to_vec();
            bytes[at] ^= 1;
            let error = all(&index, from(&bytes));
            // The missing field's bytes belong to nobody.
            assert_eq!(error.is_ok(), (26..30).contains(&at), "byte {at}");
            if let Err(error) = error {
                assert_eq!(error.site().sample, Some(at as u64 / 10), "{error}");
            }
        }
    }

    #[test]
    fn an_index_file_that_is_flipped_or_cut_anywhere_is_made_anew() {
        let dir = Dir::new();
        let file = dir.shard("s", SHARD);
        let files = [file];
        let open = || Index::open_or_build(&files, &settings(Cache::Beside), scan).unwrap();
        let right = all(&open(), from(SHARD)).unwrap();
        let [place] = &dir.index_files()[..] else { panic!("one shard, one index") };
        let whole = std::fs::read(place).unwrap();
        let mut hostile: Vec<Vec<u8>> = (0..whole.len()).map(|len| whole[..len].to_vec()).collect();
        for at in 0..whole.len() {
            for bits in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= bits;
                hostile.push(bytes);
            }
        }
        hostile.push([&whole[..], &[0]].concat());
        hostile.push(vec![0xff; 4096]);
        for (case, bytes) in hostile.iter().enumerate() {
            std::fs::write(place, bytes).unwrap();
            let index = open();
            assert_eq!((index.scanned(), index.damage().len()), (1, 1), "case {case}");
            assert_eq!(all(&index, from(SHARD)).unwrap(), right, "case {case}");
            assert_eq!(std::fs::read(place).unwrap(), whole, "case {case}");
        }
    }

    #[test]
    fn an_index_file_with_a_right_crc_and_wrong_numbers_takes_no_memory_and_never_panics() {
        let dir = Dir::new();
        let files = [dir.shard("s", SHARD)];
        let open = || Index::open_or_build(&files, &settings(Cache::Beside), scan).unwrap();
        open();
        let place = dir.index_files().remove(0);
        let whole = std::fs::read(&place).unwrap();
        let words: Vec<u32> = whole.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
        for at in (0..words.len()).filter(|at| *at != CRC) {
            for value in [0, 1, 7, 0x7fff_ffff, 0xffff_fffe, u32::MAX] {
                let mut words = words.clone();
                words[at] = value;
                words[CRC] = words_crc(&words);
                std::fs::write(&place, bytemuck::cast_slice(&words)).unwrap();
                let index = open();
                for sample in 0..index.len() {
                    let mut parts = Parts::new();
                    index.extents(sample, 0, &mut parts);
                    for (field, part) in parts.iter() {
                        // Whether the extent lies in the shard is the pipeline's to check; here only that nothing falls over.
                        let _ = (part, index.open(sample, field, SHARD));
                    }
                }
                let _ = (index.sample_bytes_max(), index.largest_sample());
            }
        }
    }

    #[test]
    fn a_shard_that_changed_is_scanned_again() {
        let dir = Dir::new();
        let mut long = vec![b'x'; 20_000];
        let files = [dir.shard("s", &long)];
        let open = || Index::open_or_build(&files, &settings(Cache::Beside), scan).unwrap();
        assert_eq!((open().scanned(), open().scanned()), (1, 0));
        let modified = std::fs::metadata(&files[0]).unwrap().modified().unwrap();
        let restore = || File::options().append(true).open(&files[0]).unwrap().set_modified(modified).unwrap();
        // Another time, the same bytes.
        File::options().append(true).open(&files[0]).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!((open().scanned(), open().scanned()), (1, 0));
        restore();
        assert_eq!((open().scanned(), open().scanned()), (1, 0));
        // Other bytes, the same time and length: found at the ends ...
        for at in [0, 4095, 15_904, 19_999] {
            long[at] ^= 1;
            std::fs::write(&files[0], &long).unwrap();
            restore();
            assert_eq!((open().scanned(), open().scanned()), (1, 0), "byte {at}");
        }
        // ... and in the middle by the CRC of the sample.
        long[10_000] ^= 1;
        std::fs::write(&files[0], &long).unwrap();
        restore();
        let index = open();
        assert_eq!(index.scanned(), 0);
        assert_eq!(all(&index, from(&long)).unwrap_err().site().sample, Some(1000));
    }

    #[test]
    fn other_options_have_other_files_and_folders_hold_shards_of_the_same_name() {
        let (dir, cache) = (Dir::new(), Dir::new());
        std::fs::create_dir(dir.0.join("sub")).unwrap();
        let files = [dir.shard("s", SHARD), dir.shard("sub/s", b"aaaaaabbbb")];
        let beside = settings(Cache::Beside);
        let folder = settings(Cache::Folder(cache.0.join("deep/er")));
        for settings in [&beside, &Settings { options: "more", ..settings(Cache::Beside) }, &folder] {
            for scanned in [2, 0] {
                let index = Index::open_or_build(&files, settings, scan).unwrap();
                assert_eq!((index.scanned(), index.len(), index.unsaved()), (scanned, 5, None));
            }
        }
        assert_eq!(dir.index_files().len(), 2);
        assert_eq!(paths::files_of(&cache.0.join("deep/er"), &[ENDING]).unwrap().len(), 2);
        let off = settings(Cache::Off);
        assert_eq!(Index::open_or_build(&files, &off, scan).unwrap().scanned(), 2);
        assert_eq!(without_indexes(paths::files_of(&dir.0, &[]).unwrap()), files[..1]);
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_the_cache_only() {
        let dir = Dir::new();
        let files = [dir.shard("s", SHARD)];
        // Not even root can make a folder of a file.
        let settings = settings(Cache::Folder(files[0].join("sub")));
        let index = Index::open_or_build(&files, &settings, scan).unwrap();
        assert_eq!(index.len(), 4);
        assert!(index.unsaved().unwrap().contains("s/sub"), "{:?}", index.unsaved());
    }

    #[test]
    fn a_shard_that_fails_is_named_and_the_first_one_wins() {
        let dir = Dir::new();
        let files: Vec<_> = (0..20).map(|k| dir.shard(&format!("s{k:02}"), SHARD)).collect();
        let fail = |input: &mut Scan<'_>, _: &mut Rows| input.bytes(40, 4).map(drop);
        let error = Index::open_or_build(&files, &settings(Cache::Off), fail).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Truncated);
        assert!(error.to_string().contains("s00 offset=40 len=4"), "{error}");
        let gone = [files[0].clone(), dir.0.join("gone"), dir.0.clone()];
        assert_eq!(Index::open_or_build(&gone, &settings(Cache::Off), scan).err().unwrap().kind(), ErrorKind::NotFound);
        let folder = [dir.0.clone()];
        assert_eq!(
            Index::open_or_build(&folder, &settings(Cache::Off), scan).err().unwrap().kind(),
            ErrorKind::NotAFile
        );
    }

    #[test]
    fn two_fields_take_24_bytes_a_sample_and_40_at_most() {
        for (unit, stride) in [(512, 24), (1, 40)] {
            let bytes = Arc::<[u8]>::from([0]);
            let index = Index::of_bytes(bytes, &settings(Cache::Off), |_, rows| {
                for row in 0..100_000_u64 {
                    // Up to 5 GB: offsets need 33 bits unless they are counted in blocks.
                    let entry = |offset| Some(Entry { offset, len: 1, crc: 0 });
                    rows.push(&[entry(row * 49_999 / unit * unit), entry((row * 49_999 + 25_000) / unit * unit)]);
                }
                Ok(())
            });
            let index = index.unwrap();
            let bytes = index.heap_bytes();
            assert!((100_000 * stride..100_000 * stride + 1000).contains(&bytes), "{bytes} bytes, unit {unit}");
        }
    }

    proptest! {
        #[test]
        fn entries_come_back_as_they_went_in(
            entries in prop::collection::vec(prop::option::of((0_u64..1 << 60, 0_u64..1 << 60, any::<u32>())), 2..40),
            offset_shift in 0_u32..60,
            len_shift in 0_u32..60,
        ) {
            let entry = |(offset, len, crc): (u64, u64, u32)| Entry {
                offset: offset >> offset_shift, len: len >> len_shift, crc,
            };
            let entries: Vec<Option<Entry>> = entries.into_iter().map(|e| e.map(entry)).collect();
            let entries = &entries[..entries.len() / 2 * 2];
            let mut rows = Rows::new(2);
            entries.chunks(2).for_each(|row| rows.push(row));
            let table = rows.finish(Path::new("x")).unwrap();
            for (index, entry) in entries.iter().enumerate() {
                prop_assert_eq!(table.entry(index / 2, index % 2), *entry);
            }
        }

        #[test]
        fn a_scan_gives_the_shards_bytes_whatever_is_asked_for(
            asks in prop::collection::vec((0_u64..30_000, 0_usize..12_000), 1..30), all in any::<bool>(),
        ) {
            let dir = Dir::new();
            let bytes: Vec<u8> = (0..25_000_u32).map(|k| (k * 7 / 3) as u8).collect();
            let file = File::open(dir.shard("s", &bytes)).unwrap();
            let mut input = Scan::new(Input::File(&file), bytes.len() as u64, all);
            for (offset, len) in asks {
                let right = bytes.get(offset as usize..).and_then(|rest| rest.get(..len));
                prop_assert_eq!(input.bytes(offset, len).ok(), right);
                let crc = input.crc(offset, len as u64).ok();
                prop_assert_eq!(crc, right.map(crc32c::crc32c).or((len == 0).then_some(0)));
            }
        }
    }
}
