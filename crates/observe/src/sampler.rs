//! A thread that looks at the processes of a loader some 20 times a second.
//!
//! It takes at most 1 / 300 of a core: a look that takes longer makes the next one later. Times
//! between two looks vary, so that they do not follow the steps of the loop.

use crate::machine::{Moment, cores};
use crate::notes::{Notes, Phase, Shared, WorkerId};
use crate::observation::{ThreadUse, Worker};
use crate::place::{Look, Place};
use crate::process::{self, Bytes, Task};
use feedline_base::sync::Hold;
use feedline_base::thread;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(25);
const INTERVAL_MAX: Duration = Duration::from_millis(500);
/// The time between two looks is at least this multiple of the time of a look.
const COST: u32 = 300;
/// Threads of this process are looked at once in so many looks.
const THREADS_EACH: u64 = 8;
/// The interpreter's lock is late after this time.
const LATE_NS: u64 = 500_000;
/// Processes and threads that are looked at.
const TASKS_MAX: usize = 64;

/// A sampler that runs. Dropping it ends it.
pub struct Sampler {
    begun: Arc<Moment>,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    wanted: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    /// Sleeps, and says whether the sampler shall go on.
    fn sleep(&self, time: Duration) -> bool {
        let wanted = self.wanted.hold();
        let waited = self
            .changed
            .wait_timeout_while(wanted, time, |wanted| !*wanted);
        !*waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }
}

impl Sampler {
    /// Starts the thread. `None` if the system refuses one: then there are times, and no places.
    pub fn start(shared: Arc<Shared>) -> Option<Self> {
        let begun = Arc::new(Moment::now());
        let stop = Arc::new(Stop::default());
        let of_thread = Arc::clone(&begun);
        let stop_of_thread = Arc::clone(&stop);
        let thread = thread::spawn("feedline-look", move || {
            Watch::new(&shared).run(&stop_of_thread);
            let end = Moment::now();
            of_thread.add_until(&end, &mut shared.notes.hold().sums.machine);
        });
        let thread = thread.ok()?;
        Some(Self {
            begun,
            stop,
            thread: Some(thread),
        })
    }

    /// The machine when the sampler started.
    pub fn begun(&self) -> &Moment {
        &self.begun
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        *self.stop.wanted.hold() = true;
        self.stop.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there has lost samples, nothing else.
            drop(thread.join());
        }
    }
}

/// What was seen of a worker since the last look.
#[derive(Default)]
pub struct Seen {
    time_ns: u64,
    cpu_ns: u64,
    delay_ns: u64,
    bytes: Bytes,
    place: Option<Place>,
}

impl Seen {
    pub fn add_to(&self, worker: &mut Worker) {
        worker.watched_ns += self.time_ns;
        worker.cpu_ns += self.cpu_ns;
        worker.delay_ns += self.delay_ns;
        worker.device_bytes += self.bytes.device;
        worker.read_bytes += self.bytes.read;
        worker.written_bytes += self.bytes.written;
        if let Some(place) = self.place {
            worker.places.count(place);
        }
    }
}

/// Adds what the sampler saw of a worker.
fn add(notes: &mut Notes, worker: WorkerId, seen: &Seen) {
    let workers = &mut notes.sums.workers;
    let at = workers
        .iter()
        .position(|known| known.number == worker.number)
        .unwrap_or_else(|| {
            workers.push(Worker {
                number: worker.number,
                ..Worker::default()
            });
            workers.len() - 1
        });
    seen.add_to(&mut workers[at]);
    workers[at].pid = worker.process;
}

/// The counters of a worker at a look.
#[derive(Clone, Copy)]
struct Counters {
    at: Instant,
    cpu_ns: u64,
    delay_ns: u64,
    bytes: Bytes,
}

impl Counters {
    fn of(process: u32) -> Option<Self> {
        let task = Task::Process(process);
        Some(Self {
            at: Instant::now(),
            cpu_ns: task.cpu_ns()?,
            delay_ns: task.scheduled().unwrap_or_default().1,
            bytes: task.bytes().unwrap_or_default(),
        })
    }

