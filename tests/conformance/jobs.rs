//! A plan's tasks in any order, by any processes: the bytes of one process, or a clear error.

use crate::common::{Dir, assert_says, must_fail, must_say};
use crate::shards::{content, fixture, folder, formats, write};
use feedline::ErrorKind::{Changed, Config, Decode, NotFound, Truncated};
use feedline::dataset::{Dataset, DatasetExt, Images, Tar, Verified, Verify};
use feedline::prepare::{Check, Event, Format, Plan, Ran, Shards, Tasks};
use feedline::{Error, Result, Stop};
use proptest::prelude::*;
use std::ops::ControlFlow;

fn run(plan: &Plan, tasks: &Tasks) -> Result<Ran> {
    plan.run(tasks, 1, &Stop::new(), |_| {})
}

#[test]
fn any_split_among_processes_gives_the_bytes_of_one() {
    let dir = Dir::new();
    let from = folder(&dir, 30);
    for (format, shuffle) in formats()
        .into_iter()
        .flat_map(|format| [(format, false), (format, true)])
    {
        let shards = Shards::new(format);
        let shards = if shuffle { shards.shuffle(7) } else { shards };
        let one = dir.path(&format!("one-{format:?}-{shuffle}"));
        let plan = shards.plan(&from, &one, 7).unwrap();
        assert_eq!((plan.tasks(), plan.inputs()), (7, 90));
        run(&plan, &Tasks::all()).unwrap();
        assert_eq!(plan.finish(Check::Bytes).unwrap().samples, 90);
        for parts in [2, 3, 10] {
            let many = dir.path(&format!("many-{format:?}-{shuffle}-{parts}"));
            let plan = shards.plan(&from, &many, 7).unwrap();
            for part in (0..parts).rev() {
                let workers = part as usize % 3 + 1;
                let tasks = Tasks::part(part, parts).unwrap();
                Plan::open(&many)
                    .unwrap()
                    .run(&tasks, workers, &Stop::new(), |_| {})
                    .unwrap();
            }
            plan.finish(Check::Bytes).unwrap();
            assert!(
                content(&one) == content(&many),
                "{format:?}, shuffle {shuffle}, {parts} parts"
            );
        }
    }
}

#[test]
fn write_goes_on_with_a_plan_and_leaves_what_finish_does() {
    let dir = Dir::new();
    let from = folder(&dir, 30);
    for format in formats() {
        let shards = Shards::new(format).shuffle(3);
        let call = dir.path(&format!("call-{format:?}"));
        let job = dir.path(&format!("job-{format:?}"));
        for to in [&call, &job] {
            let plan = shards.plan(&from, to, 6).unwrap();
            run(&plan, &Tasks::list("1,4").unwrap()).unwrap();
        }
        write(&shards.clone().samples_per_shard(15), &from, &call).unwrap();
        let plan = Plan::open(&job).unwrap();
        run(&plan, &Tasks::all()).unwrap();
        plan.finish(Check::Bytes).unwrap();
        let mut expected = content(&job);
        expected.retain(|name, _| name != "plan.fdp" && !name.starts_with("tasks/"));
        assert!(content(&call) == expected);
    }
}

#[test]
fn finish_names_the_missing_tasks_and_merges_nothing() {
    let dir = Dir::new();
    let plan = Shards::new(Format::Tar)
        .plan(folder(&dir, 10), dir.path("out"), 10)
        .unwrap();
    run(&plan, &Tasks::list("0,2-4,9").unwrap()).unwrap();
    let finished = plan.finish(Check::Bytes).unwrap();
    assert_eq!(finished.missing_list(), "1,5-8");
    assert!(
        finished.to_string().ends_with("missing     --array=1,5-8"),
        "{finished}"
    );
    assert!(!dir.path("out/manifest.tsv").exists() && !dir.path("out/index.fdx").exists());
    let ran = run(&plan, &Tasks::list(&finished.missing_list()).unwrap()).unwrap();
    assert_eq!((ran.done, ran.skipped, ran.failed), (5, 0, 0));
    let finished = plan.finish(Check::Bytes).unwrap();
    assert_eq!((finished.missing.len(), finished.samples), (0, 30));
    let manifest = std::fs::read_to_string(dir.path("out/manifest.tsv")).unwrap();
    assert_eq!(manifest.lines().count(), 31);
    let again = plan.finish(Check::Bytes).unwrap();
    assert_eq!(
        (again.samples, again.missing.len()),
        (30, 0),
        "a second call does the same"
    );
}

