//! The stand-in for the reader of objects in a build without the feature `remote`.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::meter::NetworkMeter;
use feedline_core::storage::Sources;
use feedline_core::storage::remote::ABSENT;
use feedline_reader::reader::{Keep, Reader, ReaderOptions};
use feedline_reader::waker::Waker;
use std::sync::Arc;

pub(crate) enum Remote {}

impl Remote {
    pub(crate) fn start(
        _: Arc<Sources>,
        _: &ReaderOptions,
        _: Arc<NetworkMeter>,
        _: Option<Waker>,
        _: Option<Arc<dyn Keep>>,
    ) -> Result<Box<dyn Reader>> {
        Err(Error::new(ErrorKind::Config, Stage::Build, ABSENT))
    }
}
