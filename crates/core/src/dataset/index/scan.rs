//! Reader of a shard's bytes for its scan.

use crate::storage::{Blob, Way};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::collections::BTreeMap;

/// Bytes per read of a scan that reads everything, and of a scan that only follows headers.
const AHEAD_ALL: usize = 1 << 20;
const AHEAD_HEADERS: usize = 4096;
/// Bytes per read of an object, where each read is a request.
const AHEAD_OBJECT: usize = 4 << 20;

/// Reader of a shard: a window that moves forward, so that a forward scan reads no byte twice.
/// Bytes before the window are read again.
pub struct Scan<'a> {
    blob: &'a Blob,
    window: Vec<u8>,
    /// Offset of the window's first byte.
    at: u64,
    ahead: usize,
    pages: ScanPages,
}

/// Parts of a shard that were read ahead, by their offsets.
pub(crate) type ScanPages = BTreeMap<u64, Vec<u8>>;

impl<'a> Scan<'a> {
    #[doc(hidden)]
    pub fn new(blob: &'a Blob, all: bool) -> Self {
        let ahead = match all {
            _ if blob.is_object() => AHEAD_OBJECT,
            true => AHEAD_ALL,
            false => AHEAD_HEADERS,
        };
        Self {
            blob,
            window: Vec::new(),
            at: 0,
            ahead,
            pages: ScanPages::new(),
        }
    }

    /// Whether each read is a request to a store.
    #[doc(hidden)]
    pub fn asks_a_store(&self) -> bool {
        self.blob.is_object()
    }

    /// Like [`Blob::walk`].
    #[doc(hidden)]
    pub fn walk<W: Way>(
        &self,
        ways: Vec<W>,
        step: impl Fn(&mut W, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Vec<W> {
        self.blob.walk(ways, step)
    }

    /// Serves reads from these parts, which were read ahead. Other bytes are read from the shard.
    #[doc(hidden)]
    pub fn hold(&mut self, pages: ScanPages) {
        self.pages = pages;
    }

    /// Length of the shard.
    #[allow(
        clippy::len_without_is_empty,
        reason = "a scan of no bytes finds nothing"
    )]
    pub fn len(&self) -> u64 {
        self.blob.len()
    }

    /// Returns `len` bytes at `offset`. Check `len` against a limit first: all of the bytes are
    /// held in memory.
    ///
    /// Errors: [`ErrorKind::Truncated`] if the shard does not have them.
    pub fn bytes(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        if offset
            .checked_add(len as u64)
            .is_none_or(|end| end > self.len())
        {
            let message = format!(
                "{len} bytes at offset {offset} end past the shard's end: it has {} bytes",
                self.len()
            );
            return Err(Error::new(ErrorKind::Truncated, Stage::Index, message)
                .with_range(offset, len as u64));
        }
        if let Some(bytes) = self.blob.in_memory() {
            return Ok(&bytes[offset as usize..offset as usize + len]);
        }
        let page = self
            .pages
            .range(..=offset)
            .next_back()
            .filter(|(at, page)| offset + len as u64 <= **at + page.len() as u64)
            .map(|(at, _)| *at);
        if let Some(at) = page {
            return Ok(&self.pages[&at][(offset - at) as usize..][..len]);
        }
        let end = self.at + self.window.len() as u64;
        if offset < self.at || offset + len as u64 > end {
            self.fill(offset, len.max(self.ahead))?;
        }
        let start = (offset - self.at) as usize;
        Ok(&self.window[start..start + len])
    }

    /// CRC32C of `len` bytes at `offset`, with no limit on `len`. Errors: those of
    /// [`bytes`](Self::bytes).
    pub fn crc(&mut self, offset: u64, len: u64) -> Result<u32> {
        let mut crc = 0;
        let mut done = 0;
        while done < len {
            let at = offset.saturating_add(done);
            // The rest of this window, or the next window.
            let held = (self.at + self.window.len() as u64)
                .checked_sub(at)
                .filter(|held| *held > 0 && at >= self.at);
            let step = (len - done).min(held.unwrap_or(self.ahead as u64));
            crc = crc32c::crc32c_append(crc, self.bytes(at, step as usize)?);
            done += step;
        }
        Ok(crc)
    }

    fn fill(&mut self, offset: u64, len: usize) -> Result<()> {
        let len = (self.len() - offset).min(len as u64) as usize;
        self.window.resize(len, 0);
        self.at = offset;
        self.blob
            .fill(offset, &mut self.window, "the shard")
            .inspect_err(|_| {
                // Buffer content of a failed read must never count as bytes of the shard.
                self.window.clear();
            })
    }
}
