//! NVML's state of the GPU during the run: link, clocks, utilisation, memory errors. It covers all processes on that
//! GPU.
//!
//! ```text
//! Watch::start ─► thread: open the library, find the GPU by its PCI bus id, look once a second ─► Watch::end: the last look
//! ```
//!
//! All of it is optional: a missing number is unknown, with the reason. The last reading during the run counts, because
//! clocks and link slow down on an idle GPU. A reading takes some 50 ms: each counter of the link takes 20 ms.

use feedline::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::{Device as Gpu, Nvml};
use serde::Serialize;
use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between readings.
const PERIOD: Duration = Duration::from_secs(1);
/// Update interval of the GPU's counters: closer samples are meaningless.
const GPM_LEAST: Duration = Duration::from_millis(100);
/// Traffic in KB/s above which the link runs at full speed: an idle link is slow to save power.
const FLOWS_KB_S: u32 = 50_000;
/// GB/s of one lane in one direction, after the line code, per generation from 1.
const LANE_GB_S: [f64; 7] = [0.25, 0.5, 0.985, 1.969, 3.938, 7.563, 15.125];

/// Reads a GPU's state until stopped.
pub struct Watch {
    over: Arc<AtomicBool>,
    thread: Result<JoinHandle<Result<GpuState, String>>, String>,
}

impl Watch {
    /// `None` for the host. `FEEDLINE_NVML` names a library other than the driver's.
    pub fn start(device: &Device) -> Option<Self> {
        let bus_id = device.pci_bus_id()?.to_string();
        let over = Arc::new(AtomicBool::new(false));
        let ended = over.clone();
        let look = move || {
            let named = std::env::var_os("FEEDLINE_NVML").filter(|path| !path.is_empty());
            let nvml = open(named.as_deref()).map_err(|error| error.to_string())?;
            look(&nvml, &bus_id, &ended).map_err(|error| format!("GPU {bus_id}: {error}"))
        };
        let thread = std::thread::Builder::new().name("profile-nvml".into()).spawn(look);
        Some(Self { over, thread: thread.map_err(|error| error.to_string()) })
    }

    /// The last reading, as text and as data.
    pub fn end(self) -> (String, serde_json::Value) {
        self.over.store(true, Ordering::Release);
        let state = self.thread.and_then(|thread| {
            thread.thread().unpark();
            thread.join().unwrap_or_else(|_| Err("the thread that asked it panicked".into()))
        });
        match state {
            Ok(state) => (state.to_string(), serde_json::to_value(&state).unwrap_or_default()),
            Err(why) => (format!("gpu       NVML is unavailable: {why}"), why.into()),
        }
    }
}

/// The driver's library, or the one at this path.
fn open(path: Option<&OsStr>) -> Result<Nvml, NvmlError> {
    path.map_or_else(Nvml::init, |path| Nvml::builder().lib_path(path).init())
}

fn look(nvml: &Nvml, bus_id: &str, over: &AtomicBool) -> Result<GpuState, NvmlError> {
    let gpu = nvml.device_by_pci_bus_id(bus_id)?;
    let (mut sample, mut last) = (None, None);
    // The first sample has no predecessor.
    let _ = Gpm::since(&mut sample, nvml, &gpu);
    loop {
        if !over.load(Ordering::Acquire) {
            std::thread::park_timeout(PERIOD);
        }
        match last {
            Some(state) if over.load(Ordering::Acquire) => return Ok(state),
            _ => last = Some(GpuState::of(nvml, &gpu, bus_id, Gpm::since(&mut sample, nvml, &gpu))),
        }
    }
}

/// A GPU at one moment. Unknown values are `None`, and `unknown` has the reasons.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GpuState {
    pub pci_bus_id: String,
    pub name: Option<String>,
    pub driver: Option<String>,
    /// Percentage of the last sampling period (up to a second) with a running kernel, and with memory in use.
    pub utilisation_pct: Option<u32>,
    pub memory_utilisation_pct: Option<u32>,
    /// Bytes.
    pub memory_used: Option<u64>,
    pub memory_total: Option<u64>,
    pub pcie: Pcie,
    pub clocks: Clocks,
    /// Reasons for reduced clocks.
    pub throttle_reasons: Option<Vec<&'static str>>,
    pub temperature_c: Option<u32>,
    pub power_w: Option<f64>,
    pub power_limit_w: Option<f64>,
    pub gpm: Option<Gpm>,
    pub ecc: Ecc,
    /// The GPU is partitioned (MIG): most counters are unknown then, and memory covers all partitions.
    pub mig: Option<bool>,
    pub unknown: Vec<Unknown>,
}

