//! The place of a task: what it does, or what it waits for, by the system call that it is in.
//!
//! ```text
//! /proc/PID/syscall ──► "running"                     on a core, or ready for one
//!                  ──► number, arguments ──► a descriptor ──► /proc/PID/fd/N ──► file: of which file system?
//!                  │                                                             socket, pipe
//!                  └──► a lock: the other threads of the process tell
//! ```
//!
//! Nothing here touches a file of the loader: a file system that hangs must not hang the sampler.

use crate::observation::Places;
use crate::process::Task;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Running,
    Storage,
    NetworkStorage,
    Network,
    Pipe,
    Sleep,
    Other,
    Lock,
    Tasks,
    /// Asleep, and the kernel does not tell in which system call.
    Unknown,
}

impl Places {
    pub(crate) fn count(&mut self, place: Place) {
        let count = match place {
            Place::Running => &mut self.running,
            Place::Storage => &mut self.storage,
            Place::NetworkStorage => &mut self.network_storage,
            Place::Network => &mut self.network,
            Place::Pipe => &mut self.pipe,
            Place::Sleep => &mut self.sleep,
            Place::Other => &mut self.other,
            Place::Lock => &mut self.lock,
            Place::Tasks => &mut self.tasks,
            Place::Unknown => &mut self.unknown,
        };
        *count += 1;
    }
}

/// Threads of a process that are looked at if its first one waits for a lock.
const THREADS_MAX: usize = 16;

/// Tells the place of tasks. Keeps the table of mounts.
pub struct Look {
    mounts: Vec<Mounted>,
}

impl Look {
    pub fn new() -> Self {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self {
            mounts: mounted(&text),
        }
    }

    /// The place of a worker process. `None` if it is gone.
    pub fn worker(&self, process: u32) -> Option<Place> {
        let first = self.task(Task::Process(process))?;
        if first != Place::Lock {
            return Some(first);
        }
        // Its first thread waits for another one of the process, such as a pool that reads.
        let others = Task::Process(process).threads();
        let places = others
            .into_iter()
            .filter(|thread| *thread != process)
            .take(THREADS_MAX)
            .filter_map(|thread| self.task(Task::Thread(process, thread)));
        // A thread at a pipe or at a lock waits as the first one does.
        let working = places.filter(|place| *place <= Place::Network);
        Some(working.min().unwrap_or(first))
    }

    pub fn task(&self, task: Task) -> Option<Place> {
        let Ok(text) = fs::read_to_string(task.file("syscall")) else {
            return by_state(task, Place::Unknown);
        };
        match Call::of(&text) {
            None => Some(Place::Running),
            // In the kernel without a call: a page of a mapped file comes, or the task has ended.
            Some(Call { number: -1, .. }) => by_state(task, Place::Other),
            Some(call) => Some(self.call(task, &call)),
        }
    }

    fn call(&self, task: Task, call: &Call) -> Place {
        let first = call.arguments[0];
        match call.number {
            libc::SYS_read
            | libc::SYS_pread64
            | libc::SYS_readv
            | libc::SYS_preadv
            | libc::SYS_preadv2
            | libc::SYS_getdents64
            | libc::SYS_fstat => self.descriptor(task, first as i32, Place::Pipe),
            libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 => {
                self.descriptor(task, first as i32, Place::Tasks)
            }
            libc::SYS_recvfrom
            | libc::SYS_recvmsg
            | libc::SYS_sendto
            | libc::SYS_sendmsg
            | libc::SYS_connect
            | libc::SYS_accept4 => Place::Network,
            // Event loops of clients of stores.
            libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => Place::Network,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => Place::Network,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => self.polled(task, call),
            libc::SYS_ppoll => self.polled(task, call),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => Place::Tasks,
            libc::SYS_pselect6 => Place::Tasks,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open | libc::SYS_stat | libc::SYS_lstat | libc::SYS_access => {
                self.named(task, first)
            }
            libc::SYS_openat | libc::SYS_newfstatat | libc::SYS_statx | libc::SYS_faccessat => {
                self.named(task, call.arguments[1])
            }
            libc::SYS_io_uring_enter | libc::SYS_io_getevents => Place::Storage,
            libc::SYS_futex => Place::Lock,
            libc::SYS_nanosleep | libc::SYS_clock_nanosleep => Place::Sleep,
            _ => Place::Other,
        }
    }

