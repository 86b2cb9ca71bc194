//! The ways of batches, made fit to draw: phases in order, lanes without overlap, the consumer's time without gaps.
//!
//! ```text
//! a batch      planned ── read ── full ── copied ── got ── dropped
//!                 └ Read ──┴ Decode ┴ CopyQueue ┴ Copy ┴ Held ┘        on the host: … full ── Ready ── got …
//! lanes        a batch keeps one from its first to its last moment; as many as overlap
//! consumer     │ wait │ own work │ wait │ own work │ …
//! ```
//!
//! Records may contradict themselves; then a phase ends no earlier than it begins, and all ends before [`FAR`].

use crate::meter::{self, BatchRecord, Timeline, Work};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No moment is later: 146 years, so that readers that count in signed nanoseconds can add two of them.
pub(super) const FAR: u64 = 1 << 62;

/// What a batch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its reads are on their way; samples that are there already are decoded meanwhile.
    Read,
    /// All its bytes are there; rows are missing.
    Decode,
    /// It is full and waits until its copy is given to the device.
    CopyQueue,
    /// It is copied, or copied and waits for its turn.
    Copy,
    /// It is full and waits for its turn.
    Ready,
    /// The consumer has it.
    Held,
}

impl Phase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Decode => "decode",
            Self::CopyQueue => "waits for copy",
            Self::Copy => "copy, then ready",
            Self::Ready => "ready",
            Self::Held => "held",
        }
    }
}

/// A stretch of time in which `what` was the case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span<T> {
    pub(super) what: T,
    pub(super) start: u64,
    pub(super) end: u64,
}

impl<T> Span<T> {
    pub(super) fn ns(&self) -> u64 {
        self.end - self.start
    }
}

/// The way of one batch.
#[derive(Clone, Debug)]
pub(super) struct Way<'a> {
    pub(super) record: &'a BatchRecord,
    pub(super) start: u64,
    pub(super) end: u64,
    /// Adjacent, none of them empty.
    pub(super) phases: Vec<Span<Phase>>,
    pub(super) lane: usize,
}

/// The way of a batch; `None` when nobody knows when it began. Those that are still held are so until `now`.
pub(super) fn way(record: &BatchRecord, now: u64) -> Option<Way<'_>> {
    if record.planned_ns == 0 {
        return None;
    }
    let turn = if record.copied_ns > 0 { Phase::Copy } else { Phase::Ready };
    let held = match (record.got_ns, record.dropped_ns) {
        (0, _) => 0,
        (_, 0) => now,
        (_, dropped) => dropped,
    };
    let ends = [
        (Phase::Read, record.read_ns),
        (Phase::Decode, record.full_ns),
        (Phase::CopyQueue, record.copied_ns),
        (turn, record.got_ns),
        (Phase::Held, held),
    ];
    let start = record.planned_ns.min(FAR);
    let (mut at, mut phases) = (start, Vec::with_capacity(ends.len()));
    for (what, end) in ends {
        let end = end.clamp(at, FAR);
        if end > at {
            phases.push(Span { what, start: at, end });
        }
        at = end;
    }
    Some(Way { record, start, end: at, phases, lane: 0 })
}

/// The ways of batches in the order of their beginnings, on lanes numbered from 0, and the number of lanes.
pub(super) fn ways(batches: &[BatchRecord], now: u64) -> (Vec<Way<'_>>, usize) {
    let mut ways: Vec<Way<'_>> = batches.iter().filter_map(|record| way(record, now)).collect();
    ways.sort_by_key(|way| (way.start, way.end, way.record.sequence));
    // The lane that is free for the longest time; of those the first.
    let mut lanes: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    for way in &mut ways {
        way.lane = match lanes.peek() {
            Some(Reverse((free, lane))) if *free <= way.start => {
                let lane = *lane;
                lanes.pop();
                lane
            }
            _ => lanes.len(),
        };
        lanes.push(Reverse((way.end, way.lane)));
    }
    (ways, lanes.len())
}

/// What the consumer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// It waits in `next()`: starvation.
    Starved,
    /// It waits for the first batch of an iterator.
    First,
    /// Its own work, with a batch or without.
    Own,
    /// No iterator is there, as far as the records tell.
    Between,
}

/// One wait, or the time before it.
pub(super) type Stretch<'a> = (Span<Doing>, &'a BatchRecord);

