//! A dashboard in the terminal during a run: speed, starvation, and its cause.
//!
//! ```text
//! head      data, epoch, batches, time
//! figures   samples/s, GB/s, starved, AU: now and in the whole run      plots of the first and the third
//! stages    a gauge for each: its busy share, and the samples/s that it could do
//! queues    means of slots, reads and workers; latencies of the whole run      (on a high terminal)
//! verdict   cause, advice, evidence
//! ```
//!
//! Its own thread takes a snapshot of the loader four times a second, and draws; the loader's
//! threads are not involved. *Now* is the last 2 seconds, or, where batches are slow, back to 8
//! batches, at most 30 s.

use crate::text::{name, number, percent, time};
use feedline::Loader;
use feedline::profile::snapshot::{Latency, PipelineStage};
use feedline::profile::verdict::{Cause, StageLoad};
use feedline::profile::{Snapshot, Verdict};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Gauge, Paragraph, Row, Sparkline, Table, Wrap};
use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Information that the loader does not have.
pub struct Setup {
    /// A short description of the data.
    pub title: String,
    /// Length of the consumer's step; with it, the accelerator's utilisation (AU) is shown.
    pub step: Option<Duration>,
    /// Required AU, 0 … 1.
    pub au_target: Option<f64>,
}

/// The dashboard. Dropping it restores the terminal.
pub struct Live {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// The user wants to end.
    quit: AtomicBool,
    /// The caller has ended.
    end: AtomicBool,
}

/// Interval of snapshots.
const TICK: Duration = Duration::from_millis(250);
/// Maximum wait for the thread at the end.
const PATIENCE: Duration = Duration::from_secs(1);
const SECOND: u64 = 1_000_000_000;
/// The window of *now*.
const WINDOW: u64 = 2 * SECOND;
const WINDOW_MOST: u64 = 30 * SECOND;
const WINDOW_BATCHES: u64 = 8;
/// Lines of figures and plots.
const PLOTS_LEAST: u16 = 6;
/// Columns of a plot, one for each snapshot.
const PLOTTED: usize = 300;
const STRONG: Style = Style::new().bold();
const HOT: Style = Style::new().red().bold();
const GOOD: Style = Style::new().green().bold();

impl Live {
    /// Takes over the terminal, and draws until the user or the caller ends.
    pub fn start(loader: Arc<Loader>, setup: Setup) -> Result<Self, Box<dyn Error>> {
        let terminal = ratatui::try_init()
            .map_err(|error| format!("the terminal cannot be set up: {error}"))?;
        let shared = Arc::new(Shared::default());
        let mut live = Self {
            shared: shared.clone(),
            thread: None,
        };
        let run = move || {
            // Without a usable terminal the user is gone.
            if draw_until_end(terminal, &loader, State::new(setup), &shared.end).unwrap_or(true) {
                shared.quit.store(true, Ordering::Release);
            }
            ratatui::restore();
        };
        live.thread = Some(std::thread::Builder::new().name("live".into()).spawn(run)?);
        Ok(live)
    }

