//! Megatron's indexed token files: `prefix.bin` holds the tokens of all sequences, `prefix.idx` the
//! end of each.
//!
//! ```text
//! idx: MMIDIDX\0\0 | version 1 | dtype | S | D | S lengths (i32) | S offsets (i64) | D document starts (i64, the last = S)
//! bin: sequence 0 | sequence 1 | …           documents are runs of sequences
//! ```
//!
//! Limits: one prefix (`Concat` joins several). A multimodal index ends
//! with one byte per sequence, its mode; modes other than 0 (text) are refused. Invariants, checked
//! while the index is read once in blocks: sequences follow each other without holes from the first
//! byte of `.bin` to the last; documents are ascending and end with the last sequence; the index
//! has exactly the length that its counts require. Memory: 8 bytes per document or sequence, none
//! for windows.

use crate::tokens::{Cut, Vocabulary, WindowStep, Windows, beside, cut_setters, place};
use crate::{fetched, little_endian, number};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::own;
use feedline_core::dataset::{Dataset, Digest, Framed, Parts, Sizes};
use feedline_core::storage::{Blob, Extent, SourceId, Sources};
use feedline_core::tensor::{DType, EncodedField, Field};
use std::path::Path;
use std::sync::Arc;

const MAGIC: &[u8] = b"MMIDIDX\0\0";
const HEADER_BYTES: u64 = 34;
/// Bytes of each of the index's three lists that are in memory at a time.
const BLOCK: u64 = 64 << 10;

/// Dataset of Megatron-LM's indexed tokens. Samples are documents or sequences of up to a maximum
/// length, or windows over all tokens.
///
/// Field: `tokens`, of the index's dtype. For documents and sequences the row's length is the
/// number of its tokens.
///
/// ```no_run
/// # use feedline_formats::Megatron;
/// let documents = Megatron::builder().documents(4096).cut(true).open("corpus_text_document")?;
/// let packed = Megatron::builder().window(2048).next_token().open("corpus_text_document")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Megatron {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    dtype: DType,
    samples: DocumentSamples,
    vocabulary: Option<Vocabulary>,
    counts: TokenCounts,
    len: u64,
    name: String,
}

enum DocumentSamples {
    /// The end of each span, in tokens from the start of `.bin`; the first entry is 0. `what` is
    /// `documents` or `sequences`.
    Spans {
        ends: Box<[u64]>,
        max: u64,
        what: &'static str,
        cut_tokens: u64,
        cut_samples: u64,
        empty: u64,
    },
    Windows {
        windows: Windows,
        leftover: u64,
    },
}

/// Numbers of tokens, sequences and documents in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    tokens: u64,
    sequences: u64,
    documents: u64,
}

/// Builder of [`Megatron`]: selects the samples. Made by [`Megatron::builder`].
#[derive(Clone, Debug, Default)]
pub struct MegatronBuilder {
    spans: Option<(EndsKind, usize)>,
    cut_long: bool,
    cut: Cut,
}

/// Which ends are kept in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndsKind {
    Documents,
    Sequences,
    Windows,
}

impl Megatron {
    /// Starts a builder; it needs one of [`documents`](MegatronBuilder::documents),
    /// [`sequences`](MegatronBuilder::sequences) and [`window`](MegatronBuilder::window).
    pub fn builder() -> MegatronBuilder {
        MegatronBuilder::default()
    }

    /// Number of tokens in `.bin`.
    pub fn tokens(&self) -> u64 {
        self.counts.tokens
    }

    /// Number of sequences in the index.
    pub fn sequences(&self) -> u64 {
        self.counts.sequences
    }

    /// Number of documents in the index.
    pub fn documents(&self) -> u64 {
        self.counts.documents
    }

    /// Number of tokens in no sample: cut off, or too few for a window.
    pub fn leftover_tokens(&self) -> u64 {
        match &self.samples {
            DocumentSamples::Spans { cut_tokens, .. } => *cut_tokens,
            DocumentSamples::Windows { leftover, .. } => *leftover,
        }
    }
}

