//! Entry points for fuzz targets and tests: parsers on bytes, datasets without a loader. Not part
//! of the API.

use bytes::Bytes;
use feedline_base::error::Result;
use feedline_core::dataset::{Dataset, Parts};
use feedline_core::storage::{Blob, Extent};

/// Reads and opens the fields of one sample as a loader does, but with plain `pread`.
pub fn sample(dataset: &dyn Dataset, sample: u64) -> Result<Vec<Vec<u8>>> {
    feedline_core::dataset::sample::read(dataset, sample)
}

/// Extents that are read for one sample: its own, or its chunk's.
pub fn extents(dataset: &dyn Dataset, sample: u64) -> Result<Vec<Extent>> {
    let mut extents = Vec::new();
    if let Some(chunks) = dataset.chunked() {
        let chunk = feedline_core::dataset::starts::locate(chunks.starts(), sample).unwrap_or(0);
        chunks.chunk_extents(chunk, &mut extents)?;
        return Ok(extents);
    }
    let mut parts = Parts::new();
    dataset.extents(sample, &mut parts)?;
    extents.extend(parts.iter().filter_map(|one| one.part.extent()));
    Ok(extents)
}

/// Offset and length of each field of a tar shard's sample.
pub fn tar_places(tar: &super::Tar, sample: u64) -> Vec<Option<(u64, u64)>> {
    (0..tar.schema().len())
        .map(|field| tar.place(sample, field))
        .collect()
}

/// Rows of one chunk, each with its fields, read and opened as a loader does.
pub fn chunk(dataset: &dyn Dataset, chunk: usize) -> Result<Vec<Vec<Vec<u8>>>> {
    let chunks = dataset.chunked().expect("a dataset in chunks");
    let fields = dataset.schema().len();
    let rows = chunks.starts()[chunk + 1] - chunks.starts()[chunk];
    let buffer = feedline_core::dataset::sample::Plain::new(dataset).chunk(chunk)?;
    Ok((0..rows as usize)
        .map(|row| {
            (0..fields)
                .map(|field| {
                    buffer
                        .row(field, row)
                        .expect("every field has every row")
                        .to_vec()
                })
                .collect()
        })
        .collect())
}

/// Opens an MDS index with one shard in memory.
pub fn mds(index: &[u8], shard: &[u8]) -> Result<super::Mds> {
    super::Mds::builder()
        .up_to("*", 1 << 16)
        .of_bytes(index, &shard.into())
}

/// Parses a bytes list, float list or int64 list (`kind` 0, 1, 2) of a `tf.train.Example`, as a
/// field of at most `bytes_max` bytes.
pub fn feature(example: &[u8], name: &str, kind: u8, bytes_max: usize) -> Result<Vec<u8>> {
    use feedline_formats::tfrecord::example::{Feature, ListKind};
    let mut buffer = Vec::new();
    match kind {
        0 => Feature::find(example, name, ListKind::Bytes, false)?
            .one_bytes()
            .map(<[u8]>::to_vec),
        1 => Feature::find(example, name, ListKind::Floats, false)?
            .floats(bytes_max, &mut buffer)
            .map(<[u8]>::to_vec),
        _ => Feature::find(example, name, ListKind::Ints, false)?
            .ints(bytes_max, &mut buffer)
            .map(<[u8]>::to_vec),
    }
}

/// Whether a line is one object, and the text at `path` in it, if both are right. `None` for a wrong
/// path.
#[cfg(feature = "text")]
pub fn json(line: &[u8], path: &str) -> Option<(bool, Option<Vec<u8>>)> {
    feedline_text::fuzz(line, path)
}

/// Renders a conversation by a template. True if there is a text.
#[cfg(feature = "tokenizers")]
pub fn chat(source: &str, conversation: &[u8]) -> bool {
    feedline_text::fuzz_chat(source, conversation)
}

/// Number of formats whose header parser accepts these bytes.
pub fn headers(bytes: &[u8]) -> usize {
    let blob = Blob::memory(Bytes::copy_from_slice(bytes));
    feedline_formats::HEADERS
        .iter()
        .filter(|is_header| is_header(&blob))
        .count()
}

/// Loads an index file with a correct checksum. True if it is accepted.
pub fn index(bytes: &[u8]) -> bool {
    feedline_core::dataset::index::fuzz(bytes)
}
