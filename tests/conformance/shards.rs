//! A folder becomes shards: the same samples, the same bytes every time and after every kill, no
//! silent loss.

use crate::common::{Dir, assert_says, child, here, in_child, process, sweep};
use feedline::dataset::{Dataset, Tar, Verify};
use feedline::order::Draws;
use feedline::prepare::{Event, Finished, Format, Plan, Shards};
use feedline::{ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fixtures/images")
            .join(name),
    )
    .unwrap()
}

/// Three classes with `count` JPEGs each; every JPEG has its own comment, so no two are equal.
pub fn folder(dir: &Dir, count: usize) -> PathBuf {
    for class in 0..3 {
        for k in 0..count {
            let mut bytes = fixture(["420.jpg", "422.jpg", "444.jpg", "gray.jpg"][(class + k) % 4]);
            let number = (class * count + k) as u32;
            bytes.splice(
                2..2,
                [&[0xFF, 0xFE, 0, 6][..], &number.to_be_bytes()].concat(),
            );
            dir.write(&format!("in/class{class}/{k:04}.jpg"), &bytes);
        }
    }
    dir.path("in")
}

pub fn formats() -> Vec<Format> {
    vec![
        Format::Tar,
        #[cfg(feature = "parquet")]
        Format::Parquet,
    ]
}

pub fn write(shards: &Shards, from: &Path, to: &Path) -> Result<Finished> {
    shards.write(from, to, |_| ControlFlow::Continue(()))
}

/// Every file of the output. Indexes contain modification times: they have no bytes here.
pub fn content(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
        {
            let name = path
                .strip_prefix(dir)
                .unwrap()
                .to_str()
                .unwrap()
                .to_string();
            match path.is_dir() {
                true => folders.push(path),
                false if name.ends_with(".fdx") => drop(out.insert(name, Vec::new())),
                false => drop(out.insert(name, std::fs::read(&path).unwrap())),
            }
        }
    }
    out
}

/// Names of the output, without the indexes beside shards.
fn names(dir: &Path) -> Vec<String> {
    content(dir)
        .into_keys()
        .filter(|name| !name.contains(".tar."))
        .collect()
}

/// Members of a tar, read without any library: name and bytes.
fn members(path: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let mut at = 0;
    let mut out = Vec::new();
    while bytes[at] != 0 {
        let header = &bytes[at..at + 512];
        let text = |range: std::ops::Range<usize>| {
            let field = header[range].split(|byte| *byte == 0).next().unwrap();
            String::from_utf8(field.to_vec())
                .unwrap()
                .trim()
                .to_string()
        };
        let number = |range| usize::from_str_radix(&text(range), 8).unwrap();
        let sum: usize = header
            .iter()
            .enumerate()
            .map(|(k, b)| {
                if (148..156).contains(&k) {
                    32
                } else {
                    usize::from(*b)
                }
            })
            .sum();
        assert_eq!(number(148..156), sum, "checksum");
        assert_eq!(
            (number(108..116), number(116..124), number(136..148)),
            (0, 0, 0),
            "owner and time"
        );
        assert_eq!(&header[257..265], b"ustar\x0000");
        let size = number(124..136);
        out.push((text(0..100), bytes[at + 512..at + 512 + size].to_vec()));
        at += 512 + size.next_multiple_of(512);
    }
    assert!(
        bytes.len() == at + 1024 && bytes[at..].iter().all(|byte| *byte == 0),
        "two empty blocks end a tar"
    );
    out
}

/// All samples of all tar shards: key, image, label.
fn samples(dir: &Path) -> Vec<(String, Vec<u8>, String)> {
    let mut out = Vec::new();
    for name in names(dir).iter().filter(|name| name.ends_with(".tar")) {
        for pair in members(&dir.join(name)).chunks(2) {
            let [(image, bytes), (class, label)] = pair else {
                panic!("{pair:?}")
            };
            let key = image.strip_suffix(".jpg").unwrap();
            assert_eq!(class, &format!("{key}.cls"));
            out.push((
                key.to_string(),
                bytes.clone(),
                String::from_utf8(label.clone()).unwrap(),
            ));
        }
    }
    out
}

