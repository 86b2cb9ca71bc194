//! The promises of a loader. Records are the data, `std::fs::read` is the oracle.

use crate::common::toys::Sampled;
use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Framed, Parts, Records, Sizes};
use feedline::decode::{Ctx, Decoder};
use feedline::error::Stage;
use feedline::storage::{Direct, Extent, Mode, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Error, ErrorKind, LastBatch, Loader, LoaderBuilder, Order, Result, Row};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

fn expected(bytes: &[u8], record: usize, ids: &[u64]) -> Vec<(u64, Vec<u8>)> {
    ids.iter()
        .map(|id| (*id, bytes[*id as usize * record..][..record].to_vec()))
        .collect()
}

#[test]
fn every_sample_comes_once_by_every_reader_and_size() {
    let dir = Dir::new();
    // 512 and 4096 fit the alignment of O_DIRECT, 100 and 5000 do not, 1 is the extreme case.
    for (count, record) in [
        (1, 512),
        (37, 4096),
        (300, 100),
        (70, 5000),
        (1000, 1),
        (5, 150_528),
    ] {
        let (path, bytes) = records_file(&dir, count, record);
        for (mode, direct) in readers() {
            for batch_size in [1, 7, 64] {
                let builder = Loader::builder(records(&path, record)).batch_size(batch_size);
                let loader = build_by(builder, mode, direct);
                let ids: Vec<u64> = (0..count as u64).collect();
                let got = pull(&loader, 0).unwrap();
                assert!(
                    got == expected(&bytes, record, &ids),
                    "{count} × {record}, {mode:?} {direct:?}, {batch_size}"
                );
            }
        }
    }
}

#[test]
fn batches_do_not_depend_on_workers_reader_depth_or_slots() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, 501, 1024);
    let ids = Order::shuffled(7).preview(501, 3, 501).unwrap();
    let expected = expected(&bytes, 1024, &ids);
    for workers in [1, 2, 4, 8] {
        for (mode, direct) in readers() {
            for (depth, slots) in [(1, 2), (64, 9)] {
                let builder = Loader::builder(records(&path, 1024))
                    .order(Order::shuffled(7))
                    .batch_size(50);
                let loader = build(
                    builder
                        .workers(workers)
                        .tuning(|t| t.reader(mode).direct(direct).depth(depth).slots(slots)),
                );
                assert!(
                    pull(&loader, 3).unwrap() == expected,
                    "{workers} workers, {mode:?} {direct:?}, {depth} {slots}"
                );
            }
        }
    }
}

fn in_memory(count: usize, record: usize) -> Records {
    noise_records(count, record, 5)
}

#[test]
fn memory_sources_need_no_storage() {
    let bytes = noise(640, 5);
    let loader = build(Loader::builder(in_memory(10, 64)).batch_size(3));
    assert!(pull(&loader, 0).unwrap() == expected(&bytes, 64, &(0..10).collect::<Vec<_>>()));
    assert_eq!(loader.report().total.storage.counts.ops, 0);
}

#[test]
fn several_files_follow_each_other_and_headers_are_skipped() {
    let dir = Dir::new();
    let mut files = Vec::new();
    let mut all = Vec::new();
    for (index, count) in [3_usize, 0, 5, 1].into_iter().enumerate() {
        let body = noise(count * 600, index as u64 + 1);
        let bytes: Vec<u8> = [vec![0xee; 100], body.clone()].concat();
        files.push(dir.write(&format!("{index}.bin"), &bytes));
        all.extend(body);
    }
    for (mode, direct) in readers() {
        let records = Records::builder(600)
            .header(100)
            .open_files(&files)
            .unwrap();
        let builder = Loader::builder(records).batch_size(4);
        let loader = build_by(builder, mode, direct);
        assert!(
            pull(&loader, 0).unwrap() == expected(&all, 600, &(0..9).collect::<Vec<_>>()),
            "{mode:?}"
        );
    }
}

#[test]
fn the_last_batch_is_kept_or_dropped_as_announced() {
    for (count, size, last, batches) in [
        (10, 4, LastBatch::Keep, vec![4, 4, 2]),
        (10, 4, LastBatch::Drop, vec![4, 4]),
        (8, 4, LastBatch::Drop, vec![4, 4]),
        (3, 4, LastBatch::Keep, vec![3]),
    ] {
        let builder = Loader::builder(in_memory(count, 16)).batch_size(size);
        let loader = build(builder.last_batch(last));
        assert_eq!(loader.batches_per_epoch(), batches.len() as u64);
        let mut epoch = loader.epoch(0).unwrap();
        for (done, rows) in batches.iter().enumerate() {
            let left = batches.len() - done;
            assert_eq!(epoch.size_hint(), (left, Some(left)));
            let batch = epoch.next().unwrap().unwrap();
            assert_eq!((batch.len(), batch.index()), (*rows, done as u64));
        }
        assert_eq!(epoch.size_hint(), (0, Some(0)));
        assert!(epoch.next().is_none() && epoch.next().is_none());
    }
}

#[test]
fn a_batch_outlives_its_epoch_and_its_loader() {
    let bytes = noise(20 * 32, 5);
    let loader = build(Loader::builder(in_memory(20, 32)).batch_size(10));
    let mut epoch = loader.epoch(0).unwrap();
    let batch = epoch.next().unwrap().unwrap();
    drop(epoch);
    drop(loader);
    assert!(rows(&batch) == expected(&bytes, 32, &(0..10).collect::<Vec<_>>()));
    std::thread::spawn(move || drop(batch)).join().unwrap();
}

