//! The locations of one sample's bytes, as given by the dataset, and checks of them.

use crate::dataset::{Dataset, Sizes};
use crate::storage::{Extent, SourceId, Sources};
use crate::tensor::{EncodedField, Spec};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught_in};

/// Locations of the bytes of one sample's fields, filled by [`Dataset::extents`].
pub struct Parts<'a> {
    /// The first few parts, inline: a usual schema needs no allocation.
    few: [(usize, Part<'a>); PARTS_INLINE],
    more: Vec<(usize, Part<'a>)>,
    len: usize,
}

const PARTS_INLINE: usize = 8;

/// Location of one field's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// The bytes are in storage and final, so they may be read in place.
    Extent(Extent),
    /// In storage; they must pass through [`check`](super::Framed::check).
    Checked(Extent),
    /// In storage; they must pass through [`check`](super::Framed::check) and
    /// [`open`](super::Framed::open).
    Framed(Extent),
    /// In the index.
    Inline(&'a [u8]),
    /// In storage and final; appended to the bytes that the field has so far.
    More(Extent),
    /// In the index; appended to the bytes that the field has so far.
    MoreInline(&'a [u8]),
    /// Not stored: [`make`](super::Framed::make) writes them.
    Made,
}

/// A part of a sample, with the field that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldPart<'a> {
    pub field: usize,
    pub part: Part<'a>,
    /// Whether this is the field's last part.
    pub is_last: bool,
}

impl Part<'_> {
    /// Extent in the sources; `None` for bytes of the index and for made ones.
    #[inline]
    pub fn extent(&self) -> Option<Extent> {
        match *self {
            Self::Extent(extent)
            | Self::Checked(extent)
            | Self::Framed(extent)
            | Self::More(extent) => Some(extent),
            Self::Inline(_) | Self::MoreInline(_) | Self::Made => None,
        }
    }

    /// Number of stored bytes.
    pub fn len(&self) -> usize {
        match *self {
            Self::Inline(bytes) | Self::MoreInline(bytes) => bytes.len(),
            _ => self.extent().map_or(0, |extent| {
                usize::try_from(extent.len).unwrap_or(usize::MAX)
            }),
        }
    }

    /// Whether these bytes are appended to earlier bytes of the same field.
    #[inline]
    pub fn follows(&self) -> bool {
        matches!(self, Self::More(_) | Self::MoreInline(_))
    }

    /// Whether the dataset must check the bytes before use.
    pub fn is_checked(&self) -> bool {
        matches!(self, Self::Checked(_) | Self::Framed(_))
    }

    /// Whether this part has the same extent as the part `before`, so that one read serves both.
    pub fn shares(&self, before: Option<Part<'_>>) -> bool {
        let before = before.filter(|before| self.is_checked() && before.is_checked());
        before.is_some_and(|before| {
            self.extent() == before.extent() && self.extent().is_some_and(|extent| extent.len > 0)
        })
    }
}

impl<'a> Parts<'a> {
    #[doc(hidden)]
    pub fn new() -> Self {
        Self {
            few: [(0, Part::Inline(&[])); PARTS_INLINE],
            more: Vec::new(),
            len: 0,
        }
    }

    #[doc(hidden)]
    pub fn clear(&mut self) {
        self.len = 0;
        self.more.clear();
    }

    #[doc(hidden)]
    pub fn iter(&self) -> impl Iterator<Item = FieldPart<'a>> + '_ {
        let all = self.few[..self.len.min(PARTS_INLINE)]
            .iter()
            .chain(&self.more);
        let mut all = all.copied().peekable();
        std::iter::from_fn(move || {
            let (field, part) = all.next()?;
            // Parts of one field are adjacent.
            let is_last = !all.peek().is_some_and(|(_, next)| next.follows());
            Some(FieldPart {
                field,
                part,
                is_last,
            })
        })
    }

    /// Asks the dataset for the parts of a sample and checks them: every one of the `fields` must
    /// have bytes exactly once, and every extent must lie within its source.
    #[doc(hidden)]
    pub fn ask(
        &mut self,
        dataset: &'a dyn Dataset,
        sources: &Sources,
        fields: usize,
        sample: u64,
    ) -> Result<()> {
        self.clear();
        caught_in("the dataset's `extents`", Stage::Read, || {
            dataset
                .extents(sample, self)
                .map_err(|error| error.in_stage(Stage::Read))
        })?;
        let name = |field: usize| dataset.schema().get(field).map_or("?", |field| &field.name);
        if fields > Spec::FIELDS_MAX {
            return lie(format!(
                "{fields} fields; the limit is {}",
                Spec::FIELDS_MAX
            ));
        }
        let mut seen = 0_u64;
        let mut before = None;
        for FieldPart { field, part, .. } in self.iter() {
            if field >= fields {
                return lie(format!(
                    "the dataset gave a part for field {field}, but its schema has {fields} fields"
                ));
            }
            let takes_more = before == Some(field);
            before = (matches!(part, Part::Extent(_)) || part.follows()).then_some(field);
            if part.follows() {
                if !takes_more {
                    return lie(format!(
                        "the dataset appended to field `{}`, which had no extent just before",
                        name(field)
                    ));
                }
            } else if seen & (1 << field) != 0 {
                return lie(format!(
                    "the dataset gave bytes for field `{}` twice",
                    name(field)
                ));
            }
            seen |= 1 << field;
            part.extent()
                .map_or(Ok(()), |extent| sources.check(&extent))?;
        }
        let missing = seen.trailing_ones() as usize;
        if missing < fields {
            return lie(format!(
                "the dataset gave no bytes for field `{}`",
                name(missing)
            ));
        }
        Ok(())
    }

    /// Checks the extents against the maximum sizes that the dataset declared, because the read
    /// buffers have these sizes.
    #[doc(hidden)]
    pub fn within(&self, sizes: &Sizes) -> Result<()> {
        let (
            bytes,
            Sizes {
                sample_bytes_max,
                appended_max,
                ..
            },
        ) = (self.stored_bytes(), sizes);
        if bytes > *sample_bytes_max {
            return lie(format!(
                "the sample has {bytes} bytes, the dataset's `sample_bytes_max` is \
                 {sample_bytes_max}"
            ));
        }
        let appended = self
            .iter()
            .filter(|one| matches!(one.part, Part::More(_)))
            .count();
        if appended > *appended_max {
            return lie(format!(
                "the sample has {appended} appended extents, the dataset's `appended_max` is \
                 {appended_max}"
            ));
        }
        Ok(())
    }

    /// Like [`ask`](Self::ask), for all fields and sources of the dataset. Errors name the sample.
    #[doc(hidden)]
    pub fn ask_all(&mut self, dataset: &'a dyn Dataset, sample: u64) -> Result<()> {
        let fields = dataset.schema().len();
        self.ask(dataset, dataset.sources(), fields, sample)
            .map_err(|error| error.with_sample(sample))
    }

    /// Total bytes of all extents. An extent equal to the one before it does not count, unless it
    /// is appended.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let mut before = None;
        let mut sum = 0_u64;
        for FieldPart { part, .. } in self.iter() {
            let Some(extent) = part.extent() else {
                continue;
            };
            if before.replace(extent) != Some(extent) || part.follows() {
                sum = sum.saturating_add(extent.len);
            }
        }
        sum
    }

    /// Number of parts so far.
    #[doc(hidden)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Adds `by` to the source ids of the parts from number `from` on, since their table of sources
    /// was appended to another.
    #[doc(hidden)]
    pub fn move_sources(&mut self, from: usize, by: usize) {
        for (_, part) in self.few[..self.len.min(PARTS_INLINE)]
            .iter_mut()
            .chain(&mut self.more)
            .skip(from)
        {
            if let Part::Extent(extent)
            | Part::Checked(extent)
            | Part::Framed(extent)
            | Part::More(extent) = part
            {
                extent.source = SourceId::at(extent.source.index() + by);
            }
        }
    }

    /// Adds `by` to the field numbers of the parts from number `from` on, since their fields follow
    /// those of another dataset.
    #[doc(hidden)]
    pub fn move_fields(&mut self, from: usize, by: usize) {
        self.few[..self.len.min(PARTS_INLINE)]
            .iter_mut()
            .chain(&mut self.more)
            .skip(from)
            .for_each(|(field, _)| *field += by);
    }

    #[inline]
    fn push(&mut self, field: usize, part: Part<'a>) {
        match self.few.get_mut(self.len) {
            Some(place) => *place = (field, part),
            None => self.more.push((field, part)),
        }
        self.len += 1;
    }

    /// Marks all parts in storage for [`check`](super::Framed::check).
    #[doc(hidden)]
    pub fn check_all(&mut self) {
        for (_, part) in self.few[..self.len.min(PARTS_INLINE)]
            .iter_mut()
            .chain(&mut self.more)
        {
            if let Part::Extent(extent) = *part {
                *part = Part::Checked(extent);
            }
        }
    }

    /// Marks the stored part of a field for [`open`](super::Framed::open).
    #[doc(hidden)]
    pub fn frame(&mut self, field: usize) {
        for (own, part) in self.few[..self.len.min(PARTS_INLINE)]
            .iter_mut()
            .chain(&mut self.more)
        {
            if let (true, Part::Extent(extent) | Part::Checked(extent)) = (*own == field, *part) {
                *part = Part::Framed(extent);
            }
        }
    }

    /// Gives field `field` the bytes of this extent, unchanged.
    #[inline]
    pub fn extent(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Extent(extent));
    }

    /// Appends the bytes of one more extent, unchanged, to field `field`, for a row that is stored
    /// in several places. Call it directly after [`extent`](Self::extent) or another append for the
    /// same field. The field must have a fixed shape and no decoder, and all parts together must
    /// have a row's bytes. [`Sizes::appended_max`] bounds their number.
    pub fn append(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::More(extent));
    }

    /// Like [`append`](Self::append), with bytes of the index itself, such as padding.
    pub fn append_inline(&mut self, field: usize, bytes: &'a [u8]) {
        self.push(field, Part::MoreInline(bytes));
    }

    /// Gives field `field` the bytes that [`open`](super::Framed::open) of the dataset's
    /// [`framed`](Dataset::framed) makes from this extent. Several fields may share an extent: add
    /// them one after the other.
    pub fn framed(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Framed(extent));
    }

    /// Lets [`make`](super::Framed::make) of the dataset's [`framed`](Dataset::framed) write field
    /// `field`, which has no stored bytes. The field must have a fixed shape.
    pub fn made(&mut self, field: usize) {
        self.push(field, Part::Made);
    }

    /// Gives field `field` these bytes of the index itself, such as a label.
    #[inline]
    pub fn inline(&mut self, field: usize, bytes: &'a [u8]) {
        self.push(field, Part::Inline(bytes));
    }
}

