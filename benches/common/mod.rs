//! What the benches share: CPU time, alternating pairs, fio as the physical limit, and a file to read.
//!
//! Environment: `FEEDLINE_PAIRS` (default 0: no pairs, criterion only) and `FEEDLINE_PAIR_SECONDS` (default 5) for a
//! real comparison, `FEEDLINE_BENCH_FILE` for the file (default: made below `target/`), `FEEDLINE_BENCH_IMAGES` for a
//! folder of pictures.

#![allow(dead_code, reason = "each bench uses its own part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// CPU time of all threads of this process, in seconds.
pub fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Whether the bench runs as a test (`cargo test --benches`): everything as short as it can be.
pub fn as_test() -> bool {
    std::env::args().any(|arg| arg == "--test") || !std::env::args().any(|arg| arg == "--bench")
}

/// How many pairs, of how many seconds each half.
pub fn pairs_wanted() -> (usize, f64) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<f64>().ok());
    let pairs = if as_test() { 0.0 } else { number("FEEDLINE_PAIRS").unwrap_or(0.0) };
    (pairs as usize, number("FEEDLINE_PAIR_SECONDS").unwrap_or(5.0))
}

/// Runs `a` and `b` in turn and prints the median of the pairs' ratios with its 95 % interval. Both return figures of
/// which more is better, or of which less is, as long as both do.
pub fn compare(what: &str, unit: &str, pairs: usize, mut a: impl FnMut() -> f64, mut b: impl FnMut() -> f64) {
    let (mut ratios, mut left, mut right) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        // A B, B A, A B …: a drift of the machine hits both alike.
        let (x, y) = if pair % 2 == 0 {
            let x = a();
            (x, b())
        } else {
            let y = b();
            (a(), y)
        };
        left.push(x);
        right.push(y);
        ratios.push(x / y);
    }
    let (low, high) = interval(&mut ratios);
    let spread = (high - low) / 2.0 / median(&mut ratios);
    let noisy = if spread > 0.05 { "  inconclusive: machine too noisy" } else { "" };
    println!(
        "{what}: {:.3} vs {:.3} {unit}, ratio {:.3} [{low:.3} … {high:.3}] of {pairs} pairs{noisy}",
        median(&mut left),
        median(&mut right),
        median(&mut ratios),
    );
}

pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// The 95 % interval of the median by order statistics: no assumption about the noise.
fn interval(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        return (f64::NAN, f64::NAN);
    }
    // The largest k such that at most k-1 of n coin flips come up heads with probability ≤ 2.5 %.
    let (mut k, mut below, mut term) = (0, 0.0, 0.5_f64.powi(n as i32));
    while below + term <= 0.025 {
        below += term;
        k += 1;
        term *= (n - k + 1) as f64 / k as f64;
    }
    let k = k.max(1) - 1;
    (values[k], values[n - 1 - k])
}

/// A file of at least `bytes` bytes that is not made of zeros.
pub fn file(bytes: u64) -> PathBuf {
    if let Some(path) = std::env::var_os("FEEDLINE_BENCH_FILE") {
        return path.into();
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{bytes}.bin"));
    if std::fs::metadata(&path).is_ok_and(|meta| meta.len() == bytes) {
        return path;
    }
    let (mut state, mut block) = (0x9e37_79b9_7f4a_7c15_u64, vec![0_u8; 1 << 20]);
    let mut out = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    let mut left = bytes;
    while left > 0 {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let len = left.min(block.len() as u64);
        std::io::Write::write_all(&mut out, &block[..len as usize]).unwrap();
        left -= len;
    }
    out.into_inner().unwrap().sync_all().unwrap();
    path
}

/// Asks the kernel to forget a file, or a part of it.
pub fn evict(path: &Path, range: std::ops::Range<u64>) {
    let file = std::fs::File::open(path).unwrap();
    let len = std::num::NonZeroU64::new(range.end - range.start);
    rustix::fs::fadvise(&file, range.start, len, rustix::fs::Advice::DontNeed).unwrap();
}

/// Reads a part of a file into the page cache.
pub fn warm(path: &Path, range: std::ops::Range<u64>) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(path).unwrap();
    let mut block = vec![0; 4 << 20];
    let mut at = range.start;
    while at < range.end {
        let len = block.len().min((range.end - at) as usize);
        let read = file.read_at(&mut block[..len], at).unwrap();
        if read == 0 {
            return;
        }
        at += read as u64;
    }
}

/// What fio reached.
#[derive(Clone, Copy, Debug)]
pub struct Fio {
    pub gb_per_s: f64,
    pub cpu_s_per_gb: f64,
}

/// Random reads by fio: io_uring, O_DIRECT, one job. `None` when fio is not installed.
pub fn fio(path: &Path, block: u64, depth: u32, seconds: f64) -> Option<Fio> {
    let output = Command::new("fio")
        .args(["--name=x", "--readonly", "--ioengine=io_uring", "--direct=1", "--rw=randread", "--time_based"])
        .args(["--group_reporting", "--output-format=json", "--norandommap", "--randrepeat=0"])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--bs={block}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={seconds}"))
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    // One job, and the read block comes first: the first of each key is ours.
    let number = |key: &str| -> Option<f64> {
        let rest = text.split(&format!("\"{key}\" : ")).nth(1)?;
        rest.split([',', '\n', '}']).next()?.trim().parse().ok()
    };
    let (bytes_per_s, user, system) = (number("bw_bytes")?, number("usr_cpu")?, number("sys_cpu")?);
    Some(Fio { gb_per_s: bytes_per_s / 1e9, cpu_s_per_gb: (user + system) / 100.0 / (bytes_per_s / 1e9) })
}

/// Calls `work` until `seconds` are over; returns what it returned in sum, per second.
pub fn rate(seconds: f64, mut work: impl FnMut() -> f64) -> f64 {
    let started = Instant::now();
    let mut sum = 0.0;
    while started.elapsed() < Duration::from_secs_f64(seconds) {
        sum += work();
    }
    sum / started.elapsed().as_secs_f64()
}
