//! Failing reads, files, registrations and datasets: the host reads instead of cuFile, or there is
//! one error with cause, place and sample.

use super::{direct_reads, fail_next_read};
use crate::common::cufile::{Register, Route, StandIn};
use crate::common::doubles::*;
use crate::common::*;
use feedline::dataset::{Dataset, Parts, Records, Sizes};
use feedline::device::Gds;
use feedline::storage::{Extent, Mode, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::unstable::{self, Faulty};
use feedline::{Error, ErrorKind, Loader, LoaderBuilder, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows of whole pages, and others; four rows of a batch are one read.
const RECORDS: [usize; 2] = [16_384, 20_000];
const COUNT: usize = 12;
const BATCH: usize = 4;

fn plain(path: &Path, record: usize) -> LoaderBuilder {
    let records = Records::builder(record)
        .classes((0..COUNT as i64).collect())
        .open(path)
        .unwrap();
    Loader::builder(records)
        .batch_size(BATCH)
        .tuning(|t| t.reader(Mode::Pread))
        .workers(1)
}

fn right(path: &Path, record: usize) -> Vec<Got> {
    Got::epoch(&build(plain(path, record)), 0)
}

/// The file's place in the error, and the run or row there.
#[track_caller]
fn check_site(error: &Error, path: &Path, record: usize) {
    let site = error.site();
    assert_eq!(site.path.as_deref(), Some(path), "{error}");
    let sample = site.sample.expect("a sample");
    let offset = site.offset.expect("an offset");
    assert_eq!(offset, sample * record as u64, "{error}");
    let is_whole = |len: u64| len > 0 && len.is_multiple_of(record as u64);
    assert!(site.len.is_some_and(is_whole), "{error}");
    assert_eq!(site.batch, Some(sample / BATCH as u64), "{error}");
}

type Fault = (&'static str, fn(&StandIn, u64));

const FAULTS: [Fault; 7] = [
    ("Input/output error", |lib, read| lib.fail_read_os(read, 5)),
    ("os error 11", |lib, read| lib.fail_read_os(read, 11)),
    ("CU_FILE_IO_ERROR (5044)", |lib, read| {
        lib.fail_read(read, 5044)
    }),
    ("CU_FILE_CUDA_DRIVER_ERROR (5011)", |lib, read| {
        lib.fail_read(read, 5011)
    }),
    ("an unknown cuFile error (5099)", |lib, read| {
        lib.fail_read(read, 5099)
    }),
    ("cuFileRead read 0 of", |lib, read| lib.short_read(read, 0)),
    ("cuFileRead read 65535 of", |lib, read| {
        lib.short_read(read, 65_535)
    }),
];

/// `check` with every kind of rows and of faults, given the right batches.
fn each_fault(check: impl Fn(&Machine, &Path, usize, &[Got], Fault) + Send + Sync + 'static) {
    on_machine(move |machine| {
        let dir = Dir::new();
        for record in RECORDS {
            let (path, _) = records_file(&dir, COUNT, record);
            let right = right(&path, record);
            FAULTS
                .into_iter()
                .for_each(|fault| check(machine, &path, record, &right, fault));
        }
    });
}

#[test]
fn the_host_brings_rows_that_a_direct_read_does_not() {
    each_fault(|machine, path, record, right, (words, fault)| {
        for read in 0..3 {
            let loader = build(machine.on_gpu(plain(path, record), Gds::Auto));
            fault(&machine.double.cufile, machine.reads() as u64 + read);
            same(&Got::epoch(&loader, 0), right, words);
            let report = loader.report();
            let direct = direct_reads(&report);
            let counts = (direct.reads, direct.host_rows);
            assert_eq!(counts, (2, BATCH as u64), "{words}: {direct}");
            assert_eq!(direct.bytes, (2 * BATCH * record) as u64);
            let why = direct.why_host.unwrap();
            assert!(why.contains(words), "{words}: {why}");
            let report = report.to_string();
            assert!(report.contains("; 4 rows by the host ("), "{report}");
            // A file with one failed read is read again.
            same(&Got::epoch(&loader, 0), right, words);
            assert_eq!(direct_reads(&loader.report()).reads, 5);
        }
    });
}

#[test]
fn opens_for_cufile_and_the_hosts_reads_of_rows_are_retried() {
    on_machine(|machine| {
        for code in [5, 116] {
            let dir = Dir::new();
            let faulty = Arc::new(Faulty::new());
            let (path, _) = records_file(&dir, COUNT, 16_384);
            let builder = plain(&path, 16_384).tuning(|t| t.faulty(faulty.clone()));
            let loader = build(machine.on_gpu(builder, Gds::Auto));
            let recovered_and_by_host = |words| {
                faulty.inject(2, unstable::Fault::Error(code));
                same(&Got::epoch(&loader, 0), &right(&path, 16_384), words);
                let report = loader.report();
                let by_host = direct_reads(&report).host_rows;
                (report.total.storage.recovered, by_host)
            };
            let counts = recovered_and_by_host("opened for cuFile again");
            assert_eq!(counts, (0, 0), "{code}");
            fail_next_read(machine);
            let counts = recovered_and_by_host("read by the host again");
            assert_eq!(counts, (1, BATCH as u64), "{code}");
        }
    });
}

#[test]
fn the_surroundings_of_rows_may_be_missing() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, 20_000);
        let make = || plain(&path, 20_000).batch_size(COUNT);
        let right = Got::epoch(&build(make()), 0);
        // 240,000 bytes in 241,664.
        for (bytes, host_rows) in [(240_000, 0), (239_999, COUNT as u64)] {
            let loader = build(machine.on_gpu(make(), Gds::Auto));
            let read = machine.reads() as u64;
            machine.double.cufile.short_read(read, bytes);
            same(&Got::epoch(&loader, 0), &right, "short");
            let by_host = direct_reads(&loader.report()).host_rows;
            assert_eq!(by_host, host_rows, "{bytes}");
        }
    });
}

