//! A GPU in virtual time behind the driver's symbol table, for tests of the pipeline. Copies
//! nothing, reserves nothing.
//!
//! ```text
//! an operation begins at max(now, end of the stream's last one, events that the stream waits for, copy engine free)
//! an operation ends   at begin + duration
//! an event is reached at max(now, end of the stream's last operation) as of its record
//! ```
//!
//! The host enqueues operations in order, and a stream can wait only for events recorded earlier.
//! So each end is known at enqueue time: the GPU is a calculation without threads. The thread that
//! advances time calls the due host functions.
//!
//! Limits: one copy engine; kernels of different streams do not compete.

use super::{Driver, Gpu, Handle, NOT_READY, SUCCESS, Symbols};
use crate::backend::DevicePtr;
use crate::stream::LEGACY;
use feedline_base::sync::Hold;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID: c_int = 1;
/// A GPU's context is a multiple of this, and its other handles are larger.
const CONTEXTS: usize = 1 << 32;

/// Begin and end, in nanoseconds of virtual time.
pub(crate) type SimulatedSpan = (u64, u64);

/// A GPU on a virtual clock.
pub struct Simulated {
    now: Arc<AtomicU64>,
    ordinal: usize,
    state: Mutex<DriverState>,
}

struct DriverState {
    /// End of each stream's last operation, by handle. The default stream always exists.
    streams: HashMap<Handle, u64>,
    /// Time of each event.
    events: HashMap<Handle, u64>,
    handles: usize,
    /// End of the device addresses handed out so far.
    memory: DevicePtr,
    engine_free: u64,
    /// Duration of the n-th copy.
    copy_ns: Box<dyn Fn(u64) -> u64 + Send>,
    /// Duration of each of the loader's kernels.
    kernel_ns: u64,
    copies: Vec<SimulatedSpan>,
    kernels: Vec<SimulatedSpan>,
    callbacks: Vec<Callback>,
}

struct Callback {
    due: u64,
    call: unsafe extern "C" fn(*mut c_void),
    data: usize,
}

impl DriverState {
    /// Appends an operation to a stream; returns its begin and end.
    fn run(&mut self, stream: Handle, now: u64, ns: u64) -> Option<SimulatedSpan> {
        let end = self.streams.get_mut(&stream)?;
        let begin = now.max(*end);
        *end = begin + ns;
        Some((begin, *end))
    }

    fn copy(&mut self, stream: Handle, now: u64) -> Option<()> {
        let ns = (self.copy_ns)(self.copies.len() as u64);
        let span = self.run(stream, now.max(self.engine_free), ns)?;
        self.engine_free = span.1;
        self.copies.push(span);
        Some(())
    }

    fn handle(&mut self, ordinal: usize) -> Handle {
        self.handles += 1;
        (ordinal + 1) * CONTEXTS + self.handles
    }
}

impl Simulated {
    /// A new GPU, and the loader's handle to it.
    pub fn new(
        now: Arc<AtomicU64>,
        copy_ns: impl Fn(u64) -> u64 + Send + 'static,
    ) -> (Arc<Self>, Arc<Gpu>) {
        let state = DriverState {
            streams: HashMap::from([(LEGACY, 0)]),
            events: HashMap::new(),
            handles: 0,
            memory: 1 << 20,
            engine_free: 0,
            copy_ns: Box::new(copy_ns),
            kernel_ns: 0,
            copies: Vec::new(),
            kernels: Vec::new(),
            callbacks: Vec::new(),
        };
        let simulated = {
            let mut all = all();
            let simulated = Arc::new(Self {
                now,
                ordinal: all.len(),
                state: Mutex::new(state),
            });
            all.push(simulated.clone());
            simulated
        };
        let gpu = Gpu::primary(driver(), simulated.ordinal).expect("the table has what this needs");
        (simulated, gpu)
    }

    fn lock(&self) -> MutexGuard<'_, DriverState> {
        self.state.hold()
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    /// A stream for the consumer.
    pub fn stream(&self) -> Handle {
        let mut state = self.lock();
        let stream = state.handle(self.ordinal);
        state.streams.insert(stream, 0);
        stream
    }

    /// Enqueues a kernel of `ns` on a stream; returns its end.
    pub fn launch(&self, stream: Handle, ns: u64) -> u64 {
        let mut state = self.lock();
        let span = state
            .run(stream, self.now(), ns)
            .expect("a stream of this GPU");
        state.kernels.push(span);
        span.1
    }

    /// Sets the duration of the loader's kernels from now on.
    pub fn kernels_take(&self, ns: u64) {
        self.lock().kernel_ns = ns;
    }

