//! The report: the diagnosis, then the numbers.

use crate::diagnosis::Diagnosis;
use crate::observation::{Observation, Places};
use std::fmt::Write;

/// The report of a loop, for people.
pub fn report(observation: &Observation) -> String {
    let diagnosis = Diagnosis::of(observation);
    let mut out = format!("{diagnosis}\n\n");
    let consumer = &observation.consumer;
    let facts = &observation.loader;
    let unit = if consumer.samples > 0 {
        "samples"
    } else {
        "batches"
    };
    line(&mut out, "loader", facts.name.clone());
    line(
        &mut out,
        "loop",
        format!(
            "{}, {}, {:.1} {unit}/s",
            counted(consumer.epochs, "epoch", "s"),
            counted(consumer.batches, "batch", "es"),
            diagnosis.rate
        ),
    );
    let batches = consumer.steady_batches.max(1) as f64;
    let step = consumer.steady_ns.saturating_sub(consumer.waited_ns) as f64;
    line(
        &mut out,
        "a batch",
        format!(
            "waited for {}, at most {}; step {}",
            ms(consumer.waited_ns as f64 / batches),
            ms(consumer.waits.longest_ns as f64),
            ms(step / batches)
        ),
    );
    line(
        &mut out,
        "starts",
        format!("{:.2} s in all", consumer.starts_ns as f64 / 1e9),
    );
    if let Some(gpu) = observation.gpu {
        let idle = 100.0 * gpu.idle_ns as f64 / gpu.span_ns.max(1) as f64;
        line(
            &mut out,
            "GPU",
            format!("{} steps, {idle:.1} % without one", gpu.steps),
        );
    }
    for worker in &observation.workers {
        let watched = worker.watched_ns.max(1) as f64;
        line(
            &mut out,
            &format!("worker {}", worker.number),
            format!(
                "{:.2} cores, {:.2} waited for; {}; {:.1} MB/s from devices",
                worker.cpu_ns as f64 / watched,
                worker.delay_ns as f64 / watched,
                places(&worker.places),
                1e3 * worker.device_bytes as f64 / watched
            ),
        );
    }
    let machine = &observation.machine;
    if machine.watched_ns == 0 {
        return out;
    }
    let watched = machine.watched_ns.max(1) as f64;
    for thread in observation.threads.iter().take(4) {
        let cores = thread.cpu_ns as f64 / watched;
        if cores >= 0.05 {
            line(
                &mut out,
                "thread",
                format!("{} ({}): {cores:.2} cores", thread.id, thread.name),
            );
        }
    }
    let mut cores = format!("{} cores", machine.cores);
    if let Some(busy) = machine.busy_ns {
        let _ = write!(cores, ", {:.2} busy", busy as f64 / watched);
    }
    let _ = write!(
        cores,
        ", {:.2} by this process",
        machine.process_ns as f64 / watched
    );
    if let Some(quota) = machine.quota {
        let withheld = 100.0 * machine.throttled_ns as f64 / watched;
        let _ = write!(
            cores,
            "; quota {quota:.2}, withheld {withheld:.0} % of the time"
        );
    }
    line(&mut out, "machine", cores);
    line(
        &mut out,
        "memory",
        format!(
            "{:.0} MiB, {:.0} MiB of them in workers (shared pages counted for each)",
            machine.resident_bytes as f64 / 1048576.0,
            machine
                .resident_bytes
                .saturating_sub(machine.process_resident_bytes) as f64
                / 1048576.0
        ),
    );
    out
}

fn line(out: &mut String, name: &str, words: String) {
    let _ = writeln!(out, "{name:<10} {words}");
}

fn counted(count: u64, one: &str, ending: &str) -> String {
    let ending = if count == 1 { "" } else { ending };
    format!("{count} {one}{ending}")
}

fn ms(ns: f64) -> String {
    format!("{:.2} ms", ns / 1e6)
}

/// The places of a worker, the most frequent first.
fn places(places: &Places) -> String {
    let mut all = [
        (places.running, "computes"),
        (places.tasks, "has no task"),
        (places.storage, "reads files"),
        (places.network_storage, "reads network files"),
        (places.network, "waits at sockets"),
        (places.pipe, "waits at pipes"),
        (places.lock, "waits for locks"),
        (places.sleep, "sleeps"),
        (places.other, "waits elsewhere"),
        (places.unknown, "sleeps or waits"),
    ];
    all.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let sum = (places.all() + places.unknown).max(1) as f64;
    let parts = all
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, does)| format!("{does} {:.0} %", 100.0 * *count as f64 / sum));
    parts.collect::<Vec<_>>().join(", ")
}
