//! A file system that misbehaves on purpose: a thread of the test serves the kernel's FUSE
//! protocol.
//!
//! ```text
//! child: loader ─► kernel ─► /dev/fuse ─► thread of the test: LOOKUP, GETATTR, OPEN right; READ as the test says
//!                     ▲                      │ holds the request, answers late, short, with EIO
//!                     └── abort ◄────────────┘
//! ```
//!
//! A process that waits for an answer cannot be killed. So another process than the reader serves
//! the file system: its end always closes `/dev/fuse`, which ends the connection and every wait.
//! The mount is in a namespace of the test's thread.

use super::child::alone_with_mounts;
use super::set::Set;
use super::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Fault of reads of the second file from [`GOOD`] bytes on, after [`Fuse::begin`]: the dataset is
/// opened, and its fingerprint taken, without a fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reads {
    /// No answer, ever.
    Never,
    /// The right answer, after this time.
    Late(Duration),
    /// Fewer bytes than requested, before the end of the file.
    Short,
    /// An error.
    Fails(Errno),
    /// Reads are right, but the file is never opened.
    NeverOpened,
}

/// Bytes of the second file that are read correctly.
pub const GOOD: u64 = 64 << 10;

/// The file system with the two files of a set; a drop unmounts it and ends every wait in it.
pub struct Fuse {
    pub set: Set,
    at: PathBuf,
    connection: u32,
    stop: Arc<AtomicBool>,
    begun: Arc<AtomicBool>,
    /// Requests that were not answered.
    held: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Fuse {
    /// Mounts it at `at`.
    ///
    /// Errors: the reason why this machine has no FUSE.
    pub fn new(at: &Path, reads: Reads) -> Result<Self, String> {
        alone_with_mounts()?;
        std::fs::create_dir_all(at).map_err(|error| error.to_string())?;
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let mut options = File::options();
        options.read(true).write(true).custom_flags(nonblock);
        let device = options.open("/dev/fuse");
        let device = device.map_err(|error| format!("/dev/fuse: {error}"))?;
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
        sys::mount_at("feedline", at, "fuse", &options)
            .map_err(|error| format!("no FUSE: {error}"))?;
        let set = Set::usual(at).sized(2, 128);
        let mut server = Server {
            device,
            files: (0..set.files).map(|file| set.bytes(file, 0)).collect(),
            reads,
            stop: Arc::default(),
            begun: Arc::default(),
            held: Arc::default(),
            late: Vec::new(),
        };
        let stop = server.stop.clone();
        let begun = server.begun.clone();
        let held = server.held.clone();
        let thread = std::thread::spawn(move || server.serve());
        let mut fuse = Self {
            set,
            at: at.into(),
            connection: 0,
            stop,
            begun,
            held,
            thread: Some(thread),
        };
        let meta =
            std::fs::metadata(at).map_err(|error| format!("FUSE does not start: {error}"))?;
        fuse.connection = rustix::fs::minor(meta.dev());
        Ok(fuse)
    }

    /// Starts the misbehaviour.
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Release);
    }

    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }

    /// Ends every wait in it.
    pub fn abort(&mut self) {
        let control = Path::new("/sys/fs/fuse/connections");
        // Fails in another namespace, where this is not mounted.
        let _ = sys::mount_at("none", control, "fusectl", "");
        let _ = std::fs::write(control.join(self.connection.to_string()).join("abort"), "1");
        // Otherwise the end of the device does it.
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.abort();
        let _ = sys::unmount(&self.at);
    }
}

mod code {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const RELEASEDIR: u32 = 29;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

const ROOT: u64 = 1;
/// Inode of the first file.
const FIRST: u64 = 2;
/// Bytes of the header of a request.
const HEADER: usize = 40;
/// Validity of names and attributes, in seconds.
const VALID: u64 = 3600;

struct Server {
    device: File,
    files: Vec<Vec<u8>>,
    reads: Reads,
    stop: Arc<AtomicBool>,
    begun: Arc<AtomicBool>,
    held: Arc<AtomicU64>,
    late: Vec<(Instant, u64, Vec<u8>)>,
}

struct Request<'a> {
    code: u32,
    unique: u64,
    node: u64,
    body: &'a [u8],
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Answer to a request; `None` for no answer now.
type Answer = Option<Result<Vec<u8>, Errno>>;

impl Server {
    /// Serves until it is told to stop, or the mount is gone. Then the device is closed, which ends
    /// every wait.
    fn serve(&mut self) {
        let mut buffer = vec![0; 1 << 20];
        while !self.stop.load(Ordering::Acquire) {
            self.answer_late();
            let wait = Timespec {
                tv_sec: 0,
                tv_nsec: 5_000_000,
            };
            let mut fds = [PollFd::new(&self.device, PollFlags::IN)];
            if poll(&mut fds, Some(&wait)) == Ok(0) {
                continue;
            }
            let len = match self.device.read(&mut buffer) {
                Ok(len) => len,
                // EAGAIN; ENOENT: a request interrupted before it was read.
                Err(error) if matches!(error.raw_os_error(), Some(2 | 4 | 11)) => continue,
                Err(_) => return,
            };
            let request = Request {
                code: u32_at(&buffer, 4),
                unique: u64_at(&buffer, 8),
                node: u64_at(&buffer, 16),
                body: &buffer[HEADER..len],
            };
            let unique = request.unique;
            match self.answer(&request) {
                None => {}
                Some(Ok(body)) => self.reply(unique, 0, &body),
                Some(Err(errno)) => self.reply(unique, -errno.raw_os_error(), &[]),
            }
        }
    }

