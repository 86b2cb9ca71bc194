//! Verdicts on snapshots made by hand; `loader::scenarios` has those of the real pipeline.

use super::*;
use crate::meter::{CacheReads, Cpu, Effort, ReaderInUse, ReaderKind};
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
    assert_eq!(
        (verdict.cause, verdict.also, verdict.strength.clone()),
        (Cause::Decode, None, Strength::Strong)
    );
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
    assert!(
        (decode.utilisation - 0.99).abs() < 1e-9
            && (decode.ceiling_items_per_s - 1010.1).abs() < 0.1
    );
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
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// What is said of the snapshot after a change to it.
fn said(change: impl FnOnce(&mut Snapshot)) -> (Cause, String) {
    let mut snapshot = decoding();
    change(&mut snapshot);
    let verdict = Verdict::of(&snapshot);
    (verdict.cause, verdict.to_string())
}

fn assert_said(expected: Cause, part: &str, said: (Cause, String)) {
    let (cause, text) = said;
    assert!(
        cause == expected && text.contains(part),
        "{expected:?}, {part}: {cause:?} {text}"
    );
}

/// Steps of 100 ms on a GPU.
fn on_gpu(steps: u64, starved_ns: u64) -> crate::meter::GpuIdle {
    crate::meter::GpuIdle {
        steps,
        span_ns: steps * 100_000_000,
        starved_ns,
        ..Default::default()
    }
}

#[test]
fn the_wait_of_the_stream_counts_and_not_that_of_the_host() {
    let gpu = |steps, starved_ns| Some(on_gpu(steps, starved_ns));
    assert_said(
        Cause::NotStarved,
        "own work",
        said(|s| s.consumer.gpu = gpu(100, 50_000_000)),
    );
    assert_said(
        Cause::Decode,
        "The GPU's stream waited 40.0 %",
        said(|s| s.consumer.gpu = gpu(100, 4_000_000_000)),
    );
    // Half of the steps were not measured.
    assert_said(
        Cause::Decode,
        "waited 40.0 %",
        said(|s| s.consumer.gpu = gpu(50, 2_000_000_000)),
    );
    assert_said(
        Cause::Decode,
        "only 5 steps",
        said(|s| s.consumer.gpu = gpu(5, 200_000_000)),
    );
    let starved = said(|s| {
        s.consumer.user_ns = 10_000_000_000;
        s.consumer.waited_ns = 0;
        s.consumer.gpu = gpu(100, 3_000_000_000);
    });
    assert_said(Cause::Decode, "starved 30.0 %", starved);
    let ahead = said(|s| s.consumer.gpu = gpu(100, 0));
    let text = "The GPU's stream waited 0.0 % of 10.00 s for 100 batches, 1,000 samples/s. \
         The consumer's thread waited 50.0 %, ahead";
    assert_said(Cause::NotStarved, text, ahead);
}

#[test]
fn without_a_measured_step_on_a_gpu_no_cause_is_named() {
    let gpu = |no_stream, no_event| {
        let unmeasured = Unmeasured {
            no_stream,
            no_event,
            ..Unmeasured::default()
        };
        Some(crate::meter::GpuIdle {
            unmeasured,
            ..Default::default()
        })
    };
    let copies = |gpu| {
        said(move |s| {
            s.copy = Some(crate::meter::CopyStage {
                busy_ns: 1_000_000,
                ..Default::default()
            });
            s.consumer.gpu = gpu;
        })
    };
    assert_said(
        Cause::Unknown,
        "the driver refused the events",
        copies(gpu(0, 99)),
    );
    assert_said(
        Cause::Unknown,
        "has not come to its second step",
        copies(gpu(0, 0)),
    );
    for gpu in [None, gpu(99, 0)] {
        let verdict = copies(gpu);
        assert_said(
            Cause::Unknown,
            "cannot tell (thin evidence: the consumer's stream is not known)",
            verdict.clone(),
        );
        assert_said(
            Cause::Unknown,
            "Whether the GPU had work meanwhile is not known",
            verdict.clone(),
        );
        assert_said(
            Cause::Unknown,
            "`stream(…)`, or `batch.bind(…)`",
            verdict.clone(),
        );
        assert!(!verdict.1.contains("starved"), "{}", verdict.1);
    }
}