    /// The place of a task that reads or writes a descriptor; `pipe` if it is a pipe.
    fn descriptor(&self, task: Task, descriptor: i32, pipe: Place) -> Place {
        let Ok(target) = fs::read_link(task.file(&format!("fd/{descriptor}"))) else {
            return Place::Other;
        };
        match target.to_str() {
            Some(name) if name.starts_with("socket:") => Place::Network,
            Some(name) if name.starts_with("pipe:") => pipe,
            Some(name) if name.starts_with("anon_inode:") => Place::Tasks,
            _ => self.file(&target),
        }
    }

    /// The place of a task that waits for one of several descriptors: pipes are those of its tasks.
    fn polled(&self, task: Task, call: &Call) -> Place {
        // A `pollfd` has 8 bytes, the descriptor in the first four.
        let count = call.arguments[1].min(16) as usize;
        let Some(bytes) = memory(task, call.arguments[0], 8 * count) else {
            return Place::Tasks;
        };
        let descriptors = bytes
            .chunks_exact(8)
            .map(|entry| i32::from_ne_bytes([entry[0], entry[1], entry[2], entry[3]]));
        let places = descriptors.map(|descriptor| self.descriptor(task, descriptor, Place::Tasks));
        places.min().unwrap_or(Place::Sleep)
    }

    /// The place of a task that asks about a path, at this address of its memory.
    fn named(&self, task: Task, address: u64) -> Place {
        let name = memory(task, address, 256).unwrap_or_default();
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
        match std::str::from_utf8(&name[..end]) {
            Ok(path) if path.starts_with('/') => self.file(Path::new(path)),
            _ => match fs::read_link(task.file("cwd")) {
                Ok(folder) => self.file(&folder),
                Err(_) => Place::Storage,
            },
        }
    }

    fn file(&self, path: &Path) -> Place {
        let mount = self
            .mounts
            .iter()
            .filter(|mount| path.starts_with(&mount.folder))
            .max_by_key(|mount| mount.folder.len());
        if mount.is_some_and(|mount| mount.on_network) {
            Place::NetworkStorage
        } else {
            Place::Storage
        }
    }
}

/// The place by the task's state; `asleep` if it waits for something other than a device.
fn by_state(task: Task, asleep: Place) -> Option<Place> {
    Some(match task.state()? {
        'R' => Place::Running,
        'D' => Place::Storage,
        // It has ended.
        'Z' | 'X' => Place::Tasks,
        _ => asleep,
    })
}

/// Some bytes of a task's memory: fewer at the end of a mapping, `None` if they cannot be read.
fn memory(task: Task, address: u64, count: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; count];
    let read = File::open(task.file("mem"))
        .ok()?
        .read_at(&mut bytes, address)
        .ok()?;
    bytes.truncate(read);
    Some(bytes)
}

/// A system call that a task is in.
#[derive(Debug, PartialEq, Eq)]
struct Call {
    number: i64,
    arguments: [u64; 2],
}

impl Call {
    /// From the text of `/proc/PID/syscall`. `None` if the task is on a core or ready for one.
    fn of(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let arguments = [hexadecimal(words.next()), hexadecimal(words.next())];
        Some(Self { number, arguments })
    }
}

/// An argument; 0 if there is none, as for a task outside of a system call.
fn hexadecimal(word: Option<&str>) -> u64 {
    let digits = word.and_then(|word| word.strip_prefix("0x"));
    digits.map_or(0, |digits| u64::from_str_radix(digits, 16).unwrap_or(0))
}

#[derive(Debug, PartialEq, Eq)]
struct Mounted {
    folder: String,
    on_network: bool,
}

