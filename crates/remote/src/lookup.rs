//! Queries to a store: single reads, lookups, listings, patterns.

use super::fetch;
use super::fetch::Collected;
use super::http::Note;
use super::registry::within;
use super::store::{Object, Store, lost, runtime, store, wait};
use super::url::Url;
use crate::Way;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{FileKind, Meta, bad_pattern, is_pattern};
use feedline_base::sync::Hold;
use object_store::list::PaginatedListOptions;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectMeta};
use std::collections::HashSet;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long the metadata of an object from a listing is used, unless a read of the object fails.
/// Opening a dataset lists its shards, then opens each.
const FRESH: Duration = Duration::from_secs(60);

/// How often a download checks whether its loader ends.
const STOP: Duration = Duration::from_millis(50);

/// Maximum pages in a row without an object. Stores send such pages after many deletions.
const EMPTY_PAGES: usize = 1000;

/// Number of concurrent requests for metadata.
const LOOKS: usize = 64;

/// The keys of a listing.
struct Keys {
    objects: Vec<Key>,
    folders: Vec<Key>,
    /// Keys that cannot be in a folder, as they are written.
    odd: Vec<String>,
}

impl Store {
    fn remember(&self, meta: &ObjectMeta) -> Meta {
        let found = Meta::of_object(meta.size, Some(self.pin_of(meta).into()));
        self.found
            .hold()
            .insert(meta.location.to_string(), (found.clone(), Instant::now()));
        found
    }

    fn remembered(&self, key: &Key) -> Option<Meta> {
        let found = self.found.hold();
        let (meta, when) = found.get(key.as_ref())?;
        // A commit never changes.
        (when.elapsed() < FRESH || self.hub.is_some()).then(|| meta.clone())
    }

    /// Forgets the metadata of an object, which may be the cause of a failure: the next lookup asks
    /// the store.
    pub(super) fn forget(&self, key: &Key) {
        self.found.hold().remove(key.as_ref());
    }

    /// Forgets the metadata of all objects: one was replaced, probably with its neighbours. The
    /// next lookups ask the store.
    pub(super) fn forget_all(&self) {
        self.found.hold().clear();
    }

    /// Remembers objects; returns their keys.
    fn keys_of(&self, objects: Vec<ObjectMeta>) -> Vec<Key> {
        let remembered = objects.into_iter().map(|meta| {
            self.remember(&meta);
            meta.location
        });
        remembered.collect()
    }

    async fn head(self: Arc<Self>, key: Key) -> Result<Meta> {
        if let Some(meta) = self.remembered(&key) {
            return Ok(meta);
        }
        let asked = self.asked(&key);
        let meta = match &self.hub {
            Some(hub) => hub.looked_up(&self, &key, asked).await?,
            None => asked.await?,
        };
        Ok(self.remember(&meta))
    }

    async fn asked(&self, key: &Key) -> Result<ObjectMeta> {
        let asked = fetch::asked(self, key, |note: Note| {
            let client = self.client.clone();
            let key = key.clone();
            Box::pin(async move {
                let options = GetOptions {
                    head: true,
                    extensions: note.extensions(),
                    ..GetOptions::default()
                };
                let head = client.get_opts(&key, options).await;
                let answer = note.answer();
                match head.map(|got| got.meta) {
                    // Some servers answer HEAD without a length. An empty object has an empty
                    // answer to GET, too.
                    Ok(meta) if meta.size == 0 => {
                        let whole = GetOptions {
                            extensions: note.extensions(),
                            ..GetOptions::default()
                        };
                        return client.get_opts(&key, whole).await.map(|got| got.meta);
                    }
                    Err(_) if matches!(answer.status, 403 | 405 | 501) && !answer.is_skewed() => {}
                    told => return told,
                }
                // Some servers, and some signed URLs, allow only GET. A request for the first byte
                // also tells the length.
                let first = GetOptions {
                    range: Some(GetRange::Bounded(0..1)),
                    ..GetOptions::default()
                };
                // Its error has a body, which says why.
                client.get_opts(&key, first).await.map(|got| got.meta)
            })
        });
        asked.await
    }