/// Number of bytes that were inserted, in one place, into a JPEG; its decoded pixels are the same.
#[track_caller]
fn inserted(input: &[u8], output: &[u8]) -> usize {
    let more = output.len() - input.len();
    let same = input
        .iter()
        .zip(output)
        .take_while(|(one, other)| one == other)
        .count();
    assert!(
        input[same..] == output[same + more..],
        "bytes of the picture changed"
    );
    let pixels = |bytes| {
        image::load_from_memory_with_format(bytes, image::ImageFormat::Jpeg)
            .unwrap()
            .into_rgb8()
    };
    assert!(pixels(input) == pixels(output), "pixels changed");
    more
}

#[test]
fn the_tars_hold_every_picture_once_in_folder_order() {
    let dir = Dir::new();
    let from = folder(&dir, 7);
    let to = dir.path("out");
    let finished = write(&Shards::new(Format::Tar).samples_per_shard(5), &from, &to).unwrap();
    assert_eq!(
        (
            finished.samples,
            finished.with_points,
            finished.tasks,
            finished.damaged
        ),
        (21, 21, 5, 0)
    );
    let shards: Vec<_> = (0..5).map(|k| format!("shard-{k:06}.tar")).collect();
    assert_eq!(
        names(&to),
        [
            &["index.fdx".to_string(), "manifest.tsv".to_string()],
            &shards[..]
        ]
        .concat()
    );
    let samples = samples(&to);
    assert_eq!(samples.len(), 21);
    let manifest = std::fs::read_to_string(to.join("manifest.tsv")).unwrap();
    let mut lines = manifest.lines().skip(1);
    let mut sums = (0, 0);
    for (k, (key, bytes, label)) in samples.iter().enumerate() {
        let class = k / 7;
        let number = k % 7;
        let source = format!("class{class}/{number:04}.jpg");
        let input = std::fs::read(from.join(&source)).unwrap();
        assert_eq!((key, label), (&format!("{k:08}"), &class.to_string()));
        let more = inserted(&input, bytes);
        assert!(more > 0, "{source} has no seek points");
        // Five shards of 21 samples: the last has one more.
        let shard = format!("shard-{:06}.tar", (k / 4).min(4));
        let before = input.len().to_string();
        let after = bytes.len().to_string();
        let line: Vec<_> = lines.next().unwrap().split('\t').collect();
        let expected = [key, &*shard, label, &*source, line[4], &*before, &*after];
        assert_eq!(line, expected);
        assert!(line[4].starts_with("seek points of "), "{line:?}");
        sums = (sums.0 + input.len() as u64, sums.1 + bytes.len() as u64);
    }
    assert_eq!((lines.next(), finished.bytes), (None, sums));
    let tar = Tar::builder()
        .index_file(finished.index.unwrap())
        .open(&to)
        .unwrap();
    assert_eq!(
        (tar.shards_scanned(), tar.len()),
        (0, 21),
        "the index of all shards"
    );
}

#[test]
fn shards_are_as_many_as_their_limit_needs() {
    let dir = Dir::new();
    let from = folder(&dir, 4);
    let bytes: u64 = content(&from)
        .values()
        .map(|bytes| bytes.len() as u64)
        .sum();
    let new = || Shards::new(Format::Tar);
    let cases = [
        (new(), 1),
        (new().samples_per_shard(1), 12),
        (new().samples_per_shard(5), 3),
        (new().samples_per_shard(12), 1),
        (new().bytes_per_shard(bytes), 1),
        (new().bytes_per_shard(bytes - 1), 2),
        (new().bytes_per_shard(bytes / 4 + 1), 4),
        (new().bytes_per_shard(1), 12),
    ];
    for (number, (shards, count)) in cases.into_iter().enumerate() {
        let to = dir.path(&number.to_string());
        assert_eq!(
            write(&shards, &from, &to).unwrap().tasks,
            count,
            "{shards:?}"
        );
        assert_eq!(names(&to).len() as u64, 2 + count, "{shards:?}");
    }
    for shards in [new().samples_per_shard(0), new().bytes_per_shard(0)] {
        assert_eq!(
            write(&shards, &from, &dir.path("none")).unwrap_err().kind(),
            ErrorKind::Config
        );
        assert!(!dir.path("none").exists());
    }
}

