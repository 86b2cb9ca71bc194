//! Read-only memory that the ranks of a machine share: the bytes of a dataset in memory, once.
//!
//! ```text
//! first rank:  note "fill pid start" ─► memfd ─► fill ─► seal ─► note "hold pid fd" ─┐      notes: one small file per key in the
//! others:      wait while the filler lives ──────► read the note ◄───────────────────┘      temporary folder, locked for each look
//!                                                  └─► open /proc/pid/fd/fd ─► check name, seals, length ─► map, note "hold …"
//! ```
//!
//! *Why a memfd.* The kernel frees it with the last process that has it, so nothing is left after a
//! SIGKILL but the note of some 30 bytes. A file in `/dev/shm` would stay, and is bounded by that
//! mount's size. *Why `/proc`.* The holder needs no thread or socket to pass the descriptor, and any
//! holder will do: the first rank may end before the last one begins.
//!
//! *Who shares.* Processes with the same key: the same user, pid namespace, launcher's job (see
//! [`job`]), and hash of the data, which includes the version of each file. Sealed memory cannot be
//! written or resized, by any process.
//!
//! *Faults.* A filler that dies or fails is replaced by the next rank; it is recognised by its pid
//! and start time. Ranks in other containers have another pid namespace or temporary folder, and do
//! not find each other. What the system refuses is [`Found::Refused`]; the rank then reads a copy of
//! its own. A forked child uses its parent's memory, and leaves the notes alone.
//!
//! Limits: pages of the usual size, on the NUMA nodes of the filler. The kernel charges the pages to
//! the control group of the filler.

use super::region::{Bytes, Region, Sealed};
use crate::order::job;
use feedline_base::error::Result;
use feedline_base::metadata::fnv;
use feedline_base::process::Process;
use rustix::fs::{
    FlockOperation, MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, flock,
    memfd_create,
};
use std::fs::{self, File};
use std::io::{self, ErrorKind as Io, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time between two looks at the notes while another rank reads the data.
const LOOK: Duration = Duration::from_millis(20);
/// What nobody can do any more with memory that is shared.
const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// What [`find`] found.
pub enum Found {
    /// The bytes are in memory.
    Held(Held),
    /// No rank has them: this one reads them, while others wait.
    Turn(Turn),
    /// They cannot be shared here, for this reason.
    Refused(String),
}

/// The right of this process to read the bytes. Dropping it passes the right on.
pub struct Turn {
    notes: Notes,
    memory: File,
    len: usize,
}

/// Bytes that ranks share, mapped read-only.
pub struct Held {
    map: Sealed,
    len: usize,
    notes: Notes,
    /// Other ranks open it, so it stays open.
    memory: File,
    process: Process,
}

/// Finds the `len` bytes that `data` identifies, or becomes the one to read them. Waits while
/// another rank reads them, as long as `goes_on` allows it.
///
/// Errors: those of `goes_on`.
pub fn find(data: u64, len: usize, goes_on: impl Fn() -> Result<()>) -> Result<Found> {
    find_in(&std::env::temp_dir(), data, len, goes_on)
}

fn find_in(
    folder: &Path,
    data: u64,
    len: usize,
    goes_on: impl Fn() -> Result<()>,
) -> Result<Found> {
    let begun = Notes::of(folder, data).and_then(|notes| Ok((notes.memory()?, notes)));
    let (memory, notes) = match begun {
        Ok(both) => both,
        Err(error) => return Ok(Found::Refused(error.to_string())),
    };
    loop {
        let seen = notes.edit(|all| notes.look(all, len));
        match seen.and_then(|seen| seen) {
            Ok(Seen::Held(memory)) => {
                return Ok(Held::new(notes, memory, len)
                    .map_or_else(|error| Found::Refused(error.to_string()), Found::Held));
            }
            Ok(Seen::Nobody) => return Ok(Found::Turn(Turn { notes, memory, len })),
            Ok(Seen::Filled) => {}
            Err(error) => return Ok(Found::Refused(error.to_string())),
        }
        goes_on()?;
        std::thread::sleep(LOOK);
    }
}

impl Turn {
    /// The memory to fill. A concurrent fork does not pass it on.
    ///
    /// Errors: [`ErrorKind::Budget`](crate::ErrorKind::Budget), as of [`Region::new`].
    pub fn room(&self, what: &str) -> Result<Bytes> {
        Bytes::of_file(&self.memory, self.len, what)
    }

    /// Seals the filled memory, so that no process can change it, and passes it to the other ranks.
    ///
    /// Errors: those of the system; the bytes are lost then.
    pub fn publish(self, room: Bytes) -> io::Result<Held> {
        // A writable mapping prevents the seal.
        drop(room);
        fcntl_add_seals(&self.memory, SEALS)?;
        let memory = File::open(format!("/proc/self/fd/{}", self.memory.as_raw_fd()))?;
        Held::new(self.notes.clone(), memory, self.len)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let own = self.notes.pid;
        // Without the note's removal, others wait until this process has ended.
        let _ = self.notes.edit(|all| {
            all.retain(|note| !matches!(note, Note::Fills { pid, .. } if *pid == own));
        });
    }
}

impl Held {
    fn new(notes: Notes, memory: File, len: usize) -> io::Result<Self> {
        let map = Sealed::of_file(&memory, Region::size_for(len))?;
        let fd = memory.as_raw_fd();
        let pid = notes.pid;
        notes.edit(|all| all.push(Note::Holds { pid, fd }))?;
        Ok(Self {
            map,
            len,
            notes,
            memory,
            process: Process::current(),
        })
    }

    /// Number of processes that have the bytes now.
    pub fn holders(&self) -> usize {
        let all = self.notes.edit(|all| all.clone()).unwrap_or_default();
        let mut pids: Vec<u32> = all
            .into_iter()
            .filter_map(|note| match note {
                Note::Holds { pid, fd } if self.notes.is_memory(pid, fd).ok()? => Some(pid),
                _ => None,
            })
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids.len()
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.map.as_slice()[..self.len]
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return;
        }
        let own = Note::Holds {
            pid: self.notes.pid,
            fd: self.memory.as_raw_fd(),
        };
        // A note that stays is ignored once the descriptor is closed.
        let _ = self.notes.edit(|all| all.retain(|note| *note != own));
    }
}

