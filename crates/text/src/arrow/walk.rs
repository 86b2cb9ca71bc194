//! The messages of a file: the schema, dictionaries and record batches of a stream, and the footer
//! of a file.

use super::batch::{Arrays, Dictionaries, Entries, Place};
use super::plan::{Resolved, Take};
use super::schema::Columns;
use arrow_ipc::{
    Message, MessageHeader, MetadataVersion, RecordBatch, root_as_footer, root_as_message,
};
use feedline_base::error::Error;
use feedline_core::dataset::index::{Rows, Scan};
use feedline_core::dataset::{Damage, DamageKind};

/// Maximum bytes of a message without its body, and of a footer.
const METADATA_MAX: usize = 64 << 20;

/// At both ends of a file that is not a stream.
const MAGIC: &[u8; 6] = b"ARROW1";

/// Why a part of a file gives no rows.
#[derive(Debug)]
pub(super) enum Fault {
    Damage(DamageKind, String),
    /// The file cannot be read.
    Failed(Error),
}

impl Fault {
    pub(super) fn wrong(message: impl Into<String>) -> Self {
        Self::Damage(DamageKind::Header, message.into())
    }

    pub(super) fn unsupported(message: impl Into<String>) -> Self {
        Self::Damage(DamageKind::Unsupported, message.into())
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A message and where it is.
struct Found {
    bytes: Vec<u8>,
    at: u64,
    body: Place,
}

impl Found {
    fn message(&self) -> Message<'_> {
        root_as_message(&self.bytes).expect("verified when it was read")
    }

    fn end(&self) -> u64 {
        self.body.offset + self.body.len
    }
}

/// The messages of a file, one after the other.
struct Messages<'s, 'b> {
    input: &'s mut Scan<'b>,
    at: u64,
    /// Where messages end: the file's end, or its footer.
    end: u64,
    /// The footer's record batches, if the file has a footer.
    batches: Option<Vec<u64>>,
}

/// Reads the schema of a file. Errors: as of [`walk`]; there is no schema.
pub(super) fn schema(input: &mut Scan<'_>) -> Result<Columns, Fault> {
    Messages::begin(input)?.schema()
}

/// Adds the rows of a file, one entry for each of the `takes`.
pub(super) fn walk(input: &mut Scan<'_>, rows: &mut Rows, takes: &[Take]) -> Result<(), Error> {
    let len = input.len();
    let mut at = 0;
    match rows_of(input, rows, takes, &mut at) {
        Ok(()) => Ok(()),
        Err(Fault::Failed(error)) => Err(error),
        Err(Fault::Damage(kind, message)) => {
            // Nothing tells how many rows follow.
            rows.damage(Damage::new(kind, at, len.saturating_sub(at), 1, message));
            Ok(())
        }
    }
}

/// `at` follows the messages, for errors.
fn rows_of(
    input: &mut Scan<'_>,
    rows: &mut Rows,
    takes: &[Take],
    at: &mut u64,
) -> Result<(), Fault> {
    let mut messages = Messages::begin(input)?;
    let columns = messages.schema()?;
    let resolved = takes
        .iter()
        .map(|take| take.resolve(&columns))
        .collect::<Result<Vec<_>, _>>()?;
    let mut dictionaries = Dictionaries::default();
    let mut starts = Vec::new();
    *at = messages.at;
    while let Some(found) = messages.next()? {
        let message = found.message();
        match message.header_type() {
            MessageHeader::RecordBatch => {
                let batch = message.header_as_record_batch().ok_or_else(no_header)?;
                starts.push(found.at);
                let number = starts.len() - 1;
                let of = Batch {
                    number,
                    batch,
                    found: &found,
                };
                of.push(&mut messages, rows, &columns, &resolved, &dictionaries)?;
            }
            MessageHeader::DictionaryBatch => {
                let dictionary = message.header_as_dictionary_batch().ok_or_else(no_header)?;
                let id = dictionary.id();
                if !columns.all.iter().any(|column| column.has_dictionary(id)) {
                    let message = format!("dictionary {id}, which no column has");
                    return Err(Fault::wrong(message));
                }
                dictionaries.add(dictionary, found.body, messages.input, &resolved)?;
            }
            MessageHeader::Schema => return Err(Fault::wrong("a second schema")),
            other => {
                let message = format!("a message of type {other:?}, which is not read");
                return Err(Fault::unsupported(message));
            }
        }
        *at = messages.at;
    }
    messages.finish(&starts)
}

fn no_header() -> Fault {
    Fault::wrong("a message without its header")
}

/// A record batch of a file.
struct Batch<'a> {
    number: usize,
    batch: RecordBatch<'a>,
    found: &'a Found,
}

