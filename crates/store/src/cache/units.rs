//! Pieces of blocks: the checksum of each unit of 4 KiB of an object that a read has stored in the
//! data file.
//!
//! ```text
//! HASH.INC.units   [ stamp: 8 bytes, zeros up to 4 KiB ][ CRC32C, or 0 ][ CRC32C, or 0 ]…
//! piece ─► data file ─► sync, some twice a second ─► its units are marked ─► all of a block? ─► compared: its record
//! ```
//!
//! Limits: the marks are valid only for the boot and the data file that the stamp names. After a
//! reboot, pieces of unfinished blocks are downloaded again.

use super::rights::{open_file, open_or_make};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of a unit. Reads are widened to whole units.
pub(super) const UNIT: u64 = 4096;

const HEADER: u64 = 4096;

/// Bytes of a mark.
const MARK: u64 = 4;

/// The marks of one object.
pub(super) struct Units(File);

/// The units that contain a range of bytes.
pub(super) fn units_of(offset: u64, len: u64) -> Range<u64> {
    offset / UNIT..(offset + len).div_ceil(UNIT)
}

/// The path of the file with a data file's marks.
pub(super) fn units_file(data: &Path) -> PathBuf {
    let mut path = data.as_os_str().to_owned();
    path.push(".units");
    path.into()
}

impl Units {
    /// The marks of a data file; `None` if there are none with this stamp.
    pub(super) fn find(data: &Path, stamp: u64) -> Option<Self> {
        let units = Self(open_file(&units_file(data), true).ok()?);
        units.is_of(stamp).then_some(units)
    }

    /// The marks of a data file, created anew if they have another stamp. If two processes do so at
    /// the same time, one may lose marks: those pieces are downloaded again.
    pub(super) fn make(data: &Path, stamp: u64) -> io::Result<Self> {
        if let Some(found) = Self::find(data, stamp) {
            return Ok(found);
        }
        let file = open_or_make(&units_file(data))?;
        file.set_len(0)?;
        file.write_all_at(&stamp.to_le_bytes(), 0)?;
        Ok(Self(file))
    }

    fn is_of(&self, stamp: u64) -> bool {
        let mut found = [0; 8];
        self.0.read_exact_at(&mut found, 0).is_ok() && u64::from_le_bytes(found) == stamp
    }

    /// The marks of these units; 0 past the end of the file, which ends with its last mark.
    fn marks(&self, units: &Range<u64>) -> Vec<u32> {
        let mut bytes = vec![0; (units.end - units.start) as usize * MARK as usize];
        let mut read = 0;
        while read < bytes.len() {
            match self.0.read_at(
                &mut bytes[read..],
                HEADER + MARK * units.start + read as u64,
            ) {
                Ok(more @ 1..) => read += more,
                _ => break,
            }
        }
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|mark| u32::from_le_bytes(*mark))
            .collect()
    }

    /// Number of these units that are marked.
    pub(super) fn count(&self, units: &Range<u64>) -> u64 {
        self.marks(units).iter().filter(|mark| **mark != 0).count() as u64
    }

    /// Whether all of these units are marked.
    pub(super) fn has(&self, units: &Range<u64>) -> bool {
        self.count(units) == units.end - units.start
    }

    /// Marks units as stored on the disk. The first one is at this offset of the data.
    pub(super) fn mark(&self, offset: u64, marks: &[u32]) -> io::Result<()> {
        let bytes: Vec<u8> = marks.iter().flat_map(|mark| mark.to_le_bytes()).collect();
        self.0.write_all_at(&bytes, HEADER + MARK * (offset / UNIT))
    }

    /// Clears the marks of these units.
    pub(super) fn clear(&self, units: &Range<u64>) -> io::Result<()> {
        self.0.write_all_at(
            &vec![0; ((units.end - units.start) * MARK) as usize],
            HEADER + MARK * units.start,
        )
    }

    /// Whether these bytes, read from the disk, match the marks of these units.
    pub(super) fn are(&self, units: &Range<u64>, bytes: &[u8]) -> bool {
        marks_of(bytes) == self.marks(units)
    }
}

/// The marks of units: their CRC32C, at least 1.
pub(super) fn marks_of(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks(UNIT as usize)
        .map(|unit| crc32c::crc32c(unit).max(1))
        .collect()
}
