//! The copy stage: batches that lie in memory onto the device, against what the driver's own copies
//! give in the same run.
//!
//! ```text
//! bare   cuMemcpyHtoDAsync from registered memory, one after the other in a stream      the physical limit
//! alone  a loader whose slots are filled for nothing: what planning, queues, events and callbacks take
//! whole  a loader of records in memory: the decode workers copy each batch into its slot first
//! finish as alone, and pictures become floats behind their copies; by the loader's own events, what the kernel takes
//! ```

use crate::driver::{Gpu, Kind, Lane, h2d_for};
use crate::ours::{data, device, records, words};
use crate::pull::{BATCH, Pulled, Puller, RECORD, counted, counted_as};
use crate::report::Target;
use crate::section::{Ctx, spread};
use feedline::dataset::DatasetExt;
use feedline::device::Finish;
use feedline::memory::MemoryTerm;
use feedline::tensor::DType;
use feedline::{Loader, LoaderBuilder, Order};

/// Least share of the bare copies' rate.
const SHARE: f64 = 0.97;
/// Most CPU time of the transfer thread for a batch.
const COPY_US: f64 = 20.0;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    let record = ctx.either(RECORD, 512);
    for rows in ctx.either([28, BATCH, 892], [2, 8, 32]) {
        alone(ctx, &gpu, rows, record)?;
    }
    if ctx.kernels.get() {
        for width in ctx.either([224, 225], [16, 17]) {
            for (dtype, planes) in [
                (DType::F16, true),
                (DType::F16, false),
                (DType::F32, true),
                (DType::F32, false),
            ] {
                finish(ctx, &gpu, width, dtype, planes)?;
            }
        }
    }
    whole(ctx, &gpu)
}

/// Seconds of a half of a pair, and how many pairs.
fn pairs(ctx: &Ctx) -> (f64, usize) {
    match (ctx.real(), ctx.full) {
        (false, _) => (0.0, 1),
        (true, false) => (0.7, 9),
        (true, true) => (3.0, 15),
    }
}

fn alone(ctx: &Ctx, gpu: &Gpu, rows: usize, record: usize) -> Result<(), String> {
    let size = rows * record;
    let what = format!("alone, {}", crate::section::size(size));
    let target = (rows == BATCH).then_some(Target::Least(SHARE));
    let mut loader = Puller::new(
        counted(rows, record)?.device(device()?),
        Some(gpu.stream()?),
    )?;
    against_bare(ctx, gpu, &what, size, &mut loader, target).map(drop)
}

/// Pictures that become floats. Beside bare copies: those of the usual kind.
fn finish(ctx: &Ctx, gpu: &Gpu, width: usize, dtype: DType, planes: bool) -> Result<(), String> {
    let rows = ctx.either(BATCH, 8);
    let shape = [width, width, 3];
    let values = rows * width * width * 3;
    let finish = Finish::to(dtype).mean_std(&[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225]);
    let finish = if planes {
        finish.channels_first()
    } else {
        finish
    };
    let builder = counted_as(rows, &shape)?
        .finish("record", finish)
        .device(device()?);
    let mut loader = Puller::new(builder, Some(gpu.stream()?))?;
    let what = format!(
        "finish, {dtype}, {}, {width} wide",
        if planes { "planes" } else { "interleaved" }
    );
    if planes && dtype == DType::F16 && width.is_multiple_of(4) {
        against_bare(
            ctx,
            gpu,
            &what,
            values,
            &mut loader,
            Some(Target::Least(SHARE)),
        )?;
    }
    let mut times = Vec::new();
    for _ in 0..ctx.either(5, 1) {
        let before = loader.loader.snapshot().copy.unwrap_or_default();
        loader.pull(ctx.either(0.2, 0.0))?;
        let after = loader.loader.snapshot().copy.unwrap_or_default();
        times.push(
            (after.ops_ns - before.ops_ns) as f64 / 1e3 / (after.batches - before.batches) as f64,
        );
    }
    let gb_per_s = (values * (1 + dtype.size())) as f64 / spread(times.clone()).0 / 1e3;
    let words = format!("{gb_per_s:.0} GB/s, read and written, beside the next copy");
    ctx.figure(format!("{what}: kernel"), &times, "µs", None, words);
    Ok(())
}

