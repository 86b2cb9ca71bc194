//! What the supervisor asks a child to do, and what the child tells of it: JSON in a variable, and a line of JSON.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The variable that makes a process a child.
pub const JOB: &str = "FEEDLINE_TORTURE_JOB";
/// What a child says when it wants to be stopped for a while.
pub const STOP_ME: &str = "stop me";
/// What stands before the line that tells how it went.
pub const TOLD: &str = "told ";

/// One run of a loader over a copy of the data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    pub act: Act,
    /// The data, as `--path` would say it.
    pub path: PathBuf,
    pub record_bytes: Option<usize>,
    /// Folder for what is kept from child to child: hashes of the samples, states, logs.
    pub work: PathBuf,
    /// Checksums of the copy.
    pub checked: Option<PathBuf>,
    pub damage: Option<Damage>,
    pub substitute: bool,
    pub seed: u64,
    pub batch: usize,
    pub workers: usize,
}

/// What is done with the loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Act {
    /// An epoch; what it delivers is what is right. Half of it makes a state.
    Oracle,
    /// An epoch.
    Read,
    /// An epoch without io_uring.
    Pread,
    /// An epoch with so many descriptors.
    Descriptors(u64),
    /// An epoch that is stopped for a second in the middle.
    Stopped,
    /// Half an epoch, with a state saved for every batch, then SIGKILL at a random moment.
    Killed,
    /// The rest of it.
    Resumed,
    /// Goes on from the state of [`Act::Oracle`].
    Older,
    /// A transform that never returns.
    Stuck,
    /// A consumer that keeps every batch.
    Held,
    /// The loader is dropped at so many random points.
    Dropped(u32),
    /// The ledger is this device.
    FullDevice,
    /// The ledger's disk has no room.
    FullDisk,
}

/// What happens to files of the copy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Damage {
    pub kind: Kind,
    pub when: When,
    /// Of the copy.
    pub files: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    /// Before the dataset is opened.
    Before,
    /// After it was opened, before it is read.
    Indexed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Cut,
    Emptied,
    Removed,
    /// Other bytes, as many.
    Replaced,
    Grown,
    Forbidden,
    Fifo,
    Folder,
    /// A bit of each file, in what samples are made of; the file's times stay as they are.
    Flipped,
    /// A bit of each file where the format describes itself.
    FlippedHeader,
}

/// How it went.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Told {
    /// Samples of the dataset as it was opened.
    pub samples: u64,
    /// Rows with the sample that was planned, and its bytes.
    pub exact: u64,
    /// Rows with other bytes, without a word.
    pub wrong: u64,
    /// Rows with a substitute.
    pub substituted: u64,
    /// Distinct samples in the ledger, and how many of them name no file or place.
    pub bad: u64,
    pub unnamed: u64,
    /// Samples that were there before and did not come.
    pub missing: u64,
    /// What the dataset said of damage when it was opened.
    pub damage: Vec<String>,
    pub error: Option<Fault>,
    pub note: Option<String>,
    /// Files of the dataset, from the oracle.
    pub files: Vec<PathBuf>,
}

/// An error, and what it names.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fault {
    pub phase: Phase,
    pub text: String,
    pub kind: String,
    pub path: Option<PathBuf>,
    pub offset: Option<u64>,
    pub sample: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    #[default]
    Open,
    Build,
    Epoch,
}
