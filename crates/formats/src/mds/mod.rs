//! MDS: the shards of MosaicML Streaming, read-only.
//!
//! ```text
//! index.json ──► shards: names, lengths, samples, columns
//! shard    | u32 samples | u32 offset of each sample and of the end | columns as JSON | samples |
//!                                                                                        └─ one extent, cut per column
//! shard.zstd ── a chunk ──► decompressed in memory, then the same
//! ```
//!
//! Opening reads `index.json` and the offsets of every raw shard (4 bytes per sample in memory). If
//! any shard must be decompressed, all shards are treated as chunks, which are read whole, one
//! window of the order at a time.
//!
//! Limits: shards under 4 GiB (the format's limit); `zstd`, with the feature of that name, is the
//! only compression; no pickles. Invariants: `index.json`, file lengths, offsets, each shard's
//! columns and the sizes of every sample agree, else opening fails; decompression stops at the
//! length in the index.
//!
//! The format cannot detect a flipped byte of a value. Raw shards have no checksums, Streaming's
//! zstd frames have none, and this reader does not verify the optional hashes of `index.json`.

mod columns;
mod index;

use self::columns::{Chosen, Column, Columns, Value};
use self::index::{FileInfo, INDEX_MAX, ShardInfo};
use crate::{fetched, little_endian};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{Meta, Stamp};
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::starts::Starts;
use feedline_core::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Framed, Parts, Sizes};
use feedline_core::decode::Scratch;
use feedline_core::storage::{Blob, Extent, SourceId, Sources};
use feedline_core::tensor::{EncodedField, Field, Spec};
use std::ffi::OsStr;
#[cfg(feature = "zstd")]
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Maximum bytes of a shard's own column description (JSON).
const CONFIG_MAX: u64 = 1 << 20;
/// Maximum bytes of a block in a zstd frame.
const ZSTD_BLOCK: u64 = 128 << 10;
/// Maximum bytes of a zstd frame header.
const FRAME_HEADER_MAX: u64 = 18;
/// Heap for opening a chunk: zstd's context and the columns as JSON.
const SCRATCH: u64 = 1 << 20;

/// Dataset of MosaicML Streaming's shards, in the order of `index.json`.
///
/// Each column is a field, in the order of the index (Streaming sorts by name) or of
/// [`MdsBuilder::columns`]:
///
/// | encoding | field |
/// |---|---|
/// | `int`, `int8` … `uint64`, `float16` … `float64` | a scalar (`int` is `i64`) |
/// | `ndarray:uint8:3,4` | an array of that dtype and shape |
/// | `jpeg`, `png` | a picture |
/// | `str_int`, `str_float` | an `i64` or `f64` scalar, parsed from text |
/// | `ndarray:uint8` | an array of up to [`MdsBuilder::up_to`] elements, or as in [`MdsBuilder::raw`]; otherwise refused |
/// | `ndarray` | as in [`MdsBuilder::raw`]; otherwise refused |
/// | `bytes`, `str`, `json`, `str_decimal`, `pil`, lists | bytes as stored, or as in [`MdsBuilder::raw`] |
/// | `pkl` | refused |
///
/// ```no_run
/// # use feedline_core::tensor::{DType, Field}; use feedline_formats::Mds;
/// let tokens = Mds::builder().raw(Field::fixed("tokens", DType::I64, [2048])).open("c4/train")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Mds {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    columns: Columns,
    chosen: Vec<Chosen>,
    /// One shard per source.
    shards: Vec<Shard>,
    starts: Starts,
    /// Byte offsets of every sample and of the end, one shard after the other; empty if the shards
    /// are chunks.
    offsets: Vec<u32>,
    chunks: bool,
    sizes: Sizes,
    /// Bytes of the largest sample if shards are chunks, computed on first use.
    longest: OnceLock<u64>,
    name: String,
}

struct Shard {
    samples: u32,
    /// Decompressed length of the shard.
    bytes: u32,
    compressed: bool,
}

