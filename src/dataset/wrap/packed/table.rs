//! The table of bins in its side file.
//!
//! ```text
//! BINS:    block │ block │ … │ zeros         block: a head for each of its 64 bins, then their words, 4 bytes each
//! STARTS:  offset of each block
//! COUNTS:  the counts of the packing, then the estimate of lengths, if there is one
//! head:    number of words, 16 bits │ hash of the lengths, 16 bits
//! word:    1 │ document 31, then the part: one that fills the bin;    0 │ document 31: the whole document, or its rest
//!          concatenated: the part is the first token, and the bin's end is that of its last document
//! ```
//!
//! The table takes some 4 bytes for each document and 4 for each bin. Looking up a bin reads its
//! block's start, heads and words.

use super::fit::{Bin, Item};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::sidefile::{SideKind, SideWriter, Sidefile};

pub(super) const KIND: SideKind = SideKind {
    name: *b"pack",
    version: 1,
    older: b"",
};
const BINS: usize = 0;
const STARTS: usize = 1;
const COUNTS: usize = 2;
/// Bins per block.
const BLOCK: usize = 64;
/// Words that are read at once.
const STEP: usize = 16;
/// The bit that marks a document whose part is in the next word.
const PART: u32 = 1 << 31;

/// Counts of a packing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct BinCounts {
    /// Documents, without the empty ones.
    pub(super) documents: u64,
    pub(super) bins: u64,
    /// Tokens in the bins.
    pub(super) tokens: u64,
    /// Documents without tokens.
    pub(super) empty: u64,
    /// Documents that were cut or split or, if concatenated, cross the end of a row.
    pub(super) long: u64,
    /// Tokens cut off.
    pub(super) cut: u64,
    /// Maximum items of a bin.
    pub(super) items_max: u64,
    /// Bins that have the maximum number of documents and room for more tokens. 0 in files of an
    /// older version.
    pub(super) ended: u64,
}

impl BinCounts {
    pub(super) fn add(&mut self, other: &Self) {
        self.documents += other.documents;
        self.bins += other.bins;
        self.tokens += other.tokens;
        self.empty += other.empty;
        self.long += other.long;
        self.cut += other.cut;
        self.items_max = self.items_max.max(other.items_max);
        self.ended += other.ended;
    }
}

/// Packed documents that are to be written to the file.
pub(super) struct Group {
    heads: Vec<u32>,
    words: Vec<u32>,
    pub(super) counts: BinCounts,
}

impl Group {
    /// Makes a group of the items in their bins. `counts` has the counts of the documents.
    pub(super) fn new(
        items: &[Item],
        bin_of: Vec<u32>,
        bins: usize,
        size: Bin,
        counts: BinCounts,
    ) -> Self {
        let words_of = |item: &Item| 1 + u32::from(item.part.is_some());
        let mut places = vec![0_u32; bins + 1];
        let mut filled = vec![Bin::default(); bins];
        for (item, bin) in items.iter().zip(&bin_of) {
            places[*bin as usize + 1] += words_of(item);
            let own = &mut filled[*bin as usize];
            *own = Bin {
                room: own.room + item.len,
                most: own.most + 1,
            };
        }
        (0..bins).for_each(|bin| places[bin + 1] += places[bin]);
        let mut heads: Vec<u32> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mut words = vec![0; places[bins] as usize];
        let mut checks = vec![TableCheck::default(); bins];
        for (item, bin) in items.iter().zip(&bin_of) {
            let place = &mut places[*bin as usize];
            words[*place as usize] = item.document | if item.part.is_some() { PART } else { 0 };
            item.part
                .into_iter()
                .for_each(|part| words[*place as usize + 1] = part);
            *place += words_of(item);
            checks[*bin as usize].add(item.len);
        }
        heads
            .iter_mut()
            .zip(checks)
            .for_each(|(head, check)| *head |= u32::from(check.end()) << 16);
        let items_max = filled
            .iter()
            .map(|bin| u64::from(bin.most))
            .max()
            .unwrap_or(0)
            .max(counts.items_max);
        let tokens = items.iter().map(|item| u64::from(item.len)).sum();
        let ended = filled
            .iter()
            .filter(|bin| bin.most == size.most && bin.room < size.room)
            .count() as u64;
        Self {
            heads,
            words,
            counts: BinCounts {
                bins: bins as u64,
                tokens,
                items_max,
                ended,
                ..counts
            },
        }
    }
}

/// A hash of a bin's lengths. On reading, it detects changed lengths except in one case in 65,536.
#[derive(Clone, Copy, Default)]
pub(super) struct TableCheck(u32);

impl TableCheck {
    pub(super) fn add(&mut self, len: u32) {
        self.0 = (self.0.rotate_left(5) ^ len).wrapping_mul(0x9e37_79b9);
    }

    pub(super) fn end(self) -> u16 {
        (self.0 >> 16) as u16
    }
}

