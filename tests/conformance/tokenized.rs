//! Texts that are tokenised when they are read, packed: judged by a copy of the same tokens.

use crate::common::{Dir, must_fail};
use crate::token_files::Letters;
use feedline::ErrorKind::{Changed, Config};
use feedline::dataset::{Dataset, DatasetExt, Jsonl, Packed, Tokenized};
use feedline::decode::ToIds;
use feedline::{Batch, LastBatch, Loader, Order, Rank, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

const ROOM: usize = 64;

/// Lines of 0 to 90 bytes of text, among them umlauts and escapes.
fn lines(dir: &Dir) -> Tokenized<Jsonl> {
    let line = |number: usize| {
        let text = "a\\nß".repeat(number * 7 % 19) + &"x".repeat(number % 13);
        format!("{{\"other\": {number}, \"text\": \"{text}\"}}\n")
    };
    let lines: String = (0..3000).map(line).collect();
    let path = dir.path("lines.jsonl");
    // A file that is written again has changed.
    if !path.exists() {
        dir.write("lines.jsonl", lines.as_bytes());
    }
    let lines = Jsonl::builder().text("text").open(path).unwrap();
    lines.tokenized("text", Letters(300)).unwrap()
}

/// A row: tokens, positions, documents, cu_seqlens, max_seqlen.
fn content(batch: &Batch, row: usize) -> Vec<i32> {
    let fields = [
        "input_ids",
        "positions",
        "documents",
        "cu_seqlens",
        "max_seqlen",
    ];
    fields
        .map(|name| batch.field(name).unwrap().row::<i32>(row).unwrap().to_vec())
        .concat()
}

/// The rows of an epoch.
fn rows(packed: impl Dataset) -> Vec<Vec<i32>> {
    let loader = Loader::builder(packed).batch_size(4).build().unwrap();
    let mut rows = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        rows.extend((0..batch.len()).map(|row| content(&batch, row)));
    }
    rows
}

/// Every second token is learned.
struct Half;

impl ToIds for Half {
    fn ids(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        Letters(300).ids(text, out)
    }

    fn has_loss(&self) -> bool {
        true
    }

    fn ids_and_loss(&self, text: &str, ids: &mut Vec<u32>, loss: &mut Vec<u8>) -> Result<()> {
        self.ids(text, ids)?;
        loss.extend((0..ids.len()).map(|at| (at % 2) as u8));
        Ok(())
    }

    fn vocabulary(&self) -> u64 {
        300
    }

    fn identity(&self) -> u64 {
        7
    }
}

#[test]
fn the_loss_of_tokens_stands_beside_them() {
    let dir = Dir::new();
    drop(lines(&dir));
    let texts = Jsonl::builder()
        .text("text")
        .open(dir.path("lines.jsonl"))
        .unwrap();
    let texts = texts.tokenized("text", Half).unwrap();
    let texts = texts.facts(dir.path("lengths")).lengths().open().unwrap();
    let packed = texts.packed("input_ids", ROOM).beside(["loss"]).split();
    let packed = packed.open(dir.path("bins")).unwrap();
    let loader = Loader::builder(packed).batch_size(8).build().unwrap();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        let [loss, tokens, places] =
            ["loss", "documents", "positions"].map(|name| batch.field(name).unwrap());
        for row in 0..batch.len() {
            let places = places.row::<i32>(row).unwrap();
            let is_real = tokens.row::<i32>(row).unwrap().iter().map(|own| *own >= 0);
            let right = places
                .iter()
                .zip(is_real)
                .map(|(place, real)| u8::from(real && place % 2 == 1));
            // Parts of longer documents begin at even tokens.
            assert_eq!(loss.row::<u8>(row).unwrap(), right.collect::<Vec<_>>());
        }
    }
}

type Open = fn(&Dir, Tokenized<Jsonl>) -> Result<Arc<dyn Dataset>>;

#[test]
fn rows_tokenised_when_read_are_those_of_a_copy() {
    let measured =
        |dir: &Dir, lines: Tokenized<Jsonl>| lines.facts(dir.path("lengths")).lengths().open();
    let kinds: [(&str, Open); 3] = [
        ("best fit", |dir, lines| {
            let copy = lines.copied(["input_ids"], dir.path("copy"))?;
            Ok(Arc::new(
                copy.packed("input_ids", ROOM)
                    .shuffled(5)
                    .cut()
                    .open(dir.path("bins"))?,
            ))
        }),
        ("split", |dir, lines| {
            let copy = lines.copied(["input_ids"], dir.path("copy"))?;
            Ok(Arc::new(
                copy.packed("input_ids", ROOM)
                    .split()
                    .open(dir.path("bins"))?,
            ))
        }),
        ("in turn", |dir, lines| {
            let copy = lines.copied(["input_ids"], dir.path("copy"))?;
            Ok(Arc::new(
                copy.packed("input_ids", ROOM)
                    .concatenated()
                    .open(dir.path("bins"))?,
            ))
        }),
    ];
    for (name, copied) in kinds {
        let dir = Dir::new();
        let right = rows(copied(&dir, lines(&dir)).unwrap());
        assert!(right.len() > 100, "{name}");
        for kept in [false, true] {
            let packed = measured(&dir, lines(&dir))
                .unwrap()
                .packed("input_ids", ROOM);
            let packed = match name {
                "best fit" => packed.shuffled(5).cut(),
                "split" => packed.split(),
                _ => packed.concatenated(),
            };
            let packed = if kept {
                packed.rows(dir.path("rows"))
            } else {
                packed
            };
            let packed = packed.open(dir.path(&format!("own bins {kept}"))).unwrap();
            assert_eq!(packed.chunked().is_none(), kept);
            assert!(rows(packed) == right, "{name}, kept {kept}");
        }
    }
}

