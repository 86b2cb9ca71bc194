//! One error type for the whole crate.
//!
//! [`ErrorKind`] is for programs to match on, [`Site`] tells people where in the data the error is,
//! and `source()` keeps the operating system's or decoder's own error. The one-line rendering is
//! part of the contract, and tests assert it:
//!
//! ```text
//! read: truncated: 4096 bytes expected, 1000 read: path=/data/a.bin offset=8192 len=4096 sample=2 batch=0: <source>
//! ```

use crate::secret::hidden;
use std::borrow::Cow;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of an error, for programs to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting or argument is illegal; nothing was started.
    Config,
    /// This machine lacks what a setting asks for: io_uring, `O_DIRECT` on this file system, a
    /// direct route of cuFile, a NUMA node.
    Unsupported,
    /// The budget, or the free memory, is too small for the smallest legal plan or for data kept in
    /// memory. The message lists the terms of the plan.
    Budget,
    /// A file or folder does not exist, or no longer exists.
    NotFound,
    /// The operating system refused access.
    Permission,
    /// A path is a FIFO, socket, device or folder instead of a regular file, or escapes the
    /// dataset's root.
    NotAFile,
    /// Nothing to read: no samples, no classes, an empty file.
    Empty,
    /// A file ends before the length in its index.
    Truncated,
    /// A file has changed since it was indexed (its size differs).
    Changed,
    /// The dataset differs from the one that the run started with.
    FingerprintMismatch,
    /// A saved state is damaged, has another version, differs from other ranks' states, or needs
    /// other settings.
    State,
    /// The device or file system reported an error.
    Io,
    /// The decoder cannot decode the bytes.
    Decode,
    /// A limit (pixels, bytes, entries) was exceeded; checked before memory is allocated.
    Limit,
    /// A shape, length or dtype does not fit the declared field.
    Shape,
    /// User code returned an error.
    User,
    /// User code or a third-party decoder panicked.
    Panicked,
    /// Another epoch of the same loader is still alive.
    EpochLive,
    /// The caller holds every batch slot, so no further batch can be filled.
    BatchesHeld,
    /// An operation did not complete within its deadline.
    Stalled,
    /// More samples failed than the budget of substitutes allows; the message lists them.
    BadSamples,
    /// The device backend is not usable here.
    Device,
    /// The loader or epoch was shut down.
    Cancelled,
    /// The process was forked after the loader was built; a child must build its own loader.
    Forked,
}

impl ErrorKind {
    /// The text in renderings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Config => "bad configuration",
            Self::Unsupported => "not possible on this machine",
            Self::Budget => "memory budget too small",
            Self::NotFound => "not found",
            Self::Permission => "permission denied",
            Self::NotAFile => "not a regular file",
            Self::Empty => "empty",
            Self::Truncated => "truncated",
            Self::Changed => "changed since it was indexed",
            Self::FingerprintMismatch => "dataset changed",
            Self::State => "state not usable",
            Self::Io => "I/O error",
            Self::Decode => "cannot decode",
            Self::Limit => "over the limit",
            Self::Shape => "shape mismatch",
            Self::User => "user code failed",
            Self::Panicked => "panicked",
            Self::EpochLive => "another epoch is alive",
            Self::BatchesHeld => "every batch is held",
            Self::Stalled => "stalled",
            Self::BadSamples => "too many bad samples",
            Self::Device => "device not usable",
            Self::Cancelled => "cancelled",
            Self::Forked => "forked",
        }
    }
}

/// Runs another crate's decoder or parser, which may panic on hostile bytes. (It is trusted to be
/// sound.)
///
/// Errors: those of `work`; [`ErrorKind::Panicked`] with `what` and the panic's message.
pub fn guarded<T>(what: &str, stage: Stage, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let error = panicked(panic, stage);
        Err(Error::new(
            ErrorKind::Panicked,
            stage,
            format!("a library panicked on {what}: {}", error.message()),
        ))
    })
}

/// Runs the user's code, which may panic.
///
/// Errors: those of `work`; [`ErrorKind::Panicked`] with the panic's message.
pub fn caught<T>(stage: Stage, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(panic, stage)))
}

/// Like [`caught`], but a panic's message begins with `who`, such as "the sampler".
pub fn caught_in<T>(who: &str, stage: Stage, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(panicked(panic, stage).within(who)))
}

/// The error for a caught panic, with its message.
pub fn panicked(panic: Box<dyn std::any::Any + Send>, stage: Stage) -> Error {
    let message = panic.downcast_ref::<&str>().copied();
    let message = message
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let message: String = message
        .chars()
        .take(200)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    // The panic's payload is the user's as well, and may panic when it is dropped.
    if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(panic))) {
        std::mem::forget(again);
    }
    Error::new(ErrorKind::Panicked, stage, message)
}

