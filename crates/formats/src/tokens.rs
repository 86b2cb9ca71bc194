//! Tokens: flat files of numbers, cut into windows of one length (nanoGPT, llm.c), or into
//! documents, each ended by a separator token.
//!
//! ```text
//! file:       | header | t0 t1 t2 … |        window 3, next_token: t0 t1 t2 t3 | t3 t4 t5 t6 | t6 …
//! windows:    k ─► header + k × stride                             (inputs are [..3], targets [1..])
//! documents:  t0 t1 E | t2 E | t3 …          separator E ends a document; tokens after the last E are one, too
//! ```
//!
//! The ends of documents are found by one pass over all tokens, and take 8 bytes each in memory; a
//! side file can store them.
//!
//! Limits: a window or document is within one file; tokens at a file's end that do not fill a
//! window are left out and counted in [`Tokens::leftover_tokens`]. The user sets the width of a
//! token; with a vocabulary, the tokens of each row are checked against it. Invariants: a file is a
//! whole number of tokens; llm.c's header is never read as tokens, nor is a file that another
//! format's magic identifies; finding a window is arithmetic. Flat files have no checksum and,
//! except llm.c's, no count: a file cut after a whole token looks like a shorter file.

use crate::{foreign, little_endian, number};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::parallel::{parallel, parallel_paths};
use feedline_core::dataset::starts::Starts;
use feedline_core::dataset::{Dataset, Digest, Framed, Parts, Sizes, fingerprint, kept};
use feedline_core::storage::listing::expand;
use feedline_core::storage::sidefile::SideKind;
use feedline_core::storage::{Blob, Extent, Listed, SourceId, Sources};
use feedline_core::tensor::{DType, EncodedField, Field};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Number of bytes examined at the start of a file, or at the start of its tokens.
const HEAD: u64 = 512;
/// Headers of llm.c's files: 256 `i32`, the first three are magic, version and number of tokens.
const LLM_C_BYTES: u64 = 1024;
/// Magic, version and dtype of llm.c's files.
const LLM_C: [(u64, u64, DType); 2] = [(20_240_520, 1, DType::U16), (20_240_801, 7, DType::U32)];

/// The side file of document ends: one section, 8 bytes for each document.
const KIND: SideKind = SideKind {
    name: *b"ends",
    version: 1,
    older: b"",
};
/// Number of bytes searched for separators at a time.
const STEP: u64 = 4 << 20;

/// Dataset of windows over flat files of tokens, or of the documents in them. Field: `tokens`, of
/// the given dtype. A row is as long as the window, or for documents up to as long as the longest
/// document. Samples are in the order of files and offsets.
///
/// The header of llm.c and modded-nanogpt (1,024 bytes: magic, version, number of tokens) is
/// recognised: its count and its element type (`u16` for GPT-2's tokens, `u32` for Llama 3's) are
/// checked. Files of other formats (NumPy, zip, gzip, pickle, …) are refused by name.
///
/// ```no_run
/// # use feedline_core::tensor::DType; use feedline_formats::Tokens;
/// // Windows as in nanoGPT's get_batch, but without random overlaps: 1,025 tokens each, 1,024 apart.
/// let train = Tokens::builder(DType::U16).window(1024).next_token().open("openwebtext/train.bin")?;
/// println!("{} tokens left over", train.leftover_tokens());
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Tokens {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    starts: Starts,
    samples: WindowSamples,
    vocabulary: Option<Vocabulary>,
    header_bytes: u64,
    token_bytes: u64,
    tokens: u64,
    name: String,
}

enum WindowSamples {
    Windows { windows: Windows, leftover: u64 },
    Documents(Documents),
}

/// Documents in flat files.
pub struct Documents {
    separator: u64,
    /// The end of each document, in tokens from the start of its file.
    ends: Box<[u64]>,
    longest: u64,
}

