//! Views of one row or one whole batch, for user code: decoders, `.map` and `.map_batch`.
//!
//! The views borrow their token mutably ([`Rows`], [`Filled`]). So a field's bytes have one writer
//! at a time.

#![allow(unsafe_code)]

use super::slot::{Filled, Rows, Slot, Status};
use crate::tensor::{Element, Field, FieldKey, Shape, Spec};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_base::sync::atomic::Ordering;

impl Rows {
    /// The first unfinished row, for writing.
    #[inline]
    pub fn row(&mut self) -> Row<'_> {
        assert!(self.len() > 0);
        Row {
            slot: &self.slot,
            row: self.start,
            allowed: !self.lent,
            written: 0,
            sized: 0,
            stands_in: self.stands_in,
            element: None,
        }
    }

    /// Blanks all unfinished rows and counts them as done.
    pub fn blank(mut self) {
        while self.len() > 0 {
            let mut row = self.row();
            for field in 0..row.spec().fields().len() {
                row.clear(field);
            }
            row.mark(u64::MAX);
            self.finish_row();
        }
    }

    /// Counts the first unfinished row as done, with a substitute. Padding rows stay padding.
    pub fn finish_substitute(&mut self) {
        let mut row = self.row();
        if row.row < row.slot.valid.load(Ordering::Relaxed) {
            let place = row.slot.plan.layout.status() + row.row as usize;
            row.put(place, &[Status::Substitute as u8]);
        }
        self.finish_row();
    }
}

impl Filled {
    /// The batch for `.map_batch`.
    pub fn batch_mut(&mut self) -> BatchMut<'_> {
        BatchMut {
            filled: self,
            written: 0,
        }
    }
}

/// One row of a batch, for decoders and transforms to write to.
///
/// A field is given by its name or by its index in the spec.
pub struct Row<'a> {
    pub(super) slot: &'a Slot,
    pub(super) row: u32,
    /// Bit mask of the accessible fields.
    allowed: u64,
    /// Bit mask of the fields whose bytes after their length may have been written.
    written: u64,
    /// Bit mask of the fields whose length was set.
    sized: u64,
    /// Whether the row gets a substitute sample.
    stands_in: bool,
    /// The element of a list to which the row is narrowed.
    element: Option<RowElement>,
}

/// An element of the lists in a row.
#[derive(Clone, Copy)]
struct RowElement {
    index: usize,
    /// The field whose elements vary in length, and the field of these lengths.
    varying: Option<(usize, usize)>,
}

