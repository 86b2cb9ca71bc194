//! A loader's side of a cache: it starts and ends the threads, and returns waiting reads to the
//! driver.

use super::state::{FillState, Flow};
use super::threads::LOOK;
use crate::Cache;
use crate::cache::CachedBlocks;
use crate::cache::dir::CacheDir;
use crate::cache::entry::knows_boot;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::is_url;
use feedline_base::meter::NetworkMeter as Meter;
use feedline_base::sync::Hold;
use feedline_base::thread;
use feedline_core::memory::MemoryTerm;
use feedline_core::storage::Sources;
use feedline_reader::completions::Completions;
use feedline_reader::reader::Keep;
use feedline_reader::{Completion, DROP_DEADLINE, ReadOp, ReaderOptions, Waker};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Number of concurrent downloads, without a memory limit.
const THREADS: usize = 8;

/// Memory for pieces, in blocks, without a memory limit: a shuffled order has some hundred pieces
/// in flight.
const PIECES: usize = 4;

/// Time to write the pieces that reads received, at a loader's end.
const LAST: Duration = Duration::from_secs(1);

/// A loader's side of a cache.
pub struct Fill {
    pub(super) shared: Arc<FillState>,
    threads: Vec<JoinHandle<()>>,
}

/// The parts of a [`Fill`].
pub struct FillSetup<'a> {
    pub(crate) sources: &'a Arc<Sources>,
    /// The table of their blocks.
    pub(crate) blocks: Arc<CachedBlocks>,
    pub(crate) options: &'a ReaderOptions,
    pub(crate) cache: &'a Cache,
    /// Counts the downloads.
    pub(crate) meter: &'a Arc<Meter>,
    /// Wakes the driver.
    pub(crate) waker: &'a Waker,
}

/// Announces future reads to a cache.
#[derive(Clone)]
pub struct Announcer(pub(super) Arc<FillState>);

/// Minimum number of threads: one watches, one looks objects up, one downloads.
const LEAST: usize = 3;

impl Fill {
    /// Errors: [`ErrorKind::Config`] for a folder that cannot be used.
    pub(crate) fn start(setup: FillSetup<'_>) -> Result<Self> {
        let FillSetup {
            sources,
            blocks,
            options,
            cache,
            meter,
            waker,
        } = setup;
        if is_url(&cache.dir) {
            let message = "a cache is a folder on a local disk, not a URL";
            return Err(Error::new(ErrorKind::Config, Stage::Build, message).with_path(&cache.dir));
        }
        let dir = CacheDir::open(cache).map_err(|error| {
            let message = format!("the folder cannot be used as a cache: {error}");
            Error::new(ErrorKind::Config, Stage::Build, message).with_path(&cache.dir)
        })?;
        // One more block is reserved for the pieces of reads.
        let count = options.connections.map_or(THREADS, |bytes| {
            (bytes as u64 / cache.block)
                .saturating_sub(1)
                .clamp(1, THREADS as u64) as usize
        });
        let pieces = if options.connections.is_none() {
            PIECES
        } else {
            1
        };
        let shared = Arc::new(FillState {
            blocks,
            sources: sources.clone(),
            mounts: cache.mounts(),
            dir,
            locality: options.locality,
            patience: options.patience,
            queue: Mutex::default(),
            changed: Condvar::new(),
            ended: Condvar::new(),
            done: Completions::new(0, Some(waker.clone())),
            ready: Mutex::default(),
            waker: waker.clone(),
            meter: meter.clone(),
            stop: AtomicBool::new(false),
            downloads: count,
            brought_max: pieces * cache.block as usize,
            written: Mutex::default(),
            pieces: knows_boot() && cache.own_mount().is_none(),
            flow: Flow::default(),
            started: Instant::now(),
        });
        let mut fill = Self {
            shared,
            threads: Vec::new(),
        };
        thread::or_fewer("cache", count + 2, |wanted| fill.start_threads(wanted))?;
        Ok(fill)
    }

    /// Starts `count` threads, or none.
    fn start_threads(&mut self, count: usize) -> std::result::Result<(), (usize, std::io::Error)> {
        for number in 0..count {
            let shared = self.shared.clone();
            let started = thread::spawn(&format!("feedline-fill-{number}"), move || match number {
                0 => shared.watch(),
                _ => shared.work(number > 1),
            });
            match started {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    let started = self.threads.len();
                    self.end();
                    self.shared.stop.store(false, Ordering::Release);
                    return Err((
                        if started < LEAST {
                            0
                        } else {
                            started.max(2 * LEAST - 1)
                        },
                        error,
                    ));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn announcer(&self) -> Announcer {
        Announcer(self.shared.clone())
    }

    /// The table of blocks on the disk.
    pub(crate) fn blocks(&self) -> &Arc<CachedBlocks> {
        &self.shared.blocks
    }

    /// Keeps the bytes that the network returns for reads.
    pub(crate) fn taker(&self) -> Arc<dyn Keep> {
        self.shared.clone()
    }

    /// Moves the completions of reads that waited for the cache to `out`; returns their number.
    pub(crate) fn collect(&self, out: &mut Vec<Completion>) -> usize {
        self.shared.done.wait(out, Some(Duration::ZERO))
    }

    /// Takes the reads that waited for the cache, and whether each must go to the network.
    pub(crate) fn take_ready(&self) -> Vec<(ReadOp, bool)> {
        std::mem::take(&mut *self.shared.ready.hold())
    }

    /// Completes all waiting reads as cancelled. Downloads continue.
    pub(crate) fn cancel(&self) {
        let waiting: Vec<_> = self.shared.queue.hold().waiting.drain().collect();
        let ready: Vec<_> = self
            .shared
            .ready
            .hold()
            .drain(..)
            .map(|(op, _)| op)
            .collect();
        let ops = waiting
            .into_iter()
            .flat_map(|(_, waiting)| waiting.ops)
            .chain(ready);
        self.shared.done.extend(ops.map(ReadOp::cancelled));
    }

    /// Number of concurrent downloads.
    pub(in crate::cache) fn downloads(&self) -> usize {
        self.shared.downloads
    }

    /// Whether the disk was full recently, or the capacity is used up.
    pub(in crate::cache) fn is_full(&self) -> bool {
        self.shared.rests(&self.shared.flow.full_until)
    }

    /// Memory for blocks, and for the tables.
    pub(crate) fn term(&self) -> MemoryTerm {
        let blocks =
            self.shared.downloads * self.shared.blocks.block as usize + self.shared.brought_max;
        MemoryTerm::NETWORK.of(1, blocks + self.shared.blocks.table_bytes())
    }

    /// Ends all downloads. Blocks that have arrived are written.
    pub(in crate::cache) fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // After this, a thread that hangs in disk I/O holds no buffer of a read.
        self.cancel();
        self.collect(&mut Vec::new());
        // A thread holds this lock from its check of `stop` until its sleep.
        drop(self.shared.queue.hold());
        self.shared.changed.notify_all();
        self.shared.ended.notify_all();
        let deadline = Instant::now() + DROP_DEADLINE;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Fill {
    /// First writes the pieces that reads received, within [`LAST`].
    fn drop(&mut self) {
        let deadline = Instant::now() + LAST;
        while self.shared.has_pieces_to_write() && Instant::now() < deadline {
            self.shared.sync_soon();
            std::thread::sleep(LOOK / 5);
        }
        self.end();
    }
}
