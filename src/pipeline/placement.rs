//! Where the threads of a loader run, and so where its memory lies: on the NUMA node next to the device.
//!
//! ```text
//! device ──PCI address──► its node ──► the node's CPUs ∩ those the process may use ──► threads ──first touch──► memory
//!          (the driver)   (sysfs)      (sysfs)           (sched_getaffinity)
//! ```
//!
//! Threads inherit the CPUs of the thread that starts them, and pages come from the node of the CPU that touches them
//! first. So nothing is placed by itself: [`on_node`] runs what starts threads and populates memory on a thread of the
//! node. The caller's own thread stays as it is.
//!
//! Limits: never wider than what the process may use (cpusets of Slurm and Kubernetes, `taskset`); at most 1024 CPUs
//! (what [`CpuSet`] holds); a memory policy of the process (`numactl --interleave`) and a node that is full win over
//! first touch. What cannot be had is a reason in words: an error when a node was asked for, a line of the report when not.

use crate::error::{Error, ErrorKind, Result, Stage};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fmt;
use std::path::{Path, PathBuf};

/// Where a loader's threads run and its host memory lies, on machines with several NUMA nodes.
///
/// A copy to a GPU from the memory of the other socket is slower, and takes from what the sockets share. The report says in
/// one line what was done or why not; the thread that calls `build` is left as it is. `numactl`, `taskset` and the cpusets of
/// Slurm and Kubernetes are honoured: nothing runs on a CPU that the process may not use.
///
/// ```
/// use feedline::{Device, Loader, Numa, dataset::Records};
///
/// // A loader per device: each finds its own node (the host has none).
/// for device in [Device::host(), Device::host()] {
///     let records = Records::builder(1).open_bytes([0; 100])?;
///     let loader = Loader::builder(records).device(device).numa(Numa::Auto).build()?;
///     assert_eq!(loader.report().numa, None); // "threads and memory on NUMA node 1 (16 CPUs: 16-31), next to …"
/// }
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Numa {
    /// Next to the device, where the machine says which node that is. With more [workers](crate::LoaderBuilder::workers)
    /// than the node has CPUs the workers run anywhere, and only memory and reads are placed. Not where the process may
    /// use so few of the node's CPUs that the others would lie idle. Nothing on the host.
    #[default]
    Auto,
    /// Wherever the kernel puts them.
    Off,
    /// On this node, workers too. `build` fails with [`ErrorKind::Config`](crate::ErrorKind::Config) where that cannot be.
    Node(u32),
}

/// The CPUs of a node that the process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    cpus: CpuSet,
    node: u32,
    /// Why this node; ends the report's line.
    why: String,
}

/// What became of the wish to be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placing {
    /// Nobody wished.
    Unasked,
    At(Placement),
    /// The reason.
    Refused(String),
}

/// What a reason is before it is a line of the report or an error.
type Why<T> = std::result::Result<T, String>;

impl Placing {
    /// Finds the place for `numa` and the device at `pci_bus_id`, on the machine that `sysfs` (`/sys`) shows.
    ///
    /// Errors: [`ErrorKind::Config`] when a node was asked for by number that cannot be had.
    pub(crate) fn new(numa: Numa, pci_bus_id: Option<&str>, sysfs: &Path) -> Result<Self> {
        let found = match (numa, pci_bus_id) {
            (Numa::Off, _) | (Numa::Auto, None) => return Ok(Self::Unasked),
            (Numa::Auto, Some(device)) => Machine::here(sysfs).and_then(|machine| Placement::near(&machine, device)),
            (Numa::Node(node), _) => Machine::here(sysfs).and_then(|machine| Placement::on(&machine, node)),
        };
        // Some sandboxes let nobody choose CPUs: better known before anything depends on it.
        let tried = |placement: Placement| match on_node(Some(&placement), || ()) {
            Ok(()) => Ok(placement),
            Err(error) => Err(error.to_string()),
        };
        match (found.and_then(tried), numa) {
            (Ok(placement), _) => Ok(Self::At(placement)),
            (Err(why), Numa::Node(node)) => {
                let message = format!("`Numa::Node({node})` cannot be had: {why}");
                Err(Error::new(ErrorKind::Config, Stage::Build, message))
            }
            (Err(why), _) => Ok(Self::Refused(why)),
        }
    }

    /// The place, if there is one.
    pub(crate) fn placement(&self) -> Option<&Placement> {
        match self {
            Self::At(placement) => Some(placement),
            Self::Unasked | Self::Refused(_) => None,
        }
    }