impl Row<'_> {
    /// The fields of the row.
    #[inline]
    pub fn spec(&self) -> &Spec {
        &self.slot.plan.spec
    }

    /// Index of the field `name`.
    ///
    /// Errors: [`ErrorKind::Shape`] if the spec has no such field.
    pub fn index_of(&self, name: &str) -> Result<usize> {
        name.index_in(self.spec())
    }

    /// Row number in the batch.
    pub fn number(&self) -> usize {
        self.row as usize
    }

    /// The bytes of field `field`. An `UpTo` field has all `max` elements (in an order of groups,
    /// as many as the maximum of the batch's group). A packed field with lengths in the index has
    /// as many bytes as the index says. Bytes after the length become 0 again when the decoder or
    /// transform has returned.
    ///
    /// Panics if `field` is out of range, or, in a decoder, is not one of the decoder's fields.
    #[inline]
    pub fn bytes_mut(&mut self, field: usize) -> &mut [u8] {
        assert!(
            self.allowed & (1 << field) != 0,
            "{}",
            self.not_its_own(field)
        );
        self.written |= 1 << field;
        let (ptr, len) = self.slot.field_at(field, self.row);
        // SAFETY: in bounds, initialised, alive by the borrow of the slot. Exclusive: this `Row`
        // borrows the row's unique token mutably, and lent fields were refused above.
        let bytes = unsafe { std::slice::from_raw_parts_mut(ptr, len) };
        match self.element_range(field) {
            None => bytes,
            Some(range) => &mut bytes[range],
        }
    }

    /// The bytes of the element in `field`, if the row is narrowed to one.
    #[inline]
    fn element_range(&self, field: usize) -> Option<std::ops::Range<usize>> {
        let RowElement { index, .. } = self.element?;
        let unit = self.spec().fields()[field].unit_bytes();
        Some(unit * index..unit * (index + 1))
    }

    /// The elements of field `field`, like [`bytes_mut`](Self::bytes_mut).
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the field's dtype.
    pub fn slice_mut<T: Element>(&mut self, field: impl FieldKey) -> Result<&mut [T]> {
        let field = field.index_in(self.spec())?;
        check_dtype::<T>(&self.slot.plan.spec.fields()[field])?;
        Ok(bytemuck::cast_slice_mut(self.bytes_mut(field)))
    }

    /// The bytes of two different fields. Panics if both are the same or one is out of range.
    #[doc(hidden)]
    pub fn two_bytes(&mut self, a: usize, b: usize) -> (&mut [u8], &mut [u8]) {
        assert_ne!(a, b);
        let first: *mut [u8] = self.bytes_mut(a);
        let second = self.bytes_mut(b);
        // SAFETY: arrays of different fields do not overlap (tested in `tensor`), so both borrows
        // are exclusive. Both live as long as the mutable borrow of `self`.
        (unsafe { &mut *first }, second)
    }

    /// The elements of field `field`, for reading. Panics like [`bytes_mut`](Self::bytes_mut).
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the field's dtype.
    pub fn slice<T: Element>(&self, field: impl FieldKey) -> Result<&[T]> {
        let field = field.index_in(self.spec())?;
        check_dtype::<T>(&self.slot.plan.spec.fields()[field])?;
        assert!(
            self.allowed & (1 << field) != 0,
            "{}",
            self.not_its_own(field)
        );
        let (ptr, len) = self.slot.field_at(field, self.row);
        // SAFETY: as in `bytes_mut`, with a shared borrow of the `Row`.
        let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
        Ok(bytemuck::cast_slice(match self.element_range(field) {
            None => bytes,
            Some(range) => &bytes[range],
        }))
    }

    fn not_its_own(&self, field: usize) -> String {
        let name = self.spec().fields().get(field).map_or("?", Field::name);
        format!("field {field} (`{name}`) does not belong to this decoder")
    }

    /// Length (first dimension) of an `UpTo` field; `None` for a fixed shape.
    pub fn len_of(&self, field: usize) -> Option<usize> {
        let offset = self.slot.plan.layout.fields()[field].lens? + self.row as usize * 8;
        Some(self.slot.number(offset) as usize)
    }

    /// Several fields at once, so that one can be computed from others.
    pub fn split(&mut self) -> RowFields<'_> {
        RowFields {
            row: Row { ..*self },
            written: &mut self.written,
            taken: 0,
        }
    }

    /// Whether the row gets a substitute sample, so that its packed fields stay empty.
    #[doc(hidden)]
    pub fn stands_in(&self) -> bool {
        self.stands_in
    }

    /// Like [`pad`](Self::pad). `new` is the bit mask of the fields whose length was 0 at first.
    ///
    /// Errors: [`ErrorKind::Shape`] if one of these fields was written but its length was not set,
    /// because it would look empty.
    #[doc(hidden)]
    pub fn pad_new(&mut self, new: u64) -> Result<()> {
        let written = self.written & !self.sized & new;
        let mut fields = self.spec().fields().iter().enumerate();
        if let Some((_, field)) =
            fields.find(|(number, field)| written & 1 << number != 0 && field.is_up_to())
        {
            let name = field.name();
            return Err(shape_error(format!(
                "field `{name}` was written, but its length was not set: call `set_len`"
            )));
        }
        // A field of varying length that was not written still holds an earlier sample.
        let all = u64::MAX >> (64 - self.spec().fields().len());
        self.written |= all & self.allowed & !self.sized & new;
        self.pad();
        Ok(())
    }

    /// Zeroes the bytes after the length of each field that was written.
    pub(crate) fn pad(&mut self) {
        while self.written != 0 {
            let field = self.written.trailing_zeros() as usize;
            self.written &= !(1 << field);
            let spec = &self.slot.plan.spec.fields()[field];
            let layout = &self.slot.plan.layout.fields()[field];
            if let (true, None, Some(len)) = (spec.is_up_to(), layout.packed, self.len_of(field)) {
                let unit = spec.unit_bytes();
                self.bytes_mut(field)[unit * len..].fill(0);
                self.written &= !(1 << field);
            }
        }
    }

    /// Sets the length (first dimension) of an `UpTo` field and zeroes the bytes after it.
    ///
    /// Errors: [`ErrorKind::Shape`] if the field has a fixed shape or `len` exceeds its maximum;
    /// for a packed field with lengths in the index, if `len` is neither 0 nor that length.
    pub fn set_len(&mut self, field: impl FieldKey, len: usize) -> Result<()> {
        let field = field.index_in(self.spec())?;
        if let Some(element) = self.element {
            return self.set_element_len(element, field, len);
        }
        let spec = &self.slot.plan.spec.fields()[field];
        if !spec.is_up_to() {
            return Err(shape_error(format!(
                "field `{}` has a fixed shape: its length cannot be set",
                spec.name()
            )));
        }
        let (max, unit) = self.slot.most(field);
        if len > max {
            return Err(self.too_long(field, len, ""));
        }
        match self.slot.plan.layout.fields()[field].packed {
            Some(packed) => self.check_packed(spec, packed, len)?,
            None => self.bytes_mut(field)[unit * len..].fill(0),
        }
        if let Some(offset) = self.slot.plan.layout.fields()[field].lens {
            self.put(offset + self.row as usize * 8, &(len as u64).to_ne_bytes());
        }
        self.written &= !(1 << field);
        self.sized |= 1 << field;
        Ok(())
    }

    /// Copies `bytes` into field `field` and sets the length of an `UpTo` field.
    ///
    /// A fixed field takes exactly its row, an `UpTo` field at most its row.
    ///
    /// Errors: [`ErrorKind::Shape`] if the number of bytes does not fit.
    pub fn copy_from(&mut self, field: impl FieldKey, bytes: &[u8]) -> Result<()> {
        let field = field.index_in(self.spec())?;
        if let Some(element) = self.element {
            return self.copy_to_element(element, field, bytes);
        }
        let spec = &self.slot.plan.spec.fields()[field];
        let row_bytes = if spec.varies_by_group() {
            self.slot.row_bytes(field)
        } else {
            spec.row_bytes()
        };
        if spec.is_up_to() {
            let (max, unit) = self.slot.most(field);
            if !bytes.len().is_multiple_of(unit) {
                return Err(wrong_bytes(spec, bytes.len()));
            }
            // For a longer field of the dataset, the error names a setting; other lengths are
            // chosen by the decoder.
            if bytes.len() / unit > max {
                let more = match spec.is_packed() {
                    true => String::new(),
                    false => Setting::UpTo.hint(|up_to| format!(" (raise {up_to})")),
                };
                return Err(self.too_long(field, bytes.len() / unit, &more));
            }
            self.set_len(field, bytes.len() / unit)?;
        } else if bytes.len() != row_bytes {
            return Err(wrong_bytes(spec, bytes.len()));
        }
        let written = self.written;
        self.bytes_mut(field)[..bytes.len()].copy_from_slice(bytes);
        // Only bytes within the length were written; those after it are unchanged.
        self.written = written;
        Ok(())
    }

    /// The same row narrowed to element `index` of its lists: a decoder of one element sees the
    /// place of that element in each field. `varying` is the field whose elements vary in length,
    /// and the field that gets their lengths.
    ///
    /// Call [`set_len`](Self::set_len) with the number of elements first; it zeroes those after
    /// them. `index` must be below that number.
    #[doc(hidden)]
    pub fn element(&mut self, index: usize, varying: Option<(usize, usize)>) -> Row<'_> {
        Row {
            element: Some(RowElement { index, varying }),
            written: 0,
            sized: 0,
            ..*self
        }
    }

    fn set_element_len(&mut self, element: RowElement, field: usize, len: usize) -> Result<()> {
        let RowElement { index, varying } = element;
        let spec = &self.slot.plan.spec.fields()[field];
        let sizes = varying.filter(|(own, _)| *own == field);
        let (Some((_, sizes)), Some(max)) = (sizes, element_len(spec)) else {
            return Err(shape_error(format!(
                "elements of field `{}` have a fixed shape: their length cannot be set",
                spec.name()
            )));
        };
        if len > max {
            return Err(shape_error(format!(
                "field `{}` takes at most {max}, the sample has {len}",
                spec.name()
            )));
        }
        let unit = spec.unit_bytes() / max;
        self.bytes_mut(field)[unit * len..].fill(0);
        let mut whole = Row {
            element: None,
            ..*self
        };
        whole.bytes_mut(sizes)[8 * index..][..8].copy_from_slice(&(len as i64).to_ne_bytes());
        Ok(())
    }

    fn copy_to_element(&mut self, element: RowElement, field: usize, bytes: &[u8]) -> Result<()> {
        let spec = &self.slot.plan.spec.fields()[field];
        let room = spec.unit_bytes();
        if element.varying.is_some_and(|(own, _)| own == field) {
            let unit = room / element_len(spec).unwrap_or(1);
            if !bytes.len().is_multiple_of(unit) {
                return Err(wrong_bytes(spec, bytes.len()));
            }
            self.set_element_len(element, field, bytes.len() / unit)?;
        } else if bytes.len() != room {
            return Err(shape_error(format!(
                "an element of field `{}` takes {room} bytes, the sample has {}",
                spec.name(),
                bytes.len()
            )));
        }
        self.bytes_mut(field)[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// The group of the batch, in an order of groups.
    #[doc(hidden)]
    pub fn group(&self) -> Option<usize> {
        self.slot.group().map(usize::from)
    }

    fn too_long(&self, field: usize, len: usize, more: &str) -> Error {
        let spec = &self.slot.plan.spec.fields()[field];
        let (max, _) = self.slot.most(field);
        let all = spec.dims().first().copied();
        match self.slot.group().filter(|_| all != Some(max)) {
            Some(group) => shape_error(format!(
                "field `{}` takes at most {max} in a batch of group {group}, but the sample has \
                 {len}: the order was made with another length",
                spec.name()
            )),
            None => shape_error(format!(
                "field `{}` takes at most {max}, the sample has {len}{more}",
                spec.name()
            )),
        }
    }

    /// Zeroes a field and its length.
    #[doc(hidden)]
    pub fn clear(&mut self, field: usize) {
        self.bytes_mut(field).fill(0);
        self.clear_len(field);
        self.written &= !(1 << field);
    }

    /// Sets the length of an `UpTo` field to 0, without touching its bytes.
    #[doc(hidden)]
    pub fn clear_len(&mut self, field: usize) {
        if let Some(offset) = self.slot.plan.layout.fields()[field].lens {
            self.put(offset + self.row as usize * 8, &0_u64.to_ne_bytes());
        }
    }

    /// Sets the row's sample id and its status: real or padding, by its position.
    #[doc(hidden)]
    pub fn mark(&mut self, id: u64) {
        let valid = self.row < self.slot.valid.load(Ordering::Relaxed);
        let status = if valid { Status::Real } else { Status::Padding };
        let layout = &self.slot.plan.layout;
        let ids = layout.ids();
        let statuses = layout.status();
        self.put(ids + self.row as usize * 8, &id.to_ne_bytes());
        self.put(statuses + self.row as usize, &[status as u8]);
    }

    /// The same row with access to the fields of `mask` only: a decoder sees its own fields.
    #[doc(hidden)]
    pub fn only(&mut self, mask: u64) -> Row<'_> {
        Row {
            allowed: self.allowed & mask,
            ..*self
        }
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let ptr = self.slot.at(offset, bytes.len());
        // SAFETY: in bounds; `lens`, `ids` and `status` of a row are written only through its
        // unique token, and no reference to them exists before the slot is full.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), ptr, bytes.len()) }
    }
}

