//! A stand-in for `libcuda.so`: the driver API's symbols that feedline and cudarc call, with no GPU
//! behind them.
//!
//! ```text
//! call ─► counted, traced, refused? ─► stream's queue ─► worker thread of the stream ─► bytes move, late
//!             (fail_at, sticky)          │ clock: what                (delay, fail_async)     │
//!                                        ▼ it is ordered after                                ▼
//!                               every access checked against                       host sees it by query,
//!                               the earlier ones of its range                      synchronise, host function
//! ```
//!
//! What a GPU would do silently becomes a *violation*: two accesses of a range that nothing orders,
//! freed memory used, pinned memory unmapped or unregistered under a copy, driver calls from a
//! callback.
//!
//! - **Order.** Each operation has a vector clock: what its stream waited for, and what the host
//!   (all its threads as one) had seen complete when it was enqueued. Two overlapping accesses, one
//!   a write, of which the later does not have the earlier in its clock, are a violation, whether
//!   or not they met this time.
//! - **Memory.** A device pointer lies in a range without access rights; its bytes lie [`SPAN`]
//!   further on. Fresh memory holds 0xA5, freed memory 0xDD, and addresses are never used again.
//! - **Failure.** Call *i* returns a chosen code and does nothing; a sticky one kills the context.
//!   An operation that fails on its stream kills its context, too, and no operation of that context
//!   runs any more. A kernel may say that it fails.
//! - **Hardware queues** (`queues`): the streams of one priority share so many, in turn, as with
//!   `CUDA_DEVICE_MAX_CONNECTIONS`. An operation begins when all that were submitted to its queue
//!   before have begun, so one that waits holds up the others'.
//! - **Stricter than CUDA** where CUDA is silent: operations on a stream of another context than
//!   the current one are refused (400), pinned ranges must begin at a page, objects of a released
//!   context are gone for good (and count as leaks).
//! - **Captures** of graphs keep the rules of `cuda.h`: what a thread may call is a matter of its
//!   mode and of the captures that are under way; a refused call invalidates them. Captured work
//!   never runs. Waits that would fork a capture into another stream are refused (905).
//! - **Limits.** Primary contexts only. The per-thread default stream is the legacy one. Each
//!   operation has the bandwidth for itself. Kernels count as touching the whole allocation of each
//!   pointer.
//!
//! Compiled by plain `rustc` as a cdylib; all state is of the process, and `standin_reset` begins a
//! session.

#![allow(non_snake_case)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

type Result<T = ()> = std::result::Result<T, u32>;

/// This code, unless the condition holds.
fn require(holds: bool, code: u32) -> Result {
    if holds { Ok(()) } else { Err(code) }
}

const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const NOT_INITIALIZED: u32 = 3;
const INVALID_DEVICE: u32 = 101;
const INVALID_CONTEXT: u32 = 201;
const NO_BINARY: u32 = 209;
const INVALID_PTX: u32 = 218;
const INVALID_HANDLE: u32 = 400;
const ILLEGAL_STATE: u32 = 401;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;
const CONTEXT_IS_DESTROYED: u32 = 709;
const ALREADY_REGISTERED: u32 = 712;
const NOT_REGISTERED: u32 = 713;
const NOT_PERMITTED: u32 = 800;
const CAPTURE_UNSUPPORTED: u32 = 900;
const CAPTURE_INVALIDATED: u32 = 901;
const CAPTURE_UNMATCHED: u32 = 903;
const CAPTURE_ISOLATION: u32 = 905;
const CAPTURE_IMPLICIT: u32 = 906;
const CAPTURED_EVENT: u32 = 907;
const CAPTURE_WRONG_THREAD: u32 = 908;

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

/// Marks the handle of a green context.
const GREEN: u64 = 1 << 60;

const PAGE: u64 = 4096;
/// Bytes of device addresses, and the distance from an address to its bytes.
const SPAN: u64 = 1 << 40;
/// Alignment of large allocations.
const LARGE: u64 = 2 << 20;
const TRACE_LINES: usize = 1 << 16;
const VIOLATIONS: usize = 256;
const HISTORY: usize = 1024;

// --- the C library ---

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(at: *mut c_void, len: usize) -> c_int;
    fn madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int;
    fn mincore(at: *mut c_void, len: usize, pages: *mut u8) -> c_int;
}

const PROT_NONE: c_int = 0;
const PROT_READ_WRITE: c_int = 3;
const MAP_PRIVATE_ANONYMOUS: c_int = 0x22;
const MAP_FIXED: c_int = 0x10;
const MAP_NORESERVE: c_int = 0x4000;
const MADV_DONTNEED: c_int = 4;

fn map(at: u64, len: u64, prot: c_int, flags: c_int) -> Option<u64> {
    let flags = MAP_PRIVATE_ANONYMOUS | MAP_NORESERVE | flags;
    // SAFETY: a new mapping; with MAP_FIXED it replaces pages of the range that was reserved here
    // for device memory.
    let got = unsafe { mmap(at as *mut c_void, len as usize, prot, flags, -1, 0) } as u64;
    (got != u64::MAX).then_some(got)
}

/// Whether all pages of the range are mapped.
fn mapped(start: u64, len: u64) -> bool {
    let first = start / PAGE * PAGE;
    let mut pages = vec![0; ((start + len).saturating_sub(first)).div_ceil(PAGE) as usize];
    // SAFETY: the vector has a byte for each page of the range; the range itself is only looked up.
    unsafe {
        mincore(
            first as *mut c_void,
            (start + len - first) as usize,
            pages.as_mut_ptr(),
        ) == 0
    }
}

/// A place for a result; null is refused.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    fn put(&self, value: T) -> Result {
        require(!self.0.is_null(), INVALID_VALUE)?;
        // SAFETY: the caller of the entry point passes a place for a T, as the driver API demands.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }
}

/// Text of a C string; empty for null.
fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: the caller of the entry point passes a C string.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

/// Writes text and a zero byte into a C buffer, cut to its length.
fn put_text(out: *mut c_char, len: usize, text: &str) -> Result {
    require(!out.is_null() && len != 0, INVALID_VALUE)?;
    let count = text.len().min(len - 1);
    // SAFETY: the caller passes a buffer of `len` bytes; count + 1 <= len.
    unsafe {
        out.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), count);
        out.add(count).write(0);
    }
    Ok(())
}

fn fill(at: u64, byte: u8, len: u64) {
    // SAFETY: only called for bytes of allocations and of mapped ranges that the driver's caller
    // handed over.
    unsafe { (at as *mut u8).write_bytes(byte, len as usize) };
}

// --- state ---

/// For each stream the last of its operations that is known to be before.
type Clock = BTreeMap<u64, u64>;

fn join(clock: &mut Clock, other: &Clock) {
    for (&stream, &seq) in other {
        let known = clock.entry(stream).or_default();
        *known = seq.max(*known);
    }
}

/// A hardware queue: context, priority, number.
type Queue = (u64, i32, u64);

struct Device {
    name: String,
    bytes: u64,
    bus: String,
    used: u64,
    primary: Option<u64>,
}

#[derive(Default)]
struct Config {
    /// Below 0 the error that stands for it.
    driver_version: i32,
    /// Whether the exchange of capture modes needs a current context.
    mode_in_context: bool,
    init_error: u32,
    register_error: u32,
    /// Bytes per second; 0 = no delay.
    bandwidth: u64,
    latency: Duration,
    /// Hardware queues of each priority; 0 = one for each stream.
    queues: u64,
}

struct Context {
    device: usize,
    retains: u64,
    /// Not 0: what each call returns from now on.
    dead: u32,
    legacy: u64,
}

#[derive(Default)]
struct Stream {
    context: u64,
    /// Synchronises with the legacy stream.
    blocking: bool,
    legacy: bool,
    /// Of a green context, which works in the primary one and has a handle of its own.
    green: bool,
    shared: Option<Queue>,
    /// Destroyed by the user; goes when its queue is empty.
    closing: bool,
    last: u64,
    done: u64,
    /// The operation that its thread is at.
    busy: Option<u64>,
    clock: Clock,
    queue: VecDeque<Op>,
}

struct Op {
    seq: u64,
    /// (stream, operation) pairs that must be done before.
    after: Vec<(u64, u64)>,
    touches: Vec<Touch>,
    work: Work,
}

enum Work {
    Marker,
    /// Of an event.
    Record(u64),
    /// Of the memory that begins there.
    Free(u64),
    Copy {
        to: u64,
        from: Source,
        len: u64,
    },
    Fill {
        to: u64,
        byte: u8,
        len: u64,
    },
    Kernel(Launch),
    Host {
        function: HostFn,
        data: usize,
        clock: Clock,
    },
}

enum Source {
    At(u64),
    Staged(Vec<u8>),
}

pub type HostFn = extern "C" fn(data: *mut c_void);
pub type KernelFn =
    extern "C" fn(grid: *const u32, block: *const u32, params: *const *const c_void);

struct Kernel {
    function: KernelFn,
    sizes: Vec<u32>,
    pointers: u64,
    writes: u64,
}

struct Launch {
    function: KernelFn,
    grid: [u32; 3],
    block: [u32; 3],
    params: Vec<Vec<u64>>,
}

struct Event {
    context: u64,
    timing: bool,
    record: Option<Record>,
    /// The capture in which it was recorded last.
    captured: Option<u64>,
}

/// A capture under way, of the stream that began it.
struct Capture {
    number: u64,
    thread: u32,
    mode: u32,
    valid: bool,
}

struct Record {
    stream: u64,
    seq: u64,
    clock: Clock,
    at: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Device(usize),
    Registered,
    HostAlloc,
}

/// An allocation of device memory, or a pinned range of host memory.
struct Range {
    start: u64,
    len: u64,
    place: Place,
    context: u64,
    name: String,
    /// Device memory only: the call that freed it.
    freed: Option<Arc<str>>,
    history: Vec<Access>,
}

/// A part of a range that an operation reads or writes.
#[derive(Clone, Copy)]
struct Touch {
    range: u64,
    start: u64,
    end: u64,
    write: bool,
}

struct Access {
    touch: Touch,
    stream: u64,
    seq: u64,
    text: Arc<str>,
}

struct Failure {
    symbol: Option<String>,
    index: u64,
    code: u32,
    sticky: bool,
}

struct Line {
    index: u64,
    text: Arc<str>,
    result: Option<u32>,
}

