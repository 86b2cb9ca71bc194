//! Writes the documents of any dataset as Megatron's files, `prefix.bin` and `prefix.idx`: one
//! sequence per document.
//!
//! ```text
//! dataset ──all cores──► documents in order ──► .bin │ lengths ──► .idx, named last
//! ```
//!
//! Memory: 4 bytes for each document, and the documents in progress.

use super::output;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::{Dataset, TokenFields, read_all};
use feedline_core::storage::Blob;
use feedline_core::storage::publish::{Pending, make_folder};
use feedline_core::tensor::DType;
use feedline_formats::tokens::beside;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What [`documents`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// Number of documents, including the empty ones.
    pub documents: u64,
    /// Number of documents without a token.
    pub empty: u64,
    /// Number of tokens in all documents.
    pub tokens: u64,
    /// Element type of the tokens in the files.
    pub dtype: DType,
    /// The file with the tokens.
    pub bin: PathBuf,
    /// The file with the lengths of the documents.
    pub idx: PathBuf,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            documents,
            empty,
            tokens,
            dtype,
            bin,
            idx,
        } = self;
        write!(
            f,
            "{documents} documents, {empty} of them empty, {tokens} {dtype} tokens in {} and {}",
            bin.display(),
            idx.display()
        )
    }
}

/// Writes the documents in the field `field` of a dataset as Megatron's `prefix.bin` and
/// `prefix.idx`, which [`Megatron`](feedline_formats::Megatron) and other programs read. `watch` is
/// called with the number of documents written so far. Tokens of `u32` and `u64`, which Megatron
/// lacks, are written as `i32` and `i64`. [`stoppable`](feedline_core::dataset::stoppable) makes
/// the call stoppable.
///
/// The files appear only when they are complete, the index last.
///
/// ```no_run
/// # #[cfg(feature = "parquet")] {
/// # use feedline_parquet::Parquet;
/// let lists = Parquet::builder().up_to("input_ids", 1 << 30).open("corpus/*.parquet")?;
/// println!("{}", feedline_prepare::documents(&lists, "input_ids", "corpus", |_| {})?);
/// # }
/// # Ok::<(), feedline_core::Error>(())
/// ```
///
/// Errors: those of reading, including damaged samples; [`ErrorKind::Config`] for a field that is
/// unknown, does not have one dimension or does not hold integers, and for files that exist;
/// [`ErrorKind::Limit`] for a token or a document that does not fit; file system errors.
pub fn documents(
    dataset: &dyn Dataset,
    field: &str,
    prefix: impl AsRef<Path>,
    mut watch: impl FnMut(u64),
) -> Result<Written> {
    let fields = TokenFields::of(dataset.schema(), &[field.into()])?;
    let (code, dtype, is_narrow) = code_of(fields.fields[0].dtype())?;
    let [bin, idx] = [".bin", ".idx"].map(|ending| beside(prefix.as_ref(), ending));
    [&bin, &idx]
        .into_iter()
        .try_for_each(|path| is_free(path))?;
    if let Some(dir) = bin.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        make_folder(dir).map_err(|error| output::failed(error, dir))?;
    }
    let mut out = output::create_shared(bin.clone())?;
    let size = dtype.size();
    let mut lens: Vec<u32> = Vec::new();
    read_all(dataset, &fields, |documents| {
        check(&documents.bytes, &documents.lens, size, is_narrow).map_err(|(place, message)| {
            Error::new(ErrorKind::Limit, Stage::Write, message)
                .with_sample((lens.len() + place) as u64)
        })?;
        out.write_all(&documents.bytes)
            .map_err(|error| output::failed(error, &bin))?;
        lens.extend(documents.lens);
        watch(lens.len() as u64);
        Ok(())
    })?;
    let mut index = output::create_shared(idx.clone())?;
    write_index(&mut index, &lens, code, size as u64)
        .map_err(|error| output::failed(error, &idx))?;
    output::commit_new(out)?;
    output::commit_new(index)?;
    let empty = lens.iter().filter(|len| **len == 0).count() as u64;
    let tokens = lens.iter().map(|len| u64::from(*len)).sum();
    Ok(Written {
        documents: lens.len() as u64,
        empty,
        tokens,
        dtype,
        bin,
        idx,
    })
}

/// For a dtype: Megatron's code, the dtype that is written to the files, and whether a token's
/// highest bit must be 0 to fit.
fn code_of(dtype: DType) -> Result<(u8, DType, bool)> {
    Ok(match dtype {
        DType::U8 => (1, DType::U8, false),
        DType::I8 => (2, DType::I8, false),
        DType::I16 => (3, DType::I16, false),
        DType::I32 => (4, DType::I32, false),
        DType::U32 => (4, DType::I32, true),
        DType::I64 => (5, DType::I64, false),
        DType::U64 => (5, DType::I64, true),
        DType::U16 => (8, DType::U16, false),
        other => {
            let message = format!("tokens are whole numbers, not {other}");
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
    })
}

/// Checks that the file does not exist.
fn is_free(path: &Path) -> Result<()> {
    match Blob::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => {
            let message =
                "the file exists, and is not overwritten: move it away, or name another prefix";
            Err(Error::new(ErrorKind::Config, Stage::Write, message).with_path(path))
        }
    }
}

/// Checks that all documents fit Megatron's files. Errors: the index in `lens` of the first
/// document that does not fit, and the reason.
fn check(bytes: &[u8], lens: &[u32], size: usize, is_narrow: bool) -> Result<(), (usize, String)> {
    let mut rest = bytes;
    for (place, len) in lens.iter().enumerate() {
        if *len > i32::MAX as u32 {
            return Err((
                place,
                format!("a document of {len} tokens; the maximum is {}", i32::MAX),
            ));
        }
        let (own, later) = rest.split_at(*len as usize * size);
        rest = later;
        let most_significant = if cfg!(target_endian = "little") {
            size - 1
        } else {
            0
        };
        let too_large = is_narrow
            && own
                .chunks_exact(size)
                .any(|token| token[most_significant] & 0x80 != 0);
        if too_large {
            return Err((
                place,
                format!(
                    "a token of 2^{} or more does not fit Megatron's files",
                    8 * size - 1
                ),
            ));
        }
    }
    Ok(())
}

fn write_index(out: &mut Pending, lens: &[u32], code: u8, size: u64) -> std::io::Result<()> {
    let count = lens.len() as u64;
    out.write_all(b"MMIDIDX\0\0")?;
    out.write_all(&1_u64.to_le_bytes())?;
    out.write_all(&[code])?;
    out.write_all(&count.to_le_bytes())?;
    out.write_all(&(count + 1).to_le_bytes())?;
    lens.iter()
        .try_for_each(|len| out.write_all(&len.to_le_bytes()))?;
    let mut offset = 0_u64;
    for len in lens {
        out.write_all(&offset.to_le_bytes())?;
        offset += u64::from(*len) * size;
    }
    (0..=count).try_for_each(|document| out.write_all(&document.to_le_bytes()))
}
