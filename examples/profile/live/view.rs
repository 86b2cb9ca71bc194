//! The screen as lines, for any size. Pure.
//!
//! ```text
//! sections, from the top     rank     smallest ──► … ──► largest, in lines
//! head                          0     1
//! figures                       1     1   3
//! plots                         6     2   3   4   …
//! stages                        4     1   4   5
//! the GPU's idle time           3     1
//! queues                        5     2   4
//! latencies                     7     3   4
//! verdict                       2     1   2   3   …
//! keys                          8     1
//! ```
//!
//! In the order of their ranks, all sections get their smallest form while there is space, then one size more, and so
//! on until nothing fits. Colour only repeats words and marks: red marks the bottleneck.

use super::state::{Figures, PLOTTED_MOST, Phase, Quantiles, SECOND, Shown};
use super::text::{
    NONE, bar, clock, fit, grouped, left, number, or_none, percent, plot, right, stacked, time, width as columns, wrap,
};
use feedline::profile::{Cause, StageLoad};
use ratatui::style::Style;
use ratatui::text::{Line, Span};

type Lines = Vec<Line<'static>>;

/// A part of the screen in several sizes, smallest first.
struct Section {
    rank: usize,
    sizes: Vec<Lines>,
}

/// Columns for boxes beside each other.
const WIDE: usize = 100;
/// Columns for two figures beside each other, and the target.
const DOUBLE: usize = 80;
const LABEL: usize = 11;
/// A shorter bar is meaningless.
const BAR_LEAST: usize = 6;
/// Maximum lines of a plot.
const PLOT_MOST: usize = 6;
const STRONG: Style = Style::new().bold();
const HOT: Style = Style::new().red().bold();
const GOOD: Style = Style::new().green().bold();

/// The screen: at most `height` lines, with the keys in the last one.
pub(super) fn view(shown: &Shown<'_>, width: u16, height: u16) -> Lines {
    let (width, height) = (usize::from(width), usize::from(height));
    let mut sections = vec![section(0, vec![head(shown, width)])];
    if shown.phase == Phase::Waiting {
        sections.push(section(1, vec![vec![line("waiting for the first batch", STRONG)]]));
    } else {
        sections.push(section(1, figures(shown, width)));
        sections.push(section(6, plots(shown, width)));
        sections.push(section(4, stages(shown, width)));
        sections.push(section(3, gpu(shown)));
        sections.push(section(5, queues(shown, width)));
        sections.push(section(7, latencies(shown, width)));
        sections.push(section(2, verdict(shown, width)));
    }
    let room = height.saturating_sub(1);
    let mut lines = if height < 2 { head(shown, width) } else { choose(sections, room) };
    if height >= 2 {
        lines.resize(room, Line::default());
        lines.push(keys(shown));
    }
    lines.truncate(height);
    lines
}

fn section(rank: usize, sizes: Vec<Lines>) -> Section {
    Section { rank, sizes }
}

fn choose(sections: Vec<Section>, height: usize) -> Lines {
    let mut order: Vec<usize> = (0..sections.len()).collect();
    order.sort_by_key(|at| sections[*at].rank);
    let mut taken = vec![0; sections.len()];
    let (mut used, mut grows) = (0, true);
    while grows {
        grows = false;
        for &at in &order {
            let sizes = &sections[at].sizes;
            let Some(larger) = sizes.get(taken[at]) else { continue };
            let present = taken[at].checked_sub(1).map_or(0, |now| sizes[now].len());
            if used - present + larger.len() <= height {
                used = used - present + larger.len();
                (taken[at], grows) = (taken[at] + 1, true);
            }
        }
    }
    let chosen = sections
        .into_iter()
        .zip(taken)
        .filter_map(|(section, taken)| section.sizes.into_iter().take(taken).next_back());
    chosen.flatten().collect()
}

fn line(text: impl Into<String>, style: Style) -> Line<'static> {
    Line::from(Span::styled(text.into(), style))
}

fn plain(text: impl Into<String>) -> Span<'static> {
    Span::raw(text.into())
}

