//! A flag that asks a training loop to save its state and end, before its job is preempted or out
//! of time.
//!
//! ```text
//! SIGTERM, SIGUSR1, … ──► handler: an atomic store ──► a flag per signal, of the process ──┐
//!                                                                                          ├─► Stop::requested()
//! Stop::request(), from any thread ──────────────────► a flag per Stop and its clones ─────┘   polled once per step
//! ```
//!
//! Invariants, tested with real signals (`tests/behaviour/stop.rs`):
//! - A handler is installed only on request, for the requested signals, once per process. It stores
//!   into an atomic, or ends the process; no lock, no allocation (signal-hook's flags, whose
//!   handler first calls an earlier one).
//! - A second SIGINT (Ctrl-C) ends the process by that signal; no other signal does, since
//!   launchers send them twice.
//! - A received signal stays recorded for the whole process.
//! - Handlers stay until the process ends. signal-hook can remove its actions but does not restore
//!   the default action, so removal would gain nothing.
//!
//! Limits: a signal that arrives while its handler is being installed may be lost. Linux merges
//! equal signals that are pending together, so two SIGTERMs at once may be one.

use crate::error::Result;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that a training loop polls, so that it can save its state and end in time. Clones share
/// it; any thread may set or read it.
///
/// ```
/// let stop = feedline_base::stop::Stop::new();
/// let elsewhere = stop.clone();
/// assert!(!stop.requested());
/// elsewhere.request();
/// assert!(stop.requested());
/// ```
///
/// # Signals
///
/// `Stop::on_signals()` makes one that SIGTERM and SIGUSR1 set, and `Stop::on([…])` one for other
/// signals. Slurm sends SIGTERM at the end of a job's time and kills it `KillWait` (30 s unless
/// configured) later; with `--signal=USR1@120` it sends SIGUSR1 two minutes before the end to the
/// job's steps. Kubernetes sends SIGTERM to the first process of a container and kills it
/// `terminationGracePeriodSeconds` later. A shell script in between must forward the signal, or
/// start the program with `exec`.
///
/// - From then on these signals only set the flag, however often they come: Slurm and launchers
///   that forward signals send SIGTERM more than once, which must not interrupt the saving of a
///   state. Only a second SIGINT (a user's second Ctrl-C) ends the process, as by default. A loop
///   that no longer polls needs SIGKILL.
/// - Signals belong to the process: every `Stop` for a signal sees it, even one made later. The
///   flag stays set. A second call installs no second handler.
/// - Handlers stay when every `Stop` is dropped.
///
/// # Several ranks
///
/// A signal reaches ranks at different steps, and some not at all. A rank that stops alone leaves
/// the others waiting in their next collective operation, and states of different steps do not fit
/// together. So let the ranks agree: all-reduce the flag in every step, and stop when the result
/// says so.
///
/// ```text
/// let stop = Stop::on_signals()?;
/// for batch in loader.epoch(epoch)? {
///     train(batch?);
///     // The same answer on every rank after the same step; alone, `stop.requested()` will do.
///     if all_reduce_max(stop.requested()) {
///         state.save(path)?;
///         break;
///     }
/// }
/// ```
#[derive(Clone, Default)]
pub struct Stop {
    shared: Arc<StopState>,
}

#[derive(Default)]
struct StopState {
    requested: AtomicBool,
    signals: signals::Watch,
}

impl Stop {
    /// A flag that only [`request`](Self::request) sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag of this `Stop` and its clones.
    pub fn request(&self) {
        self.shared.requested.store(true, Ordering::Release);
    }

    /// Whether the flag was set, by [`request`](Self::request) or by a signal. A few atomic loads:
    /// poll it every step.
    pub fn requested(&self) -> bool {
        // Checks the signal first, because this call records it.
        self.signal().is_some() || self.shared.requested.load(Ordering::Acquire)
    }

    /// A flag set by SIGTERM and SIGUSR1, which schedulers send before they end a job. Errors:
    /// those of [`on`](Self::on).
    pub fn on_signals() -> Result<Self> {
        Self::on([Signal::Term, Signal::Usr1])
    }

