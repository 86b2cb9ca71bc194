//! The last batches, each on its way, above each other; over them what the consumer did, and how busy storage and workers were.
//!
//! ```text
//! consumer  │own│starved│own│starved│
//! storage   ▂▅▇▇▅▂▅▇▇      reads in flight, of at most
//! decode    ▇▇▇▇▇▇▇▇▇      workers working, of all
//! batches   ├read┤decode┤ready┤held┤
//!             ├read┤decode─────┤held┤
//! ```

use super::svg::{LEFT, RIGHT, Scale, Svg, WIDTH, count, time};
use crate::meter::{BatchRecord, Gauges, Snapshot, Timeline};
use crate::report::export::way::{self, Doing, FAR, Phase, Stretch, Way};

/// Batches that are drawn at most.
pub(super) const MOST: usize = 200;
/// A pause that takes most of the time is left out with what is before it, if so many batches are after it.
const AFTER_PAUSE: usize = 20;
const STRIP: f64 = 30.0;

/// The last batches that are drawn, by the time at which they were handed out.
fn last(timeline: &Timeline) -> Vec<BatchRecord> {
    let mut records: Vec<BatchRecord> = timeline.batches.iter().filter(|r| r.got_ns > 0).copied().collect();
    records.sort_by_key(|record| (record.got_ns, record.sequence));
    records.drain(..records.len().saturating_sub(MOST));
    // A pause, such as an evaluation between epochs, would squeeze the batches into lines.
    while let Some(at) = long_pause(&records) {
        records.drain(..at);
    }
    records
}

/// The first batch after a pause longer than all the rest.
fn long_pause(records: &[BatchRecord]) -> Option<usize> {
    let (first, last) = (records.first()?, records.last()?);
    let all = last.got_ns - first.got_ns;
    let long = |pair: &[BatchRecord]| pair[1].got_ns - pair[0].got_ns > all / 2;
    let at = records.windows(2).position(long)? + 1;
    (records.len() - at >= AFTER_PAUSE).then_some(at)
}

/// The drawing and how many batches are in it; `None` when there are none.
pub(super) fn gantt(timeline: &Timeline, snapshot: &Snapshot) -> Option<(String, usize)> {
    let shown = last(timeline);
    let first = shown.first()?;
    let end = shown.iter().map(|record| record.got_ns.max(record.dropped_ns)).max()?.min(FAR);
    // Batches that were planned long before the first was got begin at the edge.
    let start = if first.asked_ns == 0 { first.got_ns } else { first.asked_ns.min(first.got_ns) }.min(FAR);
    let (ways, lanes) = way::ways(&shown, snapshot.at_ns.clamp(end, FAR));
    let row = (330.0 / lanes.max(1) as f64).clamp(3.0, 16.0);
    let (storage, decode, top) = (32.0, 32.0 + STRIP + 8.0, 32.0 + 2.0 * (STRIP + 8.0));
    let bottom = top + row * lanes as f64 + 4.0;
    let mut svg =
        Svg::new(WIDTH, bottom + 38.0, "Timeline of the last batches, the consumer, storage and decode workers");
    let scale = Scale::new(start as f64 / 1e9, end as f64 / 1e9, LEFT, RIGHT);
    svg.time_axis(&scale, 4.0, bottom);
    let stretches = way::consumer(timeline);
    consumer(&mut svg, &scale, stretches.iter().filter(|(span, _)| span.end > start));
    let gauges = within(&timeline.gauges, start, end);
    let depth = snapshot.storage.depth.max(gauges.iter().map(|g| g.in_flight).max().unwrap_or(0));
    strip(&mut svg, &scale, storage, ("storage", "reads", "read"), depth, &gauges, |g| g.in_flight);
    let workers = snapshot.decode.workers.max(gauges.iter().map(|g| g.working).max().unwrap_or(0));
    strip(&mut svg, &scale, decode, ("decode", "workers", "decode"), workers, &gauges, |g| g.working);
    svg.text("label end", LEFT - 8.0, top + (row * lanes as f64 / 2.0).max(10.0), "batches");
    for way in &ways {
        batch(&mut svg, &scale, way, top + row * way.lane as f64, row);
    }
    Some((svg.finish(), shown.len()))
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn consumer<'a>(svg: &mut Svg, scale: &Scale, stretches: impl Iterator<Item = &'a Stretch<'a>>) {
    svg.text("label end", LEFT - 8.0, 19.0, "consumer");
    for (span, record) in stretches {
        let (class, what) = match span.what {
            Doing::Starved => ("starved", "starved: waited for batch"),
            Doing::First => ("first", "waited for the first batch,"),
            Doing::Own => ("own", "own work before batch"),
            Doing::Between => continue,
        };
        let (x, end) = (scale.place(seconds(span.start)), scale.place(seconds(span.end)));
        // What is thinner than a fifth of a pixel is not seen anyhow.
        if end - x < 0.2 {
            continue;
        }
        svg.titled(&format!("{what} {} for {}", record.batch, time(span.ns() as f64)), |svg| {
            svg.rect(class, x, 4.0, end - x, 22.0);
        });
    }
}

