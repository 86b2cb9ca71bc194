//! The number of requests in flight that fill a link, found from measured rates. Pure: the times
//! come with each call.
//!
//! ```text
//! start: twice as many each round, while a round brings GROWS times as much
//!   │ ▲
//!   ▼ │ the first probe brings half: the start ended too early
//! probe: half as many for a window ──► brings as much? half of these
//!   ▲                                     │ less
//!   │ PROBE or more later                 ▼
//! hold:  ROOM × the requests that would bring the rate if none waited for others
//! ```
//!
//! More requests than a link can take overflow its queue; fewer than a store's latency requires
//! leave it idle. No constant suits both. Latency cannot tell a queue from a slow store, and a
//! link's queue may be too short to raise latency. But half as many requests get half the rate from
//! a slow store, and the same rate from a full link. If *n* / 2 requests get the share *r* of the
//! rate of *n*, then *n* / (2 *r*) would get all of it: they fill the link, and none waits for
//! others.
//!
//! Rates count bytes, and [`COST`] for each request. They are measured in windows that last one
//! round of requests, after the requests of the previous limit have ended. So new connections,
//! which are slow at first, affect only the comparisons of the start. A window counts only if the
//! requests in flight filled the limit. If more requests get a lower rate, the increase is undone.
//!
//! Several processes may share a link, and each gains from more requests of its own. So they all
//! probe at the same times of the system's clock. During a probe, half of all requests on a full
//! link then get the same rate as before. That works for a few processes. With eight or more,
//! limits may go up to the maximum.
//!
//! Limits: [`LEAST`] to [`REQUESTS_MAX`] requests. A probe costs up to a fifth of a full link's
//! rate, and half of a slow store's, for two windows. The time between probes is at least [`SPARE`]
//! times as long, so probes cost about 1 %. A window of few large requests is as long as one of
//! them, at most [`ROUND_MAX`].

use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// Maximum requests in flight to a store. By AWS's rule of 0.4 Gb/s per connection, that is some
/// 100 Gb/s.
pub const REQUESTS_MAX: usize = 256;

/// Number of requests in the first round.
const FIRST: f64 = 32.0;

/// Minimum number of requests: as many as a cache's downloads.
const LEAST: f64 = 8.0;

/// Doubling the requests must raise the rate by this factor. Otherwise the link is full, or nearly
/// full.
const GROWS: f64 = 1.25;

/// The limit that is held, relative to the requests that would just fill the link: one request
/// fills the pauses of another.
const ROOM: f64 = 1.6;

/// If half as many requests get this share of the rate, there were far too many.
const SAME: f64 = 0.9;

/// If half as many requests get at most this share of the rate, more requests may increase it.
const HALF: f64 = 0.6;

/// Seconds between probes: normally, and if all requests are needed.
const PROBE: u64 = 2;
const RARE: u64 = 32;

/// The time between probes is at least this many times the time of a probe.
const SPARE: u32 = 16;

/// If the rate differs from the last one by more than this share, the link has changed.
const CHANGED: f64 = 0.25;

/// Minimum time of a measurement, and maximum time of a round.
const WINDOW: Duration = Duration::from_millis(100);
const ROUND_MAX: Duration = Duration::from_secs(3);

/// Minimum number of requests in a measurement, because their sizes differ.
const MEASURED: usize = 64;

/// Minimum share of the limit that requests in flight must fill.
const FILLED: f64 = 0.85;

/// The cost of a request besides its bytes, in bytes.
const COST: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// The limit doubles each round. Holds the rate of the previous round.
    Start(f64),
    /// The requests of the previous limit are ending.
    Settle(Then),
    Hold,
    Probe,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Start,
    Hold,
    Probe,
}

pub(super) struct Climb {
    phase: Phase,
    pub(super) limit: f64,
    /// The rate at the current limit, and the number of windows that it was measured in.
    rate: f64,
    windows: u32,
    /// Whether the next probe tells if the start ended too early.
    starts: bool,
    /// Limit and rate before the last probe.
    kept: (f64, f64),
    /// Requests in flight, and since when.
    in_flight: usize,
    since: Instant,
    window: Window,
    /// When the next probe begins, and the last one began.
    next: Instant,
    probed: Instant,
    /// The system's clock at `began`.
    clock: Duration,
    began: Instant,
}

struct Window {
    began: Instant,
    limit: f64,
    ended: usize,
    /// All bytes from the store at its begin.
    bytes: u64,
    /// Requests in flight × seconds.
    area: f64,
}

impl Climb {
    pub(super) fn new(now: Instant) -> Self {
        Self::at(now, SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default())
    }

    /// `clock`: the time of the system's clock.
    fn at(now: Instant, clock: Duration) -> Self {
        Self {
            phase: Phase::Start(0.0),
            limit: FIRST,
            rate: 0.0,
            windows: 0,
            starts: false,
            kept: (REQUESTS_MAX as f64, 0.0),
            in_flight: 0,
            since: now,
            window: Window::new(now, FIRST, 0),
            next: now,
            probed: now,
            clock,
            began: now,
        }
    }

