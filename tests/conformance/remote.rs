//! Objects: every format gives the same batches from files, over HTTP and from a bucket; listings
//! and errors are as of folders.

use crate::common::formats::tar_member;
use crate::common::got::{Got, same};
use crate::common::server::{Fault, Server};
use crate::common::{Dir, assert_says, must_fail, noise};
use feedline::ErrorKind::{Changed, Config, Decode, Empty, NotAFile, NotFound};
use feedline::dataset::{
    Dataset, Images, Mds, Megatron, Npy, Npz, Records, SafeTensors, Tar, TfRecord, Tokens,
};
use feedline::memory::{MemoryPlan, MemoryTerm};
use feedline::storage::Cache;
use feedline::tensor::{DType, Encoding};
use feedline::{Loader, LoaderBuilder, Order, Result, decode};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Opens a dataset of the fixtures below this folder or URL.
type Open = fn(&str) -> Result<Arc<dyn Dataset>>;

fn arc<D: Dataset>(dataset: Result<D>) -> Result<Arc<dyn Dataset>> {
    Ok(Arc::new(dataset?))
}

const FORMATS: [(&str, Open); 13] = [
    ("records", |at| {
        arc(Records::builder(4).open(format!("{at}/npy/same-0.npy")))
    }),
    ("tokens", |at| {
        arc(Tokens::builder(DType::U16)
            .window(8)
            .open(format!("{at}/tokens/flat.bin")))
    }),
    ("tokens of shards", |at| {
        arc(Tokens::builder(DType::U16)
            .window(4)
            .open(format!("{at}/tokens/llmc-gpt2.bin")))
    }),
    ("megatron", |at| {
        arc(Megatron::builder()
            .documents(13)
            .open(format!("{at}/tokens/megatron-u16")))
    }),
    ("npy", |at| {
        arc(Npy::open(format!("{at}/npy/same-{{0..3}}.npy")))
    }),
    ("npy by pattern", |at| {
        arc(Npy::open(format!("{at}/npy/same-?.npy")))
    }),
    ("npz", |at| arc(Npz::open(format!("{at}/npy/table.npz")))),
    ("safetensors", |at| {
        arc(SafeTensors::open(format!(
            "{at}/safetensors/torch-{{0,1}}.safetensors"
        )))
    }),
    ("tar", |at| {
        arc(Tar::builder()
            .index(false)
            .open(format!("{at}/tar/webdataset.tar")))
    }),
    ("tfrecord", |at| {
        arc(TfRecord::builder()
            .index(false)
            .open(format!("{at}/tfrecord/plain.tfrecord")))
    }),
    ("mds", |at| {
        arc(Mds::builder()
            .up_to("*", 300)
            .open(format!("{at}/mds/lists")))
    }),
    ("images", |at| arc(Images::open(format!("{at}/jpeg/")))),
    ("images of classes", |at| {
        arc(Images::open(format!("{at}/classes/")))
    }),
];

/// All batches of two epochs in a shuffled order; encoded fields as they are.
fn batches(dataset: Arc<dyn Dataset>) -> Vec<Got> {
    batches_by(dataset, |builder| builder)
}

fn batches_by(
    dataset: Arc<dyn Dataset>,
    set: impl FnOnce(LoaderBuilder) -> LoaderBuilder,
) -> Vec<Got> {
    let encoded =
        |field: &feedline::tensor::EncodedField| !matches!(field.encoding, Encoding::Raw { .. });
    let names: Vec<String> = dataset
        .schema()
        .iter()
        .filter(|field| encoded(field))
        .map(|f| f.name.clone())
        .collect();
    let mut builder = Loader::builder(dataset)
        .order(Order::shuffled(3))
        .batch_size(3);
    for name in names {
        builder = builder.decode_field(&name, decode::Bytes::up_to(1 << 20));
    }
    let loader = set(builder).build().unwrap();
    (0..2)
        .flat_map(|epoch| Got::epoch(&loader, epoch))
        .collect()
}

