//! The contract of datasets, and what their authors need: parts of samples, indexes, side files.

pub mod chunked;
pub mod contract;
pub mod damage;
pub mod digest;
pub mod documents;
pub mod fingerprint;
pub mod forward;
pub mod index;
pub mod kept;
pub mod parallel;
pub mod parts;
pub mod sample;
pub mod starts;
pub mod strings;

pub use crate::memory::ChunkBuf;
pub use chunked::{ChunkBytes, Chunked};
pub use contract::{
    Dataset, Framed, Sizes, chunks, field_bytes, frames, knows_lengths, member, no_field, unordered,
};
pub use damage::{Damage, DamageKind, Verified};
pub use digest::Digest;
pub use documents::{TokenFields, read_all};
pub use fingerprint::Fingerprint;
pub use parallel::{parallel, stoppable};
pub use parts::{
    FieldPart, Part, Parts, lie, make, make_in, opens_bytes, placed, unframed, within_opened,
};
pub use strings::Strings;
