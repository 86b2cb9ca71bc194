//! Attacks on the watchdog. Each test was a finding once.

mod common;
#[path = "common/gate.rs"]
mod gate;

use bytes::Bytes;
use common::*;
use feedline::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Parts, Records};
use feedline::decode::Scratch;
use feedline::read::{Direct, Extent, Fault, Faulty, Mode, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Error, ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Result, Stage};
use gate::Gate;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

const ALL: OnBadSample = OnBadSample::Substitute { budget: u64::MAX };
const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn small() -> LoaderBuilder {
    Loader::builder(Records::builder(64).open_bytes(vec![7; 64 * 400]).unwrap()).batch_size(4).workers(2)
}

/// FINDING 11 (high). `Duration::MAX`, the plain way to say "never", is accepted, and `next()` panics after the first 100 ms of
/// waiting: `deadline * 2` overflows in `Watcher::look`. So does `Loader::ready`.
#[test]
fn no_more_the_longest_deadline_panics_in_next() {
    let loader = build(small().stall_deadline(Duration::MAX).map(|_, _| {
        std::thread::sleep(ms(100));
        Ok(())
    }));
    assert_eq!(loader.epoch(0).unwrap().next().unwrap().unwrap().len(), 4);
}

/// FINDING 12 (low). A deadline of 0 is accepted, and everything that takes any time is a stall of 0.0 s.
#[test]
fn no_more_a_deadline_of_zero_is_accepted_and_every_wait_is_a_stall() {
    let Ok(loader) = small()
        .stall_deadline(Duration::ZERO)
        .map(|_, _| {
            std::thread::sleep(ms(30));
            Ok(())
        })
        .build()
    else {
        return;
    };
    let first = loader.epoch(0).unwrap().next().unwrap();
    assert!(first.is_ok(), "{}", first.unwrap_err());
}

/// FINDING 13 (low). A deadline under 4 ns is accepted, spins, and never ends: each look counts `deadline / 4`, which is 0.
#[test]
fn no_more_a_deadline_of_a_few_nanoseconds_is_accepted_and_hangs_for_ever() {
    let gate = Gate::default();
    let inside = gate.clone();
    let map = move |_: &mut feedline::Row<'_>, _: &mut feedline::decode::Ctx<'_>| {
        inside.pass();
        Ok(())
    };
    let Ok(loader) = small().stall_deadline(Duration::from_nanos(3)).map(map).build() else { return };
    let mut epoch = loader.epoch(0).unwrap();
    let end = epoch.next_within(Duration::from_secs(5));
    gate.open();
    assert!(matches!(end, Poll::Ready(Some(Err(_)))), "5 s, more than a thousand million deadlines, and no stall");
}

/// FINDING 14 (medium). A read counts from its submission, so the depth of the queue counts as the storage's silence: a
/// disk that answers a read every 1.5 ms, without a pause, "does not answer".
#[test]
fn no_more_storage_that_answers_all_the_time_is_stalled_when_the_queue_is_long() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 2000, 64);
    let faulty = Arc::new(Faulty::new().ever(0, Fault::Late(ms(50))));
    let loader = build(
        Loader::builder(records(&path, 64))
            .batch_size(1000)
            .reader(Mode::Pread)
            .direct(Direct::Off)
            .depth(512)
            .stall_deadline(ms(400))
            .faulty(faulty.clone()),
    );
    let got: Result<Vec<_>> = loader.epoch(0).unwrap().map(|batch| batch.map(|batch| batch.len())).collect();
    assert!(got.is_ok(), "after {} operations of 50 ms, 32 at a time: {}", faulty.seen(), got.unwrap_err());
}

/// FINDING 15 (medium). A worker whose transform uses rayon may find a drain of the loader on its own thread (as `drain` knows),
/// which then does other samples for as long as there are any, without a cell of its own. The sample beneath looks stuck.
#[test]
fn no_more_transforms_that_use_rayon_inside_are_stalled_though_every_sample_takes_milliseconds() {
    for _ in 0..5 {
        let loader = build(small().batch_size(40).slots(10).workers(4).stall_deadline(ms(400)).map(|_, ctx| {
            let id = ctx.id();
            rayon::join(|| std::thread::sleep(ms(2)), || std::thread::sleep(ms(10 + id % 3)));
            Ok(())
        }));
        let got: Result<Vec<_>> = loader.epochs(0..2).unwrap().map(|batch| batch.map(|batch| batch.len())).collect();
        assert!(got.is_ok(), "{}", got.unwrap_err());
    }
}