impl Batch<'_> {
    /// Adds the rows of the batch, or its damage.
    fn push(
        &self,
        messages: &mut Messages<'_, '_>,
        rows: &mut Rows,
        columns: &Columns,
        takes: &[Resolved<'_>],
        dictionaries: &Dictionaries,
    ) -> Result<(), Fault> {
        match self.entries(messages.input, columns, takes, dictionaries) {
            Ok((count, entries)) => {
                let mut row = Vec::with_capacity(entries.len());
                for number in 0..count {
                    row.clear();
                    row.extend(entries.iter().map(|field| field[number]));
                    rows.push(&row)?;
                }
            }
            Err(Fault::Damage(kind, message)) => {
                let message = format!("record batch {}: {message}", self.number);
                // A shard has no more rows.
                let samples = self.batch.length().clamp(0, u32::MAX.into()) as u64;
                let Found { at, .. } = *self.found;
                rows.damage(Damage::new(
                    kind,
                    at,
                    self.found.end() - at,
                    samples,
                    message,
                ));
            }
            Err(failed) => return Err(failed),
        }
        Ok(())
    }

    /// The number of rows, and for each of the `takes` the entries of all rows.
    fn entries(
        &self,
        input: &mut Scan<'_>,
        columns: &Columns,
        takes: &[Resolved<'_>],
        dictionaries: &Dictionaries,
    ) -> Result<(usize, Vec<Entries>), Fault> {
        let arrays = Arrays::of(self.batch, self.found.body, &columns.all)?;
        let entries = takes
            .iter()
            .map(|take| take.entries(&arrays, dictionaries, input))
            .collect::<Result<Vec<_>, _>>()?;
        Ok((entries.first().map_or(0, Vec::len), entries))
    }
}

impl<'s, 'b> Messages<'s, 'b> {
    fn begin(input: &'s mut Scan<'b>) -> Result<Self, Fault> {
        let len = input.len();
        let front = input.bytes(0, len.min(16) as usize)?;
        if let Some(what) = foreign(front) {
            return Err(Fault::unsupported(what));
        }
        if !front.starts_with(MAGIC) {
            return Ok(Self {
                input,
                at: 0,
                end: len,
                batches: None,
            });
        }
        let footer = footer(input)?;
        Ok(Self {
            input,
            at: 8,
            end: footer.0,
            batches: Some(footer.1),
        })
    }

    fn schema(&mut self) -> Result<Columns, Fault> {
        let first = self.next()?;
        let Some(first) = first else {
            return Err(Fault::wrong("a stream without a schema"));
        };
        match first.message().header_as_schema() {
            Some(schema) => Columns::of(schema),
            None => Err(Fault::wrong(
                "the first message is not a schema: no Arrow IPC stream",
            )),
        }
    }

    /// The next message; `None` at the end mark.
    fn next(&mut self) -> Result<Option<Found>, Fault> {
        let left = self.end - self.at;
        let cut =
            |what: &str| Fault::Damage(DamageKind::Cut, format!("the file ends within {what}"));
        if left < 8 {
            // Streams before version 0.15 end by 4 bytes.
            if left >= 4 && self.input.bytes(self.at, 4)? == [0; 4] {
                self.at += 4;
                return Ok(None);
            }
            let no_end = "no end mark: a writer that stopped, or a file cut between two messages";
            return Err(match left {
                0 => Fault::Damage(DamageKind::NoEnd, no_end.into()),
                _ => cut("a message"),
            });
        }
        let begin: [u8; 8] = self.input.bytes(self.at, 8)?.try_into().expect("8 bytes");
        let word = |at: usize| u32::from_le_bytes(begin[at..at + 4].try_into().expect("4 bytes"));
        // Before version 0.15 there was no mark before the length.
        let (prefix, len) = match word(0) {
            u32::MAX => (8, word(4)),
            len => (4, len),
        };
        if len == 0 {
            self.at += prefix;
            return Ok(None);
        }
        if len as usize > METADATA_MAX {
            let message = format!(
                "a message of {len} bytes, at most {METADATA_MAX} are read: no Arrow IPC stream"
            );
            return Err(Fault::wrong(message));
        }
        if u64::from(len) > left - prefix {
            return Err(cut("a message"));
        }
        let bytes = self.input.bytes(self.at + prefix, len as usize)?.to_vec();
        let message = root_as_message(&bytes)
            .map_err(|error| Fault::wrong(format!("a message cannot be read: {error}")))?;
        if message.version() < MetadataVersion::V4 || message.version() > MetadataVersion::V5 {
            let message = format!(
                "metadata of version {:?}, which is not read",
                message.version()
            );
            return Err(Fault::unsupported(message));
        }
        let body = u64::try_from(message.bodyLength());
        let body = body.map_err(|_| Fault::wrong("a message with a body of negative length"))?;
        let start = self.at + prefix + u64::from(len);
        if body > self.end - start {
            return Err(cut(&format!("a message's body of {body} bytes")));
        }
        let found = Found {
            bytes,
            at: self.at,
            body: Place {
                offset: start,
                len: body,
            },
        };
        self.at = found.end();
        Ok(Some(found))
    }

    /// Compares what was found with the footer, or with the file's end.
    fn finish(self, starts: &[u64]) -> Result<(), Fault> {
        match self.batches {
            Some(batches) if batches != starts => Err(Fault::Damage(
                DamageKind::Ambiguous,
                format!(
                    "the footer names {} record batches, the stream has {}, or in other places",
                    batches.len(),
                    starts.len()
                ),
            )),
            None if self.at != self.end => Err(Fault::Damage(
                DamageKind::Trailing,
                format!("{} bytes behind the stream's end", self.end - self.at),
            )),
            _ => Ok(()),
        }
    }
}

/// Where a file's footer begins, and the places of the record batches that it names.
fn footer(input: &mut Scan<'_>) -> Result<(u64, Vec<u64>), Fault> {
    let len = input.len();
    let cut = || {
        Fault::Damage(
            DamageKind::Cut,
            "the file has no footer: it is cut, or not closed".into(),
        )
    };
    let tail = len
        .checked_sub(10)
        .filter(|tail| *tail >= 8)
        .ok_or_else(cut)?;
    let end: [u8; 10] = input.bytes(tail, 10)?.try_into().expect("10 bytes");
    if &end[4..] != MAGIC {
        return Err(cut());
    }
    let size = u32::from_le_bytes(end[..4].try_into().expect("4 bytes"));
    let start = tail.checked_sub(size.into()).filter(|start| *start >= 8);
    let Some(start) = start.filter(|_| size as usize <= METADATA_MAX) else {
        return Err(Fault::wrong(format!("a footer of {size} bytes")));
    };
    let bytes = input.bytes(start, size as usize)?.to_vec();
    let footer = root_as_footer(&bytes)
        .map_err(|error| Fault::wrong(format!("the footer cannot be read: {error}")))?;
    let blocks = footer.recordBatches().into_iter().flatten();
    let starts = blocks.map(|block| u64::try_from(block.offset()).unwrap_or(u64::MAX));
    Ok((start, starts.collect()))
}

/// What a file is instead of Arrow, by its first bytes.
fn foreign(front: &[u8]) -> Option<&'static str> {
    Some(match front {
        [] => "an empty file",
        [b'P', b'A', b'R', b'1', ..] => "a Parquet file: read it as source parquet",
        [b'F', b'E', b'A', b'1', ..] => "Feather of version 1: write it anew by pyarrow.feather",
        _ if front.starts_with(b"version https://") => {
            "a git-lfs pointer instead of the file: run git lfs pull"
        }
        _ => return None,
    })
}
