//! The record of a task: written last, so a task with a record is done.
//!
//! ```text
//! tasks/000017.tsv:   w<TAB>line of the manifest …   d<TAB>line of the ledger …   one line of JSON: `Done`
//! ```

use super::super::output;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::Blob;
use feedline_core::storage::publish::Pending;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// Maximum bytes of the last line.
const DONE_MAX: u64 = 64 << 10;

/// The outcome of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Done {
    /// The plan's id, in hexadecimal.
    pub(super) plan: String,
    pub(super) task: u64,
    /// Number of samples in the output, and number of damaged samples.
    pub(super) samples: u64,
    pub(super) damaged: u64,
    /// Bytes of the samples in the input, and in the output.
    pub(super) bytes: (u64, u64),
    /// Number of pictures that got seek points, and number of pictures without them, by reason.
    pub(super) with_points: u64,
    pub(super) unchanged: BTreeMap<String, u64>,
    /// Counts of a task that writes tokens.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub(super) tokens: Option<TokenCounts>,
    /// The output file; none if every input is damaged, or the task writes none.
    pub(super) shard: Option<Output>,
    /// CRC32C of all lines before this one, and of this line with 0 in this field.
    pub(super) lines_crc32c: u32,
}

impl Done {
    /// The CRC of a record, continued from the CRC of the lines before.
    fn crc(&self, lines: u32) -> u32 {
        let zeroed = serde_json::to_string(&Self {
            lines_crc32c: 0,
            ..self.clone()
        })
        .unwrap_or_default();
        crc32c::crc32c_append(lines, zeroed.as_bytes())
    }
}

/// Records of other work have no counts of tokens.
fn is_absent(counts: &Option<TokenCounts>) -> bool {
    counts.is_none()
}

/// Counts of documents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TokenCounts {
    /// Number of tokens, and of documents without one.
    pub(super) tokens: u64,
    pub(super) empty: u64,
    /// Number of refused texts, by reason.
    pub(super) refused: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Output {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) crc32c: u32,
}

impl Output {
    /// Measures a file. Errors: those of reading.
    pub(super) fn of(path: &Path, name: String) -> Result<Self> {
        let blob = Blob::open(path)?;
        let bytes = blob.len();
        let mut file = BufReader::with_capacity(1 << 20, blob.stream(0));
        let mut crc32c = 0;
        loop {
            let part = file
                .fill_buf()
                .map_err(|source| read_failed(source, path))?;
            if part.is_empty() {
                return Ok(Self {
                    name,
                    bytes,
                    crc32c,
                });
            }
            crc32c = crc32c::crc32c_append(crc32c, part);
            let len = part.len();
            file.consume(len);
        }
    }

