//! Finds the actual route of the bytes from counters, because the success of a read does not show
//! its route. No I/O.
//!
//! ```text
//! cuFile ≥ 1.15   level-3 statistics, per GPU:   | counters | number of GPUs, at 1024 or 1136 | 248 bytes per GPU … |
//! before          /proc/driver/nvidia-fs/stats:  reads of the whole machine, if its I/O statistics are enabled
//! ```
//!
//! Two [`Stats`], taken before and after some reads, give a [`Mode`].
//!
//! The library writes one entry per GPU found, into a structure whose head grew with 1.19 and may
//! grow again. So the buffer is much larger than necessary, and filled with a pattern. For an
//! uninspected version, the layout is accepted only if exactly its bytes were written.

/// The last version whose layout was inspected. All versions from [`FIRST`] to this one were.
const LAST_SEEN: (u32, u32) = (1, 20);
/// The first version with statistics per GPU.
pub(super) const FIRST: (u32, u32) = (1, 15);
/// Bytes of one GPU's entry in the structure.
const GPU: usize = 248;
/// Maximum GPUs in the structure.
pub(super) const GPUS_MAX: usize = 16;
/// Buffer size in words: more than ten times the need.
pub(super) const ROOM: usize = 8192;
/// Fill pattern of the buffer; no counter has this value.
pub(super) const PATTERN: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Which reads the counters include.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// This process's reads to one GPU, identified by cuFile's UUID (compare it with the device's).
    Gpu { uuid: [u8; 16] },
    /// nvidia-fs reads of all processes of the machine; other routes are not counted.
    Machine,
}

/// Counters of reads since the driver was opened (for a GPU) or loaded (for the machine).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stats {
    /// Scope of the counters.
    pub(crate) scope: Scope,
    /// All reads; for [`Scope::Machine`] only the reads that this process requested.
    pub(crate) reads: u64,
    /// Reads by the kernel's PCIe peer-to-peer DMA.
    pub(crate) p2p: u64,
    /// Reads by the kernel module nvidia-fs.
    pub(crate) nvidia_fs: u64,
    /// Reads through host memory.
    pub(crate) posix: u64,
}

/// Route of the reads between two [`Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// All or most by PCIe peer-to-peer DMA, the others by nvidia-fs.
    P2p,
    /// All by nvidia-fs, or at least half of them, the others by P2P.
    NvidiaFs,
    /// All through host memory.
    Compat,
    /// Some direct, some through host memory.
    Mixed {
        /// Reads by P2P or nvidia-fs.
        direct: u64,
        /// Reads through host memory, or not counted.
        host: u64,
    },
    /// The counters do not show the route.
    Unknown,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::P2p => f.write_str("p2p"),
            Self::NvidiaFs => f.write_str("nvidia-fs"),
            Self::Compat => f.write_str("compat: through host memory"),
            Self::Mixed { direct, host } => {
                write!(f, "{direct} reads direct, {host} through host memory")
            }
            Self::Unknown => f.write_str("cuFile does not report the route"),
        }
    }
}

impl Mode {
    /// Route of the reads between `before` and `after`.
    ///
    /// [`Mode::Unknown`] if there were none, if the counters belong to different GPUs, or if they
    /// were reset in between. Machine counters include reads of other processes, so `NvidiaFs` only
    /// means that nvidia-fs made at least as many reads as this process requested.
    pub(crate) fn between(before: &Stats, after: &Stats) -> Self {
        if before.scope != after.scope {
            return Self::Unknown;
        }
        let counters = |stats: &Stats| [stats.reads, stats.p2p, stats.nvidia_fs, stats.posix];
        let mut grown = [0_u64; 4];
        for (place, (before, after)) in grown
            .iter_mut()
            .zip(counters(before).into_iter().zip(counters(after)))
        {
            let Some(difference) = after.checked_sub(before) else {
                return Self::Unknown;
            };
            *place = difference;
        }
        let [reads, p2p, nvidia_fs, posix] = grown;
        let direct = p2p.saturating_add(nvidia_fs);
        let host = match after.scope {
            Scope::Gpu { .. } => posix,
            Scope::Machine => reads.saturating_sub(direct),
        };
        match (direct, host) {
            (0, 0) => Self::Unknown,
            // Machine counters do not include P2P.
            (0, _) if after.scope == Scope::Machine => Self::Unknown,
            (0, _) => Self::Compat,
            (_, 0) if after.scope == Scope::Machine && reads == 0 => Self::Unknown,
            (_, 0) if p2p > nvidia_fs => Self::P2p,
            (_, 0) => Self::NvidiaFs,
            (direct, host) => Self::Mixed { direct, host },
        }
    }
}

/// Offset of the array of GPUs.
fn gpus_at(version: (u32, u32)) -> Option<usize> {
    (version >= FIRST).then_some(if version >= (1, 19) { 1144 } else { 1032 })
}

