//! Fetches the headers of a shard in an object store before its scan. Many walks (*ways*) run
//! concurrently. Most bytes between the headers are not fetched.
//!
//! ```text
//! shard  [header, data][header, data]…        cut into parts; each way looks for the first header of its part,
//!         way 0 ─►       way 1 ─► …           then goes from header to header
//!                  └──── headers ────┘ ─► pages of the scan, which follows and checks all of them
//! ```
//!
//! A way may mistake bytes of a member for a header. Its pages are then not used, and the scan
//! reads what it needs itself.
//!
//! Limits: only shards with large members ([`GAP`]); a way ends where members are small; at most
//! [`PAGES_MAX`] bytes of headers. The scan reads the rest itself, in large ranges.

use super::member::{BLOCK, MemberHeader};
use feedline_base::error::Result;
use feedline_core::dataset::index::Scan;
use feedline_core::storage::Way;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes read from the start of a shard to estimate the size of its members.
const FRONT: u64 = 1 << 20;

/// Minimum mean distance in bytes between requests for headers: a request takes as long as some 100
/// KB of transfer.
const GAP: u64 = 64 << 10;

/// Minimum length of a part, and maximum number of parts.
const PART: u64 = 4 << 20;
const PARTS: u64 = 256;

/// Bytes of a request that searches for a header, and of one that reads headers.
const SEARCH: u64 = 64 << 10;
const HEADERS: u64 = 4 << 10;

/// Maximum bytes of headers that all ways of the process hold.
const PAGES_MAX: usize = 64 << 20;
static HELD: AtomicUsize = AtomicUsize::new(0);

/// Fetches the headers, if the shard is in a store and its members are large. Errors: those of
/// reading the shard's start.
pub(super) fn bring_headers(scan: &mut Scan<'_>) -> Result<()> {
    let len = scan.len();
    if !scan.asks_a_store() || len < 16 * FRONT {
        return Ok(());
    }
    let front = scan.bytes(0, FRONT as usize)?;
    let mut at = 0;
    let mut requests = 0;
    let mut here = 0;
    while let Some((_, next)) = header_at(front, at) {
        // One request returns the headers of several small members.
        if next + BLOCK > here {
            requests += 1;
            here = next + HEADERS;
        }
        at = next;
    }
    if at < FRONT || at < GAP * requests || at >= len {
        return Ok(());
    }
    let part = (len - at).div_ceil(PARTS).max(PART);
    let starts = (0..(len - at).div_ceil(part)).map(|number| at + number * part);
    let ways = starts.map(|start| Follow {
        searches: start > at,
        at: start,
        end: (start + part).min(len),
        start,
        requests: 0,
        found: Vec::new(),
        held: 0,
    });
    let ways = scan.walk(ways.collect(), move |way: &mut Follow, bytes: &[u8]| {
        way.step(bytes, len)
    });
    scan.hold(
        ways.into_iter()
            .flat_map(|mut way| std::mem::take(&mut way.found))
            .collect(),
    );
    Ok(())
}

/// End of the header at offset `start` of `bytes`, after its extension headers, and the offset of
/// the next header.
fn header_at(bytes: &[u8], start: u64) -> Option<(u64, u64)> {
    let mut at = start;
    loop {
        let block = bytes
            .get(at as usize..)?
            .first_chunk::<{ BLOCK as usize }>()?;
        let header = MemberHeader::parse(block).ok().filter(|_| block[0] != 0)?;
        let next = (at + BLOCK).checked_add(header.size.checked_next_multiple_of(BLOCK)?)?;
        // A larger offset is beyond any file; the scan reports it.
        let next = Some(next).filter(|next| *next <= i64::MAX as u64)?;
        if !header.extends() {
            return Some((at + BLOCK, next));
        }
        at = next;
    }
}

/// A way: one walk through a part of the shard.
struct Follow {
    /// No header has been found yet.
    searches: bool,
    at: u64,
    end: u64,
    /// Offset at which the way starts, and the number of its requests for headers.
    start: u64,
    requests: u64,
    found: Vec<(u64, Vec<u8>)>,
    /// Bytes in `found`.
    held: usize,
}

impl Drop for Follow {
    fn drop(&mut self) {
        // The pages no longer count against `PAGES_MAX`: the scan uses them up immediately.
        HELD.fetch_sub(self.held, Ordering::Relaxed);
    }
}

impl Follow {
    /// Takes the headers from the bytes at `at`, and moves `at` to the next bytes to read. Returns
    /// whether the way continues.
    fn step(&mut self, bytes: &[u8], len: u64) -> bool {
        let base = self.at;
        let mut here = 0;
        if self.searches {
            let first = (0..bytes.len() as u64 / BLOCK).map(|block| block * BLOCK);
            let Some(first) = first.into_iter().find(|at| header_at(bytes, *at).is_some()) else {
                self.at += bytes.len() as u64;
                return self.at < self.end;
            };
            self.searches = false;
            here = first;
        }
        let from = here;
        while let Some((end, next)) = header_at(bytes, here) {
            self.take(base + here, &bytes[here as usize..end as usize]);
            self.held += (end - here) as usize;
            HELD.fetch_add((end - here) as usize, Ordering::Relaxed);
            here = next;
        }
        self.at = base.saturating_add(here);
        self.requests += 1;
        // Reading small members in full is faster than requesting each header.
        let is_slow = self.requests > 16 && self.at - self.start < GAP / 4 * self.requests;
        // If there is no header here, the scan reads this part itself.
        here > from
            && !is_slow
            && self.at < self.end.min(len)
            && HELD.load(Ordering::Relaxed) < PAGES_MAX
    }

    fn take(&mut self, at: u64, header: &[u8]) {
        match self.found.last_mut() {
            Some((start, bytes)) if *start + bytes.len() as u64 == at => {
                bytes.extend_from_slice(header)
            }
            _ => self.found.push((at, header.to_vec())),
        }
    }
}

impl Way for Follow {
    fn next(&self) -> (u64, u64) {
        (self.at, if self.searches { SEARCH } else { HEADERS })
    }
}
