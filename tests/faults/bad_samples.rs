//! Bad samples: their substitutes, their ledger entries, and the cases that stay errors.

use crate::common::toys::Sampled;
use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Framed, Parts, Sizes};
use feedline::error::Stage;
use feedline::memory::MemoryTerm;
use feedline::order::LastBatch;
use feedline::storage::{Extent, Mode, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::unstable::{Call, Fault, Faulty};
use feedline::{
    BadSample, Error, ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Rank, Result, Status,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

const BYTES: usize = 700;

/// One file per sample.
struct Files {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    paths: Vec<PathBuf>,
}

impl Files {
    fn new(dir: &Dir, count: usize) -> Arc<Self> {
        let mut sources = Sources::new();
        let paths: Vec<_> = (0..count)
            .map(|id| dir.write(&format!("{id}.bin"), &bytes_of(id as u64)))
            .collect();
        for path in &paths {
            sources.file(path, BYTES as u64).unwrap();
        }
        let schema = vec![EncodedField::raw(Field::fixed("bytes", DType::U8, [BYTES]))];
        Arc::new(Self {
            sources: Arc::new(sources),
            schema,
            paths,
        })
    }
}

impl Dataset for Files {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        self.paths.len() as u64
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(BYTES as u64)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        parts.extent(
            0,
            Extent {
                source: SourceId::at(sample as usize),
                offset: 0,
                len: BYTES as u64,
            },
        );
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Files {
    fn member(&self, sample: u64, _: Option<usize>) -> Option<String> {
        Some(format!("number {sample}"))
    }
}

fn bytes_of(id: u64) -> Vec<u8> {
    noise(BYTES, id + 1)
}

const SUBSTITUTE: OnBadSample = OnBadSample::Substitute { budget: 1000 };

/// A delivered row and its status.
#[derive(Clone, Debug, PartialEq)]
struct Delivered {
    id: u64,
    status: u8,
    right: bool,
}

fn deliver(loader: &Loader, epoch: u64) -> Result<Vec<Delivered>> {
    let mut out = Vec::new();
    for batch in loader.epoch(epoch)? {
        let batch = batch?;
        let rows = rows(&batch).into_iter().zip(batch.status());
        out.extend(rows.map(|((id, bytes), status)| Delivered {
            id,
            status: *status,
            right: bytes == bytes_of(id),
        }));
    }
    Ok(out)
}

/// Checks a delivery in which the samples `bad` are unreadable; panics at the first violation.
fn check(planned: &[u64], got: &[Delivered], bad: &BTreeSet<u64>, ledger: &[BadSample]) {
    assert_eq!(got.len(), planned.len());
    let mut times = BTreeMap::new();
    for (row, (planned, got)) in planned.iter().zip(got).enumerate() {
        assert!(got.right, "row {row} does not hold sample {}", got.id);
        if bad.contains(planned) {
            assert!(
                !bad.contains(&got.id) && got.status == Status::Substitute as u8,
                "row {row}: {got:?}"
            );
            *times.entry(*planned).or_insert(0_u64) += 1;
        } else {
            assert_eq!(
                (got.id, got.status),
                (*planned, Status::Real as u8),
                "row {row}"
            );
        }
    }
    let named: BTreeMap<_, _> = ledger
        .iter()
        .filter(|bad| bad.times > 0)
        .map(|bad| (bad.sample, bad.times))
        .collect();
    assert_eq!(named, times, "{ledger:?}");
    assert!(
        ledger.iter().all(|entry| bad.contains(&entry.sample)),
        "{ledger:?}"
    );
}

fn files(dataset: &Arc<Files>) -> LoaderBuilder {
    Loader::builder(dataset.clone())
        .order(Order::shuffled(3))
        .batch_size(8)
        .on_bad_sample(SUBSTITUTE)
}

#[test]
fn bad_files_get_the_same_substitutes_by_every_reader() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 60);
    std::fs::remove_file(&dataset.paths[5]).unwrap();
    dir.write("17.bin", &[1; BYTES - 1]);
    dir.write("18.bin", &[1; BYTES + 1]);
    std::fs::remove_file(&dataset.paths[40]).unwrap();
    std::fs::create_dir(&dataset.paths[40]).unwrap();
    let bad = BTreeSet::from([5, 17, 18, 40]);
    let mut first = None;
    for (mode, direct) in readers() {
        for workers in [1, 3] {
            let loader = build(
                files(&dataset)
                    .tuning(|t| t.reader(mode).direct(direct))
                    .workers(workers),
            );
            let planned = loader.preview(0, 100).unwrap();
            let got = deliver(&loader, 0).unwrap();
            let ledger = loader.ledger();
            check(&planned, &got, &bad, &ledger.samples);
            assert_eq!(ledger.substituted, 4);
            let kinds: BTreeMap<_, _> = ledger
                .samples
                .iter()
                .map(|bad| (bad.sample, bad.kind))
                .collect();
            let expected = [
                (5, ErrorKind::NotFound),
                (17, ErrorKind::Changed),
                (18, ErrorKind::Changed),
                (40, ErrorKind::NotAFile),
            ];
            assert_eq!(kinds, BTreeMap::from(expected), "{mode:?} {direct:?}");
            for entry in &ledger.samples {
                assert_eq!(
                    entry.path.as_ref(),
                    Some(&dataset.paths[entry.sample as usize])
                );
                assert_eq!((entry.offset, entry.length), (Some(0), Some(BYTES as u64)));
                assert_eq!(entry.member, Some(format!("number {}", entry.sample)));
            }
            assert_eq!(
                *first.get_or_insert(got.clone()),
                got,
                "{mode:?} {direct:?} {workers}"
            );
            assert!(
                loader
                    .report()
                    .to_string()
                    .contains("bad       4 rows substituted, 4 bad samples")
            );
        }
    }
}

#[test]
fn samples_that_decoders_refuse_are_substituted() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 50);
    let bad = BTreeSet::from([3, 4, 5, 29]);
    let loader = build(files(&dataset).map(|row, ctx| match ctx.id() {
        3 | 4 => Err(Error::user("not this one")),
        5 => panic!("nor this"),
        29 => row.copy_from(0, &[1]),
        _ => Ok(()),
    }));
    let mut stand_ins = Vec::new();
    for epoch in 0..3 {
        let got = deliver(&loader, epoch).unwrap();
        let ledger = loader.ledger();
        let planned = loader.preview(epoch, 100).unwrap();
        assert!(ledger.samples.iter().all(|entry| entry.times == epoch + 1));
        let once: Vec<_> = ledger
            .samples
            .into_iter()
            .map(|entry| with_times(entry, 1))
            .collect();
        check(&planned, &got, &bad, &once);
        let ids = |got: &[Delivered]| {
            got.iter()
                .filter(|row| row.status == 2)
                .map(|row| row.id)
                .collect::<Vec<_>>()
        };
        stand_ins.push(ids(&got));
    }
    let causes: BTreeMap<_, _> = loader
        .ledger()
        .samples
        .into_iter()
        .map(|bad| (bad.sample, (bad.kind, bad.stage)))
        .collect();
    assert_eq!(causes[&3], (ErrorKind::User, Stage::Map));
    assert_eq!(causes[&5], (ErrorKind::Panicked, Stage::Map));
    assert_eq!(causes[&29].0, ErrorKind::Shape);
    assert!(
        stand_ins[0] != stand_ins[1] || stand_ins[1] != stand_ins[2],
        "{stand_ins:?}"
    );
}

