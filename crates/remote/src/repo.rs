//! Repositories in `hf://` URLs: `datasets/org/name@revision`.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use percent_encoding::percent_decode_str;
use std::path::PathBuf;

/// A repository and its revision.
#[derive(Clone, Debug, PartialEq)]
pub struct Repo {
    /// `datasets`, `models` or `spaces`.
    pub kind: &'static str,
    /// `org/name`.
    pub id: String,
    pub revision: String,
}

const KINDS: [&str; 3] = ["datasets", "models", "spaces"];

impl Repo {
    /// The repository with its revision, and the path in it. Some revisions have a slash.
    pub fn split(rest: &str) -> (&str, &str) {
        let named = KINDS
            .iter()
            .chain(&["buckets", "kernels"])
            .find(|kind| rest.starts_with(&format!("{kind}/")));
        let owner = named.map_or(0, |kind| kind.len() + 1);
        let Some(mut end) = slash(rest, owner).map(|at| slash(rest, at + 1).unwrap_or(rest.len()))
        else {
            return (rest, "");
        };
        let refs = rest[..end].ends_with("@refs");
        if let Some(kind) = slash(rest, end + 1).filter(|_| refs) {
            end = slash(rest, kind + 1).unwrap_or(rest.len());
        }
        (&rest[..end], rest.get(end + 1..).unwrap_or(""))
    }

    /// Parses the first part of [`split`](Self::split). Errors: [`ErrorKind::Config`].
    pub fn parse(text: &str) -> Result<Self> {
        let (kind, rest) = KINDS
            .into_iter()
            .find_map(|kind| Some((kind, text.strip_prefix(kind)?.strip_prefix('/')?)))
            .unwrap_or(("models", text));
        let (id, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let owner = id.split('/').next().unwrap_or_default();
        if ["buckets", "kernels"].contains(&owner) {
            return bad("buckets and kernels of the Hub are not read; use a dataset or a model");
        }
        let singular = ["dataset", "model", "space"].contains(&owner);
        if singular || id.split('/').count() != 2 || !id.split('/').all(is_plain) {
            return bad(
                "not a repository of the Hub; use hf://datasets/org/name@revision/path, or \
                 hf://org/name@revision/path for a model",
            );
        }
        let revision = percent_decode_str(revision).decode_utf8_lossy();
        if revision.is_empty() || revision.contains(char::is_control) {
            return bad(
                "the revision is empty or has a control character; name a branch, a tag or \
                 a commit",
            );
        }
        let revision = match revision.strip_prefix('~') {
            Some(name) => format!("refs/convert/{name}"),
            None => revision.into_owned(),
        };
        let id = id.to_string();
        Ok(Self { kind, id, revision })
    }

    /// `datasets/org/name`, or `org/name` for a model.
    pub fn page(&self) -> String {
        match self.kind {
            "models" => self.id.clone(),
            kind => format!("{kind}/{}", self.id),
        }
    }
}

fn bad(message: &str) -> Result<Repo> {
    Err(Error::new(ErrorKind::Config, Stage::Index, message))
}

/// Where the next slash is.
fn slash(text: &str, from: usize) -> Option<usize> {
    Some(from + text.get(from..)?.find('/')?)
}

/// Whether a part of a repository's name is one of the Hub.
fn is_plain(part: &str) -> bool {
    let mut chars = part.chars();
    !part.is_empty()
        && !part.starts_with('.')
        && chars.all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// Whether a revision is a commit's full hash.
pub fn is_commit(name: &str) -> bool {
    name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A `hf://` URL without its revision: a name of content that stays the same in other commits.
/// Other URLs stay as they are.
pub fn without_revision(url: PathBuf) -> PathBuf {
    let plain = url.to_str().and_then(|text| {
        let (repo, key) = Repo::split(text.strip_prefix("hf://")?);
        let (repo, _) = repo.split_once('@')?;
        Some(format!("hf://{repo}/{key}").into())
    });
    plain.unwrap_or(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_without_its_revision_is_the_same_for_every_commit() {
        for (url, right) in [
            ("hf://datasets/o/n@main/a@b", "hf://datasets/o/n/a@b"),
            ("hf://o/n@refs/pr/3/a", "hf://o/n/a"),
            ("hf://o/n/a@b", "hf://o/n/a@b"),
            ("s3://b/a@b/c", "s3://b/a@b/c"),
        ] {
            assert_eq!(without_revision(url.into()).to_str(), Some(right), "{url}");
        }
        let alias = Repo::parse("datasets/o/n@~parquet").unwrap();
        assert_eq!(alias.revision, "refs/convert/parquet");
    }
}
