//! Shared code of the integration tests: folders on a real file system, and a naive oracle for
//! records.

#![allow(
    dead_code,
    unused_imports,
    reason = "each test binary uses its own part"
)]

pub mod cached;
pub mod child;
pub mod cuda;
pub mod cufile;
pub mod doubles;
pub mod formats;
pub mod gate;
pub mod got;
pub mod kernels;
#[cfg(feature = "remote")]
pub mod lie;
pub mod numeric;
pub mod runs;
#[cfg(feature = "remote")]
pub mod server;
pub mod standin;
pub mod sweep;
pub mod synthetic;
pub mod toys;
pub mod wait;
pub mod workloads;

pub use child::*;
pub use wait::*;

use feedline::dataset::Records;
use feedline::storage::{Direct, Mode};
use feedline::tensor::DType;
use feedline::{Batch, Error, ErrorKind, LastBatch, Loader, LoaderBuilder, Result};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder of its own, removed at the end. Below the target folder, since `/tmp` may be a tmpfs,
/// which accepts any alignment of O_DIRECT and so tests none.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Self {
        Self::below(Path::new(env!("CARGO_TARGET_TMPDIR")), "")
    }

    /// In memory if there is room for `bytes`: for tests that sync many files.
    pub fn in_memory(bytes: u64) -> Self {
        let shm = Path::new("/dev/shm");
        match rustix::fs::statvfs(shm).is_ok_and(|disk| disk.f_bavail * disk.f_frsize > bytes) {
            true => Self::below(shm, "feedline-"),
            false => Self::new(),
        }
    }

    fn below(folder: &Path, prefix: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let process = std::process::id();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{prefix}{process}-{number}"));
        // Left by a killed process that had this number.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Bytes without a period, so that a wrong offset always shows.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Writes other bytes into a file, like a disk error: its time of the last write stays.
pub fn damage(path: &Path, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    file.set_modified(modified).unwrap();
}

/// A file of `count` records, and its bytes.
pub fn records_file(dir: &Dir, count: usize, record: usize) -> (PathBuf, Vec<u8>) {
    let bytes = noise(count * record, (count * 31 + record) as u64);
    (dir.write(&format!("{count}x{record}.bin"), &bytes), bytes)
}

pub fn records(path: &Path, record: usize) -> Records {
    Records::builder(record).open(path).unwrap()
}

/// Every kind of number that a field may hold.
pub const DTYPES: [DType; 13] = {
    use DType::*;
    [
        Bool, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64,
    ]
};

/// Every treatment of a short last batch.
pub const ALL_LAST: [LastBatch; 4] = [
    LastBatch::Keep,
    LastBatch::Mask,
    LastBatch::Pad,
    LastBatch::Drop,
];

/// Every way to read.
pub const READERS: [(Mode, Direct); 6] = [
    (Mode::Auto, Direct::Auto),
    (Mode::Uring, Direct::On),
    (Mode::Uring, Direct::Off),
    (Mode::Pread, Direct::On),
    (Mode::Pread, Direct::Off),
    (Mode::Mmap, Direct::Off),
];

/// Every available way to read. If io_uring is refused, the test continues with the others and
/// prints a note.
pub fn readers() -> Vec<(Mode, Direct)> {
    had(READERS)
}

/// The available ones of these ways.
pub fn had(ways: impl IntoIterator<Item = (Mode, Direct)>) -> Vec<(Mode, Direct)> {
    ways.into_iter()
        .filter(|(mode, _)| *mode != Mode::Uring || has_uring())
        .collect()
}

/// A way to read by its number; threads in place of io_uring if that is refused.
pub fn reader(number: usize) -> (Mode, Direct) {
    match READERS[number % READERS.len()] {
        (Mode::Uring, direct) if !has_uring() => (Mode::Pread, direct),
        way => way,
    }
}

/// Whether io_uring is available in this process.
pub fn has_uring() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let records = Records::builder(1).open_bytes([1]).unwrap();
        let loader = Loader::builder(records)
            .workers(1)
            .tuning(|t| t.slots(1).reader(Mode::Uring).direct(Direct::Off));
        loader
            .build()
            .map_err(|error| eprintln!("skipped: io_uring: {error}"))
            .is_ok()
    })
}

