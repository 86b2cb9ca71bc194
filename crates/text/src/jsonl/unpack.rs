//! Compressed files: chunks of lines, each unpacked as a whole.
//!
//! ```text
//! file    [member or frame 0][1][2][3]…
//! lines      a  b  c  d …      ▲ a line may begin in one and end in the next
//! chunk 0 ├──────────────┤       lines that begin in its frames; read with the frame that holds its last byte
//! chunk 1            ├──────┤    `skip`: bytes of its first frame that belong to chunk 0
//! ```
//!
//! Frames are gathered until they hold [`GROUP`] bytes. Opening the dataset unpacks each file once,
//! and measures the values of each line; a line that cannot be read is damage. Opening a chunk does
//! the same once more, so it leaves out the same lines.
//!
//! Memory of an open chunk: its compressed bytes, its values, its longest line and value twice, blocks of
//! [`BLOCK`] and the window of the frames.
//!
//! Limits: 4 GiB unpacked per frame; windows of 128 MiB. Invariants: the checksums of frames are
//! verified when the file is opened first, and those of a chunk with each read; a frame with a
//! wrong one gives no sample.

use super::json;
use super::value::Take;
use super::{EMPTY, LINE_MAX, bom_len, foreign, is_space};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::index::{Entry, Index, Rows, Scan};
use feedline_core::dataset::starts::Starts;
use feedline_core::dataset::{ChunkBuf, ChunkBytes, Damage, DamageKind};
use feedline_core::decode::Scratch;
use feedline_core::storage::{Extent, SourceId};
use flate2::bufread::GzDecoder;
use std::io::{self, BufRead, Cursor, Read};
use std::path::Path;
use zstd::stream::read::Decoder as ZstdDecoder;

/// Entries of a chunk in the index: they hold numbers, see [`Plans::of`].
pub(super) const FIELDS: usize = 4;

/// Unpacked bytes of the frames of a chunk, if they are small.
const GROUP: u64 = if cfg!(test) { 600 } else { 8 << 20 };

/// Unpacked bytes per step, and compressed bytes.
const BLOCK: usize = 256 << 10;
const STEP: u64 = 1 << 20;

/// Maximum unpacked bytes of a frame.
const FRAME_MAX: u64 = 4 << 30;

/// Heap of a decoder, without the window.
const DECODER: u64 = 512 << 10;

