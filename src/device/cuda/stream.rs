//! The consumer's streams.

#![allow(unsafe_code)]

use super::driver::{Handle, LEGACY};
use cudarc::driver::CudaStream;
use std::sync::Arc;

/// A stream of the consumer: batches that are bound to it are there before the work that it is given afterwards, and their
/// memory is used again only behind the work that it was given before the batch was dropped.
#[derive(Clone)]
pub struct Stream {
    raw: Handle,
    #[allow(dead_code, reason = "held so that the stream lives")]
    owner: Option<Arc<CudaStream>>,
}

impl Stream {
    /// The legacy default stream: what programs use that never made a stream. It is what a batch is bound to when its
    /// memory is asked for and nothing else was said.
    pub fn legacy() -> Self {
        Self { raw: LEGACY, owner: None }
    }

    /// A stream of CUDA's driver or runtime API (`CUstream`, `cudaStream_t`; in PyTorch
    /// `torch.cuda.current_stream().cuda_stream`). 0 and 1 are the legacy default stream. So is 2, which would be another stream
    /// on every thread that asks: the legacy one and all of those wait for each other.
    ///
    /// # Safety
    /// The stream must live, on the device of the loader, until every batch that is bound to it has been dropped.
    pub unsafe fn from_raw(stream: usize) -> Self {
        Self::promised(stream)
    }

    /// As [`from_raw`](Self::from_raw), whose promise was made to somebody else.
    pub(crate) fn promised(stream: usize) -> Self {
        Self { raw: handle(stream), owner: None }
    }

    /// The handle.
    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }
}

/// The handle to work with. A batch may be dropped on another thread than the one that bound it, where `CU_STREAM_PER_THREAD`
/// is another stream: its event would stand for work that nobody gave.
fn handle(raw: Handle) -> Handle {
    const PER_THREAD: Handle = 2;
    if raw == 0 || raw == PER_THREAD { LEGACY } else { raw }
}

impl From<&Arc<CudaStream>> for Stream {
    fn from(stream: &Arc<CudaStream>) -> Self {
        Self { raw: handle(stream.cu_stream() as Handle), owner: Some(stream.clone()) }
    }
}

impl From<Arc<CudaStream>> for Stream {
    fn from(stream: Arc<CudaStream>) -> Self {
        Self::from(&stream)
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.raw == LEGACY { f.write_str("the legacy default stream") } else { write!(f, "stream {:#x}", self.raw) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_streams_go_by_the_legacy_one_and_no_other_does() {
        for (raw, expected) in [(0, LEGACY), (1, LEGACY), (2, LEGACY), (3, 3), (0x7f00_1234, 0x7f00_1234)] {
            assert_eq!(Stream::promised(raw).raw(), expected);
        }
    }
}
