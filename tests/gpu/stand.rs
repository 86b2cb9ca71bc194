//! The stand-in for the driver as the GPU of a section: its session, and code for the kernels.

#![allow(unsafe_code)]

use crate::common::doubles::with_kernels;
use crate::standin::{self, Config, Gpu, Live, Session};
use std::ffi::c_void;
use std::time::{Duration, Instant};

/// A session of the stand-in with all kernels that can be had; false: not ours, since there is no
/// C++ compiler.
pub fn session(config: Config) -> (Session, bool) {
    let session = standin::cuda().session(config);
    session.register_kernel("spin", spin, &[8, 8], 0, 0);
    let ours = with_kernels(&session);
    (session, ours)
}

/// Copies that come late, so that whoever does not wait sees what was there before.
pub fn config() -> Config {
    // The second one is for nobody.
    let devices = vec![
        Gpu::new(4 << 30, "0000:3b:00.0"),
        Gpu::new(4 << 30, "0000:5e:00.0"),
    ];
    Config {
        devices,
        latency: Duration::from_micros(200),
        bandwidth: 400 << 20,
        ..Config::default()
    }
}

/// What is wrong at the end of a section: uses that nothing orders, and things that are still
/// alive.
pub fn faults(mut session: Session) -> Vec<String> {
    // Threads free batches that outlive their loaders.
    let until = Instant::now() + Duration::from_secs(30);
    while session.live() != Live::default() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
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
