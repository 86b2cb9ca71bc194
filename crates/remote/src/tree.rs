//! Queries to a repository of the Hub: its commit, its files, and metadata that the machine shares.
//!
//! ```text
//! resolve ──► commit ──► files of a folder, by pages ──► lengths and versions
//!                └─────► one file, by `HEAD` ──────────────┘
//! ```
//!
//! Limits: [`FRESH`] for a revision that another process resolved; metadata of at most [`READ`]
//! bytes per read is shared by the machine (`shared`).

use super::fetch;
use super::http::{Kind, Note, text_of};
use super::hub::{Hub, SEGMENT};
use super::repo::is_commit;
use super::store::{Store, client, commits};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use object_store::ObjectMeta;
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::path::Path as Key;
use percent_encoding::utf8_percent_encode;
use reqwest::Url;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// How long a revision that a process of the machine has resolved counts for others.
const FRESH: Duration = Duration::from_secs(60);

/// What never changes.
const EVER: Duration = Duration::MAX;

/// Maximum bytes of a read that the machine shares: footers and headers, no samples.
const READ: u64 = 1 << 20;

/// Maximum bytes of a footer that the machine shares.
const FOOTER: u64 = 64 << 20;

/// A file in a listing.
#[derive(Deserialize, Serialize)]
struct Listed {
    path: String,
    size: u64,
    etag: String,
}

/// An entry of the Hub's listing.
#[derive(Deserialize)]
struct Entry {
    r#type: String,
    path: String,
    #[serde(default)]
    size: u64,
    oid: String,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
}

impl Hub {
    /// Finds the commit of the revision, if it is not known.
    pub(super) async fn resolve(self: &Arc<Self>, store: &Store) -> Result<&str> {
        if let Some(commit) = self.commit() {
            return Ok(commit);
        }
        let revision = format!("{}@{}", self.repo.page(), self.repo.revision);
        let known = commits().hold().get(&revision).cloned();
        if let Some(commit) = known {
            return Ok(self.commit.get_or_init(|| commit));
        }
        let name = self.name(&format!("revision {}", self.repo.revision));
        let life = if self.is_offline { EVER } else { FRESH };
        let url = self.api("revision", &self.repo.revision) + "?expand=sha";
        let found = self.shared.once(name, life, async {
            let (answer, _) = self.ask(store, url).await?;
            let Revision { sha } = serde_json::from_slice(&answer).map_err(odd)?;
            match is_commit(&sha) {
                true => Ok(sha.into_bytes()),
                false => Err(io("the Hub names no commit for the revision")),
            }
        });
        let commit = String::from_utf8_lossy(&found.await?).into_owned();
        // Of two threads, the first one counts.
        let commit = commits().hold().entry(revision).or_insert(commit).clone();
        Ok(self.commit.get_or_init(|| commit))
    }

    /// All files below a folder, which is empty for the whole repository.
    pub(super) async fn files(
        self: &Arc<Self>,
        store: &Store,
        folder: &str,
    ) -> Result<Arc<Vec<ObjectMeta>>> {
        let commit = self.resolve(store).await?;
        let known = {
            let listings = self.listings.hold();
            let name = listings.keys().find(|known| is_above(known, folder));
            name.map(|name| listings[name].clone())
        };
        if let Some(known) = known {
            return Ok(known);
        }
        let name = self.name(&format!("tree {commit} {folder}"));
        let found = self
            .shared
            .once(name, EVER, self.listing(store, commit, folder));
        let listed: Vec<Listed> = serde_json::from_slice(&found.await?).map_err(odd)?;
        let files = listed.into_iter().filter_map(|file| {
            Some(ObjectMeta {
                location: Key::parse(&file.path).ok()?,
                last_modified: Default::default(),
                size: file.size,
                e_tag: Some(file.etag),
                version: None,
            })
        });
        let files = Arc::new(files.collect::<Vec<_>>());
        self.listings.hold().insert(folder.into(), files.clone());
        Ok(files)
    }