/// File systems with the latency of a network. `fuseblk` is a program for a local disk.
const NETWORK: [&str; 14] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "9p",
    "virtiofs",
    "glusterfs",
    "wekafs",
    "pvfs2",
];

/// The mounts of `/proc/self/mountinfo`.
fn mounted(text: &str) -> Vec<Mounted> {
    text.lines().filter_map(Mounted::of).collect()
}

impl Mounted {
    /// From a line of `/proc/self/mountinfo`.
    fn of(line: &str) -> Option<Self> {
        let (before, behind) = line.split_once(" - ")?;
        let kind = behind.split(' ').next()?;
        Some(Self {
            folder: before.split(' ').nth(4)?.replace("\\040", " "),
            on_network: NETWORK.contains(&kind) || kind == "fuse" || kind.starts_with("fuse."),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_base::thread;
    use std::io::Read;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    #[test]
    fn system_calls_are_read_from_the_text_of_the_kernel() {
        let call = |number, arguments| Some(Call { number, arguments });
        let table = [
            ("running\n", None),
            (
                "0 0x5 0x7ffd1f62bc80 0x40 0x0 0x0 0x0 0x7f 0x7f\n",
                call(0, [5, 0x7ffd_1f62_bc80]),
            ),
            (
                "-1 0x7ffd1f62bc68 0x7f2eb5a19503\n",
                call(-1, [0x7ffd_1f62_bc68, 0x7f2e_b5a1_9503]),
            ),
            ("", None),
        ];
        for (text, right) in table {
            assert_eq!(Call::of(text), right, "{text}");
        }
    }

    #[test]
    fn network_file_systems_are_known_by_their_names() {
        let text = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                    40 22 0:36 / /mnt/a\\040b rw - fuse.sshfs host:/ rw\n\
                    41 22 0:37 / /data rw shared:1 - nfs4 host:/ rw\n\
                    42 22 8:1 / /usb rw - fuseblk /dev/sda1 rw\n\
                    43 41 0:9 / /data/local rw - xfs /dev/b rw\n";
        let look = Look {
            mounts: mounted(text),
        };
        let table = [
            ("/mnt/a b/x", Place::NetworkStorage),
            ("/data/train/1.jpg", Place::NetworkStorage),
            ("/data/local/1.jpg", Place::Storage),
            ("/database/1.jpg", Place::Storage),
            ("/usb/1.jpg", Place::Storage),
        ];
        for (path, right) in table {
            assert_eq!(look.file(Path::new(path)), right, "{path}");
        }
    }

    /// Waits until a thread is at the place.
    fn until(thread: u32, right: Place) {
        let look = Look::new();
        let task = Task::Thread(std::process::id(), thread);
        if fs::read_to_string(task.file("syscall")).is_err() {
            return println!("skipped: this kernel does not tell system calls");
        }
        let began = Instant::now();
        while look.task(task) != Some(right) {
            let place = look.task(task);
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "{place:?} for {right:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn own_id() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get() as u32
    }

    #[test]
    fn threads_are_found_at_pipes_sockets_locks_and_asleep() {
        let (reader, writer) = std::io::pipe().unwrap();
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let (send, receive) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let mut threads = Vec::new();
        let mut start = |place, mut body: Box<dyn FnMut() + Send>| {
            let send = send.clone();
            let run = move || {
                send.send((own_id(), place)).unwrap();
                body();
            };
            threads.push(thread::start("a test", "place", run).unwrap());
        };
        let (mut pipe, mut socket) = (reader, near);
        start(Place::Pipe, Box::new(move || drop(pipe.read(&mut [0]))));
        start(
            Place::Network,
            Box::new(move || drop(socket.read(&mut [0]))),
        );
        start(
            Place::Lock,
            Box::new(move || assert!(ended.recv().is_err())),
        );
        for _ in 0..3 {
            let (id, place) = receive.recv().unwrap();
            until(id, place);
        }
        drop((writer, far, end));
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }
}
