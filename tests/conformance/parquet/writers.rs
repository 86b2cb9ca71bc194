//! Files of several writers, value by value against pyarrow's values
//! (`fixtures/make_parquet_writers.py`).

use super::fixture;
use crate::common::{assert_says, must_fail};
use feedline::dataset::{Dataset, DatasetExt, Nulls, Parquet, ParquetBuilder};
use feedline::decode::Bytes;
use feedline::{ErrorKind, Loader, LoaderBuilder, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A column's expected content, or the words of its refusal.
struct Column<'v> {
    name: &'v str,
    /// The builder call for the column.
    asked: &'v Value,
    holds: Option<&'v Value>,
    refused: &'v str,
}

impl Column<'_> {
    fn add(&self, builder: ParquetBuilder) -> ParquetBuilder {
        match self.asked["max"].as_u64() {
            Some(max) if self.asked["how"] == "up_to" => builder.up_to(self.name, max as usize),
            _ => builder.column(self.name),
        }
    }

    /// Maximum bytes of a value in a column of byte arrays.
    fn bytes(&self) -> Option<usize> {
        let bytes = self.asked["stored"] == "BYTE_ARRAY";
        self.asked["max"]
            .as_u64()
            .filter(|_| bytes)
            .map(|max| max as usize)
    }

    /// The bytes of a row; `None` for null.
    fn row(&self, row: usize) -> Option<String> {
        let holds = self.holds?;
        let number = usize::try_from(holds["rows"][row].as_i64()?).ok()?;
        holds["values"][number].as_str().map(String::from)
    }

    fn rows(&self) -> usize {
        self.holds
            .and_then(|holds| holds["rows"].as_array())
            .map_or(0, Vec::len)
    }

    fn first_null(&self) -> Option<usize> {
        (0..self.rows()).find(|row| self.row(*row).is_none())
    }
}

/// Rows of each column of `builder`'s file as hexadecimal digits.
fn read(builder: ParquetBuilder, path: &Path) -> Result<Vec<Vec<String>>> {
    read_decoded(builder, path, &[])
}

/// The same; byte arrays taken by `.column(name)`, not by `.up_to(name, max)`, go through a
/// decoder.
fn read_decoded(
    builder: ParquetBuilder,
    path: &Path,
    decoded: &[(&str, usize)],
) -> Result<Vec<Vec<String>>> {
    let dataset = builder.open(path)?;
    let mut columns = vec![Vec::new(); dataset.schema().len()];
    let loader = Loader::builder(dataset)
        .batch_size(64)
        .workers(1)
        .tuning(|t| t.slots(2));
    let decode = |loader: LoaderBuilder, (name, max): &(&str, usize)| {
        loader.decode_field(name, Bytes::up_to(*max))
    };
    let loader = decoded.iter().fold(loader, decode).build()?;
    for batch in loader.epoch(0)? {
        let batch = batch?;
        for (rows, field) in columns.iter_mut().zip(batch.fields()) {
            let bytes = field.as_bytes()?;
            let lens = field.lens();
            let stride = bytes.len() / batch.len();
            let element = lens.map_or(0, |_| {
                stride / field.shape()[1..].iter().product::<usize>().max(1)
            });
            for row in 0..batch.len() {
                let len = lens.map_or(stride, |lens| lens[row] as usize * element);
                rows.push(
                    bytes[row * stride..][..len]
                        .iter()
                        .map(|byte| format!("{byte:02x}"))
                        .collect(),
                );
            }
        }
    }
    Ok(columns)
}

/// The first row that differs from pyarrow's; a null is zeros or nothing.
fn difference(column: &Column<'_>, rows: &[String]) -> Option<String> {
    if rows.len() != column.rows() {
        return Some(format!(
            "{} rows, pyarrow reads {}",
            rows.len(),
            column.rows()
        ));
    }
    (0..rows.len()).find_map(|row| {
        let here = &rows[row];
        let same = column.row(row).map_or_else(
            || here.bytes().all(|digit| digit == b'0'),
            |there| there == *here,
        );
        (!same).then(|| format!("row {row} is {here:?}, pyarrow reads {:?}", column.row(row)))
    })
}

