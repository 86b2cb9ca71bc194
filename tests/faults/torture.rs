//! The example `torture`: its parts, and the whole of it as a program, on a dataset that it makes itself.

#![cfg(all(feature = "image", feature = "signals"))]

#[allow(dead_code)]
#[path = "../../examples/torture/copy.rs"]
pub mod copy;
#[allow(dead_code)]
#[path = "../../examples/torture/damage.rs"]
pub mod damage;
#[allow(dead_code)]
#[path = "../../examples/torture/job.rs"]
pub mod job;
#[allow(dead_code)]
#[path = "../../examples/torture/judge.rs"]
pub mod judge;
#[allow(dead_code)]
#[path = "../../examples/torture/scenarios.rs"]
pub mod scenarios;
#[allow(dead_code)]
#[path = "../../examples/throughput/source.rs"]
pub mod source;
#[allow(dead_code)]
#[path = "../../examples/torture/supervise.rs"]
pub mod supervise;

use crate::common::{Dir, noise};
use job::{Damage, Fault, Kind, Phase, Told, When};
use judge::{Case, Verdict};
use rustix::process::{Pid, Signal, kill_process};
use scenarios::{Promise, SCENARIOS};
use serde_json::Value;
use source::Source;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use supervise::Ended;

/// Nothing here takes that long, whatever the machine does.
const LATE: Duration = Duration::from_secs(300);

/// Below the folder of the build, where `cargo test` has put it.
fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let program = own.ancestors().nth(2).unwrap().join("examples/torture");
    assert!(program.exists(), "build it: cargo build --example torture");
    program
}

fn torture(dir: &Dir, words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(words).arg("--work").arg(dir.path("work"));
    command
}

/// Files with their contents and times.
fn state_of(folder: &Path) -> BTreeMap<PathBuf, (Vec<u8>, std::time::SystemTime)> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(state_of(&path));
        } else {
            let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
            all.insert(path.clone(), (std::fs::read(&path).unwrap(), modified));
        }
    }
    all
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none())
}

/// Verdicts by scenario and policy, and what came out.
fn verdicts(json: &Path) -> BTreeMap<(String, String), (String, String)> {
    let lines: Vec<Value> = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let text = |line: &Value, name: &str| line[name].as_str().unwrap().to_string();
    let row =
        |line: &Value| ((text(line, "scenario"), text(line, "policy")), (text(line, "verdict"), text(line, "words")));
    lines.iter().map(row).collect()
}

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn on_pictures_every_scenario_has_a_row_and_every_promise_holds() {
    let dir = Dir::new();
    let json = dir.path("rows.json");
    let words = ["--drops", "4", "--places", "2", "--json", json.to_str().unwrap()];
    let output = torture(&dir, &words).output().unwrap();
    let text = told(&output);
    assert!(output.status.success(), "{text}");
    // All but the line that names where the copy lies, which may be anywhere.
    let place = dir.path("work").display().to_string();
    assert!(text.lines().all(|line| line.chars().count() <= 120 || line.contains(&place)), "{text}");
    let rows = verdicts(&json);
    for scenario in SCENARIOS {
        assert!(rows.keys().any(|(name, _)| name == scenario.name), "{}: {text}", scenario.name);
    }
    let of = |name: &str, policy: &str| rows[&(name.to_string(), policy.to_string())].clone();
    let three = "3 rows substituted, 3 of 3 bad samples named";
    for name in ["cut in half, before", "emptied, when indexed", "removed, when indexed", "a FIFO, when indexed"] {
        assert_eq!(of(name, "substitute"), ("ok".into(), three.into()), "{text}");
        let (verdict, words) = of(name, "fail");
        assert!(verdict == "ok" && words.starts_with("error: ") && words.contains(", sample "), "{text}");
    }
    assert_eq!(of("a bit in each of some files", "fail").0, "not_noticed", "{text}");
    assert!(is_empty(&dir.path("work")), "the copy is removed");
}

#[test]
fn with_checksums_flipped_bits_are_named_and_nobody_touches_the_original() {
    let dir = Dir::new();
    let json = dir.path("rows.json");
    let data = records(&dir);
    let before = state_of(&data);
    let words = ["--source", "records", "--record-bytes", "500", "--checked", "sums", "--only", "bit,same,kill"];
    let output = torture(&dir, &words).arg("--path").arg(&data).arg("--json").arg(&json).output().unwrap();
    let text = told(&output);
    assert!(output.status.success(), "{text}");
    for ((name, policy), (verdict, words)) in verdicts(&json) {
        let right = match (name.as_str(), policy.as_str()) {
            ("a bit in a header or index", _) => verdict == "skipped",
            ("intact", _) | ("kill -9, then resumed", _) => words.starts_with("exact: 120 samples"),
            (_, "fail") => words.starts_with("error: ") && words.contains(", sample "),
            (_, _) => words.contains("rows substituted") && verdict == "ok",
        };
        assert!(right && verdict != "broken", "{name}: {text}");
    }
    assert!(state_of(&data) == before, "the original was touched");
    assert!(!Path::new("sums").exists());
}

