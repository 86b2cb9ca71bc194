//! Placement: a loader's threads run on the CPUs next to the device, so its memory is allocated
//! there.
//!
//! ```text
//! device ──PCI address──► the CPUs next to it ∩ the CPUs of the process ──► threads ──first touch──► memory
//!          (the driver)   (sysfs)               (sched_getaffinity)
//! ```
//!
//! Threads inherit the CPUs of the thread that starts them. Pages come from the node of the CPU
//! that touches them first. So [`on_node`] starts threads and populates memory from a thread on
//! those CPUs. The caller's own thread is not moved.
//!
//! Limits: never wider than the CPUs of the process (cpusets of Slurm and Kubernetes, `taskset`);
//! at most 1024 CPUs (the size of [`CpuSet`]). A memory policy of the process
//! (`numactl --interleave`, `cpuset.mems`) and a full node override first touch. If threads cannot
//! be placed, the reason is an error for a requested node, otherwise a line of the report.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::thread;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fmt;
use std::path::Path;

/// Where a loader's threads run and its host memory is allocated, on machines with several NUMA
/// nodes.
///
/// A copy to a GPU from the other socket's memory is slower, and uses bandwidth that the sockets
/// share. One line of the report gives the placement, or the reason for none. The thread that calls
/// `build` is not moved. `numactl`, `taskset` and the cpusets of Slurm and Kubernetes are honoured:
/// no thread runs on a CPU that the process may not use.
///
/// ```
/// use feedline::memory::Numa;
/// use feedline::{Device, Loader, dataset::Records};
///
/// // One loader per device; each finds its own node (the host has none).
/// for device in [Device::host(), Device::host()] {
///     let records = Records::builder(1).open_bytes([0; 100])?;
///     let loader = Loader::builder(records).device(device).tuning(|t| t.numa(Numa::Auto)).build()?;
///     // With a device: "threads and memory on the NUMA node of the device at PCI … (16 CPUs: 16-31)"
///     assert_eq!(loader.report().numa, None);
/// }
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Numa {
    /// Use the CPUs next to the device, if the machine reports them. If there are more
    /// [workers](crate::LoaderBuilder::workers) than these CPUs, workers run anywhere, and only
    /// memory and reads are placed. A process with few of these CPUs and many others is not placed,
    /// because its workers would compete for these few. No effect on the host.
    #[default]
    Auto,
    /// Leave the placement to the kernel.
    Off,
    /// Use this node, for workers too. `build` fails with
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if it cannot use the node.
    Node(u32),
}

/// CPUs that the process may use, and a description of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    cpus: CpuSet,
    place: String,
}

/// Whether the loader is placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placing {
    /// Placement is not needed.
    Unasked,
    At(Placement),
    /// The loader is not placed, for this reason.
    Refused(String),
}

/// A result whose error is only the reason as text. The caller turns it into a line of the report
/// or an error.
type Why<T> = std::result::Result<T, String>;

impl Placing {
    /// Finds the placement for `numa` and the device at `pci_bus_id`, on the machine that `sysfs`
    /// (`/sys`) describes.
    ///
    /// Errors: [`ErrorKind::Unsupported`] if the process cannot run on the requested node.
    pub(crate) fn new(numa: Numa, pci_bus_id: Option<&str>, sysfs: &Path) -> Result<Self> {
        let own = || {
            let own = sched_getaffinity(None);
            own.map_err(|errno| {
                format!("cannot ask the kernel for the CPUs of the process ({errno})")
            })
        };
        let found = match (numa, pci_bus_id) {
            (Numa::Off, _) | (Numa::Auto, None) => return Ok(Self::Unasked),
            (Numa::Auto, Some(device)) => {
                own().and_then(|own| Placement::near(sysfs, device, &own))
            }
            (Numa::Node(node), _) => own().and_then(|own| Placement::on(sysfs, node, &own)),
        };
        // Some sandboxes forbid setting the CPU affinity, so it is tried before anything depends on
        // it.
        match (
            found.and_then(|placement| match on_node(Some(&placement), || ()) {
                Ok(()) => Ok(placement),
                Err(error) => Err(error.to_string()),
            }),
            numa,
        ) {
            (Ok(placement), _) => Ok(Self::At(placement)),
            (Err(why), Numa::Node(node)) => Err(Error::new(
                ErrorKind::Unsupported,
                Stage::Build,
                format!("NUMA node {node}: {why}"),
            )),
            (Err(why), _) => Ok(Self::Refused(why)),
        }
    }