/// An error for an illegal setting.
pub fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}

/// The error with the lowest number among several, so that the result does not depend on the
/// threads' timing.
#[derive(Default)]
pub struct Lowest(Option<(u32, Error)>);

impl Lowest {
    pub fn note(&mut self, number: u32, error: Error) {
        if self.0.as_ref().is_none_or(|(lowest, _)| number < *lowest) {
            self.0 = Some((number, error));
        }
    }

    pub fn number(&self) -> Option<u32> {
        self.0.as_ref().map(|(number, _)| *number)
    }

    pub fn error(&self) -> Option<&Error> {
        self.0.as_ref().map(|(_, error)| error)
    }

    pub fn take(&mut self) -> Option<Error> {
        self.0.take().map(|(_, error)| error)
    }
}

/// The stage of a sample's processing at which an error happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// Checking the settings and reserving memory.
    Build,
    /// Listing the dataset and measuring its samples.
    Index,
    /// Choosing the samples of a batch.
    Order,
    /// Opening a source.
    Open,
    /// Reading bytes from storage.
    Read,
    /// Decoding bytes into rows.
    Decode,
    /// The user's transform.
    Map,
    /// Delivering batches.
    Batch,
    /// Copying to the device.
    Device,
    /// Writing prepared data.
    Write,
    /// Saving, loading or comparing the state of a run.
    State,
}

impl Stage {
    /// The word in renderings and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Build => "build",
            Self::Index => "index",
            Self::Order => "order",
            Self::Open => "open",
            Self::Read => "read",
            Self::Decode => "decode",
            Self::Map => "map",
            Self::Batch => "batch",
            Self::Device => "device",
            Self::Write => "write",
            Self::State => "state",
        }
    }
}

/// Place in the data; unknown parts are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Site {
    /// File or folder.
    pub path: Option<PathBuf>,
    /// Name of the sample within the file: a member of a tar.
    pub member: Option<String>,
    /// Field of the dataset, if it has several.
    pub field: Option<String>,
    /// Byte offset in the file.
    pub offset: Option<u64>,
    /// Number of requested bytes.
    pub len: Option<u64>,
    /// Sample id: index in the dataset.
    pub sample: Option<u64>,
    /// Batch index in the epoch.
    pub batch: Option<u64>,
}

/// The amounts that an error compares.
///
/// | kind | `need` | `have` |
/// |---|---|---|
/// | [`Budget`](ErrorKind::Budget) | bytes | bytes that are free or allowed |
/// | [`Limit`](ErrorKind::Limit) | the amount that is too large | the limit, in the same unit |
/// | [`BatchesHeld`](ErrorKind::BatchesHeld) | the held batches and one more | batches of the loader |
/// | [`BadSamples`](ErrorKind::BadSamples) | bad samples | allowed bad samples |
/// | [`Truncated`](ErrorKind::Truncated) | bytes of the read | available bytes |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amounts {
    /// The amount that was needed.
    pub need: u64,
    /// The available or allowed amount.
    pub have: u64,
}

