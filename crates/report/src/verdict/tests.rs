//! Verdicts on snapshots made by hand; `loader::scenarios` has those of the real pipeline.

use super::*;
use crate::meter::{CacheReads, Cpu, Effort, GpuIdle, Handed, ReaderInUse, ReaderKind};
use crate::whatif::Change;
use crate::{EpochCost, Estimate};
use feedline_base::meter::Network;

/// Four of sixteen cores decode all the time; a batch of 100 each 0.1 s; the consumer needs 0.05 s
/// of it.
pub(crate) fn decoding() -> Snapshot {
    let mut snapshot = Snapshot {
        at_ns: 11_000_000_000,
        steady_ns: 10_000_000_000,
        ..Snapshot::default()
    };
    let Snapshot {
        consumer,
        order,
        storage,
        decode,
        slots,
        ..
    } = &mut snapshot;
    consumer.batches = 100;
    consumer.samples = 10_000;
    consumer.bytes = 1_000_000_000;
    consumer.user_ns = 5_000_000_000;
    consumer.waited_ns = 5_000_000_000;
    order.busy_ns = 100_000_000;
    order.no_slot_ns = 8_000_000_000;
    storage.busy_ns = 4_000_000_000;
    storage.depth = 32;
    storage.in_flight_ns = 120_000_000_000;
    storage.counts.ops = 10_000;
    storage.counts.bytes_moved = 1_100_000_000;
    decode.workers = 4;
    decode.cores = 16;
    decode.samples = 10_000;
    decode.busy_ns = 39_600_000_000;
    decode.cpu_ns = Some(39_200_000_000);
    slots.count = 4;
    slots.filling_ns = 35_000_000_000;
    slots.held_ns = 5_000_000_000;
    snapshot
}

#[test]
fn a_verdict_gives_cause_evidence_and_advice_in_numbers() {
    let verdict = Verdict::of(&decoding());
    println!("{verdict}");
    assert_eq!((verdict.cause, verdict.also), (Cause::Decode, None));
    assert_eq!(verdict.strength, Strength::Strong);
    assert_eq!(verdict.starved_share, 0.5);
    let stages: Vec<PipelineStage> = verdict.stages.iter().map(|stage| stage.stage).collect();
    let expected = [
        PipelineStage::Consumer,
        PipelineStage::Decode,
        PipelineStage::Storage,
        PipelineStage::Order,
    ];
    assert_eq!(stages, expected);
    let decode = &verdict.stages[1];
    assert!((decode.utilisation - 0.99).abs() < 1e-9);
    assert!((decode.ceiling_items_per_s - 1010.1).abs() < 0.1);
    assert!((decode.demand_ns_per_batch - 99e6).abs() < 1.0 && !decode.at_least);
    let text = verdict.to_string();
    for part in [
        "bound by decode, starved 50.0 % (strong evidence)",
        "The consumer waited 50.0 % of 10.00 s for 100 batches, 1,000 samples/s",
        "4 decode workers: busy 99 % of the time",
        "Reads were in flight 40 % of the time, then 30.0 of 32 at once; 0.110 GB/s \
         in reads of 110 kB",
        "the planner had none for 80 % of the time",
        "Decode needs 7.8 cores, has 4: `workers(",
        "the bottleneck is then the consumer, at 2,000",
    ] {
        assert_has(&text, part);
    }
}

#[track_caller]
fn assert_has(text: &str, part: &str) {
    assert!(text.contains(part), "{part}: {text}");
}

/// After a change to the snapshot this is the cause, and the text has this part. Gives the text.
#[track_caller]
fn assert_said(expected: Cause, part: &str, change: impl FnOnce(&mut Snapshot)) -> String {
    let mut snapshot = decoding();
    change(&mut snapshot);
    let verdict = Verdict::of(&snapshot);
    let text = verdict.to_string();
    assert_eq!(verdict.cause, expected, "{part}: {text}");
    assert_has(&text, part);
    text
}

/// Steps of 100 ms on a GPU.
fn on_gpu(steps: u64, starved_ns: u64) -> GpuIdle {
    GpuIdle {
        steps,
        span_ns: steps * 100_000_000,
        starved_ns,
        ..Default::default()
    }
}

#[test]
fn the_wait_of_the_stream_counts_and_not_that_of_the_host() {
    let gpu = |steps, starved_ns| {
        move |s: &mut Snapshot| s.consumer.gpu = Some(on_gpu(steps, starved_ns))
    };
    assert_said(Cause::NotStarved, "own work", gpu(100, 50_000_000));
    let line = "The GPU's stream waited 40.0 %";
    assert_said(Cause::Decode, line, gpu(100, 4_000_000_000));
    // Half of the steps were not measured.
    assert_said(Cause::Decode, "waited 40.0 %", gpu(50, 2_000_000_000));
    assert_said(Cause::Decode, "only 5 steps", gpu(5, 200_000_000));
    assert_said(Cause::Decode, "starved 30.0 %", |s| {
        s.consumer.user_ns = 10_000_000_000;
        s.consumer.waited_ns = 0;
        s.consumer.gpu = Some(on_gpu(100, 3_000_000_000));
    });
    let text = "The GPU's stream waited 0.0 % of 10.00 s for 100 batches, 1,000 samples/s. \
         The consumer's thread waited 50.0 %, ahead";
    assert_said(Cause::NotStarved, text, gpu(100, 0));
}