/// Several fields of a row at once, each at most once: [`Row::split`].
pub struct RowFields<'a> {
    row: Row<'a>,
    written: &'a mut u64,
    taken: u64,
}

impl<'a> RowFields<'a> {
    /// The elements of field `field`, like [`Row::slice_mut`].
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the field's dtype, or the field was taken before.
    pub fn take<T: Element>(&mut self, field: impl FieldKey) -> Result<&'a mut [T]> {
        let field = field.index_in(self.row.spec())?;
        check_dtype::<T>(&self.row.slot.plan.spec.fields()[field])?;
        take_once(&mut self.taken, field, &self.row.slot.plan.spec)?;
        let bytes: *mut [u8] = self.row.bytes_mut(field);
        *self.written |= 1 << field;
        // SAFETY: arrays of different fields do not overlap (tested in `tensor`), and each field is
        // taken once, so the borrow is exclusive. It lives as long as the mutable borrow of the
        // row.
        Ok(bytemuck::cast_slice_mut(unsafe { &mut *bytes }))
    }
}

pub(super) fn shape_error(message: String) -> Error {
    Error::new(ErrorKind::Shape, Stage::Batch, message)
}

fn check_dtype<T: Element>(field: &Field) -> Result<()> {
    if field.dtype().is_seen_as::<T>() {
        return Ok(());
    }
    Err(shape_error(format!(
        "field `{}` holds {}, not {}",
        field.name(),
        field.dtype(),
        T::DTYPE
    )))
}

