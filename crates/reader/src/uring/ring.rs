//! The ring and all memory that the kernel may touch through it: the only unsafe code of the
//! io_uring reader.
//!
//! One rule makes the interface safe. A buffer goes into a slot by [`Ring::hold`] and comes back by
//! [`Ring::release`], which refuses while an entry of the slot is in flight. An entry is in flight
//! from its push until its completion is reaped; a failed submit may leave it queued, and the next
//! submit sends it. If the ring is dropped before that, all memory that the kernel could still
//! write to is leaked: closing a ring does not wait.

#![allow(unsafe_code)]

use super::inflight::{CANCEL, Key, WAKE};
use crate::fault_hook::Injection;
use crate::files::File;
use crate::progress::{Next, READ_MAX};
use crate::syscalls::IoVec;
use feedline_core::memory::{IoBuf, Region, Withheld};
use feedline_core::storage::resolve_beneath::RESOLVE;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

/// Up to this many bytes, a read costs more in system calls, wake-ups and doorbells than in bytes.
const SMALL: usize = 16 << 10;

/// `POLLIN`, which is the same on all architectures.
const POLL_IN: u32 = 1;

/// Maximum number of registered buffers in a ring (the kernel's `IORING_MAX_REG_BUFFERS`).
const BUFFERS_MAX: usize = 16_384;

/// Number of files that every kernel with sparse tables can register.
const FILES_MAX: usize = 32_768;

type Configure = fn(&mut io_uring::Builder);

/// Setups to try, the best first. EINVAL means that the kernel is older.
const FLAVOURS: [(&str, Configure); 4] = [
    ("deferred task work", |builder| {
        builder
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_r_disabled();
    }),
    ("cooperative task work", |builder| {
        builder
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_r_disabled();
    }),
    ("plain", |builder| {
        builder.setup_r_disabled();
    }),
    ("plain, enabled at once", |_| {}),
];

/// An io_uring and the memory that it may write to.
pub(super) struct Ring {
    ring: ManuallyDrop<IoUring>,
    slots: ManuallyDrop<Vec<Slot>>,
    /// Registered memory, kept alive while it is registered.
    regions: ManuallyDrop<Vec<Withheld>>,
    /// Parts of `regions` in the order of registration.
    pieces: Vec<RingPiece>,
    /// Which registered-file cells are filled; empty if files are not registered.
    fixed: Vec<bool>,
    busy: usize,
    /// Number of `busy` entries that open a file or read at most [`SMALL`] bytes.
    small: usize,
    /// How the kernel runs completions.
    pub(super) flavour: &'static str,
    /// Delayed completions: time, key, result. Their entries count as in flight until then.
    #[cfg(feature = "unstable")]
    late: Vec<(std::time::Instant, Key, i32)>,
}

#[derive(Default)]
struct Slot {
    buf: Option<IoBuf>,
    /// The file, if it is open for this operation only.
    file: Option<File>,
    /// The path with its NUL, while it is being opened.
    path: Vec<u8>,
    /// The folder to open beneath, and the way to do it, for names that come from a file.
    root: Option<OwnedFd>,
    how: types::OpenHow,
    /// Whether an entry is in flight.
    busy: bool,
    /// Whether the entry is counted in [`Ring::small`].
    small: bool,
    /// Whether the entry was a read by the kernel's workers.
    handed_off: bool,
    /// The entry's injected fault, and the range of the buffer that it reads.
    #[cfg(feature = "unstable")]
    turn: (Injection, std::ops::Range<usize>),
}

/// Registered buffer number `i` is `len` bytes from `start` of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingPiece {
    region: u64,
    start: usize,
    len: usize,
}

/// The file of a read entry.
#[derive(Clone, Copy)]
pub(super) enum ReadTarget<'a> {
    /// A file of the table, with its cell.
    Kept(&'a File, usize),
    /// The slot's own file.
    Own,
}

