//! From a path and a few settings to a dataset with its decoders.

use crate::error::config;
use crate::given::Given;
use crate::python::{self, Code, Declared, Samples};
use feedline::dataset::{
    Concat, Dataset, DatasetExt, Images, Mds, Megatron, Mix, Npy, Npz, Nulls, Parquet, Records, SafeTensors, Tar,
    TfRecord, Tokens,
};
use feedline::decode::{Bytes, Image, Limits, PixelLayout};
use feedline::device::Finish;
use feedline::tensor::{DType, Encoding, Field};
use feedline::{Loader, LoaderBuilder, Order, Result};
use pyo3::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the data is. A setting that the source does not have is refused, not ignored.
pub struct Source {
    kind: String,
    paths: Vec<PathBuf>,
    weights: Option<Vec<f64>>,
    subset: Option<Vec<u64>>,
    take: Option<(f64, u64)>,
    leave: Option<(f64, u64)>,
    samples: Option<Samples>,
    decoders: Vec<(Py<PyAny>, Declared)>,
    code: Arc<Code>,
    record_bytes: Option<usize>,
    token: Option<String>,
    seq_len: Option<usize>,
    next_token: Option<bool>,
    image: Option<String>,
    columns: Option<Vec<String>>,
    stack: Option<String>,
    rows: Option<bool>,
    up_to: Option<usize>,
    null_zero: Option<bool>,
    index_file: Option<PathBuf>,
    checked: Option<PathBuf>,
    seek_points: Option<PathBuf>,
    in_memory: Option<bool>,
}

/// Mean and standard deviation, in units of 0..=1: one per channel, or one for all.
type Normalize = [Vec<f32>; 2];

/// What becomes of pictures.
pub struct Pictures {
    size: Option<Side>,
    augment: Option<bool>,
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

/// A dataset, and its order if it is a mix.
pub type Opened = (Arc<dyn Dataset>, Option<Order>);

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

impl Source {
    pub fn of(kind: String, paths: Paths, given: &mut Given<'_>, code: &Arc<Code>) -> PyResult<Self> {
        Ok(Self {
            kind,
            paths: match paths {
                Paths::One(path) => vec![path],
                Paths::Several(paths) => paths,
            },
            weights: given.take("weights")?,
            subset: given.take("subset")?,
            take: given.take("take")?,
            leave: given.take("leave")?,
            samples: given.take("samples")?,
            decoders: given.take("decoders")?.unwrap_or_default(),
            code: code.clone(),
            record_bytes: given.take("record_bytes")?,
            token: given.take("token")?,
            seq_len: given.take("seq_len")?,
            next_token: given.take("next_token")?,
            image: given.take("image")?,
            columns: given.take("columns")?,
            stack: given.take("stack")?,
            rows: given.take("rows")?,
            up_to: given.take("up_to")?,
            null_zero: given.take("null_zero")?,
            index_file: given.take("index_file")?,
            checked: given.take("checked")?,
            seek_points: given.take("seek_points")?,
            in_memory: given.take("in_memory")?,
        })
    }

    /// The dataset in a builder, with a decoder for each field that needs one.
    pub fn builder(&self, opened: &Opened, pictures: &Pictures, seed: Option<u64>) -> Result<LoaderBuilder> {
        let random = pictures.random(seed.is_some());
        let dataset = opened.0.clone();
        if let Some(samples) = &self.samples {
            pictures.refuse()?;
            let decoder = Python::attach(|py| samples.decoder(py, self.code.clone()))?;
            return Ok(Loader::builder(dataset).decode(decoder));
        }
        let (schema, longest) = (dataset.schema().to_vec(), dataset.sample_bytes_max());
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        if schema.iter().all(|field| field.encoding != Encoding::Image) {
            pictures.refuse()?;
        }
        if let Some((_, Declared(name, ..))) =
            self.decoders.iter().find(|(_, of)| !schema.iter().any(|f| f.name == of.0))
        {
            let names: Vec<_> = schema.iter().map(|field| field.name.as_str()).collect();
            return Err(config(format!("decoders: the source has no field {name:?}; it has {}", names.join(", "))));
        }
        schema.into_iter().try_fold(Loader::builder(dataset), |builder, field| {
            if let Some((function, declared)) = self.decoders.iter().find(|(_, of)| of.0 == field.name) {
                let decoder = Python::attach(|py| python::decoder(py, &self.code, function, declared))?;
                return Ok::<_, feedline::Error>(builder.decode_field(&field.name, decoder));
            }
            Ok(match field.encoding {
                Encoding::Image => {
                    let builder = builder.decode_field(&field.name, pictures.decoder(random)?);
                    pictures.finish()?.into_iter().fold(builder, |builder, finish| builder.finish(&field.name, finish))
                }
                Encoding::Bytes => builder.decode_field(&field.name, Bytes::up_to(self.up_to.unwrap_or(longest))),
                _ => builder,
            })
        })
    }

