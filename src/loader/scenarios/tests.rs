//! The scenarios, with their assertions.
//!
//! By default every 7th runs; with `FEEDLINE_SWEEP=ci` all. With `full` each runs three times as
//! long, and is printed.

use super::gpu::Given;
use super::verdict::{Cause, Change, named, predicted};
use super::*;
use crate::loader::{Loader, LoaderBuilder};
use crate::pipeline::Gds;
use feedline_core::tensor::DType;
use feedline_device::cuda::driver::Gpu as CudaGpu;
use feedline_device::cuda::driver::simulated::Simulated;
use feedline_device::{Device, Finish, Stream, StreamUse};
use feedline_formats::Records;
use feedline_report::Verdict;
use feedline_report::meter::PipelineStage;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Nanoseconds per batch of the slowest stage.
const SLOWEST: f64 = 8e6;
/// The order of stages everywhere. Copies exist only on a GPU.
const STAGES: [Cause; 5] = [
    Cause::Consumer,
    Cause::Decode,
    Cause::Storage,
    Cause::Order,
    Cause::Copy,
];
/// Steps enqueued ahead on a consumer's stream: none, some, as many as the loader gives batches
/// for.
const AHEAD: [usize; 3] = [0, 3, usize::MAX];
const STRENGTHS: [f64; 4] = [1.2, 1.5, 2.0, 5.0];
/// Minimum ratio of two stages' times that counts as different.
const APART: f64 = 1.2;

impl Scenario {
    /// Time of each stage per batch without waits.
    fn demanding(mut self, demands: [f64; 4]) -> Self {
        let rows = self.rows as f64;
        self.step = demands[0];
        self.decode = demands[1] * self.workers as f64 / rows;
        self.read = demands[2] * self.servers as f64 / rows;
        self.order = demands[3] / rows;
        self
    }

    fn called(mut self, name: String) -> Self {
        let times = if self.varies {
            "exponential"
        } else {
            "constant"
        };
        let Self { workers, slots, .. } = self;
        self.name = format!("{name}, {workers} workers, {slots} slots, {times}");
        self
    }
}

fn is_full() -> bool {
    std::env::var("FEEDLINE_SWEEP").is_ok_and(|sweep| sweep == "full")
}

/// All scenarios, or by default every 7th: 7 divides no period of the lists above.
fn some(all: Vec<Scenario>) -> Vec<Scenario> {
    let every = std::env::var_os("FEEDLINE_SWEEP").is_some();
    let step = if every { 1 } else { 7 };
    all.into_iter().step_by(step).collect()
}

/// One slowest stage; the others are faster by a factor. Only a slowest order plans slowly.
fn one_slow(batches: u64) -> Vec<Scenario> {
    let mut all = Vec::new();
    for (at, stage) in STAGES.into_iter().enumerate().take(4) {
        for strength in STRENGTHS {
            let sizes = [1, 2, 4].map(|workers| [2, 4, 8].map(|slots| (workers, slots)));
            for (workers, slots) in sizes.into_iter().flatten() {
                for varies in [false, true] {
                    let mut demands = [SLOWEST / strength; 4];
                    demands[3] = 0.0;
                    demands[at] = SLOWEST;
                    let seed = all.len() as u64;
                    let scenario = Scenario {
                        workers,
                        slots,
                        varies,
                        batches,
                        seed,
                        ..Scenario::default()
                    };
                    let name = format!("{stage:?} × {strength}");
                    all.push(scenario.demanding(demands).called(name));
                }
            }
        }
    }
    all
}

