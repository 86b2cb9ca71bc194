//! Page-aligned host memory from the kernel: the only kind that holds batches and encoded bytes.

#![allow(unsafe_code)]

use super::available;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use memmap2::{Advice, Mmap, MmapMut, MmapOptions};
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// Size from which regions request huge pages: fewer TLB misses, and far fewer pages to pin for a
/// device or io_uring.
const HUGE_FROM: usize = 4 << 20;
/// Bytes that are populated at once.
const STEP: usize = 32 << 20;
/// Number of processes that may see the same bytes as free and populate a step of them at the same
/// time.
const AT_ONCE: usize = 16;
/// Bytes that must be free beyond a region that is being populated.
const MARGIN: usize = 2 << 20;
/// Advice to a user who lacks memory.
const LESS: &str = "free memory, or use less in-memory data, a smaller batch or fewer slots";
/// The usual size of a huge page (x86-64, and arm64 with 4 KiB pages).
const HUGE: usize = 2 << 20;

/// Anonymous private memory, zeroed, page-aligned, populated on creation, returned to the kernel on
/// drop.
///
/// It hands out raw pointers only; the tokens of `slot` and `ring` give each byte one writer.
pub struct Region {
    // All accesses go through `start`; only `drop` takes the mapping out.
    map: Option<MmapMut>,
    start: NonNull<u8>,
    len: usize,
    id: u64,
    pin: OnceLock<Box<dyn Pinned>>,
    /// Whether the user holds the batch in this region.
    held: Arc<AtomicBool>,
}

/// A region that forked children do not inherit.
struct WithheldRegion {
    len: usize,
    /// Number of users that withhold it.
    users: usize,
    held: Arc<AtomicBool>,
}

type AllKept = BTreeMap<usize, WithheldRegion>;

/// The withheld regions, by address. A thread holds the lock while it forks, so that the map is
/// consistent in the child.
static WITHHELD: Mutex<AllKept> = Mutex::new(BTreeMap::new());

/// State of a thread while it forks: the lock, and copies of the regions that the user holds.
struct Forking {
    withheld: MutexGuard<'static, AllKept>,
    copies: Vec<(usize, MmapMut)>,
}

thread_local!(static FORKING: RefCell<Option<Forking>> = const { RefCell::new(None) });

unsafe extern "C" {
    fn pthread_atfork(
        before: extern "C" fn(),
        parent: extern "C" fn(),
        child: extern "C" fn(),
    ) -> c_int;
}

/// Copies the withheld regions that the user holds.
///
/// The child gets the copies, not the regions themselves. To inherit those, the fork would have to
/// copy their pages. Only kernels from 5.12 on do that, and only for pages that the device's driver
/// has pinned by the right call. Otherwise the parent's next write would move the page, and the
/// device would continue to use the old one.
extern "C" fn before_fork() {
    let withheld = WITHHELD.hold();
    let held = withheld
        .iter()
        .filter(|(_, kept)| kept.held.load(Ordering::Relaxed));
    let copies = held
        .filter_map(|(start, kept)| {
            // Without memory for the copy, the child lacks the region.
            let mut copy = Region::map(kept.len, "a forked child").ok()?;
            let from = std::ptr::with_exposed_provenance::<u8>(*start);
            // SAFETY: the region is mapped while it is listed, which the lock ensures, and the new
            // mapping has the same length. Bytes that the user's other threads write meanwhile may
            // be torn, as in any fork.
            unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), kept.len) };
            Some((*start, copy))
        })
        .collect();
    let _ = FORKING.try_with(|forking| forking.replace(Some(Forking { withheld, copies })));
}

extern "C" fn in_parent() {
    let _ = FORKING.try_with(RefCell::take);
}

/// Moves the copies to the addresses of the regions.
extern "C" fn in_child() {
    let Ok(Some(mut forking)) = FORKING.try_with(RefCell::take) else {
        return;
    };
    for (start, mut copy) in forking.copies.drain(..) {
        let at = start as *mut c_void;
        let from = copy.as_mut_ptr().cast();
        let len = copy.len();
        // The copy must not be unmapped.
        std::mem::forget(copy);
        // An earlier handler may have mapped something at this address; kernels before 4.17 then
        // choose another address.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: a new mapping, which replaces no other.
        if unsafe { mmap_anonymous(at, len, ProtFlags::empty(), flags) } == Ok(at) {
            // SAFETY: replaces the mapping made above with the copy, which no other code knows.
            let _ = unsafe { mremap_fixed(from, len, len, MremapFlags::MAYMOVE, at) };
        }
    }
    // The parent's regions do not concern the child's own forks.
    forking.withheld.clear();
}

/// A device's registration of a region, for copies without the CPU.
pub trait Pinned: Send + Sync {
    /// Unregisters the region. Returns false if success is not certain; the memory then stays
    /// mapped for ever.
    fn release(&self) -> bool;
}

// SAFETY: a region is plain memory. The tokens of `slot` and `ring`, the only callers of `ptr`,
// decide which thread may access which part.
unsafe impl Send for Region {}
// SAFETY: as above; `Region` itself has no method that reads or writes the bytes.
unsafe impl Sync for Region {}

