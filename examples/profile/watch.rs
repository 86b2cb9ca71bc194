//! What NVML says of the GPU while it is fed: the last look of the run, since clocks and links slow down when nothing is done.

#[cfg(not(feature = "cuda"))]
pub use off::Watch;
#[cfg(feature = "cuda")]
pub use on::Watch;

#[cfg(feature = "cuda")]
mod on {
    use feedline::Device;
    use feedline::device::cuda::nvml::{self, GpuState};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::JoinHandle;
    use std::time::Duration;

    /// Looks about so often; each look takes some 50 ms of waiting.
    const PERIOD: Duration = Duration::from_secs(1);

    /// Looks at a GPU until it is told to end.
    pub struct Watch {
        over: Arc<AtomicBool>,
        /// Why nothing is looked at, or who looks.
        thread: Result<JoinHandle<GpuState>, String>,
    }

    impl Watch {
        /// Of the host nothing is said.
        pub fn start(device: &Device) -> Option<Self> {
            device.pci_bus_id()?;
            let over = Arc::new(AtomicBool::new(false));
            let ended = over.clone();
            let thread = nvml::Watch::of(device).map_err(|why| why.to_string()).and_then(|mut watch| {
                let look = move || {
                    loop {
                        std::thread::park_timeout(PERIOD);
                        let state = watch.state();
                        if ended.load(Ordering::Acquire) {
                            return state;
                        }
                    }
                };
                std::thread::Builder::new().name("profile-nvml".into()).spawn(look).map_err(|error| error.to_string())
            });
            Some(Self { over, thread })
        }

        /// The last look: as text, and as data.
        pub fn end(self) -> (String, serde_json::Value) {
            self.over.store(true, Ordering::Release);
            let state = self.thread.and_then(|thread| {
                thread.thread().unpark();
                thread.join().map_err(|_| "looking at it failed".to_string())
            });
            match state {
                Ok(state) => (state.to_string(), serde_json::to_value(&state).unwrap_or_default()),
                Err(why) => (format!("gpu       NVML says nothing: {why}"), why.into()),
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod off {
    use feedline::Device;

    /// There is no GPU to look at.
    pub enum Watch {}

    impl Watch {
        pub fn start(_: &Device) -> Option<Self> {
            None
        }

        pub fn end(self) -> (String, serde_json::Value) {
            match self {}
        }
    }
}
