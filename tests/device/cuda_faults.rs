//! A driver that fails at any call, with any code. The result: right batches, in order, then at
//! most one typed error. Never a hang, a panic, wrong bytes, memory freed under a copy, or a call
//! into a context that is already broken.
//!
//! ```text
//! life of a loader ── N calls ──► for each call (and each operation) × each code: the same life, that one fails
//!                                    └─► what was received · what is alive in the driver · what was counted · the trace
//! ```
//!
//! By default every 8th call fails, with one code in turn; `FEEDLINE_SWEEP=ci` fails every call,
//! `full` with every code (some minutes). Several processes share a sweep, since most of its time
//! is waiting; each test prints its number of failures.
#![allow(unsafe_code)]

use crate::common::cuda::*;
use crate::common::standin;
use crate::common::standin::{Live, Session};
use crate::common::sweep;
use crate::common::*;
use cudarc::driver::{CudaContext, CudaStream};
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::order::Draws;
use feedline::{Batch, Device, Error, ErrorKind, Loader, LoaderBuilder, Order};
use std::collections::BTreeMap;
use std::sync::Arc;

const RECORD: usize = 900;
/// Processes that share a sweep.
const PARTS: usize = 6;

/// Effect of a failure on the context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum After {
    /// It works as before.
    Works,
    /// The code shows that it is broken.
    Broken,
    /// It is broken in effect: every call fails from now on, with a code that does not show it.
    Dead,
}
use After::*;

/// Code and its effect. 12345 is a code that no driver knows yet.
pub const CODES: [(u32, After); 26] = [
    (2, Works),
    (700, Broken),
    (1, Works),
    (100, Works),
    (719, Broken),
    (201, Works),
    (304, Works),
    (999, Broken),
    (400, Works),
    (600, Works),
    (214, Broken),
    (701, Works),
    (712, Works),
    (702, Broken),
    (713, Works),
    (800, Works),
    (709, Broken),
    (801, Works),
    (12345, Works),
    (716, Broken),
    (12345, Dead),
    (201, Dead),
    (900, Works),
    (226, Broken),
    (901, Works),
    (810, Broken),
];

/// One failure: of a call, or of an operation on its stream.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Call(u64, u32, After),
    Operation(u64, u32, After),
}
use Failure::*;

impl Failure {
    fn after(self) -> After {
        let (Call(_, _, after) | Operation(_, _, after)) = self;
        after
    }

    fn code(self) -> u32 {
        let (Call(_, code, _) | Operation(_, code, _)) = self;
        code
    }

    fn arm(self, session: &Session) {
        match self {
            Call(index, code, after) => {
                session.fail_at(session.calls() + index, code, after != Works)
            }
            Operation(nth, code, _) => session.fail_async(session.executed() + nth, code),
        }
    }
}

/// Number of batches in an epoch; the last one is smaller.
fn data(batches: usize) -> LoaderBuilder {
    let count = batches * 4 - 1;
    let records = Records::builder(RECORD)
        .classes((0..count as i64).collect())
        .open_bytes(noise(count * RECORD, 3))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(2))
        .batch_size(4)
        .tuning(|t| t.slots(3).device_batches(2))
        .workers(1)
}

/// The host's batches in the same life.
struct Right {
    batches: usize,
    epochs: [Vec<Got>; 2],
}

impl Right {
    /// Epochs of this many batches; `second` batches of the second one are received.
    fn new(batches: usize, second: usize) -> Self {
        let host = data(batches).build().unwrap();
        let mut epochs = [Got::epoch(&host, 0), Got::epoch(&host, 1)];
        epochs[1].truncate(second);
        Self { batches, epochs }
    }

    fn data(&self) -> LoaderBuilder {
        data(self.batches)
    }

    fn all(&self) -> usize {
        self.epochs[0].len() + self.epochs[1].len()
    }

    /// Batches of the shorter epoch.
    fn least(&self) -> usize {
        self.epochs[0].len().min(self.epochs[1].len())
    }
}