/// Builder of [`Mds`]: selects columns and gives their dtypes. Made by [`Mds::builder`].
#[derive(Clone, Debug, Default)]
pub struct MdsBuilder {
    columns: Option<Vec<String>>,
    raw: Vec<Field>,
    up_to: Vec<(String, usize)>,
    follow_links: bool,
}

impl Mds {
    /// Opens the folder that holds `index.json`, with all columns.
    ///
    /// Errors: as [`MdsBuilder::open`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(dir)
    }

    /// Starts a builder.
    pub fn builder() -> MdsBuilder {
        MdsBuilder::default()
    }
}

impl MdsBuilder {
    /// Takes only these columns, in this order.
    #[must_use]
    pub fn columns<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.columns = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Reads the column with the name of `field` as arrays of its dtype and shape. The column holds
    /// either `bytes` in memory layout (little-endian), or `ndarray`, whose stored dtype and shape
    /// are compared with `field` and removed.
    #[must_use]
    pub fn raw(mut self, field: Field) -> Self {
        self.raw.push(field);
        self
    }

    /// Sets the maximum length of the arrays in a column `ndarray:DTYPE`, which store their length.
    /// `"*"` applies to all such columns without a maximum of their own.
    #[must_use]
    pub fn up_to(mut self, column: &str, max: usize) -> Self {
        self.up_to.push((column.into(), max));
        self
    }

    /// Whether a shard may be a symbolic link out of the folder, as in the caches of download
    /// tools. Default: `false`. Shard names come from `index.json`; opening fails if one is outside
    /// the folder.
    #[must_use]
    pub fn follow_links(mut self, follow: bool) -> Self {
        self.follow_links = follow;
        self
    }

