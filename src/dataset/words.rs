//! Files of words: a header that ends with the CRC32C of all other words, then the content. Memory and file have the
//! same layout, in native order: a machine of the other byte order does not recognise the magic.

use crate::error::Result;
use crate::storage::Blob;

/// Splits a number into its two words.
pub(super) fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Reads the number in the two words at `at`.
pub(super) fn wide(words: &[u32], at: usize) -> u64 {
    u64::from(words[at]) | u64::from(words[at + 1]) << 32
}

/// CRC32C of all words except the word at `at`, the last of the header.
pub(super) fn crc(words: &[u32], at: usize) -> u32 {
    let crc = crc32c::crc32c(bytemuck::cast_slice(&words[..at]));
    crc32c::crc32c_append(crc, bytemuck::cast_slice(&words[at + 1..]))
}

/// Completes a file of words: `head` is the header without its CRC.
pub(super) fn seal(words: &mut [u32], head: &[u32]) {
    words[..head.len()].copy_from_slice(head);
    words[head.len()] = crc(words, head.len());
}

/// Reads all words of the file, if it has `len` words and the header `head`. Errors: system errors.
pub(super) fn load(file: &Blob, head: &[u32], len: Option<usize>) -> Result<Option<Vec<u32>>> {
    // Allocates by the file's length, and only if its header agrees.
    let mut all = Vec::new();
    let Some(len) = len.filter(|len| len.checked_mul(4).is_some_and(|bytes| bytes as u64 == file.len())) else {
        return Ok(None);
    };
    if all.try_reserve_exact(len).is_err() {
        return Ok(None);
    }
    all.resize(len, 0_u32);
    file.fill(0, bytemuck::cast_slice_mut(&mut all), "the words")?;
    let at = head.len() - 1;
    Ok((all.starts_with(head) && crc(&all, at) == head[at]).then_some(all))
}
