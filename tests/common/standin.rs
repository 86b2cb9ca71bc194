//! The stand-in for `libcuda.so` (`tests/standin/cuda.rs`): built once, loaded for the life of the
//! process, with its controls as safe functions.
//!
//! ```text
//! cuda() ── rustc, once per source and compiler ──► target/tmp/libcuda-standin-HASH.so ── dlopen, SONAME libcuda.so
//!    └─► session(config) ── the only one of the process ──► calls of cudarc ──► drop: no violation, or the test fails
//! ```
//!
//! cudarc asks for "libcuda.so" first, and the loader answers with what is loaded under that name,
//! also on machines with a real driver. So [`cuda`] comes before the first call of cudarc.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unsafe_code)]

use super::wait::DEADLINE;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{CStr, CString, OsString, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

const SOURCE: &str = include_str!("../standin/cuda.rs");

/// Code of a kernel: grid, block, and a pointer to each parameter.
pub type KernelFn =
    extern "C" fn(grid: *const u32, block: *const u32, params: *const *const c_void);

/// The loaded stand-in. [`Session`] has the controls of a session.
pub struct Standin {
    library: Library,
}

static SESSION: Mutex<()> = Mutex::new(());

/// The stand-in, built and loaded by the first caller.
pub fn cuda() -> &'static Standin {
    static LOADED: OnceLock<Standin> = OnceLock::new();
    LOADED.get_or_init(|| {
        let path = build("cuda", SOURCE, &["-C", "link-arg=-Wl,-soname,libcuda.so"]);
        // SAFETY: the library is ours; it has no initialisers.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Standin { library }
    })
}

/// Compiles a single-file cdylib and returns its absolute path. The same source and compiler give
/// the same file, so it is compiled once, by however many processes.
pub fn build(name: &str, source: &str, more: &[&str]) -> PathBuf {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let version = Command::new(&rustc).arg("-vV").output();
    let version = version.unwrap_or_else(|error| panic!("{rustc:?}: {error}"));
    let mut hasher = DefaultHasher::new();
    (source, &version.stdout, more).hash(&mut hasher);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("lib{name}-standin-{:016x}.so", hasher.finish()));
    if path.exists() {
        return path;
    }
    // A private folder, and a rename at the end: other processes see the whole file or none.
    let own = folder.join(format!("{name}-standin-{}", std::process::id()));
    std::fs::create_dir_all(&own).unwrap();
    let text = own.join(format!("{name}.rs"));
    let made = own.join("made.so");
    std::fs::write(&text, source).unwrap();
    let mut command = Command::new(&rustc);
    command.args(["--edition=2024", "-O", "--crate-type=cdylib"]);
    command.args(["-C", "panic=abort"]).args(more);
    let out = command.arg("-o").arg(&made).arg(&text).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{name} does not compile:\n{said}");
    std::fs::rename(&made, &path).unwrap();
    let _ = std::fs::remove_dir_all(&own);
    path
}

/// One GPU of a session.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub name: String,
    pub bytes: u64,
    /// As in `0000:3b:00.0`.
    pub bus: String,
}

impl Gpu {
    pub fn new(bytes: u64, bus: &str) -> Self {
        Self {
            name: "Stand-in GPU".into(),
            bytes,
            bus: bus.into(),
        }
    }
}

/// Configuration of a session's driver and devices.
#[derive(Clone, Debug)]
pub struct Config {
    pub devices: Vec<Gpu>,
    /// Below 0 the error of the question for it.
    pub driver_version: i32,
    /// Whether the exchange of capture modes needs a current context; what drivers do is not
    /// documented.
    pub mode_in_context: bool,
    /// Result of `cuInit`, if not 0 (100 = no device).
    pub init_error: u32,
    /// Result of `cuMemHostRegister`, if not 0.
    pub register_error: u32,
    /// Bytes per second of each copy; 0 = no delay.
    pub bandwidth: u64,
    /// Delay of each operation.
    pub latency: Duration,
    /// Hardware queues that the streams of one priority share; 0 = one for each stream.
    pub queues: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: vec![Gpu::new(4 << 30, "0000:3b:00.0")],
            driver_version: 12_040,
            mode_in_context: false,
            init_error: 0,
            register_error: 0,
            bandwidth: 0,
            latency: Duration::ZERO,
            queues: 0,
        }
    }
}

