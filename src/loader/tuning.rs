//! Settings that few loaders need.

use super::settings::LoaderBuilder;
use crate::pipeline::{Gds, Numa};
use feedline_core::storage::{Direct, Mode};
use std::time::Duration;

/// Settings that few loaders need: the defaults depend on the machine. See
/// [`LoaderBuilder::tuning`].
#[must_use]
pub struct Tuning(pub(super) LoaderBuilder);

impl LoaderBuilder {
    /// Settings that few loaders need: numbers of buffers, the reader, the placement on the
    /// machine, deadlines. May be called several times.
    ///
    /// ```
    /// use feedline::{Loader, dataset::Records};
    ///
    /// let records = Records::builder(1).open_bytes([0, 1, 2, 3])?;
    /// let loader = Loader::builder(records).tuning(|t| t.slots(8).depth(64)).build()?;
    /// # assert_eq!(loader.plan().term(feedline::memory::MemoryTerm::SLOTS).count, 8);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn tuning(self, tune: impl FnOnce(Tuning) -> Tuning) -> Self {
        tune(Tuning(self)).0
    }
}

impl Tuning {
    /// Number of batches in host memory at once, including those that the caller holds.
    ///
    /// Default: 4 to 16 depending on their size; fewer under a tight budget, but at least 2. With 1
    /// slot, nothing is read ahead.
    pub fn slots(mut self, slots: usize) -> Self {
        self.0.memory.slots = Some(slots);
        self
    }

    /// The reader. Default: [`Mode::Auto`].
    pub fn reader(mut self, mode: Mode) -> Self {
        self.0.reader.mode = mode;
        self
    }

    /// Whether reads bypass the page cache with O_DIRECT. Default: [`Direct::Auto`]. For GPUDirect
    /// Storage see [`gds`](Self::gds).
    pub fn direct(mut self, direct: Direct) -> Self {
        self.0.reader.direct = direct;
        self
    }

    /// Maximum number of reads in flight. Default: 32; 128 for io_uring through the page cache, and
    /// on network mounts.
    pub fn depth(mut self, depth: u32) -> Self {
        self.0.reader.depth = Some(depth);
        self
    }

    /// Number of batches in device memory at once, including those that the caller holds; at least
    /// 2.
    ///
    /// Default: 3 (one in use, one ready, one being copied). Has no effect on the host, where
    /// batches stay in their [`slots`](Self::slots).
    pub fn device_batches(mut self, batches: usize) -> Self {
        self.0.device.batches = Some(batches);
        self
    }

    /// Whether raw fields are read directly from files into device memory (GPUDirect Storage).
    /// Default: [`Gds::Auto`].
    ///
    /// A field qualifies if its rows are unchanged bytes of a file. The host does not checksum such
    /// bytes. The report gives each field's route and the reason.
    ///
    /// [`Gds::Auto`] reads directly if cuFile really bypasses host memory and the page cache has no
    /// room for the dataset. It opens cuFile only if the kernel module nvidia-fs is loaded or
    /// cuFile may use peer-to-peer DMA (`"use_pci_p2pdma": true` in `cufile.json`, or
    /// `CUFILE_USE_PCIP2PDMA=true`). It closes cuFile if the trial read fails. It needs cuFile
    /// 1.15, the first version that counts bytes per route; older versions work only with
    /// nvidia-fs, if root has enabled its counters. From 1.16 on, an open cuFile holds a context,
    /// with its memory, on every visible GPU: set `CUDA_VISIBLE_DEVICES` for each rank.
    ///
    /// [`Gds::Require`] makes `build` fail, with the reason for each field, unless at least one
    /// field is read directly. It ignores row sizes and the page cache, and accepts a cuFile
    /// version that does not count bytes per route.
    pub fn gds(mut self, gds: Gds) -> Self {
        self.0.device.gds = gds;
        self
    }

    /// NUMA node of the threads and memory. Default: [`Numa::Auto`], next to the device.
    pub fn numa(mut self, numa: Numa) -> Self {
        self.0.machine.numa = numa;
        self
    }

    /// How long `next()` waits while the caller holds every batch. Default: 10 s.
    ///
    /// After that, it returns [`ErrorKind::BatchesHeld`](crate::ErrorKind::BatchesHeld).
    pub fn held_deadline(mut self, deadline: Duration) -> Self {
        self.0.faults.held_deadline = deadline;
        self
    }

    /// How long one operation may take before `next()` fails with
    /// [`ErrorKind::Stalled`](crate::ErrorKind::Stalled).
    ///
    /// Default: 300 s; at least 20 ms. The deadline applies to each read, each sample in a decoder
    /// or transform, and each copy. The error names the operation. Slow work on many samples is not
    /// a stall. The next copy may wait for the consumer's streams to finish with dropped batches.
    /// This is not a stall either: it counts as
    /// [`CopyStage::blocked_ns`](crate::profile::snapshot::CopyStage::blocked_ns). The loader can
    /// still be dropped: some seconds later it abandons the stalled operation and everything that
    /// operation can reach.
    pub fn stall_deadline(mut self, deadline: Duration) -> Self {
        self.0.faults.stall_deadline = deadline;
        self
    }
}

#[cfg(feature = "unstable")]
impl Tuning {
    /// For tests: loads this cuFile library, on a machine with `proc`, `run` and `dev` below
    /// `root`.
    pub fn cufile_at(
        mut self,
        library: impl Into<std::path::PathBuf>,
        root: impl Into<std::path::PathBuf>,
    ) -> Self {
        self.0.device.cufile = Some((library.into(), root.into()));
        self
    }

    /// For tests: cuFile may copy the bytes through host memory, as it does on machines without its
    /// kernel module.
    pub fn cufile_any_route(mut self) -> Self {
        self.0.device.cufile_any_route = true;
        self
    }

    /// For tests: injects these faults into the readers.
    pub fn faulty(mut self, faulty: std::sync::Arc<feedline_reader::Faulty>) -> Self {
        self.0.reader.faulty = Some(faulty);
        self
    }

    /// Turns off all measurements, for the benchmark of their cost.
    pub fn unmeasured(mut self) -> Self {
        self.0.clock = feedline_base::meter::Clock::still();
        self
    }
}
