//! Tests against the stand-in of tests/standin/cufile.rs, which reads into plain memory and is
//! stricter than the real library; and against the real one if `$FEEDLINE_CUFILE_REAL` names it.
//! Neither needs a GPU.

use super::stats::Scope;
use super::*;
use memmap2::MmapMut;
use proptest::prelude::*;
use standin::{Counts, Open, Register, Route, StandIn};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

#[path = "../../../../../tests/common/cufile.rs"]
mod standin;

/// A temporary folder as `/`: with modules and udev, without nvidia-fs.
struct Root(PathBuf);

impl Root {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("cufile-root-{}-{number}", std::process::id());
        let root = Self(standin::folder().join(name));
        root.write("proc/modules", "ext4 1 1 - Live 0x0\n");
        std::fs::create_dir_all(root.0.join("run/udev")).unwrap();
        root
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    fn remove(&self, name: &str) {
        let path = self.0.join(name);
        if path.is_dir() {
            std::fs::remove_dir_all(path)
        } else {
            std::fs::remove_file(path)
        }
        .unwrap();
    }

    fn options(&self, library: &Path) -> Options {
        Options {
            library: Some(library.into()),
            root: self.0.clone(),
            deadline: Duration::from_secs(120),
        }
    }

    fn open(&self, library: &StandIn) -> Result<Arc<CuFile>, Absent> {
        CuFile::open_with(&self.options(library.path()))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Page-aligned memory in place of a device's.
struct Memory(MmapMut);

impl Memory {
    fn new(len: usize) -> Self {
        let mut memory = MmapMut::map_anon(len).unwrap();
        memory.fill(0xee);
        Self(memory)
    }

    fn address(&mut self) -> u64 {
        self.0.as_mut_ptr().expose_provenance() as u64
    }
}

/// Bytes without a short period.
fn noise(len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

fn direct(path: &Path) -> File {
    std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(path)
        .unwrap()
}

/// Calls `read` on memory that the test owns.
fn read(
    cufile: &CuFile,
    handle: &Handle,
    to: u64,
    len: usize,
    from: u64,
    offset: u64,
) -> Result<usize, Failure> {
    // SAFETY: the tests pass memory that they own until after the call, or ranges that are refused
    // before any write.
    unsafe { cufile.read(handle, to, len, from, offset) }
}

/// An open driver with a file and a registered buffer of 64 KiB.
struct Bench {
    buffer: Option<BufferGuard>,
    handle: Handle,
    cufile: Arc<CuFile>,
    memory: Memory,
    start: u64,
    root: Root,
    library: StandIn,
}

impl Bench {
    fn new(library: StandIn, bytes: &[u8]) -> Self {
        let root = Root::new();
        let mut memory = Memory::new(1 << 16);
        let cufile = root.open(&library).unwrap();
        let start = memory.address();
        let file = direct(&root.write("data", bytes));
        let handle = cufile.register_file(file).unwrap();
        let buffer = Some(cufile.register_buffer(start, 1 << 16).unwrap());
        Self {
            buffer,
            handle,
            cufile,
            memory,
            start,
            root,
            library,
        }
    }

    fn read(&self, len: usize, from: u64, to: u64) -> Result<usize, Failure> {
        read(&self.cufile, &self.handle, self.start, len, from, to)
    }

    /// Gives the buffer back: nothing was wrong until now.
    fn end(&mut self) {
        self.buffer = None;
        assert_eq!(self.library.violations(), [""; 0]);
    }
}

fn code(code: i32) -> FailureCause {
    let is_cuda = code == failure::CUDA_DRIVER_ERROR;
    let cuda = if is_cuda { 201 } else { 0 };
    FailureCause::CuFile { code, cuda }
}

/// Calls that opened and closed the driver, with nothing left.
fn opened(opens: i64, closes: i64) -> Counts {
    Counts {
        opens,
        closes,
        ..Counts::default()
    }
}

#[track_caller]
fn assert_has(text: &impl ToString, part: &str) {
    let text = text.to_string();
    assert!(text.contains(part), "{part}: {text}");
}

/// Runs the calling test again, alone in a process changed by `change`; returns whether this is
/// that process.
///
/// For tests of state that belongs to the whole process.
fn alone(test: &str, change: impl FnOnce(&mut Command)) -> bool {
    const MARK: &str = "FEEDLINE_CHILD";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let module = module_path!().split_once("::").unwrap().1;
    let name = format!("{module}::{test}");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &name, "--test-threads=1", "--nocapture"]);
    child.env(MARK, "1");
    child.stdout(Stdio::piped()).stderr(Stdio::piped());
    change(&mut child);
    let output = child.spawn().unwrap().wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert_has(&text, "1 passed");
    print!("{text}");
    false
}

// Opening.

#[test]
fn open_drivers_close_with_the_last_user() {
    let library = StandIn::own();
    let root = Root::new();
    let cufile = root.open(&library).unwrap();
    assert_eq!(cufile.version, Some((1, 20)));
    assert_eq!(cufile.api.library, library.path().to_str().unwrap());
    let mut memory = Memory::new(1 << 16);
    let path = root.write("data", noise(10_000));
    let handle = cufile.register_file(direct(&path)).unwrap();
    let buffer = cufile.register_buffer(memory.address(), 1 << 16).unwrap();
    assert_eq!(buffer.device_ptr, memory.address());
    let live = Counts {
        files: 1,
        buffers: 1,
        users: 1,
        ..opened(1, 0)
    };
    assert_eq!(library.counts(), live);
    // In an unusual order.
    drop(cufile);
    assert_eq!(library.counts(), live);
    drop(buffer);
    drop(handle);
    assert_eq!(library.counts(), opened(1, 1));
    let calls = [
        "open", "stats+", "file+", "buffer+", "buffer-", "file-", "stats-", "close",
    ];
    assert_eq!(library.trace(), calls);
    assert_eq!(library.violations(), [""; 0]);
}

#[test]
fn missing_requirements_are_found_before_opening() {
    type Change = fn(&Root);
    let no_modules: Change = |root| root.remove("proc/modules");
    let no_udev: Change = |root| root.remove("run/udev");
    let unreadable: Change = |root| {
        root.remove("proc/modules");
        std::fs::create_dir(root.0.join("proc/modules")).unwrap();
    };
    // It is loaded, without its device files.
    let nvidia_fs: Change = |root| drop(root.write("proc/driver/nvidia-fs/devcount", "1\n"));
    let library = StandIn::own();
    for (change, path, advice) in [
        (no_modules, "proc/modules", "loop forever"),
        (no_udev, "run/udev", "mount it from the host"),
        (unreadable, "proc/modules", "cannot be read"),
        (nvidia_fs, "dev/nvidia-fs0", "into the container"),
    ] {
        let root = Root::new();
        change(&root);
        let absent = root.open(&library).unwrap_err();
        assert_has(&absent, &root.0.join(path).display().to_string());
        assert_has(&absent, advice);
        let named = match &absent {
            Absent::NoModules { path }
            | Absent::NoUdev { path }
            | Absent::NoDeviceFiles { path } => path,
            other => panic!("{advice}: {other:?}"),
        };
        assert_eq!(*named, root.0.join(path));
    }
    let never_opened = Counts::default();
    assert_eq!(library.counts(), never_opened);
}

#[test]
fn complete_or_idle_nvidia_fs_is_accepted() {
    for (count, device) in [("1", true), ("0", false), ("", false), ("many", false)] {
        let library = StandIn::own();
        let root = Root::new();
        root.write("proc/driver/nvidia-fs/devcount", count);
        if device {
            root.write("dev/nvidia-fs0", "");
        }
        root.open(&library).unwrap();
    }
}

#[test]
fn a_missing_library_error_lists_the_candidates() {
    let root = Root::new();
    let missing = root.0.join("libcufile.so.0");
    let absent = CuFile::open_with(&root.options(&missing)).unwrap_err();
    let tried = [missing.display().to_string()];
    let is_named = matches!(&absent, Absent::NoLibrary { tried: names } if *names == tried);
    assert!(is_named, "{absent:?}");
    assert_has(&absent, "nvidia-cufile");
    assert_has(&absent, "FEEDLINE_CUFILE");
    // A file that is no library: the linker's message is kept.
    let text_file = root.write("text.so", "not a library");
    let absent = CuFile::open_with(&root.options(&text_file)).unwrap_err();
    assert_has(&absent, "text.so: ");
    assert_has(&absent, "file too short");
}

#[test]
fn only_missing_needed_symbols_refuse_a_library() {
    let root = Root::new();
    let library = StandIn::own_with(&["without_read"]);
    let absent = root.open(&library).unwrap_err();
    let symbol = match absent {
        Absent::NoSymbol { symbol, .. } => symbol,
        other => panic!("{other}"),
    };
    assert_eq!(symbol, "cuFileRead");

    let cufile = root.open(&StandIn::own_with(&["without_stats"])).unwrap();
    assert_eq!((cufile.version, cufile.stats(0)), (Some((1, 20)), None));

    let library = StandIn::own_with(&["without_version"]);
    let cufile = root.open(&library).unwrap();
    assert_eq!((cufile.version, cufile.stats(0)), (None, None));
    assert_eq!(library.violations(), [""; 0]);
}

#[test]
fn old_libraries_are_refused_and_unversioned_ones_accepted() {
    let root = Root::new();
    let table = [
        (Some((1, 4)), false),
        (Some((0, 9)), false),
        (Some((1, 5)), true),
        (Some((2, 0)), true),
        (None, true),
    ];
    for (version, usable) in table {
        let library = StandIn::own();
        library.version(version);
        match root.open(&library) {
            Ok(cufile) => {
                assert!(usable);
                let version = version.map(|(major, minor)| (major as u32, minor as u32));
                assert_eq!(cufile.version, version);
            }
            Err(absent) => {
                let is_old = matches!(absent, Absent::VersionTooOld { .. });
                assert!(!usable && is_old, "{version:?}: {absent}");
                assert_eq!(library.counts().opens, 0);
            }
        }
    }
}

#[test]
fn open_errors_name_every_code() {
    let library = StandIn::own();
    let root = Root::new();
    let names = failure::NAMES.into_iter();
    for (number, name) in names.filter(|(number, _)| *number != failure::DRIVER_ALREADY_OPEN) {
        library.open(Open::Fails(number));
        let absent = root.open(&library).unwrap_err();
        let is_named = matches!(absent, Absent::DriverOpen { code, .. } if code == number);
        assert!(is_named, "{absent:?}");
        for part in [name, &number.to_string(), "cufile.log"] {
            assert_has(&absent, part);
        }
    }
    library.open(Open::Fails(5011));
    assert_has(&root.open(&library).unwrap_err(), "CUDA error 201");
    let closes = library.counts().closes;
    assert_eq!(closes, 0, "a driver that failed to open is not closed");
    // A failure is not remembered: the next open succeeds.
    library.open(Open::Well);
    root.open(&library).unwrap();
}

#[test]
fn a_foreign_driver_is_used_and_left_open() {
    let library = StandIn::own();
    let root = Root::new();
    library.open(Open::Fails(failure::DRIVER_ALREADY_OPEN));
    drop(root.open(&library).unwrap());
    assert_eq!(library.counts(), opened(1, 0));
}

#[test]
fn a_hanging_open_is_abandoned_and_never_retried() {
    let library = StandIn::own();
    let root = Root::new();
    library.open(Open::Hangs);
    let options = Options {
        deadline: Duration::from_millis(50),
        ..root.options(library.path())
    };
    for _ in 0..3 {
        let absent = CuFile::open_with(&options).unwrap_err();
        assert!(matches!(absent, Absent::TimedOut { .. }), "{absent:?}");
        assert_has(&absent, "did not return within 0.05 s");
    }
    assert_eq!(library.counts().opens, 1);
}

#[test]
fn open_restores_a_closed_standard_input() {
    let name = "open_restores_a_closed_standard_input";
    let root = Root::new();
    let path = root.write("stdin", noise(100));
    let there = alone(name, |child| {
        child.stdin(File::open(&path).unwrap());
    });
    if !there {
        return;
    }
    let library = StandIn::own();
    let root = Root::new();
    let link = || std::fs::read_link("/proc/self/fd/0").unwrap();
    let flags = || rustix::io::fcntl_getfd(std::io::stdin()).unwrap();
    let state = || (link(), flags(), descriptors());
    let before = state();
    for code in [0, 5033] {
        library.open(Open::ClosesStdin(code));
        assert_eq!(root.open(&library).is_ok(), code == 0);
        assert_eq!(state(), before, "after code {code}");
    }
    // A descriptor closed before stays closed.
    // SAFETY: this process runs one test, and nothing in it reads standard input any more.
    drop(unsafe { <OwnedFd as rustix::fd::FromRawFd>::from_raw_fd(0) });
    library.open(Open::Well);
    root.open(&library).unwrap();
    assert!(std::fs::read_link("/proc/self/fd/0").is_err());
}

/// Number of open descriptors.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn the_process_driver_stays_open_while_in_use() {
    let library = StandIn::shared();
    let there = alone("the_process_driver_stays_open_while_in_use", |child| {
        child.env("FEEDLINE_CUFILE", library.path());
    });
    if !there {
        return;
    }
    let answers: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(CuFile::get)).collect();
        let answers = threads.into_iter().map(|thread| thread.join().unwrap());
        answers.collect()
    });
    // The result depends on the machine's /proc and /run.
    println!("{:?}", answers[0]);
    let used = answers[0].is_ok();
    let all_same = answers.iter().all(|answer| match (answer, &answers[0]) {
        (Ok(one), Ok(other)) => Arc::ptr_eq(one, other),
        (Err(one), Err(other)) => one == other,
        _ => false,
    });
    // A later thread would reopen it if all others had released it; here no thread releases it.
    assert!(all_same, "{answers:?}");
    let counts = || {
        let counts = StandIn::shared().counts();
        (counts.opens, counts.closes, counts.users)
    };
    let uses = i64::from(used);
    assert_eq!(counts(), (uses, 0, uses));
    drop(answers);
    assert_eq!(counts(), (uses, uses, 0));
    // Threads that open and close repeatedly find it open, or reopen it after the close.
    let reopen = || {
        for _ in 0..50 {
            assert_eq!(CuFile::get().is_ok_and(|cufile| cufile.opened.stats), used);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(reopen);
        }
    });
    let (opens, closes, users) = counts();
    assert!(opens == closes && users == 0, "{opens} {closes} {users}");
}