/// Pairs of a loader and the bare copies of batches as large; returns their rates.
fn against_bare(
    ctx: &Ctx,
    gpu: &Gpu,
    what: &str,
    size: usize,
    loader: &mut Puller,
    target: Option<Target>,
) -> Result<Vec<(f64, f64)>, String> {
    let bare = [Lane::from_several(
        gpu,
        Kind::Registered,
        size,
        loader.loader.plan().term(MemoryTerm::SLOTS).count,
    )?];
    let (seconds, count) = pairs(ctx);
    let mut ours = vec![];
    let mut theirs = vec![];
    let mut ratios = vec![];
    let mut times = vec![];
    for pair in 0..count {
        if pair >= 3 && ctx.left().is_zero() {
            break;
        }
        let first = if pair % 2 == 0 {
            Some(h2d_for(&bare, size, seconds)?)
        } else {
            None
        };
        let Pulled {
            batches_per_s,
            copy_us,
            ..
        } = loader.pull(seconds)?;
        let gb_per_s = batches_per_s * size as f64 / 1e9;
        let limit = first.map_or_else(|| h2d_for(&bare, size, seconds), Ok)?;
        ours.push(gb_per_s);
        theirs.push(limit);
        ratios.push(gb_per_s / limit);
        times.extend(copy_us);
    }
    ctx.figure(format!("{what}: bare copies"), &theirs, "GB/s", None, "");
    ctx.figure(
        format!("{what}: loader"),
        &ours,
        "GB/s",
        None,
        copied(&loader.loader),
    );
    ctx.figure(format!("{what}: loader / bare"), &ratios, "×", target, "");
    if times.is_empty() {
        ctx.skip(
            format!("{what}: the copy thread's CPU time"),
            "the kernel does not tell it (schedstat)",
        );
    } else {
        let target = target.map(|_| Target::Most(COPY_US));
        ctx.figure(
            format!("{what}: the copy thread's CPU time"),
            &times,
            "µs/batch",
            target,
            "",
        );
    }
    Ok(ours
        .iter()
        .zip(theirs)
        .map(|(ours, bare)| (*ours, bare))
        .collect())
}

/// What the report says of copies.
fn copied(loader: &Loader) -> String {
    loader
        .report()
        .total
        .copy
        .map_or(String::new(), |copies| copies.to_string())
}

fn whole(ctx: &Ctx, gpu: &Gpu) -> Result<(), String> {
    let path = data(ctx)?;
    let memory = || -> Result<LoaderBuilder, String> {
        let records = records(&path, RECORD)?.in_memory().map_err(words)?;
        Ok(Loader::builder(records)
            .order(Order::shuffled(1))
            .batch_size(ctx.either(BATCH, 8)))
    };
    let size = ctx.either(BATCH, 8) * RECORD;
    let mut host = Puller::new(memory()?, None)?;
    let rates =
        (0..ctx.either(5, 1)).map(|_| host.pull(ctx.either(0.5, 0.0)).map(|it| it.gb_per_s));
    let rates = rates.collect::<Result<Vec<_>, _>>()?;
    ctx.figure(
        "records in memory: loader on the host",
        &rates,
        "GB/s",
        None,
        "filling slots: the other limit",
    );
    drop(host);
    let mut loader = Puller::new(memory()?.device(device()?), Some(gpu.stream()?))?;
    let target = Some(Target::Least(SHARE));
    let pairs = against_bare(ctx, gpu, "records in memory", size, &mut loader, target)?;
    let (fill, ..) = spread(rates);
    let shares: Vec<f64> = pairs
        .into_iter()
        .map(|(ours, bare)| ours / bare.min(fill))
        .collect();
    ctx.figure(
        "records in memory: loader / slower of bare and filling",
        &shares,
        "×",
        None,
        "filling: the loader on the host, median",
    );
    reserves_nothing(ctx, gpu, &mut loader)
}

/// Batches take nothing of the device's free memory. Against the stand-in,
/// `tests/device/cuda/hot.rs` counts the calls.
fn reserves_nothing(ctx: &Ctx, gpu: &Gpu, loader: &mut Puller) -> Result<(), String> {
    const WHAT: &str = "a batch reserves nothing in the driver";
    loader.pull(0.0)?;
    let batches = ctx.either(2000, 40);
    let mut said = String::new();
    // Other processes may take and give memory of the device: three times is no chance.
    for _ in 0..3 {
        let before = gpu.free_bytes()?;
        for number in 0..batches {
            if number >= 40 && ctx.left().is_zero() {
                break;
            }
            loader.next()?;
        }
        let after = gpu.free_bytes()?;
        said = format!("over up to {batches} batches: free {before} → {after}");
        if after >= before {
            ctx.check(WHAT, || Ok(said));
            return Ok(());
        }
    }
    ctx.check(WHAT, || Err(said));
    Ok(())
}
