//! From a path and a few settings to a dataset with its decoders.

use crate::error::{config, exception};
use crate::given::{Chosen, Given};
use crate::narrow::Narrow;
use crate::python::{self, Code, Declared, Samples};
use crate::texts::Texts;
use feedline::dataset::{
    Arrow, Concat, Dataset, DatasetExt, FileColumn, FileValues, Images, Jsonl, Mds, Megatron,
    Missing, Mix, Npy, Npz, Nulls, Parquet, ParquetBuilder, Records, SafeTensors, Table, Tar,
    TarBuilder, TfRecord, Tokens,
};
use feedline::decode::{Bytes, Each, Filter, Image, Limits, PixelLayout};
use feedline::device::Finish;
use feedline::order::Groups;
use feedline::tensor::{DType, EncodedField, Encoding, Field};
use feedline::{ErrorKind, Loader, LoaderBuilder, Result};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the data is. A setting that the source does not have is refused, not ignored.
pub struct Source {
    kind: String,
    paths: Vec<PathBuf>,
    weights: Option<Vec<f64>>,
    schedule: Option<Vec<(u64, Vec<f64>)>>,
    epoch_len: Option<u64>,
    subset: Option<Chosen>,
    take: Option<(f64, u64)>,
    leave: Option<(f64, u64)>,
    samples: Option<Samples>,
    decoders: Vec<(Py<PyAny>, Declared)>,
    code: Arc<Code>,
    record_bytes: Option<usize>,
    token: Option<String>,
    header_bytes: Option<u64>,
    separator: Option<u64>,
    seq_len: Option<usize>,
    next_token: Option<bool>,
    vocabulary: Option<u64>,
    cut: Option<bool>,
    image: Option<Names>,
    columns: Option<Vec<String>>,
    elements: Option<UpTo>,
    stack: Option<String>,
    rows: Option<bool>,
    up_to: Option<UpTo>,
    flat: Option<usize>,
    raw: Option<Vec<String>>,
    null_zero: Option<bool>,
    follow_links: Option<bool>,
    missing_zero: Option<bool>,
    context_only: Option<bool>,
    index_file: Option<PathBuf>,
    lengths_file: Option<PathBuf>,
    checked: Option<PathBuf>,
    seek_points: Option<PathBuf>,
    packed: Option<Packing>,
    in_memory: Option<bool>,
    integers: Option<String>,
    join: Option<Paths>,
    key: Option<String>,
    missing: Option<String>,
    join_columns: Option<Vec<String>>,
    table: Option<TableFiles>,
    texts: Option<Texts>,
}

/// Files of a table, of which another library has read the log.
struct TableFiles {
    files: Vec<PathBuf>,
    columns: Vec<FileColumn>,
    snapshot: String,
    /// The columns' ids in the table, if the format has some.
    ids: Vec<(String, i32)>,
    /// The ids of columns by their names, for files without ids.
    mapped: Vec<(String, i32)>,
}

impl TableFiles {
    fn of(table: &Bound<'_, PyDict>) -> PyResult<Self> {
        let given = |name| {
            let value = table.get_item(name)?;
            value.ok_or_else(|| PyTypeError::new_err(format!("table: {name} is missing")))
        };
        let columns: Vec<(String, String, Bound<'_, PyAny>)> = given("columns")?.extract()?;
        let columns = columns.into_iter().map(|(name, kind, values)| {
            let values = match kind.as_str() {
                "bool" => FileValues::Bool(values.extract()?),
                "i8" => FileValues::I8(values.extract()?),
                "i16" => FileValues::I16(values.extract()?),
                "i32" => FileValues::I32(values.extract()?),
                "i64" => FileValues::I64(values.extract()?),
                "f32" => FileValues::F32(values.extract()?),
                "f64" => FileValues::F64(values.extract()?),
                "text" => FileValues::Text(values.extract()?),
                other => {
                    let message = format!("table: column {name:?} of type {other:?}");
                    return Err(PyTypeError::new_err(message));
                }
            };
            Ok(FileColumn::new(name, values))
        });
        Ok(Self {
            files: given("files")?.extract()?,
            columns: columns.collect::<PyResult<_>>()?,
            snapshot: given("snapshot")?.extract()?,
            ids: given("ids")?.extract()?,
            mapped: given("mapped")?.extract()?,
        })
    }
}

/// Rows of documents.
struct Packing {
    tokens: usize,
    bins: Paths,
    field: Option<Names>,
    key: Option<u64>,
    longer: Option<String>,
    documents_max: Option<usize>,
    padding: Option<Padding>,
    rows: Option<Paths>,
    copy: Option<Paths>,
    estimated: Option<bool>,
}

/// One name or several: the field of the documents and those beside it, or the fields of pictures.
#[derive(FromPyObject)]
enum Names {
    One(String),
    Several(Vec<String>),
}

impl Names {
    fn all(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Several(names) => names,
        }
    }
}

/// An element of the padding: of all fields, or of each.
#[derive(FromPyObject)]
enum Padding {
    All(i64),
    Each(BTreeMap<String, i64>),
}

impl Packing {
    fn of(packed: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut given = Given::new(packed.py(), Some(packed))?;
        let missing = |name| PyTypeError::new_err(format!("packed: {name} is missing"));
        let packing = Self {
            tokens: given.take("tokens")?.ok_or_else(|| missing("tokens"))?,
            bins: given.take("bins")?.ok_or_else(|| missing("bins"))?,
            field: given.take("field")?,
            key: given.take("key")?,
            longer: given.take("longer")?,
            documents_max: given.take("documents_max")?,
            padding: given.take("padding")?,
            rows: given.take("rows")?,
            copy: given.take("copy")?,
            estimated: given.take("estimated")?,
        };
        given.finish().map(|()| packing)
    }

    /// Packs each dataset by itself, with its own files.
    fn open(&self, datasets: Vec<Arc<dyn Dataset>>) -> Result<Vec<Arc<dyn Dataset>>> {
        for (name, paths) in [
            ("bins", Some(&self.bins)),
            ("rows", self.rows.as_ref()),
            ("copy", self.copy.as_ref()),
        ] {
            if let Some(given) = paths
                .map(|paths| paths.all().len())
                .filter(|given| *given != datasets.len())
            {
                let message = format!(
                    "packed: {given} {name}, and {} are needed: one file for each path of a mix, or for all paths without \
                     weights or schedule",
                    datasets.len()
                );
                return Err(config(message));
            }
        }
        datasets
            .into_iter()
            .enumerate()
            .map(|(number, dataset)| self.open_one(dataset, number))
            .collect()
    }