    /// Whether the user pressed q, Esc or Ctrl-C.
    pub fn quit(&self) -> bool {
        self.shared.quit.load(Ordering::Acquire)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else {
            return ratatui::restore();
        };
        let late = Instant::now() + PATIENCE;
        while !thread.is_finished() && Instant::now() < late {
            std::thread::sleep(Duration::from_millis(1));
        }
        // crossterm never returns from the input of a lost terminal: such a thread is abandoned.
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

/// Returns whether the user ended it.
fn draw_until_end(
    mut terminal: ratatui::DefaultTerminal,
    loader: &Loader,
    mut state: State,
    end: &AtomicBool,
) -> io::Result<bool> {
    let mut due = Instant::now();
    while !end.load(Ordering::Acquire) {
        if Instant::now() >= due {
            due = Instant::now() + TICK;
            if !state.paused {
                state.push(loader.snapshot());
            }
        }
        terminal.draw(|frame| state.draw(frame))?;
        if event::poll(due.saturating_duration_since(Instant::now()).min(TICK / 2))?
            && let Event::Key(key) = event::read()?
            && !state.obey(key)
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The snapshots of the last half minute, and what is drawn of them.
struct State {
    setup: Setup,
    history: VecDeque<Snapshot>,
    /// Samples per second and starved share at each snapshot, newest first.
    rates: VecDeque<u64>,
    starved: VecDeque<u64>,
    /// Stages, queues and verdict are of the whole run, not of the window.
    whole: bool,
    paused: bool,
}

impl State {
    fn new(setup: Setup) -> Self {
        let (history, rates, starved) = Default::default();
        Self {
            setup,
            history,
            rates,
            starved,
            whole: false,
            paused: false,
        }
    }

    /// Returns whether to go on.
    fn obey(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            _ if key.kind == KeyEventKind::Release => {}
            KeyCode::Char('c') if control => return false,
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('w') => self.whole = !self.whole,
            _ => {}
        }
        true
    }

    fn push(&mut self, snapshot: Snapshot) {
        let keep = snapshot.at_ns.saturating_sub(WINDOW_MOST + SECOND);
        while self
            .history
            .front()
            .is_some_and(|oldest| oldest.at_ns < keep)
        {
            self.history.pop_front();
        }
        self.history.push_back(snapshot);
        let now = self.now();
        self.rates
            .push_front(samples_per_s(&now).unwrap_or(0.0) as u64);
        self.starved
            .push_front((100.0 * Verdict::of(&now).starved_share) as u64);
        self.rates.truncate(PLOTTED);
        self.starved.truncate(PLOTTED);
    }

    /// The measurements of the window.
    fn now(&self) -> Snapshot {
        let Some(last) = self.history.back() else {
            return Snapshot::default();
        };
        let enough = |before: &&Snapshot| {
            let ns = last.at_ns - before.at_ns;
            let batches = last.consumer.batches - before.consumer.batches;
            ns >= WINDOW && (batches >= WINDOW_BATCHES || ns >= WINDOW_MOST)
        };
        match self
            .history
            .iter()
            .rev()
            .find(enough)
            .or(self.history.front())
        {
            Some(before) if before.at_ns < last.at_ns => last.since(before),
            _ => last.clone(),
        }
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let Some(all) = self.history.back() else {
            return;
        };
        let now = self.now();
        let scope = if self.whole { all } else { &now };
        let verdict = Verdict::of(scope);
        let Rect { width, height, .. } = frame.area();
        let stages_high = 1 + verdict.stages.len() as u16;
        let queues_high = if height >= 32 { 6 } else { 0 };
        let (said, said_high) = said(&verdict, width);
        let room = height.saturating_sub(2 + PLOTS_LEAST + stages_high + queues_high);
        let [head, top, stages, queues, words, keys] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Min(PLOTS_LEAST),
            Constraint::Length(stages_high),
            Constraint::Length(queues_high),
            Constraint::Length(said_high.min(room)),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(self.head(all), head);
        let [figures, plots] =
            Layout::horizontal([Constraint::Length(40), Constraint::Fill(1)]).areas(top);
        frame.render_widget(self.figures(&now, all), figures);
        self.plots(frame, plots);
        let about = if self.whole {
            "whole run".into()
        } else {
            format!("last {}", time(now.at_ns as f64))
        };
        draw_stages(frame, stages, &verdict, &about);
        draw_queues(frame, queues, scope, all);
        frame.render_widget(said, words);
        let pause = if self.paused { "p resume" } else { "p pause" };
        let whole = if self.whole { "w now" } else { "w whole run" };
        frame.render_widget(Line::from(format!("q quit  {pause}  {whole}")).dim(), keys);
    }

    fn head(&self, all: &Snapshot) -> Line<'static> {
        let seconds = all.at_ns / SECOND;
        let clock = format!(
            "{}:{:02}:{:02}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60
        );
        let state = match all.consumer.batches {
            _ if self.paused => " PAUSED ".reversed(),
            0 => " waiting for the first batch ".reversed(),
            batches => format!("batch {}", indicatif::HumanCount(batches)).into(),
        };
        vec![
            "feedline  ".dim(),
            self.setup.title.clone().bold(),
            "  ".into(),
            state,
            format!("  {clock}").into(),
        ]
        .into()
    }

    fn figures(&self, now: &Snapshot, all: &Snapshot) -> Table<'static> {
        let starved =
            |part: &Snapshot| Some(Verdict::of(part)).filter(|verdict| !verdict.stages.is_empty());
        let starved = |part| or_none(starved(part).map(|verdict| verdict.starved_share), percent);
        let rate = |part| or_none(samples_per_s(part), number);
        let bytes = |part: &Snapshot| {
            or_none(per_s(part, part.consumer.bytes), |rate| {
                format!("{:.3}", rate / 1e9)
            })
        };
        let row = |name: &'static str, now: String, all: String| {
            Row::new([Span::raw(name), Span::styled(now, STRONG), Span::raw(all)])
        };
        let mut rows = vec![
            row("samples/s", rate(now), rate(all)),
            row("GB/s", bytes(now), bytes(all)),
            row("starved", starved(now), starved(all)),
        ];
        if let Some(step) = self.setup.step {
            let au = |part| utilisation(part, step);
            let style = match (au(all), self.setup.au_target) {
                (Some(au), Some(target)) if au >= target => GOOD,
                (Some(_), Some(_)) => HOT,
                _ => Style::new(),
            };
            let name = self.setup.au_target.map_or("AU".into(), |target| {
                format!("AU of {:.0} %", 100.0 * target)
            });
            let now = or_none(au(now), percent);
            let all = or_none(au(all), percent);
            rows.push(Row::new([
                Span::raw(name),
                Span::styled(now, STRONG),
                Span::styled(all, style),
            ]));
        }
        Table::new(rows, [12, 12, 12]).header(Row::new(["", "now", "whole run"]).dim())
    }