#[derive(Default)]
struct State {
    session: u64,
    initialised: bool,
    config: Config,
    devices: Vec<Device>,
    contexts: BTreeMap<u64, Context>,
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    /// By stream.
    captures: BTreeMap<u64, Capture>,
    graphs: BTreeSet<u64>,
    modules: BTreeMap<u64, (u64, String)>,
    functions: BTreeMap<u64, (u64, String)>,
    kernels: BTreeMap<String, Kernel>,
    /// Streams ever made in a context with a priority.
    made: BTreeMap<(u64, i32), u64>,
    /// What was submitted to a hardware queue and has not begun: stream, operation.
    submitted: BTreeMap<Queue, VecDeque<(u64, u64)>>,
    memory: BTreeMap<u64, Range>,
    names: BTreeMap<u64, String>,
    kinds: BTreeMap<&'static str, u64>,
    /// Handles ever made; those of former sessions stay unknown.
    handles: u64,
    /// First device address, and the first never handed out.
    window: u64,
    next: u64,
    /// What the host has seen complete.
    host: Clock,
    calls: u64,
    counts: BTreeMap<String, u64>,
    failures: Vec<Failure>,
    /// Calls of a symbol beyond so many wait.
    admitted: BTreeMap<String, u64>,
    async_failures: Vec<(u64, u32)>,
    executed: u64,
    /// A sticky error without a context.
    dead: u32,
    trace: VecDeque<Line>,
    /// The call being made, for operations it enqueues.
    calling: Option<Arc<str>>,
    violations: Vec<String>,
    leaked: BTreeSet<u64>,
    leaked_retains: u64,
    /// Registrations of contexts that are gone, and their bytes.
    abandoned: (u64, u64),
    running: u64,
    hold: bool,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
static CHANGED: Condvar = Condvar::new();
static THREADS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Session and contexts, the current one last.
    static CURRENT: RefCell<(u64, Vec<u64>)> = const { RefCell::new((0, Vec::new())) };
    static THREAD: Cell<u32> = const { Cell::new(0) };
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
    /// What the kernel on this thread has failed with.
    static FAILED: Cell<u32> = const { Cell::new(SUCCESS) };
    /// Session, and the thread's mode of captures.
    static MODE: Cell<(u64, u32)> = const { Cell::new((0, GLOBAL)) };
}

fn thread() -> u32 {
    if THREAD.get() == 0 {
        THREAD.set(THREADS.fetch_add(1, Ordering::Relaxed) + 1);
    }
    THREAD.get()
}

/// The lock of the state, which can be waited with.
struct Held(Option<MutexGuard<'static, State>>);

impl Held {
    fn lock() -> Self {
        Self(Some(STATE.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn wait(&mut self) {
        self.0 = self
            .0
            .take()
            .map(|guard| CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner));
    }

    /// Runs without the lock.
    fn unlocked<T>(&mut self, run: impl FnOnce() -> T) -> T {
        self.0 = None;
        let out = run();
        *self = Self::lock();
        out
    }
}

impl Deref for Held {
    type Target = State;

    fn deref(&self) -> &State {
        self.0.as_ref().expect("held but while waiting")
    }
}

impl DerefMut for Held {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().expect("held but while waiting")
    }
}

impl State {
    /// A handle that is no address: dereferencing it is a fault.
    fn handle(&mut self, kind: &'static str) -> u64 {
        self.handles += 1;
        let handle = 0x00f0_0000_0000_0000 | (self.handles << 4);
        let name = self.name(kind);
        self.names.insert(handle, name);
        handle
    }

    fn name(&mut self, kind: &'static str) -> String {
        let count = self.kinds.entry(kind).or_default();
        *count += 1;
        format!("{kind}#{count}")
    }

    fn violation(&mut self, text: String) {
        if self.violations.len() < VIOLATIONS {
            self.violations.push(text);
        }
    }

    fn calling(&self) -> Arc<str> {
        self.calling.clone().unwrap_or_else(|| "no call".into())
    }

    fn in_window(&self, address: u64) -> bool {
        self.window != 0 && (self.window..self.window + SPAN).contains(&address)
    }

    /// Where the bytes of an address lie.
    fn real(&self, address: u64) -> u64 {
        address + if self.in_window(address) { SPAN } else { 0 }
    }

    fn range_at(&self, address: u64) -> Option<&Range> {
        let (_, range) = self.memory.range(..=address).next_back()?;
        (address - range.start < range.len).then_some(range)
    }

    fn device(&self, ordinal: i32) -> Result<&Device> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|ordinal| self.devices.get(ordinal))
            .ok_or(INVALID_DEVICE)
    }

    fn alive(&self, context: u64) -> Result<&Context> {
        let found = self.contexts.get(&context).ok_or(CONTEXT_IS_DESTROYED)?;
        require(found.dead == SUCCESS, found.dead)?;
        Ok(found)
    }

    fn current_handle(&self) -> Option<u64> {
        let found = CURRENT.try_with(|current| {
            let current = current.borrow();
            let is_ours = current.0 == self.session;
            is_ours.then(|| current.1.last().copied()).flatten()
        });
        found.ok().flatten().filter(|context| *context != 0)
    }

    /// The current context, alive.
    fn current(&self) -> Result<u64> {
        let context = self.current_handle().ok_or(INVALID_CONTEXT)?;
        self.alive(context)?;
        Ok(context)
    }

    fn change_current(&self, change: impl FnOnce(&mut Vec<u64>)) {
        let _ = CURRENT.try_with(|current| {
            let current = &mut *current.borrow_mut();
            if current.0 != self.session {
                *current = (self.session, Vec::new());
            }
            change(&mut current.1);
        });
    }

    /// The stream of a handle: 0, 1 and 2 are the current context's legacy stream.
    fn stream(&self, handle: Handle) -> Result<u64> {
        if handle.0 <= 2 {
            return Ok(self.alive(self.current()?)?.legacy);
        }
        let stream = self
            .streams
            .get(&handle.0)
            .filter(|stream| !stream.closing)
            .ok_or(INVALID_HANDLE)?;
        self.alive(stream.context)?;
        Ok(handle.0)
    }

    /// A stream to enqueue on: of the current context.
    fn own_stream(&mut self, handle: Handle) -> Result<u64> {
        let context = self.current()?;
        let stream = self.work_stream(handle)?;
        require(self.streams[&stream].context == context, INVALID_HANDLE)?;
        Ok(stream)
    }

    fn event(&mut self, handle: Handle) -> Result<&mut Event> {
        let context = self.events.get(&handle.0).ok_or(INVALID_HANDLE)?.context;
        self.alive(context)?;
        self.events.get_mut(&handle.0).ok_or(INVALID_HANDLE)
    }

    fn is_done(&self, stream: u64, seq: u64) -> bool {
        self.streams
            .get(&stream)
            .is_none_or(|stream| stream.done >= seq)
    }
}

// --- a call: counted, traced, refused ---

/// CUcontext, CUstream, CUevent, CUmodule or CUfunction.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Handle(u64);

/// CUdeviceptr, or a pointer to host memory that is more than a place for a result.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Address(u64);

/// A C string that the trace shows.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Name(*const c_char);

/// An argument as the trace shows it: places for results and other pointers not at all.
trait Arg {
    fn show(&self, _: &State) -> String {
        String::new()
    }

    fn value(&self) -> u64 {
        0
    }
}

impl<T> Arg for Out<T> {}
impl<T> Arg for *const T {}
impl<T> Arg for *mut T {}
impl Arg for Option<HostFn> {}

impl Arg for Handle {
    fn show(&self, s: &State) -> String {
        match self.0 {
            0..=2 => "default".into(),
            handle => s.names.get(&handle).map_or("unknown".into(), String::clone),
        }
    }

    fn value(&self) -> u64 {
        self.0
    }
}

impl Arg for Address {
    fn show(&self, s: &State) -> String {
        match s.range_at(self.0) {
            _ if self.0 == 0 => "null".into(),
            Some(range) => format!("{}+{}", range.name, self.0 - range.start),
            None if s.in_window(self.0) => "nowhere".into(),
            None => "host".into(),
        }
    }

    fn value(&self) -> u64 {
        self.0
    }
}

impl Arg for Name {
    fn show(&self, _: &State) -> String {
        text(self.0)
    }
}

macro_rules! plain_arg {
    ($($ty:ty),*) => {
        $(impl Arg for $ty {
            fn show(&self, _: &State) -> String {
                self.to_string()
            }
        })*
    };
}

plain_arg!(i32, u8, u32, usize, &str);

/// An entry point: a symbol, its arguments in C's order, and what it does when nothing refuses the
/// call.
macro_rules! entry {
    ($name:ident, |$s:ident $(, $arg:ident: $ty:ty)*| $body:expr) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> u32 {
            call(stringify!($name), &[$(&$arg),*], |$s| $body)
        }
    };
}

/// Calls that give something back. What they name counts as leaked by the driver when they are
/// refused.
const RELEASES: [&str; 8] = [
    "cuDevicePrimaryCtxRelease_v2",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemHostUnregister",
    "cuMemFreeHost",
    "cuModuleUnload",
];

/// What every entry point goes through.
fn call(symbol: &'static str, args: &[&dyn Arg], body: impl FnOnce(&mut Held) -> Result) -> u32 {
    let mut s = Held::lock();
    let index = s.begin(symbol, args);
    wait_admitted(&mut s, symbol);
    let refused = s.refusal(symbol, index);
    let injected = refused.is_err();
    let result = refused.and_then(|()| body(&mut s));
    let dead = s.dead != SUCCESS || s.contexts.values().any(|context| context.dead != SUCCESS);
    if RELEASES.contains(&symbol) {
        let value = args.first().map_or(0, |arg| arg.value());
        match result {
            // A release that was refused before, made again.
            Ok(()) if symbol == "cuDevicePrimaryCtxRelease_v2" => {
                s.leaked_retains = s.leaked_retains.saturating_sub(1);
            }
            Ok(()) => _ = s.leaked.remove(&value),
            Err(_) if injected || dead => s.leak(symbol, value),
            Err(_) => {}
        }
    }
    let code = result.err().unwrap_or(SUCCESS);
    let first = s.trace.front().map_or(index, |line| line.index);
    if let Some(line) = index
        .checked_sub(first)
        .and_then(|at| s.trace.get_mut(at as usize))
    {
        line.result = Some(code);
    }
    code
}

/// The call is in the trace, and may have to wait.
fn wait_admitted(s: &mut Held, symbol: &str) {
    let number = s.counts[symbol];
    let calling = s.calling.clone();
    while s.admitted.get(symbol).is_some_and(|most| number > *most) {
        s.wait();
    }
    s.calling = calling;
}