#[test]
fn a_failed_required_direct_read_is_an_error() {
    each_fault(|machine, path, record, right, (words, fault)| {
        let loader = build(machine.direct(plain(path, record)));
        fault(&machine.double.cufile, machine.reads() as u64 + 1);
        let mut batches = loader.epoch(0).unwrap();
        let error = batches.find_map(Result::err).expect("an error");
        assert_eq!(error.kind(), ErrorKind::Device, "{error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
        check_site(&error, path, record);
        assert!(batches.next().is_none(), "it ended");
        drop(batches);
        same(&Got::epoch(&loader, 0), right, "the next one is whole");
    });
}

fn truncate(path: &Path, len: usize) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(len as u64).unwrap();
}

/// An epoch's error, with the right batches before it.
fn error_of(loader: &Loader, right: &[Got]) -> Error {
    let mut got = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        match batch.and_then(|batch| Got::of(&batch)) {
            Ok(batch) => got.push(batch),
            Err(error) => {
                same(&got, &right[..got.len()], "before the error");
                return error;
            }
        }
    }
    panic!("no error");
}

#[test]
fn a_file_that_changed_since_its_index_is_an_error() {
    on_machine(|machine| {
        type Change = fn(&Path);
        let truncated = |path: &Path| truncate(path, 5 * 16_384 + 100);
        let other = |path: &Path| std::fs::write(path, noise(100, 1)).unwrap();
        let removed = |path: &Path| std::fs::remove_file(path).unwrap();
        let a_folder = |path: &Path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        };
        let cases: [(Change, ErrorKind); 4] = [
            (truncated, ErrorKind::Changed),
            (other, ErrorKind::Changed),
            (removed, ErrorKind::NotFound),
            (a_folder, ErrorKind::NotAFile),
        ];
        for gds in [Gds::Auto, Gds::Require] {
            for (change, kind) in cases {
                let dir = Dir::new();
                let (path, _) = records_file(&dir, COUNT, 16_384);
                let right = right(&path, 16_384);
                let loader = build(machine.on_gpu(plain(&path, 16_384), gds));
                change(&path);
                let error = error_of(&loader, &right);
                assert_eq!(error.kind(), kind, "{gds:?}: {error}");
                let site = error.site();
                assert_eq!(site.path.as_ref(), Some(&path), "{error}");
                assert!(site.sample.is_some() && site.batch.is_some(), "{error}");
            }
        }
    });
}

