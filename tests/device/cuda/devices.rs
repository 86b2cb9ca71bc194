#![allow(unsafe_code)]

use crate::common::cuda::*;
use crate::common::standin::{self, Config, Gpu};
use crate::common::*;
use cudarc::driver::{CudaContext, result};
use feedline::dataset::Records;
use feedline::device::DeviceKind;
use feedline::error::Stage;
use feedline::memory::MemoryTerm;
use feedline::unstable::{Absent, Found, devices};
use feedline::{Device, ErrorKind, Loader, LoaderBuilder, Order};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::sync::Arc;

/// The driver is opened once per process, so each kind of missing driver needs a separate process.
const CHILDREN: &[(&str, fn())] = &[
    ("no library", no_library),
    ("no driver", no_driver),
    ("no device", no_device),
    ("auto", auto),
    ("auto of one", auto_of_one),
    ("auto unusable", auto_unusable),
];

/// Drivers that give no GPU: which reason, and its words.
type Useless = (
    &'static str,
    fn() -> Config,
    fn(&Absent) -> bool,
    &'static str,
);

const USELESS: [Useless; 4] = [
    (
        "too old",
        || Config {
            driver_version: 11_080,
            ..Config::default()
        },
        |why| matches!(why, Absent::TooOld(_)),
        "too old: it supports CUDA 11.8, 12.0 is needed",
    ),
    (
        "the stub",
        || Config {
            driver_version: -34,
            ..Config::default()
        },
        |why| matches!(why, Absent::Init(34, _)),
        "(34): this libcuda is the stub for linking",
    ),
    (
        "does not start",
        || Config {
            init_error: 803,
            ..Config::default()
        },
        |why| matches!(why, Absent::Init(803, _)),
        "does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver",
    ),
    (
        "none in the list",
        || Config {
            devices: vec![],
            ..Config::default()
        },
        |why| *why == Absent::NoDevice,
        "no CUDA device",
    ),
];

/// Entry point of those processes; it does nothing without the variable.
#[test]
#[ignore = "a part of other tests, which start it as a process of its own"]
fn child() {
    if let Some(name) = told() {
        if let Some((_, body)) = CHILDREN.iter().find(|(known, _)| *known == name) {
            body();
        } else {
            let (_, config, kind, words) =
                USELESS.iter().find(|(known, ..)| *known == name).unwrap();
            let session = standin::cuda().session(config());
            absent(*kind, words);
            assert!(session.count("cuInit") <= 1, "once per process");
        }
        println!("{name}: passed");
    }
}

/// Runs a case in a process of its own, with these variables and none of a launcher's.
#[track_caller]
fn alone(name: &str, variables: &[(&str, &str)]) {
    let mut command = process(&beside!("child"), name);
    for (variable, _) in std::env::vars_os() {
        let known = [
            "SLURM_",
            "OMPI_",
            "PMI_",
            "MPI_",
            "LOCAL_",
            "JOB_",
            "CUDA_VISIBLE",
            "RANK",
            "WORLD_SIZE",
        ];
        if known
            .iter()
            .any(|prefix| variable.to_string_lossy().starts_with(prefix))
        {
            command.env_remove(variable);
        }
    }
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let passed = said(&output.stdout).contains(&format!("{name}: passed"));
    assert!(
        output.status.success() && passed,
        "{name}\n{}\n{}",
        said(&output.stdout),
        said(&output.stderr)
    );
}

fn data() -> LoaderBuilder {
    let records = Records::builder(64).open_bytes(noise(64 * 50, 3)).unwrap();
    Loader::builder(records)
        .order(Order::shuffled(2))
        .batch_size(6)
}

/// Checks the case without a GPU: every request for one gives the same reason, and `auto` works on
/// the host.
fn absent(kind: fn(&Absent) -> bool, words: &str) {
    let why = devices().unwrap_err();
    assert!(
        kind(&why) && why.to_string().contains(words),
        "{why:?}: {why}"
    );
    for error in [
        Device::cuda(0).unwrap_err(),
        "cuda".parse::<Device>().unwrap_err(),
        Device::cuda(7).unwrap_err(),
    ] {
        assert_eq!(
            (error.kind(), error.stage()),
            (ErrorKind::Device, Stage::Build)
        );
        assert_eq!(error.message(), why.to_string());
    }
    for device in [Device::auto(), "auto".parse().unwrap()] {
        assert_eq!(
            (device.kind(), device.why()),
            (DeviceKind::Host, &*why.to_string())
        );
        let loader = build(data().device(device));
        same(
            &Got::epoch(&loader, 0),
            &Got::epoch(&build(data()), 0),
            "on the host instead",
        );
        assert!(
            loader
                .report()
                .to_string()
                .contains(&format!("device    host ({why})"))
        );
        assert_eq!(loader.report().total.copy, None);
    }
}