#[test]
fn shards_do_not_depend_on_the_number_of_workers() {
    let dir = Dir::new();
    let from = folder(&dir, 100);
    let run = |name: &str, shards: Shards, workers: usize| {
        write(
            &shards.samples_per_shard(60).workers(workers),
            &from,
            &dir.path(name),
        )
        .unwrap();
        content(&dir.path(name))
    };
    let new = || Shards::new(Format::Tar);
    let one = run("one", new().shuffle(3), 1);
    assert!(
        one == run("three", new().shuffle(3), 3),
        "the number of workers shows"
    );
    assert!(one != run("plain", new(), 2) && one != run("other", new().shuffle(4), 2));
    let sorted = |name: &str| {
        let mut all: Vec<_> = samples(&dir.path(name))
            .into_iter()
            .map(|(_, bytes, label)| (bytes, label))
            .collect();
        all.sort();
        all
    };
    assert!(
        sorted("one") == sorted("plain") && sorted("one") == sorted("other"),
        "a shuffle loses or doubles samples"
    );
    // Well mixed: every stretch has all classes.
    assert!(
        samples(&dir.path("one"))
            .chunks(30)
            .all(|part| part.iter().any(|(.., label)| label == "2"))
    );
}

#[test]
fn a_picture_without_seek_points_is_copied() {
    let dir = Dir::new();
    let inputs = [
        ("in/a.jpg", "420.jpg", "jpg"),
        ("in/b.jpeg", "progressive.jpg", "jpg"),
        ("in/c.png", "rgb.png", "png"),
        ("in/d.JFIF", "restart.jpg", "jpg"),
        ("in/e.jpg", "rgba.png", "jpg"),
    ];
    inputs
        .iter()
        .for_each(|(name, source, _)| drop(dir.write(name, &fixture(source))));
    dir.write("in/notes.txt", b"x");
    let from = dir.path("in");
    for points in [true, false] {
        let to = dir.path(&format!("out-{points}"));
        let finished = write(&Shards::new(Format::Tar).seek_points(points), &from, &to).unwrap();
        let reasons = [
            ("not a JPEG", 2),
            ("restart markers", 1),
            ("several scans", 1),
        ];
        let reasons = reasons
            .iter()
            .filter(|_| points)
            .map(|(reason, count)| (reason.to_string(), *count))
            .collect();
        assert_eq!(
            (finished.with_points, finished.unchanged.clone()),
            (u64::from(points), reasons)
        );
        let text = finished.to_string();
        assert_eq!(text.contains("unchanged   2: not a JPEG"), points, "{text}");
        assert!(text.ends_with("left out    1: .txt, not inputs"), "{text}");
        // A flat folder has no labels. The ending is the original one, but the same for all JPEGs.
        let found = members(&to.join("shard-000000.tar"));
        assert_eq!(found.len(), inputs.len());
        for (k, ((name, bytes), (_, source, ending))) in found.iter().zip(inputs).enumerate() {
            assert_eq!(*name, format!("{k:08}.{ending}"));
            match points && k == 0 {
                true => assert!(inserted(&fixture(source), bytes) > 0),
                false => assert!(*bytes == fixture(source), "{name}"),
            }
        }
        // A second pass finds the points of the first.
        if points {
            let again = Dir::new();
            again.write("in/a.jpg", &found[0].1);
            let finished = write(
                &Shards::new(Format::Tar),
                &again.path("in"),
                &again.path("out"),
            )
            .unwrap();
            assert_eq!((finished.with_points, finished.unchanged.len()), (0, 1));
            assert!(members(&again.path("out/shard-000000.tar"))[0].1 == found[0].1);
        }
    }
}