    fn open_one(&self, dataset: Arc<dyn Dataset>, number: usize) -> Result<Arc<dyn Dataset>> {
        let names = self.fields(&*dataset);
        let builder = dataset
            .packed(&names[0], self.tokens)
            .beside(names[1..].iter().map(String::as_str));
        let builder = match &self.padding {
            None => builder,
            Some(Padding::All(element)) => builder.padding(*element),
            Some(Padding::Each(each)) => each.iter().fold(builder, |builder, (name, element)| {
                builder.padding_of(name, *element)
            }),
        };
        let builder = self
            .key
            .into_iter()
            .fold(builder, |builder, key| builder.shuffled(key));
        let builder = self
            .documents_max
            .into_iter()
            .fold(builder, |builder, most| builder.documents_max(most));
        let builder = self
            .rows
            .iter()
            .fold(builder, |builder, rows| builder.rows(&rows.all()[number]));
        let builder = match self.estimated {
            Some(true) => builder.estimated(),
            _ => builder,
        };
        let builder = match self.longer.as_deref() {
            None => builder,
            Some("split") => builder.split(),
            Some("cut") => builder.cut(),
            Some("concatenate") => builder.concatenated(),
            Some(other) => {
                let message = format!(
                    "packed: longer {other:?}; there are \"split\", \"cut\" and \"concatenate\""
                );
                return Err(config(message));
            }
        };
        Ok(Arc::new(builder.open(&self.bins.all()[number])?))
    }

    /// The names that are given.
    fn named(&self) -> &[String] {
        self.field.as_ref().map_or(&[], Names::all)
    }

    /// The fields to pack. By default the only one, those of texts, or `tokens`.
    fn fields(&self, dataset: &dyn Dataset) -> Vec<String> {
        let schema = dataset.schema();
        let known = |name: &&str| schema.iter().any(|field| field.name == *name);
        match (self.named(), schema) {
            ([], [only]) => vec![only.name.clone()],
            ([], _) if known(&"input_ids") => {
                let names = ["input_ids", "loss"].into_iter().filter(known);
                names.map(String::from).collect()
            }
            ([], _) => vec!["tokens".into()],
            (names, _) => names.to_vec(),
        }
    }

    /// The documents in a file of their own, if one is named.
    fn copied(&self, dataset: Arc<dyn Dataset>, number: usize) -> Result<Arc<dyn Dataset>> {
        let Some(place) = self.copy.as_ref().and_then(|copy| copy.all().get(number)) else {
            return Ok(dataset);
        };
        let names = self.fields(&*dataset);
        Ok(Arc::new(
            dataset.copied(names.iter().map(String::as_str), place)?,
        ))
    }
}

/// Mean and standard deviation, in units of 0..=1: one per channel, or one for all.
type Normalize = [Vec<f32>; 2];

/// One for each channel, or one for all.
#[derive(FromPyObject)]
enum Channels {
    All(f32),
    Each(Vec<f32>),
}

impl From<Channels> for Vec<f32> {
    fn from(values: Channels) -> Self {
        match values {
            Channels::All(value) => vec![value],
            Channels::Each(values) => values,
        }
    }
}

/// What becomes of pictures.
pub struct Pictures {
    size: Option<Side>,
    patches: Option<(u32, u32)>,
    enlarge: Option<bool>,
    merge: Option<(u32, u32)>,
    buckets: Option<Vec<[u32; 2]>>,
    sizes: Option<Vec<[u32; 2]>>,
    augment: Option<bool>,
    filter: Option<String>,
    dtype: Option<String>,
    normalize: Option<Normalize>,
    layout: Option<String>,
    dct_scaling: bool,
    strict: Option<bool>,
    max_pixels: Option<u64>,
    exif_orientation: bool,
}

/// Settings of one kind of source: the name, whether it is given, and the sources that have it.
type Owned<'a> = (&'a str, bool, &'a [&'a str]);

/// The most elements of what varies in length: of all columns, or of each.
#[derive(FromPyObject)]
enum UpTo {
    All(usize),
    Each(BTreeMap<String, usize>),
}

impl UpTo {
    fn of(&self, column: &str) -> Option<usize> {
        match self {
            Self::All(max) => Some(*max),
            Self::Each(each) => each.get(column).copied(),
        }
    }
}

/// Size of the pictures: of a square part, or height and width of the whole ones.
#[derive(Clone, Copy, FromPyObject)]
enum Side {
    Square(u32),
    Both(u32, u32),
}

/// One path, or several whose samples are those of one dataset.
#[derive(FromPyObject)]
pub enum Paths {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

/// Segments of a linear ramp for `schedule`: at most 64 steps over the positions from `start` to
/// `end`, then `after`.
#[pyfunction]
pub fn ramp(
    py: Python<'_>,
    start: u64,
    end: u64,
    before: Vec<f64>,
    after: Vec<f64>,
) -> PyResult<Vec<(u64, Vec<f64>)>> {
    if start > end {
        let message = format!("a ramp from position {start} to {end}: give the earlier one first");
        return Err(exception(py, &config(message)));
    }
    Ok(Mix::ramp(start..end, &before, &after))
}

impl Paths {
    fn all(&self) -> &[PathBuf] {
        match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Several(paths) => paths,
        }
    }
}

impl Source {
    pub fn of(
        kind: String,
        paths: Paths,
        given: &mut Given<'_>,
        code: &Arc<Code>,
    ) -> PyResult<Self> {
        Ok(Self {
            kind,
            paths: paths.all().to_vec(),
            weights: given.take("weights")?,
            schedule: given.take("schedule")?,
            epoch_len: given.take("epoch_len")?,
            subset: given.take("subset")?,
            take: given.take("take")?,
            leave: given.take("leave")?,
            samples: given.take("samples")?,
            decoders: given.take("decoders")?.unwrap_or_default(),
            code: code.clone(),
            record_bytes: given.take("record_bytes")?,
            token: given.take("token")?,
            header_bytes: given.take("header_bytes")?,
            separator: given.take("separator")?,
            seq_len: given.take("seq_len")?,
            next_token: given.take("next_token")?,
            vocabulary: given.take("vocabulary")?,
            cut: given.take("cut")?,
            image: given.take("image")?,
            columns: given.take("columns")?,
            elements: given.take("elements")?,
            stack: given.take("stack")?,
            rows: given.take("rows")?,
            up_to: given.take("up_to")?,
            flat: given.take("flat")?,
            raw: given.take("raw")?,
            null_zero: given.take("null_zero")?,
            follow_links: given.take("follow_links")?,
            missing_zero: given.take("missing_zero")?,
            context_only: given.take("context_only")?,
            index_file: given.take("index_file")?,
            lengths_file: given.take("lengths_file")?,
            checked: given.take("checked")?,
            seek_points: given.take("seek_points")?,
            packed: given
                .take::<Py<PyDict>>("packed")?
                .map(|own| Packing::of(own.bind(given.py())))
                .transpose()?,
            in_memory: given.take("in_memory")?,
            integers: given.take("integers")?,
            join: given.take("join")?,
            key: given.take("key")?,
            missing: given.take("missing")?,
            join_columns: given.take("join_columns")?,
            table: given
                .take::<Py<PyDict>>("table")?
                .map(|table| TableFiles::of(table.bind(given.py())))
                .transpose()?,
            texts: Texts::of(given)?,
        })
    }