    /// Opens the folder with `index.json` and the shards. If the folder holds a shard both
    /// compressed and decompressed, the decompressed file is read.
    ///
    /// Errors: [`ErrorKind::NotFound`] for `index.json` or a shard; [`ErrorKind::NotAFile`] for a
    /// shard that is a link out of the folder; [`ErrorKind::Decode`] for a damaged index or shard
    /// header; [`ErrorKind::Truncated`] or [`ErrorKind::Changed`] for a shard shorter or longer
    /// than in the index; [`ErrorKind::Config`] for missing or unsupported columns, and for
    /// compression that is not built in.
    pub fn open(self, dir: impl AsRef<Path>) -> Result<Mds> {
        let dir = dir.as_ref();
        let path = dir.join("index.json");
        let input = Blob::open(&path)?;
        let len = input.len();
        fetched(&input)?;
        if len > INDEX_MAX {
            let message = format!("the index has {len} bytes, the limit is {INDEX_MAX}");
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message).with_path(path));
        }
        let text = input.read(0, len, "the index")?;
        let home = ShardHome::Folder {
            dir,
            follow: self.follow_links,
        };
        self.assemble(&text, &home).map_err(|error| {
            input.forget();
            error.with_path(path)
        })
    }

    /// Opens an index and one shard in memory.
    #[cfg(feature = "unstable")]
    pub fn of_bytes(self, index: &[u8], shard: &Arc<[u8]>) -> Result<Mds> {
        self.assemble(index, &ShardHome::Memory(shard))
    }

    fn assemble(self, text: &[u8], home: &ShardHome<'_>) -> Result<Mds> {
        little_endian("MDS")?;
        let (all, infos) = index::parse(text)?;
        let chosen = self.choose(&all)?;
        let columns = Columns::new(all);
        // Finds each shard's file first: one compressed shard makes all shards chunks.
        let files = parallel(&infos, |number, info| {
            home.find(info)
                .map_err(|error| error.within(format_args!("shard {number}")))
        })?;
        let chunks = files.iter().any(|file| file.compressed);
        let offsets = match chunks {
            true => Vec::new(),
            false => parallel(&infos, |_, info| {
                offsets_of(
                    info.samples,
                    info.raw.bytes as u32,
                    &columns,
                    |offset, len| home.read(&info.raw.name, offset, len),
                )
                .map_err(|error| error.with_path(home.path(&info.raw.name)))
            })?,
        };
        let sources = home.sources(&files)?;
        let starts = Starts::of(infos.iter().map(|info| u64::from(info.samples)))?;
        let mut mds = Mds {
            sources: Arc::new(sources),
            schema: chosen.iter().map(|chosen| chosen.field.clone()).collect(),
            columns,
            chosen,
            shards: infos
                .iter()
                .zip(&files)
                .map(|(info, file)| Shard {
                    samples: info.samples,
                    bytes: info.raw.bytes as u32,
                    compressed: file.compressed,
                })
                .collect(),
            starts,
            offsets: offsets.concat(),
            chunks,
            sizes: Sizes::default(),
            longest: OnceLock::new(),
            name: home.name(),
        };
        mds.measure();
        Ok(mds)
    }

    fn choose(&self, all: &[Column]) -> Result<Vec<Chosen>> {
        let bad = |message: String| Error::new(ErrorKind::Config, Stage::Index, message);
        let there = || {
            let names: Vec<&str> = all
                .iter()
                .take(Spec::FIELDS_MAX)
                .map(|column| &*column.name)
                .collect();
            names.join(", ")
        };
        let at = |name: &str| {
            let found = all.iter().position(|column| column.name == name);
            found.ok_or_else(|| bad(format!("no column `{name}`; there are {}", there())))
        };
        let wanted: Vec<usize> = match &self.columns {
            None => (0..all.len()).collect(),
            Some(names) => names.iter().map(|name| at(name)).collect::<Result<_>>()?,
        };
        for (index, column) in wanted.iter().enumerate() {
            if wanted[..index].contains(column) {
                return Err(bad(format!(
                    "column `{}` is selected twice",
                    all[*column].name
                )));
            }
        }
        if wanted.is_empty() || wanted.len() > Spec::FIELDS_MAX {
            return Err(bad(format!(
                "{} columns, 1 to {} are possible",
                wanted.len(),
                Spec::FIELDS_MAX
            )));
        }
        for field in &self.raw {
            if !wanted.contains(&at(field.name())?) {
                return Err(bad(format!(
                    "column `{}` is not one of the selected columns",
                    field.name()
                )));
            }
        }
        let up_to = |column: &Column| {
            let named = |name: &str| {
                self.up_to
                    .iter()
                    .rfind(|(of, _)| of == name)
                    .map(|(_, max)| *max)
            };
            named(&column.name).or_else(|| named("*"))
        };
        wanted
            .into_iter()
            .map(|index| {
                Chosen::new(
                    index,
                    &all[index],
                    self.raw
                        .iter()
                        .rfind(|field| field.name() == all[index].name),
                    up_to(&all[index]),
                )
            })
            .collect()
    }
}

/// Where the dataset's files are.
enum ShardHome<'a> {
    Folder {
        dir: &'a Path,
        follow: bool,
    },
    /// One shard in memory, for fuzz targets.
    #[cfg_attr(
        not(feature = "unstable"),
        allow(dead_code, reason = "for fuzz targets")
    )]
    Memory(&'a Arc<[u8]>),
}

/// The file found for a shard.
struct ShardFile {
    info: FileInfo,
    stamp: Option<Stamp>,
    compressed: bool,
}