#[test]
fn copies_say_their_share_and_rate_on_the_bus() {
    let copied = said(|s| {
        s.consumer.gpu = Some(on_gpu(100, 0));
        let busy_ns = 2_000_000_000;
        let blocked_ns = 7_000_000_000;
        let bytes = 50_000_000_000;
        s.copy = Some(crate::meter::CopyStage {
            busy_ns,
            blocked_ns,
            bytes,
            batches: 100,
            ..Default::default()
        });
    });
    let line = "on the bus 20 % of the time, at 25.0 GB/s; 70 % of the time the next copy waited";
    assert_said(Cause::NotStarved, line, copied);
}

#[test]
fn little_evidence_is_called_thin() {
    assert_said(
        Cause::Decode,
        "thin evidence: 7 batches",
        said(|s| s.consumer.batches = 7),
    );
    let short = said(|s| {
        let Snapshot {
            steady_ns,
            consumer,
            storage,
            decode,
            ..
        } = s;
        for ns in [
            steady_ns,
            &mut consumer.user_ns,
            &mut consumer.waited_ns,
            &mut storage.busy_ns,
            &mut decode.busy_ns,
        ] {
            *ns /= 100;
        }
        decode.cpu_ns = None;
        s.order.busy_ns = 1_000_000;
    });
    assert_said(
        Cause::Decode,
        "thin evidence: 100.00 ms are too short",
        short,
    );
    // Most was ready before the first batch was handed out.
    let short = said(|s| {
        s.decode.samples = 3_000;
        s.decode.busy_ns = 12_000_000_000;
        s.consumer.first_ns = 5_000_000_000;
    });
    assert_said(Cause::Decode, "epochs are too short", short.clone());
    assert_said(Cause::Decode, "`epochs(a..b)`", short);
    let nothing = Verdict::of(&Snapshot::default());
    assert!(
        nothing.cause == Cause::Unknown && matches!(nothing.strength, Strength::Thin { .. }),
        "{nothing}"
    );
}

#[test]
fn workers_that_lack_cores_are_not_told_to_be_more() {
    let crowded = said(|s| {
        s.decode.workers = 16;
        s.decode.cores = 4;
        s.decode.busy_ns *= 4;
    });
    assert_said(
        Cause::Decode,
        "`workers(4)`: 16 workers share 4 cores",
        crowded,
    );
    let competing = said(|s| s.decode.cpu_ns = Some(20_000_000_000));
    assert_said(
        Cause::Decode,
        "Of 4.0 workers that could have run, 2.0 were on a core",
        competing.clone(),
    );
    assert_said(Cause::Decode, "wait for cores that others take", competing);
    assert_said(
        Cause::Decode,
        "more workers would not help",
        said(|s| s.decode.cores = 4),
    );
    let alone = said(|s| {
        s.decode.cpu_ns = Some(20_000_000_000);
        s.decode.cores = 4;
        s.cpu = Some(Cpu {
            process_ns: 39_000_000_000,
            loaders_ns: 39_000_000_000,
            ..Cpu::default()
        });
    });
    assert!(!alone.1.contains("others take"), "{}", alone.1);
    assert_said(Cause::Decode, "more workers would not help", alone);
}

#[test]
fn blocked_workers_are_told_to_be_more() {
    // They sleep nine tenths of the time that they work.
    let sleeping = said(|s| {
        s.decode.cpu_ns = Some(3_900_000_000);
        s.decode.delay_ns = Some(100_000_000);
        s.decode.cores = 2;
    });
    assert_said(
        Cause::Decode,
        "For 90 % of their working time, workers waited",
        sleeping.clone(),
    );
    assert_said(Cause::Decode, "`workers(8)` would give", sleeping);
    let mut snapshot = decoding();
    snapshot.decode.cpu_ns = Some(3_900_000_000);
    snapshot.decode.delay_ns = Some(100_000_000);
    snapshot.decode.cores = 2;
    snapshot.consumer.user_ns = 1_000_000;
    let model = WhatIf::from(&snapshot).unwrap();
    let with = |workers| {
        model
            .with(&Change {
                workers: Some(workers),
                ..Change::default()
            })
            .items_per_s
    };
    assert!(
        (1.8..2.2).contains(&(with(8) / with(4))),
        "{} {}",
        with(4),
        with(8)
    );
    // Those that have no core do compete.
    let competing = said(|s| {
        (s.decode.cpu_ns, s.decode.delay_ns) = (Some(20_000_000_000), Some(19_600_000_000))
    });
    assert_said(
        Cause::Decode,
        "Of 4.0 workers that could have run, 2.0 were on a core",
        competing,
    );
}

