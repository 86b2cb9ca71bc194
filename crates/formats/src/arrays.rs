//! Arrays in files as samples: a sample is a whole array (npy, npz), or a row of its first axis
//! (npy, npz, safetensors).
//!
//! ```text
//! samples:  file k ─► array ─► field of sample k            rows:  files ─► arrays one after the other ─► row k
//! ```
//!
//! Limits: arrays are dense and in C order. Invariants: all arrays of a field have one dtype and,
//! except for dimensions that its rule lets vary, one shape; all rules are checked when the dataset
//! is opened; finding a sample is arithmetic, plus a search over files if rows are samples.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::own;
use feedline_core::dataset::starts::Starts;
use feedline_core::dataset::{Dataset, Framed, Parts, Sizes};
use feedline_core::storage::{Extent, SourceId, Sources};
use feedline_core::tensor::{DType, EncodedField, Encoding, Field, Shape};
use std::sync::Arc;

/// An array in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Array {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    /// Byte offset of the array's data in the file.
    pub(crate) offset: u64,
}

/// How the arrays of a field may differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rule {
    /// No difference.
    #[default]
    Same,
    /// The first dimension varies, up to this maximum.
    UpTo(usize),
    /// All dimensions vary, but not their number. The array is delivered as a vector of at most
    /// this many elements, with its shape in a second field.
    Flat(usize),
}

/// A field: one array from each of several files.
#[derive(Default)]
pub(crate) struct GivenArray {
    pub(crate) name: String,
    /// Index of the first file among the sources; the other files follow.
    pub(crate) base: usize,
    pub(crate) arrays: Vec<Array>,
    pub(crate) rule: Rule,
    /// The rule comes from `*`, not from the field's name. If all shapes are equal, it becomes
    /// `Same`.
    pub(crate) if_varying: bool,
}

/// Dataset of the arrays.
pub(crate) struct Arrays {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    columns: Vec<ArrayColumn>,
    len: u64,
    /// All sizes except `index_bytes`.
    sizes: Sizes,
    /// The check of every array, sample by sample and then column by column. `None`: arrays are not
    /// verified.
    checks: Option<Box<[ArrayCheck]>>,
    /// What a sample is, for messages, and the file pattern that was opened.
    what: String,
    name: String,
}

/// Expected CRC-32 of an array together with the header before it.
#[derive(Clone, Copy)]
pub(crate) struct ArrayCheck {
    /// Length of the header in bytes.
    pub(crate) header: u32,
    pub(crate) crc: u32,
}

struct ArrayColumn {
    field: usize,
    base: usize,
    /// Index of each file's first row, if rows are samples.
    starts: Option<Starts>,
    /// Byte offset of the data in each file.
    offsets: Numbers,
    /// Bytes per sample, for each file.
    bytes: Numbers,
    /// For `flat` fields: the shapes, which fill the next field, and the bytes of one shape.
    shapes: Option<(Box<[i64]>, usize)>,
}

/// List of numbers, compact if all are equal.
enum Numbers {
    Same(u64),
    Each(Box<[u64]>),
}

impl Numbers {
    fn new(numbers: Vec<u64>) -> Self {
        match numbers.first() {
            Some(first) if numbers.iter().all(|number| number == first) => Self::Same(*first),
            _ => Self::Each(numbers.into()),
        }
    }

    fn get(&self, index: usize) -> u64 {
        match self {
            Self::Same(number) => *number,
            Self::Each(numbers) => numbers[index],
        }
    }

    fn heap(&self) -> usize {
        if let Self::Each(numbers) = self {
            size_of_val(&**numbers)
        } else {
            0
        }
    }
}

