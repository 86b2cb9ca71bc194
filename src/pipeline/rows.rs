//! Workers fill rows of datasets without chunks: from memory, from the page cache, or from bytes
//! read from storage.

use super::Core;
use super::recipe::How;
use super::task::{Place, RowRun, Sample};
use super::watchdog::Doing;
use super::worker::Worker;
use feedline_base::error::{Error, Result};
use feedline_core::dataset::{FieldPart, Part, Parts, make_in};
use feedline_core::memory::Rows;
use feedline_core::storage::{Extent, may_pass};
use feedline_reader::Cached;
use feedline_report::meter::Effort;

/// Number of rows copied at a time; bounds the list of their ids.
const COPY_ROWS: u32 = 256;

/// Fills rows from memory and the page cache, and sends the others to be read. Returns the number
/// of filled or failed rows.
///
/// The parts of a missed row are dropped. All rows of all slots may miss, and no permit bounds the
/// memory for their parts. The planner asks the dataset again when the row has its permit.
pub(super) fn look_up(core: &Core, mut run: RowRun, worker: &mut Worker) -> u32 {
    let samples = &core.samples;
    let all = run.len();
    let mut missed = 0;
    let mut plain = samples.recipe.effort() == Effort::Copy;
    let mut bytes = std::mem::take(&mut worker.bytes);
    while run.len() > 0 && !run.is_cancelled() {
        if plain {
            match copy_rows(core, &mut run, worker) {
                CopiedRows::All => {}
                CopiedRows::Miss => {
                    core.to_io.misses.push(run.take(1));
                    missed += 1;
                }
                CopiedRows::Unusual => plain = false,
            }
            continue;
        }
        match look_up_one(core, &mut run, worker, &mut bytes) {
            Ok(true) => {
                if run.len() == 1 {
                    // Counted first, so that the receiver of the batch finds these bytes in the
                    // report.
                    note_cached(core, &mut worker.cached);
                }
                run.rows.finish_row();
            }
            Ok(false) => {
                core.to_io.misses.push(run.take(1));
                missed += 1;
            }
            Err(error) => {
                let error = samples.named(error, &worker.sample);
                core.to_workers
                    .row_failed(samples, &mut run, worker.sample.id, error, None);
            }
        }
    }
    worker.bytes = bytes;
    note_cached(core, &mut worker.cached);
    if missed > 0 {
        core.to_io.waker.wake();
    }
    all - run.len() - missed
}

/// Fills the first row from memory and the page cache; returns false if something must be read.
fn look_up_one(
    core: &Core,
    run: &mut RowRun,
    worker: &mut Worker,
    bytes: &mut [u8],
) -> Result<bool> {
    let samples = &core.samples;
    let mut hits = 0;
    worker.sample.clear();
    let looked = worker.guarded(&core.samples, |worker| {
        // The watchdog's mark is set before user code runs. The sampler is user code; the id is
        // known only after it.
        worker.begins(samples, Doing::Planning, None);
        let id = run.id()?;
        worker.begins(samples, Doing::Decoding, Some(id));
        // This read does not block, as long as the file system honours the flag.
        worker.fill_by(samples, &run.job, id, &mut run.rows, bytes, |extent, to| {
            let found = cached(core, extent, to);
            hits += if matches!(found, Cached::Hit) {
                extent.len
            } else {
                0
            };
            found
        })
    });
    worker.cached += hits;
    looked
}

/// Tries to read from the page cache.
pub(super) fn cached(core: &Core, extent: &Extent, to: &mut [u8]) -> Cached {
    if extent.len == 0 {
        return Cached::Hit;
    }
    match core
        .cache
        .as_ref()
        .map_or(Cached::Miss, |cache| cache.try_read(extent, to))
    {
        // The reader may succeed, and it retries.
        Cached::Failed(error) if may_pass(&error) => Cached::Miss,
        found => found,
    }
}

/// Counts bytes that workers got from the page cache.
pub(super) fn note_cached(core: &Core, bytes: &mut u64) {
    let bytes = std::mem::take(bytes);
    if bytes > 0 && core.meters.on {
        core.meters.storage.cached_bytes.add(bytes);
    }
}

/// Why [`copy_rows`] ended.
enum CopiedRows {
    /// All rows are done, or [`COPY_ROWS`] of them.
    All,
    /// The first unfinished row must be read.
    Miss,
    /// The first unfinished row takes the usual path, which also names its error.
    Unusual,
}

/// The fast path: copies unchanged rows from memory sources and the page cache, as many as
/// possible. It avoids the costs per row of the usual path: a panic guard, a list of pieces, a
/// decoder's context.
fn copy_rows(core: &Core, run: &mut RowRun, worker: &mut Worker) -> CopiedRows {
    let samples = &core.samples;
    let count = run.len().min(COPY_ROWS);
    let first = run.position();
    let mut ids = std::mem::take(&mut worker.ids);
    ids.clear();
    worker.begins(samples, Doing::Planning, None);
    // The dataset and the sampler are user code. A panic ends the run here, and the usual path
    // reports it.
    let copied = worker.guarded(&core.samples, |worker| {
        let mut parts = Parts::new();
        for row in 0..count {
            let id = run
                .job
                .order
                .id(first + u64::from(row) * run.job.batches.stride())?;
            samples.parts(id, &mut parts)?;
            match copy_row(core, &parts, id, row, &mut run.rows, worker)? {
                CopiedRows::All => ids.push(id),
                other => return Ok(other),
            }
        }
        Ok(CopiedRows::All)
    });
    if !ids.is_empty() {
        // Counted first, so that the receiver of the batch finds these bytes in the report.
        note_cached(core, &mut worker.cached);
        run.rows.finish_run(&ids);
    }
    worker.ids = ids;
    copied.unwrap_or(CopiedRows::Unusual)
}