    /// The dataset in a builder, with a decoder for each field that needs one.
    pub fn builder(
        &self,
        dataset: &Arc<dyn Dataset>,
        pictures: &Pictures,
        seed: Option<u64>,
    ) -> Result<LoaderBuilder> {
        let random = pictures.random(seed.is_some());
        let narrow = match self.integers.as_deref() {
            None => false,
            Some("i32") => true,
            Some(other) => return Err(config(format!("integers {other:?}: there is \"i32\""))),
        };
        let dataset = dataset.clone();
        if let Some(samples) = &self.samples {
            pictures.refuse("")?;
            let decoder = Python::attach(|py| samples.decoder(py, self.code.clone(), narrow))?;
            return Ok(Loader::builder(dataset).decode(decoder));
        }
        let schema = dataset.schema().to_vec();
        if !schema.iter().any(|field| field.encoding.has_pictures()) {
            pictures.refuse(&self.name_pictures(&schema))?;
        }
        if let Some((_, Declared(name, ..))) = self
            .decoders
            .iter()
            .find(|(_, of)| !schema.iter().any(|f| f.name == of.0))
        {
            let names: Vec<_> = schema.iter().map(|field| field.name.as_str()).collect();
            return Err(config(format!(
                "decoders: the source has no field {name:?}; it has {}",
                names.join(", ")
            )));
        }
        let mut builder = Loader::builder(dataset.clone());
        let mut tokenized = Vec::new();
        if let Some(texts) = self.texts.as_ref().filter(|_| !self.has_tokens()) {
            tokenized = texts.columns(&schema)?;
            builder = texts.decode(&tokenized, builder)?;
        }
        schema
            .iter()
            .enumerate()
            .filter(|(_, field)| !tokenized.contains(&field.name.as_str()))
            .try_fold(builder, |builder, (number, field)| {
                if let Some((function, declared)) =
                    self.decoders.iter().find(|(_, of)| of.0 == field.name)
                {
                    let decoder =
                        Python::attach(|py| python::decoder(py, &self.code, function, declared))?;
                    return Ok::<_, feedline::Error>(builder.decode_field(&field.name, decoder));
                }
                Ok(match field.encoding {
                    Encoding::Image => {
                        // Pictures that are named together are cut alike.
                        let pair = matches!(&self.image, Some(Names::Several(all)) if all.len() > 1);
                        let decoder = pictures.decoder(random)?.paired(pair);
                        let builder = builder.decode_field(&field.name, decoder);
                        pictures
                            .finish()?
                            .into_iter()
                            .fold(builder, |builder, finish| {
                                builder.finish(&field.name, finish)
                            })
                    }
                    Encoding::List { pictures: true, .. } => {
                        let decoder = Each::new(pictures.decoder_of_lists(random)?);
                        builder.decode_field(&field.name, decoder)
                    }
                    Encoding::List { .. } => {
                        let most = self.up_to.as_ref().and_then(|up_to| up_to.of(&field.name));
                        let most = most.ok_or_else(|| {
                            config(format!(
                                "{:?} is a list: up_to={{{:?}: NUMBER}}, the most bytes of an element, is missing",
                                field.name, field.name
                            ))
                        })?;
                        builder.decode_field(&field.name, Each::new(Bytes::up_to(most)))
                    }
                    Encoding::Bytes => {
                        let most = match self.up_to.as_ref().and_then(|up_to| up_to.of(&field.name))
                        {
                            Some(most) => most,
                            None => usize::try_from(dataset.field_bytes_max(number)?.max(1))
                                .unwrap_or(usize::MAX),
                        };
                        builder.decode_field(&field.name, Bytes::up_to(most))
                    }
                    Encoding::Raw {
                        dtype: DType::I64 | DType::U64,
                        ..
                    } if narrow => builder.decode_field(&field.name, Narrow),
                    _ => builder,
                })
            })
    }

    /// How to say which column has the pictures, where the source has such a setting.
    fn name_pictures(&self, schema: &[EncodedField]) -> String {
        if self.image.is_some()
            || !["tar", "tfrecord", "arrow", "parquet"].contains(&self.kind.as_str())
        {
            return String::new();
        }
        let is_picture = |name: &&str| {
            let ending = name.rsplit('.').next().unwrap_or_default();
            PICTURES.contains(&ending.to_ascii_lowercase().as_str())
        };
        let mut bytes = schema
            .iter()
            .filter(|field| matches!(field.encoding, Encoding::Bytes))
            .map(|field| field.name.as_str());
        match bytes.clone().find(is_picture).or_else(|| bytes.next()) {
            Some(name) => {
                format!(": name their column by image={name:?}, and leave it out of columns")
            }
            None => ": name their column by image=NAME".into(),
        }
    }

    /// `budget`: the loader's, in bytes.
    pub fn open(&self, seed: Option<u64>, budget: usize) -> Result<Arc<dyn Dataset>> {
        self.refuse_foreign()?;
        let dataset = self.joined(self.of_paths(seed)?)?;
        let dataset: Arc<dyn Dataset> = match &self.lengths_file {
            Some(place) => Arc::new(dataset.facts(place).lengths().open()?),
            None => dataset,
        };
        let dataset = match self.copies() {
            // Verified while it is copied, and whole, so that its parts share the copy.
            Some(packed) => packed.copied(self.verified(dataset)?, 0)?,
            None => dataset,
        };
        let part = |(fraction, key), first: bool| -> Result<Arc<dyn Dataset>> {
            let (taken, left) = dataset.clone().split(fraction, key)?;
            Ok(if first {
                Arc::new(taken)
            } else {
                Arc::new(left)
            })
        };
        let chosen = match (&self.subset, self.take, self.leave) {
            (None, None, None) => dataset,
            _ if self.is_mixed() => {
                return Err(config(
                    "weights mix whole datasets: subset, take and leave are not for a mix",
                ));
            }
            (Some(chosen), None, None) => {
                let ids = chosen.ids("subset", dataset.len())?;
                Arc::new(dataset.subset(ids)?)
            }
            (None, Some(split), None) => part(split, true)?,
            (None, None, Some(split)) => part(split, false)?,
            _ => {
                return Err(config(
                    "subset, take and leave choose samples: only one of them at a time",
                ));
            }
        };
        self.wrapped(chosen, budget)
    }

    /// The packing of one dataset, if it copies its documents.
    fn copies(&self) -> Option<&Packing> {
        self.packed
            .as_ref()
            .filter(|packed| packed.copy.is_some() && !self.is_mixed())
    }

