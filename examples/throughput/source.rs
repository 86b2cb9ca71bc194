//! Opens any dataset that feedline supports, from a path and a few settings.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use feedline::dataset::{
    Damage, Dataset, DatasetExt, Images, Mds, Megatron, Npy, Npz, Records, SafeTensors, Tar,
    TarBuilder, TfRecord, TfRecordBuilder, Tokens,
};
use feedline::tensor::{DType, Field};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The program's arguments. A URL with a secret in a wrong place is not repeated, as clap would.
#[allow(dead_code, reason = "not every program has its arguments from here")]
pub fn given<A>(parsed: Result<A, clap::Error>) -> A {
    parsed.unwrap_or_else(|error| {
        let said = error.render().to_string();
        let plain = feedline::Error::user(said.as_str());
        // The help has no secret, though `127.0.0.1:PORT` looks like one.
        if !error.use_stderr() || plain.message() == said {
            error.exit();
        }
        eprint!("{}", plain.message());
        std::process::exit(error.exit_code())
    })
}

/// Format and layout of the data.
#[derive(Args, Clone)]
pub struct SourceArgs {
    /// Format of the data
    #[arg(long, value_enum)]
    pub source: Source,
    /// File, folder, or pattern such as 'train-{0000..0127}.tar' or '*.parquet'
    #[arg(long)]
    pub path: PathBuf,
    /// Records: bytes per record
    #[arg(long, required_if_eq("source", "records"))]
    pub record_bytes: Option<usize>,
    /// Names of columns, members, features or tensors, separated by commas
    /// [default: all; TFRecord: the payload]. Features of TFRecord: 'label' for one integer,
    /// 'boxes:f32:4' for four floats, 'ids:i64:?' for up to --up-to, 'text:bytes'
    #[arg(long, value_delimiter = ',')]
    pub columns: Vec<String>,
    /// Parquet: join the columns into one field of this name
    #[arg(long, requires = "columns")]
    pub stack: Option<String>,
    /// Column, feature or member ending of the encoded pictures
    #[arg(long)]
    pub image: Option<String>,
    /// Whether columns of Parquet that cannot be read are left out.
    #[arg(skip)]
    #[cfg_attr(
        not(feature = "parquet"),
        allow(dead_code, reason = "only Parquet has columns")
    )]
    pub skip_unsupported: bool,
    /// Tokens: data type
    #[arg(long, default_value = "u16", value_parser = one_of(&TOKENS))]
    pub token: DType,
    /// Tokens: bytes before the tokens of each file; 0 takes files as they are
    /// [default: llm.c's header is recognised]
    #[arg(long)]
    pub header_bytes: Option<u64>,
    /// Tokens, Megatron: number of token ids; a larger one is damage, as of tokens of another
    /// --token
    #[arg(long)]
    pub vocabulary: Option<u64>,
    /// Tokens: this one ends a document; samples are documents in place of windows
    #[arg(long)]
    pub separator: Option<u64>,
    /// Tokens: number per sample
    #[arg(long, default_value_t = 2048, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub seq_len: usize,
    /// npy, npz: make each row of the first axis a sample [default: each file]
    #[arg(long)]
    pub rows: bool,
    /// npy, npz, Megatron documents, lists and texts of Parquet, TFRecord, MDS arrays: maximum of
    /// varying lengths, of all or by column: 512 or 'ids=512,text=4096'
    #[arg(long, value_delimiter = ',', value_name = "MAX|COLUMN=MAX")]
    pub up_to: Vec<UpTo>,
    /// Megatron: cut longer documents down to --up-to [default: an error]
    #[arg(long, requires = "up_to")]
    pub cut: bool,
    /// npy, npz: maximum elements of arrays of varying shape, delivered flat with their shape
    #[arg(long, conflicts_with = "up_to")]
    pub flat: Option<usize>,
    /// MDS: types of columns of bytes and arrays, as features of TFRecord: 'tokens:u16:?',
    /// 'image:u8:28x28'
    #[arg(long, value_delimiter = ',')]
    pub raw: Vec<String>,
    /// TFRecord: missing and empty features are zeros [default: an error]
    #[arg(long)]
    pub missing_zero: bool,
    /// TFRecord: read the context of tf.train.SequenceExample, and skip its feature lists
    /// [default: an error]
    #[arg(long)]
    pub context_only: bool,
    /// MDS: follow links of shards that lead out of the folder
    #[arg(long)]
    pub follow_links: bool,
    /// Tar, TFRecord: file or object with the indexes of all shards; tokens: file with the ends of
    /// documents; a missing file is made
    #[arg(long)]
    pub index: Option<PathBuf>,
    /// Parquet: missing values are 0 or empty [default: an error]
    #[arg(long)]
    pub null_zero: bool,
    /// Verify every read against checksums in this file; create it if it is missing
    #[arg(long)]
    pub checked: Option<PathBuf>,
    /// Create the checksums of --checked anew from the present files
    #[arg(long, requires = "checked")]
    pub checked_anew: bool,
    /// JPEGs: decode crops from seek points in this file; create it if it is missing
    #[arg(long)]
    pub seek_points: Option<PathBuf>,
    /// Read all files into memory first
    #[arg(long)]
    pub in_memory: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Source {
    /// Folder of pictures, with a folder per class or flat
    Images,
    /// Fixed-size records in one file, a folder, or files of a pattern
    Records,
    /// WebDataset tar shards
    Tar,
    /// Parquet files
    #[cfg(feature = "parquet")]
    Parquet,
    /// Flat files of tokens
    Tokens,
    /// Megatron's .idx and .bin: windows, or documents with --up-to
    Megatron,
    /// TFRecord files
    Tfrecord,
    /// NumPy arrays
    Npy,
    /// Archives of NumPy arrays
    Npz,
    /// safetensors files
    Safetensors,
    /// MosaicML Streaming shards
    Mds,
}

