//! Shape of a batch: dtypes, fields, the spec of a sample, and the layout of a slot. Pure
//! arithmetic.
//!
//! ```text
//! slot:  | image [B, 224, 224, 3] u8 | label [B] i64 | lens | ids [B] u64 | status [B] u8 |
//!          ^ arrays start at 256 bytes; at 4096 if they have 512 bytes or more, so that O_DIRECT
//!            can read rows in place if their length is a multiple of the storage's alignment
//! ```
//!
//! In an order of groups, an `UpTo` field may have a smaller maximum in the batches of a group. The
//! rows of such a batch are dense, with the stride of that maximum. The array has room for the
//! largest batch.
//!
//! Rows of a *packed* field have no stride: they are adjacent. Row `i` extends from element
//! `offsets[i]` of the first dimension to `offsets[i + 1]`. If the index has the lengths, the
//! offsets are their sums, known before any byte is read. Otherwise each row has room for its
//! maximum at first, and the rows are moved together when all are filled.

use feedline_base::PAGE;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
pub use half::{bf16, f16};
use std::fmt;

/// Element type of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the field's common ones")]
pub enum DType {
    /// A byte as in the source: 0 is false, 1 is true. Rust sees it as `u8`.
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    BF16,
    F32,
    F64,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// The usual lower-case name (`u8`, `f32`, `bf16`, …).
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    /// DLPack's type code: integer, unsigned integer, float, and so on.
    #[doc(hidden)]
    pub const fn dlpack_code(self) -> u8 {
        match self {
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => 0,
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => 1,
            Self::F16 | Self::F32 | Self::F64 => 2,
            Self::BF16 => 4,
            Self::Bool => 6,
        }
    }

    /// Whether elements may be viewed as `T`. A `Bool` is viewed as `u8`, since not every byte is a
    /// valid `bool`.
    #[doc(hidden)]
    pub fn is_seen_as<T: Element>(self) -> bool {
        self == T::DTYPE || (self == Self::Bool && T::DTYPE == Self::U8)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Normalises a pixel value, before rounding to the field's dtype: scaled to 0..1, minus the mean,
/// divided by the standard deviation.
///
/// Three operations in `f32`, each rounded to nearest, ties to even; none is fused or replaced by a
/// reciprocal. The results equal torchvision's `ToTensor` and `Normalize`. Decoders and devices
/// share this rule, so either may normalise.
#[doc(hidden)]
pub fn normalized(pixel: u8, mean: f32, std: f32) -> f32 {
    (f32::from(pixel) / 255.0 - mean) / std
}

mod sealed {
    pub trait Sealed {}
}

/// Rust types that a field can be viewed as. Sealed: every bit pattern must be a value.
pub trait Element: bytemuck::Pod + sealed::Sealed {
    /// The dtype of this Rust type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust { const DTYPE: DType = DType::$dtype; }
    )*};
}
elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f16 => F16, bf16 => BF16, f32 => F32, f64 => F64,
}

/// Shape of one row of a field, without the batch dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Every sample has exactly these dimensions; an empty list is a scalar.
    Fixed(Vec<usize>),
    /// The first dimension varies per sample, up to `max`.
    ///
    /// Rows are padded with zeros, and `lens` gives the true length. A longer sample is an error.
    UpTo {
        /// Maximum first dimension.
        max: usize,
        /// The other dimensions.
        inner: Vec<usize>,
    },
}

/// A named part of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    name: String,
    dtype: DType,
    shape: Shape,
    /// How rows are packed; `None` for rows with a stride.
    packed: Option<Packing>,
    /// Shape of a row in the batches of each group, if it depends on the group; `shape` is then the
    /// largest of them.
    of_groups: Vec<Vec<usize>>,
}

/// How the positions of a packed field's rows are determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Packing {
    /// Maximum bytes of a batch, if declared.
    #[doc(hidden)]
    pub batch_bytes: Option<usize>,
    /// Whether each row takes exactly its length in the index. Otherwise each row takes the field's
    /// maximum until the batch is full.
    #[doc(hidden)]
    pub by_index: bool,
}

