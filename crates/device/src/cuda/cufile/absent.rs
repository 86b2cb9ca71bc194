//! Reasons not to use GPUDirect Storage, and the checks before libcufile may run.
//!
//! ```text
//! can any read be direct? (Auto) ─► library found ─► version ─► /proc/modules ─► /run/udev
//!     ─► nvidia-fs whole or absent ─► cuFileDriverOpen (watched)
//! ```
//!
//! Each check prevents a failure of the library. Without `/proc/modules`, opening the library spins
//! for ever on a core. Without udev, the library opens but refuses every file. If the module
//! nvidia-fs is loaded but its device files are absent (in a container without them), the library
//! may close descriptor 0, perhaps repeatedly, for little gain.

use super::failure;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The oldest supported version of cuFile, which came with CUDA 12.0.
pub(super) const OLDEST: (u32, u32) = (1, 5);

/// The reason not to use GPUDirect Storage, displayed as one sentence that ends with a remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// No library could be loaded.
    NoLibrary { tried: Vec<String> },
    /// A library that is not cuFile, or an incomplete one.
    NoSymbol {
        library: String,
        symbol: &'static str,
    },
    /// The library is older than [`OLDEST`].
    VersionTooOld { library: String, found: (u32, u32) },
    /// The list of kernel modules cannot be read.
    NoModules { path: PathBuf },
    /// udev's folder is absent.
    NoUdev { path: PathBuf },
    /// The kernel module nvidia-fs is loaded, but its device files are absent.
    NoDeviceFiles { path: PathBuf },
    /// `cuFileDriverOpen` failed with this `CUfileOpError` and `CUresult`.
    DriverOpen {
        library: String,
        code: i32,
        cuda: i32,
    },
    /// `cuFileDriverOpen` did not return, now or earlier in this process.
    TimedOut { library: String, after: Duration },
    /// cuFile cannot bypass host memory here.
    HostOnly,
    /// The thread that opens the driver failed to start, or panicked.
    NoThread { why: String },
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { tried } => write!(
                f,
                "libcufile was not found (tried {}); install CUDA's GPUDirect Storage or \
                 PyPI's nvidia-cufile, or name the library in FEEDLINE_CUFILE",
                tried.join(", ")
            ),
            Self::NoSymbol { library, symbol } => {
                write!(
                    f,
                    "{library} lacks {symbol}; name another libcufile in FEEDLINE_CUFILE"
                )
            }
            Self::VersionTooOld { library, found } => write!(
                f,
                "{library} is cuFile {}.{}; version {}.{} (CUDA 12.0) or later is needed",
                found.0, found.1, OLDEST.0, OLDEST.1
            ),
            Self::NoModules { path } => write!(
                f,
                "{} cannot be read, and libcufile would loop forever without it; use a \
                 kernel with modules and a full /proc",
                path.display()
            ),
            Self::NoUdev { path } => write!(
                f,
                "{} is absent, and libcufile refuses every file without it; in a container \
                 mount it from the host",
                path.display()
            ),
            Self::NoDeviceFiles { path } => write!(
                f,
                "the kernel module nvidia-fs is loaded but {} is absent, so libcufile could \
                 close standard input; map the device files /dev/nvidia-fs* into the \
                 container",
                path.display()
            ),
            Self::DriverOpen {
                library,
                code,
                cuda,
            } => {
                let cause = failure::FailureCause::CuFile {
                    code: *code,
                    cuda: *cuda,
                };
                write!(
                    f,
                    "cuFileDriverOpen of {library} failed with {cause}; see cufile.log"
                )
            }
            Self::TimedOut { library, after } => write!(
                f,
                "cuFileDriverOpen of {library} did not return within {} s and was abandoned; \
                 see cufile.log",
                after.as_secs_f32()
            ),
            Self::HostOnly => f.write_str(
                "cuFile would go through host memory: the kernel module nvidia-fs is not \
                 loaded, and peer-to-peer DMA is not allowed; load the module, or set \
                 \"use_pci_p2pdma\" in cufile.json or CUFILE_USE_PCIP2PDMA=true",
            ),
            Self::NoThread { why } => write!(
                f,
                "cuFileDriverOpen could not be watched: {why}; restart the process"
            ),
        }
    }
}

