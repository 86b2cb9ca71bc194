//! Datasets in chunks, through the loader: a toy format, and its file in memory as the oracle.

use crate::common::runs::within_a_minute;
use crate::common::*;
use bytes::Bytes;
use feedline::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, DatasetExt, Parts, Sizes};
use feedline::decode::Scratch;
use feedline::memory::MemoryTerm;
use feedline::storage::{Direct, Extent, Mode, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Error, ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Result, Status};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Chunks of `rows[i]` records of `RECORD` bytes, followed by one byte per record: the length of a
/// ragged field with the record's first bytes.
const RECORD: usize = 24;

struct Toy {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    starts: Vec<u64>,
    fault: Fault,
    opened: AtomicU64,
    log: std::sync::Mutex<Vec<usize>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    Error(usize),
    Panic(usize),
    Forgets(usize),
    Overflows(usize),
    OutsideOfTheFile(usize),
}

impl Toy {
    fn new(dir: &Dir, rows: &[u64], fault: Fault) -> (Arc<Self>, Vec<u8>) {
        let mut starts = vec![0];
        rows.iter()
            .for_each(|rows| starts.push(starts.last().unwrap() + rows));
        let total = *starts.last().unwrap() as usize;
        let bytes = noise(total * (RECORD + 1), 3);
        let path = dir.write("toy.bin", &bytes);
        let mut sources = Sources::new();
        sources.file(&path, bytes.len() as u64).unwrap();
        let schema = vec![
            EncodedField::raw(Field::fixed("record", DType::U8, [RECORD])),
            EncodedField::raw(Field::up_to("head", DType::U8, RECORD)),
        ];
        let opened = AtomicU64::new(0);
        let log = Default::default();
        (
            Arc::new(Self {
                sources: Arc::new(sources),
                schema,
                starts,
                fault,
                opened,
                log,
            }),
            bytes,
        )
    }

    fn offset(&self, chunk: usize) -> u64 {
        self.starts[chunk] * (RECORD as u64 + 1)
    }

    fn rows(&self, chunk: usize) -> u64 {
        self.starts[chunk + 1] - self.starts[chunk]
    }
}

impl Dataset for Toy {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        *self.starts.last().unwrap()
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(RECORD as u64 + 1)
    }
    fn extents<'a>(&'a self, _: u64, _: &mut Parts<'a>) -> Result<()> {
        panic!("a chunked dataset is never asked for samples");
    }
    fn chunked(&self) -> Option<&dyn Chunked> {
        Some(self)
    }
}

impl Chunked for Toy {
    fn starts(&self) -> &[u64] {
        &self.starts
    }
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        let source = SourceId::at(0);
        let rows = self.rows(chunk);
        let shift = if self.fault == Fault::OutsideOfTheFile(chunk) {
            1 << 40
        } else {
            0
        };
        extents.push(Extent {
            source,
            offset: self.offset(chunk) + shift,
            len: rows * RECORD as u64,
        });
        extents.push(Extent {
            source,
            offset: self.offset(chunk) + rows * RECORD as u64,
            len: rows,
        });
        Ok(())
    }
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        let rows = self.rows(chunk);
        ChunkBytes {
            encoded: rows * (RECORD as u64 + 1),
            opened: 2 * rows * RECORD as u64,
            scratch: 0,
        }
    }
    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        _: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        self.log.lock().unwrap().push(chunk);
        match self.fault {
            Fault::Error(at) if at == chunk => return Err(Error::decode("a broken chunk")),
            Fault::Panic(at) if at == chunk => panic!("a bug in the format"),
            Fault::Overflows(at) if at == chunk => return out.fixed(0, 1 << 30).map(|_| ()),
            _ => {}
        }
        out.fixed(0, RECORD)?.copy_from_slice(&pieces[0]);
        for (row, len) in pieces[1].iter().enumerate() {
            if self.fault == Fault::Forgets(chunk) && row == 1 {
                continue;
            }
            out.push(1, &pieces[0][row * RECORD..][..head_len(*len)])?;
        }
        Ok(())
    }
    fn chunk_name(&self, chunk: usize) -> String {
        format!("toy.bin, chunk {chunk}")
    }
}

