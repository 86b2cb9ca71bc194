//! Settings of a loader; [`build`](super::build) turns them into threads and memory.

use crate::dataset::Dataset;
use crate::decode::{Ctx, Decoder};
use crate::device::{Device, Stream};
use crate::error::Result;
use crate::memory::{BatchMut, Budget, Row};
use crate::meter::Clock;
use crate::order::{LastBatch, Order, Shard};
use crate::pipeline::Gds;
use crate::pipeline::OnBadSample;
use crate::pipeline::placement::Numa;
use crate::pipeline::recipe::Steps;
use crate::state::State;
use crate::stop::Stop;
#[cfg(test)]
use crate::storage::Opened;
use crate::storage::{Direct, Mode, ReaderOptions};
use crate::tensor::Field;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longer than file servers take to come back after a failure, shorter than anybody wants to pay for an idle GPU.
const STALL_DEADLINE: Duration = Duration::from_secs(300);

/// Settings of a loader; every call may be left out but [`build`](Self::build).
#[must_use]
pub struct LoaderBuilder {
    pub(super) dataset: Arc<dyn Dataset>,
    pub(super) steps: Steps,
    pub(super) run: RunSettings,
    pub(super) memory: MemorySettings,
    pub(super) reader: ReaderOptions,
    pub(super) device: DeviceSettings,
    pub(super) machine: MachineSettings,
    pub(super) faults: FaultSettings,
    /// Tests have another.
    pub(super) clock: Clock,
    /// What tests have opened themselves.
    #[cfg(test)]
    pub(super) opened: Option<Opened>,
}

/// Which samples come when, on which rank.
pub(super) struct RunSettings {
    pub(super) order: Order,
    pub(super) seed: Option<u64>,
    pub(super) batch: Option<BatchSize>,
    pub(super) last: Option<LastBatch>,
    pub(super) shard: Shard,
    pub(super) resume: Option<State>,
    /// States with another global batch are taken, too.
    pub(super) any_batch: bool,
    pub(super) stop: Option<Stop>,
}

/// How much is in memory at once.
#[derive(Default)]
pub(super) struct MemorySettings {
    pub(super) workers: Option<usize>,
    pub(super) slots: Option<usize>,
    pub(super) budget: Option<usize>,
    pub(super) shared: Option<Budget>,
}

/// Where batches are handed out, and how their bytes get there.
#[derive(Clone, Default)]
pub(super) struct DeviceSettings {
    pub(super) device: Device,
    pub(super) batches: Option<usize>,
    pub(super) gds: Gds,
    /// A cuFile library and the root of the file system that it shall see, for tests.
    pub(super) cufile: Option<(PathBuf, PathBuf)>,
    pub(super) streams: Vec<Stream>,
}

/// Where on the machine threads and memory are.
pub(super) struct MachineSettings {
    pub(super) numa: Numa,
    /// Where the kernel shows the machine; tests show another one.
    pub(super) sysfs: PathBuf,
}

/// What is done when something is late or cannot be had.
pub(super) struct FaultSettings {
    pub(super) held_deadline: Duration,
    pub(super) stall_deadline: Duration,
    pub(super) on_bad: OnBadSample,
    pub(super) ledger: Option<PathBuf>,
}

/// How the size of batches was said.
#[derive(Clone, Copy, Debug)]
pub(super) enum BatchSize {
    /// Of every rank.
    Rank(usize),
    /// Of all ranks together.
    Global(u64),
}

impl LoaderBuilder {
    pub(super) fn new(dataset: Arc<dyn Dataset>) -> Self {
        Self {
            dataset,
            steps: Steps::default(),
            run: RunSettings {
                order: Order::sequential(),
                seed: None,
                batch: None,
                last: None,
                shard: Shard::single(),
                resume: None,
                any_batch: false,
                stop: None,
            },
            memory: MemorySettings::default(),
            reader: ReaderOptions::default(),
            device: DeviceSettings::default(),
            machine: MachineSettings { numa: Numa::Auto, sysfs: "/sys".into() },
            faults: FaultSettings {
                held_deadline: Duration::from_secs(10),
                stall_deadline: STALL_DEADLINE,
                on_bad: OnBadSample::default(),
                ledger: None,
            },
            clock: Clock::real(),
            #[cfg(test)]
            opened: None,
        }
    }

