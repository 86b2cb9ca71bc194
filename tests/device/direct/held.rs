//! Slow or endless reads, and slow consumers: no memory is reused while in use, no thread waits in
//! the driver, and everything ends.

use super::direct_reads;
use crate::common::cufile::Route;
use crate::common::doubles::*;
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::{Dataset, Parts, Records, Sizes};
use feedline::storage::{Extent, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{ErrorKind, Loader, LoaderBuilder, Order, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const COUNT: usize = 48;
const BATCH: usize = 4;

/// Unaligned rows, so that there is a staging area; several reads per batch.
const RECORD: usize = 5000;

fn plain(path: &Path) -> LoaderBuilder {
    let records = Records::builder(RECORD)
        .classes((0..COUNT as i64).collect())
        .open(path)
        .unwrap();
    let builder = Loader::builder(records)
        .order(Order::shuffled(4))
        .batch_size(BATCH);
    builder.workers(1).tuning(|t| t.slots(5).device_batches(3))
}

/// Two epochs by the host.
fn right(path: &Path) -> [Vec<Got>; 2] {
    let host = build(plain(path));
    [0, 1].map(|epoch| Got::epoch(&host, epoch))
}

/// An iterator with reads in flight, held within cuFile.
fn begun(machine: &Machine, loader: &Loader) -> feedline::Epoch {
    machine.double.cufile.hold_reads(true);
    let batches = loader.epoch(0).unwrap();
    until("reads are held", || machine.double.cufile.held() > 0);
    batches
}

#[test]
fn an_epoch_dropped_under_its_reads_spares_the_next() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        let right = right(&path);
        let loader = build(machine.direct(plain(&path)));
        for received in [0, 1, 3, 11] {
            for batch in loader.epoch(0).unwrap().take(received) {
                drop(batch.unwrap());
            }
            drop(begun(machine, &loader));
            let held = machine.double.cufile.held();
            let what = format!("{received}");
            let mut batches = loader.epoch(1).unwrap();
            std::thread::scope(|scope| {
                // The held reads own buffers that the next run needs.
                let first = scope.spawn(|| Got::of(&batches.next().unwrap().unwrap()).unwrap());
                assert!(machine.double.cufile.held() >= held);
                machine.double.cufile.hold_reads(false);
                same(&[first.join().unwrap()], &right[1][..1], &what);
            });
            same(&Got::all(batches), &right[1][1..], &what);
        }
        assert_eq!(direct_reads(&loader.report()).host_rows, 0);
    });
}

#[test]
fn a_loader_that_is_dropped_under_its_reads_ends_when_they_do() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        for keep_iterator in [false, true] {
            let before = leaked();
            let loader = build(machine.direct(plain(&path)));
            let batches = begun(machine, &loader);
            std::thread::scope(|scope| {
                let dropped = scope.spawn(move || match keep_iterator {
                    true => drop((loader, batches)),
                    false => drop((batches, loader)),
                });
                // It is in flight, and must wait.
                std::thread::sleep(Duration::from_millis(30));
                assert!(!dropped.is_finished() && machine.double.cufile.counts().buffers > 0);
                machine.double.cufile.hold_reads(false);
                dropped.join().unwrap();
            });
            assert_eq!(leaked() - before, 0);
            assert_eq!(machine.double.cufile.counts().buffers, 0);
        }
    });
}

#[test]
fn a_read_that_never_returns_is_counted_with_its_memory() {
    // It takes as long as a loader waits for its threads; meanwhile the other tests run.
    if !alone(&here!()) {
        return;
    }
    let double = Arc::new(CuFileMachine::new(Route::P2p));
    lived("never returns".into(), double, |machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, RECORD);
        let before = leaked();
        let one = Records::builder(RECORD).open(&path).unwrap();
        let loader = build(machine.direct(Loader::builder(one).batch_size(COUNT).workers(1)));
        let batches = begun(machine, &loader);
        assert_eq!(machine.double.cufile.held(), 1, "one read has all rows");
        drop((batches, loader));
        // The thread in the read, and the thread that keeps the memory for it; a later loader
        // reports them.
        assert_eq!(leaked() - before, 2);
        let buffers = machine.double.cufile.counts().buffers;
        assert_eq!(buffers, 3, "no memory is taken away from the read");
        assert!(machine.session.live().allocations >= 3);
        machine.double.cufile.hold_reads(false);
        // If it returns after all, everything is released.
        until("the threads have ended", || loader_threads().is_empty());
        let live = machine.session.live();
        assert_eq!(live, crate::common::standin::Live::default());
        assert_eq!(machine.double.cufile.counts().users, 0);
    });
}

