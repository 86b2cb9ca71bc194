//! Scenarios on the host device: the consumer's own work is the device's work.

use crate::common::{evict, file};
use crate::{Line, Scenario, random, rest, spin};
use feedline::dataset::Records;
use feedline::storage::{Direct, Mode};
use feedline::{Batch, Epoch, ErrorKind, Loader, LoaderBuilder, Order, Result};
use std::collections::VecDeque;
use std::task::Poll;
use std::time::{Duration, Instant};

pub const SCENARIOS: [Scenario; 27] = [
    ("decode sleeps, 1 worker", 60, |steps| {
        plain(mapped(steps, 8, |_| rest(1000)).workers(1), steps, |_| {
            rest(2000)
        })
    }),
    ("decode sleeps, 2 workers", 60, |steps| {
        plain(mapped(steps, 8, |_| rest(1500)).workers(2), steps, |_| {
            rest(2000)
        })
    }),
    ("decode spins, 1 worker", 60, |steps| {
        plain(mapped(steps, 16, |_| spin(300)).workers(1), steps, |_| {
            rest(1000)
        })
    }),
    ("decode spins, 2 workers", 80, |steps| {
        plain(mapped(steps, 16, |_| spin(400)).workers(2), steps, |_| {
            rest(1000)
        })
    }),
    ("decode is a little slower than the step", 100, |steps| {
        plain(mapped(steps, 8, |_| rest(500)).workers(1), steps, |_| {
            rest(4000)
        })
    }),
    ("storage: O_DIRECT, depth 1, 128 KiB records", 60, |steps| {
        stored(steps, 128 << 10, 8, |b| b.tuning(|t| t.depth(1)), 300)
    }),
    ("storage: O_DIRECT, depth 1, 4 KiB records", 60, |steps| {
        stored(steps, 4 << 10, 16, |b| b.tuning(|t| t.depth(1)), 300)
    }),
    (
        "storage: O_DIRECT by pread, depth 2, slow step",
        40,
        |steps| {
            stored(
                steps,
                64 << 10,
                8,
                |b| b.tuning(|t| t.reader(Mode::Pread).depth(2)),
                3000,
            )
        },
    ),
    ("in memory, nothing but next()", 1000, |steps| {
        plain(mapped(steps, 2048, |_| {}), steps, |_| {})
    }),
    ("in memory, no transform, 100 µs steps", 2000, |steps| {
        plain(records(steps, 256), steps, |_| spin(100))
    }),
    ("slow consumer", 100, |steps| {
        plain(mapped(steps, 8, |_| rest(50)), steps, |_| rest(3000))
    }),
    (
        "both: decode and step take 3 ms, by turns more",
        100,
        |steps| {
            plain(
                mapped(steps, 6, |id| rest(random(id, 1000))).workers(1),
                steps,
                |step| rest(random(step, 6000)),
            )
        },
    ),
    ("dropped before the step", 60, |steps| {
        watched(
            mapped(steps, 8, |_| rest(800)).workers(1),
            steps,
            |watch, batches| {
                while let Some(batch) = watch.next(batches) {
                    drop(batch.unwrap());
                    rest(3000);
                }
            },
        )
    }),
    ("three of four batches are held", 60, |steps| {
        watched(
            mapped(steps, 8, |_| rest(500))
                .workers(1)
                .tuning(|t| t.slots(4)),
            steps,
            |watch, batches| {
                let mut held = VecDeque::new();
                while let Some(batch) = watch.next(batches) {
                    held.push_back(batch.unwrap());
                    rest(1500);
                    held.drain(..held.len().saturating_sub(3));
                }
            },
        )
    }),
    ("all batches are held until next() fails", 4, held_too_long),
    (
        "another thread steps, up to three batches behind",
        60,
        |steps| {
            watched(
                mapped(steps, 8, |_| rest(300))
                    .workers(1)
                    .tuning(|t| t.slots(6)),
                steps,
                |watch, batches| {
                    std::thread::scope(|scope| {
                        let (send, stepper) = std::sync::mpsc::sync_channel(2);
                        scope.spawn(move || {
                            for batch in stepper {
                                rest(2000);
                                drop::<Batch>(batch);
                            }
                        });
                        while let Some(batch) = watch.next(batches) {
                            send.send(batch.unwrap()).unwrap();
                        }
                    });
                },
            )
        },
    ),
    ("next_within 300 µs, work in between", 60, |steps| {
        polled(
            mapped(steps, 8, |_| rest(800)).workers(1),
            steps,
            300,
            || spin(200),
        )
    }),
    ("next_within 0, as fast as it goes", 60, |steps| {
        polled(
            mapped(steps, 8, |_| rest(600)).workers(1),
            steps,
            0,
            std::thread::yield_now,
        )
    }),
    ("next_within, given up for ever", 8, given_up),
    ("tiny batches, steps of microseconds", 5000, |steps| {
        plain(records(steps, 1), steps, |_| spin(5))
    }),
    ("bursty decode: one sample of 20 takes 20 ms", 80, |steps| {
        plain(
            mapped(steps, 4, |id| {
                rest(if random(id, 20) == 0 { 20_000 } else { 100 })
            })
            .workers(2),
            steps,
            |_| rest(1500),
        )
    }),
    ("bursty consumer", 80, |steps| {
        plain(mapped(steps, 8, |_| rest(400)).workers(1), steps, |step| {
            rest(if random(step, 8) == 0 { 25_000 } else { 100 })
        })
    }),
    ("eight epochs, one after the other", 10, |steps| {
        let loader = mapped(steps, 8, |_| rest(400)).workers(1).build().unwrap();
        Watch::run(&loader, |watch| {
            for epoch in 0..8 {
                watch.begin();
                let mut batches = loader.epoch(epoch).unwrap();
                while let Some(batch) = watch.next(&mut batches) {
                    batch.unwrap();
                    rest(1000);
                }
                // Validation and saving, outside the steady time.
                rest(3000);
            }
        })
    }),
    ("epochs(0..8)", 10, |steps| {
        let loader = mapped(steps, 8, |_| rest(400)).workers(1).build().unwrap();
        Watch::run(&loader, |watch| {
            let mut batches = loader.epochs(0..8).unwrap();
            while let Some(batch) = watch.next(&mut batches) {
                batch.unwrap();
                rest(1000);
            }
        })
    }),
    ("the second half, by since()", 80, second_half),
    (
        "looked at by another thread while next() waits",
        6,
        looked_at,
    ),
    ("beside threads that take every core", 60, |steps| {
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        spin(200);
                    }
                });
            }
            let lines = plain(mapped(steps, 8, |_| spin(200)).workers(2), steps, |_| {
                spin(1000)
            });
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            lines
        })
    }),
];

