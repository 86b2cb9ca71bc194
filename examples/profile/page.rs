//! A snapshot as one readable page: figures, verdict, bars of the stages' time, histograms, the
//! text.
//!
//! The page is self-contained: boxes sized by its own styles, no script, and its policy forbids the
//! browser to load anything. It follows the reader's light or dark scheme, and prints. Only
//! starvation is orange.

use crate::text::{bytes, number, percent, time};
use feedline::profile::Snapshot;
use feedline::profile::snapshot::Latency;
use indicatif::HumanCount;
use std::fmt::Write;

const STYLE: &str = include_str!("style.css");
/// Forbids loading and running anything.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
/// Starvation above this share is highlighted.
const HOT: f64 = 0.02;

/// A page of a snapshot. `verdict` are lines of text, the most important first. All text is
/// escaped.
pub fn html(snapshot: &Snapshot, verdict: &[String], title: &str, report: &str) -> String {
    let mut page = Page {
        out: String::with_capacity(64 << 10),
        snapshot,
    };
    page.head(title);
    page.tiles();
    page.verdict(verdict);
    page.shares();
    page.histograms();
    page.report(report);
    page.out
}

struct Page<'a> {
    out: String,
    snapshot: &'a Snapshot,
}

/// Writes to the page's string, which cannot fail.
macro_rules! put {
    ($page:expr, $($what:tt)*) => { let _ = writeln!($page.out, $($what)*); };
}

impl Page<'_> {
    fn head(&mut self, title: &str) {
        let title = escape(title);
        put!(
            self,
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>"
        );
        put!(
            self,
            "<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\"/>"
        );
        put!(
            self,
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"
        );
        put!(
            self,
            "<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
        );
        let consumer = &self.snapshot.consumer;
        let [at, steady, first] = [
            self.snapshot.at_ns,
            self.snapshot.steady_ns,
            consumer.first_ns,
        ]
        .map(|ns| time(ns as f64));
        let batches = HumanCount(consumer.batches);
        put!(
            self,
            "<p>{batches} batches in {at}: steady time {steady}, waits for first batches {first}</p>"
        );
    }

    fn starved(&self) -> f64 {
        share(self.snapshot.consumer.waited_ns, self.snapshot.steady_ns)
    }

    fn gpu_starved(&self) -> Option<f64> {
        let gpu = self
            .snapshot
            .consumer
            .gpu
            .as_ref()
            .filter(|gpu| gpu.span_ns > 0)?;
        Some(share(gpu.starved_ns, gpu.span_ns))
    }

    /// Whether the trainer starves: the GPU if it was measured, or else the host.
    fn hot(&self) -> bool {
        self.gpu_starved().map_or_else(
            || self.snapshot.copy.is_none() && self.starved() >= HOT,
            |starved| starved >= HOT,
        )
    }

    fn tiles(&mut self) {
        let Snapshot {
            consumer,
            storage,
            steady_ns,
            ..
        } = self.snapshot;
        let rate = |amount: u64| per_second(amount, steady_ns.saturating_add(consumer.first_ns));
        let mut tiles = vec![
            (number(rate(consumer.samples)), "samples/s"),
            (number(rate(consumer.batches)), "batches/s"),
            (format!("{}/s", bytes(rate(consumer.bytes))), "handed out"),
            (
                format!("{}/s", bytes(rate(storage.counts.bytes_moved))),
                "read from storage",
            ),
            (percent(self.starved()), "consumer waited for batches"),
            (
                percent(share(consumer.user_ns, *steady_ns)),
                "consumer's own work",
            ),
        ];
        tiles.extend(
            self.gpu_starved()
                .map(|starved| (percent(starved), "GPU starved")),
        );
        put!(self, "<div class=\"tiles\">");
        for (figure, what) in tiles {
            put!(
                self,
                "<div class=\"tile\"><b>{figure}</b><span>{what}</span></div>"
            );
        }
        put!(self, "</div>");
    }

    fn verdict(&mut self, verdict: &[String]) {
        let Some((first, rest)) = verdict.split_first() else {
            return;
        };
        let class = if self.hot() { "verdict hot" } else { "verdict" };
        put!(self, "<div class=\"{class}\"><b>{}</b><ul>", escape(first));
        rest.iter()
            .for_each(|line| _ = writeln!(self.out, "<li>{}</li>", escape(line)));
        put!(self, "</ul></div>");
    }

    fn shares(&mut self) {
        put!(self, "<h2>Where the time went</h2>");
        if self.snapshot.steady_ns == 0 {
            put!(
                self,
                "<p>No iterator has delivered its first batch yet.</p>"
            );
            return;
        }
        put!(
            self,
            "<p>Each bar is the steady time: from the first batch of each iterator on.</p>\n<p class=\"legend\">"
        );
        for (class, name) in [
            ("starved", "starved: no batch was ready"),
            ("own", "work"),
            ("wait", "waits for input"),
            ("room", "waits for space: it is ahead"),
            ("rest", "idle, or not accounted for"),
        ] {
            put!(self, "<span><i class=\"{class}\"></i>{name}</span>");
        }
        put!(self, "</p>\n<div class=\"bars\">");
        for (label, whole, parts) in stages(self.snapshot) {
            put!(self, "<b>{label}</b><div>");
            let mut left = 100.0;
            for (class, what, ns) in parts {
                // Workers' clocks are read at different moments, so a sum may exceed the whole a
                // little.
                let width = (100.0 * ns as f64 / whole.max(1.0)).min(left);
                left -= width;
                let text = format!("{what} {width:.1} %");
                put!(
                    self,
                    "<i class=\"{class}\" style=\"width:{width:.2}%\" title=\"{text}\">{text}</i>"
                );
            }
            put!(self, "</div>");
        }
        put!(self, "</div>");
    }

    fn histograms(&mut self) {
        let Snapshot {
            consumer,
            storage,
            decode,
            copy,
            ..
        } = self.snapshot;
        let all = [
            (
                "starved",
                "waits of the consumer in next()",
                Some(&consumer.waits),
            ),
            ("read", "reads, from submission", Some(&storage.latency)),
            ("own", "pieces of decode work", Some(&decode.latency)),
            (
                "copy",
                "copies to the device",
                copy.as_ref().map(|copy| &copy.latency),
            ),
        ];
        put!(self, "<h2>Durations</h2>\n<div class=\"pair\">");
        for (class, what, latency) in all {
            let Some((latency, bins)) = latency.map(|latency| (latency, bins(latency))) else {
                continue;
            };
            let (Some((first, _)), Some((last, _))) = (bins.first(), bins.last()) else {
                continue;
            };
            let most = bins
                .iter()
                .map(|(_, count)| *count)
                .max()
                .unwrap_or(1)
                .max(1);
            let from = time(bin_start(*first));
            let to = time(bin_start(last + 1));
            let median = time(latency.p50_ns);
            let p99 = time(latency.p99_ns);
            let caption = format!(
                "{} {what}: median {median}, p99 {p99}",
                HumanCount(latency.count)
            );
            put!(
                self,
                "<figure><figcaption>{caption}</figcaption><div class=\"hist\">"
            );
            for (bin, count) in &bins {
                let height = 100.0 * *count as f64 / most as f64;
                let from = bin_start(*bin);
                let to = bin_start(bin + 1);
                let title = format!("{} to {}: {count}", time(from), time(to));
                put!(
                    self,
                    "<i class=\"{class}\" style=\"height:{height:.2}%\" title=\"{title}\"></i>"
                );
            }
            put!(
                self,
                "</div><p><span>{from}</span><span>{to}</span></p></figure>"
            );
        }
        put!(self, "</div>");
    }

    fn report(&mut self, report: &str) {
        put!(self, "<h2>Report</h2>\n<pre>{}</pre>", escape(report));
        put!(
            self,
            "<footer>feedline {}</footer>\n</body>\n</html>",
            env!("CARGO_PKG_VERSION")
        );
    }
}