/// Records in three files.
fn records(dir: &Dir) -> PathBuf {
    let data = dir.path("records");
    std::fs::create_dir(&data).unwrap();
    for file in 0..3 {
        std::fs::write(data.join(format!("{file}.bin")), noise(40 * 500, file)).unwrap();
    }
    data
}

#[test]
fn more_than_is_allowed_is_not_copied_and_fewer_files_are() {
    let dir = Dir::new();
    let data = records(&dir);
    let run = |words: &[&str]| {
        let words = [&["--source", "records", "--record-bytes", "500", "--only", "intact"], words].concat();
        torture(&dir, &words).arg("--path").arg(&data).output().unwrap()
    };
    let output = run(&["--most", "50KB"]);
    let text = told(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("has 60 kB in 3 files, and at most 50 kB are copied"), "{text}");
    let output = run(&["--most", "50KB", "--sample", "2"]);
    let text = told(&output);
    assert!(output.status.success() && text.contains("2 files, 40 kB, copied to"), "{text}");
    assert!(text.contains("exact: 80 samples"), "{text}");
}

#[test]
fn ctrl_c_ends_the_children_and_removes_the_copy() {
    let dir = Dir::new();
    // Long enough for a signal to come in the middle.
    let mut child = torture(&dir, &["--only", "dropped", "--drops", "100000"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until(|| state(&dir.path("work")).contains(&"oracle".to_string()));
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::INT).unwrap();
    assert_eq!(ended(&mut child), Some(130));
    assert!(is_empty(&dir.path("work")));
}

/// Names of what lies in the copies' folders.
fn state(work: &Path) -> Vec<String> {
    let folders = std::fs::read_dir(work).into_iter().flatten().flatten();
    let names = folders.flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten().flatten());
    names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn wait_until(met: impl Fn() -> bool) {
    let until = Instant::now() + LATE;
    while !met() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ended(child: &mut Child) -> Option<i32> {
    let until = Instant::now() + LATE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < until, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

// What is not to come out of feedline: so the judge is asked here.

fn case(promise: Promise, source: Source) -> Case {
    Case { promise, source, checked: false, header: false, unlisted: false, samples: 10 }
}

fn judged(case: Case, told: Told) -> (Verdict, String) {
    let outcome = case.judge(&Ended { told: Some(told), signal: None, hang: false, words: String::new() });
    (outcome.verdict, outcome.words)
}

fn fault(phase: Phase, named: bool) -> Option<Fault> {
    let (path, offset) = if named { (Some("/d/a.tar".into()), Some(7)) } else { (None, None) };
    Some(Fault { phase, text: "words".into(), kind: "truncated".into(), path, offset, sample: named.then_some(3) })
}

#[test]
fn what_is_broken_is_called_so() {
    use Promise::{Checksum, Exact, Noticed, Refused, Survives};
    let wrong = || Told { exact: 9, wrong: 1, ..Told::default() };
    let all = || Told { exact: 10, ..Told::default() };
    let fewer = || Told { exact: 9, missing: 1, ..Told::default() };
    let bad = |unnamed| Told { exact: 9, substituted: 1, bad: 1, unnamed, ..Told::default() };
    let error = |phase, named| Told { error: fault(phase, named), ..Told::default() };
    let (tar, images, tfrecord) = (Source::Tar, Source::Images, Source::Tfrecord);
    let table = [
        (Exact, tar, all(), Verdict::Ok),
        (Exact, tar, wrong(), Verdict::Broken),
        (Exact, tar, fewer(), Verdict::Broken),
        (Exact, tar, bad(0), Verdict::Broken),
        (Exact, tar, error(Phase::Epoch, true), Verdict::Broken),
        (Noticed, tar, wrong(), Verdict::Broken),
        (Noticed, tar, fewer(), Verdict::NotNoticed),
        (Noticed, tar, bad(0), Verdict::Ok),
        (Noticed, tar, bad(1), Verdict::Broken),
        (Noticed, tar, error(Phase::Epoch, true), Verdict::Ok),
        (Noticed, tar, error(Phase::Epoch, false), Verdict::Broken),
        (Noticed, tar, error(Phase::Open, false), Verdict::Broken),
        (Checksum, images, wrong(), Verdict::NotNoticed),
        (Checksum, tfrecord, wrong(), Verdict::Broken),
        (Checksum, images, fewer(), Verdict::Broken),
        (Refused, tar, all(), Verdict::Broken),
        (Survives, tar, error(Phase::Open, false), Verdict::Ok),
        (Survives, tar, wrong(), Verdict::Broken),
    ];
    for (promise, source, told, verdict) in table {
        let words = format!("{promise:?} {told:?}");
        assert_eq!(judged(case(promise, source), told).0, verdict, "{words}");
    }
    let checked = Case { checked: true, ..case(Checksum, images) };
    assert_eq!(judged(checked, wrong()).0, Verdict::Broken);
    let header = Case { header: true, ..case(Checksum, tar) };
    assert_eq!(judged(header, wrong()).0, Verdict::Broken, "a tar's headers have checksums");
    for (hang, signal, word) in [(true, None, "HANG"), (false, Some(11), "CRASH: signal 11"), (false, None, "CRASH")] {
        let outcome = case(Survives, tar).judge(&Ended { told: None, signal, hang, words: String::new() });
        assert!(outcome.verdict == Verdict::Broken && outcome.words.starts_with(word), "{outcome:?}");
    }
}

#[test]
fn a_flipped_bit_is_one_bit_and_the_file_looks_as_before_and_links_stay_whole() {
    let dir = Dir::new();
    let bytes = noise(9000, 1);
    for seed in 0..20 {
        let (path, link) = (dir.write("a.bin", &bytes), dir.path("link.bin"));
        let _ = std::fs::remove_file(&link);
        std::fs::hard_link(&path, &link).unwrap();
        let modified = std::fs::metadata(&link).unwrap().modified().unwrap();
        let damage = Damage { kind: Kind::Flipped, when: When::Before, files: vec![link.clone()] };
        damage::inflict(&damage, Source::Records, seed).unwrap();
        let now = std::fs::read(&link).unwrap();
        let bits: u32 = bytes.iter().zip(&now).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!((bits, now.len()), (1, bytes.len()));
        assert_eq!(std::fs::metadata(&link).unwrap().modified().unwrap(), modified);
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        std::fs::remove_file(&path).unwrap();
    }
}

/// What is copied for `--path`, or why nothing.
fn copied(dir: &Dir, path: &Path) -> Result<Vec<String>, String> {
    let args = ["torture", "--source", "records", "--record-bytes", "1", "--path", path.to_str().unwrap()];
    let args = <OnlySource as clap::Parser>::try_parse_from(args).unwrap();
    let stop = feedline::Stop::new();
    let copy =
        copy::Copy::make(&args.source, &dir.path("work"), 1000, None, &stop).map_err(|error| error.to_string())?;
    copy.renew().unwrap();
    let name = |path: PathBuf| path.strip_prefix(copy.work().join("data")).unwrap().display().to_string();
    Ok(copy.files().into_iter().map(name).collect())
}

#[derive(clap::Parser)]
struct OnlySource {
    #[command(flatten)]
    source: source::SourceArgs,
}

#[test]
fn a_path_names_its_files_and_no_folder_beside_them_is_searched() {
    let dir = Dir::new();
    for name in ["a.idx", "a.bin", "ab.bin", "b-0.tar", "b-1.tar", "deep/a.bin", "deep/b-2.tar"] {
        std::fs::create_dir_all(dir.path(name).parent().unwrap()).unwrap();
        std::fs::write(dir.path(name), b"x").unwrap();
    }
    for (path, files) in [
        ("a", &["a.bin", "a.idx"][..]),
        ("a.idx", &["a.bin", "a.idx"]),
        ("b-{0..1}.tar", &["b-0.tar", "b-1.tar"]),
        ("*/b-*.tar", &["deep/b-2.tar"]),
        ("deep", &["a.bin", "b-2.tar"]),
    ] {
        assert_eq!(copied(&dir, &dir.path(path)).unwrap(), files, "{path}");
    }
    for (path, why) in [("missing", "No such file"), ("no/such/folder", "No such file"), ("c*.tar", "no files there")] {
        let path = dir.path(path);
        let error = copied(&dir, &path).unwrap_err();
        assert!(error.starts_with(&format!("{}: {why}", path.display())), "{error}");
    }
}

#[test]
fn sizes_are_read_as_people_write_them() {
    let table = [("2GB", Some(2_000_000_000)), ("1.5mb", Some(1_500_000)), ("7 kb", Some(7000)), ("12", Some(12))];
    for (text, bytes) in table.into_iter().chain([("GB", None), ("-1MB", None), ("2TBx", None)]) {
        assert_eq!(copy::size(text).ok(), bytes, "{text}");
    }
}
