//! Credentials of a store, renewed before they expire, by one task at a time.
//!
//! ```text
//! request ─► valid? ──yes──► signs with them ── due? ──► one renewal starts; nobody waits for it
//!              │ no
//!              └─► waits for the renewal that runs, or starts one ─► new credentials, or its error
//! ```
//!
//! Limits: [`DEADLINE`] for a renewal; a failed one is repeated after [`PAUSE`] while the old
//! credentials are valid.
//!
//! Invariants:
//! * A renewal belongs to no request, so a cancelled request does not end it.
//! * A failed renewal leaves the old credentials in use until they end.
//! * Credentials that the store calls expired are renewed once for all requests that were signed
//!   with them.
//! * No message, and no `Debug`, shows a credential.

use super::http::cause;
use async_trait::async_trait;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use object_store::CredentialProvider;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Credentials are renewed this long before they expire, or after half of their life if that is
/// later.
const AHEAD: Duration = Duration::from_secs(600);

/// A renewal that takes longer has failed.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

/// Pause after a failed renewal, at most a quarter of the time that is left.
const PAUSE: Duration = Duration::from_secs(30);

/// Answers without the store's code, such as those to `HEAD`, force no renewal of credentials
/// younger than this.
const YOUNG: Duration = Duration::from_secs(10);

/// The client library's providers keep credentials themselves, renew them when they have 4 to 5
/// minutes left, and do not report their expiry. So each of their answers is used for 3 minutes,
/// and they are asked again after 1 minute.
const LIBRARY_LIFE: Duration = Duration::from_secs(180);
const LIBRARY_DUE: Duration = Duration::from_secs(60);

/// New credentials.
pub(super) struct Fresh<C> {
    pub(super) value: Arc<C>,
    /// Time until they expire, and until they are renewed; `None` if they do not expire.
    pub(super) life: Option<(Duration, Duration)>,
}

impl<C> Fresh<C> {
    /// `left`: time until they expire.
    pub(super) fn new(value: C, left: Option<Duration>) -> Self {
        let life = left.map(|left| (left, left.saturating_sub(AHEAD).max(left / 2)));
        Self {
            value: Arc::new(value),
            life,
        }
    }
}

/// The origin of credentials.
#[async_trait]
pub(super) trait Source<C>: Send + Sync {
    /// `anew`: the store refused the last ones.
    async fn get(&self, anew: bool) -> Result<Fresh<C>>;
}

/// The interface to requests, for any store's kind of credentials.
#[async_trait]
pub(super) trait Renewed: Send + Sync {
    /// Waits for valid credentials; returns their number. Errors: the renewal's.
    async fn ready(&self) -> Result<u64>;

    /// Records that the store refused a request signed with these credentials. `sure`: it called
    /// them expired.
    fn refuse(&self, number: u64, sure: bool);
}

pub(super) struct Credentials<C>(Arc<SharedRenewal<C>>);

struct SharedRenewal<C> {
    source: Arc<dyn Source<C>>,
    state: Mutex<Renewal<C>>,
    ended: Notify,
}

struct Renewal<C> {
    current: Option<Current<C>>,
    /// Number of renewals that ended.
    renewals: u64,
    /// Why the last one failed.
    failure: Option<Error>,
    running: bool,
    /// Whether the store refused the current credentials.
    anew: bool,
}

struct Current<C> {
    value: Arc<C>,
    number: u64,
    since: Instant,
    until: Option<Instant>,
    due: Option<Instant>,
}

impl<C> Clone for Credentials<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C> fmt::Debug for Credentials<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

impl<C: Send + Sync + 'static> Credentials<C> {
    pub(super) fn new(source: impl Source<C> + 'static) -> Self {
        let state = Renewal {
            current: None,
            renewals: 0,
            failure: None,
            running: false,
            anew: false,
        };
        Self(Arc::new(SharedRenewal {
            source: Arc::new(source),
            state: Mutex::new(state),
            ended: Notify::new(),
        }))
    }

    /// Valid credentials and their number.
    async fn get(&self) -> Result<(Arc<C>, u64)> {
        let asked = self.0.state.hold().renewals;
        if let Some(found) = self.look(asked) {
            return found;
        }
        loop {
            let mut ended = std::pin::pin!(self.0.ended.notified());
            // Registers for the notification before the check, so that the end of a renewal is not
            // missed.
            ended.as_mut().enable();
            if let Some(found) = self.look(asked) {
                return found;
            }
            ended.await;
        }
    }

    /// The current credentials or an error. `None` while the caller must wait for a renewal.
    /// `asked`: the number of renewals that had ended when the caller asked.
    pub fn look(&self, asked: u64) -> Option<Result<(Arc<C>, u64)>> {
        let mut state = self.0.state.hold();
        let now = Instant::now();
        let passed = |time: Option<Instant>| time.is_some_and(|time| time <= now);
        let current = state.current.as_ref();
        let found = current.map(|current| (current.value.clone(), current.number));
        let valid = current.is_some_and(|current| !passed(current.until));
        let due = current.is_none_or(|current| passed(current.due));
        // A renewal that ended meanwhile gives the result, even if its credentials have expired by
        // now.
        if !valid && state.renewals != asked {
            let failure = state.failure.as_ref().map(Error::clone_lossy);
            return Some(failure.map_or_else(|| found.ok_or_else(nothing), Err));
        }
        if !state.running && (!valid || due) {
            state.running = true;
            tokio::spawn(self.0.clone().renew(std::mem::take(&mut state.anew)));
        }
        found.filter(|_| valid).map(Ok)
    }
}

