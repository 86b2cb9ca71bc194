//! The driver of the ring: it starts and continues the operations.

use super::crowd::Crowd;
use super::inflight::{Action, CANCEL, Entered, Key, Phase, ReadTable, WAKE, entered};
use super::ring;
use super::ring::{ReadTarget, Ring};
use crate::fault_point::Call;
use crate::files::Handle;
use crate::progress::{Failure, Progress, Step};
use crate::reader::count_leaked;
use crate::reader::sealed::Sealed;
use crate::waker::Bell;
use crate::{Completion, DROP_DEADLINE, Files, Footprint, ReadOp, Reader, Waker, pread};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::memory::{IoBuf, Region};
use feedline_core::storage::opened::{OPEN_FLAGS, open_error};
use feedline_core::storage::{Extent, resolve_beneath};
use feedline_report::meter::ReadStats;
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// With small reads in flight, a wait gathers an eighth of them, but at most this many and for at
/// most [`GATHER_TIME`]. At 4 KiB and depth 64 on a virtio disk this gave 8 % more bytes for the
/// same CPU time: each batch is one wake-up and one doorbell. The queue never drains by more than
/// that eighth.
const GATHER_MAX: usize = 8;
const GATHER_SHARE: usize = 8;
/// The extra delay of a wake, or of a completion while others are stalled.
const GATHER_TIME: Duration = Duration::from_millis(1);

/// Pause if the kernel is short of memory, or the ring cannot be entered at all.
const REST: Duration = Duration::from_millis(1);

/// The reader.
pub struct Uring {
    ring: Ring,
    table: ReadTable<RingOp>,
    /// Operations whose next entry must still be queued.
    unsent: VecDeque<Key>,
    /// Operations whose entry must still be cancelled.
    cancels: VecDeque<Key>,
    /// Operations that completed without the kernel.
    ready: Vec<Completion>,
    /// Scratch for completion entries and paths.
    events: Vec<(u64, i32)>,
    files: Files,
    regions: Vec<Arc<Region>>,
    bell: Arc<Bell>,
    /// Whether a poll entry for wakes is in flight.
    armed: bool,
    /// The thread that may enter the ring.
    owner: Option<ThreadId>,
    /// Whether the owner thread waits for a core.
    crowd: Crowd,
    /// Why the ring can no longer be used.
    broken: Option<Errno>,
    /// When the kernel began to refuse entries.
    refused: Option<Instant>,
    registered: bool,
    depth: usize,
    stats: ReadStats,
}

struct RingOp {
    tag: u64,
    extent: Extent,
    phase: Phase,
    /// Whether the operation ends after its entry in flight.
    cancelled: bool,
}

/// The message that says why io_uring is not available.
pub fn refusal(errno: Errno) -> String {
    let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let name = match errno {
        Errno::NOSYS => {
            "ENOSYS (the kernel has no io_uring, is older than 5.11, or a filter hides it)"
                .to_string()
        }
        Errno::PERM | Errno::ACCESS if matches!(switch.trim(), "1" | "2") => {
            format!("EPERM (kernel.io_uring_disabled = {})", switch.trim())
        }
        Errno::PERM => "EPERM (perhaps a container runtime's seccomp filter)".to_string(),
        Errno::ACCESS => "EACCES (perhaps a security module)".to_string(),
        Errno::NOMEM => "ENOMEM (RLIMIT_MEMLOCK?)".to_string(),
        errno => errno.to_string(),
    };
    format!("io_uring: setup refused with {name}")
}

