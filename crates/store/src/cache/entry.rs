//! The two files of a cached object: its bytes, and the map that says which blocks are whole.
//!
//! ```text
//! HASH.INC      [ block 0 ][ hole ][ block 2 ]…      as long as the object
//! HASH.INC.map  [ header: 4 KiB ][ 32 bytes ][ 0 ][ 32 bytes ]…
//! header  magic 8, length 8, block size 8, length of URL 4, of version 4, URL, version, CRC32C of all before
//! record  stamp 8, hash of the header 8, length of the block 4, CRC32C of the block 4, 0 4, CRC32C of all before 4
//! ```
//!
//! The stamp is a hash of the current boot and the inode of the data. A record with this stamp is
//! trusted: the page cache shows the bytes that were written before it. After a reboot, in a copy
//! of the folder, and if the stamp is 0, the block is compared with its checksum.

use super::rights::{make_folder, new_file, open_file};
use super::units::{UNIT, Units, units_of};
use feedline_base::metadata::fnv;
use feedline_reader::syscalls;
use rustix::fd::AsFd;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"FDLCACH1";
const HEADER: usize = 4096;
const RECORD: usize = 32;

/// The stamp of a block that a verification refused. No boot has this stamp.
const REFUSED: u64 = 0;

/// This boot's id. Empty if it is unknown; then every block is compared.
static BOOT: LazyLock<String> = LazyLock::new(|| {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
});

/// Header of an object's map: URL, version, length and block size.
pub(super) struct Identity {
    header: Vec<u8>,
    pub(super) layout: Layout,
}

/// Name and blocks of an object.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Name of the object's link: the hash of its header.
    hash: u64,
    /// Length of the object.
    pub(super) len: u64,
    /// Bytes of a block.
    pub(super) block: u64,
}

impl Identity {
    /// `None` for a URL that does not fit the header.
    pub(super) fn new(url: &[u8], pin: &str, len: u64, block: u64) -> Option<Self> {
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend([len, block].iter().flat_map(|number| number.to_le_bytes()));
        header.extend(
            [url.len(), pin.len()]
                .iter()
                .flat_map(|len| (*len as u32).to_le_bytes()),
        );
        header.extend_from_slice(url);
        header.extend_from_slice(pin.as_bytes());
        header.extend_from_slice(&crc32c::crc32c(&header).to_le_bytes());
        (header.len() <= HEADER).then(|| {
            header.resize(HEADER, 0);
            Self {
                layout: Layout {
                    hash: fnv(&header),
                    len,
                    block,
                },
                header,
            }
        })
    }

    /// Parses the header of a map. Returns it with its URL and version; `None` if it is damaged.
    pub(super) fn parse(header: Vec<u8>) -> Option<(Self, String, String)> {
        let word = |at: usize| Some(u32::from_le_bytes(*header.get(at..)?.first_chunk()?));
        let long = |at: usize| Some(u64::from_le_bytes(*header.get(at..)?.first_chunk()?));
        let len = long(8)?;
        let block = long(16)?;
        let url = word(24)? as usize;
        let pin = word(28)? as usize;
        let url = header.get(32..32_usize.checked_add(url)?)?.to_vec();
        let pin = header.get(32 + url.len()..(32 + url.len()).checked_add(pin)?)?;
        let pin = str::from_utf8(pin).ok()?.to_string();
        let identity =
            Self::new(&url, &pin, len, block).filter(|it| it.header == header && block > 0)?;
        Some((identity, String::from_utf8_lossy(&url).into_owned(), pin))
    }
}

impl Layout {
    /// Number of blocks.
    pub(super) fn blocks(&self) -> u64 {
        self.len.div_ceil(self.block)
    }

    /// Bytes of the map on the disk.
    pub(super) fn map_bytes(&self) -> u64 {
        (HEADER as u64 + self.blocks() * RECORD as u64).next_multiple_of(4096)
    }

