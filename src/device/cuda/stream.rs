//! The consumer's streams.

#![allow(unsafe_code)]

use super::driver::{Gpu, Handle, LEGACY, PER_THREAD};
use crate::error::{Error, ErrorKind, Result, Stage};
use std::any::Any;
use std::sync::Arc;

/// A stream of the consumer: batches that are bound to it are there before the work that it is given afterwards, and their
/// memory is used again only behind the work that it was given before the batch was dropped.
#[derive(Clone)]
pub struct Stream {
    raw: Handle,
    owner: Option<Owner>,
}

/// What keeps a stream alive.
#[derive(Clone)]
#[cfg_attr(not(feature = "cudarc"), allow(dead_code, reason = "no type of a user's stream is known"))]
struct Owner {
    /// The stream's context.
    context: Handle,
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
    /// none of them while a graph is captured from it, see [CUDA graphs](super#cuda-graphs).
    pub unsafe fn from_raw(stream: usize) -> Self {
        Self::promised(stream)
    }

    /// As [`from_raw`](Self::from_raw), whose promise was made to somebody else.
    pub(crate) fn promised(stream: usize) -> Self {
        Self { raw: if stream == 0 { LEGACY } else { stream }, owner: None }
    }

    /// A stream of `context`, alive for as long as `stream`.
    #[cfg(feature = "cudarc")]
    pub(super) fn owned(raw: Handle, context: Handle, stream: Arc<dyn Any + Send + Sync>) -> Self {
        Self { raw: if raw == 0 { LEGACY } else { raw }, owner: Some(Owner { context, stream }) }
    }

    /// Whether it lives for as long as this value does, whatever was promised.
    pub(crate) fn keeps_itself(&self) -> bool {
        self.owner.is_some() || self.raw == LEGACY
    }

    /// The handle.
    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }

    /// Refuses a stream that could order nothing on `gpu`. The driver is asked only where nobody else knows.
    pub(crate) fn check(&self, gpu: &Gpu) -> Result<()> {
        let refused = |message: String| Err(Error::new(ErrorKind::Config, Stage::Device, message));
        if self.raw == PER_THREAD {
            // Batches are dropped on any thread, where this would be another stream than the one that used them.
            return refused("the per-thread default stream is another one on each thread; make a stream".into());
        }
        let context = match &self.owner {
            Some(owner) => owner.context,
            None if self.raw == LEGACY => return Ok(()),
            None => gpu.context_of(self.raw)?,
        };
        if context != gpu.context() {
            let ordinal = gpu.ordinal();
            return refused(format!("the stream belongs to another context than cuda:{ordinal} of this loader"));
        }
        Ok(())
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.raw == LEGACY { f.write_str("the legacy default stream") } else { write!(f, "stream {:#x}", self.raw) }
    }
}
