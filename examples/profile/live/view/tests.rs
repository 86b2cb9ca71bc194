use super::super::Setup;
use super::super::state::State;
use super::super::state::samples::*;
use super::*;
use feedline::profile::{BatchRecord, Copy, Gauges, GpuIdle, Latency, Snapshot, Timeline};
use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use std::time::Duration;

/// The screen as a terminal of that size shows it, without trailing blanks.
fn screen(state: &State, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let lines = view(&state.shown(), width, height);
    assert!(lines.len() <= usize::from(height), "{} lines on {height}", lines.len());
    terminal
        .draw(|frame| {
            for (line, y) in lines.iter().zip(0..) {
                frame.buffer_mut().set_line(0, y, line, width);
            }
        })
        .unwrap();
    let buffer = terminal.backend().buffer();
    let row = |cells: &[ratatui::buffer::Cell]| cells.iter().map(|cell| cell.symbol()).collect::<String>();
    buffer.content().chunks(usize::from(width).max(1)).map(|cells| row(cells).trim_end().to_string()).collect()
}

#[track_caller]
fn has(screen: &[String], wanted: &[&str]) {
    for words in wanted {
        assert!(screen.iter().any(|line| line.contains(words)), "{words:?} is missing:\n{}", screen.join("\n"));
    }
}

#[test]
fn a_starved_run_names_its_cause_in_every_size() {
    let state = starved_by_decode();
    for (width, height) in [(80, 24), (120, 40), (100, 30), (60, 20), (200, 60)] {
        let screen = screen(&state, width, height);
        has(&screen, &["images, train/", "running", "samples/s", "GB/s", "starved", "AU", "1,280"]);
        has(&screen, &["decode", "CAUSE", "bound by decode, starved 25.0 %", "order", "storage", "consumer"]);
        has(&screen, &["slots", "of 6", "p99", "queued", "of 32", "q quit"]);
        assert!(screen.last().unwrap().starts_with("q quit"));
    }
    has(&screen(&state, 20, 5), &["1,280/s starved 25 %", "decode 99 % CAUSE", "bound by decode", "q quit"]);
}

#[test]
fn the_table_of_stages_is_aligned() {
    let screen = screen(&starved_by_decode(), 80, 24);
    let at = screen.iter().position(|line| line.starts_with("stages ─")).unwrap();
    assert_eq!(
        screen[at..at + 5].to_vec(),
        [
            "stages ───────────────────────────────────────────────────────────── last 2.00 s",
            "  order     █░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░    0.4 %     320,000/s",
            "  storage   █████████████████████████░░░░░░░░░░░   70.0 %  ≥    1,829/s",
            "▶ decode    ███████████████████████████████████░   99.0 %       1,293/s  CAUSE",
            "  consumer  ███████████████████████████░░░░░░░░░   75.0 %       1,707/s",
        ]
    );
}

#[test]
fn wide_screens_have_the_stages_in_a_row() {
    let screen = screen(&starved_by_decode(), 120, 40);
    let at = screen.iter().position(|line| line.starts_with("┌ order")).unwrap();
    assert_eq!(
        screen[at..at + 4].to_vec(),
        [
            "┌ order ──────────────────┐   ┌ storage ────────────────┐   ┌ decode CAUSE ───────────┐   ┌ consumer ───────────────┐",
            "│ █░░░░░░░░░░░░░░   0.4 % │ → │ ███████████░░░░  70.0 % │ → │ ██████████████░  99.0 % │ → │ ███████████░░░░  75.0 % │",
            "│ can do  320,000/s       │   │ can do ≥1,829/s         │   │ can do  1,293/s         │   │ can do  1,707/s         │",
            "└─────────────────────────┘   └─────────────────────────┘   └─────────────────────────┘   └─────────────────────────┘",
        ]
    );
}

#[test]
fn figures_show_now_mean_and_target() {
    let top = screen(&starved_by_decode(), 80, 24)[1..4].to_vec();
    assert_eq!(
        top,
        [
            "                now      mean                  now      mean",
            "samples/s     1,280     1,274  starved      25.0 %    25.0 %",
            "GB/s          0.193     0.192  AU           75.0 %    74.9 %  target 90 % missed",
        ]
    );
    has(&screen(&minute(200, 0.3), 80, 24), &["target 90 % missed"]);
    let mut state = State::new(Setup { step: Some(Duration::from_millis(195)), ..setup() });
    state.push(|| (snapshot(60_000, 200, 0.3), timeline(60_000, 200)));
    has(&screen(&state, 80, 24), &["97.5 %", "target 90 % met"]);
}

#[test]
fn a_fed_run_is_not_starved() {
    for (width, height) in [(80, 24), (120, 40)] {
        let screen = screen(&fed(), width, height);
        has(&screen, &["not starved: the consumer's own work takes the time", "consumer", "limits"]);
        assert!(!screen.iter().any(|line| line.contains("CAUSE")));
    }
}

