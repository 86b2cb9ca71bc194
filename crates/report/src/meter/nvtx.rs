//! Ranges for tools that listen to NVTX, such as Nsight Systems: NVTX 3's C interface, without its
//! headers.
//!
//! ```text
//! listen() ── NVTX_INJECTION64_PATH ──► the tool's library ── InitializeInjectionNvtx2(export_table) ──► fills SLOTS
//! range, push ── no TOOL: one load                        TOOL: its functions, our domain and names ◄──┘
//! ```
//!
//! `.ci/nvidia headers` compares numbers, structures and calls with NVIDIA's headers. Of the places
//! where the headers look for a tool, this module uses only the environment. It ignores a tool
//! linked into the program (`InitializeInjectionNvtx2_fnptr`), and one installed by the driver
//! (`/run/nvidia/nvtx`, in the headers of CUDA 13.5). `LD_PRELOAD` alone activates no tool, as with
//! the headers.
//!
//! A forked child keeps its parent's tool, again as with the headers; whether the tool still
//! records depends on the tool.

#![allow(unsafe_code)]

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Once, OnceLock};

/// The variable that names the tool's library.
const VARIABLE: &str = "NVTX_INJECTION64_PATH";

/// A path that means no tool.
const NO_TOOL: &str = "./.";

const NVTX_VERSION: u32 = 3;

// NVTX's numbers of export tables, modules, functions of `CORE2`, and kinds of payload and message.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
const CORE2: usize = 5;
const RANGE_START: usize = 2;
const RANGE_END: usize = 3;
const RANGE_PUSH: usize = 4;
const RANGE_POP: usize = 5;
const REGISTER_STRING: usize = 10;
const CREATE_DOMAIN: usize = 12;
const PAYLOAD_U64: i32 = 1;
const MESSAGE_ASCII: i32 = 1;
const MESSAGE_REGISTERED: i32 = 3;

/// The number of functions of each module, plus one for number 0, which is no function. Tools fill
/// in all functions that they know.
const SIZES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const LONGEST: usize = 16;

/// A tool writes pointers to its functions into these slots.
type RangeSlot = AtomicPtr<c_void>;
static SLOTS: [[RangeSlot; LONGEST]; SIZES.len()] =
    [const { [const { RangeSlot::new(null_mut()) }; LONGEST] }; SIZES.len()];

/// For each module, pointers to the slots of its functions; null for number 0 and after the last
/// function.
type EntryTable = [Option<&'static RangeSlot>; LONGEST + 1];
static TABLES: [EntryTable; SIZES.len()] = {
    let mut tables = [[None; LONGEST + 1]; SIZES.len()];
    let mut module = 0;
    while module < SIZES.len() {
        let mut number = 1;
        while number < SIZES[module] {
            tables[module][number] = Some(&SLOTS[module][number]);
            number += 1;
        }
        module += 1;
    }
    tables
};

type ExportTable = unsafe extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(ExportTable) -> c_int;
type ModuleTable = unsafe extern "C" fn(c_uint, *mut *mut c_void, *mut c_uint) -> c_int;
type SetVersion = unsafe extern "C" fn(u32);
type CreateDomain = unsafe extern "C" fn(*const c_char) -> usize;
type RegisterString = unsafe extern "C" fn(usize, *const c_char) -> usize;
type RangeStart = unsafe extern "C" fn(usize, *const NvtxEvent) -> u64;
type RangeEnd = unsafe extern "C" fn(usize, u64);
type RangePush = unsafe extern "C" fn(usize, *const NvtxEvent) -> c_int;
type RangePop = unsafe extern "C" fn(usize) -> c_int;

#[repr(C)]
struct Callbacks {
    size: usize,
    module_table: ModuleTable,
}

#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_version: SetVersion,
}

/// The attributes of a range.
#[repr(C)]
struct NvtxEvent {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    /// Address of a text, or a registered name.
    message: usize,
}

unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    static FUNCTIONS: Callbacks = Callbacks {
        size: size_of::<Callbacks>(),
        module_table,
    };
    static VERSION: VersionInfo = VersionInfo {
        size: size_of::<VersionInfo>(),
        version: NVTX_VERSION,
        reserved: 0,
        set_version,
    };
    match id {
        CALLBACKS => (&raw const FUNCTIONS).cast(),
        VERSION_INFO => (&raw const VERSION).cast(),
        _ => null(),
    }
}

unsafe extern "C" fn module_table(
    module: c_uint,
    table: *mut *mut c_void,
    size: *mut c_uint,
) -> c_int {
    let Some(found) = TABLES.get(module as usize).filter(|_| module > 0) else {
        return 0;
    };
    // SAFETY: the tool passes pointers that may be written through, or null.
    unsafe {
        if !size.is_null() {
            *size = SIZES[module as usize] as c_uint;
        }
        if !table.is_null() {
            *table = found.as_ptr().cast_mut().cast();
        }
    }
    1
}

unsafe extern "C" fn set_version(_: u32) {}

/// The tool's function with this number, if it has one.
///
/// # Safety
///
/// `F` is the type of the function in NVTX's headers.
unsafe fn function<F: Copy>(number: usize) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = SLOTS[CORE2][number].load(Ordering::Acquire);
    // SAFETY: a tool's library is never unloaded, and the caller promises the type.
    (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
}