/// The link between host and GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pcie {
    /// Present generation and lanes; lower on an idle link.
    pub gen_now: Option<u32>,
    pub width_now: Option<u32>,
    /// Maximum of the GPU in this slot.
    pub gen_max: Option<u32>,
    pub width_max: Option<u32>,
    /// KB/s from the GPU and to the GPU, over 20 ms.
    pub tx_kb_s: Option<u32>,
    pub rx_kb_s: Option<u32>,
    /// Packets repeated since the driver was loaded: a sign of a bad contact.
    pub replays: Option<u32>,
}

/// MHz of the multiprocessors and of the memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Clocks {
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub sm_max_mhz: Option<u32>,
    pub memory_max_mhz: Option<u32>,
}

/// Errors of the GPU's memory since the driver was loaded.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Ecc {
    pub enabled: Option<bool>,
    pub corrected: Option<u64>,
    pub uncorrected: Option<u64>,
}

/// Busy shares of the GPU between two readings, by its own counters: Hopper and newer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Gpm {
    pub over_s: f64,
    pub graphics_util_pct: Option<f64>,
    pub sm_util_pct: Option<f64>,
    pub sm_occupancy_pct: Option<f64>,
    pub tensor_util_pct: Option<f64>,
    pub memory_bandwidth_pct: Option<f64>,
    pub pcie_tx_bytes_s: Option<f64>,
    pub pcie_rx_bytes_s: Option<f64>,
}

/// An unknown number.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unknown {
    pub what: &'static str,
    pub why: String,
}

impl Gpm {
    /// Since the sample `before`, which this replaces.
    fn since<'a>(before: &mut Option<(GpmSample<'a>, Instant)>, nvml: &'a Nvml, gpu: &Gpu<'a>) -> Result<Self, String> {
        const METRICS: [GpmMetricId; 7] = [
            GpmMetricId::GraphicsUtil,
            GpmMetricId::SmUtil,
            GpmMetricId::SmOccupancy,
            GpmMetricId::AnyTensorUtil,
            GpmMetricId::DramBwUtil,
            GpmMetricId::PcieTxPerSec,
            GpmMetricId::PcieRxPerSec,
        ];
        let text = |error: NvmlError| error.to_string();
        let now = gpu.gpm_sample().map_err(text)?;
        let (sample, at) = before.take().unzip();
        let values = match (&sample, at.map(|at| at.elapsed())) {
            (Some(sample), Some(over)) if over >= GPM_LEAST => {
                gpm_metrics_get(nvml, sample, &now, &METRICS).map(|values| (over, values)).map_err(text)
            }
            _ => Err("the run was too short for two samples".into()),
        };
        *before = Some((now, Instant::now()));
        let (over, values) = values?;
        let mut values = values.into_iter().map(|value| value.ok().map(|metric| metric.value));
        let mut next = || values.next().flatten().filter(|value| value.is_finite() && *value >= 0.0);
        // The link's counters are in MiB/s.
        const MIB: f64 = (1 << 20) as f64;
        Ok(Self {
            over_s: over.as_secs_f64(),
            graphics_util_pct: next(),
            sm_util_pct: next(),
            sm_occupancy_pct: next(),
            tensor_util_pct: next(),
            memory_bandwidth_pct: next(),
            pcie_tx_bytes_s: next().map(|mib| mib * MIB),
            pcie_rx_bytes_s: next().map(|mib| mib * MIB),
        })
    }
}

/// Names of throttle reasons, and whether each slows a busy GPU unintentionally.
const REASONS: [(ThrottleReasons, &str, bool); 9] = [
    (ThrottleReasons::GPU_IDLE, "idle", false),
    (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "set by the user", false),
    (ThrottleReasons::SW_POWER_CAP, "the power limit", true),
    (ThrottleReasons::HW_SLOWDOWN, "the hardware's emergency brake", true),
    (ThrottleReasons::SYNC_BOOST, "another GPU of its group", true),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "heat", true),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat (by the hardware)", true),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "the power supply", true),
    (ThrottleReasons::DISPLAY_CLOCK_SETTING, "the display", false),
];

fn reasons(bits: ThrottleReasons) -> Vec<&'static str> {
    REASONS.iter().filter(|(reason, ..)| bits.contains(*reason)).map(|(_, words, _)| *words).collect()
}