#[test]
fn a_file_cut_while_open_fails_the_first_missing_sample() {
    on_machine(|machine| {
        for record in RECORDS {
            for gds in [Gds::Auto, Gds::Require] {
                let dir = Dir::new();
                let (path, _) = records_file(&dir, COUNT, record);
                let right = right(&path, record);
                let loader = build(machine.on_gpu(plain(&path, record), gds));
                // The host has it open, too.
                fail_next_read(machine);
                let _ = Got::try_epoch(&loader, 0);
                truncate(&path, 5 * record + 100);
                let error = error_of(&loader, &right);
                assert_eq!(error.kind(), ErrorKind::Truncated, "{gds:?}: {error}");
                let place = (error.site().sample, error.site().batch);
                assert_eq!(place, (Some(5), Some(1)), "{error}");
                check_site(&error, &path, record);
            }
        }
    });
}

#[test]
fn a_file_replaced_while_open_keeps_its_content() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, 16_384);
        let right = right(&path, 16_384);
        let loader = build(machine.on_gpu(plain(&path, 16_384), Gds::Auto));
        Got::epoch(&loader, 0);
        std::fs::rename(dir.write("other", &noise(COUNT * 16_384, 77)), &path).unwrap();
        same(&Got::epoch(&loader, 0), &right, "replaced");
        assert_eq!(direct_reads(&loader.report()).host_rows, 0);
    });
}

#[test]
fn a_file_refused_by_cufile_is_read_by_the_host() {
    const NOT_REGISTERED: &str = "CU_FILE_HANDLE_NOT_REGISTERED (5027)";
    on_machine(|machine| {
        let dir = Dir::new();
        for (index, name) in ["a", "b", "c"].into_iter().enumerate() {
            dir.write(&format!("files/{name}"), &noise(4 * 16_384, index as u64));
        }
        let files = dir.path("files");
        let right = right(&files, 16_384);
        for gds in [Gds::Auto, Gds::Require] {
            let loader = build(machine.on_gpu(plain(&files, 16_384), gds));
            // The trial took one. The first of the others fails.
            machine.double.cufile.fail_register(Register::File, 5027);
            if gds == Gds::Require {
                let error = error_of(&loader, &right);
                let said = error.to_string();
                assert_eq!(error.kind(), ErrorKind::Device, "{said}");
                for words in ["does not accept the file: ", NOT_REGISTERED] {
                    assert!(said.contains(words), "{said}");
                }
                let path = error.site().path.as_ref().unwrap();
                assert!(path.starts_with(&files), "{said}");
            } else {
                for _ in 0..2 {
                    same(&Got::epoch(&loader, 0), &right, "one file by the host");
                }
                let direct = direct_reads(&loader.report());
                assert_eq!((direct.host_rows, direct.reads), (2 * 4, 2 * 2), "{direct}");
                let why = direct.why_host.unwrap();
                let words = format!("cuFileHandleRegister: {NOT_REGISTERED}");
                assert!(why.contains(&words), "{why}");
            }
        }
    });
}