// Registering.

#[test]
fn files_without_direct_reads_are_refused() {
    let library = StandIn::own();
    let root = Root::new();
    let cufile = root.open(&library).unwrap();
    let path = root.write("data", noise(100));
    let file = File::open(&path).unwrap();
    assert_has(&cufile.register_file(file).unwrap_err(), "O_DIRECT");
    assert_eq!(library.trace(), ["open", "stats+"]);
    for number in [5008, 5018, 5027, 5034] {
        library.fail_register(Register::File, number);
        let failure = cufile.register_file(direct(&path)).unwrap_err();
        assert_eq!(*failure.cause(), code(number));
        let text = failure.to_string();
        assert!(text.starts_with("cuFileHandleRegister: CU_FILE_"), "{text}");
    }
    let open = || {
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .flatten()
            .filter_map(|fd| std::fs::read_link(fd.path()).ok())
    };
    assert!(!open().any(|file| file == path), "a refused file is closed");
    let handle = cufile.register_file(direct(&path)).unwrap();
    assert!(open().any(|file| file == path));
    drop(handle);
    assert!(!open().any(|file| file == path));
    assert_eq!(library.violations(), [""; 0]);
}

#[test]
fn memory_registers_only_at_page_boundaries() {
    let library = StandIn::own();
    let root = Root::new();
    let cufile = root.open(&library).unwrap();
    let mut memory = Memory::new(1 << 16);
    let start = memory.address();
    let table = [
        (start + 1, 100, "bounce"),
        (start + 256, 4096, "bounce"),
        (start + 2048, 4096, "bounce"),
        (start, 0, "is invalid"),
        (0, 4096, "is invalid"),
        (u64::MAX - 4095, 4097, "is invalid"),
    ];
    for (address, len, words) in table {
        let failure = cufile.register_buffer(address, len).unwrap_err();
        let is_refused = matches!(failure.cause(), FailureCause::Refused(_));
        assert!(is_refused, "{address:#x} {len}: {failure}");
        assert_has(&failure, words);
        assert_has(&failure, &format!("{address:#x}"));
    }
    let calls = library.trace();
    assert_eq!(calls, ["open", "stats+"], "the library was not called");
    // Lengths need no alignment.
    let buffer = cufile.register_buffer(start + 4096, 777).unwrap();
    buffer.release().unwrap();
    assert_eq!(library.violations(), [""; 0]);
}

