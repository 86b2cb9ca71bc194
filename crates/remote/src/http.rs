//! One HTTP exchange: the client with its time limits, and a note of the store's answer.
//!
//! The client library reduces answers to a few error kinds. [`Note`] keeps what retries and
//! messages need: status, request id, `Retry-After`, length of the body, clock, or why there was no
//! answer.
//!
//! An answer whose type or coding shows that it is not the object is rejected here: no byte of it
//! reaches a sample or a cache. A redirect may lead to another host, as those of Hugging Face and
//! GitHub do; an object from there must have the length and version that were looked up (`fetch`),
//! and must not be text unless its name says so.
//!
//! Limits: [`HELD`] bytes of a body that the library holds in memory, [`REFUSAL`] bytes of an
//! error's body.

use super::odd::without_odd;
use super::proxy::{Proxies, Proxy};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use futures_util::StreamExt;
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpService,
};
use object_store::{Extensions, HeaderMap};
use reqwest::Url;
use reqwest::redirect::Policy;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, UNIX_EPOCH};

/// Time limit for name lookup, connection and TLS together.
const CONNECT: Duration = Duration::from_secs(5);

/// A connection that is idle for longer is closed. S3 itself closes it after some 20 s.
const IDLE: Duration = Duration::from_secs(15);

/// Maximum bytes of a body that is not a range. A page of a listing has at most 5,000 keys of 1 KiB
/// each.
const HELD: usize = 32 << 20;

/// Bytes of an error's body that are read, and the time for them. Stores need less.
const REFUSAL: usize = 64 << 10;
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// Maximum redirects of one request.
const REDIRECTS: usize = 5;

/// A refusal is explained by a clock difference of at least this. Stores refuse a signature that is
/// 15 minutes off.
const SKEW: i64 = 5 * 60;

/// The answer to one request.
#[derive(Clone, Debug, Default)]
pub(super) struct Note(Arc<Mutex<Answer>>);

#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    /// 0 without an answer.
    pub(super) status: u16,
    pub(super) request_id: Option<String>,
    pub(super) retry_after: Option<Duration>,
    /// Whether a range was asked for.
    pub(super) is_range: bool,
    /// Length of the body by `Content-Length`.
    pub(super) len: Option<u64>,
    /// The proxy that the request went through.
    pub(super) proxy: Option<String>,
    /// Seconds by which the store's clock is ahead of this machine's.
    pub(super) ahead: i64,
    /// Why the answer is not the object.
    pub(super) refused: Option<String>,
    /// Keys of a listing that cannot be in a folder.
    pub(super) odd: Vec<String>,
    /// Why the request failed. Without the URL, which may hold a secret.
    pub(super) failure: Option<String>,
    /// Whether no other try will work.
    pub(super) lasting: bool,
    /// A refusal of the Hub, with what to do.
    pub(super) advice: Option<(ErrorKind, String)>,
    /// Whether the Hub's CDN refused a signed URL.
    pub(super) expired: bool,
    /// How long the Hub's quota is used up.
    pub(super) pause: Option<Duration>,
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

    pub(super) fn set(&self, answer: Answer) {
        *self.0.hold() = answer;
    }
}

impl Answer {
    fn of(response: &HttpResponse, is_range: bool) -> Self {
        let headers = response.headers();
        let text = |name: &str| text_of(headers, name);
        let id = STORE_IDS.into_iter().chain(["x-request-id"]).find_map(text);
        Self {
            status: response.status().as_u16(),
            request_id: id.map(short),
            retry_after: text("retry-after").and_then(after),
            is_range,
            len: text("content-length").and_then(|len| len.parse().ok()),
            ahead: text("date").and_then(seconds_ahead).unwrap_or(0),
            ..Self::default()
        }
    }

    /// Whether the clocks differ by so much that this explains a refused signature.
    pub(super) fn is_skewed(&self) -> bool {
        self.ahead.abs() >= SKEW
    }

    /// Whether a proxy may have answered instead of the store.
    fn is_of_proxy(&self) -> bool {
        self.proxy.is_some() && self.request_id.is_none() && !(200..300).contains(&self.status)
    }