#[test]
fn every_format_is_the_same_from_a_cache() {
    let dir = Dir::new();
    let caches = Dir::new();
    let files = folder(&dir);
    let server = Server::of(&files);
    let s3 = server.s3("");
    for (name, open) in FORMATS {
        let expected = batches(open(files.to_str().unwrap().trim_end_matches('/')).unwrap());
        for state in ["cold", "warm"] {
            let cache = Cache::at(caches.path(name)).block_bytes(4096);
            let found = batches_by(open(s3.trim_end_matches('/')).unwrap(), |builder| {
                builder.cache(cache)
            });
            assert!(found == expected, "{name}, {state}");
        }
    }
}

/// The fixtures with a folder of two classes beside them.
fn folder(dir: &Dir) -> PathBuf {
    for (class, name) in [("cat", "420.jpg"), ("cat", "422.jpg"), ("dog", "444.jpg")] {
        let bytes = std::fs::read(fixtures().join("images").join(name)).unwrap();
        dir.write(&format!("classes/{class}/{name}"), &bytes);
    }
    for name in [
        "npy",
        "tokens",
        "safetensors",
        "tar",
        "tfrecord",
        "mds",
        "jpeg",
        "parquet",
    ] {
        std::os::unix::fs::symlink(fixtures().join(name), dir.path(name)).unwrap();
    }
    dir.path("")
}