impl Arrays {
    /// Makes a dataset of files of this `format`, in which each file or each row is a sample.
    ///
    /// Errors: [`ErrorKind::Shape`] for incompatible arrays; [`ErrorKind::Empty`] for arrays
    /// without rows.
    pub(crate) fn of(
        sources: Sources,
        given: Vec<GivenArray>,
        rows: bool,
        format: &str,
        name: String,
    ) -> Result<Self> {
        let arrays = if rows {
            Self::rows(sources, given)?
        } else {
            Self::samples(sources, given)?
        };
        if arrays.len == 0 {
            return Err(
                Error::new(ErrorKind::Empty, Stage::Index, "the arrays have no rows")
                    .with_path(name),
            );
        }
        let what = format!("{}{format}", if rows { "rows of " } else { "" });
        Ok(Self {
            what,
            name,
            ..arrays
        })
    }

    /// Verifies every array on each read. `checks` lists the arrays' checks file by file.
    pub(crate) fn verified(mut self, checks: Vec<ArrayCheck>) -> Self {
        let most = checks
            .chunks(self.columns.len())
            .map(|checks| checks.iter().map(|check| u64::from(check.header)).sum())
            .max()
            .unwrap_or(0);
        self.sizes.sample_bytes_max = self.sizes.sample_bytes_max.saturating_add(most);
        self.checks = Some(checks.into_boxed_slice());
        self
    }

    /// Check of an array, if arrays are verified.
    fn check_of(&self, sample: u64, field: usize) -> Option<ArrayCheck> {
        let column = self
            .columns
            .iter()
            .position(|column| column.field == field)?;
        Some(self.checks.as_ref()?[sample as usize * self.columns.len() + column])
    }

    /// Makes sample *k* of the arrays in the *k*-th files.
    ///
    /// Errors: [`ErrorKind::Shape`] for arrays that differ beyond their rule, or fields with
    /// different numbers of files.
    fn samples(sources: Sources, given: Vec<GivenArray>) -> Result<Self> {
        let len = given.first().map_or(0, |first| first.arrays.len());
        let mut schema = Vec::new();
        let mut columns = Vec::new();
        let mut totals = vec![0_u64; len];
        for mut given in given {
            if given.if_varying
                && given
                    .arrays
                    .windows(2)
                    .all(|pair| pair[0].shape == pair[1].shape)
            {
                given.rule = Rule::Same;
            }
            if given.arrays.len() != len {
                let message = format!(
                    "{} files for the field `{}`, {len} for the first field",
                    given.arrays.len(),
                    given.name
                );
                return Err(Error::new(ErrorKind::Shape, Stage::Index, message));
            }
            let field = schema.len();
            schema.extend(given.fields(&sources, 0)?);
            let bytes: Vec<u64> = given.arrays.iter().map(Array::bytes).collect();
            totals
                .iter_mut()
                .zip(&bytes)
                .for_each(|(total, bytes)| *total = total.saturating_add(*bytes));
            let shapes = matches!(given.rule, Rule::Flat(_)).then(|| given.shapes());
            let offsets = Numbers::new(given.arrays.iter().map(|array| array.offset).collect());
            columns.push(ArrayColumn {
                field,
                base: given.base,
                starts: None,
                offsets,
                bytes: Numbers::new(bytes),
                shapes,
            });
        }
        let bytes_max = totals.iter().copied().max().unwrap_or(0);
        let largest_sample = totals
            .iter()
            .position(|total| *total == bytes_max)
            .map(|sample| sample as u64);
        let sizes = Sizes {
            largest_sample,
            ..Sizes::new(bytes_max)
        };
        Ok(Self::new(sources, schema, columns, len as u64, sizes))
    }

    fn new(
        sources: Sources,
        schema: Vec<EncodedField>,
        columns: Vec<ArrayColumn>,
        len: u64,
        sizes: Sizes,
    ) -> Self {
        let sources = Arc::new(sources);
        let what = String::new();
        let name = String::new();
        Self {
            sources,
            schema,
            columns,
            len,
            sizes,
            checks: None,
            what,
            name,
        }
    }