#[test]
fn whole_output_is_skipped_and_damaged_output_made_again() {
    let dir = Dir::new();
    let plan = Shards::new(Format::Tar)
        .plan(folder(&dir, 10), dir.path("out"), 5)
        .unwrap();
    run(&plan, &Tasks::all()).unwrap();
    let right = content(&dir.path("out"));
    let shard = |number| dir.path(&format!("out/shard-{number:06}.tar"));
    let mut bytes = std::fs::read(shard(1)).unwrap();
    bytes[700] ^= 1;
    std::fs::write(shard(1), bytes).unwrap();
    std::fs::remove_file(shard(2)).unwrap();
    std::fs::write(dir.path("out/tasks/000003.tsv"), "w\tcut").unwrap();
    let mut edited = std::fs::read(dir.path("out/tasks/000000.tsv")).unwrap();
    edited[10] ^= 1;
    std::fs::write(dir.path("out/tasks/000000.tsv"), edited).unwrap();
    std::fs::remove_file(dir.path("out/tasks/000004.tsv")).unwrap();
    assert_eq!(plan.finish(Check::Bytes).unwrap().missing_list(), "0-4");
    assert_eq!(
        plan.finish(Check::Lengths).unwrap().missing_list(),
        "0,2-4",
        "another bit has no other length"
    );
    let mut again = Vec::new();
    let ran = plan
        .run(&Tasks::all(), 1, &Stop::new(), |event| {
            if let Event::Again(task) = event {
                again.push(task);
            }
        })
        .unwrap();
    assert_eq!((ran.done, ran.skipped), (5, 0));
    assert_eq!(
        again,
        [0, 1, 2, 3],
        "the fourth has no record that could be wrong"
    );
    assert!(content(&dir.path("out")) == right);
    assert_eq!(run(&plan, &Tasks::all()).unwrap().skipped, 5);
}

#[test]
fn a_file_of_somebody_else_is_kept_and_named() {
    let dir = Dir::new();
    let plan = Shards::new(Format::Tar)
        .plan(folder(&dir, 10), dir.path("out"), 5)
        .unwrap();
    dir.write("out/shard-000002.tar", b"precious");
    let error = run(&plan, &Tasks::all()).unwrap_err();
    assert_eq!(error.kind(), Config, "{error}");
    assert!(
        error
            .site()
            .path
            .as_ref()
            .unwrap()
            .ends_with("shard-000002.tar"),
        "{error}"
    );
    assert_eq!(
        std::fs::read(dir.path("out/shard-000002.tar")).unwrap(),
        b"precious"
    );
    std::fs::rename(dir.path("out/shard-000002.tar"), dir.path("out/extra.tar")).unwrap();
    run(&plan, &Tasks::all()).unwrap();
    for name in ["extra.tar", "shard-000005.tar", "shard-2.tar"] {
        let path = dir.path("out").join(name);
        std::fs::rename(dir.path("out/extra.tar"), &path).unwrap();
        let error = plan.finish(Check::Bytes).unwrap_err();
        assert_eq!(
            (error.kind(), error.site().path.as_deref()),
            (Config, Some(&*path)),
            "{error}"
        );
        std::fs::rename(&path, dir.path("out/extra.tar")).unwrap();
    }
    std::fs::remove_file(dir.path("out/extra.tar")).unwrap();
    let leftovers = [
        "out/.shard-000001.tar.77.0.tmp",
        "out/tasks/.000003.tsv.77.12.tmp",
        "out/.names.1.2.tmp",
    ];
    let others = [
        "out/.mine.tmp",
        "out/.notes.partial",
        "out/tasks/.x.1.2.tmp",
    ];
    leftovers
        .iter()
        .chain(&others)
        .for_each(|name| drop(dir.write(name, b"x")));
    plan.finish(Check::Bytes).unwrap();
    assert!(
        leftovers.iter().all(|name| !dir.path(name).exists()),
        "what killed processes left is removed"
    );
    assert!(
        others.iter().all(|name| dir.path(name).exists()),
        "what others hide stays"
    );
}

