//! A device visible to the driver, or the reason why CUDA is not used.

use std::fmt;

/// Reason why CUDA is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Absent {
    /// No driver library, with the dynamic linker's message.
    NoLibrary(String),
    /// A library too old for this crate, or not a driver.
    TooOld(String),
    /// The driver fails to start: code and name.
    Init(i32, String),
    /// The driver sees no device: none installed, or hidden by `CUDA_VISIBLE_DEVICES`.
    NoDevice,
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary(words) => write!(f, "no CUDA driver: {words}"),
            Self::TooOld(words) => write!(f, "the CUDA driver is too old: {words}"),
            Self::Init(code, name) => {
                let hint = match code {
                    34 => {
                        ": this libcuda is the stub for linking, the driver's own must come first on the library path"
                    }
                    803 => ": libcuda and the kernel's driver are of different releases",
                    804 => ": the compatibility libraries of CUDA do not support this GPU",
                    999 => ": is there a device /dev/nvidia-uvm?",
                    _ => "",
                };
                write!(f, "the CUDA driver does not start: {name} ({code}){hint}")
            }
            Self::NoDevice => match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(seen) => write!(f, "no CUDA device is visible (CUDA_VISIBLE_DEVICES={seen:?})"),
                Err(_) => f.write_str("no CUDA device"),
            },
        }
    }
}

impl std::error::Error for Absent {}

/// A GPU visible to the process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Number for `Device::cuda(ordinal)`.
    pub ordinal: usize,
    /// The vendor's name.
    pub name: String,
    /// Bytes of device memory.
    pub bytes: usize,
    /// PCI address, as in `/sys/bus/pci/devices`.
    pub pci_bus_id: Option<String>,
}
