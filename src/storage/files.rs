//! Descriptors: which files are open, and how they are opened.
//!
//! When all sources fit the budget (a quarter of the soft `RLIMIT_NOFILE` for each table, so that reader and page cache
//! together leave half of it to the program; the limit itself is never raised, since programs that use `select` rely
//! on it) every file stays open once opened, and reaching it takes no lock. Else, as with millions of images, a file is
//! opened for each read and closed after it.
//!
//! Whatever is opened is a regular file of the length that was indexed, or an error that says what it is instead. A
//! name that came from a file is opened beneath its folder (`resolve_beneath`).

use super::attempt::{Attempt, Call};
use super::fault_hook::FaultHook;
use super::progress::{Next, footprint};
use super::{Extent, Footprint, SourceId, Sources, add, resolve_beneath};
use crate::error::{Error, ErrorKind, Result, Stage};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::CStr;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// `O_NONBLOCK` so that a FIFO in place of a file is an error and not an endless wait; cleared again once it is known
/// to be a file, since io_uring answers EAGAIN for it on file systems without asynchronous reads.
pub(crate) const OPEN_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// What `O_DIRECT` is assumed to need where the kernel does not say.
const ALIGN_UNKNOWN: usize = 4096;

/// Folders that `probe` looks at: file systems differ by folder, hardly by file.
const PROBES_MAX: usize = 64;

/// The descriptor table of a reader.
pub(crate) struct Files {
    sources: Arc<Sources>,
    /// Alignment of reads in bytes; 1 means that files are opened without `O_DIRECT`.
    align: usize,
    /// One cell per source, or nothing when they are too many.
    kept: Option<Box<[OnceLock<File>]>>,
    opens: AtomicU64,
    fallbacks: AtomicU64,
    hook: FaultHook,
    /// Files are left as they were opened.
    nonblocking: bool,
    /// Which file each name was when it was opened first, by any table of the same reader.
    seen: Option<Seen>,
}

/// Device and inode of sources. Tables of one reader share it: a file that another one takes the place of must not give half of
/// a sample by one table and half by the other.
pub(crate) type Seen = Arc<[OnceLock<(u64, u64)>]>;

/// For as many sources as stay open; not for more, whose samples are seldom in pieces.
pub(crate) fn seen(sources: &Sources, budget: Option<u32>) -> Option<Seen> {
    keeps(sources, budget).then(|| (0..sources.count()).map(|_| OnceLock::new()).collect())
}

fn keeps(sources: &Sources, budget: Option<u32>) -> bool {
    sources.count() as u64 <= budget.map_or_else(|| descriptor_limit() / 4, u64::from)
}

/// An open regular file of the right length.
pub(crate) struct File {
    fd: OwnedFd,
    /// `O_DIRECT` was refused or cleared.
    buffered: AtomicBool,
}

/// An open file, kept in the table or closed when dropped.
pub(crate) enum Handle<'a> {
    Kept(&'a File),
    Once(File),
}

