//! The route of each field with its reason, known before the first batch; and the reported route
//! afterwards.

use super::direct_reads;
use crate::common::cufile::{Open, Register, Route, StandIn};
use crate::common::doubles::*;
use crate::common::standin::Gpu;
use crate::common::toys::Chunks;
use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Npy, Records};
use feedline::decode::Raw;
use feedline::device::Gds;
use feedline::error::Stage;
use feedline::storage::{Direct, Mode};
use feedline::tensor::DType;
use feedline::{Device, ErrorKind, Loader, LoaderBuilder};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const RECORD: usize = 16_384;
const COUNT: usize = 10;

fn open(path: &Path) -> Records {
    Records::builder(RECORD)
        .field("x", DType::U8, [RECORD])
        .open(path)
        .unwrap()
}

/// The same with a label for each.
fn labelled(path: &Path) -> LoaderBuilder {
    let records = Records::builder(RECORD).field("x", DType::U8, [RECORD]);
    let records = records.classes((0..COUNT as i64).collect());
    uncached(records.open(path).unwrap())
}

/// Without the page cache, which could hold any dataset of a test.
fn uncached(dataset: impl Dataset) -> LoaderBuilder {
    Loader::builder(dataset)
        .batch_size(4)
        .tuning(|t| t.reader(Mode::Pread))
}

/// Checks that the batches go through the host with this reason, and that requiring direct reads is
/// an error with it.
fn check_staged(machine: &Machine, make: &dyn Fn() -> LoaderBuilder, words: &str) {
    let right = Got::epoch(&build(make()), 0);
    let loader = build(machine.on_gpu(make(), Gds::Auto));
    same(&Got::epoch(&loader, 0), &right, words);
    let report = loader.report();
    let route = report
        .routes
        .iter()
        .find(|route| route.field == "x")
        .unwrap();
    assert_eq!(route.route, feedline::device::Route::Staged, "{words}");
    assert!(route.why.contains(words), "{words}: {route}");
    assert!(report.total.copy.as_ref().unwrap().direct.is_none());
    let line = format!("x staged ({}", route.why);
    assert!(report.to_string().contains(&line), "{report}");
    let error = machine.direct(make()).build().unwrap_err();
    let found = (error.kind(), error.stage());
    assert_eq!(found, (ErrorKind::Unsupported, Stage::Build), "{error}");
    let begin = "no field can be read directly: `x`: ";
    assert!(error.message().starts_with(begin), "{error}");
    assert!(error.message().contains(words), "{words}: {error}");
}

#[test]
fn fields_that_the_host_must_see_are_staged() {
    const SEEN: &str = "transforms on the host see it";
    const MADE: &str = "made by the host from the bytes read";
    const IN_MEMORY: &str = "not stored unchanged in a file: in memory";
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, bytes) = records_file(&dir, COUNT, RECORD);
        let array = [
            b"\x93NUMPY\x01\x00\x3a\x00{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }\n",
            &[1; 3][..],
        ];
        let ragged = dir.write("ragged.npy", &array.concat());
        let (chunks, _) = records_file(&dir, 8, RECORD);
        let plain = || uncached(open(&path));
        let up_to = || Npy::builder().field("x", &ragged).up_to("x", 5).open();
        let in_memory = || {
            let records = Records::builder(RECORD).field("x", DType::U8, [RECORD]);
            records.open_bytes(bytes.clone())
        };
        let checked = || open(&path).facts(dir.path("crc")).checksums().open();
        type Make<'a> = &'a dyn Fn() -> LoaderBuilder;
        let cases: [(Make<'_>, &str); 9] = [
            (&|| plain().map(|_, _| Ok(())), SEEN),
            (&|| plain().map_batch(|_, _| Ok(())), SEEN),
            (&|| plain().decode_field("x", Raw), MADE),
            (&|| uncached(up_to().unwrap()), MADE),
            (&|| uncached(in_memory().unwrap()), IN_MEMORY),
            (&|| uncached(open(&path).in_memory().unwrap()), IN_MEMORY),
            (
                &|| uncached(checked().unwrap()),
                "unpacked or checked by the host",
            ),
            (
                &|| uncached(Chunks::open(&chunks, &[4, 4], RECORD)),
                "rows come out of chunks that the host opens",
            ),
            (&|| labelled(&path).map(|_, _| Ok(())), SEEN),
        ];
        for (make, words) in cases {
            check_staged(machine, make, words);
        }
        let opens = machine.double.cufile.counts().opens;
        assert_eq!(opens, 0, "nothing needed cuFile");
    });
}

