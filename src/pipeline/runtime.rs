//! The threads of a loader: how they start, end and are joined.

use super::Core;
use super::planner::Planner;
use super::workers::Workers;
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught};
use feedline_base::setting::Setting;
use feedline_base::thread;
use feedline_report::meter::{Meters, PipelineStage};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Deadline to join the threads, beyond the deadline for reads in flight.
const JOIN: Duration = Duration::from_secs(6);

/// Time for idle workers to end. Their pool is dropped last, when other threads may have used up
/// [`JOIN`].
const WORKERS_END: Duration = Duration::from_secs(1);

/// Threads of this process that missed the deadline. They are abandoned with all memory they can
/// reach.
static ABANDONED: AtomicU64 = AtomicU64::new(0);

/// Number of threads in this process that missed the deadline at a shutdown.
pub(crate) fn abandoned() -> u64 {
    ABANDONED.load(Ordering::Relaxed)
}

/// Owns the threads. Dropping it ends and joins them.
pub(crate) struct Runtime {
    core: Option<Arc<Core>>,
    io: Option<JoinHandle<()>>,
    /// Threads that only a device needs.
    others: Vec<JoinHandle<()>>,
    workers: Handles,
}

/// The threads of the decode workers. They end when their pool is dropped; `Handles` drops the pool
/// before it joins them.
pub(crate) struct Handles {
    threads: Vec<JoinHandle<()>>,
    /// The pool with its queues, once started.
    workers: Option<Arc<Workers>>,
}

impl Handles {
    pub(crate) fn len(&self) -> usize {
        self.threads.len()
    }

    /// Takes ownership of the pool.
    pub(crate) fn keep(&mut self, workers: Arc<Workers>) {
        self.workers = Some(workers);
    }

    /// Whether the calling thread belongs to the pool.
    fn is_own(&self) -> bool {
        self.workers
            .as_ref()
            .is_some_and(|workers| workers.pool.current_thread_index().is_some())
    }

    fn join(&mut self, deadline: Instant) {
        self.workers = None;
        self.threads
            .drain(..)
            .for_each(|thread| join(thread, deadline));
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        self.join(Instant::now() + JOIN);
    }
}

/// Makes a private rayon pool with joinable threads, fewer than wanted if the system refuses some.
/// They inherit the CPUs of the calling thread, see `placement`.
pub(crate) fn pool(
    workers: usize,
    meters: impl Fn(usize) -> Arc<Meters>,
) -> Result<(rayon::ThreadPool, Handles, Arc<Meters>)> {
    let mut last = None;
    let (pool, threads) = thread::pool("decode workers", "feedline-dec", workers, |count| {
        let meters = last.insert(meters(count)).clone();
        move || {
            meters.threads.enlist(PipelineStage::Decode);
            // Dropped early, because the pool can outlive the loader: the user's own transform may
            // drop the loader.
            drop(meters);
        }
    })?;
    let meters = last.expect("made for the pool");
    Ok((
        pool,
        Handles {
            threads,
            workers: None,
        },
        meters,
    ))
}

impl Runtime {
    /// Starts the I/O thread. The caller must hold no other handle to the pool. If this thread
    /// cannot start, the pool is dropped here and the workers are joined.
    pub(crate) fn start(core: Arc<Core>, mut io: Planner, workers: Handles) -> Result<Self> {
        let mut runtime = Self {
            core: Some(core),
            io: None,
            others: Vec::new(),
            workers,
        };
        runtime.io = Some(spawn_guarded(
            runtime.core(),
            "feedline-io".into(),
            PipelineStage::Order,
            move || io.run(),
        )?);
        Ok(runtime)
    }

    /// Starts a thread that ends with the loader, after the I/O thread.
    pub(crate) fn spawn<F: FnOnce() + Send + 'static>(
        &mut self,
        name: String,
        of: PipelineStage,
        body: F,
    ) -> Result<()> {
        self.others
            .push(spawn_guarded(self.core(), name, of, body)?);
        Ok(())
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        self.core.as_ref().expect("taken only by drop")
    }
}

/// Runs work that may wait for storage on its own thread, for at most `deadline`. A thread that has
/// not ended by then is abandoned and counted. A panic propagates to the caller.
///
/// Errors: [`ErrorKind::Stalled`], which says that `what` has not answered.
pub(crate) fn within<T: Send + 'static>(
    deadline: Duration,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (send, done) = crossbeam_channel::bounded(1);
    let thread = thread::start("look at the dataset", "feedline-look", move || {
        drop(send.send(catch_unwind(AssertUnwindSafe(work))))
    })?;
    let Ok(did) = done.recv_timeout(deadline) else {
        ABANDONED.fetch_add(1, Ordering::Relaxed);
        let see = Setting::StallDeadline.hint(|deadline| format!("; see {deadline}"));
        let message = format!(
            "{what} has not answered for {:.1} s{see}",
            deadline.as_secs_f64()
        );
        return Err(Error::new(ErrorKind::Stalled, Stage::Open, message));
    };
    let _ = thread.join();
    did.or_else(|panic| std::panic::resume_unwind(panic))
}

