//! A device that the driver sees, or why CUDA is not used.

use std::fmt;

/// Why CUDA is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Absent {
    /// No driver library; the loader's words.
    NoLibrary(String),
    /// The library is there, but too old for this crate, or not a driver.
    TooOld(String),
    /// The driver cannot be used: its code and name.
    Init(i32, String),
    /// The driver sees no device (none built in, or `CUDA_VISIBLE_DEVICES` hides them).
    NoDevice,
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary(words) => write!(f, "no CUDA driver: {words}"),
            Self::TooOld(words) => write!(f, "the CUDA driver is too old: {words}"),
            Self::Init(code, name) => write!(f, "the CUDA driver does not start: {name} ({code})"),
            Self::NoDevice => match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(seen) => write!(f, "no CUDA device is visible (CUDA_VISIBLE_DEVICES={seen:?})"),
                Err(_) => f.write_str("no CUDA device"),
            },
        }
    }
}

impl std::error::Error for Absent {}

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
