//! Finding libnvidia-ml and its functions; every call into it is in this file.
//!
//! ```text
//! $FEEDLINE_NVML, and nothing else when it is set
//! libnvidia-ml.so.1, libnvidia-ml.so     as the dynamic linker finds them
//! ```
//!
//! Signatures, structures and constants are those of nvml.h of 11.8 to 13.5, which agree in all that is used here.
//! Structures that grew keep their version: `nvmlGpmMetricsGet_t` has room for more metrics than any of them.
//!
//! The library counts its users; `nvmlShutdown` is called once for each `nvmlInit` here. It may be called from any thread.
//! It stays loaded to the end of the process.

#![allow(unsafe_code)]

use super::state::{Unavailable, Unknown};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;
use std::sync::Arc;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const UNKNOWN_ERROR: c_int = 999;

/// What the library answers where it has no value, but no error either.
const NO_NUMBER: c_uint = c_uint::MAX;

const CLOCK_SM: c_uint = 1;
const CLOCK_MEMORY: c_uint = 2;
const PCIE_TX: c_uint = 0;
const PCIE_RX: c_uint = 1;
const SENSOR_GPU: c_uint = 0;
const ERRORS_CORRECTED: c_uint = 0;
const ERRORS_UNCORRECTED: c_uint = 1;
/// Since the driver was loaded.
const VOLATILE: c_uint = 0;
const MIG_ON: c_uint = 1;
const NAME_BYTES: usize = 96;
const VERSION_BYTES: usize = 80;

/// Metrics that one request has room for: 477 in 13.5, 98 in 11.8, both of version 1.
const METRICS_ROOM: usize = 512;
const GPM_VERSION: c_uint = 1;

/// A structure's version: its number and its size.
const fn version<T>(number: c_uint) -> c_uint {
    size_of::<T>() as c_uint | number << 24
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Default)]
struct RawUtilisation {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlMemory_v2_t`; `used` without what the driver keeps for itself.
#[repr(C)]
#[derive(Default)]
struct RawMemory2 {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlMemory_t`; `used` with it.
#[repr(C)]
#[derive(Default)]
struct RawMemory1 {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlTemperature_v1_t`.
#[repr(C)]
struct RawTemperature {
    version: c_uint,
    sensor: c_uint,
    celsius: c_int,
}

/// `nvmlGpmSupport_t`.
#[repr(C)]
struct RawSupport {
    version: c_uint,
    supported: c_uint,
}

/// `nvmlGpmMetric_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawMetric {
    id: c_uint,
    code: c_int,
    value: f64,
    names: [*const c_char; 3],
}

/// `nvmlGpmMetricsGet_t`.
#[repr(C)]
struct RawRequest {
    version: c_uint,
    count: c_uint,
    before: *mut c_void,
    after: *mut c_void,
    metrics: [RawMetric; METRICS_ROOM],
}

/// A GPU, by the library's name for it.
#[derive(Clone, Copy)]
pub(super) struct RawDevice(usize);

impl RawDevice {
    fn pointer(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// What one call answers.
pub(super) type Answer<T> = Result<T, Refusal>;

/// A function that is missing or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    call: &'static str,
    /// Its code; `None` when the library has no such function, or when it was not called.
    code: Option<c_int>,
    early: bool,
}

impl Refusal {
    fn code(call: &'static str, code: c_int) -> Self {
        Self { call, code: Some(code), early: false }
    }

    /// A sample was asked for right after the last one.
    pub(super) fn too_soon() -> Self {
        Self { call: "nvmlGpmSampleGet", code: None, early: true }
    }

    /// Of two functions for the same number, of which the second is the older one: the one that says more.
    fn or(self, older: Self) -> Self {
        if self.code.is_none() { older } else { self }
    }
}

impl From<Refusal> for Unknown {
    fn from(refusal: Refusal) -> Self {
        let call = refusal.call.into();
        match refusal.code {
            Some(code) => Self::Refused { call, code },
            None if refusal.early => Self::TooSoon { call },
            None => Self::Missing { call },
        }
    }
}

type Plain = unsafe extern "C" fn() -> c_int;
type Text = unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_int;
type Number = unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_int;
type Numbers = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_uint) -> c_int;
type NumberOf = unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_int;
type Bits = unsafe extern "C" fn(*mut c_void, *mut c_ulonglong) -> c_int;

/// A function of the library, which may not have it.
#[derive(Clone, Copy)]
struct Function<F> {
    name: &'static str,
    address: Option<F>,
}

impl<F: Copy> Function<F> {
    fn get(&self) -> Answer<F> {
        self.address.ok_or(Refusal { call: self.name, code: None, early: false })
    }