#[test]
fn without_a_measured_step_on_a_gpu_no_cause_is_named() {
    let gpu = |no_stream, no_event| {
        let mut gpu = GpuIdle::default();
        gpu.unmeasured.no_stream = no_stream;
        gpu.unmeasured.no_event = no_event;
        Some(gpu)
    };
    let copies = |gpu: Option<GpuIdle>| {
        move |s: &mut Snapshot| {
            s.copy.insert(Default::default()).busy_ns = 1_000_000;
            s.consumer.gpu = gpu;
        }
    };
    let unknown = Cause::Unknown;
    assert_said(unknown, "the driver refused the events", copies(gpu(0, 99)));
    let line = "has not come to its second step";
    assert_said(unknown, line, copies(gpu(0, 0)));
    for gpu in [None, gpu(99, 0)] {
        let line = "cannot tell (thin evidence: the consumer's stream is not known)";
        let text = assert_said(unknown, line, copies(gpu));
        assert_has(&text, "Whether the GPU had work meanwhile is not known");
        assert_has(&text, "`stream(…)`, or `batch.bind(…)`");
        assert!(!text.contains("starved"), "{text}");
    }
}

#[test]
fn copies_say_their_share_and_rate_on_the_bus() {
    let line = "on the bus 20 % of the time, at 25.0 GB/s; 70 % of the time the next copy waited";
    assert_said(Cause::NotStarved, line, |s| {
        s.consumer.gpu = Some(on_gpu(100, 0));
        let copy = s.copy.insert(Default::default());
        copy.busy_ns = 2_000_000_000;
        copy.blocked_ns = 7_000_000_000;
        copy.bytes = 50_000_000_000;
        copy.batches = 100;
    });
}

#[test]
fn little_evidence_is_called_thin() {
    assert_said(Cause::Decode, "thin evidence: 7 batches", |s| {
        s.consumer.batches = 7;
    });
    let line = "thin evidence: 100.00 ms are too short";
    assert_said(Cause::Decode, line, |s| {
        s.steady_ns /= 100;
        s.consumer.user_ns /= 100;
        s.consumer.waited_ns /= 100;
        s.storage.busy_ns /= 100;
        s.decode.busy_ns /= 100;
        s.decode.cpu_ns = None;
        s.order.busy_ns = 1_000_000;
    });
    // Most was ready before the first batch was handed out.
    let short = assert_said(Cause::Decode, "epochs are too short", |s| {
        s.decode.samples = 3_000;
        s.decode.busy_ns = 12_000_000_000;
        s.consumer.first_ns = 5_000_000_000;
    });
    assert_has(&short, "`epochs(a..b)`");
    let nothing = Verdict::of(&Snapshot::default());
    assert_eq!(nothing.cause, Cause::Unknown, "{nothing}");
    assert!(
        matches!(nothing.strength, Strength::Thin { .. }),
        "{nothing}"
    );
}

#[test]
fn workers_that_lack_cores_are_not_told_to_be_more() {
    let line = "`workers(4)`: 16 workers share 4 cores";
    assert_said(Cause::Decode, line, |s| {
        s.decode.workers = 16;
        s.decode.cores = 4;
        s.decode.busy_ns *= 4;
    });
    // Eight ranks share 16 cores, so that each has two.
    for (workers, line) in [
        (
            4,
            "`workers(2)`: 4 workers of each of the 8 ranks here share 16 cores",
        ),
        (
            4,
            "The 8 ranks of this machine share 16 cores: with 4 decode workers each, they have 32.",
        ),
        (2, "more workers would not help"),
    ] {
        assert_said(Cause::Decode, line, |s| {
            s.decode.workers = workers;
            s.decode.busy_ns = u64::from(workers) * 9_900_000_000;
            s.decode.cpu_ns = Some(u64::from(workers) * 9_800_000_000);
            s.cpu = Some(Cpu {
                process_ns: 39_000_000_000,
                loaders_ns: 39_000_000_000,
                local_ranks: 8,
                sharing_ranks: 8,
                ..Cpu::default()
            });
        });
    }
    let line = "Of 4.0 workers that could have run, 2.0 were on a core";
    let competing = assert_said(Cause::Decode, line, |s| {
        s.decode.cpu_ns = Some(20_000_000_000);
    });
    assert_has(&competing, "wait for cores that others take");
    let line = "more workers would not help";
    assert_said(Cause::Decode, line, |s| s.decode.cores = 4);
    let alone = assert_said(Cause::Decode, line, |s| {
        s.decode.cpu_ns = Some(20_000_000_000);
        s.decode.cores = 4;
        s.cpu = Some(Cpu {
            process_ns: 39_000_000_000,
            loaders_ns: 39_000_000_000,
            ..Cpu::default()
        });
    });
    assert!(!alone.contains("others take"), "{alone}");
}

#[test]
fn blocked_workers_are_told_to_be_more() {
    // They sleep nine tenths of the time that they work.
    let sleep = |s: &mut Snapshot| {
        s.decode.cpu_ns = Some(3_900_000_000);
        s.decode.delay_ns = Some(100_000_000);
        s.decode.cores = 2;
    };
    let line = "For 90 % of their working time, workers waited";
    let sleeping = assert_said(Cause::Decode, line, sleep);
    assert_has(&sleeping, "`workers(8)` would give");
    let mut snapshot = decoding();
    sleep(&mut snapshot);
    snapshot.consumer.user_ns = 1_000_000;
    let model = WhatIf::from(&snapshot).unwrap();
    let with = |workers| {
        let change = Change {
            workers: Some(workers),
            ..Change::default()
        };
        model.with(&change).items_per_s
    };
    let gain = with(8) / with(4);
    assert!((1.8..2.2).contains(&gain), "{gain}");
    // Those that have no core do compete.
    let line = "Of 4.0 workers that could have run, 2.0 were on a core";
    assert_said(Cause::Decode, line, |s| {
        s.decode.cpu_ns = Some(20_000_000_000);
        s.decode.delay_ns = Some(19_600_000_000);
    });
}