    /// The place of `workers` threads: [`Numa::Auto`] does not put more on a node than it has CPUs.
    pub(crate) fn for_workers(&self, numa: Numa, workers: usize) -> Option<&Placement> {
        self.placement().filter(|placement| numa != Numa::Auto || workers <= placement.cpus())
    }

    /// The report's line.
    pub(crate) fn line(&self, numa: Numa, workers: usize) -> Option<String> {
        match self {
            Self::Unasked => None,
            Self::Refused(why) => Some(format!("not placed: {why}")),
            Self::At(placement) if self.for_workers(numa, workers).is_some() => {
                Some(format!("threads and memory on {placement}"))
            }
            Self::At(placement) => Some(format!(
                "memory and reads on {placement}; its CPUs are fewer than the {workers} workers, which run anywhere"
            )),
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, cpus, why } = self;
        write!(f, "NUMA node {node} ({} CPUs: {}), {why}", self.cpus(), in_words(cpus))
    }
}

impl Placement {
    /// Next to the device at `pci_bus_id`.
    fn near(machine: &Machine, pci_bus_id: &str) -> Why<Self> {
        let nodes = machine.nodes()?;
        let with_cpus = nodes.iter().filter(|(_, cpus)| cpus.count() > 0).count();
        if with_cpus < 2 {
            return Err("the machine has one NUMA node".into());
        }
        let address = pci_address(pci_bus_id)?;
        let node = machine.node_of(&address)?;
        let cpus = machine.usable(&nodes, node)?;
        let placement = Self { cpus, node, why: format!("next to the device at PCI {address}") };
        let used = nodes.iter().filter(|(_, cpus)| both(cpus, &machine.cpus).count() > 0).count() as u32;
        // Far from an equal share: whoever chose the process's CPUs did not mean this node, or not this device.
        if cpus.count().saturating_mul(2).saturating_mul(used) < machine.cpus.count() {
            return Err(format!(
                "only {} of the {} CPUs that the process may use are on NUMA node {node}, next to the device",
                cpus.count(),
                machine.cpus.count()
            ));
        }
        Ok(placement)
    }

    /// On the node of that number.
    fn on(machine: &Machine, node: u32) -> Why<Self> {
        Ok(Self { cpus: machine.usable(&machine.nodes()?, node)?, node, why: "as asked for".into() })
    }

    /// Number of CPUs, at least 1.
    pub(crate) fn cpus(&self) -> usize {
        self.cpus.count() as usize
    }

    /// From here on the calling thread, and the threads that it starts, run on these CPUs.
    ///
    /// Errors: what the kernel says, for example that the process may not use them any more.
    pub(crate) fn apply_here(&self) -> Result<()> {
        sched_setaffinity(None, &self.cpus).map_err(|errno| {
            let message = format!("no thread can be bound to the CPUs {}", in_words(&self.cpus));
            Error::os(Stage::Build, message, errno.into())
        })
    }
}

