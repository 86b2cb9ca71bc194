//! Index of a sharded dataset: the location and CRC32C of every field of every sample.
//!
//! ```text
//! shard ──scanned once, shards in parallel──► table: rows × fields of (offset, length, CRC32C) ──► SHARD.OPTIONS.fdx
//!                                               ▲                                                      │
//!                  sample id ──starts──► (shard, row)  ◄── in memory up to 16 MiB, else read in place ─┘
//! ```
//!
//! A format gives [`Index::open_or_build`] its shards and a function that scans one shard. Here
//! each line is a sample. (In a crate that depends on `feedline`, the paths begin with `feedline`.)
//!
//! ```
//! use feedline_core::dataset::index::{Entry, Index, Settings};
//! use feedline_core::dataset::{Damage, DamageKind, Dataset, Framed, Parts, Sizes};
//! use feedline_core::storage::{self, Sources};
//! use feedline_core::tensor::EncodedField;
//! use feedline_core::Result;
//! use std::sync::Arc;
//!
//! struct Lines { index: Index, schema: Vec<EncodedField> }
//!
//! impl Lines {
//!     fn open(pattern: &str) -> Result<Self> {
//!         let shards = storage::list(pattern, &[".txt"])?.files; // paths or URLs
//!         let index = Index::open_or_build(&shards, &Settings::new("lines 1", 1), |shard, rows| {
//!             let mut start = 0;
//!             let len = shard.len();
//!             for at in 0..len {
//!                 if shard.bytes(at, 1)?[0] == b'\n' {
//!                     rows.push(&[Some(Entry { offset: start, len: at - start, crc: 0 })])?;
//!                     start = at + 1;
//!                 }
//!             }
//!             if start < len {
//!                 let lost = "the last line has no end"; // an error, or listed with `skip_damage`
//!                 rows.damage(Damage::new(DamageKind::Cut, start, len - start, 1, lost));
//!             }
//!             Ok(())
//!         })?;
//!         Ok(Self { index, schema: vec![EncodedField::bytes("line")] })
//!     }
//! }
//!
//! impl Dataset for Lines {
//!     fn schema(&self) -> &[EncodedField] { &self.schema }
//!     fn len(&self) -> u64 { self.index.len() }
//!     fn sources(&self) -> &Arc<Sources> { self.index.sources() }
//!     fn sizes(&self) -> Sizes { self.index.sizes() }
//!     fn framed(&self) -> Option<&dyn Framed> { Some(&self.index) }
//!     fn identity(&self) -> u64 { self.index.places() }
//!     fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
//!         self.index.extents(sample, 1, parts) // 1: a bit set of the fields that need no `open`
//!     }
//! }
//! # let dir = std::env::temp_dir().join(format!("feedline-index-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir).unwrap();
//! # std::fs::write(dir.join("a.txt"), "one\ntwo\n").unwrap();
//! # std::fs::write(dir.join("b.TXT"), "three\n").unwrap();
//! # let folder = dir.to_str().unwrap();
//!
//! let lines = Lines::open(folder)?; // the first time it writes a.txt.….fdx beside a.txt
//! assert_eq!(lines.len(), 3);
//! # assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 4);
//! # assert_eq!(Lines::open(folder)?.index.scanned(), 0);
//! # std::fs::remove_dir_all(&dir).unwrap();
//! # Ok::<(), feedline_core::Error>(())
//! ```
//!
//! A table takes 12 bytes per entry if every part is below 4 GiB and all offsets of the shard fit
//! 32 bits as multiples of a power of two; else 20. An index file of up to 16 MiB is held in
//! memory. A larger one is read in place and takes no memory.
//!
//! Limits: 2^32 - 1 rows and 16 fields per shard. Invariants:
//! - An index file is used if it is complete, was made for the same format and options, and the
//!   shard still has the same length, modification time and first and last 4 KiB. Otherwise the
//!   shard is scanned again, so the lengths in a torn, truncated or forged file are never trusted.
//!   Damage in a file that is read in place is an error of the affected samples; the error says how
//!   to rebuild the file.
//! - One file may hold the indexes of all shards ([`Place::File`]); then a bucket needs no scan,
//!   and many shards take no memory, unless the file is an object itself.
//! - Index files are put in place by a rename. If the folder is not writable, only the cache is
//!   lost, not the dataset: see [`Index::unsaved`].
//! - Everything left out is in the ledger ([`Index::damage`], [`Index::left_out`]), even if the
//!   index comes from a file.
//!
//! Scanning and opening run on threads that end before `open_or_build` returns.