/// Two about equally slow stages; the others need a fifth.
fn two_slow(batches: u64) -> Vec<Scenario> {
    let mut all = Vec::new();
    for (first, second) in (0..4).flat_map(|first| (0..4).map(move |second| (first, second))) {
        for apart in if first < second {
            [1.0, 1.1, 1.2, 1.5]
        } else {
            [1.1, 1.2, 1.5, f64::NAN]
        } {
            if first == second || apart.is_nan() {
                continue;
            }
            for (slots, varies) in [(4, false), (8, true)] {
                let mut demands = [SLOWEST / 5.0, SLOWEST / 5.0, SLOWEST / 5.0, 0.0];
                demands[first] = SLOWEST;
                demands[second] = SLOWEST / apart;
                let seed = 1000 + all.len() as u64;
                let scenario = Scenario {
                    slots,
                    varies,
                    batches,
                    seed,
                    ..Scenario::default()
                };
                let stages = [first, second].map(|at| STAGES[at]);
                let name = format!("{:?} and {:?}, {apart} apart", stages[0], stages[1]);
                all.push(scenario.demanding(demands).called(name));
            }
        }
    }
    all
}

/// Memory is the bottleneck, or nearly; other shapes of devices and consumers.
fn others(batches: u64) -> Vec<Scenario> {
    type Change = fn(&mut Scenario);
    let shapes: [(&str, Change); 4] = [
        ("drops early", |scenario| scenario.drops_early = true),
        ("tiny ring", |scenario| scenario.tiny_ring = true),
        ("one server", |scenario| {
            scenario.servers = 1;
            scenario.depth = 4;
        }),
        ("many servers", |scenario| {
            scenario.servers = 32;
            scenario.depth = 32;
            scenario.slots = 8;
        }),
    ];
    let half = SLOWEST / 2.0;
    let less = SLOWEST / 1.5;
    let mut all = Vec::new();
    let mut add = |scenario: Scenario, demands: [f64; 4], name: String| {
        all.push(scenario.demanding(demands).called(name));
    };
    for varies in [false, true] {
        let base = Scenario {
            batches,
            varies,
            seed: 2000,
            ..Scenario::default()
        };
        for slots in [1, 2, 3] {
            let scenario = Scenario {
                slots,
                ..base.clone()
            };
            let name = "all the same";
            add(scenario.clone(), [SLOWEST; 4], name.into());
            let name = "all but the order the same";
            add(scenario, [SLOWEST, SLOWEST, SLOWEST, 0.0], name.into());
        }
        for holds in [1, 2, 3] {
            for (more, demands) in [
                (2, [SLOWEST, less, less, 0.0]),
                (3, [half, SLOWEST, half, 0.0]),
            ] {
                let scenario = Scenario {
                    holds,
                    slots: holds + more,
                    ..base.clone()
                };
                add(scenario, demands, format!("holds {holds}"));
            }
        }
        for demands in [[SLOWEST, less, 0.0, 0.0], [less, SLOWEST, 0.0, 0.0]] {
            let scenario = Scenario {
                in_memory: true,
                slots: 6,
                ..base.clone()
            };
            add(scenario, demands, format!("in memory, {demands:.0?}"));
        }
        for at in 0..3 {
            let mut demands = [half, half, half, 0.0];
            demands[at] = SLOWEST;
            let slow = STAGES[at];
            for (shape, change) in shapes {
                let mut scenario = base.clone();
                change(&mut scenario);
                add(scenario, demands, format!("{slow:?}, {shape}"));
            }
            let scenario = Scenario {
                channel: demands[2] / base.rows as f64,
                ..base.clone()
            };
            demands[2] /= 10.0;
            add(scenario, demands, format!("{slow:?}, one channel"));
        }
    }
    all
}

/// Queued steps, and how the loader learns the stream of the steps.
fn consumers() -> impl Iterator<Item = (usize, Given)> {
    let given = [Given::Builder, Given::EachBatch];
    let all = AHEAD.into_iter();
    all.flat_map(move |ahead| given.map(|given| (ahead, given)))
}

/// Steps on a GPU. The loader knows the stream, or learns it batch by batch.
fn on_gpu(copy: f64, ahead: usize, given: Given) -> OnGpu {
    OnGpu {
        copy,
        buffers: 3,
        ahead,
        given,
    }
}

