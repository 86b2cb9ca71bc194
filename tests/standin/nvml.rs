//! A stand-in for libnvidia-ml.so.1: the functions that feedline uses, over values that tests set.
//!
//! ```text
//! nvmlDeviceGet…(handle, …) ──► initialised? ──► fault for this function? ──► the GPU's value
//! ```
//!
//! What a correct caller never does is kept as a *violation*, and fails: calls before `nvmlInit_v2` or after the last
//! `nvmlShutdown`, handles and samples that are not its own, metrics of samples in the wrong order.
//!
//! One file, `std` only: `rustc --crate-type cdylib`. `standin_nvml_*` control it; tests/common/nvml.rs wraps them. Two
//! copies of the file are two libraries, each with a state of its own.

#![deny(unsafe_op_in_unsafe_fn)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, PoisonError};

const UNINITIALIZED: c_int = 1;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const NOT_FOUND: c_int = 6;
const VERSION_MISMATCH: c_int = 25;
const VALUES: usize = 32;
/// Metrics of this library's `nvmlGpmMetricsGet_t`.
const METRICS: usize = 98;

/// `nvmlGpmMetric_t`.
#[repr(C)]
pub struct Metric {
    id: c_uint,
    code: c_int,
    value: f64,
    names: [*const c_char; 3],
}

/// The head of `nvmlGpmMetricsGet_t`; as many metrics follow as it says.
#[repr(C)]
pub struct Request {
    version: c_uint,
    count: c_uint,
    before: *mut c_void,
    after: *mut c_void,
}

struct Gpu {
    /// Domain, bus, device.
    place: [u32; 3],
    name: Vec<u8>,
    values: [i64; VALUES],
    metrics: HashMap<u32, (f64, c_int)>,
}

struct State {
    users: i64,
    gpus: Vec<Gpu>,
    driver: Vec<u8>,
    faults: HashMap<String, c_int>,
    /// Samples that are allocated, and when each was taken.
    samples: BTreeMap<usize, i64>,
    ticks: i64,
    calls: i64,
    violations: Vec<String>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn fresh() -> State {
    State {
        users: 0,
        gpus: Vec::new(),
        driver: b"580.65.06".to_vec(),
        faults: HashMap::new(),
        samples: BTreeMap::new(),
        ticks: 0,
        calls: 0,
        violations: Vec::new(),
    }
}

fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    work(STATE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(fresh))
}

const HANDLE: usize = 0x6b0_0000;
const SAMPLE: usize = 0x5a0_0000;

impl State {
    /// Counts the call; its code if it fails whatever it is asked.
    fn enter(&mut self, call: &str) -> Result<(), c_int> {
        self.calls += 1;
        if self.users <= 0 && call != "nvmlInit_v2" {
            self.violations.push(format!("{call} before nvmlInit_v2"));
            return Err(UNINITIALIZED);
        }
        self.faults.get(call).map_or(Ok(()), |code| Err(*code))
    }

    fn gpu(&mut self, call: &str, handle: *mut c_void) -> Result<&mut Gpu, c_int> {
        self.enter(call)?;
        let index = handle.addr().wrapping_sub(HANDLE + 1);
        if index >= self.gpus.len() {
            self.violations.push(format!("{call}: no such device"));
            return Err(INVALID_ARGUMENT);
        }
        Ok(&mut self.gpus[index])
    }

    fn violation(&mut self, what: String) -> c_int {
        self.violations.push(what);
        INVALID_ARGUMENT
    }
}

impl Gpu {
    fn value(&self, what: usize) -> Result<i64, c_int> {
        // What it does not support.
        if self.values[what] == i64::MIN { Err(NOT_SUPPORTED) } else { Ok(self.values[what]) }
    }
}