#[test]
fn a_consumer_that_holds_all_slots_is_told_so() {
    let holding = said(|s| {
        s.decode.busy_ns = 1_000_000_000;
        s.decode.cpu_ns = None;
        s.storage.busy_ns = 100_000_000;
        s.consumer.user_ns = 10_000_000;
        s.consumer.waited_ns = 9_990_000_000;
        s.slots.held_ns = 39_900_000_000;
        s.slots.filling_ns = 100_000_000;
        s.order.no_slot_ns = 9_900_000_000;
    });
    assert_said(
        Cause::MemoryBudget,
        "The consumer holds 4.0 of 4 slots: drop batches",
        holding,
    );
}

#[test]
fn of_epochs_of_one_batch_nothing_is_said() {
    use crate::meter::Handed;
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
    assert!(
        single.cause == Cause::Unknown
            && single.to_string().contains("only the first batch of each"),
        "{single}"
    );
    let mostly = verdict(50, 5_000, 1_000_000_000, 9_000_000_000);
    assert!(
        mostly.cause == Cause::Unknown
            && mostly
                .to_string()
                .contains("90 % of the time went into first"),
        "{mostly}"
    );
    assert!(
        mostly
            .advice
            .iter()
            .any(|advice| advice.text.contains("`epochs(a..b)`")),
        "{mostly}"
    );
    // Rates are those of the steady time.
    let some = verdict(50, 5_000, 5_000_000_000, 1_000_000_000);
    assert!(some.to_string().contains("1,000 samples/s"), "{some}");
}

#[test]
fn advice_without_a_gain_makes_no_promise() {
    let short = said(|s| {
        s.decode.busy_ns = 37_000_000_000;
        s.decode.cpu_ns = None;
        s.storage.busy_ns = 3_000_000_000;
        s.consumer.user_ns = 2_000_000_000;
        s.consumer.waited_ns = 8_000_000_000;
        s.decode.busy_ns = 33_000_000_000;
        s.order.no_slot_ns = 9_000_000_000;
        s.slots.count = 4096;
        s.slots.filling_ns = 40_000_000_000_000;
        s.slots.held_ns = 0;
    });
    assert!(!short.1.contains("slots(8192)"), "{}", short.1);
}

#[test]
fn storage_advice_names_the_limit_of_reads_in_flight() {
    let reading = |in_flight_ns| {
        said(move |s| {
            s.decode.busy_ns = 8_000_000_000;
            s.decode.cpu_ns = None;
            s.storage.busy_ns = 9_900_000_000;
            s.storage.in_flight_ns = in_flight_ns;
        })
    };
    let full = reading(310_000_000_000);
    assert_said(Cause::Storage, "(strong evidence)", full.clone());
    assert_said(
        Cause::Storage,
        "`tuning(|t| t.depth(64))`: all 32 reads",
        full,
    );
    let slots = reading(99_000_000_000);
    assert_said(
        Cause::Storage,
        "bound by storage, starved 50.0 %, or the prefetch buffers: too close to tell",
        slots.clone(),
    );
    assert_eq!(
        slots.1.matches(".slots(").count(),
        1,
        "one number for one setting: {}",
        slots.1
    );
    assert_said(
        Cause::Storage,
        "slots allowed 10 reads in flight of 32",
        slots,
    );
}

