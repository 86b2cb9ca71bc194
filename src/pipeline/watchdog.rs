//! The watchdog records what each thread is doing, so that a waiting thread can name the thread
//! that stalls.
//!
//! ```text
//! planner, workers, reads, transfer ──► a cell each: turn (odd: at work), stage, sample, extent
//!                                          ▲
//!                     next(), while it waits, looks every 100 ms: the same odd turn for the whole deadline = stalled
//! ```
//!
//! A working thread reads no clock for the watchdog and waits for no other thread. To mark a new
//! activity (*turn*), it does a few relaxed stores to its own cache line. Only the consumer
//! measures time, between its checks of the cells, and only while it waits. So the threads of a
//! stopped process or a sleeping machine do not become late. A read does not become late while the
//! planner, which collects it, is busy.
//!
//! A stall is an error of the iterator. The stalled thread is not touched: it may be in the kernel,
//! in a driver or in user code. At the end of the loader it is abandoned with all memory it can
//! reach, and counted.

use feedline_base::error::{Error, ErrorKind, Stage};
use feedline_base::setting::Setting;
use feedline_core::storage::{Extent, SourceId, Sources, remote};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Stands for an absent value.
const NONE: u64 = u64::MAX;

/// A stall must last for at least this many checks, so that one long pause of the whole process is
/// not a stall.
pub(crate) const LOOKS: u32 = 16;

/// An activity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Doing {
    /// Chooses samples and starts reads; this includes the user's index and sampler.
    Planning,
    /// A submitted read is in flight.
    Reading,
    /// Opens and decodes bytes.
    Decoding,
    /// Runs the user's transform.
    Mapping,
    /// A copy is on the device's stream, or the driver is called.
    Copying,
    /// Direct reads of batches are in flight.
    ReadingDirectly,
    /// The consumer's streams still use the memory for the next copy or read, so no thread of the
    /// loader is late.
    Blocked,
}

impl Doing {
    const ALL: [Self; 7] = [
        Self::Planning,
        Self::Reading,
        Self::Decoding,
        Self::Mapping,
        Self::Copying,
        Self::ReadingDirectly,
        Self::Blocked,
    ];

    fn of(number: u64) -> Self {
        Self::ALL[(number as usize).min(Self::ALL.len() - 1)]
    }

    /// The stage that stalls, and a description of the stall.
    fn stall(self) -> (Stage, &'static str) {
        match self {
            Self::Planning => (
                Stage::Order,
                "the dataset's index or the order has not answered",
            ),
            Self::Reading => (Stage::Read, "storage has not answered"),
            Self::Decoding => (Stage::Decode, "a decoder has not returned"),
            Self::Mapping => (Stage::Map, "a transform has not returned"),
            Self::Copying => (Stage::Device, "the device has not finished its copies"),
            Self::ReadingDirectly => (
                Stage::Read,
                "direct reads into device memory have not completed",
            ),
            Self::Blocked => (
                Stage::Device,
                "the consumer's streams have not finished their work on dropped batches",
            ),
        }
    }
}

/// The activity of one thread or one read, on its own cache line.
#[repr(align(64))]
pub(crate) struct Cell {
    /// Odd while busy; changes with each new activity. One writer at a time.
    turn: AtomicU64,
    doing: AtomicU64,
    sample: AtomicU64,
    source: AtomicU64,
    offset: AtomicU64,
    len: AtomicU64,
}

impl Cell {
    fn new() -> Self {
        let none = || AtomicU64::new(NONE);
        Self {
            turn: AtomicU64::new(0),
            doing: AtomicU64::new(0),
            sample: none(),
            source: none(),
            offset: none(),
            len: none(),
        }
    }

    /// Begins an activity and ends the previous one.
    pub(crate) fn begin(&self, doing: Doing, sample: Option<u64>) {
        self.place(doing, sample, None);
    }

    /// Begins a read.
    pub(crate) fn read(&self, sample: Option<u64>, extent: &Extent) {
        self.place(Doing::Reading, sample, Some(extent));
    }

    fn place(&self, doing: Doing, sample: Option<u64>, extent: Option<&Extent>) {
        self.doing.store(doing as u64, Ordering::Relaxed);
        self.sample.store(sample.unwrap_or(NONE), Ordering::Relaxed);
        let place = extent.map_or([NONE; 3], |extent| {
            [extent.source.index() as u64, extent.offset, extent.len]
        });
        for (cell, value) in [&self.source, &self.offset, &self.len]
            .into_iter()
            .zip(place)
        {
            cell.store(value, Ordering::Relaxed);
        }
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store((turn + 2) | 1, Ordering::Release);
    }