#[test]
fn a_consumer_that_holds_all_slots_is_told_so() {
    let line = "The consumer holds 4.0 of 4 slots: drop batches";
    assert_said(Cause::MemoryBudget, line, |s| {
        s.decode.busy_ns = 1_000_000_000;
        s.decode.cpu_ns = None;
        s.storage.busy_ns = 100_000_000;
        s.consumer.user_ns = 10_000_000;
        s.consumer.waited_ns = 9_990_000_000;
        s.slots.held_ns = 39_900_000_000;
        s.slots.filling_ns = 100_000_000;
        s.order.no_slot_ns = 9_900_000_000;
    });
}

#[test]
fn of_epochs_of_one_batch_nothing_is_said() {
    let verdict = |batches, samples, steady_ns, first_ns| {
        let mut snapshot = decoding();
        snapshot.consumer.steady = Some(Handed { batches, samples });
        snapshot.steady_ns = steady_ns;
        snapshot.consumer.first_ns = first_ns;
        snapshot.consumer.user_ns = steady_ns;
        snapshot.consumer.waited_ns = 0;
        Verdict::of(&snapshot)
    };
    let single = verdict(0, 0, 1_000_000, 10_000_000_000);
    assert_eq!(single.cause, Cause::Unknown, "{single}");
    assert_has(&single.to_string(), "only the first batch of each");
    let mostly = verdict(50, 5_000, 1_000_000_000, 9_000_000_000);
    assert_eq!(mostly.cause, Cause::Unknown, "{mostly}");
    assert_has(&mostly.to_string(), "90 % of the time went into first");
    let mut advice = mostly.advice.iter();
    assert!(
        advice.any(|advice| advice.text.contains("`epochs(a..b)`")),
        "{mostly}"
    );
    // Rates are those of the steady time.
    let some = verdict(50, 5_000, 5_000_000_000, 1_000_000_000);
    assert_has(&some.to_string(), "1,000 samples/s");
}

#[test]
fn advice_without_a_gain_makes_no_promise() {
    let mut snapshot = decoding();
    snapshot.decode.busy_ns = 33_000_000_000;
    snapshot.decode.cpu_ns = None;
    snapshot.storage.busy_ns = 3_000_000_000;
    snapshot.consumer.user_ns = 2_000_000_000;
    snapshot.consumer.waited_ns = 8_000_000_000;
    snapshot.order.no_slot_ns = 9_000_000_000;
    snapshot.slots.count = 4096;
    snapshot.slots.filling_ns = 40_000_000_000_000;
    snapshot.slots.held_ns = 0;
    let text = Verdict::of(&snapshot).to_string();
    assert!(!text.contains("slots(8192)"), "{text}");
}

/// Storage is busy nearly all the time, with so much time of reads in flight.
fn read_all_the_time(s: &mut Snapshot, in_flight_ns: u64) {
    s.decode.busy_ns = 8_000_000_000;
    s.decode.cpu_ns = None;
    s.storage.busy_ns = 9_900_000_000;
    s.storage.in_flight_ns = in_flight_ns;
}

#[test]
fn storage_advice_names_the_limit_of_reads_in_flight() {
    let full = assert_said(Cause::Storage, "(strong evidence)", |s| {
        read_all_the_time(s, 310_000_000_000);
    });
    assert_has(&full, "`tuning(|t| t.depth(64))`: all 32 reads");
    let line = "bound by storage, starved 50.0 %, or the prefetch buffers: too close to tell";
    let slots = assert_said(Cause::Storage, line, |s| {
        read_all_the_time(s, 99_000_000_000)
    });
    let numbers = slots.matches(".slots(").count();
    assert_eq!(numbers, 1, "one number for one setting: {slots}");
    assert_has(&slots, "slots allowed 10 reads in flight of 32");
}

/// Bound by storage: all of 32 reads are in flight, and took so many milliseconds each.
fn reading(latencies: &[(f64, u64)]) -> Snapshot {
    let mut snapshot = decoding();
    read_all_the_time(&mut snapshot, 310_000_000_000);
    let latency = &mut snapshot.storage.latency;
    latency.count = latencies.iter().map(|(_, count)| count).sum();
    latency.buckets = latencies
        .iter()
        .map(|(ms, count)| (ms * 1e6, *count))
        .collect();
    snapshot
}