#[test]
fn every_format_is_the_same_from_files_http_and_a_bucket() {
    let dir = Dir::new();
    let files = folder(&dir);
    let server = Server::of(&files);
    let files = files.display().to_string();
    let http = server.http("");
    let s3 = server.s3("");
    let files = files.trim_end_matches('/');
    let http = http.trim_end_matches('/');
    let s3 = s3.trim_end_matches('/');
    for (name, open) in FORMATS {
        let expected = batches(open(files).unwrap_or_else(|error| panic!("{name}: {error}")));
        assert!(
            batches(open(s3).unwrap_or_else(|error| panic!("{name} of s3: {error}"))) == expected,
            "{name} of s3"
        );
        // A plain HTTP server has no listing.
        if name.contains("images") || name.contains("pattern") {
            let error = open(http).err().unwrap();
            assert_eq!(error.kind(), Config, "{name}: {error}");
            let said = error.to_string();
            assert!(
                said.contains("has no listing") || said.contains("a query"),
                "{said}"
            );
            continue;
        }
        let over_http = open(http).unwrap_or_else(|error| panic!("{name} of http: {error}"));
        assert!(batches(over_http) == expected, "{name} of http");
    }
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_is_the_same_from_files_and_a_bucket() {
    use feedline::dataset::Parquet;
    let server = Server::of(&fixtures());
    for (name, column) in [
        ("plain", "f3"),
        ("zstd_v2", "f0"),
        ("gzip", "i64"),
        ("tiny", "f0"),
        ("uneven", "x"),
    ] {
        let open = |url: String| arc(Parquet::builder().column(column).open(url)).unwrap();
        let expected = batches(open(format!(
            "{}/parquet/{name}.parquet",
            fixtures().display()
        )));
        assert!(
            batches(open(server.s3(&format!("parquet/{name}.parquet")))) == expected,
            "{name}"
        );
    }
}

#[test]
fn a_dataset_may_mix_files_and_objects() {
    let dir = Dir::new();
    let server = Server::new();
    let bytes = noise(64 * 100, 1);
    let path = dir.write("0.bin", &bytes[..3200]);
    server.put("bucket/1.bin", bytes[3200..].to_vec());
    let paths = [path, PathBuf::from(server.s3("1.bin"))];
    let mixed = Records::builder(64).open_files(&paths).unwrap();
    let loader = Loader::builder(mixed)
        .order(Order::shuffled(1))
        .batch_size(8)
        .build()
        .unwrap();
    let mut seen = 0;
    for batch in Got::epoch(&loader, 0) {
        for (id, record) in batch
            .ids
            .iter()
            .zip(batch.fields[0].bytes.chunks(64))
            .take(batch.valid)
        {
            assert_eq!(record, &bytes[*id as usize * 64..][..64]);
            seen += 1;
        }
    }
    assert_eq!(seen, 100);
}

#[test]
fn a_pattern_of_a_thousand_shards_is_listed_with_two_requests() {
    let server = Server::new();
    for shard in 0..1001 {
        server.put(&format!("bucket/set/train-{shard:04}.bin"), vec![7; 64]);
    }
    server.take_log();
    let names = server.s3("set/train-{0000..1000}.bin");
    let records = Records::builder(64).open_files(&expanded(&names)).unwrap();
    assert_eq!(records.len(), 1001);
    let tokens = Tokens::builder(DType::U16).window(32).open(&names).unwrap();
    assert_eq!(tokens.len(), 1001);
    let log = server.take_log();
    let count = |method: &str| {
        log.iter()
            .filter(|request| request.method == method)
            .count()
    };
    // Objects named one by one are looked at once each; a pattern is listed by pages of 1,000. The
    // first bytes of tokens are read, for their header.
    assert_eq!(
        (count("GET"), count("HEAD")),
        (2 + 1001, 1001),
        "{:?}",
        &log[..5]
    );
}

#[test]
fn an_empty_answer_to_head_is_no_empty_object() {
    let server = Server::new();
    server.script(|_| Some(Fault::NoLength));
    for (name, len) in [("full", 640_u64), ("empty", 0)] {
        server.put(&format!("bucket/{name}"), vec![7; len as usize]);
        let opened = Records::builder(64).open_files(&[server.http(name)]);
        assert_eq!(
            opened.map_or(0, |records| records.len()),
            len / 64,
            "{name}"
        );
    }
}

/// A shard of two members.
fn shard(number: u8) -> Vec<u8> {
    let members = ["a.bin", "b.bin"].map(|name| tar_member(name, &[number; 100]));
    [members.concat(), vec![0; 1024]].concat()
}

#[test]
fn one_index_file_opens_a_bucket_of_a_thousand_shards_with_a_few_requests() {
    let server = Server::new();
    let dir = Dir::new();
    (0..1000)
        .for_each(|number| server.put(&format!("bucket/set/{number:04}.tar"), shard(number as u8)));
    let file = dir.path("set.index");
    let pattern = "set/*.tar";
    let open = |index: &Path, pattern: &str| {
        Tar::builder()
            .bytes("bin")
            .index_file(index)
            .open(server.s3(pattern))
    };
    let first = open(&file, pattern).unwrap();
    assert_eq!(
        (first.shards_scanned(), first.index_unsaved()),
        (1000, None)
    );
    assert_eq!(
        open(&file, pattern).unwrap().shards_scanned(),
        0,
        "from the local file"
    );
    let missing = open(Path::new(&server.s3("set/index")), pattern)
        .err()
        .unwrap()
        .to_string();
    assert_says(&missing, "make the index file on a local disk first");

    let good = std::fs::read(&file).unwrap();
    server.put("bucket/set/index", good.clone());
    server.take_log();
    let tar = open(Path::new(&server.s3("set/index")), pattern).unwrap();
    assert_eq!((tar.shards_scanned(), tar.len()), (0, 2000));
    let loader = Loader::builder(tar)
        .order(Order::shuffled(1))
        .batch_size(8)
        .tuning(|t| t.slots(2).depth(4));
    let loader = loader
        .decode_field("bin", decode::Bytes::up_to(100))
        .build()
        .unwrap();
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    let log = server.take_log();
    let reads = log
        .iter()
        .filter(|request| request.path.ends_with(".tar"))
        .count();
    assert!(log.len() - reads <= 5, "{:?}", &log[..6]);
    assert!(
        reads <= 8 * 4,
        "{reads} reads for the first batch and those ahead of it"
    );
    drop(batch);

    // A replaced shard is scanned; nothing is written to the store.
    server.put("bucket/set/0007.tar", shard(200));
    let tar = open(Path::new(&server.s3("set/index")), pattern).unwrap();
    assert_eq!(tar.shards_scanned(), 1);
    assert!(
        tar.index_unsaved()
            .unwrap()
            .contains("nothing is written to a store")
    );
    for (damage, said, anew) in [
        (0, "not an index file", false),
        (8, "a damaged index file", true),
        (20, "a damaged index file", true),
        (16 + 112 * 1000, "a damaged index file", true),
    ] {
        let mut bytes = good.clone();
        bytes[damage] ^= 1;
        server.put("bucket/set/index", bytes.clone());
        let error = open(Path::new(&server.s3("set/index")), pattern)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(said), "{damage}: {error}");
        std::fs::write(&file, &bytes).unwrap();
        match open(&file, "set/000?.tar") {
            Ok(tar) => assert!(
                anew && tar.shards_scanned() == 10,
                "a local one is made anew"
            ),
            Err(error) => assert!(!anew && std::fs::read(&file).unwrap() == bytes, "{error}"),
        }
    }
}

