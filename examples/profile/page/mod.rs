//! A snapshot as one readable page. The trace has the course of time, batch by batch.
//!
//! ```text
//! title, figures, verdict
//! where the time went     a bar per stage                       (charts)
//! stages                  a table
//! durations               histograms, log x                     (charts)
//! report                  as text
//! ```
//!
//! The page is self-contained: it includes styles and drawings, has no script, and its policy forbids the browser to
//! load anything. It follows the reader's light or dark scheme, and prints. Colours differ in brightness as well as
//! hue, so that most people with colour blindness can distinguish them. Only starvation is orange.

mod charts;
mod svg;

use feedline::profile::{Latency, Snapshot};
use std::fmt::Write;
use svg::{bytes, count, escape, number, percent, share, time};

const STYLE: &str = include_str!("style.css");
/// Forbids loading and running anything.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
/// Pattern for time without work.
const HATCH: &str = "width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"";
/// Starvation above this share is highlighted.
const HOT: f64 = 0.02;

/// A page of a snapshot: self-contained, without scripts, for any browser.
///
/// `verdict` are lines of text, the most important first. `report` is shown unchanged. All text is escaped.
pub fn html(snapshot: &Snapshot, verdict: &[String], title: &str, report: &str) -> String {
    let mut page = Page { out: String::with_capacity(64 << 10), snapshot };
    page.head(title);
    page.tiles();
    page.verdict(verdict);
    page.shares();
    page.table();
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
        put!(self, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>");
        put!(self, "<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\"/>");
        put!(self, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>{title}</title>");
        put!(self, "<style>\n{STYLE}</style>\n</head>\n<body>");
        put!(
            self,
            "<svg class=\"defs\" aria-hidden=\"true\"><defs><pattern id=\"room\" {HATCH}><rect class=\"back\" width=\"6\" height=\"6\"/><path d=\"M0 0V6\"/></pattern></defs></svg>"
        );
        let consumer = &self.snapshot.consumer;
        let (at, batches) = (time(self.snapshot.at_ns as f64), count(consumer.batches));
        let (steady, first) = (time(self.snapshot.steady_ns as f64), time(consumer.first_ns as f64));
        put!(
            self,
            "<h1>{title}</h1>\n<p>{at} since the loader was built: {batches} batches; steady time {steady}, first batches {first}</p>"
        );
    }

    /// Seconds of the iterators, the base of rates.
    fn seconds(&self) -> f64 {
        (self.snapshot.steady_ns as f64 + self.snapshot.consumer.first_ns as f64) / 1e9
    }

    fn starved(&self) -> f64 {
        share(self.snapshot.consumer.waited_ns as f64, self.snapshot.steady_ns as f64)
    }

    fn gpu_starved(&self) -> Option<f64> {
        let gpu = self.snapshot.consumer.gpu.as_ref().filter(|gpu| gpu.span_ns > 0)?;
        Some(share(gpu.starved_ns as f64, gpu.span_ns as f64))
    }

    /// Whether the trainer starves: the GPU if it was measured, or else the host.
    fn hot(&self) -> bool {
        let on_host = || self.snapshot.copy.is_none() && self.starved() >= HOT;
        self.gpu_starved().map_or_else(on_host, |starved| starved >= HOT)
    }

    fn tiles(&mut self) {
        let consumer = &self.snapshot.consumer;
        let rate = |amount: u64| share(amount as f64, self.seconds());
        let mut tiles = vec![
            (number(rate(consumer.samples)), "samples/s", false),
            (number(rate(consumer.batches)), "batches/s", false),
            (format!("{}/s", bytes(rate(consumer.bytes))), "handed out", false),
            (format!("{}/s", bytes(rate(self.snapshot.storage.bytes))), "read from storage", false),
        ];
        if let Some(starved) = self.gpu_starved() {
            tiles.push((percent(starved), "GPU starved, of the steady time", starved >= HOT));
        }
        let starved = self.starved();
        tiles.push((percent(starved), "consumer waited for batches", starved >= HOT && self.snapshot.copy.is_none()));
        let own = share(consumer.user_ns as f64, self.snapshot.steady_ns as f64);
        tiles.push((percent(own), "consumer's own work", false));
        put!(self, "<div class=\"tiles\">");
        for (figure, what, hot) in tiles {
            let class = if hot { "tile hot" } else { "tile" };
            put!(self, "<div class=\"{class}\"><b>{figure}</b><span>{what}</span></div>");
        }
        put!(self, "</div>");
    }

    fn verdict(&mut self, verdict: &[String]) {
        let Some((first, rest)) = verdict.split_first() else { return };
        let class = if self.hot() { "verdict hot" } else { "verdict" };
        put!(self, "<div class=\"{class}\"><b>{}</b>", escape(first));
        if !rest.is_empty() {
            put!(self, "<ul>");
            for line in rest {
                put!(self, "<li>{}</li>", escape(line));
            }
            put!(self, "</ul>");
        }
        put!(self, "</div>");
    }

    fn shares(&mut self) {
        put!(self, "<h2>Where the time went</h2>");
        if self.snapshot.steady_ns == 0 {
            put!(self, "<p>No iterator has delivered its first batch yet.</p>");
            return;
        }
        put!(self, "<p>Each bar is the steady time: from the first batch of each iterator on.</p>");
        self.legend(&[
            ("starved", "starved: no batch was ready"),
            ("own", "consumer's own work"),
            ("wait", "stage waits for input"),
            ("room", "stage waits for space: it is ahead"),
            ("rest", "idle, or not accounted for"),
        ]);
        self.drawing(&charts::stages(self.snapshot));
    }

    /// A wide drawing, scrolled where the page is narrow.
    fn drawing(&mut self, drawing: &str) {
        put!(self, "<div class=\"scroll\">{drawing}</div>");
    }

    fn legend(&mut self, entries: &[(&str, &str)]) {
        put!(self, "<div class=\"legend\">");
        for (class, name) in entries {
            let name = escape(name);
            put!(
                self,
                "<span><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><rect class=\"{class}\" width=\"14\" height=\"14\"/></svg>{name}</span>"
            );
        }
        put!(self, "</div>");
    }

    fn table(&mut self) {
        put!(
            self,
            "<h2>Stages</h2>\n<div class=\"scroll\"><table>\n<tr><th>stage</th><th>runs on</th><th>utilisation</th><th>waits for input</th><th>waits for space</th><th>work done</th><th>while busy</th><th>median</th><th>p99</th></tr>"
        );
        for row in rows(self.snapshot) {
            let shares = [row.input, row.room].map(|share| share.map_or("–".into(), percent));
            let latency =
                |ns: fn(&Latency) -> f64| row.latency.filter(|l| l.count > 0).map_or("–".into(), |l| time(ns(l)));
            put!(
                self,
                "<tr><td>{}</td><td>{}</td><td>{}{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                row.stage,
                row.runs_on,
                meter(row.busy),
                percent(row.busy),
                shares[0],
                shares[1],
                row.work,
                row.rate,
                latency(|l| l.p50_ns),
                latency(|l| l.p99_ns),
            );
        }
        put!(self, "</table></div>");
        put!(
            self,
            "<p>Utilisation and waits are shares of the steady time (for decode, of all workers'). Storage is utilised while at least one read is in flight, however many fit. Median and p99: for a read, a piece of decoding, a copy, a wait in <code>next()</code>.</p>"
        );
    }

    fn histograms(&mut self) {
        let Snapshot { consumer, storage, decode, copy, .. } = self.snapshot;
        let mut drawings = vec![
            charts::histogram(&consumer.waits, "starved", "waits of the consumer in next()"),
            charts::histogram(&storage.latency, "read", "reads, from submission"),
            charts::histogram(&decode.latency, "decode", "pieces of decode work"),
        ];
        if let Some(copy) = copy {
            drawings.push(charts::histogram(&copy.latency, "copy", "copies to the device, until seen done"));
        }
        let drawings: Vec<String> = drawings.into_iter().flatten().collect();
        if drawings.is_empty() {
            return;
        }
        put!(
            self,
            "<h2>Durations</h2>\n<p>Shares of all since the loader was built, in bins of a tenth of a power of ten.</p>\n<div class=\"pair\">"
        );
        for drawing in drawings {
            put!(self, "<div>{drawing}</div>");
        }
        put!(self, "</div>");
    }

    fn report(&mut self, report: &str) {
        if !report.is_empty() {
            put!(self, "<h2>Report</h2>\n<pre>{}</pre>", escape(report));
        }
        let version = env!("CARGO_PKG_VERSION");
        put!(
            self,
            "<footer>feedline {version}. Starved: the consumer, or its stream on the GPU, was idle because no batch was ready. The GPU's idle time before its request is an upper bound for delays of the training code.</footer>\n</body>\n</html>"
        );
    }
}

/// A small bar for a table cell.
fn meter(share: f64) -> String {
    let width = svg::C(90.0 * if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 });
    format!(
        "<svg viewBox=\"0 0 90 10\" aria-hidden=\"true\"><rect class=\"rest\" width=\"90\" height=\"10\"/><rect class=\"decode\" width=\"{width}\" height=\"10\"/></svg>"
    )
}

