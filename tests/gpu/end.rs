//! From files to the device: the whole loader against the slower of the bus and the loader on the
//! host; and a step that takes longer than the copies, during which the GPU must not be idle.
//!
//! ```text
//! stream   asked │ wait for the copy │ start ─── step ─── end │ asked │ …
//! starved        └── asked → start ──┘                  late  └─ end → asked: the host came late with the question
//! ```

use crate::driver::{Gpu, Kind, Lane, h2d_for, said};
use crate::ours::{data, device, records, words};
use crate::pull::{BATCH, Puller, RECORD};
use crate::report::Target;
use crate::section::Ctx;
use feedline::device::cuda::Stream;
use feedline::device::cuda::cudarc::driver::CudaEvent;
use feedline::memory::MemoryTerm;
use feedline::storage::{Direct, Mode};
use feedline::{Device, Loader, LoaderBuilder, Order};
use std::path::Path;
use std::time::Duration;

/// Least share of the slower of bus and storage.
const SHARE: f64 = 0.9;
/// Most idle time of the GPU in percent.
const IDLE: f64 = 1.0;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    let path = data(ctx)?;
    compare(ctx, &gpu, &path, "page cache", (Mode::Auto, Direct::Off))?;
    if let Err(refused) = builder(ctx, &path, (Mode::Uring, Direct::On))?.build() {
        ctx.skip("io_uring, O_DIRECT", words(refused));
        return Ok(());
    }
    compare(
        ctx,
        &gpu,
        &path,
        "io_uring, O_DIRECT",
        (Mode::Uring, Direct::On),
    )
}

fn builder(
    ctx: &Ctx,
    path: &Path,
    (mode, direct): (Mode, Direct),
) -> Result<LoaderBuilder, String> {
    let builder = Loader::builder(records(path, RECORD)?).order(Order::shuffled(1));
    Ok(builder
        .batch_size(ctx.either(BATCH, 8))
        .tuning(|t| t.reader(mode).direct(direct)))
}

/// Bus, loader on the host and loader on the device in turn.
fn compare(
    ctx: &Ctx,
    gpu: &Gpu,
    path: &Path,
    what: &str,
    how: (Mode, Direct),
) -> Result<(), String> {
    let size = ctx.either(BATCH, 8) * RECORD;
    let mut host = Puller::new(builder(ctx, path, how)?.device(Device::host()), None)?;
    let mut ours = Puller::new(
        builder(ctx, path, how)?.device(device()?),
        Some(gpu.stream()?),
    )?;
    let bare = [Lane::from_several(
        gpu,
        Kind::Registered,
        size,
        ours.loader.plan().term(MemoryTerm::SLOTS).count,
    )?];
    let seconds = ctx.either(if ctx.full { 3.0 } else { 0.8 }, 0.0);
    let rounds = ctx.either(if ctx.full { 15 } else { 9 }, 1);
    let mut bus = vec![];
    let mut storage = vec![];
    let mut device = vec![];
    let mut ratios = vec![];
    for round in 0..rounds {
        if round >= 3 && ctx.left().is_zero() {
            break;
        }
        bus.push(h2d_for(&bare, size, seconds / 2.0)?);
        // A B, B A, A B …
        let mut pull = |first: bool| -> Result<(), String> {
            if first {
                storage.push(host.pull(seconds)?.gb_per_s)
            } else {
                device.push(ours.pull(seconds)?.gb_per_s)
            }
            Ok(())
        };
        pull(round % 2 == 0)?;
        pull(round % 2 != 0)?;
        ratios.push(device[round] / bus[round].min(storage[round]));
    }
    ctx.figure(
        format!("{what}: bus"),
        &bus,
        "GB/s",
        None,
        "bare copies from registered memory",
    );
    ctx.figure(
        format!("{what}: loader on the host"),
        &storage,
        "GB/s",
        None,
        "storage to slots",
    );
    ctx.figure(
        format!("{what}: loader on the device"),
        &device,
        "GB/s",
        None,
        "",
    );
    ctx.figure(
        format!("{what}: device / slower of both"),
        &ratios,
        "×",
        Some(Target::Least(SHARE)),
        "",
    );
    registered(ctx, what, &ours.loader);
    Ok(())
}

