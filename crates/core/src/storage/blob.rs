//! An open source outside of the reader: its length, its version, positional reads. Indexes,
//! footers and checksums use it.
//!
//! ```text
//! path, URL ─────┐
//! name in a root ├─► Blob: len, version, read_at ──► indexes, footers, checksums, verification, listing of labels
//! SourceId ──────┤    (bulk reads of samples go through the `Reader` of the source's kind)
//! memory ────────┘
//! ```
//!
//! Limits: regular files, objects and memory.
//!
//! Invariants: opening never blocks (a FIFO is an error). [`Blob::fill`] reads nothing past the
//! file's length at open. Memory is allocated only for bytes that the file has. Every error names
//! the path, and the range if it concerns one.

use super::opened::{OPEN_FLAGS, check_regular, open_indexed, unopened, with_cstr};
use super::transient::patiently;
use super::{Way, resolve_beneath};
use crate::storage::{Extent, SourceId, Sources, remote};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{Meta, is_url};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::Mode;
use rustix::io::Errno;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An open file or object, for the reads of an index.
pub struct Blob {
    content: Content,
    path: PathBuf,
    len: u64,
}

enum Content {
    File(std::fs::File),
    Memory(Bytes),
    Object(remote::Object, Meta),
}

/// The bytes of a source, in order, up to its length at open.
pub struct Stream {
    blob: Blob,
    at: u64,
}

impl std::io::Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = (self.blob.len - self.at).min(out.len() as u64) as usize;
        self.blob
            .read_at(self.at, &mut out[..len])
            .map_err(std::io::Error::other)?;
        self.at += len as u64;
        Ok(len)
    }
}

