//! Page-aligned host bytes from the kernel: the only kind of memory that batches and encoded bytes live in.

#![allow(unsafe_code)]

use crate::error::{Error, ErrorKind, Result, Stage};
use memmap2::{Advice, MmapMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Regions of at least this size ask for huge pages: fewer TLB misses, and far fewer pages to pin for a device or ring.
const HUGE_FROM: usize = 4 << 20;
/// The usual size of a huge page (x86-64, and arm64 with 4 KiB pages).
const HUGE: usize = 2 << 20;

/// Anonymous private memory, zeroed, page-aligned, populated on creation, returned to the kernel on drop.
///
/// It hands out raw pointers only; `pool` and `ring` decide who may write where.
pub(crate) struct Region {
    // Every access goes through `start`; taken out only by `drop`.
    map: Option<MmapMut>,
    start: NonNull<u8>,
    len: usize,
    id: u64,
    pin: OnceLock<Box<dyn Pinned>>,
    /// How many keep it from forked children.
    withheld: Mutex<usize>,
}

/// A device's hold on a region, so that it can copy from there without the CPU.
pub(crate) trait Pinned: Send + Sync {
    /// Lets go. False when that cannot be established: the memory then stays mapped for ever.
    fn release(&self) -> bool;
}

// SAFETY: a region is plain memory; which thread may touch which part of it is decided by the tokens of `pool` and
// `ring`, which are the only callers of `ptr`.
unsafe impl Send for Region {}
// SAFETY: as above; `Region` itself has no method that reads or writes the bytes.
unsafe impl Sync for Region {}

impl Region {
    /// Reserves and populates `len` bytes, rounded up to a page.
    ///
    /// Errors: [`ErrorKind::Budget`] when the kernel refuses.
    pub(crate) fn new(len: usize, what: &str) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut map = Self::map(len, what)?;
        let (start, len) = (map.as_mut_ptr(), map.len());
        let start = NonNull::new(start).expect("a mapping is never at address 0");
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { map: Some(map), start, len, id, pin: OnceLock::new(), withheld: Mutex::new(0) })
    }

    fn map(len: usize, what: &str) -> Result<MmapMut> {
        let len = Self::size_for(len);
        let refused = |source| {
            Error::new(
                ErrorKind::Budget,
                Stage::Build,
                format!("the kernel has no {len} bytes for {what}; a smaller batch or fewer slots need less"),
            )
            .with_source(source)
        };
        let map = MmapMut::map_anon(len).map_err(refused)?;
        if cfg!(miri) {
            // Miri maps anonymous memory and knows no advice about it.
            return Ok(map);
        }
        if len >= HUGE_FROM {
            // Advice only: kernels without transparent huge pages answer EINVAL and work all the same.
            let _ = map.advise(Advice::HugePage);
        }
        // Populate now, so that a lack of memory shows in `build()` and the first epoch pays no page faults. Kernels
        // before 5.14 do not know the advice; there the pages come with the first write.
        match map.advise(Advice::PopulateWrite) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOMEM.raw_os_error()) => {
                return Err(refused(error));
            }
            _ => {}
        }
        Ok(map)
    }

    #[cfg(feature = "cuda")]
    /// Gives the region to a device for as long as it lives.
    pub(crate) fn pin(&self, pin: impl FnOnce() -> Result<Box<dyn Pinned>>) -> Result<()> {
        if self.pin.get().is_none() {
            self.withhold(true);
            let _ = self.pin.set(pin().inspect_err(|_| self.withhold(false))?);
        }
        Ok(())
    }

    /// Keeps the region from forked children, or no longer: a fork copies pinned pages at once, all of them, since a page that
    /// a device or the kernel knows cannot be shared for copying on write. A child that touches the region then faults.
    fn withhold(&self, from_now: bool) {
        let mut users = self.withheld.lock().unwrap_or_else(PoisonError::into_inner);
        let advice = match (*users, from_now) {
            (0, true) => Some(Advice::DontFork),
            (1, false) => Some(Advice::DoFork),
            _ => None,
        };
        *users = if from_now { *users + 1 } else { users.saturating_sub(1) };
        if let (Some(advice), Some(map), false) = (advice, &self.map, cfg!(miri)) {
            // Without it everything works, but for the cost of a fork.
            let _ = map.advise(advice);
        }
    }

    /// Bytes that a region of `len` takes. Kernels align a mapping to huge pages only when it is a whole number of them,
    /// and io_uring joins the pages of a registered buffer only when they are all of one size.
    pub(crate) fn size_for(len: usize) -> usize {
        let unit = if len >= HUGE_FROM { HUGE } else { crate::tensor::PAGE };
        len.max(1).checked_next_multiple_of(unit).unwrap_or(usize::MAX & !(HUGE - 1))
    }

    /// First byte.
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes, a multiple of the page size.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Unique in the process: names the region to whoever registered it (io_uring, a device).
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.pin.get().is_some_and(|pin| !pin.release()) {
            std::mem::forget(self.map.take());
        }
    }
}

