//! A life of a loader with direct reads and finished pictures, in which one driver call fails. The
//! result: right batches, then at most one typed error; no hang, no use of memory owned by others,
//! and everything left behind is counted.
//!
//! ```text
//! a life ── N calls ──► for each call (by default each 8th) a code, in turn: the same life, in which that call fails
//! ```

use crate::common::cufile::Route;
use crate::common::doubles::*;
use crate::common::kernels;
use crate::common::sweep;
use crate::common::*;
use crate::cuda_faults::{After, CODES};
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::Finish;
use feedline::device::Gds;
use feedline::storage::Mode;
use feedline::tensor::DType;
use feedline::{Device, Error, ErrorKind, LastBatch, Loader, LoaderBuilder, Order};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

/// Pictures of slightly more than 16 KiB, not whole pages.
const DIMS: [usize; 3] = [77, 73, 3];
const COUNT: usize = 5;
const EPOCHS: u64 = 2;
/// Processes that share the work.
const PARTS: usize = 2;

fn data(path: &Path) -> LoaderBuilder {
    let records = Records::builder(DIMS.iter().product()).field("image", DType::U8, DIMS);
    let records = records
        .classes((0..COUNT as i64).collect())
        .open(path)
        .unwrap();
    let finish = Finish::to(DType::F16).channels_first().flip(0.5);
    let builder = Loader::builder(records)
        .order(Order::shuffled(2))
        .batch_size(2)
        .last_batch(LastBatch::Mask);
    builder
        .finish("image", finish)
        .workers(1)
        .tuning(|t| t.slots(2).device_batches(2).reader(Mode::Pread).depth(1))
}

/// Result of a life.
#[derive(Default)]
struct Outcome {
    errors: Vec<Error>,
    /// Batches of each epoch.
    received: Vec<usize>,
}

/// Builds, and receives two epochs: batches must be right and in order, and an iterator may end
/// with one error.
fn life(machine: &Machine, context: &Arc<CudaContext>, path: &Path, right: &[Vec<Got>]) -> Outcome {
    let mut out = Outcome::default();
    let built = Device::cuda_in(context.clone())
        .and_then(|device| machine.on(device, data(path), Gds::Auto).build());
    let loader = match built {
        Ok(loader) => loader,
        Err(error) => {
            out.errors.push(error);
            return out;
        }
    };
    for epoch in 0..EPOCHS {
        let mut received = 0;
        let mut batches = loader.epoch(epoch).unwrap();
        for right in &right[epoch as usize] {
            match batches
                .next()
                .expect("a short epoch")
                .and_then(|batch| Got::of(&batch))
            {
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

/// The number of the failing call, its code, and whether every later one fails, too.
type Failure = Option<(u64, u32, bool)>;

/// Runs lives, each in its own session; gives the calls of each.
fn lives(failures: impl Iterator<Item = Failure>) -> Vec<u64> {
    let dir = Arc::new(Dir::new());
    let (path, _) = records_file(&dir, COUNT, DIMS.iter().product());
    let host = build(data(&path));
    let right: Arc<Vec<Vec<Got>>> =
        Arc::new((0..EPOCHS).map(|epoch| Got::epoch(&host, epoch)).collect());
    drop(host);
    let double = Arc::new(CuFileMachine::new(Route::P2p));
    let (send, calls) = channel();
    for failure in failures {
        let path = path.clone();
        let right = right.clone();
        let send = send.clone();
        double.reset(Route::P2p);
        lived(format!("{failure:?}"), double.clone(), move |machine| {
            let context = CudaContext::new(0).unwrap();
            let before = (machine.session.live().things(), leaked());
            let first = machine.session.calls();
            if let Some((call, code, sticky)) = failure {
                machine.session.fail_at(first + call, code, sticky);
            }
            let out = life(machine, &context, &path, &right);
            until("the loader's threads have ended", || {
                loader_threads().is_empty()
            });
            send.send(machine.session.calls() - first).unwrap();
            let left = || machine.session.live().things().saturating_sub(before.0);
            // A thread that frees a batch has its name a moment after its start.
            crate::common::wait::soon(|| left() == 0 || leaked() > before.1);
            let left = left();
            judge(&out, failure, left, leaked() - before.1);
            let counts = machine.double.cufile.counts();
            assert!(
                left > 0 || (counts.files, counts.buffers, counts.users) == (0, 0, 0),
                "{counts:?}"
            );
        });
    }
    drop(send);
    calls.iter().collect()
}

/// Judges the result of a life, its live driver objects, and the objects counted as left behind.
fn judge(out: &Outcome, failure: Failure, left: u64, counted: u64) {
    for error in &out.errors {
        let legal = matches!(
            error.kind(),
            ErrorKind::Device | ErrorKind::Budget | ErrorKind::Unsupported
        );
        // The cause of a broken loader is reported once; later calls refer to it.
        let again = error.kind() == ErrorKind::Cancelled
            && error.to_string().contains("the loader failed before");
        assert!(
            (legal || again) && !error.to_string().contains("panicked"),
            "{error}"
        );
    }
    let errors = out.errors.len() as u64;
    assert!(
        errors > 0 || out.received == [3, 3],
        "{:?} batches and no error",
        out.received
    );
    let legal = match failure {
        None => errors == 0 && left == 0 && counted == 0,
        // The context still works: objects of a refused release may be left, or objects with
        // unknown completion, with everything that they keep.
        Some((.., false)) => {
            errors <= EPOCHS
                && (u64::from(left > 1)..=2).contains(&counted)
                && (counted == 0 || left > 0)
        }
        // All objects of a broken context stay with it; the last one being released may be
        // uncounted.
        Some((.., true)) => (counted > 0 || left <= 3) && (counted == 0 || left > 0),
    };
    assert!(legal, "{left} alive, {counted} counted, {:?}", out.errors);
}

/// Makes every failure of this part; gives their number.
fn calls_that_fail(part: usize) -> usize {
    let calls = lives([None].into_iter())[0];
    // A few more, since threads are not always in the same order.
    lives(
        (0..calls + 10)
            .step_by(sweep::size(8, 1, 1))
            .skip(part)
            .step_by(PARTS)
            .map(|call| {
                let (code, after) = CODES[call as usize % CODES.len()];
                Some((call, code, after != After::Works))
            }),
    )
    .len()
}

/// Entry point of the processes that share the work; it does nothing without the variable.
#[test]
#[ignore = "a part of the sweep, which starts it as a process of its own"]
fn part() {
    if let Some(part) = told() {
        println!("{MADE}{}", calls_that_fail(part.parse().unwrap()));
    }
}

#[test]
fn any_failing_call_under_direct_reads_is_a_typed_error() {
    if kernels::library().is_none() {
        return;
    }
    let started = std::time::Instant::now();
    let count = in_parts(&beside!("part"), PARTS, |part| part.to_string());
    assert!(count > sweep::size(25, 200, 200), "a sweep of {count}");
    println!(
        "{count} failures in {:.1} s",
        started.elapsed().as_secs_f64()
    );
}