    /// Lists the objects whose keys start with `prefix`. If `folder`, lists only the objects and
    /// folders of that folder. Odd keys are listed separately.
    async fn list(self: Arc<Self>, prefix: String, folder: bool) -> Result<Keys> {
        if let Some(hub) = &self.hub {
            let place = prefix.rsplit_once('/').map_or("", |(folder, _)| folder);
            let files = hub.files(&self, place).await?;
            let found = within(files.to_vec(), &prefix, folder);
            return Ok(Keys {
                objects: self.keys_of(found.objects),
                folders: found.common_prefixes,
                odd: Vec::new(),
            });
        }
        let Some(lists) = self.lists.clone() else {
            let message = "an HTTP server has no listing; name the objects, for example by braces: \
                 x-{000..127}.tar";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(&self.name));
        };
        let mut objects = Vec::new();
        let mut folders = Vec::new();
        let mut odd = Vec::new();
        let mut page_token = None;
        let mut tokens = HashSet::new();
        let mut empty = 0;
        let shown = Key::from(prefix.as_str());
        loop {
            let page = fetch::asked(&self, &shown, |note: Note| {
                let lists = lists.clone();
                let prefix = Some(prefix.clone()).filter(|prefix| !prefix.is_empty());
                let options = PaginatedListOptions {
                    delimiter: folder.then_some("/".into()),
                    page_token: page_token.clone(),
                    extensions: note.extensions(),
                    ..PaginatedListOptions::default()
                };
                Box::pin(async move {
                    let page = lists.list_paginated(prefix.as_deref(), options).await?;
                    Ok((page, note.answer().odd))
                })
            });
            let (page, left_out) = page.await?;
            let found = objects.len() + folders.len() + odd.len();
            odd.extend(left_out);
            objects.extend(self.keys_of(page.result.objects));
            folders.extend(page.result.common_prefixes);
            let Some(token) = page.page_token else {
                // Overlapping pages name an object twice.
                for names in [&mut objects, &mut folders] {
                    names.sort_unstable();
                    names.dedup();
                }
                odd.sort_unstable();
                odd.dedup();
                return Ok(Keys {
                    objects,
                    folders,
                    odd,
                });
            };
            empty = if found == objects.len() + folders.len() + odd.len() {
                empty + 1
            } else {
                0
            };
            if empty > EMPTY_PAGES || !tokens.insert(token.clone()) {
                let message = format!(
                    "the listing does not end: page {} continues at the same place",
                    tokens.len() + 1
                );
                return Err(
                    Error::new(ErrorKind::Io, Stage::Index, message).with_path(self.url(&shown))
                );
            }
            page_token = Some(token);
        }
    }
}

impl Object {
    /// Forgets the object's metadata: the next lookup asks the store.
    pub fn forget(&self) {
        self.store.forget(&self.key);
    }

