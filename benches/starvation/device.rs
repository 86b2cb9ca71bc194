//! Scenarios on a device: the stand-in driver, and a consumer's stream whose pieces of work log
//! their run times.

#![allow(unsafe_code)]

use crate::standin::{self, Config, Gpu};
use crate::{Line, Scenario, random, rest};
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::{Batch, Device, Epoch, Loader, LoaderBuilder};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

/// Bytes per record, and rows per batch: a batch is 64 KiB.
const RECORD: usize = 4096;
const ROWS: usize = 16;

pub const SCENARIOS: [Scenario; 25] = [
    ("device: decode is slow", 60, |steps| {
        run(Case::new(steps, |_| rest(400)), |consumer, batches| {
            consumer.each(batches, |consumer, _| consumer.work(2000));
        })
    }),
    (
        "device: decode is a little slower than the step",
        60,
        |steps| {
            run(Case::new(steps, |_| rest(200)), |consumer, batches| {
                consumer.each(batches, |consumer, _| consumer.work(3000));
            })
        },
    ),
    ("device: decode and step vary", 80, |steps| {
        run(
            Case::new(steps, |id| rest(random(id, 400))),
            |consumer, batches| {
                consumer.each(batches, |consumer, batch| {
                    consumer.work(random(batch.index(), 7000))
                });
            },
        )
    }),
    ("device: copies are slow (64 KiB at 10 MB/s)", 60, |steps| {
        run(
            Case::new(steps, |_| {}).bandwidth(10_000_000),
            |consumer, batches| {
                consumer.each(batches, |consumer, _| consumer.work(3000));
            },
        )
    }),
    (
        "device: copies are slow, 32 slots: many steps in flight",
        120,
        |steps| {
            let case = Case::new(steps, |_| {}).bandwidth(16_000_000);
            run(
                case.with(|builder| builder.tuning(|t| t.slots(32).device_batches(24))),
                |consumer, batches| {
                    consumer.each(batches, |consumer, _| consumer.work(1000));
                },
            )
        },
    ),
    ("device: the GPU is far behind the host", 80, |steps| {
        run(
            Case::new(steps, |_| {})
                .with(|builder| builder.tuning(|t| t.slots(6).device_batches(5))),
            |consumer, batches| {
                consumer.each(batches, |consumer, _| consumer.work(4000));
            },
        )
    }),
    (
        "device: far behind, and copies slow now and then",
        80,
        |steps| {
            run(
                Case::new(steps, |id| rest(if id % 320 < 16 { 1500 } else { 0 })),
                |consumer, batches| {
                    consumer.each(batches, |consumer, _| consumer.work(3000));
                },
            )
        },
    ),
    (
        "device: dropped before the last kernel is launched",
        60,
        |steps| {
            run(Case::new(steps, |_| rest(300)), |consumer, batches| {
                consumer.each_owned(batches, |consumer, batch| {
                    consumer.work(500);
                    consumer.drop(batch);
                    consumer.work(1500);
                });
            })
        },
    ),
    ("device: dropped at once, all work follows", 60, |steps| {
        run(Case::new(steps, |_| rest(300)), |consumer, batches| {
            consumer.each_owned(batches, |consumer, batch| {
                consumer.drop(batch);
                consumer.work(2500);
            });
        })
    }),
    ("device: the host is late after the drop", 60, |steps| {
        run(Case::new(steps, |_| {}), |consumer, batches| {
            consumer.each_owned(batches, |consumer, batch| {
                consumer.work(1000);
                consumer.drop(batch);
                rest(4000);
            });
        })
    }),
    (
        "device: the host is late and decode is slower still",
        60,
        |steps| {
            run(Case::new(steps, |_| rest(500)), |consumer, batches| {
                consumer.each_owned(batches, |consumer, batch| {
                    consumer.work(1000);
                    consumer.drop(batch);
                    rest(3000);
                });
            })
        },
    ),
    (
        "device: work follows the drop, then the host is late",
        60,
        |steps| {
            run(Case::new(steps, |_| rest(400)), |consumer, batches| {
                consumer.each_owned(batches, |consumer, batch| {
                    consumer.drop(batch);
                    consumer.work(1000);
                    rest(4000);
                });
            })
        },
    ),
    (
        "device: the host is late between two kernels",
        60,
        |steps| {
            run(Case::new(steps, |_| rest(500)), |consumer, batches| {
                consumer.each(batches, |consumer, _| {
                    consumer.work(500);
                    rest(3000);
                    consumer.work(500);
                });
            })
        },
    ),
    (
        "device: the host waits for the stream in each step",
        60,
        |steps| {
            run(Case::new(steps, |_| rest(400)), |consumer, batches| {
                consumer.each(batches, |consumer, _| {
                    consumer.work(2000);
                    consumer.stream.synchronize().unwrap();
                });
            })
        },
    ),
    (
        "device: the last batch is held until the next is there",
        60,
        |steps| {
            run(Case::new(steps, |_| rest(300)), |consumer, batches| {
                let mut held = None;
                while let Some(batch) = consumer.next(batches) {
                    // Dropped before the new batch is used, as by `batch = epoch.next()`.
                    if let Some(before) = held.replace(batch) {
                        consumer.drop(before);
                    }
                    consumer.work(2000);
                }
            })
        },
    ),
    ("device: dropped by another thread, late", 60, |steps| {
        run(Case::new(steps, |_| rest(300)), |consumer, batches| {
            std::thread::scope(|scope| {
                let (send, dropper) = std::sync::mpsc::channel();
                let consumer = &*consumer;
                scope.spawn(move || {
                    while let Ok(batch) = dropper.recv() {
                        rest(300);
                        consumer.drop(batch);
                    }
                });
                while let Some(batch) = consumer.next(batches) {
                    consumer.work(2000);
                    send.send(batch).unwrap();
                }
            });
        })
    }),
    ("device: batches are bound by hand, late", 60, |steps| {
        run(
            Case::new(steps, |_| rest(300)).unbound(),
            |consumer, batches| {
                while let Some(batch) = consumer.next(batches) {
                    rest(2000);
                    batch.bind(Stream::from(&consumer.stream)).unwrap();
                    consumer.work_of(BOUND, 0);
                    consumer.work(1000);
                    consumer.drop(batch);
                }
            },
        )
    }),
    ("device: six epochs, one after the other", 12, |steps| {
        let case = Case {
            epochs: 6,
            ..Case::new(steps, |_| rest(300)).bandwidth(20_000_000)
        };
        run(case, |consumer, batches| {
            consumer.each(batches, |consumer, _| consumer.work(2000));
            // Validation and saving, outside the steady time.
            rest(10_000);
        })
    }),
    ("device: next_within 500 µs", 60, |steps| {
        run(Case::new(steps, |_| rest(300)), |consumer, batches| {
            loop {
                consumer.ask_for(Epoch::position(batches) == 0);
                let batch = loop {
                    match batches.next_within(Duration::from_micros(500)) {
                        Poll::Ready(batch) => break batch,
                        Poll::Pending => rest(50),
                    }
                };
                let Some(batch) = batch else { return };
                consumer.work_of(GOT, 0);
                consumer.work(1000);
                consumer.drop(batch.unwrap());
            }
        })
    }),
    (
        "device: runs ahead, steps are slow, bare stream",
        80,
        |steps| {
            run(Case::new(steps, |_| {}).bare(), |consumer, batches| {
                consumer.each(batches, |consumer, _| consumer.work(4000));
            })
        },
    ),
    (
        "device: runs ahead, decode is slow, bare stream",
        60,
        |steps| {
            run(
                Case::new(steps, |_| rest(300)).bare(),
                |consumer, batches| {
                    consumer.each(batches, |consumer, _| consumer.work(2000));
                },
            )
        },
    ),
    ("device: runs ahead, copies are slow", 60, |steps| {
        let case = Case::new(steps, |_| {})
            .bandwidth(10_000_000)
            .with(|builder| builder.tuning(|t| t.slots(8).device_batches(5)));
        run(case, |consumer, batches| {
            consumer.each(batches, |consumer, _| consumer.work(1000))
        })
    }),
    (
        "device: runs ahead, copies are slow, bare stream",
        60,
        |steps| {
            let case = Case::new(steps, |_| {})
                .bandwidth(10_000_000)
                .with(|builder| builder.tuning(|t| t.slots(8).device_batches(5)));
            run(case.bare(), |consumer, batches| {
                consumer.each(batches, |consumer, _| consumer.work(1000))
            })
        },
    ),
    (
        "device: runs three steps ahead, all vary, bare stream",
        80,
        |steps| {
            run(
                Case::new(steps, |id| rest(random(id, 400))).bare(),
                |consumer, batches| {
                    let mut queued = VecDeque::new();
                    consumer.each_owned(batches, |consumer, batch| {
                        consumer.work(random(batch.index(), 7000));
                        consumer.drop(batch);
                        queued.push_back(consumer.stream.record_event(None).unwrap());
                        if queued.len() > 3 {
                            queued.pop_front().unwrap().synchronize().unwrap();
                        }
                    });
                },
            )
        },
    ),
    ("device: tiny steps of 100 µs", 400, |steps| {
        run(Case::new(steps, |_| {}), |consumer, batches| {
            consumer.each(batches, |consumer, _| consumer.work(100));
        })
    }),
];

