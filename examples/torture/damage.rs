//! Damage to files of the copy, done by the child that reads them.
//!
//! Files of the copy are hard links, so every change starts with a copy of the file.

use crate::copy::duplicate;
use crate::job::{Damage, Kind};
use crate::source::Source;
use feedline::order::Draws;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

/// Damages the files.
pub fn inflict(damage: &Damage, source: Source, seed: u64) -> io::Result<()> {
    for (index, path) in damage.files.iter().enumerate() {
        let mut draws = Draws::new(seed, index as u64, 0, "torture");
        one(damage.kind, path, source, &mut draws)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
    }
    Ok(())
}

fn one(kind: Kind, path: &Path, source: Source, draws: &mut Draws) -> io::Result<()> {
    if let Kind::Removed | Kind::Fifo | Kind::Folder = kind {
        fs::remove_file(path)?;
    } else {
        own(path)?;
    }
    match kind {
        Kind::Removed => Ok(()),
        Kind::Fifo => fifo(path),
        Kind::Folder => fs::create_dir(path),
        // Not at the end of a record of even length, which some formats could not detect.
        Kind::Cut => open(path)?.set_len((fs::metadata(path)?.len() / 2).saturating_sub(3)),
        Kind::Emptied => open(path)?.set_len(0),
        Kind::Grown => OpenOptions::new()
            .append(true)
            .open(path)?
            .write_all(&[0xa5; 1000]),
        Kind::Replaced => {
            let old = fs::read(path)?;
            let new: Vec<u8> = old.iter().map(|_| draws.next_u64() as u8).collect();
            fs::remove_file(path)?;
            fs::write(path, new)
        }
        Kind::Forbidden => fs::set_permissions(path, Permissions::from_mode(0o000)),
        Kind::Flipped => {
            let header = self_description(source, path)?;
            flip(path, draws, &only(0..fs::metadata(path)?.len()), |at| {
                !header.iter().any(|range| range.contains(&at))
            })
        }
        Kind::FlippedHeader => flip(path, draws, &self_description(source, path)?, |_| true),
    }
}

fn fifo(path: &Path) -> io::Result<()> {
    Ok(mknodat(
        CWD,
        path,
        FileType::Fifo,
        Mode::RUSR | Mode::WUSR,
        0,
    )?)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(path)
}

/// Replaces a link by a copy of its file.
fn own(path: &Path) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".own");
    let beside = path.with_file_name(name);
    duplicate(path, &beside)?;
    fs::rename(beside, path)
}

/// Flips a random bit at a `legal` offset, if any, and keeps the file's modification time, like bit
/// rot.
fn flip(
    path: &Path,
    draws: &mut Draws,
    ranges: &[Range<u64>],
    legal: impl Fn(u64) -> bool,
) -> io::Result<()> {
    let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if total == 0 {
        return Ok(());
    }
    let place = |mut at: u64| {
        for range in ranges {
            let len = range.end - range.start;
            if at < len {
                return range.start + at;
            }
            at -= len;
        }
        0
    };
    let at = (0..1000)
        .map(|_| place(draws.below(total)))
        .find(|at| legal(*at));
    let Some(at) = at else { return Ok(()) };
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let before = file.metadata()?.modified()?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&[byte[0] ^ 1 << draws.below(8)], at)?;
    file.set_times(fs::FileTimes::new().set_modified(before))
}

/// The ranges of a file's metadata: all of an index file, the headers of a shard.
pub fn self_description(source: Source, path: &Path) -> io::Result<Vec<Range<u64>>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let word = |at: u64| -> u64 {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at)
            .map_or(0, |()| u64::from_le_bytes(bytes))
    };
    let ending = path
        .extension()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let first = |bytes: u64| only(0..bytes.min(len));
    Ok(match source {
        Source::Tar => tar_headers(&file, len)?,
        Source::Mds if ending == "json" => first(len),
        Source::Megatron if ending == "idx" => first(len),
        Source::Mds => first(word(0) as u32 as u64 * 4 + 8),
        Source::Safetensors => first(word(0).saturating_add(8)),
        Source::Npy => first(128),
        Source::Npz => only(len.saturating_sub(150)..len),
        Source::Tfrecord => first(12),
        Source::Images => first(20),
        #[cfg(feature = "parquet")]
        Source::Parquet => {
            only(len.saturating_sub(8 + (word(len.saturating_sub(8)) as u32 as u64))..len)
        }
        _ => Vec::new(),
    })
}

fn only(range: Range<u64>) -> Vec<Range<u64>> {
    Vec::from([range])
}

fn tar_headers(file: &File, len: u64) -> io::Result<Vec<Range<u64>>> {
    let mut at = 0;
    let mut headers = Vec::new();
    let mut block = [0; 512];
    while at + 512 <= len {
        file.read_exact_at(&mut block, at)?;
        let digits = String::from_utf8_lossy(&block[124..135]).into_owned();
        let Ok(size) = u64::from_str_radix(digits.trim_matches(['\0', ' ']), 8) else {
            break;
        };
        headers.push(at..at + 512);
        at += 512 + size.next_multiple_of(512);
    }
    Ok(headers)
}
