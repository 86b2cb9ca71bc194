//! `.packed()`: every document once, whole and in order, in rows of one length; the table's file is
//! not trusted.

use crate::common::formats::{tar_member, tf_record};
use crate::common::got::{Got, bytes_of};
use crate::common::toys::Chunks;
use crate::common::{Dir, READERS, assert_says, build, had, must_fail, must_say};
use feedline::ErrorKind::{self, Changed, Config, Decode, Shape};
use feedline::dataset::{
    Concat, Copied, Dataset, DatasetExt, Framed, Megatron, Packed, PackedBuilder, Parts, Records,
    Sizes, Tar, TarBuilder, TfRecord, Tokens, stoppable,
};
use feedline::order::Draws;
use feedline::storage::{Direct, Extent, Mode, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Error, LastBatch, Loader, LoaderBuilder, Order, Rank, Result, Stop, prepare};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Documents in one source. Token `t` of document `d` is `d << 16 | t`; padding is `u32::MAX`.
#[derive(Clone)]
struct Documents {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    lens: Arc<Vec<u64>>,
    starts: Vec<u64>,
    /// Requested at document 70,000.
    stop: Option<Stop>,
}

const PADDING: u32 = u32::MAX;

fn bytes(lens: &[u64]) -> Vec<u8> {
    lens.iter()
        .enumerate()
        .flat_map(|(document, len)| (0..*len).flat_map(move |at| token(document, at).to_ne_bytes()))
        .collect()
}

fn token(document: usize, at: u64) -> u32 {
    (document as u32) << 16 | at as u32
}

impl Documents {
    fn of(sources: Sources, lens: &[u64]) -> Self {
        let tokens = Field::up_to("tokens", DType::U32, 1 << 20);
        let starts = lens
            .iter()
            .scan(0, |end, len| Some(std::mem::replace(end, *end + len)))
            .collect();
        Self {
            sources: Arc::new(sources),
            schema: vec![EncodedField::raw(tokens)],
            lens: Arc::new(lens.to_vec()),
            starts,
            stop: None,
        }
    }

    fn memory(lens: &[u64]) -> Self {
        let mut sources = Sources::new();
        sources.memory(bytes(lens).into());
        Self::of(sources, lens)
    }

    fn file(path: &Path, lens: &[u64]) -> Self {
        let mut sources = Sources::new();
        let bytes = bytes(lens);
        std::fs::write(path, &bytes).unwrap();
        sources.file(path, bytes.len() as u64).unwrap();
        Self::of(sources, lens)
    }
}

impl Dataset for Documents {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }

    fn len(&self) -> u64 {
        self.lens.len() as u64
    }

    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    fn sizes(&self) -> Sizes {
        Sizes::new(4 * self.lens.iter().max().unwrap())
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        if sample == 70_000 {
            self.stop.iter().for_each(Stop::request);
        }
        let offset = 4 * self.starts[sample as usize];
        let len = 4 * self.lens[sample as usize];
        let source = SourceId::at(0);
        parts.extent(
            0,
            Extent {
                source,
                offset,
                len,
            },
        );
        Ok(())
    }
}

/// A row as the loader gives it.
struct Row<'a> {
    tokens: &'a [u32],
    positions: &'a [i32],
    documents: &'a [i32],
    ends: &'a [i32],
    longest: i32,
}

/// A run of tokens of one document: the document, and its tokens.
type Run = (usize, std::ops::Range<u64>);

impl Row<'_> {
    /// The documents of the row, by its tokens; the other fields must agree.
    fn runs(&self) -> Vec<Run> {
        let mut runs = Vec::<Run>::new();
        let mut at = 0;
        assert_eq!(self.ends[0], 0);
        for (number, end) in self.ends[1..].iter().enumerate() {
            let own = at..*end as usize;
            if own.is_empty() {
                let mut rest = self.ends[number + 1..].iter();
                assert!(rest.all(|end| *end as usize == at), "document {number}");
                break;
            }
            let document = (self.tokens[at] >> 16) as usize;
            let first = u64::from(self.tokens[at] & 0xffff);
            for (place, at) in own.clone().enumerate() {
                assert_eq!(self.tokens[at], token(document, first + place as u64));
                assert_eq!(self.positions[at], place as i32);
                assert_eq!(self.documents[at], number as i32);
            }
            runs.push((document, first..first + own.len() as u64));
            at = own.end;
        }
        assert!(self.tokens[at..].iter().all(|token| *token == PADDING));
        assert!(self.documents[at..].iter().all(|document| *document == -1));
        assert!(self.positions[at..].iter().all(|position| *position == 0));
        let lens = runs.iter().map(|(_, range)| range.end - range.start);
        assert_eq!(u64::from(self.longest as u32), lens.max().unwrap());
        runs
    }
}

/// The first field of every row, read by plain calls.
fn tokens_of<D: Dataset>(packed: &Packed<D>) -> Vec<u8> {
    let row = |bin| packed.read_sample(bin).unwrap().swap_remove(0);
    (0..packed.len()).flat_map(row).collect()
}

/// Batches of seven rows that are read in this way.
fn sevens(dataset: impl Dataset, mode: Mode, direct: Direct) -> LoaderBuilder {
    let builder = Loader::builder(dataset).batch_size(7);
    builder.tuning(|t| t.reader(mode).direct(direct))
}

/// The documents of every row that a loader delivers.
fn delivered(builder: LoaderBuilder) -> Vec<Vec<Run>> {
    Got::epoch(&build(builder), 0)
        .iter()
        .flat_map(loaded)
        .collect()
}