/// Builder of [`Tokens`]: sets the windows, or the separator of documents. Made by
/// [`Tokens::builder`].
#[derive(Clone, Debug)]
pub struct TokensBuilder {
    dtype: DType,
    cut: Cut,
    /// `None`: detected from the files' first bytes.
    header_bytes: Option<u64>,
    llm_c: bool,
    separator: Option<u64>,
    index_file: Option<PathBuf>,
}

/// Setters for windows that both builders of tokens share.
macro_rules! cut_setters {
    () => {
        /// Sets the number of tokens of a window; each window is a sample.
        #[must_use]
        pub fn window(mut self, tokens: usize) -> Self {
            self.cut.window = tokens;
            self
        }

        /// Sets the number of tokens between the starts of two windows. Default: the window's
        /// length.
        #[must_use]
        pub fn stride(mut self, tokens: usize) -> Self {
            self.cut.step = Some(WindowStep::Stride(tokens));
            self
        }

        /// Sets the number of tokens that consecutive windows share. Replaces
        /// [`stride`](Self::stride).
        #[must_use]
        pub fn overlap(mut self, tokens: usize) -> Self {
            self.cut.step = Some(WindowStep::Overlap(tokens));
            self
        }

        /// Adds one token to each window; the distance between windows does not change. All tokens
        /// except the last are the inputs, all except the first are the targets. Every token except
        /// the first is a target once.
        #[must_use]
        pub fn next_token(mut self) -> Self {
            self.cut.next_token = true;
            self
        }

        /// Sets the number of token ids. A sample with an id that is negative, or not below `size`,
        /// is an error, for example if 32-bit tokens are read as 16-bit tokens. The first tokens of
        /// a flat file are examined when it is opened. Costs a pass over each row, which is then
        /// copied into the batch. Not for packed documents. Default: any id.
        #[must_use]
        pub fn vocabulary(mut self, size: u64) -> Self {
            self.cut.vocabulary = Some(size);
            self
        }
    };
}
pub(super) use cut_setters;

impl Tokens {
    /// Starts a builder for tokens of this integer dtype. It needs [`TokensBuilder::window`] or
    /// [`TokensBuilder::separator`].
    pub fn builder(dtype: DType) -> TokensBuilder {
        let cut = Cut::default();
        let header_bytes = None;
        let separator = None;
        let index_file = None;
        TokensBuilder {
            dtype,
            cut,
            header_bytes,
            llm_c: false,
            separator,
            index_file,
        }
    }

    /// Number of tokens in all files together.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of tokens in no window: at the ends of files and, with a stride above the window's
    /// length, between windows.
    pub fn leftover_tokens(&self) -> u64 {
        match self.samples {
            WindowSamples::Windows { leftover, .. } => leftover,
            WindowSamples::Documents(_) => 0,
        }
    }
}

impl TokensBuilder {
    cut_setters!();

    /// Makes each document a sample, instead of windows. A document is the tokens up to and
    /// including the next `token` (GPT-2's end of text: 50256). The tokens after the last `token`
    /// of a file are also a document. Use them for `packed` rows or ragged batches.
    ///
    /// Opening reads all tokens once, on all cores; [`index_file`](Self::index_file) stores the
    /// result.
    ///
    /// ```no_run
    /// # use feedline_core::tensor::DType; use feedline_formats::Tokens;
    /// let documents = Tokens::builder(DType::U16).separator(50256).index_file("train.ends").open("train.bin")?;
    /// # Ok::<(), feedline_core::Error>(())
    /// ```
    #[must_use]
    pub fn separator(mut self, token: u64) -> Self {
        self.separator = Some(token);
        self
    }

