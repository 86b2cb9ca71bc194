//! One range of an object, with retries: short bodies are continued, and every answer is compared with the listing.
//!
//! ```text
//! permit ─► signed request ─► answer: range, length, version? ─► chunks ─► sink
//!   ▲            │ 429, 503: fewer requests        │ other        │ cut, or silent for PATIENCE
//!   └── pause ◄──┴─────────────────────────────────┼──────────────┘ the next try asks for the rest
//!                                                  └─► typed error
//! ```

use super::http::{Answer, Note, cause};
use super::limit::Permit;
use super::store::{Object, Store, pin_of};
use crate::error::{Error, ErrorKind, Result, Stage};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, GetResult};
use std::ops::Range;
use std::time::Duration;

/// Tries in a row that bring nothing.
pub(super) const TRIES: u32 = 6;

/// A try ends after this time without a byte, or after the share of the stall deadline that leaves time for all tries.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Pause before the second try; it doubles with each.
const PAUSE: Duration = Duration::from_millis(50);

/// Bytes that make a try count as progress. A server that sends one byte and resets must not be asked for ever.
const PROGRESS: u64 = 64 << 10;

/// A failed try.
struct Failed {
    class: Class,
    error: Error,
    /// The try brought at least [`PROGRESS`] bytes.
    progress: bool,
}

type Tried<T> = std::result::Result<T, Failed>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Another try may work.
    Passing,
    /// As `Passing`, and the store asks for fewer requests.
    Throttled(Option<Duration>),
    /// Credentials may have expired on the way; one more try signs anew.
    Refused,
    /// No try will work.
    Lasting,
}

impl Failed {
    fn new(class: Class, kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { class, error: Error::new(kind, Stage::Read, message), progress: false }
    }
}

/// Counts failed tries.
#[derive(Default)]
struct Tries {
    failed: u32,
    refused: bool,
}

impl Tries {
    /// Pauses before the next try. Errors: the failure, if it is the last one.
    async fn after(&mut self, failure: Failed, permit: Permit<'_>) -> Result<()> {
        let Failed { class, error, progress } = failure;
        self.failed = if progress { 1 } else { self.failed + 1 };
        let last = match class {
            Class::Lasting => return Err(error),
            Class::Refused => std::mem::replace(&mut self.refused, true),
            Class::Passing | Class::Throttled(_) => self.failed >= TRIES,
        };
        match class {
            Class::Throttled(retry_after) => permit.throttled(retry_after),
            // Others use the permit meanwhile.
            _ => drop(permit),
        }
        if last {
            return Err(error.with_note(&format!("tried {} times", self.failed)));
        }
        tokio::time::sleep(PAUSE * 2_u32.pow(self.failed - 1)).await;
        Ok(())
    }
}

/// A request without a body, such as a look or a page of a listing.
pub(super) async fn asked<T>(
    store: &Store,
    key: &Key,
    mut ask: impl FnMut(Note) -> BoxFuture<'static, object_store::Result<T>>,
) -> Result<T> {
    let mut tries = Tries::default();
    loop {
        let (permit, note) = (store.limit.enter().await, Note::default());
        let failure = match tokio::time::timeout(PATIENCE, ask(note.clone())).await {
            Ok(Ok(answer)) => {
                permit.done();
                return Ok(answer);
            }
            Ok(Err(error)) => failed(&error, &note.answer()),
            Err(_) => silent(&note.answer(), PATIENCE),
        };
        tries.after(failure, permit).await.map_err(|error| error.with_path(store.url(key)))?;
    }
}

/// The destination of a range.
pub(super) trait Sink: Send {
    /// The next bytes.
    fn take(&mut self, chunk: &[u8]);

    /// The rest is asked for again.
    fn retried(&mut self) {}
}

impl Sink for Vec<u8> {
    fn take(&mut self, chunk: &[u8]) {
        self.extend_from_slice(chunk);
    }
}

/// Brings `range`, which is not empty, of an object: `sink` gets its bytes in order, each once. If it fails, `sink` has
/// got a correct beginning. A try ends after `patience` without a byte.
///
/// Errors name the object and the range: [`ErrorKind::Changed`] for another version, [`ErrorKind::NotFound`],
/// [`ErrorKind::Permission`], [`ErrorKind::Stalled`] for a silent store, [`ErrorKind::Io`].
pub(super) async fn fetch(object: &Object, range: Range<u64>, patience: Duration, sink: &mut impl Sink) -> Result<()> {
    let (mut at, mut tries) = (range.start, Tries::default());
    loop {
        let (permit, begin) = (object.store.limit.enter().await, at);
        let Err(failure) = attempt(object, &mut at, range.end, patience, sink).await else {
            permit.done();
            return Ok(());
        };
        let site = |error: Error| error.with_path(object.url()).with_range(range.start, range.end - range.start);
        let failure = Failed { progress: at - begin >= PROGRESS, ..failure };
        tries.after(failure, permit).await.map_err(site)?;
        sink.retried();
    }
}