fn numbers<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytemuck::pod_collect_to_vec(bytes)
}

/// The documents of a row that a plain call gave as its tokens and the fields behind them.
fn runs_of(tokens: &[u8], rest: &[Vec<u8>]) -> Vec<Run> {
    let row = Row {
        tokens: &numbers(tokens),
        positions: &numbers(&rest[0]),
        documents: &numbers(&rest[1]),
        ends: &numbers(&rest[2]),
        longest: numbers::<i32>(&rest[3])[0],
    };
    row.runs()
}

/// The documents of every row, read by plain calls.
fn plain<D: Dataset>(packed: &Packed<D>) -> Vec<Vec<Run>> {
    let row = |sample| {
        let fields = packed.read_sample(sample).unwrap();
        runs_of(&fields[0], &fields[1..])
    };
    (0..packed.len()).map(row).collect()
}

/// The documents of every row of a batch.
fn loaded(got: &Got) -> Vec<Vec<Run>> {
    let tokens = numbers::<u32>(got.bytes("tokens"));
    let documents = numbers::<i32>(got.bytes("documents"));
    let positions = numbers::<i32>(got.bytes("positions"));
    let ends = numbers::<i32>(got.bytes("cu_seqlens"));
    let longest = numbers::<i32>(got.bytes("max_seqlen"));
    let room = tokens.len() / got.len;
    let width = ends.len() / got.len;
    let row = |row: usize| {
        let own = row * room..(row + 1) * room;
        let tokens = &tokens[own.clone()];
        let positions = &positions[own.clone()];
        let documents = &documents[own];
        let ends = &ends[row * width..][..width];
        Row {
            tokens,
            positions,
            documents,
            ends,
            longest: longest[row],
        }
        .runs()
    };
    (0..got.valid).map(row).collect()
}

/// The parts of documents that the rows must have, sorted.
fn expected(lens: &[u64], room: u64, cut: bool) -> Vec<Run> {
    lens.iter()
        .enumerate()
        .flat_map(|(document, len)| {
            let len = if cut { (*len).min(room) } else { *len };
            (0..len)
                .step_by(room as usize)
                .map(move |from| (document, from..(from + room).min(len)))
                .collect::<Vec<_>>()
        })
        .collect()
}

fn sorted(rows: &[Vec<Run>]) -> Vec<Run> {
    let mut all = rows.concat();
    all.sort_by_key(|(document, range)| (*document, range.start));
    all
}

fn builder<D: Dataset>(documents: D, room: u64) -> PackedBuilder<D> {
    documents
        .packed("tokens", room as usize)
        .padding(PADDING.into())
}

proptest! {
    #[test]
    fn every_document_is_in_one_row_whole_and_in_order(
        room in 1_u64..90, most in 1_usize..90, lens in prop::collection::vec(0_u64..200, 1..300), key in prop::option::of(0_u64..9), cut: bool,
    ) {
        prop_assume!(lens.iter().any(|len| *len > 0));
        let dir = Dir::new();
        let open = |name: &str| {
            let builder = builder(Documents::memory(&lens), room).documents_max(most);
            let builder = if cut { builder.cut() } else { builder.split() };
            key.into_iter().fold(builder, PackedBuilder::shuffled).open(dir.path(name)).unwrap()
        };
        let packed = open("bins");
        let rows = plain(&packed);
        prop_assert_eq!(sorted(&rows), expected(&lens, room, cut));
        prop_assert!(rows.iter().all(|row| row.len() <= most));
        let tokens: u64 = rows.concat().iter().map(|(_, range)| range.end - range.start).sum();
        let long: Vec<u64> = lens.iter().copied().filter(|len| *len > room).collect();
        let lost = if cut { long.iter().map(|len| len - room).sum() } else { 0 };
        prop_assert_eq!((packed.tokens(), packed.long_documents(), packed.cut_tokens()), (tokens, long.len() as u64, lost));
        if key.is_none() {
            prop_assert!(rows.iter().all(|row| row.is_sorted_by_key(|(document, _)| *document)));
        }
        // The same file again, and the same table anew.
        let again = open("bins");
        let anew = open("anew");
        prop_assert!(packed.built() && !again.built() && anew.built());
        prop_assert_eq!(plain(&again), rows.clone());
        prop_assert_eq!(plain(&anew), rows);
        prop_assert!(std::fs::read(dir.path("bins")).unwrap() == std::fs::read(dir.path("anew")).unwrap());
        prop_assert_eq!(packed.identity(), anew.identity());
    }
}

/// Documents in this order, one after the other, in rows of `room` tokens and at most `most`
/// documents.
fn concatenated(order: &[usize], lens: &[u64], room: u64, most: usize) -> Vec<Vec<Run>> {
    let mut rows = Vec::<Vec<Run>>::new();
    let mut left = 0;
    for document in order {
        let mut from = 0;
        while from < lens[*document] {
            if left == 0 || rows.last().is_some_and(|row| row.len() == most) {
                rows.push(Vec::new());
                left = room;
            }
            let to = lens[*document].min(from + left);
            rows.last_mut().unwrap().push((*document, from..to));
            left -= to - from;
            from = to;
        }
    }
    rows
}