    /// Length of a block.
    pub(super) fn block_len(&self, block: u64) -> u64 {
        self.block.min(self.len - block * self.block)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum BlockState {
    Missing,
    /// Written in an earlier boot, with this CRC32C.
    Unproven(u32),
    Whole,
}

/// The open files of an object.
pub(super) struct EntryFiles {
    data: File,
    map: File,
    /// Path of the data.
    pub(super) path: PathBuf,
    pub(super) inode: u64,
    stamp: u64,
    pub(super) layout: Layout,
}

impl Drop for EntryFiles {
    /// Unlocks the file explicitly: a forked child may share the files, and with them the claims.
    fn drop(&mut self) {
        syscalls::unlock(self.map.as_fd());
    }
}

impl EntryFiles {
    fn of(data: File, map: File, path: PathBuf, layout: Layout) -> io::Result<Self> {
        let inode = data.metadata()?.ino();
        Ok(Self {
            data,
            map,
            path,
            inode,
            stamp: stamp_of(inode),
            layout,
        })
    }

    /// The entry that a link in `folder` points to; `None` if there is none. Errors: the system's;
    /// `InvalidData` for foreign files.
    pub(super) fn find(folder: &Path, identity: &Identity) -> io::Result<Option<Self>> {
        let link = folder.join(link_name(identity.layout.hash));
        let name = match std::fs::read_link(&link) {
            Ok(name) => name,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if !name.to_str().is_some_and(|name| {
            is_data_name(name) && name.starts_with(&link_name(identity.layout.hash))
        }) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a link that leads elsewhere",
            ));
        }
        let path = folder.join(name);
        let (data, map) = match (open_file(&path, true), open_file(&map_of(&path), true)) {
            (Ok(data), Ok(map)) => (data, map),
            (Err(error), _) | (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                // Another process is removing the entry, or ended between handling its files and
                // its link.
                let _ = std::fs::remove_file(&link);
                return Ok(None);
            }
            (Err(error), _) | (_, Err(error)) => return Err(error),
        };
        if is_blank(&map) {
            let _ = std::fs::remove_file(&link);
            return Ok(None);
        }
        let mut header = [0; HEADER];
        map.read_exact_at(&mut header, 0)?;
        if header[..] != identity.header[..] || data.metadata()?.len() != identity.layout.len {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "another object of the same name",
            ));
        }
        Self::of(data, map, path, identity.layout).map(Some)
    }

    /// The entry with this data file, its URL and version. `None` if the header is damaged, or
    /// belongs to another object.
    pub(super) fn open(path: &Path, write: bool) -> io::Result<Option<(Self, String, String)>> {
        let data = open_file(path, write)?;
        let map = open_file(&map_of(path), write)?;
        let mut header = vec![0; HEADER];
        map.read_exact_at(&mut header, 0)?;
        let Some((identity, url, version)) = Identity::parse(header) else {
            return Ok(None);
        };
        let named = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with(&link_name(identity.layout.hash)));
        match named && data.metadata()?.len() == identity.layout.len {
            true => Ok(Some((
                Self::of(data, map, path.into(), identity.layout)?,
                url,
                version,
            ))),
            false => Ok(None),
        }
    }

    /// Creates the files and the link. If another process is faster, its entry is returned.
    pub(super) fn make(folder: &Path, identity: &Identity) -> io::Result<Self> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        make_folder(folder)?;
        let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let number = format!(
            "{} {now:?} {}",
            std::process::id(),
            MADE.fetch_add(1, Ordering::Relaxed)
        );
        let link = link_name(identity.layout.hash);
        let name = format!("{link}.{:08x}", fnv(number.as_bytes()) as u32);
        let path = folder.join(&name);
        let made = new_file(&path).and_then(|data| {
            let map = new_file(&map_of(&path))?;
            map.write_all_at(&identity.header, 0)?;
            data.set_len(identity.layout.len)?;
            std::os::unix::fs::symlink(&name, folder.join(&link))?;
            Self::of(data, map, path.clone(), identity.layout)
        });
        made.or_else(|error| {
            let _ = std::fs::remove_file(&path);
            let _ = std::fs::remove_file(map_of(&path));
            match error.kind() {
                io::ErrorKind::AlreadyExists => Self::find(folder, identity)?.ok_or(error),
                _ => Err(error),
            }
        })
    }

    /// Claims the right to download a block; false if another process has it. The claim ends with
    /// this entry, and when the process is killed.
    pub(super) fn claim(&self, block: u64) -> bool {
        // A file system without such locks allows two downloads of one block.
        syscalls::lock_range(self.map.as_fd(), place_of(block), RECORD as u64).unwrap_or(true)
    }

    /// Ends this entry's claims.
    pub(super) fn yield_claims(&self) {
        syscalls::unlock(self.map.as_fd());
    }

    pub(super) fn state(&self, block: u64) -> io::Result<BlockState> {
        let mut record = [0; RECORD];
        match self.map.read_exact_at(&mut record, place_of(block)) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(BlockState::Missing),
            read => read.map(|()| self.state_of(block, &record)),
        }
    }

    /// The states of all blocks that have a record, with one read.
    pub(super) fn states(&self) -> io::Result<Vec<BlockState>> {
        self.records(|block, record| self.state_of(block, record))
    }

    /// The checksums of these blocks; `None` for those that are missing or [refused](Self::refuse).
    pub(super) fn checksums(&self) -> io::Result<Vec<Option<u32>>> {
        self.records(|block, record| self.checksum_in(block, record))
    }

    /// Like [`checksums`](Self::checksums), of one block.
    pub(super) fn checksum(&self, block: u64) -> io::Result<Option<u32>> {
        let mut record = [0; RECORD];
        self.map.read_exact_at(&mut record, place_of(block))?;
        Ok(self.checksum_in(block, &record))
    }

    fn checksum_in(&self, block: u64, record: &[u8; RECORD]) -> Option<u32> {
        let is_here = self.state_of(block, record) != BlockState::Missing
            && record[..8] != REFUSED.to_le_bytes();
        is_here.then(|| crc_in(record))
    }

    fn records<T>(&self, read: impl Fn(u64, &[u8; RECORD]) -> T) -> io::Result<Vec<T>> {
        let records = self.map.metadata()?.len().saturating_sub(HEADER as u64) / RECORD as u64;
        let records = records.min(self.layout.blocks());
        let mut bytes = vec![0; records as usize * RECORD];
        self.map.read_exact_at(&mut bytes, HEADER as u64)?;
        let (records, _) = bytes.as_chunks::<RECORD>();
        Ok(records
            .iter()
            .zip(0..)
            .map(|(record, block)| read(block, record))
            .collect())
    }

    fn state_of(&self, block: u64, record: &[u8; RECORD]) -> BlockState {
        let crc = crc_in(record);
        let stamp = u64::from_le_bytes(record[..8].try_into().expect("8 bytes"));
        match *record == record_of(&self.layout, block, crc, stamp) {
            true if stamp == self.stamp && !BOOT.is_empty() => BlockState::Whole,
            true => BlockState::Unproven(crc),
            false => BlockState::Missing,
        }
    }

    /// Reads a block, compares it with its checksum, and renews its record if they match. False if
    /// they do not, or if the block cannot be read.
    pub(super) fn prove(&self, block: u64, crc: u32, bytes: &mut Vec<u8>) -> io::Result<bool> {
        match self.compare(block, crc, bytes) {
            true => self.record(block, crc, self.stamp).map(|()| true),
            false => Ok(false),
        }
    }

    /// Whether a block can be read and has this checksum.
    pub(super) fn compare(&self, block: u64, crc: u32, bytes: &mut Vec<u8>) -> bool {
        bytes.resize(self.layout.block_len(block) as usize, 0);
        self.data
            .read_exact_at(bytes, block * self.layout.block)
            .is_ok()
            && crc32c::crc32c(bytes) == crc
    }

    /// Makes a block unproven for every process that reads its record from now on. Such a process
    /// compares the block, and downloads it into the same space if it is wrong.
    pub(super) fn refuse(&self, block: u64, crc: u32) -> io::Result<()> {
        if let Some(units) = Units::find(&self.path, self.stamp) {
            units.clear(&units_of(
                block * self.layout.block,
                self.layout.block_len(block),
            ))?;
        }
        self.record(block, crc, REFUSED)
    }

    /// Drops the data's pages from the page cache, so that the next reads come from the disk.
    pub(super) fn drop_pages(&self) {
        let _ = rustix::fs::fadvise(&self.data, 0, None, rustix::fs::Advice::DontNeed);
    }

    /// Writes a block, syncs it, and writes the record.
    pub(super) fn keep(&self, block: u64, bytes: &[u8]) -> io::Result<()> {
        self.data.write_all_at(bytes, block * self.layout.block)?;
        self.data.sync_data()?;
        self.record(block, crc32c::crc32c(bytes), self.stamp)
    }

    /// Writes a piece of whole units. It is valid once it is [marked](Self::mark).
    pub(super) fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.data.write_all_at(bytes, offset)
    }

    /// Syncs the data, and marks pieces by their offsets. If the sync fails, no piece is marked.
    pub(super) fn mark(&self, pieces: &[(u64, Vec<u32>)]) -> io::Result<()> {
        self.data.sync_data()?;
        let units = Units::make(&self.path, self.stamp)?;
        pieces
            .iter()
            .try_for_each(|(offset, marks)| units.mark(*offset, marks))
    }

    /// Number of a block's bytes that were stored as pieces.
    pub(super) fn brought(&self, offset: u64, len: u64) -> u64 {
        Units::find(&self.path, self.stamp).map_or(0, |units| {
            units.count(&units_of(offset, len.min(self.layout.len - offset)))
        }) * UNIT
    }

    /// Whether all of a block was stored as pieces.
    pub(super) fn is_brought(&self, block: u64) -> bool {
        let offset = block * self.layout.block;
        let len = self.layout.block_len(block);
        Units::find(&self.path, self.stamp).is_some_and(|units| units.has(&units_of(offset, len)))
    }

    /// Writes a block's record if all of it was stored as pieces, and its bytes match their marks;
    /// false otherwise.
    pub(super) fn complete(&self, block: u64, bytes: &mut Vec<u8>) -> io::Result<bool> {
        let offset = block * self.layout.block;
        let len = self.layout.block_len(block);
        let range = units_of(offset, len);
        let Some(units) = Units::find(&self.path, self.stamp).filter(|units| units.has(&range))
        else {
            return Ok(false);
        };
        bytes.resize(len as usize, 0);
        let read = self.data.read_exact_at(bytes, offset);
        if read.is_err() || !units.are(&range, bytes) {
            units.clear(&range)?;
            return Ok(false);
        }
        self.record(block, crc32c::crc32c(bytes), self.stamp)
            .map(|()| true)
    }

    fn record(&self, block: u64, crc: u32, stamp: u64) -> io::Result<()> {
        self.map
            .write_all_at(&record_of(&self.layout, block, crc, stamp), place_of(block))
    }

    /// Marks the entry as used now. The least recently used entries are removed first.
    pub(super) fn touch(&self) {
        let _ = self.map.set_modified(std::time::SystemTime::now());
    }
}

