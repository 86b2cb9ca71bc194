//! Faults of object stores: each is recovered, or one typed error that names the object; no byte is
//! wrong.

use crate::common::got::Got;
use crate::common::server::{Fault, Request, Server};
use crate::common::{Dir, noise, sweep};
use feedline::dataset::Records;
use feedline::storage::Cache;
use feedline::{ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Result, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(super) const RECORD: usize = 50;
pub(super) const COUNT: usize = 24;

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
        for (row, record) in batch.fields[0]
            .bytes
            .chunks(RECORD)
            .enumerate()
            .take(batch.valid)
        {
            let id = batch.ids[row] as usize;
            assert_eq!(record, &bytes[id * RECORD..][..RECORD], "sample {id}");
            seen[id] += 1;
            substitutes += usize::from(batch.status[row] == Status::Substitute as u8);
        }
    }
    assert_eq!(seen.iter().sum::<usize>(), COUNT);
    assert!(
        substitutes > 0 || seen.iter().all(|times| *times == 1),
        "{seen:?}"
    );
    Ok(substitutes)
}

pub(super) fn is_read(request: &Request) -> bool {
    request.method == "GET" && request.range.is_some()
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
        Fault::Status(408, None, ""),
        Fault::Status(429, None, "SlowDown"),
        Fault::Status(500, None, "InternalError"),
        Fault::Status(502, None, ""),
        Fault::Status(503, Some(0), "SlowDown"),
        Fault::Status(503, None, "SlowDown"),
        Fault::Status(403, None, "ExpiredToken"),
        Fault::Status(400, None, "ExpiredToken"),
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
    server.script(once(Fault::Status(503, None, "SlowDown"), 1));
    epoch(&loader, &bytes).unwrap();
    let requests = server
        .take_log()
        .iter()
        .filter(|request| is_read(request))
        .count() as u64;
    let network = loader.report().total.storage.network.unwrap();
    let seen = (
        network.requests,
        network.throttled,
        network.retries,
        network.first_byte.count,
    );
    assert_eq!(seen, (requests, 1, 1, requests - 1), "{network}");
    assert!(
        network.bytes >= bytes.len() as u64 && network.in_flight_ns > 0,
        "{network}"
    );
    let text = loader.report().to_string();
    assert!(
        text.contains(&format!("network   {requests} requests")) && text.contains("1 throttled"),
        "{text}"
    );
    assert!(
        loader
            .snapshot()
            .storage
            .network
            .is_some_and(|steady| steady.requests <= requests)
    );
}

#[test]
fn a_fault_while_a_cache_fills_is_recovered_or_one_typed_error() {
    let (server, bytes) = server();
    let cached = |dir: &Dir| {
        loader(&server)
            .cache(Cache::at(dir.path("cache")))
            .build()
            .unwrap()
    };
    for fault in passing() {
        let dir = Dir::new();
        let said = format!("{fault:?}");
        let loader = cached(&dir);
        server.script(once(fault, 0));
        epoch(&loader, &bytes).unwrap_or_else(|error| panic!("{said}: {error}"));
    }
    for (fault, kinds) in [
        (
            Fault::Status(404, None, "NoSuchKey"),
            [ErrorKind::NotFound; 2],
        ),
        (Fault::Status(412, None, ""), [ErrorKind::Changed; 2]),
        (
            Fault::Status(403, None, "AccessDenied"),
            [ErrorKind::Permission; 2],
        ),
        (Fault::OtherVersion, [ErrorKind::Changed; 2]),
        // Stalled, if the machine is too busy for all tries.
        (Fault::Close, [ErrorKind::Io, ErrorKind::Stalled]),
    ] {
        let dir = Dir::new();
        let loader = cached(&dir);
        let one = fault.clone();
        server.script(move |request| is_read(request).then(|| one.clone()));
        let error = epoch(&loader, &bytes).expect_err(&format!("{fault:?}"));
        assert!(
            kinds.contains(&error.kind()) && error.to_string().contains("a.bin"),
            "{fault:?}: {error}"
        );
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
            assert!(
                loader.report().total.storage.counts.retries > 0,
                "{:?}",
                kind(at)
            );
        }
    }
}

