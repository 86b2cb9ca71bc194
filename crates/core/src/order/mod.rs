//! Keyed draws, ranks and groups: what orders, decoders and jobs share.

pub mod groups;
pub mod key;
pub mod machine;
pub mod rank;

pub use groups::{GROUPS_MAX, Groups, GroupsMark};
pub use key::{Draws, Key, Permutation};
pub use machine::{Cores, cores_of_rank, local_ranks, usable_cores};
pub use rank::{Launcher, Rank};
