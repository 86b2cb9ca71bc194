//! A child: damages the copy, reads it through a loader, and reports the result.
//!
//! ```text
//! (damage) ─► open ─► (damage) ─► build ─► epoch ─► rows ─► Checker ─► ChildReport, one line on standard output
//! ```
//!
//! The child of [`Act::Oracle`] records the expected samples: a hash of all fields of each row. The row also holds a
//! hash of each picture's stored bytes, so that a flipped bit shows even if the pixels are equal.

use crate::damage::inflict;
use crate::job::{Act, ChildReport, Damage, Fault, Job, Phase, REPORT, STOP_ME, When};
use crate::source::{Opened, SourceArgs};
use feedline::dataset::Dataset;
use feedline::decode::{Bytes, Ctx, Decoder, Image};
use feedline::order::Draws;
use feedline::storage::Mode;
use feedline::tensor::{DType, EncodedField, Encoding, Field};
use feedline::{Batch, Epoch, ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Row, State, Status};
use rustix::process::{
    Resource, Rlimit, Signal, getpid, getrlimit, kill_process, set_parent_process_death_signal, setrlimit,
};
use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

type Anyhow<T> = Result<T, Box<dyn Error>>;

/// Seed of the order.
const ORDER: u64 = 7;
/// Pixels of a decoded picture in each direction.
const SIDE: u32 = 32;

/// Runs the job, prints its report and exits, even if a thread never returns.
pub fn run(mut args: SourceArgs, job: &Job) -> ExitCode {
    // The child must not outlive the supervisor.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    args.path.clone_from(&job.path);
    args.checked.clone_from(&job.checked);
    args.record_bytes = job.record_bytes.or(args.record_bytes);
    let mut child = Child { args, job, phase: Phase::Open, report: ChildReport::default() };
    if let Err(error) = child.run() {
        child.report.error = Some(fault(&*error, child.phase));
    }
    let line = serde_json::to_string(&child.report).unwrap_or_default();
    println!("{REPORT}{line}");
    std::process::exit(0)
}

fn fault(error: &(dyn Error + 'static), phase: Phase) -> Fault {
    let Some(ours) = error.downcast_ref::<feedline::Error>() else {
        let text = error.to_string();
        return Fault { phase, kind: "other".into(), text, path: None, offset: None, sample: None };
    };
    let site = ours.site();
    Fault {
        phase,
        text: ours.to_string(),
        kind: ours.kind().as_str().into(),
        path: site.path.clone(),
        offset: site.offset,
        sample: site.sample,
    }
}

struct Child<'a> {
    args: SourceArgs,
    job: &'a Job,
    phase: Phase,
    report: ChildReport,
}

