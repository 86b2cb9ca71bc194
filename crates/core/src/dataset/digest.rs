//! Stable hash of many numbers, for identities and fingerprints of datasets.

use crate::order::{Draws, Key};

/// A hash of words and bytes, the same on every platform and in every version of Rust and of this
/// crate. Each word derives a sub-key, with the keys of `order`. The quality is statistical, not
/// cryptographic.
#[derive(Clone, Copy)]
pub struct Digest(Key);

impl Digest {
    /// Starts a hash; `purpose` separates hashes of different things.
    pub fn new(purpose: &str) -> Self {
        Self(Key::new(0).named("digest").named(purpose))
    }

    #[must_use]
    pub fn word(self, word: u64) -> Self {
        Self(self.0.derive(word))
    }

    /// Hashes the length first, so that the boundary between consecutive lists changes the hash.
    #[must_use]
    pub fn words(self, words: &[u64]) -> Self {
        words
            .iter()
            .fold(self.word(words.len() as u64), |digest, word| {
                digest.word(*word)
            })
    }

    #[must_use]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        let (words, rest) = bytes.as_chunks::<8>();
        let start = self.word(bytes.len() as u64);
        let digest = words
            .iter()
            .fold(start, |digest, word| digest.word(u64::from_le_bytes(*word)));
        if rest.is_empty() {
            return digest;
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        digest.word(u64::from_le_bytes(last))
    }

    pub fn end(self) -> u64 {
        Draws::from_key(self.0).next_u64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_pinned_for_all_machines_and_versions() {
        let digest = Digest::new("a");
        assert_eq!(digest.end(), 0x7b5a_84aa_31c5_6a09);
        assert_eq!(
            digest.word(1).words(&[2, 3]).bytes(b"0123456789").end(),
            0xef0c_ae7f_5a11_6d55
        );
    }

    #[test]
    fn lists_with_other_boundaries_have_other_hashes() {
        let digest = Digest::new("a");
        let ends = [
            digest.words(&[1, 2]).words(&[]),
            digest.words(&[1]).words(&[2]),
            digest.words(&[]).words(&[1, 2]),
            digest.bytes(b"ab").bytes(b""),
            digest.bytes(b"a").bytes(b"b"),
            digest.bytes(b"a\0"),
            digest.bytes(b"a"),
            digest,
            Digest::new("b"),
        ];
        let mut ends = ends.map(Digest::end);
        ends.sort_unstable();
        assert!(ends.windows(2).all(|pair| pair[0] != pair[1]), "{ends:x?}");
    }
}