mod file;
mod scan;
mod table;
#[cfg(test)]
mod tests;

#[cfg(feature = "unstable")]
pub use file::fuzz;
pub use scan::Scan;
pub use table::{Entry, FIELDS_MAX, Rows};

use self::file::Version;
use self::table::{Table, TableSpan};
use super::damage::Damage;
use super::digest::Digest;
use super::parallel::parallel_paths;
use super::starts::Starts;
use crate::dataset::{Framed, Parts, Sizes};
use crate::storage::publish::Turn;
use crate::storage::sidefile::Sidefile;
use crate::storage::{Blob, Extent, SourceId, Sources};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught_in};
use feedline_base::metadata::Meta;
use feedline_base::setting::Setting;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Setters for index files and damage that both indexed formats share, and their `open_files`.
#[doc(hidden)]
#[macro_export]
macro_rules! index_setters {
    ($dataset:ident) => {
        /// Keeps index files in this folder instead of beside the shards. A missing folder is
        /// created.
        #[must_use]
        pub fn index_dir(mut self, dir: impl Into<PathBuf>) -> Self {
            self.place = Place::Folder(dir.into());
            self
        }

        /// Keeps the index of all shards in one file. It may be a URL of an object, which is only
        /// read: make the file on a local disk, by opening the same URLs, and upload it. Then a
        /// bucket of any number of shards opens with a few requests.
        ///
        /// `open` fails if the object is missing or damaged. Shards that the file lacks are
        /// scanned.
        #[must_use]
        pub fn index_file(mut self, path: impl Into<PathBuf>) -> Self {
            self.place = Place::File(path.into());
            self
        }

        /// `false` reads and writes no index file: each `open` scans the shards. Default: `true`.
        #[must_use]
        pub fn index(mut self, keep: bool) -> Self {
            self.place.keep(keep);
            self
        }

        /// `true` opens damaged shards with their intact samples, and lists everything left out in
        /// the dataset's `damage`. Default: `false`: `open` fails with the first damage. For
        /// samples that fail when they are read, see `OnBadSample`.
        #[must_use]
        pub fn skip_damage(mut self, skip: bool) -> Self {
            self.skip_damage = skip;
            self
        }

        /// Opens these shards, in this order. Errors: those of [`open`](Self::open).
        pub fn open_files(self, paths: &[impl AsRef<Path>]) -> Result<$dataset> {
            let files: Vec<PathBuf> = paths
                .iter()
                .map(|path| path.as_ref().to_path_buf())
                .collect();
            let name = files
                .first()
                .map_or(String::new(), |path| path.display().to_string());
            self.open_as(&files, name)
        }
    };
}

/// Getters of the index that both indexed formats share.
#[doc(hidden)]
#[macro_export]
macro_rules! index_getters {
    () => {
        /// Damage found, in the order of the shards. Empty unless `skip_damage` is set.
        pub fn damage(&self) -> &[Damage] {
            self.index.damage()
        }

        /// Number of shards that this `open` scanned because they had no valid index file. The
        /// others came from their index files.
        pub fn shards_scanned(&self) -> usize {
            self.index.scanned()
        }

        /// Reason why an index file could not be saved (the first of them), if any. The next `open`
        /// then scans again.
        pub fn index_unsaved(&self) -> Option<&str> {
            self.index.unsaved()
        }
    };
}

pub use {index_getters, index_setters};

/// Location of index files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// Beside the shard.
    #[default]
    Beside,
    /// In this folder, which is created if missing.
    Folder(PathBuf),
    /// In this file, for all shards. It is made from the index files beside the shards, where these
    /// are valid.
    File(PathBuf),
    /// Nowhere: shards are scanned each time.
    Off,
}

impl Place {
    /// Turns index files off or on again; keeps a folder set before.
    #[doc(hidden)]
    pub fn keep(&mut self, keep: bool) {
        match keep {
            false => *self = Self::Off,
            true if *self == Self::Off => *self = Self::Beside,
            true => {}
        }
    }
}

