//! What happened to each of the last batches, and how full the queues were: what traces and plots are drawn from. Pure data.

use super::tracks::Track;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The way of one batch; nanoseconds since the loader was built, 0 for what did not happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchRecord {
    /// Its number since the loader was built.
    pub sequence: u64,
    /// Epoch.
    pub epoch: u64,
    /// Batch index in the epoch.
    pub batch: u64,
    /// Rows.
    pub rows: u32,
    /// It got its slot, and its reads could begin.
    pub planned_ns: u64,
    /// The last of its reads was there; 0 when nothing was read.
    pub read_ns: u64,
    /// Its last row was done.
    pub full_ns: u64,
    /// Its copy was given to the device; 0 on the host.
    pub copied_ns: u64,
    /// It was the first of its iterator: the wait for it is not starvation.
    pub first: bool,
    /// The consumer asked for it.
    pub asked_ns: u64,
    /// The consumer got it.
    pub got_ns: u64,
    /// The consumer dropped it; 0 while it is held.
    pub dropped_ns: u64,
}

/// How full everything was at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gauges {
    /// Nanoseconds since the loader was built.
    pub at_ns: u64,
    /// Reads in flight: the mean since the moment before, rounded.
    pub in_flight: u32,
    /// Pieces of work that wait for a worker.
    pub queued: u32,
    /// Workers that work.
    pub working: u32,
    /// Slots that are free.
    pub free_slots: u32,
    /// Slots that are being filled.
    pub filling_slots: u32,
    /// Slots that are full and wait for their turn.
    pub full_slots: u32,
    /// Batches in the consumer's hands.
    pub held: u32,
}

/// The last batches and moments, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Timeline {
    /// Batches that were handed out.
    pub batches: Vec<BatchRecord>,
    /// Moments, one for each batch at most.
    pub gauges: Vec<Gauges>,
    /// What each thread of the loader did, and the streams of the device. Shorter or longer ago than the batches, as there
    /// is room.
    pub tracks: Vec<Track>,
    /// Batches that were forgotten to make room.
    pub forgotten: u64,
}

/// Batches and moments that are remembered: 100 KiB.
const REMEMBERED: usize = 1024;
/// Numbers of a [`BatchRecord`] and of [`Gauges`].
const NUMBERS: usize = 12;

/// The last batches and moments, written while everything runs: by the consumer, and for the drop of a batch by whoever
/// drops it. No lock; a record that is being written while it is read may be of two batches, and is left out then.
#[derive(Debug)]
pub(crate) struct Recorder {
    batches: Box<[[AtomicU64; NUMBERS]]>,
    gauges: Box<[[AtomicU64; NUMBERS]]>,
    written: AtomicU64,
}

impl Default for Recorder {
    fn default() -> Self {
        let rows = || (0..REMEMBERED).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect();
        Self { batches: rows(), gauges: rows(), written: AtomicU64::new(0) }
    }
}

impl Recorder {
    /// Notes a batch that was handed out, numbers it, and the moment. One thread at a time.
    pub(crate) fn note(&self, mut record: BatchRecord, gauges: Gauges) -> u64 {
        let number = self.written.load(Ordering::Relaxed);
        record.sequence = number;
        let at = number as usize % REMEMBERED;
        // Who sees a part of what follows sees that all before it was written.
        fence(Ordering::Release);
        for (place, value) in self.batches[at].iter().zip(record.numbers()) {
            place.store(value, Ordering::Relaxed);
        }
        for (place, value) in self.gauges[at].iter().zip(gauges.numbers()) {
            place.store(value, Ordering::Relaxed);
        }
        // Release: who sees the number sees the record.
        self.written.store(number + 1, Ordering::Release);
        number
    }

    /// The batch with that number was dropped.
    pub(crate) fn dropped(&self, number: u64, now: u64) {
        let record = &self.batches[number as usize % REMEMBERED];
        if record[0].load(Ordering::Relaxed) == number {
            record[NUMBERS - 1].store(now, Ordering::Relaxed);
        }
    }

