//! The choice of a reader and its reasons: made once, by `build`, from the machine's features.

use super::remote::Remote;
use super::router::{Route, Router, plan_routes};
use crate::cache::{CachedBlocks, Fill, FillSetup};
use crate::{Announcer, Cache};
use feedline_base::error::{Error, ErrorKind, Result, Stage, config};
use feedline_base::meter::{Network, NetworkMeter as Meter};
use feedline_base::setting::Setting;
use feedline_core::memory::available;
use feedline_core::storage::mounts::{Mounts, Slow};
use feedline_core::storage::{Direct, Locality, Mode, Sources};
use feedline_reader::fault_hook::FaultHook;
use feedline_reader::files::{PROBES_MAX, Probe, Seen, probe, seen};
use feedline_reader::mmap::Mmap;
use feedline_reader::pread::Pread;
use feedline_reader::threads::{BlockingRead, Threaded};
use feedline_reader::uring::{Uring, refusal};
use feedline_reader::{
    Again, DEPTH_MAX, Files, PageCache, Reader, ReaderOptions, THREADS_MAX, Waker,
};
use feedline_report::meter::{CacheReads, ReaderInUse, ReaderKind};
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;

/// Default number of threads in a pread or mmap reader; each only waits for the device.
const THREADS_DEFAULT: u32 = 32;

/// Default number of operations in flight.
const DEPTH_DEFAULT: u32 = 32;

/// The default for io_uring through the page cache. Cold random reads of 147 KiB reached 0.81, 0.94
/// and 0.95 of O_DIRECT's rate at depth 32, 64 and 128, and no more at 256.
const DEPTH_BUFFERED: u32 = 128;

/// The default for network mounts, also of threads: a read waits for a server's answer. With a
/// latency of 20 ms (FUSE), reads of 147 KiB reached 1,470 samples/s at depth 32, 3,400 at 128 and
/// 3,600 at 256.
const DEPTH_MOUNT: u32 = 128;

/// An open reader and the reasons for it.
pub struct Opened {
    /// The reader.
    pub reader: Box<dyn Reader>,
    /// The page cache to try first, under [`Mode::Auto`].
    pub cache: Option<Arc<PageCache>>,
    /// The choice and its reasons.
    pub choice: Choice,
    /// Retries of failed reads.
    pub again: Again,
    /// Announces future reads to the cache if the order visits the data block by block.
    pub announcer: Option<Announcer>,
    /// Counts of requests to object stores, and of their local cache.
    pub remote: Option<RemoteCounts>,
}

/// Returns the counts of the network and of the local cache.
pub type RemoteCounts = Arc<dyn Fn() -> (Option<Network>, Option<CacheReads>) + Send + Sync>;

/// The choice and its reasons, for the report.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The reader, what it reads besides local files, and whether the options named it
    /// ([`Mode::Uring`], [`Mode::Pread`], [`Mode::Mmap`]).
    pub reader: ReaderInUse,
    /// Whether reads bypass the page cache.
    pub direct: bool,
    /// Whether the page cache is tried first.
    pub cached_first: bool,
    /// One reason per line.
    pub why: Vec<String>,
}

impl Choice {
    /// The choice with one more reason.
    pub fn and(mut self, why: Option<&String>) -> Self {
        self.why.extend(why.cloned());
        self
    }
}

impl Choice {
    /// The choice of this reader, without a reason.
    #[doc(hidden)]
    pub fn of(reader: ReaderInUse) -> Self {
        Self {
            reader,
            direct: false,
            cached_first: false,
            why: Vec::new(),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = if self.cached_first {
            "page cache, then "
        } else {
            ""
        };
        let explicit = if self.reader.explicit {
            format!(", as set by {}", Setting::Reader)
        } else {
            String::new()
        };
        write!(
            f,
            "{first}{}{}{explicit}",
            self.reader,
            if self.direct { " with O_DIRECT" } else { "" }
        )?;
        if self.why.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", self.why.join("; "))
        }
    }
}

/// Opens a reader for `sources`, without a cache.
///
/// Errors: those of [`open_cached`].
#[cfg(any(test, feature = "unstable"))]
pub fn open(sources: Arc<Sources>, options: &ReaderOptions) -> Result<Opened> {
    open_cached(sources, options, None)
}

