//! The consumer's streams.

#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

/// The legacy default stream.
pub(crate) const LEGACY: usize = 1;
/// The default stream of whichever thread asks.
pub(crate) const PER_THREAD: usize = 2;

/// A stream of the consumer: batches that are bound to it are there before the work that it is given afterwards, and their
/// memory is used again only behind the work that it was given before the batch was dropped.
#[derive(Clone)]
pub struct Stream {
    raw: usize,
    owner: Option<Owner>,
}

/// What keeps a stream alive.
#[derive(Clone)]
#[cfg_attr(not(feature = "cudarc"), allow(dead_code, reason = "no type of a user's stream is known"))]
struct Owner {
    /// The stream's context.
    context: usize,
    #[allow(dead_code, reason = "held for its Drop")]
    stream: Arc<dyn Any + Send + Sync>,
}

impl Stream {
    /// The legacy default stream: what programs use that never made a stream. It is what a batch is bound to when its
    /// memory is asked for and nothing else was said.
    pub fn legacy() -> Self {
        Self { raw: LEGACY, owner: None }
    }

    /// A stream of CUDA's driver or runtime API (`CUstream`, `cudaStream_t`; in PyTorch
    /// `torch.cuda.current_stream().cuda_stream`). 0 is the legacy default stream; 2, the per-thread default stream, is
    /// refused when a batch is bound to it, for it is another one on each thread.
    ///
    /// # Safety
    /// The stream must live, on the device of the loader, until every batch that is bound to it has been dropped. Drop
    /// none of them while a graph is captured from it, see [CUDA graphs](crate::device::cuda#cuda-graphs).
    pub unsafe fn from_raw(stream: usize) -> Self {
        Self::promised(stream)
    }

    /// As [`from_raw`](Self::from_raw), whose promise was made to somebody else.
    pub(crate) fn promised(stream: usize) -> Self {
        Self { raw: if stream == 0 { LEGACY } else { stream }, owner: None }
    }

    /// A stream of `context`, alive for as long as `stream`.
    #[cfg(feature = "cudarc")]
    pub(crate) fn owned(raw: usize, context: usize, stream: Arc<dyn Any + Send + Sync>) -> Self {
        Self { raw: if raw == 0 { LEGACY } else { raw }, owner: Some(Owner { context, stream }) }
    }

    /// Whether it lives for as long as this value does, whatever was promised.
    pub(crate) fn keeps_itself(&self) -> bool {
        self.owner.is_some() || self.raw == LEGACY
    }

    /// The handle.
    pub(crate) fn raw(&self) -> usize {
        self.raw
    }

    /// The context that its owner says it is of.
    pub(crate) fn context(&self) -> Option<usize> {
        self.owner.as_ref().map(|owner| owner.context)
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.raw == LEGACY { f.write_str("the legacy default stream") } else { write!(f, "stream {:#x}", self.raw) }
    }
}