/// Result for a column: read with pyarrow's values, or refused for this reason; `Err` describes a
/// difference.
type Outcome = std::result::Result<Option<String>, String>;

fn judge(column: &Column<'_>, path: &Path) -> Outcome {
    let wanted = || column.add(Parquet::builder());
    match (read(wanted().nulls(Nulls::Zero), path), column.holds) {
        (Err(error), _) if error.kind() == ErrorKind::Panicked => return Err(error.to_string()),
        (Err(error), None) if error.to_string().contains(column.refused) => {
            return Ok(Some(error.to_string()));
        }
        (Err(error), _) => return Err(format!("refused: {error}")),
        (Ok(_), None) if column.refused.is_empty() => return Ok(None),
        (Ok(_), None) => {
            return Err(format!(
                "read, though refused because of {:?}",
                column.refused
            ));
        }
        (Ok(rows), Some(_)) => difference(column, &rows[0]).map_or(Ok(()), Err)?,
    }
    let Some(row) = column.first_null() else {
        return Ok(None);
    };
    match read(wanted(), path) {
        Err(error) if error.to_string().contains(" of the row group is null") => Ok(None),
        Err(error) => Err(format!("row {row} is null: {error}")),
        Ok(_) => Err(format!("row {row} is null, and nobody said so")),
    }
}

