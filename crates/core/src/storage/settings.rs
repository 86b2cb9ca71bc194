//! The user's settings of readers, and the locality of an order.

/// The choice of reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// The page cache first; misses go to io_uring if it is available, else to pread threads.
    #[default]
    Auto,
    /// io_uring, or an error that says why not.
    Uring,
    /// Threads that call `pread`.
    Pread,
    /// Threads that copy out of memory maps.
    Mmap,
}

/// Whether reads bypass the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Direct {
    /// `O_DIRECT` if the file system allows it. Under [`Mode::Auto`] only if the dataset exceeds
    /// half of the free memory; otherwise a second epoch is read from memory. Never for
    /// [`Mode::Mmap`].
    ///
    /// A cold first epoch through the page cache costs CPU time. It also costs speed on devices
    /// that handle many small segments slowly, because the kernel puts a random extent into single
    /// pages of 4 KiB. If each sample is read only once, [`Direct::On`] is better.
    #[default]
    Auto,
    /// Always; an error on opening the reader if it is not possible.
    On,
    /// Never.
    Off,
}

/// How close together consecutive samples are in storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locality {
    /// Anywhere.
    #[default]
    None,
    /// Within some MiB of each other.
    Blocks,
    /// Adjacent.
    Sequence,
}
