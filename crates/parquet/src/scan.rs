//! Sizes that neither the footer nor the index contains, read from the pages themselves when a file
//! is opened.
//!
//! Used for columns whose values may exceed their unpacked pages (`DELTA_BYTE_ARRAY` stores only a
//! value's difference from the value before; lists may repeat a dictionary's entries), and for files whose writer omitted the sizes. `None`
//! means malformed pages: opening the chunk reports the damage.

use super::column::{ValuePlace, levels_v1, rep_levels_v1};
use super::page::{DELTA_BYTE_ARRAY, Header, PLAIN_DICTIONARY, PageKind, RLE_DICTIONARY, Thrift};
use super::unpack::Codec;
use feedline_core::storage::Blob;
use parquet::basic::Compression;
use parquet::schema::types::ColumnDescPtr;

/// Bytes of the first read of a page header; statistics of long strings may make the header longer.
pub(super) const HEAD: u64 = 512;
pub(super) const HEAD_MAX: u64 = 1 << 20;

fn read(blob: &Blob, offset: u64, out: &mut Vec<u8>, len: u64) -> Option<()> {
    let len = usize::try_from(len).ok()?;
    out.clear();
    out.try_reserve_exact(len).ok()?;
    out.resize(len, 0);
    blob.read_at(offset, out).ok()
}

/// Reads the header at `offset`, with its length; at most `len` bytes follow `offset`.
fn header(blob: &Blob, offset: u64, len: u64, buffer: &mut Vec<u8>) -> Option<(Header, u64)> {
    let mut most = HEAD;
    loop {
        read(blob, offset, buffer, len.min(most))?;
        match Header::parse(buffer) {
            Ok((header, bytes)) => return Some((header, bytes as u64)),
            Err(_) if most < len.min(HEAD_MAX) => most = HEAD_MAX,
            Err(_) => return None,
        }
    }
}

/// Length of the dictionary's header, if the pages from `offset` on take exactly that many bytes
/// more than `len`.
pub(super) fn uncounted_header(blob: &Blob, offset: u64, len: u64) -> Option<u64> {
    let mut buffer = Vec::new();
    let (dictionary, uncounted) = header(blob, offset, len, &mut buffer)?;
    let mut end = uncounted.checked_add(dictionary.compressed as u64)?;
    while end < len {
        let (header, bytes) = header(blob, offset.checked_add(end)?, len - end, &mut buffer)?;
        end = end
            .checked_add(bytes)?
            .checked_add(header.compressed as u64)?;
    }
    (dictionary.kind == PageKind::Dictionary && end - len == uncounted).then_some(uncounted)
}

/// Total unpacked size of all pages in the `len` bytes from `offset`, including page headers.
pub(super) fn all_unpacked(blob: &Blob, offset: u64, len: u64) -> Option<u64> {
    let mut buffer = Vec::new();
    let mut end = 0;
    let mut sum = 0_u64;
    while end < len {
        let (header, bytes) = header(blob, offset.checked_add(end)?, len - end, &mut buffer)?;
        end = end
            .checked_add(bytes)?
            .checked_add(header.compressed as u64)?;
        sum = sum
            .checked_add(bytes)?
            .checked_add(header.uncompressed as u64)?;
    }
    Some(sum)
}