impl Config {
    /// A driver without a device.
    pub fn no_device() -> Self {
        Self {
            devices: Vec::new(),
            init_error: 100,
            ..Self::default()
        }
    }

    fn text(&self) -> String {
        let mut lines = vec![
            format!("driver_version={}", self.driver_version),
            format!("mode_in_context={}", u8::from(self.mode_in_context)),
            format!("init_error={}", self.init_error),
            format!("register_error={}", self.register_error),
            format!("bandwidth={}", self.bandwidth),
            format!("latency_us={}", self.latency.as_micros()),
            format!("queues={}", self.queues),
        ];
        let gpus = self
            .devices
            .iter()
            .map(|gpu| format!("device={}|{}|{}", gpu.name, gpu.bytes, gpu.bus));
        lines.extend(gpus);
        lines.join("\n")
    }
}

/// Live objects in the driver, and objects leaked because their release failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    pub retains: u64,
    pub streams: u64,
    pub events: u64,
    pub allocations: u64,
    pub bytes: u64,
    pub registrations: u64,
    pub registered_bytes: u64,
    pub host_allocations: u64,
    pub modules: u64,
    pub leaked: u64,
    pub leaked_bytes: u64,
}

impl Live {
    /// The number of objects, leaked ones included.
    pub fn things(&self) -> u64 {
        let on_devices = self.retains + self.streams + self.events + self.allocations;
        let others = self.registrations + self.host_allocations + self.modules;
        on_devices + others + self.leaked
    }
}

/// The stand-in from a reset to the drop, which fails the test if there are violations. One at a
/// time in a process.
pub struct Session {
    standin: &'static Standin,
    _lock: MutexGuard<'static, ()>,
    allowed: bool,
}

impl Deref for Session {
    type Target = Standin;

    fn deref(&self) -> &Standin {
        self.standin
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.finish();
        if !self.allowed && !std::thread::panicking() {
            let violations = self.violations().join("\n");
            assert!(violations.is_empty(), "violations:\n{violations}");
        }
    }
}

impl Session {
    /// The violations so far; from now on the test itself judges them.
    pub fn expect_violations(&mut self) -> Vec<String> {
        self.allowed = true;
        self.violations()
    }

    /// Ends the session and returns its violations, also those that only show at the end.
    pub fn end(mut self) -> Vec<String> {
        self.finish();
        self.expect_violations()
    }

    /// Operations that have not begun are dropped, so nothing runs once the session is over.
    fn finish(&self) {
        self.call::<extern "C" fn(), _>("standin_finish", |finish| finish());
    }
}

impl Standin {
    /// Waits for the process's other sessions, resets the stand-in and applies `config`.
    pub fn session(&'static self, config: Config) -> Session {
        let lock = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        let text = CString::new(config.text()).unwrap();
        self.call::<extern "C" fn(*const c_char), _>("standin_reset", |reset| reset(text.as_ptr()));
        Session {
            standin: self,
            _lock: lock,
            allowed: false,
        }
    }

    /// Calls a control by its type `F`, which must be the one that the stand-in declares.
    fn call<F: Copy, T>(&self, name: &str, run: impl FnOnce(F) -> T) -> T {
        // SAFETY: each caller in this file names the type of the stand-in's source; the library is
        // never closed.
        let function = unsafe { self.library.get::<F>(name.as_bytes()) };
        run(*function.unwrap_or_else(|error| panic!("{name}: {error}")))
    }

    fn text(&self, name: &str) -> String {
        type Give = extern "C" fn(*mut c_char, usize) -> usize;
        self.call::<Give, _>(name, |give| {
            let mut room = 4096;
            loop {
                let mut bytes = vec![0u8; room];
                let len = give(bytes.as_mut_ptr().cast(), room);
                if len < room {
                    bytes.truncate(len);
                    return String::from_utf8(bytes).unwrap();
                }
                // Other threads may add lines in between.
                room = len * 2 + 1;
            }
        })
    }

