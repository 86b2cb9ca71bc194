//! The consumer's streams.

#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

/// The legacy default stream.
pub(crate) const LEGACY: usize = 1;
/// The per-thread default stream: a different stream on each thread.
pub(crate) const PER_THREAD: usize = 2;

/// How a stream uses the batches that it is bound to. A later binding of the same stream adds to an
/// earlier one.
///
/// | | waits for the copy | delays reuse of the memory | its idle time is measured |
/// |---|---|---|---|
/// | `Takes` | yes | yes | only on a batch's first such stream |
/// | `Beside` | yes | yes | no |
/// | `Releases` | no | yes | no |
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StreamUse {
    /// Works on the batch after the stream that took it, and already waits for that stream itself,
    /// as prefetchers do. A wait for the copy would delay the work on the previous batch.
    Releases,
    /// Works on the batch concurrently with the stream that takes it, such as a side stream for
    /// metrics.
    Beside,
    /// Runs the step: it takes the batch from the loader.
    Takes,
}

/// A stream bound to batches, with its use.
#[derive(Clone, Debug)]
pub struct Bound {
    pub stream: Stream,
    pub how: StreamUse,
}

/// A stream of the consumer, for binding batches.
///
/// Work enqueued after the binding sees the batch's data. The memory of a dropped batch is reused
/// only after the work enqueued before the drop has ended.
#[derive(Clone)]
pub struct Stream {
    raw: usize,
    owner: Option<StreamOwner>,
}

/// The owner that keeps a stream alive.
#[derive(Clone)]
struct StreamOwner {
    /// The stream's context, if the owner states it.
    context: Option<usize>,
    #[allow(dead_code, reason = "held for its Drop")]
    stream: Arc<dyn Any + Send + Sync>,
}

impl Stream {
    /// The legacy default stream, for programs that never create one.
    ///
    /// A batch is bound to it when its memory is requested without any other binding.
    pub fn legacy() -> Self {
        Self {
            raw: LEGACY,
            owner: None,
        }
    }

    /// A stream of CUDA's driver or runtime API (`CUstream`, `cudaStream_t`; in PyTorch
    /// `torch.cuda.current_stream().cuda_stream`).
    ///
    /// 0 is the legacy default stream. 2, the per-thread default stream, is refused when a batch is
    /// bound, because it is a different stream on each thread.
    ///
    /// # Safety
    /// The stream must live, on the loader's device, until every batch bound to it has been
    /// dropped. Do not drop a batch while a graph is captured from the stream, see
    /// [CUDA graphs](crate::cuda#cuda-graphs).
    pub unsafe fn from_raw(stream: usize) -> Self {
        Self::promised(stream)
    }

    /// Like [`from_raw`](Self::from_raw), for a stream that lives as long as `owner`. The loader
    /// and its batches hold a reference to `owner`.
    ///
    /// # Safety
    /// The stream must live, on the loader's device, until the last reference to `owner` is
    /// dropped.
    pub unsafe fn kept_by(stream: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            owner: Some(StreamOwner {
                context: None,
                stream: owner,
            }),
            ..Self::promised(stream)
        }
    }

    /// Like [`from_raw`](Self::from_raw), but safe: the caller of another, unsafe function has
    /// already promised that the stream lives long enough.
    #[doc(hidden)]
    pub fn promised(stream: usize) -> Self {
        Self {
            raw: if stream == 0 { LEGACY } else { stream },
            owner: None,
        }
    }

    /// A stream of `context`, which lives as long as `stream`.
    #[cfg(feature = "cudarc")]
    pub(crate) fn owned(raw: usize, context: usize, stream: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            raw: if raw == 0 { LEGACY } else { raw },
            owner: Some(StreamOwner {
                context: Some(context),
                stream,
            }),
        }
    }

    /// Whether this value itself keeps the stream alive.
    pub(crate) fn keeps_itself(&self) -> bool {
        self.owner.is_some() || self.raw == LEGACY
    }

    /// The handle.
    #[doc(hidden)]
    pub fn raw(&self) -> usize {
        self.raw
    }

    /// The stream's context, as its owner states it.
    pub(crate) fn context(&self) -> Option<usize> {
        self.owner.as_ref()?.context
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.raw == LEGACY {
            f.write_str("the legacy default stream")
        } else {
            write!(f, "stream {:#x}", self.raw)
        }
    }
}
