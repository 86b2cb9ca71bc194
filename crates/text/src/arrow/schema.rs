//! The schema of a file: a tree of columns, with what each of them stores.

use super::fault::Fault;
use arrow_ipc::{Endianness, Field as Stored, Precision, Schema, Type, UnionMode};
use feedline_core::tensor::DType;
use serde_json::Value;

/// A column or a part of one.
#[derive(Clone, Debug)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) children: Vec<Column>,
    pub(super) dictionary: Option<Dictionary>,
}

/// Values are stored in a dictionary, and their numbers in the column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dictionary {
    pub(super) id: i64,
    pub(super) index: DType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    Number(DType),
    /// This number of bytes each.
    Fixed(u64),
    /// Strings and other bytes: with offsets of 64 bits, if `wide`.
    Bytes {
        wide: bool,
    },
    /// Strings and other bytes that are found by views.
    Views,
    List {
        wide: bool,
    },
    FixedList(u64),
    Struct,
    /// Not read; its node and buffers are stepped over.
    Other {
        name: &'static str,
        buffers: usize,
    },
}

/// The columns of a file and what `datasets` says about them.
pub(super) struct Columns {
    pub(super) all: Vec<Column>,
    /// Of the library `datasets`: an object from column to feature.
    features: Value,
}

impl Columns {
    /// Errors: a schema that contradicts itself or cannot be read here.
    pub(super) fn of(schema: Schema<'_>) -> Result<Self, Fault> {
        if schema.endianness() != Endianness::Little {
            return Err(Fault::unsupported("numbers are stored in big-endian order"));
        }
        let fields = schema.fields().into_iter().flatten();
        let features = schema
            .custom_metadata()
            .into_iter()
            .flatten()
            .find(|pair| pair.key() == Some("huggingface"))
            .and_then(|pair| serde_json::from_str::<Value>(pair.value()?).ok())
            .and_then(|mut value| Some(value.pointer_mut("/info/features")?.take()));
        Ok(Self {
            all: fields.map(column).collect::<Result<_, _>>()?,
            features: features.unwrap_or_default(),
        })
    }

    /// Whether `datasets` says that the column holds pictures.
    pub(super) fn is_image(&self, name: &str) -> bool {
        self.features[name]["_type"] == "Image"
    }

    /// The shape that `datasets` gives an array of the column, as for `Array2D`.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let dims = self.features[name]["shape"].as_array()?;
        dims.iter()
            .map(|dim| usize::try_from(dim.as_u64()?).ok())
            .collect()
    }
}

impl Column {
    /// A part of a structure.
    pub(super) fn child(&self, name: &str) -> Option<&Column> {
        let is_structure = self.kind == Kind::Struct && self.dictionary.is_none();
        let mut children = self.children.iter().filter(|_| is_structure);
        children.find(|child| child.name == name)
    }

    /// Whether the column or a part of it has this dictionary.
    pub(super) fn has_dictionary(&self, id: i64) -> bool {
        self.dictionary.is_some_and(|own| own.id == id)
            || self.children.iter().any(|child| child.has_dictionary(id))
    }

    /// The type, for people.
    pub(super) fn described(&self) -> String {
        let of = self.children.first().map_or(String::new(), Self::described);
        match self.kind {
            Kind::Bool => "bool".into(),
            Kind::Number(dtype) => dtype.to_string(),
            Kind::Fixed(bytes) => format!("{bytes} bytes"),
            Kind::Bytes { .. } | Kind::Views => "bytes".into(),
            Kind::List { .. } => format!("list of {of}"),
            Kind::FixedList(len) => format!("list of {len} {of}"),
            Kind::Struct => {
                let names: Vec<_> = self.children.iter().map(|child| &*child.name).collect();
                format!("structure of {}", names.join(", "))
            }
            Kind::Other { name, .. } => name.into(),
        }
    }
}

fn wrong(name: &str, what: &str) -> Fault {
    Fault::wrong(format!("schema: column `{name}`: {what}"))
}