impl MegatronBuilder {
    /// Makes each document a sample, of at most `max` tokens.
    #[must_use]
    pub fn documents(mut self, max: usize) -> Self {
        self.spans = Some((EndsKind::Documents, max));
        self
    }

    /// Makes each sequence a sample, of at most `max` tokens.
    #[must_use]
    pub fn sequences(mut self, max: usize) -> Self {
        self.spans = Some((EndsKind::Sequences, max));
        self
    }

    /// `true` cuts documents or sequences down to the maximum; [`Megatron::leftover_tokens`] and
    /// the report count the rest. Default: `false`; `open` then fails if one is longer.
    #[must_use]
    pub fn cut(mut self, cut: bool) -> Self {
        self.cut_long = cut;
        self
    }

    // Windows are cut from the consecutive tokens of all documents.
    cut_setters!();

    /// Opens `prefix.idx` and `prefix.bin`; `prefix` may have either ending.
    ///
    /// Errors: not found, a cut file ([`ErrorKind::Truncated`]), an index that contradicts itself
    /// or `.bin` ([`ErrorKind::Decode`]), a document or sequence above the maximum
    /// ([`ErrorKind::Shape`], which names the first), no sample at all ([`ErrorKind::Empty`]).
    pub fn open(self, prefix: impl AsRef<Path>) -> Result<Megatron> {
        let kind = self.kind()?;
        let idx = beside(prefix.as_ref(), ".idx");
        let bin = beside(prefix.as_ref(), ".bin");
        let tokens = Blob::open(&bin)?;
        fetched(&tokens)?;
        let bin_meta = tokens.look()?;
        let index = read_index(&Blob::open(&idx)?, bin_meta.len, kind)?;
        let mut sources = Sources::new();
        sources.add(&bin, &bin_meta)?;
        let name = prefix.as_ref().display().to_string();
        let samples = match self.spans {
            Some((kind, max)) => self
                .spans_of(kind, max as u64, &index)
                .map_err(|error| error.with_path(&bin))?,
            None => {
                let windows = self.cut.windows(index.dtype)?;
                DocumentSamples::Windows {
                    windows,
                    leftover: windows.leftover(index.counts.tokens),
                }
            }
        };
        let (len, field) = match &samples {
            DocumentSamples::Spans { ends, max, .. } => (
                ends.len() as u64 - 1,
                Field::up_to("tokens", index.dtype, *max as usize),
            ),
            DocumentSamples::Windows { windows, .. } => {
                let field = Field::fixed("tokens", index.dtype, [windows.window as usize]);
                (windows.count(index.counts.tokens), field)
            }
        };
        if len == 0 {
            let message = format!("{} tokens make no sample", index.counts.tokens);
            return Err(Error::new(ErrorKind::Empty, Stage::Index, message).with_path(bin));
        }
        let sources = Arc::new(sources);
        let schema = vec![EncodedField::raw(field)];
        let vocabulary = self.cut.vocabulary(index.dtype)?;
        Ok(Megatron {
            sources,
            schema,
            dtype: index.dtype,
            samples,
            vocabulary,
            counts: index.counts,
            len,
            name,
        })
    }

    fn kind(&self) -> Result<EndsKind> {
        let bad = |message: &str| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        let windowed = self.cut.window > 0 || self.cut.step.is_some() || self.cut.next_token;
        match self.spans {
            Some(_) if windowed => bad("samples are documents, sequences or windows: choose one"),
            Some((_, 0)) => bad("samples of at most 0 tokens: give a maximum above 0"),
            Some((kind, _)) => Ok(kind),
            None if self.cut_long => {
                bad("only documents and sequences can be cut, but samples are windows")
            }
            None => Ok(EndsKind::Windows),
        }
    }

