//! The process under fault: this test binary started again, with its task in one variable.
//!
//! ```text
//! test ── Task ──► child: prepares itself (limits, filter, capabilities) ─► loader ─► every batch against the oracle
//!   │ ◄── "@key value" per line: batches, the error and its site, threads and descriptors left, leaked ──┘
//!   └─ a deadline: the whole process group is killed, and the test fails with all that was said
//! ```

use super::set::Set;
use super::{seccomp, sys};
use crate::common::{READERS, descriptors, loader_threads, rows};
use crate::common::{tell, told};
use feedline::dataset::Records;
use feedline::storage::Mode;
use feedline::{Error, Loader, LoaderBuilder};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process_group, setrlimit};
use rustix::thread::CapabilitySet;
use std::collections::HashMap;
use std::fmt::Display;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

/// More than any child needs; only a failing test takes this long.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Task of a child.
#[derive(Clone, Debug)]
pub struct Task(Vec<(&'static str, String)>);

impl Task {
    /// Role of the child: a name of [`be`].
    pub fn new(role: &str) -> Self {
        Self(vec![("role", role.to_string())])
    }

    /// Pull this set by reader number `reader` of [`READERS`].
    pub fn pull(set: &Set, reader: usize) -> Self {
        Self::on("pull", set, reader)
    }

    /// The same in another role.
    pub fn on(role: &str, set: &Set, reader: usize) -> Self {
        let task = Self::new(role).with("set", set.to_text());
        task.with("reader", reader)
    }

    pub fn with(mut self, key: &'static str, value: impl Display) -> Self {
        self.0.push((key, value.to_string()));
        self
    }

    /// The command of a child.
    pub fn command(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        self.tell(&mut command);
        command
    }

    /// The same child, started through this command line.
    pub fn behind(&self, words: &[String]) -> Command {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.arg(std::env::current_exe().unwrap());
        self.tell(&mut command);
        command
    }

    fn tell(&self, command: &mut Command) {
        let pairs = self.0.iter();
        let lines: Vec<_> = pairs.map(|(key, value)| format!("{key}={value}")).collect();
        tell(command, "real::child", lines.join("\n")).env("RUST_BACKTRACE", "0");
    }

    /// Starts it and waits for its end.
    #[track_caller]
    pub fn run(&self) -> Ended {
        Running::start(self.command()).end()
    }
}

/// A running child; a drop kills it with all its children.
pub struct Running {
    child: Child,
    lines: Receiver<String>,
    errors: Arc<Mutex<Vec<u8>>>,
    said: Vec<(String, String)>,
    begun: Instant,
}

impl Running {
    pub fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).process_group(0);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let out = child.stdout.take().unwrap();
        let mut errors = child.stderr.take().unwrap();
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let collected = Arc::new(Mutex::new(Vec::new()));
        let kept = collected.clone();
        // Not joined: a child stuck in the kernel keeps the pipe open.
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = errors.read(&mut piece) {
                kept.lock().unwrap().extend(&piece[..count]);
            }
        });
        Self {
            child,
            lines,
            errors: collected,
            said: Vec::new(),
            begun: Instant::now(),
        }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits until the child prints `key`; false if it ended before.
    #[track_caller]
    pub fn until(&mut self, key: &str) -> bool {
        loop {
            let left = DEADLINE.saturating_sub(self.begun.elapsed());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    // The harness does not end its line before a test's own output.
                    let Some((_, words)) = line.split_once('@') else {
                        continue;
                    };
                    let (name, value) = words.split_once(' ').unwrap_or((words, ""));
                    self.said.push((name.to_string(), value.to_string()));
                    if name == key {
                        return true;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => {
                    self.kill();
                    let errors = self.errors();
                    panic!("it hangs; it had said {:?}, and {errors}", self.said);
                }
            }
        }
    }

    /// Whether it has ended, or its time is over.
    pub fn over(&mut self) -> bool {
        self.begun.elapsed() > DEADLINE || !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end.
    #[track_caller]
    pub fn end(mut self) -> Ended {
        self.until("never said");
        while self.child.try_wait().unwrap().is_none() {
            if self.begun.elapsed() > DEADLINE {
                self.kill();
                panic!("it does not end; it had said {:?}", self.said);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let status = self.child.wait().unwrap();
        Ended {
            status,
            said: std::mem::take(&mut self.said),
            errors: self.errors(),
        }
    }

    fn errors(&self) -> String {
        String::from_utf8_lossy(&self.errors.lock().unwrap()).into_owned()
    }

    fn kill(&mut self) {
        let _ = kill_process_group(self.pid(), Signal::KILL);
        let _ = self.child.kill();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill();
            // A child stuck in the kernel is not waited for: the end of its namespace and parent
            // frees it.
            let end = Instant::now() + Duration::from_secs(5);
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Output and end of a child.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    said: Vec<(String, String)>,
    #[allow(dead_code, reason = "shown when a test fails")]
    errors: String,
}

/// Result of a run without violations.
#[derive(Debug)]
pub enum Outcome {
    /// All batches.
    Whole,
    /// Some batches, then this error.
    Failed(Fault),
}

/// A typed error of a child.
#[derive(Debug)]
pub struct Fault {
    /// The rendering.
    pub text: String,
    pub kind: String,
    pub stage: String,
}

impl Fault {
    /// Whether it names file, offset and sample.
    pub fn is_placed(&self) -> bool {
        let words = [" path=", " offset=", " sample="];
        words.iter().all(|word| self.text.contains(word))
    }

    /// Whether it names this code of the operating system.
    pub fn has_code(&self, code: i32) -> bool {
        self.text.contains(&format!("(os error {code})"))
    }
}

impl Ended {
    pub fn said(&self, key: &str) -> Option<&str> {
        self.all(key).next()
    }

    /// All values of a key.
    pub fn all(&self, key: &str) -> impl Iterator<Item = &str> {
        let pairs = self.said.iter().filter(move |(name, _)| name == key);
        pairs.map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub fn number(&self, key: &str) -> u64 {
        let value = self.said(key);
        let value = value.unwrap_or_else(|| panic!("it never said {key}: {self:#?}"));
        value.parse().unwrap()
    }

    /// Reason of a child that could not prepare itself.
    pub fn skipped(&self) -> Option<&str> {
        self.said("skipped")
    }

    /// Checks the invariants of every run: an orderly end, right batches in order, threads and
    /// descriptors closed, and exactly `leaked` things left to the kernel.
    #[track_caller]
    pub fn outcome(&self, leaked: bool) -> Outcome {
        let did_leak = self.said("leaked").is_some_and(|count| count != "0");
        assert_eq!(did_leak, leaked, "leaked: {self:#?}");
        self.outcome_leaking()
    }

    /// The same, with any number of things left to the kernel.
    #[track_caller]
    pub fn outcome_leaking(&self) -> Outcome {
        let orderly = self.status.success() && self.said("end").is_some();
        assert!(orderly, "no orderly end: {self:#?}");
        if self.number("leaked") == 0 {
            self.left_nothing();
        }
        if self.said("error").is_none() {
            assert_eq!(
                self.number("delivered"),
                self.number("planned"),
                "{self:#?}"
            );
            return Outcome::Whole;
        }
        let word = |key| self.said(key).unwrap().to_string();
        Outcome::Failed(Fault {
            text: word("error"),
            kind: word("kind"),
            stage: word("stage"),
        })
    }

    /// Threads and descriptors are closed.
    #[track_caller]
    pub fn left_nothing(&self) {
        let left = (self.said("threads"), self.said("fds"));
        assert_eq!(left, (Some(""), Some("")), "left behind: {self:#?}");
    }

    /// All batches came.
    #[track_caller]
    pub fn whole(&self) {
        let outcome = self.outcome(false);
        assert!(matches!(outcome, Outcome::Whole), "{self:#?}");
    }

    /// Some batches came, then the error.
    #[track_caller]
    pub fn failed(&self) -> Fault {
        match self.outcome(false) {
            Outcome::Failed(fault) => fault,
            Outcome::Whole => panic!("nothing failed: {self:#?}"),
        }
    }

    /// Died of SIGKILL.
    pub fn was_killed(&self) -> bool {
        self.status.signal() == Some(Signal::KILL.as_raw())
    }
}

/// Prints on standard error that a test was skipped, with the reason.
pub fn skip(test: &str, why: impl Display) {
    eprintln!("skipped: {test}: {why}");
}

// The child.

/// Task of this process, if it is a child.
pub struct Given(HashMap<String, String>);

impl Given {
    pub fn here() -> Option<Self> {
        let text = told()?;
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        Some(Self(pairs.map(|(a, b)| (a.into(), b.into())).collect()))
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.text(key).map(|text| text.parse().unwrap())
    }

    pub fn set(&self) -> Set {
        Set::from_text(self.text("set").unwrap())
    }

    /// A loader's settings.
    pub fn builder(&self, set: &Set) -> Result<LoaderBuilder, Error> {
        let (mode, direct) = READERS[self.number("reader").unwrap_or(0) as usize];
        let slots = self.number("slots").unwrap_or(3) as usize;
        let depth = self.number("depth").unwrap_or(8) as u32;
        let mut builder = Loader::builder(set.open()?)
            .batch_size(set.batch)
            .workers(2);
        if let Some(bytes) = self.number("budget") {
            builder = builder.memory_budget(bytes as usize);
        }
        if let Some(time) = self.number("stall_ms") {
            builder = builder.tuning(|t| t.stall_deadline(Duration::from_millis(time)));
        }
        let builder = builder.tuning(|t| t.reader(mode).direct(direct));
        Ok(builder.tuning(|t| t.slots(slots).depth(depth)))
    }
}

pub fn say(key: &str, value: impl Display) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    // The receiver may be gone.
    let _ = writeln!(out, "@{key} {}", value.to_string().replace('\n', " | "));
    let _ = out.flush();
}

/// Plays the role of the task.
pub fn be(given: &Given) {
    // It ends with its parent's thread in any case.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    if let Err(why) = prepare(given) {
        return say("skipped", why);
    }
    match given.text("role").unwrap() {
        "pull" => pull(given, |_| {}),
        "sweep descriptors" => super::limits::sweep_descriptors(given),
        "change files" => super::files::change(given),
        "fork" => super::processes::fork_and_go_on(given),
        "use in a fork" => super::processes::use_a_loader_in_a_fork(given),
        "save" => super::disks::save(given),
        other => panic!("no role {other}"),
    }
}

/// Changes to the process itself, before anything else.
fn prepare(given: &Given) -> Result<(), String> {
    if let Some(calls) = given.text("deny") {
        let numbers = calls.split(',').map(|number| number.parse().unwrap());
        let numbers: Vec<u32> = numbers.collect();
        let errno = given.number("errno").unwrap() as i32;
        seccomp::deny(&numbers, errno).map_err(|error| format!("no seccomp filter: {error}"))?;
    }
    if let Some(limit) = given.number("memlock") {
        lower(Resource::Memlock, limit);
    }
    if let Some(limit) = given.number("nofile") {
        lower(Resource::Nofile, limit);
    }
    if let Some(number) = given.number("interrupted") {
        sys::interrupted_by(number as i32);
    }
    if given.text("plain").is_some() {
        let files = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        without_capabilities(CapabilitySet::IPC_LOCK | files)?;
    }
    Ok(())
}

fn lower(resource: Resource, limit: u64) {
    let maximum = getrlimit(resource).maximum;
    let current = Some(maximum.map_or(limit, |maximum| limit.min(maximum)));
    setrlimit(resource, Rlimit { current, maximum }).unwrap();
}

/// Takes them from this thread, and so from the threads that it starts.
fn without_capabilities(gone: CapabilitySet) -> Result<(), String> {
    let mut sets = rustix::thread::capabilities(None).map_err(|errno| errno.to_string())?;
    sets.effective -= gone;
    sets.permitted -= gone;
    rustix::thread::set_capabilities(None, sets).map_err(|errno| format!("capset: {errno}"))
}

/// Pulls epochs and compares every batch with the oracle; calls `at` with the number of batches so
/// far.
pub fn pull(given: &Given, mut at: impl FnMut(u64)) {
    let set = given.set();
    let before = descriptors();
    say("start", "");
    let mut loader = None;
    let result = epochs(given, &set, &mut loader, &mut at);
    if let Err(error) = &result {
        say("kind", error.kind().as_str());
        say("stage", error.stage().as_str());
        say("error", error);
    }
    if let Some(loader) = &loader {
        let report = loader.report();
        let reads = report.total.storage.counts;
        say("retries", reads.retries);
        say("short", reads.short_reads);
        say("reads", reads.ops);
        say("registered", reads.registered_buffers);
        say("choice", &report.choice);
    }
    let begun = Instant::now();
    drop(loader);
    say("drop_ms", begun.elapsed().as_millis());
    finish(&before);
}

/// Prints the remains of a dropped loader.
pub fn finish(before: &[String]) {
    let begun = Instant::now();
    // A joined thread stays in /proc until the kernel removes it, a ring's descriptor slightly
    // longer.
    let is_clean = || loader_threads().is_empty() && descriptors() == before;
    while !is_clean() && begun.elapsed() < DEADLINE / 2 {
        std::thread::sleep(Duration::from_millis(2));
    }
    say("threads", loader_threads().join(","));
    let mut more = descriptors();
    more.retain(|path| !before.contains(path));
    say("fds", more.join(","));
    say("leaked", leaked());
    say("end", "");
}

/// Number of things left behind in this process.
pub fn leaked() -> u64 {
    let records = Records::builder(1).open_bytes([1]).unwrap();
    let builder = Loader::builder(records).workers(1);
    match builder.tuning(|t| t.slots(1).reader(Mode::Pread)).build() {
        Ok(loader) => loader.report().leaked,
        Err(_) => feedline::unstable::leaked(),
    }
}

fn epochs(
    given: &Given,
    set: &Set,
    kept: &mut Option<Loader>,
    at: &mut impl FnMut(u64),
) -> Result<(), Error> {
    let builder = given.builder(set)?;
    say("built", "");
    let loader = kept.insert(builder.build()?);
    let epochs = given.number("epochs").unwrap_or(1);
    say("planned", epochs * loader.batches_per_epoch());
    // Waits until the test has made its fault, if that must come first.
    let go = given.text("go").map(PathBuf::from);
    while go.as_ref().is_some_and(|go| !go.exists()) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let patience = given.number("patience").map(Duration::from_millis);
    let mut delivered = 0;
    for epoch in 0..epochs {
        let order = loader.preview(epoch, u64::MAX)?;
        let mut batches = loader.epoch(epoch)?;
        let mut expected = order.chunks(set.batch);
        loop {
            let next = match patience.map(|patience| batches.next_within(patience)) {
                None => batches.next(),
                Some(Poll::Ready(next)) => next,
                Some(Poll::Pending) => {
                    say("pending", delivered);
                    say("delivered", delivered);
                    return Ok(());
                }
            };
            let Some(batch) = next else { break };
            let batch = batch.inspect_err(|_| {
                say("delivered", delivered);
                let ended = batches.next().is_none();
                assert!(ended, "an iterator goes on behind its error");
            })?;
            let planned = expected.next().unwrap();
            assert_eq!(batch.ids(), planned, "batch {delivered}: samples");
            for (id, bytes) in rows(&batch) {
                let right = set.is_sample(id, &bytes);
                assert!(right, "batch {delivered}: the bytes of sample {id}");
            }
            delivered += 1;
            at(delivered);
            if let Some(pause) = given.number("pause_us") {
                std::thread::sleep(Duration::from_micros(pause));
            }
        }
        assert_eq!(expected.next(), None, "an epoch that ends early");
    }
    say("delivered", delivered);
    Ok(())
}

/// Applies this to all of them, several at a time: children mostly wait.
pub fn some_at_a_time<T: Sync>(cases: &[T], each: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    each(case)
                }
            });
        }
    });
}

/// A command line tool in `PATH`.
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let more = ["/sbin", "/usr/sbin"].map(PathBuf::from);
    let folders = std::env::split_paths(&path).chain(more);
    let mut tools = folders.map(|folder| folder.join(name));
    tools.find(|path| path.is_file())
}

/// Runs a tool to its end; gives its output if it fails.
pub fn ran(tool: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new(tool);
    let output = command.args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    let words = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{} {arguments:?}: {}",
            tool.display(),
            words.trim()
        )),
    }
}

/// Gives the calling thread and its children a mount namespace of their own; `Err` has the reason.
pub fn alone_with_mounts() -> Result<(), String> {
    sys::private_mounts().map_err(|error| format!("no mounts of its own: {error}"))
}
