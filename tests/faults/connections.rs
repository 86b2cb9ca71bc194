//! Connections that fail before a store answers, and redirects. No message shows a secret.

use super::remote::{COUNT, RECORD, epoch, is_read, loader, opened, server, status};
use crate::common::got::Got;
use crate::common::server::Fault;
use crate::common::{assert_error, build};
use feedline::dataset::{Dataset, Records};
use feedline::profile::{Names, prometheus};
use feedline::{Error, ErrorKind, Loader};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const SECRET: &str = "do-not-show-me";

/// All that an error tells: no secret.
fn told(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text += &format!(" {error} {error:?}");
        source = error.source();
    }
    assert!(!text.contains(SECRET), "{text}");
    text
}

#[test]
fn a_redirect_of_an_http_server_is_followed() {
    let (server, bytes) = server();
    server.put("bucket/b.bin", bytes.clone());
    let away = Fault::Redirect("/bucket/b.bin?token=do-not-show-me".into());
    server.script(move |request| request.path.ends_with("/a.bin").then(|| away.clone()));
    let records = opened(&server.http("a.bin")).unwrap();
    assert_eq!(records.len(), COUNT as u64);
    let loader = build(Loader::builder(records).batch_size(COUNT));
    server.take_log();
    assert_eq!(Got::epoch(&loader, 0)[0].fields[0].bytes, bytes);
    let log = server.take_log();
    assert!(log.iter().any(|request| request.path.ends_with("/b.bin")));
    // Where it leads is gone, or has another version.
    server.remove("bucket/b.bin");
    let error = Got::try_epoch(&loader, 0).unwrap_err();
    let said = told(&error);
    assert_eq!(error.kind(), ErrorKind::NotFound, "{said}");
}

#[test]
fn redirects_that_go_round_are_one_error() {
    let (server, _) = server();
    server.script(|_| Some(Fault::Redirect("/bucket/a.bin?token=do-not-show-me".into())));
    let error = opened(&server.http("a.bin")).unwrap_err();
    let said = told(&error);
    assert_eq!(error.kind(), ErrorKind::Config, "{said}");
    assert!(said.contains("too many redirects"), "{said}");
    assert!(said.contains("a.bin"), "{said}");
    assert!(server.requests() <= 6, "{} requests", server.requests());
}

#[test]
fn a_server_that_is_not_there_is_one_error_that_names_it() {
    let (port, _) = listening();
    // No name has a part of more than 63 letters, so the lookup asks nobody.
    let nowhere = "x".repeat(64);
    for (host, words) in [
        (format!("127.0.0.1:{port}"), "Connection refused"),
        (format!("{nowhere}.invalid"), "lookup"),
    ] {
        let url = format!("http://{host}/a.bin");
        let error = opened(&url).unwrap_err();
        assert_error(&error, ErrorKind::Io, &[words, "tried 6 times", &url]);
    }
}

/// A port of this machine, and its listener.
fn listening() -> (u16, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    (listener.local_addr().unwrap().port(), listener)
}

/// A server that ends in a TLS handshake with a certificate of its own making. The files in
/// `fixtures/tls` come from: `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes
/// -days 36500 -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext
/// basicConstraints=CA:FALSE`, as DER.
fn self_signed() -> (u16, Arc<AtomicUsize>) {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let certificate = CertificateDer::from(&include_bytes!("../fixtures/tls/certificate.der")[..]);
    let key = PrivateKeyDer::try_from(&include_bytes!("../fixtures/tls/key.der")[..]).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ServerConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let config = builder
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key);
    let config = Arc::new(config.unwrap());
    let (port, listener) = listening();
    let met = Arc::new(AtomicUsize::new(0));
    let count = met.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            count.fetch_add(1, Ordering::SeqCst);
            let mut tls = rustls::ServerConnection::new(config.clone()).unwrap();
            // Ends with the client's alert.
            let _ = rustls::Stream::new(&mut tls, &mut stream).read(&mut [0]);
        }
    });
    (port, met)
}

#[test]
fn a_certificate_that_nobody_trusts_is_refused_at_once() {
    let (port, met) = self_signed();
    let error = opened(&format!("https://127.0.0.1:{port}/a.bin")).unwrap_err();
    let words = ["certificate", "SSL_CERT_FILE", "/a.bin"];
    assert_error(&error, ErrorKind::Config, &words);
    assert_eq!(met.load(Ordering::SeqCst), 1, "connections");
}

#[test]
fn a_server_without_tls_is_refused_at_once() {
    let (port, listener) = listening();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let error = opened(&format!("https://127.0.0.1:{port}/a.bin")).unwrap_err();
    let words = ["InvalidContentType; check the URL", "/a.bin"];
    assert_error(&error, ErrorKind::Config, &words);
}

#[test]
fn no_message_and_no_report_shows_a_credential() {
    let (server, bytes) = server();
    // An access key, too, is nobody's business: the signature's header has it.
    let keys = [
        ("access_key_id", SECRET),
        ("secret_access_key", SECRET),
        ("session_token", SECRET),
    ];
    let url = server.try_s3("", &keys).unwrap() + "/a.bin";
    let away = Fault::Redirect(format!("{}?X-Amz-Signature={SECRET}", server.http("a.bin")));
    for fault in [
        status(400, "AuthorizationHeaderMalformed"),
        status(403, "SignatureDoesNotMatch"),
        status(403, "ExpiredToken"),
        status(404, "NoSuchKey"),
        status(409, SECRET),
        status(500, "InternalError"),
        Fault::Close,
        Fault::OtherRange,
        away,
    ] {
        let builder = Loader::builder(opened(&url).unwrap()).batch_size(4);
        let long = Duration::from_secs(12);
        let loader = build(builder.tuning(|t| t.stall_deadline(long)));
        let one = fault.clone();
        server.script(move |request| is_read(request).then(|| one.clone()));
        let error = Got::try_epoch(&loader, 0).expect_err(&format!("{fault:?}"));
        told(&error);
        let report = loader.report();
        let snapshot = loader.snapshot();
        let exported = prometheus(&[(Names::new("train", 0), &snapshot)]);
        let ledger = loader.ledger();
        let said = format!("{report} {report:?} {snapshot:?} {exported} {ledger:?}");
        assert!(!said.contains(SECRET), "{fault:?}: {said}");
        let site = error.site();
        assert!(
            site.path.is_some() && site.len.is_some(),
            "{fault:?}: {error}"
        );
        server.script(|_| None);
    }
    // Listings and looks are questions with a query.
    for fault in [status(403, "AccessDenied"), Fault::Close] {
        server.script(move |_| Some(fault.clone()));
        for url in [url.replace("a.bin", "*.bin"), url.replace("a.bin", "b.bin")] {
            told(&Records::builder(RECORD).open_files(&[url]).unwrap_err());
        }
    }
    server.script(|_| None);
    epoch(&loader(&server).build().unwrap(), &bytes).unwrap();
}
