//! Descriptors: which files are open, and how they are opened.
//!
//! If all sources fit the budget, every file stays open once opened, and access takes no lock.
//! Otherwise, as with millions of images, each read opens and closes its file. The budget is a
//! quarter of the soft `RLIMIT_NOFILE` per table, so reader and page cache together leave half of
//! it to the program. The limit itself is never raised, because programs that use `select` rely on
//! it.
//!
//! Opened files are checked in `opened`. If a dataset gave only lengths, files are compared with
//! the reader's first open instead of the index ([`Seen`]).

use super::fault_hook::FaultHook;
use super::fault_point::{Attempt, Call};
use super::progress::{Next, footprint};
use super::reader::has_room;
use crate::Footprint;
use crate::counters::add;
use feedline_base::error::{Error, Result, Stage};
use feedline_base::metadata::Stamp;
use feedline_core::storage::opened::{
    OPEN_FLAGS, check_indexed, check_regular, open, open_error, same_length, with_cstr, with_path,
};
use feedline_core::storage::{Extent, SourceId, Sources, descriptor_limit, resolve_beneath};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Assumed alignment for `O_DIRECT` if the kernel does not report it.
const ALIGN_UNKNOWN: usize = 4096;

/// Maximum number of folders that `probe` checks. Files of one folder are rarely on different file
/// systems.
pub const PROBES_MAX: usize = 64;

/// The descriptor table of a reader.
pub struct Files {
    sources: Arc<Sources>,
    /// Alignment of reads in bytes; 1 means that files are opened without `O_DIRECT`.
    align: usize,
    /// One cell per source; `None` if there are too many sources.
    kept: Option<Box<[OnceLock<File>]>>,
    opens: AtomicU64,
    fallbacks: AtomicU64,
    hook: FaultHook,
    /// Whether files keep `O_NONBLOCK` after the open.
    nonblocking: bool,
    /// Shared by all tables of a reader.
    seen: Option<Seen>,
}

/// The stamps of files that have none in the index, from their first open. The tables of one reader
/// share them.
pub type Seen = Arc<[OnceLock<Stamp>]>;

/// No stamps so far, for all sources. `None` if the index has the versions of all files, so that no
/// stamps are needed.
pub fn seen(sources: &Sources) -> Option<Seen> {
    sources
        .has_unseen()
        .then(|| (0..sources.count()).map(|_| OnceLock::new()).collect())
}

fn keeps(sources: &Sources, budget: Option<u32>) -> bool {
    sources.count() as u64 <= budget.map_or_else(|| descriptor_limit() / 4, u64::from)
}

/// An open regular file of the right length.
pub struct File {
    fd: OwnedFd,
    /// `O_DIRECT` was refused or cleared.
    buffered: AtomicBool,
}