/// Settings that an index is made for: those of [`Settings::new`], with fields set after it
/// (`settings.checksums = true`).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings<'a> {
    /// Format, and version of its scan; a different value makes a different index.
    pub format: &'a str,
    /// All options that change the scan's table, as text.
    pub options: &'a str,
    /// Fields of a row, 1 to [`FIELDS_MAX`].
    pub fields: usize,
    /// Whether entries have CRCs, which [`Index::open`] verifies. The scan should read every byte
    /// then. The bytes at the time of the scan count as right: a scan of a format with checksums of
    /// its own should compare them. Default: `false`.
    pub checksums: bool,
    /// Location of the index files. Default: beside the shards.
    pub place: Place,
    /// Whether damaged shards open with their intact samples; otherwise the first damage is an
    /// error. Default: `false`.
    pub skip_damage: bool,
}

impl<'a> Settings<'a> {
    /// The defaults for a format with this number of fields.
    pub fn new(format: &'a str, fields: usize) -> Self {
        Self {
            format,
            options: "",
            fields,
            checksums: false,
            place: Place::default(),
            skip_damage: false,
        }
    }
}

/// Index of all shards.
pub struct Index {
    sources: Arc<Sources>,
    tables: Vec<Table>,
    starts: Starts,
    fields: usize,
    /// Whether entries have CRCs.
    #[doc(hidden)]
    pub checksums: bool,
    damage: Vec<Damage>,
    left_out: BTreeMap<String, u64>,
    scanned: usize,
    /// Whether index files are read and written.
    has_files: bool,
    /// Whether index files are kept beside the shards.
    is_beside: bool,
    unsaved: Option<String>,
}

