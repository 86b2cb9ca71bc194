//! A reader made of threads: the shared part of pread and mmap. The reader owns its threads, which
//! are named after it, and joins them when it is dropped. A thread that the kernel does not release
//! within the deadline is abandoned with its buffer. The threads inherit the CPUs of the thread
//! that opens the reader, so open it on a NUMA node to place them there.

use super::completions::Completions;
use crate::counters::{Counters, add};
use crate::reader::count_leaked;
use crate::reader::sealed::Sealed;
use crate::{Completion, DROP_DEADLINE, Footprint, ReadOp, Reader, Waker};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use feedline_base::thread;
use feedline_core::storage::Extent;
use feedline_report::meter::ReadStats;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// One read by a thread that may block.
pub trait BlockingRead: Send + Sync + 'static {
    /// The reader's name; threads are `feedline-NAME-N`.
    const NAME: &'static str;
    /// Reads `extent` and returns its offset in `buf`.
    fn read(&self, extent: &Extent, buf: &mut [u8], counters: &Counters) -> Result<usize>;
    /// Like [`Reader::footprint`].
    fn footprint(&self, extent: &Extent) -> Footprint;
    /// Like [`Reader::mem_align`].
    fn mem_align(&self) -> usize;
    /// Adds the statistics that `counters` does not have.
    fn stats(&self, stats: &mut ReadStats);
}

/// A reader whose threads do the reads.
pub struct Threaded<W> {
    shared: Arc<ThreadsState<W>>,
    threads: Vec<JoinHandle<()>>,
    /// Reads that were submitted, but not yet sent to the threads.
    pending: Vec<ReadOp>,
    in_flight: usize,
    depth: usize,
    /// How long `drop` waits.
    deadline: Duration,
}

struct ThreadsState<W> {
    work: W,
    counters: Counters,
    queue: Mutex<ReadQueue>,
    /// Notified when a read arrives, or the reader ends.
    changed: Condvar,
    done: Completions,
}

struct ReadQueue {
    ops: VecDeque<ReadOp>,
    stop: bool,
    /// Number of threads that wait for a read.
    idle: usize,
    /// Number of threads that have not ended.
    alive: usize,
}

impl<W: BlockingRead> Threaded<W> {
    /// Starts `threads` threads for at most `depth` reads in flight. `other`: wakes the driver,
    /// which may sleep in another reader.
    ///
    /// Errors: [`ErrorKind::Limit`] if the system refuses even one thread.
    pub fn start(work: W, depth: usize, threads: usize, other: Option<Waker>) -> Result<Self> {
        let queue = ReadQueue {
            ops: VecDeque::with_capacity(depth),
            stop: false,
            idle: 0,
            alive: 0,
        };
        let shared = Arc::new(ThreadsState {
            work,
            counters: Counters::default(),
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            done: Completions::new(depth, other),
        });
        let threads = thread::or_fewer("reader", threads, |count| shared.start(count))?;
        let pending = Vec::with_capacity(depth);
        Ok(Self {
            shared,
            threads,
            pending,
            in_flight: 0,
            depth,
            deadline: DROP_DEADLINE,
        })
    }

    fn send(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let mut queue = self.shared.queue.hold();
        let wanted = self.pending.len().min(queue.idle);
        queue.ops.extend(self.pending.drain(..));
        drop(queue);
        (0..wanted).for_each(|_| self.shared.changed.notify_one());
    }
}

impl<W: BlockingRead> Sealed for Threaded<W> {}

impl<W: BlockingRead> Reader for Threaded<W> {
    fn depth(&self) -> usize {
        self.depth
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        self.shared.work.footprint(extent)
    }

    fn mem_align(&self) -> usize {
        self.shared.work.mem_align()
    }

    fn submit(&mut self, op: ReadOp) -> std::result::Result<(), ReadOp> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        self.pending.push(op);
        Ok(())
    }

    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>) {
        self.send();
        self.in_flight -= self.shared.done.wait(out, timeout);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn cancel(&mut self) {
        let queued = std::mem::take(&mut self.shared.queue.hold().ops);
        self.shared
            .done
            .extend(self.pending.drain(..).chain(queued).map(ReadOp::cancelled));
    }

    fn waker(&self) -> Waker {
        self.shared.done.waker()
    }

    fn stats(&self) -> ReadStats {
        let mut stats = self.shared.counters.snapshot();
        self.shared.work.stats(&mut stats);
        stats
    }
}

