//! Text to tokens, with a `tokenizer.json` of Hugging Face.
//!
//! ```text
//! tokenizer.json ──open──► Tokenizer (shared, never changes)
//! text ──normalise, split, model──► ids ──cut──► special tokens around them ──► `input_ids`
//! └────────────── crate tokenizers ──────────────────────────────────────┘
//! ```
//!
//! The crate `tokenizers` is the one that Python's `tokenizers` and `transformers` call, with the
//! same regular expressions (Oniguruma), so the ids are theirs. Truncation and padding that the file
//! asks for are left out, as `transformers` does: the caller says the length.
//!
//! Limits: a file of 512 MiB; a model with dropout is refused, because its ids are random.
//! Invariants: equal texts have equal ids on every thread; an id is below
//! [`Tokenizer::vocabulary`].

pub(crate) mod folder;
mod tokenize;

#[cfg(test)]
mod tests;

pub use self::tokenize::Tokenize;
pub(crate) use self::tokenize::{
    MEMORY, TEXT_MAX, check_dtype, check_len, check_text, cut_words, put_ids, refused,
};

use feedline_base::error::{Error, ErrorKind, Result, Stage, guarded};
use feedline_base::metadata::FileKind;
use feedline_core::dataset::Digest;
use feedline_core::storage::Blob;
use feedline_core::storage::listing::look;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::{AddedToken, Encoding, ModelWrapper, PostProcessor, TruncationDirection};

/// Maximum bytes of a `tokenizer.json`.
const FILE_MAX: u64 = 512 << 20;

/// A tokenizer of Hugging Face, shared by all threads. A clone costs nothing.
///
/// ```no_run
/// # use feedline_text::Tokenizer;
/// let tokenizer = Tokenizer::open("models/llama")?;
/// let mut ids = Vec::new();
/// tokenizer.encode("Hello", true, &mut ids)?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer(Arc<Opened>);

struct Opened {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    vocabulary: u64,
    special: Vec<u32>,
    /// Special tokens around each text.
    around: usize,
    digest: u64,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Opened { path, digest, .. } = &*self.0;
        write!(f, "Tokenizer({}, {digest:016x})", path.display())
    }
}

impl Tokenizer {
    /// Opens a `tokenizer.json`, or the one in a model's folder with the tokens that its
    /// `tokenizer_config.json` adds.
    ///
    /// Errors: no such file; [`ErrorKind::Decode`] for a file that is no tokenizer;
    /// [`ErrorKind::Config`] for one with dropout.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let is_folder = look(path).is_ok_and(|meta| meta.kind == FileKind::Folder);
        let folder = is_folder.then_some(path);
        let file = match folder {
            Some(folder) => folder.join("tokenizer.json"),
            None => path.to_path_buf(),
        };
        let json = read(&file, FILE_MAX)?;
        Self::parse(&json, &file, folder).map_err(|error| error.with_path(&file))
    }

    /// Opens the bytes of a `tokenizer.json`. Errors: as [`open`](Self::open).
    pub fn from_bytes(json: impl AsRef<[u8]>) -> Result<Self> {
        Self::parse(json.as_ref(), Path::new("<memory>"), None)
    }

    fn parse(json: &[u8], path: &Path, folder: Option<&Path>) -> Result<Self> {
        let mut inner = guarded("a tokenizer", Stage::Build, || {
            tokenizers::Tokenizer::from_bytes(json).map_err(|error| {
                let message = format!("not a tokenizer.json: {error}");
                Error::new(ErrorKind::Decode, Stage::Build, message)
            })
        })?;
        if let ModelWrapper::BPE(model) = inner.get_model()
            && let Some(dropout) = model.dropout.filter(|dropout| *dropout > 0.0)
        {
            let message = format!("the model has dropout {dropout}, so its ids are random");
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        let mut digest = Digest::new("tokenizer").bytes(json);
        if let Some(folder) = folder {
            let known: Vec<AddedToken> = inner.get_added_tokens_decoder().into_values().collect();
            let added = folder::added_tokens(folder, &known)?;
            for token in &added {
                digest = digest.bytes(token.content.as_bytes());
                digest = digest.words(&folder::flags(token).map(u64::from));
            }
            inner.add_tokens(added).map_err(no_ids)?;
        }
        inner.with_padding(None);
        inner.with_truncation(None).expect("none is always legal");
        let ids = inner.get_vocab(true);
        let vocabulary = ids.values().map(|id| u64::from(*id) + 1).max().unwrap_or(0);
        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special);
        let mut special: Vec<u32> = special.map(|(id, _)| *id).collect();
        special.sort_unstable();
        let around = inner.get_post_processor();
        Ok(Self(Arc::new(Opened {
            around: around.map_or(0, |processor| processor.added_tokens(false)),
            digest: digest.end(),
            inner,
            path: path.to_path_buf(),
            vocabulary,
            special,
        })))
    }

    /// Appends the ids of `text`, with the special tokens around it if `special` is `true`.
    ///
    /// Errors: [`ErrorKind::Decode`] for a text that the model has no token for.
    pub fn encode(&self, text: &str, special: bool, ids: &mut Vec<u32>) -> Result<()> {
        let encoding = self.encoding(text, special)?;
        ids.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    /// Smallest number above all ids.
    pub fn vocabulary(&self) -> u64 {
        self.0.vocabulary
    }

    /// The ids of special tokens, in ascending order.
    pub fn special_ids(&self) -> &[u32] {
        &self.0.special
    }

    /// The id of a token, such as `</s>`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.0.inner.token_to_id(token)
    }

    /// A number for the file and the tokens added to it, the same on all machines: equal numbers
    /// mean equal ids.
    pub fn digest(&self) -> u64 {
        self.0.digest
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    fn encoding(&self, text: &str, special: bool) -> Result<Encoding> {
        let encoding = self.0.inner.encode_fast(text, special);
        encoding.map_err(no_ids)
    }

    /// The ids of a text, with the characters of each if `spans` is `true`.
    pub(crate) fn spans(&self, text: &str, spans: bool) -> Result<Encoding> {
        if !spans {
            return self.encoding(text, false);
        }
        let encoding = self.0.inner.encode_char_offsets(text, false);
        encoding.map_err(no_ids)
    }

    /// The ids of a text cut to `max` tokens, its special tokens among them.
    fn cut(
        &self,
        text: &str,
        special: bool,
        max: usize,
        side: TruncationDirection,
    ) -> Result<Encoding> {
        let mut encoding = self.encoding(text, false)?;
        let around = if special { self.0.around } else { 0 };
        encoding.truncate(max - around, 0, side);
        if !special {
            return Ok(encoding);
        }
        let encoding = self.0.inner.post_process(encoding, None, true);
        encoding.map_err(no_ids)
    }
}

fn no_ids(error: tokenizers::Error) -> Error {
    Error::decode(format!("the tokenizer refused the text: {error}"))
}

/// Reads a small file whole.
pub(crate) fn read(path: &Path, max: u64) -> Result<Vec<u8>> {
    let file = Blob::open(path)?;
    let len = file.len();
    if len > max {
        let message = format!("{len} bytes, the limit is {max}");
        return Err(Error::new(ErrorKind::Limit, Stage::Build, message).with_path(path));
    }
    file.read(0, len, "it")
}
