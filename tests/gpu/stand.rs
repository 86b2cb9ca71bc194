//! The stand-in for the driver as the GPU of a section: its session, and code for the kernels.

#![allow(unsafe_code)]

use crate::kernels;
use crate::standin::{self, Config, Gpu, KernelFn, Live, Session};
use libloading::Library;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::time::Duration;

/// A session of the stand-in with all kernels that can be had; false: not ours, since there is no C++ compiler.
pub fn session(config: Config) -> (Session, bool) {
    let session = standin::cuda().session(config);
    session.register_kernel("spin", spin, &[8, 8], 0, 0);
    let ours = register_ours(&session);
    (session, ours)
}

/// Copies that come late, so that whoever does not wait sees what was there before.
pub fn config() -> Config {
    // The second one is for nobody.
    let devices = vec![Gpu::new(4 << 30, "0000:3b:00.0"), Gpu::new(4 << 30, "0000:5e:00.0")];
    Config { devices, latency: Duration::from_micros(50), bandwidth: 4 << 30, ..Config::default() }
}

/// What is wrong at the end of a section: uses that nothing orders, and things that are still alive.
pub fn faults(mut session: Session) -> Vec<String> {
    let live = session.live();
    let mut faults = session.expect_violations();
    if live != Live::default() {
        faults.push(format!("alive in the driver: {live:?}"));
    }
    faults
}

/// Sleeps instead of keeping a GPU busy.
extern "C" fn spin(_: *const u32, _: *const u32, params: *const *const c_void) {
    // SAFETY: the stand-in passes the two numbers that the kernel was registered with.
    let ns = unsafe { (*params).cast::<u64>().read() };
    std::thread::sleep(Duration::from_nanos(ns).min(Duration::from_millis(5)));
}

/// Parameters of `feedline_finish_*`: three pointers, four sizes, the layout, and the moments of four channels.
const FINISH: [u32; 9] = [8, 8, 8, 4, 4, 4, 4, 4, 32];

fn register_ours(session: &Session) -> bool {
    let Some(path) = kernels::library() else { return false };
    // SAFETY: our own library, which does nothing when it is loaded. It stays for the life of the process.
    let Ok(library) = unsafe { Library::new(path) }.map(ManuallyDrop::new) else { return false };
    let find = |name: &str| {
        // SAFETY: every `run_` function of our library has this type.
        unsafe { library.get::<KernelFn>(format!("run_{name}")) }.map(|function| *function)
    };
    for dtype in ["f32", "f16", "bf16"] {
        let name = format!("feedline_finish_{dtype}");
        let Ok(function) = find(&name) else { return false };
        session.register_kernel(&name, function, &FINISH, 0b111, 0b010);
    }
    let Ok(function) = find("feedline_gather") else { return false };
    session.register_kernel("feedline_gather", function, &[8; 5], 0b00111, 0b00100);
    true
}