fn with_times(mut entry: BadSample, times: u64) -> BadSample {
    entry.times = times;
    entry
}

#[test]
fn one_bad_sample_over_the_budget_ends_the_iterator() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 40);
    for id in [7, 20, 33] {
        std::fs::remove_file(&dataset.paths[id]).unwrap();
    }
    for (budget, enough) in [(3, true), (2, false), (0, false)] {
        for workers in [1, 4] {
            let loader = build(
                files(&dataset)
                    .order(Order::sequential())
                    .workers(workers)
                    .on_bad_sample(OnBadSample::Substitute { budget }),
            );
            for epoch in 0..2 {
                let got = deliver(&loader, epoch);
                assert_eq!(got.is_ok(), enough, "{budget}");
                let Err(error) = got else { continue };
                assert_eq!(error.kind(), ErrorKind::BadSamples);
                // The batches before it were delivered, always the same number.
                if epoch == 0 {
                    assert_eq!(
                        loader.report().total.consumer.batches,
                        [0, 0, 4][budget as usize],
                        "{budget}"
                    );
                    assert!(error.message().contains("sample 7 in"), "{error}");
                    assert_eq!(
                        error.site().path.as_ref(),
                        Some(&dataset.paths[[7, 20, 33][budget as usize]])
                    );
                }
            }
        }
    }
}

