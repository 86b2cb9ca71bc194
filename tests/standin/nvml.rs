//! A stand-in for libnvidia-ml.so.1: one GPU that knows little, for the tests of
//! `examples/profile/nvml.rs`.
//!
//! One file, `std` only: `rustc --crate-type cdylib`. What it does not export is missing, as in an
//! old library.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

const NOT_SUPPORTED: c_int = 3;
const NOT_FOUND: c_int = 6;

/// `nvmlUtilization_t`.
#[repr(C)]
pub struct Utilisation {
    gpu: c_uint,
    memory: c_uint,
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    0
}

/// # Safety
/// `id` ends with a zero; `device` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    id: *const c_char,
    device: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        device.write(1 as *mut c_void);
        let is_known = CStr::from_ptr(id) == c"0000:3b:00.0";
        if is_known { 0 } else { NOT_FOUND }
    }
}

/// # Safety
/// `name` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(
    _: *mut c_void,
    name: *mut c_char,
    room: c_uint,
) -> c_int {
    let text = c"Stand-in 9000".to_bytes_with_nul();
    // SAFETY: the caller's promise.
    unsafe {
        name.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len().min(room as usize))
    };
    0
}

/// # Safety
/// `both` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(
    _: *mut c_void,
    both: *mut Utilisation,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        both.write(Utilisation {
            gpu: 87,
            memory: 41,
        })
    };
    0
}

/// # Safety
/// `kb_s` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPcieThroughput(
    _: *mut c_void,
    counter: c_uint,
    kb_s: *mut c_uint,
) -> c_int {
    // SAFETY: the caller's promise. 0 is what the GPU sends, 1 what it receives.
    unsafe { kb_s.write(if counter == 0 { 10_000 } else { 5_000_000 }) };
    0
}

/// # Safety
/// `celsius` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(
    _: *mut c_void,
    _: c_uint,
    celsius: *mut c_uint,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { celsius.write(61) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetEccMode(_: *mut c_void, _: *mut c_int, _: *mut c_int) -> c_int {
    NOT_SUPPORTED
}

macro_rules! numbers {
    ($($name:ident: $value:literal;)*) => {$(
        /// # Safety
        /// `number` can be written.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(_: *mut c_void, number: *mut c_uint) -> c_int {
            // SAFETY: the caller's promise.
            unsafe { number.write($value) };
            0
        }
    )*};
}

numbers! {
    nvmlDeviceGetCurrPcieLinkGeneration: 3;
    nvmlDeviceGetCurrPcieLinkWidth: 8;
    nvmlDeviceGetMaxPcieLinkGeneration: 5;
    nvmlDeviceGetMaxPcieLinkWidth: 16;
}