#[test]
fn auto_is_the_host_without_a_driver_library() {
    alone("no library", &[]);
}

#[test]
fn a_useless_driver_is_a_reason_and_no_panic() {
    alone("no driver", &[]);
    USELESS.iter().for_each(|(name, ..)| alone(name, &[]));
}

fn no_library() {
    let found = ["libcuda.so.1", "libcuda.so"].iter().any(|name| {
        // SAFETY: a driver's initialisers may run at any time.
        unsafe { Library::new(*name) }.is_ok()
    });
    if found {
        return println!("this machine has a driver");
    }
    absent(
        |why| matches!(why, Absent::NoLibrary(_)),
        "no CUDA driver: libcuda.so.1 was not found",
    );
}

fn no_driver() {
    let source = "#[unsafe(no_mangle)] pub extern \"C\" fn cuInit(_: u32) -> u32 { 0 }";
    let path = standin::build(
        "no-cuda",
        source,
        &["-C", "link-arg=-Wl,-soname,libcuda.so"],
    );
    // SAFETY: the library has no initialisers.
    std::mem::forget(unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }.unwrap());
    absent(
        |why| matches!(why, Absent::TooOld(_)),
        "the driver library has no `cuDriverGetVersion`",
    );
}

#[test]
fn a_hidden_device_is_explained_by_its_variable() {
    alone("no device", &[]);
    alone("no device", &[("CUDA_VISIBLE_DEVICES", "")]);
    alone("no device", &[("CUDA_VISIBLE_DEVICES", "7,8")]);
}

fn no_device() {
    let _session = standin::cuda().session(Config::no_device());
    let words = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(seen) => format!("no CUDA device is visible (CUDA_VISIBLE_DEVICES={seen:?})"),
        Err(_) => "no CUDA device".into(),
    };
    absent(|why| *why == Absent::NoDevice, &words);
}

#[test]
fn auto_takes_the_device_of_the_local_rank() {
    let torchrun = |rank: &'static str, local: &'static str, expected: &'static str| {
        alone(
            "auto",
            &[
                ("RANK", rank),
                ("WORLD_SIZE", "8"),
                ("LOCAL_RANK", local),
                ("EXPECTED", expected),
            ],
        );
    };
    torchrun(
        "5",
        "1",
        "cuda:1 (Stand-in GPU, local rank 1, 3 devices are visible)",
    );
    torchrun(
        "0",
        "0",
        "cuda:0 (Stand-in GPU, local rank 0, 3 devices are visible)",
    );
    torchrun(
        "7",
        "7",
        "cuda:1 (Stand-in GPU, local rank 7, 3 devices are visible)",
    );
    alone(
        "auto",
        &[("EXPECTED", "cuda:0 (Stand-in GPU, the first of 3)")],
    );
    // An invalid launcher environment is ignored, and reported.
    let why = "cuda:0 (Stand-in GPU, the first of 3; the launcher's variables are unusable: \
               RANK=\"many\" is not a whole number from 0 to 4294967295)";
    alone(
        "auto",
        &[("RANK", "many"), ("LOCAL_RANK", "2"), ("EXPECTED", why)],
    );
    // No variable gives the rank, but `LOCAL_RANK` the device: Lightning's launcher on its second
    // node.
    let second = [("LOCAL_RANK", "2"), ("NODE_RANK", "1"), ("WORLD_SIZE", "8")];
    let local = "cuda:2 (Stand-in GPU, local rank 2, 3 devices are visible)";
    alone(
        "auto",
        &[second.as_slice(), &[("EXPECTED", local)]].concat(),
    );
    // srun --gpus-per-task=1: each task sees one.
    alone(
        "auto of one",
        &[
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "3"),
        ],
    );
    alone(
        "auto of one",
        &[("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")],
    );
}

fn auto() {
    case(config(), |_| {
        let device = Device::auto();
        let expected = std::env::var("EXPECTED").unwrap();
        assert_eq!(device.to_string(), expected);
        assert_eq!("cuda".parse::<Device>().unwrap().to_string(), expected);
        assert_eq!(
            "cuda:0".parse::<Device>().unwrap().kind(),
            DeviceKind::Cuda(0),
            "of every rank"
        );
        let loader = build(data().device(device));
        same(
            &Got::epoch(&loader, 0),
            &Got::epoch(&build(data()), 0),
            "auto",
        );
    });
}