    /// The last activity.
    pub(crate) fn now(&self) -> (Doing, Option<u64>) {
        let sample = self.sample.load(Ordering::Relaxed);
        (
            Doing::of(self.doing.load(Ordering::Relaxed)),
            Some(sample).filter(|sample| *sample != NONE),
        )
    }

    /// Whether the thread is busy with `doing`.
    pub(crate) fn is_now(&self, doing: Doing) -> bool {
        self.turn() % 2 == 1 && self.now().0 == doing
    }

    /// Ends the activity.
    pub(crate) fn end(&self) {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn
            .store(turn.wrapping_add(turn & 1), Ordering::Release);
    }

    fn turn(&self) -> u64 {
        self.turn.load(Ordering::Acquire)
    }
}

/// The cells of a loader.
pub(crate) struct Watch {
    pub(crate) planner: Cell,
    pub(crate) device: Cell,
    pub(crate) workers: Box<[Cell]>,
    /// First one per sample in flight, then one per chunk in flight.
    pub(crate) reads: Box<[Cell]>,
}

impl Watch {
    pub(crate) fn new(workers: usize, reads: usize) -> Self {
        let cells = |count: usize| (0..count).map(|_| Cell::new()).collect();
        Self {
            planner: Cell::new(),
            device: Cell::new(),
            workers: cells(workers),
            reads: cells(reads),
        }
    }

    /// Updates the cell of a worker, if `number` is one.
    pub(crate) fn worker(&self, number: Option<usize>, say: impl Fn(&Cell)) {
        number
            .and_then(|number| self.workers.get(number))
            .into_iter()
            .for_each(say);
    }

    /// All cells, threads before reads. The planner collects the reads, so no read ends while the
    /// planner is stuck.
    fn cells(&self) -> impl Iterator<Item = &Cell> {
        [&self.planner, &self.device]
            .into_iter()
            .chain(&self.workers)
            .chain(&self.reads)
    }
}

/// The observations of a waiting consumer; new for each batch.
#[derive(Default)]
pub(crate) struct Watcher {
    /// The turn counter of each cell, and the time since it changed.
    seen: Vec<(u64, Duration)>,
    /// Time since any cell changed.
    still: Duration,
    /// Time since a read began or ended.
    no_read: Duration,
    looked: Option<Instant>,
    looks: u32,
}

impl Watcher {
    /// Resets the watcher, because no thread of the loader is awaited.
    pub(crate) fn rest(&mut self) {
        self.looked = None;
    }

    /// Looks for an activity that this watcher saw unchanged for `deadline`; returns the error that
    /// names it. Call it regularly while a batch is awaited.
    pub(crate) fn look(
        &mut self,
        watch: &Watch,
        deadline: Duration,
        sources: &Sources,
    ) -> Option<Error> {
        let now = Instant::now();
        let Some(before) = self.looked.replace(now) else {
            self.seen.clear();
            self.seen
                .extend(watch.cells().map(|cell| (cell.turn(), Duration::ZERO)));
            self.still = Duration::ZERO;
            self.no_read = Duration::ZERO;
            self.looks = 0;
            return None;
        };
        let passed = now.duration_since(before).min(deadline / LOOKS);
        self.looks = self.looks.saturating_add(1);
        self.still += passed;
        let first_read = watch.cells().count() - watch.reads.len();
        // The planner collects the reads. While it is busy, completions may be uncollected.
        let collected = {
            let planner = watch.planner.turn();
            planner.is_multiple_of(2) || planner != self.seen[0].0
        };
        self.no_read += if collected { passed } else { Duration::ZERO };
        let mut late = Vec::new();
        for (number, (cell, (turn, same))) in watch.cells().zip(&mut self.seen).enumerate() {
            let now = cell.turn();
            if now != *turn {
                *turn = now;
                *same = Duration::ZERO;
                self.still = Duration::ZERO;
                if number >= first_read {
                    self.no_read = Duration::ZERO;
                }
                continue;
            }
            if cell.is_now(Doing::Blocked) {
                // The batch arrives when this wait ends, so the wait is not a stall, however long
                // it takes.
                *same = Duration::ZERO;
                self.still = Duration::ZERO;
                continue;
            }
            if number < first_read || collected {
                *same += passed;
            }
            if now % 2 == 1 && *same >= deadline {
                late.push((number, cell, *same));
            }
        }
        // A read may wait for its turn behind others that complete. If no read begins or ends for
        // the deadline, it is stalled.
        let stalled = late
            .split_first()
            .filter(|((first, ..), _)| *first < first_read || self.no_read >= deadline);
        if let Some(((first, cell, waited), others)) = stalled {
            // Reads come last, so all late cells after a read are reads.
            let others = if *first < first_read { &[] } else { others };
            return Some(error(cell, *waited, others, sources));
        }
        // No thread is busy, but there is no batch. Nothing would ever change that.
        (self.still >= deadline.saturating_mul(2)).then(|| {
            let message = format!(
                "no thread has worked on a batch for {:.1} s",
                self.still.as_secs_f64()
            );
            Error::new(ErrorKind::Stalled, Stage::Batch, message)
        })
    }
}

