//! A stand-in for libcufile.so.0: the symbols that feedline uses, over plain memory, with faults on
//! demand.
//!
//! ```text
//! cuFileRead(handle, address, len, …) ──► checks ──► fault i? ──► pread by O_DIRECT into aligned scratch
//!                                                                     └──► standin_host_address(address), if some
//!                                                                          library exports it; else the address itself
//! ```
//!
//! Beside a stand-in of CUDA each read is an access outside of its streams (`standin_access`): what
//! they were given for the same bytes must have been seen complete, before the read and when it
//! returns, and the memory must be there all the time. A context must then be current wherever
//! device memory is registered, deregistered or read to.
//!
//! It is stricter than the real one: what would silently go through bounce buffers or reopen the
//! driver there is kept as a *violation* here (reads of memory that is not registered, out of
//! range, into what another one writes, after the close; deregistering what a read is using; a file
//! closed before it is deregistered). Where a violation is found the call mostly fails as well.
//! Unaligned reads are no violation: as in the real library they work, and count as reads through
//! the host.
//!
//! One file, `std` only: `rustc --crate-type cdylib`. With `--cfg without_stats` it is a library
//! before 1.15, with `--cfg without_version` one that does not tell its version, with
//! `--cfg without_read` none at all. `standin_cufile_*` control it; tests/common/cufile.rs wraps
//! them. Two copies of the file are two libraries, each with a state of its own.

#![allow(unexpected_cfgs)]
#![deny(unsafe_op_in_unsafe_fn)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, c_int, c_long, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const ALIGN: u64 = 4096;
const GPUS: usize = 16;

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn close(fd: c_int) -> c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
}

const F_GETFD: c_int = 1;
const F_GETFL: c_int = 3;
#[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
const O_DIRECT: c_int = 0o200000;
#[cfg(not(any(target_arch = "aarch64", target_arch = "arm")))]
const O_DIRECT: c_int = 0o40000;

/// `CUfileError_t`.
#[repr(C)]
pub struct Status {
    code: c_int,
    cuda: c_int,
}

const OK: Status = Status { code: 0, cuda: 0 };

fn fail(code: c_int) -> Status {
    Status {
        code,
        cuda: if code == 5011 { 201 } else { 0 },
    }
}

/// `CUfileDescr_t`.
#[repr(C)]
pub struct Descr {
    kind: c_int,
    handle: Union,
    ops: *const c_void,
}

/// A descriptor or a pointer: aligned as the pointer.
#[repr(C)]
#[derive(Clone, Copy)]
union Union {
    fd: c_int,
    whole: *mut c_void,
}

struct File {
    fd: c_int,
    busy: u32,
}

struct Buffer {
    len: u64,
    busy: u32,
    /// Its deregistration was refused: nobody can do anything about it.
    lost: bool,
}

#[derive(Clone, Copy)]
struct Fault {
    result: i64,
    errno: c_int,
}

#[derive(Clone, Copy, Default)]
struct Gpu {
    route: c_int,
    bytes: u64,
    total: u64,
    routes: [u64; 3],
    unaligned: u64,
    errors: u64,
}

#[derive(Default)]
struct State {
    version: c_int,
    /// 0 well, 1 fails, 2 hangs, 3 closes descriptor 0 and then does as `open_code` says.
    open_mode: c_int,
    open_code: c_int,
    /// Keeps the primary context of every GPU while it is open, from 1.16 on.
    contexts: bool,
    users: i64,
    opens: i64,
    closes: i64,
    next: usize,
    files: HashMap<usize, File>,
    buffers: BTreeMap<u64, Buffer>,
    /// Registrations so far (0 file, 1 buffer, 2 buffer taken back), and codes that some answer.
    registered: [u64; 3],
    registers: HashMap<(usize, u64), c_int>,
    reads: u64,
    /// What reads in flight write to.
    writing: Vec<(u64, u64)>,
    faults: HashMap<u64, Fault>,
    hold: bool,
    held: i64,
    level: c_int,
    counting: bool,
    gpu_count: u32,
    /// Where the array of GPUs starts; 0 = as the version has it.
    gpus_at: usize,
    gpus: [Gpu; GPUS],
    trace: Vec<String>,
    violations: Vec<String>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn fresh() -> State {
    State {
        version: 1200,
        gpu_count: 1,
        ..State::default()
    }
}

fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let mut state: MutexGuard<'_, Option<State>> =
        STATE.lock().unwrap_or_else(PoisonError::into_inner);
    work(state.get_or_insert_with(fresh))
}

