//! The times of the last batches, and the queue lengths: the data for traces and plots.

use super::tracks::Track;
use feedline_base::sync::Hold;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Mutex;

/// The times of one batch: nanoseconds since the loader was built, 0 for a step that did not
/// happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchRecord {
    /// The batch's number since the loader was built.
    pub sequence: u64,
    /// Epoch.
    pub epoch: u64,
    /// Batch index in the epoch.
    pub batch: u64,
    /// Rows.
    pub rows: u32,
    /// When the batch got its slot, and its reads could begin.
    pub planned_ns: u64,
    /// When its last read ended; 0 if it needed none.
    pub read_ns: u64,
    /// When its last row was done.
    pub full_ns: u64,
    /// When its copy was given to the device; 0 on the host.
    pub copied_ns: u64,
    /// Whether it was the first of its iterator: the wait for it is not starvation.
    pub first: bool,
    /// When the consumer asked for it.
    pub asked_ns: u64,
    /// When the consumer got it.
    pub got_ns: u64,
    /// When the consumer's own part of the step was done; 0 without
    /// `Loader::arrive`.
    #[serde(default)]
    pub arrived_ns: u64,
    /// When the consumer dropped it; 0 while it is held.
    pub dropped_ns: u64,
}

/// The lengths of all queues at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gauges {
    /// Nanoseconds since the loader was built.
    pub at_ns: u64,
    /// Reads in flight: the mean since the previous moment, rounded.
    pub in_flight: u32,
    /// Number of work items in the workers' queues.
    pub queued: u32,
    /// Busy workers.
    pub working: u32,
    /// Free slots.
    pub free_slots: u32,
    /// Slots being filled.
    pub filling_slots: u32,
    /// Full slots that wait for earlier batches.
    pub full_slots: u32,
    /// Batches held by the consumer.
    pub held: u32,
}

/// The last batches and queue lengths, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Timeline {
    /// Batches handed out.
    pub batches: Vec<BatchRecord>,
    /// Queue lengths, sampled at most once per batch.
    pub gauges: Vec<Gauges>,
    /// Work of each thread of the loader and of each stream of the device. A track can reach back
    /// further than the batches, or less far.
    pub tracks: Vec<Track>,
    /// The number of older batches, forgotten to make room.
    pub forgotten: u64,
}

/// The number of remembered batches, each with the queue lengths when it was handed out: 128 KiB.
const REMEMBERED: usize = 1024;

/// The last batches and queue lengths. The consumer records a batch, and the thread that drops the
/// batch records the drop. Each takes a lock once per batch, never per sample. All memory is
/// reserved at the start.
#[derive(Debug)]
pub struct Recorder(Mutex<VecDeque<(BatchRecord, Gauges)>>);

impl Default for Recorder {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::with_capacity(REMEMBERED)))
    }
}

impl Recorder {
    /// Notes a batch that is handed out and the queue lengths; returns the batch's number.
    pub fn note(&self, mut record: BatchRecord, gauges: Gauges) -> u64 {
        let mut kept = self.0.hold();
        record.sequence = kept.back().map_or(0, |(last, _)| last.sequence + 1);
        if kept.len() == REMEMBERED {
            kept.pop_front();
        }
        kept.push_back((record, gauges));
        record.sequence
    }

    /// Notes that the consumer's own part of the step with the last batch is done. Only the first
    /// call for a batch counts.
    pub fn arrived(&self, now: u64) {
        if let Some((record, _)) = self
            .0
            .hold()
            .back_mut()
            .filter(|(record, _)| record.arrived_ns == 0)
        {
            record.arrived_ns = now;
        }
    }

    /// Notes the drop of the batch with this number, if it is still remembered.
    pub fn dropped(&self, number: u64, now: u64) {
        let mut kept = self.0.hold();
        let place = number
            .checked_sub(first(&kept))
            .and_then(|place| kept.get_mut(place as usize));
        if let Some((record, _)) = place {
            record.dropped_ns = now;
        }
    }

    pub fn read(&self) -> Timeline {
        let kept = self.0.hold();
        let (batches, gauges) = kept.iter().copied().unzip();
        Timeline {
            batches,
            gauges,
            tracks: Vec::new(),
            forgotten: first(&kept),
        }
    }
}

/// The number of the oldest batch.
fn first(kept: &VecDeque<(BatchRecord, Gauges)>) -> u64 {
    kept.front().map_or(0, |(record, _)| record.sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_batches_are_remembered_with_their_drops() {
        let recorder = Recorder::default();
        assert_eq!(recorder.read(), Timeline::default());
        for number in 0..REMEMBERED as u64 + 10 {
            let record = BatchRecord {
                batch: number * 2,
                rows: 7,
                got_ns: number,
                ..BatchRecord::default()
            };
            let gauges = Gauges {
                at_ns: number,
                held: 3,
                ..Gauges::default()
            };
            assert_eq!(recorder.note(record, gauges), number);
        }
        recorder.dropped(5, 99); // forgotten
        recorder.dropped(1000, 77);
        recorder.arrived(55);
        recorder.arrived(66); // the first call counts
        let timeline = recorder.read();
        assert_eq!(
            (
                timeline.forgotten,
                timeline.batches.len(),
                timeline.gauges.len()
            ),
            (10, REMEMBERED, REMEMBERED)
        );
        for (at, record) in timeline.batches.iter().enumerate() {
            let number = at as u64 + 10;
            let dropped_ns = if number == 1000 { 77 } else { 0 };
            let expected = BatchRecord {
                sequence: number,
                batch: number * 2,
                rows: 7,
                got_ns: number,
                dropped_ns,
                arrived_ns: if number == 1033 { 55 } else { 0 },
                ..BatchRecord::default()
            };
            assert_eq!(*record, expected);
        }
    }
}