/// Maximum bytes of the byte arrays in the pages of `place`. Dictionary entries count only in lists,
/// where each value may be a copy of the longest entry.
pub(super) fn payload(blob: &Blob, descr: &ColumnDescPtr, place: &ValuePlace) -> Option<u64> {
    let mut buffer = Vec::new();
    let mut unpacked = Vec::new();
    let mut codec = Codec::default();
    let mut longest = 0;
    let mut room = place.uncompressed.saturating_add(place.unpacked_dictionary);
    let mut sum = 0_u64;
    let parts = place.dictionary.iter().chain([&place.data]);
    for (start, len) in parts.copied() {
        let mut at = start;
        let end = at.checked_add(len)?;
        while at < end {
            let (header, len) = header(blob, at, end - at, &mut buffer)?;
            let body = at + len;
            at = body
                .checked_add(header.compressed as u64)
                .filter(|next| *next <= end)?;
            room = room.checked_sub(header.uncompressed as u64)?;
            let is_dictionary = header.kind == PageKind::Dictionary;
            let is_prefix_coded = header.encoding == DELTA_BYTE_ARRAY;
            let is_list = descr.max_rep_level() > 0;
            let refers = is_list && [PLAIN_DICTIONARY, RLE_DICTIONARY].contains(&header.encoding);
            let is_read = if is_dictionary {
                is_list
            } else {
                is_prefix_coded
            };
            let mut values: &[u8] = &[];
            if is_read {
                read(blob, body, &mut buffer, header.compressed as u64)?;
                values = values_of(
                    &header,
                    descr,
                    place.compression,
                    &buffer,
                    &mut unpacked,
                    &mut codec,
                )?;
            }
            match header.kind {
                PageKind::Dictionary if is_read => longest = longest_of(values)?,
                PageKind::Dictionary | PageKind::Other => {}
                _ if refers => {
                    let most = longest.checked_mul(header.values as u64)?;
                    sum = sum.checked_add(most)?;
                }
                _ => sum = sum.checked_add(header.uncompressed as u64)?,
            }
            if is_prefix_coded && !is_dictionary {
                sum = sum.checked_add(delta_sum(values, header.values)?)?;
            }
        }
    }
    Some(sum)
}

/// Length of the longest byte array in a plain page.
fn longest_of(mut values: &[u8]) -> Option<u64> {
    let mut longest = 0;
    while let Some((len, rest)) = values.split_first_chunk::<4>() {
        let len = u32::from_le_bytes(*len);
        longest = longest.max(u64::from(len));
        values = rest.get(len as usize..)?;
    }
    Some(longest)
}

/// The values of a data page, unpacked, without the levels.
fn values_of<'p>(
    header: &Header,
    descr: &ColumnDescPtr,
    compression: Compression,
    body: &'p [u8],
    unpacked: &'p mut Vec<u8>,
    codec: &mut Codec,
) -> Option<&'p [u8]> {
    let (body, packed) = match header.kind {
        PageKind::DataV2 {
            def_bytes,
            rep_bytes,
            compressed,
            ..
        } => (
            body.get(def_bytes as usize + rep_bytes as usize..)?,
            compressed,
        ),
        _ => (body, true),
    };
    let page = if packed && compression != Compression::UNCOMPRESSED {
        let levels = if let PageKind::DataV2 {
            def_bytes,
            rep_bytes,
            ..
        } = header.kind
        {
            def_bytes + rep_bytes
        } else {
            0
        };
        unpacked.clear();
        let size = header.uncompressed.checked_sub(levels as usize)?;
        unpacked.try_reserve_exact(size).ok()?;
        unpacked.resize(size, 0);
        codec.unpack(compression, body, unpacked).ok()?;
        &unpacked[..]
    } else {
        body
    };
    let leveled = header.kind == PageKind::Data;
    let lists = leveled && descr.max_rep_level() > 0;
    let page = if lists {
        rep_levels_v1(header, page)?.1
    } else {
        page
    };
    if leveled && descr.max_def_level() > 0 {
        levels_v1(header, page).map(|(_, values)| values)
    } else {
        Some(page)
    }
}

