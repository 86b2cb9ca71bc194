//! What to change in the loader, in its own terms. Pure.
//!
//! A gain is a lower bound from measured times. No advice names a setting that the loader does not
//! have, or a value that it has already.

use crate::codes::Cause;
use crate::observation::LoaderKind;
use crate::shares::{CROWDED, HALF, Shares};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Remedy {
    /// Another number of workers.
    Workers,
    /// Workers that live on between epochs.
    PersistentWorkers,
    /// More batches prepared ahead.
    Prefetch,
    /// Batches in whatever order the workers finish them.
    AnyOrder,
    /// Larger batches.
    BatchSize,
    /// Batches in pinned memory.
    PinMemory,
    /// Less work for each sample.
    LessWork,
    /// Tensors instead of other objects.
    Tensors,
    /// Files in memory, on a local device, or in fewer larger files.
    Storage,
    /// A local cache of remote data.
    Cache,
    /// Work of other threads in a process of its own.
    OtherThreads,
    /// A cheaper step, or fewer threads of it.
    Step,
    /// A higher CPU quota.
    CpuQuota,
    /// No other programs on the cores.
    OtherPrograms,
    /// Work spread evenly over the workers.
    Balance,
    /// A look at the code that waits.
    Waits,
}

/// The value of a setting: in JSON a number, or true or false.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// On or off.
    Flag(bool),
    /// A number.
    Count(u64),
}

/// The least rate that a change gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gain {
    /// In the unit of the diagnosis' rate.
    pub rate: f64,
    /// Whether the rate is a lower bound: always.
    pub at_least: bool,
}

/// A change that raises the rate. `Display` is the sentence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Advice {
    /// The kind of the change.
    pub remedy: Remedy,
    /// The loader's setting, by its name there.
    pub setting: Option<String>,
    /// The setting's new value.
    pub value: Option<Value>,
    /// The least rate behind the change, if it can be told.
    pub prediction: Option<Gain>,
    /// The sentence.
    pub text: String,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        if let Some(gain) = &self.prediction {
            write!(f, " (at least {:.0} per second)", gain.rate)?;
        }
        Ok(())
    }
}

impl Advice {
    fn new(remedy: Remedy, text: impl Into<String>) -> Self {
        Self {
            remedy,
            setting: None,
            value: None,
            prediction: None,
            text: text.into(),
        }
    }

    fn set(self, setting: &str, value: Value) -> Self {
        Self {
            setting: Some(setting.into()),
            value: Some(value),
            ..self
        }
    }

    /// Adds a gain: the present rate times `factor`, if that is more than noise.
    fn gaining(self, shares: &Shares<'_>, factor: f64) -> Self {
        let prediction = (factor >= 1.05).then_some(Gain {
            rate: shares.rate * factor,
            at_least: true,
        });
        Self { prediction, ..self }
    }
}

/// The names of a kind's settings.
struct Names {
    workers: &'static str,
    prefetch: Option<&'static str>,
}

fn names(kind: LoaderKind) -> Option<Names> {
    let (workers, prefetch) = match kind {
        LoaderKind::Torch => ("num_workers", Some("prefetch_factor")),
        LoaderKind::Dali => ("num_threads", Some("prefetch_queue_depth")),
        LoaderKind::TfData => ("num_parallel_calls", None),
        LoaderKind::Grain => ("worker_count", None),
        LoaderKind::Other => return None,
    };
    Some(Names { workers, prefetch })
}

