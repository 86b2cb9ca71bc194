//! Loaders pulled at full speed, and their cost.
//!
//! ```text
//! records of 150,528 bytes × 256 = a batch of 38.5 MB
//!   copied:  from memory, by the decode workers        the way of real data
//!   counted: a decoder that writes 8 bytes of each     hardly any work before the copy to the device: the copy stage alone
//! ```

#![allow(dead_code, reason = "each binary uses its own part")]

use super::driver::{Result, said};
use feedline::dataset::Records;
use feedline::decode::{Ctx, Decoder};
use feedline::device::cuda::Stream;
use feedline::device::cuda::cudarc::driver::CudaStream;
use feedline::memory::MemoryTerm;
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Batch, Epoch, Loader, LoaderBuilder, Row};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a record: 224 × 224 pixels of 3 bytes.
pub const RECORD: usize = 150_528;
/// Records of a batch.
pub const BATCH: usize = 256;

/// Makes records of this shape of which it writes the first 8 bytes.
struct Counted {
    shape: Vec<usize>,
}

impl Decoder for Counted {
    fn outputs(&self, _: &EncodedField) -> feedline::Result<Vec<Field>> {
        Ok(vec![Field::fixed("record", DType::U8, self.shape.clone())])
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> feedline::Result<()> {
        let row = out.bytes_mut(ctx.fields().start);
        let len = input.len().min(row.len());
        row[..len].copy_from_slice(&input[..len]);
        Ok(())
    }
}

/// A loader with almost no work before its copies: batches of `rows` records of `bytes` bytes.
pub fn counted(rows: usize, bytes: usize) -> Result<LoaderBuilder> {
    counted_as(rows, &[bytes])
}

/// The same with records of a shape, such as pictures.
pub fn counted_as(rows: usize, shape: &[usize]) -> Result<LoaderBuilder> {
    let count = (4 * rows).max(1024).next_multiple_of(rows);
    let numbers: Vec<u8> = (0..count as u64).flat_map(u64::to_ne_bytes).collect();
    let records = Records::builder(8).open_bytes(numbers).map_err(text)?;
    let shape = shape.to_vec();
    let builder = Loader::builder(records).decode_field("record", Counted { shape });
    Ok(builder.batch_size(rows))
}

fn text(error: feedline::Error) -> String {
    error.to_string()
}

/// Totals of a pull.
#[derive(Clone, Copy, Debug)]
pub struct Pulled {
    pub gb_per_s: f64,
    pub batches: u64,
    pub batches_per_s: f64,
    /// CPU time of the transfer thread for each batch, in microseconds; if the kernel reports it.
    pub copy_us: Option<f64>,
}

/// An iterator that is pulled piece by piece.
pub struct Puller {
    pub loader: Loader,
    batches: Epoch,
    /// The consumer's stream; `None` on the host.
    stream: Option<Arc<CudaStream>>,
}

impl Puller {
    pub fn new(builder: LoaderBuilder, stream: Option<Arc<CudaStream>>) -> Result<Self> {
        let loader = builder.build().map_err(text)?;
        let batches = loader.epochs(0..u64::MAX).map_err(text)?;
        Ok(Self {
            loader,
            batches,
            stream,
        })
    }

    pub fn next(&mut self) -> Result<Batch> {
        let batch = self.batches.next().ok_or("the batches ended")?;
        batch.map_err(text)
    }

    /// Waits until the batch has arrived, and drops it.
    fn arrive(&self, batch: Batch) -> Result<usize> {
        let bytes = size(&batch);
        if let Some(stream) = &self.stream {
            batch.bind(Stream::from(stream)).map_err(text)?;
            drop(batch);
            stream.synchronize().map_err(said("cuStreamSynchronize"))?;
        }
        Ok(bytes)
    }

    /// Pulls for about this many seconds, after consuming all batches prepared before. Both ends
    /// wait for a copy, so copies in flight count at neither end.
    pub fn pull(&mut self, seconds: f64) -> Result<Pulled> {
        let plan = self.loader.plan();
        let ahead = plan.term(MemoryTerm::SLOTS).count + plan.term(MemoryTerm::DEVICE).count;
        for _ in 0..ahead {
            self.next()?;
        }
        let last = self.next()?;
        self.arrive(last)?;
        let started = Instant::now();
        let cpu = copy_thread_ns();
        let mut bytes = 0;
        let mut batches = 0;
        loop {
            let batch = self.next()?;
            batches += 1;
            if batches >= 4 && started.elapsed().as_secs_f64() >= seconds {
                bytes += self.arrive(batch)?;
                break;
            }
            bytes += size(&batch);
        }
        let seconds = started.elapsed().as_secs_f64();
        let times = copy_thread_ns().zip(cpu);
        let ns = times.map(|(after, before)| after.saturating_sub(before));
        Ok(Pulled {
            gb_per_s: bytes as f64 / seconds / 1e9,
            batches,
            batches_per_s: batches as f64 / seconds,
            copy_us: ns.map(|ns| ns as f64 / 1e3 / batches as f64),
        })
    }
}

fn size(batch: &Batch) -> usize {
    batch.fields().map(|field| field.size_bytes()).sum()
}

/// CPU time of this process's transfer threads in nanoseconds, by the scheduler; `None` without
/// such a thread, or if the kernel does not report it.
fn copy_thread_ns() -> Option<u64> {
    let mut sum = None;
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.trim() == "feedline-copy" {
            let times = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            sum = Some(sum.unwrap_or(0) + times.split_whitespace().next()?.parse::<u64>().ok()?);
        }
    }
    sum
}