/// A cell whose activity has not changed for the whole deadline: its number, the cell, and the
/// time.
type Late<'w> = (usize, &'w Cell, Duration);

/// `others` are the other reads that have waited for the whole deadline.
fn error(cell: &Cell, waited: Duration, others: &[Late<'_>], sources: &Sources) -> Error {
    let load = |word: &AtomicU64| Some(word.load(Ordering::Relaxed)).filter(|value| *value != NONE);
    let doing = Doing::of(cell.doing.load(Ordering::Relaxed));
    let beside = beside(cell, others, sources);
    let see = Setting::StallDeadline.hint(|deadline| format!("; see {deadline}"));
    let (stage, stalls) = doing.stall();
    let message = format!("{stalls} for {:.1} s{beside}{see}", waited.as_secs_f64());
    let mut error = Error::new(ErrorKind::Stalled, stage, message);
    if let Some(sample) = load(&cell.sample) {
        error = error.with_sample(sample);
    }
    if let (Some(source), Some(offset), Some(len)) =
        (load(&cell.source), load(&cell.offset), load(&cell.len))
        && (source as usize) < sources.count()
    {
        let path = sources.path(SourceId::at(source as usize));
        if let Some(why) = remote::paused(&path) {
            error = error.with_note(&why);
        }
        error = error.with_path(path).with_range(offset, len);
    }
    error
}

/// The text about other waiting reads. One thread submits and collects all reads. While the kernel
/// blocks this thread on a file that it cannot open, the other reads are not collected either. So
/// the faulty file may belong to any of them.
fn beside(cell: &Cell, others: &[Late<'_>], sources: &Sources) -> String {
    let source = |cell: &Cell| cell.source.load(Ordering::Relaxed);
    let mut files: Vec<u64> = others.iter().map(|(_, other, _)| source(other)).collect();
    files.sort_unstable();
    files.dedup();
    files.retain(|file| *file != source(cell) && (*file as usize) < sources.count());
    let of = match files[..] {
        [] => String::new(),
        [first] => format!(
            ", of {}",
            sources.path(SourceId::at(first as usize)).display()
        ),
        [first, ..] => format!(
            ", of {} and others",
            sources.path(SourceId::at(first as usize)).display()
        ),
    };
    match others.len() {
        0 => String::new(),
        1 => format!("; one other read has waited as long{of}"),
        count => format!("; {count} other reads have waited as long{of}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(40);

    fn sources() -> Sources {
        let mut sources = Sources::new();
        sources.file("/data/a.bin", 100).unwrap();
        sources
    }

    /// Looks up to 80 times, and calls `between` before each look.
    fn looks(watch: &Watch, mut between: impl FnMut()) -> Option<Error> {
        let mut watcher = Watcher::default();
        (0..80).find_map(|_| {
            between();
            std::thread::sleep(DEADLINE / 8);
            watcher.look(watch, DEADLINE, &sources())
        })
    }

    #[test]
    fn a_stalled_read_is_named_with_its_place() {
        let watch = Watch::new(2, 3);
        watch.reads[1].read(
            Some(7),
            &Extent {
                source: SourceId::at(0),
                offset: 8,
                len: 16,
            },
        );
        let error = looks(&watch, || {}).unwrap();
        assert_eq!(
            (error.kind(), error.stage()),
            (ErrorKind::Stalled, Stage::Read)
        );
        let text = error.to_string();
        assert!(
            text.starts_with("read: stalled: storage has not answered for 0.0 s"),
            "{text}"
        );
        assert!(
            text.ends_with(": path=/data/a.bin offset=8 len=16 sample=7"),
            "{text}"
        );
    }

    #[test]
    fn a_thread_that_makes_progress_is_never_stalled() {
        let watch = Watch::new(1, 1);
        let mut sample = 0;
        let error = looks(&watch, || {
            sample += 1;
            watch.workers[0].begin(Doing::Decoding, Some(sample));
        });
        assert!(error.is_none(), "{error:?}");
    }

    #[test]
    fn a_blocked_device_is_not_stalled_and_hides_no_stall() {
        let watch = Watch::new(1, 0);
        watch.device.begin(Doing::Blocked, None);
        assert!(looks(&watch, || {}).is_none());
        watch.workers[0].begin(Doing::Decoding, Some(3));
        assert_eq!(looks(&watch, || {}).unwrap().stage(), Stage::Decode);
    }

    #[test]
    fn a_transform_is_told_from_a_decoder() {
        let watch = Watch::new(1, 0);
        watch.workers[0].begin(Doing::Decoding, Some(3));
        watch.workers[0].begin(Doing::Mapping, Some(3));
        let error = looks(&watch, || {}).unwrap();
        assert_eq!((error.stage(), error.site().sample), (Stage::Map, Some(3)));
    }

    #[test]
    fn a_loader_without_any_work_is_reported_as_stalled() {
        let watch = Watch::new(1, 1);
        watch.workers[0].begin(Doing::Decoding, None);
        watch.workers[0].end();
        watch.workers[0].end();
        assert_eq!(watch.workers[0].turn() % 2, 0);
        let error = looks(&watch, || {}).unwrap();
        assert_eq!(
            (error.kind(), error.stage()),
            (ErrorKind::Stalled, Stage::Batch)
        );
    }

    #[test]
    fn a_read_that_waits_behind_others_is_not_stalled() {
        let watch = Watch::new(0, 2);
        let extent = Extent {
            source: SourceId::at(0),
            offset: 0,
            len: 8,
        };
        watch.reads[0].read(Some(1), &extent);
        let others = || watch.reads[1].read(Some(2), &extent);
        assert!(looks(&watch, others).is_none());
        assert_eq!(looks(&watch, || {}).unwrap().site().sample, Some(1));
    }

    #[test]
    fn other_waiting_reads_are_reported_with_their_files() {
        let mut sources = sources();
        for path in ["/data/b.bin", "/data/c.bin"] {
            sources.file(path, 100).unwrap();
        }
        for (files, words) in [
            (&[0][..], "for 0.0 s; see"),
            (&[0, 0], "for 0.0 s; one other read has waited as long; see"),
            (
                &[0, 1, 0],
                "for 0.0 s; 2 other reads have waited as long, of /data/b.bin; see",
            ),
            (
                &[0, 2, 1, 2],
                "for 0.0 s; 3 other reads have waited as long, of /data/b.bin and others; see",
            ),
        ] {
            let watch = Watch::new(0, 4);
            for (cell, file) in watch.reads.iter().zip(files) {
                cell.read(
                    Some(7),
                    &Extent {
                        source: SourceId::at(*file),
                        offset: 0,
                        len: 8,
                    },
                );
            }
            let mut watcher = Watcher::default();
            let error = std::iter::repeat_with(|| watcher.look(&watch, DEADLINE, &sources))
                .flatten()
                .next()
                .unwrap();
            assert!(error.message().contains(words), "{error}");
            assert_eq!(
                error.site().path.as_deref(),
                Some(std::path::Path::new("/data/a.bin")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_stuck_planner_is_named_before_its_uncollected_reads() {
        let watch = Watch::new(0, 1);
        let mut watcher = Watcher::default();
        let look = |watcher: &mut Watcher| watcher.look(&watch, DEADLINE, &sources());
        watch.planner.begin(Doing::Planning, None);
        watch.reads[0].read(
            Some(1),
            &Extent {
                source: SourceId::at(0),
                offset: 0,
                len: 8,
            },
        );
        assert!(look(&mut watcher).is_none());
        std::thread::sleep(DEADLINE / LOOKS);
        assert!(look(&mut watcher).is_none());
        // The read is one look older.
        watch.planner.begin(Doing::Planning, Some(2));
        let error = std::iter::repeat_with(|| look(&mut watcher))
            .flatten()
            .next()
            .unwrap();
        assert_eq!(
            (error.stage(), error.site().sample),
            (Stage::Order, Some(2)),
            "{error}"
        );
        // The planner returns; now the read has its whole deadline.
        watch.planner.end();
        assert!(look(&mut watcher).is_none());
        let begun = Instant::now();
        let error = std::iter::repeat_with(|| look(&mut watcher))
            .flatten()
            .next()
            .unwrap();
        assert_eq!(
            (error.stage(), error.site().sample),
            (Stage::Read, Some(1)),
            "{error}"
        );
        assert!(begun.elapsed() > DEADLINE / 2);
    }

    #[test]
    fn the_longest_deadline_never_expires() {
        let watch = Watch::new(1, 0);
        watch.workers[0].begin(Doing::Decoding, Some(1));
        let mut watcher = Watcher::default();
        assert!((0..3).all(|_| watcher.look(&watch, Duration::MAX, &sources()).is_none()));
    }

    #[test]
    fn one_long_pause_of_the_whole_process_is_not_a_stall() {
        let watch = Watch::new(1, 0);
        watch.workers[0].begin(Doing::Decoding, Some(1));
        let mut watcher = Watcher::default();
        assert!(watcher.look(&watch, DEADLINE, &sources()).is_none());
        std::thread::sleep(DEADLINE * 3);
        assert!(watcher.look(&watch, DEADLINE, &sources()).is_none());
    }
}
