//! Snapshots and timelines of loaders that never ran: a simulation of stages that handle one batch
//! after the other.

use feedline::profile::Snapshot;
use feedline::profile::snapshot::{BatchRecord, CopyStage, Gauges, GpuIdle, Latency, Timeline};

/// Settings of a simulated loader; times in microseconds per batch.
pub struct Machine {
    pub name: &'static str,
    pub read: u64,
    pub decode: u64,
    pub copy: Option<u64>,
    pub step: u64,
    pub slots: usize,
}

pub const MACHINES: [Machine; 4] = [
    Machine {
        name: "starved by decode",
        read: 9_000,
        decode: 40_000,
        copy: None,
        step: 24_000,
        slots: 6,
    },
    Machine {
        name: "starved by storage",
        read: 55_000,
        decode: 14_000,
        copy: None,
        step: 20_000,
        slots: 4,
    },
    Machine {
        name: "healthy",
        read: 12_000,
        decode: 15_000,
        copy: None,
        step: 40_000,
        slots: 8,
    },
    Machine {
        name: "GPU, starved by copies",
        read: 6_000,
        decode: 11_000,
        copy: Some(18_000),
        step: 14_000,
        slots: 6,
    },
];

/// A small generator, so that times vary.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// About `us`, in nanoseconds; sometimes much more.
    fn about(&mut self, us: u64) -> u64 {
        let tail = if self.next() > 0.98 { 2.5 } else { 1.0 };
        (us as f64 * 1000.0 * (0.8 + 0.4 * self.next()) * tail) as u64
    }
}

pub fn latency(mut ns: Vec<f64>) -> Latency {
    ns.sort_by(f64::total_cmp);
    let mut latency = Latency::default();
    let Some(last) = ns.last() else {
        return latency;
    };
    let quantile = |share: f64| ns[((ns.len() - 1) as f64 * share) as usize];
    latency.count = ns.len() as u64;
    latency.mean_ns = ns.iter().sum::<f64>() / ns.len() as f64;
    latency.p50_ns = quantile(0.5);
    latency.p90_ns = quantile(0.9);
    latency.p99_ns = quantile(0.99);
    latency.max_ns = *last;
    for ns in &ns {
        let bucket = 1.03_f64.powf((ns.max(1.0).ln() / 1.03_f64.ln()).floor());
        match latency.buckets.last_mut() {
            Some((last, count)) if *last == bucket => *count += 1,
            _ => latency.buckets.push((bucket, 1)),
        }
    }
    latency
}

const ROWS: u32 = 256;
const DEPTH: u32 = 32;
const WORKERS: u32 = 4;

/// Measurements of such a loader after `batches`.
pub fn measured(machine: &Machine, batches: usize) -> (Snapshot, Timeline) {
    let records = run(machine, batches);
    let mut draws = Draws(7);
    let end = records.last().map_or(0, |record| record.dropped_ns);
    let start = records.first().map_or(0, |record| record.got_ns);
    let steady = end - start;
    let mut snapshot = Snapshot::default();
    snapshot.at_ns = end;
    snapshot.steady_ns = steady;
    let waits: Vec<u64> = records
        .iter()
        .skip(1)
        .map(|record| record.got_ns - record.asked_ns)
        .collect();
    let consumer = &mut snapshot.consumer;
    (consumer.batches, consumer.samples) = (batches as u64, batches as u64 * u64::from(ROWS));
    consumer.bytes = consumer.samples * 224 * 224 * 3;
    consumer.waited_ns = waits.iter().sum();
    consumer.first_ns = records
        .first()
        .map_or(0, |record| record.got_ns - record.asked_ns);
    consumer.user_ns = steady.saturating_sub(consumer.waited_ns);
    consumer.waits = latency(waits.iter().map(|ns| *ns as f64 + 800.0).collect());
    let count = batches as u64;
    let samples = consumer.samples;
    let part = |us: u64| (us * 1000 * count).min(steady);
    snapshot.order.busy_ns = 90_000 * count;
    snapshot.order.no_slot_ns = steady / 2;
    snapshot.storage.busy_ns = part(machine.read);
    snapshot.storage.blocked_ns = steady / 50;
    snapshot.storage.depth = DEPTH;
    snapshot.storage.in_flight_ns = part(machine.read) * 27;
    snapshot.storage.counts.ops = samples;
    snapshot.storage.counts.bytes_moved = samples * 112_000;
    snapshot.storage.latency = latency(
        (0..5000)
            .map(|_| draws.about(machine.read / 8) as f64)
            .collect(),
    );
    let decode = &mut snapshot.decode;
    let all = steady * u64::from(WORKERS);
    decode.workers = WORKERS;
    decode.cores = WORKERS;
    decode.samples = count * u64::from(ROWS);
    decode.busy_ns = part(machine.decode) * u64::from(WORKERS);
    decode.starved_ns = (all - decode.busy_ns) * u64::from(machine.read > machine.step) * 9 / 10;
    decode.ahead_ns = all - decode.busy_ns - decode.starved_ns;
    decode.latency = latency(
        (0..5000)
            .map(|_| draws.about(machine.decode / 64) as f64)
            .collect(),
    );
    snapshot.slots.count = machine.slots as u32;
    if let Some(us) = machine.copy {
        let mut copy = CopyStage::default();
        copy.busy_ns = part(us);
        copy.batches = count;
        copy.buffers = 2;
        copy.bytes = snapshot.consumer.bytes;
        copy.blocked_ns = steady / 40;
        copy.starved_ns = steady - copy.busy_ns - copy.blocked_ns.min(steady - copy.busy_ns);
        copy.latency = latency((0..batches).map(|_| draws.about(us) as f64).collect());
        snapshot.copy = Some(copy);
        let mut gpu = GpuIdle::default();
        gpu.steps = count.saturating_sub(1);
        gpu.starved_ns = snapshot.consumer.waited_ns * 9 / 10;
        gpu.late_ns = steady / 30;
        gpu.span_ns = steady;
        snapshot.consumer.gpu = Some(gpu);
    }
    let mut timeline = Timeline::default();
    timeline.gauges = records
        .iter()
        .map(|record| gauges(machine, &records, record.got_ns, &mut draws))
        .collect();
    timeline.batches = records;
    (snapshot, timeline)
}