/// What the consumer did, in order of time, none of it empty: each wait with the batch that it was for, each time before
/// one with that same batch.
pub(super) fn consumer(timeline: &Timeline) -> Vec<Stretch<'_>> {
    let mut records: Vec<&BatchRecord> = timeline.batches.iter().filter(|record| record.got_ns > 0).collect();
    records.sort_by_key(|record| (record.got_ns, record.sequence));
    let mut stretches = Vec::with_capacity(2 * records.len());
    let mut before: Option<&BatchRecord> = None;
    for record in records {
        let got = record.got_ns.min(FAR);
        let asked = if record.asked_ns == 0 { got } else { record.asked_ns.min(got) };
        let since = before.map_or(asked, |before| before.got_ns.min(FAR));
        let asked = asked.max(since);
        let (pause, wait) = if record.first { (Doing::Between, Doing::First) } else { (Doing::Own, Doing::Starved) };
        stretches.push((Span { what: pause, start: since, end: asked }, record));
        stretches.push((Span { what: wait, start: asked, end: got }, record));
        before = Some(record);
    }
    stretches.retain(|(span, _)| span.ns() > 0);
    stretches
}

/// A track's name, and what was done on it.
pub(super) type Done<'a> = (&'a str, Vec<Span<Work>>);

/// What each track did, in order of time, none of it empty; of two spans one is inside of the other, or they are disjoint.
pub(super) fn tracks(timeline: &Timeline) -> Vec<Done<'_>> {
    timeline.tracks.iter().map(|track| (track.name.as_str(), nested(&track.spans))).collect()
}