#[test]
fn a_record_of_another_plan_is_refused() {
    let dir = Dir::new();
    let from = folder(&dir, 4);
    let one = Shards::new(Format::Tar)
        .plan(&from, dir.path("one"), 2)
        .unwrap();
    let two = Shards::new(Format::Tar)
        .shuffle(1)
        .plan(&from, dir.path("two"), 2)
        .unwrap();
    assert_ne!(one.id(), two.id());
    run(&one, &Tasks::all()).unwrap();
    std::fs::copy(
        dir.path("one/tasks/000001.tsv"),
        dir.path("two/tasks/000001.tsv"),
    )
    .unwrap();
    let words = "use a folder per plan";
    must_fail(run(&two, &Tasks::all()), Config, words);
    must_fail(two.finish(Check::Bytes), Config, words);
    std::fs::copy(
        dir.path("one/tasks/000000.tsv"),
        dir.path("one/tasks/000001.tsv"),
    )
    .unwrap();
    let words = "the record of task 0: remove it, and run task 1 again";
    must_say(run(&one, &Tasks::all()), words);
}

#[test]
fn a_changed_input_fails_its_task_and_no_other() {
    let dir = Dir::new();
    let from = folder(&dir, 10);
    let plan = Shards::new(Format::Tar)
        .skip_damaged(true)
        .plan(&from, dir.path("out"), 10)
        .unwrap();
    let longer = [fixture("420.jpg"), vec![0]].concat();
    std::fs::write(from.join("class0/0000.jpg"), longer).unwrap();
    std::fs::remove_file(from.join("class1/0000.jpg")).unwrap();
    let touched = std::fs::File::options()
        .append(true)
        .open(from.join("class2/0000.jpg"))
        .unwrap();
    touched
        .set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
    let mut failed = Vec::new();
    let ran = plan
        .run(&Tasks::all(), 1, &Stop::new(), |event| {
            if let Event::Failed(task, error) = event {
                failed.push((task, error.kind(), error.site().path.clone().unwrap()));
            }
        })
        .unwrap();
    assert_eq!((ran.done, ran.failed), (7, 3));
    let path = |class: &str| {
        from.join(class)
            .join("0000.jpg")
            .canonicalize()
            .unwrap_or(from.join(class).join("0000.jpg"))
    };
    let expected = [
        (0, Changed, path("class0")),
        (3, NotFound, path("class1")),
        (6, Changed, path("class2")),
    ];
    assert_eq!(failed, expected);
    assert_eq!(plan.finish(Check::Bytes).unwrap().missing_list(), "0,3,6");
}

#[test]
fn damaged_pictures_are_in_the_ledger_of_all_tasks() {
    let dir = Dir::new();
    let from = folder(&dir, 5);
    let cut = fixture("420.jpg")[..800].to_vec();
    for name in ["class0/0001.jpg", "class2/0003.jpg", "class2/0004.jpg"] {
        dir.write(&format!("in/{name}"), &cut);
    }
    let plan = Shards::new(Format::Tar)
        .plan(&from, dir.path("strict"), 5)
        .unwrap();
    assert_eq!(run(&plan, &Tasks::all()).unwrap().failed, 2);
    // The last task has damaged pictures alone, and writes no shard.
    let plan = Shards::new(Format::Tar)
        .skip_damaged(true)
        .plan(&from, dir.path("out"), 15)
        .unwrap();
    assert_eq!(run(&plan, &Tasks::all()).unwrap().done, 15);
    assert!(!dir.path("out/shard-000014.tar").exists());
    let finished = plan.finish(Check::Bytes).unwrap();
    assert_eq!((finished.samples, finished.damaged), (12, 3));
    let ledger = std::fs::read_to_string(dir.path("out/damaged.tsv")).unwrap();
    let names: Vec<_> = ledger
        .lines()
        .skip(1)
        .map(|line| line.split('\t').next().unwrap())
        .collect();
    assert_eq!(
        names,
        ["class0/0001.jpg", "class2/0003.jpg", "class2/0004.jpg"]
    );
    assert_eq!(Tar::open(dir.path("out")).unwrap().len(), 12);
}

