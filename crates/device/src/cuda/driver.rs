//! The CUDA driver calls of this crate, each a function that returns a [`Result`].
//!
//! ```text
//! Driver   the library, opened once per process, with our own symbol table; a missing symbol is a reason, not a panic
//! Gpu      one device and its context; every call binds the context itself and leaves the thread unchanged
//! Event, DeviceMemory, CopyStream, Pin   each owns one driver object (driver/objects.rs)
//! ```
//!
//! Invariants:
//! * Result codes are plain numbers: a newer driver may return a code that no enum has.
//! * The `Gpu` latches an error that breaks the context ("sticky"). From then on nothing is called,
//!   not even in `drop`: the context keeps its objects, and they are counted as leaked.
//! * Nothing is freed while the device may still use it. If that cannot be established, the object
//!   is leaked and counted.
//! * A thread that captures a CUDA graph in global mode makes the driver refuse calls of all
//!   threads, and such a call ends the capture. So calls use the relaxed mode ([`Gpu::bind`]), or
//!   are among the few that end no capture ([`Gpu::enter`]), and no event is recorded on a
//!   capturing stream. A call refused anyway is repeated: the refusal says nothing about the
//!   device.

#![allow(unsafe_code)]

pub mod objects;
#[cfg(any(test, feature = "unstable"))]
pub mod simulated;

pub(crate) use objects::{CopyStream, DeviceMemory, Event, Pin};

use super::found::{Absent, Found, hint};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use libloading::Library;
use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

/// The API version of the committed kernels and the symbols below, in the driver's encoding.
const VERSION_LEAST: c_int = 12_000;

/// Opaque driver handles. Numbers, so that they can cross threads: driver objects are usable from
/// any thread.
pub type Handle = usize;
pub(crate) use crate::backend::DevicePtr;

pub(crate) use crate::stream::LEGACY;

const SUCCESS: c_int = 0;
const NOT_READY: c_int = 600;
/// Result codes of calls that are refused during a graph capture.
const CAPTURES: std::ops::RangeInclusive<c_int> = 900..=907;
/// Result code: the call would make the legacy stream depend on a capturing stream.
const CAPTURE_IMPLICIT: c_int = 906;
/// Capture mode of a thread in which other threads' captures do not affect its calls.
const RELAXED: c_uint = 2;
/// Maximum number of attempts for a call that a capture refuses, and the time between two attempts.
const AGAIN: (u32, Duration) = (10_000, Duration::from_millis(1));
/// Not a driver code. Set if it could not be established whether the device still uses memory.
const GIVEN_UP: c_int = -1;

macro_rules! symbols {
    ($($field:ident: $name:literal ($($arg:ty),*);)*) => {
        /// The table of symbols.
        struct Symbols {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            /// `cuStreamGetGreenCtx`, from CUDA 12.4 on.
            stream_green: Option<unsafe extern "C" fn(Handle, *mut Handle) -> c_int>,
        }

        impl Symbols {
            fn load(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    // SAFETY: the signatures below match CUDA's driver API since version 11, which
                    // has a stable ABI; the library stays open for the life of the process.
                    $($field: *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                        .map_err(|_| concat!("the driver library has no `", $name, "`").to_string())?,)*
                    // SAFETY: as above.
                    stream_green: unsafe { library.get(b"cuStreamGetGreenCtx\0") }.ok().map(|symbol| *symbol),
                })
            }

            /// A table of functions that fail with `CUDA_ERROR_NOT_SUPPORTED`.
            #[cfg(any(test, feature = "unstable"))]
            fn unsupported() -> Self {
                Self {
                    $($field: {
                        extern "C" fn unsupported($(_: $arg),*) -> c_int { 801 }
                        unsupported
                    },)*
                    stream_green: None,
                }
            }
        }
    };
}