fn head_len(byte: u8) -> usize {
    usize::from(byte) % (RECORD + 1)
}

/// Record and head of sample `id`, from the file's bytes alone.
fn oracle(toy: &Toy, bytes: &[u8], id: u64) -> (Vec<u8>, Vec<u8>) {
    let chunk = toy.starts.partition_point(|start| *start <= id) - 1;
    let base = toy.offset(chunk) as usize;
    let row = (id - toy.starts[chunk]) as usize;
    let record = bytes[base + row * RECORD..][..RECORD].to_vec();
    let len = head_len(bytes[base + toy.rows(chunk) as usize * RECORD + row]);
    (record.clone(), record[..len].to_vec())
}

/// Ids in order, every row compared with the oracle.
fn check(loader: &Loader, toy: &Toy, bytes: &[u8], epoch: u64) -> Vec<u64> {
    let mut ids = Vec::new();
    for batch in loader.epoch(epoch).unwrap() {
        let batch = batch.unwrap();
        let records = batch.field("record").unwrap();
        let heads = batch.field("head").unwrap();
        let lens = heads.lens().unwrap();
        for (row, id) in batch.ids().iter().enumerate() {
            let (record, head) = oracle(toy, bytes, *id);
            assert_eq!(
                records.as_slice::<u8>().unwrap()[row * RECORD..][..RECORD],
                record,
                "record of {id}"
            );
            assert_eq!(
                heads.as_slice::<u8>().unwrap()[row * RECORD..][..lens[row] as usize],
                head,
                "head of {id}"
            );
            ids.push(*id);
        }
    }
    ids
}

fn all(len: u64) -> Vec<u64> {
    (0..len).collect()
}

fn sorted(mut ids: Vec<u64>) -> Vec<u64> {
    ids.sort_unstable();
    ids
}

const ROWS: [u64; 9] = [7, 1, 0, 40, 13, 13, 64, 2, 5];

fn toy(dir: &Dir) -> (Arc<Toy>, Vec<u8>) {
    Toy::new(dir, &ROWS, Fault::None)
}

#[test]
fn chunks_deliver_every_sample_once_by_every_reader_and_order() {
    let dir = Dir::new();
    let (toy, bytes) = toy(&dir);
    for (mode, direct) in readers() {
        for batch_size in [1, 8, 50, 200] {
            let make = |order| -> Loader {
                let builder = Loader::builder(toy.clone()).order(order);
                build_by(builder.batch_size(batch_size), mode, direct)
            };
            let what = format!("{mode:?} {direct:?} batches of {batch_size}");
            let ids = check(&make(Order::sequential()), &toy, &bytes, 0);
            assert_eq!(ids, all(145), "{what}");
            for order in [
                Order::shuffled(4),
                Order::windowed(4, 1),
                Order::windowed(4, 3),
                Order::windowed(4, 99),
            ] {
                let loader = make(order);
                let first = check(&loader, &toy, &bytes, 0);
                let second = check(&loader, &toy, &bytes, 1);
                assert_ne!(first, second, "{what}");
                assert_eq!(sorted(first), all(145), "{what}");
                assert_eq!(sorted(second), all(145), "{what}");
            }
            let some = [144, 0, 0, 60, 7, 8];
            let ids = check(&make(Order::indices(some)), &toy, &bytes, 0);
            assert_eq!(ids, some, "{what}");
        }
    }
}

#[test]
fn order_does_not_depend_on_workers_slots_or_budget() {
    let dir = Dir::new();
    let (toy, bytes) = toy(&dir);
    let make = || {
        Loader::builder(toy.clone())
            .order(Order::windowed(9, 2))
            .batch_size(10)
    };
    let expected = check(&build(make()), &toy, &bytes, 5);
    for workers in [1, 2, 8] {
        let builders: [fn(LoaderBuilder) -> LoaderBuilder; 3] = [
            |b| b.tuning(|t| t.slots(1)),
            |b| b.tuning(|t| t.slots(12).depth(1)),
            |b| b.memory_budget(6 << 20),
        ];
        for builder in builders {
            let loader = build(builder(make().workers(workers)));
            assert_eq!(check(&loader, &toy, &bytes, 5), expected);
        }
    }
}