#[test]
fn a_stop_leaves_nothing_of_the_unfinished_task() {
    let dir = Dir::new();
    let plan = Shards::new(Format::Tar)
        .plan(folder(&dir, 400), dir.path("out"), 2)
        .unwrap();
    let stop = Stop::new();
    let ran = plan
        .run(&Tasks::all(), 2, &stop, |event| {
            if matches!(event, Event::Inputs { task: 1, .. }) {
                stop.request();
            }
        })
        .unwrap();
    assert_eq!((ran.done, ran.stopped), (1, true));
    let names = content(&dir.path("out"))
        .into_keys()
        .filter(|name| !name.ends_with(".fdx"))
        .collect::<Vec<_>>();
    assert_eq!(names, ["plan.fdp", "shard-000000.tar", "tasks/000000.tsv"]);
    let ran = run(&plan, &Tasks::all()).unwrap();
    assert_eq!((ran.done, ran.skipped, ran.stopped), (1, 1, false));
    assert_eq!(plan.finish(Check::Bytes).unwrap().samples, 1200);
}

#[test]
fn wrong_plans_are_refused() {
    let dir = Dir::new();
    let from = folder(&dir, 4);
    let shards = Shards::new(Format::Tar);
    let refused = |plan: Result<Plan>, words: &str| drop(must_fail(plan, Config, words));
    refused(
        shards.plan(&from, dir.path("out"), 13),
        "13 tasks for 12 inputs",
    );
    refused(shards.plan(&from, dir.path("out"), 0), "at least 1");
    refused(shards.plan(&from, from.join("out"), 1), "overlap");
    refused(
        shards.plan(&from, "s3://bucket/out", 1),
        "a folder, not a bucket",
    );
    assert!(!dir.path("out").exists(), "a refused plan leaves no folder");
    shards.plan(&from, dir.path("out"), 12).unwrap();
    refused(shards.plan(&from, dir.path("out"), 12), "holds a plan");
    refused(
        Plan::of_pictures(&from, "", dir.path("out"), 1),
        "holds a plan",
    );
    dir.write("used/notes", b"x");
    refused(shards.plan(&from, dir.path("used"), 1), "not empty");
    let plan = Plan::open(dir.path("out")).unwrap();
    for (tasks, words) in [("12", "task 12 of a plan of 12"), ("0-12", "task 0-12 of")] {
        must_fail(run(&plan, &Tasks::list(tasks).unwrap()), Config, words);
    }
    let error = plan
        .run_files(
            &Tasks::all(),
            &Stop::new(),
            |_| {},
            |_, _| unreachable!("a plan of shards"),
        )
        .unwrap_err();
    assert_eq!(error.kind(), Config);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 200 } else { 400 }))]
    #[test]
    fn a_damaged_plan_is_an_error_or_changes_nothing(at in any::<prop::sample::Index>(), bit in 0_u8..8, cut in any::<bool>()) {
        let dir = Dir::new();
        let plan = Shards::new(Format::Tar).plan(folder(&dir, 2), dir.path("out"), 3).unwrap();
        run(&plan, &Tasks::all()).unwrap();
        let path = dir.path("out/plan.fdp");
        let mut bytes = std::fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
        std::fs::write(&path, bytes).unwrap();
        std::fs::remove_file(dir.path("out/tasks/000001.tsv")).unwrap();
        let mut failed = None;
        let done = Plan::open(&path).and_then(|plan| {
            plan.run(&Tasks::all(), 1, &Stop::new(), |event| {
                if let Event::Failed(_, error) = event {
                    failed = Some(error.kind());
                }
            })
        });
        match done {
            Err(error) => prop_assert!(matches!(error.kind(), Decode | Truncated), "{error}"),
            Ok(_) => prop_assert!(matches!(failed, None | Some(Decode | Truncated)), "{failed:?}"),
        }
    }
}

