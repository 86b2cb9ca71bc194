//! Where a cache's blocks come from: an object of a store, or a file on a network mount. Each task
//! opens it anew.
//!
//! A file's version is its inode and the times of its last changes, in nanoseconds; its name is its
//! canonical path. Every open and every block compares the version with the one that the loader
//! found first:
//!
//! * Another length, inode or modification time: the file was written or replaced, and its reads
//!   fail ([`ErrorKind::Changed`]).
//! * Only another change time, as after `chmod`: the bytes may have changed or not, so nothing more
//!   is read from the cache.
//! * A file that was just written is not kept yet: a second write may leave its times unchanged. A
//!   file with a time in the future is never kept.

use super::entry::Identity;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::Version;
use feedline_base::meter::NetworkMeter as Meter;
use feedline_core::storage::mounts::{Mount, Mounts};
use feedline_core::storage::opened::open_indexed;
use feedline_core::storage::{SourceId, Sources, remote};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Bytes per read call. Between two calls, a thread checks whether the loader ends.
const PIECE: usize = 1 << 20;

/// A file younger than this is not kept yet. Some stores behind mounts have times in whole seconds.
const YOUNG: Duration = Duration::from_secs(2);

/// The result of opening a source.
pub(super) enum FoundUpstream {
    Open(Upstream),
    /// The source is never kept. Holds the reason, if it is worth reporting.
    Never(Option<&'static str>),
    /// The source is not kept yet, for this reason.
    Later(&'static str),
}

pub(super) enum Upstream {
    Object(remote::Object, Arc<str>),
    File(StagedFile),
}

/// An open file on a mount.
pub(super) struct StagedFile {
    file: File,
    /// Canonical path.
    path: PathBuf,
    version: Version,
    mount: &'static Mount,
}

impl Upstream {
    /// `known`: the loader has found it before. `meter` counts the requests to stores. Errors:
    /// those of a read, without path and range.
    pub(super) fn open(
        sources: &Sources,
        source: SourceId,
        known: bool,
        mounts: &Mounts,
        meter: &Arc<Meter>,
    ) -> Result<FoundUpstream> {
        if !sources.is_remote(source) {
            return StagedFile::open(sources, source, known, mounts);
        }
        let object = sources.object(source).map(|object| object.metered(meter))?;
        Ok(match sources.pin(source).filter(|_| object.is_pinned()) {
            Some(pin) => FoundUpstream::Open(Self::Object(object, pin)),
            None => FoundUpstream::Never(Some("the store names no version")),
        })
    }

    /// The version of a file.
    pub(super) fn version(&self) -> Option<Version> {
        match self {
            Self::Object(..) => None,
            Self::File(file) => Some(file.version),
        }
    }

    /// The source's URL or canonical path. A file of the Hub keeps its name in other commits.
    pub(super) fn name(&self, sources: &Sources, source: SourceId) -> PathBuf {
        match self {
            Self::Object(..) => remote::without_revision(sources.path(source)),
            Self::File(file) => file.path.clone(),
        }
    }

    /// The header of the source's entry in the cache; `None` if its name is too long for a header.
    pub(super) fn identity(
        &self,
        sources: &Sources,
        source: SourceId,
        block: u64,
    ) -> Option<Identity> {
        let name = self.name(sources, source);
        let len = sources.len_of(source);
        let name = name.as_os_str().as_bytes();
        match self {
            Self::Object(_, pin) => Identity::new(name, pin, len, block),
            Self::File(file) => Identity::new(name, &file.version.to_string(), len, block),
        }
    }

    /// Reads the bytes of a range.
    pub(super) fn bring(
        self,
        range: Range<u64>,
        patience: Option<Duration>,
        buffer: Vec<u8>,
        stop: &AtomicBool,
    ) -> Result<Vec<u8>> {
        match self {
            Self::Object(object, _) => object.bring(range, patience, buffer, stop),
            Self::File(file) => file.bring(range, buffer, stop),
        }
    }
}

impl StagedFile {
    fn open(
        sources: &Sources,
        source: SourceId,
        known: bool,
        mounts: &Mounts,
    ) -> Result<FoundUpstream> {
        let file = File::from(open_indexed(sources, source)?);
        let at = |error| Error::os(Stage::Open, "", error);
        let meta = file.metadata().map_err(at)?;
        // The kernel's name for the open file costs no request to a server.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let path = link
            .or_else(|_| sources.path(source).canonicalize())
            .map_err(at)?;
        let Some(mount) = mounts.of(&path, meta.dev()) else {
            return Ok(FoundUpstream::Never(None));
        };
        match SystemTime::now().duration_since(meta.modified().map_err(at)?) {
            // The caller compares its version.
            _ if known => {}
            Ok(age) if age < YOUNG => {
                return Ok(FoundUpstream::Later("a file was written just now"));
            }
            Ok(_) => {}
            // If the server's clock is ahead, the file may have been written just now.
            Err(_) => {
                return Ok(FoundUpstream::Never(Some(
                    "a file's modification time is in the future",
                )));
            }
        }
        let version = Version::of(&meta, mount.keeps_inodes);
        Ok(FoundUpstream::Open(Upstream::File(Self {
            file,
            path,
            version,
            mount,
        })))
    }

    fn bring(self, range: Range<u64>, mut buffer: Vec<u8>, stop: &AtomicBool) -> Result<Vec<u8>> {
        buffer.resize((range.end - range.start) as usize, 0);
        let mut read = Ok(());
        for (piece, number) in buffer.chunks_mut(PIECE).zip(0..) {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Cancelled, Stage::Read, ""));
            }
            read = self
                .file
                .read_exact_at(piece, range.start + number * PIECE as u64);
            if read.is_err() {
                break;
            }
        }
        let at = |error| Error::os(Stage::Read, "", error);
        let now = self.file.metadata().map_err(at)?;
        // A read of a file that became shorter fails, too.
        let now = Version::of(&now, self.mount.keeps_inodes);
        compare(self.version, now).and_then(|same| match same {
            true => read.map(|()| buffer).map_err(at),
            false => Err(Error::new(ErrorKind::Io, Stage::Read, TOUCHED)),
        })
    }
}

pub(super) const TOUCHED: &str = "a file's attributes changed";

/// Whether a file is unchanged since `first`; false if it is unclear whether its bytes changed.
/// Errors: [`ErrorKind::Changed`].
pub(super) fn compare(first: Version, now: Version) -> Result<bool> {
    if first.is_same_content(now) {
        return Ok(first == now);
    }
    let message = "the file was written or replaced since this loader first read it";
    Err(Error::new(ErrorKind::Changed, Stage::Read, message))
}
