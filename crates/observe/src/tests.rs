//! The cause and the first advice for measurements of known situations.

use crate::advice::{Remedy, Value};
use crate::codes::Cause;
use crate::diagnosis::Diagnosis;
use crate::observation::{
    GpuTime, Interpreter, LoaderFacts, LoaderKind, Observation, Places, ThreadUse, Worker,
};
use feedline_report::Strength;

const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// A loop of 10 seconds over a DataLoader with 2 workers on 4 cores: 500 batches of 8 samples, each
/// waited for 10 ms, with a step of 10 ms. Workers always compute.
fn starved() -> Observation {
    let facts = LoaderFacts {
        workers: Some(2),
        prefetch_factor: Some(2),
        persistent_workers: Some(false),
        pin_memory: Some(false),
        in_order: Some(true),
        batch_size: Some(8),
        ..LoaderFacts::new(LoaderKind::Torch, "DataLoader")
    };
    let mut seen = Observation {
        loader: facts,
        workers: vec![worker(0), worker(1)],
        ..Observation::default()
    };
    let consumer = &mut seen.consumer;
    consumer.epochs = 1;
    consumer.batches = 501;
    consumer.samples = 8 * 501;
    consumer.steady_batches = 500;
    consumer.steady_ns = 10 * S;
    consumer.waited_ns = 5 * S;
    consumer.starts_ns = S / 10;
    consumer.total_ns = 10 * S + S / 10;
    (0..500).for_each(|_| consumer.waits.add(10 * MS));
    let machine = &mut seen.machine;
    machine.cores = 4;
    machine.watched_ns = 10 * S;
    machine.process_ns = S / 2;
    machine.busy_ns = Some(29 * S);
    seen
}

/// A worker that always computes.
fn worker(number: u32) -> Worker {
    Worker {
        number,
        watched_ns: 10 * S,
        cpu_ns: 10 * S,
        places: Places {
            running: 200,
            ..Places::default()
        },
        ..Worker::default()
    }
}

/// Places of a worker without a task.
fn idle() -> Places {
    Places {
        running: 20,
        tasks: 180,
        ..Places::default()
    }
}

fn with(change: impl Fn(&mut Observation)) -> Observation {
    let mut seen = starved();
    change(&mut seen);
    seen
}

/// The same for all workers.
fn each(seen: &mut Observation, change: impl Fn(&mut Worker)) {
    seen.workers.iter_mut().for_each(change);
}

/// What the workers do in nine of ten samples.
fn at(place: impl Fn(&mut Places) -> &mut u64) -> Observation {
    with(|seen| {
        each(seen, |worker| {
            worker.places = Places::default();
            worker.places.running = 20;
            *place(&mut worker.places) = 180;
            worker.cpu_ns = S;
        });
    })
}

/// Workers that have batches ready.
fn ahead(change: impl Fn(&mut Observation)) -> Observation {
    with(|seen| {
        each(seen, |worker| {
            worker.places = idle();
            worker.cpu_ns = S;
        });
        change(seen);
    })
}

