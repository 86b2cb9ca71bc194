//! Origin of a loader's bytes: storage or memory, by the kernel's count for this process.

use feedline_report::meter::{Snapshot, device_bytes};
use serde::Serialize;
use std::fmt;

/// Origin of the bytes read from files since `build`. A storage benchmark is valid only if little
/// came from memory.
///
/// The kernel counts reads from block devices and NFS servers for the whole process, including
/// other threads' reads. File systems without a device, or with their own cache (ZFS), are not
/// counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Origin {
    /// Bytes requested from readers, copied from the page cache, or read by cuFile.
    pub delivered: u64,
    /// Of these, bytes copied from the page cache.
    pub copied: u64,
    /// Of these, bytes that bypassed the page cache: `O_DIRECT`, cuFile.
    pub direct: u64,
    /// Bytes that storage moved for this process; `None` if the kernel does not count them.
    pub moved: Option<u64>,
}

/// Smaller amplification can come from alignment and metadata.
const AMPLIFIED: f64 = 1.1;
/// Below this share from storage, the moved bytes may come from other reads of the process.
const LITTLE: f64 = 0.05;

impl Origin {
    /// Share of the delivered bytes that came from memory, 0 to 1. `None` without a count, or if
    /// nothing was delivered.
    pub fn from_memory(&self) -> Option<f64> {
        // Bytes copied from the page cache did not come from storage, whatever the process read
        // otherwise.
        let stored = self.moved?.min(self.delivered.saturating_sub(self.copied));
        Some(1.0 - self.share(stored)?)
    }

    /// Bytes moved by storage per byte delivered, if clearly more than one.
    ///
    /// Causes are read-ahead, alignment, samples not delivered yet, and other reads of the process.
    pub fn amplification(&self) -> Option<f64> {
        let times = self.share(self.moved?)?;
        (times > AMPLIFIED && self.from_memory()? <= 1.0 - LITTLE).then_some(times)
    }

    fn share(&self, bytes: u64) -> Option<f64> {
        (self.delivered > 0).then(|| bytes as f64 / self.delivered as f64)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(memory) = self.from_memory() else {
            return write!(f, "not known");
        };
        let device = 100.0 * (1.0 - memory);
        let memory = 100.0 * memory;
        write!(
            f,
            "{device:.0} % from the device, {memory:.0} % from memory, by the kernel's count for \
             this process"
        )?;
        if let Some(direct) = self.share(self.direct) {
            write!(
                f,
                "; {:.0} % bypassed the page cache",
                100.0 * direct.min(1.0)
            )?;
        }
        self.amplification().map_or(Ok(()), |times| {
            write!(f, "; {times:.2} bytes moved per byte delivered")
        })
    }
}

/// The kernel's count when the loader was built.
#[derive(Debug)]
pub(super) struct Before(Option<u64>);

impl Before {
    pub(super) fn now() -> Self {
        Self(device_bytes())
    }

    pub(super) fn moved(&self) -> Option<u64> {
        self.0
    }

    /// The origin of the bytes of these measurements. Bytes from the network came from no file.
    pub(super) fn origin(&self, total: &Snapshot) -> Origin {
        let storage = &total.storage;
        let copied = total.storage.cached_bytes;
        let asked = storage.counts.bytes_asked;
        let direct = (asked as f64 * storage.counts.direct_share()) as u64;
        let on_device = total
            .copy
            .as_ref()
            .and_then(|copy| copy.direct.as_ref())
            .map_or(0, |direct| direct.bytes);
        let network = storage.network.as_ref().map_or(0, |network| network.bytes);
        Origin {
            delivered: asked
                .saturating_add(copied)
                .saturating_add(on_device)
                .saturating_sub(network),
            copied,
            direct: direct.saturating_add(on_device),
            moved: self
                .0
                .zip(device_bytes())
                .map(|(before, now)| now.saturating_sub(before)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(delivered: u64, copied: u64, moved: u64) -> Origin {
        Origin {
            delivered,
            copied,
            moved: Some(moved),
            ..Origin::default()
        }
    }

    #[test]
    fn shares_relate_to_delivered_bytes() {
        for (origin, memory, amplification) in [
            (origin(1000, 0, 1000), Some(0.0), None),
            (origin(1000, 0, 30), Some(0.97), None),
            (origin(1000, 0, 1500), Some(0.0), Some(1.5)),
            (origin(1000, 0, 1050), Some(0.0), None),
            // Other reads of the process moved the bytes.
            (origin(1000, 1000, 5000), Some(1.0), None),
            (origin(1000, 400, 5000), Some(0.4), Some(5.0)),
            (origin(0, 0, 5000), None, None),
            (
                Origin {
                    moved: None,
                    ..origin(1000, 0, 0)
                },
                None,
                None,
            ),
            (origin(u64::MAX, u64::MAX, u64::MAX), Some(1.0), None),
        ] {
            assert_eq!(
                (origin.from_memory(), origin.amplification()),
                (memory, amplification),
                "{origin:?}"
            );
        }
    }

    #[test]
    fn text_shows_shares_or_unknown() {
        let cold = Origin {
            direct: 1000,
            ..origin(1000, 0, 1200)
        };
        let words = "100 % from the device, 0 % from memory, by the kernel's count for this \
                     process; 100 % bypassed the page cache; 1.20 bytes moved per byte delivered";
        assert_eq!(cold.to_string(), words);
        assert_eq!(Origin::default().to_string(), "not known");
    }
}