impl State {
    fn trace(&mut self, line: &str) {
        self.trace.push(line.to_owned());
    }

    /// What a correct caller never does.
    fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    /// The code that this registration answers; 0 none.
    fn register_fault(&mut self, what: usize) -> c_int {
        let number = self.registered[what];
        self.registered[what] += 1;
        self.registers.remove(&(what, number)).unwrap_or(0)
    }

    /// Whether the driver is open; a call that finds it closed is a violation.
    fn is_open(&mut self, call: &str) -> bool {
        if self.users <= 0 {
            self.violation(format!("{call} while the driver is closed"));
        }
        self.users > 0
    }
}

fn set_errno(value: c_int) {
    // SAFETY: the C library gives the address of this thread's errno, which is always valid.
    unsafe { *__errno_location() = value }
}

// The driver.

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    let (mode, code) = with(|state| {
        state.opens += 1;
        state.trace("open");
        (state.open_mode, state.open_code)
    });
    match mode {
        1 => return fail(code),
        2 => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        3 => {
            // SAFETY: this is the fault that is played: the descriptor is not ours, and closing it
            // is what callers have to withstand.
            unsafe { close(0) };
        }
        _ => {}
    }
    if mode == 3 && code != 0 {
        return fail(code);
    }
    if with(|state| state.contexts && state.version >= 1160) {
        primary_contexts(true);
    }
    with(|state| state.users += 1);
    OK
}