#[test]
fn failed_registrations_leave_nothing_behind() {
    let library = StandIn::own();
    let root = Root::new();
    let cufile = root.open(&library).unwrap();
    let mut memory = Memory::new(1 << 16);
    let start = memory.address();
    for number in [5011, 5012, 5016, 5036] {
        library.fail_register(Register::Buffer, number);
        let failure = cufile.register_buffer(start, 4096).unwrap_err();
        assert_eq!(*failure.cause(), code(number));
    }
    let buffer = cufile.register_buffer(start, 4096).unwrap();
    let failure = cufile.register_buffer(start, 4096).unwrap_err();
    assert_eq!(*failure.cause(), code(5023));
    library.fail_register(Register::BufferBack, 5010);
    let failure = buffer.release().unwrap_err();
    assert_eq!(*failure.cause(), code(5010));
    let text = failure.to_string();
    assert!(text.starts_with("cuFileBufDeregister"), "{text}");
    let left = library.counts().buffers;
    assert_eq!(left, 1, "still registered, and released only once");
}

#[test]
fn registrations_end_before_their_files_and_memory() {
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        let library = StandIn::own();
        let root = Root::new();
        let mut memory = Memory::new(1 << 16);
        let path = root.write("data", noise(100));
        let cufile = root.open(&library).unwrap();
        let mut handle = Some(cufile.register_file(direct(&path)).unwrap());
        let mut buffer = Some(cufile.register_buffer(memory.address(), 1 << 16).unwrap());
        let mut cufile = Some(cufile);
        for what in order {
            match what {
                0 => drop(cufile.take()),
                1 => drop(handle.take()),
                _ => drop(buffer.take()),
            }
        }
        assert_eq!(library.violations(), [""; 0], "{order:?}");
        assert_eq!(library.counts(), opened(1, 1));
        assert_eq!(library.trace().last().unwrap(), "close");
    }
}

