//! NVIDIA GPUs through CUDA's driver API.
//!
//! ```text
//! full slot ──(transfer thread: one copy per run of arrays)──► copy stream ──event "copied"──► Batch
//!    │                                                            ▲                              │ bound streams wait for
//!    └── free when its copy has ended                             │                              ▼ "copied", never the CPU
//!                                       waits for ◄── events "released", one per bound stream, recorded when it is dropped
//! ```
//!
//! The driver library is loaded at run time. Without it, or without a device,
//! [`Device::auto`](super::Device::auto) returns the host and gives the reason. The build needs no
//! part of CUDA: the crate has its own table of symbols.
//!
//! Invariants:
//! * `build` reserves device memory once; a batch reserves nothing.
//! * A slot belongs to the copy until the copy's event is reached. A buffer belongs to the consumer
//!   until the events recorded at the batch's drop are reached. The copy stream waits for these
//!   events; no thread does.
//! * No thread waits in the driver for the device, except at shutdown.

#[doc(hidden)]
pub mod backend;
#[doc(hidden)]
pub mod buffer;
#[doc(hidden)]
pub mod copy;
#[doc(hidden)]
pub mod cufile;
#[doc(hidden)]
pub mod direct;
#[doc(hidden)]
pub mod driver;
#[doc(hidden)]
pub mod flight;
#[doc(hidden)]
pub mod found;
#[doc(hidden)]
pub mod idle;
#[cfg(feature = "cudarc")]
#[doc(hidden)]
pub mod interop;
#[doc(hidden)]
pub mod kernels;

#[doc(no_inline)]
pub use crate::Stream;
#[cfg(feature = "cudarc")]
#[doc(no_inline)]
pub use cudarc;
#[cfg(feature = "cudarc")]
pub use interop::FieldSlice;

#[doc(hidden)]
pub use backend::Lane;
#[doc(hidden)]
pub use buffer::Buffer;
#[doc(hidden)]
pub use copy::Copier;
#[doc(hidden)]
pub use direct::{Bounce, DirectFile, DirectReader};
pub(super) use driver::leaked;
#[doc(hidden)]
pub use idle::IdleMeter;

/// Stops all calls to the driver from now on: loaders on a GPU fail, and dropped driver objects
/// leak.
///
/// For programs that shut down before the process's exit handlers run, such as interpreters. At
/// process exit this happens automatically.
pub fn end_calls() {
    driver::end_calls();
}

use crate::backend::Backend;
use driver::{Driver, Gpu, devices};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use std::sync::{Arc, Mutex, Weak};

/// Devices in use. All loaders on one device share its entry, so a fatal error on the device ends
/// all of them.
static GPUS: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());

/// The device with this number, with its primary context.
pub(super) fn open(ordinal: usize) -> Result<Arc<Gpu>> {
    let driver = driver()?;
    let mut gpus = GPUS.hold();
    gpus.retain(|gpu| gpu.strong_count() > 0);
    // The user may have made a new context for a broken device; the driver decides whether it is
    // usable.
    let known = gpus
        .iter()
        .filter_map(Weak::upgrade)
        .find(|gpu| gpu.ordinal() == ordinal && !gpu.is_broken());
    if let Some(gpu) = known {
        return Ok(gpu);
    }
    let gpu = Gpu::primary(driver, ordinal)?;
    gpus.push(Arc::downgrade(&gpu));
    Ok(gpu)
}

/// Returns this process's GPU with the reason for the choice: the GPU of its rank on its node, or
/// else the first. An error gives the reason why no GPU is usable.
pub(super) fn best() -> Result<(Arc<dyn Backend>, String)> {
    let count = driver()?.devices();
    let (ordinal, why) = match feedline_core::order::Rank::local_from_env() {
        Ok(Some(rank)) if count > 1 => (
            rank as usize % count,
            format!("local rank {rank}, {count} devices are visible"),
        ),
        Err(error) if count > 1 => (
            0,
            format!(
                "the first of {count}; the launcher's variables are unusable: {}",
                error.message()
            ),
        ),
        _ => (0, format!("the first of {count}")),
    };
    let gpu = open(ordinal)
        .map_err(|error| error.within(format_args!("cuda:{ordinal} is not usable")))?;
    Ok((gpu, why))
}

/// Readable list of devices.
pub(super) fn probe() -> String {
    let ((major, minor), devices) = match devices() {
        Ok(found) => found,
        Err(absent) => return format!("host only: {absent}"),
    };
    let lines = devices.iter().map(|device| {
        let bytes = device.bytes as f64 / 1e9;
        let bus = device.pci_bus_id.as_deref().unwrap_or("unknown");
        format!(
            "\n  cuda:{} {}, {bytes:.1} GB, PCI {bus}",
            device.ordinal, device.name
        )
    });
    format!(
        "the driver supports CUDA {major}.{minor}{}",
        lines.collect::<String>()
    )
}

fn driver() -> Result<&'static Driver> {
    Driver::get().map_err(|absent| Error::new(ErrorKind::Device, Stage::Build, absent.to_string()))
}