impl Index {
    /// Opens the index of `files` from its index files. A shard without a valid index file is read
    /// by `scan`, which gets the shard's bytes and fills its table. `scan` runs for several shards
    /// at once. It reports damage with [`Rows::damage`]. An error that it returns does not count as
    /// damage: it fails the opening.
    ///
    /// Errors: file system errors; the first damage unless it is skipped; [`ErrorKind::Config`] for
    /// too many fields.
    pub fn open_or_build(
        files: &[PathBuf],
        settings: &Settings<'_>,
        scan: impl Fn(&mut Scan<'_>, &mut Rows) -> Result<()> + Sync,
    ) -> Result<Self> {
        if !(1..=FIELDS_MAX).contains(&settings.fields) {
            let message = format!(
                "{} fields in an index, 1 to {FIELDS_MAX} are possible",
                settings.fields
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        let pack = match &settings.place {
            Place::File(path) => file::open_all(path)?,
            _ => None,
        };
        let mut shards = parallel_paths(files, |_, path| {
            let opened = caught_in("the scan of a shard", Stage::Index, || {
                open_shard(path, settings, pack.as_ref(), &scan)
            });
            opened.map_err(|error| error.in_stage(Stage::Index).with_path(path))
        })?;
        let new = shards
            .iter()
            .position(|shard| shard.from != IndexOrigin::Cache);
        if let (Place::File(target), Some(new)) = (&settings.place, new) {
            let parts = shards.iter().map(|shard| &shard.table);
            let written = file::write_all(target, files.iter().zip(parts));
            let written = written.map_err(|error| {
                shards[new].unsaved = Some(format!("{}: {error}", target.display()))
            });
            // Replaces the tables by those in the new file, which is read in place if it is large.
            if let Some(all) = written.map_or(Ok(None), |()| file::open_all(target))? {
                files.iter().zip(&mut shards).for_each(|(path, shard)| {
                    let table = file::load(
                        &all,
                        path,
                        false,
                        &shard.version,
                        file::purpose(settings),
                        settings.fields,
                    );
                    if let Some(table) = table {
                        shard.table = table;
                    }
                });
            }
        }
        let mut sources = Sources::new();
        for (path, shard) in files.iter().zip(&shards) {
            sources.add(path, &shard.meta)?;
        }
        Self::of_shards(sources, shards, settings, settings.place != Place::Off)
    }

    /// Index of a shard in memory; never cached.
    #[doc(hidden)]
    pub fn of_bytes(
        bytes: Arc<[u8]>,
        settings: &Settings<'_>,
        scan: impl Fn(&mut Scan<'_>, &mut Rows) -> Result<()>,
    ) -> Result<Self> {
        let blob = Blob::memory(bytes::Bytes::from_owner(bytes.clone()));
        let mut input = Scan::new(&blob, settings.checksums);
        let mut rows = Rows::new(settings.fields, input.len());
        scan(&mut input, &mut rows)?;
        let table = rows.finish(Path::new("<memory>"), |_| {})?;
        let meta = blob.look()?;
        let version = Version::of(&blob)?;
        let shard = Shard {
            meta,
            version,
            table,
            from: IndexOrigin::Scan,
            unsaved: None,
        };
        let mut sources = Sources::new();
        sources.memory(bytes);
        Self::of_shards(sources, vec![shard], settings, false)
    }

    fn of_shards(
        sources: Sources,
        shards: Vec<Shard>,
        settings: &Settings<'_>,
        has_files: bool,
    ) -> Result<Self> {
        // Nothing is written into a store.
        let is_beside =
            settings.place == Place::Beside && sources.ids().any(|id| !sources.is_remote(id));
        let mut index = Self {
            sources: Arc::new(sources),
            tables: Vec::with_capacity(shards.len()),
            starts: Starts::of(shards.iter().map(|shard| u64::from(shard.table.rows())))?,
            fields: settings.fields,
            checksums: settings.checksums,
            damage: Vec::new(),
            left_out: BTreeMap::new(),
            scanned: 0,
            has_files,
            is_beside,
            unsaved: None,
        };
        for mut shard in shards {
            index.damage.append(&mut shard.table.notes.damage);
            for (reason, count) in std::mem::take(&mut shard.table.notes.left_out) {
                let sum = index.left_out.entry(reason).or_default();
                *sum = sum.saturating_add(count);
            }
            index.scanned += usize::from(shard.from == IndexOrigin::Scan);
            index.unsaved = index.unsaved.or(shard.unsaved);
            index.tables.push(shard.table);
        }
        match index.damage.first() {
            Some(first) if !settings.skip_damage => Err(first.refused(index.damage.len() - 1)),
            _ => Ok(index),
        }
    }

    /// The shards.
    pub fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    /// Errors: [`ErrorKind::Empty`] for an index without samples; `what` is the message.
    #[doc(hidden)]
    pub fn not_empty(&self, what: &str, name: &str) -> Result<()> {
        if self.len() > 0 {
            return Ok(());
        }
        let damage = self
            .damage
            .first()
            .map(|first| format!("; damage: {first}"))
            .unwrap_or_default();
        Err(Error::new(ErrorKind::Empty, Stage::Index, format!("{what}{damage}")).with_path(name))
    }

    /// Number of samples.
    #[allow(clippy::len_without_is_empty, reason = "as of a dataset")]
    pub fn len(&self) -> u64 {
        self.starts.len()
    }

    /// Damage, in the order of the shards.
    pub fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// Number of items left out by rule, for each reason.
    pub fn left_out(&self) -> &BTreeMap<String, u64> {
        &self.left_out
    }

    /// Number of shards scanned because they had no valid index file.
    pub fn scanned(&self) -> usize {
        self.scanned
    }

    /// Reason why an index could not be saved, for the first such shard.
    pub fn unsaved(&self) -> Option<&str> {
        self.unsaved.as_deref()
    }

    /// Describes what was done to open the index, for the dataset's name in the report. Empty if
    /// everything came from index files.
    #[doc(hidden)]
    pub fn made(&self) -> String {
        let other =
            |words: &str| Setting::IndexFile.hint(|setting| format!("set {setting} to {words}"));
        let unsaved = |why| format!("; index not saved: {why}; {}", other("a writable file"));
        let unsaved = self.unsaved().map_or(String::new(), unsaved);
        // The user did not ask for these files, and they are in a data folder.
        let beside = match self.is_beside && self.unsaved.is_none() {
            true => format!(
                ", kept beside the shards as .fdx files; {}",
                other("keep them in one file elsewhere")
            ),
            false => String::new(),
        };
        match self.scanned {
            _ if !self.has_files => String::new(),
            0 => unsaved,
            scanned => format!(
                "; indexes made now: {scanned} (missing, damaged or older){beside}{unsaved}"
            ),
        }
    }

    /// Sizes of a dataset that has exactly the samples of the index.
    pub fn sizes(&self) -> Sizes {
        let mut heap = self.tables.capacity() * size_of::<Table>() + self.starts.heap();
        for (number, table) in self.tables.iter().enumerate() {
            // Tables from the same file are consecutive.
            if !number
                .checked_sub(1)
                .is_some_and(|before| Arc::ptr_eq(&self.tables[before].side, &table.side))
            {
                heap += table.side.heap();
            }
        }
        let filled = (0..self.tables.len())
            .rev()
            .filter(|shard| self.tables[*shard].rows() > 0);
        let largest = filled.max_by_key(|shard| self.tables[*shard].record.bytes_max);
        Sizes {
            largest_sample: largest
                .map(|shard| self.starts.all()[shard] + self.tables[shard].record.largest),
            index_bytes: heap,
            ..Sizes::new(
                self.tables
                    .iter()
                    .map(|table| table.record.bytes_max)
                    .max()
                    .unwrap_or(0),
            )
        }
    }

    /// Calls `walk` with the bytes of shard number `shard`, read for a scan of headers.
    ///
    /// Errors: those of `walk`, with the path; file system errors.
    #[doc(hidden)]
    pub fn walk_headers<T>(
        &self,
        shard: usize,
        walk: impl FnOnce(&mut Scan<'_>) -> Result<T>,
    ) -> Result<T> {
        let source = SourceId::at(shard);
        let blob = Blob::of_source(&self.sources, source)?;
        walk(&mut Scan::new(&blob, false))
            .map_err(|error| error.with_path(self.sources.path(source)))
    }

    /// Ids of the samples of shard number `shard`.
    #[doc(hidden)]
    pub fn ids_of(&self, shard: usize) -> std::ops::Range<u64> {
        self.starts.all()[shard]..self.starts.all()[shard + 1]
    }

    /// Number of a sample's shard, and of its row in that shard. `sample` must be below `len`.
    pub fn locate(&self, sample: u64) -> (usize, usize) {
        let (shard, row) = self.starts.locate(sample);
        (shard, row as usize)
    }

    /// Location of field `field` of a sample; `None` if the sample lacks it. Errors: reading errors
    /// of an index file that is read in place.
    pub fn entry(&self, sample: u64, field: usize) -> Result<Option<(SourceId, Entry)>> {
        let (shard, row) = self.locate(sample);
        Ok(self.tables[shard]
            .entry(row, field)?
            .map(|entry| (SourceId::at(shard), entry)))
    }

    /// Writes the entries of a sample's fields to the front of `row`, which the index reads at once.
    /// Errors: those of [`entry`](Self::entry).
    #[doc(hidden)]
    pub fn row(&self, sample: u64, row: &mut [Option<Entry>; FIELDS_MAX]) -> Result<SourceId> {
        let (shard, number) = self.locate(sample);
        let mut room = [0; _];
        let entries = self.tables[shard].row(number, &mut room)?;
        for (field, entry) in row.iter_mut().enumerate().take(self.fields) {
            *entry = entries.entry(field);
        }
        Ok(SourceId::at(shard))
    }

    /// Adds the parts of a sample to `parts`. Fields close together share an extent, which is read
    /// once. A field that the sample lacks has no bytes. Without checksums, fields in `plain` (a
    /// bit set) with an extent of their own may be read in place. Errors: those of
    /// [`entry`](Self::entry).
    pub fn extents<'a>(&'a self, sample: u64, plain: u32, parts: &mut Parts<'a>) -> Result<()> {
        let (shard, row) = self.locate(sample);
        let mut room = [0; _];
        let source = SourceId::at(shard);
        let row = self.tables[shard].row(row, &mut room)?;
        let span = row.span();
        for field in 0..self.fields {
            let Some(entry) = row.entry(field) else {
                continue;
            };
            match span {
                TableSpan::Shared { offset, len } => parts.framed(
                    field,
                    Extent {
                        source,
                        offset,
                        len,
                    },
                ),
                TableSpan::Apart(_) => {
                    let extent = Extent {
                        source,
                        offset: entry.offset,
                        len: entry.len,
                    };
                    if !self.checksums && plain & (1 << field) != 0 {
                        parts.extent(field, extent);
                    } else {
                        parts.framed(field, extent);
                    }
                }
            }
        }
        // Missing fields come last, since parts that share an extent must be consecutive.
        (0..self.fields)
            .filter(|field| row.entry(*field).is_none())
            .for_each(|field| parts.inline(field, &[]));
        Ok(())
    }

    /// Hash of the locations of all entries. The index files contain it, so no entry is read.
    pub fn places(&self) -> u64 {
        let places: Vec<u64> = self
            .tables
            .iter()
            .map(|table| table.record.places)
            .collect();
        Digest::new("tables").words(&places).end()
    }

    /// Cuts a field's bytes out of its extent from [`extents`](Self::extents) and verifies their
    /// CRC. A dataset with extents of its own may call it too, with exactly the bytes of the entry,
    /// for instance in [`check`](Framed::check).
    ///
    /// Errors: [`ErrorKind::Decode`] with both CRCs, [`ErrorKind::Truncated`]; both with path,
    /// offset and sample.
    pub fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8]) -> Result<&'a [u8]> {
        let (shard, row) = self.locate(sample);
        let mut room = [0; _];
        let row = self.tables[shard].row(row, &mut room)?;
        let (Some(entry), span) = (row.entry(field), row.span()) else {
            return Ok(&[]);
        };
        let site = |error: Error| {
            error
                .with_path(self.sources.path(SourceId::at(shard)))
                .with_range(entry.offset, entry.len)
                .with_sample(sample)
        };
        let start = match span {
            TableSpan::Shared { offset, .. } if bytes.len() as u64 != entry.len => {
                entry.offset - offset
            }
            _ => 0,
        };
        let range = usize::try_from(start)
            .ok()
            .zip(usize::try_from(entry.len).ok());
        let own = range
            .and_then(|(start, len)| bytes.get(start..)?.get(..len))
            .ok_or_else(|| {
                let message = format!(
                    "{} bytes from byte {start} expected, {} read",
                    entry.len,
                    bytes.len()
                );
                site(Error::new(ErrorKind::Truncated, Stage::Decode, message))
            })?;
        if self.checksums {
            let found = crc32c::crc32c(own);
            if found != entry.crc {
                let message = format!(
                    "CRC32C {:08x} in the index, {found:08x} in the shard",
                    entry.crc
                );
                return Err(site(Error::new(ErrorKind::Decode, Stage::Decode, message)));
            }
        }
        Ok(own)
    }
}

/// For datasets whose fields are the entries, unchanged.
impl Framed for Index {
    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        _: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        Self::open(self, sample, field, bytes)
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        Ok(Some(
            self.entry(sample, field)?.map_or(0, |(_, entry)| entry.len),
        ))
    }
}