/// Result of a life.
#[derive(Default)]
struct Outcome {
    /// Typed errors, of the library's calls.
    errors: Vec<Error>,
    /// The consumer's own calls failed.
    own: bool,
    received: usize,
}

/// Receives an epoch: the batches must be right and in order, and the iterator may end early with
/// one typed error.
fn receive(
    loader: &Loader,
    epoch: u64,
    right: &[Got],
    out: &mut Outcome,
    mut read: impl FnMut(&Batch, &Got, &mut Outcome),
) {
    let mut batches = match loader.epoch(epoch) {
        Ok(batches) => batches,
        Err(error) => panic!("no iterator: {error}"),
    };
    for right in right {
        match batches.next() {
            Some(Ok(batch)) => {
                assert_eq!(
                    (batch.index(), batch.ids(), batch.status()),
                    (right.index, &*right.ids, &*right.status)
                );
                assert!(
                    batch.fields().all(|field| field.as_bytes().is_err()),
                    "a batch that is not on the device"
                );
                out.received += 1;
                read(&batch, right, out);
            }
            Some(Err(error)) => {
                out.errors.push(error);
                assert!(batches.next().is_none(), "an iterator that failed ends");
                return;
            }
            None => panic!("a short epoch"),
        }
    }
    assert!(batches.len() > 0 || batches.next().is_none());
}

/// Only the library's own calls: build, an epoch with most batches read back, and the beginning of
/// another.
fn alone(right: &Right) -> Outcome {
    let mut out = Outcome::default();
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => return with(out, error),
    };
    let loader = match right.data().device(device).build() {
        Ok(loader) => loader,
        Err(error) => return with(out, error),
    };
    for (epoch, right) in right.epochs.iter().enumerate() {
        receive(
            &loader,
            epoch as u64,
            right,
            &mut out,
            |batch, right, out| {
                if right.index % 3 < 2 {
                    match Got::of(batch) {
                        Ok(found) => assert_eq!(found, *right),
                        Err(error) => out.errors.push(error),
                    }
                }
            },
        );
    }
    out
}

fn with(mut out: Outcome, error: Error) -> Outcome {
    out.errors.push(error);
    out
}

/// A consumer with streams of its own, which exist before and after the loader.
struct Consumer {
    context: Arc<CudaContext>,
    streams: [Arc<CudaStream>; 2],
}

impl Consumer {
    fn new() -> Self {
        let context = CudaContext::new(0).unwrap();
        // SAFETY: nothing was made in this context yet, and batches are ordered by their streams.
        // So all events are the library's.
        unsafe { context.disable_event_tracking() };
        let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
        Self { context, streams }
    }

    /// One stream is the builder's, the other is bound to every other batch; each reads by cudarc.
    fn life(&self, right: &Right, own_context: bool) -> Outcome {
        let mut out = Outcome::default();
        let device = if own_context {
            Device::cuda_in(self.context.clone())
        } else {
            Device::cuda(0)
        };
        let builder = match device {
            Ok(device) => right.data().device(device).stream(&self.streams[0]),
            Err(error) => return with(out, error),
        };
        let loader = match builder.build() {
            Ok(loader) => loader,
            Err(error) => return with(out, error),
        };
        let mut kept = Vec::new();
        for (epoch, right) in right.epochs.iter().enumerate() {
            receive(
                &loader,
                epoch as u64,
                right,
                &mut out,
                |batch, right, out| {
                    let stream = &self.streams[right.index as usize % 2];
                    if right.index % 3 == 1
                        && let Err(error) = batch.bind(Stream::from(&self.streams[1]))
                    {
                        out.errors.push(error);
                    }
                    match batch.field("record").unwrap().cuda_slice::<u8>(stream) {
                        Ok(slice) => {
                            match stream
                                .clone_dtoh(&*slice)
                                .and_then(|bytes| stream.synchronize().map(|()| bytes))
                            {
                                Ok(bytes) => assert!(bytes == right.bytes("record"), "wrong bytes"),
                                Err(_) => out.own = true,
                            }
                        }
                        Err(error) => out.errors.push(error),
                    }
                    // cudarc keeps the failure of a drop for the next call.
                    out.own |= self.context.check_err().is_err();
                },
            );
            kept.extend(loader.epoch(7).unwrap().next());
        }
        drop(loader);
        out
    }
}