fn styled(text: impl Into<String>, style: Style) -> Span<'static> {
    Span::styled(text.into(), style)
}

/// `title ───────── about`
fn rule(title: &str, about: &str, width: usize) -> Line<'static> {
    let between = width.saturating_sub(columns(title) + columns(about) + 2);
    let dashes = plain(format!(" {} ", "─".repeat(between)));
    Line::from(vec![styled(title, STRONG), dashes, plain(about)])
}

fn head(shown: &Shown<'_>, width: usize) -> Lines {
    let (phase, style) = match shown.phase {
        _ if shown.paused => ("PAUSED".into(), STRONG.reversed()),
        Phase::Waiting => ("waiting".into(), STRONG),
        Phase::Running => ("running".into(), Style::new()),
        Phase::Silent { ns, .. } => (format!("no batch for {}", time(ns as f64)), HOT),
        Phase::Between => ("no iterator active".into(), STRONG),
    };
    let mut about = format!(" · {} batches · {}", grouped(shown.batches), clock(shown.at_ns));
    if let Some(epoch) = shown.epoch {
        about = format!(" · epoch {}{about}", grouped(epoch));
    }
    if columns(&phase) + columns(&about) + 30 > width {
        about.clear();
    }
    let name = if width < 60 { "" } else { "feedline  " };
    let right = columns(&phase) + columns(&about);
    let title = fit(&shown.setup.title, width.saturating_sub(columns(name) + right + 2));
    let space = width.saturating_sub(columns(name) + columns(&title) + right);
    vec![Line::from(vec![
        plain(name),
        styled(title, STRONG),
        plain(" ".repeat(space)),
        styled(phase, style),
        plain(about),
    ])]
}

/// Name of a figure, its present value and mean, and a remark.
type Cell = (&'static str, String, String, Option<Span<'static>>);

fn figures(shown: &Shown<'_>, width: usize) -> Vec<Lines> {
    let Shown { now, mean, setup, .. } = shown;
    let cell = |name, of: fn(&Figures) -> Option<f64>, text: fn(f64) -> String, note| {
        (name, or_none(of(now), text), or_none(of(mean), text), note)
    };
    let mut rates = vec![
        cell("samples/s", |figures| figures.samples_per_s, number, None),
        cell(
            "GB/s",
            |figures| figures.gb_per_s,
            |value| if value < 10.0 { format!("{value:.3}") } else { number(value) },
            None,
        ),
    ];
    let mut shares = vec![cell("starved", |figures| figures.starved, percent, None)];
    if setup.step.is_some() {
        shares.push(cell("AU", |figures| figures.au, percent, target(shown)));
    }
    let (rate, starved) =
        (or_none(now.samples_per_s, number), or_none(now.starved, |share| format!("{:.0} %", 100.0 * share)));
    let au = setup.step.map_or(String::new(), |_| format!("  AU {}", or_none(now.au, percent)));
    let least = vec![line(format!("{rate}/s starved {starved}{au}"), STRONG)];
    let heads = |groups: usize| Line::from(format!("{:10}{:>9} {:>9}  ", "", "now", "mean").repeat(groups));
    let mut table = Vec::new();
    if width >= DOUBLE {
        table.push(heads(2));
        shares.resize(2, ("", String::new(), String::new(), None));
        for (left, right) in rates.into_iter().zip(shares) {
            let mut spans = row(left);
            spans.extend(row(right));
            table.push(Line::from(spans));
        }
    } else {
        table.push(heads(1));
        rates.append(&mut shares);
        table.extend(rates.into_iter().map(|cell| Line::from(row(cell))));
    }
    vec![least, table]
}

fn row((name, now, mean, note): Cell) -> Vec<Span<'static>> {
    let mut spans =
        vec![plain(left(name, 10)), styled(right(&now, 9), STRONG), plain(format!(" {}  ", right(&mean, 9)))];
    spans.extend(note);
    spans
}