/// Maximum length of the elements of a list, if they vary.
fn element_len(field: &Field) -> Option<usize> {
    match field.shape() {
        Shape::UpTo { inner, .. } => inner.first().copied().filter(|len| *len > 0),
        Shape::Fixed(_) => None,
    }
}

fn take_once(taken: &mut u64, field: usize, spec: &Spec) -> Result<()> {
    if std::mem::replace(taken, *taken | 1 << field) & (1 << field) == 0 {
        return Ok(());
    }
    Err(shape_error(format!(
        "field `{}` is taken twice",
        spec.fields()[field].name()
    )))
}

fn wrong_bytes(field: &Field, len: usize) -> Error {
    if field.is_up_to() && len < field.row_bytes() {
        let dtype = field.dtype();
        return shape_error(format!(
            "field `{}` takes whole rows of {dtype}, the sample has {len} bytes",
            field.name()
        ));
    }
    let most = if field.is_up_to() { "at most " } else { "" };
    shape_error(format!(
        "field `{}` takes {most}{} bytes, the sample has {len}",
        field.name(),
        field.row_bytes()
    ))
}

/// A whole batch before delivery, for `.map_batch` to change in place.
///
/// Bytes after the length of an `UpTo` field's row become 0 again when the transforms have
/// returned.
pub struct BatchMut<'a> {
    filled: &'a mut Filled,
    /// Bit mask of the fields that may have been written.
    written: u64,
}