/// `batches` batches of small records, from memory.
fn records(batches: u64, rows: usize) -> LoaderBuilder {
    let bytes = vec![7; 16 * rows * batches as usize];
    Loader::builder(Records::builder(16).open_bytes(bytes).unwrap())
        .order(Order::shuffled(1))
        .batch_size(rows)
}

/// The same, with `work` on each sample.
fn mapped(batches: u64, rows: usize, work: fn(u64)) -> LoaderBuilder {
    records(batches, rows).map(move |row, ctx| {
        work(ctx.id());
        row.bytes_mut(0)[0] ^= 1;
        Ok(())
    })
}

/// From a file, past the page cache.
fn stored(
    batches: u64,
    record: usize,
    rows: usize,
    set: fn(LoaderBuilder) -> LoaderBuilder,
    step_us: u64,
) -> Vec<Line> {
    let len = (batches * (record * rows) as u64).next_multiple_of(1 << 20);
    let path = file(len);
    evict(&path, 0..len);
    let records = Records::builder(record).open(path).unwrap();
    let builder = Loader::builder(records)
        .order(Order::shuffled(1))
        .batch_size(rows)
        .tuning(|t| t.direct(Direct::On));
    plain(set(builder), batches, move |_| rest(step_us))
}

/// The consumer's clock. The first batch of each iterator does not count, because it cannot be
/// ready.
pub struct Watch {
    is_first: bool,
    steps: u64,
    inside: Duration,
    began: Option<Instant>,
    wall: Duration,
}

impl Watch {
    fn run(loader: &Loader, consume: impl FnOnce(&mut Self)) -> Vec<Line> {
        let mut watch = Self {
            is_first: true,
            steps: 0,
            inside: Duration::ZERO,
            began: None,
            wall: Duration::ZERO,
        };
        consume(&mut watch);
        watch.begin();
        let measured = Duration::from_nanos(loader.snapshot().consumer.waited_ns);
        vec![watch.line(measured)]
    }

    fn line(&self, measured: Duration) -> Line {
        let steps = (self.steps, self.steps);
        let truth = self.inside;
        let wall = self.wall;
        Line {
            what: "starved",
            steps,
            truth,
            measured,
            wall,
        }
    }

    /// Starts another iterator, or none.
    fn begin(&mut self) {
        self.is_first = true;
        self.wall += self
            .began
            .take()
            .map_or(Duration::ZERO, |began| began.elapsed());
    }

    /// Counts the time in `call`, except for a first batch, whose arrival `came` reports.
    fn call<T>(&mut self, call: impl FnOnce() -> T, came: impl FnOnce(&T) -> bool) -> T {
        let begin = Instant::now();
        let found = call();
        let came = came(&found);
        if !self.is_first {
            self.inside += begin.elapsed();
            self.steps += u64::from(came);
        } else if came {
            self.is_first = false;
            self.began = Some(Instant::now());
        }
        found
    }

    fn next(&mut self, batches: &mut Epoch) -> Option<Result<Batch>> {
        self.call(|| batches.next(), |batch| matches!(batch, Some(Ok(_))))
    }
}

