//! Lengths known before reading are those of a naive pass: by the index, or by facts, through
//! every wrapper.

use crate::common::formats::tf_record;
use crate::common::runs::Data;
use crate::common::toys::{Chunks, head_len};
use crate::common::workloads::WORKLOADS;
use crate::common::{Dir, build, must_fail, must_say, noise, pull};
use feedline::dataset::{Concat, Dataset, DatasetExt, Megatron, TfRecord};
use feedline::tensor::{DType, EncodedField, Encoding, Field, Shape};
use feedline::unstable::fuzzing;
use feedline::{ErrorKind, Loader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

type Any = Arc<dyn Dataset>;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

/// Bytes of every field of every sample.
fn rows(dataset: &dyn Dataset) -> Vec<Vec<usize>> {
    let lens = |row: &Vec<Vec<u8>>| row.iter().map(Vec::len).collect();
    match dataset.chunked() {
        Some(chunks) => (0..chunks.starts().len() - 1)
            .flat_map(|chunk| {
                fuzzing::chunk(dataset, chunk)
                    .unwrap()
                    .iter()
                    .map(lens)
                    .collect::<Vec<_>>()
            })
            .collect(),
        None => (0..dataset.len())
            .map(|sample| lens(&fuzzing::sample(dataset, sample).unwrap()))
            .collect(),
    }
}

/// Bytes per element of the first dimension.
fn unit(field: &EncodedField) -> usize {
    match &field.encoding {
        Encoding::Raw {
            dtype,
            shape: Shape::UpTo { inner, .. },
        } => dtype.size() * inner.iter().product::<usize>(),
        Encoding::Raw {
            dtype,
            shape: Shape::Fixed(dims),
        } => dtype.size() * dims.iter().skip(1).product::<usize>(),
        _ => 1,
    }
}

/// Lengths of every field, by a naive pass.
fn naive(dataset: &dyn Dataset) -> Vec<Vec<u64>> {
    let rows = rows(dataset);
    dataset
        .schema()
        .iter()
        .enumerate()
        .map(|(number, field)| {
            rows.iter()
                .map(|row| (row[number] / unit(field)) as u64)
                .collect()
        })
        .collect()
}

fn lengths(dataset: &Any) -> Vec<Option<Vec<u64>>> {
    dataset
        .schema()
        .iter()
        .map(|field| dataset.lengths(&field.name).ok())
        .collect()
}

fn features(_: &Dir) -> Any {
    let builder = TfRecord::builder().index(false).image("image/encoded");
    let builder = builder.floats(Field::up_to("boxes", DType::F32, 12), "boxes");
    let builder = builder.ints(Field::fixed("label", DType::I64, []), "label");
    let builder = builder.ints(Field::up_to("ids", DType::I64, 11), "ids");
    Arc::new(builder.open(fixture("tfrecord/example.tfrecord")).unwrap())
}

fn documents(_: &Dir) -> Any {
    Arc::new(
        Megatron::builder()
            .documents(1000)
            .open(fixture("tokens/megatron-u16"))
            .unwrap(),
    )
}

#[cfg(feature = "parquet")]
fn lists(_: &Dir) -> Any {
    let builder = feedline::dataset::Parquet::builder()
        .columns(["i64", "emb"])
        .up_to("blob", 50)
        .up_to("tok", 5);
    Arc::new(
        builder
            .chunk_bytes(3000)
            .open(fixture("parquet/default.parquet"))
            .unwrap(),
    )
}

/// Samples of a number and a text: the only column without a fixed size.
fn texts(dir: &Dir) -> Any {
    let samples: Vec<Vec<u8>> = [7_u32, 0, 30, 4]
        .iter()
        .map(|len| [&len.to_le_bytes()[..], &[3; 8], &noise(*len as usize, 1)].concat())
        .collect();
    let mut offsets = vec![4 + 4 * (samples.len() as u32 + 1)];
    samples
        .iter()
        .for_each(|sample| offsets.push(offsets[offsets.len() - 1] + sample.len() as u32));
    let head = offsets.iter().flat_map(|offset| offset.to_le_bytes());
    let bytes = [
        (samples.len() as u32)
            .to_le_bytes()
            .into_iter()
            .chain(head)
            .collect(),
        samples.concat(),
    ]
    .concat();
    let index = format!(
        r#"{{"shards": [{{"column_encodings": ["int", "str"], "column_names": ["n", "text"], "column_sizes": [8, null],
        "compression": null, "format": "mds", "hashes": [], "raw_data": {{"basename": "0.mds", "bytes": {}, "hashes": {{}}}},
        "samples": {}, "size_limit": 1000, "version": 2, "zip_data": null}}], "version": 2}}"#,
        bytes.len(),
        samples.len(),
    );
    dir.write("texts/0.mds", &bytes);
    dir.write("texts/index.json", index.as_bytes());
    let texts: Any = Arc::new(feedline::dataset::Mds::open(dir.path("texts")).unwrap());
    assert_eq!(texts.lengths("text").unwrap(), [7, 0, 30, 4]);
    texts
}