/// The file with the notes of the processes that have, or read, the bytes of one key.
#[derive(Clone)]
struct Notes {
    path: PathBuf,
    /// Name of the memory: the key.
    name: String,
    pid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Note {
    /// The process reads the data. With its start time, because pids are used again.
    Fills { pid: u32, start: u64 },
    /// The process has the bytes in this descriptor.
    Holds { pid: u32, fd: i32 },
}

/// What the notes say.
enum Seen {
    Held(File),
    /// A process that lives reads the data.
    Filled,
    /// Nobody did, so this process is noted.
    Nobody,
}

impl Notes {
    fn of(folder: &Path, data: u64) -> io::Result<Self> {
        let pid = std::process::id();
        let own = fs::read_link("/proc/self")?;
        if own != Path::new(&pid.to_string()) {
            return Err(io::Error::other("/proc is that of another pid namespace"));
        }
        let namespace = fs::read_link("/proc/self/ns/pid")?;
        let place = fnv(format!("{} {}", namespace.display(), job()).as_bytes());
        let user = rustix::process::geteuid().as_raw();
        let name = format!("feedline-{user}-{data:016x}{place:016x}");
        Ok(Self {
            path: folder.join(&name),
            name,
            pid,
        })
    }

    /// New memory of no bytes.
    fn memory(&self) -> io::Result<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems demand the flag, and kernels before 6.3 do not know it.
        let memory = memfd_create(&self.name, flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| memfd_create(&self.name, flags))?;
        Ok(memory.into())
    }

    /// Takes the bytes of a holder, or this process's turn. Notes of processes that have ended go.
    fn look(&self, all: &mut Vec<Note>, len: usize) -> io::Result<Seen> {
        let mut left = Vec::new();
        let mut held = None;
        let mut is_filled = false;
        for note in all.drain(..) {
            let stays = match note {
                Note::Fills { pid, start } => {
                    let lives = started(pid) == Some(start);
                    is_filled |= lives;
                    lives
                }
                Note::Holds { pid, fd } => {
                    let memory = self.adopt(pid, fd, len)?;
                    let lives = memory.is_some();
                    held = held.or(memory);
                    lives
                }
            };
            left.extend(stays.then_some(note));
        }
        *all = left;
        if let Some(memory) = held {
            return Ok(Seen::Held(memory));
        }
        if is_filled {
            return Ok(Seen::Filled);
        }
        let start = started(self.pid)
            .ok_or_else(|| io::Error::other("/proc does not tell when this process started"))?;
        all.push(Note::Fills {
            pid: self.pid,
            start,
        });
        Ok(Seen::Nobody)
    }

