//! Requests in flight to one store, shared by all loaders of the process: additive increase,
//! multiplicative decrease.
//!
//! A throttled request (429, 503) multiplies the limit by [`CUT`], at most once per [`CALM`] and
//! round of requests, and honours `Retry-After`. A completed request raises it by 1 / limit, so by
//! about one per round.
//!
//! Latency counts as well, since some stores queue requests where others throttle. A try without an
//! answer counts as throttled, and so does a late answer. An answer is late if its first byte takes
//! longer than 1 / [`LATE`] of the patience, and longer than [`LATE_TIMES`] × the store's best
//! time. With 10 s of patience, such a request waited for 2 s or more, so the store always had
//! requests in its queue. With fewer requests, fewer wait, and the rate stays the same. The rule
//! leaves at least [`LATE_LEAST`] requests. It compares no rates, which depend on the sizes of
//! requests and on the loader's own demand.
//!
//! The link to the store has its own limit, [`Climb`]. The smaller limit applies.

use super::climb::Climb;
pub(super) use super::climb::REQUESTS_MAX;
use feedline_base::sync::Hold;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

const CUT: f64 = 0.7;

/// An answer is late after 1 / `LATE` of the patience.
const LATE: u32 = 4;

const LATE_TIMES: u32 = 4;

/// Late answers do not lower the limit below this, because an idle store may also answer slowly.
const LATE_LEAST: f64 = 16.0;

/// One throttling affects all requests in flight, and counts once.
const CALM: Duration = Duration::from_millis(200);

/// Longest pause that a server may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(20);

pub(super) struct Limit {
    state: Mutex<LimitState>,
    changed: Notify,
    /// All bytes that requests have received.
    bytes: AtomicU64,
}

struct LimitState {
    /// The limit that follows from the store's answers; the link has a limit of its own.
    limit: f64,
    climb: Climb,
    in_flight: usize,
    /// No request starts before this time.
    until: Option<Instant>,
    cut: Option<Instant>,
    /// Shortest time to a first byte.
    best: Duration,
}

/// The right to one request.
pub(super) struct Permit<'l> {
    limit: &'l Limit,
    began: Instant,
    done: bool,
}

impl Limit {
    pub(super) fn new() -> Self {
        let climb = Climb::new(Instant::now());
        let state = LimitState {
            limit: REQUESTS_MAX as f64,
            climb,
            in_flight: 0,
            until: None,
            cut: None,
            best: Duration::MAX,
        };
        Self {
            state: Mutex::new(state),
            changed: Notify::new(),
            bytes: AtomicU64::new(0),
        }
    }

    /// Waits until a request may start.
    pub(super) async fn enter(&self) -> Permit<'_> {
        loop {
            let pause = {
                let mut state = self.state.hold();
                let now = Instant::now();
                match state.until {
                    Some(until) if until > now => Some(until),
                    _ if state.in_flight < state.most() => {
                        let in_flight = state.in_flight + 1;
                        state.moves(now, in_flight, None);
                        return Permit {
                            limit: self,
                            began: now,
                            done: false,
                        };
                    }
                    _ => None,
                }
            };
            match pause {
                Some(until) => tokio::time::sleep_until(until).await,
                // A permit that is returned meanwhile leaves its notification here. A task that
                // took the notification may have ended in its pause, so there is also a timeout.
                None => drop(tokio::time::timeout(CALM, self.changed.notified()).await),
            }
        }
    }
}

impl Permit<'_> {
    /// Records that the first byte arrived.
    pub(super) fn answered(&self, patience: Duration) {
        self.limit
            .state
            .hold()
            .answer(self.began, Instant::now(), patience);
    }

    pub(super) fn brought(&self, bytes: usize) {
        self.limit.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Records that the request received all its bytes.
    pub(super) fn done(mut self) {
        self.done = true;
    }

    /// Records that the store asked for fewer requests.
    pub(super) fn throttled(self, retry_after: Option<Duration>) {
        self.limit
            .state
            .hold()
            .shrink(self.began, Instant::now(), retry_after);
    }
}

impl LimitState {
    /// Maximum number of requests in flight.
    fn most(&self) -> usize {
        self.limit.min(self.climb.limit) as usize
    }

    /// Records that a request began or ended. `bytes`: if it received all its bytes, the bytes
    /// received by all requests.
    fn moves(&mut self, now: Instant, in_flight: usize, bytes: Option<u64>) {
        self.in_flight = in_flight;
        self.climb.moved(now, in_flight, bytes);
        if bytes.is_some() {
            self.grow();
        }
    }

    fn grow(&mut self) {
        self.limit = (self.limit + 1.0 / self.limit).min(REQUESTS_MAX as f64);
    }

    fn answer(&mut self, began: Instant, now: Instant, patience: Duration) {
        let time = now - began;
        self.best = self.best.min(time);
        if time > patience / LATE
            && time > self.best.saturating_mul(LATE_TIMES)
            && self.limit > LATE_LEAST
        {
            self.shrink(began, now, None);
        }
    }

