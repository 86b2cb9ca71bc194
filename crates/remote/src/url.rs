//! URLs of objects: `s3://bucket/key`, `gs://bucket/key`, `az://container/key`, `https://host/key`,
//! `hf://datasets/org/name@revision/key`.

use super::odd::why_odd;
use super::registry::{self, Registered};
use super::repo::Repo;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::secret::at_query;
use object_store::path::Path as Key;
use std::path::Path;

/// A store and a key in it.
#[derive(Debug)]
pub(super) struct Url {
    pub(super) scheme: Scheme,
    /// Bucket, container, host with port, or repository with its revision.
    pub(super) bucket: String,
    /// Key as written: percent-encoded for HTTP.
    pub(super) key: String,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Scheme {
    S3,
    Gcs,
    Azure,
    Http,
    Https,
    Hub,
    Other(&'static Registered),
}

const SCHEMES: [Scheme; 6] = [
    Scheme::S3,
    Scheme::Gcs,
    Scheme::Azure,
    Scheme::Http,
    Scheme::Https,
    Scheme::Hub,
];

const SECRETS: &str = "the URL has a user name, a password, a query or a fragment; use the plain \
     URL of the object";

impl Scheme {
    fn text(self) -> &'static str {
        match self {
            Self::S3 => "s3://",
            Self::Gcs => "gs://",
            Self::Azure => "az://",
            Self::Http => "http://",
            Self::Https => "https://",
            Self::Hub => "hf://",
            Self::Other(registered) => &registered.start,
        }
    }

    pub(super) fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::Https)
    }
}

impl Url {
    /// Errors: [`ErrorKind::Config`] for another scheme, a missing bucket, or a query or user name,
    /// which may be a secret.
    pub(super) fn parse(path: &Path) -> Result<Self> {
        let bad = |message: &str| Error::new(ErrorKind::Config, Stage::Index, message);
        let Some(text) = path.to_str() else {
            return Err(bad("the URL is not UTF-8").with_path(path));
        };
        let others = registry::of(text).map(Scheme::Other);
        let Some((scheme, rest)) = SCHEMES
            .into_iter()
            .chain(others)
            .find_map(|scheme| Some((scheme, text.strip_prefix(scheme.text())?)))
        else {
            let message = "not a URL of an object; use s3://, gs://, az://, hf://, http:// or \
                 https://, or a scheme that this program registered";
            return Err(bad(message).with_path(path));
        };
        if let Scheme::Hub = scheme {
            let (bucket, key) = Repo::split(rest);
            if at_query(rest).1 {
                return Err(bad(SECRETS).with_path(path));
            }
            Repo::parse(bucket).map_err(|error| error.with_path(path))?;
            return Ok(Self {
                scheme,
                bucket: bucket.into(),
                key: key.into(),
            });
        }
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let is_port = bucket.rsplit_once(':').is_none_or(|(host, port)| {
            host.starts_with('[')
                || (scheme.is_http() && port.bytes().all(|byte| byte.is_ascii_digit()))
        });
        // A password of digits, then a slash, looks like a port.
        let hides_user = scheme.is_http()
            && bucket.contains(':')
            && key.split('/').next().is_some_and(|part| part.contains('@'));
        let query = hides_user || key.contains(['?', '#']) && scheme.is_http() || at_query(rest).1;
        if query || bucket.contains(['@', '?', '#', '%']) || !is_port {
            return Err(bad(SECRETS).with_path(path));
        }
        if scheme.is_http() && key.to_ascii_lowercase().contains("%2f") {
            return Err(
                bad("an encoded slash (%2F) in a URL: the server would get a plain slash")
                    .with_path(path),
            );
        }
        if bucket.is_empty() {
            return Err(bad("the URL names no bucket or host").with_path(path));
        }
        Ok(Self {
            scheme,
            bucket: bucket.into(),
            key: key.into(),
        })
    }

    /// The store: everything before the key.
    pub(super) fn store(&self) -> String {
        format!("{}{}", self.scheme.text(), self.bucket)
    }

    /// The key in the client's form. Errors: [`ErrorKind::Config`] for an empty key, or empty or
    /// relative parts.
    pub(super) fn object(&self) -> Result<Key> {
        let key = match self.scheme.is_http() {
            true => Key::from_url_path(&self.key),
            false => Key::parse(&self.key),
        };
        let named = |error: Error| error.with_path(format!("{}/{}", self.store(), self.key));
        match key {
            Ok(key) if !key.as_ref().is_empty() => Ok(key),
            Ok(_) => Err(named(Error::new(
                ErrorKind::Config,
                Stage::Index,
                "the URL names no object",
            ))),
            // The client's error repeats the key, which may contain a secret.
            Err(_) => {
                let why = why_odd(&self.key).unwrap_or("an empty or relative part");
                Err(named(Error::new(
                    ErrorKind::Config,
                    Stage::Index,
                    format!("the key has {why}; rename the object"),
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_a_store_and_a_key() {
        let table = [
            ("s3://b/a/b.tar", "s3://b", "a/b.tar"),
            ("gs://b/k", "gs://b", "k"),
            ("az://c/k", "az://c", "k"),
            ("https://h:8/x/y%20z", "https://h:8", "x/y z"),
            ("hf://o/n/k", "hf://o/n", "k"),
            (
                "hf://datasets/o/n/a b%20.txt",
                "hf://datasets/o/n",
                "a b%20.txt",
            ),
            ("hf://datasets/o/n@v1/k@2", "hf://datasets/o/n@v1", "k@2"),
            ("hf://spaces/o/n@a%2Fb/k", "hf://spaces/o/n@a%2Fb", "k"),
            ("hf://o/n@refs/pr/3/k", "hf://o/n@refs/pr/3", "k"),
            (
                "hf://datasets/o/n@refs/convert/parquet/d/k",
                "hf://datasets/o/n@refs/convert/parquet",
                "d/k",
            ),
        ];
        for (text, store, key) in table {
            let url = Url::parse(Path::new(text)).unwrap();
            assert_eq!(
                (url.store().as_str(), url.object().unwrap().as_ref()),
                (store, key)
            );
        }
    }

    #[test]
    fn urls_with_secrets_or_without_names_are_refused() {
        for text in [
            "ftp://b/k",
            "HTTP://user:secret@h/k",
            "s3:///k",
            "https://h/k?X-Amz-Signature=secret",
            "https://user:secret@h/k",
            "https://user:secret%40h/k",
            "s3://KEY:secret@b/k",
            "s3://b/k?X-Amz-Signature=secret",
            "s3://b:secret/k",
            "https://h/n%2Fa.bin",
            "hf://user:secret@datasets/x",
            "hf://datasets/o/n/x?token=secret",
            "hf://datasets/o",
            "hf://dataset/o/n/x",
            "hf://buckets/o/n/x",
            "hf://datasets/o/../x",
            "hf://datasets/o/n@/x",
        ] {
            let error = Url::parse(Path::new(text)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        for text in ["s3://b", "s3://b/", "s3://b/a//b", "s3://b/../c"] {
            assert_eq!(
                Url::parse(Path::new(text))
                    .unwrap()
                    .object()
                    .unwrap_err()
                    .kind(),
                ErrorKind::Config,
                "{text}"
            );
        }
    }
}