#[test]
fn the_host_fills_memory_that_cufile_refuses() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, 16_384);
        let right = right(&path, 16_384);
        let before = (leaked(), descriptors());
        for buffer in 0..3 {
            // The trial's is the first.
            let refuse = || {
                let cufile = &machine.double.cufile;
                cufile.fail_register_after(Register::Buffer, 1 + buffer, 5036);
            };
            refuse();
            let said = "cuFileBufRegister: CU_FILE_GPU_MEMORY_PINNING_FAILED";
            let make = || plain(&path, 16_384).tuning(|t| t.device_batches(3));
            let loader = build(machine.on_gpu(make(), Gds::Auto));
            let report = loader.report();
            let counts = machine.double.cufile.counts();
            let route = &report.routes[0];
            assert_eq!(route.route, feedline::device::Route::Staged, "{route}");
            assert!(route.why.contains(said), "{route}");
            assert!(report.total.copy.as_ref().unwrap().direct.is_none());
            assert_eq!((counts.buffers, counts.users), (0, 0), "cuFile is closed");
            same(&Got::epoch(&loader, 0), &right, "by the host");
            drop(loader);
            refuse();
            let error = machine.direct(make()).build().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Device, "{error}");
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(machine.double.cufile.counts().buffers, 0);
        }
        let kept = |path: &&String| path.contains("x16384");
        assert_eq!(leaked(), before.0);
        assert!(!descriptors().iter().any(|path| kept(&path)));
    });
}

#[test]
fn memory_that_stays_registered_is_leaked_and_counted() {
    if !alone(&here!()) {
        return;
    }
    let double = Arc::new(CuFileMachine::new(Route::P2p));
    lived("deregistration".into(), double, |machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, 16_384);
        let right = right(&path, 16_384);
        let before = leaked();
        let builder = plain(&path, 16_384).tuning(|t| t.device_batches(3));
        let loader = build(machine.direct(builder));
        same(&Got::epoch(&loader, 0), &right, "before");
        let cufile = &machine.double.cufile;
        cufile.fail_register_after(Register::BufferBack, 1, 5030);
        drop(loader);
        assert_eq!(leaked() - before, 1);
        let live = machine.session.live();
        assert_eq!((live.allocations, live.streams, live.events), (1, 0, 0));
        // Its context stays with it.
        assert_eq!((live.retains, live.leaked), (1, 0));
        let counts = machine.double.cufile.counts();
        assert_eq!((counts.buffers, counts.files, counts.users), (1, 0, 0));
    });
}

#[test]
fn a_failed_launch_is_one_error_and_the_next_epoch_whole() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, 20_000);
        let right = right(&path, 20_000);
        for (symbol, by_host) in [
            ("cuLaunchKernel", false),
            ("cuMemcpyHtoDAsync_v2", false),
            // Rows read by the host have a copy of their own.
            ("cuMemcpyHtoDAsync_v2", true),
            ("cuStreamSynchronize", true),
        ] {
            let loader = build(machine.on_gpu(plain(&path, 20_000), Gds::Auto));
            if by_host {
                fail_next_read(machine);
            }
            let nth = machine.session.count(symbol);
            machine.session.fail_named(symbol, nth, 1, false);
            let error = error_of(&loader, &right);
            assert_eq!(error.kind(), ErrorKind::Device, "{symbol}: {error}");
            let name = symbol.trim_end_matches("_v2");
            let words = format!("{name}: CUDA_ERROR_INVALID_VALUE");
            assert!(error.to_string().contains(&words), "{error}");
            same(&Got::epoch(&loader, 0), &right, symbol);
        }
    });
}

/// A dataset with other answers when asked for direct reads.
struct Liar {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    lie: Lie,
    memory: Vec<u8>,
}

/// Its answer for sample 6: fields, and where their bytes are.
type Lie = fn() -> Vec<(usize, Said)>;

enum Said {
    At(usize, u64, u64),
    Framed,
    Inline(usize),
}
use Said::*;

impl Liar {
    fn open(path: &PathBuf, lie: Lie) -> Self {
        let mut sources = Sources::new();
        sources.file(path, (COUNT * 16_384) as u64).unwrap();
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [16_384]))];
        Self {
            sources: Arc::new(sources),
            schema,
            lie,
            memory: noise(20_000, 6),
        }
    }
}