proptest! {
    #[test]
    fn concatenated_documents_fill_rows_in_turn(
        room in 1_u64..90, most in 1_usize..90, lens in prop::collection::vec(0_u64..200, 1..300), key in prop::option::of(0_u64..9),
    ) {
        prop_assume!(lens.iter().any(|len| *len > 0));
        let dir = Dir::new();
        let open = || {
            let builder = builder(Documents::memory(&lens), room).documents_max(most).concatenated();
            key.into_iter().fold(builder, PackedBuilder::shuffled).open(dir.path("bins")).unwrap()
        };
        let rows = plain(&open());
        let mut order: Vec<usize> = rows.concat().iter().map(|(document, _)| *document).collect();
        order.dedup();
        prop_assert_eq!(&rows, &concatenated(&order, &lens, room, most));
        order.sort_unstable();
        prop_assert!(order.into_iter().eq((0..lens.len()).filter(|document| lens[*document] > 0)));
        let again = open();
        prop_assert!(!again.built() && plain(&again) == rows);
        prop_assert_eq!((again.tokens(), again.cut_tokens()), (lens.iter().sum(), 0));
        let several = rows.concat().iter().filter(|(document, range)| range.start == 0 && range.end < lens[*document]).count();
        prop_assert_eq!(again.long_documents(), several as u64);
    }
}

#[test]
fn concatenated_rows_are_full_over_groups_of_documents() {
    let lens: Vec<u64> = (0..150_000).map(|document| document % 3).collect();
    let packed = builder(Documents::memory(&lens), 500)
        .documents_max(500)
        .concatenated();
    let packed = packed.open(Dir::new().path("bins")).unwrap();
    assert!(packed.len() == 300 && tokens_of(&packed) == bytes(&lens));
}

#[test]
fn concatenated_documents_that_follow_each_other_are_one_read() {
    let dir = Dir::new();
    let lens = some_lens(3000, 90);
    for (name, key) in [("in the file", None), ("shuffled", Some(1))] {
        let open = || {
            let documents = Documents::file(&dir.path("documents"), &lens);
            let builder = builder(documents, 100).concatenated();
            let builder = key.into_iter().fold(builder, PackedBuilder::shuffled);
            builder.open(dir.path(name)).unwrap()
        };
        let right = plain(&open());
        for (mode, direct) in had(READERS) {
            let loader = build(sevens(open(), mode, direct));
            let got = Got::epoch(&loader, 0);
            let is_right = got.iter().flat_map(loaded).eq(right.iter().cloned());
            assert!(is_right, "{name} {mode:?} {direct:?}");
            let reads = loader.snapshot().storage.counts.ops;
            let rows = open().len();
            let few = reads <= rows;
            let many = reads > 2 * rows;
            let is_right = if key.is_none() { few } else { many };
            assert!(
                mode != Mode::Pread || is_right,
                "{reads} reads of {rows} rows"
            );
        }
    }
}

fn some_lens(count: usize, most: u64) -> Vec<u64> {
    let mut draws = Draws::new(3, 0, 0, "lengths");
    (0..count)
        .map(|_| draws.below(most) * draws.below(2))
        .collect()
}

#[test]
fn every_reader_brings_the_rows_of_plain_calls() {
    let dir = Dir::new();
    let lens = some_lens(3000, 700);
    let documents = || builder(Documents::file(&dir.path("documents"), &lens), 1000).shuffled(1);
    let right = plain(&documents().open(dir.path("bins")).unwrap());
    assert_eq!(sorted(&right), expected(&lens, 1000, false));
    for ((mode, direct), rows) in had(READERS)
        .into_iter()
        .flat_map(|reader| [(reader, false), (reader, true)])
    {
        let open = || {
            let builder = match rows {
                true => documents().rows(dir.path("rows")),
                false => documents(),
            };
            builder.open(dir.path("bins")).unwrap()
        };
        let found = delivered(sevens(open(), mode, direct));
        assert!(found == right, "{mode:?} {direct:?}");
        // The tokens alone, which take the way of rows that are copied.
        let loader = build(sevens(open(), mode, direct).keep(["tokens"]));
        let got = Got::epoch(&loader, 0);
        let alone = bytes_of(&got, "tokens");
        let tokens = &tokens_of(&open())[..40_000];
        assert!(alone[..40_000] == *tokens, "{mode:?} {direct:?}");
    }
    let memory = documents()
        .open(dir.path("bins"))
        .unwrap()
        .in_memory()
        .unwrap();
    assert!(delivered(Loader::builder(memory).batch_size(7)) == right);
}

/// Each document can be read in place, but no second row begins at a multiple of the disk's blocks.
#[test]
fn documents_of_whole_blocks_in_rows_of_odd_length_are_read_by_every_reader() {
    let dir = Dir::new();
    let lens = vec![128; 500];
    let documents = || builder(Documents::file(&dir.path("documents"), &lens), 500);
    let right = plain(&documents().open(dir.path("bins")).unwrap());
    for (mode, direct) in had(READERS) {
        let packed = documents().open(dir.path("bins")).unwrap();
        let found = delivered(sevens(packed, mode, direct));
        assert!(found == right, "{mode:?} {direct:?}");
    }
}

#[test]
fn rows_with_one_document_each_have_padding() {
    let open = || builder(Documents::memory(&[60, 51, 100]), 100).open(Dir::new().path("bins"));
    let packed = open().unwrap();
    assert_eq!(packed.sizes().appended_max, 1);
    let right = plain(&packed);
    let sums = Dir::new().path("sums");
    let error = packed.facts(sums).checksums().open().unwrap_err();
    assert_eq!(error.kind(), Config, "{error}");
    assert!(delivered(Loader::builder(open().unwrap()).batch_size(3)) == right);
}