/// A GPU trains with one slowest stage; the host synchronises or runs ahead.
fn one_slow_on_gpu(batches: u64) -> Vec<Scenario> {
    let mut all = Vec::new();
    let stages = STAGES.into_iter().enumerate();
    for (at, stage) in stages.filter(|(_, stage)| *stage != Cause::Order) {
        let sizes = [1.2, 2.0, 7.5].map(|strength| [4, 8].map(|slots| (strength, slots)));
        for (strength, slots) in sizes.into_iter().flatten() {
            for (ahead, given) in consumers() {
                let mut demands = [SLOWEST / strength; 5];
                demands[3] = 0.0;
                demands[at] = SLOWEST;
                let seed = 4000 + all.len() as u64;
                let gpu = Some(on_gpu(demands[4], ahead, given));
                let scenario = Scenario {
                    slots,
                    batches,
                    gpu,
                    seed,
                    varies: seed.is_multiple_of(2),
                    ..Scenario::default()
                };
                let [step, decode, read, ..] = demands;
                let name = format!("GPU, {stage:?} × {strength}, {ahead} ahead, {given:?}");
                all.push(scenario.demanding([step, decode, read, 0.0]).called(name));
            }
        }
    }
    all
}

/// Random pipelines with a GPU.
fn random_on_gpu(batches: u64) -> Vec<Scenario> {
    let one = |seed: u64| {
        // Only the last digits of the numbers, which are evenly distributed.
        let times = Times {
            mean: 1e9,
            varies: true,
            seed,
        };
        let pick = |at: u64, of: usize| times.of(at) as usize % of;
        // From 1 to 20 ms per batch.
        let demand = |at: u64| 1e6 * 20_f64.powf((times.of(at) % 1000) as f64 / 1000.0);
        let given = [Given::Builder, Given::EachBatch][pick(1, 2)];
        let ahead = [0, 1, 4, usize::MAX][pick(2, 4)];
        let gpu = OnGpu {
            copy: demand(3),
            buffers: [2, 3, 4, 8][pick(4, 4)],
            ahead,
            given,
        };
        let scenario = Scenario {
            workers: [1, 2, 4][pick(5, 3)],
            slots: [2, 3, 4, 8, 16][pick(6, 5)],
            varies: pick(7, 2) == 0,
            drops_early: pick(8, 2) == 0,
            gpu: Some(gpu),
            batches,
            seed,
            ..Scenario::default()
        };
        let name = format!("GPU, random {seed}, {ahead} ahead, {given:?}");
        let demands = [demand(9), demand(10), demand(11), 0.0];
        scenario.demanding(demands).called(name)
    };
    (5000..5120).map(one).collect()
}

/// Runs all scenarios, two at a time.
fn run_all(scenarios: &[Scenario]) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(scenario) = scenarios.get(at) else {
                        break;
                    };
                    let outcome = scenario.run();
                    done.lock().unwrap().push((at, outcome));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    assert_eq!(done.len(), scenarios.len(), "some scenario failed");
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Differences between the snapshot's times and the truth; tolerates a microsecond.
fn misaccounted(scenario: &Scenario, outcome: &Outcome) -> Vec<String> {
    let s = &outcome.snapshot;
    let truth = &outcome.truth;
    let mut wrong = Vec::new();
    let mut about = |what: &str, measured: u64, truth: u64, off: u64| {
        if measured.abs_diff(truth) > off {
            wrong.push(format!("{what}: measured {measured}, true {truth}"));
        }
    };
    if let (Some(copy), Some(gpu)) = (&s.copy, &s.consumer.gpu) {
        // The stream's steps run behind the host's, and copies count at their ends.
        let off = truth.steady / 50;
        about("on the bus", copy.busy_ns, truth.copying, off);
        let all = s.consumer.handed().batches * gpu.starved_ns / gpu.steps.max(1);
        about("GPU starved", all, truth.steady - truth.stepped, 2 * off);
    } else {
        about("slots held", s.slots.held_ns, truth.held, 1000);
    }
    let mut same = |what: &str, measured: u64, truth: u64| about(what, measured, truth, 1000);
    let slots = &s.slots;
    same("steady", s.steady_ns, truth.steady);
    let both = s.consumer.waited_ns + s.consumer.user_ns;
    same("waited + user", both, s.steady_ns);
    same("waited", s.consumer.waited_ns, truth.waited);
    same("user", s.consumer.user_ns, truth.own);
    let all = s.decode.busy_ns + s.decode.starved_ns + s.decode.ahead_ns;
    let workers = scenario.workers as u64;
    same("busy + starved + ahead", all, workers * s.steady_ns);
    same("decode busy", s.decode.busy_ns, truth.decoding);
    same("decode starved", s.decode.starved_ns, truth.starved);
    same("order busy", s.order.busy_ns, truth.ordering);
    let all = slots.free_ns + slots.filling_ns + slots.full_ns + slots.held_ns;
    same("all slots", all, u64::from(slots.count) * s.steady_ns);
    same("slots filling", slots.filling_ns, truth.filling);
    if scenario.order == 0.0 {
        same("storage busy", s.storage.busy_ns, truth.reading);
        same("reads in flight", s.storage.in_flight_ns, truth.in_flight);
    }
    wrong
}