/// Runs `work` on a thread that is placed, and waits for it: threads that it starts are placed, memory that it touches
/// first comes from the node. Without a placement it runs here. A panic goes on here.
///
/// Errors: the thread cannot be started or placed; then `work` was not begun.
pub(crate) fn on_node<T: Send>(placement: Option<&Placement>, work: impl FnOnce() -> T + Send) -> Result<T> {
    let Some(placement) = placement else { return Ok(work()) };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("feedline-build".into());
        let started = thread.spawn_scoped(scope, || placement.apply_here().map(|()| work()));
        let started = started.map_err(|source| Error::os(Stage::Build, "cannot start a thread to build on", source))?;
        started.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What placing depends on.
struct Machine {
    sysfs: PathBuf,
    /// CPUs that the process may use.
    cpus: CpuSet,
    /// Nodes whose memory it may take; `None` where the kernel does not say.
    memory: Option<CpuSet>,
}

impl Machine {
    fn here(sysfs: &Path) -> Why<Self> {
        let cpus = sched_getaffinity(None)
            .map_err(|errno| format!("the kernel does not say which CPUs the process may use ({errno})"))?;
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        Ok(Self { sysfs: sysfs.into(), cpus, memory: memory_nodes(&status) })
    }

    /// All nodes and their CPUs, by number.
    fn nodes(&self) -> Why<Vec<(u32, CpuSet)>> {
        let folder = self.sysfs.join("devices/system/node");
        let entries = std::fs::read_dir(&folder)
            .map_err(|error| format!("the kernel shows no NUMA nodes ({}: {error})", folder.display()))?;
        let mut nodes = Vec::new();
        for name in entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            let Some(node) = name.strip_prefix("node").and_then(number) else { continue };
            let file = folder.join(&name).join("cpulist");
            let text = read(&file)?;
            let cpus = cpu_list(&text).ok_or_else(|| format!("{} is no list of CPUs: {text:?}", file.display()))?;
            nodes.push((node, cpus));
        }
        nodes.sort_unstable_by_key(|(node, _)| *node);
        Ok(nodes)
    }

    /// The node next to the device at `address`.
    fn node_of(&self, address: &str) -> Why<u32> {
        let file = self.sysfs.join("bus/pci/devices").join(address).join("numa_node");
        let text = read(&file)?;
        match text.trim().parse::<i64>() {
            Ok(node) if node < 0 => {
                Err(format!("the machine does not say which NUMA node the device at PCI {address} is next to"))
            }
            Ok(node) if u32::try_from(node).is_ok() => Ok(node as u32),
            _ => Err(format!("{} is no number of a node: {text:?}", file.display())),
        }
    }

    /// The CPUs of `node` that the process may use; at least one.
    fn usable(&self, nodes: &[(u32, CpuSet)], node: u32) -> Why<CpuSet> {
        let Some((_, cpus)) = nodes.iter().find(|(number, _)| *number == node) else {
            let all = nodes.iter().map(|(number, _)| number.to_string()).collect::<Vec<_>>().join(", ");
            return Err(format!("the machine has no NUMA node {node}, its nodes are {all}"));
        };
        if cpus.count() == 0 {
            return Err(format!("NUMA node {node} has no CPUs"));
        }
        let usable = both(cpus, &self.cpus);
        if usable.count() == 0 {
            let (cpus, own) = (in_words(cpus), in_words(&self.cpus));
            return Err(format!("the process may use the CPUs {own}, and NUMA node {node} has {cpus}"));
        }
        match &self.memory {
            Some(memory) if !holds(memory, node as usize) => {
                Err(format!("the process may take memory of NUMA node {} only, not of {node}", in_words(memory)))
            }
            _ => Ok(usable),
        }
    }
}

fn read(file: &Path) -> Why<String> {
    std::fs::read_to_string(file).map_err(|error| format!("{} cannot be read: {error}", file.display()))
}

/// The name in sysfs of what drivers call `0000:65:00.0`, `00000000:65:00.0` or, without a domain, `65:00.0`.
fn pci_address(text: &str) -> Why<String> {
    let parts = || {
        let (rest, function) = text.trim().rsplit_once('.')?;
        let (rest, device) = rest.rsplit_once(':')?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
        let hex = |part: &str, digits: usize| {
            let legal = (1..=digits).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            if legal { u32::from_str_radix(part, 16).ok() } else { None }
        };
        Some((hex(domain, 8)?, hex(bus, 2)?, hex(device, 2)?, hex(function, 1)?))
    };
    let (domain, bus, device, function) = parts().ok_or_else(|| format!("{text:?} is no address on the PCI bus"))?;
    Ok(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// Digits alone; `parse` would take a sign.
fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// The kernel's format of lists: `0-3,8,10-11`, or nothing. Numbers that no [`CpuSet`] holds are left out.
fn cpu_list(text: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    let text = text.trim();
    if text.is_empty() {
        return Some(set);
    }
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number::<usize>(first)?, number::<usize>(last)?);
        if first > last {
            return None;
        }
        (first..=last.min(CpuSet::MAX_CPU - 1)).for_each(|cpu| set.set(cpu));
    }
    Some(set)
}

/// As [`cpu_list`] reads it.
fn in_words(set: &CpuSet) -> String {
    let mut words = Vec::new();
    let mut cpu = 0;
    while cpu < CpuSet::MAX_CPU {
        let run = (cpu..CpuSet::MAX_CPU).take_while(|cpu| set.is_set(*cpu)).count();
        match run {
            0 => {}
            1 => words.push(cpu.to_string()),
            _ => words.push(format!("{cpu}-{}", cpu + run - 1)),
        }
        cpu += run + 1;
    }
    words.join(",")
}

fn both(a: &CpuSet, b: &CpuSet) -> CpuSet {
    let mut both = CpuSet::new();
    (0..CpuSet::MAX_CPU).filter(|cpu| a.is_set(*cpu) && b.is_set(*cpu)).for_each(|cpu| both.set(cpu));
    both
}