    /// Whether the file in `dir` has this length. Errors: system errors, except a missing file.
    pub(super) fn has_length(&self, dir: &Path) -> Result<bool> {
        match Blob::open(dir.join(&self.name)) {
            Ok(blob) => Ok(blob.len() == self.bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the file in `dir` has these bytes. Errors: those of
    /// [`has_length`](Self::has_length).
    pub(super) fn is_in(&self, dir: &Path) -> Result<bool> {
        Ok(self.has_length(dir)? && Self::of(&dir.join(&self.name), self.name.clone())? == *self)
    }
}

/// The list that a line belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordList {
    Manifest,
    Ledger,
}

/// A record being written.
pub(super) struct Record {
    file: Pending,
    crc: u32,
}

impl Record {
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        Ok(Self {
            file: output::create_shared(path)?,
            crc: 0,
        })
    }

    /// Adds a line, which includes its newline.
    pub(super) fn put(&mut self, list: RecordList, line: &str) -> Result<()> {
        let kind = match list {
            RecordList::Manifest => "w\t",
            RecordList::Ledger => "d\t",
        };
        for part in [kind, line] {
            self.crc = crc32c::crc32c_append(self.crc, part.as_bytes());
            self.file
                .write_all(part.as_bytes())
                .map_err(|source| output::failed(source, &self.file.target))?;
        }
        Ok(())
    }

    /// Completes the record, sets its CRC, and gives the file its name.
    pub(super) fn finish(mut self, done: Done) -> Result<()> {
        let crc = done.crc(self.crc);
        let json = serde_json::to_string(&Done {
            lines_crc32c: crc,
            ..done
        })
        .map_err(std::io::Error::from);
        let written = json.and_then(|json| writeln!(self.file, "{json}"));
        written.map_err(|source| output::failed(source, &self.file.target))?;
        output::commit_new(self.file)
    }
}

/// What a record's file contains.
pub(super) enum FoundRecord {
    Nothing,
    /// Cut short, or not a record.
    Damaged,
    Done(Done),
}

/// Reads the last line of a record. Errors: those of reading; [`ErrorKind::Config`] for a record of
/// another plan.
pub(super) fn read(path: &Path, plan: &str, task: u64) -> Result<FoundRecord> {
    let blob = match Blob::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(FoundRecord::Nothing),
        blob => blob?,
    };
    let start = blob.len().saturating_sub(DONE_MAX);
    let mut end = vec![0; (blob.len() - start) as usize];
    blob.read_at(start, &mut end)?;
    let line = end
        .strip_suffix(b"\n")
        .and_then(|lines| lines.rsplit(|byte| *byte == b'\n').next());
    match line.and_then(|line| serde_json::from_slice::<Done>(line).ok()) {
        Some(done) if done.plan == plan && done.task == task => Ok(FoundRecord::Done(done)),
        Some(done) => {
            let message = match done.plan == plan {
                true => format!(
                    "this is the record of task {}: remove it, and run task {task} again",
                    done.task
                ),
                false => format!(
                    "a record of plan {}, but this is plan {plan}: use a folder per plan",
                    done.plan
                ),
            };
            Err(Error::new(ErrorKind::Config, Stage::Write, message).with_path(path))
        }
        None => Ok(FoundRecord::Damaged),
    }
}

/// Whether the lines of a record are as they were written. Errors: those of reading.
pub(super) fn is_sound(path: &Path, done: &Done) -> Result<bool> {
    match each_line(path, done, &mut |_, _| Ok(())) {
        Err(error) if error.kind() == ErrorKind::Decode => Ok(false),
        read => read.map(|()| true),
    }
}

/// Calls `each` for the lines of a record. Errors: a line without a kind, or lines that differ from
/// those written.
pub(super) fn each_line(
    path: &Path,
    done: &Done,
    each: &mut dyn FnMut(RecordList, &str) -> Result<()>,
) -> Result<()> {
    let mut file = BufReader::with_capacity(1 << 16, Blob::open(path)?.stream(0));
    let mut line = String::new();
    let mut crc = 0;
    loop {
        line.clear();
        match file.read_line(&mut line) {
            Ok(_) => {}
            // A line that is not UTF-8 is damaged. An empty line has no kind, so it becomes an
            // error.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => line.clear(),
            Err(source) => return Err(read_failed(source, path)),
        }
        let written = line.strip_prefix("w\t");
        let damaged = line.strip_prefix("d\t");
        if written.or(damaged).is_some() {
            crc = crc32c::crc32c_append(crc, line.as_bytes());
        }
        match (written, damaged) {
            (Some(line), _) => each(RecordList::Manifest, line)?,
            (None, Some(line)) => each(RecordList::Ledger, line)?,
            (None, None) if done.crc(crc) == done.lines_crc32c => return Ok(()),
            (None, None) => {
                let message =
                    "the record of the task is damaged: remove it, and run the task again";
                return Err(Error::new(ErrorKind::Decode, Stage::Write, message).with_path(path));
            }
        }
    }
}

fn read_failed(source: std::io::Error, path: &Path) -> Error {
    Error::os(Stage::Read, "cannot read the output", source).with_path(path)
}