fn expanded(names: &str) -> Vec<String> {
    (0..=1000)
        .map(|shard| names.replace("{0000..1000}", &format!("{shard:04}")))
        .collect()
}

#[test]
fn missing_objects_and_wrong_urls_are_typed_errors() {
    let server = Server::new();
    server.put("bucket/a.bin", vec![1; 64]);
    let open = |url: &str| {
        Tokens::builder(DType::U16)
            .window(4)
            .open(url)
            .err()
            .unwrap()
    };
    for (url, kind, words) in [
        (server.s3("gone.bin"), NotFound, "gone.bin"),
        (server.http("gone.bin"), NotFound, "gone.bin"),
        (server.s3("*.tar"), Empty, "nothing matches"),
        (server.s3("none/"), Empty, "no files that end in .bin"),
        ("ftp://host/a.bin".into(), Config, "use s3://, gs://, az://"),
        (
            format!("{}?secret=1", server.http("a.bin")),
            Config,
            "plain URL",
        ),
    ] {
        let error = open(&url);
        assert_eq!(error.kind(), kind, "{error}");
        assert!(
            error.to_string().contains(words) && !error.to_string().contains("secret"),
            "{error}"
        );
    }
    let error = feedline::storage::configure("s3://b", [("no_such", "secret")]).unwrap_err();
    assert!(
        error.kind() == Config && !error.to_string().contains("secret"),
        "{error}"
    );
}

#[test]
fn a_folder_of_a_bucket_gives_its_files_or_tells() {
    let server = Server::new();
    for name in ["a.bin", "b.BIN", "c.txt", "log/d.txt"] {
        server.put(&format!("bucket/set/{name}"), vec![1; 64]);
    }
    let open = |url: &str| Tokens::builder(DType::U16).window(4).open(server.s3(url));
    let set = open("set/").unwrap();
    assert_eq!(
        (
            set.tokens(),
            set.describe().ends_with("left out: 1 .txt, 1 folder")
        ),
        (64, true),
        "{}",
        set.describe()
    );
    server.put("bucket/set/more/e.bin", vec![1; 64]);
    let error = open("set/").err().unwrap();
    let pattern = server.s3("set/**");
    assert!(
        error.kind() == NotAFile && error.message().contains(&pattern),
        "{error}"
    );
    assert_eq!(open("set/**").unwrap().tokens(), 96);
    assert_eq!(open("set/**/*.bin").unwrap().tokens(), 64, "without b.BIN");
}