/// The advice for a cause, the most promising first.
pub fn of(shares: &Shares<'_>, cause: Cause) -> Vec<Advice> {
    let all: Vec<Option<Advice>> = match cause {
        Cause::Workers => vec![more_workers(shares)],
        Cause::Transform => vec![fewer_workers(shares), Some(less_work(shares))],
        Cause::Cores => vec![
            fewer_workers(shares),
            Some(cheaper_step()),
            Some(less_work(shares)),
        ],
        Cause::Storage => storage(shares),
        Cause::NetworkStorage => vec![
            Some(Advice::new(
                Remedy::Storage,
                "copy the data to a local disk, or put many samples into one file: each read \
                 waits for the network",
            )),
            waiting_workers(shares),
        ],
        Cause::Network => vec![
            Some(Advice::new(
                Remedy::Cache,
                "keep the data in a local cache after the first epoch",
            )),
            waiting_workers(shares),
        ],
        Cause::Blocked => vec![
            Some(Advice::new(
                Remedy::Waits,
                "look at the code of the data set: workers wait in locks, sleeps or other \
                 programs (`py-spy dump --pid PID` of a worker names the line)",
            )),
            waiting_workers(shares),
        ],
        Cause::WorkerStart => vec![Some(start(shares))],
        Cause::SlowWorker => vec![
            any_order(shares),
            Some(Advice::new(
                Remedy::Balance,
                "give each worker the same work: shards of equal size, no worker with other data",
            )),
        ],
        Cause::Uneven => vec![any_order(shares), prefetch(shares)],
        Cause::Pipe => vec![Some(Advice::new(
            Remedy::Tensors,
            "return tensors from `collate_fn`: they pass through shared memory, other objects are \
             pickled, and the loop's thread unpickles them",
        ))],
        Cause::Gil => vec![Some(other_threads(shares))],
        Cause::SmallBatches => vec![larger_batches(shares)],
        Cause::Pinning => vec![Some(
            Advice::new(
                Remedy::PinMemory,
                "pin_memory=True, and copies with non_blocking=True: they run beside the step",
            )
            .set("pin_memory", Value::Flag(true)),
        )],
        Cause::CpuQuota => vec![Some(quota(shares))],
        Cause::OtherPrograms => vec![Some(Advice::new(
            Remedy::OtherPrograms,
            format!(
                "stop other programs: they use {:.1} of {} cores",
                shares.other_cores, shares.seen.machine.cores
            ),
        ))],
        Cause::NotStarved | Cause::Unknown => Vec::new(),
    };
    all.into_iter().flatten().collect()
}

/// Seconds of samples that the step alone allows, as a factor of the present rate.
fn step_limit(shares: &Shares<'_>) -> f64 {
    if shares.step_ns > 0.0 {
        shares.period_ns / shares.step_ns
    } else {
        f64::INFINITY
    }
}

/// More workers for cores that are idle; `None` if the loader cannot use them.
pub fn more_workers(shares: &Shares<'_>) -> Option<Advice> {
    let facts = &shares.seen.loader;
    let now = facts
        .workers
        .map_or(shares.workers.len(), |workers| workers as usize);
    let each = if shares.workers.is_empty() {
        1.0
    } else {
        (shares.worker_cores / shares.workers.len() as f64).clamp(0.1, 1.0)
    };
    // A loop whose thread made the batches is free for its step then.
    let freed = if now == 0 {
        shares.starved * shares.loop_computes.min(1.0)
    } else {
        0.0
    };
    let cores = shares.seen.machine.cores as usize;
    let free = ((shares.idle_cores + freed) / each + 0.2).floor() as usize;
    let idle = format!("{:.1} cores are idle", shares.idle_cores);
    if free == 0 && now < cores {
        // Nobody knows the gain on cores that others use as well.
        let others = format!("other programs use {:.1} cores", shares.other_cores);
        let why = if shares.other_cores >= CROWDED {
            others
        } else {
            idle
        };
        return Some(workers(shares, cores, &why));
    }
    let wanted = now + free;
    if free == 0 || wanted > 4 * cores {
        return None;
    }
    let factor = if now == 0 {
        // The workers' time of a batch, beside the step.
        let made = shares.wait_ns.max(1.0) / wanted as f64;
        shares.period_ns / made.max(shares.step_ns)
    } else {
        (wanted as f64 / now as f64).min(step_limit(shares))
    };
    let advice = workers(shares, wanted, &idle);
    Some(match advice.setting {
        Some(_) => advice.gaining(shares, 0.8 * factor),
        None => advice,
    })
}

