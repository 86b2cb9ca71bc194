//! Readers against the device, and against fio on the same file.
//!
//! ```text
//! cargo test  --benches                          each case once, small, to keep it working
//! cargo bench --bench storage                    criterion: every reader, block and depth
//! FEEDLINE_PAIRS=15 FEEDLINE_PAIR_SECONDS=5 cargo bench --bench storage
//!                                                feedline and fio in turn; the ratio with its interval
//! ```
//!
//! `FEEDLINE_BENCH_FILE` names the file (else 2 GiB are generated under `target/`),
//! `FEEDLINE_BENCH_CASES` the cases of the pairs as `block:depth,…`, `FEEDLINE_BENCH_READER` their
//! reader (`uring`, `pread`, `mmap`), `FEEDLINE_FIO_ARGS` more arguments for fio
//! (`--fixedbufs=1 --registerfiles=1`). The physical limit beside each figure is fio's: io_uring,
//! O_DIRECT, random reads, the same block, depth and file, one thread. Its buffers request huge
//! pages, like feedline's. That alone gained 1.2 × at 128 KiB and 2 × at 1 MiB on a virtio disk,
//! where a request is one descriptor per page. `FEEDLINE_FIO_PLAIN=1` keeps fio's default pages.
//!
//! All reads are cold: by O_DIRECT, or, for mmap, with the file dropped from the page cache before
//! each sample.

mod common;

use common::{Fio, as_test, cpu_s, figure, file, fio, pairs_wanted, spread};
use criterion::{BenchmarkId, Criterion, Throughput};
use feedline::storage::{Direct, Extent, Mode, SourceId, Sources};
use feedline::unstable::{ByteRing, IoBuf, Opened, ReadOp, Reader, ReaderOptions, open};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCKS: [u64; 4] = [4 << 10, 128 << 10, 150_528, 1 << 20];
const DEPTHS: [u32; 4] = [1, 4, 32, 64];
/// Targets: block, depth, minimum ratio of bytes per second to fio's.
const TARGETS: [(u64, u32, f64); 3] = [
    (128 << 10, 32, 0.98),
    (1 << 20, 32, 0.98),
    (4 << 10, 64, 0.90),
];
/// Target: maximum CPU seconds per byte, as a ratio to fio's.
const CPU_TARGET: f64 = 1.2;

