//! GPUDirect Storage: reads from files straight into device memory, by NVIDIA's libcufile, loaded
//! at run time.
//!
//! ```text
//! CuFile::get() ──► Arc<CuFile>  or  Absent: the reason in one sentence         one per process while in use
//!      ├── register_file(fd opened with O_DIRECT) ──► Handle                    both keep the CuFile alive; dropping one
//!      ├── register_buffer(address, len) ──► BufferGuard                        deregisters it, the last one closes
//!      ├── read(&handle, address, len, file offset, device offset) ──► bytes
//!      └── stats(gpu) before and after ──► Mode::between: P2P, nvidia-fs, through the host, mixed, unknown
//! ```
//!
//! # Invariants
//!
//! - Opening never hangs. It runs on its own thread, which is abandoned at the deadline; the
//!   process remembers that, and does not try again. Opening never leaves standard input, output or
//!   error closed. (If other code opens a file between the library's `close` and the repair, that
//!   file keeps the number.) This module starts no other thread; closing works the same way.
//! - A file stays open longer than its registration; the driver longer than all files and buffers.
//!   No call follows the close, because a late read would make the library reopen itself.
//! - A successful read does not show its route, because the library silently falls back to host
//!   memory. Only [`Mode`] shows it.
//!
//! # Limits
//!
//! - Registering and reading run on the caller's thread, and take as long as the kernel takes. A
//!   caller with a deadline needs a thread that it can abandon with everything in use. The device's
//!   context should be current there.
//! - Memory is registered at 4096-byte boundaries only: elsewhere the library would use bounce
//!   buffers.
//! - Reads are not ordered with any CUDA stream.
//! - The library writes `cufile.log` to the working directory unless the environment has
//!   `CUFILE_LOGFILE_PATH` (or `cufile.json` names a folder). This crate does not set the variable,
//!   because changing the environment of a process with threads is unsound. Set it where the
//!   process is started.
//! - From 1.16 on, the open library holds a context on every visible GPU.

#![allow(unsafe_code)]

mod absent;
mod api;
mod failure;
pub mod stats;
#[cfg(test)]
mod tests;
mod watch;

pub(crate) use stats::{Mode, Stats};

pub(crate) use absent::Absent;
pub(crate) use failure::{Failure, FailureCause};

use api::{Api, RawHandle};
use feedline_base::sync::Hold;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;
use watch::Silent;

/// Alignment of registered memory, in bytes. Direct reads also need it for offsets and lengths.
pub(crate) const ALIGN: u64 = 4096;

/// Options of [`CuFile::open_with`].
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The only library to try. Without it, `$FEEDLINE_CUFILE`, or else the usual names and
    /// folders.
    pub(crate) library: Option<PathBuf>,
    /// Parent of `proc`, `run` and `dev`: `/` except in tests.
    pub(crate) root: PathBuf,
    /// Deadline of opening and closing. A machine with many disks and network cards needs seconds.
    pub(crate) deadline: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            library: None,
            root: "/".into(),
            deadline: Duration::from_secs(30),
        }
    }
}

/// An open cuFile driver.
#[derive(Debug)]
pub(crate) struct CuFile {
    api: Arc<Api>,
    /// Major and minor version of the library, if it reports them.
    pub(crate) version: Option<(u32, u32)>,
    opened: Opened,
    root: PathBuf,
    deadline: Duration,
    reads: AtomicU64,
    /// Dropped last, after the driver is closed.
    _turn: Option<Turn>,
}

/// The steps of [`CuFile::open_with`] that closing undoes.
#[derive(Clone, Copy, Debug)]
struct Opened {
    /// Whether this crate opened the driver; if not, other code of the process had opened it.
    driver: bool,
    /// Whether this crate started the statistics.
    stats: bool,
}

/// Libraries whose open call did not return. Each blocks a thread, perhaps for ever.
static SILENT: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The driver of [`CuFile::get`], and whether it is open, opening or closing.
static ONLY: Mutex<(Weak<CuFile>, bool)> = Mutex::new((Weak::new(), false));
static TURNED: Condvar = Condvar::new();

/// Held from before the driver of [`CuFile::get`] is opened until it is closed.
#[derive(Debug)]
struct Turn;

impl Drop for Turn {
    fn drop(&mut self) {
        ONLY.hold().1 = false;
        TURNED.notify_all();
    }
}

impl CuFile {
    /// The driver of this process. Opens it unless it is in use already.
    ///
    /// Takes at most the deadline of [`Options::default`], or twice that if a driver must be closed
    /// first. The caller must know that CUDA is usable: newer libraries open without it.
    pub(crate) fn get() -> Result<Arc<Self>, Absent> {
        let mut only = ONLY.hold();
        while only.1 {
            if let Some(open) = only.0.upgrade() {
                return Ok(open);
            }
            only = TURNED.wait(only).unwrap_or_else(PoisonError::into_inner);
        }
        only.1 = true;
        drop(only);
        let opened = Self::open_for(&Options::default(), Some(Turn))?;
        ONLY.hold().0 = Arc::downgrade(&opened);
        TURNED.notify_all();
        Ok(opened)
    }