/// Opens a reader for `sources`. The cache holds objects and files of network mounts.
///
/// Errors: [`ErrorKind::Config`] for options outside their limits; [`ErrorKind::Unsupported`] for
/// `O_DIRECT` if the file system refuses it (names the file), and for [`Mode::Uring`] if io_uring
/// is refused (says why).
pub fn open_cached(
    sources: Arc<Sources>,
    options: &ReaderOptions,
    cache: Option<&Cache>,
) -> Result<Opened> {
    check_limits(options)?;
    let facts = FileFacts::of(sources, options, cache);
    let FileFacts {
        ref sources, cache, ..
    } = facts;
    let meter = Arc::new(Meter::new());
    let blocks = cache.map(|cache| Arc::new(CachedBlocks::new(sources, cache)));
    let main = facts.open_main(&meter, blocks.clone())?;
    let waker = main.reader.waker();
    let setup = cache.zip(blocks.clone()).map(|(cache, blocks)| FillSetup {
        sources,
        blocks,
        options,
        cache,
        meter: &meter,
        waker: &waker,
    });
    let fill = setup.map(Fill::start).transpose()?;
    let announcer = fill
        .as_ref()
        .filter(|_| options.locality == Locality::Blocks)
        .map(Fill::announcer);
    let mut others = Vec::<(Route, Box<dyn Reader>)>::new();
    if !facts.staged.is_empty() {
        // Bytes that the cache does not hold are read from the mount itself.
        let mounts = Pread::new(facts.table(sources.clone(), 1, main.seen.clone()));
        others.push((
            Route::Mount,
            Box::new(facts.start_threads(mounts, DEPTH_MOUNT, Some(waker.clone()))?),
        ));
    }
    let objects = facts.objects && main.used.kind != ReaderKind::Network;
    if objects {
        others.push((
            Route::Object,
            facts.start_objects(meter.clone(), Some(waker), fill.as_ref())?,
        ));
    }
    let mut used = main.used;
    used.objects = objects;
    used.cached = cache.is_some();
    let choice = Choice {
        reader: used,
        direct: main.direct,
        cached_first: main.page_cache.is_some(),
        why: facts.reasons(main.why),
    };
    let network = facts.objects.then_some(meter);
    let remote = (network.is_some() || blocks.is_some()).then(|| -> RemoteCounts {
        Arc::new(move || {
            (
                network.as_ref().map(|meter| meter.read()),
                blocks.as_ref().map(|blocks| blocks.counts()),
            )
        })
    });
    // Retries read the objects themselves.
    let again = Again::new(sources.clone(), options, main.seen);
    let reader = match others.is_empty() {
        true => main.reader,
        false => Box::new(Router::new(plan_routes(sources), main.reader, others, fill)),
    };
    Ok(Opened {
        reader,
        cache: main.page_cache,
        choice,
        again,
        announcer,
        remote,
    })
}

/// The facts that decide which readers are opened.
struct FileFacts<'a> {
    options: &'a ReaderOptions,
    /// The sources, with the folders on mounts that the cache stages.
    sources: Arc<Sources>,
    /// Whether some sources are objects.
    objects: bool,
    /// Whether some sources are files.
    files: bool,
    /// Folders on network mounts whose files the cache stages.
    staged: Vec<Slow>,
    /// Folders on network mounts that the reader of files reads itself.
    slow: Vec<Slow>,
    /// The cache, if any of the sources can be kept in it.
    cache: Option<&'a Cache>,
    /// Whether there is a cache.
    has_cache: bool,
    /// The depth as set, or the default for network mounts.
    depth: Option<u32>,
}

/// The reader that the driver sleeps in, and the reasons for it.
struct MainReader {
    reader: Box<dyn Reader>,
    used: ReaderInUse,
    /// Whether reads bypass the page cache.
    direct: bool,
    page_cache: Option<Arc<PageCache>>,
    seen: Option<Seen>,
    why: Vec<String>,
}

impl<'a> FileFacts<'a> {
    fn of(sources: Arc<Sources>, options: &'a ReaderOptions, given: Option<&'a Cache>) -> Self {
        let (objects, files) = sources.kinds();
        let slow = match given {
            Some(cache) => cache.mounts().slow_folders(&sources, usize::MAX),
            None => Mounts::new(None).slow_folders(&sources, PROBES_MAX),
        };
        let cache = given.filter(|_| objects || !slow.is_empty());
        let depth = options.depth.or((!slow.is_empty()).then_some(DEPTH_MOUNT));
        let (staged, slow) = if cache.is_some() {
            (slow, Vec::new())
        } else {
            (Vec::new(), slow)
        };
        let sources = match staged.is_empty() {
            true => sources,
            false => Arc::new(sources.with_mounts(staged.iter().map(|slow| slow.first))),
        };
        Self {
            options,
            sources,
            objects,
            files,
            staged,
            slow,
            cache,
            has_cache: given.is_some(),
            depth,
        }
    }