#[test]
fn a_larger_depth_is_advised_while_reads_do_not_wait() {
    let deeper = |snapshot: &Snapshot| {
        let change = Change {
            depth: Some(64),
            ..Change::default()
        };
        WhatIf::from(snapshot).unwrap().with(&change)
    };
    for (name, latencies, first, at_limit) in [
        (
            "a device with room",
            &[(0.9, 100), (1.0, 9000), (1.5, 900)][..],
            true,
            false,
        ),
        (
            "a throttled disk",
            &[
                (0.2, 8),
                (30.0, 400),
                (190.0, 3000),
                (195.0, 3000),
                (210.0, 3000),
            ],
            false,
            true,
        ),
        (
            "a device of four channels",
            &[(1.0, 4), (4.0, 20), (7.0, 2000), (8.0, 6000), (9.0, 1900)],
            false,
            true,
        ),
        (
            "latencies that vary on their own",
            &[(0.1, 500), (1.0, 2000), (4.0, 4000), (9.0, 3500)],
            false,
            false,
        ),
    ] {
        let snapshot = reading(latencies);
        let now = 1000.0;
        let verdict = Verdict::of(&snapshot);
        let then = deeper(&snapshot);
        assert_eq!(verdict.cause, Cause::Storage, "{name}: {verdict}");
        let mut advice = verdict.advice.iter();
        let place = advice.position(|one| one.text.starts_with("`tuning(|t| t.depth(64))`"));
        assert_eq!(place == Some(0), first, "{name}: {verdict}");
        assert_eq!(place.is_none(), at_limit, "{name}: {verdict}");
        let text = verdict.to_string();
        let waited = text.contains("as long as the fastest: they waited for each other");
        assert_eq!(waited, at_limit, "{name}: {text}");
        // What doubling gives is said, or that it cannot be known.
        assert_eq!(then.at_most, !at_limit, "{name}: {then:?}");
        assert_eq!(then.items_per_s > 1.05 * now, !at_limit, "{name}: {then:?}");
        let caveat = match (first, at_limit) {
            (true, _) => "assumes that reads do not begin to wait for each other",
            (_, true) => "A larger depth gives nothing: 32 reads in flight wait for each other",
            _ => "cannot be known",
        };
        let mut caveats = then.caveats.iter();
        assert!(
            caveats.any(|said| said.contains(caveat)),
            "{name}: {then:?}"
        );
    }
}

#[test]
fn advice_names_only_changes_that_gain() {
    // Busy workers and a busy consumer: (share of the time, share of the time) → what is promised
    // of the one or the other.
    for (decoding_ns, user_ns, ready) in [
        (39_600_000_000, 9_950_000_000, 0),
        (38_000_000_000, 6_200_000_000, 0),
        (39_600_000_000, 9_000_000_000, 4_000),
        (20_000_000_000, 9_900_000_000, 0),
        (8_000_000_000, 9_400_000_000, 0),
        (36_000_000_000, 9_000_000_000, 2_000),
    ] {
        let mut snapshot = decoding();
        snapshot.decode.busy_ns = decoding_ns;
        snapshot.decode.cpu_ns = Some(decoding_ns);
        snapshot.decode.samples -= ready;
        snapshot.consumer.user_ns = user_ns;
        snapshot.consumer.waited_ns = 10_000_000_000 - user_ns;
        let verdict = Verdict::of(&snapshot);
        let model = WhatIf::from(&snapshot).unwrap();
        let now = model.with(&Change::default()).items_per_s;
        let change = Change {
            consumer_factor: Some(1e6),
            ..Change::default()
        };
        let faster = model.with(&change).items_per_s;
        let mut advice = verdict.advice.iter();
        let said = advice.any(|one| one.text.contains("with less of it"));
        let asked = [Some(verdict.cause), verdict.also]
            .iter()
            .any(|cause| matches!(cause, Some(Cause::Consumer | Cause::NotStarved)));
        let gains = faster >= WhatIf::GAIN * now;
        assert_eq!(said, asked && gains, "{now} {faster} {verdict}");
        // What can be done is not less than what is done, and a rate that is above it is said to be
        // so.
        let ceilings = verdict.stages.iter().map(|stage| stage.ceiling_items_per_s);
        let least = ceilings.fold(f64::INFINITY, f64::min);
        assert!(now <= 1.000001 * least, "{now} {verdict}");
        let sustained = verdict.to_string().contains("can be sustained");
        assert_eq!(sustained, 1000.0 > 1.01 * least, "{verdict}");
    }
}

#[test]
fn a_depth_that_is_not_filled_is_not_made_larger() {
    let mut snapshot = reading(&[(1.0, 10_000)]);
    snapshot.storage.in_flight_ns = 99_000_000_000;
    let model = WhatIf::from(&snapshot).unwrap();
    let with = |depth| {
        model.with(&Change {
            depth: Some(depth),
            ..Change::default()
        })
    };
    let now = model.with(&Change::default()).items_per_s;
    assert_eq!(with(64).items_per_s, now);
    assert_has(&with(64).caveats[0], "only 10 of 32 reads");
    assert_eq!(with(16).items_per_s, now);
    let few = with(5);
    assert!(few.items_per_s < 0.6 * now && few.at_least, "{few:?}");
    assert!(!Verdict::of(&snapshot).to_string().contains(".depth("));
}

fn changed(mut reader: ReaderInUse, change: fn(&mut ReaderInUse)) -> ReaderInUse {
    change(&mut reader);
    reader
}

fn on_mount() -> ReaderInUse {
    changed(ReaderInUse::of(ReaderKind::Pread, false), |reader| {
        reader.mount = true
    })
}