impl GpuState {
    fn of(nvml: &Nvml, gpu: &Gpu<'_>, bus_id: &str, gpm: Result<Gpm, String>) -> Self {
        let mut state = Self { pci_bus_id: bus_id.into(), ..Self::default() };
        let mut unknown = Vec::new();
        let mut asked = Asked(&mut unknown);
        // The generation is read between the two counters, under traffic.
        state.pcie.rx_kb_s = asked.of("PCIe to the GPU", gpu.pcie_throughput(PcieUtilCounter::Receive));
        state.pcie.gen_now = asked.of("PCIe generation", gpu.current_pcie_link_gen());
        state.pcie.width_now = asked.of("PCIe lanes", gpu.current_pcie_link_width());
        state.pcie.tx_kb_s = asked.of("PCIe from the GPU", gpu.pcie_throughput(PcieUtilCounter::Send));
        state.pcie.gen_max = asked.of("best PCIe generation", gpu.max_pcie_link_gen());
        state.pcie.width_max = asked.of("most PCIe lanes", gpu.max_pcie_link_width());
        state.pcie.replays = asked.of("PCIe replays", gpu.pcie_replay_counter());
        state.clocks.sm_mhz = asked.of("SM clock", gpu.clock_info(Clock::SM));
        state.clocks.memory_mhz = asked.of("memory clock", gpu.clock_info(Clock::Memory));
        state.clocks.sm_max_mhz = asked.of("highest SM clock", gpu.max_clock_info(Clock::SM));
        state.clocks.memory_max_mhz = asked.of("highest memory clock", gpu.max_clock_info(Clock::Memory));
        let utilisation = asked.of("utilisation", gpu.utilization_rates());
        (state.utilisation_pct, state.memory_utilisation_pct) = utilisation.map(|both| (both.gpu, both.memory)).unzip();
        let memory = asked.of("memory", gpu.memory_info());
        (state.memory_used, state.memory_total) = memory.map(|memory| (memory.used, memory.total)).unzip();
        state.name = asked.of("name", gpu.name());
        state.driver = asked.of("driver version", nvml.sys_driver_version());
        state.throttle_reasons = asked.of("throttle reasons", gpu.current_throttle_reasons()).map(reasons);
        state.temperature_c = asked.of("temperature", gpu.temperature(TemperatureSensor::Gpu));
        state.power_w = asked.of("power", gpu.power_usage()).map(watts);
        state.power_limit_w = asked.of("power limit", gpu.enforced_power_limit()).map(watts);
        let errors = |kind| gpu.total_ecc_errors(kind, EccCounter::Volatile);
        state.ecc.enabled = asked.of("ECC", gpu.is_ecc_enabled()).map(|mode| mode.currently_enabled);
        state.ecc.corrected = asked.of("ECC errors", errors(MemoryError::Corrected));
        state.ecc.uncorrected = asked.of("ECC errors not corrected", errors(MemoryError::Uncorrected));
        state.mig = match gpu.mig_mode() {
            Err(NvmlError::NotSupported) => Some(false),
            mode => asked.of("MIG", mode).map(|mode| mode.current == 1),
        };
        state.gpm = asked.of("counters", gpm);
        Self { unknown, ..state }
    }

    /// Problems, one line each. Unknown values give none.
    pub fn warnings(&self) -> Vec<String> {
        let errors = self.ecc.uncorrected.filter(|count| *count > 0);
        let errors = errors.map(|count| format!("{count} uncorrected memory errors"));
        [self.pcie.complaint(), self.throttled(), errors].into_iter().flatten().collect()
    }

    fn throttled(&self) -> Option<String> {
        let slows = |words: &&&str| REASONS.iter().any(|(_, reason, slows)| reason == *words && *slows);
        let reasons: Vec<&str> = self.throttle_reasons.as_ref()?.iter().filter(slows).copied().collect();
        let clocks = ratio("SM", self.clocks.sm_mhz, self.clocks.sm_max_mhz, "MHz").map(|clocks| format!(": {clocks}"));
        let words = || format!("the clocks are reduced by {}{}", reasons.join(", "), clocks.unwrap_or_default());
        (!reasons.is_empty()).then(words)
    }

    fn busy(&self) -> Option<String> {
        let used = self.memory_used.zip(self.memory_total);
        joined([
            self.utilisation_pct.map(|pct| format!("{pct} % of the time")),
            self.memory_utilisation_pct.map(|pct| format!("its memory {pct} %")),
            used.map(|(used, total)| format!("{:.1} of {:.1} GB used", used as f64 / 1e9, total as f64 / 1e9)),
        ])
    }