/// Bound by storage: all of 32 reads are in flight, and took so many milliseconds each.
fn reading(latencies: &[(f64, u64)]) -> Snapshot {
    let mut snapshot = decoding();
    snapshot.decode.busy_ns = 8_000_000_000;
    snapshot.decode.cpu_ns = None;
    snapshot.storage.busy_ns = 9_900_000_000;
    snapshot.storage.in_flight_ns = 310_000_000_000;
    let buckets: Vec<(f64, u64)> = latencies
        .iter()
        .map(|(ms, count)| (ms * 1e6, *count))
        .collect();
    let count = buckets.iter().map(|bucket| bucket.1).sum();
    snapshot.storage.latency.count = count;
    snapshot.storage.latency.buckets = buckets;
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
        let place = verdict
            .advice
            .iter()
            .position(|advice| advice.text.starts_with("`tuning(|t| t.depth(64))`"));
        assert_eq!(place == Some(0), first, "{name}: {verdict}");
        assert_eq!(place.is_none(), at_limit, "{name}: {verdict}");
        assert_eq!(
            verdict
                .to_string()
                .contains("as long as the fastest: they waited for each other"),
            at_limit
        );
        // What doubling gives is said, or that it cannot be known.
        assert_eq!(then.at_most, !at_limit, "{name}: {then:?}");
        assert_eq!(then.items_per_s > 1.05 * now, !at_limit, "{name}: {then:?}");
        let caveat = match (first, at_limit) {
            (true, _) => "assumes that reads do not begin to wait for each other",
            (_, true) => "A larger depth gives nothing: 32 reads in flight wait for each other",
            _ => "cannot be known",
        };
        assert!(
            then.caveats.iter().any(|said| said.contains(caveat)),
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
        (snapshot.consumer.user_ns, snapshot.consumer.waited_ns) =
            (user_ns, 10_000_000_000 - user_ns);
        let verdict = Verdict::of(&snapshot);
        let model = WhatIf::from(&snapshot).unwrap();
        let now = model.with(&Change::default()).items_per_s;
        let faster = model
            .with(&Change {
                consumer_factor: Some(1e6),
                ..Change::default()
            })
            .items_per_s;
        let said = verdict
            .advice
            .iter()
            .any(|advice| advice.text.contains("with less of it"));
        let asked = [Some(verdict.cause), verdict.also]
            .iter()
            .any(|cause| matches!(cause, Some(Cause::Consumer | Cause::NotStarved)));
        assert_eq!(
            said,
            asked && faster >= WhatIf::GAIN * now,
            "{now} {faster} {verdict}"
        );
        // What can be done is not less than what is done, and a rate that is above it is said to be
        // so.
        let least = verdict
            .stages
            .iter()
            .map(|stage| stage.ceiling_items_per_s)
            .fold(f64::INFINITY, f64::min);
        assert!(now <= 1.000001 * least, "{now} {verdict}");
        assert_eq!(
            verdict.to_string().contains("can be sustained"),
            1000.0 > 1.01 * least,
            "{verdict}"
        );
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
    assert!(
        with(64).items_per_s == now && with(64).caveats[0].contains("only 10 of 32 reads"),
        "{:?}",
        with(64)
    );
    assert!(
        with(16).items_per_s == now && with(5).items_per_s < 0.6 * now && with(5).at_least,
        "{:?}",
        with(5)
    );
    assert!(!Verdict::of(&snapshot).to_string().contains(".depth("));
}

fn on_mount() -> ReaderInUse {
    ReaderInUse {
        mount: true,
        ..ReaderInUse::of(ReaderKind::Pread, false)
    }
}

#[test]
fn an_explicit_slow_reader_is_the_first_advice() {
    let first = |reader: ReaderInUse, in_flight_ns| {
        let mut snapshot = decoding();
        snapshot.decode.busy_ns = 8_000_000_000;
        snapshot.decode.cpu_ns = None;
        snapshot.storage.busy_ns = 9_900_000_000;
        snapshot.storage.in_flight_ns = in_flight_ns;
        snapshot.storage.reader = Some(reader);
        let verdict = Verdict::of(&snapshot);
        assert_eq!(verdict.cause, Cause::Storage, "{verdict}");
        verdict.advice[0].text.clone()
    };
    for in_flight_ns in [310_000_000_000, 99_000_000_000] {
        let mmap = ReaderInUse::of(ReaderKind::Mmap, true);
        let pread = ReaderInUse::of(ReaderKind::Pread, true);
        for (reader, lacks) in [
            (mmap, Some("`mmap` has no `O_DIRECT`")),
            (
                ReaderInUse {
                    mount: true,
                    ..mmap
                },
                Some("`mmap` has no `O_DIRECT`"),
            ),
            (pread, Some("`pread` needs a thread")),
            (
                ReaderInUse {
                    mount: true,
                    ..pread
                },
                Some("`pread` needs a thread"),
            ),
            (
                ReaderInUse {
                    objects: true,
                    ..pread
                },
                Some("`pread` needs a thread"),
            ),
            (
                ReaderInUse {
                    cached: true,
                    ..pread
                },
                Some("`pread` needs a thread"),
            ),
            (ReaderInUse::of(ReaderKind::Uring, true), None),
            // The loader chose it: another is not available.
            (
                ReaderInUse {
                    explicit: false,
                    ..pread
                },
                None,
            ),
        ] {
            let advice = first(reader, in_flight_ns);
            match lacks {
                Some(lacks) => {
                    assert!(
                        advice.starts_with(&format!("`tuning(|t| t.reader(Mode::Auto))`: {lacks}")),
                        "{reader}: {advice}"
                    )
                }
                None => assert!(!advice.contains("reader(Mode::Auto)"), "{reader}: {advice}"),
            }
        }
    }
    // While decoding limits the reader does not matter.
    let decoding = said(|s| s.storage.reader = Some(ReaderInUse::of(ReaderKind::Mmap, true)));
    assert!(!decoding.1.contains("reader(Mode::Auto)"), "{}", decoding.1);
}

#[test]
fn objects_are_advised_on_by_the_share_that_the_network_serves() {
    let reading = |network: Option<Network>, cache: Option<CacheReads>| {
        said(move |s| {
            s.decode.busy_ns = 8_000_000_000;
            s.decode.cpu_ns = None;
            s.storage.busy_ns = 9_900_000_000;
            s.storage.in_flight_ns = 310_000_000_000;
            s.storage.network = network.clone();
            s.storage.local_cache = cache.clone();
        })
    };
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
        assert_said(Cause::Storage, words, reading(network, cache));
    }
    let mount = said(|s| {
        s.decode.busy_ns = 8_000_000_000;
        s.decode.cpu_ns = None;
        s.storage.busy_ns = 9_900_000_000;
        s.storage.in_flight_ns = 310_000_000_000;
        s.storage.reader = Some(on_mount());
    });
    assert_said(
        Cause::Storage,
        "keeps the mount's files on a local disk: with all of it cached, at most",
        mount,
    );
}