    /// Checks whether a driver, once open, could bypass host memory. If not, returns the reason not
    /// to open it.
    pub(crate) fn check_direct(root: &Path) -> Result<(), Absent> {
        let allowed = absent::may_be_direct(root, &|name| std::env::var_os(name));
        if allowed {
            Ok(())
        } else {
            Err(Absent::HostOnly)
        }
    }

    /// Opens a driver. It is closed when the last reference to it, its files and its buffers is
    /// dropped.
    pub(crate) fn open_with(options: &Options) -> Result<Arc<Self>, Absent> {
        Self::open_for(options, None)
    }

    fn open_for(options: &Options, turn: Option<Turn>) -> Result<Arc<Self>, Absent> {
        let api = Arc::new(Api::load(options.library.as_deref())?);
        let library = || api.library.clone();
        let silent = || Absent::TimedOut {
            library: library(),
            after: options.deadline,
        };
        if SILENT.hold().contains(&library()) {
            return Err(silent());
        }
        let version = api.version();
        if let Some(found) = version.filter(|version| *version < absent::OLDEST) {
            return Err(Absent::VersionTooOld {
                library: library(),
                found,
            });
        }
        absent::check(&options.root)?;
        let count = version.is_some_and(|version| version >= stats::FIRST) && api.has_statistics();
        let inside = api.clone();
        let answer = watch::within(options.deadline, move || open(&inside, count));
        let opened = match answer {
            Ok(Ok(opened)) => opened,
            Ok(Err(FailureCause::CuFile { code, cuda })) => {
                return Err(Absent::DriverOpen {
                    library: library(),
                    code,
                    cuda,
                });
            }
            Ok(Err(other)) => {
                return Err(Absent::NoThread {
                    why: other.to_string(),
                });
            }
            Err(Silent::Late) => {
                SILENT.hold().push(library());
                return Err(silent());
            }
            Err(Silent::NotStarted(why)) => {
                return Err(Absent::NoThread {
                    why: why.to_string(),
                });
            }
            Err(Silent::Died) => {
                return Err(Absent::NoThread {
                    why: "its thread panicked".into(),
                });
            }
        };
        let root = options.root.clone();
        let deadline = options.deadline;
        let reads = AtomicU64::new(0);
        Ok(Arc::new(Self {
            api,
            version,
            opened,
            root,
            deadline,
            reads,
            _turn: turn,
        }))
    }

    /// Registers a file opened with O_DIRECT, and keeps it open while registered.
    pub(crate) fn register_file(
        self: &Arc<Self>,
        file: impl Into<OwnedFd>,
    ) -> Result<Handle, Failure> {
        const CALL: &str = "cuFileHandleRegister";
        let fd: OwnedFd = file.into();
        let flags = fcntl_getfl(&fd)
            .map_err(|errno| Failure::new(CALL, FailureCause::Os(errno.raw_os_error())))?;
        if !flags.contains(OFlags::DIRECT) {
            return Err(Failure::refused(
                CALL,
                "the file was opened without O_DIRECT, so no read could be direct",
            ));
        }
        let raw = self
            .api
            .register_file(fd.as_fd())
            .map_err(|cause| Failure::new(CALL, cause))?;
        Ok(Handle {
            raw,
            cufile: self.clone(),
            _fd: fd,
        })
    }

    /// Registers `len` bytes of device memory at `device_ptr`, a multiple of [`ALIGN`].
    ///
    /// The memory must stay allocated until the guard is released.
    pub(crate) fn register_buffer(
        self: &Arc<Self>,
        device_ptr: u64,
        len: usize,
    ) -> Result<BufferGuard, Failure> {
        const CALL: &str = "cuFileBufRegister";
        let end = u64::try_from(len)
            .ok()
            .and_then(|len| device_ptr.checked_add(len));
        if device_ptr == 0 || len == 0 || end.is_none() {
            return Err(Failure::refused(
                CALL,
                format!("device range {device_ptr:#x} + {len} bytes is invalid"),
            ));
        }
        if !device_ptr.is_multiple_of(ALIGN) {
            let why = format!(
                "device address {device_ptr:#x} is not a multiple of {ALIGN}: reads into it \
                 would go through bounce buffers"
            );
            return Err(Failure::refused(CALL, why));
        }
        self.api
            .register_buffer(device_ptr, len)
            .map_err(|cause| Failure::new(CALL, cause))?;
        Ok(BufferGuard {
            cufile: Some(self.clone()),
            device_ptr,
        })
    }