/// The work of `inspect`: verifies a dataset.
fn verified(dataset: &dyn Dataset) -> Result<(Verified, Vec<Error>)> {
    Verify::new()
        .workers(1)
        .run(dataset, |_| ControlFlow::Continue(()))
}

#[test]
fn files_are_worked_on_once_each_and_in_order() {
    let dir = Dir::new();
    let made = Shards::new(Format::Tar)
        .plan(folder(&dir, 10), dir.path("tars"), 9)
        .unwrap();
    run(&made, &Tasks::all()).unwrap();
    let plan = Plan::of_files(dir.path("tars"), &[".tar"], "settings", dir.path("out"), 4).unwrap();
    assert_eq!(
        (plan.inputs(), plan.tasks(), plan.settings()),
        (9, 4, Some("settings"))
    );
    let mut seen = Vec::new();
    for task in [3, 1, 0, 2] {
        plan.run_files(
            &Tasks::list(&task.to_string()).unwrap(),
            &Stop::new(),
            |_| {},
            |first, files| {
                assert_eq!(files.len(), 1);
                seen.push((first, files[0].clone()));
                verified(&Tar::open(&files[0])?)
            },
        )
        .unwrap();
    }
    seen.sort();
    let expected = (0..9)
        .map(|number| (number, dir.path(&format!("tars/shard-{number:06}.tar"))))
        .collect::<Vec<_>>();
    assert_eq!(seen, expected);
    assert_eq!(plan.finish(Check::Bytes).unwrap().samples, 30);
    let manifest = std::fs::read_to_string(dir.path("out/manifest.tsv")).unwrap();
    assert_eq!(manifest.lines().count(), 10);
    assert_says(manifest.lines().nth(1).unwrap(), "shard-000000.tar\t1\t");
}

#[test]
fn pictures_are_worked_on_together() {
    let dir = Dir::new();
    let from = folder(&dir, 500);
    std::fs::write(from.join("class1/0123.jpg"), b"no picture").unwrap();
    let plan = Plan::of_pictures(&from, "", dir.path("out"), 1).unwrap();
    let mut firsts = Vec::new();
    plan.run_files(
        &Tasks::all(),
        &Stop::new(),
        |_| {},
        |first, files| {
            firsts.push((first, files.len()));
            let images = Images::open_files(files)?;
            let decoder = feedline::decode::Image::resize(8, 8);
            Verify::new()
                .decode_field("image", decoder)
                .run(&images, |_| ControlFlow::Continue(()))
        },
    )
    .unwrap();
    assert_eq!(firsts, [(0, 1024), (1024, 476)]);
    let finished = plan.finish(Check::Bytes).unwrap();
    assert_eq!((finished.samples, finished.damaged), (1500, 1));
    let ledger = std::fs::read_to_string(dir.path("out/damaged.tsv")).unwrap();
    assert_says(ledger.lines().nth(1).unwrap(), "class1/0123.jpg\t");
}

#[test]
fn damage_in_every_file_is_a_result() {
    let dir = Dir::new();
    let plan = Plan::of_pictures(folder(&dir, 1), "", dir.path("out"), 3).unwrap();
    plan.run_files(
        &Tasks::all(),
        &Stop::new(),
        |_| {},
        |_, _| {
            Ok((
                Verified {
                    damaged: 1,
                    ..Verified::default()
                },
                vec![Error::user("bad")],
            ))
        },
    )
    .unwrap();
    let finished = plan.finish(Check::Bytes).unwrap();
    assert_eq!((finished.samples, finished.damaged), (0, 3));
    assert_eq!(
        std::fs::read_to_string(dir.path("out/damaged.tsv"))
            .unwrap()
            .lines()
            .count(),
        4
    );
}

