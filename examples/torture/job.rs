//! A child's job, as JSON in an environment variable, and its report, as a line of JSON.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Environment variable of the job, which makes a process a child.
pub const JOB: &str = "FEEDLINE_TORTURE_JOB";
/// Prefix of the line with the report.
pub const REPORT: &str = "report ";

/// One run of a loader over a copy of the data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    pub act: Act,
    /// The data, as a `--path`.
    pub path: PathBuf,
    pub record_bytes: Option<usize>,
    /// Folder that the children share: hashes of the samples, states, logs.
    pub work: PathBuf,
    /// Checksums of the copy.
    pub checked: Option<PathBuf>,
    pub damage: Option<Damage>,
    pub substitute: bool,
    pub seed: u64,
    pub batch: usize,
    pub workers: usize,
}

/// Use of the loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Act {
    /// An epoch that records the expected samples, and saves a state in the middle.
    Oracle,
    /// An epoch.
    Read,
    /// An epoch without io_uring.
    Pread,
    /// An epoch with this limit of descriptors.
    Descriptors(u64),
    /// An epoch whose process is stopped for a second in the middle.
    Stopped,
    /// Half an epoch, with a state saved for every batch, then SIGKILL at a random time.
    Killed,
    /// The rest of the killed epoch.
    Resumed,
    /// Resumes the state of [`Act::Oracle`].
    Older,
}

/// Damage to files of the copy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Damage {
    pub kind: Kind,
    pub when: When,
    /// Files of the copy.
    pub files: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    /// Before the dataset is opened.
    Before,
    /// After the dataset is opened, before it is read.
    Indexed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Cut,
    Emptied,
    Removed,
    /// Other bytes of the same length.
    Replaced,
    Grown,
    Forbidden,
    Fifo,
    Folder,
    /// One bit of each file, in the samples' bytes; the file's times stay.
    Flipped,
    /// One bit of each file, in headers and indexes.
    FlippedHeader,
}

/// A child's result.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ChildReport {
    /// Samples of the opened dataset.
    pub samples: u64,
    /// Rows with the planned sample and its bytes.
    pub exact: u64,
    /// Rows with silently wrong bytes.
    pub wrong: u64,
    /// Rows with a substitute.
    pub substituted: u64,
    /// Distinct samples in the ledger.
    pub bad: u64,
    /// Samples in the ledger without a file or offset.
    pub unnamed: u64,
    /// Samples of the intact dataset that did not arrive.
    pub missing: u64,
    /// Damage that the dataset reported when opened.
    pub damage: Vec<String>,
    pub error: Option<Fault>,
    pub note: Option<String>,
    /// Files of the dataset; from the oracle only.
    pub files: Vec<PathBuf>,
}

/// An error and its site.
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