#[test]
fn a_subset_and_a_split_of_chunks_deliver_their_samples() {
    let dir = Dir::new();
    let (toy, bytes) = toy(&dir);
    let ids = vec![140, 3, 3, 50, 8];
    let subset = toy.clone().subset(ids.clone()).unwrap();
    let loader = build(Loader::builder(subset).batch_size(2));
    let mut got = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        let records = batch.field("record").unwrap();
        for (row, id) in batch.ids().iter().enumerate() {
            let origin = ids[*id as usize];
            assert_eq!(
                records.as_slice::<u8>().unwrap()[row * RECORD..][..RECORD],
                oracle(&toy, &bytes, origin).0
            );
            got.push(*id);
        }
    }
    assert_eq!(got, all(5));
    let (a, b) = toy.clone().split(0.3, 1).unwrap();
    let mut seen = HashSet::new();
    for part in [a, b] {
        let inner = part.clone();
        let loader = build(Loader::builder(part).batch_size(9));
        for batch in loader.epoch(0).unwrap() {
            seen.extend(batch.unwrap().ids().iter().map(|id| inner.origin(*id)));
        }
    }
    assert_eq!(seen.len(), 145);
    let part = toy.subset(vec![1, 2]).unwrap();
    let windowed = Loader::builder(part).order(Order::windowed(1, 2));
    must_say(windowed.build(), "whole dataset");
}

#[test]
fn a_windowed_order_opens_every_chunk_once_per_epoch() {
    let dir = Dir::new();
    let (toy, bytes) = Toy::new(&dir, &[50; 20], Fault::None);
    let loader = build(
        Loader::builder(toy.clone())
            .order(Order::windowed(1, 4))
            .batch_size(25),
    );
    let ids = check(&loader, &toy, &bytes, 0);
    assert_eq!(toy.opened.load(Ordering::Relaxed), 20);
    let chunks = loader.report().total.decode.chunks.unwrap();
    assert_eq!((chunks.opened, chunks.count), (20, 20));
    // The first 200 positions are the samples of four chunks, mixed.
    let chunks: Vec<u64> = ids[..200].iter().map(|id| id / 50).collect();
    assert_eq!(chunks.iter().collect::<HashSet<_>>().len(), 4);
    let changes = chunks.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes > 120, "{changes} of about 150");
    check(&loader, &toy, &bytes, 1);
    assert!(toy.opened.load(Ordering::Relaxed) <= 40);
}

#[test]
fn a_sequential_order_keeps_few_chunks_open() {
    let dir = Dir::new();
    let (toy, bytes) = Toy::new(&dir, &[50; 20], Fault::None);
    let sequential = build(Loader::builder(toy.clone()).workers(2));
    assert_eq!(sequential.plan().term(MemoryTerm::CHUNKS).count, 4);
    check(&sequential, &toy, &bytes, 0);
    assert_eq!(*toy.log.lock().unwrap().iter().max().unwrap(), 19);
    let shuffled = build(Loader::builder(toy.clone()).order(Order::shuffled(1)));
    assert_eq!(shuffled.plan().term(MemoryTerm::CHUNKS).count, 20);
    let before = toy.opened.load(Ordering::Relaxed);
    (0..3).for_each(|epoch| drop(check(&shuffled, &toy, &bytes, epoch)));
    // All stay open across epochs of one run; a separate run opens only the missing chunks.
    assert_eq!(toy.opened.load(Ordering::Relaxed) - before, 20);
}

