//! Files that appear whole or not at all: written under a hidden name, synced on request, then
//! renamed.

use feedline_base::process::Process;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::io::{BufWriter, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SUFFIX: &str = ".tmp";
const BUFFER: usize = 1 << 20;
/// Interval between two looks at the lock of another process.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum bytes of the target's name in the hidden name. File systems limit names to 255 bytes.
const NAME_MAX: usize = 200;

/// A file being written. If it is dropped before [`commit`](Self::commit), nothing is left of it.
pub struct Pending {
    file: Option<BufWriter<File>>,
    /// The file's current path, and its final one.
    pub hidden: PathBuf,
    pub target: PathBuf,
}

impl Pending {
    /// Gives the bytes written so far to `each`, and removes the file: for bytes that become a part
    /// of another file.
    pub fn read_back(mut self, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        self.flush()?;
        let mut file = File::open(&self.hidden)?;
        let mut buffer = vec![0; BUFFER];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(()),
                len => each(&buffer[..len])?,
            }
        }
    }

    /// Begins `target` under the hidden name `.NAME.PID.N.tmp`.
    pub fn create(target: impl Into<PathBuf>) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let target = target.into();
        let name = target
            .file_name()
            .ok_or(io::ErrorKind::InvalidInput)?
            .as_bytes();
        let name = &name[..name.len().min(NAME_MAX)];
        loop {
            let end = format!(
                ".{}.{}{SUFFIX}",
                std::process::id(),
                NEXT.fetch_add(1, Ordering::Relaxed)
            );
            let hidden =
                target.with_file_name(OsString::from_vec([b".", name, end.as_bytes()].concat()));
            // A container on another machine may have the same process id. Then take the next
            // number.
            match File::options().write(true).create_new(true).open(&hidden) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                file => return Ok(Self::of(file?, hidden, target)),
            }
        }
    }

    fn of(file: File, hidden: PathBuf, target: PathBuf) -> Self {
        Self {
            file: Some(BufWriter::with_capacity(BUFFER, file)),
            hidden,
            target,
        }
    }

    /// Gives the file its final name; with `sync`, after its bytes are on the device.
    pub fn commit(mut self, sync: bool) -> io::Result<()> {
        self.close(sync)?;
        std::fs::rename(&self.hidden, &self.target)
    }

    /// Gives the file its final name; with `sync`, after its bytes are on the device. An existing
    /// file of that name is replaced, unless `stays` returns true.
    pub(crate) fn commit_unless(
        mut self,
        sync: bool,
        stays: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        self.close(sync)?;
        match std::fs::hard_link(&self.hidden, &self.target) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && stays() => Ok(()),
            // Replaces an existing file. Also used on a file system without links.
            Err(_) => std::fs::rename(&self.hidden, &self.target),
        }
    }

    /// Gives the file its final name, after its bytes are on the device, unless the name is taken;
    /// an equal file is then left in place. Errors: [`io::ErrorKind::AlreadyExists`] for a file of
    /// other bytes.
    pub fn commit_new(mut self) -> io::Result<()> {
        self.close(true)?;
        match std::fs::hard_link(&self.hidden, &self.target) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                match equal(&self.hidden, &self.target) {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(error),
                    // The target is a link without a target.
                    Err(other) if other.kind() == io::ErrorKind::NotFound => Err(error),
                    Err(other) => Err(other),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(error),
            // A file system without links: the name is looked up first.
            Err(_) if self.target.symlink_metadata().is_err() => {
                std::fs::rename(&self.hidden, &self.target)
            }
            linked => linked,
        }
    }

    /// Gives the file its final name, after its bytes are on the device, unless the name is taken:
    /// the first of several writers wins, and a reader of its file is not disturbed.
    pub(crate) fn commit_first(mut self) -> io::Result<()> {
        self.close(true)?;
        match std::fs::hard_link(&self.hidden, &self.target) {
            // An existing file stays, also on a file system without links.
            Err(_) if self.target.symlink_metadata().is_ok() => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(error),
            Err(_) => std::fs::rename(&self.hidden, &self.target),
            linked => linked,
        }
    }

    fn close(&mut self, sync: bool) -> io::Result<()> {
        let Some(file) = self.file.take() else {
            return Ok(());
        };
        let file = file.into_inner().map_err(|error| error.into_error())?;
        if sync { file.sync_all() } else { Ok(()) }
    }
}

impl Write for Pending {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.file {
            Some(file) => file.write(bytes),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // The buffered bytes are no longer needed.
            drop(file.into_parts());
        }
        // After the rename the hidden file does not exist, and this error is expected.
        let _ = std::fs::remove_file(&self.hidden);
    }
}

/// Whether two files have the same bytes.
fn equal(one: &Path, other: &Path) -> io::Result<bool> {
    let mut one = File::open(one)?;
    let mut other = File::open(other)?;
    if one.metadata()?.len() != other.metadata()?.len() {
        return Ok(false);
    }
    let mut here = vec![0; BUFFER];
    let mut there = vec![0; BUFFER];
    loop {
        let read = one.read(&mut here)?;
        if read == 0 {
            return Ok(true);
        }
        match other.read_exact(&mut there[..read]) {
            // The other file became shorter meanwhile.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            done => done?,
        }
        if here[..read] != there[..read] {
            return Ok(false);
        }
    }
}

/// The target's name, from the name of a hidden file of [`Pending::create`]. A long name is
/// truncated.
pub fn target_of(name: &str) -> Option<&str> {
    let (name, number) = name
        .strip_prefix('.')?
        .strip_suffix(SUFFIX)?
        .rsplit_once('.')?;
    let (target, process) = name.rsplit_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(process)).then_some(target)
}