impl Ring {
    /// A ring for `slots` operations, not enabled yet. It belongs to the thread that calls
    /// [`Ring::enable`].
    pub(super) fn new(slots: usize) -> Result<Self, Errno> {
        // One entry per slot, one for the wakes, and room so that cancels need not wait.
        let entries = (slots as u32 + 2).next_power_of_two();
        let (ring, flavour) = build(entries)?;
        let params = ring.params();
        let mut probe = Probe::new();
        ring.submitter()
            .register_probe(&mut probe)
            .map_err(errno_of)?;
        let reads = [
            opcode::Read::CODE,
            opcode::ReadFixed::CODE,
            opcode::PollAdd::CODE,
        ];
        let mut codes = reads
            .into_iter()
            .chain([opcode::OpenAt::CODE, opcode::OpenAt2::CODE]);
        let codes_known = codes.all(|code| probe.is_supported(code));
        if !params.is_feature_ext_arg() || !params.is_feature_nodrop() || !codes_known {
            return Err(Errno::NOSYS);
        }
        Ok(Self {
            ring: ManuallyDrop::new(ring),
            slots: ManuallyDrop::new((0..slots).map(|_| Slot::default()).collect()),
            regions: ManuallyDrop::new(Vec::new()),
            pieces: Vec::new(),
            fixed: Vec::new(),
            busy: 0,
            small: 0,
            flavour,
            #[cfg(feature = "unstable")]
            late: Vec::new(),
        })
    }

    /// Sends one entry through a separate ring and waits for it. A ring can be set up even where a
    /// seccomp filter blocks `io_uring_enter`.
    pub(super) fn try_out() -> Result<(), Errno> {
        let mut ring = IoUring::new(2).map_err(errno_of)?;
        let nop = opcode::Nop::new().build();
        // SAFETY: a NOP refers to no memory.
        unsafe { ring.submission().push(&nop) }.map_err(|_| Errno::NOSYS)?;
        // A signal to this thread is no evidence about io_uring.
        while let Err(errno) = ring.submit_and_wait(1).map_err(errno_of) {
            if errno != Errno::INTR {
                return Err(errno);
            }
        }
        ring.completion().next().map(|_| ()).ok_or(Errno::NOSYS)
    }

    /// Makes the calling thread the only one that may enter the ring.
    pub(super) fn enable(&mut self) -> Result<(), Errno> {
        match self
            .ring
            .submitter()
            .register_enable_rings()
            .map_err(errno_of)
        {
            // The ring was never disabled.
            Err(Errno::BADFD) => Ok(()),
            result => result,
        }
    }

    /// Number of slots with an entry in flight.
    pub(super) fn busy(&self) -> usize {
        self.busy
    }

    /// Number of small entries in flight.
    pub(super) fn small(&self) -> usize {
        self.small
    }

