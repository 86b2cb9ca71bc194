//! Texts become token files: Megatron's bytes, the same for any number of tasks and after every kill.

use crate::common::{Dir, here, in_child, must_fail, must_say};
use crate::shards::{content, kills};
use feedline::ErrorKind::{Changed, Config, Empty};
use feedline::dataset::{Dataset, DatasetExt, Jsonl, Megatron, Tokens};
use feedline::decode::ToIds;
use feedline::prepare::{Check, Event, Finished, Plan, Tasks, TokenFiles};
use feedline::tensor::DType;
use feedline::{ErrorKind, Result, Stop};
use std::ops::ControlFlow;
use std::path::Path;

/// A token for each byte.
pub struct Letters(pub u64);

impl ToIds for Letters {
    fn ids(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        out.extend(text.bytes().map(u32::from));
        Ok(())
    }

    fn vocabulary(&self) -> u64 {
        self.0
    }

    fn identity(&self) -> u64 {
        self.0
    }
}

const SHORT: Letters = Letters(300);
const END: u32 = 256;

/// Lines in two files; every seventh text is empty. Returns the texts.
fn corpus(dir: &Dir, lines: usize) -> Vec<String> {
    let texts: Vec<String> = (0..lines)
        .map(|line| "añ€ ".repeat(line % 7) + &"x".repeat(line % 7 * (line % 50)))
        .collect();
    for (file, some) in texts.chunks(lines.div_ceil(2)).enumerate() {
        let lines = some
            .iter()
            .map(|text| format!("{{\"a\": {{\"text\": {text:?}}}}}\n"));
        dir.write(
            &format!("in/{file}.jsonl"),
            lines.collect::<String>().as_bytes(),
        );
    }
    texts
}

fn open(dir: &Path) -> Result<Jsonl> {
    Jsonl::builder().text("a.text").open(dir.join("in"))
}

fn files() -> TokenFiles {
    TokenFiles::new("a.text").end(END)
}

fn write(files: &TokenFiles, texts: &dyn Dataset, to: &Path) -> Result<Finished> {
    files.write(texts, &SHORT, to, 1, |_| ControlFlow::Continue(()))
}

/// `tokens.bin` and `tokens.idx` as `IndexedDatasetBuilder` writes them.
fn megatron(texts: &[String], end: Option<u32>, size: usize) -> [Vec<u8>; 2] {
    let documents = texts.iter().map(|text| {
        let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
        ids.extend(end.filter(|_| !text.is_empty()));
        ids
    });
    let [mut bin, mut lens, mut starts, mut ends] = [const { Vec::new() }; 4];
    let mut sequences = 0_u64;
    ends.extend(0_u64.to_le_bytes());
    for ids in documents {
        if !ids.is_empty() {
            lens.extend((ids.len() as u32).to_le_bytes());
            starts.extend((bin.len() as u64).to_le_bytes());
            sequences += 1;
        }
        ends.extend(sequences.to_le_bytes());
        ids.iter()
            .for_each(|id| bin.extend(&id.to_le_bytes()[..size]));
    }
    let mut idx = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0".to_vec();
    idx.push(if size == 2 { 8 } else { 4 });
    idx.extend(sequences.to_le_bytes());
    idx.extend((texts.len() as u64 + 1).to_le_bytes());
    [bin, [idx, lens, starts, ends].concat()]
}

