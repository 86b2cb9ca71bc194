//! Requests in flight to one store, shared by all loaders of the process: additive increase, multiplicative decrease.
//!
//! A throttled request (429, 503) multiplies the limit by [`CUT`], at most once per [`CALM`], and honours
//! `Retry-After`. A completed request raises it by 1 / limit, so by about one per round of requests.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Requests in flight of a store without trouble. By AWS's rule of 0.4 Gb/s per connection that is some 100 Gb/s.
pub(super) const REQUESTS_MAX: usize = 256;

const CUT: f64 = 0.7;

/// All requests in flight meet the same throttling, which counts once.
const CALM: Duration = Duration::from_millis(200);

/// Longest pause that a server may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(20);

pub(super) struct Limit {
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    limit: f64,
    in_flight: usize,
    /// No request starts before.
    until: Option<Instant>,
    cut: Option<Instant>,
}

/// The right to one request.
pub(super) struct Permit<'l>(&'l Limit);

impl Limit {
    pub(super) fn new() -> Self {
        let state = State { limit: REQUESTS_MAX as f64, in_flight: 0, until: None, cut: None };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// Waits until a request may start.
    pub(super) async fn enter(&self) -> Permit<'_> {
        loop {
            let pause = {
                let mut state = self.lock();
                let now = Instant::now();
                match state.until {
                    Some(until) if until > now => Some(until),
                    _ if state.in_flight < state.limit as usize => {
                        state.in_flight += 1;
                        return Permit(self);
                    }
                    _ => None,
                }
            };
            match pause {
                Some(until) => tokio::time::sleep_until(until).await,
                // A permit that is given back meanwhile leaves its notice here. A task that took it may have ended in its
                // pause, so nobody relies on notices alone.
                None => drop(tokio::time::timeout(CALM, self.changed.notified()).await),
            }
        }
    }
}

impl Permit<'_> {
    /// The request brought its bytes.
    pub(super) fn done(self) {
        if self.0.lock().grow() {
            self.0.changed.notify_one();
        }
    }

    /// The store asked for fewer requests.
    pub(super) fn throttled(self, retry_after: Option<Duration>) {
        self.0.lock().shrink(Instant::now(), retry_after);
    }
}

impl State {
    /// True if one more request fits.
    fn grow(&mut self) -> bool {
        let before = self.limit as usize;
        self.limit = (self.limit + 1.0 / self.limit).min(REQUESTS_MAX as f64);
        self.limit as usize > before
    }

    fn shrink(&mut self, now: Instant, retry_after: Option<Duration>) {
        if self.cut.is_none_or(|cut| now - cut >= CALM) {
            self.cut = Some(now);
            self.limit = (self.limit * CUT).max(1.0);
        }
        if let Some(pause) = retry_after {
            self.until = self.until.max(Some(now + pause.min(PAUSE_MAX)));
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.lock().in_flight -= 1;
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    #[test]
    fn throttling_lowers_the_limit_once_per_storm_and_success_raises_it() {
        let mut state = Limit::new().state.into_inner().unwrap();
        let start = Instant::now();
        (0..3).for_each(|k| state.shrink(start + CALM / 4 * k, None));
        assert_eq!(state.limit as usize, 179);
        let cut = state.limit;
        let grown = (0..=cut as usize).filter(|_| state.grow()).count();
        assert_eq!(grown, 1);
        assert!((state.limit - cut - 1.0).abs() < 0.1);
        (1..50).for_each(|k| state.shrink(start + CALM * k, None));
        assert_eq!(state.limit, 1.0);
    }

    #[test]
    fn retry_after_delays_the_next_request() {
        run(async {
            let limit = Limit::new();
            limit.enter().await.throttled(Some(Duration::from_millis(30)));
            let asked = Instant::now();
            drop(limit.enter().await);
            assert!(asked.elapsed() >= Duration::from_millis(30));
        });
    }

    #[test]
    fn a_request_over_the_limit_waits_for_a_permit() {
        run(async {
            let limit = Limit::new();
            limit.lock().limit = 1.0;
            let first = limit.enter().await;
            let mut second = std::pin::pin!(limit.enter());
            assert!(tokio::time::timeout(Duration::from_millis(20), &mut second).await.is_err());
            drop(first);
            drop(second.await);
            assert_eq!(limit.lock().in_flight, 0);
        });
    }
}