    /// Makes sample *k* of row *k* of each field, counted over its files in order.
    ///
    /// Errors: [`ErrorKind::Shape`] for arrays without a first axis, arrays whose rows differ, or
    /// fields with different numbers of rows.
    fn rows(sources: Sources, given: Vec<GivenArray>) -> Result<Self> {
        let mut schema: Vec<EncodedField> = Vec::new();
        let mut columns: Vec<ArrayColumn> = Vec::new();
        let mut len = 0;
        let mut bytes_max = 0_u64;
        for given in given {
            if given.rule != Rule::Same {
                let message = format!(
                    "`{}`: rows have one shape; leave out its maximum, which is for whole arrays",
                    given.name
                );
                return Err(Error::new(ErrorKind::Config, Stage::Index, message));
            }
            let field = schema.len();
            schema.extend(given.fields(&sources, 1)?);
            let starts = Starts::of(given.arrays.iter().map(|array| array.shape[0]))?;
            match columns.first() {
                Some(first) => first.check_rows(&schema, &sources, &given, &starts)?,
                None => len = starts.len(),
            }
            let row_bytes = given.arrays.first().map_or(0, |first| first.row_bytes());
            bytes_max = bytes_max.saturating_add(row_bytes);
            let offsets = Numbers::new(given.arrays.iter().map(|array| array.offset).collect());
            let starts = Some(starts);
            let bytes = Numbers::Same(row_bytes);
            columns.push(ArrayColumn {
                field,
                base: given.base,
                starts,
                offsets,
                bytes,
                shapes: None,
            });
        }
        Ok(Self::new(
            sources,
            schema,
            columns,
            len,
            Sizes::new(bytes_max),
        ))
    }