    pub fn open(&self, seed: Option<u64>) -> Result<Opened> {
        self.refuse_foreign()?;
        let (dataset, order) = self.joined(seed)?;
        let part = |(fraction, key), first: bool| -> Result<Arc<dyn Dataset>> {
            let (taken, left) = dataset.clone().split(fraction, key)?;
            Ok(if first { Arc::new(taken) } else { Arc::new(left) })
        };
        let chosen = match (&self.subset, self.take, self.leave) {
            (None, None, None) => dataset,
            _ if order.is_some() => {
                return Err(config("weights mix whole datasets: subset, take and leave are not for a mix"));
            }
            (Some(ids), None, None) => Arc::new(dataset.subset(ids.clone())?),
            (None, Some(split), None) => part(split, true)?,
            (None, None, Some(split)) => part(split, false)?,
            _ => return Err(config("subset, take and leave choose samples: only one of them at a time")),
        };
        Ok((self.wrapped(chosen)?, order))
    }

    /// The dataset of all paths, and its order if they are mixed.
    fn joined(&self, seed: Option<u64>) -> Result<Opened> {
        let parts = self.paths.iter().map(|path| self.format(path)).collect::<Result<Vec<_>>>()?;
        let Some(weights) = &self.weights else {
            return Ok(match <[_; 1]>::try_from(parts) {
                Ok([only]) => (only, None),
                Err(parts) => (Arc::new(Concat::new(parts)?), None),
            });
        };
        if weights.len() != parts.len() {
            return Err(config(format!("{} weights for {} paths: give one for each", weights.len(), parts.len())));
        }
        let seed = seed.ok_or_else(|| config("weights mix in a random order: shuffle, its seed, is missing"))?;
        let mix = Mix::new(parts.into_iter().zip(weights.iter().copied()), seed)?;
        Ok((mix.dataset(), Some(mix.order())))
    }

