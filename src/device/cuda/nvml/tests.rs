//! Against the stand-in of tests/standin/nvml.rs; and against the real library where `$FEEDLINE_NVML_REAL` is the bus id of
//! a GPU.

use super::api::NAMES;
use super::*;
use standin::{StandIn, Value};

#[path = "../../../../tests/common/nvml.rs"]
mod standin;

const PLACE: [u32; 3] = [0, 0x3b, 0];
const ID: &str = "0000:3B:00.0";

/// A Hopper GPU that is busy and well, and what it is expected to say.
fn healthy(nvml: &StandIn) -> GpuState {
    let gpu = nvml.gpu(PLACE, "NVIDIA H200");
    for (what, value) in [
        (Value::Utilisation, 87),
        (Value::MemoryUtilisation, 41),
        (Value::Memory, 150_754_820_096),
        (Value::MemoryUsed, 12_300_000_000),
        (Value::MemoryReserved, 600_000_000),
        (Value::Generation, 5),
        (Value::GenerationSlot, 5),
        (Value::GenerationCard, 6),
        (Value::Width, 16),
        (Value::WidthMax, 16),
        (Value::TxKbS, 1000),
        (Value::RxKbS, 2000),
        (Value::Replays, 3),
        (Value::SmClock, 1410),
        (Value::MemoryClock, 3201),
        (Value::SmClockMax, 1980),
        (Value::MemoryClockMax, 3202),
        (Value::Reasons, 0x4),
        (Value::Temperature, 61),
        (Value::PowerMilliwatts, 512_500),
        (Value::PowerLimitMilliwatts, 700_000),
        (Value::Ecc, 1),
        (Value::EccPending, 0),
        (Value::EccCorrected, 1 << 40),
        (Value::EccUncorrected, 0),
        (Value::Mig, 0),
        (Value::MigPending, 1),
        (Value::Gpm, 1),
    ] {
        nvml.set(gpu, what, value);
    }
    for (id, value) in [(1, 80.5), (2, 71.0), (3, 42.0), (5, 12.0), (10, 33.0), (20, 2.0), (21, 1024.0)] {
        nvml.metric(id, value, 0);
    }
    GpuState {
        pci_bus_id: "00000000:3b:00.0".into(),
        name: Some("NVIDIA H200".into()),
        driver: Some("580.65.06".into()),
        utilisation_pct: Some(87),
        memory_utilisation_pct: Some(41),
        memory_used: Some(12_300_000_000),
        memory_total: Some(150_754_820_096),
        pcie: Pcie {
            gen_now: Some(5),
            gen_max: Some(6),
            gen_max_system: Some(5),
            width_now: Some(16),
            width_max: Some(16),
            tx_kb_s: Some(1000),
            rx_kb_s: Some(2000),
            replays: Some(3),
        },
        clocks: Clocks {
            sm_mhz: Some(1410),
            memory_mhz: Some(3201),
            sm_max_mhz: Some(1980),
            memory_max_mhz: Some(3202),
        },
        throttle_reasons: Some(vec![ThrottleReason::PowerCap]),
        temperature_c: Some(61),
        power_w: Some(512.5),
        power_limit_w: Some(700.0),
        gpm: Some(Gpm {
            over_s: 0.0,
            graphics_util_pct: Some(80.5),
            sm_util_pct: Some(71.0),
            sm_occupancy_pct: Some(42.0),
            tensor_util_pct: Some(12.0),
            memory_bandwidth_pct: Some(33.0),
            pcie_tx_bytes_s: Some(2.0 * 1048576.0),
            pcie_rx_bytes_s: Some(1024.0 * 1048576.0),
        }),
        ecc: Ecc { enabled: Some(true), corrected: Some(1 << 40), uncorrected: Some(0) },
        mig: Some(false),
        unknown: vec![],
    }
}

fn open(nvml: &StandIn, id: &str) -> Result<Watch, Unavailable> {
    let mut watch = Watch::open_with(Some(nvml.path()), id)?;
    // The stand-in's counters are always new.
    watch.gpm_least = Duration::ZERO;
    Ok(watch)
}

/// Without the time that passed between two samples.
fn state(watch: &mut Watch) -> GpuState {
    let mut state = watch.state();
    if let Some(gpm) = &mut state.gpm {
        assert!(gpm.over_s >= 0.0);
        gpm.over_s = 0.0;
    }
    state
}

/// Nothing is left over, and nothing was done that a correct caller does not do.
fn is_tidy(nvml: &StandIn) {
    assert_eq!((nvml.users(), nvml.samples(), nvml.violations()), (0, 0, vec![]));
}