/// Moments inside, and the last one before.
fn within(gauges: &[Gauges], start: u64, end: u64) -> Vec<Gauges> {
    let mut sorted: Vec<Gauges> = gauges.iter().filter(|gauges| gauges.at_ns <= end).copied().collect();
    sorted.sort_by_key(|gauges| gauges.at_ns);
    let from = sorted.partition_point(|gauges| gauges.at_ns < start).saturating_sub(1);
    sorted.drain(..from);
    sorted
}

/// How many there were, as steps from moment to moment. `named`: what, the unit, the class.
fn strip(
    svg: &mut Svg,
    scale: &Scale,
    top: f64,
    named: (&str, &str, &str),
    most: u32,
    gauges: &[Gauges],
    of: impl Fn(&Gauges) -> u32,
) {
    let (label, unit, class) = named;
    let bottom = top + STRIP;
    svg.text("label end", LEFT - 8.0, top + 13.0, label);
    svg.text("tick end", LEFT - 8.0, top + 26.0, &format!("of {} {unit}", count(most.into())));
    svg.rect("ground", LEFT, top, RIGHT - LEFT, STRIP);
    let amounts = Scale::new(0.0, most.into(), bottom, top);
    let mut points = Vec::with_capacity(2 * gauges.len() + 2);
    let mut y = bottom;
    for moment in gauges {
        let x = scale.place(seconds(moment.at_ns));
        points.push((x, y));
        y = amounts.place(of(moment).into());
        points.push((x, y));
    }
    if let (Some((first, _)), Some((last, _))) = (points.first().copied(), points.last().copied()) {
        points.extend([(last, bottom), (first, bottom)]);
        svg.path(class, &points);
    }
}

pub(super) fn class(phase: Phase) -> &'static str {
    match phase {
        Phase::Read => "read",
        Phase::Decode => "decode",
        Phase::CopyQueue => "queue",
        Phase::Copy => "copy",
        Phase::Ready => "ready",
        Phase::Held => "held",
    }
}

fn batch(svg: &mut Svg, scale: &Scale, way: &Way<'_>, y: f64, row: f64) {
    let record = way.record;
    let mut title = format!("epoch {}, batch {}, {} rows", record.epoch, record.batch, record.rows);
    for phase in &way.phases {
        title += &format!("; {} {}", phase.what.name(), time(phase.ns() as f64));
    }
    svg.titled(&title, |svg| {
        for phase in &way.phases {
            let (x, end) = (scale.place(seconds(phase.start)), scale.place(seconds(phase.end)));
            let gap = if row > 5.0 { 1.0 } else { 0.5 };
            if end - x >= 0.1 {
                svg.rect(class(phase.what), x, y, end - x, row - gap);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(got: impl IntoIterator<Item = u64>) -> Timeline {
        let batches = got.into_iter().enumerate().map(|(batch, got)| BatchRecord {
            batch: batch as u64,
            planned_ns: got,
            got_ns: got + 1,
            ..BatchRecord::default()
        });
        Timeline { batches: batches.collect(), ..Timeline::default() }
    }

    #[test]
    fn the_last_batches_are_drawn_and_no_long_pause_among_them() {
        let shown = |timeline: &Timeline| last(timeline).iter().map(|record| record.batch).collect::<Vec<_>>();
        assert_eq!(shown(&at(0..1000)), (800..1000).collect::<Vec<_>>());
        assert_eq!(shown(&at((0..50).chain(500..550))), (50..100).collect::<Vec<_>>());
        // Too few after it.
        assert_eq!(shown(&at((0..50).chain(500..510))), (0..60).collect::<Vec<_>>());
        assert!(gantt(&at([]), &Snapshot::default()).is_none());
    }

    #[test]
    fn each_batch_is_a_group_that_names_it_and_its_phases() {
        let (svg, count) = gantt(&at((1..=10).map(|n| n * 1000)), &Snapshot::default()).unwrap();
        assert_eq!(count, 10);
        for batch in 0..10 {
            assert!(svg.contains(&format!("<title>epoch 0, batch {batch}, 0 rows; ready 1.00 ns")), "{svg}");
        }
    }
}
