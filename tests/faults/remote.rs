//! Faults of object stores: each is recovered, or one typed error that names the object; no byte is
//! wrong.

use crate::common::got::Got;
use crate::common::server::{Fault, Request, Server};
use crate::common::{Dir, assert_error, build, noise, sweep};
use feedline::dataset::Records;
use feedline::storage::Cache;
use feedline::{ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Result, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(super) const RECORD: usize = 50;
pub(super) const COUNT: usize = 24;
const SUBSTITUTE: OnBadSample = OnBadSample::Substitute { budget: 100 };

pub(super) fn opened(url: &str) -> Result<Records> {
    Records::builder(RECORD).open(url)
}

pub(super) fn server() -> (Server, Vec<u8>) {
    let server = Server::new();
    let bytes = noise(RECORD * COUNT, 9);
    server.put("bucket/a.bin", bytes.clone());
    (server, bytes)
}

/// Few reads in flight, so that an epoch is several requests.
pub(super) fn loader(server: &Server) -> LoaderBuilder {
    let records = Records::builder(RECORD).open(server.s3("a.bin")).unwrap();
    let builder = Loader::builder(records)
        .order(Order::shuffled(5))
        .batch_size(4)
        .tuning(|t| t.depth(4));
    builder.tuning(|t| t.stall_deadline(Duration::from_secs(4)))
}

/// An epoch, compared with the object; the ids that were substituted.
pub(super) fn epoch(loader: &Loader, bytes: &[u8]) -> Result<usize> {
    let mut seen = vec![0; COUNT];
    let mut substitutes = 0;
    for batch in Got::try_epoch(loader, 0)? {
        let records = batch.fields[0].bytes.chunks(RECORD);
        for (row, record) in records.enumerate().take(batch.valid) {
            let id = batch.ids[row] as usize;
            assert_eq!(record, &bytes[id * RECORD..][..RECORD], "sample {id}");
            seen[id] += 1;
            substitutes += usize::from(batch.status[row] == Status::Substitute as u8);
        }
    }
    assert_eq!(seen.iter().sum::<usize>(), COUNT);
    let once = seen.iter().all(|times| *times == 1);
    assert!(substitutes > 0 || once, "{seen:?}");
    Ok(substitutes)
}

pub(super) fn is_read(request: &Request) -> bool {
    request.method == "GET" && request.range.is_some()
}

/// An answer with this status and the store's own code.
pub(super) fn status(status: u16, code: &'static str) -> Fault {
    Fault::Status(status, None, code)
}

/// Gives the fault to the read with this number, counted from 0.
pub(super) fn once(fault: Fault, at: usize) -> impl FnMut(&Request) -> Option<Fault> + Send {
    let mut reads = 0;
    move |request| {
        reads += usize::from(is_read(request));
        (is_read(request) && reads == at + 1).then(|| fault.clone())
    }
}

/// Faults after which the same request works.
fn passing() -> Vec<Fault> {
    let mut faults = vec![
        Fault::Close,
        Fault::Long,
        Fault::Announced,
        Fault::OtherRange,
        Fault::Trickle,
        status(408, ""),
        status(429, "SlowDown"),
        status(500, "InternalError"),
        status(502, ""),
        Fault::Status(503, Some(0), "SlowDown"),
        status(503, "SlowDown"),
        status(403, "ExpiredToken"),
        status(400, "ExpiredToken"),
    ];
    faults.extend([0, 1, RECORD - 1].map(Fault::Stall));
    faults
}

#[test]
fn a_fault_of_any_read_that_may_pass_is_recovered() {
    let (server, bytes) = server();
    let faults = passing();
    let mut recovered = 0;
    for fault in &faults {
        for at in [0, 1, 3] {
            let loader = loader(&server).build().unwrap();
            server.script(once(fault.clone(), at));
            epoch(&loader, &bytes).unwrap_or_else(|error| panic!("{fault:?} at {at}: {error}"));
            recovered += loader.report().total.storage.counts.retries;
        }
    }
    // A trickle is slow, and no fault.
    assert!(recovered as usize >= 3 * (faults.len() - 1), "{recovered}");
}

#[test]
fn a_report_counts_requests_repeats_and_throttling() {
    let (server, bytes) = server();
    let loader = loader(&server).build().unwrap();
    server.take_log();
    server.script(once(status(503, "SlowDown"), 1));
    epoch(&loader, &bytes).unwrap();
    let log = server.take_log();
    let requests = log.iter().filter(|request| is_read(request)).count() as u64;
    let network = loader.report().total.storage.network.unwrap();
    let answers = network.first_byte.count;
    let seen = [
        network.requests,
        network.throttled,
        network.retries,
        answers,
    ];
    assert_eq!(seen, [requests, 1, 1, requests - 1], "{network}");
    assert!(network.bytes >= bytes.len() as u64, "{network}");
    assert!(network.in_flight_ns > 0, "{network}");
    let text = loader.report().to_string();
    let line = format!("network   {requests} requests");
    assert!(
        text.contains(&line) && text.contains("1 throttled"),
        "{text}"
    );
    let steady = loader.snapshot().storage.network.unwrap();
    assert!(steady.requests <= requests, "{steady}");
}

#[test]
fn a_fault_while_a_cache_fills_is_recovered_or_one_typed_error() {
    let (server, bytes) = server();
    let cached = |dir: &Dir| build(loader(&server).cache(Cache::at(dir.path("cache"))));
    for fault in passing() {
        let dir = Dir::new();
        let said = format!("{fault:?}");
        let loader = cached(&dir);
        server.script(once(fault, 0));
        epoch(&loader, &bytes).unwrap_or_else(|error| panic!("{said}: {error}"));
    }
    for (fault, kinds) in [
        (status(404, "NoSuchKey"), [ErrorKind::NotFound; 2]),
        (status(412, ""), [ErrorKind::Changed; 2]),
        (status(403, "AccessDenied"), [ErrorKind::Permission; 2]),
        (Fault::OtherVersion, [ErrorKind::Changed; 2]),
        // Stalled, if the machine is too busy for all tries.
        (Fault::Close, [ErrorKind::Io, ErrorKind::Stalled]),
    ] {
        let dir = Dir::new();
        let loader = cached(&dir);
        let one = fault.clone();
        server.script(move |request| is_read(request).then(|| one.clone()));
        let error = epoch(&loader, &bytes).expect_err(&format!("{fault:?}"));
        assert!(kinds.contains(&error.kind()), "{fault:?}: {error}");
        assert!(error.to_string().contains("a.bin"), "{fault:?}: {error}");
        server.script(|_| None);
        epoch(&loader, &bytes).unwrap();
    }
}

#[test]
fn a_dropped_loader_ends_the_downloads_of_its_cache() {
    let (server, _) = server();
    let dir = Dir::new();
    ends_at_once(&server, loader(&server).cache(Cache::at(dir.path("cache"))));
}

#[test]
fn a_body_cut_after_any_byte_is_continued() {
    let (server, bytes) = server();
    let kinds: [fn(usize) -> Fault; 3] = [Fault::Reset, Fault::Cut, Fault::Short];
    for kind in kinds {
        for at in sweep::places(0..RECORD, 7) {
            let loader = loader(&server).build().unwrap();
            server.script(once(kind(at), 1));
            epoch(&loader, &bytes).unwrap_or_else(|error| panic!("{:?}: {error}", kind(at)));
            let retries = loader.report().total.storage.counts.retries;
            assert!(retries > 0, "{:?}", kind(at));
        }
    }
}

#[test]
fn a_fault_that_stays_is_one_error_that_names_the_object() {
    use ErrorKind::{Changed, Config, Io, NotFound, Permission, Stalled};
    let (server, bytes) = server();
    let coded = Fault::With("content-encoding: gzip");
    let skewed = status(403, "RequestTimeTooSkewed");
    let ahead = "minutes ahead of the store's; set the clock";
    let replaced = "replaced since it was listed; or its servers disagree";
    // The words of a status also have its request id and code.
    for (fault, kind, words) in [
        (Fault::Close, Io, "tried "),
        (Fault::Cut(0), Io, "the body was cut"),
        (Fault::Short(0), Io, "announced 0 bytes for a range"),
        (Fault::OtherRange, Io, "Requested"),
        (Fault::Stall(0), Stalled, "no byte for 333"),
        (Fault::Whole, Io, "200"),
        (Fault::OkOtherRange, Io, "Requested"),
        // A look still finds the version that was listed.
        (Fault::OtherVersion, Changed, "its servers disagree"),
        (
            status(301, "PermanentRedirect"),
            Config,
            "check region and endpoint",
        ),
        (status(403, "AccessDenied"), Permission, ""),
        (status(404, "NoSuchKey"), NotFound, ""),
        (status(412, ""), Changed, replaced),
        (skewed, Permission, "set the clock"),
        (Fault::Skewed, Permission, ahead),
        (coded, Io, "store it without `Content-Encoding`"),
        (status(416, ""), Changed, "shorter than when it was listed"),
        (status(503, "SlowDown"), Io, ""),
    ] {
        let loader = loader(&server).build().unwrap();
        let one = fault.clone();
        server.script(move |request| is_read(request).then(|| one.clone()));
        let started = Instant::now();
        let error = epoch(&loader, &bytes).expect_err(&format!("{fault:?}"));
        let took = started.elapsed();
        let answered = match &fault {
            Fault::Status(status @ 400.., _, code) => {
                format!("{status} (request id REQ-1) {code}")
            }
            _ => String::new(),
        };
        let answered = answered.trim_end();
        let said = assert_error(&error, kind, &[words, answered, "s3://bucket-", "a.bin"]);
        let site = error.site();
        assert!(site.sample.is_some() && site.offset.is_some(), "{said}");
        let all = format!("{said} {error:?}");
        assert!(!all.contains("do-not-show-me"), "{all}");
        assert!(took < Duration::from_secs(60), "{fault:?} took {took:?}");
        // The loader goes on once the store does.
        server.script(|_| None);
        epoch(&loader, &bytes).unwrap();
    }
}

#[test]
fn a_store_has_its_own_timeout() {
    let (server, bytes) = server();
    let url = server.keyed_s3("-own", &[("timeout", "0.25")]) + "/a.bin";
    let records = Records::builder(RECORD).open(url).unwrap();
    let builder = Loader::builder(records).batch_size(4);
    let loader = build(builder.tuning(|t| t.depth(4)));
    server.script(|request| is_read(request).then_some(Fault::Stall(0)));
    let error = epoch(&loader, &bytes).unwrap_err();
    assert_error(&error, ErrorKind::Stalled, &["no byte for 250ms"]);
    let error = server.try_s3("-own", &[("timeout", "0")]).unwrap_err();
    assert_error(&error, ErrorKind::Config, &["timeout must be seconds"]);
}

#[test]
fn a_fault_in_mid_run_follows_the_batches_before_it() {
    let (server, bytes) = server();
    for (fault, kind) in [
        (status(404, "NoSuchKey"), ErrorKind::NotFound),
        (status(412, ""), ErrorKind::Changed),
    ] {
        let builder = loader(&server).order(Order::sequential());
        let loader = build(builder.tuning(|t| t.slots(1)));
        // With one slot, the reads of the second batch follow the delivery of the first.
        let first = Arc::new(AtomicBool::new(true));
        let is_first = first.clone();
        server.script(move |request| {
            (is_read(request) && !is_first.load(Ordering::SeqCst)).then(|| fault.clone())
        });
        let mut batches = loader.epoch(0).unwrap();
        let batch = batches.next().unwrap().unwrap();
        let got = Got::of(&batch).unwrap();
        assert_eq!(got.fields[0].bytes, bytes[..4 * RECORD]);
        first.store(false, Ordering::SeqCst);
        drop(batch);
        let error = batches.find_map(Result::err).unwrap();
        assert_error(&error, kind, &["request id REQ-1"]);
        assert_eq!(error.site().sample, Some(4), "{error}");
    }
}

#[test]
fn a_whole_object_is_used_where_the_range_is_the_object() {
    let (server, bytes) = server();
    let records = Records::builder(RECORD * COUNT).open(server.s3("a.bin"));
    let loader = build(Loader::builder(records.unwrap()).batch_size(1));
    server.script(|request| is_read(request).then_some(Fault::Whole));
    assert_eq!(Got::epoch(&loader, 0)[0].fields[0].bytes, bytes);
    assert_eq!(loader.report().total.storage.counts.retries, 0);
}

#[test]
fn an_answer_200_that_names_the_range_is_used() {
    let (server, bytes) = server();
    let loader = loader(&server).build().unwrap();
    server.script(|request| is_read(request).then_some(Fault::OkRange));
    epoch(&loader, &bytes).unwrap();
    assert_eq!(loader.report().total.storage.counts.retries, 0);
}

#[test]
fn servers_with_other_versions_are_named_and_never_substituted() {
    let (server, bytes) = server();
    let by_time = server.keyed_s3("-by-time", &[("versions_by_time", "true")]) + "/a.bin";
    let mirrors = || {
        let mut asked = [0, 0];
        move |request: &Request| {
            let asked = &mut asked[usize::from(is_read(request))];
            *asked += 1;
            (*asked % 2 == 0).then_some(Fault::OtherVersion)
        }
    };
    for cached in [false, true] {
        let dir = Dir::new();
        let with = |builder: LoaderBuilder| match cached {
            true => build(builder.cache(Cache::at(dir.path("cache")))),
            false => build(builder),
        };
        let loader = with(loader(&server).on_bad_sample(SUBSTITUTE));
        server.script(mirrors());
        let error = epoch(&loader, &bytes).unwrap_err();
        assert_error(&error, ErrorKind::Changed, &["disagree", "a.bin"]);
        assert_eq!(loader.ledger().substituted, 0);
        let records = Records::builder(RECORD).open(&by_time).unwrap();
        let loader = with(Loader::builder(records).batch_size(4));
        epoch(&loader, &bytes).unwrap();
        server.script(|_| None);
    }
}

#[test]
fn an_answer_that_is_no_object_is_refused_and_never_kept() {
    let (server, bytes) = server();
    let elsewhere = Server::new();
    elsewhere.put("bucket/a.bin", bytes.clone());
    let url = server.http("a.bin");
    let away = Fault::Redirect(elsewhere.http("a.bin"));
    for (header, words) in [
        (
            "content-type: text/html; charset=utf-8",
            "a page of the type text/html",
        ),
        (
            "Content-Type: application/xhtml+xml",
            "a page of the type application/xhtml+xml",
        ),
        (
            "content-type: application/json",
            "a page of the type application/json",
        ),
        ("content-encoding: br", "the content coding br"),
        (
            "x-goog-stored-content-encoding: gzip",
            "the content coding gzip",
        ),
        ("content-type: text/plain", "after a redirect to 127.0.0.1"),
    ] {
        let fault = move |_: &Request| Some(Fault::With(header));
        let cache = Dir::new();
        let builder = Loader::builder(opened(&url).unwrap()).batch_size(4);
        let builder = builder.cache(Cache::at(cache.path("cache")));
        let loader = build(builder.tuning(|t| t.depth(4)));
        match words.starts_with("after a redirect") {
            false => server.script(fault),
            true => {
                elsewhere.script(fault);
                let away = away.clone();
                server.script(move |_| Some(away.clone()));
            }
        }
        let error = epoch(&loader, &bytes).unwrap_err();
        let before = server.requests();
        let said = assert_error(&error, ErrorKind::Io, &[words, "a.bin"]);
        assert!(!said.contains("tried"), "the answer cannot change: {said}");
        server.script(|_| None);
        epoch(&loader, &bytes).unwrap();
        let asked = server.requests();
        assert!(asked > before, "{header}: something of it was kept");
    }
    // A host that answers with the object is another place of it.
    elsewhere.script(|_| Some(Fault::With("content-type: application/octet-stream")));
    server.script(move |_| Some(away.clone()));
    let loader = build(Loader::builder(opened(&url).unwrap()).batch_size(4));
    epoch(&loader, &bytes).unwrap();
    // The type of a bucket's object is what its writer said.
    server.script(|_| Some(Fault::With("content-type: text/html")));
    epoch(&build(self::loader(&server)), &bytes).unwrap();
    // Nor is a page taken when an object is looked at for the first time.
    server.put("bucket/new.bin", bytes.clone());
    let said = opened(&server.http("new.bin")).unwrap_err().to_string();
    let words = "a page of the type text/html; check the URL";
    assert!(said.contains(words), "{said}");
    server.put("bucket/new.html", bytes.clone());
    assert!(opened(&server.http("new.html")).is_ok());
}

#[test]
fn an_object_that_is_gone_is_substituted_by_policy() {
    let server = Server::new();
    let bytes = noise(RECORD * COUNT, 9);
    let half = RECORD * COUNT / 2;
    server.put("bucket/a.bin", bytes[..half].to_vec());
    server.put("bucket/b.bin", bytes[half..].to_vec());
    let urls = [server.s3("a.bin"), server.s3("b.bin")];
    let records = Records::builder(RECORD).open_files(&urls).unwrap();
    let builder = Loader::builder(records).order(Order::shuffled(5));
    let builder = builder.batch_size(4).tuning(|t| t.depth(4));
    let loader = build(builder.on_bad_sample(SUBSTITUTE));
    server.remove("bucket/b.bin");
    assert_eq!(epoch(&loader, &bytes).unwrap(), COUNT / 2);
    assert_eq!(loader.ledger().samples.len(), COUNT / 2);
}

#[test]
fn a_store_out_of_reach_is_no_samples_fault() {
    let (server, bytes) = server();
    let loader = build(loader(&server).on_bad_sample(SUBSTITUTE));
    server.script(|request| is_read(request).then_some(Fault::Close));
    let error = epoch(&loader, &bytes).unwrap_err();
    // Stalled, if the machine is too busy for an answer.
    let kinds = [ErrorKind::Io, ErrorKind::Stalled];
    assert!(kinds.contains(&error.kind()), "{error}");
    assert!(error.to_string().contains("; tried "), "{error}");
}

#[test]
fn a_store_that_is_away_for_seconds_is_waited_for() {
    let (server, bytes) = server();
    let long = Duration::from_secs(120);
    let loader = build(loader(&server).tuning(|t| t.stall_deadline(long)));
    let back = Instant::now() + Duration::from_millis(3500);
    server
        .script(move |request| (is_read(request) && Instant::now() < back).then_some(Fault::Close));
    epoch(&loader, &bytes).unwrap();
    assert!(loader.report().total.storage.counts.retries > 6);
}

#[test]
fn a_dropped_loader_ends_its_requests() {
    let (server, _) = server();
    ends_at_once(&server, loader(&server));
}

/// Drops a loader that waits for a silent server.
fn ends_at_once(server: &Server, builder: LoaderBuilder) {
    let long = Duration::from_secs(60);
    let loader = build(builder.tuning(|t| t.stall_deadline(long)));
    server.script(|request| is_read(request).then_some(Fault::Stall(0)));
    let mut batches = loader.epoch(0).unwrap();
    assert!(batches.next_within(Duration::from_millis(50)).is_pending());
    let started = Instant::now();
    drop(batches);
    drop(loader);
    // Far from the stall deadline, which a request that nobody ends would take.
    let took = started.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
}
