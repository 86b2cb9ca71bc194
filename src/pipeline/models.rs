//! Loom models: run the interactions of threads in every possible order. Run with
//! `RUSTFLAGS="--cfg loom" cargo test --release --lib models`.
//!
//! ```text
//! Rows ──countdown──► Filled ──► Exchange ──► FreeSlot ──┬─► planner (asleep in its bell)
//!                                   ▲ closed at the end   └─► ring of bytes: room
//! items ──► queue ──► drains (at most as many as workers) ──► none is left behind
//! ```
//!
//! The models use the loader's own types, with loom's atomics and locks ([`crate::sync`]). Not
//! modelled, with the reason:
//! * crossbeam's channels: each operation is one step here; they order their items, and are totally
//!   ordered with `SeqCst` atomics
//! * `Arc`: std's
//! * bytes of a region: a [`Track`]ed cell stands for the bytes of each row
//! * the kernel's side of a futex: see `sync`
//! * the rayon pool: not available under loom, so the thread that wakes a drain runs it

use super::Exchange;
use super::drains::{Drains, Switch, Turns};
use super::queue::Queue;
use crate::batch::Contents;
use crossbeam_channel::bounded;
use feedline_base::error::Error;
use feedline_base::meter::Clock;
use feedline_base::sync::Mutex;
use feedline_base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use feedline_core::memory::{ByteRing, Filled, FreeSlot, Hooks, Pool, Rows, Ticket};
use feedline_core::tensor::{DType, Field, Layout, Spec};
use feedline_reader::waker::Bell;
use feedline_report::meter::Meters;
use loom::thread;
use std::sync::{Arc, OnceLock, Weak};

/// Runs the model in every order of its threads' steps, and prints the number of orders.
fn every_order(name: &str, preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let count = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let seen = count.clone();
    meters();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 100_000;
    builder.check(move || {
        seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model();
    });
    let bound = preemptions.map_or("all".to_string(), |most| {
        format!("at most {most} preemptions")
    });
    println!(
        "loom: {name}: {} orders ({bound})",
        count.load(std::sync::atomic::Ordering::Relaxed)
    );
}

/// Stands for the bytes of a row. A reader that is not ordered after the writer sees the old value
/// in some order of the model.
#[derive(Default)]
struct Track(AtomicU64);

impl Track {
    fn write(&self, batch: u64) {
        self.0.store(batch, Ordering::Relaxed);
    }

    fn check(&self, batch: u64) {
        assert_eq!(
            self.0.load(Ordering::Relaxed),
            batch,
            "another batch's bytes"
        );
    }
}

fn pool(rows: usize, slots: usize, hooks: Box<dyn Hooks>) -> Pool {
    let spec = Spec::new(vec![Field::fixed("x", DType::U8, [2])]).unwrap();
    let layout = Layout::new(&spec, rows).unwrap();
    Pool::new(spec, layout, slots, hooks).unwrap()
}

/// Collects the slots of the model. The receiver of a full slot checks all rows.
struct Places {
    rows: Vec<Track>,
    full: Mutex<Vec<Filled>>,
    free: Mutex<Vec<FreeSlot>>,
}

impl Places {
    fn new(rows: usize) -> Arc<Self> {
        let rows = (0..rows).map(|_| Track::default()).collect();
        Arc::new(Self {
            rows,
            full: Mutex::default(),
            free: Mutex::default(),
        })
    }
}

impl Hooks for Places {
    fn full(&self, slot: Filled) {
        self.rows
            .iter()
            .for_each(|row| row.check(slot.ticket().batch));
        self.full.lock().unwrap().push(slot);
    }

    fn free(&self, slot: FreeSlot) {
        self.free.lock().unwrap().push(slot);
    }
}

