//! A model's folder: `tokenizer_config.json` and its neighbours, as `transformers` reads them.
//!
//! | file | what is taken |
//! |---|---|
//! | `tokenizer_config.json` | `chat_template` (one, or a list with names), special tokens, also additional ones, `added_tokens_decoder` |
//! | `chat_template.jinja`, `additional_chat_templates/*.jinja` | templates, instead of those above |
//! | `special_tokens_map.json` | special tokens, if the configuration has no `added_tokens_decoder` |
//!
//! `tokenizer_class` is not looked at: tokenizers that `transformers` rebuilds for some old models
//! are those of `tokenizer.json` here.

use super::read;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::FileKind;
use feedline_core::storage::listing::{look, names_in};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::AddedToken;

/// Maximum bytes of a file.
const FILE_MAX: u64 = 64 << 20;

const SPECIAL: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Further special tokens.
const MORE: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// A template of a folder.
pub struct Found {
    pub source: String,
    /// Special tokens by their names.
    pub special: Vec<(String, String)>,
    /// Whether `transformers` takes another template for conversations with tools.
    pub is_without_tools: bool,
}

/// A template of the folder: that of this name, or the default.
pub fn template(folder: &Path, name: Option<&str>) -> Result<Found> {
    let config = json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let mut templates = files(folder)?;
    if templates.is_empty() {
        templates = configured(&config);
    }
    let source = templates.remove(name.unwrap_or("default")).ok_or_else(|| {
        let names: Vec<&str> = templates.keys().map(String::as_str).collect();
        let message = match (name, names.as_slice()) {
            (_, []) => "there is no chat template: give its text or file".to_string(),
            (None, names) => format!("no chat template is the default; there are {names:?}"),
            (Some(name), names) => {
                format!("no chat template is called {name:?}; there are {names:?}")
            }
        };
        Error::new(ErrorKind::Config, Stage::Build, message).with_path(folder)
    })?;
    Ok(Found {
        source,
        special: special(folder, &config)?,
        is_without_tools: name.is_none() && templates.contains_key("tool_use"),
    })
}

/// The source of a template in a file of its own, and the special tokens.
pub fn template_file(file: &Path, folder: &Path) -> Result<(String, Vec<(String, String)>)> {
    let source = text(file)?.ok_or_else(|| {
        let message = "there is no such chat template";
        Error::new(ErrorKind::NotFound, Stage::Build, message).with_path(file)
    })?;
    let config = json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    Ok((source, special(folder, &config)?))
}

/// Special tokens by the names of their settings.
fn special(folder: &Path, config: &Map<String, Value>) -> Result<Vec<(String, String)>> {
    let legacy = match config.contains_key("added_tokens_decoder") {
        true => None,
        false => json(&folder.join("special_tokens_map.json"))?,
    };
    let legacy = legacy.unwrap_or_default();
    let tokens = SPECIAL.into_iter().filter_map(|name| {
        let token = legacy.get(name).or_else(|| config.get(name))?;
        let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
        Some((name.to_string(), text.to_string()))
    });
    Ok(tokens.collect())
}