    /// `answered 503 (request id 4442587FB7D0A2F9)`, or the failure.
    pub(super) fn said(&self) -> String {
        let who = match &self.proxy {
            Some(proxy) if self.status == 407 => format!("the proxy {proxy}"),
            Some(proxy) if self.is_of_proxy() => {
                format!("the store, or the proxy {proxy} in front of it,")
            }
            _ => "the store".into(),
        };
        match (&self.failure, &self.request_id, &self.proxy) {
            (Some(failure), _, Some(proxy)) => format!("by the proxy {proxy}: {failure}"),
            (Some(failure), _, None) => failure.clone(),
            // A store that is not on the web.
            (None, None, _) if self.status == 0 => format!("{who} answered"),
            (None, Some(id), _) => format!("{who} answered {} (request id {id})", self.status),
            (None, None, _) => format!("{who} answered {}", self.status),
        }
    }
}

/// Headers in which the stores' own servers send a request id.
const STORE_IDS: [&str; 3] = [
    "x-amz-request-id",
    "x-ms-request-id",
    "x-guploader-uploadid",
];

pub(super) fn text_of<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

/// Shortens a text from a server, which may send anything.
fn short(text: &str) -> String {
    text.chars()
        .filter(|c| c.is_ascii_graphic())
        .take(64)
        .collect()
}

/// `Content-Encoding`, unless the body is sent as it is stored. Google's store unpacks objects that
/// are stored as gzip.
fn coding_of(headers: &HeaderMap) -> Option<String> {
    // Some stores keep the framing of an upload as if it were a coding.
    let named = ["content-encoding", "x-goog-stored-content-encoding"]
        .into_iter()
        .filter(|name| headers.contains_key(*name));
    named
        .map(|name| text_of(headers, name).unwrap_or("unreadable"))
        .find(|coding| {
            !["", "identity", "aws-chunked"].contains(&coding.to_ascii_lowercase().as_str())
        })
        .map(short)
}

/// Describes an answer that is not the object with this name: a page for people, or a message for
/// programs.
fn page_of(
    headers: &HeaderMap,
    name: &str,
    moved: Option<&str>,
    is_bucket: bool,
) -> Option<String> {
    let kind = text_of(headers, "content-type")?
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    let name = name.to_ascii_lowercase();
    let is_of = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    let is_page = match kind.as_str() {
        "text/html" | "application/xhtml+xml" => !is_of(PAGES),
        "application/json" | "application/problem+json" | "application/xml" | "text/xml" => {
            !is_of(PAGES) && !is_of(TEXTS)
        }
        kind => moved.is_some() && kind.starts_with("text/") && !is_of(PAGES) && !is_of(TEXTS),
    };
    // An object of a bucket has the type that its writer gave it.
    let is_own = is_bucket && STORE_IDS.iter().any(|id| headers.contains_key(*id));
    let from = moved.map_or(String::new(), |host| {
        format!(" after a redirect to {}", short(host))
    });
    (is_page && !is_own).then(|| {
        format!(
            "the answer is not the object but a page of the type {}{from}",
            short(&kind)
        )
    })
}

const PAGES: &[&str] = &[".html", ".htm", ".xhtml"];

/// Name suffixes of objects that may have a `Content-Type` of text.
const TEXTS: &[&str] = &[
    ".json", ".jsonl", ".ndjson", ".geojson", ".xml", ".txt", ".csv", ".tsv", ".md", ".yaml",
    ".yml",
];

/// Seconds by which the clock of a header `Date` is ahead of this machine's.
fn seconds_ahead(date: &str) -> Option<i64> {
    let there = chrono::DateTime::parse_from_rfc2822(date).ok()?.timestamp();
    Some(there - i64::try_from(UNIX_EPOCH.elapsed().ok()?.as_secs()).ok()?)
}

/// The pause that a server asks for: seconds, or the time when it ends.
fn after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let end = chrono::DateTime::parse_from_rfc2822(text).ok()?.timestamp();
    let now = std::time::UNIX_EPOCH.elapsed().ok()?.as_secs();
    Some(Duration::from_secs(
        u64::try_from(end).ok()?.saturating_sub(now),
    ))
}

/// The innermost cause of an error; outer ones may show the URL.
pub(super) fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// Whether the server's certificate is not trusted, or the server has no TLS.
fn is_lasting(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| {
        error
            .downcast_ref::<std::io::Error>()
            .is_some_and(is_distrust)
    })
}

