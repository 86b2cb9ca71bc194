//! The file of a plan: a side file with the settings and one entry per input, which is found by the
//! input's number.
//!
//! Sections: blocks of 256 inputs, where each input has the length of its name (4 bytes), class
//! (4), bytes (8), version (8) and name; the ends of the blocks, 8 bytes each; the settings as
//! JSON; the number of inputs and their bytes, 8 bytes each, and notes that do not affect the
//! output.
//!
//! A lookup reads two ends and one block, so memory does not depend on the number of inputs; the
//! writer keeps 8 bytes per block.
//!
//! The identity is a hash of the settings and of all inputs. Two plans with equal identities give
//! the same output.

use super::super::output;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use feedline_core::dataset::Digest;
use feedline_core::storage::Blob;
use feedline_core::storage::sidefile::{SideFound, SideKind, SideWriter, Sidefile};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const KIND: SideKind = SideKind {
    name: *b"plan",
    version: 2,
    older: b"feedplan",
};
const INPUTS: usize = 0;
const ENDS: usize = 1;
const SETTINGS: usize = 2;
const SUMS: usize = 3;
const BLOCK: u64 = 256;
const ENTRY: usize = 24;
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
    out: SideWriter,
    block: Vec<u8>,
    /// Byte offset at which each block ends.
    ends: Vec<u64>,
    end: u64,
    /// Number of inputs so far.
    pub(super) inputs: u64,
    bytes: u64,
    id: Digest,
}

impl Writer {
    pub(super) fn create(target: PathBuf) -> Result<Self> {
        let out =
            SideWriter::create(&target, KIND).map_err(|source| output::failed(source, &target))?;
        let id = Digest::new("plan");
        Ok(Self {
            out,
            block: Vec::new(),
            ends: Vec::new(),
            end: 0,
            inputs: 0,
            bytes: 0,
            id,
        })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .put(bytes)
            .map_err(|source| output::failed(source, self.out.target()))
    }

    /// The identity that the finished file will have with these settings. Call it after the last
    /// input is added.
    pub(super) fn id(&self, settings: &str) -> u64 {
        let id = if self.block.is_empty() {
            self.id
        } else {
            self.id.bytes(&self.block)
        };
        id.bytes(settings.as_bytes()).end()
    }

    pub(super) fn add(&mut self, input: &Input) -> Result<()> {
        let name = input.name.as_os_str().as_bytes();
        self.block
            .extend_from_slice(&(name.len() as u32).to_le_bytes());
        self.block
            .extend_from_slice(&input.class.unwrap_or(u32::MAX).to_le_bytes());
        self.block.extend_from_slice(&input.len.to_le_bytes());
        self.block.extend_from_slice(&input.version.to_le_bytes());
        self.block.extend_from_slice(name);
        self.inputs += 1;
        self.bytes = self.bytes.saturating_add(input.len);
        if self.inputs.is_multiple_of(BLOCK) {
            self.end_block()
        } else {
            Ok(())
        }
    }

    fn end_block(&mut self) -> Result<()> {
        let block = std::mem::take(&mut self.block);
        self.put(&block)?;
        self.end += block.len() as u64;
        self.ends.push(self.end);
        self.id = self.id.bytes(&block);
        self.block = block;
        self.block.clear();
        Ok(())
    }

    /// Completes the file and gives it its name, unless a file of this name exists. `notes` are not
    /// part of the identity.
    pub(super) fn finish(mut self, settings: &str, notes: &str) -> Result<()> {
        if !self.block.is_empty() {
            self.end_block()?;
        }
        let ends = std::mem::take(&mut self.ends);
        let sums = [self.inputs, self.bytes];
        for section in [
            bytemuck::cast_slice(&ends),
            settings.as_bytes(),
            bytemuck::cast_slice(&sums),
        ] {
            self.out.end_section();
            self.put(section)?;
        }
        self.put(notes.as_bytes())?;
        self.out.end_section();
        let id = self.id.bytes(settings.as_bytes()).end();
        let target = self.out.target().to_path_buf();
        output::commit_new(
            self.out
                .finish(id)
                .map_err(|source| output::failed(source, &target))?,
        )
    }
}