fn holds(set: &CpuSet, number: usize) -> bool {
    number < CpuSet::MAX_CPU && set.is_set(number)
}

/// `Mems_allowed_list` of a thread's status: numbers of nodes, in the same format.
fn memory_nodes(status: &str) -> Option<CpuSet> {
    cpu_list(status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A made-up `/sys`, removed at the end.
    pub(crate) struct Sysfs(PathBuf);

    impl Sysfs {
        pub(crate) fn new(nodes: &[(u32, &str)], devices: &[(&str, &str)]) -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let name = format!("feedline-sysfs-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let sysfs = Self(std::env::temp_dir().join(name));
            // What else lies there must not be taken for a node.
            sysfs.write("devices/system/node/has_cpu", "0\n");
            sysfs.write("devices/system/node/nodes", "\n");
            for (node, cpus) in nodes {
                sysfs.write(&format!("devices/system/node/node{node}/cpulist"), cpus);
            }
            for (address, node) in devices {
                sysfs.write(&format!("bus/pci/devices/{address}/numa_node"), node);
            }
            sysfs
        }

        /// A machine of two nodes: one CPU of this process is alone on the first of them, the other is a CPU that is
        /// nowhere. And the first one's number: a node whose memory this process may take.
        pub(crate) fn around(cpu: &str) -> (Self, u32) {
            let memory = Machine::here(Path::new("/")).unwrap().memory;
            let own =
                memory.and_then(|memory| (0..CpuSet::MAX_CPU).find(|node| memory.is_set(*node))).unwrap_or(0) as u32;
            (Self::new(&[(own, cpu), (own + 1, "1023")], &[(GPU, &own.to_string())]), own)
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        pub(crate) fn root(&self) -> &Path {
            &self.0
        }

        fn machine(&self, cpus: &str) -> Machine {
            Machine { sysfs: self.0.clone(), cpus: cpu_list(cpus).unwrap(), memory: None }
        }
    }

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A CPU that this process may use, and all of them.
    pub(crate) fn own_cpus() -> (String, String) {
        let own = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| own.is_set(*cpu)).unwrap();
        (last.to_string(), in_words(&own))
    }

    /// The CPUs of the calling thread.
    pub(crate) fn here() -> String {
        in_words(&sched_getaffinity(None).unwrap())
    }

    /// A placement on these CPUs, whatever the machine.
    pub(crate) fn placement(cpus: &str) -> Placement {
        Placement { cpus: cpu_list(cpus).unwrap(), node: 0, why: "for a test".into() }
    }

    const TWO: [(u32, &str); 2] = [(0, "0-15,32-47\n"), (1, "16-31,48-63\n")];
    const GPU: &str = "0000:65:00.0";

    #[test]
    fn the_place_is_the_cpus_of_the_devices_node_that_the_process_may_use() {
        let sysfs = Sysfs::new(&TWO, &[(GPU, "1\n"), ("0000:b3:00.0", "0\n"), ("10001:01:00.0", "1\n")]);
        let table = [
            ("0-63", GPU, 1, "16-31,48-63"),
            ("0-63", "0000:65:00.0\n", 1, "16-31,48-63"),
            ("0-63", "00000000:65:00.0", 1, "16-31,48-63"),
            ("0-63", "65:00.0", 1, "16-31,48-63"),
            ("0-63", "0000:B3:00.0", 0, "0-15,32-47"),
            ("0-63", "00010001:01:00.0", 1, "16-31,48-63"),
            ("12-19", GPU, 1, "16-19"),
            ("20,50", GPU, 1, "20,50"),
            // A little less than an equal share is enough.
            ("10-18", GPU, 1, "16-18"),
        ];
        for (own, device, node, cpus) in table {
            let placement = Placement::near(&sysfs.machine(own), device).unwrap();
            assert_eq!((placement.node, in_words(&placement.cpus)), (node, cpus.into()), "{device} {own}");
        }
    }

    #[test]
    fn every_reason_not_to_be_placed_is_a_sentence_that_names_what_was_found() {
        let sysfs =
            Sysfs::new(&TWO, &[(GPU, "1\n"), ("0000:01:00.0", "-1\n"), ("0000:02:00.0", "7"), ("0000:03:00.0", "x")]);
        let table = [
            (
                "0-63",
                "0000:01:00.0",
                "the machine does not say which NUMA node the device at PCI 0000:01:00.0 is next to",
            ),
            ("0-63", "0000:02:00.0", "the machine has no NUMA node 7, its nodes are 0, 1"),
            ("0-63", "0000:03:00.0", "is no number of a node: \"x\""),
            ("0-63", "0000:99:00.0", "bus/pci/devices/0000:99:00.0/numa_node cannot be read: No such file"),
            ("0-63", "../../etc", "\"../../etc\" is no address on the PCI bus"),
            ("0-15", GPU, "the process may use the CPUs 0-15, and NUMA node 1 has 16-31,48-63"),
            ("0-7,16", GPU, "only 1 of the 9 CPUs that the process may use are on NUMA node 1, next to the device"),
        ];
        for (own, device, words) in table {
            let why = Placement::near(&sysfs.machine(own), device).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
        let machine = Machine { sysfs: "/nowhere".into(), ..sysfs.machine("0") };
        let why = Placement::near(&machine, GPU).unwrap_err();
        assert!(why.starts_with("the kernel shows no NUMA nodes (/nowhere/devices/system/node"), "{why}");
        let machine = Machine { memory: cpu_list("0"), ..sysfs.machine("0-63") };
        let why = Placement::near(&machine, GPU).unwrap_err();
        assert_eq!(why, "the process may take memory of NUMA node 0 only, not of 1");
        let broken = Sysfs::new(&[(0, "0-3"), (1, "7-4")], &[(GPU, "0")]);
        let why = Placement::near(&broken.machine("0-7"), GPU).unwrap_err();
        assert!(why.ends_with("node1/cpulist is no list of CPUs: \"7-4\""), "{why}");
    }

    #[test]
    fn a_machine_of_one_node_with_cpus_is_left_alone_but_its_node_can_be_asked_for() {
        // The second node is memory alone, as that of a GPU may be.
        let sysfs = Sysfs::new(&[(0, "0-3"), (1, "\n")], &[(GPU, "0")]);
        let machine = sysfs.machine("1-2");
        assert_eq!(Placement::near(&machine, GPU).unwrap_err(), "the machine has one NUMA node");
        assert_eq!(in_words(&Placement::on(&machine, 0).unwrap().cpus), "1-2");
        assert_eq!(Placement::on(&machine, 1).unwrap_err(), "NUMA node 1 has no CPUs");
    }

    #[test]
    fn this_machine_is_found_out_without_an_error() {
        let root = Path::new("/sys");
        let nodes = Machine::here(root).and_then(|machine| machine.nodes());
        match Placing::new(Numa::Auto, Some("ffff:ff:1f.7"), root).unwrap() {
            Placing::Refused(why) if nodes.is_ok_and(|nodes| nodes.len() == 1) => {
                assert_eq!(why, "the machine has one NUMA node")
            }
            Placing::Refused(_) => {}
            other => panic!("there is no such device, and still: {other:?}"),
        }
    }

    #[test]
    fn nothing_is_looked_at_when_nobody_asks() {
        let nowhere = Path::new("/nowhere");
        for (numa, device) in [(Numa::Off, Some(GPU)), (Numa::Off, None), (Numa::Auto, None)] {
            let placing = Placing::new(numa, device, nowhere).unwrap();
            assert_eq!((placing.line(numa, 1), placing), (None, Placing::Unasked));
        }
        let placing = Placing::new(Numa::Auto, Some(GPU), nowhere).unwrap();
        assert!(placing.line(Numa::Auto, 1).unwrap().starts_with("not placed: the kernel shows no NUMA nodes"));
        let error = Placing::new(Numa::Node(3), None, nowhere).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("`Numa::Node(3)` cannot be had: the kernel shows no NUMA nodes"), "{error}");
    }

    #[test]
    fn more_workers_than_the_node_has_cpus_run_anywhere_unless_the_node_was_asked_for() {
        let (cpu, _) = own_cpus();
        let (sysfs, own) = Sysfs::around(&cpu);
        let find = || Placing::new(Numa::Auto, Some(GPU), sysfs.root()).unwrap();
        // From a thread of one CPU, so that it does not matter how many this machine has.
        let auto = on_node(Some(&placement(&cpu)), find).unwrap();
        let placed = format!("NUMA node {own} (1 CPUs: {cpu}), next to the device at PCI {GPU}");
        assert_eq!(auto.line(Numa::Auto, 1).unwrap(), format!("threads and memory on {placed}"));
        assert!(auto.for_workers(Numa::Auto, 1).is_some() && auto.for_workers(Numa::Auto, 2).is_none());
        let expected = "its CPUs are fewer than the 2 workers, which run anywhere";
        assert_eq!(auto.line(Numa::Auto, 2).unwrap(), format!("memory and reads on {placed}; {expected}"));
        let node = Numa::Node(own);
        let asked = Placing::new(node, None, sysfs.root()).unwrap();
        assert!(asked.for_workers(node, 2).is_some());
        let line = asked.line(node, 2).unwrap();
        assert_eq!(line, format!("threads and memory on NUMA node {own} (1 CPUs: {cpu}), as asked for"));
    }

    #[test]
    fn work_runs_where_it_is_placed_its_threads_too_and_the_caller_stays() {
        let (cpu, all) = own_cpus();
        let (own, child) =
            on_node(Some(&placement(&cpu)), || (here(), std::thread::spawn(here).join().unwrap())).unwrap();
        assert_eq!((own, child), (cpu.clone(), cpu));
        assert_eq!(here(), all);
        let caller = std::thread::current().id();
        assert_eq!(on_node(None, || std::thread::current().id()).unwrap(), caller);
    }

    #[test]
    fn cpus_that_are_not_there_are_a_typed_error_and_the_work_is_not_begun() {
        let nowhere = placement("1023");
        if own_cpus().0 == "1023" {
            return;
        }
        let error = on_node(Some(&nowhere), || -> () { panic!("must not run") }).unwrap_err();
        assert!(error.to_string().contains("no thread can be bound to the CPUs 1023"), "{error}");
    }

    #[test]
    fn a_panic_goes_on_in_the_caller() {
        let place = placement(&own_cpus().0);
        let panic =
            std::panic::catch_unwind(|| on_node(Some(&place), || -> () { panic!("of the work") })).err().unwrap();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"of the work"));
    }

    /// The oracle: every number, one by one.
    fn naive(text: &str) -> Option<BTreeSet<usize>> {
        let mut set = BTreeSet::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let ends: Vec<_> = part.split('-').collect();
            if ends.len() > 2 || ends.iter().any(|end| end.is_empty() || !end.chars().all(|c| c.is_ascii_digit())) {
                return None;
            }
            let ends: Vec<usize> = ends.iter().map(|end| end.parse().unwrap()).collect();
            let mut cpu = ends[0];
            if cpu > ends[ends.len() - 1] {
                return None;
            }
            while cpu <= ends[ends.len() - 1] {
                set.insert(cpu);
                cpu += 1;
            }
        }
        Some(set.into_iter().filter(|cpu| *cpu < 1024).collect())
    }

    fn members(set: &CpuSet) -> BTreeSet<usize> {
        (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
    }

    proptest! {
        #[test]
        fn lists_mean_what_they_mean_number_by_number(
            parts in prop::collection::vec((0_usize..1200, prop::option::of(0_usize..80)), 0..12), end in "\n?"
        ) {
            let part = |(first, more): &(usize, Option<usize>)| match more {
                Some(more) => format!("{first}-{}", first + more),
                None => first.to_string(),
            };
            let text = parts.iter().map(part).collect::<Vec<_>>().join(",") + &end;
            let set = cpu_list(&text).unwrap();
            prop_assert_eq!(members(&set), naive(&text).unwrap());
            prop_assert_eq!(cpu_list(&in_words(&set)).unwrap(), set);
        }

        #[test]
        fn any_other_text_is_taken_or_refused_as_by_the_oracle(text in "[0-9,x+ -]{0,8}") {
            prop_assert_eq!(cpu_list(&text).map(|set| members(&set)), naive(&text), "{}", text);
        }

        #[test]
        fn no_address_leads_out_of_the_folder_of_devices(text in "\\PC{0,20}|[0-9a-fA-F:./]{0,20}") {
            if let Ok(address) = pci_address(&text) {
                prop_assert!(address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.'), "{}", address);
                prop_assert_eq!(address.matches('.').count(), 1);
            }
        }
    }

    #[test]
    fn endless_and_overflowing_lists_end_at_once() {
        assert_eq!(cpu_list(&format!("0-{}", usize::MAX)).unwrap().count(), 1024);
        assert_eq!(cpu_list("5000000000-6000000000").unwrap().count(), 0);
        assert_eq!(cpu_list("0-99999999999999999999999"), None);
    }

    #[test]
    fn nodes_of_memory_are_read_from_the_status_of_a_thread() {
        let status = "Name:\tx\nMems_allowed:\t00000000,00000005\nMems_allowed_list:\t0,2\n";
        assert_eq!(in_words(&memory_nodes(status).unwrap()), "0,2");
        assert_eq!(memory_nodes("Name:\tx\n"), None);
    }
}
