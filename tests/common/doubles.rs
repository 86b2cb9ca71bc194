//! A GPU machine of stand-ins: driver, kernels (their own source, on the CPU) and cuFile together.
//!
//! ```text
//! on_machine ── session + cuFile ── body, on a thread with a deadline ──► nothing is alive, no violation
//! ```

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unsafe_code)]

use super::cufile::{Route, StandIn};
use super::standin::{self, Config, Gpu, KernelFn, Live, Session};
pub use super::wait::until;
use super::{Dir, kernels, loader_threads};
use feedline::device::Gds;
use feedline::{Device, Loader, LoaderBuilder};
use libloading::Library;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub use super::got::*;

/// Sizes of the parameters of a kernel, which of them are device pointers, and which of these are
/// written.
const KERNELS: [(&str, &[u32], u64, u64); 3] = [
    ("feedline_finish_2", &FINISH, 0b1111, 0b0010),
    ("feedline_finish_4", &FINISH, 0b1111, 0b0010),
    ("feedline_gather", &[8, 8, 8, 8, 8], 0b111, 0b100),
];
const FINISH: [u32; 9] = [8, 8, 8, 8, 4, 4, 4, 4, 4];

/// Gives the session's driver our kernels; false, with the reason printed, where nothing can
/// compile them.
pub fn with_kernels(session: &Session) -> bool {
    let Some(path) = kernels::library() else {
        return false;
    };
    // SAFETY: our own library, without initialisers.
    let library = std::mem::ManuallyDrop::new(unsafe { Library::new(path) }.unwrap());
    for (name, sizes, pointers, writes) in KERNELS {
        // SAFETY: every `run_NAME` of `tests/standin/kernels.cpp` is of this type; the library is
        // never closed.
        let run = unsafe { library.get::<KernelFn>(format!("run_{name}").as_bytes()) }.unwrap();
        session.register_kernel(name, *run, sizes, pointers, writes);
    }
    true
}

/// A cuFile for the session's driver, and the root of the simulated machine.
pub struct CuFileMachine {
    pub cufile: StandIn,
    pub dir: Dir,
}

impl CuFileMachine {
    pub fn new(route: Route) -> Self {
        Self::of(StandIn::own(), route)
    }

    /// With this library.
    pub fn of(cufile: StandIn, route: Route) -> Self {
        let dir = Dir::new();
        dir.write("proc/modules", b"ext4 1 1 - Live 0x0\n");
        dir.write("run/udev/data/b259:0", b"");
        let settings = b"{ \"properties\": { \"use_pci_p2pdma\": true } }\n";
        dir.write("etc/cufile.json", settings);
        cufile.route(0, route);
        Self { cufile, dir }
    }

    /// As new, by this route.
    pub fn reset(&self, route: Route) {
        self.cufile.reset();
        self.cufile.route(0, route);
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path("")
    }
}

/// A session of the GPU together with a cuFile.
pub struct Machine {
    pub session: Session,
    pub double: Arc<CuFileMachine>,
}

impl Machine {
    /// A loader's batches on the GPU, with this setting of direct reads.
    pub fn on_gpu(&self, builder: LoaderBuilder, gds: Gds) -> LoaderBuilder {
        self.on(Device::cuda(0).unwrap(), builder, gds)
    }

    /// The same on this device.
    pub fn on(&self, device: Device, builder: LoaderBuilder, gds: Gds) -> LoaderBuilder {
        let double = &self.double;
        let builder = builder.device(device).tuning(|t| t.gds(gds));
        builder.tuning(|t| t.cufile_at(double.cufile.path(), double.root()))
    }

    /// The same if some field requires a direct route.
    pub fn direct(&self, builder: LoaderBuilder) -> LoaderBuilder {
        self.on_gpu(builder, Gds::Require)
    }

    /// Reads requested from cuFile.
    pub fn reads(&self) -> i64 {
        self.double.cufile.counts().reads
    }
}

/// Runs `body` on its own machine, or not at all without kernels. Afterwards driver and cuFile have
/// no live objects, no loader thread runs, and there are no violations. A body that hangs ends the
/// process, with its last call.
#[track_caller]
pub fn on_machine(body: impl FnOnce(&Machine) + Send + 'static) {
    on_double(CuFileMachine::new(Route::P2p), body);
}

/// The same with this cuFile.
#[track_caller]
pub fn on_double(double: CuFileMachine, body: impl FnOnce(&Machine) + Send + 'static) {
    on_gpus(Config::default().devices, double, body);
}

/// The same with these GPUs. The driver is asked for their number once in a process.
#[track_caller]
pub fn on_gpus(
    gpus: Vec<Gpu>,
    double: CuFileMachine,
    body: impl FnOnce(&Machine) + Send + 'static,
) {
    let config = Config {
        devices: gpus,
        ..Config::default()
    };
    lived_with(config, String::new(), Arc::new(double), |machine| {
        body(machine);
        let ended = || loader_threads().is_empty();
        until("the loaders' threads have ended", ended);
        // A thread that frees a batch has its name a moment after its start.
        super::wait::soon(|| machine.session.live() == Live::default());
        let alive = machine.session.live();
        assert_eq!(alive, Live::default(), "alive in the driver");
        let counts = machine.double.cufile.counts();
        let registered = [counts.files, counts.buffers, counts.users];
        assert_eq!(registered, [0; 3], "registered with cuFile");
    });
}

/// The same, but the body judges the objects alive at the end. `name` appears in failures.
#[track_caller]
pub fn lived(
    name: String,
    double: Arc<CuFileMachine>,
    body: impl FnOnce(&Machine) + Send + 'static,
) {
    lived_with(Config::default(), name, double, body);
}

#[track_caller]
fn lived_with(
    config: Config,
    name: String,
    double: Arc<CuFileMachine>,
    body: impl FnOnce(&Machine) + Send + 'static,
) {
    standin::in_session(config, name, |session| {
        if with_kernels(&session) {
            let machine = Machine { session, double };
            body(&machine);
            let Machine { session, double } = machine;
            let violations = [session.end(), double.cufile.violations()].concat();
            assert!(violations.is_empty(), "violations: {violations:#?}");
        }
    });
}
