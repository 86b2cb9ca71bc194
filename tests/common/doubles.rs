//! A GPU machine of stand-ins: driver, kernels (their own source, on the CPU) and cuFile together.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unsafe_code)]

use crate::cufile::{Route, StandIn};
use crate::standin::{KernelFn, Session};
use crate::{common::Dir, kernels};
use libloading::Library;
use std::path::PathBuf;

/// Sizes of the parameters of a kernel, which of them are device pointers, and which of these are written.
const KERNELS: [(&str, &[u32], u64, u64); 4] = [
    ("feedline_finish_f32", &[8, 8, 8, 4, 4, 4, 4, 4, 32], 0b111, 0b010),
    ("feedline_finish_f16", &[8, 8, 8, 4, 4, 4, 4, 4, 32], 0b111, 0b010),
    ("feedline_finish_bf16", &[8, 8, 8, 4, 4, 4, 4, 4, 32], 0b111, 0b010),
    ("feedline_gather", &[8, 8, 8, 8, 8], 0b111, 0b100),
];

/// Gives the session's driver our kernels; false, with the reason printed, where nothing can compile them.
pub fn with_kernels(session: &Session) -> bool {
    let Some(path) = kernels::library() else { return false };
    // SAFETY: our own library, without initialisers.
    let library = std::mem::ManuallyDrop::new(unsafe { Library::new(path) }.unwrap());
    for (name, sizes, pointers, writes) in KERNELS {
        // SAFETY: every `run_NAME` of `tests/standin/kernels.cpp` is of this type; the library is never closed.
        let run = unsafe { library.get::<KernelFn>(format!("run_{name}").as_bytes()) }.unwrap();
        session.register_kernel(name, *run, sizes, pointers, writes);
    }
    true
}

/// A cuFile of its own for the session's driver, and the root of the machine that it shall see.
pub struct CuFileMachine {
    pub cufile: StandIn,
    dir: Dir,
}

impl CuFileMachine {
    pub fn new(route: Route) -> Self {
        let (cufile, dir) = (StandIn::own(), Dir::new());
        dir.write("proc/modules", b"ext4 1 1 - Live 0x0\n");
        dir.write("run/udev/data/b259:0", b"");
        cufile.route(0, route);
        Self { cufile, dir }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path("")
    }
}
