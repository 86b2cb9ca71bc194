//! `.facts().seek_points().open()` over files, tar, TFRecord and Parquet: the same rows, points from their file, no
//! trust in it.

use crate::common::formats::{tar_member, tf_record};
use crate::common::*;
use feedline::dataset::{Concat, Dataset, DatasetExt, Framed, Images, Tar, TfRecord};
use feedline::decode::Image;
use feedline::decode::Single;
use feedline::tensor::{EncodedField, Encoding};
use feedline::{ErrorKind, Loader, OnBadSample, Order, Result};
use jpeg_encoder::{ColorType, Encoder};
use std::path::Path;
use std::sync::Arc;

const COUNT: usize = 40;

/// Pictures of several sizes; every seventh has restart markers, every ninth is damaged.
fn pictures() -> Vec<Vec<u8>> {
    let picture = |id: usize| {
        let width = 150 + 37 * (id % 5);
        let height = 100 + 29 * (id % 4);
        let mut bytes = Vec::new();
        let mut encoder = Encoder::new(&mut bytes, 90);
        if id % 7 == 6 {
            encoder.set_restart_interval(4);
        }
        let pixels = noise(width * height * 3, id as u64);
        encoder
            .encode(&pixels, width as u16, height as u16, ColorType::Rgb)
            .unwrap();
        if id % 9 == 8 {
            let from = bytes.len() / 2;
            let to = bytes.len() / 2 + 300;
            bytes[from..to].fill(0);
        }
        bytes
    };
    (0..COUNT).map(picture).collect()
}

fn has_points(id: u64) -> bool {
    id % 7 != 6 && id % 9 != 8
}

type Opened = Result<Arc<dyn Dataset>>;

fn images(dir: &Path) -> Opened {
    Ok(Arc::new(Images::open(dir.join("images"))?))
}

fn tar(dir: &Path) -> Opened {
    Ok(Arc::new(
        Tar::builder()
            .image("jpg")
            .class("cls")
            .open(dir.join("data.tar"))?,
    ))
}

fn tfrecord(dir: &Path) -> Opened {
    let picture = EncodedField::image("image");
    Ok(Arc::new(
        TfRecord::builder()
            .record(picture)
            .open(dir.join("data.tfrecord"))?,
    ))
}

#[cfg(feature = "parquet")]
fn parquet(dir: &Path) -> Opened {
    Ok(Arc::new(
        feedline::dataset::Parquet::builder()
            .image("image")
            .open(dir.join("data.parquet"))?,
    ))
}