    /// Decodes the dataset's only picture; without one, its only encoded field. Where that is ambiguous, say
    /// [`decode_field`](Self::decode_field).
    pub fn decode(mut self, decoder: impl Decoder) -> Self {
        self.steps.decoders.push((None, Arc::new(decoder)));
        self
    }

    /// Decodes the field `name`. Fields without a decoder must be raw and are taken as they stand.
    pub fn decode_field(mut self, name: &str, decoder: impl Decoder) -> Self {
        self.steps.decoders.push((Some(name.into()), Arc::new(decoder)));
        self
    }

    /// Transforms every sample in place, after its fields are decoded; calls add up in order. Randomness comes from
    /// [`Ctx::draws`], so that it does not depend on workers.
    ///
    /// An error or panic becomes an error of the sample.
    pub fn map(self, map: impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static) -> Self {
        self.map_adding([], map)
    }

    /// As [`map`](Self::map), and the batch gets these fields more; they are zero before `map` writes them.
    pub fn map_adding(
        mut self,
        fields: impl Into<Vec<Field>>,
        map: impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.steps.maps.push((fields.into(), Arc::new(map)));
        self
    }

    /// Transforms every full batch in place, once, on a decode worker (mixup, packing). In its `Ctx`, the id is the position
    /// in the epoch of the batch's first row: another one on every rank.
    pub fn map_batch(
        self,
        map: impl Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.map_batch_adding([], map)
    }

    /// As [`map_batch`](Self::map_batch), and the batch gets these fields more; they are zero before `map` writes them.
    pub fn map_batch_adding(
        mut self,
        fields: impl Into<Vec<Field>>,
        map: impl Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.steps.map_batches.push((fields.into(), Arc::new(map)));
        self
    }