/// Whether the name of a file says that it is compressed.
pub(super) fn is_packed(path: &Path) -> bool {
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    ending.is_some_and(|ending| {
        ["gz", "gzip", "zst", "zstd"]
            .iter()
            .any(|one| ending == *one)
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    Plain,
    Gzip,
    Zstd,
}

impl Packing {
    /// By the first bytes.
    pub(super) fn of(front: &[u8]) -> Self {
        match front {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..0x60, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::Plain,
        }
    }
}

/// The chunks of all files.
pub(super) struct Plans {
    pub(super) starts: Starts,
    pub(super) all: Vec<Plan>,
}

/// A chunk.
pub(super) struct Plan {
    pub(super) extent: Extent,
    pub(super) rows: u32,
    /// Unpacked bytes before the first line, and of all lines.
    skip: u64,
    take: u64,
    /// Bytes of all values, and of the longest one.
    opened: u64,
    longest: u64,
    line_max: u64,
    window: u64,
    /// Number of the first line.
    pub(super) line: u64,
}

fn line_damage(kind: DamageKind, at: u64, line: u64, what: &str) -> Damage {
    Damage::new(kind, at, 0, 1, format!("line {line}: {what}"))
}

/// The numbers of a chunk in the index.
fn entry(index: &Index, chunk: u64, field: usize) -> Result<(SourceId, Entry)> {
    index.entry(chunk, field)?.ok_or_else(|| {
        let message = "a chunk without its numbers: delete the index file";
        Error::new(ErrorKind::Decode, Stage::Index, message)
    })
}

impl Plans {
    pub(super) fn of(index: &Index) -> Result<Self> {
        let mut all = Vec::with_capacity(index.len() as usize);
        for number in 0..index.len() {
            let (source, place) = entry(index, number, 0)?;
            let (_, lines) = entry(index, number, 1)?;
            let (_, values) = entry(index, number, 2)?;
            let (_, more) = entry(index, number, 3)?;
            all.push(Plan {
                extent: Extent {
                    source,
                    offset: place.offset,
                    len: place.len,
                },
                rows: place.crc,
                skip: lines.offset,
                take: lines.len,
                opened: values.offset,
                longest: values.len,
                line_max: u64::from(values.crc),
                window: more.offset,
                line: more.len,
            });
        }
        let starts = Starts::of(all.iter().map(|plan| u64::from(plan.rows)))?;
        Ok(Self { starts, all })
    }

    /// The most bytes of a chunk per sample.
    pub(super) fn encoded_max(&self) -> u64 {
        let each = self.all.iter();
        each.map(|plan| plan.opened / u64::from(plan.rows.max(1)))
            .max()
            .unwrap_or(0)
    }

    /// Bytes of the longest value.
    pub(super) fn longest(&self) -> u64 {
        self.all.iter().map(|plan| plan.longest).max().unwrap_or(0)
    }

    pub(super) fn heap(&self) -> usize {
        self.all.capacity() * size_of::<Plan>() + self.starts.heap()
    }
}

/// Memory of a worker for the lines of a chunk.
#[derive(Default)]
struct UnpackScratch {
    lines: Vec<u8>,
    value: Vec<u8>,
}

impl Plan {
    pub(super) fn bytes(&self, fields: usize) -> ChunkBytes {
        let lists = u64::from(self.rows) * (fields * ChunkBuf::LIST_ENTRY) as u64;
        ChunkBytes {
            encoded: self.extent.len,
            opened: self.opened,
            scratch: 2 * (self.line_max + self.longest + 2 * BLOCK as u64)
                + DECODER
                + self.window
                + lists,
        }
    }

    /// Unpacks the chunk and pushes the values of its lines.
    pub(super) fn open(
        &self,
        piece: &[u8],
        takes: &[Take],
        missing: bool,
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let own: &mut UnpackScratch = scratch.get();
        let mut unpacked = Unpacked::new(Cursor::new(piece));
        let mut lines = Splitter::new(std::mem::take(&mut own.lines), self.skip);
        let end = self.skip + self.take;
        let mut rows = 0_usize;
        let mut failed = None;
        let mut number = self.line;
        loop {
            let more = unpacked.read_into(&mut lines)?;
            let all = lines.at.min(end) == end || !more;
            lines.split(end, all, |line| {
                if line.bytes.iter().all(|byte| is_space(*byte)) {
                    number += 1;
                    return Ok(());
                }
                let bom = if self.line == 1 && number == 1 {
                    bom_len(line.bytes)
                } else {
                    0
                };
                let text = &line.bytes[bom..];
                // A line fails as a whole, so it is opened before its first value is pushed.
                let measured = match line.is_long {
                    true => Err(too_long()),
                    false => measure(text, takes, missing, &mut own.value),
                };
                if let Err(error) = measured {
                    failed.get_or_insert_with(|| error.within(format_args!("line {number}")));
                    number += 1;
                    return Ok(());
                }
                if rows == out.rows() {
                    return Err(changed(rows + 1, self.rows));
                }
                for (field, take) in takes.iter().enumerate() {
                    own.value.clear();
                    out.push(field, take.open(text, missing, &mut own.value)?)?;
                }
                rows += 1;
                number += 1;
                Ok(())
            })?;
            if all {
                break;
            }
        }
        // The rest of the frame, for its checksum.
        unpacked.finish(&mut lines)?;
        own.lines = lines.into_memory();
        match rows == out.rows() {
            true => Ok(()),
            false => Err(failed.unwrap_or_else(|| changed(rows, self.rows))),
        }
    }
}

#[cold]
fn too_long() -> Error {
    Error::new(
        ErrorKind::Limit,
        Stage::Decode,
        format!("more than {LINE_MAX} bytes, the limit of a line"),
    )
}

#[cold]
fn changed(found: usize, expected: u32) -> Error {
    let message = format!("{found} lines, the index says {expected}");
    Error::new(ErrorKind::Changed, Stage::Decode, message)
}

/// Bytes of all values of a line, and of the longest.
fn measure(line: &[u8], takes: &[Take], missing: bool, buffer: &mut Vec<u8>) -> Result<(u64, u64)> {
    json::check(line)?;
    let mut sum = 0;
    let mut longest = 0;
    for take in takes {
        buffer.clear();
        let bytes = take.open(line, missing, buffer)?.len() as u64;
        sum += bytes;
        longest = longest.max(bytes);
    }
    Ok((sum, longest))
}

/// Indexes a file: its chunks.
pub(super) fn walk(
    input: &mut Scan<'_>,
    rows: &mut Rows,
    takes: &[Take],
    missing: bool,
) -> Result<()> {
    let shard = input.len();
    let mut unpacked = Unpacked::new(Feed::new(input));
    let mut lines = Splitter::new(Vec::new(), 0);
    let mut plans: Vec<LinePlan> = Vec::new();
    let mut current: Option<LinePlan> = None;
    let mut value = Vec::new();
    let mut number = 0;
    let failure = loop {
        let more = unpacked.read_into(&mut lines);
        let done = !matches!(more, Ok(true));
        let frames = &unpacked.frames;
        let packing = unpacked.packing;
        let cut = more.is_err();
        lines.split(u64::MAX, done && !cut, |line| {
            number += 1;
            if line.bytes.iter().all(|byte| is_space(*byte)) {
                rows.leave_out(EMPTY);
                return Ok(());
            }
            let frame = frames.partition_point(|frame| frame.start <= line.start) - 1;
            let place = &frames[frame];
            let mut text = line.bytes;
            if number == 1 {
                text = &text[bom_len(text)..];
                if let Some(what) = foreign(text) {
                    rows.damage(line_damage(DamageKind::Unsupported, place.at, number, what));
                    return Ok(());
                }
            }
            if line.is_long {
                rows.damage(line_damage(
                    DamageKind::Unsupported,
                    place.at,
                    number,
                    too_long().message(),
                ));
                if let Some(plan) = &mut current {
                    plan.line_max = LINE_MAX as u64;
                }
                return Ok(());
            }
            let (sum, longest) = match measure(text, takes, missing, &mut value) {
                Ok(measured) => measured,
                Err(error) => {
                    let kind = match line.is_last && error.kind() == ErrorKind::Truncated {
                        true => DamageKind::Cut,
                        false => DamageKind::Header,
                    };
                    rows.damage(line_damage(kind, place.at, number, error.message()));
                    return Ok(());
                }
            };
            // Frames are gathered until a line begins behind enough of them.
            let full = current.take_if(|plan| match packing {
                Packing::Plain => line.start - plan.start >= GROUP,
                _ => frame > plan.frame && place.start - frames[plan.frame].start >= GROUP,
            });
            plans.extend(full);
            let plan = current.get_or_insert(LinePlan {
                start: line.start,
                frame,
                line: number,
                ..LinePlan::default()
            });
            plan.end = line.start + line.bytes.len() as u64 + u64::from(!line.is_last);
            plan.rows += 1;
            plan.opened += sum;
            plan.longest = plan.longest.max(longest);
            plan.line_max = plan.line_max.max(line.bytes.len() as u64);
            Ok(())
        })?;
        if done {
            break more.err();
        }
    };
    plans.extend(current);
    let Unpacked {
        frames, packing, ..
    } = unpacked;
    if let Some(error) = failure {
        if error.kind() != ErrorKind::Decode && error.kind() != ErrorKind::Truncated {
            return Err(error);
        }
        let at = frames.last().map_or(0, |frame| frame.at);
        let mut lost = 1;
        let kind = match error.kind() {
            // What comes before the end of a cut file is right as far as it goes.
            ErrorKind::Truncated => DamageKind::Cut,
            _ => {
                let start = frames.last().map_or(0, |frame| frame.start);
                plans.retain(|plan| {
                    let whole = plan.end <= start;
                    lost += if whole { 0 } else { u64::from(plan.rows) };
                    whole
                });
                DamageKind::Checksum
            }
        };
        let message = error.message().to_string();
        rows.damage(Damage::new(kind, at, shard - at, lost, message));
    }
    for plan in plans {
        let first = &frames[plan.frame];
        let behind = frames.partition_point(|frame| frame.start < plan.end);
        let is_plain = packing == Packing::Plain;
        let offset = if is_plain { plan.start } else { first.at };
        let end = match frames.get(behind) {
            _ if is_plain => plan.end,
            Some(next) => next.at,
            None => shard,
        };
        let used = &frames[plan.frame..behind];
        rows.push_numbers(&[
            Entry {
                offset,
                len: end - offset,
                crc: plan.rows,
            },
            Entry {
                offset: if is_plain {
                    0
                } else {
                    plan.start - first.start
                },
                len: plan.end - plan.start,
                crc: 0,
            },
            Entry {
                offset: plan.opened,
                len: plan.longest,
                crc: plan.line_max as u32,
            },
            Entry {
                offset: used.iter().map(|frame| frame.window).max().unwrap_or(0),
                len: plan.line,
                crc: 0,
            },
        ])?;
    }
    Ok(())
}

/// A chunk while its file is indexed: places are in the unpacked file.
#[derive(Default)]
struct LinePlan {
    start: u64,
    end: u64,
    frame: usize,
    line: u64,
    rows: u32,
    opened: u64,
    longest: u64,
    line_max: u64,
}

/// A member or frame: where it begins in the file, and in the unpacked file.
struct Frame {
    at: u64,
    start: u64,
    window: u64,
}

/// Compressed bytes, and how many were used.
trait Compressed: BufRead {
    fn at(&self) -> u64;
    /// The error behind a failed read, if it is not one of the format.
    fn failed(&mut self) -> Option<Error>;
}

impl Compressed for Cursor<&[u8]> {
    fn at(&self) -> u64 {
        self.position()
    }

    fn failed(&mut self) -> Option<Error> {
        None
    }
}

/// The bytes of a shard in order.
struct Feed<'a, 's> {
    scan: &'a mut Scan<'s>,
    at: u64,
    failed: Option<Error>,
}

impl<'a, 's> Feed<'a, 's> {
    fn new(scan: &'a mut Scan<'s>) -> Self {
        Self {
            scan,
            at: 0,
            failed: None,
        }
    }
}

impl Read for Feed<'_, '_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut bytes = self.fill_buf()?;
        let count = bytes.read(out)?;
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for Feed<'_, '_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        // The rest of a step, so that no byte is read twice.
        let end = (self.at / STEP * STEP + STEP).min(self.scan.len());
        let failed = &mut self.failed;
        self.scan
            .bytes(self.at, (end - self.at) as usize)
            .map_err(|error| {
                *failed = Some(error);
                io::Error::other("the shard cannot be read")
            })
    }

    fn consume(&mut self, count: usize) {
        self.at += count as u64;
    }
}

