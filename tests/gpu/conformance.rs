//! Bytes on the device are the bytes on the host, whatever the consumer does: the same loader on
//! the host is the oracle.
//!
//! ```text
//! builder ──► host loader ───► ids, status, lengths, bytes ─┐
//!    └──────► device loader ─► read back by the crate, by    ├─ the same?
//!                              cudarc, by raw address ──────┘
//! ```
//!
//! Pictures that are finished on the device are compared with `Finish::apply`, which the host's
//! loader runs; the gather kernel of direct reads with a copy of each row.

use crate::common::cufile::Route;
use crate::common::doubles::CuFileMachine;
use crate::common::{ALL_LAST, DTYPES, noise};
use crate::driver::{Consumer, DeviceBytes, Gpu, read, said};
use crate::kinds;
use crate::ours::{device, words};
use crate::section::{Ctx, size};
use feedline::dataset::Records;
use feedline::device::Finish;
use feedline::device::Gds;
use feedline::device::cuda::Stream;
use feedline::device::cuda::cudarc::driver::CudaStream;
use feedline::dlpack::{DLDevice, Tensors};
use feedline::memory::MemoryTerm;
use feedline::storage::{Direct, Mode};
use feedline::tensor::{DType, Element, Field};
use feedline::{
    Batch, Device, Epoch, ErrorKind, FieldView, LastBatch, Loader, LoaderBuilder, Order,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let gpu = ctx.gpu()?;
    let all = Case {
        gpu: &gpu,
        ctx,
        device: device()?,
        stream: gpu.stream()?,
    };
    ctx.check(
        "every dtype, of fixed shape and up to a maximum, all and kept ones",
        || all.mixed(),
    );
    ctx.check(
        "finished pictures: dtypes, layouts, channels, widths, flips",
        || all.finished(),
    );
    if ctx.kernels.get() {
        ctx.check("the gather kernel copies each row", || all.gather());
    } else {
        ctx.skip(
            "the gather kernel copies each row",
            "no C++ compiler for the stand-in's kernels",
        );
    }
    ctx.check("a batch that is read as soon as it is handed out", || {
        all.pending(1, 0)
    });
    ctx.check("work that is pending when a batch is dropped", || {
        all.pending(1, 3)
    });
    ctx.check("the same on two streams, dropped by another thread", || {
        all.pending(2, 3)
    });
    ctx.check("every array as DLPack, deleted by another thread", || {
        all.dlpack()
    });
    if ctx.quick {
        return Ok(());
    }
    ctx.check(
        "every kind of loader; only what a batch holds is copied",
        || all.kinds(),
    );
    ctx.check("steps over several epochs", || all.steps());
    ctx.check("the smallest legal budget", || all.budget());
    ctx.check("records in files, by every reader", || all.files());
    ctx.check(
        "who holds every batch has them for itself, is told, and goes on after a drop",
        || all.held(),
    );
    ctx.check(
        "batches outlive their loader; an epoch that is left half-way",
        || all.outlive(),
    );
    ctx.check("two loaders on one device at once", || all.two());
    ctx.check("the caller's own context", || all.own_context());
    // The last, since the library is another's.
    all.cufile();
    Ok(())
}

/// What was compared.
#[derive(Default)]
struct Tally {
    loaders: usize,
    batches: usize,
    arrays: usize,
    bytes: usize,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.loaders += other.loaders;
        self.batches += other.batches;
        self.arrays += other.arrays;
        self.bytes += other.bytes;
    }

    fn words(&self) -> String {
        format!(
            "{} loaders, {} batches, {}",
            self.loaders,
            self.batches,
            size(self.bytes)
        )
    }
}

struct Case<'c> {
    gpu: &'c Gpu,
    ctx: &'c Ctx,
    device: Device,
    stream: Arc<CudaStream>,
}

/// So many bytes and a label for each sample.
pub fn numbers(count: usize, record: usize) -> LoaderBuilder {
    let labels = (0..count as i64).map(|id| id * 3 - 7).collect();
    let records = Records::builder(record)
        .classes(labels)
        .open_bytes(noise(record * count, count as u64));
    Loader::builder(records.expect("whole records")).workers(2)
}

