//! Stores of the process, their listings, and objects with their version.

use super::fetch;
use super::http::{Connector, Note};
use super::limit::Limit;
use super::url::{Scheme, Url};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::meta::{Kind, Meta};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path as Key;
use object_store::{ClientOptions, GetOptions, ObjectMeta, ObjectStore, RetryConfig};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// A listing's answer about an object counts for so long. Opening a dataset lists its shards, then opens each.
const FRESH: Duration = Duration::from_secs(60);

/// Network threads. They copy bodies into rows, so one is not always enough; two carry 100 Gb/s no better than four.
const THREADS: usize = 2;

/// Requests for metadata at a time.
const LOOKS: usize = 64;

/// One bucket, container or HTTP server.
pub(super) struct Store {
    /// `s3://bucket`.
    pub(super) name: String,
    pub(super) client: Arc<dyn ObjectStore>,
    /// `None` for HTTP servers: they have no listing.
    lists: Option<Arc<dyn PaginatedListStore>>,
    pub(super) limit: Limit,
    /// Objects that a listing or look has found lately, by key.
    found: Mutex<HashMap<String, (Meta, Instant)>>,
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
    let lost = |_| Error::new(ErrorKind::Panicked, Stage::Read, "a network thread panicked");
    receive.recv().map_err(lost)?
}

/// Settings beside those of the environment: names and values.
pub(super) type Options = Vec<(String, String)>;

/// All stores of the process. Two datasets of one bucket share its connections and its limit.
static STORES: Mutex<BTreeMap<String, Arc<Store>>> = Mutex::new(BTreeMap::new());

fn store(url: &Url) -> Result<Arc<Store>> {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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

    fn remember(&self, meta: &ObjectMeta) -> Meta {
        let found = Meta::of_object(meta.size, Some(pin_of(meta).into()));
        lock(&self.found).insert(meta.location.to_string(), (found.clone(), Instant::now()));
        found
    }

    fn remembered(&self, key: &Key) -> Option<Meta> {
        let found = lock(&self.found);
        let (meta, when) = found.get(key.as_ref())?;
        (when.elapsed() < FRESH).then(|| meta.clone())
    }

    async fn head(self: Arc<Self>, key: Key) -> Result<Meta> {
        if let Some(meta) = self.remembered(&key) {
            return Ok(meta);
        }
        let asked = fetch::asked(&self, &key, |note: Note| {
            let (client, key) = (self.client.clone(), key.clone());
            Box::pin(async move {
                let options = GetOptions { head: true, extensions: note.extensions(), ..GetOptions::default() };
                client.get_opts(&key, options).await.map(|got| got.meta)
            })
        });
        let meta = asked.await?;
        Ok(self.remember(&meta))
    }

    /// Every object whose key starts with `prefix`; only those of one folder if `folder`, with the folders in it.
    async fn list(self: Arc<Self>, prefix: String, folder: bool) -> Result<(Vec<(Key, Meta)>, Vec<Key>)> {
        let Some(lists) = self.lists.clone() else {
            let message = "an HTTP server has no listing; name the objects, for example by braces: x-{000..127}.tar";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(&self.name));
        };
        let (mut objects, mut folders, mut page_token) = (Vec::new(), Vec::new(), None);
        let shown = Key::from(prefix.as_str());
        loop {
            let page = fetch::asked(&self, &shown, |note: Note| {
                let (lists, prefix) = (lists.clone(), Some(prefix.clone()).filter(|prefix| !prefix.is_empty()));
                let options = PaginatedListOptions {
                    delimiter: folder.then_some("/".into()),
                    page_token: page_token.clone(),
                    extensions: note.extensions(),
                    ..PaginatedListOptions::default()
                };
                Box::pin(async move { lists.list_paginated(prefix.as_deref(), options).await })
            });
            let page = page.await?;
            objects.extend(page.result.objects.iter().map(|meta| (meta.location.clone(), self.remember(meta))));
            folders.extend(page.result.common_prefixes);
            page_token = page.page_token;
            if page_token.is_none() {
                return Ok((objects, folders));
            }
        }
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
    /// The object at a URL, in the version that `meta` found.
    pub(crate) fn at(path: &Path, meta: &Meta) -> Result<Self> {
        let url = Url::parse(path)?;
        let pin = meta.pin.clone().unwrap_or_default();
        Ok(Self { store: store(&url)?, key: url.object()?, len: meta.len, pin })
    }

    /// Fills `out` from `offset`, on the network threads. Errors: as a reader's completions.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let (object, range) = (self.clone(), offset..offset + out.len() as u64);
        let bytes = wait(async move {
            let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
            fetch::fetch(&object, range, fetch::PATIENCE, &mut bytes).await?;
            Ok(bytes)
        })?;
        out.copy_from_slice(&bytes);
        Ok(())
    }

    /// The condition of each request; weak etags and times cannot be one, they are only compared.
    pub(super) fn condition(&self) -> Option<String> {
        let strong = !self.pin.starts_with("W/") && !self.pin.starts_with("modified ") && !self.pin.is_empty();
        strong.then(|| format!("\"{}\"", self.pin))
    }
}