/// Writes the table, group by group.
#[derive(Default)]
pub(super) struct TableWriter {
    heads: Vec<u32>,
    words: Vec<u32>,
    starts: Vec<u64>,
    at: u64,
    pub(super) counts: BinCounts,
}

impl TableWriter {
    /// Errors: I/O errors.
    pub(super) fn add(&mut self, group: &Group, out: &mut SideWriter) -> std::io::Result<()> {
        let mut words = &group.words[..];
        for head in &group.heads {
            let (own, rest) = words.split_at((head & 0xffff) as usize);
            words = rest;
            self.heads.push(*head);
            self.words.extend_from_slice(own);
            if self.heads.len() == BLOCK {
                self.end_block(out)?;
            }
        }
        self.counts.add(&group.counts);
        Ok(())
    }

    fn end_block(&mut self, out: &mut SideWriter) -> std::io::Result<()> {
        self.heads.resize(BLOCK, 0);
        self.starts.push(self.at);
        for part in [&mut self.heads, &mut self.words] {
            out.put(bytemuck::cast_slice(part))?;
            self.at += 4 * part.len() as u64;
            part.clear();
        }
        Ok(())
    }

    /// Errors: I/O errors.
    pub(super) fn finish(
        mut self,
        estimate: Option<[i64; 3]>,
        out: &mut SideWriter,
    ) -> std::io::Result<()> {
        if !self.heads.is_empty() {
            self.end_block(out)?;
        }
        // Words are read in steps of `STEP`, including the last ones.
        out.put(&[0; 4 * STEP])?;
        out.end_section();
        out.put(bytemuck::cast_slice(&self.starts))?;
        out.end_section();
        out.put(bytemuck::bytes_of(&self.counts))?;
        if let Some(estimate) = estimate {
            out.put(bytemuck::bytes_of(&estimate))?;
        }
        out.end_section();
        Ok(())
    }
}

/// Whether the file has plausible counts, and sections that match them.
pub(super) fn fits(file: &Sidefile, size: Bin) -> bool {
    // A token has at most 8 bytes.
    counts(file).is_ok_and(
        |BinCounts {
             bins, items_max, ..
         }| {
            let sections = file.len(STARTS) == 8 * bins.div_ceil(BLOCK as u64);
            sections
                && bins.checked_mul(8 * u64::from(size.room)).is_some()
                && (1..=u64::from(size.most)).contains(&items_max)
        },
    )
}

/// Errors: reading errors.
pub(super) fn counts(file: &Sidefile) -> Result<BinCounts> {
    let mut counts = BinCounts::default();
    let bytes = bytemuck::bytes_of_mut(&mut counts);
    let len = bytes.len().min(file.len(COUNTS) as usize);
    file.fill(COUNTS, 0, &mut bytes[..len]).map(|()| counts)
}

/// The numbers of an estimate of lengths, if the file has one.
pub(super) fn estimate(file: &Sidefile) -> Option<[i64; 3]> {
    let mut estimate = [0; 3];
    let start = size_of::<BinCounts>() as u64;
    let bytes = bytemuck::bytes_of_mut(&mut estimate);
    let there = file.len(COUNTS) == start + bytes.len() as u64;
    let read = there.then(|| file.fill(COUNTS, start, bytes));
    read?.ok().map(|()| estimate)
}

/// Calls `each` with the document of every item of a bin, and with its part, if the item has one.
/// Returns the 16-bit hash of the lengths. Errors: reading errors, and those of `each`.
pub(super) fn items(
    file: &Sidefile,
    bin: u64,
    mut each: impl FnMut(u64, Option<u32>) -> Result<()>,
) -> Result<u16> {
    let block = bin / BLOCK as u64;
    let number = (bin % BLOCK as u64) as usize;
    let start = file.value::<u64>(STARTS, 8 * block)?;
    let heads: [u32; BLOCK] = file.value(BINS, start)?;
    let words = |head: &u32| u64::from(head & 0xffff);
    let first =
        start.saturating_add(4 * (BLOCK as u64 + heads[..number].iter().map(words).sum::<u64>()));
    let mut left = words(&heads[number]) as usize;
    let mut at = first;
    let mut marked = None;
    while left > 0 {
        let some: [u32; STEP] = file.value(BINS, at)?;
        for word in &some[..left.min(STEP)] {
            match marked.take() {
                Some(document) => each(document, Some(*word))?,
                None if word & PART != 0 => marked = Some(u64::from(word & !PART)),
                None => each(u64::from(*word), None)?,
            }
        }
        left = left.saturating_sub(STEP);
        at += 4 * STEP as u64;
    }
    match marked {
        None => Ok((heads[number] >> 16) as u16),
        Some(_) => Err(Error::new(
            ErrorKind::Decode,
            Stage::Index,
            format!("the table of bins is damaged at bin {bin}"),
        )),
    }
}
