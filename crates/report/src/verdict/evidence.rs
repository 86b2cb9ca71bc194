//! The evidence of a verdict: its measurements in sentences.

use super::{AHEAD, Case, FED, first_share, map_share};
use crate::depth::{Headroom, link_is_full};
use crate::load::FILLED;
use crate::words::{bytes, grouped, number, time};
use crate::{Cause, Evidence, Measure, Unit};

impl Case<'_> {
    pub(super) fn evidence(&self) -> Vec<Evidence> {
        let storage =
            self.snapshot.storage.counts.ops > 0 || self.snapshot.storage.cached_bytes > 0;
        let mut all = vec![self.waits()];
        all.extend(self.read_ahead());
        all.extend(self.first_batches());
        all.extend(self.snapshot.copy.is_some().then(|| self.copies()));
        all.push(self.workers());
        all.extend(self.local_workers());
        all.extend(self.map_batch());
        all.extend(self.kernel());
        all.extend(self.cores());
        all.extend(storage.then(|| self.reads()));
        all.extend(self.network());
        all.extend(self.local_cache());
        all.push(self.slots());
        all.extend(
            (self.cause == Cause::Order || self.also == Some(Cause::Order)).then(|| self.planner()),
        );
        all
    }

    fn waits(&self) -> Evidence {
        let loads = self.loads;
        let consumer = &self.snapshot.consumer;
        let all = time(loads.steady_ns);
        let rate = number(loads.items_per_s);
        let batches = grouped(&consumer.batches.to_string());
        let plural = if consumer.batches == 1 { "" } else { "es" };
        let of = format!("of {all} for {batches} batch{plural}, {rate} samples/s");
        let host = 100.0 * consumer.waited_ns as f64 / loads.steady_ns;
        let Some(starved) = loads.starved else {
            let text = format!(
                "The consumer waited {host:.1} % {of}. Whether the GPU had work meanwhile is \
                 not known."
            );
            return Evidence::share(Measure::HostWaits, host / 100.0, text);
        };
        let percent = 100.0 * starved;
        if self.snapshot.consumer.gpu.is_some() {
            let ahead = host > percent + 100.0 * FED;
            let host = if ahead {
                format!(" The consumer's thread waited {host:.1} %, ahead of the stream.")
            } else {
                String::new()
            };
            let text = format!("The GPU's stream waited {percent:.1} % {of}.{host}");
            return Evidence::share(Measure::Starved, starved, text);
        }
        let mut text = format!("The consumer waited {percent:.1} % {of}");
        if consumer.waits.count > 0 && starved >= FED {
            let half = time(consumer.waits.p50_ns);
            let most = time(consumer.waits.p99_ns);
            text += &format!("; half of the waits took at most {half}, 99 % of them {most}");
        }
        Evidence::share(Measure::Starved, starved, text + ".")
    }

    /// A note that the rate cannot be sustained.
    fn read_ahead(&self) -> Option<Evidence> {
        let rate = self.loads.items_per_s;
        let kept = self.loads.sustained();
        (rate > AHEAD * kept).then(|| {
            let text = "Some of these samples were ready before the first batch";
            let text = format!("{text}: {} samples/s can be sustained.", number(kept));
            Evidence::new(Measure::SustainedRate, kept, Unit::SamplesPerS, text)
        })
    }

    fn first_batches(&self) -> Option<Evidence> {
        let first = self.snapshot.consumer.first_ns as f64;
        let share = first_share(self.snapshot, self.loads);
        (share >= 0.1).then(|| {
            let took = time(first);
            let percent = 100.0 * share;
            let text = format!(
                "In addition, first batches of epochs took {took}, {percent:.0} % of all \
                 time; that does not count as starved."
            );
            Evidence::share(Measure::FirstBatches, share, text)
        })
    }

    fn copies(&self) -> Evidence {
        let loads = self.loads;
        let copy = self.snapshot.copy.clone().unwrap_or_default();
        // Copies that are shorter than a tick of the device's clock have no rate.
        let speed = match copy.busy_ns {
            0 => String::new(),
            busy => format!(", at {:.1} GB/s", copy.bytes as f64 / busy as f64),
        };
        let share = |ns: u64| (100.0 * ns as f64 / loads.steady_ns).min(100.0);
        let ops = match copy.ops_ns {
            0 => String::new(),
            ops => format!("operations on the device took {:.0} %; ", share(ops)),
        };
        let text = format!(
            "Copies to the device were on the bus {:.0} % of the time{speed}; {ops}{:.0} \
             % of the time the next copy waited for device memory that the consumer used.",
            share(copy.busy_ns),
            100.0 * loads.no_buffer
        );
        Evidence::share(Measure::CopiesOnBus, share(copy.busy_ns) / 100.0, text)
    }

    fn workers(&self) -> Evidence {
        let decode = &self.snapshot.decode;
        let all = f64::from(decode.workers.max(1)) * self.loads.steady_ns;
        let percent = |ns: u64| (100.0 * ns as f64 / all).min(100.0);
        let text = format!(
            "{} decode workers: busy {:.0} % of the time, waiting for samples {:.0} %, \
             ahead of the consumer {:.0} %.",
            decode.workers,
            percent(decode.busy_ns),
            percent(decode.starved_ns),
            percent(decode.ahead_ns)
        );
        Evidence::share(Measure::WorkersBusy, percent(decode.busy_ns) / 100.0, text)
    }

    /// More decode workers of all ranks than cores, if each rank has as many as this one.
    fn local_workers(&self) -> Option<Evidence> {
        let ranks = self.sharing_ranks();
        let workers = self.snapshot.decode.workers;
        let all = u64::from(workers) * u64::from(ranks);
        let cores = self.loads.cores;
        (ranks > 1 && all as f64 > cores).then(|| {
            let text = format!(
                "The {ranks} ranks of this machine share {cores} cores: with {workers} decode \
                 workers each, they have {all}."
            );
            Evidence::new(Measure::LocalWorkers, all as f64, Unit::Count, text)
        })
    }

    fn map_batch(&self) -> Option<Evidence> {
        let share = map_share(self.snapshot);
        (share > 0.0).then(|| {
            Evidence::share(
                Measure::MapBatch,
                share,
                format!(
                    "`map_batch` took {:.0} % of the time that workers worked.",
                    100.0 * share
                ),
            )
        })
    }

    /// Evidence of missing cores, as the kernel counts them.
    fn kernel(&self) -> Vec<Evidence> {
        let Some(cpu) = &self.snapshot.cpu else {
            return Vec::new();
        };
        let mut all = Vec::new();
        if let Some(quota) = cpu.quota.filter(|_| cpu.periods > 0) {
            let throttled = cpu.throttled;
            let periods = cpu.periods;
            let text = format!(
                "The CPU quota of {quota:.1} cores was used up in {throttled} of {periods} \
                 periods."
            );
            all.push(Evidence::share(
                Measure::QuotaUsedUp,
                throttled as f64 / periods as f64,
                text,
            ));
        }
        if self.loads.taken.is_some() {
            let lost = 100.0 * self.loads.lost.min(1.0);
            let used = cpu.process_ns as f64 / self.loads.steady_ns;
            let enough = if self.cause == Cause::NotStarved {
                " (batches still came in time)"
            } else {
                ""
            };
            let text = format!(
                "The loader's threads were ready but had no core for {lost:.0} % of the \
                 time{enough}; the process had {used:.1} of {} cores.",
                self.loads.cores
            );
            all.push(Evidence::share(Measure::WithoutCore, self.loads.lost, text));
        }
        all
    }

    fn cores(&self) -> Option<Evidence> {
        if self.competes() {
            let wanted = self.loads.working * self.loads.on_cpu;
            let got = wanted * self.loads.cpu_share;
            let text = format!(
                "Of {wanted:.1} workers that could have run, {got:.1} were on a core, on \
                 average; the process may use {} cores.",
                self.loads.cores
            );
            return Some(Evidence::share(Measure::OnCore, self.loads.cpu_share, text));
        }
        self.blocked().then(|| {
            let blocked = 1.0 - self.loads.on_cpu;
            let percent = 100.0 * blocked;
            let text = format!(
                "For {percent:.0} % of their working time, workers waited, but not for a core."
            );
            Evidence::share(Measure::WorkBlocked, blocked, text)
        })
    }

    fn reads(&self) -> Evidence {
        let loads = self.loads;
        let storage = &self.snapshot.storage;
        if storage.counts.ops == 0 {
            let cached = storage.cached_bytes as f64;
            let text = format!(
                "{:.2} GB came from the page cache, and nothing from storage.",
                cached / 1e9
            );
            return Evidence::new(Measure::CachedBytes, cached, Unit::Bytes, text);
        }
        let depth = f64::from(storage.depth.max(1));
        let mut text = if loads.from_memory {
            "No device read these bytes: they were in memory. "
        } else {
            ""
        }
        .to_string();
        text += &format!(
            "Reads were in flight {:.0} % of the time, then {:.1} of {depth:.0} at once; \
             {:.3} GB/s in reads of {}",
            100.0 * loads.storage.min(1.0),
            loads.depth_filled * depth,
            storage.counts.bytes_moved as f64 / loads.steady_ns,
            bytes(self.bytes_per_read()),
        );
        if storage.latency.count > 0 {
            let half = time(storage.latency.p50_ns);
            let most = time(storage.latency.p99_ns);
            text += &format!(", half of which took at most {half}, 99 % {most}");
        }
        if let (Headroom::Limit { times }, true) = (loads.headroom, loads.depth_filled >= FILLED) {
            text +=
                &format!(", {times:.1} times as long as the fastest: they waited for each other");
        }
        if storage.cached_bytes > 0 {
            let all = storage.cached_bytes as f64 + storage.counts.bytes_moved as f64;
            text += &format!(
                "; {:.0} % of the bytes came from the page cache",
                100.0 * storage.cached_bytes as f64 / all
            );
        }
        Evidence::share(Measure::ReadsInFlight, loads.storage, text + ".")
    }

    fn network(&self) -> Option<Evidence> {
        let network = self
            .snapshot
            .storage
            .network
            .as_ref()
            .filter(|network| network.requests > 0)?;
        let steady = self.loads.steady_ns;
        let half = time(network.first_byte.p50_ns);
        let most = time(network.first_byte.p99_ns);
        let mut text = format!(
            "On average {:.1} requests to object stores were in flight, with {:.3} \
             GB/s; half of the answers began within {half}, 99 % within {most}",
            network.in_flight_ns as f64 / steady,
            network.bytes as f64 / steady,
        );
        if link_is_full(&self.snapshot.storage) {
            let waited = network.waiting_ns as f64 / steady;
            text += &format!(
                "; {waited:.1} more waited for their turn: the store or the link to it accepted \
                 no more at once"
            );
        }
        if network.retries > 0 {
            text += &format!(
                "; {} were repeated, {} throttled",
                network.retries, network.throttled
            );
        }
        let in_flight = network.in_flight_ns as f64 / steady;
        Some(Evidence::new(
            Measure::RequestsInFlight,
            in_flight,
            Unit::Count,
            text + ".",
        ))
    }

    fn local_cache(&self) -> Option<Evidence> {
        let cache = self
            .snapshot
            .storage
            .local_cache
            .as_ref()
            .filter(|cache| cache.hits + cache.misses > 0)?;
        let reads = cache.hits.saturating_add(cache.misses);
        let share = 100.0 * cache.hits as f64 / reads.max(1) as f64;
        let mut text = format!(
            "The local cache served {share:.0} % of {} reads",
            grouped(&reads.to_string())
        );
        if cache.blocks > 0 {
            text += &format!(", and kept {:.3} GB more", cache.bytes as f64 / 1e9);
        }
        if let (Some(why), 1..) = (&cache.why, cache.not_kept) {
            text += &format!("; {} times it kept nothing ({why})", cache.not_kept);
        }
        Some(Evidence::share(
            Measure::LocalCacheHits,
            share / 100.0,
            text + ".",
        ))
    }

    fn slots(&self) -> Evidence {
        let [free, filling, full, held] = self.loads.slots;
        let mut text = format!(
            "Of {} slots {free:.1} were free, {filling:.1} being filled, {full:.1} full \
             and waiting, {held:.1} with the consumer, on average; the planner had none \
             for {:.0} % of the time",
            self.snapshot.slots.count,
            100.0 * self.loads.no_slot
        );
        if self.loads.no_room >= 0.05 {
            text += &format!(
                ", and no room for encoded bytes {:.0} %",
                100.0 * self.loads.no_room
            );
        }
        Evidence::share(Measure::NoSlot, self.loads.no_slot, text + ".")
    }

    fn planner(&self) -> Evidence {
        let each = time(self.loads.order * self.loads.steady_ns / self.loads.batches);
        let busy = self.loads.order.min(1.0);
        let text = format!(
            "The planner's thread was busy for {:.0} % of the time: {each} per batch.",
            100.0 * busy
        );
        Evidence::share(Measure::PlannerBusy, busy, text)
    }
}
