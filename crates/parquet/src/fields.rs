//! Maps columns to fields, refuses unsupported columns, and prunes row groups by statistics.

use super::footer::{Footer, Leaf, List, config};
use super::{FieldKind, FieldPlan, How, Wanted};
use arrow_schema::DataType;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::tensor::{DType, EncodedField, Field};
use parquet::basic::Type;
use parquet::file::statistics::Statistics;
use std::collections::HashMap;

/// Columns and plans of the batch's fields.
pub(super) struct SchemaPlan {
    pub(super) schema: Vec<EncodedField>,
    pub(super) fields: Vec<FieldPlan>,
    pub(super) leaves: Vec<Leaf>,
    /// Columns that cannot be read, with the reason.
    pub(super) left_out: Vec<String>,
}

impl SchemaPlan {
    /// `varying`: the maximum length of lists and byte arrays without a maximum of their own.
    /// `skip`: if all columns are taken, leaves out those that cannot be read.
    pub(super) fn new(
        wanted: &[Wanted],
        varying: Option<usize>,
        skip: bool,
        footer: &Footer,
    ) -> Result<Self> {
        let all: Vec<Wanted>;
        let skip = skip && wanted.is_empty();
        let wanted = if wanted.is_empty() {
            all = footer
                .leaves
                .iter()
                .map(|leaf| Wanted {
                    name: leaf.name.clone(),
                    columns: vec![leaf.name.clone()],
                    how: How::Stored,
                })
                .collect();
            &all
        } else {
            wanted
        };
        let mut plan = Self {
            schema: Vec::new(),
            fields: Vec::new(),
            leaves: Vec::new(),
            left_out: Vec::new(),
        };
        let mut named = HashMap::new();
        for field in wanted {
            if let Some(before) = named.insert(&field.name, field.how) {
                let picture = before.is_picture() || field.how.is_picture();
                let why = if picture {
                    "is the picture column and is named a second time"
                } else {
                    "is named twice"
                };
                return Err(config(format!(
                    "column `{}` {why}: name it once",
                    field.name
                )));
            }
            let columns = plan.leaves.len();
            match plan.add(field, varying, footer) {
                Err(error) if skip => {
                    plan.leaves.truncate(columns);
                    plan.left_out.push(error.message().into());
                }
                added => added?,
            }
        }
        Ok(plan)
    }

    fn add(&mut self, wanted: &Wanted, varying: Option<usize>, footer: &Footer) -> Result<()> {
        let start = self.leaves.len();
        for column in &wanted.columns {
            // Hugging Face's datasets store a picture as a structure of `bytes` and `path`.
            let nested = || match wanted.how {
                How::Image => find(footer, &format!("{column}.bytes")).ok(),
                How::Images(_) | How::List(_) => bytes_in_list(footer, column),
                How::Stored | How::UpTo(_) => None,
            };
            let leaf = find(footer, column).or_else(|error| nested().ok_or(error))?;
            self.leaves.push(footer.leaves[leaf].clone());
        }
        let leaves = &self.leaves[start..];
        let Some(first) = leaves.first() else {
            return Err(config(format!("field `{}` has no columns", wanted.name)));
        };
        if let Some(other) = leaves
            .iter()
            .find(|leaf| leaf.arrow != first.arrow || leaf.list != first.list)
        {
            let message = format!(
                "`{}` and `{}` cannot be stacked: {} and {}",
                first.name,
                other.name,
                first.described(),
                other.described()
            );
            return Err(config(message));
        }
        let varies = first.list == List::Any || (is_bytes(first) && first.list == List::No);
        let how = match (wanted.how, varying) {
            (How::Stored, Some(max)) if varies && leaves.len() == 1 => How::UpTo(max),
            (how, _) => how,
        };
        let (encoded, kind) = encoded_field(&wanted.name, how, first, leaves.len())?;
        self.schema.push(encoded);
        self.fields.push(FieldPlan {
            columns: start..self.leaves.len(),
            kind,
        });
        Ok(())
    }
}