/// Runs `consume` on a first iterator over epoch 0, and expects a number of batches.
fn watched(
    builder: LoaderBuilder,
    batches: u64,
    consume: impl FnOnce(&mut Watch, &mut Epoch),
) -> Vec<Line> {
    let loader = builder.build().unwrap();
    let lines = Watch::run(&loader, |watch| {
        consume(watch, &mut loader.epoch(0).unwrap())
    });
    assert_eq!(loader.snapshot().consumer.batches, batches);
    lines
}

/// Runs a step for each batch, and drops the batch after it.
fn plain(builder: LoaderBuilder, batches: u64, mut step: impl FnMut(u64)) -> Vec<Line> {
    watched(builder, batches, |watch, epoch| {
        while Epoch::position(epoch) < batches {
            step(watch.next(epoch).unwrap().unwrap().index());
        }
    })
}

/// Calls `next_within`, with other work in between.
fn polled(builder: LoaderBuilder, batches: u64, limit_us: u64, between: fn()) -> Vec<Line> {
    watched(builder, batches, |watch, epoch| {
        loop {
            let limit = Duration::from_micros(limit_us);
            match watch.call(
                || epoch.next_within(limit),
                |polled| matches!(polled, Poll::Ready(Some(Ok(_)))),
            ) {
                Poll::Ready(Some(batch)) => {
                    drop(batch.unwrap());
                    rest(1000);
                }
                Poll::Ready(None) => return,
                Poll::Pending => between(),
            }
        }
    })
}

/// Waits in vain for a batch, in each of several iterators.
fn given_up(times: u64) -> Vec<Line> {
    let loader = mapped(4, 1, |_| rest(30_000)).workers(1).build().unwrap();
    Watch::run(&loader, |watch| {
        for epoch in 0..times {
            let mut batches = loader.epoch(epoch).unwrap();
            watch.begin();
            watch.next(&mut batches).unwrap().unwrap();
            for _ in 0..4 {
                let limit = Duration::from_millis(2);
                watch.call(|| drop(batches.next_within(limit)), |()| false);
                rest(100);
            }
            watch.steps += 1;
        }
    })
}

/// Holds every batch until `next()` fails, then drops one and continues.
fn held_too_long(times: u64) -> Vec<Line> {
    let loader = mapped(2 + 2 * times, 1, |_| rest(500))
        .workers(1)
        .tuning(|t| t.slots(2));
    let loader = loader
        .tuning(|t| t.held_deadline(Duration::from_millis(20)))
        .build()
        .unwrap();
    Watch::run(&loader, |watch| {
        let mut batches = loader.epoch(0).unwrap();
        let mut held: VecDeque<_> = (0..2)
            .map(|_| watch.next(&mut batches).unwrap().unwrap())
            .collect();
        for _ in 0..2 * times {
            let refused = watch.next(&mut batches).unwrap();
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::BatchesHeld);
            held.pop_front();
            held.push_back(watch.next(&mut batches).unwrap().unwrap());
        }
    })
}

/// The difference of two snapshots.
fn second_half(batches: u64) -> Vec<Line> {
    let loader = mapped(batches, 8, |_| rest(500))
        .workers(1)
        .build()
        .unwrap();
    let mut half = None;
    let mut lines = Watch::run(&loader, |watch| {
        let mut epoch = loader.epoch(0).unwrap();
        while let Some(batch) = watch.next(&mut epoch) {
            if batch.unwrap().index() == batches / 2 {
                half = Some(loader.snapshot());
                watch.steps = 0;
                watch.inside = Duration::ZERO;
                watch.began = Some(Instant::now());
            }
            rest(1000);
        }
    });
    let measured = loader.snapshot().since(&half.unwrap()).consumer.waited_ns;
    lines[0].measured = Duration::from_nanos(measured);
    lines
}

/// Takes snapshots during long waits: the wait so far counts.
fn looked_at(times: u64) -> Vec<Line> {
    let loader = mapped(times + 1, 1, |_| rest(60_000))
        .workers(1)
        .tuning(|t| t.slots(1))
        .build()
        .unwrap();
    let waited = || Duration::from_nanos(loader.snapshot().consumer.waited_ns);
    let mut truth = Duration::ZERO;
    let mut measured = Duration::ZERO;
    let mut lines = Watch::run(&loader, |watch| {
        let mut batches = loader.epoch(0).unwrap();
        drop(watch.next(&mut batches));
        for _ in 0..times {
            let before = waited();
            let begin = Instant::now();
            std::thread::scope(|scope| {
                let looks = scope.spawn(|| {
                    rest(30_000);
                    (begin.elapsed(), waited())
                });
                drop(watch.next(&mut batches).unwrap().unwrap());
                let (passed, found) = looks.join().unwrap();
                truth += passed;
                measured += found.saturating_sub(before);
            });
        }
    });
    lines[0].truth = truth;
    lines[0].measured = measured;
    lines
}
