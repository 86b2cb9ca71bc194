//! Side files: facts that were computed from data and are stored next to it, such as indexes,
//! checksums, seek points and plans.
//!
//! ```text
//! file:    page │ page │ page │ …        page: 4,092 bytes │ CRC32C of its number and bytes 4 (the last page may be shorter)
//! pages:   "feedside" │ kind 4, version 4 │ sections, one after the other │ length of each section 8 × 4, identity 8, "sidefeed"
//! ```
//!
//! Numbers are in the machine's byte order. In the other order, a file appears to be of a newer
//! version.
//!
//! A file of up to 16 MiB, or an object in a store, is read whole when it is opened. A larger file
//! is read in place, a page at a time by `pread`: it takes no memory, and processes share the page
//! cache. A page is checked each time it is read. A truncated file is an error; a memory map would
//! raise SIGBUS instead.
//!
//! Invariants: a file appears whole, by a rename. A file that is not checked when it is opened is
//! synced before the rename. A file that others read in place is not replaced by an equal one. No
//! file of a newer version or of another program is replaced. No byte is used before its page is
//! checked. Lengths in the file are compared with its size, or with the caller's limit, before
//! memory is allocated.

use super::publish::{Pending, make_folder};
use crate::storage::Blob;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::is_url;
use std::cmp::Ordering;
use std::io;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const PAGE: u64 = 4096;
/// Bytes of a page without its CRC.
const ROOM: u64 = PAGE - 4;
const MAGIC: &[u8; 8] = b"feedside";
const END: &[u8; 8] = b"sidefeed";
const HEAD: u64 = 16;
/// Maximum sections of a file.
const SECTIONS: usize = 4;
const TAIL: u64 = size_of::<Tail>() as u64;
/// Maximum bytes of a file that is held in memory.
const HELD_MAX: u64 = 16 << 20;
/// Number of recently read pages that are kept: the locations of one sample are looked up several
/// times in a row.
const RECENT: usize = 32;

#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Tail {
    lens: [u64; SECTIONS],
    identity: u64,
    end: [u8; 8],
}

/// The content type of a side file, and the version of its sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideKind {
    pub name: [u8; 4],
    pub version: u32,
    /// First 8 bytes of each format that preceded side files, concatenated.
    pub older: &'static [u8],
}

/// The file at the path of a side file.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub enum SideFound {
    /// No file, or an empty one.
    Nothing,
    Whole(Sidefile),
    /// Damaged, or cut short.
    Damaged,
    /// Of an older version of this crate.
    Older,
    /// Of a newer version, or of a machine of the other byte order; must not be overwritten.
    Newer,
    /// A file of another program; must not be overwritten.
    Foreign,
}

/// The message for [`SideFound::Newer`].
pub const NEWER: &str = "a file of a newer version of feedline, or of a machine with the other \
     byte order; it is not overwritten: name another file, or update feedline";

/// An open side file.
pub struct Sidefile {
    pub path: PathBuf,
    identity: u64,
    sections: [Range<u64>; SECTIONS],
    pages: SidePages,
}

enum SidePages {
    /// In memory: the file's bytes from its head up to its tail.
    Held(Vec<u8>),
    InPlace(Blob, Recent<Vec<u8>>),
}

/// The values looked up last, by number. An unused slot holds the default of `T`.
pub struct Recent<T>(Box<[Mutex<(u64, T)>]>);

impl<T: Default> Recent<T> {
    pub fn new(places: usize) -> Self {
        Self((0..places).map(|_| Mutex::default()).collect())
    }

    /// Applies `take` to value `number`. If the value is not held, `fill` writes it over another
    /// one.
    pub fn with<R>(
        &self,
        number: u64,
        fill: impl FnOnce(&mut T) -> Result<()>,
        take: impl FnOnce(&T) -> R,
    ) -> Result<R> {
        let mut fresh = <(u64, T)>::default();
        // Another thread may hold this slot while it waits for the disk. Then the slot is not used.
        let mut held = self.0[(number % self.0.len() as u64) as usize]
            .try_lock()
            .ok();
        // `known` is the number plus 1, because 0 marks an unused slot.
        let (known, value) = held.as_deref_mut().unwrap_or(&mut fresh);
        if *known != number + 1 {
            // If `fill` fails, the slot must count as unused.
            *known = 0;
            fill(value)?;
            *known = number + 1;
        }
        Ok(take(value))
    }
}