    pub(crate) fn read(&self) -> Timeline {
        let written = self.written.load(Ordering::Acquire);
        let first = written.saturating_sub(REMEMBERED as u64);
        let mut timeline = Timeline { forgotten: first, ..Timeline::default() };
        for number in first..written {
            let at = number as usize % REMEMBERED;
            let numbers = |row: &[AtomicU64; NUMBERS]| row.each_ref().map(|number| number.load(Ordering::Relaxed));
            let (record, gauges) = (numbers(&self.batches[at]), numbers(&self.gauges[at]));
            if record[0] == number {
                timeline.batches.push(BatchRecord::of(record));
                timeline.gauges.push(Gauges::of(gauges));
            }
        }
        // Those that were written over meanwhile may be of two batches; one is being written now, perhaps.
        fence(Ordering::Acquire);
        let kept = (self.written.load(Ordering::Relaxed) + 1).saturating_sub(REMEMBERED as u64);
        let torn = timeline.batches.partition_point(|record| record.sequence < kept);
        timeline.batches.drain(..torn);
        timeline.gauges.drain(..torn);
        timeline.forgotten = timeline.forgotten.max(timeline.batches.first().map_or(0, |record| record.sequence));
        timeline
    }
}

impl BatchRecord {
    fn numbers(&self) -> [u64; NUMBERS] {
        let Self {
            sequence,
            epoch,
            batch,
            rows,
            planned_ns,
            read_ns,
            full_ns,
            copied_ns,
            first,
            asked_ns,
            got_ns,
            dropped_ns,
        } = *self;
        let (rows, first) = (u64::from(rows), u64::from(first));
        [sequence, epoch, batch, rows, planned_ns, read_ns, full_ns, copied_ns, first, asked_ns, got_ns, dropped_ns]
    }

    fn of(numbers: [u64; NUMBERS]) -> Self {
        let [sequence, epoch, batch, rows, planned_ns, read_ns, full_ns, copied_ns, first, rest @ ..] = numbers;
        let ([asked_ns, got_ns, dropped_ns], rows, first) = (rest, rows as u32, first != 0);
        Self {
            sequence,
            epoch,
            batch,
            rows,
            planned_ns,
            read_ns,
            full_ns,
            copied_ns,
            first,
            asked_ns,
            got_ns,
            dropped_ns,
        }
    }
}

impl Gauges {
    fn numbers(&self) -> [u64; NUMBERS] {
        let Self { at_ns, in_flight, queued, working, free_slots, filling_slots, full_slots, held } = *self;
        let [a, b, c, d, e, f, g] =
            [in_flight, queued, working, free_slots, filling_slots, full_slots, held].map(u64::from);
        [at_ns, a, b, c, d, e, f, g, 0, 0, 0, 0]
    }

    fn of(numbers: [u64; NUMBERS]) -> Self {
        let [at_ns, rest @ ..] = numbers;
        let [in_flight, queued, working, free_slots, filling_slots, full_slots, held, ..] =
            rest.map(|number| number as u32);
        Self { at_ns, in_flight, queued, working, free_slots, filling_slots, full_slots, held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_batches_are_remembered_with_their_drops() {
        let recorder = Recorder::default();
        assert_eq!(recorder.read(), Timeline::default());
        for number in 0..REMEMBERED as u64 + 10 {
            let record = BatchRecord { batch: number * 2, rows: 7, got_ns: number, ..BatchRecord::default() };
            let gauges = Gauges { at_ns: number, held: 3, ..Gauges::default() };
            assert_eq!(recorder.note(record, gauges), number);
        }
        recorder.dropped(5, 99); // forgotten: its place is another's
        recorder.dropped(1000, 77);
        let timeline = recorder.read();
        assert_eq!(
            (timeline.forgotten, timeline.batches.len(), timeline.gauges.len()),
            (11, REMEMBERED - 1, REMEMBERED - 1)
        );
        for (at, record) in timeline.batches.iter().enumerate() {
            let number = at as u64 + 11;
            let dropped_ns = if number == 1000 { 77 } else { 0 };
            let expected = BatchRecord {
                sequence: number,
                batch: number * 2,
                rows: 7,
                got_ns: number,
                dropped_ns,
                ..BatchRecord::default()
            };
            assert_eq!(*record, expected);
        }
    }
}