/// The control of the one above: given time, every sample is done, and none took long by itself.
#[test]
fn the_same_transforms_end_when_the_deadline_is_long() {
    let (most, sum) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (inside, all) = (most.clone(), sum.clone());
    let started = Instant::now();
    let loader = build(small().batch_size(40).slots(10).workers(4).map(move |_, ctx| {
        let (id, began) = (ctx.id(), Instant::now());
        rayon::join(|| std::thread::sleep(ms(2)), || std::thread::sleep(ms(10 + id % 3)));
        inside.fetch_max(began.elapsed().as_millis() as u64, Ordering::SeqCst);
        all.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }));
    assert_eq!(loader.epochs(0..2).unwrap().map(|batch| batch.unwrap().len()).sum::<usize>(), 800);
    eprintln!(
        "{} transforms in {:?}, the longest in a transform {} ms",
        sum.load(Ordering::SeqCst),
        started.elapsed(),
        most.load(Ordering::SeqCst)
    );
}

/// Framed records in memory; what `open` and `member` do is said by the test.
struct Slow {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    open: Box<dyn Fn(u64) + Send + Sync>,
    member: Box<dyn Fn(u64) + Send + Sync>,
}

impl Slow {
    fn new(open: impl Fn(u64) + Send + Sync + 'static, member: impl Fn(u64) + Send + Sync + 'static) -> Self {
        let mut sources = Sources::new();
        sources.memory(vec![7; 400].into());
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [4]))];
        Self { sources: Arc::new(sources), schema, open: Box::new(open), member: Box::new(member) }
    }
}

impl Dataset for Slow {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        100
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sample_bytes_max(&self) -> u64 {
        4
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        parts.framed(0, Extent { source: SourceId::at(0), offset: sample * 4, len: 4 });
        Ok(())
    }
    fn open<'a>(&self, sample: u64, _: usize, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        (self.open)(sample);
        Ok(bytes)
    }
    fn member(&self, sample: u64) -> Option<String> {
        (self.member)(sample);
        None
    }
}

fn stall(loader: &Loader) -> Error {
    let error = loader.epoch(0).unwrap().find_map(Result::err).expect("it ended well");
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    error
}

/// FINDING 16 (medium). The whole of a substitute is `Doing::Reading`: a decoder that hangs on it, of a dataset without any file, is
/// "read: storage does not answer".
#[test]
fn no_more_a_decoder_that_hangs_on_a_substitute_is_called_storage() {
    let (gate, armed) = (Gate::default(), Arc::new(AtomicBool::new(false)));
    let (inside, arm, asked) = (gate.clone(), armed.clone(), Mutex::new(0));
    let open = move |_| {
        if armed.load(Ordering::SeqCst) {
            *asked.lock().unwrap() += 1;
            inside.pass();
        }
    };
    let builder = Loader::builder(Slow::new(open, |_| {})).batch_size(4).workers(1).order(Order::sequential());
    let loader = build(builder.on_bad_sample(ALL).stall_deadline(ms(300)).map(move |_, ctx| {
        if ctx.id() == 99 {
            arm.store(true, Ordering::SeqCst);
            return Err(Error::user("the last one"));
        }
        Ok(())
    }));
    let error = stall(&loader);
    gate.open();
    assert_eq!(error.stage(), Stage::Decode, "{error}");
}

/// FINDING 17 (low). `Dataset::member` ("may read a few bytes") is asked before the worker says what it does: the stall names the
/// sample and stage that this worker did before, or nobody.
#[test]
fn no_more_a_member_that_hangs_is_blamed_on_another_sample() {
    let gate = Gate::default();
    let inside = gate.clone();
    let dataset = Slow::new(|_| {}, move |_| inside.pass());
    let builder = Loader::builder(dataset).batch_size(10).workers(1).order(Order::sequential()).on_bad_sample(ALL);
    let bad = |_: &mut feedline::Row<'_>, ctx: &mut feedline::decode::Ctx<'_>| match ctx.id() {
        3 => Err(Error::user("three")),
        _ => Ok(()),
    };
    let loader = build(builder.stall_deadline(ms(300)).map(bad));
    let error = stall(&loader);
    gate.open();
    assert_eq!(error.site().sample, Some(3), "{error}");
}

/// FINDING 18 (low). Decoding and transforming a sample are one turn: a transform that has run for half of the deadline is stalled.
#[test]
fn no_more_the_time_in_the_decoder_counts_as_the_transform_s() {
    let dataset = Slow::new(
        |sample| {
            if sample == 9 {
                std::thread::sleep(ms(700))
            }
        },
        |_| {},
    );
    let loader = build(Loader::builder(dataset).batch_size(4).stall_deadline(ms(1000)).map(|_, ctx| {
        if ctx.id() == 9 {
            std::thread::sleep(ms(700));
        }
        Ok(())
    }));
    let error = loader.epoch(0).unwrap().find_map(Result::err);
    assert!(error.is_none(), "{}", error.unwrap());
}

