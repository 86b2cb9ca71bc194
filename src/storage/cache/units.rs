//! Pieces of blocks: a byte for each unit of 4 KiB of an object that a read has brought to the data file.
//!
//! ```text
//! HASH.INC.units   [ stamp: 8 bytes, zeros up to 4 KiB ][ 0 or 1 ][ 0 or 1 ]…
//! piece ─► data file ─► its units are marked ─► all units of a block are there? ─► the block gets its record
//! ```
//!
//! Limits: the marks count in the boot, and for the data file, that the stamp names. Within a boot, all processes see data
//! that was written before its mark, so nothing is synced here. After a boot, pieces of unfinished blocks come again.
//!
//! A byte for each unit, not a bit, so that two processes never write the same one.

use super::rights::{NO_LINK, new_file};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of a unit. Reads are widened to whole ones.
pub(super) const UNIT: u64 = 4096;

const HEADER: u64 = 4096;

/// The marks of one object.
pub(super) struct Units(File);

/// Units that a range of bytes lies in.
pub(super) fn units_of(offset: u64, len: u64) -> Range<u64> {
    offset / UNIT..(offset + len).div_ceil(UNIT)
}

/// The file of a data file's marks.
pub(super) fn units_file(data: &Path) -> PathBuf {
    let mut path = data.as_os_str().to_owned();
    path.push(".units");
    path.into()
}

impl Units {
    /// The marks beside a data file; `None` if there are none of this stamp.
    pub(super) fn find(data: &Path, stamp: u64) -> Option<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(NO_LINK).open(units_file(data)).ok()?;
        let units = Self(file);
        units.is_of(stamp).then_some(units)
    }

    /// The marks beside a data file, made anew if they have another stamp. Of two processes that do so at a time, one may
    /// lose marks: their pieces come again.
    pub(super) fn make(data: &Path, stamp: u64) -> io::Result<Self> {
        if let Some(found) = Self::find(data, stamp) {
            return Ok(found);
        }
        let path = units_file(data);
        let file = match new_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                OpenOptions::new().read(true).write(true).custom_flags(NO_LINK).open(&path)
            }
            made => made,
        }?;
        file.set_len(0)?;
        file.write_all_at(&stamp.to_le_bytes(), 0)?;
        Ok(Self(file))
    }

    fn is_of(&self, stamp: u64) -> bool {
        let mut found = [0; 8];
        self.0.read_exact_at(&mut found, 0).is_ok() && u64::from_le_bytes(found) == stamp
    }

    /// How many of these units are here.
    pub(super) fn count(&self, units: &Range<u64>) -> u64 {
        let (mut count, mut at, mut marks) = (0, units.start, [0; 2048]);
        while at < units.end {
            let room = marks.len().min((units.end - at) as usize);
            // The file ends with its last mark.
            let Ok(read @ 1..) = self.0.read_at(&mut marks[..room], HEADER + at) else { break };
            count += marks[..read].iter().filter(|mark| **mark == 1).count() as u64;
            at += read as u64;
        }
        count
    }

    /// Whether all of these units are here.
    pub(super) fn has(&self, units: &Range<u64>) -> bool {
        self.count(units) == units.end - units.start
    }

    /// These units are in the data file, or no longer.
    pub(super) fn mark(&self, units: &Range<u64>, here: bool) -> io::Result<()> {
        let marks = vec![u8::from(here); (units.end - units.start) as usize];
        self.0.write_all_at(&marks, HEADER + units.start)
    }
}