fn auto_of_one() {
    case(Config::default(), |_| {
        for device in [Device::auto(), "cuda".parse().unwrap()] {
            assert_eq!(device.to_string(), "cuda:0 (Stand-in GPU, the first of 1)");
        }
    });
}

#[test]
fn a_device_without_room_for_a_context_is_not_usable() {
    alone("auto unusable", &[]);
}

fn auto_unusable() {
    case(config(), |session| {
        session.fail_named("cuDevicePrimaryCtxRetain", 0, 2, false);
        session.fail_named("cuDevicePrimaryCtxRetain", 1, 46, false);
        let device = Device::auto();
        assert_eq!(device.kind(), DeviceKind::Host);
        let words = "cuda:0 is not usable: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory (2)";
        assert_eq!(device.why(), words);
        let error = Device::cuda(1).unwrap_err();
        assert!(
            error.to_string().contains("CUDA_ERROR_DEVICE_UNAVAILABLE"),
            "{error}"
        );
        assert_eq!(
            Device::auto().kind(),
            DeviceKind::Cuda(0),
            "it was another's memory, and that is free again"
        );
    });
}

#[test]
fn devices_are_listed_with_name_memory_and_place() {
    case(config(), |_| {
        let (version, found) = devices().unwrap();
        assert_eq!((version, found.len()), ((12, 4), 3));
        let Found {
            ordinal,
            name,
            bytes,
            pci_bus_id,
            ..
        } = &found[2];
        assert_eq!(
            (*ordinal, &**name, *bytes, pci_bus_id.as_deref()),
            (2, "Stand-in GPU", 1 << 30, Some("0000:3d:00.0"))
        );
        assert_eq!(gpu(1).pci_bus_id(), Some("0000:3c:00.0"));
        assert_eq!(Device::host().pci_bus_id(), None);
    });
}

#[test]
fn device_names_parse_or_the_error_lists_the_devices() {
    case(config(), |_| {
        let right = [
            ("host", "host (requested)"),
            ("cpu", "host (requested)"),
            ("cuda", "cuda:0 (Stand-in GPU, the first of 3)"),
            ("cuda:0", "cuda:0 (Stand-in GPU, requested)"),
            ("cuda:2", "cuda:2 (Stand-in GPU, requested)"),
        ];
        for (words, device) in right {
            assert_eq!(words.parse::<Device>().unwrap().to_string(), device);
        }
        assert!(matches!(
            "auto".parse::<Device>().unwrap().kind(),
            DeviceKind::Cuda(_)
        ));
        for (words, number) in [
            ("cuda:3", "3"),
            ("cuda:2147483648", "2147483648"),
            ("cuda:18446744073709551615", "18446744073709551615"),
        ] {
            let error = words.parse::<Device>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Device);
            assert!(
                error
                    .to_string()
                    .contains(&format!("no device cuda:{number}; the process sees 3")),
                "{error}"
            );
        }
        for words in [
            "",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "cuda:1 ",
            "CUDA:1",
            "cuda:18446744073709551616",
            "host:0",
        ] {
            let error = words.parse::<Device>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{words:?}");
            assert!(
                error.to_string().contains(&format!(
                    "no device is called {words:?}: use auto, cpu, cuda or cuda:N"
                )),
                "{error}"
            );
        }
        assert_eq!(Device::default().to_string(), "host (the default)");
    });
}

#[test]
fn the_callers_own_context_is_used_and_kept_alive() {
    case(late(), |session| {
        let context = CudaContext::new(1).unwrap();
        let device = Device::cuda_in(context.clone()).unwrap();
        assert_eq!(
            device.to_string(),
            "cuda:1 (Stand-in GPU, requested, in the caller's context)"
        );
        let loader = build(data().device(device));
        drop(context);
        same(
            &Got::epoch(&loader, 0),
            &Got::epoch(&build(data()), 0),
            "after the caller's own is gone",
        );
        assert_eq!(session.live().retains, 1);
    });
}