    fn plots(&self, frame: &mut Frame<'_>, area: Rect) {
        let [above, below] = Layout::vertical([Constraint::Fill(1); 2]).areas(area);
        let plot = |values: &VecDeque<u64>, most: u64, title: String, style| {
            let block = Block::new().borders(Borders::TOP).title(title);
            let newest_right = ratatui::widgets::RenderDirection::RightToLeft;
            Sparkline::default()
                .data(values)
                .max(most)
                .direction(newest_right)
                .style(style)
                .block(block)
        };
        let seen = self
            .rates
            .iter()
            .take(usize::from(area.width))
            .copied()
            .max()
            .unwrap_or(0);
        let title = format!("samples/s, up to {} ", number(seen as f64));
        frame.render_widget(plot(&self.rates, seen, title, Style::new().cyan()), above);
        frame.render_widget(
            plot(
                &self.starved,
                100,
                "starved, of 100 % ".into(),
                Style::new().yellow(),
            ),
            below,
        );
    }
}

fn per_s(part: &Snapshot, amount: u64) -> Option<f64> {
    let ns = part.steady_ns.saturating_add(part.consumer.first_ns);
    (ns > 0).then(|| amount as f64 / ns as f64 * 1e9)
}

fn samples_per_s(part: &Snapshot) -> Option<f64> {
    per_s(part, part.consumer.samples)
}

/// Steps per steady time. The step of the last batch is under way.
fn utilisation(part: &Snapshot, step: Duration) -> Option<f64> {
    let batches = part
        .consumer
        .batches
        .saturating_sub(u64::from(part.consumer.first_ns > 0));
    let busy = batches as f64 * step.as_nanos() as f64;
    (part.steady_ns > 0).then(|| (busy / part.steady_ns as f64).min(1.0))
}

fn or_none(value: Option<f64>, text: impl Fn(f64) -> String) -> String {
    value.map_or("–".into(), text)
}

