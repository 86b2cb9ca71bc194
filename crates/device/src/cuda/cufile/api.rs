//! Finds libcufile and its symbols. All calls into the library are in this file.
//!
//! ```text
//! $FEEDLINE_CUFILE alone, if set
//! libcufile.so.0, libcufile.so          through the dynamic linker, which also finds a loaded library
//! $CUDA_HOME, $CUDA_PATH, /usr/local/cuda          lib64, lib, targets/…/lib
//! $VIRTUAL_ENV, $CONDA_PREFIX                      lib, lib/python3.*/site-packages/nvidia/{cu13,cufile}/lib
//! ```
//!
//! The library stays loaded until the process ends: it has its own threads and handlers, and
//! `dlclose` would unmap their code. Waiting, checks and state are in `mod.rs`.

#![allow(unsafe_code)]

use super::absent::Absent;
use super::failure::{FailureCause, outcome};
use super::stats;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::ffi::{OsStr, OsString, c_int, c_void};
use std::path::{Path, PathBuf};

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Status {
    code: c_int,
    cuda: c_int,
}

impl Status {
    fn ok(self) -> Result<(), FailureCause> {
        if self.code == 0 {
            Ok(())
        } else {
            Err(FailureCause::CuFile {
                code: self.code,
                cuda: self.cuda,
            })
        }
    }
}

/// `CUfileDescr_t` for a Linux descriptor.
#[repr(C)]
struct Descr {
    kind: c_int,
    handle: Union,
    ops: *const c_void,
}

#[repr(C)]
union Union {
    fd: c_int,
    whole: *mut c_void,
}

const OPAQUE_FD: c_int = 1;

/// cuFile's handle of a registered file.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawHandle(usize);

type Plain = unsafe extern "C" fn() -> Status;

/// The symbols of the library. Symbols that reads do not need are optional.
#[derive(Debug)]
pub(super) struct Api {
    /// Name or path of the library, as loaded.
    pub(super) library: String,
    open: Plain,
    register_file: unsafe extern "C" fn(*mut *mut c_void, *mut Descr) -> Status,
    deregister_file: unsafe extern "C" fn(*mut c_void),
    register_buffer: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    deregister_buffer: unsafe extern "C" fn(*const c_void) -> Status,
    read: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize,
    close: Option<Plain>,
    version: Option<unsafe extern "C" fn(*mut c_int) -> Status>,
    set_level: Option<unsafe extern "C" fn(c_int) -> Status>,
    level: Option<unsafe extern "C" fn(*mut c_int) -> Status>,
    start: Option<Plain>,
    stop: Option<Plain>,
    level3: Option<unsafe extern "C" fn(*mut c_void) -> Status>,
}

/// A function of the library, if present.
///
/// # Safety
///
/// `F` is a function pointer type with exactly the signature of the symbol in cuFile's header.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller promises the type; the copied pointer stays valid, since the library is
    // never unloaded.
    unsafe { library.get::<F>(name).ok().map(|symbol| *symbol) }
}

impl Api {
    /// Loads the first available library. If `named` is set, tries only that library.
    pub(super) fn load(named: Option<&Path>) -> Result<Self, Absent> {
        let candidates = match named {
            Some(path) => vec![path.as_os_str().to_owned()],
            None => candidates(&|name| std::env::var_os(name), &entries),
        };
        let mut tried = Vec::new();
        for name in candidates {
            let shown = name.to_string_lossy().into_owned();
            // SAFETY: loading runs the library's initialisers, on the assumption that the dynamic
            // linker or the user names a libcufile. It is never unloaded, so its terminators run
            // only at the end of the process.
            match unsafe { Library::open(Some(&name), RTLD_LAZY | RTLD_LOCAL) } {
                Ok(library) => return Self::resolve(library, shown),
                Err(error) if Path::new(&name).exists() => {
                    // The dynamic linker's message is the error's source.
                    let words = std::error::Error::source(&error)
                        .map_or_else(|| error.to_string(), ToString::to_string);
                    tried.push(format!("{shown}: {words}"));
                }
                Err(_) => tried.push(shown),
            }
        }
        Err(Absent::NoLibrary { tried })
    }

    fn resolve(library: Library, shown: String) -> Result<Self, Absent> {
        // Never unloaded, used or not.
        let library = std::mem::ManuallyDrop::new(library);
        macro_rules! optional {
            ($name:literal) => {
                // SAFETY: the field's type matches the symbol in cufile.h of 1.11 to 1.20.
                unsafe { symbol(&library, $name) }
            };
        }
        macro_rules! needed {
            ($name:literal) => {
                optional!($name).ok_or_else(|| Absent::NoSymbol {
                    library: shown.clone(),
                    symbol: $name,
                })?
            };
        }
        Ok(Self {
            open: needed!("cuFileDriverOpen"),
            register_file: needed!("cuFileHandleRegister"),
            deregister_file: needed!("cuFileHandleDeregister"),
            register_buffer: needed!("cuFileBufRegister"),
            deregister_buffer: needed!("cuFileBufDeregister"),
            read: needed!("cuFileRead"),
            close: optional!("cuFileDriverClose_v2").or(optional!("cuFileDriverClose")),
            version: optional!("cuFileGetVersion"),
            set_level: optional!("cuFileSetStatsLevel"),
            level: optional!("cuFileGetStatsLevel"),
            start: optional!("cuFileStatsStart"),
            stop: optional!("cuFileStatsStop"),
            level3: optional!("cuFileGetStatsL3"),
            library: shown,
        })
    }

