//! The stand-in for object stores in a build without the feature `remote`.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{FileKind, Meta};
use feedline_base::meter::NetworkMeter;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A walk through an object, range by range.
pub trait Way: Send + 'static {
    /// Offset and length of the next range. It is cut at the object's end.
    fn next(&self) -> (u64, u64);
}

pub enum Object {}

/// The message of such a build.
pub const ABSENT: &str = "data in object stores needs the feature `remote`; build feedline with it";

fn absent<T>(url: &Path) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Index, ABSENT).with_path(url))
}

impl Object {
    pub fn at(url: &Path, _: u64, _: Option<Arc<str>>) -> Result<Self> {
        absent(url)
    }

    pub fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
        match *self {}
    }

    pub fn walk<W: Way>(&self, ways: Vec<W>, _: impl Fn(&mut W, &[u8]) -> bool) -> Vec<W> {
        let _ = ways.iter().map(W::next);
        match *self {}
    }

    pub fn forget(&self) {
        match *self {}
    }

    pub fn is_pinned(&self) -> bool {
        match *self {}
    }

    pub fn metered(self, _: &Arc<NetworkMeter>) -> Self {
        self
    }

    pub fn bring(
        self,
        _: Range<u64>,
        _: Option<Duration>,
        _: Vec<u8>,
        _: &AtomicBool,
    ) -> Result<Vec<u8>> {
        match self {}
    }
}

pub fn commit(_: &Path) -> Result<Option<(String, String)>> {
    Ok(None)
}

pub fn paused(_: &Path) -> Option<String> {
    None
}

pub fn shared_folder(_: &Path) -> Option<PathBuf> {
    None
}

pub fn without_revision(url: PathBuf) -> PathBuf {
    url
}

pub fn look(url: &Path) -> Result<Meta> {
    absent(url)
}

pub fn children(url: &Path) -> Result<Vec<(OsString, FileKind)>> {
    absent(url)
}

pub fn expand(urls: &[String]) -> Result<(Vec<PathBuf>, usize)> {
    absent(Path::new(urls.first().map_or("", String::as_str)))
}

pub fn configure(store: &str, _: Vec<(String, String)>) -> Result<()> {
    absent(Path::new(store))
}