symbols! {
    init: "cuInit" (c_uint);
    driver_version: "cuDriverGetVersion" (*mut c_int);
    device_count: "cuDeviceGetCount" (*mut c_int);
    device_get: "cuDeviceGet" (*mut c_int, c_int);
    device_name: "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_pci: "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_bytes: "cuDeviceTotalMem_v2" (*mut usize, c_int);
    primary_retain: "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    primary_release: "cuDevicePrimaryCtxRelease_v2" (c_int);
    ctx_push: "cuCtxPushCurrent_v2" (Handle);
    ctx_pop: "cuCtxPopCurrent_v2" (*mut Handle);
    ctx_synchronize: "cuCtxSynchronize" ();
    ctx_device: "cuCtxGetDevice" (*mut c_int);
    stream_priorities: "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    stream_create: "cuStreamCreateWithPriority" (*mut Handle, c_uint, c_int);
    stream_destroy: "cuStreamDestroy_v2" (Handle);
    stream_synchronize: "cuStreamSynchronize" (Handle);
    stream_wait: "cuStreamWaitEvent" (Handle, Handle, c_uint);
    stream_ctx: "cuStreamGetCtx" (Handle, *mut Handle);
    stream_capturing: "cuStreamIsCapturing" (Handle, *mut c_uint);
    exchange_mode: "cuThreadExchangeStreamCaptureMode" (*mut c_uint);
    event_create: "cuEventCreate" (*mut Handle, c_uint);
    event_record: "cuEventRecord" (Handle, Handle);
    event_query: "cuEventQuery" (Handle);
    event_synchronize: "cuEventSynchronize" (Handle);
    event_elapsed: "cuEventElapsedTime" (*mut f32, Handle, Handle);
    event_destroy: "cuEventDestroy_v2" (Handle);
    mem_alloc: "cuMemAlloc_v2" (*mut DevicePtr, usize);
    mem_free: "cuMemFree_v2" (DevicePtr);
    mem_info: "cuMemGetInfo_v2" (*mut usize, *mut usize);
    host_register: "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister: "cuMemHostUnregister" (*mut c_void);
    copy_to_device: "cuMemcpyHtoDAsync_v2" (DevicePtr, *const c_void, usize, Handle);
    copy_to_host: "cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePtr, usize, Handle);
    fill: "cuMemsetD8Async" (DevicePtr, u8, usize, Handle);
    module_load: "cuModuleLoadData" (*mut Handle, *const c_void);
    module_unload: "cuModuleUnload" (Handle);
    module_function: "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    host_func: "cuLaunchHostFunc" (Handle, unsafe extern "C" fn(*mut c_void), *mut c_void);
    launch: "cuLaunchKernel" (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    error_name: "cuGetErrorName" (c_int, *mut *const c_char);
    error_text: "cuGetErrorString" (c_int, *mut *const c_char);
}

/// The open driver library. One per process.
pub(crate) struct Driver {
    symbols: Symbols,
    version: c_int,
    devices: c_int,
}

/// The driver's CUDA version (major, minor), and its devices.
///
/// Errors: the reason why CUDA is not usable.
pub fn devices() -> Result<((i32, i32), Vec<Found>), Absent> {
    let driver = Driver::get()?;
    let devices = (0..driver.devices())
        .filter_map(|ordinal| driver.found(ordinal))
        .collect();
    Ok((driver.version(), devices))
}

impl Driver {
    /// Opens the driver once per process; the result is permanent.
    pub(crate) fn get() -> Result<&'static Self, Absent> {
        static DRIVER: OnceLock<Result<Driver, Absent>> = OnceLock::new();
        DRIVER
            .get_or_init(Self::open)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn open() -> Result<Self, Absent> {
        let library = open_library().map_err(Absent::NoLibrary)?;
        let symbols = Symbols::load(&library).map_err(Absent::TooOld)?;
        // Never close the library: drivers are not tested for being unloaded.
        std::mem::forget(library);
        let mut driver = Self {
            symbols,
            version: 0,
            devices: 0,
        };
        let mut version = 0;
        // SAFETY: the pointer is valid for the call.
        let asked = unsafe { (driver.symbols.driver_version)(&mut version) };
        if asked != SUCCESS {
            return Err(Absent::Init(asked, driver.name_of(asked)));
        }
        if version < VERSION_LEAST {
            let major = version / 1000;
            let minor = version % 1000 / 10;
            return Err(Absent::TooOld(format!(
                "it supports CUDA {major}.{minor}, 12.0 is needed"
            )));
        }
        driver.version = version;
        // SAFETY: no preconditions; the only legal flag is 0.
        let started = unsafe { (driver.symbols.init)(0) };
        // 100: no device.
        if started == 100 {
            return Err(Absent::NoDevice);
        }
        if started != SUCCESS {
            return Err(Absent::Init(started, driver.name_of(started)));
        }
        leave_before_the_driver();
        // SAFETY: the pointer is valid for the call.
        let counted = unsafe { (driver.symbols.device_count)(&mut driver.devices) };
        match (counted, driver.devices) {
            (SUCCESS, 1..) => Ok(driver),
            (SUCCESS | 100, _) => Err(Absent::NoDevice),
            (code, _) => Err(Absent::Init(code, driver.name_of(code))),
        }
    }

    /// Number of devices visible to the process.
    pub(crate) fn devices(&self) -> usize {
        usize::try_from(self.devices).unwrap_or(0)
    }

    /// The newest CUDA version that the driver supports: major, minor.
    pub(crate) fn version(&self) -> (i32, i32) {
        (self.version / 1000, self.version % 1000 / 10)
    }

    /// Properties of a device that need no context.
    pub(crate) fn found(&self, ordinal: usize) -> Option<Found> {
        let device = self.device(c_int::try_from(ordinal).ok()?).ok()?;
        let mut bytes = 0;
        // SAFETY: the pointer is valid for the call. A failure leaves 0, which is only printed.
        let _ = unsafe { (self.symbols.device_bytes)(&mut bytes, device) };
        let name = self.text(self.symbols.device_name, device)?;
        Some(Found {
            ordinal,
            name,
            bytes,
            pci_bus_id: self.pci(device),
        })
    }

    /// Makes a call that needs no context in the relaxed mode, so that it ends no capture. If the
    /// driver cannot set the mode without a context, the call is made anyway. With a broken
    /// context, it is not made.
    fn relaxed(&self, call: impl FnOnce() -> c_int) -> c_int {
        let mut mode = RELAXED;
        let changed = self.exchange(&mut mode);
        if is_sticky(changed) {
            return changed;
        }
        let code = call();
        if changed == SUCCESS {
            let restored = self.exchange(&mut mode);
            if code == SUCCESS && is_sticky(restored) {
                return restored;
            }
        }
        code
    }

    /// Sets the thread's capture mode; `mode` receives the previous one. Returns the driver's code.
    fn exchange(&self, mode: &mut c_uint) -> c_int {
        // SAFETY: the pointer is valid for the call, the value one of the driver's modes.
        unsafe { (self.symbols.exchange_mode)(mode) }
    }

    /// Name of a result code; `unknown` if the driver has none.
    fn name_of(&self, code: c_int) -> String {
        let text = |find: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: the pointer is valid for the call; on success the driver's string is static.
            let found = unsafe { find(code, &mut text) };
            if found != SUCCESS || text.is_null() {
                return None;
            }
            // SAFETY: not null, and the driver's strings end with a zero and live for ever.
            let text = unsafe { CStr::from_ptr(text) };
            Some(text.to_string_lossy().into_owned())
        };
        match (text(self.symbols.error_name), text(self.symbols.error_text)) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            (Some(name), None) => name,
            _ => "unknown code".into(),
        }
    }
}

