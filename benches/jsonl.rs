//! JSON lines from the page cache: the index of a new file, and an epoch in a global shuffle with
//! two workers, in lines and bytes of the file per second.
//!
//! Physical limit: `std::fs::read` of the same file, which copies each byte once.
//!
//! `cargo bench --no-default-features --features text --bench jsonl` (writes 0.5 GB below `target/`
//! and removes it)

mod common;

use common::{as_test, spread};
use feedline::dataset::{Dataset, Jsonl, JsonlBuilder};
use feedline::decode::{Bytes, Each};
use feedline::tensor::{DType, Field};
use feedline::{Loader, LoaderBuilder, Order};
use std::path::Path;
use std::time::Instant;

/// A kind of lines: its name, a line, and how it is read.
type Case = (
    &'static str,
    fn(u64) -> String,
    fn() -> JsonlBuilder,
    fn(LoaderBuilder) -> LoaderBuilder,
);

/// English-like words of some length, different for each line.
fn words(mut seed: u64, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = 2 + (seed >> 60) as usize % 9;
        text.extend((0..length).map(|at| char::from(b'a' + (seed >> (at * 5) & 31) as u8 % 26)));
        text.push(if seed >> 40 & 31 == 0 { '.' } else { ' ' });
    }
    text
}

const CASES: [Case; 4] = [
    (
        "text of 3 KB",
        |k| {
            format!(
                r#"{{"id":{k},"url":"http://a/{k}","text":"{}"}}"#,
                words(k, 3000)
            )
        },
        || Jsonl::builder().text("text"),
        |loader| loader.decode_field("text", Bytes::up_to(4096)),
    ),
    (
        "text of 3 KB with escapes",
        |k| {
            let text = words(k, 3000)
                .replace(". ", r".\n")
                .replace(" a", r" \u00e4");
            format!(r#"{{"id":{k},"text":"{text}","url":"http://a/{k}"}}"#)
        },
        || Jsonl::builder().text("text"),
        |loader| loader.decode_field("text", Bytes::up_to(4096)),
    ),
    (
        "six messages of 300 bytes",
        |k| {
            let one = |n| format!(r#"{{"role":"user","content":"{}"}}"#, words(k * 8 + n, 300));
            let all: Vec<_> = (0..6).map(one).collect();
            format!(r#"{{"id":{k},"messages":[{}]}}"#, all.join(","))
        },
        || Jsonl::builder().texts("messages[].content", 6),
        |loader| loader.decode_field("messages[].content", Each::new(Bytes::up_to(320))),
    ),
    (
        "512 ids",
        |k| {
            let ids: Vec<_> = (0..512)
                .map(|n| (k * 7919 + n * 104_729) % 50_257)
                .collect();
            format!(r#"{{"id":{k},"ids":{ids:?}}}"#).replace(' ', "")
        },
        || Jsonl::builder().numbers(Field::up_to("ids", DType::I32, 512), "ids"),
        |loader| loader,
    ),
];

fn main() {
    let (bytes, repeats) = if as_test() {
        (1 << 16, 1)
    } else {
        (128 << 20, 7)
    };
    let dir =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-jsonl-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for (name, line, builder, set) in CASES {
        let path = dir.join("data.jsonl");
        let mut text = String::new();
        for k in 0.. {
            text += &line(k);
            text.push('\n');
            if text.len() > bytes {
                break;
            }
        }
        std::fs::write(&path, &text).unwrap();
        let gigabytes = text.len() as f64 / 1e9;
        drop(text);
        let rate = |work: &dyn Fn()| {
            let times = (0..repeats).map(|_| {
                let start = Instant::now();
                work();
                gigabytes / start.elapsed().as_secs_f64()
            });
            let (median, low, high) = spread(times.collect());
            format!("{median:.2} GB/s [{low:.2}, {high:.2}]")
        };
        let read = rate(&|| drop(std::hint::black_box(std::fs::read(&path).unwrap())));
        let open = || builder().index(false).open(&path).unwrap();
        let index = rate(&|| drop(open()));
        let samples = open().len();
        let loader = set(Loader::builder(open()))
            .order(Order::shuffled(1))
            .batch_size(64)
            .workers(2)
            .build()
            .unwrap();
        let epochs = std::cell::Cell::new(0);
        let epoch = rate(&|| {
            let rows = loader.epoch(epochs.replace(epochs.get() + 1)).unwrap();
            let rows: usize = rows.map(|batch| batch.unwrap().valid()).sum();
            assert_eq!(rows as u64, samples);
        });
        println!("{name}: {samples} lines; read {read}; index {index}; epoch {epoch}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
