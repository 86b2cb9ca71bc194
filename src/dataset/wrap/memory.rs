//! A dataset in memory: `open` reads all files once. For small datasets that are read many times.
//!
//! ```text
//! one rank:    files ──threads──► one region in huge pages ──► sources of the same ids ──► workers copy or decode from there
//! local ranks: the first ──threads──► one sealed region ──mapped by each──┘       (see `memory::shared` of the core)
//! ```
//!
//! A sample costs no system call and none of the page cache's bookkeeping, which dominates for
//! samples of a few kilobytes. The dataset owns the memory, and all its loaders share it; each
//! loader's plan and budget count it. The files may change or vanish afterwards.
//!
//! The ranks of a machine share one copy of the same files: same paths, lengths and versions. A
//! plan counts its rank's part, bytes / local ranks. Where they cannot share, each rank has a copy,
//! and the copies together must fit; [`describe`](Dataset::describe) gives the reason.

use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::parallel::{goes_on, parallel};
use feedline_core::dataset::{Dataset, Digest, Sizes};
use feedline_core::memory::available::Room;
use feedline_core::memory::plan::PROCESS;
use feedline_core::memory::region::Bytes as RegionBytes;
use feedline_core::memory::shared::{Found, Held, Turn, find};
use feedline_core::storage::listing::regular;
use feedline_core::storage::{Blob, Extent, SourceId, Sources, patiently};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Bytes per read of a thread.
const STEP: usize = 16 << 20;

/// A dataset in memory; made by [`DatasetExt::in_memory`](crate::dataset::DatasetExt::in_memory).
pub struct InMemory<D> {
    inner: D,
    sources: Arc<Sources>,
    bytes: usize,
    copies: Copies,
}

/// Whose copy of the bytes it is.
enum Copies {
    /// That of the only rank.
    Alone,
    /// That of so many ranks of this machine.
    Shared(Arc<Held>, u64),
    /// This rank's own, for this reason.
    Own(String),
}

/// Owner of the region, shared by slices of it.
struct Owner(RegionBytes);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// Owner of a region that ranks share.
struct SharedOwner(Arc<Held>);

impl AsRef<[u8]> for SharedOwner {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

/// A part of a file, and the memory to read it into.
struct ReadTask<'a> {
    source: SourceId,
    offset: u64,
    place: &'a mut [u8],
}

