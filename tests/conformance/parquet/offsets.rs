//! Offset indexes that lie: files written by pyarrow (`pages/` of `fixtures/make_parquet.py`),
//! whose rows follow from their numbers, and which pyarrow reads without the index.

use super::*;
use bytes::Bytes;
use parquet::file::metadata::{
    PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader, ParquetMetaDataWriter,
};

/// Offset, size and first row of each page of a column.
type Index = Vec<[i64; 3]>;

const FILES: [&str; 7] = [
    "none-v1",
    "snappy-v1",
    "gzip-v1",
    "lz4-v1",
    "zstd-v1",
    "required-v1",
    "zstd-v2",
];

fn zigzag(number: i64, out: &mut Vec<u8>) {
    let mut left = ((number << 1) ^ (number >> 63)) as u64;
    while left >= 0x80 {
        out.push(left as u8 | 0x80);
        left >>= 7;
    }
    out.push(left as u8);
}

/// An `OffsetIndex` in thrift's compact protocol.
fn encoded(index: &Index, payloads: Option<&[i64]>) -> Vec<u8> {
    let list = |of: u8, len: usize| [0xf0 | of, len as u8 | 0x80, (len >> 7) as u8];
    let mut out = vec![0x19];
    out.extend(list(12, index.len()));
    for page in index {
        for (kind, number) in [0x16, 0x15, 0x16].into_iter().zip(page) {
            out.push(kind);
            zigzag(*number, &mut out);
        }
        out.push(0);
    }
    if let Some(payloads) = payloads {
        out.push(0x19);
        out.extend(list(6, payloads.len()));
        payloads.iter().for_each(|bytes| zigzag(*bytes, &mut out));
    }
    out.push(0);
    out
}

/// The file with other offset indexes behind its pages: `edit` gets the number of a column, its
/// index, and the bytes of its byte arrays; `bytes` then gets the encoded index.
fn with_indexes(
    file: &[u8],
    edit: impl Fn(usize, &mut Index, &mut [i64]),
    bytes: impl Fn(usize, &mut Vec<u8>),
) -> Vec<u8> {
    let reader = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Required);
    let meta = reader
        .parse_and_finish(&Bytes::copy_from_slice(file))
        .unwrap();
    let mut out = file.to_vec();
    let groups = meta.row_groups().iter().enumerate().map(|(number, group)| {
        let indexes = meta.page_index_for_row_group(number);
        let columns = group.columns().iter().enumerate().map(|(column, chunk)| {
            let was = indexes.offset_index(column).unwrap();
            let pages = was.page_locations().iter();
            let mut index = pages
                .map(|page| {
                    [
                        page.offset,
                        i64::from(page.compressed_page_size),
                        page.first_row_index,
                    ]
                })
                .collect();
            let mut payloads = was.unencoded_byte_array_data_bytes().cloned();
            edit(
                column,
                &mut index,
                payloads.as_deref_mut().unwrap_or_default(),
            );
            let mut new = encoded(&index, payloads.as_deref());
            bytes(column, &mut new);
            let offset = out.len() as i64;
            let len = new.len() as i32;
            out.extend(new);
            let chunk = chunk
                .clone()
                .into_builder()
                .set_column_index_offset(None)
                .set_column_index_length(None);
            chunk
                .set_offset_index_offset(Some(offset))
                .set_offset_index_length(Some(len))
                .build()
                .unwrap()
        });
        let columns = columns.collect();
        group
            .clone()
            .into_builder()
            .set_column_metadata(columns)
            .build()
            .unwrap()
    });
    let groups = groups.collect();
    let meta = ParquetMetaData::new(meta.file_metadata().clone(), groups);
    ParquetMetaDataWriter::new(&mut out, &meta)
        .finish()
        .unwrap();
    out
}

/// Reads every row, in chunks as small as the index allows, and compares it with pyarrow's; gives
/// the description.
fn rows_are_right(bytes: &[u8], case: &str) -> String {
    let builder = Parquet::builder()
        .columns(["i64", "emb", "nul"])
        .nulls(Nulls::Zero)
        .chunk_bytes(900);
    let builder = builder
        .up_to("text", 12)
        .up_to("blob", 50)
        .up_to("tok", 5)
        .up_to("word", 3);
    let dataset = builder
        .open_bytes(bytes.to_vec())
        .unwrap_or_else(|error| panic!("{case}: {error}"));
    let said = dataset.describe();
    let loader = build(
        Loader::builder(dataset)
            .order(Order::windowed(3, 2))
            .workers(1)
            .batch_size(50),
    );
    let mut ids = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap_or_else(|error| panic!("{case}: {error}"));
        (0..batch.len()).for_each(|row| check_columns(&batch, row, true));
        let nul = batch.field("nul").unwrap().as_slice::<i32>().unwrap();
        for (id, nul) in batch.ids().iter().zip(nul) {
            assert_eq!(
                *nul,
                if id % 10 == 3 { 0 } else { *id as i32 },
                "{case}: row {id}"
            );
        }
        ids.extend_from_slice(batch.ids());
    }
    ids.sort_unstable();
    assert_eq!(ids, (0..ROWS).collect::<Vec<_>>(), "{case}");
    said
}