#[test]
fn an_explicit_slow_reader_is_the_first_advice() {
    let first = |reader: ReaderInUse, in_flight_ns| {
        let mut snapshot = decoding();
        read_all_the_time(&mut snapshot, in_flight_ns);
        snapshot.storage.reader = Some(reader);
        let verdict = Verdict::of(&snapshot);
        assert_eq!(verdict.cause, Cause::Storage, "{verdict}");
        verdict.advice[0].text.clone()
    };
    let mmap = ReaderInUse::of(ReaderKind::Mmap, true);
    let pread = ReaderInUse::of(ReaderKind::Pread, true);
    let no_direct = Some("`mmap` has no `O_DIRECT`");
    let threads = Some("`pread` needs a thread");
    for in_flight_ns in [310_000_000_000, 99_000_000_000] {
        for (reader, lacks) in [
            (mmap, no_direct),
            (changed(mmap, |reader| reader.mount = true), no_direct),
            (pread, threads),
            (changed(pread, |reader| reader.mount = true), threads),
            (changed(pread, |reader| reader.objects = true), threads),
            (changed(pread, |reader| reader.cached = true), threads),
            (ReaderInUse::of(ReaderKind::Uring, true), None),
            // The loader chose it: another is not available.
            (changed(pread, |reader| reader.explicit = false), None),
        ] {
            let advice = first(reader, in_flight_ns);
            match lacks {
                Some(lacks) => {
                    let start = format!("`tuning(|t| t.reader(Mode::Auto))`: {lacks}");
                    assert!(advice.starts_with(&start), "{reader}: {advice}")
                }
                None => assert!(!advice.contains("reader(Mode::Auto)"), "{reader}: {advice}"),
            }
        }
    }
    // While decoding limits the reader does not matter.
    let decoding = assert_said(Cause::Decode, "", |s| s.storage.reader = Some(mmap));
    assert!(!decoding.contains("reader(Mode::Auto)"), "{decoding}");
}

#[test]
fn objects_are_advised_on_by_the_share_that_the_network_serves() {
    let network = |throttled| {
        let mut network = Network::default();
        network.requests = 1000;
        network.throttled = throttled;
        network.retries = throttled;
        Some(network)
    };
    let cache = |hits, misses| CacheReads {
        hits,
        misses,
        ..CacheReads::default()
    };
    let full = CacheReads {
        not_kept: 3,
        why: Some("the cache is full".into()),
        is_full: true,
        ..cache(100, 900)
    };
    let table = [
        (
            network(0),
            None,
            "`cache(Cache::at(…))` keeps objects on a local disk",
        ),
        (
            network(0),
            None,
            "On average 0.0 requests to object stores were in flight",
        ),
        (
            network(50),
            None,
            "The store throttled 50.0 of 1,000 requests",
        ),
        (network(0), Some(cache(100, 900)), "`prepare warm`"),
        (
            network(0),
            Some(full.clone()),
            "(the cache is full): a larger `capacity` or disk helps: with all of it cached",
        ),
        (
            network(0),
            Some(full),
            "The local cache served 10 % of 1,000 reads; 3 times it kept nothing",
        ),
        (
            network(0),
            Some(cache(999, 1)),
            "Faster storage (local NVMe)",
        ),
        (None, Some(cache(1000, 0)), "Faster storage (local NVMe)"),
    ];
    for (network, cache, words) in table {
        assert_said(Cause::Storage, words, |s| {
            read_all_the_time(s, 310_000_000_000);
            s.storage.network = network;
            s.storage.local_cache = cache;
        });
    }
    let line = "keeps the mount's files on a local disk: with all of it cached, at most";
    assert_said(Cause::Storage, line, |s| {
        read_all_the_time(s, 310_000_000_000);
        s.storage.reader = Some(on_mount());
    });
}

#[test]
fn more_reads_are_not_advised_where_requests_wait_for_their_turn() {
    let reading = |waiting_ns, reads: u64| {
        let mut snapshot = decoding();
        read_all_the_time(&mut snapshot, reads * 10_000_000_000);
        let network = snapshot.storage.network.insert(Network::default());
        network.requests = 1000;
        network.in_flight_ns = 100_000_000_000;
        network.waiting_ns = waiting_ns;
        Verdict::of(&snapshot).to_string()
    };
    let turn = "their turn";
    for (reads, setting) in [(31, "depth("), (15, "slots(")] {
        let free = reading(0, reads);
        let full = reading(50_000_000_000, reads);
        assert!(free.contains(setting) && !free.contains(turn), "{free}");
        assert!(!full.contains(setting), "{full}");
        assert_has(&full, "5.0 more waited for their turn");
    }
}

#[test]
fn room_that_lacks_is_named_where_it_lacks() {
    let assert_idle = |part: &str, change: fn(&mut Snapshot)| {
        assert_said(Cause::MemoryBudget, part, |s| {
            s.decode.busy_ns = 12_000_000_000;
            s.decode.cpu_ns = None;
            s.storage.busy_ns = 3_000_000_000;
            s.order.no_slot_ns = 0;
            change(s);
        });
    };
    assert_idle("`tuning(|t| t.slots(8))`", |s| {
        s.order.no_slot_ns = 9_000_000_000;
    });
    assert_idle("reads wait for buffer space", |s| {
        s.storage.blocked_ns = 6_000_000_000;
    });
    assert_idle("The consumer holds 3.2 of 4 slots", |s| {
        s.order.no_slot_ns = 9_000_000_000;
        s.slots.held_ns = 32_000_000_000;
        s.slots.filling_ns = 8_000_000_000;
    });
    assert_idle("`tuning(|t| t.device_batches(5))`", |s| {
        let copy = s.copy.insert(Default::default());
        copy.blocked_ns = 5_000_000_000;
        copy.buffers = 3;
        copy.batches = 100;
        s.consumer.gpu = Some(on_gpu(100, 5_000_000_000));
    });
}

#[test]
fn tiny_batches_that_only_change_hands_are_bound_by_that() {
    assert_said(Cause::HandOver, "A larger `batch_size`", |s| {
        s.decode.busy_ns = 2_000_000_000;
        s.decode.cpu_ns = None;
        s.storage.busy_ns = 500_000_000;
        s.consumer.user_ns = 1_000_000_000;
        s.consumer.waited_ns = 9_000_000_000;
        s.order.no_slot_ns = 0;
        s.consumer.batches = 10_000;
        s.slots.filling_ns = 9_000_000_000;
        s.slots.free_ns = 30_000_000_000;
        s.slots.held_ns = 1_000_000_000;
    });
}