fn ragged_chunks(dir: &Dir) -> Any {
    Data::chunks(dir, &[3, 5, 1, 4], true, false).toy.unwrap()
}

/// A dataset in a folder.
type Open = fn(&Dir) -> Any;

/// Every dataset of the tests, and those with fields of varying length.
fn all() -> Vec<(&'static str, Open)> {
    let mut all: Vec<(&str, Open)> = WORKLOADS
        .iter()
        .map(|workload| (workload.name, workload.open))
        .collect();
    all.extend([
        ("features", features as Open),
        ("documents", documents),
        ("texts", texts),
        ("ragged chunks", ragged_chunks),
    ]);
    #[cfg(feature = "parquet")]
    all.push(("lists", lists));
    all
}

#[test]
fn lengths_are_those_of_a_naive_pass_through_every_wrapper() {
    for (name, open) in all() {
        let dir = Dir::new();
        let dataset = open(&dir);
        let right = naive(&*dataset);
        let by_index = lengths(&dataset);
        let place = dir.path("lengths");
        let measured = dataset.clone().facts(&place).lengths().open().unwrap();
        assert!(measured.built(), "{name}");
        for (field, (found, right)) in by_index.iter().zip(&right).enumerate() {
            assert!(
                found.as_ref().is_none_or(|found| found == right),
                "{name}: field {field} by the index"
            );
            let varies = matches!(name, "features" | "ragged chunks" | "lists");
            let fixed = right.iter().all(|len| *len == right[0]);
            assert!(
                found.is_some() || varies || !fixed,
                "{name}: field {field} has one length, which is not known"
            );
        }
        let known = by_index.iter().all(Option::is_some);
        assert_eq!(
            std::fs::metadata(&place).unwrap().len() == 140,
            known,
            "{name}: the file has what the index lacks"
        );
        let check = |what: &str, wrapped: Any, ids: &[u64]| {
            for (field, right) in right.iter().enumerate() {
                let right: Vec<u64> = ids.iter().map(|id| right[*id as usize]).collect();
                let found = wrapped.lengths(&dataset.schema()[field].name).unwrap();
                assert_eq!(found, right, "{name}, {what}: field {field}");
                let most = wrapped.field_bytes_max(field).unwrap();
                let unit = unit(&dataset.schema()[field]) as u64;
                assert!(
                    right.iter().all(|len| len * unit <= most),
                    "{name}, {what}: field {field}"
                );
            }
        };
        let ids: Vec<u64> = (0..dataset.len()).collect();
        let again = dataset.clone().facts(&place).lengths().open().unwrap();
        assert!(!again.built(), "{name}");
        let again: Any = Arc::new(again);
        check("measured", again.clone(), &ids);
        check(
            "two",
            Arc::new(Concat::new([again.clone(), again.clone()]).unwrap()),
            &[&ids[..], &ids].concat(),
        );
        check(
            "in memory",
            Arc::new(again.clone().in_memory().unwrap()),
            &ids,
        );
        check(
            "checked",
            Arc::new(
                again
                    .clone()
                    .facts(dir.path("sums"))
                    .checksums()
                    .open()
                    .unwrap(),
            ),
            &ids,
        );
        check(
            "seekable",
            Arc::new(
                again
                    .clone()
                    .facts(dir.path("points"))
                    .seek_points()
                    .open()
                    .unwrap(),
            ),
            &ids,
        );
        let turned: Vec<u64> = ids.iter().rev().copied().collect();
        check(
            "subset",
            Arc::new(again.subset(turned.clone()).unwrap()),
            &turned,
        );
    }
}