    /// Violations: silent errors on a GPU.
    pub fn violations(&self) -> Vec<String> {
        let text = self.text("standin_violations");
        text.lines().map(str::to_string).collect()
    }

    pub fn forget_violations(&self) {
        self.call::<extern "C" fn(), _>("standin_forget_violations", |forget| forget());
    }

    /// The calls, one a line: `INDEX THREAD SYMBOL ARGUMENTS = CODE`; the last 65,536.
    pub fn trace(&self) -> String {
        self.text("standin_trace")
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        type Count = extern "C" fn(*const c_char) -> u64;
        self.call::<Count, _>("standin_calls", |count| count(std::ptr::null()))
    }

    /// Calls of one symbol so far.
    pub fn count(&self, symbol: &str) -> u64 {
        let symbol = CString::new(symbol).unwrap();
        type Count = extern "C" fn(*const c_char) -> u64;
        self.call::<Count, _>("standin_calls", |count| count(symbol.as_ptr()))
    }

    fn fail(&self, symbol: Option<&CStr>, index: u64, code: u32, sticky: bool) {
        let symbol = symbol.map_or(std::ptr::null(), CStr::as_ptr);
        type Fail = extern "C" fn(*const c_char, u64, u32, bool);
        self.call::<Fail, _>("standin_fail", |fail| fail(symbol, index, code, sticky));
    }

    /// The session's call `index`, from 0, returns `code` and does nothing; if `sticky`, so do all
    /// later ones of its context.
    pub fn fail_at(&self, index: u64, code: u32, sticky: bool) {
        self.fail(None, index, code, sticky);
    }

    /// As [`fail_at`](Self::fail_at) for call `nth` of one symbol, from 0.
    pub fn fail_named(&self, symbol: &str, nth: u64, code: u32, sticky: bool) {
        self.fail(Some(&CString::new(symbol).unwrap()), nth, code, sticky);
    }

    /// From now on only the session's first `count` calls of a symbol pass; the others wait in the
    /// driver until more are admitted.
    pub fn admit(&self, symbol: &str, count: u64) {
        let symbol = CString::new(symbol).unwrap();
        type Admit = extern "C" fn(*const c_char, u64);
        self.call::<Admit, _>("standin_admit", |admit| admit(symbol.as_ptr(), count));
    }

    /// Operation `nth` (copies, fills, kernels, host functions), from 0, fails on its stream and
    /// kills its context.
    pub fn fail_async(&self, nth: u64, code: u32) {
        self.call::<extern "C" fn(u64, u32), _>("standin_fail_async", |fail| fail(nth, code));
    }

    /// For kernels: the one that runs on this thread fails with `code` and kills its context.
    pub fn kernel_fails(&self, code: u32) {
        self.call::<extern "C" fn(u32), _>("standin_kernel_fails", |fails| fails(code));
    }

    /// While held, no operation begins: the test chooses when a copy reads.
    pub fn hold(&self, hold: bool) {
        self.call::<extern "C" fn(bool), _>("standin_hold", |function| function(hold));
    }

    /// Operations begun so far, as [`fail_async`](Self::fail_async) counts them.
    pub fn executed(&self) -> u64 {
        self.call::<extern "C" fn() -> u64, _>("standin_executed", |executed| executed())
    }

    /// Operations on these bytes, of the host or a device, that are not done.
    pub fn in_flight(&self, address: u64, len: usize) -> usize {
        type Count = extern "C" fn(u64, usize) -> usize;
        self.call::<Count, _>("standin_in_flight", |count| count(address, len))
    }

    /// Operations on these bytes that the host has not *seen* done, which does not depend on
    /// timing.
    pub fn unobserved(&self, address: u64, len: usize) -> usize {
        type Count = extern "C" fn(u64, usize) -> usize;
        self.call::<Count, _>("standin_unobserved", |count| count(address, len))
    }