impl Sidefile {
    /// Opens the file at a path or URL. Errors: those of opening and reading.
    pub fn open(path: &Path, kind: SideKind) -> Result<SideFound> {
        match Blob::open(path) {
            Ok(blob) => Self::of(blob, kind),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(SideFound::Nothing),
            Err(error) => Err(error),
        }
    }

    /// Opens a file. Errors: those of reading.
    pub fn of(blob: Blob, kind: SideKind) -> Result<SideFound> {
        Self::of_limited(blob, kind, HELD_MAX)
    }

    /// Like `of`, with at most `held_max` bytes in memory.
    fn of_limited(blob: Blob, kind: SideKind, held_max: u64) -> Result<SideFound> {
        if blob.len() == 0 {
            return Ok(SideFound::Nothing);
        }
        let start = blob.read(0, blob.len().min(HEAD), "the side file")?;
        let name = &start[..start.len().min(8)];
        if kind.older.chunks_exact(8).any(|older| older == name) {
            return Ok(SideFound::Older);
        }
        if !MAGIC.starts_with(name) {
            return Ok(SideFound::Foreign);
        }
        if let Some((found, version)) = start.get(8..).and_then(<[u8]>::split_first_chunk) {
            let version = version.try_into().map_or(0, u32::from_ne_bytes);
            match (*found == kind.name, version.cmp(&kind.version)) {
                (true, Ordering::Equal) => {}
                // A damaged head may look like another kind or version; the checksum of its page
                // shows the damage.
                _ if page(&blob, 0, &mut Vec::new()).is_err() => return Ok(SideFound::Damaged),
                (true, Ordering::Less) => return Ok(SideFound::Older),
                (true, Ordering::Greater) => return Ok(SideFound::Newer),
                (false, _) => return Ok(SideFound::Foreign),
            }
        }
        match Self::read_tail(blob, held_max) {
            Ok(file) => Ok(file.map_or(SideFound::Damaged, SideFound::Whole)),
            Err(error) if matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated) => {
                Ok(SideFound::Damaged)
            }
            Err(error) => Err(error),
        }
    }

    fn read_tail(blob: Blob, held_max: u64) -> Result<Option<Self>> {
        let path = blob.path().to_path_buf();
        let whole = blob.len() / PAGE * ROOM;
        let len = match blob.len() % PAGE {
            0 => whole,
            rest @ 5.. => whole + rest - 4,
            _ => return Ok(None),
        };
        let Some(end) = len.checked_sub(TAIL).filter(|end| *end >= HEAD) else {
            return Ok(None);
        };
        let pages = match blob.is_object() || len <= held_max {
            true => SidePages::Held(all_pages(&blob, len)?),
            false => SidePages::InPlace(blob, Recent::new(RECENT)),
        };
        let mut tail = Tail::default();
        pages.copy(end, bytemuck::bytes_of_mut(&mut tail))?;
        let mut sections = [const { 0..0 }; SECTIONS];
        let mut at = HEAD;
        for (section, len) in sections.iter_mut().zip(tail.lens) {
            let Some(next) = at.checked_add(len) else {
                return Ok(None);
            };
            *section = at..next;
            at = next;
        }
        let whole = at == end && tail.end == *END;
        Ok(whole.then_some(Self {
            path,
            identity: tail.identity,
            sections,
            pages,
        }))
    }

    /// A side file that exists only in memory.
    pub(crate) fn held(parts: &[&[u8]]) -> Self {
        let mut bytes = vec![0; HEAD as usize];
        let mut sections = [const { 0..0 }; SECTIONS];
        for (number, section) in sections.iter_mut().enumerate() {
            let start = bytes.len() as u64;
            bytes.extend_from_slice(parts.get(number).copied().unwrap_or_default());
            *section = start..bytes.len() as u64;
        }
        Self {
            path: "<memory>".into(),
            identity: 0,
            sections,
            pages: SidePages::Held(bytes),
        }
    }

    /// The hash of the data that the file describes.
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// Bytes of a section.
    pub fn len(&self, section: usize) -> u64 {
        let range = &self.sections[section];
        range.end - range.start
    }

    /// Heap bytes.
    pub fn heap(&self) -> usize {
        match &self.pages {
            SidePages::Held(bytes) => bytes.capacity(),
            SidePages::InPlace(..) => RECENT * (PAGE as usize + size_of::<Mutex<(u64, Vec<u8>)>>()),
        }
    }

    /// `len` bytes of a section: borrowed from memory, or read into `buffer`. The caller has
    /// compared `len` with a limit.
    ///
    /// Errors: those of reading; [`ErrorKind::Decode`] for a damaged page, and for a range outside
    /// the section.
    pub fn read<'a>(
        &'a self,
        section: usize,
        offset: u64,
        len: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        self.bytes(section, offset, len, || {
            buffer.resize(len, 0);
            buffer
        })
    }

    /// The value at `offset` of a section. Errors: those of [`read`](Self::read).
    pub fn value<T: bytemuck::Pod>(&self, section: usize, offset: u64) -> Result<T> {
        let mut out = T::zeroed();
        self.fill(section, offset, bytemuck::bytes_of_mut(&mut out))?;
        Ok(out)
    }

    /// Like [`read`](Self::read); `room` returns a buffer of `len` bytes, called only for a file
    /// that is read in place.
    pub(crate) fn bytes<'a>(
        &'a self,
        section: usize,
        offset: u64,
        len: usize,
        room: impl FnOnce() -> &'a mut [u8],
    ) -> Result<&'a [u8]> {
        let at = self.at(section, offset, len)?;
        if let SidePages::Held(bytes) = &self.pages {
            return Ok(&bytes[at as usize..at as usize + len]);
        }
        let room = room();
        self.pages.copy(at, room)?;
        Ok(room)
    }

    /// Fills `out` with the bytes of a section that start at `offset`. Errors: those of
    /// [`read`](Self::read).
    pub fn fill(&self, section: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.pages.copy(self.at(section, offset, out.len())?, out)
    }

    /// Entry `number` of a section. The section `ends` holds the end of each entry. Errors: those
    /// of [`read`](Self::read); an entry of more than `most` bytes.
    pub fn entry<'a>(
        &'a self,
        section: usize,
        ends: usize,
        number: u64,
        most: u64,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let [start, end]: [u64; 2] = match number.checked_sub(1) {
            None => [0, self.value(ends, 0)?],
            Some(before) => self.value(ends, before.saturating_mul(8))?,
        };
        match end.checked_sub(start).filter(|len| *len <= most) {
            Some(len) => self.read(section, start, len as usize, buffer),
            None => Err(self.damaged()),
        }
    }

    fn at(&self, section: usize, offset: u64, len: usize) -> Result<u64> {
        let Range { start, end } = self.sections[section];
        let at = start
            .checked_add(offset)
            .filter(|at| at.checked_add(len as u64).is_some_and(|last| last <= end));
        at.ok_or_else(|| self.damaged())
    }

    /// The error of a file whose numbers contradict each other.
    #[cold]
    pub fn damaged(&self) -> Error {
        damaged().with_path(&self.path)
    }
}

