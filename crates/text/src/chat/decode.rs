//! The decoder of a conversation.
//!
//! ```text
//! tokens:  │ <user> │ Hi │ </s> │ <assistant> │ Good │ day │ </s> │ zeros
//! loss:    │   0    │ 0  │  0   │      0      │  1   │  1  │  1   │ zeros    1: inside a {% generation %}
//! ```

use super::{ChatTemplate, Rendered, Settings, data, day, only_variables};
use crate::jsonl::json;
use crate::tokens::{
    MEMORY, TEXT_MAX, Tokenizer, check_dtype, check_len, check_text, cut_words, put_ids, refused,
};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::decode::{Ctx, Decoder, ToIds};
use feedline_core::memory::Row;
use feedline_core::tensor::{DType, EncodedField, Encoding, Field};
use tokenizers::TruncationDirection;

/// Renders a conversation by a chat template and tokenizes it: the fields `input_ids` of up to
/// `max` tokens and, if the template marks what the assistant says by `{% generation %}`, `loss`
/// (`u8`): 1 for its tokens.
///
/// The field holds the JSON of the messages, or of an object with `messages`, and perhaps `tools`,
/// `documents` and `chat_template_kwargs`: a line of a file, or a value of it.
///
/// ```no_run
/// # use feedline_text::{Chat, ChatTemplate, Tokenizer};
/// let folder = "models/qwen";
/// let chat = Chat::new(Tokenizer::open(folder)?, ChatTemplate::open(folder, None)?, 4096).cut();
/// # Ok::<(), feedline_core::Error>(())
/// ```
///
/// Ids and mask are those of `transformers.apply_chat_template(…, return_assistant_tokens_mask=True)`.
/// Errors of a sample: [`ErrorKind::Decode`] for what is no conversation, an empty one, and what
/// the template itself refuses; [`ErrorKind::Config`] for what is not rendered as Jinja2 does;
/// [`ErrorKind::Shape`] for more tokens than the maximum, unless they are cut.
#[derive(Clone)]
pub struct Chat {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    names: [String; 2],
    max: usize,
    dtype: DType,
    cut: Option<TruncationDirection>,
    text_max: usize,
    settings: Settings,
}

impl Chat {
    /// Rows of up to `max` tokens.
    pub fn new(tokenizer: Tokenizer, template: ChatTemplate, max: usize) -> Self {
        Self {
            tokenizer,
            template,
            names: ["input_ids".into(), "loss".into()],
            max,
            dtype: DType::I32,
            cut: None,
            text_max: TEXT_MAX,
            settings: Settings::default(),
        }
    }

    /// The dtype of the ids: `U16`, `I32` (default), `U32` or `I64`.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Keeps the first tokens of a longer conversation.
    #[must_use]
    pub fn cut(mut self) -> Self {
        self.cut = Some(TruncationDirection::Right);
        self
    }

    /// Keeps the last tokens of a longer conversation.
    #[must_use]
    pub fn cut_left(mut self) -> Self {
        self.cut = Some(TruncationDirection::Left);
        self
    }

    /// The names of the output fields instead of `input_ids` and `loss`.
    #[must_use]
    pub fn named(mut self, ids: impl Into<String>, loss: impl Into<String>) -> Self {
        self.names = [ids.into(), loss.into()];
        self
    }

    /// Maximum bytes of a conversation's text; see [`Tokenize::text_max`](crate::Tokenize::text_max).
    #[must_use]
    pub fn text_max(mut self, bytes: usize) -> Self {
        self.text_max = bytes;
        self
    }

    /// `true` asks the template for the beginning of an answer at the end: `add_generation_prompt`.
    #[must_use]
    pub fn generation_prompt(mut self, prompt: bool) -> Self {
        self.settings.generation_prompt = prompt;
        self
    }

    /// The day `YYYY-MM-DD` that templates with `strftime_now` print.
    ///
    /// Errors: [`ErrorKind::Config`] for another text.
    pub fn today(mut self, day: &str) -> Result<Self> {
        self.settings.day = Some(day::parse(day).ok_or_else(|| {
            let message = format!("today is {day:?}, but it must be as in \"2026-11-30\"");
            Error::new(ErrorKind::Config, Stage::Build, message)
        })?);
        Ok(self)
    }

