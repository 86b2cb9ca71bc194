//! What the bus gives: copies to the device from each kind of host memory, and on the device; and
//! the gather kernel there.
//!
//! For each size and number of copies in flight the kinds take turns, so that a drift of the
//! machine hits all alike.

use crate::driver::{DeviceBytes, Gpu, Kind, Lane, h2d, said};
use crate::pull::{BATCH, RECORD};
use crate::section::{Ctx, spread};
use feedline::device::cuda::cudarc::driver::sys::CUdevice_attribute as Attribute;

const MIB: usize = 1 << 20;
/// Bytes that a repetition copies at least.
const LEAST: usize = 512 * MIB;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    engines(ctx, &gpu);
    let sizes: &[usize] = ctx.either(
        &[MIB, 4 * MIB, 16 * MIB, 38 * MIB, 128 * MIB],
        &[MIB / 4, MIB],
    );
    pinning(ctx, &gpu, *sizes.last().unwrap_or(&MIB));
    for size in sizes {
        of_size(ctx, &gpu, *size)?;
    }
    on_device(ctx, &gpu)?;
    if ctx.kernels.get() {
        gather(ctx, &gpu)
    } else {
        Ok(())
    }
}

fn engines(ctx: &Ctx, gpu: &Gpu) {
    let of = |attribute| {
        gpu.attribute(attribute)
            .map_or("?".into(), |value| value.to_string())
    };
    let count = of(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
    let processors = of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    ctx.note(
        "engines",
        format!("{count} copy engines, {processors} multiprocessors"),
    );
}

/// What making pinned memory takes.
fn pinning(ctx: &Ctx, gpu: &Gpu, size: usize) {
    for kind in [Kind::Registered, Kind::HostAlloc] {
        let mut rates = Vec::new();
        for _ in 0..5 {
            match Lane::new(gpu, kind, size) {
                Ok(lane) => rates.push(size as f64 / lane.made_in().as_secs_f64() / 1e9),
                Err(error) => return ctx.skip(format!("pinning, {}", kind.name()), error),
            }
        }
        let what = if kind == Kind::Registered {
            "of populated huge pages"
        } else {
            "with what reserving them takes"
        };
        ctx.figure(
            format!("pinning {} MiB, {}", size / MIB, kind.name()),
            &rates,
            "GB/s",
            None,
            what,
        );
    }
}

/// Each kind with 1, 2 and 3 copies in flight.
fn of_size(ctx: &Ctx, gpu: &Gpu, size: usize) -> Result<(), String> {
    let mut kinds = Vec::new();
    for kind in Kind::ALL {
        match (0..3)
            .map(|_| Lane::new(gpu, kind, size))
            .collect::<Result<Vec<_>, _>>()
        {
            Ok(lanes) => kinds.push((kind, lanes)),
            Err(error) => ctx.skip(format!("H2D {} of {}", kind.name(), mib(size)), error),
        }
    }
    let repetitions = if ctx.full { 15 } else { 7 };
    for flight in 1..=3 {
        let mut rates = vec![Vec::new(); kinds.len()];
        for repetition in 0..=repetitions {
            if ctx.left().is_zero() {
                break;
            }
            for ((kind, lanes), rates) in kinds.iter().zip(&mut rates) {
                // Pageable memory is slow, and the first time is for warming up.
                let bytes = if *kind == Kind::Pageable || repetition == 0 {
                    LEAST / 4
                } else {
                    LEAST
                };
                let count = ctx.either((bytes / size).max(2 * flight), flight);
                let rate = h2d(&lanes[..flight], size, count)?;
                if repetition > 0 {
                    rates.push(rate);
                }
            }
        }
        tell(ctx, size, flight, &kinds, &rates);
    }
    Ok(())
}

fn tell(ctx: &Ctx, size: usize, flight: usize, kinds: &[(Kind, Vec<Lane>)], rates: &[Vec<f64>]) {
    for ((kind, _), rates) in kinds.iter().zip(rates) {
        ctx.figure(
            format!("H2D {}, {}, {flight} in flight", kind.name(), mib(size)),
            rates,
            "GB/s",
            None,
            "",
        );
    }
    let of = |wanted: Kind| {
        kinds
            .iter()
            .zip(rates)
            .find(|((kind, _), _)| *kind == wanted)
            .map(|(_, rates)| rates)
    };
    if let (Some(ours), Some(theirs)) = (of(Kind::Registered), of(Kind::HostAlloc)) {
        let ratios: Vec<f64> = ours
            .iter()
            .zip(theirs)
            .map(|(ours, theirs)| ours / theirs)
            .collect();
        ctx.figure(
            format!("registered / host-alloc, {}, {flight} in flight", mib(size)),
            &ratios,
            "×",
            None,
            "",
        );
    }
}

fn on_device(ctx: &Ctx, gpu: &Gpu) -> Result<(), String> {
    let stream = gpu.stream()?;
    let start = gpu.event()?;
    let end = gpu.event()?;
    for size in ctx.either([38 * MIB, 1024 * MIB], [MIB / 2, MIB]) {
        let from = DeviceBytes::new(gpu, size)?;
        let to = DeviceBytes::new(gpu, size)?;
        let mut rates = Vec::new();
        for repetition in 0..8 {
            start.record(&stream).map_err(said("cuEventRecord"))?;
            let copies = ctx.either(20, 1);
            (0..copies).try_for_each(|_| from.copy_to(&to, size, &stream))?;
            end.record(&stream).map_err(said("cuEventRecord"))?;
            let ms = start.elapsed_ms(&end).map_err(said("cuEventElapsedTime"))?;
            if repetition > 0 {
                rates.push((copies * size) as f64 / f64::from(ms) / 1e6);
            }
        }
        ctx.figure(
            format!("D2D, {}", mib(size)),
            &rates,
            "GB/s",
            None,
            "bytes copied; each is read and written",
        );
    }
    Ok(())
}

/// A batch whose rows lie at odd places, launched as a loader launches it.
fn gather(ctx: &Ctx, gpu: &Gpu) -> Result<(), String> {
    let rows = ctx.either(BATCH, 2);
    let stride = RECORD + 512;
    let offsets: Vec<u64> = (0..rows).map(|row| (row * stride + 1) as u64).collect();
    let staging = DeviceBytes::new(gpu, rows * stride)?;
    let out = DeviceBytes::new(gpu, rows * RECORD)?;
    let stream = gpu.stream()?;
    let mut times = Vec::new();
    for _ in 0..9 {
        let shape = ctx.either([[37, 256, 1], [256, 1, 1]], [[1, 1, 1], [64, 1, 1]]);
        times.push(
            1e3 * gpu.gather(
                &stream,
                (&staging, &offsets),
                RECORD,
                &out,
                shape,
                ctx.either(50, 1),
            )?,
        );
    }
    let gb_per_s = (2 * rows * RECORD) as f64 / spread(times.clone()).0 / 1e3;
    let words = format!("{gb_per_s:.0} GB/s, read and written");
    ctx.figure(
        format!("gather of {rows} × {RECORD} bytes at offset 1"),
        &times,
        "µs",
        None,
        words,
    );
    Ok(())
}

fn mib(size: usize) -> String {
    if size < MIB {
        format!("{} KiB", size >> 10)
    } else {
        format!("{} MiB", size / MIB)
    }
}
