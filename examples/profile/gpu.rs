//! The training step on a GPU: a kernel of the step's length, on its own stream, to which the
//! batches are bound.
//!
//! ```text
//! CPU      next() ─► launch ─► drop ─► next() ─► launch ─► drop ─► …       never waits for the GPU
//! stream   ──(copy arrived)──[ step ]──(copy arrived)──[ step ]── …
//!                                   ▲ first event              ▲ last event, waited for at the end of the run
//! ```
//!
//! Limits: one kernel of one thread represents the step, so the bus and the GPU's memory are less
//! busy than in training. Used only with a present [`Device`](feedline::Device): without a driver
//! nothing here is called.

#![allow(unsafe_code)]

use crate::step::Stretch;
use feedline::Batch;
use feedline::device::cuda::cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};
use std::error::Error;
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::time::Duration;

/// The kernel as PTX text, which the driver compiles.
const PTX: &str = concat!(include_str!("step.ptx"), "\0");
const NAME: &CStr = c"feedline_profile_step";

/// A step on a GPU.
pub struct GpuStep {
    stream: Arc<CudaStream>,
    kernel: Kernel,
    nanoseconds: u64,
    taken: u64,
    first: CudaEvent,
    last: CudaEvent,
}

impl GpuStep {
    /// Errors: driver failures.
    pub fn new(ordinal: usize, length: Duration) -> Result<Self, Box<dyn Error>> {
        let context = CudaContext::new(ordinal)?;
        let stream = context.new_stream()?;
        let kernel = Kernel::load(&context)?;
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let nanoseconds = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        Ok(Self {
            first: event()?,
            last: event()?,
            stream,
            kernel,
            nanoseconds,
            taken: 0,
        })
    }

    /// The stream of the steps.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Enqueues a step on the batch, which may then be dropped: its memory is reused after the
    /// step.
    pub fn take(&mut self, batch: Batch) -> Result<(), Box<dyn Error>> {
        if self.nanoseconds > 0 {
            self.kernel.launch(&self.stream, self.nanoseconds)?;
        }
        if self.taken == 0 {
            self.first.record(&self.stream)?;
        }
        self.taken += 1;
        drop(batch);
        Ok(())
    }

    /// Waits for the last step.
    pub fn end(self) -> Result<Stretch, Box<dyn Error>> {
        self.last.record(&self.stream)?;
        self.last.synchronize()?;
        let steps = self.taken.saturating_sub(1);
        // Without a step the first event was never recorded.
        let ms = if steps == 0 {
            0.0
        } else {
            self.first.elapsed_ms(&self.last)?
        };
        Ok(Stretch {
            steps,
            seconds: f64::from(ms) / 1e3,
        })
    }
}

impl Drop for GpuStep {
    fn drop(&mut self) {
        // The kernel's code must stay until the last step has ended; after an error there is no
        // better way.
        let _ = self.stream.synchronize();
    }
}

/// The loaded module and its function.
struct Kernel {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    function: sys::CUfunction,
}

impl Kernel {
    fn load(context: &Arc<CudaContext>) -> Result<Self, Box<dyn Error>> {
        context.bind_to_thread()?;
        // SAFETY: the text ends with a NUL, and is static.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast::<c_void>()) }?;
        let mut kernel = Self {
            context: context.clone(),
            module,
            function: std::ptr::null_mut(),
        };
        // SAFETY: the module was just loaded, and is unloaded when `kernel` is dropped.
        kernel.function = unsafe { result::module::get_function(module, CString::from(NAME)) }?;
        Ok(kernel)
    }

    fn launch(&self, stream: &CudaStream, mut nanoseconds: u64) -> Result<(), Box<dyn Error>> {
        self.context.bind_to_thread()?;
        let mut params = [(&raw mut nanoseconds).cast::<c_void>()];
        // SAFETY: the kernel takes one u64, which this call copies, and accesses no memory.
        unsafe {
            result::launch_kernel(
                self.function,
                (1, 1, 1),
                (1, 1, 1),
                0,
                stream.cu_stream(),
                &mut params,
            )
        }?;
        Ok(())
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // A broken context cannot be cleaned up, and an error here changes nothing.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded by `load`, without another user; the driver waits for running kernels.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}
