//! Where batches are handed out: the host's memory, or a GPU's.
//!
//! A device that is absent is a value, not a build option: [`Device::auto`] says what it chose and why. The host device
//! hands out views of the slot itself. Other backends pin the pool's regions (they return a guard that is dropped
//! before the region) and copy full slots on a stream of theirs; they come with the CUDA backend.

#[cfg(feature = "cuda")]
pub mod cuda;

use std::fmt;

/// Where the fields of a batch lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    kind: DeviceKind,
    why: String,
}

/// Kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// Memory of the process.
    Host,
}

impl Device {
    /// The host: batches are views of their slots, no copy is made.
    pub fn host() -> Self {
        Self { kind: DeviceKind::Host, why: "asked for".into() }
    }

    /// The best device there is.
    pub fn auto() -> Self {
        Self { kind: DeviceKind::Host, why: "this version has no other backend".into() }
    }

    /// Which kind it is.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Why this one.
    pub fn why(&self) -> &str {
        &self.why
    }
}

impl Default for Device {
    fn default() -> Self {
        Self::auto()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            DeviceKind::Host => "host",
        };
        write!(f, "{kind} ({})", self.why)
    }
}