    /// Intervals of the enqueued copies on the bus.
    pub fn copies(&self) -> Vec<SimulatedSpan> {
        self.lock().copies.clone()
    }

    /// Number of enqueued copies.
    pub fn copied(&self) -> u64 {
        self.lock().copies.len() as u64
    }

    /// Intervals of kernels.
    pub fn kernels(&self) -> Vec<SimulatedSpan> {
        self.lock().kernels.clone()
    }

    /// Time at which the next host function is due.
    pub fn due(&self) -> Option<u64> {
        self.lock()
            .callbacks
            .iter()
            .map(|callback| callback.due)
            .min()
    }

    /// Calls the host functions due at `now`.
    pub fn call(&self, now: u64) {
        let due: Vec<_> = self
            .lock()
            .callbacks
            .extract_if(.., |callback| callback.due <= now)
            .collect();
        for Callback { call, data, .. } in due {
            // SAFETY: the arguments of `cuLaunchHostFunc`, used once.
            unsafe { call(data as *mut c_void) };
        }
    }
}

/// All GPUs, indexed by ordinal.
fn all() -> MutexGuard<'static, Vec<Arc<Simulated>>> {
    static ALL: Mutex<Vec<Arc<Simulated>>> = Mutex::new(Vec::new());
    ALL.hold()
}

thread_local! {
    static CONTEXT: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// Acts on the GPU of the handle. Without a handle, it is the current GPU.
fn with<T>(
    handle: Handle,
    act: impl FnOnce(&Simulated, &mut DriverState) -> Option<T>,
) -> Option<T> {
    let handle = if handle < CONTEXTS {
        CONTEXT.with_borrow(|stack| stack.last().copied())?
    } else {
        handle
    };
    let simulated = all().get((handle / CONTEXTS).checked_sub(1)?)?.clone();
    let mut state = simulated.lock();
    act(&simulated, &mut state)
}

fn code(done: Option<()>) -> c_int {
    if done.is_some() { SUCCESS } else { INVALID }
}

fn give<T>(to: *mut T, value: Option<T>) -> c_int {
    code(value.map(|value| {
        // SAFETY: every caller passes a pointer that is valid for the call, as the driver API
        // requires.
        unsafe { to.write(value) }
    }))
}

/// The driver of these GPUs.
fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| Driver {
        symbols: symbols(),
        version: 12_080,
        devices: c_int::MAX,
    })
}

fn symbols() -> Symbols {
    Symbols {
        device_get,
        device_name,
        primary_retain,
        primary_release,
        ctx_push,
        ctx_pop,
        ctx_synchronize,
        stream_priorities,
        stream_create,
        stream_destroy,
        stream_synchronize,
        stream_wait,
        stream_ctx,
        stream_capturing,
        exchange_mode,
        event_create,
        event_record,
        event_query,
        event_synchronize,
        event_elapsed,
        event_destroy,
        mem_alloc,
        mem_free,
        host_register,
        host_unregister,
        copy_to_device,
        fill,
        host_func,
        module_load,
        module_unload,
        module_function,
        launch,
        ..Symbols::unsupported()
    }
}

extern "C" fn device_get(device: *mut c_int, ordinal: c_int) -> c_int {
    give(device, Some(ordinal))
}

extern "C" fn device_name(name: *mut c_char, len: c_int, _: c_int) -> c_int {
    let text = b"simulated\0".map(|byte| byte as c_char);
    assert!(len as usize >= text.len());
    give(name.cast(), Some(text))
}

extern "C" fn primary_retain(context: *mut Handle, device: c_int) -> c_int {
    give(context, Some((device as usize + 1) * CONTEXTS))
}

extern "C" fn primary_release(_: c_int) -> c_int {
    SUCCESS
}

extern "C" fn ctx_push(context: Handle) -> c_int {
    CONTEXT.with_borrow_mut(|stack| stack.push(context));
    SUCCESS
}

extern "C" fn ctx_pop(context: *mut Handle) -> c_int {
    give(context, CONTEXT.with_borrow_mut(Vec::pop))
}

/// Called only at shutdown: no work really uses memory.
extern "C" fn ctx_synchronize() -> c_int {
    SUCCESS
}

extern "C" fn stream_priorities(least: *mut c_int, greatest: *mut c_int) -> c_int {
    give(least, Some(0)).max(give(greatest, Some(0)))
}

extern "C" fn stream_create(stream: *mut Handle, _: c_uint, _: c_int) -> c_int {
    give(
        stream,
        with(0, |gpu, state| {
            let made = state.handle(gpu.ordinal);
            state.streams.insert(made, 0);
            Some(made)
        }),
    )
}