/// Invariants of every life with a failure, for any result.
struct Rules<'a> {
    session: &'a Session,
    failure: Failure,
    /// Live objects before the life, and things left behind in this process.
    before: (Live, u64),
    /// The number of the first call.
    first: u64,
    right: &'a Right,
}

impl Rules<'_> {
    fn check(&self, out: &Outcome, only_ours: bool) {
        for error in &out.errors {
            let legal = matches!(error.kind(), ErrorKind::Device | ErrorKind::Budget);
            let said = words(error);
            // The cause of a broken loader is reported once; later calls refer to it.
            let again =
                error.kind() == ErrorKind::Cancelled && said.contains("the loader failed before");
            assert!(legal || again, "{said}");
            assert!(!said.contains("panicked"), "{said}");
        }
        until("the loader's threads have ended", || {
            loader_threads().is_empty()
        });
        // Batches that outlive their loader are freed by threads.
        soon(|| self.is_accounted_for().0);
        self.check_what_is_left(out);
        if self.failure.after() == Broken && only_ours {
            self.check_trace();
        }
    }

    /// Whether exactly the things counted as left behind are alive; with both lists.
    fn is_accounted_for(&self) -> (bool, String) {
        let live = self.session.live();
        let alive = live.things().saturating_sub(self.before.0.things());
        let counted = leaked() - self.before.1;
        let accounted = match self.failure.after() {
            // Objects that a refused release did not take back.
            Works => alive == counted && counted <= 1,
            // A slot left to the device also keeps its context.
            _ => alive <= counted + 1 && (alive == 0 || counted > 0),
        };
        (
            accounted,
            format!("{alive} alive, {counted} counted: {live:?}"),
        )
    }

    fn check_what_is_left(&self, out: &Outcome) {
        let (accounted, words) = self.is_accounted_for();
        assert!(accounted, "{words}");
        let told = out.errors.len() + usize::from(out.own);
        let whole = out.received == self.right.all();
        assert!(told > 0 || whole, "{} batches, and no error", out.received);
        if self.failure.after() == Works {
            assert!(told <= 1, "one failure, and {:#?}", out.errors);
            assert!(
                out.received == 0 || out.received >= self.right.least(),
                "an epoch after one that failed is whole"
            );
        }
    }

    /// After the first call that reports the broken context, its thread makes no other call, and
    /// every other thread at most the one it was about to make.
    fn check_trace(&self) {
        let code = format!("{}", self.failure.code());
        // Waiting calls are in the trace at their start.
        let told = |index: u64, symbol: &str, result: &str| match self.failure {
            Call(call, ..) => index == self.first + call,
            Operation(..) => {
                result == code && !symbol.ends_with("Synchronize") && !symbol.contains("DtoH")
            }
        };
        let mut culprit = None;
        let mut others = BTreeMap::<String, u64>::new();
        for line in self.session.trace().lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let index = words[0].parse::<u64>().unwrap();
            let thread = words[1];
            let symbol = words[2];
            let result = words[words.len() - 1];
            // Queries of devices need no context, and guards restore the current context.
            if index < self.first
                || symbol.starts_with("cuDevice")
                    && !symbol.starts_with("cuDevicePrimaryCtxRelease")
            {
                continue;
            }
            match &culprit {
                None if told(index, symbol, result) => culprit = Some(thread.to_string()),
                None => {}
                Some(_)
                    if ["cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"]
                        .contains(&symbol) => {}
                Some(culprit) if culprit == thread => {
                    panic!("called after the context broke: {line}")
                }
                Some(_) => {
                    let calls = others.entry(thread.into()).or_default();
                    *calls += 1;
                    // The call that makes the context current, and the call itself.
                    assert!(*calls <= 2, "called after the context broke: {line}");
                }
            }
        }
    }
}