fn code(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// # Safety
///
/// `out` is null or may be written to.
unsafe fn write<T>(out: *mut T, value: T) -> Result<(), c_int> {
    if out.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: as the caller promises.
    unsafe { out.write(value) };
    Ok(())
}

/// # Safety
///
/// `out` may be written to for `room` bytes.
unsafe fn write_text(out: *mut c_char, room: c_uint, text: &[u8]) -> Result<(), c_int> {
    if text.len() >= room as usize {
        return Err(7);
    }
    // SAFETY: as the caller promises.
    unsafe {
        out.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    with(|state| {
        let result = state.enter("nvmlInit_v2");
        state.users += i64::from(result.is_ok());
        code(result)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    with(|state| {
        let result = state.enter("nvmlShutdown");
        if state.users == 1 && !state.samples.is_empty() {
            let left = state.samples.len();
            state.violations.push(format!("nvmlShutdown with {left} samples"));
        }
        // It no longer counts this user, whatever it answers.
        state.users -= i64::from(state.users > 0);
        code(result)
    })
}

/// # Safety
///
/// `out` may be written to for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(out: *mut c_char, room: c_uint) -> c_int {
    // SAFETY: as the caller promises.
    with(|state| {
        code(state.enter("nvmlSystemGetDriverVersion").and_then(|()| unsafe { write_text(out, room, &state.driver) }))
    })
}

/// # Safety
///
/// `id` is a text that ends with a zero, `device` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, device: *mut *mut c_void) -> c_int {
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(id) }.to_string_lossy().into_owned();
    let number = |digits: Option<&str>| digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
    let mut parts = text.split([':', '.']);
    let place = [number(parts.next()), number(parts.next()), number(parts.next())];
    with(|state| {
        let found = state.enter("nvmlDeviceGetHandleByPciBusId_v2").and_then(|()| {
            let index = state.gpus.iter().position(|gpu| gpu.place.map(Some) == place).ok_or(NOT_FOUND)?;
            // SAFETY: as the caller promises.
            unsafe { write(device, std::ptr::without_provenance_mut(HANDLE + 1 + index)) }
        });
        code(found)
    })
}

/// # Safety
///
/// `out` may be written to for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: *mut c_void, out: *mut c_char, room: c_uint) -> c_int {
    // SAFETY: as the caller promises.
    with(|state| {
        code(state.gpu("nvmlDeviceGetName", device).and_then(|gpu| unsafe { write_text(out, room, &gpu.name) }))
    })
}

macro_rules! numbers {
    ($($name:ident $what:literal;)*) => {
        $(
            /// # Safety
            ///
            /// `out` may be written to.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(device: *mut c_void, out: *mut c_uint) -> c_int {
                with(|state| {
                    let value = state.gpu(stringify!($name), device).and_then(|gpu| gpu.value($what));
                    // SAFETY: as the caller promises.
                    code(value.and_then(|value| unsafe { write(out, value as c_uint) }))
                })
            }
        )*
    };
}

numbers! {
    nvmlDeviceGetCurrPcieLinkGeneration 5;
    nvmlDeviceGetMaxPcieLinkGeneration 6;
    nvmlDeviceGetGpuMaxPcieLinkGeneration 7;
    nvmlDeviceGetCurrPcieLinkWidth 8;
    nvmlDeviceGetMaxPcieLinkWidth 9;
    nvmlDeviceGetPcieReplayCounter 12;
    nvmlDeviceGetPowerUsage 19;
    nvmlDeviceGetEnforcedPowerLimit 20;
}

macro_rules! chosen {
    ($($name:ident [$($id:literal => $what:literal),*];)*) => {
        $(
            /// # Safety
            ///
            /// `out` may be written to.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(device: *mut c_void, id: c_uint, out: *mut c_uint) -> c_int {
                with(|state| {
                    let value = state.gpu(stringify!($name), device).and_then(|gpu| match id {
                        $($id => gpu.value($what),)*
                        _ => Err(INVALID_ARGUMENT),
                    });
                    // SAFETY: as the caller promises.
                    code(value.and_then(|value| unsafe { write(out, value as c_uint) }))
                })
            }
        )*
    };
}