/// An error: kind, stage, site, amounts, message and source. One pointer wide.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    stage: Stage,
    message: String,
    site: Site,
    amounts: Option<Amounts>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error with a message; add the site with the `with_` methods.
    pub fn new(kind: ErrorKind, stage: Stage, message: impl Into<String>) -> Self {
        let message = shown(message.into());
        Self(Box::new(Inner {
            kind,
            stage,
            message,
            site: Site::default(),
            amounts: None,
            source: None,
        }))
    }

    /// An operating-system error, which determines the kind (`ENOENT` is [`ErrorKind::NotFound`],
    /// for example).
    pub fn os(stage: Stage, message: impl Into<String>, source: std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::PermissionDenied => ErrorKind::Permission,
            std::io::ErrorKind::UnexpectedEof => ErrorKind::Truncated,
            std::io::ErrorKind::IsADirectory => ErrorKind::NotAFile,
            _ => ErrorKind::Io,
        };
        Self::new(kind, stage, message).with_source(source)
    }

    /// An error of a transform, decoder, dataset or sampler outside this crate. The loader sets the
    /// stage at which it ran.
    ///
    /// For a file that cannot be opened use [`Error::os`], for bytes that cannot be decoded
    /// [`Error::decode`].
    pub fn user(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::User, Stage::Map, message)
    }

    /// An error for undecodable bytes, for decoders outside this crate.
    pub fn decode(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Decode, Stage::Decode, message)
    }

    /// The JPEG decoder's error for `input`. The site of a truncated input is the input's end.
    #[doc(hidden)]
    pub fn of_jpeg(error: feedline_jpeg::Error, input: &[u8]) -> Self {
        let kind = match error.kind() {
            feedline_jpeg::ErrorKind::Truncated => ErrorKind::Truncated,
            feedline_jpeg::ErrorKind::Limit => ErrorKind::Limit,
            _ => ErrorKind::Decode,
        };
        let is_cut = kind == ErrorKind::Truncated;
        let error = Self::new(kind, Stage::Decode, error.message());
        if is_cut {
            error.with_range(input.len() as u64, 0)
        } else {
            error
        }
    }

    /// Adds the amounts that the error compares.
    #[doc(hidden)]
    #[must_use]
    pub fn with_amounts(mut self, need: u64, have: u64) -> Self {
        self.0.amounts = Some(Amounts { need, have });
        self
    }

    /// Adds the underlying error.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Adds the path, unless the error has one. An offset of an error with a path counts from the
    /// start of the file; without a path, the loader adds the offset of the bytes that it passed.
    #[must_use]
    pub fn with_path(mut self, path: impl AsRef<Path>) -> Self {
        self.0
            .site
            .path
            .get_or_insert_with(|| match hidden(&path.as_ref().to_string_lossy()) {
                Cow::Owned(safe) => safe.into(),
                Cow::Borrowed(_) => path.as_ref().to_path_buf(),
            });
        self
    }

    /// Adds the sample's name within its file, unless the error has one.
    #[must_use]
    pub fn with_member(mut self, member: impl Into<String>) -> Self {
        self.0.site.member.get_or_insert_with(|| member.into());
        self
    }

    /// Adds the name of the dataset's field, unless the error has one.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.0.site.field.get_or_insert_with(|| field.into());
        self
    }

    /// Sets the stage at which the failing code ran. This is for errors of user code, and of
    /// methods of a row or batch.
    #[doc(hidden)]
    pub fn in_stage(mut self, stage: Stage) -> Self {
        if self.0.kind == ErrorKind::User || self.0.stage == Stage::Batch {
            self.0.stage = stage;
        }
        self
    }

    /// Adds offset and length in bytes, unless the error has them. A decoder gives an offset in its
    /// own bytes; the loader adds the offset of these bytes in the file.
    #[must_use]
    pub fn with_range(mut self, offset: u64, len: u64) -> Self {
        self.0.site.offset.get_or_insert(offset);
        self.0.site.len.get_or_insert(len);
        self
    }

    /// Shifts a range that a decoder gave relative to its own bytes. `offset` is the offset of
    /// these bytes in the file.
    #[doc(hidden)]
    pub fn moved(mut self, offset: u64) -> Self {
        if let (None, Some(within)) = (&self.0.site.path, &mut self.0.site.offset) {
            *within = within.saturating_add(offset);
        }
        self
    }

    /// Moves a decoder's range into the message: unpacked bytes have no offset in the file.
    #[doc(hidden)]
    pub fn with_range_in_words(mut self) -> Self {
        let site = &mut self.0.site;
        if let (None, Some(offset)) = (&site.path, site.offset.take()) {
            site.len = None;
            return self.with_note(&format!("at byte {offset} of the unpacked field"));
        }
        self
    }

    /// Adds the sample id, unless the error has one.
    #[must_use]
    pub fn with_sample(mut self, sample: u64) -> Self {
        self.0.site.sample.get_or_insert(sample);
        self
    }

    /// Adds the batch index, unless the error has one.
    #[must_use]
    pub fn with_batch(mut self, batch: u64) -> Self {
        self.0.site.batch.get_or_insert(batch);
        self
    }

    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Prefixes the message with the part of the file that it concerns, such as "line 177".
    #[must_use]
    pub fn within(mut self, part: impl fmt::Display) -> Self {
        self.0.message = shown(format!("{part}: {}", self.0.message));
        self
    }

    /// Appends a note, such as advice, to the message.
    #[doc(hidden)]
    pub fn with_note(mut self, note: &str) -> Self {
        let link = if self.0.message.is_empty() { "" } else { "; " };
        self.0.message += &hidden(&format!("{link}{note}"));
        self
    }

    /// A copy of the error, for each sample that one fault affects. Its source is only the text of
    /// the original source.
    #[doc(hidden)]
    pub fn clone_lossy(&self) -> Self {
        let Inner {
            kind,
            stage,
            message,
            site,
            amounts,
            source,
        } = &*self.0;
        let source = source.as_ref().map(|source| source.to_string().into());
        Self(Box::new(Inner {
            kind: *kind,
            stage: *stage,
            message: message.clone(),
            site: site.clone(),
            amounts: *amounts,
            source,
        }))
    }

    /// The stage at which the error happened.
    pub fn stage(&self) -> Stage {
        self.0.stage
    }

    /// The place in the data.
    pub fn site(&self) -> &Site {
        &self.0.site
    }

    /// The amounts that the error compares, for programs; the message has them in words. `None` if it
    /// compares none, or if one of them is unknown.
    pub fn amounts(&self) -> Option<Amounts> {
        self.0.amounts
    }

    /// The message without kind, site and source.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner {
            kind,
            stage,
            message,
            site,
            source,
            ..
        } = &*self.0;
        write!(f, "{}: {}", stage.as_str(), kind.as_str())?;
        if *kind == ErrorKind::Budget {
            // Keeps the line breaks: each term of the plan has its own line.
            write!(f, ": {message}")?;
        } else if !message.is_empty() {
            write!(f, ": {}", one_line(message))?;
        }
        if *site != Site::default() {
            f.write_str(":")?;
        }
        let path = site.path.as_ref().map(|path| path.display().to_string());
        for (name, text) in [
            ("path", &path),
            ("member", &site.member),
            ("field", &site.field),
        ] {
            match text {
                // Escaped, so that any file name keeps the rendering on one line.
                Some(text) if text.contains(char::is_control) => write!(f, " {name}={text:?}")?,
                Some(text) => write!(f, " {name}={text}")?,
                None => {}
            }
        }
        let numbers = [
            ("offset", site.offset),
            ("len", site.len),
            ("sample", site.sample),
            ("batch", site.batch),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                write!(f, " {name}={value}")?;
            }
        }
        if let Some(source) = source {
            write!(f, ": {}", one_line(&hidden(&source.to_string())))?;
        }
        Ok(())
    }
}