    /// Stores the ends of documents in this file, which is created if it is missing. A file made
    /// for other token files or settings is an error ([`ErrorKind::Changed`]). Create it before
    /// many processes open it.
    #[must_use]
    pub fn index_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.index_file = Some(file.into());
        self
    }

    /// Skips a header of `bytes` bytes at the start of every file, whatever the bytes are:
    /// `header(0)` takes whole files as tokens. Default: llm.c's header is recognised, and files of
    /// other formats are refused.
    #[must_use]
    pub fn header(mut self, bytes: u64) -> Self {
        self.header_bytes = Some(bytes);
        self
    }

    /// Requires llm.c's header in every file.
    #[must_use]
    pub fn llm_c(mut self) -> Self {
        self.llm_c = true;
        self.header_bytes = None;
        self
    }

    /// Opens the files of `pattern`: a file, a folder (its `.bin` files), `{000..127}`, `*`.
    ///
    /// Errors: [`ErrorKind::Config`] for an impossible window, not found, nothing found, a file
    /// that is not a whole number of tokens ([`ErrorKind::Truncated`], with the extra bytes), a
    /// header of llm.c that does not fit, a file of another format ([`ErrorKind::Decode`]), no
    /// window at all ([`ErrorKind::Empty`]).
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<Tokens> {
        let Listed { files, name, .. } = expand(pattern, &[".bin"])?;
        let mut tokens = self.open_files(&files)?;
        tokens.name = name;
        Ok(tokens)
    }

    /// Opens these files, in this order.
    ///
    /// Errors: as [`open`](Self::open).
    pub fn open_files(self, paths: &[impl AsRef<Path>]) -> Result<Tokens> {
        let paths: Vec<_> = paths
            .iter()
            .map(|path| path.as_ref().to_path_buf())
            .collect();
        let looked = parallel_paths(&paths, |_, path| {
            let input = Blob::open(path)?;
            Ok((input.look()?, self.tokens_of(&input)?))
        })?;
        let mut sources = Sources::new();
        let mut counts = Vec::with_capacity(paths.len());
        let mut header = None::<u64>;
        for (path, (meta, (bytes, count))) in paths.iter().zip(looked) {
            match (header, bytes) {
                (Some(others), Some(bytes)) if others != bytes => {
                    let message = format!(
                        "a header of {bytes} bytes here, but {others} in the files before: open \
                         them as separate datasets"
                    );
                    return Err(
                        Error::new(ErrorKind::Decode, Stage::Index, message).with_path(path)
                    );
                }
                _ => header = header.or(bytes),
            }
            counts.push(count);
            sources.add(path, &meta)?;
        }
        let name = paths
            .first()
            .map_or(String::new(), |path| path.display().to_string());
        self.finish(sources, &counts, header, name)
    }

    /// Opens tokens in memory, without I/O.
    ///
    /// Errors: as [`open`](Self::open).
    pub fn open_bytes(self, bytes: impl Into<Arc<[u8]>>) -> Result<Tokens> {
        let bytes = bytes.into();
        let (header, count) =
            self.tokens_of(&Blob::memory(bytes::Bytes::from_owner(bytes.clone())))?;
        let mut sources = Sources::new();
        sources.memory(bytes);
        self.finish(sources, &[count], header, "<memory>".into())
    }

    /// Bytes of a file's header, and its number of tokens. An empty file has no tokens, and matches
    /// any header.
    fn tokens_of(&self, input: &Blob) -> Result<(Option<u64>, u64)> {
        if input.len() == 0 && self.header_bytes.is_none() {
            return Ok((None, 0));
        }
        let bytes = self.header_of(input)?;
        let Some(body) = input.len().checked_sub(bytes) else {
            let message = format!("{} bytes are less than the header of {bytes}", input.len());
            return Err(input.error(ErrorKind::Truncated, message, 0, input.len()));
        };
        let size = self.dtype.size() as u64;
        let over = body % self.dtype.size() as u64;
        if over != 0 {
            let message = format!(
                "{body} bytes are not a whole number of {}-byte tokens: {over} left over",
                size
            );
            return Err(input.error(ErrorKind::Truncated, message, input.len() - over, over));
        }
        self.has_width(input, bytes, body)?;
        Ok((Some(bytes), body / size))
    }

    /// With a vocabulary, refuses files in which every second token is 0: 32-bit ids read as 16-bit
    /// tokens may all be in the vocabulary.
    fn has_width(&self, input: &Blob, start: u64, body: u64) -> Result<()> {
        let size = self.dtype.size();
        let bytes = if self.cut.vocabulary(self.dtype)?.is_some() {
            body.min(HEAD)
        } else {
            0
        };
        if size == 1 || bytes < 64 * size as u64 {
            return Ok(());
        }
        let head = input.read(start, bytes, "the first tokens")?;
        let tokens = head
            .chunks_exact(size)
            .map(|token| token.iter().any(|byte| *byte > 0));
        let (even, odd): (Vec<_>, Vec<_>) =
            tokens.enumerate().partition(|(place, _)| place % 2 == 0);
        let some = |half: Vec<(usize, bool)>| half.iter().any(|(_, set)| *set);
        if some(odd) || !some(even) {
            return Ok(());
        }
        let token = Setting::Token;
        let message = format!(
            "every second {} token is 0: the tokens may be twice as wide; set {token}",
            self.dtype
        );
        Err(input.wrong(message, start, bytes))
    }

    /// Bytes of a file's header: as set, or detected from its first bytes. llm.c's header is
    /// compared with the dtype and the length.
    fn header_of(&self, input: &Blob) -> Result<u64> {
        if let Some(bytes) = self.header_bytes {
            return Ok(bytes);
        }
        let head = input.read(0, input.len().min(HEAD), "the first bytes")?;
        let [magic, version, count] = [0, 4, 8].map(|at| head.get(at..at + 4).map_or(0, number));
        let wrong = |message: String| Err(input.wrong(message, 0, head.len() as u64));
        let all = || {
            format!(
                "; {} reads its bytes as tokens",
                Setting::HeaderBytes.with(0)
            )
        };
        let Some((_, known, dtype)) = LLM_C.iter().find(|(known, ..)| *known == magic) else {
            // Tokens of 16 bits look like text by chance in less than one of 2^60 files; tokens of
            // 8 bits may be text.
            let text = self.dtype.size() > 1
                && head.get(..64).is_some_and(|start| {
                    start
                        .iter()
                        .all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace())
                });
            return match foreign(&head).or(text.then_some("a text file: tokenize it first")) {
                Some(name) => wrong(format!("no tokens, but {name}{}", all())),
                None if self.llm_c => wrong(format!("magic {magic}: not a token file of llm.c")),
                None => Ok(0),
            };
        };
        little_endian("llm.c's token file")?;
        if version != *known {
            let message = format!(
                "version {version} of llm.c's header with magic {magic}; only version {known} is supported"
            );
            return wrong(message + &all());
        }
        if *dtype != self.dtype {
            let token = Setting::Token.with(dtype);
            return wrong(format!(
                "the header says {dtype} tokens, not {}: set {token}",
                self.dtype
            ));
        }
        let need = count * dtype.size() as u64;
        let body = input.len().saturating_sub(LLM_C_BYTES);
        if need != body || input.len() < LLM_C_BYTES {
            let kind = if need < body {
                ErrorKind::Decode
            } else {
                ErrorKind::Truncated
            };
            let message = format!("the header says {count} {dtype} tokens, {body} bytes follow it");
            return Err(input.error(kind, message, LLM_C_BYTES, body));
        }
        Ok(LLM_C_BYTES)
    }

    fn finish(
        self,
        sources: Sources,
        counts: &[u64],
        header: Option<u64>,
        name: String,
    ) -> Result<Tokens> {
        let header_bytes = header.unwrap_or(0);
        let token_bytes = self.dtype.size() as u64;
        let tokens = counts.iter().sum();
        let vocabulary = self.cut.vocabulary(self.dtype)?;
        let (starts, samples, field) = match self.separator {
            None => {
                let windows = self.cut.windows(self.dtype)?;
                let starts = Starts::of(counts.iter().map(|tokens| windows.count(*tokens)))?;
                let leftover = counts.iter().map(|tokens| windows.leftover(*tokens)).sum();
                if starts.len() == 0 {
                    let message = format!(
                        "{tokens} tokens in {} files are too few for a window of {}",
                        counts.len(),
                        windows.window
                    );
                    return Err(Error::new(ErrorKind::Empty, Stage::Index, message).with_path(name));
                }
                let field = Field::fixed("tokens", self.dtype, [windows.window as usize]);
                (starts, WindowSamples::Windows { windows, leftover }, field)
            }
            Some(separator) => {
                let (starts, documents) = self
                    .documents(separator, &sources, header_bytes, counts)
                    .map_err(|error| {
                        if error.site().path.is_none() {
                            error.with_path(&name)
                        } else {
                            error
                        }
                    })?;
                let field = Field::up_to("tokens", self.dtype, documents.longest as usize);
                (starts, WindowSamples::Documents(documents), field)
            }
        };
        let sources = Arc::new(sources);
        let schema = vec![EncodedField::raw(field)];
        Ok(Tokens {
            sources,
            schema,
            starts,
            samples,
            vocabulary,
            header_bytes,
            token_bytes,
            tokens,
            name,
        })
    }

    /// The documents of each file, from the side file or by a pass over the tokens.
    fn documents(
        &self,
        separator: u64,
        sources: &Sources,
        header: u64,
        counts: &[u64],
    ) -> Result<(Starts, Documents)> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if self.cut.window > 0 || self.cut.step.is_some() || self.cut.next_token {
            return bad("samples are documents or windows: choose one".into());
        }
        Cut {
            window: 1,
            ..Cut::default()
        }
        .windows(self.dtype)?;
        let size = self.dtype.size();
        if separator.to_le_bytes()[size..]
            .iter()
            .any(|byte| *byte != 0)
        {
            return bad(format!("separator {separator} does not fit {}", self.dtype));
        }
        let find = || find_ends(sources, header, counts, &separator.to_le_bytes()[..size]);
        let ends = match &self.index_file {
            None => find()?,
            Some(place) => {
                let lens: Vec<u64> = sources.ids().map(|id| sources.len_of(id)).collect();
                let identity =
                    Digest::new("separator")
                        .words(&lens)
                        .words(&[separator, size as u64, header]);
                let identity = identity.word(fingerprint::ends_of_all(sources)?).end();
                let (file, _) = kept::open_or_make(
                    place,
                    KIND,
                    "ends of documents",
                    identity,
                    |file| file.len(0).is_multiple_of(8),
                    |out| {
                        out.put(bytemuck::cast_slice(&find()?)).map_err(|error| {
                            Error::os(Stage::Index, "cannot write the ends", error).with_path(place)
                        })?;
                        out.end_section();
                        Ok(())
                    },
                )?;
                let mut ends = vec![0_u64; file.len(0) as usize / 8];
                file.fill(0, 0, bytemuck::cast_slice_mut(&mut ends))?;
                ends
            }
        };
        let (starts, longest) = by_file(&ends, counts)?;
        match longest {
            0 => Err(Error::new(
                ErrorKind::Empty,
                Stage::Index,
                "no tokens in the files",
            )),
            _ => Ok((
                starts,
                Documents {
                    separator,
                    ends: ends.into(),
                    longest,
                },
            )),
        }
    }
}