    fn since(&self, before: &Self) -> Seen {
        Seen {
            time_ns: self.at.duration_since(before.at).as_nanos() as u64,
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            delay_ns: self.delay_ns.saturating_sub(before.delay_ns),
            bytes: Bytes {
                device: self.bytes.device.saturating_sub(before.bytes.device),
                read: self.bytes.read.saturating_sub(before.bytes.read),
                written: self.bytes.written.saturating_sub(before.bytes.written),
            },
            place: None,
        }
    }
}

fn resident(process: u32) -> u64 {
    Task::Process(process).resident().unwrap_or(0)
}

/// The state of the thread.
struct Watch<'s> {
    shared: &'s Shared,
    look: Look,
    workers: Vec<(WorkerId, Option<Counters>)>,
    /// The time and the run delay of the loop's thread at the last look.
    of_loop: Option<(Instant, u64)>,
    /// Threads of this process with their times, and whether they worked lately.
    threads: HashMap<u32, (u64, u64, bool)>,
    looks: u64,
    /// For intervals that vary.
    noise: u32,
}

impl<'s> Watch<'s> {
    fn new(shared: &'s Shared) -> Self {
        let (named, expected) = {
            let notes = shared.notes.hold();
            (notes.named.clone(), notes.sums.loader.workers)
        };
        let found = if named.is_empty() && expected != Some(0) {
            let children = process::children(std::process::id());
            (0..)
                .zip(children)
                .map(|(number, process)| WorkerId { process, number })
                .collect()
        } else {
            named
        };
        let workers = found
            .into_iter()
            .take(TASKS_MAX)
            .map(|worker| (worker, Counters::of(worker.process)))
            .collect();
        let mut watch = Self {
            shared,
            look: Look::new(),
            workers,
            of_loop: None,
            threads: HashMap::new(),
            looks: 0,
            noise: std::process::id(),
        };
        watch.look_at_threads(false);
        watch
    }

    fn run(mut self, stop: &Stop) {
        let mut pause = INTERVAL;
        // The epoch was steady at the last look, so that counters since then are.
        let mut steady = true;
        while stop.sleep(pause) {
            let began = Instant::now();
            let phase = self.shared.phase();
            let in_epoch = matches!(phase, Phase::Step | Phase::Wait);
            let dry = self.shared.notes.hold().runs_dry();
            let counts = steady && in_epoch && !dry;
            self.look_at_workers(counts);
            self.look_at_loop(phase, counts);
            if self.looks.is_multiple_of(THREADS_EACH) {
                self.look_at_threads(counts);
                self.look_at_memory();
            }
            steady = in_epoch && !dry;
            self.looks += 1;
            let cost = began.elapsed();
            if phase == Phase::Wait {
                // Not a cost of this thread: most of it is a wait.
                self.ask_interpreter();
            }
            pause = self.vary((cost * COST).clamp(INTERVAL, INTERVAL_MAX));
        }
    }

    /// Between 0.75 and 1.25 of a time.
    fn vary(&mut self, time: Duration) -> Duration {
        self.noise = self
            .noise
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        time * (96 + (self.noise >> 26)) / 128
    }

    fn look_at_workers(&mut self, counts: bool) {
        for (worker, before) in &mut self.workers {
            let place = self.look.worker(worker.process);
            let Some(now) = Counters::of(worker.process) else {
                continue;
            };
            if let Some(before) = before.filter(|_| counts) {
                let seen = Seen {
                    place,
                    ..now.since(&before)
                };
                add(&mut self.shared.notes.hold(), *worker, &seen);
            }
            *before = Some(now);
        }
    }