    /// A stream of a green context in the current context.
    pub fn green_stream(&self) -> usize {
        let mut stream = 0;
        type Create = extern "C" fn(*mut u64, u64, u32, i32) -> u32;
        self.call::<Create, _>("cuGreenCtxStreamCreate", |create| {
            assert_eq!(create(&mut stream, 0, 0, 0), 0)
        });
        stream as usize
    }

    /// Host address of a device pointer; `None` if it belongs to no live allocation.
    pub fn host_address(&self, address: u64) -> Option<*mut u8> {
        let at = self
            .call::<extern "C" fn(u64) -> *mut u8, _>("standin_host_address", |find| find(address));
        (!at.is_null()).then_some(at)
    }

    /// Bytes of device memory as they are at this moment.
    pub fn peek(&self, address: u64, len: usize) -> Vec<u8> {
        let last = self.host_address(address + len as u64 - 1);
        assert!(len > 0 && last.is_some(), "no memory at {address:#x}");
        let at = self
            .host_address(address)
            .expect("an address in device memory");
        // SAFETY: first and last byte lie in live allocations, and between two allocations are
        // pages that fault. A stream may write at the same time; tests look when none does.
        unsafe { std::slice::from_raw_parts(at, len) }.to_vec()
    }

    pub fn live(&self) -> Live {
        let mut numbers = [0u64; 11];
        type Count = extern "C" fn(*mut [u64; 11]);
        self.call::<Count, _>("standin_live", |count| count(&mut numbers));
        Live {
            retains: numbers[0],
            streams: numbers[1],
            events: numbers[2],
            allocations: numbers[3],
            bytes: numbers[4],
            registrations: numbers[5],
            registered_bytes: numbers[6],
            host_allocations: numbers[7],
            modules: numbers[8],
            leaked: numbers[9],
            leaked_bytes: numbers[10],
        }
    }

    /// Code for kernels called `name`, in any module. `sizes` are those of the parameters in bytes;
    /// bit *i* of `pointers` says that parameter *i* is a device pointer, and of `writes` that its
    /// allocation is written.
    pub fn register_kernel(
        &self,
        name: &str,
        function: KernelFn,
        sizes: &[u32],
        pointers: u64,
        writes: u64,
    ) {
        let name = CString::new(name).unwrap();
        type Register = extern "C" fn(*const c_char, KernelFn, *const u32, usize, u64, u64);
        let size = sizes.as_ptr();
        self.call::<Register, _>("standin_register_kernel", |register| {
            register(name.as_ptr(), function, size, sizes.len(), pointers, writes);
        });
    }
}

/// Runs `body` with a session of its own, which it drops or ends. A failure prints `name` and the
/// driver's last calls; a body without an end also ends the process.
#[track_caller]
pub fn in_session(config: Config, name: String, body: impl FnOnce(Session) + Send + 'static) {
    let standin = cuda();
    let title = name.clone();
    let (send, done) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let session = standin.session(config);
        // Sessions wait for each other: the deadline starts here.
        send.send(()).unwrap();
        let shows = Shows(name);
        body(session);
        std::mem::forget(shows);
        drop(send);
    });
    done.recv().unwrap();
    if done.recv_timeout(DEADLINE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        let calls = tail(&standin.trace());
        eprintln!("{title}: no end; the last calls:\n{calls}");
        std::process::exit(101);
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Prints the case and the driver's last calls when it is dropped.
struct Shows(String);

impl Drop for Shows {
    fn drop(&mut self) {
        eprintln!("{}; the last calls:\n{}", self.0, tail(&cuda().trace()));
    }
}

/// The calls around the first failed one, and the last calls. 600 is an event that is not ready.
fn tail(trace: &str) -> String {
    let lines: Vec<&str> = trace.lines().collect();
    let fails = |line: &&str| !line.ends_with(" = 0") && !line.ends_with(" = 600");
    let failed = lines.iter().position(fails).unwrap_or(0);
    let first = &lines[failed.saturating_sub(10)..(failed + 20).min(lines.len())];
    let last = &lines[lines.len().saturating_sub(40)..];
    [first, &["…"], last].concat().join("\n")
}