#[test]
fn a_file_of_rows_is_not_that_of_other_documents_of_the_same_lengths() {
    let dir = Dir::new();
    let tokens = |first: u32| Vec::from_iter((first..first + 64).flat_map(u32::to_le_bytes));
    let open = || {
        let records = Records::builder(32).field("tokens", DType::U32, [8]);
        let packed = records.open(dir.path("documents"))?.packed("tokens", 20);
        packed.rows(dir.path("rows")).open(dir.path("bins"))
    };
    dir.write("documents", &tokens(0));
    open().unwrap();
    open().unwrap();
    dir.write("documents", &tokens(1000));
    let words = "not the rows of these bins and documents";
    must_fail(open(), Changed, words);
}

#[test]
fn a_file_of_rows_holds_their_tokens_and_serves_only_its_bins() {
    let dir = Dir::new();
    let lens = some_lens(3000, 90);
    let bins = dir.path("bins");
    let rows = dir.path("new/rows");
    let packed = || builder(Documents::memory(&lens), 100).rows(&rows);
    let first = packed().open(&bins).unwrap();
    let whole = std::fs::read(&rows).unwrap();
    assert!(whole[..whole.len() - 16] == tokens_of(&first));
    assert!(sorted(&plain(&first)) == expected(&lens, 100, false));
    // Other tools read the file as tokens; its end fills no window.
    let tokens = Tokens::builder(DType::U32).window(100).header(0);
    let tokens = tokens.open(&rows).unwrap();
    assert_eq!((tokens.len(), tokens.leftover_tokens()), (first.len(), 4));
    let again = packed().open(&bins).unwrap();
    assert!(again.describe().contains("rows in") && again.identity() == first.identity());
    let changed = "not the rows of these bins";
    std::fs::write(&rows, &whole[1..]).unwrap();
    must_fail(packed().open(&bins), Changed, changed);
    let longer = [&whole[..], &[0]].concat();
    for foreign in [&whole[..whole.len() - 16], &longer, b"my notes", b""] {
        std::fs::write(&rows, foreign).unwrap();
        let words = "not a file of rows; it is not overwritten";
        must_fail(packed().open(&bins), Config, words);
    }
    let words = "bins and rows cannot share one file: name two";
    must_fail(packed().open(&rows), Config, words);
    std::fs::write(&rows, &whole).unwrap();
    let key = packed().shuffled(3).open(dir.path("other bins"));
    must_fail(key, Changed, changed);
    must_fail(packed().padding(7).open(&bins), Changed, changed);
}

#[test]
fn ranks_of_1_3_8_and_2_share_the_bins_of_an_epoch() {
    let dir = Dir::new();
    let lens = some_lens(2000, 90);
    let open = || {
        let builder = builder(Documents::memory(&lens), 100).shuffled(1);
        builder.open(dir.path("bins")).unwrap()
    };
    let bins = open().len();
    let mut draws = Draws::new(7, 0, 0, "places");
    for case in 0..10 {
        let mut state = None;
        let mut all = Vec::new();
        let mut left = bins.div_ceil(24);
        for world in [1, 3, 8, 2] {
            let steps = match world {
                2 => left,
                _ => draws.below(left / 2),
            };
            left -= steps;
            let mut after = None;
            for rank in 0..world {
                let builder = Loader::builder(open())
                    .order(Order::shuffled(case))
                    .rank(Rank::new(rank, world).unwrap())
                    .keep(["documents"]);
                let loader = build(builder.global_batch(24).last_batch(LastBatch::Mask));
                if let Some(state) = &state {
                    loader.resume(state).unwrap();
                }
                let mut epoch = loader.epoch(0).unwrap();
                for _ in 0..steps {
                    let got = Got::of(&epoch.next().unwrap().unwrap()).unwrap();
                    all.extend_from_slice(&got.ids[..got.valid]);
                }
                assert!(world != 2 || epoch.next().is_none());
                drop(epoch);
                after = Some(loader.state().unwrap());
            }
            state = after;
        }
        assert_eq!(all.len() as u64, bins, "case {case}");
        let distinct: BTreeSet<u64> = all.into_iter().collect();
        assert_eq!(distinct, (0..bins).collect(), "case {case}");
    }
}

/// Megatron's index of documents of i32.
fn megatron_index(lens: &[u64]) -> Vec<u8> {
    let count = lens.len() as u64;
    let mut index = [&b"MMIDIDX\0\0"[..], &1_u64.to_le_bytes(), &[4]].concat();
    index.extend(count.to_le_bytes());
    index.extend((count + 1).to_le_bytes());
    lens.iter()
        .for_each(|len| index.extend((*len as i32).to_le_bytes()));
    (0..lens.len()).for_each(|at| index.extend((4 * lens[..at].iter().sum::<u64>()).to_le_bytes()));
    (0..=count).for_each(|at| index.extend(at.to_le_bytes()));
    index
}

#[test]
fn documents_are_written_as_megatrons_files() {
    let dir = Dir::new();
    let lens = some_lens(300, 90);
    let prefix = dir.path("new/corpus.v1");
    let mut seen = 0;
    let mut write = |lens: &[u64]| {
        let documents = Documents::memory(lens);
        prepare::documents(&documents, "tokens", &prefix, |done| seen = done)
    };
    let written = write(&lens).unwrap();
    let empty = lens.iter().filter(|len| **len == 0).count() as u64;
    let found = (written.documents, written.empty, written.tokens);
    assert_eq!(found, (300, empty, lens.iter().sum()));
    must_fail(write(&lens), Config, "is not overwritten");
    assert!(seen == 300 && std::fs::read(&written.bin).unwrap() == bytes(&lens));
    assert!(written.bin.ends_with("corpus.v1.bin"));
    assert!(std::fs::read(&written.idx).unwrap() == megatron_index(&lens));
    // Token 0 of document 2^15 has bit 31.
    let mut high = vec![0; 1 << 15];
    high.push(1);
    let high = Documents::memory(&high);
    let result = prepare::documents(&high, "tokens", dir.path("high"), |_| {});
    let error = must_say(result, "a token of 2^31 or more");
    assert_eq!(error.site().sample, Some(1 << 15), "{error}");
    assert!(!dir.path("high.bin").exists() && !dir.path("high.idx").exists());
}