impl Deref for Handle<'_> {
    type Target = File;
    fn deref(&self) -> &File {
        match self {
            Self::Kept(file) => file,
            Self::Once(file) => file,
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Files {
    /// A table for `sources`, with `budget` descriptors at most (`None`: a quarter of the soft limit).
    pub(crate) fn new(sources: Arc<Sources>, align: usize, budget: Option<u32>) -> Self {
        let kept = keeps(&sources, budget).then(|| (0..sources.count()).map(|_| OnceLock::new()).collect::<Box<[_]>>());
        let hook = FaultHook::none();
        let (opens, fallbacks) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { sources, align, kept, opens, fallbacks, hook, nonblocking: false, seen: None }
    }

    /// The same, and its files are opened and read through `hook`.
    pub(crate) fn through(self, hook: FaultHook) -> Self {
        Self { hook, ..self }
    }

    /// The same, and `O_NONBLOCK`, which is for opening, stays: only io_uring minds it in regular files, which must not read these.
    pub(crate) fn nonblocking(self) -> Self {
        Self { nonblocking: true, ..self }
    }

    /// The same, and a file must be the one that was opened first.
    pub(crate) fn seeing(self, seen: Option<Seen>) -> Self {
        Self { seen, ..self }
    }

    pub(crate) fn seen(&self) -> Option<Seen> {
        self.seen.clone()
    }

    fn check_identity(&self, id: SourceId, fd: &OwnedFd) -> Result<()> {
        let Some(seen) = &self.seen else { return Ok(()) };
        let stat = rustix::fs::fstat(fd).map_err(|errno| Error::os(Stage::Open, "", errno.into()))?;
        let found = (stat.st_dev, stat.st_ino);
        if *seen[id.index()].get_or_init(|| found) == found {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Changed, Stage::Open, "another file has its name since it was opened first"))
    }

    pub(crate) fn fault_hook(&self) -> &FaultHook {
        &self.hook
    }

    /// The attempt to read `next` of an extent.
    pub(super) fn attempt(&self, call: Call, extent: &Extent, next: Next, align: usize) -> Attempt {
        Attempt { call, extent: *extent, next, align, there: 0..self.sources.len_of(extent.source) }
    }

    pub(crate) fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    /// Alignment in bytes of reads; 1 without `O_DIRECT`.
    pub(crate) fn align(&self) -> usize {
        self.align
    }

    /// What a read needs; bytes of a memory source are copied as they are.
    pub(crate) fn footprint(&self, extent: &Extent) -> Footprint {
        let align = if self.sources.bytes_of(extent.source).is_some() { 1 } else { self.align };
        footprint(extent, align)
    }

    /// Checks what can be checked before any system call.
    ///
    /// Errors: [`ErrorKind::Truncated`] for an extent behind the end, [`ErrorKind::Config`] for a buffer too small.
    pub(crate) fn check(&self, extent: &Extent, room: usize) -> Result<()> {
        let len = self.sources.len_of(extent.source);
        if extent.offset.checked_add(extent.len).is_none_or(|end| end > len) {
            let message = format!("the extent ends behind the end of the file, of {len} bytes when it was indexed");
            return Err(Error::new(ErrorKind::Truncated, Stage::Read, message));
        }
        let needed = self.footprint(extent).bytes;
        if room < needed {
            let message = format!("the buffer is of {room} bytes, the read needs {needed}");
            return Err(Error::new(ErrorKind::Config, Stage::Read, message));
        }
        Ok(())
    }

    /// Where in the data an error happened.
    pub(crate) fn at_site(&self, error: Error, extent: &Extent) -> Error {
        error.with_path(self.sources.path(extent.source)).with_range(extent.offset, extent.len)
    }

    /// Cells of the table, when files stay open.
    pub(crate) fn kept_count(&self) -> Option<usize> {
        self.kept.as_ref().map(|kept| kept.len())
    }

    pub(crate) fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Files and reads for which `O_DIRECT` was refused.
    pub(crate) fn fallbacks(&self) -> u64 {
        self.fallbacks.load(Ordering::Relaxed)
    }

    /// The file if it is open already.
    pub(crate) fn open_already(&self, id: SourceId) -> Option<&File> {
        self.kept.as_ref()?[id.index()].get()
    }

    /// How files of this table are opened.
    pub(crate) fn flags(&self) -> OFlags {
        if self.align > 1 { OPEN_FLAGS | OFlags::DIRECT } else { OPEN_FLAGS }
    }

    /// The file, opened if need be.
    ///
    /// Errors: those of [`Files::adopt`] and [`open_error`].
    pub(crate) fn get(&self, id: SourceId) -> Result<Handle<'_>> {
        if let Some(file) = self.open_already(id) {
            return Ok(Handle::Kept(file));
        }
        let opened = |flags| self.hook.open(id).opened(|| open(&self.sources, id, flags));
        match opened(self.flags()) {
            Err(Errno::INVAL) if self.align > 1 => {
                let fd = opened(OPEN_FLAGS).map_err(|errno| open_error(&self.sources, id, errno))?;
                self.adopt(id, fd, true)
            }
            Err(errno) => Err(open_error(&self.sources, id, errno)),
            Ok(fd) => self.adopt(id, fd, false),
        }
    }

    /// The file if opening it needs no I/O: `None` when it does, or when the kernel cannot tell.
    ///
    /// Errors: as [`Files::get`].
    pub(crate) fn get_cached(&self, id: SourceId) -> Result<Option<Handle<'_>>> {
        if let Some(file) = self.open_already(id) {
            return Ok(Some(Handle::Kept(file)));
        }
        let opened = self.hook.open(id).opened(|| match self.sources.beneath(id) {
            Some((root, name)) => with_cstr(
                |path| path.extend_from_slice(name),
                |name| resolve_beneath::open_cached(root, name, self.flags()),
            ),
            None => with_path(&self.sources, id, |path| {
                rustix::fs::openat2(CWD, path, self.flags(), Mode::empty(), ResolveFlags::CACHED)
            }),
        });
        match opened {
            Ok(fd) => self.adopt(id, fd, false).map(Some),
            Err(Errno::AGAIN) => Ok(None),
            // Before 5.12 (EINVAL), before 5.6 (ENOSYS), or under a seccomp filter (EPERM): a file that stays open may
            // block once; one that is opened for each read is left to the reader.
            Err(Errno::INVAL | Errno::NOSYS | Errno::PERM) => {
                if self.kept.is_some() {
                    self.get(id).map(Some)
                } else {
                    Ok(None)
                }
            }
            Err(errno) => Err(open_error(&self.sources, id, errno)),
        }
    }

    /// Checks what was opened and puts it into the table, if there is one. `buffered`: it was opened without
    /// `O_DIRECT` although the table asks for it.
    ///
    /// Errors: [`ErrorKind::NotAFile`], [`ErrorKind::Changed`] with both lengths.
    pub(crate) fn adopt(&self, id: SourceId, fd: OwnedFd, buffered: bool) -> Result<Handle<'_>> {
        add(&self.opens, 1);
        let site = |error: Error| error.with_path(self.sources.path(id));
        let failed = |errno: Errno| site(Error::os(Stage::Open, "", errno.into()));
        check_regular(&fd, Some(self.sources.len_of(id))).map_err(site)?;
        self.check_identity(id, &fd).map_err(site)?;
        let kept_flags = if self.align > 1 && !buffered { OFlags::DIRECT } else { OFlags::empty() };
        if !self.nonblocking {
            rustix::fs::fcntl_setfl(&fd, kept_flags).map_err(failed)?;
        }
        if buffered {
            add(&self.fallbacks, 1);
        }
        let file = File { fd, buffered: AtomicBool::new(buffered) };
        let Some(kept) = &self.kept else {
            return Ok(Handle::Once(file));
        };
        // Two threads may open the same file at once: the first one's stays, the other's is closed here.
        Ok(Handle::Kept(kept[id.index()].get_or_init(|| file)))
    }

    /// Alignment in bytes of reads of this file.
    pub(crate) fn align_of(&self, file: &File) -> usize {
        if file.buffered.load(Ordering::Relaxed) { 1 } else { self.align }
    }

    /// Turns `O_DIRECT` off for a file whose reads were refused with EINVAL. Reads in flight are not disturbed.
    pub(crate) fn make_buffered(&self, file: &File) {
        // On failure the next read fails with EINVAL again, without `O_DIRECT` to blame: an error then.
        let _ = rustix::fs::fcntl_setfl(&file.fd, OFlags::empty());
        file.buffered.store(true, Ordering::Relaxed);
        add(&self.fallbacks, 1);
    }
}

