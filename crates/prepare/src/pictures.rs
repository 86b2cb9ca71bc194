//! Pictures of a plan, which are refused if they have changed since they were listed.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::Blob;
use std::path::PathBuf;

/// A picture as it was listed.
pub(super) struct Picture {
    pub(super) sample: u64,
    pub(super) path: PathBuf,
    /// Bytes of the file.
    pub(super) len: u64,
    /// Version of the file.
    pub(super) version: u64,
    pub(super) class: Option<u32>,
}

impl Picture {
    /// Reads the bytes of the picture: as many as listed, and at most `limit`.
    pub(super) fn read(&self, limit: u64) -> Result<Vec<u8>> {
        let len = self.len;
        if len > limit {
            let message = format!("the file has {len} bytes; at most {limit} are allowed");
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        if len == 0 {
            return Err(Error::new(
                ErrorKind::Empty,
                Stage::Decode,
                "a picture of 0 bytes",
            ));
        }
        let file = self.check()?;
        let mut input = vec![0; len as usize];
        match file.read_at(0, &mut input) {
            Err(error) if error.kind() == ErrorKind::Truncated => Err(self.changed()),
            read => read.map(|()| input),
        }
    }

    /// Opens the file, and checks that it has not changed since it was listed. Errors:
    /// [`ErrorKind::Changed`].
    pub(super) fn check(&self) -> Result<Blob> {
        let file = Blob::open(&self.path)?;
        if file.len() != self.len {
            return Err(self.changed());
        }
        if file.look()?.version != self.version {
            let message = "the file still has the listed length, but was modified since";
            return Err(Error::new(ErrorKind::Changed, Stage::Read, message));
        }
        Ok(file)
    }

    fn changed(&self) -> Error {
        let message = format!(
            "the file had {} bytes when it was listed, but has changed since",
            self.len
        );
        Error::new(ErrorKind::Changed, Stage::Read, message)
    }
}