#[test]
fn a_second_live_epoch_is_an_error() {
    let loader = build(Loader::builder(in_memory(50, 32)).batch_size(5));
    let mut epoch = loader.epoch(0).unwrap();
    epoch.next().unwrap().unwrap();
    assert_eq!(loader.epoch(1).err().unwrap().kind(), ErrorKind::EpochLive);
    drop(epoch);
    for taken in 0..10 {
        let batches = loader.epoch(taken).unwrap().take(taken as usize);
        let got: usize = batches.map(|batch| batch.unwrap().len()).sum();
        assert_eq!(got, 5 * taken as usize);
    }
    assert_eq!(pull(&loader, 0).unwrap().len(), 50);
}

#[test]
fn waits_with_and_without_timeout_give_the_same() {
    for limit in [
        Duration::ZERO,
        Duration::from_micros(50),
        Duration::from_secs(600),
        Duration::MAX,
    ] {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, 301, 1000);
        let loader = build(
            Loader::builder(records(&path, 1000))
                .order(Order::shuffled(2))
                .batch_size(10)
                .tuning(|t| t.slots(3)),
        );
        let expected = pull(&loader, 1).unwrap();
        let mut epoch = loader.epoch(1).unwrap();
        let mut got = Vec::new();
        let mut ends = 0;
        while ends < 2 {
            match epoch.next_within(limit) {
                Poll::Ready(Some(batch)) => got.extend(rows(&batch.unwrap())),
                Poll::Ready(None) => ends += 1,
                Poll::Pending => assert!(limit < Duration::from_secs(1)),
            }
        }
        assert!(got == expected, "{limit:?}");
    }
}

#[test]
fn logs_add_up_to_the_run() {
    let loader = build(Loader::builder(in_memory(60, 8)).batch_size(5));
    let mut samples = 0.0;
    let mut seconds = 0.0;
    for epoch in 0..3 {
        assert_eq!(loader.log().seconds, 0.0, "no iterator is alive");
        for batch in loader.epoch(epoch).unwrap() {
            batch.unwrap();
            let log = loader.log();
            samples += log.samples_per_s.map_or(0.0, |rate| rate * log.seconds);
            seconds += log.seconds;
            let shares = [
                log.starved_share,
                log.decode_busy_share,
                log.from_memory_share,
            ];
            let mut shares = shares.into_iter().flatten();
            assert!(shares.all(|share| (0.0..=1.0).contains(&share)), "{log:?}");
            assert_eq!((log.bad_samples, log.host_late_share), (0, None));
        }
        // The end of the iterator.
        seconds += loader.log().seconds;
    }
    assert!((samples - 180.0).abs() < 1e-6, "{samples}");
    let total = loader.report().total;
    let alive = (total.steady_ns + total.consumer.first_ns) as f64 / 1e9;
    assert!((seconds - alive).abs() < 1e-6, "{seconds} {alive}");
}

#[test]
fn a_wait_that_timed_out_loses_nothing_and_counts() {
    let builder = Loader::builder(in_memory(60, 8))
        .batch_size(5)
        .tuning(|t| t.slots(2).held_deadline(Duration::from_secs(600)));
    let loader = build(builder);
    let mut epoch = loader.epoch(0).unwrap();
    let mut held = vec![
        epoch.next().unwrap().unwrap(),
        epoch.next().unwrap().unwrap(),
    ];
    let waited = || Duration::from_nanos(loader.report().total.consumer.waited_ns);
    let before = waited();
    for _ in 0..4 {
        // No batch can come while every slot is held.
        assert!(epoch.next_within(Duration::from_millis(15)).is_pending());
    }
    assert_eq!((epoch.position(), epoch.len()), (2, 10));
    held.pop();
    assert_eq!(epoch.next().unwrap().unwrap().ids(), [10, 11, 12, 13, 14]);
    assert!(
        waited() - before >= Duration::from_millis(60),
        "{}",
        loader.report()
    );
    held.clear();
    assert_eq!(epoch.map(|batch| batch.unwrap().len()).sum::<usize>(), 45);
}

#[test]
fn unfinished_and_failed_waits_are_counted() {
    const LIMIT: Duration = Duration::from_millis(300);
    let loader = build(
        Loader::builder(in_memory(60, 8))
            .batch_size(5)
            .tuning(|t| t.slots(1).held_deadline(LIMIT)),
    );
    let waited = || Duration::from_nanos(loader.snapshot().consumer.waited_ns);
    // A wait of an iterator that is dropped.
    let mut epoch = loader.epoch(0).unwrap();
    let held = epoch.next().unwrap().unwrap();
    assert!(epoch.next_within(LIMIT / 2).is_pending());
    drop((epoch, held));
    let before = waited();
    assert!(before >= LIMIT / 2, "{before:?}");
    // During the wait, and for a wait that ends with an error.
    let mut epoch = loader.epoch(1).unwrap();
    let _held = epoch.next().unwrap().unwrap();
    assert_eq!(waited(), before, "first batches do not count");
    std::thread::scope(|scope| {
        scope.spawn(|| while waited() < before + LIMIT / 2 {});
        let error = epoch.next().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BatchesHeld);
    });
    assert!(waited() >= before + LIMIT);
    let total = loader.report().total.consumer.waited_ns;
    assert_eq!(waited(), Duration::from_nanos(total), "nobody waits");
}

