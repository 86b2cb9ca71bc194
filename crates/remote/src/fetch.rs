//! One range of an object, with retries. Bytes are used only if their answer passes all checks.
//!
//! ```text
//! permit ─► signed request ─► answer: range, length, coding, version? ─► chunks ─► sink
//!   ▲            │ 429, 503: fewer requests        │ no      │ the end: as many bytes as asked for? ─► proven
//!   │            │                                 │         │ more, or fewer ─► none of this try counts
//!   └── pause ◄──┴─────────────────────────────────┤         │ cut, slow ─► with an announced length, the bytes so far
//!                                                  └─► typed error      count, and the next try asks for the rest
//! ```
//!
//! Invariant: unproven bytes go into no sample and no cache, even if the read is cancelled or
//! fails.
//!
//! Limits: a try ends when [`LEAST`] bytes take longer than the patience, so that no server holds a
//! read for ever.

use super::http::{Answer, Note, cause};
use super::hub::in_words;
use super::limit::Permit;
use super::store::{ALL_BY_TIME, Object, Store};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, GetResult};
use std::ops::Range;
use std::time::{Duration, Instant};

/// After this many tries in a row without progress, a read may fail.
pub(super) const TRIES: u32 = 6;

/// Bytes that must arrive within the patience.
const LEAST: u64 = 16 << 10;

/// After twice the patience, a read may fail after this many tries: each then waits for its
/// patience, or as the store asks.
const SLOW_TRIES: u32 = 3;

/// Reads of a loader continue without progress for this many halves of the patience, even after
/// [`TRIES`] tries.
const AWAY: u32 = 5;

/// How long a read waits.
#[derive(Clone, Copy)]
pub struct Patience {
    /// A try ends when [`LEAST`] bytes take longer.
    of_try: Duration,
    /// How long the store may be unreachable.
    away: Duration,
}

impl Store {
    /// Patience of a read outside a run. The store must be reachable: a wrong URL is reported at
    /// once.
    pub(super) fn once(&self) -> Patience {
        Patience {
            of_try: self.patience,
            away: Duration::ZERO,
        }
    }

    /// Patience of a loader's reads: a run survives a server's restart.
    pub fn of_run(&self, own: Option<Duration>) -> Patience {
        let of_try = own.map_or(self.patience, |own| own.min(self.patience));
        Patience {
            of_try,
            away: of_try * AWAY / 2,
        }
    }
}

/// Pause before the second try; it doubles with each, up to 3.2 s.
const PAUSE: Duration = Duration::from_millis(50);

/// Maximum time of pauses while a quota is used up: several windows of the Hub.
const PAUSES: Duration = Duration::from_secs(1800);

/// Processes go on after a pause at this many different times, [`PAUSE`] apart.
const SPREAD: u32 = 32;

/// Bytes that make a try count as progress. Without this minimum, a server that sends one byte and
/// resets would be tried for ever.
const PROGRESS: u64 = 64 << 10;

/// Number of lookups of an object whose version is in doubt. Mirrors often answer in turn.
const LOOKS: usize = 4;

/// A failed try.
struct Failed {
    class: Class,
    error: Error,
    /// Whether the try received at least [`PROGRESS`] bytes.
    progress: bool,
}

type Tried<T> = std::result::Result<T, Failed>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Another try may work.
    Passing,
    /// Like `Passing`, and the store asks for fewer requests.
    Throttled(Option<Duration>),
    /// The store's quota is used up. Another try works after this time, so it does not count.
    Paused(Duration),
    /// No answer: requests may wait in a queue of the store.
    Unanswered,
    /// Refused, perhaps on the way to the store; one more try signs anew.
    Refused,
    /// Like `Refused`, and the credentials are renewed before the next try. `sure`: the store
    /// called them expired.
    Expired { sure: bool },
    /// No try will work.
    Lasting,
}

impl Failed {
    fn new(class: Class, kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            class,
            error: Error::new(kind, Stage::Read, message),
            progress: false,
        }
    }
}

/// Counts failed tries.
struct Tries {
    failed: u32,
    refused: bool,
    /// When the first of the failed tries ended.
    since: Option<Instant>,
    /// Time spent in pauses that the store asked for.
    paused: Duration,
    patience: Patience,
}

impl Tries {
    fn new(patience: Patience) -> Self {
        Self {
            failed: 0,
            refused: false,
            since: None,
            paused: Duration::ZERO,
            patience,
        }
    }

