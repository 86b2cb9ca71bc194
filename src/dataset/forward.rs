//! Macros for datasets that forward methods to an inner dataset, so that each is written once.

/// `forward!(self => self.inner; schema len open)` implements these methods of [`Dataset`](super::Dataset) or
/// [`Chunked`](super::Chunked) by calls to `self.inner`.
macro_rules! forward {
    ($self:ident => $to:expr; $($method:ident)+) => { $(forward!(@$method $self $to);)+ };
    (@schema $self:ident $to:expr) => { fn schema(&$self) -> &[crate::tensor::EncodedField] { $to.schema() } };
    (@len $self:ident $to:expr) => { fn len(&$self) -> u64 { $to.len() } };
    (@sources $self:ident $to:expr) => {
        fn sources(&$self) -> &std::sync::Arc<crate::storage::Sources> { $to.sources() }
    };
    (@sample_bytes_max $self:ident $to:expr) => { fn sample_bytes_max(&$self) -> u64 { $to.sample_bytes_max() } };
    (@field_bytes $self:ident $to:expr) => {
        fn field_bytes(&$self, sample: u64, field: usize) -> crate::error::Result<Option<u64>> {
            $to.field_bytes(sample, field)
        }
    };
    (@field_bytes_max $self:ident $to:expr) => {
        fn field_bytes_max(&$self, field: usize) -> crate::error::Result<u64> { $to.field_bytes_max(field) }
    };
    (@largest_sample $self:ident $to:expr) => { fn largest_sample(&$self) -> Option<u64> { $to.largest_sample() } };
    (@extents $self:ident $to:expr) => {
        fn extents<'a>(&'a $self, sample: u64, parts: &mut crate::dataset::Parts<'a>) -> crate::error::Result<()> {
            $to.extents(sample, parts)
        }
    };
    (@check $self:ident $to:expr) => {
        fn check(&$self, sample: u64, field: usize, bytes: &[u8]) -> crate::error::Result<()> {
            $to.check(sample, field, bytes)
        }
    };
    (@open $self:ident $to:expr) => {
        fn open<'a>(
            &$self,
            sample: u64,
            field: usize,
            bytes: &'a [u8],
            buffer: &'a mut Vec<u8>,
        ) -> crate::error::Result<&'a [u8]> {
            $to.open(sample, field, bytes, buffer)
        }
    };
    (@seek_points $self:ident $to:expr) => {
        fn seek_points(&$self, sample: u64, field: usize) -> &[u8] { $to.seek_points(sample, field) }
    };
    (@opened_bytes_max $self:ident $to:expr) => { fn opened_bytes_max(&$self) -> u64 { $to.opened_bytes_max() } };
    (@chunked $self:ident $to:expr) => {
        fn chunked(&$self) -> Option<&dyn crate::dataset::Chunked> { $to.chunked() }
    };
    (@member $self:ident $to:expr) => {
        fn member(&$self, sample: u64, field: Option<usize>) -> Option<String> { $to.member(sample, field) }
    };
    (@identity $self:ident $to:expr) => { fn identity(&$self) -> u64 { $to.identity() } };
    (@index_bytes $self:ident $to:expr) => { fn index_bytes(&$self) -> usize { $to.index_bytes() } };
    (@describe $self:ident $to:expr) => { fn describe(&$self) -> String { $to.describe() } };
    (@starts $self:ident $to:expr) => { fn starts(&$self) -> &[u64] { $to.starts() } };
    (@is_whole $self:ident $to:expr) => { fn is_whole(&$self) -> bool { $to.is_whole() } };
    (@inner $self:ident $to:expr) => { fn inner(&$self, sample: u64) -> u64 { $to.inner(sample) } };
    (@chunk_extents $self:ident $to:expr) => {
        fn chunk_extents(&$self, chunk: usize, out: &mut Vec<crate::storage::Extent>) -> crate::error::Result<()> {
            $to.chunk_extents(chunk, out)
        }
    };
    (@chunk_bytes $self:ident $to:expr) => {
        fn chunk_bytes(&$self, chunk: usize) -> crate::dataset::ChunkBytes { $to.chunk_bytes(chunk) }
    };
    (@open_chunk $self:ident $to:expr) => {
        fn open_chunk(
            &$self,
            chunk: usize,
            pieces: &[bytes::Bytes],
            scratch: &mut crate::decode::Scratch,
            out: &mut crate::memory::ChunkBuf,
        ) -> crate::error::Result<()> {
            $to.open_chunk(chunk, pieces, scratch, out)
        }
    };
    (@chunk_name $self:ident $to:expr) => { fn chunk_name(&$self, chunk: usize) -> String { $to.chunk_name(chunk) } };
}

/// Implements `Debug` by [`describe`](super::Dataset::describe), the name used in reports.
macro_rules! debug_by_describe {
    ($($name:ident $(<$of:ident>)?),+ $(,)?) => { $(
        impl$(<$of: Dataset>)? std::fmt::Debug for $name$(<$of>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&Dataset::describe(self))
            }
        }
    )+ };
}

pub(super) use {debug_by_describe, forward};
