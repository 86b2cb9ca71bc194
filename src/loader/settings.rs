//! Settings of a loader; [`build`](super::build) turns them into threads and memory.

use crate::order::{LastBatch, Order};
use crate::pipeline::recipe::Steps;
use crate::pipeline::{Gds, Numa, OnBadSample};
use crate::state::State;
use feedline_base::error::Result;
use feedline_base::meter::Clock;
use feedline_base::stop::Stop;
use feedline_core::dataset::Dataset;
use feedline_core::decode::{Ctx, Decoder};
use feedline_core::memory::{BatchMut, Budget, Row, available};
use feedline_core::order::Rank;
use feedline_core::tensor::Field;
use feedline_device::{Bound, Device, Stream, StreamUse};
use feedline_reader::ReaderOptions;
#[cfg(test)]
use feedline_store::Opened;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longer than a file server takes to recover from a failure, but short enough to limit the cost of
/// an idle GPU.
const STALL_DEADLINE: Duration = Duration::from_secs(300);

/// Settings of a loader. All are optional; [`build`](Self::build) makes the loader.
#[must_use]
pub struct LoaderBuilder {
    pub(super) dataset: Arc<dyn Dataset>,
    pub(super) steps: Steps,
    pub(super) run: RunSettings,
    pub(super) memory: MemorySettings,
    pub(super) reader: ReaderOptions,
    /// Holds objects, and files of network mounts.
    pub(super) cache: Option<feedline_store::Cache>,
    pub(super) device: DeviceSettings,
    pub(super) machine: MachineSettings,
    pub(super) faults: FaultSettings,
    /// The real clock, except in tests.
    pub(super) clock: Clock,
    /// A reader that a test opened itself.
    #[cfg(test)]
    pub(super) opened: Option<Opened>,
}

/// The sequence of samples, and this rank's part.
pub(super) struct RunSettings {
    /// The user's order, if one was set.
    pub(super) order: Option<Order>,
    pub(super) seed: Option<u64>,
    pub(super) batch: Option<BatchSize>,
    pub(super) last: Option<LastBatch>,
    pub(super) last_share: f64,
    pub(super) rank: Rank,
    pub(super) resume: Option<State>,
    /// Accept states with another global batch.
    pub(super) any_batch: bool,
    pub(super) stop: Option<Stop>,
}

/// Amounts of memory and threads.
#[derive(Default)]
pub(super) struct MemorySettings {
    pub(super) workers: Option<usize>,
    pub(super) slots: Option<usize>,
    pub(super) budget: Option<usize>,
    pub(super) shared: Option<Budget>,
}

/// The device of the batches, and the route of their bytes.
#[derive(Clone, Default)]
pub(super) struct DeviceSettings {
    pub(super) device: Device,
    pub(super) batches: Option<usize>,
    pub(super) gds: Gds,
    /// For tests: a cuFile library, and the root of the file system that it sees.
    pub(super) cufile: Option<(PathBuf, PathBuf)>,
    /// For tests: direct reads may go through host memory.
    pub(super) cufile_any_route: bool,
    pub(super) streams: Vec<Bound>,
}

/// Placement of threads and memory on the machine.
pub(super) struct MachineSettings {
    pub(super) numa: Numa,
    /// The kernel's description of the machine; tests use another one.
    pub(super) sysfs: PathBuf,
    /// Bytes that the process can still get.
    pub(super) free: fn() -> Option<u64>,
}

/// Handling of deadlines and failed samples.
pub(super) struct FaultSettings {
    pub(super) held_deadline: Duration,
    pub(super) stall_deadline: Duration,
    pub(super) on_bad: OnBadSample,
    pub(super) ledger: Option<PathBuf>,
}

/// Default share of an epoch's samples that last batches may repeat or leave out, if an epoch has
/// several last batches.
const LAST_SHARE: f64 = 0.01;

/// The size of batches, as set.
#[derive(Clone, Copy, Debug)]
pub(super) enum BatchSize {
    /// Rows per rank.
    Rank(usize),
    /// Rows of all ranks together.
    Global(u64),
}

