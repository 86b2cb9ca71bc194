//! Files of words: a header whose last word is the CRC32C of all other words, then whatever it heads. They stand in memory as in
//! the file, in native order: a machine of the other order finds no magic that it knows.

use crate::error::Result;
use crate::storage::Blob;

/// The words of a number.
pub(super) fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// The number whose words are at `at`.
pub(super) fn wide(words: &[u32], at: usize) -> u64 {
    u64::from(words[at]) | u64::from(words[at + 1]) << 32
}

/// CRC32C of all words but the one at `at`, the last of the header.
pub(super) fn crc(words: &[u32], at: usize) -> u32 {
    let crc = crc32c::crc32c(bytemuck::cast_slice(&words[..at]));
    crc32c::crc32c_append(crc, bytemuck::cast_slice(&words[at + 1..]))
}

/// Makes the words a file: `head` is all of the header but its CRC.
pub(super) fn seal(words: &mut [u32], head: &[u32]) {
    words[..head.len()].copy_from_slice(head);
    words[head.len()] = crc(words, head.len());
}

/// All words of the file, when they are `len` and what `head`, its header, says. Errors: those of the system.
pub(super) fn load(file: &Blob, head: &[u32], len: Option<usize>) -> Result<Option<Vec<u32>>> {
    // Memory is taken for what the file has, and only when that is what its header says.
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