/// `source` of an I/O error returns the source of the inner error, not the inner error.
fn is_distrust(error: &std::io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| match inner.downcast_ref::<rustls::Error>() {
            // The second kind is the answer of a server without TLS.
            Some(error) => matches!(
                error,
                rustls::Error::InvalidCertificate(_)
                    | rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)
            ),
            None => inner
                .downcast_ref::<std::io::Error>()
                .is_some_and(is_distrust),
        })
}

/// The HTTP client of a process.
#[derive(Clone, Debug)]
pub(super) struct Web {
    client: reqwest::Client,
    proxies: Arc<Proxies>,
    /// Why `SSL_CERT_FILE` or `SSL_CERT_DIR` gives no certificates.
    untrusting: Option<Arc<str>>,
}

/// Answers a request in steps of its own, by [`Service::hop`].
#[async_trait::async_trait]
pub(super) trait Steps: std::fmt::Debug + Send + Sync {
    /// The answer; `moved` is the host that a redirect led to.
    async fn answered(
        &self,
        service: &Service,
        request: HttpRequest,
        note: &Note,
        moved: &mut Option<String>,
    ) -> std::result::Result<HttpResponse, HttpError>;
}

/// Who answers.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// A redirected request would lack its signature.
    Bucket,
    Server,
    Hub(Arc<dyn Steps>),
}

#[derive(Debug)]
pub(super) struct Service {
    web: Web,
    kind: Kind,
}

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let note = request
            .extensions()
            .get::<Note>()
            .cloned()
            .unwrap_or_default();
        let asked = request
            .headers()
            .get("range")
            .map(|range| range.to_str().ok().and_then(whole));
        let is_head = request.method().as_str() == "HEAD";
        let name = request.uri().path().to_string();
        let is_object = is_head || asked.is_some();
        let mut moved = None;
        let answered = match &self.kind {
            Kind::Hub(hub) => hub.answered(self, request, &note, &mut moved).await,
            Kind::Bucket | Kind::Server => self.answered(request, &note, &mut moved).await,
        };
        let mut response = answered?;
        if !response.status().is_success() {
            return if is_head {
                Ok(response)
            } else {
                Ok(refusal(response).await)
            };
        }
        if is_object && let Some(refused) = self.not_the_object(&response, &name, moved.as_deref())
        {
            note.set(Answer {
                refused: Some(refused.clone()),
                ..note.answer()
            });
            return Err(HttpError::new(
                HttpErrorKind::Decode,
                std::io::Error::other(refused),
            ));
        }
        if is_head {
            return Ok(response);
        }
        let Some(whole) = asked else {
            let mut odd = Vec::new();
            let page = held(response, self.is_bucket().then_some(&mut odd)).await;
            note.set(Answer {
                odd,
                ..note.answer()
            });
            return page;
        };
        drop_odd_range(&mut response);
        accept_ok(&mut response, whole);
        add_length(&mut response);
        Ok(response)
    }
}

impl Service {
    /// The answer, after redirects of an HTTP server: `moved` is the host that the last one led to.
    async fn answered(
        &self,
        request: HttpRequest,
        note: &Note,
        moved: &mut Option<String>,
    ) -> std::result::Result<HttpResponse, HttpError> {
        let mut url: Url = request
            .uri()
            .to_string()
            .parse()
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        for _ in 0..=REDIRECTS {
            let response = self.hop(request.clone(), &url, note).await?;
            let place = text_of(response.headers(), "location")
                .filter(|_| is_redirect(response.status().as_u16()));
            let Some(to) = place
                .filter(|_| !self.is_bucket())
                .and_then(|place| url.join(place).ok())
            else {
                return Ok(response);
            };
            *moved = to.host_str().map(String::from);
            url = to;
        }
        let failure = "too many redirects".to_string();
        note.set(Answer {
            failure: Some(failure.clone()),
            lasting: true,
            ..Answer::default()
        });
        Err(HttpError::new(
            HttpErrorKind::Decode,
            std::io::Error::other(failure),
        ))
    }

    fn is_bucket(&self) -> bool {
        matches!(self.kind, Kind::Bucket)
    }