    fn check(&self, code: c_int) -> Answer<()> {
        if code == SUCCESS { Ok(()) } else { Err(Refusal::code(self.name, code)) }
    }

    /// A value that means that there is none.
    fn none(&self) -> Refusal {
        Refusal::code(self.name, NOT_SUPPORTED)
    }
}

macro_rules! functions {
    ($($field:ident: $name:literal $type:ty;)*) => {
        /// The functions.
        struct Functions {
            $($field: Function<$type>,)*
        }

        /// Their names.
        #[cfg(test)]
        pub(super) const NAMES: &[&str] = &[$($name),*];

        impl Functions {
            fn find(library: &Library) -> Self {
                Self {
                    $($field: Function {
                        name: $name,
                        // SAFETY: the types below are those of nvml.h; the library is never unloaded.
                        address: unsafe { library.get::<$type>($name).ok().map(|symbol| *symbol) },
                    },)*
                }
            }
        }
    };
}

functions! {
    init: "nvmlInit_v2" Plain;
    shutdown: "nvmlShutdown" Plain;
    driver: "nvmlSystemGetDriverVersion" unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
    device: "nvmlDeviceGetHandleByPciBusId_v2" unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    name: "nvmlDeviceGetName" Text;
    utilisation: "nvmlDeviceGetUtilizationRates" unsafe extern "C" fn(*mut c_void, *mut RawUtilisation) -> c_int;
    memory2: "nvmlDeviceGetMemoryInfo_v2" unsafe extern "C" fn(*mut c_void, *mut RawMemory2) -> c_int;
    memory1: "nvmlDeviceGetMemoryInfo" unsafe extern "C" fn(*mut c_void, *mut RawMemory1) -> c_int;
    generation: "nvmlDeviceGetCurrPcieLinkGeneration" Number;
    generation_system: "nvmlDeviceGetMaxPcieLinkGeneration" Number;
    generation_card: "nvmlDeviceGetGpuMaxPcieLinkGeneration" Number;
    width: "nvmlDeviceGetCurrPcieLinkWidth" Number;
    width_max: "nvmlDeviceGetMaxPcieLinkWidth" Number;
    throughput: "nvmlDeviceGetPcieThroughput" NumberOf;
    replays: "nvmlDeviceGetPcieReplayCounter" Number;
    clock: "nvmlDeviceGetClockInfo" NumberOf;
    clock_max: "nvmlDeviceGetMaxClockInfo" NumberOf;
    reasons: "nvmlDeviceGetCurrentClocksEventReasons" Bits;
    reasons_before: "nvmlDeviceGetCurrentClocksThrottleReasons" Bits;
    temperature: "nvmlDeviceGetTemperatureV" unsafe extern "C" fn(*mut c_void, *mut RawTemperature) -> c_int;
    temperature_before: "nvmlDeviceGetTemperature" NumberOf;
    power: "nvmlDeviceGetPowerUsage" Number;
    power_limit: "nvmlDeviceGetEnforcedPowerLimit" Number;
    ecc: "nvmlDeviceGetEccMode" Numbers;
    ecc_errors: "nvmlDeviceGetTotalEccErrors" unsafe extern "C" fn(*mut c_void, c_uint, c_uint, *mut c_ulonglong) -> c_int;
    mig: "nvmlDeviceGetMigMode" Numbers;
    gpm_support: "nvmlGpmQueryDeviceSupport" unsafe extern "C" fn(*mut c_void, *mut RawSupport) -> c_int;
    gpm_alloc: "nvmlGpmSampleAlloc" unsafe extern "C" fn(*mut *mut c_void) -> c_int;
    gpm_free: "nvmlGpmSampleFree" unsafe extern "C" fn(*mut c_void) -> c_int;
    gpm_sample: "nvmlGpmSampleGet" unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
    gpm_metrics: "nvmlGpmMetricsGet" unsafe extern "C" fn(*mut RawRequest) -> c_int;
}

/// The library, initialised. Dropping it says that it is no longer used.
pub(super) struct Api {
    functions: Functions,
}

impl Api {
    /// Loads the first library that can be loaded, and initialises it. Only an explicitly named one is tried when there
    /// is one.
    pub(super) fn open(named: Option<&Path>) -> Result<Self, Unavailable> {
        let named = named.map(Path::as_os_str);
        let candidates = named.map_or_else(|| vec!["libnvidia-ml.so.1", "libnvidia-ml.so"], |_| Vec::new());
        let candidates = named.into_iter().chain(candidates.into_iter().map(OsStr::new));
        let mut tried = Vec::new();
        for name in candidates {
            // SAFETY: loading runs the library's initialisers, and with it is granted what the dynamic linker or the user
            // names a libnvidia-ml; it is never unloaded, so none of its terminators run before the end of the process.
            match unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_LOCAL) } {
                Ok(library) => return Self::start(&std::mem::ManuallyDrop::new(library)),
                Err(error) => {
                    // The linker's own words are the source.
                    let words =
                        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                    tried.push(words);
                }
            }
        }
        Err(Unavailable::NoLibrary(tried))
    }