// Reading.

#[test]
fn reads_are_whole_short_or_empty_like_the_file() {
    let bytes = noise(3 * 4096 + 1000);
    let mut bench = Bench::new(StandIn::own(), &bytes);
    // (length, file offset, device offset, expected bytes)
    let table = [
        (4096, 0, 0, 4096),
        (8192, 4096, 8192, 8192),
        (8192, 3 * 4096, 0, 1000),
        (4096, 4 * 4096, 0, 0),
        (4096, 1 << 40, 0, 0),
        (100, 13, 7, 100),
        (1 << 16, 0, 0, bytes.len()),
        (0, 0, 0, 0),
    ];
    for (len, from, to, expected) in table {
        bench.memory.0.fill(0xee);
        assert_eq!(bench.read(len, from, to), Ok(expected), "{len} at {from}");
        let memory = &bench.memory.0;
        let to = to as usize;
        let from = (from as usize).min(bytes.len());
        assert_eq!(memory[to..to + expected], bytes[from..from + expected]);
        let mut others = memory[..to].iter().chain(&memory[to + expected..]);
        assert!(others.all(|byte| *byte == 0xee), "{len} at {from}");
    }
    let reads = bench.library.counts().reads;
    assert_eq!(reads, 7, "an empty read makes no call");
    bench.end();
}