#[test]
fn chunks_in_memory_are_opened_without_a_read() {
    let dir = Dir::new();
    let (toy, bytes) = toy(&dir);
    for (mode, direct) in readers() {
        let memory = toy.clone().in_memory().unwrap();
        let builder = Loader::builder(memory)
            .order(Order::windowed(1, 3))
            .batch_size(9);
        let loader = build_by(builder, mode, direct);
        assert_eq!(sorted(check(&loader, &toy, &bytes, 0)), all(145));
        assert_eq!(loader.report().total.storage.counts.ops, 0);
    }
}

#[test]
fn epochs_follow_each_other_in_one_iterator() {
    let dir = Dir::new();
    let (toy, _) = toy(&dir);
    let loader = build(
        Loader::builder(toy.clone())
            .order(Order::windowed(1, 2))
            .batch_size(100),
    );
    let ids: Vec<u64> = loader
        .epochs(0..5)
        .unwrap()
        .flat_map(|batch| batch.unwrap().ids().to_vec())
        .collect();
    assert_eq!(ids.len(), 5 * 145);
    for epoch in ids.chunks(145) {
        assert_eq!(sorted(epoch.to_vec()), all(145));
    }
}

#[test]
fn an_unreadable_chunk_fails_its_own_samples_only() {
    let dir = Dir::new();
    let fewer = "40 samples, but 39 of field `head`";
    let reserved = "but only 4096 were reserved by its metadata";
    let outside = "ends past the source's indexed length";
    let table = [
        (Fault::Error(3), ErrorKind::Decode, "a broken chunk"),
        (Fault::Panic(3), ErrorKind::Panicked, "a bug in the format"),
        (Fault::Forgets(3), ErrorKind::Decode, fewer),
        (Fault::Overflows(3), ErrorKind::Limit, reserved),
        (Fault::OutsideOfTheFile(3), ErrorKind::Truncated, outside),
    ];
    for (fault, kind, words) in table {
        for (mode, direct) in had([
            (Mode::Auto, Direct::Auto),
            (Mode::Uring, Direct::On),
            (Mode::Pread, Direct::Off),
        ]) {
            let (toy, _) = Toy::new(&dir, &ROWS, fault);
            let builder = Loader::builder(toy).batch_size(4);
            let loader = build_by(builder, mode, direct);
            let mut epoch = loader.epoch(0).unwrap();
            // Samples 0 to 7 lie in the chunks before the bad one.
            assert_eq!(epoch.next().unwrap().unwrap().ids(), [0, 1, 2, 3]);
            assert_eq!(epoch.next().unwrap().unwrap().ids(), [4, 5, 6, 7]);
            let error = must_fail(epoch.next().unwrap(), kind, words);
            assert_eq!(error.site().sample, Some(8), "{error}");
            assert_says(&error, "toy.bin");
            assert!(epoch.next().is_none());
            drop(epoch);
            // The loader still works.
            let again = loader.epoch(1).unwrap().next();
            assert_eq!(again.unwrap().unwrap().ids(), [0, 1, 2, 3]);
        }
    }
}

#[test]
fn a_budget_that_does_not_hold_the_chunks_is_refused_by_name() {
    let dir = Dir::new();
    let (toy, _) = Toy::new(&dir, &[30_000; 30], Fault::None);
    let make = |order| {
        Loader::builder(toy.clone())
            .order(order)
            .memory_budget(24 << 20)
            .workers(1)
    };
    let error = make(Order::shuffled(1)).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget);
    let windowed = "a windowed order needs few";
    for words in ["30 at once", windowed, "toy.bin, chunk 0", "open chunks"] {
        assert_says(&error, words);
    }
    let loader = build(make(Order::windowed(1, 3)));
    assert!(loader.plan().total() <= 24 << 20);
    let count = loader.plan().term(MemoryTerm::CHUNKS).count;
    assert!((3..=6).contains(&count), "{}", loader.plan());
}

