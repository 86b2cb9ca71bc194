//! Byte strings in one buffer: the keys of all samples of a dataset, or a column of texts.
//!
//! ```text
//! bytes  a.jpgb.jpgcc.jpg        ends  5 10 16
//! ```

/// Byte strings, numbered from 0. Each takes its bytes and 8 more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Strings {
    /// No strings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a string.
    pub fn push(&mut self, string: &[u8]) {
        self.bytes.extend_from_slice(string);
        self.ends.push(self.bytes.len());
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// A string; an empty one for a number that is not below [`len`](Self::len).
    #[inline]
    pub fn get(&self, number: usize) -> &[u8] {
        let start = number.checked_sub(1).map_or(0, |before| self.end(before));
        &self.bytes[start..self.end(number)]
    }

    fn end(&self, number: usize) -> usize {
        self.ends.get(number).copied().unwrap_or(self.bytes.len())
    }

    /// All strings, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|number| self.get(number))
    }

    /// All bytes, without the boundaries.
    #[doc(hidden)]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Frees the memory that further strings would take.
    #[doc(hidden)]
    pub fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.ends.shrink_to_fit();
    }

    /// Heap bytes.
    #[doc(hidden)]
    pub fn heap(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<usize>()
    }
}

impl<'s> Extend<&'s [u8]> for Strings {
    fn extend<I: IntoIterator<Item = &'s [u8]>>(&mut self, strings: I) {
        strings.into_iter().for_each(|string| self.push(string));
    }
}

impl<'s> FromIterator<&'s [u8]> for Strings {
    fn from_iter<I: IntoIterator<Item = &'s [u8]>>(strings: I) -> Self {
        let mut all = Self::new();
        all.extend(strings);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_keep_their_boundaries() {
        let given: [&[u8]; 5] = [b"", b"ab", b"", b"c", b""];
        let strings: Strings = given.into_iter().collect();
        assert_eq!((strings.len(), strings.bytes()), (5, &b"abc"[..]));
        assert!(strings.iter().eq(given));
        assert_eq!(strings.get(5), b"");
        assert_eq!(Strings::new().get(0), b"");
    }
}
