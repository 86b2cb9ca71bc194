//! From the columns that are asked for to fields: what is taken from a file's columns.

use super::fault::Fault;
use super::schema::{Column, Columns, Kind};
use feedline_base::error::{Result, config};
use feedline_base::setting::Setting;
use feedline_core::tensor::{DType, EncodedField, Field, Shape};

/// A column that is asked for.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) how: How,
}

#[derive(Clone, Debug)]
pub(super) enum How {
    Stored,
    Image,
    UpTo(usize),
    Shaped(Field),
}

/// What the values of a column are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaf {
    Number(DType),
    Bits,
    Bytes,
    /// This number of bytes each.
    Fixed(u64),
}

/// What a field takes from a column.
#[derive(Debug)]
pub(super) struct Take {
    /// The name of the column, with those of its parts behind dots.
    path: String,
    pub(super) leaf: Leaf,
    /// For every level of lists the length of each, if it must have one.
    lists: Vec<Option<u64>>,
}

/// The place of a [`Take`] in a file's schema.
pub(super) struct Resolved<'a> {
    pub(super) name: &'a str,
    /// The column's number, and its parts within structures.
    pub(super) number: usize,
    pub(super) structs: Vec<usize>,
    pub(super) column: &'a Column,
    pub(super) lists: &'a [Option<u64>],
}

/// The fields and what they take. Without names, all columns are taken; lists of any length then
/// have at most `varying` elements.
pub(super) fn plan(
    columns: &Columns,
    wanted: &[Wanted],
    varying: Option<usize>,
) -> Result<(Vec<EncodedField>, Vec<Take>)> {
    let all: Vec<Wanted>;
    let wanted = match wanted {
        [] => {
            all = columns
                .all
                .iter()
                .map(|column| stored(columns, &column.name))
                .collect();
            &all
        }
        named => named,
    };
    let mut fields = Vec::new();
    let mut takes = Vec::new();
    for one in wanted {
        if fields
            .iter()
            .any(|field: &EncodedField| field.name == one.name)
        {
            return Err(config(format!(
                "column `{}` is named twice: name it once",
                one.name
            )));
        }
        let (field, take) = one.plan(columns, varying)?;
        fields.push(field);
        takes.push(take);
    }
    Ok((fields, takes))
}

fn stored(columns: &Columns, name: &str) -> Wanted {
    let how = match columns.is_image(name) {
        true => How::Image,
        false => How::Stored,
    };
    Wanted {
        name: name.into(),
        how,
    }
}

impl Wanted {
    fn plan(&self, columns: &Columns, varying: Option<usize>) -> Result<(EncodedField, Take)> {
        let name = &self.name;
        let Some((.., column)) = find(&columns.all, name) else {
            let names: Vec<_> = columns
                .all
                .iter()
                .map(|column| &*column.name)
                .take(64)
                .collect();
            return Err(config(format!(
                "no column `{name}`; there are {}",
                names.join(", ")
            )));
        };
        let named = columns.all.iter().filter(|column| column.name == *name);
        if named.count() > 1 {
            return Err(config(format!("several columns are called `{name}`")));
        }
        let (column, path) = match (&self.how, column.child("bytes")) {
            // `datasets` stores a picture as a structure of `bytes` and `path`.
            (How::Image, Some(bytes)) => (bytes, format!("{name}.bytes")),
            _ => (column, name.clone()),
        };
        let refused =
            |why: String| config(format!("column `{name}` ({}): {why}", column.described()));
        let (leaf, sizes) = stored_values(column).map_err(refused)?;
        let how = match (&self.how, leaf, varying) {
            (How::Stored, Leaf::Bytes, _) => return bytes_field(EncodedField::bytes(name), path),
            (How::Image, Leaf::Bytes, _) => return bytes_field(EncodedField::image(name), path),
            (How::Image, ..) => return Err(refused("encoded pictures are bytes".into())),
            (How::Stored, _, varying) => match (columns.shape(name), varying) {
                (Some(dims), _) => How::Shaped(Field::fixed(name, dtype(leaf), dims)),
                (None, Some(max)) if sizes.first() == Some(&None) => How::UpTo(max),
                _ => How::Stored,
            },
            (how, ..) => how.clone(),
        };
        let field = field(name, &how, leaf, &sizes).map_err(refused)?;
        let inner = match field.shape() {
            _ if sizes.len() < 2 => &[],
            Shape::Fixed(dims) => &dims[1..],
            Shape::UpTo { inner, .. } => &inner[..],
        };
        let inner = inner.iter().map(|dim| Some(*dim as u64));
        let lists = std::iter::once(None)
            .chain(inner)
            .take(sizes.len())
            .collect();
        Ok((EncodedField::raw(field), Take { path, leaf, lists }))
    }
}

