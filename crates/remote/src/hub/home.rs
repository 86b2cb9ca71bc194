//! What Hugging Face's libraries keep and set: folders, variables, the token.

use crate::credentials::{Fresh, Source, refused};
use async_trait::async_trait;
use feedline_base::error::Result;
use reqwest::header::HeaderValue;
use std::path::{Path, PathBuf};

/// A value of the environment that is set.
pub(super) fn variable(name: &str) -> Option<String> {
    let value = std::env::var(name).ok()?;
    Some(value.trim().to_string()).filter(|value| !value.is_empty())
}

pub(super) fn is_set(name: &str) -> bool {
    variable(name).is_some_and(|value| {
        ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
    })
}

fn path_of(text: String) -> PathBuf {
    match (text.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => text.into(),
    }
}

/// The folder of Hugging Face's libraries.
fn home() -> PathBuf {
    variable("HF_HOME").map_or_else(
        || path_of(variable("XDG_CACHE_HOME").unwrap_or("~/.cache".into())).join("huggingface"),
        path_of,
    )
}

/// The folder for what the processes of a machine share of an object of the Hub: answers, and
/// indexes. None for other URLs.
pub fn shared_folder(url: &Path) -> Option<PathBuf> {
    let is_hub = url.as_os_str().as_encoded_bytes().starts_with(b"hf://");
    is_hub.then(folder)
}

pub(super) fn folder() -> PathBuf {
    let assets = variable("HF_ASSETS_CACHE").map_or_else(|| home().join("assets"), path_of);
    assets.join("feedline")
}

/// An access token, if there is one.
pub(crate) struct Token(pub(super) Option<HeaderValue>);

/// Where tokens come from: the option `token`, the environment, the file of `hf auth login`.
pub(super) struct Tokens(pub(super) Option<String>);

#[async_trait]
impl Source<Token> for Tokens {
    /// Reads the file again: it may have another token by now.
    async fn get(&self, _: bool) -> Result<Fresh<Token>> {
        let file = variable("HF_TOKEN_PATH").map_or_else(|| home().join("token"), path_of);
        let given = self.0.clone();
        let token = given
            .or_else(|| variable("HF_TOKEN"))
            .or_else(|| variable("HUGGING_FACE_HUB_TOKEN"))
            .or_else(|| std::fs::read_to_string(file).ok());
        let token = token.map(|token| token.trim().to_string());
        let header = token.filter(|token| !token.is_empty()).map(|token| {
            let mut header = HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|_| refused("HF_TOKEN has a character that no header may contain"))?;
            header.set_sensitive(true);
            Ok(header)
        });
        Ok(Fresh::new(Token(header.transpose()?), None))
    }
}