impl File {
    /// Length in bytes now.
    pub(crate) fn len_now(&self) -> Result<u64, Errno> {
        rustix::fs::fstat(&self.fd).map(|stat| stat.st_size as u64)
    }
}

/// Opens the file of a source: where its path leads, or beneath its root.
pub(crate) fn open(sources: &Sources, id: SourceId, flags: OFlags) -> Result<OwnedFd, Errno> {
    match sources.beneath(id) {
        None => with_path(sources, id, |path| rustix::fs::open(path, flags, Mode::empty())),
        Some((root, name)) => {
            let root = resolve_beneath::root(root)?;
            with_cstr(|path| path.extend_from_slice(name), |name| resolve_beneath::open(root.as_fd(), name, flags))
        }
    }
}

/// Length of what was opened, if it is a regular file, of `indexed` bytes.
pub(super) fn check_regular(fd: &OwnedFd, indexed: Option<u64>) -> Result<u64> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| Error::os(Stage::Open, "", errno.into()))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::RegularFile {
        return Err(Error::new(ErrorKind::NotAFile, Stage::Open, kind_name(kind)));
    }
    let len = stat.st_size as u64;
    match indexed.filter(|indexed| *indexed != len) {
        None => Ok(len),
        Some(indexed) => {
            let message = format!("{len} bytes now, {indexed} when it was indexed");
            Err(Error::new(ErrorKind::Changed, Stage::Open, message))
        }
    }
}