fn target(shown: &Shown<'_>) -> Option<Span<'static>> {
    let target = shown.setup.au_target?;
    let text = format!("target {:.0} % ", 100.0 * target);
    Some(match shown.mean.au? >= target {
        true => styled(text + "met", GOOD),
        false => styled(text + "missed", HOT),
    })
}

/// Time range of the plots: the available data, in steps.
fn plotted(shown: &Shown<'_>) -> (u64, &'static str) {
    let first = shown.points.front().map_or(0, |point| point.from_ns);
    let lasted = shown.at_ns.saturating_sub(first);
    let steps = [(30 * SECOND, "30 s"), (60 * SECOND, "1 min"), (120 * SECOND, "2 min"), (PLOTTED_MOST, "5 min")];
    steps.into_iter().find(|(span, _)| lasted <= *span).unwrap_or(steps[3])
}

/// Samples per second and starved shares in columns of equal time, newest last.
fn binned(shown: &Shown<'_>, span: u64, columns: usize) -> (Vec<Option<f64>>, Vec<Option<f64>>) {
    let mut sums = vec![[0.0_f64; 4]; columns];
    let begin = shown.at_ns as f64 - span as f64;
    let scale = columns as f64 / span as f64;
    let place = |ns: u64| ((ns as f64 - begin) * scale).clamp(0.0, columns as f64);
    for point in shown.points.iter().filter(|point| point.ns() > 0) {
        let (from, to) = (place(point.from_ns), place(point.to_ns));
        let amounts = [point.samples, point.ns() as f64, point.starved_ns as f64, point.steady_ns as f64];
        for (at, sums) in sums.iter_mut().enumerate().take(to.ceil() as usize).skip(from as usize) {
            let inside = ((at + 1) as f64).min(to) - (at as f64).max(from);
            let part = (inside / (point.ns() as f64 * scale)).clamp(0.0, 1.0);
            sums.iter_mut().zip(amounts).for_each(|(sum, amount)| *sum += amount * part);
        }
    }
    let ratio = |part: f64, whole: f64| (whole > 0.0).then(|| part / whole);
    let rates = sums.iter().map(|sum| ratio(sum[0] * 1e9, sum[1])).collect();
    (rates, sums.iter().map(|sum| ratio(sum[2], sum[3])).collect())
}

fn plots(shown: &Shown<'_>, width: usize) -> Vec<Lines> {
    // Space for the scale on the right.
    let scale = if width < 50 { 0 } else { 15 };
    let Some(columns) = width.checked_sub(LABEL + scale).filter(|columns| *columns >= 5) else { return Vec::new() };
    let (span, name) = plotted(shown);
    let (rates, shares) = binned(shown, span, columns);
    let most = rates.iter().flatten().copied().fold(0.0, f64::max);
    let size = |upper: usize, lower: usize| {
        let ends = [format!("max {}", number(most)), "0".into()];
        let mut lines = axes(plot(&rates, most, upper), ["samples/s", ""], ends, scale);
        let ends = if lower == 1 {
            [format!("last {name}"), String::new()]
        } else {
            ["100 %".into(), format!("0, last {name}")]
        };
        lines.extend(axes(plot(&shares, 1.0, lower), ["starved", ""], ends, scale));
        lines
    };
    (2..=2 * PLOT_MOST).map(|height| size(height.div_ceil(2), height / 2)).collect()
}

/// A plot with labels left and right of its first and last line.
fn axes(plot: Vec<String>, labels: [&str; 2], ends: [String; 2], scale: usize) -> Lines {
    let last = plot.len() - 1;
    let text = |row: usize, first: &str, second: &str| match row {
        0 => first.to_string(),
        _ if row == last => second.to_string(),
        _ => String::new(),
    };
    let rows = plot.into_iter().enumerate();
    rows.map(|(row, cells)| {
        let end = if scale == 0 { String::new() } else { format!(" {}", text(row, &ends[0], &ends[1])) };
        Line::from(vec![plain(left(&text(row, labels[0], labels[1]), LABEL)), plain(cells), plain(end)])
    })
    .collect()
}

/// Display name of a stage; the consumer's cause has several names.
fn name(stage: Cause) -> &'static str {
    match stage {
        Cause::Order => "order",
        Cause::Storage | Cause::PageCache => "storage",
        Cause::Decode => "decode",
        Cause::Copy => "copy",
        Cause::Consumer | Cause::NotStarved => "consumer",
        _ => "",
    }
}