/// Adds the sample's location (file and offset) to the error of a stall, if a decoder or transform
/// is stuck on that sample. This path is cold. The dataset is user code and may need a resource
/// that the stuck thread holds, so it gets one second.
pub(crate) fn placed(core: &Arc<Core>, stalled: Error) -> Error {
    let asked =
        matches!(stalled.stage(), Stage::Decode | Stage::Map) && stalled.site().path.is_none();
    let Some(sample) = stalled.site().sample.filter(|_| asked) else {
        return stalled;
    };
    let holder = core.clone();
    let error = stalled.clone_lossy();
    within(Duration::from_secs(1), "the dataset", move || {
        holder.samples.named_by_id(error, sample)
    })
    .unwrap_or(stalled)
}

/// Starts a thread whose panic becomes the error of the loader.
fn spawn_guarded(
    core: &Arc<Core>,
    name: String,
    of: PipelineStage,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let core = core.clone();
    let called = name.clone();
    let stage = if of == PipelineStage::Copy {
        Stage::Device
    } else {
        Stage::Read
    };
    thread::start(&format!("pipeline ({name})"), &name, move || {
        core.meters.threads.enlist(of);
        if let Err(error) = caught(stage, || {
            body();
            Ok(())
        }) {
            core.fail(Error::new(
                ErrorKind::Panicked,
                stage,
                format!("thread {called}: {}", error.message()),
            ));
        }
    })
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let Some(core) = self.core.take() else { return };
        // Batches of older runs are no longer delivered: from here on, full slots return at once.
        core.exchange.generation.fetch_add(1, Ordering::AcqRel);
        core.to_io.shutdown.store(true, Ordering::Release);
        core.exchange.ring();
        let deadline = Instant::now() + JOIN;
        for thread in self.io.take().into_iter().chain(self.others.drain(..)) {
            join(thread, deadline);
        }
        // Drains hold the pool. The last drain must end before the pool is dropped, or the pool
        // would end on one of its own threads. One of the drains may be dropping the loader, in the
        // user's own transform.
        let own = usize::from(self.workers.is_own());
        while core.to_workers.drains.active() > own && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(50));
        }
        core.to_workers.let_go();
        core.exchange.close();
        drop(core);
        if own > 0 {
            // The drain of this thread holds the pool, and releases it on return. Then the threads
            // end.
            self.workers.threads.clear();
        }
        self.workers
            .join(deadline.max(Instant::now() + WORKERS_END));
    }
}

fn join(thread: JoinHandle<()>, deadline: Instant) {
    // The thread may be the calling thread, because its transform dropped a batch or loader. A
    // thread cannot join itself.
    if thread.thread().id() == std::thread::current().id() {
        return;
    }
    let mut pause = Duration::from_micros(20);
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            ABANDONED.fetch_add(1, Ordering::Relaxed);
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
    // A panic was already reported.
    let _ = thread.join();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stalled_call_is_abandoned_and_a_panic_propagates() {
        assert_eq!(within(Duration::MAX, "this", || 7).unwrap(), 7);
        let (word, never) = crossbeam_channel::bounded::<()>(0);
        let before = abandoned();
        let error = within(Duration::from_millis(20), "the dataset", move || {
            never.recv()
        })
        .unwrap_err();
        assert_eq!(
            (error.kind(), abandoned() > before),
            (ErrorKind::Stalled, true)
        );
        assert!(
            error
                .message()
                .starts_with("the dataset has not answered for 0.0 s"),
            "{error}"
        );
        drop(word);
        assert!(catch_unwind(|| within(Duration::MAX, "this", || panic!("a bug"))).is_err());
    }
    use crate::pipeline::placement::{on_node, tests};

    #[test]
    fn workers_run_where_the_pool_was_made() {
        let (cpu, all) = tests::own_cpus();
        for (place, cpus) in [(Some(tests::placement(&cpu)), cpu), (None, all)] {
            let meters = Arc::new(Meters::new(feedline_base::meter::Clock::real(), 3, false));
            let (pool, workers, _) = on_node(place.as_ref(), || pool(3, |_| meters.clone()))
                .unwrap()
                .unwrap();
            assert_eq!(pool.broadcast(|_| tests::here()), vec![cpus; 3]);
            drop((pool, workers));
        }
    }

    #[test]
    fn dropped_handles_wait_for_their_threads() {
        let ended = Arc::new(AtomicU64::new(0));
        let count = ended.clone();
        let body = move || {
            std::thread::sleep(Duration::from_millis(30));
            count.fetch_add(1, Ordering::SeqCst);
        };
        let threads = vec![thread::spawn("feedline-test", body).unwrap()];
        drop(Handles {
            threads,
            workers: None,
        });
        assert_eq!(ended.load(Ordering::SeqCst), 1);
    }
}
