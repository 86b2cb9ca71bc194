//! Conversations to tokens: chat templates in Jinja, as `transformers` renders them.
//!
//! ```text
//! {"messages": […], "tools": […]} ──JSON──► values ──template──► text + ranges of {% generation %}
//!     ──tokenizer──► ids ──► `input_ids`;   their characters inside the ranges ──► `loss`
//! ```
//!
//! Only the parser of `minijinja` is used. Its engine prints, compares and looks up values in other
//! ways than Python, without an error, so the tokens would silently be others than in training.
//! Values of an own evaluator do these as Python does; what is missing is refused by name.
//!
//! Each file imports only those before it: `value` (data), `python` (text and JSON), `operators`,
//! `slices`, `strings`, `day`, `methods`, `syntax` (the tree), `eval`, `decode`.
//!
//! Limits: JSON of 128 levels; a text of 64 MiB; 60 macros inside each other; integers of 64 bits.
//! Invariants: the text depends on the conversation and the settings alone, so `strftime_now` needs
//! a day.

mod data;
mod day;
mod decode;
mod eval;
mod methods;
mod operators;
mod python;
mod slices;
mod strings;
mod syntax;
mod value;

#[cfg(test)]
mod tests;

pub use self::decode::Chat;

use self::day::Day;
use self::eval::{Rendered, render};
use self::syntax::Program;
use self::value::{Dict, Fail, Key, Value};
use crate::tokens::folder;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::Digest;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// A chat template, and the special tokens that it may name. A clone costs nothing.
///
/// ```
/// # use feedline_text::ChatTemplate;
/// let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}";
/// let template = ChatTemplate::new(source, [("eos_token", "</s>")])?;
/// assert!(!template.marks_generation());
/// # Ok::<(), feedline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ChatTemplate(Arc<Opened>);

struct Opened {
    program: Program,
    /// Special tokens: `bos_token` and the like.
    special: Vec<(String, Arc<str>)>,
    /// Whether conversations with tools have another template.
    is_without_tools: bool,
    /// A hash of the template and its special tokens.
    digest: Digest,
}

/// What a template gets beside the conversation.
#[derive(Clone, Default)]
struct Settings {
    generation_prompt: bool,
    day: Option<Day>,
    /// JSON of an object: further variables.
    variables: Option<Arc<[u8]>>,
}

impl ChatTemplate {
    /// Reads a template.
    ///
    /// Errors: [`ErrorKind::Config`] for what Jinja2 would refuse, and for what is not rendered
    /// here, by name and line.
    pub fn new<'a>(
        source: &str,
        special: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self> {
        Self::compile(source, special, false)
    }

    fn compile<'a>(
        source: &str,
        special: impl IntoIterator<Item = (&'a str, &'a str)>,
        is_without_tools: bool,
    ) -> Result<Self> {
        let program = syntax::compile(source).map_err(|what| {
            let message = format!("a chat template that is not rendered as Jinja2 does: {what}");
            Error::new(ErrorKind::Config, Stage::Build, message)
        })?;
        let mut digest = Digest::new("chat template").bytes(source.as_bytes());
        let special = special.into_iter().map(|(name, token)| {
            digest = digest.bytes(name.as_bytes()).bytes(token.as_bytes());
            (name.into(), token.into())
        });
        let special = special.collect();
        Ok(Self(Arc::new(Opened {
            program,
            special,
            is_without_tools,
            digest,
        })))
    }

    /// Reads the template of a model's folder as `transformers` does: `chat_template.jinja`,
    /// `additional_chat_templates` or `tokenizer_config.json`. `name` is one of several templates;
    /// `None` is the only one or `default`.
    ///
    /// Errors: no template, or none of that name; those of [`new`](Self::new).
    pub fn open(folder: impl AsRef<Path>, name: Option<&str>) -> Result<Self> {
        let folder = folder.as_ref();
        let found = folder::template(folder, name)?;
        let special = found.special.iter();
        let special = special.map(|(name, token)| (name.as_str(), token.as_str()));
        Self::compile(&found.source, special, found.is_without_tools)
            .map_err(|error| error.with_path(folder))
    }

    /// Reads a template in a file, with the special tokens of a model's folder.
    ///
    /// Errors: no such file; those of [`new`](Self::new).
    pub fn open_file(file: impl AsRef<Path>, folder: impl AsRef<Path>) -> Result<Self> {
        let file = file.as_ref();
        let (source, special) = folder::template_file(file, folder.as_ref())?;
        let special = special.iter();
        let special = special.map(|(name, token)| (name.as_str(), token.as_str()));
        Self::new(&source, special).map_err(|error| error.with_path(file))
    }

    /// Whether it marks what the assistant says by `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.0.program.generates
    }

    fn rendered(&self, conversation: &[u8], settings: &Settings) -> Result<Rendered> {
        let chat = Conversation::parse(conversation)?;
        if self.0.is_without_tools && !matches!(chat.tools, Value::None) {
            let message = "the conversation has tools, and the folder has the templates `default` \
                           and `tool_use`: name the one to use";
            return Err(Error::decode(message));
        }
        let given = match &settings.variables {
            Some(json) => data::parse(json)?,
            None => Value::None,
        };
        only_variables(&chat.variables)?;
        let special = self.0.special.iter();
        let special = special.map(|(name, token)| (name.as_str(), Value::Str(token.clone())));
        // The later of equal names counts.
        let variables = special
            .chain(members(&given))
            .chain(members(&chat.variables))
            .chain([
                ("messages", chat.messages),
                ("tools", chat.tools),
                ("documents", chat.documents),
                (
                    "add_generation_prompt",
                    Value::Bool(settings.generation_prompt),
                ),
            ]);
        let rendered = render(&self.0.program, variables, settings.day);
        rendered.map_err(|fail| match fail {
            Fail::Raised(what) => Error::decode(format!("the chat template raised: {what}")),
            Fail::Unsupported(what) => {
                let message =
                    format!("the chat template needs what is not rendered as Jinja2 does: {what}");
                Error::new(ErrorKind::Config, Stage::Decode, message)
            }
        })
    }
}