impl Uring {
    /// A reader over `files`. Its ring is created and tested here; the thread that first uses it
    /// enables it.
    pub fn new(files: Files, depth: usize, registered: bool) -> Result<Self, Errno> {
        Ring::try_out()?;
        let ring = Ring::new(depth)?;
        let bell = Bell::eventfd()
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))?;
        let mut reader = Self {
            ring,
            table: ReadTable::new(depth),
            unsent: VecDeque::with_capacity(depth),
            cancels: VecDeque::new(),
            ready: Vec::with_capacity(depth),
            events: Vec::with_capacity(2 * depth + 2),
            files,
            regions: Vec::new(),
            bell,
            armed: false,
            owner: None,
            crowd: Crowd::none(),
            broken: None,
            refused: None,
            registered,
            depth,
            stats: ReadStats::default(),
        };
        reader.register_files();
        Ok(reader)
    }

    /// How the kernel runs completions, for the report.
    pub fn flavour(&self) -> &'static str {
        self.ring.flavour
    }

    fn register_files(&mut self) {
        let Some(count) = self.files.kept_count().filter(|_| self.registered) else {
            return;
        };
        // If this fails (say, at a low limit of descriptors), files are used by their descriptors.
        if self.ring.register_files(count).is_ok() {
            for id in self.files.sources().ids() {
                let Some(file) = self.files.open_already(id) else {
                    continue;
                };
                self.ring.set_file(id.index(), file.as_fd());
            }
        }
    }

    fn register_regions(&mut self) -> Option<String> {
        let regions = std::mem::take(&mut self.regions);
        let result = self.ring.register_buffers(&regions);
        self.regions = regions;
        self.stats.registered_buffers = self.ring.has_buffers();
        let bytes: usize = self.regions.iter().map(|region| region.len()).sum();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        let limit = limit.map_or("none".into(), |limit| format!("{limit} bytes"));
        let errno = result.err()?;
        Some(format!(
            "io_uring: {bytes} bytes of buffers not registered: {errno} (RLIMIT_MEMLOCK: {limit})"
        ))
    }

    /// Whether this thread may enter the ring. It takes over an empty ring.
    fn may_enter(&mut self) -> bool {
        let thread = std::thread::current().id();
        if self.broken.is_some() || self.owner == Some(thread) {
            return self.broken.is_none();
        }
        if self.owner.is_some() && self.ring.busy() > 0 {
            return false;
        }
        if let Err(errno) = self.take_over() {
            self.break_down(errno);
            return false;
        }
        self.owner = Some(thread);
        true
    }

    fn take_over(&mut self) -> Result<(), Errno> {
        if self.owner.is_some() {
            // Buffers of operations without an entry in flight are in the old ring's slots.
            let mut fresh = Ring::new(self.depth)?;
            for (key, _) in self.table.iter_mut() {
                if let Some(buf) = self.ring.release(key.index()) {
                    fresh.hold(key.index(), buf);
                }
            }
            for (key, op) in self.table.iter_mut() {
                if matches!(op.phase, Phase::Read(_))
                    && self.files.open_already(op.extent.source).is_none()
                {
                    // Its own file was closed with the old ring.
                    op.phase = Phase::open(self.files.align() > 1);
                    debug_assert!(!fresh.is_busy(key.index()));
                }
            }
            self.ring = fresh;
            self.armed = false;
            self.cancels.clear();
            self.register_files();
            if !self.regions.is_empty() {
                self.register_regions();
            }
        }
        self.ring.enable()?;
        if self.files.align() == 1 {
            self.crowd = Crowd::here();
        }
        Ok(())
    }

    /// Gives up the ring. Operations without an entry in flight end with an error, and so do all
    /// later ones.
    fn break_down(&mut self, errno: Errno) {
        self.broken = Some(errno);
        while let Some(key) = self.unsent.pop_front() {
            self.end(key, Err(broken_error(errno)));
        }
    }

    /// Puts an operation into the table, or into `ready` if it is already complete.
    fn start(&mut self, op: ReadOp) {
        let ReadOp {
            tag,
            extent,
            mut buf,
        } = op;
        self.stats.bytes_asked = self.stats.bytes_asked.saturating_add(extent.len);
        match self.first_phase(&extent, &mut buf) {
            Ok(Some(phase)) => {
                let key = self.table.insert(RingOp {
                    tag,
                    extent,
                    phase,
                    cancelled: false,
                });
                self.ring.hold(key.index(), buf);
                self.unsent.push_back(key);
            }
            Ok(None) => self.finish(tag, extent, buf, Ok(0)),
            Err(error) => self.finish(tag, extent, buf, Err(error)),
        }
    }

    /// The first phase of an operation; `None` if it is complete.
    fn first_phase(&mut self, extent: &Extent, buf: &mut IoBuf) -> Result<Option<Phase>> {
        if let Some(errno) = self.broken {
            return Err(broken_error(errno));
        }
        self.files.check(extent, buf.len())?;
        if self
            .files
            .sources()
            .copy_resident(extent, buf.as_mut_slice())
        {
            return Ok(None);
        }
        let align = self.files.align();
        pread::check_aligned(buf.as_mut_slice(), align > 1, align)?;
        Ok(Some(match self.files.open_already(extent.source) {
            Some(file) => Phase::Read(Progress::new(*extent, self.files.align_of(file))),
            None => Phase::open(align > 1),
        }))
    }

    /// Moves operations that need an entry into the queue, as room permits.
    fn push_unsent(&mut self) {
        while let Some(key) = self.cancels.front() {
            if !self.ring.cancel(*key) {
                return;
            }
            self.cancels.pop_front();
        }
        while let Some(key) = self.unsent.front().copied() {
            if !self.push(key) {
                return;
            }
            self.unsent.pop_front();
        }
    }

    fn push(&mut self, key: Key) -> bool {
        #[cfg(feature = "unstable")]
        if !self.ring.has_room() {
            return false;
        }
        let Some(op) = self.table.get_mut(key) else {
            return true;
        };
        let id = op.extent.source;
        match &op.phase {
            Phase::Open { direct, .. } => {
                let flags = if *direct {
                    self.files.flags()
                } else {
                    OPEN_FLAGS
                };
                let sources = self.files.sources();
                let turn = self.files.fault_hook().open(id);
                let Some((root, name)) = sources.beneath(id) else {
                    return self
                        .ring
                        .open(key, flags, turn, |path| sources.path_into(id, path));
                };
                match resolve_beneath::root(root) {
                    Ok(root) => self.ring.open_beneath(key, root, name, flags, turn),
                    Err(errno) => {
                        let error = open_error(sources, id, errno);
                        self.end(key, Err(error));
                        true
                    }
                }
            }
            Phase::Read(progress) => {
                let target = match self.files.open_already(id) {
                    Some(file) => ReadTarget::Kept(file, id.index()),
                    None => ReadTarget::Own,
                };
                let next = progress.next();
                let align = progress.align();
                let turn = self
                    .files
                    .fault_hook()
                    .inject(|| self.files.attempt(Call::Read, &op.extent, next, align));
                let hand_off = !progress.is_direct() && self.crowd.hands_off(next.len);
                let pushed = self.ring.read(key, target, next, turn, hand_off);
                let reads = if progress.is_direct() {
                    &mut self.stats.direct_reads
                } else {
                    &mut self.stats.buffered_reads
                };
                *reads += u64::from(pushed);
                pushed
            }
        }
    }

    /// Handles all available completion entries.
    fn reap(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.ring.reap(&mut events);
        for (user_data, result) in events.drain(..) {
            match Key::from_user_data(user_data) {
                Some(key) => self.handle(key, result),
                None if user_data == WAKE => {
                    self.bell.drain();
                    self.armed = false;
                }
                None => debug_assert_eq!(user_data, CANCEL),
            }
        }
        self.events = events;
    }

    fn handle(&mut self, key: Key, result: i32) {
        let Some(op) = self.table.get_mut(key) else {
            return debug_assert!(false, "a completion without an operation");
        };
        let asked = if let Phase::Read(progress) = &op.phase {
            Some(progress.next().len)
        } else {
            None
        };
        let action = op.phase.step(result);
        if asked.is_some() {
            self.stats.bytes_moved += result.max(0) as u64;
        }
        let extent = op.extent;
        let cancelled = op.cancelled;
        match action {
            Action::Opened(fd) => self.opened(key, fd),
            Action::OpenFailed(Errno::CANCELED)
            | Action::Read(Step::Fail(Failure::Os(Errno::CANCELED)))
                if cancelled =>
            {
                self.end(key, Err(self.cut_short(&extent)));
            }
            Action::Read(Step::Fail(Failure::Os(Errno::CANCELED)))
                if self.broken.is_none() && self.ring.was_handed_off(key.index()) =>
            {
                // The kernel cannot start a worker, perhaps at a limit of processes.
                self.crowd = Crowd::none();
                self.go_on(key, &extent, Step::Retry, false);
            }
            Action::OpenFailed(errno) => self.end(
                key,
                Err(open_error(self.files.sources(), extent.source, errno)),
            ),
            Action::Read(Step::Done(start)) => self.end(key, Ok(start)),
            Action::Read(Step::Fail(failure)) => self.end(key, Err(failure.error(&extent))),
            _ if cancelled || self.broken.is_some() => self.end(key, Err(self.cut_short(&extent))),
            Action::Resend => {
                self.stats.retries += 1;
                self.unsent.push_back(key);
            }
            Action::Read(step) => {
                self.go_on(
                    key,
                    &extent,
                    step,
                    asked.is_some_and(|asked| asked > result.max(0) as usize),
                );
            }
        }
    }

    /// The error of an operation that is not continued.
    fn cut_short(&self, extent: &Extent) -> Error {
        self.broken.map_or_else(
            || {
                Error::new(ErrorKind::Cancelled, Stage::Read, "")
                    .with_range(extent.offset, extent.len)
            },
            broken_error,
        )
    }

    fn go_on(&mut self, key: Key, extent: &Extent, step: Step, short: bool) {
        match step {
            Step::Continue => self.stats.short_reads += u64::from(short),
            Step::Buffered => match self
                .files
                .open_already(extent.source)
                .or_else(|| self.ring.file(key.index()))
            {
                Some(file) => self.files.make_buffered(file),
                None => debug_assert!(false, "read without a file"),
            },
            _ => self.stats.retries += 1,
        }
        self.unsent.push_back(key);
    }

    /// Checks the opened file and reads from it.
    fn opened(&mut self, key: Key, fd: i32) {
        let fd = ring::adopt(fd);
        let Some(op) = self.table.get_mut(key) else {
            return;
        };
        let id = op.extent.source;
        let extent = op.extent;
        let cancelled = op.cancelled;
        let buffered =
            matches!(op.phase, Phase::Open { direct: false, .. }) && self.files.align() > 1;
        if cancelled || self.broken.is_some() {
            return self.end(key, Err(self.cut_short(&extent)));
        }
        let handle = match self.files.adopt(id, fd, buffered) {
            Ok(handle) => handle,
            Err(error) => return self.end(key, Err(error)),
        };
        op.phase = Phase::Read(Progress::new(extent, self.files.align_of(&handle)));
        match handle {
            Handle::Kept(file) => self.ring.set_file(id.index(), file.as_fd()),
            Handle::Once(file) => self.ring.hold_file(key.index(), file),
        }
        self.unsent.push_back(key);
    }

    /// Takes the operation out of the table.
    fn end(&mut self, key: Key, result: Result<usize>) {
        let Some(buf) = self.ring.release(key.index()) else {
            return debug_assert!(false, "ended while an entry is in flight");
        };
        if let Some(op) = self.table.remove(key) {
            self.finish(op.tag, op.extent, buf, result);
        }
    }

    fn finish(&mut self, tag: u64, extent: Extent, buf: IoBuf, result: Result<usize>) {
        self.stats.ops += 1;
        self.stats.failed += u64::from(result.is_err());
        let result = result.map_err(|error| self.files.sources().at(error, &extent));
        self.ready.push(Completion { tag, buf, result });
    }

    /// One `io_uring_enter`. Every error either means to look at completions and retry, or is the
    /// end of the ring.
    fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        self.stats.enters += 1;
        match entered(self.ring.enter(want, timeout)) {
            Entered::Fine => self.refused = None,
            Entered::Broken(errno) => self.break_down(errno),
            Entered::Refused(errno) => {
                self.stats.retries += 1;
                let since = *self.refused.get_or_insert_with(Instant::now);
                if since.elapsed() > DROP_DEADLINE {
                    self.break_down(errno);
                } else {
                    std::thread::sleep(REST);
                }
            }
        }
    }

    /// Sends the queued entries and looks for completions, without sleeping.
    fn look(&mut self) {
        self.push_unsent();
        if self.ring.needs_enter() {
            self.enter(0, None);
        }
        self.reap();
    }

    /// Sleeps in the ring until a wake, or for `want` completions if they come soon. True if a wake
    /// ended it.
    fn sleep(&mut self, want: usize, deadline: Option<Instant>) -> bool {
        if let Some(event) = self.bell.event().filter(|_| !self.armed) {
            self.armed = self.ring.poll(event);
        }
        // Without a poll entry (the queue was full) a wake could not end the sleep, so only send.
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = if want > 1 {
            Some(left.map_or(GATHER_TIME, |left| left.min(GATHER_TIME)))
        } else {
            left
        };
        self.enter(if self.armed { want } else { 0 }, left);
        self.bell.rise()
    }

    /// Like `wait`, when the ring cannot be entered: it broke, or another thread's operations are
    /// in flight.
    fn wait_outside(&mut self, timeout: Option<Duration>) {
        self.reap();
        if self.broken.is_some()
            && self.owner == Some(std::thread::current().id())
            && self.ring.busy() > 0
        {
            // Entries in flight complete only while their thread is in the ring. The error may
            // concern only one call.
            let _ = self.ring.enter(1, Some(REST));
            self.reap();
        }
        if self.ready.is_empty() && timeout != Some(Duration::ZERO) {
            std::thread::sleep(timeout.map_or(REST, |timeout| timeout.min(REST)));
            self.reap();
        }
    }

    fn wait_inside(&mut self, timeout: Option<Duration>) {
        let now = Instant::now();
        self.crowd.look(now);
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        // Completions that are already there need no sleep, but submitted entries must still be
        // sent.
        self.reap();
        let mut gather = true;
        loop {
            self.push_unsent();
            if !self.ready.is_empty() || timeout == Some(Duration::ZERO) || self.broken.is_some() {
                return self.look();
            }
            if self.bell.doze().is_err() {
                return self.look();
            }
            let want = if gather {
                (self.ring.small() / GATHER_SHARE).clamp(1, GATHER_MAX)
            } else {
                1
            };
            let woken = self.sleep(want, deadline);
            gather = false;
            self.reap();
            if woken || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return self.look();
            }
            if !self.ready.is_empty() && self.unsent.is_empty() {
                return;
            }
        }
    }
}