    fn start(library: &Library) -> Result<Self, Unavailable> {
        let functions = Functions::find(library);
        let init = functions.init.get().and_then(|init| {
            // SAFETY: takes no argument, may be called at any time, also repeatedly.
            functions.init.check(unsafe { init() })
        });
        init.map_err(|refusal| Unavailable::Refused(refusal.into()))?;
        Ok(Self { functions })
    }

    /// The GPU with that bus id. It is initialised if nobody uses it yet.
    pub(super) fn device(&self, pci_bus_id: &str) -> Answer<RawDevice> {
        let function = &self.functions.device;
        let get = function.get()?;
        let text = CString::new(pci_bus_id).map_err(|_| Refusal::code(function.name, INVALID_ARGUMENT))?;
        let mut device = std::ptr::null_mut();
        // SAFETY: reads a text that ends with a zero, writes a pointer to a live local.
        function.check(unsafe { get(text.as_ptr(), &raw mut device) })?;
        if device.is_null() {
            return Err(Refusal::code(function.name, UNKNOWN_ERROR));
        }
        Ok(RawDevice(device.expose_provenance()))
    }

    /// The driver's version.
    pub(super) fn driver(&self) -> Answer<String> {
        let function = &self.functions.driver;
        let get = function.get()?;
        let mut bytes = [0_u8; VERSION_BYTES];
        // SAFETY: writes no more than the room that it is told, to a live local.
        function.check(unsafe { get(bytes.as_mut_ptr().cast(), VERSION_BYTES as c_uint) })?;
        Ok(text(&bytes))
    }

    /// The GPU's name.
    pub(super) fn name(&self, device: RawDevice) -> Answer<String> {
        let function = &self.functions.name;
        let get = function.get()?;
        let mut bytes = [0_u8; NAME_BYTES];
        // SAFETY: as in `number`; it writes no more than the room that it is told, to a live local.
        function.check(unsafe { get(device.pointer(), bytes.as_mut_ptr().cast(), NAME_BYTES as c_uint) })?;
        Ok(text(&bytes))
    }

    fn number(&self, function: &Function<Number>, device: RawDevice) -> Answer<u32> {
        let get = function.get()?;
        let mut number = NO_NUMBER;
        // SAFETY: the device is this library's, which is initialised for as long as `self` lives, and handles stay valid
        // as long; one number is written to a live local.
        function.check(unsafe { get(device.pointer(), &raw mut number) })?;
        Some(number).filter(|number| *number != NO_NUMBER).ok_or(function.none())
    }

    fn number_of(&self, function: &Function<NumberOf>, device: RawDevice, what: c_uint) -> Answer<u32> {
        let get = function.get()?;
        let mut number = NO_NUMBER;
        // SAFETY: as in `number`; which of the numbers is a constant of the header.
        function.check(unsafe { get(device.pointer(), what, &raw mut number) })?;
        Some(number).filter(|number| *number != NO_NUMBER).ok_or(function.none())
    }