#[test]
fn a_loader_without_meters_measures_nothing() {
    use feedline::profile::snapshot::{Consumer, Latency, OrderStage};
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 300, 1000);
    let from_file = Loader::builder(records(&path, 1000)).batch_size(10);
    for builder in [Loader::builder(in_memory(60, 8)).batch_size(5), from_file] {
        let loader = build(builder.tuning(|t| t.unmeasured()));
        assert!(loader.epochs(0..3).unwrap().all(|batch| batch.is_ok()));
        let snapshot = loader.snapshot();
        assert_eq!(snapshot.consumer.handed().batches, 0);
        let mut consumer = snapshot.consumer;
        consumer.steady = None;
        assert_eq!(consumer, Consumer::default());
        assert_eq!(snapshot.order, OrderStage::default());
        let storage = snapshot.storage;
        let decode = snapshot.decode;
        let slots = snapshot.slots;
        let numbers = [
            storage.busy_ns,
            storage.in_flight_ns,
            storage.counts.ops,
            storage.counts.bytes_moved,
            storage.cached_bytes,
        ];
        assert_eq!(numbers, [0; 5]);
        assert_eq!(storage.latency, Latency::default());
        assert_eq!(decode.latency, Latency::default());
        let numbers = [
            decode.busy_ns,
            decode.starved_ns,
            decode.ahead_ns,
            decode.queued_ns,
            decode.samples,
        ];
        assert_eq!(numbers, [0; 5]);
        let numbers = [
            slots.free_ns,
            slots.filling_ns,
            slots.full_ns,
            slots.held_ns,
        ];
        assert_eq!(numbers, [0; 4]);
        let timeline = loader.timeline();
        assert_eq!((timeline.batches, timeline.gauges), (vec![], vec![]));
        let tracks = timeline.tracks;
        assert!(
            tracks.iter().all(|track| track.spans.is_empty()),
            "{tracks:?}"
        );
    }
}

#[test]
fn short_waits_add_up_to_the_deadline() {
    let builder = Loader::builder(in_memory(60, 8))
        .batch_size(5)
        .tuning(|t| t.slots(2).held_deadline(Duration::from_millis(60)));
    let loader = build(builder);
    let mut epoch = loader.epoch(0).unwrap();
    let held = [
        epoch.next().unwrap().unwrap(),
        epoch.next().unwrap().unwrap(),
    ];
    let mut calls = 0;
    let error = loop {
        calls += 1;
        assert!(calls < 100_000, "the deadline never came");
        if let Poll::Ready(next) = epoch.next_within(Duration::from_millis(1)) {
            break next.unwrap().unwrap_err();
        }
    };
    assert_eq!(error.kind(), ErrorKind::BatchesHeld);
    drop(held);
    assert_eq!(epoch.map(|batch| batch.unwrap().len()).sum::<usize>(), 50);
}

/// A decoder that fails in a chosen way on chosen samples.
struct Trap {
    bad: Vec<u64>,
    panics: bool,
}

impl Decoder for Trap {
    fn outputs(&self, _: &EncodedField) -> Result<Vec<Field>> {
        Ok(vec![Field::fixed("record", DType::U8, [8])])
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        if self.bad.contains(&ctx.id()) {
            assert!(!self.panics, "trapped by sample {}", ctx.id());
            return Err(Error::decode("trapped"));
        }
        out.copy_from(ctx.fields().start, input)
    }
}

#[test]
fn a_decoder_that_fails_ends_the_epoch_once() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 100, 8);
    for (mode, direct) in readers() {
        for panics in [false, true] {
            // The order of delivery decides the error: batch 3 before 7, the lower row of batch 3
            // first.
            let trap = Trap {
                bad: vec![71, 36, 34],
                panics,
            };
            let builder = Loader::builder(records(&path, 8))
                .decode_field("record", trap)
                .batch_size(10)
                .workers(3);
            let loader = build(builder.tuning(|t| t.reader(mode).direct(direct)));
            for _ in 0..2 {
                let mut epoch = loader.epoch(0).unwrap();
                for batch in 0..3 {
                    assert_eq!(epoch.next().unwrap().unwrap().index(), batch);
                }
                let error = epoch.next().unwrap().unwrap_err();
                let kind = match panics {
                    true => ErrorKind::Panicked,
                    false => ErrorKind::Decode,
                };
                let site = error.site();
                assert_eq!(error.kind(), kind, "{error}");
                assert_eq!((site.sample, site.batch), (Some(34), Some(3)), "{error}");
                assert_eq!(site.path.as_ref(), Some(&path));
                assert_eq!((site.offset, site.len), (Some(34 * 8), Some(8)));
                assert!(epoch.next().is_none());
                assert_eq!(epoch.size_hint(), (0, Some(0)));
            }
        }
    }
}

#[test]
fn errors_and_panics_of_transforms_become_errors_too() {
    let bad = |what: &str| {
        let message = what.to_string();
        let builder = Loader::builder(in_memory(40, 8)).batch_size(10);
        match what {
            "map error" => builder.map(move |_, ctx| fail_if(ctx.id() == 25, &message)),
            "map panic" => builder.map(|_, ctx| {
                assert!(ctx.id() != 25, "map panic");
                Ok(())
            }),
            "batch error" => {
                builder.map_batch(move |batch, _| fail_if(batch.index() == 2, &message))
            }
            _ => builder.map_batch(|batch, _| {
                assert!(batch.index() != 2, "batch panic");
                Ok(())
            }),
        }
    };
    for what in ["map error", "map panic", "batch error", "batch panic"] {
        let loader = build(bad(what));
        let mut epoch = loader.epoch(0).unwrap();
        assert!(epoch.next().unwrap().is_ok() && epoch.next().unwrap().is_ok());
        let error = epoch.next().unwrap().unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(error.stage(), Stage::Map, "{error}");
        assert_eq!(error.site().batch, Some(2), "{error}");
        assert!(epoch.next().is_none());
    }
}