/// An open file, kept in the table or closed when dropped.
pub enum Handle<'a> {
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
    /// A table for `sources` with at most `budget` descriptors (`None`: a quarter of the soft
    /// limit).
    pub fn new(sources: Arc<Sources>, align: usize, budget: Option<u32>) -> Self {
        let kept = keeps(&sources, budget).then(|| {
            (0..sources.count())
                .map(|_| OnceLock::new())
                .collect::<Box<[_]>>()
        });
        let hook: FaultHook = Default::default();
        let opens = AtomicU64::new(0);
        let fallbacks = AtomicU64::new(0);
        Self {
            sources,
            align,
            kept,
            opens,
            fallbacks,
            hook,
            nonblocking: false,
            seen: None,
        }
    }

    /// The same table, with opens and reads through `hook`. Each file must be the one that was
    /// opened first, according to `seen`.
    pub fn through(self, hook: FaultHook, seen: Option<Seen>) -> Self {
        Self { hook, seen, ..self }
    }

    /// Another table of these files.
    pub(crate) fn another(&self, align: usize, budget: Option<u32>) -> Self {
        Self::new(self.sources.clone(), align, budget).through(self.hook.clone(), self.seen.clone())
    }

    /// The same table, but `O_NONBLOCK` stays set after the open. On regular files the flag affects
    /// only io_uring, which must not read these.
    pub(crate) fn nonblocking(self) -> Self {
        Self {
            nonblocking: true,
            ..self
        }
    }

    /// Checks an opened file.
    fn check_opened(&self, id: SourceId, fd: &OwnedFd) -> Result<()> {
        if self.is_of_cache(id) {
            // A cache never reuses a file name, so only the length is compared.
            let stat = check_regular(fd)?;
            return same_length(&stat, self.sources.len_of(id));
        }
        check_indexed(
            &self.sources,
            id,
            fd,
            self.seen.as_ref().map(|seen| &seen[id.index()]),
        )
        .map(drop)
    }

    /// Whether this table opens a cache's file for the source.
    fn is_of_cache(&self, id: SourceId) -> bool {
        self.sources.has_cache() && self.sources.is_staged(id)
    }

    pub(crate) fn fault_hook(&self) -> &FaultHook {
        &self.hook
    }

    /// An attempt to read `next` of an extent.
    pub(super) fn attempt(&self, call: Call, extent: &Extent, next: Next, align: usize) -> Attempt {
        Attempt {
            call,
            extent: *extent,
            next,
            align,
            there: 0..self.sources.len_of(extent.source),
        }
    }

    pub fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    /// Alignment in bytes of reads; 1 without `O_DIRECT`.
    pub fn align(&self) -> usize {
        self.align
    }

    /// The requirements of a read. Bytes of a memory source are copied without alignment.
    pub(crate) fn footprint(&self, extent: &Extent) -> Footprint {
        let align = if self.sources.bytes_of(extent.source).is_some() {
            1
        } else {
            self.align
        };
        footprint(extent, align)
    }

    /// Checks an extent before any system call.
    ///
    /// Errors: [`ErrorKind::Truncated`] for an extent past the end, [`ErrorKind::Config`] for a
    /// buffer too small.
    pub(crate) fn check(&self, extent: &Extent, room: usize) -> Result<()> {
        self.sources.check(extent)?;
        has_room(room, self.footprint(extent).bytes)
    }

    /// Number of cells in the table, if files stay open.
    pub(crate) fn kept_count(&self) -> Option<usize> {
        self.kept.as_ref().map(|kept| kept.len())
    }

    pub(crate) fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Number of files and reads for which `O_DIRECT` was refused.
    pub(crate) fn fallbacks(&self) -> u64 {
        self.fallbacks.load(Ordering::Relaxed)
    }

    /// The file, if it is already open.
    pub(crate) fn open_already(&self, id: SourceId) -> Option<&File> {
        self.kept.as_ref()?[id.index()].get()
    }

    /// The flags with which this table opens files.
    pub(crate) fn flags(&self) -> OFlags {
        if self.align > 1 {
            OPEN_FLAGS | OFlags::DIRECT
        } else {
            OPEN_FLAGS
        }
    }

    /// The file, opened if necessary.
    ///
    /// Errors: those of [`Files::adopt`] and [`open_error`].
    pub fn get(&self, id: SourceId) -> Result<Handle<'_>> {
        if let Some(file) = self.open_already(id) {
            return Ok(Handle::Kept(file));
        }
        let opened = |flags| self.hook.open(id).opened(|| open(&self.sources, id, flags));
        match opened(self.flags()) {
            Err(Errno::INVAL) if self.align > 1 => {
                let fd =
                    opened(OPEN_FLAGS).map_err(|errno| open_error(&self.sources, id, errno))?;
                self.adopt(id, fd, true)
            }
            Err(errno) => Err(open_error(&self.sources, id, errno)),
            Ok(fd) => self.adopt(id, fd, false),
        }
    }

    /// The file, if opening it needs no I/O; `None` if it does, or if the kernel cannot tell.
    ///
    /// Errors: those of [`Files::get`].
    pub(crate) fn get_cached(&self, id: SourceId) -> Result<Option<Handle<'_>>> {
        if let Some(file) = self.open_already(id) {
            return Ok(Some(Handle::Kept(file)));
        }
        let opened = self
            .hook
            .open(id)
            .opened(|| match self.sources.beneath(id) {
                Some((root, name)) => with_cstr(
                    |path| path.extend_from_slice(name),
                    |name| resolve_beneath::open_cached(root, name, self.flags()),
                ),
                None => with_path(&self.sources, id, |path| {
                    rustix::fs::openat2(
                        CWD,
                        path,
                        self.flags(),
                        Mode::empty(),
                        ResolveFlags::CACHED,
                    )
                }),
            });
        match opened {
            Ok(fd) => self.adopt(id, fd, false).map(Some),
            Err(Errno::AGAIN) => Ok(None),
            // Before 5.12 (EINVAL), before 5.6 (ENOSYS), or under a seccomp filter (EPERM). Opening
            // a file that stays open may block once. A file that is opened for each read is left to
            // the reader.
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

    /// Checks an opened file and puts it into the table, if there is one. `buffered`: the file was
    /// opened without `O_DIRECT` although the table asks for it.
    ///
    /// Errors: [`ErrorKind::NotAFile`], [`ErrorKind::Changed`] with both lengths.
    pub(crate) fn adopt(&self, id: SourceId, fd: OwnedFd, buffered: bool) -> Result<Handle<'_>> {
        add(&self.opens, 1);
        let site = |error: Error| error.with_path(self.sources.path(id));
        self.check_opened(id, &fd).map_err(site)?;
        let kept_flags = if self.align > 1 && !buffered {
            OFlags::DIRECT
        } else {
            OFlags::empty()
        };
        if !self.nonblocking {
            rustix::fs::fcntl_setfl(&fd, kept_flags)
                .map_err(|errno| site(Error::os(Stage::Open, "", errno.into())))?;
        }
        if buffered {
            add(&self.fallbacks, 1);
        }
        let file = File {
            fd,
            buffered: AtomicBool::new(buffered),
        };
        let Some(kept) = &self.kept else {
            return Ok(Handle::Once(file));
        };
        // Two threads may open the same file at once. The first one stays; the other is closed
        // here.
        Ok(Handle::Kept(kept[id.index()].get_or_init(|| file)))
    }

    /// Alignment in bytes of reads of this file.
    pub(crate) fn align_of(&self, file: &File) -> usize {
        if file.buffered.load(Ordering::Relaxed) {
            1
        } else {
            self.align
        }
    }

    /// Turns `O_DIRECT` off for a file whose reads were refused with EINVAL. Reads in flight are
    /// not disturbed.
    pub(crate) fn make_buffered(&self, file: &File) {
        // If this fails, the next read fails with EINVAL again. Then `O_DIRECT` is not the cause,
        // and the read fails.
        let _ = rustix::fs::fcntl_setfl(&file.fd, OFlags::empty());
        file.buffered.store(true, Ordering::Relaxed);
        add(&self.fallbacks, 1);
    }
}