#[test]
fn copies_and_the_planner_are_named_when_they_are_the_slowest() {
    let idle = |s: &mut Snapshot| {
        s.decode.busy_ns = 12_000_000_000;
        s.decode.cpu_ns = None;
        s.storage.busy_ns = 3_000_000_000;
    };
    let copying = |busy_ns, ops_ns| {
        move |s: &mut Snapshot| {
            idle(s);
            let copy = s.copy.insert(Default::default());
            copy.busy_ns = busy_ns;
            copy.ops_ns = ops_ns;
            copy.batches = 100;
            copy.buffers = 3;
            s.consumer.gpu = Some(on_gpu(100, 5_000_000_000));
        }
    };
    assert_said(Cause::Copy, "(`finish`)", copying(9_500_000_000, 0));
    let making = copying(1_000_000_000, 9_500_000_000);
    let making = assert_said(Cause::Copy, "on the bus 10 % of the time", making);
    assert_has(&making, "operations on the device took 95 %");
    let line = "Operations on the device (`finish`) take longer than the copies";
    assert_has(&making, line);
    let line = "The planner's thread was busy for 95 %";
    assert_said(Cause::Order, line, |s| {
        idle(s);
        s.order.busy_ns = 9_500_000_000;
    });
}

#[test]
fn decode_that_is_mostly_map_batch_is_called_by_that_name() {
    let mapping = |ns| move |s: &mut Snapshot| s.decode.map_batch_ns = ns;
    let most = mapping(30_000_000_000);
    let text = assert_said(Cause::MapBatch, "bound by `map_batch`", most);
    assert_has(&text, "Less work in `map_batch`");
    let mut in_turn = decoding();
    in_turn.decode.map_batch_ns = 30_000_000_000;
    in_turn.decode.map_batch_in_turn = true;
    let advice = Verdict::of(&in_turn).advice;
    assert!(advice[0].text.contains("one thread at a time runs it"));
    assert!(advice.iter().all(|one| one.remedy != Remedy::Workers));
    let line = "`map_batch` took 25 % of the time that workers worked";
    assert_said(Cause::Decode, line, mapping(9_900_000_000));
}

#[test]
fn advice_names_a_setting_and_its_value_for_programs() {
    let advice = &Verdict::of(&decoding()).advice[0];
    assert_eq!(advice.remedy, Remedy::Workers);
    assert_eq!(advice.setting.as_deref(), Some("workers"));
    assert_eq!(advice.value, Some(Value::Count(8)));
    let predicted = advice.prediction.as_ref().unwrap();
    assert!((1800.0..2000.0).contains(&predicted.items_per_s));
    assert_eq!(predicted.bound_by, Cause::Consumer);
}

#[test]
fn a_verdict_survives_json() {
    let mut verdict = Verdict::of(&decoding());
    let text = serde_json::to_string(&verdict).unwrap();
    for part in [
        r#""cause":"decode""#,
        r#""strength":"strong""#,
        r#""remedy":"workers","setting":"workers","value":8,"prediction":{"items_per_s":1899."#,
        r#""measure":"workers_busy","value":0.99,"unit":"share""#,
    ] {
        assert_has(&text, part);
    }
    // Numbers of a model have more digits than JSON keeps.
    verdict.advice[0].prediction = None;
    let text = serde_json::to_string(&verdict).unwrap();
    assert_eq!(serde_json::from_str::<Verdict>(&text).unwrap(), verdict);
}

/// A snapshot with these numbers in its fields, whatever they mean.
fn hostile(numbers: &[u64]) -> Snapshot {
    let mut numbers = numbers.iter().copied().cycle();
    let mut next = || numbers.next().unwrap_or(0);
    let mut value = serde_json::to_value(Snapshot {
        copy: (next() % 2 == 0).then(Default::default),
        decode: crate::meter::DecodeStage {
            cpu_ns: (next() % 2 == 0).then_some(0),
            ..Default::default()
        },
        consumer: crate::meter::Consumer {
            gpu: (next() % 2 == 0).then(Default::default),
            ..Default::default()
        },
        ..Snapshot::default()
    })
    .unwrap();
    fn fill(value: &mut serde_json::Value, key: &str, next: &mut impl FnMut() -> u64) {
        match value {
            serde_json::Value::Object(map) => map
                .iter_mut()
                .for_each(|(key, value)| fill(value, key, next)),
            serde_json::Value::Number(number) if number.is_u64() => {
                let is_narrow = ["depth", "workers", "cores", "buffers", "count"].contains(&key);
                let most = if is_narrow {
                    u64::from(u32::MAX)
                } else {
                    u64::MAX
                };
                *number = (next() & most).into();
            }
            _ => {}
        }
    }
    fill(&mut value, "", &mut next);
    serde_json::from_value(value).unwrap()
}

