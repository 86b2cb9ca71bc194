//! Shared code of the CUDA tests: cases against the stand-in, and kernels that read batches.
//!
//! ```text
//! case(config) ── session of three GPUs ── body, on a thread with a deadline ──► nothing is alive, no violation
//! gate (a kernel that waits for the test) ─► copy (a kernel that reads a batch) ─► bytes to compare, as late as the test wants
//! ```

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unsafe_code)]

use super::standin::{self, Config, Gpu, Live, Session};
pub use super::wait::{DEADLINE, soon, until};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result, sys};
use feedline::device::cuda::Stream;
use feedline::{Device, Error, Loader};
use std::ffi::{CString, c_void};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub use super::got::*;

/// Three GPUs: the process counts them once, so every session of a test binary has as many.
pub fn config() -> Config {
    let devices = (0..3)
        .map(|number| Gpu::new(1 << 30, &format!("0000:{:02X}:00.0", 0x3b + number)))
        .collect();
    Config {
        devices,
        ..Config::default()
    }
}

/// The same with slow copies.
pub fn late() -> Config {
    Config {
        bandwidth: 400 << 20,
        latency: Duration::from_micros(200),
        ..config()
    }
}

/// Runs `body` in a session of its own; afterwards nothing may be alive in the driver.
#[track_caller]
pub fn case(config: Config, body: impl FnOnce(&mut Session) + Send + 'static) {
    standin::in_session(config, String::new(), |mut session| {
        body(&mut session);
        // Batches that outlive their loaders are freed by threads.
        soon(|| session.live() == Live::default());
        assert_eq!(session.live(), Live::default(), "alive in the driver");
    });
}

pub fn gpu(ordinal: usize) -> Device {
    Device::cuda(ordinal).unwrap()
}

/// The handle of a stream without its owner; the caller keeps the owner until the bound batches are
/// dropped.
pub fn bare(stream: &CudaStream) -> Stream {
    // SAFETY: the caller's promise, in tests of the handle.
    unsafe { Stream::from_raw(stream.cu_stream() as usize) }
}

/// Kinds and messages of an error and its sources.
pub fn words(error: &Error) -> String {
    let mut words = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        words += &format!(": {inner}");
        source = inner.source();
    }
    words
}

static OPEN: Mutex<bool> = Mutex::new(true);
static OPENED: Condvar = Condvar::new();

extern "C" fn gate(_: *const u32, _: *const u32, _: *const *const c_void) {
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = OPENED.wait_while(open, |open| !*open);
    drop(opened.unwrap_or_else(PoisonError::into_inner));
}

extern "C" fn copy(_: *const u32, _: *const u32, params: *const *const c_void) {
    // SAFETY: the stand-in calls this with the three parameters of the registration: two addresses
    // whose bytes are mapped, and how many.
    unsafe {
        let to = (*params).cast::<*mut u8>().read();
        let from = (*params.add(1)).cast::<*const u8>().read();
        let len = (*params.add(2)).cast::<u64>().read();
        to.copy_from(from, len as usize);
    }
}

extern "C" fn crash(_: *const u32, _: *const u32, params: *const *const c_void) {
    // SAFETY: the stand-in calls this with the one parameter of the registration.
    standin::cuda().kernel_fails(unsafe { (*params).cast::<u32>().read() });
}

/// While it lives, streams with [`Kernels::wait`] are stopped.
pub struct Gate(());

impl Gate {
    pub fn close() -> Self {
        *OPEN.lock().unwrap_or_else(PoisonError::into_inner) = false;
        Self(())
    }

    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        *OPEN.lock().unwrap_or_else(PoisonError::into_inner) = true;
        OPENED.notify_all();
    }
}

/// The consumer's kernels.
pub struct Kernels {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    gate: sys::CUfunction,
    copy: sys::CUfunction,
    crash: sys::CUfunction,
}

impl Kernels {
    pub fn new(context: &Arc<CudaContext>) -> Self {
        standin::cuda().register_kernel("gate", gate, &[], 0, 0);
        standin::cuda().register_kernel("copy", copy, &[8, 8, 8], 0b011, 0b001);
        standin::cuda().register_kernel("crash", crash, &[4], 0, 0);
        context.bind_to_thread().unwrap();
        let image =
            c".version 7.0 .visible .entry gate() .visible .entry copy() .visible .entry crash()";
        // SAFETY: the text ends with a zero; the module lives until the drop.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.unwrap();
        let function = |name: &str| {
            let name = CString::new(name).unwrap();
            // SAFETY: the module is alive.
            unsafe { result::module::get_function(module, name) }.unwrap()
        };
        Self {
            context: context.clone(),
            module,
            gate: function("gate"),
            copy: function("copy"),
            crash: function("crash"),
        }
    }

    fn launch(&self, function: sys::CUfunction, stream: &CudaStream, params: &mut [*mut c_void]) {
        self.context.bind_to_thread().unwrap();
        let stream = stream.cu_stream();
        // SAFETY: the parameters are those that the kernel was registered with; the caller keeps
        // what they point to.
        unsafe { result::launch_kernel(function, (1, 1, 1), (1, 1, 1), 0, stream, params) }
            .unwrap();
    }

    /// `stream` stops here as long as the gate is closed.
    pub fn wait(&self, stream: &CudaStream) {
        self.launch(self.gate, stream, &mut []);
    }

    /// `stream` breaks its context here, as an illegal access (700) or an assertion of a kernel
    /// (710) does.
    pub fn crash(&self, stream: &CudaStream, mut code: u32) {
        self.launch(self.crash, stream, &mut [(&raw mut code).cast()]);
    }

    /// `stream` copies `len` bytes from the device address `from` to the beginning of `to`.
    pub fn copy(&self, stream: &CudaStream, to: &CudaSlice<u8>, from: u64, len: usize) {
        let (to, _done) = to.device_ptr(stream);
        let mut to = to;
        let mut from = from;
        let mut len = len as u64;
        let size = (&raw mut len).cast();
        let mut params: [*mut c_void; 3] = [(&raw mut to).cast(), (&raw mut from).cast(), size];
        self.launch(self.copy, stream, &mut params);
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded by `new`, unloaded once.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}
