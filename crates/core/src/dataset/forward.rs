//! Macros for datasets that forward methods to an inner dataset, so that each is written once.

/// `forward!(self => self.inner; schema len open)` implements these methods of
/// [`Dataset`](crate::dataset::Dataset) or [`Chunked`](crate::dataset::Chunked) by calls to `self.inner`.
#[doc(hidden)]
#[macro_export]
macro_rules! forward {
    ($self:ident => $to:expr; $($method:ident)+) => { $($crate::forward!(@$method $self $to);)+ };
    (@schema $self:ident $to:expr) => { fn schema(&$self) -> &[$crate::tensor::EncodedField] { $to.schema() } };
    (@len $self:ident $to:expr) => { fn len(&$self) -> u64 { $to.len() } };
    (@sources $self:ident $to:expr) => {
        fn sources(&$self) -> &std::sync::Arc<$crate::storage::Sources> { $to.sources() }
    };
    (@sizes $self:ident $to:expr) => { fn sizes(&$self) -> $crate::dataset::Sizes { $to.sizes() } };
    (@extents $self:ident $to:expr) => {
        fn extents<'a>(&'a $self, sample: u64, parts: &mut $crate::dataset::Parts<'a>) -> $crate::Result<()> {
            $to.extents(sample, parts)
        }
    };
    (@framed $self:ident $to:expr) => {
        fn framed(&$self) -> Option<&dyn $crate::dataset::Framed> { $to.framed() }
    };
    (@chunked $self:ident $to:expr) => {
        fn chunked(&$self) -> Option<&dyn $crate::dataset::Chunked> { $to.chunked() }
    };
    (@sampler $self:ident $to:expr) => {
        fn sampler(&$self) -> Option<std::sync::Arc<dyn $crate::order::Sampler>> { $to.sampler() }
    };
    (@keys $self:ident $to:expr) => {
        fn keys(&$self) -> $crate::Result<Option<$crate::dataset::Strings>> { $to.keys() }
    };
    (@identity $self:ident $to:expr) => { fn identity(&$self) -> u64 { $to.identity() } };
    (@describe $self:ident $to:expr) => { fn describe(&$self) -> String { $to.describe() } };
    (@starts $self:ident $to:expr) => { fn starts(&$self) -> &[u64] { $to.starts() } };
    (@is_whole $self:ident $to:expr) => { fn is_whole(&$self) -> bool { $to.is_whole() } };
    (@inner $self:ident $to:expr) => { fn inner(&$self, sample: u64) -> u64 { $to.inner(sample) } };
    (@chunk_extents $self:ident $to:expr) => {
        fn chunk_extents(&$self, chunk: usize, out: &mut Vec<$crate::storage::Extent>) -> $crate::Result<()> {
            $to.chunk_extents(chunk, out)
        }
    };
    (@chunk_bytes $self:ident $to:expr) => {
        fn chunk_bytes(&$self, chunk: usize) -> $crate::dataset::ChunkBytes { $to.chunk_bytes(chunk) }
    };
    (@open_chunk $self:ident $to:expr) => {
        fn open_chunk(
            &$self,
            chunk: usize,
            pieces: &[bytes::Bytes],
            scratch: &mut $crate::decode::Scratch,
            out: &mut $crate::dataset::ChunkBuf,
        ) -> $crate::Result<()> {
            $to.open_chunk(chunk, pieces, scratch, out)
        }
    };
    (@chunk_name $self:ident $to:expr) => { fn chunk_name(&$self, chunk: usize) -> String { $to.chunk_name(chunk) } };
}