#[test]
fn a_damaged_picture_ends_the_work_or_is_in_the_ledger() {
    let dir = Dir::new();
    let from = folder(&dir, 3);
    let cut = fixture("420.jpg")[..800].to_vec();
    dir.write("in/class1/0001.jpg", &cut);
    dir.write("in/class2/0000.jpg", b"");
    dir.write("in/class2/tab\t\\ \u{e9}.jpg", &cut);
    let shards = Shards::new(Format::Tar).samples_per_shard(4);
    let error = write(&shards, &from, &dir.path("refused")).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated),
        "{error}"
    );
    assert!(
        error
            .site()
            .path
            .as_ref()
            .unwrap()
            .ends_with("class1/0001.jpg"),
        "{error}"
    );
    assert_eq!(error.site().sample, Some(4), "{error}");
    assert_says(&error, "`skip_damaged(true)` leaves damaged pictures out");
    let left = ["plan.fdp", "shard-000000.tar", "tasks/000000.tsv"];
    assert_eq!(
        names(&dir.path("refused")),
        left,
        "whole shards stay, and nothing of the half one"
    );
    let to = dir.path("skipped");
    let skipping = shards.clone().skip_damaged(true);
    let finished = write(&skipping, &from, &to).unwrap();
    assert_eq!(
        (finished.damaged, finished.with_points, finished.samples),
        (3, 7, 7)
    );
    // The refused one goes on, and other files of the folder do not matter.
    dir.write("in/class1/notes.txt", b"x");
    assert_eq!(
        write(&skipping, &from, &dir.path("refused"))
            .unwrap()
            .damaged,
        3
    );
    assert!(content(&dir.path("refused")) == content(&to));
    // The other way round, nothing is left out in silence.
    let stop = |event: Event<'_>| match event {
        Event::Done(1) => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    assert_eq!(
        skipping
            .write(&from, dir.path("half"), stop)
            .unwrap_err()
            .kind(),
        ErrorKind::Cancelled
    );
    std::fs::remove_file(from.join("class2/0000.jpg")).unwrap();
    let error = write(&shards, &from, &dir.path("half")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
    dir.write("in/class2/0000.jpg", b"");
    assert_says(&finished, "damaged     3, listed in damaged.tsv");
    let ledger = std::fs::read_to_string(to.join("damaged.tsv")).unwrap();
    let lines: Vec<&str> = ledger.lines().skip(1).collect();
    assert_eq!(lines.len(), 3, "{ledger}");
    assert!(
        lines[0].starts_with("class1/0001.jpg\tdecode: "),
        "{ledger}"
    );
    assert!(
        lines[1].starts_with("class2/0000.jpg\tdecode: empty"),
        "{ledger}"
    );
    assert!(
        lines[2].starts_with("class2/tab\\x09\\x5c \u{e9}.jpg\t"),
        "{ledger}"
    );
    let keys: Vec<_> = samples(&to)
        .into_iter()
        .map(|(key, ..)| key.parse::<u64>().unwrap())
        .collect();
    assert_eq!(
        keys,
        [0, 1, 2, 3, 4, 6, 7],
        "keys begin at the first position of each shard, 0, 3 and 6"
    );
    let over = write(
        &Shards::new(Format::Tar).bytes_max(1200).skip_damaged(true),
        &from,
        &dir.path("small"),
    )
    .unwrap();
    assert!(
        over.damaged > 3,
        "a picture beyond the limit counts as damaged"
    );
    let dir = Dir::new();
    let shards = Shards::new(Format::Tar).skip_damaged(true);
    dir.write("in/a.jpg", b"");
    assert_eq!(
        write(&shards, &dir.path("in"), &dir.path("out"))
            .unwrap_err()
            .kind(),
        ErrorKind::Empty
    );
}