/// The dtype of a column's values, the stored bytes per value, and how many of these bytes are
/// kept. A fixed-size byte array is a vector of bytes.
fn number(leaf: &Leaf) -> Option<(DType, usize, usize)> {
    Some(match (&leaf.arrow, leaf.descr.physical_type()) {
        (DataType::Boolean, Type::BOOLEAN) => (DType::Bool, 1, 1),
        (DataType::Int8, Type::INT32) => (DType::I8, 4, 1),
        (DataType::UInt8, Type::INT32) => (DType::U8, 4, 1),
        (DataType::Int16, Type::INT32) => (DType::I16, 4, 2),
        (DataType::UInt16, Type::INT32) => (DType::U16, 4, 2),
        (DataType::UInt32, Type::INT32) => (DType::U32, 4, 4),
        // Version 1 of the format has no unsigned numbers.
        (DataType::UInt32, Type::INT64) => (DType::U32, 8, 4),
        (
            DataType::Int32 | DataType::Date32 | DataType::Date64 | DataType::Time32(_),
            Type::INT32,
        ) => (DType::I32, 4, 4),
        (DataType::UInt64, Type::INT64) => (DType::U64, 8, 8),
        (
            DataType::Int64
            | DataType::Date64
            | DataType::Time64(_)
            | DataType::Timestamp(..)
            | DataType::Duration(_),
            Type::INT64,
        ) => (DType::I64, 8, 8),
        (DataType::Float16, Type::FIXED_LEN_BYTE_ARRAY) => (DType::F16, 2, 2),
        (DataType::Float32, Type::FLOAT) => (DType::F32, 4, 4),
        (DataType::Float64, Type::DOUBLE) => (DType::F64, 8, 8),
        _ => return None,
    })
}

fn is_decimal(of: &DataType) -> bool {
    use DataType::{Decimal32, Decimal64, Decimal128, Decimal256};
    matches!(
        of,
        Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..)
    )
}

/// Whether the values are strings or other bytes of any length. `false` if the column's annotation
/// cannot be read.
fn is_bytes(leaf: &Leaf) -> bool {
    leaf.descr.physical_type() == Type::BYTE_ARRAY
        && !is_decimal(&leaf.arrow)
        && leaf.arrow != DataType::Null
}

/// The leaf `bytes` of the structures in the lists of column `name`. Writers differ in the names
/// between them: `list.element`, `array`, `bag.array_element`.
fn bytes_in_list(footer: &Footer, name: &str) -> Option<usize> {
    footer.leaves.iter().position(|leaf| {
        let within = leaf.name.strip_prefix(name);
        within.is_some_and(|rest| rest.starts_with('.') && rest.ends_with(".bytes"))
            && leaf.list != List::No
            && is_bytes(leaf)
    })
}

/// Reason why [`Setting::Columns`] alone makes no field of a column.
fn unreadable(leaf: &Leaf) -> Option<String> {
    let flat = leaf.list == List::No;
    let bytes = flat && (is_bytes(leaf) || matches!(leaf.arrow, DataType::FixedSizeBinary(_)));
    (leaf.descr.max_rep_level() > 1 || (number(leaf).is_none() && !bytes)).then(|| refusal(leaf))
}

/// Reason why a column cannot be the requested field.
fn refusal(leaf: &Leaf) -> String {
    let list = leaf.list != List::No;
    match (&leaf.arrow, leaf.descr.physical_type()) {
        _ if leaf.descr.max_rep_level() > 1 => "lists of lists are not supported".into(),
        (of, _) if is_decimal(of) => "decimals are not supported".into(),
        (_, Type::INT96) => "timestamps of 96 bits are not supported".into(),
        (_, Type::BYTE_ARRAY) if list => format!(
            "lists of byte arrays need a maximum number of elements: give it with {}",
            Setting::Elements
        ),
        (DataType::FixedSizeBinary(_), _) if list => {
            "lists of byte arrays of fixed length are not supported".into()
        }
        (_, Type::BYTE_ARRAY) => "byte arrays cannot be stacked".into(),
        _ if number(leaf).is_none() => "values of this type are not supported".into(),
        _ if list => {
            format!(
                "read a list with {}, or a list of fixed size with {}",
                Setting::UpTo,
                Setting::Columns
            )
        }
        _ => format!("read a number with {}", Setting::Columns),
    }
}