    /// What is set, and not what will be after a reset.
    fn first(&self, function: &Function<Numbers>, device: RawDevice) -> Answer<u32> {
        let get = function.get()?;
        let (mut now, mut pending) = (NO_NUMBER, NO_NUMBER);
        // SAFETY: as in `number`; two numbers are written to live locals.
        function.check(unsafe { get(device.pointer(), &raw mut now, &raw mut pending) })?;
        Some(now).filter(|number| *number != NO_NUMBER).ok_or(function.none())
    }

    fn bits(&self, function: &Function<Bits>, device: RawDevice) -> Answer<u64> {
        let get = function.get()?;
        let mut bits: c_ulonglong = 0;
        // SAFETY: as in `number`.
        function.check(unsafe { get(device.pointer(), &raw mut bits) })?;
        Ok(bits)
    }

    /// How much of the last sampling period the GPU and its memory were in use, in percent.
    pub(super) fn utilisation(&self, device: RawDevice) -> Answer<(u32, u32)> {
        let function = &self.functions.utilisation;
        let get = function.get()?;
        let mut raw = RawUtilisation { gpu: NO_NUMBER, memory: NO_NUMBER };
        // SAFETY: as in `number`; the structure is that of nvml.h.
        function.check(unsafe { get(device.pointer(), &raw mut raw) })?;
        if raw.gpu > 100 || raw.memory > 100 {
            return Err(function.none());
        }
        Ok((raw.gpu, raw.memory))
    }

    /// Bytes in use, and all.
    pub(super) fn memory(&self, device: RawDevice) -> Answer<(u64, u64)> {
        self.memory_now(device).or_else(|newer| self.memory_before(device).map_err(|older| newer.or(older)))
    }

    fn memory_now(&self, device: RawDevice) -> Answer<(u64, u64)> {
        let function = &self.functions.memory2;
        let get = function.get()?;
        let mut raw = RawMemory2 { version: version::<RawMemory2>(2), ..RawMemory2::default() };
        // SAFETY: as in `number`; the structure is that of nvml.h, of the version that it names.
        function.check(unsafe { get(device.pointer(), &raw mut raw) })?;
        Some((raw.used, raw.total)).filter(|(used, total)| used <= total).ok_or(function.none())
    }

    fn memory_before(&self, device: RawDevice) -> Answer<(u64, u64)> {
        let function = &self.functions.memory1;
        let get = function.get()?;
        let mut raw = RawMemory1::default();
        // SAFETY: as in `number`; the structure is that of nvml.h.
        function.check(unsafe { get(device.pointer(), &raw mut raw) })?;
        Some((raw.used, raw.total)).filter(|(used, total)| used <= total).ok_or(function.none())
    }