/// Counters of GPU `gpu`, from the bytes that `cuFileGetStatsL3` of that version wrote over the
/// [`PATTERN`].
///
/// `None`: no such GPU, or an unknown layout.
pub(super) fn of_gpu(room: &[u8], version: (u32, u32), gpu: usize) -> Option<Stats> {
    let start = gpus_at(version)?;
    let word = |at: usize| Some(u64::from_ne_bytes(*room.get(at..)?.first_chunk()?));
    let count = u32::from_ne_bytes(*room.get(start - 8..)?.first_chunk()?);
    let count = usize::try_from(count)
        .ok()
        .filter(|count| (1..=GPUS_MAX).contains(count))?;
    let pattern = PATTERN.to_ne_bytes()[0];
    let written = room.iter().rposition(|byte| *byte != pattern)? + 1;
    let least = start + count * GPU;
    let most = start + GPUS_MAX * GPU;
    let known = if version <= LAST_SEEN {
        (least..=most).contains(&written)
    } else {
        written == least || written == most
    };
    if gpu >= count || !known {
        return None;
    }
    let at = start + gpu * GPU;
    let uuid = *room.get(at..)?.first_chunk()?;
    Some(Stats {
        scope: Scope::Gpu { uuid },
        reads: word(at + 48)?,
        p2p: word(at + 56)?,
        nvidia_fs: word(at + 64)?,
        posix: word(at + 72)?,
    })
}