/// One try. `at` moves with the bytes that came.
async fn attempt(object: &Object, at: &mut u64, end: u64, patience: Duration, sink: &mut impl Sink) -> Tried<()> {
    let note = Note::default();
    let options = GetOptions {
        range: Some(GetRange::Bounded(*at..end)),
        if_match: object.condition(),
        extensions: note.extensions(),
        ..GetOptions::default()
    };
    let got = tokio::time::timeout(patience, object.store.client.get_opts(&object.key, options)).await;
    let got = got.map_err(|_| silent(&note.answer(), patience))?.map_err(|error| failed(&error, &note.answer()))?;
    same(object, &got, *at..end)?;
    let mut body = got.into_stream();
    loop {
        let next = tokio::time::timeout(patience, body.next()).await;
        match next.map_err(|_| silent(&note.answer(), patience))? {
            Some(Ok(chunk)) => {
                if chunk.len() as u64 > end - *at {
                    let message = "the store sent more bytes than the range has";
                    return Err(Failed::new(Class::Passing, ErrorKind::Io, message));
                }
                sink.take(&chunk);
                *at += chunk.len() as u64;
            }
            Some(Err(error)) => {
                let message = format!("the body was cut: {}", cause(&error));
                return Err(Failed::new(Class::Passing, ErrorKind::Io, message));
            }
            None if *at == end => return Ok(()),
            None => {
                let message = format!("the body ended {} bytes too early", end - *at);
                return Err(Failed::new(Class::Passing, ErrorKind::Io, message));
            }
        }
    }
}

/// Compares an answer with the request and the listing.
fn same(object: &Object, got: &GetResult, range: Range<u64>) -> Tried<()> {
    let changed = |message: String| Err(Failed::new(Class::Lasting, ErrorKind::Changed, message));
    let pin = pin_of(&got.meta);
    if got.meta.size != object.len {
        return changed(format!("the object has {} bytes now, {} when it was listed", got.meta.size, object.len));
    }
    if pin != *object.pin && !object.pin.is_empty() {
        return changed(format!("the object has version {pin} now, {} when it was listed", object.pin));
    }
    if got.range != range {
        let message = format!("the store sent bytes {:?} for a request of bytes {range:?}", got.range);
        return Err(Failed::new(Class::Passing, ErrorKind::Io, message));
    }
    Ok(())
}

fn silent(answer: &Answer, patience: Duration) -> Failed {
    let what = if answer.status == 0 { "answer" } else { "byte" };
    let message = format!("the store sent no {what} for {patience:?}");
    Failed::new(Class::Passing, ErrorKind::Stalled, message)
}

/// Classifies a failed request by the store's answer.
fn failed(error: &object_store::Error, answer: &Answer) -> Failed {
    // The body of an error answer has the store's own code.
    let code = code_in(&error.to_string());
    let said = match &code {
        Some(code) => format!("{} {code}", answer.said()),
        None => answer.said(),
    };
    let expired =
        code.as_deref().is_some_and(|code| matches!(code, "ExpiredToken" | "RequestExpired" | "InvalidToken"));
    let (class, kind, message) = match answer.status {
        // The client itself failed, for example for lack of credentials.
        0 if answer.failure.is_none() => {
            let message = format!("no request could be made: {}; check the credentials", cause(error));
            (Class::Passing, ErrorKind::Io, message)
        }
        0 => (Class::Passing, ErrorKind::Io, said),
        404 | 410 => (Class::Lasting, ErrorKind::NotFound, said),
        412 => (Class::Lasting, ErrorKind::Changed, "the object was replaced since it was listed".into()),
        416 => (Class::Lasting, ErrorKind::Changed, "the object is shorter than when it was listed".into()),
        400 if expired => (Class::Refused, ErrorKind::Permission, said),
        401 | 403 => (Class::Refused, ErrorKind::Permission, format!("{said}; check the credentials")),
        429 | 503 => (Class::Throttled(answer.retry_after), ErrorKind::Io, said),
        408 | 500..=599 => (Class::Passing, ErrorKind::Io, said),
        300..=399 => (Class::Lasting, ErrorKind::Config, format!("{said}; check region and endpoint")),
        // Another range than asked for, or a malformed one.
        206 => (Class::Passing, ErrorKind::Io, format!("{said}: {}", cause(error))),
        200..=299 => (Class::Lasting, ErrorKind::Io, format!("{said} to a request for a range: {}", cause(error))),
        _ => (Class::Lasting, ErrorKind::Io, said),
    };
    Failed::new(class, kind, message)
}

/// `AccessDenied` of `<Code>AccessDenied</Code>`.
fn code_in(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let plain = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    plain.then(|| code.to_string())
}
