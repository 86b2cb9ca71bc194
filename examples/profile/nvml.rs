//! NVML's state of the GPU during the run: link, clocks, utilisation, memory errors. It covers all
//! processes on that GPU.
//!
//! All of it is optional: a missing number is unknown, with the reason. The last reading during the
//! run counts, because clocks and link slow down on an idle GPU. A reading takes some 50 ms: each
//! counter of the link takes 20 ms.

use feedline::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, PcieUtilCounter, TemperatureSensor,
};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::{Device as Gpu, Nvml};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval between readings.
const PERIOD: Duration = Duration::from_secs(1);
/// Traffic in kB/s above which the link runs at full speed: an idle link is slow to save power.
const FLOWS_KB_S: f64 = 50_000.0;
/// GB/s of one lane in one direction, after the line code, per generation from 1.
const LANE_GB_S: [f64; 7] = [0.25, 0.5, 0.985, 1.969, 3.938, 7.563, 15.125];
/// The GPU's own counters between two readings: Hopper and newer.
const COUNTERS: [(GpmMetricId, &str); 5] = [
    (GpmMetricId::GraphicsUtil, "active_pct"),
    (GpmMetricId::SmUtil, "sm_pct"),
    (GpmMetricId::SmOccupancy, "occupancy_pct"),
    (GpmMetricId::AnyTensorUtil, "tensor_cores_pct"),
    (GpmMetricId::DramBwUtil, "memory_bandwidth_pct"),
];
/// Throttle reasons that slow a busy GPU unintentionally.
const REASONS: [(ThrottleReasons, &str); 6] = [
    (ThrottleReasons::SW_POWER_CAP, "the power limit"),
    (
        ThrottleReasons::HW_SLOWDOWN,
        "the hardware's emergency brake",
    ),
    (ThrottleReasons::SYNC_BOOST, "another GPU of its group"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "heat"),
    (
        ThrottleReasons::HW_THERMAL_SLOWDOWN,
        "heat (by the hardware)",
    ),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "the power supply"),
];

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
        let thread = std::thread::Builder::new()
            .name("profile-nvml".into())
            .spawn(move || {
                let named = std::env::var_os("FEEDLINE_NVML").filter(|path| !path.is_empty());
                let nvml = open(named.as_deref()).map_err(|error| error.to_string())?;
                look(&nvml, &bus_id, &ended).map_err(|error| format!("GPU {bus_id}: {error}"))
            });
        Some(Self {
            over,
            thread: thread.map_err(|error| error.to_string()),
        })
    }

    /// The last reading, as text and as data.
    pub fn end(self) -> (String, serde_json::Value) {
        self.over.store(true, Ordering::Release);
        let state = self.thread.and_then(|thread| {
            thread.thread().unpark();
            thread
                .join()
                .unwrap_or_else(|_| Err("the thread that asked it panicked".into()))
        });
        match state {
            Ok(state) => (
                state.to_string(),
                serde_json::to_value(&state).unwrap_or_default(),
            ),
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
    let mut before = gpu.gpm_sample().ok();
    let mut last = None;
    loop {
        if !over.load(Ordering::Acquire) {
            std::thread::park_timeout(PERIOD);
        }
        match last {
            Some(state) if over.load(Ordering::Acquire) => return Ok(state),
            _ => last = Some(GpuState::of(nvml, &gpu, bus_id, &mut before)),
        }
    }
}

/// A GPU at one moment.
#[derive(Debug, Default, Serialize)]
struct GpuState {
    pci_bus_id: String,
    name: Option<String>,
    driver: Option<String>,
    /// Reasons for unintentionally reduced clocks.
    slowed_by: Vec<&'static str>,
    /// Partitioned (MIG): most numbers are unknown then, and memory covers all partitions.
    mig: bool,
    numbers: BTreeMap<&'static str, f64>,
    /// Names of unknown numbers, by reason.
    unknown: BTreeMap<String, Vec<&'static str>>,
}

impl GpuState {
    fn of<'a>(
        nvml: &'a Nvml,
        gpu: &Gpu<'a>,
        bus_id: &str,
        before: &mut Option<GpmSample<'a>>,
    ) -> Self {
        let mut state = Self {
            pci_bus_id: bus_id.into(),
            ..Self::default()
        };
        // The generation is read between the two counters, under traffic.
        state.number(
            "pcie_to_gpu_kb_s",
            gpu.pcie_throughput(PcieUtilCounter::Receive),
        );
        state.number("pcie_gen", gpu.current_pcie_link_gen());
        state.number("pcie_lanes", gpu.current_pcie_link_width());
        state.number(
            "pcie_from_gpu_kb_s",
            gpu.pcie_throughput(PcieUtilCounter::Send),
        );
        state.number("pcie_gen_max", gpu.max_pcie_link_gen());
        state.number("pcie_lanes_max", gpu.max_pcie_link_width());
        state.number("sm_mhz", gpu.clock_info(Clock::SM));
        state.number("sm_mhz_max", gpu.max_clock_info(Clock::SM));
        state.number("temperature_c", gpu.temperature(TemperatureSensor::Gpu));
        state.number("power_mw", gpu.power_usage());
        state.number("power_mw_max", gpu.enforced_power_limit());
        state.number(
            "utilisation_pct",
            gpu.utilization_rates().map(|both| both.gpu),
        );
        let memory = gpu.memory_info();
        state.number(
            "memory_gb",
            memory.as_ref().map(|memory| memory.used as f64 / 1e9),
        );
        state.number(
            "memory_gb_max",
            memory.as_ref().map(|memory| memory.total as f64 / 1e9),
        );
        let errors = gpu.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
        state.number("memory_errors", errors.map(|count| count as f64));
        state.name = gpu.name().ok();
        state.driver = nvml.sys_driver_version().ok();
        state.mig = gpu.mig_mode().is_ok_and(|mode| mode.current == 1);
        let bits = state
            .answer("throttle reasons", gpu.current_throttle_reasons())
            .unwrap_or(ThrottleReasons::empty());
        state.slowed_by = REASONS
            .iter()
            .filter(|(reason, _)| bits.contains(*reason))
            .map(|(_, words)| *words)
            .collect();
        state.counters(nvml, gpu, before);
        state
    }

    fn counters<'a>(&mut self, nvml: &'a Nvml, gpu: &Gpu<'a>, before: &mut Option<GpmSample<'a>>) {
        let Some(now) = self.answer("counters", gpu.gpm_sample()) else {
            return;
        };
        if let Some(before) = before {
            let values = gpm_metrics_get(nvml, before, &now, &COUNTERS.map(|(id, _)| id));
            for ((_, name), value) in COUNTERS.iter().zip(values.into_iter().flatten()) {
                self.number(name, value.map(|metric| metric.value));
            }
        }
        *before = Some(now);
    }

    fn answer<T, E: ToString>(&mut self, name: &'static str, answer: Result<T, E>) -> Option<T> {
        answer
            .map_err(|error| {
                self.unknown
                    .entry(error.to_string())
                    .or_default()
                    .push(name)
            })
            .ok()
    }

    fn number<E: ToString>(&mut self, name: &'static str, answer: Result<impl Into<f64>, E>) {
        if let Some(value) = self.answer(name, answer) {
            self.numbers.insert(name, value.into());
        }
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.numbers.get(name).copied()
    }

    /// "to the GPU 5.00 GB/s", in another unit.
    fn text(
        &self,
        what: &str,
        name: &str,
        unit: f64,
        decimals: usize,
        suffix: &str,
    ) -> Option<String> {
        Some(
            format!("{what} {:.decimals$} {suffix}", self.get(name)? / unit)
                .trim_start()
                .to_string(),
        )
    }

    /// "SM 1410 of 1980 MHz".
    fn of_most(&self, what: &str, name: &str, unit: f64, suffix: &str) -> Option<String> {
        let most = self
            .get(&format!("{name}_max"))
            .map_or(String::new(), |most| format!(" of {:.0}", most / unit));
        Some(
            format!("{what} {:.0}{most} {suffix}", self.get(name)? / unit)
                .trim_start()
                .to_string(),
        )
    }

    fn link(&self) -> Option<String> {
        let link =
            |generation, lanes| Some(format!("{} x{}", self.get(generation)?, self.get(lanes)?));
        let best = link("pcie_gen_max", "pcie_lanes_max")
            .map_or(String::new(), |best| format!(" of {best}"));
        link("pcie_gen", "pcie_lanes").map(|now| now + &best)
    }

    /// Problems, one line each. Unknown numbers give none.
    fn warnings(&self) -> Vec<String> {
        let errors = self.get("memory_errors").filter(|count| *count > 0.0);
        let errors = errors.map(|count| format!("{count} uncorrected memory errors"));
        let slowed = (!self.slowed_by.is_empty()).then(|| {
            let clock = self
                .of_most("SM", "sm_mhz", 1.0, "MHz")
                .map_or(String::new(), |clock| format!(": {clock}"));
            format!(
                "the clocks are reduced by {}{clock}",
                self.slowed_by.join(", ")
            )
        });
        [self.slow_link(), slowed, errors]
            .into_iter()
            .flatten()
            .collect()
    }

    /// The problem of a link that carries data.
    fn slow_link(&self) -> Option<String> {
        let generation = self.get("pcie_gen")?;
        let lanes = self.get("pcie_lanes")?;
        let less = generation < self.get("pcie_gen_max")? || lanes < self.get("pcie_lanes_max")?;
        let flows = ["pcie_to_gpu_kb_s", "pcie_from_gpu_kb_s"]
            .iter()
            .any(|way| self.get(way) >= Some(FLOWS_KB_S));
        let limit = LANE_GB_S.get((generation as usize).checked_sub(1)?)? * lanes;
        (less && flows && limit > 0.0).then(|| {
            format!(
                "PCIe {}: copies at most {limit:.1} GB/s",
                self.link().unwrap_or_default()
            )
        })
    }
}

