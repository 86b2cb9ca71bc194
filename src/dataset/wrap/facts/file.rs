//! The file of facts: a side file with four sections.
//!
//! ```text
//! VALUES   a record per sample: CRC32C of each field, bytes of each measured field, width and height of the picture, 4 bytes each;
//!          then, for datasets with chunks, the CRC32C of each extent
//! HEAD     which facts the records have, and of which data; then the maximum bytes of each measured field, 8 bytes each
//! ENTRIES  seek points of each sample and field, one after the other
//! ENDS     the end of each entry, 8 bytes each
//! ```

use super::sums::{anew_by, lengths_of};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::{Dataset, Digest, kept};
use feedline_core::storage::publish::Pending;
use feedline_core::storage::sidefile::{NEWER, SideFound, SideKind, SideWriter, Sidefile};
use std::io;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

const KIND: SideKind = SideKind {
    name: *b"fact",
    version: 1,
    older: b"",
};
const VALUES: usize = 0;
const HEAD: usize = 1;
const ENTRIES: usize = 2;
const ENDS: usize = 3;

/// The facts that a file may have, as bits.
pub(super) mod column {
    pub(in super::super) const SUMS: u32 = 1;
    pub(in super::super) const LENGTHS: u32 = 2;
    pub(in super::super) const POINTS: u32 = 4;
    pub(in super::super) const SIZES: u32 = 8;
}

/// The facts of a file, and the data that they describe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Head {
    /// Hash of the samples, the schema and the lengths of the sources: the same for a copy.
    pub(super) dataset: u64,
    /// Hash of the lengths of the sources alone.
    pub(super) lengths: u64,
    /// If there are checksums: hash of the sources' paths and modification times, or of the bytes
    /// in memory.
    pub(super) state: u64,
    /// If there are lengths: hash of the measured fields.
    pub(super) measured: u64,
    /// If there are sizes of pictures: hash of the pictures' field and of the orientation setting.
    pub(super) pictures: u64,
    /// If there are checksums of a dataset with chunks: number of extents.
    pub(super) extents: u64,
    /// Bits of [`column`].
    pub(super) columns: u32,
    /// If there are checksums: CRC of the schema, of the locations of all bytes, and of the bytes
    /// in the index.
    pub(super) shape: u32,
    /// Number of CRCs in a record.
    pub(super) sums: u32,
    /// Number of lengths in a record.
    pub(super) lens: u32,
    /// Number of seek point entries for each sample.
    pub(super) points: u32,
    pub(super) zero: u32,
}

impl Head {
    pub(super) fn of(dataset: &dyn Dataset) -> Self {
        Self {
            dataset: kept::identity_of("facts", dataset).end(),
            lengths: lengths_of(dataset.sources()),
            ..Self::default()
        }
    }

    pub(super) fn has(&self, column: u32) -> bool {
        self.columns & column != 0
    }

    /// Adds the facts `columns` of `other`, with the values that belong to them.
    pub(super) fn take(&mut self, columns: u32, other: &Self) {
        self.columns |= other.columns & columns;
        if other.columns & columns & column::SUMS != 0 {
            (self.state, self.shape) = (other.state, other.shape);
            (self.sums, self.extents) = (other.sums, other.extents);
        }
        if other.columns & columns & column::LENGTHS != 0 {
            (self.measured, self.lens) = (other.measured, other.lens);
        }
        if other.columns & columns & column::POINTS != 0 {
            self.points = other.points;
        }
        if other.columns & columns & column::SIZES != 0 {
            self.pictures = other.pictures;
        }
    }

    /// The byte range of a fact in a record.
    pub(super) fn part(&self, column: u32) -> Range<usize> {
        let sums = 4 * self.sums as usize;
        let lens = sums + 4 * self.lens as usize;
        match column {
            column::SUMS => 0..sums,
            column::LENGTHS => sums..lens,
            column::SIZES if self.has(column::SIZES) => lens..lens + 8,
            _ => lens..lens,
        }
    }

    /// Length of a record in bytes.
    pub(super) fn record(&self) -> u64 {
        self.part(column::SIZES).end as u64
    }