/// True load of each stage.
fn loads(scenario: &Scenario, truth: &Truth) -> [f64; 5] {
    let steady = truth.steady as f64;
    let servers = if scenario.channel > 0.0 {
        1
    } else {
        scenario.servers
    };
    [
        truth.stepped as f64 / steady,
        truth.decoding as f64 / steady / scenario.workers as f64,
        truth.served as f64 / steady / servers as f64,
        truth.ordering as f64 / steady,
        truth.copying as f64 / steady,
    ]
}

#[derive(Debug)]
struct Expected {
    /// Each of these is right as the cause.
    causes: Vec<Cause>,
    /// All of these must be named.
    named: Vec<Cause>,
}

/// A stage that was always busy is the cause. Without one, the memory was too small for all to work
/// at once.
fn expected(loads: [f64; 5]) -> Expected {
    let mut order: Vec<usize> = (0..STAGES.len()).collect();
    order.sort_by(|a, b| loads[*b].total_cmp(&loads[*a]));
    let first = order[0];
    let second = order[1];
    let top = loads[first];
    let near = |stage: &&usize| loads[**stage] * APART > top;
    let mut causes = vec![STAGES[first]];
    causes.extend(order[1..].iter().filter(near).map(|stage| STAGES[*stage]));
    // Within about a factor of 1.2, one or both are right.
    let mut named = vec![STAGES[first]];
    if loads[second] * 1.15 > top {
        named.push(STAGES[second]);
    }
    match top {
        ..0.75 => Expected {
            causes: vec![Cause::Memory],
            named: vec![Cause::Memory],
        },
        // Both are equally right.
        ..0.9 => Expected {
            causes: causes.into_iter().chain([Cause::Memory]).collect(),
            named: Vec::new(),
        },
        _ => Expected { causes, named },
    }
}

/// Number of wrong verdicts, and a table of true and named causes.
fn judge(scenarios: &[Scenario], outcomes: &[Outcome]) -> (usize, BTreeMap<(Cause, Cause), usize>) {
    let mut wrong = 0;
    let mut matrix = BTreeMap::new();
    for (scenario, outcome) in scenarios.iter().zip(outcomes) {
        let loads = loads(scenario, &outcome.truth);
        let expected = expected(loads);
        let said = named(&outcome.snapshot);
        let is_right = expected.causes.contains(&said[0]);
        let right = is_right && expected.named.iter().all(|cause| said.contains(cause));
        let shown = if is_right {
            said[0]
        } else {
            expected.causes[0]
        };
        *matrix.entry((shown, said[0])).or_default() += 1;
        wrong += usize::from(!right);
        if !right || is_full() {
            let verdict = if right { "" } else { "WRONG " };
            let name = &scenario.name;
            let stages = Verdict::of(&outcome.snapshot).stages;
            let seen = stages.iter().map(|stage| (stage.stage, stage.utilisation));
            let seen: Vec<_> = seen.collect();
            println!("{verdict}{name}: true {loads:.2?} {expected:?}, named {said:?} {seen:.2?}");
        }
    }
    (wrong, matrix)
}