    fn link(&self) -> Option<String> {
        let pcie = &self.pcie;
        let link = |generation: Option<u32>, width: Option<u32>| Some(format!("{} x{}", generation?, width?));
        let (now, best) = (link(pcie.gen_now, pcie.width_now), link(pcie.gen_max, pcie.width_max));
        let gb_s = |kb_s: u32| f64::from(kb_s) / 1e6;
        joined([
            now.map(|now| best.map_or(now.clone(), |best| format!("{now} of {best}"))),
            pcie.rx_kb_s.map(|kb_s| format!("to the GPU {:.2} GB/s", gb_s(kb_s))),
            pcie.tx_kb_s.map(|kb_s| format!("from it {:.2} GB/s", gb_s(kb_s))),
            pcie.replays.filter(|count| *count > 0).map(|count| format!("{count} packets repeated")),
        ])
    }

    fn pace(&self) -> Option<String> {
        let clocks = &self.clocks;
        joined([
            ratio("SM", clocks.sm_mhz, clocks.sm_max_mhz, "MHz"),
            ratio("memory", clocks.memory_mhz, clocks.memory_max_mhz, "MHz"),
            ratio("", self.power_w.map(f64::round), self.power_limit_w.map(f64::round), "W"),
            self.temperature_c.map(|celsius| format!("{celsius} °C")),
        ])
    }

    fn counters(&self) -> Option<String> {
        let gpm = self.gpm.as_ref()?;
        let percent = |what: &str, value: Option<f64>| value.map(|value| format!("{what} {value:.0} %"));
        let gb_s = |what: &str, value: Option<f64>| value.map(|bytes| format!("{what} {:.2} GB/s", bytes / 1e9));
        let values = joined([
            percent("active", gpm.graphics_util_pct),
            percent("SMs", gpm.sm_util_pct),
            percent("occupancy", gpm.sm_occupancy_pct),
            percent("tensor cores", gpm.tensor_util_pct),
            percent("memory bandwidth", gpm.memory_bandwidth_pct),
            gb_s("to the GPU", gpm.pcie_rx_bytes_s),
            gb_s("from it", gpm.pcie_tx_bytes_s),
        ]);
        values.map(|values| format!("{values} (over {:.1} s)", gpm.over_s))
    }

    /// Groups unknown numbers by reason.
    fn untold(&self) -> Option<String> {
        let mut reasons: Vec<&str> = self.unknown.iter().map(|unknown| unknown.why.as_str()).collect();
        let line = |why: &str| {
            let names = self.unknown.iter().filter(|unknown| unknown.why == why).map(|unknown| unknown.what);
            format!("{}: {why}", names.collect::<Vec<_>>().join(", "))
        };
        reasons.sort_unstable();
        reasons.dedup();
        (!reasons.is_empty()).then(|| reasons.into_iter().map(line).collect::<Vec<_>>().join("; "))
    }
}

impl Pcie {
    /// A problem of the link, if it carries data and all numbers are known.
    fn complaint(&self) -> Option<String> {
        let (now, lanes, best, lanes_best) = (self.gen_now?, self.width_now?, self.gen_max?, self.width_max?);
        let flows = self.rx_kb_s.max(self.tx_kb_s).is_some_and(|kb_s| kb_s >= FLOWS_KB_S);
        let lane = LANE_GB_S.get((now as usize).checked_sub(1)?)?;
        let limit = Some(lane * f64::from(lanes)).filter(|limit| *limit > 0.0)?;
        let complaint = || format!("PCIe {now} x{lanes} of {best} x{lanes_best}: copies at most {limit:.1} GB/s");
        (flows && (now < best || lanes < lanes_best)).then(complaint)
    }
}

/// Collects the reasons of unknown numbers.
struct Asked<'a>(&'a mut Vec<Unknown>);

impl Asked<'_> {
    fn of<T, E: ToString>(&mut self, what: &'static str, answer: Result<T, E>) -> Option<T> {
        answer.map_err(|error| self.0.push(Unknown { what, why: error.to_string() })).ok()
    }
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1000.0
}