impl State {
    fn begin(&mut self, symbol: &'static str, args: &[&dyn Arg]) -> u64 {
        let index = self.calls;
        self.calls += 1;
        *self.counts.entry(symbol.into()).or_default() += 1;
        let mut text = format!("{index} T{} {symbol}", thread());
        for arg in args {
            let shown = arg.show(self);
            if !shown.is_empty() {
                let _ = write!(text, " {shown}");
            }
        }
        let text: Arc<str> = text.into();
        if self.trace.len() == TRACE_LINES {
            self.trace.pop_front();
        }
        self.trace.push_back(Line {
            index,
            text: text.clone(),
            result: None,
        });
        self.calling = Some(text);
        index
    }

    /// Why the call does nothing, if so.
    fn refusal(&mut self, symbol: &str, index: u64) -> Result {
        if IN_CALLBACK.get() {
            let text = format!("{}: called from a host function", self.calling());
            self.violation(text);
            return Err(NOT_PERMITTED);
        }
        let nth = self.counts[symbol] - 1;
        let hit = |failure: &&Failure| match &failure.symbol {
            None => failure.index == index,
            Some(name) => name == symbol && failure.index == nth,
        };
        if let Some(&Failure { code, sticky, .. }) = self.failures.iter().find(hit) {
            let context = self.current_handle();
            match context.and_then(|context| self.contexts.get_mut(&context)) {
                Some(context) if sticky => context.dead = code,
                None if sticky => self.dead = code,
                _ => {}
            }
            CHANGED.notify_all();
            return Err(code);
        }
        require(self.dead == SUCCESS, self.dead)?;
        if symbol == "cuInit" {
            return Ok(());
        }
        let started = self.initialised && self.config.init_error == SUCCESS;
        require(started, NOT_INITIALIZED)?;
        // Calls about devices work without their context.
        let context = self
            .current_handle()
            .and_then(|context| self.contexts.get(&context));
        match context {
            Some(context) if context.dead != SUCCESS && !symbol.starts_with("cuDevice") => {
                Err(context.dead)
            }
            _ if UNSAFE.contains(&symbol) => self.permitted(),
            _ => Ok(()),
        }
    }

    fn leak(&mut self, symbol: &str, value: u64) {
        let known = self.streams.contains_key(&value)
            || self.events.contains_key(&value)
            || self.modules.contains_key(&value)
            || self
                .memory
                .get(&value)
                .is_some_and(|range| range.freed.is_none());
        if symbol == "cuDevicePrimaryCtxRelease_v2" {
            self.leaked_retains += 1;
        } else if known {
            self.leaked.insert(value);
        }
    }
}

// --- captures ---

/// Calls that `cuda.h` and its users know to be unsafe while a graph is captured.
const UNSAFE: [&str; 18] = [
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
];

impl State {
    fn mode(&self) -> u32 {
        let (session, mode) = MODE.get();
        if session == self.session {
            mode
        } else {
            GLOBAL
        }
    }

    /// Invalidates the captures of which `which` is true of stream and capture; whether there was
    /// one.
    fn invalidate(&mut self, which: impl Fn(u64, &Capture) -> bool) -> bool {
        let hit = self
            .captures
            .iter_mut()
            .filter(|(stream, capture)| which(**stream, capture));
        hit.map(|(_, capture)| capture.valid = false).count() > 0
    }

    /// Refuses an unsafe call of this thread, by its mode.
    fn permitted(&mut self) -> Result {
        let mode = self.mode();
        let here = thread();
        let hit = self.invalidate(|_, capture| {
            let concerns = capture.thread == here || (mode == GLOBAL && capture.mode == GLOBAL);
            mode != RELAXED && capture.mode != RELAXED && concerns
        });
        require(!hit, CAPTURE_UNSUPPORTED)
    }

    /// The capturing streams that work on the legacy stream of a context would wait for.
    fn blocked_by(&self, id: u64) -> Vec<u64> {
        let stream = &self.streams[&id];
        let blocks = |of: &Stream| of.blocking && of.context == stream.context;
        let waits = |of: &u64| stream.legacy && self.streams.get(of).is_some_and(blocks);
        self.captures.keys().copied().filter(waits).collect()
    }

    /// A stream to give work to.
    fn work_stream(&mut self, handle: Handle) -> Result<u64> {
        let id = self.stream(handle)?;
        let conflicts = self.blocked_by(id);
        let hit = self.invalidate(|stream, _| conflicts.contains(&stream));
        require(!hit, CAPTURE_IMPLICIT)?;
        Ok(id)
    }

    /// A stream whose progress is asked for: it must not be captured.
    fn seen_stream(&mut self, handle: Handle) -> Result<u64> {
        let id = self.work_stream(handle)?;
        let hit = self.invalidate(|stream, _| stream == id);
        require(!hit, CAPTURE_UNSUPPORTED)?;
        Ok(id)
    }

    /// An event whose progress is asked for: it must not be captured.
    fn seen_event(&mut self, event: Handle) -> Result {
        let Some(number) = self.event(event)?.captured else {
            return Ok(());
        };
        self.invalidate(|_, capture| capture.number == number);
        Err(CAPTURED_EVENT)
    }

    /// The capture of a stream.
    fn capture_of(&self, stream: u64) -> Option<u64> {
        self.captures.get(&stream).map(|capture| capture.number)
    }
}

entry!(cuThreadExchangeStreamCaptureMode, |s, mode: *mut u32| {
    require(!mode.is_null(), INVALID_VALUE)?;
    if s.config.mode_in_context {
        s.current()?;
    }
    // SAFETY: the caller passes a place that holds a mode.
    let wanted = unsafe { mode.read() };
    require(wanted <= RELAXED, INVALID_VALUE)?;
    Out(mode).put(s.mode())?;
    MODE.set((s.session, wanted));
    Ok(())
});

entry!(cuStreamBeginCapture_v2, |s, stream: Handle, mode: u32| {
    s.current()?;
    let id = s.stream(stream)?;
    require(!s.streams[&id].legacy, CAPTURE_UNSUPPORTED)?;
    require(mode <= RELAXED, INVALID_VALUE)?;
    require(!s.captures.contains_key(&id), ILLEGAL_STATE)?;
    s.handles += 1;
    let capture = Capture {
        number: s.handles,
        thread: thread(),
        mode,
        valid: true,
    };
    s.captures.insert(id, capture);
    Ok(())
});

entry!(cuStreamEndCapture, |s, stream: Handle, graph: Out<u64>| {
    s.current()?;
    let id = s.stream(stream)?;
    let capture = s.captures.get(&id).ok_or(CAPTURE_UNMATCHED)?;
    let may_end = capture.thread == thread() || capture.mode == RELAXED;
    require(may_end, CAPTURE_WRONG_THREAD)?;
    let valid = capture.valid;
    s.captures.remove(&id);
    if !valid {
        graph.put(0)?;
        return Err(CAPTURE_INVALIDATED);
    }
    let handle = s.handle("graph");
    s.graphs.insert(handle);
    graph.put(handle)
});

entry!(
    cuStreamIsCapturing,
    |s, stream: Handle, status: Out<u32>| {
        let id = s.stream(stream)?;
        require(s.blocked_by(id).is_empty(), CAPTURE_IMPLICIT)?;
        let capture = s.captures.get(&id);
        let state = capture.map_or(0, |capture| if capture.valid { 1 } else { 2 });
        status.put(state)
    }
);

entry!(cuGraphDestroy, |s, graph: Handle| {
    require(s.graphs.remove(&graph.0), INVALID_VALUE)
});

// --- waiting ---

/// Waits until an operation is done; the host has then seen `clock`.
fn wait_done(s: &mut Held, stream: u64, seq: u64, clock: &Clock) -> Result {
    while !s.is_done(stream, seq) {
        let context = s.streams[&stream].context;
        s.alive(context)?;
        s.wait();
    }
    join(&mut s.host, clock);
    Ok(())
}

/// Waits for everything of a context.
fn wait_context(s: &mut Held, context: u64) -> Result {
    let of_it = s
        .streams
        .iter()
        .filter(|(_, stream)| stream.context == context);
    let all: Vec<_> = of_it
        .map(|(id, stream)| (*id, stream.last, stream.clock.clone()))
        .collect();
    all.iter()
        .try_for_each(|(stream, seq, clock)| wait_done(s, *stream, *seq, clock))
}

// --- devices and contexts ---

entry!(cuInit, |s, flags: u32| {
    require(s.config.init_error == SUCCESS, s.config.init_error)?;
    s.initialised = true;
    Ok(())
});

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<i32>) -> u32 {
    match Held::lock().config.driver_version {
        code @ ..0 => code.unsigned_abs(),
        known => version.put(known).err().unwrap_or(SUCCESS),
    }
}

entry!(cuDeviceGetCount, |s, count: Out<i32>| count
    .put(s.devices.len() as i32));

entry!(cuDeviceGet, |s, device: Out<i32>, ordinal: i32| s
    .device(ordinal)
    .and_then(|_| device.put(ordinal)));

entry!(cuDeviceGetName, |s,
                         name: *mut c_char,
                         len: i32,
                         device: i32| {
    put_text(name, len.max(0) as usize, &s.device(device)?.name)
});

entry!(
    cuDeviceGetPCIBusId,
    |s, bus: *mut c_char, len: i32, device: i32| put_text(
        bus,
        len.max(0) as usize,
        &s.device(device)?.bus
    )
);

entry!(cuDeviceTotalMem_v2, |s, bytes: Out<usize>, device: i32| {
    bytes.put(s.device(device)?.bytes as usize)
});

entry!(
    cuDeviceGetAttribute,
    |s, value: Out<i32>, attribute: i32, device: i32| {
        s.device(device)?;
        value.put(match attribute {
            16 => 108, // MULTIPROCESSOR_COUNT
            40 => 2,   // ASYNC_ENGINE_COUNT
            75 => 8,   // COMPUTE_CAPABILITY_MAJOR
            115 => 1,  // MEMORY_POOLS_SUPPORTED
            _ => 0,
        })
    }
);

entry!(cuDevicePrimaryCtxRetain, |s, out: Out<u64>, device: i32| {
    let context = match s.device(device)?.primary {
        Some(context) => {
            s.alive(context)?;
            context
        }
        None => new_context(s, device as usize),
    };
    s.contexts
        .entry(context)
        .and_modify(|context| context.retains += 1);
    out.put(context)
});

fn new_context(s: &mut State, device: usize) -> u64 {
    let context = s.handle("context");
    let legacy = new_stream(s, context, true, None);
    let new = Context {
        device,
        retains: 0,
        dead: SUCCESS,
        legacy,
    };
    s.contexts.insert(context, new);
    s.devices[device].primary = Some(context);
    context
}