#[test]
fn a_slot_is_full_once_and_its_receiver_sees_all_writes() {
    every_order("countdown of a slot", None, || {
        let places = Places::new(3);
        pool(3, 1, Box::new(places.clone())).announce();
        let slot = places.free.lock().unwrap().pop().unwrap();
        let mut all = slot.begin(
            Ticket {
                batch: 9,
                ..Ticket::default()
            },
            3,
            3,
        );
        let mut a = all.take(1);
        let mut b = all.take(1);
        let mut c = all.take(1);
        drop(all);
        let write = |places: &Places, rows: &mut Rows| {
            places.rows[rows.first() as usize].write(9);
            rows.row().bytes_mut(0).fill(1);
        };
        let own = places.clone();
        let first = thread::spawn(move || {
            write(&own, &mut a);
            a.finish_row();
        });
        let own = places.clone();
        let second = thread::spawn(move || {
            write(&own, &mut b);
            b.fail_row(Error::user("row 1"));
        });
        write(&places, &mut c);
        c.fail_row(Error::user("row 2"));
        drop(c);
        first.join().unwrap();
        second.join().unwrap();
        let filled = places
            .full
            .lock()
            .unwrap()
            .pop()
            .expect("the last row made it full");
        assert!(places.full.lock().unwrap().is_empty(), "full twice");
        assert_eq!(
            filled.take_failure().unwrap().message(),
            "row 1",
            "the lowest row's"
        );
        assert!(filled.bytes(0).iter().all(|byte| *byte == 1));
        drop(filled);
        assert_eq!(places.free.lock().unwrap().len(), 1);
    });
}

#[test]
fn a_reused_slot_keeps_nothing_of_its_last_use() {
    every_order("a slot used twice", None, || {
        let places = Places::new(2);
        pool(2, 1, Box::new(places.clone())).announce();
        let fill = |places: &Arc<Places>, slot: FreeSlot, batch: u64| {
            let mut rows = slot.begin(
                Ticket {
                    batch,
                    ..Ticket::default()
                },
                2,
                2,
            );
            let mut part = rows.take(1);
            let own = places.clone();
            let other = thread::spawn(move || {
                own.rows[0].write(batch);
                part.finish_row();
            });
            places.rows[1].write(batch);
            rows.finish_row();
            drop(rows);
            other
        };
        let slot = places.free.lock().unwrap().pop().unwrap();
        let mut writer = Some(fill(&places, slot, 1));
        let own = places.clone();
        // The consumer looks at the batch and drops it, whenever it comes.
        let consumer = thread::spawn(move || {
            let filled = loop {
                if let Some(filled) = { own.full.lock().unwrap().pop() } {
                    break filled;
                }
                thread::yield_now();
            };
            own.rows
                .iter()
                .for_each(|row| row.check(filled.ticket().batch));
            assert_eq!(filled.ticket().batch, 1);
            drop(filled);
        });
        consumer.join().unwrap();
        let slot = { places.free.lock().unwrap().pop() }.expect("dropped, so free");
        writer.take().map(|writer| writer.join().unwrap());
        fill(&places, slot, 2).join().unwrap();
        assert_eq!(
            places
                .full
                .lock()
                .unwrap()
                .pop()
                .map(|filled| filled.ticket().batch),
            Some(2)
        );
    });
}

/// Made once, outside of the models: meters are large, and the stacks of a model's threads are
/// small. No order depends on them.
fn meters() -> Arc<Meters> {
    static METERS: OnceLock<Arc<Meters>> = OnceLock::new();
    METERS
        .get_or_init(|| Arc::new(Meters::new(Clock::real(), 1, false)))
        .clone()
}

/// An exchange as the loader makes it on the host, with its slots, all free.
fn exchange(slots: usize) -> (Arc<Exchange>, Arc<Bell>) {
    let (frees, frees_out) = bounded(slots);
    let (ready, ready_out) = bounded(slots);
    let bell = Bell::futex();
    let exchange = Arc::new(Exchange {
        generation: Default::default(),
        ready,
        ready_out,
        to_device: None,
        frees,
        frees_out,
        closed: Default::default(),
        waker: bell.waker(),
        to_map: None,
        meters: meters(),
        drains: Arc::new(Drains::new(1)),
        lease: None,
    });
    pool(1, slots, Box::new(exchange.clone())).announce();
    (exchange, bell)
}

/// A full slot out of the exchange's own channels.
fn filled(exchange: &Exchange) -> Filled {
    let mut rows = exchange
        .frees_out
        .try_recv()
        .unwrap()
        .begin(Ticket::default(), 1, 1);
    rows.finish_row();
    drop(rows);
    match exchange.ready_out.try_recv().unwrap() {
        Contents::Host(filled) => filled,
        Contents::Device(_) => unreachable!("on the host"),
    }
}

