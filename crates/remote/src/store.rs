//! Stores of the process, and objects with their version.

use super::credentials::{Credentials, Library, Renewed};
use super::http::{Connector, Kind, Web, cause};
use super::hub::{Hub, OBJECTS};
use super::limit::Limit;
use super::profile::Profile;
use super::registry::Lists;
use super::repo::without_revision;
use super::url::{Scheme, Url};
use feedline_base::error::{Error, ErrorKind, Result, Stage, guarded};
use feedline_base::metadata::Meta;
use feedline_base::meter::NetworkMeter;
use feedline_base::process::Process;
use feedline_base::sync::Hold;
use feedline_base::thread;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{HttpClient, HttpConnector};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::list::PaginatedListStore;
use object_store::path::Path as Key;
use object_store::{ClientOptions, ObjectMeta, ObjectStore, RetryConfig};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Network threads of the process. They decrypt bodies and copy them into rows.
const THREADS: usize = 2;
/// Maximum number of threads that look up names and run programs for credentials.
const LOOKUPS: usize = 16;

/// A try ends when 16 KiB take longer than this, or than the share of the stall deadline that
/// leaves time for all tries.
const PATIENCE: Duration = Duration::from_secs(10);

/// The option for mirrors whose etags differ: versions are compared by the time of the last change.
const BY_TIME: &str = "versions_by_time";

/// The same for all stores of the process, as a variable of the environment.
pub(super) const ALL_BY_TIME: &str = "FEEDLINE_VERSIONS_BY_TIME";

/// One bucket, container or HTTP server.
pub struct Store {
    /// `s3://bucket`.
    pub(super) name: String,
    pub(super) client: Arc<dyn ObjectStore>,
    /// Whether another crate registered it.
    pub(super) is_registered: bool,
    /// The repository of a `hf://` URL.
    pub(super) hub: Option<Arc<Hub>>,
    /// `None` for HTTP servers, which have no listing, and for the Hub.
    pub(super) lists: Option<Arc<dyn PaginatedListStore>>,
    /// `None` for requests without a signature.
    pub(super) credentials: Option<Arc<dyn Renewed>>,
    pub(super) limit: Limit,
    /// A request is tried again after this time without bytes.
    pub(super) patience: Duration,
    /// Whether the version is the modification time, even if there is an etag.
    pub(super) by_time: bool,
    /// Objects that a listing or lookup has found recently, by key.
    pub(super) found: Mutex<HashMap<String, (Meta, Instant)>>,
}

/// An object in a store, and the version of it that all reads ask for.
#[derive(Clone)]
pub struct Object {
    pub store: Arc<Store>,
    pub(super) key: Key,
    pub(super) len: u64,
    pub(super) pin: Arc<str>,
    /// Counts its requests.
    pub(super) meter: Option<Arc<NetworkMeter>>,
}

/// The state that all stores of a process share.
struct Net {
    process: Process,
    runtime: OnceLock<Runtime>,
    /// Held by the thread that starts the runtime.
    starts: Mutex<()>,
    web: OnceLock<Web>,
    /// Two datasets of one bucket share its connections and its limit.
    stores: Mutex<BTreeMap<String, Arc<Store>>>,
    /// The user's options of stores, which are added to the environment's.
    options: Mutex<BTreeMap<String, Options>>,
    /// See [`commits`].
    commits: Mutex<BTreeMap<String, String>>,
    /// The state of a forked child.
    next: OnceLock<Box<Net>>,
}

/// The state of the calling process. A forked child has none of its parent's threads, and the
/// parent's connections and locks may be in use. So the child takes over only options and commits.
fn net() -> &'static Net {
    static FIRST: OnceLock<Box<Net>> = OnceLock::new();
    let mut place = &FIRST;
    let mut parent = None::<&Net>;
    loop {
        let options = || Some(parent?.options.try_lock().ok()?.clone());
        let new = || Net {
            process: Process::current(),
            runtime: OnceLock::new(),
            starts: Mutex::default(),
            web: OnceLock::new(),
            stores: Mutex::default(),
            options: Mutex::new(options().unwrap_or_default()),
            commits: Mutex::new(
                parent
                    .and_then(|net| Some(net.commits.try_lock().ok()?.clone()))
                    .unwrap_or_default(),
            ),
            next: OnceLock::new(),
        };
        let net = place.get_or_init(|| Box::new(new()));
        if !net.process.is_forked() {
            return net;
        }
        place = &net.next;
        parent = Some(&**net);
    }
}

