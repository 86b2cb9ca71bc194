//! The state of a GPU as numbers, and what is wrong with it in words. Pure.
//!
//! A number that is not known is `None`, and [`GpuState::unknown`] says why. Nothing is judged without the numbers that it
//! takes: a link that carries nothing is slow to save power, and an idle GPU's clocks are low for the same reason.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A GPU at one moment. What counts something counts it for all processes on that GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GpuState {
    /// Where it sits: `domain:bus:device.function` in hexadecimal, with 8 digits for the domain.
    pub pci_bus_id: String,
    /// What its maker calls it.
    pub name: Option<String>,
    /// Version of the driver.
    pub driver: Option<String>,
    /// Percent of the last sampling period (up to a second) in which some kernel ran.
    pub utilisation_pct: Option<u32>,
    /// Percent of it in which its memory was read or written.
    pub memory_utilisation_pct: Option<u32>,
    /// Bytes of its memory in use.
    pub memory_used: Option<u64>,
    /// Bytes of its memory.
    pub memory_total: Option<u64>,
    /// Its link to the host.
    pub pcie: Pcie,
    /// Its clocks.
    pub clocks: Clocks,
    /// What keeps the clocks from being higher.
    pub throttle_reasons: Option<Vec<ThrottleReason>>,
    /// Degrees Celsius.
    pub temperature_c: Option<i32>,
    /// Watts: the mean of the last second on newer GPUs.
    pub power_w: Option<f64>,
    /// Watts that it is held to.
    pub power_limit_w: Option<f64>,
    /// How busy it was between two looks; Hopper and newer.
    pub gpm: Option<Gpm>,
    /// Errors of its memory.
    pub ecc: Ecc,
    /// It is cut up into several (MIG): then most counters are unknown, and its memory is that of all parts.
    pub mig: Option<bool>,
    /// Which numbers are not known, and why.
    pub unknown: Vec<Unknown>,
}

/// The link between host and GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Pcie {
    /// Generation now; lower while nothing is carried.
    pub gen_now: Option<u32>,
    /// Generation that the card can do.
    pub gen_max: Option<u32>,
    /// Generation that the card can do in this slot.
    pub gen_max_system: Option<u32>,
    /// Lanes now.
    pub width_now: Option<u32>,
    /// Lanes that the card can have in this slot.
    pub width_max: Option<u32>,
    /// KB/s from the GPU, over 20 ms.
    pub tx_kb_s: Option<u32>,
    /// KB/s to the GPU, over 20 ms.
    pub rx_kb_s: Option<u32>,
    /// Packets sent again since the driver was loaded: a bad contact.
    pub replays: Option<u32>,
}

/// Clocks in MHz.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Clocks {
    /// Of the multiprocessors.
    pub sm_mhz: Option<u32>,
    /// Of the memory.
    pub memory_mhz: Option<u32>,
    /// Of the multiprocessors at most.
    pub sm_max_mhz: Option<u32>,
    /// Of the memory at most.
    pub memory_max_mhz: Option<u32>,
}

/// Errors of the GPU's memory since the driver was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Ecc {
    /// Errors are corrected.
    pub enabled: Option<bool>,
    /// Those that were.
    pub corrected: Option<u64>,
    /// Those that were not.
    pub uncorrected: Option<u64>,
}

/// How busy the GPU was over a time, by its own counters: unlike the utilisation, how much of it was busy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gpm {
    /// Seconds between the two samples.
    pub over_s: f64,
    /// Percent of the time in which something ran.
    pub graphics_util_pct: Option<f64>,
    /// Percent of the multiprocessors that were busy.
    pub sm_util_pct: Option<f64>,
    /// Percent of the warps that they could have had active.
    pub sm_occupancy_pct: Option<f64>,
    /// Percent of the time in which tensor cores were busy.
    pub tensor_util_pct: Option<f64>,
    /// Percent of the memory's bandwidth.
    pub memory_bandwidth_pct: Option<f64>,
    /// Bytes per second from the GPU over PCIe.
    pub pcie_tx_bytes_s: Option<f64>,
    /// Bytes per second to the GPU over PCIe.
    pub pcie_rx_bytes_s: Option<f64>,
}