fn draw_stages(frame: &mut Frame<'_>, area: Rect, verdict: &Verdict, about: &str) {
    let lines = Layout::vertical(vec![Constraint::Length(1); 1 + verdict.stages.len()]).split(area);
    frame.render_widget(
        Block::new()
            .borders(Borders::TOP)
            .title(format!("stages, {about} ")),
        lines[0],
    );
    // In the order of the data.
    for (load, line) in verdict.stages.iter().rev().zip(&lines[1..]) {
        let StageLoad {
            stage,
            utilisation,
            ceiling_items_per_s,
            at_least,
            ..
        } = *load;
        let (style, mark) = match verdict.cause {
            Cause::NotStarved if stage == PipelineStage::Consumer => (GOOD, "◀ limits"),
            cause if cause == stage.into() => (HOT, "◀ CAUSE"),
            _ if verdict.also == Some(stage.into()) => (STRONG.yellow(), "◀ also"),
            _ => (Style::new().cyan(), ""),
        };
        let sizes = [
            Constraint::Length(26),
            Constraint::Fill(1),
            Constraint::Length(20),
            Constraint::Length(9),
        ];
        let [left, bar, right, end] = Layout::horizontal(sizes).areas(*line);
        frame.render_widget(Line::styled(name(stage.into()), style), left);
        let gauge = Gauge::default()
            .ratio(utilisation.clamp(0.0, 1.0))
            .label(percent(utilisation));
        frame.render_widget(
            gauge.gauge_style(style.on_dark_gray()).use_unicode(true),
            bar,
        );
        let least = if at_least { "≥ " } else { "" };
        frame.render_widget(
            Line::from(format!("{least}{}/s ", number(ceiling_items_per_s))).right_aligned(),
            right,
        );
        frame.render_widget(Line::styled(mark, style), end);
    }
}

fn draw_queues(frame: &mut Frame<'_>, area: Rect, scope: &Snapshot, all: &Snapshot) {
    let mean = |ns: u64| format!("{:.1}", ns as f64 / scope.steady_ns.max(1) as f64);
    let Snapshot {
        slots,
        storage,
        decode,
        ..
    } = scope;
    let mut queues = vec![
        Line::from(format!(
            "slots    {} held, {} full, {} filling, {} free, of {}",
            mean(slots.held_ns),
            mean(slots.full_ns),
            mean(slots.filling_ns),
            mean(slots.free_ns),
            slots.count
        )),
        Line::from(format!(
            "reads    {} of {} in flight",
            mean(storage.in_flight_ns),
            storage.depth
        )),
        Line::from(format!(
            "workers  {} of {} at work, {} pieces queued",
            mean(decode.busy_ns),
            decode.workers,
            mean(decode.queued_ns)
        )),
    ];
    if let Some(gpu) = &scope.consumer.gpu {
        let share = |ns: u64| percent(ns as f64 / gpu.span_ns.max(1) as f64);
        let starved = share(gpu.starved_ns);
        let late = gpu.host_late_ns().map_or_else(|| "unknown".into(), share);
        queues.push(
            format!(
                "GPU      starved {starved}, host late {late}, {} steps",
                gpu.steps
            )
            .into(),
        );
    }
    let copies = all.copy.as_ref().map(|copy| &copy.latency);
    let latency = |name: &'static str, latency: Option<&Latency>| {
        let text = |ns: fn(&Latency) -> f64| {
            latency
                .filter(|l| l.count > 0)
                .map_or("–".into(), |l| time(ns(l)))
        };
        Row::new([name.to_string(), text(|l| l.p50_ns), text(|l| l.p99_ns)])
    };
    let rows = [
        latency("a read", Some(&all.storage.latency)),
        latency("a piece of decoding", Some(&all.decode.latency)),
        latency("a copy", copies),
        latency("a wait in next()", Some(&all.consumer.waits)),
    ];
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(46)])
        .spacing(2)
        .areas(area);
    let titled = |title| Block::new().borders(Borders::TOP).title(title);
    frame.render_widget(Paragraph::new(queues).block(titled("means ")), left);
    let times = Table::new(rows, [20, 12, 12]).header(Row::new(["", "median", "p99"]).dim());
    frame.render_widget(times.block(titled("latencies, whole run ")), right);
}

