//! Direct reads by cuFile: the trial read that shows the bytes' actual route, the files, and the
//! host route for reads that cannot be direct.

#![allow(unsafe_code)]

use super::buffer::BatchMemory;
use super::cufile::{ALIGN, CuFile, Handle, Options};
use super::driver::Gpu;
use crate::backend::{DevicePtr, DirectTrial};
use crate::cuda::cufile::{Mode, Stats};
use crate::cuda::driver::CopyStream;
use feedline_base::error::{Error, Result};
use feedline_core::memory::Region;
use rustix::fd::OwnedFd;
use std::error::Error as _;
use std::path::Path;
use std::sync::Arc;

/// The first cuFile version that creates a context on every visible GPU.
const CONTEXTS: (u32, u32) = (1, 16);

/// Bytes of the trial read.
const TRIAL: usize = 1 << 20;

/// An open cuFile, and its counters as they were before the loader's first read.
pub struct DirectReader {
    gpu: Arc<Gpu>,
    pub(super) cufile: Arc<CuFile>,
    before: Option<Stats>,
}

impl DirectReader {
    /// Opens cuFile and makes the trial read, or returns the reason why cuFile is not used.
    pub(super) fn open(gpu: &Arc<Gpu>, trial: DirectTrial) -> Result<(Self, String), String> {
        let root = trial
            .library
            .as_ref()
            .map_or(Path::new("/"), |(_, root)| root);
        if !trial.required {
            CuFile::check_direct(root).map_err(|absent| absent.to_string())?;
        }
        let cufile = match &trial.library {
            None => CuFile::get().map_err(|absent| absent.to_string())?,
            Some((library, root)) => {
                let options = Options {
                    library: Some(library.clone()),
                    root: root.clone(),
                    ..Options::default()
                };
                CuFile::open_with(&options).map_err(|absent| absent.to_string())?
            }
        };
        let required = trial.required;
        let any_route = trial.any_route;
        let direct = Self::counting(gpu, cufile);
        direct.read_a_little(trial)?;
        let called = direct
            .cufile
            .version
            .map_or("cuFile".into(), |(major, minor)| {
                format!("cuFile {major}.{minor}")
            });
        let how = match direct.taken() {
            mode @ (Mode::P2p | Mode::NvidiaFs) => {
                format!("{called}: {mode}{}", direct.elsewhere())
            }
            Mode::Unknown if required => {
                format!("{called}, which does not report the route of bytes")
            }
            Mode::Unknown => return Err("cuFile does not report the route of bytes".into()),
            mode if any_route => format!("{called}: {mode}"),
            mode => {
                return Err(format!(
                    "cuFile would pass these bytes through host memory ({mode})"
                ));
            }
        };
        // The report's counts start here.
        Ok((Self::counting(gpu, direct.cufile), how))
    }

    fn counting(gpu: &Arc<Gpu>, cufile: Arc<CuFile>) -> Self {
        let before = cufile.stats(gpu.ordinal());
        Self {
            gpu: gpu.clone(),
            cufile,
            before,
        }
    }

    /// Route of the reads since the counters in `before` were taken.
    fn taken(&self) -> Mode {
        match (&self.before, self.cufile.stats(self.gpu.ordinal())) {
            (Some(before), Some(now)) => Mode::between(before, &now),
            _ => Mode::Unknown,
        }
    }

    fn read_a_little(
        &self,
        DirectTrial {
            file, offset, len, ..
        }: DirectTrial,
    ) -> Result<(), String> {
        let file = self
            .cufile
            .register_file(file()?)
            .map_err(|failure| failure.to_string())?;
        let mut target =
            BatchMemory::new(&self.gpu, TRIAL, "a trial of cuFile", Some(&self.cufile))
                .map_err(words)?;
        let bound = self.gpu.bind().map_err(words)?;
        let from = offset - offset % ALIGN;
        // SAFETY: in bounds of memory without any other user.
        let read = unsafe { self.cufile.read(&file, target.memory.ptr(), TRIAL, from, 0) };
        drop(bound);
        target.release().map_err(words)?;
        let read = read.map_err(|failure| failure.to_string())?;
        let least = offset.saturating_add(len) - from;
        if (read as u64) < least.min(TRIAL as u64) {
            return Err(format!("cuFileRead read {read} of {least} bytes"));
        }
        Ok(())
    }