impl<W: BlockingRead> ThreadsState<W> {
    /// Starts `count` threads, or none.
    fn start(
        self: &Arc<Self>,
        count: usize,
    ) -> std::result::Result<Vec<JoinHandle<()>>, (usize, std::io::Error)> {
        let mut threads = Vec::with_capacity(count);
        for number in 0..count {
            let shared = self.clone();
            self.queue.hold().alive += 1;
            match thread::spawn(&format!("feedline-{}-{number}", W::NAME), move || {
                shared.run()
            }) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    self.queue.hold().stop = true;
                    self.changed.notify_all();
                    let started = threads.len();
                    threads.into_iter().for_each(|thread| drop(thread.join()));
                    let mut queue = self.queue.hold();
                    queue.stop = false;
                    queue.alive = 0;
                    return Err((started, error));
                }
            }
        }
        Ok(threads)
    }

    fn run(&self) {
        while let Some(op) = self.next() {
            let completion = self.finish(op);
            self.done.extend([completion]);
        }
        let mut queue = self.queue.hold();
        queue.alive -= 1;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<ReadOp> {
        let mut queue = self.queue.hold();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(op) = queue.ops.pop_front() {
                return Some(op);
            }
            queue.idle += 1;
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(|poison| poison.into_inner());
            queue.idle -= 1;
        }
    }

    fn finish(&self, op: ReadOp) -> Completion {
        let ReadOp {
            tag,
            extent,
            mut buf,
        } = op;
        // A panic here would be a bug of this crate. It must not cost the caller a completion.
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.work.read(&extent, buf.as_mut_slice(), &self.counters)
        }))
        .unwrap_or_else(|_| {
            Err(Error::new(
                ErrorKind::Panicked,
                Stage::Read,
                "a reader thread panicked",
            ))
        });
        let counters = &self.counters;
        add(&counters.ops, 1);
        add(&counters.bytes_asked, extent.len);
        add(&counters.failed, u64::from(result.is_err()));
        Completion { tag, buf, result }
    }
}

impl<W> Drop for Threaded<W> {
    fn drop(&mut self) {
        let deadline = Instant::now() + self.deadline;
        let mut queue = self.shared.queue.hold();
        queue.stop = true;
        let unsent = queue.ops.drain(..).len();
        self.in_flight -= unsent + self.pending.len();
        self.shared.changed.notify_all();
        while queue.alive > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            queue = self
                .shared
                .changed
                .wait_timeout(queue, left)
                .unwrap_or_else(|poison| poison.into_inner())
                .0;
        }
        let alive = queue.alive;
        drop(queue);
        if alive > 0 {
            // Abandoned threads own `shared` and their buffers, so none of that is freed.
            count_leaked(self.in_flight - self.shared.done.len());
            return;
        }
        self.threads
            .drain(..)
            .for_each(|thread| drop(thread.join()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leaked;
    use feedline_core::memory::ByteRing;
    use feedline_core::storage::Sources;
    use std::sync::mpsc::{Receiver, channel};

    /// Offset 0 waits for a message, offset 1 panics.
    struct Stuck(Mutex<Receiver<()>>);

    impl BlockingRead for Stuck {
        const NAME: &'static str = "stuck";
        fn read(&self, extent: &Extent, _: &mut [u8], _: &Counters) -> Result<usize> {
            assert!(extent.offset == 0, "on purpose");
            let _ = self.0.hold().recv();
            Ok(0)
        }
        fn footprint(&self, _: &Extent) -> Footprint {
            Footprint {
                bytes: 1,
                in_place: true,
            }
        }
        fn mem_align(&self) -> usize {
            1
        }
        fn stats(&self, _: &mut ReadStats) {}
    }

    fn op(ring: &ByteRing, offset: u64) -> ReadOp {
        let source = Sources::new().memory([].into());
        ReadOp {
            tag: offset,
            extent: Extent {
                source,
                offset,
                len: 1,
            },
            buf: ring.reserve(1).unwrap().into(),
        }
    }

    #[test]
    fn a_stuck_thread_is_abandoned_with_its_buffer_and_counted() {
        let (word, words) = channel();
        let ring = ByteRing::new(4096, 1, || {}).unwrap();
        let mut reader = Threaded::start(Stuck(Mutex::new(words)), 2, 1, None).unwrap();
        reader.deadline = Duration::from_millis(50);
        assert!(reader.submit(op(&ring, 0)).is_ok());
        reader.wait(&mut Vec::new(), Some(Duration::from_millis(20)));
        let before = leaked();
        drop(reader);
        assert_eq!(leaked() - before, 1);
        assert!(ring.reserve(1).is_none(), "its buffer was freed");
        drop(word);
    }

    #[test]
    fn a_panic_of_a_thread_is_a_completion_like_any_other() {
        let (_word, words) = channel();
        let ring = ByteRing::new(4096, 1, || {}).unwrap();
        let mut reader = Threaded::start(Stuck(Mutex::new(words)), 2, 1, None).unwrap();
        let mut out = Vec::new();
        assert!(reader.submit(op(&ring, 1)).is_ok());
        reader.wait(&mut out, Some(Duration::from_secs(5)));
        assert_eq!(
            out[0].result.as_ref().unwrap_err().kind(),
            ErrorKind::Panicked
        );
    }
}
