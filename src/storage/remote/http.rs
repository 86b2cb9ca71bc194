//! One HTTP exchange: the client with its time limits, and the note of what a store answered.
//!
//! The client library reduces answers to a few error kinds. [`Note`] keeps what retries and messages need: status,
//! request id, `Retry-After`, length and coding of the body, or why there was no answer.
//!
//! Limits: [`HELD`] bytes of a body that the library holds in memory, [`REFUSAL`] bytes of an error's.

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::sync::Hold;
use futures_util::StreamExt;
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{Extensions, HeaderMap};
use reqwest::redirect::Policy;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Limit for name lookup, connection and TLS together.
const CONNECT: Duration = Duration::from_secs(5);

/// A connection that is idle for longer is closed. S3 closes after some 20 s itself.
const IDLE: Duration = Duration::from_secs(15);

/// Limit for a body that is no range: a page of a listing has at most 5,000 keys of 1 KiB.
const HELD: usize = 32 << 20;

/// Bytes of an error's body that are read, and the time for them. Stores say all in less.
const REFUSAL: usize = 64 << 10;
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// The answer to one request.
#[derive(Clone, Debug, Default)]
pub(super) struct Note(Arc<Mutex<Answer>>);

#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    /// 0 without an answer.
    pub(super) status: u16,
    pub(super) request_id: Option<String>,
    pub(super) retry_after: Option<Duration>,
    /// A range was asked for.
    pub(super) is_range: bool,
    /// Length of the body by `Content-Length`.
    pub(super) len: Option<u64>,
    /// `Content-Encoding`, unless the body is as it is stored.
    pub(super) coding: Option<String>,
    /// Why the request failed. Without the URL, which may hold a secret.
    pub(super) failure: Option<String>,
    /// No other try will work.
    pub(super) lasting: bool,
}

impl Note {
    /// Extensions that carry the note to the exchange.
    pub(super) fn extensions(&self) -> Extensions {
        let mut extensions = Extensions::new();
        extensions.insert(self.clone());
        extensions
    }

    /// The last answer so far.
    pub(super) fn answer(&self) -> Answer {
        self.0.hold().clone()
    }

    fn set(&self, answer: Answer) {
        *self.0.hold() = answer;
    }
}

impl Answer {
    fn of(response: &HttpResponse, is_range: bool) -> Self {
        let headers = response.headers();
        let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
        // A server may send anything here.
        let short = |text: &str| text.chars().filter(|c| c.is_ascii_graphic()).take(64).collect::<String>();
        // Some stores keep the framing of an upload as if it were a coding.
        let plain = |coding: &str| ["", "identity", "aws-chunked"].contains(&coding.to_ascii_lowercase().as_str());
        let coding = headers.get("content-encoding").map(|_| text("content-encoding").unwrap_or("unreadable"));
        let id =
            ["x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-request-id"].into_iter().find_map(text);
        Self {
            status: response.status().as_u16(),
            request_id: id.map(short),
            retry_after: text("retry-after").and_then(after),
            is_range,
            len: text("content-length").and_then(|len| len.parse().ok()),
            coding: coding.filter(|coding| !plain(coding)).map(short),
            ..Self::default()
        }
    }

    /// `answered 503 (request id 4442587FB7D0A2F9)`, or the failure.
    pub(super) fn said(&self) -> String {
        match (&self.failure, &self.request_id) {
            (Some(failure), _) => failure.clone(),
            (None, Some(id)) => format!("the store answered {} (request id {id})", self.status),
            (None, None) => format!("the store answered {}", self.status),
        }
    }
}

/// The pause that a server asks for: seconds, or the time of its end.
fn after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let end = chrono::DateTime::parse_from_rfc2822(text).ok()?.timestamp();
    let now = std::time::UNIX_EPOCH.elapsed().ok()?.as_secs();
    Some(Duration::from_secs(u64::try_from(end).ok()?.saturating_sub(now)))
}

/// The innermost cause of an error; outer ones may show the URL.
pub(super) fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// Whether redirects go round, or the server's certificate is not trusted.
fn is_lasting(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| {
        error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_redirect)
            || error.downcast_ref::<std::io::Error>().is_some_and(is_distrust)
    })
}

/// An I/O error's source is that of the error in it, not that error.
fn is_distrust(error: &std::io::Error) -> bool {
    error.get_ref().is_some_and(|inner| match inner.downcast_ref::<rustls::Error>() {
        // The other type is the answer of a server without TLS.
        Some(error) => matches!(
            error,
            rustls::Error::InvalidCertificate(_)
                | rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)
        ),
        None => inner.downcast_ref::<std::io::Error>().is_some_and(is_distrust),
    })
}

#[derive(Debug)]
struct Service(reqwest::Client);

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let note = request.extensions().get::<Note>().cloned().unwrap_or_default();
        let asked = request.headers().get("range").map(|range| range.to_str().ok().and_then(whole));
        let is_head = request.method().as_str() == "HEAD";
        let answered = self.0.call(request).await;
        note.set(match &answered {
            Ok(response) => Answer::of(response, asked.is_some()),
            Err(error) => Answer { failure: Some(cause(error)), lasting: is_lasting(error), ..Answer::default() },
        });
        let mut response = answered?;
        if is_head {
            return Ok(response);
        }
        if !response.status().is_success() {
            return Ok(refusal(response).await);
        }
        let Some(whole) = asked else { return held(response).await };
        drop_odd_range(&mut response);
        accept_ok(&mut response, whole);
        add_length(&mut response);
        Ok(response)
    }
}