    /// Lengths of the sections in bytes; `None` if they exceed 2^64, which only a damaged head can
    /// claim.
    fn sections(&self, samples: u64) -> Option<[u64; 3]> {
        let records = samples.checked_mul(self.record())?;
        let values = records.checked_add(self.extents.checked_mul(4)?)?;
        let head = size_of::<Self>() as u64 + 8 * u64::from(self.lens);
        let ends = samples.checked_mul(8 * u64::from(self.points))?;
        Some([values, head, ends])
    }
}

/// An open file of facts.
pub(super) struct FactFile {
    pub(super) file: Sidefile,
    pub(super) head: Head,
    samples: u64,
}

impl FactFile {
    /// Reads the record of a sample.
    pub(super) fn record(&self, sample: u64, out: &mut Vec<u8>) -> Result<()> {
        out.resize(self.head.record() as usize, 0);
        self.file.fill(VALUES, sample * self.head.record(), out)
    }

    /// The CRC of a sample's field.
    pub(super) fn sum(&self, sample: u64, field: usize) -> Result<u32> {
        self.number(sample, column::SUMS, field)
    }

    /// The CRC of an extent of a chunk.
    pub(super) fn extent_sum(&self, extent: u64) -> Result<u32> {
        let records = self.samples * self.head.record();
        self.file.value(VALUES, records + 4 * extent)
    }

    /// Number of bytes of a sample's field. `position` is the field's index among the measured
    /// fields.
    pub(super) fn len(&self, sample: u64, position: usize) -> Result<u32> {
        self.number(sample, column::LENGTHS, position)
    }

    /// Maximum number of bytes of a measured field.
    pub(super) fn most(&self, position: usize) -> Result<u64> {
        self.file
            .value(HEAD, size_of::<Head>() as u64 + 8 * position as u64)
    }

    /// Width and height of a sample's picture.
    #[cfg(feature = "image")]
    pub(super) fn size(&self, sample: u64) -> Result<[u32; 2]> {
        Ok([
            self.number(sample, column::SIZES, 0)?,
            self.number(sample, column::SIZES, 1)?,
        ])
    }

    /// Value number `number` (4 bytes) of a fact in a sample's record.
    fn number(&self, sample: u64, column: u32, number: usize) -> Result<u32> {
        let at = self.head.part(column).start + 4 * number;
        self.file
            .value(VALUES, sample * self.head.record() + at as u64)
    }

    /// Reads entry `number` of the seek points.
    pub(super) fn points<'a>(&'a self, number: u64, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.file.entry(
            ENTRIES,
            ENDS,
            number,
            feedline_jpeg::POINTS_MAX as u64,
            buffer,
        )
    }

    /// Bytes of all seek points.
    pub(super) fn points_bytes(&self) -> u64 {
        self.file.len(ENTRIES)
    }
}

/// The content of a file of facts before this process writes it.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub(super) enum Found {
    /// No file, or an empty one.
    Nothing,
    /// Facts of the same data.
    Whole(FactFile),
    /// Facts that cannot be used, with the reason.
    Useless(Error),
}

/// Opens the file of facts about the data of `own`.
///
/// Errors: the file cannot be read, or is another kind of file. The latter is an error because a
/// wrong name must not destroy the user's data.
pub(super) fn find(place: &Path, own: &Head, samples: u64) -> Result<Found> {
    let useless = |kind, what: &str| {
        let anew = anew_by();
        let message = format!("{what}; if the change is intended, make the facts anew ({anew})");
        Ok(Found::Useless(
            Error::new(kind, Stage::Index, message).with_path(place),
        ))
    };
    let refused =
        |message: &str| Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(place));
    let file = match Sidefile::open(place, KIND).map_err(|error| error.with_path(place))? {
        SideFound::Nothing => return Ok(Found::Nothing),
        SideFound::Foreign => {
            return refused("not a file of facts; it is not overwritten: name another file");
        }
        SideFound::Newer => return refused(NEWER),
        SideFound::Damaged | SideFound::Older => {
            return useless(ErrorKind::Decode, "the file of facts is damaged");
        }
        SideFound::Whole(file) => file,
    };
    let head: Head = match file.value(HEAD, 0) {
        Ok(head) => head,
        Err(error) if error.kind() == ErrorKind::Decode => {
            return useless(ErrorKind::Decode, "the file of facts is damaged");
        }
        Err(error) => return Err(error.with_path(place)),
    };
    if head.lengths != own.lengths {
        return useless(
            ErrorKind::Changed,
            "the lengths of the sources changed since the facts were made: a file was truncated, \
             extended, added, removed or renamed, or these are the facts of another dataset",
        );
    }
    if head.dataset != own.dataset {
        return Ok(Found::Useless(another(place)));
    }
    if head.sections(samples) != Some([VALUES, HEAD, ENDS].map(|section| file.len(section))) {
        return useless(ErrorKind::Decode, "the file of facts is damaged");
    }
    Ok(Found::Whole(FactFile {
        file,
        head,
        samples,
    }))
}