/// The tokens that the settings add to those of `tokenizer.json`, which are `known`.
pub fn added_tokens(folder: &Path, known: &[AddedToken]) -> Result<Vec<AddedToken>> {
    let path = folder.join("tokenizer_config.json");
    let Some(config) = json(&path)? else {
        return Ok(Vec::new());
    };
    let splits = config.get("split_special_tokens").and_then(Value::as_bool);
    if splits == Some(true) {
        let message = "split_special_tokens: special tokens within texts are not split here";
        return Err(Error::new(ErrorKind::Unsupported, Stage::Build, message).with_path(&path));
    }
    let named = special(folder, &config)?;
    let mut numbered = BTreeMap::new();
    let entries = config
        .get("added_tokens_decoder")
        .and_then(Value::as_object);
    for (id, entry) in entries.into_iter().flatten() {
        let content = entry.get("content").and_then(Value::as_str);
        let (Ok(number), Some(content)) = (id.parse::<u32>(), content) else {
            let message = format!("added_tokens_decoder: {id:?} is no token");
            return Err(Error::new(ErrorKind::Decode, Stage::Build, message).with_path(&path));
        };
        let is_special = flag(entry, "special").unwrap_or(false);
        let token = AddedToken::from(content, is_special)
            .single_word(flag(entry, "single_word").unwrap_or(false))
            .lstrip(flag(entry, "lstrip").unwrap_or(false))
            .rstrip(flag(entry, "rstrip").unwrap_or(false))
            .normalized(flag(entry, "normalized").unwrap_or(!is_special));
        numbered.insert(number, token);
    }
    let mut added: Vec<AddedToken> = numbered.into_values().collect();
    added.retain(|token| !known.iter().any(|known| is_same(known, token)));
    let more = MORE.into_iter().filter_map(|name| config.get(name));
    let named = named.into_iter().map(|(_, content)| content);
    for content in named.chain(more.flat_map(contents)) {
        match added.iter_mut().find(|token| token.content == content) {
            Some(token) => token.special = true,
            None if known.iter().any(|known| known.content == content) => {}
            None => added.push(AddedToken::from(content, true)),
        }
    }
    Ok(added)
}

/// The texts of tokens in a list, or in an object by their names.
fn contents(tokens: &Value) -> Vec<String> {
    let tokens: Vec<&Value> = match tokens {
        Value::Array(tokens) => tokens.iter().collect(),
        Value::Object(tokens) => tokens.values().collect(),
        _ => Vec::new(),
    };
    let contents = tokens.into_iter().filter_map(|token| {
        let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
        Some(text.to_string())
    });
    contents.collect()
}

fn flag(entry: &Value, name: &str) -> Option<bool> {
    entry.get(name)?.as_bool()
}

/// Whether both have the same text and the same flags.
fn is_same(a: &AddedToken, b: &AddedToken) -> bool {
    a.content == b.content && flags(a) == flags(b)
}

/// The flags of a token.
pub fn flags(token: &AddedToken) -> [bool; 5] {
    let AddedToken {
        single_word,
        lstrip,
        rstrip,
        normalized,
        special,
        ..
    } = *token;
    [single_word, lstrip, rstrip, normalized, special]
}

/// Templates in files of their own.
fn files(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut templates = BTreeMap::new();
    if let Some(source) = text(&folder.join("chat_template.jinja"))? {
        templates.insert("default".to_string(), source);
    }
    let more = folder.join("additional_chat_templates/");
    if !look(&more).is_ok_and(|meta| meta.kind == FileKind::Folder) {
        return Ok(templates);
    }
    for (file, _) in names_in(&more)? {
        let name = file.to_str().and_then(|name| name.strip_suffix(".jinja"));
        if let Some(name) = name
            && let Some(source) = text(&more.join(&file))?
        {
            templates.insert(name.to_string(), source);
        }
    }
    Ok(templates)
}

/// Templates of the configuration.
fn configured(config: &Map<String, Value>) -> BTreeMap<String, String> {
    match config.get("chat_template") {
        Some(Value::String(source)) => BTreeMap::from([("default".to_string(), source.clone())]),
        Some(Value::Array(named)) => {
            let named = named.iter().filter_map(|entry| {
                let name = entry.get("name")?.as_str()?;
                let source = entry.get("template")?.as_str()?;
                Some((name.to_string(), source.to_string()))
            });
            named.collect()
        }
        Some(Value::Object(named)) => {
            let named = named.iter();
            let named =
                named.filter_map(|(name, source)| Some((name.clone(), source.as_str()?.into())));
            named.collect()
        }
        _ => BTreeMap::new(),
    }
}

/// A text file, if it exists.
fn text(path: &Path) -> Result<Option<String>> {
    let bytes = match read(path, FILE_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    String::from_utf8(bytes).map(Some).map_err(|error| {
        let message = format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to());
        Error::new(ErrorKind::Decode, Stage::Build, message).with_path(path)
    })
}

fn json(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text).map(Some).map_err(|error| {
        let error =
            Error::new(ErrorKind::Decode, Stage::Build, "not a JSON object").with_source(error);
        error.with_path(path)
    })
}