#[test]
fn the_epoch_after_a_dropped_epoch_is_whole() {
    let dir = Dir::new();
    let (toy, bytes) = toy(&dir);
    for (mode, direct) in had([(Mode::Auto, Direct::Auto), (Mode::Uring, Direct::On)]) {
        for order in [
            Order::sequential(),
            Order::windowed(1, 2),
            Order::shuffled(1),
        ] {
            let loader = build(
                Loader::builder(toy.clone())
                    .order(order)
                    .batch_size(10)
                    .tuning(|t| t.slots(3).reader(mode).direct(direct)),
            );
            for stop in 0..15 {
                let taken = loader
                    .epoch(stop)
                    .unwrap()
                    .take(stop as usize)
                    .map(|batch| batch.unwrap().len());
                assert_eq!(taken.sum::<usize>(), (10 * stop as usize).min(145));
            }
            assert_eq!(sorted(check(&loader, &toy, &bytes, 99)), all(145));
        }
    }
}

#[test]
fn a_windowed_order_of_records_is_the_same_in_memory() {
    let dir = crate::common::Dir::new();
    let path = dir.write("a.bin", b"");
    // Three runs of 32 MiB, without a byte on the disk.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(96 << 20).unwrap();
    let records = || records(&path, 1 << 20);
    let ids = |builder: LoaderBuilder| {
        let loader = build(builder.order(Order::windowed(1, 1)));
        loader.preview(0, 96).unwrap()
    };
    let expected = ids(Loader::builder(records()));
    let of_one_file = |run: &[u64]| run.iter().all(|id| id / 32 == run[0] / 32);
    assert!(expected.chunks(32).all(of_one_file), "{expected:?}");
    let memory = records().in_memory().unwrap();
    assert_eq!(ids(Loader::builder(memory)), expected);
}

/// A dataset with correct answers during `build` and wrong ones afterwards.
struct Liar {
    toy: Arc<Toy>,
    built: std::sync::atomic::AtomicBool,
    lie: Lie,
    few: Vec<u64>,
    many: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    ManyPieces,
    NoPieces,
    MoreBytes,
    FewerStarts,
    HugeStarts,
    NotChunked,
    PanicsInStarts,
    PanicsInChunked,
    PanicsInExtents,
    PanicsInBytes,
    PanicsInNameOfAnError,
    PanicsInInner,
    InnerOutside,
    NotWhole,
}

impl Liar {
    fn is(&self, lie: Lie) -> bool {
        self.built.load(Ordering::Relaxed) && self.lie == lie
    }
}

impl Dataset for Liar {
    fn schema(&self) -> &[EncodedField] {
        self.toy.schema()
    }
    fn len(&self) -> u64 {
        self.toy.len()
    }
    fn sources(&self) -> &Arc<Sources> {
        self.toy.sources()
    }
    fn sizes(&self) -> Sizes {
        self.toy.sizes()
    }
    fn extents<'a>(&'a self, _: u64, _: &mut Parts<'a>) -> Result<()> {
        panic!("a chunked dataset is never asked for samples");
    }
    fn chunked(&self) -> Option<&dyn Chunked> {
        assert!(!self.is(Lie::PanicsInChunked), "a bug in chunked()");
        (!self.is(Lie::NotChunked)).then_some(self)
    }
}

