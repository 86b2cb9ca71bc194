//! stub
use crate::dataset::Fingerprint;
use crate::order::{LastBatch, Settings};
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    pub(crate) epoch: u64,
    pub(crate) position: u64,
    pub(crate) batch: u64,
    pub(crate) steps: u64,
}
#[derive(Clone, Debug)]
pub(crate) struct Stand {
    pub(crate) cursor: Cursor,
    pub(crate) global_batch: u64,
    pub(crate) last: LastBatch,
    pub(crate) order: Settings,
    pub(crate) draws_seed: u64,
    pub(crate) dataset: Fingerprint,
}
/// s
#[derive(Clone, Debug)]
pub struct State(Stand);
impl State {
    pub(crate) fn new(s: Stand) -> Self {
        Self(s)
    }
    pub(crate) fn stand(&self) -> &Stand {
        &self.0
    }
    /// s
    pub fn global_batch(&self) -> u64 {
        self.0.global_batch
    }
}
