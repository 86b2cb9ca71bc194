//! Repositories of the Hugging Face Hub: `hf://datasets/org/name@revision/path`.
//!
//! ```text
//! @main ──/api/datasets/org/name/revision/main──► commit          once per process, and per machine
//!           /api/…/tree/COMMIT/folder, by pages ──► lengths, hashes              once per machine
//!           /…/resolve/COMMIT/path ──► hash, length, signed URL ──► ranges from the CDN's host
//!             with the token             │                             without the token
//!                                        └── kept until the CDN refuses it, then asked for anew
//! ```
//!
//! The client library asks for objects of [`OBJECTS`]; [`Hub::answered`] sends what the Hub
//! understands. The version of an object is the hash that the Hub names: SHA-256 of a large file,
//! the Git hash of a small one. The CDN has etags of its own, which count for nothing.
//!
//! `tree` has the queries to the API. Limits: [`REDIRECTS`]; pauses of at most [`PAUSE_MAX`].
//!
//! Invariants:
//! * All requests of a store name one commit.
//! * The token is sent to the endpoint's own origin alone, and shown nowhere.
//! * A quota that is used up pauses all processes of the machine. A pause is no failure.

mod home;

pub use home::shared_folder;

use self::home::{Token, Tokens, folder, is_set, variable};
use super::credentials::Credentials;
use super::http::{Answer, Note, Service, Steps, is_redirect, text_of};
use super::repo::{Repo, is_commit};
use super::shared::Shared;
use async_trait::async_trait;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpResponse};
use object_store::{CredentialProvider, HeaderMap, ObjectMeta};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Url;
use reqwest::header::HeaderValue;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The address of an object, for the client library.
pub(super) const OBJECTS: &str = "http://hub.invalid";

const ENDPOINT: &str = "https://huggingface.co";

/// Pause after a 429 that names none.
const PAUSE: Duration = Duration::from_secs(5);

/// Longest pause that is believed: twice the Hub's window.
const PAUSE_MAX: Duration = Duration::from_secs(600);

const REDIRECTS: usize = 5;

/// The quotas, as the Hub names them.
const API: &str = "api";
const RESOLVERS: &str = "resolvers";

/// Maximum characters of a message of the Hub.
const WORDS: usize = 300;

/// What is left as it is in a segment of the Hub's URLs.
pub(super) const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// A store's repository at one commit.
pub(super) struct Hub {
    pub(super) endpoint: Url,
    pub(super) repo: Repo,
    pub(super) commit: OnceLock<String>,
    token: Arc<Credentials<Token>>,
    pub(super) is_offline: bool,
    pub(super) shared: Shared,
    /// Where the CDN has objects, by encoded path. Locked while the Hub is asked.
    places: Mutex<HashMap<String, Arc<Located>>>,
    /// Listings of folders.
    pub(super) listings: Mutex<HashMap<String, Arc<Vec<ObjectMeta>>>>,
}

type Located = tokio::sync::Mutex<Option<Arc<Place>>>;

/// A signed URL, which expires, and what the Hub says of the object.
struct Place {
    url: Url,
    linked: Linked,
}

/// Forgets a place that gives no right answer, also if the request is cancelled: its signature has
/// expired, or the CDN has moved. The Hub names another.
struct Doubt<'p> {
    located: &'p Located,
    place: &'p Arc<Place>,
    answered: bool,
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        // Whoever holds the lock asks the Hub.
        if let (false, Ok(mut now)) = (self.answered, self.located.try_lock())
            && now.as_ref().is_some_and(|now| Arc::ptr_eq(now, self.place))
        {
            *now = None;
        }
    }
}

/// Etag and length of the object behind a redirect.
#[derive(Clone, Debug, Default)]
struct Linked {
    etag: Option<String>,
    len: Option<String>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hub {:?}", self.repo)
    }
}

impl Hub {
    /// Errors: [`ErrorKind::Config`] for an option or an endpoint that cannot be used.
    pub(super) fn new(bucket: &str, options: &[(String, String)]) -> Result<Arc<Self>> {
        let mut endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let mut token = None;
        for (name, value) in options {
            match name.as_str() {
                "endpoint" => endpoint = value.clone(),
                "token" => token = Some(value.clone()),
                _ => return Err(wrong(&format!("the Hub has no option {name:?}"))),
            }
        }
        let parsed = Url::parse(endpoint.trim_end_matches('/')).ok();
        let endpoint = parsed.filter(is_plain).ok_or_else(|| {
            wrong("HF_ENDPOINT is not a web address; use https://huggingface.co, or unset it")
        })?;
        let repo = Repo::parse(bucket)?;
        let commit = Some(repo.revision.clone()).filter(|name| is_commit(name));
        Ok(Arc::new(Self {
            endpoint,
            repo,
            commit: commit.map_or_else(OnceLock::new, OnceLock::from),
            token: Arc::new(Credentials::new(Tokens(token))),
            is_offline: is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"),
            shared: Shared::new(folder().join("hub")),
            places: Mutex::default(),
            listings: Mutex::default(),
        }))
    }

