//! Documents of a dataset, and their parts.

use super::estimate::Estimate;
use super::fit;
use super::fit::{Bin, InTurn, Item};
use super::table::{BinCounts, Group};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::{Dataset, Part, Parts, TokenFields, field_bytes, knows_lengths};
use feedline_core::order::Permutation;
use feedline_core::storage::Extent;
use std::ops::Range;

/// How documents that are longer than a bin are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Long {
    Refuse,
    Split,
    Cut,
    /// All documents one after the other, split where a row ends.
    Concatenate,
}

/// Maximum number of documents and parts in a group: this many take 1.07 GB.
const PARTS_MAX: u64 = 1 << 26;

/// Where documents and their lengths come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Stored unchanged: from their extents.
    Stored,
    /// Opened by the inner dataset, which knows their lengths.
    Opened,
    /// Opened by the inner dataset; lengths are estimated from their bytes.
    Estimated(Estimate),
}

/// The documents of a dataset, for bins of one size.
pub(super) struct InnerDocuments<D> {
    pub(super) inner: D,
    pub(super) fields: TokenFields,
    /// Of estimated documents, the bin is smaller than the row.
    pub(super) size: Bin,
    pub(super) long: Long,
    pub(super) access: Access,
}

/// The hint that follows the reason why documents cannot be packed from their files.
pub(super) fn copied() -> String {
    Setting::Copied
        .hint(|copied| format!("; {copied} copies them to a file from which they are packed"))
}

/// Whether the inner dataset makes the documents when it opens them, and whether it knows all their
/// lengths. Documents that are only cut out of a frame are copied as before.
pub(super) fn opens(inner: &dyn Dataset, fields: &TokenFields) -> Result<(bool, bool)> {
    if inner.chunked().is_some() || inner.len() == 0 || inner.sizes().opened_bytes_max == 0 {
        return Ok((false, false));
    }
    let mut parts = Parts::new();
    inner.extents(0, &mut parts)?;
    let first = parts.iter().find(|one| one.field == fields.numbers[0]);
    let is_framed = first.is_some_and(|one| matches!(one.part, Part::Framed(_)));
    let mut numbers = fields.numbers.iter();
    let known = is_framed && numbers.all(|number| knows_lengths(inner, *number));
    Ok((is_framed, known))
}