impl ShardHome<'_> {
    fn path(&self, name: &str) -> std::path::PathBuf {
        match self {
            Self::Folder { dir, .. } => dir.join(name),
            Self::Memory(_) => name.into(),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Folder { dir, .. } => dir.display().to_string(),
            Self::Memory(_) => "<memory>".to_string(),
        }
    }

    fn open(&self, name: &str) -> Result<Blob> {
        match self {
            Self::Memory(bytes) => Ok(Blob::memory(Bytes::from_owner((*bytes).clone()))),
            Self::Folder { dir, follow: true } => Blob::open(dir.join(name)),
            Self::Folder { dir, follow: false } => Blob::open_beneath(dir, name),
        }
    }

    /// Length and version of a file, if it exists.
    fn look(&self, name: &str) -> Result<Option<Meta>> {
        match self.open(name) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened?.look().map(Some),
        }
    }

    /// Finds the file of a shard. Its version is taken before any of its bytes are read.
    fn find(&self, shard: &ShardInfo) -> Result<ShardFile> {
        let zip = match (&shard.zip, self) {
            (None, _) => None,
            (Some(_), Self::Folder { .. }) if self.look(&shard.raw.name)?.is_some() => None,
            (Some((file, compression)), _) => {
                supported(compression).map_err(|error| error.with_path(self.path(&file.name)))?;
                Some(file)
            }
        };
        let file = zip.unwrap_or(&shard.raw);
        let wrong = |kind, message: String| {
            Err(Error::new(kind, Stage::Index, message).with_path(self.path(&file.name)))
        };
        let expected = file.bytes;
        let Some(meta) = self.look(&file.name)? else {
            return wrong(
                ErrorKind::NotFound,
                "a shard that the index lists".to_string(),
            );
        };
        match meta.len {
            len if len < expected => wrong(
                ErrorKind::Truncated,
                format!("{len} bytes, the index says {expected}"),
            ),
            len if len > expected => wrong(
                ErrorKind::Changed,
                format!("{len} bytes, the index says {expected}"),
            ),
            _ => {
                if zip.is_some() {
                    let head = self.read(&file.name, 0, expected.min(FRAME_HEADER_MAX) as usize)?;
                    frame_fits(&head, shard.raw.bytes)
                        .map_err(|error| error.with_path(self.path(&file.name)))?;
                }
                Ok(ShardFile {
                    info: file.clone(),
                    stamp: meta.stamp,
                    compressed: zip.is_some(),
                })
            }
        }
    }

    /// Reads bytes of a file whose length was checked.
    fn read(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.open(name)?.read(offset, len as u64, "the shard")
    }

    /// Makes the list of sources: one file per shard.
    fn sources(&self, files: &[ShardFile]) -> Result<Sources> {
        let mut sources = Sources::new();
        let dir = match self {
            Self::Folder { dir, follow: false } => sources.root(*dir),
            Self::Folder { dir, follow: true } => sources.dir(*dir),
            Self::Memory(bytes) => {
                for _ in files {
                    sources.memory((*bytes).clone());
                }
                return Ok(sources);
            }
        };
        for ShardFile { info, stamp, .. } in files {
            sources.found_in(dir, OsStr::new(&info.name), info.bytes, *stamp)?;
        }
        Ok(sources)
    }
}

fn supported(compression: &str) -> Result<()> {
    let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
    if compression.split(':').next() != Some("zstd") {
        return bad(format!(
            "compressed by `{compression}`; zstd is read, other shards must be decompressed first"
        ));
    }
    if cfg!(not(feature = "zstd")) {
        return bad("compressed by zstd: build feedline with the feature `zstd`".to_string());
    }
    Ok(())
}