    /// A flag set by these signals; without signals the same as [`new`](Self::new).
    ///
    /// Errors: [`ErrorKind::Io`](crate::error::ErrorKind::Io) when the operating system refuses a
    /// handler; handlers installed before stay.
    pub fn on(signals: impl IntoIterator<Item = Signal>) -> Result<Self> {
        let signals = signals::Watch::new(signals)?;
        Ok(Self {
            shared: Arc::new(StopState {
                requested: AtomicBool::new(false),
                signals,
            }),
        })
    }

    /// The first of this flag's signals that arrived, as recorded by this method and
    /// [`requested`](Self::requested). If several signals arrived since the last call, it is the
    /// first in the order of [`on`](Self::on).
    pub fn signal(&self) -> Option<Signal> {
        self.shared.signals.first()
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Stop");
        out.field("requested", &self.requested());
        out.field("signal", &self.signal());
        out.finish()
    }
}

pub use signals::Signal;

mod signals {
    use crate::error::{Error, Result, Stage};
    use crate::sync::Hold;
    use signal_hook::low_level::signal_name;
    use signal_hook::{consts, flag};
    use std::fmt;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, OnceLock};

    /// A signal that can set a [`Stop`](super::Stop).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    #[repr(i32)]
    pub enum Signal {
        /// SIGTERM: sent by `kill`, Slurm and Kubernetes.
        Term = consts::SIGTERM,
        /// SIGINT: Ctrl-C. A second one ends the process.
        Int = consts::SIGINT,
        /// SIGHUP: the terminal was closed. Sets the flag even under `nohup`.
        Hup = consts::SIGHUP,
        /// SIGUSR1: Slurm's `--signal=USR1@120`.
        Usr1 = consts::SIGUSR1,
        /// SIGUSR2.
        Usr2 = consts::SIGUSR2,
    }

    /// The signals that the process received, by their numbers.
    static CAME: [AtomicBool; 32] = [const { AtomicBool::new(false) }; 32];

    impl Signal {
        fn came(self) -> &'static AtomicBool {
            &CAME[self as usize]
        }

        /// Installs the handler, once per process.
        fn install(self) -> Result<()> {
            static INSTALLED: Mutex<Vec<Signal>> = Mutex::new(Vec::new());
            let mut installed = INSTALLED.hold();
            if !installed.contains(&self) {
                self.register()
                    .map_err(|e| Error::os(Stage::Build, format!("no handler for {self}"), e))?;
                installed.push(self);
            }
            Ok(())
        }

        fn register(self) -> std::io::Result<()> {
            // Actions run in the order of their registration: the first signal finds the flag
            // unset.
            if self == Self::Int {
                flag::register_conditional_default(self as i32, self.came())?;
            }
            flag::register(self as i32, self.came())?;
            Ok(())
        }
    }

    impl fmt::Display for Signal {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(signal_name(*self as i32).unwrap_or_default())
        }
    }

    /// The signals of one `Stop`, and the first of them that it saw.
    #[derive(Default)]
    pub(super) struct Watch {
        watched: Vec<Signal>,
        first: OnceLock<Signal>,
    }

    impl Watch {
        pub(super) fn new(signals: impl IntoIterator<Item = Signal>) -> Result<Self> {
            let mut watch = Self::default();
            for signal in signals {
                signal.install()?;
                watch.watched.push(signal);
            }
            Ok(watch)
        }

        pub(super) fn first(&self) -> Option<Signal> {
            self.first.get().copied().or_else(|| {
                self.watched
                    .iter()
                    .find(|signal| signal.came().load(Ordering::Acquire))
                    .map(|signal| *self.first.get_or_init(|| *signal))
            })
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_signal_has_the_kernels_name() {
            for (signal, name) in [
                (Signal::Term, "SIGTERM"),
                (Signal::Int, "SIGINT"),
                (Signal::Usr2, "SIGUSR2"),
            ] {
                assert_eq!(signal.to_string(), name);
            }
        }
    }
}