#[test]
fn a_fault_that_stays_is_one_error_that_names_the_object() {
    let (server, bytes) = server();
    for (fault, kind, words) in [
        (Fault::Close, ErrorKind::Io, "tried "),
        (Fault::Cut(0), ErrorKind::Io, "the body was cut"),
        (
            Fault::Short(0),
            ErrorKind::Io,
            "announced 0 bytes for a range",
        ),
        (Fault::OtherRange, ErrorKind::Io, "Requested"),
        (Fault::Stall(0), ErrorKind::Stalled, "no byte for 333"),
        (Fault::Whole, ErrorKind::Io, "200"),
        (Fault::OkOtherRange, ErrorKind::Io, "Requested"),
        // A look still finds the version that was listed.
        (
            Fault::OtherVersion,
            ErrorKind::Changed,
            "its servers disagree",
        ),
        (
            Fault::Status(301, None, "PermanentRedirect"),
            ErrorKind::Config,
            "check region and endpoint",
        ),
        (
            Fault::Status(403, None, "AccessDenied"),
            ErrorKind::Permission,
            "403 (request id REQ-1) AccessDenied",
        ),
        (
            Fault::Status(404, None, "NoSuchKey"),
            ErrorKind::NotFound,
            "404 (request id REQ-1) NoSuchKey",
        ),
        (
            Fault::Status(412, None, ""),
            ErrorKind::Changed,
            "replaced since it was listed; or its servers disagree",
        ),
        (
            Fault::Status(403, None, "RequestTimeTooSkewed"),
            ErrorKind::Permission,
            "set the clock",
        ),
        (
            Fault::Skewed,
            ErrorKind::Permission,
            "minutes ahead of the store's; set the clock",
        ),
        (
            Fault::With("content-encoding: gzip"),
            ErrorKind::Io,
            "store it without `Content-Encoding`",
        ),
        (
            Fault::Status(416, None, ""),
            ErrorKind::Changed,
            "shorter than when it was listed",
        ),
        (
            Fault::Status(503, None, "SlowDown"),
            ErrorKind::Io,
            "503 (request id REQ-1) SlowDown",
        ),
    ] {
        let loader = loader(&server).build().unwrap();
        let one = fault.clone();
        server.script(move |request| is_read(request).then(|| one.clone()));
        let started = Instant::now();
        let error = epoch(&loader, &bytes).expect_err(&format!("{fault:?}"));
        let said = error.to_string();
        assert!(
            error.kind() == kind && said.contains(words),
            "{fault:?}: {said}"
        );
        assert!(
            said.contains("s3://bucket-") && said.contains("a.bin"),
            "{said}"
        );
        assert!(
            error.site().sample.is_some() && error.site().offset.is_some(),
            "{said}"
        );
        assert!(
            !said.contains("do-not-show-me") && !format!("{error:?}").contains("do-not-show-me"),
            "{said}"
        );
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "{fault:?} took {:?}",
            started.elapsed()
        );
        // The loader goes on once the store does.
        server.script(|_| None);
        epoch(&loader, &bytes).unwrap();
    }
}

#[test]
fn a_store_has_its_own_timeout() {
    let (server, bytes) = server();
    let keys = [
        ("access_key_id", "key"),
        ("secret_access_key", "secret"),
        ("timeout", "0.25"),
    ];
    let records = Records::builder(RECORD)
        .open(format!("{}/a.bin", server.try_s3("-own", &keys).unwrap()))
        .unwrap();
    let loader = Loader::builder(records)
        .batch_size(4)
        .tuning(|t| t.depth(4))
        .build()
        .unwrap();
    server.script(|request| is_read(request).then_some(Fault::Stall(0)));
    let error = epoch(&loader, &bytes).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Stalled && error.to_string().contains("no byte for 250ms"),
        "{error}"
    );
    let error = server.try_s3("-own", &[("timeout", "0")]).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Config && error.to_string().contains("timeout must be seconds"),
        "{error}"
    );
}