/// Runs `call`, in which a library calls the driver, in the relaxed mode, so that it ends no other
/// thread's capture.
pub(crate) fn beside_captures<T>(call: impl FnOnce() -> T) -> T {
    let Ok(driver) = Driver::get() else {
        return call();
    };
    let mut mode = RELAXED;
    let changed = driver.exchange(&mut mode);
    let out = call();
    if changed == SUCCESS {
        driver.exchange(&mut mode);
    }
    out
}

fn open_library() -> Result<Library, String> {
    use libloading::os::unix;
    const NOLOAD: c_int = 4;
    // Prefer a library that the process already has open under this name: other CUDA code here uses
    // it too. SAFETY: nothing is loaded, so no initialisers run.
    if let Ok(open) = unsafe { unix::Library::open(Some("libcuda.so"), unix::RTLD_NOW | NOLOAD) } {
        return Ok(open.into());
    }
    // `libcuda.so.1` first: a bare `libcuda.so` on the search path is often the stub for linking.
    let mut words = Vec::new();
    for name in ["libcuda.so.1", "libcuda.so"] {
        // SAFETY: loading the driver runs its initialisers, which support loading at run time.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            // The dynamic linker's message is the source, and begins with the name.
            Err(error) => words.extend(failure(
                name,
                std::error::Error::source(&error)
                    .unwrap_or(&error)
                    .to_string(),
            )),
        }
    }
    Err(match words.is_empty() {
        true => "libcuda.so.1 was not found".into(),
        false => words.join("; "),
    })
}

/// The dynamic linker's message, unless it says that there is no such library: a machine without a
/// driver is no failure.
fn failure(name: &str, message: String) -> Option<String> {
    let missing = format!("{name}: cannot open shared object file: No such file or directory");
    (message != missing).then_some(message)
}

