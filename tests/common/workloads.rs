//! Workloads of a sweep: small datasets of every format, each with its own detection of wrong
//! bytes.

use crate::common::formats::{tar_member, tf_record};
use crate::common::numeric::fixture;
use crate::common::{Dir, noise};
use feedline::dataset::Images;
use feedline::dataset::{
    Concat, Dataset, DatasetExt, Mds, Megatron, Npy, Npz, Records, SafeTensors, Table, Tar,
    TfRecord, Tokens,
};
use feedline::decode::{Bytes, Each};
use feedline::tensor::{DType, Field};
use feedline::{LoaderBuilder, Order};

use std::sync::Arc;

/// Detection of wrong bytes by a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notices {
    /// None: exactly the rows of that read are wrong.
    Nothing,
    /// Malformed bytes are an error; else at most the rows of that read are wrong.
    Nonsense,
    /// Every wrong bit is an error.
    EveryBit,
}
use Notices::*;

/// A dataset with its loader settings.
pub struct Workload {
    pub name: &'static str,
    pub open: fn(&Dir) -> Arc<dyn Dataset>,
    pub set: fn(LoaderBuilder) -> LoaderBuilder,
    pub notices: Notices,
}

fn plain(builder: LoaderBuilder) -> LoaderBuilder {
    builder.order(Order::shuffled(3))
}

const fn workload(
    name: &'static str,
    open: fn(&Dir) -> Arc<dyn Dataset>,
    set: fn(LoaderBuilder) -> LoaderBuilder,
    notices: Notices,
) -> Workload {
    Workload {
        name,
        open,
        set,
        notices,
    }
}

pub const WORKLOADS: &[Workload] = &[
    workload("records", records, plain, Nothing),
    workload("pages", pages, plain, Nothing),
    workload("images", images, pictures, Nonsense),
    workload("tfrecord", tfrecord, plain, EveryBit),
    workload("tar", tar, plain, Nonsense),
    workload("tar, lists", tar_lists, lists, Nonsense),
    workload("npy", npy, plain, Nothing),
    workload("npz", npz, plain, EveryBit),
    workload("tokens", tokens, plain, Nothing),
    workload("megatron", megatron, plain, Nothing),
    workload("mds", mds, plain, Nonsense),
    #[cfg(feature = "zstd")]
    workload("mds, zstd", mds_zstd, windowed, Nonsense),
    #[cfg(feature = "parquet")]
    workload("parquet", parquet, windowed, Nonsense),
    #[cfg(feature = "text")]
    workload("jsonl", jsonl, plain, Nonsense),
    #[cfg(feature = "text")]
    workload("jsonl, gzip", jsonl_gzip, windowed, Nonsense),
    #[cfg(feature = "text")]
    // Booleans of several rows share a byte.
    workload("arrow", arrow, plain, Nonsense),
    workload("chunks", chunks, windowed, Nonsense),
    workload("safetensors", safetensors, plain, Nothing),
    workload("checked records", checked, plain, EveryBit),
    workload("checked chunks", checked_chunks, windowed, EveryBit),
    workload("several", several, plain, Nothing),
    workload("joined", joined, pictures, Nonsense),
];

fn windowed(builder: LoaderBuilder) -> LoaderBuilder {
    builder.order(Order::windowed(3, 2))
}

/// Eleven unaligned records in three files.
fn records(dir: &Dir) -> Arc<dyn Dataset> {
    let paths = [(0, 5), (1, 2), (2, 4)]
        .map(|(file, count)| dir.write(&format!("{file}.bin"), &noise(700 * count, file)));
    let builder = Records::builder(700).classes((0..11).collect());
    Arc::new(builder.open_files(&paths).unwrap())
}

/// Records that are read in place.
fn pages(dir: &Dir) -> Arc<dyn Dataset> {
    let paths = [0, 1].map(|file| dir.write(&format!("{file}.bin"), &noise(8192 * 4, file)));
    Arc::new(Records::builder(8192).open_files(&paths).unwrap())
}

