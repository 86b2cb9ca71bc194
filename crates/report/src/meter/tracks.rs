//! The last spans of work of each thread of a loader: the tracks of a trace.
//!
//! ```text
//! thread ──► ring of its last spans (begin, end, work) ──► Track, for a timeline
//! ```
//!
//! One writer per ring, no lock, no allocation; three stores per span. A span of the same kind of
//! work as the last span, at most [`GAP`] after it, extends the last span, up to [`LONG`]. So many
//! tiny spans do not displace all others, but short gaps are not shown.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The last work of one thread, or of one stream of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Track {
    /// Name of the thread or stream.
    pub name: String,
    /// Spans in the order of their ends; the oldest may be forgotten. A span may be inside the next
    /// one.
    pub spans: Vec<Span>,
}

/// A period of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Span {
    /// Begin, in nanoseconds since the loader was built.
    pub begin_ns: u64,
    /// End, in nanoseconds since the loader was built.
    pub end_ns: u64,
    /// Kind of work.
    pub what: Work,
}

impl Track {
    #[doc(hidden)]
    pub fn new(name: &str, spans: Vec<Span>) -> Self {
        Self {
            name: name.into(),
            spans,
        }
    }
}

impl Span {
    /// A span of `what`.
    pub fn new(begin_ns: u64, end_ns: u64, what: Work) -> Self {
        Self {
            begin_ns,
            end_ns,
            what,
        }
    }
}

macro_rules! works {
    ($($(#[doc = $doc:literal])* $name:ident = $words:literal,)*) => {
        /// A kind of work of a thread or a stream.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum Work {
            $($(#[doc = $doc])* $name,)*
        }

        impl Work {
            const ALL: &[Self] = &[$(Self::$name),*];
        }

        impl fmt::Display for Work {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$name => $words,)* })
            }
        }
    };
}

works! {
    /// Planning batches, submitting reads and taking their completions.
    Plan = "plan",
    /// Copying or decoding samples from memory or the page cache, at once.
    LookUp = "from cache or memory",
    /// Decoding a sample from bytes that were read.
    Decode = "decode",
    /// Opening a chunk: inflating it, decoding its pages.
    Open = "open chunk",
    /// Copying rows out of open chunks.
    Gather = "gather rows",
    /// `.map_batch`.
    MapBatch = "map batch",
    /// Copying a batch across the bus.
    Copy = "copy",
    /// On a device's stream: from a batch's arrival to the end of the step's work, or to the next
    /// request if that end is not known.
    Step = "step",
    /// On a device's stream: idle, without a batch.
    Starved = "starved",
    /// On a device's stream: idle from the end of a step's work to the next call of `next()`.
    HostLate = "host late",
}

impl Work {
    fn of(number: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }
}

/// The number of spans in a ring: 24 KiB.
const SPANS: usize = 1024;
/// Longest gap between two spans that are merged, in nanoseconds.
const GAP: u64 = 10_000;
/// Longest span that merging gives, in nanoseconds.
const LONG: u64 = 1_000_000;

/// The last spans of one thread. Only that thread writes to the ring.
#[derive(Debug)]
pub struct Ring {
    /// Begin, end, work.
    spans: Box<[[AtomicU64; 3]]>,
    written: AtomicU64,
}

impl Default for Ring {
    fn default() -> Self {
        Self {
            spans: (0..SPANS).map(|_| Default::default()).collect(),
            written: AtomicU64::new(0),
        }
    }
}

impl Ring {
    /// Records work. Only the ring's thread may call this. Times of 0 mean that the loader measures
    /// nothing.
    pub fn note(&self, begin: u64, end: u64, what: Work) {
        if end == 0 {
            return;
        }
        let written = self.written.load(Ordering::Relaxed);
        if let Some(last) = written.checked_sub(1) {
            let [first, last_end, last_what] = &self.spans[last as usize % SPANS];
            let follows = begin
                .checked_sub(last_end.load(Ordering::Relaxed))
                .is_some_and(|gap| gap <= GAP);
            let short = end.saturating_sub(first.load(Ordering::Relaxed)) <= LONG;
            if follows && short && last_what.load(Ordering::Relaxed) == what as u64 {
                return last_end.store(end, Ordering::Relaxed);
            }
        }
        // A reader of any part of this span then knows that all earlier spans were written.
        fence(Ordering::Release);
        for (place, value) in
            self.spans[written as usize % SPANS]
                .iter()
                .zip([begin, end, what as u64])
        {
            place.store(value, Ordering::Relaxed);
        }
        // Release: a reader of the number sees the span.
        self.written.store(written + 1, Ordering::Release);
    }

    /// The end of the last span.
    pub fn end(&self) -> u64 {
        let last = self.written.load(Ordering::Relaxed).checked_sub(1);
        last.map_or(0, |last| {
            self.spans[last as usize % SPANS][1].load(Ordering::Relaxed)
        })
    }

