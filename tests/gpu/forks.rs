//! A process that forks while a loader feeds its GPU, as `subprocess` and `os.fork` of Python do:
//! the child is told so and ends, the parent goes on.

use crate::ours::{device, right, words};
use crate::pull::{BATCH, RECORD, counted};
use crate::section::Ctx;
use crate::sys::{forked_at_work, over};
use feedline::{Batch, Epoch, Error, ErrorKind, Loader};
use rustix::process::{Pid, Signal, kill_process};
use std::time::{Duration, Instant};

/// How long a child may take for a few calls that do nothing.
const LATE: Duration = Duration::from_secs(15);

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let mut times = Vec::new();
    ctx.check(
        "a forked child is told, and its drops touch nothing",
        || {
            for _ in 0..ctx.either(5, 2) {
                times.push(one(ctx)?);
            }
            Ok(format!("{} forks in the middle of an epoch", times.len()))
        },
    );
    ctx.figure(
        "fork",
        &times,
        "ms",
        None,
        "with pinned slots; a kernel that copies pinned memory takes seconds",
    );
    Ok(())
}

/// Milliseconds that the fork took.
fn one(ctx: &Ctx) -> Result<f64, String> {
    let (rows, record) = ctx.either((BATCH, RECORD), (4, 512));
    let loader = counted(rows, record)?
        .device(device()?)
        .build()
        .map_err(words)?;
    // Slots are pinned, and several batches are full.
    loader.ready().map_err(words)?;
    let mut epoch = loader.epochs(0..u64::MAX).map_err(words)?;
    let batch = epoch.next().ok_or("no batch")?.map_err(words)?;
    let mut had = Some((loader, epoch, batch));
    let started = Instant::now();
    let child = forked_at_work(|| {
        let (loader, epoch, batch) = had.take().expect("it is there");
        in_child(loader, epoch, batch)
    });
    let took = started.elapsed().as_secs_f64() * 1e3;
    match ended(child.map_err(|error| error.to_string())?) {
        Some(0) => {}
        status => {
            return Err(format!(
                "the child ended with {status:?} (as by waitpid; none: it hung)"
            ));
        }
    }
    let (loader, mut epoch, batch) = had.expect("the parent has its own");
    right(&batch)?;
    drop(batch);
    for _ in 0..20 {
        right(&epoch.next().ok_or("no batch")?.map_err(words)?)?;
    }
    drop((epoch, loader));
    Ok(took)
}

/// Every call says that this is a forked process, and every drop returns. 0 when that holds.
fn in_child(loader: Loader, mut epoch: Epoch, batch: Batch) -> i32 {
    let told = |error: Option<Error>| error.is_some_and(|error| error.kind() == ErrorKind::Forked);
    let next = told(epoch.next().and_then(Result::err));
    let again = told(loader.epochs(0..1).err());
    drop(batch);
    drop(epoch);
    drop(loader);
    match (next, again) {
        (true, true) => 0,
        (false, _) => 3,
        (true, false) => 4,
    }
}

/// What `waitpid` says of the child; `None` when it did not end, and was killed.
fn ended(child: i32) -> Option<i32> {
    let begun = Instant::now();
    loop {
        match over(child) {
            Ok(Some(status)) => return Some(status),
            Ok(None) if begun.elapsed() < LATE => std::thread::sleep(Duration::from_millis(1)),
            _ => {
                let _ = Pid::from_raw(child).map(|child| kill_process(child, Signal::KILL));
                return None;
            }
        }
    }
}
