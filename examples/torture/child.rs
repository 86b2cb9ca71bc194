//! A child: damages the copy, reads it through a loader, and reports the result.
//!
//! ```text
//! (damage) ─► open ─► (damage) ─► build ─► epoch ─► rows ─► Checker ─► ChildReport, one line on standard output
//! ```
//!
//! The child of [`Act::Oracle`] records the expected samples: a hash of all fields of each row. The
//! row also holds a hash of each picture's stored bytes, so that a flipped bit shows even if the
//! pixels are equal.

use crate::damage::inflict;
use crate::job::{Act, ChildReport, Damage, Fault, Job, Phase, REPORT, When};
use crate::source::{Opened, SourceArgs};
use feedline::dataset::{Dataset, DatasetExt};
use feedline::decode::{Bytes, Ctx, Decoder, Image};
use feedline::order::Draws;
use feedline::storage::Mode;
use feedline::tensor::{DType, EncodedField, Encoding, Field};
use feedline::{Batch, Loader, LoaderBuilder, OnBadSample, Order, Row, State, Status};
use rustix::process::{
    Resource, Rlimit, Signal, getpid, getrlimit, kill_process, set_parent_process_death_signal,
    setrlimit,
};
use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
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
    let mut child = Child {
        args,
        job,
        phase: Phase::Open,
        report: ChildReport::default(),
    };
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
        return Fault {
            phase,
            kind: "other".into(),
            text,
            path: None,
            offset: None,
            sample: None,
        };
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
            let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
            setrlimit(
                Resource::Nofile,
                Rlimit {
                    current: Some(limit),
                    maximum,
                },
            )?;
        }
        self.damage(When::Before)?;
        let Opened { dataset, damage } = if job.substitute {
            self.args.open_all()?
        } else {
            as_opened(&self.args)?
        };
        self.report.damage = damage.iter().map(ToString::to_string).collect();
        self.report.samples = dataset.len();
        self.damage(When::Indexed)?;
        self.phase = Phase::Build;
        let loader = self.builder(dataset.clone())?.build()?;
        self.phase = Phase::Epoch;
        match job.act {
            Act::Oracle => self.oracle(&loader, &*dataset),
            Act::Killed => self.killed(&loader),
            Act::Resumed => self.resumed(&loader),
            _ => self.read(&loader),
        }
    }

    fn damage(&self, when: When) -> Anyhow<()> {
        match &self.job.damage {
            Some(damage) if damage.when == when => {
                Ok(inflict(damage, self.args.source, self.job.seed)?)
            }
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
        fs::write(self.job.work.join("oracle"), serde_json::to_vec(&hashes)?)?;
        let sources = dataset.sources();
        let names = sources
            .ids()
            .filter(|id| sources.bytes_of(*id).is_none())
            .map(|id| sources.path(id));
        self.report.files = names.filter(|path| path.to_str().is_some()).collect();
        Ok(())
    }

    fn read(&mut self, loader: &Loader) -> Anyhow<()> {
        let mut checker = Checker::new(self.job)?;
        let half = loader.batches_per_epoch() / 2;
        let result =
            loader
                .epoch(loader.next_epoch())?
                .enumerate()
                .try_for_each(|(index, batch)| {
                    if self.job.act == Act::Stopped && index as u64 == half {
                        // A stopped process cannot wake itself.
                        let waker = format!("sleep 1; kill -CONT {}", std::process::id());
                        std::process::Command::new("sh")
                            .args(["-c", &waker])
                            .spawn()?;
                        kill_process(getpid(), Signal::STOP)?;
                    }
                    checker.take(&batch?)
                });
        checker.fill(loader, &mut self.report);
        result?;
        self.report.missing = checker.missing();
        Ok(())
    }

    /// Saves a state for every batch, until a signal kills the process.
    fn killed(&mut self, loader: &Loader) -> Anyhow<()> {
        let mut log = Log::open(&self.job.work.join("killed.log"))?;
        let half = loader.batches_per_epoch() / 2;
        let wait = Duration::from_micros(Draws::new(self.job.seed, 0, 0, "kill").below(20_000));
        for (index, batch) in loader.epoch(0)?.enumerate() {
            log.write(&batch?, self.job.batch)?;
            loader.state()?.save(self.job.work.join("killed.state"))?;
            if index as u64 == half {
                std::thread::spawn(move || {
                    std::thread::sleep(wait);
                    let _ = kill_process(getpid(), Signal::KILL);
                });
            }
        }
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
            for batch in loader.epoch(epoch)? {
                log.write(&batch?, self.job.batch)?;
            }
        }
        let checker = Checker::new(self.job)?;
        let mut seen = HashMap::new();
        for line in fs::read_to_string(&path)?.lines() {
            let mut words = line.split(' ').map(str::parse::<u64>);
            let mut next = || words.next().and_then(Result::ok).ok_or("a log line is cut");
            let position = next()?;
            let id = next()?;
            let hash = next()?;
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
        self.report.note = Some(format!(
            "killed after {before} of {} samples",
            planned.len()
        ));
        Ok(())
    }
}

fn as_opened(args: &SourceArgs) -> Anyhow<Opened> {
    Ok(Opened {
        dataset: args.open()?,
        damage: Vec::new(),
    })
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
            Encoding::Image => {
                builder.decode_field(&field.name, Witness(Image::resize(SIDE, SIDE)))
            }
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
        outputs.push(Field::fixed(
            format!("{}.stored", input.name),
            DType::U64,
            [],
        ));
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
            // Only the valid bytes, because the padding depends on the longest sample of the
            // dataset.
            let most = field.shape().get(1).copied().unwrap_or(1).max(1);
            let valid = field
                .lens()
                .map_or(bytes.len(), |lens| bytes.len() / most * lens[0] as usize);
            hash.update(&(valid as u64).to_le_bytes());
            hash.update(&bytes[..valid]);
        }
        out.push(Seen {
            id: row.ids()[0],
            status: row.status()[0],
            hash: hash.digest(),
        });
    }
    Ok(out)
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
        let hashes: Vec<u64> = serde_json::from_slice(&fs::read(job.work.join("oracle"))?)?;
        let mut left = HashMap::new();
        for hash in &hashes {
            *left.entry(*hash).or_insert(0) += 1;
        }
        let moved = matches!(
            &job.damage,
            Some(Damage {
                when: When::Before,
                ..
            })
        );
        Ok(Self {
            hashes,
            left,
            moved,
            exact: 0,
            wrong: 0,
            substituted: 0,
        })
    }

    fn take(&mut self, batch: &Batch) -> Anyhow<()> {
        for row in rows(batch)? {
            let known = self.left.contains_key(&row.hash);
            let right = if self.moved {
                known
            } else {
                self.hashes.get(row.id as usize) == Some(&row.hash)
            };
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
        report.exact = self.exact;
        report.wrong = self.wrong;
        report.substituted = self.substituted;
        let ledger = loader.ledger();
        report.bad = ledger.samples.len() as u64;
        let nameless = ledger
            .samples
            .iter()
            .filter(|bad| bad.path.is_none() || bad.offset.is_none());
        report.unnamed = nameless.count() as u64 + ledger.substituted.abs_diff(self.substituted);
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