impl Blob {
    /// Opens the regular file or object at a path or URL from the user or a listing. Links are
    /// followed.
    ///
    /// Errors: [`ErrorKind::NotFound`], [`ErrorKind::Permission`], [`ErrorKind::NotAFile`],
    /// [`ErrorKind::Limit`] for too many open files; errors of the store.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        if is_url(&path) {
            let meta = remote::look(&path)?;
            let object = remote::Object::at(&path, meta.len, meta.pin.clone())?;
            let len = meta.len;
            return Ok(Self {
                content: Content::Object(object, meta),
                path,
                len,
            });
        }
        Self::of_fd(
            patiently(|| {
                rustix::fs::open(&path, OPEN_FLAGS, Mode::empty())
                    .map_err(|errno| unopened(errno, false))
            }),
            path,
        )
    }

    /// Opens the regular file `name` beneath `root`; `name` came from a file.
    ///
    /// Errors: those of [`open`](Self::open), and [`ErrorKind::NotAFile`] for a name that leads out
    /// of the root.
    #[doc(hidden)]
    pub fn open_beneath(root: &Path, name: &str) -> Result<Self> {
        if is_url(root) {
            // The key is one name in the bucket, so it cannot lead elsewhere.
            return Self::open(root.join(name));
        }
        let fd = || {
            if !resolve_beneath::is_plain(name.as_bytes()) {
                return Err(Errno::XDEV);
            }
            let root = resolve_beneath::root(root)?;
            with_cstr(
                |path| path.extend_from_slice(name.as_bytes()),
                |name| resolve_beneath::open(root.as_fd(), name, OPEN_FLAGS),
            )
        };
        Self::of_fd(
            patiently(|| fd().map_err(|errno| unopened(errno, true))),
            root.join(name),
        )
    }

    /// Opens a source in the version that was indexed. A source whose name came from a file is
    /// opened beneath its folder.
    ///
    /// Errors: those of [`open_beneath`](Self::open_beneath); [`ErrorKind::Changed`].
    #[doc(hidden)]
    pub fn of_source(sources: &Sources, id: SourceId) -> Result<Self> {
        let len = sources.len_of(id);
        if let Some(bytes) = sources.shared(&Extent {
            source: id,
            offset: 0,
            len,
        }) {
            return Ok(Self {
                content: Content::Memory(bytes),
                path: sources.path(id),
                len,
            });
        }
        if sources.is_remote(id) {
            let object = sources.object(id)?;
            let meta = Meta::of_object(len, sources.pin(id));
            return Ok(Self {
                content: Content::Object(object, meta),
                path: sources.path(id),
                len,
            });
        }
        Self::of_fd(patiently(|| open_indexed(sources, id)), sources.path(id))
    }

    /// Bytes of the process instead of a file.
    #[doc(hidden)]
    pub fn memory(bytes: Bytes) -> Self {
        let len = bytes.len() as u64;
        Self {
            content: Content::Memory(bytes),
            path: "<memory>".into(),
            len,
        }
    }

    /// Makes several walks through an object at the same time: reads the next range of each
    /// [`Way`], and calls `step` with its bytes until `step` returns `false`. A walk ends if a read
    /// fails. Files and memory are not walked.
    pub(crate) fn walk<W: Way>(
        &self,
        ways: Vec<W>,
        step: impl Fn(&mut W, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Vec<W> {
        match &self.content {
            Content::Object(object, _) => object.walk(ways, step),
            Content::File(_) | Content::Memory(_) => ways,
        }
    }

    fn of_fd(fd: Result<OwnedFd>, path: PathBuf) -> Result<Self> {
        match fd.and_then(|fd| Ok((check_regular(&fd)?, fd))) {
            Ok((stat, fd)) => Ok(Self {
                content: Content::File(fd.into()),
                path,
                len: stat.st_size as u64,
            }),
            Err(error) => Err(error.with_path(path)),
        }
    }

    /// Whether each read is a request to a store.
    #[doc(hidden)]
    pub fn is_object(&self) -> bool {
        matches!(self.content, Content::Object(..))
    }

    /// Length in bytes at open.
    #[allow(clippy::len_without_is_empty, reason = "as of a file")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The path, or `<memory>`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes, if they are in memory.
    pub(crate) fn in_memory(&self) -> Option<&Bytes> {
        match &self.content {
            Content::Memory(bytes) => Some(bytes),
            Content::File(_) | Content::Object(..) => None,
        }
    }

    /// Current length and version. Errors: the system's.
    #[doc(hidden)]
    pub fn look(&self) -> Result<Meta> {
        match &self.content {
            Content::Memory(bytes) => Ok(Meta::of_memory(bytes.len())),
            // Every read asks for the version that was opened.
            Content::Object(_, meta) => Ok(meta.clone()),
            Content::File(file) => match file.metadata() {
                Ok(meta) => Ok(Meta::of(&meta)),
                Err(source) => {
                    Err(
                        Error::os(Stage::Index, "cannot read the file's metadata", source)
                            .with_path(&self.path),
                    )
                }
            },
        }
    }

    /// Reads the bytes sequentially, starting at `offset`.
    #[doc(hidden)]
    pub fn stream(self, offset: u64) -> Stream {
        Stream {
            at: offset.min(self.len),
            blob: self,
        }
    }

    /// Fills `out` from `offset` with the current content. Errors: the system's;
    /// [`ErrorKind::Truncated`].
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_as(Stage::Read, "", offset, out)
    }

    fn read_as(&self, stage: Stage, what: &str, offset: u64, out: &mut [u8]) -> Result<()> {
        let len = out.len() as u64;
        let read = match &self.content {
            Content::Object(object, _) => return object.read(offset, out),
            Content::File(file) => {
                return patiently(|| {
                    file.read_exact_at(out, offset)
                        .map_err(|source| self.unread(stage, what, source))
                })
                .map_err(|error| error.with_range(offset, len));
            }
            Content::Memory(bytes) => {
                let start = usize::try_from(offset).ok();
                let found = start.and_then(|start| bytes.get(start..start.checked_add(out.len())?));
                found
                    .map(|found| out.copy_from_slice(found))
                    .ok_or(std::io::ErrorKind::UnexpectedEof.into())
            }
        };
        read.map_err(|source| self.unread(stage, what, source).with_range(offset, len))
    }

    fn unread(&self, stage: Stage, what: &str, source: std::io::Error) -> Error {
        let message = if what.is_empty() {
            String::new()
        } else {
            format!("cannot read {what}")
        };
        Error::os(stage, message, source).with_path(&self.path)
    }

    /// Fills `out` from `offset` for an index. Errors: [`ErrorKind::Truncated`] naming `what` if
    /// the source is too short.
    #[doc(hidden)]
    pub fn fill(&self, offset: u64, out: &mut [u8], what: &str) -> Result<()> {
        self.has(offset, out.len() as u64, what)?;
        self.read_as(Stage::Index, what, offset, out)
    }

    /// Reads `len` bytes from `offset`. The caller has compared `len` with a limit. Errors: those
    /// of [`fill`](Self::fill).
    #[doc(hidden)]
    pub fn read(&self, offset: u64, len: u64, what: &str) -> Result<Vec<u8>> {
        self.has(offset, len, what)?;
        let mut out = vec![0; len as usize];
        self.fill(offset, &mut out, what)?;
        Ok(out)
    }

    /// Reads `N` bytes from `offset`. Errors: those of [`fill`](Self::fill).
    #[doc(hidden)]
    pub fn array<const N: usize>(&self, offset: u64, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(offset, &mut out, what)?;
        Ok(out)
    }

    fn has(&self, offset: u64, len: u64, what: &str) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let message = format!(
            "the file of {} bytes ends before the end of {what}",
            self.len
        );
        Err(self.error(ErrorKind::Truncated, message, offset, len))
    }

    /// Drops the cached metadata of an object whose content is wrong, so that the next open finds a
    /// corrected object.
    #[doc(hidden)]
    pub fn forget(&self) {
        if let Content::Object(object, _) = &self.content {
            object.forget();
        }
    }

    /// An error about `len` bytes at `offset`.
    #[doc(hidden)]
    pub fn error(
        &self,
        kind: ErrorKind,
        message: impl Into<String>,
        offset: u64,
        len: u64,
    ) -> Error {
        self.forget();
        Error::new(kind, Stage::Index, message)
            .with_path(&self.path)
            .with_range(offset, len)
    }

    /// An error for bytes that violate the format.
    #[doc(hidden)]
    pub fn wrong(&self, message: impl Into<String>, offset: u64, len: u64) -> Error {
        self.error(ErrorKind::Decode, message, offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_past_the_end_are_refused_by_name() {
        let blob = Blob::memory(Bytes::from_static(&[1, 2, 3, 4]));
        assert_eq!(blob.array::<2>(2, "the tail").unwrap(), [3, 4]);
        for (offset, len) in [(3, 2), (4, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let error = blob.read(offset, len, "the tail").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Truncated);
            assert!(
                error
                    .message()
                    .contains("the file of 4 bytes ends before the end of the tail"),
                "{error}"
            );
            assert_eq!(
                (error.site().offset, error.site().len),
                (Some(offset), Some(len))
            );
        }
        assert_eq!(
            blob.read_at(3, &mut [0; 2]).unwrap_err().kind(),
            ErrorKind::Truncated
        );
    }

    #[test]
    fn folders_devices_and_missing_files_are_typed_errors() {
        let cases = [
            ("/", ErrorKind::NotAFile),
            ("/dev/null", ErrorKind::NotAFile),
            ("/gone", ErrorKind::NotFound),
        ];
        for (path, kind) in cases {
            let error = Blob::open(path).err().unwrap();
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.site().path.as_deref(), Some(Path::new(path)));
        }
    }
}