impl SidePages {
    /// Copies bytes of the checked pages.
    fn copy(&self, mut at: u64, mut out: &mut [u8]) -> Result<()> {
        let (blob, recent) = match self {
            Self::Held(bytes) => {
                let found = usize::try_from(at)
                    .ok()
                    .and_then(|at| bytes.get(at..at.checked_add(out.len())?));
                out.copy_from_slice(found.ok_or_else(damaged)?);
                return Ok(());
            }
            Self::InPlace(blob, recent) => (blob, recent),
        };
        while !out.is_empty() {
            let number = at / ROOM;
            let start = (at % ROOM) as usize;
            let len = out.len().min(ROOM as usize - start);
            let (now, later) = out.split_at_mut(len);
            let copied = recent.with(
                number,
                |bytes| page(blob, number, bytes),
                |bytes| {
                    bytes
                        .get(start..start + len)
                        .map(|found| now.copy_from_slice(found))
                },
            )?;
            copied.ok_or_else(|| wrong(blob, number))?;
            at += len as u64;
            out = later;
        }
        Ok(())
    }
}

/// Reads the bytes of a page, and checks them.
fn page(blob: &Blob, number: u64, out: &mut Vec<u8>) -> Result<()> {
    let start = number * PAGE;
    let len = blob.len().saturating_sub(start).min(PAGE);
    out.resize(len as usize, 0);
    blob.fill(start, out, "a page of the side file")?;
    let room = out.len().saturating_sub(4);
    match out[room..] == crc(number, &out[..room]) {
        true => out.truncate(room),
        false => return Err(wrong(blob, number)),
    }
    Ok(())
}