/// So many workers, as far as the loader's present number is known.
fn workers(shares: &Shares<'_>, wanted: usize, why: &str) -> Advice {
    let facts = &shares.seen.loader;
    let Some((names, _)) = names(facts.kind).zip(facts.workers) else {
        let text = format!("more workers or parallel calls of the loader: {why}");
        return Advice::new(Remedy::Workers, text);
    };
    let text = format!("{}={wanted}: {why}", names.workers);
    Advice::new(Remedy::Workers, text).set(names.workers, Value::Count(wanted as u64))
}

/// More workers for waits, which take no core.
fn waiting_workers(shares: &Shares<'_>) -> Option<Advice> {
    let facts = &shares.seen.loader;
    let names = names(facts.kind)?;
    let now = facts.workers?;
    let places = shares.producing();
    let computes = shares.at(&places, places.running);
    if shares.idle_cores < 0.3 && computes >= 0.3 {
        return None;
    }
    let wanted = (2 * now).clamp(2, 4 * shares.seen.machine.cores.max(1));
    let text = format!(
        "{}={wanted}: workers that wait take no core, and more of them wait at once",
        names.workers
    );
    let advice = Advice::new(Remedy::Workers, text);
    (wanted > now).then(|| advice.set(names.workers, Value::Count(wanted.into())))
}

/// Fewer workers where they are more than the cores.
fn fewer_workers(shares: &Shares<'_>) -> Option<Advice> {
    let names = names(shares.seen.loader.kind)?;
    let now = shares.seen.loader.workers?;
    let cores = shares.seen.machine.cores.max(1);
    let text = format!(
        "{}={cores}: {now} workers share {cores} cores",
        names.workers
    );
    let advice = Advice::new(Remedy::Workers, text);
    // A few more than cores do no harm.
    (now >= 2 * cores).then(|| advice.set(names.workers, Value::Count(cores.into())))
}

fn less_work(shares: &Shares<'_>) -> Advice {
    let cores = shares.seen.machine.cores;
    let in_loop = shares.workers.is_empty() && shares.loop_computes >= HALF;
    let place = match cores {
        _ if in_loop => "the loop's own thread is always at work".to_string(),
        1 => "the one core is used up".to_string(),
        cores => format!("all {cores} cores are used up"),
    };
    Advice::new(
        Remedy::LessWork,
        format!(
            "less work for each sample: a cheaper transform, a faster decoder, smaller pictures on \
             disk, u8 until the GPU; {place}"
        ),
    )
}

fn cheaper_step() -> Advice {
    Advice::new(
        Remedy::Step,
        "fewer threads of the step (`torch.set_num_threads`, OMP_NUM_THREADS): it takes cores that \
         the workers need",
    )
}

fn storage(shares: &Shares<'_>) -> Vec<Option<Advice>> {
    let words = if shares.device_bytes_per_s > 0.0 {
        "keep the files in memory or on a faster device, or put many samples into one file and \
         read it in order"
    } else {
        "put many samples into one file: the time goes into opening and looking up files, whose \
         bytes are in memory already"
    };
    vec![
        Some(Advice::new(Remedy::Storage, words)),
        waiting_workers(shares),
    ]
}

fn start(shares: &Shares<'_>) -> Advice {
    let facts = &shares.seen.loader;
    let has_workers = facts.workers.is_some_and(|workers| workers > 0);
    if facts.kind == LoaderKind::Torch && has_workers && facts.persistent_workers == Some(false) {
        let kept = 1.0 - 0.8 * shares.restarts;
        return Advice::new(
            Remedy::PersistentWorkers,
            "persistent_workers=True: workers are started once",
        )
        .set("persistent_workers", Value::Flag(true))
        .gaining(shares, 1.0 / kept);
    }
    Advice::new(
        Remedy::PersistentWorkers,
        "start the loader once for all epochs, or make epochs longer: the first batch of each \
         waits for files, processes and buffers",
    )
}