/// Errors that break the context for good: NVIDIA documents that the process must restart.
fn is_sticky(code: c_int) -> bool {
    matches!(
        code,
        4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 802 | 810 | 911 | 999
    )
}

/// Whether the process is exiting, and makes no more calls.
static LEAVING: AtomicBool = AtomicBool::new(false);

/// Makes every later call fail in [`Gpu::intact`].
pub(crate) fn end_calls() {
    LEAVING.store(true, Ordering::SeqCst);
}

pub(crate) fn is_leaving() -> bool {
    LEAVING.load(Ordering::Relaxed)
}

/// Registers an exit handler, after which this process makes no more calls and leaks its driver
/// objects. The driver's own handler was registered before, so it runs later. It ends all driver
/// objects, and a call in progress at that moment may hang or crash.
fn leave_before_the_driver() {
    extern "C" fn leave() {
        end_calls();
    }
    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> c_int;
    }
    // SAFETY: the handler only stores a flag. If there is no room for it, the process exits as
    // without it.
    let _ = unsafe { atexit(leave) };
}

/// Repeats a call while a capture refuses it; returns its code.
fn after_captures(mut call: impl FnMut() -> c_int) -> c_int {
    for _ in 1..AGAIN.0 {
        match call() {
            code if CAPTURES.contains(&code) => std::thread::sleep(AGAIN.1),
            code => return code,
        }
    }
    call()
}

/// Driver objects leaked in this process, because the context was broken or still used them.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Number of objects leaked to broken contexts in this process.
pub(crate) fn leaked() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

pub(crate) fn note_leak() {
    LEAKED.fetch_add(1, Ordering::Relaxed);
}

/// One device, and the loader's context on it.
pub struct Gpu {
    driver: &'static Driver,
    device: c_int,
    context: Handle,
    /// Keeps the context alive: the user's object, or our reference to the primary context.
    owner: ContextOwner,
    name: String,
    pci: Option<String>,
    bytes: usize,
    /// The first sticky error; 0 before.
    latch: AtomicI32,
    /// The last stream that was found to belong to the context: most programs bind one.
    pub(super) known: AtomicUsize,
    /// The kernels, shared by all loaders and kept loaded while one of them uses them.
    pub(super) loaded: Mutex<Weak<dyn Any + Send + Sync>>,
}

enum ContextOwner {
    Retained,
    #[cfg_attr(
        not(feature = "cudarc"),
        allow(dead_code, reason = "only cudarc has a type for contexts")
    )]
    User(#[allow(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>),
}

impl Gpu {
    /// The device's primary context, which CUDA's runtime API, PyTorch and cudarc use too.
    pub(crate) fn primary(driver: &'static Driver, ordinal: usize) -> Result<Arc<Self>> {
        let count = driver.devices();
        let wanted = ordinal;
        let ordinal = c_int::try_from(ordinal)
            .ok()
            .filter(|_| wanted < count)
            .ok_or_else(|| {
                let message = format!("no device cuda:{wanted}; the process sees {count}");
                Error::new(ErrorKind::Device, Stage::Build, message)
            })?;
        let device = driver.device(ordinal)?;
        let mut context = 0;
        // SAFETY: the pointer is valid for the call, `device` came from the driver.
        let code =
            driver.relaxed(|| unsafe { (driver.symbols.primary_retain)(&mut context, device) });
        driver
            .checked(Stage::Build, "cuDevicePrimaryCtxRetain", code)
            .inspect_err(|_| {
                // The context was retained, but broke afterwards.
                if context != 0 {
                    note_leak();
                }
            })?;
        Ok(Arc::new(Self::new(
            driver,
            device,
            context,
            ContextOwner::Retained,
        )))
    }