/// `frames_of!(self, sample => (dataset, id); check open)` implements these methods of
/// [`Framed`](crate::dataset::Framed) by calls to the frames of `dataset`, in which the sample has the id
/// `id`. With `sample, field => (dataset, id, number)` the field has another number there.
#[doc(hidden)]
#[macro_export]
macro_rules! frames_of {
    ($self:ident, $sample:ident => $to:expr; $($method:ident)+) => {
        $crate::frames_of!($self, $sample, field => { let (dataset, id) = $to; (dataset, id, field) }; $($method)+);
    };
    ($self:ident, $sample:ident, $field:ident => $to:expr; $($method:ident)+) => {
        $($crate::frames_of!(@$method $self $sample $field $to);)+
    };
    (@check $self:ident $sample:ident $field:ident $to:expr) => {
        fn check(&$self, $sample: u64, $field: usize, bytes: &[u8]) -> $crate::Result<()> {
            let (dataset, id, number) = $to;
            $crate::dataset::frames(dataset).check(id, number, bytes)
        }
    };
    (@open $self:ident $sample:ident $field:ident $to:expr) => {
        fn open<'a>(
            &$self,
            $sample: u64,
            $field: usize,
            bytes: &'a [u8],
            buffer: &'a mut Vec<u8>,
        ) -> $crate::Result<&'a [u8]> {
            let (dataset, id, number) = $to;
            $crate::dataset::frames(dataset).open(id, number, bytes, buffer)
        }
    };
    (@make $self:ident $sample:ident $field:ident $to:expr) => {
        fn make(&$self, $sample: u64, $field: usize, out: &mut [u8]) -> $crate::Result<()> {
            let (dataset, id, number) = $to;
            $crate::dataset::frames(dataset).make(id, number, out)
        }
    };
    (@field_bytes $self:ident $sample:ident $field:ident $to:expr) => {
        fn field_bytes(&$self, $sample: u64, $field: usize) -> $crate::Result<Option<u64>> {
            let (dataset, id, number) = $to;
            $crate::dataset::frames(dataset).field_bytes(id, number)
        }
    };
    (@member $self:ident $sample:ident $field:ident $to:expr) => {
        fn member(&$self, $sample: u64, of: Option<usize>) -> Option<String> {
            let $field = of.unwrap_or(0);
            let (dataset, id, number) = $to;
            $crate::dataset::member(dataset, id, of.map(|_| number))
        }
    };
    (@seek_points $self:ident $sample:ident $field:ident $to:expr) => {
        fn seek_points<'a>(&'a $self, $sample: u64, $field: usize, buffer: &'a mut Vec<u8>) -> $crate::Result<&'a [u8]> {
            let (dataset, id, number) = $to;
            $crate::dataset::frames(dataset).seek_points(id, number, buffer)
        }
    };
}

/// `own!(schema sources)` implements these methods of [`Dataset`](crate::dataset::Dataset) with the fields
/// of the same names, and `framed` with the dataset itself.
#[doc(hidden)]
#[macro_export]
macro_rules! own {
    ($($method:ident)+) => { $($crate::own!(@$method);)+ };
    (@schema) => { fn schema(&self) -> &[$crate::tensor::EncodedField] { &self.schema } };
    (@len) => { fn len(&self) -> u64 { self.len } };
    (@sources) => { fn sources(&self) -> &std::sync::Arc<$crate::storage::Sources> { &self.sources } };
    (@sizes) => { fn sizes(&self) -> $crate::dataset::Sizes { self.sizes } };
    (@unordered) => { fn sampler(&self) -> Option<std::sync::Arc<dyn $crate::order::Sampler>> { None } };
    (@unnamed) => { fn keys(&self) -> $crate::Result<Option<$crate::dataset::Strings>> { Ok(None) } };
    (@framed) => { fn framed(&self) -> Option<&dyn $crate::dataset::Framed> { Some(self) } };
}

/// Implements `Debug` with [`describe`](crate::dataset::Dataset::describe), the name used in reports.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_by_describe {
    ($($name:ident $(<$of:ident>)?),+ $(,)?) => { $(
        impl$(<$of: $crate::dataset::Dataset>)? std::fmt::Debug for $name$(<$of>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&$crate::dataset::Dataset::describe(self))
            }
        }
    )+ };
}

pub use {debug_by_describe, forward, frames_of, own};