/// Bins of a tenth of a power of ten, without gaps.
fn bins(latency: &Latency) -> Vec<(i32, u64)> {
    let seen = latency
        .buckets
        .iter()
        .filter(|(ns, count)| ns.is_finite() && *count > 0);
    let seen: Vec<(i32, u64)> = seen
        .map(|(ns, count)| ((10.0 * ns.max(1.0).log10()).floor() as i32, *count))
        .collect();
    let (Some(first), Some(last)) = (
        seen.iter().map(|bin| bin.0).min(),
        seen.iter().map(|bin| bin.0).max(),
    ) else {
        return Vec::new();
    };
    let in_bin = |bin| {
        seen.iter()
            .filter(|seen| seen.0 == bin)
            .fold(0_u64, |sum, seen| sum.saturating_add(seen.1))
    };
    (first..=last).map(|bin| (bin, in_bin(bin))).collect()
}

fn bin_start(bin: i32) -> f64 {
    10_f64.powf(f64::from(bin) / 10.0)
}

/// A part of a stage's time: class, name, nanoseconds.
type Part = (&'static str, &'static str, u64);

/// Each stage's name, time, and parts of it.
fn stages(snapshot: &Snapshot) -> Vec<(&'static str, f64, Vec<Part>)> {
    let Snapshot {
        consumer,
        order,
        storage,
        decode,
        ..
    } = snapshot;
    let steady = snapshot.steady_ns as f64;
    let starved = ("starved", "starved", consumer.waited_ns);
    let mut all = vec![(
        "consumer",
        steady,
        vec![starved, ("own", "own work", consumer.user_ns)],
    )];
    if let Some(gpu) = &consumer.gpu {
        let late = gpu
            .host_late_ns()
            .map(|ns| ("wait", "idle by the program's own code", ns));
        let parts = [("starved", "starved", gpu.starved_ns)]
            .into_iter()
            .chain(late);
        all.push(("GPU", gpu.span_ns as f64, parts.collect()));
    }
    if let Some(copy) = &snapshot.copy {
        let work = [
            ("own", "copying", copy.busy_ns),
            ("own", "operations", copy.ops_ns),
        ];
        let waits = [
            ("wait", "no full batch", copy.starved_ns),
            ("room", "no device memory", copy.blocked_ns),
        ];
        all.push(("copy", steady, [work, waits].concat()));
    }
    let waits = [
        ("wait", "no bytes", decode.starved_ns),
        ("room", "ahead", decode.ahead_ns),
    ];
    let workers = steady * f64::from(decode.workers);
    all.push((
        "decode",
        workers,
        [&[("own", "decoding", decode.busy_ns)], &waits[..]].concat(),
    ));
    all.push((
        "storage",
        steady,
        vec![
            ("own", "reading", storage.busy_ns),
            ("room", "no space", storage.blocked_ns),
        ],
    ));
    all.push((
        "order",
        steady,
        vec![
            ("own", "planning", order.busy_ns),
            ("room", "no slot", order.no_slot_ns),
        ],
    ));
    all
}

