//! The folder of a cache: which processes read which share of it, and how many bytes it holds.
//!
//! Each loader books room in its own file, which it locks. Bookings of ended processes are released
//! when a loader starts, and at the next count of all files.

use super::config::{Cache, FREE, FREE_BLOCKS};
use super::entry::{is_data_name, is_map, link_name, map_of};
use super::rights::{make_folder, new_file, open_file, open_or_make, rights_below};
use super::units::units_file;
use feedline_base::metadata::fnv;
use feedline_base::sync::Hold;
use feedline_core::storage::publish::Held;
use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;
use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Number of shares that folders are divided into. A process protects the shares that it reads from
/// removal.
const SHARES: usize = 64;

/// Maximum wait for another process's lock.
const LOCK: Duration = Duration::from_secs(1);

/// After a search for files to remove found too few, no process searches again for this many
/// seconds.
const CALM: u64 = 60;

/// Files without a link are removed at this age. Younger ones may be about to get one.
const ORPHAN: Duration = Duration::from_secs(3600);

pub(super) struct CacheDir {
    root: PathBuf,
    capacity: u64,
    /// Maximum bytes of the file system that stay free.
    spare: u64,
    room: Mutex<DiskRoom>,
    /// Shared locks, held for the life of the loader.
    leases: Mutex<Vec<Option<Held>>>,
}

struct DiskRoom {
    used: File,
    /// The file that shows `booked` to other processes, locked for the life of the loader. `None`
    /// for tools, which book nothing.
    booking: Option<Held>,
    /// Bytes of blocks on their way to the disk.
    booked: u64,
}

impl DiskRoom {
    fn book(&mut self, booked: u64) -> io::Result<()> {
        self.booking
            .as_ref()
            .map_or(Ok(()), |booking| write_number(&booking.file, 0, booked))?;
        self.booked = booked;
        Ok(())
    }
}

/// The files of an entry.
pub(super) struct FoundEntry {
    pub(super) used: SystemTime,
    pub(super) data: PathBuf,
    /// The link through which readers find the files; `None` if there is none.
    pub(super) link: Option<PathBuf>,
    /// Bytes on the disk.
    pub(super) bytes: u64,
    pub(super) share: usize,
}

impl FoundEntry {
    /// Whether the entry's map is one that a cache wrote.
    pub(super) fn is_own(&self) -> bool {
        is_map(&map_of(&self.data))
    }

    fn may_go(&self) -> bool {
        self.link.is_some() || self.used.elapsed().is_ok_and(|age| age > ORPHAN)
    }
}