chosen! {
    nvmlDeviceGetPcieThroughput [0 => 10, 1 => 11];
    nvmlDeviceGetClockInfo [1 => 13, 2 => 14];
    nvmlDeviceGetMaxClockInfo [1 => 15, 2 => 16];
    nvmlDeviceGetTemperature [0 => 18];
}

macro_rules! pairs {
    ($($name:ident $what:literal $pending:literal;)*) => {
        $(
            /// # Safety
            ///
            /// Both may be written to.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(device: *mut c_void, now: *mut c_uint, pending: *mut c_uint) -> c_int {
                with(|state| {
                    let value = state.gpu(stringify!($name), device).and_then(|gpu| Ok((gpu.value($what)?, gpu.values[$pending])));
                    code(value.and_then(|(value, other)| {
                        // SAFETY: as the caller promises.
                        unsafe { write(now, value as c_uint).and_then(|()| write(pending, other as c_uint)) }
                    }))
                })
            }
        )*
    };
}

pairs! {
    nvmlDeviceGetEccMode 21 28;
    nvmlDeviceGetMigMode 24 29;
}

macro_rules! bits {
    ($($name:ident)*) => {
        $(
            /// # Safety
            ///
            /// `out` may be written to.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(device: *mut c_void, out: *mut c_ulonglong) -> c_int {
                with(|state| {
                    let value = state.gpu(stringify!($name), device).and_then(|gpu| gpu.value(17));
                    // SAFETY: as the caller promises.
                    code(value.and_then(|value| unsafe { write(out, value as c_ulonglong) }))
                })
            }
        )*
    };
}

bits! { nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons }

/// # Safety
///
/// `out` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(device: *mut c_void, out: *mut [c_uint; 2]) -> c_int {
    with(|state| {
        let value = state.gpu("nvmlDeviceGetUtilizationRates", device).and_then(|gpu| match gpu.values[24] {
            1 => Err(NOT_SUPPORTED),
            _ => Ok([gpu.value(0)? as c_uint, gpu.value(1)? as c_uint]),
        });
        // SAFETY: as the caller promises.
        code(value.and_then(|value| unsafe { write(out, value) }))
    })
}

/// # Safety
///
/// `out` may be written to: 5 numbers of 8 bytes, of which the first begins with the version.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: *mut c_void, out: *mut c_ulonglong) -> c_int {
    // SAFETY: as the caller promises.
    let version = unsafe { out.cast::<c_uint>().read() };
    with(|state| {
        let value = state.gpu("nvmlDeviceGetMemoryInfo_v2", device).and_then(|gpu| {
            let [total, used, reserved] = [gpu.value(2)?, gpu.value(3)?, gpu.value(4)?];
            Ok([total, reserved, total.wrapping_sub(reserved).wrapping_sub(used), used]
                .map(|value| value as c_ulonglong))
        });
        let checked = value.and_then(|value| if version == 0x0200_0028 { Ok(value) } else { Err(VERSION_MISMATCH) });
        // SAFETY: as the caller promises.
        code(checked.and_then(|value| unsafe { write(out.add(1).cast(), value) }))
    })
}

/// # Safety
///
/// `out` may be written to: total, free, used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: *mut c_void, out: *mut [c_ulonglong; 3]) -> c_int {
    with(|state| {
        let value = state.gpu("nvmlDeviceGetMemoryInfo", device).and_then(|gpu| {
            let (total, used) = (gpu.value(2)?, gpu.value(3)?.wrapping_add(gpu.value(4)?));
            Ok([total, total.wrapping_sub(used), used].map(|value| value as c_ulonglong))
        });
        // SAFETY: as the caller promises.
        code(value.and_then(|value| unsafe { write(out, value) }))
    })
}