    /// Records that `in_flight` requests run from now on. `bytes`: if a request was completed, the
    /// bytes received from the store in total.
    pub(super) fn moved(&mut self, now: Instant, in_flight: usize, bytes: Option<u64>) {
        self.window.area += self.in_flight as f64 * (now - self.since).as_secs_f64();
        let full = self.in_flight as f64 >= FILLED * self.limit;
        self.in_flight = in_flight;
        self.since = now;
        let Some(bytes) = bytes else { return };
        self.window.ended += 1;
        if matches!(self.phase, Phase::Start(_)) && full {
            self.limit = (self.limit + 1.0).min(REQUESTS_MAX as f64);
        }
        let time = now - self.window.began;
        let round = self.window.ended as f64 >= self.window.limit;
        let enough = match self.phase {
            Phase::Hold | Phase::Probe => {
                time >= WINDOW && (self.window.ended >= MEASURED || time >= WINDOW * 10)
            }
            Phase::Start(_) => self.window.ended >= FIRST as usize,
            Phase::Settle(_) => true,
        };
        if (round && enough) || time >= ROUND_MAX {
            let window = std::mem::replace(&mut self.window, Window::new(now, 0.0, bytes));
            self.end(&window, bytes, now);
            self.window.limit = self.limit;
        }
    }

    fn end(&mut self, window: &Window, bytes: u64, now: Instant) {
        let seconds = (now - window.began).as_secs_f64().max(1e-9);
        let filled = window.area >= FILLED * window.limit * seconds;
        let rate =
            (bytes.saturating_sub(window.bytes) + COST * window.ended as u64) as f64 / seconds;
        match self.phase {
            Phase::Settle(Then::Start) => self.phase = Phase::Start(self.rate),
            Phase::Settle(Then::Hold) => self.phase = Phase::Hold,
            Phase::Settle(Then::Probe) => self.phase = Phase::Probe,
            Phase::Start(_) | Phase::Hold if !filled => {}
            Phase::Start(before) if rate >= GROWS * before => {
                let most = self.limit >= REQUESTS_MAX as f64;
                if most {
                    self.next = self.after(PROBE, now);
                    self.hold_at(self.limit);
                } else {
                    self.phase = Phase::Start(rate);
                }
            }
            Phase::Start(_) => {
                self.kept = (REQUESTS_MAX as f64, 0.0);
                self.next = now;
                self.starts = true;
                self.hold_at(window.limit);
            }
            Phase::Hold => self.hold(rate, now),
            Phase::Probe => self.judge(rate, filled, now),
        }
    }

    fn hold(&mut self, rate: f64, now: Instant) {
        if self.windows > 0 && (rate - self.rate).abs() > CHANGED * self.rate {
            self.next = self.next.min(self.after(PROBE, now));
        }
        self.windows += 1;
        self.rate += (rate - self.rate) / f64::from(self.windows.min(4));
        let (limit, before) = self.kept;
        if self.windows == 2 && self.limit > limit && self.rate < before {
            self.hold_at(limit);
        } else if now >= self.next {
            self.kept = (self.limit, self.rate);
            self.probed = now;
            self.halve();
        }
    }

    fn hold_at(&mut self, limit: f64) {
        self.limit = limit;
        self.phase = Phase::Settle(Then::Hold);
        self.rate = 0.0;
        self.windows = 0;
    }

    fn halve(&mut self) {
        self.limit = (self.limit / 2.0).floor().max(1.0);
        self.phase = Phase::Settle(Then::Probe);
    }

    /// Evaluates a probe that measured `rate`.
    fn judge(&mut self, rate: f64, filled: bool, now: Instant) {
        let most = REQUESTS_MAX as f64;
        let share = (rate / self.kept.1).max(0.5);
        let needs_all = filled && share <= HALF;
        if std::mem::take(&mut self.starts) && needs_all && self.kept.0 < most {
            self.limit = self.kept.0;
            self.rate = rate;
            self.phase = Phase::Settle(Then::Start);
            return;
        }
        if filled && share >= SAME && self.limit > LEAST {
            return self.halve();
        }
        let grows = needs_all && self.kept.0 < most;
        let mut again = if needs_all && !grows { RARE } else { PROBE };
        while !grows && again < RARE && Duration::from_secs(again) < (now - self.probed) * SPARE {
            again *= 2;
        }
        self.next = self.after(again, now);
        let wanted = if filled {
            ROOM * self.limit / share
        } else {
            self.kept.0
        };
        self.hold_at(wanted.clamp(LEAST, most).floor());
    }

    /// The next time of the system's clock that is a multiple of `seconds`.
    fn after(&self, seconds: u64, now: Instant) -> Instant {
        let clock = (self.clock + (now - self.began)).as_nanos();
        let step = u128::from(seconds) * 1_000_000_000;
        now + Duration::from_nanos((step - clock % step) as u64)
    }
}

impl Window {
    fn new(began: Instant, limit: f64, bytes: u64) -> Self {
        Self {
            began,
            limit,
            ended: 0,
            bytes,
            area: 0.0,
        }
    }
}

#[cfg(test)]
mod tests;