/// An open file of a plan.
pub(super) struct ShardReader {
    file: Sidefile,
    pub(super) settings: String,
    pub(super) notes: String,
    pub(super) inputs: u64,
    pub(super) bytes: u64,
    pub(super) id: u64,
    /// The block read last: inputs are often read in order.
    last: Mutex<Option<(u64, Vec<u8>)>>,
}

impl ShardReader {
    /// Errors: [`Decode`](feedline_base::error::ErrorKind::Decode) for a file that is not a plan, another version,
    /// or a damaged plan.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let wrong = |what: &str| Error::new(ErrorKind::Decode, Stage::Index, what).with_path(path);
        let damaged =
            || wrong("the plan is damaged or cut short: remove the output folder, and plan again");
        let file = match Sidefile::of(Blob::open(path)?, KIND)? {
            SideFound::Whole(file) => file,
            SideFound::Damaged => return Err(damaged()),
            SideFound::Older => {
                return Err(wrong(
                    "a plan of an older version of this program: make the plan again",
                ));
            }
            SideFound::Newer => {
                return Err(wrong(
                    "a plan of a newer version, or of a machine with the other byte order: name \
                     another folder",
                ));
            }
            SideFound::Foreign | SideFound::Nothing => {
                return Err(wrong(
                    "not a plan, or an incomplete one: name another folder, or remove the file",
                ));
            }
        };
        let [inputs, bytes]: [u64; 2] = file.value(SUMS, 0).map_err(|_| damaged())?;
        if inputs.div_ceil(BLOCK).checked_mul(8) != Some(file.len(ENDS)) {
            return Err(damaged());
        }
        let text = |section, start| {
            let len = file.len(section).saturating_sub(start);
            let mut buffer = Vec::new();
            let bytes = if len > PART_MAX {
                Err(damaged())
            } else {
                file.read(section, start, len as usize, &mut buffer)
            };
            bytes.and_then(|bytes| {
                std::str::from_utf8(bytes)
                    .map(String::from)
                    .map_err(|_| damaged())
            })
        };
        let settings = text(SETTINGS, 0)?;
        let notes = text(SUMS, 16)?;
        let id = file.identity();
        Ok(Self {
            file,
            settings,
            notes,
            inputs,
            bytes,
            id,
            last: Mutex::new(None),
        })
    }

    /// The input with this number, which is below `inputs`.
    pub(super) fn get(&self, input: u64) -> Result<Input> {
        let number = input / BLOCK;
        let mut last = self.last.hold();
        if last.as_ref().is_none_or(|(held, _)| *held != number) {
            *last = None;
            let block = self
                .file
                .entry(INPUTS, ENDS, number, PART_MAX, &mut Vec::new())?
                .to_vec();
            *last = Some((number, block));
        }
        let block = last.as_ref().map_or(&[][..], |(_, block)| block);
        find(block, (input % BLOCK) as usize).ok_or_else(|| self.file.damaged())
    }

    /// The plan's path.
    pub(super) fn path(&self) -> &Path {
        &self.file.path
    }
}

/// Input number `place` of a block.
fn find(mut block: &[u8], place: usize) -> Option<Input> {
    for _ in 0..place {
        block =
            block.get(ENTRY + u32::from_le_bytes(block.get(..4)?.try_into().ok()?) as usize..)?;
    }
    let word = |at: usize| Some(u32::from_le_bytes(block.get(at..at + 4)?.try_into().ok()?));
    let wide = |at: usize| Some(u64::from_le_bytes(block.get(at..at + 8)?.try_into().ok()?));
    let name = block.get(ENTRY..ENTRY + word(0)? as usize)?;
    let class = word(4).filter(|class| *class != u32::MAX);
    Some(Input {
        name: OsStr::from_bytes(name).into(),
        class,
        len: wide(8)?,
        version: wide(16)?,
    })
}