    /// Whether the descriptor of a process is this memory.
    fn is_memory(&self, pid: u32, fd: i32) -> io::Result<bool> {
        match fs::read_link(format!("/proc/{pid}/fd/{fd}")) {
            Ok(target) => Ok(target
                .to_str()
                .and_then(|target| target.strip_prefix("/memfd:"))
                .and_then(|target| target.strip_prefix(&self.name))
                .is_some()),
            Err(error) if error.kind() == Io::PermissionDenied => Err(io::Error::other(format!(
                "this process may not open the memory of process {pid}"
            ))),
            Err(_) => Ok(false),
        }
    }

    /// Opens the memory in the descriptor of a process; `None` if it is not this memory, sealed.
    fn adopt(&self, pid: u32, fd: i32, len: usize) -> io::Result<Option<File>> {
        if !self.is_memory(pid, fd)? {
            return Ok(None);
        }
        let memory = File::open(format!("/proc/{pid}/fd/{fd}"))?;
        let is_sealed = fcntl_get_seals(&memory).is_ok_and(|seals| seals.contains(SEALS));
        let fits = memory.metadata()?.len() == Region::size_for(len) as u64;
        Ok((is_sealed && fits).then_some(memory))
    }

    /// Changes the notes under their lock, which no process holds for longer than this.
    fn edit<T>(&self, step: impl FnOnce(&mut Vec<Note>) -> T) -> io::Result<T> {
        let mut file = self.lock()?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let before: Vec<Note> = text.lines().filter_map(Note::parse).collect();
        let mut notes = before.clone();
        let out = step(&mut notes);
        if notes.is_empty() {
            fs::remove_file(&self.path)?;
        } else if notes != before {
            let text: String = notes.iter().map(Note::line).collect();
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(text.as_bytes())?;
        }
        // A forked child may have the file open, which would prolong the lock.
        flock(&file, FlockOperation::Unlock)?;
        Ok(out)
    }

    fn lock(&self) -> io::Result<File> {
        loop {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(OFlags::NOFOLLOW.bits() as i32)
                .open(&self.path)
                .map_err(|error| {
                    io::Error::new(error.kind(), format!("{}: {error}", self.path.display()))
                })?;
            if file.metadata()?.uid() != rustix::process::geteuid().as_raw() {
                let message = format!("{} belongs to another user", self.path.display());
                return Err(io::Error::other(message));
            }
            flock(&file, FlockOperation::LockExclusive)?;
            // The last holder may have removed the file meanwhile.
            let inode = file.metadata()?.ino();
            if fs::metadata(&self.path).is_ok_and(|now| now.ino() == inode) {
                return Ok(file);
            }
        }
    }
}

impl Note {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let kind = words.next()?;
        let pid = words.next()?.parse().ok()?;
        let number = words.next()?;
        match kind {
            "fill" => Some(Self::Fills {
                pid,
                start: number.parse().ok()?,
            }),
            "hold" => Some(Self::Holds {
                pid,
                fd: number.parse().ok()?,
            }),
            _ => None,
        }
    }

    fn line(&self) -> String {
        match self {
            Self::Fills { pid, start } => format!("fill {pid} {start}\n"),
            Self::Holds { pid, fd } => format!("hold {pid} {fd}\n"),
        }
    }
}

/// Start time of a process in the kernel's ticks; `None` if it has ended.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let mut words = stat.rsplit_once(") ")?.1.split(' ');
    let state = words.next()?;
    // A zombie has no memory any more.
    (!matches!(state, "Z" | "X"))
        .then(|| words.nth(18)?.parse().ok())
        .flatten()
}

