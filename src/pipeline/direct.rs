//! Direct reads: the device's reader (cuFile) reads rows from files into device memory, for batches
//! that have a buffer.
//!
//! ```text
//! transfer thread ──(rows of a field)──► threads "feedline-gds" ── cuFileRead ──► rows of the buffer, or staging area
//!        ▲                                      │ rows without cuFile: pread, bounce buffer, copy
//!        └────────── bell: all rows are there ──┘
//! ```
//!
//! Rows that are whole pages of their file are read directly into their final position. Other rows
//! are read with their surrounding pages into a staging area of the same buffer, and a kernel moves
//! them. Rows that are adjacent in the file and in the batch are one read.
//!
//! Invariants:
//! * A buffer is written only after all its users are done ([`Copier::is_idle`]). It is used only
//!   after every row has been read or has failed, even if the batch is cancelled or a thread
//!   panics.
//! * Every row is read, or has an error that names file, offset and sample. Rows that cuFile could
//!   not read are counted.

#![allow(unsafe_code)]

use super::{Core, Gds};
use crossbeam_channel::{Receiver, Sender, unbounded};
use feedline_base::error::{Error, ErrorKind, Lowest, Result, Stage, caught};
use feedline_base::sync::Hold;
use feedline_base::thread;
use feedline_core::dataset::{Part, Parts};
use feedline_core::memory::Filled;
use feedline_core::storage::{Extent, SourceId, may_pass, patiently};
use feedline_core::tensor::Layout;
#[cfg(doc)]
use feedline_device::Copier;
use feedline_device::backend::{Backend, DevicePtr};
use feedline_device::{Bounce, DirectFile, DirectReader, DirectStep};
use feedline_reader::Files;
use rustix::fd::OwnedFd;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A thread takes about this many bytes of rows at a time.
const TASK_BYTES: usize = 1 << 20;
/// Maximum bytes of one read. Larger reads gain nothing and delay the reads after them.
const READ_MOST: u64 = 16 << 20;

/// Number of threads that read directly into device memory, and the size of each thread's bounce
/// buffer.
pub(crate) const DIRECT_THREADS: usize = 8;
pub(crate) const DIRECT_BOUNCE: usize = 1 << 20;

/// State shared by the reading threads.
pub(crate) struct Direct {
    core: Arc<Core>,
    backend: Arc<dyn Backend>,
    reader: Arc<DirectReader>,
    steps: Vec<DirectStep>,
    contents: Layout,
    gds: Gds,
    /// Files for the device's reader, and files for host reads. Host reads are retried like all
    /// others.
    files: Files,
    plain_files: Files,
    /// Indexed by source.
    handles: Box<[OnceLock<FileHandle>]>,
    bell: Sender<()>,
}

/// A file opened by the device's reader, or the reason why the reader rejects the file.
type FileHandle = Result<DirectFile, String>;

/// The rows of one batch in flight.
pub(crate) struct Reading {
    ids: Vec<u64>,
    /// Start of the buffer.
    base: DevicePtr,
    /// For each step, the offset of each row in the staging area.
    offsets: Vec<Vec<AtomicU64>>,
    /// Number of unfinished rows of all steps.
    left: AtomicU64,
    pub(crate) cancelled: AtomicBool,
    /// A copy through the host may still be running, and no event will report its end.
    lost: AtomicBool,
    failure: Mutex<Lowest>,
}

impl Reading {
    pub(crate) fn is_done(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// Number of unfinished rows of all steps.
    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::Acquire)
    }

    /// Whether the device may write to the buffer at any later time.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The failure of the failed row with the lowest index.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.failure.hold().take()
    }

    fn fail(&self, row: u32, error: Error) {
        self.failure.hold().note(row, error);
    }
}

struct Task {
    reading: Arc<Reading>,
    step: usize,
    rows: Range<u32>,
}

/// The handle of the reading threads. Dropping it ends them.
pub(crate) struct DirectReads {
    direct: Arc<Direct>,
    tasks: Sender<Task>,
}