/// Sum of the at most `most` non-negative numbers at the start of `bytes` in `DELTA_BINARY_PACKED`:
/// the lengths that values share with the values before them.
fn delta_sum(bytes: &[u8], most: usize) -> Option<u64> {
    let mut thrift = Thrift::new(bytes);
    let mut word = || {
        thrift
            .varint()
            .ok()
            .and_then(|word| usize::try_from(word).ok())
    };
    let block = word()?;
    let parts = word()?;
    let count = word()?;
    let mut value = thrift.zigzag().ok()?;
    if parts == 0 || !block.is_multiple_of(parts) || count > most {
        return None;
    }
    let each = block / parts;
    let mut left = count;
    let mut sum = 0_u64;
    let mut add = |value: i64| -> Option<()> {
        sum = sum.checked_add(u64::try_from(value).ok()?)?;
        Some(())
    };
    if left > 0 {
        add(value)?;
        left -= 1;
    }
    while left > 0 {
        let least = thrift.zigzag().ok()?;
        let widths = thrift.rest().get(..parts)?;
        thrift.skip(parts as u64).ok()?;
        for bits in widths.iter().map(|bits| usize::from(*bits)) {
            let here = left.min(each);
            let packed = thrift.rest();
            if bits > 64 || (here * bits).div_ceil(8) > packed.len() || (here == 0 && left > 0) {
                return None;
            }
            for number in 0..here {
                value = value
                    .wrapping_add(least)
                    .wrapping_add(unpacked(packed, number * bits, bits) as i64);
                add(value)?;
            }
            left -= here;
            thrift
                .skip((each.checked_mul(bits)? / 8).min(packed.len()) as u64)
                .ok()?;
        }
    }
    Some(sum)
}

/// Extracts the number of `bits` bits at bit `at`.
fn unpacked(packed: &[u8], at: usize, bits: usize) -> u64 {
    let end = (at + bits).div_ceil(8);
    let word = packed[at / 8..end]
        .iter()
        .rev()
        .fold(0_u128, |word, byte| word << 8 | u128::from(*byte));
    (word >> (at % 8) & ((1_u128 << bits) - 1)) as u64
}

#[cfg(test)]
mod tests {
    use super::super::page::tests::{varint, zigzag};
    use super::*;
    use proptest::prelude::*;

    /// Encodes `DELTA_BINARY_PACKED` as the format defines it: blocks of 128 numbers with 4 parts
    /// of 32.
    fn packed(numbers: &[i64]) -> Vec<u8> {
        let mut out = Vec::new();
        [128, 4, numbers.len() as u64]
            .into_iter()
            .for_each(|word| varint(word, &mut out));
        zigzag(numbers.first().copied().unwrap_or(0), &mut out);
        let deltas: Vec<i64> = numbers.windows(2).map(|pair| pair[1] - pair[0]).collect();
        for block in deltas.chunks(128) {
            let least = *block.iter().min().unwrap();
            zigzag(least, &mut out);
            let parts: Vec<&[i64]> = block.chunks(32).collect();
            let bits = |part: &[i64]| {
                part.iter()
                    .map(|delta| 64 - (delta - least).leading_zeros())
                    .max()
                    .unwrap_or(0)
            };
            out.extend((0..4).map(|part| parts.get(part).map_or(0, |part| bits(part)) as u8));
            for part in &parts {
                let width = bits(part) as usize;
                let mut bytes = vec![0_u8; 32 * width / 8];
                for (number, delta) in part.iter().enumerate() {
                    for bit in (0..width).filter(|bit| (delta - least) >> bit & 1 == 1) {
                        bytes[(number * width + bit) / 8] |= 1 << ((number * width + bit) % 8);
                    }
                }
                out.extend(bytes);
            }
        }
        out
    }

    proptest! {
        #[test]
        fn the_sum_equals_the_packed_numbers(
            numbers in prop::collection::vec(prop_oneof![0_i64..50, 0_i64..5_000_000], 0..400)
        ) {
            let bytes = packed(&numbers);
            prop_assert_eq!(delta_sum(&bytes, numbers.len()), Some(numbers.iter().sum::<i64>() as u64));
            prop_assert!(numbers.is_empty() || delta_sum(&bytes, numbers.len() - 1).is_none());
        }

        #[test]
        fn no_bytes_make_the_sum_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), most in 0_usize..500) {
            let _ = delta_sum(&bytes, most);
        }
    }
}