#[cfg(feature = "parquet")]
fn write_parquet(path: &Path, pictures: &[Vec<u8>]) {
    use arrow_array::{ArrayRef, BinaryArray, RecordBatch};
    let column: ArrayRef = Arc::new(BinaryArray::from_iter_values(pictures));
    let batch = RecordBatch::try_from_iter([("image", column)]).unwrap();
    let groups = parquet::file::properties::WriterProperties::builder()
        .set_max_row_group_row_count(Some(20))
        .build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer =
        parquet::arrow::ArrowWriter::try_new(file, batch.schema(), Some(groups)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

type Open = fn(&Path) -> Opened;

/// The same pictures in every format.
fn formats(dir: &Dir) -> Vec<(&'static str, Open)> {
    let mut shard = Vec::new();
    let mut records = Vec::new();
    let pictures = pictures();
    for (id, picture) in pictures.iter().enumerate() {
        dir.write(&format!("images/{id:03}.jpg"), picture);
        shard.extend(tar_member(&format!("{id:03}.jpg"), picture));
        shard.extend(tar_member(&format!("{id:03}.cls"), b"5"));
        records.extend(tf_record(picture));
    }
    shard.extend([0; 1024]);
    dir.write("data.tar", &shard);
    dir.write("data.tfrecord", &records);
    #[cfg(feature = "parquet")]
    write_parquet(&dir.path("data.parquet"), &pictures);
    vec![
        ("images", images),
        ("tar", tar),
        ("tfrecord", tfrecord),
        #[cfg(feature = "parquet")]
        ("parquet", parquet),
    ]
}

/// Number of the field with the pictures.
fn picture_field(dataset: &dyn Dataset) -> usize {
    dataset
        .schema()
        .iter()
        .position(|field| field.encoding == Encoding::Image)
        .unwrap()
}

/// Rows of random crops, by sample; others take the place of damaged ones.
fn rows(dataset: Arc<dyn Dataset>) -> Vec<(u64, Vec<u8>)> {
    let name = dataset.schema()[picture_field(&*dataset)].name.clone();
    let image = Image::random_resized_crop(32).scale(0.1, 0.5);
    let loader = Loader::builder(dataset)
        .decode_field(&name, image)
        .order(Order::sequential())
        .batch_size(1);
    let loader = build(loader.on_bad_sample(OnBadSample::Substitute {
        budget: COUNT as u64,
    }));
    let batches = loader.epoch(3).unwrap().map(Result::unwrap);
    batches
        .map(|batch| {
            (
                batch.ids()[0],
                batch.field(&name).unwrap().as_bytes().unwrap().to_vec(),
            )
        })
        .collect()
}

#[test]
fn rows_of_every_format_are_the_same_with_seek_points() {
    let dir = Dir::new();
    for (name, open) in formats(&dir) {
        let index = dir.path(&format!("{name}.seek"));
        let plain = open(&dir.path("")).unwrap();
        let seekable = plain.clone().facts(&index).seek_points().open().unwrap();
        assert!(seekable.built() && seekable.points_bytes() > 0, "{name}");
        let field = picture_field(&*plain);
        for id in 0..COUNT as u64 {
            assert_eq!(
                !seekable
                    .seek_points(id, field, &mut Vec::new())
                    .unwrap()
                    .is_empty(),
                has_points(id),
                "{name}: sample {id}"
            );
        }
        let again = open(&dir.path(""))
            .unwrap()
            .facts(&index)
            .seek_points()
            .open()
            .unwrap();
        assert!(
            !again.built() && again.describe().contains("seek points of 0.0"),
            "{name}: {}",
            again.describe()
        );
        let rows = [plain, Arc::new(again)].map(rows);
        assert!(rows[0].len() == COUNT && rows[0] == rows[1], "{name}");
    }
}

#[test]
fn points_follow_their_samples_into_parts_and_sums() {
    let dir = Dir::new();
    formats(&dir);
    let whole = images(&dir.path(""))
        .unwrap()
        .facts(dir.path("seek"))
        .seek_points()
        .open()
        .unwrap();
    let points: Vec<Vec<u8>> = (0..COUNT as u64)
        .map(|id| whole.seek_points(id, 0, &mut Vec::new()).unwrap().to_vec())
        .collect();
    let whole = Arc::new(whole);
    let same = |dataset: &dyn Dataset, ids: &[usize]| {
        for (id, origin) in ids.iter().enumerate() {
            assert!(
                dataset
                    .framed()
                    .unwrap()
                    .seek_points(id as u64, 0, &mut Vec::new())
                    .unwrap()
                    == points[*origin],
                "{}: {id}",
                dataset.describe()
            );
        }
    };
    let all: Vec<usize> = (0..COUNT).collect();
    same(&whole.clone().subset([9, 3, 20]).unwrap(), &[9, 3, 20]);
    same(&whole.clone().in_memory().unwrap(), &all);
    same(
        &whole
            .clone()
            .facts(dir.path("crcs"))
            .checksums()
            .open()
            .unwrap(),
        &all,
    );
    same(
        &Concat::new([whole.clone(), whole]).unwrap(),
        &[all.clone(), all].concat(),
    );
}

#[test]
fn a_damaged_file_and_a_file_of_others_are_refused_and_kept() {
    let dir = Dir::new();
    formats(&dir);
    let index = dir.path("seek");
    let built = || {
        images(&dir.path(""))
            .unwrap()
            .facts(&index)
            .seek_points()
            .open()
            .map(|dataset| dataset.built())
    };
    assert!(built().unwrap());
    assert!(!built().unwrap());
    let whole = std::fs::read(&index).unwrap();
    for at in [4, 13, 20, 30, 37, 60, whole.len() / 2, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        std::fs::write(&index, &bytes).unwrap();
        let cut = &whole[..at];
        for (what, bytes) in [("flip", &bytes[..]), ("cut", cut)] {
            std::fs::write(&index, bytes).unwrap();
            let kind = built().unwrap_err().kind();
            let is_other = what == "flip" && at < 8;
            let right = if is_other {
                ErrorKind::Config
            } else {
                ErrorKind::Decode
            };
            assert_eq!(kind, right, "{what} at {at}");
            assert!(std::fs::read(&index).unwrap() == bytes);
        }
    }
    std::fs::write(&index, &whole).unwrap();
    dir.write("images/999.jpg", &pictures()[0]);
    must_fail(built(), ErrorKind::Changed, "facts of another dataset");
    assert!(std::fs::read(&index).unwrap() == whole);
    std::fs::remove_file(&index).unwrap();
    assert!(built().unwrap(), "one more sample");
    std::fs::write(&index, "notes of mine").unwrap();
    must_fail(built(), ErrorKind::Config, "not a file of facts");
    assert_eq!(std::fs::read(&index).unwrap(), b"notes of mine");
}

/// Header and length may stay the same when a picture is replaced.
#[test]
fn a_replaced_picture_is_decoded_as_it_is() {
    let dir = Dir::new();
    let encode = |seed: u64| {
        let mut bytes = Vec::new();
        Encoder::new(&mut bytes, 80)
            .encode(&noise(320 * 240 * 3, seed), 320, 240, ColorType::Rgb)
            .unwrap();
        bytes
    };
    let old = encode(1);
    let new = encode(2);
    // A comment that only pads.
    let pad = |bytes: &[u8], to: usize| [bytes, &vec![0; to - bytes.len()][..]].concat();
    let longest = old.len().max(new.len());
    dir.write("images/a.jpg", &pad(&old, longest));
    let points = images(&dir.path(""))
        .unwrap()
        .facts(dir.path("seek"))
        .seek_points()
        .open()
        .unwrap()
        .seek_points(0, 0, &mut Vec::new())
        .unwrap()
        .to_vec();
    assert!(!points.is_empty());
    let new = pad(&new, longest);
    let mut single = Single::new(
        Image::random_resized_crop(20).scale(0.01, 0.3),
        &EncodedField::image("x"),
    )
    .unwrap();
    for id in 0..200 {
        single.decode(&new, 0, 0, id).unwrap();
        let right = single.bytes(0).to_vec();
        single.decode_seeking(&new, &points, 0, 0, id).unwrap();
        assert!(single.bytes(0) == right, "crop {id}");
    }
}