/// Its registrations end with it, and count as alive for ever if nobody tried to end them.
fn destroy_context(s: &mut State, context: u64, device: usize) {
    let State {
        memory,
        leaked,
        abandoned,
        ..
    } = &mut *s;
    memory.retain(|start, range| {
        let ends = range.context == context && range.place == Place::Registered;
        if ends && !leaked.contains(start) {
            *abandoned = (abandoned.0 + 1, abandoned.1 + range.len);
        }
        !ends
    });
    s.contexts.remove(&context);
    s.devices[device].primary = None;
    CHANGED.notify_all();
}

entry!(cuDevicePrimaryCtxRelease_v2, |s, device: i32| {
    let context = s.device(device)?.primary.ok_or(INVALID_CONTEXT)?;
    if s.contexts[&context].retains == 1 {
        // A dead context has nothing to wait for.
        let _ = wait_context(s, context);
        destroy_context(s, context, device as usize);
    } else {
        s.contexts
            .entry(context)
            .and_modify(|context| context.retains -= 1);
    }
    Ok(())
});

entry!(
    cuDevicePrimaryCtxGetState,
    |s, device: i32, flags: Out<u32>, active: Out<i32>| {
        let is_active = s.device(device)?.primary.is_some();
        flags.put(0)?;
        active.put(is_active.into())
    }
);

entry!(cuCtxGetCurrent, |s, out: Out<u64>| out
    .put(s.current_handle().unwrap_or_default()));

entry!(cuCtxSetCurrent, |s, context: Handle| {
    if context.0 != 0 {
        s.contexts.get(&context.0).ok_or(INVALID_CONTEXT)?;
        s.alive(context.0)?;
    }
    s.change_current(|stack| {
        stack.pop();
        if context.0 != 0 {
            stack.push(context.0);
        }
    });
    Ok(())
});

entry!(cuCtxPushCurrent_v2, |s, context: Handle| {
    let context = Handle(context.0 & !GREEN);
    s.contexts.get(&context.0).ok_or(INVALID_CONTEXT)?;
    s.alive(context.0)?;
    s.change_current(|stack| stack.push(context.0));
    Ok(())
});

entry!(cuCtxPopCurrent_v2, |s, out: Out<u64>| {
    let context = s.current_handle().ok_or(INVALID_CONTEXT)?;
    s.change_current(|stack| {
        stack.pop();
    });
    // Nobody has to want it.
    let _ = out.put(context);
    Ok(())
});

entry!(cuCtxGetDevice, |s, device: Out<i32>| device
    .put(s.alive(s.current()?)?.device as i32));

entry!(cuCtxSynchronize, |s| {
    let context = s.current()?;
    let State {
        streams, captures, ..
    } = &mut **s;
    let mut conflicts = captures
        .iter_mut()
        .filter(|(stream, _)| streams[*stream].context == context)
        .peekable();
    if conflicts.peek().is_some() {
        conflicts.for_each(|(_, capture)| capture.valid = false);
        return Err(CAPTURE_UNSUPPORTED);
    }
    wait_context(s, context)
});

// --- streams and events ---

/// A stream of this priority; without one, the legacy stream.
fn new_stream(s: &mut State, context: u64, blocking: bool, priority: Option<i32>) -> u64 {
    let legacy = priority.is_none();
    let id = s.handle(if legacy { "legacy" } else { "stream" });
    let shared = s.share_queue(context, priority.unwrap_or_default());
    let stream = Stream {
        context,
        blocking,
        legacy,
        shared,
        ..Stream::default()
    };
    s.streams.insert(id, stream);
    let spawned = std::thread::Builder::new()
        .name("standin-stream".into())
        .spawn(move || worker(id));
    spawned.expect("a thread for the stream");
    id
}

impl State {
    /// The hardware queue of a new stream: those of its priority, in turn.
    fn share_queue(&mut self, context: u64, priority: i32) -> Option<Queue> {
        let made = self.made.entry((context, priority)).or_default();
        *made += 1;
        let number = made.checked_rem(self.config.queues)?;
        Some((context, priority, number))
    }
}

fn create_stream(s: &mut State, out: &Out<u64>, flags: u32, priority: i32) -> Result {
    let context = s.current()?;
    require(flags <= 1, INVALID_VALUE)?;
    let stream = new_stream(s, context, flags == 0, Some(priority));
    out.put(stream)
}

entry!(
    cuStreamCreate,
    |s, out: Out<u64>, flags: u32| create_stream(s, &out, flags, 0)
);

entry!(
    cuStreamCreateWithPriority,
    |s, out: Out<u64>, flags: u32, priority: i32| create_stream(s, &out, flags, priority)
);

/// As of a GPU: 0 is the lowest priority, a lower number is a higher one.
const HIGHEST_PRIORITY: i32 = -5;

entry!(
    cuCtxGetStreamPriorityRange,
    |s, least: Out<i32>, greatest: Out<i32>| {
        s.current()?;
        least.put(0)?;
        greatest.put(HIGHEST_PRIORITY)
    }
);

entry!(cuStreamDestroy_v2, |s, stream: Handle| {
    s.current()?;
    let id = s.stream(stream)?;
    let stream = s
        .streams
        .get_mut(&id)
        .filter(|stream| !stream.legacy)
        .ok_or(INVALID_HANDLE)?;
    stream.closing = true;
    s.captures.remove(&id);
    CHANGED.notify_all();
    Ok(())
});

entry!(cuStreamSynchronize, |s, stream: Handle| {
    s.current()?;
    let id = s.seen_stream(stream)?;
    sync(s, id)
});

fn sync(s: &mut Held, stream: u64) -> Result {
    let last = s.streams[&stream].last;
    let clock = s.streams[&stream].clock.clone();
    wait_done(s, stream, last, &clock)
}

entry!(cuStreamQuery, |s, stream: Handle| {
    s.current()?;
    let id = s.seen_stream(stream)?;
    let stream = &s.streams[&id];
    require(stream.done == stream.last, NOT_READY)?;
    let clock = stream.clock.clone();
    join(&mut s.host, &clock);
    Ok(())
});

entry!(cuStreamGetCtx, |s, stream: Handle, out: Out<u64>| {
    let Stream { context, green, .. } = s.streams[&s.stream(stream)?];
    out.put(if green { context | GREEN } else { context })
});

entry!(cuStreamGetGreenCtx, |s, stream: Handle, out: Out<u64>| {
    let Stream { context, green, .. } = s.streams[&s.stream(stream)?];
    out.put(if green { context | GREEN } else { 0 })
});

/// Whatever the green context, the stream works in the current one.
entry!(
    cuGreenCtxStreamCreate,
    |s, out: Out<u64>, _green: Handle, _flags: u32, priority: i32| {
        let context = s.current()?;
        let id = new_stream(s, context, false, Some(priority));
        s.streams.entry(id).and_modify(|stream| stream.green = true);
        out.put(id)
    }
);

entry!(cuStreamWaitEvent, |s,
                           stream: Handle,
                           event: Handle,
                           flags: u32| {
    s.current()?;
    let id = s.work_stream(stream)?;
    let here = s.capture_of(id);
    let there = s.event(event)?.captured;
    if here != there {
        s.invalidate(|_, capture| [here, there].contains(&Some(capture.number)));
        return Err(CAPTURE_ISOLATION);
    }
    // An event that was never recorded is no event to wait for.
    if let Some((stream, seq, clock)) = recorded(s, event)? {
        s.enqueue(id, vec![], Some(((stream, seq), clock)), Work::Marker);
    }
    Ok(())
});

entry!(cuEventCreate, |s, out: Out<u64>, flags: u32| {
    let context = s.current()?;
    let event = s.handle("event");
    let new = Event {
        context,
        timing: flags & 2 == 0,
        record: None,
        captured: None,
    };
    s.events.insert(event, new);
    out.put(event)
});

entry!(cuEventRecord, |s, event: Handle, stream: Handle| {
    s.current()?;
    let id = s.work_stream(stream)?;
    let context = s.event(event)?.context;
    require(context == s.streams[&id].context, INVALID_HANDLE)?;
    let captured = s.capture_of(id);
    s.event(event)?.captured = captured;
    if captured.is_some() {
        s.event(event)?.record = None;
        return Ok(());
    }
    let seq = s.enqueue(id, vec![], None, Work::Record(event.0));
    let clock = s.streams[&id].clock.clone();
    s.event(event)?.record = Some(Record {
        stream: id,
        seq,
        clock,
        at: None,
    });
    Ok(())
});

/// The event's record: stream, operation, clock.
fn recorded(s: &mut State, event: Handle) -> Result<Option<(u64, u64, Clock)>> {
    let record = s.event(event)?.record.as_ref();
    Ok(record.map(|record| (record.stream, record.seq, record.clock.clone())))
}

entry!(cuEventQuery, |s, event: Handle| {
    s.seen_event(event)?;
    let Some((stream, seq, clock)) = recorded(s, event)? else {
        return Ok(());
    };
    require(s.is_done(stream, seq), NOT_READY)?;
    join(&mut s.host, &clock);
    Ok(())
});

entry!(cuEventSynchronize, |s, event: Handle| {
    s.current()?;
    s.seen_event(event)?;
    match recorded(s, event)? {
        Some((stream, seq, clock)) => wait_done(s, stream, seq, &clock),
        None => Ok(()),
    }
});

fn elapsed(s: &mut State, out: &Out<f32>, start: Handle, end: Handle) -> Result {
    let mut times = [None; 2];
    for (time, handle) in times.iter_mut().zip([start, end]) {
        s.seen_event(handle)?;
        let event = s.event(handle)?;
        let record = event
            .record
            .as_ref()
            .filter(|_| event.timing)
            .ok_or(INVALID_HANDLE)?;
        *time = record.at;
    }
    let [Some(start), Some(end)] = times else {
        return Err(NOT_READY);
    };
    let seconds = match end.checked_duration_since(start) {
        Some(time) => time.as_secs_f32(),
        None => -start.duration_since(end).as_secs_f32(),
    };
    out.put(seconds * 1e3)
}

entry!(
    cuEventElapsedTime,
    |s, out: Out<f32>, start: Handle, end: Handle| elapsed(s, &out, start, end)
);

entry!(
    cuEventElapsedTime_v2,
    |s, out: Out<f32>, start: Handle, end: Handle| elapsed(s, &out, start, end)
);

