//! Stores of other crates, by the scheme of their URLs.
//!
//! ```text
//! toy://bucket/key ──► the registered opener of `toy`: (bucket, options) ──► ObjectStore ──► lookups, listings, reads
//! ```

#[cfg(doc)]
use feedline_base::error::ErrorKind;
use feedline_base::error::{Result, config};
use feedline_base::sync::Hold;
use futures_util::TryStreamExt;
use object_store::list::{PaginatedListOptions, PaginatedListResult, PaginatedListStore};
use object_store::path::Path as Key;
use object_store::{ListResult, ObjectMeta, ObjectStore};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

type Open = dyn Fn(&str, &[(String, String)]) -> Result<Arc<dyn ObjectStore>> + Send + Sync;

/// The opener of a scheme.
pub struct Registered {
    /// `toy://`.
    pub start: String,
    pub open: Box<Open>,
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.start)
    }
}

/// Schemes of this crate's own stores.
const BUILT_IN: [&str; 6] = ["s3", "gs", "az", "hf", "http", "https"];

/// Never removed: URLs of a scheme are valid until the process ends.
static ALL: Mutex<Vec<&'static Registered>> = Mutex::new(Vec::new());

/// Opens URLs `scheme://bucket/key` with a store of your own, in this process. `open` gets the
/// bucket and the options that [`configure`](super::configure) set for it, and is called once per
/// bucket.
///
/// Objects are used like those of other stores: patterns, folders, caches, versions. The version of
/// an object is its `e_tag`, or else `last_modified`; a read that asks for another version must fail
/// with `Precondition`. Listings call `list`.
///
/// Errors: [`ErrorKind::Config`] for a scheme that is not of lower-case letters and digits, and for
/// one that is taken.
///
/// ```
/// use feedline_remote::{object_store::memory::InMemory, register};
/// use std::sync::Arc;
///
/// let store = Arc::new(InMemory::new());
/// register("toy", move |_bucket, _options| Ok(store.clone()))?; // from now on: Tar::open("toy://bucket/train-*.tar")
/// # Ok::<(), feedline_base::error::Error>(())
/// ```
pub fn register(
    scheme: &str,
    open: impl Fn(&str, &[(String, String)]) -> Result<Arc<dyn ObjectStore>> + Send + Sync + 'static,
) -> Result<()> {
    let is_plain = scheme
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if scheme.is_empty() || !is_plain {
        return Err(config(format!(
            "the scheme {scheme:?} cannot be registered: use lower-case letters and digits"
        )));
    }
    let start = format!("{scheme}://");
    let mut all = ALL.hold();
    if BUILT_IN.contains(&scheme) || all.iter().any(|other| other.start == start) {
        return Err(config(format!("the scheme {scheme:?} is taken")));
    }
    let open = Box::new(open);
    all.push(Box::leak(Box::new(Registered { start, open })));
    Ok(())
}

/// The opener of this URL's scheme, if one was registered.
pub fn of(url: &str) -> Option<&'static Registered> {
    let all = ALL.hold();
    all.iter()
        .copied()
        .find(|registered| url.starts_with(&registered.start))
}

/// Listings by the prefix of a key, of a store that lists folders.
#[derive(Debug)]
pub struct Lists(pub Arc<dyn ObjectStore>);

#[async_trait::async_trait]
impl PaginatedListStore for Lists {
    async fn list_paginated(
        &self,
        prefix: Option<&str>,
        options: PaginatedListOptions,
    ) -> object_store::Result<PaginatedListResult> {
        let prefix = prefix.unwrap_or("");
        let folder = prefix.rsplit_once('/').map(|(folder, _)| Key::from(folder));
        let objects = self.0.list(folder.as_ref()).try_collect().await?;
        Ok(PaginatedListResult {
            result: within(objects, prefix, options.delimiter.is_some()),
            page_token: None,
        })
    }
}

/// The objects whose keys start with `prefix`. If `folder`, only those of that folder, and its
/// folders.
pub fn within(mut objects: Vec<ObjectMeta>, prefix: &str, folder: bool) -> ListResult {
    objects.retain(|meta| meta.location.as_ref().starts_with(prefix));
    let mut folders = BTreeSet::new();
    if folder {
        objects.retain(|meta| {
            let rest = &meta.location.as_ref()[prefix.len()..];
            let within = rest.split_once('/').map(|(name, _)| name);
            // A name may have any character.
            folders.extend(within.and_then(|name| Key::parse(format!("{prefix}{name}")).ok()));
            within.is_none()
        });
    }
    ListResult {
        objects,
        common_prefixes: folders.into_iter().collect(),
        extensions: Default::default(),
    }
}