/// More files than the limit of open files: each is opened for its read.
fn images(dir: &Dir) -> Arc<dyn Dataset> {
    for picture in 0..14 {
        let pixels = noise(24 * 16 * 3, picture);
        let mut bytes = Vec::new();
        let encoder = jpeg_encoder::Encoder::new(&mut bytes, 70);
        encoder
            .encode(&pixels, 24, 16, jpeg_encoder::ColorType::Rgb)
            .unwrap();
        dir.write(&format!("data/class{}/{picture}.jpg", picture % 2), &bytes);
    }
    Arc::new(Images::open(dir.path("data")).unwrap())
}

fn pictures(builder: LoaderBuilder) -> LoaderBuilder {
    plain(builder).decode(feedline::decode::Image::resize(8, 8))
}

fn tfrecord(dir: &Dir) -> Arc<dyn Dataset> {
    for shard in 0..2 {
        let bytes: Vec<u8> = (0..5)
            .flat_map(|k| tf_record(&noise(300 + 17 * k, 10 * shard + k as u64)))
            .collect();
        dir.write(&format!("data/{shard}.tfrecord"), &bytes);
    }
    let record = feedline::tensor::EncodedField::raw(Field::up_to("record", DType::U8, 500));
    let builder = TfRecord::builder().index(false).record(record);
    Arc::new(builder.open(dir.path("data")).unwrap())
}

fn tar(dir: &Dir) -> Arc<dyn Dataset> {
    for shard in 0..2_u64 {
        let pair = |k: u64| {
            let bytes = noise(200 + 31 * k as usize, 100 * shard + k);
            [
                tar_member(&format!("{k}.bin"), &bytes),
                tar_member(&format!("{k}.cls"), k.to_string().as_bytes()),
            ]
            .concat()
        };
        let mut bytes: Vec<u8> = (0..5).flat_map(pair).collect();
        bytes.extend([0; 1024]);
        dir.write(&format!("data/{shard}.tar"), &bytes);
    }
    let field = Field::up_to("bin", DType::U8, 600);
    let builder = Tar::builder().raw(field, "bin").class("cls");
    Arc::new(builder.index(false).open(dir.path("data")).unwrap())
}

/// Samples of one to three frames, in the order of their names, and a member in between.
fn tar_lists(dir: &Dir) -> Arc<dyn Dataset> {
    let mut bytes = Vec::new();
    for k in 0..9_u64 {
        for frame in (0..1 + k % 3).rev() {
            let noise = noise(150 + 31 * k as usize, 100 * frame + k);
            bytes.extend(tar_member(&format!("{k}.{frame}.bin"), &noise));
            if frame == 1 {
                bytes.extend(tar_member(&format!("{k}.txt"), b"a note"));
            }
        }
        bytes.extend(tar_member(&format!("{k}.cls"), k.to_string().as_bytes()));
    }
    bytes.extend([0; 1024]);
    let path = dir.write("data/0.tar", &bytes);
    let builder = Tar::builder().list("*.bin", 3).class("cls");
    Arc::new(builder.index(false).open(path).unwrap())
}

fn lists(builder: LoaderBuilder) -> LoaderBuilder {
    plain(builder).decode_field("*.bin", Each::new(Bytes::up_to(500)))
}

/// An array of bytes of these dimensions.
fn array(dims: &str, bytes: &[u8]) -> Vec<u8> {
    let dict = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({dims}), }}\n");
    let len = (dict.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &len[..], dict.as_bytes(), bytes].concat()
}

fn npy(dir: &Dir) -> Arc<dyn Dataset> {
    for file in 0..2 {
        let x = array("5, 90", &noise(5 * 90, file));
        let y = array("5, 40", &noise(5 * 40, 7 + file));
        dir.write(&format!("x-{file}.npy"), &x);
        dir.write(&format!("y-{file}.npy"), &y);
    }
    let builder = Npy::builder()
        .field("x", dir.path("x-*.npy"))
        .field("y", dir.path("y-*.npy"));
    Arc::new(builder.rows().open().unwrap())
}