/// Length and version of the object at a URL, lately listed or asked for now.
pub(crate) fn look(path: &Path) -> Result<Meta> {
    let url = Url::parse(path)?;
    let (store, key) = (store(&url)?, url.object()?);
    wait(store.head(key)).map_err(|error| error.with_path(path))
}

/// The objects and folders in a folder of a bucket.
pub(crate) fn children(path: &Path) -> Result<Vec<(OsString, Kind)>> {
    let url = Url::parse(path)?;
    let folder = url.key.trim_end_matches('/');
    let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let (objects, folders) = wait(store(&url)?.list(prefix, true))?;
    let name = |key: &Key| OsString::from(key.filename().unwrap_or_default());
    let objects = objects.iter().map(|(key, _)| (name(key), Kind::File));
    Ok(objects.chain(folders.iter().map(|key| (name(key), Kind::Folder))).collect())
}

/// The objects that `names` stand for, in that order: each a URL, or a pattern with `*`, `?` or `[…]`. Names without a
/// pattern are looked at in parallel, or found by one listing of what they have in common.
///
/// Errors: [`ErrorKind::NotFound`] for a missing object.
pub(crate) fn expand(names: &[String]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    if names.iter().all(|name| !is_pattern(name)) {
        find_all(names)?;
        return Ok(names.iter().map(PathBuf::from).collect());
    }
    for name in names {
        match is_pattern(name) {
            true => files.extend(matches(name)?),
            false => {
                look(Path::new(name))?;
                files.push(name.into());
            }
        }
    }
    Ok(files)
}

fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?', '['])
}

/// Looks at every object, so that opening it asks no more.
fn find_all(names: &[String]) -> Result<()> {
    let Some(first) = names.first() else { return Ok(()) };
    let url = Url::parse(Path::new(first))?;
    let store_of_all = store(&url)?;
    let listed = names.len() > 2 && store_of_all.lists.is_some();
    if listed {
        let start = format!("{}/", store_of_all.name);
        let common = names.iter().fold(first.as_str(), |common, name| {
            let same = common.chars().zip(name.chars()).take_while(|(a, b)| a == b);
            &common[..same.map(|(char, _)| char.len_utf8()).sum()]
        });
        if let Some(prefix) = common.strip_prefix(&start) {
            wait(store_of_all.list(prefix.into(), false))?;
        }
    }
    // What the listing has found costs no request here.
    let objects = names.iter().map(|name| {
        let url = Url::parse(Path::new(name))?;
        Ok((name.clone(), store(&url)?, url.object()?))
    });
    let objects: Vec<_> = objects.collect::<Result<_>>()?;
    wait(async move {
        use futures_util::{StreamExt, TryStreamExt};
        let looks = objects.into_iter().map(|(name, store, key)| async move {
            store.head(key).await.map(drop).map_err(|error| error.with_path(name))
        });
        futures_util::stream::iter(looks).buffered(LOOKS).try_collect::<()>().await
    })
}

/// The objects that match a pattern, sorted by key.
fn matches(name: &str) -> Result<Vec<PathBuf>> {
    let url = Url::parse(Path::new(name))?;
    let bad = |error: glob::PatternError| {
        Error::new(ErrorKind::Config, Stage::Index, "not a valid pattern").with_source(error).with_path(name)
    };
    let pattern = glob::Pattern::new(&url.key).map_err(bad)?;
    let fixed = url.key.find(['*', '?', '[']).unwrap_or(url.key.len());
    let store = store(&url)?;
    let (objects, _) = wait(store.clone().list(url.key[..fixed].into(), false))?;
    let options = glob::MatchOptions {
        require_literal_separator: true,
        require_literal_leading_dot: true,
        ..glob::MatchOptions::new()
    };
    let mut keys: Vec<_> =
        objects.into_iter().map(|(key, _)| key).filter(|key| pattern.matches_with(key.as_ref(), options)).collect();
    keys.sort();
    Ok(keys.iter().map(|key| store.url(key)).collect())
}