#[test]
fn megatron_documents_are_packed_and_joined_with_others() {
    let dir = Dir::new();
    let write = |name: &str, lens: &[u64]| {
        dir.write(&format!("{name}.bin"), &bytes(lens));
        dir.write(&format!("{name}.idx"), &megatron_index(lens));
        let documents = Megatron::builder().documents(1 << 30);
        let documents = documents.open(dir.path(name)).unwrap();
        let bins = dir.path(&format!("{name}.bins"));
        builder(documents, 100).split().open(bins).unwrap()
    };
    let first = some_lens(500, 250);
    let second = some_lens(300, 60);
    let a = write("a", &first);
    let b = write("b", &second);
    let rows_a = plain(&a);
    let rows_b = plain(&b);
    assert_eq!(sorted(&rows_a), expected(&first, 100, false));
    assert_eq!(sorted(&rows_b), expected(&second, 100, false));
    let both = Concat::new([a, b]).unwrap();
    let rows = delivered(Loader::builder(both).batch_size(5));
    assert!(rows == [rows_a, rows_b].concat());
}

#[test]
fn impossible_bins_are_refused_by_name() {
    let dir = Dir::new();
    let documents = || Documents::memory(&[5, 0, 30, 9, 40]);
    let place = dir.path("bins");
    let other = |field: &str| documents().packed(field, 20);
    let words = "a document of 30 tokens does not fit into a bin of 20";
    let error = must_fail(other("tokens").open(&place), Shape, words);
    assert_eq!(error.site().sample, Some(2));
    let cases = [
        (builder(documents(), 0), "bins of 0 tokens"),
        (builder(documents(), 1 << 30), "take 1 to 4194304"),
        (
            other("tokens").documents_max(0),
            "rows of 0 documents; take 1 to 32768",
        ),
        (other("text"), "no field `text`; the dataset has tokens"),
        (other("tokens").padding(1 << 32), "does not fit u32"),
    ];
    for (builder, words) in cases {
        must_fail(builder.open(&place), Config, words);
    }
    let empty = builder(Documents::memory(&[0, 0]), 20).open(&place);
    must_fail(empty, ErrorKind::Empty, "2 documents without a token");
    let records = Records::builder(8).field("tokens", DType::U32, [2, 1]);
    let records = records.open_bytes([0; 16]).unwrap().packed("tokens", 8);
    must_fail(
        records.open(&place),
        Config,
        "u32 [2, 1]; only rows of numbers can be packed",
    );
    let sums = dir.path("sums");
    let file = || Documents::file(&dir.path("documents"), &[5]);
    let checked = || {
        file()
            .facts(&sums)
            .checksums()
            .open()
            .unwrap()
            .packed("tokens", 20)
    };
    must_fail(checked().open(&place), Config, "has checksums");
    file().packed("tokens", 20).open(dir.path("kept")).unwrap();
    must_fail(checked().open(dir.path("kept")), Config, "has checksums");
    assert!(!place.exists());
    let packed = builder(documents(), 40).open(&place).unwrap();
    let facts = packed.facts(dir.path("other")).checksums().open();
    must_fail(facts, Config, "packed documents");
}

#[test]
fn a_file_of_bins_is_replaced_if_damaged_and_refused_if_foreign() {
    let dir = Dir::new();
    let lens = some_lens(3000, 90);
    let place = dir.path("new/bins");
    let open = || builder(Documents::memory(&lens), 100).open(&place);
    let right = plain(&open().unwrap());
    let whole = std::fs::read(&place).unwrap();
    let most = 6 * lens.iter().filter(|len| **len > 0).count() + 1000;
    assert!(whole.len() < most, "{} bytes", whole.len());
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 4;
    for damaged in [&flipped[..], &whole[..whole.len() / 2], &whole[..9], b""] {
        std::fs::write(&place, damaged).unwrap();
        let packed = open().unwrap();
        assert!(packed.built() && plain(&packed) == right);
        assert!(std::fs::read(&place).unwrap() == whole);
    }
    let same = || builder(Documents::memory(&lens), 100);
    for other in [
        builder(Documents::memory(&lens[1..]), 100),
        builder(Documents::memory(&lens), 99),
        same().shuffled(0),
        same().cut(),
        same().documents_max(65),
    ] {
        let words = "bins of another dataset, of other settings";
        must_fail(other.open(&place), Changed, words);
    }
    std::fs::write(&place, "my notes").unwrap();
    must_fail(open(), Config, "not a file of bins; it is not overwritten");
    assert_eq!(std::fs::read(&place).unwrap(), b"my notes");
}