impl Compressed for Feed<'_, '_> {
    fn at(&self) -> u64 {
        self.at
    }

    fn failed(&mut self) -> Option<Error> {
        self.failed.take()
    }
}

/// Reader of the unpacked bytes, frame by frame.
struct Unpacked<B: Compressed> {
    member: Member<B>,
    packing: Packing,
    frames: Vec<Frame>,
}

enum Member<B: Compressed> {
    Between(B),
    Plain(B),
    Gzip(Box<GzDecoder<B>>),
    Zstd(Box<ZstdDecoder<'static, B>>),
    /// After an error.
    None,
}

impl<B: Compressed> Unpacked<B> {
    fn new(input: B) -> Self {
        Self {
            member: Member::Between(input),
            packing: Packing::Plain,
            frames: Vec::new(),
        }
    }

    /// Reads up to a block; `false` at the end.
    ///
    /// Errors: [`ErrorKind::Truncated`] if the file ends within a frame, [`ErrorKind::Decode`] for
    /// what is no frame or has a wrong checksum; those of the file.
    fn read_into(&mut self, lines: &mut Splitter) -> Result<bool> {
        loop {
            if matches!(self.member, Member::Between(_)) && !self.begin(lines.at)? {
                return Ok(false);
            }
            let start = self.frames.last().map_or(0, |frame| frame.start);
            let room = lines.room();
            let read = match &mut self.member {
                Member::Plain(input) => input.read(room),
                Member::Gzip(decoder) => decoder.read(room),
                Member::Zstd(decoder) => decoder.read(room),
                Member::Between(_) | Member::None => Ok(0),
            };
            match read {
                Ok(0) => {
                    lines.took(0);
                    if !self.end() {
                        return Ok(false);
                    }
                }
                Ok(count) => {
                    lines.took(count);
                    if self.packing != Packing::Plain && lines.at - start > FRAME_MAX {
                        let what = format!(
                            "a frame of more than {FRAME_MAX} unpacked bytes: compress the file in parts"
                        );
                        return Err(Error::new(ErrorKind::Decode, Stage::Index, what));
                    }
                    return Ok(true);
                }
                Err(error) => {
                    lines.took(0);
                    return Err(self.failed(error));
                }
            }
        }
    }

