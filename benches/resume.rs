//! Cost of resuming an interrupted run, and of saving its state.
//!
//! ```text
//! cargo test  --benches                 each case once, small, to keep it working
//! cargo bench --no-default-features --bench resume
//!                                       30 pairs: a fresh start and a resumed one in turn, each from `Loader::builder` to
//!                                       the first batch; then creating and saving states, and their size
//! ```
//!
//! The dataset is open before either start; the resumed one loads its state from a file. *cold*
//! drops the files from the page cache before each start. Figures are medians; the interval of a
//! difference is 95 % by bootstrap.
//!
//! Physical limits: both starts compute the fingerprint in `build` (the ends of at most 256 files,
//! the name and length of each file, the start of each chunk). So the difference is the cost of the
//! resume, **without** the fingerprint: both columns hold that, about 80 ns per file. A synced save
//! cannot be faster than a plain program that writes the same bytes to a file, syncs, renames, and
//! syncs the folder.
//!
//! `FEEDLINE_PAIRS` sets the number of pairs, `FEEDLINE_BENCH_CASES` selects cases
//! (`records,files,chunks,virtual,save`), `FEEDLINE_BENCH_FILE` names the file of records (a
//! multiple of 150,528 bytes). The bench writes 0.7 GB below `target/`.

mod common;
#[path = "common/made.rs"]
mod made;

use common::{as_test, compare, evict, file, pairs_wanted, spread, warm};
use feedline::dataset::{Dataset, Records};
use feedline::order::Draws;
use feedline::storage::Sources;
use feedline::{Loader, LoaderBuilder, Order, Rank, State};
use made::Made;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Targets: ms of a resumed start beyond a fresh one, ms of a save without fsync, bytes of a state.
const RESUME_MS: f64 = 5.0;
const SAVE_MS: f64 = 1.0;
const STATE_BYTES: usize = 1024;

const BATCH: usize = 64;
/// Bytes per record, and per file of the case `files`.
const RECORD: usize = 150_528;
const FILE: usize = 16 << 10;
/// Pictures, as many as ImageNet's, and the number of different files behind them.
const PICTURES: u64 = 1_281_167;
const FILES: u64 = 1000;
const VIRTUAL: u64 = 1_000_000_000_000;

/// A case: it measures a number of pairs with its own files in a folder.
type Cases = fn(&Path, usize);