fn run(machine: &Machine, batches: usize) -> Vec<BatchRecord> {
    let mut draws = Draws(1);
    let mut records: Vec<BatchRecord> = Vec::new();
    let mut read_free = 0;
    let mut decode_free = 0;
    let mut copy_free = 0;
    let mut now = 3_000_000;
    for at in 0..batches {
        let mut record = BatchRecord::default();
        record.first = at == 0;
        record.sequence = at as u64;
        record.epoch = at as u64 / 400;
        record.batch = at as u64 % 400;
        record.rows = ROWS;
        let slot = at.checked_sub(machine.slots).map_or(1_000_000, |before| {
            if machine.copy.is_some() {
                records[before].got_ns
            } else {
                records[before].dropped_ns
            }
        });
        record.planned_ns = slot + 40_000;
        let read_at = record.planned_ns.max(read_free);
        record.read_ns = read_at + draws.about(machine.read);
        read_free = record.read_ns;
        let decode = draws.about(machine.decode);
        record.full_ns =
            (decode_free.max(read_at + 1_000_000) + decode).max(record.read_ns + decode / 10);
        decode_free = record.full_ns;
        let mut ready = record.full_ns;
        if let Some(copy) = machine.copy {
            record.copied_ns = ready.max(copy_free) + 20_000;
            copy_free = record.copied_ns + draws.about(copy);
            ready = copy_free;
        }
        record.asked_ns = now;
        record.got_ns = now.max(ready) + 2_000;
        now = record.got_ns + draws.about(machine.step);
        record.dropped_ns = now - 100_000;
        records.push(record);
    }
    records
}

/// Fill levels at a moment, from the records around it.
fn gauges(machine: &Machine, records: &[BatchRecord], at_ns: u64, draws: &mut Draws) -> Gauges {
    let mut gauges = Gauges::default();
    gauges.at_ns = at_ns;
    let near = records.partition_point(|record| record.got_ns < at_ns);
    let around = &records[near.saturating_sub(2)..(near + 2 * machine.slots).min(records.len())];
    let count = |of: &dyn Fn(&&BatchRecord) -> bool| around.iter().filter(of).count() as u32;
    let reading = count(&|r| r.planned_ns <= at_ns && at_ns < r.read_ns);
    let decoding =
        count(&|r| r.planned_ns <= at_ns && at_ns < r.full_ns && r.read_ns < at_ns + 2_000_000);
    gauges.in_flight = if reading > 0 {
        DEPTH - (draws.next() * 6.0) as u32
    } else {
        0
    };
    gauges.working = if decoding > 0 {
        WORKERS - (draws.next() * 1.2) as u32
    } else {
        0
    };
    gauges.queued =
        decoding.saturating_sub(1) * 60 + (draws.next() * 20.0) as u32 * decoding.min(1);
    gauges.filling_slots = count(&|r| r.planned_ns <= at_ns && at_ns < r.full_ns);
    gauges.full_slots = count(&|r| r.full_ns <= at_ns && at_ns < r.got_ns);
    gauges.held = count(&|r| r.got_ns <= at_ns && at_ns < r.dropped_ns);
    gauges.free_slots = (machine.slots as u32)
        .saturating_sub(gauges.filling_slots + gauges.full_slots + gauges.held);
    gauges
}