/// What keeps a GPU's clocks from being higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ThrottleReason {
    /// Nothing runs.
    Idle,
    /// Somebody set them so.
    ApplicationClocks,
    /// The power limit.
    PowerCap,
    /// The hardware slows them to half or less: heat, the power supply, or a power spike.
    HardwareSlowdown,
    /// They follow those of another GPU of their group.
    SyncBoost,
    /// The driver slows them: the GPU or its memory is hot.
    Thermal,
    /// The hardware slows them: too hot.
    HardwareThermal,
    /// The power supply asked for it.
    PowerBrake,
    /// They follow the display's.
    DisplayClocks,
    /// A limit of the board.
    BoardLimit,
    /// The voltage is at its limit of reliability.
    Reliability,
    /// A reason that this crate does not know: its bit.
    Other(u32),
}

/// A number that is not known: the function that would tell it, and why it does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Unknown {
    /// The library is too old, or too new, to have it.
    Missing {
        /// The function.
        call: String,
    },
    /// It answered an error.
    Refused {
        /// The function.
        call: String,
        /// The `nvmlReturn_t`.
        code: i32,
    },
    /// The last sample is not old enough to be compared with.
    TooSoon {
        /// The function.
        call: String,
    },
}

/// Why a GPU cannot be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unavailable {
    /// No library could be loaded; the loader's words.
    NoLibrary(Vec<String>),
    /// The library, or the GPU, refuses.
    Refused(Unknown),
    /// This is no PCI bus id, or a device that has none.
    NoBusId(String),
}

/// Traffic from which on the link is taken to run as fast as it can, in KB/s.
const FLOWS_KB_S: u32 = 50_000;

/// GB/s of one lane in one direction, after the line code, for generations from 1 on.
const LANE_GB_S: [f64; 7] = [0.25, 0.5, 0.985, 1.969, 3.938, 7.563, 15.125];

/// Identifiers of what [`Gpm`] holds, in its order.
pub(super) const METRICS: &[u32] = &[1, 2, 3, 5, 10, 20, 21];

const MIB: f64 = (1 << 20) as f64;

impl Gpm {
    /// From the values of [`METRICS`]; those of the link are in MiB/s.
    pub(super) fn new(over: std::time::Duration, values: &[Option<f64>]) -> Self {
        let value = |index: usize| values.get(index).copied().flatten();
        Self {
            over_s: over.as_secs_f64(),
            graphics_util_pct: value(0),
            sm_util_pct: value(1),
            sm_occupancy_pct: value(2),
            tensor_util_pct: value(3),
            memory_bandwidth_pct: value(4),
            pcie_tx_bytes_s: value(5).map(|mib| mib * MIB),
            pcie_rx_bytes_s: value(6).map(|mib| mib * MIB),
        }
    }
}

const REASONS: [ThrottleReason; 11] = [
    ThrottleReason::Idle,
    ThrottleReason::ApplicationClocks,
    ThrottleReason::PowerCap,
    ThrottleReason::HardwareSlowdown,
    ThrottleReason::SyncBoost,
    ThrottleReason::Thermal,
    ThrottleReason::HardwareThermal,
    ThrottleReason::PowerBrake,
    ThrottleReason::DisplayClocks,
    ThrottleReason::BoardLimit,
    ThrottleReason::Reliability,
];

impl ThrottleReason {
    /// One for each bit, in their order.
    pub(super) fn decode(bits: u64) -> Vec<Self> {
        let known = |bit: u32| REASONS.get(bit as usize).copied().unwrap_or(Self::Other(bit));
        (0..u64::BITS).filter(|bit| bits >> bit & 1 == 1).map(known).collect()
    }