impl CacheDir {
    /// Errors: the system's.
    pub(super) fn open(cache: &Cache) -> io::Result<Self> {
        let root = std::path::absolute(&cache.dir)?.join("v1");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&cache.dir)?;
        make_folder(&root)?;
        // Earlier versions created it open to everyone.
        if root.metadata()?.mode() & 0o077 & !rights_below(&cache.dir)? != 0 {
            std::fs::set_permissions(&root, Permissions::from_mode(rights_below(&cache.dir)?))?;
        }
        for name in ["in-use", "objects", "booked"] {
            make_folder(&root.join(name))?;
        }
        // Backup programs skip folders with this file.
        let tag = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of feedline; it may \
             be deleted.\n";
        if let Ok(file) = new_file(&root.join("CACHEDIR.TAG")) {
            let _ = file.write_all_at(tag.as_bytes(), 0);
        }
        let used = open_or_make(&root.join("used"))?;
        take(&used, FlockOperation::NonBlockingLockExclusive)?;
        let booked = || {
            let (_, dead) = bookings(&root)?;
            if dead > 0 {
                // Part of the bytes that a killed process had booked is on the disk. So the number
                // stays too high until a process that finds no room counts anew. It may then do so
                // at once.
                write_number(&used, SEARCHED, 0)?;
            }
            // Under the lock, no process looks between the creation of the file and its lock.
            new_booking(&root)
        };
        let booking = booked();
        let _ = flock(&used, FlockOperation::Unlock);
        Ok(Self::of(root, cache, used, Some(booking?)))
    }

    fn of(root: PathBuf, cache: &Cache, used: File, booking: Option<Held>) -> Self {
        let room = Mutex::new(DiskRoom {
            used,
            booking,
            booked: 0,
        });
        let leases = Mutex::new((0..SHARES).map(|_| None).collect());
        Self {
            root,
            capacity: cache.capacity,
            spare: FREE_BLOCKS * cache.block,
            room,
            leases,
        }
    }

    /// The folder for a tool, which stores nothing. Errors: the system's; `NotFound` for a folder
    /// that is no cache.
    pub(super) fn existing(cache: &Cache, write: bool) -> io::Result<Self> {
        let root = std::path::absolute(&cache.dir)?.join("v1");
        let used = open_file(&root.join("used"), write)?;
        std::fs::read_dir(root.join("objects"))?;
        Ok(Self::of(root, cache, used, None))
    }

    /// The cache's folder for the objects of one folder of a store. From now on, it is protected
    /// from removal.
    pub(super) fn folder(&self, url: &Path) -> io::Result<PathBuf> {
        let share =
            fnv(url.parent().unwrap_or(url).as_os_str().as_encoded_bytes()) as usize % SHARES;
        let mut leases = self.leases.hold();
        if leases[share].is_none() {
            leases[share] = Some(self.protect(share)?);
        }
        Ok(self.share(share))
    }

    fn lease(&self, share: usize) -> PathBuf {
        self.root.join("in-use").join(format!("{share:02x}"))
    }

    fn share(&self, share: usize) -> PathBuf {
        self.root.join("objects").join(format!("{share:02x}"))
    }

    /// Books `bytes` more. If there is no room, removes entries that no process reads; returns
    /// their number.
    ///
    /// Errors: the system's; `StorageFull`.
    pub(super) fn reserve(&self, bytes: u64) -> io::Result<u64> {
        self.locked(|room| self.reserve_locked(room, bytes))
    }

    /// Calls `work` while no other process holds the lock. Errors: the system's; `WouldBlock`.
    fn locked<T>(&self, work: impl FnOnce(&mut DiskRoom) -> io::Result<T>) -> io::Result<T> {
        let mut room = self.room.hold();
        take(&room.used, FlockOperation::NonBlockingLockExclusive)?;
        let done = work(&mut room);
        let _ = flock(&room.used, FlockOperation::Unlock);
        done
    }

    /// Records that bytes booked by [`reserve`](Self::reserve) are on the disk.
    pub(super) fn written(&self, bytes: u64) {
        let mut room = self.room.hold();
        let left = room.booked - bytes;
        let _ = room.book(left);
    }

    /// Releases bytes that [`reserve`](Self::reserve) booked.
    pub(super) fn release(&self, bytes: u64) {
        self.written(bytes);
        let _ = self.locked(|room| {
            let used = read_number(&room.used, USED)?;
            write_number(&room.used, USED, used.saturating_sub(bytes))
        });
    }

    fn reserve_locked(&self, room: &mut DiskRoom, bytes: u64) -> io::Result<u64> {
        if std::fs::metadata(self.root.join("used"))?.ino() != room.used.metadata()?.ino() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the folder was replaced",
            ));
        }
        let used = read_number(&room.used, USED)?;
        if self.fits(used, bytes, 0)? {
            room.book(room.booked + bytes)?;
            write_number(&room.used, USED, used.saturating_add(bytes))?;
            return Ok(0);
        }
        let now = std::time::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_secs());
        if now.abs_diff(read_number(&room.used, SEARCHED)?) < CALM {
            return Err(self.full(used, bytes));
        }
        // Killed processes leave the number too high. Running processes have booked bytes that no
        // file contains yet.
        let (found, total) = self.all()?;
        let (living, _) = bookings(&self.root)?;
        let mut used = total + living;
        let (removed, freed) = self.make_room(used, bytes, found)?;
        used = used.saturating_sub(freed);
        let fits = self.fits(used, bytes, freed)?;
        write_number(
            &room.used,
            USED,
            if fits {
                used.saturating_add(bytes)
            } else {
                used
            },
        )?;
        if !fits {
            write_number(&room.used, SEARCHED, now)?;
            return Err(self.full(used, bytes));
        }
        room.book(room.booked + bytes)?;
        Ok(removed)
    }

    /// Whether `bytes` more fit. `freed`: bytes that were just removed. Some file systems free them
    /// later.
    fn fits(&self, used: u64, bytes: u64, freed: u64) -> io::Result<bool> {
        let disk = statvfs(&self.root)?;
        let free = disk.f_bavail * disk.f_frsize;
        let all = disk.f_blocks * disk.f_frsize;
        let free = free.saturating_add(freed).min(all);
        let spare = self.spare.min(all / FREE);
        Ok(used.saturating_add(bytes) <= self.capacity && free.saturating_sub(bytes) >= spare)
    }

    /// Why `bytes` more do not fit.
    fn full(&self, used: u64, bytes: u64) -> io::Error {
        let why = match used.saturating_add(bytes) <= self.capacity {
            true => "its disk has no room: the cache leaves 5 % of it free, at most 8 GiB",
            false => "the cache is full",
        };
        io::Error::new(io::ErrorKind::StorageFull, why)
    }

    /// Removes entries that no process reads until `bytes` fit, the least recently used first.
    /// Returns their number and bytes.
    fn make_room(
        &self,
        used: u64,
        bytes: u64,
        mut found: Vec<FoundEntry>,
    ) -> io::Result<(u64, u64)> {
        found.retain(FoundEntry::may_go);
        let all = found.iter().map(|old| old.bytes).sum();
        if !self.fits(used.saturating_sub(all), bytes, all)? {
            return Ok((0, 0));
        }
        found.sort_unstable_by_key(|old| old.used);
        let mut removed = 0;
        let mut freed = 0;
        let mut held = Vec::new();
        held.resize_with(SHARES, || None);
        for old in found {
            if self.fits(used.saturating_sub(freed), bytes, freed)? {
                break;
            }
            let idle = held[old.share].get_or_insert_with(|| self.idle(old.share).ok());
            if idle.is_some() && remove(&old) {
                freed += old.bytes;
                removed += 1;
            }
        }
        Ok((removed, freed))
    }

    /// Locks a share that no process reads, which keeps other processes from reading it. Errors:
    /// the system's; `WouldBlock`.
    fn idle(&self, share: usize) -> io::Result<Held> {
        let file = open_or_make(&self.lease(share))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Held::new(file))
    }

    /// Keeps others from removing the entries of a share, as long as the file is open.
    pub(super) fn protect(&self, share: usize) -> io::Result<Held> {
        let file = open_or_make(&self.lease(share))?;
        take(&file, FlockOperation::NonBlockingLockShared)?;
        Ok(Held::new(file))
    }

    /// Whether a process reads a share.
    pub(super) fn is_read(&self, share: usize) -> bool {
        let room = self.room.hold();
        // Locked, so that no process that makes room runs into the lock below.
        let _ = take(&room.used, FlockOperation::NonBlockingLockExclusive);
        // Readers create the file, and lock it as long as they run.
        let read = open_file(&self.lease(share), false)
            .map(Held::new)
            .is_ok_and(|held| {
                flock(&held.file, FlockOperation::NonBlockingLockExclusive)
                    == Err(Errno::WOULDBLOCK)
            });
        let _ = flock(&room.used, FlockOperation::Unlock);
        read
    }

    /// Removes an entry if no process reads its share. Returns the freed bytes.
    /// [`recount`](Self::recount) must follow.
    pub(super) fn discard(&self, old: &FoundEntry) -> io::Result<u64> {
        self.locked(|_| match self.idle(old.share) {
            Ok(_idle) if old.may_go() && remove(old) => Ok(old.bytes),
            _ => Ok(0),
        })
    }

    /// Counts the bytes of all files anew: incomplete blocks of killed processes are on the disk,
    /// but not booked.
    pub(super) fn recount(&self) -> io::Result<()> {
        self.locked(|room| {
            let (_, total) = self.all()?;
            let (living, _) = bookings(&self.root)?;
            write_number(&room.used, USED, total + living)
        })
    }

    /// All entries, and their total bytes.
    pub(super) fn all(&self) -> io::Result<(Vec<FoundEntry>, u64)> {
        let mut found = Vec::new();
        let total = (0..SHARES).try_fold(0, |total, share| {
            Ok::<_, io::Error>(total + self.look(share, &mut found)?)
        })?;
        Ok((found, total))
    }

    /// Lists the entries of a share; returns their bytes.
    fn look(&self, share: usize, found: &mut Vec<FoundEntry>) -> io::Result<u64> {
        let folder = self.share(share);
        let names = match std::fs::read_dir(&folder) {
            Ok(names) => names,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(error),
        };
        let mut total = 0;
        for name in names.flatten() {
            let name = name.file_name();
            let Some(name) = name.to_str().filter(|name| is_data_name(name)) else {
                continue;
            };
            let data = folder.join(name);
            let (Ok(meta), Ok(map)) = (data.symlink_metadata(), map_of(&data).symlink_metadata())
            else {
                continue;
            };
            let units = units_file(&data)
                .symlink_metadata()
                .map_or(0, |units| units.blocks());
            let bytes = (meta.blocks() + map.blocks() + units) * 512;
            total += bytes;
            let link = folder.join(&name[..link_name(0).len()]);
            let link = Some(link).filter(|link| leads_to(link, &data));
            found.push(FoundEntry {
                used: map.modified()?,
                data,
                link,
                bytes,
                share,
            });
        }
        Ok(total)
    }
}