/// The end of each document, file by file, in tokens from the start of its file.
///
/// Errors: those of reading; [`ErrorKind::Config`] for a separator that occurs in no file.
fn find_ends(sources: &Sources, header: u64, counts: &[u64], separator: &[u8]) -> Result<Vec<u64>> {
    let size = separator.len() as u64;
    let all: Vec<(usize, u64)> = counts
        .iter()
        .enumerate()
        .flat_map(|(file, tokens)| {
            (0..*tokens)
                .step_by((STEP / size) as usize)
                .map(move |first| (file, first))
        })
        .collect();
    let found = parallel(&all, |_, (file, first)| {
        let count = (counts[*file] - first).min(STEP / size);
        let blob = Blob::of_source(sources, SourceId::at(*file))?;
        let bytes = blob.read(header + first * size, count * size, "the tokens")?;
        let tokens = bytes.chunks_exact(separator.len()).enumerate();
        Ok(tokens
            .filter(|(_, token)| *token == separator)
            .map(|(at, _)| first + at as u64 + 1)
            .collect::<Vec<u64>>())
    })?;
    let mut ends = Vec::new();
    let mut separators = 0;
    let mut begin = 0;
    for ((file, first), mut own) in all.into_iter().zip(found) {
        separators += own.len();
        begin = if first == 0 { ends.len() } else { begin };
        ends.append(&mut own);
        let last = first + (counts[file] - first).min(STEP / size);
        let tokens = counts[file];
        // The tokens after the last separator of a file are a document.
        if last == tokens && ends[begin..].last() != Some(&tokens) {
            ends.push(tokens);
        }
    }
    match separators {
        0 => {
            let token = separator
                .iter()
                .rev()
                .fold(0_u64, |token, byte| token << 8 | u64::from(*byte));
            let message = format!(
                "token {token} does not occur in {} files: do documents end with another token?",
                counts.len()
            );
            Err(Error::new(ErrorKind::Config, Stage::Index, message))
        }
        _ => Ok(ends),
    }
}