/// An error's answer with at most [`REFUSAL`] bytes of its body.
async fn refusal(response: HttpResponse) -> HttpResponse {
    let (parts, body) = response.into_parts();
    let (mut pieces, mut text) = (body.bytes_stream(), Vec::new());
    let read = async {
        while let Some(Ok(piece)) = pieces.next().await {
            text.extend_from_slice(&piece[..piece.len().min(REFUSAL - text.len())]);
            if text.len() == REFUSAL {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(REFUSAL_TIME, read).await;
    HttpResponse::from_parts(parts, String::from_utf8_lossy(&text).into_owned().into())
}

/// An answer that the library reads whole, such as a page of a listing.
async fn held(response: HttpResponse) -> std::result::Result<HttpResponse, HttpError> {
    let wrong = |what: &str| HttpError::new(HttpErrorKind::Decode, std::io::Error::other(what.to_string()));
    let (parts, body) = response.into_parts();
    // A proxy's page for people would be read as an empty listing.
    let kind = parts.headers.get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or("");
    if kind.trim_start().to_ascii_lowercase().starts_with("text/html") {
        return Err(wrong("the answer is a web page; check the endpoint and its login"));
    }
    let (mut pieces, mut bytes) = (body.bytes_stream(), Vec::new());
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        if bytes.len() + piece.len() > HELD {
            return Err(wrong(&format!("the answer has more than {HELD} bytes")));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(HttpResponse::from_parts(parts, bytes.into()))
}

/// Length of a range that starts at 0.
fn whole(range: &str) -> Option<u64> {
    let last: u64 = range.trim().strip_prefix("bytes=0-")?.parse().ok()?;
    last.checked_add(1)
}

/// Some servers answer 200 to a request for a range. If `Content-Range` names what they send, or if they send the whole
/// object and that was asked for, the answer counts as 206; otherwise the client refuses it. The range is compared later.
fn accept_ok(response: &mut HttpResponse, whole: Option<u64>) {
    let headers: &HeaderMap = response.headers();
    let has = headers.get("content-length").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let named = headers.contains_key("content-range");
    if response.status().as_u16() != 200 || has.is_none() || has != if named { span(headers) } else { whole } {
        return;
    }
    if let (false, Some(len)) = (named, whole) {
        let Ok(value) = format!("bytes 0-{}/{len}", len - 1).parse() else { return };
        response.headers_mut().insert("content-range", value);
    }
    if let Ok(partial) = 206.try_into() {
        *response.status_mut() = partial;
    }
}

/// The client adds 1 to the last byte, and takes the first of several ranges.
fn drop_odd_range(response: &mut HttpResponse) {
    let headers: &HeaderMap = response.headers();
    if headers.get_all("content-range").iter().count() > 1 || span(headers).is_none() {
        response.headers_mut().remove("content-range");
    }
}

/// The client wants a length, which a body in chunks does not have. The range says it; the body is counted later.
fn add_length(response: &mut HttpResponse) {
    let headers: &HeaderMap = response.headers();
    if let (false, Some(len)) = (headers.contains_key("content-length"), span(headers)) {
        response.headers_mut().insert("content-length", len.into());
    }
}

/// Length of the range in `Content-Range`.
fn span(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get("content-range")?.to_str().ok()?.strip_prefix("bytes ")?;
    let (first, last) = range.split_once('/')?.0.split_once('-')?;
    last.parse::<u64>().ok()?.checked_add(1)?.checked_sub(first.parse().ok()?)
}

/// Connects stores to the process's clients; a client shares its connections.
#[derive(Debug)]
pub(super) struct Connector {
    /// Whether redirects are followed. A redirected request of a bucket would lack its signature.
    pub(super) follow: bool,
    /// The client of all such connectors of the process.
    pub(super) shared: &'static OnceLock<reqwest::Client>,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = client(self.follow, self.shared)
            .map_err(|error| object_store::Error::Generic { store: "HTTP", source: error.into() })?;
        Ok(HttpClient::new(Service(client)))
    }
}

fn client(follow: bool, shared: &OnceLock<reqwest::Client>) -> Result<reqwest::Client> {
    if let Some(client) = shared.get() {
        return Ok(client.clone());
    }
    let built = reqwest::Client::builder()
        // HTTP/2 puts all requests on one connection, which bounds the rate.
        .http1_only()
        .tls_backend_preconfigured(tls()?)
        .connect_timeout(CONNECT)
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(super::limit::REQUESTS_MAX)
        .redirect(if follow { Policy::limited(5) } else { Policy::none() })
        .user_agent(concat!("feedline/", env!("CARGO_PKG_VERSION")))
        .build();
    let client = built.map_err(|error| unusable("no HTTP client").with_source(error))?;
    Ok(shared.get_or_init(|| client).clone())
}

fn tls() -> Result<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    // `SSL_CERT_FILE` and `SSL_CERT_DIR` are honoured. Without certificates, plain HTTP still works.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| unusable("no TLS").with_source(error))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn unusable(message: &str) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}