#[test]
fn any_number_of_tasks_gives_megatrons_bytes() {
    let dir = Dir::new();
    let texts = corpus(&dir, 100);
    let dataset = open(&dir.path("")).unwrap();
    for (number, (tasks, end, vocabulary)) in [
        (1, None, 65_499),
        (1, Some(END), 65_500),
        (3, Some(END), 300),
        (100, Some(END), 300),
    ]
    .into_iter()
    .enumerate()
    {
        let to = dir.path(&format!("out{number}"));
        let ids = Letters(vocabulary);
        let files = TokenFiles::new("a.text");
        let files = end.into_iter().fold(files, TokenFiles::end);
        let plan = files.plan(&dataset, &ids, &to, tasks).unwrap();
        for part in [1, 0] {
            let stop = Stop::new();
            let tasks = Tasks::part(part, 2).unwrap();
            plan.run_tokens(&dataset, &ids, &tasks, 2, &stop, |_| {})
                .unwrap();
        }
        let finished = plan.finish(Check::Bytes).unwrap();
        assert_eq!(plan.finish(Check::Bytes).unwrap(), finished);
        let size = if vocabulary < 65_500 { 2 } else { 4 };
        let [bin, idx] = megatron(&texts, end, size);
        assert_eq!((finished.samples, finished.empty), (100, 15));
        assert_eq!(finished.tokens as usize, bin.len() / size);
        assert!(std::fs::read(to.join("tokens.bin")).unwrap() == bin);
        assert!(std::fs::read(to.join("tokens.idx")).unwrap() == idx);
        let read = Megatron::builder()
            .documents(1 << 20)
            .open(to.join("tokens"))
            .unwrap();
        assert_eq!(read.len(), 100);
        assert_eq!(
            read.read_sample(1).unwrap()[0].len(),
            size * ("añ€ ".len() + 1 + end.iter().len())
        );
    }
}

#[test]
fn one_call_leaves_the_files_alone() {
    let dir = Dir::new();
    let texts = corpus(&dir, 40);
    let dataset = open(&dir.path("")).unwrap();
    let finished = write(&files().flat(true), &dataset, &dir.path("out")).unwrap();
    let names: Vec<String> = content(&dir.path("out")).into_keys().collect();
    assert_eq!(names, ["manifest.tsv", "tokens.bin"]);
    let [bin, _] = megatron(&texts, Some(END), 2);
    assert!(std::fs::read(dir.path("out/tokens.bin")).unwrap() == bin);
    let tokens = Tokens::builder(DType::U16)
        .separator(END.into())
        .open(dir.path("out/tokens.bin"));
    assert_eq!(tokens.unwrap().len(), 40 - finished.empty);
    must_say(
        write(&files(), &dataset, &dir.path("out")),
        "finished output",
    );
}

#[test]
fn refused_texts_are_counted_by_reason_and_listed() {
    let dir = Dir::new();
    let lines: [&[u8]; 8] = [
        b"{\"text\": \"good\"}",
        b"{\"text\": 5}",
        b"{\"other\": \"key\"}",
        b"{\"text\": \"\xff\"}",
        b"{\"text\": \"half",
        b"{\"text\": null}",
        b"[1]",
        b"{\"text\": \"\"}",
    ];
    let mut bytes = lines.join(&b'\n');
    bytes.extend(b"\n{\"text\": \"the file ends here");
    let path = dir.write("in/a.jsonl", &bytes);
    let dataset = Jsonl::builder()
        .text("text")
        .skip_damage(true)
        .open(&path)
        .unwrap();
    let files = TokenFiles::new("text");
    let error = write(&files, &dataset, &dir.path("strict")).unwrap_err();
    assert_eq!(error.site().path.as_deref(), Some(&*path), "{error}");
    must_say(Err::<(), _>(error), "line 2");
    for (tasks, to) in [(1, "one"), (8, "eight")] {
        let files = files.clone().skip_damaged(true).left_out(dataset.damage());
        let plan = files.plan(&dataset, &SHORT, dir.path(to), tasks).unwrap();
        plan.run_tokens(&dataset, &SHORT, &Tasks::all(), 2, &Stop::new(), |_| {})
            .unwrap();
        let finished = plan.finish(Check::Bytes).unwrap();
        let refused: Vec<_> = finished
            .refused
            .iter()
            .map(|(why, count)| (why.as_str(), *count))
            .collect();
        let expected = [
            ("a list, one object a line expected", 1),
            ("a number where a string is expected", 1),
            ("cut", 1),
            ("not UTF-8", 1),
            ("text is missing", 1),
            ("text is null", 1),
            ("truncated", 1),
        ];
        assert_eq!(refused, expected);
        assert_eq!(
            (finished.samples, finished.empty, finished.damaged),
            (2, 1, 7)
        );
        let ledger = std::fs::read_to_string(dir.path(to).join("damaged.tsv")).unwrap();
        assert_eq!(ledger.lines().count(), 8);
        assert!(
            ledger.lines().nth(5).unwrap().contains("line 5"),
            "{ledger}"
        );
    }
    let same = ["manifest.tsv", "damaged.tsv", "tokens.bin", "tokens.idx"];
    let [one, eight] = ["one", "eight"].map(|to| content(&dir.path(to)));
    assert!(same.iter().all(|name| one[*name] == eight[*name]));
}