impl Chunked for Liar {
    fn starts(&self) -> &[u64] {
        assert!(!self.is(Lie::PanicsInStarts), "a bug in starts()");
        match self.lie {
            Lie::FewerStarts if self.is(self.lie) => &self.few,
            Lie::HugeStarts if self.is(self.lie) => &self.many,
            _ => self.toy.starts(),
        }
    }
    fn is_whole(&self) -> bool {
        !matches!(
            self.lie,
            Lie::PanicsInInner | Lie::InnerOutside | Lie::NotWhole
        )
    }
    fn inner(&self, sample: u64) -> u64 {
        assert!(!self.is(Lie::PanicsInInner), "a bug in inner()");
        if self.is(Lie::InnerOutside) {
            u64::MAX - sample
        } else {
            sample
        }
    }
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        assert!(!self.is(Lie::PanicsInExtents), "a bug in chunk_extents()");
        self.toy.chunk_extents(chunk, extents)?;
        if self.is(Lie::NoPieces) {
            extents.clear();
        }
        if self.is(Lie::MoreBytes) {
            extents.iter_mut().for_each(|extent| extent.len *= 2);
        }
        if self.is(Lie::ManyPieces) {
            let whole = std::mem::take(extents);
            extents.extend(whole.into_iter().flat_map(|extent| {
                (0..extent.len).map(move |at| Extent {
                    offset: extent.offset + at,
                    len: 1,
                    ..extent
                })
            }));
        }
        Ok(())
    }
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        assert!(!self.is(Lie::PanicsInBytes), "a bug in chunk_bytes()");
        self.toy.chunk_bytes(chunk)
    }
    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        if self.is(Lie::PanicsInNameOfAnError) {
            return Err(Error::decode("a broken chunk"));
        }
        self.toy.open_chunk(chunk, pieces, scratch, out)
    }
    fn chunk_name(&self, chunk: usize) -> String {
        assert!(
            !self.is(Lie::PanicsInNameOfAnError),
            "a bug in chunk_name()"
        );
        self.toy.chunk_name(chunk)
    }
}