    /// The placement, if any.
    pub(crate) fn placement(&self) -> Option<&Placement> {
        match self {
            Self::At(placement) => Some(placement),
            Self::Unasked | Self::Refused(_) => None,
        }
    }

    /// The placement of `workers` threads. [`Numa::Auto`] puts no more threads on a node than it
    /// has CPUs.
    pub(crate) fn for_workers(&self, numa: Numa, workers: usize) -> Option<&Placement> {
        self.placement()
            .filter(|placement| numa != Numa::Auto || workers <= placement.cpus())
    }

    /// The line in the report.
    pub(crate) fn line(&self, numa: Numa, workers: usize) -> Option<String> {
        match self {
            Self::Unasked => None,
            Self::Refused(why) => Some(format!("not placed: {why}")),
            Self::At(placement) if self.for_workers(numa, workers).is_some() => {
                Some(format!("threads and memory on {placement}"))
            }
            Self::At(placement) => Some(format!(
                "memory and reads on {placement}; its CPUs are fewer than the {workers} \
                 workers, which run anywhere"
            )),
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({} CPUs: {})",
            self.place,
            self.cpus(),
            listed(&self.cpus)
        )
    }
}

impl Placement {
    /// The CPUs next to the device at `pci_bus_id`, among the process's CPUs `own`.
    fn near(sysfs: &Path, pci_bus_id: &str, own: &CpuSet) -> Why<Self> {
        let address = pci_address(pci_bus_id)?;
        let local = read_cpus(&sysfs.join(format!("bus/pci/devices/{address}/local_cpulist")))?;
        let online = read_cpus(&sysfs.join("devices/system/cpu/online"))?;
        // True if the machine has one node, or does not know the device's node.
        if both(&local, &online) == online {
            return Err("all CPUs of the machine are next to the device".into());
        }
        let placement = Self::of(
            &local,
            own,
            format!("the NUMA node of the device at PCI {address}"),
        )?;
        let near = placement.cpus.count();
        let all = own.count();
        // The process has less than half of the CPUs near the device that an even share would
        // contain. The default number of workers would shrink to these few.
        if u64::from(near) * 2 * u64::from(online.count())
            < u64::from(all) * u64::from(local.count())
        {
            return Err(format!(
                "only {near} of the {all} CPUs that the process may use are next to the device"
            ));
        }
        Ok(placement)
    }

    /// The CPUs of node `node`, among the process's CPUs `own`.
    fn on(sysfs: &Path, node: u32, own: &CpuSet) -> Why<Self> {
        let cpus = read_cpus(&sysfs.join(format!("devices/system/node/node{node}/cpulist")))?;
        Self::of(&cpus, own, format!("NUMA node {node}"))
    }

    fn of(cpus: &CpuSet, own: &CpuSet, place: String) -> Why<Self> {
        let usable = both(cpus, own);
        match usable.count() {
            0 => Err(format!(
                "the process may use the CPUs {}, and {place} has {}",
                listed(own),
                listed(cpus)
            )),
            _ => Ok(Self {
                cpus: usable,
                place,
            }),
        }
    }

    /// Number of CPUs, at least 1.
    pub(crate) fn cpus(&self) -> usize {
        self.cpus.count() as usize
    }

    /// Binds the calling thread to these CPUs, and so all threads that it starts later.
    ///
    /// Errors: the kernel refuses, for example because the process may no longer use these CPUs.
    pub(crate) fn apply_here(&self) -> Result<()> {
        sched_setaffinity(None, &self.cpus).map_err(|errno| {
            let message = format!("no thread can be bound to the CPUs {}", listed(&self.cpus));
            Error::os(Stage::Build, message, errno.into())
        })
    }
}

