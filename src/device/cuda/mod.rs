//! GPU memory by CUDA's driver API.

#[expect(dead_code, reason = "launched by the copy stage, which follows")]
mod kernels;
