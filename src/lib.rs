//! feedline keeps a training loop fed. Bytes go from storage to batches with as few copies as the
//! machine allows, in bounded memory. The order depends on (seed, epoch, position) alone, and the
//! loader reports its bottleneck.
//!
//! ```text
//! order ──► read ──► decode ──► slot ──► device ──► iterator ──► your step
//! (which)   (bytes)  (rows)    (memory)            (Batch)      (drop frees memory)
//!    └────────────────── profile watches every edge ───────────────┘
//! ```
//!
//! ```no_run
//! use feedline::{Loader, Order, dataset, decode};
//!
//! let loader = Loader::builder(dataset::Images::open("train/")?)
//!     .decode(decode::Image::random_resized_crop(224).flip(0.5))
//!     .order(Order::shuffled(42))
//!     .batch_size(256)
//!     .memory_budget(2 << 30)
//!     .build()?; // all memory is reserved and checked here
//! for epoch in 0..90 {
//!     for batch in loader.epoch(epoch)? {
//!         let batch = batch?;
//!         let images = batch.field("image")?.as_slice::<u8>()?; // [256, 224, 224, 3], dense
//!         let labels = batch.field("label")?.as_slice::<i64>()?; // [256]
//!         # let _ = (images, labels);
//!     } // dropping the batch returns its memory
//! }
//! println!("{}", loader.report());
//! # Ok::<(), feedline::Error>(())
//! ```
//!
//! # Where to start reading
//!
//! Most users need only [`Loader`] and its builder; runs on many ranks also need [`Rank`] and
//! [`State`]. The other modules:
//!
//! * [`dataset`]: formats, and how to add your own.
//! * [`decode`]: from bytes to rows.
//! * [`order`]: the sequence of samples.
//! * [`storage`]: how files are read.
//! * [`prepare`]: one-time preparation of pictures (shards, seek points).
//! * [`device`]: host or GPU. `device::cuda` has examples for cudarc, candle, burn and PyTorch;
//!   `python` is a Python package.
//!
//! [`guide`] has a page per topic: GPUs, ranks, loops that consume late, offline jobs, formats,
//! object stores, faults, profiling, the architecture and the decisions behind it, the tests.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | sample, id | an entry of the dataset, and its index |
//! | position | an index into the order of an epoch: the order maps each position to an id |
//! | batch, row | samples of one step on one rank; a sample's index in the batch |
//! | global batch | the batches of all ranks for one step |
//! | encoded field | a part of a sample as the dataset stores it: *raw* (elements), an encoded picture, or bytes |
//! | field | an array of the batch, with a name, a dtype and a shape. A raw field keeps its name; a decoder names its outputs (pictures: `image`), and a dataset names its labels (`label`) |
//! | framed | bytes that the dataset checks or unpacks before they are used |
//! | slot | the memory of one batch |
//!
//! **Lengths that vary.** A field `up_to` *max* ([`tensor::Field::up_to`], [`decode::Bytes`]) has
//! rows of *max* elements, padded with zeros after the sample's length; [`FieldView::lens`] gives
//! the lengths. Packed rows are adjacent, without padding. Batches of samples of similar length
//! have little padding: [`Order::grouped`].
//!
//! **One iterator at a time.** A second iterator of the same loader is an error
//! ([`ErrorKind::EpochLive`]). So is a call of `next` while the caller holds every slot as a batch
//! ([`ErrorKind::BatchesHeld`]): drop a batch first.
//!
//! # Many ranks, and interrupted runs
//!
//! Every global batch is cut from one order, and a [`Rank`] gets its part of each. A [`State`] is
//! the position in that order after the last batch received. It is the same on all ranks, and any
//! number of ranks can resume from it. Here two ranks resume as three:
//!
//! ```
//! use feedline::{Loader, Order, Rank, State, dataset::Records};
//!
//! let builder = |rank, world| -> feedline::Result<_> {
//!     let records = Records::builder(1).open_bytes((0..100).collect::<Vec<u8>>())?;
//!     let rank = Rank::new(rank, world)?; // in a real run: Rank::from_env()?
//!     Ok(Loader::builder(records).order(Order::shuffled(7)).global_batch(12).rank(rank))
//! };
//! let first = builder(0, 2)?.build()?;
//! for batch in first.epoch(0)?.take(3) {
//!     assert_eq!(batch?.len(), 6);
//! }
//! let saved = first.state()?.to_bytes(); // or .save(path), or serde
//!
//! let mut rest = Vec::new();
//! for rank in 0..3 {
//!     let loader = builder(rank, 3)?.resume(State::from_bytes(&saved)?).build()?;
//!     for batch in loader.epoch(loader.next_epoch())? { // the epoch of the state
//!         let batch = batch?;
//!         rest.extend_from_slice(&batch.ids()[..batch.valid()]); // later rows only fill up the last batch
//!     }
//! }
//! let mut expected = first.preview(0, 100)?[36..].to_vec(); // three global batches of 12 were received
//! rest.sort_unstable();
//! expected.sort_unstable();
//! assert_eq!(rest, expected);
//! # Ok::<(), feedline::Error>(())
//! ```
//!
//! # Parts of your own
//!
//! | part | trait | example |
//! |---|---|---|
//! | format | [`dataset::Dataset`], with chunks also [`dataset::Chunked`] | [`dataset`]; with index files, patterns and URLs: [`dataset::index`] |
//! | decoder | [`decode::Decoder`] | below |
//! | order | [`order::Sampler`] | in the trait's documentation |
//! | transform of a sample or batch | a closure | below |
//! | object store | `object_store::ObjectStore` of that crate (feature `remote`) | `storage::register` |
//!
//! None of these needs `unsafe`. All workers share a decoder, so it may hold constant data, such as
//! a tokenizer. `.decode` takes the decoder of the only field that needs one; `.decode_field` names
//! the field. This decoder turns a text field of numbers into a vector:
//!
//! ```
//! use feedline::decode::{Ctx, Decoder};
//! use feedline::tensor::{DType, EncodedField, Field};
//! use feedline::{Error, Loader, Result, Row, dataset::Records};
//!
//! struct Numbers;
//!
//! impl Decoder for Numbers {
//!     fn outputs(&self, _input: &EncodedField) -> Result<Vec<Field>> {
//!         Ok(vec![Field::up_to("numbers", DType::F32, 4), Field::fixed("sum", DType::F32, [])])
//!     }
//!
//!     fn decode(&self, input: &[u8], _ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
//!         let text = std::str::from_utf8(input).map_err(|e| Error::decode("not UTF-8").with_source(e))?;
//!         let mut fields = out.split();
//!         let places = fields.take::<f32>("numbers")?;
//!         let total = fields.take::<f32>("sum")?;
//!         let mut len = 0;
//!         for word in text.split_whitespace() {
//!             let place = places.get_mut(len).ok_or_else(|| Error::decode("more numbers than the field holds"))?;
//!             *place = word.parse().map_err(|e| Error::decode("not a number").with_source(e))?;
//!             len += 1;
//!         }
//!         total[0] = places[..len].iter().sum();
//!         out.set_len("numbers", len)
//!     }
//! }
//!
//! let records = Records::builder(8).open_bytes(*b"1 2 3   4.5     ")?;
//! let loader = Loader::builder(records).decode_field("record", Numbers).build()?;
//! let batch = loader.epoch(0)?.next().unwrap()?;
//! assert_eq!(batch.field("numbers")?.row::<f32>(0)?, [1.0, 2.0, 3.0]);
//! assert_eq!(batch.field("numbers")?.row::<f32>(1)?, [4.5]);
//! assert_eq!(batch.field("sum")?.as_slice::<f32>()?, [6.0, 4.5]);
//! # Ok::<(), feedline::Error>(())
//! ```
//!
//! # Transforms: mixup
//!
//! `.map` changes a sample, `.map_batch` a whole batch, both in place. Their random numbers come
//! from their [`decode::Ctx`]. These numbers derive from the order's seed (0 for a sampler, unless
//! [`Order::with_seed`] sets it) or from [`seed`](LoaderBuilder::seed), so a batch does not depend
//! on the number of workers. The result of `.map` for a sample is the same on any number of ranks;
//! `.map_batch` sees the rank's own batch.
//!
//! ```
//! use feedline::tensor::{DType, Field};
//! use feedline::{Loader, Order, dataset::Records};
//!
//! let records = Records::builder(8).field("x", DType::F32, [2]).classes(vec![0, 1, 2, 1]).open_bytes([0; 32])?;
//! let loader = Loader::builder(records)
//!     .order(Order::shuffled(1))
//!     .map_adding([Field::fixed("target", DType::F32, [3])], |row, _| {
//!         let mut fields = row.split();
//!         let label = fields.take::<i64>("label")?;
//!         let target = fields.take::<f32>("target")?;
//!         target[label[0] as usize] = 1.0;
//!         Ok(())
//!     })
//!     .map_batch(|batch, ctx| {
//!         let share = ctx.draws("mixup").next_f64() as f32;
//!         for name in ["x", "target"] {
//!             let mut rows = batch.rows_mut::<f32>(name)?;
//!             // The first row is mixed with the last one, and so on; a row in the middle stays as it is.
//!             while let (Some(a), Some(b)) = (rows.next(), rows.next_back()) {
//!                 for (a, b) in a.iter_mut().zip(b) {
//!                     (*a, *b) = (share * *a + (1.0 - share) * *b, share * *b + (1.0 - share) * *a);
//!                 }
//!             }
//!         }
//!         Ok(())
//!     })
//!     .keep(["x", "target"])
//!     .build()?;
//! let batch = loader.epoch(0)?.next().unwrap()?;
//! assert!(batch.field("target")?.as_slice::<f32>()?.chunks(3).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-6));
//! # Ok::<(), feedline::Error>(())
//! ```

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod batch;
pub mod dataset;
pub mod decode;
pub mod device;
pub mod dlpack;
mod loader;
pub mod order;
mod pipeline;
pub mod prepare;
mod state;
pub mod storage;

