//! The file of a plan: one entry per input, found by its number, and the settings.
//!
//! ```text
//! "feedplan" | version 4
//! blocks of 256 inputs: CRC32C 4 | length 4 | number 8 | inputs: name's length 4, class 4, bytes 8, version 8, name
//! start of each block 8
//! settings: JSON
//! inputs 8 | bytes of all 8 | start of the starts 8 | id 8 | length of the settings 4 | CRC32C of settings and these 4 | "planfeed"
//! ```
//!
//! Integers are little-endian. A lookup reads one start and one block, so memory does not depend on the number of
//! inputs; the writer keeps 8 bytes per block. Every byte that is used has been checked.
//!
//! The id is a hash of the settings and of all inputs. Two plans of equal id give the same output.

use super::super::output;
use crate::dataset::Digest;
use crate::error::Result;
use crate::storage::Blob;
use crate::storage::publish::Pending;
use crate::sync::Hold;
use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const MAGIC: &[u8; 8] = b"feedplan";
const VERSION: u32 = 1;
const PREFIX: u64 = 12;
const BLOCK: u64 = 256;
const BLOCK_HEAD: usize = 16;
const ENTRY: usize = 24;
const TAIL: usize = 48;
/// Bytes of the tail before its CRC.
const TAIL_SUMMED: usize = 36;
const TAIL_MAGIC: &[u8; 8] = b"planfeed";
/// Maximum bytes of the settings, and of a block.
const PART_MAX: u64 = 64 << 20;

/// An input as it was listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Input {
    /// Path below the root.
    pub(super) name: PathBuf,
    pub(super) class: Option<u32>,
    pub(super) len: u64,
    pub(super) version: u64,
}

/// Writes the file of a plan, input by input.
pub(super) struct Writer {
    out: Pending,
    at: u64,
    block: Vec<u8>,
    starts: Vec<u64>,
    inputs: u64,
    bytes: u64,
    id: Digest,
}

impl Writer {
    pub(super) fn create(target: PathBuf) -> Result<Self> {
        let out = output::create_shared(target)?;
        let mut writer =
            Self { out, at: 0, block: Vec::new(), starts: Vec::new(), inputs: 0, bytes: 0, id: Digest::new("plan") };
        writer.put(MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.at += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|source| output::failed(source, self.out.target()))
    }

    /// Number of inputs so far.
    pub(super) fn inputs(&self) -> u64 {
        self.inputs
    }

    pub(super) fn add(&mut self, input: &Input) -> Result<()> {
        let name = input.name.as_os_str().as_bytes();
        self.block.extend_from_slice(&(name.len() as u32).to_le_bytes());
        self.block.extend_from_slice(&input.class.unwrap_or(u32::MAX).to_le_bytes());
        self.block.extend_from_slice(&input.len.to_le_bytes());
        self.block.extend_from_slice(&input.version.to_le_bytes());
        self.block.extend_from_slice(name);
        self.inputs += 1;
        self.bytes = self.bytes.saturating_add(input.len);
        if self.inputs.is_multiple_of(BLOCK) { self.end_block() } else { Ok(()) }
    }

    fn end_block(&mut self) -> Result<()> {
        let block = std::mem::take(&mut self.block);
        let number = self.starts.len() as u64;
        let crc = crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), &block);
        self.starts.push(self.at);
        self.put(&crc.to_le_bytes())?;
        self.put(&(block.len() as u32).to_le_bytes())?;
        self.put(&number.to_le_bytes())?;
        self.put(&block)?;
        self.id = self.id.bytes(&block);
        self.block = block;
        self.block.clear();
        Ok(())
    }

    /// Ends the file and gives it its name, unless that is taken.
    pub(super) fn finish(mut self, settings: &str) -> Result<()> {
        if !self.block.is_empty() {
            self.end_block()?;
        }
        let starts_at = self.at;
        for start in std::mem::take(&mut self.starts) {
            self.put(&start.to_le_bytes())?;
        }
        self.put(settings.as_bytes())?;
        let id = self.id.bytes(settings.as_bytes()).end();
        let mut tail: Vec<u8> =
            [self.inputs, self.bytes, starts_at, id].iter().flat_map(|word| word.to_le_bytes()).collect();
        tail.extend((settings.len() as u32).to_le_bytes());
        let crc = crc32c::crc32c_append(crc32c::crc32c(settings.as_bytes()), &tail);
        tail.extend(crc.to_le_bytes());
        tail.extend(TAIL_MAGIC);
        self.put(&tail)?;
        output::commit_new(self.out)
    }
}