    /// Whether it makes a GPU slower that has work to do, and nobody asked for that.
    pub fn slows(self) -> bool {
        !matches!(self, Self::Idle | Self::ApplicationClocks | Self::DisplayClocks | Self::Other(_))
    }
}

impl fmt::Display for ThrottleReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::ApplicationClocks => "set by the user",
            Self::PowerCap => "the power limit",
            Self::HardwareSlowdown => "the hardware's emergency brake",
            Self::SyncBoost => "another GPU of its group",
            Self::Thermal => "heat",
            Self::HardwareThermal => "heat (by the hardware)",
            Self::PowerBrake => "the power supply",
            Self::DisplayClocks => "the display",
            Self::BoardLimit => "a limit of the board",
            Self::Reliability => "its voltage",
            Self::Other(bit) => return write!(f, "an unknown reason (bit {bit})"),
        })
    }
}

impl Pcie {
    /// GB/s that a link can carry in one direction, before packet headers; `None` for generations that are not known.
    fn gb_s(generation: u32, width: u32) -> Option<f64> {
        let lane = LANE_GB_S.get((generation as usize).checked_sub(1)?)?;
        (width > 0).then(|| lane * f64::from(width))
    }

    /// Data flows in at least one direction.
    fn flows(&self) -> bool {
        self.rx_kb_s.max(self.tx_kb_s).is_some_and(|kb_s| kb_s >= FLOWS_KB_S)
    }

    /// What is wrong with the link, if it carries data and all numbers are known.
    fn complaint(&self) -> Option<String> {
        let (now, lanes) = (self.gen_now?, self.width_now?);
        // The slot's limit is known more often than the card's.
        let (slot, best) = (self.gen_max_system.or(self.gen_max)?, self.gen_max.or(self.gen_max_system)?);
        let lanes_best = self.width_max?;
        if !self.flows() || (now >= best && lanes >= lanes_best) {
            return None;
        }
        let limit = Self::gb_s(now, lanes)?;
        let why = if now >= slot && lanes >= lanes_best { ", the slot does no more" } else { "" };
        Some(format!("PCIe {now} x{lanes} of {best} x{lanes_best}{why}: copies at most {limit:.1} GB/s"))
    }
}

impl GpuState {
    /// What is wrong, a line each; nothing that is not known is complained about.
    pub fn warnings(&self) -> Vec<String> {
        let lost = |unknown: &Unknown| match unknown {
            Unknown::Refused { code: code @ (15 | 16), .. } => {
                Some(format!("the GPU is out of order: {}", words(*code)))
            }
            _ => None,
        };
        let errors = self.ecc.uncorrected.filter(|count| *count > 0);
        let errors = errors.map(|count| format!("{count} errors of its memory were not corrected"));
        let lost = self.unknown.iter().find_map(lost);
        [lost, self.pcie.complaint(), self.throttled(), errors].into_iter().flatten().collect()
    }