    /// Makes the spans between consecutive ends into samples. Errors: [`ErrorKind::Shape`] for a
    /// span above the maximum, unless `cut` is set.
    fn spans_of(&self, kind: EndsKind, max: u64, index: &Index) -> Result<DocumentSamples> {
        let what = if kind == EndsKind::Documents {
            "documents"
        } else {
            "sequences"
        };
        let mut first = None;
        let mut cut_tokens = 0;
        let mut cut_samples = 0;
        let mut empty = 0;
        for (sample, pair) in index.ends.windows(2).enumerate() {
            let len = pair[1] - pair[0];
            empty += u64::from(len == 0);
            if len > max {
                first.get_or_insert((sample as u64, len));
                cut_samples += 1;
                cut_tokens += len - max;
            }
        }
        if let (Some((sample, len)), false) = (first, self.cut_long) {
            let cut = Setting::Cut.hint(|cut| format!("; {cut} keeps their first {max}"));
            let message = format!(
                "{cut_samples} of the {what} are longer than {max} tokens, the first has \
                 {len}; raise {}{cut}",
                Setting::Documents
            );
            let size = index.dtype.size() as u64;
            let error = Error::new(ErrorKind::Shape, Stage::Index, message).with_sample(sample);
            return Err(error.with_range(index.ends[sample as usize] * size, len * size));
        }
        Ok(DocumentSamples::Spans {
            ends: index.ends.clone().into(),
            max,
            what,
            cut_tokens,
            cut_samples,
            empty,
        })
    }
}

/// A checked index.
pub(crate) struct Index {
    dtype: DType,
    counts: TokenCounts,
    /// 0, then the end of each document or sequence; empty for windows.
    ends: Vec<u64>,
}

/// Whether `input` holds 8 bytes with the length of a `.bin` file, and then an index that fits this
/// length.
#[cfg(feature = "unstable")]
pub(super) fn is_index(input: &Blob) -> bool {
    let bytes = input.read(0, input.len(), "the index").unwrap_or_default();
    let Some((len, index)) = bytes.split_first_chunk::<8>() else {
        return false;
    };
    let index = Blob::memory(bytes::Bytes::copy_from_slice(index));
    read_index(&index, u64::from_le_bytes(*len), EndsKind::Documents).is_ok()
}

/// Reads and checks an index against the length of its `.bin`.
fn read_index(input: &Blob, bin_len: u64, keep: EndsKind) -> Result<Index> {
    little_endian("Megatron's index")?;
    fetched(input)?;
    let head: [u8; HEADER_BYTES as usize] = input.array(0, "the header")?;
    let wrong = |message: String| input.wrong(message, 0, HEADER_BYTES);
    if &head[..9] != MAGIC || number(&head[9..17]) != 1 {
        return Err(wrong("not a Megatron index of version 1".into()));
    }
    let dtype = dtype_of(head[17]).map_err(wrong)?;
    let sequences = number(&head[18..26]);
    let starts = number(&head[26..34]);
    let lists = sequences.checked_mul(12).zip(starts.checked_mul(8));
    let wanted = lists.and_then(|(a, b)| a.checked_add(b)?.checked_add(HEADER_BYTES));
    let modes =
        wanted.filter(|wanted| sequences > 0 && wanted.checked_add(sequences) == Some(input.len()));
    if wanted != Some(input.len()) && modes.is_none() {
        let message = format!(
            "{sequences} sequences and {starts} document starts need {} bytes, the index has {}",
            wanted.map_or("over 2^64".into(), |bytes| bytes.to_string()),
            input.len()
        );
        let kind = if wanted.is_some_and(|bytes| bytes < input.len()) {
            ErrorKind::Decode
        } else {
            ErrorKind::Truncated
        };
        return Err(input.error(kind, message, 0, input.len()));
    }
    let mut walk = IndexWalk {
        input,
        lengths: List::new(HEADER_BYTES, 4, sequences),
        offsets: List::new(HEADER_BYTES + sequences * 4, 8, sequences),
        documents: List::new(HEADER_BYTES + sequences * 12, 8, starts),
    };
    let (tokens, ends) = walk.run(sequences, dtype.size() as u64, keep)?;
    let mut modes = modes.map(|at| List::new(at, 1, sequences));
    while let Some((mode, at)) = modes.as_mut().map_or(Ok(None), |modes| modes.next(input))? {
        if mode != 0 {
            let message = format!(
                "a multimodal index: this sequence has mode {mode}; only mode 0 (text) is read"
            );
            return Err(input.wrong(message, at, 1));
        }
    }
    // Cannot overflow: the checked offsets are 64-bit numbers of bytes.
    let bytes = tokens.checked_mul(dtype.size() as u64);
    if bytes != Some(bin_len) {
        let kind = if bytes.is_none_or(|bytes| bytes > bin_len) {
            ErrorKind::Truncated
        } else {
            ErrorKind::Decode
        };
        let message =
            format!("the index says {tokens} {dtype} tokens, its .bin has {bin_len} bytes");
        return Err(input.error(kind, message, 0, input.len()));
    }
    Ok(Index {
        dtype,
        counts: TokenCounts {
            tokens,
            sequences,
            documents: starts - 1,
        },
        ends,
    })
}