extern "C" fn stream_destroy(stream: Handle) -> c_int {
    code(with(stream, |_, state| {
        state.streams.remove(&stream).map(drop)
    }))
}

/// As `ctx_synchronize`.
extern "C" fn stream_synchronize(_: Handle) -> c_int {
    SUCCESS
}

extern "C" fn stream_wait(stream: Handle, event: Handle, _: c_uint) -> c_int {
    code(with(event, |_, state| {
        let reached = *state.events.get(&event)?;
        let end = state.streams.get_mut(&stream)?;
        *end = reached.max(*end);
        Some(())
    }))
}

extern "C" fn stream_ctx(stream: Handle, context: *mut Handle) -> c_int {
    give(context, Some(stream / CONTEXTS * CONTEXTS))
}

/// Nothing is captured here.
extern "C" fn stream_capturing(_: Handle, status: *mut c_uint) -> c_int {
    give(status, Some(0))
}

extern "C" fn exchange_mode(_: *mut c_uint) -> c_int {
    SUCCESS
}

extern "C" fn event_create(event: *mut Handle, _: c_uint) -> c_int {
    give(
        event,
        with(0, |gpu, state| {
            let made = state.handle(gpu.ordinal);
            state.events.insert(made, 0);
            Some(made)
        }),
    )
}

extern "C" fn event_record(event: Handle, stream: Handle) -> c_int {
    code(with(event, |gpu, state| {
        let reached = gpu.now().max(*state.streams.get(&stream)?);
        state.events.insert(event, reached);
        Some(())
    }))
}

extern "C" fn event_query(event: Handle) -> c_int {
    let done = with(event, |gpu, state| {
        Some(*state.events.get(&event)? <= gpu.now())
    });
    match done {
        Some(true) => SUCCESS,
        Some(false) => NOT_READY,
        None => INVALID,
    }
}

/// As `ctx_synchronize`.
extern "C" fn event_synchronize(_: Handle) -> c_int {
    SUCCESS
}

extern "C" fn event_elapsed(ms: *mut f32, from: Handle, to: Handle) -> c_int {
    give(
        ms,
        with(from, |_, state| {
            let from = *state.events.get(&from)?;
            let to = *state.events.get(&to)?;
            Some(((to as f64 - from as f64) / 1e6) as f32)
        }),
    )
}

extern "C" fn event_destroy(event: Handle) -> c_int {
    code(with(event, |_, state| {
        state.events.remove(&event).map(drop)
    }))
}

extern "C" fn mem_alloc(ptr: *mut DevicePtr, bytes: usize) -> c_int {
    give(
        ptr,
        with(0, |_, state| {
            let given = state.memory;
            state.memory = (given + bytes as DevicePtr).next_multiple_of(512);
            Some(given)
        }),
    )
}

extern "C" fn mem_free(_: DevicePtr) -> c_int {
    SUCCESS
}

extern "C" fn host_register(_: *mut c_void, _: usize, _: c_uint) -> c_int {
    SUCCESS
}

extern "C" fn host_unregister(_: *mut c_void) -> c_int {
    SUCCESS
}

extern "C" fn copy_to_device(_: DevicePtr, _: *const c_void, _: usize, stream: Handle) -> c_int {
    code(with(stream, |gpu, state| state.copy(stream, gpu.now())))
}

extern "C" fn fill(_: DevicePtr, _: u8, _: usize, stream: Handle) -> c_int {
    code(with(stream, |gpu, state| {
        state.run(stream, gpu.now(), 0).map(drop)
    }))
}

/// Any module has any function.
extern "C" fn module_load(module: *mut Handle, _: *const c_void) -> c_int {
    give(module, Some(1))
}

extern "C" fn module_unload(_: Handle) -> c_int {
    SUCCESS
}

extern "C" fn module_function(function: *mut Handle, _: Handle, _: *const c_char) -> c_int {
    give(function, Some(1))
}

extern "C" fn launch(
    _: Handle,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    stream: Handle,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> c_int {
    code(with(stream, |gpu, state| {
        let span = state.run(stream, gpu.now(), state.kernel_ns)?;
        state.kernels.push(span);
        Some(())
    }))
}

extern "C" fn host_func(
    stream: Handle,
    call: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> c_int {
    code(with(stream, |gpu, state| {
        let (due, _) = state.run(stream, gpu.now(), 0)?;
        state.callbacks.push(Callback {
            due,
            call,
            data: data as usize,
        });
        Some(())
    }))
}