/// Whether the same memory is io_uring's and the driver's.
fn registered(ctx: &Ctx, what: &str, loader: &Loader) {
    let report = loader.report();
    let storage = &report.total.storage;
    let fixed = if storage.counts.registered_buffers {
        "registered (READ_FIXED)"
    } else {
        "not registered"
    };
    let copies = report
        .total
        .copy
        .as_ref()
        .map_or("no copies".into(), |copies| copies.to_string());
    ctx.note(
        format!("{what}: memory of the slots"),
        format!(
            "with io_uring: {fixed}, {} reads; with the driver: {copies}; {}",
            storage.counts.ops, report.choice
        ),
    );
}

/// A training loop whose step takes longer than anything the loader does.
pub fn idle(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    let path = data(ctx)?;
    let mut loader = Puller::new(
        builder(ctx, &path, (Mode::Auto, Direct::Off))?.device(device()?),
        Some(gpu.stream()?),
    )?;
    let rate = loader.pull(ctx.either(1.5, 0.0))?.gb_per_s;
    let batch_s = (ctx.either(BATCH, 8) * RECORD) as f64 / rate / 1e9;
    let step = ctx.either(
        Duration::from_secs_f64((1.5 * batch_s).clamp(0.002, 0.5)),
        Duration::from_millis(2),
    );
    let steps = ctx.either((4.0 / step.as_secs_f64()).clamp(20.0, 1000.0) as usize, 8);
    let mut idle = vec![];
    let mut starved = vec![];
    let mut late = vec![];
    for round in 0..ctx.either(if ctx.full { 9 } else { 5 }, 1) {
        if round >= 3 && ctx.left().is_zero() {
            break;
        }
        let shares = train(&gpu, &mut loader, step, steps)?;
        idle.push(shares[0]);
        starved.push(shares[1]);
        late.push(shares[2]);
    }
    let words = format!(
        "{steps} steps of {:.2} ms; a batch came in {:.2} ms",
        step.as_secs_f64() * 1e3,
        batch_s * 1e3
    );
    ctx.figure(
        "idle, by events",
        &idle,
        "%",
        Some(Target::Most(IDLE)),
        words,
    );
    ctx.figure(
        "of that starved: no batch was there",
        &starved,
        "%",
        None,
        "",
    );
    ctx.figure(
        "of that late: the host asked late",
        &late,
        "%",
        None,
        "with what events and launches take",
    );
    Ok(())
}

/// Percent of the time in which the stream had nothing to do, waited for a batch, and waited for
/// the host.
fn train(gpu: &Gpu, loader: &mut Puller, step: Duration, steps: usize) -> Result<[f64; 3], String> {
    let stream = gpu.stream()?;
    let bound = Stream::from(&stream);
    let events = || {
        (0..=steps)
            .map(|_| gpu.event())
            .collect::<Result<Vec<_>, _>>()
    };
    let asked = events()?;
    let start = events()?;
    let end = events()?;
    let record = |event: &CudaEvent| event.record(&stream).map_err(said("cuEventRecord"));
    // The first step is for warming up: its end is where the time begins.
    for at in 0..=steps {
        record(&asked[at])?;
        let batch = loader.next()?;
        batch.bind(&bound).map_err(words)?;
        record(&start[at])?;
        gpu.spin(&stream, step)?;
        record(&end[at])?;
    }
    stream.synchronize().map_err(said("cuStreamSynchronize"))?;
    let ms = |from: &CudaEvent, to: &CudaEvent| {
        from.elapsed_ms(to)
            .map(f64::from)
            .map_err(said("cuEventElapsedTime"))
    };
    let whole = ms(&end[0], &end[steps])?;
    let mut worked = 0.0;
    let mut starved = 0.0;
    let mut late = 0.0;
    for at in 1..=steps {
        worked += ms(&start[at], &end[at])?;
        starved += ms(&asked[at], &start[at])?;
        late += ms(&end[at - 1], &asked[at])?;
    }
    Ok([
        100.0 * (whole - worked) / whole,
        100.0 * starved / whole,
        100.0 * late / whole,
    ])
}
