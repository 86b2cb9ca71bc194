//! The numbers that stages count, and the clock that they read.

pub mod clock;
pub mod counters;
pub mod network;

pub use clock::Clock;
pub use counters::{Counts, Latency};
pub use network::{Network, NetworkMeter};