    /// Describes what the library costs on other GPUs, if anything.
    fn elsewhere(&self) -> String {
        let gpus = super::devices().map_or(1, |(_, devices)| devices.len());
        match self.cufile.version {
            Some(version) if version >= CONTEXTS && gpus > 1 => {
                format!(
                    "; it has a context on each of the {gpus} visible GPUs: set \
                     CUDA_VISIBLE_DEVICES for each rank"
                )
            }
            _ => String::new(),
        }
    }

    /// Alignment of offsets and lengths, in bytes.
    pub fn align(&self) -> u64 {
        ALIGN
    }

    /// Registers a file opened with O_DIRECT.
    pub fn register(&self, file: OwnedFd) -> Result<DirectFile, String> {
        let handle = self
            .cufile
            .register_file(file)
            .map_err(|failure| failure.to_string())?;
        Ok(DirectFile {
            gpu: self.gpu.clone(),
            cufile: self.cufile.clone(),
            handle,
        })
    }

    /// Host memory and a stream, for reads that cannot be direct.
    pub fn bounce(&self, bytes: usize) -> Result<Bounce> {
        let region = Region::new(bytes, "a bounce buffer")?;
        Ok(Bounce {
            stream: CopyStream::new(&self.gpu)?,
            gpu: self.gpu.clone(),
            region,
        })
    }

    /// The actual route of the bytes so far.
    pub fn mode(&self) -> String {
        self.taken().to_string()
    }
}

/// Message of an error, with its cause.
fn words(error: Error) -> String {
    match error.source() {
        Some(source) => format!("{}: {source}", error.message()),
        None => error.message().into(),
    }
}

/// A file registered with cuFile.
pub struct DirectFile {
    gpu: Arc<Gpu>,
    cufile: Arc<CuFile>,
    handle: Handle,
}

impl DirectFile {
    /// Reads `len` bytes at `offset` of the file to the device address `base + place`; returns the
    /// number of bytes read. `base` is the start of a buffer.
    ///
    /// # Safety
    /// The target bytes must belong to that buffer. They must have no other user until the call
    /// returns, and never again if the calling thread is abandoned within the call.
    pub unsafe fn read(
        &self,
        base: DevicePtr,
        len: usize,
        offset: u64,
        place: u64,
    ) -> Result<usize, String> {
        let _bound = self.gpu.bind().map_err(|error| error.to_string())?;
        // SAFETY: the caller's promise.
        unsafe { self.cufile.read(&self.handle, base, len, offset, place) }
            .map_err(|failure| failure.to_string())
    }
}

/// Host memory and a stream, for reads that cannot be direct.
pub struct Bounce {
    gpu: Arc<Gpu>,
    stream: CopyStream,
    region: Region,
}

impl Bounce {
    /// The whole memory.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: in bounds, initialised, and exclusive by `&mut self`: `send` waits before it
        // returns.
        unsafe { std::slice::from_raw_parts_mut(self.region.ptr().as_ptr(), self.region.len()) }
    }

    /// Copies the first `len` bytes to the device, and waits. An error says whether the copy may
    /// still be in flight.
    ///
    /// # Safety
    /// `[to, to + len)` belongs to a buffer, and has no other user until the call returns.
    pub unsafe fn send(&mut self, to: DevicePtr, len: usize) -> Result<(), (Error, bool)> {
        let from = self.bytes()[..len].as_ptr();
        let _bound = self.gpu.bind().map_err(|error| (error, false))?;
        // SAFETY: the source stays unchanged until the synchronisation has returned, or the context
        // is broken. The caller promises the target.
        let copied = unsafe { self.gpu.copy_to_device(to, from, len, self.stream.raw()) };
        let waited = self.stream.synchronize();
        let lost = waited.is_err() && self.gpu.synchronize().is_err();
        copied.and(waited).map_err(|error| (error, lost))
    }
}