#[test]
fn odd_keys_are_left_out_and_counted_by_folders_and_patterns() {
    let server = Server::new();
    let good = ["a.bin", "b.bin", "sub/c.bin"];
    for name in good.into_iter().chain([
        "sub/",
        "deep/d.bin/",
        "sub//e.bin",
        "./f.bin",
        "x/../g.bin",
        "sub/h\u{7f}.bin",
    ]) {
        server.put(
            &format!("bucket/set/{name}"),
            vec![1; if name.ends_with('/') { 0 } else { 64 }],
        );
    }
    let open = |url: &str| Tokens::builder(DType::U16).window(4).open(server.s3(url));
    for (url, tokens) in [
        ("set/**", 96),
        ("set/**/*.bin", 96),
        ("set/sub/", 32),
        ("set/{a,b}.bin", 64),
    ] {
        let set = open(url).unwrap_or_else(|error| panic!("{url}: {error}"));
        assert_eq!(set.tokens(), tokens, "{url}: {}", set.describe());
        assert_eq!(
            set.describe().contains("with an odd key (an empty"),
            !url.contains("{a"),
            "{}",
            set.describe()
        );
    }
    assert!(
        open("set/")
            .err()
            .unwrap()
            .message()
            .contains("a subfolder holds data")
    );
    for (key, words) in [
        ("set/sub//e.bin", "an empty part"),
        ("set/a\tb.bin", "a control character"),
    ] {
        must_fail(open(key), Config, words);
    }
}

#[test]
fn an_object_replaced_in_mid_run_is_an_error_that_names_it() {
    let server = Server::new();
    server.put("bucket/a.bin", noise(6400, 1));
    let tokens = Tokens::builder(DType::U16)
        .window(32)
        .open(server.s3("a.bin"))
        .unwrap();
    let loader = Loader::builder(tokens).batch_size(10).build().unwrap();
    assert_eq!(Got::epoch(&loader, 0).len(), 10);
    server.put("bucket/a.bin", noise(6400, 2));
    let error = Got::try_epoch(&loader, 1).unwrap_err();
    assert_eq!(error.kind(), Changed, "{error}");
    assert!(
        error.to_string().contains("a.bin") && error.to_string().contains("replaced"),
        "{error}"
    );
    assert!(error.site().sample.is_some());
}

#[test]
fn a_replaced_object_is_looked_up_anew_after_a_failure() {
    let server = Server::new();
    let index = std::fs::read(fixtures().join("mds/fixed/index.json")).unwrap();
    for name in ["shard.00000.mds", "shard.00001.mds", "shard.00002.mds"] {
        server.put(
            &format!("bucket/{name}"),
            std::fs::read(fixtures().join("mds/fixed").join(name)).unwrap(),
        );
    }
    let plain = server.http("");
    for at in [
        plain.trim_end_matches('/'),
        server.s3("").trim_end_matches('/'),
    ] {
        server.put("bucket/index.json", index[1..].to_vec());
        assert_eq!(Mds::open(at).unwrap_err().kind(), Decode, "{at}");
        server.put("bucket/index.json", index.clone());
        assert_eq!(Mds::open(at).unwrap().len(), 9, "{at}: the mended index");

        let rows = |url: &str| -> Result<usize> {
            let loader = Loader::builder(Records::builder(8).open(url)?)
                .batch_size(10)
                .build()?;
            loader.epoch(0)?.map(|batch| Ok(batch?.len())).sum()
        };
        let url = format!("{at}/a.bin");
        server.put("bucket/a.bin", noise(800, 1));
        assert_eq!(rows(&url).unwrap(), 100);
        server.put("bucket/a.bin", noise(1600, 2));
        assert_eq!(rows(&url).unwrap_err().kind(), Changed, "{at}");
        assert_eq!(rows(&url).unwrap(), 200, "{at}: the new object");
    }
}

