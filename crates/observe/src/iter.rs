//! The profiler around an iterator in Rust.

use crate::diagnosis::Diagnosis;
use crate::observation::{LoaderFacts, LoaderKind, Observation};
use crate::observer::Observer;

/// Measures a loop over any iterator: how long the loop waits in `next`, and for what.
///
/// ```
/// let mut batches = feedline_observe::observe((0..50).map(|i| i * 2));
/// for batch in &mut batches {
///     std::hint::black_box(batch);
/// }
/// println!("{}", batches.report());
/// # assert_eq!(batches.observation().consumer.batches, 50);
/// ```
///
/// Adaptors around the iterator belong to the loop, those in it to the loader. It needs Linux.
pub fn observe<I: Iterator>(iterator: I) -> Observed<I> {
    let facts = LoaderFacts::new(LoaderKind::Other, std::any::type_name::<I>());
    Observed {
        iterator,
        observer: Observer::new(facts, None),
        begun: false,
    }
}

/// An iterator that is measured, see [`observe`].
pub struct Observed<I> {
    iterator: I,
    observer: Observer,
    begun: bool,
}

impl<I> Observed<I> {
    /// The limit of the loop, with evidence and advice.
    pub fn diagnosis(&self) -> Diagnosis {
        self.observer.diagnosis()
    }

    /// Everything that was measured.
    pub fn observation(&self) -> Observation {
        self.observer.observation()
    }

    /// The diagnosis and the numbers, as text.
    pub fn report(&self) -> String {
        self.observer.report()
    }
}

impl<I: Iterator> Iterator for Observed<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        if self.begun {
            self.observer.asks();
        } else {
            self.observer.starts();
            self.begun = true;
        }
        let item = self.iterator.next();
        match item {
            Some(_) => self.observer.got(0),
            None => {
                self.observer.ends();
                self.begun = false;
            }
        }
        item
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.iterator.size_hint()
    }
}
