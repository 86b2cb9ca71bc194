//! Framing of several byte strings in one field: from a dataset to a decoder, unchanged by all
//! between them.
//!
//! ```text
//! | count: u32 | length of each element: count × u32 | the elements' bytes, one after the other |
//! ```
//!
//! Numbers are little-endian. No bytes at all are an empty list, too, as of a field that a sample
//! lacks.
//!
//! Invariants: every byte belongs to the head or to exactly one element. [`Many::parse`] allocates
//! nothing, and reads no length before it has checked the count against the bytes.

use feedline_base::error::{Error, Result};

/// Bytes of a number in the head.
const WORD: usize = size_of::<u32>();

/// A list of byte strings, as a dataset frames them in one field; see
/// [`EncodedField::list`](crate::tensor::EncodedField::list).
///
/// ```
/// # use feedline_core::decode::Many;
/// let mut framed = Vec::new();
/// Many::write(&["one", "", "three"], &mut framed)?;
/// let many = Many::parse(&framed)?;
/// assert_eq!(many.len(), 3);
/// assert_eq!(many.iter().last(), Some(&b"three"[..]));
/// # Ok::<(), feedline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Many<'a> {
    lens: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> Many<'a> {
    /// Errors: [`ErrorKind::Decode`](feedline_base::error::ErrorKind::Decode) if the lengths do not
    /// add up to the bytes.
    pub fn parse(framed: &'a [u8]) -> Result<Self> {
        if framed.is_empty() {
            let none = Self {
                lens: &[],
                bytes: &[],
            };
            return Ok(none);
        }
        let head = framed.split_first_chunk().and_then(|(count, rest)| {
            let lens = (u32::from_le_bytes(*count) as usize).checked_mul(WORD)?;
            rest.split_at_checked(lens)
        });
        let Some((lens, bytes)) = head else {
            let there = framed.len();
            return Err(Error::decode(format!(
                "a list's head is cut at {there} bytes"
            )));
        };
        let many = Self { lens, bytes };
        let sum: u64 = many.lens().map(|len| len as u64).sum();
        if sum != bytes.len() as u64 {
            let there = bytes.len();
            return Err(Error::decode(format!(
                "a list of elements of {sum} bytes, {there} are there"
            )));
        }
        Ok(many)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.lens.len() / WORD
    }

    /// Whether the list has no element.
    pub fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let bytes = self.bytes;
        let mut start = 0;
        self.lens().map(move |len| {
            let element = &bytes[start..start + len];
            start += len;
            element
        })
    }

    fn lens(&self) -> impl Iterator<Item = usize> + use<'a> {
        let (words, _) = self.lens.as_chunks::<WORD>();
        words.iter().map(|word| u32::from_le_bytes(*word) as usize)
    }

    /// Bytes that `count` elements take beside their own.
    pub fn head_bytes(count: usize) -> usize {
        WORD.saturating_mul(count.saturating_add(1))
    }

    /// Appends the framed elements to `out`.
    ///
    /// Errors: those of [`write_head`](Self::write_head).
    pub fn write(elements: &[impl AsRef<[u8]>], out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        out.resize(start + Self::head_bytes(elements.len()), 0);
        let lens = elements.iter().map(|element| element.as_ref().len());
        Self::write_head(lens, &mut out[start..])?;
        elements
            .iter()
            .for_each(|element| out.extend_from_slice(element.as_ref()));
        Ok(())
    }

    /// Writes the head of a list into `out`, which has exactly [`head_bytes`](Self::head_bytes).
    /// The elements' bytes follow it.
    ///
    /// Errors: [`ErrorKind::Decode`](feedline_base::error::ErrorKind::Decode) for an element or a
    /// count of 4 GiB or more, or another number of elements than the head has room for.
    pub fn write_head(lens: impl ExactSizeIterator<Item = usize>, out: &mut [u8]) -> Result<()> {
        let count = lens.len();
        if out.len() != Self::head_bytes(count) {
            let room = out.len();
            return Err(Error::decode(format!(
                "a list of {count} elements with a head of {room} bytes"
            )));
        }
        let words = std::iter::once(count).chain(lens);
        for (number, place) in words.zip(out.chunks_exact_mut(WORD)) {
            let word = u32::try_from(number)
                .map_err(|_| Error::decode(format!("a list with an element of {number} bytes")))?;
            place.copy_from_slice(&word.to_le_bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_written_list_is_read_and_a_cut_one_refused(
            elements in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..9),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut framed = Vec::new();
            Many::write(&elements, &mut framed).unwrap();
            let read: Vec<_> = Many::parse(&framed).unwrap().iter().map(<[u8]>::to_vec).collect();
            prop_assert_eq!(&read, &elements);
            // No bytes are an empty list.
            let end = cut.index(framed.len());
            prop_assert_eq!(Many::parse(&framed[..end]).is_ok(), end == 0);
            framed.push(0);
            prop_assert!(Many::parse(&framed).is_err());
        }

        #[test]
        fn no_bytes_make_the_reader_panic(
            count in 0_u32..6,
            mut bytes in prop::collection::vec(prop_oneof![Just(0_u8), Just(1), Just(255), any::<u8>()], 0..60),
        ) {
            for (place, byte) in bytes.iter_mut().zip(count.to_le_bytes()) {
                *place = byte;
            }
            if let Ok(many) = Many::parse(&bytes) {
                let sum: usize = many.iter().map(<[u8]>::len).sum();
                prop_assert!(bytes.is_empty() || sum + Many::head_bytes(many.len()) == bytes.len());
            }
        }
    }
}
