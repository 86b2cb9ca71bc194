//! Simulated links: a rate, a delay, and a queue that drops what does not fit.

use super::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const MB: f64 = 1e6;
const KIB: u64 = 1024;
const RECORD: u64 = 150_528;

/// Bytes that a connection sends at first in a round trip; twice as many in each that follows.
const BURST: u64 = 160_000;

/// A sender notices so late that all of a burst was lost.
const LOST: f64 = 0.2;

#[derive(Clone)]
struct Link {
    /// Bytes per second, from a time on.
    rates: Vec<(f64, f64)>,
    rtt: f64,
    queue: f64,
    /// Shortest time to a first byte at the store, and what is added to it at most.
    store: (f64, f64),
}

fn link(rate: f64, rtt: f64, queue: f64) -> Link {
    Link {
        rates: vec![(0.0, rate * MB)],
        rtt,
        queue: queue * MB,
        store: (0.0, 0.0),
    }
}

fn store(least: f64, spread: f64) -> Link {
    Link {
        store: (least, spread),
        ..link(1e6, 0.001, 1e6)
    }
}

/// A request's bytes that are left to send, or 0 where it ends; those of its next burst.
struct Event {
    process: usize,
    left: u64,
    burst: u64,
    bytes: u64,
}

/// What came of the last ten of forty seconds.
struct Outcome {
    /// Bytes per second, all together.
    rate: f64,
    /// Requests of all in flight, on average, and the limits at the end.
    in_flight: f64,
    limits: Vec<usize>,
}

/// Times in nanoseconds, so that they can be sorted.
fn run(link: &Link, sizes: &[u64], processes: usize, demand: usize) -> Outcome {
    const END: f64 = 40.0;
    let start = Instant::now();
    let at = |time: f64| start + Duration::from_secs_f64(time);
    let mut climbs: Vec<_> = (0..processes)
        .map(|_| Climb::at(start, Duration::from_millis(300)))
        .collect();
    let mut in_flight = vec![0; processes];
    let mut came = vec![0; processes];
    let (mut events, mut queue): (Vec<Event>, BinaryHeap<Reverse<(u64, usize)>>) =
        Default::default();
    let mut time = 0.0_f64;
    let mut free = 0.0_f64;
    let mut bytes = 0;
    let mut area = 0.0;
    let mut seed = 1_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) as f64 / (1_u64 << 53) as f64
    };
    loop {
        for (process, climb) in climbs.iter_mut().enumerate() {
            while in_flight[process] < (climb.limit as usize).min(demand) {
                in_flight[process] += 1;
                climb.moved(at(time), in_flight[process], None);
                let size = sizes[(random() * sizes.len() as f64) as usize];
                events.push(Event {
                    process,
                    left: size,
                    burst: BURST,
                    bytes: size,
                });
                let first = time + link.rtt / 2.0 + link.store.0 + link.store.1 * random();
                queue.push(Reverse(((first * 1e9) as u64, events.len() - 1)));
            }
        }
        let Reverse((next, number)) = queue.pop().unwrap();
        let next = next as f64 / 1e9;
        if next >= END {
            break;
        }
        if next >= END - 10.0 {
            area += in_flight.iter().sum::<usize>() as f64 * (next - time);
        }
        time = next;
        let event = &mut events[number];
        if event.left == 0 {
            in_flight[event.process] -= 1;
            came[event.process] += event.bytes;
            climbs[event.process].moved(
                at(time),
                in_flight[event.process],
                Some(came[event.process]),
            );
            bytes += if time >= END - 10.0 { event.bytes } else { 0 };
            continue;
        }
        let rate = link
            .rates
            .iter()
            .rev()
            .find(|(from, _)| *from <= time)
            .unwrap()
            .1;
        free = free.max(time);
        let wanted = event.left.min(event.burst);
        let room = (link.queue - (free - time) * rate).max(0.0) as u64;
        let fits = wanted.min(room);
        free += fits as f64 / rate;
        event.left -= fits;
        let (pause, burst) = match (fits, event.left) {
            (_, 0) => (free - time + link.rtt / 2.0, 0),
            (0, _) => (LOST, event.burst / 2),
            _ if fits < wanted => (free - time + link.rtt, event.burst / 2),
            _ => (free - time + link.rtt, event.burst * 2),
        };
        event.burst = burst.max(BURST / 10);
        queue.push(Reverse((((time + pause) * 1e9) as u64, number)));
    }
    let limits = climbs.iter().map(|climb| climb.limit as usize).collect();
    Outcome {
        rate: bytes as f64 / 10.0,
        in_flight: area / 10.0,
        limits,
    }
}