#[test]
fn loaders_share_the_context_of_their_device() {
    case(late(), |session| {
        let right = Got::epoch(&build(data()), 0);
        let device = gpu(0);
        let loaders =
            [device.clone(), device, gpu(0), gpu(1)].map(|device| build(data().device(device)));
        assert_eq!(session.live().retains, 2);
        let mut epochs: Vec<_> = loaders
            .iter()
            .map(|loader| loader.epoch(0).unwrap())
            .collect();
        let mut found = vec![Vec::new(); 4];
        for step in 0..right.len() * 4 {
            let batch = epochs[step % 4].next().unwrap().unwrap();
            found[step % 4].push(Got::of(&batch).unwrap());
        }
        found
            .iter()
            .for_each(|found| same(found, &right, "in turn"));
        let [first, second, third, other] = loaders;
        drop((epochs, second, third));
        std::thread::scope(|scope| {
            for loader in [&first, &other] {
                scope.spawn(|| same(&Got::epoch(loader, 0), &right, "from its own thread"));
            }
        });
        drop(first);
        same(&Got::epoch(&other, 0), &right, "alone");
    });
}

/// The current context of this thread.
fn current() -> usize {
    result::ctx::get_current()
        .unwrap()
        .map_or(0, |context| context as usize)
}

#[test]
fn the_callers_current_context_stays_what_it_was() {
    case(late(), |_| {
        let right = Got::epoch(&build(data()), 0);
        let run = |expected: usize, context: &Arc<CudaContext>| {
            let stays = |what: &str| assert_eq!(current(), expected, "{what}");
            let stream = feedline::device::cuda::Stream::from(context.default_stream());
            let device = gpu(0);
            stays("device");
            let loader = build(data().device(device).tuning(|t| t.device_batches(4)));
            stays("build");
            let mut epoch = loader.epoch(0).unwrap();
            for right in &right {
                let batch = epoch.next().unwrap().unwrap();
                stays("next");
                batch.bind(&stream).unwrap();
                stays("bind");
                assert_eq!(Got::of(&batch).unwrap(), *right);
                batch.field("record").unwrap().device_ptr().unwrap();
                stays("reading");
                drop(batch);
                stays("drop");
            }
            drop(epoch);
            let batch = loader.epoch(1).unwrap().next().unwrap().unwrap();
            drop(loader);
            stays("drop of the loader");
            drop(batch);
            stays("drop of the last batch");
        };
        let own = CudaContext::new(0).unwrap();
        let other = CudaContext::new(2).unwrap();
        other.bind_to_thread().unwrap();
        run(other.cu_ctx() as usize, &own);
        own.bind_to_thread().unwrap();
        run(own.cu_ctx() as usize, &own);
        // SAFETY: no context at all is legal.
        unsafe { result::ctx::set_current(std::ptr::null_mut()) }.unwrap();
        run(0, &own);
    });
}

#[test]
fn fewer_than_two_batches_on_a_device_are_refused() {
    case(config(), |_| {
        for batches in [0, 1, usize::MAX] {
            let error = data()
                .device(gpu(0))
                .tuning(|t| t.device_batches(batches))
                .build()
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(
                error.to_string().contains("; set a number from 2 to"),
                "{error}"
            );
        }
    });
}

#[test]
fn a_small_gpu_is_a_budget_error_that_names_the_sizes() {
    let slot = build(data()).plan().term(MemoryTerm::SLOTS).each as u64;
    // Each batch takes one page more for its alignment.
    let all_bytes = slot * 5 / 2 + 3 * 4096;
    let devices = vec![Gpu::new(all_bytes, "0000:3b:00.0"); 3];
    case(
        Config {
            devices,
            ..config()
        },
        move |session| {
            let error = data().device(gpu(0)).build().unwrap_err();
            assert_eq!(
                (error.kind(), error.stage()),
                (ErrorKind::Budget, Stage::Device),
                "{error}"
            );
            let bytes: Vec<u64> = error
                .message()
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect();
            let [0, wanted, free, all] = bytes[..] else {
                panic!("{error}")
            };
            assert_eq!(
                (all, free),
                (all_bytes, all - 2 * (wanted + 4096)),
                "{error}"
            );
            assert!(
                error.message().contains("for a batch")
                    && error.message().contains("fewer device batches"),
                "{error}"
            );
            assert_eq!(
                session.live(),
                standin::Live::default(),
                "what was reserved before is given back"
            );
            let loader = build(data().device(gpu(0)).tuning(|t| t.device_batches(2)));
            same(
                &Got::epoch(&loader, 0),
                &Got::epoch(&build(data()), 0),
                "two fit",
            );
        },
    );
}
