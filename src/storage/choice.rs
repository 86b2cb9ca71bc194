//! The choice of a reader and its reasons: made once, by `build`, from the machine's features.

use super::cache::{Announcer, Cache, Fill};
use super::fault_hook::FaultHook;
use super::files::{Files, PROBES_MAX, Probe, Seen, probe, seen};
use super::mixed::Mixed;
use super::mmap::Mmap;
use super::mounts::{Mounts, Slow};
use super::pread::Pread;
use super::remote::Meter;
use super::threads::Threaded;
use super::uring::{Uring, refusal};
use super::{Again, DEPTH_MAX, Direct, Mode, PageCache, Reader, ReaderOptions, Sources, THREADS_MAX, Waker};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::available;
use crate::meter::{CacheReads, Network, ReaderInUse, ReaderKind};
use crate::order::Locality;
use crate::setting::Setting;
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;

/// Default number of threads in a pread or mmap reader; each only waits for the device.
const THREADS_DEFAULT: u32 = 32;

/// Default number of operations in flight.
const DEPTH_DEFAULT: u32 = 32;

/// The default for io_uring through the page cache. Cold random reads of 147 KiB reached 0.81, 0.94 and 0.95 of
/// O_DIRECT's rate at depth 32, 64 and 128, and no more at 256.
const DEPTH_BUFFERED: u32 = 128;

/// The default for network mounts, also of threads: a read waits for a server's answer. With 20 ms for an answer (FUSE),
/// reads of 147 KiB reached 1,470 samples/s at depth 32, 3,400 at 128 and 3,600 at 256.
const DEPTH_MOUNT: u32 = 128;

/// An open reader and the reasons for it.
#[non_exhaustive]
pub struct Opened {
    /// The reader.
    pub reader: Box<dyn Reader>,
    /// The page cache to ask first, under [`Mode::Auto`].
    pub cache: Option<Arc<PageCache>>,
    /// The choice and its reasons.
    pub choice: Choice,
    /// Retries of failed reads.
    pub(crate) again: Again,
    /// Tells the cache of reads to come, for orders by blocks.
    pub(crate) announcer: Option<Announcer>,
    /// Counts of requests to object stores, and of their local cache.
    pub(crate) remote: Option<RemoteCounts>,
}

/// Asks for the counts of network and local cache.
pub(crate) type RemoteCounts = Arc<dyn Fn() -> (Option<Network>, Option<CacheReads>) + Send + Sync>;

/// The choice and its reasons, for the report.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The reader, what it reads beside local files, and whether the options named it ([`Mode::Uring`],
    /// [`Mode::Pread`], [`Mode::Mmap`]).
    pub reader: ReaderInUse,
    /// Whether reads bypass the page cache.
    pub direct: bool,
    /// Whether the page cache is asked first.
    pub cached_first: bool,
    /// One reason per line.
    pub why: Vec<String>,
}

impl Choice {
    /// The choice with one more reason.
    pub(crate) fn and(mut self, why: Option<&String>) -> Self {
        self.why.extend(why.cloned());
        self
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = if self.cached_first { "page cache, then " } else { "" };
        let explicit = if self.reader.explicit { format!(", as set by {}", Setting::Reader) } else { String::new() };
        write!(f, "{first}{}{}{explicit}", self.reader, if self.direct { " with O_DIRECT" } else { "" })?;
        if self.why.is_empty() { Ok(()) } else { write!(f, " ({})", self.why.join("; ")) }
    }
}

/// Opens a reader for `sources`.
///
/// Errors: [`ErrorKind::Config`] for options out of their limits; [`ErrorKind::Unsupported`] for `O_DIRECT` if the file
/// system refuses it (names the file), and for [`Mode::Uring`] if io_uring is refused (says why).
pub fn open(sources: Arc<Sources>, options: &ReaderOptions) -> Result<Opened> {
    check_limits(options)?;
    let (objects, files) = sources.kinds();
    let Some(cache) = &options.cache else {
        return if objects { open_objects(sources, files, options) } else { open_files(sources, options) };
    };
    let slow = cache.mounts().slow_folders(&sources, usize::MAX);
    if objects || !slow.is_empty() {
        return open_cached(sources, (cache, &slow), options);
    }
    let mut opened = open_files(sources, options)?;
    opened.choice.why.push("all data lies on local disks, so nothing is kept in the cache".into());
    Ok(opened)
}

/// Objects without a cache. `files`: some sources are files.
fn open_objects(sources: Arc<Sources>, files: bool, options: &ReaderOptions) -> Result<Opened> {
    let meter = Arc::new(Meter::new());
    let network = meter.clone();
    let remote: Option<RemoteCounts> = Some(Arc::new(move || (Some(network.read()), None)));
    if !files {
        let reader = start_objects((&sources, options), meter, None, None)?;
        let used = ReaderInUse::of(ReaderKind::Network, false);
        let choice = Choice { reader: used, direct: false, cached_first: false, why: Vec::new() };
        return Ok(Opened {
            reader,
            cache: None,
            choice,
            again: Again::new(sources, options, None),
            announcer: None,
            remote,
        });
    }
    let mut opened = open_files(sources.clone(), options)?;
    let objects = start_objects((&sources, options), meter, Some(opened.reader.waker()), None)?;
    opened.reader = Box::new(Mixed::new(sources, opened.reader, objects, None));
    opened.choice.reader.objects = true;
    Ok(Opened { remote, ..opened })
}