#[test]
fn a_measured_dataset_delivers_the_same_batches() {
    let dir = Dir::new();
    let data = Data::chunks(&dir, &[3, 5, 1, 4], true, false);
    let plain = pull(&build(data.builder().batch_size(4)), 0).unwrap();
    let measured = data
        .dataset
        .clone()
        .facts(dir.path("lengths"))
        .lengths()
        .open()
        .unwrap();
    assert_eq!(
        pull(&build(Loader::builder(measured).batch_size(4)), 0).unwrap(),
        plain
    );
}

#[test]
fn a_sample_of_another_length_than_measured_is_an_error_that_names_it() {
    let dir = Dir::new();
    let lens = [5_usize, 9, 7];
    // Examples with a bytes feature `a`; the files have one length.
    let example = |len: usize| {
        let field =
            |number: u8, bytes: &[u8]| [&[number << 3 | 2, bytes.len() as u8], bytes].concat();
        let feature = field(1, &field(1, &noise(len, 1)));
        tf_record(&field(
            1,
            &field(1, &[field(1, b"a"), field(2, &feature)].concat()),
        ))
    };
    let write = |lens: [usize; 3]| dir.write("x.tfrecord", &lens.map(example).concat());
    let open = || {
        TfRecord::builder()
            .index(false)
            .bytes("a")
            .open(dir.path("x.tfrecord"))
            .unwrap()
    };
    let place = dir.path("x.lengths");
    write(lens);
    let error = open().lengths("a").unwrap_err();
    let words = "the index has no lengths of field `a`: `facts(file).lengths()` reads them once";
    assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    assert_eq!(
        open()
            .facts(&place)
            .lengths()
            .open()
            .unwrap()
            .lengths("a")
            .unwrap(),
        [5, 9, 7]
    );
    write([5, 7, 9]);
    let measured = open().facts(&place).lengths().open().unwrap();
    assert!(!measured.built() && measured.read_sample(0).is_ok());
    let loader = Loader::builder(measured)
        .decode_field("a", feedline::decode::Bytes::up_to(9))
        .batch_size(3);
    let error = pull(&build(loader), 0).unwrap_err();
    assert_eq!(
        (error.kind(), error.site().sample),
        (ErrorKind::Changed, Some(1)),
        "{error}"
    );
    assert!(
        error
            .message()
            .starts_with("field `a` has 7 bytes, but 9 in the lengths: the data changed"),
        "{error}"
    );

    // In chunks: the records' first bytes say the lengths.
    let path = dir.write("toy.bin", &noise(8 * 16, 3));
    let open = || Chunks::open(&path, &[3, 5], 16).ragged();
    let place = dir.path("toy.lengths");
    open().facts(&place).lengths().open().unwrap();
    let mut bytes = noise(8 * 16, 3);
    bytes[5 * 16] ^= 1;
    dir.write("toy.bin", &bytes);
    let loader =
        build(Loader::builder(open().facts(&place).lengths().open().unwrap()).batch_size(3));
    let mut batches = loader.epoch(0).unwrap();
    assert!(
        batches.next().unwrap().is_ok(),
        "the first chunk is as it was"
    );
    must_fail(
        batches.next().unwrap(),
        ErrorKind::Changed,
        "field `head` has ",
    );
}