#[test]
fn a_server_that_ignores_conditions_cannot_slip_in_another_version() {
    let server = Server::new();
    server.put("bucket/a.bin", noise(640, 1));
    let tokens = Tokens::builder(DType::U16)
        .window(32)
        .open(server.s3("a.bin"))
        .unwrap();
    server.script(|request| (request.method == "GET").then_some(Fault::OtherVersion));
    let loader = Loader::builder(tokens).batch_size(10).build().unwrap();
    let error = Got::try_epoch(&loader, 0).unwrap_err();
    assert_eq!(error.kind(), Changed, "{error}");
    let words = "version v2 now, v1 when it was listed; or its servers disagree";
    assert_says(&error, words);
}

#[test]
fn connections_are_a_line_of_the_memory_plan() {
    let server = Server::new();
    server.put("bucket/a.bin", noise(6400, 1));
    let tokens = || {
        Tokens::builder(DType::U16)
            .window(32)
            .open(server.s3("a.bin"))
            .unwrap()
    };
    let plan = |budget: Option<usize>| {
        let builder = Loader::builder(tokens()).batch_size(10).workers(1);
        let builder = budget
            .into_iter()
            .fold(builder, |builder, budget| builder.memory_budget(budget));
        let loader = builder.build().unwrap();
        assert_eq!(Got::epoch(&loader, 0).len(), 10);
        loader.plan().clone()
    };
    let all = plan(None);
    let little = plan(Some(16 << 20));
    let bytes = |plan: &MemoryPlan| plan.term(MemoryTerm::NETWORK).bytes();
    assert!(
        bytes(&all) > 90 << 20 && all.to_string().contains("connections"),
        "{all}"
    );
    assert!(
        bytes(&little) <= 4 << 20 && little.total() <= 16 << 20,
        "{little}"
    );
}

/// A tar of members of some 100 KB with classes, and now and then a member that looks like a tar
/// itself.
fn large_tar() -> Vec<u8> {
    let mut tar = Vec::new();
    let add = |tar: &mut Vec<u8>, name: &str, bytes: &[u8], pax: bool| {
        let header = |name: &str, len: usize, flag: u8| {
            let mut block = [0_u8; 512];
            block[..name.len()].copy_from_slice(name.as_bytes());
            block[100..107].copy_from_slice(b"0000644");
            block[124..135].copy_from_slice(format!("{len:011o}").as_bytes());
            block[136..147].copy_from_slice(b"14500000000");
            block[148..156].copy_from_slice(b"        ");
            block[156] = flag;
            block[257..263].copy_from_slice(b"ustar\0");
            block[263..265].copy_from_slice(b"00");
            let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
            block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            block
        };
        if pax {
            let record = "30 mtime=1700000000.123456789\n";
            tar.extend_from_slice(&header("pax", record.len(), b'x'));
            tar.extend_from_slice(record.as_bytes());
            tar.resize(tar.len().next_multiple_of(512), 0);
        }
        tar.extend_from_slice(&header(name, bytes.len(), b'0'));
        tar.extend_from_slice(bytes);
        tar.resize(tar.len().next_multiple_of(512), 0);
    };
    let inner = {
        let mut inner = Vec::new();
        (0..40).for_each(|number| {
            add(
                &mut inner,
                &format!("{number:04}.bin"),
                &noise(3000, number),
                false,
            )
        });
        inner
    };
    for number in 0..400_u64 {
        let bytes = match number % 7 {
            3 => inner.clone(),
            _ => noise(40_000 + (number * 977 % 130_000) as usize, number),
        };
        add(
            &mut tar,
            &format!("{number:04}.bin"),
            &bytes,
            number % 3 == 0,
        );
        add(
            &mut tar,
            &format!("{number:04}.cls"),
            format!("{}", number % 10).as_bytes(),
            false,
        );
    }
    tar.resize((tar.len() + 1024).next_multiple_of(10_240), 0);
    tar
}