#[test]
fn every_reason_of_every_field_is_in_the_error() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        let builder = labelled(&path).keep(["label"]);
        let error = machine.direct(builder).build().unwrap_err();
        let words = "`x`: not delivered; `label`: not stored unchanged in a file: in memory, or unpacked or checked by \
                     the host";
        assert!(error.message().ends_with(words), "{error}");
        let builder = labelled(&path).tuning(|t| t.gds(Gds::Require));
        let error = builder.build().unwrap_err();
        let words =
            "`x`: batches are delivered on the host; `label`: batches are delivered on the host";
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().ends_with(words), "{error}");
        let missing = machine
            .direct(labelled(&path))
            .tuning(|t| t.cufile_at(dir.path("libcufile.so.0"), machine.double.root()));
        let error = missing.build().unwrap_err();
        let tried = "`x`: libcufile was not found (tried ";
        for words in [tried, "libcufile.so.0); install"] {
            assert!(error.message().contains(words), "{error}");
        }
    });
}

#[test]
fn a_loader_chooses_by_itself_and_can_be_told() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        let (small, _) = records_file(&dir, COUNT, RECORD - 1);
        let plain = |path: &Path, record: usize| {
            let records = Records::builder(record).field("x", DType::U8, [record]);
            Loader::builder(records.open(path).unwrap()).batch_size(4)
        };
        let whole = || plain(&path, RECORD);
        let pread = |builder: LoaderBuilder| builder.tuning(|t| t.reader(Mode::Pread));
        let why = |builder: LoaderBuilder, gds: Gds| {
            build(machine.on_gpu(builder, gds)).report().routes[0].to_string()
        };
        let direct = "x direct (cuFile 1.20: p2p)";
        let cases = [
            (pread(whole()), Gds::Auto, direct),
            (pread(whole()), Gds::Require, direct),
            (pread(whole()), Gds::Off, "x staged (switched off)"),
            (
                pread(plain(&small, RECORD - 1)),
                Gds::Auto,
                "x staged (rows of 16383 bytes: below 16384, reads through the host are faster)",
            ),
            (plain(&small, RECORD - 1), Gds::Require, direct),
            // The page cache has room for so few bytes, unless it is bypassed.
            (
                whole(),
                Gds::Auto,
                "x staged (the page cache has room for the dataset)",
            ),
            (whole().tuning(|t| t.direct(Direct::On)), Gds::Auto, direct),
            (whole(), Gds::Require, direct),
        ];
        for (builder, gds, words) in cases {
            assert_eq!(why(builder, gds), words);
        }
        let host = build(whole().device(Device::host()));
        assert!(host.report().routes.is_empty() && host.report().total.copy.is_none());
    });
}

/// A machine with a defect in its cuFile setup.
fn changed(change: &dyn Fn(&CuFileMachine)) -> CuFileMachine {
    let double = CuFileMachine::new(Route::P2p);
    change(&double);
    double
}