    pub(super) fn token(&self) -> Arc<Credentials<Token>> {
        self.token.clone()
    }

    /// Whether this is a revision of the repository: `datasets/org/name@main`.
    pub(super) fn has(&self, revision: &str) -> bool {
        let repo = revision.split('@').next();
        repo == Some(&self.repo.page())
    }

    /// The commit, once it is known.
    pub(super) fn commit(&self) -> Option<&str> {
        self.commit.get().map(String::as_str)
    }

    /// The name of a shared answer.
    pub(super) fn name(&self, what: &str) -> String {
        format!("{}/{} {what}", self.endpoint, self.repo.page())
    }

    pub(super) fn api(&self, call: &str, revision: &str) -> String {
        let Repo { kind, id, .. } = &self.repo;
        let endpoint = self.endpoint.as_str().trim_end_matches('/');
        let revision = utf8_percent_encode(revision, SEGMENT);
        format!("{endpoint}/api/{kind}/{id}/{call}/{revision}")
    }

    /// Asks the place of an object, without the token.
    async fn ask_cdn(
        &self,
        service: &Service,
        request: HttpRequest,
        note: &Note,
        place: &Place,
        moved: &mut Option<String>,
    ) -> std::result::Result<HttpResponse, HttpError> {
        self.allowed(note, None)?;
        *moved = place.url.host_str().map(String::from);
        let mut response = service.hop(request, &place.url, note).await?;
        let expired = matches!(response.status().as_u16(), 400 | 401 | 403 | 404 | 410);
        note.set(Answer {
            expired,
            ..note.answer()
        });
        dress(&mut response, &place.linked);
        Ok(response)
    }

    /// Asks the Hub, with the token. Also returns what it says of the object, and where a redirect
    /// to another host leads.
    async fn ask_hub(
        &self,
        service: &Service,
        mut request: HttpRequest,
        note: &Note,
        mut url: Url,
        quota: &str,
    ) -> std::result::Result<(HttpResponse, Linked, Option<Url>), HttpError> {
        self.allowed(note, Some(quota))?;
        let token = self.token.get_credential().await;
        let token = token.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        if let Some(token) = &token.0 {
            request.headers_mut().insert("authorization", token.clone());
        }
        let mut linked = Linked::default();
        for _ in 0..=REDIRECTS {
            let response = service.hop(request.clone(), &url, note).await?;
            let headers = response.headers();
            self.note_quota(headers, response.status().as_u16(), note, quota)
                .await;
            linked.etag = linked.etag.or_else(|| owned(headers, "x-linked-etag"));
            linked.len = linked.len.or_else(|| owned(headers, "x-linked-size"));
            let other = owned(headers, "x-repo-commit")
                .filter(|other| self.commit().is_some_and(|commit| commit != other));
            if let Some(other) = other.filter(|_| quota == RESOLVERS) {
                let what = format!(
                    "the Hub answered with commit {}, not with the one that was asked for",
                    plain(&other, None)
                );
                return Err(refuse(
                    note,
                    Answer {
                        advice: Some((ErrorKind::Changed, what)),
                        ..note.answer()
                    },
                ));
            }
            if !is_redirect(response.status().as_u16()) {
                self.advise(&response, note, token.0.as_ref());
                linked.etag = linked.etag.or_else(|| owned(headers, "etag"));
                return Ok((response, linked, None));
            }
            let place = owned(headers, "location").and_then(|place| url.join(&place).ok());
            match place {
                Some(place) if place.origin() == self.endpoint.origin() => url = place,
                Some(place) => return Ok((response, linked, Some(place))),
                None => return Ok((response, linked, None)),
            }
        }
        Err(refuse(
            note,
            Answer {
                advice: Some((
                    ErrorKind::Config,
                    "the Hub redirects without end; check HF_ENDPOINT".into(),
                )),
                ..Answer::default()
            },
        ))
    }