/// What `build` decided about direct reads.
pub(crate) struct DirectPlan {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) reader: Arc<DirectReader>,
    pub(crate) steps: Vec<DirectStep>,
    pub(crate) contents: Layout,
    pub(crate) gds: Gds,
}

impl DirectReads {
    /// Starts the threads.
    pub(crate) fn start(
        plan: DirectPlan,
        core: &Arc<Core>,
        bell: Sender<()>,
        mut spawn: impl FnMut(String, Box<dyn FnOnce() + Send>) -> Result<()>,
    ) -> Result<Self> {
        let DirectPlan {
            backend,
            reader,
            steps,
            contents,
            gds,
        } = plan;
        let handles = (0..core.samples.sources.count())
            .map(|_| OnceLock::new())
            .collect();
        // The handle keeps a registered file open.
        let files = core.again.aligned(reader.align() as usize);
        let plain_files = core.again.kept_open();
        let core = core.clone();
        let direct = Arc::new(Direct {
            core,
            backend,
            reader,
            steps,
            contents,
            gds,
            files,
            plain_files,
            handles,
            bell,
        });
        let (tasks, todo) = unbounded::<Task>();
        for index in 0..DIRECT_THREADS {
            let direct = direct.clone();
            let todo = todo.clone();
            let mut bounce = direct.reader.bounce(DIRECT_BOUNCE)?;
            let started = spawn(
                format!("feedline-gds-{index}"),
                Box::new(move || {
                    direct
                        .backend
                        .within(&mut || work(&direct, &todo, &mut bounce))
                }),
            );
            match started {
                Err(_) if index > 0 => {
                    thread::fewer("direct reads", DIRECT_THREADS, index);
                    break;
                }
                started => started?,
            }
        }
        Ok(Self { direct, tasks })
    }

    /// Starts to read the rows of a batch into the buffer at `base`. The buffer must be idle.
    pub(crate) fn read(&self, ids: &[u64], base: DevicePtr) -> Arc<Reading> {
        // Blank rows come last.
        let ids: Vec<u64> = ids
            .iter()
            .copied()
            .take_while(|id| *id != u64::MAX)
            .collect();
        let steps = &self.direct.steps;
        let rows = ids.len() as u32;
        let offsets = steps.iter().map(|step| match step.gather {
            Some(_) => ids.iter().map(|_| AtomicU64::new(0)).collect(),
            None => Vec::new(),
        });
        let reading = Arc::new(Reading {
            base,
            offsets: offsets.collect(),
            left: AtomicU64::new(u64::from(rows) * steps.len() as u64),
            cancelled: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            failure: Mutex::default(),
            ids,
        });
        for (step, of) in steps.iter().enumerate() {
            let run = (TASK_BYTES / of.row_bytes.max(1)).max(1);
            for first in (0..rows).step_by(run) {
                let rows = first..rows.min(first.saturating_add(run as u32));
                // The receivers live as long as the threads, which end after `self`.
                let _ = self.tasks.send(Task {
                    reading: reading.clone(),
                    step,
                    rows,
                });
            }
        }
        reading
    }

    /// Writes the rows' offsets in the staging areas into the slot. The copy transfers them to the
    /// device.
    pub(crate) fn note_offsets(&self, reading: &Reading, slot: &mut Filled) {
        for (step, offsets) in self.direct.steps.iter().zip(&reading.offsets) {
            let Some(gather) = step.gather else { continue };
            let offsets = offsets.iter().map(|offset| offset.load(Ordering::Relaxed));
            slot.numbers_mut(gather.offsets)
                .iter_mut()
                .zip(offsets)
                .for_each(|(place, offset)| *place = offset);
        }
    }
}