#[test]
fn every_value_arrives_where_it_belongs() {
    let nvml = StandIn::new();
    let expected = healthy(&nvml);
    let mut watch = open(&nvml, ID).unwrap();
    assert_eq!((nvml.users(), nvml.samples()), (1, 1));
    for _ in 0..3 {
        assert_eq!(state(&mut watch), expected);
    }
    assert_eq!(nvml.samples(), 1);
    drop(watch);
    is_tidy(&nvml);
}

#[test]
fn every_function_may_be_missing_and_only_its_own_number_is_then_unknown() {
    for name in NAMES {
        let nvml = StandIn::without(&[name]);
        let expected = healthy(&nvml);
        let mut watch = match open(&nvml, ID) {
            Err(Unavailable::Refused(Unknown::Missing { call })) => {
                assert!(matches!(*name, "nvmlInit_v2" | "nvmlDeviceGetHandleByPciBusId_v2"), "{name}");
                assert_eq!(call, *name);
                continue;
            }
            watch => watch.unwrap(),
        };
        let state = state(&mut watch);
        // Those that have an older or newer one beside them, and the one that is not asked for a number.
        let spare = matches!(
            *name,
            "nvmlDeviceGetMemoryInfo_v2"
                | "nvmlDeviceGetMemoryInfo"
                | "nvmlDeviceGetCurrentClocksEventReasons"
                | "nvmlDeviceGetCurrentClocksThrottleReasons"
                | "nvmlDeviceGetTemperatureV"
                | "nvmlDeviceGetTemperature"
                | "nvmlShutdown"
        );
        if spare {
            // The older one counts what the driver keeps as used, too.
            let used = if *name == "nvmlDeviceGetMemoryInfo_v2" { 12_900_000_000 } else { 12_300_000_000 };
            assert_eq!(state, GpuState { memory_used: Some(used), ..expected }, "{name}");
        } else {
            let missing = Unknown::Missing { call: name.to_string() };
            assert!(!state.unknown.is_empty() && state.unknown.iter().all(|unknown| *unknown == missing), "{state:?}");
            assert_eq!(known(&state) + lost_with(name), known(&expected), "{name}: {state:?}");
        }
        drop(watch);
        if *name != "nvmlShutdown" {
            is_tidy(&nvml);
        }
    }
}

/// Numbers that are there.
fn known(state: &GpuState) -> usize {
    serde_json::to_value(state).map_or(0, |value| count(&value))
}

fn count(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::Object(fields) => {
            fields.iter().filter(|(name, _)| *name != "unknown").map(|(_, value)| count(value)).sum()
        }
        serde_json::Value::Null => 0,
        _ => 1,
    }
}

/// Numbers that only this function tells.
fn lost_with(name: &str) -> usize {
    match name {
        "nvmlDeviceGetUtilizationRates"
        | "nvmlDeviceGetPcieThroughput"
        | "nvmlDeviceGetClockInfo"
        | "nvmlDeviceGetMaxClockInfo"
        | "nvmlDeviceGetTotalEccErrors" => 2,
        name if name.starts_with("nvmlGpm") => 8,
        _ => 1,
    }
}

#[test]
fn every_error_of_every_function_leaves_its_number_unknown_with_the_code() {
    let nvml = StandIn::new();
    let expected = healthy(&nvml);
    let codes = (1..=30).chain([999, 31, -1, i32::MAX]);
    for code in codes {
        for name in NAMES {
            nvml.fail(name, code);
            match open(&nvml, ID) {
                Err(unavailable) => {
                    assert!(matches!(*name, "nvmlInit_v2" | "nvmlDeviceGetHandleByPciBusId_v2"), "{name}");
                    let refused = Unknown::Refused { call: name.to_string(), code };
                    assert_eq!(unavailable, Unavailable::Refused(refused));
                }
                Ok(mut watch) => {
                    let state = state(&mut watch);
                    let own = |unknown: &Unknown| *unknown == Unknown::Refused { call: name.to_string(), code };
                    assert!(state.unknown.iter().all(own), "{name} {code}: {state:?}");
                    // A GPU that cannot be cut up is not: the one answer that is no error.
                    let answered = state.unknown.is_empty();
                    let spare = ["MemoryInfo", "ClocksEvent", "ClocksThrottle", "GetTemperature", "Free", "Shutdown"];
                    let spare = spare.iter().any(|part| name.contains(part)) || (name.contains("Mig") && code == 3);
                    assert_eq!(answered, spare, "{name} {code}: {state:?}");
                    if !answered {
                        assert_eq!(known(&state) + lost_with(name), known(&expected), "{name} {code}: {state:?}");
                    }
                    assert!(state.to_string().starts_with("gpu  "));
                }
            }
            nvml.fail(name, 0);
            is_tidy(&nvml);
        }
    }
}