    /// Reads the frame to its end, so that its checksum is verified.
    fn finish(&mut self, lines: &mut Splitter) -> Result<()> {
        let frames = self.frames.len();
        while !matches!(
            self.member,
            Member::Between(_) | Member::Plain(_) | Member::None
        ) && self.frames.len() == frames
        {
            lines.forget();
            match self.read_into(lines) {
                Ok(true) => {}
                Ok(false) => break,
                // A file that ends within the frame was told when it was opened.
                Err(error) if error.kind() == ErrorKind::Truncated => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Begins the next frame, if there is one.
    fn begin(&mut self, start: u64) -> Result<bool> {
        let Member::Between(mut input) = std::mem::replace(&mut self.member, Member::None) else {
            return Ok(false);
        };
        let front = match input.fill_buf() {
            Ok(front) => {
                let mut own = [0; 18];
                let count = front.len().min(own.len());
                own[..count].copy_from_slice(&front[..count]);
                (own, count)
            }
            Err(error) => {
                let own = input.failed();
                return Err(own.unwrap_or_else(|| undone(error)));
            }
        };
        let front = &front.0[..front.1];
        if front.is_empty() {
            self.member = Member::Between(input);
            return Ok(false);
        }
        let at = input.at();
        let packing = Packing::of(front);
        if !self.frames.is_empty() && packing != self.packing {
            let what = "bytes behind the last frame that are no frame";
            return Err(Error::new(ErrorKind::Decode, Stage::Index, what));
        }
        self.packing = packing;
        self.frames.push(Frame {
            at,
            start,
            window: match packing {
                Packing::Zstd => window(front),
                _ => 0,
            },
        });
        self.member = match packing {
            Packing::Plain => Member::Plain(input),
            Packing::Gzip => Member::Gzip(Box::new(GzDecoder::new(input))),
            Packing::Zstd => {
                let decoder = ZstdDecoder::with_buffer(input).map_err(undone)?;
                Member::Zstd(Box::new(decoder.single_frame()))
            }
        };
        Ok(true)
    }

    /// Ends a frame; `false` at the end of a plain file.
    fn end(&mut self) -> bool {
        self.member = match std::mem::replace(&mut self.member, Member::None) {
            Member::Gzip(decoder) => Member::Between(decoder.into_inner()),
            Member::Zstd(decoder) => Member::Between(decoder.finish()),
            other => other,
        };
        matches!(self.member, Member::Between(_))
    }

    #[cold]
    fn failed(&mut self, error: io::Error) -> Error {
        let own = match std::mem::replace(&mut self.member, Member::None) {
            Member::Between(mut input) | Member::Plain(mut input) => input.failed(),
            Member::Gzip(mut decoder) => decoder.get_mut().failed(),
            Member::Zstd(mut decoder) => decoder.get_mut().failed(),
            Member::None => None,
        };
        own.unwrap_or_else(|| undone(error))
    }
}

#[cold]
fn undone(error: io::Error) -> Error {
    let (kind, what) = match error.kind() {
        io::ErrorKind::UnexpectedEof => (ErrorKind::Truncated, "the file ends within a frame"),
        _ => (ErrorKind::Decode, "a frame cannot be unpacked"),
    };
    let what = format!("{what}: {error}");
    Error::new(kind, Stage::Decode, what).with_source(error)
}

/// Window of the zstd frame that begins with these bytes, as the format defines it; at most the
/// limit, above which the decoder refuses.
fn window(front: &[u8]) -> u64 {
    const LIMIT: u64 = 128 << 20;
    let &[_, _, _, _, descriptor, exponent, ..] = front else {
        return 0;
    };
    let size = match descriptor & 0x20 {
        0 => {
            let base = 1_u64 << (10 + (exponent >> 3));
            base + base / 8 * u64::from(exponent & 7)
        }
        _ => zstd::zstd_safe::get_frame_content_size(front)
            .ok()
            .flatten()
            .unwrap_or(LIMIT),
    };
    size.min(LIMIT)
}

/// A line, without its end.
struct Line<'a> {
    bytes: &'a [u8],
    /// Offset in the unpacked bytes.
    start: u64,
    /// It has no end.
    is_last: bool,
    /// It is longer than the limit; only its beginning is there.
    is_long: bool,
}

/// Cuts unpacked bytes into lines. Holds a block and the beginning of a line.
struct Splitter {
    /// `memory[..len]` is not yet cut; its first byte is at offset `start`.
    memory: Vec<u8>,
    len: usize,
    start: u64,
    /// Bytes of `memory` without a line's end.
    searched: usize,
    /// Offset behind the last byte.
    at: u64,
    skip: u64,
    /// The line is over the limit, and its end is not yet there.
    is_long: bool,
}

impl Splitter {
    fn new(memory: Vec<u8>, skip: u64) -> Self {
        Self {
            memory,
            len: 0,
            start: skip,
            searched: 0,
            at: 0,
            skip,
            is_long: false,
        }
    }

    fn into_memory(self) -> Vec<u8> {
        self.memory
    }

    /// Room for the next block.
    fn room(&mut self) -> &mut [u8] {
        if self.memory.len() < self.len + BLOCK {
            self.memory.resize(self.len + BLOCK, 0);
        }
        &mut self.memory[self.len..self.len + BLOCK]
    }

    /// Adds the bytes that were read into the room.
    fn took(&mut self, count: usize) {
        let before = self.at;
        self.at += count as u64;
        // Bytes before the first line are not kept.
        let left_out = self.skip.saturating_sub(before).min(count as u64) as usize;
        self.memory
            .copy_within(self.len + left_out..self.len + count, self.len);
        self.len += count - left_out;
    }

    fn forget(&mut self) {
        self.len = 0;
        self.searched = 0;
    }

    /// Calls `each` with every line that ends before offset `end`; with `all`, also with the rest
    /// up to it.
    fn split(
        &mut self,
        end: u64,
        all: bool,
        mut each: impl FnMut(Line<'_>) -> Result<()>,
    ) -> Result<()> {
        let len = self.len.min((end.saturating_sub(self.start)) as usize);
        let mut begun = 0;
        let mut from = self.searched.min(len);
        while let Some(found) = memchr::memchr(b'\n', &self.memory[from..len]) {
            let close = from + found;
            let is_long = std::mem::take(&mut self.is_long) || close - begun > LINE_MAX;
            each(Line {
                bytes: &self.memory[begun..close],
                start: self.start + begun as u64,
                is_last: false,
                is_long,
            })?;
            begun = close + 1;
            from = begun;
        }
        if all && begun < len {
            each(Line {
                bytes: &self.memory[begun..len],
                start: self.start + begun as u64,
                is_last: true,
                is_long: self.is_long,
            })?;
            begun = len;
        }
        self.memory.copy_within(begun..self.len, 0);
        self.start += begun as u64;
        self.len -= begun;
        self.searched = self.len;
        // The rest of a long line is of no use, but its end is.
        if self.len > LINE_MAX {
            self.is_long = true;
            self.start += (self.len - 1) as u64;
            self.len = 1;
            self.searched = 1;
        }
        Ok(())
    }
}