    /// The link's generation now.
    pub(super) fn pcie_generation(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.generation, device)
    }

    /// The generation that the slot and the card can do together.
    pub(super) fn pcie_generation_system(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.generation_system, device)
    }

    /// The generation that the card can do.
    pub(super) fn pcie_generation_card(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.generation_card, device)
    }

    /// Lanes in use.
    pub(super) fn pcie_width(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.width, device)
    }

    /// Lanes that the slot and the card have.
    pub(super) fn pcie_width_max(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.width_max, device)
    }

    /// KB/s from the GPU. Waits for 20 ms.
    pub(super) fn pcie_tx(&self, device: RawDevice) -> Answer<u32> {
        self.number_of(&self.functions.throughput, device, PCIE_TX)
    }

    /// KB/s to the GPU. Waits for 20 ms.
    pub(super) fn pcie_rx(&self, device: RawDevice) -> Answer<u32> {
        self.number_of(&self.functions.throughput, device, PCIE_RX)
    }

    /// Packets that were sent again.
    pub(super) fn pcie_replays(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.replays, device)
    }

    /// MHz.
    pub(super) fn clock_sm(&self, device: RawDevice) -> Answer<u32> {
        self.number_of(&self.functions.clock, device, CLOCK_SM)
    }

    /// MHz.
    pub(super) fn clock_memory(&self, device: RawDevice) -> Answer<u32> {
        self.number_of(&self.functions.clock, device, CLOCK_MEMORY)
    }

    /// MHz.
    pub(super) fn clock_sm_max(&self, device: RawDevice) -> Answer<u32> {
        self.number_of(&self.functions.clock_max, device, CLOCK_SM)
    }

    /// MHz.
    pub(super) fn clock_memory_max(&self, device: RawDevice) -> Answer<u32> {
        self.number_of(&self.functions.clock_max, device, CLOCK_MEMORY)
    }

    /// What holds the clocks down, as bits.
    pub(super) fn throttle_reasons(&self, device: RawDevice) -> Answer<u64> {
        let functions = &self.functions;
        let before = |newer: Refusal| self.bits(&functions.reasons_before, device).map_err(|older| newer.or(older));
        self.bits(&functions.reasons, device).or_else(before)
    }

    /// Degrees Celsius.
    pub(super) fn temperature(&self, device: RawDevice) -> Answer<i32> {
        let before = || {
            let function = &self.functions.temperature_before;
            let celsius = self.number_of(function, device, SENSOR_GPU)?;
            i32::try_from(celsius).map_err(|_| function.none())
        };
        self.temperature_now(device).or_else(|newer| before().map_err(|older| newer.or(older)))
    }

    fn temperature_now(&self, device: RawDevice) -> Answer<i32> {
        let function = &self.functions.temperature;
        let get = function.get()?;
        let mut raw = RawTemperature { version: version::<RawTemperature>(1), sensor: SENSOR_GPU, celsius: 0 };
        // SAFETY: as in `number`; the structure is that of nvml.h, of the version that it names.
        function.check(unsafe { get(device.pointer(), &raw mut raw) })?;
        Ok(raw.celsius)
    }

    /// Milliwatts.
    pub(super) fn power(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.power, device)
    }

    /// Milliwatts that it is held to.
    pub(super) fn power_limit(&self, device: RawDevice) -> Answer<u32> {
        self.number(&self.functions.power_limit, device)
    }

    /// Whether its memory corrects errors.
    pub(super) fn ecc(&self, device: RawDevice) -> Answer<bool> {
        self.first(&self.functions.ecc, device).map(|mode| mode != 0)
    }

    /// Errors that were corrected since the driver was loaded.
    pub(super) fn ecc_corrected(&self, device: RawDevice) -> Answer<u64> {
        self.ecc_errors(device, ERRORS_CORRECTED)
    }

    /// Errors that were not.
    pub(super) fn ecc_uncorrected(&self, device: RawDevice) -> Answer<u64> {
        self.ecc_errors(device, ERRORS_UNCORRECTED)
    }

    fn ecc_errors(&self, device: RawDevice, kind: c_uint) -> Answer<u64> {
        let function = &self.functions.ecc_errors;
        let get = function.get()?;
        let mut count = c_ulonglong::MAX;
        // SAFETY: as in `number_of`; one number is written to a live local.
        function.check(unsafe { get(device.pointer(), kind, VOLATILE, &raw mut count) })?;
        Some(count).filter(|count| *count != c_ulonglong::MAX).ok_or(function.none())
    }

    /// Whether it is cut up.
    pub(super) fn mig(&self, device: RawDevice) -> Answer<bool> {
        match self.first(&self.functions.mig, device) {
            // GPUs that cannot be cut up are not.
            Err(Refusal { code: Some(NOT_SUPPORTED), .. }) => Ok(false),
            mode => mode.map(|mode| mode == MIG_ON),
        }
    }

    /// Whether samples of how busy it is can be taken.
    pub(super) fn gpm_is_supported(&self, device: RawDevice) -> Answer<()> {
        let function = &self.functions.gpm_support;
        let get = function.get()?;
        let mut raw = RawSupport { version: GPM_VERSION, supported: 0 };
        // SAFETY: as in `number`; the structure is that of nvml.h, of the version that it names.
        function.check(unsafe { get(device.pointer(), &raw mut raw) })?;
        if raw.supported != 0 { Ok(()) } else { Err(function.none()) }
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        if let Ok(shutdown) = self.functions.shutdown.get() {
            // SAFETY: takes no argument; samples keep `self` alive, and devices are not used after it.
            let _ = unsafe { shutdown() };
        }
    }
}

/// The counters of one moment.
pub(super) struct Sample {
    api: Arc<Api>,
    place: RawDevice,
}