#[test]
fn reads_begin_after_the_consumers_work_on_the_buffer() {
    on_machine(|machine| {
        let dir = Dir::new();
        for record in [4096, RECORD] {
            let (path, bytes) = records_file(&dir, COUNT, record);
            let context = CudaContext::new(0).unwrap();
            let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
            let records = Records::builder(record).open(&path).unwrap();
            let builder = Loader::builder(records).batch_size(BATCH);
            let builder = machine.direct(builder.tuning(|t| t.device_batches(2)));
            let loader = build(builder.stream(&streams[0]).stream(&streams[1]));
            let mut batches = loader.epoch(0).unwrap();
            let first = batches.next().unwrap().unwrap();
            let second = batches.next().unwrap().unwrap();
            let reads = machine.reads();
            let mut copies = streams
                .each_ref()
                .map(|stream| stream.alloc_zeros::<u8>(BATCH * record).unwrap());
            streams
                .iter()
                .for_each(|stream| stream.synchronize().unwrap());
            machine.session.hold(true);
            for (stream, copy) in streams.iter().zip(&mut copies) {
                let field = first.field("record").unwrap();
                let slice = field.cuda_slice::<u8>(stream).unwrap();
                stream.memcpy_dtod(&*slice, copy).unwrap();
            }
            let bells = machine.session.count("cuLaunchHostFunc");
            drop(first);
            // It was polled, and has a bell attached.
            until("the buffer is seen to be in use", || {
                machine.session.count("cuLaunchHostFunc") > bells
            });
            let looks = machine.session.count("cuEventQuery");
            until("it is looked at again", || {
                machine.session.count("cuEventQuery") > looks
            });
            assert_eq!(machine.reads(), reads, "nothing is read into it");
            let trace = machine.session.trace();
            let waits = trace.lines().find(|line| line.ends_with("= ..."));
            assert_eq!(waits, None);
            machine.session.hold(false);
            let third = Got::of(&batches.next().unwrap().unwrap()).unwrap();
            assert!(third.bytes("record") == &bytes[2 * BATCH * record..3 * BATCH * record]);
            for (stream, copy) in streams.iter().zip(&copies) {
                let kept = stream.clone_dtoh(copy).unwrap() == bytes[..BATCH * record];
                assert!(kept, "the first batch was overwritten");
            }
            drop(second);
            let rest = Got::all(batches);
            let rest: Vec<_> = rest.iter().map(|batch| batch.bytes("record")).collect();
            assert!(rest.concat() == bytes[3 * BATCH * record..]);
        }
    });
}

/// Panics at its first sample when asked for direct reads.
struct Panics(Arc<Sources>, Vec<EncodedField>);

impl Dataset for Panics {
    fn schema(&self) -> &[EncodedField] {
        &self.1
    }
    fn len(&self) -> u64 {
        COUNT as u64
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.0
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(4096)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let direct = std::thread::current()
            .name()
            .is_some_and(|name| name.starts_with("feedline-gds"));
        assert!(!direct || sample > 0, "the first sample");
        let source = self.0.ids().next().unwrap();
        let extent = Extent {
            source,
            offset: sample * 4096,
            len: 4096,
        };
        parts.extent(0, extent);
        Ok(())
    }
}

#[test]
fn an_error_does_not_wait_for_the_reads_of_later_batches() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, COUNT, 4096);
        let mut sources = Sources::new();
        sources.file(&path, (COUNT * 4096) as u64).unwrap();
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [4096]))];
        let dataset = Panics(Arc::new(sources), schema);
        let loader = build(machine.direct(Loader::builder(dataset).batch_size(BATCH).workers(1)));
        let mut batches = begun(machine, &loader);
        let error = batches.next().unwrap().unwrap_err();
        let found = (error.kind(), error.site().sample);
        assert_eq!(found, (ErrorKind::Panicked, Some(0)), "{error}");
        assert!(machine.double.cufile.held() > 0);
        std::thread::scope(|scope| {
            let dropped = scope.spawn(move || drop((batches, loader)));
            machine.double.cufile.hold_reads(false);
            dropped.join().unwrap();
        });
    });
}