/// Meaning of a piece of work on the stream.
const WORK: u64 = 0;
/// `next()` is about to be called; for the first batch of an iterator.
const ASKED: u64 = 1;
const ASKED_FIRST: u64 = 2;
/// `next()` has returned a batch, which the stream waits for.
const GOT: u64 = 3;
const DROPPED: u64 = 4;
/// A batch is bound by hand, after a while.
const BOUND: u64 = 5;

/// Log of the stream in its order: meaning, start and end of each piece of work.
static LOG: Mutex<Vec<(u64, Instant, Instant)>> = Mutex::new(Vec::new());

fn log() -> std::sync::MutexGuard<'static, Vec<(u64, Instant, Instant)>> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A kernel that takes a while and logs it.
extern "C" fn work(_: *const u32, _: *const u32, params: *const *const c_void) {
    let begin = Instant::now();
    // SAFETY: the stand-in calls this with the two parameters of the registration.
    let (mark, ns) = unsafe {
        (
            (*params).cast::<u64>().read(),
            (*params.add(1)).cast::<u64>().read(),
        )
    };
    if ns > 0 {
        std::thread::sleep(Duration::from_nanos(ns));
    }
    log().push((mark, begin, Instant::now()));
}

/// Declaration of the consumer's stream to the loader.
#[derive(Clone, Copy, PartialEq)]
enum Given {
    Builder,
    /// Each batch is bound to the bare handle on delivery.
    Handle,
    /// The scenario binds batches.
    ByHand,
}

