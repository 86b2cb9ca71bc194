//! What is tested: the causes that are named for a snapshot, and what a change would give. All that has to be replaced where
//! another verdict shall be tested.

use crate::profile::Snapshot;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    Consumer,
    Decode,
    Storage,
    Order,
    Memory,
}

#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) workers: Option<u32>,
    pub(super) storage: f64,
}

impl Default for Change {
    fn default() -> Self {
        Self { workers: None, storage: 1.0 }
    }
}

const STAGES: [Cause; 4] = [Cause::Consumer, Cause::Decode, Cause::Storage, Cause::Order];

/// Shares of the steady time.
pub(super) fn loads(snapshot: &Snapshot) -> [f64; 4] {
    let share = |ns: u64| ns as f64 / snapshot.steady_ns as f64;
    [
        1.0 - share(snapshot.consumer.waited_ns),
        share(snapshot.decode.busy_ns) / f64::from(snapshot.decode.workers),
        share(snapshot.storage.needed_ns()),
        share(snapshot.order.busy_ns),
    ]
}

/// Reads in flight while any were, as a share of those that the rows of the batches being filled and the depth allow.
pub(super) fn filled(snapshot: &Snapshot) -> f64 {
    let (storage, steady) = (&snapshot.storage, snapshot.steady_ns.max(1) as f64);
    let rows = snapshot.consumer.samples as f64 / snapshot.consumer.batches.max(1) as f64;
    let filling = snapshot.slots.filling_ns as f64 / steady * rows;
    storage.in_flight_ns as f64 / storage.busy_ns.max(1) as f64 / filling.min(f64::from(storage.depth)).max(1.0)
}

/// The cause, and others that are nearly as much one.
pub(super) fn named(snapshot: &Snapshot) -> Vec<Cause> {
    let mut loads = loads(snapshot);
    if filled(snapshot) < 0.4 {
        // It is not known what it could do.
        loads[2] = loads[2].min(0.79);
    }
    // It was not seen when reads ended while the planner was at work.
    loads[2] = loads[2].min(1.0 - 0.01 * loads[3]);
    let top = loads.iter().copied().fold(0.0, f64::max);
    if top < 0.8 {
        return vec![Cause::Memory];
    }
    let mut near: Vec<_> = STAGES.into_iter().zip(loads).filter(|(_, load)| *load * 1.2 >= top).collect();
    near.sort_by(|a, b| b.1.total_cmp(&a.1));
    near.into_iter().map(|(cause, _)| cause).collect()
}

/// Samples per second after a change, and whether it is a lower bound: storage would limit, and may do more than was seen.
pub(super) fn predicted(snapshot: &Snapshot, change: &Change) -> (f64, bool) {
    let loads = loads(snapshot);
    let norm = |loads: &[f64], p: f64| loads.iter().map(|load| load.powf(p)).sum::<f64>().powf(1.0 / p);
    // The p at which the norm is 1.
    let (mut low, mut high) = (1.0, 64.0);
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if norm(&loads, middle) > 1.0 { low = middle } else { high = middle }
    }
    let workers = f64::from(snapshot.decode.workers);
    let mut changed = loads;
    changed[1] *= workers / change.workers.map_or(workers, f64::from);
    changed[2] /= change.storage;
    let rate = snapshot.consumer.samples as f64 / snapshot.steady_ns as f64 * 1e9;
    let top = changed.iter().copied().fold(0.0, f64::max);
    let storage = &snapshot.storage;
    let depth_filled = storage.in_flight_ns as f64 / storage.busy_ns.max(1) as f64 / f64::from(storage.depth);
    (rate * norm(&loads, high) / norm(&changed, high), changed[2] > 0.6 * top && depth_filled < 0.75)
}