pub use batch::{Batch, FieldView, MicroBatch};
#[doc(no_inline)]
pub use device::Device;
#[doc(hidden)]
pub use feedline_base::setting;
#[doc(hidden)]
pub use feedline_base::thread::start as start_thread;
#[doc(inline)]
pub use feedline_base::{
    error::{Error, ErrorKind, Result},
    stop::Stop,
};
#[doc(inline)]
pub use feedline_core::ledger::{BadSample, Ledger};
#[doc(inline)]
pub use feedline_core::memory::{BatchMut, Row, Status};
pub use loader::{Epoch, Loader, LoaderBuilder, Report, Tuning};
#[doc(no_inline)]
pub use order::Rank;
pub use order::{LastBatch, Order};
pub use pipeline::OnBadSample;
pub use state::State;

/// The parts of an [`Error`]: its stage, its location in the data, and the needed and available
/// amounts.
pub mod error {
    #[doc(inline)]
    pub use feedline_base::error::{Amounts, Site, Stage};
}

/// The memory of a loader: its plan, a budget that loaders share, and the NUMA node.
pub mod memory {
    pub use crate::pipeline::Numa;
    #[doc(inline)]
    pub use feedline_core::memory::{Budget, MemoryPlan, MemoryTerm};
}

/// Signals that end a run, and detection of forked processes.
pub mod process {
    #[doc(inline)]
    pub use feedline_base::{process::Process, stop::Signal};
}