fn bytes_field(field: EncodedField, path: String) -> Result<(EncodedField, Take)> {
    let take = Take {
        path,
        leaf: Leaf::Bytes,
        lists: Vec::new(),
    };
    Ok((field, take))
}

fn dtype(leaf: Leaf) -> DType {
    match leaf {
        Leaf::Number(dtype) => dtype,
        Leaf::Bits => DType::Bool,
        Leaf::Bytes | Leaf::Fixed(_) => DType::U8,
    }
}

/// The field of numbers, or why the column cannot be it. `sizes` are the lengths of lists that the
/// schema states.
fn field(
    name: &str,
    how: &How,
    leaf: Leaf,
    sizes: &[Option<u64>],
) -> std::result::Result<Field, String> {
    let dtype = dtype(leaf);
    let mut stated: Vec<Option<usize>> = sizes
        .iter()
        .map(|size| size.map(|size| size as usize))
        .collect();
    if let Leaf::Fixed(bytes) = leaf {
        stated.push(Some(bytes as usize));
    }
    if stated.contains(&Some(0)) {
        return Err("lists of no elements are not read".into());
    }
    let known: Option<Vec<usize>> = stated.iter().copied().collect();
    let inner = stated
        .get(1..)
        .and_then(|inner| inner.iter().copied().collect::<Option<Vec<_>>>());
    match (how, known, inner) {
        (How::UpTo(max), ..) if leaf == Leaf::Bytes => Ok(Field::up_to(name, dtype, *max)),
        (How::UpTo(max), _, Some(inner)) if inner.is_empty() => Ok(Field::up_to(name, dtype, *max)),
        (How::UpTo(max), _, Some(inner)) => Ok(Field::rows_up_to(name, dtype, *max, inner)),
        (How::UpTo(_), ..) if stated.is_empty() => Err("a single value, not a list".into()),
        (How::Stored, Some(dims), _) => Ok(Field::fixed(name, dtype, dims)),
        (How::Shaped(field), ..) => shaped(field, dtype, &stated),
        _ if stated.len() > 1 => Err(format!(
            "lists of lists need a shape: give it with {}",
            Setting::ArrowNumbers
        )),
        _ => Err(format!(
            "a list of any length: give the maximum with {}",
            Setting::UpTo
        )),
    }
}

/// The field as it is asked for, if the column can be it.
fn shaped(
    field: &Field,
    dtype: DType,
    stated: &[Option<usize>],
) -> std::result::Result<Field, String> {
    if field.dtype() != dtype {
        return Err(format!("{dtype} is stored, {} asked for", field.dtype()));
    }
    let (outer, inner) = match field.shape() {
        Shape::Fixed(dims) if stated.is_empty() && !dims.iter().all(|dim| *dim == 1) => {
            return Err("a single value, not a list".into());
        }
        Shape::Fixed(dims) if dims.contains(&0) => {
            return Err("lists of no elements are not read".into());
        }
        Shape::Fixed(dims) => (dims.first().copied(), dims.get(1..).unwrap_or_default()),
        Shape::UpTo { inner, .. } if !stated.is_empty() => (None, &inner[..]),
        _ => return Err("not such a list".into()),
    };
    // One list may have the elements of several dimensions.
    if stated.len() > 1 {
        let asked = std::iter::once(outer).chain(inner.iter().map(|dim| Some(*dim)));
        let mut pairs = stated.iter().zip(asked);
        let differ =
            pairs.any(|(own, asked)| own.zip(asked).is_some_and(|(own, asked)| own != asked));
        if inner.len() + 1 != stated.len() || differ {
            return Err(format!("lists of another shape than {:?}", field.shape()));
        }
    }
    Ok(field.clone())
}

