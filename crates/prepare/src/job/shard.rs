//! Writes the shard of a task: pictures are made in parallel, and written in order.
//!
//! ```text
//! plan ──order──► window of pictures ──rayon: read, seek points──► window of bytes ──one writer──► shard-000017.tar
//!                 (next one)                                       (this one)
//! ```
//!
//! The next window is made while one window is written.

use super::super::output;
#[cfg(feature = "parquet")]
use super::super::parquet;
use super::super::pictures::Picture;
use super::super::shards::ShardSettings;
use super::super::tar;
use super::plan::Plan;
use super::record::{Done, Output, Record, RecordList};
use crate::Format;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::stop::Stop;
use feedline_core::order::{Key, Permutation};
use feedline_core::storage::publish::Pending;
use feedline_formats::Tar;
use feedline_jpeg::{Decoder, Embedded};
use rayon::prelude::*;
use std::ops::Range;
use std::path::Path;

const WINDOW_PICTURES: u64 = 256;
const WINDOW_BYTES: u64 = 32 << 20;

/// A running task.
pub(super) struct Task<'a> {
    maker: Maker<'a>,
    order: Option<Permutation>,
    /// The task's range of positions in the (shuffled) order of all pictures.
    positions: Range<u64>,
    format: Format,
    /// Name of the shard.
    name: String,
    /// Created with the first picture that is written.
    writer: Option<ShardWriter>,
    record: Record,
    done: Done,
}

/// Makes pictures, on all workers.
#[derive(Clone, Copy)]
struct Maker<'a> {
    plan: &'a Plan,
    settings: &'a ShardSettings,
    stop: &'a Stop,
}

/// A picture that is ready to be written: what happened to it, and its bytes.
struct Made {
    picture: Picture,
    result: Result<(ShardOutcome, Vec<u8>)>,
}

enum ShardOutcome {
    /// This many bytes of seek points were added.
    Points(u32),
    /// No seek points were added, for this reason; `None` if none were requested.
    Unchanged(Option<String>),
}

enum ShardWriter {
    Tar(Pending),
    #[cfg(feature = "parquet")]
    Parquet(Box<parquet::Writer>),
}

impl<'a> Task<'a> {
    pub(super) fn begin(
        plan: &'a Plan,
        settings: &'a ShardSettings,
        format: Format,
        task: u64,
        stop: &'a Stop,
    ) -> Result<Self> {
        let key = settings.seed.map(|seed| Key::new(seed).named("prepare"));
        Ok(Self {
            maker: Maker {
                plan,
                settings,
                stop,
            },
            order: key.map(|key| Permutation::new(plan.inputs(), key)),
            positions: plan.share(task),
            format,
            name: format.shard(task),
            writer: None,
            record: Record::create(plan.record(task))?,
            done: Done {
                plan: plan.id_text(),
                task,
                ..Done::default()
            },
        })
    }

    /// Writes the shard, its index, and the record. `progress` gets the number of finished pictures
    /// after each window.
    pub(super) fn run(mut self, progress: &mut (dyn FnMut(u64) + Send)) -> Result<()> {
        let maker = self.maker;
        let first = self.positions.start;
        let mut position = first;
        let mut made = maker.make(self.window(position)?);
        while !made.is_empty() {
            position += made.len() as u64;
            let next = self.window(position)?;
            let (taken, following) = rayon::join(
                || made.into_iter().try_for_each(|made| self.take(made)),
                || maker.make(next),
            );
            taken?;
            made = following;
            progress(position - first);
        }
        self.finish()
    }

    /// The pictures of the window that starts at position `start`.
    fn window(&self, start: u64) -> Result<Vec<Picture>> {
        let mut window = Vec::new();
        let mut bytes = 0;
        for position in start..self.positions.end.min(start + WINDOW_PICTURES) {
            let sample = self
                .order
                .as_ref()
                .map_or(position, |order| order.get(position));
            let picture = self.maker.plan.picture(sample)?;
            bytes += picture.len;
            if !window.is_empty() && bytes > WINDOW_BYTES {
                break;
            }
            window.push(picture);
        }
        Ok(window)
    }