impl Dataset for Liar {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        COUNT as u64
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(16_384)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let extent = |source: usize, offset, len| Extent {
            source: SourceId::at(source),
            offset,
            len,
        };
        let direct = std::thread::current()
            .name()
            .is_some_and(|name| name.starts_with("feedline-gds"));
        if !direct || sample != 6 {
            parts.extent(0, extent(0, sample * 16_384, 16_384));
            return Ok(());
        }
        for (field, said) in (self.lie)() {
            match said {
                At(source, offset, len) => parts.extent(field, extent(source, offset, len)),
                Framed => parts.framed(field, extent(0, 6 * 16_384, 16_384)),
                Inline(len) => parts.inline(field, &self.memory[..len]),
            }
        }
        Ok(())
    }
}

#[test]
fn a_dataset_that_panics_is_an_error_of_its_sample() {
    use ErrorKind::{Panicked, Shape, Truncated, User};
    const END: u64 = 12 * 16_384;
    const PAST: &str = "past the source's indexed length";
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, 16_384);
        let panics: Lie = || panic!("out of memory");
        let lies: [(Lie, ErrorKind, &str); 9] = [
            (panics, Panicked, "out of memory"),
            (|| vec![], User, "gave no bytes for field `x`"),
            (|| vec![(1, At(0, 0, 1))], User, "gave a part for field 1"),
            (|| vec![(0, At(7, 0, 16_384))], User, "names source 7"),
            (|| vec![(0, At(0, END, 16_384))], Truncated, PAST),
            (|| vec![(0, At(0, u64::MAX, 2))], Truncated, PAST),
            (
                || vec![(0, At(0, 0, 100))],
                Shape,
                "16384 bytes, the sample has 100",
            ),
            (
                || vec![(0, Inline(20_000))],
                Shape,
                "16384 bytes, the sample has 20000",
            ),
            (|| vec![(0, Framed)], User, "were stored unchanged in files"),
        ];
        for (lie, kind, words) in lies {
            for gds in [Gds::Auto, Gds::Require] {
                let builder = Loader::builder(Liar::open(&path, lie))
                    .batch_size(BATCH)
                    .tuning(|t| t.reader(Mode::Pread));
                let loader = build(machine.on_gpu(builder, gds));
                for _ in 0..2 {
                    let mut batches = loader.epoch(0).unwrap();
                    assert_eq!(batches.next().unwrap().unwrap().ids(), [0, 1, 2, 3]);
                    let error = batches.next().unwrap().unwrap_err();
                    assert_eq!(error.kind(), kind, "{error}");
                    assert!(error.to_string().contains(words), "{error}");
                    let place = (error.site().sample, error.site().batch);
                    assert_eq!(place, (Some(6), Some(1)), "{error}");
                    assert!(batches.next().is_none());
                }
            }
        }
    });
}

#[test]
fn a_dataset_may_name_another_place_of_the_same_bytes() {
    const NINTH: u64 = 9 * 16_384;
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, bytes) = records_file(&dir, COUNT, 16_384);
        let lies: [(Lie, u64); 3] = [
            (|| vec![(0, At(0, NINTH, 16_384))], NINTH),
            (|| vec![(0, Inline(16_384))], u64::MAX),
            // Not whole pages: the host reads them.
            (|| vec![(0, At(0, 77, 16_384))], 77),
        ];
        for (lie, from) in lies {
            let builder = Loader::builder(Liar::open(&path, lie))
                .batch_size(BATCH)
                .tuning(|t| t.reader(Mode::Pread));
            let loader = build(machine.on_gpu(builder, Gds::Auto));
            let got = Got::epoch(&loader, 0);
            let row = &got[1].bytes("x")[2 * 16_384..][..16_384];
            let memory = noise(20_000, 6);
            let right = match from {
                u64::MAX => &memory[..16_384],
                from => &bytes[from as usize..][..16_384],
            };
            assert!(row == right, "{from}");
            let by_host = direct_reads(&loader.report()).host_rows;
            assert_eq!(by_host, u64::from(from != NINTH));
        }
    });
}