/// Counters from nvidia-fs's text. `None`: its I/O statistics are off, or the text has another
/// form.
///
/// ```text
/// IO stats: Enabled, peer IO stats: Disabled
/// Reads                : n=120 ok=118 err=2 readMiB=59 io_state_err=0
/// Reads                : Bandwidth(MiB/s)=12 Avg-Latency(usec)=400
/// ```
pub(super) fn of_machine(text: &str, own_reads: u64) -> Option<Stats> {
    text.lines().find_map(|line| {
        let (name, values) = line.split_once(':')?;
        let value = |key: &str| {
            let mut words = values
                .split_whitespace()
                .filter_map(|word| word.split_once('='));
            words.find(|(name, _)| *name == key)?.1.parse::<u64>().ok()
        };
        (name.trim() == "Reads").then_some(())?;
        Some(Stats {
            scope: Scope::Machine,
            reads: own_reads,
            p2p: 0,
            nvidia_fs: value("ok")?,
            posix: 0,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UUID: [u8; 16] = [7; 16];

    fn gpu(reads: u64, p2p: u64, nvidia_fs: u64, posix: u64) -> Stats {
        Stats {
            scope: Scope::Gpu { uuid: UUID },
            reads,
            p2p,
            nvidia_fs,
            posix,
        }
    }

    fn machine(reads: u64, nvidia_fs: u64) -> Stats {
        Stats {
            scope: Scope::Machine,
            ..gpu(reads, 0, nvidia_fs, 0)
        }
    }

    #[test]
    fn counter_differences_give_the_route() {
        let other = Stats {
            scope: Scope::Gpu { uuid: [8; 16] },
            ..gpu(9, 9, 0, 0)
        };
        let table = [
            (gpu(0, 0, 0, 0), gpu(8, 8, 0, 0), Mode::P2p),
            (gpu(8, 8, 0, 0), gpu(16, 8, 8, 0), Mode::NvidiaFs),
            (gpu(8, 8, 0, 0), gpu(16, 8, 0, 8), Mode::Compat),
            (
                gpu(8, 8, 0, 0),
                gpu(16, 14, 0, 2),
                Mode::Mixed { direct: 6, host: 2 },
            ),
            (gpu(8, 8, 0, 0), gpu(8, 8, 0, 0), Mode::Unknown),
            // Reset by other code of the process.
            (gpu(8, 8, 0, 0), gpu(2, 0, 2, 0), Mode::Unknown),
            (gpu(0, 0, 0, 0), other, Mode::Unknown),
            (gpu(0, 0, 0, 0), machine(1, 1), Mode::Unknown),
            (machine(0, 5), machine(4, 9), Mode::NvidiaFs),
            // The library may split a read into several.
            (machine(0, 5), machine(4, 99), Mode::NvidiaFs),
            (
                machine(0, 5),
                machine(4, 6),
                Mode::Mixed { direct: 1, host: 3 },
            ),
            // P2P or host memory: not known.
            (machine(0, 5), machine(4, 5), Mode::Unknown),
            // Only other processes read.
            (machine(0, 5), machine(0, 9), Mode::Unknown),
        ];
        for (before, after, expected) in table {
            assert_eq!(
                Mode::between(&before, &after),
                expected,
                "{before:?} → {after:?}"
            );
        }
    }

    const TEXT: &str = "GDS Version: 1.15.0.42 \nNVFS statistics(ver: 4.0)\nNVFS Driver(version: \
         2.26.6)\nMellanox PeerDirect Supported: False\nIO stats: Enabled, peer IO \
         stats: Disabled\nLogging level: warn\n\nActive Shadow-Buffer (MiB): \
         0\nActive Process: 0\nBatches\t\t\t\t: n=3 ok=3 err=0 \
         Avg-Submit-Latency(usec)=0\nReads\t\t\t\t: n=120 ok=118 err=2 readMiB=59 \
         io_state_err=0\nReads\t\t\t\t: Bandwidth(MiB/s)=12 \
         Avg-Latency(usec)=400\nSparse Reads\t\t        : n=1 io=0 holes=0 pages=0 \
         \nWrites\t\t\t\t: n=7 ok=7 err=0 writeMiB=1 io_state_err=0 pg-cache=0 \
         pg-cache-fail=0 pg-cache-eio=0\nOps\t\t\t\t: Read=0 Write=0 BatchIO=0\n";

    #[test]
    fn nvidia_fs_text_without_counters_gives_none() {
        let stats = of_machine(TEXT, 17).unwrap();
        assert_eq!((stats.reads, stats.nvidia_fs), (17, 118));
        assert_eq!(stats.scope, Scope::Machine);
        // The text while `rw_stats_enabled` is 0.
        assert_eq!(
            of_machine(
                "IO stats: Disabled, peer IO stats: Disabled\nReads\t: err=2 io_state_err=0\n",
                17
            ),
            None
        );
        assert_eq!(of_machine("", 17), None);
        assert_eq!(
            of_machine("Reads: n=1 ok=99999999999999999999 readMiB=1", 17),
            None
        );
    }

    /// The structure as a library with `count` GPUs writes it, with the GPU array at `start`.
    /// Counter `k` of GPU `g` is `1000 g + k`.
    fn written(start: usize, count: u32, whole: bool) -> Vec<u8> {
        let mut room: Vec<u8> = std::iter::repeat_n(PATTERN.to_ne_bytes(), ROOM)
            .flatten()
            .collect();
        room[..start - 8].fill(0);
        room[start - 8..start - 4].copy_from_slice(&count.to_ne_bytes());
        for at in 0..if whole { GPUS_MAX } else { count as usize } {
            let base = start + at * GPU;
            room[base..base + GPU].fill(0);
            room[base..base + 16].fill(at as u8);
            for (number, place) in (16..GPU - 8).step_by(8).enumerate() {
                let value = at as u64 * 1000 + number as u64;
                room[base + place..base + place + 8].copy_from_slice(&value.to_ne_bytes());
            }
        }
        room
    }

    #[test]
    fn known_layouts_are_read_and_grown_ones_refused() {
        let table = [
            ((1, 15), 1032, true),
            ((1, 18), 1032, true),
            ((1, 19), 1144, true),
            ((1, 20), 1144, true),
            ((1, 21), 1144, true),
            ((2, 0), 1144, true),
            // Grown again, or shrunk.
            ((1, 21), 1256, false),
            ((1, 21), 1152, false),
            ((2, 0), 1032, false),
            ((1, 14), 1032, false),
        ];
        for ((version, start, known), whole) in
            table.iter().flat_map(|row| [(*row, false), (*row, true)])
        {
            let room = written(start, 3, whole);
            let stats = of_gpu(&room, version, 2);
            assert_eq!(
                stats.is_some(),
                known,
                "{version:?} at {start}, whole: {whole}"
            );
            let Some(stats) = stats else { continue };
            assert_eq!(stats.scope, Scope::Gpu { uuid: [2; 16] });
            let counters = [stats.reads, stats.p2p, stats.nvidia_fs, stats.posix];
            assert_eq!(counters, [2004, 2005, 2006, 2007]);
            assert_eq!(of_gpu(&room, version, 3), None, "there are three GPUs");
        }
        assert_eq!(of_gpu(&written(1144, 0, false), (1, 20), 0), None, "no GPU");
        assert_eq!(
            of_gpu(&written(1144, 17, true), (1, 20), 0),
            None,
            "more than there is room for"
        );
    }

    proptest! {
        #[test]
        fn arbitrary_input_never_panics(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            count in 0_u32..20,
            gpu: usize,
            version in (0_u32..3, 0_u32..40),
            text: String,
            own: u64,
        ) {
            let _ = (of_gpu(&bytes, version, gpu), of_machine(&text, own));
            let mut room = written(1144, count, false);
            let len = bytes.len();
            room[..len].copy_from_slice(&bytes);
            let _ = of_gpu(&room, version, gpu % 20);
        }

        #[test]
        fn only_counted_direct_reads_are_called_direct(before: [u32; 4], after: [u32; 4], whole: bool) {
            let make = |c: [u32; 4]| {
                let [reads, p2p, nvidia_fs, posix] = c.map(u64::from);
                if whole { machine(reads, nvidia_fs) } else { gpu(reads, p2p, nvidia_fs, posix) }
            };
            let mode = Mode::between(&make(before), &make(after));
            if matches!(mode, Mode::P2p | Mode::NvidiaFs | Mode::Mixed { .. }) {
                prop_assert!(after[2] > before[2] || (!whole && after[1] > before[1]));
            }
            if mode == Mode::Compat {
                prop_assert!(after[3] > before[3] && after[1] == before[1] && after[2] == before[2]);
            }
        }
    }
}