impl Region {
    /// Reserves and populates `len` bytes, rounded up to a page.
    ///
    /// Errors: [`ErrorKind::Budget`] if the kernel refuses them, or if other processes take the
    /// memory meanwhile.
    pub fn new(len: usize, what: &str) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut map = Self::map(len, what)?;
        let start = map.as_mut_ptr();
        let len = map.len();
        let start = NonNull::new(start).expect("a mapping is never at address 0");
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            map: Some(map),
            start,
            len,
            id,
            pin: OnceLock::new(),
            held: Arc::default(),
        })
    }

    fn map(len: usize, what: &str) -> Result<MmapMut> {
        let len = Self::size_for(len);
        let map = MmapMut::map_anon(len).map_err(|source| refused(len, what, source))?;
        Self::populate(&map, what)?;
        Ok(map)
    }

    /// Populates a new mapping as far as other processes leave memory.
    fn populate(map: &MmapMut, what: &str) -> Result<()> {
        if cfg!(miri) {
            // Miri does not support `madvise`.
            return Ok(());
        }
        let len = map.len();
        if len >= HUGE_FROM {
            // Kernels without transparent huge pages answer EINVAL; the mapping works without them.
            let _ = map.advise(Advice::HugePage);
        }
        // Populate now, so that `build()` finds a lack of memory and the first epoch pays no page
        // faults. Kernels before 5.14 do not know the advice; they populate pages on first write.
        let mut start = 0;
        while start < len {
            let left = len - start;
            let mut step = left.min(STEP);
            // Other processes may have taken memory that was free a moment ago. This process must
            // not be killed then.
            if let Some(free) = available::at_most().filter(|_| len >= HUGE_FROM) {
                let needs = (left + MARGIN) as u64;
                if free < needs {
                    let message = format!(
                        "{what} needs {needs} more bytes, but only {free} are free, because other \
                         processes took memory meanwhile: {LESS}"
                    );
                    return Err(Error::new(ErrorKind::Budget, Stage::Build, message)
                        .with_amounts(needs, free));
                }
                step = step.min(Self::size_for(free as usize / AT_ONCE));
            }
            match map.advise_range(Advice::PopulateWrite, start, step) {
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::NOMEM.raw_os_error()) =>
                {
                    return Err(refused(len, what, error));
                }
                _ => {}
            }
            start += step;
        }
        Ok(())
    }

    /// Registers the region with a device for the region's whole life. A second call does nothing.
    pub fn pin(&self, pin: impl FnOnce() -> Result<Box<dyn Pinned>>) -> Result<()> {
        if self.pin.get().is_none() {
            self.withhold(true);
            let _ = self.pin.set(pin().inspect_err(|_| self.withhold(false))?);
        }
        Ok(())
    }

    /// Starts or ends withholding the region from forked children.
    ///
    /// A fork copies all pinned pages at once, because a page known to a device or the kernel
    /// cannot be copied on write. A child that accesses a withheld region faults, unless the user
    /// [held](Self::hold) it at the fork.
    fn withhold(&self, start: bool) {
        static WATCHED: AtomicBool = AtomicBool::new(false);
        if !cfg!(miri) && !WATCHED.swap(true, Ordering::Relaxed) {
            // SAFETY: three functions that live as long as the program. Without memory for them,
            // children lack the regions.
            unsafe { pthread_atfork(before_fork, in_parent, in_child) };
        }
        let mut all = WITHHELD.hold();
        let address = self.start.as_ptr().expose_provenance();
        let kept = all.entry(address).or_insert_with(|| WithheldRegion {
            len: self.len,
            users: 0,
            held: self.held.clone(),
        });
        let advice = match (kept.users, start) {
            (0, true) => Some(Advice::DontFork),
            (1, false) => Some(Advice::DoFork),
            _ => None,
        };
        kept.users = if start {
            kept.users + 1
        } else {
            kept.users.saturating_sub(1)
        };
        if kept.users == 0 {
            all.remove(&address);
        }
        if let (Some(advice), Some(map), false) = (advice, &self.map, cfg!(miri)) {
            // A failure only makes forks slower.
            let _ = map.advise(advice);
        }
    }

    /// Sets whether the user holds the region. If so, a forked child gets a copy.
    pub(crate) fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Relaxed);
    }

    /// Bytes that a region of `len` takes: whole pages, or whole huge pages when large.
    ///
    /// Kernels align a mapping to huge pages only if its length is a multiple of the huge page
    /// size. io_uring joins the pages of a registered buffer only if all have one size.
    pub fn size_for(len: usize) -> usize {
        let unit = if len >= HUGE_FROM {
            HUGE
        } else {
            feedline_base::PAGE
        };
        len.max(1)
            .checked_next_multiple_of(unit)
            .unwrap_or(usize::MAX & !(HUGE - 1))
    }

    /// Address of the first byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// Number of bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Identifier, unique in the process, for registrations (io_uring, a device).
    pub fn id(&self) -> u64 {
        self.id
    }
}

