//! Brings the headers of a shard in a store ahead of its scan, along many ways at a time: the pictures between them stay
//! where they are.
//!
//! ```text
//! shard  [header, data][header, data]…        cut into parts; each way looks for the first header of its part,
//!         way 0 ─►       way 1 ─► …           then goes from header to header
//!                  └──── headers ────┘ ─► pages of the scan, which follows and checks all of them
//! ```
//!
//! A way may take bytes of a member for a header. Then its pages serve nobody, and the scan reads what it needs itself.
//!
//! Limits: shards with large members ([`GAP`]); a way ends at small members; [`PAGES_MAX`] bytes of headers. The scan reads the
//! rest itself, in large ranges.

use super::member::{BLOCK, Header};
use crate::dataset::index::Scan;
use crate::error::Result;
use crate::storage::Way;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes from the front that tell how large members are.
const FRONT: u64 = 1 << 20;

/// Bytes for each request for headers in the mean: it takes as long as some 100 KB of the link.
const GAP: u64 = 64 << 10;

/// Length of a part, and the number of parts at most.
const PART: u64 = 4 << 20;
const PARTS: u64 = 256;

/// Bytes of a request that looks for a header, and of one that reads some.
const SEARCH: u64 = 64 << 10;
const HEADERS: u64 = 4 << 10;

/// Bytes of headers that ways of the process may hold.
const PAGES_MAX: usize = 64 << 20;
static HELD: AtomicUsize = AtomicUsize::new(0);

/// Errors: those of reading the shard's front.
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
        // The headers of small members come with others.
        if next + BLOCK > here {
            requests = requests + 1;
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

/// End of the header at an offset of some bytes, with those of its extensions, and the offset of the next one.
fn header_at(bytes: &[u8], start: u64) -> Option<(u64, u64)> {
    let mut at = start;
    loop {
        let block = bytes
            .get(at as usize..)?
            .first_chunk::<{ BLOCK as usize }>()?;
        let header = Header::parse(block).ok().filter(|_| block[0] != 0)?;
        let next = (at + BLOCK).checked_add(header.size.checked_next_multiple_of(BLOCK)?)?;
        // Beyond any file: the scan names it.
        let next = Some(next).filter(|next| *next <= i64::MAX as u64)?;
        if !header.extends() {
            return Some((at + BLOCK, next));
        }
        at = next;
    }
}

/// One way.
struct Follow {
    /// No header was found yet.
    searches: bool,
    at: u64,
    end: u64,
    /// Where it began, and its requests for headers.
    start: u64,
    requests: u64,
    found: Vec<(u64, Vec<u8>)>,
    /// Bytes in `found`.
    held: usize,
}

impl Drop for Follow {
    fn drop(&mut self) {
        // A scan goes through its pages at once.
        HELD.fetch_sub(self.held, Ordering::Relaxed);
    }
}

impl Follow {
    /// Takes the bytes at its place; the next place is behind them.
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
        // Small members are read faster in full.
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
