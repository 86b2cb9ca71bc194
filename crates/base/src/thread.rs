//! Starts every thread of this crate. If the system refuses a thread, the error names the system's
//! limits. A group of threads continues with fewer threads, and the report says so.

use crate::cgroup;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::setting::Setting;
use crate::sync::Hold;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

/// Milliseconds before each retry of a refused thread: the kernel counts a thread for a moment
/// after its end.
const PAUSES: [u64; 4] = [1, 2, 4, 8];

/// The groups that run with fewer threads than wanted: the number wanted, the number started, and
/// the limits at that time.
static FEWER: Mutex<BTreeMap<&str, (usize, usize, String)>> = Mutex::new(BTreeMap::new());

/// Starts a thread that the caller cannot do without: `what` is for the error, `name` for `ps`.
///
/// Errors: [`ErrorKind::Limit`], with the limits of the system.
pub fn start<T: Send + 'static>(
    what: &str,
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    spawn(name, body).map_err(|source| refused(what, 1, 0, source))
}

/// Like [`start`], for a caller that handles a refusal itself.
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A thread that cannot start drops its closure, so the body comes from a cell.
    let cell = Arc::new(Mutex::new(Some(body)));
    let mut pauses = PAUSES.iter();
    loop {
        let name = name.into();
        let cell = cell.clone();
        let tried = room::take().and_then(|room| {
            Builder::new().name(name).spawn(move || {
                let _room = room;
                let body = cell.hold().take();
                body.expect("one thread alone starts")()
            })
        });
        match (tried, pauses.next()) {
            (Err(error), Some(pause)) if error.raw_os_error().is_some() => {
                std::thread::sleep(Duration::from_millis(*pause))
            }
            (tried, _) => return tried,
        }
    }
}

/// Starts a thread in a scope, without retries.
pub fn scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let room = room::take()?;
    Builder::new()
        .name(name.into())
        .spawn_scoped(scope, move || {
            let _room = room;
            body()
        })
}

/// Calls `start` for `wanted` threads. If the system refuses a thread, `start` ends the threads
/// that it started, and returns their number and the error. It is then called for half of that
/// number, because the rest of the process needs threads, too.
///
/// Errors: [`ErrorKind::Limit`] if not a single thread can start.
pub fn or_fewer<T>(
    what: &'static str,
    wanted: usize,
    mut start: impl FnMut(usize) -> Result<T, (usize, io::Error)>,
) -> Result<T> {
    let mut count = wanted;
    loop {
        match start(count) {
            Ok(all) => {
                if count < wanted {
                    fewer(what, wanted, count);
                }
                return Ok(all);
            }
            Err((0, source)) => return Err(refused(what, wanted, 0, source)),
            Err((started, _)) => count = started.div_ceil(2),
        }
    }
}

/// A rayon pool of `wanted` threads, or of [fewer](or_fewer), and their handles. `enter` gets the
/// number of threads and returns the function that each calls first.
pub fn pool<E: FnOnce() + Clone + Send + 'static>(
    what: &'static str,
    name: &str,
    wanted: usize,
    mut enter: impl FnMut(usize) -> E,
) -> Result<(rayon::ThreadPool, Vec<JoinHandle<()>>)> {
    or_fewer(what, wanted, |count| {
        let enter = enter(count);
        let mut threads = Vec::with_capacity(count);
        let mut why = None;
        let builder = rayon::ThreadPoolBuilder::new()
            .num_threads(count)
            .spawn_handler(|thread| {
                let enter = enter.clone();
                let name = format!("{name}-{}", threads.len());
                spawn(&name, move || {
                    enter();
                    thread.run();
                })
                .map(|thread| threads.push(thread))
                .map_err(|error| {
                    let again = io::Error::from(error.kind());
                    why = Some(error);
                    again
                })
            });
        let built = builder.build().ok().filter(|_| {
            // The process needs one more thread, such as the planner. This pool must not take the
            // last one.
            count == 1
                || spawn("feedline-room", || ())
                    .map(|last| drop(last.join()))
                    .is_ok()
        });
        if let Some(pool) = built {
            return Ok((pool, threads));
        }
        // Rayon ends the threads, but does not wait for their end.
        let started = threads.len();
        threads.into_iter().for_each(|thread| drop(thread.join()));
        Err((
            started,
            why.unwrap_or_else(|| io::ErrorKind::WouldBlock.into()),
        ))
    })
}

