//! A dashboard in the terminal during a run: speed, starvation, and its cause.
//!
//! ```text
//! feedline  images, train/               running · epoch 0 · 300 batches · 0:01:00
//!                 now      mean                  now      mean
//! samples/s     1,280     1,274  starved      25.0 %    25.0 %
//! GB/s          0.193     0.192  AU           75.0 %    74.9 %  target 90 % missed
//! samples/s  ▇▇▇▇▇▇▇██▇▇▇▇▇▇▇██▇▇▇▇▇▇▇██▇▇▇▇▇▇▇██▇▇▇▇▇▇▇██▇▇▇▇▇▇▇██ max 1,357
//! starved    ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂ last 1 min
//! stages ───────────────────────────────────────────────────────────── last 2.00 s
//!   order     █░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░    0.4 %     320,000/s
//!   storage   █████████████████████████░░░░░░░░░░░   70.0 %  ≥    1,829/s
//! ▶ decode    ███████████████████████████████████░   99.0 %       1,293/s  CAUSE
//!   consumer  ███████████████████████████░░░░░░░░░   75.0 %       1,707/s
//! slots      ██▒▒▒▒▒▒░░░░  █ held 0.8  ▓ full 0.0  ▒ filling 3.0  ░ free 2.2  of 6
//! busy       9.0 of 32 reads, 4.0 of 4 workers, 5.0 queued
//! latency            read        work        copy        wait
//!   p50           1.20 ms     2.90 ms           –    50.00 ms
//!   p99           3.60 ms     8.70 ms           –   150.00 ms
//! bound by decode, starved 25.0 % (strong evidence)
//!   → Decode needs 5.3 cores, has 4: `workers(6)` would give 1,606 samples/s or
//!     more, the bottleneck is then the consumer, at 1,707.
//! q quit  p pause  +/- window 2 s  w whole run
//! ```
//!
//! Its own thread takes a snapshot of the loader four times a second, and draws; the loader's threads are not involved.
//! `state` keeps the snapshots and computes figures. `view` turns them into lines (pure, for any size). `text` makes
//! bars and numbers. `screen` owns the terminal.
//!
//! # Meaning of the figures
//!
//! - *now* is the window: its chosen length, or, as the screen then shows, back to 8 batches (at most 30 s).
//! - Rates cover the time with an active iterator, including waits for first batches. Starved and AU cover the steady
//!   time, without those waits. AU is batches × step ÷ steady time, with the current step counted in part; the mean
//!   omits the first step.
//! - Beside its share of time, each stage shows its possible rate without waits; ≥ marks a lower bound.
//! - A wait counts at its end. Until then the head shows the time since the last batch.
//!
//! # Limits
//!
//! - Other output to the terminal garbles the screen until it is resized.
//! - A terminal that goes away (window closed, connection lost) acts as q.
//! - A panic of any thread, even one that the loader catches, ends the dashboard, so that its message is readable.
//! - After q, Esc or Ctrl-C the terminal is restored at once, and [`Live::quit`] tells the caller to end. A second
//!   Ctrl-C is then the usual signal. SIGTERM does the same. Both need a caller that
//!   checks.

mod keys;
mod screen;
mod state;
mod text;
mod view;

use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use feedline::Loader;
use keys::Keys;
use screen::{Look, Screen};
use state::State;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Information that the loader does not have.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// A short description of the data.
    pub title: String,
    /// Length of the consumer's step without waits; with it, the accelerator's utilisation (AU) is shown.
    pub step: Option<Duration>,
    /// Required AU, 0 … 1.
    pub au_target: Option<f64>,
}

/// The dashboard. Dropping it restores the terminal.
pub struct Live {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    screen: Screen,
    keys: Keys,
    /// The user wants to end.
    quit: AtomicBool,
    /// The caller has ended.
    end: AtomicBool,
}

/// Interval of snapshots.
const TICK: Duration = Duration::from_millis(250);
/// Maximum sleep, and so the maximum delay of the end.
const NAP: Duration = Duration::from_millis(125);
/// Maximum wait for the thread at the end.
const PATIENCE: Duration = Duration::from_secs(1);

