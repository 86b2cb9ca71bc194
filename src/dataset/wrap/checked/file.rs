//! The checksum file: a header that identifies the dataset, then one word per checksum.

use crate::dataset::digest::Digest;
use crate::dataset::parallel::parallel;
use crate::dataset::words::{halves, load as load_words, seal, wide};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::setting::Setting;
use crate::storage::listing::look;
use crate::storage::{Blob, SourceId, Sources};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// "feedcrc" and the version, in native order.
const MAGIC: [u32; 2] = [u32::from_be_bytes(*b"feed"), u32::from_be_bytes(*b"crc3")];
/// Words of the header: magic, lengths and state of the sources, checksums (two each), fields, shape, CRC32C of the
/// file without this word.
pub(super) const HEADER: usize = 11;
#[cfg(test)]
pub(super) const CRC: usize = HEADER - 1;
/// Sources per unit of work of a thread. Part of the format, since each run is hashed.
const RUN: u64 = 4096;

/// Identity of the data that has checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// Hash of the sources' number and lengths: the same for a copy, another for other data.
    pub(super) lengths: u64,
    /// Hash of the sources' paths and modification times, or of the bytes in memory.
    pub(super) state: u64,
    /// Number of samples; for datasets with chunks, of chunk extents.
    pub(super) count: u64,
    /// Checksums per sample or extent.
    pub(super) fields: u32,
    /// CRC of the schema, of the places of all bytes, and of the bytes in the index.
    pub(super) shape: u32,
}

impl Head {
    fn of_words(words: &[u32]) -> Self {
        let [lengths, state, count] = [2, 4, 6].map(|at| wide(words, at));
        Self { lengths, state, count, fields: words[8], shape: words[9] }
    }

    /// Writes the header into the space that `words` has for it.
    pub(super) fn seal(self, words: &mut [u32]) {
        let [lengths, state, count] = [self.lengths, self.state, self.count].map(halves);
        let numbers = [MAGIC, lengths, state, count, [self.fields, self.shape]];
        seal(words, numbers.as_flattened());
    }

    fn words(self) -> Option<usize> {
        usize::try_from(self.count).ok()?.checked_mul(self.fields as usize)?.checked_add(HEADER)
    }
}

/// Cuts the numbers below `len` into runs.
pub(super) fn runs(len: u64) -> Vec<Range<u64>> {
    (0..len.div_ceil(RUN)).map(|run| run * RUN..((run + 1) * RUN).min(len)).collect()
}

/// Hashes of the sources' lengths and state, see [`Head`].
pub(super) fn hashes(sources: &Sources) -> Result<[u64; 2]> {
    let runs = runs(sources.count() as u64);
    let start = Digest::new("sources").word(sources.count() as u64);
    let hashes = parallel(&runs, |_, run| {
        let (mut lengths, mut state) = (start, start);
        for id in run.clone().map(|id| SourceId::at(id as usize)) {
            lengths = lengths.word(sources.len_of(id));
            state = with_state(state, sources, id)?;
        }
        Ok([lengths.end(), state.end()])
    })?;
    Ok([0, 1].map(|which| hashes.iter().fold(start, |digest, hashes| digest.word(hashes[which])).end()))
}

fn with_state(digest: Digest, sources: &Sources, id: SourceId) -> Result<Digest> {
    if let Some(bytes) = sources.bytes_of(id) {
        return Ok(digest.word(u64::from(crc32c::crc32c(bytes))).word(bytes.len() as u64));
    }
    let path = sources.path(id);
    let meta = look(&path)?;
    if meta.len != sources.len_of(id) {
        let message = format!("{} bytes when it was indexed, {} now", sources.len_of(id), meta.len);
        return Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(&path));
    }
    // A relative path from another working directory must give the same file.
    let path = std::path::absolute(&path).unwrap_or(path);
    Ok(digest.bytes(path.as_os_str().as_bytes()).word(meta.version))
}

/// Content found at the path of the checksum file.
pub(super) enum Found {
    /// No file, or an empty one.
    Nothing,
    Whole(Head, Vec<u32>),
    /// Unusable checksums, with the reason.
    Useless(Error),
}

/// Reads the file. Errors: it cannot be opened, or is not a checksum file: a mistaken name must not cost the user's
/// data.
pub(super) fn load(place: &Path, lengths: u64) -> Result<Found> {
    let file = match Blob::open(place) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(error),
    };
    if file.len() == 0 {
        return Ok(Found::Nothing);
    }
    let start = file.read(0, file.len().min(4 * HEADER as u64), "the checksums")?;
    let magic: [u8; 8] = bytemuck::cast(MAGIC);
    let like = |range: Range<usize>| start.get(range.clone()) == Some(&magic[range]);
    if !magic.starts_with(&start) && !like(0..4) && !like(4..8) {
        let message = "not a file of checksums; it is not overwritten: name another file";
        return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(place));
    }
    let useless = |kind, what: &str| {
        let anew = Setting::CheckedAnew.hint(|anew| format!(" ({anew})"));
        let message = format!("{what}; if the change is intended, make the checksums again{anew}");
        Ok(Found::Useless(Error::new(kind, Stage::Index, message)))
    };
    let head: Vec<u32> = start.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    let known = (head.len() == HEADER && head[..2] == MAGIC).then(|| Head::of_words(&head));
    let words = known.map_or(Ok(None), |known| load_words(&file, &head, known.words()))?;
    match known.zip(words) {
        None => useless(ErrorKind::Decode, "the file of checksums is damaged, or of another version"),
        Some((head, words)) if head.lengths == lengths => Ok(Found::Whole(head, words)),
        Some(_) => useless(
            ErrorKind::Changed,
            "the sources have other lengths than when the checksums were made: a file was cut, extended, added, \
             removed or renamed, or the checksums are of another dataset",
        ),
    }
}
