//! The consumer's maximum speed: replays the same batches, without reading, decoding or copying.

use super::epoch::{Epoch, From};
use super::{Life, Live, Place};
use crate::batch::{Batch, Contents};
use crate::error::{Error, ErrorKind, Result, Stage};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::time::Instant;

/// Number of replayed batches: two, so that the next is ready while the consumer holds the last.
const BATCHES: u64 = 2;

/// Iterator over replayed batches, see [`Loader::ceiling`](crate::Loader::ceiling).
///
/// Each is a real batch of the loader with its bytes, handed out again after its drop. Do not write to them on a
/// device.
pub struct Ceiling {
    shared: Life,
    /// The loader's place before, restored on drop.
    place: Place,
    back: Sender<Contents>,
    kept: Receiver<Contents>,
    left: u64,
    samples: u64,
    began: Option<Instant>,
    ended: Option<Instant>,
    /// Excludes other iterators, which would move the place. Released after the place is restored.
    _live: Live,
}

impl Ceiling {
    pub(super) fn start(shared: Life, steps: u64) -> Result<Self> {
        let live =
            Live::claim(&shared, "another iterator of this loader is alive: drop it before the ceiling is measured")?;
        let (back, kept) = unbounded();
        let place = shared.place();
        let mut ceiling =
            Self { shared, place, back, kept, left: steps, samples: 0, began: None, ended: None, _live: live };
        ceiling.fetch()?;
        Ok(ceiling)
    }

    fn fetch(&mut self) -> Result<()> {
        let batches = BATCHES.min(self.shared.info.most as u64);
        let mut epoch = Epoch::begin(self.shared.clone(), From::Here, u64::MAX, batches, None)?;
        // Dropping each batch sends it to `kept`.
        epoch.by_ref().try_for_each(|batch| batch.map(|batch| drop(batch.again(self.back.clone()))))
    }

    /// Samples per second of the consumer since the first batch; 0 before the second.
    pub fn samples_per_s(&self) -> f64 {
        let (Some(began), Some(ended)) = (self.began, self.ended) else { return 0.0 };
        self.samples as f64 / (ended - began).as_secs_f64().max(1e-9)
    }

    fn hand_out(&mut self) -> Result<Batch> {
        self.shared.info.process.check()?;
        let contents = self.kept.recv_timeout(self.shared.deadlines.held).map_err(|_| {
            let message = "the caller holds every replayed batch; drop one";
            Error::new(ErrorKind::BatchesHeld, Stage::Batch, message)
        })?;
        Batch::new(contents, self.shared.info.clone()).map(|batch| batch.again(self.back.clone()))
    }
}

impl Iterator for Ceiling {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let now = Instant::now();
        if self.began.is_some() {
            self.ended = Some(now);
        }
        self.began.get_or_insert(now);
        if self.left == 0 {
            return None;
        }
        let batch = self.hand_out();
        match &batch {
            Ok(batch) => {
                self.left -= 1;
                self.samples += batch.valid() as u64;
            }
            Err(error) if error.kind() == ErrorKind::BatchesHeld => {}
            Err(_) => self.left = 0,
        }
        Some(batch)
    }
}

impl Drop for Ceiling {
    fn drop(&mut self) {
        if self.shared.info.process.is_forked() {
            // Leaks the channel with the batches in it; its locks may be held for ever.
            return std::mem::forget((self.kept.clone(), self.back.clone()));
        }
        self.shared.set_place(self.place);
    }
}

impl std::fmt::Debug for Ceiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} replayed batches left", self.left)
    }
}
