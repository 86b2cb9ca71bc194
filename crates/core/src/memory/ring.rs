//! The ring buffer for encoded bytes. Spans are reserved only by the planner, freed in any order,
//! and reused in FIFO order.
//!
//! A sample reserves all its bytes at once, after everything else that it needs. So every holder of
//! a span can finish without more room, and room always becomes free again.

#![allow(unsafe_code)]

use super::region::Region;
use feedline_base::error::Result;
use feedline_base::sync::{Hold, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;

/// Alignment of spans: the largest that O_DIRECT requires in practice.
pub const SPAN_ALIGN: usize = 4096;

/// A ring of bytes in one region.
pub struct ByteRing {
    shared: Arc<RingShare>,
}

struct RingShare {
    region: Arc<Region>,
    spans_max: usize,
    // A lock costs tens of nanoseconds, twice per sample; a read from storage takes microseconds at
    // best.
    state: Mutex<RingState>,
    on_room: Box<dyn Fn() + Send + Sync>,
}

struct RingState {
    /// Live and freed spans, oldest first: (start, len, freed).
    spans: VecDeque<(usize, usize, bool)>,
    /// Sequence number of `spans[0]`.
    first: u64,
}

/// Bytes of the ring, returned on drop.
pub struct RingSpan {
    shared: Arc<RingShare>,
    sequence: u64,
    start: usize,
    len: usize,
}

impl ByteRing {
    /// Reserves a ring of `bytes` for at most `spans_max` spans. It calls `on_room` after room
    /// became free.
    pub fn new(
        bytes: usize,
        spans_max: usize,
        on_room: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        let region = Arc::new(Region::new(bytes, "the ring of encoded bytes")?);
        let spans_max = spans_max.max(1);
        let state = Mutex::new(RingState {
            spans: VecDeque::with_capacity(spans_max),
            first: 0,
        });
        Ok(Self {
            shared: Arc::new(RingShare {
                region,
                spans_max,
                state,
                on_room: Box::new(on_room),
            }),
        })
    }

    /// Size of the ring in bytes.
    pub fn capacity(&self) -> usize {
        self.shared.region.len()
    }

    /// Whether the empty ring can hold `spans` spans of `bytes` bytes in total, each rounded up to
    /// pages.
    pub fn can_hold(&self, spans: usize, bytes: usize) -> bool {
        spans <= self.shared.spans_max && bytes <= self.capacity()
    }

    /// The region, for registration.
    pub fn region(&self) -> &Arc<Region> {
        &self.shared.region
    }

    /// Takes `len` contiguous bytes, page-aligned; `None` while the ring has no room. Their content
    /// is unspecified.
    pub fn reserve(&self, len: usize) -> Option<RingSpan> {
        let mut state = self.shared.state.hold();
        if state.spans.len() == state.spans.capacity() {
            return None;
        }
        let room = len.max(1).checked_next_multiple_of(SPAN_ALIGN)?;
        let start = state.place(room, self.capacity())?;
        let sequence = state.first + state.spans.len() as u64;
        state.spans.push_back((start, room, false));
        Some(RingSpan {
            shared: self.shared.clone(),
            sequence,
            start,
            len,
        })
    }
}

impl RingState {
    /// Offset after the newest span at which `room` bytes fit without reaching the oldest span.
    fn place(&self, room: usize, capacity: usize) -> Option<usize> {
        let (Some((tail, _, _)), Some((last, last_len, _))) =
            (self.spans.front(), self.spans.back())
        else {
            return (room <= capacity).then_some(0);
        };
        let tail = *tail;
        let head = last + last_len;
        if *last >= tail {
            // The ranges [head, capacity) and, after wrapping, [0, tail) are free.
            if room <= capacity - head {
                return Some(head);
            }
            return (room <= tail).then_some(0);
        }
        (room <= tail - head).then_some(head)
    }
}

#[allow(clippy::len_without_is_empty, reason = "an empty span has no use")]
impl RingSpan {
    /// The reserved bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `start + len` is within the region, which `shared` keeps alive. Live spans never
        // overlap (`place`), and this span is unique and borrowed mutably. The region was zeroed
        // once, so every byte is initialised.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.shared.region.ptr().as_ptr().add(self.start),
                self.len,
            )
        }
    }

    /// The reserved bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: as in `as_mut_slice`, with a shared borrow of a unique span.
        unsafe {
            std::slice::from_raw_parts(self.shared.region.ptr().as_ptr().add(self.start), self.len)
        }
    }

    /// Number of reserved bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Region and offset.
    pub(crate) fn place(&self) -> (u64, usize) {
        (self.shared.region.id(), self.start)
    }
}