/// The same with a field of each dtype, fixed and up to a maximum, filled by the sample's number.
fn mixed(count: usize) -> LoaderBuilder {
    let mut fields = Vec::new();
    for (at, dtype) in DTYPES.into_iter().enumerate() {
        fields.push(Field::fixed(format!("fixed-{dtype}"), dtype, [at + 1, 5]));
        fields.push(Field::up_to(format!("up-to-{dtype}"), dtype, 3 * at + 1));
    }
    let names: Vec<_> = fields
        .iter()
        .map(|field| (field.name().to_string(), field.is_up_to()))
        .collect();
    numbers(count, 8).map_adding(fields, move |row, ctx| {
        for (at, (name, up_to)) in names.iter().enumerate() {
            let field = row.index_of(name)?;
            let most = row.bytes_mut(field).len();
            let bytes = noise(most, ctx.id() * 31 + at as u64);
            row.bytes_mut(field).copy_from_slice(&bytes);
            if *up_to {
                let max = 3 * (at / 2) + 1;
                row.set_len(field, (ctx.id() as usize + at) % (max + 1))?;
            }
        }
        Ok(())
    })
}

impl Case<'_> {
    /// The same loader on both sides, for so many epochs. `bound`: the consumer's stream is told to
    /// the builder.
    fn same(
        &self,
        make: impl Fn() -> LoaderBuilder,
        epochs: u64,
        bound: bool,
    ) -> Result<Tally, String> {
        let there = make().device(self.device.clone());
        let there = if bound {
            there.stream(&self.stream)
        } else {
            there
        };
        self.same_there(make, &there.build().map_err(words)?, epochs)
    }

    /// The same with this loader on the device.
    fn same_there(
        &self,
        make: impl Fn() -> LoaderBuilder,
        there: &Loader,
        epochs: u64,
    ) -> Result<Tally, String> {
        let host = make().device(Device::host()).build().map_err(words)?;
        self.same_batches([&host, there], |loader| {
            loader.epochs(loader.next_epoch()..epochs)
        })
    }

    /// Host and device have the same batches, the same state before each, and the same ledger.
    fn same_batches(
        &self,
        loaders: [&Loader; 2],
        pull: impl Fn(&Loader) -> feedline::Result<Epoch>,
    ) -> Result<Tally, String> {
        let mut tally = Tally {
            loaders: 1,
            ..Tally::default()
        };
        let [mut left, mut right] = [
            pull(loaders[0]).map_err(words)?,
            pull(loaders[1]).map_err(words)?,
        ];
        loop {
            let [host, there] = loaders.map(|loader| loader.state().map(|state| state.to_bytes()));
            if host.map_err(words)? != there.map_err(words)? {
                return Err(format!("the states after {} batches differ", tally.batches));
            }
            match (left.next(), right.next()) {
                (None, None) => {
                    let [host, there] = loaders.map(|loader| loader.ledger());
                    let same =
                        (host.substituted, &host.samples) == (there.substituted, &there.samples);
                    return if same {
                        Ok(tally)
                    } else {
                        Err(format!("{there:?}, not {host:?}"))
                    };
                }
                (Some(expected), Some(got)) => {
                    let expected = expected.map_err(words)?;
                    let got = got.map_err(words)?;
                    tally.bytes += self.compare(&expected, &got, tally.batches)?;
                    tally.arrays += got.fields().count();
                    tally.batches += 1;
                }
                (expected, _) => {
                    let more = if expected.is_some() { "host" } else { "device" };
                    return Err(format!(
                        "after {} batches only the {more} has more",
                        tally.batches
                    ));
                }
            }
        }
    }

    /// Looks at a batch in another way each time.
    fn compare(&self, expected: &Batch, got: &Batch, number: usize) -> Result<usize, String> {
        head(expected, got)?;
        let mut bytes = 0;
        for (expected, field) in expected.fields().zip(got.fields()) {
            let right = expected.as_bytes().map_err(words)?;
            if field.as_bytes().is_ok() {
                return Err(format!("batch {number}: `{}` is on the host", field.name()));
            }
            let seen = self.look(got, &field, number)?;
            differ(field.name(), &seen, right)
                .map_err(|error| format!("batch {number}: {error}"))?;
            bytes += right.len();
            let lens = (field.lens(), field.device_lens_ptr().map_err(words)?);
            let offsets = (field.offsets(), field.device_offsets_ptr().map_err(words)?);
            for (what, (numbers, at)) in [("lengths", lens), ("offsets", offsets)] {
                if numbers.is_some() != at.is_some() {
                    return Err(format!(
                        "batch {number}: {what} here {numbers:?}, there {at:?}"
                    ));
                }
                if let (Some(numbers), Some(at)) = (numbers, at) {
                    self.settle(got)?;
                    differ(
                        what,
                        &read(&self.gpu.context, at, 8 * numbers.len())?,
                        bytemuck::cast_slice(numbers),
                    )?;
                    bytes += 8 * numbers.len();
                }
            }
        }
        Ok(bytes)
    }

    fn look(&self, batch: &Batch, field: &FieldView<'_>, number: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; field.size_bytes()];
        match number % 3 {
            0 => field.read_into(&mut bytes).map_err(words)?,
            1 => {
                if let Some(bytes) = self.by_cudarc(field)? {
                    return Ok(bytes);
                }
                // Rows apart: parts of a batch have addresses of their own.
                for part in batch.micro(3).map_err(words)? {
                    let part = part.field(field.name()).map_err(words)?;
                    let from = (part.device_ptr().map_err(words)?
                        - field.device_ptr().map_err(words)?)
                        as usize;
                    part.read_into(&mut bytes[from..from + part.size_bytes()])
                        .map_err(words)?;
                }
            }
            _ => {
                let at = field.device_ptr().map_err(words)?;
                self.settle(batch)?;
                bytes = read(&self.gpu.context, at, bytes.len())?;
            }
        }
        Ok(bytes)
    }

    /// By a slice and a copy of cudarc's, for the types that it knows.
    fn by_cudarc(&self, field: &FieldView<'_>) -> Result<Option<Vec<u8>>, String> {
        macro_rules! of {
            ($($dtype:ident: $rust:ty),*) => {
                match field.dtype() {
                    $(DType::$dtype => {
                        let slice = field.cuda_slice::<$rust>(&self.stream).map_err(words)?;
                        let copy = self.stream.clone_dtoh(&*slice).map_err(said("clone_dtoh"))?;
                        self.stream.synchronize().map_err(said("cuStreamSynchronize"))?;
                        Some(bytemuck::cast_slice(&copy).to_vec())
                    })*
                    _ => None,
                }
            };
        }
        Ok(
            of!(U8: u8, I8: i8, U16: u16, I16: i16, U32: u32, I32: i32, U64: u64, I64: i64, F32: f32, F64: f64),
        )
    }

    /// Every so many cases of a list are enough for the short form.
    fn thin(&self, step: usize) -> usize {
        if self.ctx.quick { step } else { 1 }
    }

    /// What is on its way to the batch is there: the stream waits for it, and is waited for.
    fn settle(&self, batch: &Batch) -> Result<(), String> {
        batch.bind(Stream::from(&self.stream)).map_err(words)?;
        self.stream
            .synchronize()
            .map_err(said("cuStreamSynchronize"))
    }

    fn mixed(&self) -> Result<String, String> {
        let keeps: [&[&str]; 6] = [
            &[],
            &["record"],
            &["up-to-f32"],
            &["label", "fixed-u8"],
            &["up-to-u8", "up-to-i64"],
            &["fixed-f64", "record"],
        ];
        let mut tally = Tally::default();
        for keep in keeps.into_iter().step_by(self.thin(3)) {
            for last in ALL_LAST.into_iter().step_by(self.thin(2)) {
                tally.add(
                    self.same(
                        || {
                            let builder = mixed(41)
                                .order(Order::shuffled(5))
                                .batch_size(6)
                                .last_batch(last);
                            if keep.is_empty() {
                                builder
                            } else {
                                builder.keep(keep.iter().copied())
                            }
                        },
                        1,
                        last == LastBatch::Pad,
                    )
                    .map_err(|error| format!("{keep:?}: {error}"))?,
                );
            }
        }
        Ok(tally.words())
    }

    fn kinds(&self) -> Result<String, String> {
        // Settings that must not change batches.
        let settings: [fn(LoaderBuilder) -> LoaderBuilder; 4] = [
            |builder| builder,
            |builder| builder.tuning(|t| t.slots(1).device_batches(2)),
            |builder| builder.tuning(|t| t.slots(2).device_batches(5)),
            |builder| builder.tuning(|t| t.slots(7).device_batches(3)).workers(3),
        ];
        let folder = self.ctx.folder()?;
        let mut all = Tally::default();
        for (name, make) in kinds::all(folder.path()).map_err(|error| error.to_string())? {
            for (number, set) in settings.iter().enumerate() {
                let there = set(make())
                    .device(self.device.clone())
                    .build()
                    .map_err(words)?;
                let said = |error| format!("{name}, settings {number}: {error}");
                let tally = self.same_there(&make, &there, 2).map_err(said)?;
                let copied = there.report().total.copy.map_or(0, |copy| copy.bytes) as usize;
                // Arrays that are copied together are at most a page apart, as are their lengths.
                if !(tally.bytes..=tally.bytes + tally.arrays * 2 * 4096).contains(&copied) {
                    return Err(said(format!(
                        "{copied} bytes were copied for {}",
                        tally.bytes
                    )));
                }
                all.add(tally);
            }
        }
        Ok(all.words())
    }

    fn steps(&self) -> Result<String, String> {
        let make = || numbers(31, 100).order(Order::shuffled(4)).batch_size(8);
        let host = make().build().map_err(words)?;
        let there = make().device(self.device.clone()).build().map_err(words)?;
        Ok(self
            .same_batches([&host, &there], |loader| loader.steps(11))?
            .words())
    }

    fn budget(&self) -> Result<String, String> {
        let make = || {
            numbers(90, 3000)
                .batch_size(7)
                .workers(2)
                .tuning(|t| t.depth(2).device_batches(2))
        };
        let on_device = |budget: usize| {
            make()
                .device(self.device.clone())
                .memory_budget(budget)
                .build()
        };
        let roomy = make().device(self.device.clone()).build().map_err(words)?;
        let mut least = 0;
        let mut most = roomy.plan().total();
        drop(roomy);
        while most - least > 1 {
            let middle = least + (most - least) / 2;
            match on_device(middle) {
                Ok(_) => most = middle,
                Err(error) if error.kind() == ErrorKind::Budget => least = middle,
                Err(error) => return Err(words(error)),
            }
        }
        let there = on_device(most).map_err(words)?;
        match there.plan().term(MemoryTerm::SLOTS).count {
            2 => Ok(format!(
                "{most} bytes: {}",
                self.same_there(make, &there, 2)?.words()
            )),
            slots => Err(format!("{slots} slots, not 2")),
        }
    }

    fn files(&self) -> Result<String, String> {
        let folder = self.ctx.folder()?;
        let mut tally = Tally::default();
        let mut refused = Vec::new();
        for (count, record) in self.ctx.either(
            [(700, 150_528), (3000, 4096), (5000, 100)],
            [(9, 150_528), (80, 4096), (300, 100)],
        ) {
            let path = folder.file(&format!("{record}.bin"));
            std::fs::write(&path, noise(count * record, record as u64))
                .map_err(|error| error.to_string())?;
            for (mode, direct) in crate::common::readers() {
                let make = || in_file(&path, record, mode, direct);
                // What the machine refuses on the host is nothing to be compared.
                match make().build() {
                    Ok(_) => tally.add(
                        self.same(make, 2, false)
                            .map_err(|error| format!("{mode:?} {direct:?}: {error}"))?,
                    ),
                    Err(error) => refused.push(format!(
                        "{mode:?} with O_DIRECT {direct:?}: {}",
                        error.message()
                    )),
                }
            }
        }
        refused.sort();
        refused.dedup();
        let refused = if refused.is_empty() {
            String::new()
        } else {
            format!("; refused here: {}", refused.join("; "))
        };
        Ok(tally.words() + &refused)
    }

    /// By cuFile in whatever mode it has here: the library's own calls, also where it takes the
    /// bytes through host memory.
    fn cufile(&self) {
        // The real library has nothing to do with the stand-in's driver.
        let double = (!self.ctx.real()).then(|| CuFileMachine::new(Route::Host));
        // The rows of the second size lie within their pages, so a kernel moves them.
        for (record, kernel) in [(65_536, false), (20_000, true)] {
            let what = format!("records of {record} bytes, by cuFile");
            if kernel && !self.ctx.kernels.get() {
                self.ctx
                    .skip(what, "no C++ compiler for the stand-in's kernels");
                continue;
            }
            match self.read_by_cufile(record, double.as_ref()) {
                Ok(found) => self.ctx.check(what, || found),
                Err(refused) => self.ctx.skip(what, refused),
            }
        }
        let violations = double.map_or(Vec::new(), |double| double.cufile.violations());
        if !violations.is_empty() {
            self.ctx
                .check("the stand-in's cuFile", || Err(violations.join("; ")));
        }
    }

    /// Errors: why this machine's cuFile cannot; then what was wrong with the bytes.
    fn read_by_cufile(
        &self,
        record: usize,
        double: Option<&CuFileMachine>,
    ) -> Result<Result<String, String>, String> {
        let folder = self.ctx.folder()?;
        let path = folder.file("cufile.bin");
        std::fs::write(&path, noise(200 * record, record as u64))
            .map_err(|error| error.to_string())?;
        let make = || in_file(&path, record, Mode::Pread, Direct::Off);
        let there = make()
            .device(self.device.clone())
            .tuning(|t| t.gds(Gds::Require).cufile_any_route());
        let there = match double {
            Some(double) => there.tuning(|t| t.cufile_at(double.cufile.path(), double.root())),
            None => there,
        };
        let there = there.build().map_err(words)?;
        let tally = self.same_there(make, &there, 2);
        let direct = there.report().total.copy.and_then(|copy| copy.direct);
        let direct = direct.map_or(String::new(), |direct| direct.to_string());
        Ok(tally.map(|tally| format!("{}; {direct}", tally.words())))
    }

    fn finished(&self) -> Result<String, String> {
        if !self.ctx.kernels.get() {
            return Ok("not run: no C++ compiler for the stand-in's kernels".into());
        }
        let mut tally = Tally::default();
        let few = self.ctx.quick || !self.ctx.real();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (first, channels) in [false, true]
                .into_iter()
                .flat_map(|first| (1..=4).map(move |count| (first, count)))
            {
                for (at, (height, width)) in [(1, 1), (3, 5), (4, 8), (16, 16), (224, 224)]
                    .into_iter()
                    .enumerate()
                {
                    if (few && width > 16) || (self.ctx.quick && width == 8) {
                        continue;
                    }
                    let flip = [0.0, 0.5, 1.0][at % 3];
                    let finish = finish(dtype, channels, first, flip);
                    tally.add(self.same(|| pictures([height, width, channels], finish.clone()), 2, false).map_err(|error| {
                        format!(
                            "{dtype} {height}×{width}×{channels}, first {first}, flip {flip}: {error}"
                        )
                    })?);
                }
            }
        }
        Ok(tally.words() + "; every value of a byte")
    }

    fn gather(&self) -> Result<String, String> {
        let mut launches = 0;
        for row_bytes in [
            1_usize, 2, 3, 4, 7, 8, 15, 16, 17, 31, 64, 100, 255, 1000, 4099,
        ] {
            for from in (0..17).step_by(self.thin(5)) {
                let spare = 64;
                let staging = noise(
                    (row_bytes + from + spare).next_multiple_of(16),
                    row_bytes as u64,
                );
                let offsets: Vec<u64> = (0..9).map(|row| (from + row * 5) as u64).collect();
                let there = DeviceBytes::new(self.gpu, staging.len())?;
                let out = DeviceBytes::new(self.gpu, 9 * row_bytes)?;
                there.write(0, &staging)?;
                let shape = [[3, 5, 1], [16, 8, 1]];
                self.gpu
                    .gather(&self.stream, (&there, &offsets), row_bytes, &out, shape, 1)?;
                let right: Vec<u8> = offsets
                    .iter()
                    .flat_map(|offset| staging[*offset as usize..][..row_bytes].to_vec())
                    .collect();
                differ(
                    &format!("rows of {row_bytes} bytes from {from} on"),
                    &out.read(0, right.len())?,
                    &right,
                )?;
                launches += 1;
            }
        }
        Ok(format!("{launches} launches"))
    }

    /// Each batch is dropped at once, while a kernel of `spin` milliseconds and a copy of it wait
    /// on the consumer's streams; with 0 the copy reads it as soon as it is handed out, while it
    /// may still be on its way.
    fn pending(&self, streams: usize, spin: u64) -> Result<String, String> {
        let (count, rows, record) = match (self.ctx.real(), spin) {
            (false, _) => (12, 4, 4096),
            (true, 0) => (12, 256, 150_528),
            (true, _) => (64, 64, 40_000),
        };
        let bytes: Arc<[u8]> = noise(count * rows * record, 77).into();
        let records = || {
            Records::builder(record)
                .open_bytes(bytes.clone())
                .expect("whole records")
        };
        let make = || {
            Loader::builder(records())
                .order(Order::shuffled(4))
                .batch_size(rows)
                .tuning(|t| t.device_batches(2))
        };
        let area = DeviceBytes::new(self.gpu, bytes.len())?;
        let all = (0..streams)
            .map(|_| self.gpu.stream())
            .collect::<Result<Vec<_>, _>>()?;
        let there = make().device(self.device.clone()).build().map_err(words)?;
        self.keep_all(&there, &area, &all, spin)?;
        let len = rows * record;
        for (number, batch) in make()
            .build()
            .map_err(words)?
            .epoch(0)
            .map_err(words)?
            .enumerate()
        {
            let batch = batch.map_err(words)?;
            let right = batch
                .field("record")
                .and_then(|field| field.as_bytes())
                .map_err(words)?;
            differ("record", &area.read(number * len, len)?, right)
                .map_err(|error| format!("batch {number}: {error}"))?;
        }
        Ok(format!("{count} batches of {} in 2 buffers", size(len)))
    }

    /// Each stream keeps a part of each batch.
    fn keep_all(
        &self,
        loader: &Loader,
        area: &DeviceBytes,
        streams: &[Arc<CudaStream>],
        spin: u64,
    ) -> Result<(), String> {
        let mut droppers = Vec::new();
        let mut place = 0;
        for batch in loader.epoch(0).map_err(words)? {
            let batch = batch.map_err(words)?;
            for (part, stream) in batch.micro(streams.len()).map_err(words)?.zip(streams) {
                let part = part.field("record").map_err(words)?;
                batch.bind(Stream::from(stream)).map_err(words)?;
                if spin > 0 {
                    self.gpu.spin(stream, Duration::from_millis(spin))?;
                }
                area.keep(place, &batch, &part, stream)?;
                place += part.size_bytes();
            }
            if streams.len() == 1 {
                drop(batch);
            } else {
                droppers.push(std::thread::spawn(move || drop(batch)));
            }
        }
        droppers
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a dropping thread panicked"))?;
        streams
            .iter()
            .try_for_each(|stream| stream.synchronize().map_err(said("cuStreamSynchronize")))
    }

    fn held(&self) -> Result<String, String> {
        let loader = numbers(64, 8).batch_size(4).tuning(|t| {
            t.device_batches(3)
                .held_deadline(Duration::from_millis(100))
        });
        let loader = loader.device(self.device.clone()).build().map_err(words)?;
        let right: Vec<Batch> = host_batches(
            &numbers(64, 8)
                .batch_size(4)
                .tuning(|t| t.slots(16))
                .build()
                .map_err(words)?,
        )?;
        let mut epoch = loader.epoch(0).map_err(words)?;
        let mut held = Vec::new();
        let mut seen = 0;
        loop {
            match epoch.next() {
                None => break,
                Some(Ok(batch)) => {
                    self.compare(&right[seen], &batch, seen)?;
                    seen += 1;
                    held.push(batch);
                }
                Some(Err(error)) if error.kind() == ErrorKind::BatchesHeld && held.len() == 3 => {
                    for batch in &held {
                        self.compare(&right[batch.index() as usize], batch, 2)?;
                    }
                    // The middle one goes: out of order.
                    held.remove(1);
                }
                Some(Err(error)) => return Err(words(error)),
            }
        }
        if seen == 16 {
            Ok(format!("{seen} batches"))
        } else {
            Err(format!("{seen} batches, not 16"))
        }
    }

    fn outlive(&self) -> Result<String, String> {
        let make = || {
            mixed(40)
                .order(Order::shuffled(8))
                .batch_size(5)
                .tuning(|t| t.slots(8).device_batches(8))
        };
        let host = make().build().map_err(words)?;
        let there = make().device(self.device.clone()).build().map_err(words)?;
        for taken in [0, 1, 3] {
            let mut epoch = there.epoch(7).map_err(words)?;
            for _ in 0..taken {
                epoch.next().ok_or("no batch")?.map_err(words)?;
            }
        }
        let expected = host_batches(&host)?;
        let got = host_batches(&there)?;
        drop((host, there));
        for (number, (expected, got)) in expected.iter().zip(&got).enumerate() {
            self.compare(expected, got, number)?;
        }
        Ok(format!("{} batches", got.len()))
    }

    fn two(&self) -> Result<String, String> {
        let body = |seed| {
            let gpu = Gpu::new()?;
            let case = Case {
                gpu: &gpu,
                ctx: self.ctx,
                device: self.device.clone(),
                stream: gpu.stream()?,
            };
            case.same(
                || mixed(120).order(Order::shuffled(seed)).batch_size(7),
                3,
                seed % 2 == 0,
            )
        };
        let mut tally = Tally::default();
        // `Ctx` stays on this thread: the other one gets what it needs, and nothing else.
        for seed in [1, 2] {
            let other = mixed(200)
                .order(Order::shuffled(seed + 5))
                .batch_size(9)
                .device(self.device.clone());
            let other = other.build().map_err(words)?;
            let thread = std::thread::spawn(move || -> Result<usize, String> {
                let mut rows = 0;
                for batch in other.epochs(0..5).map_err(words)? {
                    rows += batch.map_err(words)?.len();
                }
                Ok(rows)
            });
            tally.add(body(seed)?);
            match thread.join() {
                Ok(Ok(1000)) => {}
                Ok(rows) => return Err(format!("the other loader gave {rows:?} rows, not 1000")),
                Err(_) => return Err("the other loader's thread panicked".into()),
            }
        }
        Ok(tally.words())
    }

    fn own_context(&self) -> Result<String, String> {
        let device = Device::cuda_in(self.gpu.context.clone()).map_err(words)?;
        let case = Case {
            gpu: self.gpu,
            ctx: self.ctx,
            device,
            stream: self.gpu.stream()?,
        };
        let tally = case.same(
            || mixed(50).order(Order::shuffled(6)).batch_size(8),
            2,
            true,
        )?;
        Ok(tally.words())
    }

    fn dlpack(&self) -> Result<String, String> {
        let make = || {
            mixed(37)
                .order(Order::shuffled(1))
                .batch_size(5)
                .last_batch(LastBatch::Mask)
        };
        let there = make()
            .device(self.device.clone())
            .tuning(|t| t.device_batches(2).slots(2))
            .build()
            .map_err(words)?;
        let host = make().build().map_err(words)?;
        let mut arrays = 0;
        for (expected, got) in host
            .epoch(0)
            .map_err(words)?
            .zip(there.epoch(0).map_err(words)?)
        {
            let expected = expected.map_err(words)?;
            let got = got.map_err(words)?;
            // If no stream is named, it is the legacy one.
            let bound = got.index() % 2 == 1;
            let consumer = |tensor| match bound {
                true => Consumer::bound(tensor, &self.stream),
                false => Ok(Consumer::new(tensor)),
            };
            let Tensors {
                fields,
                lens,
                ids,
                status,
                ..
            } = got.into_dlpack();
            let mut consumers = Vec::new();
            for (name, tensor) in fields {
                let field = expected.field(&name).map_err(words)?;
                let shape = field.shape();
                let right = field.as_bytes().map_err(words)?;
                consumers.push(self.array(
                    consumer(tensor)?,
                    &name,
                    &shape,
                    field.dtype(),
                    right,
                )?);
            }
            for (name, tensor) in lens {
                let right = expected
                    .field(&name)
                    .map_err(words)?
                    .lens()
                    .ok_or("no lengths")?;
                let shape = [right.len()];
                let right = bytemuck::cast_slice(right);
                consumers.push(self.array(consumer(tensor)?, &name, &shape, u64::DTYPE, right)?);
            }
            // These stay on the host.
            if (ids.device(), status.device()) != (DLDevice::CPU, DLDevice::CPU) {
                return Err("ids and status are not the host's".into());
            }
            arrays += consumers.len();
            let deleted = std::thread::spawn(move || drop((consumers, ids, status)));
            deleted.join().map_err(|_| "the deleters panicked")?;
        }
        Ok(format!("{arrays} arrays"))
    }

    fn array(
        &self,
        consumer: Consumer,
        name: &str,
        shape: &[usize],
        dtype: DType,
        right: &[u8],
    ) -> Result<Consumer, String> {
        let (place, sizes, kind, at) = consumer.seen();
        let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
        if (place, &sizes, kind) != (DLDevice::cuda(0), &shape, dtype.into()) || at % 256 != 0 {
            return Err(format!(
                "{name} is {kind:?} {sizes:?} at {at:#x} of {place:?}, not {dtype} {shape:?}"
            ));
        }
        // The stream waits for the copy only if it was named; this reads in the order of the legacy
        // one.
        self.stream
            .synchronize()
            .map_err(said("cuStreamSynchronize"))?;
        differ(name, &read(&self.gpu.context, at, right.len())?, right)?;
        Ok(consumer)
    }
}