#[test]
fn transforms_add_fields_whatever_the_workers() {
    let run = |workers| {
        let classes = (0..64).map(|id| id % 4).collect();
        let records = Records::builder(4)
            .classes(classes)
            .open_bytes(noise(256, 1))
            .unwrap();
        let loader = build(
            Loader::builder(records)
                .batch_size(10)
                .workers(workers)
                .order(Order::shuffled(9))
                .map_adding([Field::fixed("one_hot", DType::F32, [4])], |row, ctx| {
                    let label = row.index_of("label")?;
                    let one_hot = row.index_of("one_hot")?;
                    let mut fields = row.split();
                    let label = fields.take::<i64>(label)?;
                    let one_hot = fields.take::<f32>(one_hot)?;
                    one_hot[label[0] as usize] = 1.0;
                    row.bytes_mut(0)[0] = ctx.draws("noise").below(256) as u8;
                    Ok(())
                })
                .map_batch(|batch, ctx| {
                    let mut draws = ctx.draws("mixup");
                    let field = batch.index_of("one_hot")?;
                    let share = draws.next_f64() as f32;
                    let rows = batch.slice_mut::<f32>(field)?;
                    rows.iter_mut().for_each(|value| *value *= share);
                    Ok(())
                })
                .keep(["one_hot", "record"]),
        );
        let mut out = Vec::new();
        for batch in loader.epoch(1).unwrap() {
            let batch = batch.unwrap();
            assert!(batch.field("label").is_err());
            let one_hot = batch.field("one_hot").unwrap();
            assert_eq!(
                (one_hot.shape(), one_hot.strides()),
                (vec![batch.len(), 4], vec![4, 1])
            );
            for (row, id) in batch.ids().iter().enumerate() {
                let values = one_hot.row::<f32>(row).unwrap();
                assert!(
                    values
                        .iter()
                        .enumerate()
                        .all(|(class, value)| (*value > 0.0) == (class as u64 == id % 4))
                );
            }
            out.push((
                batch.ids().to_vec(),
                one_hot.as_bytes().unwrap().to_vec(),
                batch.field("record").unwrap().as_bytes().unwrap().to_vec(),
            ));
        }
        out
    };
    let one = run(1);
    assert_eq!(one.len(), 7);
    for workers in [2, 5] {
        assert!(one == run(workers));
    }
}

/// A sample from two files and the index: a framed payload, a raw vector read in place, a label in
/// memory.
struct Many {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    labels: Vec<i64>,
    twist: Twist,
}

#[derive(Clone, Copy, PartialEq)]
enum Twist {
    None,
    PastTheEnd,
    Huge,
    ForgetsAField,
    NoSuchField,
    NoSuchSource,
    Twice,
    Overflow,
    Panics,
}

impl Many {
    fn new(dir: &Dir, twist: Twist) -> (Self, Vec<u8>, Vec<u8>) {
        let framed = noise(50 * 20, 1);
        let raw = noise(50 * 512, 2);
        let mut sources = Sources::new();
        sources.file(dir.write("framed", &framed), 1000).unwrap();
        sources.file(dir.write("raw", &raw), 50 * 512).unwrap();
        let schema = vec![
            EncodedField::raw(Field::up_to("payload", DType::U8, 16)),
            EncodedField::raw(Field::fixed("raw", DType::U8, [512])),
            EncodedField::raw(Field::fixed("label", DType::I64, [])),
        ];
        (
            Self {
                sources: Arc::new(sources),
                schema,
                labels: (0..50).collect(),
                twist,
            },
            framed,
            raw,
        )
    }
}

impl Dataset for Many {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        50
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(532)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let odd = sample == 13;
        assert!(!(odd && self.twist == Twist::Panics), "extents panics");
        let at = |source, offset, len| Extent {
            source: SourceId::at(source),
            offset,
            len,
        };
        parts.framed(
            0,
            match self.twist {
                Twist::PastTheEnd if odd => at(0, 990, 20),
                Twist::Huge if odd => at(0, 0, 1 << 50),
                Twist::NoSuchSource if odd => at(7, 0, 20),
                Twist::Overflow if odd => at(0, u64::MAX, u64::MAX),
                _ => at(0, sample * 20, 20),
            },
        );
        parts.extent(
            if odd && self.twist == Twist::NoSuchField {
                9
            } else {
                1
            },
            at(1, sample * 512, 512),
        );
        if odd && self.twist == Twist::Twice {
            parts.extent(1, at(1, sample * 512, 512));
        }
        if !(odd && self.twist == Twist::ForgetsAField) {
            parts.inline(2, bytemuck::bytes_of(&self.labels[sample as usize]));
        }
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Many {
    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        _: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        assert_eq!(field, 0);
        // A payload of another length for each sample; the first four bytes are its header.
        Ok(&bytes[4..4 + (sample % 17) as usize])
    }
}