fn encoded_field(
    name: &str,
    how: How,
    leaf: &Leaf,
    columns: usize,
) -> Result<(EncodedField, FieldKind)> {
    let unsupported = || {
        let stored = leaf.descr.physical_type();
        let others = unreadable(leaf).map_or(String::new(), |_| {
            format!("; choose other columns with {}", Setting::Columns)
        });
        let name = &leaf.name;
        let described = leaf.described();
        let why = match how {
            How::Images(_) | How::List(_) if leaf.list == List::No => {
                format!("{} is for lists of byte arrays", Setting::Elements)
            }
            _ => refusal(leaf),
        };
        Err(config(format!(
            "column `{name}` ({described}, stored as {stored}): {why}{others}"
        )))
    };
    if leaf.descr.max_rep_level() > 1 {
        return unsupported();
    }
    if let (DataType::FixedSizeBinary(_), List::No) = (&leaf.arrow, leaf.list) {
        let width = leaf.descr.type_length().max(0) as usize;
        let shape = if columns == 1 {
            vec![width]
        } else {
            vec![columns, width]
        };
        let kind = FieldKind::Array {
            width,
            keep: width,
            list: 1,
        };
        return Ok((
            EncodedField::raw(Field::fixed(name, DType::U8, shape)),
            kind,
        ));
    }
    let any_bytes = FieldKind::Ragged { width: 1, keep: 1 };
    let bytes = is_bytes(leaf) && leaf.list == List::No && columns == 1;
    let many = is_bytes(leaf) && leaf.list != List::No && columns == 1;
    match (number(leaf), leaf.list, how) {
        (None, _, How::Images(max)) if many => {
            Ok((EncodedField::images(name, max), FieldKind::Many))
        }
        (None, _, How::List(max)) if many => Ok((EncodedField::list(name, max), FieldKind::Many)),
        (None, _, How::Image) if bytes => Ok((EncodedField::image(name), any_bytes)),
        (None, _, How::Stored) if bytes => Ok((EncodedField::bytes(name), any_bytes)),
        (None, _, How::UpTo(max)) if bytes => Ok((
            EncodedField::raw(Field::up_to(name, DType::U8, max)),
            any_bytes,
        )),
        (Some((dtype, width, keep)), List::No, How::Stored) => {
            let shape = if columns == 1 { vec![] } else { vec![columns] };
            let kind = FieldKind::Array {
                width,
                keep,
                list: 1,
            };
            Ok((EncodedField::raw(Field::fixed(name, dtype, shape)), kind))
        }
        (Some((dtype, width, keep)), List::Fixed(list), How::Stored) if list > 0 => {
            let kind = FieldKind::Array { width, keep, list };
            Ok((
                EncodedField::raw(Field::fixed(name, dtype, [columns * list])),
                kind,
            ))
        }
        (Some((dtype, width, keep)), List::Any | List::Fixed(_), How::UpTo(max))
            if columns == 1 =>
        {
            let kind = FieldKind::Ragged { width, keep };
            Ok((EncodedField::raw(Field::up_to(name, dtype, max)), kind))
        }
        (Some(_), List::Any, How::Stored) => Err(config(format!(
            "column `{}` holds lists of any length: give the maximum with {}",
            leaf.name,
            Setting::UpTo
        ))),
        _ => unsupported(),
    }
}