/// The text without secrets.
fn shown(text: String) -> String {
    match hidden(&text) {
        Cow::Owned(safe) => safe,
        Cow::Borrowed(_) => text,
    }
}

/// The text on one line: control characters become spaces.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect::<String>()
        .into()
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The rendering is complete, and `unwrap()` in a user's script should print it on one line.
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rendering_is_one_line_with_kind_stage_site_and_source() {
        let error = Error::new(
            ErrorKind::Truncated,
            Stage::Read,
            "4096 bytes expected, 1000 read",
        )
        .with_path("/data/a.bin")
        .with_range(8192, 4096)
        .with_sample(2)
        .with_batch(0)
        .with_source("end of file");
        let expected = "read: truncated: 4096 bytes expected, 1000 read: path=/data/a.bin \
             offset=8192 len=4096 sample=2 batch=0: end of file";
        assert_eq!(error.to_string(), expected);
        assert_eq!(format!("{error:?}"), expected);
    }

    #[test]
    fn unknown_parts_of_the_site_are_left_out() {
        let error = Error::new(ErrorKind::Config, Stage::Build, "batch_size is 0");
        assert_eq!(
            error.to_string(),
            "build: bad configuration: batch_size is 0"
        );
    }

    #[test]
    fn a_library_panic_is_an_error_with_its_message_on_one_line() {
        let error = guarded("a PNG", Stage::Decode, || -> Result<()> {
            panic!("index {}\nout of bounds", 7)
        });
        let expected = "decode: panicked: a library panicked on a PNG: index 7 out of bounds";
        assert_eq!(error.unwrap_err().to_string(), expected);
        assert_eq!(guarded("a PNG", Stage::Decode, || Ok(3)).unwrap(), 3);
    }

    #[test]
    fn the_first_site_wins() {
        let error = Error::user("x")
            .with_sample(1)
            .with_sample(2)
            .with_path("a")
            .with_path("b");
        assert_eq!(error.site().sample, Some(1));
        assert_eq!(error.site().path.as_deref(), Some(Path::new("a")));
    }

    #[test]
    fn os_errors_map_to_kinds() {
        let table = [
            (2, ErrorKind::NotFound),
            (13, ErrorKind::Permission),
            (5, ErrorKind::Io),
            (21, ErrorKind::NotAFile),
        ];
        for (code, kind) in table {
            let error = Error::os(Stage::Open, "", std::io::Error::from_raw_os_error(code));
            assert_eq!(error.kind(), kind, "errno {code}");
        }
    }
}