#[test]
fn a_sample_of_several_extents_is_assembled_by_every_reader() {
    let dir = Dir::new();
    for (mode, direct) in readers() {
        let (dataset, framed, raw) = Many::new(&dir, Twist::None);
        let loader = build(
            Loader::builder(dataset)
                .batch_size(8)
                .tuning(|t| t.reader(mode).direct(direct))
                .order(Order::shuffled(2)),
        );
        let mut seen = 0;
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            let payload = batch.field("payload").unwrap();
            let rest = batch.field("raw").unwrap();
            for (row, id) in batch.ids().iter().map(|id| *id as usize).enumerate() {
                assert_eq!(payload.lens().unwrap()[row], id as u64 % 17);
                assert_eq!(
                    payload.row::<u8>(row).unwrap(),
                    &framed[id * 20 + 4..][..id % 17],
                    "{mode:?} {direct:?}"
                );
                assert!(
                    payload.as_slice::<u8>().unwrap()[row * 16 + id % 17..(row + 1) * 16]
                        .iter()
                        .all(|b| *b == 0)
                );
                assert_eq!(rest.row::<u8>(row).unwrap(), &raw[id * 512..][..512]);
                assert_eq!(
                    batch.field("label").unwrap().row::<i64>(row).unwrap(),
                    [id as i64]
                );
                seen += 1;
            }
        }
        assert_eq!(seen, 50);
    }
}

#[test]
fn wrong_answers_of_a_dataset_are_errors_with_the_sample() {
    let dir = Dir::new();
    let cases = [
        (Twist::PastTheEnd, ErrorKind::Truncated, "offset=990 len=20"),
        (
            Twist::Huge,
            ErrorKind::Truncated,
            "past the source's indexed length",
        ),
        (
            Twist::Overflow,
            ErrorKind::Truncated,
            "past the source's indexed length",
        ),
        (Twist::Twice, ErrorKind::User, "`raw` twice"),
        (Twist::NoSuchSource, ErrorKind::User, "names source 7"),
        (Twist::ForgetsAField, ErrorKind::User, "`label`"),
        (
            Twist::NoSuchField,
            ErrorKind::User,
            "gave a part for field 9",
        ),
        (
            Twist::Panics,
            ErrorKind::Panicked,
            "the dataset's `extents`: extents panics",
        ),
    ];
    for (twist, kind, words) in cases {
        for (mode, direct) in readers() {
            let (dataset, ..) = Many::new(&dir, twist);
            let builder = Loader::builder(dataset).batch_size(50);
            let loader = build_by(builder, mode, direct);
            let error = pull(&loader, 0).unwrap_err();
            assert!(
                error.to_string().contains(words),
                "{mode:?} {direct:?}: {error}"
            );
            assert_eq!(error.kind(), kind, "{mode:?} {direct:?}: {error}");
            assert_eq!(error.site().sample, Some(13), "{error}");
        }
    }
}

#[test]
fn the_error_of_a_changed_file_names_it() {
    let dir = Dir::new();
    let shrink = |path: &std::path::Path, len| {
        std::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(len)
            .unwrap()
    };
    for (mode, direct) in readers() {
        for (what, kind) in [
            ("vanish", ErrorKind::NotFound),
            ("shrink", ErrorKind::Changed),
            ("grow", ErrorKind::Changed),
        ] {
            let (path, _) = records_file(&dir, 16, 4096);
            let builder = Loader::builder(records(&path, 4096)).batch_size(4);
            let loader = build_by(builder, mode, direct);
            match what {
                "vanish" => std::fs::remove_file(&path).unwrap(),
                "shrink" => shrink(&path, 9 * 4096),
                _ => shrink(&path, 99 * 4096),
            }
            let error = pull(&loader, 0).unwrap_err();
            assert_eq!(error.kind(), kind, "{mode:?} {direct:?} {what}: {error}");
            let site = error.site();
            assert_eq!(site.path.as_ref(), Some(&path), "{error}");
            assert_eq!((site.sample, site.offset), (Some(0), Some(0)), "{error}");
        }
        // Cut during the read: present samples are delivered, the first missing one names its
        // offset.
        let (path, _) = records_file(&dir, 16, 4096);
        let builder = Loader::builder(records(&path, 4096)).batch_size(1);
        let loader = build_by(builder.tuning(|t| t.slots(2)), mode, direct);
        let mut epoch = loader.epoch(0).unwrap();
        epoch.next().unwrap().unwrap();
        shrink(&path, 9 * 4096 + 100);
        let error = epoch.find_map(Result::err).unwrap();
        // What opens the file again finds another version.
        let kinds = [ErrorKind::Truncated, ErrorKind::Changed];
        let what = format!("{mode:?} {direct:?}: {error}");
        assert!(kinds.contains(&error.kind()), "{what}");
        let site = error.site();
        assert_eq!(site.sample, Some(9), "{what}");
        let range = (site.offset, site.len);
        assert_eq!(range, (Some(9 * 4096), Some(4096)), "{what}");
    }
}

