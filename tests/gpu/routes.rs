//! From file to device by the size of the reads, 4 KiB to 16 MiB: by the staged route, past the
//! page cache and through it, and by cuFile where that goes past the host's memory.

use crate::driver::Gpu;
use crate::ours::{data, device, records};
use crate::pull::Puller;
use crate::section::Ctx;
use feedline::device::Gds;
use feedline::storage::{Direct, Mode};
use feedline::{Loader, LoaderBuilder, Order};
use std::path::Path;

/// Bytes of a batch, or one record where that is more.
const BATCH: usize = 32 << 20;

/// A setting under which all sizes are read.
struct Way {
    name: &'static str,
    set: fn(LoaderBuilder) -> LoaderBuilder,
}

const WAYS: [Way; 3] = [
    Way {
        name: "staged, io_uring O_DIRECT",
        set: |builder| builder.tuning(|t| t.gds(Gds::Off).reader(Mode::Uring).direct(Direct::On)),
    },
    Way {
        name: "staged, page cache",
        set: |builder| builder.tuning(|t| t.gds(Gds::Off).reader(Mode::Auto).direct(Direct::Off)),
    },
    // Where it cannot, the reason stands in the table.
    Way {
        name: "direct, cuFile",
        set: |builder| builder.tuning(|t| t.gds(Gds::Require)),
    },
];

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    let path = data(ctx)?;
    for way in &WAYS {
        for kib in ctx.either(&[4, 16, 64, 256, 1024, 4096, 16_384][..], &[4, 64]) {
            of_size(ctx, &gpu, &path, way, kib << 10)?;
        }
    }
    Ok(())
}

fn of_size(ctx: &Ctx, gpu: &Gpu, path: &Path, way: &Way, size: usize) -> Result<(), String> {
    let what = format!("{}, reads of {} KiB", way.name, size >> 10);
    let len = std::fs::metadata(path).map_or(0, |meta| meta.len()) as usize;
    if !len.is_multiple_of(size) {
        ctx.skip(what, "the data is too small, for want of room");
        return Ok(());
    }
    let rows = (ctx.either(BATCH, 1 << 19) / size).clamp(1, len / size);
    let builder = Loader::builder(records(path, size)?)
        .order(Order::shuffled(1))
        .batch_size(rows);
    let mut loader = match Puller::new((way.set)(builder).device(device()?), Some(gpu.stream()?)) {
        Ok(loader) => loader,
        Err(refused) => {
            ctx.skip(what, refused);
            return Ok(());
        }
    };
    let mut rates = Vec::new();
    for _ in 0..ctx.either(5, 1) {
        if !ctx.left().is_zero() {
            rates.push(loader.pull(ctx.either(0.3, 0.0))?.gb_per_s);
        }
    }
    // Which way the bytes went, by cuFile's own count.
    let direct = loader
        .loader
        .report()
        .total
        .copy
        .and_then(|copy| copy.direct);
    let how = direct.map_or(String::new(), |direct| format!("; {direct}"));
    ctx.figure(
        what,
        &rates,
        "GB/s",
        None,
        format!("batches of {rows}{how}"),
    );
    Ok(())
}