entry!(cuEventDestroy_v2, |s, event: Handle| {
    s.event(event)?;
    s.events.remove(&event.0);
    Ok(())
});

// --- memory ---

/// New device memory, on pages of its own and followed by one that faults.
fn allocate(s: &mut State, context: u64, len: u64) -> Result<u64> {
    let device = s.alive(context)?.device;
    let Device { bytes, used, .. } = s.devices[device];
    require(len <= bytes - used, OUT_OF_MEMORY)?;
    if s.window == 0 {
        s.window = map(0, 2 * SPAN, PROT_NONE, 0).ok_or(OUT_OF_MEMORY)?;
        s.next = s.window;
    }
    // Large ones lie on large pages; small ones are aligned to 512 bytes and no more.
    let large = len >= LARGE;
    let page = s.next.next_multiple_of(if large { LARGE } else { PAGE });
    let start = if large { page } else { page + 512 };
    let end = (start + len).next_multiple_of(PAGE);
    require(end + PAGE <= s.window + SPAN, OUT_OF_MEMORY)?;
    map(page + SPAN, end - page, PROT_READ_WRITE, MAP_FIXED).ok_or(OUT_OF_MEMORY)?;
    fill(start + SPAN, 0xa5, len);
    s.next = end + PAGE;
    s.devices[device].used += len;
    let name = s.name("mem");
    s.insert_range(start, len, Place::Device(device), context, name);
    Ok(start)
}

/// The bytes of freed memory are those no longer.
fn poison(s: &mut State, start: u64) {
    let Some(&Range {
        len,
        place: Place::Device(device),
        ..
    }) = s.memory.get(&start)
    else {
        return;
    };
    s.devices[device].used -= len;
    let end = (start + len).next_multiple_of(PAGE) + SPAN;
    let at = (start + SPAN).next_multiple_of(PAGE);
    if at < end {
        // SAFETY: pages of this allocation alone, which has been freed.
        unsafe { madvise(at as *mut c_void, (end - at) as usize, MADV_DONTNEED) };
    }
    fill(start + SPAN, 0xdd, len.min(LARGE));
    // Any later use is a violation by itself.
    s.memory
        .entry(start)
        .and_modify(|range| range.history.clear());
}

impl State {
    fn insert_range(&mut self, start: u64, len: u64, place: Place, context: u64, name: String) {
        let range = Range {
            start,
            len,
            place,
            context,
            name,
            freed: None,
            history: vec![],
        };
        self.memory.insert(start, range);
    }

    /// The live allocation that begins there.
    fn to_free(&mut self, start: u64) -> Result<u64> {
        let calling = self.calling();
        match self
            .memory
            .get(&start)
            .filter(|range| matches!(range.place, Place::Device(_)))
        {
            Some(Range {
                freed: None, len, ..
            }) => Ok(*len),
            Some(Range {
                freed: Some(before),
                name,
                ..
            }) => {
                let text = format!("double free of {name}: {before}; again: {calling}");
                self.violation(text);
                Err(INVALID_VALUE)
            }
            None => Err(INVALID_VALUE),
        }
    }
}

entry!(cuMemAlloc_v2, |s, out: Out<u64>, len: usize| {
    let context = s.current()?;
    require(len != 0, INVALID_VALUE)?;
    let start = allocate(s, context, len as u64)?;
    out.put(start)
});

entry!(cuMemFree_v2, |s, at: Address| {
    s.current()?;
    if at.0 == 0 {
        return Ok(());
    }
    s.to_free(at.0)?;
    let context = s.memory[&at.0].context;
    let calling = s.calling();
    s.alive(context)?;
    s.memory
        .entry(at.0)
        .and_modify(|range| range.freed = Some(calling));
    if let Err(code) = wait_context(s, context) {
        s.memory.entry(at.0).and_modify(|range| range.freed = None);
        return Err(code);
    }
    poison(s, at.0);
    Ok(())
});

entry!(cuMemAllocAsync, |s,
                         out: Out<u64>,
                         len: usize,
                         stream: Handle| {
    let id = s.work_stream(stream)?;
    if len == 0 {
        return out.put(0);
    }
    let context = s.streams[&id].context;
    let start = allocate(s, context, len as u64)?;
    let touch = s.device_touch(start, len as u64, true)?;
    s.enqueue(id, vec![touch], None, Work::Marker);
    out.put(start)
});

entry!(cuMemFreeAsync, |s, at: Address, stream: Handle| {
    let id = s.work_stream(stream)?;
    if at.0 == 0 {
        return Ok(());
    }
    let len = s.to_free(at.0)?;
    let touch = s.device_touch(at.0, len, true)?;
    s.enqueue(id, vec![touch], None, Work::Free(at.0));
    let calling = s.calling();
    s.memory
        .entry(at.0)
        .and_modify(|range| range.freed = Some(calling));
    Ok(())
});

entry!(cuMemGetInfo_v2, |s, free: Out<usize>, total: Out<usize>| {
    let device = &s.devices[s.alive(s.current()?)?.device];
    free.put((device.bytes - device.used) as usize)?;
    total.put(device.bytes as usize)
});

entry!(
    cuMemHostRegister_v2,
    |s, at: Address, len: usize, flags: u32| {
        let context = s.current()?;
        let error = s.config.register_error;
        require(error == SUCCESS, error)?;
        let start = at.0;
        let len = len as u64;
        let fits = start != 0 && len != 0 && start % PAGE == 0 && start.checked_add(len).is_some();
        let is_host = fits && !s.in_window(start) && mapped(start, len);
        require(is_host, INVALID_VALUE)?;
        let before = s.memory.range(..start + len).next_back();
        let meets = before.is_some_and(|(_, range)| range.start + range.len > start);
        require(!meets, ALREADY_REGISTERED)?;
        let name = s.name("pin");
        s.insert_range(start, len, Place::Registered, context, name);
        Ok(())
    }
);

/// Pinned host memory goes: nothing may be on its way, as far as the host can know, and it must
/// still be there.
fn unpin(s: &mut State, start: u64, place: Place) -> Result<u64> {
    let range = s
        .memory
        .get(&start)
        .filter(|range| range.place == place)
        .ok_or(NOT_REGISTERED)?;
    let len = range.len;
    let name = range.name.clone();
    let calling = s.calling();
    for text in s.unobserved(start, len) {
        s.violation(format!("{calling}: the host has not seen complete: {text}"));
    }
    if !mapped(start, len) {
        s.violation(format!(
            "{calling}: {name} was unmapped while it was registered"
        ));
    }
    s.memory.remove(&start);
    Ok(len)
}

entry!(cuMemHostUnregister, |s, at: Address| {
    s.current()?;
    unpin(s, at.0, Place::Registered)?;
    Ok(())
});

entry!(cuMemHostAlloc, |s,
                        out: Out<u64>,
                        len: usize,
                        flags: u32| {
    let context = s.current()?;
    require(len != 0, INVALID_VALUE)?;
    let start = map(0, len as u64, PROT_READ_WRITE, 0).ok_or(OUT_OF_MEMORY)?;
    let name = s.name("host");
    s.insert_range(start, len as u64, Place::HostAlloc, context, name);
    out.put(start)
});

entry!(cuMemFreeHost, |s, at: Address| {
    s.current()?;
    let len = unpin(s, at.0, Place::HostAlloc).map_err(|_| INVALID_VALUE)?;
    // SAFETY: mapped by cuMemHostAlloc with this length, and forgotten just now.
    unsafe { munmap(at.0 as *mut c_void, len as usize) };
    Ok(())
});

// --- copies ---

impl State {
    /// The part of a known range that an operation will touch; `None` is pageable memory.
    fn touch(&mut self, at: u64, len: u64, write: bool) -> Result<Option<Touch>> {
        let calling = self.calling();
        let outside = |text: &str| format!("{calling}: {text}");
        let problem = match self.range_at(at) {
            None if self.in_window(at) => outside("the device address belongs to no allocation"),
            None => return Ok(None),
            Some(Range {
                freed: Some(by),
                name,
                ..
            }) => outside(&format!("{name} is used after it was freed: {by}")),
            Some(range) if len > range.len - (at - range.start) => {
                outside(&format!("leaves {}", range.name))
            }
            Some(range) => {
                return Ok(Some(Touch {
                    range: range.start,
                    start: at,
                    end: at + len,
                    write,
                }));
            }
        };
        self.violation(problem);
        Err(INVALID_VALUE)
    }

    /// As `touch`, of memory that a device can reach.
    fn device_touch(&mut self, at: u64, len: u64, write: bool) -> Result<Touch> {
        self.touch(at, len, write)?.ok_or(INVALID_VALUE)
    }
}

/// The four kinds of end a copy may have are two: what a device can reach, and pageable memory.
fn copy(
    s: &mut Held,
    to: (Address, bool),
    from: (Address, bool),
    len: usize,
    stream: Handle,
    wait: bool,
) -> Result {
    let id = s.own_stream(stream)?;
    let (to, to_device) = to;
    let (from, from_device) = from;
    let len = len as u64;
    if len == 0 {
        return Ok(());
    }
    let read = s.touch(from.0, len, false)?;
    require(read.is_some() || !from_device, INVALID_VALUE)?;
    let write = s.touch(to.0, len, true)?;
    require(write.is_some() || !to_device, INVALID_VALUE)?;
    let wrong_side = (!from_device && s.in_window(from.0)) || (!to_device && s.in_window(to.0));
    require(!wrong_side && from.0 != 0 && to.0 != 0, INVALID_VALUE)?;
    if read.is_none() && !wait {
        // The driver stages pageable memory, after all earlier work of the stream.
        sync(s, id)?;
    }
    let source = match read {
        Some(_) => Source::At(s.real(from.0)),
        // SAFETY: the caller passes `len` readable bytes; they are taken now, as the driver does
        // for pageable memory.
        None => Source::Staged(
            unsafe { std::slice::from_raw_parts(from.0 as *const u8, len as usize) }.to_vec(),
        ),
    };
    let work = Work::Copy {
        to: s.real(to.0),
        from: source,
        len,
    };
    let seq = s.enqueue(id, read.into_iter().chain(write).collect(), None, work);
    if !wait && write.is_some() {
        return Ok(());
    }
    // A copy to pageable memory is there when the call returns, or never comes: the memory is the
    // caller's again.
    let copied = sync(s, id);
    while copied.is_err()
        && s.streams
            .get(&id)
            .is_some_and(|stream| stream.busy == Some(seq))
    {
        s.wait();
    }
    copied
}

