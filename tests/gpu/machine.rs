//! What the machine is: facts beside which the figures mean something. Nothing here fails.

use crate::ours::words;
use crate::section::Ctx;
use crate::watch;
use feedline::Device;
use feedline::device::cuda::cudarc::driver::sys;
use feedline::storage::{Direct, Mode, Sources};
use feedline::unstable::{ReaderOptions, open};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use rustix::fs::statvfs;
use rustix::process::{Resource, Rlimit, getrlimit};
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    host(ctx);
    limits(ctx);
    folder(ctx);
    reader(ctx);
    devices(ctx);
    smi(ctx);
    gds(ctx);
    tools(ctx);
    Ok(())
}

/// A file's text in one line, or that it is not there.
fn text(path: impl AsRef<Path>) -> String {
    match std::fs::read_to_string(path) {
        Ok(text) => text.split_whitespace().collect::<Vec<_>>().join(" "),
        Err(error) => format!("({})", error.kind()),
    }
}

fn value_of(path: &str, key: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(key));
    line.and_then(|line| line.split_once(':'))
        .map_or("?".into(), |(_, value)| value.trim().to_string())
}

fn host(ctx: &Ctx) {
    ctx.note("kernel", text("/proc/version"));
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    ctx.note(
        "processor",
        format!(
            "{}, {cpus} for this process",
            value_of("/proc/cpuinfo", "model name")
        ),
    );
    let memory = |key| value_of("/proc/meminfo", key);
    ctx.note(
        "memory",
        format!(
            "{} of {} available",
            memory("MemAvailable"),
            memory("MemTotal")
        ),
    );
    let groups = ["memory.max", "cpu.max"]
        .map(|name| format!("{name} {}", text(format!("/sys/fs/cgroup/{name}"))));
    ctx.note("control group", groups.join(", "));
    ctx.note(
        "transparent huge pages",
        text("/sys/kernel/mm/transparent_hugepage/enabled"),
    );
    let nodes = std::fs::read_dir("/sys/devices/system/node")
        .into_iter()
        .flatten()
        .flatten();
    let nodes = nodes
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("node"))
        .count();
    ctx.note("NUMA nodes", nodes.to_string());
}

fn limits(ctx: &Ctx) {
    let of = |resource| {
        let Rlimit { current, maximum } = getrlimit(resource);
        let number =
            |limit: Option<u64>| limit.map_or("unlimited".into(), |limit| limit.to_string());
        format!("{} of {}", number(current), number(maximum))
    };
    ctx.note("RLIMIT_MEMLOCK", format!("{} bytes", of(Resource::Memlock)));
    ctx.note("RLIMIT_NOFILE", of(Resource::Nofile));
}

fn folder(ctx: &Ctx) {
    let path = std::fs::canonicalize(&ctx.dir).unwrap_or_else(|_| ctx.dir.clone());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // ID PARENT DEVICE ROOT POINT OPTIONS … - TYPE SOURCE OPTIONS
    let mount = mounts.lines().filter(|line| {
        line.split(' ')
            .nth(4)
            .is_some_and(|point| path.starts_with(point))
    });
    let mount = mount
        .max_by_key(|line| line.split(' ').nth(4).map_or(0, str::len))
        .unwrap_or_default();
    let kind = mount.split_once(" - ").map_or("?", |(_, rest)| rest);
    let free = statvfs(&path).map_or("?".into(), |it| {
        format!("{:.1} GB free", (it.f_bavail * it.f_frsize) as f64 / 1e9)
    });
    ctx.note(
        "folder of the data",
        format!("{}: {kind}; {free}", path.display()),
    );
}

/// Whether io_uring and O_DIRECT are to be had on a file of the folder.
fn reader(ctx: &Ctx) {
    let tried = (|| {
        let folder = ctx.folder()?;
        let path = folder.file("probe.bin");
        std::fs::write(&path, vec![7; 1 << 16]).map_err(|error| error.to_string())?;
        let with = |mode: Mode, direct: Direct| {
            let mut sources = Sources::new();
            sources.file(&path, 1 << 16).map_err(words)?;
            let mut options = ReaderOptions::default();
            options.mode = mode;
            options.direct = direct;
            open(Arc::new(sources), &options)
                .map(|opened| opened.choice.to_string())
                .map_err(words)
        };
        let either =
            |found: Result<String, String>| found.unwrap_or_else(|error| format!("no: {error}"));
        ctx.note("io_uring", either(with(Mode::Uring, Direct::Off)));
        ctx.note("O_DIRECT", either(with(Mode::Pread, Direct::On)));
        Ok::<_, String>(())
    })();
    if let Err(error) = tried {
        ctx.skip("io_uring and O_DIRECT", error);
    }
    ctx.note(
        "kernel.io_uring_disabled",
        text("/proc/sys/kernel/io_uring_disabled"),
    );
}

fn devices(ctx: &Ctx) {
    if ctx.real() {
        ctx.note("driver", text("/proc/driver/nvidia/version"));
    }
    let (version, found) = match feedline::unstable::devices() {
        Ok(all) => all,
        Err(absent) => return ctx.note("CUDA", absent.to_string()),
    };
    ctx.note("CUDA", format!("{}.{}", version.0, version.1));
    libraries(ctx);
    for gpu in found {
        let pci = gpu.pci_bus_id.unwrap_or_default();
        let of = |name: &str| {
            text(format!(
                "/sys/bus/pci/devices/{}/{name}",
                pci.to_lowercase()
            ))
        };
        let link = [
            "current_link_speed",
            "current_link_width",
            "max_link_speed",
            "max_link_width",
        ]
        .map(of);
        ctx.note(
            format!("device {}", gpu.ordinal),
            format!(
                "{}, {:.1} GB, {pci}, NUMA node {}, link {} × {} (at most {} × {})",
                gpu.name,
                gpu.bytes as f64 / 1e9,
                of("numa_node"),
                link[0],
                link[1],
                link[2],
                link[3]
            ),
        );
    }
    ctx.note("Device::auto()", Device::auto().to_string());
}

