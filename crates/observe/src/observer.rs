//! Notes the events of the loop, and has a thread look at processes meanwhile.
//!
//! ```text
//! starts ─► (first wait) ─► got ─► step ─► asks ─► wait ─► got … ─► asks ─► ends
//! └──── the start ───────┘└────────── steady time ──────────────────┘└ its end
//!                          sampler runs ────────────────────────────────────┘
//! ```
//!
//! An event costs two clocks and a lock that nobody else holds for longer than it takes to add
//! numbers: one or two microseconds.

use crate::diagnosis::Diagnosis;
use crate::machine::Moment;
use crate::notes::{Notes, Phase, Probe, Shared, WorkerId};
use crate::observation::{GpuTime, Interpreter, LoaderFacts, Observation};
use crate::sampler::Sampler;
use crate::text;
use feedline_base::sync::Hold;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

/// Measures a loop over another loader.
pub struct Observer {
    /// The process that observes: a forked child has no sampler, and perhaps a lock that is taken.
    process: u32,
    shared: Arc<Shared>,
    sampler: Mutex<Option<Sampler>>,
}

impl Observer {
    /// An observer of a loader with these settings. `probe` is for loops in Python.
    pub fn new(loader: LoaderFacts, probe: Option<Probe>) -> Self {
        let sums = Observation {
            loader,
            interpreter: probe.is_some().then(Interpreter::default),
            ..Observation::default()
        };
        let notes = Notes {
            sums,
            ..Notes::default()
        };
        Self {
            process: std::process::id(),
            shared: Arc::new(Shared {
                phase: AtomicU8::new(Phase::Idle as u8),
                notes: Mutex::new(notes),
                probe: probe.map(Mutex::new),
            }),
            sampler: Mutex::new(None),
        }
    }

    /// An epoch starts: before its iterator is made.
    pub fn starts(&self) {
        self.ends();
        let mut notes = self.shared.notes.hold();
        notes.sums.consumer.epochs += 1;
        notes.thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        notes.taken = 0;
        notes.named.clear();
        (notes.mark_ns, notes.mark_cpu_ns) = clocks();
        self.enter(Phase::Starting);
    }

    /// The iterator is made, and has these worker processes.
    pub fn works_with(&self, workers: Vec<WorkerId>) {
        self.shared.notes.hold().named = workers;
    }

    /// The loop asks for a batch: its step is over.
    pub fn asks(&self) {
        let phase = self.shared.phase();
        if !matches!(phase, Phase::Step | Phase::Away) {
            return;
        }
        let (now, cpu) = clocks();
        let mut notes = self.shared.notes.hold();
        if phase == Phase::Step {
            let step = now.saturating_sub(notes.mark_ns);
            let step_cpu = cpu.saturating_sub(notes.mark_cpu_ns);
            let consumer = &mut notes.sums.consumer;
            consumer.steady_ns += step;
            consumer.total_ns += step;
            consumer.step_cpu_ns += step_cpu;
        }
        (notes.mark_ns, notes.mark_cpu_ns) = (now, cpu);
        self.enter(Phase::Wait);
    }

    /// The loop does not wait for a batch now, although it has asked: it evaluates, or saves. It
    /// asks again when it is back.
    pub fn leaves(&self) {
        if self.shared.phase() == Phase::Wait {
            self.enter(Phase::Away);
        }
    }

    /// The loop has a batch of so many samples; 0 if that is not known.
    pub fn got(&self, samples: u64) {
        let (now, cpu) = clocks();
        let phase = self.shared.phase();
        if !matches!(phase, Phase::Starting | Phase::Wait) {
            return;
        }
        let mut notes = self.shared.notes.hold();
        let wait = now.saturating_sub(notes.mark_ns);
        let wait_cpu = cpu.saturating_sub(notes.mark_cpu_ns);
        notes.taken += 1;
        let consumer = &mut notes.sums.consumer;
        consumer.batches += 1;
        consumer.samples += samples;
        consumer.total_ns += wait;
        if phase == Phase::Starting {
            consumer.starts_ns += wait;
            if consumer.epochs == 1 {
                notes.first_start_ns = wait;
            }
        } else {
            consumer.steady_ns += wait;
            consumer.steady_batches += 1;
            consumer.waited_ns += wait;
            consumer.wait_cpu_ns += wait_cpu;
            consumer.waits.add(wait);
        }
        drop(notes);
        self.enter(Phase::Step);
        if phase == Phase::Starting {
            let sampler = Sampler::start(Arc::clone(&self.shared));
            *self.sampler.hold() = sampler;
        }
        // What the start of the sampler took is not the step's.
        let mut notes = self.shared.notes.hold();
        (notes.mark_ns, notes.mark_cpu_ns) = clocks();
    }