/// # Safety
///
/// `out` may be read and written to: version, sensor, value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperatureV(device: *mut c_void, out: *mut [c_int; 3]) -> c_int {
    // SAFETY: as the caller promises.
    let [version, sensor, _] = unsafe { out.read() };
    with(|state| {
        let value = state.gpu("nvmlDeviceGetTemperatureV", device).and_then(|gpu| match (version, sensor) {
            (0x0100_000c, 0) => gpu.value(18),
            (0x0100_000c, _) => Err(INVALID_ARGUMENT),
            _ => Err(VERSION_MISMATCH),
        });
        // SAFETY: as the caller promises.
        code(value.and_then(|value| unsafe { write(out, [version, sensor, value as c_int]) }))
    })
}

/// # Safety
///
/// `out` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: *mut c_void,
    kind: c_uint,
    counter: c_uint,
    out: *mut c_ulonglong,
) -> c_int {
    with(|state| {
        let value = state.gpu("nvmlDeviceGetTotalEccErrors", device).and_then(|gpu| match (kind, counter) {
            (0, 0) => gpu.value(22),
            (1, 0) => gpu.value(23),
            _ => Err(INVALID_ARGUMENT),
        });
        // SAFETY: as the caller promises.
        code(value.and_then(|value| unsafe { write(out, value as c_ulonglong) }))
    })
}

// GPM.

/// # Safety
///
/// `out` may be read and written to: version, answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmQueryDeviceSupport(device: *mut c_void, out: *mut [c_uint; 2]) -> c_int {
    // SAFETY: as the caller promises.
    let [version, _] = unsafe { out.read() };
    with(|state| {
        let value = state.gpu("nvmlGpmQueryDeviceSupport", device).and_then(|gpu| gpu.value(25));
        let checked = value.and_then(|value| if version == 1 { Ok(value) } else { Err(VERSION_MISMATCH) });
        // SAFETY: as the caller promises.
        code(checked.and_then(|value| unsafe { write(out, [version, value as c_uint]) }))
    })
}