/// Calls `f` with the path of a source; no allocation in steady state.
pub(crate) fn with_path<T>(
    sources: &Sources,
    id: SourceId,
    f: impl FnOnce(&CStr) -> Result<T, Errno>,
) -> Result<T, Errno> {
    with_cstr(|path| sources.path_into(id, path), f)
}

/// Calls `f` with what `write` writes into an empty buffer.
pub(super) fn with_cstr<T>(
    write: impl FnOnce(&mut Vec<u8>),
    f: impl FnOnce(&CStr) -> Result<T, Errno>,
) -> Result<T, Errno> {
    thread_local!(static PATH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
    PATH.with_borrow_mut(|path| {
        path.clear();
        write(path);
        path.push(0);
        // A NUL inside of a path names nothing that exists.
        f(CStr::from_bytes_with_nul(path).map_err(|_| Errno::NOENT)?)
    })
}

const OUTSIDE: &str = "the name comes from a file of the dataset and a symbolic link on its way leads out of the dataset's root: \
                       put the file itself there";

/// The error of a file that could not be opened.
pub(crate) fn open_error(sources: &Sources, id: SourceId, errno: Errno) -> Error {
    unopened(errno, sources.beneath(id).is_some()).with_path(sources.path(id))
}

pub(super) fn unopened(errno: Errno, rooted: bool) -> Error {
    let os = |message: String| Error::os(Stage::Open, message, errno.into());
    let typed = |kind, message: &str| Error::new(kind, Stage::Open, message).with_source(std::io::Error::from(errno));
    match errno {
        Errno::MFILE | Errno::NFILE => {
            let message = format!("too many open files (the soft limit is {}, see `ulimit -n`)", descriptor_limit());
            typed(ErrorKind::Limit, &message)
        }
        Errno::XDEV if rooted => typed(ErrorKind::NotAFile, OUTSIDE),
        Errno::LOOP => typed(ErrorKind::NotAFile, "a loop of symbolic links"),
        Errno::NXIO | Errno::NODEV => typed(ErrorKind::NotAFile, "a socket or device"),
        Errno::NOTDIR => typed(ErrorKind::NotFound, ""),
        _ => os(String::new()),
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a FIFO",
        FileType::Directory => "a folder",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Socket => "a socket",
        _ => "neither file nor folder",
    }
}

/// The soft limit of open files.
pub(crate) fn descriptor_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20)
}

/// What `O_DIRECT` needs on the file systems of a dataset.
#[derive(Debug)]
pub(crate) struct Probe {
    /// The largest alignment, in bytes, of offsets, lengths and memory.
    pub(crate) align: usize,
    /// The first file whose file system refuses it, and how.
    pub(crate) refused: Option<(PathBuf, String)>,
}

/// Asks for the first file of each folder, of at most [`PROBES_MAX`] folders. A file that cannot be opened says nothing
/// here: its error belongs to the read that wants it.
pub(crate) fn probe(sources: &Sources) -> Probe {
    let mut probe = Probe { align: 512, refused: None };
    for id in sources.first_of_dirs(PROBES_MAX) {
        match open(sources, id, OPEN_FLAGS | OFlags::DIRECT).and_then(|fd| direct_align(&fd)) {
            Ok(align) => probe.align = probe.align.max(align),
            Err(Errno::INVAL | Errno::OPNOTSUPP) if probe.refused.is_none() => {
                probe.refused = Some((sources.path(id), "the file system does not support O_DIRECT".to_string()));
            }
            Err(_) => {}
        }
    }
    probe
}