    fn verified(&self, dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>> {
        Ok(match &self.checked {
            Some(place) => Arc::new(dataset.facts(place).checksums().open()?),
            None => dataset,
        })
    }

    fn pointed(&self, dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>> {
        Ok(match &self.seek_points {
            Some(place) => Arc::new(dataset.facts(place).seek_points().open()?),
            None => dataset,
        })
    }

    /// Whether samples are rows of documents.
    pub fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// The dataset with the fields of what `join` names: tables and shards, one after the other.
    fn joined(&self, dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>> {
        let Some(join) = self.join.as_ref().map(Paths::all) else {
            let alone = [
                ("key", self.key.is_some()),
                ("missing", self.missing.is_some()),
                ("join_columns", self.join_columns.is_some()),
            ];
            return match alone.iter().find(|(_, given)| *given) {
                Some((name, _)) => Err(config(format!("{name} is about join: give join, too"))),
                None => Ok(dataset),
            };
        };
        let missing = match self.missing.as_deref() {
            None | Some("error") => Missing::Error,
            Some("skip") => Missing::Skip,
            Some(other) => {
                let message = format!("missing {other:?}: there are \"error\" and \"skip\"");
                return Err(config(message));
            }
        };
        if join.len() > 1 && self.join_columns.is_some() {
            let message = "join_columns are those of one table: give one path to join";
            return Err(config(message));
        }
        join.iter().try_fold(dataset, |dataset, path| {
            let joined = dataset.join(self.other(path)?).missing(missing).open()?;
            Ok(Arc::new(joined) as _)
        })
    }

    /// The table or the shards of a path of `join`, by its ending.
    fn other(&self, path: &Path) -> Result<Arc<dyn Dataset>> {
        let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
        let ending = ending.as_deref().and_then(|ending| ending.to_str());
        let key = self.key.as_deref().unwrap_or("file_name");
        let columns = self.join_columns.as_deref();
        Ok(match ending {
            Some("csv" | "tsv") => {
                let builder = Table::builder(key);
                let columns = columns.map(|columns| columns.iter().map(String::as_str));
                let builder = columns
                    .into_iter()
                    .fold(builder, |builder, columns| builder.columns(columns));
                Arc::new(builder.read(path)?)
            }
            Some("parquet" | "parq" | "pq") => {
                // Without names all columns are taken.
                let named = columns.map(|columns| columns.iter().map(String::as_str));
                let builder = named
                    .into_iter()
                    .fold(Parquet::builder(), |builder, columns| {
                        builder.column(key).columns(columns)
                    });
                let rows = builder.open(path)?;
                Arc::new(Table::of(&rows, key)?)
            }
            Some("tar") if self.key.is_some() => {
                return Err(config("key is a table's: shards have keys of their own"));
            }
            Some("tar") => {
                let Some(columns) = columns else {
                    let message = "join: of shards say join_columns, the endings of their members";
                    return Err(config(message));
                };
                Arc::new(self.members(Tar::builder(), columns)?.open(path)?)
            }
            _ => {
                let message = format!(
                    "join={path:?}: give files or a pattern that ends in .csv, .tsv, .parquet or \
                     .tar"
                );
                return Err(config(message));
            }
        })
    }

    /// The dataset of all paths.
    fn of_paths(&self, seed: Option<u64>) -> Result<Arc<dyn Dataset>> {
        let mut parts = Vec::new();
        let mut empty = None;
        for path in &self.paths {
            match self.format(path).and_then(|part| self.tokenized(part)) {
                // As in a folder, a file may hold no samples.
                Err(error)
                    if error.kind() == ErrorKind::Empty && !self.is_mixed() && path.is_file() =>
                {
                    empty = Some(error)
                }
                opened => parts.push(opened?),
            }
        }
        if let (true, Some(error)) = (parts.is_empty(), empty) {
            return Err(error);
        }
        if !self.is_mixed() {
            if self.epoch_len.is_some() {
                return Err(config("epoch_len is for a mix: give weights or schedule"));
            }
            return Ok(match <[_; 1]>::try_from(parts) {
                Ok([only]) => only,
                Err(parts) => Arc::new(Concat::new(parts)?),
            });
        }
        if let Some(packed) = &self.packed {
            let copied = parts
                .into_iter()
                .enumerate()
                .map(|(number, part)| packed.copied(part, number));
            parts = packed.open(copied.collect::<Result<_>>()?)?;
        }
        let mix = self.mix(parts, seed)?;
        let mix = self.epoch_len.into_iter().try_fold(mix, Mix::epoch_len)?;
        Ok(Arc::new(mix))
    }

    /// Tokens in place of texts, where their lengths matter; elsewhere a decoder makes them.
    fn tokenized(&self, dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>> {
        match &self.texts {
            Some(texts) if self.has_tokens() => texts.tokenized(dataset),
            _ => Ok(dataset),
        }
    }

    fn has_tokens(&self) -> bool {
        self.packed.is_some() || self.lengths_file.is_some()
    }

    fn is_mixed(&self) -> bool {
        self.weights.is_some() || self.schedule.is_some()
    }

    fn mix(&self, parts: Vec<Arc<dyn Dataset>>, seed: Option<u64>) -> Result<Mix> {
        let seed =
            seed.ok_or_else(|| config("a mix has a random order: shuffle, its seed, is missing"))?;
        match (&self.weights, &self.schedule) {
            (Some(_), Some(_)) => Err(config("weights and schedule: give one of them")),
            (Some(weights), _) if weights.len() != parts.len() => Err(config(format!(
                "{} weights for {} paths: give one for each, or sample_weights for samples",
                weights.len(),
                parts.len()
            ))),
            (Some(weights), _) => Mix::new(parts.into_iter().zip(weights.iter().copied()), seed),
            (None, schedule) => Mix::scheduled(parts, schedule.clone().unwrap_or_default(), seed),
        }
    }

    fn wrapped(&self, mut dataset: Arc<dyn Dataset>, budget: usize) -> Result<Arc<dyn Dataset>> {
        let checked = self.checked.as_ref().filter(|_| self.copies().is_none());
        dataset = match (checked, &self.seek_points) {
            // One pass finds both.
            (Some(place), Some(points)) if place == points => {
                Arc::new(dataset.facts(place).checksums().seek_points().open()?)
            }
            (Some(_), _) => self.pointed(self.verified(dataset)?)?,
            (None, _) => self.pointed(dataset)?,
        };
        // Those of a mix are packed before.
        if let Some(packed) = self.packed.as_ref().filter(|_| !self.is_mixed()) {
            dataset = packed.open(vec![dataset])?.remove(0);
        }
        Ok(if self.in_memory == Some(true) {
            Arc::new(dataset.in_memory_within(budget)?)
        } else {
            dataset
        })
    }

    fn format(&self, path: &Path) -> Result<Arc<dyn Dataset>> {
        if let Some(samples) = &self.samples {
            return Ok(samples.dataset());
        }
        let columns = || self.columns.iter().flatten().map(String::as_str);
        let window = self.seq_len.unwrap_or(2048);
        let next = self.next_token == Some(true);
        let packs = self.packed.is_some();
        if packs && self.kind == "tokens" && self.separator.is_none() {
            return Err(config(
                "packed makes rows of whole documents: give separator, the token that ends a document (GPT-2's is 50256), in \
                 place of seq_len",
            ));
        }
        let megatron = || {
            self.vocabulary
                .into_iter()
                .fold(Megatron::builder(), |builder, size| {
                    builder.vocabulary(size)
                })
        };
        if packs && (self.seq_len.is_some() || next) {
            return Err(config(
                "packed makes rows of whole documents: leave out seq_len and next_token",
            ));
        }
        Ok(match self.kind.as_str() {
            "images" => Arc::new(Images::open(path)?),
            "records" => {
                let bytes = self
                    .record_bytes
                    .ok_or_else(|| config("source \"records\" needs record_bytes"))?;
                Arc::new(Records::builder(bytes).open(path)?)
            }
            "tokens" => {
                let builder = Tokens::builder(dtype(self.token.as_deref().unwrap_or("u16"))?);
                let builder = match (self.separator, self.seq_len) {
                    (Some(token), None) => builder.separator(token),
                    (Some(_), Some(_)) => {
                        return Err(config(
                            "separator makes documents, seq_len windows: give one of them",
                        ));
                    }
                    (None, _) => builder.window(window),
                };
                let builder = self
                    .index_file
                    .iter()
                    .fold(builder, |builder, file| builder.index_file(file));
                let builder = self
                    .header_bytes
                    .into_iter()
                    .fold(builder, |builder, bytes| builder.header(bytes));
                let builder = self
                    .vocabulary
                    .into_iter()
                    .fold(builder, |builder, size| builder.vocabulary(size));
                Arc::new(if next { builder.next_token() } else { builder }.open(path)?)
            }
            "megatron" => Arc::new(match self.one_up_to()?.or(packs.then_some(DOCUMENT_MAX)) {
                Some(_) if self.seq_len.is_some() || next => {
                    return Err(config(
                        "documents are whole: leave out seq_len and next_token",
                    ));
                }
                Some(max) => megatron()
                    .documents(max)
                    .cut(self.cut == Some(true))
                    .open(path)?,
                None if self.cut.is_some() => {
                    return Err(config(
                        "cut is about documents: say documents, their most tokens",
                    ));
                }
                None => {
                    let builder = megatron().window(window);
                    if next { builder.next_token() } else { builder }.open(path)?
                }
            }),
            "tar" => Arc::new(self.tar()?.open(path)?),
            "tfrecord" => Arc::new(self.tfrecord()?.open(path)?),
            "jsonl" => Arc::new(self.jsonl()?.open(path)?),
            "arrow" => Arc::new(self.arrow()?.open(path)?),
            "parquet" => Arc::new(self.parquet(path)?),
            "npy" => Arc::new(self.npy(path)?),
            "npz" => Arc::new(self.npz(path)?),
            "safetensors" if self.columns.is_none() => Arc::new(SafeTensors::open(path)?),
            "safetensors" => Arc::new(SafeTensors::builder().tensors(columns()).open(path)?),
            "mds" => Arc::new(self.mds()?.open(path)?),
            other => {
                return Err(config(format!(
                    "source {other:?}: there are {}",
                    SOURCES.join(", ")
                )));
            }
        })
    }

    /// The most elements, for a source of one field.
    fn one_up_to(&self) -> Result<Option<usize>> {
        match self.up_to {
            Some(UpTo::Each(_)) => Err(config(format!(
                "up_to: source {:?} has one field, give a number",
                self.kind
            ))),
            Some(UpTo::All(max)) => Ok(Some(max)),
            None => Ok(None),
        }
    }

    /// The most elements of columns that vary. Documents that are packed may have any length.
    fn most(&self) -> Option<&UpTo> {
        const DOCUMENTS: UpTo = UpTo::All(DOCUMENT_MAX);
        self.up_to
            .as_ref()
            .or(self.packed.is_some().then_some(&DOCUMENTS))
    }

    /// The most elements of a column of lists. A number is that of all pictures; in a tar, of all
    /// endings with a place for the element's number.
    fn elements(&self, name: &str, is_picture: bool) -> Option<usize> {
        match &self.elements {
            Some(UpTo::All(max)) if self.kind == "tar" => name.contains('*').then_some(*max),
            Some(UpTo::All(max)) => is_picture.then_some(*max),
            Some(UpTo::Each(each)) => each.get(name).copied(),
            None => None,
        }
    }

    fn refuse_elements(&self) -> Result<()> {
        let pictures = self.image.iter().flat_map(Names::all);
        let columns = self.columns.iter().flatten();
        let columns = columns.map(|column| &column[..name_end(column)]);
        let names: Vec<&str> = pictures.map(String::as_str).chain(columns).collect();
        match &self.elements {
            Some(UpTo::Each(each)) => {
                match each.keys().find(|name| !names.contains(&name.as_str())) {
                    Some(name) => Err(config(format!(
                        "elements names {name:?}, image and columns do not: name it in one of them, too"
                    ))),
                    None => Ok(()),
                }
            }
            Some(UpTo::All(_)) if self.kind == "parquet" && self.image.is_none() => Err(config(
                "elements is a number for image, which is missing: of columns give a dict from name to number",
            )),
            Some(UpTo::All(_))
                if self.kind == "tar" && !names.iter().any(|name| name.contains('*')) =>
            {
                Err(config(
                    "elements is for members with numbers: put * in their ending, as in \"frames.*.jpg\"",
                ))
            }
            _ => Ok(()),
        }
    }

    fn refuse_foreign(&self) -> Result<()> {
        self.refuse_elements()?;
        if let Some(UpTo::Each(each)) = &self.up_to {
            let names = || {
                self.columns
                    .iter()
                    .flatten()
                    .map(|column| column.split_at(name_end(column)).0)
            };
            if let Some(name) = each
                .keys()
                .find(|name| !names().any(|column| column == *name))
            {
                return Err(config(format!(
                    "up_to names {name:?}, columns does not: name it in both"
                )));
            }
        }
        let given: [Owned<'_>; 23] = [
            ("join", self.join.is_some(), &["images", "tar"]),
            ("record_bytes", self.record_bytes.is_some(), &["records"]),
            ("token", self.token.is_some(), &["tokens"]),
            ("header_bytes", self.header_bytes.is_some(), &["tokens"]),
            ("separator", self.separator.is_some(), &["tokens"]),
            ("cut", self.cut.is_some(), &["megatron"]),
            ("flat", self.flat.is_some(), &["npy", "npz"]),
            ("raw", self.raw.is_some(), &["mds"]),
            (
                "missing_zero",
                self.missing_zero.is_some(),
                &["tfrecord", "jsonl"],
            ),
            ("context_only", self.context_only.is_some(), &["tfrecord"]),
            ("seq_len", self.seq_len.is_some(), &["tokens", "megatron"]),
            (
                "next_token",
                self.next_token.is_some(),
                &["tokens", "megatron"],
            ),
            (
                "vocabulary",
                self.vocabulary.is_some(),
                &["tokens", "megatron"],
            ),
            (
                "image",
                self.image.is_some(),
                &["tar", "tfrecord", "arrow", "parquet"],
            ),
            (
                "columns",
                self.columns.is_some(),
                &[
                    "tar",
                    "tfrecord",
                    "jsonl",
                    "arrow",
                    "parquet",
                    "npz",
                    "safetensors",
                    "mds",
                ],
            ),
            (
                "elements",
                self.elements.is_some(),
                &["tar", "jsonl", "parquet"],
            ),
            ("stack", self.stack.is_some(), &["parquet"]),
            ("rows", self.rows.is_some(), &["npy", "npz"]),
            (
                "up_to",
                self.up_to.is_some(),
                &[
                    "megatron", "tar", "tfrecord", "jsonl", "arrow", "parquet", "mds", "npy", "npz",
                ],
            ),
            ("null_zero", self.null_zero.is_some(), &["arrow", "parquet"]),
            ("table", self.table.is_some(), &["parquet"]),
            ("follow_links", self.follow_links.is_some(), &["mds"]),
            (
                "tokenizer",
                self.texts.is_some(),
                &["arrow", "jsonl", "parquet"],
            ),
        ];
        let index: Owned<'_> = (
            "index_file",
            self.index_file.is_some(),
            &["tar", "tfrecord", "jsonl", "arrow", "tokens"],
        );
        match given
            .iter()
            .chain([&index])
            .find(|(_, given, kinds)| *given && !kinds.contains(&self.kind.as_str()))
        {
            Some((name, _, kinds)) => Err(config(format!(
                "{name} is for source {}, not {:?}",
                kinds.join(", "),
                self.kind
            ))),
            None => Ok(()),
        }
    }

    /// Without settings the first sample says what members there are. Members of numbers are
    /// `ENDING:TYPE:COUNT`, as in [`Self::field`].
    fn tar(&self) -> Result<TarBuilder> {
        let pictures = self.image.iter().flat_map(Names::all);
        let mut builder = pictures.fold(Tar::builder(), |builder, endings| {
            // One of several has the name of its first ending.
            let name = match &self.image {
                Some(Names::Several(_)) => endings.split(';').next().unwrap_or_default(),
                _ => "image",
            };
            let field = match self.elements(endings, true) {
                Some(max) => EncodedField::images(name, max),
                None => EncodedField::image(name),
            };
            builder.field(field, endings)
        });
        if let Some(file) = &self.index_file {
            builder = builder.index_file(file);
        }
        self.members(builder, self.columns.as_deref().unwrap_or_default())
    }

    fn members(&self, builder: TarBuilder, columns: &[String]) -> Result<TarBuilder> {
        columns.iter().try_fold(builder, |builder, ending| {
            if ending.contains(':') {
                let field = self.field(ending)?;
                let name = field.name().to_string();
                return Ok(builder.raw(field, &name));
            }
            if let Some(max) = self.elements(ending, false) {
                return Ok(builder.list(ending, max));
            }
            let is_class = ending == "cls" || ending.ends_with(".cls");
            Ok(if is_class {
                builder.class(ending)
            } else {
                builder.bytes(ending)
            })
        })
    }

    /// The columns that are read: without `columns`, of those to pack the ones that are named.
    fn wanted(&self) -> Option<&[String]> {
        let packed = self
            .packed
            .as_ref()
            .map(Packing::named)
            .filter(|names| !names.is_empty());
        self.columns.as_deref().or(packed)
    }

    /// Columns are `NAME:TYPE:COUNT`, as in [`Self::field`], with the types i64 and f32; or
    /// `NAME:bytes`.
    fn tfrecord(&self) -> Result<feedline::dataset::TfRecordBuilder> {
        let pictures = self.image.iter().flat_map(Names::all);
        let mut builder = pictures.fold(TfRecord::builder(), |builder, feature| match self.image {
            Some(Names::Several(_)) => builder.field(EncodedField::image(feature), feature),
            _ => builder.image(feature),
        });
        builder = builder
            .missing_zero(self.missing_zero == Some(true))
            .context_only(self.context_only == Some(true));
        if let Some(file) = &self.index_file {
            builder = builder.index_file(file);
        }
        self.columns
            .iter()
            .flatten()
            .try_fold(builder, |builder, column| {
                if let Some(name) = column.strip_suffix(":bytes") {
                    return Ok(builder.bytes(name));
                }
                let field = self.field(column)?;
                let name = field.name().to_string();
                match field.dtype() {
                    DType::I64 => Ok(builder.ints(field, &name)),
                    DType::F32 => Ok(builder.floats(field, &name)),
                    other => Err(config(format!(
                        "column {column:?}: type {other}, there are i64, f32 and bytes"
                    ))),
                }
            })
    }

    /// Columns are `PATH:TYPE:COUNT`, as in [`Self::field`], or `PATH:bytes` and `PATH:json`.
    fn jsonl(&self) -> Result<feedline::dataset::JsonlBuilder> {
        let mut builder = Jsonl::builder().missing_zero(self.missing_zero == Some(true));
        if let Some(file) = &self.index_file {
            builder = builder.index_file(file);
        }
        let text = ["text:bytes".to_string()];
        let columns = match (&self.columns, &self.texts) {
            (Some(columns), _) => columns.as_slice(),
            (None, Some(texts)) if !texts.is_chat() => &text,
            (None, _) => &[],
        };
        columns.iter().try_fold(builder, |builder, column| {
            let (path, kind) = column.split_at(name_end(column));
            Ok(match (kind, self.elements(path, false)) {
                (":bytes", Some(max)) => builder.texts(path, max),
                (":bytes", None) if path.contains("[]") => {
                    return Err(config(format!(
                        "{column:?} is a list: elements={{{path:?}: NUMBER}}, its most texts, is missing"
                    )));
                }
                (":bytes", None) => builder.text(path),
                (":json", _) => builder.json(path),
                _ => builder.numbers(self.field(column)?, path),
            })
        })
    }

    /// Columns are names, or `NAME:TYPE:COUNT`, as in [`Self::field`].
    fn arrow(&self) -> Result<feedline::dataset::ArrowBuilder> {
        let pictures = self.image.iter().flat_map(Names::all);
        let mut builder = pictures.fold(Arrow::builder(), |builder, name| builder.image(name));
        builder = builder.null_zero(self.null_zero == Some(true));
        if let Some(file) = &self.index_file {
            builder = builder.index_file(file);
        }
        if let Some(UpTo::All(max)) = self.most() {
            builder = builder.varying_up_to(*max);
        }
        let columns = self.wanted().unwrap_or_default();
        columns.iter().try_fold(builder, |builder, column| {
            let (name, kind) = column.split_at(name_end(column));
            Ok(match &self.up_to {
                _ if !kind.is_empty() => builder.numbers(self.field(column)?),
                Some(UpTo::Each(each)) if each.contains_key(name) => {
                    builder.up_to(name, each[name])
                }
                _ => builder.column(name),
            })
        })
    }

    /// A field by its words: `label` is one i64, `boxes:f32:4` four floats, `image:u8:28x28` an
    /// array, and `ids:i64:?` any number up to `up_to`.
    fn field(&self, words: &str) -> Result<Field> {
        let (name, rest) = words.split_at(name_end(words));
        let mut parts = rest.splitn(3, ':').skip(1);
        let kind = parts.next().unwrap_or("i64");
        let count = parts.next();
        let dims = match (
            count.unwrap_or("1"),
            self.most().and_then(|up_to| up_to.of(name)),
        ) {
            ("?", Some(max)) => return Ok(Field::up_to(name, dtype(kind)?, max)),
            ("?", None) => {
                return Err(config(format!(
                    "{words:?}: up_to, the most values, is missing"
                )));
            }
            (dims, _) => dims
                .split('x')
                .map(str::parse)
                .collect::<std::result::Result<Vec<usize>, _>>(),
        };
        let dims = dims.map_err(|_| {
            config(format!(
                "{words:?}: NAME, NAME:TYPE or NAME:TYPE:COUNT, as 4, 2x3 or ?"
            ))
        })?;
        Ok(Field::fixed(
            name,
            dtype(kind)?,
            if dims == [1] { vec![] } else { dims },
        ))
    }

    fn mds(&self) -> Result<feedline::dataset::MdsBuilder> {
        let mut builder = Mds::builder().follow_links(self.follow_links == Some(true));
        builder = match self.most() {
            Some(UpTo::All(max)) => builder.up_to("*", *max),
            Some(UpTo::Each(each)) => each
                .iter()
                .fold(builder, |builder, (name, max)| builder.up_to(name, *max)),
            None => builder,
        };
        if let Some(columns) = self.wanted() {
            builder = builder.columns(columns.iter().cloned());
        }
        self.raw
            .iter()
            .flatten()
            .try_fold(
                builder,
                |builder, words| Ok(builder.raw(self.field(words)?)),
            )
    }

    fn parquet(&self, path: &Path) -> Result<Parquet> {
        let pictures = self.image.iter().flat_map(Names::all);
        let mut builder = pictures.fold(Parquet::builder(), |builder, name| {
            match self.elements(name, true) {
                Some(max) => builder.images(name, max),
                None => builder.image(name),
            }
        });
        if self.null_zero == Some(true) {
            builder = builder.nulls(Nulls::Zero);
        }
        let columns = self.wanted().unwrap_or_default();
        if let Some(UpTo::All(max)) = self.most() {
            builder = builder.varying_up_to(*max);
        }
        let one = |builder: ParquetBuilder, name: &String| match (
            self.elements(name, false),
            &self.up_to,
        ) {
            (Some(max), _) => builder.list(name, max),
            (None, Some(UpTo::Each(each))) if each.contains_key(name) => {
                builder.up_to(name, each[name])
            }
            _ => builder.column(name),
        };
        builder = match &self.stack {
            Some(name) => builder.stack(name, columns),
            None => columns.iter().fold(builder, one),
        };
        match &self.table {
            Some(table) => builder
                .snapshot(&table.snapshot)
                .field_ids(table.ids.iter().cloned())
                .mapped_ids(table.mapped.iter().cloned())
                .open_files(&table.files, table.columns.iter().cloned()),
            None => builder.open(path),
        }
    }

    fn npy(&self, path: &Path) -> Result<Npy> {
        let mut builder = Npy::builder().field("array", path);
        if self.rows == Some(true) {
            builder = builder.rows();
        }
        builder = self
            .one_up_to()?
            .into_iter()
            .fold(builder, |builder, max| builder.up_to("array", max));
        self.flat
            .into_iter()
            .fold(builder, |builder, max| builder.flat("array", max))
            .open()
    }

    fn npz(&self, path: &Path) -> Result<Npz> {
        let mut builder = Npz::builder();
        if let Some(columns) = &self.columns {
            builder = builder.fields(columns.iter().map(String::as_str));
        }
        if self.rows == Some(true) {
            builder = builder.rows();
        }
        builder = match &self.up_to {
            Some(UpTo::All(max)) => builder.up_to("*", *max),
            Some(UpTo::Each(each)) => each
                .iter()
                .fold(builder, |builder, (name, max)| builder.up_to(name, *max)),
            None => builder,
        };
        self.flat
            .into_iter()
            .fold(builder, |builder, max| builder.flat("*", max))
            .open(path)
    }
}

/// Where the name in a column's words ends: at a colon that is not in quotes.
fn name_end(words: &str) -> usize {
    let mut quoted = false;
    let mut escaped = false;
    let end = words.bytes().position(|byte| {
        quoted ^= byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        byte == b':' && !quoted
    });
    end.unwrap_or(words.len())
}

/// Most tokens of a document that is packed.
const DOCUMENT_MAX: usize = 1 << 30;

/// Endings of pictures.
const PICTURES: [&str; 8] = ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif"];

const SOURCES: [&str; 13] = [
    "images",
    "records",
    "tokens",
    "megatron",
    "tar",
    "tfrecord",
    "jsonl",
    "arrow",
    "parquet",
    "npy",
    "npz",
    "safetensors",
    "mds",
];

impl Pictures {
    pub fn of(given: &mut Given<'_>) -> PyResult<Self> {
        Ok(Self {
            size: given.take("size")?,
            patches: given.take("patches")?,
            enlarge: given.take("enlarge")?,
            merge: given.take("merge")?,
            buckets: given.take("buckets")?,
            sizes: given.take("sizes")?,
            augment: given.take("augment")?,
            filter: given.take("filter")?,
            dtype: given.take("dtype")?,
            normalize: given
                .take::<[Channels; 2]>("normalize")?
                .map(|both| both.map(Vec::from)),
            layout: given.take("layout")?,
            dct_scaling: given.take("dct_scaling")?.unwrap_or(false),
            strict: given.take("strict")?,
            max_pixels: given.take("max_pixels")?,
            exif_orientation: given.take("exif_orientation")?.unwrap_or(false),
        })
    }

    /// Whether a random part is taken, by default with a shuffled order.
    pub fn random(&self, shuffled: bool) -> bool {
        self.augment.unwrap_or(shuffled)
    }

    /// The decoder of each picture of a list: it makes the values, too, because lists are not
    /// finished later.
    fn decoder_of_lists(&self, random: bool) -> Result<Image> {
        if self.decodes_values() {
            return Err(config(
                "lists of pictures have one size: give size, and leave out patches and buckets",
            ));
        }
        // Refuses the same values.
        self.finish()?;
        let image = self.values(self.decoder(random)?)?;
        Ok(image.layout(if self.channels_first()? {
            PixelLayout::Nchw
        } else {
            PixelLayout::Nhwc
        }))
    }

    /// For training a random part and a flip; else the middle, as validation usually has it. Bytes
    /// in any case.
    fn decoder(&self, random: bool) -> Result<Image> {
        let side = match (self.size, self.patches, &self.buckets) {
            (None, None, None) => {
                return Err(config(
                    "the source has pictures: size (pixels of a side), patches or buckets is missing",
                ));
            }
            (_, Some(_), Some(_)) => {
                return Err(config(
                    "patches have the pictures' own sizes: leave out buckets",
                ));
            }
            (Some(_), Some(_), _) => {
                return Err(config(
                    "patches have the pictures' own sizes: leave out size",
                ));
            }
            (Some(_), _, Some(_)) => {
                return Err(config("buckets are the sizes of pictures: leave out size"));
            }
            (side, ..) => side,
        };
        if self.patches.is_none() && (self.enlarge.is_some() || self.merge.is_some()) {
            return Err(config("enlarge and merge are for patches"));
        }
        let image = match (side, self.patches) {
            (Some(side), _) => self.one_size(side, random)?,
            (None, Some((size, most))) => self.patched(Image::patches(size, most))?,
            (None, None) => {
                let image = Image::buckets(turned(self.buckets.as_deref().unwrap_or_default()));
                self.values(
                    image
                        .random_crop(random)
                        .flip(if random { 0.5 } else { 0.0 }),
                )?
            }
        };
        // Floats get their layout when they are made.
        let planes = self.channels_first()? && (self.dtype.is_none() || self.decodes_values());
        let image = image.layout(if planes {
            PixelLayout::Nchw
        } else {
            PixelLayout::Nhwc
        });
        let image = match self.filter.as_deref() {
            None => image,
            Some("nearest") => image.filter(Filter::Nearest),
            Some("bilinear") => image.filter(Filter::Bilinear),
            Some("bicubic") => image.filter(Filter::Bicubic),
            Some("lanczos") => image.filter(Filter::Lanczos3),
            Some(other) => {
                return Err(config(format!(
                    "filter {other:?}: there are nearest, bilinear, bicubic and lanczos"
                )));
            }
        };
        let image = image
            .dct_scaling(self.dct_scaling)
            .strict(self.strict.unwrap_or(true));
        let limits = self
            .max_pixels
            .map_or_else(Limits::default, Limits::of_pixels);
        Ok(image.exif_orientation(self.exif_orientation).limits(limits))
    }

    /// Whether the decoder makes the values, because the shape of a batch varies and cannot be
    /// finished later.
    fn decodes_values(&self) -> bool {
        self.patches.is_some() || self.buckets.is_some()
    }

    fn patched(&self, image: Image) -> Result<Image> {
        let image = image.flip(if self.augment == Some(true) { 0.5 } else { 0.0 });
        self.values(match (self.merge, self.enlarge) {
            (Some(_), Some(true)) => {
                return Err(config(
                    "merge has its own least number of patches: leave out enlarge",
                ));
            }
            (Some((side, least)), _) => image.merge(side, least),
            (None, enlarge) => image.enlarge(enlarge.unwrap_or(false)),
        })
    }

    /// A decoder of pictures that stand as these do.
    pub fn upright(&self) -> Image {
        Image::resize(1, 1).exif_orientation(self.exif_orientation)
    }

    /// The groups of an order by `buckets`.
    pub fn groups(&self) -> Result<Option<Groups>> {
        match (&self.buckets, &self.sizes) {
            (Some(buckets), Some(sizes)) => Image::buckets(turned(buckets))
                .groups(turned(sizes))
                .map(Some),
            (None, None) => Ok(None),
            (None, Some(_)) if self.patches.is_some() => Ok(None),
            (Some(_), None) => Err(config(
                "buckets need sizes, the (height, width) of every picture",
            )),
            (None, Some(_)) => Err(config(
                "sizes are for buckets and patches: say one of them, too",
            )),
        }
    }

    /// The patches of each picture, to group by.
    pub fn patch_counts(&self) -> Result<Option<Vec<u64>>> {
        let sizes = self.sizes.as_deref().filter(|_| self.patches.is_some());
        sizes
            .map(|sizes| self.decoder(false)?.patch_counts(turned(sizes)))
            .transpose()
    }

    fn values(&self, image: Image) -> Result<Image> {
        let image = self
            .dtype
            .as_deref()
            .map(dtype)
            .transpose()?
            .into_iter()
            .fold(image, Image::dtype);
        let three = |values: &[f32]| match *values {
            [all] => Ok([all; 3]),
            [red, green, blue] => Ok([red, green, blue]),
            _ => Err(config(format!(
                "normalize has {} values for 3 channels: give 1 or 3",
                values.len()
            ))),
        };
        match &self.normalize {
            Some([mean, std]) if self.dtype.is_some() => {
                Ok(image.normalize(three(mean)?, three(std)?))
            }
            _ => Ok(image),
        }
    }

    fn one_size(&self, side: Side, random: bool) -> Result<Image> {
        Ok(match side {
            Side::Both(height, width) if self.augment != Some(true) => Image::resize(width, height),
            Side::Both(..) => {
                return Err(config(
                    "augment cuts squares: size is then one number, not (height, width)",
                ));
            }
            Side::Square(size) if random => Image::random_resized_crop(size).flip(0.5),
            Side::Square(size) => Image::center_crop(size.saturating_mul(8) / 7, size),
        })
    }

    fn channels_first(&self) -> Result<bool> {
        match self.layout.as_deref() {
            Some("nchw") => Ok(true),
            None | Some("nhwc") => Ok(false),
            Some(other) => Err(config(format!("layout {other:?}: there are nhwc and nchw"))),
        }
    }

    /// What makes floats of them.
    fn finish(&self) -> Result<Option<Finish>> {
        let Some(name) = &self.dtype else {
            return match self.normalize {
                None => Ok(None),
                Some(_) => Err(config(
                    "normalize makes floats: say dtype, \"f32\", \"f16\" or \"bf16\"",
                )),
            };
        };
        if self.decodes_values() {
            return Ok(None);
        }
        let mut finish = Finish::to(dtype(name)?);
        if let Some([mean, std]) = &self.normalize {
            finish = finish.mean_std(mean, std);
        }
        Ok(Some(if self.channels_first()? {
            finish.channels_first()
        } else {
            finish
        }))
    }

    /// For a source that has none.
    fn refuse(&self, advice: &str) -> Result<()> {
        let given = [
            ("size", self.size.is_some()),
            ("patches", self.patches.is_some()),
            ("enlarge", self.enlarge.is_some()),
            ("merge", self.merge.is_some()),
            ("buckets", self.buckets.is_some()),
            ("augment", self.augment.is_some()),
            ("filter", self.filter.is_some()),
            ("dtype", self.dtype.is_some()),
            ("normalize", self.normalize.is_some()),
            ("layout", self.layout.is_some()),
            ("dct_scaling", self.dct_scaling),
            ("strict", self.strict.is_some()),
            ("max_pixels", self.max_pixels.is_some()),
            ("exif_orientation", self.exif_orientation),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(config(format!(
                "{name} is for pictures, and the source has none{advice}"
            ))),
            None => Ok(()),
        }
    }
}

/// (height, width) as (width, height).
fn turned(sizes: &[[u32; 2]]) -> impl Iterator<Item = (u32, u32)> {
    sizes.iter().map(|[height, width]| (*width, *height))
}

pub fn dtype(name: &str) -> Result<DType> {
    use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    let all = [
        Bool, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64,
    ];
    let names = || all.map(DType::name).join(", ");
    all.into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| config(format!("element type {name:?}: there are {}", names())))
}