#[test]
fn fields_are_staged_where_cufile_is_useless() {
    type Change = &'static (dyn Fn(&CuFileMachine) + Sync);
    let cases: [(Change, &str); 11] = [
        (
            &|double| std::fs::remove_file(double.dir.path("proc/modules")).unwrap(),
            "proc/modules cannot be read",
        ),
        (
            &|double| std::fs::remove_dir_all(double.dir.path("run/udev")).unwrap(),
            "run/udev is absent",
        ),
        (
            &|double| drop(double.dir.write("proc/driver/nvidia-fs/devcount", b"1\n")),
            "nvidia-fs is loaded but",
        ),
        (
            &|double| double.cufile.version(Some((1, 4))),
            "is cuFile 1.4; version 1.5",
        ),
        (
            &|double| double.cufile.open(Open::Fails(5007)),
            "CU_FILE_PLATFORM_NOT_SUPPORTED (5007)",
        ),
        (
            &|double| double.cufile.route(0, Route::Host),
            "through host memory (compat",
        ),
        (
            &|double| double.cufile.fail_register(Register::File, 5027),
            "CU_FILE_HANDLE_NOT_REGISTERED (5027)",
        ),
        (
            &|double| double.cufile.fail_register(Register::Buffer, 5036),
            "CU_FILE_GPU_MEMORY_PINNING_FAILED (5036)",
        ),
        (
            &|double| double.cufile.fail_read(0, 5044),
            "CU_FILE_IO_ERROR (5044)",
        ),
        (
            &|double| double.cufile.fail_read_os(0, 5),
            "Input/output error",
        ),
        (
            &|double| double.cufile.short_read(0, 0),
            "cuFileRead read 0 of 16384 bytes",
        ),
    ];
    for (change, words) in cases {
        // Each is tried once with optional and once with required direct reads.
        for gds in [Gds::Auto, Gds::Require] {
            on_double(changed(change), move |machine| {
                let dir = Dir::new();
                let (path, _) = records_file(&dir, COUNT, RECORD);
                match machine.on_gpu(uncached(open(&path)), gds).build() {
                    Ok(loader) => {
                        let route = &loader.report().routes[0];
                        assert_eq!(gds, Gds::Auto, "{words}: {route}");
                        assert!(route.why.contains(words), "{words}: {route}");
                        assert_eq!(route.route, feedline::device::Route::Staged);
                        let right = Got::epoch(&build(uncached(open(&path))), 0);
                        same(&Got::epoch(&loader, 0), &right, words);
                    }
                    Err(error) => {
                        let found = (gds, error.kind());
                        assert_eq!(found, (Gds::Require, ErrorKind::Unsupported), "{error}");
                        assert!(error.message().contains(words), "{words}: {error}");
                    }
                }
            });
        }
    }
}

#[test]
fn cufile_is_not_opened_where_nothing_can_be_direct() {
    let double =
        changed(&|double| std::fs::remove_file(double.dir.path("etc/cufile.json")).unwrap());
    on_double(double, |machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        let loader = build(machine.on_gpu(uncached(open(&path)), Gds::Auto));
        let why = loader.report().routes[0].why.clone();
        let words = "cuFile would go through host memory: the kernel module nvidia-fs";
        assert!(why.starts_with(words), "{why}");
        assert_eq!(machine.double.cufile.counts().opens, 0);
        // A requirement gets the library's abilities.
        assert!(machine.direct(uncached(open(&path))).build().is_ok());
        assert_eq!(machine.double.cufile.counts().opens, 1);
    });
}

#[test]
fn cufile_opens_in_the_mode_that_ends_no_capture() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        build(machine.direct(uncached(open(&path))));
        let mut calls = BTreeMap::<_, Vec<_>>::new();
        for line in machine.session.trace().lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let of_thread = calls.entry(words[1].to_string()).or_default();
            of_thread.push(words[2].to_string());
        }
        // The thread of cuFile's open makes no other calls of its own.
        let opening = ["cuThreadExchangeStreamCaptureMode"; 2];
        assert!(calls.values().any(|calls| *calls == opening), "{calls:?}");
    });
}

#[test]
fn a_failed_trial_leaves_no_context_on_other_gpus() {
    if !alone(&here!()) {
        return;
    }
    for (version, gpus) in [((1, 15), 0), ((1, 16), 3), ((1, 20), 3)] {
        let double = CuFileMachine::new(Route::Host);
        double.cufile.version(Some(version));
        double.cufile.contexts(true);
        let devices = vec![Gpu::new(1 << 30, "0000:3b:00.0"); 3];
        on_gpus(devices, double, move |machine| {
            let dir = Dir::new();
            let (path, _) = records_file(&dir, COUNT, RECORD);
            let loader = build(machine.on_gpu(uncached(open(&path)), Gds::Auto));
            let route = &loader.report().routes[0];
            assert!(route.why.contains("through host memory"), "{route}");
            let counts = machine.double.cufile.counts();
            assert_eq!((counts.opens, counts.closes, counts.users), (1, 1, 0));
            assert_eq!(machine.session.live().retains, 1, "the loader's own");
            drop(loader);
            // A direct route keeps the driver open and reports its cost.
            machine.double.cufile.route(0, Route::P2p);
            let loader = build(machine.on_gpu(uncached(open(&path)), Gds::Auto));
            let why = loader.report().routes[0].why.clone();
            let words = "on each of the 3 visible GPUs: set CUDA_VISIBLE_DEVICES";
            assert_eq!(why.contains(words), gpus > 0, "{why}");
            assert_eq!(machine.session.live().retains, 1 + gpus);
        });
    }
}