    /// The run delay of the loop's thread; in a wait its place, and the places of the threads that
    /// worked lately.
    fn look_at_loop(&mut self, phase: Phase, counts: bool) {
        let process = std::process::id();
        let own = self.shared.notes.hold().thread;
        let scheduled = Task::Thread(process, own).scheduled();
        let now = scheduled.map(|(_, delay)| (Instant::now(), delay));
        let before = std::mem::replace(&mut self.of_loop, now);
        if let Some(((then, old), (now, delay))) = before.zip(now).filter(|_| counts) {
            let consumer = &mut self.shared.notes.hold().sums.consumer;
            consumer.watched_ns += now.duration_since(then).as_nanos() as u64;
            consumer.delay_ns += delay.saturating_sub(old);
        }
        if phase != Phase::Wait {
            return;
        }
        let of_loop = self.look.task(Task::Thread(process, own));
        let active = self.threads.iter().filter(|(_, (_, _, active))| *active);
        let others: Vec<_> = active
            .filter_map(|(thread, _)| {
                let place = self.look.task(Task::Thread(process, *thread))?;
                Some((*thread, place))
            })
            .collect();
        // Meanwhile the wait may have ended.
        if self.shared.phase() != Phase::Wait {
            return;
        }
        let mut notes = self.shared.notes.hold();
        if let Some(place) = of_loop {
            notes.sums.consumer.places.count(place);
        }
        for (thread, place) in others {
            if let Some(known) = notes
                .sums
                .threads
                .iter_mut()
                .find(|known| known.id == thread)
            {
                known.places.count(place);
            }
        }
    }

    /// The times of the other threads of this process.
    fn look_at_threads(&mut self, counts: bool) {
        let process = std::process::id();
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let of_loop = self.shared.notes.hold().thread;
        for thread in Task::Process(process).threads() {
            let task = Task::Thread(process, thread);
            let Some((cpu, delay)) = task
                .scheduled()
                .filter(|_| thread != own && thread != of_loop)
            else {
                continue;
            };
            let before = self.threads.get(&thread).copied();
            let worked = before.is_none_or(|(before, ..)| cpu > before);
            self.threads.insert(thread, (cpu, delay, worked));
            let Some((cpu_before, delay_before, _)) = before else {
                continue;
            };
            if counts && worked {
                self.add_thread(thread, cpu - cpu_before, delay.saturating_sub(delay_before));
            }
        }
    }

    fn add_thread(&self, thread: u32, cpu_ns: u64, delay_ns: u64) {
        let mut notes = self.shared.notes.hold();
        let threads = &mut notes.sums.threads;
        let at = match threads.iter().position(|known| known.id == thread) {
            Some(at) => at,
            None if threads.len() == TASKS_MAX => return,
            None => {
                let name = Task::Thread(std::process::id(), thread).name();
                threads.push(ThreadUse {
                    name: name.unwrap_or_default(),
                    id: thread,
                    ..ThreadUse::default()
                });
                threads.len() - 1
            }
        };
        threads[at].cpu_ns += cpu_ns;
        threads[at].delay_ns += delay_ns;
    }

    fn look_at_memory(&self) {
        let own = resident(std::process::id());
        let workers = self
            .workers
            .iter()
            .map(|(worker, _)| resident(worker.process));
        let all = own + workers.sum::<u64>();
        let machine = &mut self.shared.notes.hold().sums.machine;
        machine.cores = cores();
        if all > machine.resident_bytes {
            machine.resident_bytes = all;
            machine.process_resident_bytes = own;
        }
    }

    fn ask_interpreter(&self) {
        let Some(probe) = &self.shared.probe else {
            return;
        };
        let before = self.shared.notes.hold().taken;
        let Some(took) = probe.hold()() else {
            return;
        };
        let mut notes = self.shared.notes.hold();
        // If the wait has ended, the loop's own step may have held the lock.
        if self.shared.phase() != Phase::Wait || notes.taken != before {
            return;
        }
        if let Some(seen) = &mut notes.sums.interpreter {
            seen.probes += 1;
            seen.waited_ns += took;
            seen.late += u64::from(took > LATE_NS);
        }
    }
}