#[test]
fn each_situation_has_its_cause_and_its_first_advice() {
    let none = None;
    let set = |name: &str, value| Some((name.to_string(), value));
    let count = Value::Count;
    let flag = Value::Flag;
    let table = [
        (
            "idle cores",
            with(|_| ()),
            Cause::Workers,
            set("num_workers", count(3)),
        ),
        (
            "no idle core",
            with(|seen| seen.machine.cores = 2),
            Cause::Transform,
            none.clone(),
        ),
        (
            "twice as many workers as cores",
            with(|seen| seen.machine.cores = 1),
            Cause::Transform,
            set("num_workers", count(1)),
        ),
        (
            "no workers",
            with(|seen| {
                seen.workers.clear();
                seen.loader.workers = Some(0);
                seen.consumer.wait_cpu_ns = 5 * S;
                seen.consumer.places.running = 100;
                seen.machine.process_ns = 6 * S;
                seen.machine.busy_ns = Some(6 * S);
            }),
            Cause::Workers,
            set("num_workers", count(4)),
        ),
        (
            "waits of 3 %",
            with(|seen| seen.consumer.waited_ns = 3 * S / 10),
            Cause::NotStarved,
            none.clone(),
        ),
        (
            "files",
            at(|places| &mut places.storage),
            Cause::Storage,
            none.clone(),
        ),
        (
            "files whose bytes are copied as well",
            {
                let mut seen = with(|seen| seen.machine.device_bytes = 1_000_000_000);
                each(&mut seen, |worker| {
                    worker.places.storage = 80;
                    worker.places.running = 120;
                });
                seen
            },
            Cause::Storage,
            none.clone(),
        ),
        (
            "files of a network",
            at(|places| &mut places.network_storage),
            Cause::NetworkStorage,
            none.clone(),
        ),
        (
            "sockets",
            at(|places| &mut places.network),
            Cause::Network,
            none.clone(),
        ),
        (
            "sleeps",
            at(|places| &mut places.sleep),
            Cause::Blocked,
            none.clone(),
        ),
        (
            "other programs",
            with(|seen| {
                seen.machine.busy_ns = Some(39 * S);
                each(seen, |worker| worker.delay_ns = 5 * S);
            }),
            Cause::OtherPrograms,
            none.clone(),
        ),
        (
            "the step's threads",
            with(|seen| {
                seen.machine.process_ns = 19 * S;
                seen.machine.busy_ns = Some(39 * S);
                each(seen, |worker| worker.delay_ns = 5 * S);
            }),
            Cause::Cores,
            none.clone(),
        ),
        (
            "a quota",
            with(|seen| {
                seen.machine.quota = Some(1.0);
                seen.machine.throttled_ns = 2 * S;
            }),
            Cause::CpuQuota,
            none.clone(),
        ),
        (
            "one slow worker",
            with(|seen| seen.workers[1].places = idle()),
            Cause::SlowWorker,
            set("in_order", flag(false)),
        ),
        (
            "epochs that start slowly",
            with(|seen| {
                seen.consumer.epochs = 5;
                seen.consumer.restarts_ns = 8 * S;
                seen.consumer.total_ns = 18 * S;
            }),
            Cause::WorkerStart,
            set("persistent_workers", flag(true)),
        ),
        (
            "batches that are handed over",
            ahead(|seen| seen.consumer.waited_ns = S),
            Cause::NotStarved,
            none.clone(),
        ),
        (
            "large pickles",
            ahead(|seen| each(seen, |worker| worker.written_bytes = 500_000_000)),
            Cause::Pipe,
            none.clone(),
        ),
        (
            "the lock of Python",
            ahead(|seen| {
                seen.interpreter = Some(Interpreter {
                    probes: 100,
                    late: 90,
                    waited_ns: S,
                });
                seen.threads.push(ThreadUse {
                    cpu_ns: 5 * S,
                    ..ThreadUse::default()
                });
            }),
            Cause::Gil,
            none.clone(),
        ),
        (
            "pickles that the loop unpickles",
            ahead(|seen| {
                let interpreter = seen.interpreter.get_or_insert_default();
                interpreter.probes = 100;
                interpreter.late = 60;
                each(seen, |worker| worker.written_bytes = 500_000_000);
            }),
            Cause::Pipe,
            none.clone(),
        ),
        (
            "a loop without a core",
            ahead(|seen| {
                seen.machine.busy_ns = Some(39 * S);
                seen.consumer.watched_ns = 10 * S;
                seen.consumer.delay_ns = 4 * S;
            }),
            Cause::OtherPrograms,
            none.clone(),
        ),
        (
            "other programs on the cores for more workers",
            with(|seen| seen.machine.busy_ns = Some(39 * S)),
            Cause::Workers,
            set("num_workers", count(4)),
        ),
        (
            "few slow batches of files",
            {
                let mut seen = at(|places| &mut places.storage);
                seen.consumer.steady_batches = 4;
                seen
            },
            Cause::Storage,
            none.clone(),
        ),
        (
            "batches every millisecond",
            ahead(|seen| seen.consumer.steady_batches = 10_000),
            Cause::SmallBatches,
            set("batch_size", count(64)),
        ),
        (
            "a few long waits",
            ahead(|seen| {
                seen.consumer.waits = Default::default();
                (0..475).for_each(|_| seen.consumer.waits.add(MS));
                (0..25).for_each(|_| seen.consumer.waits.add(180 * MS));
            }),
            Cause::Uneven,
            set("in_order", flag(false)),
        ),
        (
            "a GPU that never waits",
            with(|seen| {
                seen.gpu = Some(GpuTime {
                    steps: 500,
                    span_ns: 10 * S,
                    idle_ns: S / 10,
                });
            }),
            Cause::NotStarved,
            none.clone(),
        ),
        (
            "a GPU that idles although batches are there",
            with(|seen| {
                seen.consumer.waited_ns = 0;
                seen.gpu = Some(GpuTime {
                    steps: 500,
                    span_ns: 10 * S,
                    idle_ns: 3 * S,
                });
            }),
            Cause::Pinning,
            set("pin_memory", flag(true)),
        ),
        (
            "waits without a reason",
            ahead(|_| ()),
            Cause::Unknown,
            none.clone(),
        ),
        (
            "workers of which the kernel tells nothing",
            {
                let mut seen = at(|places| &mut places.unknown);
                each(&mut seen, |worker| worker.places.running = 0);
                seen
            },
            Cause::Unknown,
            none.clone(),
        ),
        (
            "threads of Grain in one process",
            with(|seen| {
                seen.loader.kind = LoaderKind::Grain;
                seen.loader.workers = Some(0);
                seen.workers.clear();
                let interpreter = seen.interpreter.get_or_insert_default();
                interpreter.probes = 100;
                interpreter.late = 90;
                seen.threads.push(ThreadUse {
                    cpu_ns: 8 * S,
                    ..ThreadUse::default()
                });
            }),
            Cause::Gil,
            set("worker_count", count(4)),
        ),
        (
            "few batches",
            with(|seen| seen.consumer.steady_batches = 2),
            Cause::Unknown,
            none.clone(),
        ),
    ];
    for (situation, seen, cause, setting) in table {
        let diagnosis = Diagnosis::of(&seen);
        assert_eq!(diagnosis.cause, cause, "{situation}: {diagnosis}");
        let first = diagnosis.advice.first();
        let found = first.and_then(|advice| Some((advice.setting.clone()?, advice.value?)));
        assert_eq!(found, setting, "{situation}: {diagnosis}");
        let has_cure = !matches!(cause, Cause::NotStarved | Cause::Unknown);
        assert_eq!(first.is_some(), has_cure, "{situation}: {diagnosis}");
    }
}