fn broken_error(errno: Errno) -> Error {
    Error::os(Stage::Read, "the ring can no longer be used", errno.into())
}

impl Sealed for Uring {
    fn register(&mut self, regions: &[Arc<Region>]) -> Option<String> {
        if !self.registered {
            return Some("io_uring: registration was turned off".into());
        }
        if self.ring.busy() > 0
            || self
                .owner
                .is_some_and(|owner| owner != std::thread::current().id())
        {
            return Some(
                "io_uring: buffers can only be registered while nothing is in flight".into(),
            );
        }
        self.regions = regions.to_vec();
        self.register_regions()
    }
}

impl Reader for Uring {
    fn broken(&self) -> Option<Error> {
        self.broken.map(broken_error)
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        self.files.footprint(extent)
    }

    fn mem_align(&self) -> usize {
        self.files.align()
    }

    fn submit(&mut self, op: ReadOp) -> std::result::Result<(), ReadOp> {
        if self.in_flight() == self.depth {
            return Err(op);
        }
        self.start(op);
        Ok(())
    }

    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>) {
        if self.may_enter() {
            self.wait_inside(timeout)
        } else {
            self.wait_outside(timeout)
        }
        out.append(&mut self.ready);
    }

    fn in_flight(&self) -> usize {
        self.table.len() + self.ready.len()
    }

    fn cancel(&mut self) {
        self.unsent.clear();
        let keys: Vec<_> = self
            .table
            .iter_mut()
            .map(|(key, op)| (key, std::mem::replace(&mut op.cancelled, true)))
            .collect();
        for (key, already) in keys {
            if !self.ring.is_busy(key.index()) {
                self.end(key, Err(Error::new(ErrorKind::Cancelled, Stage::Read, "")));
            } else if !already {
                self.cancels.push_back(key);
            }
        }
    }

    fn waker(&self) -> Waker {
        self.bell.waker()
    }

    fn stats(&self) -> ReadStats {
        let mut stats = self.stats;
        stats.opens = self.files.opens();
        stats.fallbacks = self.files.fallbacks();
        stats
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_DEADLINE;
        self.cancel();
        let mut out = Vec::new();
        while self.ring.busy() > 0 && Instant::now() < deadline {
            self.wait(&mut out, Some(REST * 10));
            out.clear();
        }
        // When the ring is dropped, it leaks the memory of these operations.
        count_leaked(self.ring.busy());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_core::memory::ByteRing;
    use feedline_core::storage::Sources;

    fn reader(depth: usize) -> Option<(Uring, Extent)> {
        reader_of(&std::env::current_exe().unwrap(), depth)
    }

    fn reader_of(path: &std::path::Path, depth: usize) -> Option<(Uring, Extent)> {
        let mut sources = Sources::new();
        let source = sources
            .file(path, std::fs::metadata(path).unwrap().len())
            .unwrap();
        let files = Files::new(Arc::new(sources), 1, None);
        let reader = Uring::new(files, depth, true)
            .map_err(|errno| eprintln!("skipped: {}", refusal(errno)))
            .ok()?;
        Some((
            reader,
            Extent {
                source,
                offset: 0,
                len: 1000,
            },
        ))
    }

    fn submit(reader: &mut Uring, ring: &ByteRing, extent: Extent, tag: u64) {
        let buf = ring.reserve(1000).unwrap().into();
        assert!(reader.submit(ReadOp { tag, extent, buf }).is_ok());
    }

    #[test]
    fn a_broken_ring_ends_every_operation_and_leaks_nothing() {
        let Some((mut reader, extent)) = reader(4) else {
            return;
        };
        let ring = ByteRing::new(1 << 16, 16, || {}).unwrap();
        let mut out = Vec::new();
        submit(&mut reader, &ring, extent, 0);
        reader.wait(&mut out, None);
        submit(&mut reader, &ring, extent, 1);
        reader.break_down(Errno::BADR);
        submit(&mut reader, &ring, extent, 2);
        while reader.in_flight() > 0 {
            reader.wait(&mut out, None);
        }
        let results: Vec<_> = out
            .drain(..)
            .map(|done| (done.tag, done.result.err().map(|e| e.to_string())))
            .collect();
        assert!(matches!(&results[0], (0, None)), "{results:?}");
        for (tag, error) in &results[1..] {
            assert!(
                error
                    .as_ref()
                    .is_some_and(|words| words.contains("the ring can no longer be used")),
                "{tag} {error:?}"
            );
        }
        assert_eq!(results.len(), 3);
        drop(reader);
        assert!(ring.reserve(1 << 16).is_some());
    }

    /// While another thread may enter the ring, entries that a wait sends stay in flight: none is
    /// lost, and none is freed.
    #[test]
    fn another_thread_takes_over_the_ring_once_it_is_empty() {
        let Some((mut reader, extent)) = reader(4) else {
            return;
        };
        let ring = ByteRing::new(1 << 16, 16, || {}).unwrap();
        let mut out = Vec::new();
        submit(&mut reader, &ring, extent, 0);
        std::thread::scope(|scope| {
            let reader = &mut reader;
            scope.spawn(move || reader.look_as_owner()).join().unwrap();
        });
        while reader.in_flight() > 0 {
            reader.wait(&mut out, Some(Duration::from_secs(1)));
        }
        submit(&mut reader, &ring, extent, 1);
        while reader.in_flight() > 0 {
            reader.wait(&mut out, Some(Duration::from_secs(1)));
        }
        assert!(out.len() == 2 && out.iter().all(|completion| completion.result.is_ok()));
    }

    /// Completes all reads submitted to `reader`, and returns the results by tag.
    fn results(reader: &mut Uring) -> Vec<Result<Vec<u8>>> {
        let mut out = Vec::new();
        while reader.in_flight() > 0 {
            reader.wait(&mut out, None);
        }
        out.sort_by_key(|completion| completion.tag);
        out.into_iter()
            .map(|mut done| {
                done.result
                    .map(|from| done.buf.as_mut_slice()[from..][..1000].to_vec())
            })
            .collect()
    }

    #[test]
    fn workers_of_the_kernel_bring_the_same_bytes_and_errors() {
        let path = std::env::temp_dir().join(format!("feedline-crowd-{}", std::process::id()));
        let bytes: Vec<u8> = (0..9000_u32).map(|at| (at * 7 / 8) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let Some((mut reader, extent)) = reader_of(&path, 4) else {
            return;
        };
        let ring = ByteRing::new(1 << 16, 16, || {}).unwrap();
        // The first read opens the file.
        submit(&mut reader, &ring, extent, 0);
        results(&mut reader);
        let at = |offset| Extent { offset, ..extent };
        for crowded in [false, true] {
            reader.crowd = Crowd::known(crowded);
            for (offset, tag) in [0, 4097, 99].into_iter().zip(0..) {
                submit(&mut reader, &ring, at(offset), tag);
            }
            reader.push_unsent();
            assert!(
                (0..3).all(|slot| !reader.ring.is_busy(slot)
                    || reader.ring.was_handed_off(slot) == crowded)
            );
            for (read, offset) in results(&mut reader).into_iter().zip([0, 4097, 99]) {
                assert!(
                    read.unwrap() == bytes[offset..][..1000],
                    "{crowded} {offset}"
                );
            }
        }
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(5000)
            .unwrap();
        submit(&mut reader, &ring, at(4500), 0);
        assert_eq!(
            results(&mut reader)[0].as_ref().unwrap_err().kind(),
            ErrorKind::Truncated
        );
        assert!(reader.stats.short_reads > 0);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn without_a_worker_of_the_kernel_the_ring_reads_by_itself() {
        let Some((mut reader, extent)) = reader(4) else {
            return;
        };
        let ring = ByteRing::new(1 << 16, 16, || {}).unwrap();
        submit(&mut reader, &ring, extent, 0);
        results(&mut reader);
        reader.crowd = Crowd::known(true);
        submit(&mut reader, &ring, extent, 1);
        reader.push_unsent();
        let mut events = Vec::new();
        while events
            .iter()
            .all(|(user_data, _)| Key::from_user_data(*user_data).is_none())
        {
            reader.ring.enter(1, None).unwrap();
            reader.ring.reap(&mut events);
        }
        for key in events
            .into_iter()
            .filter_map(|(user_data, _)| Key::from_user_data(user_data))
        {
            reader.handle(key, -Errno::CANCELED.raw_os_error());
        }
        assert!(!reader.crowd.hands_off(usize::MAX - 1));
        assert!(matches!(&results(&mut reader)[..], [Ok(_)]));
    }

    impl Uring {
        fn look_as_owner(&mut self) {
            assert!(self.may_enter());
            self.look();
        }
    }
}