/// The runtime of all stores.
pub fn runtime() -> Result<&'static Runtime> {
    let net = net();
    if let Some(runtime) = net.runtime.get() {
        return Ok(runtime);
    }
    // Two threads that arrive together must not start two runtimes.
    let _one = net.starts.hold();
    if let Some(runtime) = net.runtime.get() {
        return Ok(runtime);
    }
    // Tokio panics if it cannot start a thread, so this first checks how many can start. One more
    // thread looks up names.
    let room = thread::room_for(THREADS + 1);
    if room < 2 {
        return Err(thread::refused(
            "network",
            THREADS + 1,
            room,
            std::io::ErrorKind::WouldBlock.into(),
        ));
    }
    if room <= THREADS {
        thread::fewer("network", THREADS + 1, room);
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder
        .worker_threads(room - 1)
        .thread_name("feedline-net")
        .enable_all();
    // Threads that look up names stay: where the system refuses new ones, their work would wait for
    // ever.
    builder
        .max_blocking_threads(LOOKUPS)
        .thread_keep_alive(Duration::MAX);
    let built = guarded("the start of its threads", Stage::Build, || {
        let built = builder
            .build()
            .map_err(|source| thread::refused("network", THREADS + 1, 0, source))?;
        drop(built.spawn_blocking(|| ()));
        Ok(built)
    });
    let built = built?;
    Ok(net.runtime.get_or_init(|| built))
}

/// Runs a request on the network threads and waits for it, from any thread, also from one of
/// another runtime.
pub(super) fn wait<T: Send + 'static>(
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (send, receive) = mpsc::sync_channel(1);
    runtime()?.spawn(async move {
        let _ = send.send(future.await);
    });
    receive.recv().map_err(|_| lost())?
}

/// The error of a task that ended without an answer.
pub fn lost() -> Error {
    Error::new(
        ErrorKind::Panicked,
        Stage::Read,
        "a network thread panicked",
    )
}

/// Settings in addition to the environment's: names and values.
pub(super) type Options = Vec<(String, String)>;

pub(super) fn store(url: &Url) -> Result<Arc<Store>> {
    let net = net();
    let name = url.store();
    let mut stores = net.stores.hold();
    if let Some(store) = stores.get(&name) {
        return Ok(store.clone());
    }
    let all = net.options.hold();
    let found = all.get(&name).or_else(|| all.get(&repository(&name)));
    let options = found.cloned().unwrap_or_default();
    drop(all);
    let store = Arc::new(Store::open(url, name.clone(), &options)?);
    stores.insert(name, store.clone());
    Ok(store)
}

/// The name of a store without the revision of a repository.
fn repository(name: &str) -> String {
    let plain = without_revision(name.into());
    plain.to_string_lossy().trim_end_matches('/').into()
}

/// Commits of revisions such as `datasets/org/name@main`. A name means one commit in a process, and
/// in its forked children.
pub(super) fn commits() -> &'static Mutex<BTreeMap<String, String>> {
    &net().commits
}

/// Replaces a store with one that has these options, for all opens and reads after this. Revisions
/// of a repository of the Hub are resolved anew.
pub fn configure(name: &str, options: Options) -> Result<()> {
    let net = net();
    let url = Url::parse(Path::new(name))?;
    let name = url.store();
    let store = Arc::new(Store::open(&url, name.clone(), &options)?);
    if let Some(hub) = &store.hub {
        net.commits.hold().retain(|name, _| !hub.has(name));
    }
    let mut stores = net.stores.hold();
    stores.retain(|other, _| repository(other) != name);
    stores.insert(name.clone(), store);
    net.options.hold().insert(name, options);
    Ok(())
}