    /// The answer of one server; redirects are not followed.
    pub(super) async fn hop(
        &self,
        mut request: HttpRequest,
        url: &Url,
        note: &Note,
    ) -> std::result::Result<HttpResponse, HttpError> {
        *request.uri_mut() = url
            .as_str()
            .parse()
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let is_range = request.headers().contains_key("range");
        let proxy = self.web.proxies.proxy_of(url);
        match self.web.client.call(request).await {
            Ok(response) => {
                note.set(Answer {
                    proxy: proxy.map(Proxy::name),
                    ..Answer::of(&response, is_range)
                });
                Ok(response)
            }
            Err(error) => {
                note.set(self.unanswered(&error, proxy, url).await);
                Err(error)
            }
        }
    }

    /// The note of a request that got no answer.
    async fn unanswered(&self, error: &HttpError, proxy: Option<&Proxy>, url: &Url) -> Answer {
        let mut failure = cause(error);
        let mut lasting = is_lasting(error);
        if let (true, Some(why)) = (lasting, &self.web.untrusting) {
            failure = format!("{failure} ({why})");
        }
        if let Some(proxy) = proxy.filter(|_| url.scheme() == "https").cloned() {
            let to = url.clone();
            let status = tokio::task::spawn_blocking(move || proxy.refusal(&to)).await;
            if let Ok(Some(status)) = status {
                // A proxy that forbids a request forbids it again.
                lasting |= status < 500;
                failure = format!("it refused the tunnel with the status {status}");
            }
        }
        let proxy = proxy.map(Proxy::name);
        Answer {
            failure: Some(failure),
            lasting,
            proxy,
            ..Answer::default()
        }
    }

    /// Why a successful answer is not the object.
    fn not_the_object(
        &self,
        response: &HttpResponse,
        name: &str,
        moved: Option<&str>,
    ) -> Option<String> {
        let headers = response.headers();
        if let Some(page) = page_of(headers, name, moved, self.is_bucket()) {
            return Some(format!(
                "{page}; check the URL, and whether a login or a proxy is in the way"
            ));
        }
        let coding = coding_of(headers)?;
        Some(format!(
            "the object has the content coding {coding}; store it without `Content-Encoding`"
        ))
    }
}

pub(super) fn is_redirect(status: u16) -> bool {
    matches!(status, 301 | 302 | 303 | 307 | 308)
}

/// An error's answer with at most [`REFUSAL`] bytes of its body.
async fn refusal(response: HttpResponse) -> HttpResponse {
    let (parts, body) = response.into_parts();
    let mut pieces = body.bytes_stream();
    let mut text = Vec::new();
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

/// An answer that the library reads as a whole, such as a page of a listing. Odd keys are moved to
/// `odd`.
async fn held(
    response: HttpResponse,
    odd: Option<&mut Vec<String>>,
) -> std::result::Result<HttpResponse, HttpError> {
    let wrong = |what: &str| {
        HttpError::new(
            HttpErrorKind::Decode,
            std::io::Error::other(what.to_string()),
        )
    };
    let (parts, body) = response.into_parts();
    // A proxy's page for people would be read as an empty listing.
    let kind = parts
        .headers
        .get("content-type")
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or("");
    if kind
        .trim_start()
        .to_ascii_lowercase()
        .starts_with("text/html")
    {
        return Err(wrong(
            "the answer is a web page; check the endpoint and its login",
        ));
    }
    let mut pieces = body.bytes_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        if bytes.len() + piece.len() > HELD {
            return Err(wrong(&format!("the answer has more than {HELD} bytes")));
        }
        bytes.extend_from_slice(&piece);
    }
    let bytes = match (odd, String::from_utf8(bytes)) {
        (Some(odd), Ok(page)) => without_odd(page, odd).into_bytes(),
        (None, Ok(page)) => page.into_bytes(),
        (_, Err(error)) => error.into_bytes(),
    };
    Ok(HttpResponse::from_parts(parts, bytes.into()))
}

/// Length of the range in the header `Range`, if the range starts at 0.
fn whole(range: &str) -> Option<u64> {
    let last: u64 = range.trim().strip_prefix("bytes=0-")?.parse().ok()?;
    last.checked_add(1)
}