#[test]
fn more_reads_are_not_advised_where_requests_wait_for_their_turn() {
    let reading = |waiting_ns, filled: bool| {
        said(move |s| {
            s.decode.busy_ns = 8_000_000_000;
            s.decode.cpu_ns = None;
            let reads = if filled { 31 } else { 15 };
            s.storage.busy_ns = 9_900_000_000;
            s.storage.in_flight_ns = reads * 10_000_000_000;
            let network = s.storage.network.insert(Network::default());
            network.requests = 1000;
            network.in_flight_ns = 100_000_000_000;
            network.waiting_ns = waiting_ns;
        })
    };
    for (filled, setting) in [(true, "depth("), (false, "slots(")] {
        let (_, free) = reading(0, filled);
        let (_, full) = reading(50_000_000_000, filled);
        assert!(
            free.contains(setting) && !free.contains("their turn"),
            "{free}"
        );
        assert!(
            !full.contains(setting) && full.contains("5.0 more waited for their turn"),
            "{full}"
        );
    }
}

#[test]
fn room_that_lacks_is_named_where_it_lacks() {
    let idle = |change: fn(&mut Snapshot)| {
        said(move |s| {
            s.decode.busy_ns = 12_000_000_000;
            s.decode.cpu_ns = None;
            s.storage.busy_ns = 3_000_000_000;
            s.order.no_slot_ns = 0;
            change(s);
        })
    };
    let budget = Cause::MemoryBudget;
    assert_said(
        budget,
        "`tuning(|t| t.slots(8))`",
        idle(|s| s.order.no_slot_ns = 9_000_000_000),
    );
    assert_said(
        budget,
        "reads wait for buffer space",
        idle(|s| s.storage.blocked_ns = 6_000_000_000),
    );
    let held = idle(|s| {
        s.order.no_slot_ns = 9_000_000_000;
        s.slots.held_ns = 32_000_000_000;
        s.slots.filling_ns = 8_000_000_000;
    });
    assert_said(budget, "The consumer holds 3.2 of 4 slots", held);
    let buffers = idle(|s| {
        s.copy = Some(crate::meter::CopyStage {
            blocked_ns: 5_000_000_000,
            buffers: 3,
            batches: 100,
            ..Default::default()
        });
        let steps = 100;
        let starved_ns = 5_000_000_000;
        s.consumer.gpu = Some(on_gpu(steps, starved_ns));
    });
    assert_said(budget, "`tuning(|t| t.device_batches(5))`", buffers);
}