impl Sample {
    /// Takes one.
    pub(super) fn take(api: &Arc<Api>, device: RawDevice) -> Answer<Self> {
        let (alloc, sample) = (&api.functions.gpm_alloc, &api.functions.gpm_sample);
        // Without these two it could not be given back or be of any use.
        api.functions.gpm_free.get()?;
        api.functions.gpm_metrics.get()?;
        let (allocate, get) = (alloc.get()?, sample.get()?);
        let mut place = std::ptr::null_mut();
        // SAFETY: writes one pointer to a live local.
        alloc.check(unsafe { allocate(&raw mut place) })?;
        if place.is_null() {
            return Err(Refusal::code(alloc.name, UNKNOWN_ERROR));
        }
        let taken = Self { api: api.clone(), place: RawDevice(place.expose_provenance()) };
        // SAFETY: the device is as in `number`; the sample was allocated above, and nobody else has it.
        sample.check(unsafe { get(device.pointer(), place) })?;
        Ok(taken)
    }

    /// What happened between two samples: a value or none for each metric asked for.
    pub(super) fn metrics(before: &Self, after: &Self, ids: &[u32]) -> Answer<Vec<Option<f64>>> {
        let function = &before.api.functions.gpm_metrics;
        let get = function.get()?;
        let none = RawMetric { id: 0, code: UNKNOWN_ERROR, value: 0.0, names: [std::ptr::null(); 3] };
        let mut request = Box::new(RawRequest {
            version: GPM_VERSION,
            count: ids.len().min(METRICS_ROOM) as c_uint,
            before: before.place.pointer(),
            after: after.place.pointer(),
            metrics: [none; METRICS_ROOM],
        });
        for (metric, id) in request.metrics.iter_mut().zip(ids) {
            metric.id = *id;
        }
        // SAFETY: the structure is that of nvml.h, with room for more metrics than it has there; both samples live, and
        // are of this library.
        function.check(unsafe { get(&raw mut *request) })?;
        let value = |metric: &RawMetric| {
            (metric.code == SUCCESS && metric.value.is_finite() && metric.value >= 0.0).then_some(metric.value)
        };
        Ok(request.metrics.iter().take(ids.len()).map(value).collect())
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if let Ok(free) = self.api.functions.gpm_free.get() {
            // SAFETY: it was allocated by this library and is not used any more.
            let _ = unsafe { free(self.place.pointer()) };
        }
    }
}

/// Up to the first zero, or all of it.
fn text(bytes: &[u8]) -> String {
    let until = CStr::from_bytes_until_nul(bytes).map_or(bytes, CStr::to_bytes);
    String::from_utf8_lossy(until).trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_structures_have_the_layout_of_nvml_h() {
        // As a C compiler gives them for the headers of 11.8 and 13.5.
        assert_eq!(size_of::<RawUtilisation>(), 8);
        assert_eq!((size_of::<RawMemory1>(), offset_of!(RawMemory1, used)), (24, 16));
        let memory = [offset_of!(RawMemory2, total), offset_of!(RawMemory2, reserved), offset_of!(RawMemory2, used)];
        assert_eq!((size_of::<RawMemory2>(), memory), (40, [8, 16, 32]));
        assert_eq!((size_of::<RawTemperature>(), offset_of!(RawTemperature, celsius)), (12, 8));
        assert_eq!(size_of::<RawSupport>(), 8);
        let metric = [offset_of!(RawMetric, code), offset_of!(RawMetric, value), offset_of!(RawMetric, names)];
        assert_eq!((size_of::<RawMetric>(), metric), (40, [4, 8, 16]));
        assert_eq!((offset_of!(RawRequest, before), offset_of!(RawRequest, metrics)), (8, 24));
        assert!(size_of::<RawRequest>() >= 19_104);
        assert_eq!((version::<RawMemory2>(2), version::<RawTemperature>(1)), (0x0200_0028, 0x0100_000c));
    }

    #[test]
    fn a_text_ends_at_its_zero_or_at_the_end_of_the_room() {
        for (bytes, expected) in [(&b"H200\0junk"[..], "H200"), (b"", ""), (b"\0", ""), (b"full", "full")] {
            assert_eq!(text(bytes), expected);
        }
        assert_eq!(text(b"\xff\0"), "\u{fffd}");
    }
}
