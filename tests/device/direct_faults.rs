//! A life of a loader with direct reads and finished pictures, in which one driver call or one cuFile read fails. The
//! result: right batches, then at most one typed error; no hang, no use of memory owned by others, and everything left
//! behind is counted.
//!
//! ```text
//! a life ── N calls ──► for each call (by default each 8th) a code, in turn: the same life, in which that call fails
//! ```

use crate::common::cufile::{Route, StandIn};
use crate::common::doubles::*;
use crate::common::kernels;
use crate::common::standin;
use crate::common::standin::Live;
use crate::common::sweep;
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::Finish;
use feedline::storage::Mode;
use feedline::tensor::DType;
use feedline::{Device, Error, ErrorKind, Gds, LastBatch, Loader, LoaderBuilder, Order};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::mpsc::channel;

/// Pictures of slightly more than 16 KiB, not whole pages.
const DIMS: [usize; 3] = [77, 73, 3];
const COUNT: usize = 5;
const EPOCHS: u64 = 2;
/// Processes that share the work.
const PARTS: usize = 2;

/// Codes of calls; with `true` every call fails from then on.
const CODES: [(u32, bool); 15] = [
    (2, false),
    (700, true),
    (1, false),
    (201, false),
    (719, true),
    (304, false),
    (400, false),
    (999, true),
    (600, false),
    (701, false),
    (12_345, false),
    (12_345, true),
    (713, false),
    (201, true),
    (900, false),
];

fn data(path: &Path) -> LoaderBuilder {
    let records = Records::builder(DIMS.iter().product()).field("image", DType::U8, DIMS);
    let records = records.classes((0..COUNT as i64).collect()).open(path).unwrap();
    let finish = Finish::to(DType::F16).channels_first().flip(0.5);
    let builder = Loader::builder(records).order(Order::shuffled(2)).batch_size(2).last_batch(LastBatch::Mask);
    builder.finish("image", finish).workers(1).tuning(|t| t.slots(2).device_batches(2).reader(Mode::Pread).depth(1))
}

/// Result of a life.
#[derive(Default)]
struct Outcome {
    errors: Vec<Error>,
    /// Batches of each epoch.
    received: Vec<usize>,
}

/// Builds, and receives two epochs: batches must be right and in order, and an iterator may end with one error.
fn life(machine: &Machine, context: &Arc<CudaContext>, path: &Path, gds: Gds, right: &[Vec<Got>]) -> Outcome {
    let mut out = Outcome::default();
    let built = Device::cuda_in(context.clone()).and_then(|device| machine.on(device, data(path), gds).build());
    let loader = match built {
        Ok(loader) => loader,
        Err(error) => {
            out.errors.push(error);
            return out;
        }
    };
    for epoch in 0..EPOCHS {
        let (mut received, mut batches) = (0, loader.epoch(epoch).unwrap());
        for right in &right[epoch as usize] {
            match batches.next().expect("a short epoch").and_then(|batch| Got::of(&batch)) {
                Ok(found) => same(&[found], std::slice::from_ref(right), "received"),
                Err(error) => {
                    out.errors.push(error);
                    break;
                }
            }
            received += 1;
        }
        out.received.push(received);
    }
    out
}

fn things(live: &Live) -> u64 {
    live.retains + live.streams + live.events + live.allocations + live.registrations + live.modules + live.leaked
}

/// Its name, the route of reads, the failing call, and the required result.
type Case = (String, Gds, Box<dyn FnOnce(&Machine) + Send>, Judge);

/// Runs lives, each in its own session; gives their number.
fn lives(cases: impl Iterator<Item = Case>) -> usize {
    let dir = Arc::new(Dir::new());
    let (path, _) = records_file(&dir, COUNT, DIMS.iter().product());
    let host = build(data(&path));
    let right: Arc<Vec<Vec<Got>>> = Arc::new((0..EPOCHS).map(|epoch| Got::try_epoch(&host, epoch).unwrap()).collect());
    drop(host);
    let double = Arc::new(CuFileMachine::new(Route::P2p));
    let mut count = 0;
    for (name, gds, arm, judge) in cases {
        let (path, right): (PathBuf, _) = (path.clone(), right.clone());
        double.reset(Route::P2p);
        lived(name, double.clone(), move |machine| {
            let context = CudaContext::new(0).unwrap();
            let before = (things(&machine.session.live()), leaked());
            arm(machine);
            let out = life(machine, &context, &path, gds, &right);
            until("the loader's threads have ended", || loader_threads().is_empty());
            let left = || things(&machine.session.live()).saturating_sub(before.0);
            // A thread that frees a batch has its name a moment after its start.
            crate::common::wait::soon(|| left() == 0 || leaked() > before.1);
            let left = left();
            judge(&out, left, leaked() - before.1);
            let counts = machine.double.cufile.counts();
            assert!(left > 0 || (counts.files, counts.buffers, counts.users) == (0, 0, 0), "{counts:?}");
        });
        count += 1;
    }
    count
}

/// Result of a life, live driver objects, and objects counted as left behind.
type Judge = fn(&Outcome, u64, u64);