// The library's three builders have the same methods and no common trait.

/// A builder of buckets with the environment's settings and the user's. A redirected request would
/// lack its signature.
macro_rules! bucket {
    ($builder:ty, $prefixes:expr, $name:expr, $options:expr) => {{
        let connector = Connector {
            kind: Kind::Bucket,
            shared: &net().web,
        };
        let builder = <$builder>::new()
            .with_client_options(plain())
            .with_retry(no_retries());
        // Variables of other programs share the prefix. They are ignored.
        let builder = environment(&$prefixes)?
            .iter()
            .fold(builder, |builder, (key, value)| match key.parse() {
                Ok(key) => builder.with_config(key, value),
                Err(_) => builder,
            });
        let builder = $name(builder.with_http_connector(connector));
        clean($options)?
            .iter()
            .try_fold(builder, |builder, (key, value)| {
                key.parse()
                    .map(|key| builder.with_config(key, value))
                    .map_err(refused)
            })?
    }};
}

/// Environment variables with these prefixes; those of the last prefix win.
fn environment(prefixes: &[&str]) -> Result<Options> {
    let of = |prefix: &'_ str| {
        let prefix = prefix.to_string();
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(move |(name, _)| name.starts_with(&prefix))
    };
    let found: Options = prefixes.iter().flat_map(|prefix| of(prefix)).collect();
    Ok(clean(&found)?
        .into_iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect())
}

/// Removes blanks and line ends around values, which files leave there. Drops empty values.
///
/// Errors: [`ErrorKind::Config`] for a character that no header may contain.
fn clean(options: &Options) -> Result<Options> {
    let trimmed = options
        .iter()
        .map(|(name, value)| (name, value.trim()))
        .filter(|(_, value)| !value.is_empty());
    let plain = trimmed.map(|(name, value)| match value.contains(char::is_control) {
        false => Ok((name.clone(), value.to_string())),
        true => {
            let message =
                format!("{name} has a line break or another control character in its value");
            Err(Error::new(ErrorKind::Config, Stage::Index, message))
        }
    });
    plain.collect()
}

/// The library's own provider of a builder's credentials.
macro_rules! library {
    ($builder:expr) => {{
        let builder = $builder.clone().with_retry(few_retries());
        Library::new(move || {
            builder
                .clone()
                .build()
                .map(|store| store.credentials().clone())
        })
        .map_err(refused)
    }};
}

impl Store {
    /// Settings and credentials come from the environment, as the store's own tools read them, and
    /// from `options`.
    fn open(url: &Url, name: String, options: &Options) -> Result<Self> {
        let (timeout, options) = options
            .iter()
            .cloned()
            .partition::<Options, _>(|(name, _)| name == "timeout");
        let timeout = clean(&timeout)?.pop();
        let patience = timeout
            .map_or(Ok(PATIENCE), |(_, value)| seconds(&value))
            .map_err(|error| error.with_path(&name))?;
        let (by_time, options) = options
            .into_iter()
            .partition::<Options, _>(|(name, _)| name == BY_TIME);
        let chosen = by_time.into_iter().next_back().map(|(_, value)| value);
        let by_time = is_true(chosen.or_else(|| std::env::var(ALL_BY_TIME).ok()));
        let options = &options;
        let Client {
            reads,
            lists,
            credentials,
            hub,
        } = match url.scheme {
            Scheme::S3 => Self::s3(url, options),
            Scheme::Gcs => Self::gcs(url, options),
            Scheme::Azure => Self::azure(url, options),
            Scheme::Http | Scheme::Https => Self::http(&name, options),
            Scheme::Hub => Self::hub(url, options),
            Scheme::Other(registered) => {
                (registered.open)(&url.bucket, options).map(|reads| Client {
                    lists: Some(Arc::new(Lists(reads.clone()))),
                    reads,
                    credentials: None,
                    hub: None,
                })
            }
        }
        .map_err(|error| error.with_path(&name))?;
        Ok(Self {
            name,
            client: reads,
            hub,
            is_registered: matches!(url.scheme, Scheme::Other(_)),
            lists,
            credentials,
            limit: Limit::new(),
            patience,
            by_time,
            found: Mutex::default(),
        })
    }