#[test]
fn a_prediction_is_above_the_present_rate_and_below_the_steps() {
    let seen = starved();
    let diagnosis = Diagnosis::of(&seen);
    let gain = diagnosis.advice[0].prediction.as_ref().unwrap();
    // 3 workers in place of 2, four fifths of it; the step alone would allow 800 samples a second.
    assert!((diagnosis.rate - 396.8).abs() < 0.1, "{diagnosis}");
    assert!(
        gain.at_least && (gain.rate - 1.2 * diagnosis.rate).abs() < 0.1,
        "{gain:?}"
    );
}

#[test]
fn settings_are_those_of_the_kind_of_loader() {
    let table = [
        (LoaderKind::Torch, Some("num_workers")),
        (LoaderKind::Dali, Some("num_threads")),
        (LoaderKind::TfData, Some("num_parallel_calls")),
        (LoaderKind::Grain, Some("worker_count")),
        (LoaderKind::Other, None),
    ];
    for (kind, setting) in table {
        let mut seen = with(|seen| seen.loader.kind = kind);
        let advice = &Diagnosis::of(&seen).advice[0];
        assert_eq!(advice.remedy, Remedy::Workers);
        assert_eq!(advice.setting.as_deref(), setting, "{kind:?}");
        // Nobody knows the present number.
        seen.loader.workers = None;
        assert_eq!(Diagnosis::of(&seen).advice[0].setting, None, "{kind:?}");
    }
}

#[test]
fn little_evidence_is_said() {
    let short = with(|seen| {
        seen.consumer.steady_ns = S / 10;
        seen.consumer.waited_ns = S / 20;
    });
    let unseen = with(|seen| each(seen, |worker| worker.places = Places::default()));
    for seen in [Observation::default(), short, unseen] {
        let diagnosis = Diagnosis::of(&seen);
        assert!(
            matches!(diagnosis.strength, Strength::Thin { .. }),
            "{diagnosis}"
        );
    }
    assert_eq!(Diagnosis::of(&starved()).strength, Strength::Strong);
}

#[test]
fn numbers_out_of_range_make_a_diagnosis() {
    for value in [0, 1, u64::MAX / 4] {
        let seen = with(|seen| {
            seen.consumer.waited_ns = value;
            seen.consumer.steady_batches = value;
            seen.machine.watched_ns = value;
            each(seen, |worker| {
                worker.cpu_ns = value;
                worker.watched_ns = value;
                worker.places.storage = value;
            });
        });
        let text = crate::text::report(&seen);
        assert!(text.contains("loop") && !text.contains("NaN"), "{text}");
    }
}