/// The error for a dataset that differs although all sources have the same lengths: that is damage.
pub(super) fn another(place: &Path) -> Error {
    let message = "the sources have the same lengths as when the facts were made, but the \
         dataset differs: the header of a file is damaged, or the dataset was opened with other \
         settings";
    let message = format!("{message} (then make the facts anew: {})", anew_by());
    Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place)
}

/// Writes a file of facts.
pub(super) struct FactsWriter<'p> {
    out: SideWriter,
    place: &'p Path,
    /// CRC of the values, and of the seek points.
    crc: u32,
    points_crc: u32,
    /// Whether the new file replaces even an equal file, which may be damaged.
    replaces: bool,
    points: Option<Points>,
}

/// Seek points: their entries and the ends of these. They follow the values in the file, but the
/// same pass finds both, so they are collected here.
struct Points {
    entries: Pending,
    ends: Pending,
    end: u64,
}

impl<'p> FactsWriter<'p> {
    /// Begins the file, so that a wrong path fails before the data is read.
    pub(super) fn create(place: &'p Path, has_points: bool, replaces: bool) -> Result<Self> {
        let begin = || -> io::Result<Self> {
            let out = SideWriter::create(place, KIND)?;
            let points = has_points
                .then(|| {
                    Ok::<_, io::Error>(Points {
                        entries: Pending::create(place)?,
                        ends: Pending::create(place)?,
                        end: 0,
                    })
                })
                .transpose()?;
            Ok(Self {
                out,
                place,
                crc: 0,
                points_crc: 0,
                replaces,
                points,
            })
        };
        begin().map_err(|error| {
            let message = "cannot write the facts here: name another file";
            Error::os(Stage::Index, message, error).with_path(place)
        })
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::os(Stage::Index, "cannot write the facts", error).with_path(self.place)
    }

    /// Appends values: whole records, or checksums of extents.
    pub(super) fn values(&mut self, bytes: &[u8]) -> Result<()> {
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        self.out.put(bytes).map_err(|error| self.failed(error))
    }

    /// Appends the seek points of a field.
    pub(super) fn points(&mut self, entry: &[u8]) -> Result<()> {
        let Some(points) = &mut self.points else {
            return Ok(());
        };
        self.points_crc = crc32c::crc32c_append(self.points_crc, entry);
        points.end += entry.len() as u64;
        let end = points.end.to_ne_bytes();
        let written = points
            .entries
            .write_all(entry)
            .and_then(|()| points.ends.write_all(&end));
        written.map_err(|error| self.failed(error))
    }

    /// Completes the file, and publishes it.
    pub(super) fn publish(mut self, head: &Head, most: &[u64]) -> Result<()> {
        let place = self.place;
        // A hash of the content, so that an equal file stays and any other file is replaced.
        let identity = Digest::new("facts")
            .bytes(bytemuck::bytes_of(head))
            .word(self.crc.into())
            .word(self.points_crc.into())
            .end();
        let finish = || -> io::Result<()> {
            self.out.end_section();
            self.out.put(bytemuck::bytes_of(head))?;
            self.out.put(bytemuck::cast_slice(most))?;
            self.out.end_section();
            if let Some(points) = self.points {
                points.entries.read_back(|bytes| self.out.put(bytes))?;
                self.out.end_section();
                points.ends.read_back(|bytes| self.out.put(bytes))?;
                self.out.end_section();
            }
            if self.replaces {
                return self.out.finish(identity)?.commit(true);
            }
            self.out.publish(identity)
        };
        finish().map_err(|error| {
            Error::os(Stage::Index, "cannot write the facts", error).with_path(place)
        })
    }
}