/// Keeps a region alive, and from forked children, while the kernel has its pages pinned.
pub(crate) struct Withheld(Arc<Region>);

impl Withheld {
    pub(crate) fn new(region: &Arc<Region>) -> Self {
        region.withhold(true);
        Self(region.clone())
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        self.0.withhold(false);
    }
}

/// A region with one owner, as a slice: no tokens, so no pointers.
pub(crate) struct Bytes(MmapMut);

impl Bytes {
    /// As [`Region::new`].
    pub(crate) fn new(len: usize, what: &str) -> Result<Self> {
        Ok(Self(Region::map(len, what)?))
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Whether forked children have the region.
#[cfg(test)]
pub(crate) fn is_forked(region: &Region) -> bool {
    let (smaps, start) = (std::fs::read_to_string("/proc/self/smaps").unwrap(), region.ptr().as_ptr() as usize);
    let holds = |line: &str| {
        let (from, rest) = line.split_once('-')?;
        let to = rest.split(' ').next()?;
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        Some((number(from)?..number(to)?).contains(&start))
    };
    let lines = smaps.lines().skip_while(|line| holds(line) != Some(true));
    let flags = lines.skip(1).find_map(|line| line.strip_prefix("VmFlags:")).expect("the mapping is listed");
    !flags.split(' ').any(|flag| flag == "dc")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "there is no /proc/self/smaps")]
    fn a_pinned_region_is_kept_from_forked_children() {
        struct Device;
        impl Pinned for Device {
            fn release(&self) -> bool {
                true
            }
        }
        for len in [4096, 5 << 20] {
            let region = Arc::new(Region::new(len, "a test").unwrap());
            assert!(is_forked(&region));
            let (first, second) = (Withheld::new(&region), Withheld::new(&region));
            assert!(!is_forked(&region));
            drop(first);
            assert!(!is_forked(&region), "the second registration is there");
            drop(second);
            assert!(is_forked(&region));
            #[cfg(feature = "cuda")]
            {
                let refused = || Err(Error::new(ErrorKind::Device, Stage::Device, "refused"));
                region.pin(refused).unwrap_err();
                assert!(is_forked(&region), "it is not pinned");
                region.pin(|| Ok(Box::new(Device))).unwrap();
                assert!(!is_forked(&region));
            }
        }
    }

    #[test]
    fn a_region_is_page_aligned_rounded_up_and_zeroed() {
        // Miri looks at some thousand bytes a second.
        let large = if cfg!(miri) { 3 * 4096 + 1 } else { 5 << 20 };
        for len in [0, 1, 4095, 4096, 4097, large] {
            let region = Region::new(len, "a test").unwrap();
            assert_eq!(region.ptr().as_ptr() as usize % 4096, 0);
            assert!(region.len() >= len.max(1) && region.len().is_multiple_of(4096));
            // SAFETY: the region is alive and nobody else holds a pointer into it.
            let bytes = unsafe { std::slice::from_raw_parts(region.ptr().as_ptr(), region.len()) };
            assert!(bytes.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri ends where an allocation fails")]
    fn memory_that_the_kernel_refuses_is_a_typed_error() {
        let error = Region::new(1 << 60, "a test").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Budget);
    }
}
