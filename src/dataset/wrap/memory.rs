//! A dataset in memory: `open` reads all files once. For small datasets that are read many times.
//!
//! ```text
//! files ──threads──► one region in huge pages ──► sources of the same ids ──► workers copy or decode from there
//! ```
//!
//! A sample costs no system call and none of the page cache's bookkeeping, which dominates for
//! samples of a few kilobytes. The dataset owns the memory, and all its loaders share it; each
//! loader's plan and budget count it. The files may change or vanish afterwards.

use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::{Dataset, Sizes};
use feedline_core::memory::region::Bytes as RegionBytes;
use feedline_core::order::local_ranks;
use feedline_core::storage::{Blob, Extent, SourceId, Sources, patiently};
use std::sync::Arc;

/// Bytes per read of a thread.
const STEP: usize = 16 << 20;

/// A dataset in memory; made by [`DatasetExt::in_memory`](crate::dataset::DatasetExt::in_memory).
pub struct InMemory<D> {
    inner: D,
    sources: Arc<Sources>,
    bytes: usize,
}

/// Owner of the region, shared by slices of it.
struct Owner(RegionBytes);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// A part of a file, and the memory to read it into.
struct ReadTask<'a> {
    source: SourceId,
    offset: u64,
    place: &'a mut [u8],
}

impl<D: Dataset> InMemory<D> {
    /// `budget`: maximum bytes of the files. `free`: bytes that the process can still allocate.
    pub(crate) fn open(inner: D, budget: usize, free: Option<u64>) -> Result<Self> {
        let table = inner.sources().clone();
        let total = table.ids().try_fold(0_u64, |sum, id| {
            let file_len = if table.bytes_of(id).is_some() {
                0
            } else {
                table.len_of(id)
            };
            sum.checked_add(file_len)
        });
        let total = total
            .and_then(|total| usize::try_from(total).ok())
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Limit,
                    Stage::Index,
                    "the files have more bytes than memory can address",
                )
            })?;
        let budget = (budget as u64, Setting::MemoryBudget.to_string());
        let here = match local_ranks() {
            1 => String::new(),
            ranks => format!(" for one of the {ranks} ranks here"),
        };
        let free = free.map(|bytes| {
            (
                bytes,
                format!("the free memory{here}, limits of the container included,"),
            )
        });
        if let Some((most, what)) = [budget]
            .into_iter()
            .chain(free)
            .find(|(most, _)| total as u64 > *most)
        {
            let [need, have] = [total as u64, most].map(|bytes| bytes as f64 / f64::from(1 << 20));
            let way = format!("without {} they are read from storage", Setting::InMemory);
            let message =
                format!("the files have {need:.1} MiB, but {what} is {have:.1} MiB: {way}");
            return Err(Error::new(ErrorKind::Budget, Stage::Build, message)
                .with_amounts(total as u64, most));
        }
        let mut region = RegionBytes::new(total, "a dataset in memory")?;
        read_all(&table, &mut region.as_mut_slice()[..total])?;
        let all = Bytes::from_owner(Owner(region));
        let mut at = 0;
        let bytes = table.ids().map(|id| match table.bytes_of(id) {
            // Already in memory.
            Some(_) => table
                .shared(&Extent {
                    source: id,
                    offset: 0,
                    len: table.len_of(id),
                })
                .unwrap_or_default(),
            None => {
                let start = at;
                at += table.len_of(id) as usize;
                all.slice(start..at)
            }
        });
        let sources = Arc::new(table.with_bytes(bytes.collect()));
        Ok(Self {
            inner,
            sources,
            bytes: total,
        })
    }

    /// The dataset in storage.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Bytes of the files in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Reads all files one after the other into `rest`, on threads that end before the call returns.
fn read_all(table: &Sources, mut rest: &mut [u8]) -> Result<()> {
    let mut tasks = Vec::new();
    for source in table.ids().filter(|id| table.bytes_of(*id).is_none()) {
        let (file, after) = rest.split_at_mut(table.len_of(source) as usize);
        rest = after;
        let parts = file.chunks_mut(STEP).enumerate();
        tasks.extend(parts.map(|(part, place)| ReadTask {
            source,
            offset: (part * STEP) as u64,
            place,
        }));
    }
    parallel(tasks, |_, task| {
        let source = task.source;
        let offset = task.offset;
        let len = task.place.len() as u64;
        read(table, task)
            .map_err(|error| error.with_path(table.path(source)).with_range(offset, len))
    })
    .map(drop)
}

fn read(table: &Sources, task: ReadTask<'_>) -> Result<()> {
    patiently(|| Blob::of_source(table, task.source)?.read_at(task.offset, task.place))
}

impl<D: Dataset> Dataset for InMemory<D> {
    // Extents use the same source ids, which readers resolve in the sources of `self`.
    forward!(self => self.inner; schema len extents framed chunked sampler keys identity);

    own!(sources);

    fn sizes(&self) -> Sizes {
        let inner = self.inner.sizes();
        Sizes {
            index_bytes: inner.index_bytes + self.sources.count() * size_of::<Bytes>(),
            ..inner
        }
    }

    fn describe(&self) -> String {
        format!(
            "{}; {:.3} GB in memory",
            self.inner.describe(),
            self.bytes as f64 / 1e9
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_formats::Records;

    #[test]
    fn more_than_the_free_memory_is_refused_before_the_first_read() {
        let path = std::env::temp_dir().join(format!("feedline-in-memory-{}", std::process::id()));
        std::fs::write(&path, [7; 100]).unwrap();
        let open = || Records::builder(10).open(&path).unwrap();
        let whole = open();
        let over = open();
        let within = open();
        let unknown = open();
        assert_eq!(
            InMemory::open(whole, usize::MAX, Some(100))
                .unwrap()
                .bytes(),
            100
        );
        std::fs::remove_file(&path).unwrap();
        let kind = |dataset, free| {
            InMemory::open(dataset, usize::MAX, free)
                .err()
                .unwrap()
                .kind()
        };
        assert_eq!(kind(over, Some(99)), ErrorKind::Budget);
        assert_eq!(
            (kind(within, Some(100)), kind(unknown, None)),
            (ErrorKind::NotFound, ErrorKind::NotFound)
        );
    }
}
