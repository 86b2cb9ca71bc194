//! Documents of a dataset, and their parts.

use super::fit::{Bin, Item};
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

    /// The place of a document or its part in a bin, and its tokens. `None`: there is none, or none that fits.
    pub(super) fn part<'d>(
        &'d self,
        document: u64,
        part: Option<u32>,
        parts: &mut Parts<'d>,
    ) -> Result<Option<(Extent, u32)>> {
        if document >= self.inner.len() {
            return Ok(None);
        }
        let ((extent, len), room) = (self.find(document, parts)?, u64::from(self.size.room));
        let (from, len) = match (part, self.long) {
            (Some(part), _) => (u64::from(part) * room, room),
            (None, Long::Split) if len > room => (len - len % room, len % room),
            (None, Long::Cut) => (0, len.min(room)),
            (None, _) => (0, len),
        };
        let (offset, bytes) = (from * self.token_bytes, len * self.token_bytes);
        let fits = (1..=room).contains(&len) && offset + bytes <= extent.len;
        Ok(fits.then_some((Extent { offset: extent.offset + offset, len: bytes, ..extent }, len as u32)))
    }

    /// Packs the documents at these positions of the order.
    pub(super) fn group(&self, positions: Range<u64>, order: Option<&Permutation>) -> Result<Group> {
        let room = self.size.room;
        let (mut items, mut counts, mut parts) = (Vec::new(), Counts::default(), Parts::new());
        for position in positions {
            let document = order.map_or(position, |order| order.get(position));
            let (_, len) = self.find(document, &mut parts)?;
            let (whole, rest) = (len / u64::from(room), (len % u64::from(room)) as u32);
            let item = |part, len| Item { document: document as u32, part, len };
            counts.documents += u64::from(len > 0);
            counts.empty += u64::from(len == 0);
            if len <= u64::from(room) {
                items.extend((len > 0).then(|| item(None, len as u32)));
                continue;
            }
            counts.long += 1;
            match self.long {
                Long::Refuse => {
                    let message =
                        format!("a document of {len} tokens in bins of {room}: split or cut longer documents");
                    return Err(Error::new(ErrorKind::Shape, Stage::Index, message).with_sample(document));
                }
                Long::Cut => {
                    counts.cut += len - u64::from(room);
                    items.push(item(None, room));
                }
                Long::Split => {
                    if items.len() as u64 + whole > PARTS_MAX {
                        let message = format!("documents in more than {PARTS_MAX} parts: take larger bins");
                        return Err(Error::new(ErrorKind::Limit, Stage::Index, message).with_sample(document));
                    }
                    let parts = whole as u32;
                    items.extend((0..parts).map(|part| item(Some(part), room)));
                    items.extend((rest > 0).then(|| item(None, rest)));
                }
            }
        }
        Ok(Group::new(&items, self.size, counts))
    }
}
