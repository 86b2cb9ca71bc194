//! After every life the process must be as before it; a watchdog ends lives that hang.

use crate::common::{descriptors, loader_threads};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum duration of a life.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Maps that the allocator and the cache of thread stacks may add.
const MAPS_SLACK: usize = 12;

/// System resources of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct House {
    descriptors: Vec<String>,
    /// 0 with a stand-in driver: it never returns device memory, to detect its use after free.
    maps: usize,
    /// Live objects in the driver.
    driver: Option<String>,
    left_behind: u64,
}

fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count()
}

impl House {
    /// Current resources, once no loader's thread runs.
    pub fn now(driver: Option<String>) -> Self {
        let started = Instant::now();
        while !loader_threads().is_empty() {
            assert!(
                started.elapsed() < DEADLINE,
                "threads that do not end: {:?}",
                loader_threads()
            );
            std::thread::yield_now();
        }
        let maps = if driver.is_some() { 0 } else { maps() };
        Self {
            descriptors: descriptors(),
            maps,
            driver,
            left_behind: feedline::unstable::leaked(),
        }
    }

    /// Difference afterwards, if any.
    pub fn differs(&self, after: &Self) -> Option<String> {
        if self.descriptors != after.descriptors {
            return Some(format!(
                "descriptors: {:?}, before {:?}",
                after.descriptors, self.descriptors
            ));
        }
        if after.maps > self.maps + MAPS_SLACK {
            return Some(format!("{} maps, before {}", after.maps, self.maps));
        }
        if self.driver != after.driver {
            return Some(format!(
                "in the driver: {:?}, before {:?}",
                after.driver, self.driver
            ));
        }
        (self.left_behind != after.left_behind)
            .then(|| format!("{} buffers left behind", after.left_behind))
    }

    /// The same with the maximum number of maps so far, during warm-up.
    pub fn settled(self, other: Self) -> Self {
        Self {
            maps: self.maps.max(other.maps),
            ..self
        }
    }
}

/// The current life and its start.
static NOW: Mutex<Option<(Instant, String)>> = Mutex::new(None);
/// Panics of any thread.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Ends the process, with the name of the life, if a life takes too long. Counts panics.
pub fn watch() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        before(info);
    }));
    std::thread::Builder::new()
        .name("watch".into())
        .spawn(|| {
            loop {
                std::thread::sleep(Duration::from_millis(100));
                let Some((since, what)) = NOW.lock().unwrap().clone() else {
                    continue;
                };
                if since.elapsed() > DEADLINE {
                    println!("no end: {what}; threads: {:?}", loader_threads());
                    std::process::exit(101);
                }
            }
        })
        .unwrap();
}

/// Runs `life` under the watchdog; gives whether a thread panicked.
pub fn watched<T>(what: impl FnOnce() -> String, life: impl FnOnce() -> T) -> (T, bool) {
    let before = PANICS.load(Ordering::Relaxed);
    *NOW.lock().unwrap() = Some((Instant::now(), what()));
    let out = life();
    *NOW.lock().unwrap() = None;
    (out, PANICS.load(Ordering::Relaxed) != before)
}