fn work(direct: &Direct, todo: &Receiver<Task>, bounce: &mut Bounce) {
    for task in todo {
        let reading = &task.reading;
        if !reading.cancelled.load(Ordering::Relaxed) {
            let mut row = task.rows.start;
            if let Err(error) = caught(Stage::Read, || direct.read_rows(&task, &mut row, bounce)) {
                reading.fail(row, error);
            }
        }
        let rows = task.rows.len() as u64;
        // AcqRel: the thread that sees zero also sees the writes of all other threads.
        if reading.left.fetch_sub(rows, Ordering::AcqRel) == rows {
            let _ = direct.bell.try_send(());
        }
    }
}

/// Adjacent rows that are fetched by one read.
struct Stretch {
    rows: Range<u32>,
    extent: Extent,
}

impl Direct {
    /// Reads the rows of a task; `row` is the current row.
    fn read_rows(&self, task: &Task, row: &mut u32, bounce: &mut Bounce) -> Result<()> {
        let step = &self.steps[task.step];
        while *row < task.rows.end {
            *row = match self.run_at(task, *row)? {
                Some(run) => {
                    let next = run.rows.end;
                    self.read_run(task, step, &run, bounce)?;
                    next
                }
                None => {
                    // The row's bytes are not stored unchanged in a file, so cuFile has nothing to
                    // read.
                    self.core.meters.copy.direct.note_by_host(
                        "not stored unchanged in a file, although the first sample is",
                    );
                    self.by_host(task, step, *row, bounce)?;
                    *row + 1
                }
            };
        }
        Ok(())
    }

    /// The longest run of rows from `row` on that are adjacent in a file; `None` if the row is not
    /// stored unchanged in a file.
    fn run_at(&self, task: &Task, row: u32) -> Result<Option<Stretch>> {
        let step = &self.steps[task.step];
        let Some(extent) = self.extent_of(task, row)? else {
            return Ok(None);
        };
        let mut run = Stretch {
            rows: row..row + 1,
            extent,
        };
        while run.rows.end < task.rows.end && run.extent.len + step.row_bytes as u64 <= READ_MOST {
            let end = run.extent.offset + run.extent.len;
            match self.extent_of(task, run.rows.end) {
                Ok(Some(next)) if next.source == extent.source && next.offset == end => {
                    run.extent.len += next.len;
                    run.rows.end += 1;
                }
                // An error here is reported when that row itself is read.
                _ => break,
            }
        }
        Ok(Some(run))
    }

    fn extent_of(&self, task: &Task, row: u32) -> Result<Option<Extent>> {
        let step = &self.steps[task.step];
        Ok(match self.part_of(task, step, row)? {
            Some(Part::Extent(extent))
                if extent.len == step.row_bytes as u64 && !self.core.samples.is_memory(&extent) =>
            {
                Some(extent)
            }
            _ => None,
        })
    }

