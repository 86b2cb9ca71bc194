//! The io_uring reader: one ring, driven by one thread, without its own threads.
//!
//! ```text
//! submit ─► start ─┬─ file open ────────────► read entry ─► completion entry ─► done │ continue │ retry │ failed
//!                  └─ open entry ─► fstat ──►     ▲                                     └─────────┴──┘
//! ```
//!
//! * `inflight` decides (pure), `ring` holds all memory that the kernel may touch (unsafe), and
//!   `reader` connects them.
//! * Files are opened through the ring as well. A file in the dentry cache is opened inline during
//!   submission, without an extra system call. Other files go to the kernel's own workers, so that
//!   cold inodes do not queue up on the driving thread.
//! * A `wait` is one `io_uring_enter`, which sends the submitted entries and sleeps. Checking an
//!   empty queue needs no call.
//! * Large buffered reads go to the kernel's workers, and all buffered reads do so while the
//!   driving thread waits for a core (`crowd`).
//! * The ring belongs to the thread that first uses it; the kernel requires that, in exchange for
//!   fewer interrupts. Once the ring is empty, another thread may take over, and the ring is set up
//!   anew there.

mod crowd;
mod inflight;
mod reader;
mod ring;

pub use reader::{Uring, refusal};