impl Child<'_> {
    fn run(&mut self) -> Anyhow<()> {
        let job = self.job;
        if let Act::Descriptors(limit) = job.act {
            lower(Resource::Nofile, limit)?;
        }
        self.damage(When::Before)?;
        let Opened { dataset, damage } = if job.substitute { self.args.open_all()? } else { as_opened(&self.args)? };
        (self.report.damage, self.report.samples) = (damage.iter().map(ToString::to_string).collect(), dataset.len());
        self.damage(When::Indexed)?;
        self.phase = Phase::Build;
        match job.act {
            Act::Stuck => return self.stuck(dataset),
            Act::Dropped(times) => return self.dropped(dataset, times),
            _ => {}
        }
        let loader = self.builder(dataset.clone())?.build()?;
        self.phase = Phase::Epoch;
        match job.act {
            Act::Oracle => self.oracle(&loader, &*dataset),
            Act::Held => self.held(&loader),
            Act::Killed => self.killed(&loader),
            Act::Resumed => self.resumed(&loader),
            _ => self.read(&loader),
        }
    }

    fn damage(&self, when: When) -> Anyhow<()> {
        match &self.job.damage {
            Some(damage) if damage.when == when => Ok(inflict(damage, self.args.source, self.job.seed)?),
            _ => Ok(()),
        }
    }

    /// A loader with the settings of the job.
    fn builder(&self, dataset: Arc<dyn Dataset>) -> Anyhow<LoaderBuilder> {
        let job = self.job;
        let mut builder = plain(dataset, job)?;
        if job.substitute {
            builder = builder.on_bad_sample(OnBadSample::Substitute { budget: u64::MAX });
        }
        Ok(match job.act {
            Act::Pread => builder.tuning(|t| t.reader(Mode::Pread)),
            Act::Held => builder.tuning(|t| t.slots(2).held_deadline(Duration::from_millis(300))),
            Act::FullDevice => builder.ledger("/dev/full"),
            Act::FullDisk => {
                let builder = builder.ledger(job.work.join("ledger"));
                // Writes fail from now on. Without a handler the signal would kill the process.
                signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
                lower(Resource::Fsize, 0)?;
                builder
            }
            Act::Resumed => builder.resume(State::load(job.work.join("killed.state"))?),
            Act::Older => builder.resume(State::load(job.work.join("older.state"))?),
            _ => builder,
        })
    }

    /// Records a hash of every sample, and the files.
    fn oracle(&mut self, loader: &Loader, dataset: &dyn Dataset) -> Anyhow<()> {
        let mut hashes = vec![0_u64; dataset.len() as usize];
        let half = loader.batches_per_epoch() / 2;
        for (index, batch) in loader.epoch(0)?.enumerate() {
            for row in rows(&batch?)? {
                hashes[row.id as usize] = row.hash;
                self.report.exact += 1;
            }
            if index as u64 == half {
                loader.state()?.save(self.job.work.join("older.state"))?;
            }
        }
        fs::write(self.job.work.join("oracle"), hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect::<Vec<_>>())?;
        let sources = dataset.sources();
        let names = sources.ids().filter(|id| sources.bytes_of(*id).is_none()).map(|id| sources.path(id));
        self.report.files = names.filter(|path| path.to_str().is_some()).collect();
        Ok(())
    }

    fn read(&mut self, loader: &Loader) -> Anyhow<()> {
        let mut checker = Checker::new(self.job)?;
        let half = loader.batches_per_epoch() / 2;
        let result = pull(&mut loader.epoch(loader.next_epoch())?, |index, batch| {
            if self.job.act == Act::Stopped && index == half {
                println!("{STOP_ME}");
                std::thread::sleep(Duration::from_millis(100));
            }
            checker.take(&batch)?;
            Ok(ControlFlow::Continue(()))
        });
        checker.fill(loader, &mut self.report);
        result?;
        self.report.missing = checker.missing();
        if self.job.act == Act::FullDisk {
            let why = loader.ledger().not_written.ok_or("the ledger did not report that its file cannot be written")?;
            self.report.note = Some(format!("ledger: {why}"));
        }
        Ok(())
    }

    /// Keeps batches until `next()` returns `BatchesHeld`; then drops them and continues.
    fn held(&mut self, loader: &Loader) -> Anyhow<()> {
        let mut checker = Checker::new(self.job)?;
        let (mut epoch, mut kept, mut refused) = (loader.epoch(0)?, Vec::new(), false);
        loop {
            match epoch.next() {
                None => break,
                Some(Ok(batch)) if refused => checker.take(&batch)?,
                Some(Ok(batch)) => {
                    checker.take(&batch)?;
                    kept.push(batch);
                }
                Some(Err(error)) if error.kind() == ErrorKind::BatchesHeld && !refused => {
                    refused = true;
                    self.report.note = Some("refused, and continued after the drop".into());
                    kept.clear();
                }
                Some(Err(error)) => return Err(error.into()),
            }
        }
        checker.fill(loader, &mut self.report);
        self.report.missing = checker.missing();
        if refused || kept.len() <= 2 { Ok(()) } else { Err("all batches were held without an error".into()) }
    }

    /// Runs a transform that never returns from the middle sample.
    fn stuck(&mut self, dataset: Arc<dyn Dataset>) -> Anyhow<()> {
        let victim = dataset.len() / 2;
        let builder = plain(dataset, self.job)?.tuning(|t| t.stall_deadline(Duration::from_secs(1)));
        let loader = builder
            .map(move |_, ctx| {
                while ctx.id() == victim {
                    std::thread::sleep(Duration::from_secs(3600));
                }
                Ok(())
            })
            .build()?;
        self.phase = Phase::Epoch;
        let error = loader.epoch(0)?.find_map(Result::err).ok_or("the epoch ended without an error")?;
        let dropped = Instant::now();
        drop(loader);
        let took = dropped.elapsed().as_secs_f64();
        let right = error.site().sample == Some(victim);
        let what = if right { "the sample is named" } else { "ANOTHER sample is named" };
        self.report.note = Some(format!("{what}; dropped in {took:.1} s"));
        Err(error.into())
    }

    /// Drops loaders at random points, and counts the threads and descriptors left.
    fn dropped(&mut self, dataset: Arc<dyn Dataset>, times: u32) -> Anyhow<()> {
        let mut draws = Draws::new(self.job.seed, 0, 0, "drop");
        let mut before = None;
        for round in 0..times {
            let loader = plain(dataset.clone(), self.job)?.build()?;
            let most = loader.batches_per_epoch().min(6);
            let mut epoch = loader.epoch(u64::from(round))?;
            for _ in 0..draws.below(most + 1) {
                if let Some(batch) = epoch.next() {
                    batch?;
                }
            }
            std::thread::sleep(Duration::from_micros(draws.below(2000)));
            if draws.below(2) == 0 {
                drop(loader);
                drop(epoch);
            } else {
                drop(epoch);
                drop(loader);
            }
            // After the first loader, which may start permanent threads of libraries.
            before.get_or_insert_with(|| settled(None));
        }
        let after = settled(before);
        let before = before.unwrap_or_default();
        if after.0 > before.0 || after.1 > before.1 {
            return Err(format!("threads and descriptors rose from {before:?} to {after:?}").into());
        }
        self.report.note = Some("threads and descriptors as before".into());
        let loader = plain(dataset, self.job)?.build()?;
        self.phase = Phase::Epoch;
        self.read(&loader)
    }

    /// Saves a state for every batch, until a signal kills the process.
    fn killed(&mut self, loader: &Loader) -> Anyhow<()> {
        let mut log = Log::open(&self.job.work.join("killed.log"))?;
        let half = loader.batches_per_epoch() / 2;
        let wait = Duration::from_micros(Draws::new(self.job.seed, 0, 0, "kill").below(20_000));
        pull(&mut loader.epoch(0)?, |index, batch| {
            log.write(&batch, self.job.batch)?;
            loader.state()?.save(self.job.work.join("killed.state"))?;
            if index == half {
                std::thread::spawn(move || {
                    std::thread::sleep(wait);
                    let _ = kill_process(getpid(), Signal::KILL);
                });
            }
            Ok(ControlFlow::Continue(()))
        })?;
        std::thread::sleep(Duration::from_secs(3600));
        Ok(())
    }

    /// Resumes the killed run, and compares both logs with the oracle.
    fn resumed(&mut self, loader: &Loader) -> Anyhow<()> {
        let path = self.job.work.join("killed.log");
        let before = fs::read_to_string(&path)?.lines().count();
        let mut log = Log::open(&path)?;
        let epoch = loader.next_epoch();
        if epoch == 0 {
            pull(&mut loader.epoch(epoch)?, |_, batch| {
                log.write(&batch, self.job.batch)?;
                Ok(ControlFlow::Continue(()))
            })?;
        }
        let checker = Checker::new(self.job)?;
        let mut seen = HashMap::new();
        for line in fs::read_to_string(&path)?.lines() {
            let mut words = line.split(' ').map(str::parse::<u64>);
            let mut next = || words.next().and_then(Result::ok).ok_or("a log line is cut");
            let (position, id, hash) = (next()?, next()?, next()?);
            let same = *seen.entry(position).or_insert((id, hash)) == (id, hash);
            self.report.wrong += u64::from(!same || checker.hashes.get(id as usize) != Some(&hash));
        }
        let planned = loader.preview(0, self.report.samples)?;
        for (position, id) in planned.iter().enumerate() {
            match seen.get(&(position as u64)) {
                Some((got, _)) if got == id => self.report.exact += 1,
                Some(_) => self.report.wrong += 1,
                None => self.report.missing += 1,
            }
        }
        self.report.note = Some(format!("killed after {before} of {} samples", planned.len()));
        Ok(())
    }
}