    /// Opens the driver. May hang, and may close foreign descriptors: see `watch`.
    pub(super) fn open(&self) -> Result<(), FailureCause> {
        // SAFETY: takes no argument; callable at any time, also repeatedly.
        unsafe { (self.open)() }.ok()
    }

    /// Undoes one [`Self::open`].
    pub(super) fn close(&self) -> Result<(), FailureCause> {
        // SAFETY: takes no argument; handles and buffers keep this table's owner alive, so none is
        // in use.
        self.close.map_or(Ok(()), |close| unsafe { close() }.ok())
    }

    /// Major and minor version; `None` if the library does not report it.
    pub(super) fn version(&self) -> Option<(u32, u32)> {
        let mut number: c_int = 0;
        // SAFETY: writes one int to a live local.
        unsafe { (self.version?)(&raw mut number) }.ok().ok()?;
        let number = u32::try_from(number).ok()?;
        Some((number / 1000, number % 1000 / 10))
    }

    /// Registers a descriptor that stays open until [`Self::deregister_file`].
    pub(super) fn register_file(&self, fd: BorrowedFd<'_>) -> Result<RawHandle, FailureCause> {
        let mut descr = Descr {
            kind: OPAQUE_FD,
            handle: Union {
                whole: std::ptr::null_mut(),
            },
            ops: std::ptr::null(),
        };
        descr.handle.fd = fd.as_raw_fd();
        let mut handle = std::ptr::null_mut();
        // SAFETY: both pointers are to live locals with the layouts of cufile.h. There is no table
        // of operations, so the descriptor counts as an ordinary file.
        unsafe { (self.register_file)(&raw mut handle, &raw mut descr) }.ok()?;
        Ok(RawHandle(handle.expose_provenance()))
    }

    /// Deregisters a file.
    ///
    /// # Safety
    ///
    /// The handle comes from [`Self::register_file`] of this table and is still registered; no read
    /// is using it.
    pub(super) unsafe fn deregister_file(&self, handle: RawHandle) {
        // SAFETY: the caller's promise.
        unsafe { (self.deregister_file)(std::ptr::with_exposed_provenance_mut(handle.0)) }
    }

    /// Registers (pins) device memory. The library refuses addresses outside of the device.
    pub(super) fn register_buffer(&self, address: u64, len: usize) -> Result<(), FailureCause> {
        // SAFETY: registration does not access the memory; only reads do, and they are unsafe.
        unsafe { (self.register_buffer)(pointer(address)?, len, 0) }.ok()
    }

    /// Undoes [`Self::register_buffer`].
    pub(super) fn deregister_buffer(&self, address: u64) -> Result<(), FailureCause> {
        // SAFETY: the library refuses an unregistered address.
        unsafe { (self.deregister_buffer)(pointer(address)?) }.ok()
    }

    /// Reads into device memory.
    ///
    /// # Safety
    ///
    /// The handle comes from [`Self::register_file`] of this table and is registered. The `len`
    /// bytes at `address + device_offset` are memory without another user until the call returns.
    pub(super) unsafe fn read(
        &self,
        handle: RawHandle,
        address: u64,
        len: usize,
        file_offset: i64,
        device_offset: i64,
    ) -> Result<usize, FailureCause> {
        let handle = std::ptr::with_exposed_provenance_mut(handle.0);
        // SAFETY: the caller's promise.
        let returned =
            unsafe { (self.read)(handle, pointer(address)?, len, file_offset, device_offset) };
        // Directly after the call, because any other call may change errno.
        let errno = if returned == -1 {
            std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
        } else {
            0
        };
        outcome(returned, len, errno)
    }

    /// Whether all statistics symbols are present.
    pub(super) fn has_statistics(&self) -> bool {
        self.set_level.is_some() && self.start.is_some() && self.level3.is_some()
    }

    /// Raises the statistics level to 3 (per GPU), unless it is higher already.
    pub(super) fn raise_level(&self) -> bool {
        let mut level: c_int = 0;
        // SAFETY: writes one int to a live local.
        let told = self
            .level
            .is_some_and(|get| unsafe { get(&raw mut level) }.ok().is_ok());
        // SAFETY: takes a number.
        (told && level >= 3)
            || self
                .set_level
                .is_some_and(|set| unsafe { set(3) }.ok().is_ok())
    }

    /// Starts counting. The driver must be open.
    pub(super) fn start_statistics(&self) -> bool {
        // SAFETY: takes no argument; returns an error code if no driver is open.
        self.start
            .is_some_and(|start| unsafe { start() }.ok().is_ok())
    }