impl File {
    /// Current length in bytes.
    pub fn len_now(&self) -> Result<u64, Errno> {
        rustix::fs::fstat(&self.fd).map(|stat| stat.st_size as u64)
    }
}

/// The requirements of `O_DIRECT` on the file systems of a dataset.
#[derive(Debug)]
pub struct Probe {
    /// The largest alignment, in bytes, of offsets, lengths and memory.
    pub align: usize,
    /// The first file whose file system refuses it, with the reason.
    pub refused: Option<(PathBuf, String)>,
}

/// Probes the first file of each folder, in at most [`PROBES_MAX`] folders. A file that cannot be
/// opened is skipped: its error belongs to the read that needs it.
pub fn probe(sources: &Sources) -> Probe {
    // The files of a cache do not exist yet.
    let mut probe = Probe {
        align: if sources.has_cache() {
            ALIGN_UNKNOWN
        } else {
            512
        },
        refused: None,
    };
    for id in sources.first_of_dirs(PROBES_MAX) {
        match open(sources, id, OPEN_FLAGS | OFlags::DIRECT).and_then(|fd| direct_align(&fd)) {
            Ok(align) => probe.align = probe.align.max(align),
            Err(Errno::INVAL | Errno::OPNOTSUPP) if probe.refused.is_none() => {
                probe.refused = Some((
                    sources.path(id),
                    "the file system does not support O_DIRECT".to_string(),
                ));
            }
            Err(_) => {}
        }
    }
    probe
}