/// The error for a dataset that violates its contract.
pub fn lie<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::User, Stage::Read, message))
}

/// The error for a dataset that has framed parts, but no `framed` to open them.
pub fn unframed<T>() -> Result<T> {
    lie("the dataset gave a framed part, but its `framed` is `None`".into())
}

/// Appends the bytes of a [made](Parts::made) field to `out`.
pub fn make(dataset: &dyn Dataset, sample: u64, field: usize, out: &mut Vec<u8>) -> Result<()> {
    let bytes = dataset
        .schema()
        .get(field)
        .and_then(EncodedField::fixed_bytes);
    let Some(bytes) = bytes.and_then(|bytes| usize::try_from(bytes).ok()) else {
        return lie(format!(
            "the dataset makes field {field}, which has no fixed shape"
        ));
    };
    let start = out.len();
    out.resize(start + bytes, 0);
    make_in(dataset, sample, field, &mut out[start..])
}

/// Writes the bytes of a [made](Parts::made) field to its row, `out`.
pub fn make_in(dataset: &dyn Dataset, sample: u64, field: usize, out: &mut [u8]) -> Result<()> {
    caught_in("the dataset's `make`", Stage::Decode, || {
        let made = match dataset.framed() {
            Some(framed) => framed.make(sample, field, out),
            None => lie("the dataset gave a made part, but its `framed` is `None`".into()),
        };
        made.map_err(|error| error.in_stage(Stage::Decode))
    })
}