/// One chunk.
struct Chunk(Slow, Vec<u64>);

impl Dataset for Chunk {
    fn schema(&self) -> &[EncodedField] {
        self.0.schema()
    }
    fn len(&self) -> u64 {
        100
    }
    fn sources(&self) -> &Arc<Sources> {
        self.0.sources()
    }
    fn sample_bytes_max(&self) -> u64 {
        4
    }
    fn extents<'a>(&'a self, _: u64, _: &mut Parts<'a>) -> Result<()> {
        unreachable!()
    }
    fn chunked(&self) -> Option<&dyn Chunked> {
        Some(self)
    }
}

impl Chunked for Chunk {
    fn starts(&self) -> &[u64] {
        &self.1
    }
    fn chunk_extents(&self, _: usize, extents: &mut Vec<Extent>) -> Result<()> {
        extents.push(Extent { source: SourceId::at(0), offset: 0, len: 400 });
        Ok(())
    }
    fn chunk_bytes(&self, _: usize) -> ChunkBytes {
        ChunkBytes { encoded: 400, opened: 400, scratch: 0 }
    }
    fn open_chunk(&self, _: usize, pieces: &[Bytes], _: &mut Scratch, out: &mut ChunkBuf) -> Result<()> {
        out.fixed(0, 4)?.copy_from_slice(&pieces[0]);
        Ok(())
    }
    fn chunk_name(&self, _: usize) -> String {
        "the chunk".into()
    }
}

/// FINDING 19 (low). The second try of a chunk's read is done under `Doing::Decoding`, without the extent: storage that wedges
/// after its EIO is "a decoder does not come back", without a path.
#[test]
fn no_more_storage_that_wedges_when_a_chunk_is_read_again_is_called_a_decoder() {
    let dir = Dir::new();
    let mut sources = Sources::new();
    sources.file(dir.write("chunk", &[7; 400]), 400).unwrap();
    let inner = Slow { sources: Arc::new(sources), ..Slow::new(|_| {}, |_| {}) };
    let faulty = Arc::new(Faulty::new().times(1, 1, Fault::Error(5)).ever(2, Fault::Late(ms(3000))));
    let builder = Loader::builder(Chunk(inner, vec![0, 100])).batch_size(4).stall_deadline(ms(300));
    let loader = build(builder.reader(Mode::Pread).direct(Direct::Off).faulty(faulty.clone()));
    let error = stall(&loader);
    assert_eq!(error.stage(), Stage::Read, "{error}, {:?}", faulty.hits());
    assert!(error.site().path.is_some(), "{error}");
}

#[test]
fn after_a_stall_what_is_held_stays_right_another_epoch_can_be_begun_and_all_can_be_dropped() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, 400, 64);
    for (mode, direct) in READERS {
        let gate = Gate::default();
        let inside = gate.clone();
        let loader = build(
            Loader::builder(records(&path, 64))
                .batch_size(4)
                .workers(2)
                .slots(4)
                .reader(mode)
                .direct(direct)
                .stall_deadline(ms(300))
                .map(move |_, ctx| {
                    if ctx.id() == 41 {
                        inside.pass();
                    }
                    Ok(())
                }),
        );
        let mut epoch = loader.epoch(0).unwrap();
        let held = epoch.next().unwrap().unwrap();
        assert_eq!(epoch.find_map(Result::err).unwrap().kind(), ErrorKind::Stalled);
        assert_eq!(stall(&loader).site().sample, Some(41));
        gate.open();
        assert_eq!(loader.epoch(1).unwrap().map(|batch| batch.unwrap().len()).sum::<usize>(), 400);
        drop(loader);
        assert_eq!(held.fields().next().unwrap().as_bytes().unwrap(), &bytes[..256]);
    }
}

#[test]
fn who_polls_rarely_or_sleeps_long_between_batches_sees_no_stall() {
    let loader = build(small().batch_size(50).slots(2).stall_deadline(ms(200)).map(|_, _| {
        std::thread::sleep(ms(10));
        Ok(())
    }));
    let mut epoch = loader.epoch(0).unwrap();
    let (started, mut got) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_secs(60) {
        match epoch.next_within(Duration::ZERO) {
            Poll::Ready(Some(batch)) => got += batch.unwrap().len(),
            Poll::Ready(None) => break,
            Poll::Pending => std::thread::sleep(ms(170)),
        }
    }
    assert_eq!(got, 400);
    let mut epoch = loader.epoch(1).unwrap();
    for _ in 0..3 {
        std::thread::sleep(ms(700));
        assert_eq!(epoch.next().unwrap().unwrap().len(), 50);
    }
}