/// A name that is registered with the tool once.
#[derive(Clone, Copy)]
pub enum Name {
    Wait,
    Copy,
    Operations,
}

const NAMES: [&CStr; 3] = [c"wait", c"copy", c"operations"];

/// A loaded tool.
struct Tool {
    domain: usize,
    /// Kind and value of the NVTX message for each name.
    names: [(i32, usize); NAMES.len()],
    ranges: Option<(RangeStart, RangeEnd)>,
    stacks: Option<(RangePush, RangePop)>,
}

static TOOL: OnceLock<Tool> = OnceLock::new();

/// Loads the tool that the environment names, if any, at the first call of the process.
///
/// Errors: the reason why that tool is not used.
pub fn listen() -> Result<(), String> {
    static FIRST: Once = Once::new();
    let mut outcome = Ok(());
    FIRST.call_once(|| {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty() && path != NO_TOOL);
        let Some(path) = path else { return };
        outcome = initialize(&path).map(|()| drop(TOOL.set(Tool::new())));
    });
    outcome.map_err(|why| format!("{VARIABLE}: {why}"))
}

fn initialize(path: &OsStr) -> Result<(), String> {
    let words = |error: libloading::Error| {
        std::error::Error::source(&error)
            .unwrap_or(&error)
            .to_string()
    };
    // SAFETY: loading runs the library's initialisers, on the assumption that the variable names a
    // tool's library.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.map_err(words)?;
    // Never unloaded: it may have started threads.
    let library = ManuallyDrop::new(library);
    // SAFETY: NVTX's headers give this symbol this type.
    let initialize =
        unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") }.map_err(words)?;
    // SAFETY: the tool gets tables as in NVTX's headers, which live as long as the process.
    match unsafe { initialize(export_table) } {
        0 => Err(format!(
            "{}: its InitializeInjectionNvtx2 failed",
            path.display()
        )),
        _ => Ok(()),
    }
}

impl Tool {
    fn new() -> Self {
        // SAFETY: NVTX's headers give the functions with these numbers these types.
        let (domain, register, ranges, stacks) = unsafe {
            let start = function::<RangeStart>(RANGE_START);
            let push = function::<RangePush>(RANGE_PUSH);
            (
                function::<CreateDomain>(CREATE_DOMAIN),
                function::<RegisterString>(REGISTER_STRING),
                start.zip(function::<RangeEnd>(RANGE_END)),
                push.zip(function::<RangePop>(RANGE_POP)),
            )
        };
        // SAFETY: the text ends with a zero. Domain 0 is NVTX's default one.
        let domain = domain.map_or(0, |create| unsafe { create(c"feedline".as_ptr()) });
        let names = NAMES.map(|name| {
            // SAFETY: as above.
            match register.map_or(0, |register| unsafe { register(domain, name.as_ptr()) }) {
                0 => (MESSAGE_ASCII, name.as_ptr() as usize),
                registered => (MESSAGE_REGISTERED, registered),
            }
        });
        Self {
            domain,
            names,
            ranges,
            stacks,
        }
    }
}

impl NvtxEvent {
    fn new(message_type: i32, message: usize, payload: u64) -> Self {
        Self {
            version: NVTX_VERSION as u16,
            size: size_of::<Self>() as u16,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: PAYLOAD_U64,
            reserved: 0,
            payload,
            message_type,
            message,
        }
    }
}

/// A range that may end on another thread, in any order with others.
pub struct Range {
    domain: usize,
    id: u64,
    end: RangeEnd,
}

/// Starts a range named `name`; `None` without a tool.
pub fn range(name: impl FnOnce() -> String, payload: u64) -> Option<Range> {
    let tool = TOOL.get()?;
    let (start, end) = tool.ranges?;
    let name = CString::new(name()).ok()?;
    let event = NvtxEvent::new(MESSAGE_ASCII, name.as_ptr() as usize, payload);
    // SAFETY: the event and its text live during the call, as NVTX asks.
    let id = unsafe { start(tool.domain, &event) };
    let domain = tool.domain;
    Some(Range { domain, id, end })
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the tool gave this number, and gets it back once.
        unsafe { (self.end)(self.domain, self.id) };
    }
}

/// A range of this thread, nested in the ranges that the thread began earlier.
pub struct Pushed {
    domain: usize,
    pop: RangePop,
    /// Not `Send`: each thread has a stack of its own.
    _thread: PhantomData<*const ()>,
}

/// Begins a range on this thread; `None` without a tool.
#[inline]
pub fn push(name: Name, payload: u64) -> Option<Pushed> {
    let tool = TOOL.get()?;
    let (push, pop) = tool.stacks?;
    let (message_type, message) = tool.names[name as usize];
    let event = NvtxEvent::new(message_type, message, payload);
    // SAFETY: the event lives during the call; its name is a text of ours, or registered in this
    // domain.
    unsafe { push(tool.domain, &event) };
    Some(Pushed {
        domain: tool.domain,
        pop,
        _thread: PhantomData,
    })
}

impl Drop for Pushed {
    fn drop(&mut self) {
        // SAFETY: ends what `push` began on this thread.
        unsafe { (self.pop)(self.domain) };
    }
}