impl<D: Dataset> InMemory<D> {
    /// `budget`: maximum bytes that this process counts. `room`: memory that is free, if known.
    pub(crate) fn open(inner: D, budget: usize, room: Option<Room>) -> Result<Self> {
        let table = inner.sources().clone();
        let bytes = bytes_of_files(&table)?;
        let limits = Limits {
            bytes: bytes as u64,
            budget: budget as u64,
            room,
        };
        let (all, copies) = match found(&table, bytes, &limits)? {
            Some(Found::Held(held)) => limits.shared(held),
            Some(Found::Turn(turn)) => limits.shared(fill(turn, &table, &limits)?),
            Some(Found::Refused(why)) => {
                limits.check_own(&why)?;
                (read_own(&table, bytes)?, Copies::Own(why))
            }
            None => {
                limits.check_alone()?;
                (read_own(&table, bytes)?, Copies::Alone)
            }
        };
        let mut sources = table.with_bytes(by_source(&table, &all));
        if let Copies::Shared(_, ranks) = &copies {
            sources = sources.sharing(addresses(&all), *ranks as usize);
        }
        Ok(Self {
            inner,
            sources: Arc::new(sources),
            bytes,
            copies,
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

/// Bytes of all files that are not in memory yet.
fn bytes_of_files(table: &Sources) -> Result<usize> {
    let files = table.ids().filter(|id| table.bytes_of(*id).is_none());
    files
        .map(|id| table.len_of(id))
        .try_fold(0_u64, u64::checked_add)
        .and_then(|total| usize::try_from(total).ok())
        .ok_or_else(|| {
            let message = "the files have more bytes than memory can address";
            Error::new(ErrorKind::Limit, Stage::Index, message)
        })
}

/// Bytes of files, and the memory for them.
struct Limits {
    bytes: u64,
    budget: u64,
    room: Option<Room>,
}

impl Limits {
    fn ranks(&self) -> u64 {
        self.room.map_or(1, |room| room.ranks.max(1))
    }

    fn shared(&self, held: Held) -> (Bytes, Copies) {
        let held = Arc::new(held);
        let all = Bytes::from_owner(SharedOwner(held.clone()));
        (all, Copies::Shared(held, self.ranks()))
    }

    /// The only rank, or one that needs no memory.
    fn check_alone(&self) -> Result<()> {
        let files = format!("the files have {}", shown(self.bytes));
        self.check_budget(self.bytes, &files)?;
        self.check_free(self.room.map(|room| room.own), &files)
    }

    /// One copy for all ranks.
    fn check_shared(&self) -> Result<()> {
        let ranks = self.ranks();
        let files = format!(
            "the files have {}, one copy for the {ranks} ranks here",
            shown(self.bytes)
        );
        self.check_free(self.room.map(|room| room.all), &files)
    }

    fn check_free(&self, free: Option<u64>, files: &str) -> Result<()> {
        let what = "the free memory, limits of the container included,";
        within(self.bytes, free.map(less_process), files, what, "")
    }

    /// A copy in each rank: the sum must fit.
    fn check_own(&self, why: &str) -> Result<()> {
        let ranks = self.ranks();
        let all = self.bytes.saturating_mul(ranks);
        let files = format!(
            "the files have {}, and the {ranks} ranks here need {} for a copy each, because \
             they cannot share one ({why})",
            shown(self.bytes),
            shown(all)
        );
        self.check_budget(self.bytes, &files)?;
        let Some(room) = self.room else {
            return Ok(());
        };
        let rest = format!(
            " (the limit of all ranks is {}, and {} are free)",
            shown(room.limit),
            shown(room.all)
        );
        let what = "the free memory for one of them, limits of the container included,";
        within(
            self.bytes,
            Some(less_process(room.own)),
            &files,
            what,
            &rest,
        )
    }

    fn check_budget(&self, counted: u64, files: &str) -> Result<()> {
        let what = Setting::MemoryBudget.to_string();
        within(counted, Some(self.budget), files, &what, "")
    }
}

/// Free bytes without those that the process takes in addition.
fn less_process(free: u64) -> u64 {
    free.saturating_sub(PROCESS as u64)
}

fn shown(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Errors: [`ErrorKind::Budget`] for more bytes than `most`.
fn within(need: u64, most: Option<u64>, files: &str, what: &str, rest: &str) -> Result<()> {
    let Some(most) = most.filter(|most| need > *most) else {
        return Ok(());
    };
    let have = shown(most);
    let way = format!("without {} they are read from storage", Setting::InMemory);
    let message = format!("{files}, but {what} is {have}{rest}: {way}");
    Err(Error::new(ErrorKind::Budget, Stage::Build, message).with_amounts(need, most))
}

/// The bytes that other ranks of this machine have, or the turn to read them; `None` if there are
/// no other ranks or no files.
fn found(table: &Sources, bytes: usize, limits: &Limits) -> Result<Option<Found>> {
    if limits.ranks() == 1 || bytes == 0 {
        return Ok(None);
    }
    let ranks = limits.ranks();
    let part = limits.bytes.div_ceil(ranks);
    let files = format!(
        "the part of one of the {ranks} ranks here has {} of the files",
        shown(part)
    );
    limits.check_budget(part, &files)?;
    match identity(table)? {
        Some(data) => find(data, bytes, goes_on).map(Some),
        None => Ok(Some(Found::Refused(
            "the store gives no versions of the objects".into(),
        ))),
    }
}

/// Hash of the paths, lengths and versions of all files; `None` if an object has no version.
fn identity(table: &Sources) -> Result<Option<u64>> {
    let mut digest = Digest::new("in memory");
    for id in table.ids().filter(|id| table.bytes_of(*id).is_none()) {
        let path = table.path(id);
        digest = digest
            .bytes(path.as_os_str().as_encoded_bytes())
            .word(table.len_of(id));
        if table.is_remote(id) {
            let Some(pin) = table.pin(id) else {
                return Ok(None);
            };
            digest = digest.bytes(pin.as_bytes());
            continue;
        }
        let stamp = match table.indexed(id) {
            Some(stamp) => Some(stamp),
            None => regular(&path)?.stamp,
        };
        let Some(stamp) = stamp else {
            return Ok(None);
        };
        digest = digest.word(stamp.modified).word(stamp.inode.into());
    }
    Ok(Some(digest.end()))
}

/// Reads all files into memory that ranks share.
fn fill(turn: Turn, table: &Sources, limits: &Limits) -> Result<Held> {
    limits.check_shared()?;
    let mut room = turn.room("a dataset in memory")?;
    read_all(table, &mut room.as_mut_slice()[..limits.bytes as usize])?;
    turn.publish(room).map_err(|source| {
        let message = "the memory for the ranks of this machine cannot be sealed";
        Error::new(ErrorKind::Io, Stage::Build, message).with_source(source)
    })
}

/// Reads all files into memory of this process.
fn read_own(table: &Sources, bytes: usize) -> Result<Bytes> {
    let mut region = RegionBytes::new(bytes, "a dataset in memory")?;
    read_all(table, &mut region.as_mut_slice()[..bytes])?;
    Ok(Bytes::from_owner(Owner(region)))
}

/// The bytes of each source: its part of `all`, or what was in memory already.
fn by_source(table: &Sources, all: &Bytes) -> Vec<Bytes> {
    let mut at = 0;
    let bytes = table.ids().map(|id| match table.bytes_of(id) {
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
    bytes.collect()
}

fn addresses(bytes: &Bytes) -> Range<usize> {
    let start = bytes.as_ptr().addr();
    start..start + bytes.len()
}

impl fmt::Display for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone => Ok(()),
            Self::Shared(held, ranks) => {
                let holders = held.holders();
                write!(
                    f,
                    ", one copy for the {ranks} ranks of this machine, {holders} of which have it now"
                )
            }
            Self::Own(why) => write!(f, ", a copy of this rank alone ({why})"),
        }
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
            "{}; {:.3} GB in memory{}",
            self.inner.describe(),
            self.bytes as f64 / 1e9,
            self.copies
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
        let room = |free: u64| {
            let free = free + PROCESS as u64;
            Some(Room {
                ranks: 1,
                own: free,
                all: free,
                limit: free,
            })
        };
        let whole = open();
        let over = open();
        let within = open();
        let unknown = open();
        assert_eq!(
            InMemory::open(whole, usize::MAX, room(100))
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
        assert_eq!(kind(over, room(99)), ErrorKind::Budget);
        assert_eq!(
            (kind(within, room(100)), kind(unknown, None)),
            (ErrorKind::NotFound, ErrorKind::NotFound)
        );
    }

    #[test]
    fn shared_bytes_count_once_and_in_parts() {
        let mut own = Sources::new();
        let id = own.memory([7; 100].into());
        let addresses = own.resident()[0].range.clone();
        let counted =
            |table: &Sources| -> usize { table.resident().iter().map(|data| data.counted).sum() };
        let shared = own.clone().sharing(addresses, 3);
        // The same bytes in two parts of a concatenation.
        let mut twice = shared.clone();
        twice.append(&shared).unwrap();
        assert_eq!(own.len_of(id), 100);
        assert_eq!([&own, &shared, &twice].map(counted), [100, 34, 34]);
        twice.memory([8; 9].into());
        assert_eq!(counted(&twice), 43);
    }
}