#[test]
fn a_stopped_write_goes_on_where_it_was() {
    let dir = Dir::new();
    let from = folder(&dir, 200);
    let to = dir.path("out");
    for format in formats() {
        let shards = Shards::new(format).samples_per_shard(100).shuffle(1);
        let mut seen = Vec::new();
        let error = shards.write(&from, &to, |event| {
            if let Event::Inputs { task, done, total } = event {
                seen.push((task, done, total));
            }
            if seen.len() == 2 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let error = error.unwrap_err();
        assert_eq!(
            (error.kind(), seen),
            (ErrorKind::Cancelled, vec![(0, 100, 600), (1, 200, 600)]),
            "{error}"
        );
        assert_says(&error, "stopped after 2 of 6 shards");
        assert!(content(&to).keys().all(|name| name != "manifest.tsv"));
        let mut done = Vec::new();
        let mut skipped = Vec::new();
        let finished = shards.write(&from, &to, |event| {
            match event {
                Event::Done(task) => done.push(task),
                Event::Skipped(task) => skipped.push(task),
                _ => {}
            }
            ControlFlow::Continue(())
        });
        assert_eq!(
            (finished.unwrap().samples, done, skipped),
            (600, vec![2, 3, 4, 5], vec![0, 1])
        );
        write(&shards, &from, &dir.path("at-once")).unwrap();
        assert!(content(&to) == content(&dir.path("at-once")), "{format:?}");
        [&to, &dir.path("at-once")]
            .iter()
            .for_each(|dir| std::fs::remove_dir_all(dir).unwrap());
    }
}

/// What is in the way of a write, or in the wrong place; and the words of the error.
#[test]
fn a_folder_of_something_else_is_refused_and_kept() {
    let dir = Dir::new();
    let from = folder(&dir, 2);
    let to = dir.path("out");
    let shards = Shards::new(Format::Tar).samples_per_shard(2);
    let stopped = |shards: &Shards| {
        drop(
            shards
                .write(&from, &to, |_| ControlFlow::Break(()))
                .unwrap_err(),
        )
    };
    let planned = || stopped(&shards);
    let other = dir.write("in2/a.jpg", &fixture("420.jpg"));
    let new = from.join("class0/new.jpg");
    type Case<'a> = (&'a str, Box<dyn Fn() + 'a>, Shards, PathBuf, ErrorKind);
    let case = |words, before: Box<dyn Fn()>, kind| -> Case<'_> {
        (words, before, shards.clone(), from.clone(), kind)
    };
    let mut cases: Vec<Case<'_>> = vec![
        case(
            "not empty",
            Box::new(|| drop(dir.write("out/keep.me", b"mine"))),
            ErrorKind::Config,
        ),
        case(
            "not empty",
            Box::new(|| drop(dir.write("out/shard-000000.tar", b"mine"))),
            ErrorKind::Config,
        ),
        case(
            "finished output",
            Box::new(|| drop(write(&shards, &from, &to).unwrap())),
            ErrorKind::Config,
        ),
        case(
            "other settings",
            Box::new(|| drop(Plan::of_pictures(&from, "", &to, 3).unwrap())),
            ErrorKind::Config,
        ),
        (
            "another input folder",
            Box::new(planned),
            shards.clone(),
            dir.path("in2"),
            ErrorKind::Config,
        ),
        case(
            "added, removed or modified",
            Box::new(|| {
                planned();
                std::fs::copy(&other, &new).unwrap();
            }),
            ErrorKind::Changed,
        ),
        case(
            "added, removed or modified",
            Box::new(|| {
                planned();
                std::fs::File::options()
                    .append(true)
                    .open(&new)
                    .unwrap()
                    .set_modified(std::time::UNIX_EPOCH)
                    .unwrap();
            }),
            ErrorKind::Changed,
        ),
        case(
            "added, removed or modified",
            Box::new(|| {
                planned();
                std::fs::remove_file(&new).unwrap();
            }),
            ErrorKind::Changed,
        ),
        case(
            "damaged",
            Box::new(|| {
                planned();
                let mut plan = std::fs::read(to.join("plan.fdp")).unwrap();
                let end = plan.len() - 40;
                plan[end] ^= 1;
                std::fs::write(to.join("plan.fdp"), plan).unwrap();
            }),
            ErrorKind::Decode,
        ),
    ];
    let settings = [shards.clone().shuffle(1), shards.clone().seek_points(false)];
    let sizes = [
        shards.clone().samples_per_shard(3),
        shards.clone().bytes_max(1 << 20),
    ];
    for other in settings.into_iter().chain(sizes) {
        cases.push((
            "other settings",
            Box::new(planned),
            other,
            from.clone(),
            ErrorKind::Config,
        ));
    }
    for (words, before, shards, from, kind) in cases {
        before();
        let kept = content(&to);
        let error = write(&shards, &from, &to).unwrap_err();
        assert_eq!(error.kind(), kind, "{words}: {error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert!(content(&to) == kept, "{words}: the folder changed");
        std::fs::remove_dir_all(&to).unwrap();
    }
    std::os::unix::fs::symlink(&from, dir.path("link")).unwrap();
    for to in [
        from.clone(),
        from.join("new/out"),
        dir.path("link/out"),
        dir.path(""),
    ] {
        assert!(
            write(&shards, &from, &to)
                .unwrap_err()
                .to_string()
                .contains("overlap")
        );
    }
    assert_eq!(
        std::fs::read_dir(&from).unwrap().count(),
        3,
        "a refused write leaves no folder in its input"
    );
    for to in [
        Path::new("/proc/feedline"),
        Path::new("s3://bucket/out"),
        &dir.write("file", b"x"),
    ] {
        let error = write(&shards, &from, to).unwrap_err();
        assert!(error.to_string().contains(to.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_second_write_at_the_same_time_is_refused() {
    let dir = Dir::new();
    let from = folder(&dir, 2);
    let to = dir.path("out");
    let shards = Shards::new(Format::Tar);
    let mut refused = None;
    let first = shards.write(&from, &to, |event| {
        if let Event::Inputs { .. } = event {
            refused = Some(write(&shards, &from, &to).unwrap_err());
        }
        ControlFlow::Continue(())
    });
    let refused = refused.unwrap();
    assert!(
        refused.kind() == ErrorKind::Config
            && refused.to_string().contains("another process writes"),
        "{refused}"
    );
    assert_eq!(first.unwrap().samples, 6);
}

#[test]
fn a_picture_that_changes_meanwhile_is_not_damage() {
    let dir = Dir::new();
    let from = folder(&dir, 200).canonicalize().unwrap();
    // The last window is made only after the first two were written.
    let victim = from.join("class2/0199.jpg");
    let result =
        Shards::new(Format::Tar)
            .skip_damaged(true)
            .write(&from, dir.path("out"), |event| {
                if matches!(event, Event::Inputs { done: 256, .. }) {
                    std::fs::write(&victim, b"another length").unwrap();
                }
                ControlFlow::Continue(())
            });
    let error = result.unwrap_err();
    assert_eq!(
        (error.kind(), error.site().path.as_deref()),
        (ErrorKind::Changed, Some(&*victim)),
        "{error}"
    );
}

/// The write that is killed.
fn killed_shards() -> Shards {
    Shards::new(Format::Tar)
        .samples_per_shard(9)
        .shuffle(7)
        .skip_damaged(true)
}

/// Killed 5 times at random moments by default, and 100 times with `FEEDLINE_SWEEP=ci`; then the
/// same call goes on.
#[test]
fn a_write_that_is_killed_at_any_moment_goes_on_to_the_same_bytes() {
    if let Some(dir) = in_child() {
        write(&killed_shards(), &dir.join("in"), &dir.join("out")).unwrap();
        return;
    }
    let dir = Dir::new();
    let from = folder(&dir, 60);
    let to = dir.path("out");
    dir.write("in/class1/0033.jpg", b"\xFF\xD8\xFFdamage");
    let right = |content: &BTreeMap<String, Vec<u8>>| {
        content.contains_key("damaged.tsv")
            && content.contains_key("index.fdx")
            && content.len() == 2 * 20 + 3
    };
    kills(&here!(), &dir, right, || {
        match write(&killed_shards(), &from, &to) {
            Ok(finished) => assert_eq!((finished.samples, finished.damaged), (179, 1)),
            Err(error) => assert!(error.to_string().contains("finished output"), "{error}"),
        }
        let tar = Tar::builder()
            .index_file(to.join("index.fdx"))
            .open(&to)
            .unwrap();
        assert_eq!(
            (tar.shards_scanned(), tar.len()),
            (0, 179),
            "the index is of these shards"
        );
        let (verified, damage) = Verify::new()
            .workers(1)
            .run(&tar, |_| ControlFlow::Continue(()))
            .unwrap();
        assert_eq!(
            (verified.samples, damage.len()),
            (179, 0),
            "by the checksums of the index"
        );
    });
}

/// Runs a test in a child that writes the folder `out`, kills it at random moments, and lets `again`
/// go on: the bytes are those of a whole run.
pub fn kills(
    test: &str,
    dir: &Dir,
    is_right: impl Fn(&BTreeMap<String, Vec<u8>>) -> bool,
    mut again: impl FnMut(),
) {
    let to = dir.path("out");
    let begun = Instant::now();
    child::run(process(test, dir.path("")));
    let time = begun.elapsed();
    let right = content(&to);
    assert!(is_right(&right), "{:?}", right.keys());
    let mut draws = Draws::new(1, 0, 0, "kills");
    let mut kills = 0;
    let mut half = 0;
    while kills < sweep::size(5, 100, 1000) {
        std::fs::remove_dir_all(&to).unwrap();
        // Up to three kills of one write.
        for _ in 0..1 + draws.below(3) {
            let mut child = process(test, dir.path(""))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_nanos(draws.below(time.as_nanos() as u64)));
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            half += u32::from(to.join("plan.fdp").exists());
            if to.join("manifest.tsv").exists() && !to.join("plan.fdp").exists() {
                break;
            }
        }
        again();
        assert!(content(&to) == right, "kill {kills}");
    }
    println!("{kills} kills, {half} of them of a write at work");
}

/// A disk that takes no more: the error names it, nothing half stays, and once there is room the
/// same call goes on.
#[test]
fn a_write_to_a_full_disk_goes_on_once_there_is_room() {
    if let Some(dir) = in_child() {
        let error = write(&killed_shards(), &dir.join("in"), &dir.join("out")).unwrap_err();
        println!("@{error}");
        let names = names(&dir.join("out"));
        assert!(
            names.contains(&"plan.fdp".into()) && !names.contains(&"manifest.tsv".into()),
            "{names:?}"
        );
        assert!(
            names.iter().all(|name| !name.ends_with(".tmp")),
            "{names:?}"
        );
        // The file system goes with this process.
        Command::new("cp")
            .args(["-a", "out", "kept"])
            .current_dir(&dir)
            .status()
            .unwrap();
        return;
    }
    let dir = Dir::new();
    let from = folder(&dir, 60);
    write(&killed_shards(), &from, &dir.path("right")).unwrap();
    let mounted = "exec unshare -m sh -c 'mount -t tmpfs -o size=200k none out && exec \"$0\" \"$@\"' \"$0\" \"$@\"";
    let cases = [
        (
            "trap '' XFSZ; ulimit -f 20",
            "cannot write the output",
            "shard-00000",
        ),
        (mounted, "the disk is full", "shard-00000"),
    ];
    for (shell, words, place) in cases {
        let root = Command::new("unshare")
            .args(["-m", "true"])
            .status()
            .is_ok_and(|status| status.success());
        if shell == mounted && !root {
            println!("no file system can be mounted here: a full disk is not tested");
            continue;
        }
        std::fs::create_dir(dir.path("out")).unwrap();
        let said = child::run(child::child(&here!(), &dir.path(""), shell));
        assert!(said.contains(words) && said.contains(place), "{said}");
        std::fs::remove_dir_all(dir.path("out")).unwrap();
        std::fs::rename(dir.path("kept"), dir.path("out")).unwrap();
        assert_eq!(
            write(&killed_shards(), &from, &dir.path("out"))
                .unwrap()
                .samples,
            180
        );
        assert!(content(&dir.path("out")) == content(&dir.path("right")));
        std::fs::remove_dir_all(dir.path("out")).unwrap();
    }
}

#[cfg(feature = "parquet")]
mod parquet_shards {
    use super::*;
    use arrow_array::cast::AsArray;
    use arrow_array::types::Int64Type;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
    use parquet::basic::{Compression, Encoding};
    use parquet::file::metadata::ParquetMetaDataReader;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use std::fs::File;

    fn read(path: &Path) -> Vec<(Vec<u8>, i64)> {
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap())
            .unwrap()
            .build()
            .unwrap();
        let mut out = Vec::new();
        for batch in reader {
            let batch = batch.unwrap();
            let images = batch.column(0).as_binary::<i32>();
            let labels = batch.column(1).as_primitive::<Int64Type>();
            out.extend(
                images
                    .iter()
                    .zip(labels.iter())
                    .map(|(image, label)| (image.unwrap().to_vec(), label.unwrap())),
            );
        }
        out
    }

    #[test]
    fn parquet_shards_hold_the_samples_of_the_tars_in_plain_pages() {
        let dir = Dir::new();
        let from = folder(&dir, 250);
        write(
            &Shards::new(Format::Tar).shuffle(5),
            &from,
            &dir.path("tar"),
        )
        .unwrap();
        write(
            &Shards::new(Format::Parquet).shuffle(5),
            &from,
            &dir.path("parquet"),
        )
        .unwrap();
        assert_eq!(
            names(&dir.path("parquet")),
            ["manifest.tsv", "shard-000000.parquet"]
        );
        let rows = read(&dir.path("parquet/shard-000000.parquet"));
        let tar = samples(&dir.path("tar"));
        assert_eq!(rows.len(), 750);
        assert!(
            rows.iter()
                .zip(&tar)
                .all(|(row, (_, image, label))| row.0 == *image && row.1.to_string() == *label)
        );
        let file = File::open(dir.path("parquet/shard-000000.parquet")).unwrap();
        let metadata = ParquetMetaDataReader::new()
            .parse_and_finish(&file)
            .unwrap();
        let rows: Vec<i64> = metadata
            .row_groups()
            .iter()
            .map(|group| group.num_rows())
            .collect();
        assert_eq!(rows, [512, 238]);
        for column in metadata
            .row_groups()
            .iter()
            .flat_map(|group| group.columns())
        {
            assert_eq!(column.compression(), Compression::UNCOMPRESSED);
            assert!(
                column.dictionary_page_offset().is_none() && column.offset_index_offset().is_some()
            );
            let encodings: Vec<Encoding> = column.encodings().collect();
            assert!(
                !encodings.contains(&Encoding::RLE_DICTIONARY)
                    && encodings.contains(&Encoding::PLAIN)
            );
        }
    }

    #[test]
    fn pages_hold_about_a_mebibyte_and_a_flat_folder_has_no_label() {
        let dir = Dir::new();
        let mut bytes = fixture("420.jpg");
        bytes.splice(2..2, [&[0xFF, 0xFE, 0xFF, 0xFF][..], &[7; 65533]].concat());
        (0..70).for_each(|k| drop(dir.write(&format!("in/{k:02}.jpg"), &bytes)));
        write(
            &Shards::new(Format::Parquet),
            &dir.path("in"),
            &dir.path("out"),
        )
        .unwrap();
        let open = || File::open(dir.path("out/shard-000000.parquet")).unwrap();
        let group = SerializedFileReader::new(open()).unwrap();
        let group = group.get_row_group(0).unwrap();
        let pages: Vec<_> = group
            .get_column_page_reader(0)
            .unwrap()
            .map(|page| page.unwrap().num_values())
            .collect();
        assert_eq!(pages, [16, 16, 16, 16, 6]);
        let schema = ParquetRecordBatchReaderBuilder::try_new(open())
            .unwrap()
            .schema()
            .clone();
        assert_eq!(
            schema
                .fields()
                .iter()
                .map(|field| field.name().as_str())
                .collect::<Vec<_>>(),
            ["image"]
        );
    }
}
