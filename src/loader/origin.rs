//! Where the bytes of a loader came from: what is noted when it is built, and judged when somebody asks.
//!
//! ```text
//! build: the kernel's count, or else what the page cache holds ─┐
//! later: the kernel's count, what the reader and workers did ───┴──► judge ──► Truth
//! ```

use crate::meter::{Cached, DeviceBytes};
use crate::report::{Evidence, Truth, judge};
use crate::storage::{Direct, PROBES_MAX, ReadStats, Sources, device_bytes, page_cache_share};

/// What was so when the loader was built.
#[derive(Debug)]
pub(super) struct Origin {
    moved: Result<DeviceBytes, String>,
    /// Looked at only where the kernel counts nothing: it takes some system calls for each place.
    cached: Result<Cached, String>,
    direct_asked: bool,
}

impl Origin {
    pub(super) fn now(sources: &Sources, direct: Direct) -> Self {
        let moved = device_bytes();
        let look = || page_cache_share(sources, PROBES_MAX);
        let cached = if moved.is_ok() { Err("not looked at".into()) } else { look() };
        Self { moved, cached, direct_asked: direct == Direct::On }
    }

    /// What can be said by now. `cached` bytes were copied from the page cache, `on_device` bytes read by cuFile.
    pub(super) fn truth(&self, reads: &ReadStats, cached: u64, on_device: u64) -> Truth {
        let moved = match &self.moved {
            Ok(before) => device_bytes().map(|now| now.since(before)),
            Err(why) => Err(why.clone()),
        };
        let direct = (reads.bytes_asked as f64 * reads.direct_share()) as u64;
        judge(&Evidence {
            before: self.cached.clone(),
            moved,
            delivered: reads.bytes_asked.saturating_add(cached).saturating_add(on_device),
            copied: cached,
            direct: direct.saturating_add(on_device),
            direct_asked: self.direct_asked,
            refused: reads.fallbacks,
        })
    }
}
