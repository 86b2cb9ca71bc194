//! The stand-in for libcufile: compiled once per source, loaded by path, controlled by safe
//! functions.
//!
//! ```text
//! tests/standin/cufile.rs ──rustc──► <target>/tmp/standin-cufile-<hash>.so ──┬── StandIn::shared(): this very file
//!                                                                            └── StandIn::own(): a copy, with its own state
//! ```
//!
//! The code under test loads [`StandIn::path`] itself (by its options, or `$FEEDLINE_CUFILE`) and
//! so shares the library with the control functions: the dynamic linker loads a file once.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unsafe_code)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::collections::hash_map::DefaultHasher;
use std::ffi::c_int;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

const SOURCE: &str = include_str!("../standin/cufile.rs");

/// Behaviour of the stand-in's driver when opened.
#[derive(Clone, Copy, Debug)]
pub enum Open {
    Well,
    /// With this code.
    Fails(i32),
    /// For ever.
    Hangs,
    /// Descriptor 0 is closed; then it opens (0) or fails with this code.
    ClosesStdin(i32),
}

/// Reported route of aligned reads.
#[derive(Clone, Copy, Debug)]
pub enum Route {
    P2p = 0,
    NvidiaFs = 1,
    Host = 2,
}

/// Object of a registration or deregistration.
#[derive(Clone, Copy, Debug)]
pub enum Register {
    File = 3,
    Buffer = 4,
    BufferBack = 5,
}

/// Live objects, and calls made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub files: i64,
    pub buffers: i64,
    pub users: i64,
    pub reads: i64,
    pub opens: i64,
    pub closes: i64,
}

/// A folder for what tests build, on a real file system.
pub fn folder() -> PathBuf {
    let folder = match option_env!("CARGO_TARGET_TMPDIR") {
        Some(folder) => PathBuf::from(folder),
        // Unit tests: <target>/<profile>/deps/<test> → <target>/tmp.
        None => {
            let test = std::env::current_exe().unwrap();
            test.ancestors().nth(3).unwrap().join("tmp")
        }
    };
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A name that no other process or thread uses.
fn unique(folder: &Path, name: &str) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let process = std::process::id();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{name}-{process}-{number}"))
}

/// Compiles the stand-in with these `--cfg`s, unless that was done already. Several processes may
/// do so at once: each compiles to a name of its own, the last rename wins, and all results are the
/// same. The threads of one take turns.
pub fn compile(cfgs: &[&str]) -> PathBuf {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut hash = DefaultHasher::new();
    (SOURCE, cfgs, env!("CARGO_PKG_VERSION")).hash(&mut hash);
    let folder = folder();
    let path = folder.join(format!("standin-cufile-{:016x}.so", hash.finish()));
    if path.exists() {
        return path;
    }
    let fresh = unique(&folder, "standin-cufile-fresh");
    // This file is also a part of a crate below `crates/`, with another folder.
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|folder| folder.join("tests/standin/cufile.rs"))
        .find(|source| source.exists())
        .unwrap();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition=2024", "--crate-type=cdylib"]);
    rustc.args(["--crate-name=cufile", "-Cstrip=symbols"]);
    rustc.arg("-Clink-arg=-Wl,-soname,libcufile.so.0");
    rustc.arg("-o").arg(&fresh).arg(&source);
    for cfg in cfgs {
        rustc.args(["--cfg", cfg]);
    }
    let output = rustc.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{rustc:?}: {said}");
    std::fs::rename(&fresh, &path).unwrap();
    path
}

/// The stand-in, loaded. It stays loaded to the end of the process.
pub struct StandIn {
    path: PathBuf,
    own: bool,
    reset: extern "C" fn(),
    set: extern "C" fn(c_int, c_int),
    fail: extern "C" fn(u64, i64, c_int),
    fail_register: extern "C" fn(c_int, u64, c_int),
    count: extern "C" fn(c_int) -> i64,
    text: unsafe extern "C" fn(c_int, *mut u8, usize) -> usize,
}

impl StandIn {
    /// One state for the whole process: for tests that are alone in theirs.
    pub fn shared() -> Self {
        Self::load(compile(&[]), false)
    }

    /// A library of its own, with a state that no other test sees.
    pub fn own() -> Self {
        Self::own_with(&[])
    }

    /// The same, compiled with these `--cfg`s.
    pub fn own_with(cfgs: &[&str]) -> Self {
        let copy = unique(&folder(), "standin-cufile-own");
        std::fs::copy(compile(cfgs), &copy).unwrap();
        Self::load(copy, true)
    }

