//! Keyed draws, samplers, ranks and groups: the common ground of orders, decoders and jobs.

pub mod groups;
pub mod key;
pub mod machine;
pub mod rank;
pub mod sampler;

pub use groups::{GROUPS_MAX, Groups, GroupsMark};
pub use key::{Draws, Key, Permutation};
pub use machine::{Cores, cores_of_rank, job, local_ranks, usable_cores};
pub use rank::{Launcher, Rank};
pub use sampler::{Drawn, Progress, Sampler, identity_of};
