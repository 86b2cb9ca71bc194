//! Workers fill rows of chunked datasets from open chunks.

use super::Core;
use super::chunks::Held;
use super::recipe::How;
use super::sample::Samples;
use super::task::RowRun;
use super::watchdog::Doing;
use super::worker::Worker;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::ChunkBuf;
use feedline_core::memory::Rows;
use feedline_report::meter::Effort;
use std::sync::Arc;

/// Fills rows from open chunks.
pub(super) fn gather(core: &Core, run: RowRun, held: &Arc<Held>, worker: &mut Worker) {
    if run.is_cancelled() {
        return;
    }
    let mut places = std::mem::take(&mut worker.places);
    let mut ids = std::mem::take(&mut worker.ids);
    places.clear();
    ids.clear();
    gather_at(core, run, held, worker, &mut places, &mut ids);
    worker.places = places;
    worker.ids = ids;
}

fn gather_at(
    core: &Core,
    mut run: RowRun,
    held: &Arc<Held>,
    worker: &mut Worker,
    places: &mut Vec<(u32, u32)>,
    ids: &mut Vec<u64>,
) {
    let samples = &core.samples;
    worker.begins(samples, Doing::Planning, None);
    let located = worker.guarded(&core.samples, |_| {
        let first = run.position();
        let stride = run.job.batches.stride();
        let chunks = samples.in_chunks()?;
        let order = run.job.order.places(first);
        for row in 0..u64::from(run.len()) {
            let (entry, row, id) = order.locate(first + row * stride, |id| chunks.inner(id))?;
            places.push((entry as u32, row as u32));
            ids.push(id);
        }
        Ok(())
    });
    if let Err(error) = located {
        // A sampler's mistake: no row of the run has a sample.
        return run.rows.fail_row(error);
    }
    if samples.recipe.effort() == Effort::Copy && copy_runs(samples, &mut run.rows, held, places) {
        return run.rows.finish_run(ids);
    }
    for ((entry, row), id) in places.iter().zip(ids.iter()) {
        if run.is_cancelled() {
            return;
        }
        worker.begins(samples, Doing::Decoding, Some(*id));
        let entry = *entry as usize;
        let filled = worker.guarded(&core.samples, |worker| {
            let given = samples.given_by_chunk(opened(held, entry)?, *row as usize);
            samples.fill(&run.job, *id, &mut run.rows, &mut worker.scratch, given)
        });
        match filled {
            Ok(()) => run.rows.finish_row(),
            Err(error) => {
                let error = samples.named_as_chunk(error.with_sample(*id), held.chunk(entry).chunk);
                core.to_workers.row_failed(
                    samples,
                    &mut run,
                    Some(*id),
                    error,
                    Some((held, entry)),
                );
            }
        }
    }
}

/// The buffer of one of the open chunks that a piece of a batch uses.
pub(super) fn opened(held: &Arc<Held>, entry: usize) -> Result<&ChunkBuf> {
    match held.chunk(entry).get() {
        Some(Ok(buffer)) => Ok(buffer),
        Some(Err(error)) => Err(error.clone_lossy()),
        None => Err(Error::new(
            ErrorKind::Cancelled,
            Stage::Decode,
            "the chunk is not open",
        )),
    }
}

/// The fast path: copies whole runs of rows, if each field of the open chunks is an array of rows
/// of the batch's row size. Otherwise returns false, and all rows take the usual path.
fn copy_runs(samples: &Samples, rows: &mut Rows, held: &Held, places: &[(u32, u32)]) -> bool {
    for (field, handler) in samples.recipe.handlers.iter().enumerate() {
        let row_bytes = match handler.how {
            How::InPlace(row_bytes) => row_bytes,
            How::Skip | How::Direct => continue,
            _ => return false,
        };
        let out = rows.run_mut(handler.outputs.start, places.len() as u32);
        let mut start = 0;
        while start < places.len() {
            let (entry, row) = places[start];
            let run = places[start..]
                .iter()
                .enumerate()
                .take_while(|(at, place)| **place == (entry, row + *at as u32))
                .count();
            let Some(Ok(buffer)) = held.chunk(entry as usize).get() else {
                return false;
            };
            let Some((array, _)) = buffer.array(field).filter(|(_, bytes)| *bytes == row_bytes)
            else {
                return false;
            };
            let from = row as usize * row_bytes;
            let to = start * row_bytes;
            let bytes = run * row_bytes;
            out[to..to + bytes].copy_from_slice(&array[from..from + bytes]);
            start += run;
        }
    }
    true
}