#[cfg(not(miri))]
#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("feedline-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn find(&self, data: u64, len: usize) -> Found {
            find_in(&self.0, data, len, || Ok(())).unwrap()
        }

        fn files(&self) -> Vec<PathBuf> {
            let entries = fs::read_dir(&self.0).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn fill(found: Found, byte: u8) -> Held {
        let Found::Turn(turn) = found else {
            panic!("the bytes are there already");
        };
        let mut room = turn.room("a test").unwrap();
        room.as_mut_slice().fill(byte);
        turn.publish(room).unwrap()
    }

    fn held(found: Found) -> Held {
        match found {
            Found::Held(held) => held,
            Found::Turn(_) => panic!("nobody holds them"),
            Found::Refused(why) => panic!("{why}"),
        }
    }

    #[test]
    fn bytes_are_filled_once_and_vanish_with_the_last_holder() {
        let folder = Folder::new("shared-once");
        let first = fill(folder.find(1, 5000), 7);
        let second = held(folder.find(1, 5000));
        let inode = |held: &Held| held.memory.metadata().unwrap().ino();
        assert_eq!(
            (inode(&first), second.as_ref()),
            (inode(&second), &[7; 5000][..])
        );
        // Both are in this process.
        assert_eq!(first.holders(), 1);
        drop(first);
        drop(fill(folder.find(2, 5000), 8));
        assert_eq!((folder.files().len(), second.as_ref()[4999]), (1, 7));
        drop(held(folder.find(1, 5000)));
        drop(second);
        assert!(folder.files().is_empty() && matches!(folder.find(1, 5000), Found::Turn(_)));
    }

    #[test]
    fn nobody_can_write_or_resize_shared_bytes() {
        let folder = Folder::new("shared-sealed");
        let held = fill(folder.find(1, 100), 7);
        let path = format!("/proc/self/fd/{}", held.memory.as_raw_fd());
        let file = File::options().write(true).open(path).unwrap();
        let code = |result: io::Result<()>| result.unwrap_err().raw_os_error();
        let denied = Some(rustix::io::Errno::PERM.raw_os_error());
        assert_eq!(code((&file).write_all(b"x")), denied);
        assert_eq!([0, 1 << 20].map(|len| code(file.set_len(len))), [denied; 2]);
    }

    #[test]
    fn a_filler_that_fails_or_dies_is_replaced() {
        let folder = Folder::new("shared-died");
        drop(folder.find(1, 100));
        let turn = folder.find(1, 100);
        let path = folder.files().remove(0);
        // Another process with this number, one that has ended, and a line of a later version.
        for note in [
            format!("fill {} 1\n", std::process::id()),
            "fill 4194305 1\n".into(),
            "x\n".into(),
        ] {
            fs::write(&path, note).unwrap();
            assert!(matches!(folder.find(1, 100), Found::Turn(_)));
        }
        drop(turn);
        // This process lives, and is asked once.
        let turn = folder.find(1, 100);
        let stopped = find_in(&folder.0, 1, 100, || {
            Err(crate::Error::new(
                crate::ErrorKind::Cancelled,
                crate::Stage::Index,
                "stopped",
            ))
        });
        assert_eq!(stopped.err().unwrap().kind(), crate::ErrorKind::Cancelled);
        drop(turn);
    }

    #[test]
    fn only_sealed_memory_of_this_key_and_length_is_taken() {
        let folder = Folder::new("shared-other");
        let own = fill(folder.find(1, 100), 7);
        let path = folder.files().remove(0);
        let pid = std::process::id();
        let other = fill(folder.find(2, 100), 8);
        let unsealed = own.notes.memory().unwrap();
        unsealed.set_len(Region::size_for(100) as u64).unwrap();
        for fd in [other.memory.as_raw_fd(), unsealed.as_raw_fd(), 0, 9999] {
            fs::write(&path, format!("hold {pid} {fd}\n")).unwrap();
            assert!(matches!(folder.find(1, 100), Found::Turn(_)), "{fd}");
        }
        fs::write(&path, format!("hold {pid} {}\n", own.memory.as_raw_fd())).unwrap();
        assert!(matches!(folder.find(1, 1 << 20), Found::Turn(_)));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_a_reason() {
        let Found::Refused(why) = find_in(Path::new("/proc/none"), 1, 100, || Ok(())).unwrap()
        else {
            panic!("found in no folder");
        };
        assert!(why.contains("/proc/none/feedline-"), "{why}");
    }
}