impl LoaderBuilder {
    pub(super) fn new(dataset: Arc<dyn Dataset>) -> Self {
        Self {
            dataset,
            steps: Steps::default(),
            run: RunSettings {
                order: None,
                seed: None,
                batch: None,
                last: None,
                last_share: LAST_SHARE,
                rank: Rank::single(),
                resume: None,
                any_batch: false,
                stop: None,
            },
            memory: MemorySettings::default(),
            reader: ReaderOptions::default(),
            cache: None,
            device: DeviceSettings::default(),
            machine: MachineSettings {
                numa: Numa::Auto,
                sysfs: "/sys".into(),
                free: available::for_rank,
            },
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

    /// Decodes the dataset's only picture field; without pictures, its only encoded field.
    ///
    /// If several fields qualify, use [`decode_field`](Self::decode_field).
    pub fn decode(mut self, decoder: impl Decoder) -> Self {
        self.steps.decoders.push((None, Arc::new(decoder)));
        self
    }

    /// Decodes the field `name`. Fields without a decoder must be raw; their bytes are used
    /// unchanged.
    pub fn decode_field(mut self, name: &str, decoder: impl Decoder) -> Self {
        self.steps
            .decoders
            .push((Some(name.into()), Arc::new(decoder)));
        self
    }

    /// Transforms every sample in place, after its fields are decoded. Several maps run in the
    /// order of the calls.
    ///
    /// Randomness must come from [`Ctx::draws`], which does not depend on workers. An error or
    /// panic becomes an error of the sample.
    pub fn map(
        self,
        map: impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.map_adding([], map)
    }

    /// Like [`map`](Self::map), with additional fields in the batch. They are zero until `map`
    /// writes them.
    pub fn map_adding(
        mut self,
        fields: impl Into<Vec<Field>>,
        map: impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.steps.maps.push((fields.into(), Arc::new(map)));
        self
    }

    /// Transforms every full batch in place, once, on a decode worker (mixup).
    ///
    /// The id in its `Ctx` is the position of the batch's first row in the epoch, so it differs
    /// from rank to rank.
    pub fn map_batch(
        self,
        map: impl Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.map_batch_adding([], map)
    }

    /// Like [`map_batch`](Self::map_batch), with additional fields in the batch. They are zero
    /// until `map` writes them.
    pub fn map_batch_adding(
        mut self,
        fields: impl Into<Vec<Field>>,
        map: impl Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.steps.map_batches.push((fields.into(), Arc::new(map)));
        self
    }

    /// Says that `map_batch` holds a lock, such as Python's GIL, so that only one thread at a time
    /// runs it. The advice in reports depends on this.
    #[doc(hidden)]
    pub fn map_batch_in_turn(mut self) -> Self {
        self.steps.map_batch_in_turn = true;
        self
    }

    /// Delivers only these fields. Default: all.
    ///
    /// Transforms still see the other fields, except encoded fields without a decoder, which are
    /// not read at all.
    pub fn keep<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        self.steps.keep = Some(names.into_iter().map(String::from).collect());
        self
    }

    /// Packs a field of varying length: its rows are stored contiguously, without padding, and only
    /// their bytes are copied to a device. [`FieldView::offsets`](crate::FieldView::offsets) has
    /// the bounds of the rows.
    ///
    /// A slot has room for rows × the maximum, or for `batch_bytes`. If the rows of a batch need
    /// more, the sample that does not fit fails. With `batch_bytes`, the index must have
    /// [lengths](crate::dataset::DatasetExt::lengths), and the rows of substitutes stay empty.
    ///
    /// ```
    /// use feedline::{Loader, dataset::Tar, tensor::{DType, Field}};
    /// # let member = |name: &str, bytes: &[u8]| {
    /// #     let mut header = [0; 512];
    /// #     header[..name.len()].copy_from_slice(name.as_bytes());
    /// #     header[124..135].copy_from_slice(format!("{:011o}", bytes.len()).as_bytes());
    /// #     header[156] = b'0';
    /// #     header[148..156].fill(b' ');
    /// #     let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    /// #     header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    /// #     let mut all = header.to_vec();
    /// #     all.extend(bytes);
    /// #     all.resize(1024, 0);
    /// #     all
    /// # };
    /// # let shard = [member("0.tok", &[1, 2]), member("1.tok", &[3, 4, 5, 6, 7, 8]), vec![0; 1024]].concat();
    /// let tokens = Tar::builder().raw(Field::up_to("tok", DType::U16, 2048), "tok").open_bytes(shard)?;
    /// let loader = Loader::builder(tokens).ragged("tok", None).build()?;
    /// let batch = loader.epoch(0)?.next().unwrap()?;
    /// let field = batch.field("tok")?;
    /// assert_eq!((field.shape(), field.offsets()), (vec![4], Some(&[0, 1, 4][..])));
    /// assert_eq!(field.row::<u16>(1)?.len(), 3);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn ragged(mut self, name: &str, batch_bytes: Option<usize>) -> Self {
        self.steps.ragged.push((name.into(), batch_bytes));
        self
    }