/// A stage for drawing.
struct Stage {
    name: &'static str,
    load: Option<StageLoad>,
    mark: &'static str,
    style: Style,
}

impl Stage {
    fn share(&self) -> String {
        or_none(self.load.map(|load| load.utilisation), percent)
    }

    fn ceiling(&self) -> String {
        match self.load {
            Some(load) => format!("{}/s", number(load.ceiling_items_per_s)),
            None => NONE.into(),
        }
    }

    fn at_least(&self) -> &'static str {
        if self.load.is_some_and(|load| load.at_least) { "≥" } else { " " }
    }

    fn utilisation(&self) -> f64 {
        self.load.map_or(0.0, |load| load.utilisation)
    }
}

/// Stages in the order of the data.
fn in_order(shown: &Shown<'_>) -> Vec<Stage> {
    let verdict = &shown.verdict;
    let fed = verdict.cause == Cause::NotStarved;
    let all = ["order", "storage", "decode", "copy", "consumer"];
    let present = all.into_iter().filter(|stage| *stage != "copy" || shown.scope.copy.is_some());
    present
        .map(|stage| {
            let (mark, style) = match stage {
                _ if name(verdict.cause) == stage && fed => ("limits", GOOD),
                _ if name(verdict.cause) == stage => ("CAUSE", HOT),
                _ if verdict.also.is_some_and(|also| name(also) == stage) => ("also", STRONG),
                _ => ("", Style::new()),
            };
            Stage {
                name: stage,
                load: verdict.stages.iter().find(|load| name(load.stage) == stage).copied(),
                mark,
                style,
            }
        })
        .collect()
}

/// Scope of the figures of stages, queues and latencies.
fn scope(shown: &Shown<'_>) -> String {
    if shown.whole { "whole run".into() } else { format!("last {}", time(shown.span_ns as f64)) }
}

fn stages(shown: &Shown<'_>, width: usize) -> Vec<Lines> {
    let stages = in_order(shown);
    let mut least = flow(stages.iter());
    if least.width() > width {
        least = flow(stages.iter().filter(|stage| !stage.mark.is_empty()));
    }
    let title = rule("stages", &scope(shown), width);
    let rows = if width >= WIDE { boxes(&stages, width) } else { rows(&stages, width) };
    let titled = std::iter::once(title).chain(rows.iter().cloned()).collect();
    vec![vec![least], rows, titled]
}

/// All stages in one line.
fn flow<'a>(stages: impl Iterator<Item = &'a Stage>) -> Line<'static> {
    let mut spans = Vec::new();
    for stage in stages {
        let mark = if stage.mark.is_empty() { String::new() } else { format!(" {}", stage.mark) };
        spans.extend((!spans.is_empty()).then(|| plain(" → ")));
        spans.push(styled(format!("{} {:.0} %{mark}", stage.name, 100.0 * stage.utilisation()), stage.style));
    }
    Line::from(spans)
}

fn rows(stages: &[Stage], width: usize) -> Lines {
    // Mark, name; share, ceiling, mark.
    let wide = width.saturating_sub(2 + LABEL + 9 + 2 + 12 + 8);
    let row = |stage: &Stage| {
        let lead = if matches!(stage.mark, "CAUSE" | "limits") { "▶ " } else { "  " };
        let name = styled(format!("{lead}{}", left(stage.name, LABEL - 1)), stage.style);
        let (least, ceiling) = (stage.at_least(), right(&stage.ceiling(), 11));
        let numbers = plain(format!("{}  {least}{ceiling}  ", right(&stage.share(), 9)));
        Line::from(vec![
            name,
            styled(bar(stage.utilisation(), wide), stage.style),
            numbers,
            styled(stage.mark, stage.style),
        ])
    };
    stages.iter().map(row).collect()
}