#[test]
fn where_nothing_answers_all_is_unknown_and_nothing_panics() {
    let nvml = StandIn::new();
    healthy(&nvml);
    let mut watch = open(&nvml, ID).unwrap();
    NAMES.iter().for_each(|name| nvml.fail(name, 15));
    let state = state(&mut watch);
    assert_eq!(known(&state), 1, "{state:?}");
    assert_eq!(state.warnings(), ["the GPU is out of order: the GPU has fallen off the bus"]);
    NAMES.iter().for_each(|name| nvml.fail(name, 0));
    assert!(watch.state().unknown.is_empty());
}

#[test]
fn where_both_of_two_functions_fail_the_newer_one_is_named_unless_it_is_missing() {
    let (newer, older) = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo");
    let unknown = |nvml: &StandIn| state(&mut open(nvml, ID).unwrap()).unknown;
    let nvml = StandIn::new();
    healthy(&nvml);
    nvml.fail(newer, 25);
    nvml.fail(older, 4);
    assert_eq!(unknown(&nvml), [Unknown::Refused { call: newer.into(), code: 25 }]);
    let nvml = StandIn::without(&[newer]);
    healthy(&nvml);
    nvml.fail(older, 4);
    assert_eq!(unknown(&nvml), [Unknown::Refused { call: older.into(), code: 4 }]);
    let nvml = StandIn::without(&[newer, older]);
    healthy(&nvml);
    assert_eq!(unknown(&nvml), [Unknown::Missing { call: older.into() }]);
}

#[test]
fn a_gpu_below_zero_is_told_by_the_newer_function_only() {
    for (missing, expected) in [(&[][..], Some(-5)), (&["nvmlDeviceGetTemperatureV"][..], None)] {
        let nvml = StandIn::without(missing);
        healthy(&nvml);
        nvml.set(0, Value::Temperature, -5);
        assert_eq!(open(&nvml, ID).unwrap().state().temperature_c, expected);
    }
}

#[test]
fn numbers_that_mean_none_are_unknown() {
    let nvml = StandIn::new();
    healthy(&nvml);
    for (what, value) in [
        (Value::Utilisation, 101),
        (Value::Generation, 0xffff_ffff),
        (Value::RxKbS, 0xffff_ffff),
        (Value::PowerMilliwatts, 0xffff_ffff),
        (Value::EccCorrected, -1),
        (Value::Ecc, 0xffff_ffff),
        // More in use than there is.
        (Value::MemoryUsed, 1 << 50),
    ] {
        nvml.set(0, what, value);
    }
    nvml.metric(2, f64::NAN, 0);
    nvml.metric(3, -1.0, 0);
    nvml.metric(5, 50.0, 3);
    let state = state(&mut open(&nvml, ID).unwrap());
    let gpm = state.gpm.as_ref().unwrap();
    assert_eq!((gpm.sm_util_pct, gpm.sm_occupancy_pct, gpm.tensor_util_pct), (None, None, None));
    assert_eq!((gpm.graphics_util_pct, state.utilisation_pct, state.memory_used), (Some(80.5), None, None));
    assert_eq!((state.pcie.gen_now, state.pcie.rx_kb_s, state.power_w), (None, None, None));
    assert_eq!((state.ecc.corrected, state.ecc.enabled, state.unknown.len()), (None, None, 7));
    is_tidy(&nvml);
}

#[test]
fn a_gpu_that_is_cut_up_says_so_and_its_busy_counters_are_unknown() {
    let nvml = StandIn::new();
    healthy(&nvml);
    nvml.set(0, Value::Mig, 1);
    let state = state(&mut open(&nvml, ID).unwrap());
    assert_eq!((state.mig, state.utilisation_pct, &state.gpm), (Some(true), None, &None));
    assert!(state.memory_total.is_some() && state.to_string().contains("(MIG)"), "{state}");
    let calls = ["nvmlDeviceGetUtilizationRates", "nvmlGpmSampleGet"];
    let refused = |call: &str| Unknown::Refused { call: call.into(), code: 3 };
    assert!(calls.iter().all(|call| state.unknown.contains(&refused(call))) && state.unknown.len() == 2, "{state:?}");
    is_tidy(&nvml);
}

#[test]
fn a_gpu_before_hopper_has_no_gpm_and_before_ampere_no_mig() {
    let nvml = StandIn::new();
    healthy(&nvml);
    nvml.set(0, Value::Gpm, 0);
    nvml.set(0, Value::Mig, i64::MIN);
    let state = state(&mut open(&nvml, ID).unwrap());
    assert_eq!((state.mig, &state.gpm), (Some(false), &None));
    assert_eq!(state.unknown, [Unknown::Refused { call: "nvmlGpmQueryDeviceSupport".into(), code: 3 }]);
    is_tidy(&nvml);
}

