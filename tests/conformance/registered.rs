//! A store of another crate, which is not on the web.

use crate::common::*;
use feedline::dataset::{Dataset, Records};
use feedline::storage::object_store::memory::InMemory;
use feedline::storage::object_store::{ObjectStoreExt, path::Path as Key};
use feedline::storage::{Cache, configure, register};
use feedline::{Error, ErrorKind, Loader, Result};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

const RECORD: usize = 64;

/// What a store in memory does at once.
fn done<T>(work: impl Future<Output = T>) -> T {
    let work = std::pin::pin!(work);
    match work.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => out,
        Poll::Pending => panic!("it waits"),
    }
}

fn put(store: &InMemory, key: &str, bytes: Vec<u8>) {
    done(store.put(&Key::from(key), bytes.into())).unwrap();
}

/// A store with `d/a.bin`, `d/b.bin` and `d/e/c.bin` of 10 records each.
fn registered(scheme: &str) -> Arc<InMemory> {
    let store = Arc::new(InMemory::new());
    for (number, key) in ["d/a.bin", "d/b.bin", "d/e/c.bin"].iter().enumerate() {
        put(&store, key, noise(10 * RECORD, number as u64));
    }
    let shared = store.clone();
    register(scheme, move |_, _| Ok(shared.clone())).unwrap();
    store
}

fn open(name: &str) -> Result<Records> {
    Records::builder(RECORD).open(name)
}

fn bytes(dataset: impl Dataset, cache: Option<Cache>) -> Result<Vec<u8>> {
    let builder = Loader::builder(dataset).batch_size(4);
    let loader = cache
        .into_iter()
        .fold(builder, |builder, cache| builder.cache(cache))
        .build()?;
    let mut bytes = Vec::new();
    for batch in loader.epoch(0)? {
        bytes.extend_from_slice(batch?.field("record")?.as_bytes()?);
    }
    Ok(bytes)
}

#[test]
fn objects_are_found_by_every_kind_of_name_and_kept_in_a_cache() {
    drop(registered("toynames"));
    let all: Vec<Vec<u8>> = (0..3).map(|seed| noise(10 * RECORD, seed)).collect();
    for (name, right) in [
        ("toynames://bucket/d/a.bin", all[..1].concat()),
        ("toynames://bucket/d/*.bin", all[..2].concat()),
        (
            "toynames://bucket/d/{a,e/c}.bin",
            [&*all[0], &*all[2]].concat(),
        ),
        ("toynames://bucket/d/**/*.bin", all.concat()),
    ] {
        assert!(bytes(open(name).unwrap(), None).unwrap() == right, "{name}");
    }
    let dir = Dir::new();
    for _ in 0..2 {
        let cache = Cache::at(dir.path("cache"));
        let found = bytes(open("toynames://bucket/d/*.bin").unwrap(), Some(cache));
        assert!(found.unwrap() == all[..2].concat());
    }
}

#[test]
fn an_object_that_is_missing_or_replaced_is_an_error_of_that_kind() {
    let store = registered("toylies");
    let missing = "toylies://bucket/d/z.bin";
    let error = must_fail(
        open(missing),
        ErrorKind::NotFound,
        "the store has no such object",
    );
    assert_eq!(error.site().path.as_deref(), Some(missing.as_ref()));
    let opened = open("toylies://bucket/d/a.bin").unwrap();
    put(&store, "d/a.bin", noise(10 * RECORD, 9));
    let replaced = bytes(opened, None);
    must_fail(replaced, ErrorKind::Changed, "replaced since it was listed");
}

#[test]
fn an_opener_gets_the_bucket_and_its_options_and_may_fail() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = calls.clone();
    register("toyoptions", move |bucket, options| {
        seen.lock()
            .unwrap()
            .push((bucket.to_string(), options.to_vec()));
        Err(Error::user("no key for the vault"))
    })
    .unwrap();
    must_say(
        configure("toyoptions://bucket", [("key", "7")]),
        "no key for the vault",
    );
    must_say(open("toyoptions://other/a.bin"), "no key for the vault");
    let key = vec![("key".to_string(), "7".to_string())];
    let right = [("bucket".to_string(), key), ("other".to_string(), vec![])];
    assert_eq!(*calls.lock().unwrap(), right);
}

#[test]
fn a_scheme_is_registered_once_by_a_plain_name() {
    drop(registered("toyonce"));
    let again = |scheme: &str| register(scheme, |_, _| Err(Error::user("")));
    for (scheme, words) in [
        ("toyonce", "is taken"),
        ("s3", "is taken"),
        ("gs", "is taken"),
        ("az", "is taken"),
        ("http", "is taken"),
        ("https", "is taken"),
        ("", "lower-case letters and digits"),
        ("Toy", "lower-case letters and digits"),
        ("toy://", "lower-case letters and digits"),
    ] {
        must_fail(again(scheme), ErrorKind::Config, words);
    }
    must_fail(
        open("ftp://b/k"),
        ErrorKind::Config,
        "or a scheme that this program registered",
    );
}
