//! The advice of a verdict, the most promising first, with the names of the settings to change.

use super::{Case, LACKS, WhyUnmeasured, first_share, slots_bound_reads, slots_lack};
use crate::depth::{Headroom, link_is_full, network_share, on_network_mount};
use crate::load::FILLED;
use crate::meter::{CacheReads, Effort, ReaderKind};
use crate::whatif::least;
use crate::words::{bytes, number, or_more, time};
use crate::{Advice, Cause, Change, Prediction, Remedy, StageLoad, WhatIf};
use feedline_base::setting::Setting;
use feedline_core::storage::{Direct, Mode};

/// For samples with fewer bytes than this, their number costs more than their bytes.
const SMALL: f64 = 4096.0;
/// If reads fill more than this share of the depth, other changes promise more than more slots.
const MUCH_FILLED: f64 = 0.8;

impl Case<'_> {
    pub(super) fn advice(&self) -> Vec<Advice> {
        let mut all = self.advice_on(self.cause);
        if let Some(also) = self.also {
            // The first of each list is the most promising, unless its setting is advised already.
            let first = self.advice_on(also).into_iter().next();
            let known = |new: &Advice| {
                new.value.is_some() && all.iter().any(|advice| advice.setting == new.setting)
            };
            let first = first.filter(|first| !known(first));
            all.extend(first);
        }
        all.extend(self.epochs());
        all
    }

    fn advice_on(&self, cause: Cause) -> Vec<Advice> {
        match cause {
            Cause::NotStarved | Cause::Consumer => self.consumer_advice(),
            Cause::Storage => self.storage_advice(),
            Cause::MapBatch if self.waits_in_turn() => vec![self.less_work(cause)],
            Cause::Decode | Cause::MapBatch => self.decode_advice(cause),
            Cause::Copy => self.copy_advice(),
            Cause::Order => order_advice(),
            Cause::MemoryBudget => self.memory_advice(),
            Cause::PageCache => vec![self.memory_copies()],
            Cause::OtherPrograms => vec![Advice::new(
                Remedy::OtherPrograms,
                "Other programs take the cores: stop them, or give this process cores of its \
                 own (`taskset`, a cpuset, a container's CPU request). Until then no setting \
                 of the loader has a known effect.",
            )],
            Cause::LocalRanks => {
                let ranks = self.sharing_ranks();
                let cores = self.snapshot.decode.cores;
                let fewer = Setting::Workers.with((cores / ranks.max(1)).max(1));
                let text = format!(
                    "The {ranks} ranks of this machine share {cores} cores: {fewer} in each, or \
                     fewer ranks."
                );
                vec![Advice::new(Remedy::Cores, text)]
            }
            Cause::OwnThreads => vec![Advice::new(
                Remedy::OwnThreads,
                "Other threads of this process take the cores: give those of the consumer's \
                 tensor library fewer.",
            )],
            Cause::CpuQuota => {
                let quota = self
                    .snapshot
                    .cpu
                    .as_ref()
                    .and_then(|cpu| cpu.quota)
                    .unwrap_or_default();
                let higher = format!(
                    "A higher CPU quota: the control group of this process has {quota:.1} cores."
                );
                vec![Advice::new(Remedy::CpuQuota, higher)]
            }
            Cause::HandOver => {
                let each = time(self.loads.steady_ns / self.loads.batches);
                let larger = format!("A larger {}: a batch takes {each}", Setting::BatchSize);
                let text = larger + ", mostly for passing it between threads.";
                vec![Advice::new(Remedy::BatchSize, text).about(Setting::BatchSize)]
            }
            Cause::Unknown if self.unmeasured() == Some(WhyUnmeasured::NoStream) => {
                let bind = Setting::Bind.hint(|bind| format!(", or {bind} for each batch"));
                Setting::Stream
                    .there()
                    .map(|stream| {
                        let text = format!(
                            "Pass the loader the GPU stream that runs your training steps: \
                                 {stream}{bind}."
                        );
                        Advice::new(Remedy::Stream, text).about(stream)
                    })
                    .into_iter()
                    .collect()
            }
            Cause::Unknown => Vec::new(),
        }
    }

    fn consumer_advice(&self) -> Vec<Advice> {
        let faster = self.model.with(&Change {
            consumer_factor: Some(1e6),
            ..Change::default()
        });
        if !self.gains(&faster) {
            return Vec::new();
        }
        let most = self.rate(&faster);
        let next = self.next(&faster);
        let text = format!(
            "The consumer's own work takes the time; with less of it the loader would \
             give {most}{next}."
        );
        // The consumer cannot become infinitely fast, so this is an upper bound.
        vec![Advice::new(Remedy::Consumer, text).predicting(&Prediction {
            at_most: true,
            ..faster
        })]
    }

    fn decode_advice(&self, cause: Cause) -> Vec<Advice> {
        let decode = &self.snapshot.decode;
        let needed = self.cores_needed();
        let what = if decode.effort <= Effort::Light {
            "Copying needs"
        } else {
            "Decode needs"
        };
        let mut all = Vec::new();
        let more = self.better_workers();
        match &more {
            Some((workers, then)) if self.blocked() => {
                let set = Setting::Workers.with(workers);
                let rate = self.rate(then);
                let next = self.next(then);
                let waits = "Workers often block (sleeps, locks, the network, page faults)";
                let text = format!("{waits}: {set} would give {rate}{next}, without more cores.");
                all.push(
                    Advice::new(Remedy::Workers, text)
                        .valued(Setting::Workers, workers)
                        .predicting(then),
                );
            }
            _ if decode.workers > self.own_cores() && !self.blocked() => {
                let workers = decode.workers;
                let cores = self.loads.cores.ceil() as u32;
                let who = match self.sharing_ranks() {
                    0 | 1 => String::new(),
                    ranks => format!(" of each of the {ranks} ranks here"),
                };
                let why = format!(
                    ": {workers} workers{who} share {cores} cores; more workers than cores do not \
                     decode faster."
                );
                let own = self.own_cores();
                all.extend(Advice::set(Remedy::Workers, Setting::Workers, own, why));
            }
            // If the kernel counts the process's CPU time, whatever takes the cores is a cause of
            // its own.
            _ if self.competes() && self.snapshot.cpu.is_none() => all.push(Advice::new(
                Remedy::OwnThreads,
                "Workers wait for cores that others take: threads of this process (give \
                 those of the consumer's tensor library fewer), or other programs.",
            )),
            Some((workers, then)) => {
                let rate = self.rate(then);
                let next = self.next(then);
                // If the consumer does no work of its own, any number of cores is useful.
                let needs = match self.loads.has_demand() {
                    true => format!("{what} {needed:.1} cores, has {}: ", decode.workers),
                    false => String::new(),
                };
                let set = Setting::Workers.with(workers);
                let advice = Advice::new(
                    Remedy::Workers,
                    format!("{needs}{set} would give {rate}{next}."),
                );
                all.push(advice.valued(Setting::Workers, workers).predicting(then));
            }
            None => {
                let has = f64::from(decode.workers).min(self.loads.cores);
                let (needs, more) = match self.loads.has_demand() {
                    true => (format!("{what} {needed:.1} cores, has {has}, and "), "more"),
                    false => (String::new(), "More"),
                };
                let rest =
                    "workers would not help: more cores would, or less work for each sample.";
                all.push(Advice::new(Remedy::Cores, format!("{needs}{more} {rest}")));
            }
        }
        all.push(self.less_work(cause));
        // For workers that only copy, fewer or smaller copies help more than cores, so cores come
        // second.
        if all.len() == 2 && all[0].remedy == Remedy::Cores && decode.effort <= Effort::Light {
            all.swap(0, 1);
        }
        all
    }

    /// The advice to do less for each sample, by the kind of the work.
    fn less_work(&self, cause: Cause) -> Advice {
        let consumer = &self.snapshot.consumer;
        let effort = self.snapshot.decode.effort;
        let text = match effort {
            _ if cause == Cause::MapBatch && self.waits_in_turn() => {
                "Less work in `map_batch`: only one thread at a time runs it, so more workers help \
                 only as far as it waits, or computes in libraries that release the \
                 interpreter's lock."
                    .into()
            }
            _ if cause == Cause::MapBatch => {
                "Less work in `map_batch`, or the same work once, before the training.".into()
            }
            Effort::Pictures => {
                let scaling = Setting::DctScaling.hint(|scaling| format!("{scaling} and "));
                format!(
                    "Less work for each sample: seek points ({}), so that crops decode only \
                     their part; {scaling}a smaller {}; or smaller files, made once.",
                    Setting::SeekPoints,
                    Setting::Size
                )
            }
            Effort::Own => {
                "Less work for each sample in the decoders and transforms, or the same work once, \
                 before the training."
                    .into()
            }
            Effort::Light | Effort::Copy => {
                return self.fewer_bytes(consumer.bytes as f64 / consumer.samples.max(1) as f64);
            }
        };
        Advice::new(Remedy::LessWork, text)
    }

    /// Whether the lock of `map_batch` may be the limit: threads that hold it in turn use up to one
    /// core. If they use less, they wait for something else.
    fn waits_in_turn(&self) -> bool {
        self.snapshot.decode.map_batch_in_turn && self.loads.working * self.loads.on_cpu >= 0.5
    }

    /// The advice if samples are only copied.
    fn fewer_bytes(&self, each: f64) -> Advice {
        if each < SMALL {
            let each = bytes(each);
            let text = format!(
                "At {each} per sample, the fixed cost exceeds the cost of the bytes: pack \
                 several samples into one record."
            );
            return Advice::new(Remedy::Pack, text);
        }
        let keep = Setting::Keep.hint(|keep| format!(" ({keep})"));
        let text = format!(
            "Fewer bytes for each sample of {}: only the fields that are used{keep}, a \
             smaller type.",
            bytes(each)
        );
        Advice::new(Remedy::FewerBytes, text)
    }

    /// The advice if readers copy bytes from memory.
    fn memory_copies(&self) -> Advice {
        self.other_reader()
            .unwrap_or_else(|| self.fewer_bytes(self.bytes_per_read()))
    }

    /// Cores that decode needs to reach the next limit.
    fn cores_needed(&self) -> f64 {
        let others = self.model.with(&Change {
            gpu_decode: true,
            ..Change::default()
        });
        let limit = least(&others.stages).map_or(f64::INFINITY, |load| load.ceiling_items_per_s);
        let now = self.now();
        let times = if now > 0.0 { limit / now } else { 1.0 };
        let times = if times.is_finite() {
            times.clamp(0.0, 1e3)
        } else {
            1.0
        };
        self.loads.working * self.loads.cpu_share * times
    }

    /// The cores of this process, or its part if ranks share them.
    fn own_cores(&self) -> u32 {
        let ranks = f64::from(self.sharing_ranks().max(1));
        (self.loads.cores / ranks).ceil() as u32
    }

    /// The fewest workers with nearly the best rate, if that is 5 % more than now.
    fn better_workers(&self) -> Option<(u32, Prediction)> {
        let decode = &self.snapshot.decode;
        let most = match decode.cores {
            0 => decode.workers.saturating_mul(4),
            // Blocked workers leave their cores to others, so more workers than cores may help. How
            // far this scales was not measured.
            cores if self.blocked() => ((f64::from(cores) / self.loads.on_cpu) as u32)
                .min(decode.workers.saturating_mul(8)),
            _ => self.own_cores(),
        };
        let most = most.min(1024);
        let with = |workers| {
            self.model.with(&Change {
                workers: Some(workers),
                ..Change::default()
            })
        };
        let now = self.now();
        let best = with(most.max(decode.workers)).items_per_s;
        if best <= WhatIf::GAIN * now {
            return None;
        }
        let more = decode.workers.saturating_add(1)..=most;
        more.map(|workers| (workers, with(workers)))
            .find(|(_, then)| then.items_per_s >= 0.97 * best)
    }

    fn storage_advice(&self) -> Vec<Advice> {
        let loads = self.loads;
        let storage = &self.snapshot.storage;
        let mut all = Vec::new();
        let filled = loads.depth_filled >= FILLED && !link_is_full(storage);
        all.extend(self.other_reader());
        if loads.no_room >= LACKS {
            all.push(more_room());
        } else if slots_bound_reads(loads, self.snapshot) && loads.depth_filled <= MUCH_FILLED {
            all.extend(self.slots_for_reads());
        } else if filled && loads.headroom == Headroom::Left {
            all.extend(self.deeper("and took hardly longer than the fastest"));
        }
        if self.bytes_per_read() < 65536.0 && storage.counts.ops > 0 {
            let each = bytes(self.bytes_per_read());
            let text = format!(
                "Reads of {each} are small: where each is a file of its own, {}",
                packed()
            );
            all.push(Advice::new(Remedy::Pack, text));
        }
        all.extend(self.network_advice());
        if network_share(storage) < 0.5 {
            let cached = self.model.with(&Change {
                cached: true,
                ..Change::default()
            });
            let how = "Faster storage (local NVMe), fewer bytes for each sample, or memory for the \
                 page cache";
            all.extend(self.gains(&cached).then(|| {
                Advice::new(Remedy::Storage, self.all_cached(how, &cached)).predicting(&cached)
            }));
        }
        if slots_bound_reads(loads, self.snapshot) && loads.depth_filled > MUCH_FILLED {
            all.extend(self.slots_for_reads());
        }
        if filled && loads.headroom == Headroom::Unknown {
            all.extend(self.deeper(
                "which helps unless the device is at its limit; latencies cannot show that",
            ));
        }
        if storage.direct_bytes > 0 && storage.cached_bytes == 0 {
            let direct = Setting::Direct;
            let reader = Setting::Reader;
            let text = format!(
                "Reads bypass the page cache: with memory to spare, {direct} and {reader} \
                 let them use it."
            );
            all.push(Advice::new(Remedy::PageCache, text).valued(direct, Direct::Off));
        }
        let again = storage
            .counts
            .retries
            .saturating_add(storage.counts.short_reads);
        if again > storage.counts.ops / 100 {
            let retries = number(again as f64);
            let text = format!("{retries} reads were repeated or continued: look at the storage.");
            all.push(Advice::new(Remedy::Repeated, text));
        }
        all
    }

    /// More slots, if too few slots limit the reads in flight.
    fn slots_for_reads(&self) -> Option<Advice> {
        let filled = self.loads.depth_filled;
        let depth = self.snapshot.storage.depth.max(1);
        let rest = format!(
            " or a larger {} (with the {} for it): slots allowed {:.0} reads in flight \
             of {depth}. If storage can deliver more, the rate rises by up to a factor of {:.1}.",
            Setting::BatchSize,
            Setting::MemoryBudget,
            filled * f64::from(depth),
            (1.0 / filled.clamp(0.01, 1.0)).min(2.0)
        );
        Advice::set(
            Remedy::Slots,
            Setting::Slots,
            twice(self.snapshot.slots.count),
            rest,
        )
    }

    fn network_advice(&self) -> Vec<Advice> {
        let storage = &self.snapshot.storage;
        let mut all = Vec::new();
        if let Some(network) = &storage.network
            && network.throttled > network.requests / 100
        {
            let throttled = number(network.throttled as f64);
            let all_of = number(network.requests as f64);
            let what = "fewer loaders at a time, keys under more prefixes, or a higher quota";
            let text = format!("The store throttled {throttled} of {all_of} requests: {what}.");
            all.push(Advice::new(Remedy::Throttled, text));
        }
        let local = self.model.with(&Change {
            local_cache: true,
            ..Change::default()
        });
        let how = match &storage.local_cache {
            None if on_network_mount(storage) => {
                format!("{} keeps the mount's files on a local disk", Setting::Cache)
            }
            None => format!(
                "{} keeps objects on a local disk from the first epoch on",
                Setting::Cache
            ),
            // The counts of the steady time may be 0, but the reason is kept.
            Some(CacheReads {
                why: Some(why),
                is_full,
                ..
            }) => {
                let larger = format!(": a larger {} or disk helps", Setting::CacheBytes);
                let more = if *is_full { larger.as_str() } else { "" };
                format!("The local cache did not keep everything ({why}){more}")
            }
            Some(_) => {
                "The local cache is still being filled; `prepare warm` does it beforehand".into()
            }
        };
        // A few misses of a full cache are not reported.
        let misses = network_share(storage) >= 0.05 && self.gains(&local);
        let setting = if storage.local_cache.is_none() {
            Setting::Cache
        } else {
            Setting::CacheBytes
        };
        all.extend(misses.then(|| {
            Advice::new(Remedy::Cache, self.all_cached(&how, &local))
                .about(setting)
                .predicting(&local)
        }));
        all
    }

    fn all_cached(&self, how: &str, then: &Prediction) -> String {
        let most = if then.at_most { "at most " } else { "" };
        format!(
            "{how}: with all of it cached, {most}{}{}.",
            self.rate(then),
            self.next(then)
        )
    }

    /// More reads in flight, if they may raise the rate.
    fn deeper(&self, why: &str) -> Option<Advice> {
        let depth = self.snapshot.storage.depth.max(1);
        let then = self.model.with(&Change {
            depth: Some(twice(depth)),
            ..Change::default()
        });
        let rate = number(then.items_per_s);
        let next = self.next(&then);
        let rest = format!(
            ": all {depth} reads were in flight, {why}. That gives at most {rate} samples/s{next}."
        );
        let deeper = Advice::set(Remedy::Depth, Setting::Depth, twice(depth), rest)
            .filter(|_| self.gains(&then))?;
        Some(deeper.predicting(&then))
    }

    /// Whether the gain of a change is worth reporting.
    fn gains(&self, then: &Prediction) -> bool {
        then.items_per_s >= WhatIf::GAIN * self.now()
    }

    /// Samples per second without a change.
    fn now(&self) -> f64 {
        self.model.with(&Change::default()).items_per_s
    }

    /// Another reader, if the caller chose one that costs more per read.
    fn other_reader(&self) -> Option<Advice> {
        let reader = self
            .snapshot
            .storage
            .reader
            .as_ref()
            .filter(|reader| reader.explicit)?;
        let lacks = match reader.kind {
            ReaderKind::Mmap => {
                "`mmap` has no `O_DIRECT`: each read faults pages into the page cache and \
                 copies them from there"
            }
            ReaderKind::Pread => "`pread` needs a thread and a system call for each read in flight",
            ReaderKind::Uring | ReaderKind::Network => return None,
        };
        let instead = "io_uring, where the kernel allows it, submits many reads at once into \
             registered memory";
        Advice::set(
            Remedy::Reader,
            Setting::Reader,
            Mode::Auto,
            format!(": {lacks}; {instead}."),
        )
    }

    fn memory_advice(&self) -> Vec<Advice> {
        let loads = self.loads;
        let slots = self.snapshot.slots.count;
        let mut all = Vec::new();
        if loads.slots[3] >= 0.5 * f64::from(slots.max(2)) {
            let held = loads.slots[3];
            let text = format!(
                "The consumer holds {held:.1} of {slots} slots: drop batches as soon as they \
                 are used."
            );
            all.push(Advice::new(Remedy::DropBatches, text));
        }
        if loads.no_buffer >= LACKS {
            let buffers = self.snapshot.copy.as_ref().map_or(0, |copy| copy.buffers);
            let rest = ": full slots wait for device memory.";
            let set = Advice::set(
                Remedy::DeviceBatches,
                Setting::DeviceBatches,
                buffers.saturating_add(2),
                rest,
            );
            all.extend(set);
        }
        if loads.no_room >= LACKS {
            all.push(more_room());
        }
        if slots_lack(loads) || all.is_empty() {
            let budget = Setting::MemoryBudget;
            let rest = format!(
                ", with the {budget} for it, may help: stages wait for each other with \
                 {slots}. So may a larger {}.",
                Setting::BatchSize
            );
            all.extend(Advice::set(
                Remedy::Slots,
                Setting::Slots,
                twice(slots),
                rest,
            ));
        }
        all
    }

    /// The rate with twice the slots, if that is more than now.
    pub(super) fn more_slots(&self) -> Option<Prediction> {
        let change = Change {
            slots: Some(twice(self.snapshot.slots.count)),
            ..Change::default()
        };
        Some(self.model.with(&change)).filter(|then| self.gains(then))
    }

    /// Reading ahead across epochs.
    fn epochs(&self) -> Option<Advice> {
        let epochs = Setting::Epochs
            .there()
            .filter(|_| first_share(self.snapshot, self.loads) >= 0.2)?;
        let much = "Much of the time goes into first batches";
        let text = format!("{much}: {epochs} reads ahead across the end of an epoch.");
        Some(Advice::new(Remedy::Epochs, text).about(epochs))
    }

    fn rate(&self, then: &Prediction) -> String {
        format!(
            "{} samples/s{}",
            number(then.items_per_s),
            or_more(then.at_least)
        )
    }

    /// The limit after a change.
    fn next(&self, then: &Prediction) -> String {
        match least(&then.stages).filter(|load| Cause::from(load.stage) == then.bound_by) {
            Some(StageLoad {
                stage,
                ceiling_items_per_s,
                at_least,
                ..
            }) => {
                format!(
                    "; the bottleneck is then {stage}, at {}{}",
                    number(ceiling_items_per_s),
                    or_more(at_least)
                )
            }
            None => format!("; the bottleneck is then {}", then.bound_by),
        }
    }

    fn copy_advice(&self) -> Vec<Advice> {
        let copy = self.snapshot.copy.clone().unwrap_or_default();
        if copy.ops_ns > copy.busy_ns {
            let finish = Setting::Finish.hint(|finish| format!(" ({finish})"));
            let less = format!(
                "Operations on the device{finish} take longer than the copies: use a smaller \
                 type, or leave the conversion to the model."
            );
            return vec![Advice::new(Remedy::DeviceOps, less)];
        }
        let convert = Setting::Finish.hint(|finish| {
            format!("keep pictures as bytes and have the device convert them ({finish}), ")
        });
        let keep = Setting::Keep.hint(|keep| format!(" ({keep})"));
        let numa = Setting::Numa.hint(|numa| format!(" Set {numa} to the device's node."));
        let fewer =
            format!("Fewer bytes over the bus: {convert}drop fields that are not used{keep}.");
        let pinned = format!(
            "The report says whether slots are pinned; copies from unpinned memory are \
             slower.{numa}"
        );
        vec![
            Advice::new(Remedy::FewerBytes, fewer),
            Advice::new(Remedy::Pinned, pinned).about(Setting::Numa),
        ]
    }
}

fn order_advice() -> Vec<Advice> {
    let larger = format!(
        "Use a larger {}, or fewer and larger reads: both reduce the planner's work \
         per sample. Where each sample is a file of its own, {}",
        Setting::BatchSize,
        packed()
    );
    let larger = Advice::new(Remedy::BatchSize, larger).about(Setting::BatchSize);
    std::iter::once(larger)
        .chain(Setting::Sampler.there().map(|sampler| {
            Advice::new(
                Remedy::Sampler,
                format!("A {sampler} of your own runs on this thread: make it cheaper."),
            )
        }))
        .collect()
}

fn packed() -> String {
    format!("{} packs them into shards.", Setting::Shards)
}

/// The advice when rows wait for room.
fn more_room() -> Advice {
    let text = format!(
        "A larger {}: reads wait for buffer space.",
        Setting::MemoryBudget
    );
    Advice::new(Remedy::MemoryBudget, text).about(Setting::MemoryBudget)
}

/// Twice as many slots, or reads, up to the maximum allowed.
fn twice(count: u32) -> u32 {
    count.max(1).saturating_mul(2).min(4096)
}