#[test]
fn read_faults_keep_their_code_and_the_next_read_works() {
    let mut bench = Bench::new(StandIn::own(), &noise(8192));
    let library = &bench.library;
    let again = || bench.read(8192, 0, 0);
    for errno in [1, 5, 14, 22, 28, 110] {
        library.fail_read_os(library.counts().reads as u64, errno);
        assert_eq!(*again().unwrap_err().cause(), FailureCause::Os(errno));
        assert_eq!(again(), Ok(8192));
    }
    // An errno with a cuFile code, as the real library sets it.
    library.fail_read_os(library.counts().reads as u64, 5027);
    let cause = |code| FailureCause::CuFile { code, cuda: 0 };
    assert_eq!(*again().unwrap_err().cause(), cause(5027));
    for (number, name) in failure::NAMES {
        library.fail_read(library.counts().reads as u64, number);
        let failure = again().unwrap_err();
        assert_eq!(*failure.cause(), cause(number));
        let start = format!("cuFileRead: {name} ({number})");
        assert!(failure.to_string().starts_with(&start), "{failure}");
    }
    for bytes in [0, 1, 512, 4096] {
        library.short_read(library.counts().reads as u64, bytes);
        assert_eq!(again(), Ok(bytes as usize));
    }
    assert_eq!(again(), Ok(8192));
    bench.end();
}