/// Fields of a sample and of a batch: names, types, shapes, and access to several fields at once.
pub mod tensor {
    #[doc(inline)]
    pub use feedline_core::memory::{BatchFields, RowFields};
    #[doc(inline)]
    pub use feedline_core::tensor::*;
}

/// Measurements of a run, its bottleneck, and predictions for changes.
///
/// [`Loader::report`] gives all of it as text, [`Loader::snapshot`] the numbers. Two times matter.
/// One is the wait of `next()` for a batch; on a GPU, the time that the loader leaves the stream
/// idle. The other is the time of your own code between two calls.
pub mod profile {
    pub use crate::loader::Log;
    #[doc(inline)]
    pub use feedline_observe::observe;
    #[doc(inline)]
    pub use feedline_report::meter::Snapshot;
    #[doc(inline)]
    pub use feedline_report::{
        Across, Change, Names, Prediction, Verdict, WhatIf, prometheus, trace,
    };

    /// The parts of a [`Snapshot`], by stage, and the timeline of recent batches.
    pub mod snapshot {
        #[doc(inline)]
        pub use feedline_base::meter::{Latency, Network};
        #[doc(inline)]
        pub use feedline_report::meter::{
            BatchRecord, CacheReads, Chunks, Consumer, CopyStage, Cpu, DecodeStage, DirectReads,
            Effort, EpochCounts, Gauges, GpuIdle, Handed, Lookups, OrderStage, PipelineStage,
            ReadStats, ReaderInUse, ReaderKind, Slots, SourceCount, Span, StorageStage, Timeline,
            Track, Unmeasured, Work,
        };
    }

