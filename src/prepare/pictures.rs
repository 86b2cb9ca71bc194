//! The pictures of a folder, one at a time: from a dataset in memory, or from a plan.

use crate::dataset::{Dataset, Images};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::{Blob, SourceId};
use std::path::{Path, PathBuf};

/// A picture as it was listed.
pub(super) struct Picture {
    pub(super) sample: u64,
    pub(super) path: PathBuf,
    /// Bytes of the file.
    pub(super) len: u64,
    /// Version of the file, where the list has it.
    pub(super) version: Option<u64>,
    pub(super) class: Option<u32>,
}

/// A list of pictures.
pub(super) trait Pictures: Sync {
    /// The folder of all.
    fn root(&self) -> &Path;
    /// Number of pictures.
    fn count(&self) -> u64;
    /// Whether each picture has a class.
    #[cfg(feature = "parquet")]
    fn labelled(&self) -> bool;
    /// The picture of a sample below `count`. Errors: those of reading the list.
    fn get(&self, sample: u64) -> Result<Picture>;
}

/// The pictures of a dataset, with its root as the user gave it.
pub(super) struct Listed<'a>(pub(super) &'a Images, pub(super) &'a Path);

impl Pictures for Listed<'_> {
    fn root(&self) -> &Path {
        self.1
    }

    fn count(&self) -> u64 {
        self.0.len()
    }

    #[cfg(feature = "parquet")]
    fn labelled(&self) -> bool {
        !self.0.classes().is_empty()
    }

    fn get(&self, sample: u64) -> Result<Picture> {
        let len = self.0.sources().len_of(SourceId::at(sample as usize));
        let class = self.0.class_of(sample).map(|class| class as u32);
        Ok(Picture { sample, path: self.0.path_of(sample), len, version: None, class })
    }
}

impl Picture {
    /// The bytes of the picture, as long as listed and at most `limit`.
    pub(super) fn read(&self, limit: u64) -> Result<Vec<u8>> {
        let len = self.len;
        if len > limit {
            let message = format!("the file has {len} bytes; at most {limit} are allowed");
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        if len == 0 {
            return Err(Error::new(ErrorKind::Empty, Stage::Decode, "a picture of 0 bytes"));
        }
        let file = self.check()?;
        let mut input = vec![0; len as usize];
        match file.read_at(0, &mut input) {
            Err(error) if error.kind() == ErrorKind::Truncated => Err(self.changed()),
            read => read.map(|()| input),
        }
    }

    /// Opens the file, which is as it was listed. Errors: [`ErrorKind::Changed`].
    pub(super) fn check(&self) -> Result<Blob> {
        let file = Blob::open(&self.path)?;
        if file.len() != self.len {
            return Err(self.changed());
        }
        if let Some(version) = self.version
            && file.look()?.version != version
        {
            let message = "the file has the length that was listed, and was modified since";
            return Err(Error::new(ErrorKind::Changed, Stage::Read, message));
        }
        Ok(file)
    }

    fn changed(&self) -> Error {
        let message = format!("the file had {} bytes when it was listed, and has changed since", self.len);
        Error::new(ErrorKind::Changed, Stage::Read, message)
    }
}