entry!(
    cuMemcpyHtoDAsync_v2,
    |s, to: Address, from: Address, len: usize, stream: Handle| {
        copy(s, (to, true), (from, false), len, stream, false)
    }
);

entry!(
    cuMemcpyDtoHAsync_v2,
    |s, to: Address, from: Address, len: usize, stream: Handle| {
        copy(s, (to, false), (from, true), len, stream, false)
    }
);

entry!(
    cuMemcpyDtoDAsync_v2,
    |s, to: Address, from: Address, len: usize, stream: Handle| {
        copy(s, (to, true), (from, true), len, stream, false)
    }
);

entry!(cuMemcpyHtoD_v2, |s,
                         to: Address,
                         from: Address,
                         len: usize| copy(
    s,
    (to, true),
    (from, false),
    len,
    Handle(0),
    true
));

entry!(cuMemcpyDtoH_v2, |s,
                         to: Address,
                         from: Address,
                         len: usize| copy(
    s,
    (to, false),
    (from, true),
    len,
    Handle(0),
    true
));

entry!(cuMemsetD8Async, |s,
                         to: Address,
                         byte: u8,
                         len: usize,
                         stream: Handle| {
    let id = s.own_stream(stream)?;
    if len == 0 {
        return Ok(());
    }
    let touch = s.device_touch(to.0, len as u64, true)?;
    let work = Work::Fill {
        to: s.real(to.0),
        byte,
        len: len as u64,
    };
    s.enqueue(id, vec![touch], None, work);
    Ok(())
});

// --- modules, kernels, host functions ---

/// The PTX of an image: itself, or that of a fat binary, whose entries have a kind, lengths and
/// bytes.
///
/// # Safety
/// The image is text with a zero byte at its end, or a whole fat binary.
unsafe fn ptx(image: *const c_char) -> Result<String> {
    // SAFETY: the caller's promise; text ends where it differs from the magic number, or later.
    let byte = |at: usize| unsafe { *image.cast::<u8>().add(at) };
    let number = |at: usize, len: usize| {
        (0..len)
            .rev()
            .fold(0, |number, i| number << 8 | usize::from(byte(at + i)))
    };
    const MAGIC: [u8; 4] = [0x50, 0xed, 0x55, 0xba];
    if image.is_null() || (0..4).any(|at| byte(at) != MAGIC[at]) {
        return Ok(text(image));
    }
    let mut at = 16;
    let end = 16 + number(8, 8);
    while at < end {
        let kind = number(at, 2);
        let from = at + number(at + 4, 4);
        if kind == 1 {
            // SAFETY: within the image, and PTX ends with a zero byte there, too.
            return Ok(text(unsafe { image.add(from) }));
        }
        at = from + number(at + 8, 8);
    }
    Err(NO_BINARY)
}

entry!(
    cuModuleLoadData,
    |s, out: Out<u64>, image: *const c_char| {
        let context = s.current()?;
        // SAFETY: what the driver asks of its caller.
        let image = unsafe { ptx(image) }?;
        require(!image.trim().is_empty(), INVALID_PTX)?;
        let module = s.handle("module");
        s.modules.insert(module, (context, image));
        out.put(module)
    }
);

entry!(cuModuleUnload, |s, module: Handle| {
    s.current()?;
    let (context, _) = s.modules.get(&module.0).ok_or(INVALID_HANDLE)?;
    s.alive(*context)?;
    s.modules.remove(&module.0);
    s.functions.retain(|_, (of, _)| *of != module.0);
    Ok(())
});

entry!(
    cuModuleGetFunction,
    |s, out: Out<u64>, module: Handle, name: Name| {
        s.current()?;
        let name = text(name.0);
        let (_, image) = s.modules.get(&module.0).ok_or(INVALID_HANDLE)?;
        let mut names = image
            .split(".entry")
            .skip(1)
            .filter_map(|rest| Some(rest.split_once('(')?.0.trim()));
        require(names.any(|entry| entry == name), NOT_FOUND)?;
        let function = s.handle("function");
        s.functions.insert(function, (module.0, name));
        out.put(function)
    }
);

/// Copies the parameters out of the caller's array, moves pointers to where their bytes are, and
/// says what is touched.
fn bind(
    s: &mut State,
    name: &str,
    params: *const *const u8,
) -> Result<(KernelFn, Vec<Vec<u64>>, Vec<Touch>)> {
    let kernel = s.kernels.get(name).ok_or(NOT_FOUND)?;
    let function = kernel.function;
    let sizes = kernel.sizes.clone();
    let pointers = kernel.pointers;
    let writes = kernel.writes;
    require(!params.is_null() || sizes.is_empty(), INVALID_VALUE)?;
    let mut values = Vec::new();
    let mut touches = Vec::new();
    for (index, &size) in sizes.iter().enumerate() {
        let mut value = vec![0u64; (size as usize).div_ceil(8).max(1)];
        // SAFETY: the caller passes one pointer for each parameter, to as many bytes as the kernel
        // was registered with.
        unsafe {
            (*params.add(index)).copy_to_nonoverlapping(value.as_mut_ptr().cast(), size as usize)
        };
        let bit = |mask: u64| mask.checked_shr(index as u32).unwrap_or_default() & 1 == 1;
        if bit(pointers) && value[0] != 0 {
            let touch = s.device_touch(value[0], 1, bit(writes))?;
            let range = &s.memory[&touch.range];
            touches.push(Touch {
                start: range.start,
                end: range.start + range.len,
                ..touch
            });
            value[0] = s.real(value[0]);
        }
        values.push(value);
    }
    Ok((function, values, touches))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: Handle,
    params: *const *const u8,
    extra: *const c_void,
) -> u32 {
    let grid = [grid_x, grid_y, grid_z];
    let block = [block_x, block_y, block_z];
    let shape = format!("{grid:?} {block:?}");
    call(
        "cuLaunchKernel",
        &[&function, &shape.as_str(), &shared, &stream],
        |s| {
            let id = s.own_stream(stream)?;
            let (_, name) = s
                .functions
                .get(&function.0)
                .cloned()
                .ok_or(INVALID_HANDLE)?;
            let threads = block
                .iter()
                .try_fold(1u32, |product, side| product.checked_mul(*side));
            let fits = threads.is_some_and(|count| (1..=1024).contains(&count));
            require(fits && !grid.contains(&0) && extra.is_null(), INVALID_VALUE)?;
            let text: Arc<str> = format!("{} ({name})", s.calling()).into();
            s.calling = Some(text);
            let (function, params, touches) = bind(s, &name, params)?;
            let work = Work::Kernel(Launch {
                function,
                grid,
                block,
                params,
            });
            s.enqueue(id, touches, None, work);
            Ok(())
        },
    )
}

entry!(
    cuLaunchHostFunc,
    |s, stream: Handle, function: Option<HostFn>, data: *mut c_void| {
        let id = s.own_stream(stream)?;
        let work = Work::Host {
            function: function.ok_or(INVALID_VALUE)?,
            data: data as usize,
            clock: Clock::new(),
        };
        s.enqueue(id, vec![], None, work);
        Ok(())
    }
);

// --- order: what is enqueued, and what it may touch ---

impl State {
    /// Appends an operation to a stream and checks what it touches; returns its number. What is
    /// captured does not run.
    fn enqueue(
        &mut self,
        id: u64,
        touches: Vec<Touch>,
        wait: Option<((u64, u64), Clock)>,
        mut work: Work,
    ) -> u64 {
        let stream = &self.streams[&id];
        if self.captures.contains_key(&id) {
            return stream.last;
        }
        let mut clock = stream.clock.clone();
        let mut after = Vec::new();
        let seq = stream.last + 1;
        join(&mut clock, &self.host);
        if let Some((op, before)) = wait {
            after.push(op);
            join(&mut clock, &before);
        }
        // The legacy stream and the blocking ones of its context wait for each other.
        for (&other, before) in &self.streams {
            let same = before.context == stream.context && before.blocking && stream.blocking;
            if same && other != id && (before.legacy || stream.legacy) {
                after.push((other, before.last));
                join(&mut clock, &before.clock);
            }
        }
        clock.insert(id, seq);
        for touch in &touches {
            self.check(touch, id, seq, &clock);
        }
        if let Work::Host { clock: seen, .. } = &mut work {
            *seen = clock.clone();
        }
        let stream = self.streams.get_mut(&id).expect("looked up above");
        stream.last = seq;
        stream.clock = clock;
        stream.queue.push_back(Op {
            seq,
            after,
            touches,
            work,
        });
        if let Some(shared) = stream.shared {
            self.submitted
                .entry(shared)
                .or_default()
                .push_back((id, seq));
        }
        CHANGED.notify_all();
        seq
    }

    /// Compares an access with the earlier ones of its range, and becomes one of them.
    fn check(&mut self, touch: &Touch, stream: u64, seq: u64, clock: &Clock) {
        let text = self.calling();
        let host = &self.host;
        let Some(range) = self.memory.get_mut(&touch.range) else {
            return;
        };
        let knows = |clock: &Clock, access: &Access| {
            clock
                .get(&access.stream)
                .is_some_and(|seq| *seq >= access.seq)
        };
        let mut found = Vec::new();
        for access in &range.history {
            let meet = access.touch.start < touch.end && touch.start < access.touch.end;
            if meet && (access.touch.write || touch.write) && !knows(clock, access) {
                let verb = |write: bool| if write { "writes" } else { "reads" };
                let first = verb(access.touch.write);
                let second = verb(touch.write);
                let name = &range.name;
                let before = &access.text;
                found.push(format!(
                    "unordered use of {name}: {before} {first} it; {text} {second} it"
                ));
            }
        }
        // Whatever comes later is after what the host has seen, and after what this access covers
        // and knows.
        range.history.retain(|access| {
            let inside = touch.start <= access.touch.start && access.touch.end <= touch.end;
            let covered = inside && knows(clock, access) && (touch.write || !access.touch.write);
            !covered && !knows(host, access)
        });
        if range.history.len() == HISTORY {
            range.history.remove(0);
        }
        range.history.push(Access {
            touch: *touch,
            stream,
            seq,
            text,
        });
        found.into_iter().for_each(|text| self.violation(text));
    }

    /// Operations on the bytes that the host has not seen complete, though they may be.
    fn unobserved(&self, start: u64, len: u64) -> Vec<Arc<str>> {
        let ranges = self.memory.range(..start + len).map(|(_, range)| range);
        let history = ranges
            .filter(|range| range.start + range.len > start)
            .flat_map(|range| &range.history);
        history
            .filter(|access| access.touch.start < start + len && start < access.touch.end)
            .filter(|access| {
                self.host
                    .get(&access.stream)
                    .is_none_or(|seq| *seq < access.seq)
            })
            .map(|access| access.text.clone())
            .collect()
    }
}