/// The files that libcuda was loaded from. feedline asks for `libcuda.so.1` first, cudarc for
/// `libcuda.so`, which on the path of a toolkit may be the stub that programs are linked with.
#[allow(unsafe_code)]
fn libraries(ctx: &Ctx) {
    let ours = libcuda();
    ctx.note("libcuda of feedline", ours.join(", "));
    // SAFETY: loads the library that cudarc's calls go to, as its first call would; no function of
    // it is called.
    let found = unsafe { sys::is_culib_present() };
    if found {
        // SAFETY: as above; a library is there, so it does not panic. It stays loaded.
        let _ = unsafe { sys::culib() };
    }
    let both = libcuda();
    let added: Vec<_> = both
        .iter()
        .filter(|path| !ours.contains(path))
        .cloned()
        .collect();
    let words = match (found, added.is_empty()) {
        (false, _) => "none".into(),
        (true, true) => "the same".into(),
        (true, false) => format!("{}: another one than feedline's", added.join(", ")),
    };
    ctx.note("libcuda of cudarc", words);
}

/// Files of the process' memory map that are a libcuda, the stand-in's included.
fn libcuda() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    let found: BTreeSet<_> = paths
        .filter(|path| {
            Path::new(path)
                .file_name()
                .is_some_and(|name| is_libcuda(&name.to_string_lossy()))
        })
        .map(String::from)
        .collect();
    found.into_iter().collect()
}

fn is_libcuda(name: &str) -> bool {
    name.starts_with("libcuda.so") || name.starts_with("libcuda-standin-")
}

fn smi(ctx: &Ctx) {
    if !ctx.real() {
        return;
    }
    let asked = "driver_version,persistence_mode,ecc.mode.current,mig.mode.current,pcie.link.gen.current,\
                 pcie.link.width.current,clocks.sm,clocks.mem,temperature.gpu,utilization.gpu,memory.used";
    let mut command = Command::new("nvidia-smi");
    command
        .arg(format!("--query-gpu={asked}"))
        .arg("--format=csv,noheader");
    let (end, text, tail) = watch::output(command, Duration::from_secs(20));
    if end.well() {
        text.lines()
            .for_each(|line| ctx.note("nvidia-smi", format!("{line} ({asked})")));
    } else {
        ctx.skip("nvidia-smi", format!("{} {}", end.words(), tail.join(" ")));
    }
}

/// What there is for GPUDirect Storage: library, kernel module, device files. The library is only
/// asked for its version.
fn gds(ctx: &Ctx) {
    let (version, from) = match cufile() {
        Ok(found) => found,
        Err(tried) => ("no library".into(), format!("tried {}", tried.join(", "))),
    };
    ctx.note("cuFile", format!("{version} ({from})"));
    let modules = std::fs::read_to_string("/proc/modules");
    let loaded = match &modules {
        Ok(text) => {
            let names = text.lines().filter_map(|line| line.split(' ').next());
            names
                .filter(|name| name.starts_with("nvidia"))
                .collect::<Vec<_>>()
                .join(", ")
        }
        Err(error) => format!("/proc/modules: {error}"),
    };
    ctx.note("kernel modules", loaded);
    ctx.note("nvidia-fs", text("/proc/driver/nvidia-fs/version"));
    ctx.note(
        "files that cuFile wants",
        ["/run/udev", "/dev/nvidia-fs0"]
            .map(|path| {
                format!(
                    "{path} {}",
                    if Path::new(path).exists() {
                        "is there"
                    } else {
                        "is not there"
                    }
                )
            })
            .join(", "),
    );
}

/// The version of the first libcufile that can be loaded, and its name; else the names.
pub fn cufile() -> Result<(String, String), Vec<String>> {
    let mut names: Vec<PathBuf> = std::env::var_os("FEEDLINE_CUFILE")
        .map(PathBuf::from)
        .into_iter()
        .collect();
    names.extend(
        [
            "libcufile.so.0",
            "libcufile.so",
            "/usr/local/cuda/lib64/libcufile.so.0",
        ]
        .map(PathBuf::from),
    );
    let found = names
        .iter()
        .find_map(|name| version(name).map(|version| (version, name.display().to_string())));
    found.ok_or_else(|| {
        names
            .iter()
            .map(|name| name.display().to_string())
            .collect()
    })
}

#[allow(unsafe_code)]
fn version(name: &Path) -> Option<String> {
    // SAFETY: the library is made to be loaded at run time; it stays loaded, since its own threads
    // may use it.
    let library = unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_LOCAL) }
        .map(std::mem::ManuallyDrop::new)
        .ok()?;
    // SAFETY: the type is that of cufile.h.
    let ask =
        unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> i64>(b"cuFileGetVersion\0") };
    let Ok(ask) = ask else {
        return Some("older than 1.8: it tells no version".into());
    };
    let mut version = 0;
    // SAFETY: the pointer is valid for the call. The status is returned in a register or two, of
    // which the first is read.
    let _ = unsafe { ask(&mut version) };
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

fn tools(ctx: &Ctx) {
    for name in ["compute-sanitizer", "python3"] {
        ctx.note(
            name,
            find(name).map_or("not found".into(), |path| path.display().to_string()),
        );
    }
}

/// A program on the path, or where CUDA puts its own.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.push("/usr/local/cuda/bin".into());
    folders.push("/usr/local/cuda/compute-sanitizer".into());
    folders.push("/opt/nvidia/compute-sanitizer".into());
    folders
        .into_iter()
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}