impl Live {
    /// Takes over the terminal, and draws until the user or the caller ends.
    ///
    /// Errors: standard output is no terminal, or setting up the terminal fails.
    pub fn start(loader: Arc<Loader>, setup: Setup) -> Result<Self, Box<dyn Error>> {
        let terminated = Terminated::watch()?;
        let screen = Screen::open()?;
        let shared = Arc::new(Shared { keys: Keys::open(), screen, quit: false.into(), end: false.into() });
        let hooked = shared.clone();
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            hooked.screen.close();
            before(panic);
        }));
        let mut live = Self { shared: shared.clone(), thread: None };
        let run = move || {
            // Without a writable terminal the user is gone.
            if shared.run(&loader, State::new(setup), &terminated).unwrap_or(true) {
                shared.quit.store(true, Ordering::Release);
            }
            shared.screen.close();
        };
        // If no thread starts, dropping `live` restores the terminal.
        live.thread = Some(std::thread::Builder::new().name("live".into()).spawn(run)?);
        Ok(live)
    }

    /// Whether the user pressed q, Esc or Ctrl-C, or SIGTERM came.
    pub fn quit(&self) -> bool {
        self.shared.quit.load(Ordering::Acquire)
    }

    /// Restores the terminal, and releases the loader.
    pub fn end(self) {}
}

impl Drop for Live {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let late = Instant::now() + PATIENCE;
            while !thread.is_finished() && Instant::now() < late {
                std::thread::sleep(Duration::from_millis(1));
            }
            // A panic there was already reported. A thread stuck on a dead terminal is abandoned.
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
        self.shared.screen.close();
    }
}

impl Shared {
    /// Draws until the end; returns whether the user ended it.
    fn run(&self, loader: &Loader, mut state: State, terminated: &Terminated) -> io::Result<bool> {
        let (look, mut terminal) = (Look::of_environment(), screen::terminal()?);
        let (mut due, mut dirty) = (Instant::now(), false);
        while !self.end.load(Ordering::Acquire) {
            if terminated.requested() {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= due {
                // A paused screen stays unchanged.
                dirty |= state.push(|| (loader.snapshot(), loader.timeline()));
                due = now + TICK;
            }
            if dirty && !self.screen.draw(&mut terminal, &state, look)? {
                return Ok(false);
            }
            dirty = false;
            let Some(pressed) = self.keys.wait(due.saturating_duration_since(Instant::now()).min(NAP))? else {
                return Ok(true);
            };
            if pressed {
                match event::read()? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => match action(key) {
                        Some(Action::Quit) => return Ok(true),
                        Some(Action::Pause) => state.pause(),
                        Some(Action::Window(by)) => state.change_window(by),
                        Some(Action::Whole) => state.toggle_whole(),
                        None => continue,
                    },
                    Event::Resize(..) => {}
                    _ => continue,
                }
                dirty = true;
            }
        }
        Ok(false)
    }
}

/// Action of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Quit,
    Pause,
    /// Lengthens (1) or shortens (-1) the window.
    Window(isize),
    Whole,
}

fn action(key: KeyEvent) -> Option<Action> {
    Some(match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => Action::Quit,
        _ if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) => return None,
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => Action::Quit,
        KeyCode::Char('p' | 'P' | ' ') => Action::Pause,
        KeyCode::Char('+' | '=') => Action::Window(1),
        KeyCode::Char('-' | '_') => Action::Window(-1),
        KeyCode::Char('w' | 'W') => Action::Whole,
        _ => return None,
    })
}

/// Whether SIGTERM came.
struct Terminated {
    stop: feedline::Stop,
}

impl Terminated {
    fn watch() -> feedline::Result<Self> {
        Ok(Self { stop: feedline::Stop::on([feedline::Signal::Term])? })
    }

    fn requested(&self) -> bool {
        return self.stop.requested();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_the_footer() {
        let (none, control, alt) = (KeyModifiers::NONE, KeyModifiers::CONTROL, KeyModifiers::ALT);
        for (code, modifiers, wanted) in [
            (KeyCode::Char('q'), none, Some(Action::Quit)),
            (KeyCode::Esc, none, Some(Action::Quit)),
            (KeyCode::Char('c'), control, Some(Action::Quit)),
            (KeyCode::Char('c'), none, None),
            (KeyCode::Char('q'), alt, None),
            (KeyCode::Char('w'), control, None),
            (KeyCode::Char('p'), none, Some(Action::Pause)),
            (KeyCode::Char('+'), KeyModifiers::SHIFT, Some(Action::Window(1))),
            (KeyCode::Char('='), none, Some(Action::Window(1))),
            (KeyCode::Char('-'), none, Some(Action::Window(-1))),
            (KeyCode::Char('w'), none, Some(Action::Whole)),
            (KeyCode::Enter, none, None),
        ] {
            assert_eq!(action(KeyEvent::new(code, modifiers)), wanted, "{code:?} {modifiers:?}");
        }
    }
}