fn main() {
    let pairs = match pairs_wanted().0 {
        _ if as_test() => 1,
        0 => 30,
        pairs => pairs,
    };
    let dir =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-resume-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    println!(
        "{pairs} pairs of a fresh start and a resumed one, ms to the first batch of {BATCH}; then ms of the first `state()`"
    );
    let cases: [(&str, Cases); 5] = [
        ("records", records),
        ("files", files),
        ("chunks", chunks),
        ("virtual", samples),
        ("save", save),
    ];
    let wanted = std::env::var("FEEDLINE_BENCH_CASES").ok();
    for (name, case) in cases {
        if wanted
            .as_ref()
            .is_none_or(|wanted| wanted.split(',').any(|word| word == name))
        {
            case(&dir, pairs);
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

/// `full`, or `small` in a test.
fn sized(full: u64, small: u64) -> u64 {
    if as_test() { small } else { full }
}

/// A loader to start.
struct Case {
    name: String,
    dataset: Arc<dyn Dataset>,
    order: Order,
    /// The files of its data.
    files: Vec<PathBuf>,
}

fn records(dir: &Path, pairs: usize) {
    let path = file(sized(4096, 4 * BATCH as u64) * RECORD as u64);
    let dataset = Arc::new(Records::builder(RECORD).open(&path).unwrap());
    let name = format!("{} records of {RECORD} bytes, shuffled", dataset.len());
    let case = Case {
        name,
        dataset,
        order: Order::shuffled(1),
        files: vec![path],
    };
    case.warm_and_cold(dir, pairs);
}

fn files(dir: &Path, pairs: usize) {
    let name = |number: u64| format!("n{:08}_{number:05}.JPEG", 1_440_764 + number / 50);
    let files: Vec<PathBuf> = (0..sized(FILES, 8))
        .map(|number| dir.join(name(number)))
        .collect();
    for path in &files {
        let mut file = File::create(path).unwrap();
        file.write_all(&[7; FILE]).unwrap();
        file.sync_all().unwrap();
    }
    for len in if as_test() {
        vec![1000]
    } else {
        vec![10_000, PICTURES]
    } {
        let mut sources = Sources::new();
        let folder = sources.dir(dir);
        for path in files.iter().cycle().take(len as usize) {
            sources
                .file_in(folder, path.file_name().unwrap(), FILE as u64)
                .unwrap();
        }
        let dataset = Arc::new(Made::samples(sources, len, FILE));
        let name = format!("{len} files of 16 KiB, shuffled");
        Case {
            name,
            dataset,
            order: Order::shuffled(1),
            files: files.clone(),
        }
        .warm_and_cold(dir, pairs);
    }
}

fn chunks(dir: &Path, pairs: usize) {
    let path = file(sized(64 << 20, 1 << 20));
    for count in if as_test() {
        vec![100]
    } else {
        vec![1000, 100_000, 1_000_000]
    } {
        let mut sources = Sources::new();
        sources
            .file(&path, std::fs::metadata(&path).unwrap().len())
            .unwrap();
        let dataset = Arc::new(Made::chunks(sources, count, 64, 1024));
        let name = format!("{count} chunks of 64 KiB, windows of 4, 8 lanes");
        let case = Case {
            name,
            dataset,
            order: Order::windowed(1, 4).lanes(8),
            files: vec![path.clone()],
        };
        case.warm_and_cold(dir, pairs);
    }
}

/// A dataset of 10^12 samples, in memory.
fn samples(dir: &Path, pairs: usize) {
    let dataset = Arc::new(Made::samples(Made::memory(1 << 20), VIRTUAL, 64));
    let case = Case {
        name: "10^12 samples, shuffled".into(),
        dataset,
        order: Order::shuffled(1),
        files: Vec::new(),
    };
    for (place, position) in [
        ("second", BATCH as u64),
        ("middle", VIRTUAL / 2),
        ("last", VIRTUAL - BATCH as u64),
    ] {
        case.compare(dir, place, pairs, &case.state_at(position), || ());
    }
}

impl Case {
    fn builder(&self) -> LoaderBuilder {
        Loader::builder(self.dataset.clone())
            .order(self.order.clone())
            .batch_size(BATCH)
            .workers(2)
    }

    /// The state of a run that has delivered `position` samples, a multiple of the batch.
    ///
    /// It reads only a few of them: with enough ranks all of them lie in one batch. Then it changes
    /// the batch size.
    fn state_at(&self, position: u64) -> State {
        let world = u32::try_from(position).unwrap_or(u32::MAX);
        let rank = self
            .builder()
            .rank(Rank::new(0, world).unwrap())
            .global_batch(position)
            .build()
            .unwrap();
        rank.epoch(0).unwrap().next().unwrap().unwrap();
        let resumed = self
            .builder()
            .resume_rebatched(rank.state().unwrap())
            .build()
            .unwrap();
        let state = resumed.state().unwrap();
        assert_eq!(
            (state.epoch(), state.position(), state.global_batch()),
            (0, position, BATCH as u64)
        );
        state
    }

    fn warm_and_cold(&self, dir: &Path, pairs: usize) {
        let position = self.dataset.len() / 2 / BATCH as u64 * BATCH as u64;
        let state = self.state_at(position);
        let lens: Vec<_> = self
            .files
            .iter()
            .map(|path| (path, std::fs::metadata(path).unwrap().len()))
            .collect();
        lens.iter().for_each(|(path, len)| warm(path, 0..*len));
        self.compare(dir, "middle, warm", pairs, &state, || ());
        self.compare(dir, "middle, cold", pairs, &state, || {
            lens.iter().for_each(|(path, len)| evict(path, 0..*len))
        });
    }

    /// Milliseconds from the builder to the first batch, and the loader.
    fn start(&self, saved: Option<&Path>, expected: Option<u64>) -> (f64, Loader) {
        let (ms, (loader, epoch, batch)) = timed(|| {
            let builder = match saved {
                Some(path) => self.builder().resume(State::load(path).unwrap()),
                None => self.builder(),
            };
            let loader = builder.build().unwrap();
            let mut epoch = loader.epoch(loader.next_epoch()).unwrap();
            let batch = epoch.next().unwrap().unwrap();
            (loader, epoch, batch)
        });
        assert!(batch.len() == BATCH && expected.is_none_or(|id| batch.ids()[0] == id));
        drop((batch, epoch));
        (ms, loader)
    }

    /// The expected first sample, if `preview` can give it.
    fn expected(&self, position: u64) -> Option<u64> {
        let near = position < 1_000_000;
        near.then(|| {
            *self
                .builder()
                .build()
                .unwrap()
                .preview(0, position + 1)
                .unwrap()
                .last()
                .unwrap()
        })
    }

    fn compare(&self, dir: &Path, place: &str, pairs: usize, state: &State, before: impl Fn()) {
        let saved = dir.join("state");
        state.save(&saved).unwrap();
        let expected = self.expected(state.position());
        let mut times = Times::default();
        for pair in 0..pairs {
            // A B, B A, A B …: a drift of the machine affects both equally.
            for resume in [pair % 2 == 1, pair % 2 == 0] {
                before();
                let (ms, loader) = self.start(
                    resume.then_some(saved.as_path()),
                    if resume { expected } else { None },
                );
                if resume {
                    times.resumed.push(ms);
                    continue;
                }
                times.fresh.push(ms);
                before();
                times.first.push(timed(|| loader.state().unwrap()).0);
                times.later.push(
                    timed(|| (0..1000).fold(0, |sum, _| sum ^ loader.state().unwrap().steps())).0,
                );
            }
        }
        println!("{}, {place}: {times}", self.name);
    }
}

/// Milliseconds.
#[derive(Default)]
struct Times {
    fresh: Vec<f64>,
    resumed: Vec<f64>,
    /// `state()`: the first call, and 1000 later ones.
    first: Vec<f64>,
    later: Vec<f64>,
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let differences: Vec<f64> = self
            .resumed
            .iter()
            .zip(&self.fresh)
            .map(|(resumed, fresh)| resumed - fresh)
            .collect();
        let (more, low, high) = bootstrap(&differences);
        let of = |values: &Vec<f64>| spread(values.clone()).0;
        let fresh = of(&self.fresh);
        let resumed = of(&self.resumed);
        let first = of(&self.first);
        let later = of(&self.later) * 1e3;
        write!(
            f,
            "fresh {fresh:.2}, resumed {resumed:.2}, difference {more:.2} [{low:.2}, {high:.2}] {}; ",
            judge(low, high)
        )?;
        write!(f, "state() {first:.3}, later {later:.0} ns")
    }
}

fn judge(low: f64, high: f64) -> &'static str {
    match (low <= RESUME_MS, high <= RESUME_MS) {
        _ if as_test() => "(a test)",
        (_, true) => "(met)",
        (false, _) => "(MISSED)",
        (true, false) => "(inconclusive)",
    }
}

/// Milliseconds and result of `work`.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let started = Instant::now();
    let made = std::hint::black_box(work());
    (started.elapsed().as_secs_f64() * 1e3, made)
}