    /// Stops counting.
    pub(super) fn stop_statistics(&self) {
        if let Some(stop) = self.stop {
            // SAFETY: takes no argument.
            let _ = unsafe { stop() }.ok();
        }
    }

    /// The output of `cuFileGetStatsL3`, written over a buffer filled with `stats::PATTERN`.
    pub(super) fn statistics(&self) -> Option<Vec<u64>> {
        let mut room = vec![stats::PATTERN; stats::ROOM];
        // SAFETY: the buffer is thirteen times as large as the structure of 1.20, and aligned for
        // its 8-byte counters.
        unsafe { (self.level3?)(room.as_mut_ptr().cast()) }
            .ok()
            .ok()?;
        Some(room)
    }
}

/// A device address as cuFile takes it; this process never dereferences it.
fn pointer(address: u64) -> Result<*mut c_void, FailureCause> {
    let address = usize::try_from(address).map_err(|_| {
        FailureCause::Refused(format!(
            "device address {address:#x} does not fit a host address"
        ))
    })?;
    Ok(std::ptr::with_exposed_provenance_mut(address))
}

/// Names and paths to try, in order. Folders whose names vary come from `list`.
fn candidates(
    variable: &dyn Fn(&str) -> Option<OsString>,
    list: &dyn Fn(&Path) -> Vec<PathBuf>,
) -> Vec<OsString> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(named) = set("FEEDLINE_CUFILE") {
        return vec![named];
    }
    let mut out: Vec<OsString> = vec!["libcufile.so.0".into(), "libcufile.so".into()];
    let mut folders = Vec::new();
    let default = Some("/usr/local/cuda".into());
    for root in [set("CUDA_HOME"), set("CUDA_PATH"), default]
        .into_iter()
        .flatten()
        .map(PathBuf::from)
    {
        folders.extend([root.join("lib64"), root.join("lib")]);
        folders.extend(
            list(&root.join("targets"))
                .into_iter()
                .map(|target| target.join("lib")),
        );
    }
    for root in [set("VIRTUAL_ENV"), set("CONDA_PREFIX")]
        .into_iter()
        .flatten()
        .map(PathBuf::from)
    {
        let lib = root.join("lib");
        let packages: Vec<_> = list(&lib)
            .into_iter()
            .filter(|path| {
                path.file_name()
                    .and_then(OsStr::to_str)
                    .is_some_and(|name| name.starts_with("python3"))
            })
            .collect();
        folders.push(lib);
        for folder in packages
            .into_iter()
            .map(|path| path.join("site-packages/nvidia"))
        {
            folders.extend([folder.join("cu13/lib"), folder.join("cufile/lib")]);
        }
    }
    out.extend(
        folders
            .into_iter()
            .map(|folder| folder.join("libcufile.so.0").into_os_string()),
    );
    let mut seen = std::collections::HashSet::new();
    out.retain(|path| seen.insert(path.clone()));
    out
}

/// Entries of a folder, sorted by name; empty if it cannot be listed.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut out: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    out.sort();
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_in_cuda_and_python_folders() {
        let variable = |name: &str| match name {
            "CUDA_HOME" => Some("/opt/cuda".into()),
            "CUDA_PATH" => Some("/usr/local/cuda".into()),
            "VIRTUAL_ENV" => Some("/venv".into()),
            "CONDA_PREFIX" => Some("".into()),
            _ => None,
        };
        let list = |folder: &Path| match folder.to_str().unwrap() {
            "/opt/cuda/targets" => vec!["/opt/cuda/targets/sbsa-linux".into()],
            "/venv/lib" => vec!["/venv/lib/python3.12".into(), "/venv/lib/perl5".into()],
            _ => vec![],
        };
        let expected = [
            "libcufile.so.0",
            "libcufile.so",
            "/opt/cuda/lib64/libcufile.so.0",
            "/opt/cuda/lib/libcufile.so.0",
            "/opt/cuda/targets/sbsa-linux/lib/libcufile.so.0",
            "/usr/local/cuda/lib64/libcufile.so.0",
            "/usr/local/cuda/lib/libcufile.so.0",
            "/venv/lib/libcufile.so.0",
            "/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcufile.so.0",
            "/venv/lib/python3.12/site-packages/nvidia/cufile/lib/libcufile.so.0",
        ];
        assert_eq!(candidates(&variable, &list), expected.map(OsString::from));
    }

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let variable = |name: &str| (name == "FEEDLINE_CUFILE").then(|| "/x/libcufile.so".into());
        assert_eq!(candidates(&variable, &|_| vec![]), ["/x/libcufile.so"]);
        let empty = |name: &str| (name == "FEEDLINE_CUFILE").then(OsString::new);
        assert_eq!(candidates(&empty, &|_| vec![])[0], "libcufile.so.0");
    }

    #[test]
    fn structures_match_cufile_h() {
        assert_eq!((size_of::<Status>(), size_of::<Descr>()), (8, 24));
        assert_eq!(
            (
                std::mem::offset_of!(Descr, handle),
                std::mem::offset_of!(Descr, ops)
            ),
            (8, 16)
        );
        assert!(size_of::<u64>() * stats::ROOM > 5112);
    }
}