    /// The text of a conversation, which the decoder tokenizes. Errors: those of decoding.
    pub fn text(&self, conversation: &[u8]) -> Result<String> {
        let rendered = self.template.rendered(conversation, &self.settings)?;
        Ok(rendered.text)
    }

    /// Further variables of the template: JSON of an object, as in `{"enable_thinking": false}`.
    /// Those of a line's `chat_template_kwargs` replace them.
    ///
    /// Errors: not the JSON of an object.
    pub fn variables(mut self, object: impl AsRef<[u8]>) -> Result<Self> {
        json::check(object.as_ref())
            .and_then(|()| only_variables(&data::parse(object.as_ref())?))
            .map_err(|error| error.within("the template's variables"))?;
        self.settings.variables = Some(object.as_ref().into());
        Ok(self)
    }
}

impl Decoder for Chat {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        if input.encoding != Encoding::Bytes {
            let name = &input.name;
            return refused(format!(
                "field `{name}` is {}, not a conversation",
                input.encoding
            ));
        }
        if self.max == 0 {
            return refused("at most 0 tokens: allow more".into());
        }
        check_dtype(&self.tokenizer, self.dtype)?;
        let [ids, loss] = &self.names;
        let mut fields = vec![Field::up_to(ids, self.dtype, self.max)];
        if self.template.marks_generation() {
            fields.push(Field::up_to(loss, DType::U8, self.max));
        }
        Ok(fields)
    }

    fn scratch_bytes(&self) -> usize {
        self.text_max.saturating_mul(MEMORY)
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let (rendered, encoding) =
            self.encoding(input, self.scratch_bytes().min(ctx.scratch_limit()))?;
        let field = ctx.fields().start;
        put_ids(encoding.get_ids(), field, out)?;
        if !self.template.marks_generation() {
            return Ok(());
        }
        let offsets = encoding.get_offsets();
        let places = out.slice_mut::<u8>(field + 1)?;
        for (place, own) in places.iter_mut().zip(mask(&rendered, offsets)) {
            *place = own;
        }
        out.set_len(field + 1, offsets.len())
    }
}

impl Chat {
    /// Renders and tokenizes a conversation, in at most `limit` bytes of memory.
    fn encoding(
        &self,
        conversation: &[u8],
        limit: usize,
    ) -> Result<(Rendered, tokenizers::Encoding)> {
        let rendered = self.template.rendered(conversation, &self.settings)?;
        check_text(&rendered.text, limit)?;
        let marks = self.template.marks_generation();
        let mut encoding = self.tokenizer.spans(&rendered.text, marks)?;
        if let Some(side) = self.cut {
            encoding.truncate(self.max, 0, side);
        }
        Ok((rendered, encoding))
    }
}

/// 1 for each token that the assistant says. Spans and offsets ascend, so one pass is enough; it is
/// that of `transformers`.
fn mask(rendered: &Rendered, offsets: &[(usize, usize)]) -> impl Iterator<Item = u8> {
    let mut spans = rendered.spans.iter().peekable();
    offsets.iter().map(move |(start, end)| {
        while spans.next_if(|span| *start >= span.1).is_some() {}
        u8::from(spans.peek().is_some_and(|span| *end > span.0))
    })
}

/// The rows of the decoder.
impl ToIds for Chat {
    fn ids(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        self.ids_and_loss(text, out, &mut Vec::new())
    }

    fn has_loss(&self) -> bool {
        self.template.marks_generation()
    }

    fn ids_and_loss(&self, text: &str, ids: &mut Vec<u32>, loss: &mut Vec<u8>) -> Result<()> {
        let (rendered, encoding) = self.encoding(text.as_bytes(), self.scratch_bytes())?;
        check_len(encoding.len(), self.max)?;
        ids.extend_from_slice(encoding.get_ids());
        if self.has_loss() {
            loss.extend(mask(&rendered, encoding.get_offsets()));
        }
        Ok(())
    }

    fn vocabulary(&self) -> u64 {
        self.tokenizer.vocabulary()
    }

    fn most(&self) -> usize {
        self.max
    }

    fn identity(&self) -> u64 {
        let Settings {
            generation_prompt,
            day,
            variables,
        } = &self.settings;
        self.template
            .0
            .digest
            .word(self.tokenizer.digest())
            .words(&cut_words(self.max, self.cut))
            .word((*generation_prompt).into())
            .bytes(format!("{day:?}").as_bytes())
            .bytes(variables.as_deref().unwrap_or_default())
            .end()
    }
}