impl Field {
    /// A field with equal shapes of all rows; an empty shape is a scalar.
    pub fn fixed(name: impl Into<String>, dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: Shape::Fixed(shape.into()),
            packed: None,
            of_groups: Vec::new(),
        }
    }

    /// A field whose row shape depends on the batch's group: `shapes` has the shape for each group.
    #[doc(hidden)]
    pub fn in_groups(name: impl Into<String>, dtype: DType, shapes: Vec<Vec<usize>>) -> Self {
        let largest = shapes
            .iter()
            .max_by_key(|shape| {
                shape
                    .iter()
                    .fold(1, |all: usize, dim| all.saturating_mul(*dim))
            })
            .cloned()
            .unwrap_or_default();
        Self {
            of_groups: shapes,
            ..Self::fixed(name, dtype, largest)
        }
    }

    /// A field of vectors with at most `max` elements.
    pub fn up_to(name: impl Into<String>, dtype: DType, max: usize) -> Self {
        Self::rows_up_to(name, dtype, max, [])
    }

    /// A field of at most `max` rows of the shape `row`, such as 80 mel bands for each frame of a
    /// clip.
    pub fn rows_up_to(
        name: impl Into<String>,
        dtype: DType,
        max: usize,
        row: impl Into<Vec<usize>>,
    ) -> Self {
        Self {
            shape: Shape::UpTo {
                max,
                inner: row.into(),
            },
            ..Self::fixed(name, dtype, [])
        }
    }

    /// A `u8` field of byte strings with at most `max` bytes, adjacent in the batch without
    /// padding.
    ///
    /// If `DatasetExt::lengths` are known, and the field is
    /// the only output of its decoder, each row has exactly that length. Then substitutes stay
    /// empty: the decoder is not called for them.
    ///
    /// See `FieldView::offsets`. A batch reserves rows × `max` bytes.
    /// If `batch_bytes` is declared, which needs known lengths, it reserves and allows only that
    /// many.
    pub fn packed(name: impl Into<String>, max: usize, batch_bytes: Option<usize>) -> Self {
        Self {
            packed: Some(Packing {
                batch_bytes,
                by_index: true,
            }),
            ..Self::up_to(name, DType::U8, max)
        }
    }

    #[doc(hidden)]
    pub fn packing(&self) -> Option<Packing> {
        self.packed
    }

    #[doc(hidden)]
    pub fn set_packing(&mut self, packing: Packing) {
        self.packed = Some(packing);
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same field under another name.
    #[must_use]
    pub fn renamed(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of one row.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Dimensions of one row as stored; for `UpTo` the first is the maximum. For pictures in
    /// buckets, the largest shape.
    pub fn dims(&self) -> Vec<usize> {
        match &self.shape {
            Shape::Fixed(dims) => dims.clone(),
            Shape::UpTo { max, inner } => {
                std::iter::once(*max).chain(inner.iter().copied()).collect()
            }
        }
    }

    /// Dimensions of one row in a batch of `group`. An `UpTo` field has its overall maximum here,
    /// even if the group has a smaller one.
    #[doc(hidden)]
    pub fn dims_in(&self, group: Option<u8>) -> Vec<usize> {
        let of_group = group.and_then(|group| self.of_groups.get(usize::from(group)));
        of_group.cloned().unwrap_or_else(|| self.dims())
    }

    /// Whether the shape depends on the group.
    #[doc(hidden)]
    pub fn varies_by_group(&self) -> bool {
        !self.of_groups.is_empty()
    }

    /// Whether rows are adjacent, without padding.
    pub fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// Bytes reserved for `rows` rows of a packed field; `None` for a field with a stride.
    fn packed_room(&self, rows: usize) -> Option<usize> {
        let declared = self.packed?.batch_bytes;
        Some(
            declared
                .unwrap_or(usize::MAX)
                .min(self.row_bytes().saturating_mul(rows)),
        )
    }

    /// Whether row lengths vary.
    pub fn is_up_to(&self) -> bool {
        matches!(self.shape, Shape::UpTo { .. })
    }

    /// Bytes per element of the first dimension, for an `UpTo` field; bytes per row, for other
    /// fields.
    #[doc(hidden)]
    pub fn unit_bytes(&self) -> usize {
        match &self.shape {
            Shape::UpTo { max, .. } => self.row_bytes() / max,
            Shape::Fixed(_) => self.row_bytes(),
        }
    }

    /// The array shape of a packed field whose rows have `bytes` bytes together.
    #[doc(hidden)]
    pub fn packed_shape(&self, bytes: usize) -> Vec<usize> {
        let mut dims = self.dims();
        dims[0] = bytes / self.unit_bytes();
        dims
    }

    /// Bytes of one row as stored; `None` if they overflow.
    fn checked_row_bytes(&self) -> Option<usize> {
        // Does not use `dims()`, which allocates: this runs for each sample.
        let (first, rest) = match &self.shape {
            Shape::Fixed(dims) => (1, dims),
            Shape::UpTo { max, inner } => (*max, inner),
        };
        rest.iter()
            .try_fold(self.dtype.size().checked_mul(first)?, |bytes, dim| {
                bytes.checked_mul(*dim)
            })
    }

    /// Bytes of one row as stored.
    pub fn row_bytes(&self) -> usize {
        self.checked_row_bytes().unwrap_or(usize::MAX)
    }
}

/// The fields of a sample, with unique names, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spec {
    fields: Vec<Field>,
}