/// An opened shard.
struct Shard {
    meta: Meta,
    version: Version,
    table: Table,
    from: IndexOrigin,
    /// Why the index could not be saved.
    unsaved: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum IndexOrigin {
    Cache,
    /// From the index file beside the shard, because the file for all shards lacks this shard.
    Beside,
    Scan,
}

fn open_shard(
    path: &Path,
    settings: &Settings<'_>,
    all: Option<&Arc<Sidefile>>,
    scan: impl Fn(&mut Scan<'_>, &mut Rows) -> Result<()>,
) -> Result<Shard> {
    let shard = Blob::open(path)?;
    let meta = shard.look()?;
    let version = Version::of(&shard)?;
    let purpose = file::purpose(settings);
    let place = file::place(path, settings, purpose);
    let alone = |place: &Path| {
        file::load(
            &file::open(place)?,
            path,
            true,
            &version,
            purpose,
            settings.fields,
        )
    };
    let found = match &settings.place {
        Place::File(_) => {
            let among = all
                .and_then(|all| file::load(all, path, false, &version, purpose, settings.fields));
            among.map(|table| (table, IndexOrigin::Cache)).or_else(|| {
                alone(&file::beside(path, purpose)?).map(|table| (table, IndexOrigin::Beside))
            })
        }
        _ => place
            .as_deref()
            .and_then(alone)
            .map(|table| (table, IndexOrigin::Cache)),
    };
    if let Some((table, from)) = found {
        return Ok(Shard {
            meta,
            version,
            table,
            from,
            unsaved: None,
        });
    }
    let turn = place
        .as_deref()
        .filter(|_| shard.is_object())
        .map(Turn::wait);
    if turn.is_some()
        && let Some(table) = place.as_deref().and_then(alone)
    {
        return Ok(Shard {
            meta,
            version,
            table,
            from: IndexOrigin::Cache,
            unsaved: None,
        });
    }
    let mut input = Scan::new(&shard, settings.checksums);
    let mut rows = Rows::new(settings.fields, input.len());
    scan(&mut input, &mut rows)?;
    if Version::of(&shard)? != version {
        return Err(Error::new(
            ErrorKind::Changed,
            Stage::Index,
            "the shard was written to while it was indexed",
        ));
    }
    let mut table = rows.finish(path, |record| file::seal(record, &version, purpose))?;
    let unsaved = place.and_then(|place| match file::write(&place, &table) {
        Ok(()) => {
            // Replaces the table by the one in the new file, which is read in place if it is large.
            if let Some(kept) = alone(&place) {
                table = kept;
            }
            None
        }
        Err(failed) => Some(format!("{}: {failed}", place.display())),
    });
    Ok(Shard {
        meta,
        version,
        table,
        from: IndexOrigin::Scan,
        unsaved,
    })
}