#[test]
fn files_of_lengths_are_of_one_dataset_and_never_overwrite_another() {
    let dir = Dir::new();
    let open = |rows: &[u64]| {
        let path = dir.write("toy.bin", &noise(rows.iter().sum::<u64>() as usize * 16, 3));
        Chunks::open(&path, rows, 16).ragged()
    };
    let place = dir.path("toy.lengths");
    open(&[3, 5]).facts(&place).lengths().open().unwrap();
    must_fail(
        open(&[3, 4]).facts(&place).lengths().open(),
        ErrorKind::Changed,
        "make the facts anew",
    );
    let part = Arc::new(open(&[3, 5]))
        .subset([1, 2])
        .unwrap()
        .facts(dir.path("part"))
        .lengths()
        .open()
        .err()
        .unwrap();
    assert_eq!(
        (
            part.kind(),
            part.message().contains("make the facts of the whole")
        ),
        (ErrorKind::Config, true)
    );
    let notes = dir.write("notes", b"my notes");
    let foreign = open(&[3, 5]).facts(&notes).lengths().open().err().unwrap();
    assert_eq!(
        (foreign.kind(), std::fs::read(&notes).unwrap()),
        (ErrorKind::Config, b"my notes".to_vec())
    );
    // Damage is never replaced by itself: there may be checksums in the file.
    let bytes = std::fs::read(&place).unwrap();
    dir.write("toy.lengths", &bytes[..bytes.len() - 3]);
    let damaged = open(&[3, 5]).facts(&place).lengths().open().err().unwrap();
    assert_eq!(damaged.kind(), ErrorKind::Decode, "{damaged}");
    let again = open(&[3, 5]).facts(&place).lengths().anew().open().unwrap();
    assert!(again.built() && std::fs::read(&place).unwrap() == bytes);
}

#[test]
fn facts_are_the_same_alone_together_and_added_later() {
    for (name, open) in all() {
        let dir = Dir::new();
        let dataset = open(&dir);
        let together = dir.path("together");
        let facts = dataset.clone().facts(&together).checksums().lengths();
        let facts = facts.open().unwrap();
        assert!(facts.built(), "{name}");
        assert_eq!(naive(&facts), naive(&*dataset), "{name}");
        let right = std::fs::read(&together).unwrap();
        let later = dir.path("later");
        let lengths = || dataset.clone().facts(&later).lengths().open().unwrap();
        assert!(lengths().built() && !lengths().built(), "{name}");
        let sums = || dataset.clone().facts(&later).checksums().open().unwrap();
        assert!(sums().built() && !sums().built(), "{name}");
        // The lengths are still there.
        assert!(!lengths().built(), "{name}");
        assert!(std::fs::read(&later).unwrap() == right, "{name}");
        let points = |file: &Path| dataset.clone().facts(file).seek_points().open().unwrap();
        assert!(points(&later).built() && !points(&later).built(), "{name}");
        assert!(!lengths().built() && !sums().built(), "{name}");
        let alone = points(&dir.path("alone"));
        // Of another dataset with the same samples, into a file that has other facts.
        let joined = dir.path("joined");
        let facts = || dataset.clone().facts(&joined);
        drop(facts().checksums().open().unwrap());
        let part = Ok(points(&dir.path("alone")));
        let all = facts().checksums().open_joined([part]).unwrap();
        assert!(
            !all.built() && all.points_bytes() == alone.points_bytes(),
            "{name}"
        );
        assert!(
            !facts().checksums().seek_points().open().unwrap().built(),
            "{name}"
        );
        assert_eq!(
            points(&later).points_bytes(),
            alone.points_bytes(),
            "{name}"
        );
    }
}

