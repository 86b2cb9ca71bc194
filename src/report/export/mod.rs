//! What was measured, for other programs: a trace, metrics, a page. Text made of data; nothing here measures.
//!
//! ```text
//!               ┌──► trace       what each of the last batches did, for ui.perfetto.dev
//! Timeline ─────┤
//!               ├──► html        one page for people: no network, no script
//! Snapshot ─────┤
//!               └──► prometheus  totals since the loader was built ──► Server: GET /metrics, if you start one
//! ```
//!
//! What holds, and is tested:
//! - Whatever the numbers are (zero, out of order, beyond all bounds) and whatever names contain, the text is well-formed
//!   and nothing panics. Times that contradict each other are drawn as if the later stage ended when the earlier did.
//! - Nothing listens unless [`serve`] or [`Server::loopback`] is called. The server has three threads of its own and
//!   nothing to do with the loader's.
//! - Text of one timeline is bounded: a page by about 300 KB whatever its length, a trace by about 1.5 KB per batch.

mod html;
mod prometheus;
mod server;
#[allow(dead_code, unused_imports, reason = "what the loader says is up to the loader")]
pub(crate) mod spans;
mod trace;
mod way;

pub use html::html;
pub use prometheus::prometheus;
pub use server::{Server, serve};
pub use trace::{trace, write_trace};

/// Whose numbers these are: labels of metrics, names in a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Names<'a> {
    /// A name for the loader, such as `train`; any text.
    pub loader: &'a str,
    /// Its rank. Traces of several ranks have a process each, so that they can be merged.
    pub rank: u32,
}

impl<'a> Names<'a> {
    /// The loader called `loader` of rank `rank`.
    pub fn new(loader: &'a str, rank: u32) -> Self {
        Self { loader, rank }
    }
}