    /// `why`, and the reasons that concern the cache.
    fn reasons(&self, mut why: Vec<String>) -> Vec<String> {
        if let Some(cache) = self.cache {
            why.extend(
                self.staged
                    .first()
                    .map(|slow| format!("{} is kept in the cache", slow.words())),
            );
            let own = cache.own_mount();
            why.extend(
                own.map(|name| format!("the cache itself is on {name}; a local disk is faster")),
            );
        } else if self.has_cache {
            why.push("all data is on local disks, so the cache keeps nothing".into());
        }
        why
    }

    /// Opens the reader of files. Without files and without a cache, the reader of objects is the
    /// only one.
    fn open_main(
        &self,
        meter: &Arc<Meter>,
        blocks: Option<Arc<CachedBlocks>>,
    ) -> Result<MainReader> {
        if self.objects && !self.files && self.cache.is_none() {
            let reader = self.start_objects(meter.clone(), None, None)?;
            let used = ReaderInUse::of(ReaderKind::Network, false);
            return Ok(MainReader {
                reader,
                used,
                direct: false,
                page_cache: None,
                seen: None,
                why: Vec::new(),
            });
        }
        let options = self.options;
        let sources = match blocks {
            Some(blocks) => Arc::new(self.sources.with_cache(blocks)),
            None => self.sources.clone(),
        };
        let mut why = Vec::new();
        let align = self.choose_align(&sources, &mut why)?;
        let threads = if self.slow.is_empty() {
            THREADS_DEFAULT
        } else {
            DEPTH_MOUNT
        };
        let seen = seen(&sources);
        let files = || self.table(sources.clone(), align, seen.clone());
        let pread = || self.start_threads(Pread::new(files()), threads, None);
        let (kind, reader): (_, Box<dyn Reader>) = match options.mode {
            Mode::Pread => (ReaderKind::Pread, Box::new(pread()?)),
            Mode::Mmap => (
                ReaderKind::Mmap,
                Box::new(self.start_threads(Mmap::new(files()), threads, None)?),
            ),
            // `Uring` and `Auto`.
            _ => match self.start_uring(files()) {
                Ok(reader) => {
                    why.push(format!("io_uring: {}", reader.flavour()));
                    (ReaderKind::Uring, Box::new(reader))
                }
                Err(errno) if options.mode == Mode::Uring => {
                    return Err(unsupported(refusal(errno)).with_source(errno));
                }
                Err(errno) => {
                    why.push(format!("{}, so pread threads are used", refusal(errno)));
                    (ReaderKind::Pread, Box::new(pread()?))
                }
            },
        };
        let page_cache = || {
            PageCache::new(sources.clone(), options.fds)
                .through(FaultHook::of(options), seen.clone())
        };
        let page_cache = (options.mode == Mode::Auto).then(|| Arc::new(page_cache()));
        let mut used = ReaderInUse::of(kind, options.mode != Mode::Auto);
        used.mount = !self.slow.is_empty();
        Ok(MainReader {
            reader,
            used,
            direct: align > 1,
            page_cache,
            seen,
            why,
        })
    }

    fn table(&self, sources: Arc<Sources>, align: usize, seen: Option<Seen>) -> Files {
        Files::new(sources, align, self.options.fds).through(FaultHook::of(self.options), seen)
    }

    /// The reader of objects. `fill`: the cache that keeps the bytes that it reads.
    fn start_objects(
        &self,
        meter: Arc<Meter>,
        waker: Option<Waker>,
        fill: Option<&Fill>,
    ) -> Result<Box<dyn Reader>> {
        // If there is also a network mount, at most its depth is used.
        let unlimited = self.options.connections.is_none();
        let depth = self.options.depth.or(self.depth.filter(|_| unlimited));
        let mut options = self.options.clone();
        options.depth = depth;
        Remote::start(
            self.sources.clone(),
            &options,
            meter,
            waker,
            fill.map(Fill::taker),
        )
    }

    fn start_uring(&self, files: Files) -> Result<Uring, Errno> {
        match self.options.deny_uring {
            Some(errno) => Err(Errno::from_raw_os_error(errno)),
            None => {
                let default = if files.align() > 1 {
                    DEPTH_DEFAULT
                } else {
                    DEPTH_BUFFERED
                };
                Uring::new(
                    files,
                    self.depth.unwrap_or(default) as usize,
                    !self.options.unregistered,
                )
            }
        }
    }