#[test]
fn a_dataset_that_lies_about_its_chunks_is_an_error() {
    const LIES: [Lie; 14] = [
        Lie::ManyPieces,
        Lie::NoPieces,
        Lie::MoreBytes,
        Lie::FewerStarts,
        Lie::HugeStarts,
        Lie::NotChunked,
        Lie::PanicsInStarts,
        Lie::PanicsInChunked,
        Lie::PanicsInExtents,
        Lie::PanicsInBytes,
        Lie::PanicsInNameOfAnError,
        Lie::PanicsInInner,
        Lie::InnerOutside,
        Lie::NotWhole,
    ];
    for lie in LIES {
        for (mode, direct) in had([
            (Mode::Auto, Direct::Auto),
            (Mode::Uring, Direct::On),
            (Mode::Pread, Direct::Off),
        ]) {
            let what = format!("{lie:?} {mode:?} {direct:?}");
            let ended = within_a_minute(&what, move || {
                let dir = Dir::new();
                let (toy, _) = Toy::new(&dir, &[5000, 300, 300, 300], Fault::None);
                let few = vec![0, 100];
                let many = vec![0, 1 << 40, 1 << 41, 1 << 42, 1 << 43];
                let liar = Arc::new(Liar {
                    toy,
                    built: false.into(),
                    lie,
                    few,
                    many,
                });
                let loader = build(
                    Loader::builder(liar.clone())
                        .batch_size(100)
                        .workers(1)
                        .tuning(|t| t.slots(2).depth(2).reader(mode).direct(direct)),
                );
                liar.built.store(true, Ordering::Relaxed);
                let batches: Vec<Result<usize>> = loader
                    .epoch(0)
                    .unwrap()
                    .map(|batch| batch.map(|batch| batch.len()))
                    .collect();
                batches
                    .into_iter()
                    .collect::<Result<Vec<_>>>()
                    .map(|lens| lens.iter().sum::<usize>())
            });
            match ended {
                // Answers that the loader never asks for again are harmless.
                Ok(rows) => assert_eq!(rows, 5900, "{what}"),
                Err(error) => {
                    use ErrorKind::{Decode, Limit, Panicked, Truncated, User};
                    assert!(
                        matches!(error.kind(), User | Panicked | Limit | Decode | Truncated),
                        "{what}: {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_memory_plan_counts_the_sequence_of_open_chunks() {
    let dir = Dir::new();
    let tables = |chunks: usize, order: Order| {
        let (toy, _) = Toy::new(&dir, &vec![1; chunks], Fault::None);
        build(Loader::builder(toy).order(order))
            .plan()
            .term(MemoryTerm::TABLES)
            .bytes()
    };
    let few = tables(10, Order::windowed(1, 2));
    // For two epochs, at least three numbers per chunk: its place, the samples before it, and its
    // group.
    assert!(tables(5010, Order::windowed(1, 2)) - few >= 2 * 5000 * (8 + 8 + 32));
    assert_eq!(
        tables(5010, Order::shuffled(1)),
        tables(10, Order::shuffled(1)),
        "all are open all the time"
    );
}

/// An unreadable chunk, and the substitutes of its samples.
#[test]
fn an_unreadable_chunk_is_substituted_row_by_row() {
    let dir = Dir::new();
    // The samples of chunks 4 and 7.
    let ranges = [(4, 48..61_u64), (7, 138..140)];
    for (chunk, bad) in ranges {
        for fault in [
            Fault::Error(chunk),
            Fault::Panic(chunk),
            Fault::OutsideOfTheFile(chunk),
            Fault::Overflows(chunk),
        ] {
            let (toy, bytes) = Toy::new(&dir, &ROWS, fault);
            let windowed = || Order::windowed(4, 2);
            let orders = [
                Order::sequential(),
                Order::shuffled(4),
                windowed(),
                windowed().lanes(2),
            ];
            for (index, order) in orders.into_iter().enumerate() {
                let mut first = None;
                for (workers, mode) in [(1, Mode::Pread), (3, Mode::Auto), (2, reader(2).0)] {
                    let builder = Loader::builder(toy.clone())
                        .order(order.clone())
                        .batch_size(8)
                        .workers(workers);
                    let policy = OnBadSample::Substitute { budget: 13 };
                    let loader = build(builder.tuning(|t| t.reader(mode)).on_bad_sample(policy));
                    let planned = loader.preview(0, 1000).unwrap();
                    let what = format!("chunk {chunk}, order {index}, {workers} workers");
                    let mut status = Vec::new();
                    for batch in loader.epoch(0).unwrap() {
                        status.extend_from_slice(batch.unwrap().status());
                    }
                    let ids = check(&loader, &toy, &bytes, 0);
                    for ((planned, id), status) in planned.iter().zip(&ids).zip(status) {
                        let substituted = bad.contains(planned);
                        assert_eq!(
                            status == Status::Substitute as u8,
                            substituted,
                            "{what}: {planned}"
                        );
                        assert!(
                            if substituted {
                                !bad.contains(id)
                            } else {
                                planned == id
                            },
                            "{what}: {planned} {id}"
                        );
                    }
                    let ledger = loader.ledger();
                    assert_eq!(ledger.substituted, 2 * (bad.end - bad.start), "{what}");
                    let named = ledger
                        .samples
                        .iter()
                        .all(|bad| bad.member == Some(format!("toy.bin, chunk {chunk}")));
                    assert!(named, "{what}: {ledger:?}");
                    assert_eq!(*first.get_or_insert(ids.clone()), ids, "{what}");
                }
            }
        }
    }
}

#[test]
fn an_undecodable_row_is_replaced_from_an_open_chunk() {
    let dir = Dir::new();
    let (toy, bytes) = toy(&dir);
    for order in [
        Order::sequential(),
        Order::windowed(4, 2),
        Order::shuffled(1),
    ] {
        let builder = Loader::builder(toy.clone())
            .order(order)
            .batch_size(8)
            .workers(2);
        // Chunk 1 holds only sample 7, and a sequential order has no other chunk open.
        let loader = build(
            builder
                .map(|_, ctx| match ctx.id() {
                    7 | 50 | 144 => Err(Error::user("odd")),
                    _ => Ok(()),
                })
                .on_bad_sample(OnBadSample::Substitute { budget: 3 }),
        );
        let planned = loader.preview(0, 1000).unwrap();
        let ids = check(&loader, &toy, &bytes, 0);
        let others: Vec<_> = planned
            .iter()
            .zip(&ids)
            .filter(|(planned, id)| planned != id)
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(sorted(others), [7, 50, 144]);
        let opened = toy.opened.swap(0, Ordering::Relaxed);
        assert!(opened <= 2 * ROWS.len() as u64, "{opened} chunks opened");
    }
}
