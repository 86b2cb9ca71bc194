//! Share of the data in the page cache before a run: a run over cached files measures memory, not storage.
//!
//! It reads one byte at each of at most 256 offsets, evenly distributed over all bytes, by `preadv2` with `RWF_NOWAIT`,
//! which fails if the page is not in memory. A miss loads its page, so a second look sees up to 256 pages more.

use feedline::storage::Sources;
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::IoSliceMut;

/// Maximum number of probed offsets.
const PLACES: u64 = 256;

/// Cached share of the files' bytes, 0 to 1; `None` without files, or if the file system does not report it.
pub fn share(sources: &Sources) -> Option<f64> {
    let files = || sources.ids().filter(|id| sources.bytes_of(*id).is_none());
    let total = files().map(|id| sources.len_of(id)).fold(0, u64::saturating_add);
    let count = PLACES.min(total);
    // The middle of each of `count` equal parts, multiplied in 128 bits.
    let place = |index: u64| (u128::from(total) * u128::from(2 * index + 1) / u128::from(2 * count)) as u64;
    let mut places = (0..count).map(place).peekable();
    let (mut hits, mut looks, mut before) = (0_u32, 0_u32, 0_u64);
    for id in files() {
        let len = sources.len_of(id);
        let mut file = None;
        while let Some(at) = places.next_if(|at| *at - before < len) {
            let file = file.get_or_insert_with(|| File::open(sources.path(id)));
            if let Some(hit) = file.as_ref().ok().and_then(|file| cached(file, at - before)) {
                (hits, looks) = (hits + u32::from(hit), looks + 1);
            }
        }
        before = before.saturating_add(len);
    }
    (looks > 0).then(|| f64::from(hits) / f64::from(looks))
}

/// Whether the page of this byte is cached; `None` if the file system does not report it.
fn cached(file: &File, at: u64) -> Option<bool> {
    // A miss must load only its own page, without read-ahead.
    rustix::fs::fadvise(file, 0, None, Advice::Random).ok()?;
    let mut byte = [0];
    loop {
        return match preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
            Ok(0) => None,
            Ok(_) => Some(true),
            Err(Errno::AGAIN) => Some(false),
            Err(Errno::INTR) => continue,
            Err(_) => None,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;

    #[test]
    fn written_files_are_cached_and_missing_ones_unknown() {
        let folder = Folder::new();
        std::fs::write(folder.join("file"), [7; 10_000]).unwrap();
        let mut sources = Sources::new();
        sources.file(folder.join("file"), 10_000).unwrap();
        assert!([None, Some(1.0)].contains(&share(&sources)), "a file system may not report it");
        let mut gone = Sources::new();
        gone.memory(vec![0; 100].into());
        gone.file("/no/such/file", 100).unwrap();
        assert_eq!(share(&gone), None);
    }
}