/// Boxes beside each other, with arrows between.
fn boxes(stages: &[Stage], width: usize) -> Lines {
    let gaps = 3 * (stages.len() - 1);
    let inner = (width - gaps) / stages.len() - 4;
    let mut lines: Vec<Vec<Span<'static>>> = vec![Vec::new(); 4];
    for (at, stage) in stages.iter().enumerate() {
        let arrow = if at == 0 { ["", ""] } else { ["   ", " → "] };
        let title = fit(format!("{} {}", stage.name, stage.mark).trim_end(), inner);
        let dashes = "─".repeat(inner - columns(&title));
        let bare = format!("{}{}", stage.at_least(), stage.ceiling());
        let text = format!("can do {bare}");
        let text = if columns(&text) > inner { bare } else { text };
        let cells = [
            (arrow[0], format!("┌ {title} {dashes}┐")),
            (arrow[1], format!("│ {}{} │", bar(stage.utilisation(), inner - 8), right(&stage.share(), 8))),
            (arrow[0], format!("│ {} │", left(&fit(&text, inner), inner))),
            (arrow[0], format!("└{}┘", "─".repeat(inner + 2))),
        ];
        for (line, (arrow, cell)) in lines.iter_mut().zip(cells) {
            line.extend([plain(arrow), styled(cell, stage.style)]);
        }
    }
    lines.into_iter().map(Line::from).collect()
}

fn gpu(shown: &Shown<'_>) -> Vec<Lines> {
    let Some(gpu) = &shown.scope.consumer.gpu else { return Vec::new() };
    let share = |ns: u64| percent((ns as f64 / gpu.span_ns.max(1) as f64).min(1.0));
    let (starved, late) = (share(gpu.starved_ns), share(gpu.host_late_ns));
    let steps = grouped(gpu.steps);
    vec![vec![Line::from(vec![
        plain(left("GPU idle", LABEL)),
        plain("starved "),
        styled(right(&starved, 8), STRONG),
        plain(format!("   host late at most {}   {steps} steps measured", right(&late, 8))),
    ])]]
}

/// A time integral as a mean.
fn mean(ns: u64, steady_ns: u64) -> f64 {
    if steady_ns > 0 { ns as f64 / steady_ns as f64 } else { 0.0 }
}

fn queues(shown: &Shown<'_>, width: usize) -> Vec<Lines> {
    let (scope, of) = (&shown.scope, |ns| mean(ns, shown.scope.steady_ns));
    let (slots, wide) = slots(shown, width);
    let gauges = [
        ("reads", "in flight", of(scope.storage.in_flight_ns), scope.storage.depth),
        ("workers", "at work", of(scope.decode.busy_ns), scope.decode.workers),
    ];
    let queued = number(of(scope.decode.queued_ns));
    let share = |mean: f64, all: u32| format!("{} of {}", number(mean), grouped(all.into()));
    let short = gauges.map(|(name, _, mean, all)| format!("{} {name}", share(mean, all)));
    let short = format!("{}{}, {queued} queued", left("busy", LABEL), short.join(", "));
    let long = |(name, what, mean, all): (&str, &str, f64, u32)| {
        let queued = if name == "workers" { format!(", work queued {queued}") } else { String::new() };
        let bar = bar(mean / f64::from(all.max(1)), wide.max(BAR_LEAST));
        Line::from(format!("{}{bar}  {} {what}{queued}", left(name, LABEL), share(mean, all)))
    };
    vec![vec![slots.clone(), Line::from(short)], std::iter::once(slots).chain(gauges.map(long)).collect()]
}