#[test]
fn two_calls_of_finish_do_not_mix() {
    let dir = Dir::new();
    let plan = Shards::new(Format::Tar)
        .plan(folder(&dir, 10), dir.path("out"), 5)
        .unwrap();
    run(&plan, &Tasks::all()).unwrap();
    let held = std::fs::File::open(dir.path("out/plan.fdp")).unwrap();
    held.lock().unwrap();
    let words = "another process writes or finishes this plan";
    must_say(plan.finish(Check::Bytes), words);
    drop(held);
    plan.finish(Check::Bytes).unwrap();
}

#[test]
fn an_error_of_the_work_fails_its_task() {
    let dir = Dir::new();
    let plan = Plan::of_pictures(folder(&dir, 3), "", dir.path("out"), 3).unwrap();
    let ran = plan
        .run_files(
            &Tasks::all(),
            &Stop::new(),
            |_| {},
            |first, _| match first {
                3 => Err(Error::user("no")),
                _ => Ok((
                    Verified {
                        samples: 1,
                        ..Verified::default()
                    },
                    Vec::new(),
                )),
            },
        )
        .unwrap();
    assert_eq!((ran.done, ran.failed), (2, 1));
    assert_eq!(plan.finish(Check::Bytes).unwrap().missing_list(), "1");
}

#[test]
fn seek_points_of_parts_equal_those_of_one_pass() {
    let dir = Dir::new();
    plain_tar(&dir, 0);
    plain_tar(&dir, 1);
    let paths = [0, 1].map(|shard| dir.path(&format!("tars/{shard}.tar")));
    let one = Tar::open(dir.path("tars"))
        .unwrap()
        .facts(dir.path("one.seek"))
        .seek_points()
        .open()
        .unwrap();
    assert!(one.points_bytes() > 0);
    let part = |shard: usize| {
        Tar::open(&paths[shard])?
            .facts(dir.path(&format!("{shard}.seek")))
            .seek_points()
            .open()
    };
    let joined = Tar::open(dir.path("tars"))
        .unwrap()
        .facts(dir.path("joined.seek"))
        .seek_points()
        .open_joined([part(0), part(1)])
        .unwrap();
    assert!(!joined.built());
    assert!(
        std::fs::read(dir.path("one.seek")).unwrap()
            == std::fs::read(dir.path("joined.seek")).unwrap()
    );
    for parts in [vec![0], vec![1, 0], vec![0, 1, 1]] {
        let whole = Tar::open(dir.path("tars")).unwrap();
        let error = whole
            .facts(dir.path("wrong.seek"))
            .seek_points()
            .open_joined(parts.iter().map(|shard| part(*shard)))
            .err()
            .unwrap();
        assert_eq!(error.kind(), Config, "{parts:?}: {error}");
        assert!(!dir.path("wrong.seek").exists());
    }
}

/// A tar of 5 or 4 large baseline JPEGs.
fn plain_tar(dir: &Dir, shard: usize) {
    let mut tar = Vec::new();
    for k in 0..5 - shard {
        let pixels = image::RgbImage::from_fn(320, 240, |x, y| {
            image::Rgb([x as u8, y as u8, (x * y + k as u32) as u8])
        });
        let mut jpeg = Vec::new();
        image::codecs::jpeg::JpegEncoder::new_with_quality(&mut jpeg, 80)
            .encode_image(&pixels)
            .unwrap();
        let mut header = [0_u8; 512];
        let name = format!("{shard}{k}.jpg");
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", jpeg.len()).as_bytes());
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum::<u32>() + u32::from(b'0');
        header[156] = b'0';
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        tar.extend_from_slice(&header);
        tar.extend_from_slice(&jpeg);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar.resize(tar.len() + 1024, 0);
    dir.write(&format!("tars/{shard}.tar"), &tar);
}