/// Some servers answer 200 to a request for a range. If `Content-Range` names the range that they
/// send, or if they send the whole object as requested, the answer is treated as 206; otherwise the
/// client refuses it. The range is compared later.
fn accept_ok(response: &mut HttpResponse, whole: Option<u64>) {
    let headers: &HeaderMap = response.headers();
    let has = headers
        .get("content-length")
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let named = headers.contains_key("content-range");
    if response.status().as_u16() != 200
        || has.is_none()
        || has != if named { span(headers) } else { whole }
    {
        return;
    }
    if let (false, Some(len)) = (named, whole) {
        let Ok(value) = format!("bytes 0-{}/{len}", len - 1).parse() else {
            return;
        };
        response.headers_mut().insert("content-range", value);
    }
    if let Ok(partial) = 206.try_into() {
        *response.status_mut() = partial;
    }
}

/// Removes a range that the client would misread: it adds 1 to the last byte, and takes the first
/// of several ranges.
fn drop_odd_range(response: &mut HttpResponse) {
    let headers: &HeaderMap = response.headers();
    if headers.get_all("content-range").iter().count() > 1 || span(headers).is_none() {
        response.headers_mut().remove("content-range");
    }
}

/// Adds a length, which the client requires and a chunked body does not have. It comes from the
/// range; the body is counted later.
fn add_length(response: &mut HttpResponse) {
    let headers: &HeaderMap = response.headers();
    if let (false, Some(len)) = (headers.contains_key("content-length"), span(headers)) {
        response.headers_mut().insert("content-length", len.into());
    }
}

/// Length of the range in `Content-Range`.
fn span(headers: &HeaderMap) -> Option<u64> {
    let range = headers
        .get("content-range")?
        .to_str()
        .ok()?
        .strip_prefix("bytes ")?;
    let (first, last) = range.split_once('/')?.0.split_once('-')?;
    last.parse::<u64>()
        .ok()?
        .checked_add(1)?
        .checked_sub(first.parse().ok()?)
}

/// Connects stores to the process's client, whose connections they share.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) kind: Kind,
    pub(super) shared: &'static OnceLock<Web>,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let web = web(self.shared).map_err(|error| object_store::Error::Generic {
            store: "HTTP",
            source: error.into(),
        })?;
        Ok(HttpClient::new(Service {
            web,
            kind: self.kind.clone(),
        }))
    }
}

fn web(shared: &OnceLock<Web>) -> Result<Web> {
    if let Some(web) = shared.get() {
        return Ok(web.clone());
    }
    let proxies = Arc::new(Proxies::of_env()?);
    let (tls, untrusting) = tls()?;
    let known = proxies.clone();
    let built = reqwest::Client::builder()
        // HTTP/2 puts all requests on one connection, which bounds the rate.
        .http1_only()
        .tls_backend_preconfigured(tls)
        .connect_timeout(CONNECT)
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(super::limit::REQUESTS_MAX)
        // `Service` follows redirects.
        .redirect(Policy::none())
        .proxy(reqwest::Proxy::custom(move |url| {
            known.proxy_of(url).map(|proxy| proxy.url.clone())
        }))
        .user_agent(concat!("feedline/", env!("CARGO_PKG_VERSION")))
        .build();
    let client = built.map_err(|error| unusable("no HTTP client").with_source(error))?;
    Ok(shared
        .get_or_init(|| Web {
            client,
            proxies,
            untrusting,
        })
        .clone())
}

/// The configuration of TLS, and why the certificates that the environment names are missing.
fn tls() -> Result<(rustls::ClientConfig, Option<Arc<str>>)> {
    let mut roots = rustls::RootCertStore::empty();
    // `SSL_CERT_FILE` and `SSL_CERT_DIR` are honoured. Without certificates, plain HTTP still
    // works.
    let found = rustls_native_certs::load_native_certs();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"]
        .into_iter()
        .find(|name| std::env::var_os(name).is_some());
    let untrusting = named.filter(|_| added == 0).map(|name| {
        let error = found
            .errors
            .first()
            .map_or("no certificate was found".into(), ToString::to_string);
        format!("{name} gives no certificates: {error}").into()
    });
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| unusable("no TLS").with_source(error))?;
    Ok((
        config.with_root_certificates(roots).with_no_client_auth(),
        untrusting,
    ))
}

fn unusable(message: &str) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}