/// As [`case`], but the rules judge the objects alive at the end.
fn lived(name: String, life: impl FnOnce(&mut Session) + Send + 'static) {
    standin::in_session(config(), name, |mut session| {
        life(&mut session);
        let violations = session.end();
        assert!(violations.is_empty(), "violations: {violations:#?}");
    });
}

fn life_alone(session: &mut Session, failure: Failure, right: &Right) {
    let before = (session.live(), leaked());
    let rules = Rules {
        session,
        failure,
        before,
        first: session.calls(),
        right,
    };
    failure.arm(session);
    let out = alone(right);
    rules.check(&out, true);
}

/// A consumer's life, in its own context object or in the library's.
fn life_of_consumer(session: &mut Session, failure: Failure, right: &Right, own: bool) {
    let consumer = Consumer::new();
    let before = (session.live(), leaked());
    let rules = Rules {
        session,
        failure,
        before,
        first: session.calls(),
        right,
    };
    failure.arm(session);
    let out = consumer.life(right, own);
    rules.check(&out, false);
}

/// Part of the sweep for one process.
struct Sweep {
    name: &'static str,
    /// Batches of an epoch, and received batches of the second one.
    batches: (usize, usize),
    life: fn(&mut Session, Failure, &Right),
}

const SWEEPS: [Sweep; 3] = [
    Sweep {
        name: "a loader",
        batches: (20, 4),
        life: life_alone,
    },
    Sweep {
        name: "a loader and its consumer",
        batches: (8, 8),
        life: |session, failure, right| life_of_consumer(session, failure, right, false),
    },
    Sweep {
        name: "a loader in its consumer's context",
        batches: (8, 8),
        life: |session, failure, right| life_of_consumer(session, failure, right, true),
    },
];

impl Sweep {
    /// Makes every failure of this part; gives their number.
    fn part(&self, part: usize) -> usize {
        let right = Arc::new(Right::new(self.batches.0, self.batches.1));
        let failures = self.failures(&right);
        let own: Vec<_> = failures.into_iter().skip(part).step_by(PARTS).collect();
        for failure in &own {
            let failure = *failure;
            let life = self.life;
            let right = right.clone();
            lived(format!("{failure:?}"), move |session| {
                life(session, failure, &right)
            });
        }
        own.len()
    }

    fn failures(&self, right: &Arc<Right>) -> Vec<Failure> {
        let (calls, executed) = self.measure(right);
        let codes = |place: u64| {
            let codes = CODES.iter().cycle().skip(place as usize % CODES.len());
            codes.take(sweep::size(1, 1, CODES.len())).copied()
        };
        // cudarc cannot handle codes that it does not know.
        let legal = |code: u32| ![226, 12345].contains(&code) || self.name == SWEEPS[0].name;
        let of_calls = (0..calls)
            .flat_map(|call| codes(call).map(move |(code, after)| Call(call, code, after)));
        // A failed operation breaks its context.
        let breaking = [
            (700, Broken),
            (719, Broken),
            (2, Dead),
            (999, Broken),
            (801, Dead),
        ];
        let of_operations = (0..executed).flat_map(|nth| {
            let codes = breaking.iter().cycle().skip(nth as usize % breaking.len());
            codes
                .take(sweep::size(1, 1, breaking.len()))
                .map(move |(code, after)| Operation(nth, *code, *after))
        });
        let all = of_calls
            .filter(|failure| legal(failure.code()))
            .chain(of_operations);
        all.step_by(sweep::size(8, 1, 1)).collect()
    }

    /// Calls and operations of a life without failures.
    fn measure(&self, right: &Arc<Right>) -> (u64, u64) {
        let (send, measured) = std::sync::mpsc::channel();
        // Including the calls of the driver's first opening.
        for _ in 0..2 {
            let send = send.clone();
            let right = right.clone();
            let life = self.life;
            lived("no failure".into(), move |session| {
                life(session, Call(u64::MAX / 2, 1, Works), &right);
                send.send((session.calls(), session.executed())).unwrap();
            });
        }
        measured.iter().take(2).last().unwrap()
    }