    /// Errors: `HF_HUB_OFFLINE`, or a pause for all requests that count against `quota`.
    fn allowed(&self, note: &Note, quota: Option<&str>) -> std::result::Result<(), HttpError> {
        if self.is_offline {
            let what = "HF_HUB_OFFLINE is set, and this was not read on this machine before; read it \
                 once without the variable, with the same HF_HOME and cache";
            return Err(refuse(
                note,
                Answer {
                    advice: Some((ErrorKind::Config, what.into())),
                    ..Answer::default()
                },
            ));
        }
        match quota.and_then(|quota| self.shared.paused(&self.quota(quota))) {
            Some(pause) => Err(refuse(
                note,
                Answer {
                    status: 429,
                    pause: Some(pause),
                    ..Answer::default()
                },
            )),
            None => Ok(()),
        }
    }

    /// Why reads wait, if the quota for them is used up.
    pub(super) fn paused(&self) -> Option<String> {
        self.shared.paused(&self.quota(RESOLVERS)).map(in_words)
    }

    fn quota(&self, quota: &str) -> String {
        format!("{} quota {quota}", self.endpoint)
    }

    /// Pauses all processes of the machine if the quota is used up.
    async fn note_quota(&self, headers: &HeaderMap, status: u16, note: &Note, quota: &str) {
        let left = text_of(headers, "ratelimit").and_then(quota_of);
        let answer = note.answer();
        let named = left.and_then(|(left, time)| (left == 0).then_some(time));
        let pause = match (named, status) {
            (Some(time), _) => time,
            (None, 429) => answer.retry_after.unwrap_or(PAUSE),
            _ => return,
        };
        // The times are whole seconds.
        let pause = pause.min(PAUSE_MAX) + Duration::from_secs(1);
        self.shared.pause(&self.quota(quota), pause).await;
        if status == 429 {
            let pause = Some(pause);
            note.set(Answer { pause, ..answer });
        }
    }

    /// Notes what to do about a refusal.
    fn advise(&self, response: &HttpResponse, note: &Note, token: Option<&HeaderValue>) {
        let status = response.status().as_u16();
        let headers = response.headers();
        let Repo { revision, .. } = &self.repo;
        let page = self.repo.page();
        let commit = self.commit().unwrap_or(revision);
        if status < 400 {
            return;
        }
        let has = token.is_some();
        let whose = if has {
            "the token of HF_TOKEN or `hf auth login`"
        } else {
            "no token (HF_TOKEN, `hf auth login`)"
        };
        let said = text_of(headers, "x-error-message")
            .map_or(String::new(), |said| format!(" ({})", plain(said, token)));
        let endpoint = self.endpoint.as_str().trim_end_matches('/');
        let advice = match (text_of(headers, "x-error-code"), status) {
            (Some("GatedRepo"), _) => (
                ErrorKind::Permission,
                format!(
                    "{page} is gated: accept its conditions at {endpoint}/{page}, and set HF_TOKEN to a \
                 token of that account; the request had {whose}{said}"
                ),
            ),
            (Some("RevisionNotFound"), _) => (
                ErrorKind::NotFound,
                format!("{page} has no branch, tag or commit {revision:?}"),
            ),
            (Some("EntryNotFound"), _) => (
                ErrorKind::NotFound,
                format!("{page} has no such file or folder at commit {commit}"),
            ),
            (Some("RepoNotFound"), _) | (None, 401) => (
                ErrorKind::Permission,
                format!(
                    "there is no {page}, or it is private: check the name (datasets begin with \
                 hf://datasets/), and set HF_TOKEN; the request had {whose}{said}"
                ),
            ),
            (_, 401 | 403) => (
                ErrorKind::Permission,
                format!("the Hub refused {page} to a request with {whose}{said}"),
            ),
            _ => return,
        };
        note.set(Answer {
            advice: Some(advice),
            ..note.answer()
        });
    }
}

