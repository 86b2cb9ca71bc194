//! What measuring costs: the same loader with its meters and without them, in turn.
//!
//! ```text
//! cargo test  --benches                                       each case once, small, so that it cannot rot
//! cargo bench --no-default-features --bench profile           30 pairs of 2 s each
//! ```
//!
//! Two cases: as many small samples as the loader can hand over (64 bytes from memory, about 10^6 and more a second), where
//! a cost per sample would show, and samples that take a worker about 100 µs each, as pictures do. Beside the ratio of the
//! pairs stands what it should be: how often the clock is read and a meter written for each batch and piece of work, times
//! what that takes here, over the time of a sample.
//!
//! The switch that turns the meters off exists for this bench only. `FEEDLINE_PAIRS` sets the number of pairs.

mod common;

use common::{as_test, compare, pairs_wanted};
use feedline::dataset::Records;
use feedline::{Loader, LoaderBuilder, Order};
use std::time::{Duration, Instant};

/// Target: share of the throughput.
const COST: f64 = 0.01;
/// Clock reads and meters written for one batch, and for one piece of work, counted in the source.
const PER_BATCH: f64 = 30.0;
const PER_PIECE: f64 = 10.0;

fn main() {
    let (pairs, seconds) = match pairs_wanted() {
        _ if as_test() => (1, 0.05),
        (0, _) => (30, 2.0),
        (pairs, seconds) => (pairs, seconds),
    };
    let event_ns = event_ns();
    println!("a clock read and a meter: {event_ns:.1} ns; target: at most {} % of the throughput", COST * 100.0);
    // Rows of a run of 512 KiB are one piece of work.
    case("small samples", pairs, seconds, &small, event_ns, |rows| PER_BATCH / rows + PER_PIECE / 8192.0);
    case("work of 100 µs", pairs, seconds, &working, event_ns, |rows| PER_BATCH / rows + PER_PIECE);
}

/// Samples of 64 bytes, from memory.
fn small() -> LoaderBuilder {
    let records = Records::builder(64).open_bytes(vec![7; 64 << 18]).unwrap();
    Loader::builder(records).order(Order::shuffled(1)).batch_size(4096)
}

/// Samples that a worker computes on for 100 µs.
fn working() -> LoaderBuilder {
    let records = Records::builder(64).open_bytes(vec![7; 64 << 12]).unwrap();
    Loader::builder(records).batch_size(64).map(|row, _| {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(100) {
            std::hint::spin_loop();
        }
        row.bytes_mut(0)[0] ^= 1;
        Ok(())
    })
}

fn case(
    name: &str,
    pairs: usize,
    seconds: f64,
    builder: &dyn Fn() -> LoaderBuilder,
    event_ns: f64,
    events: impl Fn(f64) -> f64,
) {
    let (on, off) = (builder().build().unwrap(), builder().unmeasured().build().unwrap());
    let rows = on.global_batch() as f64;
    let mut rates = Vec::new();
    compare(
        &format!("{name}: measured over unmeasured"),
        "samples/s",
        pairs,
        || {
            let rate = rate(&on, seconds);
            rates.push(rate);
            rate
        },
        || rate(&off, seconds),
    );
    let ns = 1e9 / rates.iter().copied().fold(0.0, f64::max);
    let events = events(rows);
    println!(
        "  {events:.3} events per sample × {event_ns:.1} ns ÷ {ns:.0} ns = {:.3} % expected",
        100.0 * events * event_ns / ns
    );
}

/// Samples per second over about so long, first batch excluded.
fn rate(loader: &Loader, seconds: f64) -> f64 {
    let (mut samples, mut begin) = (0, None);
    for batch in loader.epochs(0..).unwrap() {
        let batch = batch.unwrap();
        let Some(begin) = begin else {
            begin = Some(Instant::now());
            continue;
        };
        samples += batch.len();
        let elapsed = Instant::elapsed(&begin).as_secs_f64();
        if elapsed >= seconds {
            return samples as f64 / elapsed;
        }
    }
    unreachable!("it has no end")
}

/// A clock read and an atomic addition, as every meter makes them.
fn event_ns() -> f64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    let (sum, begin, times) = (AtomicU64::new(0), Instant::now(), 1_000_000);
    for _ in 0..times {
        sum.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
    std::hint::black_box(sum.load(Ordering::Relaxed));
    begin.elapsed().as_nanos() as f64 / f64::from(times)
}