    fn shrink(&mut self, began: Instant, now: Instant, retry_after: Option<Duration>) {
        if self.cut.is_none_or(|cut| began >= cut && now - cut >= CALM) {
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
        let more = {
            let mut state = self.limit.state.hold();
            // Read under the lock, so that it never decreases between windows.
            let bytes = self.done.then(|| self.limit.bytes.load(Ordering::Relaxed));
            let before = state.most();
            let in_flight = state.in_flight - 1;
            state.moves(Instant::now(), in_flight, bytes);
            state.most().saturating_sub(before)
        };
        (0..=more).for_each(|_| self.limit.changed.notify_one());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(future)
    }

    #[test]
    fn throttling_lowers_the_limit_once_per_storm_and_success_raises_it() {
        let mut state = Limit::new().state.into_inner().unwrap();
        let start = Instant::now();
        (0..3).for_each(|k| state.shrink(start, start + CALM / 4 * k, None));
        assert_eq!(state.limit as usize, 179);
        let cut = state.limit;
        (0..=cut as usize).for_each(|_| state.grow());
        assert!((state.limit - cut - 1.0).abs() < 0.1);
        (1..50).for_each(|k| state.shrink(start + CALM * k, start + CALM * k, None));
        assert_eq!(state.limit, 1.0);
    }

    /// Simulates a store of `workers` that queues requests, with clients that send a request
    /// whenever they may. Returns the answers in the last minute of five, and the requests in
    /// flight at the end.
    fn queue(workers: usize, service: Duration, patience: Duration) -> (usize, usize) {
        let mut state = Limit::new().state.into_inner().unwrap();
        let start = Instant::now();
        let mut free: BinaryHeap<_> = vec![Reverse(start); workers].into();
        let mut in_flight = BinaryHeap::new();
        let mut now = start;
        let mut answers = 0;
        while now < start + Duration::from_secs(300) {
            while in_flight.len() < state.limit as usize {
                let mut worker = free.peek_mut().unwrap();
                worker.0 = worker.0.max(now) + service;
                in_flight.push(Reverse((worker.0, now)));
            }
            let Reverse((end, began)) = in_flight.pop().unwrap();
            now = end;
            state.answer(began, now, patience);
            state.grow();
            answers += usize::from(now > start + Duration::from_secs(240));
        }
        (answers, in_flight.len())
    }

    #[test]
    fn a_queue_at_the_store_lowers_the_limit_and_keeps_the_rate() {
        let patience = Duration::from_secs(10);
        let ms = Duration::from_millis;
        // Workers, time per request, and whether 256 requests wait for 2.5 s.
        for (workers, service, queues) in [
            (1, ms(100), true),
            (4, ms(100), true),
            (32, ms(500), true),
            (8, ms(10), false),
            (256, ms(200), false),
        ] {
            let (answers, in_flight) = queue(workers, service, patience);
            let all = workers * 60_000 / service.as_millis() as usize;
            assert!(
                answers.abs_diff(all) <= workers,
                "{workers} workers: {answers} of {all}"
            );
            assert_eq!(
                in_flight + 1 < REQUESTS_MAX,
                queues,
                "{workers} workers: {in_flight}"
            );
            // No request comes near the patience.
            assert!(
                !queues || service * in_flight as u32 / (workers as u32) < patience / 3,
                "{workers}: {in_flight}"
            );
        }
    }

    #[test]
    fn a_slow_store_without_a_queue_keeps_its_requests() {
        let mut state = Limit::new().state.into_inner().unwrap();
        let start = Instant::now();
        let slow = Duration::from_secs(3);
        (0..100).for_each(|k| {
            state.answer(
                start + slow * k,
                start + slow * (k + 1),
                Duration::from_secs(10),
            )
        });
        assert_eq!(state.limit as usize, REQUESTS_MAX);
        // After one fast answer, answers are late for other causes: some requests remain.
        state.answer(start, start, Duration::from_secs(10));
        (100..200).for_each(|k| {
            state.answer(
                start + slow * k,
                start + slow * (k + 1),
                Duration::from_secs(10),
            )
        });
        assert!(
            (LATE_LEAST * CUT..=LATE_LEAST).contains(&state.limit),
            "{}",
            state.limit
        );
    }

    #[test]
    fn retry_after_delays_the_next_request() {
        run(async {
            let limit = Limit::new();
            limit
                .enter()
                .await
                .throttled(Some(Duration::from_millis(30)));
            let asked = Instant::now();
            drop(limit.enter().await);
            assert!(asked.elapsed() >= Duration::from_millis(30));
        });
    }

    #[test]
    fn a_request_over_the_limit_waits_for_a_permit() {
        run(async {
            let limit = Limit::new();
            limit.state.hold().limit = 1.0;
            let first = limit.enter().await;
            let mut second = std::pin::pin!(limit.enter());
            assert!(
                tokio::time::timeout(Duration::from_millis(20), &mut second)
                    .await
                    .is_err()
            );
            drop(first);
            drop(second.await);
            assert_eq!(limit.state.hold().in_flight, 0);
        });
    }
}