impl BatchMut<'_> {
    /// Number of rows in the batch.
    #[allow(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        self.filled.rows()
    }

    /// Number of leading rows that hold samples of the epoch; the others fill up the batch.
    pub fn valid(&self) -> usize {
        self.filled.valid()
    }

    /// Batch index in the epoch.
    pub fn index(&self) -> u64 {
        self.filled.ticket().batch
    }

    /// The fields.
    pub fn spec(&self) -> &Spec {
        self.filled.spec()
    }

    /// Sample ids, one per row.
    pub fn ids(&self) -> &[u64] {
        self.filled.ids()
    }

    /// Index of the field `name`.
    ///
    /// Errors: [`ErrorKind::Shape`] if the spec has no such field.
    pub fn index_of(&self, name: &str) -> Result<usize> {
        name.index_in(self.filled.spec())
    }

    /// Lengths (first dimensions) of an `UpTo` field, one per row; `None` for a fixed shape and for
    /// a packed field.
    ///
    /// No value may exceed the field's maximum; otherwise the batch gets an error of
    /// [`ErrorKind::Shape`].
    pub fn lens_mut(&mut self, field: usize) -> Option<&mut [u64]> {
        self.written |= 1 << field;
        let layout = self.filled.slot().plan.layout.fields()[field];
        let offset = layout.lens.filter(|_| layout.packed.is_none())?;
        let len = 8 * self.filled.rows();
        Some(bytemuck::cast_slice_mut(
            self.filled.bytes_at_mut(offset, len),
        ))
    }

    /// Bounds of a packed field's rows: row `i` has the elements `offsets[i]..offsets[i + 1]` of
    /// the first dimension. `None` for other fields.
    pub fn offsets(&self, field: usize) -> Option<&[u64]> {
        self.filled.offsets(field)
    }

    /// Dimensions of field `field`, rows first. For an `UpTo` field, the second is the maximum (in
    /// an order of groups, the maximum of the batch's group). The first dimension of a packed field
    /// counts the elements of all rows.
    pub fn shape(&self, field: usize) -> Vec<usize> {
        let spec = &self.spec().fields()[field];
        if spec.is_packed() {
            return spec.packed_shape(self.filled.used(field));
        }
        let mut shape = vec![self.len()];
        shape.extend(spec.dims_in(self.filled.slot().group()));
        if spec.is_up_to() {
            shape[1] = self.filled.slot().most(field).0;
        }
        shape
    }

    /// All rows of field `field`, shape `[len, …]`, dense.
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the field's dtype.
    pub fn slice_mut<T: Element>(&mut self, field: impl FieldKey) -> Result<&mut [T]> {
        let field = field.index_in(self.spec())?;
        check_dtype::<T>(&self.filled.spec().fields()[field])?;
        Ok(bytemuck::cast_slice_mut(self.bytes_mut(field)))
    }

    /// The bytes of all rows of field `field`, dense, for code that knows the dtype only at run
    /// time.
    pub fn bytes_mut(&mut self, field: usize) -> &mut [u8] {
        self.written |= 1 << field;
        self.filled.array_mut(field)
    }

    /// The rows of field `field`, one slice each.
    ///
    /// Errors: those of [`slice_mut`](Self::slice_mut); [`ErrorKind::Shape`] for a packed field,
    /// whose rows vary in length.
    pub fn rows_mut<T: Element>(
        &mut self,
        field: impl FieldKey,
    ) -> Result<std::slice::ChunksExactMut<'_, T>> {
        let field = field.index_in(self.spec())?;
        let spec = &self.filled.spec().fields()[field];
        if spec.is_packed() {
            return Err(shape_error(format!(
                "the rows of the packed field `{}` differ in length",
                spec.name()
            )));
        }
        let rows = self.len();
        let values = self.slice_mut::<T>(field)?;
        let width = values.len() / rows.max(1);
        Ok(values.chunks_exact_mut(width.max(1)))
    }

    /// Several fields at once, with their lengths.
    pub fn split(&mut self) -> BatchFields<'_> {
        BatchFields {
            batch: BatchMut {
                filled: self.filled,
                written: 0,
            },
            written: &mut self.written,
            taken: [0; 2],
        }
    }

    /// Checks the length of each field that was written, and zeroes the bytes after it.
    ///
    /// Errors: [`ErrorKind::Shape`] for a length above the maximum.
    #[doc(hidden)]
    pub fn pad(&mut self) -> Result<()> {
        for field in
            (0..self.spec().fields().len()).filter(|field| self.written & (1 << field) != 0)
        {
            let spec = &self.filled.slot().plan.spec.fields()[field];
            if !spec.is_up_to() || spec.is_packed() {
                continue;
            }
            let (max, unit) = self.filled.slot().most(field);
            let row_bytes = max * unit;
            for row in 0..self.len() {
                let len = self.filled.lens(field).map_or(0, |lens| lens[row]);
                if len > max as u64 {
                    let name = self.spec().fields()[field].name();
                    return Err(shape_error(format!(
                        "row {row} of field `{name}` has length {len}, but the maximum is {max}"
                    )));
                }
                let unused = row_bytes * row + unit * len as usize..row_bytes * (row + 1);
                self.filled.array_mut(field)[unused].fill(0);
            }
        }
        self.written = 0;
        Ok(())
    }
}