/// A loader that reads in this way.
pub fn build_by(builder: LoaderBuilder, mode: Mode, direct: Direct) -> Loader {
    build(builder.tuning(|t| t.reader(mode).direct(direct)))
}

/// Records of noise in memory.
pub fn noise_records(count: usize, record: usize, seed: u64) -> Records {
    let bytes = noise(count * record, seed);
    Records::builder(record).open_bytes(bytes).unwrap()
}

/// A picture of noise, without compression.
pub fn noisy_bmp(width: u32, height: u32, seed: u64) -> Vec<u8> {
    formats::bmp(width, height, |len| noise(len, seed))
}

/// The first batch of epoch 0.
#[track_caller]
pub fn first(loader: &Loader) -> Batch {
    loader.epoch(0).unwrap().next().unwrap().unwrap()
}

/// What a transform returns that fails here, or does not.
pub fn fail_if(fails: bool, message: &str) -> Result<()> {
    match fails {
        true => Err(Error::user(message)),
        false => Ok(()),
    }
}

/// Pulls everything: (sample id, bytes of field 0) in order.
pub fn pull(loader: &Loader, epoch: u64) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut out = Vec::new();
    for batch in loader.epoch(epoch)? {
        out.extend(rows(&batch?));
    }
    Ok(out)
}

pub fn rows(batch: &Batch) -> Vec<(u64, Vec<u8>)> {
    let field = batch.fields().next().unwrap();
    let bytes = field.as_bytes().unwrap();
    let rows = bytes.chunks(field.size_bytes() / batch.len());
    let rows = rows.map(<[u8]>::to_vec);
    batch.ids().iter().copied().zip(rows).collect()
}

pub fn build(builder: LoaderBuilder) -> Loader {
    builder.build().unwrap()
}

/// The text has these words; a failure shows all of it.
#[track_caller]
pub fn assert_says(text: impl Display, words: &str) {
    let text = text.to_string();
    assert!(text.contains(words), "no {words:?} in: {text}");
}

/// The error of a call that must fail, with these words.
#[track_caller]
pub fn must_say<T>(result: Result<T>, words: &str) -> Error {
    let Err(error) = result else {
        panic!("accepted, and no error with {words:?}")
    };
    assert_says(&error, words);
    error
}

/// The error of a call that must fail, of this kind and with these words.
#[track_caller]
pub fn must_fail<T>(result: Result<T>, kind: ErrorKind, words: &str) -> Error {
    let error = must_say(result, words);
    assert_eq!(error.kind(), kind, "{error}");
    error
}

/// Names of this process's threads that belong to loaders.
pub fn loader_threads() -> Vec<String> {
    let mut names = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.starts_with("feedline-") {
            names.push(name.trim().to_string());
        }
    }
    names
}

/// Targets of this process's open descriptors.
pub fn descriptors() -> Vec<String> {
    let mut out = Vec::new();
    for fd in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        out.extend(std::fs::read_link(fd.path()).map(|path| path.display().to_string()));
    }
    // The listed folder is one of them and has the process's id in its path.
    out.retain(|path| !path.ends_with("/fd"));
    out.sort();
    out
}

/// Number of things left behind in this process.
pub fn leaked() -> u64 {
    let records = Records::builder(1).open_bytes([1]).unwrap();
    let builder = Loader::builder(records).workers(1);
    build(builder.tuning(|t| t.slots(1))).report().leaked
}

/// Fails unless the error is of this kind and its text has all of these words; gives the text.
#[track_caller]
pub fn assert_error(error: &Error, kind: ErrorKind, words: &[&str]) -> String {
    let said = error.to_string();
    let missing: Vec<_> = words.iter().filter(|word| !said.contains(**word)).collect();
    assert_eq!((error.kind(), missing), (kind, vec![]), "{words:?}: {said}");
    said
}

/// The error that ends an epoch.
#[track_caller]
pub fn end_of(loader: &Loader, epoch: u64) -> Error {
    let mut batches = loader.epoch(epoch).unwrap();
    batches.find_map(Result::err).expect("it ended well")
}
