//! Sources of bytes: how they are named, listed, opened and published.

pub mod blob;
pub mod configure;
pub mod listing;
pub mod mounts;
pub mod opened;
pub mod publish;
#[cfg(feature = "remote")]
pub use feedline_remote as remote;
#[cfg(not(feature = "remote"))]
#[path = "no_remote.rs"]
pub mod remote;
pub mod resolve_beneath;
pub mod settings;
pub mod sidefile;
pub mod source;
pub mod transient;

pub use blob::Blob;
pub use configure::configure;
pub use listing::{Listed, expand as list};
pub use opened::descriptor_limit;
pub use publish::publish;
pub use remote::Way;
#[cfg(feature = "remote")]
pub use remote::{object_store, register};
pub use settings::{Direct, Locality, Mode};
pub use source::{DirId, Extent, SourceId, Sources};
pub use transient::{exhausted, has_other_version, may_pass, out_of_reach, patiently};