    /// Pauses before the next try. Errors: the failure, if it is the last one.
    async fn after(&mut self, failure: Failed, permit: Permit<'_>) -> Result<()> {
        let Failed {
            class,
            error,
            progress,
        } = failure;
        if let Class::Paused(pause) = class {
            self.paused += pause;
            if self.paused > PAUSES {
                return Err(error.with_note(&format!("waited for {:?}", self.paused)));
            }
            drop(permit);
            tokio::time::sleep(pause + PAUSE * (std::process::id() % SPREAD)).await;
            return Ok(());
        }
        self.failed = if progress { 1 } else { self.failed + 1 };
        if self.failed == 1 {
            self.since = Some(Instant::now());
        }
        let away = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        let last = match class {
            Class::Lasting | Class::Paused(_) => return Err(error),
            Class::Refused | Class::Expired { .. } => std::mem::replace(&mut self.refused, true),
            Class::Passing | Class::Throttled(_) | Class::Unanswered => {
                let slow = self.failed >= SLOW_TRIES && away >= self.patience.of_try * 2;
                away >= self.patience.away && (slow || self.failed >= TRIES)
            }
        };
        match class {
            Class::Throttled(retry_after) => permit.throttled(retry_after),
            Class::Unanswered => permit.throttled(None),
            // Other requests may use the permit during the pause.
            _ => drop(permit),
        }
        if last {
            return Err(error.with_note(&format!("tried {} times", self.failed)));
        }
        tokio::time::sleep(PAUSE * 2_u32.pow((self.failed - 1).min(TRIES))).await;
        Ok(())
    }
}

/// Waits for credentials, for as long as all tries may take; returns their number.
///
/// Errors: the renewal's; [`ErrorKind::Stalled`].
async fn ready(store: &Store, patience: Duration) -> Result<u64> {
    let Some(credentials) = &store.credentials else {
        return Ok(0);
    };
    let time = patience * TRIES;
    let ready = tokio::time::timeout(time, credentials.ready()).await;
    ready.unwrap_or_else(|_| {
        Err(Error::new(
            ErrorKind::Stalled,
            Stage::Read,
            format!("no credentials received within {time:?}"),
        ))
    })
}

/// Requests the renewal of credentials that the store called expired: once for all requests, and at
/// most once for one request.
fn refuse(store: &Store, number: u64, class: Class, tries: &Tries) {
    if let (Class::Expired { sure }, Some(credentials), false) =
        (class, &store.credentials, tries.refused)
    {
        credentials.refuse(number, sure);
    }
}

/// Makes a request for metadata, such as a lookup or a page of a listing.
pub(super) async fn asked<T>(
    store: &Store,
    key: &Key,
    mut ask: impl FnMut(Note) -> BoxFuture<'static, object_store::Result<T>>,
) -> Result<T> {
    let site = |error: Error| error.with_path(store.url(key));
    let mut tries = Tries::new(store.once());
    loop {
        let number = ready(store, store.patience).await.map_err(site)?;
        let permit = store.limit.enter().await;
        let note = Note::default();
        let failure = match tokio::time::timeout(store.patience, ask(note.clone())).await {
            Ok(Ok(answer)) => {
                permit.done();
                return Ok(answer);
            }
            Ok(Err(error)) => failed(store, &error, &note.answer()),
            Err(_) => silent(&note.answer(), 0, store.patience),
        };
        refuse(store, number, failure.class, &tries);
        tries.after(failure, permit).await.map_err(site)?;
    }
}

/// Receives the bytes of a range.
pub trait Sink: Send {
    /// Takes the bytes that start at `at`. After a wrong answer, `at` goes back to the end of the
    /// proven bytes.
    fn take(&mut self, at: u64, chunk: &[u8]);

    /// Confirms that all bytes before `end` are the object's.
    fn prove(&mut self, end: u64);

    /// Called when another try begins.
    fn retried(&mut self) {}
}