    fn start_threads<W: BlockingRead>(
        &self,
        work: W,
        default: u32,
        waker: Option<Waker>,
    ) -> Result<Threaded<W>> {
        let threads = if self.options.threads == 0 {
            default
        } else {
            self.options.threads
        };
        let depth = self.depth.unwrap_or(DEPTH_DEFAULT);
        Threaded::start(work, depth as usize, threads.min(depth) as usize, waker)
    }

    /// The alignment of reads; 1 for reads through the page cache.
    fn choose_align(&self, sources: &Sources, why: &mut Vec<String>) -> Result<usize> {
        let ReaderOptions { mode, direct, .. } = *self.options;
        if direct == Direct::Off || mode == Mode::Mmap {
            return Ok(1);
        }
        if direct == Direct::Auto
            && let Some(shared) = self.slow.iter().find(|slow| !slow.mount.direct)
        {
            why.push(format!("buffered reads, since {}", shared.words()));
            return Ok(1);
        }
        if mode == Mode::Auto && direct == Direct::Auto && fits_memory(sources.total_bytes(), why) {
            return Ok(1);
        }
        match probe(sources) {
            Probe {
                refused: None,
                align,
            } => Ok(align),
            Probe {
                refused: Some((path, reason)),
                ..
            } if direct == Direct::On => {
                Err(unsupported(format!("no O_DIRECT: {reason}")).with_path(path))
            }
            Probe {
                refused: Some((path, reason)),
                ..
            } => {
                why.push(format!(
                    "buffered reads, since {reason} ({})",
                    path.display()
                ));
                Ok(1)
            }
        }
    }
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, Stage::Build, message)
}

fn check_limits(options: &ReaderOptions) -> Result<()> {
    let ReaderOptions { depth, threads, .. } = *options;
    if let Some(depth) = depth.filter(|depth| !(1..=DEPTH_MAX).contains(depth)) {
        return Err(config(format!(
            "a read depth of {depth}; use 1 to {DEPTH_MAX}"
        )));
    }
    if threads > THREADS_MAX {
        return Err(config(format!(
            "{threads} reader threads; use at most {THREADS_MAX}"
        )));
    }
    if options.mode == Mode::Mmap && options.direct == Direct::On {
        return Err(config(
            "mmap cannot use O_DIRECT: it reads through the page cache; use another reader",
        ));
    }
    Ok(())
}

/// Whether a second epoch would be read from memory, so that the first one should fill the page
/// cache.
fn fits_memory(dataset: u64, why: &mut Vec<String>) -> bool {
    let Some(free) = available::for_page_cache() else {
        why.push("free memory unknown: misses bypass the page cache".into());
        return false;
    };
    let fits = dataset <= free / 2;
    let (verdict, how) = if fits {
        ("fits", "misses are read buffered")
    } else {
        ("does not fit", "misses bypass the page cache")
    };
    why.push(format!(
        "dataset of {} {verdict} half of {} free memory: {how}",
        gigabytes(dataset),
        gigabytes(free)
    ));
    fits
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_limits_are_errors_that_name_the_limit() {
        type Change = fn(&mut ReaderOptions);
        let table: [(Change, &str); 4] = [
            (
                |options| options.depth = Some(0),
                "a read depth of 0; use 1 to 4096",
            ),
            (|options| options.depth = Some(4097), "a read depth of 4097"),
            (
                |options| options.threads = 257,
                "257 reader threads; use at most 256",
            ),
            (
                |options| (options.mode, options.direct) = (Mode::Mmap, Direct::On),
                "mmap cannot use O_DIRECT",
            ),
        ];
        for (change, words) in table {
            let mut options = ReaderOptions::default();
            change(&mut options);
            let error = open(Arc::new(Sources::new()), &options).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn the_choice_reads_as_one_line() {
        let why = vec!["a".to_string(), "b".to_string()];
        let reader = ReaderInUse::of(ReaderKind::Uring, false);
        let choice = Choice {
            reader,
            direct: true,
            cached_first: true,
            why,
        };
        assert_eq!(
            choice.to_string(),
            "page cache, then io_uring with O_DIRECT (a; b)"
        );
        let reader = ReaderInUse::of(ReaderKind::Mmap, true);
        let choice = Choice {
            reader,
            direct: false,
            cached_first: false,
            why: Vec::new(),
        };
        assert_eq!(choice.to_string(), "mmap, as set by `reader`");
    }
}
