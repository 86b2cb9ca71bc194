//! Parallel work while a dataset is opened.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::is_url;
use feedline_base::stop::Stop;
use feedline_base::sync::Hold;
use feedline_base::thread;
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Mutex;

const THREADS_MAX: usize = 32;

thread_local!(static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) });

/// Calls `open` on this thread; its passes over data end with [`ErrorKind::Cancelled`] soon after
/// `stop` is requested, and leave no file behind. Single requests to a store run to completion.
pub fn stoppable<T>(stop: &Stop, open: impl FnOnce() -> T) -> T {
    let before = STOP.replace(Some(stop.clone()));
    let out = open();
    STOP.set(before);
    out
}

/// Errors: [`ErrorKind::Cancelled`] once the opening for which this thread works must stop.
pub fn goes_on() -> Result<()> {
    match STOP.with_borrow(|stop| stop.as_ref().is_some_and(Stop::requested)) {
        true => Err(Error::new(
            ErrorKind::Cancelled,
            Stage::Index,
            "opening the dataset was stopped",
        )),
        false => Ok(()),
    }
}

/// Applies `f` to every item, on threads that end before the call returns. The first error (in
/// order) wins; no item is started after an error.
pub fn parallel<I, R: Send>(
    items: I,
    f: impl Fn(usize, I::Item) -> Result<R> + Sync,
) -> Result<Vec<R>>
where
    I: IntoIterator<IntoIter: Send>,
{
    // Indexing waits for storage more than it computes.
    let threads = std::thread::available_parallelism()
        .map_or(4, usize::from)
        .saturating_mul(2);
    by_threads(threads.clamp(1, THREADS_MAX), items, f)
}

/// Like [`parallel`], for files or objects. Objects are requested by many threads, since each
/// response takes long.
pub fn parallel_paths<R: Send>(
    paths: &[PathBuf],
    f: impl Fn(usize, &PathBuf) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    match paths.iter().any(|path| is_url(path)) {
        true => by_threads(THREADS_MAX, paths, f),
        false => parallel(paths, f),
    }
}

/// Like [`parallel`], on at most `threads` threads.
pub fn by_threads<I, R: Send>(
    threads: usize,
    items: I,
    f: impl Fn(usize, I::Item) -> Result<R> + Sync,
) -> Result<Vec<R>>
where
    I: IntoIterator<IntoIter: Send>,
{
    let items = items.into_iter();
    let threads = threads.min(items.size_hint().0);
    // Items are taken in order, so all items before a failed one have been started.
    let left = Mutex::new((items.enumerate(), false));
    let next = || {
        let mut left = left.hold();
        if left.1 { None } else { left.0.next() }
    };
    let stop = STOP.with_borrow(Clone::clone);
    let work = || {
        let mut out = Vec::new();
        while let Some((index, item)) = next() {
            let done = goes_on().and_then(|()| f(index, item));
            left.hold().1 |= done.is_err();
            out.push((index, done));
        }
        out
    };
    let mut done: Vec<(usize, Result<R>)> = std::thread::scope(|scope| {
        let mut handles = Vec::new();
        while handles.len() + 1 < threads {
            // Fewer threads give the same result.
            let Ok(handle) = thread::scoped(scope, "feedline-help", || {
                STOP.set(stop.clone());
                work()
            }) else {
                thread::fewer("opening", threads, handles.len() + 1);
                break;
            };
            handles.push(handle);
        }
        let mut done = work();
        for handle in handles {
            done.extend(
                handle
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            );
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