/// FINDING 25 (medium). "`Stalled { stage, path, offset, sample, waited }`": storage that wedges when a sample is read again, or when a
/// substitute is read, is named without path and offset; where the page cache is asked, it is a decoder, too.
fn wedged(case: &str) -> Error {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 40, 64);
    let late = Fault::Late(ms(2500));
    let faulty = Arc::new(match case {
        "again" => Faulty::new().times(1, 1, Fault::Error(5)).ever(2, late),
        "cache" => Faulty::new().ever(0, late),
        _ => Faulty::new(),
    });
    let (inject, substitutes) = (faulty.clone(), case == "substitute");
    let builder = Loader::builder(records(&path, 64)).batch_size(40).slots(2).workers(1).order(Order::sequential());
    let mode = if case == "cache" { Mode::Auto } else { Mode::Pread };
    let loader =
        build(builder.on_bad_sample(ALL).reader(mode).direct(Direct::Off).stall_deadline(ms(400)).faulty(faulty).map(
            move |_, ctx| match ctx.id() {
                39 if substitutes => {
                    inject.inject(1000, late);
                    Err(Error::user("bad"))
                }
                _ => Ok(()),
            },
        ));
    stall(&loader)
}

#[test]
fn no_more_a_wedged_second_try_is_named_without_its_place() {
    let error = wedged("again");
    assert!(error.stage() == Stage::Read && error.site().path.is_some() && error.site().offset.is_some(), "{error}");
}

#[test]
fn no_more_a_wedged_read_of_a_substitute_is_named_without_its_place() {
    let error = wedged("substitute");
    assert!(error.stage() == Stage::Read && error.site().path.is_some() && error.site().offset.is_some(), "{error}");
}

#[test]
fn no_more_a_wedged_look_into_the_page_cache_is_called_a_decoder() {
    let error = wedged("cache");
    assert!(error.stage() == Stage::Read && error.site().path.is_some() && error.site().offset.is_some(), "{error}");
}

/// FINDING 26 (low). A drain within a transform ends the cell of the one beneath: when that one hangs afterwards, "no batch is under
/// way", and nobody is named.
#[test]
fn no_more_a_transform_that_hangs_after_a_drain_ran_within_it_is_not_named() {
    let (gate, hung) = (Gate::default(), Arc::new(AtomicU64::new(u64::MAX)));
    let (inside, who) = (gate.clone(), hung.clone());
    let loader = build(small().batch_size(40).slots(4).workers(3).stall_deadline(ms(2000)).map(move |_, ctx| {
        let (id, began) = (ctx.id(), Instant::now());
        rayon::join(|| std::thread::sleep(ms(1)), || std::thread::sleep(ms(5)));
        let nested = began.elapsed() > ms(150);
        if nested && who.compare_exchange(u64::MAX, id, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            inside.pass();
        }
        Ok(())
    }));
    let error = loader.epochs(0..20).unwrap().find_map(Result::err);
    gate.open();
    let Some(error) = error else { panic!("no drain ran within a transform: nothing was tested") };
    assert_eq!(error.site().sample, Some(hung.load(Ordering::SeqCst)), "{error}");
}

/// FINDING 27 (low). Each pause of the whole process counts for a quarter of the deadline, so four of them make a stall of a sample
/// that has run for a fraction of it (a job that is suspended and resumed, a frozen cgroup).
#[test]
fn no_more_a_process_that_is_stopped_five_times_is_stalled() {
    const TEST: &str = "no_more_a_process_that_is_stopped_five_times_is_stalled";
    if std::env::var("ATTACK_STOP").is_ok() {
        // About 1.2 s of its own time, on one sample, with a deadline of 4 s.
        let loader = build(small().workers(1).stall_deadline(ms(4000)).map(|_, ctx| {
            if ctx.id() == 0 {
                println!("begun");
                let mut last = Instant::now();
                let mut own = Duration::ZERO;
                while own < ms(1200) {
                    std::thread::sleep(ms(1));
                    own += last.elapsed().min(ms(50));
                    last = Instant::now();
                }
            }
            Ok(())
        }));
        let error = loader.epoch(0).unwrap().find_map(Result::err);
        assert!(error.is_none(), "{}", error.unwrap());
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env("ATTACK_STOP", "1")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(ms(500));
    let signal = |word: &str, pid: u32| {
        std::process::Command::new("kill").args([word, &pid.to_string()]).status().unwrap();
    };
    for _ in 0..6 {
        signal("-STOP", child.id());
        std::thread::sleep(ms(1300));
        signal("-CONT", child.id());
        std::thread::sleep(ms(110));
    }
    let status = child.wait().unwrap();
    let mut words = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut words).unwrap();
    assert!(status.success(), "{words}");
}
