//! A CUDA graph that another thread captures while a loader runs: neither disturbs the other,
//! whatever the capture's mode.
//!
//! ```text
//! one thread      begin capture ── kernel ──────────────────────────────── end capture: a graph
//! another thread                     next, bind, drop, next, bind, drop …     or: build, next, drop
//! ```

use crate::driver::{Captures, Gpu};
use crate::ours::{device, right, words};
use crate::pull::{BATCH, Puller, RECORD, counted};
use crate::section::Ctx;
use feedline::device::cuda::Stream;
use std::time::Duration;

/// More than there are slots and batches on the device, so that memory is used again during the
/// capture.
const BATCHES: usize = 40;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    for mode in Captures::ALL {
        ctx.check(
            format!("a loader runs beside a capture in mode {mode:?}"),
            || beside(ctx, &gpu, mode),
        );
    }
    ctx.check("a loader is built and dropped beside a capture", || {
        built(ctx, &gpu)
    });
    Ok(())
}

/// A loader of batches of so many rows of so many bytes.
fn puller((rows, record): (usize, usize)) -> Result<Puller, String> {
    Puller::new(counted(rows, record)?.device(device()?), None)
}

fn sizes(ctx: &Ctx) -> (usize, usize) {
    ctx.either((BATCH, RECORD), (4, 512))
}

/// Batches that a thread of its own takes, binds to a stream and drops.
fn pulled(loader: &mut Puller, stream: &Stream) -> Result<(), String> {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                (0..BATCHES).try_for_each(|_| {
                    let batch = loader.next()?;
                    batch.bind(stream).map_err(words)
                })
            })
            .join()
    })
    .map_err(|_| "the pulling thread panicked")?
}

fn beside(ctx: &Ctx, gpu: &Gpu, mode: Captures) -> Result<String, String> {
    let mut loader = puller(sizes(ctx))?;
    let captured = gpu.stream()?;
    let own = gpu.stream()?;
    let stream = Stream::from(&own);
    pulled(&mut loader, &stream)?;
    gpu.capture(&captured, mode, || {
        gpu.spin(&captured, Duration::from_millis(1))?;
        pulled(&mut loader, &stream)
    })?;
    right(&loader.next()?)?;
    Ok(format!("{BATCHES} batches during the capture"))
}

fn built(ctx: &Ctx, gpu: &Gpu) -> Result<String, String> {
    let captured = gpu.stream()?;
    let sizes = sizes(ctx);
    gpu.capture(&captured, Captures::Global, || {
        gpu.spin(&captured, Duration::from_millis(1))?;
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let mut loader = puller(sizes)?;
                    let batch = loader.next()?;
                    batch.bind(Stream::legacy()).map_err(words)
                })
                .join()
        })
        .map_err(|_| "the building thread panicked")?
    })?;
    let mut loader = puller(sizes)?;
    right(&loader.next()?)?;
    Ok("a loader during the capture, another one after it".into())
}