impl Spec {
    /// Maximum fields of a sample, so that a bit set of them fits a word.
    pub const FIELDS_MAX: usize = 64;

    /// Checks names and sizes.
    ///
    /// Errors: [`ErrorKind::Config`] for no field, a duplicate or empty name, too many fields, or a
    /// row of 0 bytes or more than 2^47.
    pub fn new(fields: Vec<Field>) -> Result<Self> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Build, message));
        if fields.is_empty() || fields.len() > Self::FIELDS_MAX {
            return bad(format!(
                "a sample needs 1 to {} fields, not {}",
                Self::FIELDS_MAX,
                fields.len()
            ));
        }
        for (index, field) in fields.iter().enumerate() {
            if field.name.is_empty() {
                return bad(format!("field {index} has no name: name the column"));
            }
            if fields[..index].iter().any(|other| other.name == field.name) {
                return bad(format!("two fields are called `{}`", field.name));
            }
            match field.checked_row_bytes() {
                Some(bytes) if bytes > 0 && bytes < 1 << 47 => {}
                _ => {
                    return bad(format!(
                        "rows of field `{}` have an invalid size; use 1 to 2^47 bytes",
                        field.name
                    ));
                }
            }
        }
        Ok(Self { fields })
    }

    /// The fields in order.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Index of the field named `name`.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }
}

/// A field of a [`Spec`]: its name, or its index, which costs no search. Sealed.
pub trait FieldKey: sealed::Sealed + Copy {
    /// The index.
    ///
    /// Errors: [`ErrorKind::Shape`] if the spec has no such field.
    fn index_in(self, spec: &Spec) -> Result<usize>;
}

impl sealed::Sealed for &str {}
impl sealed::Sealed for usize {}

impl FieldKey for &str {
    fn index_in(self, spec: &Spec) -> Result<usize> {
        spec.index_of(self).ok_or_else(|| no_field(spec, self))
    }
}

impl FieldKey for usize {
    #[inline]
    fn index_in(self, spec: &Spec) -> Result<usize> {
        if self < spec.fields.len() {
            Ok(self)
        } else {
            Err(no_field(spec, &self.to_string()))
        }
    }
}

