//! Limits on threads: each opening and each loader gives its rows with fewer, or an error that
//! names the limits. Nothing panics.

#[cfg(feature = "remote")]
use crate::common::server::Server;
use crate::common::workloads::WORKLOADS;
use crate::common::*;
#[cfg(feature = "remote")]
use feedline::storage::Cache;
use feedline::storage::Mode;
use feedline::unstable::leave_room_for_threads;
use feedline::{Error, ErrorKind, Loader, LoaderBuilder};
use std::sync::atomic::{AtomicU64, Ordering};

const NO_LIMIT: i64 = 1 << 40;
type Rows = Vec<(u64, Vec<u8>)>;

/// Runs with room for 0 to 40 threads beside those that live.
fn sweep(name: &str, run: impl Fn() -> Result<Rows, Error>) {
    let mut expected: Option<Rows> = None;
    let mut refused = Vec::new();
    // From the top: without a limit first.
    for room in [NO_LIMIT].into_iter().chain((0..=40).rev()) {
        leave_room_for_threads(room);
        let got = run();
        leave_room_for_threads(NO_LIMIT);
        match (got, &expected) {
            (Ok(rows), None) => expected = Some(rows),
            (Ok(rows), Some(expected)) => {
                assert!(room > 0 && rows == *expected, "{name} with room for {room}")
            }
            (Err(error), _) => {
                assert_eq!(
                    error.kind(),
                    ErrorKind::Limit,
                    "{name} with room for {room}: {error}"
                );
                refused.push(room);
                for words in ["wanted", "started", "RLIMIT_NPROC"] {
                    assert!(error.to_string().contains(words), "{name}: {error}");
                }
            }
        }
    }
    // Where the first groups take all the room, none is left for the last thread.
    assert!(
        refused.first() < Some(&40) && refused.len() < 20 && refused.ends_with(&[0]),
        "{name}: {refused:?}"
    );
}

fn rows(builder: LoaderBuilder) -> Result<Rows, Error> {
    let loader = builder.batch_size(2).workers(3).build()?;
    let rows = pull(&loader, 0)?;
    let report = loader.report();
    let started = report.total.decode.workers;
    assert!(
        started == 3
            || report
                .to_string()
                .contains("of 3 threads of the decode workers"),
        "{report}"
    );
    Ok(rows)
}

/// The number of panics so far, on any thread.
fn panics() -> &'static AtomicU64 {
    static PANICS: AtomicU64 = AtomicU64::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        before(info);
    }));
    &PANICS
}

#[test]
fn too_few_threads_give_all_rows_or_an_error_that_names_the_limits() {
    if !alone(&here!()) {
        return;
    }
    let panics = panics();
    for workload in WORKLOADS {
        sweep(workload.name, || {
            let dir = Dir::new();
            // The reader with the most threads.
            rows(
                (workload.set)(Loader::builder((workload.open)(&dir)))
                    .tuning(|t| t.reader(Mode::Pread)),
            )
        });
    }
    assert_eq!(panics.load(Ordering::Relaxed), 0);
}

#[cfg(feature = "remote")]
#[test]
fn too_few_threads_for_a_store_give_all_rows_or_an_error_that_names_the_limits() {
    if !alone(&here!()) {
        return;
    }
    let panics = panics();
    let server = Server::new();
    (0..40).for_each(|number| server.put(&format!("bucket/{number}.bin"), noise(640, number)));
    let url = server.http("{0..39}.bin");
    // The network threads of a process start once: with as much room as the first run of a child
    // leaves.
    for room in 0..3 {
        leave_room_for_threads(room);
        let opened = feedline::dataset::Records::builder(64).open(&url);
        assert_eq!(
            opened.err().map(|error| error.kind()),
            (room < 2).then_some(ErrorKind::Limit),
            "room for {room}"
        );
    }
    let open = || feedline::dataset::Records::builder(64).open(&url);
    sweep("store", || rows(Loader::builder(open()?)));
    sweep("store, cached", || {
        let dir = Dir::new();
        rows(Loader::builder(open()?).cache(Cache::at(dir.path("cache"))))
    });
    assert_eq!(panics.load(Ordering::Relaxed), 0);
}
