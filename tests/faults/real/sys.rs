//! The few system calls that these tests need and no safe crate wraps.

#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_ulong, c_void};
use std::io;
use std::path::Path;

unsafe extern "C" {
    fn mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
    fn umount2(target: *const c_char, flags: c_int) -> c_int;
    fn unshare(flags: c_int) -> c_int;
    fn fork() -> c_int;
    fn _exit(code: c_int) -> !;
    fn execv(path: *const c_char, arguments: *const *const c_char) -> c_int;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> *const c_void;
    fn siginterrupt(number: c_int, interrupts: c_int) -> c_int;
    fn tgkill(process: c_int, thread: c_int, number: c_int) -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
}

const CLONE_NEWNS: c_int = 0x0002_0000;
const MS_REC: c_ulong = 1 << 14;
const MS_PRIVATE: c_ulong = 1 << 18;
const MNT_DETACH: c_int = 2;
const WNOHANG: c_int = 1;

fn checked(result: c_int) -> io::Result<c_int> {
    match result {
        ..0 => Err(io::Error::last_os_error()),
        _ => Ok(result),
    }
}

fn text(words: impl AsRef<std::ffi::OsStr>) -> CString {
    use std::os::unix::ffi::OsStrExt;
    CString::new(words.as_ref().as_bytes()).unwrap()
}

/// From here on mounts of the calling thread and its children are private, and end with the last of
/// them: no test leaves a mount behind.
///
/// Errors: `EPERM` without `CAP_SYS_ADMIN`.
pub fn private_mounts() -> io::Result<()> {
    // SAFETY: a flag, no memory.
    checked(unsafe { unshare(CLONE_NEWNS) })?;
    mounted("none", Path::new("/"), "", MS_REC | MS_PRIVATE, "")
}

/// Mounts `kind` at `target`.
pub fn mount_at(source: &str, target: &Path, kind: &str, options: &str) -> io::Result<()> {
    mounted(source, target, kind, 0, options)
}

fn mounted(
    source: &str,
    target: &Path,
    kind: &str,
    flags: c_ulong,
    options: &str,
) -> io::Result<()> {
    let texts = [text(source), text(target), text(kind), text(options)];
    let [source, target, kind, options] = texts.each_ref().map(|text| text.as_ptr());
    // SAFETY: four strings with their NULs, which live until the call is over; the kernel reads
    // them.
    checked(unsafe { mount(source, target, kind, flags, options.cast::<c_void>()) })?;
    Ok(())
}

/// Unmounts it, now or after its last use.
pub fn unmount(target: &Path) -> io::Result<()> {
    let target = text(target);
    // SAFETY: a string with its NUL, which the kernel reads.
    checked(unsafe { umount2(target.as_ptr(), MNT_DETACH) })?;
    Ok(())
}

/// Action of a forked process. It may do very little: its other threads are gone, with the locks
/// they held.
#[derive(Clone, Copy, Debug)]
pub enum Forked {
    /// `_exit(0)`.
    Leaves,
    /// `execv("/bin/true")`.
    Becomes,
}

/// Forks a process with this action; returns its id.
pub fn forked(what: Forked) -> io::Result<i32> {
    let path = c"/bin/true";
    let arguments = [path.as_ptr(), std::ptr::null()];
    // SAFETY: the new process allocates nothing and takes no lock: two system calls, with strings
    // that were made before.
    let process = checked(unsafe { fork() })?;
    if process > 0 {
        return Ok(process);
    }
    // SAFETY: the path and the list are terminated, and live.
    unsafe {
        if let Forked::Becomes = what {
            execv(path.as_ptr(), arguments.as_ptr());
            _exit(1);
        }
        _exit(0)
    }
}

/// Forks a process that runs `work` and exits with its result; returns its id. The caller has no
/// other thread that may hold a lock of `work`.
pub fn forked_at_work(work: impl FnOnce() -> i32) -> io::Result<i32> {
    // SAFETY: the C library keeps its own locks usable in the new process, and the caller answers
    // for all others.
    let process = checked(unsafe { fork() })?;
    if process > 0 {
        return Ok(process);
    }
    let code = work();
    // SAFETY: ends the process without its destructors: they are for the parent to run.
    unsafe { _exit(code) }
}

/// The exit status of a process of [`forked`] as `waitpid` gives it, once it is over.
pub fn over(process: i32) -> io::Result<Option<i32>> {
    let mut status = 0;
    // SAFETY: the kernel writes to one live integer.
    let found = checked(unsafe { waitpid(process, &raw mut status, WNOHANG) })?;
    Ok((found == process).then_some(status))
}

extern "C" fn nothing(_: c_int) {}

/// From here on this signal only interrupts system calls.
pub fn interrupted_by(number: i32) {
    // SAFETY: the handler does nothing, which is allowed everywhere.
    unsafe {
        signal(number, nothing);
        siginterrupt(number, 1);
    }
}

/// Sends a signal to one thread; false if it is gone.
pub fn interrupt(process: i32, thread: i32, number: i32) -> bool {
    // SAFETY: three integers; a thread that is gone is an error.
    unsafe { tgkill(process, thread, number) == 0 }
}
