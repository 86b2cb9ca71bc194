//! `.facts().checksums().open()` over every format: a flipped byte of its files, with unchanged file times, is an
//! error or changes nothing. Formats without checksums of their own have no other protection.

use crate::common::sweep::places;
use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Mds, Npy, Npz, Records, SafeTensors, Tokens, Verify};
use feedline::tensor::DType;
use feedline::{Error, Loader, Result};
use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

type Open = fn(&Path) -> Result<Arc<dyn Dataset>>;

/// All bytes of every sample's fields through a loader, or the first error.
fn rows(dataset: Arc<dyn Dataset>) -> Result<Vec<Vec<u8>>> {
    let loader = Loader::builder(dataset)
        .workers(1)
        .tuning(|t| t.slots(1))
        .batch_size(8)
        .build()?;
    let mut rows = Vec::new();
    for batch in loader.epoch(0)? {
        let batch = batch?;
        for row in 0..batch.len() {
            let bytes = |field: &feedline::FieldView<'_>| {
                let all = field.as_bytes().unwrap();
                all[row * (all.len() / batch.len())..][..all.len() / batch.len()].to_vec()
            };
            rows.push(batch.fields().flat_map(|field| bytes(&field)).collect());
        }
    }
    Ok(rows)
}

fn checked(open: Open, dir: &Path) -> Result<Arc<dyn Dataset>> {
    Ok(Arc::new(
        open(&dir.join("data"))?
            .facts(dir.join("crcs"))
            .checksums()
            .open()?,
    ))
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

/// Copies fixtures into a folder of their own.
fn copy(dir: &Dir, files: &[PathBuf]) -> PathBuf {
    for file in files {
        let name = format!("data/{}", file.file_name().unwrap().to_str().unwrap());
        dir.write(&name, &std::fs::read(file).unwrap());
    }
    dir.path("")
}

fn sweep(name: &str, files: &[PathBuf], open: Open) {
    let dir = Dir::new();
    let root = copy(&dir, files);
    let whole = rows(checked(open, &root).unwrap()).unwrap();
    let mut errors = 0;
    let mut same = 0;
    for file in std::fs::read_dir(root.join("data")).unwrap() {
        let path = file.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        // Like a disk error: the file's time stays.
        let put = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            File::options()
                .append(true)
                .open(&path)
                .unwrap()
                .set_modified(modified)
                .unwrap();
        };
        for at in places(0..bytes.len(), 9) {
            let mut damaged = bytes.clone();
            damaged[at] ^= [0x01, 0x20, 0x80, 0xff][at % 4];
            put(&damaged);
            match checked(open, &root).and_then(rows) {
                Err(_) => errors += 1,
                Ok(rows) => {
                    assert!(
                        rows == whole,
                        "{name}: byte {at} of {} changes samples without a word",
                        path.display()
                    );
                    same += 1;
                }
            }
        }
        put(&bytes);
    }
    println!("{name}: {errors} errors, {same} without effect");
    assert!(
        errors > same,
        "{name}: {errors} errors, {same} without effect"
    );
    assert!(rows(checked(open, &root).unwrap()).unwrap() == whole);
}

fn some(folder: &str, start: &str) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(fixture(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| {
        path.file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with(start)
    });
    files.sort();
    assert!(!files.is_empty(), "{folder}/{start}*");
    files
}

#[test]
fn flipped_bytes_of_npy_files_are_errors() {
    sweep("npy", &some("npy", "same-"), |path| {
        Ok(Arc::new(Npy::open(path)?))
    });
    sweep("npy rows", &some("npy", "rows-"), |path| {
        Ok(Arc::new(Npy::builder().field("x", path).rows().open()?))
    });
}

#[test]
fn flipped_bytes_of_npz_files_are_errors() {
    sweep("npz rows", &some("npy", "table"), |path| {
        Ok(Arc::new(Npz::builder().rows().open(path)?))
    });
    sweep("npz", &some("npy", "unet-0"), |path| {
        Ok(Arc::new(Npz::open(path)?))
    });
}

#[test]
fn flipped_bytes_of_safetensors_files_are_errors() {
    sweep("safetensors", &some("safetensors", "numpy"), |path| {
        Ok(Arc::new(SafeTensors::open(path)?))
    });
}

#[test]
fn flipped_bytes_of_mds_shards_are_errors() {
    sweep("mds", &some("mds/fixed", ""), |path| {
        Ok(Arc::new(Mds::open(path)?))
    });
}

#[test]
fn flipped_bytes_of_tokens_and_records_are_errors() {
    let dir = Dir::new();
    let file = dir.write("tokens.bin", &noise(600, 1));
    sweep("tokens", std::slice::from_ref(&file), |path| {
        Ok(Arc::new(Tokens::builder(DType::U16).window(50).open(path)?))
    });
    sweep("records", &[file], |path| {
        Ok(Arc::new(Records::builder(60).open(path)?))
    });
}

#[test]
fn every_damaged_sample_is_named() {
    let dir = Dir::new();
    let path = dir.write("data/records.bin", &noise(6000, 1));
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let open = || {
        Records::builder(60)
            .open(dir.path("data"))
            .unwrap()
            .facts(dir.path("crcs"))
            .checksums()
            .open()
            .unwrap()
    };
    assert!(open().built());
    let mut bytes = std::fs::read(&path).unwrap();
    [7, 60 * 50, 60 * 50 + 3, 5999]
        .iter()
        .for_each(|at| bytes[*at] ^= 1);
    std::fs::write(&path, &bytes).unwrap();
    File::options()
        .append(true)
        .open(&path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    let (done, damaged) = Verify::new()
        .workers(2)
        .run(&open(), |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!((done.samples, done.damaged), (100, 3));
    let named = |error: &Error| (error.site().sample.unwrap(), error.site().offset.unwrap());
    assert_eq!(
        damaged.iter().map(named).collect::<Vec<_>>(),
        [(0, 0), (50, 3000), (99, 5940)]
    );
}
