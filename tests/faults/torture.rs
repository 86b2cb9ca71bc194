//! The example `torture`: its parts, and the whole program on generated data.

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

use crate::common::{Dir, noise, printed, until};
use job::{ChildReport, Damage, Fault, Kind, Phase, When};
use judge::{Case, Verdict};
use rustix::process::{Pid, Signal, kill_process};
use scenarios::{Promise, SCENARIOS};
use serde_json::Value;
use source::Source;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use supervise::Ended;

/// Time limit that no test here reaches, on any machine.
const LATE: Duration = Duration::from_secs(300);

/// Below the folder of the build, where `cargo test` has put it.
fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let program = own.ancestors().nth(2).unwrap().join("examples/torture");
    assert!(program.exists(), "build it: cargo build --example torture");
    program
}

fn torture(dir: &Dir, args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(args).arg("--work").arg(dir.path("work"));
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

/// Verdicts and summaries by scenario and policy.
fn verdicts(json: &Path) -> BTreeMap<(String, String), (String, String)> {
    let lines: Vec<Value> = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let text = |line: &Value, name: &str| line[name].as_str().unwrap().to_string();
    lines
        .iter()
        .map(|line| {
            (
                (text(line, "scenario"), text(line, "policy")),
                (text(line, "verdict"), text(line, "summary")),
            )
        })
        .collect()
}

#[test]
fn every_scenario_on_pictures_keeps_its_promise() {
    let dir = Dir::new();
    let json = dir.path("rows.json");
    let args = ["--places", "2", "--json", json.to_str().unwrap()];
    let output = torture(&dir, &args).output().unwrap();
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    // Except the line with the path of the copy, which may be long.
    let place = dir.path("work").display().to_string();
    assert!(
        text.lines()
            .all(|line| line.chars().count() <= 120 || line.contains(&place)),
        "{text}"
    );
    let rows = verdicts(&json);
    for scenario in SCENARIOS {
        assert!(
            rows.keys().any(|(name, _)| name == scenario.name),
            "{}: {text}",
            scenario.name
        );
    }
    let of = |name: &str, policy: &str| rows[&(name.to_string(), policy.to_string())].clone();
    let three = "3 rows substituted, 3 of 3 bad samples named";
    for name in [
        "cut in half, before",
        "emptied, when indexed",
        "removed, when indexed",
        "a FIFO, when indexed",
    ] {
        assert_eq!(
            of(name, "substitute"),
            ("ok".into(), three.into()),
            "{text}"
        );
        let (verdict, summary) = of(name, "fail");
        assert!(
            verdict == "ok" && summary.starts_with("error: ") && summary.contains(", sample "),
            "{text}"
        );
    }
    assert_eq!(
        of("a bit in each of some files", "fail").0,
        "not_noticed",
        "{text}"
    );
    assert!(is_empty(&dir.path("work")), "the copy is removed");
}

#[test]
fn checksums_name_flipped_bits_and_the_original_is_unchanged() {
    let dir = Dir::new();
    let json = dir.path("rows.json");
    let data = records(&dir);
    let before = state_of(&data);
    let args = [
        "--source",
        "records",
        "--record-bytes",
        "500",
        "--checked",
        "sums",
        "--only",
        "bit,same,kill",
    ];
    let output = torture(&dir, &args)
        .arg("--path")
        .arg(&data)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    for ((name, policy), (verdict, summary)) in verdicts(&json) {
        let right = match (name.as_str(), policy.as_str()) {
            ("a bit in a header or index", _) => verdict == "skipped",
            ("intact", _) | ("kill -9, then resumed", _) => {
                summary.starts_with("exact: 120 samples")
            }
            (_, "fail") => summary.starts_with("error: ") && summary.contains(", sample "),
            (_, _) => summary.contains("rows substituted") && verdict == "ok",
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
fn too_much_data_is_refused_and_fewer_files_are_copied() {
    let dir = Dir::new();
    let data = records(&dir);
    let run = |args: &[&str]| {
        let args = [
            &[
                "--source",
                "records",
                "--record-bytes",
                "500",
                "--only",
                "intact",
            ],
            args,
        ]
        .concat();
        torture(&dir, &args)
            .arg("--path")
            .arg(&data)
            .output()
            .unwrap()
    };
    let output = run(&["--most", "50KB"]);
    let text = printed(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("has 60 kB in 3 files, and at most 50 kB are copied"),
        "{text}"
    );
    let output = run(&["--most", "50KB", "--sample", "2"]);
    let text = printed(&output);
    assert!(
        output.status.success() && text.contains("2 files, 40 kB, copied to"),
        "{text}"
    );
    assert!(text.contains("exact: 80 samples"), "{text}");
}

#[test]
fn ctrl_c_ends_the_children_and_removes_the_copy() {
    let dir = Dir::new();
    // Long enough for a signal to come in the middle.
    let mut child = torture(&dir, &["--only", "header", "--places", "100000"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("the oracle begins", || {
        state(&dir.path("work")).contains(&"oracle".to_string())
    });
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::INT).unwrap();
    assert_eq!(ended(&mut child), Some(130));
    assert!(is_empty(&dir.path("work")));
}

/// Names of the entries of the copies' folders.
fn state(work: &Path) -> Vec<String> {
    let folders = std::fs::read_dir(work).into_iter().flatten().flatten();
    let names = folders.flat_map(|folder| {
        std::fs::read_dir(folder.path())
            .into_iter()
            .flatten()
            .flatten()
    });
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
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

// Outcomes that feedline should not produce, so the judge gets made-up ones.

fn case(promise: Promise, source: Source) -> Case {
    Case {
        promise,
        source,
        checked: false,
        header: false,
        unlisted: false,
        samples: 10,
    }
}

fn judged(case: Case, report: ChildReport) -> (Verdict, String) {
    let outcome = case.judge(&Ended {
        report: Some(report),
        signal: None,
        hang: false,
        stderr: String::new(),
    });
    (outcome.verdict, outcome.summary)
}

fn fault(phase: Phase, named: bool) -> Option<Fault> {
    let (path, offset) = if named {
        (Some("/d/a.tar".into()), Some(7))
    } else {
        (None, None)
    };
    Some(Fault {
        phase,
        text: "message".into(),
        kind: "truncated".into(),
        path,
        offset,
        sample: named.then_some(3),
    })
}

#[test]
fn broken_promises_are_reported_as_broken() {
    use Promise::{Checksum, Exact, Noticed, Refused, Survives};
    let wrong = || ChildReport {
        exact: 9,
        wrong: 1,
        ..ChildReport::default()
    };
    let all = || ChildReport {
        exact: 10,
        ..ChildReport::default()
    };
    let fewer = || ChildReport {
        exact: 9,
        missing: 1,
        ..ChildReport::default()
    };
    let bad = |unnamed| ChildReport {
        exact: 9,
        substituted: 1,
        bad: 1,
        unnamed,
        ..ChildReport::default()
    };
    let error = |phase, named| ChildReport {
        error: fault(phase, named),
        ..ChildReport::default()
    };
    let tar = Source::Tar;
    let images = Source::Images;
    let tfrecord = Source::Tfrecord;
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
    for (promise, source, report, verdict) in table {
        let case_text = format!("{promise:?} {report:?}");
        assert_eq!(
            judged(case(promise, source), report).0,
            verdict,
            "{case_text}"
        );
    }
    let checked = Case {
        checked: true,
        ..case(Checksum, images)
    };
    assert_eq!(judged(checked, wrong()).0, Verdict::Broken);
    let header = Case {
        header: true,
        ..case(Checksum, tar)
    };
    assert_eq!(
        judged(header, wrong()).0,
        Verdict::Broken,
        "a tar's headers have checksums"
    );
    for (hang, signal, word) in [
        (true, None, "HANG"),
        (false, Some(11), "CRASH: signal 11"),
        (false, None, "CRASH"),
    ] {
        let outcome = case(Survives, tar).judge(&Ended {
            report: None,
            signal,
            hang,
            stderr: String::new(),
        });
        assert!(
            outcome.verdict == Verdict::Broken && outcome.summary.starts_with(word),
            "{outcome:?}"
        );
    }
}

#[test]
fn a_flip_changes_one_bit_but_neither_times_nor_other_links() {
    let dir = Dir::new();
    let bytes = noise(9000, 1);
    for seed in 0..20 {
        let path = dir.write("a.bin", &bytes);
        let link = dir.path("link.bin");
        let _ = std::fs::remove_file(&link);
        std::fs::hard_link(&path, &link).unwrap();
        let modified = std::fs::metadata(&link).unwrap().modified().unwrap();
        let damage = Damage {
            kind: Kind::Flipped,
            when: When::Before,
            files: vec![link.clone()],
        };
        damage::inflict(&damage, Source::Records, seed).unwrap();
        let now = std::fs::read(&link).unwrap();
        let bits: u32 = bytes
            .iter()
            .zip(&now)
            .map(|(a, b)| (a ^ b).count_ones())
            .sum();
        assert_eq!((bits, now.len()), (1, bytes.len()));
        assert_eq!(
            std::fs::metadata(&link).unwrap().modified().unwrap(),
            modified
        );
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        std::fs::remove_file(&path).unwrap();
    }
}

/// The files copied for `--path`, or the error.
fn copied(dir: &Dir, path: &Path) -> Result<Vec<String>, String> {
    let args = [
        "torture",
        "--source",
        "records",
        "--record-bytes",
        "1",
        "--path",
        path.to_str().unwrap(),
    ];
    let args = <OnlySource as clap::Parser>::try_parse_from(args).unwrap();
    let stop = feedline::Stop::new();
    let copy = copy::Copy::make(&args.source, &dir.path("work"), 1000, None, &stop)
        .map_err(|error| error.to_string())?;
    copy.renew().unwrap();
    Ok(copy
        .files()
        .into_iter()
        .map(|path| {
            path.strip_prefix(copy.work().join("data"))
                .unwrap()
                .display()
                .to_string()
        })
        .collect())
}

#[derive(clap::Parser)]
struct OnlySource {
    #[command(flatten)]
    source: source::SourceArgs,
}

#[test]
fn a_path_selects_its_files_and_searches_no_other_folder() {
    let dir = Dir::new();
    for name in [
        "a.idx",
        "a.bin",
        "ab.bin",
        "b-0.tar",
        "b-1.tar",
        "deep/a.bin",
        "deep/b-2.tar",
    ] {
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
    for (path, why) in [
        ("missing", "No such file"),
        ("no/such/folder", "No such file"),
        ("c*.tar", "no files there"),
    ] {
        let path = dir.path(path);
        let error = copied(&dir, &path).unwrap_err();
        assert!(
            error.starts_with(&format!("{}: {why}", path.display())),
            "{error}"
        );
    }
}

#[test]
fn sizes_may_have_units() {
    let table = [
        ("2GB", Some(2_000_000_000)),
        ("1.5mb", Some(1_500_000)),
        ("7 kib", Some(7168)),
        ("107374182400", Some(100 << 30)),
    ];
    for (text, bytes) in table
        .into_iter()
        .chain([("GB", None), ("-1MB", None), ("2TBx", None)])
    {
        assert_eq!(source::size(text).ok(), bytes, "{text}");
    }
}