#[test]
fn documents_of_other_lengths_than_packed_are_an_error_on_reading() {
    let dir = Dir::new();
    let lens = some_lens(300, 90);
    let place = dir.path("bins");
    drop(builder(Documents::memory(&lens), 100).open(&place).unwrap());
    // Of the same bytes in all, so that the identity is the same.
    let mut other = lens.clone();
    let at = (1..300)
        .find(|at| lens[at - 1] > 1 && lens[*at] > 0)
        .unwrap();
    (other[at - 1], other[at]) = (lens[at - 1] - 1, lens[at] + 1);
    let packed = builder(Documents::memory(&other), 100);
    let packed = packed.open(&place).unwrap();
    let errors = (0..packed.len()).filter_map(|bin| packed.read_sample(bin).err());
    let errors: Vec<Error> = errors.collect();
    assert!(!errors.is_empty() && errors.len() < 3, "{errors:?}");
    for error in errors {
        assert_eq!(error.kind(), Changed, "{error}");
        assert_says(&error, "changed since they were packed");
    }
    let loader = Loader::builder(packed).build().unwrap();
    let error = Got::try_epoch(&loader, 0).unwrap_err();
    assert_eq!(error.kind(), Changed, "{error}");
    assert!(error.site().sample.is_some(), "{error}");
}

#[test]
fn an_opening_that_is_stopped_leaves_no_file() {
    let dir = Dir::new();
    let lens = vec![1; 200_000];
    for pass in 0..3 {
        let stop = Stop::new();
        let documents = Documents {
            stop: Some(stop.clone()),
            ..Documents::memory(&lens)
        };
        let place = dir.path("file");
        let bins = |documents: Documents| documents.packed("tokens", 100);
        let error = stoppable(&stop, || match pass {
            0 => bins(documents).open(place).err(),
            1 => bins(documents).concatenated().open(place).err(),
            _ => documents.facts(place).checksums().open().err(),
        });
        let kind = error.map(|error| error.kind());
        assert_eq!(kind, Some(ErrorKind::Cancelled), "pass {pass}");
        let mut left = std::fs::read_dir(dir.path("")).unwrap();
        assert!(left.next().is_none(), "pass {pass}");
    }
}

/// A dataset that appends as it is told.
#[derive(Clone)]
struct Appends {
    documents: Documents,
    framed: bool,
    appended: Vec<u64>,
    most: usize,
}

impl Dataset for Appends {
    fn schema(&self) -> &[EncodedField] {
        self.documents.schema()
    }

    fn len(&self) -> u64 {
        1
    }

    fn sources(&self) -> &Arc<Sources> {
        self.documents.sources()
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            appended_max: self.most,
            ..Sizes::new(1000)
        }
    }

    fn extents<'a>(&'a self, _: u64, parts: &mut Parts<'a>) -> Result<()> {
        let extent = |len| Extent {
            source: SourceId::at(0),
            offset: 0,
            len,
        };
        match self.framed {
            true => parts.framed(0, extent(8)),
            false => parts.extent(0, extent(8)),
        }
        self.appended
            .iter()
            .for_each(|len| parts.append(0, extent(*len)));
        Ok(())
    }

    fn framed(&self) -> Option<&dyn Framed> {
        None
    }
}

/// A field, whether it is framed, the appended lengths, their maximum, and the outcome.
type Case = (
    Field,
    bool,
    &'static [u64],
    usize,
    std::result::Result<(), &'static str>,
);

#[test]
fn appended_extents_that_do_not_make_a_row_are_typed_errors() {
    let dir = Dir::new();
    let file = |schema: Field| Documents {
        schema: vec![EncodedField::raw(schema)],
        ..Documents::file(&dir.path("x"), &[20])
    };
    let fixed = || Field::fixed("tokens", DType::U32, [8]);
    let up_to = Field::up_to("tokens", DType::U32, 8);
    let short = Err("takes 32 bytes, the sample has 28");
    let long = Err("takes 32 bytes, the sample has 36");
    let many = Err("2 appended extents, the dataset's `appended_max` is 1");
    let loose = Err("which had no extent just before");
    let cases: [Case; 7] = [
        (fixed(), false, &[4, 20], 2, Ok(())),
        (fixed(), false, &[4, 16], 2, short),
        (fixed(), false, &[4, 24], 2, long),
        (fixed(), false, &[24, 4], 2, long),
        (fixed(), false, &[4, 20], 1, many),
        (fixed(), true, &[4, 20], 2, loose),
        (up_to, false, &[4, 20], 2, Err("it needs a fixed shape")),
    ];
    for (field, framed, appended, most, right) in cases {
        for mode in [Mode::Auto, Mode::Pread] {
            let appends = Appends {
                documents: file(field.clone()),
                framed,
                appended: appended.to_vec(),
                most,
            };
            let builder = Loader::builder(appends);
            let loader = build(builder.tuning(|t| t.reader(mode).direct(Direct::Off)));
            match (Got::try_epoch(&loader, 0), right) {
                (Ok(got), Ok(())) => {
                    let tokens = [0, 1, 0, 0, 1, 2, 3, 4];
                    assert_eq!(numbers::<u32>(got[0].bytes("tokens")), tokens);
                }
                (Err(error), Err(words)) => assert_says(&error, words),
                (found, right) => panic!("{found:?} for {right:?}"),
            }
        }
    }
    let hostile = Appends {
        documents: file(fixed()),
        framed: false,
        appended: vec![4, 20],
        most: usize::MAX,
    };
    let loader = Loader::builder(hostile).build();
    must_fail(loader, ErrorKind::Limit, "the limit is 65536");
}