/// A stage in the table. Shares relate to the steady time.
struct Row<'a> {
    stage: &'static str,
    runs_on: String,
    busy: f64,
    input: Option<f64>,
    room: Option<f64>,
    work: String,
    rate: String,
    latency: Option<&'a Latency>,
}

fn rows(snapshot: &Snapshot) -> Vec<Row<'_>> {
    let steady = snapshot.steady_ns as f64;
    let of = |ns: u64| share(ns as f64, steady);
    let per_second = |amount: u64, ns: u64| share(amount as f64, ns as f64 / 1e9);
    let Snapshot { consumer, order, storage, decode, copy, .. } = snapshot;
    let workers = f64::from(decode.workers);
    let mut rows = vec![
        Row {
            stage: "order",
            runs_on: format!("1 thread, {} slots", snapshot.slots.count),
            busy: of(order.busy_ns),
            input: None,
            room: Some(of(order.no_slot_ns)),
            work: format!("{} batches", count(consumer.batches)),
            rate: format!("{} batches/s", number(per_second(consumer.batches, order.busy_ns))),
            latency: None,
        },
        Row {
            stage: "storage",
            runs_on: format!("depth {}, on average {:.1}", storage.depth, of(storage.in_flight_ns)),
            busy: of(storage.busy_ns),
            input: None,
            room: Some(of(storage.blocked_ns)),
            work: format!("{} in {} reads", bytes(storage.bytes as f64), count(storage.reads)),
            rate: format!("{}/s", bytes(per_second(storage.bytes, storage.busy_ns))),
            latency: Some(&storage.latency),
        },
        Row {
            stage: "decode",
            runs_on: format!("{} workers, {} cores", decode.workers, decode.cores),
            busy: share(of(decode.busy_ns), workers),
            input: Some(share(of(decode.starved_ns), workers)),
            room: Some(share(of(decode.ahead_ns), workers)),
            work: format!("{} samples", count(decode.samples)),
            rate: format!("{} samples/s each", number(per_second(decode.samples, decode.busy_ns))),
            latency: Some(&decode.latency),
        },
    ];
    if let Some(copy) = copy {
        rows.push(Row {
            stage: "copy",
            runs_on: format!("1 stream, {} batches", copy.buffers),
            busy: of(copy.busy_ns),
            input: Some(of(copy.starved_ns)),
            room: Some(of(copy.blocked_ns)),
            work: format!("{} in {} batches", bytes(copy.bytes as f64), count(copy.batches)),
            rate: format!("{}/s", bytes(per_second(copy.bytes, copy.busy_ns))),
            latency: Some(&copy.latency),
        });
    }
    rows.push(Row {
        stage: "consumer",
        runs_on: "its own thread".into(),
        busy: of(consumer.user_ns),
        input: Some(of(consumer.waited_ns)),
        room: None,
        work: format!("{} samples", count(consumer.samples)),
        rate: format!("{} samples/s", number(per_second(consumer.samples, consumer.user_ns))),
        latency: Some(&consumer.waits),
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use feedline::profile::{Copy, GpuIdle};
    use proptest::prelude::*;

    /// Element names of a page. Panics unless each element is closed in order and attributes are complete.
    fn elements(page: &str) -> Vec<String> {
        let (mut open, mut all): (Vec<String>, Vec<String>) = Default::default();
        let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("a page");
        while let Some(at) = rest.find('<') {
            assert!(!rest[..at].contains('>'), "a stray > before {}", &rest[at..rest.len().min(at + 80)]);
            let end = rest[at..].find('>').expect("a closed tag") + at;
            let tag = &rest[at + 1..end];
            rest = &rest[end + 1..];
            assert!(!tag.contains('<') && tag.matches('"').count().is_multiple_of(2), "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            let name = tag.split([' ', '/', '\n']).next().unwrap().to_string();
            all.push(name.clone());
            if !tag.ends_with('/') {
                if name == "style" {
                    rest = &rest[rest.find("</style>").unwrap()..];
                }
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?} not closed");
        all
    }

    fn snapshot(numbers: [u64; 8]) -> Snapshot {
        let [at_ns, steady_ns, a, b, c, d, e, f] = numbers;
        let (mut snapshot, mut gpu, mut copy) = (Snapshot::default(), GpuIdle::default(), Copy::default());
        (snapshot.at_ns, snapshot.steady_ns) = (at_ns, steady_ns);
        (snapshot.consumer.waited_ns, snapshot.consumer.user_ns, snapshot.consumer.samples) = (a, b, c);
        (snapshot.storage.busy_ns, snapshot.storage.bytes, snapshot.decode.busy_ns) = (d, e, f);
        snapshot.decode.workers = f as u32;
        (gpu.steps, gpu.starved_ns, gpu.host_late_ns, gpu.span_ns) = (a, b, c, d);
        (copy.busy_ns, copy.blocked_ns) = (d, e);
        (snapshot.consumer.gpu, snapshot.copy) = (Some(gpu), Some(copy));
        let latency = &mut snapshot.storage.latency;
        (latency.count, latency.p50_ns, latency.p99_ns) = (a, b as f64, f64::NAN);
        latency.buckets = vec![(c as f64, d), (f64::NAN, e)];
        snapshot
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn pages_are_well_formed_for_any_input(
            numbers in prop::array::uniform8(prop_oneof![Just(0), 0_u64..100, any::<u64>(), Just(u64::MAX)]),
            verdict in prop::collection::vec(any::<String>(), 0..3), title in any::<String>(), report in any::<String>()
        ) {
            let page = html(&snapshot(numbers), &verdict, &title, &report);
            elements(&page);
            for wrong in ["NaN", "inf\"", "-inf"] {
                let found = page.contains(wrong);
                prop_assert!(!found || title.contains(wrong) || report.contains(wrong), "{}", wrong);
            }
        }
    }

    #[test]
    fn texts_are_never_markup() {
        let evil = "</style></title><script>alert(1)</script><img src=x onerror=\"y\">".to_string();
        let page = html(&Snapshot::default(), &[evil.clone(), evil.clone()], &evil, &evil);
        let elements = elements(&page);
        assert!(elements.iter().all(|name| name != "script" && name != "img"));
        assert_eq!(elements.iter().filter(|name| *name == "li").count(), 1);
    }

    #[test]
    fn an_unused_loader_has_a_page_without_batches() {
        let page = html(&Snapshot::default(), &[], "train", "");
        elements(&page);
        assert!(page.contains("No iterator has delivered its first batch yet."));
    }

    #[test]
    fn pages_load_nothing() {
        let page = html(&Snapshot::default(), &[], "train", "");
        for reference in ["http://", "https://", "src=", "href=", "@import", "url(h", "url(/"] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(page.contains("default-src 'none'"));
    }

    /// Messages on Chromium's console about a page.
    fn console(browser: &str, folder: &Folder, page: &str) -> Vec<String> {
        let (path, profile) = (folder.join("page.html"), folder.join("chromium"));
        std::fs::write(&path, page).unwrap();
        let output = std::process::Command::new(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"])
            .args(["--disable-dev-shm-usage", "--enable-logging=stderr", "--dump-dom"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg(format!("file://{}", path.display()))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(String::from_utf8_lossy(&output.stdout).contains("</html>"), "{browser} shows nothing: {said}");
        said.lines().filter(|line| line.contains("CONSOLE")).map(str::to_string).collect()
    }

    #[test]
    fn browsers_accept_the_page() {
        let names = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
        let Some(browser) = names.into_iter().find(|path| std::path::Path::new(path).exists()) else {
            return println!("skipped: no Chromium here");
        };
        let folder = Folder::new();
        let shown =
            html(&snapshot([3_000_000_000, 2_000_000_000, 40, 50, 60, 70, 80, 4]), &["decode".into()], "train", "");
        assert_eq!(console(browser, &folder, &shown), Vec::<String>::new());
        // The check works: the page's policy forbids this, and the browser reports it.
        let broken = shown.replace("</body>", "<script>document.title = 1</script><img src=\"file:///x.png\"/></body>");
        assert!(!console(browser, &folder, &broken).is_empty());
    }
}