#[test]
fn a_dataset_without_good_samples_fails_with_the_first_row() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 30);
    dataset
        .paths
        .iter()
        .for_each(|path| std::fs::remove_file(path).unwrap());
    let loader = build(files(&dataset).order(Order::sequential()));
    let error = deliver(&loader, 0).unwrap_err();
    assert_eq!(
        (error.kind(), error.site().sample),
        (ErrorKind::NotFound, Some(0))
    );
    assert!(error.message().contains("no substitute found"), "{error}");
    let one = Files::new(&dir, 1);
    std::fs::remove_file(&one.paths[0]).unwrap();
    assert_eq!(
        deliver(&build(files(&one)), 0).unwrap_err().kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn a_substitute_always_comes_from_the_order() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 60);
    for id in [0, 2, 4, 6] {
        std::fs::remove_file(&dataset.paths[id]).unwrap();
    }
    let even: Vec<u64> = (0..60).step_by(2).collect();
    let loader = build(files(&dataset).order(Order::indices(even.clone())));
    let got = deliver(&loader, 0).unwrap();
    assert!(got.iter().all(|row| row.right && row.id % 2 == 0));
    let loader = build(
        Loader::builder(dataset.subset(even).unwrap())
            .batch_size(8)
            .on_bad_sample(SUBSTITUTE)
            .order(Order::shuffled(1)),
    );
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        assert!(
            rows(&batch)
                .iter()
                .all(|(id, bytes)| *bytes == bytes_of(id * 2))
        );
    }
    assert_eq!(loader.ledger().substituted, 4);
}

#[test]
fn all_ranks_substitute_alike_and_padding_stays() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 21);
    for id in [1, 20] {
        std::fs::remove_file(&dataset.paths[id]).unwrap();
    }
    let builder = || {
        Loader::builder(dataset.clone())
            .global_batch(4)
            .last_batch(LastBatch::Pad)
            .on_bad_sample(SUBSTITUTE)
    };
    let whole: Vec<_> = deliver(&build(builder()), 0).unwrap();
    let parts: Vec<_> = (0..2)
        .map(|rank| deliver(&build(builder().rank(Rank::new(rank, 2).unwrap())), 0).unwrap())
        .collect();
    let both: Vec<_> = whole
        .chunks(4)
        .map(|batch| batch.iter().map(|row| row.id).collect::<BTreeSet<_>>())
        .collect();
    let ranks: Vec<_> = parts[0]
        .chunks(2)
        .zip(parts[1].chunks(2))
        .map(|(a, b)| a.iter().chain(b).map(|row| row.id).collect::<BTreeSet<_>>())
        .collect();
    assert_eq!(both, ranks);
    let last: Vec<_> = whole[20..].iter().map(|row| row.status).collect();
    assert_eq!(last, [2, 1, 1, 1]);
}

#[test]
fn the_ledger_on_disk_has_every_substituted_row() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 30);
    std::fs::remove_file(&dataset.paths[9]).unwrap();
    let path = dir.path("ledger.jsonl");
    let loader = build(files(&dataset).ledger(&path));
    for epoch in 0..3 {
        deliver(&loader, epoch).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let name = dataset.paths[9].display();
    assert_eq!(text.lines().count(), 3);
    for (epoch, line) in text.lines().enumerate() {
        assert!(line.starts_with(&format!("{{\"epoch\":{epoch},")), "{line}");
        assert!(
            line.contains("\"sample\":9,") && line.contains(&format!("\"path\":\"{name}\"")),
            "{line}"
        );
    }
    let error = files(&dataset)
        .on_bad_sample(OnBadSample::Fail)
        .ledger(&path)
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let error = files(&dataset).ledger("/nowhere/x").build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn the_plan_counts_substitutes_and_the_minimum_works() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 64);
    std::fs::remove_file(&dataset.paths[63]).unwrap();
    let plain = build(files(&dataset).on_bad_sample(OnBadSample::Fail));
    let with = build(files(&dataset));
    assert_eq!(plain.plan().term(MemoryTerm::SUBSTITUTES).bytes(), 0);
    assert!(with.plan().term(MemoryTerm::SUBSTITUTES).bytes() >= BYTES);
    let error = files(&dataset)
        .tuning(|t| t.slots(2))
        .workers(1)
        .memory_budget(1)
        .build()
        .unwrap_err();
    let words = error.to_string();
    let least: String = words
        .split("allowed, ")
        .nth(1)
        .unwrap()
        .split(" are needed")
        .next()
        .unwrap()
        .into();
    assert!(words.contains("substitutes"), "{least}: {words}");
}

