//! Plans: inputs are cut into tasks, processes run them in any order, and one call finishes the
//! job.
//!
//! ```text
//! plan    inputs ──listed once──► OUT/plan.fdp: settings, inputs, n tasks
//! run     plan.fdp, task k ──► OUT/shard-00000k.tar, its index ──► OUT/tasks/00000k.tsv: manifest, ledger, checksums
//! finish  all records, all shards read ──► OUT/index.fdx, OUT/damaged.tsv, OUT/manifest.tsv
//! write   plan, or the plan that is there; run all tasks; finish; remove plan.fdp and tasks/
//! ```
//!
//! No process talks to another: a launcher starts them, and the folder holds all state. The output
//! of a task depends only on the plan, so it is byte-identical on any machine and for any number of
//! workers. A shuffle needs no exchange: the order is a keyed permutation, and a task looks up its
//! own positions.
//!
//! Invariants: a file gets its name only when it is complete and on the device. The record is
//! written last: a task with a record is done. A second run reads the output of such a task, and
//! repeats the task only if the bytes differ from the record. A file that no record covers is never
//! replaced. An input that changed after it was listed fails its task.
//!
//! Limits: the folders have the same paths on every machine; the output folder is not a bucket.
//! Memory: two windows of pictures, whatever the number of inputs.

mod file;
mod finish;
mod listing;
mod parts;
mod plan;
mod record;
mod run;
mod shard;
mod tasks;
mod texts;
mod write;

pub use finish::{Check, Finished};
pub use plan::Plan;
pub use run::{Event, Ran};
pub use tasks::Tasks;
