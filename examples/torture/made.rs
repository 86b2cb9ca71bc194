//! A small generated dataset: noise and pictures, the same bytes in every run.
//!
//! ```text
//! samples 0 .. 96 ──► images: 4 classes of 24 files │ MDS: 4 shards and index.json │ other formats: 4 files of 24 samples
//! ```

use crate::content::{Content, Texture};
use crate::source::{Source, SourceArgs};
use serde_json::json;
use std::error::Error;
use std::fs;
use std::path::Path;

pub const FILES: u64 = 4;
const EACH: u64 = 24;
/// Bytes of a picture on average, of a record exactly.
const BYTES: usize = 4000;

/// Writes the dataset into `dir`, and sets `args` to read it.
///
/// Errors: those of the file system; unsupported formats.
pub fn make(dir: &Path, args: &mut SourceArgs) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(dir)?;
    args.path = dir.to_path_buf();
    let width = args.token.size();
    let content = match args.source {
        Source::Images | Source::Mds => Content::Images(Texture::new(BYTES)?),
        Source::Tar => Content::Tar(Texture::new(BYTES)?),
        Source::Records => Content::Records {
            bytes: *args.record_bytes.get_or_insert(BYTES),
        },
        Source::Tfrecord => Content::TfRecord { bytes: BYTES },
        Source::Tokens => Content::Tokens {
            width,
            bytes: args.seq_len * width,
        },
        Source::Npy => Content::Npy { bytes: BYTES },
        Source::Npz => Content::Npz { bytes: BYTES },
        #[cfg(feature = "parquet")]
        Source::Parquet => Content::Parquet { bytes: BYTES },
        _ => return Err("data of this --source cannot be generated: give --path".into()),
    };
    let ending = match args.source {
        Source::Images => return singles(dir, ".jpg", &content),
        Source::Mds => return mds(dir, &content),
        Source::Npy => return singles(dir, ".npy", &content),
        Source::Npz => return singles(dir, ".npz", &content),
        Source::Tar => "tar",
        Source::Tfrecord => "tfrecord",
        #[cfg(feature = "parquet")]
        Source::Parquet => "parquet",
        _ => "bin",
    };
    for file in 0..FILES {
        let out = fs::File::create(dir.join(format!("part-{file:02}.{ending}")))?;
        content.write(out, file * EACH..(file + 1) * EACH, |_| Ok(()))?;
    }
    Ok(())
}

/// Writes formats with one sample per file; pictures into a folder for each of four classes.
fn singles(dir: &Path, ending: &str, content: &Content) -> Result<(), Box<dyn Error>> {
    for number in 0..FILES * EACH {
        let folder = if ending == ".jpg" {
            dir.join(format!("class-{}", number % FILES))
        } else {
            dir.into()
        };
        fs::create_dir_all(&folder)?;
        let out = fs::File::create(folder.join(format!("{number:04}{ending}")))?;
        content.write(out, number..number + 1, |_| Ok(()))?;
    }
    Ok(())
}

/// Writes shards as Streaming's `MDSWriter`, with columns `image` (jpeg) and `label` (int).
fn mds(dir: &Path, content: &Content) -> Result<(), Box<dyn Error>> {
    let mut shards = Vec::new();
    for file in 0..FILES {
        let mut samples = Vec::new();
        for number in file * EACH..(file + 1) * EACH {
            let mut picture = Vec::new();
            content.write(&mut picture, number..number + 1, |_| Ok(()))?;
            let mut sample = (picture.len() as u32).to_le_bytes().to_vec();
            sample.append(&mut picture);
            sample.extend_from_slice(&((number % FILES) as i64).to_le_bytes());
            samples.push(sample);
        }
        let columns = json!({
            "column_encodings": ["jpeg", "int"],
            "column_names": ["image", "label"],
            "column_sizes": [null, 8],
            "compression": null,
            "format": "mds",
            "hashes": [],
            "size_limit": 1 << 26,
            "version": 2,
        });
        let text = serde_json::to_vec(&columns)?;
        let mut bytes = (samples.len() as u32).to_le_bytes().to_vec();
        let mut at = 4 * (samples.len() + 2) + text.len();
        for sample in &samples {
            bytes.extend_from_slice(&(at as u32).to_le_bytes());
            at += sample.len();
        }
        bytes.extend_from_slice(&(at as u32).to_le_bytes());
        bytes.extend_from_slice(&text);
        bytes.extend(samples.concat());
        let name = format!("shard.{file:05}.mds");
        fs::write(dir.join(&name), &bytes)?;
        let mut shard = columns;
        shard["raw_data"] = json!({ "basename": name, "bytes": bytes.len(), "hashes": {} });
        shard["samples"] = json!(samples.len());
        shard["zip_data"] = json!(null);
        shards.push(shard);
    }
    fs::write(
        dir.join("index.json"),
        serde_json::to_vec(&json!({ "shards": shards, "version": 2 }))?,
    )?;
    Ok(())
}