#[test]
fn wrong_token_plans_are_refused() {
    let dir = Dir::new();
    corpus(&dir, 10);
    let dataset = open(&dir.path("")).unwrap();
    let to = dir.path("out");
    let refused = |plan: Result<Plan>, words| drop(must_fail(plan, Config, words));
    refused(
        TokenFiles::new("text").plan(&dataset, &SHORT, &to, 1),
        "no field `text`",
    );
    refused(
        files().end(300).plan(&dataset, &SHORT, &to, 1),
        "the vocabulary has 300 ids",
    );
    refused(
        files().plan(&dataset, &SHORT, &to, 11),
        "11 tasks for 10 inputs",
    );
    let memory = Jsonl::builder()
        .text("a.text")
        .open_bytes(*b"{}\n")
        .unwrap();
    refused(files().plan(&memory, &SHORT, &to, 1), "in memory");
    let plan = files().plan(&dataset, &SHORT, &to, 2).unwrap();
    let run = |dataset: &dyn Dataset, ids: &Letters| {
        plan.run_tokens(dataset, ids, &Tasks::all(), 1, &Stop::new(), |_| {})
    };
    must_fail(run(&dataset, &Letters(301)), Changed, "another tokenizer");
    let other = Jsonl::builder()
        .text("a.text")
        .missing_zero(true)
        .open(dir.path("in"));
    must_fail(run(&other.unwrap(), &SHORT), Changed, "another dataset");
    must_fail(
        write(&TokenFiles::new("a.text"), &dataset, &to),
        Config,
        "other settings",
    );
    run(&dataset, &SHORT).unwrap();
    let touched = std::fs::File::options()
        .append(true)
        .open(dir.path("in/0.jsonl"))
        .unwrap();
    touched
        .set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
    must_fail(run(&dataset, &SHORT), Changed, "0.jsonl");
}

#[test]
fn texts_of_which_all_are_refused_are_an_error() {
    let dir = Dir::new();
    let path = dir.write("in/a.jsonl", b"{\"a\": 1}\n{\"a\": 2}\n");
    let dataset = Jsonl::builder().text("a").open(path).unwrap();
    let files = TokenFiles::new("a").skip_damaged(true);
    must_fail(write(&files, &dataset, &dir.path("out")), Empty, "all 2");
}

#[test]
fn a_stop_ends_between_windows_and_the_call_goes_on() {
    let dir = Dir::new();
    let texts = corpus(&dir, 9000);
    let dataset = open(&dir.path("")).unwrap();
    let stopped = files().write(&dataset, &SHORT, dir.path("out"), 1, |event| match event {
        Event::Inputs { .. } => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Cancelled);
    write(&files(), &dataset, &dir.path("out")).unwrap();
    let [bin, idx] = megatron(&texts, Some(END), 2);
    assert!(std::fs::read(dir.path("out/tokens.bin")).unwrap() == bin);
    assert!(std::fs::read(dir.path("out/tokens.idx")).unwrap() == idx);
}

/// As often as the shards' test.
#[test]
fn token_files_killed_at_any_moment_go_on_to_the_same_bytes() {
    if let Some(dir) = in_child() {
        let dataset = open(&dir).unwrap();
        let plan = files().plan(&dataset, &SHORT, dir.join("out"), 12);
        if let Ok(plan) = plan {
            drop(plan);
        }
        write(&files(), &dataset, &dir.join("out")).unwrap();
        return;
    }
    let dir = Dir::new();
    corpus(&dir, 3000);
    let dataset = open(&dir.path("")).unwrap();
    let to = dir.path("out");
    kills(
        &here!(),
        &dir,
        |content| content.len() == 3,
        || {
            if let Err(error) = write(&files(), &dataset, &to) {
                must_say(Err::<(), _>(error), "finished output");
            }
        },
    );
}