    /// Reads `len` bytes at `file_offset` to `device_ptr + device_offset`, and waits for them.
    /// `device_ptr` is the start of a registered buffer.
    ///
    /// A read may return fewer bytes at the end of the file, and 0 bytes after the end.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `device_ptr + device_offset` are allocated memory of the device (or the
    /// host). No kernel, copy or thread uses them until the call returns. If the calling thread may
    /// be abandoned within the call, they must never be used or freed again.
    pub(crate) unsafe fn read(
        &self,
        handle: &Handle,
        device_ptr: u64,
        len: usize,
        file_offset: u64,
        device_offset: u64,
    ) -> Result<usize, Failure> {
        const CALL: &str = "cuFileRead";
        let refused = |why: &str| {
            let range = format!(
                "{len} bytes at offset {file_offset} to {device_ptr:#x} + {device_offset}: {why}"
            );
            Failure::refused(CALL, range)
        };
        if !std::ptr::eq(self, &*handle.cufile) {
            return Err(refused("the file is registered with another driver"));
        }
        let reach = |offset: u64| {
            i64::try_from(offset)
                .ok()
                .filter(|offset| fits(*offset, len))
        };
        let (Some(from), Some(to)) = (reach(file_offset), reach(device_offset)) else {
            return Err(refused("beyond the largest file offset"));
        };
        if device_ptr
            .checked_add(device_offset)
            .and_then(|start| start.checked_add(len as u64))
            .is_none()
        {
            return Err(refused("beyond the address space"));
        }
        if len == 0 {
            return Ok(0);
        }
        // SAFETY: the handle stays registered while it lives, with this library (checked above);
        // the caller promises the memory.
        let bytes = unsafe { self.api.read(handle.raw, device_ptr, len, from, to) };
        let bytes = bytes.map_err(|cause| Failure::new(CALL, cause))?;
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Counters of the GPU with the library's number `gpu`, or else of the whole machine; `None` if
    /// neither is available.
    ///
    /// For a few calls per epoch: it allocates. The library has its own GPU numbers; compare the
    /// UUID with the device's.
    pub(crate) fn stats(&self, gpu: usize) -> Option<Stats> {
        let counted = self.version.filter(|_| self.opened.stats);
        counted
            .and_then(|version| {
                stats::of_gpu(bytemuck::cast_slice(&self.api.statistics()?), version, gpu)
            })
            .or_else(|| self.machine())
    }

    fn machine(&self) -> Option<Stats> {
        let text = std::fs::read_to_string(absent::nvidia_fs(&self.root, "stats")).ok()?;
        stats::of_machine(&text, self.reads.load(Ordering::Relaxed))
    }
}

/// Whether `offset + len` is a valid offset.
fn fits(offset: i64, len: usize) -> bool {
    i64::try_from(len).is_ok_and(|len| offset.checked_add(len).is_some())
}

/// Opens the driver. Runs on the watched thread.
fn open(api: &Api, count: bool) -> Result<Opened, FailureCause> {
    let count = count && api.raise_level();
    let driver = match api.open() {
        Ok(()) => true,
        Err(FailureCause::CuFile {
            code: failure::DRIVER_ALREADY_OPEN,
            ..
        }) => false,
        Err(cause) => return Err(cause),
    };
    let stats = count && api.start_statistics();
    Ok(Opened { driver, stats })
}

impl Drop for CuFile {
    fn drop(&mut self) {
        let api = self.api.clone();
        let opened = self.opened;
        // A library that does not return is abandoned.
        let _ = watch::within(self.deadline, move || {
            if opened.stats {
                api.stop_statistics();
            }
            if opened.driver {
                // If closing fails, the driver stays open.
                let _ = api.close();
            }
        });
    }
}

/// A registered file. Dropping it deregisters, then closes it.
#[derive(Debug)]
pub struct Handle {
    raw: RawHandle,
    cufile: Arc<CuFile>,
    _fd: OwnedFd,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: registered at construction, and deregistered only here; no read is active, since
        // reads borrow the handle. The descriptor is a field, and closed after this.
        unsafe { self.cufile.api.deregister_file(self.raw) }
    }
}

/// Registered device memory. Dropping it deregisters the memory; [`BufferGuard::release`] also
/// returns the result.
#[derive(Debug)]
pub(crate) struct BufferGuard {
    /// `None` once released.
    cufile: Option<Arc<CuFile>>,
    device_ptr: u64,
}

impl BufferGuard {
    /// Deregisters. After a failure the memory may still be pinned: leak it rather than free it.
    pub(crate) fn release(mut self) -> Result<(), Failure> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Failure> {
        let Some(cufile) = self.cufile.take() else {
            return Ok(());
        };
        cufile
            .api
            .deregister_buffer(self.device_ptr)
            .map_err(|cause| Failure::new("cuFileBufDeregister", cause))
    }
}

impl Drop for BufferGuard {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
