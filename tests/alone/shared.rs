//! The ranks of a machine, as real processes, have data in memory once.
//!
//! ```text
//! test ──start──► rank 0 … rank 3   each: in_memory ─► "opened" ─► all have opened ─► measure ─► read all rows ─► "measured"
//! ```

use crate::common::*;
use feedline::Loader;
use feedline::dataset::{Dataset, DatasetExt};
use feedline::memory::MemoryTerm;
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

const MIB: usize = 1 << 20;
const RANKS: usize = 4;
const BYTES: usize = 64 * MIB;
const RECORD: usize = 4096;

/// Files in the folder whose names begin so.
fn named(dir: &Path, start: &str) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let has = |path: &PathBuf| {
        path.file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with(start)
    };
    paths.filter(has).collect()
}

/// This process notes that it is so far, and waits for all others.
fn meet(dir: &Path, word: &str) {
    std::fs::write(dir.join(format!("{word}-{}", std::process::id())), "").unwrap();
    until(word, || named(dir, word).len() == RANKS);
}

/// A line of `/proc/self/smaps_rollup`, in bytes.
fn rollup(key: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .unwrap();
    line.trim()
        .trim_end_matches(" kB")
        .parse::<usize>()
        .unwrap()
        * 1024
}

/// The test again, as a rank with this temporary folder.
fn rank(test: &str, dir: &Path, temporary: &str, ranks: usize) -> Child {
    let mut command = child::process(test, dir);
    command
        .env("LOCAL_WORLD_SIZE", ranks.to_string())
        .env("TMPDIR", temporary)
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

#[track_caller]
fn output_of(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let text = child::printed(&output);
    assert!(output.status.success(), "{}: {text}", output.status);
    text
}

/// The sum of the numbers that ranks print after a word.
fn sum_of(texts: &[String], word: &str) -> usize {
    let numbers = texts.iter().map(|text| {
        text.lines()
            .find_map(|line| line.split_once(word))
            .unwrap()
            .1
    });
    numbers.map(|number| number.parse::<usize>().unwrap()).sum()
}

#[test]
fn ranks_have_one_copy_and_count_their_parts() {
    if let Some(dir) = in_child() {
        return one_rank(&dir);
    }
    let dir = Dir::new();
    dir.write("data.bin", &noise(BYTES, 5));
    let test = here!();
    for (temporary, copies) in [(dir.path("").to_str().unwrap(), 1), ("/proc/none", RANKS)] {
        let ranks: Vec<_> = (0..RANKS)
            .map(|_| rank(&test, &dir.path(""), temporary, RANKS))
            .collect();
        let texts: Vec<_> = ranks.into_iter().map(output_of).collect();
        let memory = sum_of(&texts, "memory: ");
        let planned = sum_of(&texts, "planned: ");
        println!("{copies} copies of {BYTES} bytes: {memory} bytes in memory, {planned} planned");
        // Further memory of the processes is a few MiB each.
        let expected = copies * BYTES..copies * BYTES + RANKS * 8 * MIB;
        assert!(expected.contains(&memory), "{memory} bytes: {texts:?}");
        assert_eq!(planned, copies * BYTES);
        let words = match copies {
            1 => "one copy for the 4 ranks of this machine, 4 of which have it now",
            _ => "a copy of this rank alone (/proc/none/feedline-",
        };
        assert!(texts.iter().all(|text| text.contains(words)), "{texts:?}");
        assert!(
            named(&dir.path(""), "feedline-").is_empty(),
            "no note stays"
        );
        for file in [
            named(&dir.path(""), "opened"),
            named(&dir.path(""), "measured"),
        ]
        .concat()
        {
            std::fs::remove_file(file).unwrap();
        }
    }
}

fn one_rank(dir: &Path) {
    let before = rollup("Pss_Anon:") + rollup("Pss_Shmem:");
    let memory = records(&dir.join("data.bin"), RECORD).in_memory().unwrap();
    meet(dir, "opened");
    println!("{}", memory.describe());
    println!(
        "memory: {}",
        rollup("Pss_Anon:") + rollup("Pss_Shmem:") - before
    );
    meet(dir, "measured");
    let loader = build(Loader::builder(memory).batch_size(64).workers(1));
    println!("planned: {}", loader.plan().term(MemoryTerm::DATA).bytes());
    let mut rows = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        rows.extend_from_slice(
            batch
                .unwrap()
                .field("record")
                .unwrap()
                .as_slice::<u8>()
                .unwrap(),
        );
    }
    assert!(rows == noise(BYTES, 5));
}

#[test]
fn a_rank_takes_over_from_one_that_was_killed_while_it_read() {
    if let Some(dir) = in_child() {
        let memory = records(&dir.join("large.bin"), MIB).in_memory().unwrap();
        return println!("{}", memory.describe());
    }
    let dir = Dir::new();
    let large = std::fs::File::create(dir.path("large.bin")).unwrap();
    large.set_len(512 << 20).unwrap();
    let folder = dir.path("");
    let start = || rank(&here!(), &folder, folder.to_str().unwrap(), 2);
    let notes = || {
        let files = named(&folder, "feedline-");
        files.first().map_or(String::new(), |file| {
            std::fs::read_to_string(file).unwrap_or_default()
        })
    };
    let mut first = start();
    until("the first reads", || notes().starts_with("fill "));
    let pid = Pid::from_raw(first.id() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let mut second = start();
    std::thread::sleep(Duration::from_millis(500));
    assert!(second.try_wait().unwrap().is_none(), "it does not wait");
    assert!(
        notes().starts_with(&format!("fill {} ", first.id())),
        "{}",
        notes()
    );
    kill_process(pid, Signal::KILL).unwrap();
    assert_says(
        output_of(second),
        "one copy for the 2 ranks of this machine, 1 of which have it now",
    );
    first.wait().unwrap();
}