impl fmt::Display for GpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "gpu       {}, PCI {}",
            self.name.as_deref().unwrap_or("unnamed"),
            self.pci_bus_id
        )?;
        if let Some(driver) = &self.driver {
            write!(f, ", driver {driver}")?;
        }
        if self.mig {
            write!(f, ", partitioned (MIG): numbers cover all partitions")?;
        }
        let percent = |what: &str, name: &str| self.text(what, name, 1.0, 0, "%");
        let gb_s = |what, name| self.text(what, name, 1e6, 2, "GB/s");
        let busy = [
            percent("kernels", "utilisation_pct"),
            self.of_most("memory", "memory_gb", 1.0, "GB"),
        ];
        let pcie = [
            self.link(),
            gb_s("to the GPU", "pcie_to_gpu_kb_s"),
            gb_s("from it", "pcie_from_gpu_kb_s"),
        ];
        let clock = self.of_most("SM", "sm_mhz", 1.0, "MHz");
        let power = self.of_most("", "power_mw", 1e3, "W");
        let pace = [clock, power, self.text("", "temperature_c", 1.0, 0, "°C")];
        let counters = COUNTERS
            .map(|(_, name)| percent(&name.trim_end_matches("_pct").replace('_', " "), name));
        let unknown: Vec<_> = self
            .unknown
            .iter()
            .map(|(why, names)| Some(format!("{}: {why}", names.join(", "))))
            .collect();
        for (label, words) in [
            ("busy", &busy[..]),
            ("pcie", &pcie),
            ("pace", &pace),
            ("counters", &counters),
            ("unknown", &unknown),
        ] {
            let words: Vec<&str> = words.iter().flatten().map(String::as_str).collect();
            if !words.is_empty() {
                write!(
                    f,
                    "\n{label:<9} {}",
                    words.join(if label == "unknown" { "; " } else { ", " })
                )?;
            }
        }
        self.warnings()
            .iter()
            .try_for_each(|warning| write!(f, "\nwarning   {warning}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use std::process::Command;

    fn link(now: (f64, f64), best: (f64, f64), kb_s: f64) -> GpuState {
        let numbers = [
            ("pcie_gen", now.0),
            ("pcie_lanes", now.1),
            ("pcie_gen_max", best.0),
            ("pcie_lanes_max", best.1),
        ];
        let numbers = numbers
            .into_iter()
            .chain([("pcie_to_gpu_kb_s", kb_s)])
            .collect();
        GpuState {
            numbers,
            ..GpuState::default()
        }
    }

    #[test]
    fn a_slow_link_under_traffic_is_a_warning() {
        for (now, best, expected) in [
            (
                (3.0, 8.0),
                (5.0, 16.0),
                Some("PCIe 3 x8 of 5 x16: copies at most 7.9 GB/s"),
            ),
            ((5.0, 16.0), (5.0, 16.0), None),
            // Generations unknown to this program, and to the driver.
            ((9.0, 8.0), (9.0, 16.0), None),
            ((0.0, 16.0), (5.0, 16.0), None),
        ] {
            let warnings = link(now, best, 5e6).warnings();
            assert_eq!(
                warnings.first().map(String::as_str),
                expected,
                "{now:?} of {best:?}"
            );
            assert!(
                link(now, best, FLOWS_KB_S - 1.0).warnings().is_empty(),
                "an idle link is slow to save power"
            );
        }
    }

    #[test]
    fn missing_functions_leave_numbers_unknown() {
        let folder = Folder::new();
        let library = folder.join("libnvml-stand-in.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/standin/nvml.rs");
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        let rustc = rustc
            .args(["--edition=2024", "--crate-type=cdylib", "-o"])
            .arg(&library)
            .arg(source);
        assert!(rustc.status().unwrap().success(), "{rustc:?}");
        let nvml = open(Some(library.as_os_str())).unwrap();
        let text = look(&nvml, "0000:3b:00.0", &AtomicBool::new(true))
            .unwrap()
            .to_string();
        let known = "\
gpu       Stand-in 9000, PCI 0000:3b:00.0
busy      kernels 87 %
pcie      3 x8 of 5 x16, to the GPU 5.00 GB/s, from it 0.01 GB/s
pace      61 °C
unknown   ";
        assert!(text.starts_with(known), "{text}");
        assert!(
            text.contains("power_mw: function symbol failed to load"),
            "{text}"
        );
        assert!(
            text.ends_with("\nwarning   PCIe 3 x8 of 5 x16: copies at most 7.9 GB/s"),
            "{text}"
        );
        let absent = look(&nvml, "0000:99:00.0", &AtomicBool::new(true)).unwrap_err();
        assert!(matches!(absent, NvmlError::NotFound), "{absent}");
        let error = open(Some(OsStr::new("/no/such/libnvidia-ml.so")))
            .map(|_| ())
            .unwrap_err();
        assert!(
            error.to_string().contains("/no/such/libnvidia-ml.so"),
            "{error}"
        );
    }
}