/// Whether stamps differ between boots.
pub(super) fn knows_boot() -> bool {
    !BOOT.is_empty()
}

/// The stamp of a data file in this boot.
pub(super) fn stamp_of(inode: u64) -> u64 {
    fnv(format!("{} {inode}", BOOT.trim()).as_bytes())
}

fn crc_in(record: &[u8; RECORD]) -> u32 {
    u32::from_le_bytes([record[20], record[21], record[22], record[23]])
}

fn place_of(block: u64) -> u64 {
    HEADER as u64 + block * RECORD as u64
}

fn record_of(layout: &Layout, block: u64, crc: u32, stamp: u64) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..8].copy_from_slice(&stamp.to_le_bytes());
    record[8..16].copy_from_slice(&layout.hash.to_le_bytes());
    record[16..20].copy_from_slice(&(layout.block_len(block) as u32).to_le_bytes());
    record[20..24].copy_from_slice(&crc.to_le_bytes());
    let sum = crc32c::crc32c(&record[..28]);
    record[28..].copy_from_slice(&sum.to_le_bytes());
    record
}

pub(super) fn link_name(hash: u64) -> String {
    format!("{hash:016x}")
}

/// Whether a data file may have this name: 16 digits, a dot, 8 digits.
pub(super) fn is_data_name(name: &str) -> bool {
    let hex = |text: &str, len: usize| {
        text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    name.split_once('.')
        .is_some_and(|(hash, number)| hex(hash, 16) && hex(number, 8))
}

pub(super) fn map_of(path: &Path) -> PathBuf {
    let mut map = path.as_os_str().to_owned();
    map.push(".map");
    map.into()
}

/// Whether a file is the map of an entry, or was one before a crash of the system.
pub(super) fn is_map(path: &Path) -> bool {
    let mut magic = [0; 8];
    open_file(path, false).is_ok_and(|file| {
        is_blank(&file) || (file.read_exact_at(&mut magic, 0).is_ok() && magic == *MAGIC)
    })
}

/// Whether a map lost its header: the system crashed before the header was on the disk.
fn is_blank(map: &File) -> bool {
    let mut header = [0; HEADER];
    match map.read_exact_at(&mut header, 0) {
        Ok(()) => header.iter().all(|byte| *byte == 0),
        Err(error) => error.kind() == io::ErrorKind::UnexpectedEof,
    }
}