/// Joins the present texts with commas.
fn joined<const N: usize>(words: [Option<String>; N]) -> Option<String> {
    let words: Vec<_> = words.into_iter().flatten().collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// "SM 1410 of 1980 MHz".
fn ratio<T: fmt::Display>(what: &str, now: Option<T>, most: Option<T>, unit: &str) -> Option<String> {
    let words = match (now?, most) {
        (now, Some(most)) => format!("{what} {now} of {most} {unit}"),
        (now, None) => format!("{what} {now} {unit}"),
    };
    Some(words.trim_start().to_string())
}

impl fmt::Display for GpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu       {}, PCI {}", self.name.as_deref().unwrap_or("unnamed"), self.pci_bus_id)?;
        if let Some(driver) = &self.driver {
            write!(f, ", driver {driver}")?;
        }
        if self.mig == Some(true) {
            write!(f, ", partitioned (MIG): numbers cover all partitions")?;
        }
        let lines = [
            ("busy", self.busy()),
            ("pcie", self.link()),
            ("clocks", self.pace()),
            ("counters", self.counters()),
            ("unknown", self.untold()),
        ];
        for (label, line) in lines.into_iter().filter_map(|(label, line)| Some((label, line?))) {
            write!(f, "\n{label:<9} {line}")?;
        }
        self.warnings().iter().try_for_each(|warning| write!(f, "\nwarning   {warning}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use std::process::Command;

    fn link(now: (u32, u32), best: (u32, u32)) -> GpuState {
        let pcie = Pcie {
            gen_now: Some(now.0),
            width_now: Some(now.1),
            gen_max: Some(best.0),
            width_max: Some(best.1),
            rx_kb_s: Some(5_000_000),
            ..Pcie::default()
        };
        GpuState { pcie, ..GpuState::default() }
    }

    #[test]
    fn a_slow_link_is_a_warning() {
        for (now, best, expected) in [
            ((3, 8), (5, 16), Some("PCIe 3 x8 of 5 x16: copies at most 7.9 GB/s")),
            ((5, 8), (5, 16), Some("PCIe 5 x8 of 5 x16: copies at most 31.5 GB/s")),
            ((5, 16), (5, 16), None),
            // An unknown generation or lane count gives no warning.
            ((0, 16), (5, 16), None),
            ((9, 8), (9, 16), None),
            ((3, 0), (5, 16), None),
        ] {
            let mut state = link(now, best);
            assert_eq!(state.warnings().first().map(String::as_str), expected, "{now:?} of {best:?}");
            state.pcie.rx_kb_s = Some(FLOWS_KB_S - 1);
            assert!(state.warnings().is_empty(), "an idle link is slow to save power");
        }
    }

    #[test]
    fn only_unintended_throttling_is_a_warning() {
        let mut state = GpuState { throttle_reasons: Some(reasons(ThrottleReasons::all())), ..GpuState::default() };
        state.clocks = Clocks { sm_mhz: Some(1410), sm_max_mhz: Some(1980), ..Clocks::default() };
        let expected = "the clocks are reduced by the power limit, the hardware's emergency brake, another GPU of its group, \
                        heat, heat (by the hardware), the power supply: SM 1410 of 1980 MHz";
        assert_eq!(state.warnings(), [expected]);
        let harmless = ThrottleReasons::GPU_IDLE | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING;
        state.throttle_reasons = Some(reasons(harmless | ThrottleReasons::DISPLAY_CLOCK_SETTING));
        assert!(state.warnings().is_empty() && state.throttle_reasons.is_some_and(|reasons| reasons.len() == 3));
    }

    #[test]
    fn missing_functions_leave_numbers_unknown() {
        let folder = Folder::new();
        let library = folder.join("libnvml-stand-in.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/standin/nvml.rs");
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        let rustc = rustc.args(["--edition=2024", "--crate-type=cdylib", "-o"]).arg(&library).arg(source);
        assert!(rustc.status().unwrap().success(), "{rustc:?}");
        let nvml = open(Some(library.as_os_str())).unwrap();
        let state = look(&nvml, "0000:3b:00.0", &AtomicBool::new(true)).unwrap();
        let text = state.to_string();
        let known = "\
gpu       Stand-in 9000, PCI 0000:3b:00.0
busy      87 % of the time, its memory 41 %
pcie      3 x8 of 5 x16, to the GPU 5.00 GB/s, from it 0.01 GB/s
clocks    61 °C
unknown   ";
        assert!(text.starts_with(known), "{text}");
        assert!(text.contains("ECC: the requested operation is not available on the target device"), "{text}");
        assert!(text.contains("power: function symbol failed to load"), "{text}");
        assert!(text.ends_with("\nwarning   PCIe 3 x8 of 5 x16: copies at most 7.9 GB/s"), "{text}");
        let absent = look(&nvml, "0000:99:00.0", &AtomicBool::new(true)).unwrap_err();
        assert!(matches!(absent, NvmlError::NotFound), "{absent}");
    }

    #[test]
    fn a_missing_library_error_names_the_library() {
        let error = open(Some(OsStr::new("/no/such/libnvidia-ml.so"))).unwrap_err();
        assert!(error.to_string().contains("/no/such/libnvidia-ml.so"), "{error}");
    }
}