// --- workers ---

enum Step {
    Gone,
    Wait,
    Run(Work),
}

/// The thread of a stream.
fn worker(id: u64) {
    let mut s = Held::lock();
    loop {
        match s.step(id) {
            Step::Gone => return,
            Step::Wait => s.wait(),
            Step::Run(work) => {
                let delay = s.delay(&work);
                s.running += 1;
                let problem = s.unlocked(|| {
                    if !delay.is_zero() {
                        std::thread::sleep(delay);
                    }
                    execute(work)
                });
                s.running -= 1;
                if let Some(problem) = problem {
                    s.violation(problem);
                }
                match FAILED.take() {
                    SUCCESS => s.pop(id),
                    code => s.broke(id, code),
                }
            }
        }
    }
}

impl State {
    fn step(&mut self, id: u64) -> Step {
        let Some(stream) = self.streams.get(&id) else {
            return Step::Gone;
        };
        let context = stream.context;
        let closing = stream.closing;
        let Some(op) = stream.queue.front() else {
            if !closing {
                return Step::Wait;
            }
            self.streams.remove(&id);
            CHANGED.notify_all();
            return Step::Gone;
        };
        if self.hold || self.alive(context).is_err() {
            return Step::Wait;
        }
        if stream
            .shared
            .is_some_and(|shared| self.submitted[&shared].front() != Some(&(id, op.seq)))
        {
            return Step::Wait;
        }
        if let Some(&(other, _)) = op
            .after
            .iter()
            .find(|(stream, seq)| !self.is_done(*stream, *seq))
        {
            // What will never be done takes those that wait for it along.
            let dead = self
                .streams
                .get(&other)
                .and_then(|other| self.alive(other.context).err());
            return dead.map_or(Step::Wait, |code| self.kill(context, code));
        }
        self.begin_work(id, context)
    }

    fn kill(&mut self, context: u64, code: u32) -> Step {
        self.contexts
            .entry(context)
            .and_modify(|context| context.dead = code);
        CHANGED.notify_all();
        Step::Wait
    }

    /// The stream's kernel has failed and is never done.
    fn broke(&mut self, id: u64, code: u32) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.busy = None;
        let context = stream.context;
        self.kill(context, code);
    }

    /// Does at once what takes no time; hands out the rest. The operation stays in the queue until
    /// it is done.
    fn begin_work(&mut self, id: u64, context: u64) -> Step {
        let stream = self.streams.get_mut(&id).expect("seen by the caller");
        if let Some(submitted) = stream
            .shared
            .and_then(|shared| self.submitted.get_mut(&shared))
        {
            submitted.pop_front();
            CHANGED.notify_all();
        }
        let op = stream.queue.front_mut().expect("seen by the caller");
        let seq = op.seq;
        match std::mem::replace(&mut op.work, Work::Marker) {
            Work::Marker => {}
            Work::Record(event) => {
                let record = self
                    .events
                    .get_mut(&event)
                    .and_then(|event| event.record.as_mut());
                if let Some(record) =
                    record.filter(|record| (record.stream, record.seq) == (id, seq))
                {
                    record.at = Some(Instant::now());
                }
            }
            Work::Free(start) => poison(self, start),
            work => {
                let index = self.executed;
                self.executed += 1;
                if let Some(&(_, code)) = self.async_failures.iter().find(|(nth, _)| *nth == index)
                {
                    return self.kill(context, code);
                }
                if let Work::Host { clock, .. } = &work {
                    join(&mut self.host, clock);
                }
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.busy = Some(seq);
                }
                return Step::Run(work);
            }
        }
        self.pop(id);
        self.step(id)
    }

    fn pop(&mut self, id: u64) {
        if let Some(stream) = self.streams.get_mut(&id)
            && let Some(op) = stream.queue.pop_front()
        {
            stream.done = op.seq;
            stream.busy = None;
        }
        CHANGED.notify_all();
    }

    fn delay(&self, work: &Work) -> Duration {
        let bytes = match work {
            Work::Copy { len, .. } | Work::Fill { len, .. } => *len,
            _ => 0,
        };
        let transfer = match self.config.bandwidth {
            0 => 0.0,
            bandwidth => bytes as f64 / bandwidth as f64,
        };
        self.config.latency + Duration::from_secs_f64(transfer)
    }
}

/// Moves the bytes, or runs the code; a problem is a violation.
fn execute(work: Work) -> Option<String> {
    match work {
        Work::Copy { to, from, len } => {
            let from = match &from {
                Source::At(from) => *from,
                Source::Staged(bytes) => bytes.as_ptr() as u64,
            };
            if !mapped(from, len) || !mapped(to, len) {
                return Some(format!("a copy of {len} bytes found its memory unmapped"));
            }
            // SAFETY: both ends were checked when the copy was enqueued, and are mapped; they may
            // overlap.
            unsafe { (to as *mut u8).copy_from(from as *const u8, len as usize) };
        }
        Work::Fill { to, byte, len } => {
            if !mapped(to, len) {
                return Some(format!("a fill of {len} bytes found its memory unmapped"));
            }
            fill(to, byte, len);
        }
        Work::Kernel(launch) => {
            let params = launch.params.iter().map(|param| param.as_ptr().cast());
            let params: Vec<*const c_void> = params.collect();
            let Launch { grid, block, .. } = &launch;
            IN_CALLBACK.set(true);
            (launch.function)(grid.as_ptr(), block.as_ptr(), params.as_ptr());
            IN_CALLBACK.set(false);
        }
        Work::Host { function, data, .. } => {
            IN_CALLBACK.set(true);
            function(data as *mut c_void);
            IN_CALLBACK.set(false);
        }
        Work::Marker | Work::Record(_) | Work::Free(_) => {}
    }
    None
}

// --- names of errors ---

/// Code, name and words of each.
const ERROR_LINES: &str = "\
0 CUDA_SUCCESS no error
1 CUDA_ERROR_INVALID_VALUE invalid argument
2 CUDA_ERROR_OUT_OF_MEMORY out of memory
3 CUDA_ERROR_NOT_INITIALIZED initialization error
4 CUDA_ERROR_DEINITIALIZED driver shutting down
34 CUDA_ERROR_STUB_LIBRARY CUDA driver is a stub library
46 CUDA_ERROR_DEVICE_UNAVAILABLE CUDA-capable device(s) is/are busy or unavailable
100 CUDA_ERROR_NO_DEVICE no CUDA-capable device is detected
101 CUDA_ERROR_INVALID_DEVICE invalid device ordinal
200 CUDA_ERROR_INVALID_IMAGE device kernel image is invalid
201 CUDA_ERROR_INVALID_CONTEXT invalid device context
209 CUDA_ERROR_NO_BINARY_FOR_GPU no kernel image is available for execution on the device
214 CUDA_ERROR_ECC_UNCORRECTABLE uncorrectable ECC error encountered
218 CUDA_ERROR_INVALID_PTX a PTX JIT compilation failed
221 CUDA_ERROR_JIT_COMPILER_NOT_FOUND PTX JIT compiler library not found
222 CUDA_ERROR_UNSUPPORTED_PTX_VERSION the provided PTX was compiled with an unsupported toolchain.
304 CUDA_ERROR_OPERATING_SYSTEM OS call failed or operation not supported on this OS
400 CUDA_ERROR_INVALID_HANDLE invalid resource handle
401 CUDA_ERROR_ILLEGAL_STATE the operation cannot be performed in the present state
500 CUDA_ERROR_NOT_FOUND named symbol not found
600 CUDA_ERROR_NOT_READY device not ready
700 CUDA_ERROR_ILLEGAL_ADDRESS an illegal memory access was encountered
701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES too many resources requested for launch
702 CUDA_ERROR_LAUNCH_TIMEOUT the launch timed out and was terminated
709 CUDA_ERROR_CONTEXT_IS_DESTROYED context is destroyed
710 CUDA_ERROR_ASSERT device-side assert triggered
712 CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED part or all of the requested memory range is already mapped
713 CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED pointer does not correspond to a registered memory region
716 CUDA_ERROR_MISALIGNED_ADDRESS misaligned address
719 CUDA_ERROR_LAUNCH_FAILED unspecified launch failure
800 CUDA_ERROR_NOT_PERMITTED operation not permitted
801 CUDA_ERROR_NOT_SUPPORTED operation not supported
802 CUDA_ERROR_SYSTEM_NOT_READY system not yet initialized
803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH system has unsupported display driver / cuda driver combination
900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED operation not permitted when stream is capturing
901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED operation failed due to a previous error during capture
903 CUDA_ERROR_STREAM_CAPTURE_UNMATCHED capture was not initiated in this stream
905 CUDA_ERROR_STREAM_CAPTURE_ISOLATION dependency created on uncaptured work in another stream
906 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT operation would make the legacy stream depend on a capturing one
907 CUDA_ERROR_CAPTURED_EVENT operation not permitted on an event last recorded in a capturing stream
908 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD attempt to terminate a capture sequence from another thread
999 CUDA_ERROR_UNKNOWN unknown error";

/// Name and words by code.
static ERRORS: LazyLock<BTreeMap<u32, [CString; 2]>> = LazyLock::new(|| {
    let error = |line: &str| {
        let [code, name, words] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else {
            return None;
        };
        let texts = [CString::new(name).ok()?, CString::new(words).ok()?];
        Some((code.parse::<u32>().ok()?, texts))
    };
    ERROR_LINES.lines().filter_map(error).collect()
});

