//! Every operation of the readers fails, in every way. The result: right batches, in order, then at
//! most one typed error with path, place, sample and code. Never a hang, a panic, a lost or doubled
//! sample, a leaked thread or descriptor.
//!
//! ```text
//! setting (format × reader × device) ── a life without faults: N operations
//!      └─ for operation 0, 1, 2 … until a life is clean, for each fault, once and for ever: a life
//!                └─► batches against the right ones · the error · a second epoch without faults · the process as before
//! ```
//!
//! By default each operation gets one fault, in turn; `FEEDLINE_SWEEP=ci` gives each fault and some
//! codes in turn; `full` gives all of them, by every reader and on every device (hours of one
//! core). Several processes share a sweep, since much of its time is waiting. Each sweep prints its
//! numbers of lives and faults.

mod house;
mod life;

use crate::common::standin;
use crate::common::sweep;
use crate::common::workloads::WORKLOADS;
use crate::common::{Dir, READERS, beside, tell, told};
use feedline::Device;
use feedline::unstable::{Fault, Faulty};
use house::{House, watch, watched};
use life::Setting;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Processes that share a sweep.
const PARTS: usize = 2;
/// Maximum operations of a life: more mean that it does not end.
const OPERATIONS_MAX: u64 = 100_000;

/// EIO, EINTR, EAGAIN, EINVAL, ENOENT, EACCES, EPERM, EMFILE, ENOMEM, ESTALE, ENOSYS, EOPNOTSUPP,
/// EFAULT, ETIMEDOUT, ENXIO, ECANCELED, and an errno unknown to every kernel.
const CODES: [i32; 17] = [
    5, 4, 11, 22, 2, 13, 1, 24, 12, 116, 38, 95, 14, 110, 6, 125, 4000,
];
/// All other faults.
const KINDS: [Fault; 6] = [
    Fault::Short(1),
    Fault::Flipped,
    Fault::Zero,
    Fault::Elsewhere,
    Fault::Short(130),
    Fault::Late(Duration::from_micros(200)),
];

/// A fault, and its number of repetitions from its operation on.
type Planned = (Fault, u64);
const EVER: u64 = u64::MAX;

/// Faults for operation `at`, one life each: every fault once, and some of them endless, in turn. A
/// short sweep takes one of these, in turn.
fn faults(at: u64) -> Vec<Planned> {
    let at = at as usize;
    let (codes, kinds) = if sweep::is_full() {
        (CODES.len(), KINDS.len())
    } else {
        (2, 2)
    };
    let in_turn = |codes: usize| {
        CODES
            .iter()
            .cycle()
            .skip(at * 2)
            .take(codes)
            .map(|code| Fault::Error(*code))
    };
    let once = in_turn(codes).chain(KINDS).map(|fault| (fault, 1));
    let ever = in_turn(codes.div_ceil(2)).chain(KINDS.into_iter().cycle().skip(at * 2).take(kinds));
    let all: Vec<_> = once.chain(ever.map(|fault| (fault, EVER))).collect();
    if sweep::is_short() {
        vec![all[at % all.len()]]
    } else {
        all
    }
}

/// Result of a part.
#[derive(Default)]
struct Done {
    lives: u64,
    faults: u64,
    /// Complaints without their numbers: their count, and the first.
    complaints: BTreeMap<String, (u64, String)>,
}

impl Done {
    fn complain(&mut self, what: &str, about: &str) {
        let kind: String = about
            .chars()
            .filter(|c| !c.is_ascii_digit())
            .take(80)
            .collect();
        let known = self
            .complaints
            .entry(kind)
            .or_insert_with(|| (0, format!("{what}: {about}")));
        known.0 += 1;
    }

    /// Sweeps a setting.
    fn sweep(&mut self, setting: &Setting, driver: &Driver) {
        let now = || House::now(driver.alive());
        let mut house = now();
        for _ in 0..5 {
            self.live(setting, &Faulty::new().into(), "no fault");
            house = house.settled(now());
        }
        let operations = Arc::new(Faulty::new());
        self.live(setting, &operations, "no fault");
        for at in 0..OPERATIONS_MAX {
            let mut most = 0;
            for (fault, count) in faults(at) {
                let faulty = Arc::new(Faulty::new().times(at, count, fault));
                let what = format!(
                    "{} at {at}{}",
                    name(fault),
                    if count == EVER { " for ever" } else { "" }
                );
                most = most.max(self.live(setting, &faulty, &what));
                if let Some(differs) = house.differs(&now()) {
                    self.complain(&format!("{}, {what}", setting.name()), &differs);
                    house = now();
                }
            }
            if most <= at {
                return;
            }
        }
        panic!("{}: no end", setting.name());
    }

    /// Runs one life; gives its operations up to the end of the faults.
    fn live(&mut self, setting: &Setting, faulty: &Arc<Faulty>, what: &str) -> u64 {
        let title = format!("{}, {what}", setting.name());
        let (complaints, panicked) = watched(|| title.clone(), || setting.live(faulty));
        self.lives += 1;
        self.faults += faulty.injected();
        complaints
            .iter()
            .for_each(|about| self.complain(&title, about));
        if panicked {
            self.complain(&title, "a panic");
        }
        faulty.seen()
    }
}

fn name(fault: Fault) -> String {
    match fault {
        Fault::Error(code) => std::io::Error::from_raw_os_error(code).to_string(),
        fault => format!("{fault:?}"),
    }
}

/// A sweep: its device, and its substitution policy.
#[derive(Clone, Copy)]
struct Sweep {
    gpu: bool,
    substitutes: bool,
    /// Each workload gets one of this many readers in turn: in a short sweep, and in others except
    /// `full`.
    one_in: [usize; 2],
}