/// The maximum of a column, or of all that have none.
#[derive(Clone)]
pub struct UpTo {
    column: Option<String>,
    max: usize,
}

impl UpTo {
    fn column(&self) -> &str {
        self.column.as_deref().unwrap_or("*")
    }
}

impl std::str::FromStr for UpTo {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (column, max) = text
            .rsplit_once('=')
            .map_or((None, text), |(column, max)| (Some(column.into()), max));
        Ok(Self {
            column,
            max: max.parse()?,
        })
    }
}

const TOKENS: [(&str, DType); 4] = [
    ("u16", DType::U16),
    ("u32", DType::U32),
    ("i32", DType::I32),
    ("i64", DType::I64),
];

/// Parser of arguments: one of these words, as its value.
pub fn one_of<T: Copy + Send + Sync + 'static>(
    words: &'static [(&str, T)],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word)).try_map(|given| {
        let known = words.iter().find(|(word, _)| *word == given);
        known
            .map(|(_, value)| *value)
            .ok_or("not one of these words")
    })
}

/// Parser of arguments: a number of bytes, also with a unit, such as 500MB or 100GiB.
#[allow(dead_code, reason = "not every program asks for a size")]
pub fn size(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.trim_end_matches(char::is_alphabetic);
    let units = ["kb", "mb", "gb", "tb"]
        .into_iter()
        .zip((1..).map(|power| 1000_u64.pow(power)));
    let binary = ["kib", "mib", "gib", "tib"]
        .into_iter()
        .zip((1..).map(|power| 1024_u64.pow(power)));
    let unit = [("", 1), ("b", 1)]
        .into_iter()
        .chain(units)
        .chain(binary)
        .find(|unit| unit.0 == &lower[digits.len()..]);
    let number = digits
        .trim()
        .parse::<f64>()
        .ok()
        .filter(|number| number.is_finite() && *number >= 0.0);
    let bytes = unit
        .zip(number)
        .map(|((_, unit), number)| (number * unit as f64) as u64);
    bytes.ok_or_else(|| {
        format!("{text:?} is not a number of bytes: write 500MB, 100GiB or 107374182400")
    })
}

/// Applies a setting to a builder, if it is given.
pub fn with<B, T>(builder: B, value: Option<T>, set: impl FnOnce(B, T) -> B) -> B {
    match value {
        Some(value) => set(builder, value),
        None => builder,
    }
}

/// A dataset, and the damage found when it was opened.
#[allow(dead_code, reason = "not every example prints the ledger")]
pub struct Opened {
    pub dataset: Arc<dyn Dataset>,
    pub damage: Vec<Damage>,
}

impl SourceArgs {
    /// Opens the intact part, with a list of the damage.
    #[allow(dead_code, reason = "not every example prints the ledger")]
    pub fn open_all(&self) -> Result<Opened, Box<dyn Error>> {
        if self.checked.is_some() {
            return Ok(Opened {
                dataset: self.open()?,
                damage: Vec::new(),
            });
        }
        match self.source {
            Source::Tar => {
                let tar = self.tar().skip_damage(true).open(&self.path)?;
                let damage = tar.damage().to_vec();
                Ok(Opened {
                    dataset: self.seekable(Arc::new(tar))?,
                    damage,
                })
            }
            Source::Tfrecord => {
                let records = self.tfrecord()?.skip_damage(true).open(&self.path)?;
                let damage = records.damage().to_vec();
                Ok(Opened {
                    dataset: self.seekable(Arc::new(records))?,
                    damage,
                })
            }
            _ => Ok(Opened {
                dataset: self.open()?,
                damage: Vec::new(),
            }),
        }
    }