    /// The parts of a [`Verdict`]: causes, evidence and advice, and the estimate of
    /// an epoch.
    pub mod verdict {
        pub use crate::loader::Origin;
        #[doc(inline)]
        pub use feedline_report::{
            Advice, Cause, EpochCost, Estimate, Evidence, Measure, Remedy, StageLoad, Strength,
            Unit, Value,
        };
    }

    /// The measurements around another loader, see [`observe`].
    pub mod observed {
        #[doc(inline)]
        pub use feedline_observe::{
            Advice, Cause, Diagnosis, Evidence, Gain, GpuTime, Interpreter, LoaderFacts,
            LoaderKind, Loop, Machine, Measure, Observation, Observed, Observer, Places, Probe,
            Remedy, ThreadUse, Value, Waits, Worker, WorkerId,
        };
    }

    /// The reports of single ranks, and the parts of their comparison, [`Across`].
    pub mod ranks {
        #[doc(inline)]
        pub use feedline_report::{HowMany, Late, RankReport};
    }
}

/// Internals of storage and memory, fault injection and fuzz targets, for this crate's tests and
/// benches. Not stable: names and behaviour change without notice.
#[cfg(feature = "unstable")]
pub mod unstable {
    pub use crate::dataset::fuzzing;
    pub use crate::dlpack::raw::{DLDataType, DLTensor};
    pub use feedline_base::thread::room::leave_room_for_threads;
    pub use feedline_core::dataset::Fingerprint;
    pub use feedline_core::memory::{ByteRing, IoBuf, RingSpan};
    pub use feedline_core::order::{Key, Permutation};
    pub use feedline_device::cuda::driver::devices;
    pub use feedline_device::cuda::found::{Absent, Found};
    pub use feedline_reader::Faulty;
    pub use feedline_reader::Waker;
    pub use feedline_reader::fault_point::Call;
    pub use feedline_reader::faulty::{Fault, Hit};
    pub use feedline_reader::{Cached, PageCache};
    pub use feedline_reader::{
        Completion, DEPTH_MAX, DROP_DEADLINE, Footprint, ReadOp, Reader, ReaderOptions,
        THREADS_MAX, leaked,
    };
    pub use feedline_store::choice::open;
    pub use feedline_store::{Choice, Opened};

    /// Returns the picture with seek points added, or unchanged if it gets none. Errors: a damaged
    /// picture.
    pub fn embed_seek_points(input: &[u8]) -> feedline_base::error::Result<Vec<u8>> {
        let mut out = Vec::new();
        feedline_jpeg::Decoder::default()
            .embed(input, &mut out)
            .map(|_| out)
            .map_err(|error| feedline_base::error::Error::of_jpeg(error, input))
    }
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

/// Guides, one per topic.
pub mod guide {
    #[doc = include_str!("guide/architecture.md")]
    pub mod architecture {}
    #[doc = include_str!("guide/decisions.md")]
    pub mod decisions {}
    #[doc = include_str!("guide/faults.md")]
    pub mod faults {}
    #[doc = include_str!("guide/formats.md")]
    pub mod formats {}
    #[doc = include_str!("guide/gpu.md")]
    pub mod gpu {}
    #[doc = include_str!("guide/jobs.md")]
    pub mod jobs {}
    #[doc = include_str!("guide/late.md")]
    pub mod late {}
    #[doc = include_str!("guide/profiling.md")]
    pub mod profiling {}
    #[doc = include_str!("guide/ranks.md")]
    pub mod ranks {}
    #[doc = include_str!("guide/stores.md")]
    pub mod stores {}
    #[doc = include_str!("guide/testing.md")]
    pub mod testing {}
}