#[test]
fn invalid_reads_are_refused_without_a_call() {
    let [mut bench, other] = [(); 2].map(|()| Bench::new(StandIn::own(), &noise(8192)));
    let own = &bench.handle;
    let foreign = &other.handle;
    let start = bench.start;
    let table = [
        (foreign, start, 4096, 0, 0, "another driver"),
        (own, start, 4096, u64::MAX, 0, "offset"),
        (own, start, 4096, 0, u64::MAX, "offset"),
        (own, start, 4096, i64::MAX as u64 - 4095, 0, "offset"),
        (own, start, usize::MAX, 0, 0, "offset"),
        (own, u64::MAX - 4095, 4096, 0, 0, "address space"),
        (own, u64::MAX - 4095, 1, 0, 8192, "address space"),
    ];
    for (handle, address, len, from, to, words) in table {
        let failure = read(&bench.cufile, handle, address, len, from, to).unwrap_err();
        let is_named = matches!(failure.cause(), FailureCause::Refused(why) if why.contains(words));
        assert!(is_named, "{words}: {failure}");
    }
    assert_eq!(bench.library.counts().reads, 0);
    assert_eq!(other.library.counts().reads, 0);
    bench.end();
}

#[test]
fn the_stand_in_refuses_reads_that_would_bounce() {
    let mut bench = Bench::new(StandIn::own(), &noise(8192));
    let refused = |bench: &Bench, at, len, to| {
        let refused = read(&bench.cufile, &bench.handle, bench.start + at, len, 0, to);
        refused.unwrap_err().cause().clone()
    };
    assert_eq!(refused(&bench, 0, 8192, (1 << 16) - 4096), code(5017));
    assert_eq!(refused(&bench, 4096, 4096, 0), code(5024));
    bench.buffer = None;
    assert_eq!(refused(&bench, 0, 4096, 0), code(5024));
    assert_eq!(bench.library.violations().len(), 3);
    assert!(bench.memory.0.iter().all(|byte| *byte == 0xee));
}