    /// All remembered spans, without those overwritten during the call.
    pub fn read(&self) -> Vec<Span> {
        let until = self.written.load(Ordering::Acquire);
        let from = until.saturating_sub(SPANS as u64);
        let numbers: Vec<[u64; 3]> = (from..until)
            .map(|number| {
                self.spans[number as usize % SPANS]
                    .each_ref()
                    .map(|value| value.load(Ordering::Relaxed))
            })
            .collect();
        // The span being written now counts as overwritten, too.
        fence(Ordering::Acquire);
        let kept = (self.written.load(Ordering::Relaxed) + 1)
            .saturating_sub(SPANS as u64)
            .max(from);
        let spans = numbers.into_iter().skip((kept - from) as usize);
        spans
            .filter_map(|[begin, end, what]| {
                Some(Span::new(begin, end.max(begin), Work::of(what)?))
            })
            .collect()
    }
}

/// The rings of a loader's threads.
#[derive(Debug, Default)]
pub struct Rings {
    pub planner: Ring,
    /// Rings of the workers, by index in the pool.
    workers: Box<[Ring]>,
    /// Copies to the device, in their order on the copy stream.
    pub copies: Option<Ring>,
}

impl Rings {
    pub(crate) fn new(workers: usize, copies: bool) -> Self {
        let workers = (0..workers).map(|_| Ring::default()).collect();
        Self {
            workers,
            copies: copies.then(Ring::default),
            ..Self::default()
        }
    }

    /// Notes work of a worker.
    pub fn worked(&self, worker: usize, begin: u64, end: u64, what: Work) {
        if let Some(ring) = self.workers.get(worker) {
            ring.note(begin, end, what);
        }
    }

    /// All tracks, in the order of the data flow.
    pub fn read(&self) -> Vec<Track> {
        let track = |name: String, ring: &Ring| Track {
            name,
            spans: ring.read(),
        };
        let mut tracks = vec![track("planner and reads".into(), &self.planner)];
        tracks.extend(
            self.workers
                .iter()
                .enumerate()
                .map(|(at, ring)| track(format!("decode worker {at}"), ring)),
        );
        tracks.extend(
            self.copies
                .iter()
                .map(|ring| track("copy stream".into(), ring)),
        );
        tracks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn spans_without_a_gap_become_one_up_to_a_length() {
        let ring = Ring::default();
        ring.note(0, 0, Work::Decode); // measures nothing
        for (begin, end) in [(100, 200), (200, 300), (300 + GAP, 400 + GAP)] {
            ring.note(begin, end, Work::Decode);
        }
        ring.note(400 + GAP, 500 + GAP, Work::LookUp);
        ring.note(600 + 3 * GAP, 600 + 3 * GAP + LONG, Work::LookUp);
        ring.note(600 + 3 * GAP + LONG, 700 + 3 * GAP + LONG, Work::LookUp);
        let got: Vec<_> = ring
            .read()
            .into_iter()
            .map(|span| (span.begin_ns, span.end_ns, span.what))
            .collect();
        let expected = [
            (100, 400 + GAP, Work::Decode),
            (400 + GAP, 500 + GAP, Work::LookUp),
            (600 + 3 * GAP, 600 + 3 * GAP + LONG, Work::LookUp),
            (600 + 3 * GAP + LONG, 700 + 3 * GAP + LONG, Work::LookUp),
        ];
        assert_eq!(got, expected);
        assert_eq!(ring.end(), 700 + 3 * GAP + LONG);
    }

    #[test]
    fn a_ring_remembers_the_last_spans() {
        let ring = Ring::default();
        for at in 0..3 * SPANS as u64 {
            ring.note(at * LONG, at * LONG + 5, Work::Copy);
        }
        let spans = ring.read();
        assert_eq!(spans.len(), SPANS - 1);
        assert_eq!(
            spans.last().unwrap().begin_ns,
            (3 * SPANS as u64 - 1) * LONG
        );
    }

    proptest! {
        /// Every moment of work is in one span of its kind, and no span is longer than `LONG`.
        #[test]
        fn all_work_lies_in_spans(pieces in prop::collection::vec((0..30_000_u64, 1..40_000_u64, 0..3_usize), 1..200)) {
            let ring = Ring::default();
            let mut at = 1;
            let mut all = Vec::new();
            for (pause, length, what) in pieces {
                let span = Span::new(at + pause, at + pause + length, Work::ALL[what]);
                ring.note(span.begin_ns, span.end_ns, span.what);
                all.push(span);
                at = span.end_ns;
            }
            let spans = ring.read();
            for piece in &all {
                let around = spans.iter().filter(|s| s.what == piece.what && s.begin_ns <= piece.begin_ns && piece.end_ns <= s.end_ns);
                prop_assert_eq!(around.count(), 1);
            }
            for pair in spans.windows(2) {
                prop_assert!(pair[0].end_ns <= pair[1].begin_ns);
            }
            prop_assert!(spans.iter().all(|s| s.end_ns - s.begin_ns <= LONG));
        }
    }
}
