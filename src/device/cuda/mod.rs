//! NVIDIA GPUs, by CUDA's driver API.
//!
//! ```text
//! full slot ──(transfer thread: one copy per run of arrays)──► copy stream ──event "copied"──► Batch
//!    │                                                            ▲                              │ bound streams wait for
//!    └── free again when "copied" is reached                      │                              ▼ "copied", never the CPU
//!                                       waits for ◄── events "released", one per bound stream, recorded when it is dropped
//! ```
//!
//! The driver library is looked for at run time; without it, or without a device, [`Device::auto`](super::Device::auto) is
//! the host and says why. Nothing of CUDA is needed to build.
//!
//! Invariants:
//! * Device memory is reserved once, by `build`; a batch reserves nothing.
//! * A slot stays the copy's until its event is reached; a buffer stays the consumer's until the events that its streams
//!   got when the batch was dropped are reached: the copy stream waits for them, no thread does.
//! * No thread waits in the driver for the device, but for those that end things.

pub(crate) mod copy;
pub(crate) mod cufile;
pub(crate) mod driver;
pub(crate) mod kernels;
pub mod nvml;
mod slice;
mod stream;

pub use cudarc;
pub use driver::Absent;
pub use slice::FieldSlice;
pub use stream::Stream;

use crate::error::{Error, ErrorKind, Result, Stage};
use driver::{Driver, Gpu};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The devices that are in use: loaders of the same device share it, and what broke it.
static GPUS: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());

/// The device with that number, by its primary context.
pub(super) fn open(ordinal: usize) -> Result<Arc<Gpu>> {
    let driver = driver()?;
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    gpus.retain(|gpu| gpu.strong_count() > 0);
    let known = gpus.iter().filter_map(Weak::upgrade).find(|gpu| gpu.ordinal() == ordinal);
    if let Some(gpu) = known {
        return Ok(gpu);
    }
    let gpu = Gpu::primary(driver, ordinal)?;
    gpus.push(Arc::downgrade(&gpu));
    Ok(gpu)
}

/// The device of the user's own context.
pub(super) fn open_in(context: Arc<cudarc::driver::CudaContext>) -> Result<Arc<Gpu>> {
    Gpu::of_user(driver()?, context)
}

fn driver() -> Result<&'static Driver> {
    Driver::get().map_err(|absent| Error::new(ErrorKind::Device, Stage::Build, absent.to_string()))
}

/// A GPU that the process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Its number: `Device::cuda(ordinal)`.
    pub ordinal: usize,
    /// What its maker calls it.
    pub name: String,
    /// Bytes of memory.
    pub bytes: usize,
    /// Where it sits, as in `/sys/bus/pci/devices`.
    pub pci_bus_id: Option<String>,
}

/// The driver's version (of CUDA, major and minor), and its devices.
///
/// Errors: why there are none.
pub fn devices() -> Result<((i32, i32), Vec<Found>), Absent> {
    let driver = Driver::get()?;
    let devices = (0..driver.devices()).filter_map(|ordinal| driver.found(ordinal)).collect();
    Ok((driver.version(), devices))
}