    /// Opens the dataset; damage that its format detects is an error.
    pub fn open(&self) -> Result<Arc<dyn Dataset>, Box<dyn Error>> {
        self.open_within(usize::MAX)
    }

    /// Opens the dataset for a loader with this memory budget.
    pub fn open_within(&self, budget: usize) -> Result<Arc<dyn Dataset>, Box<dyn Error>> {
        let mut dataset = self.unchecked()?;
        if let Some(place) = &self.checked {
            let facts = dataset.facts(place).checksums();
            let facts = if self.checked_anew {
                facts.anew()
            } else {
                facts
            };
            dataset = Arc::new(facts.open()?);
        }
        dataset = self.seekable(dataset)?;
        if self.in_memory {
            dataset = Arc::new(dataset.in_memory_within(budget)?);
        }
        Ok(dataset)
    }

    fn seekable(&self, dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>, Box<dyn Error>> {
        Ok(match &self.seek_points {
            Some(place) => Arc::new(dataset.facts(place).seek_points().open()?),
            None => dataset,
        })
    }

    fn unchecked(&self) -> Result<Arc<dyn Dataset>, Box<dyn Error>> {
        let path: &Path = &self.path;
        Ok(match self.source {
            Source::Images => Arc::new(Images::open(path)?),
            Source::Records => Arc::new(
                Records::builder(self.record_bytes.ok_or("--record-bytes is missing")?)
                    .open(path)?,
            ),
            Source::Tar => Arc::new(self.tar().open(path)?),
            #[cfg(feature = "parquet")]
            Source::Parquet => Arc::new(self.parquet()?),
            Source::Tokens => {
                let builder = match self.separator {
                    Some(token) => Tokens::builder(self.token).separator(token),
                    None => Tokens::builder(self.token).window(self.seq_len),
                };
                let builder = with(builder, self.index.as_ref(), |builder, file| {
                    builder.index_file(file)
                });
                let builder = with(builder, self.vocabulary, |builder, size| {
                    builder.vocabulary(size)
                });
                Arc::new(
                    with(builder, self.header_bytes, |builder, bytes| {
                        builder.header(bytes)
                    })
                    .open(path)?,
                )
            }
            Source::Megatron => {
                let builder = with(Megatron::builder(), self.vocabulary, |builder, size| {
                    builder.vocabulary(size)
                });
                Arc::new(match self.all_up_to() {
                    Some(max) => builder.documents(max).cut(self.cut).open(path)?,
                    None => builder.window(self.seq_len).open(path)?,
                })
            }
            Source::Tfrecord => Arc::new(self.tfrecord()?.open(path)?),
            Source::Npy => Arc::new(self.npy()?),
            Source::Npz => Arc::new(self.npz()?),
            Source::Safetensors if self.columns.is_empty() => Arc::new(SafeTensors::open(path)?),
            Source::Safetensors => Arc::new(
                SafeTensors::builder()
                    .tensors(self.columns.iter().map(String::as_str))
                    .open(path)?,
            ),
            Source::Mds => Arc::new(self.mds()?),
        })
    }

    fn tar(&self) -> TarBuilder {
        let builder = with(Tar::builder(), self.image.as_ref(), |builder, endings| {
            builder.image(endings)
        });
        let builder = with(builder, self.index.as_ref(), |builder, file| {
            builder.index_file(file)
        });
        self.columns
            .iter()
            .fold(builder, |builder, ending| match ending.rsplit('.').next() {
                Some("cls") => builder.class(ending),
                _ => builder.bytes(ending),
            })
    }

    fn tfrecord(&self) -> Result<TfRecordBuilder, Box<dyn Error>> {
        let builder = TfRecord::builder()
            .context_only(self.context_only)
            .missing_zero(self.missing_zero);
        let builder = with(builder, self.image.as_ref(), |builder, feature| {
            builder.image(feature)
        });
        let mut builder = with(builder, self.index.as_ref(), |builder, file| {
            builder.index_file(file)
        });
        for column in &self.columns {
            if let Some(name) = column.strip_suffix(":bytes") {
                builder = builder.bytes(name);
                continue;
            }
            let field = self.field(column)?;
            let name = field.name().to_string();
            builder = match field.dtype() {
                DType::I64 => builder.ints(field, &name),
                DType::F32 => builder.floats(field, &name),
                other => {
                    return Err(
                        format!("feature {column}: type {other}, give i64, f32 or bytes").into(),
                    );
                }
            };
        }
        Ok(builder)
    }

    fn all_up_to(&self) -> Option<usize> {
        self.up_to
            .iter()
            .find(|up_to| up_to.column.is_none())
            .map(|up_to| up_to.max)
    }

    fn up_to_of(&self, column: &str) -> Option<usize> {
        self.up_to
            .iter()
            .find(|up_to| up_to.column.as_deref() == Some(column))
            .map(|up_to| up_to.max)
    }

    /// A field by its words, such as `boxes:f32:4`, `image:u8:28x28` or `ids:i64:?`.
    fn field(&self, words: &str) -> Result<Field, Box<dyn Error>> {
        use DType::{Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
        let mut parts = words.splitn(3, ':');
        let name = parts.next().unwrap_or_default();
        let kind = parts.next().unwrap_or("i64");
        let count = parts.next();
        let mut all = [Bool, U8, I8, U16, I16, U32, I32, U64, I64, F16, F32, F64].into_iter();
        let dtype = all
            .find(|dtype| dtype.name() == kind)
            .ok_or_else(|| format!("{words}: type {kind} is unknown"))?;
        if count == Some("?") {
            let max = self
                .up_to_of(name)
                .or(self.all_up_to())
                .ok_or_else(|| format!("{words}: give the most values by --up-to"))?;
            return Ok(Field::up_to(name, dtype, max));
        }
        let dims = count
            .unwrap_or("1")
            .split('x')
            .map(str::parse)
            .collect::<Result<Vec<usize>, _>>();
        let dims = dims.map_err(|_| format!("{words}: give a count such as 4, 2x3 or ?"))?;
        Ok(Field::fixed(
            name,
            dtype,
            if dims == [1] { vec![] } else { dims },
        ))
    }

    fn mds(&self) -> Result<Mds, Box<dyn Error>> {
        let builder = Mds::builder().follow_links(self.follow_links);
        let mut builder = self.up_to.iter().fold(builder, |builder, up_to| {
            builder.up_to(up_to.column(), up_to.max)
        });
        if !self.columns.is_empty() {
            builder = builder.columns(self.columns.iter().cloned());
        }
        for words in &self.raw {
            builder = builder.raw(self.field(words)?);
        }
        Ok(builder.open(&self.path)?)
    }

    fn npy(&self) -> feedline::Result<Npy> {
        let mut builder = Npy::builder().field("array", &self.path);
        if self.rows {
            builder = builder.rows();
        }
        builder = self
            .all_up_to()
            .into_iter()
            .fold(builder, |builder, max| builder.up_to("array", max));
        self.flat
            .into_iter()
            .fold(builder, |builder, max| builder.flat("array", max))
            .open()
    }

    fn npz(&self) -> feedline::Result<Npz> {
        let mut builder = Npz::builder();
        if !self.columns.is_empty() {
            builder = builder.fields(self.columns.iter().map(String::as_str));
        }
        if self.rows {
            builder = builder.rows();
        }
        // Others than those that vary, such as a label, keep their shape.
        builder = self.up_to.iter().fold(builder, |builder, up_to| {
            builder.up_to(up_to.column(), up_to.max)
        });
        self.flat
            .into_iter()
            .fold(builder, |builder, max| builder.flat("*", max))
            .open(&self.path)
    }

    #[cfg(feature = "parquet")]
    fn parquet(&self) -> feedline::Result<feedline::dataset::Parquet> {
        use feedline::dataset::{Nulls, Parquet};
        let builder = with(Parquet::builder(), self.image.as_ref(), |builder, image| {
            builder.image(image)
        });
        let builder = with(
            builder,
            self.null_zero.then_some(Nulls::Zero),
            |builder, nulls| builder.nulls(nulls),
        );
        let builder = with(builder, self.all_up_to(), |builder, max| {
            builder.varying_up_to(max)
        });
        let builder = builder.skip_unsupported(self.skip_unsupported);
        if let Some(name) = &self.stack {
            return builder.stack(name, &self.columns).open(&self.path);
        }
        self.columns
            .iter()
            .fold(builder, |builder, name| match self.up_to_of(name) {
                Some(max) => builder.up_to(name, max),
                None => builder.column(name),
            })
            .open(&self.path)
    }
}