fn print(matrix: &BTreeMap<(Cause, Cause), usize>) {
    let causes = [
        Cause::Consumer,
        Cause::Decode,
        Cause::Storage,
        Cause::Order,
        Cause::Copy,
        Cause::Memory,
        Cause::Other,
    ];
    println!("{:>10}   named {:>10?}", "true", causes);
    for really in causes {
        let row = causes.map(|said| matrix.get(&(really, said)).copied().unwrap_or(0));
        println!("{:>10}        {row:>10?}", format!("{really:?}"));
    }
}

#[test]
fn snapshots_and_verdicts_match_the_truth() {
    let started = std::time::Instant::now();
    let batches = if is_full() { 600 } else { 200 };
    let on_host = [one_slow(batches), two_slow(batches), others(batches)].concat();
    let scenarios = [on_host, one_slow_on_gpu(batches), random_on_gpu(batches)].concat();
    assert!(scenarios.len() >= 600);
    let scenarios = some(scenarios);
    let outcomes = run_all(&scenarios);
    let mut misaccounted_for = 0;
    for (scenario, outcome) in scenarios.iter().zip(&outcomes) {
        let misaccounted = misaccounted(scenario, outcome);
        misaccounted_for += usize::from(!misaccounted.is_empty());
        for what in misaccounted {
            println!("{}: {what}", scenario.name);
        }
    }
    let (wrong, matrix) = judge(&scenarios, &outcomes);
    print(&matrix);
    let count = scenarios.len();
    let took = started.elapsed();
    println!(
        "{count} scenarios, {misaccounted_for} misaccounted, {wrong} wrong verdicts, {took:?}"
    );
    assert_eq!(misaccounted_for, 0);
    let allowed = 1.max(count / 50);
    assert!(wrong <= allowed, "{wrong} verdicts of {count} are wrong");
}

/// A GPU trains: steps and copies of some milliseconds each; one batch takes 1 ms to decode and to
/// read.
fn training(step: f64, copy: f64, ahead: usize, given: Given) -> Scenario {
    let gpu = Some(on_gpu(copy * 1e6, ahead, given));
    Scenario {
        gpu,
        ..Scenario::default()
    }
    .demanding([step * 1e6, 1e6, 1e6, 0.0])
}

#[test]
fn a_gpu_behind_its_host_is_not_starved() {
    for (ahead, given) in consumers() {
        let outcome = training(15.0, 2.0, ahead, given).run();
        let verdict = Verdict::of(&outcome.snapshot);
        let case = format!("{ahead} {given:?} {verdict}");
        let causes = (verdict.cause, verdict.also);
        assert_eq!(causes, (feedline_report::Cause::NotStarved, None), "{case}");
        let mut stages = verdict.stages.iter();
        let copy = stages.find(|stage| stage.stage == PipelineStage::Copy);
        let copy = copy.unwrap();
        assert!(
            (copy.utilisation / (2.0 / 15.0) - 1.0).abs() < 0.1,
            "{case}"
        );
        let report = outcome.report;
        assert!(report.contains("waits     GPU starved 0.0 %"), "{report}");
        let rate = 8.0 / 2e-3;
        let off = copy.ceiling_items_per_s / rate - 1.0;
        assert!(off.abs() < 0.1, "{case} {copy:?}");
    }
}

#[test]
fn copies_slower_than_steps_are_the_cause() {
    for (ahead, given) in consumers() {
        let verdict = Verdict::of(&training(2.0, 10.0, ahead, given).run().snapshot);
        let case = format!("{ahead} {given:?} {verdict}");
        assert_eq!(verdict.cause, feedline_report::Cause::Copy, "{case}");
    }
}