    /// The user's own context, which lives as long as `owner`.
    #[cfg(feature = "cudarc")]
    pub(crate) fn of_user(
        driver: &'static Driver,
        ordinal: usize,
        context: Handle,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>> {
        let device = driver.device(c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
        Ok(Arc::new(Self::new(
            driver,
            device,
            context,
            ContextOwner::User(owner),
        )))
    }

    fn new(driver: &'static Driver, device: c_int, context: Handle, owner: ContextOwner) -> Self {
        let name = driver.text(driver.symbols.device_name, device);
        let pci = driver.pci(device);
        let mut bytes = 0;
        // SAFETY: the pointer is valid for the call. A failure leaves 0, which is only printed.
        let _ = unsafe { (driver.symbols.device_bytes)(&mut bytes, device) };
        let name = name.unwrap_or_else(|| "a CUDA device".into());
        Self {
            driver,
            device,
            context,
            owner,
            name,
            pci,
            bytes,
            latch: AtomicI32::new(0),
            known: AtomicUsize::new(LEGACY),
            loaded: Mutex::new(Weak::<()>::new()),
        }
    }

    /// Number of the device, as the process sees it.
    pub(crate) fn ordinal(&self) -> usize {
        usize::try_from(self.device).unwrap_or(0)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pci_bus_id(&self) -> Option<&str> {
        self.pci.as_deref()
    }

    /// The context, for comparison with a stream's.
    pub(crate) fn context(&self) -> Handle {
        self.context
    }

    /// Whether an error broke the context.
    pub(crate) fn is_broken(&self) -> bool {
        self.latch.load(Ordering::Acquire) != 0
    }

    /// Maps a result code of this context to an error, and latches a sticky one.
    pub(crate) fn check(&self, what: &'static str, code: c_int) -> Result<()> {
        if is_sticky(code) {
            // The first error is the cause; later ones repeat it.
            let _ = self
                .latch
                .compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
        }
        self.driver
            .checked(Stage::Device, what, code)
            .map_err(|error| error.within(format_args!("cuda:{}", self.ordinal())))
    }

    /// Destroys a driver object; counts it as leaked if the driver refuses.
    fn released(&self, what: &'static str, call: impl FnMut() -> c_int) {
        if self.check(what, after_captures(call)).is_err() {
            note_leak();
        }
    }

    /// Marks the context as broken, because the device's remaining use of memory is unknown.
    pub(crate) fn give_up(&self) {
        let _ = self
            .latch
            .compare_exchange(0, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Fails without a call if the context is broken.
    pub(crate) fn intact(&self) -> Result<()> {
        let code = self.latch.load(Ordering::Acquire);
        let ordinal = self.ordinal();
        let message = match code {
            0 if !is_leaving() => return Ok(()),
            _ if is_leaving() => "the process exits: the driver is not called any more".into(),
            GIVEN_UP => format!(
                "cuda:{ordinal} was given up earlier: its use of memory could not be established"
            ),
            _ => format!(
                "cuda:{ordinal} broke earlier: {} ({code})",
                self.driver.name_of(code)
            ),
        };
        Err(Error::new(ErrorKind::Device, Stage::Device, message))
    }

    /// Makes the context current on this thread until the guard is dropped, in the relaxed capture
    /// mode. Fails if the context is broken.
    ///
    /// Loader threads hold one guard for their life: nested guards are then free.
    pub(crate) fn bind(&self) -> Result<Bound<'_>> {
        let mut bound = self.enter()?;
        let (context, relaxed) = CURRENT.get();
        if !relaxed {
            // The mode belongs to the thread, but a driver may need a context for the call.
            bound.mode = Some(self.exchange_mode(RELAXED)?);
            CURRENT.set((context, true));
        }
        Ok(bound)
    }

    /// Like [`bind`](Self::bind), but keeps the thread's own capture mode. This is enough for calls
    /// that end no other thread's capture: recording events, making a stream wait for them, and
    /// asking whether a stream is capturing.
    pub(crate) fn enter(&self) -> Result<Bound<'_>> {
        self.intact()?;
        let before = CURRENT.get();
        if before.0 != self.context {
            // SAFETY: the context is alive by `owner`.
            self.check("cuCtxPushCurrent", unsafe {
                (self.driver.symbols.ctx_push)(self.context)
            })?;
            CURRENT.set((self.context, before.1));
        }
        Ok(Bound {
            gpu: self,
            before,
            mode: None,
            here: PhantomData,
        })
    }

    /// Sets the thread's capture mode; returns the previous one.
    fn exchange_mode(&self, mut mode: c_uint) -> Result<c_uint> {
        let code = self.driver.exchange(&mut mode);
        self.check("cuThreadExchangeStreamCaptureMode", code)
            .map(|()| mode)
    }

    /// Refuses a capturing stream: its work would go into a graph instead of running now.
    ///
    /// Errors: [`ErrorKind::Config`]; the capture continues.
    pub(crate) fn check_uncaptured(&self, stream: Handle) -> Result<()> {
        let _bound = self.enter()?;
        let mut status = 0;
        // SAFETY: the pointer is valid for the call; that the stream is alive is the contract of
        // `Stream`.
        match unsafe { (self.driver.symbols.stream_capturing)(stream, &mut status) } {
            SUCCESS if status == 0 => Ok(()),
            SUCCESS | CAPTURE_IMPLICIT => {
                let stream = if stream == LEGACY {
                    "the legacy default stream".into()
                } else {
                    format!("stream {stream:#x}")
                };
                let message = format!(
                    "{stream} cannot take a batch while a CUDA graph is captured from it, or \
                     from a stream that it waits for: receive, bind and read batches before or \
                     after the capture, and copy the graph's inputs to its own memory"
                );
                Err(Error::new(ErrorKind::Config, Stage::Device, message))
            }
            code => self.check("cuStreamIsCapturing", code),
        }
    }

    /// Free and total bytes of device memory.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        let _bound = self.bind()?;
        let mut free = 0;
        let mut all = 0;
        // SAFETY: the pointers are valid for the call.
        self.check("cuMemGetInfo", unsafe {
            (self.driver.symbols.mem_info)(&mut free, &mut all)
        })?;
        Ok((free, all))
    }

    /// Waits until all work in the context has ended.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: no preconditions except a current context.
        self.check(
            "cuCtxSynchronize",
            after_captures(|| unsafe { (self.driver.symbols.ctx_synchronize)() }),
        )
    }

    /// Like [`synchronize`](Self::synchronize), but returns false at once if a stream of the
    /// context is capturing.
    pub(crate) fn try_synchronize(&self) -> Result<bool> {
        let _bound = self.bind()?;
        // SAFETY: no preconditions except a current context.
        match unsafe { (self.driver.symbols.ctx_synchronize)() } {
            code if CAPTURES.contains(&code) => Ok(false),
            code => self.check("cuCtxSynchronize", code).map(|()| true),
        }
    }

    /// The context of a stream. Not for default streams, which belong to the current context.
    pub(crate) fn context_of(&self, stream: Handle) -> Result<Handle> {
        let _bound = self.enter()?;
        let mut context = 0;
        // SAFETY: the pointer is valid for the call; that the stream is alive is the contract of
        // `Stream`.
        self.check("cuStreamGetCtx", unsafe {
            (self.driver.symbols.stream_ctx)(stream, &mut context)
        })?;
        Ok(context)
    }

    /// Whether `stream`, of `context`, belongs to a green context on this device and can record
    /// events of ours.
    pub(crate) fn shares(&self, stream: Handle, context: Handle) -> Result<bool> {
        let Some(green_of) = self.driver.symbols.stream_green else {
            return Ok(false);
        };
        let _bound = self.enter()?;
        let mut green = 0;
        // SAFETY: the pointer is valid for the call; that the stream is alive is the contract of
        // `Stream`.
        if unsafe { green_of(stream, &mut green) } != SUCCESS
            || green == 0
            || self.device_of(context)? != self.device
        {
            return Ok(false);
        }
        // Try to record an event, because the driver's documentation does not say whether this
        // works.
        let mut event = 0;
        // SAFETY: the pointer is valid for the call, 2 is an event without timing; it is destroyed
        // once.
        unsafe {
            self.check(
                "cuEventCreate",
                (self.driver.symbols.event_create)(&mut event, 2),
            )?;
            let recorded = (self.driver.symbols.event_record)(event, stream);
            self.released("cuEventDestroy", || {
                (self.driver.symbols.event_destroy)(event)
            });
            Ok(recorded == SUCCESS)
        }
    }

    /// The device of a context.
    fn device_of(&self, context: Handle) -> Result<c_int> {
        let mut device = -1;
        let mut popped = 0;
        // SAFETY: the stream's own context is alive, as the stream is; the pointers are valid for
        // the calls, and the last one pops what the first one pushed.
        let asked = unsafe {
            let pushed = (self.driver.symbols.ctx_push)(context);
            self.check("cuCtxPushCurrent", pushed)?;
            let asked = (self.driver.symbols.ctx_device)(&mut device);
            let _ = self.check(
                "cuCtxPopCurrent",
                (self.driver.symbols.ctx_pop)(&mut popped),
            );
            asked
        };
        self.check("cuCtxGetDevice", asked).map(|()| device)
    }

    /// Makes later work of `stream` wait for `event`.
    pub(crate) fn stream_waits(&self, stream: Handle, event: &Event) -> Result<()> {
        let _bound = self.enter()?;
        // SAFETY: the event is alive by the borrow, the stream by the contract of `Stream` or as
        // our own.
        self.check("cuStreamWaitEvent", unsafe {
            (self.driver.symbols.stream_wait)(stream, event.raw, 0)
        })
    }

    /// Enqueues a copy of `len` bytes to the device on `stream`.
    ///
    /// # Safety
    /// `from` must be valid for reads of `len` bytes, unchanged, until the copy is done;
    /// `[to, to + len)` must lie in an allocation of this context that nothing else uses from the
    /// stream's point on.
    pub(crate) unsafe fn copy_to_device(
        &self,
        to: DevicePtr,
        from: *const u8,
        len: usize,
        stream: Handle,
    ) -> Result<()> {
        // A copy since the guard was taken may have broken the context: check again.
        self.intact()?;
        // SAFETY: the caller's promise; the context is bound by the caller's `Bound`.
        self.check("cuMemcpyHtoDAsync", unsafe {
            (self.driver.symbols.copy_to_device)(to, from.cast(), len, stream)
        })
    }

    /// Copies `len` bytes to the host, and waits.
    pub(crate) fn read_back(&self, to: &mut [u8], from: DevicePtr, stream: Handle) -> Result<()> {
        let _bound = self.bind()?;
        self.check_uncaptured(stream)?;
        // SAFETY: the slice is valid for writes until the synchronisation below has returned.
        let code = unsafe {
            (self.driver.symbols.copy_to_host)(to.as_mut_ptr().cast(), from, to.len(), stream)
        };
        let copied = self.check("cuMemcpyDtoHAsync", code);
        copied?;
        // Even after another thread latched an error: no copy into `to` may be in flight when this
        // returns. SAFETY: no preconditions.
        let code = after_captures(|| unsafe { (self.driver.symbols.stream_synchronize)(stream) });
        let waited = self.check("cuStreamSynchronize", code);
        if waited.is_err() && !self.is_broken() {
            // A broken context runs nothing any more.
            // SAFETY: no preconditions except the current context.
            let _ = self.check("cuCtxSynchronize", unsafe {
                (self.driver.symbols.ctx_synchronize)()
            });
        }
        waited
    }

    /// Loads a fat binary. The driver finds its length in it.
    ///
    /// # Safety
    /// `image` must be a whole fat binary.
    pub(crate) unsafe fn load_module(&self, image: &[u8]) -> Result<Handle> {
        let _bound = self.bind()?;
        let mut module = 0;
        // SAFETY: the pointers are valid for the call; the image is whole by the caller's promise.
        let code = unsafe { (self.driver.symbols.module_load)(&mut module, image.as_ptr().cast()) };
        self.check("cuModuleLoadData", code)?;
        Ok(module)
    }

    pub(crate) fn function(&self, module: Handle, name: &CStr) -> Result<Handle> {
        let _bound = self.bind()?;
        let mut function = 0;
        // SAFETY: the pointers are valid for the call, the module is alive.
        let code =
            unsafe { (self.driver.symbols.module_function)(&mut function, module, name.as_ptr()) };
        self.check("cuModuleGetFunction", code)?;
        Ok(function)
    }

    pub(crate) fn unload_module(&self, module: Handle) {
        let Ok(_bound) = self.bind() else {
            return note_leak();
        };
        // SAFETY: the module came from `load_module`, and its caller drops it once.
        self.released("cuModuleUnload", || unsafe {
            (self.driver.symbols.module_unload)(module)
        });
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// `params` must point to values of the kernel's parameter types. Memory that these values
    /// point to must be valid for the kernel's use until the kernel has ended.
    pub(crate) unsafe fn launch(
        &self,
        function: Handle,
        grid: [u32; 3],
        block: [u32; 3],
        stream: Handle,
        params: &mut [*mut c_void],
    ) -> Result<()> {
        let [gx, gy, gz] = grid;
        let [bx, by, bz] = block;
        let launch = self.driver.symbols.launch;
        // SAFETY: the caller's promise; the parameters are copied before the call returns.
        let code = unsafe {
            launch(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                0,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", code)
    }
}

impl Driver {
    fn device(&self, ordinal: c_int) -> Result<c_int> {
        let mut device = 0;
        // SAFETY: the pointer is valid for the call.
        let code = unsafe { (self.symbols.device_get)(&mut device, ordinal) };
        self.checked(Stage::Build, "cuDeviceGet", code)?;
        Ok(device)
    }

    fn checked(&self, stage: Stage, what: &'static str, code: c_int) -> Result<()> {
        match code {
            SUCCESS => Ok(()),
            _ => {
                let message = format!("{what}: {} ({code}){}", self.name_of(code), hint(code));
                Err(Error::new(ErrorKind::Device, stage, message))
            }
        }
    }

    /// PCI address in the kernel's form; the driver writes hexadecimal in upper case.
    fn pci(&self, device: c_int) -> Option<String> {
        self.text(self.symbols.device_pci, device)
            .map(|bus| bus.to_ascii_lowercase())
    }

    fn text(
        &self,
        ask: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
        device: c_int,
    ) -> Option<String> {
        let mut text = [0_u8; 256];
        // SAFETY: the buffer is valid for the length passed, and its last byte, which is not
        // passed, stays zero.
        let code = unsafe { ask(text.as_mut_ptr().cast(), text.len() as c_int - 1, device) };
        let text = CStr::from_bytes_until_nul(&text)
            .ok()?
            .to_string_lossy()
            .into_owned();
        (code == SUCCESS && !text.is_empty()).then_some(text)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if let ContextOwner::Retained = self.owner {
            if self.intact().is_err() {
                return note_leak();
            }
            self.released("cuDevicePrimaryCtxRelease", || {
                // SAFETY: retained once by `primary`; every object of ours in the context keeps its
                // `Gpu` alive.
                self.driver
                    .relaxed(|| unsafe { (self.driver.symbols.primary_release)(self.device) })
            });
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} {}", self.ordinal(), self.name)
    }
}

thread_local! {
    /// The context of this thread's innermost guard (0 without one), and whether a guard has set
    /// the relaxed mode. Lets nested guards skip the driver calls.
    static CURRENT: Cell<(Handle, bool)> = const { Cell::new((0, false)) };
}

/// Keeps the context current on this thread; dropping it restores the thread's own context. Other
/// CUDA code in the process (PyTorch with several devices) relies on its current context, and does
/// not run while this lives.
pub struct Bound<'g> {
    gpu: &'g Gpu,
    before: (Handle, bool),
    /// The thread's previous capture mode, restored by the guard that changed it.
    mode: Option<c_uint>,
    /// Makes the guard `!Send`, because it must be dropped on its thread.
    here: PhantomData<*const ()>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        CURRENT.set(self.before);
        if let Some(mode) = self.mode {
            let _ = self.gpu.exchange_mode(mode);
        }
        if self.before.0 == self.gpu.context {
            return;
        }
        let mut context = 0;
        // SAFETY: the pointer is valid for the call; pops what `bind` pushed on this thread (guards
        // nest).
        let code = unsafe { (self.gpu.driver.symbols.ctx_pop)(&mut context) };
        // Check the code only to latch a sticky error: the guarded call has its own result.
        let _ = self.gpu.check("cuCtxPopCurrent", code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_no_failure() {
        let missing = ": cannot open shared object file: No such file or directory";
        for (message, fails) in [
            (format!("libcuda.so.1{missing}"), false),
            // The driver itself needs it.
            (format!("libnvidia-other.so.1{missing}"), true),
            ("libcuda.so.1: file too short".into(), true),
        ] {
            assert_eq!(
                failure("libcuda.so.1", message.clone()).is_some(),
                fails,
                "{message}"
            );
        }
    }

    #[test]
    fn codes_that_end_the_process_are_sticky() {
        // cuda.h of 12.0 to 13.5 on each: "This leaves the process in an inconsistent state and any
        // further CUDA work will return the same error. To continue using CUDA, the process must be
        // terminated and relaunched."
        let inconsistent = [
            (226, "CUDA_ERROR_CONTAINED"),
            (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
            (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
            (710, "CUDA_ERROR_ASSERT"),
            (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
            (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
            (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
            (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
            (718, "CUDA_ERROR_INVALID_PC"),
            (719, "CUDA_ERROR_LAUNCH_FAILED"),
            (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK"),
            // "the MPS client has been terminated ... the process must be terminated and
            // relaunched"
            (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
        ];
        for (code, name) in inconsistent {
            assert!(is_sticky(code), "{name} ({code})");
        }
        // Refused calls, including those refused by a capture, leave the context intact.
        for code in [
            1, 2, 201, 400, 600, 701, 712, 713, 720, 800, 801, 900, 901, 902, 903, 904, 905, 906,
            907,
        ] {
            assert!(!is_sticky(code), "{code}");
        }
    }
}
