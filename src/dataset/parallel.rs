//! Parallel work while a dataset is opened.

use crate::error::Result;
use crate::storage::is_url;
use crate::sync::Hold;
use std::path::PathBuf;
use std::sync::Mutex;

const THREADS_MAX: usize = 32;

/// Applies `f` to every item, on threads that end before the call returns. The first error (in order) wins; no item is
/// begun after an error.
pub(crate) fn parallel<I, R: Send>(items: I, f: impl Fn(usize, I::Item) -> Result<R> + Sync) -> Result<Vec<R>>
where
    I: IntoIterator<IntoIter: Send>,
{
    // Indexing waits for storage more than it computes.
    let threads = std::thread::available_parallelism().map_or(4, usize::from).saturating_mul(2);
    by_threads(threads.clamp(1, THREADS_MAX), items, f)
}

/// As [`parallel`], for files or objects. Objects are asked for by many threads, since each answer takes long.
pub(super) fn parallel_paths<R: Send>(
    paths: &[PathBuf],
    f: impl Fn(usize, &PathBuf) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    match paths.iter().any(|path| is_url(path)) {
        true => by_threads(THREADS_MAX, paths, f),
        false => parallel(paths, f),
    }
}

/// As [`parallel`], on so many threads.
pub(super) fn by_threads<I, R: Send>(
    threads: usize,
    items: I,
    f: impl Fn(usize, I::Item) -> Result<R> + Sync,
) -> Result<Vec<R>>
where
    I: IntoIterator<IntoIter: Send>,
{
    let items = items.into_iter();
    let threads = threads.min(items.size_hint().0);
    // Items are taken in order, so all items before a failed one have been begun.
    let left = Mutex::new((items.enumerate(), false));
    let next = || {
        let mut left = left.hold();
        if left.1 { None } else { left.0.next() }
    };
    let work = || {
        let mut out = Vec::new();
        while let Some((index, item)) = next() {
            let done = f(index, item);
            left.hold().1 |= done.is_err();
            out.push((index, done));
        }
        out
    };
    let mut done: Vec<(usize, Result<R>)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for handle in handles {
            done.extend(handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
