//! What the GPU says of itself while it is being fed: by NVML, the library of NVIDIA's driver for monitoring.
//!
//! ```text
//! Watch::of(&device) ──PCI bus id──► the same GPU, whatever CUDA_VISIBLE_DEVICES hides or reorders
//!    state() ──► link while it carries data, clocks and what holds them down, memory, power, errors
//!                and, on Hopper and newer, how busy it was between two calls (GPM)
//! ```
//!
//! Nothing here runs unless it is asked for, and nothing is needed: each function of the library is looked up by itself,
//! and one that is missing or refuses leaves its number unknown, with its reason in [`GpuState::unknown`].
//!
//! Limits: `state()` takes some 50 ms, for the counters of the link are watched for 20 ms each. A GPU that is cut up (MIG)
//! is looked at as a whole, since its parts share one bus id: its memory is that of all parts, and most of its counters
//! are unknown. What it says is of all processes on that GPU.

mod api;
mod state;
#[cfg(test)]
mod tests;

pub use state::{Clocks, Ecc, Gpm, GpuState, Pcie, ThrottleReason, Unavailable, Unknown};

use crate::device::Device;
use api::{Answer, Api, RawDevice, Refusal, Sample};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Two samples that are closer than this say nothing: the GPU renews its counters about so often.
const GPM_LEAST: Duration = Duration::from_millis(100);

/// Looks at one GPU.
pub struct Watch {
    api: Arc<Api>,
    device: RawDevice,
    pci_bus_id: String,
    /// The last sample, or why there are none.
    gpm: Result<(Sample, Instant), Refusal>,
    gpm_least: Duration,
}

impl Watch {
    /// Looks at the GPU of a device, from now on.
    ///
    /// Errors: why it cannot be looked at: the device is the host, there is no library (`FEEDLINE_NVML` names another), it
    /// and the driver do not fit, or the GPU is not to be seen.
    pub fn of(device: &Device) -> Result<Self, Unavailable> {
        let id = device.pci_bus_id().ok_or_else(|| Unavailable::NoBusId(device.to_string()))?;
        Self::open(id)
    }

    /// Looks at the GPU with that PCI bus id, as in `/sys/bus/pci/devices`: `domain:bus:device.function` in hexadecimal.
    ///
    /// Errors: as [`of`](Self::of).
    pub fn open(pci_bus_id: &str) -> Result<Self, Unavailable> {
        let named = std::env::var_os("FEEDLINE_NVML").filter(|value| !value.is_empty());
        Self::open_with(named.as_deref().map(Path::new), pci_bus_id)
    }

    fn open_with(named: Option<&Path>, pci_bus_id: &str) -> Result<Self, Unavailable> {
        let pci_bus_id = state::normal_bus_id(pci_bus_id).ok_or_else(|| Unavailable::NoBusId(pci_bus_id.into()))?;
        let api = Arc::new(Api::open(named)?);
        let device = api.device(&pci_bus_id).map_err(|refusal| Unavailable::Refused(refusal.into()))?;
        let gpm = api.gpm_is_supported(device).and_then(|()| Sample::take(&api, device));
        Ok(Self { api, device, pci_bus_id, gpm: gpm.map(|sample| (sample, Instant::now())), gpm_least: GPM_LEAST })
    }

    /// The GPU as it is now; what [`GpuState::gpm`] holds is of the time since the last call, or since it was opened.
    pub fn state(&mut self) -> GpuState {
        let mut unknown = Vec::new();
        let gpm = self.gpm_since();
        let (api, device) = (&*self.api, self.device);
        let mut ask = Asked(&mut unknown);
        let pcie = pcie(api, device, &mut ask);
        let clocks = clocks(api, device, &mut ask);
        let utilisation = ask.of(api.utilisation(device));
        let memory = ask.of(api.memory(device));
        let state = GpuState {
            pci_bus_id: self.pci_bus_id.clone(),
            name: ask.of(api.name(device)),
            driver: ask.of(api.driver()),
            utilisation_pct: utilisation.map(|(gpu, _)| gpu),
            memory_utilisation_pct: utilisation.map(|(_, memory)| memory),
            memory_used: memory.map(|(used, _)| used),
            memory_total: memory.map(|(_, total)| total),
            pcie,
            clocks,
            throttle_reasons: ask.of(api.throttle_reasons(device)).map(ThrottleReason::decode),
            temperature_c: ask.of(api.temperature(device)),
            power_w: ask.of(api.power(device)).map(watts),
            power_limit_w: ask.of(api.power_limit(device)).map(watts),
            gpm: ask.of(gpm),
            ecc: ecc(api, device, &mut ask),
            mig: ask.of(api.mig(device)),
            unknown: Vec::new(),
        };
        GpuState { unknown, ..state }
    }

    /// How busy it was since the last sample, which is replaced.
    fn gpm_since(&mut self) -> Answer<Gpm> {
        let (before, at) = match &mut self.gpm {
            Ok((sample, at)) => (sample, at),
            Err(refusal) => return Err(*refusal),
        };
        let over = at.elapsed();
        if over < self.gpm_least {
            return Err(Refusal::too_soon());
        }
        let (now, taken) = (Sample::take(&self.api, self.device)?, Instant::now());
        let values = Sample::metrics(before, &now, state::METRICS);
        (*before, *at) = (now, taken);
        values.map(|values| Gpm::new(over, &values))
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watch({})", self.pci_bus_id)
    }
}

/// Keeps why numbers are unknown.
struct Asked<'a>(&'a mut Vec<Unknown>);

impl Asked<'_> {
    fn of<T>(&mut self, answer: Answer<T>) -> Option<T> {
        answer.map_err(|refusal| self.0.push(refusal.into())).ok()
    }
}

/// The generation is read between the two counters: while whatever they count is being carried.
fn pcie(api: &Api, device: RawDevice, ask: &mut Asked<'_>) -> Pcie {
    let rx_kb_s = ask.of(api.pcie_rx(device));
    let (gen_now, width_now) = (ask.of(api.pcie_generation(device)), ask.of(api.pcie_width(device)));
    Pcie {
        gen_now,
        gen_max: ask.of(api.pcie_generation_card(device)),
        gen_max_system: ask.of(api.pcie_generation_system(device)),
        width_now,
        width_max: ask.of(api.pcie_width_max(device)),
        tx_kb_s: ask.of(api.pcie_tx(device)),
        rx_kb_s,
        replays: ask.of(api.pcie_replays(device)),
    }
}

fn clocks(api: &Api, device: RawDevice, ask: &mut Asked<'_>) -> Clocks {
    Clocks {
        sm_mhz: ask.of(api.clock_sm(device)),
        memory_mhz: ask.of(api.clock_memory(device)),
        sm_max_mhz: ask.of(api.clock_sm_max(device)),
        memory_max_mhz: ask.of(api.clock_memory_max(device)),
    }
}

fn ecc(api: &Api, device: RawDevice, ask: &mut Asked<'_>) -> Ecc {
    Ecc {
        enabled: ask.of(api.ecc(device)),
        corrected: ask.of(api.ecc_corrected(device)),
        uncorrected: ask.of(api.ecc_uncorrected(device)),
    }
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1000.0
}