/// A zip of stored members.
fn zip(members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut directory = Vec::new();
    for (name, bytes) in members {
        let crc = bytes.iter().fold(!0_u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
            })
        });
        let size = (bytes.len() as u32).to_le_bytes();
        let offset = (out.len() as u32).to_le_bytes();
        // Version 20, no flags, stored, no time; the fields of both headers.
        let about = [20_u8, 0, 0, 0, 0, 0, 0, 0, 33, 0];
        let shared = [&about[..], &(!crc).to_le_bytes(), &size, &size].concat();
        let name = name.as_bytes();
        let len = (name.len() as u16).to_le_bytes();
        let local = [b"PK\x03\x04", &shared[..], &len, &[0, 0], name, bytes];
        out.extend(local.concat());
        let rest = [&[0; 12][..], &offset].concat();
        let central = [b"PK\x01\x02", &[20, 0][..], &shared, &len, &rest, name];
        directory.extend(central.concat());
    }
    let count = (members.len() as u16).to_le_bytes();
    let start = (out.len() as u32).to_le_bytes();
    let size = (directory.len() as u32).to_le_bytes();
    out.extend(directory);
    let both = [count, count].concat();
    let end = [b"PK\x05\x06", &[0; 4][..], &both, &size, &start, &[0, 0]];
    [out, end.concat()].concat()
}

fn npz(dir: &Dir) -> Arc<dyn Dataset> {
    for sample in 0..8 {
        let members = [
            ("x.npy", array("20, 11", &noise(220, sample))),
            ("y.npy", array("5,", &noise(5, 50 + sample))),
        ];
        dir.write(&format!("data/{sample}.npz"), &zip(&members));
    }
    Arc::new(Npz::builder().verify(true).open(dir.path("data")).unwrap())
}

/// Windows that overlap by a token: neighbours read the same bytes twice.
fn tokens(dir: &Dir) -> Arc<dyn Dataset> {
    let paths = [0, 1].map(|file| dir.write(&format!("{file}.bin"), &noise(2 * 500, file)));
    let builder = Tokens::builder(DType::U16).window(99).next_token();
    Arc::new(builder.open_files(&paths).unwrap())
}

/// Sequences of several pieces, documents cut at the ends of windows.
fn megatron(_: &Dir) -> Arc<dyn Dataset> {
    let builder = Megatron::builder().window(4);
    Arc::new(builder.open(fixture("tokens/megatron-u16")).unwrap())
}

fn mds(_: &Dir) -> Arc<dyn Dataset> {
    let builder = Mds::builder()
        .columns(["fixed", "int", "bytes"])
        .raw(Field::up_to("bytes", DType::U8, 600));
    Arc::new(builder.open(fixture("mds/raw")).unwrap())
}

#[cfg(feature = "zstd")]
fn mds_zstd(_: &Dir) -> Arc<dyn Dataset> {
    let builder = Mds::builder().columns(["fixed", "int"]);
    Arc::new(builder.open(fixture("mds/zstd")).unwrap())
}

#[cfg(feature = "parquet")]
fn parquet(_: &Dir) -> Arc<dyn Dataset> {
    let builder = feedline::dataset::Parquet::builder()
        .columns(["i64", "emb"])
        .chunk_bytes(5000);
    Arc::new(builder.open(fixture("parquet/plain.parquet")).unwrap())
}

/// Lines with text, numbers and escapes.
#[cfg(feature = "text")]
fn lines(file: u64) -> String {
    let line = |k: u64| {
        let ids = noise(10 + k as usize, 10 * file + k);
        format!(
            "{{\"text\": \"line {k}\\n{}\", \"ids\": {ids:?}}}\n",
            "x".repeat(90)
        )
    };
    (0..6).map(line).collect()
}

#[cfg(feature = "text")]
fn of_lines(dir: &Dir) -> Arc<dyn Dataset> {
    let ids = Field::up_to("ids", DType::I32, 40);
    let builder = feedline::dataset::Jsonl::builder().numbers(ids, "ids");
    Arc::new(builder.index(false).open(dir.path("data")).unwrap())
}