#[test]
fn concurrent_reads_keep_the_driver_open() {
    let bytes = noise(16 * 4096);
    let bench = Bench::new(StandIn::own(), &bytes);
    bench.library.hold_reads(true);
    std::thread::scope(|scope| {
        for part in 0..8_u64 {
            let bench = &bench;
            let at = part * 2 * 4096;
            scope.spawn(move || assert_eq!(bench.read(2 * 4096, at, at), Ok(2 * 4096)));
        }
        // All eight are within the library before the first returns.
        while bench.library.held() < 8 {
            std::thread::yield_now();
        }
        bench.library.hold_reads(false);
    });
    assert_eq!(bench.memory.0[..], bytes[..]);
    let Bench {
        buffer,
        handle,
        cufile,
        library,
        ..
    } = bench;
    drop((buffer, handle, cufile));
    assert_eq!(library.violations(), [""; 0]);
    assert_eq!(library.counts().users, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn reads_return_the_bytes_of_the_file(
        size in 0_usize..40_000,
        reads in prop::collection::vec((0_usize..20_000, 0_u64..50_000, 0_u64..20_000, any::<bool>()), 1..12),
    ) {
        let bytes = noise(size);
        let mut bench = Bench::new(StandIn::own(), &bytes);
        let mut oracle = vec![0xee; 1 << 16];
        for (len, from, to, aligned) in reads {
            let unit = if aligned { 4096 } else { 1 };
            let len = len / unit * unit;
            let from = from / unit as u64 * unit as u64;
            let to = to / unit as u64 * unit as u64;
            let source = bytes.get(from as usize..).unwrap_or_default();
            let expected = source.len().min(len);
            oracle[to as usize..to as usize + expected].copy_from_slice(&source[..expected]);
            prop_assert_eq!(bench.read(len, from, to), Ok(expected));
            prop_assert_eq!(&bench.memory.0[..], &oracle[..]);
        }
        bench.end();
    }
}

// Routes of the bytes.

#[test]
fn every_version_with_statistics_shows_routes_per_gpu() {
    let table = [
        (Route::P2p, Mode::P2p),
        (Route::NvidiaFs, Mode::NvidiaFs),
        (Route::Host, Mode::Compat),
    ];
    for version in [
        (1, 15),
        (1, 16),
        (1, 17),
        (1, 18),
        (1, 19),
        (1, 20),
        (1, 21),
        (2, 3),
    ] {
        let library = StandIn::own();
        library.version(Some(version));
        library.gpus(2);
        let bench = Bench::new(library, &noise(8192));
        let cufile = &bench.cufile;
        assert!(cufile.opened.stats);
        for (route, mode) in table {
            bench.library.route(0, route);
            let before = (cufile.stats(0).unwrap(), cufile.stats(1).unwrap());
            assert_eq!(before.0.scope, Scope::Gpu { uuid: [1; 16] });
            assert_eq!(bench.read(8192, 0, 0), Ok(8192));
            let after = (cufile.stats(0).unwrap(), cufile.stats(1).unwrap());
            assert_eq!(Mode::between(&before.0, &after.0), mode, "{version:?}");
            assert_eq!(after.0.reads, before.0.reads + 1);
            assert_eq!(before.1, after.1, "the other GPU received no reads");
            assert_eq!(Mode::between(&before.1, &after.1), Mode::Unknown);
        }
        assert_eq!(cufile.stats(2), None);
        bench.library.gpus_at(1256);
        if version > (1, 20) {
            assert_eq!(cufile.stats(0), None, "a grown layout is refused");
            let text = "Reads\t: n=7 ok=7 err=0 readMiB=1 io_state_err=0\n";
            bench.root.write("proc/driver/nvidia-fs/stats", text);
            let scope = cufile.stats(0).unwrap().scope;
            assert_eq!(scope, Scope::Machine, "but nvidia-fs is");
        }
    }
}

#[test]
fn unaligned_reads_count_as_host_reads() {
    let bench = Bench::new(StandIn::own(), &noise(8192));
    let before = bench.cufile.stats(0).unwrap();
    for (len, from, to) in [
        (4096, 0, 0),
        (4096, 4096, 512),
        (4096, 4096, 4096),
        (100, 0, 0),
        (4096, 1, 0),
    ] {
        bench.read(len, from, to).unwrap();
    }
    let after = bench.cufile.stats(0).unwrap();
    let mode = Mode::Mixed { direct: 2, host: 3 };
    assert_eq!(Mode::between(&before, &after), mode);
}

#[test]
fn old_libraries_use_the_text_of_nvidia_fs() {
    let library = StandIn::own_with(&["without_stats"]);
    library.version(Some((1, 11)));
    let bench = Bench::new(library, &noise(8192));
    let Bench { cufile, root, .. } = &bench;
    assert_eq!(cufile.stats(0), None);
    let stats = |ok: u64| {
        let text =
            format!("IO stats: Enabled\nReads\t: n={ok} ok={ok} err=0 readMiB=1 io_state_err=0\n");
        root.write("proc/driver/nvidia-fs/stats", text);
        cufile.stats(0).unwrap()
    };
    let before = stats(10);
    assert_eq!(before.scope, Scope::Machine);
    for _ in 0..3 {
        bench.read(8192, 0, 0).unwrap();
    }
    for (ok, mode) in [
        (13, Mode::NvidiaFs),
        (11, Mode::Mixed { direct: 1, host: 2 }),
        (10, Mode::Unknown),
    ] {
        assert_eq!(Mode::between(&before, &stats(ok)), mode);
    }
}

#[test]
fn statistics_raise_the_level_of_the_library() {
    let library = StandIn::own();
    let root = Root::new();
    library.set_level(1);
    drop(root.open(&library).unwrap());
    assert_eq!(library.level(), 3);
}

// The real library.

#[test]
fn the_real_library_opens_and_reads_or_explains() {
    let Some(real) = std::env::var_os("FEEDLINE_CUFILE_REAL") else {
        println!("skipped: FEEDLINE_CUFILE_REAL names no libcufile");
        return;
    };
    let folder = standin::folder();
    let there = alone("the_real_library_opens_and_reads_or_explains", |child| {
        child
            .env("CUFILE_LOGFILE_PATH", folder.join("cufile.log"))
            .current_dir(&folder);
    });
    if !there {
        return;
    }
    let root = Root::new();
    let options = Options {
        library: Some(real.into()),
        ..Options::default()
    };
    let cufile = match CuFile::open_with(&options) {
        Ok(cufile) => cufile,
        Err(absent) => {
            println!("absent: {absent}");
            assert!(!matches!(absent, Absent::NoLibrary { .. }));
            assert!(!matches!(absent, Absent::NoSymbol { .. }));
            if matches!(absent, Absent::NoModules { .. }) {
                // Shows the purpose of the check: without it, the library does not return, or fails
                // otherwise.
                let options = Options {
                    root: root.0.clone(),
                    deadline: Duration::from_secs(2),
                    ..options
                };
                let absent = CuFile::open_with(&options).unwrap_err();
                println!("without that check: {absent}");
            }
            return;
        }
    };
    let has_statistics = cufile.opened.stats;
    let statistics = cufile.stats(0);
    println!("{cufile:?}, statistics: {has_statistics}, of GPU 0: {statistics:?}");
    assert!(cufile.version.unwrap() >= absent::OLDEST);
    let bytes = noise(3 * 4096 + 1000);
    let path = root.write("data", &bytes);
    let handle = match cufile.register_file(direct(&path)) {
        Ok(handle) => handle,
        Err(failure) => return println!("no file: {failure}"),
    };
    // The library also accepts host memory, and reads into it without a GPU.
    let mut memory = Memory::new(1 << 16);
    let start = memory.address();
    let buffer = match cufile.register_buffer(start, 1 << 16) {
        Ok(buffer) => buffer,
        Err(failure) => return println!("no buffer: {failure}"),
    };
    assert_eq!(read(&cufile, &handle, start, 8192, 4096, 8192), Ok(8192));
    assert_eq!(memory.0[8192..16384], bytes[4096..12288]);
    assert_eq!(read(&cufile, &handle, start, 8192, 3 * 4096, 0), Ok(1000));
    assert_eq!(memory.0[..1000], bytes[3 * 4096..]);
    assert_eq!(read(&cufile, &handle, start, 4096, 1 << 30, 0), Ok(0));
    let statistics = cufile.stats(0);
    println!("read into memory of the host; of GPU 0: {statistics:?}");
    buffer.release().unwrap();
    drop((handle, cufile));
}