#[cold]
fn no_field(spec: &Spec, key: &str) -> Error {
    let names: Vec<_> = spec.fields.iter().map(Field::name).collect();
    let message = format!("no field `{key}`: the fields are {}", names.join(", "));
    Error::new(ErrorKind::Shape, Stage::Batch, message)
}

/// Encoding of a dataset's field, before decoding.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// Elements as in memory (native byte order), with this dtype and shape.
    Raw {
        /// Element type.
        dtype: DType,
        /// Shape of one sample.
        shape: Shape,
    },
    /// An encoded picture (JPEG, PNG, …). Its bytes tell the format.
    Image,
    /// Bytes for a user's decoder.
    Bytes,
    /// Several byte strings in one field, framed as [`Many`](crate::decode::Many) says. Pictures
    /// and texts of such a list are decoded by [`Each`](crate::decode::Each).
    List {
        /// Whether the elements are encoded pictures.
        pictures: bool,
        /// Maximum number of elements; a longer list is an error of its sample.
        max: usize,
    },
}

impl Encoding {
    /// Whether a field holds encoded pictures: one, or a list of them.
    pub fn has_pictures(&self) -> bool {
        matches!(self, Self::Image | Self::List { pictures: true, .. })
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raw {
                dtype,
                shape: Shape::Fixed(dims),
            } => write!(f, "{dtype} {dims:?}"),
            Self::Raw {
                dtype,
                shape: Shape::UpTo { max, inner },
            } if inner.is_empty() => {
                write!(f, "{dtype} up to [{max}]")
            }
            Self::Raw {
                dtype,
                shape: Shape::UpTo { max, inner },
            } => write!(f, "{dtype} up to {max} of {inner:?}"),
            Self::Image => f.write_str("an encoded picture"),
            Self::Bytes => f.write_str("bytes"),
            Self::List {
                pictures: true,
                max,
            } => write!(f, "a list of up to {max} encoded pictures"),
            Self::List { max, .. } => write!(f, "a list of up to {max} byte strings"),
        }
    }
}

/// A field as a dataset delivers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedField {
    /// The name; a raw field keeps it in the batch.
    pub name: String,
    /// Encoding of the bytes.
    pub encoding: Encoding,
}

impl EncodedField {
    /// A field of raw bytes, copied unchanged.
    pub fn raw(field: Field) -> Self {
        Self {
            name: field.name,
            encoding: Encoding::Raw {
                dtype: field.dtype,
                shape: field.shape,
            },
        }
    }

    /// An encoded picture.
    pub fn image(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            encoding: Encoding::Image,
        }
    }

    /// Opaque bytes.
    pub fn bytes(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            encoding: Encoding::Bytes,
        }
    }

    /// At most `max` encoded pictures.
    pub fn images(name: impl Into<String>, max: usize) -> Self {
        Self {
            name: name.into(),
            encoding: Encoding::List {
                pictures: true,
                max,
            },
        }
    }

    /// At most `max` byte strings.
    pub fn list(name: impl Into<String>, max: usize) -> Self {
        Self {
            name: name.into(),
            encoding: Encoding::List {
                pictures: false,
                max,
            },
        }
    }

    /// Bytes per element of the first dimension; 1 for encoded bytes.
    #[doc(hidden)]
    pub fn unit_bytes(&self) -> u64 {
        let (dtype, inner) = match &self.encoding {
            Encoding::Raw {
                dtype,
                shape: Shape::UpTo { inner, .. },
            } => (dtype, &inner[..]),
            Encoding::Raw {
                dtype,
                shape: Shape::Fixed(dims),
            } => (dtype, dims.get(1..).unwrap_or_default()),
            _ => return 1,
        };
        inner
            .iter()
            .fold(dtype.size() as u64, |bytes, dim| {
                bytes.saturating_mul(*dim as u64)
            })
            .max(1)
    }

    /// Bytes of every sample, if it is raw with one shape.
    pub(crate) fn fixed_bytes(&self) -> Option<u64> {
        match &self.encoding {
            Encoding::Raw {
                shape: Shape::Fixed(dims),
                ..
            } => Some(
                dims.first()
                    .map_or(1, |first| *first as u64)
                    .saturating_mul(self.unit_bytes()),
            ),
            _ => None,
        }
    }

    /// The batch field of raw bytes.
    pub fn as_raw(&self) -> Option<Field> {
        match &self.encoding {
            Encoding::Raw { dtype, shape } => Some(Field {
                shape: shape.clone(),
                ..Field::fixed(&self.name, *dtype, [])
            }),
            _ => None,
        }
    }
}