    /// Fills `out` from `offset`, on the network threads. Errors: those of a reader's completions.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let object = self.clone();
        let range = offset..offset + out.len() as u64;
        // A task of the network threads cannot borrow `out`. Metadata is small, so it may be
        // copied.
        let bytes = wait(async move {
            let store = &object.store;
            let place = range.clone();
            let ask = async {
                let bytes = Vec::with_capacity((range.end - range.start) as usize);
                let mut held = Collected {
                    start: range.start,
                    bytes,
                };
                fetch::fetch(&object, range, store.once(), &mut held).await?;
                Ok(held.bytes)
            };
            match &store.hub {
                Some(hub) => hub.read(&object.pin, place, object.len, ask).await,
                None => ask.await,
            }
        });
        let bytes = bytes.map_err(|error| error.with_path(self.url()))?;
        out.copy_from_slice(&bytes);
        Ok(())
    }

    /// Like `Blob::walk`, on the network threads.
    pub fn walk<W: Way>(
        &self,
        ways: Vec<W>,
        step: impl Fn(&mut W, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Vec<W> {
        let object = self.clone();
        let step = Arc::new(step);
        let walked = wait(async move {
            let each = ways
                .into_iter()
                .map(|way| tokio::spawn(object.clone().follow(way, step.clone())));
            let ended = futures_util::future::join_all(each.collect::<Vec<_>>()).await;
            Ok(ended
                .into_iter()
                .filter_map(std::result::Result::ok)
                .collect())
        });
        walked.unwrap_or_default()
    }

    async fn follow<W: Way>(self, mut way: W, step: Arc<impl Fn(&mut W, &[u8]) -> bool>) -> W {
        loop {
            let (start, len) = way.next();
            let range = start..start.saturating_add(len).min(self.len);
            if range.is_empty() {
                return way;
            }
            let mut held = Collected {
                start,
                bytes: Vec::with_capacity((range.end - start) as usize),
            };
            let got = fetch::fetch(&self, range, self.store.once(), &mut held).await;
            if got.is_err() || !step(&mut way, &held.bytes) {
                return way;
            }
        }
    }

    /// Reads a range into `buffer` on the network threads.
    ///
    /// Errors: those of a reader's completions; [`ErrorKind::Cancelled`] if `stop` was set
    /// meanwhile.
    pub fn bring(
        self,
        range: Range<u64>,
        patience: Option<Duration>,
        mut buffer: Vec<u8>,
        stop: &AtomicBool,
    ) -> Result<Vec<u8>> {
        let (send, receive) = mpsc::sync_channel(1);
        buffer.clear();
        buffer.reserve_exact((range.end - range.start) as usize);
        let task = runtime()?.spawn(async move {
            let mut held = Collected {
                start: range.start,
                bytes: buffer,
            };
            let done = fetch::fetch(&self, range, self.store.of_run(patience), &mut held).await;
            let _ = send.send(done.map(|()| held.bytes));
        });
        loop {
            match receive.recv_timeout(STOP) {
                Ok(done) => return done,
                Err(RecvTimeoutError::Timeout) if !stop.load(Ordering::Relaxed) => {}
                Err(RecvTimeoutError::Timeout) => {
                    task.abort();
                    return Err(Error::new(ErrorKind::Cancelled, Stage::Read, ""));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(lost()),
            }
        }
    }
}

/// Length and version of the object at a URL, from a recent listing or lookup, or from the store
/// now.
pub fn look(path: &Path) -> Result<Meta> {
    let url = Url::parse(path)?;
    let store = store(&url)?;
    let key = url.object()?;
    wait(store.head(key)).map_err(|error| match error.kind() {
        ErrorKind::NotFound => error
            .with_note("a folder's URL ends in `/`")
            .with_path(path),
        _ => error.with_path(path),
    })
}

/// The commit of the repository of a `hf://` URL, with the URL of the repository at that commit.
pub fn commit(path: &Path) -> Result<Option<(String, String)>> {
    if !path.as_os_str().as_encoded_bytes().starts_with(b"hf://") {
        return Ok(None);
    }
    let url = Url::parse(path)?;
    let store = store(&url)?;
    wait(async move {
        let Some(hub) = &store.hub else {
            return Ok(None);
        };
        let commit = hub.resolve(&store).await?.to_string();
        let name = store.name.split('@').next().unwrap_or_default();
        Ok(Some((commit, name.into())))
    })
}

/// Why reads of an object wait: the quota of the Hub that is used up.
pub fn paused(path: &Path) -> Option<String> {
    if !path.as_os_str().as_encoded_bytes().starts_with(b"hf://") {
        return None;
    }
    store(&Url::parse(path).ok()?).ok()?.hub.as_ref()?.paused()
}

/// The objects and folders in a folder of a bucket.
pub fn children(path: &Path) -> Result<Vec<(OsString, FileKind)>> {
    let url = Url::parse(path)?;
    let folder = url.key.trim_end_matches('/');
    let prefix = if folder.is_empty() {
        String::new()
    } else {
        format!("{folder}/")
    };
    let listed =
        wait(store(&url)?.list(prefix.clone(), true)).map_err(|error| error.with_path(path))?;
    let name = |key: &Key| OsString::from(key.filename().unwrap_or_default());
    let objects = listed.objects.iter().map(|key| (name(key), FileKind::File));
    let folders = listed
        .folders
        .iter()
        .map(|key| (name(key), FileKind::Folder));
    Ok(objects
        .chain(folders)
        .chain(listed.odd.iter().map(|key| {
            (
                OsString::from(key.strip_prefix(&prefix).unwrap_or(key)),
                FileKind::Odd,
            )
        }))
        .collect())
}

/// The objects that `names` stand for, in that order: each a URL, or a pattern with `*`, `?` or
/// `[…]`. Names without a pattern are looked up in parallel, or found by one listing of their
/// common prefix. Also returns the number of keys that match a pattern but cannot be in a folder.
///
/// Errors: [`ErrorKind::NotFound`] for a missing object.
pub fn expand(names: &[String]) -> Result<(Vec<PathBuf>, usize)> {
    let plain: Vec<_> = names
        .iter()
        .filter(|name| !is_pattern(name))
        .cloned()
        .collect();
    find_all(&plain)?;
    let mut files = Vec::new();
    let mut odd = 0;
    for name in names {
        if !is_pattern(name) {
            files.push(name.into());
            continue;
        }
        let (found, left_out) = matches(name)?;
        files.extend(found);
        odd += left_out;
    }
    Ok((files, odd))
}

/// Looks up every object, so that opening it needs no request.
fn find_all(names: &[String]) -> Result<()> {
    let Some(first) = names.first() else {
        return Ok(());
    };
    let url = Url::parse(Path::new(first))?;
    let store_of_all = store(&url)?;
    let listed = names.len() > 2 && store_of_all.has_listing();
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
    // Objects that the listing found cost no request here.
    let objects = names.iter().map(|name| {
        let url = Url::parse(Path::new(name))?;
        Ok((name.clone(), store(&url)?, url.object()?))
    });
    let objects: Vec<_> = objects.collect::<Result<_>>()?;
    wait(async move {
        use futures_util::{StreamExt, TryStreamExt};
        let looks = objects.into_iter().map(|(name, store, key)| async move {
            store
                .head(key)
                .await
                .map(drop)
                .map_err(|error| error.with_path(name))
        });
        futures_util::stream::iter(looks)
            .buffered(LOOKS)
            .try_collect::<()>()
            .await
    })
}

/// The objects that match a pattern, sorted by key, and the number of odd keys that match.
fn matches(name: &str) -> Result<(Vec<PathBuf>, usize)> {
    let url = Url::parse(Path::new(name))?;
    let pattern = glob::Pattern::new(&url.key).map_err(|error| bad_pattern(name, error))?;
    let fixed = url.key.find(['*', '?', '[']).unwrap_or(url.key.len());
    let store = store(&url)?;
    let mut keys = wait(store.clone().list(url.key[..fixed].into(), false))
        .map_err(|error| error.with_path(name))?;
    let options = glob::MatchOptions {
        require_literal_separator: true,
        require_literal_leading_dot: true,
        ..glob::MatchOptions::new()
    };
    keys.objects
        .retain(|key| pattern.matches_with(key.as_ref(), options));
    let odd = keys
        .odd
        .iter()
        .filter(|key| pattern.matches_with(key, options))
        .count();
    Ok((keys.objects.iter().map(|key| store.url(key)).collect(), odd))
}