    fn answer(&mut self, request: &Request<'_>) -> Answer {
        match request.code {
            code::INIT => Some(Ok(init())),
            code::LOOKUP => Some(self.lookup(request.body)),
            code::GETATTR => {
                let valid = [VALID, 0].map(u64::to_ne_bytes).concat();
                Some(Ok([valid, self.attributes(request.node)].concat()))
            }
            code::OPEN if self.never_opened(request.node) => self.hold(),
            code::OPEN | code::OPENDIR => Some(Ok(vec![0; 16])),
            code::READ => self.read(request),
            code::RELEASE | code::RELEASEDIR | code::FLUSH => Some(Ok(Vec::new())),
            // These need no answer; an interrupted process keeps waiting for its own request.
            code::FORGET | code::BATCH_FORGET | code::INTERRUPT => None,
            _ => Some(Err(Errno::NOSYS)),
        }
    }

    fn never_opened(&self, node: u64) -> bool {
        self.reads == Reads::NeverOpened && node > FIRST && self.begun.load(Ordering::Acquire)
    }

    fn hold(&self) -> Answer {
        self.held.fetch_add(1, Ordering::AcqRel);
        None
    }

    fn lookup(&self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let file = (0..self.files.len())
            .find(|file| name == format!("{file:03}.bin\0").as_bytes())
            .ok_or(Errno::NOENT)?;
        let node = FIRST + file as u64;
        let times = [node, 0, VALID, VALID, 0].map(u64::to_ne_bytes).concat();
        Ok([times, self.attributes(node)].concat())
    }

    fn read(&mut self, request: &Request<'_>) -> Answer {
        let offset = u64_at(request.body, 8);
        let len = u32_at(request.body, 16) as usize;
        let file = &self.files[(request.node - FIRST) as usize];
        let from = (offset as usize).min(file.len());
        let bytes = file[from..(from + len).min(file.len())].to_vec();
        let good = request.node == FIRST || offset + bytes.len() as u64 <= GOOD;
        if good || !self.begun.load(Ordering::Acquire) {
            return Some(Ok(bytes));
        }
        match self.reads {
            Reads::Never => self.hold(),
            Reads::Late(time) => {
                self.held.fetch_add(1, Ordering::AcqRel);
                let due = Instant::now() + time;
                self.late.push((due, request.unique, bytes));
                None
            }
            Reads::Short => Some(Ok(bytes[..bytes.len() / 2 + 1].to_vec())),
            Reads::Fails(errno) => Some(Err(errno)),
            Reads::NeverOpened => Some(Ok(bytes)),
        }
    }

    fn answer_late(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self.late.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, unique, bytes) in due {
            self.reply(unique, 0, &bytes);
        }
    }

    fn reply(&mut self, unique: u64, error: i32, body: &[u8]) {
        let mut message = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend(error.to_ne_bytes());
        message.extend(unique.to_ne_bytes());
        message.extend(body);
        // The asking process may be gone.
        let _ = self.device.write(&message);
    }

    /// `struct fuse_attr`.
    fn attributes(&self, node: u64) -> Vec<u8> {
        let file = node
            .checked_sub(FIRST)
            .and_then(|file| self.files.get(file as usize));
        let (size, mode) = file.map_or((0, 0o040_755), |file| (file.len() as u64, 0o100_644));
        let longs = [node, size, size.div_ceil(512), 0, 0, 0];
        let links = 1 + u32::from(node == ROOT);
        let words = [0, 0, 0, mode, links, 0, 0, 0, 4096, 0];
        let longs = longs.map(u64::to_ne_bytes).concat();
        [longs, words.map(u32::to_ne_bytes).concat()].concat()
    }
}

/// `struct fuse_init_out`: protocol 7.31, read-ahead of 128 KiB, reads at a time.
fn init() -> Vec<u8> {
    const ASYNC_READ: u32 = 1;
    let words = [7, 31, 128 << 10, ASYNC_READ, 0, 64 << 10, 1];
    let mut words = words.map(u32::to_ne_bytes).concat();
    words.resize(64, 0);
    // `max_background` and `congestion_threshold`.
    words[16..20].copy_from_slice(&[64_u16, 48].map(u16::to_ne_bytes).concat());
    words
}