    /// The part that the dataset gives for the row. The dataset is user code, so it may panic or
    /// answer differently than before.
    fn part_of(&self, task: &Task, step: &DirectStep, row: u32) -> Result<Option<Part<'_>>> {
        let id = task.reading.ids[row as usize];
        let asked = caught(Stage::Read, || {
            let mut parts = Parts::new();
            self.core.samples.parts(id, &mut parts)?;
            Ok(parts
                .iter()
                .find_map(|one| (one.field == step.handler).then_some(one.part)))
        });
        asked.map_err(|error| self.core.samples.named_by_id(error, id))
    }

    fn read_run(
        &self,
        task: &Task,
        step: &DirectStep,
        run: &Stretch,
        bounce: &mut Bounce,
    ) -> Result<()> {
        match self.by_cufile(task, step, run) {
            Ok(()) => {
                self.core.meters.copy.direct.reads.add(1);
                self.core.meters.copy.direct.bytes.add(run.extent.len);
                Ok(())
            }
            Err(why) if self.gds == Gds::Require => Err(self.required(task, step, run, why)),
            Err(why) => {
                self.core.meters.copy.direct.note_by_host(&why);
                run.rows
                    .clone()
                    .try_for_each(|row| self.by_host(task, step, row, bounce))
            }
        }
    }

    /// The error of rows that only cuFile may read and could not. It says whether the file cannot
    /// be opened or is too short; otherwise it is cuFile's message `why`.
    fn required(&self, task: &Task, step: &DirectStep, run: &Stretch, why: String) -> Error {
        let row_bytes = step.row_bytes as u64;
        let Extent {
            source,
            offset,
            len,
        } = run.extent;
        let ids = &task.reading.ids[run.rows.start as usize..run.rows.end as usize];
        let there = match self.plain_files.get(source).map(|file| file.len_now()) {
            Ok(Ok(there)) => there.saturating_sub(offset),
            Ok(Err(_)) => len,
            Err(error) => {
                return self
                    .files
                    .sources()
                    .at(error, &run.extent)
                    .with_sample(ids[0]);
            }
        };
        if there >= len {
            let error = Error::new(ErrorKind::Device, Stage::Read, why).with_sample(ids[0]);
            return self.files.sources().at(error, &run.extent);
        }
        let cut = there / row_bytes;
        let row = Extent {
            source,
            offset: offset + cut * row_bytes,
            len: row_bytes,
        };
        let message = format!(
            "{row_bytes} bytes expected, {} are there",
            there % row_bytes
        );
        let error =
            Error::new(ErrorKind::Truncated, Stage::Read, message).with_sample(ids[cut as usize]);
        self.files.sources().at(error, &row)
    }

    /// Reads a run with cuFile, or returns the reason why it cannot.
    fn by_cufile(&self, task: &Task, step: &DirectStep, run: &Stretch) -> Result<(), String> {
        let handle = self.handle(run.extent.source)?;
        let offset = run.extent.offset;
        let end = run.extent.offset + run.extent.len;
        let align = self.reader.align();
        let aligned = offset.is_multiple_of(align) && end.is_multiple_of(align);
        let (from, to, place) = match step.gather {
            None if !aligned => {
                return Err(
                    "a row that is not whole pages of its file, unlike the first one".into(),
                );
            }
            None => (offset, end, self.row_at(step, run.rows.start)),
            Some(gather) => {
                let stride = DirectStep::stride(step.row_bytes) as u64;
                let from = offset - offset % align;
                let to = end.next_multiple_of(align);
                let first = u64::from(run.rows.start) * stride;
                for (index, row) in run.rows.clone().enumerate() {
                    let begins = first + (offset - from) + index as u64 * step.row_bytes as u64;
                    task.reading.offsets[task.step][row as usize].store(begins, Ordering::Relaxed);
                }
                (
                    from,
                    to,
                    self.contents.fields()[gather.staging].offset as u64 + first,
                )
            }
        };
        let len = usize::try_from(to - from)
            .map_err(|_| "a read beyond the address space".to_string())?;
        // SAFETY: the bytes are in the batch's buffer. Without staging, rows go to their final
        // position. In the staging area, a run of n rows has n strides, each of at least a page
        // plus a row. The buffer is idle, and only this task writes these rows. The transfer thread
        // keeps the buffer until the rows are counted down, or forever.
        let read = unsafe { handle.read(task.reading.base, len, from, place) };
        match read? {
            // Bytes after the last row are not needed.
            bytes if bytes as u64 >= end - from => Ok(()),
            bytes => Err(format!("cuFileRead read {bytes} of {len} bytes")),
        }
    }

    /// Offset of a row of the field in the buffer.
    fn row_at(&self, step: &DirectStep, row: u32) -> u64 {
        self.contents.fields()[step.field].offset as u64 + u64::from(row) * step.row_bytes as u64
    }

    fn handle(&self, source: SourceId) -> Result<&DirectFile, String> {
        let refused = |why: &String| format!("cuFile does not accept the file: {why}");
        let handle = &self.handles[source.index()];
        if let Some(registered) = handle.get() {
            return registered.as_ref().map_err(refused);
        }
        let opened = match patiently(|| open_own(&self.files, source)) {
            // This error is not kept: the next read opens the file again.
            Err(error) if may_pass(&error) => return Err(refused(&error.to_string())),
            opened => opened,
        };
        handle
            .get_or_init(|| {
                self.reader
                    .register(opened.map_err(|error| error.to_string())?)
            })
            .as_ref()
            .map_err(refused)
    }

    /// Reads a row through the host, because cuFile cannot read it or its bytes are not stored
    /// unchanged in a file.
    fn by_host(&self, task: &Task, step: &DirectStep, row: u32, bounce: &mut Bounce) -> Result<()> {
        self.core.meters.copy.direct.host_rows.add(1);
        let id = task.reading.ids[row as usize];
        let named = |error: Error| self.core.samples.named_by_id(error, id);
        let place = match step.gather {
            None => self.row_at(step, row),
            Some(gather) => {
                let begins = u64::from(row) * DirectStep::stride(step.row_bytes) as u64;
                task.reading.offsets[task.step][row as usize].store(begins, Ordering::Relaxed);
                self.contents.fields()[gather.staging].offset as u64 + begins
            }
        };
        let mut to = task.reading.base + place;
        let part = self.part_of(task, step, row)?;
        let part = part
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::User,
                    Stage::Read,
                    "the dataset gave no bytes for the field",
                )
            })
            .map_err(named)?;
        let (extent, bytes) = match part {
            Part::Inline(bytes) => (None, Some(bytes)),
            Part::Extent(extent) if self.core.samples.is_memory(&extent) => (
                None,
                Some(self.core.samples.memory_bytes(&extent).map_err(named)?),
            ),
            Part::Extent(extent) => (Some(extent), None),
            Part::Checked(_)
            | Part::Framed(_)
            | Part::More(_)
            | Part::MoreInline(_)
            | Part::Made => {
                let message = "when the loader was built, the rows of this field were stored unchanged in \
                     files; this row is not";
                return Err(named(Error::new(ErrorKind::User, Stage::Read, message)));
            }
        };
        let len = bytes.map_or_else(
            || extent.map_or(0, |extent| extent.len),
            |bytes| bytes.len() as u64,
        );
        if len != step.row_bytes as u64 {
            let message = format!(
                "the field takes {} bytes, the sample has {len}",
                step.row_bytes
            );
            return Err(named(Error::new(ErrorKind::Shape, Stage::Read, message)));
        }
        let mut done = 0;
        while done < len as usize {
            let room = bounce.bytes();
            let piece = room.len().min(len as usize - done);
            match (&extent, bytes) {
                (Some(extent), _) => {
                    let part = Extent {
                        offset: extent.offset + done as u64,
                        len: piece as u64,
                        ..*extent
                    };
                    self.read_by_host(&part, &mut room[..piece])
                        .map_err(named)?;
                }
                (None, Some(bytes)) => room[..piece].copy_from_slice(&bytes[done..done + piece]),
                (None, None) => {}
            }
            // SAFETY: the destination is the row's own range, as in `by_cufile`.
            unsafe { bounce.send(to, piece) }.map_err(|(error, lost)| {
                task.reading.lost.fetch_or(lost, Ordering::AcqRel);
                named(error)
            })?;
            to += piece as DevicePtr;
            done += piece;
        }
        Ok(())
    }

    fn read_by_host(&self, extent: &Extent, out: &mut [u8]) -> Result<()> {
        match self.core.again.plainly(&self.plain_files, extent, out) {
            Err(error) if may_pass(&error) => self.core.read_again(&error, extent, out),
            read => read
                .map(drop)
                .map_err(|error| self.plain_files.sources().at(error, extent)),
        }
    }
}

/// A separate descriptor for the device's reader.
pub(crate) fn open_own(files: &Files, source: SourceId) -> Result<OwnedFd> {
    let file = files.get(source)?;
    rustix::io::fcntl_dupfd_cloexec(&*file, 0)
        .map_err(|errno| Error::os(Stage::Open, "", errno.into()))
}
