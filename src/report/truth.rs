//! Where the bytes of a measurement came from: the storage that it claims to measure, or memory. Pure.
//!
//! ```text
//! before: how much of the files the page cache holds ─┐
//! during: what the kernel counts for this process ────┼──► judge ──► from the device, from memory, amplification,
//! after:  what the readers counted themselves ────────┘             and what is wrong with the figure, in words
//! ```
//!
//! The kernel's count is preferred: it is of what really went to a block device (or a server of NFS), whoever asked for it.
//! It is of the whole process, so what other threads of the program read meanwhile is in it; and a file system that keeps a
//! cache of its own, or is not backed by a device, counts nothing. Without it the page cache's content before the
//! measurement is an estimate, which is wrong as soon as something is read twice. Neither is ever added up with the other.

use crate::meter::{Cached, DeviceBytes};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What is known about a measurement. What is not known says why.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Evidence {
    /// What the page cache held before it.
    pub before: Result<Cached, String>,
    /// What the kernel counted during it.
    pub moved: Result<DeviceBytes, String>,
    /// Bytes of files that the samples consist of: those asked of readers, and those copied from the page cache.
    pub delivered: u64,
    /// Of these, bytes that are known to come from the page cache, since they were copied from there at once.
    pub copied: u64,
    /// Of these, bytes that came by reads past the page cache (`O_DIRECT`, cuFile).
    pub direct: u64,
    /// Reading past the page cache was asked for.
    pub direct_asked: bool,
    /// Files or reads that it was refused for.
    pub refused: u64,
}

impl Default for Evidence {
    /// Nothing is known.
    fn default() -> Self {
        Self {
            before: Err("not looked at".into()),
            moved: Err("not counted".into()),
            delivered: 0,
            copied: 0,
            direct: 0,
            direct_asked: false,
            refused: 0,
        }
    }
}

/// What the shares of a [`Truth`] rest on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Basis {
    /// The kernel's count for this process.
    Counted,
    /// What the page cache held before, and how the readers read.
    Estimated,
    /// Nothing: the shares are not known.
    Unknown,
}

/// Where the bytes came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Truth {
    /// What the shares rest on.
    pub basis: Basis,
    /// Share of the bytes delivered that the storage brought: 0 to 1.
    pub from_device: Option<f64>,
    /// The rest: it came from memory.
    pub from_cache: Option<f64>,
    /// Bytes that the device moved for each byte delivered, where that is clearly more than one.
    pub amplification: Option<f64>,
    /// Share of the bytes delivered that came by reads past the page cache; `None` when nothing was delivered.
    pub direct: Option<f64>,
    /// What is to be known before the figure is believed, a sentence each; none when it measured the storage.
    pub warnings: Vec<String>,
}

/// From this share of memory on a figure is that of memory, and not of storage.
const MOSTLY: f64 = 0.5;
/// Below it the page cache does not matter.
const LITTLE: f64 = 0.05;
/// Amplification below it is alignment and metadata.
const AMPLIFIED: f64 = 1.1;
/// Places below which a share says little.
const PROBES_LEAST: u32 = 16;

/// Says where the bytes of a measurement came from, and what is to be said against it.
///
/// ```
/// use feedline::profile::{CacheProbe, Cached, DeviceBytes, Evidence, judge};
///
/// let mut evidence = Evidence::default();
/// evidence.delivered = 1_000_000;
/// evidence.moved = DeviceBytes::parse("rchar: 1000000\nread_bytes: 30000\n");
/// let truth = judge(&evidence);
/// assert_eq!(truth.from_cache, Some(0.97));
/// assert!(truth.warnings[0].starts_with("this measured the page cache: 97 %"));
/// ```
pub fn judge(evidence: &Evidence) -> Truth {
    let delivered = evidence.delivered;
    if delivered == 0 {
        let warnings = vec!["no bytes of files were delivered: nothing is said about storage".into()];
        let (from_device, from_cache, amplification, direct) = (None, None, None, None);
        return Truth { basis: Basis::Unknown, from_device, from_cache, amplification, direct, warnings };
    }
    let (basis, from_device) = from_device(evidence);
    let share = |bytes: u64| bytes as f64 / delivered as f64;
    let moved = evidence.moved.as_ref().ok();
    let mut truth = Truth {
        basis,
        from_device,
        from_cache: from_device.map(|share| 1.0 - share),
        // Where nothing of what was delivered came from the device, other reads moved those bytes.
        amplification: moved
            .map(|moved| share(moved.read_bytes))
            .filter(|times| *times > AMPLIFIED && from_device.is_some_and(|share| share >= LITTLE)),
        direct: Some(share(evidence.direct).min(1.0)),
        warnings: Vec::new(),
    };
    truth.warnings = warnings(evidence, &truth);
    truth
}