const SWEEPS: [Sweep; 4] = [
    Sweep {
        gpu: false,
        substitutes: false,
        one_in: [6, 4],
    },
    Sweep {
        gpu: false,
        substitutes: true,
        one_in: [7, 4],
    },
    Sweep {
        gpu: true,
        substitutes: false,
        one_in: [17, 6],
    },
    Sweep {
        gpu: true,
        substitutes: true,
        one_in: [19, 12],
    },
];

/// Settings of a sweep: numbers of workload and reader.
fn settings(sweep: Sweep) -> Vec<(usize, usize)> {
    let all = (0..WORKLOADS.len())
        .flat_map(|workload| (0..READERS.len()).map(move |reader| (workload, reader)));
    let one_in = sweep::size(sweep.one_in[0], sweep.one_in[1], 1);
    all.filter(|(workload, reader)| (workload + reader) % one_in == 0)
        .collect()
}

/// The stand-in GPU driver, if the sweep needs it.
struct Driver {
    session: Option<standin::Session>,
}

impl Driver {
    fn new(gpu: bool) -> Self {
        Self {
            session: gpu.then(|| standin::cuda().session(standin::Config::default())),
        }
    }

    fn device(&self) -> Option<Device> {
        self.session.as_ref().map(|_| Device::cuda(0).unwrap())
    }

    /// Description of its live objects.
    fn alive(&self) -> Option<String> {
        self.session
            .as_ref()
            .map(|session| format!("{:?}", session.live()))
    }
}

fn sweep_part(sweep: Sweep, part: usize, parts: usize) -> Done {
    watch();
    let mut done = Done::default();
    for (workload, reader) in settings(sweep).into_iter().skip(part).step_by(parts) {
        let dir = Dir::new();
        let workload = &WORKLOADS[workload];
        let driver = Driver::new(sweep.gpu);
        let to = (driver.device(), sweep.substitutes);
        let setting = Setting::new(
            workload,
            (workload.open)(&dir),
            crate::common::reader(reader),
            to,
        );
        if !sweep::wanted(&setting.name()) {
            continue;
        }
        let started = Instant::now();
        let before = (done.lives, done.faults);
        done.sweep(&setting, &driver);
        let lives = done.lives - before.0;
        let faults = done.faults - before.1;
        println!(
            "{}: {lives} lives, {faults} faults, {:.1} s",
            setting.name(),
            started.elapsed().as_secs_f64()
        );
    }
    done
}

/// Entry point of those processes; it does nothing without the variable.
#[test]
#[ignore = "a part of the sweeps, which start it as a process of its own"]
fn part() {
    let Some(part) = told() else { return };
    let [sweep, part, parts] =
        [0, 1, 2].map(|at| part.split(' ').nth(at).unwrap().parse::<usize>().unwrap());
    let done = sweep_part(SWEEPS[sweep], part, parts);
    for (count, first) in done.complaints.values() {
        println!("COMPLAINT {count} times: {first}");
    }
    println!("\ndone: {} {}", done.lives, done.faults);
    assert!(
        done.complaints.is_empty(),
        "{} kinds of complaints",
        done.complaints.len()
    );
}

/// Runs all parts in separate processes.
#[track_caller]
fn run(sweep: usize) {
    let started = Instant::now();
    let parts: Vec<_> = (0..PARTS)
        .map(|part| {
            // A low limit of descriptors, so that some datasets exceed the number of open files.
            let mut command = Command::new("sh");
            command
                .args(["-c", "ulimit -S -n 48; exec \"$0\" \"$@\""])
                .arg(std::env::current_exe().unwrap());
            tell(
                &mut command,
                &beside!("part"),
                format!("{sweep} {part} {PARTS}"),
            )
            .env("MALLOC_ARENA_MAX", "1");
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            std::thread::spawn(move || command.output().unwrap())
        })
        .collect();
    let mut lives = 0;
    let mut faults = 0;
    for (number, part) in parts.into_iter().enumerate() {
        let output = part.join().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let text = said(&output.stdout);
        let numbers = text
            .lines()
            .find_map(|line| line.strip_prefix("done: ")?.split_once(' '));
        match numbers.filter(|_| output.status.success()) {
            Some((a, b)) => {
                (lives, faults) = (
                    lives + a.parse::<u64>().unwrap(),
                    faults + b.parse::<u64>().unwrap(),
                )
            }
            None => panic!(
                "part {number}: {}\n{text}\n{}",
                output.status,
                said(&output.stderr)
            ),
        }
    }
    // Without Parquet there are fewer workloads.
    let least = sweep::size(if cfg!(feature = "parquet") { 100 } else { 50 }, 2000, 2000);
    assert!(
        sweep::only().is_some() || (lives > least && faults > lives),
        "a sweep of {lives} lives and {faults} faults"
    );
    let Sweep {
        gpu, substitutes, ..
    } = SWEEPS[sweep];
    let device = if gpu { "a stand-in GPU" } else { "the host" };
    let policy = if substitutes {
        "substituted"
    } else {
        "reported"
    };
    println!(
        "to {device}, {policy}: {lives} lives with {faults} faults in {:.1} s",
        started.elapsed().as_secs_f64()
    );
}

#[test]
fn any_failing_read_leaves_right_batches_or_one_named_error() {
    run(0);
}

#[test]
fn any_failing_read_leaves_right_rows_or_named_substitutes() {
    run(1);
}

#[test]
fn any_failing_read_before_a_gpu_has_the_same_ends() {
    run(2);
    run(3);
}
