//! One number for many: what identities and fingerprints of datasets are made of.

use crate::order::{Draws, Key};

/// A hash of words and bytes that is the same on every platform and in every version of Rust and of this crate: the
/// order's keys, of which each word makes a sub-key. Statistical, not cryptographic.
#[derive(Clone, Copy)]
pub(crate) struct Digest(Key);

impl Digest {
    /// `purpose` sets hashes of different things apart.
    pub(crate) fn new(purpose: &str) -> Self {
        Self(Key::new(0).named("digest").named(purpose))
    }

    #[must_use]
    pub(crate) fn word(self, word: u64) -> Self {
        Self(self.0.derive(word))
    }

    /// Their number goes first, so that lists one after the other cannot be cut in another place.
    #[must_use]
    pub(crate) fn words(self, words: &[u64]) -> Self {
        words.iter().fold(self.word(words.len() as u64), |digest, word| digest.word(*word))
    }

    #[must_use]
    pub(crate) fn bytes(self, bytes: &[u8]) -> Self {
        let (words, rest) = bytes.as_chunks::<8>();
        let start = self.word(bytes.len() as u64);
        let digest = words.iter().fold(start, |digest, word| digest.word(u64::from_le_bytes(*word)));
        if rest.is_empty() {
            return digest;
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        digest.word(u64::from_le_bytes(last))
    }

    pub(crate) fn end(self) -> u64 {
        Draws::from_key(self.0).next_u64()
    }
}