/// The documents of each file, and the number of tokens in the longest.
///
/// Errors: [`ErrorKind::Decode`] for ends that do not fit these files.
fn by_file(ends: &[u64], counts: &[u64]) -> Result<(Starts, u64)> {
    let wrong = || {
        Error::new(
            ErrorKind::Decode,
            Stage::Index,
            "the ends of documents do not fit the files",
        )
    };
    let mut rest = ends;
    let mut longest = 0;
    let mut of_files = Vec::with_capacity(counts.len());
    for tokens in counts {
        let mut before = 0;
        let mut count = 0;
        while before < *tokens {
            let end = rest
                .get(count)
                .copied()
                .filter(|end| *end > before && end <= tokens)
                .ok_or_else(wrong)?;
            longest = (end - before).max(longest);
            before = end;
            count += 1;
        }
        rest = &rest[count..];
        of_files.push(count as u64);
    }
    match rest {
        [] => Ok((Starts::of(of_files)?, longest)),
        _ => Err(wrong()),
    }
}

/// The user's settings for windows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cut {
    pub(crate) window: usize,
    pub(crate) step: Option<WindowStep>,
    pub(crate) next_token: bool,
    pub(crate) vocabulary: Option<u64>,
}

/// The number of token ids, as the user set it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vocabulary {
    size: u64,
    dtype: DType,
}