    /// Runs all parts in separate processes.
    #[track_caller]
    fn run(&self, number: usize) {
        let started = std::time::Instant::now();
        let count = in_parts(&beside!("part"), PARTS, |part| format!("{number} {part}"));
        assert!(count > sweep::size(50, 500, 500), "a sweep of {count}");
        println!(
            "{}: {count} failures in {:.1} s",
            self.name,
            started.elapsed().as_secs_f64()
        );
    }
}

/// Entry point of those processes; it does nothing without the variable.
#[test]
#[ignore = "a part of the sweeps, which start it as a process of its own"]
fn part() {
    if let Some(part) = told() {
        let (sweep, part) = part.split_once(' ').unwrap();
        let made = SWEEPS[sweep.parse::<usize>().unwrap()].part(part.parse().unwrap());
        println!("\n{MADE}{made}");
    }
}

#[test]
fn any_failing_call_of_a_loader_is_one_typed_error() {
    SWEEPS[0].run(0);
}

#[test]
fn any_failing_call_beside_consumer_streams_is_one_error() {
    SWEEPS[1].run(1);
}

#[test]
fn any_failing_call_in_the_consumers_context_is_one_error() {
    SWEEPS[2].run(2);
}

#[test]
fn a_broken_device_hands_out_no_unfinished_batch() {
    lived("broken while batches are ready".into(), |session| {
        let loader = data(20)
            .device(Device::cuda(0).unwrap())
            .tuning(|t| t.device_batches(5))
            .build()
            .unwrap();
        let mut epoch = loader.epoch(0).unwrap();
        let batch = epoch.next().unwrap().unwrap();
        until("all buffers are on their way", || {
            loader.report().total.copy.unwrap().batches == 5
        });
        session.hold(true);
        session.fail_named(
            "cuStreamWaitEvent",
            session.count("cuStreamWaitEvent"),
            700,
            true,
        );
        let error = batch.bind(Stream::legacy()).unwrap_err();
        assert!(
            words(&error).contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
            "{error}"
        );
        let error = epoch.next().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        assert!(
            words(&error).contains("cuda:0 broke earlier: CUDA_ERROR_ILLEGAL_ADDRESS"),
            "{error}"
        );
        assert!(epoch.next().is_none());
        drop(epoch);
        // It does not recover for this loader, nor for a new one.
        assert_eq!(
            loader.epoch(0).unwrap().next().unwrap().unwrap_err().kind(),
            ErrorKind::Device
        );
        assert_eq!(Device::cuda(0).unwrap_err().kind(), ErrorKind::Device);
        drop((batch, loader));
    });
}

#[test]
fn two_calls_that_fail_are_no_worse_than_one() {
    let started = std::time::Instant::now();
    let right = Arc::new(Right::new(20, 4));
    let count = sweep::size(40, 300, 300);
    let (calls, _) = SWEEPS[0].measure(&right);
    let mut draws = Draws::new(5, 0, 0, "pairs");
    let codes: Vec<u32> = CODES
        .iter()
        .filter(|(_, after)| *after == Works)
        .map(|(code, _)| *code)
        .collect();
    for _ in 0..count {
        let first = draws.below(calls);
        // Mostly right after it, in the handling of the first failure.
        let second = if draws.below(3) == 0 {
            draws.below(calls)
        } else {
            first + 1 + draws.below(8)
        };
        let mut code = || codes[draws.below(codes.len() as u64) as usize];
        let pair = [(first, code()), (second, code())];
        let right = right.clone();
        lived(format!("{pair:?}"), move |session| {
            pair.iter()
                .for_each(|(index, code)| session.fail_at(session.calls() + index, *code, false));
            let before = (session.live(), leaked());
            let rules = Rules {
                session,
                failure: Call(first, pair[0].1, Dead),
                before,
                first: 0,
                right: &right,
            };
            rules.check(&alone(&right), true);
        });
    }
    println!(
        "pairs of calls: {count} in {:.1} s",
        started.elapsed().as_secs_f64()
    );
}
