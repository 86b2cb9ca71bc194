//! Where batches are handed out: the host's memory, or a GPU's.
//!
//! A device that is absent is a value, not a build option: [`Device::auto`] says what it chose and why. The host device
//! hands out views of the slot itself. A CUDA device ([`cuda`]) pins the pool's regions and copies full slots on a stream of
//! its own.

#[cfg(feature = "cuda")]
pub mod cuda;
mod finish;
mod steps;

pub use finish::Finish;
pub(crate) use steps::{DirectStep, FinishStep, Gather};

use crate::error::{Error, ErrorKind, Result, Stage};
use std::fmt;
use std::str::FromStr;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Where the fields of a batch lie.
#[derive(Clone)]
pub struct Device {
    kind: DeviceKind,
    why: String,
    #[cfg(feature = "cuda")]
    gpu: Option<Arc<cuda::driver::Gpu>>,
}

/// Kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// Memory of the process.
    Host,
    /// Memory of the CUDA device with that number.
    Cuda(usize),
}

impl Device {
    /// The host: batches are views of their slots, no copy is made.
    pub fn host() -> Self {
        Self::host_since("asked for")
    }

    fn host_since(why: impl Into<String>) -> Self {
        Self {
            kind: DeviceKind::Host,
            why: why.into(),
            #[cfg(feature = "cuda")]
            gpu: None,
        }
    }

    /// A GPU where one is usable, else the host; [`why`](Self::why) says which and why. Of several GPUs the one with the
    /// number that the launcher gave this process on its node ([`Shard::local_rank`](crate::Shard::local_rank)), else the
    /// first.
    pub fn auto() -> Self {
        Self::best()
    }

    #[cfg(not(feature = "cuda"))]
    fn best() -> Self {
        Self::host_since("built without the feature `cuda`")
    }

    #[cfg(feature = "cuda")]
    fn best() -> Self {
        let count = match cuda::driver::Driver::get() {
            Ok(driver) => driver.devices(),
            Err(absent) => return Self::host_since(absent.to_string()),
        };
        let shard = crate::order::Shard::from_env();
        let local = shard.as_ref().map(|shard| shard.local_rank());
        let (ordinal, why) = match local {
            Ok(Some(rank)) if count > 1 => {
                (rank as usize % count, format!("local rank {rank}, {count} devices are visible"))
            }
            Err(error) if count > 1 => {
                (0, format!("the first of {count}; the launcher's variables are of no use: {}", error.message()))
            }
            _ => (0, format!("the first of {count}")),
        };
        match cuda::open(ordinal) {
            Ok(gpu) => Self::of(gpu, why),
            Err(error) => Self::host_since(format!("cuda:{ordinal} is not usable: {}", error.message())),
        }
    }

    /// The GPU with that number among those that the process sees (`CUDA_VISIBLE_DEVICES` is respected).
    ///
    /// Errors: [`ErrorKind::Device`], saying why not: no driver, too old, no such device, no memory
    /// left for a context.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self::of(cuda::open(ordinal)?, "asked for".into()));
        #[cfg(not(feature = "cuda"))]
        Err(Error::new(ErrorKind::Device, Stage::Build, format!("cuda:{ordinal}: built without the feature `cuda`")))
    }

    /// The GPU of this context, for programs that use cudarc themselves: events of one context object order the work of
    /// the other only when both are the same.
    ///
    /// Errors: as [`cuda`](Self::cuda).
    #[cfg(feature = "cudarc")]
    pub fn cuda_in(context: Arc<cudarc::driver::CudaContext>) -> Result<Self> {
        Ok(Self::of(cuda::interop::open(context)?, "asked for, in the caller's context".into()))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn of(gpu: Arc<cuda::driver::Gpu>, why: String) -> Self {
        let why = format!("{}, {why}", gpu.name());
        Self { kind: DeviceKind::Cuda(gpu.ordinal()), why, gpu: Some(gpu) }
    }

    /// What there is, and why what is missing is not used: for people. Starts the driver, makes no context.
    ///
    /// ```
    /// println!("{}", feedline::Device::probe());
    /// ```
    pub fn probe() -> String {
        #[cfg(feature = "cuda")]
        return match cuda::devices() {
            Err(absent) => format!("host only: {absent}"),
            Ok(((major, minor), devices)) => {
                let lines = devices.iter().map(|device| {
                    let (bytes, bus) = (device.bytes as f64 / 1e9, device.pci_bus_id.as_deref().unwrap_or("unknown"));
                    format!("\n  cuda:{} {}, {bytes:.1} GB, PCI {bus}", device.ordinal, device.name)
                });
                format!("the driver supports CUDA {major}.{minor}{}", lines.collect::<String>())
            }
        };
        #[cfg(not(feature = "cuda"))]
        "host only: built without the feature `cuda`".into()
    }

    /// Which kind it is.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Why this one.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Where the GPU sits, as in `/sys/bus/pci/devices`; `None` for the host.
    pub fn pci_bus_id(&self) -> Option<&str> {
        #[cfg(feature = "cuda")]
        return self.gpu.as_ref().and_then(|gpu| gpu.pci_bus_id());
        #[cfg(not(feature = "cuda"))]
        None
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn gpu(&self) -> Option<&Arc<cuda::driver::Gpu>> {
        self.gpu.as_ref()
    }
}

impl FromStr for Device {
    type Err = Error;

    /// `auto`, `host` (or `cpu`), `cuda` (the first) or `cuda:N`: what command lines take. Errors: as [`Device::cuda`], and
    /// [`ErrorKind::Config`] for other words.
    fn from_str(words: &str) -> Result<Self> {
        let ordinal = match words {
            "auto" => return Ok(Self::auto()),
            "host" | "cpu" => return Ok(Self::host()),
            "cuda" => Some(0),
            _ => words.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        let unknown = || {
            let message = format!("no device is called {words:?}; there are auto, host and cuda:N");
            Error::new(ErrorKind::Config, Stage::Build, message)
        };
        Self::cuda(ordinal.ok_or_else(unknown)?)
    }
}

impl Default for Device {
    /// The host: what a program does must not depend on the machine unless it asks for that ([`auto`](Self::auto)).
    fn default() -> Self {
        Self::host_since("the default")
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind
    }
}

impl Eq for Device {}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DeviceKind::Host => write!(f, "host ({})", self.why),
            DeviceKind::Cuda(ordinal) => write!(f, "cuda:{ordinal} ({})", self.why),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Things that broken devices kept, in this process.
pub(crate) fn leaked() -> u64 {
    #[cfg(feature = "cuda")]
    return cuda::driver::leaked();
    #[cfg(not(feature = "cuda"))]
    0
}