/// Checks that no channel holds a slot, because a slot there keeps the exchange alive.
fn all_gone(exchange: Arc<Exchange>) {
    assert!(
        exchange.frees_out.is_empty() && exchange.ready_out.is_empty(),
        "a slot was left behind"
    );
    let weak: Weak<Exchange> = Arc::downgrade(&exchange);
    drop(exchange);
    assert!(weak.upgrade().is_none(), "a slot keeps the exchange alive");
}

#[test]
fn a_slot_freed_during_close_never_stays_in_a_channel() {
    every_order(
        "two batches are dropped while the exchange closes",
        None,
        || {
            let (exchange, _bell) = exchange(2);
            let batches = [filled(&exchange), filled(&exchange)];
            let threads = batches.map(|batch| thread::spawn(move || drop(batch)));
            exchange.close();
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            all_gone(exchange);
        },
    );
}

#[test]
fn a_slot_filled_during_close_never_stays_in_a_channel() {
    every_order(
        "a row is finished and a batch dropped while the exchange closes",
        None,
        || {
            let (exchange, _bell) = exchange(2);
            let batch = filled(&exchange);
            let mut rows = exchange
                .frees_out
                .try_recv()
                .unwrap()
                .begin(Ticket::default(), 1, 1);
            let first = thread::spawn(move || rows.finish_row());
            let second = thread::spawn(move || drop(batch));
            exchange.close();
            first.join().unwrap();
            second.join().unwrap();
            all_gone(exchange);
        },
    );
}

#[test]
fn a_sleeping_planner_hears_of_every_slot_and_of_the_end() {
    every_order(
        "a planner waits for slots, then for the end",
        Some(3),
        || {
            let (exchange, bell) = exchange(2);
            let batches = [filled(&exchange), filled(&exchange)];
            let ending = Arc::new(AtomicBool::new(false));
            let threads = batches.map(|batch| thread::spawn(move || drop(batch)));
            let mut slots = 0;
            while slots < 2 {
                while exchange.frees_out.try_recv().is_ok() {
                    slots += 1;
                }
                if slots < 2 {
                    nap(&bell);
                }
            }
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            let own = exchange.clone();
            let word = ending.clone();
            let end = thread::spawn(move || {
                word.store(true, Ordering::Release);
                own.ring();
            });
            while !ending.load(Ordering::Acquire) {
                nap(&bell);
            }
            end.join().unwrap();
            exchange.close();
            all_gone(exchange);
        },
    );
}

/// Waits like a reader that has checked for work and found none.
fn nap(bell: &Bell) {
    if bell.doze().is_ok() {
        bell.sleep(None);
        bell.rise();
    }
}