/// A loader's settings and its use.
struct Case {
    builder: LoaderBuilder,
    config: Config,
    epochs: u64,
    steps: u64,
    given: Given,
}

impl Case {
    /// A case of `steps` batches per epoch, with `decode` on each sample by one worker.
    fn new(steps: u64, decode: fn(u64)) -> Self {
        let records = Records::builder(RECORD)
            .open_bytes(vec![7; RECORD * ROWS * steps as usize])
            .unwrap();
        let builder = Loader::builder(records)
            .batch_size(ROWS)
            .workers(1)
            .map(move |row, ctx| {
                decode(ctx.id());
                row.bytes_mut(0)[0] ^= 1;
                Ok(())
            });
        let config = Config {
            devices: vec![Gpu::new(1 << 30, "0000:3b:00.0")],
            ..Config::default()
        };
        Self {
            builder,
            config,
            epochs: 1,
            steps,
            given: Given::Builder,
        }
    }

    fn bandwidth(mut self, bytes_per_s: u64) -> Self {
        self.config.bandwidth = bytes_per_s;
        self
    }

    fn with(self, set: fn(LoaderBuilder) -> LoaderBuilder) -> Self {
        Self {
            builder: set(self.builder),
            ..self
        }
    }

    fn unbound(self) -> Self {
        Self {
            given: Given::ByHand,
            ..self
        }
    }

    fn bare(self) -> Self {
        Self {
            given: Given::Handle,
            ..self
        }
    }
}

/// Runs a case in a session of its own.
fn run(case: Case, consume: impl Fn(&Consumer, &mut Epoch)) -> Vec<Line> {
    let session = standin::cuda().session(case.config.clone());
    log().clear();
    let consumer = Consumer::new(case.given);
    let builder = case.builder.device(Device::cuda(0).unwrap());
    let builder = if case.given == Given::Builder {
        builder.stream(&consumer.stream)
    } else {
        builder
    };
    let loader = consumer.loader.get_or_init(|| builder.build().unwrap());
    loader.ready().unwrap();
    for epoch in 0..case.epochs {
        let mut batches = loader.epoch(epoch).unwrap();
        consume(&consumer, &mut batches);
        assert_eq!(Epoch::position(&batches), case.steps);
    }
    consumer.stream.synchronize().unwrap();
    // Their marks are on two streams.
    let all = case.epochs * (case.steps - 1);
    crate::wait::soon(|| loader.snapshot().consumer.gpu.unwrap().steps == all);
    let gpu = loader.snapshot().consumer.gpu.unwrap();
    drop(consumer);
    drop(session);
    let steps = (case.epochs * (case.steps - 1), gpu.steps);
    let log = log();
    let truth = Truth::of(&log);
    let wall = wall(&log);
    let line = |what, truth, ns| Line {
        what,
        steps,
        truth,
        measured: Duration::from_nanos(ns),
        wall,
    };
    vec![
        line("starved", truth.starved, gpu.starved_ns),
        line(
            "host late",
            truth.late,
            gpu.host_late_ns().expect("each step is marked"),
        ),
    ]
}