/// The verdict, and about how many lines it takes.
fn said(verdict: &Verdict, width: u16) -> (Paragraph<'static>, u16) {
    let style = match verdict.cause {
        Cause::Unknown => STRONG,
        Cause::NotStarved => GOOD,
        _ => HOT,
    };
    let mut lines = vec![Line::styled(verdict.headline(), style)];
    lines.extend(
        verdict
            .advice
            .iter()
            .map(|text| Line::from(format!("→ {text}"))),
    );
    lines.extend(
        verdict
            .evidence
            .iter()
            .map(|text| Line::from(format!("· {text}")).dim()),
    );
    // Words are broken before the end of a line, so a line holds a little less than its width.
    let lines_of = |line: &Line<'_>| {
        line.width()
            .div_ceil(usize::from(width).saturating_sub(6).max(1))
            .max(1)
    };
    let high = 1 + lines.iter().map(lines_of).sum::<usize>();
    let block = Block::new().borders(Borders::TOP).title("verdict ");
    (
        Paragraph::new(lines)
            .wrap(Wrap { trim: false })
            .block(block),
        high.min(1000) as u16,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    const MS: u64 = 1_000_000;

    /// A snapshot after `ms` with a batch of 256 every 200 ms, starved by decode for a quarter of
    /// the time.
    fn snapshot(ms: u64) -> Snapshot {
        let mut snapshot = Snapshot::default();
        let ns = ms * MS;
        let batches = ms / 200;
        snapshot.at_ns = ns;
        snapshot.steady_ns = ns;
        let consumer = &mut snapshot.consumer;
        (consumer.batches, consumer.samples, consumer.bytes) =
            (batches, batches * 256, batches * 256 * 150_528);
        consumer.waited_ns = batches * 50 * MS;
        consumer.user_ns = batches * 150 * MS;
        snapshot.storage.busy_ns = ns / 10 * 7;
        snapshot.storage.depth = 32;
        snapshot.storage.counts.ops = batches * 256;
        let workers = &mut snapshot.decode;
        workers.workers = 4;
        workers.cores = 8;
        workers.samples = batches * 256;
        workers.busy_ns = ns / 100 * 396;
        workers.ahead_ns = ns / 25;
        workers.cpu_ns = Some(workers.busy_ns);
        snapshot.slots.count = 6;
        snapshot.slots.free_ns = ns * 6;
        snapshot
    }

    fn state() -> State {
        let setup = Setup {
            title: "images, train/".into(),
            step: Some(Duration::from_millis(150)),
            au_target: Some(0.9),
        };
        let mut state = State::new(setup);
        (0..=60_000)
            .step_by(250)
            .for_each(|ms| state.push(snapshot(ms)));
        state
    }

    fn screen(state: &State, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| state.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_dashboard_names_cause_and_target_in_usual_sizes() {
        let mut state = state();
        for (width, height) in [(80, 24), (120, 40), (100, 30)] {
            let screen = screen(&state, width, height);
            for word in [
                "images, train/",
                "samples/s",
                "1,280",
                "25.0 %",
                "AU of 90 %",
                "75.0 %",
                "◀ CAUSE",
                "q quit",
            ] {
                assert!(screen.contains(word), "{word} is missing:\n{screen}");
            }
            assert!(
                screen.contains("bound by decode, starved 25.0 %"),
                "{screen}"
            );
        }
        assert!(screen(&state, 120, 40).contains("latencies, whole run"));
        state.whole = true;
        assert!(screen(&state, 80, 24).contains("stages, whole run"));
        assert!(
            state.history.len() < 130 && state.rates.len() < 300,
            "old snapshots are dropped"
        );
    }

    #[test]
    fn any_size_and_an_empty_run_can_be_drawn() {
        let full = state();
        let mut empty = State::new(Setup {
            title: String::new(),
            step: None,
            au_target: None,
        });
        screen(&empty, 80, 24);
        empty.push(Snapshot::default());
        assert!(screen(&empty, 80, 24).contains("waiting for the first batch"));
        for (width, height) in [(1, 1), (5, 2), (20, 5), (300, 3), (3, 100)] {
            screen(&full, width, height);
            screen(&empty, width, height);
        }
    }

    #[test]
    fn slow_batches_extend_the_window() {
        let mut state = state();
        assert_eq!(state.now().at_ns, 2 * SECOND);
        state
            .history
            .iter_mut()
            .for_each(|seen| seen.consumer.batches = seen.at_ns / SECOND / 2);
        assert_eq!(state.now().at_ns / SECOND, 14);
    }

    #[test]
    fn keys_pause_change_the_scope_and_quit() {
        let mut state = state();
        let mut press = |code, modifiers| state.obey(KeyEvent::new(code, modifiers));
        assert!(
            press(KeyCode::Char('p'), KeyModifiers::NONE)
                && press(KeyCode::Char('w'), KeyModifiers::NONE)
        );
        assert!(press(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(
            !press(KeyCode::Char('q'), KeyModifiers::NONE)
                && !press(KeyCode::Char('c'), KeyModifiers::CONTROL)
        );
        assert!(state.paused && state.whole);
    }
}