/// Alignment of every array in a slot, as GPU kernels with vector loads need.
pub(crate) const ARRAY_ALIGN: usize = 256;
/// Arrays of at least this many bytes start at a page. This is the smallest unit of O_DIRECT reads.
const PAGE_FROM: usize = 512;

/// The properties that differ between the batches of an order's groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct GroupShapes {
    /// Rows per batch of each group; 0 for a group without batches.
    #[doc(hidden)]
    pub rows: Vec<usize>,
    /// Fields, and the maximum of their first dimension in the batches of each group.
    #[doc(hidden)]
    pub most: Vec<(String, Vec<usize>)>,
}

impl GroupShapes {
    /// Errors: [`ErrorKind::Config`] for a field that `spec` lacks or that does not fit.
    #[doc(hidden)]
    pub fn check(&self, spec: &Spec) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Build, message));
        for Field {
            name, of_groups, ..
        } in spec.fields.iter().filter(|field| field.varies_by_group())
        {
            if !(1..=of_groups.len()).contains(&self.rows.len()) {
                return bad(format!(
                    "field `{name}` has {} shapes, but the order has {} groups: group the order \
                     by the shapes",
                    of_groups.len(),
                    self.rows.len()
                ));
            }
        }
        for (name, most) in &self.most {
            let Some(field) = spec.index_of(name).map(|index| &spec.fields[index]) else {
                let names: Vec<_> = spec.fields.iter().map(Field::name).collect();
                return bad(format!(
                    "the groups name an unknown field `{name}`; the fields are {}",
                    names.join(", ")
                ));
            };
            let Shape::UpTo { max, .. } = field.shape else {
                return bad(format!(
                    "field `{name}` has a fixed shape: groups cannot shorten it"
                ));
            };
            if field.is_packed() {
                return bad(format!(
                    "field `{name}` is packed, and has no padding that groups could shorten"
                ));
            }
            if most.len() < self.rows.len() {
                return bad(format!(
                    "{} lengths of field `{name}` for {} groups: give one for each",
                    most.len(),
                    self.rows.len()
                ));
            }
            if let Some((group, most)) = most
                .iter()
                .enumerate()
                .find(|(_, most)| !(1..=max).contains(*most))
            {
                return bad(format!(
                    "field `{name}` has up to {most} in group {group}; 1 to {max} are possible"
                ));
            }
        }
        Ok(())
    }

    /// Bytes per row of `field` in the batches of each group, if they differ.
    fn row_bytes(&self, field: &Field) -> Option<Box<[usize]>> {
        if field.varies_by_group() && !self.rows.is_empty() {
            return Some(
                field
                    .of_groups
                    .iter()
                    .map(|dims| dims.iter().product::<usize>() * field.dtype.size())
                    .collect(),
            );
        }
        let (_, most) = self.most.iter().find(|(name, _)| name == field.name())?;
        Some(most.iter().map(|most| most * field.unit_bytes()).collect())
    }
}

/// Byte offsets of the arrays in a slot of `rows` rows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Layout {
    rows: usize,
    fields: Vec<FieldLayout>,
    /// Fields whose row stride differs between groups, and that stride in bytes in a batch of each
    /// group.
    of_groups: Vec<(usize, Box<[usize]>)>,
    ids: usize,
    status: usize,
    bytes: usize,
}