#[test]
fn a_tar_of_large_members_is_indexed_by_its_headers() {
    let server = Server::new();
    let dir = Dir::new();
    let bytes = large_tar();
    server.put("bucket/large.tar", bytes.clone());
    let bin = || feedline::tensor::Field::up_to("bin", feedline::tensor::DType::U8, 200_000);
    let open = |path: &str| {
        Tar::builder()
            .index(false)
            .raw(bin(), "bin")
            .class("cls")
            .open(path)
            .unwrap()
    };
    let local = open(dir.write("large.tar", &bytes).to_str().unwrap());
    for fault in [
        None,
        Some(Fault::Close),
        Some(Fault::Short(3)),
        Some(Fault::Status(503, None, "SlowDown")),
    ] {
        let mut asked = 0;
        let one = fault.clone();
        server.script(move |request| {
            asked += u64::from(request.range.is_some());
            // Now and then a way ends, or begins anew.
            one.clone()
                .filter(|_| request.range.is_some() && asked % 50 == 0)
        });
        server.take_log();
        let remote = open(&server.s3("large.tar"));
        let asked: u64 = server
            .take_log()
            .iter()
            .filter_map(|request| request.range)
            .map(|(first, end)| end - first)
            .sum();
        assert!(
            asked < bytes.len() as u64 / 3,
            "{fault:?}: {asked} of {} bytes",
            bytes.len()
        );
        assert_eq!(remote.len(), local.len());
        for sample in 0..local.len() {
            for field in 0..2 {
                assert_eq!(
                    remote.member_name(sample, field).unwrap(),
                    local.member_name(sample, field).unwrap()
                );
            }
        }
        server.script(|_| None);
        let loader = |dataset| {
            Loader::builder(dataset)
                .order(Order::shuffled(1))
                .batch_size(16)
                .build()
                .unwrap()
        };
        same(
            &Got::epoch(&loader(remote), 0),
            &Got::epoch(&loader(open(dir.path("large.tar").to_str().unwrap())), 0),
            "tar",
        );
    }
}

#[test]
fn no_format_shows_or_sends_a_secret_in_a_url() {
    let server = Server::new();
    let host = server.http("");
    let host = host
        .strip_prefix("http://")
        .unwrap()
        .trim_end_matches("/bucket/")
        .to_string();
    let forms = [
        format!("http://user:hunter2@{host}/bucket/x"),
        format!("HTTP://user:hunter2@{host}/bucket/x"),
        format!("http://{host}/bucket/x?X-Amz-Signature=hunter2"),
        format!("Http://{host}/bucket/x?sig=hunter2"),
        format!("http:/user:hunter2@{host}/bucket/x"),
        format!(" http://user:hunter2@{host}/bucket/x"),
        format!("user:hunter2@{host}/bucket/x"),
        format!("http://user:hunter2%40{host}/bucket/x"),
        server.s3("x").replacen("s3://", "s3://KEY:hunter2@", 1),
        server.s3("x") + "?X-Amz-Signature=hunter2",
        server.s3("x").replacen("s3://", "S3://", 1) + "?sig=hunter2",
        "abfss://c@a.dfs.core.windows.net/k?sig=hunter2".into(),
        "hf://user:hunter2@datasets/x".into(),
        "AccountName=a;AccountKey=hunter2;EndpointSuffix=x".into(),
    ];
    for form in &forms {
        for (format, open) in FORMATS {
            for name in [form.clone(), format!("{form}*"), format!("{form}/{{0..3}}")] {
                let error = open(&name)
                    .err()
                    .unwrap_or_else(|| panic!("{format} opens {name:?}"));
                let said = format!("{error} {error:?} {:?}", error.site());
                assert!(!said.contains("hunter2"), "{format}, {name:?}: {said}");
            }
        }
    }
    server.put("bucket/r.bin", vec![0; 64]);
    let records = Records::builder(4).open(server.s3("r.bin")).unwrap();
    let error = Loader::builder(records)
        .cache(Cache::at(&forms[0]))
        .build()
        .unwrap_err();
    assert!(
        error.to_string().contains("not a URL") && !error.to_string().contains("hunter2"),
        "{error}"
    );
    assert!(
        server
            .take_log()
            .iter()
            .all(|request| !request.path.contains("hunter2"))
    );
}
