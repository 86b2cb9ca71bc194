//! The checksum file, a side file with two sections: the identity of the dataset, and the
//! checksums, 4 bytes each.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::Digest;
use feedline_core::dataset::parallel::parallel;
use feedline_core::storage::listing::look;
use feedline_core::storage::sidefile::{NEWER, SideFound, SideKind, SideWriter, Sidefile};
use feedline_core::storage::{SourceId, Sources};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const KIND: SideKind = SideKind {
    name: *b"crcs",
    version: 4,
    older: b"deef3crc",
};
const HEAD: usize = 0;
const CRCS: usize = 1;
/// Sources per unit of work of a thread. Part of the format, since each run is hashed.
const RUN: u64 = 4096;

/// Identity of the data that has checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Head {
    /// Hash of the number and lengths of the sources: the same for a copy, different for other
    /// data.
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
    /// Bytes of the checksums.
    fn bytes(self) -> Option<u64> {
        self.count.checked_mul(self.fields.into())?.checked_mul(4)
    }

    /// Writes the file. Errors: I/O errors.
    pub(super) fn write(self, place: &Path, crcs: &[u32]) -> Result<()> {
        let head = bytemuck::bytes_of(&self);
        let crcs = bytemuck::cast_slice(crcs);
        // Hash of the content, so that an identical file is kept and any other one is replaced.
        let identity = Digest::new("checksums")
            .bytes(head)
            .word(crc32c::crc32c(crcs).into())
            .end();
        let written = SideWriter::create(place, KIND).and_then(|mut out| {
            for section in [head, crcs] {
                out.put(section)?;
                out.end_section();
            }
            out.publish(identity)
        });
        written.map_err(|error| {
            Error::os(Stage::Index, "cannot write the checksums", error).with_path(place)
        })
    }
}

/// The checksums of a dataset.
pub(super) struct Sums {
    file: Sidefile,
    pub(super) head: Head,
}

impl Sums {
    /// Number of checksums.
    pub(super) fn len(&self) -> usize {
        (self.file.len(CRCS) / 4) as usize
    }

    /// Errors: reading errors, if the file is read in place.
    pub(super) fn get(&self, at: usize) -> Result<u32> {
        self.file.value(CRCS, 4 * at as u64)
    }

    /// Heap bytes.
    pub(super) fn heap(&self) -> usize {
        self.file.heap()
    }
}

/// Cuts the numbers below `len` into runs.
pub(super) fn runs(len: u64) -> Vec<Range<u64>> {
    (0..len.div_ceil(RUN))
        .map(|run| run * RUN..((run + 1) * RUN).min(len))
        .collect()
}

/// Hashes of the sources' lengths and state, see [`Head`].
pub(super) fn hashes(sources: &Sources) -> Result<[u64; 2]> {
    let runs = runs(sources.count() as u64);
    let start = Digest::new("sources").word(sources.count() as u64);
    let hashes = parallel(&runs, |_, run| {
        let mut lengths = start;
        let mut state = start;
        for id in run.clone().map(|id| SourceId::at(id as usize)) {
            lengths = lengths.word(sources.len_of(id));
            state = with_state(state, sources, id)?;
        }
        Ok([lengths.end(), state.end()])
    })?;
    Ok([0, 1].map(|which| {
        hashes
            .iter()
            .fold(start, |digest, hashes| digest.word(hashes[which]))
            .end()
    }))
}

fn with_state(digest: Digest, sources: &Sources, id: SourceId) -> Result<Digest> {
    if let Some(bytes) = sources.bytes_of(id) {
        return Ok(digest
            .word(u64::from(crc32c::crc32c(bytes)))
            .word(bytes.len() as u64));
    }
    let path = sources.path(id);
    let meta = look(&path)?;
    if meta.len != sources.len_of(id) {
        let message = format!(
            "{} bytes when it was indexed, {} now",
            sources.len_of(id),
            meta.len
        );
        return Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(&path));
    }
    // A relative path from another working directory must give the same hash.
    let path = std::path::absolute(&path).unwrap_or(path);
    Ok(digest.bytes(path.as_os_str().as_bytes()).word(meta.version))
}

/// Content found at the path of the checksum file.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub(super) enum Found {
    /// No file, or an empty one.
    Nothing,
    Whole(Sums),
    /// Unusable checksums, with the reason.
    Useless(Error),
}

/// Reads the file. Errors: it cannot be opened, or is not a checksum file, since a wrong name must
/// not destroy the user's data.
pub(super) fn load(place: &Path, lengths: u64) -> Result<Found> {
    let useless = |kind, what: &str| {
        let anew = Setting::CheckedAnew.hint(|anew| format!(" ({anew})"));
        let message = format!("{what}; if the change is intended, make the checksums again{anew}");
        Ok(Found::Useless(Error::new(kind, Stage::Index, message)))
    };
    let file = match Sidefile::open(place, KIND)? {
        SideFound::Nothing => return Ok(Found::Nothing),
        SideFound::Foreign => {
            let message = "not a file of checksums; it is not overwritten: name another file";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(place));
        }
        SideFound::Newer => {
            return Err(Error::new(ErrorKind::Config, Stage::Index, NEWER).with_path(place));
        }
        SideFound::Damaged => {
            return useless(ErrorKind::Decode, "the file of checksums is damaged");
        }
        SideFound::Older => {
            return useless(
                ErrorKind::Decode,
                "the file of checksums is of an older version",
            );
        }
        SideFound::Whole(file) => file,
    };
    let head: Option<Head> = file.value(HEAD, 0).ok();
    let Some(head) = head.filter(|head| head.bytes() == Some(file.len(CRCS))) else {
        return useless(ErrorKind::Decode, "the file of checksums is damaged");
    };
    if head.lengths == lengths {
        return Ok(Found::Whole(Sums { file, head }));
    }
    useless(
        ErrorKind::Changed,
        "the sources have other lengths than when the checksums were made: a file was cut, extended, added, removed or \
         renamed, or the checksums are of another dataset",
    )
}