#[test]
fn a_sample_right_after_another_is_not_compared_with_it() {
    let nvml = StandIn::new();
    healthy(&nvml);
    let mut watch = open(&nvml, ID).unwrap();
    watch.gpm_least = Duration::from_secs(86_400);
    let state = watch.state();
    assert_eq!((&state.gpm, state.unknown.len()), (&None, 1));
    assert!(state.to_string().contains("too soon"), "{state}");
    // The one it was opened with is kept for the next time.
    watch.gpm_least = Duration::ZERO;
    assert!(watch.state().gpm.is_some());
}

#[test]
fn of_two_gpus_the_one_at_the_bus_id_is_looked_at() {
    let nvml = StandIn::new();
    for place in [[0, 0x3b, 0], [0, 0x3c, 0], [1, 0x3b, 0], [0x10de_0001, 0x3b, 0x1f]] {
        nvml.gpu(place, &format!("{place:?}"));
    }
    let table = [
        ("0000:3b:00.0", [0, 0x3b, 0]),
        ("00000000:3B:00.0", [0, 0x3b, 0]),
        ("0000:3C:00.0", [0, 0x3c, 0]),
        ("0001:3b:00.0", [1, 0x3b, 0]),
        ("00000001:3b:00.0", [1, 0x3b, 0]),
        ("10DE0001:3B:1F.0", [0x10de_0001, 0x3b, 0x1f]),
    ];
    for (id, place) in table {
        assert_eq!(open(&nvml, id).unwrap().state().name, Some(format!("{place:?}")), "{id}");
    }
    let absent = open(&nvml, "0002:3b:00.0").unwrap_err();
    assert!(matches!(&absent, Unavailable::Refused(Unknown::Refused { code: 6, .. })), "{absent}");
    let before = nvml.calls();
    assert_eq!(open(&nvml, "MIG-1").unwrap_err(), Unavailable::NoBusId("MIG-1".into()));
    assert_eq!(nvml.calls(), before);
    is_tidy(&nvml);
}

#[test]
fn several_watches_share_the_library_and_the_last_one_ends_it() {
    let nvml = StandIn::new();
    healthy(&nvml);
    let watches: Vec<_> = (0..3).map(|_| open(&nvml, ID).unwrap()).collect();
    assert_eq!(nvml.users(), 3);
    std::thread::scope(|scope| {
        watches.into_iter().for_each(|mut watch| {
            scope.spawn(move || assert!(watch.state().unknown.is_empty()));
        });
    });
    is_tidy(&nvml);
}

#[test]
fn a_driver_that_does_not_fit_the_library_is_named_and_what_to_do() {
    let nvml = StandIn::new();
    for (code, words) in [(18, "restart the machine"), (9, "kernel module"), (4, "/dev/nvidiactl")] {
        nvml.fail("nvmlInit_v2", code);
        let unavailable = open(&nvml, ID).unwrap_err().to_string();
        assert!(unavailable.contains(&format!("({code})")) && unavailable.contains(words), "{unavailable}");
    }
    is_tidy(&nvml);
}

#[test]
fn a_library_that_is_not_there_or_is_none_is_said_with_the_linkers_words() {
    let table = [("/nowhere/libnvidia-ml.so.1", "/nowhere"), (file!(), ".rs"), ("/", "/")];
    for (path, words) in table {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let absent = Watch::open_with(Some(&path), ID).unwrap_err();
        assert!(matches!(&absent, Unavailable::NoLibrary(tried) if tried.len() == 1), "{absent}");
        assert!(absent.to_string().contains(words), "{absent}");
    }
    let host = Watch::of(&Device::host()).unwrap_err();
    assert!(matches!(host, Unavailable::NoBusId(_)), "{host}");
}

#[test]
fn a_name_that_does_not_fit_is_unknown() {
    let nvml = StandIn::new();
    nvml.gpu(PLACE, &"x".repeat(200));
    nvml.driver(&"9".repeat(100));
    let state = open(&nvml, ID).unwrap().state();
    assert_eq!((state.name, state.driver), (None, None));
}

#[test]
fn the_real_library_answers_for_a_real_gpu() {
    let Ok(id) = std::env::var("FEEDLINE_NVML_REAL") else {
        println!("skipped: FEEDLINE_NVML_REAL names no GPU");
        return;
    };
    let mut watch = Watch::open(&id).unwrap();
    std::thread::sleep(GPM_LEAST);
    let state = watch.state();
    println!("{state}");
    assert!(state.name.is_some() && state.memory_total.is_some(), "{state:?}");
}