fn as_opened(args: &SourceArgs) -> Anyhow<Opened> {
    Ok(Opened { dataset: args.open()?, damage: Vec::new() })
}

/// A loader that shuffles, and decodes encoded fields.
fn plain(dataset: Arc<dyn Dataset>, job: &Job) -> feedline::Result<LoaderBuilder> {
    let mut builder = Loader::builder(dataset.clone())
        .order(Order::shuffled(ORDER))
        .seed(job.seed)
        .batch_size(job.batch)
        .workers(job.workers)
        .tuning(|t| t.stall_deadline(Duration::from_secs(20)));
    for (number, field) in dataset.schema().iter().enumerate() {
        builder = match field.encoding {
            Encoding::Image => builder.decode_field(&field.name, Witness(Image::resize(SIDE, SIDE))),
            Encoding::Bytes => {
                let most = dataset.field_bytes_max(number)?.max(1) as usize;
                builder.decode_field(&field.name, Bytes::up_to(most))
            }
            _ => builder,
        };
    }
    Ok(builder)
}

/// Decodes a picture, and adds a hash of its stored bytes.
struct Witness(Image);

impl Decoder for Witness {
    fn outputs(&self, input: &EncodedField) -> feedline::Result<Vec<Field>> {
        let mut outputs = self.0.outputs(input)?;
        outputs.push(Field::fixed(format!("{}.stored", input.name), DType::U64, []));
        Ok(outputs)
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> feedline::Result<()> {
        let place = ctx.fields().end - 1;
        out.slice_mut::<u64>(place)?[0] = xxh3_64(input);
        self.0.decode(input, ctx, out)
    }
}

/// A row of a batch.
struct Seen {
    id: u64,
    status: u8,
    hash: u64,
}

fn rows(batch: &Batch) -> feedline::Result<Vec<Seen>> {
    let mut out = Vec::with_capacity(batch.len());
    for row in batch.micro(batch.len())? {
        let mut hash = Xxh3::new();
        for field in row.fields() {
            let bytes = field.as_bytes()?;
            // Only the valid bytes, because the padding depends on the longest sample of the dataset.
            let most = field.shape().get(1).copied().unwrap_or(1).max(1);
            let valid = field.lens().map_or(bytes.len(), |lens| bytes.len() / most * lens[0] as usize);
            hash.update(&(valid as u64).to_le_bytes());
            hash.update(&bytes[..valid]);
        }
        out.push(Seen { id: row.ids()[0], status: row.status()[0], hash: hash.digest() });
    }
    Ok(out)
}

fn pull(epoch: &mut Epoch, mut take: impl FnMut(u64, Batch) -> Anyhow<ControlFlow<()>>) -> Anyhow<()> {
    for (index, batch) in epoch.enumerate() {
        if take(index as u64, batch?)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// Compares rows with the oracle.
struct Checker {
    hashes: Vec<u64>,
    /// Expected count of each hash, less the rows so far.
    left: HashMap<u64, u64>,
    /// Sample ids may differ, because the dataset was indexed anew with fewer or shorter files.
    moved: bool,
    exact: u64,
    wrong: u64,
    substituted: u64,
}

impl Checker {
    fn new(job: &Job) -> Anyhow<Self> {
        let bytes = fs::read(job.work.join("oracle"))?;
        let hashes: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
            .collect();
        let mut left = HashMap::new();
        for hash in &hashes {
            *left.entry(*hash).or_insert(0) += 1;
        }
        let moved = matches!(&job.damage, Some(Damage { when: When::Before, .. }));
        Ok(Self { hashes, left, moved, exact: 0, wrong: 0, substituted: 0 })
    }

    fn take(&mut self, batch: &Batch) -> Anyhow<()> {
        for row in rows(batch)? {
            let known = self.left.contains_key(&row.hash);
            let right = if self.moved { known } else { self.hashes.get(row.id as usize) == Some(&row.hash) };
            if !right {
                self.wrong += 1;
            } else if row.status == Status::Substitute as u8 {
                self.substituted += 1;
            } else {
                self.exact += 1;
                *self.left.entry(row.hash).or_insert(1) -= 1;
            }
        }
        Ok(())
    }

    /// Samples of the oracle that did not arrive.
    fn missing(&self) -> u64 {
        let absent: u64 = self.left.values().sum();
        absent.saturating_sub(self.substituted + self.wrong)
    }

    fn fill(&self, loader: &Loader, report: &mut ChildReport) {
        (report.exact, report.wrong, report.substituted) = (self.exact, self.wrong, self.substituted);
        let ledger = loader.ledger();
        report.bad = ledger.samples.len() as u64;
        let nameless = |path: bool, offset: bool| !(path && offset);
        report.unnamed =
            ledger.samples.iter().filter(|bad| nameless(bad.path.is_some(), bad.offset.is_some())).count() as u64;
        if ledger.substituted != self.substituted {
            report.unnamed += ledger.substituted.abs_diff(self.substituted);
        }
    }
}

/// Log of a run that will be killed: a line per row, one write per batch.
struct Log(File);

impl Log {
    fn open(path: &Path) -> Anyhow<Self> {
        Ok(Self(File::options().append(true).create(true).open(path)?))
    }

    fn write(&mut self, batch: &Batch, rows_per_batch: usize) -> Anyhow<()> {
        let first = batch.index() * rows_per_batch as u64;
        let mut text = String::new();
        for (position, row) in (first..).zip(rows(batch)?) {
            text += &format!("{position} {} {}\n", row.id, row.hash);
        }
        Ok(self.0.write_all(text.as_bytes())?)
    }
}

fn lower(resource: Resource, limit: u64) -> Anyhow<()> {
    let Rlimit { maximum, .. } = getrlimit(resource);
    Ok(setrlimit(resource, Rlimit { current: Some(limit), maximum })?)
}

/// Number of threads and descriptors, once it is down to `before` or stable, or after 5 s.
fn settled(before: Option<(usize, usize)>) -> (usize, usize) {
    let count = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
    let now = || (count("/proc/self/task"), count("/proc/self/fd"));
    let (mut last, until) = (now(), Instant::now() + Duration::from_secs(5));
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let next = now();
        let settled = before.map_or(next == last, |before| next.0 <= before.0 && next.1 <= before.1);
        if settled || Instant::now() > until {
            return next;
        }
        last = next;
    }
}