/// Reads and checks all pages. Returns their `len` bytes.
fn all_pages(blob: &Blob, len: u64) -> Result<Vec<u8>> {
    let mut all = blob.read(0, blob.len(), "the side file")?;
    let mut end = 0;
    for number in 0..len.div_ceil(ROOM) {
        let start = (number * PAGE) as usize;
        let room = (all.len() - start).min(PAGE as usize) - 4;
        if all[start + room..start + room + 4] != crc(number, &all[start..start + room]) {
            return Err(wrong(blob, number));
        }
        all.copy_within(start..start + room, end);
        end += room;
    }
    all.truncate(end);
    Ok(all)
}

fn crc(number: u64, bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), bytes).to_le_bytes()
}

#[cold]
fn damaged() -> Error {
    Error::new(ErrorKind::Decode, Stage::Index, "the side file is damaged")
}

#[cold]
fn wrong(blob: &Blob, number: u64) -> Error {
    blob.wrong(
        "the side file is damaged: a page does not match its CRC32C",
        number * PAGE,
        PAGE,
    )
}

/// Writes a side file, section by section.
pub struct SideWriter {
    out: Pending,
    kind: SideKind,
    /// Bytes of the current page so far.
    page: Vec<u8>,
    /// Pages and bytes so far.
    pages: u64,
    at: u64,
    /// Ends of the sections so far.
    ends: Vec<u64>,
}

