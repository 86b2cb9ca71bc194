//! Text columns as tokens: the settings `tokenizer`, `chat` and their companions.

use crate::error::config;
use crate::given::Given;
use feedline::dataset::{Dataset, DatasetExt};
use feedline::decode::{Chat, ChatTemplate, Tokenize, Tokenizer};
use feedline::tensor::{EncodedField, Encoding};
use feedline::{LoaderBuilder, Result};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How texts become tokens.
pub struct Texts {
    tokenizer: PathBuf,
    max_length: usize,
    truncation: Option<String>,
    special: Option<bool>,
    texts: Option<Vec<String>>,
    text_max: Option<usize>,
    chat: Option<Conversations>,
}

/// How conversations become texts.
#[derive(Default)]
struct Conversations {
    /// A name of the folder's templates, or a file; by default the folder's own.
    template: Option<String>,
    /// JSON of an object.
    variables: Option<String>,
    today: Option<String>,
    generation_prompt: bool,
}

impl Conversations {
    fn of(chat: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if let Ok(on) = chat.extract::<bool>() {
            return Ok(on.then(Self::default));
        }
        if let Ok(template) = chat.extract::<PathBuf>() {
            let template = Some(template.to_string_lossy().into_owned());
            return Ok(Some(Self {
                template,
                ..Self::default()
            }));
        }
        let Ok(options) = chat.cast::<PyDict>() else {
            let message =
                format!("chat={chat}: give True, the name or file of a template, or a dict");
            return Err(PyTypeError::new_err(message));
        };
        let mut given = Given::new(chat.py(), Some(options))?;
        let variables = given.take::<Py<PyDict>>("variables")?;
        let variables = variables.map(|variables| {
            let json = chat.py().import("json")?;
            json.call_method1("dumps", (variables,))?.extract()
        });
        let conversations = Self {
            template: given.take("template")?,
            variables: variables.transpose()?,
            today: given.take("today")?,
            generation_prompt: given
                .take::<Py<PyAny>>("generation_prompt")?
                .map_or(Ok(false), |on| on.extract(chat.py()))?,
        };
        given.finish().map(|()| Some(conversations))
    }

    fn template(&self, folder: &Path) -> Result<ChatTemplate> {
        match self.template.as_deref() {
            Some(file) if file.ends_with(".jinja") => ChatTemplate::open_file(file, folder),
            name => ChatTemplate::open(folder, name),
        }
    }
}

impl Texts {
    /// The settings, if there is a tokenizer.
    pub fn of(given: &mut Given<'_>) -> PyResult<Option<Self>> {
        let tokenizer: Option<PathBuf> = given.take("tokenizer")?;
        let max_length: Option<usize> = given.take("max_length")?;
        let truncation: Option<String> = given.take("truncation")?;
        let special: Option<bool> = given.take("special_tokens")?;
        let texts: Option<Vec<String>> = given.take("texts")?;
        let text_max: Option<usize> = given.take("text_max")?;
        let chat: Option<Py<PyAny>> = given.take("chat")?;
        let Some(tokenizer) = tokenizer else {
            let alone = [
                ("max_length", max_length.is_some()),
                ("truncation", truncation.is_some()),
                ("special_tokens", special.is_some()),
                ("texts", texts.is_some()),
                ("text_max", text_max.is_some()),
                ("chat", chat.is_some()),
            ];
            return match alone.iter().find(|(_, given)| *given) {
                Some((name, _)) => Err(PyTypeError::new_err(format!(
                    "{name} is about tokens: give tokenizer, too"
                ))),
                None => Ok(None),
            };
        };
        let Some(max_length) = max_length else {
            return Err(PyTypeError::new_err(
                "max_length, the most tokens of a row, is missing",
            ));
        };
        let chat = chat.map(|chat| Conversations::of(chat.bind(given.py())));
        Ok(Some(Self {
            tokenizer,
            max_length,
            truncation,
            special,
            texts,
            text_max,
            chat: chat.transpose()?.flatten(),
        }))
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.tokenizer.display();
        match self.tokenizer.exists() {
            true => Tokenizer::open(&self.tokenizer),
            false => Err(config(format!(
                "tokenizer={path}: not found; a name of the Hub is no path: download the model's folder first"
            ))),
        }
    }

    /// Whether rows are conversations.
    pub fn is_chat(&self) -> bool {
        self.chat.is_some()
    }