fn typed(out: &Outcome) {
    for error in &out.errors {
        let legal = matches!(error.kind(), ErrorKind::Device | ErrorKind::Budget | ErrorKind::Unsupported);
        // The cause of a broken loader is reported once; later calls refer to it.
        let again = error.kind() == ErrorKind::Cancelled && error.to_string().contains("the loader failed before");
        assert!((legal || again) && !error.to_string().contains("panicked"), "{error}");
    }
    let whole = out.received.len() as u64 == EPOCHS && out.received.iter().all(|count| *count == 3);
    assert!(whole || !out.errors.is_empty(), "{:?} batches and no error", out.received);
}

/// The context still works: objects of a refused release may be left, or objects with unknown completion, with
/// everything that they keep.
fn after_one_call(out: &Outcome, left: u64, counted: u64) {
    typed(out);
    assert!(out.errors.len() <= EPOCHS as usize, "{:?}", out.errors);
    let least = u64::from(left > 1);
    assert!((least..=2).contains(&counted) && (counted == 0 || left > 0), "{left} alive, {counted} counted");
}

/// All objects of a broken context stay with it; the last one being released may be uncounted.
fn after_the_last_call(out: &Outcome, left: u64, counted: u64) {
    typed(out);
    assert!((counted > 0 || left <= 3) && (counted == 0 || left > 0), "{left} alive, {counted} counted");
}

/// Calls of a life without failures.
fn measure() -> u64 {
    let (send, measured) = channel();
    let arm = move |machine: &Machine| send.send(machine.session.calls()).unwrap();
    let count = lives([("no failure".into(), Gds::Auto, Box::new(arm) as Box<_>, nothing as Judge)].into_iter());
    let first = measured.recv().unwrap();
    assert_eq!(count, 1);
    standin::cuda().calls() - first
}

fn nothing(out: &Outcome, left: u64, counted: u64) {
    assert!(out.errors.is_empty() && out.received == [3, 3] && left == 0 && counted == 0, "{:?}", out.errors);
}

fn calls_that_fail(part: usize) -> usize {
    let calls = measure();
    let case = |call: u64| {
        let (code, sticky) = CODES[call as usize % CODES.len()];
        let arm = move |machine: &Machine| machine.session.fail_at(machine.session.calls() + call, code, sticky);
        let judge: Judge = if sticky { after_the_last_call } else { after_one_call };
        (
            format!("call {call} of {calls} fails with {code}, for ever: {sticky}"),
            Gds::Auto,
            Box::new(arm) as Box<_>,
            judge,
        )
    };
    // A few more, since threads are not always in the same order.
    lives((0..calls + 10).step_by(sweep::size(8, 1, 1)).skip(part).step_by(PARTS).map(case))
}

/// Entry point of the processes that share the work; it does nothing without the variable.
#[test]
#[ignore = "a part of the sweep, which starts it as a process of its own"]
fn part() {
    if let Some(part) = told() {
        println!("failures made: {}", calls_that_fail(part.parse().unwrap()));
    }
}

#[test]
fn any_failing_call_under_direct_reads_is_a_typed_error() {
    if kernels::library().is_none() {
        return;
    }
    let started = std::time::Instant::now();
    let run = |part: usize| {
        let mut command = process(&beside!("part"), part.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        std::thread::spawn(move || command.output().unwrap())
    };
    let parts: Vec<_> = (0..PARTS).map(run).collect();
    let mut count = 0;
    for (part, child) in parts.into_iter().enumerate() {
        let output = child.join().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let made =
            said(&output.stdout).lines().find_map(|line| line.split_once("failures made: ")?.1.parse::<usize>().ok());
        match made.filter(|_| output.status.success()) {
            Some(made) => count += made,
            None => panic!("part {part}: {}\n{}\n{}", output.status, said(&output.stdout), said(&output.stderr)),
        }
    }
    assert!(count > sweep::size(25, 200, 200), "a sweep of {count}");
    println!("{count} failures in {:.1} s", started.elapsed().as_secs_f64());
}

type Fault = fn(&StandIn, u64);

const FAULTS: [Fault; 5] = [
    |cufile, read| cufile.fail_read_os(read, 5),
    |cufile, read| cufile.fail_read(read, 5044),
    |cufile, read| cufile.fail_read(read, 5),
    |cufile, read| cufile.short_read(read, 0),
    |cufile, read| cufile.short_read(read, 1),
];

#[test]
fn any_failing_cufile_read_comes_by_the_host_or_is_an_error() {
    if kernels::library().is_none() {
        return;
    }
    // The trial, and the rows of two epochs: a read each, or two that follow each other.
    let reads = 1 + 2 * COUNT as u64;
    let cases = (0..reads).flat_map(|read| FAULTS.iter().map(move |fault| (read, *fault))).flat_map(|(read, fault)| {
        let arm = move |machine: &Machine| fault(&machine.double.cufile, read);
        let required: Judge = |out, left, counted| {
            typed(out);
            assert!(out.errors.len() <= 1 && left == 0 && counted == 0, "{:?}", out.errors);
            let site = out.errors.first().map(Error::site);
            assert!(site.is_none_or(|site| out.received.is_empty() || (site.sample.is_some() && site.path.is_some())));
        };
        [
            (format!("read {read} fails"), Gds::Auto, Box::new(arm) as Box<_>, nothing as Judge),
            (format!("read {read} fails, required"), Gds::Require, Box::new(arm) as Box<_>, required),
        ]
    });
    assert_eq!(lives(cases), 2 * 5 * reads as usize);
}