/// Objects, and files on network mounts, through a cache; other files beside them.
fn open_cached(sources: Arc<Sources>, (cache, slow): (&Cache, &[Slow]), options: &ReaderOptions) -> Result<Opened> {
    let options = &ReaderOptions { depth: depth_for(slow, options), ..options.clone() };
    let sources = Arc::new(sources.with_mounts(slow.iter().map(|slow| slow.first)));
    let (kept, meter) = (Fill::table(&sources, cache), Arc::new(Meter::new()));
    let mut opened = open_files(Arc::new(sources.with_cache(kept.clone())), options)?;
    let waker = opened.reader.waker();
    let fill = Fill::start((sources.clone(), kept.clone()), options, cache, (meter.clone(), waker.clone()))?;
    opened.announcer = (options.locality == Locality::Blocks).then(|| fill.announcer());
    let objects = sources.kinds().0;
    let start = || start_objects((&sources, options), meter.clone(), Some(waker.clone()), Some(&fill));
    let origin = match (objects, slow.is_empty()) {
        (true, true) => start()?,
        (true, false) => {
            let files = start_mounts((&sources, options), opened.again.seen(), waker.clone())?;
            Box::new(Mixed::new(sources.clone(), files, start()?, None))
        }
        (false, _) => start_mounts((&sources, options), opened.again.seen(), waker)?,
    };
    opened.reader = Box::new(Mixed::new(sources.clone(), opened.reader, origin, Some(fill)));
    let used = &mut opened.choice.reader;
    (used.cached, used.objects) = (true, objects);
    let why = &mut opened.choice.why;
    why.extend(slow.first().map(|slow| format!("{} is kept in the cache", slow.words())));
    why.extend(cache.own_mount().map(|name| format!("the cache itself lies on {name}; a local disk is faster")));
    // Retries read the objects themselves.
    opened.again = Again::new(sources, options, opened.again.seen());
    opened.remote = Some(Arc::new(move || (objects.then(|| meter.read()), Some(kept.counts()))));
    Ok(opened)
}

/// What starts a reader: the sources, and the options.
type Start<'a> = (&'a Arc<Sources>, &'a ReaderOptions);

/// The reader of files on network mounts, for what the cache does not hold. `waker`: wakes the driver, which sleeps in
/// another reader.
fn start_mounts((sources, options): Start<'_>, seen: Option<Seen>, waker: Waker) -> Result<Box<dyn Reader>> {
    let files = Files::new(sources.clone(), 1, options.fds).through(FaultHook::of(options)).seeing(seen);
    Ok(Box::new(start_threads(Pread::new(files), DEPTH_MOUNT, options, Some(waker))?))
}

/// The reader of objects. `fill`: the cache that keeps what it reads.
#[cfg(feature = "remote")]
fn start_objects(
    (sources, options): Start<'_>,
    meter: Arc<Meter>,
    waker: Option<Waker>,
    fill: Option<&Fill>,
) -> Result<Box<dyn Reader>> {
    let reader = super::remote::Remote::start(sources.clone(), options, meter, waker)?;
    Ok(Box::new(match fill {
        Some(fill) => reader.keeping(fill.taker()),
        None => reader,
    }))
}

#[cfg(not(feature = "remote"))]
fn start_objects(_: Start<'_>, _: Arc<Meter>, _: Option<Waker>, _: Option<&Fill>) -> Result<Box<dyn Reader>> {
    Err(config("data in object stores needs the feature `remote`; build feedline with it".into()))
}

fn open_files(sources: Arc<Sources>, options: &ReaderOptions) -> Result<Opened> {
    let mut why = Vec::new();
    let slow = Mounts::new(None).slow_folders(&sources, PROBES_MAX);
    let options = &ReaderOptions { depth: depth_for(&slow, options), ..options.clone() };
    let align = choose_align(&sources, &slow, options, &mut why)?;
    let threads = if slow.is_empty() { THREADS_DEFAULT } else { DEPTH_MOUNT };
    let seen = seen(&sources, options.fds);
    let files = || Files::new(sources.clone(), align, options.fds).through(FaultHook::of(options)).seeing(seen.clone());
    let pread = || start_threads(Pread::new(files()), threads, options, None);
    let (kind, reader): (_, Box<dyn Reader>) = match options.mode {
        Mode::Pread => (ReaderKind::Pread, Box::new(pread()?)),
        Mode::Mmap => (ReaderKind::Mmap, Box::new(start_threads(Mmap::new(files()), threads, options, None)?)),
        Mode::Uring | Mode::Auto => match start_uring(files(), options) {
            Ok(reader) => {
                why.push(format!("io_uring: {}", reader.flavour()));
                (ReaderKind::Uring, Box::new(reader))
            }
            Err(errno) if options.mode == Mode::Uring => return Err(unsupported(refusal(errno)).with_source(errno)),
            Err(errno) => {
                why.push(format!("{}, so pread threads", refusal(errno)));
                (ReaderKind::Pread, Box::new(pread()?))
            }
        },
    };
    let cache = || Arc::new(PageCache::new(sources.clone(), options.fds).through(FaultHook::of(options), seen.clone()));
    let cache = (options.mode == Mode::Auto).then(cache);
    let used = ReaderInUse { mount: !slow.is_empty(), ..ReaderInUse::of(kind, options.mode != Mode::Auto) };
    let choice = Choice { reader: used, direct: align > 1, cached_first: cache.is_some(), why };
    let again = Again::new(sources.clone(), options, seen.clone());
    Ok(Opened { reader, cache, choice, again, announcer: None, remote: None })
}