/// Sums of the stream's log.
#[derive(Default)]
struct Truth {
    /// Time in which the stream had finished its work, and waited for the batch of `next()`.
    starved: Duration,
    /// Time without work after the step's last work, before `next()` was called or the batch was
    /// bound.
    late: Duration,
}

impl Truth {
    fn of(log: &[(u64, Instant, Instant)]) -> Self {
        let mut truth = Self::default();
        let mut asked = None;
        let mut end = None;
        let mut idle = Duration::ZERO;
        for &(mark, begin, ended) in log {
            let gap = end.map_or(Duration::ZERO, |end| begin.saturating_duration_since(end));
            // Waiting for a batch is starvation, not lateness.
            idle += if asked.is_none() { gap } else { Duration::ZERO };
            match mark {
                ASKED_FIRST => asked = None,
                ASKED => {
                    asked = Some(ended);
                    truth.late += idle;
                }
                GOT => truth.starved += asked.take().map_or(Duration::ZERO, |asked| begin - asked),
                BOUND => truth.late += gap,
                WORK => idle = Duration::ZERO,
                _ => {}
            }
            end = Some(ended);
        }
        truth
    }
}

/// From the first work to the last.
fn wall(log: &[(u64, Instant, Instant)]) -> Duration {
    log.first()
        .zip(log.last())
        .map_or(Duration::ZERO, |((_, begin, _), (.., end))| *end - *begin)
}

/// The consumer's stream, and a kernel for it.
struct Consumer {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    given: Given,
    module: sys::CUmodule,
    kernel: sys::CUfunction,
    loader: OnceLock<Loader>,
}

// SAFETY: any thread may use these handles of the driver.
unsafe impl Sync for Consumer {}

impl Consumer {
    fn new(given: Given) -> Self {
        standin::cuda().register_kernel("work", work, &[8, 8], 0, 0);
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let image = c".version 7.0 .visible .entry work()";
        // SAFETY: the text ends with a zero; the module lives until the drop.
        let (module, kernel) = unsafe {
            let module = result::module::load_data(image.as_ptr().cast()).unwrap();
            (
                module,
                result::module::get_function(module, c"work".into()).unwrap(),
            )
        };
        Self {
            context,
            stream,
            given,
            module,
            kernel,
            loader: OnceLock::new(),
        }
    }

    fn work_of(&self, mark: u64, us: u64) {
        self.context.bind_to_thread().unwrap();
        let mut mark = mark;
        let mut ns = us * 1000;
        let mut params: [*mut c_void; 2] = [(&raw mut mark).cast(), (&raw mut ns).cast()];
        let stream = self.stream.cu_stream();
        // SAFETY: the parameters are those that the kernel was registered with, and are copied by
        // the call.
        unsafe { result::launch_kernel(self.kernel, (1, 1, 1), (1, 1, 1), 0, stream, &mut params) }
            .unwrap();
    }

    /// Launches work of the step, and marks its end.
    fn work(&self, us: u64) {
        self.work_of(WORK, us);
        self.loader
            .get()
            .unwrap()
            .mark_on(Stream::from(&self.stream));
    }

    /// Marks the stream's position at the call of `next()`.
    fn ask_for(&self, first: bool) {
        self.work_of(if first { ASKED_FIRST } else { ASKED }, 0);
    }

    fn next(&self, batches: &mut Epoch) -> Option<Batch> {
        self.ask_for(Epoch::position(batches) == 0);
        let batch = batches.next()?.unwrap();
        if self.given == Given::Handle {
            // SAFETY: the stream lives as long as `self`, and batches are dropped before.
            batch
                .bind(unsafe { Stream::from_raw(self.stream.cu_stream() as usize) })
                .unwrap();
        }
        self.work_of(GOT, 0);
        Some(batch)
    }

    fn drop(&self, batch: Batch) {
        drop(batch);
        self.work_of(DROPPED, 0);
    }

    fn each_owned(&self, batches: &mut Epoch, mut step: impl FnMut(&Self, Batch)) {
        while let Some(batch) = self.next(batches) {
            step(self, batch);
        }
    }

    /// Runs a step for each batch, and drops the batch after it.
    fn each(&self, batches: &mut Epoch, step: impl Fn(&Self, &Batch)) {
        self.each_owned(batches, |consumer, batch| {
            step(consumer, &batch);
            consumer.drop(batch);
        });
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded by `new`, unloaded once.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}