/// Copies sample `id` into the unfinished row number `row`, if its bytes are available and need no
/// other work.
fn copy_row(
    core: &Core,
    parts: &Parts<'_>,
    id: u64,
    row: u32,
    rows: &mut Rows,
    worker: &mut Worker,
) -> Result<CopiedRows> {
    let samples = &core.samples;
    let mut hits = 0;
    let mut at = 0_usize;
    for FieldPart {
        field,
        part,
        is_last,
    } in parts.iter()
    {
        let handler = &samples.recipe.handlers[field];
        let row_bytes = match handler.how {
            How::Skip | How::Direct => continue,
            How::InPlace(row_bytes) => row_bytes,
            How::Copy | How::Decode(_) => return Ok(CopiedRows::Unusual),
        };
        let out = &mut rows.run_mut(handler.outputs.start, row + 1)[row as usize * row_bytes..];
        // Parts of one field are adjacent, and the last one completes the row.
        at = if part.follows() { at } else { 0 };
        if part == Part::Made {
            make_in(&*samples.dataset, id, field, &mut out[..row_bytes])?;
            continue;
        }
        let end = at.saturating_add(part.len());
        if end > row_bytes || (is_last && end < row_bytes) {
            return Ok(CopiedRows::Unusual);
        }
        let out = &mut out[std::mem::replace(&mut at, end)..end];
        let bytes = match part {
            Part::Inline(bytes) | Part::MoreInline(bytes) => bytes,
            Part::Checked(_) | Part::Framed(_) | Part::Made => return Ok(CopiedRows::Unusual),
            Part::Extent(extent) | Part::More(extent) if samples.is_memory(&extent) => {
                samples.memory_bytes(&extent)?
            }
            Part::Extent(extent) | Part::More(extent) => {
                samples
                    .watch
                    .worker(worker.scratch.worker, |cell| cell.read(Some(id), &extent));
                // This read does not block, as long as the file system honours the flag.
                let found = cached(core, &extent, out);
                worker.begins(samples, Doing::Planning, None);
                match found {
                    Cached::Hit => hits += extent.len,
                    Cached::Miss => return Ok(CopiedRows::Miss),
                    Cached::Failed(_) => return Ok(CopiedRows::Unusual),
                }
                continue;
            }
        };
        out.copy_from_slice(bytes);
    }
    worker.cached += hits;
    Ok(CopiedRows::All)
}

/// Fills a row from bytes read from storage; failed pieces are retried once.
pub(super) fn decode(
    core: &Core,
    mut run: RowRun,
    mut sample: Box<Sample>,
    error: Option<Error>,
    worker: &mut Worker,
) {
    if !run.is_cancelled() {
        let samples = &core.samples;
        let id = sample.id;
        worker.begins(samples, Doing::Decoding, id);
        let done = worker.guarded(&core.samples, |worker| {
            if let Some(error) = error {
                if run.rows.fails_anyway() {
                    // If nothing can be read (no descriptors, a dead disk), every retry costs time.
                    return Err(error);
                }
                read_again(core, &error, &mut sample, Some(&mut run.rows), worker)?;
                worker.begins(samples, Doing::Decoding, id);
            }
            samples.fill_fetched(&mut run, &sample, &mut worker.scratch)
        });
        match done {
            Ok(()) => run.rows.finish_row(),
            Err(error) => {
                let error = samples.named(error, &sample);
                core.to_workers
                    .row_failed(samples, &mut run, id, error, None);
            }
        }
    }
    drop(run);
    core.to_io.give_back(sample);
}

/// Retries the pieces that failed with `error`, into their original destination. Some destinations
/// are in the first of `rows`.
pub(super) fn read_again(
    core: &Core,
    error: &Error,
    sample: &mut Sample,
    mut rows: Option<&mut Rows>,
    worker: &Worker,
) -> Result<()> {
    let id = sample.id;
    for piece in sample.pieces.iter_mut().filter(|piece| piece.failed) {
        let Some(extent) = piece.extent else { continue };
        core.watch
            .worker(worker.scratch.worker, |cell| cell.read(id, &extent));
        match (&mut piece.place, &mut rows) {
            (Place::Ring(span, start), _) => {
                *start = 0;
                core.read_again(
                    error,
                    &extent,
                    &mut span.as_mut_slice()[..extent.len as usize],
                )?;
            }
            (_, Some(rows)) => {
                let output = core.samples.recipe.handlers[piece.field].outputs.start;
                core.read_again(
                    error,
                    &extent,
                    &mut rows.row().bytes_mut(output)[piece.in_row()],
                )?;
            }
            _ => {}
        }
    }
    Ok(())
}