#[test]
fn a_link_is_filled_and_its_queue_is_not() {
    let records = [RECORD];
    let mixed = [4 * KIB, RECORD, 2048 * KIB];
    // Sizes, rate in MB/s, round trip, queue in MB, the least share of the rate, the most bytes in
    // flight in MB.
    let table = [
        (&records[..], 250.0, 0.02, 1.5, 0.95, 13.0),
        (&records[..], 250.0, 0.02, 5.0, 0.95, 13.0),
        (&records[..], 250.0, 0.02, 16.0, 0.95, 13.0),
        (&records[..], 250.0, 0.02, 64.0, 0.95, 13.0),
        (&records[..], 12.5, 0.03, 1.0, 0.95, 4.0),
        (&records[..], 1250.0, 0.001, 16.0, 0.95, 13.0),
        (&[4 * KIB], 10.0, 0.02, 1.0, 0.95, 1.0),
        (&[2048 * KIB], 250.0, 0.02, 16.0, 0.9, 60.0),
        (&mixed, 250.0, 0.02, 16.0, 0.9, 30.0),
    ];
    for (sizes, rate, rtt, queue, share, most) in table {
        let outcome = run(&link(rate, rtt, queue), sizes, 1, REQUESTS_MAX);
        let mean = sizes.iter().sum::<u64>() as f64 / sizes.len() as f64;
        let got = outcome.rate / (rate * MB);
        let bytes = outcome.in_flight * mean / MB;
        let case = format!(
            "{sizes:?} {rate} {rtt} {queue}: {got:.3}, {bytes:.1} MB, {:?}",
            outcome.limits
        );
        println!("{case}");
        assert!(got >= share && bytes <= most, "{case}");
    }
}

#[test]
fn a_store_that_is_only_slow_gets_all_requests() {
    for (least, spread) in [(0.02, 0.0), (0.1, 0.0), (0.02, 0.16)] {
        for sizes in [&[4 * KIB][..], &[RECORD], &[4 * KIB, RECORD, 2048 * KIB]] {
            let outcome = run(&store(least, spread), sizes, 1, REQUESTS_MAX);
            let case = format!(
                "{least} {spread} {sizes:?}: {:.1}, {:?}",
                outcome.in_flight, outcome.limits
            );
            println!("{case}");
            // A probe now and then.
            assert!(
                outcome.limits == [REQUESTS_MAX] && outcome.in_flight >= 0.97 * REQUESTS_MAX as f64,
                "{case}"
            );
        }
    }
}

#[test]
fn a_link_that_changes_is_followed() {
    for (before, after) in [(125.0, 500.0), (500.0, 125.0)] {
        let rates = vec![(0.0, before * MB), (20.0, after * MB)];
        let outcome = run(
            &Link {
                rates,
                ..link(before, 0.02, 10.0)
            },
            &[RECORD],
            1,
            REQUESTS_MAX,
        );
        let got = outcome.rate / (after * MB);
        let limits = &outcome.limits;
        println!("{before} to {after}: {got:.3}, {limits:?}");
        assert!(
            got >= 0.95 && outcome.in_flight <= 3.0 * after * MB * 0.02 / RECORD as f64,
            "{got} {limits:?}"
        );
    }
}

#[test]
fn processes_share_a_link() {
    for (processes, queue) in [(2, 5.0), (2, 64.0), (4, 16.0), (8, 16.0)] {
        let outcome = run(
            &link(250.0, 0.02, queue),
            &[RECORD],
            processes,
            REQUESTS_MAX,
        );
        let got = outcome.rate / (250.0 * MB);
        let limits = &outcome.limits;
        println!(
            "{processes} {queue}: {got:.3}, {:.0}, {limits:?}",
            outcome.in_flight
        );
        assert!(got >= 0.95, "{processes} {queue}: {got} {limits:?}");
    }
}

#[test]
fn a_loader_that_asks_for_little_tells_nothing() {
    // Eight downloads of a cache; a few records.
    for (sizes, demand) in [(8192 * KIB, 8), (RECORD, 20)] {
        let outcome = run(&link(250.0, 0.02, 16.0), &[sizes], 1, demand);
        assert_eq!(outcome.limits, [FIRST as usize], "{sizes} {demand}");
    }
}