impl AsRef<[u8]> for RingSpan {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl Drop for RingSpan {
    fn drop(&mut self) {
        let mut state = self.shared.state.hold();
        let index = (self.sequence - state.first) as usize;
        state.spans[index].2 = true;
        let before = state.spans.len();
        while state.spans.front().is_some_and(|(_, _, freed)| *freed) {
            state.spans.pop_front();
            state.first += 1;
        }
        let came_back = state.spans.len() < before;
        // The newest span is also returned immediately if it is dropped first (a chunk with too
        // little room). That needs no `on_room`: the planner itself dropped it.
        while state.spans.back().is_some_and(|(_, _, freed)| *freed) {
            state.spans.pop_back();
        }
        drop(state);
        if came_back {
            (self.shared.on_room)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Fewer under Miri, which checks every access and is slow.
    const STEPS: usize = if cfg!(miri) { 40 } else { 200 };
    const EACH: usize = if cfg!(miri) { 1021 } else { 1 };

    proptest! {
        /// Random reservations and frees: live spans never overlap, and an empty ring takes up to
        /// its capacity.
        #[test]
        fn live_spans_never_overlap_and_room_always_comes_back(
            steps in prop::collection::vec((any::<bool>(), 0_usize..9 * 4096, any::<prop::sample::Index>()), 1..STEPS)
        ) {
            let ring = ByteRing::new(16 * 4096, 8, || {}).unwrap();
            let mut live: Vec<(RingSpan, u8)> = Vec::new();
            for (step, (free, len, which)) in steps.into_iter().enumerate() {
                if free && !live.is_empty() {
                    let (span, mark) = live.swap_remove(which.index(live.len()));
                    prop_assert!(span.as_slice().iter().step_by(EACH).all(|byte| *byte == mark), "a span was overwritten");
                } else if let Some(mut span) = ring.reserve(len) {
                    prop_assert_eq!(span.as_slice().len(), len);
                    prop_assert_eq!(span.as_slice().as_ptr() as usize % SPAN_ALIGN, 0);
                    let mark = step as u8;
                    span.as_mut_slice().fill(mark);
                    live.push((span, mark));
                } else {
                    prop_assert!(!live.is_empty(), "an empty ring refused {} bytes", len);
                }
            }
            live.clear();
            prop_assert!(ring.reserve(16 * 4096).is_some());
        }
    }

    #[test]
    fn a_span_over_the_capacity_is_always_refused() {
        let ring = ByteRing::new(4096, 4, || {}).unwrap();
        assert!(ring.reserve(4097).is_none());
        assert!(ring.reserve(usize::MAX).is_none());
    }

    #[test]
    fn room_is_announced_when_the_oldest_span_is_dropped() {
        let count = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let seen = count.clone();
        let ring = ByteRing::new(8192, 4, move || {
            seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        })
        .unwrap();
        let a = ring.reserve(1).unwrap();
        let b = ring.reserve(1).unwrap();
        drop(b);
        assert_eq!(
            count.load(std::sync::atomic::Ordering::SeqCst),
            0,
            "FIFO: the oldest span is alive"
        );
        drop(a);
        assert_eq!(count.load(std::sync::atomic::Ordering::SeqCst), 1);
    }
}
