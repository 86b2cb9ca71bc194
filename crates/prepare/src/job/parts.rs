//! Joins the parts of tokens into the files of all tasks.
//!
//! ```text
//! all parts ──► tokens.bin: their tokens │ tokens.idx: header │ lengths │ offsets │ ends of documents
//! ```
//!
//! Memory: 4 bytes for each document of a task, and 8 for a part of the index. Invariant: the joined
//! files do not depend on the number of tasks.

use super::super::output;
use super::super::tokens::{BIN, IDX, TokenSettings, is_part, part};
use super::plan::Plan;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::Blob;
use feedline_core::storage::publish::Pending;
use std::io::Write;

/// Bytes of a part that are copied at once.
const STEP: u64 = 1 << 20;

/// Joins the parts of all tasks. Both files stay if they exist with the same bytes.
pub(super) fn join(
    plan: &Plan,
    settings: &TokenSettings,
    documents: u64,
    empty: u64,
) -> Result<()> {
    let size = settings.dtype().size() as u64;
    let mut bin = output::create_shared(plan.dir.join(BIN))?;
    for task in 0..plan.tasks() {
        let part = Part::open(plan, task, size)?;
        part.copy(&mut bin)?;
    }
    output::commit_new(bin)?;
    if settings.flat {
        return Ok(());
    }
    let mut idx = output::create_shared(plan.dir.join(IDX))?;
    write_idx(plan, settings, [documents, empty], &mut idx)?;
    output::commit_new(idx)
}

/// Writes Megatron's index, version 1.
fn write_idx(
    plan: &Plan,
    settings: &TokenSettings,
    [documents, empty]: [u64; 2],
    out: &mut Pending,
) -> Result<()> {
    let size = settings.dtype().size() as u64;
    let sequences = documents - empty;
    let mut head = b"MMIDIDX\0\0".to_vec();
    head.extend(1_u64.to_le_bytes());
    head.push(settings.code());
    head.extend(sequences.to_le_bytes());
    head.extend((documents + 1).to_le_bytes());
    out.write_all(&head)
        .map_err(|source| output::failed(source, &out.target))?;
    each_len(plan, size, out, |len, bytes| {
        if len > 0 {
            bytes.extend(len.to_le_bytes());
        }
    })?;
    let mut offset = 0_u64;
    each_len(plan, size, out, |len, bytes| {
        if len > 0 {
            bytes.extend(offset.to_le_bytes());
        }
        offset += u64::from(len) * size;
    })?;
    let mut ended = 0_u64;
    out.write_all(&ended.to_le_bytes())
        .map_err(|source| output::failed(source, &out.target))?;
    each_len(plan, size, out, |len, bytes| {
        ended += u64::from(len > 0);
        bytes.extend(ended.to_le_bytes());
    })
}

/// Writes what `add` makes of the length of every document.
fn each_len(
    plan: &Plan,
    size: u64,
    out: &mut Pending,
    mut add: impl FnMut(u32, &mut Vec<u8>),
) -> Result<()> {
    let mut bytes = Vec::new();
    for task in 0..plan.tasks() {
        bytes.clear();
        for len in Part::open(plan, task, size)?.lens()? {
            add(len, &mut bytes);
        }
        out.write_all(&bytes)
            .map_err(|source| output::failed(source, &out.target))?;
    }
    Ok(())
}

/// The part of a task.
struct Part {
    blob: Blob,
    documents: u64,
    /// Bytes of the tokens.
    tokens: u64,
}

impl Part {
    /// Errors: a part that is not the one of the record.
    fn open(plan: &Plan, task: u64, size: u64) -> Result<Self> {
        let blob = Blob::open(plan.dir.join(part(task)))?;
        let changed = || {
            let message = "the part changed while the job was finished: finish again";
            Error::new(ErrorKind::Changed, Stage::Write, message).with_path(blob.path())
        };
        let done = plan.done(task)?;
        let counts = done.tokens.ok_or_else(changed)?;
        let tokens = counts.tokens.checked_mul(size).ok_or_else(changed)?;
        let lens = done.samples.checked_mul(4).ok_or_else(changed)?;
        match tokens.checked_add(lens) == Some(blob.len()) {
            true => Ok(Self {
                documents: done.samples,
                tokens,
                blob,
            }),
            false => Err(changed()),
        }
    }

    fn copy(&self, out: &mut Pending) -> Result<()> {
        for start in (0..self.tokens).step_by(STEP as usize) {
            let len = STEP.min(self.tokens - start);
            let bytes = self.blob.read(start, len, "the tokens of a part")?;
            out.write_all(&bytes)
                .map_err(|source| output::failed(source, &out.target))?;
        }
        Ok(())
    }

    /// The lengths of the documents.
    fn lens(&self) -> Result<Vec<u32>> {
        let what = "the lengths of a part";
        let bytes = self.blob.read(self.tokens, 4 * self.documents, what)?;
        let lens = bytes.as_chunks::<4>().0.iter();
        Ok(lens.map(|len| u32::from_le_bytes(*len)).collect())
    }
}

/// Whether a file at the top of the folder may come from an earlier call.
pub(super) fn is_ours(name: &str) -> bool {
    is_part(name) || [BIN, IDX].contains(&name)
}