/// A tar shard of the documents: tokens, labels of 2 bytes that are the tokens' places, and a text.
fn tar(dir: &Dir, lens: &[u64], labels: impl Fn(u64) -> u64) -> PathBuf {
    let member = |document: usize, ending: &str, bytes: &[u8]| {
        tar_member(&format!("{document:06}.{ending}"), bytes)
    };
    let mut all = Vec::new();
    for (document, len) in lens.iter().enumerate() {
        let tokens: Vec<u8> = (0..*len)
            .flat_map(|at| token(document, at).to_ne_bytes())
            .collect();
        let places: Vec<u8> = (0..labels(*len))
            .flat_map(|at| (at as i16).to_ne_bytes())
            .collect();
        all.extend(member(document, "tokens", &tokens));
        all.extend(member(document, "labels", &places));
        all.extend(member(document, "txt", b"beside"));
    }
    dir.write("shard.tar", &[all, vec![0; 1024]].concat())
}

fn tar_fields() -> TarBuilder {
    let field = |name: &str, dtype| Field::up_to(name, dtype, 1 << 20);
    Tar::builder()
        .bytes("txt")
        .raw(field("labels", DType::I16), "labels")
        .raw(field("tokens", DType::U32), "tokens")
}

/// Long documents split, in shuffled rows of 200 tokens.
fn split<D: Dataset>(documents: D, place: PathBuf) -> Packed<D> {
    let builder = builder(documents, 200).split().shuffled(4);
    builder.open(place).unwrap()
}

/// A dataset's name, and what copies its documents to a file.
type Door<'d> = (&'static str, Box<dyn Fn(&Path) -> Result<Copied> + 'd>);

#[test]
fn documents_in_frames_with_checksums_and_in_chunks_are_packed_from_a_copy() {
    let dir = Dir::new();
    let lens = some_lens(700, 300);
    let right = split(Documents::memory(&lens), dir.path("right"));
    let right = plain(&right);
    let tokens = bytes(&lens);
    let records: Vec<u8> = (0..lens.len())
        .flat_map(|document| {
            let start = 4 * lens[..document].iter().sum::<u64>() as usize;
            tf_record(&tokens[start..start + 4 * lens[document] as usize])
        })
        .collect();
    let records = dir.write("a.tfrecord", &records);
    let field = || EncodedField::raw(Field::up_to("tokens", DType::U32, 1 << 20));
    let shard = tar(&dir, &lens, |len| len);
    let framed = || TfRecord::builder().record(field()).open(&records);
    let sums = dir.path("sums");
    let file = || Documents::file(&dir.path("documents"), &lens);
    let checked = || file().facts(&sums).checksums().open();
    let one = ["tokens"];
    let doors: [Door<'_>; 4] = [
        (
            "plain",
            Box::new(|copy| Documents::memory(&lens).copied(one, copy)),
        ),
        ("tfrecord", Box::new(|copy| framed()?.copied(one, copy))),
        (
            "tar",
            Box::new(|copy| tar_fields().open(&shard)?.copied(one, copy)),
        ),
        ("checked", Box::new(|copy| checked()?.copied(one, copy))),
    ];
    for (name, door) in doors {
        let copy = dir.path(&format!("new/{name}.copy"));
        let open = || split(door(&copy).unwrap(), dir.path(&format!("{name}.bins")));
        let first = open();
        assert!(plain(&first) == right, "{name}");
        let copied = door(&copy).unwrap();
        assert!(!copied.built(), "{name}");
        assert_eq!(copied.tokens(), lens.iter().sum::<u64>(), "{name}");
        // Other tools read it as tokens.
        assert!(std::fs::read(&copy).unwrap().starts_with(&tokens), "{name}");
        let again = open();
        assert!(
            !again.built() && again.identity() == first.identity(),
            "{name}"
        );
        assert!(plain(&again) == right, "{name}");
        assert!(
            delivered(Loader::builder(again).batch_size(7)) == right,
            "{name}"
        );
    }
    // Rows in chunks, of which some cannot be opened.
    let rows: Vec<u8> = (0..96).collect();
    let chunks = || Chunks::open(&dir.write("chunks", &rows), &[1, 4, 1], 16);
    let copied = chunks().copied(["x"], dir.path("x")).unwrap();
    let packed = copied.packed("x", 32).open(dir.path("x.bins")).unwrap();
    assert!(packed.len() == 3 && tokens_of(&packed) == rows);
    let (part, _) = chunks().split(0.5, 1).unwrap();
    let words = "`dataset.copied` on the whole dataset, then take the part";
    must_say(part.copied(["x"], dir.path("part")), words);
    let mut bad = chunks();
    bad.bad.push(1);
    assert!(bad.copied(["x"], dir.path("bad")).is_err() && !dir.path("bad").exists());
}

#[test]
fn a_copy_is_kept_and_never_replaced() {
    let dir = Dir::new();
    let lens = some_lens(300, 90);
    let place = dir.path("copy");
    let copied = |lens: &[u64]| Documents::memory(lens).copied(["tokens"], &place);
    let first = copied(&lens).unwrap();
    assert!(first.built() && first.len() == 300);
    let start = 4 * lens[..7].iter().sum::<u64>() as usize;
    let seventh = &bytes(&lens)[start..][..4 * lens[7] as usize];
    assert_eq!(first.read_sample(7).unwrap(), [seventh]);
    let whole = std::fs::read(&place).unwrap();
    let words = "not the copied documents of this dataset";
    must_fail(copied(&lens[1..]), Changed, words);
    let mut other = lens.clone();
    other.swap(1, 2);
    other[1] += 1;
    must_fail(copied(&other), Changed, words);
    for back in [25, 24, 24 + 4 * 300] {
        let mut flipped = whole.clone();
        flipped[whole.len() - back] ^= 1;
        std::fs::write(&place, flipped).unwrap();
        must_fail(copied(&lens), Decode, "the copied documents are damaged");
    }
    std::fs::write(&place, &whole[4..]).unwrap();
    must_fail(copied(&lens), Decode, "the copied documents are damaged");
    for foreign in [&b"my notes"[..], b"", &whole[..whole.len() - 1]] {
        std::fs::write(&place, foreign).unwrap();
        let words = "not a file of copied documents; it is not overwritten";
        must_fail(copied(&lens), Config, words);
    }
    let twice = Documents::memory(&lens).copied(["tokens", "tokens"], &place);
    must_say(twice, "field `tokens` is named twice");
}

