//! Loaders that are built and dropped, many times over, leave nothing behind: device memory,
//! descriptors, threads, memory.

use crate::common::{descriptors, loader_threads, noise};
use crate::driver::Gpu;
use crate::ours::{device, words};
use crate::section::Ctx;
use feedline::dataset::Records;
use feedline::device::Finish;
use feedline::tensor::DType;
use feedline::{Device, Loader, Order};
use std::time::{Duration, Instant};

/// Bytes that the driver may take for itself: it reserves in blocks.
const DEVICE_SLACK: usize = 4 << 20;
/// Bytes that the allocator may keep.
const HOST_SLACK: u64 = 32 << 20;

/// What the process has.
struct Have {
    device_free: usize,
    descriptors: Vec<String>,
    threads: usize,
    loader_threads: Vec<String>,
    anonymous: u64,
}

impl Have {
    fn now(gpu: &Gpu) -> Result<Self, String> {
        Ok(Self {
            device_free: gpu.free_bytes()?,
            descriptors: descriptors(),
            threads: std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count),
            loader_threads: loader_threads(),
            anonymous: anonymous(),
        })
    }

    /// What is there more than in `before`.
    fn more_than(&self, before: &Self) -> Vec<String> {
        let mut more = Vec::new();
        let device = before.device_free.saturating_sub(self.device_free);
        if device > DEVICE_SLACK {
            more.push(format!("{device} bytes of device memory"));
        }
        let files = self
            .descriptors
            .iter()
            .filter(|file| !before.descriptors.contains(file))
            .cloned()
            .collect::<Vec<_>>();
        if self.descriptors.len() > before.descriptors.len() {
            more.push(format!(
                "{} descriptors: {files:?}",
                self.descriptors.len() - before.descriptors.len()
            ));
        }
        if self.threads > before.threads || !self.loader_threads.is_empty() {
            more.push(format!(
                "{} threads, not {}: {:?}",
                self.threads, before.threads, self.loader_threads
            ));
        }
        let host = self.anonymous.saturating_sub(before.anonymous);
        if host > HOST_SLACK {
            more.push(format!("{host} bytes of anonymous memory"));
        }
        more
    }
}

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    let device = device()?;
    let count = ctx.either(if ctx.full { 1000 } else { 200 }, 20);
    // The first ones pay for what is made once: modules, thread stacks, the allocator's arenas.
    (0..ctx.either(20, 4)).try_for_each(|number| one(ctx, number, &device))?;
    let before = Have::now(&gpu)?;
    let started = Instant::now();
    let mut made = 0;
    for number in 0..count {
        if ctx.left().is_zero() {
            break;
        }
        one(ctx, number, &device)?;
        made += 1;
    }
    let ms = started.elapsed().as_secs_f64() * 1e3 / f64::from(made.max(1));
    ctx.check(format!("{made} loaders leave nothing behind"), || {
        let more = settled(&gpu, &before)?;
        let now = Have::now(&gpu)?;
        let kept = now.anonymous.saturating_sub(before.anonymous) >> 10;
        if more.is_empty() {
            Ok(format!(
                "{ms:.1} ms each; free device memory {} → {}; {kept} KiB more of the host's",
                before.device_free, now.device_free
            ))
        } else {
            Err(more.join("; "))
        }
    });
    drop((device, gpu));
    contexts(ctx)
}

/// What is more in the end: the driver and other processes may need a moment, or change things
/// themselves.
fn settled(gpu: &Gpu, before: &Have) -> Result<Vec<String>, String> {
    let mut more = Vec::new();
    for _ in 0..10 {
        more = Have::now(gpu)?.more_than(before);
        if more.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    Ok(more)
}

/// A loader of some sort that is used in some way.
fn one(ctx: &Ctx, number: u32, device: &Device) -> Result<(), String> {
    let side = ctx.either(96, 16);
    let bytes = noise(side * side * 3 * 40, u64::from(number));
    let records = Records::builder(side * side * 3)
        .field("image", DType::U8, [side, side, 3])
        .open_bytes(bytes);
    let mut builder = Loader::builder(records.map_err(words)?)
        .order(Order::shuffled(1))
        .batch_size(8)
        .workers(2);
    if number.is_multiple_of(2) && ctx.kernels.get() {
        builder = builder.finish("image", Finish::to(DType::F16).channels_first().flip(0.5));
    }
    let loader = builder.device(device.clone()).build().map_err(words)?;
    match number % 4 {
        // Dropped while slots are being pinned.
        0 => {}
        // In the middle of an epoch, with batches that live on.
        1 => {
            let mut epoch = loader.epochs(0..9).map_err(words)?;
            let batches: Vec<_> = epoch
                .by_ref()
                .take(2)
                .collect::<Result<_, _>>()
                .map_err(words)?;
            drop((epoch, loader));
            batches
                .iter()
                .flat_map(|batch| batch.fields())
                .try_for_each(|field| {
                    field
                        .read_into(&mut vec![0; field.size_bytes()])
                        .map_err(words)
                })?;
        }
        2 => loader
            .epoch(0)
            .map_err(words)?
            .try_for_each(|batch| batch.map(drop))
            .map_err(words)?,
        _ => {
            let batch = loader
                .epoch(0)
                .map_err(words)?
                .next()
                .ok_or("no batch")?
                .map_err(words)?;
            let tensors = batch.into_dlpack();
            drop(loader);
            drop(tensors);
        }
    }
    Ok(())
}

/// The context comes and goes with the loader when nobody else holds it.
fn contexts(ctx: &Ctx) -> Result<(), String> {
    let count = ctx.either(8, 3);
    let have = || {
        (
            descriptors().len(),
            std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count),
        )
    };
    // The driver keeps what its first contexts made.
    (0..2).try_for_each(|number| one(ctx, number, &device()?))?;
    let before = have();
    (0..count).try_for_each(|number| one(ctx, number, &device()?))?;
    ctx.check(
        format!("{count} devices that are opened and closed"),
        || {
            let mut after = have();
            // The stand-in keeps a thread of each context.
            let more = |now: (usize, usize)| now.0 > before.0 || (ctx.real() && now.1 > before.1);
            for _ in 0..10 {
                if !more(after) && loader_threads().is_empty() {
                    return Ok(format!("descriptors and threads {before:?} → {after:?}"));
                }
                std::thread::sleep(Duration::from_millis(300));
                after = have();
            }
            Err(format!(
                "descriptors and threads {before:?} → {after:?}, {:?}",
                loader_threads()
            ))
        },
    );
    Ok(())
}

/// Bytes of memory that is no file's.
fn anonymous() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}