/// A whole range in memory.
pub(super) struct Collected {
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Sink for Collected {
    fn take(&mut self, at: u64, chunk: &[u8]) {
        self.bytes.truncate((at - self.start) as usize);
        self.bytes.extend_from_slice(chunk);
    }

    fn prove(&mut self, _: u64) {}
}

/// Fetches `range` of an object, which must not be empty. `sink` gets its bytes in order.
///
/// Errors name the object and the range: [`ErrorKind::Changed`] for another version,
/// [`ErrorKind::NotFound`], [`ErrorKind::Permission`], [`ErrorKind::Stalled`] for a silent store,
/// [`ErrorKind::Io`].
pub async fn fetch(
    object: &Object,
    range: Range<u64>,
    patience: Patience,
    sink: &mut impl Sink,
) -> Result<()> {
    let mut at = range.start;
    let mut tries = Tries::new(patience);
    let store = &object.store;
    let site = |error: Error| {
        match error.kind() {
            ErrorKind::Changed => store.forget_all(),
            _ => store.forget(&object.key),
        }
        error
            .with_path(object.url())
            .with_range(range.start, range.end - range.start)
    };
    loop {
        let number = ready(store, patience.of_try).await.map_err(site)?;
        let waits = object.meter.as_ref().map(|meter| meter.wait());
        let permit = store.limit.enter().await;
        let begin = at;
        drop(waits);
        let Err(mut failure) =
            attempt(object, &mut at, range.end, patience.of_try, sink, &permit).await
        else {
            permit.done();
            return Ok(());
        };
        if failure.error.kind() == ErrorKind::Changed
            && let Some(note) = disagreement(object, patience.of_try).await
        {
            failure.error = failure.error.with_note(&note);
        }
        let failure = Failed {
            progress: at - begin >= PROGRESS,
            ..failure
        };
        refuse(store, number, failure.class, &tries);
        let throttled = matches!(failure.class, Class::Throttled(_) | Class::Paused(_));
        if let Some(meter) = &object.meter {
            meter.throttled.add(u64::from(throttled));
        }
        tries.after(failure, permit).await.map_err(site)?;
        if let Some(meter) = &object.meter {
            meter.retries.add(1);
        }
        sink.retried();
    }
}

/// Asks for the version several more times. If an answer has the listed version, or the answers
/// have more than one, the object was not replaced: the answers come from servers with different
/// versions, or depend on the kind of request.
async fn disagreement(object: &Object, patience: Duration) -> Option<String> {
    let store = &object.store;
    let mut pins = Vec::new();
    for _ in 0..LOOKS {
        let options = GetOptions {
            head: true,
            ..GetOptions::default()
        };
        let looked =
            tokio::time::timeout(patience, store.client.get_opts(&object.key, options)).await;
        let meta = looked.ok()?.ok()?.meta;
        pins.extend((meta.size == object.len).then(|| store.pin_of(&meta)));
    }
    pins.sort_unstable();
    pins.dedup();
    if pins.len() < 2 && !pins.iter().any(|pin| **pin == *object.pin) {
        return None;
    }
    Some(format!(
        "or its servers disagree, such as mirrors with etags of their own: for the \
         same {} bytes, {} was listed, and the store now names {}; name one server \
         in the URL, or set {ALL_BY_TIME}=true in the environment, which compares \
         the time of the last change instead of the etag",
        object.len,
        object.pin,
        pins.join(", then "),
    ))
}

/// One try. `at` moves to the end of the proven bytes.
async fn attempt(
    object: &Object,
    at: &mut u64,
    end: u64,
    patience: Duration,
    sink: &mut impl Sink,
    permit: &Permit<'_>,
) -> Tried<()> {
    let note = Note::default();
    let request = object.meter.as_ref().map(|meter| meter.enter());
    let options = GetOptions {
        range: Some(GetRange::Bounded(*at..end)),
        if_match: object.condition(),
        extensions: note.extensions(),
        ..GetOptions::default()
    };
    let got =
        tokio::time::timeout(patience, object.store.client.get_opts(&object.key, options)).await;
    let got = got.map_err(|_| silent(&note.answer(), 0, patience))?;
    let got = got.map_err(|error| failed(&object.store, &error, &note.answer()))?;
    if let Some(request) = &request {
        request.answered();
    }
    if let Some(meter) = object.meter.as_ref().filter(|_| object.pin.is_empty()) {
        meter.unversioned.add(1);
    }
    permit.answered(patience);
    let answer = note.answer();
    let wrong = |class, kind, what: String| {
        Failed::new(class, kind, format!("{}, and {what}", answer.said()))
    };
    same(object, &got, &answer, *at..end)
        .map_err(|(class, kind, what)| wrong(class, kind, what))?;
    let broken = |what: String| wrong(Class::Passing, ErrorKind::Io, what);
    let mut body = got.into_stream();
    let mut here = *at;
    let mut due = Instant::now() + patience;
    let mut goal = here + LEAST;
    let failure = loop {
        match tokio::time::timeout_at(due.into(), body.next()).await {
            Ok(Some(Ok(chunk))) if chunk.len() as u64 > end - here => {
                return Err(broken("sent more bytes than the range has".into()));
            }
            Ok(Some(Ok(chunk))) => {
                sink.take(here, &chunk);
                here += chunk.len() as u64;
                if here >= goal {
                    due = Instant::now() + patience;
                    goal = here + LEAST;
                }
                permit.brought(chunk.len());
                if let Some(request) = &request {
                    request.brought(chunk.len());
                }
            }
            Ok(None) if here == end => {
                sink.prove(end);
                return Ok(());
            }
            Ok(None) => {
                return Err(broken(format!(
                    "the body ended {} bytes too early",
                    end - here
                )));
            }
            Ok(Some(Err(error))) => break broken(format!("the body was cut: {}", cause(&error))),
            Err(_) => break silent(&answer, here + LEAST - goal, patience),
        }
    };
    // With an announced length, the bytes before a cut are right. A chunked body is right only when
    // it ends.
    if answer.len.is_some() {
        *at = here;
        sink.prove(here);
    }
    if *at == end { Ok(()) } else { Err(failure) }
}

/// Compares an answer with the request and the listing.
fn same(
    object: &Object,
    got: &GetResult,
    answer: &Answer,
    range: Range<u64>,
) -> std::result::Result<(), (Class, ErrorKind, String)> {
    let changed = |message: String| Err((Class::Lasting, ErrorKind::Changed, message));
    let pin = object.store.pin_of(&got.meta);
    if got.meta.size != object.len {
        return changed(format!(
            "the object has {} bytes now, {} when it was listed",
            got.meta.size, object.len
        ));
    }
    if pin != *object.pin && !object.pin.is_empty() {
        return changed(format!(
            "the object has version {pin} now, {} when it was listed",
            object.pin
        ));
    }
    let wrong = |message: String| Err((Class::Passing, ErrorKind::Io, message));
    if got.range != range {
        return wrong(format!(
            "sent bytes {:?} for a request of bytes {range:?}",
            got.range
        ));
    }
    let asked = range.end - range.start;
    if let Some(len) = answer.len.filter(|len| *len != asked) {
        return wrong(format!("announced {len} bytes for a range of {asked}"));
    }
    Ok(())
}

/// The error of a try that was too slow. `came`: bytes received within the patience.
fn silent(answer: &Answer, came: u64, patience: Duration) -> Failed {
    match answer.status {
        0 => {
            let message = format!("the store sent no answer for {patience:?}");
            Failed::new(Class::Unanswered, ErrorKind::Stalled, message)
        }
        _ => {
            let bytes = if came == 0 {
                "no byte".into()
            } else {
                format!("only {came} bytes")
            };
            let message = format!("{}, and sent {bytes} for {patience:?}", answer.said());
            Failed::new(Class::Passing, ErrorKind::Stalled, message)
        }
    }
}

/// Classifies an error of a registered store, which need not be on the web.
fn failed_elsewhere(error: &object_store::Error) -> Failed {
    use object_store::Error::{NotFound, PermissionDenied, Precondition, Unauthenticated};
    let lasting = |kind, what: &str| Failed::new(Class::Lasting, kind, what);
    match error {
        NotFound { .. } => lasting(ErrorKind::NotFound, "the store has no such object"),
        Precondition { .. } => {
            let what = "the object was replaced since it was listed";
            lasting(ErrorKind::Changed, what)
        }
        PermissionDenied { .. } | Unauthenticated { .. } => {
            lasting(ErrorKind::Permission, "the store refused access")
        }
        _ => {
            let message = format!("the store failed: {}", cause(error));
            Failed::new(Class::Passing, ErrorKind::Io, message)
        }
    }
}

/// Classifies a failed request by the store's answer.
fn failed(store: &Store, error: &object_store::Error, answer: &Answer) -> Failed {
    if store.is_registered {
        return failed_elsewhere(error);
    }
    if let Some(pause) = answer.pause {
        return Failed::new(Class::Paused(pause), ErrorKind::Io, in_words(pause));
    }
    if answer.expired {
        let message = format!("{}: the Hub's CDN refuses the signed URL", answer.said());
        return Failed::new(Class::Passing, ErrorKind::Permission, message);
    }
    if let Some((kind, advice)) = &answer.advice {
        let class = match answer.status {
            401 | 403 => Class::Expired { sure: true },
            _ => Class::Lasting,
        };
        let message = match answer.status {
            0 => advice.clone(),
            _ => format!("{}: {advice}", answer.said()),
        };
        return Failed::new(class, *kind, message);
    }
    // The body of an error answer has the store's own code.
    let code = code_in(&error.to_string());
    let said = match &code {
        Some(code) => format!("{} {code}", answer.said()),
        None => answer.said(),
    };
    // An answer to HEAD has no code.
    let class_of_refusal = match code.as_deref() {
        Some("ExpiredToken" | "RequestExpired" | "InvalidToken" | "TokenRefreshRequired") => {
            Class::Expired { sure: true }
        }
        None => Class::Expired { sure: false },
        Some(_) => Class::Refused,
    };
    if let Some(refused) = &answer.refused {
        return Failed::new(Class::Lasting, ErrorKind::Io, format!("{said}: {refused}"));
    }
    let is_refusal = matches!(answer.status, 400 | 401 | 403) && store.credentials.is_some();
    if is_refusal && (answer.is_skewed() || code.as_deref() == Some("RequestTimeTooSkewed")) {
        return Failed::new(
            Class::Lasting,
            ErrorKind::Permission,
            format!("{said}: {}", skew(answer.ahead)),
        );
    }
    let (class, kind, message) = match answer.status {
        // The client itself failed, for example for lack of credentials.
        0 if answer.failure.is_none() => {
            let message = format!(
                "no request could be made: {}; check the credentials",
                cause(error)
            );
            (Class::Passing, ErrorKind::Io, message)
        }
        0 if answer.lasting => (
            Class::Lasting,
            ErrorKind::Config,
            format!("{said}; check the URL and SSL_CERT_FILE"),
        ),
        0 => (Class::Passing, ErrorKind::Io, said),
        404 | 410 => (Class::Lasting, ErrorKind::NotFound, said),
        407 => (
            Class::Lasting,
            ErrorKind::Config,
            format!("{said}; give the proxy as http://user:password@host:port"),
        ),
        412 => (
            Class::Lasting,
            ErrorKind::Changed,
            format!("{said}: the object was replaced since it was listed"),
        ),
        416 => (
            Class::Lasting,
            ErrorKind::Changed,
            format!("{said}: the object is shorter than when it was listed"),
        ),
        400 if class_of_refusal == Class::Refused || store.credentials.is_none() => {
            (Class::Lasting, ErrorKind::Io, said)
        }
        401 | 403 if store.credentials.is_none() => (
            Class::Refused,
            ErrorKind::Permission,
            format!("{said} to a request without credentials"),
        ),
        400 | 401 | 403 => (
            class_of_refusal,
            ErrorKind::Permission,
            format!("{said}; check the credentials and the region"),
        ),
        429 | 503 => (Class::Throttled(answer.retry_after), ErrorKind::Io, said),
        408 | 500..=599 => (Class::Passing, ErrorKind::Io, said),
        300..=399 => (
            Class::Lasting,
            ErrorKind::Config,
            format!("{said}; check region and endpoint"),
        ),
        // Another range than the requested one, or a malformed one.
        206 => (
            Class::Passing,
            ErrorKind::Io,
            format!("{said}: {}", cause(error)),
        ),
        200..=299 => {
            let asked = if answer.is_range {
                " to a request for a range"
            } else {
                ""
            };
            (
                Class::Lasting,
                ErrorKind::Io,
                format!("{said}{asked}: {}", cause(error)),
            )
        }
        _ => (Class::Lasting, ErrorKind::Io, said),
    };
    Failed::new(class, kind, message)
}

/// Explains a refusal because of the signature's time. `ahead`: seconds by which the store's clock
/// is ahead.
fn skew(ahead: i64) -> String {
    let minutes = (ahead.unsigned_abs() + 30) / 60;
    match ahead {
        _ if minutes == 0 => {
            "this machine's clock is wrong, or the request came late; set the clock".into()
        }
        1.. => {
            format!("this machine's clock is {minutes} minutes behind the store's; set the clock")
        }
        _ => {
            format!(
                "this machine's clock is {minutes} minutes ahead of the store's; set the \
                 clock"
            )
        }
    }
}

/// The code in an error's body: `AccessDenied` of `<Code>AccessDenied</Code>`.
fn code_in(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let plain = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    plain.then(|| code.to_string())
}