#[test]
fn build_refuses_illegal_settings_with_a_message() {
    let start = || Loader::builder(in_memory(10, 8));
    let trap = || Trap {
        bad: vec![],
        panics: false,
    };
    let record = || [Field::fixed("record", DType::U8, [1])];
    let last = LastBatch::Drop;
    let large = "an epoch of 10 samples has no batch of 11";
    let smaller = "make the batch smaller";
    let mmap = start().tuning(|t| t.reader(Mode::Mmap).direct(Direct::On));
    let config = [
        (start().batch_size(0), "batch_size"),
        (start().workers(0), "workers"),
        (start().workers(100_000), "set at most 1024"),
        (start().tuning(|t| t.slots(0)), "slots"),
        (start().tuning(|t| t.depth(0)), "depth"),
        (start().keep(["x"]), "`x`"),
        (start().keep([]), "no field"),
        (start().decode_field("x", trap()), "no field `x`"),
        (start().decode(trap()), "only raw"),
        (start().map_adding(record(), |_, _| Ok(())), "two fields"),
        (start().order(Order::indices([3, 10])), "10"),
        (start().batch_size(usize::MAX), smaller),
        (mmap, "mmap"),
    ];
    let empty = [
        (start().batch_size(11).last_batch(last), large),
        (start().order(Order::indices([])), "order is empty"),
    ];
    let budget = [(start().memory_budget(1000), "sum")];
    let all = [
        (ErrorKind::Config, Vec::from(config)),
        (ErrorKind::Empty, empty.into()),
        (ErrorKind::Budget, budget.into()),
    ];
    for (kind, cases) in all {
        for (builder, words) in cases {
            must_fail(builder.build(), kind, words);
        }
    }
}

#[test]
fn the_smallest_legal_budget_delivers_everything() {
    let dir = Dir::new();
    for (count, record, batch) in [(40, 100, 7), (25, 5000, 10), (64, 4096, 3)] {
        let (path, bytes) = records_file(&dir, count, record);
        for (mode, direct) in readers() {
            let with = |budget| {
                let builder = Loader::builder(records(&path, record)).workers(2);
                let builder = builder.tuning(|t| t.reader(mode).direct(direct));
                builder.batch_size(batch).memory_budget(budget).build()
            };
            let mut refused = 0;
            let mut legal = 1 << 30;
            while legal - refused > 1 {
                let middle = (refused + legal) / 2;
                if with(middle).is_ok() {
                    legal = middle
                } else {
                    refused = middle
                }
            }
            assert_eq!(with(refused).err().unwrap().kind(), ErrorKind::Budget);
            let loader = with(legal).unwrap();
            assert!(loader.plan().total() <= legal);
            let ids: Vec<u64> = (0..count as u64).collect();
            assert!(pull(&loader, 0).unwrap() == expected(&bytes, record, &ids));
        }
    }
}

#[test]
fn a_split_is_disjoint_and_whole() {
    let bytes = noise(1000 * 4, 5);
    let (held, train) = in_memory(1000, 4).split(0.2, 42).unwrap();
    assert_eq!((held.len(), train.len()), (200, 800));
    let mut seen = Vec::new();
    for part in [held, train] {
        let part = Arc::new(part);
        for (id, row) in pull(&build(Loader::builder(part.clone())), 0).unwrap() {
            let origin = part.origin(id);
            assert_eq!(row, bytes[origin as usize * 4..][..4]);
            seen.push(origin);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..1000).collect::<Vec<_>>());
    let subset = in_memory(1000, 4).subset([5, 5, 999]).unwrap();
    let rows = pull(&build(Loader::builder(subset)), 0).unwrap();
    let rows = rows.into_iter().map(|(_, row)| row);
    assert!(rows.eq([5, 5, 999].map(|id: usize| bytes[id * 4..][..4].to_vec())));
    let error = in_memory(10, 4).subset([10]).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
    let error = in_memory(10, 4).split(1.5, 0).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
}

#[test]
fn the_report_counts_delivered_batches_and_names_the_reader() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 64, 4096);
    let (mode, direct) = reader(1);
    let builder = Loader::builder(records(&path, 4096)).batch_size(16);
    let loader = build_by(builder, mode, direct);
    pull(&loader, 0).unwrap();
    let report = loader.report();
    let consumer = &report.total.consumer;
    let storage = &report.total.storage;
    assert_eq!((consumer.batches, consumer.samples), (4, 64));
    assert_eq!(consumer.bytes, 64 * 4096);
    assert_eq!((storage.counts.ops, storage.counts.direct_reads), (64, 64));
    assert_eq!(*consumer, loader.snapshot().consumer, "the same numbers");
    let json = serde_json::to_value(&report.total).unwrap();
    assert_eq!(json["storage"]["reads"], 64);
    assert_eq!(json["storage"]["bytes"], 64 * 4096);
    let parsed: feedline::profile::Snapshot = serde_json::from_value(json).unwrap();
    assert_eq!(parsed, report.total);
    let text = report.to_string();
    let name = if mode == Mode::Uring {
        "io_uring"
    } else {
        "pread"
    };
    let delivered = "delivered 4 batches, 64 samples";
    for word in [delivered, name, "batch slots", "verdict"] {
        assert_says(&text, word);
    }
}

#[test]
fn transforms_read_and_set_the_lengths_of_variable_fields() {
    let dir = Dir::new();
    let (dataset, ..) = Many::new(&dir, Twist::None);
    let loader = build(
        Loader::builder(dataset)
            .batch_size(10)
            .map(|row, ctx| {
                assert_eq!(row.len_of(0), Some(ctx.id() as usize % 17));
                assert_eq!(row.len_of(1), None);
                assert_eq!(row.slice::<i64>(2)?, [ctx.id() as i64]);
                row.set_len(0, 1)
            })
            .map_batch(|batch, _| {
                let lens = batch.lens_mut(0).unwrap();
                assert!(lens.iter().all(|len| *len == 1));
                lens.fill(2);
                lens[0] = 16;
                Ok(())
            }),
    );
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        let payload = batch.field("payload").unwrap();
        let len = |row| payload.row::<u8>(row).unwrap().len();
        assert_eq!((len(0), len(1)), (16, 2));
    }
}

