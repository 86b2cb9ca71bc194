//! The stand-in for object stores in a build without the feature `remote`.

use super::metadata::{FileKind, Meta};
use super::reader::Keep;
use super::{Reader, ReaderOptions, Sources, Waker};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::meter::Network;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub(crate) enum Object {}

/// Stand-in for the counter of requests. This build sends none.
pub(crate) struct Meter;

impl Meter {
    pub(crate) fn new() -> Self {
        Self
    }

    pub(crate) fn read(&self) -> Network {
        Network::default()
    }
}

const ABSENT: &str = "data in object stores needs the feature `remote`; build feedline with it";

pub(crate) enum Remote {}

impl Remote {
    pub(crate) fn start(
        _: Arc<Sources>,
        _: &ReaderOptions,
        _: Arc<Meter>,
        _: Option<Waker>,
        _: Option<Arc<dyn Keep>>,
    ) -> Result<Box<dyn Reader>> {
        Err(Error::new(ErrorKind::Config, Stage::Build, ABSENT))
    }
}

fn absent<T>(url: &Path) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Index, ABSENT).with_path(url))
}

impl Object {
    pub(crate) fn at(url: &Path, _: u64, _: Option<Arc<str>>) -> Result<Self> {
        absent(url)
    }

    pub(crate) fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
        match *self {}
    }

    pub(crate) fn walk<W: super::Way>(
        &self,
        ways: Vec<W>,
        _: impl Fn(&mut W, &[u8]) -> bool,
    ) -> Vec<W> {
        let _ = ways.iter().map(W::next);
        match *self {}
    }

    pub(crate) fn forget(&self) {
        match *self {}
    }

    pub(crate) fn is_pinned(&self) -> bool {
        match *self {}
    }

    pub(crate) fn metered(self, _: &Arc<Meter>) -> Self {
        self
    }

    pub(crate) fn bring(
        self,
        _: Range<u64>,
        _: Option<Duration>,
        _: Vec<u8>,
        _: &AtomicBool,
    ) -> Result<Vec<u8>> {
        match self {}
    }
}

pub(crate) fn look(url: &Path) -> Result<Meta> {
    absent(url)
}

pub(crate) fn children(url: &Path) -> Result<Vec<(OsString, FileKind)>> {
    absent(url)
}

pub(crate) fn expand(urls: &[String]) -> Result<(Vec<PathBuf>, usize)> {
    absent(Path::new(urls.first().map_or("", String::as_str)))
}

pub(crate) fn configure(store: &str, _: Vec<(String, String)>) -> Result<()> {
    absent(Path::new(store))
}