/// Offset of `part` in `whole`; `None` if `part` lies outside it, as a copy does.
fn offset_in(part: &[u8], whole: &[u8]) -> Option<u64> {
    let within = whole.as_ptr_range().contains(&part.as_ptr());
    within.then(|| (part.as_ptr().addr() - whole.as_ptr().addr()) as u64)
}

/// Checks the bytes that `open` made from `given` against the dataset's bound. A slice of `given`
/// always passes, since it takes no memory.
pub fn within_opened<'a>(opened: &'a [u8], given: &[u8], most: u64) -> Result<&'a [u8]> {
    match opened.len() as u64 <= most || offset_in(opened, given).is_some() {
        true => Ok(opened),
        false => lie(format!(
            "`open` gave {} bytes, the dataset's `opened_bytes_max` is {most}",
            opened.len()
        )),
    }
}

/// Converts an error's range within `bytes` to a range in the file; `given` are the bytes of the
/// extent.
pub fn placed(error: Error, bytes: &[u8], given: &[u8], extent: &Extent) -> Error {
    match offset_in(bytes, given) {
        Some(within) => error.moved(extent.offset + within),
        None => error.with_range_in_words(),
    }
}

/// Whether the dataset's bytes go through [`check`](super::Framed::check) or
/// [`open`](super::Framed::open), judged by a few samples. If so, no row is read in place, even one
/// of a raw field.
pub fn opens_bytes(dataset: &dyn Dataset) -> bool {
    let len = dataset.len();
    // A user's dataset may panic here; planning the sample hits the same panic and reports it.
    let asked = std::panic::AssertUnwindSafe(|| {
        [0, len / 2, len.saturating_sub(1)]
            .into_iter()
            .any(|sample| {
                let mut parts = Parts::new();
                dataset.extents(sample, &mut parts).is_err()
                    || parts.iter().any(|one| one.part.is_checked())
            })
    });
    dataset.chunked().is_none() && len > 0 && std::panic::catch_unwind(asked).unwrap_or(true)
}
