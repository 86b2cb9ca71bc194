//! What a loader measured, as a trace, metrics and a page, for loaders that are starved by one stage or by none.
//!
//! The pages are left in the target folder (`tmp/profile-*.html`), to be looked at.

use crate::common::synthetic::{MACHINES, Machine, measured};
use feedline::Loader;
use feedline::dataset::Records;
use feedline::profile::export::{Names, Server, html, prometheus, trace};
use feedline::profile::{Timeline, Work};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn page(machine: &Machine, batches: usize) -> String {
    let (snapshot, timeline) = measured(machine, batches);
    let verdict: Vec<String> = machine.verdict.iter().map(|line| line.to_string()).collect();
    let report = format!("dataset   made up\ndevice    <none> & \"no\" disk\ndelivered {batches} batches");
    html(&snapshot, &timeline, &verdict, &format!("feedline: {}", machine.name), &report)
}

fn written(name: &str, page: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("profile-{}.html", name.replace([' ', ','], "-")));
    std::fs::write(&path, page).unwrap();
    path
}

#[test]
fn a_page_is_small_however_long_the_run_and_draws_each_of_the_last_batches() {
    for machine in &MACHINES {
        for batches in [0, 1, 30, 4096] {
            let page = page(machine, batches);
            assert!(page.len() < 300_000, "{}, {batches} batches: {} bytes", machine.name, page.len());
            let drawn = page.matches("<title>epoch ").count();
            assert_eq!(drawn, batches.min(200), "{}, {batches} batches", machine.name);
            if batches == 4096 {
                written(machine.name, &page);
                let titles = page.matches("<h2>").count();
                assert_eq!(titles, 6, "shares, batches, time, table, histograms, report");
                let histograms = page.matches("by powers of ten").count();
                assert_eq!(histograms, if machine.copy.is_some() { 4 } else { 3 });
            }
        }
    }
}

#[test]
fn a_page_s_figures_are_the_snapshot_s() {
    let (snapshot, _) = measured(&MACHINES[0], 1000);
    let page = page(&MACHINES[0], 1000);
    let share = 100.0 * snapshot.consumer.waited_ns as f64 / snapshot.steady_ns as f64;
    assert!((20.0..60.0).contains(&share), "{share}");
    assert!(page.contains(&format!("<b>{share:.1} %</b><span>consumer waited for batches")), "{share}");
    assert!(page.contains("<li>decode needs 7.3 cores, has 4: `--workers 8` would give 1,780 images/s"));
    // The one machine whose awaited batches are being decoded says so.
    assert!(page.contains("all read, being decoded: "));
}

#[test]
fn a_trace_holds_every_batch_and_the_waits_that_the_snapshot_counts() {
    for machine in &MACHINES {
        let (snapshot, timeline) = measured(machine, 500);
        let text = trace(&timeline, &snapshot, Names::new(machine.name, 0));
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let named =
            |name: &str| events.iter().filter(|event| event["name"].as_str().unwrap().starts_with(name)).count();
        assert_eq!((named("batch "), named("slots"), named("reads in flight")), (500, 500, 500));
        let starved = events.iter().filter(|event| event["name"].as_str().unwrap().starts_with("starved"));
        let us: f64 = starved.map(|event| event["dur"].as_f64().unwrap()).sum();
        let expected = snapshot.consumer.waited_ns as f64 / 1e3;
        assert!((us - expected).abs() < 1.0, "{us} for {expected}");
        assert!(text.len() < 1500 * 500, "{} bytes", text.len());
    }
}

#[test]
fn metrics_are_served_while_the_server_lives() {
    let (snapshot, _) = measured(&MACHINES[3], 100);
    let server = Server::loopback(0, move || prometheus(&[(Names::new("train", 0), &snapshot)])).unwrap();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("\nfeedline_batches_total{loader=\"train\",rank=\"0\"} 100\n"), "{answer}");
}

fn chromium() -> Option<&'static str> {
    let names = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
    names.into_iter().find(|path| Path::new(path).exists())
}

/// What the browser says on its console about a page.
fn console(browser: &str, page: &Path) -> Vec<String> {
    let profile = page.with_extension("chromium");
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"])
        .args(["--disable-dev-shm-usage", "--enable-logging=stderr", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let _ = std::fs::remove_dir_all(profile);
    let dom = String::from_utf8_lossy(&output.stdout);
    assert!(dom.contains("</html>"), "{browser} shows nothing: {}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stderr);
    said.lines().filter(|line| line.contains("CONSOLE")).map(str::to_string).collect()
}

#[test]
fn a_browser_has_nothing_to_complain_about() {
    let Some(browser) = chromium() else {
        println!("skipped: no Chromium here");
        return;
    };
    let shown = page(&MACHINES[3], 300);
    assert_eq!(console(browser, &written("checked", &shown)), Vec::<String>::new());
    // It would be seen: the page's own policy forbids this, and the browser says so.
    let broken = shown.replace("</body>", "<script>document.title = 1</script><img src=\"file:///x.png\"/></body>");
    assert!(!console(browser, &written("broken", &broken)).is_empty());
}

#[test]
fn a_trace_of_a_run_has_a_track_for_each_thread_and_their_times_are_those_of_the_snapshot() {
    let records = Records::builder(64).open_bytes(vec![7; 64 << 6]).unwrap();
    let builder = Loader::builder(records).batch_size(8).workers(2).map(|row, _| {
        std::thread::sleep(Duration::from_millis(2));
        row.bytes_mut(0)[0] ^= 1;
        Ok(())
    });
    let loader = builder.build().unwrap();
    assert_eq!(loader.epoch(0).unwrap().map(Result::unwrap).count(), 8);
    // A worker notes a span after it has handed out the row: the last of them may still be to come. 64 rows of 2 ms at least.
    let noted = |timeline: &Timeline| {
        let spans = timeline.tracks.iter().skip(1).flat_map(|track| &track.spans);
        spans.map(|span| span.end_ns - span.begin_ns).sum::<u64>()
    };
    let started = Instant::now();
    let timeline = loop {
        let timeline = loader.timeline();
        if noted(&timeline) >= 128_000_000 || started.elapsed() > Duration::from_secs(20) {
            break timeline;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let snapshot = loader.snapshot();
    let names: Vec<&str> = timeline.tracks.iter().map(|track| track.name.as_str()).collect();
    assert_eq!(names, ["planner and reads", "decode worker 0", "decode worker 1"]);
    assert_eq!(timeline.batches.iter().filter(|record| record.first).count(), 1);
    assert!(timeline.batches[0].first);
    let done = timeline.tracks[1..].iter().flat_map(|track| &track.spans);
    let ns = noted(&timeline);
    assert!(ns >= 128_000_000 && done.clone().all(|span| span.what == Work::LookUp && span.end_ns <= snapshot.at_ns));
    let trace: Value = serde_json::from_str(&trace(&timeline, &snapshot, Names::new("train", 0))).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for name in names {
        assert!(events.iter().any(|event| event["ph"] == "M" && event["args"]["name"] == name), "{name}");
    }
    assert_eq!(events.iter().filter(|event| event["name"] == "from cache or memory").count(), done.count());
}
