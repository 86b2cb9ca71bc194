//! Any bytes as an `index.json`, and as a shard, raw or zstd, of an index that is right: samples or
//! errors.
//!
//! `cargo +nightly fuzz run mds -- -rss_limit_mb=512`
#![no_main]

use feedline::dataset::Dataset;
use feedline::unstable::fuzzing;
use libfuzzer_sys::fuzz_target;

const COLUMNS: &str = r#""version":2,"format":"mds","column_names":["a","b","c","d"],
    "column_encodings":["bytes","uint16","str_int","str_float"],"column_sizes":[null,2,null,null]"#;

fuzz_target!(|bytes: &[u8]| {
    let _ = fuzzing::mds(bytes, bytes);
    let [samples, kind, shard @ ..] = bytes else {
        return;
    };
    let zip = kind & 1 == 1;
    let len = shard.len();
    let raw = if zip { usize::from(*kind) * 64 } else { len };
    let compressed =
        format!(r#""compression":"zstd","zip_data":{{"basename":"a.zstd","bytes":{len}}}"#);
    let compressed = if zip {
        &compressed
    } else {
        r#""compression":null,"zip_data":null"#
    };
    let file = format!(r#""raw_data":{{"basename":"a","bytes":{raw}}},"samples":{samples}"#);
    let index = format!(r#"{{"version":2,"shards":[{{{COLUMNS},{compressed},{file}}}]}}"#);
    let Ok(mds) = fuzzing::mds(index.as_bytes(), shard) else {
        return;
    };
    assert_eq!(mds.len(), u64::from(*samples));
    if zip {
        let _ = fuzzing::chunk(&mds, 0);
    } else {
        (0..mds.len()).for_each(|id| drop(fuzzing::sample(&mds, id)));
    }
});
