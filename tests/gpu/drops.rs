//! Batches that are dropped at once, with their work still on the stream, against batches that are
//! dropped when the stream is done with them: a loader must not be slower for the former, which is
//! how a training loop drops them.

use crate::driver::{Gpu, said};
use crate::ours::{device, right, words};
use crate::pull::counted;
use crate::report::Target;
use crate::section::Ctx;
use feedline::Loader;
use feedline::device::cuda::Stream;
use std::time::{Duration, Instant};

/// Least share of the rate of batches that are waited for.
const SHARE: f64 = 0.97;
/// Copies take a part of the time that decoding takes, so that slots which come back late are
/// missed.
const WORKERS: usize = 8;
const SLOTS: usize = 8;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    let (batches, pairs) = ctx.either(
        (
            if ctx.full { 2000 } else { 600 },
            if ctx.full { 15 } else { 7 },
        ),
        (12, 1),
    );
    let mut at_once = vec![];
    let mut waited = vec![];
    let mut ratios = vec![];
    for pair in 0..pairs {
        if pair >= 3 && ctx.left().is_zero() {
            break;
        }
        // A B, B A, A B …
        for wait in [pair % 2 == 0, pair % 2 != 0] {
            let rate = rate(ctx, &gpu, batches, wait)?;
            if wait {
                waited.push(rate)
            } else {
                at_once.push(rate)
            }
        }
        ratios.push(at_once[pair] / waited[pair]);
    }
    ctx.figure(
        "dropped when the stream is done",
        &waited,
        "batches/s",
        None,
        "",
    );
    ctx.figure("dropped at once", &at_once, "batches/s", None, "");
    ctx.figure(
        "at once / waited for",
        &ratios,
        "×",
        Some(Target::Least(SHARE)),
        "",
    );
    Ok(())
}

/// A loader whose workers sleep, for the cores shall not be the limit.
fn loader(ctx: &Ctx) -> Result<Loader, String> {
    let (record, sleep) = ctx.either((32 << 20, 6), (512, 1));
    let builder = counted(1, record)?.map(move |_, _| {
        std::thread::sleep(Duration::from_millis(sleep));
        Ok(())
    });
    let builder = builder
        .workers(WORKERS)
        .tuning(|t| t.slots(SLOTS).device_batches(3))
        .device(device()?);
    builder.build().map_err(words)
}

/// Batches per second, of which the bytes of some are looked at before the time begins.
fn rate(ctx: &Ctx, gpu: &Gpu, batches: usize, wait: bool) -> Result<f64, String> {
    let loader = loader(ctx)?;
    loader.ready().map_err(words)?;
    let own = gpu.stream()?;
    let stream = Stream::from(&own);
    let mut epoch = loader.epochs(0..u64::MAX).map_err(words)?;
    let mut next = || epoch.next().ok_or("no batch")?.map_err(words);
    for _ in 0..2 * SLOTS {
        right(&next()?)?;
    }
    let started = Instant::now();
    for _ in 0..batches {
        let batch = next()?;
        batch.bind(&stream).map_err(words)?;
        if wait {
            own.synchronize().map_err(said("cuStreamSynchronize"))?;
        }
    }
    own.synchronize().map_err(said("cuStreamSynchronize"))?;
    Ok(batches as f64 / started.elapsed().as_secs_f64())
}
