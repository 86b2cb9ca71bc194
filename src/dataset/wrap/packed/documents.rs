//! Documents of a dataset, and their parts.

use super::fit::{self, Bin, InTurn, Item};
use super::table::{Counts, Group};
use crate::dataset::{Dataset, Part, Parts};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::order::Permutation;
use crate::storage::Extent;
use std::ops::Range;

/// What becomes of documents that are longer than a bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Long {
    Refuse,
    Split,
    Cut,
    /// All documents one after the other, split where a row ends.
    Concatenate,
}

/// Maximum documents and parts of a group: 800 MB of them.
const PARTS_MAX: u64 = 1 << 26;

/// The documents of a dataset, for bins of a size.
pub(super) struct Documents<D> {
    pub(super) inner: D,
    pub(super) field: usize,
    pub(super) token_bytes: u64,
    pub(super) size: Bin,
    pub(super) long: Long,
}

impl<D: Dataset> Documents<D> {
    /// The place of a document and its tokens; `parts` is room to ask the dataset.
    ///
    /// Errors: of the dataset; [`ErrorKind::Config`] for a document that does not lie in a file unchanged;
    /// [`ErrorKind::Decode`] for one that is not a whole number of tokens.
    fn find<'d>(&'d self, document: u64, parts: &mut Parts<'d>) -> Result<(Extent, u64)> {
        parts.clear();
        self.inner.extents(document, parts)?;
        let part = parts.iter().find(|(field, _)| *field == self.field).map(|(_, part)| part);
        let Some(Part::Extent(extent)) = part else {
            let name = self.inner.schema().get(self.field).map_or("?", |field| &field.name);
            let message = match part {
                Some(Part::Checked(_)) => format!("field `{name}` has checksums, which packed documents cannot keep"),
                _ => format!(
                    "field `{name}` lies in frames: only documents that lie in their files unchanged can be packed"
                ),
            };
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_sample(document));
        };
        if !extent.len.is_multiple_of(self.token_bytes) {
            let message = format!("{} bytes are not a whole number of {}-byte tokens", extent.len, self.token_bytes);
            let error = Error::new(ErrorKind::Decode, Stage::Index, message).with_sample(document);
            return Err(self.inner.sources().at(error, &extent));
        }
        Ok((extent, extent.len / self.token_bytes))
    }

    /// The place of a document or its part in a bin with room for `left` tokens, and its tokens. `None`: there is none, or none
    /// that fits.
    pub(super) fn part<'d>(
        &'d self,
        document: u64,
        part: Option<u32>,
        left: u32,
        parts: &mut Parts<'d>,
    ) -> Result<Option<(Extent, u32)>> {
        if document >= self.inner.len() {
            return Ok(None);
        }
        let ((extent, len), room) = (self.find(document, parts)?, u64::from(self.size.room));
        let (from, len) = match (part, self.long) {
            (first, Long::Concatenate) => {
                let from = u64::from(first.unwrap_or(0));
                (from, len.saturating_sub(from).min(left.into()))
            }
            (Some(part), _) => (u64::from(part) * room, room),
            (None, Long::Split) if len > room => (len - len % room, len % room),
            (None, Long::Cut) => (0, len.min(room)),
            (None, _) => (0, len),
        };
        let (offset, bytes) = (from * self.token_bytes, len * self.token_bytes);
        let fits = (1..=room).contains(&len) && offset + bytes <= extent.len;
        Ok(fits.then_some((Extent { offset: extent.offset + offset, len: bytes, ..extent }, len as u32)))
    }

    /// Packs the documents at these positions of the order, by best fit.
    pub(super) fn group(&self, positions: Range<u64>, order: Option<&Permutation>) -> Result<Group> {
        let room = u64::from(self.size.room);
        let (mut items, mut counts, mut parts) = (Vec::new(), Counts::default(), Parts::new());
        for position in positions {
            let (document, len) = self.at(position, order, &mut counts, &mut parts)?;
            let item = |part, len: u64| Item { document, part, len: len as u32 };
            counts.long += u64::from(len > room);
            match self.long {
                _ if len <= room => items.extend((len > 0).then(|| item(None, len))),
                Long::Cut => {
                    counts.cut += len - room;
                    items.push(item(None, room));
                }
                Long::Split => {
                    self.check_parts(document, items.len(), len)?;
                    items.extend((0..(len / room) as u32).map(|part| item(Some(part), room)));
                    items.extend((len % room > 0).then(|| item(None, len % room)));
                }
                Long::Refuse | Long::Concatenate => {
                    let message =
                        format!("a document of {len} tokens in bins of {room}: split, cut or concatenate longer ones");
                    return Err(Error::new(ErrorKind::Shape, Stage::Index, message).with_sample(document.into()));
                }
            }
        }
        Ok(Group::new(&items, fit::bins(&items, self.size), counts))
    }

    /// Puts the documents at these positions behind those before. The last bin stays open, unless these are the last ones.
    pub(super) fn concatenate(
        &self,
        positions: Range<u64>,
        order: Option<&Permutation>,
        in_turn: &mut InTurn,
    ) -> Result<Group> {
        let (mut counts, mut parts, last) = (Counts::default(), Parts::new(), positions.end == self.inner.len());
        for position in positions {
            let (document, len) = self.at(position, order, &mut counts, &mut parts)?;
            self.check_parts(document, in_turn.len(), len)?;
            counts.long += u64::from(in_turn.put(document, len, self.size));
        }
        let (items, bins) = in_turn.take(last);
        Ok(Group::new(&items, bins, counts))
    }

    /// The document at a position of the order, which is counted, and its tokens.
    fn at<'d>(
        &'d self,
        position: u64,
        order: Option<&Permutation>,
        counts: &mut Counts,
        parts: &mut Parts<'d>,
    ) -> Result<(u32, u64)> {
        let document = order.map_or(position, |order| order.get(position));
        let (_, len) = self.find(document, parts)?;
        counts.documents += u64::from(len > 0);
        counts.empty += u64::from(len == 0);
        Ok((document as u32, len))
    }

    /// Errors: [`ErrorKind::Limit`] for a document of too many tokens or parts, beside `items`.
    fn check_parts(&self, document: u32, items: usize, len: u64) -> Result<()> {
        let message = match len / u64::from(self.size.room) {
            parts if items as u64 + parts > PARTS_MAX => {
                format!("documents in more than {PARTS_MAX} parts: take larger bins")
            }
            _ if len > u64::from(u32::MAX) => format!("a document of {len} tokens; {} at most can be split", u32::MAX),
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Limit, Stage::Index, message).with_sample(document.into()))
    }
}