impl std::error::Error for Absent {}

/// Path of a statistics file of the kernel module nvidia-fs: `devcount` holds the number of its
/// block devices, `stats` the counts of reads.
pub(super) fn nvidia_fs(root: &Path, name: &str) -> PathBuf {
    root.join("proc/driver/nvidia-fs").join(name)
}

/// Whether cuFile could bypass host memory: by the kernel module nvidia-fs, or by peer-to-peer DMA
/// if its configuration allows that. Checked first, because from 1.16 on opening cuFile costs a
/// context on every visible GPU.
pub(super) fn may_be_direct(root: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> bool {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    let settings =
        set("CUFILE_ENV_PATH_JSON").map_or_else(|| root.join("etc/cufile.json"), PathBuf::from);
    nvidia_fs(root, "").is_dir()
        || set("CUFILE_USE_PCIP2PDMA").is_some_and(|value| {
            !["0", "false", "no", "off"]
                .iter()
                .any(|off| value.eq_ignore_ascii_case(off))
        })
        || std::fs::read_to_string(settings).is_ok_and(|text| allows_p2p(&text))
}

/// Whether the text of a `cufile.json` (comments allowed) enables `use_pci_p2pdma` for any kind of
/// storage.
fn allows_p2p(text: &str) -> bool {
    let plain: String = text
        .lines()
        .map(|line| line.split_once("//").map_or(line, |(code, _)| code))
        .collect();
    let values = plain.split("\"use_pci_p2pdma\"").skip(1);
    { values }.any(|rest| {
        rest.trim_start()
            .strip_prefix(':')
            .is_some_and(|rest| rest.trim_start().starts_with("true"))
    })
}

/// Checks the system below `root` (`/` except in tests).
pub(super) fn check(root: &Path) -> Result<(), Absent> {
    let modules = root.join("proc/modules");
    // Read the file instead of testing that it exists: it may exist but be unreadable.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_or_environment_allow_peer_to_peer_dma() {
        let root = std::env::temp_dir().join(format!("feedline-absent-{}", std::process::id()));
        let settings = root.join("settings.json");
        std::fs::create_dir_all(&root).unwrap();
        let ask = |name: &'static str, value: &str| {
            let value = OsString::from(value);
            may_be_direct(&root, &|asked| (asked == name).then(|| value.clone()))
        };
        assert!(!ask("", ""));
        for (value, allowed) in [
            ("true", true),
            ("1", true),
            ("false", false),
            ("0", false),
            ("", false),
        ] {
            assert_eq!(ask("CUFILE_USE_PCIP2PDMA", value), allowed, "{value:?}");
        }
        let texts = [
            ("{ \"properties\": { \"use_pci_p2pdma\": true } }", true),
            (
                "{ \"block\": { \"nvme\": {\n // NVMe\n \"use_pci_p2pdma\" :\n true } } }",
                true,
            ),
            (
                "{ \"a\": { \"use_pci_p2pdma\": false }, \"b\": { \"use_pci_p2pdma\": true } }",
                true,
            ),
            ("{ \"properties\": { \"use_pci_p2pdma\": false } }", false),
            (
                "{ \"properties\": {\n // \"use_pci_p2pdma\": true\n } }",
                false,
            ),
            ("", false),
        ];
        for (text, allowed) in texts {
            std::fs::write(&settings, text).unwrap();
            assert_eq!(
                ask("CUFILE_ENV_PATH_JSON", settings.to_str().unwrap()),
                allowed,
                "{text}"
            );
        }
        std::fs::create_dir_all(nvidia_fs(&root, "")).unwrap();
        assert!(ask("", ""), "nvidia-fs is loaded");
        std::fs::remove_dir_all(&root).unwrap();
    }
}