/// Mutable access to several fields of a batch at the same time. Each can be taken once. Made by
/// [`BatchMut::split`].
pub struct BatchFields<'a> {
    batch: BatchMut<'a>,
    written: &'a mut u64,
    /// Bit masks of the fields whose elements, and lengths, were taken.
    taken: [u64; 2],
}

impl<'a> BatchFields<'a> {
    /// All rows of field `field`, like [`BatchMut::slice_mut`].
    ///
    /// Errors: [`ErrorKind::Shape`] if `T` is not the field's dtype, or the field was taken before.
    pub fn take<T: Element>(&mut self, field: impl FieldKey) -> Result<&'a mut [T]> {
        let field = field.index_in(self.batch.spec())?;
        check_dtype::<T>(&self.batch.spec().fields()[field])?;
        take_once(&mut self.taken[0], field, self.batch.spec())?;
        *self.written |= 1 << field;
        let bytes: *mut [u8] = self.batch.bytes_mut(field);
        // SAFETY: arrays of different fields, and lengths, do not overlap (tested in `tensor`), and
        // each is taken once, so the borrow is exclusive. It lives as long as the mutable borrow of
        // the batch.
        Ok(bytemuck::cast_slice_mut(unsafe { &mut *bytes }))
    }

    /// The lengths of field `field`, like [`BatchMut::lens_mut`].
    ///
    /// Errors: [`ErrorKind::Shape`] if the lengths were taken before.
    pub fn take_lens(&mut self, field: impl FieldKey) -> Result<Option<&'a mut [u64]>> {
        let field = field.index_in(self.batch.spec())?;
        take_once(&mut self.taken[1], field, self.batch.spec())?;
        *self.written |= 1 << field;
        let lens: Option<*mut [u64]> = self.batch.lens_mut(field).map(std::ptr::from_mut);
        // SAFETY: as in `take`.
        Ok(lens.map(|lens| unsafe { &mut *lens }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::slot::{Ticket, tests::pool};
    use super::*;

    #[test]
    fn bytes_that_do_not_fit_a_field_are_a_shape_error_naming_it() {
        let (_pool, _full, free) = pool(1, 1);
        let mut rows = free.recv().unwrap().begin(Ticket::default(), 1, 1);
        let mut row = rows.row();
        let errors = [
            (
                row.copy_from(0, &[0; 14]).unwrap_err(),
                "`image` takes 15 bytes, the sample has 14",
            ),
            (
                row.copy_from(2, &[0; 10]).unwrap_err(),
                "`tokens` takes at most 4, the sample has 5",
            ),
            (
                row.copy_from(2, &[0; 3]).unwrap_err(),
                "`tokens` takes whole rows of u16, the sample has 3 bytes",
            ),
            (row.set_len(0, 1).unwrap_err(), "`image` has a fixed shape"),
            (
                row.slice_mut::<f32>(0).map(|_| ()).unwrap_err(),
                "`image` holds u8, not f32",
            ),
            (
                row.index_of("mask").unwrap_err(),
                "no field `mask`: the fields are image, label, tokens",
            ),
        ];
        for (error, message) in errors {
            assert_eq!(error.kind(), ErrorKind::Shape);
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
