//! Requests of a loader to object stores. Network threads write, snapshots read.

use super::counters::{Area, Counter, Histogram, Lone};
use crate::meter::{Clock, Latency};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A loader's requests to object stores, including those of its local cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Network {
    /// Requests that ended, with or without an error.
    pub requests: u64,
    /// Bytes that these requests returned.
    pub bytes: u64,
    /// Time in flight, summed over all requests: divide by the steady time for the mean number in
    /// flight.
    pub in_flight_ns: u64,
    /// Time that requests waited because of the concurrency limit of the store and its link, summed
    /// over all requests.
    #[serde(default)]
    pub waiting_ns: u64,
    /// Requests that were repeated, or continued after a truncated body.
    pub retries: u64,
    /// Responses with status 429 or 503: the store asks for fewer requests.
    pub throttled: u64,
    /// Requests for objects whose server gives no version, neither `ETag` nor `Last-Modified`. The
    /// replacement of such an object by one of the same length goes unnoticed.
    #[serde(default)]
    pub unversioned: u64,
    /// Time from the request to the head of its response, including the connection setup.
    pub first_byte: Latency,
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: f64| ns / 1e6;
        write!(
            f,
            "{} requests, {:.3} GB; ",
            self.requests,
            self.bytes as f64 / 1e9
        )?;
        let Latency { p50_ns, p99_ns, .. } = self.first_byte;
        write!(
            f,
            "first byte after {:.1} ms (median), {:.1} ms (p99)",
            ms(p50_ns),
            ms(p99_ns)
        )?;
        if self.retries > 0 {
            write!(f, "; {} repeated", self.retries)?;
        }
        if self.throttled > 0 {
            write!(f, "; {} throttled by the store", self.throttled)?;
        }
        if self.unversioned > 0 {
            write!(
                f,
                "; {} without a version, so a replaced object goes unnoticed",
                self.unversioned
            )?;
        }
        Ok(())
    }
}

/// Counts of a [`Network`].
#[derive(Debug, Default)]
pub struct NetworkMeter {
    clock: Clock,
    in_flight: Area,
    waiting: Area,
    requests: Lone<Counter>,
    bytes: Lone<Counter>,
    pub retries: Counter,
    pub throttled: Counter,
    pub unversioned: Counter,
    first_byte: Histogram,
}

/// A request in flight.
pub struct InFlight<'m> {
    meter: &'m NetworkMeter,
    since: u64,
}

/// A request that waits for its turn.
pub struct Waiting<'m>(&'m NetworkMeter);

impl NetworkMeter {
    pub fn new() -> Self {
        Self {
            clock: Clock::real(),
            ..Self::default()
        }
    }

    /// Notes the start of a request.
    pub fn enter(&self) -> InFlight<'_> {
        let since = self.clock.now();
        self.in_flight.enter(1, since);
        InFlight { meter: self, since }
    }

    /// Notes a request that waits until the store and its link accept one more.
    pub fn wait(&self) -> Waiting<'_> {
        self.waiting.enter(1, self.clock.now());
        Waiting(self)
    }

    pub fn read(&self) -> Network {
        Network {
            requests: self.requests.get(),
            bytes: self.bytes.get(),
            in_flight_ns: self.in_flight.total_ns(self.clock.now()),
            waiting_ns: self.waiting.total_ns(self.clock.now()),
            retries: self.retries.get(),
            throttled: self.throttled.get(),
            unversioned: self.unversioned.get(),
            first_byte: self.first_byte.read(),
        }
    }
}

impl InFlight<'_> {
    /// Notes the arrival of the response's head.
    pub fn answered(&self) {
        self.meter
            .first_byte
            .record(self.meter.clock.now() - self.since);
    }

    pub fn brought(&self, bytes: usize) {
        self.meter.bytes.add(bytes as u64);
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.meter.in_flight.leave(1, self.meter.clock.now());
        self.meter.requests.add(1);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.leave(1, self.0.clock.now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_request_counts_until_it_ends() {
        let meter = NetworkMeter::new();
        let waits = meter.wait();
        std::thread::sleep(Duration::from_millis(1));
        drop(waits);
        let request = meter.enter();
        std::thread::sleep(Duration::from_millis(3));
        request.answered();
        request.brought(1000);
        let before = meter.read();
        assert_eq!(
            (before.requests, before.bytes, before.first_byte.count),
            (0, 1000, 1)
        );
        assert!(
            before.first_byte.p50_ns >= 2.9e6 && before.in_flight_ns >= 3_000_000,
            "{before:?}"
        );
        drop(request);
        let after = meter.read();
        assert_eq!((after.requests, after.waiting_ns), (1, before.waiting_ns));
        assert!(before.waiting_ns >= 1_000_000, "{before:?}");
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(
            meter.read().in_flight_ns,
            after.in_flight_ns,
            "nothing is in flight"
        );
    }
}
