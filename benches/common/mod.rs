//! Helpers of the benches: CPU time, alternating pairs, fio as the physical limit, and a file to
//! read.
//!
//! Environment: `FEEDLINE_PAIRS` (default 0: no pairs, criterion only) and `FEEDLINE_PAIR_SECONDS`
//! (default 5) for a real comparison, `FEEDLINE_BENCH_FILE` for the file (default: generated below
//! `target/`), `FEEDLINE_BENCH_IMAGES` for a folder of pictures.

#![allow(dead_code, reason = "each bench uses its own part")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// CPU time of all threads of this process, in seconds.
pub fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Whether the bench runs as a test (`cargo test --benches`), with minimum work.
pub fn as_test() -> bool {
    std::env::args().any(|arg| arg == "--test") || !std::env::args().any(|arg| arg == "--bench")
}

/// Number of pairs, and seconds of each half.
pub fn pairs_wanted() -> (usize, f64) {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|value| value.parse::<f64>().ok())
    };
    let pairs = if as_test() {
        0.0
    } else {
        number("FEEDLINE_PAIRS").unwrap_or(0.0)
    };
    (
        pairs as usize,
        number("FEEDLINE_PAIR_SECONDS").unwrap_or(5.0),
    )
}

/// Runs `a` and `b` in turn and prints the median of the pairs' ratios with its 95 % interval. Both
/// must return the same kind of figure.
pub fn compare(
    what: &str,
    unit: &str,
    pairs: usize,
    mut a: impl FnMut() -> f64,
    mut b: impl FnMut() -> f64,
) {
    let mut ratios = Vec::new();
    let mut left = Vec::new();
    let mut right = Vec::new();
    for pair in 0..pairs {
        // A B, B A, A B …: a drift of the machine affects both equally.
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
    figure(what, unit, &left);
    figure(&format!("{what}: against"), unit, &right);
    let (ratio, low, high) = spread(ratios);
    let noisy = if (high - low) / 2.0 > 0.05 * ratio {
        "  inconclusive: machine too noisy"
    } else {
        ""
    };
    let x = spread(left).0;
    let y = spread(right).0;
    println!(
        "{what}: {x:.3} vs {y:.3} {unit}, ratio {ratio:.3} [{low:.3}, {high:.3}] of {pairs} pairs{noisy}"
    );
}

/// Median and its 95 % interval by order statistics, which make no assumption about the noise. With
/// fewer than 6 values the interval is the extremes.
pub fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        return (f64::NAN, f64::NAN, f64::NAN);
    }
    let middle = (values[(n - 1) / 2] + values[n / 2]) / 2.0;
    let reach = 0.98 * (n as f64).sqrt();
    let low = ((n as f64 / 2.0 - reach).floor().max(0.0) as usize).min(n - 1);
    (middle, values[low], values[n - 1 - low])
}

/// Prints a figure as a line of JSON, which `benches/figures.py` reads, if `FEEDLINE_FIGURES` is set.
pub fn figure(what: &str, unit: &str, values: &[f64]) {
    if std::env::var_os("FEEDLINE_FIGURES").is_none() {
        return;
    }
    let (median, low, high) = spread(values.to_vec());
    let runs = values.len();
    println!(
        r#"{{"what": {what:?}, "unit": {unit:?}, "median": {median}, "low": {low}, "high": {high}, "runs": {runs}}}"#
    );
}

/// A file of at least `bytes` bytes, not zeros.
pub fn file(bytes: u64) -> PathBuf {
    if let Some(path) = std::env::var_os("FEEDLINE_BENCH_FILE") {
        return path.into();
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{bytes}.bin"));
    if std::fs::metadata(&path).is_ok_and(|meta| meta.len() == bytes) {
        return path;
    }
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = vec![0_u8; 1 << 20];
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

/// Drops a file, or a part of it, from the page cache.
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

/// Results of fio.
#[derive(Clone, Copy, Debug)]
pub struct Fio {
    pub gb_per_s: f64,
    pub cpu_s_per_gb: f64,
}

/// Random reads by fio: io_uring, O_DIRECT, one thread, the same block and depth. `None` when fio
/// is not installed.
///
/// Its buffers request huge pages, like feedline's. That alone gained 1.2 × at 128 KiB and 2 × at 1
/// MiB on a virtio disk, where a request is one descriptor per page. `FEEDLINE_FIO_PLAIN=1` keeps
/// fio's default pages; `FEEDLINE_FIO_ARGS` adds arguments (`--fixedbufs=1 --registerfiles=1`).
pub fn fio(path: &Path, block: u64, depth: u32, seconds: f64) -> Option<Fio> {
    let more = std::env::var("FEEDLINE_FIO_ARGS").unwrap_or_default();
    let huge = if std::env::var_os("FEEDLINE_FIO_PLAIN").is_some() {
        0
    } else {
        1
    };
    let output = Command::new("fio")
        .env("GLIBC_TUNABLES", format!("glibc.malloc.hugetlb={huge}"))
        .args([
            "--name=feedline",
            "--readonly",
            "--rw=randread",
            "--ioengine=io_uring",
            "--direct=1",
            "--time_based",
        ])
        .args([
            "--norandommap",
            "--randrepeat=0",
            "--thread",
            "--output-format=json",
        ])
        .arg(format!("--filename={}", path.display()))
        .args([
            format!("--bs={block}"),
            format!("--iodepth={depth}"),
            format!("--runtime={seconds}"),
        ])
        .args(more.split_whitespace())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    // After the echo of the options, the first of each name belongs to the job's reads, because it
    // writes nothing.
    let text = &text[text.find("\"read\" :")?..];
    let value = |name: &str| {
        let rest = &text[text.find(&format!("\"{name}\" : "))? + name.len() + 5..];
        rest[..rest.find([',', '\n'])?].trim().parse::<f64>().ok()
    };
    let speed = value("bw_bytes")?;
    let runtime = value("runtime")? / 1e3;
    let cpu = (value("usr_cpu")? + value("sys_cpu")?) / 100.0 * (value("job_runtime")? / 1e3);
    Some(Fio {
        gb_per_s: speed / 1e9,
        cpu_s_per_gb: cpu / (speed * runtime / 1e9),
    })
}