/// The alignment that a file opened with `O_DIRECT` needs.
fn direct_align(fd: &OwnedFd) -> Result<usize, Errno> {
    // Kernels before 6.1 do not know the query, and seccomp filters may refuse it.
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
    use feedline_base::error::ErrorKind;
    use feedline_core::storage::opened::open_indexed;
    use std::fs::{OpenOptions, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    fn table(budget: u32) -> (Arc<Sources>, Files) {
        let mut sources = Sources::new();
        let path = std::env::current_exe().unwrap();
        sources
            .file(&path, std::fs::metadata(&path).unwrap().len())
            .unwrap();
        let sources = Arc::new(sources);
        (sources.clone(), Files::new(sources, 1, Some(budget)))
    }

    #[test]
    fn a_file_stays_open_within_the_budget_only() {
        for (budget, opens) in [(1, 1), (0, 3)] {
            let (sources, files) = table(budget);
            let id = sources.ids().next().unwrap();
            (0..3).for_each(|_| drop(files.get(id).unwrap()));
            assert_eq!(files.opens(), opens);
        }
    }

    /// What happens to a file between two opens, and whether it is still the same one.
    type Change = (&'static str, bool, fn(&Path, SystemTime));

    const CHANGES: [Change; 8] = [
        ("nothing", true, |_, _| {}),
        ("other rights", true, |path, _| {
            std::fs::set_permissions(path, Permissions::from_mode(0o640)).unwrap()
        }),
        ("a second name", true, |path, _| {
            std::fs::hard_link(path, path.with_extension("link")).unwrap()
        }),
        ("cut", false, |path, _| {
            OpenOptions::new()
                .write(true)
                .open(path)
                .unwrap()
                .set_len(50)
                .unwrap()
        }),
        ("grown", false, |path, _| {
            OpenOptions::new()
                .write(true)
                .open(path)
                .unwrap()
                .set_len(150)
                .unwrap()
        }),
        ("written in place", false, |path, _| {
            std::fs::write(path, [2; 100]).unwrap()
        }),
        ("replaced", false, |path, _| replace(path)),
        ("replaced, with the old time", false, |path, time| {
            replace(path);
            OpenOptions::new()
                .write(true)
                .open(path)
                .unwrap()
                .set_modified(time)
                .unwrap();
        }),
    ];

    fn replace(path: &Path) {
        std::fs::write(path.with_extension("new"), [3; 100]).unwrap();
        std::fs::rename(path.with_extension("new"), path).unwrap();
    }

    #[test]
    fn every_open_after_a_change_names_both_versions_or_finds_the_same_file() {
        let dir = std::env::temp_dir().join(format!("feedline-seen-{}", std::process::id()));
        for (what, same, change) in CHANGES {
            for tells_version in [true, false] {
                std::fs::create_dir_all(&dir).unwrap();
                let path = dir.join("a.bin");
                std::fs::write(&path, [1; 100]).unwrap();
                // A file system's clock may stand still for some milliseconds.
                let time = SystemTime::now() - Duration::from_secs(60);
                OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .unwrap()
                    .set_modified(time)
                    .unwrap();
                let mut sources = Sources::new();
                let id = if tells_version {
                    sources.look_up(&path)
                } else {
                    sources.file(&path, 100)
                }
                .unwrap();
                let sources = Arc::new(sources);
                let shared = seen(&sources);
                assert_eq!(shared.is_some(), !tells_version);
                let table = |budget| {
                    Files::new(sources.clone(), 1, Some(budget))
                        .through(FaultHook::default(), shared.clone())
                };
                let first = table(1);
                first.get(id).unwrap();
                change(&path, time);
                assert!(first.get(id).is_ok(), "{what}: an open file stays open");
                let mut opened = vec![table(1).get(id).err(), table(0).get(id).err()];
                opened.extend(tells_version.then(|| open_indexed(&sources, id).err()));
                for error in opened {
                    assert_eq!(error.is_none(), same, "{what}: {error:?}");
                    let Some(error) = error else { continue };
                    assert_eq!(
                        (error.kind(), error.site().path.as_deref()),
                        (ErrorKind::Changed, Some(&*path))
                    );
                    let words = if ["cut", "grown"].contains(&what) {
                        "100 when it was indexed"
                    } else {
                        "UTC"
                    };
                    assert!(
                        error.message().contains(words)
                            && error.message().contains("reopen the dataset"),
                        "{error}"
                    );
                }
                std::fs::remove_dir_all(&dir).unwrap();
            }
        }
    }

    #[test]
    fn threads_that_open_one_file_at_once_share_a_descriptor() {
        let (sources, files) = table(1);
        let id = sources.ids().next().unwrap();
        let fds: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| match files.get(id).unwrap() {
                        Handle::Kept(file) => std::ptr::from_ref(file) as usize,
                        Handle::Once(_) => 0,
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(fds.iter().all(|fd| *fd == fds[0] && *fd != 0));
    }

    #[test]
    fn o_direct_alignment_is_a_power_of_two_or_a_named_refusal() {
        let (sources, _) = table(1);
        let probe = probe(&sources);
        assert!(probe.align.is_power_of_two());
        assert!(
            probe
                .refused
                .is_none_or(|(path, _)| path == std::env::current_exe().unwrap())
        );
    }

    #[test]
    fn running_out_of_descriptors_names_the_limit() {
        let (sources, _) = table(1);
        let error = open_error(&sources, sources.ids().next().unwrap(), Errno::MFILE);
        assert_eq!(error.kind(), ErrorKind::Limit);
        assert!(error.message().contains("ulimit -n"), "{error}");
    }

    #[test]
    fn an_extent_past_the_end_fails_before_any_system_call() {
        let (sources, files) = table(1);
        let source = sources.ids().next().unwrap();
        for (offset, len) in [(sources.len_of(source), 1), (u64::MAX, 2)] {
            let error = files
                .check(
                    &Extent {
                        source,
                        offset,
                        len,
                    },
                    10,
                )
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Truncated);
        }
    }
}