/// Runs `work` on a placed thread and waits for it. Threads that `work` starts are placed, and
/// memory that it touches first comes from the node. Without a placement, `work` runs on the
/// calling thread. A panic propagates to the caller.
///
/// Errors: the thread cannot be started or placed. Then `work` has not begun.
pub(crate) fn on_node<T: Send>(
    placement: Option<&Placement>,
    work: impl FnOnce() -> T + Send,
) -> Result<T> {
    let Some(placement) = placement else {
        return Ok(work());
    };
    std::thread::scope(|scope| {
        let started = thread::scoped(scope, "feedline-build", || {
            placement.apply_here().map(|()| work())
        });
        let started =
            started.map_err(|source| thread::refused("building on a NUMA node", 1, 0, source))?;
        started
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Reads a list of CPUs in the kernel's format.
fn read_cpus(file: &Path) -> Why<CpuSet> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
    cpu_list(&text).ok_or_else(|| format!("{} is not a list of CPUs: {text:?}", file.display()))
}

/// Rejects text that is not a device's name in sysfs, such as `0000:65:00.0`. So no path leaves
/// sysfs's folder of devices.
fn pci_address(text: &str) -> Why<&str> {
    let legal = text
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
    let legal = legal && text.matches('.').count() == 1;
    legal
        .then_some(text)
        .ok_or_else(|| format!("{text:?} is not a PCI address"))
}

/// Parses the kernel's format of lists: `0-3,8,10-11`, or nothing. Numbers beyond a [`CpuSet`] are
/// left out.
fn cpu_list(text: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    // Digits only; `parse` would accept a sign.
    let number = |text: &str| -> Option<usize> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            text.parse().ok()
        } else {
            None
        }
    };
    let text = text.trim();
    if text.is_empty() {
        return Some(set);
    }
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first = number(first)?;
        let last = number(last)?;
        if first > last {
            return None;
        }
        (first..=last.min(CpuSet::MAX_CPU - 1)).for_each(|cpu| set.set(cpu));
    }
    Some(set)
}

