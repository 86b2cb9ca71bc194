//! What the sections share: the device, and a file of records in the page cache.

use crate::pull::RECORD;
use crate::section::Ctx;
use feedline::dataset::Records;
use feedline::{Batch, Device, Error};
use rustix::fs::statvfs;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What everything in the folder of the data is called; the program removes it at its end.
pub const DATA: &str = "feedline-gpu-data-";

/// An error with its sources.
pub fn words(error: Error) -> String {
    let mut words = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(inner) = source {
        words += &format!(": {inner}");
        source = inner.source();
    }
    words
}

/// The device by its primary context, as most programs have it.
pub fn device() -> Result<Device, String> {
    Device::cuda(0).map_err(words)
}

/// 147 × 2^10 bytes are a record: such a file is a whole number of them, and of reads of any power
/// of two up to 2^n.
const fn length(n: u32) -> u64 {
    147 << n
}

/// Records of [`RECORD`] bytes in the page cache: 2.5 GB (9.9 with `--full`), less where there is
/// little room, 10 MB against the stand-in. Made by the first section that asks.
pub fn data(ctx: &Ctx) -> Result<PathBuf, String> {
    const { assert!(RECORD as u64 == length(10)) };
    let failed =
        |what: &str, error: std::io::Error| format!("{what} in {}: {error}", ctx.dir.display());
    let room = statvfs(&ctx.dir).map_err(|error| failed("statvfs", error.into()))?;
    let room = (room.f_bavail * room.f_frsize / 2).min(available() / 4);
    let wanted = ctx.either(if ctx.full { 26 } else { 24 }, 16);
    let file = |n: u32| ctx.dir.join(format!("{DATA}{}.bin", length(n)));
    // What another section made needs no more room.
    let found = (16..=wanted)
        .rev()
        .find(|n| is_whole(&file(*n), length(*n)) || length(*n) <= room);
    let n = found.ok_or_else(|| {
        format!(
            "no room for data in {}: name another folder by --dir",
            ctx.dir.display()
        )
    })?;
    let path = file(n);
    if !is_whole(&path, length(n)) {
        make(&path, length(n)).map_err(|error| failed("the data cannot be written", error))?;
    }
    warm(&path).map_err(|error| failed("the data cannot be read", error))?;
    Ok(path)
}

fn is_whole(path: &Path, len: u64) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.len() == len)
}

/// Bytes of memory that are to be had.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib * 1024)
}

/// Bytes without a period, whole or not at all.
fn make(path: &Path, len: u64) -> std::io::Result<()> {
    let fresh = path.with_extension("part");
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = vec![0_u8; 1 << 20];
    let mut out = BufWriter::with_capacity(0, File::create(&fresh)?);
    let mut left = len;
    while left > 0 {
        for word in block.as_chunks_mut::<8>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
        let part = left.min(block.len() as u64);
        out.write_all(&block[..part as usize])?;
        left -= part;
    }
    out.into_inner()?.sync_data()?;
    std::fs::rename(&fresh, path)
}

/// Reads all of it once.
fn warm(path: &Path) -> std::io::Result<()> {
    let file = File::open(path)?;
    let mut block = vec![0; 4 << 20];
    let mut at = 0;
    loop {
        match file.read_at(&mut block, at)? {
            0 => return Ok(()),
            read => at += read as u64,
        }
    }
}

/// Removes what [`data`], the driver and cuFile have left in the folder.
pub fn clean(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(DATA))
        {
            let _ = std::fs::remove_file(entry.path())
                .or_else(|_| std::fs::remove_dir_all(entry.path()));
        }
    }
}

/// The data as records of so many bytes.
pub fn records(path: &Path, bytes: usize) -> Result<Records, String> {
    Records::builder(bytes).open(path).map_err(words)
}

/// Whether the rows of a batch of [`counted`](crate::pull::counted) are those of its samples.
pub fn right(batch: &Batch) -> Result<(), String> {
    let field = batch.field("record").map_err(words)?;
    let mut bytes = vec![0; field.size_bytes()];
    field.read_into(&mut bytes).map_err(words)?;
    let record = bytes.len() / batch.len().max(1);
    let wrong = batch
        .ids()
        .iter()
        .zip(bytes.chunks(record))
        .find(|(id, row)| row[..8] != id.to_ne_bytes());
    wrong.map_or(Ok(()), |(id, row)| {
        Err(format!("sample {id} begins with {:?}", &row[..8]))
    })
}