/// Reads all columns of a file one by one, and the supported ones together.
fn judge_file(columns: &[Column<'_>], path: &Path) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = columns.iter().map(|column| judge(column, path)).collect();
    let readable: Vec<_> = columns
        .iter()
        .filter(|column| column.holds.is_some())
        .collect();
    for some in readable.chunks(64) {
        let all =
            some.iter().fold(
                Parquet::builder().nulls(Nulls::Zero),
                |builder, column| match column.bytes() {
                    Some(_) => builder.column(column.name),
                    None => column.add(builder),
                },
            );
        let decoded: Vec<_> = some
            .iter()
            .filter_map(|column| Some((column.name, column.bytes()?)))
            .collect();
        // Also in runs of rows, if the file has an offset index.
        for chunk_bytes in [1 << 30, 1000] {
            outcomes.push(
                match read_decoded(all.clone().chunk_bytes(chunk_bytes), path, &decoded) {
                    Err(error) => Err(format!("together: {error}")),
                    Ok(rows) => {
                        let differ = some
                            .iter()
                            .zip(&rows)
                            .find_map(|(column, rows)| difference(column, rows));
                        differ.map_or(Ok(None), |words| {
                            Err(format!("together, in chunks of {chunk_bytes}: {words}"))
                        })
                    }
                },
            );
        }
    }
    outcomes
}

/// Compares all files of `folder` that `expected` names and prints a table. Gives the differences,
/// and the counts of columns that were read and refused.
fn compare(folder: &Path, expected: &Path) -> (Vec<String>, usize, usize) {
    let expected: Value = serde_json::from_slice(&std::fs::read(expected).unwrap()).unwrap();
    let files: BTreeMap<String, BTreeMap<String, Value>> =
        serde_json::from_value(expected["files"].clone()).unwrap();
    assert!(!files.is_empty());
    let mut wrong = Vec::new();
    let mut equal = 0;
    let mut refused = 0;
    for (file, columns) in &files {
        let named = columns.iter().filter(|(name, _)| !name.is_empty());
        let list: Vec<_> = named
            .map(|(name, value)| Column {
                name,
                asked: value
                    .as_u64()
                    .map_or(value, |number| &expected["pool"][number as usize]),
                holds: value
                    .as_u64()
                    .map(|number| &expected["pool"][number as usize]),
                refused: value["refused"][0].as_str().unwrap_or(""),
            })
            .collect();
        let path = folder.join(file);
        let outcomes = if list.is_empty() {
            vec![unreadable(
                &path,
                columns[""]["refused"][0].as_str().unwrap_or(""),
            )]
        } else {
            judge_file(&list, &path)
        };
        let mut read = 0;
        let mut reasons = Vec::new();
        for (index, outcome) in outcomes.into_iter().enumerate() {
            let name = list.get(index).map_or("", |column| column.name);
            match outcome {
                Ok(None) => read += usize::from(index < list.len()),
                Ok(Some(reason)) => {
                    reasons.push(reason.split(": path=").next().unwrap_or("").to_string())
                }
                Err(words) => wrong.push(format!("{file} {name}: {words}")),
            }
        }
        println!("{file:<56} {read:>3} equal, {:>2} refused", reasons.len());
        reasons.iter().for_each(|reason| println!("    {reason}"));
        equal += read;
        refused += reasons.len();
    }
    (wrong, equal, refused)
}

/// A file that pyarrow refuses: it is read completely, or it is an error.
fn unreadable(path: &Path, words: &str) -> Outcome {
    match read(Parquet::builder().nulls(Nulls::Zero), path) {
        Err(error) if error.kind() == ErrorKind::Panicked || !error.to_string().contains(words) => {
            Err(format!(
                "refused for another reason than {words:?}: {error}"
            ))
        }
        Err(error) => Ok(Some(error.to_string())),
        Ok(_) => Ok(None),
    }
}

#[test]
fn every_writers_file_is_read_as_pyarrow_reads_it() {
    let (wrong, equal, refused) = compare(&fixture("writers"), &fixture("writers/expected.json"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        equal > 300 && refused > 10,
        "{equal} equal, {refused} refused"
    );
}

/// `.ci/parquet` sets a folder of arbitrary files whose `expected.json` has pyarrow's values.
#[test]
fn files_of_a_named_folder_are_read_as_pyarrow_reads_them() {
    let Some(folder) = std::env::var_os("FEEDLINE_PARQUET_FILES") else {
        return;
    };
    let folder = Path::new(&folder);
    let (wrong, equal, refused) = compare(folder, &folder.join("expected.json"));
    println!(
        "{equal} columns equal, {refused} refused, {} wrong",
        wrong.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Result of reading a changed copy of a polars file.
fn refusal(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = std::fs::read(fixture("writers/repeated-polars.parquet")).unwrap();
    change(&mut bytes);
    let read = || {
        let dataset = Parquet::builder().up_to("name", 64).open_bytes(bytes)?;
        Loader::builder(dataset)
            .batch_size(64)
            .build()?
            .epoch(0)?
            .try_for_each(|batch| batch.map(drop))
    };
    read().unwrap_err().to_string()
}

#[test]
fn a_page_without_its_dictionary_is_refused() {
    let error = refusal(|bytes| {
        assert_eq!(
            bytes[4..6],
            [0x15, 0x04],
            "the kind of the first page: a dictionary"
        );
        bytes[5] = 0x08;
    });
    assert_says(
        &error,
        "a page refers to a dictionary, but the column chunk has none before it",
    );
}

#[test]
fn a_footer_with_another_row_count_is_refused() {
    let error = refusal(|bytes| {
        let rows = [0x16, 0xb0, 0x09, 0x19, 0x1c];
        let at = bytes
            .windows(rows.len())
            .rposition(|window| window == rows)
            .unwrap();
        bytes[at + 1] = 0xb2;
    });
    assert_says(&error, "the footer counts 601 rows, its row groups 600");
}

/// A zigzag number of thrift.
fn zigzag(number: u64) -> Vec<u8> {
    let mut rest = number << 1;
    let mut out = Vec::new();
    while rest > 0x7f {
        out.push(rest as u8 & 0x7f | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
    out
}

/// A column of repeated strings by this writer. `uncounted` says whether the footer leaves the
/// dictionary's header out.
fn by_writer(writer: &str, uncounted: bool) -> Vec<u8> {
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    let schema =
        parquet::schema::parser::parse_message_type("message m { required binary name; }").unwrap();
    let properties = WriterProperties::builder()
        .set_created_by(writer.into())
        .build();
    let mut bytes = Vec::new();
    let mut file = SerializedFileWriter::new(&mut bytes, schema.into(), properties.into()).unwrap();
    let mut group = file.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = (0..300)
        .map(|row| ByteArray::from(format!("name {}", row % 7).into_bytes()))
        .collect();
    column
        .typed::<ByteArrayType>()
        .write_batch(&values, None, None)
        .unwrap();
    column.close().unwrap();
    group.close().unwrap();
    let meta = file.close().unwrap();
    if uncounted {
        let column = meta.row_group(0).column(0);
        assert_eq!(column.compressed_size(), column.uncompressed_size());
        let size = column.compressed_size() as u64;
        // The header ends where the first value begins, with its length.
        let first = bytes
            .windows(6)
            .position(|bytes| bytes == b"name 0")
            .unwrap();
        let header = (first - 4 - column.dictionary_page_offset().unwrap() as usize) as u64;
        let said = zigzag(size);
        let wrong = zigzag(size - header);
        assert_eq!(said.len(), wrong.len());
        let footer = bytes.len()
            - 8
            - u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().unwrap()) as usize;
        // Field 6 and field 7 of the column's metadata, one after the other.
        let both = |size: &[u8]| [&[0x16], size, &[0x16], size].concat();
        let at = footer
            + bytes[footer..]
                .windows(both(&said).len())
                .position(|bytes| bytes == both(&said))
                .unwrap();
        bytes[at..][..both(&wrong).len()].copy_from_slice(&both(&wrong));
    }
    bytes
}

#[test]
fn a_dictionary_header_that_is_not_counted_is_read() {
    let names = |bytes: Vec<u8>| -> Result<Vec<u8>> {
        let dataset = Parquet::builder().up_to("name", 6).open_bytes(bytes)?;
        let loader = Loader::builder(dataset)
            .order(feedline::Order::sequential())
            .batch_size(300)
            .build()?;
        let batch = loader.epoch(0)?.next().unwrap()?;
        Ok(batch.field("name")?.as_slice::<u8>()?.to_vec())
    };
    let right: Vec<u8> = (0..300)
        .flat_map(|row| format!("name {}", row % 7).into_bytes())
        .collect();
    for (writer, uncounted) in [
        ("parquet-rs", false),
        ("parquet-mr version 1.12.3 (build f8dced182c)", false),
        ("parquet-mr", false),
        ("parquet-mr", true),
        ("parquet-mr version 1.2.8 (build 1)", true),
        ("parquet-mr version 1.2 (build 1)", true),
    ] {
        assert_eq!(
            names(by_writer(writer, uncounted)).unwrap(),
            right,
            "{writer}"
        );
    }
    for writer in [
        "parquet-rs",
        "parquet-mr version 1.2.9 (build 1)",
        "parquet-mr version 1.12.3",
    ] {
        let error = names(by_writer(writer, true)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Truncated, "{writer}: {error}");
    }
}

/// Rows of a folder's columns that all pairs have, and of the list unless a file lacks it.
fn pair(folder: &Path, lists: bool) -> Result<Vec<Vec<String>>> {
    let builder = Parquet::builder().columns(["a", "x", "t"]).up_to("s", 4);
    read(
        if lists {
            builder.up_to("l", 3)
        } else {
            builder
        },
        folder,
    )
}

#[test]
fn files_of_any_two_writers_with_equal_values_are_one_dataset() {
    let files: Vec<_> = std::fs::read_dir(fixture("pairs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(files.len(), 10);
    for (first, second) in files
        .iter()
        .flat_map(|first| files.iter().map(move |second| (first, second)))
    {
        let dir = crate::common::Dir::new();
        for (name, file) in ["0.parquet", "1.PQ"].iter().zip([first, second]) {
            dir.write(&format!("set/{name}"), &std::fs::read(file).unwrap());
        }
        let lists = ![first, second]
            .iter()
            .any(|file| file.ends_with("fastparquet.parquet"));
        let expected: Vec<_> = pair(&fixture("pairs/pyarrow.parquet"), lists)
            .unwrap()
            .iter()
            .map(|rows| [&rows[..], &rows[..]].concat())
            .collect();
        let rows = pair(&dir.path("set"), lists)
            .unwrap_or_else(|error| panic!("{first:?}, {second:?}: {error}"));
        assert_eq!(rows, expected, "{first:?}, {second:?}");
    }
}

/// A footer whose schema is `columns`, each the fields of an element behind its name, on the pages
/// of a real file.
pub(super) fn annotated(columns: &str, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    use parquet::data_type::Int32Type;
    use parquet::file::writer::SerializedFileWriter;
    let schema = parquet::schema::parser::parse_message_type(columns).unwrap();
    let mut bytes = Vec::new();
    let mut file =
        SerializedFileWriter::new(&mut bytes, schema.into(), Default::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    while let Some(mut column) = group.next_column().unwrap() {
        let levels = [1, 1];
        column
            .typed::<Int32Type>()
            .write_batch(&[7, 8], Some(&levels), None)
            .unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    file.close().unwrap();
    change(&mut bytes);
    bytes
}

#[test]
fn a_column_with_an_odd_annotation_harms_no_other() {
    let schema = "message m { required int32 odd (DATE); required int32 good (UINT_8); }";
    // The number of the converted type behind the name: DATE becomes the one that parquet-cpp 1.3
    // had for nulls.
    let odd = |bytes: &mut Vec<u8>| {
        let at = bytes
            .windows(5)
            .rposition(|window| window == b"odd\x25\x0c")
            .unwrap();
        bytes[at + 4] = 48;
    };
    let bytes = annotated(schema, odd);
    assert!(
        parquet::file::metadata::ParquetMetaDataReader::new()
            .parse_and_finish(&bytes::Bytes::from(bytes.clone()))
            .is_err()
    );
    let dataset = Parquet::builder()
        .column("good")
        .open_bytes(bytes.clone())
        .unwrap();
    assert_eq!(
        dataset.schema()[0].as_raw().unwrap().dtype(),
        feedline::tensor::DType::U8,
        "its annotation stays"
    );
    let loader = Loader::builder(dataset).batch_size(2).build().unwrap();
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.field("good").unwrap().as_bytes().unwrap(), [7, 8]);
    must_fail(
        Parquet::builder().column("odd").open_bytes(bytes),
        ErrorKind::Config,
        "`odd`",
    );
}

#[test]
fn a_column_of_another_type_is_an_error_with_both_types() {
    let dir = crate::common::Dir::new();
    let types = ["INT_32", "DATE", "UINT_8", "TIME_MILLIS"];
    for (number, of) in types.iter().enumerate() {
        dir.write(
            &format!("{number}.parquet"),
            &annotated(&format!("message m {{ optional int32 a ({of}); }}"), |_| {}),
        );
    }
    for (first, second) in [(0, 1), (0, 2), (1, 3)] {
        let files = dir.path(&format!("{{{first},{second}}}.parquet"));
        let error = Parquet::open(files).unwrap_err();
        let path = dir.path(&format!("{second}.parquet"));
        assert_eq!(
            (error.kind(), error.site().path.as_deref()),
            (ErrorKind::Shape, Some(&*path)),
            "{error}"
        );
        let (_, words) = error.message().split_once("column `a` is ").unwrap();
        let (here, there) = words.split_once(" here, ").unwrap();
        assert_ne!(
            here,
            there.strip_suffix(" in the first file").unwrap(),
            "{error}"
        );
    }
}

#[test]
fn the_longest_row_of_each_column_of_bytes_is_found() {
    let texts = Parquet::open(fixture("writers/repeated-polars.parquet")).unwrap();
    let bytes: Vec<_> = texts
        .schema()
        .iter()
        .enumerate()
        .filter(|(_, field)| field.as_raw().is_none())
        .collect();
    assert!(!bytes.is_empty());
    for (number, field) in bytes {
        let loader = |most: u64| {
            let one = Parquet::builder()
                .column(&field.name)
                .open(fixture("writers/repeated-polars.parquet"))
                .unwrap();
            Loader::builder(one)
                .decode(Bytes::up_to(most as usize))
                .build()
                .unwrap()
        };
        let most = texts.field_bytes_max(number).unwrap();
        assert!(loader(most).epoch(0).unwrap().all(|batch| batch.is_ok()));
        assert!(
            loader(most - 1)
                .epoch(0)
                .unwrap()
                .any(|batch| batch.is_err()),
            "{most} is not the least"
        );
    }
}