#[test]
fn no_row_follows_an_offset_index_that_the_pages_contradict() {
    type Damage = fn(&mut Index);
    let damages: [(&str, Damage); 20] = [
        ("begins with row", |index| index[0][2] = 4),
        ("row", |index| {
            index[1..].iter_mut().for_each(|page| page[2] += 4)
        }),
        ("rows, its header says", |index| {
            index[1..].iter_mut().for_each(|page| page[2] -= 1)
        }),
        ("begins with row", |index| {
            index.iter_mut().for_each(|page| page[2] += 1)
        }),
        ("rows, its header says", |index| index[5][2] += 1),
        ("rows, its header says", |index| index[7][2] = index[6][2]),
        ("rows, its header says", |index| {
            index.iter_mut().for_each(|page| page[2] /= 2)
        }),
        ("begins with row", |index| index[5][2] = 1000),
        ("negative", |index| index[5][2] = -1),
        ("begins with row", |index| {
            (index[5][2], index[6][2]) = (index[6][2], index[5][2])
        }),
        ("begins at byte", |index| index.swap(5, 6)),
        ("begins at byte", |index| {
            (index[5][0], index[6][0]) = (index[6][0], index[5][0])
        }),
        ("begins at byte", |index| {
            index.iter_mut().for_each(|page| page[1] -= 21)
        }),
        ("begins at byte", |index| {
            index.iter_mut().for_each(|page| page[1] += 21)
        }),
        ("begins at byte", |index| index[4][0] += 1),
        ("begin", |index| index[0][0] -= 1),
        ("the column at", |index| index.truncate(index.len() - 1)),
        ("the column at", |index| index.clear()),
        ("begins at byte", |index| index.push(index[0])),
        // Two pages are one: all rows, sizes and places follow each other.
        ("bytes, its header says", |index| {
            index[5][1] += index.remove(6)[1]
        }),
    ];
    for name in FILES {
        let file = std::fs::read(fixture(&format!("pages/{name}.parquet"))).unwrap();
        let whole = rows_are_right(&with_indexes(&file, |_, _, _| {}, |_, _| {}), name);
        assert!(
            !whole.contains(" in 2 chunks") && !whole.contains("index"),
            "{name}: {whole}"
        );
        for (words, damage) in damages {
            for columns in [0..1, 1..2, 2..3, 4..5, 6..7, 0..7] {
                let case = format!("{name}, {words}, columns {columns:?}");
                let said = rows_are_right(
                    &with_indexes(
                        &file,
                        |column, index, _| {
                            if columns.contains(&column) {
                                damage(index)
                            }
                        },
                        |_, _| {},
                    ),
                    &case,
                );
                assert!(
                    said.contains("2 row groups read whole") && said.contains(words),
                    "{case}: {said}"
                );
            }
        }
    }
}

#[test]
fn an_offset_index_that_cannot_be_read_is_none() {
    let file = std::fs::read(fixture("pages/zstd-v2.parquet")).unwrap();
    let damages: [fn(&mut Vec<u8>); 4] = [
        |bytes| bytes.truncate(bytes.len() - 3),
        |bytes| bytes.fill(0xff),
        |bytes| bytes.fill(0),
        |bytes| bytes[2] ^= 0x40,
    ];
    for damage in damages {
        let damaged = with_indexes(
            &file,
            |_, _, _| {},
            |column, bytes| {
                if column == 1 {
                    damage(bytes)
                }
            },
        );
        let said = rows_are_right(&damaged, "bytes of an index");
        assert_says(&said, "2 row groups read whole");
    }
    // Sizes of byte arrays are no reason to refuse a row, and none for memory.
    for bytes in [0, 1, i64::MAX, -1] {
        let damaged = with_indexes(&file, |_, _, payloads| payloads.fill(bytes), |_, _| {});
        assert!(
            !rows_are_right(&damaged, "sizes of byte arrays").contains("index"),
            "{bytes}"
        );
    }
}