#[test]
fn a_fault_in_mid_run_follows_the_batches_before_it() {
    let (server, bytes) = server();
    for (fault, kind) in [
        (Fault::Status(404, None, "NoSuchKey"), ErrorKind::NotFound),
        (Fault::Status(412, None, ""), ErrorKind::Changed),
    ] {
        let loader = loader(&server)
            .order(Order::sequential())
            .tuning(|t| t.slots(1))
            .build()
            .unwrap();
        // With one slot, the reads of the second batch follow the delivery of the first.
        let first = AtomicBool::new(true);
        let first = Arc::new(first);
        let is_first = first.clone();
        let one = fault.clone();
        server.script(move |request| {
            (is_read(request) && !is_first.load(Ordering::SeqCst)).then(|| one.clone())
        });
        let mut batches = loader.epoch(0).unwrap();
        let batch = batches.next().unwrap().unwrap();
        assert_eq!(
            Got::of(&batch).unwrap().fields[0].bytes,
            bytes[..4 * RECORD]
        );
        first.store(false, Ordering::SeqCst);
        drop(batch);
        let error = batches.find_map(Result::err).unwrap();
        assert!(
            error.kind() == kind && error.site().sample == Some(4),
            "{fault:?}: {error}"
        );
        assert!(error.to_string().contains("request id REQ-1"), "{error}");
    }
}

#[test]
fn a_whole_object_is_used_where_the_range_is_the_object() {
    let (server, bytes) = server();
    let records = Records::builder(RECORD * COUNT)
        .open(server.s3("a.bin"))
        .unwrap();
    let loader = Loader::builder(records).batch_size(1).build().unwrap();
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
    let keys = [
        ("access_key_id", "key"),
        ("secret_access_key", "secret"),
        ("versions_by_time", "true"),
    ];
    let by_time = server.try_s3("-by-time", &keys).unwrap() + "/a.bin";
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
        let with = |builder: LoaderBuilder| {
            if cached {
                builder.cache(Cache::at(dir.path("cache")))
            } else {
                builder
            }
        };
        let builder = loader(&server).on_bad_sample(OnBadSample::Substitute { budget: 100 });
        let loader = with(builder).build().unwrap();
        server.script(mirrors());
        let error = epoch(&loader, &bytes).unwrap_err();
        let said = error.to_string();
        assert!(
            error.kind() == ErrorKind::Changed
                && said.contains("disagree")
                && said.contains("a.bin"),
            "{said}"
        );
        assert_eq!(loader.ledger().substituted, 0);
        let records = Records::builder(RECORD).open(&by_time).unwrap();
        epoch(
            &with(Loader::builder(records).batch_size(4))
                .build()
                .unwrap(),
            &bytes,
        )
        .unwrap();
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
    for (header, words, moved) in [
        (
            "content-type: text/html; charset=utf-8",
            "a page of the type text/html",
            false,
        ),
        (
            "Content-Type: application/xhtml+xml",
            "a page of the type application/xhtml+xml",
            false,
        ),
        (
            "content-type: application/json",
            "a page of the type application/json",
            false,
        ),
        ("content-encoding: br", "the content coding br", false),
        (
            "x-goog-stored-content-encoding: gzip",
            "the content coding gzip",
            false,
        ),
        (
            "content-type: text/plain",
            "after a redirect to 127.0.0.1",
            true,
        ),
    ] {
        let fault = move |_: &Request| Some(Fault::With(header));
        let open = || Records::builder(RECORD).open(&url);
        let cache = Dir::new();
        let loader = Loader::builder(open().unwrap())
            .batch_size(4)
            .cache(Cache::at(cache.path("cache")));
        let loader = loader.tuning(|t| t.depth(4)).build().unwrap();
        match moved {
            false => server.script(fault),
            true => {
                elsewhere.script(fault);
                let away = away.clone();
                server.script(move |_| Some(away.clone()));
            }
        }
        let error = epoch(&loader, &bytes).unwrap_err();
        let before = server.requests();
        let said = error.to_string();
        assert!(
            error.kind() == ErrorKind::Io && said.contains(words) && said.contains("a.bin"),
            "{header}: {said}"
        );
        assert!(!said.contains("tried"), "the answer cannot change: {said}");
        server.script(|_| None);
        epoch(&loader, &bytes).unwrap();
        assert!(
            server.requests() > before,
            "{header}: nothing of it was kept"
        );
    }
    // A host that answers with the object is another place of it.
    elsewhere.script(|_| Some(Fault::With("content-type: application/octet-stream")));
    server.script(move |_| Some(away.clone()));
    let records = Records::builder(RECORD).open(&url).unwrap();
    epoch(
        &Loader::builder(records).batch_size(4).build().unwrap(),
        &bytes,
    )
    .unwrap();
    // The type of a bucket's object is what its writer said.
    server.script(|_| Some(Fault::With("content-type: text/html")));
    epoch(&loader(&server).build().unwrap(), &bytes).unwrap();
    // Nor is a page taken when an object is looked at for the first time.
    server.put("bucket/new.bin", bytes.clone());
    let error = Records::builder(RECORD)
        .open(server.http("new.bin"))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("a page of the type text/html; check the URL"),
        "{error}"
    );
    server.put("bucket/new.html", bytes.clone());
    assert!(
        Records::builder(RECORD)
            .open(server.http("new.html"))
            .is_ok()
    );
}

