//! CUDA, found at run time: nothing of it is needed to build.

#[allow(dead_code, reason = "what the direct route does not use yet")]
pub(crate) mod cufile;
