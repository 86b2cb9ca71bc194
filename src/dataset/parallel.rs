//! Work on many files at once, while a dataset is opened.

use crate::error::Result;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Applies `f` to every item on threads that end here; the first error (in order) wins.
pub(super) fn parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(usize, &T) -> Result<R> + Sync) -> Result<Vec<R>> {
    // Listing waits for storage more than it computes.
    let threads = std::thread::available_parallelism().map_or(4, usize::from).saturating_mul(2).clamp(1, 32);
    let next = AtomicUsize::new(0);
    let mut done: Vec<(usize, Result<R>)> = std::thread::scope(|scope| {
        let work = || {
            let mut out = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(index) else { return out };
                out.push((index, f(index, item)));
            }
        };
        let handles: Vec<_> = (1..threads.min(items.len())).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for handle in handles {
            done.extend(handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