#[test]
fn starting_and_dropping_epochs_quickly_never_blocks() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, 400, 4096);
    for (mode, direct) in readers() {
        for slots in [1, 4] {
            let builder = Loader::builder(records(&path, 4096)).batch_size(10);
            let builder = builder.tuning(|t| t.slots(slots)).workers(2);
            let loader = build_by(builder, mode, direct);
            for epoch in 0..300 {
                let mut batches = loader.epoch(epoch).unwrap();
                if epoch % 97 == 0 {
                    batches.next().unwrap().unwrap();
                }
            }
            let ids: Vec<u64> = (0..400).collect();
            assert!(
                pull(&loader, 0).unwrap() == expected(&bytes, 4096, &ids),
                "{mode:?} {direct:?}"
            );
        }
    }
}

#[test]
fn a_sampler_that_panics_or_shrinks_ends_the_run() {
    for panics in [false, true] {
        let asked = AtomicU64::new(0);
        let len = move || {
            // `build` and each epoch call it.
            let asked = asked.fetch_add(1, Ordering::SeqCst);
            assert!(!panics || asked < 2, "fickle");
            if asked < 2 { 20 } else { 5 }
        };
        let fickle = Order::sampler(Sampled(len, |_, position| position));
        let builder = Loader::builder(in_memory(20, 4)).order(fickle);
        let loader = build(builder.batch_size(4));
        let mut epochs = loader.epochs(0..3).unwrap();
        let error = epochs.find_map(Result::err).unwrap();
        let kind = if panics {
            ErrorKind::Panicked
        } else {
            ErrorKind::Config
        };
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.stage(), Stage::Order, "{error}");
        assert!(epochs.next().is_none());
    }
}

#[test]
fn a_panic_in_build_or_preview_is_an_error() {
    struct Panics(Records);
    impl Dataset for Panics {
        fn schema(&self) -> &[EncodedField] {
            self.0.schema()
        }
        fn len(&self) -> u64 {
            self.0.len()
        }
        fn sources(&self) -> &Arc<Sources> {
            self.0.sources()
        }
        fn sizes(&self) -> Sizes {
            panic!("a bug");
        }
        fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
            self.0.extents(sample, parts)
        }
    }
    let order = Order::sampler(Sampled(|| 20, |_, _| panic!("a bug")));
    let build = |builder: LoaderBuilder| builder.build().unwrap_err();
    let place = "epoch 0, position 0: the sampler: a bug";
    let records = Loader::builder(in_memory(20, 4));
    for (error, words) in [
        (build(Loader::builder(Panics(in_memory(20, 4)))), "a bug"),
        (order.preview(20, 0, 1).unwrap_err(), place),
        (build(records.order(order)), "the sampler: a bug"),
    ] {
        let found = (error.kind(), error.message());
        assert_eq!(found, (ErrorKind::Panicked, words));
    }
}

#[test]
fn an_error_of_a_later_epoch_comes_in_its_turn() {
    let len = Arc::new(AtomicU64::new(12));
    let set = |to| len.store(to, Ordering::SeqCst);
    let own = len.clone();
    // Batches take longer than the interval at which `next` checks for a failure of the loader.
    let slow = |_: &mut feedline::BatchMut<'_>, _: &mut feedline::decode::Ctx<'_>| {
        std::thread::sleep(std::time::Duration::from_millis(150));
        Ok(())
    };
    let order = Order::sampler(Sampled(
        move || own.load(Ordering::SeqCst),
        |_, position| position,
    ));
    // With fewer slots than batches per epoch, the next epoch is not planned before the first batch
    // is taken.
    let builder = Loader::builder(in_memory(20, 4))
        .order(order)
        .batch_size(4)
        .tuning(|t| t.slots(2))
        .workers(1);
    let loader = build(builder.map_batch(slow));
    let mut epochs = loader.epochs(0..3).unwrap();
    set(5);
    let found: Vec<_> = epochs
        .by_ref()
        .map(|batch| batch.map(|batch| batch.index()).map_err(|e| e.kind()))
        .collect();
    assert_eq!(found, [Ok(0), Ok(1), Ok(2), Err(ErrorKind::Config)]);
    drop(epochs);
    set(12);
    let again = loader.epoch(1).unwrap();
    assert!(again.map(|batch| batch.unwrap().index()).eq(0..3));
}

/// Two fields cut from the same 8 bytes of each sample, with a label of the index between them.
struct Halves(Arc<Sources>, Vec<EncodedField>, Vec<i64>);