impl Vocabulary {
    /// Errors: [`ErrorKind::Decode`] for a row with an id that is not in the vocabulary.
    pub(crate) fn check(&self, row: &[u8]) -> Result<()> {
        let largest = largest_token(self.dtype, row);
        if largest < self.size {
            return Ok(());
        }
        let Self { size, dtype } = *self;
        let negative = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
            && largest >> (8 * dtype.size() - 1) > 0;
        let said = if negative {
            "a negative token".into()
        } else {
            format!("token {largest}")
        };
        let vocabulary = Setting::Vocabulary.with(size);
        let message = format!(
            "{said}, but {vocabulary} ends the ids at {}: the tokens may not be {dtype}",
            size - 1
        );
        Err(Error::decode(message))
    }
}

/// The largest token of a row. A negative token counts as larger than any valid token.
fn largest_token(dtype: DType, row: &[u8]) -> u64 {
    fn most<const N: usize>(row: &[u8], number: impl Fn(&[u8; N]) -> u64) -> u64 {
        row.as_chunks().0.iter().map(number).max().unwrap_or(0)
    }
    match dtype.size() {
        1 => most(row, |[byte]| u64::from(*byte)),
        2 => most(row, |bytes| u64::from(u16::from_le_bytes(*bytes))),
        4 => most(row, |bytes| u64::from(u32::from_le_bytes(*bytes))),
        _ => most(row, |bytes| u64::from_le_bytes(*bytes)),
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum WindowStep {
    Stride(usize),
    Overlap(usize),
}

/// Checked geometry of windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    pub(crate) window: u64,
    pub(crate) stride: u64,
}

impl Cut {
    /// Errors: [`ErrorKind::Config`] for impossible windows.
    pub(crate) fn windows(&self, dtype: DType) -> Result<Windows> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if matches!(
            dtype,
            DType::Bool | DType::F16 | DType::BF16 | DType::F32 | DType::F64
        ) {
            return bad(format!("tokens are whole numbers, not {dtype}"));
        }
        let window = (self.window as u64).saturating_add(u64::from(self.next_token));
        if self.window == 0 || window > 1 << 40 {
            return bad(format!(
                "a window of {} tokens: set their number with {}",
                self.window,
                Setting::SeqLen
            ));
        }
        let stride = match self.step {
            None => self.window as u64,
            Some(WindowStep::Stride(stride)) => stride as u64,
            Some(WindowStep::Overlap(overlap)) => window.saturating_sub(overlap as u64),
        };
        if stride == 0 {
            return bad(format!(
                "windows of {window} tokens with a stride of {stride}: set a stride above 0, \
                 or a smaller overlap"
            ));
        }
        Ok(Windows { window, stride })
    }
}

