//! The parts of a loader that take virtual time: storage, decoder, sampler; and their dataset.

use super::time::{SharedTime, Span};
use crate::order::Sampler;
use feedline_base::error::Result;
use feedline_core::dataset::{Dataset, Parts, Sizes};
use feedline_core::decode::{Ctx, Decoder};
use feedline_core::memory::Row;
use feedline_core::storage::{Extent, SourceId, Sources};
use feedline_core::tensor::{DType, EncodedField, Field};
use feedline_reader::reader::sealed::Sealed;
use feedline_reader::{Again, Completion, Footprint, ReadOp, Reader, ReaderOptions, Waker};
use feedline_report::meter::{ReadStats, ReaderInUse, ReaderKind};
use feedline_store::{Choice, Opened};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Duration of a piece of work: constant, or exponentially distributed by its number.
///
/// Independent of the start time, so that the number of workers does not change the work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) mean: f64,
    pub(super) varies: bool,
    pub(super) seed: u64,
}

impl Times {
    pub(super) fn of(&self, number: u64) -> u64 {
        if !self.varies {
            return self.mean.round() as u64;
        }
        // SplitMix64.
        let mut bits = number
            .wrapping_add(self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        let uniform = ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        (-uniform.ln() * self.mean).round() as u64
    }
}

/// A device: several servers, first come, first served; then one channel that carries the bytes of
/// one read at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Device {
    pub(super) servers: usize,
    pub(super) service: Times,
    /// Nanoseconds of each read on the channel.
    pub(super) channel: f64,
    pub(super) depth: usize,
}

/// Ground truth of storage, for the oracle.
#[derive(Default)]
pub(super) struct ReadLog {
    /// Intervals from the submission of a read to its end.
    pub(super) flights: Vec<Span>,
    /// Busy intervals of a server, or of the channel if it is the bottleneck.
    pub(super) served: Vec<Span>,
}

/// A reader with the device's durations. Reads start at the next `wait`, as in a ring.
pub(super) struct Storage {
    time: Arc<SharedTime>,
    device: Device,
    log: Arc<Mutex<ReadLog>>,
    submitted: Vec<ReadOp>,
    /// Reads in flight, with their ends.
    flying: Vec<(u64, ReadOp)>,
    free: Vec<u64>,
    channel_free: u64,
    stats: ReadStats,
}

impl Storage {
    pub(super) fn open(time: Arc<SharedTime>, device: Device) -> (Opened, Arc<Mutex<ReadLog>>) {
        let log = Arc::<Mutex<ReadLog>>::default();
        let reader = Self {
            time,
            device,
            log: log.clone(),
            submitted: Vec::new(),
            flying: Vec::new(),
            free: vec![0; device.servers],
            channel_free: 0,
            stats: ReadStats::default(),
        };
        let used = ReaderInUse::of(ReaderKind::Uring, false);
        let choice = Choice::of(used);
        let again = Again::new(Arc::default(), &ReaderOptions::default(), None);
        (
            Opened {
                reader: Box::new(reader),
                cache: None,
                choice,
                again,
                announcer: None,
                remote: None,
            },
            log,
        )
    }

    fn send(&mut self, now: u64) {
        let mut log = self.log.lock().unwrap();
        for op in self.submitted.drain(..) {
            let server = self.free.iter_mut().min().unwrap();
            let begins = now.max(*server);
            let served = begins + self.device.service.of(sample_of(&op));
            *server = served;
            let mut channel = served;
            let mut done = served;
            if self.device.channel > 0.0 {
                channel = served.max(self.channel_free);
                done = channel + self.device.channel.round() as u64;
                self.channel_free = done;
            }
            log.flights.push((now, done));
            log.served.push(if self.device.channel > 0.0 {
                (channel, done)
            } else {
                (begins, served)
            });
            self.flying.push((done, op));
        }
    }