    /// The epoch ended, or was abandoned. Waits for the sampler, which may want the interpreter's
    /// lock: call it without.
    pub fn ends(&self) {
        let sampler = self.sampler.hold().take();
        drop(sampler);
        let phase = self.shared.phase();
        self.enter(Phase::Idle);
        let mut notes = self.shared.notes.hold();
        if matches!(phase, Phase::Wait | Phase::Starting) {
            let end = clocks().0.saturating_sub(notes.mark_ns);
            notes.last_end_ns = end;
            let consumer = &mut notes.sums.consumer;
            consumer.starts_ns += end;
            consumer.total_ns += end;
        }
    }

    /// Sets the times of the GPU, measured by the caller.
    pub fn set_gpu(&self, gpu: GpuTime) {
        self.shared.notes.hold().sums.gpu = Some(gpu);
    }

    /// Everything that was measured until now.
    pub fn observation(&self) -> Observation {
        let mut sums = {
            let notes = self.shared.notes.hold();
            let mut sums = notes.sums.clone();
            let edges = notes.first_start_ns + notes.last_end_ns;
            sums.consumer.restarts_ns = sums.consumer.starts_ns.saturating_sub(edges);
            sums
        };
        if let Some(sampler) = &*self.sampler.hold() {
            sampler.begun().add_until(&Moment::now(), &mut sums.machine);
        }
        sums.threads
            .sort_by_key(|thread| std::cmp::Reverse(thread.cpu_ns));
        sums
    }

    /// The limit of the loop.
    pub fn diagnosis(&self) -> Diagnosis {
        Diagnosis::of(&self.observation())
    }

    /// The diagnosis and the numbers, as text.
    pub fn report(&self) -> String {
        text::report(&self.observation())
    }

    fn enter(&self, phase: Phase) {
        self.shared.phase.store(phase as u8, Ordering::Relaxed);
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.ends();
        }
    }
}

/// The time, and the CPU time of this thread, in nanoseconds.
fn clocks() -> (u64, u64) {
    (clock(ClockId::Monotonic), clock(ClockId::ThreadCPUTime))
}

fn clock(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn pass(observer: &Observer, batches: u64) {
        observer.starts();
        for _ in 0..batches {
            observer.asks();
            std::thread::sleep(Duration::from_millis(2));
            observer.got(4);
            std::thread::sleep(Duration::from_millis(1));
        }
        observer.asks();
        observer.ends();
    }

    #[test]
    fn waits_steps_and_starts_are_told_apart() {
        let observer = Observer::new(LoaderFacts::default(), None);
        pass(&observer, 5);
        pass(&observer, 3);
        let seen = observer.observation().consumer;
        assert_eq!((seen.epochs, seen.batches, seen.samples), (2, 8, 32));
        assert_eq!(seen.steady_batches, 6);
        assert_eq!(seen.waits.counts.iter().sum::<u64>(), 6);
        assert!(seen.waited_ns >= 6 * 2_000_000, "{seen:?}");
        assert!(seen.steady_ns >= seen.waited_ns + 8 * 1_000_000, "{seen:?}");
        assert!(seen.starts_ns >= 2 * 2_000_000, "{seen:?}");
        assert!(seen.restarts_ns >= 2_000_000 && seen.restarts_ns < seen.starts_ns);
        assert_eq!(seen.total_ns, seen.steady_ns + seen.starts_ns);
    }

    #[test]
    fn the_sampler_lives_from_the_first_batch_to_the_end_of_an_epoch() {
        let observer = Observer::new(LoaderFacts::default(), None);
        observer.starts();
        assert!(observer.sampler.hold().is_none());
        observer.got(1);
        assert!(observer.sampler.hold().is_some());
        observer.asks();
        observer.ends();
        assert!(observer.sampler.hold().is_none());
    }
}