/// Asks which alignment a file needs that was opened with `O_DIRECT`.
fn direct_align(fd: &OwnedFd) -> Result<usize, Errno> {
    // Kernels before 6.1 do not know the question, and seccomp filters may refuse it.
    let Ok(stat) = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(ALIGN_UNKNOWN);
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(ALIGN_UNKNOWN);
    }
    match stat.stx_dio_offset_align.max(stat.stx_dio_mem_align) as usize {
        0 => Err(Errno::OPNOTSUPP),
        align => Ok(align.next_power_of_two()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(budget: u32) -> (Arc<Sources>, Files) {
        let mut sources = Sources::new();
        let path = std::env::current_exe().unwrap();
        sources.file(&path, std::fs::metadata(&path).unwrap().len()).unwrap();
        let sources = Arc::new(sources);
        (sources.clone(), Files::new(sources, 1, Some(budget)))
    }

    #[test]
    fn a_file_within_the_budget_is_opened_once_and_beyond_it_for_each_read() {
        for (budget, opens) in [(1, 1), (0, 3)] {
            let (sources, files) = table(budget);
            let id = sources.ids().next().unwrap();
            (0..3).for_each(|_| drop(files.get(id).unwrap()));
            assert_eq!(files.opens(), opens);
        }
    }

    #[test]
    fn tables_that_share_what_they_have_seen_refuse_a_file_that_took_the_place_of_another() {
        let dir = std::env::temp_dir().join(format!("feedline-seen-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("a.bin");
        std::fs::write(&path, [1; 100]).unwrap();
        let mut sources = Sources::new();
        let id = sources.file(&path, 100).unwrap();
        let sources = Arc::new(sources);
        let shared = seen(&sources, None);
        let table = |budget| Files::new(sources.clone(), 1, Some(budget)).seeing(shared.clone());
        let (first, second, each) = (table(1), table(1), table(0));
        assert!(first.get(id).is_ok() && each.get(id).is_ok());
        std::fs::write(dir.join("b.bin"), [2; 100]).unwrap();
        std::fs::rename(dir.join("b.bin"), &path).unwrap();
        assert!(first.get(id).is_ok(), "it has the old one");
        for later in [second, each] {
            let error = later.get(id).err().unwrap();
            assert_eq!((error.kind(), error.site().path.as_deref()), (ErrorKind::Changed, Some(&*path)));
        }
        assert!(seen(&sources, Some(0)).is_none());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn threads_that_open_the_same_file_at_once_share_one_descriptor() {
        let (sources, files) = table(1);
        let id = sources.ids().next().unwrap();
        let fds: Vec<_> = std::thread::scope(|scope| {
            let open = || match files.get(id).unwrap() {
                Handle::Kept(file) => std::ptr::from_ref(file) as usize,
                Handle::Once(_) => 0,
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(fds.iter().all(|fd| *fd == fds[0] && *fd != 0));
    }

    #[test]
    fn what_o_direct_needs_is_a_power_of_two_or_a_refusal_that_names_the_file() {
        let (sources, _) = table(1);
        let probe = probe(&sources);
        assert!(probe.align.is_power_of_two());
        assert!(probe.refused.is_none_or(|(path, _)| path == std::env::current_exe().unwrap()));
    }

    #[test]
    fn running_out_of_descriptors_names_the_limit() {
        let (sources, _) = table(1);
        let error = open_error(&sources, sources.ids().next().unwrap(), Errno::MFILE);
        assert_eq!(error.kind(), ErrorKind::Limit);
        assert!(error.message().contains("ulimit -n"), "{error}");
    }

    #[test]
    fn an_extent_behind_the_end_is_an_error_before_any_system_call() {
        let (sources, files) = table(1);
        let source = sources.ids().next().unwrap();
        for (offset, len) in [(sources.len_of(source), 1), (u64::MAX, 2)] {
            let error = files.check(&Extent { source, offset, len }, 10).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Truncated);
        }
    }
}