fn host_batches(loader: &Loader) -> Result<Vec<Batch>, String> {
    loader
        .epoch(0)
        .map_err(words)?
        .map(|batch| batch.map_err(words))
        .collect()
}

fn in_file(path: &Path, record: usize, mode: Mode, direct: Direct) -> LoaderBuilder {
    let records = Records::builder(record)
        .open(path)
        .expect("written just now");
    Loader::builder(records)
        .order(Order::shuffled(1))
        .batch_size(64)
        .tuning(|t| t.reader(mode).direct(direct))
}

/// Means and deviations that reach far: common ones, one for all channels, and one that makes large
/// values.
fn finish(dtype: DType, channels: usize, first: bool, flip: f64) -> Finish {
    let mean = [0.485_f32, 0.456, 0.406, 0.1];
    let std = [0.229_f32, 0.224, 0.225, 0.003];
    let finish = Finish::to(dtype)
        .mean_std(&mean[..channels], &std[..channels])
        .flip(flip);
    if first {
        finish.channels_first()
    } else {
        finish
    }
}

fn pictures([height, width, channels]: [usize; 3], finish: Finish) -> LoaderBuilder {
    let size = height * width * channels;
    // Each value of a byte where there is room for it.
    let bytes: Vec<u8> = noise(size * 11, 3)
        .into_iter()
        .enumerate()
        .map(|(at, byte)| if at < 256 { at as u8 } else { byte })
        .collect();
    let records = Records::builder(size)
        .field("image", DType::U8, [height, width, channels])
        .open_bytes(bytes);
    let builder = Loader::builder(records.expect("whole records"))
        .order(Order::shuffled(7))
        .workers(1);
    builder
        .finish("image", finish)
        .batch_size(4)
        .last_batch(LastBatch::Mask)
}

