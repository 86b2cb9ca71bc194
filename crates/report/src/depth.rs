//! Decides from the latencies of reads whether more reads in flight would raise storage's
//! throughput. No I/O.
//!
//! ```text
//! Little's law: reads in flight = rate × latency
//!
//! latency with all of the depth in flight ≫ unloaded latency    reads wait in the device: more of them wait longer
//!                                         ≈ unloaded latency    none waits: the device serves them beside each other
//! ```
//!
//! The fastest reads represent an unloaded device: each iterator begins with nothing in flight.
//!
//! # Limits
//!
//! - A fast read may have come from a cache of the device or of the kernel. So the answer is
//!   [`Headroom::Unknown`] if latencies vary much on their own, or if they are longer by a factor
//!   below [`QUEUED`].
//! - The latency of a device with fewer channels than the depth is longer by the factor depth /
//!   channels. Up to twice the channels that still counts as [`Headroom::Left`]; from four times
//!   the channels on it is [`Headroom::Limit`].

use crate::meter::StorageStage;
use feedline_base::meter::Latency;

/// What more reads in flight would gain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Headroom {
    /// Reads took hardly longer than the fastest.
    Left,
    /// Half of the reads took at least `times` times as long as the fastest: they waited in the
    /// device.
    Limit { times: f64 },
    /// The latencies do not show whether the depth or the device is the limit.
    Unknown,
}

/// Reads that took this many times as long as the fastest waited for others.
const QUEUED: f64 = 2.5;
/// Reads that took at most this many times as long as the fastest hardly waited.
const BESIDE: f64 = 2.0;
/// Latencies vary on their own when the median is more than this many times the first decile.
const VARY: f64 = 3.0;
/// Reads that took this many nanoseconds waited, even if latencies vary: no device needs that long
/// for one read.
const SLOW_NS: f64 = 100e6;
/// Reads needed as evidence, in multiples of the depth.
const READS_LEAST: u64 = 4;

impl Headroom {
    /// The result is valid only if the depth was filled.
    pub(super) fn of(storage: &StorageStage) -> Self {
        let latency = &storage.latency;
        let depth = u64::from(storage.depth.max(1));
        // A store or mount may limit each connection. Then more connections give more throughput,
        // however long each read takes.
        if network_share(storage) > 0.0 {
            return Self::Unknown;
        }
        if latency.count < depth.saturating_mul(READS_LEAST) {
            return Self::Unknown;
        }
        // A few of the first reads of an iterator find an idle device. A single one may be an
        // outlier.
        let fastest = shortest(latency, (depth / 8).max(2)).max(1.0);
        let low = shortest(latency, latency.count / 10);
        let half = shortest(latency, latency.count / 2);
        let waited = low >= QUEUED * fastest && half <= VARY * low;
        let slow = half >= SLOW_NS && half >= QUEUED * fastest;
        match half / fastest {
            times if waited || slow => Self::Limit { times },
            ..=BESIDE => Self::Left,
            _ => Self::Unknown,
        }
    }
}

/// Share of the reads that object stores and network mounts served: 0 to 1.
pub(super) fn network_share(storage: &StorageStage) -> f64 {
    let requests = storage
        .network
        .as_ref()
        .is_some_and(|network| network.requests > 0);
    match &storage.local_cache {
        Some(cache) => cache.misses as f64 / cache.hits.saturating_add(cache.misses).max(1) as f64,
        None if requests || on_network_mount(storage) => 1.0,
        None => 0.0,
    }
}

/// A store or its link counts as full from this number of waiting requests per request in flight.
const TURNS: f64 = 0.1;

/// Whether object stores and their links are at their limit of concurrent requests: more reads
/// would wait.
pub(super) fn link_is_full(storage: &StorageStage) -> bool {
    storage.network.as_ref().is_some_and(|network| {
        network.waiting_ns > 0 && (network.waiting_ns as f64 >= TURNS * network.in_flight_ns as f64)
    })
}

/// Whether a reader without a cache reads files on a network mount.
pub(super) fn on_network_mount(storage: &StorageStage) -> bool {
    storage.reader.as_ref().is_some_and(|reader| reader.mount)
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
    use super::*;

    /// The headroom for reads that took these numbers of milliseconds, with up to `depth` in
    /// flight.
    fn at(depth: u32, latencies: &[(f64, u64)]) -> Headroom {
        let buckets: Vec<(f64, u64)> = latencies
            .iter()
            .map(|(ms, reads)| (ms * 1e6, *reads))
            .collect();
        let count = buckets.iter().map(|(_, reads)| reads).sum();
        let mut latency = Latency::default();
        latency.count = count;
        latency.buckets = buckets;
        Headroom::of(&StorageStage {
            depth,
            latency,
            ..StorageStage::default()
        })
    }

    fn of(latencies: &[(f64, u64)]) -> Headroom {
        at(32, latencies)
    }

    #[test]
    fn eight_channels_are_at_their_limit_from_depth_32_on() {
        for depth in [4, 8, 16, 32, 64, 128, 256, 512] {
            // `depth` reads begin together, eight at a time and 1 ms each; then each read waits for
            // those before it.
            let turns = (depth / 8).max(1);
            let mut latencies: Vec<_> = (1..=turns)
                .map(|ms| (f64::from(ms), u64::from(depth / turns)))
                .collect();
            latencies.push((f64::from(turns), 10_000));
            let found = at(depth, &latencies);
            match depth {
                ..=16 => assert_eq!(found, Headroom::Left, "{depth}"),
                _ => assert!(
                    matches!(found, Headroom::Limit { times } if times >= 4.0),
                    "{depth}: {found:?}"
                ),
            }
        }
    }

    #[test]
    fn waiting_reads_differ_from_room_for_more() {
        // A device of four channels, full: each read waits for seven others.
        assert_eq!(
            of(&[(1.0, 4), (4.0, 20), (8.0, 8000), (9.0, 1900)]),
            Headroom::Limit { times: 8.0 }
        );
        assert_eq!(of(&[(0.9, 100), (1.0, 9000), (1.5, 900)]), Headroom::Left);
        // Slow, however much they vary.
        assert!(matches!(
            of(&[(0.2, 8), (30.0, 400), (190.0, 3000)]),
            Headroom::Limit { .. }
        ));
        // They vary on their own.
        assert_eq!(
            of(&[(0.1, 500), (1.0, 2000), (4.0, 4000), (9.0, 3500)]),
            Headroom::Unknown
        );
        // One fast read may be an outlier.
        assert_eq!(of(&[(0.1, 1), (1.0, 9000)]), Headroom::Left);
    }

    #[test]
    fn few_reads_are_no_evidence() {
        assert_eq!(of(&[(1.0, 4), (8.0, 100)]), Headroom::Unknown);
        assert_eq!(Headroom::of(&StorageStage::default()), Headroom::Unknown);
    }
}
