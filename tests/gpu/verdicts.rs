//! What the loader says of itself: in a run that the GPU bounds, and in one that decoding bounds,
//! with a stream that the builder was told and with a bare handle that each batch is bound to (as
//! PyTorch and JAX have them).
//!
//! ```text
//!             the host never waits: work stands on the stream, as in training
//! GPU-bound   step ≫ decode        the consumer's own work takes the time
//! starved     step ≪ decode        decode
//! ```

use crate::driver::{Gpu, said, with_bare};
use crate::ours::{device, words};
use crate::pull::counted;
use crate::section::Ctx;
use feedline::device::cuda::Stream;
use feedline::device::cuda::cudarc::driver::CudaStream;
use feedline::profile::Verdict;
use feedline::profile::verdict::Cause;
use std::sync::Arc;
use std::time::Duration;

/// Milliseconds: of a step on the GPU, and of the work on each row, of which there are [`ROWS`] for
/// one worker.
#[derive(Clone, Copy, Debug)]
struct Times {
    step: u64,
    row: u64,
}

const ROWS: usize = 4;
/// The stand-in's kernels take 5 ms at most.
const GPU_BOUND: Times = Times { step: 5, row: 0 };
const STARVED: Times = Times { step: 1, row: 3 };

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    for bare in [false, true] {
        let stream = if bare {
            "a bare stream"
        } else {
            "a known stream"
        };
        ctx.check(format!("a run that the GPU bounds, {stream}"), || {
            let verdict = trained(ctx, &gpu, GPU_BOUND, bare)?;
            // A busy machine may keep the host from asking in time; it does not make copies slow.
            let own = [Cause::NotStarved, Cause::Consumer];
            let right =
                own.contains(&verdict.cause) || (!ctx.real() && verdict.cause != Cause::Copy);
            judged(right, &verdict)
        });
        ctx.check(format!("a run that waits for decoding, {stream}"), || {
            let verdict = trained(ctx, &gpu, STARVED, bare)?;
            // On a busy machine the others are the right answer, too.
            let right = verdict.cause == Cause::Decode
                || (!ctx.real() && verdict.cause == Cause::OtherPrograms);
            judged(right && verdict.starved_share > 0.3, &verdict)
        });
    }
    Ok(())
}

fn judged(right: bool, verdict: &Verdict) -> Result<String, String> {
    if right {
        Ok(verdict
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .into())
    } else {
        Err(verdict.to_string())
    }
}

/// The verdict on so many steps of a consumer that drops each batch with its step still to be done.
fn trained(ctx: &Ctx, gpu: &Gpu, times: Times, bare: bool) -> Result<Verdict, String> {
    let stream = gpu.stream()?;
    let builder = counted(ROWS, ctx.either(150_528, 512))?
        .workers(1)
        .tuning(|t| t.slots(4).device_batches(3))
        .device(device()?);
    let builder = builder.map(move |_, _| {
        std::thread::sleep(Duration::from_millis(times.row));
        Ok(())
    });
    let builder = if bare {
        builder
    } else {
        builder.stream(&stream)
    };
    let loader = builder.build().map_err(words)?;
    loader.ready().map_err(words)?;
    let steps = ctx.either(400, 150);
    for batch in loader.epochs(0..u64::MAX).map_err(words)?.take(steps) {
        let batch = batch.map_err(words)?;
        step(gpu, &stream, batch, times, bare)?;
    }
    stream.synchronize().map_err(said("cuStreamSynchronize"))?;
    Ok(loader.report().verdict)
}

fn step(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    batch: feedline::Batch,
    times: Times,
    bare: bool,
) -> Result<(), String> {
    let step = Duration::from_millis(times.step);
    if bare {
        return with_bare(stream, batch, |_| gpu.spin(stream, step));
    }
    batch.bind(Stream::from(stream)).map_err(words)?;
    gpu.spin(stream, step)
}
