//! One pass over all data of a dataset, on all cores, to make the contents of a side file. Memory:
//! 32 bytes for every 64 samples.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::Dataset;
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::sample::Plain;
use std::sync::Arc;

/// Samples per unit of work of a thread.
const RUN: u64 = 64;
/// Units whose results are in memory at the same time.
const TOGETHER: usize = 64;

/// Calls its argument for every field of every row in a run of samples, with the row, the field and
/// its bytes.
pub(crate) type Rows<'a> = dyn FnMut(&mut dyn FnMut(usize, usize, &[u8])) -> Result<()> + 'a;

/// Reads everything, on all cores. `one` makes a value from each run of samples, given their number
/// and their rows; `out` gets the values in order. Damaged samples have no fields.
///
/// Errors: reading errors, those of `one` and `out`, and [`ErrorKind::Config`] for a part of a
/// dataset with chunks.
pub(crate) fn pass<R: Send>(
    dataset: &dyn Dataset,
    what: &str,
    one: impl Fn(usize, &mut Rows<'_>) -> Result<R> + Sync,
    mut out: impl FnMut(R) -> Result<()>,
) -> Result<()> {
    let starts: Arc<[u64]> = match dataset.chunked() {
        Some(chunks) if chunks.is_whole() => chunks.starts().into(),
        Some(_) => {
            let message = format!(
                "a part of a dataset with chunks: make the {what} of the whole, then take the part"
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        None => (0..dataset.len())
            .step_by(RUN as usize)
            .chain([dataset.len()])
            .collect(),
    };
    let fields = dataset.schema().len();
    let run = |run: usize, ends: &[u64]| {
        one((ends[1] - ends[0]) as usize, &mut |put| {
            let mut plain = Plain::new(dataset);
            if dataset.chunked().is_some() {
                let Some(chunk) = intact(plain.chunk(run))? else {
                    return Ok(());
                };
                for (row, field) in
                    (0..chunk.rows()).flat_map(|row| (0..fields).map(move |field| (row, field)))
                {
                    put(row, field, chunk.row(field, row).unwrap_or_default());
                }
                return Ok(());
            }
            (ends[0]..ends[1])
                .enumerate()
                .try_for_each(|(row, sample)| {
                    intact(plain.sample(sample, |field, bytes| {
                        put(row, field, bytes);
                        Ok(())
                    }))
                    .map(drop)
                })
        })
    };
    let runs: Vec<_> = starts.windows(2).enumerate().collect();
    for some in runs.chunks(TOGETHER) {
        parallel(some, |_, (number, ends)| run(*number, ends))?
            .into_iter()
            .try_for_each(&mut out)?;
    }
    Ok(())
}

/// Damaged samples count as missing; the loader reports them.
fn intact<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) => match error.kind() {
            ErrorKind::Decode | ErrorKind::Truncated | ErrorKind::Limit | ErrorKind::Empty => {
                Ok(None)
            }
            _ => Err(error),
        },
    }
}