#[test]
fn an_unknown_stream_has_no_cause() {
    for (step, copy) in [(15.0, 2.0), (2.0, 10.0), (0.1, 0.2)] {
        let outcome = training(step, copy, usize::MAX, Given::Never).run();
        let report = outcome.report;
        assert!(
            report.contains("waits     GPU starved: unknown"),
            "{report}"
        );
        let verdict = Verdict::of(&outcome.snapshot);
        let text = verdict.to_string();
        let causes = (verdict.cause, verdict.also);
        assert_eq!(causes, (feedline_report::Cause::Unknown, None), "{text}");
        assert!(
            text.contains("the consumer's stream is not known"),
            "{text}"
        );
        let advice = &verdict.advice[0].text;
        assert!(advice.contains("`stream(…)`"), "{text}");
        assert!(advice.contains("`batch.bind(…)`"), "{text}");
        assert!(!text.contains("starved"), "{text}");
    }
}

#[test]
fn without_a_busy_stage_more_memory_helps() {
    let scenarios = some([one_slow(100), others(100)].concat());
    let outcomes = run_all(&scenarios);
    let short = |(scenario, outcome): &(&Scenario, Outcome)| {
        let loads = loads(scenario, &outcome.truth);
        loads.into_iter().all(|load| load < 0.75)
    };
    let (short, before): (Vec<_>, Vec<_>) = scenarios.iter().zip(outcomes).filter(short).unzip();
    let more = |scenario: &Scenario| Scenario {
        slots: 4 * scenario.slots,
        tiny_ring: false,
        ..scenario.clone()
    };
    let larger: Vec<_> = short.iter().map(|scenario| more(scenario)).collect();
    let after = run_all(&larger);
    let count = short.len();
    assert!(count * 12 > scenarios.len(), "{count} scenarios");
    for ((scenario, before), after) in short.iter().zip(before).zip(after) {
        let gain = before.truth.steady as f64 / after.truth.steady as f64;
        let name = &scenario.name;
        assert!(
            gain > 1.1,
            "{name}: {gain:.2} times as fast with four times the slots"
        );
    }
}

#[test]
fn predictions_come_true() {
    let mut scenarios = Vec::new();
    for demands in [
        [1.0, 4.0, 1.0],
        [1.0, 4.0, 3.0],
        [2.0, 6.0, 1.0],
        [1.0, 3.0, 4.0],
        [3.0, 2.0, 4.0],
        [4.0, 3.0, 2.0],
    ] {
        for (slots, varies) in [(4, false), (4, true), (8, true)] {
            let scenario = Scenario {
                workers: 1,
                slots,
                varies,
                batches: 300,
                seed: 3000,
                ..Scenario::default()
            };
            let [step, decode, read] = demands.map(|demand| demand * 2e6);
            let scenario = scenario.demanding([step, decode, read, 0.0]);
            scenarios.push(scenario.called(format!("{demands:?}")));
        }
    }
    let ahead = |scenario: &Scenario| {
        let gpu = Some(on_gpu(2e6, usize::MAX, Given::EachBatch));
        Scenario {
            gpu,
            name: format!("GPU, {}", scenario.name),
            ..scenario.clone()
        }
    };
    let eight = scenarios.iter().filter(|scenario| scenario.slots == 8);
    let on_gpu: Vec<_> = eight.map(ahead).collect();
    scenarios.extend(on_gpu);
    let scenarios = some(scenarios);
    // The first changes nothing.
    let changes = [(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0), (1, 2.0), (4, 2.0)];
    let mut all = Vec::new();
    for scenario in &scenarios {
        all.extend(changes.map(|(workers, storage)| Scenario {
            workers,
            read: scenario.read / storage,
            ..scenario.clone()
        }));
    }
    let outcomes = run_all(&all);
    let rate = |outcome: &Outcome| {
        outcome.snapshot.consumer.samples as f64 / outcome.truth.steady as f64 * 1e9
    };
    let mut checked = 0;
    let mut wrong = 0;
    for (scenario, outcomes) in scenarios.iter().zip(outcomes.chunks(changes.len())) {
        for ((workers, storage), outcome) in changes.into_iter().zip(outcomes).skip(1) {
            let change = Change { workers, storage };
            let (prediction, at_least) = predicted(&outcomes[0].snapshot, change);
            let truth = rate(outcome);
            let off = prediction / truth - 1.0;
            let right = off <= 0.1 && (at_least || off >= -0.1);
            checked += 1;
            wrong += usize::from(!right);
            if !right || is_full() {
                let from = rate(&outcomes[0]);
                let least = if at_least { "at least " } else { "" };
                println!(
                    "{}: {from:.0}/s, with {workers} workers, storage × {storage}: \
                     {least}{prediction:.0}, was {truth:.0} ({:+.1} %)",
                    scenario.name,
                    off * 100.0
                );
            }
        }
    }
    println!("{checked} predictions, {wrong} more than 10 % off");
    assert!(wrong * 10 <= checked);
}