impl Cut {
    /// Errors: [`ErrorKind::Config`] for no ids, and for ids that the tokens cannot have.
    pub(crate) fn vocabulary(&self, dtype: DType) -> Result<Option<Vocabulary>> {
        let Some(size) = self.vocabulary else {
            return Ok(None);
        };
        let bits = 8 * dtype.size() as u32
            - u32::from(matches!(
                dtype,
                DType::I8 | DType::I16 | DType::I32 | DType::I64
            ));
        if size == 0 || 1_u64.checked_shl(bits).is_some_and(|most| size > most) {
            let vocabulary = Setting::Vocabulary.with(size);
            let message = format!(
                "{vocabulary}: {dtype} tokens have 1 to 2^{bits} ids; use a wider dtype for more"
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        Ok(Some(Vocabulary { size, dtype }))
    }
}

impl Windows {
    /// Number of windows in `tokens` tokens.
    pub(crate) fn count(&self, tokens: u64) -> u64 {
        tokens
            .checked_sub(self.window)
            .map_or(0, |rest| rest / self.stride + 1)
    }

    /// How many of `tokens` tokens are in no window.
    pub(crate) fn leftover(&self, tokens: u64) -> u64 {
        let count = self.count(tokens);
        let apart = self.stride.max(self.window) == self.stride;
        let covered = match count {
            0 => 0,
            _ if apart => count * self.window,
            _ => (count - 1) * self.stride + self.window,
        };
        tokens - covered
    }

    /// Description such as `windows of 1025 u16 tokens, 1024 apart`.
    pub(crate) fn describe(&self, dtype: &str) -> String {
        format!(
            "windows of {} {dtype} tokens, {} apart",
            self.window, self.stride
        )
    }
}

impl Dataset for Tokens {
    own!(schema sources);
    forward!(self => self.starts; len);

    fn sizes(&self) -> Sizes {
        let (longest, ends) = match &self.samples {
            WindowSamples::Windows { windows, .. } => (windows.window, 0),
            WindowSamples::Documents(documents) => {
                (documents.longest, size_of_val(&*documents.ends))
            }
        };
        Sizes {
            index_bytes: self.starts.heap() + ends,
            ..Sizes::new(longest * self.token_bytes)
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let (file, number) = self.starts.locate(sample);
        let (start, len) = match &self.samples {
            WindowSamples::Windows { windows, .. } => (number * windows.stride, windows.window),
            WindowSamples::Documents(Documents { ends, .. }) => {
                let start = if number == 0 {
                    0
                } else {
                    ends[sample as usize - 1]
                };
                (start, ends[sample as usize] - start)
            }
        };
        let offset = self.header_bytes + start * self.token_bytes;
        let extent = Extent {
            source: SourceId::at(file),
            offset,
            len: len * self.token_bytes,
        };
        place(self.vocabulary, parts, extent);
        Ok(())
    }

    fn framed(&self) -> Option<&dyn Framed> {
        self.vocabulary
            .as_ref()
            .map(|vocabulary| vocabulary as &dyn Framed)
    }

    fn identity(&self) -> u64 {
        let digest = Digest::new("tokens").word(self.header_bytes);
        match &self.samples {
            WindowSamples::Windows { windows, .. } => {
                digest.word(windows.window).word(windows.stride).end()
            }
            WindowSamples::Documents(Documents {
                separator, ends, ..
            }) => digest.word(*separator).words(ends).end(),
        }
    }

    fn describe(&self) -> String {
        let dtype = self.schema[0]
            .as_raw()
            .map_or("", |field| field.dtype().name());
        let files = self.sources.count();
        match &self.samples {
            WindowSamples::Windows { windows, leftover } => {
                let windows = windows.describe(dtype);
                format!(
                    "{} {windows}, in {files} files, {leftover} left over: {}",
                    self.len(),
                    self.name
                )
            }
            WindowSamples::Documents(Documents {
                separator, longest, ..
            }) => format!(
                "{} documents of up to {longest} {dtype} tokens, ended by {separator}, in \
                 {files} files: {}",
                self.len(),
                self.name
            ),
        }
    }
}

/// Gives the field its extent, framed if its tokens must be checked.
pub(crate) fn place(vocabulary: Option<Vocabulary>, parts: &mut Parts<'_>, extent: Extent) {
    match vocabulary {
        Some(_) => parts.framed(0, extent),
        None => parts.extent(0, extent),
    }
}

impl Framed for Vocabulary {
    fn open<'a>(&self, _: u64, _: usize, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.check(bytes).map(|()| bytes)
    }
}

/// Appends an ending to `prefix`; `prefix.idx` and `prefix.bin` count as `prefix`.
pub fn beside(prefix: &Path, ending: &str) -> PathBuf {
    let bare = match prefix.extension() {
        Some(found) if found == "idx" || found == "bin" => prefix.with_extension(""),
        _ => prefix.to_path_buf(),
    };
    let mut name = bare.into_os_string();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(window: usize, step: Option<WindowStep>, next_token: bool) -> Result<Windows> {
        Cut {
            window,
            step,
            next_token,
            vocabulary: None,
        }
        .windows(DType::U16)
    }

    #[test]
    fn windows_follow_the_settings() {
        let of = |windows: Windows| (windows.window, windows.stride);
        assert_eq!(of(cut(8, None, false).unwrap()), (8, 8));
        assert_eq!(of(cut(8, None, true).unwrap()), (9, 8));
        assert_eq!(
            of(cut(8, Some(WindowStep::Overlap(1)), false).unwrap()),
            (8, 7)
        );
        assert_eq!(
            of(cut(8, Some(WindowStep::Overlap(1)), true).unwrap()),
            (9, 8)
        );
        assert_eq!(
            of(cut(8, Some(WindowStep::Stride(3)), true).unwrap()),
            (9, 3)
        );
        for (window, step) in [
            (0, None),
            (8, Some(WindowStep::Stride(0))),
            (8, Some(WindowStep::Overlap(8))),
        ] {
            assert_eq!(
                cut(window, step, false).unwrap_err().kind(),
                ErrorKind::Config
            );
        }
        assert!(
            Cut {
                window: 1,
                ..Cut::default()
            }
            .windows(DType::F32)
            .is_err()
        );
    }

    #[test]
    fn a_prefix_may_have_either_ending() {
        for prefix in ["a/b.c", "a/b.c.idx", "a/b.c.bin"] {
            assert_eq!(beside(Path::new(prefix), ".idx"), Path::new("a/b.c.idx"));
        }
    }

    proptest! {
        #[test]
        fn count_and_leftover_equal_a_naive_walk(tokens in 0_u64..200, window in 1_u64..40, stride in 1_u64..60) {
            let windows = Windows { window, stride };
            let mut covered = vec![false; tokens as usize];
            let mut count = 0;
            let mut at = 0;
            while at + window <= tokens {
                covered[at as usize..(at + window) as usize].fill(true);
                count += 1;
                at += stride;
            }
            let left = covered.iter().filter(|covered| !**covered).count() as u64;
            prop_assert_eq!((windows.count(tokens), windows.leftover(tokens)), (count, left));
        }
    }
}