#[cfg(feature = "text")]
fn jsonl(dir: &Dir) -> Arc<dyn Dataset> {
    for file in 0..2 {
        dir.write(&format!("data/{file}.jsonl"), lines(file).as_bytes());
    }
    of_lines(dir)
}

/// The same rows twice, of several columns.
#[cfg(feature = "text")]
fn arrow(dir: &Dir) -> Arc<dyn Dataset> {
    let bytes = include_bytes!("../fixtures/arrow/small.arrow");
    for file in 0..2 {
        dir.write(&format!("data/{file}.arrow"), bytes);
    }
    let builder = feedline::dataset::Arrow::builder().columns(["label", "flag", "box"]);
    let builder = builder.up_to("ids", 3).up_to("flags", 10).up_to("text", 20);
    let builder = builder.null_zero(true).index(false);
    Arc::new(builder.open(dir.path("data")).unwrap())
}

/// Two members a file, one line in both.
#[cfg(feature = "text")]
fn jsonl_gzip(dir: &Dir) -> Arc<dyn Dataset> {
    for file in 0..3 {
        let lines = lines(file);
        let mut packed = Vec::new();
        for part in [&lines[..500], &lines[500..]] {
            let mut member = flate2::write::GzEncoder::new(&mut packed, Default::default());
            std::io::Write::write_all(&mut member, part.as_bytes()).unwrap();
            member.finish().unwrap();
        }
        dir.write(&format!("data/{file}.jsonl.gz"), &packed);
    }
    of_lines(dir)
}

fn chunks(dir: &Dir) -> Arc<dyn Dataset> {
    crate::common::runs::Data::chunks(dir, &[3, 5, 1, 4], false, false)
        .toy
        .unwrap()
}

fn checked_chunks(dir: &Dir) -> Arc<dyn Dataset> {
    let facts = chunks(dir).facts(dir.path("crcs"));
    Arc::new(facts.checksums().open().unwrap())
}

fn safetensors(dir: &Dir) -> Arc<dyn Dataset> {
    for file in 0..2 {
        let header = r#"{"x":{"dtype":"U8","shape":[5,80],"data_offsets":[0,400]},"y":{"dtype":"U8","shape":[5,30],"data_offsets":[400,550]}}"#;
        let len = (header.len() as u64).to_le_bytes();
        let bytes = [&len[..], header.as_bytes(), &noise(550, file)].concat();
        dir.write(&format!("data/{file}.safetensors"), &bytes);
    }
    Arc::new(SafeTensors::open(dir.path("data/*.safetensors")).unwrap())
}

fn checked(dir: &Dir) -> Arc<dyn Dataset> {
    let facts = records(dir).facts(dir.path("crcs"));
    Arc::new(facts.checksums().open().unwrap())
}

/// Pictures with a table in another order, by file names.
fn joined(dir: &Dir) -> Arc<dyn Dataset> {
    let rows = (0..14).rev().map(|row| format!("{row},{}.5\n", row * row));
    let csv = format!("name,weight\n{}", rows.collect::<String>());
    let table = Table::builder("name").read_bytes(csv).unwrap();
    Arc::new(images(dir).join(table).open().unwrap())
}

/// Files, memory and arrays.
fn several(dir: &Dir) -> Arc<dyn Dataset> {
    let records = Records::builder(60).field("x", DType::U8, [60]);
    let path = dir.write("a.bin", &noise(60 * 5, 1));
    dir.write("b.npy", &array("4, 60", &noise(60 * 4, 2)));
    let array = Npy::builder().field("x", dir.path("b.npy"));
    let parts: [Arc<dyn Dataset>; 3] = [
        Arc::new(records.clone().open(path).unwrap()),
        Arc::new(records.open_bytes(noise(60 * 3, 3)).unwrap()),
        Arc::new(array.rows().open().unwrap()),
    ];
    Arc::new(Concat::new(parts).unwrap())
}