/// What a column stores below its lists, and the lengths of these lists, if they are stated.
fn stored_values(column: &Column) -> std::result::Result<(Leaf, Vec<Option<u64>>), String> {
    let mut sizes = Vec::new();
    let mut at = column;
    loop {
        let in_list = !sizes.is_empty();
        let size = match at.kind {
            _ if at.dictionary.is_some() && in_list => {
                return Err("lists of values of a dictionary are not read".into());
            }
            Kind::Bytes { .. } | Kind::Views if in_list => {
                return Err("lists of bytes are not read: choose other columns".into());
            }
            Kind::List { .. } | Kind::FixedList(_) if at.dictionary.is_some() => {
                return Err("a dictionary of lists is not read".into());
            }
            Kind::List { .. } => None,
            Kind::FixedList(size) => Some(size),
            Kind::Number(dtype) => return Ok((Leaf::Number(dtype), sizes)),
            Kind::Bool => return Ok((Leaf::Bits, sizes)),
            Kind::Bytes { .. } | Kind::Views => return Ok((Leaf::Bytes, sizes)),
            Kind::Fixed(bytes) => return Ok((Leaf::Fixed(bytes), sizes)),
            Kind::Struct if sizes.is_empty() && at.dictionary.is_none() => {
                let parts = at.children.first().map_or("…", |child| &child.name);
                return Err(format!(
                    "choose one of its parts, as in \"{}.{parts}\", or read pictures by {}",
                    column.name,
                    Setting::ArrowImage
                ));
            }
            Kind::Struct | Kind::Other { .. } => {
                return Err("values of this type are not read: choose other columns".into());
            }
        };
        sizes.push(size);
        at = &at.children[0];
    }
}

/// The column of this name, or the part of one, by way of structures.
fn find<'a>(columns: &'a [Column], name: &str) -> Option<(usize, Vec<usize>, &'a Column)> {
    let exact = columns
        .iter()
        .enumerate()
        .find(|(_, column)| column.name == name);
    if let Some((number, column)) = exact {
        return Some((number, Vec::new(), column));
    }
    columns.iter().enumerate().find_map(|(number, column)| {
        let rest = name.strip_prefix(&*column.name)?.strip_prefix('.')?;
        let (child, below, found) = match column.kind {
            Kind::Struct if column.dictionary.is_none() => find(&column.children, rest)?,
            _ => return None,
        };
        Some((number, [vec![child], below].concat(), found))
    })
}

impl Take {
    /// Whether a column of such values in such lists is the one that was asked for.
    fn is_of(&self, leaf: Leaf, sizes: &[Option<u64>]) -> bool {
        let mut levels = sizes.iter().zip(&self.lists);
        leaf == self.leaf
            && sizes.len() == self.lists.len()
            && !levels.any(|(size, asked)| size.zip(*asked).is_some_and(|(a, b)| a != b))
    }

    /// Finds the column in a file. Errors: it is missing, or stores something else.
    pub(super) fn resolve<'a>(
        &'a self,
        columns: &'a Columns,
    ) -> std::result::Result<Resolved<'a>, Fault> {
        let name = &self.path;
        let Some((number, structs, column)) = find(&columns.all, name) else {
            return Err(Fault::unsupported(format!(
                "no column `{name}`, which the first file has"
            )));
        };
        match stored_values(column) {
            Ok((leaf, sizes)) if self.is_of(leaf, &sizes) => Ok(Resolved {
                name,
                number,
                structs,
                column,
                lists: &self.lists,
            }),
            _ => Err(Fault::unsupported(format!(
                "column `{name}` is {} here, something else in the first file",
                column.described()
            ))),
        }
    }
}

impl Resolved<'_> {
    /// The dictionary of the column's values.
    pub(super) fn dictionary(&self) -> Option<i64> {
        self.column.dictionary.map(|dictionary| dictionary.id)
    }
}