/// Reads the offsets of a shard's samples and of its end, and checks them against the shard's
/// length. `read` is called only within that length.
fn offsets_of(
    samples: u32,
    bytes: u32,
    columns: &Columns,
    read: impl Fn(u64, usize) -> Result<Vec<u8>>,
) -> Result<Vec<u32>> {
    let wrong = |message: String| Error::new(ErrorKind::Decode, Stage::Index, message);
    // The count, one offset per sample, and the offset of the end.
    let table = 4 * (u64::from(samples) + 2);
    if table > u64::from(bytes) {
        let message = format!("{bytes} bytes are too few for the offsets of {samples} samples");
        return Err(Error::new(ErrorKind::Truncated, Stage::Index, message));
    }
    let words = read(0, table as usize)?;
    let mut words = words
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes")));
    let count = words.next().unwrap_or_default();
    if count != samples {
        return Err(wrong(format!("{count} samples, the index says {samples}")).with_range(0, 4));
    }
    let offsets: Vec<u32> = words.collect();
    let first = offsets[0];
    let end = offsets[offsets.len() - 1];
    if u64::from(first) < table
        || u64::from(first) > table + CONFIG_MAX
        || first > bytes
        || end != bytes
    {
        return Err(wrong(format!(
            "samples cannot lie at bytes {first} to {end} of {bytes}"
        ))
        .with_range(4, table - 4));
    }
    for (index, pair) in offsets.windows(2).enumerate() {
        let fits = pair[1]
            .checked_sub(pair[0])
            .is_some_and(|bytes| columns.may_have(u64::from(bytes)));
        if !fits {
            let message = format!(
                "sample {index} of the shard cannot lie at bytes {} to {}",
                pair[0], pair[1]
            );
            return Err(wrong(message).with_range(4 + 4 * index as u64, 8));
        }
    }
    let len = u64::from(first) - table;
    // Other writers may omit the description.
    if len > 0 {
        let config = read(table, len as usize)?;
        let own = serde_json::from_slice(&config).map_err(|error| error.to_string());
        let same =
            own.and_then(|own| index::columns_of(&own))
                .and_then(|own| match own == columns.all {
                    true => Ok(()),
                    false => Err("its columns differ from the index".to_string()),
                });
        same.map_err(|message| {
            wrong(format!("the shard's own description: {message}")).with_range(table, len)
        })?;
    }
    Ok(offsets)
}

impl Mds {
    /// Finds the largest sample, or the largest chunk if shards are chunks.
    fn measure(&mut self) {
        let mut most = 0;
        let mut largest = None;
        if self.chunks {
            most = self
                .sources
                .ids()
                .map(|id| self.sources.len_of(id))
                .max()
                .unwrap_or(0);
        } else {
            for sample in 0..self.len() {
                let len = self.extent(sample).len;
                if len > most {
                    most = len;
                    largest = Some(sample);
                }
            }
        }
        let shards = self.shards.capacity() * size_of::<Shard>();
        self.sizes = Sizes {
            sample_bytes_max: most,
            opened_bytes_max: if self.chosen.iter().any(Chosen::makes) {
                8
            } else {
                0
            },
            largest_sample: largest,
            appended_max: 0,
            index_bytes: self.offsets.capacity() * 4 + self.starts.heap() + shards,
        };
    }

    /// Bytes of a shard's largest sample, computed from the offsets. A compressed shard is read and
    /// decompressed only up to the end of the offsets.
    fn largest_in(&self, number: usize) -> Result<u64> {
        let Shard {
            samples,
            bytes,
            compressed,
        } = self.shards[number];
        let source = SourceId::at(number);
        let table = 4 * (u64::from(samples) + 2);
        if table > u64::from(bytes) {
            let message = format!("{bytes} bytes are too few for the offsets of {samples} samples");
            let error = Error::new(ErrorKind::Truncated, Stage::Index, message);
            return Err(error.with_path(self.sources.path(source)));
        }
        let blob = Blob::of_source(&self.sources, source)?;
        let len = self.sources.len_of(source);
        let mut part = if compressed {
            table.next_multiple_of(ZSTD_BLOCK) + ZSTD_BLOCK
        } else {
            table
        };
        let words = loop {
            part = part.min(len);
            let begun = blob.read(0, part, "the shard")?;
            match if compressed {
                beginning(&begun, table as usize)
            } else {
                Some(begun)
            } {
                Some(words) => break words,
                None if part < len => part *= 2,
                // Opening the chunk reports the cause.
                None => return Ok(u64::from(bytes)),
            }
        };
        let offset = |at: usize| {
            u64::from(u32::from_le_bytes(
                words[at..at + 4].try_into().expect("4 bytes"),
            ))
        };
        let sizes = (4..words.len() - 4)
            .step_by(4)
            .map(|at| offset(at + 4).saturating_sub(offset(at)));
        Ok(sizes.max().unwrap_or(0))
    }

    /// Extent of a sample, if shards are not chunks.
    fn extent(&self, sample: u64) -> Extent {
        let (shard, _) = self.starts.locate(sample);
        // Every shard has one more offset than samples.
        let at = sample as usize + shard;
        let start = self.offsets[at];
        let end = self.offsets[at + 1];
        Extent {
            source: SourceId::at(shard),
            offset: u64::from(start),
            len: u64::from(end - start),
        }
    }