fn estimated(dir: &Dir) -> Packed<Tokenized<Jsonl>> {
    let packed = lines(dir)
        .packed("input_ids", ROOM)
        .shuffled(5)
        .cut()
        .estimated();
    packed.open(dir.path("bins")).unwrap()
}

#[test]
fn estimated_rows_have_every_document_once() {
    let dir = Dir::new();
    let packed = estimated(&dir);
    assert!(packed.built() && !estimated(&dir).built());
    assert_eq!(packed.identity(), estimated(&dir).identity());
    let right = lines(&dir).copied(["input_ids"], dir.path("copy")).unwrap();
    let whole: u64 = (0..right.len())
        .map(|sample| right.read_sample(sample).unwrap()[0].len() as u64 / 4)
        .sum();
    let all = rows(packed);
    let kept: usize = all
        .iter()
        .map(|row| {
            row[2 * ROOM..3 * ROOM]
                .iter()
                .filter(|own| **own >= 0)
                .count()
        })
        .sum();
    let lost = 1.0 - kept as f64 / whole as f64;
    let filled = kept as f64 / (all.len() * ROOM) as f64;
    assert!(lost < 0.1 && filled > 0.8, "{lost} lost, {filled} full");
}

#[test]
fn a_state_goes_on_with_the_same_estimated_rows_in_another_world() {
    let dir = Dir::new();
    let right = rows(estimated(&dir));
    let mut left = (right.len() as u64).div_ceil(12);
    let mut state = None;
    let mut found = BTreeMap::new();
    for world in [1, 3, 2] {
        let steps = if world == 2 { left } else { left / 3 };
        left -= steps;
        let mut after = None;
        for rank in 0..world {
            let loader = Loader::builder(estimated(&dir))
                .order(Order::shuffled(4))
                .rank(Rank::new(rank, world).unwrap())
                .global_batch(12)
                .last_batch(LastBatch::Mask)
                .build()
                .unwrap();
            if let Some(state) = &state {
                loader.resume(state).unwrap();
            }
            let mut epoch = loader.epoch(0).unwrap();
            for _ in 0..steps {
                let batch = epoch.next().unwrap().unwrap();
                for row in (0..batch.len()).filter(|row| batch.status()[*row] == 0) {
                    let before = found.insert(batch.ids()[row], content(&batch, row));
                    assert!(before.is_none(), "row {} twice", batch.ids()[row]);
                }
            }
            drop(epoch);
            after = Some(loader.state().unwrap());
        }
        state = after;
    }
    assert!(found.into_values().eq(right));
}

#[test]
fn lengths_that_are_unknown_are_refused() {
    let dir = Dir::new();
    let bins = dir.path("bins");
    let packed = || lines(&dir).packed("input_ids", ROOM);
    must_fail(packed().open(&bins), Config, "known or estimated");
    must_fail(
        packed().estimated().open(&bins),
        Config,
        "use them with cut",
    );
    must_fail(
        packed()
            .cut()
            .estimated()
            .rows(dir.path("rows"))
            .open(&bins),
        Config,
        "known lengths",
    );
    let texts = |ids: Letters| {
        Jsonl::builder()
            .text("text")
            .open(dir.path("lines.jsonl"))
            .unwrap()
            .tokenized("text", ids)
            .unwrap()
    };
    texts(Letters(300))
        .facts(dir.path("lengths"))
        .lengths()
        .open()
        .unwrap();
    let other = texts(Letters(301))
        .facts(dir.path("lengths"))
        .lengths()
        .open();
    must_fail(other, Changed, "");
    let twice = texts(Letters(300)).tokenized("input_ids", Letters(300));
    must_fail(twice, Config, "a text is expected");
}

#[test]
fn lengths_of_compressed_texts_are_those_of_plain_ones() {
    let dir = Dir::new();
    let plain = lines(&dir)
        .facts(dir.path("plain"))
        .lengths()
        .open()
        .unwrap();
    let bytes = std::fs::read(dir.path("lines.jsonl")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, &bytes).unwrap();
    let path = dir.write("lines.jsonl.gz", &packed.finish().unwrap());
    let chunks = Jsonl::builder().text("text").open(path).unwrap();
    let chunks = chunks.tokenized("text", Letters(300)).unwrap();
    let chunks = chunks.facts(dir.path("chunks")).lengths().open().unwrap();
    assert_eq!(
        chunks.lengths("input_ids").unwrap(),
        plain.lengths("input_ids").unwrap()
    );
}