/// Starts and ends threads to find how many of `wanted` can start now. For a library that panics if
/// it cannot start its own threads.
pub fn room_for(wanted: usize) -> usize {
    let (hold, held) = crossbeam_channel::bounded::<()>(0);
    let mut threads = Vec::new();
    while threads.len() < wanted {
        let held = held.clone();
        let started = spawn("feedline-room", move || {
            let _ = held.recv();
            rustix::thread::gettid()
        });
        let Ok(thread) = started else { break };
        threads.push(thread);
    }
    drop(hold);
    let count = threads.len();
    for id in threads.into_iter().filter_map(|thread| thread.join().ok()) {
        // The kernel counts a thread until its folder is gone.
        let folder = format!("/proc/self/task/{}", id.as_raw_nonzero());
        for _ in (0..100).take_while(|_| Path::new(&folder).exists()) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    count
}

/// Records that a group of threads runs with fewer than wanted.
pub fn fewer(what: &'static str, wanted: usize, started: usize) {
    FEWER.hold().insert(what, (wanted, started, limits()));
}

/// For the report: the groups of this process with fewer threads than wanted, each as last
/// recorded.
pub fn fewer_in_words() -> Option<String> {
    let groups = FEWER.hold();
    (!groups.is_empty()).then(|| {
        groups
            .iter()
            .map(|(what, (wanted, started, limits))| {
                format!("{started} of {wanted} threads of the {what}; {limits}")
            })
            .collect::<Vec<_>>()
            .join("\n          ")
    })
}

/// The error if the system refuses a thread of `what`, with the numbers of threads wanted and
/// started.
pub fn refused(what: &str, wanted: usize, started: usize, source: io::Error) -> Error {
    let message = format!(
        "no thread can be started for the {what}: {wanted} wanted, {started} \
         started; {}: raise the limit, end other threads, or lower {} and {}",
        limits(),
        Setting::Workers,
        Setting::Depth
    );
    Error::new(ErrorKind::Limit, Stage::Build, message)
        .with_amounts(wanted as u64, started as u64)
        .with_source(source)
}

/// The limits on threads that this process can see; if control groups are full, only the limits of
/// these groups.
fn limits() -> String {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let (full, mut known) = of_groups(&groups, read);
    if !full.is_empty() {
        return full.join(", ");
    }
    known.extend(
        getrlimit(Resource::Nproc)
            .current
            .map(|most| format!("RLIMIT_NPROC (ulimit -u) is {most}")),
    );
    let most = read(Path::new("/proc/sys/kernel/threads-max"));
    known.extend(most.map(|most| format!("kernel.threads-max is {}", most.trim())));
    if known.is_empty() {
        "the limits are unknown, because /proc is missing".into()
    } else {
        known.join(", ")
    }
}

/// `pids.max` of this process's groups: of the full groups, and of all other groups.
fn of_groups(groups: &str, read: impl Fn(&Path) -> Option<String>) -> (Vec<String>, Vec<String>) {
    let mut full = Vec::new();
    let mut known = Vec::new();
    for folder in cgroup::folders(groups, "pids") {
        let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
        // "max" does not parse.
        let (Some(most), Some(now)) = (number("pids.max"), number("pids.current")) else {
            continue;
        };
        let words = format!(
            "pids.max of the control group {} is {most}, {now} in use",
            folder.display()
        );
        if now < most {
            known.push(words)
        } else {
            full.push(words)
        }
    }
    (full, known)
}

/// The number of threads that may still start, which tests limit.
#[cfg(feature = "unstable")]
pub mod room {
    use std::io;
    use std::sync::atomic::{AtomicI64, Ordering};

    static LEFT: AtomicI64 = AtomicI64::new(i64::MAX);

    /// A started thread.
    pub(super) struct Room;

    pub(super) fn take() -> io::Result<Room> {
        let less = LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            (left > 0).then(|| left - 1)
        });
        less.map(|_| Room)
            .map_err(|_| io::ErrorKind::WouldBlock.into())
    }

    impl Drop for Room {
        fn drop(&mut self) {
            LEFT.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// From now on, at most `count` more threads of this crate may live at once.
    pub fn leave_room_for_threads(count: i64) {
        LEFT.store(count, Ordering::Relaxed);
    }
}

#[cfg(not(feature = "unstable"))]
mod room {
    pub(super) struct Room;

    pub(super) fn take() -> std::io::Result<Room> {
        Ok(Room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn a_group_goes_on_with_half_of_what_started_and_says_so() {
        let mut asked = Vec::new();
        let started = or_fewer("test", 9, |count| {
            asked.push(count);
            if count > 3 {
                Err((count / 2, io::ErrorKind::WouldBlock.into()))
            } else {
                Ok(count)
            }
        });
        assert_eq!((started.unwrap(), asked), (2, vec![9, 2]));
        assert!(
            fewer_in_words()
                .unwrap()
                .contains("2 of 9 threads of the test; ")
        );
    }

    #[test]
    fn a_group_without_a_thread_is_an_error_with_the_limits() {
        let refused = or_fewer::<()>("test alone", 9, |_| {
            Err((0, io::Error::from_raw_os_error(11)))
        })
        .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Limit);
        for words in [
            "for the test alone: 9 wanted, 0 started; ",
            "RLIMIT_NPROC",
            "`workers`",
            "os error 11",
        ] {
            assert!(refused.to_string().contains(words), "{refused}");
        }
        assert!(!fewer_in_words().unwrap_or_default().contains("test alone"));
    }

    #[test]
    fn full_groups_are_told_apart_at_every_level() {
        let files = HashMap::from([
            ("/sys/fs/cgroup/pids/pod/pids.max", "24\n"),
            ("/sys/fs/cgroup/pids/pod/pids.current", "24\n"),
            ("/sys/fs/cgroup/pids/pod/job/pids.max", "max\n"),
            ("/sys/fs/cgroup/pids/pod/job/pids.current", "20\n"),
            ("/sys/fs/cgroup/pids/pids.max", "999\n"),
            ("/sys/fs/cgroup/pids/pids.current", "30\n"),
        ]);
        let read = |path: &Path| files.get(path.to_str()?).map(|text| text.to_string());
        let words = |group, numbers| {
            vec![format!(
                "pids.max of the control group /sys/fs/cgroup/pids{group} is {numbers} in use"
            )]
        };
        assert_eq!(
            of_groups("3:pids:/pod/job\n", read),
            (words("/pod", "24, 24"), words("", "999, 30"))
        );
    }
}