fn main() {
    let file = file(if as_test() { 16 << 20 } else { 2 << 30 });
    let (pairs, seconds) = pairs_wanted();
    if pairs > 0 {
        return compare_with_fio(&file, pairs, seconds);
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    every_reader(
        &mut criterion,
        &file,
        if as_test() { 1 << 20 } else { 64 << 20 },
    );
    criterion.final_summary();
}

/// xorshift64.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// A reader busy with random reads of one size.
struct Load {
    reader: Box<dyn Reader>,
    idle: Vec<IoBuf>,
    source: SourceId,
    block: u64,
    blocks: u64,
    state: u64,
    path: PathBuf,
    mode: Mode,
}

impl Load {
    fn new(path: &Path, mode: Mode, block: u64, depth: u32) -> Option<Self> {
        let len = std::fs::metadata(path).unwrap().len();
        let mut sources = Sources::new();
        let source = sources.file(path, len).unwrap();
        let mut options = ReaderOptions::default();
        options.mode = mode;
        options.depth = Some(depth);
        options.direct = if mode == Mode::Mmap {
            Direct::Off
        } else {
            Direct::On
        };
        let opened = open(Arc::new(sources), &options)
            .map_err(|error| eprintln!("skipped: {error}"))
            .ok()?;
        let Opened { mut reader, .. } = opened;
        let room = (block as usize).next_multiple_of(4096);
        let ring = ByteRing::new(room * depth as usize, depth as usize, || {}).unwrap();
        if let Some(reason) = reader.register_ring(&ring) {
            eprintln!("{reason}");
        }
        let idle = (0..depth)
            .map(|_| ring.reserve(room).unwrap().into())
            .collect();
        let blocks = (len / block).max(1);
        Some(Self {
            reader,
            idle,
            source,
            block,
            blocks,
            state: 7,
            path: path.into(),
            mode,
        })
    }

    /// Reads while `go_on(bytes so far)` returns true, completes the reads in flight, and returns
    /// the bytes.
    fn run(&mut self, mut go_on: impl FnMut(u64) -> bool) -> u64 {
        let mut bytes = 0;
        let mut out = Vec::with_capacity(self.idle.len());
        loop {
            while go_on(bytes) {
                let Some(buf) = self.idle.pop() else { break };
                let offset = random(&mut self.state) % self.blocks * self.block;
                let extent = Extent {
                    source: self.source,
                    offset,
                    len: self.block,
                };
                assert!(
                    self.reader
                        .submit(ReadOp {
                            tag: 0,
                            extent,
                            buf
                        })
                        .is_ok()
                );
            }
            if self.reader.in_flight() == 0 {
                return bytes;
            }
            self.reader.wait(&mut out, None);
            for completion in out.drain(..) {
                completion.result.unwrap();
                bytes += self.block;
                self.idle.push(completion.buf);
            }
        }
    }

    fn drop_cache(&self) {
        if self.mode == Mode::Mmap {
            let file = std::fs::File::open(&self.path).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
    }
}

fn every_reader(criterion: &mut Criterion, path: &Path, sample_bytes: u64) {
    for (name, mode) in [
        ("uring", Mode::Uring),
        ("pread", Mode::Pread),
        ("mmap", Mode::Mmap),
    ] {
        let mut group = criterion.benchmark_group(name);
        for block in BLOCKS {
            for depth in DEPTHS {
                let Some(mut load) = Load::new(path, mode, block, depth) else {
                    continue;
                };
                // Small blocks and depths are slow: fewer bytes make a sample.
                let bytes = (block * 16 * u64::from(depth)).clamp(block, sample_bytes.max(block));
                let count = bytes / block;
                group.throughput(Throughput::Bytes(count * block));
                group.bench_function(BenchmarkId::new(block.to_string(), depth), |bencher| {
                    bencher.iter_custom(|rounds| {
                        load.drop_cache();
                        let start = Instant::now();
                        let mut left = rounds * count;
                        load.run(|_| {
                            left > 0 && {
                                left -= 1;
                                true
                            }
                        });
                        start.elapsed()
                    });
                });
            }
        }
        group.finish();
    }
}

fn measure(load: &mut Load, seconds: f64) -> Fio {
    load.drop_cache();
    let start = Instant::now();
    let cpu = cpu_s();
    let end = start + Duration::from_secs_f64(seconds);
    let mut turn = 0_u32;
    let mut on = true;
    let bytes = load.run(|_| {
        // Reads the clock at every 16th operation: at 4 KiB more would cost.
        turn = turn.wrapping_add(1);
        on = on && (!turn.is_multiple_of(16) || Instant::now() < end);
        on
    });
    let cpu = cpu_s() - cpu;
    let gigabytes = bytes as f64 / 1e9;
    Fio {
        gb_per_s: gigabytes / start.elapsed().as_secs_f64(),
        cpu_s_per_gb: cpu / gigabytes,
    }
}

fn compare_with_fio(path: &Path, pairs: usize, seconds: f64) {
    let mode = match std::env::var("FEEDLINE_BENCH_READER").as_deref() {
        Ok("pread") => Mode::Pread,
        Ok("mmap") => Mode::Mmap,
        _ => Mode::Uring,
    };
    println!(
        "{pairs} pairs of {seconds} s, {mode:?} and fio in turn, {}",
        path.display()
    );
    println!(
        "   block depth |     GB/s      fio | ratio [95 %] | CPU s/GB      fio | ratio [95 %] | verdict"
    );
    for (block, depth) in cases() {
        let Some(mut load) = Load::new(path, mode, block, depth) else {
            continue;
        };
        let mut all = Vec::new();
        for _ in 0..pairs {
            let ours = measure(&mut load, seconds);
            match fio(path, block, depth, seconds) {
                Some(fio) => all.push((ours, fio)),
                None => println!(
                    "{block:>8} {depth:>5} | {:>8.3} | no fio here",
                    ours.gb_per_s
                ),
            }
        }
        if !all.is_empty() {
            print_case(block, depth, &all);
        }
    }
}

fn cases() -> Vec<(u64, u32)> {
    let text = std::env::var("FEEDLINE_BENCH_CASES").unwrap_or_default();
    let named: Vec<_> = text
        .split(',')
        .filter_map(|case| {
            let (block, depth) = case.split_once(':')?;
            Some((block.parse().ok()?, depth.parse().ok()?))
        })
        .collect();
    if named.is_empty() {
        TARGETS
            .iter()
            .map(|(block, depth, _)| (*block, *depth))
            .collect()
    } else {
        named
    }
}

fn print_case(block: u64, depth: u32, pairs: &[(Fio, Fio)]) {
    let all = |value: fn(&(Fio, Fio)) -> f64| -> Vec<f64> { pairs.iter().map(value).collect() };
    let of = |value| spread(all(value));
    let case = format!("{block}:{depth}");
    figure(&case, "GB/s", &all(|(ours, _)| ours.gb_per_s));
    figure(
        &format!("{case}: fio"),
        "GB/s",
        &all(|(_, fio)| fio.gb_per_s),
    );
    let speed = of(|(ours, fio)| ours.gb_per_s / fio.gb_per_s);
    let cpu = of(|(ours, fio)| ours.cpu_s_per_gb / fio.cpu_s_per_gb);
    let target = TARGETS
        .iter()
        .find(|(b, d, _)| (*b, *d) == (block, depth))
        .map(|(_, _, target)| *target);
    let verdict = target.map_or(String::new(), |target| {
        format!(
            "{}, CPU {}",
            judge(speed, |value| value >= target),
            judge(cpu, |value| value <= CPU_TARGET)
        )
    });
    println!(
        "{block:>8} {depth:>5} | {:>8.3} {:>8.3} | {:.3} [{:.3}, {:.3}] | {:>8.3} {:>8.3} | {:.3} [{:.3}, {:.3}] | {verdict}",
        of(|(ours, _)| ours.gb_per_s).0,
        of(|(_, fio)| fio.gb_per_s).0,
        speed.0,
        speed.1,
        speed.2,
        of(|(ours, _)| ours.cpu_s_per_gb).0,
        of(|(_, fio)| fio.cpu_s_per_gb).0,
        cpu.0,
        cpu.1,
        cpu.2,
    );
}

/// A target is met if the interval reaches it. An interval wider than ± 5 % is inconclusive.
fn judge((middle, low, high): (f64, f64, f64), met: impl Fn(f64) -> bool) -> &'static str {
    if high - low > 0.1 * middle {
        "inconclusive: machine too noisy"
    } else if met(low) || met(high) {
        "met"
    } else {
        "missed"
    }
}