fn dtype_of(code: u8) -> Result<DType, String> {
    match code {
        1 => Ok(DType::U8),
        2 => Ok(DType::I8),
        3 => Ok(DType::I16),
        4 => Ok(DType::I32),
        5 => Ok(DType::I64),
        8 => Ok(DType::U16),
        6 | 7 => Err(format!("dtype {code} is a float, tokens are whole numbers")),
        _ => Err(format!("dtype {code} is not known")),
    }
}

/// Reader of a list of numbers in the index, block by block.
struct List {
    at: u64,
    width: u64,
    left: u64,
    block: Vec<u8>,
    used: usize,
}

impl List {
    fn new(at: u64, width: u64, count: u64) -> Self {
        Self {
            at,
            width,
            left: count,
            block: Vec::new(),
            used: 0,
        }
    }

    /// The next number and its offset in the index; `None` at the end of the list.
    fn next(&mut self, input: &Blob) -> Result<Option<(u64, u64)>> {
        if self.left == 0 {
            return Ok(None);
        }
        if self.used == self.block.len() {
            let bytes = (self.left * self.width).min(BLOCK);
            self.block.resize(bytes as usize, 0);
            input.fill(self.at, &mut self.block, "the index")?;
            self.used = 0;
        }
        let value = number(&self.block[self.used..self.used + self.width as usize]);
        let at = self.at;
        self.used += self.width as usize;
        self.at += self.width;
        self.left -= 1;
        Ok(Some((value, at)))
    }
}

/// One pass over the three lists.
struct IndexWalk<'a> {
    input: &'a Blob,
    lengths: List,
    offsets: List,
    documents: List,
}

impl IndexWalk<'_> {
    /// Returns the total number of tokens, and the requested ends.
    fn run(&mut self, sequences: u64, size: u64, keep: EndsKind) -> Result<(u64, Vec<u64>)> {
        let mut tokens = 0_u64;
        let mut ends = Vec::new();
        let mut document = self.documents.next(self.input)?;
        if document.map(|(first, _)| first) != Some(0) {
            let message = "the first document does not start with the first sequence";
            return Err(self.input.wrong(message, HEADER_BYTES + sequences * 12, 8));
        }
        if keep != EndsKind::Windows {
            ends.push(0);
        }
        document = self.documents.next(self.input)?;
        for sequence in 0..=sequences {
            // A document without sequences ends where the document before it does.
            while let Some((end, _)) = document.filter(|(end, _)| *end == sequence) {
                if keep == EndsKind::Documents {
                    ends.push(tokens);
                }
                document = self.documents.next(self.input)?;
                debug_assert!(end <= sequences);
            }
            if let Some((end, at)) = document.filter(|(end, _)| *end < sequence || *end > sequences)
            {
                let message = format!("a document ends with sequence {end}, out of order");
                return Err(self.input.wrong(message, at, 8));
            }
            if sequence < sequences {
                tokens = self.sequence(sequence, tokens, size)?;
                if keep == EndsKind::Sequences {
                    ends.push(tokens);
                }
            }
        }
        self.ended(sequences)?;
        Ok((tokens, ends))
    }

    /// Reads the next sequence's entry. `tokens` is the number of tokens before it; returns the
    /// number of tokens up to its end.
    fn sequence(&mut self, sequence: u64, tokens: u64, size: u64) -> Result<u64> {
        let (Some((len, len_at)), Some((offset, at))) = (
            self.lengths.next(self.input)?,
            self.offsets.next(self.input)?,
        ) else {
            return Err(self
                .input
                .wrong("the index ends before its last sequence", 0, 0));
        };
        if len > i32::MAX as u64 {
            let message = format!(
                "sequence {sequence} has a length of {} tokens",
                len as u32 as i32
            );
            return Err(self.input.wrong(message, len_at, 4));
        }
        if tokens.checked_mul(size) != Some(offset) {
            let message = format!(
                "sequence {sequence} starts at byte {offset}, but the sequences before it have \
                 {tokens} tokens of {size} bytes"
            );
            return Err(self.input.wrong(message, at, 8));
        }
        // At most 2^31 tokens for each of fewer than 2^61 entries of a file.
        tokens
            .checked_add(len)
            .ok_or_else(|| self.input.wrong("more than 2^64 tokens", len_at, 4))
    }

    /// Checks that the last document ends with the last sequence.
    fn ended(&mut self, sequences: u64) -> Result<()> {
        let last = self.documents.at - 8;
        let end = number(&self.input.array::<8>(last, "the index")?);
        if end == sequences && self.documents.left == 0 {
            return Ok(());
        }
        let message = format!("the last document ends with sequence {end} of {sequences}");
        Err(self.input.wrong(message, last, 8))
    }
}