    fn load(path: PathBuf, own: bool) -> Self {
        // SAFETY: our own library, whose initialisers are those of Rust's `std`; it is never
        // unloaded.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.unwrap();
        let library = std::mem::ManuallyDrop::new(library);
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type of the field is that of the function in tests/standin/cufile.rs.
                *unsafe { library.get($name) }.unwrap()
            };
        }
        Self {
            reset: symbol!("standin_cufile_reset"),
            set: symbol!("standin_cufile_set"),
            fail: symbol!("standin_cufile_fail_read"),
            fail_register: symbol!("standin_cufile_fail_register"),
            count: symbol!("standin_cufile_count"),
            text: symbol!("standin_cufile_text"),
            path,
            own,
        }
    }

    /// What to load.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Resets the state.
    pub fn reset(&self) {
        (self.reset)();
    }

    /// The version that it tells; `None`: none.
    pub fn version(&self, version: Option<(i32, i32)>) {
        let number = version.map_or(-1, |(major, minor)| major * 1000 + minor * 10);
        (self.set)(0, number);
    }

    pub fn open(&self, open: Open) {
        let (mode, code) = match open {
            Open::Well => (0, 0),
            Open::Fails(code) => (1, code),
            Open::Hangs => (2, 0),
            Open::ClosesStdin(code) => (3, code),
        };
        (self.set)(2, code);
        (self.set)(1, mode);
    }

    /// Sets the reported route of aligned reads to a GPU.
    pub fn route(&self, gpu: usize, route: Route) {
        (self.set)(100 + gpu as c_int, route as c_int);
    }

    /// The next such call answers that code.
    pub fn fail_register(&self, what: Register, code: i32) {
        self.fail_register_after(what, 0, code);
    }

    /// The same of the call after `skip` more.
    pub fn fail_register_after(&self, what: Register, skip: u64, code: i32) {
        (self.fail_register)(what as c_int, skip, code);
    }

    /// Read number `call` (from 0) returns -1 and this errno.
    pub fn fail_read_os(&self, call: u64, errno: i32) {
        (self.fail)(call, -1, errno);
    }

    /// Read number `call` (from 0) returns minus this code of cuFile.
    pub fn fail_read(&self, call: u64, code: i32) {
        (self.fail)(call, -i64::from(code), 0);
    }

    /// Read number `call` (from 0) reads at most this many bytes.
    pub fn short_read(&self, call: u64, bytes: u64) {
        (self.fail)(call, bytes as i64, 0);
    }

    /// Reads wait within the library until they are let go.
    pub fn hold_reads(&self, hold: bool) {
        (self.set)(6, hold.into());
    }

    /// Reads that came since they are held.
    pub fn held(&self) -> i64 {
        (self.count)(6)
    }

    /// How many GPUs the statistics have; each has the UUID of 16 bytes of its number plus one.
    pub fn gpus(&self, count: usize) {
        (self.set)(7, count as c_int);
    }

    /// Whether the driver, from 1.16 on, keeps a context on every GPU while it is open, as the real
    /// one does.
    pub fn contexts(&self, keeps: bool) {
        (self.set)(10, keeps.into());
    }

    /// Where the array of GPUs starts in the statistics, other than in that version.
    pub fn gpus_at(&self, offset: usize) {
        (self.set)(8, offset as c_int);
    }

    pub fn set_level(&self, level: i32) {
        (self.set)(9, level);
    }

    pub fn level(&self) -> i64 {
        (self.count)(7)
    }

    pub fn counts(&self) -> Counts {
        let count = |what| (self.count)(what);
        Counts {
            files: count(0),
            buffers: count(1),
            users: count(2),
            reads: count(3),
            opens: count(4),
            closes: count(5),
        }
    }

    /// The calls so far: `open`, `close`, `file+`, `file-`, `buffer+`, `buffer-`, `stats+`,
    /// `stats-`.
    pub fn trace(&self) -> Vec<String> {
        self.lines(0)
    }

    /// Violations: acts that a correct caller never does.
    pub fn violations(&self) -> Vec<String> {
        self.lines(1)
    }

    fn lines(&self, what: c_int) -> Vec<String> {
        let mut text = vec![0; 1 << 20];
        // SAFETY: it writes no more than the room that it is told.
        let len = unsafe { (self.text)(what, text.as_mut_ptr(), text.len()) };
        text.truncate(len);
        let text = String::from_utf8_lossy(&text);
        text.lines().map(String::from).collect()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        if self.own {
            // It stays loaded; what has loaded it stays usable.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