/// # Safety
///
/// `out` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmSampleAlloc(out: *mut *mut c_void) -> c_int {
    with(|state| {
        let place = state.enter("nvmlGpmSampleAlloc").and_then(|()| {
            state.ticks += 1;
            let place = SAMPLE + state.ticks as usize * 16;
            state.samples.insert(place, 0);
            // SAFETY: as the caller promises.
            unsafe { write(out, std::ptr::without_provenance_mut(place)) }
        });
        code(place)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleFree(sample: *mut c_void) -> c_int {
    with(|state| {
        let entered = state.enter("nvmlGpmSampleFree");
        if state.samples.remove(&sample.addr()).is_none() {
            return state.violation("nvmlGpmSampleFree: not a sample".into());
        }
        code(entered)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleGet(device: *mut c_void, sample: *mut c_void) -> c_int {
    with(|state| {
        let mig = match state.gpu("nvmlGpmSampleGet", device) {
            Ok(gpu) => gpu.values[24],
            Err(code) => return code,
        };
        state.ticks += 1;
        let now = state.ticks;
        match state.samples.get_mut(&sample.addr()) {
            None => state.violation("nvmlGpmSampleGet: not a sample".into()),
            Some(_) if mig == 1 => NOT_SUPPORTED,
            Some(taken) => {
                *taken = now;
                0
            }
        }
    })
}

/// # Safety
///
/// `request` may be written to, with as many metrics behind its head as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpmMetricsGet(request: *mut Request) -> c_int {
    // SAFETY: as the caller promises.
    let (head, metrics) = unsafe { (&*request, request.add(1).cast::<Metric>()) };
    with(|state| {
        if let Err(code) = state.enter("nvmlGpmMetricsGet") {
            return code;
        }
        let taken = [head.before, head.after].map(|sample| state.samples.get(&sample.addr()).copied().unwrap_or(0));
        match () {
            () if head.version != 1 => return VERSION_MISMATCH,
            () if head.count as usize > METRICS => return state.violation("more metrics than there are".into()),
            () if taken[0] <= 0 || taken[0] >= taken[1] => return state.violation(format!("samples of {taken:?}")),
            () => {}
        }
        for index in 0..head.count as usize {
            // SAFETY: as the caller promises.
            let metric = unsafe { &mut *metrics.add(index) };
            let gpu = state.gpus.first();
            let (value, code) =
                gpu.and_then(|gpu| gpu.metrics.get(&metric.id)).copied().unwrap_or((-1.0, NOT_SUPPORTED));
            (metric.value, metric.code) = (value, code);
            metric.names = [c"name".as_ptr(); 3];
        }
        0
    })
}

// Control.

/// As new: no GPU, nobody uses it.
#[unsafe(no_mangle)]
pub extern "C" fn standin_nvml_reset() {
    with(|state| *state = fresh());
}

/// One more GPU, at that place; its values are what it does not support until they are set. Returns its index.
#[unsafe(no_mangle)]
pub extern "C" fn standin_nvml_gpu(domain: c_uint, bus: c_uint, device: c_uint) -> c_int {
    with(|state| {
        let gpu =
            Gpu { place: [domain, bus, device], name: Vec::new(), values: [i64::MIN; VALUES], metrics: HashMap::new() };
        state.gpus.push(gpu);
        state.gpus.len() as c_int - 1
    })
}

/// 0 utilisation · 1 of the memory · 2 memory · 3 in use · 4 kept by the driver · 5 generation · 6 of the slot · 7 of the
/// card · 8 lanes · 9 at most · 10 KB/s from the GPU · 11 to it · 12 replays · 13 SM clock · 14 of the memory · 15, 16 at
/// most · 17 reasons · 18 temperature · 19 mW · 20 limit · 21 ECC · 22 corrected · 23 uncorrected · 24 MIG · 25 GPM ·
/// 28 ECC from the next start on · 29 MIG from then on.
#[unsafe(no_mangle)]
pub extern "C" fn standin_nvml_set(gpu: c_int, what: c_int, value: i64) {
    with(|state| match state.gpus.get_mut(gpu as usize).and_then(|gpu| gpu.values.get_mut(what as usize)) {
        Some(place) => *place = value,
        None => state.violations.push(format!("no value {what} of GPU {gpu}")),
    });
}

/// A metric of the first GPU: its value and its own code.
#[unsafe(no_mangle)]
pub extern "C" fn standin_nvml_metric(id: c_uint, value: f64, code: c_int) {
    with(|state| {
        if let Some(gpu) = state.gpus.first_mut() {
            gpu.metrics.insert(id, (value, code));
        }
    });
}

/// The name of a GPU; of the driver, where there is no such GPU.
///
/// # Safety
///
/// `text` may be read for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_nvml_name(gpu: c_int, text: *const u8, len: usize) {
    // SAFETY: as the caller promises.
    let text = unsafe { std::slice::from_raw_parts(text, len) }.to_vec();
    with(|state| match state.gpus.get_mut(gpu as usize) {
        Some(gpu) => gpu.name = text,
        None => state.driver = text,
    });
}

/// The function of that name answers this code from now on; 0: as it should.
///
/// # Safety
///
/// `name` may be read for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_nvml_fail(name: *const u8, len: usize, code: c_int) {
    // SAFETY: as the caller promises.
    let name = String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(name, len) }).into_owned();
    with(|state| match code {
        0 => state.faults.remove(&name),
        code => state.faults.insert(name, code),
    });
}

/// 0 users · 1 samples · 2 calls.
#[unsafe(no_mangle)]
pub extern "C" fn standin_nvml_count(what: c_int) -> i64 {
    with(|state| match what {
        0 => state.users,
        1 => state.samples.len() as i64,
        2 => state.calls,
        _ => -1,
    })
}

/// Copies the violations so far, a line each, and returns their length; longer than `room`: cut.
///
/// # Safety
///
/// `text` may be written to for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_nvml_violations(text: *mut u8, room: usize) -> usize {
    let lines = with(|state| state.violations.join("\n"));
    let len = lines.len().min(room);
    // SAFETY: as the caller promises.
    unsafe { text.copy_from_nonoverlapping(lines.as_ptr(), len) };
    len
}
