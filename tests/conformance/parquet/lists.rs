//! Lists of byte arrays and of structures with bytes, as several writers store them
//! (`fixtures/make_parquet_lists.py`).

use super::fixture;
use crate::common::{assert_says, must_fail};
use feedline::dataset::{Nulls, Parquet, ParquetBuilder};
use feedline::decode::{Bytes, Each};
use feedline::{Batch, ErrorKind, Loader, Order, Result};

const ROWS: u64 = 60;
/// Most bytes of an element.
const MOST: usize = 48;

fn elements(row: u64) -> Vec<Vec<u8>> {
    (0..row % 4)
        .map(|k| {
            format!("row {} element {k}", row % 7)
                .repeat(k as usize + 1)
                .into()
        })
        .collect()
}

fn file(name: &str) -> std::path::PathBuf {
    fixture("lists").join(format!("{name}.parquet"))
}

/// The elements of a row.
fn got(batch: &Batch, name: &str, row: usize) -> Vec<Vec<u8>> {
    let field = batch.field(name).unwrap();
    let max = field.shape()[1];
    let bytes = &field.as_slice::<u8>().unwrap()[row * max * MOST..][..max * MOST];
    let sizes = batch.field(&format!("{name}.sizes")).unwrap();
    let sizes = &sizes.as_slice::<i64>().unwrap()[row * max..][..max];
    let count = field.lens().unwrap()[row] as usize;
    assert!(bytes[count * MOST..].iter().all(|byte| *byte == 0));
    let row = bytes.chunks(MOST).zip(sizes);
    row.take(count)
        .map(|(element, size)| element[..*size as usize].to_vec())
        .collect()
}

fn read(builder: ParquetBuilder, name: &str, fields: &[&str], order: Order) -> Result<Vec<Batch>> {
    let loader = Loader::builder(builder.open(file(name))?)
        .batch_size(8)
        .order(order);
    let loader = fields.iter().fold(loader, |loader, field| {
        loader.decode_field(field, Each::new(Bytes::up_to(MOST)))
    });
    let loader = loader.build()?;
    loader.epoch(0)?.collect()
}

#[test]
fn lists_of_every_writer_are_read_as_they_were_written() {
    let lists = || {
        let builder = Parquet::builder().column("label");
        builder
            .list("texts", 3)
            .list("blobs", 3)
            .images("images", 3)
    };
    for name in [
        "dictionary",
        "dictionary-v2",
        "no-sizes",
        "plain",
        "items",
        "prefixes-1.0",
        "prefixes-2.0",
        "pages",
        "polars",
        "duckdb",
    ] {
        for (chunk_bytes, order) in [
            (1 << 30, Order::sequential()),
            (1000, Order::sequential()),
            (1000, Order::windowed(1, 2)),
        ] {
            let fields = ["texts", "blobs", "images"];
            let builder = lists().chunk_bytes(chunk_bytes);
            let mut rows = 0;
            for batch in read(builder, name, &fields, order).unwrap() {
                for row in 0..batch.valid() {
                    let id = batch.ids()[row];
                    for field in fields {
                        assert_eq!(got(&batch, field, row), elements(id), "{name} {field} {id}");
                    }
                    rows += 1;
                }
            }
            assert_eq!(rows, ROWS, "{name}");
        }
    }
}

#[test]
fn a_dictionary_entry_is_copied_for_each_element_that_refers_to_it() {
    let dataset = Parquet::builder()
        .list("blobs", 3)
        .open(file("repeats"))
        .unwrap();
    let loader = Loader::builder(dataset).decode_field("blobs", Each::new(Bytes::up_to(500)));
    for batch in loader.build().unwrap().epoch(0).unwrap() {
        let batch = batch.unwrap();
        let sizes = batch.field("blobs.sizes").unwrap();
        for sizes in sizes
            .as_slice::<i64>()
            .unwrap()
            .chunks(3)
            .take(batch.valid())
        {
            assert_eq!(sizes, [500, 40, 500]);
        }
    }
}

#[test]
fn a_list_that_is_too_long_is_an_error_of_its_sample() {
    let builder = Parquet::builder().images("images", 2);
    let error = read(builder, "plain", &["images"], Order::sequential());
    let error = must_fail(
        error,
        ErrorKind::Shape,
        "list `images` has 3 elements, the limit is 2",
    );
    assert_eq!(error.site().sample, Some(3));
}

#[test]
fn nulls_follow_the_policy_and_empty_lists_are_read() {
    for (column, nulls, words) in [
        ("list", Nulls::Error, "row 5 of the row group is null"),
        ("list", Nulls::Zero, ""),
        ("within", Nulls::Error, "a null within the list of row 6"),
        ("within", Nulls::Zero, "a null within the list of row 6"),
        ("empty", Nulls::Error, ""),
    ] {
        let builder = Parquet::builder().list(column, 3).nulls(nulls);
        match read(builder, "nulls", &[column], Order::sequential()) {
            Err(error) => assert_says(error, words),
            Ok(batches) => {
                assert!(words.is_empty(), "{column}");
                let fifth = got(&batches[0], column, 5);
                assert!(fifth.is_empty(), "{column}");
            }
        }
    }
}

#[test]
fn a_list_without_a_maximum_is_refused_with_a_way_out() {
    let ways = "lists of byte arrays need a maximum number of elements: give it with `images or \
                list`; choose other columns with `column`";
    for (builder, words) in [
        (Parquet::builder(), ways),
        (Parquet::builder().column("images"), ways),
        (Parquet::builder().image("images"), ways),
        (Parquet::builder().up_to("texts", 3), ways),
        (
            Parquet::builder().list("label", 3),
            "`images or list` is for lists of byte arrays",
        ),
    ] {
        must_fail(builder.open(file("plain")), ErrorKind::Config, words);
    }
    let others = Parquet::builder()
        .skip_unsupported(true)
        .open(file("plain"))
        .unwrap();
    assert_says(format!("{others:?}"), "left out: column `texts`");
    let exact = Parquet::builder().images("images.list.element.bytes", 3);
    assert!(exact.open(file("plain")).is_ok());
}