/// An open file. Its lock ends when this value is dropped, but only in the process that made it.
///
/// A child shares the lock of a file that was open at the fork, until it closes the file. So
/// closing the file here would not end the lock.
pub struct Held {
    pub file: File,
    process: Process,
}

impl Held {
    pub fn new(file: File) -> Self {
        Self {
            file,
            process: Process::current(),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.process.is_forked() {
            let _ = self.file.unlock();
        }
    }
}

/// A lock on a file, held by this process until it is dropped. On a file system without locks, it
/// locks nothing.
pub struct Lock(
    #[cfg_attr(not(test), expect(dead_code, reason = "it holds the lock"))] Option<Held>,
);

impl Lock {
    /// Locks the file. `None`: another process holds the lock.
    pub fn try_of(path: &Path) -> io::Result<Option<Self>> {
        // An exclusive lock on a network file system needs a file that is open for writing.
        let file = File::options()
            .read(true)
            .write(true)
            .open(path)
            .or_else(|_| File::open(path))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(Some(Held::new(file))))),
            Err(std::fs::TryLockError::WouldBlock) => Ok(None),
            Err(std::fs::TryLockError::Error(_)) => Ok(Some(Self(None))),
        }
    }
}

/// The right to make a file that other processes would make as well.
pub struct Turn {
    lock: Option<Lock>,
    path: PathBuf,
}

impl Turn {
    /// Waits until no other process makes `target`, which may exist then. Without a lock if the
    /// folder cannot be written.
    pub fn wait(target: &Path) -> Self {
        let path = target.with_extension("lock");
        let _ = target.parent().map(make_folder);
        let _ = File::options().create(true).append(true).open(&path);
        loop {
            match Lock::try_of(&path) {
                Ok(None) => std::thread::sleep(LOOK),
                Ok(lock) => return Self { lock, path },
                Err(_) => return Self { lock: None, path },
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Those who wait for it find the target.
        if self.lock.is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Writes a file that appears whole or not at all, and creates its folder if it is missing. With
/// `sync` its bytes are on the device before it has its name. Of several writers the last wins.
/// Errors: the system's.
pub fn publish(target: &Path, bytes: &[u8], sync: bool) -> io::Result<()> {
    if let Some(dir) = target.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        make_folder(dir)?;
    }
    let mut pending = Pending::create(target)?;
    pending.write_all(bytes)?;
    pending.commit(sync)
}

/// Creates a folder and its parents.
pub fn make_folder(dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)
}

/// Removes a folder if it is empty.
pub fn remove_folder(dir: &Path) {
    // A folder with files is also used by others, and stays.
    let _ = std::fs::remove_dir(dir);
}

/// Removes a file that an earlier run published.
pub fn remove(path: &Path) -> io::Result<()> {
    std::fs::remove_file(path)
}

/// An open folder, for syncing the names of files published in it.
pub struct Folder(File);

impl Folder {
    /// Opens the folder of `target`.
    pub fn of(target: &Path) -> io::Result<Self> {
        let dir = target.parent().filter(|dir| !dir.as_os_str().is_empty());
        Ok(Self(File::open(dir.unwrap_or(Path::new(".")))?))
    }

    /// Syncs its names to the device.
    pub fn sync(&self) -> io::Result<()> {
        match self.0.sync_all() {
            // Some network file systems cannot sync folders, and have nothing to sync.
            Err(source)
                if matches!(
                    source.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                ) =>
            {
                Ok(())
            }
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_published_file_is_whole_and_a_dropped_one_leaves_nothing() {
        let dir = std::env::temp_dir().join(format!("feedline-publish-{}", std::process::id()));
        let target = dir.join(format!("deep/er/{}", "y".repeat(240)));
        for bytes in [&b"first"[..], b"second"] {
            publish(&target, bytes, true).unwrap();
            assert_eq!(std::fs::read(&target).unwrap(), bytes);
        }
        let mut dropped = Pending::create(&target).unwrap();
        dropped.write_all(b"third").unwrap();
        let names = || -> Vec<_> {
            std::fs::read_dir(target.parent().unwrap())
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect()
        };
        assert!(
            names()
                .iter()
                .any(|name| name.to_string_lossy().ends_with(".tmp")),
            "{:?}",
            names()
        );
        drop(dropped);
        assert_eq!(
            (names().len(), std::fs::read(&target).unwrap()),
            (1, b"second".to_vec())
        );
        Folder::of(&target).unwrap().sync().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_first_of_several_writers_keeps_its_file() {
        use std::os::unix::fs::MetadataExt;
        let target = std::env::temp_dir().join(format!("feedline-first-{}", std::process::id()));
        let begin = |bytes: &[u8]| {
            let mut pending = Pending::create(&target).unwrap();
            pending.write_all(bytes).unwrap();
            pending
        };
        let first = begin(b"first");
        let second = begin(b"second");
        first.commit_first().unwrap();
        let inode = std::fs::metadata(&target).unwrap().ino();
        second.commit_first().unwrap();
        assert_eq!(
            (
                std::fs::read(&target).unwrap(),
                std::fs::metadata(&target).unwrap().ino()
            ),
            (b"first".into(), inode)
        );
        std::fs::remove_file(&target).unwrap();
    }

    #[test]
    fn a_lock_ends_while_a_child_has_its_file() {
        let path = std::env::temp_dir().join(format!("feedline-lock-{}", std::process::id()));
        std::fs::write(&path, b"").unwrap();
        let lock = Lock::try_of(&path).unwrap().unwrap();
        assert!(Lock::try_of(&path).unwrap().is_none());
        // A copy of the descriptor, as a child would have it.
        let child = lock.0.as_ref().unwrap().file.try_clone().unwrap();
        drop(lock);
        assert!(Lock::try_of(&path).unwrap().is_some());
        drop(child);
        std::fs::remove_file(&path).unwrap();
    }
}