/// The inverse of [`cpu_list`].
fn listed(set: &CpuSet) -> String {
    let mut words = Vec::new();
    let mut cpu = 0;
    while cpu < CpuSet::MAX_CPU {
        let run = (cpu..CpuSet::MAX_CPU)
            .take_while(|cpu| set.is_set(*cpu))
            .count();
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
    (0..CpuSet::MAX_CPU)
        .filter(|cpu| a.is_set(*cpu) && b.is_set(*cpu))
        .for_each(|cpu| both.set(cpu));
    both
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A fake `/sys`, removed at the end.
    pub(crate) struct Sysfs(PathBuf);

    impl Sysfs {
        /// Writes files with these contents into the folder.
        pub(crate) fn new(files: &[(&str, &str)]) -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let name = format!(
                "feedline-sysfs-{}-{}",
                std::process::id(),
                NEXT.fetch_add(1, Ordering::Relaxed)
            );
            let sysfs = Self(std::env::temp_dir().join(name));
            for (name, text) in files {
                let path = sysfs.0.join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            sysfs
        }

        /// A machine with one CPU on node 0, next to a device. The other CPU, 1023, is far away.
        pub(crate) fn around(cpu: &str) -> Self {
            let online = format!("{cpu},1023");
            Self::new(&[
                (ONLINE, &online),
                (&local(GPU), cpu),
                ("devices/system/node/node0/cpulist", cpu),
            ])
        }

        pub(crate) fn root(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A CPU that this process may use, and all such CPUs.
    pub(crate) fn own_cpus() -> (String, String) {
        let own = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| own.is_set(*cpu)).unwrap();
        (last.to_string(), listed(&own))
    }

    /// The CPUs of the calling thread.
    pub(crate) fn here() -> String {
        listed(&sched_getaffinity(None).unwrap())
    }

    /// A placement on these CPUs, for any machine.
    pub(crate) fn placement(cpus: &str) -> Placement {
        Placement {
            cpus: cpu_list(cpus).unwrap(),
            place: "for a test".into(),
        }
    }

    const GPU: &str = "0000:65:00.0";
    const ONLINE: &str = "devices/system/cpu/online";

    fn local(address: &str) -> String {
        format!("bus/pci/devices/{address}/local_cpulist")
    }

    fn near(sysfs: &Sysfs, device: &str, own: &str) -> Why<Placement> {
        Placement::near(sysfs.root(), device, &cpu_list(own).unwrap())
    }

    #[test]
    fn threads_go_to_the_usable_cpus_next_to_the_device() {
        let sysfs = Sysfs::new(&[
            (ONLINE, "0-63\n"),
            (&local(GPU), "16-31,48-63\n"),
            (&local("0000:b3:00.0"), "0-15,32-47\n"),
            (&local("10001:01:00.0"), "16-31,48-63\n"),
        ]);
        let table = [
            ("0-63", GPU, "16-31,48-63"),
            ("0-63", "0000:b3:00.0", "0-15,32-47"),
            ("0-63", "10001:01:00.0", "16-31,48-63"),
            ("12-19", GPU, "16-19"),
            ("20,50", GPU, "20,50"),
            // A little less than an even share is enough.
            ("10-18", GPU, "16-18"),
        ];
        for (own, device, cpus) in table {
            let placement = near(&sysfs, device, own).unwrap();
            assert_eq!(listed(&placement.cpus), cpus, "{device} {own}");
        }
        assert_eq!(
            near(&sysfs, GPU, "16-19").unwrap().to_string(),
            "the NUMA node of the device at PCI 0000:65:00.0 (4 CPUs: 16-19)"
        );
    }

    #[test]
    fn each_refusal_names_what_was_found() {
        let two = Sysfs::new(&[
            (ONLINE, "0-63"),
            (&local(GPU), "16-31,48-63"),
            (&local("0000:03:00.0"), "x"),
        ]);
        let one = Sysfs::new(&[
            (ONLINE, "0-3\n"),
            (&local(GPU), "0-3\n"),
            ("devices/system/node/node0/cpulist", "0-3"),
        ]);
        let table = [
            (
                &one,
                "1-2",
                GPU,
                "all CPUs of the machine are next to the device",
            ),
            (
                &two,
                "0-63",
                "0000:03:00.0",
                "bus/pci/devices/0000:03:00.0/local_cpulist is not a list of CPUs: \"x\"",
            ),
            (
                &two,
                "0-63",
                "0000:99:00.0",
                "0000:99:00.0/local_cpulist cannot be read: No such file",
            ),
            (
                &two,
                "0-63",
                "../../etc",
                "\"../../etc\" is not a PCI address",
            ),
            (
                &two,
                "0-15",
                GPU,
                "the process may use the CPUs 0-15, and the NUMA node of the device at PCI \
                 0000:65:00.0 has 16-31,48-63",
            ),
            (
                &two,
                "0-7,16",
                GPU,
                "only 1 of the 9 CPUs that the process may use are next to the device",
            ),
        ];
        for (sysfs, own, device, words) in table {
            let why = near(sysfs, device, own).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
        // Such a node can still be requested.
        let own = cpu_list("1-2").unwrap();
        assert_eq!(
            Placement::on(one.root(), 0, &own).unwrap().to_string(),
            "NUMA node 0 (2 CPUs: 1-2)"
        );
        let why = Placement::on(one.root(), 1, &own).unwrap_err();
        assert!(
            why.contains("node1/cpulist cannot be read: No such file"),
            "{why}"
        );
    }

    #[test]
    fn an_absent_device_places_nothing() {
        match Placing::new(Numa::Auto, Some("ffff:ff:1f.7"), Path::new("/sys")).unwrap() {
            Placing::Refused(why) => assert!(why.contains("local_cpulist cannot be read"), "{why}"),
            other => panic!("there is no such device, and still: {other:?}"),
        }
    }

    #[test]
    fn nothing_is_read_unless_a_placement_is_needed() {
        let nowhere = Path::new("/nowhere");
        for (numa, device) in [
            (Numa::Off, Some(GPU)),
            (Numa::Off, None),
            (Numa::Auto, None),
        ] {
            let placing = Placing::new(numa, device, nowhere).unwrap();
            assert_eq!((placing.line(numa, 1), placing), (None, Placing::Unasked));
        }
        let placing = Placing::new(Numa::Auto, Some(GPU), nowhere).unwrap();
        assert!(
            placing
                .line(Numa::Auto, 1)
                .unwrap()
                .starts_with("not placed: /nowhere/bus/pci/devices/")
        );
        let error = Placing::new(Numa::Node(3), None, nowhere).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.to_string().contains("NUMA node 3: /nowhere/devices/"),
            "{error}"
        );
    }

    #[test]
    fn workers_beyond_the_near_cpus_run_anywhere() {
        let (cpu, _) = own_cpus();
        let sysfs = Sysfs::around(&cpu);
        // Runs on a thread with one CPU, so that this machine's CPUs do not matter.
        let auto = on_node(Some(&placement(&cpu)), || {
            Placing::new(Numa::Auto, Some(GPU), sysfs.root()).unwrap()
        })
        .unwrap();
        let placed = format!("the NUMA node of the device at PCI {GPU} (1 CPUs: {cpu})");
        assert_eq!(
            auto.line(Numa::Auto, 1).unwrap(),
            format!("threads and memory on {placed}")
        );
        assert!(
            auto.for_workers(Numa::Auto, 1).is_some() && auto.for_workers(Numa::Auto, 2).is_none()
        );
        let expected = "its CPUs are fewer than the 2 workers, which run anywhere";
        assert_eq!(
            auto.line(Numa::Auto, 2).unwrap(),
            format!("memory and reads on {placed}; {expected}")
        );
        let asked = Placing::new(Numa::Node(0), None, sysfs.root()).unwrap();
        assert!(asked.for_workers(Numa::Node(0), 2).is_some());
        let line = asked.line(Numa::Node(0), 2).unwrap();
        assert_eq!(
            line,
            format!("threads and memory on NUMA node 0 (1 CPUs: {cpu})")
        );
    }

    #[test]
    fn placed_work_runs_on_its_cpus_and_the_caller_stays() {
        let (cpu, all) = own_cpus();
        let (own, child) = on_node(Some(&placement(&cpu)), || {
            (here(), std::thread::spawn(here).join().unwrap())
        })
        .unwrap();
        assert_eq!((own, child), (cpu.clone(), cpu));
        assert_eq!(here(), all);
        let caller = std::thread::current().id();
        assert_eq!(
            on_node(None, || std::thread::current().id()).unwrap(),
            caller
        );
    }

    #[test]
    fn absent_cpus_are_a_typed_error_before_the_work_begins() {
        let nowhere = placement("1023");
        if own_cpus().0 == "1023" {
            return;
        }
        let error = on_node(Some(&nowhere), || -> () { panic!("must not run") }).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("no thread can be bound to the CPUs 1023"),
            "{error}"
        );
    }

    #[test]
    fn a_panic_propagates_to_the_caller() {
        let place = placement(&own_cpus().0);
        let panic =
            std::panic::catch_unwind(|| on_node(Some(&place), || -> () { panic!("of the work") }))
                .err()
                .unwrap();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"of the work"));
    }

    /// The oracle: every number, one by one.
    fn naive(text: &str) -> Option<BTreeSet<usize>> {
        let mut set = BTreeSet::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let ends: Vec<_> = part.split('-').collect();
            if ends.len() > 2
                || ends
                    .iter()
                    .any(|end| end.is_empty() || !end.chars().all(|c| c.is_ascii_digit()))
            {
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
        (0..CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect()
    }

    proptest! {
        #[test]
        fn cpu_lists_match_the_oracle(
            parts in prop::collection::vec((0_usize..1200, prop::option::of(0_usize..80)), 0..12), end in "\n?"
        ) {
            let part = |(first, more): &(usize, Option<usize>)| match more {
                Some(more) => format!("{first}-{}", first + more),
                None => first.to_string(),
            };
            let text = parts.iter().map(part).collect::<Vec<_>>().join(",") + &end;
            let set = cpu_list(&text).unwrap();
            prop_assert_eq!(members(&set), naive(&text).unwrap());
            prop_assert_eq!(cpu_list(&listed(&set)).unwrap(), set);
        }

        #[test]
        fn any_text_is_parsed_or_refused_as_by_the_oracle(text in "[0-9,x+ -]{0,8}") {
            prop_assert_eq!(cpu_list(&text).map(|set| members(&set)), naive(&text), "{}", text);
        }

        #[test]
        fn no_address_leaves_the_folder_of_devices(text in "\\PC{0,20}|[0-9a-fA-F:./]{0,20}") {
            if let Ok(address) = pci_address(&text) {
                prop_assert!(address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.'), "{}", address);
                prop_assert_eq!(address.matches('.').count(), 1);
            }
        }
    }

    #[test]
    fn endless_and_overflowing_lists_end_at_once() {
        assert_eq!(
            cpu_list(&format!("0-{}", usize::MAX)).unwrap().count(),
            1024
        );
        assert_eq!(cpu_list("5000000000-6000000000").unwrap().count(), 0);
        assert_eq!(cpu_list("0-99999999999999999999999"), None);
    }
}