    /// Copies the rows of a shard, at `shard` in the buffer, into their fields.
    fn place(
        &self,
        number: usize,
        shard: std::ops::Range<usize>,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let Shard { samples, bytes, .. } = self.shards[number];
        let part = |offset: u64, len: usize| {
            Ok(out.bytes(shard.clone())[offset as usize..][..len].to_vec())
        };
        let offsets = offsets_of(samples, bytes, &self.columns, part)?;
        for (row, pair) in offsets.windows(2).enumerate() {
            let sample = shard.start + pair[0] as usize..shard.start + pair[1] as usize;
            let named = |error: Error| {
                let range = (u64::from(pair[0]), u64::from(pair[1] - pair[0]));
                error
                    .with_range(range.0, range.1)
                    .with_sample(self.starts.all()[number] + row as u64)
            };
            for (field, chosen) in self.chosen.iter().enumerate() {
                let found = self
                    .columns
                    .find(chosen.column, out.bytes(sample.clone()))
                    .map_err(named)?;
                let start = sample.start + found.start;
                match chosen
                    .value(out.bytes(start..start + found.len()))
                    .map_err(named)?
                {
                    Value::Part(part) => out.place(field, start + part.start..start + part.end),
                    Value::Made(number) => out.push(field, &number)?,
                }
            }
        }
        Ok(())
    }

    fn open_shard(
        &self,
        number: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let Shard {
            bytes, compressed, ..
        } = self.shards[number];
        let bytes = bytes as usize;
        let [piece] = pieces else {
            return Err(Error::new(
                ErrorKind::User,
                Stage::Decode,
                format!("a chunk is one piece, the reader returned {}", pieces.len()),
            ));
        };
        let room = out.room(bytes)?;
        let target = out.bytes_mut(room.clone());
        if compressed {
            decompress(piece, target, scratch)?;
        } else if piece.len() == bytes {
            target.copy_from_slice(piece);
        } else {
            let message = format!("{} bytes, the index says {bytes}", piece.len());
            return Err(Error::new(ErrorKind::Truncated, Stage::Decode, message));
        }
        self.place(number, room, out)
    }
}

/// Refuses a frame whose header states more bytes than the index.
#[cfg(feature = "zstd")]
fn frame_fits(head: &[u8], bytes: u64) -> Result<()> {
    match zstd::zstd_safe::get_frame_content_size(head) {
        Ok(Some(content)) if content > bytes => {
            let message = format!("decompresses to {content} bytes, the index says {bytes}");
            Err(Error::new(ErrorKind::Decode, Stage::Index, message))
        }
        Ok(_) => Ok(()),
        Err(_) => Err(Error::new(
            ErrorKind::Decode,
            Stage::Index,
            "not a zstd frame",
        )),
    }
}

#[cfg(not(feature = "zstd"))]
fn frame_fits(_: &[u8], _: u64) -> Result<()> {
    supported("zstd")
}

/// The first `len` decompressed bytes of a frame that starts with `part`; `None` if `part` yields
/// fewer.
#[cfg(feature = "zstd")]
fn beginning(part: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    zstd::stream::read::Decoder::with_buffer(part)
        .ok()?
        .read_exact(&mut bytes)
        .ok()?;
    Some(bytes)
}

#[cfg(not(feature = "zstd"))]
fn beginning(_: &[u8], _: usize) -> Option<Vec<u8>> {
    None
}

/// Fills `target` exactly.
#[cfg(feature = "zstd")]
fn decompress(piece: &[u8], target: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    let expected = target.len();
    let wrong = |error: std::io::Error| {
        let message = format!(
            "zstd cannot decompress {} bytes into {expected}",
            piece.len()
        );
        Error::new(ErrorKind::Decode, Stage::Decode, message).with_source(error)
    };
    let context: &mut Option<zstd::bulk::Decompressor<'static>> = scratch.get();
    if context.is_none() {
        *context = Some(zstd::bulk::Decompressor::new().map_err(wrong)?);
    }
    let context = context.as_mut().expect("made above");
    match context.decompress_to_buffer(piece, target).map_err(wrong)? {
        bytes if bytes == expected => Ok(()),
        bytes => {
            let message = format!("{bytes} bytes decompressed, the index says {expected}");
            Err(Error::new(ErrorKind::Truncated, Stage::Decode, message))
        }
    }
}

