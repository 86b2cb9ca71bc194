//! Errors of the engine: what is wrong with a picture.

use std::fmt;

/// A result with the engine's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason for which a picture is not decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// The kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The bytes are not a JPEG that can be decoded: broken beyond use, or of an unsupported kind.
    Invalid,
    /// Damage that only [strict](crate::Input::strict) decoding refuses.
    Damaged,
    /// The end of the picture is missing.
    Truncated,
    /// The picture exceeds a limit.
    Limit,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }

    /// The bytes are not a JPEG that can be decoded.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Damage that only strict decoding refuses.
    pub(crate) fn damaged(what: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Damaged, format!("damaged JPEG: {what}"))
    }

    /// The same error, with the byte offset in the picture added to the message.
    pub(crate) fn at(mut self, offset: usize) -> Self {
        self.message += &format!(", at byte {offset} of the picture");
        self
    }

    /// The kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What is wrong, in one line.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
