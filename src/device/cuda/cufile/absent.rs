//! Why GPUDirect Storage is not used, and what is checked before libcufile may run.
//!
//! ```text
//! library found ─► version ─► /proc/modules ─► /run/udev ─► nvidia-fs whole or absent ─► cuFileDriverOpen (watched)
//! ```
//!
//! Each check stands for something that the library does when it is not met: without `/proc/modules` its open spins for
//! ever on a core; without udev it opens but refuses every file; with the module nvidia-fs loaded but its device files
//! absent (a container without them) it may close descriptor 0, perhaps more than once, and there is little to win.

use super::failure;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The oldest cuFile that is used: that of CUDA 12.0.
pub(super) const OLDEST: (u32, u32) = (1, 5);

/// Why GPUDirect Storage is not used; the rendering is one sentence that ends with what would help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// No library could be loaded.
    NoLibrary { tried: Vec<String> },
    /// A library was loaded that is not cuFile, or not all of it.
    NoSymbol { library: String, symbol: &'static str },
    /// The library is older than [`OLDEST`].
    VersionTooOld { library: String, found: (u32, u32) },
    /// The list of kernel modules cannot be read.
    NoModules { path: PathBuf },
    /// udev's folder is not there.
    NoUdev { path: PathBuf },
    /// The kernel module nvidia-fs is loaded, but its device files are not here.
    NoDeviceFiles { path: PathBuf },
    /// `cuFileDriverOpen` failed with this `CUfileOpError` and `CUresult`.
    DriverOpen { library: String, code: i32, cuda: i32 },
    /// `cuFileDriverOpen` did not answer, now or earlier in this process.
    TimedOut { library: String, after: Duration },
    /// The thread that opens the driver could not be started, or died.
    NoThread { why: String },
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { tried } => write!(
                f,
                "libcufile was not found (tried {}); install CUDA's GPUDirect Storage or PyPI's nvidia-cufile, or name \
                 the library in FEEDLINE_CUFILE",
                tried.join(", ")
            ),
            Self::NoSymbol { library, symbol } => {
                write!(f, "{library} lacks {symbol}; name another libcufile in FEEDLINE_CUFILE")
            }
            Self::VersionTooOld { library, found } => write!(
                f,
                "{library} is cuFile {}.{}; version {}.{} (CUDA 12.0) or a later one is needed",
                found.0, found.1, OLDEST.0, OLDEST.1
            ),
            Self::NoModules { path } => write!(
                f,
                "{} cannot be read, without which libcufile would spin for ever; a kernel with modules and a full /proc \
                 are needed",
                path.display()
            ),
            Self::NoUdev { path } => write!(
                f,
                "{} is not there, without which libcufile refuses every file; in a container mount it from the host",
                path.display()
            ),
            Self::NoDeviceFiles { path } => write!(
                f,
                "the kernel module nvidia-fs is loaded but {} is not there, in which state libcufile may close \
                 standard input; map the device files /dev/nvidia-fs* into the container",
                path.display()
            ),
            Self::DriverOpen { library, code, cuda } => {
                let cause = failure::Cause::CuFile { code: *code, cuda: *cuda };
                write!(f, "cuFileDriverOpen of {library} failed with {cause}; see cufile.log")
            }
            Self::TimedOut { library, after } => write!(
                f,
                "cuFileDriverOpen of {library} did not answer within {} s and was abandoned; see cufile.log",
                after.as_secs_f32()
            ),
            Self::NoThread { why } => write!(f, "cuFileDriverOpen could not be watched: {why}; restart the process"),
        }
    }
}

impl std::error::Error for Absent {}

/// Where the kernel module nvidia-fs says how many block devices it serves and counts reads.
pub(super) fn nvidia_fs(root: &Path, name: &str) -> PathBuf {
    root.join("proc/driver/nvidia-fs").join(name)
}

/// The checks of the system below `root` (`/`, but for tests).
pub(super) fn check(root: &Path) -> Result<(), Absent> {
    let modules = root.join("proc/modules");
    // Opened, not just looked at: it may be there and refuse.
    if std::fs::read(&modules).is_err() {
        return Err(Absent::NoModules { path: modules });
    }
    let udev = root.join("run/udev");
    if !udev.is_dir() {
        return Err(Absent::NoUdev { path: udev });
    }
    let loaded = std::fs::read_to_string(nvidia_fs(root, "devcount"))
        .is_ok_and(|text| text.trim().parse::<u64>().is_ok_and(|count| count > 0));
    let device = root.join("dev/nvidia-fs0");
    if loaded && !device.exists() {
        return Err(Absent::NoDeviceFiles { path: device });
    }
    Ok(())
}
