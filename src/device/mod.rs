//! The devices of batches: host memory, or a GPU.
//!
//! Whether a GPU is present is decided at run time, not by a build option: [`Device::auto`] reports
//! its choice and the reason. A loader uses a device only through the trait `Backend`
//! (`backend.rs`). On the host, batches are views of the slot itself. A CUDA device ([`cuda`]) pins
//! the slots, and copies full ones on its own stream.

pub mod cuda;

pub use crate::pipeline::{FieldRoute, Gds, Route};

#[doc(inline)]
pub use feedline_device::{Device, DeviceKind, Finish, Stream, StreamUse};