/// Retains, or releases, the primary context of every GPU of the stand-in of CUDA.
fn primary_contexts(retain: bool) {
    type Count = extern "C" fn(*mut c_int) -> u32;
    type Retain = extern "C" fn(*mut u64, c_int) -> u32;
    type Release = extern "C" fn(c_int) -> u32;
    let names = [
        c"cuDeviceGetCount",
        c"cuDevicePrimaryCtxRetain",
        c"cuDevicePrimaryCtxRelease_v2",
    ];
    let [Some(count), Some(retains), Some(releases)] = names.map(global) else {
        return;
    };
    // SAFETY: the driver API declares the three so.
    let (count, retains, releases) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Count>(count),
            std::mem::transmute::<*mut c_void, Retain>(retains),
            std::mem::transmute::<*mut c_void, Release>(releases),
        )
    };
    let mut gpus = 0;
    let mut context = 0;
    count(&raw mut gpus);
    for gpu in 0..gpus {
        if retain {
            retains(&raw mut context, gpu)
        } else {
            releases(gpu)
        };
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose_v2() -> Status {
    let closed = with(|state| {
        if !state.is_open("cuFileDriverClose") {
            return fail(5001);
        }
        let files = state.files.len();
        let buffers = state.buffers.values().filter(|buffer| !buffer.lost).count();
        if state.users == 1 && files + buffers > 0 {
            state.violation(format!(
                "closed with {files} files and {buffers} buffers registered"
            ));
        }
        state.users -= 1;
        state.closes += 1;
        state.trace("close");
        OK
    });
    if closed.code == 0 && with(|state| state.contexts && state.version >= 1160) {
        primary_contexts(false);
    }
    closed
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileUseCount() -> c_long {
    with(|state| state.users as c_long)
}

/// # Safety
///
/// `version` is null or may be written to.
#[cfg(not(without_version))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> Status {
    let number = with(|state| state.version);
    if number < 0 || version.is_null() {
        return fail(5005);
    }
    // SAFETY: as the caller promises.
    unsafe { *version = number };
    OK
}

// Files and buffers.

/// # Safety
///
/// `handle` may be written to, `descr` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(
    handle: *mut *mut c_void,
    descr: *const Descr,
) -> Status {
    // SAFETY: as the caller promises; any 4 bytes are a number.
    let (kind, fd) = unsafe { ((*descr).kind, (*descr).handle.fd) };
    // SAFETY: asks the kernel for the flags of a descriptor, which may be any number.
    let flags = unsafe { fcntl(fd, F_GETFL) };
    let regular = std::fs::metadata(format!("/proc/self/fd/{fd}")).is_ok_and(|data| data.is_file());
    let answer = with(|state| {
        let open = state.is_open("cuFileHandleRegister");
        let fault = state.register_fault(0);
        let known = state.files.values().any(|file| file.fd == fd);
        let code = match () {
            () if !open => 5001,
            () if fault != 0 => fault,
            () if kind != 1 || flags < 0 => 5022,
            () if !regular => 5018,
            () if flags & O_DIRECT == 0 => 5020,
            () if known => 5028,
            () => 0,
        };
        if code != 0 {
            return Err(code);
        }
        state.next += 1;
        let number = 0xf11e_0000 + state.next;
        state.files.insert(number, File { fd, busy: 0 });
        state.trace("file+");
        Ok(number)
    });
    match answer {
        Ok(number) => {
            // SAFETY: as the caller promises.
            unsafe { *handle = std::ptr::without_provenance_mut(number) };
            OK
        }
        Err(code) => fail(code),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: *mut c_void) {
    with(|state| {
        if !state.is_open("cuFileHandleDeregister") {
            return;
        }
        let Some(file) = state.files.remove(&handle.addr()) else {
            return state.violation(format!("file {:#x} was not registered", handle.addr()));
        };
        // SAFETY: asks the kernel whether a number is a descriptor.
        if unsafe { fcntl(file.fd, F_GETFD) } < 0 {
            state.violation("a file was closed before it was deregistered".into());
        }
        if file.busy > 0 {
            state.violation("a file was deregistered under a read".into());
        }
        state.trace("file-");
    });
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(address: *const c_void, len: usize, _flags: c_int) -> Status {
    let start = address.addr() as u64;
    let len = len as u64;
    let current = has_context();
    with(|state| {
        if !state.is_open("cuFileBufRegister") {
            return fail(5001);
        }
        state.needs_context("cuFileBufRegister", current);
        let fault = state.register_fault(1);
        let Some(end) = start.checked_add(len).filter(|_| start != 0 && len != 0) else {
            return fail(5022);
        };
        let before = state.buffers.range(..end).next_back();
        let overlaps = before.is_some_and(|(other, buffer)| other + buffer.len > start);
        match () {
            () if fault != 0 => return fail(fault),
            () if overlaps => return fail(5023),
            () => {}
        }
        if !start.is_multiple_of(ALIGN) {
            state.violation(format!("buffer {start:#x} is not aligned"));
        }
        let buffer = Buffer {
            len,
            busy: 0,
            lost: false,
        };
        state.buffers.insert(start, buffer);
        state.trace("buffer+");
        OK
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(address: *const c_void) -> Status {
    let start = address.addr() as u64;
    let current = has_context();
    with(|state| {
        if !state.is_open("cuFileBufDeregister") {
            return fail(5001);
        }
        state.needs_context("cuFileBufDeregister", current);
        let fault = state.register_fault(2);
        if fault != 0 {
            if let Some(buffer) = state.buffers.get_mut(&start) {
                buffer.lost = true;
            }
            return fail(fault);
        }
        let Some(buffer) = state.buffers.remove(&start) else {
            state.violation(format!("buffer {start:#x} was not registered"));
            return fail(5022);
        };
        if buffer.busy > 0 {
            state.violation("a buffer was deregistered under a read".into());
        }
        state.trace("buffer-");
        OK
    })
}

// Reading.

/// A read that passed all checks.
struct Plan {
    fd: c_int,
    fault: Option<Fault>,
    /// Start of the buffer.
    base: u64,
    target: u64,
    end: u64,
    aligned: bool,
}

/// The function of another library, if it is loaded with `RTLD_GLOBAL`.
fn global(name: &std::ffi::CStr) -> Option<*mut c_void> {
    // SAFETY: RTLD_DEFAULT is null; the name ends in 0.
    let found = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Where a device address lies on the host; `None` when the stand-in of CUDA does not know it.
fn host(address: u64) -> Option<*mut u8> {
    let Some(found) = global(c"standin_host_address") else {
        return Some(std::ptr::with_exposed_provenance_mut(address as usize));
    };
    // SAFETY: the stand-in of CUDA exports it with this signature.
    let translate: extern "C" fn(u64) -> *mut u8 = unsafe { std::mem::transmute(found) };
    Some(translate(address)).filter(|pointer| !pointer.is_null())
}

/// Whether a context is current on this thread, as far as a stand-in of CUDA tells: it may refuse
/// the question.
fn has_context() -> bool {
    let (Some(_), Some(found)) = (global(c"standin_access"), global(c"cuCtxGetCurrent")) else {
        return true;
    };
    // SAFETY: the driver API declares it so.
    let current: extern "C" fn(*mut u64) -> u32 = unsafe { std::mem::transmute(found) };
    let mut context = 0;
    current(&raw mut context) != 0 || context != 0
}

/// Tells the stand-in of CUDA, if there is one, that bytes are written outside of its streams, and
/// whether they are there.
fn access(address: u64, len: usize, what: &std::ffi::CStr) -> bool {
    let Some(found) = global(c"standin_access") else {
        return true;
    };
    // SAFETY: the stand-in of CUDA exports it with this signature.
    let access: extern "C" fn(u64, usize, bool, *const c_char) -> *mut u8 =
        unsafe { std::mem::transmute(found) };
    !access(address, len, true, what.as_ptr()).is_null()
}

impl State {
    fn needs_context(&mut self, call: &str, current: bool) {
        if !current {
            self.violation(format!("{call} without a current context"));
        }
    }

    fn plan(
        &mut self,
        handle: usize,
        base: u64,
        len: u64,
        from: i64,
        to: i64,
    ) -> Result<Plan, c_int> {
        let fault = self.faults.remove(&self.reads);
        self.reads += 1;
        if !self.is_open("cuFileRead") {
            return Err(5027);
        }
        let refuse = |state: &mut Self, code, what: String| {
            state.violation(what);
            Err(code)
        };
        let (Ok(from), Ok(to)) = (u64::try_from(from), u64::try_from(to)) else {
            return refuse(self, 5022, format!("read at offsets {from} and {to}"));
        };
        let Some(buffer) = self.buffers.get_mut(&base) else {
            let what = format!("read into {base:#x}, which is not registered");
            return refuse(self, 5024, what);
        };
        if to.checked_add(len).is_none_or(|end| end > buffer.len) {
            let what = format!("read of {len} bytes at {to} leaves the buffer");
            return refuse(self, 5017, what);
        }
        let Some(file) = self.files.get_mut(&handle) else {
            let what = format!("read of file {handle:#x}, which is not registered");
            return refuse(self, 5027, what);
        };
        file.busy += 1;
        buffer.busy += 1;
        let fd = file.fd;
        let target = base + to;
        let meets = |range: &(u64, u64)| range.0 < target + len && target < range.1;
        if self.writing.iter().any(meets) {
            self.violation(format!(
                "two reads at once into the {len} bytes at {to} of {base:#x}"
            ));
        }
        self.writing.push((target, target + len));
        let aligned = (from | len | target).is_multiple_of(ALIGN);
        Ok(Plan {
            fd,
            fault,
            base,
            target,
            end: target + len,
            aligned,
        })
    }

    fn done(&mut self, handle: usize, plan: &Plan, result: i64) {
        if let Some(file) = self.files.get_mut(&handle) {
            file.busy -= 1;
        }
        if let Some(buffer) = self.buffers.get_mut(&plan.base) {
            buffer.busy -= 1;
        }
        let range = (plan.target, plan.end);
        if let Some(at) = self.writing.iter().position(|other| *other == range) {
            self.writing.swap_remove(at);
        }
        if !self.counting {
            return;
        }
        let gpu = &mut self.gpus[0];
        gpu.total += 1;
        let Ok(bytes) = u64::try_from(result) else {
            gpu.errors += 1;
            return;
        };
        gpu.bytes += bytes;
        gpu.unaligned += u64::from(!plan.aligned);
        gpu.routes[if plan.aligned { gpu.route as usize } else { 2 }] += 1;
    }
}

/// Reads with O_DIRECT's alignment: the aligned range around what is wanted, into aligned memory.
fn pread(fd: c_int, from: u64, len: usize) -> std::io::Result<Vec<u8>> {
    // SAFETY: the caller of cuFileHandleRegister keeps the descriptor open; it is not closed here.
    let file = ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(fd) });
    let start = from - from % ALIGN;
    let skip = (from - start) as usize;
    let whole = (skip + len).next_multiple_of(ALIGN as usize);
    let mut memory = vec![0_u8; whole + ALIGN as usize];
    let pad = memory.as_ptr().align_offset(ALIGN as usize);
    let scratch = &mut memory[pad..pad + whole];
    let mut got = 0;
    while got < whole {
        let read = file.read_at(&mut scratch[got..], start + got as u64)?;
        got += read;
        if read == 0 || !read.is_multiple_of(ALIGN as usize) {
            break;
        }
    }
    let wanted = scratch.get(skip..got.min(skip + len));
    Ok(wanted.map_or(Vec::new(), <[u8]>::to_vec))
}

/// What the read answers, and its errno.
fn carry_out(plan: &Plan, from: u64, len: usize) -> (i64, c_int) {
    let most = match plan.fault {
        Some(Fault { result, errno }) if result < 0 => return (result, errno),
        Some(Fault { result, .. }) => len.min(result as usize),
        None => len,
    };
    let bytes = match pread(plan.fd, from, most) {
        Ok(bytes) => bytes,
        Err(error) => return (-1, error.raw_os_error().unwrap_or(5)),
    };
    let Some(target) = host(plan.target) else {
        return (-5012, 0);
    };
    // SAFETY: the range is within a registered buffer, which the caller of cuFileRead keeps
    // allocated and unused until it returns; the scratch memory is another.
    unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    (bytes.len() as i64, 0)
}

#[cfg(not(without_read))]
#[unsafe(no_mangle)]
pub extern "C" fn cuFileRead(
    handle: *mut c_void,
    address: *mut c_void,
    len: usize,
    from: i64,
    to: i64,
) -> isize {
    let current = has_context();
    let plan = with(|state| {
        state.needs_context("cuFileRead", current);
        let plan = state.plan(handle.addr(), address.addr() as u64, len as u64, from, to);
        state.held += i64::from(state.hold && plan.is_ok());
        plan
    });
    let plan = match plan {
        Ok(plan) => plan,
        // As the real library does it.
        Err(5027) => {
            set_errno(5027);
            return -1;
        }
        Err(code) => return -(code as isize),
    };
    let before = access(plan.target, len, c"a read of cuFile begins");
    while with(|state| state.hold) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let result = carry_out(&plan, from as u64, len);
    if !(before && access(plan.target, len, c"a read of cuFile ends")) {
        with(|state| state.violation(format!("read of {len} bytes to memory that is not there")));
    }
    with(|state| state.done(handle.addr(), &plan, result.0));
    // What was called since may have changed it.
    set_errno(result.1);
    result.0 as isize
}

// Statistics.

#[cfg(not(without_stats))]
mod statistics {
    use super::*;

    #[unsafe(no_mangle)]
    pub extern "C" fn cuFileSetStatsLevel(level: c_int) -> Status {
        if !(0..=3).contains(&level) {
            return fail(5022);
        }
        with(|state| state.level = level);
        OK
    }

    /// # Safety
    ///
    /// `level` may be written to.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn cuFileGetStatsLevel(level: *mut c_int) -> Status {
        // SAFETY: as the caller promises.
        unsafe { *level = with(|state| state.level) };
        OK
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuFileStatsStart() -> Status {
        with(|state| {
            if state.users <= 0 {
                return fail(5001);
            }
            state.counting = true;
            state.trace("stats+");
            OK
        })
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuFileStatsStop() -> Status {
        with(|state| {
            if !state.is_open("cuFileStatsStop") {
                return fail(5001);
            }
            state.counting = false;
            state.trace("stats-");
            OK
        })
    }

    /// As the real one, it writes the head and as many GPUs as there are, and leaves some of the
    /// head alone.
    ///
    /// # Safety
    ///
    /// `stats` may be written to for the size of the version's `CUfileStatsLevel3_t`, and is
    /// aligned to 8 bytes.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn cuFileGetStatsL3(stats: *mut c_void) -> Status {
        with(|state| {
            if state.users <= 0 {
                return fail(5001);
            }
            if state.level < 3 || !state.counting {
                return fail(5022);
            }
            let start = match state.gpus_at {
                0 if state.version >= 1190 => 1144,
                0 => 1032,
                told => told,
            };
            let bytes = stats.cast::<u8>();
            // SAFETY: within the head of the structure, as the caller promises.
            unsafe {
                bytes.write_bytes(0, start - 8 - 256);
                bytes.add(start - 8).cast::<u32>().write(state.gpu_count);
            }
            for (index, gpu) in state.gpus.iter().enumerate().take(state.gpu_count as usize) {
                let mut words = [0_u64; 29];
                words[0] = gpu.bytes;
                words[4..=4].fill(gpu.total);
                words[5..8].copy_from_slice(&gpu.routes);
                words[8] = gpu.unaligned;
                words[12] = gpu.errors;
                // SAFETY: within the array of GPUs, whose elements have 248 bytes: a UUID and 29
                // counters.
                unsafe {
                    let place = bytes.add(start + index * 248);
                    place.write_bytes(index as u8 + 1, 16);
                    let counters = place.add(16).cast::<u64>();
                    counters.copy_from_nonoverlapping(words.as_ptr(), words.len());
                }
            }
            OK
        })
    }
}

// Control.

/// As new, but for reads that are still held.
#[unsafe(no_mangle)]
pub extern "C" fn standin_cufile_reset() {
    with(|state| *state = fresh());
}

/// 0 version (1000 major + 10 minor; negative: not told) · 1 how `cuFileDriverOpen` goes (0 well, 1
/// fails with the code of 2, 2 hangs, 3 closes descriptor 0) · 2 its code · 6 hold reads · 7 number
/// of GPUs · 8 offset of the array of GPUs in the statistics · 9 level of statistics · 100 + g
/// route of aligned reads to GPU g (0 P2P, 1 nvidia-fs, 2 host).
#[unsafe(no_mangle)]
pub extern "C" fn standin_cufile_set(what: c_int, value: c_int) {
    with(|state| match what {
        0 => state.version = value,
        1 => state.open_mode = value,
        2 => state.open_code = value,
        6 => {
            state.hold = value != 0;
            state.held = 0;
        }
        7 => state.gpu_count = value as u32,
        8 => state.gpus_at = value as usize,
        9 => state.level = value,
        10 => state.contexts = value != 0,
        100..116 => state.gpus[what as usize - 100].route = value.clamp(0, 2),
        _ => state.violation(format!("no setting {what}")),
    });
}

/// Of the registrations of a file (3), of a buffer (4), or the deregistrations of a buffer (5), the
/// one after `skip` more answers `code`.
#[unsafe(no_mangle)]
pub extern "C" fn standin_cufile_fail_register(what: c_int, skip: u64, code: c_int) {
    let what = (what as usize).clamp(3, 5) - 3;
    with(|state| {
        state
            .registers
            .insert((what, state.registered[what] + skip), code)
    });
}

/// Read number `call` (from 0) answers `result` with `errno`; a result of 0 or more is the most
/// that it reads.
#[unsafe(no_mangle)]
pub extern "C" fn standin_cufile_fail_read(call: u64, result: i64, errno: c_int) {
    with(|state| state.faults.insert(call, Fault { result, errno }));
}

/// 0 files · 1 buffers · 2 users of the driver · 3 reads asked for · 4 opens · 5 closes · 6 reads
/// held · 7 level of statistics.
#[unsafe(no_mangle)]
pub extern "C" fn standin_cufile_count(what: c_int) -> i64 {
    with(|state| match what {
        0 => state.files.len() as i64,
        1 => state.buffers.len() as i64,
        2 => state.users,
        3 => state.reads as i64,
        4 => state.opens,
        5 => state.closes,
        6 => state.held,
        7 => i64::from(state.level),
        _ => -1,
    })
}

/// Copies the calls (0) or the violations (1) so far, a line each, and returns their length; longer
/// than `room`: cut.
///
/// # Safety
///
/// `text` may be written to for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_cufile_text(what: c_int, text: *mut u8, room: usize) -> usize {
    let lines = with(|state| match what {
        0 => state.trace.join("\n"),
        _ => state.violations.join("\n"),
    });
    let len = lines.len().min(room);
    // SAFETY: as the caller promises.
    unsafe { text.copy_from_nonoverlapping(lines.as_ptr(), len) };
    lines.len()
}