fn escape(text: &str) -> String {
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\0', "\u{fffd}")
}

/// `part` of `whole`; 0 if `whole` is 0.
fn share(part: u64, whole: u64) -> f64 {
    if whole > 0 {
        part as f64 / whole as f64
    } else {
        0.0
    }
}

fn per_second(amount: u64, ns: u64) -> f64 {
    1e9 * share(amount, ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline::profile::snapshot::{CopyStage, GpuIdle};
    use proptest::prelude::*;

    /// Element names of a page. Panics unless each element is closed in order and attributes are
    /// complete.
    fn elements(page: &str) -> Vec<String> {
        let (mut open, mut all): (Vec<String>, Vec<String>) = Default::default();
        let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("a page");
        while let Some(at) = rest.find('<') {
            assert!(
                !rest[..at].contains('>'),
                "a stray > before {}",
                &rest[at..]
            );
            let end = rest[at..].find('>').expect("a closed tag") + at;
            let tag = &rest[at + 1..end];
            rest = &rest[end + 1..];
            assert!(
                !tag.contains('<') && tag.matches('"').count().is_multiple_of(2),
                "{tag}"
            );
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            let name = tag.split([' ', '/', '\n']).next().unwrap().to_string();
            all.push(name.clone());
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?} not closed");
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn pages_are_well_formed_for_any_input(
            numbers in prop::array::uniform6(prop_oneof![Just(0), 0_u64..100, any::<u64>(), Just(u64::MAX)]),
            verdict in prop::collection::vec(any::<String>(), 0..3), title in any::<String>(), report in any::<String>()
        ) {
            let [steady_ns, a, b, c, d, e] = numbers;
            let mut snapshot = Snapshot::default();
            let mut gpu = GpuIdle::default();
            let mut copy = CopyStage::default();
            (snapshot.steady_ns, snapshot.consumer.waited_ns, snapshot.consumer.user_ns) = (steady_ns, a, b);
            (snapshot.storage.busy_ns, snapshot.storage.counts.bytes_moved, snapshot.decode.busy_ns) = (c, d, e);
            (gpu.steps, gpu.starved_ns, gpu.late_ns, gpu.span_ns) = (a, b, c, d);
            (copy.busy_ns, copy.blocked_ns, snapshot.decode.workers) = (d, e, e as u32);
            (snapshot.consumer.gpu, snapshot.copy) = (Some(gpu), Some(copy));
            snapshot.storage.latency.buckets = vec![(c as f64, d), (f64::NAN, e), (f64::INFINITY, 1)];
            let page = html(&snapshot, &verdict, &title, &report);
            elements(&page);
            prop_assert!(!page.contains("NaN") || title.contains("NaN") || report.contains("NaN"));
        }
    }

    #[test]
    fn texts_are_never_markup_and_nothing_is_loaded() {
        let evil =
            "</style></title><script>alert(1)</script><img src=x onerror=\"y\">&".to_string();
        let page = html(
            &Snapshot::default(),
            &[evil.clone(), evil.clone()],
            &evil,
            &evil,
        );
        assert!(
            elements(&page)
                .iter()
                .all(|name| name != "script" && name != "img")
        );
        assert!(page.contains("No iterator has delivered its first batch yet."));
        let page = html(&Snapshot::default(), &[], "train", "");
        for reference in ["http://", "https://", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(reference), "{reference}");
        }
    }
}