#[async_trait]
impl Steps for Hub {
    /// The answer to a request for an object, or of the API: `moved` is the CDN's host.
    async fn answered(
        &self,
        service: &Service,
        mut request: HttpRequest,
        note: &Note,
        moved: &mut Option<String>,
    ) -> std::result::Result<HttpResponse, HttpError> {
        // The CDN has other etags: answers are compared with the one that the Hub names.
        request.headers_mut().remove("if-match");
        request
            .headers_mut()
            .insert("accept-encoding", HeaderValue::from_static("identity"));
        let url = request.uri().to_string();
        let Some(path) = url.strip_prefix(OBJECTS) else {
            let url = url
                .parse()
                .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
            return self
                .ask_hub(service, request, note, url, API)
                .await
                .map(|(response, ..)| response);
        };
        let located = self.places.hold().entry(path.into()).or_default().clone();
        let is_head = request.method().as_str() == "HEAD";
        let known = located.lock().await.clone().filter(|_| !is_head);
        if let Some(place) = known {
            let mut doubt = Doubt {
                located: &located,
                place: &place,
                answered: false,
            };
            let response = self
                .ask_cdn(service, request.clone(), note, &place, moved)
                .await;
            let status = response
                .as_ref()
                .map_or(0, |response| response.status().as_u16());
            doubt.answered = (200..300).contains(&status) || status == 416 || status == 429;
            if doubt.answered || !(400..500).contains(&status) {
                return response;
            }
        }
        let mut now = located.lock().await;
        if let Some(place) = now.clone().filter(|_| !is_head) {
            drop(now);
            return self.ask_cdn(service, request, note, &place, moved).await;
        }
        let commit = self.commit().unwrap_or(&self.repo.revision);
        let commit = utf8_percent_encode(commit, SEGMENT);
        let endpoint = self.endpoint.as_str().trim_end_matches('/');
        let url = format!("{endpoint}/{}/resolve/{commit}{path}", self.repo.page());
        let url = url
            .parse()
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let answer = self
            .ask_hub(service, request.clone(), note, url, RESOLVERS)
            .await;
        let (mut response, linked, place) = answer?;
        let Some(url) = place else {
            dress(&mut response, &linked);
            return Ok(response);
        };
        let place = Arc::new(Place { url, linked });
        *now = Some(place.clone());
        drop(now);
        let len = place
            .linked
            .len
            .as_deref()
            .and_then(|len| HeaderValue::try_from(len).ok());
        if let (true, Some(len), Ok(ok)) = (is_head, len, 200.try_into()) {
            *response.status_mut() = ok;
            response.headers_mut().insert("content-length", len);
            dress(&mut response, &place.linked);
            return Ok(response);
        }
        self.ask_cdn(service, request, note, &place, moved).await
    }
}

fn wrong(message: &str) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}

/// Whether a web address has no user name and no query.
fn is_plain(url: &Url) -> bool {
    ["http", "https"].contains(&url.scheme()) && url.username().is_empty() && url.query().is_none()
}

fn owned(headers: &HeaderMap, name: &str) -> Option<String> {
    text_of(headers, name).map(String::from)
}

/// A text of the Hub, without the token and cut short.
fn plain(text: &str, token: Option<&HeaderValue>) -> String {
    let token = token.and_then(|token| token.to_str().ok()?.strip_prefix("Bearer "));
    let text = token.map_or(text.into(), |token| text.replace(token, "***"));
    text.chars()
        .filter(|c| !c.is_control())
        .take(WORDS)
        .collect()
}

/// Ends a request with this note.
fn refuse(note: &Note, answer: Answer) -> HttpError {
    note.set(answer);
    HttpError::new(HttpErrorKind::Decode, std::io::Error::other("refused"))
}

/// Describes a pause.
pub(super) fn in_words(pause: Duration) -> String {
    format!(
        "the Hub's rate limit is used up for {} s more; a token (HF_TOKEN) has a higher limit",
        pause.as_secs()
    )
}

/// Gives an answer the etag and, to `HEAD`, the length that the Hub names.
fn dress(response: &mut HttpResponse, linked: &Linked) {
    let headers = response.headers_mut();
    let etag = linked
        .etag
        .as_deref()
        .map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
    match etag.and_then(|etag| HeaderValue::try_from(format!("\"{etag}\"")).ok()) {
        Some(etag) => headers.insert("etag", etag),
        None => headers.remove("etag"),
    };
    headers.remove("last-modified");
}

/// Requests that are left, and the time until there are more: `"api";r=0;t=55`.
fn quota_of(text: &str) -> Option<(u64, Duration)> {
    Some((number(text, "r")?, Duration::from_secs(number(text, "t")?)))
}

/// The number of this name in `"api";r=0;t=55`.
fn number(text: &str, name: &str) -> Option<u64> {
    let mut parts = text.split(';').filter_map(|part| part.split_once('='));
    let (_, value) = parts.find(|(key, _)| key.trim() == name)?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_the_hub_are_read_and_odd_ones_are_not() {
        let seconds = Duration::from_secs;
        for (header, right) in [
            ("\"api\";r=0;t=55", Some((0, seconds(55)))),
            ("\"resolvers\" ; r = 7; t=300", Some((7, seconds(300)))),
            ("r=-1;t=5", None),
            ("\"api\";r=0", None),
        ] {
            assert_eq!(quota_of(header), right, "{header}");
        }
        let token = HeaderValue::from_static("Bearer hf_secret");
        assert_eq!(plain("no\u{1b} hf_secret", Some(&token)), "no ***");
    }
}
