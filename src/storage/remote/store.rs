//! Stores of the process, and objects with their version.

use super::http::Connector;
use super::limit::Limit;
use super::url::{Scheme, Url};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::meta::Meta;
use object_store::list::PaginatedListStore;
use object_store::path::Path as Key;
use object_store::{ClientOptions, ObjectMeta, ObjectStore, RetryConfig};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Instant;
use tokio::runtime::Runtime;

/// Network threads of the process. They decrypt bodies and copy them into rows.
const THREADS: usize = 2;

/// One bucket, container or HTTP server.
pub(super) struct Store {
    /// `s3://bucket`.
    pub(super) name: String,
    pub(super) client: Arc<dyn ObjectStore>,
    /// `None` for HTTP servers: they have no listing.
    pub(super) lists: Option<Arc<dyn PaginatedListStore>>,
    pub(super) limit: Limit,
    /// Objects that a listing or look has found lately, by key.
    pub(super) found: Mutex<HashMap<String, (Meta, Instant)>>,
}

/// An object in a store, and the version of it that all reads ask for.
#[derive(Clone)]
pub(crate) struct Object {
    pub(super) store: Arc<Store>,
    pub(super) key: Key,
    pub(super) len: u64,
    pub(super) pin: Arc<str>,
}

/// The runtime of all stores. Errors: [`ErrorKind::Forked`] in a forked child, which has none of its threads.
pub(super) fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();
    let started = match RUNTIME.get() {
        Some(started) => started,
        None => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            let built = builder.worker_threads(THREADS).thread_name("feedline-net").enable_all().build();
            let built = built.map_err(|source| Error::os(Stage::Build, "cannot start the network threads", source))?;
            RUNTIME.get_or_init(|| (std::process::id(), built))
        }
    };
    match started.0 == std::process::id() {
        true => Ok(&started.1),
        false => {
            let message = "the process was forked after it read from an object store; start workers by `spawn`";
            Err(Error::new(ErrorKind::Forked, Stage::Read, message))
        }
    }
}

/// Runs a request on the network threads and waits for it, from any thread: also from one of another runtime.
pub(super) fn wait<T: Send + 'static>(future: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let (send, receive) = mpsc::sync_channel(1);
    runtime()?.spawn(async move {
        let _ = send.send(future.await);
    });
    receive.recv().map_err(|_| lost())?
}

/// The error of a task that ended without an answer.
pub(super) fn lost() -> Error {
    Error::new(ErrorKind::Panicked, Stage::Read, "a network thread panicked")
}

/// Starts a task of the network threads.
pub(crate) fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    runtime().map(|runtime| drop(runtime.spawn(future)))
}

/// Settings beside those of the environment: names and values.
pub(super) type Options = Vec<(String, String)>;

/// All stores of the process. Two datasets of one bucket share its connections and its limit.
static STORES: Mutex<BTreeMap<String, Arc<Store>>> = Mutex::new(BTreeMap::new());

pub(super) fn store(url: &Url) -> Result<Arc<Store>> {
    let name = url.store();
    let mut stores = lock(&STORES);
    if let Some(store) = stores.get(&name) {
        return Ok(store.clone());
    }
    let store = Arc::new(Store::open(url, name.clone(), &Vec::new())?);
    stores.insert(name, store.clone());
    Ok(store)
}

/// Replaces a store by one with these options, for all opens and reads after this.
pub(crate) fn configure(name: &str, options: Options) -> Result<()> {
    let url = Url::parse(Path::new(name))?;
    let store = Arc::new(Store::open(&url, url.store(), &options)?);
    lock(&STORES).insert(url.store(), store);
    Ok(())
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Settings and credentials come from the environment, as the store's own tools read them, and from `options`.
    fn open(url: &Url, name: String, options: &Options) -> Result<Self> {
        let refused = |error: object_store::Error| {
            let message = format!("the store cannot be used: {}", super::http::cause(&error));
            Error::new(ErrorKind::Config, Stage::Index, message).with_path(&name)
        };
        let (client, lists) = Self::client(url, &name, options).map_err(refused)?;
        Ok(Self { name, client, lists, limit: Limit::new(), found: Mutex::default() })
    }

    fn client(url: &Url, name: &str, options: &Options) -> object_store::Result<Client> {
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let connector = Connector { follow: url.scheme.is_http() };
        // An endpoint without TLS is the user's own choice.
        let plain = ClientOptions::new().with_allow_http(true);
        // The three builders have the same methods and no common trait.
        macro_rules! bucket {
            ($builder:ty, $named:ident) => {{
                let mut builder = <$builder>::from_env().$named(&url.bucket).with_client_options(plain);
                for (key, value) in options {
                    builder = builder.with_config(key.parse()?, value);
                }
                builder.with_retry(retry).with_http_connector(connector).build().map(both)
            }};
        }
        match url.scheme {
            Scheme::S3 => bucket!(object_store::aws::AmazonS3Builder, with_bucket_name),
            Scheme::Gcs => bucket!(object_store::gcp::GoogleCloudStorageBuilder, with_bucket_name),
            Scheme::Azure => bucket!(object_store::azure::MicrosoftAzureBuilder, with_container_name),
            Scheme::Http | Scheme::Https => {
                if let Some((name, _)) = options.first() {
                    let source = format!("an HTTP server has no option {name:?}").into();
                    return Err(object_store::Error::NotSupported { source });
                }
                let builder = object_store::http::HttpBuilder::new().with_url(name).with_client_options(plain);
                let store = builder.with_retry(retry).with_http_connector(connector).build()?;
                Ok((Arc::new(store), None))
            }
        }
    }

    /// The URL of a key.
    pub(super) fn url(&self, key: &Key) -> PathBuf {
        PathBuf::from(format!("{}/{key}", self.name))
    }
}

/// Reads, and listings where the store has them.
type Client = (Arc<dyn ObjectStore>, Option<Arc<dyn PaginatedListStore>>);

fn both<S: ObjectStore + PaginatedListStore>(store: S) -> Client {
    let store = Arc::new(store);
    (store.clone(), Some(store))
}

/// The version of an object: its etag without quotes, or else the time of its last change.
pub(super) fn pin_of(meta: &ObjectMeta) -> String {
    match &meta.e_tag {
        Some(etag) => etag.replace('"', ""),
        None => format!("modified {}", meta.last_modified.to_rfc3339()),
    }
}

impl Object {
    pub(super) fn url(&self) -> PathBuf {
        self.store.url(&self.key)
    }

    /// The object at a URL, in the listed version.
    pub(crate) fn at(path: &Path, len: u64, pin: Option<Arc<str>>) -> Result<Self> {
        let url = Url::parse(path)?;
        Ok(Self { store: store(&url)?, key: url.object()?, len, pin: pin.unwrap_or_default() })
    }

    /// Whether each request names the version, so that bytes may be kept for later runs.
    pub(crate) fn is_pinned(&self) -> bool {
        self.condition().is_some()
    }

    /// The condition of each request; weak etags and times cannot be one, they are only compared.
    pub(super) fn condition(&self) -> Option<String> {
        let strong = !self.pin.starts_with("W/") && !self.pin.starts_with("modified ") && !self.pin.is_empty();
        strong.then(|| format!("\"{}\"", self.pin))
    }
}