#[test]
fn tiny_batches_that_only_change_hands_are_bound_by_that() {
    let idle = said(|s| {
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
    assert_said(Cause::HandOver, "A larger `batch_size`", idle);
}

#[test]
fn copies_and_the_planner_are_named_when_they_are_the_slowest() {
    let idle = |change: fn(&mut Snapshot)| {
        said(move |s| {
            s.decode.busy_ns = 12_000_000_000;
            s.decode.cpu_ns = None;
            s.storage.busy_ns = 3_000_000_000;
            change(s);
        })
    };
    let copying = idle(|s| {
        let busy_ns = 9_500_000_000;
        let batches = 100;
        let buffers = 3;
        s.copy = Some(crate::meter::CopyStage {
            busy_ns,
            batches,
            buffers,
            ..Default::default()
        });
        let steps = 100;
        let starved_ns = 5_000_000_000;
        s.consumer.gpu = Some(on_gpu(steps, starved_ns));
    });
    assert_said(Cause::Copy, "(`finish`)", copying);
    let making = idle(|s| {
        let busy_ns = 1_000_000_000;
        let ops_ns = 9_500_000_000;
        let batches = 100;
        let buffers = 3;
        s.copy = Some(crate::meter::CopyStage {
            busy_ns,
            ops_ns,
            batches,
            buffers,
            ..Default::default()
        });
        s.consumer.gpu = Some(on_gpu(100, 5_000_000_000));
    });
    assert_said(Cause::Copy, "on the bus 10 % of the time", making.clone());
    assert_said(
        Cause::Copy,
        "operations on the device took 95 %",
        making.clone(),
    );
    assert_said(
        Cause::Copy,
        "Operations on the device (`finish`) take longer than the copies",
        making,
    );
    assert_said(
        Cause::Order,
        "The planner's thread was busy for 95 %",
        idle(|s| s.order.busy_ns = 9_500_000_000),
    );
}

#[test]
fn decode_that_is_mostly_map_batch_is_called_by_that_name() {
    let mapping = |ns| said(move |s| s.decode.map_batch_ns = ns);
    assert_said(
        Cause::MapBatch,
        "bound by `map_batch`",
        mapping(30_000_000_000),
    );
    assert_said(
        Cause::MapBatch,
        "Less work in `map_batch`",
        mapping(30_000_000_000),
    );
    let mut in_turn = decoding();
    in_turn.decode.map_batch_ns = 30_000_000_000;
    in_turn.decode.map_batch_in_turn = true;
    let advice = Verdict::of(&in_turn).advice;
    assert!(advice[0].text.contains("one thread at a time runs it"));
    assert!(advice.iter().all(|one| one.remedy != Remedy::Workers));
    assert_said(
        Cause::Decode,
        "`map_batch` took 25 % of the time that workers worked",
        mapping(9_900_000_000),
    );
}

#[test]
fn advice_names_a_setting_and_its_value_for_programs() {
    let advice = &Verdict::of(&decoding()).advice[0];
    assert_eq!(
        (advice.remedy, advice.setting.as_deref()),
        (Remedy::Workers, Some("workers"))
    );
    assert_eq!(advice.value, Some(Value::Count(8)));
    let predicted = advice.prediction.as_ref().unwrap();
    assert!(
        (1800.0..2000.0).contains(&predicted.items_per_s) && predicted.bound_by == Cause::Consumer
    );
}

#[test]
fn a_verdict_survives_json() {
    let mut verdict = Verdict::of(&decoding());
    let text = serde_json::to_string(&verdict).unwrap();
    assert!(
        text.contains(r#""cause":"decode""#) && text.contains(r#""strength":"strong""#),
        "{text}"
    );
    assert!(
        text.contains(
            r#""remedy":"workers","setting":"workers","value":8,"prediction":{"items_per_s":1899."#
        ),
        "{text}"
    );
    assert!(
        text.contains(r#""measure":"workers_busy","value":0.99,"unit":"share""#),
        "{text}"
    );
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
                let narrow =
                    ["depth", "workers", "cores", "buffers"].contains(&key) || key == "count";
                *number = if narrow {
                    next() & u64::from(u32::MAX)
                } else {
                    next()
                }
                .into();
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
    let periods = if quota.is_some() { 100 } else { 0 };
    // The workers' time is all of the loaders'.
    let loaders_ns = s.decode.cpu_ns.unwrap_or(0);
    let throttled = throttled.unwrap_or(0);
    s.cpu = Some(Cpu {
        process_ns: ns(process),
        loaders_ns,
        quota,
        periods,
        throttled,
        ..Cpu::default()
    });
}

#[test]
fn the_taker_of_the_cores_is_the_cause() {
    // Four workers of four cores that work all the time, 39 s of it on a core.
    let crowded = |delay: f64, process: f64, quota: Option<(f64, u64)>| {
        said(move |s| {
            s.decode.cores = 4;
            s.decode.cpu_ns = Some((39.2e9 - 4e9 * delay) as u64);
            counted(s, delay, process, quota);
        })
    };
    let others = crowded(5.0, 20.0, None);
    let line =
        "threads were ready but had no core for 50 % of the time; the process had 2.0 of 4 cores";
    assert_said(Cause::OtherPrograms, line, others.clone());
    assert_said(
        Cause::OtherPrograms,
        "bound by other programs on the cores, starved 50.0 %",
        others.clone(),
    );
    for word in ["slots(", "Decode needs", "pictures"] {
        assert!(
            !others.1.contains(&format!("→ {word}")) && !others.1.contains("would give"),
            "{}",
            others.1
        );
    }
    assert_said(
        Cause::OwnThreads,
        "tensor library",
        crowded(5.0, 39.0, None),
    );
    let line = "The CPU quota of 1.5 cores was used up in 46 of 100 periods";
    assert_said(Cause::CpuQuota, line, crowded(5.0, 14.0, Some((1.5, 46))));
    // One worker of a quota of one and a half.
    let quota = said(|s| {
        s.decode.workers = 1;
        s.decode.cores = 1;
        s.decode.busy_ns = 9_900_000_000;
        s.decode.cpu_ns = Some(9_800_000_000);
        counted(s, 0.0, 10.0, Some((1.5, 0)));
    });
    assert_said(Cause::Decode, "`workers(2)` would give", quota);
    // The loader's own workers fill the cores; a quota that is never used up.
    assert_said(Cause::Decode, "bound by decode", crowded(0.5, 39.0, None));
    assert_said(Cause::Decode, "bound by decode", crowded(2.0, 39.5, None));
    assert_said(
        Cause::Decode,
        "bound by decode",
        crowded(0.5, 39.0, Some((8.0, 1))),
    );
    // The kernel also counts the others on these cores: threads that wait for each other blame
    // nobody else.
    for (others, cause) in [
        (15_000_000_000, Cause::OtherPrograms),
        (1_000_000_000, Cause::Decode),
    ] {
        let known = said(|s| {
            s.decode.cores = 4;
            s.decode.cpu_ns = Some(19_200_000_000);
            counted(s, 5.0, 20.0, None);
            s.cpu.as_mut().unwrap().others_ns = Some(others);
        });
        assert_said(cause, "bound by", known);
    }
    // Eight ranks that need what this one does.
    for (process, cause) in [(2.0, Cause::LocalRanks), (0.5, Cause::OtherPrograms)] {
        let ranks = said(|s| {
            s.decode.cores = 2;
            s.decode.cpu_ns = Some(400_000_000);
            counted(s, 5.0, process, None);
            let cpu = s.cpu.as_mut().unwrap();
            cpu.others_ns = Some(18_000_000_000);
            cpu.local_ranks = 8;
        });
        let line = if cause == Cause::LocalRanks {
            "The 8 ranks of this machine share 2 cores: `workers(1)` in each"
        } else {
            "Other programs take"
        };
        assert_said(cause, line, ranks);
    }
}

#[test]
fn threads_that_wait_for_a_core_are_neither_handing_over_nor_slots() {
    // Hardly any work, no room problem, and each thread waits for the scheduler.
    let idle = |delay: u64, batches: u64| {
        said(move |s| {
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
        })
    };
    assert_said(
        Cause::OtherPrograms,
        "Other programs take the cores",
        idle(6_000_000_000, 100),
    );
    // Batches of 100 ms are no hand-over, batches of 1 ms are.
    assert_said(
        Cause::Unknown,
        "for most of the time no stage was at work",
        idle(0, 100),
    );
    assert_said(Cause::HandOver, "A larger `batch_size`", idle(0, 10_000));
}

#[test]
fn bytes_from_memory_are_not_storage() {
    let reading = |device_bytes: Option<u64>, direct_bytes: u64| {
        said(move |s| {
            s.storage.busy_ns = 10_000_000_000;
            s.storage.in_flight_ns = 320_000_000_000;
            s.decode.busy_ns = 4_000_000_000;
            s.decode.cpu_ns = Some(4_000_000_000);
            s.storage.device_bytes = device_bytes;
            s.storage.direct_bytes = direct_bytes;
        })
    };
    assert_said(
        Cause::PageCache,
        "No device read these bytes",
        reading(Some(0), 0),
    );
    assert_said(
        Cause::PageCache,
        "bound by reads from memory",
        reading(Some(20_000_000), 0),
    );
    for (device, direct) in [
        (None, 0),
        (Some(1_100_000_000), 0),
        (Some(0), 1_100_000_000),
    ] {
        assert_said(Cause::Storage, "bound by storage", reading(device, direct));
    }
    let mount = said(|s| {
        s.storage.busy_ns = 10_000_000_000;
        s.storage.in_flight_ns = 320_000_000_000;
        s.decode.busy_ns = 4_000_000_000;
        s.decode.cpu_ns = Some(4_000_000_000);
        s.storage.device_bytes = Some(0);
        s.storage.reader = Some(on_mount());
    });
    assert_said(Cause::Storage, "bound by storage", mount);
}

#[test]
fn a_consumer_without_work_has_no_demand() {
    let measured = |effort: Effort, user_ns: u64| {
        said(move |s| {
            s.decode.effort = effort;
            (s.consumer.user_ns, s.consumer.waited_ns) = (user_ns, 10_000_000_000 - user_ns);
        })
    };
    let text = "as fast as it goes, limited by decode (strong evidence)";
    let fast = measured(Effort::Pictures, 20_000_000);
    assert_said(Cause::Decode, text, fast.clone());
    assert!(
        !fast.1.contains("needs") && fast.1.contains("`workers("),
        "{}",
        fast.1
    );
    // 0.2 ms for each batch, then 2 ms.
    assert_said(
        Cause::Decode,
        "limited by copies by the workers",
        measured(Effort::Copy, 20_000_000),
    );
    assert_said(
        Cause::Decode,
        "bound by copies by the workers",
        measured(Effort::Copy, 200_000_000),
    );
}

#[test]
fn advice_fits_the_work() {
    let advice = |effort: Effort, sample_bytes: u64| {
        let (_, text) =
            said(move |s| (s.decode.effort, s.consumer.bytes) = (effort, 10_000 * sample_bytes));
        text
    };
    let table = [
        (Effort::Pictures, 100_000, "seek points"),
        (Effort::Own, 100_000, "decoders and transforms"),
        (
            Effort::Light,
            100_000,
            "Fewer bytes for each sample of 100 kB",
        ),
        (
            Effort::Copy,
            64,
            "At 64 bytes per sample, the fixed cost exceeds the cost of the bytes",
        ),
    ];
    for (effort, bytes, part) in table {
        let text = advice(effort, bytes);
        assert!(text.contains(part), "{effort:?}, {part}: {text}");
        assert_eq!(
            text.contains("seek points"),
            effort == Effort::Pictures,
            "{text}"
        );
    }
}