impl Megatron {
    fn extent(&self, sample: u64) -> Extent {
        let size = self.dtype.size() as u64;
        let (start, len) = match &self.samples {
            DocumentSamples::Spans { ends, max, .. } => {
                let start = ends[sample as usize];
                let end = ends[sample as usize + 1];
                (start, (end - start).min(*max))
            }
            DocumentSamples::Windows { windows, .. } => (sample * windows.stride, windows.window),
        };
        Extent {
            source: SourceId::at(0),
            offset: start * size,
            len: len * size,
        }
    }
}

impl Framed for Megatron {
    fn open<'a>(&self, _: u64, _: usize, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.vocabulary
            .map_or(Ok(()), |vocabulary| vocabulary.check(bytes))
            .map(|()| bytes)
    }

    fn field_bytes(&self, sample: u64, _: usize) -> Result<Option<u64>> {
        Ok(Some(self.extent(sample).len))
    }
}

impl Dataset for Megatron {
    own!(schema len sources);

    fn sizes(&self) -> Sizes {
        let size = self.dtype.size() as u64;
        match &self.samples {
            DocumentSamples::Spans { ends, max, .. } => {
                let longest = ends
                    .windows(2)
                    .map(|pair| (pair[1] - pair[0]).min(*max))
                    .max()
                    .unwrap_or(0);
                Sizes {
                    index_bytes: size_of_val(&**ends),
                    ..Sizes::new(size * longest)
                }
            }
            DocumentSamples::Windows { windows, .. } => Sizes::new(size * windows.window),
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        place(self.vocabulary, parts, self.extent(sample));
        Ok(())
    }

    fn framed(&self) -> Option<&dyn Framed> {
        self.vocabulary.is_some().then_some(self as &dyn Framed)
    }

    fn identity(&self) -> u64 {
        let digest = Digest::new("megatron");
        match &self.samples {
            // The ends come from the index, which is not a source.
            DocumentSamples::Spans { ends, .. } => digest.words(ends).end(),
            DocumentSamples::Windows { windows, .. } => {
                digest.word(windows.window).word(windows.stride).end()
            }
        }
    }

    fn describe(&self) -> String {
        let len = self.len;
        let dtype = self.dtype;
        let what = match &self.samples {
            DocumentSamples::Spans {
                max,
                what,
                cut_tokens,
                cut_samples,
                empty,
                ..
            } => {
                format!(
                    "{what} of up to {max} {dtype} tokens, {cut_samples} cut by {cut_tokens} \
                     tokens, {empty} empty"
                )
            }
            DocumentSamples::Windows { windows, leftover } => {
                format!("{}, {leftover} left over", windows.describe(dtype.name()))
            }
        };
        format!("{len} {what}: {}", self.name)
    }
}