/// Position of a field's array in the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct FieldLayout {
    /// Byte offset of row 0.
    #[doc(hidden)]
    pub offset: usize,
    /// Row stride in bytes; rows are dense. 0 for a packed field. The maximum over all
    /// [groups](Layout::row_bytes).
    #[doc(hidden)]
    pub row_bytes: usize,
    /// Byte offset of the `u64` lengths of an `UpTo` field.
    #[doc(hidden)]
    pub lens: Option<usize>,
    /// Packed rows; `None` for a field with a stride.
    #[doc(hidden)]
    pub packed: Option<Packed>,
}

/// Position of a packed field's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Packed {
    /// Byte offset of the `u64` offsets: one per row, plus one.
    #[doc(hidden)]
    pub offsets: usize,
    /// Maximum bytes of all rows together.
    pub(crate) room: usize,
    /// Bytes per element of the first dimension: offsets and lengths count these.
    pub(crate) unit: usize,
}

impl Layout {
    /// Lays out the arrays of `spec` for `rows` rows. Errors: [`ErrorKind::Config`] if the size
    /// overflows.
    #[doc(hidden)]
    pub fn new(spec: &Spec, rows: usize) -> Result<Self> {
        Self::without(spec, rows, &[], &GroupShapes::default())
    }

    /// Like [`new`](Self::new), but the fields numbered `absent` take no space: their rows have no
    /// bytes.
    #[doc(hidden)]
    pub fn without(
        spec: &Spec,
        rows: usize,
        absent: &[usize],
        groups: &GroupShapes,
    ) -> Result<Self> {
        let overflow = || {
            Error::new(
                ErrorKind::Config,
                Stage::Build,
                format!("a slot of {rows} rows exceeds the address space"),
            )
        };
        let mut end = 0_usize;
        let mut place = |bytes: Option<usize>| -> Result<usize> {
            let bytes = bytes
                .filter(|bytes| *bytes < 1 << 47)
                .ok_or_else(overflow)?;
            let offset = end.next_multiple_of(if bytes >= PAGE_FROM {
                PAGE
            } else {
                ARRAY_ALIGN
            });
            end = offset.checked_add(bytes).ok_or_else(overflow)?;
            Ok(offset)
        };
        let mut fields = Vec::with_capacity(spec.fields.len());
        let mut of_groups = Vec::new();
        for (index, field) in spec.fields.iter().enumerate() {
            let room = field.packed_room(rows);
            let row_bytes = if room.is_some() || absent.contains(&index) {
                0
            } else {
                field.row_bytes()
            };
            let strides = groups.row_bytes(field).filter(|_| row_bytes > 0);
            let most = strides.as_ref().map(|strides| {
                let bytes = groups
                    .rows
                    .iter()
                    .zip(strides)
                    .map(|(rows, bytes)| rows.saturating_mul(*bytes));
                bytes.max().unwrap_or(0)
            });
            of_groups.extend(strides.map(|strides| (index, strides)));
            let offset = place(room.or(most).or(row_bytes.checked_mul(rows)))?;
            let packed = room.map(|room| Packed {
                offsets: 0,
                room,
                unit: field.unit_bytes(),
            });
            fields.push(FieldLayout {
                offset,
                row_bytes,
                lens: None,
                packed,
            });
        }
        for (field, layout) in spec.fields.iter().zip(&mut fields) {
            if field.is_up_to() {
                layout.lens = Some(place(rows.checked_mul(8))?);
            }
            if let Some(packed) = &mut layout.packed {
                packed.offsets = place(
                    rows.checked_add(1)
                        .and_then(|offsets| offsets.checked_mul(8)),
                )?;
            }
        }
        let ids = place(rows.checked_mul(8))?;
        let status = place(Some(rows))?;
        Ok(Self {
            rows,
            fields,
            of_groups,
            ids,
            status,
            bytes: end.next_multiple_of(PAGE),
        })
    }