proptest::proptest! {
    #[test]
    fn no_snapshot_gives_a_panic_or_nan(
        numbers in proptest::collection::vec(
            proptest::prop_oneof![
                proptest::strategy::Just(0), proptest::strategy::Just(1), proptest::strategy::Just(u64::MAX),
                proptest::num::u64::ANY, 0_u64..1000, 1_000_000_u64..10_000_000_000,
            ],
            1..60,
        ),
        factor in proptest::num::f64::ANY,
    ) {
        let snapshot = hostile(&numbers);
        let verdict = Verdict::of(&snapshot);
        let _ = verdict.to_string();
        assert!((0.0..=1.0).contains(&verdict.starved_share), "{verdict}");
        for StageLoad { utilisation, demand_ns_per_batch, ceiling_items_per_s, .. } in &verdict.stages {
            assert!((0.0..=1.0).contains(utilisation), "{verdict}");
            assert!(demand_ns_per_batch.is_finite() && ceiling_items_per_s.is_finite(), "{verdict:?}");
            assert!(*demand_ns_per_batch >= 0.0 && *ceiling_items_per_s >= 0.0, "{verdict:?}");
        }
        let fed = verdict.starved_share < FED && verdict.cause != Cause::Unknown;
        assert_eq!(fed, verdict.cause == Cause::NotStarved, "{}", verdict);
        assert!(verdict.also != Some(verdict.cause), "{}", verdict);
        assert_eq!(serde_json::from_str::<Verdict>(&serde_json::to_string(&verdict).unwrap()).unwrap().cause, verdict.cause);
        let values = verdict.evidence.iter().map(|evidence| evidence.value);
        assert!(values.chain(verdict.advice.iter().flat_map(|advice| Some(advice.prediction.as_ref()?.items_per_s))).all(f64::is_finite));
        let Some(model) = WhatIf::from(&snapshot) else { return Ok(()) };
        let epoch = EpochCost { samples: numbers[0], ..EpochCost::default() };
        let made = Estimate::of(&snapshot, &snapshot, numbers[0] as f64, epoch, None, 0).unwrap();
        let _ = made.to_string();
        assert!([made.items_per_s, made.loader_ns, made.epoch.ns, made.epoch.bytes].iter().all(|value| value.is_finite()), "{made:?}");
        let by = Some(factor);
        for change in [
            Change::default(),
            Change { cached: true, gpu_decode: true, ..Change::default() },
            Change { workers: Some(numbers[0] as u32), slots: Some(numbers[0] as u32), ..Change::default() },
            Change { storage_factor: by, consumer_factor: by, ..Change::default() },
        ] {
            let then = model.with(&change);
            let finite = |value: f64| value.is_finite() && value >= 0.0;
            assert!(finite(then.items_per_s) && then.stages.iter().all(|stage| finite(stage.ceiling_items_per_s)), "{then:?}");
        }
    }
}

/// The kernel counted: threads ready without a core for so many seconds of ten, the process's CPU
/// seconds, the quota.
fn counted(s: &mut Snapshot, delay: f64, process: f64, quota: Option<(f64, u64)>) {
    let ns = |seconds: f64| (seconds * 1e9) as u64;
    s.decode.delay_ns = Some(ns(3.96 * delay));
    s.order.delay_ns = Some(0);
    s.consumer.delay_ns = Some(0);
    let (quota, throttled) = quota.unzip();
    s.cpu = Some(Cpu {
        process_ns: ns(process),
        // The workers' time is all of the loaders'.
        loaders_ns: s.decode.cpu_ns.unwrap_or(0),
        quota,
        periods: if quota.is_some() { 100 } else { 0 },
        throttled: throttled.unwrap_or(0),
        ..Cpu::default()
    });
}

#[test]
fn the_taker_of_the_cores_is_the_cause() {
    // Four workers of four cores that work all the time, 39 s of it on a core.
    let crowded = |delay: f64, process: f64, quota: Option<(f64, u64)>| {
        move |s: &mut Snapshot| {
            s.decode.cores = 4;
            s.decode.cpu_ns = Some((39.2e9 - 4e9 * delay) as u64);
            counted(s, delay, process, quota);
        }
    };
    let line =
        "threads were ready but had no core for 50 % of the time; the process had 2.0 of 4 cores";
    let others = assert_said(Cause::OtherPrograms, line, crowded(5.0, 20.0, None));
    let line = "bound by other programs on the cores, starved 50.0 %";
    assert_has(&others, line);
    for word in ["→ slots(", "→ Decode needs", "→ pictures", "would give"] {
        assert!(!others.contains(word), "{word}: {others}");
    }
    let own = Cause::OwnThreads;
    assert_said(own, "tensor library", crowded(5.0, 39.0, None));
    let line = "The CPU quota of 1.5 cores was used up in 46 of 100 periods";
    assert_said(Cause::CpuQuota, line, crowded(5.0, 14.0, Some((1.5, 46))));
    // One worker of a quota of one and a half.
    assert_said(Cause::Decode, "`workers(2)` would give", |s| {
        s.decode.workers = 1;
        s.decode.cores = 1;
        s.decode.busy_ns = 9_900_000_000;
        s.decode.cpu_ns = Some(9_800_000_000);
        counted(s, 0.0, 10.0, Some((1.5, 0)));
    });
    // The loader's own workers fill the cores; a quota that is never used up.
    let line = "bound by decode";
    assert_said(Cause::Decode, line, crowded(0.5, 39.0, None));
    assert_said(Cause::Decode, line, crowded(2.0, 39.5, None));
    assert_said(Cause::Decode, line, crowded(0.5, 39.0, Some((8.0, 1))));
    // The kernel also counts the others on these cores: threads that wait for each other blame
    // nobody else.
    for (others, cause) in [
        (15_000_000_000, Cause::OtherPrograms),
        (1_000_000_000, Cause::Decode),
    ] {
        assert_said(cause, "bound by", |s| {
            crowded(5.0, 20.0, None)(s);
            s.cpu.as_mut().unwrap().others_ns = Some(others);
        });
    }
    // Eight ranks that need what this one does.
    let line = "The 8 ranks of this machine share 2 cores: `workers(1)` in each";
    let others = "Other programs take";
    for (process, sharing, cause, line) in [
        (2.0, 8, Cause::LocalRanks, line),
        (0.5, 8, Cause::OtherPrograms, others),
        // Each rank has cores of its own, which the other ranks do not use.
        (2.0, 1, Cause::OtherPrograms, others),
    ] {
        assert_said(cause, line, |s| {
            s.decode.cores = 2;
            s.decode.cpu_ns = Some(400_000_000);
            counted(s, 5.0, process, None);
            let cpu = s.cpu.as_mut().unwrap();
            cpu.others_ns = Some(18_000_000_000);
            cpu.local_ranks = 8;
            cpu.sharing_ranks = sharing;
        });
    }
}