#[test]
fn a_large_file_of_lengths_takes_no_memory() {
    let dir = Dir::new();
    let samples = (16 << 20) / 4 + 1000;
    let bytes = noise(samples * 2, 5);
    let path = dir.write("toy.bin", &bytes);
    let rows: Vec<u64> = (0..samples as u64)
        .step_by(1 << 16)
        .map(|from| (samples as u64 - from).min(1 << 16))
        .collect();
    let measured = Chunks::open(&path, &rows, 2)
        .ragged()
        .facts(dir.path("lengths"))
        .lengths()
        .open()
        .unwrap();
    let on_disk = std::fs::metadata(dir.path("lengths")).unwrap().len() as usize;
    assert!(
        (samples * 4..samples * 4 + samples / 100).contains(&on_disk),
        "{on_disk}"
    );
    let held = measured.sizes().index_bytes - measured.inner().sizes().index_bytes;
    assert!(held < 1 << 18, "{held}");
    let right = bytes.chunks(2).map(|record| head_len(record) as u64);
    assert!(measured.lengths("head").unwrap().into_iter().eq(right));
    // A damaged page within a large file is found when it is read, and repaired on request.
    let place = dir.path("lengths");
    let whole = std::fs::read(&place).unwrap();
    let mut damaged = whole.clone();
    damaged[on_disk / 2] ^= 1;
    std::fs::write(&place, &damaged).unwrap();
    let open = || {
        Chunks::open(&path, &rows, 2)
            .ragged()
            .facts(&place)
            .lengths()
    };
    let error = open().open().unwrap().lengths("head").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Decode, "{error}");
    drop(open().anew().open().unwrap());
    assert!(std::fs::read(&place).unwrap() == whole);
}

#[test]
fn sizes_and_patches_of_pictures_are_those_of_their_batches() {
    use crate::common::got::Got;
    use feedline::dataset::{Images, Records};
    use feedline::decode::Image;
    let dir = Dir::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/images");
    for upright in [false, true] {
        let image = || Image::patches(7, 20).exif_orientation(upright);
        let open = || Images::open(folder).unwrap();
        let place = dir.path(&format!("sizes {upright}"));
        let facts = |image: Image| {
            let facts = open().facts(&place);
            facts.picture_sizes("image", &image).open()
        };
        let sizes = facts(image()).unwrap().picture_sizes().unwrap();
        let again = facts(image()).unwrap();
        assert!(!again.built() && again.picture_sizes().unwrap() == sizes);
        let error = facts(image().exif_orientation(!upright)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
        let counts = image().patch_counts(sizes.iter().copied()).unwrap();
        let got = Got::epoch(
            &build(Loader::builder(open()).batch_size(100).decode(image())),
            0,
        )
        .remove(0);
        let numbers = |name: &str| bytemuck::pod_collect_to_vec::<u8, u32>(got.bytes(name));
        let own = numbers("image.size");
        let grids = numbers("image.grid");
        assert_eq!(
            sizes,
            own.chunks(2)
                .map(|size| (size[1], size[0]))
                .collect::<Vec<_>>()
        );
        assert_eq!(
            counts,
            grids
                .chunks(2)
                .map(|grid| u64::from(grid[0] * grid[1]))
                .collect::<Vec<_>>()
        );
    }
    let records = Records::builder(1).open_bytes([0; 4]).unwrap();
    must_say(
        records
            .facts(dir.path("none"))
            .picture_sizes("record", &Image::resize(8, 8))
            .open()
            .and_then(|facts| facts.picture_sizes()),
        "only pictures have sizes",
    );
    must_say(Image::resize(8, 8).patch_counts([(1, 1)]), "no patches");
    assert_eq!(
        Image::patches(7, 20)
            .patch_counts([(9, 1), (0, 1)])
            .unwrap_err()
            .site()
            .sample,
        Some(1)
    );
}