/// All but the bytes.
fn head(expected: &Batch, got: &Batch) -> Result<(), String> {
    let numbers = |batch: &Batch| (batch.epoch(), batch.index(), batch.len(), batch.valid());
    let fields = |batch: &Batch| -> Vec<_> {
        batch
            .fields()
            .map(|field| {
                let lens = field.lens().map(<[u64]>::to_vec);
                (
                    field.name().to_string(),
                    field.dtype(),
                    field.shape(),
                    field.strides(),
                    lens,
                )
            })
            .collect()
    };
    let same = numbers(expected) == numbers(got)
        && (expected.ids(), expected.status()) == (got.ids(), got.status())
        && fields(expected) == fields(got);
    if same {
        Ok(())
    } else {
        Err(format!(
            "{got:?} {:?}, not {expected:?} {:?}",
            got.ids(),
            expected.ids()
        ))
    }
}

/// The first difference, and how many there are.
fn differ(what: &str, seen: &[u8], right: &[u8]) -> Result<(), String> {
    if seen.len() != right.len() {
        return Err(format!("{what}: {} bytes, not {}", seen.len(), right.len()));
    }
    if seen == right {
        return Ok(());
    }
    let pairs = || {
        seen.iter()
            .zip(right)
            .enumerate()
            .filter(|(_, (seen, right))| seen != right)
    };
    let first = pairs()
        .next()
        .map(|(at, (seen, right))| format!("{seen:#04x} and not {right:#04x} at {at}"));
    let first = first.unwrap_or_default();
    Err(format!(
        "{what}: {} of {} bytes are wrong, the first {first}",
        pairs().count(),
        seen.len()
    ))
}