    fn throttled(&self) -> Option<String> {
        let reasons: Vec<_> = self.throttle_reasons.as_ref()?.iter().filter(|reason| reason.slows()).collect();
        if reasons.is_empty() {
            return None;
        }
        let reasons = reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let clocks = ratio("SM", self.clocks.sm_mhz, self.clocks.sm_max_mhz, "MHz").map(|clocks| format!(": {clocks}"));
        Some(format!("the clocks are held down by {reasons}{}", clocks.unwrap_or_default()))
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
        let best = link(pcie.gen_max.or(pcie.gen_max_system), pcie.width_max);
        let now = link(pcie.gen_now, pcie.width_now);
        let gb_s = |kb_s: u32| f64::from(kb_s) / 1e6;
        joined([
            now.map(|now| best.map_or(now.clone(), |best| format!("{now} of {best}"))),
            pcie.rx_kb_s.map(|kb_s| format!("to the GPU {:.2} GB/s", gb_s(kb_s))),
            pcie.tx_kb_s.map(|kb_s| format!("from it {:.2} GB/s", gb_s(kb_s))),
            pcie.replays.filter(|count| *count > 0).map(|count| format!("{count} packets sent again")),
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

    fn untold(&self) -> Option<String> {
        let mut whys: Vec<(String, Vec<&str>)> = Vec::new();
        for unknown in &self.unknown {
            let (call, why) = (unknown.call(), unknown.why());
            match whys.iter_mut().find(|(other, _)| *other == why) {
                Some((_, calls)) if calls.contains(&call) => {}
                Some((_, calls)) => calls.push(call),
                None => whys.push((why, vec![call])),
            }
        }
        let words: Vec<_> = whys.iter().map(|(why, calls)| format!("{}: {why}", calls.join(", "))).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// What there is, with commas.
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
            write!(f, ", cut up (MIG): numbers are of the whole")?;
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

impl Unknown {
    fn call(&self) -> &str {
        match self {
            Self::Missing { call } | Self::Refused { call, .. } | Self::TooSoon { call } => call,
        }
    }

    fn why(&self) -> String {
        match self {
            Self::Missing { .. } => "not in this libnvidia-ml".into(),
            Self::Refused { code, .. } => format!("{} ({code})", words(*code)),
            Self::TooSoon { .. } => "asked for too soon after the last time".into(),
        }
    }
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call(), self.why())
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary(tried) => write!(f, "NVML is not there: {}", tried.join("; ")),
            Self::Refused(unknown) => {
                write!(f, "NVML does not answer: {unknown}")?;
                match unknown {
                    Unknown::Refused { code, .. } => hint(*code).map_or(Ok(()), |hint| write!(f, ": {hint}")),
                    _ => Ok(()),
                }
            }
            Self::NoBusId(what) => write!(f, "there is no PCI bus id, by which NVML finds GPUs, in {what:?}"),
        }
    }
}

impl std::error::Error for Unavailable {}

/// `domain:bus:device.function` in hexadecimal with 8, 2, 2 and 1 digits. CUDA writes the domain with 4; domain and function
/// may be missing.
pub(super) fn normal_bus_id(text: &str) -> Option<String> {
    let number = |digits: &str, most: u32| {
        let hex = !digits.is_empty() && digits.len() <= 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        u32::from_str_radix(digits, 16).ok().filter(|number| hex && *number <= most)
    };
    let (rest, function) = text.trim().split_once('.').unwrap_or((text.trim(), "0"));
    let mut parts = rest.rsplit(':');
    let (device, bus) = (number(parts.next()?, 0x1f)?, number(parts.next()?, 0xff)?);
    let domain = parts.next().map_or(Some(0), |digits| number(digits, u32::MAX))?;
    let function = number(function, 7)?;
    parts.next().is_none().then(|| format!("{domain:08x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// An `nvmlReturn_t` in words.
pub(super) fn words(code: i32) -> &'static str {
    CODES.iter().find(|(known, _)| *known == code).map_or("an error unknown here", |(_, words)| words)
}

/// What helps, where that is known.
fn hint(code: i32) -> Option<&'static str> {
    Some(match code {
        4 => "in a container: are /dev/nvidiactl and the GPU's device file there?",
        6 => "in a container: is this GPU given to it?",
        9 => "is the kernel module nvidia loaded?",
        12 => "a stub was loaded: the real one comes with the driver",
        15 | 16 => "the machine or the GPU has to be restarted",
        18 => "the driver was updated while it was running: restart the machine, or reload its modules",
        _ => return None,
    })
}

/// `nvmlReturn_t` of 13.5.
pub(super) const CODES: [(i32, &str); 32] = [
    (0, "success"),
    (1, "not initialised"),
    (2, "invalid argument"),
    (3, "not supported"),
    (4, "no permission"),
    (5, "initialised already"),
    (6, "not found"),
    (7, "not enough room"),
    (8, "a power cable is not attached well"),
    (9, "the driver is not loaded"),
    (10, "timed out"),
    (11, "trouble with the GPU's interrupts"),
    (12, "the library's other half was not found"),
    (13, "the driver has no such function"),
    (14, "the GPU's information ROM is damaged"),
    (15, "the GPU has fallen off the bus"),
    (16, "the GPU has to be reset"),
    (17, "the operating system refuses"),
    (18, "driver and library are of different versions"),
    (19, "in use"),
    (20, "not enough memory"),
    (21, "no data"),
    (22, "not with ECC and a virtual GPU"),
    (23, "not enough resources"),
    (24, "no such frequency"),
    (25, "the version of the argument is not supported"),
    (26, "no longer supported"),
    (27, "not ready"),
    (28, "no GPU was found"),
    (29, "not in this state"),
    (30, "no such kind of reset"),
    (999, "an unknown error"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn link(now: (u32, u32), slot: u32, card: (u32, u32)) -> GpuState {
        let pcie = Pcie {
            gen_now: Some(now.0),
            width_now: Some(now.1),
            gen_max_system: Some(slot),
            gen_max: Some(card.0),
            width_max: Some(card.1),
            rx_kb_s: Some(5_000_000),
            tx_kb_s: Some(10),
            replays: Some(0),
        };
        GpuState { pcie, ..GpuState::default() }
    }

    #[test]
    fn a_link_below_what_card_or_slot_can_do_is_a_warning_with_its_limit() {
        let table = [
            ((3, 8), 5, (5, 16), Some("PCIe 3 x8 of 5 x16: copies at most 7.9 GB/s")),
            ((4, 16), 4, (5, 16), Some("PCIe 4 x16 of 5 x16, the slot does no more: copies at most 31.5 GB/s")),
            ((5, 8), 5, (5, 16), Some("PCIe 5 x8 of 5 x16: copies at most 31.5 GB/s")),
            ((1, 16), 4, (4, 16), Some("PCIe 1 x16 of 4 x16: copies at most 4.0 GB/s")),
            ((5, 16), 5, (5, 16), None),
            // More than it is said to be able to.
            ((6, 16), 5, (5, 16), None),
            // No such generation, no lanes: not known, not judged.
            ((0, 16), 5, (5, 16), None),
            ((9, 8), 9, (9, 16), None),
            ((3, 0), 5, (5, 16), None),
        ];
        for (now, slot, card, expected) in table {
            let warnings = link(now, slot, card).warnings();
            assert_eq!(warnings.first().map(String::as_str), expected, "{now:?} in {slot} for {card:?}");
        }
    }

    #[test]
    fn a_link_that_carries_nothing_is_not_judged() {
        for (rx, tx, judged) in [
            (Some(0), Some(0), false),
            (Some(FLOWS_KB_S - 1), Some(FLOWS_KB_S - 1), false),
            (Some(FLOWS_KB_S), None, true),
            (None, Some(FLOWS_KB_S), true),
            (None, None, false),
        ] {
            let mut state = link((1, 16), 5, (5, 16));
            (state.pcie.rx_kb_s, state.pcie.tx_kb_s) = (rx, tx);
            assert_eq!(!state.warnings().is_empty(), judged, "{rx:?} {tx:?}");
        }
    }

    #[test]
    fn a_link_is_judged_by_the_slot_where_the_card_does_not_tell() {
        let mut state = link((3, 16), 4, (5, 16));
        state.pcie.gen_max = None;
        assert_eq!(state.warnings(), ["PCIe 3 x16 of 4 x16: copies at most 15.8 GB/s"]);
        state.pcie.gen_max_system = None;
        assert!(state.warnings().is_empty());
        state.pcie.gen_max = Some(5);
        assert_eq!(state.warnings().len(), 1);
    }

    #[test]
    fn every_bit_is_a_reason_and_only_those_that_cost_speed_are_warnings() {
        use ThrottleReason as R;
        let table = [
            (0x1, R::Idle, false),
            (0x2, R::ApplicationClocks, false),
            (0x4, R::PowerCap, true),
            (0x8, R::HardwareSlowdown, true),
            (0x10, R::SyncBoost, true),
            (0x20, R::Thermal, true),
            (0x40, R::HardwareThermal, true),
            (0x80, R::PowerBrake, true),
            (0x100, R::DisplayClocks, false),
            (0x200, R::BoardLimit, true),
            (0x400, R::Reliability, true),
            (0x800, R::Other(11), false),
            (1 << 63, R::Other(63), false),
        ];
        let mut all = (0_u64, Vec::new());
        for (bits, reason, slows) in table {
            assert_eq!(R::decode(bits), [reason]);
            assert_eq!(reason.slows(), slows, "{reason}");
            let state = GpuState { throttle_reasons: Some(vec![reason]), ..GpuState::default() };
            assert_eq!(state.warnings().len(), usize::from(slows));
            all.0 |= bits;
            all.1.push(reason);
        }
        assert_eq!(R::decode(all.0), all.1);
        assert_eq!(R::decode(0), []);
    }

    #[test]
    fn a_warning_about_clocks_names_the_reasons_and_what_is_left() {
        let clocks = Clocks { sm_mhz: Some(1410), sm_max_mhz: Some(1980), ..Clocks::default() };
        let reasons = vec![ThrottleReason::Idle, ThrottleReason::PowerCap, ThrottleReason::Thermal];
        let mut state = GpuState { clocks, throttle_reasons: Some(reasons), ..GpuState::default() };
        let expected = "the clocks are held down by the power limit, heat: SM 1410 of 1980 MHz";
        assert_eq!(state.warnings(), [expected]);
        state.clocks = Clocks::default();
        assert_eq!(state.warnings(), ["the clocks are held down by the power limit, heat"]);
    }

    #[test]
    fn a_state_in_words_has_a_line_for_what_is_known_and_one_for_what_is_not() {
        let missing = Unknown::Missing { call: "nvmlDeviceGetMigMode".into() };
        let refused = |call: &str| Unknown::Refused { call: call.into(), code: 3 };
        let mut state = link((3, 8), 5, (5, 16));
        state.pci_bus_id = "00000000:3b:00.0".into();
        (state.name, state.driver) = (Some("NVIDIA H200".into()), Some("580.65".into()));
        (state.utilisation_pct, state.memory_utilisation_pct) = (Some(87), Some(41));
        (state.memory_used, state.memory_total) = (Some(12_300_000_000), Some(150_000_000_000));
        (state.temperature_c, state.power_w, state.power_limit_w) = (Some(61), Some(512.4), Some(700.0));
        state.gpm = Some(Gpm { over_s: 2.5, sm_util_pct: Some(71.2), pcie_rx_bytes_s: Some(21.4e9), ..Gpm::default() });
        state.unknown = vec![refused("nvmlDeviceGetEccMode"), missing, refused("nvmlDeviceGetTotalEccErrors")];
        let expected = "\
gpu       NVIDIA H200, PCI 00000000:3b:00.0, driver 580.65
busy      87 % of the time, its memory 41 %, 12.3 of 150.0 GB used
pcie      3 x8 of 5 x16, to the GPU 5.00 GB/s, from it 0.00 GB/s
clocks    512 of 700 W, 61 °C
counters  SMs 71 %, to the GPU 21.40 GB/s (over 2.5 s)
unknown   nvmlDeviceGetEccMode, nvmlDeviceGetTotalEccErrors: not supported (3); nvmlDeviceGetMigMode: not in this libnvidia-ml
warning   PCIe 3 x8 of 5 x16: copies at most 7.9 GB/s";
        assert_eq!(state.to_string(), expected);
        let nothing = GpuState { pci_bus_id: "00000000:3b:00.0".into(), ..GpuState::default() };
        assert_eq!(nothing.to_string(), "gpu       unnamed, PCI 00000000:3b:00.0");
    }

    #[test]
    fn a_gpu_that_fell_off_the_bus_and_memory_that_fails_are_warnings() {
        let unknown = vec![Unknown::Refused { call: "nvmlDeviceGetName".into(), code: 15 }];
        let ecc = Ecc { uncorrected: Some(2), ..Ecc::default() };
        let warnings = GpuState { unknown, ecc, ..GpuState::default() }.warnings();
        let expected =
            ["the GPU is out of order: the GPU has fallen off the bus", "2 errors of its memory were not corrected"];
        assert_eq!(warnings, expected);
    }

    #[test]
    fn bus_ids_are_the_same_with_domains_of_4_and_8_digits() {
        let table = [
            ("0000:3B:00.0", Some("00000000:3b:00.0")),
            ("00000000:3b:00.0", Some("00000000:3b:00.0")),
            ("10de0001:01:1f.7", Some("10de0001:01:1f.7")),
            ("0001:01:00", Some("00000001:01:00.0")),
            ("3b:00.0", Some("00000000:3b:00.0")),
            (" 0000:3b:00.0\n", Some("00000000:3b:00.0")),
            ("", None),
            ("3b", None),
            ("0000:3b:20.0", None),
            ("0000:100:00.0", None),
            ("0000:3b:00.8", None),
            ("000000000:3b:00.0", None),
            ("0000:+3:00.0", None),
            ("0:0000:3b:00.0", None),
            ("0000:3b:00.0.0", None),
            ("GPU-8a56", None),
        ];
        for (text, expected) in table {
            assert_eq!(normal_bus_id(text).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn every_code_has_words_and_an_unknown_one_keeps_its_number() {
        assert!(CODES.is_sorted_by(|a, b| a.0 < b.0));
        let refused = |code| Unknown::Refused { call: "nvmlInit_v2".into(), code };
        for (code, words) in CODES {
            assert_eq!(refused(code).to_string(), format!("nvmlInit_v2: {words} ({code})"));
        }
        assert_eq!(refused(-7).to_string(), "nvmlInit_v2: an error unknown here (-7)");
        let mismatch = Unavailable::Refused(refused(18)).to_string();
        assert!(mismatch.contains("different versions (18)") && mismatch.contains("restart"), "{mismatch}");
    }

    proptest! {
        #[test]
        fn no_numbers_make_words_or_warnings_panic(
            numbers in proptest::array::uniform12(proptest::option::of(proptest::prelude::any::<u32>())),
            bits: u64, memory: Option<(u64, u64)>, power: Option<f64>, text in ".{0,24}", code: i32,
        ) {
            let n = |index: usize| numbers[index];
            let pcie = Pcie {
                gen_now: n(0), gen_max: n(1), gen_max_system: n(2), width_now: n(3), width_max: n(4), tx_kb_s: n(5),
                rx_kb_s: n(6), replays: n(7),
            };
            let clocks = Clocks { sm_mhz: n(8), memory_mhz: n(9), sm_max_mhz: n(10), memory_max_mhz: n(11) };
            let reasons = ThrottleReason::decode(bits);
            prop_assert_eq!(reasons.len() as u32, bits.count_ones());
            let state = GpuState {
                pcie, clocks, throttle_reasons: Some(reasons), power_w: power,
                memory_used: memory.map(|(used, _)| used), memory_total: memory.map(|(_, total)| total),
                unknown: vec![Unknown::Refused { call: text.clone(), code }], ..GpuState::default()
            };
            let expected = format!("({code})");
            prop_assert!(state.to_string().contains(&expected));
            prop_assert!(normal_bus_id(&text).is_none_or(|id| normal_bus_id(&id) == Some(id.clone())));
        }

        #[test]
        fn bus_ids_come_back_as_they_were(domain: u32, bus: u8, device in 0_u8..32, function in 0_u8..8) {
            let text = format!("{domain:04X}:{bus:02X}:{device:02X}.{function}");
            prop_assert_eq!(normal_bus_id(&text), Some(format!("{domain:08x}:{bus:02x}:{device:02x}.{function}")));
        }
    }
}