#[test]
fn the_idle_time_of_a_gpu_has_its_own_line() {
    let state = on_a_gpu();
    has(&screen(&state, 80, 24), &["GPU idle   starved   20.0 %   host late at most    5.0 %", "copy"]);
    has(&screen(&state, 120, 40), &["┌ copy", "GPU idle"]);
    assert!(!screen(&starved_by_decode(), 120, 40).iter().any(|line| line.contains("GPU") || line.contains("┌ copy")));
}

#[test]
fn the_screen_waits_for_the_first_batch() {
    let mut state = State::new(setup());
    has(&screen(&state, 80, 24), &["waiting for the first batch", "q quit"]);
    state.push(|| (Snapshot::default(), Timeline::default()));
    for (width, height) in [(80, 24), (20, 5), (40, 3)] {
        has(&screen(&state, width, height), &["waiting for the f"]);
    }
}

#[test]
fn the_head_shows_silence_pause_and_end() {
    let mut state = starved_by_decode();
    state.pause();
    has(&screen(&state, 80, 24), &["PAUSED", "p resume"]);
    state.pause();
    let mut later = snapshot(60_000, 150, 0.99);
    (later.at_ns, later.steady_ns) = (later.at_ns + 9 * SECOND, later.steady_ns + 9 * SECOND);
    state.push(|| (later.clone(), timeline(60_000, 150)));
    has(&screen(&state, 80, 24), &["no batch for 9.20 s", "the consumer has dropped the last one"]);
    later.at_ns += SECOND;
    state.push(|| (later.clone(), timeline(60_000, 150)));
    has(&screen(&state, 80, 24), &["no iterator active"]);
}

#[test]
fn keys_change_the_window_and_scope() {
    let mut state = starved_by_decode();
    state.change_window(1);
    has(&screen(&state, 80, 24), &["window 5 s", "last 5.00 s", "w whole run"]);
    state.toggle_whole();
    has(&screen(&state, 80, 24), &["── whole run", "w now"]);
}

#[test]
fn a_long_title_is_cut() {
    let title = "データ and words without an end, ".repeat(9);
    let mut state = State::new(Setup { title, ..setup() });
    state.push(|| (snapshot(60_000, 150, 0.99), timeline(60_000, 150)));
    for width in [10, 20, 40, 80, 120] {
        let top = &screen(&state, width, 24)[0];
        assert!(top.contains("running") || width < 20, "{top}");
        assert!(width < 20 || top.contains('…'), "{top}");
    }
}

#[test]
fn a_small_memory_budget_is_marked_at_the_slots() {
    // No stage is saturated, and the planner never has a slot.
    let mut state = State::new(Setup::default());
    for ms in (0..=60_000).step_by(250) {
        let mut snapshot = snapshot(ms, 120, 0.6);
        (snapshot.storage.busy_ns, snapshot.storage.in_flight_ns) = (ms * MS / 2, ms * MS);
        snapshot.order.no_slot_ns = ms * MS / 10 * 9;
        state.push(|| (snapshot, timeline(ms, 120)));
    }
    for (width, height) in [(80, 24), (120, 40)] {
        let screen = screen(&state, width, height);
        has(&screen, &["bound by the prefetch buffers"]);
        let slots = screen.iter().find(|line| line.starts_with("slots")).unwrap();
        assert!(slots.ends_with("CAUSE"), "{slots}");
    }
}

#[test]
fn plots_are_aligned_with_time() {
    let mut state = State::new(Setup::default());
    // 100 samples/s for 15 s, then 50, half of the time starved.
    for second in 0..=30 {
        let mut seen = Snapshot::default();
        (seen.at_ns, seen.steady_ns) = (second * SECOND, second * SECOND);
        seen.consumer.batches = second;
        seen.consumer.samples = 100 * second - 50 * second.saturating_sub(15);
        seen.consumer.waited_ns = second.saturating_sub(15) * SECOND / 2;
        state.push(|| (seen, Timeline::default()));
    }
    let close = |values: &[Option<f64>], wanted: f64| values.iter().all(|value| (value.unwrap() - wanted).abs() < 1e-6);
    for columns in [2, 6, 30, 90] {
        let (rates, shares) = binned(&state.shown(), 30 * SECOND, columns);
        let half = columns / 2;
        assert!(close(&rates[..half], 100.0) && close(&rates[half..], 50.0), "{rates:?}");
        assert!(close(&shares[..half], 0.0) && close(&shares[half..], 0.5), "{shares:?}");
    }
    // There is no earlier data.
    let (rates, _) = binned(&state.shown(), 60 * SECOND, 60);
    assert!(rates[..30].iter().all(Option::is_none) && rates[30..].iter().all(Option::is_some));
    assert_eq!(plotted(&state.shown()).1, "30 s");
}

#[test]
fn space_goes_to_the_ranks_in_turn() {
    let lines = |count: usize| vec![Line::default(); count];
    let sections =
        || vec![section(1, vec![lines(1), lines(5)]), section(0, vec![lines(2), lines(3)]), section(2, vec![lines(1)])];
    for (height, wanted) in [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (8, 5), (9, 9), (99, 9)] {
        assert_eq!(choose(sections(), height).len(), wanted, "{height}");
    }
}