/// The median, and its 95 % interval from 10,000 resamples.
fn bootstrap(values: &[f64]) -> (f64, f64, f64) {
    let mut draws = Draws::new(0, 0, 0, "bootstrap");
    let mut one = |_| values[draws.below(values.len() as u64) as usize];
    let mut medians: Vec<f64> = (0..10_000)
        .map(|_| spread(values.iter().map(&mut one).collect()).0)
        .collect();
    medians.sort_by(f64::total_cmp);
    (spread(values.to_vec()).0, medians[250], medians[9749])
}

fn save(dir: &Path, pairs: usize) {
    let dataset = Arc::new(Made::samples(Made::memory(1 << 20), VIRTUAL, 64));
    let case = Case {
        name: String::new(),
        dataset,
        order: Order::shuffled(u64::MAX),
        files: Vec::new(),
    };
    let state = case.state_at(VIRTUAL - BATCH as u64);
    let bytes = state.to_bytes();
    assert!(
        bytes.len() <= STATE_BYTES,
        "a state of {} bytes",
        bytes.len()
    );
    println!("a state at the end of 10^12 samples: {} bytes", bytes.len());
    let path = dir.join("state");
    let bare = dir.join("bare");
    println!("{pairs} pairs each, ms:");
    let unsynced = || timed(|| state.save_unsynced(&path).unwrap()).0;
    let plainly = || timed(|| plain(&bare, &bytes, Synced::None)).0;
    // Saves are far apart, because ext4 starts to write a file that replaces another. If it is
    // replaced again within milliseconds, it must reach the device first.
    let rest = || std::thread::sleep(Duration::from_millis(sized(50, 0)));
    let (ms, low, high) = spread((0..sized(100, 2)).map(|_| (rest(), unsynced()).1).collect());
    let verdict = if high <= SAVE_MS { "met" } else { "MISSED" };
    println!("save_unsynced: {ms:.3} [{low:.3}, {high:.3}] of 100, 50 ms apart ({verdict})");
    compare(
        "save_unsynced / plain write and rename",
        "ms",
        pairs,
        || (rest(), unsynced()).1,
        || (rest(), plainly()).1,
    );
    let burst = |save: &dyn Fn() -> f64| {
        (0..sized(100, 2)).map(|_| save()).sum::<f64>() / sized(100, 2) as f64
    };
    compare(
        "the same 100 times in a row, each",
        "ms",
        pairs,
        || burst(&unsynced),
        || burst(&plainly),
    );
    let synced = || timed(|| state.save(&path).unwrap()).0;
    compare(
        "save / plain write, fsync, rename, fsync of the folder",
        "ms",
        pairs,
        synced,
        || timed(|| plain(&bare, &bytes, Synced::Both)).0,
    );
    compare(
        "save / plain write, fsync, rename",
        "ms",
        pairs,
        synced,
        || timed(|| plain(&bare, &bytes, Synced::File)).0,
    );
}

/// Parts of a save to sync.
#[derive(PartialEq)]
enum Synced {
    None,
    File,
    Both,
}

/// The usual way to replace a file.
fn plain(path: &Path, bytes: &[u8], sync: Synced) {
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary).unwrap();
    file.write_all(bytes).unwrap();
    if sync != Synced::None {
        file.sync_all().unwrap();
    }
    std::fs::rename(&temporary, path).unwrap();
    if sync == Synced::Both {
        File::open(path.parent().unwrap())
            .unwrap()
            .sync_all()
            .unwrap();
    }
}
