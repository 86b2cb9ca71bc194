//! The stand-in for libnvidia-ml: compiled once per source, loaded by path, controlled by safe functions.
//!
//! ```text
//! tests/standin/nvml.rs ──rustc──► <target>/tmp/standin-nvml-<hash>.so ──copy──► StandIn::new(): a state of its own
//!                                                                  └──copy, names changed──► StandIn::without(…)
//! ```
//!
//! What is tested loads [`StandIn::path`] itself and so gets the library that the control functions speak to: the dynamic
//! linker loads a file once.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unsafe_code)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::collections::hash_map::DefaultHasher;
use std::ffi::{c_int, c_uint};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

const SOURCE: &str = include_str!("../standin/nvml.rs");

/// Values of a GPU. What is not set is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    Utilisation = 0,
    MemoryUtilisation = 1,
    Memory = 2,
    MemoryUsed = 3,
    MemoryReserved = 4,
    Generation = 5,
    GenerationSlot = 6,
    GenerationCard = 7,
    Width = 8,
    WidthMax = 9,
    TxKbS = 10,
    RxKbS = 11,
    Replays = 12,
    SmClock = 13,
    MemoryClock = 14,
    SmClockMax = 15,
    MemoryClockMax = 16,
    Reasons = 17,
    Temperature = 18,
    PowerMilliwatts = 19,
    PowerLimitMilliwatts = 20,
    Ecc = 21,
    EccCorrected = 22,
    EccUncorrected = 23,
    Mig = 24,
    Gpm = 25,
    EccPending = 28,
    MigPending = 29,
}

/// A folder for what tests build, on a real file system.
fn folder() -> PathBuf {
    let folder = match option_env!("CARGO_TARGET_TMPDIR") {
        Some(folder) => PathBuf::from(folder),
        // Unit tests: <target>/<profile>/deps/<test> → <target>/tmp.
        None => std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("tmp"),
    };
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A name that no other process or thread uses.
fn unique(folder: &Path, name: &str) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    folder.join(format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Compiles the stand-in, unless that was done already. Several processes may do so at once: each compiles to a name of
/// its own, the last rename wins, and all results are the same. The threads of one take turns.
fn compile() -> PathBuf {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut hash = DefaultHasher::new();
    (SOURCE, env!("CARGO_PKG_VERSION")).hash(&mut hash);
    let folder = folder();
    let path = folder.join(format!("standin-nvml-{:016x}.so", hash.finish()));
    if path.exists() {
        return path;
    }
    let fresh = unique(&folder, "standin-nvml-fresh");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/standin/nvml.rs");
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition=2024", "--crate-type=cdylib", "--crate-name=nvml", "-Cstrip=symbols", "-o"]);
    let output = rustc.arg(&fresh).arg(&source).output().unwrap();
    assert!(output.status.success(), "{rustc:?}: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&fresh, &path).unwrap();
    path
}

/// Changes the last letter of an exported name, so that nobody finds it.
fn hide(library: &mut [u8], name: &str) {
    let whole = [b"\0", name.as_bytes(), b"\0"].concat();
    let mut hidden = 0;
    for start in 0..library.len().saturating_sub(whole.len()) {
        if library[start..].starts_with(&whole) {
            library[start + whole.len() - 2] = b'!';
            hidden += 1;
        }
    }
    assert!(hidden > 0, "the stand-in has no {name}");
}

/// The stand-in, loaded, with a state that no other test sees. It stays loaded to the end of the process.
pub struct StandIn {
    path: PathBuf,
    gpu: extern "C" fn(c_uint, c_uint, c_uint) -> c_int,
    set: extern "C" fn(c_int, c_int, i64),
    metric: extern "C" fn(c_uint, f64, c_int),
    name: unsafe extern "C" fn(c_int, *const u8, usize),
    fail: unsafe extern "C" fn(*const u8, usize, c_int),
    count: extern "C" fn(c_int) -> i64,
    violations: unsafe extern "C" fn(*mut u8, usize) -> usize,
}

impl StandIn {
    /// With all functions, without a GPU.
    pub fn new() -> Self {
        Self::without(&[])
    }

    /// Without these functions.
    pub fn without(names: &[&str]) -> Self {
        let mut bytes = std::fs::read(compile()).unwrap();
        names.iter().for_each(|name| hide(&mut bytes, name));
        let path = unique(&folder(), "standin-nvml-own");
        std::fs::write(&path, bytes).unwrap();
        // SAFETY: our own library, whose initialisers are those of Rust's `std`; it is never unloaded.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.unwrap();
        let library = std::mem::ManuallyDrop::new(library);
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type of the field is that of the function in tests/standin/nvml.rs.
                *unsafe { library.get($name) }.unwrap()
            };
        }
        Self {
            gpu: symbol!("standin_nvml_gpu"),
            set: symbol!("standin_nvml_set"),
            metric: symbol!("standin_nvml_metric"),
            name: symbol!("standin_nvml_name"),
            fail: symbol!("standin_nvml_fail"),
            count: symbol!("standin_nvml_count"),
            violations: symbol!("standin_nvml_violations"),
            path,
        }
    }

    /// What to load.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// One more GPU, which supports nothing yet: domain, bus, device.
    pub fn gpu(&self, [domain, bus, device]: [u32; 3], name: &str) -> usize {
        let index = (self.gpu)(domain, bus, device);
        // SAFETY: it reads the text.
        unsafe { (self.name)(index, name.as_ptr(), name.len()) };
        index as usize
    }

    pub fn set(&self, gpu: usize, what: Value, value: i64) {
        (self.set)(gpu as c_int, what as c_int, value);
    }

    /// A metric of the first GPU.
    pub fn metric(&self, id: u32, value: f64, code: i32) {
        (self.metric)(id, value, code);
    }

    pub fn driver(&self, version: &str) {
        // SAFETY: it reads the text.
        unsafe { (self.name)(-1, version.as_ptr(), version.len()) };
    }

    /// The function of that name answers this code from now on; 0: as it should.
    pub fn fail(&self, name: &str, code: i32) {
        // SAFETY: it reads the text.
        unsafe { (self.fail)(name.as_ptr(), name.len(), code) };
    }

    /// How many `nvmlInit_v2` have had no `nvmlShutdown`.
    pub fn users(&self) -> i64 {
        (self.count)(0)
    }

    /// Samples that were not given back.
    pub fn samples(&self) -> i64 {
        (self.count)(1)
    }

    /// Calls so far.
    pub fn calls(&self) -> i64 {
        (self.count)(2)
    }

    /// What a correct caller never does, and was done.
    pub fn violations(&self) -> Vec<String> {
        let mut text = vec![0; 1 << 16];
        // SAFETY: it writes no more than the room that it is told.
        let len = unsafe { (self.violations)(text.as_mut_ptr(), text.len()) };
        text.truncate(len);
        String::from_utf8_lossy(&text).lines().map(String::from).collect()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        // It stays loaded; what has loaded it stays usable.
        let _ = std::fs::remove_file(&self.path);
    }
}