    /// Whether an `io_uring_enter` is needed: entries are queued, or completions wait for it.
    pub(super) fn needs_enter(&mut self) -> bool {
        let queue = self.ring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    /// Registers the regions instead of the earlier ones.
    pub(super) fn register_buffers(&mut self, regions: &[Arc<Region>]) -> Result<(), Errno> {
        if !self.pieces.is_empty() {
            self.pieces.clear();
            self.ring
                .submitter()
                .unregister_buffers()
                .map_err(errno_of)?;
            self.regions.clear();
        }
        let sizes: Vec<_> = regions
            .iter()
            .map(|region| (region.id(), region.len()))
            .collect();
        let pieces = cut(&sizes);
        if pieces.len() > BUFFERS_MAX {
            return Err(Errno::INVAL);
        }
        let vectors: Vec<IoVec> = pieces
            .iter()
            .filter_map(|piece| {
                Some(IoVec {
                    base: regions
                        .iter()
                        .find(|region| region.id() == piece.region)
                        .map(|region| region.ptr().as_ptr())?
                        .wrapping_add(piece.start),
                    len: piece.len,
                })
            })
            .collect();
        // Must happen before the kernel pins them.
        let withheld: Vec<_> = regions.iter().map(Withheld::new).collect();
        // SAFETY: `IoVec` has the layout of `struct iovec`, whose Rust type the parameter names.
        // The vectors lie in regions that `self.regions` keeps alive until they are unregistered or
        // the ring is closed. Registration itself accesses nothing, and reads into the regions go
        // through `read` alone.
        unsafe {
            let vectors = std::slice::from_raw_parts(vectors.as_ptr().cast(), vectors.len());
            self.ring.submitter().register_buffers(vectors)
        }
        .map_err(errno_of)?;
        self.regions.extend(withheld);
        self.pieces = pieces;
        Ok(())
    }

    /// Makes room for `count` registered files.
    pub(super) fn register_files(&mut self, count: usize) -> Result<(), Errno> {
        if count == 0 || count > FILES_MAX {
            return Err(Errno::MFILE);
        }
        self.ring
            .submitter()
            .register_files_sparse(count as u32)
            .map_err(errno_of)?;
        self.fixed = vec![false; count];
        Ok(())
    }

    pub(super) fn has_buffers(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Registers a file of the table. If that fails, the file is used by its descriptor.
    pub(super) fn set_file(&mut self, cell: usize, fd: BorrowedFd<'_>) {
        let Some(filled) = self.fixed.get_mut(cell) else {
            return;
        };
        if !*filled {
            *filled = self
                .ring
                .submitter()
                .register_files_update(cell as u32, &[fd.as_raw_fd()])
                .is_ok();
        }
    }

    /// Puts the operation's buffer into its slot.
    pub(super) fn hold(&mut self, slot: usize, buf: IoBuf) {
        let slot = &mut self.slots[slot];
        assert!(!slot.busy && slot.buf.is_none());
        slot.buf = Some(buf);
    }

    /// Keeps the file open until the slot is released.
    pub(super) fn hold_file(&mut self, slot: usize, file: File) {
        self.slots[slot].file = Some(file);
    }

    /// The slot's own file.
    pub(super) fn file(&self, slot: usize) -> Option<&File> {
        self.slots[slot].file.as_ref()
    }

    /// Whether the slot's last entry was a read by the kernel's workers.
    pub(super) fn was_handed_off(&self, slot: usize) -> bool {
        self.slots[slot].handed_off
    }

    pub(super) fn is_busy(&self, slot: usize) -> bool {
        self.slots[slot].busy
    }

    /// Returns the buffer and closes its file; `None` while the kernel may still write to the
    /// buffer.
    pub(super) fn release(&mut self, slot: usize) -> Option<IoBuf> {
        let slot = &mut self.slots[slot];
        if slot.busy {
            return None;
        }
        slot.file = None;
        slot.root = None;
        slot.buf.take()
    }

    /// Queues the read of `next` into the slot's buffer, by the kernel's workers if `hand_off`.
    /// False if the queue is full: enter, then retry.
    pub(super) fn read(
        &mut self,
        key: Key,
        target: ReadTarget<'_>,
        next: Next,
        turn: Injection,
        hand_off: bool,
    ) -> bool {
        let next = turn.next(next);
        let slot = &mut self.slots[key.index()];
        assert!(!slot.busy, "one entry at a time");
        let buf = slot.buf.as_mut().expect("held since it was started");
        let (region, start) = buf.place();
        let bytes = &mut buf.as_mut_slice()[next.at..next.at + next.len];
        let ptr = bytes.as_mut_ptr();
        let len = next.len as u32;
        let piece = find(&self.pieces, region, start + next.at, next.len);
        let cell = match target {
            ReadTarget::Kept(_, cell) => self
                .fixed
                .get(cell)
                .is_some_and(|filled| *filled)
                .then_some(types::Fixed(cell as u32)),
            ReadTarget::Own => None,
        };
        let file = match target {
            ReadTarget::Kept(file, _) => file,
            ReadTarget::Own => slot.file.as_ref().expect("held since it was opened"),
        };
        let fd = types::Fd(file.as_fd().as_raw_fd());
        let entry = match (cell, piece) {
            (Some(cell), Some(piece)) => opcode::ReadFixed::new(cell, ptr, len, piece)
                .offset(next.offset)
                .build(),
            (Some(cell), None) => opcode::Read::new(cell, ptr, len)
                .offset(next.offset)
                .build(),
            (None, Some(piece)) => opcode::ReadFixed::new(fd, ptr, len, piece)
                .offset(next.offset)
                .build(),
            (None, None) => opcode::Read::new(fd, ptr, len).offset(next.offset).build(),
        };
        let entry = if hand_off {
            entry.flags(squeue::Flags::ASYNC)
        } else {
            entry
        };
        slot.small = next.len <= SMALL;
        slot.handed_off = hand_off && turn.instead().is_none();
        self.push_injected(key, entry, turn, next.at..next.at + next.len)
    }

    /// Queues the opening of the path that `write` writes (without its NUL).
    pub(super) fn open(
        &mut self,
        key: Key,
        flags: OFlags,
        turn: Injection,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> bool {
        let slot = &mut self.slots[key.index()];
        assert!(!slot.busy, "one entry at a time");
        write(&mut slot.path);
        if slot.path.contains(&0) {
            // With a NUL inside, the kernel would open the part before it. The empty path gives
            // ENOENT.
            slot.path.clear();
        }
        slot.path.push(0);
        let entry = opcode::OpenAt::new(
            types::Fd(rustix::fs::CWD.as_raw_fd()),
            slot.path.as_ptr().cast(),
        )
        .flags(flags.bits() as i32)
        .build();
        slot.small = true;
        self.push_injected(key, entry, turn, 0..0)
    }

    /// Queues the opening of `name` beneath the folder `root`.
    pub(super) fn open_beneath(
        &mut self,
        key: Key,
        root: OwnedFd,
        name: &[u8],
        flags: OFlags,
        turn: Injection,
    ) -> bool {
        let slot = &mut self.slots[key.index()];
        assert!(!slot.busy, "one entry at a time");
        slot.path.clear();
        slot.path.extend_from_slice(name);
        slot.path.push(0);
        slot.how = types::OpenHow::new()
            .flags(flags.bits().into())
            .resolve(RESOLVE.bits());
        let root = slot.root.insert(root);
        let path = slot.path.as_ptr().cast();
        let how = &raw const slot.how;
        let entry = opcode::OpenAt2::new(types::Fd(root.as_raw_fd()), path, how).build();
        slot.small = true;
        self.push_injected(key, entry, turn, 0..0)
    }

    /// Queues one poll entry for wakes.
    pub(super) fn poll(&mut self, event: BorrowedFd<'_>) -> bool {
        let entry = opcode::PollAdd::new(types::Fd(event.as_raw_fd()), POLL_IN).build();
        self.push(entry.user_data(WAKE), None)
    }

    /// Queues the cancellation of an operation's entry.
    pub(super) fn cancel(&mut self, key: Key) -> bool {
        self.push(
            opcode::AsyncCancel::new(key.user_data())
                .build()
                .user_data(CANCEL),
            None,
        )
    }

    /// Queues an operation's entry, or a NOP if a fault replaces it.
    fn push_injected(
        &mut self,
        key: Key,
        entry: squeue::Entry,
        turn: Injection,
        _bytes: std::ops::Range<usize>,
    ) -> bool {
        let entry = if turn.instead().is_some() {
            opcode::Nop::new().build()
        } else {
            entry
        };
        #[cfg(feature = "unstable")]
        {
            self.slots[key.index()].turn = (turn, _bytes);
        }
        self.push(entry.user_data(key.user_data()), Some(key.index()))
    }

    /// Whether another entry can be queued. Without room, the injected fault of the entry would be
    /// lost.
    #[cfg(feature = "unstable")]
    pub(super) fn has_room(&mut self) -> bool {
        !self.ring.submission().is_full()
    }

    fn push(&mut self, entry: squeue::Entry, slot: Option<usize>) -> bool {
        // SAFETY: an entry refers to the buffer, path or `how` of its slot. These stay in place
        // (slots never move), and cannot be reached or freed until the completion clears `busy`:
        // `hold`, `read`, `open` and `open_beneath` refuse a busy slot, `release` keeps it, and
        // `drop` leaks it. Wakes and cancels refer to no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        if let (true, Some(slot)) = (pushed, slot) {
            let slot = &mut self.slots[slot];
            slot.busy = true;
            self.busy += 1;
            self.small += usize::from(slot.small);
        }
        pushed
    }

    /// Sends the queued entries and sleeps until `want` completions have arrived, or until the
    /// timeout (`ETIME`).
    pub(super) fn enter(&mut self, want: usize, timeout: Option<Duration>) -> Result<(), Errno> {
        #[cfg(feature = "unstable")]
        let timeout = self
            .next_late()
            .map(|late| timeout.map_or(late, |timeout| timeout.min(late)))
            .or(timeout);
        let time = timeout.map(types::Timespec::from).unwrap_or_default();
        let args = types::SubmitArgs::new();
        let args = if timeout.is_some() {
            args.timespec(&time)
        } else {
            args
        };
        self.ring
            .submitter()
            .submit_with_args(want, &args)
            .map(|_| ())
            .map_err(errno_of)
    }

    /// Takes the completions: user data and result.
    pub(super) fn reap(&mut self, out: &mut Vec<(u64, i32)>) {
        let from = out.len();
        out.extend(
            self.ring
                .completion()
                .map(|entry| (entry.user_data(), entry.result())),
        );
        #[cfg(feature = "unstable")]
        self.apply_faults(out, from);
        for (user_data, _) in &out[from..] {
            let Some(key) = Key::from_user_data(*user_data) else {
                continue;
            };
            let slot = &mut self.slots[key.index()];
            self.busy -= usize::from(slot.busy);
            self.small -= usize::from(slot.busy && slot.small);
            slot.busy = false;
        }
    }

    /// Holds delayed completions back, adds due ones, and applies the faults to the results.
    #[cfg(feature = "unstable")]
    fn apply_faults(&mut self, out: &mut Vec<(u64, i32)>, from: usize) {
        let now = std::time::Instant::now();
        let mut kept = out.split_off(from);
        kept.retain(|(user_data, result)| {
            let Some(key) = Key::from_user_data(*user_data) else {
                return true;
            };
            let until = self.slots[key.index()]
                .turn
                .0
                .until()
                .filter(|until| *until > now);
            self.late.extend(until.map(|until| (until, key, *result)));
            until.is_none()
        });
        let come = self.late.extract_if(.., |(until, ..)| *until <= now);
        kept.extend(come.map(|(_, key, result)| (key.user_data(), result)));
        for (user_data, result) in &mut kept {
            let Some(key) = Key::from_user_data(*user_data) else {
                continue;
            };
            let Slot { buf, turn, .. } = &mut self.slots[key.index()];
            let (turn, bytes) = std::mem::take(turn);
            let bytes = buf
                .as_mut()
                .and_then(|buf| buf.as_mut_slice().get_mut(bytes));
            *result = turn.told(i64::from(*result), bytes) as i32;
        }
        out.append(&mut kept);
    }

    /// Time until the next delayed completion is due.
    #[cfg(feature = "unstable")]
    fn next_late(&self) -> Option<Duration> {
        let next = self.late.iter().map(|(until, ..)| *until).min()?;
        Some(next.saturating_duration_since(std::time::Instant::now()))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.busy > 0 {
            // The kernel may write to these buffers at any time, and an entry may still be queued.
            // So leak all of it.
            return;
        }
        if self.has_buffers() {
            // The kernel ends the registrations of a closed ring some 100 ms later, and until then
            // their pages count as used: the next loader would find too little free memory. If the
            // kernel refuses it on another thread than the ring's own, that delay remains.
            let _ = self.ring.submitter().unregister_buffers();
        }
        // SAFETY: dropped once, here. The ring goes first: nothing is in flight, and the registered
        // regions must outlive it.
        unsafe {
            ManuallyDrop::drop(&mut self.ring);
            ManuallyDrop::drop(&mut self.slots);
            ManuallyDrop::drop(&mut self.regions);
        }
    }
}

/// Takes over a descriptor that an open entry returned.
pub(super) fn adopt(fd: i32) -> OwnedFd {
    assert!(fd >= 0);
    // SAFETY: the kernel made this descriptor for an `OpenAt` entry of ours, whose completion is
    // handled once.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn build(entries: u32) -> Result<(IoUring, &'static str), Errno> {
    let mut last = Errno::INVAL;
    for (flavour, configure) in FLAVOURS {
        let mut builder = IoUring::builder();
        // A forked child must not share the queues.
        builder.dontfork();
        configure(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return Ok((ring, flavour)),
            Err(error) => last = errno_of(error),
        }
        if last != Errno::INVAL {
            break;
        }
    }
    Err(last)
}

/// Cuts regions (id, bytes) into pieces that the kernel registers, ordered by id.
fn cut(regions: &[(u64, usize)]) -> Vec<RingPiece> {
    let mut regions = regions.to_vec();
    regions.sort_unstable();
    regions.dedup();
    regions
        .into_iter()
        .flat_map(|(region, bytes)| {
            (0..bytes).step_by(READ_MAX).map(move |start| RingPiece {
                region,
                start,
                len: READ_MAX.min(bytes - start),
            })
        })
        .collect()
}

/// The registered buffer that holds `len` bytes from `start` of the region; `None` if they cross a
/// piece's end.
fn find(pieces: &[RingPiece], region: u64, start: usize, len: usize) -> Option<u16> {
    let behind = pieces.partition_point(|piece| (piece.region, piece.start) <= (region, start));
    let index = behind.checked_sub(1)?;
    let piece = pieces[index];
    (piece.region == region && start + len <= piece.start + piece.len).then_some(index as u16)
}

fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_core::memory::ByteRing;

    #[test]
    fn regions_are_registered_in_pieces_and_found_again() {
        let pieces = cut(&[(7, 4096), (3, READ_MAX + 4096), (7, 4096)]);
        let piece = |region, start, len| RingPiece { region, start, len };
        assert_eq!(
            pieces,
            [
                piece(3, 0, READ_MAX),
                piece(3, READ_MAX, 4096),
                piece(7, 0, 4096)
            ]
        );
        let table = [
            ((3, 0, 4096), Some(0)),
            ((3, READ_MAX - 4096, 4096), Some(0)),
            ((3, READ_MAX - 4096, 8192), None),
            ((3, READ_MAX, 4096), Some(1)),
            ((7, 512, 512), Some(2)),
            ((7, 0, 4097), None),
            ((5, 0, 1), None),
            ((1, 0, 1), None),
        ];
        for ((region, start, len), index) in table {
            assert_eq!(
                find(&pieces, region, start, len),
                index,
                "{region} {start} {len}"
            );
        }
    }

    #[test]
    fn a_buffer_in_flight_is_not_released_but_leaked_with_the_ring() {
        let Ok(mut ring) = Ring::new(1) else {
            return eprintln!("skipped: no io_uring here");
        };
        let bytes = ByteRing::new(4096, 1, || {}).unwrap();
        ring.hold(0, bytes.reserve(10).unwrap().into());
        let key = Key::new(0, 0);
        assert!(ring.open(
            key,
            feedline_core::storage::opened::OPEN_FLAGS,
            Injection::default(),
            |path| path.extend(b"/")
        ));
        assert!(ring.release(0).is_none() && ring.busy() == 1);
        drop(ring);
        assert!(
            bytes.reserve(4096).is_none(),
            "the span was freed while the kernel may write to it"
        );
    }

    #[test]
    fn a_registered_region_is_kept_from_forked_children() {
        use feedline_core::memory::region::is_forked;
        let Ok(mut ring) = Ring::new(1) else {
            return eprintln!("skipped: no io_uring here");
        };
        let region = |bytes| Arc::new(Region::new(bytes, "a test").unwrap());
        let first = region(16 << 10);
        let second = region(16 << 10);
        ring.register_buffers(std::slice::from_ref(&first)).unwrap();
        assert!(!is_forked(&first) && is_forked(&second));
        ring.register_buffers(std::slice::from_ref(&second))
            .unwrap();
        assert!(is_forked(&first) && !is_forked(&second));
        drop(ring);
        assert!(is_forked(&second));
    }

    #[test]
    fn a_full_queue_refuses_an_entry_and_takes_it_after_an_enter() {
        let Ok(mut ring) = Ring::new(1) else {
            return eprintln!("skipped: no io_uring here");
        };
        ring.enable().unwrap();
        let mut queued = 0;
        while ring.cancel(Key::new(0, 0)) {
            queued += 1;
        }
        assert_eq!(queued, 4);
        ring.enter(1, None).unwrap();
        assert!(ring.cancel(Key::new(0, 0)));
        let mut events = Vec::new();
        ring.reap(&mut events);
        assert_eq!(events.len(), 4);
    }

    #[test]
    fn a_timeout_is_etime() {
        let Ok(mut ring) = Ring::new(1) else {
            return eprintln!("skipped: no io_uring here");
        };
        ring.enable().unwrap();
        assert_eq!(
            ring.enter(1, Some(Duration::from_millis(5))),
            Err(Errno::TIME)
        );
    }
}