/// The share that the storage brought. What was copied from the page cache did not come from there, whatever else the
/// process has read.
fn from_device(evidence: &Evidence) -> (Basis, Option<f64>) {
    let delivered = evidence.delivered as f64;
    let rest = evidence.delivered.saturating_sub(evidence.copied);
    if let Ok(moved) = &evidence.moved {
        return (Basis::Counted, Some(moved.read_bytes.min(rest) as f64 / delivered));
    }
    let direct = evidence.direct.min(rest);
    let buffered = (rest - direct) as f64;
    match &evidence.before {
        _ if rest == direct => (Basis::Estimated, Some(direct as f64 / delivered)),
        Ok(cached) => (Basis::Estimated, Some((direct as f64 + buffered * (1.0 - cached.share)) / delivered)),
        Err(_) => (Basis::Unknown, None),
    }
}

fn warnings(evidence: &Evidence, truth: &Truth) -> Vec<String> {
    let all = [
        from_memory(evidence, truth),
        refused(evidence),
        not_direct(evidence, truth),
        amplified(truth),
        uncertain(evidence, truth),
    ];
    all.into_iter().flatten().collect()
}

fn from_memory(evidence: &Evidence, truth: &Truth) -> Option<String> {
    let share = truth.from_cache.filter(|share| *share >= LITTLE)?;
    let percent = percent(share);
    if share < MOSTLY {
        return Some(format!("{percent} of the bytes came from memory: storage alone is slower than this figure"));
    }
    let advice = match &evidence.before {
        // Another warning says what that may be.
        _ if direct_but_uncounted(evidence) => "see below",
        Ok(cached) if cached.share < LITTLE => {
            "the files were not cached before, so it was read more than once; measure one pass, or use a larger dataset"
        }
        Ok(_) => "use --cold or a larger dataset",
        Err(_) => {
            "the files were cached before, or read more than once; measure one pass over files that are not cached, or use a \
             larger dataset"
        }
    };
    Some(format!("this measured the page cache: {percent} of the bytes came from memory; {advice}"))
}

fn refused(evidence: &Evidence) -> Option<String> {
    let files = if evidence.refused == 1 { "file or read" } else { "files or reads" };
    (evidence.direct_asked && evidence.refused > 0).then(|| {
        format!(
            "O_DIRECT was asked for and refused for {} {files}: these went through the page cache",
            evidence.refused
        )
    })
}

/// More than half of what reads past the page cache brought was not counted as coming from a device.
fn direct_but_uncounted(evidence: &Evidence) -> bool {
    evidence.direct > 0 && evidence.moved.as_ref().is_ok_and(|moved| moved.read_bytes < evidence.direct / 2)
}

fn not_direct(evidence: &Evidence, truth: &Truth) -> Option<String> {
    if direct_but_uncounted(evidence) {
        let words = "reads past the page cache were not counted as coming from a device: the file system serves them from \
                     memory all the same, or the kernel does not count its reads";
        return Some(words.into());
    }
    let by_reads = evidence.delivered > evidence.copied;
    let none = evidence.direct_asked && evidence.refused == 0 && by_reads && truth.direct == Some(0.0);
    none.then(|| "O_DIRECT was asked for, but no read bypassed the page cache".into())
}

fn amplified(truth: &Truth) -> Option<String> {
    let times = truth.amplification?;
    Some(format!(
        "the device moved {times:.2} bytes for each byte delivered: read-ahead, alignment, samples read and not yet delivered, or \
         other reads of this process"
    ))
}