/// Refuses the names that are arguments of `apply_chat_template`, not variables of the template.
fn only_variables(variables: &Value) -> Result<()> {
    let is_object = matches!(variables, Value::None | Value::Dict(_));
    if !is_object {
        return Err(Error::decode("`chat_template_kwargs` is not an object"));
    }
    match members(variables).find(|(name, _)| ARGUMENTS.contains(name)) {
        None => Ok(()),
        Some((name, _)) => Err(Error::decode(format!(
            "`{name}` is no variable of a template: set it for all conversations"
        ))),
    }
}

fn members(value: &Value) -> impl Iterator<Item = (&str, Value)> {
    let dict = match value {
        Value::Dict(dict) => Some(&**dict),
        _ => None,
    };
    let members = dict.into_iter().flatten();
    members.filter_map(|(key, value)| match key {
        Key::Str(name) => Some((&**name, value.clone())),
        Key::Int(_) => None,
    })
}

/// The arguments of `transformers.apply_chat_template`.
const ARGUMENTS: [&str; 15] = [
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// The names under which a message has its reasoning.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A conversation as `transformers` hands it to a template.
struct Conversation {
    messages: Value,
    tools: Value,
    documents: Value,
    variables: Value,
}

impl Conversation {
    fn parse(json: &[u8]) -> Result<Self> {
        let mut conversation = Self {
            messages: Value::None,
            tools: Value::None,
            documents: Value::None,
            variables: Value::None,
        };
        let messages = match data::parse(json)? {
            Value::Dict(line) => {
                let member = |name| line.get(name).cloned().unwrap_or(Value::None);
                conversation.tools = match member("tools") {
                    // A table cannot hold objects of several kinds, so people store their JSON.
                    Value::Str(text) => data::parse(text.as_bytes())?,
                    tools => tools,
                };
                conversation.documents = member("documents");
                conversation.variables = member("chat_template_kwargs");
                member("messages")
            }
            other => other,
        };
        for (name, items) in [
            ("tools", &conversation.tools),
            ("documents", &conversation.documents),
        ] {
            let is_legal = match items {
                Value::List(items) => items.iter().all(|item| matches!(item, Value::Dict(_))),
                other => matches!(other, Value::None),
            };
            if !is_legal {
                return Err(Error::decode(format!("`{name}` is not a list of objects")));
            }
        }
        let Value::List(messages) = messages else {
            return Err(Error::decode("the conversation has no list of messages"));
        };
        if messages.is_empty() {
            return Err(Error::decode("the conversation is empty"));
        }
        let messages = messages.iter().map(message);
        conversation.messages = Value::list(messages.collect::<Result<_>>()?);
        Ok(conversation)
    }
}

/// A message without its members that are null, and with its reasoning under the usual names.
fn message(message: &Value) -> Result<Value> {
    let Value::Dict(given) = message else {
        return Err(Error::decode(format!(
            "a message is no object but of type {}",
            message.kind()
        )));
    };
    let given = given
        .iter()
        .filter(|(_, value)| !matches!(value, Value::None));
    let given = given.map(|(name, value)| (name.clone(), value.clone()));
    let mut dict: Dict = given.collect();
    let reasoning = REASONING.iter().find_map(|name| dict.get(*name));
    if let Some(reasoning) = reasoning.cloned() {
        let mut aliased = Dict::new();
        aliased.insert("thinking".into(), reasoning.clone());
        aliased.extend(dict);
        aliased.insert(REASONING[0].into(), reasoning);
        dict = aliased;
    }
    Ok(Value::Dict(Rc::new(dict)))
}

/// For fuzz targets: whether a template renders a conversation.
#[cfg(feature = "unstable")]
pub fn fuzz(source: &str, conversation: &[u8]) -> bool {
    let template = ChatTemplate::new(source, [("bos_token", "<s>")]);
    template.is_ok_and(|template| {
        let rendered = template.rendered(conversation, &Settings::default());
        rendered.is_ok()
    })
}