#[test]
fn an_error_of_map_batch_is_blamed_on_no_sample() {
    let dir = Dir::new();
    let dataset = Files::new(&dir, 20);
    let loader = build(files(&dataset).map_batch(|_, _| Err(Error::user("no"))));
    assert_eq!(deliver(&loader, 0).unwrap_err().kind(), ErrorKind::User);
    let wrong = Sampled(
        || 16,
        |_, position| if position == 9 { 99 } else { position },
    );
    let loader = build(files(&dataset).order(Order::sampler(wrong)));
    let error = deliver(&loader, 0).unwrap_err();
    assert_eq!(
        (error.kind(), error.stage()),
        (ErrorKind::Config, Stage::Order),
        "{error}"
    );
    assert!(loader.ledger().samples.is_empty());
}

/// A read that succeeds on a retry is counted, whether the reader or the substitution retries. One
/// operation of each life fails; where the page cache is probed, or pages are read ahead, the read
/// itself comes after it.
#[test]
fn retried_reads_of_substitutes_are_counted() {
    const STALE: i32 = 116;
    for (mode, direct) in readers() {
        for at in 0.. {
            let dir = Dir::new();
            let dataset = Files::new(&dir, 6);
            std::fs::remove_file(&dataset.paths[4]).unwrap();
            let faulty = Arc::new(Faulty::new().once(at, Fault::Error(STALE)));
            let builder = Loader::builder(dataset)
                .batch_size(3)
                .order(Order::sequential())
                .workers(1);
            let builder = builder.tuning(|t| t.reader(mode).direct(direct).faulty(faulty.clone()));
            let loader = build(builder.on_bad_sample(OnBadSample::Substitute { budget: 1 }));
            let got = deliver(&loader, 0).unwrap();
            check(
                &[0, 1, 2, 3, 4, 5],
                &got,
                &BTreeSet::from([4]),
                &loader.ledger().samples,
            );
            let Some(hit) = faulty.hits().into_iter().next() else {
                break;
            };
            // The probe of the page cache opens the file, too.
            let ahead = matches!(hit.call, Call::Cached | Call::Populate)
                || (mode, hit.call) == (Mode::Auto, Call::Open);
            // Opening the missing file is retried and fails again.
            let gone = (hit.call, hit.extent.source) == (Call::Open, SourceId::at(4));
            let storage = loader.report().total.storage;
            assert!(
                ahead || gone || storage.recovered + storage.counts.retries > 0,
                "{mode:?} {direct:?}: {hit:?}"
            );
        }
    }
}

/// A worker's scratch is made again after a panic in the middle of a change.
#[test]
fn a_panic_leaves_a_clean_scratch_for_the_next_sample() {
    let dir = Dir::new();
    let builder = Loader::builder(Files::new(&dir, 12))
        .batch_size(4)
        .order(Order::sequential())
        .workers(1);
    let loader = build(
        builder
            .on_bad_sample(OnBadSample::Substitute { budget: 3 })
            .map(|_, ctx| {
                let id = ctx.id();
                let half_done = ctx.scratch().get::<Option<u64>>();
                if let Some(other) = half_done.replace(id) {
                    return Err(Error::user(format!("{other} left its half behind")));
                }
                if id % 4 == 1 {
                    panic!("in the middle");
                }
                *ctx.scratch().get::<Option<u64>>() = None;
                Ok(())
            }),
    );
    deliver(&loader, 0).unwrap();
    let bad = loader.ledger().samples;
    assert!(
        bad.iter()
            .all(|bad| bad.sample % 4 == 1 && bad.cause == "in the middle"),
        "{bad:?}"
    );
    assert_eq!(bad.len(), 3);
}