    fn wrapped(&self, mut dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>> {
        if let Some(place) = &self.checked {
            dataset = Arc::new(dataset.checked(place)?);
        }
        if let Some(place) = &self.seek_points {
            dataset = Arc::new(dataset.seekable(place)?);
        }
        Ok(if self.in_memory == Some(true) { Arc::new(dataset.in_memory()?) } else { dataset })
    }

    fn format(&self, path: &Path) -> Result<Arc<dyn Dataset>> {
        if let Some(samples) = &self.samples {
            return Ok(samples.dataset());
        }
        let columns = || self.columns.iter().flatten().map(String::as_str);
        let window = self.seq_len.unwrap_or(2048);
        let next = self.next_token == Some(true);
        Ok(match self.kind.as_str() {
            "images" => Arc::new(Images::open(path)?),
            "records" => {
                let bytes = self.record_bytes.ok_or_else(|| config("source \"records\" needs record_bytes"))?;
                Arc::new(Records::builder(bytes).open(path)?)
            }
            "tokens" => {
                let builder = Tokens::builder(dtype(self.token.as_deref().unwrap_or("u16"))?).window(window);
                Arc::new(if next { builder.next_token() } else { builder }.open(path)?)
            }
            "megatron" => Arc::new(match self.up_to {
                Some(max) => Megatron::builder().documents(max).open(path)?,
                None => {
                    let builder = Megatron::builder().window(window);
                    if next { builder.next_token() } else { builder }.open(path)?
                }
            }),
            "tar" => Arc::new(self.tar().open(path)?),
            "tfrecord" => Arc::new(self.tfrecord()?.open(path)?),
            "parquet" => Arc::new(self.parquet(path)?),
            "npy" => Arc::new(self.npy(path)?),
            "npz" => Arc::new(self.npz(path)?),
            "safetensors" if self.columns.is_none() => Arc::new(SafeTensors::open(path)?),
            "safetensors" => Arc::new(SafeTensors::builder().tensors(columns()).open(path)?),
            "mds" if self.columns.is_none() => Arc::new(Mds::open(path)?),
            "mds" => Arc::new(Mds::builder().columns(columns()).open(path)?),
            other => return Err(config(format!("source {other:?}: there are {}", SOURCES.join(", ")))),
        })
    }

    fn refuse_foreign(&self) -> Result<()> {
        let given: [Owned<'_>; 10] = [
            ("record_bytes", self.record_bytes.is_some(), &["records"]),
            ("token", self.token.is_some(), &["tokens"]),
            ("seq_len", self.seq_len.is_some(), &["tokens", "megatron"]),
            ("next_token", self.next_token.is_some(), &["tokens", "megatron"]),
            ("image", self.image.is_some(), &["tar", "tfrecord", "parquet"]),
            ("columns", self.columns.is_some(), &["tar", "tfrecord", "parquet", "npz", "safetensors", "mds"]),
            ("stack", self.stack.is_some(), &["parquet"]),
            ("rows", self.rows.is_some(), &["npy", "npz"]),
            ("up_to", self.up_to.is_some(), &["megatron", "tar", "parquet", "mds", "npy", "npz"]),
            ("null_zero", self.null_zero.is_some(), &["parquet"]),
        ];
        let index: Owned<'_> = ("index_file", self.index_file.is_some(), &["tar", "tfrecord"]);
        let foreign = |(_, given, kinds): &&Owned<'_>| *given && !kinds.contains(&self.kind.as_str());
        match given.iter().chain([&index]).find(foreign) {
            Some((name, _, kinds)) => {
                Err(config(format!("{name} is for source {}, not {:?}", kinds.join(", "), self.kind)))
            }
            None => Ok(()),
        }
    }

    /// Without settings the first sample says what members there are.
    fn tar(&self) -> feedline::dataset::TarBuilder {
        let mut builder = self.image.iter().fold(Tar::builder(), |builder, endings| builder.image(endings));
        if let Some(file) = &self.index_file {
            builder = builder.index_file(file);
        }
        self.columns.iter().flatten().fold(builder, |builder, ending| {
            if ending == "cls" || ending.ends_with(".cls") { builder.class(ending) } else { builder.bytes(ending) }
        })
    }

    /// Columns are numbers: `label` one integer, `boxes:f32:4` four floats.
    fn tfrecord(&self) -> Result<feedline::dataset::TfRecordBuilder> {
        let mut builder = self.image.iter().fold(TfRecord::builder(), |builder, feature| builder.image(feature));
        if let Some(file) = &self.index_file {
            builder = builder.index_file(file);
        }
        self.columns.iter().flatten().try_fold(builder, |builder, column| {
            let mut parts = column.split(':');
            let name = parts.next().unwrap_or_default();
            let kind = parts.next().unwrap_or("i64");
            let count = parts.next().map_or(Ok(1_usize), str::parse);
            let count =
                count.map_err(|_| config(format!("column {column:?}: NAME, NAME:i64:COUNT or NAME:f32:COUNT")))?;
            let shape = if count == 1 { vec![] } else { vec![count] };
            match kind {
                "i64" => Ok(builder.ints(Field::fixed(name, DType::I64, shape), name)),
                "f32" => Ok(builder.floats(Field::fixed(name, DType::F32, shape), name)),
                other => Err(config(format!("column {column:?}: type {other:?}, there are i64 and f32"))),
            }
        })
    }

    fn parquet(&self, path: &Path) -> Result<Parquet> {
        let mut builder = self.image.iter().fold(Parquet::builder(), |builder, image| builder.image(image));
        if self.null_zero == Some(true) {
            builder = builder.nulls(Nulls::Zero);
        }
        let columns = self.columns.as_deref().unwrap_or_default();
        builder = match (&self.stack, self.up_to) {
            (Some(name), _) => builder.stack(name, columns),
            (None, Some(max)) => columns.iter().fold(builder, |builder, name| builder.up_to(name, max)),
            (None, None) => builder.columns(columns.iter().map(String::as_str)),
        };
        builder.open(path)
    }

    fn npy(&self, path: &Path) -> Result<Npy> {
        let mut builder = Npy::builder().field("array", path);
        if self.rows == Some(true) {
            builder = builder.rows();
        }
        if let Some(max) = self.up_to {
            builder = builder.up_to("array", max);
        }
        builder.open()
    }

    fn npz(&self, path: &Path) -> Result<Npz> {
        let mut builder = Npz::builder();
        if let Some(columns) = &self.columns {
            builder = builder.fields(columns.iter().map(String::as_str));
        }
        if self.rows == Some(true) {
            builder = builder.rows();
        }
        if self.up_to.is_some() && self.columns.is_none() {
            return Err(config("up_to is the most rows of the arrays in columns: say columns, too"));
        }
        if let Some(max) = self.up_to {
            builder = self.columns.iter().flatten().fold(builder, |builder, name| builder.up_to(name, max));
        }
        builder.open(path)
    }
}

const SOURCES: [&str; 11] =
    ["images", "records", "tokens", "megatron", "tar", "tfrecord", "parquet", "npy", "npz", "safetensors", "mds"];

impl Pictures {
    pub fn of(given: &mut Given<'_>) -> PyResult<Self> {
        Ok(Self {
            size: given.take("size")?,
            augment: given.take("augment")?,
            dtype: given.take("dtype")?,
            normalize: given.take("normalize")?,
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

    /// For training a random part and a flip; else the middle, as validation usually has it. Bytes in any case.
    fn decoder(&self, random: bool) -> Result<Image> {
        let size = self.size.ok_or_else(|| config("the source has pictures: size (pixels of a side) is missing"))?;
        let image = match size {
            Side::Both(height, width) if self.augment != Some(true) => Image::resize(width, height),
            Side::Both(..) => return Err(config("augment cuts squares: size is then one number, not (height, width)")),
            Side::Square(size) if random => Image::random_resized_crop(size).flip(0.5),
            Side::Square(size) => Image::center_crop(size.saturating_mul(8) / 7, size),
        };
        // Floats get their layout when they are made.
        let planes = self.channels_first()? && self.dtype.is_none();
        let image = image.layout(if planes { PixelLayout::Nchw } else { PixelLayout::Nhwc });
        let image = image.dct_scaling(self.dct_scaling).strict(self.strict.unwrap_or(true));
        let limits = self.max_pixels.map_or_else(Limits::default, Limits::of_pixels);
        Ok(image.exif_orientation(self.exif_orientation).limits(limits))
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
                Some(_) => Err(config("normalize makes floats: say dtype, \"f32\", \"f16\" or \"bf16\"")),
            };
        };
        let mut finish = Finish::to(dtype(name)?);
        if let Some([mean, std]) = &self.normalize {
            finish = finish.mean_std(mean, std);
        }
        Ok(Some(if self.channels_first()? { finish.channels_first() } else { finish }))
    }

    /// For a source that has none.
    fn refuse(&self) -> Result<()> {
        let given = [
            ("size", self.size.is_some()),
            ("augment", self.augment.is_some()),
            ("dtype", self.dtype.is_some()),
            ("normalize", self.normalize.is_some()),
            ("layout", self.layout.is_some()),
            ("dct_scaling", self.dct_scaling),
            ("strict", self.strict.is_some()),
            ("max_pixels", self.max_pixels.is_some()),
            ("exif_orientation", self.exif_orientation),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(config(format!("{name} is for pictures, and the source has none"))),
            None => Ok(()),
        }
    }
}

pub fn dtype(name: &str) -> Result<DType> {
    use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    let all = [Bool, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64];
    let names = || all.map(DType::name).join(", ");
    all.into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| config(format!("element type {name:?}: there are {}", names())))
}