/// States of the slots, and the columns of the bar; no bar without space for it.
fn slots(shown: &Shown<'_>, width: usize) -> (Line<'static>, usize) {
    let (slots, of) = (&shown.scope.slots, |ns| mean(ns, shown.scope.steady_ns));
    let parts = [
        ('█', "held", of(slots.held_ns)),
        ('▓', "full", of(slots.full_ns)),
        ('▒', "filling", of(slots.filling_ns)),
        ('░', "free", of(slots.free_ns)),
    ];
    let (mark, style) = match (shown.verdict.cause, shown.verdict.also) {
        (Cause::MemoryBudget, _) => ("  CAUSE", HOT),
        (_, Some(Cause::MemoryBudget)) => ("  also", STRONG),
        _ => ("", Style::new()),
    };
    let words = |marked: bool| {
        let mark = |mark: char| if marked { format!("{mark} ") } else { String::new() };
        let words = parts.map(|(char, name, mean)| format!("{}{name} {}", mark(char), number(mean)));
        format!("{}  of {}", words.join("  "), grouped(slots.count.into()))
    };
    let wide = width.saturating_sub(LABEL + 2 + columns(&words(true)) + columns(mark));
    let (wide, text) = if wide < BAR_LEAST { (0, words(false)) } else { (wide, format!("  {}", words(true))) };
    let bar = stacked(&parts.map(|(char, _, mean)| (char, mean)), wide);
    (Line::from(vec![styled(left("slots", LABEL), style), plain(bar + &text), styled(mark, style)]), wide)
}

fn latencies(shown: &Shown<'_>, width: usize) -> Vec<Lines> {
    let text = |value: Option<f64>| right(&or_none(value, time), 12);
    let quantile = |of: Quantiles, at: usize| of.map(|both| both[at]);
    if width < LABEL + 4 * 12 {
        let lines = shown.latencies.iter().map(|(name, of)| {
            Line::from(format!("{}p50{}  p99{}", left(name, 6), text(quantile(*of, 0)), text(quantile(*of, 1))))
        });
        return vec![lines.collect()];
    }
    let row = |name: &str, cell: &dyn Fn(&(&'static str, Quantiles)) -> String| {
        Line::from(shown.latencies.iter().fold(left(name, LABEL), |line, latency| line + &cell(latency)))
    };
    vec![vec![
        row("latency", &|(name, _)| right(name, 12)),
        row("  p50", &|(_, of)| text(quantile(*of, 0))),
        row("  p99", &|(_, of)| text(quantile(*of, 1))),
    ]]
}

fn verdict(shown: &Shown<'_>, width: usize) -> Vec<Lines> {
    let verdict = &shown.verdict;
    let style = match verdict.cause {
        Cause::Unknown => STRONG,
        Cause::NotStarved => GOOD,
        _ => HOT,
    };
    let words = verdict.to_string();
    let mut all = Lines::new();
    let mut add = |first: &str, rest: &str, text: &str, style: Style| {
        all.extend(wrap(first, rest, text, width).into_iter().map(|text| line(text, style)));
    };
    if let Phase::Silent { ns, held } = shown.phase {
        let who = if held { "the consumer holds the last one" } else { "the consumer has dropped the last one" };
        add("", "  ", &format!("no batch for {}: {who}; a wait counts when it ends", time(ns as f64)), STRONG);
    }
    add("", "  ", words.lines().next().unwrap_or_default(), style);
    verdict.advice.iter().for_each(|text| add("  → ", "    ", text, Style::new()));
    verdict.evidence.iter().for_each(|text| add("  · ", "    ", text, Style::new()));
    let mut sizes: Vec<Lines> = (1..=all.len()).map(|lines| all[..lines].to_vec()).collect();
    all.insert(0, rule("verdict", &scope(shown), width));
    sizes.push(all);
    sizes
}

fn keys(shown: &Shown<'_>) -> Line<'static> {
    let pause = if shown.paused { " resume  " } else { " pause  " };
    let window = format!(" window {} s  ", shown.window_s);
    let whole = if shown.whole { " now" } else { " whole run" };
    let key = |key: &'static str| styled(key, STRONG);
    Line::from(vec![
        key("q"),
        plain(" quit  "),
        key("p"),
        plain(pause),
        key("+/-"),
        plain(window),
        key("w"),
        plain(whole),
    ])
}

#[cfg(test)]
mod tests;