    /// Description such as `x f32 [3, 4], y i64 []`.
    fn describe_fields(&self) -> String {
        self.schema
            .iter()
            .map(|field| match &field.encoding {
                Encoding::Raw {
                    dtype,
                    shape: Shape::Fixed(dims),
                } => format!("{} {dtype} {dims:?}", field.name),
                Encoding::Raw {
                    dtype,
                    shape: Shape::UpTo { max, inner },
                } => {
                    let inner: String = inner.iter().map(|dim| format!(", {dim}")).collect();
                    format!("{} {dtype} [up to {max}{inner}]", field.name)
                }
                _ => field.name.clone(),
            })
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl Arrays {
    /// Advice if all data is one sample, although it has rows.
    fn rows_hint(&self) -> String {
        let whole = self.len == 1 && self.columns.iter().all(|column| column.starts.is_none());
        match self.schema.first().map(|field| &field.encoding) {
            Some(Encoding::Raw {
                shape: Shape::Fixed(dims),
                ..
            }) if whole && dims.first() > Some(&1) => Setting::Rows
                .hint(|rows| format!("; {rows} makes each of its {} rows a sample", dims[0])),
            _ => String::new(),
        }
    }
}

impl Dataset for Arrays {
    own!(schema len sources framed);

    fn sizes(&self) -> Sizes {
        let heap = |column: &ArrayColumn| {
            let starts = column.starts.as_ref().map_or(0, Starts::heap);
            let shapes = column
                .shapes
                .as_ref()
                .map_or(0, |(shapes, _)| size_of_val(&**shapes));
            starts + shapes + column.offsets.heap() + column.bytes.heap()
        };
        let checks = self
            .checks
            .as_ref()
            .map_or(0, |checks| size_of_val(&**checks));
        let index_bytes = self.columns.iter().map(heap).sum::<usize>() + checks;
        Sizes {
            index_bytes,
            ..self.sizes
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        for column in &self.columns {
            let Extent {
                source,
                offset,
                len,
            } = column.extent(sample);
            match self
                .check_of(sample, column.field)
                .map(|check| u64::from(check.header))
            {
                Some(head) => parts.framed(
                    column.field,
                    Extent {
                        source,
                        offset: offset - head,
                        len: len + head,
                    },
                ),
                None => parts.extent(
                    column.field,
                    Extent {
                        source,
                        offset,
                        len,
                    },
                ),
            }
            if let Some((shapes, dims)) = &column.shapes {
                let shape = &shapes[sample as usize * dims..][..*dims];
                parts.inline(column.field + 1, bytemuck::cast_slice(shape));
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let fields = self.describe_fields();
        let files = self.sources.count();
        let checked = if self.checks.is_some() {
            ", CRC-32 verified"
        } else {
            ""
        };
        format!(
            "{} {} ({fields}) in {files} files{checked}: {}{}",
            self.len,
            self.what,
            self.name,
            self.rows_hint()
        )
    }
}

impl Framed for Arrays {
    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let Some(check) = self.check_of(sample, field) else {
            return Ok(());
        };
        let found = crc32fast::hash(bytes);
        if found == check.crc {
            return Ok(());
        }
        let name = &self.schema[field].name;
        let message = format!(
            "`{name}` has the CRC-32 {found:08x}, the archive says {:08x}",
            check.crc
        );
        Err(Error::new(ErrorKind::Decode, Stage::Decode, message))
    }

    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        _: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let header = self.check_of(sample, field).map_or(0, |check| check.header);
        Ok(bytes.get(header as usize..).unwrap_or_default())
    }
}

impl ArrayColumn {
    fn extent(&self, sample: u64) -> Extent {
        let (file, row) = match &self.starts {
            Some(starts) => starts.locate(sample),
            None => (sample as usize, 0),
        };
        let len = self.bytes.get(if self.starts.is_some() { 0 } else { file });
        Extent {
            source: SourceId::at(self.base + file),
            offset: self.offsets.get(file) + row * len,
            len,
        }
    }

    /// Checks that this field has as many rows as the first field. If both fields come from the
    /// same files, the rows must also match in each file.
    fn check_rows(
        &self,
        schema: &[EncodedField],
        sources: &Sources,
        given: &GivenArray,
        starts: &Starts,
    ) -> Result<()> {
        let first = &schema[self.field].name;
        let own = self.starts.as_ref().map_or(&[][..], Starts::all);
        let rows = starts.len();
        let len = own.last().copied().unwrap_or(0);
        let parted = (self.base == given.base)
            .then(|| own.iter().zip(starts.all()).position(|(a, b)| a != b))
            .flatten();
        if rows == len && parted.is_none() {
            return Ok(());
        }
        let message = if self.base == given.base {
            format!(
                "`{}` and `{first}` have different first dimensions in this file",
                given.name
            )
        } else {
            format!("`{}` has {rows} rows, `{first}` has {len}", given.name)
        };
        let file = parted.map_or(0, |parted| parted - 1);
        let path = sources.path(SourceId::at(given.base + file));
        Err(Error::new(ErrorKind::Shape, Stage::Index, message).with_path(path))
    }
}

impl Array {
    /// Bytes of the data; the parsers have checked them against the file.
    fn bytes(&self) -> u64 {
        self.dims_bytes(&self.shape)
    }

    fn row_bytes(&self) -> u64 {
        self.dims_bytes(self.shape.get(1..).unwrap_or_default())
    }

    fn dims_bytes(&self, dims: &[u64]) -> u64 {
        dims.iter().fold(self.dtype.size() as u64, |bytes, dim| {
            bytes.saturating_mul(*dim)
        })
    }

    /// Bytes of the data, computed from the shape; `None` on overflow.
    pub(crate) fn checked_bytes(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(self.dtype.size() as u64, |bytes, dim| {
                bytes.checked_mul(*dim)
            })
    }

    /// Description such as `f32 [3, 4]`.
    pub(crate) fn described(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }
}

impl GivenArray {
    /// The batch fields of these arrays: one, or two if the shape is delivered, too. The first
    /// `axes` dimensions count samples.
    fn fields(&self, sources: &Sources, axes: usize) -> Result<Vec<EncodedField>> {
        let first = self
            .arrays
            .first()
            .ok_or_else(|| Error::new(ErrorKind::Empty, Stage::Index, "no arrays"))?;
        for (file, array) in self.arrays.iter().enumerate() {
            if let Err(message) = self.fits(first, array, axes) {
                let path = sources.path(SourceId::at(self.base + file));
                return Err(Error::new(ErrorKind::Shape, Stage::Index, message).with_path(path));
            }
        }
        let dims = |dims: &[u64]| dims.iter().map(|dim| *dim as usize).collect::<Vec<_>>();
        let shape = match self.rule {
            Rule::Same => Shape::Fixed(dims(&first.shape[axes..])),
            Rule::UpTo(max) => Shape::UpTo {
                max,
                inner: dims(&first.shape[1..]),
            },
            Rule::Flat(max) => Shape::UpTo {
                max,
                inner: Vec::new(),
            },
        };
        let encoding = Encoding::Raw {
            dtype: first.dtype,
            shape,
        };
        let mut fields = vec![EncodedField {
            name: self.name.clone(),
            encoding,
        }];
        if let Rule::Flat(_) = self.rule {
            let name = format!("{}.shape", self.name);
            fields.push(EncodedField::raw(Field::fixed(
                name,
                DType::I64,
                [first.shape.len()],
            )));
        }
        Ok(fields)
    }

    /// Checks that an array is compatible with the first one.
    fn fits(&self, first: &Array, array: &Array, axes: usize) -> Result<(), String> {
        let name = &self.name;
        let found = array.described();
        if array.shape.len() < axes {
            return Err(format!("`{name}` is {found}: a scalar has no rows"));
        }
        let alike = match self.rule {
            Rule::Same => array.shape[axes..] == first.shape[axes..],
            Rule::UpTo(_) => array.shape.get(1..) == first.shape.get(1..),
            Rule::Flat(_) => array.shape.len() == first.shape.len(),
        };
        if !alike || array.dtype != first.dtype || array.shape.len() != first.shape.len() {
            // Suggest the rule that would accept both arrays.
            let same_dims = array.dtype == first.dtype && array.shape.len() == first.shape.len();
            let hint = match self.rule {
                Rule::Flat(_) => String::new(),
                _ if !same_dims || axes > 0 => String::new(),
                Rule::Same if array.shape.get(1..) == first.shape.get(1..) => {
                    format!("; {} accepts arrays of several lengths", Setting::UpTo)
                }
                _ => {
                    Setting::Flat.hint(|flat| format!("; {flat} accepts arrays of several shapes"))
                }
            };
            let first = first.described();
            return Err(format!(
                "`{name}` is {found} here and {first} in the first file{hint}"
            ));
        }
        let (count, max) = match self.rule {
            Rule::Same
                if axes == 0 && array.bytes() == 0 || axes == 1 && array.row_bytes() == 0 =>
            {
                return Err(format!("`{name}` is {found}: its samples have no bytes"));
            }
            Rule::Same => return Ok(()),
            Rule::UpTo(_) if array.shape.is_empty() => {
                return Err(format!(
                    "`{name}` is {found}: a scalar has no first dimension"
                ));
            }
            Rule::UpTo(_) if array.row_bytes() == 0 => {
                return Err(format!(
                    "`{name}` is {found}: a dimension after the first is 0"
                ));
            }
            Rule::Flat(_) if array.shape.is_empty() => {
                return Err(format!("`{name}` is {found}: a scalar has no shape"));
            }
            Rule::UpTo(max) => (array.shape[0], max),
            Rule::Flat(max) => (array.bytes() / array.dtype.size() as u64, max),
        };
        if count > max as u64 {
            return Err(format!(
                "`{name}` is {found}: {count} is more than the maximum of {max}"
            ));
        }
        Ok(())
    }

    fn shapes(&self) -> (Box<[i64]>, usize) {
        let shapes = self
            .arrays
            .iter()
            .flat_map(|array| array.shape.iter().map(|dim| *dim as i64))
            .collect();
        (
            shapes,
            self.arrays.first().map_or(0, |first| first.shape.len()),
        )
    }
}