#[test]
fn no_wake_or_completion_is_lost_when_many_ring_at_once() {
    every_order("a bell with a wake and a completion", Some(3), || {
        let bell = Bell::futex();
        let done = Arc::new(Queue::with_room(1));
        let own = bell.clone();
        let queue = done.clone();
        let reader = thread::spawn(move || {
            queue.push(7);
            own.nudge();
        });
        let waker = bell.waker();
        let other = thread::spawn(move || waker.wake());
        let mut woken = false;
        let mut completions = 0;
        // Loops like `Threaded::wait`, until the wake and a completion have arrived.
        while !woken || completions == 0 {
            completions += usize::from(done.pop().is_some());
            if woken && completions > 0 {
                break;
            }
            woken |= match bell.doze() {
                Err(woken) => woken,
                Ok(()) => {
                    bell.sleep(None);
                    bell.rise()
                }
            };
        }
        reader.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_waiter_gets_ring_room_when_spans_return_in_any_order() {
    every_order("a planner waits for room", Some(3), || {
        let bell = Bell::futex();
        let waker = bell.waker();
        let ring = ByteRing::new(8192, 4, move || waker.wake()).unwrap();
        let spans = [ring.reserve(1).unwrap(), ring.reserve(1).unwrap()];
        let threads = spans.map(|span| thread::spawn(move || drop(span)));
        // Both spans must be gone.
        let all = loop {
            match ring.reserve(8192) {
                Some(span) => break span,
                None => nap(&bell),
            }
        };
        assert_eq!(all.len(), 8192);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}

/// Work as in a loader, for the real [`Drains`] and [`Turns`].
struct Work {
    drains: Drains,
    queue: Queue<u32>,
    /// Filled by item 1, like the queue of batches to map after their last row.
    more: Queue<u32>,
    /// Filled by items of 10 and more, like the rows that wait for a substitute. Served one at a
    /// time, items like the last one first.
    turns: Turns<u32>,
    last: Mutex<u32>,
    done: Mutex<Vec<u32>>,
}

impl Work {
    /// Rayon runs a drain at some time on some thread. Here the waking thread runs it, or the
    /// test's own thread runs it later.
    fn new(count: usize, at_once: bool) -> Arc<Self> {
        let work = Arc::new(Self {
            drains: Drains::new(count),
            queue: Queue::with_room(4),
            more: Queue::with_room(4),
            turns: Turns::new(),
            last: Mutex::new(0),
            done: Mutex::default(),
        });
        let own = Arc::downgrade(&work);
        work.drains.spawn_by(move || {
            own.upgrade()
                .filter(|_| at_once)
                .iter()
                .for_each(|work| work.drain())
        });
        work
    }

    fn push(&self, queue: &Queue<u32>, item: u32) {
        queue.push(item);
        self.drains.wake(1);
    }

    fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.more.is_empty()
    }

    fn serve_one(&self, switch: Switch) -> bool {
        let Some(turn) = self.turns.turn() else {
            return false;
        };
        let mut last = self.last.lock().unwrap();
        let Some(item) = turn.take(switch, |item| *item == *last) else {
            return false;
        };
        *last = item;
        self.done.lock().unwrap().push(item);
        drop(last);
        true
    }

    /// Does one item of work, in the same order of preference as `workers.rs`.
    fn step(&self) -> bool {
        if let Some(item) = self.more.pop() {
            self.done.lock().unwrap().push(item);
        } else if self.serve_one(Switch::No) {
        } else if let Some(item) = self.queue.pop() {
            match item {
                10.. => {
                    self.turns.push(item);
                    self.drains.wake(1);
                }
                _ => self.done.lock().unwrap().push(item),
            }
            if item == 1 {
                self.push(&self.more, 3);
            }
        } else {
            return self.serve_one(Switch::Yes);
        }
        true
    }

    fn drain(&self) {
        self.drains.drain(
            || while self.step() {},
            || self.is_empty() && self.turns.is_idle(),
        );
    }
}

/// Two threads push these items; one or two workers do all resulting work.
fn two_who_push(what: &str, items: [u32; 2], all: &'static [u32]) {
    for count in [1, 2] {
        every_order(&format!("{what}, {count} workers"), Some(3), move || {
            let work = Work::new(count, true);
            let threads = items.map(|item| {
                let own = work.clone();
                thread::spawn(move || own.push(&own.queue, item))
            });
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            let mut done = std::mem::take(&mut *work.done.lock().unwrap());
            done.sort_unstable();
            assert_eq!(done, all, "lost or doubled");
            assert_eq!(work.drains.active(), 0);
        });
    }
}

#[test]
fn a_pushed_item_is_done_once_and_the_last_drain_leaves_none() {
    two_who_push("two producers", [1, 2], &[1, 2, 3]);
}

#[test]
fn rows_get_their_substitutes_from_one_worker_at_a_time() {
    two_who_push("two rows for substitutes", [10, 11], &[10, 11]);
}

#[test]
fn the_end_waits_for_the_drains_and_no_item_comes_later() {
    every_order("the end while a drain works", Some(3), || {
        let work = Work::new(1, false);
        let own = work.clone();
        // The I/O thread has pushed and ended; its drain may not have begun.
        work.push(&work.queue, 1);
        assert_eq!(work.drains.active(), 1);
        let worker = thread::spawn(move || own.drain());
        while work.drains.active() > 0 {
            thread::yield_now();
        }
        // Like `ToWorkers::let_go`.
        while work.queue.pop().or_else(|| work.more.pop()).is_some() {}
        let done = work.done.lock().unwrap().len();
        worker.join().unwrap();
        assert!(
            work.is_empty() && work.done.lock().unwrap().len() == done,
            "something came after the end"
        );
        assert_eq!(done, 2);
    });
}