/// Removes the files of an entry of an idle share; false if they are not the cache's, or are gone.
fn remove(old: &FoundEntry) -> bool {
    if !old.is_own() {
        return false;
    }
    // The link goes first: without it, no process finds the rest. By now it may lead to a newer
    // entry.
    if let Some(link) = old.link.as_ref().filter(|link| leads_to(link, &old.data)) {
        let _ = std::fs::remove_file(link);
    }
    let gone = std::fs::remove_file(&old.data).is_ok();
    let _ = std::fs::remove_file(map_of(&old.data));
    let _ = std::fs::remove_file(units_file(&old.data));
    gone
}

fn leads_to(link: &Path, data: &Path) -> bool {
    std::fs::read_link(link).is_ok_and(|to| data.file_name() == Some(to.as_os_str()))
}

/// Bytes booked by running loaders, and by ended ones. Removes the files of the ended ones.
fn bookings(root: &Path) -> io::Result<(u64, u64)> {
    let mut living = 0;
    let mut dead = 0;
    for entry in std::fs::read_dir(root.join("booked"))?.flatten() {
        let Ok(file) = open_file(&entry.path(), true) else {
            continue;
        };
        let bytes = read_number(&file, 0).unwrap_or_default();
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                std::fs::remove_file(entry.path())?;
                dead += bytes;
            }
            Err(_) => living += bytes,
        }
    }
    Ok((living, dead))
}

/// Creates and locks a new file for this loader's bookings.
fn new_booking(root: &Path) -> io::Result<Held> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = std::time::UNIX_EPOCH
        .elapsed()
        .unwrap_or_default()
        .as_nanos();
    let name = format!(
        "{}.{now}.{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let file = new_file(&root.join("booked").join(name))?;
    take(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(Held::new(file))
}

/// Waits for a lock, at most [`LOCK`].
fn take(file: &File, operation: FlockOperation) -> io::Result<()> {
    let deadline = Instant::now() + LOCK;
    loop {
        match flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Offsets of numbers in the file `used`: bytes of all files; time of the last search that found
/// too few, in seconds.
const USED: u64 = 0;
const SEARCHED: u64 = 8;

fn read_number(file: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    match file.read_exact_at(&mut bytes, at) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        read => read.map(|()| u64::from_le_bytes(bytes)),
    }
}

fn write_number(file: &File, at: u64, number: u64) -> io::Result<()> {
    file.write_all_at(&number.to_le_bytes(), at)
}