impl Dataset for Halves {
    fn schema(&self) -> &[EncodedField] {
        &self.1
    }
    fn len(&self) -> u64 {
        self.2.len() as u64
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.0
    }
    fn sizes(&self) -> Sizes {
        Sizes {
            opened_bytes_max: 5,
            ..Sizes::new(8)
        }
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let extent = Extent {
            source: SourceId::at(0),
            offset: sample * 8,
            len: 8,
        };
        parts.framed(0, extent);
        parts.inline(1, bytemuck::bytes_of(&self.2[sample as usize]));
        parts.framed(2, extent);
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Halves {
    fn open<'a>(
        &self,
        _: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        assert!(buffer.is_empty() && bytes.len() == 8);
        if field == 0 {
            return Ok(&bytes[..3]);
        }
        // Converted in the buffer: the rest, backwards.
        buffer.extend(bytes[3..].iter().rev());
        Ok(buffer)
    }
}

#[test]
fn fields_cut_from_one_extent_are_read_once_by_every_reader() {
    let dir = Dir::new();
    let bytes = noise(8 * 40, 1);
    let path = dir.write("halves", &bytes);
    for (mode, direct) in readers() {
        let mut sources = Sources::new();
        sources.file(&path, bytes.len() as u64).unwrap();
        let schema = vec![
            EncodedField::raw(Field::fixed("front", DType::U8, [3])),
            EncodedField::raw(Field::fixed("label", DType::I64, [])),
            EncodedField::raw(Field::fixed("back", DType::U8, [5])),
        ];
        let dataset = Halves(Arc::new(sources), schema, (0..40).collect());
        let builder = Loader::builder(dataset).batch_size(7);
        let loader = build_by(builder, mode, direct);
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            for (row, id) in batch.ids().iter().map(|id| *id as usize).enumerate() {
                let sample = &bytes[id * 8..][..8];
                let back: Vec<u8> = sample[3..].iter().rev().copied().collect();
                let what = format!("{mode:?} {direct:?}");
                let front = batch.field("front").unwrap();
                assert_eq!(front.row::<u8>(row).unwrap(), &sample[..3], "{what}");
                let label = batch.field("label").unwrap();
                assert_eq!(label.row::<i64>(row).unwrap(), [id as i64]);
                let field = batch.field("back").unwrap();
                assert_eq!(field.row::<u8>(row).unwrap(), back, "{what}");
            }
        }
        let reads = loader.report().total.storage.counts.ops;
        assert!(
            reads <= 40,
            "{reads} reads of 40 samples by {mode:?} {direct:?}"
        );
    }
}

#[test]
fn a_dataset_in_memory_needs_no_read_and_no_file() {
    use feedline::dataset::Concat;
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 700, 40);
    for order in [Order::sequential(), Order::shuffled(3)] {
        for (mode, direct) in readers() {
            let make = |dataset: Arc<dyn Dataset>| {
                let builder = Loader::builder(dataset).order(order.clone());
                build_by(builder.batch_size(33), mode, direct)
            };
            let expected = pull(&make(Arc::new(records(&path, 40))), 0).unwrap();
            let memory = records(&path, 40).in_memory().unwrap();
            assert_eq!(memory.bytes(), 700 * 40);
            let loader = make(Arc::new(memory));
            assert!(pull(&loader, 0).unwrap() == expected, "{mode:?} {direct:?}");
            assert_eq!(loader.report().total.storage.counts.ops, 0);
        }
    }
    let gone = dir.write("gone", &noise(80, 1));
    let memory = Arc::new(records(&gone, 40).in_memory().unwrap());
    std::fs::remove_file(&gone).unwrap();
    // One part in memory, one in storage.
    let both = Concat::new([memory as Arc<dyn Dataset>, Arc::new(records(&path, 40))]);
    let rows = pull(&build(Loader::builder(both.unwrap())), 0).unwrap();
    assert_eq!(rows.len(), 702);
    assert_eq!(rows[1].1, noise(80, 1)[40..]);
    assert_eq!(rows[2].1, std::fs::read(&path).unwrap()[..40]);
    let changed = dir.write("changed", &noise(80, 1));
    let dataset = records(&changed, 40);
    std::fs::write(&changed, noise(120, 1)).unwrap();
    assert_eq!(dataset.in_memory().unwrap_err().kind(), ErrorKind::Changed);
}

/// A caption in the index, with a length that varies by sample, and 8 bytes that no decoder uses.
struct Captions(Arc<Sources>, Vec<EncodedField>);

impl Dataset for Captions {
    fn schema(&self) -> &[EncodedField] {
        &self.1
    }
    fn len(&self) -> u64 {
        30
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.0
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(40)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let at = |offset, len| Extent {
            source: SourceId::at(0),
            offset,
            len,
        };
        parts.extent(0, at(sample, sample));
        parts.framed(1, at(0, 8));
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Captions {
    fn open<'a>(&self, _: u64, _: usize, _: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        panic!("a field that is not kept is not opened")
    }
}

#[test]
fn opaque_bytes_come_with_lengths_and_unused_fields_unread() {
    use feedline::decode::Bytes;
    let dir = Dir::new();
    let bytes = noise(100, 1);
    let path = dir.write("captions", &bytes);
    let make = || {
        let mut sources = Sources::new();
        sources.file(&path, 100).unwrap();
        Captions(
            Arc::new(sources),
            vec![EncodedField::bytes("text"), EncodedField::bytes("other")],
        )
    };
    let unused = Loader::builder(make()).decode_field("text", Bytes::up_to(30));
    must_say(unused.build(), "`other`");
    for (mode, direct) in readers() {
        for (decoder, most) in [(Bytes::up_to(30), 30), (Bytes::cut_to(7), 7)] {
            let builder = Loader::builder(make())
                .decode_field("text", decoder)
                .keep(["text"]);
            let batch = first(&build_by(builder.batch_size(30), mode, direct));
            let text = batch.field("text").unwrap();
            for id in 0..30 {
                let expected = &bytes[id..id + id.min(most)];
                let len = text.lens().unwrap()[id];
                assert_eq!(len, expected.len() as u64, "{mode:?} {direct:?}");
                assert_eq!(&text.row::<u8>(id).unwrap()[..expected.len()], expected);
            }
        }
        let short = Loader::builder(make())
            .decode_field("text", Bytes::up_to(7))
            .keep(["text"]);
        let error = pull(&build_by(short, mode, direct), 0).unwrap_err();
        assert_eq!(
            (error.kind(), error.site().sample),
            (ErrorKind::Shape, Some(8))
        );
    }
}