/// An open file of a plan.
pub(super) struct Reader {
    blob: Blob,
    pub(super) settings: String,
    pub(super) inputs: u64,
    pub(super) bytes: u64,
    pub(super) id: u64,
    starts_at: u64,
    /// The block read last: inputs are often read in order.
    last: Mutex<Option<(u64, Vec<u8>)>>,
}

impl Reader {
    /// Errors: [`Decode`](crate::ErrorKind::Decode) for another file, a newer version, or a damaged plan.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let blob = Blob::open(path)?;
        let len = blob.len();
        if len < PREFIX + TAIL as u64 || blob.array::<8>(0, "the plan")? != *MAGIC {
            return Err(blob.wrong("not a plan, or an incomplete one", 0, len.min(PREFIX)));
        }
        let version = u32::from_le_bytes(blob.array(8, "the plan")?);
        if version != VERSION {
            let message = format!("a plan of version {version}; this program reads version {VERSION}");
            return Err(blob.wrong(message, 8, 4));
        }
        let damaged = || blob.wrong("the plan is damaged or cut short", 0, len);
        let end = len - TAIL as u64;
        let tail = blob.array::<TAIL>(end, "the end of the plan")?;
        let number = |at: usize| tail[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let (inputs, bytes, starts_at, id) = (number(0), number(8), number(16), number(24));
        let settings_len = u64::from(number(32) as u32);
        if settings_len > (end - PREFIX).min(PART_MAX) {
            return Err(damaged());
        }
        let settings = blob.read(end - settings_len, settings_len, "the settings of the plan")?;
        let crc = crc32c::crc32c_append(crc32c::crc32c(&settings), &tail[..TAIL_SUMMED]);
        let starts_end = inputs.div_ceil(BLOCK).checked_mul(8).and_then(|starts| starts.checked_add(starts_at));
        let sound = tail[TAIL_SUMMED..TAIL_SUMMED + 4] == crc.to_le_bytes()
            && tail[TAIL_SUMMED + 4..] == *TAIL_MAGIC
            && starts_end == Some(end - settings_len);
        let settings = String::from_utf8(settings).ok().filter(|_| sound).ok_or_else(damaged)?;
        Ok(Self { blob, settings, inputs, bytes, id, starts_at, last: Mutex::new(None) })
    }

    /// The input of this number, which is below `inputs`.
    pub(super) fn get(&self, input: u64) -> Result<Input> {
        let number = input / BLOCK;
        let mut last = self.last.hold();
        if last.as_ref().is_none_or(|(held, _)| *held != number) {
            *last = None;
            *last = Some((number, self.block(number)?));
        }
        let block = last.as_ref().map_or(&[][..], |(_, block)| block);
        find(block, (input % BLOCK) as usize)
            .ok_or_else(|| self.blob.wrong("the plan is damaged", self.starts_at, 8 * self.inputs.div_ceil(BLOCK)))
    }

    fn block(&self, number: u64) -> Result<Vec<u8>> {
        let start = u64::from_le_bytes(self.blob.array(self.starts_at + 8 * number, "a start in the plan")?);
        let head: [u8; BLOCK_HEAD] = self.blob.array(start, "a block of the plan")?;
        let len = u64::from(u32::from_le_bytes([head[4], head[5], head[6], head[7]]));
        if len > PART_MAX || head[8..] != number.to_le_bytes() {
            return Err(self.blob.wrong("a block of the plan is damaged", start, BLOCK_HEAD as u64));
        }
        let block = self.blob.read(start + BLOCK_HEAD as u64, len, "a block of the plan")?;
        if crc32c::crc32c_append(crc32c::crc32c(&head[8..]), &block).to_le_bytes() != head[..4] {
            return Err(self.blob.wrong("a block of the plan is damaged", start, BLOCK_HEAD as u64 + len));
        }
        Ok(block)
    }

    /// The plan's path.
    pub(super) fn path(&self) -> &Path {
        self.blob.path()
    }
}

/// The input at this place of a block.
fn find(mut block: &[u8], place: usize) -> Option<Input> {
    for _ in 0..place {
        block = block.get(ENTRY + u32::from_le_bytes(block.get(..4)?.try_into().ok()?) as usize..)?;
    }
    let word = |at: usize| Some(u32::from_le_bytes(block.get(at..at + 4)?.try_into().ok()?));
    let wide = |at: usize| Some(u64::from_le_bytes(block.get(at..at + 8)?.try_into().ok()?));
    let name = block.get(ENTRY..ENTRY + word(0)? as usize)?;
    let class = word(4).filter(|class| *class != u32::MAX);
    Some(Input { name: OsStr::from_bytes(name).into(), class, len: wide(8)?, version: wide(16)? })
}
