//! The documents of any dataset, read once and in order: to copy them, and to write the files of
//! other tools.
//!
//! ```text
//! samples, or whole chunks ──threads──► runs of documents ──in order──► out
//! ```
//!
//! Memory: [`TOGETHER`] runs of [`RUN_BYTES`], or of one document if it is larger; for data in
//! chunks, [`CHUNKS`] open chunks and their documents.

use crate::dataset::parallel::{by_threads, parallel};
use crate::dataset::sample::Plain;
use crate::dataset::{Dataset, no_field};
use crate::tensor::{EncodedField, Field};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;

/// Maximum samples and bytes of a run.
const RUN: u64 = 256;
const RUN_BYTES: u64 = 4 << 20;
/// Runs that are in memory at the same time.
const TOGETHER: usize = 16;
/// Chunks that are open at the same time.
const CHUNKS: usize = 4;

/// Fields of a dataset whose rows are documents. The first field has the tokens; the others have a
/// value for each token.
pub struct TokenFields {
    /// Positions of the fields in the schema.
    pub numbers: Box<[usize]>,
    pub fields: Box<[Field]>,
}

impl TokenFields {
    /// Errors: [`ErrorKind::Config`] for a field that is unknown, named twice, or does not have one
    /// dimension.
    pub fn of(schema: &[EncodedField], names: &[String]) -> Result<Self> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        let mut numbers = Vec::with_capacity(names.len());
        let mut fields = Vec::with_capacity(names.len());
        for name in names {
            let Some(number) = schema.iter().position(|known| known.name == *name) else {
                return bad(no_field(schema, name));
            };
            let encoding = &schema[number].encoding;
            let Some(field) = schema[number]
                .as_raw()
                .filter(|field| field.dims().len() == 1)
            else {
                return bad(format!(
                    "field `{name}` is {encoding}; only rows of numbers can be packed"
                ));
            };
            if numbers.contains(&number) {
                return bad(format!("field `{name}` is named twice: name it once"));
            }
            numbers.push(number);
            fields.push(field);
        }
        if names.is_empty() {
            return bad("no field given: name the field that holds the documents".into());
        }
        Ok(Self {
            numbers: numbers.into(),
            fields: fields.into(),
        })
    }

    /// Bytes per element, for each field.
    pub fn element_bytes(&self) -> impl Iterator<Item = u64> + '_ {
        self.fields.iter().map(|field| field.dtype().size() as u64)
    }

    /// Number of tokens in a document, from the number of `bytes` of each of its fields.
    ///
    /// Errors: [`ErrorKind::Decode`] if a field is not a whole number of tokens;
    /// [`ErrorKind::Shape`] for fields of different lengths.
    pub fn tokens(&self, bytes: impl Iterator<Item = u64>) -> Result<u64> {
        let mut tokens = None;
        for (field, bytes) in self.fields.iter().zip(bytes) {
            let size = field.dtype().size() as u64;
            if !bytes.is_multiple_of(size) {
                let message = format!("{bytes} bytes are not a whole number of {size}-byte tokens");
                return Err(Error::new(ErrorKind::Decode, Stage::Index, message));
            }
            let own = bytes / size;
            let first = *tokens.get_or_insert(bytes / size);
            if own != first {
                let names = [field.name(), self.fields[0].name()];
                let message = format!(
                    "field `{}` has {own} elements and field `{}` has {first}: fields that are \
                     packed together need one element per token",
                    names[0], names[1]
                );
                return Err(Error::new(ErrorKind::Shape, Stage::Index, message));
            }
        }
        Ok(tokens.unwrap_or(0))
    }
}

/// Consecutive documents.
#[derive(Default)]
pub struct Documents {
    /// The fields of one document, one after the other, then those of the next document.
    pub bytes: Vec<u8>,
    /// Number of tokens of each document.
    pub lens: Vec<u32>,
}

impl Documents {
    fn add<'b>(
        &mut self,
        sample: u64,
        fields: &TokenFields,
        bytes: impl Iterator<Item = &'b [u8]> + Clone,
    ) -> Result<()> {
        let tokens = fields
            .tokens(bytes.clone().map(|own| own.len() as u64))
            .map_err(|error| error.with_sample(sample))?;
        let len = u32::try_from(tokens).map_err(|_| {
            let message = format!(
                "a document of {tokens} tokens; at most {} are possible",
                u32::MAX
            );
            Error::new(ErrorKind::Limit, Stage::Index, message).with_sample(sample)
        })?;
        bytes.for_each(|own| self.bytes.extend_from_slice(own));
        self.lens.push(len);
        Ok(())
    }
}

/// Reads the documents of all samples, on all cores; `out` gets them in order.
///
/// Errors: reading errors and those of [`TokenFields::tokens`] and `out`, with the sample;
/// [`ErrorKind::Config`] for a part of a dataset with chunks.
pub fn read_all(
    dataset: &dyn Dataset,
    fields: &TokenFields,
    mut out: impl FnMut(Documents) -> Result<()>,
) -> Result<()> {
    let Some(chunks) = dataset.chunked() else {
        let run = (RUN_BYTES / dataset.sizes().sample_bytes_max.max(1)).clamp(1, RUN);
        let runs: Vec<u64> = (0..dataset.len()).step_by(run as usize).collect();
        return runs.chunks(TOGETHER).try_for_each(|some| {
            parallel(some, |_, first| {
                read_samples(dataset, fields, *first..(first + run).min(dataset.len()))
            })?
            .into_iter()
            .try_for_each(&mut out)
        });
    };
    if !chunks.is_whole() {
        let way = Setting::Copied
            .hint(|copied| format!(": use {copied} on the whole dataset, then take the part"));
        let message = format!("a part of a dataset with chunks cannot be read in order{way}");
        return Err(Error::new(ErrorKind::Config, Stage::Index, message));
    }
    let starts = chunks.starts();
    let all: Vec<usize> = (0..starts.len().saturating_sub(1)).collect();
    all.chunks(CHUNKS).try_for_each(|some| {
        by_threads(CHUNKS, some, |_, chunk| {
            read_chunk(dataset, fields, *chunk, starts[*chunk])
        })?
        .into_iter()
        .try_for_each(&mut out)
    })
}

fn read_samples(
    dataset: &dyn Dataset,
    fields: &TokenFields,
    samples: std::ops::Range<u64>,
) -> Result<Documents> {
    let mut plain = Plain::new(dataset);
    let mut documents = Documents::default();
    let mut own = vec![Vec::new(); fields.numbers.len()];
    for sample in samples {
        own.iter_mut().for_each(Vec::clear);
        plain.sample(sample, |field, bytes| {
            if let Some(place) = fields.numbers.iter().position(|number| *number == field) {
                own[place].extend_from_slice(bytes);
            }
            Ok(())
        })?;
        documents.add(sample, fields, own.iter().map(Vec::as_slice))?;
    }
    Ok(documents)
}

fn read_chunk(
    dataset: &dyn Dataset,
    fields: &TokenFields,
    chunk: usize,
    first: u64,
) -> Result<Documents> {
    let rows = Plain::new(dataset).chunk(chunk)?;
    let mut documents = Documents::default();
    for row in 0..rows.rows() {
        let own = fields
            .numbers
            .iter()
            .map(|number| rows.row(*number, row).unwrap_or_default());
        documents.add(first + row as u64, fields, own)?;
    }
    Ok(documents)
}
