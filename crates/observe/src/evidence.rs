//! The measurements behind a diagnosis, in sentences. Pure.

use crate::codes::{Cause, Evidence, Measure};
use crate::shares::Shares;
use feedline_report::Unit;

/// A share below this is left out.
const WORTH: f64 = 0.02;
const WORTH_SAYING: f64 = 0.1;

/// The evidence for a cause.
pub fn of(shares: &Shares<'_>, cause: Cause) -> Vec<Evidence> {
    let mut rows = Rows(Vec::new());
    if shares.seen.consumer.steady_batches == 0 {
        return rows.0;
    }
    rows.share(
        Measure::Waited,
        shares.starved,
        "the loop waits for batches",
    );
    if let Some(idle) = shares.gpu_idle {
        rows.share(Measure::GpuIdle, idle, "the GPU has no step");
    }
    if shares.restarts >= WORTH {
        rows.share(Measure::Starts, shares.restarts, "epochs start and end");
    }
    if matches!(cause, Cause::NotStarved | Cause::WorkerStart) {
        return rows.0;
    }
    of_workers(shares, cause, &mut rows);
    of_loop(shares, cause, &mut rows);
    of_machine(shares, cause, &mut rows);
    rows.0
}

/// What the workers do, or whoever else makes the batches.
fn of_workers(shares: &Shares<'_>, cause: Cause, rows: &mut Rows) {
    let by_workers = !shares.workers.is_empty();
    if by_workers {
        rows.share(Measure::WorkersBusy, shares.busy, "workers have a task");
    }
    if let Some((worker, next)) = shares.slowest()
        && cause == Cause::SlowWorker
    {
        let number = worker.number;
        let next = 100.0 * next;
        let words = format!("worker {number} has a task (the next one {next:.0} %)");
        rows.share(Measure::BusiestWorker, worker.busy(), &words);
    }
    if shares.is_ahead() {
        return;
    }
    let places = shares.producing();
    let reads = places.storage + places.network_storage;
    let blocked = places.lock + places.sleep + places.pipe + places.other;
    let table = [
        (Measure::Computing, places.running, "compute", "computes"),
        (Measure::Reading, reads, "read files", "reads files"),
        (
            Measure::AtSockets,
            places.network,
            "wait at sockets",
            "waits at sockets",
        ),
        (
            Measure::Blocked,
            blocked,
            "wait for something else",
            "waits for something else",
        ),
    ];
    for (measure, count, many, one) in table {
        let part = shares.at(&places, count);
        let words = if by_workers {
            format!("workers with a task {many}")
        } else {
            format!("while the loop waits, the loader {one}")
        };
        if part >= WORTH_SAYING {
            rows.share(measure, part, &words);
        }
    }
    if shares.delayed >= WORTH_SAYING && shares.worker_cores >= 0.2 {
        let words = "workers that could compute have no core";
        rows.share(Measure::WithoutCore, shares.delayed, words);
    }
}

/// The loop's own thread, and what comes to it.
fn of_loop(shares: &Shares<'_>, cause: Cause, rows: &mut Rows) {
    if shares.loop_delayed >= 0.05 {
        let words = "the loop's own thread has no core";
        rows.share(Measure::LoopWithoutCore, shares.loop_delayed, words);
    }
    if shares.loop_computes >= 0.3 {
        let words = "in its waits the loop's own thread computes";
        rows.share(Measure::LoopComputing, shares.loop_computes, words);
    }
    if shares.lock_late >= 0.3 {
        rows.share(
            Measure::LateLock,
            shares.lock_late,
            "in waits the GIL is taken",
        );
    }
    if cause == Cause::Uneven {
        let words = "the longest tenth of the waits has this part of the waiting time";
        rows.share(Measure::LongestWaits, shares.longest, words);
    }
    if shares.pickled >= 50_000.0 {
        let text = format!("a batch is pickled in {:.1} MB", shares.pickled / 1e6);
        rows.amount(Measure::PickledBytes, shares.pickled, Unit::Bytes, text);
    }
}

fn of_machine(shares: &Shares<'_>, cause: Cause, rows: &mut Rows) {
    if shares.throttled >= WORTH {
        let words = "the quota withholds a core";
        rows.share(Measure::QuotaUsedUp, shares.throttled, words);
    }
    if matches!(cause, Cause::Storage | Cause::NetworkStorage) {
        let rate = shares.device_bytes_per_s;
        let text = if rate == 0.0 {
            "no device read a byte: the files are in the page cache".to_string()
        } else {
            format!("devices read {:.1} MB/s", rate / 1e6)
        };
        rows.amount(Measure::DeviceBytes, rate, Unit::Bytes, text);
    }
    let by_cores = [
        Cause::Workers,
        Cause::Transform,
        Cause::Cores,
        Cause::OtherPrograms,
    ];
    if by_cores.contains(&cause) {
        let cores = shares.seen.machine.cores;
        let idle = shares.idle_cores;
        let text = format!("of {cores} cores {idle:.1} are idle, on average");
        rows.amount(Measure::IdleCores, idle, Unit::Count, text);
    }
    if shares.other_cores >= 0.3 {
        let cores = shares.other_cores;
        let text = format!("other programs use {cores:.1} cores");
        rows.amount(Measure::OtherPrograms, cores, Unit::Count, text);
    }
}

struct Rows(Vec<Evidence>);

impl Rows {
    fn share(&mut self, measure: Measure, value: f64, words: &str) {
        let value = value.clamp(0.0, 1.0);
        let text = format!("{words}: {:.0} % of the time", 100.0 * value);
        self.amount(measure, value, Unit::Share, text);
    }

    fn amount(&mut self, measure: Measure, value: f64, unit: Unit, text: String) {
        self.0.push(Evidence {
            measure,
            value,
            unit,
            text,
        });
    }
}