impl<C: Send + Sync + 'static> SharedRenewal<C> {
    async fn renew(self: Arc<Self>, anew: bool) {
        let source = self.source.clone();
        // A task of its own, so that a panic is an error here.
        let task = tokio::spawn(async move { source.get(anew).await });
        // A command ends at the deadline by itself, with an error that names it.
        let got = match tokio::time::timeout(DEADLINE + DEADLINE / 12, task).await {
            Ok(Ok(got)) => got,
            Ok(Err(_)) => Err(Error::new(
                ErrorKind::Panicked,
                Stage::Read,
                "the renewal of credentials panicked",
            )),
            Err(_) => Err(refused(format!(
                "no credentials received within {DEADLINE:?}"
            ))),
        };
        self.state.hold().end(got, anew);
        self.ended.notify_waiters();
    }
}

impl<C> Renewal<C> {
    fn end(&mut self, got: Result<Fresh<C>>, anew: bool) {
        let now = Instant::now();
        self.running = false;
        self.renewals += 1;
        self.failure = None;
        match got {
            Ok(Fresh { value, life }) => {
                let (until, due) = life.map(|(left, due)| (now + left, now + due)).unzip();
                self.current = Some(Current {
                    value,
                    number: self.renewals,
                    since: now,
                    until,
                    due,
                });
            }
            Err(error) => {
                self.failure = Some(error);
                self.anew |= anew;
                if let Some(current) = &mut self.current {
                    let left = current.until.map_or(PAUSE, |until| until - now);
                    current.due = Some(now + PAUSE.min(left / 4));
                }
            }
        }
    }
}

/// The error of missing credentials. It is not the fault of a sample.
pub(super) fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Permission, Stage::Read, message)
}

fn nothing() -> Error {
    refused("there are no credentials")
}

#[async_trait]
impl<C: Send + Sync + 'static> Renewed for Credentials<C> {
    async fn ready(&self) -> Result<u64> {
        self.get().await.map(|(_, number)| number)
    }

    fn refuse(&self, number: u64, sure: bool) {
        let mut state = self.0.state.hold();
        let now = Instant::now();
        // Other requests may have been refused with the same credentials, and have caused their
        // renewal.
        let current = state
            .current
            .as_mut()
            .filter(|current| current.number == number);
        if let Some(current) = current.filter(|current| sure || now - current.since >= YOUNG) {
            current.until = Some(now);
            state.anew = true;
        }
    }
}

#[async_trait]
impl<C: Send + Sync + 'static> CredentialProvider for Credentials<C> {
    type Credential = C;

    async fn get_credential(&self) -> object_store::Result<Arc<C>> {
        let got = self.get().await;
        got.map(|(value, _)| value)
            .map_err(|error| object_store::Error::Generic {
                store: "",
                source: error.into(),
            })
    }
}

type Provider<C> = Arc<dyn CredentialProvider<Credential = C>>;

/// The client library's own provider: keys of the environment, web identity, containers, metadata
/// servers.
pub(super) struct Library<C> {
    make: Box<dyn Fn() -> object_store::Result<Provider<C>> + Send + Sync>,
    made: Mutex<Provider<C>>,
}

impl<C> Library<C> {
    /// `make`: returns a provider that holds no credentials yet. Errors: those of `make`.
    pub(super) fn new(
        make: impl Fn() -> object_store::Result<Provider<C>> + Send + Sync + 'static,
    ) -> object_store::Result<Self> {
        Ok(Self {
            made: Mutex::new(make()?),
            make: Box::new(make),
        })
    }

    fn provider(&self, anew: bool) -> object_store::Result<Provider<C>> {
        let mut made = self.made.hold();
        if anew {
            *made = (self.make)()?;
        }
        Ok(made.clone())
    }
}

#[async_trait]
impl<C: Send + Sync + 'static> Source<C> for Library<C> {
    async fn get(&self, anew: bool) -> Result<Fresh<C>> {
        let got = async { self.provider(anew)?.get_credential().await }.await;
        let value = got.map_err(|error| {
            let cause = cause(&error);
            // An answer's body may repeat the request.
            let plain = match cause.starts_with("Server returned") {
                true => cause.split(':').take(2).collect::<Vec<_>>().join(":"),
                false => cause,
            };
            refused(format!(
                "no credentials found: {plain}; the guide `stores` lists where feedline looks for \
                 them"
            ))
        })?;
        Ok(Fresh {
            value,
            life: Some((LIBRARY_LIFE, LIBRARY_DUE)),
        })
    }
}

#[cfg(test)]
mod tests;