fn column(field: Stored<'_>) -> Result<Column, Fault> {
    let name = field.name().unwrap_or_default().to_string();
    let children: Vec<Column> = field
        .children()
        .into_iter()
        .flatten()
        .map(column)
        .collect::<Result<_, _>>()?;
    let kind = kind(field).ok_or_else(|| wrong(&name, "a type that contradicts itself"))?;
    let expected = match kind {
        Kind::List { .. } | Kind::FixedList(_) => Some(1),
        Kind::Bool | Kind::Number(_) | Kind::Fixed(_) | Kind::Bytes { .. } | Kind::Views => Some(0),
        Kind::Struct | Kind::Other { .. } => None,
    };
    if expected.is_some_and(|expected| expected != children.len()) {
        return Err(wrong(&name, "a wrong number of parts"));
    }
    let dictionary = match field.dictionary() {
        None => None,
        Some(dictionary) => {
            let index = match dictionary.indexType() {
                None => Some(DType::I32),
                Some(int) => integer(int.bitWidth(), int.is_signed()),
            };
            Some(Dictionary {
                id: dictionary.id(),
                index: index.ok_or_else(|| wrong(&name, "an index of no integer type"))?,
            })
        }
    };
    Ok(Column {
        name,
        kind,
        children,
        dictionary,
    })
}

fn integer(bits: i32, signed: bool) -> Option<DType> {
    Some(match (bits, signed) {
        (8, false) => DType::U8,
        (8, true) => DType::I8,
        (16, false) => DType::U16,
        (16, true) => DType::I16,
        (32, false) => DType::U32,
        (32, true) => DType::I32,
        (64, false) => DType::U64,
        (64, true) => DType::I64,
        _ => return None,
    })
}

/// Of a type, by what it stores: dates and times are integers.
fn kind(field: Stored<'_>) -> Option<Kind> {
    Some(match field.type_type() {
        // Without validity; a node alone.
        Type::Null => other("nulls", 0),
        Type::Bool => Kind::Bool,
        Type::Int => {
            let int = field.type_as_int()?;
            Kind::Number(integer(int.bitWidth(), int.is_signed())?)
        }
        Type::FloatingPoint => Kind::Number(match field.type_as_floating_point()?.precision() {
            Precision::HALF => DType::F16,
            Precision::SINGLE => DType::F32,
            Precision::DOUBLE => DType::F64,
            _ => return None,
        }),
        Type::Date => Kind::Number(match field.type_as_date()?.unit().0 {
            0 => DType::I32,
            _ => DType::I64,
        }),
        Type::Time => Kind::Number(integer(field.type_as_time()?.bitWidth(), true)?),
        Type::Timestamp | Type::Duration => Kind::Number(DType::I64),
        Type::Decimal => other("decimals", 2),
        Type::Interval => other("intervals", 2),
        Type::Binary | Type::Utf8 => Kind::Bytes { wide: false },
        Type::LargeBinary | Type::LargeUtf8 => Kind::Bytes { wide: true },
        Type::BinaryView | Type::Utf8View => Kind::Views,
        Type::FixedSizeBinary => {
            let bytes = field.type_as_fixed_size_binary()?.byteWidth();
            Kind::Fixed(u64::try_from(bytes).ok()?)
        }
        Type::List => Kind::List { wide: false },
        Type::LargeList => Kind::List { wide: true },
        Type::FixedSizeList => {
            let len = field.type_as_fixed_size_list()?.listSize();
            Kind::FixedList(u64::try_from(len).ok()?)
        }
        Type::Struct_ => Kind::Struct,
        Type::Map => other("a map", 2),
        Type::Union if field.type_as_union()?.mode() == UnionMode::Sparse => other("a union", 1),
        Type::Union => other("a union", 2),
        Type::RunEndEncoded => other("run-end encoded values", 0),
        Type::ListView | Type::LargeListView => other("a list view", 3),
        _ => return None,
    })
}

fn other(name: &'static str, buffers: usize) -> Kind {
    Kind::Other { name, buffers }
}
