//! What a loader promises on a CUDA device, against stand-ins of the libraries; the same loader on the host is the oracle.
#![cfg(feature = "cuda")]

#[path = "../common/mod.rs"]
mod common;

mod cuda;
mod cuda_faults;
mod direct;
mod direct_faults;
mod finish;
mod kernels;
mod misuse;
mod standin;