#[test]
fn fields_beside_the_tokens_stand_as_their_tokens_do() {
    let dir = Dir::new();
    let lens = some_lens(700, 300);
    let shard = tar(&dir, &lens, |len| len);
    let both = ["tokens", "labels"];
    let open = |rows: bool| {
        let tar = tar_fields().open(&shard).unwrap();
        let copied = tar.copied(both, dir.path("copy")).unwrap();
        let builder = builder(copied, 200)
            .beside(["labels"])
            .padding_of("labels", -100)
            .split()
            .shuffled(4);
        let builder = match rows {
            true => builder.rows(dir.path("rows")),
            false => builder,
        };
        builder.open(dir.path("bins")).unwrap()
    };
    let alone = plain(&split(Documents::memory(&lens), dir.path("alone")));
    let row = |fields: &[Vec<u8>]| {
        let tokens = numbers::<u32>(&fields[0]);
        let labels = numbers::<i16>(&fields[1]);
        for (token, label) in tokens.iter().zip(labels) {
            let is_padding = *token == PADDING;
            assert_eq!(label, if is_padding { -100 } else { *token as i16 });
        }
        runs_of(&fields[0], &fields[2..])
    };
    for rows in [false, true] {
        let packed = open(rows);
        let samples = (0..packed.len()).map(|bin| packed.read_sample(bin).unwrap());
        let samples: Vec<_> = samples.collect();
        assert!(
            samples.iter().map(|fields| row(fields)).eq(alone.clone()),
            "{rows}"
        );
        let right: Vec<u8> = samples
            .iter()
            .flat_map(|fields| fields[1].clone())
            .collect();
        for (mode, direct) in had(READERS) {
            let got = Got::epoch(&build(sevens(open(rows), mode, direct)), 0);
            let case = format!("{mode:?} {direct:?} {rows}");
            assert!(bytes_of(&got, "labels") == right, "{case}");
            let found = got.iter().flat_map(loaded);
            assert!(found.eq(alone.iter().cloned()), "{case}");
        }
    }
    let lost = tar(&dir, &lens, |len| len.min(250));
    let lost = tar_fields().open(lost).unwrap();
    let first = lens.iter().position(|len| *len > 250).unwrap();
    let len = lens[first];
    let words = format!("field `labels` has 250 elements and field `tokens` has {len}");
    let error = must_fail(lost.copied(both, dir.path("lost")), Shape, &words);
    assert_eq!(error.site().sample, Some(first as u64), "{error}");
    let unpacked = "a padding for field `labels`, which is not packed; packed fields: tokens";
    let cases: [(&[&str], &str, i64, &str); 4] = [
        (&["tokens"], "tokens", 0, "field `tokens` is named twice"),
        (&["labels"], "tokens", 0, "no field `labels`"),
        (&[], "labels", 0, unpacked),
        (
            &[],
            "tokens",
            -1,
            "padding -1 of field `tokens` does not fit u32",
        ),
    ];
    for (names, field, element, words) in cases {
        let documents = Documents::memory(&lens).packed("tokens", 300);
        let builder = documents
            .beside(names.iter().copied())
            .padding_of(field, element);
        must_say(builder.open(dir.path("none")), words);
    }
}

#[test]
fn the_report_says_why_rows_are_not_full() {
    let dir = Dir::new();
    let described = |name: &str, len, most: Option<usize>| {
        let builder = builder(Documents::memory(&vec![len; 3000]), 1024);
        let builder = most.into_iter().fold(builder, PackedBuilder::documents_max);
        builder.open(dir.path(name)).unwrap().describe()
    };
    let words = "18.70 % full (`documents_max(64)` limits 98 % of them: `documents_max(512)` has room for documents as short";
    for _ in 0..2 {
        assert_says(described("short", 3, None), words);
    }
    assert_says(described("raised", 3, Some(512)), "97.66 % full, with");
    let words = "50.10 % full (few documents fit together: use another row length, or concatenate";
    assert_says(described("half", 513, None), words);
    assert_says(described("full", 16, None), "full, with 3000 documents");
}

#[test]
fn documents_in_frames_and_chunks_are_refused() {
    let dir = Dir::new();
    dir.write("a.tfrecord", &tf_record(&[1; 8]));
    let field = EncodedField::raw(Field::up_to("tokens", DType::U32, 8));
    let framed = TfRecord::builder().record(field);
    let framed = framed.open(dir.path("a.tfrecord")).unwrap();
    let way = "`dataset.copied` copies them to a file";
    let packed = framed.packed("tokens", 8).open(dir.path("bins"));
    let error = must_fail(packed, Config, "is stored in frames");
    assert_says(&error, way);
    let chunks = Chunks::open(&dir.write("chunks", &[0; 64]), &[2, 2], 16);
    let name = chunks.schema()[0].name.clone();
    let packed = chunks.packed(&name, 8).open(dir.path("bins"));
    let error = must_fail(packed, Config, "chunks");
    assert_says(&error, way);
}