impl SideWriter {
    /// Begins `target`, and creates its folder. Errors: the system's; a target in a store; a target
    /// that is a file of a newer version or of another program.
    pub fn create(target: &Path, kind: SideKind) -> io::Result<Self> {
        if is_url(target) {
            return Err(io::Error::other(
                "nothing is written to a store; make the file on a local disk, and upload it",
            ));
        }
        if let Some(dir) = target.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            make_folder(dir)?;
        }
        match Sidefile::open(target, kind) {
            Ok(SideFound::Newer) => return Err(io::Error::other(NEWER)),
            Ok(SideFound::Foreign) => {
                return Err(io::Error::other(
                    "the path holds another kind of file, which is not overwritten",
                ));
            }
            _ => {}
        }
        let out = Pending::create(target)?;
        let mut writer = Self {
            out,
            kind,
            page: Vec::with_capacity(ROOM as usize),
            pages: 0,
            at: 0,
            ends: vec![HEAD],
        };
        writer.put(MAGIC)?;
        writer.put(&kind.name)?;
        writer.put(&kind.version.to_ne_bytes())?;
        Ok(writer)
    }

    /// Appends to the section. Errors: the system's.
    pub fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        self.at += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(ROOM as usize - self.page.len()));
            self.page.extend_from_slice(now);
            bytes = later;
            if self.page.len() == ROOM as usize {
                self.end_page()?;
            }
        }
        Ok(())
    }

    fn end_page(&mut self) -> io::Result<()> {
        let crc = crc(self.pages, &self.page);
        self.out.write_all(&self.page)?;
        self.out.write_all(&crc)?;
        self.page.clear();
        self.pages += 1;
        Ok(())
    }

    /// Ends the section.
    pub fn end_section(&mut self) {
        self.ends.push(self.at);
    }

    /// Ends the file. The caller commits it under its name. Errors: the system's.
    pub fn finish(mut self, identity: u64) -> io::Result<Pending> {
        self.end(identity)?;
        Ok(self.out)
    }

    /// Ends the file and commits it under its name. An existing equal file (same identity, sections
    /// of the same lengths) is kept, since others may read it in place. Errors: the system's.
    pub fn publish(mut self, identity: u64) -> io::Result<()> {
        let lens = self.end(identity)?;
        let kind = self.kind;
        let target = self.out.target.clone();
        self.out
            .commit_unless(self.at > HELD_MAX, || match Sidefile::open(&target, kind) {
                Ok(SideFound::Whole(there)) => {
                    there.identity == identity && (0..SECTIONS).all(|at| there.len(at) == lens[at])
                }
                _ => false,
            })
    }

    fn end(&mut self, identity: u64) -> io::Result<[u64; SECTIONS]> {
        self.ends.resize(SECTIONS + 1, self.at);
        let lens = std::array::from_fn(|section| self.ends[section + 1] - self.ends[section]);
        self.put(bytemuck::bytes_of(&Tail {
            lens,
            identity,
            end: *END,
        }))?;
        if !self.page.is_empty() {
            self.end_page()?;
        }
        Ok(lens)
    }

    /// The target's path.
    pub fn target(&self) -> &Path {
        &self.out.target
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;

    const KIND: SideKind = SideKind {
        name: *b"test",
        version: 3,
        older: b"oldtest oldtest0",
    };

    fn write(path: &Path, identity: u64, sections: &[&[u8]]) {
        let mut out = SideWriter::create(path, KIND).unwrap();
        for section in sections {
            out.put(section).unwrap();
            out.end_section();
        }
        out.publish(identity).unwrap();
    }

    fn file(sections: &[&[u8]]) -> Vec<u8> {
        let path =
            std::env::temp_dir().join(format!("feedline-side-{}-{sections:p}", std::process::id()));
        write(&path, 77, sections);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        bytes
    }

    fn open(bytes: &[u8], kind: SideKind, held_max: u64) -> SideFound {
        Sidefile::of_limited(Blob::memory(Bytes::copy_from_slice(bytes)), kind, held_max).unwrap()
    }

    /// All that can be read: sections, or `None` for one with an error.
    fn read(bytes: &[u8], held_max: u64) -> Option<Vec<Option<Vec<u8>>>> {
        let SideFound::Whole(file) = open(bytes, KIND, held_max) else {
            return None;
        };
        Some(
            (0..SECTIONS)
                .map(|number| {
                    file.read(number, 0, file.len(number) as usize, &mut Vec::new())
                        .ok()
                        .map(<[u8]>::to_vec)
                })
                .collect(),
        )
    }

    #[test]
    fn every_flip_and_cut_is_found_before_a_byte_is_used() {
        let long: Vec<u8> = (0..9000_u32).map(|k| (k * 7 / 3) as u8).collect();
        let sections = [&b"short"[..], b"", &long, b"end"];
        let whole = file(&sections);
        for held_max in [0, u64::MAX] {
            let right = read(&whole, held_max).unwrap();
            assert!(
                right
                    .iter()
                    .zip(sections)
                    .all(|(found, section)| found.as_deref() == Some(section))
            );
            let check = |bytes: &[u8], case: &str| {
                for (found, section) in read(bytes, held_max).into_iter().flatten().zip(sections) {
                    assert!(
                        found.is_none_or(|found| found == section),
                        "{case}, held {held_max}"
                    );
                }
            };
            for at in 0..whole.len() {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << (at % 8);
                check(&bytes, &format!("flip of byte {at}"));
                assert!(
                    held_max == 0 || read(&bytes, held_max).is_none(),
                    "flip of byte {at}"
                );
                assert!(read(&whole[..at], held_max).is_none(), "cut at {at}");
            }
            // Whole pages of the same file, in another order.
            let mut swapped = whole.clone();
            swapped.copy_within(PAGE as usize..2 * PAGE as usize, 0);
            check(&swapped, "a page at another place");
            for zeros in [1, 4, 5, 4096] {
                assert!(
                    read(&[&whole[..], &vec![0; zeros]].concat(), held_max).is_none(),
                    "{zeros} zeros behind the file"
                );
            }
        }
    }

    #[test]
    fn another_kind_is_foreign_and_another_version_older_or_newer() {
        let whole = file(&[b"x"]);
        let found = |bytes: &[u8], kind| match open(bytes, kind, u64::MAX) {
            SideFound::Nothing => "nothing",
            SideFound::Whole(_) => "whole",
            SideFound::Damaged => "damaged",
            SideFound::Older => "older",
            SideFound::Newer => "newer",
            SideFound::Foreign => "foreign",
        };
        assert_eq!(found(&whole, KIND), "whole");
        assert_eq!(found(&whole, SideKind { version: 4, ..KIND }), "older");
        assert_eq!(found(&whole, SideKind { version: 2, ..KIND }), "newer");
        assert_eq!(
            found(
                &whole,
                SideKind {
                    name: *b"else",
                    ..KIND
                }
            ),
            "foreign"
        );
        let cases: [(&[u8], &str); 5] = [
            (b"", "nothing"),
            (b"feed", "damaged"),
            (b"feedside", "damaged"),
            (b"oldtest01 2 3", "older"),
            (b"my notes", "foreign"),
        ];
        for (bytes, right) in cases {
            assert_eq!(found(bytes, KIND), right, "{bytes:?}");
        }
    }

    #[test]
    fn a_file_that_is_cut_while_it_is_open_gives_errors_and_no_signal() {
        let path = std::env::temp_dir().join(format!("feedline-side-cut-{}", std::process::id()));
        let section = vec![5; 100_000];
        write(&path, 1, &[&section]);
        let SideFound::Whole(file) =
            Sidefile::of_limited(Blob::open(&path).unwrap(), KIND, 0).unwrap()
        else {
            panic!("a whole file")
        };
        assert!(file.heap() < 200_000 && file.value::<[u8; 3]>(0, 70_000).unwrap() == [5; 3]);
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(50_000)
            .unwrap();
        let error = file.read(0, 60_000, 9, &mut Vec::new()).unwrap_err();
        assert!(
            error.kind() == ErrorKind::Truncated && error.site().path == Some(path.clone()),
            "{error}"
        );
        assert!(file.read(0, 0, 40_000, &mut Vec::new()).unwrap() == [5; 40_000]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn an_equal_file_stays_and_another_one_is_replaced() {
        use std::os::unix::fs::MetadataExt;
        let path = std::env::temp_dir().join(format!("feedline-side-stays-{}", std::process::id()));
        let node = || std::fs::metadata(&path).unwrap().ino();
        write(&path, 1, &[b"one"]);
        let first = node();
        write(&path, 1, &[b"one"]);
        assert_eq!(node(), first);
        for (identity, section) in [(2, &b"one"[..]), (2, b"longer")] {
            write(&path, identity, &[section]);
            let SideFound::Whole(file) = Sidefile::open(&path, KIND).unwrap() else {
                panic!("a whole file")
            };
            assert_eq!(
                (file.identity(), file.len(0)),
                (identity, section.len() as u64)
            );
        }
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        write(&path, 2, &[b"longer"]);
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "damage is replaced");
        std::fs::remove_file(&path).unwrap();
    }

    proptest! {
        #[test]
        fn any_range_reads_as_it_was_written(
            lens in prop::collection::vec(0_usize..10_000, 1..5),
            asks in prop::collection::vec((0_usize..4, 0_u64..12_000, 0_usize..12_000), 1..20),
        ) {
            let sections: Vec<Vec<u8>> =
                lens.iter().enumerate().map(|(salt, len)| (0..*len).map(|k| (k * 31 / 7 + salt) as u8).collect()).collect();
            let parts: Vec<&[u8]> = sections.iter().map(Vec::as_slice).collect();
            let bytes = file(&parts);
            for held_max in [0, u64::MAX] {
                let SideFound::Whole(file) = open(&bytes, KIND, held_max) else { panic!("a whole file") };
                prop_assert_eq!(file.identity(), 77);
                for (section, offset, len) in &asks {
                    let mut buffer = Vec::new();
                    let found = file.read(*section, *offset, *len, &mut buffer).ok();
                    let own = parts.get(*section).copied().unwrap_or_default();
                    prop_assert_eq!(found, own.get(*offset as usize..).and_then(|rest| rest.get(..*len)));
                }
            }
        }
    }
}