/// The error for memory that the kernel refuses.
fn refused(len: usize, what: &str, source: io::Error) -> Error {
    let message = format!("the kernel refused {len} bytes for {what}: {LESS}");
    Error::new(ErrorKind::Budget, Stage::Build, message).with_source(source)
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(pin) = self.pin.get() {
            if !pin.release() {
                std::mem::forget(self.map.take());
            }
            WITHHELD.hold().remove(&self.start.addr().get());
        }
    }
}

/// Keeps a region alive and withholds it from forked children, while the kernel pins its pages.
pub struct Withheld(Arc<Region>);

impl Withheld {
    pub fn new(region: &Arc<Region>) -> Self {
        region.withhold(true);
        Self(region.clone())
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        self.0.withhold(false);
    }
}

/// A region with one owner, accessed as a slice: it needs neither tokens nor pointers.
pub struct Bytes(MmapMut);

impl Bytes {
    /// Like [`Region::new`].
    pub fn new(len: usize, what: &str) -> Result<Self> {
        Ok(Self(Region::map(len, what)?))
    }

    /// Like [`new`](Self::new), in the memory file `memory`, which no other process has yet. A
    /// forked child does not get it.
    pub(super) fn of_file(memory: &File, len: usize, what: &str) -> Result<Self> {
        let len = Region::size_for(len);
        memory
            .set_len(len as u64)
            .map_err(|source| refused(len, what, source))?;
        // SAFETY: the file has these bytes, and this process alone has the file, which it does not
        // resize.
        let map = unsafe { MmapOptions::new().len(len).map_mut(memory) }
            .map_err(|source| refused(len, what, source))?;
        // A child's writable mapping would prevent the seal.
        let _ = map.advise(Advice::DontFork);
        Region::populate(&map, what)?;
        Ok(Self(map))
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// A mapped memory file that no process can write or resize.
pub(super) struct Sealed(Mmap);

impl Sealed {
    /// `memory` must be sealed against writes and changes of its length, and have `len` bytes.
    pub(super) fn of_file(memory: &File, len: usize) -> io::Result<Self> {
        let sealed = rustix::fs::fcntl_get_seals(memory)?;
        if !sealed.contains(SealFlags::WRITE | SealFlags::SHRINK) {
            return Err(io::Error::other("the memory file is not sealed"));
        }
        // SAFETY: the seals, which cannot be taken back, keep the bytes as they are.
        let map = unsafe { MmapOptions::new().len(len).map(memory) }?;
        // Without it, on kernels before 5.14, pages are mapped on first use.
        let _ = map.advise(Advice::PopulateRead);
        Ok(Self(map))
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

/// Whether forked children inherit the region.
#[cfg(any(test, feature = "unstable"))]
pub fn is_forked(region: &Region) -> bool {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = region.ptr().as_ptr() as usize;
    let holds = |line: &str| {
        let (from, rest) = line.split_once('-')?;
        let to = rest.split(' ').next()?;
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        Some((number(from)?..number(to)?).contains(&start))
    };
    let lines = smaps.lines().skip_while(|line| holds(line) != Some(true));
    let flags = lines
        .skip(1)
        .find_map(|line| line.strip_prefix("VmFlags:"))
        .expect("the mapping is listed");
    !flags.split(' ').any(|flag| flag == "dc")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no /proc/self/smaps")]
    fn a_pinned_region_is_withheld_from_forked_children() {
        struct Device;
        impl Pinned for Device {
            fn release(&self) -> bool {
                true
            }
        }
        for len in [4096, 5 << 20] {
            let region = Arc::new(Region::new(len, "a test").unwrap());
            assert!(is_forked(&region));
            let first = Withheld::new(&region);
            let second = Withheld::new(&region);
            assert!(!is_forked(&region));
            drop(first);
            assert!(!is_forked(&region), "the second registration withholds it");
            drop(second);
            assert!(is_forked(&region));
            {
                region
                    .pin(|| Err(Error::new(ErrorKind::Device, Stage::Device, "refused")))
                    .unwrap_err();
                assert!(
                    is_forked(&region),
                    "a failed registration withholds nothing"
                );
                region.pin(|| Ok(Box::new(Device))).unwrap();
                assert!(!is_forked(&region));
            }
        }
    }

    #[test]
    fn a_region_is_page_aligned_rounded_up_and_zeroed() {
        // Miri reads some thousand bytes per second.
        let large = if cfg!(miri) { 3 * 4096 + 1 } else { 5 << 20 };
        for len in [0, 1, 4095, 4096, 4097, large] {
            let region = Region::new(len, "a test").unwrap();
            assert_eq!(region.ptr().as_ptr() as usize % 4096, 0);
            assert!(region.len() >= len.max(1) && region.len().is_multiple_of(4096));
            // SAFETY: the region is alive, and no other pointer into it exists.
            let bytes = unsafe { std::slice::from_raw_parts(region.ptr().as_ptr(), region.len()) };
            assert!(bytes.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri aborts on a failed allocation")]
    fn refused_kernel_memory_is_a_typed_error() {
        let error = Region::new(1 << 60, "a test").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Budget);
    }
}