    /// Row stride in bytes of field `field` in a batch of `group`; 0 for a packed field.
    #[doc(hidden)]
    pub fn row_bytes(&self, field: usize, group: Option<u8>) -> usize {
        group
            .and_then(|group| {
                let (_, strides) = self
                    .of_groups
                    .iter()
                    .find(|(differs, _)| *differs == field)?;
                strides.get(usize::from(group)).copied()
            })
            .unwrap_or(self.fields[field].row_bytes)
    }

    /// Whether the size of an array may differ from one full batch to another.
    #[doc(hidden)]
    pub fn varies(&self) -> bool {
        !self.of_groups.is_empty() || self.fields.iter().any(|field| field.packed.is_some())
    }

    /// Rows of the slot.
    #[doc(hidden)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The arrays of the fields, in the order of the spec.
    #[doc(hidden)]
    pub fn fields(&self) -> &[FieldLayout] {
        &self.fields
    }

    /// Byte offset of the `u64` sample ids.
    #[doc(hidden)]
    pub fn ids(&self) -> usize {
        self.ids
    }

    /// Byte offset of the status bytes.
    #[doc(hidden)]
    pub fn status(&self) -> usize {
        self.status
    }

    /// Bytes of the slot, a multiple of the page size.
    #[doc(hidden)]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_field() -> impl Strategy<Value = Field> {
        let dtype = prop_oneof![
            Just(DType::U8),
            Just(DType::I64),
            Just(DType::F32),
            Just(DType::BF16)
        ];
        (
            dtype,
            prop::collection::vec(1_usize..70, 0..3),
            0..4,
            1_usize..5000,
        )
            .prop_map(|(dtype, dims, kind, max)| match kind {
                0 => Field::up_to("x", dtype, max),
                1 => Field::packed("x", max, None),
                2 => Field::packed("x", max, Some(3 * max)),
                _ => Field::fixed("x", dtype, dims),
            })
    }

    proptest! {
        #[test]
        fn slot_arrays_are_aligned_and_never_overlap(fields in prop::collection::vec(any_field(), 1..6), rows in 1_usize..600) {
            let fields = fields.into_iter().enumerate().map(|(i, f)| f.renamed(format!("f{i}"))).collect();
            let spec = Spec::new(fields).unwrap();
            let layout = Layout::new(&spec, rows).unwrap();
            let mut spans: Vec<(usize, usize)> = vec![(layout.ids(), rows * 8), (layout.status(), rows)];
            for field in layout.fields() {
                spans.push((field.offset, field.packed.map_or(field.row_bytes * rows, |packed| packed.room)));
                spans.extend(field.packed.map(|packed| (packed.offsets, (rows + 1) * 8)));
                spans.extend(field.lens.map(|offset| (offset, rows * 8)));
            }
            spans.sort_unstable();
            for pair in spans.windows(2) {
                prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0);
            }
            let (last, bytes) = spans[spans.len() - 1];
            prop_assert!(last + bytes <= layout.bytes());
            for (offset, bytes) in spans {
                prop_assert_eq!(offset % if bytes >= PAGE_FROM { PAGE } else { ARRAY_ALIGN }, 0);
            }
        }
    }

    #[test]
    fn specs_refuse_unstorable_fields() {
        let u8s = |name: &str, dims: Vec<usize>| Field::fixed(name, DType::U8, dims);
        let cases = [
            (vec![], "1 to 64 fields"),
            (vec![u8s("", vec![1])], "no name"),
            (vec![u8s("a", vec![1]), u8s("a", vec![2])], "two fields"),
            (vec![u8s("a", vec![0])], "size"),
            (vec![u8s("a", vec![usize::MAX, 2])], "size"),
        ];
        for (fields, words) in cases {
            let error = Spec::new(fields).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(words), "{error}");
        }
        let spec = Spec::new(vec![u8s("a", vec![1 << 40])]).unwrap();
        assert_eq!(
            Layout::new(&spec, 1 << 30).unwrap_err().kind(),
            ErrorKind::Config
        );
    }
}