    /// The columns that become tokens: those that are named, or the only one.
    pub fn columns<'a>(&'a self, schema: &'a [EncodedField]) -> Result<Vec<&'a str>> {
        let bytes = schema
            .iter()
            .filter(|field| field.encoding == Encoding::Bytes);
        let bytes: Vec<&str> = bytes.map(|field| field.name.as_str()).collect();
        let Some(texts) = &self.texts else {
            return match bytes.as_slice() {
                [only] => Ok(vec![only]),
                [] => Err(config("tokenizer: there is no column of texts")),
                several => Err(config(format!(
                    "tokenizer: name the columns of its texts by texts=[…]; there are {}",
                    several.join(", ")
                ))),
            };
        };
        if texts.is_empty() {
            return Err(config("texts is empty: name the columns of texts"));
        }
        match texts.iter().find(|text| !bytes.contains(&text.as_str())) {
            Some(other) => Err(config(format!(
                "texts: {other:?} is no column of texts; there are {}",
                bytes.join(", ")
            ))),
            None => Ok(texts.iter().map(String::as_str).collect()),
        }
    }

    /// Adds a decoder for each of the columns.
    pub fn decode(&self, texts: &[&str], builder: LoaderBuilder) -> Result<LoaderBuilder> {
        let tokenizer = self.tokenizer()?;
        let side = self.side()?;
        match &self.chat {
            Some(chat) => {
                let decoder = self.conversations(tokenizer, chat, side)?;
                Ok(texts.iter().fold(builder, |builder, text| {
                    let [ids, loss] = names(text, texts);
                    builder.decode_field(text, decoder.clone().named(ids, loss))
                }))
            }
            None => {
                let decoder = self.plain(tokenizer, side);
                Ok(texts.iter().fold(builder, |builder, text| {
                    let [ids, _] = names(text, texts);
                    builder.decode_field(text, decoder.clone().named(ids))
                }))
            }
        }
    }

    /// The dataset with tokens in place of its only column of texts.
    pub fn tokenized(&self, dataset: Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>> {
        let schema = dataset.schema().to_vec();
        let columns = self.columns(&schema)?;
        let [column] = columns.as_slice() else {
            return Err(config(
                "packed and lengths_file are of one column of texts: name it by texts=[…]",
            ));
        };
        let tokenizer = self.tokenizer()?;
        let side = self.side()?;
        Ok(match &self.chat {
            Some(chat) => {
                let chat = self.conversations(tokenizer, chat, side)?;
                Arc::new(dataset.tokenized(column, chat)?)
            }
            None => Arc::new(dataset.tokenized(column, self.plain(tokenizer, side))?),
        })
    }

    fn side(&self) -> Result<Option<Side>> {
        match self.truncation.as_deref() {
            None => Ok(None),
            Some("right") => Ok(Some(Side::Right)),
            Some("left") => Ok(Some(Side::Left)),
            Some(other) => Err(config(format!(
                "truncation {other:?}: there are \"right\" and \"left\""
            ))),
        }
    }

    fn plain(&self, tokenizer: Tokenizer, side: Option<Side>) -> Tokenize {
        let mut decoder =
            Tokenize::new(tokenizer, self.max_length).special_tokens(self.special.unwrap_or(true));
        if let Some(bytes) = self.text_max {
            decoder = decoder.text_max(bytes);
        }
        match side {
            None => decoder,
            Some(Side::Right) => decoder.cut(),
            Some(Side::Left) => decoder.cut_left(),
        }
    }

    fn conversations(
        &self,
        tokenizer: Tokenizer,
        chat: &Conversations,
        side: Option<Side>,
    ) -> Result<Chat> {
        if self.special.is_some() {
            let message = "special_tokens is for plain texts: a chat template writes its own";
            return Err(config(message));
        }
        let folder = match self.tokenizer.is_file() {
            true => self.tokenizer.parent().unwrap_or(&self.tokenizer),
            false => &self.tokenizer,
        };
        let mut decoder = Chat::new(tokenizer, chat.template(folder)?, self.max_length)
            .generation_prompt(chat.generation_prompt);
        if let Some(today) = &chat.today {
            decoder = decoder.today(today)?;
        }
        if let Some(variables) = &chat.variables {
            decoder = decoder.variables(variables)?;
        }
        if let Some(bytes) = self.text_max {
            decoder = decoder.text_max(bytes);
        }
        Ok(match side {
            None => decoder,
            Some(Side::Right) => decoder.cut(),
            Some(Side::Left) => decoder.cut_left(),
        })
    }
}

/// The side from which a longer text loses tokens.
#[derive(Clone, Copy)]
enum Side {
    Right,
    Left,
}

/// The names of the outputs for one of the columns.
fn names(text: &str, texts: &[&str]) -> [String; 2] {
    match texts {
        [_] => ["input_ids".into(), "loss".into()],
        _ => [format!("{text}_input_ids"), format!("{text}_loss")],
    }
}