#[cfg(not(feature = "zstd"))]
fn decompress(_: &[u8], _: &mut [u8], _: &mut Scratch) -> Result<()> {
    // Opening has refused such a shard already.
    supported("zstd")
}

impl Dataset for Mds {
    own!(schema sources sizes framed);
    forward!(self => self.starts; len);

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        if self.chunks {
            let message = "samples of compressed shards are read in chunks";
            return Err(Error::new(ErrorKind::User, Stage::Read, message));
        }
        let extent = self.extent(sample);
        (0..self.chosen.len()).for_each(|field| parts.framed(field, extent));
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.chunks.then_some(self)
    }

    fn describe(&self) -> String {
        let zstd = self.shards.iter().filter(|shard| shard.compressed).count();
        let how = if zstd > 0 {
            format!(" ({zstd} compressed by zstd)")
        } else {
            String::new()
        };
        format!(
            "{} samples in {} MDS shards{how} of {}",
            self.len(),
            self.shards.len(),
            self.name
        )
    }
}

/// A shard does not name its samples.
impl Framed for Mds {
    fn open<'a>(
        &self,
        _sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let chosen = &self.chosen[field];
        let value = &bytes[self.columns.find(chosen.column, bytes)?];
        match chosen.value(value)? {
            Value::Part(part) => Ok(&value[part]),
            Value::Made(number) => {
                buffer.extend_from_slice(&number);
                Ok(buffer)
            }
        }
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        Ok(if self.chunks {
            None
        } else {
            self.chosen[field].bytes(&self.columns, self.extent(sample).len)
        })
    }

    /// If shards are chunks, a sample may be as large as a shard. The offsets of all shards give
    /// the actual maximum.
    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        let chosen = &self.chosen[field];
        let fixed = self.columns.all[chosen.column].size;
        if let Some(bytes) = if chosen.makes() {
            Some(8)
        } else {
            fixed.map(u64::from)
        } {
            return Ok(Some(bytes));
        }
        if !self.chunks {
            return Ok(Some(self.sizes.sample_bytes_max));
        }
        let largest = match self.longest.get() {
            Some(known) => *known,
            None => {
                let each = parallel(0..self.shards.len(), |_, number| self.largest_in(number))?;
                *self
                    .longest
                    .get_or_init(|| each.into_iter().max().unwrap_or(0))
            }
        };
        Ok(Some(self.columns.most(largest)))
    }
}

impl Chunked for Mds {
    fn starts(&self) -> &[u64] {
        self.starts.all()
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        let source = SourceId::at(chunk);
        extents.push(Extent {
            source,
            offset: 0,
            len: self.sources.len_of(source),
        });
        Ok(())
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        let Shard { samples, bytes, .. } = self.shards[chunk];
        let samples = u64::from(samples);
        let made = 8 * samples * self.chosen.iter().filter(|chosen| chosen.makes()).count() as u64;
        // Memory for the offsets, and for the location of each row of each field.
        let lists = samples * 8;
        let encoded = self.sources.len_of(SourceId::at(chunk));
        ChunkBytes {
            encoded,
            opened: u64::from(bytes) + made,
            scratch: SCRATCH + lists,
        }
    }

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let source = SourceId::at(chunk);
        self.open_shard(chunk, pieces, scratch, out)
            .map_err(|error| {
                error
                    .with_path(self.sources.path(source))
                    .with_range(0, self.sources.len_of(source))
            })
    }

    fn chunk_name(&self, chunk: usize) -> String {
        self.sources.path(SourceId::at(chunk)).display().to_string()
    }
}