#[test]
fn memory_the_trial_cannot_release_is_leaked_and_counted() {
    if !alone(&here!()) {
        return;
    }
    let double = Arc::new(CuFileMachine::new(Route::P2p));
    lived("the trial".into(), double, |machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        let before = leaked();
        let cufile = &machine.double.cufile;
        cufile.fail_register(Register::BufferBack, 5030);
        let loader = build(machine.on_gpu(uncached(open(&path)), Gds::Auto));
        let route = &loader.report().routes[0];
        let words = "cuFileBufDeregister: CU_FILE_INTERNAL_ERROR (5030)";
        assert!(route.why.contains(words), "{route}");
        drop(loader);
        assert_eq!(leaked() - before, 1);
        let live = machine.session.live();
        assert_eq!((live.allocations, live.streams), (1, 0), "it is not freed");
        assert_eq!((live.events, live.leaked), (0, 0));
    });
}

#[test]
fn a_library_without_counters_is_used_only_if_required() {
    for (cfgs, version) in [
        (&["without_stats"][..], Some((1, 11))),
        (&[], Some((2, 3))),
        (&["without_version"], None),
    ] {
        let cufile = StandIn::own_with(cfgs);
        cufile.version(version);
        if version == Some((2, 3)) {
            // Counters at an unknown offset.
            cufile.gpus_at(1256);
        }
        on_double(CuFileMachine::of(cufile, Route::P2p), move |machine| {
            let dir = Dir::new();
            let (path, _) = records_file(&dir, COUNT, RECORD);
            let loader = build(machine.on_gpu(uncached(open(&path)), Gds::Auto));
            let words = "x staged (cuFile does not report the route of bytes)";
            assert_eq!(loader.report().routes[0].to_string(), words);
            let loader = build(machine.direct(uncached(open(&path))));
            let route = loader.report().routes[0].to_string();
            let words = "which does not report the route of bytes)";
            assert!(route.ends_with(words), "{route}");
            let right = Got::epoch(&build(uncached(open(&path))), 0);
            same(&Got::epoch(&loader, 0), &right, "not counted");
            let direct = direct_reads(&loader.report());
            assert_eq!(direct.how, "cuFile does not report the route");
            assert_eq!(direct.reads, 3);
        });
    }
}

#[test]
fn the_report_counts_the_bytes_of_each_route() {
    for version in [(1, 15), (1, 18), (1, 19), (1, 20), (1, 21)] {
        for (route, name) in [(Route::P2p, "p2p"), (Route::NvidiaFs, "nvidia-fs")] {
            let cufile = StandIn::own();
            cufile.version(Some(version));
            on_double(CuFileMachine::of(cufile, route), move |machine| {
                let dir = Dir::new();
                let (path, _) = records_file(&dir, COUNT, RECORD);
                let loader = build(machine.direct(uncached(open(&path))));
                let way = format!("cuFile {}.{}: {name}", version.0, version.1);
                assert_eq!(loader.report().routes[0].why, way);
                let how = || direct_reads(&loader.report()).how;
                // Nothing was read yet.
                assert_eq!(how(), "cuFile does not report the route");
                Got::epoch(&loader, 0);
                assert_eq!(how(), name);
                let report = loader.report().to_string();
                let line = format!("3 reads by cuFile, 0.000 GB, {name}; not checksummed");
                assert!(report.contains(&line), "{report}");
                // From here on through the host, silently.
                machine.double.cufile.route(0, Route::Host);
                Got::epoch(&loader, 1);
                assert_eq!(how(), "3 reads direct, 3 through host memory");
                // The counters are switched off.
                machine.double.cufile.set_level(0);
                assert_eq!(how(), "cuFile does not report the route");
            });
        }
    }
}
