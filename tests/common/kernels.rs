//! Our kernels on the CPU: their source, compiled by the machine's C++ compiler
//! (`tests/standin/kernels.cpp`); and memory that detects every byte read or written outside of it.
//!
//! ```text
//!   no access │ canary │ the bytes │ canary │ no access       canaries: what is left of the first and last page
//! ```

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unsafe_code)]

use libloading::Library;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use rustix::param::page_size;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The sources, from the root of the repository; the first includes the second.
const SOURCES: [&str; 2] = [
    "tests/standin/kernels.cpp",
    "crates/device/src/cuda/kernels/finish.cu",
];
/// Undefined behaviour in C++ and misaligned access end the process.
const FLAGS: [&str; 10] = [
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fsanitize=undefined",
    "-fsanitize-undefined-trap-on-error",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
];

/// Parameters as `cuLaunchKernel` takes them; grid and block have three sizes.
type Run = unsafe extern "C" fn(grid: *const u32, block: *const u32, params: *const *const c_void);

/// Allows this thread to load only from addresses `from` to `to`.
type Limit = unsafe extern "C" fn(from: *const c_void, to: *const c_void);

/// The shared library with `run_NAME` for each kernel, compiled once per content of its sources.
/// `None`, with a printed reason, where there is no C++ compiler; a source that does not compile is
/// a failure.
pub fn library() -> Option<&'static Path> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    PATH.get_or_init(compiled).as_deref()
}

fn compiled() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut sum = crc32c::crc32c(FLAGS.join(" ").as_bytes());
    for source in SOURCES {
        sum = crc32c::crc32c_append(sum, &std::fs::read(root.join(source)).unwrap());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = folder.join(format!("kernels-{sum:08x}.so"));
    if !library.exists() {
        // Several test binaries may do this at once: the name is there only when the content is
        // whole.
        let unfinished = folder.join(format!("kernels-{sum:08x}.{}", std::process::id()));
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
        let mut command = Command::new(&compiler);
        command.args(FLAGS).arg(root.join(SOURCES[0]));
        let output = match command.arg("-o").arg(&unfinished).output() {
            Ok(output) => output,
            Err(error) => {
                println!(
                    "skipped: the kernels cannot be compiled for the CPU, {compiler:?} does not start: {error}"
                );
                return None;
            }
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compiler:?}: {said}");
        std::fs::rename(&unfinished, &library).unwrap();
    }
    Some(library)
}

fn loaded() -> Option<&'static Library> {
    static LOADED: OnceLock<Option<Library>> = OnceLock::new();
    // SAFETY: our own library, which does nothing when it is loaded.
    let load = |path| unsafe { Library::new(path) }.unwrap();
    LOADED.get_or_init(|| library().map(load)).as_ref()
}

/// Runs a kernel for each thread of the grid, one after the other. The process ends when it loads
/// anything but the 4-byte words that hold `words`, where that is given. `None`: see [`library`].
///
/// # Safety
/// `params` leads to values of the kernel's parameter types, and the kernel may run with them.
pub unsafe fn run(
    name: &str,
    [grid, block]: [[u32; 2]; 2],
    params: &[*const c_void],
    words: Option<&[u8]>,
) -> Option<()> {
    let library = loaded()?;
    // SAFETY: every `run_` function of our library has this type.
    let run = unsafe { library.get::<Run>(format!("run_{name}")) }.unwrap();
    // SAFETY: this function of our library has this type.
    let limit = unsafe { library.get::<Limit>("limit_loads") }.unwrap();
    let range = words.map(|words| words.as_ptr_range());
    let from = range
        .clone()
        .map_or(0, |range| range.start as usize / 4 * 4);
    let to = range.map_or(0, |range| (range.end as usize).next_multiple_of(4));
    let grid = [grid[0], grid[1], 1];
    let block = [block[0], block[1], 1];
    // SAFETY: two addresses that are only compared; three sizes each, and the caller's promise.
    unsafe {
        limit(from as *const c_void, to as *const c_void);
        run(grid.as_ptr(), block.as_ptr(), params.as_ptr());
    }
    Some(())
}

/// A parameter as a kernel takes it: its place.
pub fn place<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

/// Place of the bytes in their pages.
#[derive(Clone, Copy, Debug)]
pub enum At {
    /// The first byte is this many bytes after inaccessible memory.
    Start(usize),
    /// The last byte is this many bytes before inaccessible memory.
    End(usize),
}

/// Canary value around the bytes.
const CANARY: u8 = 0xa5;

/// Bytes between two inaccessible pages, which end the process on access.
pub struct Guarded {
    map: *mut u8,
    pages: usize,
    start: usize,
    len: usize,
}

impl Guarded {
    /// Holds a copy of `bytes`.
    pub fn new(bytes: &[u8], at: At) -> Self {
        let (At::Start(apart) | At::End(apart)) = at;
        let pages = (bytes.len() + apart).next_multiple_of(page_size());
        let whole = pages + 2 * page_size();
        let flags = MapFlags::PRIVATE;
        let usable = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: new memory at an address that the kernel chooses.
        let map = unsafe { mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), flags) }
            .unwrap();
        let map = map.cast::<u8>();
        // SAFETY: a part of the memory just mapped, from one page after its start; nobody has seen
        // it yet.
        unsafe { mprotect(map.add(page_size()).cast(), pages, usable) }.unwrap();
        let start = match at {
            At::Start(apart) => apart,
            At::End(apart) => pages - apart - bytes.len(),
        };
        let mut guarded = Self {
            map,
            pages,
            start,
            len: bytes.len(),
        };
        guarded.all().fill(CANARY);
        guarded.copy_from_slice(bytes);
        guarded
    }

    fn all(&mut self) -> &mut [u8] {
        // SAFETY: this part of the map is ours, readable, writable and zero at first; the borrow is
        // unique.
        unsafe { std::slice::from_raw_parts_mut(self.map.add(page_size()), self.pages) }
    }

    /// Fails when anything around the bytes has been written.
    pub fn check(&mut self) {
        let start = self.start;
        let len = self.len;
        let all = self.all();
        let mut around = all[..start].iter().chain(&all[start + len..]);
        let intact = around.all(|byte| *byte == CANARY);
        assert!(intact, "bytes were written outside of {len} bytes");
    }
}

impl Deref for Guarded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start + len` is at most `pages`, and that part of the map is readable and
        // initialised.
        unsafe { std::slice::from_raw_parts(self.map.add(page_size() + self.start), self.len) }
    }
}

impl DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.start;
        let len = self.len;
        &mut self.all()[start..start + len]
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the whole of our own map, whose borrows have ended.
        unsafe { munmap(self.map.cast(), self.pages + 2 * page_size()) }.unwrap();
    }
}
