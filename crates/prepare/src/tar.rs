//! Tar for WebDataset: POSIX ustar, the members of one sample in sequence, no times and no owners.
//! So the same samples give the same bytes.
//!
//! Limits: names of up to 100 bytes of ASCII, and members below 8 GiB, as plain ustar headers hold.

use std::io;
use std::io::Write;

const BLOCK: usize = 512;
/// Largest size that fits the octal digits of a header.
const SIZE_MAX: u64 = 0o77_777_777_777;

/// Appends a member.
pub(super) fn append(out: &mut impl Write, name: &str, bytes: &[u8]) -> io::Result<()> {
    out.write_all(&header(name, bytes.len() as u64)?)?;
    out.write_all(bytes)?;
    out.write_all(&[0; BLOCK][..bytes.len().next_multiple_of(BLOCK) - bytes.len()])
}

/// Appends the end of a tar.
pub(super) fn finish(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[0; 2 * BLOCK])
}

fn header(name: &str, size: u64) -> io::Result<[u8; BLOCK]> {
    if name.is_empty() || name.len() > 100 || !name.is_ascii() || size > SIZE_MAX {
        let message = format!("a member `{name}` of {size} bytes does not fit a ustar header");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, b"00000000000\0");
    // The checksum counts its own field as blanks.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_does_not_fit_its_header_is_refused() {
        for (name, size) in [
            ("", 1),
            (&"x".repeat(101)[..], 1),
            ("\u{e9}", 1),
            ("x", SIZE_MAX + 1),
        ] {
            assert_eq!(
                header(name, size).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{name} {size}"
            );
        }
        assert!(header(&"x".repeat(100), SIZE_MAX).is_ok());
    }
}