#[test]
fn an_object_that_is_gone_is_substituted_by_policy() {
    let server = Server::new();
    let bytes = noise(RECORD * COUNT, 9);
    let half = RECORD * COUNT / 2;
    server.put("bucket/a.bin", bytes[..half].to_vec());
    server.put("bucket/b.bin", bytes[half..].to_vec());
    let records = Records::builder(RECORD)
        .open_files(&[server.s3("a.bin"), server.s3("b.bin")])
        .unwrap();
    let builder = Loader::builder(records)
        .order(Order::shuffled(5))
        .batch_size(4)
        .tuning(|t| t.depth(4));
    let loader = builder
        .on_bad_sample(OnBadSample::Substitute { budget: 100 })
        .build()
        .unwrap();
    server.remove("bucket/b.bin");
    assert_eq!(epoch(&loader, &bytes).unwrap(), COUNT / 2);
    assert_eq!(loader.ledger().samples.len(), COUNT / 2);
}

#[test]
fn a_store_out_of_reach_is_no_samples_fault() {
    let (server, bytes) = server();
    let builder = loader(&server).on_bad_sample(OnBadSample::Substitute { budget: 100 });
    let loader = builder.build().unwrap();
    server.script(|request| is_read(request).then_some(Fault::Close));
    let error = epoch(&loader, &bytes).unwrap_err();
    // Stalled, if the machine is too busy for an answer.
    assert!(
        matches!(error.kind(), ErrorKind::Io | ErrorKind::Stalled),
        "{error}"
    );
    assert!(error.to_string().contains("; tried "), "{error}");
}

#[test]
fn a_store_that_is_away_for_seconds_is_waited_for() {
    let (server, bytes) = server();
    let loader = loader(&server)
        .tuning(|t| t.stall_deadline(Duration::from_secs(120)))
        .build()
        .unwrap();
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
    let loader = builder
        .tuning(|t| t.stall_deadline(Duration::from_secs(60)))
        .build()
        .unwrap();
    server.script(|request| is_read(request).then_some(Fault::Stall(0)));
    let mut batches = loader.epoch(0).unwrap();
    assert!(batches.next_within(Duration::from_millis(50)).is_pending());
    let started = Instant::now();
    drop(batches);
    drop(loader);
    // Far from the stall deadline, which a request that nobody ends would take.
    assert!(
        started.elapsed() < Duration::from_secs(30),
        "{:?}",
        started.elapsed()
    );
}