    /// Converts a picture field of `u8` to floats as the last step.
    ///
    /// On a GPU this runs after the copy, so the bus carries one byte per value; on the host it
    /// runs in the slot. Both give the same bytes. The field keeps its name, and transforms see it
    /// before the conversion. A field that [`keep`](Self::keep) omits is not converted.
    pub fn finish(mut self, name: &str, finish: feedline_device::Finish) -> Self {
        self.steps.finishes.push((name.into(), finish));
        self
    }

    /// The order of the samples. Default: sequential. A [`Mix`](crate::dataset::Mix) has its own
    /// order and accepts no other.
    pub fn order(mut self, order: Order) -> Self {
        self.run.order = Some(order);
        self
    }

    /// Seed of the random draws of decoders and transforms. Default: the order's seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.run.seed = Some(seed);
        self
    }

    /// Rows per batch of one rank, the same on every rank. Default: the batch size of the resumed
    /// state, otherwise 32.
    ///
    /// With a [rank](Self::rank), the global batch is this number times the world size. A run that
    /// resumes with another world size should set [`global_batch`](Self::global_batch) instead.
    pub fn batch_size(mut self, rows: usize) -> Self {
        self.run.batch = Some(BatchSize::Rank(rows));
        self
    }

    /// Rows per batch over all ranks. Replaces [`batch_size`](Self::batch_size); the later call
    /// wins.
    ///
    /// Each rank gets an equal part. If the world size does not divide the batch, the lowest ranks
    /// get one more row.
    pub fn global_batch(mut self, rows: u64) -> Self {
        self.run.batch = Some(BatchSize::Global(rows));
        self
    }

    /// This loader's rank and the world size. Default: a single rank. See [`Rank::from_env`].
    ///
    /// Every global batch is cut into one part per rank, and this loader delivers its rank's part.
    pub fn rank(mut self, rank: Rank) -> Self {
        self.run.rank = rank;
        self
    }

    /// Resumes from a saved state: the first epoch starts after the last batch received, see
    /// [`Loader::next_epoch`](crate::Loader::next_epoch).
    ///
    /// The same samples follow in the same order, with any number of workers, any reader, depth and
    /// world size. If [`batch_size`](Self::batch_size) and [`global_batch`](Self::global_batch) are
    /// not set, the state gives the global batch. If [`last_batch`](Self::last_batch) is not set,
    /// the state gives it too.
    ///
    /// `build` fails with [`ErrorKind::FingerprintMismatch`](crate::ErrorKind::FingerprintMismatch)
    /// if the dataset differs from the state's; the error names the shard or range of shards. It
    /// fails with [`ErrorKind::State`](crate::ErrorKind::State) if order, seeds, global batch or
    /// last batch differ.
    pub fn resume(mut self, state: State) -> Self {
        self.run.resume = Some(state);
        self
    }

    /// Like [`resume`](Self::resume), but the global batch and the last batch may differ.
    ///
    /// The rest of the interrupted epoch is cut into batches of the new size, from the point of
    /// interruption; later epochs are cut from their beginning. The sequence of samples stays the
    /// same, except those that the last batch drops or repeats. The sequence of batches changes. If
    /// the whole rest is dropped, [`Loader::next_epoch`](crate::Loader::next_epoch) is the epoch
    /// after the interrupted one.
    pub fn resume_rebatched(mut self, state: State) -> Self {
        self.run.any_batch = true;
        self.resume(state)
    }

    /// The flag behind [`Loader::stop_requested`](crate::Loader::stop_requested), set by a signal
    /// or by the program.
    pub fn stop(mut self, stop: Stop) -> Self {
        self.run.stop = Some(stop);
        self
    }

    /// Handling of the samples that do not fill a global batch. Default: the handling of the
    /// resumed state, otherwise a smaller last batch.
    pub fn last_batch(mut self, last: LastBatch) -> Self {
        self.run.last = Some(last);
        self
    }

    /// The share of an epoch's samples that last batches may repeat or leave out. It applies if
    /// each group has its own last batch: in groups by [number](crate::order::Groups::of) and in
    /// buckets of pictures. Default: 0.01.
    ///
    /// [`build`](Self::build) fails above this share and names the numbers. The single last batch
    /// of any other order is always allowed. So are several last batches that together repeat or
    /// leave out less than one batch. The report counts these samples.
    pub fn last_batch_share(mut self, most: f64) -> Self {
        self.run.last_share = most;
        self
    }

    /// Number of decode workers (threads), at most 1024.
    ///
    /// Default: one per core that the process may use; on a [NUMA node](crate::Tuning::numa), one
    /// per usable core of the node. Local ranks divide the cores, see the guide
    /// [ranks](crate::guide::ranks). The loader starts fewer workers if their buffers do not fit in
    /// the free memory, or if the system refuses threads; the report says so.
    pub fn workers(mut self, workers: usize) -> Self {
        self.memory.workers = Some(workers);
        self
    }

    /// Maximum bytes of memory, including data in memory. [`build`](Self::build) reserves
    /// everything it needs, or fails and lists what it needs. Default: as much as the other
    /// settings need, or less if less memory is free.
    pub fn memory_budget(mut self, bytes: usize) -> Self {
        self.memory.budget = Some(bytes);
        self
    }

    /// Takes memory from a budget that several loaders of this process share.
    ///
    /// The limit is an equal part of the budget's free bytes, see [`Budget`]. A
    /// [`memory_budget`](Self::memory_budget), if set, is a limit as well.
    ///
    /// ```
    /// use feedline::memory::Budget;
    /// use feedline::{Device, Loader, dataset::Records};
    ///
    /// let budget = Budget::new(64 << 20, 2); // for two loaders, one per device
    /// let mut loaders = Vec::new();
    /// for device in [Device::host(), Device::host()] {
    ///     let records = Records::builder(1).open_bytes([0; 100])?;
    ///     loaders.push(Loader::builder(records).device(device).workers(1).shared_budget(&budget).build()?);
    /// }
    /// let planned: usize = loaders.iter().map(|loader| loader.plan().total()).sum();
    /// assert_eq!(budget.free(), (64 << 20) - planned);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn shared_budget(mut self, budget: &Budget) -> Self {
        self.memory.shared = Some(budget.clone());
        self
    }

    /// Keeps objects of stores and files of network mounts on a local disk, and reads them from
    /// there. Default: nothing is kept.
    ///
    /// ```no_run
    /// use feedline::{Loader, dataset, storage::Cache};
    ///
    /// let tar = dataset::Tar::open("s3://bucket/train-{0000..1023}.tar")?;
    /// let loader = Loader::builder(tar).cache(Cache::at("/nvme/feedline").capacity(2 << 40)).build()?;
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn cache(mut self, cache: feedline_store::Cache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// The device that holds the delivered batches. Default: the host. [`Device::auto`] uses a GPU
    /// if there is one.
    pub fn device(mut self, device: Device) -> Self {
        self.device.device = device;
        self
    }

    /// The stream that runs the steps: it takes every batch, and its idle time is measured. Without
    /// it, see [`Batch::bind`](crate::Batch::bind).
    ///
    /// The stream waits for each batch's copy. The memory of a dropped batch is reused only after
    /// the stream's work on it. Declare further streams with [`stream_as`](Self::stream_as).
    pub fn stream(self, stream: impl Into<Stream>) -> Self {
        self.stream_as(stream, StreamUse::Takes)
    }

    /// A stream that uses every batch as `how` says. May be called several times; among streams
    /// with [`StreamUse::Takes`], the first is measured.
    pub fn stream_as(mut self, stream: impl Into<Stream>, how: StreamUse) -> Self {
        self.device.streams.push(Bound {
            stream: stream.into(),
            how,
        });
        self
    }

    /// Policy for a sample that fails. Default: [`OnBadSample::Fail`].
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

    /// Appends a line of JSON to this file for each failed sample: the fields of
    /// [`BadSample`](crate::BadSample).
    ///
    /// The lines are written when the batch is delivered: one line for a row that got a substitute,
    /// and one for each substitute that also failed. Each rank needs its own file. If a write fails
    /// (a full disk, say), the run continues, and the [ledger](crate::Loader::ledger) and the
    /// report say so.
    ///
    /// `build` fails if the file cannot be opened, or if the policy never substitutes.
    pub fn ledger(mut self, path: impl Into<PathBuf>) -> Self {
        self.faults.ledger = Some(path.into());
        self
    }

    /// Uses this clock and this reader.
    #[cfg(test)]
    pub(super) fn simulated(mut self, clock: Clock, opened: Opened) -> Self {
        self.clock = clock;
        self.opened = Some(opened);
        self
    }
}

impl std::fmt::Debug for LoaderBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "LoaderBuilder of {}, {}",
            self.dataset.describe(),
            self.run.rank
        )
    }
}