/// Index of the column with this name in the file.
///
/// Errors: no such column. The message names readable columns.
fn find(footer: &Footer, name: &str) -> Result<usize> {
    let index = footer.leaves.iter().position(|leaf| leaf.is_called(name));
    index.ok_or_else(|| {
        let within = |leaf: &&Leaf| {
            leaf.name
                .strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        let readable = |leaf: &&Leaf| unreadable(leaf).is_none();
        let names = |leaves: Vec<&Leaf>| {
            leaves
                .iter()
                .map(|leaf| &*leaf.name)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let Some(inner) = footer.leaves.iter().find(within) else {
            let there = footer.leaves.iter().filter(readable).take(64).collect();
            return config(format!("no column `{name}`; there are {}", names(there)));
        };
        let there: Vec<&Leaf> = footer
            .leaves
            .iter()
            .filter(within)
            .filter(readable)
            .take(64)
            .collect();
        match unreadable(inner) {
            Some(reason) if there.is_empty() => {
                let columns = Setting::Columns;
                config(format!(
                    "column `{name}` holds `{}`: {reason}; choose other columns with {columns}",
                    inner.name
                ))
            }
            _ => config(format!(
                "column `{name}` is a structure; choose one of its columns: {}",
                names(there)
            )),
        }
    })
}

/// Finds the chosen columns in this file. Errors: a column is missing or has another type.
pub(super) fn same_columns(leaves: &[Leaf], footer: &Footer) -> Result<Vec<usize>> {
    leaves
        .iter()
        .map(|leaf| {
            let index = find(footer, &leaf.name)?;
            let here = &footer.leaves[index];
            if !same_values(here, leaf) {
                let name = &leaf.name;
                let here = here.words();
                let first = leaf.words();
                let message = format!("column `{name}` is {here} here, {first} in the first file");
                return Err(Error::new(ErrorKind::Shape, Stage::Index, message));
            }
            Ok(index)
        })
        .collect()
}

/// Whether two files store values of the same type. These differences between writers do not
/// matter: whether nulls may occur, the names within a list, strings or bytes, the size of offsets
/// in memory, the time zone of timestamps with the same unit.
fn same_values(a: &Leaf, b: &Leaf) -> bool {
    let stored = |leaf: &Leaf| {
        let of = leaf.descr.physical_type();
        (
            of,
            if of == Type::FIXED_LEN_BYTE_ARRAY {
                leaf.descr.type_length()
            } else {
                0
            },
        )
    };
    let nested = |leaf: &Leaf| (leaf.list != List::No, leaf.descr.max_rep_level());
    let arrow = |leaf: &Leaf| match &leaf.arrow {
        DataType::Timestamp(unit, _) => DataType::Timestamp(*unit, None),
        other => other.clone(),
    };
    // If lists may have any length in the first file, lists of one fixed length also fit.
    let lists = a.list == b.list || !matches!(b.list, List::Fixed(_));
    stored(a) == stored(b)
        && nested(a) == nested(b)
        && lists
        && ((is_bytes(a) && is_bytes(b)) || arrow(a) == arrow(b))
}

pub(super) fn prune_columns(
    prune: &[(String, f64, f64)],
    footer: &Footer,
) -> Result<Vec<(usize, f64, f64)>> {
    prune
        .iter()
        .map(|(name, min, max)| {
            let index = find(footer, name)?;
            match number(&footer.leaves[index]) {
                Some((DType::U32 | DType::U64, ..)) | None => Err(config(format!(
                    "column `{name}` ({}) has no statistics to prune by",
                    footer.leaves[index].arrow
                ))),
                Some(_) => Ok((index, *min, *max)),
            }
        })
        .collect()
}

/// Whether the statistics exclude all values within `min ..= max`.
pub(super) fn outside(statistics: Option<&Statistics>, min: f64, max: f64) -> bool {
    let (low, high) = match statistics {
        Some(Statistics::Int32(s)) => (
            s.min_opt().map(|v| f64::from(*v)),
            s.max_opt().map(|v| f64::from(*v)),
        ),
        // Rounding changes bounds above 2^53. Widened bounds never prune a row group by mistake.
        Some(Statistics::Int64(s)) => (
            s.min_opt().map(|v| (*v as f64).next_down()),
            s.max_opt().map(|v| (*v as f64).next_up()),
        ),
        Some(Statistics::Float(s)) => (
            s.min_opt().map(|v| f64::from(*v)),
            s.max_opt().map(|v| f64::from(*v)),
        ),
        Some(Statistics::Double(s)) => (s.min_opt().copied(), s.max_opt().copied()),
        _ => (None, None),
    };
    low.is_some_and(|low| low > max) || high.is_some_and(|high| high < min)
}