    /// All pages of a listing, as JSON of [`Listed`].
    async fn listing(
        self: &Arc<Self>,
        store: &Store,
        commit: &str,
        folder: &str,
    ) -> Result<Vec<u8>> {
        let path = match folder {
            "" => String::new(),
            folder => format!("/{}", utf8_percent_encode(folder, SEGMENT)),
        };
        let mut url = self.api("tree", commit) + &path + "?recursive=true&expand=false";
        let mut listed = Vec::new();
        loop {
            let (page, next) = self.ask(store, url.clone()).await?;
            let entries: Vec<Entry> = serde_json::from_slice(&page).map_err(odd)?;
            let is_empty = entries.is_empty();
            listed.extend(
                entries
                    .into_iter()
                    .filter(|entry| entry.r#type == "file")
                    .map(|entry| {
                        let Entry {
                            path,
                            size,
                            oid,
                            lfs,
                            ..
                        } = entry;
                        let (size, etag) = lfs.map_or((size, oid), |lfs| (lfs.size, lfs.oid));
                        Listed { path, size, etag }
                    }),
            );
            let Some(next) = next else {
                return serde_json::to_vec(&listed).map_err(odd);
            };
            if is_empty || next == url {
                return Err(io(
                    "the Hub's listing does not end: a page continues at the same place",
                ));
            }
            url = next;
        }
    }

    /// The answer of the API to one request, and the address of the next page.
    async fn ask(
        self: &Arc<Self>,
        store: &Store,
        url: String,
    ) -> Result<(Vec<u8>, Option<String>)> {
        let client = client(Kind::Hub(self.clone()))?;
        fetch::asked(store, &Key::default(), |note: Note| {
            let client = client.clone();
            let url = url.clone();
            let hub = self.clone();
            Box::pin(async move {
                let mut request = HttpRequest::new(HttpRequestBody::empty());
                *request.uri_mut() = url.parse().map_err(failed)?;
                request.extensions_mut().insert(note);
                let response = client.execute(request).await.map_err(failed)?;
                if !response.status().is_success() {
                    return Err(failed("the Hub refused"));
                }
                let next = text_of(response.headers(), "link").and_then(next_of);
                let next = next.and_then(|next| Url::parse(&url).ok()?.join(next).ok());
                // Another host would get the token.
                let next = next.filter(|next| next.origin() == hub.endpoint.origin());
                let body = response.into_body().bytes().await;
                let body = body.map_err(failed)?;
                Ok((body.to_vec(), next.map(String::from)))
            })
        })
        .await
    }

    /// Looks up an object once per machine. `ask`: asks the Hub.
    pub(super) async fn looked_up(
        self: &Arc<Self>,
        store: &Store,
        key: &Key,
        ask: impl Future<Output = Result<ObjectMeta>> + Send,
    ) -> Result<ObjectMeta> {
        let commit = self.resolve(store).await?;
        let name = self.name(&format!("file {commit} {key}"));
        let found = self.shared.once(name, EVER, async {
            let ObjectMeta { size, e_tag, .. } = ask.await?;
            let path = key.to_string();
            let etag = e_tag.unwrap_or_default();
            serde_json::to_vec(&Listed { path, size, etag }).map_err(odd)
        });
        let Listed { size, etag, .. } = serde_json::from_slice(&found.await?).map_err(odd)?;
        Ok(ObjectMeta {
            location: key.clone(),
            last_modified: Default::default(),
            size,
            e_tag: Some(etag).filter(|etag| !etag.is_empty()),
            version: None,
        })
    }

    /// Reads metadata of an object of `len` bytes once per machine, if it is a header, a footer or
    /// a small file.
    pub(super) async fn read(
        &self,
        pin: &str,
        range: std::ops::Range<u64>,
        len: u64,
        ask: impl Future<Output = Result<Vec<u8>>> + Send,
    ) -> Result<Vec<u8>> {
        let count = range.end - range.start;
        let is_footer = len - range.end <= 8 && count <= FOOTER;
        if pin.is_empty() || (count > READ && !is_footer) {
            return ask.await;
        }
        let name = self.name(&format!("bytes {pin} {range:?}"));
        let found = self.shared.once(name, EVER, ask).await?;
        if found.len() as u64 == count {
            return Ok(found);
        }
        Err(io("a shared range has another length"))
    }
}

/// The next page in a header `Link`: `<https://…?cursor=…>; rel="next"`.
fn next_of(link: &str) -> Option<&str> {
    link.split(',').find_map(|link| {
        let (url, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        rest.contains("rel=\"next\"").then_some(url)
    })
}

/// Whether a folder is `below` or lies above it.
fn is_above(folder: &str, below: &str) -> bool {
    folder.is_empty() || folder == below || below.starts_with(&format!("{folder}/"))
}

fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic {
        store: "Hub",
        source: source.into(),
    }
}

fn io(message: &str) -> Error {
    Error::new(ErrorKind::Io, Stage::Index, message)
}

fn odd(error: serde_json::Error) -> Error {
    io("the Hub's answer is not the JSON that its API has; check HF_ENDPOINT").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_found_in_a_header() {
        for (header, right) in [
            ("<https://h/a?b=1>; rel=\"next\"", Some("https://h/a?b=1")),
            ("<x>; rel=\"prev\", <y>; rel=\"next\"", Some("y")),
            ("<x>; rel=\"prev\"", None),
            ("x; rel=\"next\"", None),
        ] {
            assert_eq!(next_of(header), right, "{header}");
        }
    }
}