fn config(message: String) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, Stage::Build, message)
}

fn check_limits(options: &ReaderOptions) -> Result<()> {
    let ReaderOptions { depth, threads, .. } = *options;
    if let Some(depth) = depth.filter(|depth| !(1..=DEPTH_MAX).contains(depth)) {
        return Err(config(format!("a read depth of {depth}; use 1 to {DEPTH_MAX}")));
    }
    if threads > THREADS_MAX {
        return Err(config(format!("{threads} reader threads; use at most {THREADS_MAX}")));
    }
    if options.mode == Mode::Mmap && options.direct == Direct::On {
        return Err(config("mmap cannot use O_DIRECT: it reads through the page cache; use another reader".into()));
    }
    Ok(())
}

fn start_uring(files: Files, options: &ReaderOptions) -> Result<Uring, Errno> {
    match options.deny_uring {
        Some(errno) => Err(Errno::from_raw_os_error(errno)),
        None => {
            let default = if files.align() > 1 { DEPTH_DEFAULT } else { DEPTH_BUFFERED };
            Uring::new(files, options.depth.unwrap_or(default) as usize, options.registered)
        }
    }
}

fn start_threads<W: super::threads::Work>(
    work: W,
    default: u32,
    options: &ReaderOptions,
    waker: Option<Waker>,
) -> Result<Threaded<W>> {
    let threads = if options.threads == 0 { default } else { options.threads };
    let depth = options.depth.unwrap_or(DEPTH_DEFAULT);
    Threaded::start(work, depth as usize, threads.min(depth) as usize, waker)
}

/// The depth as set, or the default for network mounts.
fn depth_for(slow: &[Slow], options: &ReaderOptions) -> Option<u32> {
    options.depth.or((!slow.is_empty()).then_some(DEPTH_MOUNT))
}

/// The alignment of reads; 1 for reads through the page cache.
fn choose_align(sources: &Sources, slow: &[Slow], options: &ReaderOptions, why: &mut Vec<String>) -> Result<usize> {
    if options.direct == Direct::Off || options.mode == Mode::Mmap {
        return Ok(1);
    }
    if options.direct == Direct::Auto
        && let Some(shared) = slow.iter().find(|slow| !slow.mount.direct)
    {
        why.push(format!("buffered reads, since {}", shared.words()));
        return Ok(1);
    }
    if options.mode == Mode::Auto && options.direct == Direct::Auto && fits_memory(sources.total_bytes(), why) {
        return Ok(1);
    }
    match probe(sources) {
        Probe { refused: None, align } => Ok(align),
        Probe { refused: Some((path, reason)), .. } if options.direct == Direct::On => {
            Err(unsupported(format!("no O_DIRECT: {reason}")).with_path(path))
        }
        Probe { refused: Some((path, reason)), .. } => {
            why.push(format!("buffered reads, since {reason} ({})", path.display()));
            Ok(1)
        }
    }
}

/// Whether a second epoch would run from memory, so that the first one should fill the page cache.
fn fits_memory(dataset: u64, why: &mut Vec<String>) -> bool {
    let Some(free) = available::for_page_cache() else {
        why.push("free memory unknown: misses bypass the page cache".into());
        return false;
    };
    let fits = dataset <= free / 2;
    let (verdict, how) =
        if fits { ("fits", "misses are read buffered") } else { ("does not fit", "misses bypass the page cache") };
    why.push(format!("dataset of {} {verdict} half of {} free memory: {how}", gigabytes(dataset), gigabytes(free)));
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
            (|options| options.depth = Some(0), "a read depth of 0; use 1 to 4096"),
            (|options| options.depth = Some(4097), "a read depth of 4097"),
            (|options| options.threads = 257, "257 reader threads; use at most 256"),
            (|options| (options.mode, options.direct) = (Mode::Mmap, Direct::On), "mmap cannot use O_DIRECT"),
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
        let choice = Choice { reader, direct: true, cached_first: true, why };
        assert_eq!(choice.to_string(), "page cache, then io_uring with O_DIRECT (a; b)");
        let reader = ReaderInUse::of(ReaderKind::Mmap, true);
        let choice = Choice { reader, direct: false, cached_first: false, why: Vec::new() };
        assert_eq!(choice.to_string(), "mmap, as set by `reader`");
    }
}