/// A span that reaches beyond the one it begins in is cut off.
fn nested(spans: &[meter::Span]) -> Vec<Span<Work>> {
    let kept = |span: &meter::Span| Span { what: span.what, start: span.begin_ns.min(FAR), end: span.end_ns.min(FAR) };
    let mut all: Vec<Span<Work>> = spans.iter().map(kept).filter(|span| span.end > span.start).collect();
    all.sort_by_key(|span| (span.start, Reverse(span.end)));
    let mut around: Vec<u64> = Vec::new();
    for span in &mut all {
        while around.last().is_some_and(|end| *end <= span.start) {
            around.pop();
        }
        span.end = around.last().map_or(span.end, |end| span.end.min(*end));
        around.push(span.end);
    }
    all
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::meter::{Gauges, Span as Noted, Track};
    use proptest::prelude::*;

    /// Moments as they never should be, among some that are plausible.
    fn moment() -> impl Strategy<Value = u64> {
        prop_oneof![3 => 0_u64..50, 2 => 0_u64..1 << 40, 1 => Just(0), 1 => any::<u64>(), 1 => Just(u64::MAX)]
    }

    prop_compose! {
        fn any_record()(at in prop::array::uniform7(moment()), first in any::<bool>(), sequence in any::<u64>(), epoch in 0_u64..3, batch in moment(), rows in any::<u32>()) -> BatchRecord {
            let [planned_ns, read_ns, full_ns, copied_ns, asked_ns, got_ns, dropped_ns] = at;
            BatchRecord { sequence, epoch, batch, rows, planned_ns, read_ns, full_ns, copied_ns, first, asked_ns, got_ns, dropped_ns }
        }
    }

    prop_compose! {
        fn gauges()(at_ns in moment(), n in prop::array::uniform7(prop_oneof![0_u32..9, any::<u32>()])) -> Gauges {
            let [in_flight, queued, working, free_slots, filling_slots, full_slots, held] = n;
            Gauges { at_ns, in_flight, queued, working, free_slots, filling_slots, full_slots, held }
        }
    }

    prop_compose! {
        fn any_span()(begin_ns in moment(), end_ns in moment(), step in any::<bool>()) -> Noted {
            Noted::new(begin_ns, end_ns, if step { Work::Step } else { Work::Decode })
        }
    }

    prop_compose! {
        fn track()(name in ".*", spans in prop::collection::vec(any_span(), 0..20)) -> Track {
            let mut track = Track::default();
            (track.name, track.spans) = (name, spans);
            track
        }
    }

    prop_compose! {
        pub(in crate::report) fn hostile()(tracks in prop::collection::vec(track(), 0..4), batches in prop::collection::vec(any_record(), 0..40), gauges in prop::collection::vec(gauges(), 0..40), forgotten in moment()) -> Timeline {
            Timeline { batches, gauges, tracks, forgotten }
        }
    }

    proptest! {
        #[test]
        fn phases_follow_each_other_and_no_two_batches_overlap_on_a_lane(timeline in hostile(), now in moment()) {
            let (ways, lanes) = ways(&timeline.batches, now);
            let known = timeline.batches.iter().filter(|record| record.planned_ns > 0).count();
            prop_assert_eq!(ways.len(), known);
            let mut free = vec![0; lanes];
            for way in &ways {
                prop_assert!(free[way.lane] <= way.start);
                free[way.lane] = way.end;
                let mut at = way.start;
                for phase in &way.phases {
                    prop_assert!(phase.start == at && phase.end > at);
                    at = phase.end;
                }
                prop_assert_eq!(at, way.end);
                prop_assert!(at <= FAR);
            }
        }

        #[test]
        fn there_are_as_many_lanes_as_batches_at_once(timeline in hostile(), now in moment()) {
            let (ways, lanes) = ways(&timeline.batches, now);
            // The naive count: at the beginning of each, those that began before it (or with it, earlier in the list) and last.
            let most = (0..ways.len())
                .map(|at| 1 + ways[..at].iter().filter(|other| other.end > ways[at].start).count());
            prop_assert_eq!(lanes, most.max().unwrap_or(0));
        }

        #[test]
        fn the_consumer_does_one_thing_at_a_time(timeline in hostile()) {
            let mut at = 0;
            for (span, _) in consumer(&timeline) {
                prop_assert!(span.start >= at && span.end > span.start && span.end <= FAR);
                at = span.end;
            }
        }
    }

    fn record(planned_ns: u64, asked_ns: u64, got_ns: u64) -> BatchRecord {
        BatchRecord { planned_ns, asked_ns, got_ns, ..BatchRecord::default() }
    }

    #[test]
    fn waits_and_own_work_take_turns_and_an_iterator_s_first_wait_is_told_apart() {
        let batches = vec![
            BatchRecord { first: true, ..record(1, 10, 30) },
            record(2, 40, 45),
            record(41, 60, 70),
            BatchRecord { first: true, ..record(90, 95, 99) },
        ];
        let timeline = Timeline { batches, ..Timeline::default() };
        let got: Vec<_> = consumer(&timeline)
            .iter()
            .map(|(span, record)| (span.what, span.start, span.end, record.planned_ns))
            .collect();
        use Doing::*;
        let expected = [
            (First, 10, 30, 1),
            (Own, 30, 40, 2),
            (Starved, 40, 45, 2),
            (Own, 45, 60, 41),
            (Starved, 60, 70, 41),
            (Between, 70, 95, 90),
            (First, 95, 99, 90),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn work_inside_of_other_work_stays_there_and_what_reaches_out_is_cut_off() {
        let spans =
            [(5, 8), (1, 10), (12, 12), (20, 30), (25, 40)].map(|(begin, end)| Noted::new(begin, end, Work::Decode));
        let got: Vec<_> = nested(&spans).iter().map(|span| (span.start, span.end)).collect();
        assert_eq!(got, [(1, 10), (5, 8), (20, 30), (25, 30)]);
    }

    #[test]
    fn what_did_not_happen_has_no_phase() {
        let all = BatchRecord {
            planned_ns: 1,
            read_ns: 2,
            full_ns: 4,
            copied_ns: 7,
            got_ns: 11,
            dropped_ns: 16,
            ..BatchRecord::default()
        };
        use Phase::*;
        let table = [
            (all, vec![(Read, 1), (Decode, 2), (CopyQueue, 3), (Copy, 4), (Held, 5)]),
            (BatchRecord { copied_ns: 0, ..all }, vec![(Read, 1), (Decode, 2), (Ready, 7), (Held, 5)]),
            (BatchRecord { read_ns: 0, ..all }, vec![(Decode, 3), (CopyQueue, 3), (Copy, 4), (Held, 5)]),
            // Still held, at 100.
            (BatchRecord { dropped_ns: 0, ..all }, vec![(Read, 1), (Decode, 2), (CopyQueue, 3), (Copy, 4), (Held, 89)]),
            (BatchRecord { got_ns: 0, dropped_ns: 0, ..all }, vec![(Read, 1), (Decode, 2), (CopyQueue, 3)]),
            // The last read was seen after the last row: decoding takes no time then.
            (BatchRecord { read_ns: 5, ..all }, vec![(Read, 4), (CopyQueue, 2), (Copy, 4), (Held, 5)]),
        ];
        for (record, expected) in table {
            let way = way(&record, 100).unwrap();
            let got: Vec<_> = way.phases.iter().map(|span| (span.what, span.ns())).collect();
            assert_eq!(got, expected, "{record:?}");
        }
        assert!(way(&BatchRecord { planned_ns: 0, ..all }, 100).is_none());
    }
}
