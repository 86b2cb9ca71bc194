//! Whether storage would give more with more reads in flight, from how long reads took. Pure.
//!
//! ```text
//! Little's law: reads in flight = rate × latency
//!
//! latency with all of the depth in flight ≫ unloaded latency    reads wait in the device: more of them wait longer
//!                                         ≈ unloaded latency    none waits: the device serves them beside each other
//! ```
//!
//! The fastest reads stand for an unloaded device: each iterator begins with nothing in flight.
//!
//! # Limits
//!
//! - A fast read may have come from a cache of the device or of the kernel. So latencies that vary much on their own, and
//!   those that are longer by less than [`QUEUED`], say nothing.
//! - A device of fewer channels than the depth has a longer latency by depth / channels. With each doubling of the depth it
//!   doubles, too: so [`Headroom::Limit`] is found after a few doublings at most.

use crate::meter::Latency;
use crate::meter::Storage;

/// What more reads in flight would give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Headroom {
    /// Reads took hardly longer than the fastest.
    Left,
    /// Half of the reads took at least so many times as long as the fastest: they waited in the device.
    Limit { times: f64 },
    /// Latencies do not tell.
    Unknown,
}

/// Reads that took so many times as long as the fastest waited for others.
const QUEUED: f64 = 2.5;
/// Reads that took at most so many times as long did not, or hardly.
const BESIDE: f64 = 2.0;
/// Latencies of which the median is more than so many times the first decile vary on their own.
const VARY: f64 = 3.0;
/// Reads of so many nanoseconds waited, however much they vary: no device needs that long for one.
const SLOW_NS: f64 = 100e6;
/// Evidence takes so many times as many reads as may be in flight.
const READS_LEAST: u64 = 4;

impl Headroom {
    /// To be asked where the depth was filled.
    pub(super) fn of(storage: &Storage) -> Self {
        let (latency, depth) = (&storage.latency, u64::from(storage.depth.max(1)));
        if latency.count < depth.saturating_mul(READS_LEAST) {
            return Self::Unknown;
        }
        // Of the first reads of an iterator a few find an idle device. One alone may be a freak.
        let fastest = shortest(latency, (depth / 8).max(2)).max(1.0);
        let (low, half) = (shortest(latency, latency.count / 10), shortest(latency, latency.count / 2));
        let waited = low >= QUEUED * fastest && half <= VARY * low;
        let slow = half >= SLOW_NS && half >= QUEUED * fastest;
        match half / fastest {
            times if waited || slow => Self::Limit { times },
            ..=BESIDE => Self::Left,
            _ => Self::Unknown,
        }
    }
}

/// The longest of the `count` shortest latencies.
fn shortest(latency: &Latency, count: u64) -> f64 {
    let mut seen = 0_u64;
    let found = latency.buckets.iter().find(|(_, reads)| {
        seen = seen.saturating_add(*reads);
        seen >= count
    });
    found.map_or(0.0, |(ns, _)| *ns)
}

#[cfg(test)]
mod tests {
    use super::super::simulator::Pipe;
    use super::*;

    /// Bound by storage, with slots enough to fill the depth.
    fn reading(depth: u64, channels: u64, varies: bool) -> Pipe {
        let read_ns = 1e6 * channels.min(depth) as f64;
        Pipe { depth, channels, varies, read_ns, decode_ns: 1e3, user_ns: 1e3, slots: 2 * depth, ..Pipe::default() }
    }

    fn of(pipe: &Pipe) -> Headroom {
        Headroom::of(&pipe.run().storage)
    }

    #[test]
    fn the_limit_of_a_simulated_device_is_told_from_room_for_more_reads() {
        for varies in [false, true] {
            for (depth, channels) in [(16, 1), (16, 2), (32, 4), (32, 8), (64, 16)] {
                let pipe = reading(depth, channels, varies);
                assert!(matches!(of(&pipe), Headroom::Limit { times } if times > 2.0), "{pipe:?}: {:?}", of(&pipe));
                let more = Pipe { depth: 2 * depth, ..pipe.clone() }.throughput() / pipe.throughput();
                assert!(more < 1.02, "{more}");
            }
            for (depth, channels) in [(16, 64), (32, 64), (4, 256)] {
                let pipe = reading(depth, channels, varies);
                let more = Pipe { depth: 2 * depth, ..pipe.clone() }.throughput() / pipe.throughput();
                assert!(more > 1.8, "{more}");
                // Where the times of an idle device vary that much nobody can tell.
                let expected = if varies { Headroom::Unknown } else { Headroom::Left };
                assert_eq!(of(&pipe), expected, "{pipe:?}");
            }
        }
    }

    #[test]
    fn doubling_the_depth_again_and_again_ends_at_the_limit() {
        for (channels, varies) in
            [1, 3, 8, 20, 100].into_iter().flat_map(|channels| [(channels, false), (channels, true)])
        {
            let steps: Vec<u64> = (2..10).map(|power| 1 << power).collect();
            let stopped = steps.iter().find(|depth| {
                matches!(of(&Pipe { read_ns: 1e6, ..reading(**depth, channels, varies) }), Headroom::Limit { .. })
            });
            assert!(stopped.is_some_and(|depth| *depth <= 8 * channels.max(4)), "{channels} {varies}: {stopped:?}");
        }
    }

    #[test]
    fn few_reads_say_nothing() {
        let mut storage = reading(32, 4, false).run().storage;
        storage.latency.count = 100;
        assert_eq!(Headroom::of(&storage), Headroom::Unknown);
        assert_eq!(Headroom::of(&Storage::default()), Headroom::Unknown);
    }
}