    /// Completes the reads that end by `now`.
    fn collect(&mut self, now: u64, out: &mut Vec<Completion>) -> bool {
        let before = out.len();
        let mut at = 0;
        while at < self.flying.len() {
            if self.flying[at].0 > now {
                at += 1;
                continue;
            }
            let (_, op) = self.flying.swap_remove(at);
            self.stats.ops += 1;
            self.stats.bytes_asked += op.extent.len;
            self.stats.bytes_moved += op.extent.len;
            out.push(Completion {
                tag: op.tag,
                buf: op.buf,
                result: Ok(0),
            });
        }
        out.len() > before
    }
}

/// The sample of this read: samples lie one after the other.
fn sample_of(op: &ReadOp) -> u64 {
    op.extent.offset / op.extent.len
}

impl Sealed for Storage {}

impl Reader for Storage {
    fn depth(&self) -> usize {
        self.device.depth
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        Footprint {
            bytes: extent.len as usize,
            in_place: false,
        }
    }

    fn mem_align(&self) -> usize {
        1
    }

    fn submit(&mut self, op: ReadOp) -> std::result::Result<(), ReadOp> {
        if self.in_flight() == self.device.depth {
            return Err(op);
        }
        self.submitted.push(op);
        Ok(())
    }

    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>) {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let time = self.time.clone();
            let state = time.lock();
            let now = time.now();
            self.send(now);
            let until = if SharedTime::has_ended(&state) {
                u64::MAX
            } else {
                now
            };
            if self.collect(until, out) || timeout == Some(Duration::ZERO) {
                return;
            }
            let due = self.flying.iter().map(|(due, _)| *due).min();
            match time.doze(state, due) {
                Err(true) => return,
                Err(false) => continue,
                Ok(()) => {}
            }
            time.bell.sleep(deadline);
            let woken = time.rise();
            if woken || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.collect(time.now(), out);
                return;
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.submitted.len() + self.flying.len()
    }

    fn cancel(&mut self) {}

    fn waker(&self) -> Waker {
        self.time.bell.waker()
    }

    fn stats(&self) -> ReadStats {
        self.stats
    }
}

/// Samples of equal length, one after the other in a file that is never opened; or in memory,
/// without bytes.
pub(super) struct Samples {
    schema: [EncodedField; 1],
    sources: Arc<Sources>,
    len: u64,
    /// Bytes of a sample.
    bytes: u64,
}

impl Samples {
    pub(super) fn new(len: u64, bytes: u64, in_memory: bool) -> Self {
        let mut sources = Sources::new();
        if !in_memory {
            sources.file("/nowhere/samples", len * bytes).unwrap();
        }
        Self {
            schema: [EncodedField::bytes("x")],
            sources: Arc::new(sources),
            len,
            bytes,
        }
    }
}

impl Dataset for Samples {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    fn sizes(&self) -> Sizes {
        Sizes::new(self.bytes)
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        if self.sources.count() == 0 {
            parts.inline(0, &[]);
            return Ok(());
        }
        parts.extent(
            0,
            Extent {
                source: SourceId::at(0),
                offset: sample * self.bytes,
                len: self.bytes,
            },
        );
        Ok(())
    }
}

/// Decodes in virtual time.
pub(super) struct Decode {
    pub(super) time: Arc<SharedTime>,
    pub(super) times: Times,
}

impl Decoder for Decode {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        Ok(vec![Field::fixed(&input.name, DType::U64, [])])
    }

    fn decode(&self, _: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let id = ctx.id();
        out.slice_mut::<u64>(ctx.fields().start)?[0] = id;
        self.time.sleep(self.times.of(id));
        self.time.decoded(id);
        Ok(())
    }
}

/// An identity order with a delay per sample.
pub(super) struct Slow {
    pub(super) time: Arc<SharedTime>,
    pub(super) times: Times,
    pub(super) len: u64,
}

impl Sampler for Slow {
    fn len(&self) -> u64 {
        self.len
    }

    fn id(&self, _: u64, position: u64) -> u64 {
        if super::time::Party::here() == super::time::Party::Io {
            self.time.sleep(self.times.of(position));
        }
        position
    }

    fn identity(&self) -> u64 {
        0
    }
}
