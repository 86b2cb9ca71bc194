//! The promises of a loader on a CUDA device, against stand-ins of the libraries; the same loader
//! on the host is the oracle.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../examples/profile/gpu.rs"]
mod gpu;
#[path = "../../examples/profile/measure.rs"]
mod measure;
#[path = "../../examples/profile/step.rs"]
mod step;

mod cuda;
mod cuda_faults;
mod direct;
mod direct_faults;
mod finish;
mod kernels;
mod misuse;
mod profile_gpu;
mod standin;