/// Puts the name (0) or the words (1) of an error.
fn describe(code: u32, out: &Out<*const c_char>, which: usize) -> u32 {
    let Some(texts) = ERRORS.get(&code) else {
        let _ = out.put(std::ptr::null());
        return INVALID_VALUE;
    };
    out.put(texts[which].as_ptr()).err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: u32, out: Out<*const c_char>) -> u32 {
    describe(code, &out, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: u32, out: Out<*const c_char>) -> u32 {
    describe(code, &out, 1)
}

// --- controls ---

/// Begins a session: forgets all objects, waits for what is running, and applies `key=value` lines.
#[unsafe(no_mangle)]
pub extern "C" fn standin_reset(config: *const c_char) {
    let lines = text(config);
    let mut s = Held::lock();
    stop(&mut s);
    for range in s
        .memory
        .values()
        .filter(|range| range.place == Place::HostAlloc)
    {
        // SAFETY: mapped by cuMemHostAlloc with this length; no operation is left that knows it.
        unsafe { munmap(range.start as *mut c_void, range.len as usize) };
    }
    let old = std::mem::take(&mut *s);
    if old.window != 0 {
        let len = old.next - old.window;
        let reserved = map(old.window + SPAN, len, PROT_NONE, MAP_FIXED);
        reserved.expect("the range is ours");
    }
    s.session = old.session + 1;
    s.initialised = old.initialised;
    s.kernels = old.kernels;
    s.handles = old.handles;
    s.window = old.window;
    s.next = old.next;
    s.config.driver_version = 12_040;
    lines
        .lines()
        .filter_map(|line| line.split_once('='))
        .for_each(|(key, value)| s.configure(key, value));
}

impl State {
    fn configure(&mut self, key: &str, value: &str) {
        let number: u64 = value.parse().unwrap_or_default();
        match key {
            "device" => {
                let mut parts = value.split('|');
                let mut next = || parts.next().unwrap_or_default().to_string();
                self.devices.push(Device {
                    name: next(),
                    bytes: next().parse().unwrap_or_default(),
                    bus: next(),
                    used: 0,
                    primary: None,
                });
            }
            "driver_version" => self.config.driver_version = value.parse().unwrap_or_default(),
            "mode_in_context" => self.config.mode_in_context = number != 0,
            "init_error" => self.config.init_error = number as u32,
            "register_error" => self.config.register_error = number as u32,
            "bandwidth" => self.config.bandwidth = number,
            "queues" => self.config.queues = number,
            "latency_us" => self.config.latency = Duration::from_micros(number),
            _ => self.violation(format!("unknown setting {key}")),
        }
    }
}

/// Drops what has not begun and waits for what has.
fn stop(s: &mut Held) {
    s.streams.clear();
    CHANGED.notify_all();
    while s.running > 0 {
        s.wait();
    }
}

/// Ends a session: no operation runs any more; finds registered memory that is gone.
#[unsafe(no_mangle)]
pub extern "C" fn standin_finish() {
    let mut s = Held::lock();
    s.admitted.clear();
    stop(&mut s);
    let gone = s
        .memory
        .values()
        .filter(|range| range.place == Place::Registered && !mapped(range.start, range.len));
    let texts = gone.map(|range| match s.leaked.contains(&range.start) {
        true => format!(
            "{} was unmapped though its unregistration failed",
            range.name
        ),
        false => format!("{} was unmapped while it was registered", range.name),
    });
    let texts: Vec<_> = texts.collect();
    texts.into_iter().for_each(|text| s.violation(text));
}

/// Copies text into a buffer if it fits; returns its length, without the zero byte.
fn give(text: &str, out: *mut c_char, len: usize) -> usize {
    if text.len() < len {
        let _ = put_text(out, len, text);
    }
    text.len()
}

/// The violations so far, one a line.
#[unsafe(no_mangle)]
pub extern "C" fn standin_violations(out: *mut c_char, len: usize) -> usize {
    give(&Held::lock().violations.join("\n"), out, len)
}

#[unsafe(no_mangle)]
pub extern "C" fn standin_forget_violations() {
    Held::lock().violations.clear();
}

/// The calls, one a line: `INDEX THREAD SYMBOL ARGUMENTS = CODE`.
#[unsafe(no_mangle)]
pub extern "C" fn standin_trace(out: *mut c_char, len: usize) -> usize {
    let s = Held::lock();
    let mut text = String::new();
    for line in &s.trace {
        let result = line.result.map_or("...".into(), |code| code.to_string());
        let _ = writeln!(text, "{} = {result}", line.text);
    }
    give(&text, out, len)
}

/// Calls so far: of a symbol, or all.
#[unsafe(no_mangle)]
pub extern "C" fn standin_calls(symbol: *const c_char) -> u64 {
    let s = Held::lock();
    if symbol.is_null() {
        s.calls
    } else {
        s.counts.get(&text(symbol)).copied().unwrap_or_default()
    }
}

/// Call `index` (of `symbol`, or of all if null; the session's first is 0) returns `code` and does
/// nothing.
#[unsafe(no_mangle)]
pub extern "C" fn standin_fail(symbol: *const c_char, index: u64, code: u32, sticky: bool) {
    let symbol = (!symbol.is_null()).then(|| text(symbol));
    Held::lock().failures.push(Failure {
        symbol,
        index,
        code,
        sticky,
    });
}

/// From now on only the session's first `count` calls of a symbol pass; the others wait until more
/// are admitted.
#[unsafe(no_mangle)]
pub extern "C" fn standin_admit(symbol: *const c_char, count: u64) {
    Held::lock().admitted.insert(text(symbol), count);
    CHANGED.notify_all();
}

/// Operation `nth` (copies, fills, kernels, host functions; the session's first is 0) fails on its
/// stream.
#[unsafe(no_mangle)]
pub extern "C" fn standin_fail_async(nth: u64, code: u32) {
    Held::lock().async_failures.push((nth, code));
}

/// For kernels: the one that runs on this thread fails with `code`, as an illegal access does, and
/// kills its context.
#[unsafe(no_mangle)]
pub extern "C" fn standin_kernel_fails(code: u32) {
    FAILED.set(code);
}

/// While held, no operation begins.
#[unsafe(no_mangle)]
pub extern "C" fn standin_hold(hold: bool) {
    Held::lock().hold = hold;
    CHANGED.notify_all();
}

/// Operations executed so far.
#[unsafe(no_mangle)]
pub extern "C" fn standin_executed() -> u64 {
    Held::lock().executed
}

/// Operations enqueued and not done that touch these bytes.
#[unsafe(no_mangle)]
pub extern "C" fn standin_in_flight(at: Address, len: usize) -> usize {
    let s = Held::lock();
    let end = at.0.saturating_add(len as u64);
    s.streams
        .values()
        .flat_map(|stream| &stream.queue)
        .filter(|op| {
            op.touches
                .iter()
                .any(|touch| touch.start < end && at.0 < touch.end)
        })
        .count()
}

/// Operations that touch these bytes and that the host has not seen complete, done or not.
#[unsafe(no_mangle)]
pub extern "C" fn standin_unobserved(at: Address, len: usize) -> usize {
    Held::lock().unobserved(at.0, len as u64).len()
}

/// Where the bytes of a device pointer are; null if it belongs to no live allocation.
#[unsafe(no_mangle)]
pub extern "C" fn standin_host_address(at: Address) -> *mut u8 {
    let s = Held::lock();
    let live = s
        .range_at(at.0)
        .is_some_and(|range| range.freed.is_none() && matches!(range.place, Place::Device(_)));
    let place = live.then(|| s.real(at.0) as *mut u8);
    place.unwrap_or(std::ptr::null_mut())
}

/// As `standin_host_address`, for code that is about to access (or has just accessed) the bytes
/// itself, outside of any stream, as cuFile does: everything enqueued on them must have been seen
/// complete. `what` names the access.
#[unsafe(no_mangle)]
pub extern "C" fn standin_access(
    at: Address,
    len: usize,
    write: bool,
    what: *const c_char,
) -> *mut u8 {
    let what = text(what);
    let mut s = Held::lock();
    s.calling = Some(what.as_str().into());
    let Ok(touch) = s.device_touch(at.0, len as u64, write) else {
        return std::ptr::null_mut();
    };
    let range = &s.memory[&touch.range];
    let host = &s.host;
    let unordered = range.history.iter().filter(|access| {
        let meet = access.touch.start < touch.end && touch.start < access.touch.end;
        let seen = host
            .get(&access.stream)
            .is_some_and(|seq| *seq >= access.seq);
        meet && !seen && (write || access.touch.write)
    });
    let name = &range.name;
    let texts: Vec<_> = unordered
        .map(|access| format!("unordered use of {name}: {}; {what}", access.text))
        .collect();
    texts.into_iter().for_each(|text| s.violation(text));
    s.real(at.0) as *mut u8
}

/// What is alive: retains, streams, events, device allocations and their bytes, registrations and
/// their bytes, host allocations, modules; then what the driver leaked because its release was
/// refused: count and bytes of device memory.
#[unsafe(no_mangle)]
pub extern "C" fn standin_live(out: Out<[u64; 11]>) {
    let s = Held::lock();
    let kept = |handle: &u64| !s.leaked.contains(handle);
    let ranges = |wanted: fn(Place) -> bool, leaked: bool| {
        let live = s
            .memory
            .values()
            .filter(move |range| range.freed.is_none() && wanted(range.place));
        live.filter(|range| kept(&range.start) != leaked)
            .fold((0, 0), |sum, range| (sum.0 + 1, sum.1 + range.len))
    };
    let device = |leaked| ranges(|place| matches!(place, Place::Device(_)), leaked);
    let (allocations, bytes) = device(false);
    let (registrations, registered) = ranges(|place| place == Place::Registered, false);
    let registrations = registrations + s.abandoned.0;
    let registered = registered + s.abandoned.1;
    let (host, _) = ranges(|place| place == Place::HostAlloc, false);
    let retains: u64 = s.contexts.values().map(|context| context.retains).sum();
    let streams = s
        .streams
        .iter()
        .filter(|(id, stream)| kept(id) && !stream.legacy && !stream.closing)
        .count();
    let events = s.events.keys().filter(|id| kept(id)).count();
    let modules = s.modules.keys().filter(|id| kept(id)).count();
    let retains = retains.saturating_sub(s.leaked_retains);
    let leaked = s.leaked.len() as u64 + s.leaked_retains;
    let (_, leaked_bytes) = device(true);
    let _ = out.put([
        retains,
        streams as u64,
        events as u64,
        allocations,
        bytes,
        registrations,
        registered,
        host,
        modules as u64,
        leaked,
        leaked_bytes,
    ]);
}

/// Code for kernels of this name in any module. `sizes` has a size in bytes for each parameter; bit
/// i of `pointers` says that parameter i is a device pointer, of `writes` that its allocation is
/// written. Stays for all sessions.
#[unsafe(no_mangle)]
pub extern "C" fn standin_register_kernel(
    name: *const c_char,
    function: KernelFn,
    sizes: *const u32,
    count: usize,
    pointers: u64,
    writes: u64,
) {
    // SAFETY: the caller passes `count` sizes.
    let sizes = if count == 0 {
        vec![]
    } else {
        unsafe { std::slice::from_raw_parts(sizes, count) }.to_vec()
    };
    let kernel = Kernel {
        function,
        sizes,
        pointers,
        writes,
    };
    Held::lock().kernels.insert(text(name), kernel);
}
