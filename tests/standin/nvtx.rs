//! Stand-in for the library of a tool that listens to NVTX: writes a line for each call, and for
//! what no tool expects.
//!
//! One file, `std` only: `rustc --crate-type cdylib`. `FEEDLINE_NVTX=refuses` or `deaf`: it fails,
//! or takes no function.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null;
use std::sync::Mutex;

type Function = *const c_void;

#[repr(C)]
pub struct Event {
    version: u16,
    size: u16,
    category: u32,
    color: [u32; 2],
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

#[repr(C)]
struct Callbacks {
    size: usize,
    module_table: unsafe extern "C" fn(c_int, *mut *const *mut Function, *mut u32) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_version: unsafe extern "C" fn(u32),
}

/// Ranges by number; those that have ended are empty.
static STARTED: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local!(static PUSHED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) });

fn check(right: bool, what: &str) {
    if !right {
        eprintln!("nvtx wrong {what}");
    }
}

/// Name and payload, from a text (kind 1) or a registered one (3).
unsafe fn words(domain: *const c_char, event: &Event) -> String {
    // SAFETY: domains and registered names are those of `keep`, other messages texts.
    let (domain, name) = unsafe { (CStr::from_ptr(domain), CStr::from_ptr(event.message)) };
    check(domain == c"feedline", "domain");
    check(
        (event.version, event.size, event.payload_type) == (3, 48, 1),
        "event",
    );
    check([1, 3].contains(&event.message_type), "message");
    format!("{} {}", name.to_str().unwrap(), event.payload)
}

/// A domain.
extern "C" fn keep(text: *const c_char) -> *const c_char {
    // SAFETY: NVTX's texts end with a zero.
    unsafe { CStr::from_ptr(text) }.to_owned().into_raw()
}

extern "C" fn register(_domain: *const c_char, text: *const c_char) -> *const c_char {
    keep(text)
}

extern "C" fn start(domain: *const c_char, event: &Event) -> u64 {
    // SAFETY: the caller's promise.
    let words = unsafe { words(domain, event) };
    eprintln!("nvtx start {words}");
    let mut started = STARTED.lock().unwrap();
    started.push(words);
    started.len() as u64
}

extern "C" fn end(_domain: *const c_char, id: u64) {
    let words = std::mem::take(&mut STARTED.lock().unwrap()[id as usize - 1]);
    eprintln!("nvtx end {words}");
}

extern "C" fn push(domain: *const c_char, event: &Event) -> c_int {
    // SAFETY: the caller's promise.
    let words = unsafe { words(domain, event) };
    eprintln!("nvtx push {words}");
    PUSHED.with_borrow_mut(|pushed| {
        check(pushed.is_empty(), "depth");
        pushed.push(words);
    });
    0
}

extern "C" fn pop(_domain: *const c_char) -> c_int {
    let words = PUSHED.with_borrow_mut(Vec::pop).unwrap_or_default();
    eprintln!("nvtx pop {words}");
    0
}

/// # Safety
/// `tables` is NVTX's function for its tables.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(
    tables: unsafe extern "C" fn(u32) -> *const c_void,
) -> c_int {
    eprintln!("nvtx initialize");
    let told = std::env::var("FEEDLINE_NVTX").unwrap_or_default();
    // SAFETY: the caller's promise, and the tables' types.
    let (callbacks, version, none) = unsafe {
        (
            &*tables(1).cast::<Callbacks>(),
            &*tables(3).cast::<VersionInfo>(),
            tables(2),
        )
    };
    check(
        (callbacks.size, version.size, version.version, none) == (16, 24, 3, null()),
        "tables",
    );
    // SAFETY: the table's type.
    unsafe { (version.set_version)(3) };
    for (module, functions) in (0..).zip([0, 16, 9, 15, 7, 16, 7, 0]) {
        let mut table = null();
        let mut size = 0;
        // SAFETY: both places can be written.
        let known = unsafe { (callbacks.module_table)(module, &mut table, &mut size) };
        check(
            (known, size) == (c_int::from(functions > 0), functions),
            "modules",
        );
        // SAFETY: the table has one more, which is null.
        let slots: Vec<_> = (0..=size as usize)
            .filter(|_| known > 0)
            .map(|n| unsafe { *table.add(n) })
            .collect();
        let places = slots.iter().filter(|slot| !slot.is_null()).count();
        check(places == functions.saturating_sub(1) as usize, "places");
        if module == 5 && told != "deaf" {
            let ours = [
                (2, start as Function),
                (3, end as _),
                (4, push as _),
                (5, pop as _),
            ];
            for (number, function) in ours
                .into_iter()
                .chain([(10, register as _), (12, keep as _)])
            {
                // SAFETY: the place of this function.
                unsafe { slots[number].write(function) };
            }
        }
    }
    c_int::from(told != "refuses")
}
