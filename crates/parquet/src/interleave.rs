//! Interleaves columns into rows. Pure.

use super::column::TOGETHER;

/// Writes up to 16 columns side by side into `rows`. Values have `width` bytes, of which the low
/// `keep` are taken (1, 2, 4, 8 or all): row *r* of column *c* goes to
/// `rows[r × row_bytes + at + c × keep]`.
///
/// Every column has at least as many values as there are rows.
pub(super) fn interleave(
    columns: &[&[u8]],
    width: usize,
    keep: usize,
    rows: &mut [u8],
    row_bytes: usize,
    at: usize,
) {
    debug_assert!(columns.len() <= TOGETHER);
    if columns.len() == 1 && keep == width && row_bytes == width {
        let len = rows.len();
        return rows.copy_from_slice(&columns[0][..len]);
    }
    match (columns.len(), width, keep) {
        (TOGETHER, 4, 4) => lines::<4>(columns, rows, row_bytes, at),
        (TOGETHER, 8, 8) => lines::<8>(columns, rows, row_bytes, at),
        (TOGETHER, 2, 2) => lines::<2>(columns, rows, row_bytes, at),
        _ => each(columns, width, keep, rows, row_bytes, at),
    }
}

/// Sixteen columns of `W` bytes: constant sizes let the compiler unroll the loop. (Transposing
/// blocks of sixteen rows in registers or on the stack was tried: slower by 8 and by 40 %.)
fn lines<const W: usize>(columns: &[&[u8]], rows: &mut [u8], row_bytes: usize, at: usize) {
    let count = rows.len() / row_bytes;
    let columns: [&[[u8; W]]; TOGETHER] =
        std::array::from_fn(|column| &columns[column].as_chunks::<W>().0[..count]);
    for (number, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
        let line = &mut row[at..at + TOGETHER * W];
        for (place, column) in line.as_chunks_mut::<W>().0.iter_mut().zip(&columns) {
            *place = column[number];
        }
    }
}

fn each(
    columns: &[&[u8]],
    width: usize,
    keep: usize,
    rows: &mut [u8],
    row_bytes: usize,
    at: usize,
) {
    for (number, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
        for (index, column) in columns.iter().enumerate() {
            let value = &column[number * width..][..keep];
            row[at + index * keep..][..keep].copy_from_slice(value);
        }
    }
}

/// Like [`interleave`], for lists of `elements` values that are narrowed. This case is rare, so
/// values are copied one at a time.
pub(super) fn narrow(
    columns: &[&[u8]],
    width: usize,
    keep: usize,
    elements: usize,
    rows: &mut [u8],
    row_bytes: usize,
    at: usize,
) {
    for (number, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
        for (index, column) in columns.iter().enumerate() {
            let list = &column[number * width * elements..][..width * elements];
            let out = &mut row[at + index * keep * elements..][..keep * elements];
            for (value, place) in list.chunks_exact(width).zip(out.chunks_exact_mut(keep)) {
                place.copy_from_slice(&value[..keep]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_hold_the_values_of_their_columns(
            count in 0_usize..70, columns in 1_usize..17, width in prop::sample::select(vec![1_usize, 2, 4, 8, 12]),
            narrow in any::<bool>(), before in 0_usize..9, after in 0_usize..9
        ) {
            let keep = if narrow { 1 } else { width };
            let data: Vec<Vec<u8>> =
                (0..columns).map(|c| (0..count * width).map(|i| (i * 7 + c * 31) as u8).collect()).collect();
            let row_bytes = before + columns * keep + after;
            let mut rows = vec![0xee; count * row_bytes];
            let slices: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            interleave(&slices, width, keep, &mut rows, row_bytes, before);
            for r in 0..count {
                for c in 0..columns {
                    for b in 0..keep {
                        prop_assert_eq!(rows[r * row_bytes + before + c * keep + b], data[c][r * width + b]);
                    }
                }
                prop_assert!(rows[r * row_bytes..][..before].iter().all(|byte| *byte == 0xee));
                prop_assert!(rows[r * row_bytes + before + columns * keep..][..after].iter().all(|byte| *byte == 0xee));
            }
        }
    }
}