    /// Writes one picture, or its line of the ledger.
    fn take(&mut self, made: Made) -> Result<()> {
        let Made { picture, result } = made;
        // Paths in manifest and ledger are relative to the input folder.
        let plan = self.maker.plan;
        let source = output::escaped(
            picture
                .path
                .strip_prefix(plan.root())
                .unwrap_or(&picture.path),
        );
        let (outcome, bytes) = match result {
            Ok(made) => made,
            // A decode error is the picture's fault, not the machine's.
            Err(error) if self.maker.settings.skip_damaged && error.stage() == Stage::Decode => {
                self.done.damaged += 1;
                return self
                    .record
                    .put(RecordList::Ledger, &output::ledger_line(&source, &error));
            }
            Err(error) => return Err(error),
        };
        let key = self.positions.start + self.done.samples;
        let before = picture.len;
        let after = bytes.len() as u64;
        self.append(key, &picture, bytes)?;
        self.done.samples += 1;
        self.done.bytes.0 += before;
        self.done.bytes.1 += after;
        let outcome = match outcome {
            ShardOutcome::Points(bytes) => {
                self.done.with_points += 1;
                format!("seek points of {bytes} bytes")
            }
            ShardOutcome::Unchanged(None) => "unchanged".into(),
            ShardOutcome::Unchanged(Some(reason)) => {
                let line = format!("unchanged: {reason}");
                *self.done.unchanged.entry(reason).or_default() += 1;
                line
            }
        };
        let label = picture
            .class
            .map_or(String::new(), |class| class.to_string());
        let shard = &self.name;
        let line = format!("{key:08}\t{shard}\t{label}\t{source}\t{outcome}\t{before}\t{after}\n");
        self.record.put(RecordList::Manifest, &line)
    }

    /// Appends a sample to the shard.
    fn append(&mut self, key: u64, picture: &Picture, bytes: Vec<u8>) -> Result<()> {
        let writer = match self.writer.take() {
            Some(writer) => writer,
            None => self.begin_shard()?,
        };
        match self.writer.insert(writer) {
            ShardWriter::Tar(pending) => {
                let image = format!("{key:08}.{}", ending_of(&picture.path));
                let written =
                    tar::append(pending, &image, &bytes).and_then(|()| match picture.class {
                        Some(class) => tar::append(
                            pending,
                            &format!("{key:08}.cls"),
                            class.to_string().as_bytes(),
                        ),
                        None => Ok(()),
                    });
                written.map_err(|source| output::failed(source, &pending.target))
            }
            #[cfg(feature = "parquet")]
            ShardWriter::Parquet(writer) => writer.append(bytes, picture.class.unwrap_or(0).into()),
        }
    }

    fn begin_shard(&self) -> Result<ShardWriter> {
        let plan = self.maker.plan;
        let pending = output::create_shared(plan.dir.join(&self.name))?;
        match self.format {
            Format::Tar => Ok(ShardWriter::Tar(pending)),
            #[cfg(feature = "parquet")]
            Format::Parquet => {
                // Either all pictures have a class or none has.
                let labelled = plan.picture(0)?.class.is_some();
                parquet::Writer::new(pending, labelled)
                    .map(|writer| ShardWriter::Parquet(Box::new(writer)))
            }
        }
    }

    /// Gives the shard its name, makes its index, and then gives the record its name.
    fn finish(mut self) -> Result<()> {
        if let Some(writer) = self.writer.take() {
            let pending = match writer {
                ShardWriter::Tar(mut pending) => {
                    tar::finish(&mut pending)
                        .map_err(|source| output::failed(source, &pending.target))?;
                    pending
                }
                #[cfg(feature = "parquet")]
                ShardWriter::Parquet(writer) => writer.finish()?,
            };
            output::commit_new(pending)?;
            let path = self.maker.plan.dir.join(&self.name);
            self.done.shard = Some(Output::of(&path, self.name)?);
            if self.format == Format::Tar {
                // Open the shard now, while it is in the page cache: the first open scans it and
                // saves the index.
                Tar::open(&path)?;
            }
        }
        self.record.finish(self.done)
    }
}

impl Maker<'_> {
    fn make(self, pictures: Vec<Picture>) -> Vec<Made> {
        pictures
            .into_par_iter()
            .map_init(Decoder::default, |decoder, picture| {
                let made = self.make_one(decoder, &picture);
                let result = made
                    .map_err(|error| error.with_path(&picture.path).with_sample(picture.sample));
                Made { picture, result }
            })
            .collect()
    }

    fn make_one(self, decoder: &mut Decoder, picture: &Picture) -> Result<(ShardOutcome, Vec<u8>)> {
        if self.stop.requested() {
            return Err(Error::new(
                ErrorKind::Cancelled,
                Stage::Write,
                "stopped on request",
            ));
        }
        let input = picture.read(self.settings.bytes_max)?;
        if !self.settings.seek_points {
            return Ok((ShardOutcome::Unchanged(None), input));
        }
        let mut out = Vec::new();
        let embedded = decoder
            .embed(&input, &mut out)
            .map_err(|error| Error::of_jpeg(error, &input))?;
        let outcome = match embedded {
            Embedded::Points(bytes) => ShardOutcome::Points(bytes),
            Embedded::Unchanged(reason) => ShardOutcome::Unchanged(Some(reason.to_string())),
        };
        Ok((outcome, out))
    }
}

/// The ending of a tar member.
fn ending_of(path: &Path) -> String {
    let ending = path
        .extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    if matches!(ending.as_str(), "jpeg" | "jpe" | "jfif") {
        "jpg".into()
    } else {
        ending
    }
}
