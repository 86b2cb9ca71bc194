//! The devices of batches: host memory, or a GPU.
//!
//! Whether a GPU is present is decided at run time, not by a build option: [`Device::auto`] reports
//! its choice and the reason. A loader uses a device only through the trait `Backend`
//! (`backend.rs`). On the host, batches are views of the slot itself. A CUDA device ([`cuda`]) pins
//! the slots, and copies full ones on its own stream.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

pub mod backend;
pub mod cuda;
pub mod finish;
pub mod ops;
pub mod stream;

pub use backend::*;
pub use cuda::{Bounce, Buffer, Copier, DirectFile, DirectReader, IdleMeter, Lane};
pub use finish::Finish;
pub use ops::{DeviceOp, DirectStep, FinishStep, Gather};
pub use stream::{Bound, Stream, StreamUse};

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The device that holds the fields of a batch.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
    why: String,
}

/// The number of driver objects leaked in this process because of broken devices.
pub fn leaked() -> u64 {
    cuda::leaked()
}

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// Memory of the process.
    Host,
    /// Memory of the CUDA device with this number.
    Cuda(usize),
}

impl DeviceKind {
    /// The number of the CUDA device; `None` for the host.
    #[doc(hidden)]
    pub fn ordinal(self) -> Option<usize> {
        match self {
            Self::Host => None,
            Self::Cuda(ordinal) => Some(ordinal),
        }
    }
}

impl Device {
    /// The host: batches are views of their slots, without a copy.
    pub fn host() -> Self {
        Self::host_since("requested")
    }

    /// The host, with a [reason](Self::why) for the choice. For programs that choose a device
    /// themselves.
    pub fn host_since(why: impl Into<String>) -> Self {
        Self {
            backend: Arc::new(Host),
            why: why.into(),
        }
    }

    /// A usable GPU, or else the host; [`why`](Self::why) gives the choice and its reason.
    ///
    /// Among several GPUs it takes the one numbered by this process's rank on its node, as set by
    /// the launcher (`Rank::local_rank`). Without a launcher, it takes
    /// the first.
    pub fn auto() -> Self {
        cuda::best().map_or_else(
            |error| Self::host_since(error.message()),
            |(gpu, why)| Self::of(gpu, &why),
        )
    }

    /// The GPU with this number among the visible ones (`CUDA_VISIBLE_DEVICES` is respected).
    ///
    /// Errors: [`ErrorKind::Device`] with the reason: no driver, a driver too old, no such device,
    /// no memory left for a context.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Ok(Self::of(cuda::open(ordinal)?, "requested"))
    }

    /// The GPU of this context, for programs that use cudarc themselves.
    ///
    /// Events order the program's work and the loader's only within one context object, so the
    /// loader must share that object.
    ///
    /// Errors: as [`cuda`](Self::cuda).
    #[cfg(feature = "cudarc")]
    pub fn cuda_in(context: Arc<cudarc::driver::CudaContext>) -> Result<Self> {
        Ok(Self::of(
            cuda::interop::open(context)?,
            "requested, in the caller's context",
        ))
    }

    #[doc(hidden)]
    pub fn of(gpu: Arc<dyn Backend>, why: &str) -> Self {
        let why = format!("{}, {why}", gpu.name());
        Self { backend: gpu, why }
    }

    /// A readable list of the GPUs, or the reason why CUDA is unusable. Starts the driver, but
    /// creates no context.
    ///
    /// ```
    /// println!("{}", feedline_device::Device::probe());
    /// ```
    pub fn probe() -> String {
        cuda::probe()
    }

    /// Kind of the device.
    pub fn kind(&self) -> DeviceKind {
        self.backend.kind()
    }

    /// Reason for the choice.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// PCI address of the GPU, as in `/sys/bus/pci/devices`; `None` for the host.
    pub fn pci_bus_id(&self) -> Option<&str> {
        self.backend.pci_bus_id()
    }

    #[doc(hidden)]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Parses `auto`, `host` (or `cpu`), `cuda` (like `auto`, but an error without a GPU) or
    /// `cuda:N`, for command lines.
    ///
    /// Errors: as [`Device::cuda`], and [`ErrorKind::Config`] for other words.
    fn from_str(words: &str) -> Result<Self> {
        let ordinal = match words {
            "auto" => return Ok(Self::auto()),
            "host" | "cpu" => return Ok(Self::host()),
            "cuda" => return cuda::best().map(|(gpu, why)| Self::of(gpu, &why)),
            _ => words
                .strip_prefix("cuda:")
                .and_then(|number| number.parse().ok()),
        };
        Self::cuda(ordinal.ok_or_else(|| {
            let message = format!("no device is called {words:?}: use auto, cpu, cuda or cuda:N");
            Error::new(ErrorKind::Config, Stage::Build, message)
        })?)
    }
}

impl Default for Device {
    /// The host. A program should depend on the machine only if it asks to, with
    /// [`auto`](Self::auto).
    fn default() -> Self {
        Self::host_since("the default")
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.kind() == other.kind()
    }
}

impl Eq for Device {}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind(), self.why)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