impl<D: Dataset> InnerDocuments<D> {
    /// Returns the number of tokens of a document, and appends the location of each field to
    /// `places`. Even after an error, `places` may have changed. `parts` is a reusable buffer for
    /// the dataset's answer.
    ///
    /// Errors: those of the dataset, and of [`TokenFields::tokens`]; [`ErrorKind::Config`] for a
    /// document that is not stored in a file unchanged.
    fn find<'d>(
        &'d self,
        document: u64,
        parts: &mut Parts<'d>,
        places: &mut Vec<Extent>,
    ) -> Result<u64> {
        let before = places.len();
        parts.clear();
        self.inner.extents(document, parts)?;
        for (number, field) in self.fields.numbers.iter().zip(&self.fields.fields) {
            let part = parts
                .iter()
                .find(|one| one.field == *number)
                .map(|one| one.part);
            let why = match (part, self.access) {
                (Some(Part::Extent(extent)), Access::Stored)
                | (Some(Part::Framed(extent)), Access::Opened | Access::Estimated(_)) => {
                    places.push(extent);
                    continue;
                }
                (Some(Part::Checked(_)), _) => "has checksums, which packed documents cannot keep",
                (Some(Part::Framed(_)), _) => {
                    "is stored in frames, and only documents stored unchanged in their files can be \
                     packed, or those whose lengths are known or estimated"
                }
                _ => "is stored in another way than the documents",
            };
            let message = format!("field `{}` {why}{}", field.name(), copied());
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_sample(document));
        }
        let found = &places[before..];
        let tokens = match self.access {
            Access::Stored => self.fields.tokens(found.iter().map(|place| place.len)),
            Access::Estimated(estimate) => Ok(estimate.tokens(found[0].len)),
            Access::Opened => {
                let numbers = self.fields.numbers.iter();
                let bytes = numbers
                    .map(|number| field_bytes(&self.inner, document, *number))
                    .collect::<Result<Option<Vec<u64>>>>();
                bytes.and_then(|bytes| match bytes {
                    Some(bytes) => self.fields.tokens(bytes.into_iter()),
                    None => {
                        let message = "the lengths of some documents are unknown";
                        Err(Error::new(ErrorKind::Config, Stage::Index, message))
                    }
                })
            }
        };
        tokens.map_err(|error| {
            self.inner
                .sources()
                .at(error.with_sample(document), &found[0])
        })
    }

    /// Returns the first token of a document's part (0 for a whole document) and the number of its
    /// tokens, in a bin with room for `left` tokens; appends the location of each field to `places`
    /// (of the whole document, if it is opened). `None` if there is no such document or part, or if
    /// it does not fit.
    pub(super) fn part<'d>(
        &'d self,
        document: u64,
        part: Option<u32>,
        left: u32,
        parts: &mut Parts<'d>,
        places: &mut Vec<Extent>,
    ) -> Result<Option<(u64, u32)>> {
        if document >= self.inner.len() {
            return Ok(None);
        }
        let before = places.len();
        let whole = self.find(document, parts, places)?;
        let room = u64::from(self.size.room);
        let (from, len) = match (part, self.long) {
            (first, Long::Concatenate) => {
                let from = u64::from(first.unwrap_or(0));
                (from, whole.saturating_sub(from).min(left.into()))
            }
            (Some(part), _) => (u64::from(part) * room, room),
            (None, Long::Split) if whole > room => (whole - whole % room, whole % room),
            (None, Long::Cut) => (0, whole.min(room)),
            (None, _) => (0, whole),
        };
        let stored = match self.access {
            Access::Stored => &mut places[before..],
            _ => &mut [],
        };
        for (place, bytes) in stored.iter_mut().zip(self.fields.element_bytes()) {
            *place = Extent {
                offset: place.offset + from * bytes,
                len: len * bytes,
                ..*place
            };
        }
        let fits = (1..=room).contains(&len) && from + len <= whole;
        Ok(fits.then_some((from, len as u32)))
    }

    /// Packs the documents at these positions of the order, by best fit.
    pub(super) fn group(
        &self,
        positions: Range<u64>,
        order: Option<&Permutation>,
    ) -> Result<Group> {
        let room = u64::from(self.size.room);
        let mut places = Vec::new();
        let mut items = Vec::new();
        let mut counts = BinCounts::default();
        let mut parts = Parts::new();
        for position in positions {
            let (document, len) = self.at(position, order, &mut counts, &mut parts, &mut places)?;
            let item = |part, len: u64| Item {
                document,
                part,
                len: len as u32,
            };
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
                    let message = format!(
                        "a document of {len} tokens does not fit into a bin of {room}: split, cut \
                         or concatenate longer ones"
                    );
                    return Err(Error::new(ErrorKind::Shape, Stage::Index, message)
                        .with_sample(document.into()));
                }
            }
        }
        let (bin_of, bins) = fit::bins(&items, self.size);
        Ok(Group::new(&items, bin_of, bins, self.size, counts))
    }

    /// Appends the documents at these positions to the documents before them. The last bin stays
    /// open, unless these are the last documents.
    pub(super) fn concatenate(
        &self,
        positions: Range<u64>,
        order: Option<&Permutation>,
        in_turn: &mut InTurn,
    ) -> Result<Group> {
        let mut counts = BinCounts::default();
        let mut parts = Parts::new();
        let last = positions.end == self.inner.len();
        let mut places = Vec::new();
        for position in positions {
            let (document, len) = self.at(position, order, &mut counts, &mut parts, &mut places)?;
            self.check_parts(document, in_turn.len(), len)?;
            counts.long += u64::from(in_turn.put(document, len, self.size));
        }
        let (items, (bin_of, bins)) = in_turn.take(last);
        Ok(Group::new(&items, bin_of, bins, self.size, counts))
    }

    /// Returns the document at a position of the order and its number of tokens, and counts the
    /// document.
    fn at<'d>(
        &'d self,
        position: u64,
        order: Option<&Permutation>,
        counts: &mut BinCounts,
        parts: &mut Parts<'d>,
        places: &mut Vec<Extent>,
    ) -> Result<(u32, u64)> {
        let document = order.map_or(position, |order| order.get(position));
        places.clear();
        let len = self.find(document, parts, places)?;
        counts.documents += u64::from(len > 0);
        counts.empty += u64::from(len == 0);
        Ok((document as u32, len))
    }

    /// Errors: [`ErrorKind::Limit`] for a document with too many tokens, or with too many parts in
    /// addition to `items`.
    fn check_parts(&self, document: u32, items: usize, len: u64) -> Result<()> {
        let message = match len / u64::from(self.size.room) {
            parts if items as u64 + parts > PARTS_MAX => {
                format!("documents in more than {PARTS_MAX} parts: use larger bins")
            }
            _ if len > u64::from(u32::MAX) => format!(
                "a document of {len} tokens; at most {} can be split",
                u32::MAX
            ),
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Limit, Stage::Index, message).with_sample(document.into()))
    }
}