    fn s3(url: &Url, options: &Options) -> Result<Client> {
        let (chosen, options) = options
            .iter()
            .cloned()
            .partition::<Options, _>(|(name, _)| name == "profile");
        let profile = Profile::of_env(chosen.last().map(|(_, name)| name.as_str()));
        let named = |builder: AmazonS3Builder| builder.with_bucket_name(&url.bucket);
        let builder = profile.place(bucket!(AmazonS3Builder, ["AWS_"], named, &options))?;
        if is_true(builder.get_config_value(&AmazonS3ConfigKey::SkipSignature)) {
            return unsigned(builder.build());
        }
        let credentials = match profile.gives_credentials(&builder, !chosen.is_empty())? {
            true => Credentials::new(profile),
            false => Credentials::new(library!(builder)?),
        };
        signed(
            builder
                .with_credentials(Arc::new(credentials.clone()))
                .build(),
            credentials,
        )
    }

    fn gcs(url: &Url, options: &Options) -> Result<Client> {
        let named = |builder: GoogleCloudStorageBuilder| builder.with_bucket_name(&url.bucket);
        let builder = bucket!(
            GoogleCloudStorageBuilder,
            ["SERVICE_ACCOUNT", "GOOGLE_"],
            named,
            options
        );
        if is_true(builder.get_config_value(&GoogleConfigKey::SkipSignature)) {
            return unsigned(builder.build());
        }
        let credentials = Credentials::new(library!(builder)?);
        signed(
            builder
                .with_credentials(Arc::new(credentials.clone()))
                .build(),
            credentials,
        )
    }

    fn azure(url: &Url, options: &Options) -> Result<Client> {
        let named = |builder: MicrosoftAzureBuilder| builder.with_container_name(&url.bucket);
        let builder = bucket!(
            MicrosoftAzureBuilder,
            ["AZURE_", "IDENTITY_ENDPOINT"],
            named,
            options
        );
        if is_true(builder.get_config_value(&AzureConfigKey::SkipSignature)) {
            return unsigned(builder.build());
        }
        let credentials = Credentials::new(library!(builder)?);
        signed(
            builder
                .with_credentials(Arc::new(credentials.clone()))
                .build(),
            credentials,
        )
    }