/// Any possible snapshot, and more.
fn any_snapshot() -> impl Strategy<Value = Snapshot> {
    let number = prop_oneof![any::<u64>(), 0_u64..100, (0_u64..1000).prop_map(|ms| ms * MS)];
    let float = prop_oneof![any::<f64>(), 0.0..1e10];
    let latency = (number.clone(), prop::collection::vec((float, number.clone()), 0..6));
    let numbers = prop::collection::vec(number, 43);
    (numbers, prop::collection::vec(latency, 4), any::<[bool; 4]>()).prop_map(|(numbers, latencies, there)| {
        let mut numbers = numbers.into_iter();
        let mut next = || numbers.next().unwrap_or_default();
        let mut all = Snapshot::default();
        (all.at_ns, all.steady_ns) = (next(), next());
        let consumer = &mut all.consumer;
        (consumer.batches, consumer.samples, consumer.bytes) = (next(), next(), next());
        (consumer.waited_ns, consumer.first_ns, consumer.user_ns) = (next(), next(), next());
        let mut gpu = GpuIdle::default();
        (gpu.steps, gpu.starved_ns, gpu.host_late_ns) = (next(), next(), next());
        consumer.gpu = there[0].then_some(gpu);
        (all.order.busy_ns, all.order.no_slot_ns) = (next(), next());
        let storage = &mut all.storage;
        (storage.busy_ns, storage.blocked_ns, storage.depth) = (next(), next(), next() as u32);
        (storage.in_flight_ns, storage.reads, storage.bytes) = (next(), next(), next());
        (storage.direct_bytes, storage.cached_bytes, storage.retries) = (next(), next(), next());
        let decode = &mut all.decode;
        (decode.workers, decode.cores, decode.busy_ns) = (next() as u32, next() as u32, next());
        decode.cpu_ns = there[1].then_some(next());
        (decode.starved_ns, decode.ahead_ns, decode.queued_ns) = (next(), next(), next());
        decode.samples = next();
        let mut copy = Copy::default();
        (copy.busy_ns, copy.starved_ns, copy.blocked_ns) = (next(), next(), next());
        (copy.batches, copy.bytes, copy.buffers) = (next(), next(), next() as u32);
        let slots = &mut all.slots;
        (slots.count, slots.free_ns, slots.filling_ns) = (next() as u32, next(), next());
        (slots.full_ns, slots.held_ns) = (next(), next());
        let mut latencies = latencies.into_iter().map(|(count, buckets)| {
            let mut latency = Latency::default();
            let some = buckets.first().map_or(0.0, |(ns, _)| *ns);
            (latency.count, latency.p50_ns, latency.p99_ns, latency.buckets) = (count, some, some, buckets);
            latency
        });
        let mut latency = || latencies.next().unwrap_or_default();
        (all.consumer.waits, all.storage.latency, all.decode.latency, copy.latency) =
            (latency(), latency(), latency(), latency());
        all.copy = there[2].then_some(copy);
        all
    })
}

fn any_timeline() -> impl Strategy<Value = Timeline> {
    prop::collection::vec(any::<[u64; 4]>(), 0..5).prop_map(|records| {
        let mut timeline = Timeline::default();
        for [got, dropped, epoch, forgotten] in records {
            let (mut record, mut gauges) = (BatchRecord::default(), Gauges::default());
            (record.got_ns, record.dropped_ns, record.epoch) = (got, dropped % 3, epoch);
            gauges.at_ns = got;
            timeline.batches.push(record);
            timeline.gauges.push(gauges);
            timeline.forgotten = forgotten;
        }
        timeline
    })
}

proptest! {
    #[test]
    fn any_snapshot_fits_any_size(
        seen in prop::collection::vec((any_snapshot(), any_timeline()), 0..4),
        setup in (".*", prop::option::of(any::<u64>()), prop::option::of(any::<f64>())),
        sizes in prop::collection::vec((0_u16..220, 0_u16..70), 1..6),
        keys in prop::collection::vec(0..4, 0..6),
    ) {
        let (title, step, au_target) = setup;
        let mut state = State::new(Setup { title, step: step.map(Duration::from_nanos), au_target });
        for seen in seen {
            state.push(|| seen);
        }
        for key in keys {
            match key {
                0 => state.pause(),
                1 => state.toggle_whole(),
                2 => state.change_window(1),
                _ => state.change_window(-1),
            }
        }
        for (width, height) in sizes {
            let screen = screen(&state, width, height);
            if width >= 20 && height >= 2 {
                prop_assert!(screen[usize::from(height) - 1].starts_with("q quit"));
                prop_assert!(!screen.iter().any(|line| line.contains("NaN") || line.contains("inf ")), "{}", screen.join("\n"));
            }
        }
    }

    #[test]
    fn lines_of_a_real_run_fit_the_width(width in 80_u16..200, height in 2_u16..70) {
        for state in [starved_by_decode(), fed(), on_a_gpu()] {
            for line in view(&state.shown(), width, height) {
                prop_assert!(line.width() <= usize::from(width), "{} of {width}: {line}", line.width());
            }
        }
    }
}