/// A loader of 40 batches on a GPU whose time the test sets.
fn forty(gpu: Arc<CudaGpu>, set: impl FnOnce(LoaderBuilder) -> LoaderBuilder) -> Loader {
    let pictures = Records::builder(12)
        .field("image", DType::U8, [2, 2, 3])
        .open_bytes(vec![7; 40 * 12])
        .unwrap();
    let builder = Loader::builder(pictures)
        .batch_size(1)
        .device(Device::of(gpu, "virtual"));
    // No slot comes back while time stands still.
    let builder = builder.tuning(|t| t.slots(48).device_batches(3).gds(Gds::Off));
    set(builder).build().unwrap()
}

#[test]
fn operations_run_beside_the_next_copies() {
    for (copy, kernel) in [
        (1000, 800),
        (800, 1000),
        (1000, 1000),
        (1000, 10),
        (10, 1000),
    ] {
        let now = Arc::new(AtomicU64::new(super::time::START));
        let (simulated, gpu) = Simulated::new(now, move |_| copy);
        simulated.kernels_take(kernel);
        let finish = Finish::to(DType::F16);
        let loader = forty(gpu, |builder| builder.finish("image", finish));
        let stream = Stream::promised(simulated.stream());
        let before = simulated.copies().len();
        for batch in loader.epoch(0).unwrap() {
            batch.unwrap().bind(stream.clone()).unwrap();
        }
        let copies = simulated.copies().split_off(before);
        let kernels = simulated.kernels();
        assert_eq!((copies.len(), kernels.len()), (40, 40));
        let took = kernels[39].1 - copies[0].0;
        let expected = 40 * copy.max(kernel) + copy.min(kernel);
        assert_eq!(took, expected, "copies of {copy}, kernels of {kernel}");
    }
}

#[test]
fn the_stream_that_takes_is_measured_not_one_beside_it() {
    for how in [StreamUse::Beside, StreamUse::Releases] {
        let now = Arc::new(AtomicU64::new(super::time::START));
        let (simulated, gpu) = Simulated::new(now.clone(), |_| 1000);
        let [taking, side] = [0, 1].map(|_| Stream::promised(simulated.stream()));
        let loader = forty(gpu, |builder| builder.stream_as(side, how));
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            batch.bind(&taking).unwrap();
            simulated.launch(taking.raw(), 1_000_000);
            drop(batch);
            // The host runs ahead.
            now.fetch_add(200_000, Ordering::AcqRel);
        }
        now.fetch_add(1_000_000_000, Ordering::AcqRel);
        let idle = loader.snapshot().consumer.gpu.unwrap();
        assert_eq!(idle.steps, 39);
        assert!(idle.starved_ns * 100 <= idle.span_ns, "{how:?}: {idle:?}");
        assert_eq!(idle.dry_steps, 0, "{how:?}");
        assert_eq!(idle.host_late_ns(), Some(0), "{how:?}");
    }
}