    fn http(name: &str, options: &Options) -> Result<Client> {
        if let Some((name, _)) = options.first() {
            let message = format!("an HTTP server has no option {name:?}");
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        let reads = server(name, Kind::Server)?;
        Ok(Client {
            reads,
            lists: None,
            credentials: None,
            hub: None,
        })
    }

    fn hub(url: &Url, options: &Options) -> Result<Client> {
        let hub = Hub::new(&url.bucket, &clean(options)?)?;
        Ok(Client {
            reads: server(OBJECTS, Kind::Hub(hub.clone()))?,
            lists: None,
            credentials: Some(hub.token()),
            hub: Some(hub),
        })
    }

    /// Whether objects can be listed.
    pub(super) fn has_listing(&self) -> bool {
        self.lists.is_some() || self.hub.is_some()
    }

    /// The version of an object: its etag without quotes, or else the time of its last change.
    /// Empty if it has neither.
    pub(super) fn pin_of(&self, meta: &ObjectMeta) -> String {
        let etag = meta
            .e_tag
            .as_ref()
            .filter(|_| !self.by_time)
            .map(|etag| etag.replace('"', ""));
        match etag.filter(|etag| !matches!(etag.trim(), "" | "W/")) {
            Some(etag) => etag,
            // The client library's value if an answer has no time.
            None if meta.last_modified.timestamp() == 0 => String::new(),
            None => format!("modified {}", meta.last_modified.to_rfc3339()),
        }
    }

    /// The URL of a key.
    pub(super) fn url(&self, key: &Key) -> PathBuf {
        PathBuf::from(format!("{}/{key}", self.name))
    }
}

/// Reads, listings where the store has them, credentials where requests are signed, and the
/// repository of the Hub.
struct Client {
    reads: Arc<dyn ObjectStore>,
    lists: Option<Arc<dyn PaginatedListStore>>,
    credentials: Option<Arc<dyn Renewed>>,
    hub: Option<Arc<Hub>>,
}

/// The objects of an HTTP server.
fn server(url: &str, kind: Kind) -> Result<Arc<dyn ObjectStore>> {
    let builder = HttpBuilder::new()
        .with_url(url)
        .with_client_options(plain())
        .with_retry(no_retries());
    let shared = &net().web;
    let built = builder
        .with_http_connector(Connector { kind, shared })
        .build();
    Ok(Arc::new(built.map_err(refused)?))
}

/// A client for other requests than those for objects.
pub(super) fn client(kind: Kind) -> Result<HttpClient> {
    let shared = &net().web;
    let connected = Connector { kind, shared }.connect(&plain());
    connected.map_err(refused)
}

fn unsigned<S: ObjectStore + PaginatedListStore>(store: object_store::Result<S>) -> Result<Client> {
    let store = Arc::new(store.map_err(refused)?);
    Ok(Client {
        reads: store.clone(),
        lists: Some(store),
        credentials: None,
        hub: None,
    })
}

fn signed<S: ObjectStore + PaginatedListStore>(
    store: object_store::Result<S>,
    credentials: impl Renewed + 'static,
) -> Result<Client> {
    Ok(Client {
        credentials: Some(Arc::new(credentials)),
        ..unsigned(store)?
    })
}

fn refused(error: object_store::Error) -> Error {
    Error::new(
        ErrorKind::Config,
        Stage::Index,
        format!("the store cannot be used: {}", cause(&error)),
    )
}

/// The option `timeout`: seconds, such as `0.5`.
fn seconds(value: &str) -> Result<Duration> {
    let seconds = value
        .parse()
        .ok()
        .filter(|seconds| (0.01..=600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        Error::new(
            ErrorKind::Config,
            Stage::Index,
            "the option timeout must be seconds from 0.01 to 600, such as 10",
        )
    })
}

/// Whether the client library takes a value as true.
fn is_true(value: Option<String>) -> bool {
    value.is_some_and(|value| {
        matches!(
            value.to_ascii_lowercase().as_str(),
            "1" | "true" | "on" | "yes" | "y"
        )
    })
}

/// An endpoint without TLS is the user's own choice.
fn plain() -> ClientOptions {
    ClientOptions::new().with_allow_http(true)
}

/// `fetch` itself tries again, with a new signature.
fn no_retries() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// Requests for credentials are tried again by the client library. An unreachable server is asked
/// once.
fn few_retries() -> RetryConfig {
    RetryConfig {
        max_retries: 3,
        retry_timeout: Duration::from_secs(4),
        ..RetryConfig::default()
    }
}

impl Object {
    pub(super) fn url(&self) -> PathBuf {
        self.store.url(&self.key)
    }

    /// The object at a URL, in the listed version.
    pub fn at(path: &Path, len: u64, pin: Option<Arc<str>>) -> Result<Self> {
        let url = Url::parse(path)?;
        Ok(Self {
            store: store(&url)?,
            key: url.object()?,
            len,
            pin: pin.unwrap_or_default(),
            meter: None,
        })
    }

    /// The object, with its requests counted.
    pub fn metered(self, meter: &Arc<NetworkMeter>) -> Self {
        Self {
            meter: Some(meter.clone()),
            ..self
        }
    }

    /// Whether each request names the version, so that bytes may be kept for later runs.
    pub fn is_pinned(&self) -> bool {
        self.condition().is_some()
    }

    /// The condition of each request. Weak etags and times cannot be a condition; they are only
    /// compared.
    pub(super) fn condition(&self) -> Option<String> {
        let strong = !self.pin.starts_with("W/")
            && !self.pin.starts_with("w/")
            && !self.pin.starts_with("modified ")
            && !self.pin.is_empty();
        strong.then(|| format!("\"{}\"", self.pin))
    }
}