fn any_order(shares: &Shares<'_>) -> Option<Advice> {
    let facts = &shares.seen.loader;
    if facts.in_order != Some(true) {
        return None;
    }
    // In order, each worker made as many batches as the slowest one: what each would make if it
    // were always busy adds up.
    let most = shares
        .workers
        .iter()
        .map(|worker| worker.busy())
        .fold(0.0, f64::max);
    let count = shares.workers.len().max(1) as f64;
    let sum: f64 = shares
        .workers
        .iter()
        .map(|worker| most / worker.busy().max(0.05))
        .sum();
    let factor = (sum / count).min(step_limit(shares));
    let advice = Advice::new(
        Remedy::AnyOrder,
        "in_order=False: the loop takes what is ready; batches then come in another order",
    );
    Some(
        advice
            .set("in_order", Value::Flag(false))
            .gaining(shares, 0.6 * factor),
    )
}

fn prefetch(shares: &Shares<'_>) -> Option<Advice> {
    let facts = &shares.seen.loader;
    let name = names(facts.kind)?.prefetch?;
    let wanted = 4 * facts.prefetch_factor?;
    let text = format!("{name}={wanted}: batches ahead bridge the slow ones");
    Some(Advice::new(Remedy::Prefetch, text).set(name, Value::Count(wanted.into())))
}

fn other_threads(shares: &Shares<'_>) -> Advice {
    if shares.seen.loader.kind == LoaderKind::Grain && shares.workers.is_empty() {
        let cores = shares.seen.machine.cores.max(1);
        let text = format!("worker_count={cores}: the loader's threads share one GIL");
        let advice = Advice::new(Remedy::Workers, text);
        return advice.set("worker_count", Value::Count(cores.into()));
    }
    let watched = shares.seen.machine.watched_ns.max(1) as f64;
    // Threads have the process's name unless they set their own.
    let busiest = shares.seen.threads.first().map(|thread| {
        let cores = thread.cpu_ns as f64 / watched;
        format!(
            "; the busiest is thread {} ({}), {cores:.1} cores",
            thread.id, thread.name
        )
    });
    Advice::new(
        Remedy::OtherThreads,
        format!(
            "move Python threads of this process (logging, metrics, queues) into another process: \
             they hold the GIL when the loop wants its batch{}",
            busiest.unwrap_or_default()
        ),
    )
}

fn larger_batches(shares: &Shares<'_>) -> Option<Advice> {
    const TIMES: u64 = 8;
    let facts = &shares.seen.loader;
    let times = TIMES as f64;
    // At worst half of the wait grows with the batch, and so does the step.
    let wait = shares.wait_ns * (0.5 + 0.5 * times);
    let factor = times * shares.period_ns / (times * shares.step_ns + wait);
    let words = "larger batches, or several of them from one `collate_fn`, split in the loop: each \
                 batch costs the same whatever is in it";
    let advice = match (facts.kind, facts.batch_size) {
        (LoaderKind::Torch, Some(now)) => {
            let wanted = TIMES * now.max(1);
            Advice::new(Remedy::BatchSize, format!("batch_size={wanted}: {words}"))
                .set("batch_size", Value::Count(wanted))
        }
        _ => Advice::new(Remedy::BatchSize, words),
    };
    // Without the samples' number the rate counts batches, which become fewer.
    let counted = shares.seen.consumer.samples > 0;
    Some(if counted {
        advice.gaining(shares, 0.9 * factor)
    } else {
        advice
    })
}

fn quota(shares: &Shares<'_>) -> Advice {
    let machine = &shares.seen.machine;
    let cores = machine.quota.map_or(String::new(), |quota| {
        format!(": it is {quota:.1} of {} cores", machine.cores)
    });
    Advice::new(
        Remedy::CpuQuota,
        format!("raise the CPU quota of the container{cores}"),
    )
}
