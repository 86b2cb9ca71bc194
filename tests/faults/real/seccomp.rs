//! A seccomp filter that refuses system calls with an errno, as container runtimes do.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_ushort};
use std::io;

/// io_uring's system calls: the same numbers on all architectures.
pub const URING: [(&str, u32); 3] = [
    ("io_uring_setup", 425),
    ("io_uring_enter", 426),
    ("io_uring_register", 427),
];

unsafe extern "C" {
    fn prctl(option: c_int, ...) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
}

const PR_SET_NO_NEW_PRIVS: c_int = 38;
const MODE_FILTER: c_uint = 1;
/// For all threads of the process.
const FLAG_TSYNC: c_uint = 1;
#[cfg(target_arch = "x86_64")]
const SYS_SECCOMP: c_long = 317;
#[cfg(not(target_arch = "x86_64"))]
const SYS_SECCOMP: c_long = 277;

/// `BPF_LD | BPF_W | BPF_ABS`, `BPF_JMP | BPF_JEQ | BPF_K`, `BPF_RET | BPF_K`.
const LOAD: c_ushort = 0x20;
const JUMP_IF_EQUAL: c_ushort = 0x15;
const RETURN: c_ushort = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;

/// `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: c_ushort,
    if_true: u8,
    if_false: u8,
    value: u32,
}

/// `struct sock_fprog`.
#[repr(C)]
struct Program {
    len: c_ushort,
    instructions: *const Instruction,
}

/// From here on the listed system calls of this process and its children fail with `errno`. It
/// cannot be undone.
///
/// Errors: the kernel has no filters, or the process may not install one.
pub fn deny(calls: &[u32], errno: i32) -> io::Result<()> {
    let step = |code, if_true, value| Instruction {
        code,
        if_true,
        if_false: 0,
        value,
    };
    // The number of the system call is the first word of `struct seccomp_data`.
    let mut instructions = vec![step(LOAD, 0, 0)];
    for (at, call) in calls.iter().enumerate() {
        // Jump over the other comparisons and the permission.
        instructions.push(step(JUMP_IF_EQUAL, (calls.len() - at) as u8, *call));
    }
    instructions.push(step(RETURN, 0, ALLOW));
    instructions.push(step(RETURN, 0, ERRNO | errno as u32));
    let program = Program {
        len: instructions.len() as c_ushort,
        instructions: instructions.as_ptr(),
    };
    let yes: c_ulong = 1;
    let no: c_ulong = 0;
    // SAFETY: four integers after the option, as the kernel wants them.
    if unsafe { prctl(PR_SET_NO_NEW_PRIVS, yes, no, no, no) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the program and its instructions are live, of the kernel's layout, and only read;
    // every jump ends inside.
    match unsafe { syscall(SYS_SECCOMP, MODE_FILTER, FLAG_TSYNC, &raw const program) } {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        thread => {
            let words = format!("thread {thread} cannot take the filter over");
            Err(io::Error::other(words))
        }
    }
}