#[test]
fn a_step_that_waits_for_a_core_is_no_lack_of_the_loaders_threads() {
    for (waited, told) in [(0, false), (5_000_000_000, true)] {
        let mut snapshot = decoding();
        counted(&mut snapshot, 0.0, 20.0, None);
        snapshot.consumer.user_ns = 10_000_000_000 - waited;
        snapshot.consumer.waited_ns = waited;
        snapshot.consumer.delay_ns = Some(9_000_000_000);
        let text = Verdict::of(&snapshot).to_string();
        assert_eq!(text.contains("had no core for"), told, "{text}");
    }
}

#[test]
fn threads_that_wait_for_a_core_are_neither_handing_over_nor_slots() {
    // Hardly any work, no room problem, and each thread waits for the scheduler.
    let idle = |delay: u64, batches: u64| {
        move |s: &mut Snapshot| {
            s.decode.busy_ns = 1_000_000_000;
            s.decode.cpu_ns = Some(900_000_000);
            s.storage.busy_ns = 500_000_000;
            s.order.no_slot_ns = 0;
            s.slots.filling_ns = 5_000_000_000;
            s.consumer.batches = batches;
            s.consumer.user_ns = 2_000_000_000;
            s.consumer.waited_ns = 8_000_000_000;
            counted(s, 0.1, 3.0, None);
            s.order.delay_ns = Some(delay);
        }
    };
    let line = "Other programs take the cores";
    assert_said(Cause::OtherPrograms, line, idle(6_000_000_000, 100));
    // Batches of 100 ms are no hand-over, batches of 1 ms are.
    let line = "for most of the time no stage was at work";
    assert_said(Cause::Unknown, line, idle(0, 100));
    assert_said(Cause::HandOver, "A larger `batch_size`", idle(0, 10_000));
}

#[test]
fn bytes_from_memory_are_not_storage() {
    let reading = |device_bytes: Option<u64>, direct_bytes: u64| {
        move |s: &mut Snapshot| {
            s.storage.busy_ns = 10_000_000_000;
            s.storage.in_flight_ns = 320_000_000_000;
            s.decode.busy_ns = 4_000_000_000;
            s.decode.cpu_ns = Some(4_000_000_000);
            s.storage.device_bytes = device_bytes;
            s.storage.direct_bytes = direct_bytes;
        }
    };
    let memory = Cause::PageCache;
    assert_said(memory, "No device read these bytes", reading(Some(0), 0));
    let some = reading(Some(20_000_000), 0);
    assert_said(memory, "bound by reads from memory", some);
    for (device, direct) in [
        (None, 0),
        (Some(1_100_000_000), 0),
        (Some(0), 1_100_000_000),
    ] {
        assert_said(Cause::Storage, "bound by storage", reading(device, direct));
    }
    assert_said(Cause::Storage, "bound by storage", |s| {
        reading(Some(0), 0)(s);
        s.storage.reader = Some(on_mount());
    });
}

#[test]
fn a_consumer_without_work_has_no_demand() {
    let measured = |effort: Effort, user_ns: u64| {
        move |s: &mut Snapshot| {
            s.decode.effort = effort;
            s.consumer.user_ns = user_ns;
            s.consumer.waited_ns = 10_000_000_000 - user_ns;
        }
    };
    let text = "as fast as it goes, limited by decode (strong evidence)";
    let fast = assert_said(Cause::Decode, text, measured(Effort::Pictures, 20_000_000));
    assert!(!fast.contains("needs"), "{fast}");
    assert_has(&fast, "`workers(");
    // 0.2 ms for each batch, then 2 ms.
    let line = "limited by copies by the workers";
    assert_said(Cause::Decode, line, measured(Effort::Copy, 20_000_000));
    let line = "bound by copies by the workers";
    assert_said(Cause::Decode, line, measured(Effort::Copy, 200_000_000));
}

#[test]
fn advice_fits_the_work() {
    let fewer_bytes = "Fewer bytes for each sample of 100 kB";
    let fixed_cost = "At 64 bytes per sample, the fixed cost exceeds the cost of the bytes";
    for (effort, sample_bytes, part) in [
        (Effort::Pictures, 100_000, "seek points"),
        (Effort::Own, 100_000, "decoders and transforms"),
        (Effort::Light, 100_000, fewer_bytes),
        (Effort::Copy, 64, fixed_cost),
    ] {
        let mut snapshot = decoding();
        snapshot.decode.effort = effort;
        snapshot.consumer.bytes = 10_000 * sample_bytes;
        let text = Verdict::of(&snapshot).to_string();
        assert!(text.contains(part), "{effort:?}, {part}: {text}");
        let points = text.contains("seek points");
        assert_eq!(points, effort == Effort::Pictures, "{text}");
    }
}