    /// Hands out only these fields; the others are there for the transforms, but for encoded ones without a decoder,
    /// which are not read at all. Default: all.
    pub fn keep<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        self.steps.keep = Some(names.into_iter().map(String::from).collect());
        self
    }

    /// Makes floats of a picture field of `u8` at the very end: on a GPU after the copy, so that the bus carries a byte per
    /// value, on the host in the slot. The bytes are the same on both. The field keeps its name; transforms see it before. A
    /// field that [`keep`](Self::keep) leaves out is not finished.
    pub fn finish(mut self, name: &str, finish: crate::device::Finish) -> Self {
        self.steps.finishes.push((name.into(), finish));
        self
    }

    /// Which samples come in which order. Default: sequential.
    pub fn order(mut self, order: Order) -> Self {
        self.run.order = order;
        self
    }

    /// Seed of the draws of decoders and transforms. Default: the order's seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.run.seed = Some(seed);
        self
    }

    /// Rows of a batch of one rank; all ranks must have the same. Default: 32, or what the state that is resumed says.
    ///
    /// With a [shard](Self::shard) the global batch is this times the world size. A run that shall go on with another world
    /// size says [`global_batch`](Self::global_batch) instead.
    pub fn batch_size(mut self, rows: usize) -> Self {
        self.run.batch = Some(BatchSize::Rank(rows));
        self
    }

    /// Rows of a batch on all ranks together; each rank gets its part, rank 0 one more where the world size does not divide
    /// it. In place of [`batch_size`](Self::batch_size); the later call counts.
    pub fn global_batch(mut self, rows: u64) -> Self {
        self.run.batch = Some(BatchSize::Global(rows));
        self
    }

    /// Which rank of how many this is: every global batch is cut in as many parts, and this loader delivers one of them.
    /// Default: the only one. See [`Shard::from_env`].
    pub fn shard(mut self, shard: Shard) -> Self {
        self.run.shard = shard;
        self
    }

    /// Goes on from a saved state: the first epoch starts after the last batch that was received before, see
    /// [`Loader::next_epoch`](crate::Loader::next_epoch). The samples that follow are the same, in the same order, with any number of workers, any
    /// reader, depth and world size. Without [`batch_size`](Self::batch_size) or [`global_batch`](Self::global_batch) the
    /// global batch is that of the state, and so is [`last_batch`](Self::last_batch).
    ///
    /// Then `build` fails with [`ErrorKind::FingerprintMismatch`](crate::ErrorKind::FingerprintMismatch), naming the shard or range of shards, when the dataset is
    /// not the one that the state was saved with; with [`ErrorKind::State`](crate::ErrorKind::State) when order, seeds, global batch or last batch
    /// are set otherwise.
    pub fn resume(mut self, state: State) -> Self {
        self.run.resume = Some(state);
        self
    }

    /// As [`resume`](Self::resume), and the global batch and the last batch may differ: the rest of the epoch that was
    /// interrupted is cut into batches of the new size from where it stopped, the later epochs from their beginning. The
    /// sequence of samples stays the same (but for those that the last batch drops or repeats), the sequence of batches does
    /// not. Where that rest is dropped as a whole, [`Loader::next_epoch`](crate::Loader::next_epoch) is the one after the epoch that was interrupted.
    pub fn resume_rebatched(mut self, state: State) -> Self {
        self.run.any_batch = true;
        self.resume(state)
    }

    /// What [`Loader::stop_requested`](crate::Loader::stop_requested) asks: a flag that a signal sets, or the program.
    pub fn stop(mut self, stop: Stop) -> Self {
        self.run.stop = Some(stop);
        self
    }

    /// What becomes of the samples that do not fill a global batch. Default: a smaller last batch, or what the state that is
    /// resumed says.
    pub fn last_batch(mut self, last: LastBatch) -> Self {
        self.run.last = Some(last);
        self
    }

    /// Decode workers (threads), at most 1024. Default: one per core that the process may use, or that it may use of the
    /// [NUMA node](Self::numa) where it is placed on one.
    pub fn workers(mut self, workers: usize) -> Self {
        self.memory.workers = Some(workers);
        self
    }

    /// Batches in memory at once, those in the user's hands included. Default: 4 to 16 by their size, less when the
    /// budget says so, but not under 2. With 1 nothing is read ahead.
    pub fn slots(mut self, slots: usize) -> Self {
        self.memory.slots = Some(slots);
        self
    }

    /// Most bytes of memory; [`build`](Self::build) reserves all of it that is needed, or fails with the sum.
    pub fn memory_budget(mut self, bytes: usize) -> Self {
        self.memory.budget = Some(bytes);
        self
    }

    /// Takes its memory from a budget that several loaders of this process share: at most an equal part of what is free
    /// there, see [`Budget`]; and at most the [`memory_budget`](Self::memory_budget), if that is set, too.
    pub fn shared_budget(mut self, budget: &Budget) -> Self {
        self.memory.shared = Some(budget.clone());
        self
    }

    /// Which reader. Default: [`Mode::Auto`].
    pub fn reader(mut self, mode: Mode) -> Self {
        self.reader.mode = mode;
        self
    }

    /// Whether reads bypass the page cache. Default: [`Direct::Auto`].
    pub fn direct(mut self, direct: Direct) -> Self {
        self.reader.direct = direct;
        self
    }

    /// Reads in flight at most. Default: 32; 128 for io_uring through the page cache.
    pub fn depth(mut self, depth: u32) -> Self {
        self.reader.depth = Some(depth);
        self
    }

    /// Where batches are handed out. Default: the host; [`Device::auto`] is a GPU where there is one.
    pub fn device(mut self, device: Device) -> Self {
        self.device.device = device;
        self
    }

    /// Batches in device memory at once, those in the user's hands included; at least 2. Default: 3, one in use, one there,
    /// one on its way. The host device has none beside its [`slots`](Self::slots).
    pub fn device_batches(mut self, batches: usize) -> Self {
        self.device.batches = Some(batches);
        self
    }

    /// Whether fields whose rows are bytes of a file as they stand go straight into the device's memory (GPUDirect Storage).
    /// Such bytes are not checksummed by the host. Default: [`Gds::Auto`], where cuFile really goes past the host's memory
    /// and the page cache has no room for the dataset; the report says which way each field takes and why.
    ///
    /// [`Gds::Auto`] opens cuFile only where the kernel module nvidia-fs is loaded or cuFile may use peer-to-peer DMA
    /// (`"use_pci_p2pdma": true` in `cufile.json`, or `CUFILE_USE_PCIP2PDMA=true`), and closes it when the trial read says no.
    /// It needs cuFile 1.15, the first that counts which way bytes take; before that only nvidia-fs can, where root has
    /// switched its counters on. From 1.16 on an open cuFile has a context, with its memory, on every visible GPU: set
    /// `CUDA_VISIBLE_DEVICES` for each rank.
    ///
    /// With [`Gds::Require`] `build` fails, with the reason for each field, unless at least one goes directly: whatever the
    /// size of its rows and the page cache, also by a cuFile that does not count which way bytes take.
    pub fn gds(mut self, gds: Gds) -> Self {
        self.device.gds = gds;
        self
    }

    /// For tests: this cuFile library, on a machine whose `proc`, `run` and `dev` are below `root`.
    #[cfg(feature = "unstable")]
    pub fn cufile_at(mut self, library: impl Into<PathBuf>, root: impl Into<PathBuf>) -> Self {
        self.device.cufile = Some((library.into(), root.into()));
        self
    }

    /// A stream that works on the batches: it waits for each batch's copy, and its work is waited for before the memory of a
    /// dropped batch is used again. May be called several times. Without it, see [`Batch::bind`](crate::Batch::bind).
    pub fn stream(mut self, stream: impl Into<Stream>) -> Self {
        self.device.streams.push(stream.into());
        self
    }

    /// On which NUMA node threads run and memory lies. Default: [`Numa::Auto`], next to the device.
    pub fn numa(mut self, numa: Numa) -> Self {
        self.machine.numa = numa;
        self
    }

    /// For tests: what shall go wrong in its readers.
    #[cfg(feature = "unstable")]
    pub fn faulty(mut self, faulty: Arc<crate::storage::Faulty>) -> Self {
        self.reader.faulty = Some(faulty);
        self
    }

    /// Measures nothing: for the bench that shows what measuring costs.
    #[cfg(feature = "unstable")]
    pub fn unmeasured(mut self) -> Self {
        self.clock = Clock::still();
        self
    }

    /// How long `next()` waits when the caller holds every batch, before it says so. Default: 10 s.
    pub fn held_deadline(mut self, deadline: Duration) -> Self {
        self.faults.held_deadline = deadline;
        self
    }

    /// How long anything that a batch waits for may be at the same thing (one read, one sample in a decoder or transform, one
    /// copy) before `next()` ends with [`ErrorKind::Stalled`](crate::ErrorKind::Stalled), which names it. Default: 300 s; at least 20 ms. Slow work on many samples is
    /// no stall; nor is work of the consumer's streams on batches that were dropped, which the next copy waits for: that
    /// counts as [`Copy::blocked_ns`](crate::profile::Copy::blocked_ns). The loader can still be dropped: what does not answer is left behind, with all it can reach, after some
    /// seconds.
    pub fn stall_deadline(mut self, deadline: Duration) -> Self {
        self.faults.stall_deadline = deadline;
        self
    }

    /// What to do when a sample cannot be had. Default: [`OnBadSample::Fail`].
    ///
    /// ```
    /// use feedline::{Loader, OnBadSample, Status, dataset::Records};
    ///
    /// let records = Records::builder(1).open_bytes([0, 1, 2, 3])?;
    /// let odd = |row: &mut feedline::Row<'_>| row.bytes_mut(0)[0] == 2;
    /// let loader = Loader::builder(records)
    ///     .map(move |row, _| if odd(row) { Err(feedline::Error::user("I do not like it")) } else { Ok(()) })
    ///     .on_bad_sample(OnBadSample::Substitute { budget: 1 })
    ///     .build()?;
    /// let batch = loader.epoch(0)?.next().unwrap()?;
    /// assert_eq!((batch.len(), batch.status()[2]), (4, Status::Substitute as u8));
    /// assert_ne!(batch.ids()[2], 2);
    /// let ledger = loader.ledger();
    /// assert_eq!((ledger.samples[0].sample, ledger.samples[0].cause.as_str()), (2, "I do not like it"));
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn on_bad_sample(mut self, policy: OnBadSample) -> Self {
        self.faults.on_bad = policy;
        self
    }

    /// Writes to this file each time that a sample cannot be had, a line of JSON (the fields of [`BadSample`](crate::BadSample)),
    /// when the batch of its row is handed out: one line for a row that got a substitute, and one for each sample that was tried
    /// as a substitute for it in vain. The file is appended to: each rank has its own. What cannot be written, on a full
    /// disk say, is said in the [ledger](crate::Loader::ledger) and the report, and does not end the run.
    ///
    /// `build` fails when the file cannot be opened, or when nothing is ever substituted.
    pub fn ledger(mut self, path: impl Into<PathBuf>) -> Self {
        self.faults.ledger = Some(path.into());
        self
    }

    /// Time passes as this clock says, and this is the reader.
    #[cfg(all(test, feature = "cuda"))]
    pub(super) fn simulated(mut self, clock: Clock, opened: Opened) -> Self {
        (self.clock, self.opened) = (clock, Some(opened));
        self
    }
}

impl std::fmt::Debug for LoaderBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoaderBuilder of {}, {}", self.dataset.describe(), self.run.shard)
    }
}