fn uncertain(evidence: &Evidence, truth: &Truth) -> Option<String> {
    let why = evidence.moved.as_ref().err()?;
    let counted = format!("how much came from the device was not counted ({why})");
    Some(match (truth.basis, &evidence.before) {
        (Basis::Unknown, Err(before)) => format!("{counted}, nor what the page cache held before ({before})"),
        (_, Ok(cached)) if cached.probes < PROBES_LEAST && truth.direct != Some(1.0) => {
            format!("{counted}; it is estimated from {} places in the page cache", cached.probes)
        }
        _ => format!("{counted}; it is estimated, as if every byte was read once"),
    })
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

impl Truth {
    /// Without the warnings, which are for who measures storage.
    pub(crate) fn in_short(&self) -> String {
        Self { warnings: Vec::new(), ..self.clone() }.to_string()
    }
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.from_device, self.from_cache) {
            (Some(device), Some(cache)) => {
                write!(f, "{} from the device, {} from memory", percent(device), percent(cache))?;
            }
            _ => write!(f, "not known")?,
        }
        match self.basis {
            Basis::Counted => write!(f, ", by the kernel's count for this process")?,
            Basis::Estimated => write!(f, ", estimated")?,
            Basis::Unknown => {}
        }
        if let Some(direct) = self.direct {
            write!(f, "; {} past the page cache", percent(direct))?;
        }
        if let Some(times) = self.amplification {
            write!(f, "; {times:.2} bytes moved for each delivered")?;
        }
        self.warnings.iter().try_for_each(|warning| write!(f, "\nwarning   {warning}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::CacheProbe;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn moved(read_bytes: u64) -> Result<DeviceBytes, String> {
        Ok(DeviceBytes { read_bytes, rchar: 0 })
    }

    fn cached(share: f64) -> Result<Cached, String> {
        Ok(Cached::new(share, 256, CacheProbe::Cachestat))
    }

    fn evidence(delivered: u64, device: u64) -> Evidence {
        Evidence { delivered, moved: moved(device), before: cached(0.0), ..Evidence::default() }
    }

    #[test]
    fn a_count_is_read_from_the_kernels_text_or_says_which_line_is_wrong() {
        let whole =
            "rchar: 6976\nwchar: 0\nsyscr: 10\nsyscw: 0\nread_bytes: 4096\nwrite_bytes: 1\ncancelled_write_bytes: 0\n";
        assert_eq!(DeviceBytes::parse(whole), Ok(DeviceBytes { read_bytes: 4096, rchar: 6976 }));
        let most = format!("read_bytes:{}\nrchar:\t7 ", u64::MAX);
        assert_eq!(DeviceBytes::parse(&most), Ok(DeviceBytes { read_bytes: u64::MAX, rchar: 7 }));
        let table = [
            ("", "read_bytes"),
            ("rchar: 1\n", "read_bytes"),
            ("read_bytes: 1\n", "rchar"),
            ("read_bytes: -1\nrchar: 1\n", "-1"),
            ("read_bytes: 18446744073709551616\nrchar: 1\n", "18446744073709551616"),
            ("read_bytes:\nrchar: 1\n", "no number"),
            // Another line that ends alike.
            ("cancelled_read_bytes: 1\nrchar: 1\n", "read_bytes"),
        ];
        for (text, words) in table {
            let why = DeviceBytes::parse(text).unwrap_err();
            assert!(why.contains(words), "{text:?}: {why}");
        }
    }

    #[test]
    fn a_cold_run_past_the_page_cache_has_nothing_to_be_said_against_it() {
        let mut evidence = evidence(64 * MIB, 64 * MIB);
        (evidence.direct, evidence.direct_asked) = (64 * MIB, true);
        let truth = judge(&evidence);
        assert_eq!((truth.from_device, truth.from_cache, truth.direct), (Some(1.0), Some(0.0), Some(1.0)));
        assert_eq!((truth.basis, truth.amplification, truth.warnings.len()), (Basis::Counted, None, 0));
        let words =
            "100 % from the device, 0 % from memory, by the kernel's count for this process; 100 % past the page cache";
        assert_eq!(truth.to_string(), words);
    }

    #[test]
    fn each_thing_that_makes_a_figure_doubtful_is_named() {
        let base = || evidence(1000, 1000);
        let table: [(Evidence, &[&str]); 14] = [
            (
                Evidence { moved: moved(30), before: cached(0.97), ..base() },
                &["this measured the page cache: 97 % of the bytes came from memory; use --cold or a larger dataset"],
            ),
            (
                Evidence { moved: moved(30), before: Err("not looked at".into()), ..base() },
                &[
                    "this measured the page cache: 97 % of the bytes came from memory; the files were cached before, or read \
                   more than once; measure one pass over files that are not cached, or use a larger dataset",
                ],
            ),
            (Evidence { moved: moved(30), ..base() }, &["this measured the page cache: 97 %"]),
            (Evidence { moved: moved(30), before: cached(0.0), ..base() }, &["was read more than once"]),
            (Evidence { moved: moved(770), ..base() }, &["23 % of the bytes came from memory"]),
            (
                Evidence { direct: 400, direct_asked: true, refused: 3, ..base() },
                &["O_DIRECT was asked for and refused for 3 files"],
            ),
            (Evidence { direct: 400, direct_asked: true, refused: 1, ..base() }, &["refused for 1 file or read:"]),
            (Evidence { direct_asked: true, ..base() }, &["no read bypassed the page cache"]),
            (
                Evidence { direct: 1000, direct_asked: true, moved: moved(0), ..base() },
                &["100 % of the bytes came from memory; see below", "not counted as coming from a device"],
            ),
            (Evidence { moved: moved(1800), ..base() }, &["moved 1.80 bytes for each byte delivered"]),
            (Evidence { moved: Err("denied".into()), ..base() }, &["(denied); it is estimated, as if"]),
            (
                Evidence {
                    moved: Err("denied".into()),
                    before: Ok(Cached::new(0.02, 3, CacheProbe::Nowait)),
                    ..base()
                },
                &["estimated from 3 places"],
            ),
            (
                Evidence { moved: Err("denied".into()), before: Err("ZFS".into()), ..base() },
                &["not counted (denied), nor what the page cache held before (ZFS)"],
            ),
            (Evidence { delivered: 0, ..base() }, &["no bytes of files were delivered"]),
        ];
        for (evidence, expected) in table {
            let truth = judge(&evidence);
            assert_eq!(truth.warnings.len(), expected.len(), "{evidence:?}: {:#?}", truth.warnings);
            for (warning, words) in truth.warnings.iter().zip(expected) {
                assert!(warning.contains(words), "{warning:?} should contain {words:?}");
            }
            assert_eq!(truth.to_string().lines().count(), 1 + expected.len());
        }
    }

    #[test]
    fn what_little_does_not_matter_is_not_a_warning() {
        for evidence in [
            evidence(1000, 960),
            evidence(1000, 1099),
            // Nobody asked for O_DIRECT.
            Evidence { refused: 3, ..evidence(1000, 1000) },
        ] {
            assert_eq!(judge(&evidence).warnings, [""; 0], "{evidence:?}");
        }
    }

    #[test]
    fn bytes_copied_from_the_page_cache_did_not_come_from_the_device_whatever_else_was_read() {
        let truth = judge(&Evidence { copied: 700, ..evidence(1000, 5000) });
        assert_eq!((truth.from_device, truth.amplification), (Some(0.3), Some(5.0)));
    }

    /// One piece of data: its bytes, whether memory has it, and how it is read.
    #[derive(Clone, Debug)]
    struct Piece {
        bytes: u64,
        in_memory: bool,
        way: Way,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Way {
        Direct,
        Buffered,
        /// The page cache is asked first, and a miss read past it.
        AskedFirst,
    }

    fn pieces() -> impl Strategy<Value = Vec<Piece>> {
        let way = prop_oneof![Just(Way::Direct), Just(Way::Buffered), Just(Way::AskedFirst)];
        let piece = (1_u64..1 << 30, any::<bool>(), way);
        proptest::collection::vec(piece, 1..50).prop_map(|pieces| {
            pieces.into_iter().map(|(bytes, in_memory, way)| Piece { bytes, in_memory, way }).collect()
        })
    }

    /// What a machine that reads these pieces once would show, and the share that its device brings.
    fn played(pieces: &[Piece]) -> (Evidence, f64) {
        let (mut evidence, mut device) = (Evidence::default(), 0);
        for piece in pieces {
            let from_memory = piece.in_memory && piece.way != Way::Direct;
            evidence.delivered += piece.bytes;
            evidence.copied += if from_memory && piece.way == Way::AskedFirst { piece.bytes } else { 0 };
            evidence.direct += if !from_memory && piece.way != Way::Buffered { piece.bytes } else { 0 };
            device += if from_memory { 0 } else { piece.bytes };
        }
        evidence.moved = moved(device);
        let share = device as f64 / evidence.delivered as f64;
        (evidence, share)
    }

    proptest! {
        #[test]
        fn the_share_of_the_device_is_what_a_machine_that_plays_the_run_brings(pieces in pieces()) {
            let (evidence, share) = played(&pieces);
            let truth = judge(&evidence);
            prop_assert!((truth.from_device.unwrap() - share).abs() < 1e-9);
            prop_assert_eq!(truth.amplification, None);
            // Uncounted: as good as what is known of the buffered pieces, which are read once.
            let sum = |which: &dyn Fn(&Piece) -> bool| {
                pieces.iter().filter(|piece| which(piece)).map(|piece| piece.bytes).sum::<u64>()
            };
            let buffered = sum(&|piece| piece.way == Way::Buffered);
            let hits = sum(&|piece| piece.way == Way::Buffered && piece.in_memory);
            let before = cached(if buffered == 0 { 0.5 } else { hits as f64 / buffered as f64 });
            let estimate = judge(&Evidence { moved: Err("no".into()), before, ..evidence });
            prop_assert_eq!(estimate.basis, Basis::Estimated);
            prop_assert!((estimate.from_device.unwrap() - share).abs() < 1e-9);
        }

        #[test]
        fn no_evidence_whatever_gives_shares_that_are_none(
            device: Option<u64>, share: Option<f64>, probes: u32,
            delivered: u64, copied: u64, direct: u64, direct_asked: bool, refused: u64,
        ) {
            let moved = device.map(|read_bytes| DeviceBytes { read_bytes, rchar: 0 }).ok_or("no".to_string());
            let before = share.map(|share| Cached::new(share, probes, CacheProbe::Mincore)).ok_or("no".to_string());
            let counted = moved.is_ok();
            let truth = judge(&Evidence { before, moved, delivered, copied, direct, direct_asked, refused });
            prop_assert_eq!(truth.from_device.is_some(), truth.basis != Basis::Unknown);
            if let (Some(device), Some(cache)) = (truth.from_device, truth.from_cache) {
                prop_assert!((0.0..=1.0).contains(&device) && (device + cache - 1.0).abs() < 1e-9);
            }
            prop_assert!(truth.amplification.is_none_or(|times| counted && times.is_finite() && times > 1.1));
            prop_assert!(truth.direct.is_none_or(|share| (0.0..=1.0).contains(&share)));
            prop_assert_eq!(counted && delivered > 0, truth.basis == Basis::Counted);
            let mostly = truth.from_cache.is_some_and(|share| share >= 0.5);
            let said = truth.warnings.iter().any(|warning| warning.starts_with("this measured the page cache"));
            prop_assert_eq!(said, mostly);
        }

        #[test]
        fn the_more_the_device_moved_the_less_came_from_memory(
            delivered in 1_u64.., copied: u64, less: u64, more: u64,
        ) {
            let share = |device: u64| judge(&Evidence { copied, ..evidence(delivered, device) }).from_cache.unwrap();
            prop_assert!(share(less.min(more)) >= share(less.max(more)));
        }

        #[test]
        fn a_count_since_another_is_what_lies_between(a: u64, b: u64, c in 0_u64..1 << 40) {
            let count = |number: u64| DeviceBytes { read_bytes: number, rchar: number / 2 };
            let (low, high) = (a.min(b), a.max(b));
            prop_assert_eq!(count(high).since(&count(low)).read_bytes, high - low);
            prop_assert_eq!(count(low).since(&count(high)).read_bytes, 0);
            let text = format!("rchar: {}\nread_bytes: {c}\n", c / 2);
            prop_assert_eq!(DeviceBytes::parse(&text), Ok(count(c)));
        }

        #[test]
        fn no_text_makes_parsing_panic(text in "(read_bytes|rchar|[:\\- 0-9a-z\n]{0,6}){0,12}") {
            if let Ok(count) = DeviceBytes::parse(&text) {
                prop_assert!(text.contains("read_bytes:") && text.contains(&count.read_bytes.to_string()));
            }
        }
    }
}
