//! How much of the data the page cache holds before a run: a run over cached files measures memory, not storage.
//!
//! One byte is read at each of at most 256 places, spread evenly over all bytes, by `preadv2` with `RWF_NOWAIT`: it fails where
//! the page is not in memory. A miss brings that one page in, so a second look sees up to 256 pages more.

use feedline::storage::Sources;
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::IoSliceMut;

/// Places that are looked at, at most.
const PLACES: u64 = 256;

/// The share of the files' bytes that is cached, 0 to 1; `None` where there are no files, or the file system does not tell.
pub fn share(sources: &Sources) -> Option<f64> {
    let files = || sources.ids().filter(|id| sources.bytes_of(*id).is_none());
    let total = files().map(|id| sources.len_of(id)).fold(0, u64::saturating_add);
    let count = PLACES.min(total);
    // The middle of each of `count` equal parts; multiplied wide.
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

/// Whether the page of this byte is cached; `None` where the file system does not tell.
fn cached(file: &File, at: u64) -> Option<bool> {
    // A miss shall bring in one page and not those behind it, too.
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
    use std::os::unix::fs::FileExt;

    const PAGES: u64 = 1024;

    /// What is seen of a file of which so many pages were read after it was dropped; `None` where that is not to be had.
    fn seen(folder: &Folder, pages: u64) -> Option<f64> {
        let page = rustix::param::page_size() as u64;
        let path = folder.join(format!("{pages}"));
        std::fs::write(&path, vec![7; (PAGES * page) as usize]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
        (0..pages).for_each(|index| file.read_exact_at(&mut [0], index * page).unwrap());
        let mut sources = Sources::new();
        sources.file(&path, PAGES * page).unwrap();
        share(&sources)
    }

    #[test]
    fn the_share_follows_what_was_read() {
        let folder = Folder::new();
        match seen(&folder, 0) {
            Some(0.0) => {}
            other => return println!("skipped: {other:?} of a file that was dropped (tmpfs, overlayfs?)"),
        }
        let half = seen(&folder, PAGES / 2).unwrap();
        assert!((0.45..0.55).contains(&half), "{half}");
        assert_eq!(seen(&folder, PAGES), Some(1.0));
    }

    #[test]
    fn without_files_nothing_is_known() {
        let mut memory = Sources::new();
        memory.memory(vec![0; 100].into());
        assert_eq!(share(&memory), None);
        let mut gone = Sources::new();
        gone.file("/no/such/file", 100).unwrap();
        assert_eq!(share(&gone), None);
    }
}
