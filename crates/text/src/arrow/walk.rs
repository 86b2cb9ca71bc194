//! The messages of a file: the schema, dictionaries and record batches.
//!
//! ```text
//! stream  [schema][dictionary][batch][batch]…[end mark]         one after the other
//! file    ARROW1 [schema][…]… [end mark] [footer] ARROW1        where the footer, which has the schema, says
//! ```

use super::batch::{Arrays, Dictionaries, Entries, Place};
use super::fault::Fault;
use super::plan::{Resolved, Take};
use super::schema::Columns;
use arrow_ipc::{
    Block, Message, MessageHeader, MetadataVersion, RecordBatch, root_as_footer, root_as_message,
};
use feedline_base::error::Error;
use feedline_core::dataset::index::{Rows, Scan};
use feedline_core::dataset::{Damage, DamageKind};
use std::collections::VecDeque;

/// Maximum bytes of a message without its body, and of a footer.
const METADATA_MAX: usize = 64 << 20;

/// Maximum bytes between two messages of a file, to align them; and of its end mark.
const ROOM_MAX: u64 = 64;

/// At both ends of a file that is not a stream.
const MAGIC: &[u8; 6] = b"ARROW1";

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
    footer: Option<Footer>,
}

/// The end of a file that is not a stream.
struct Footer {
    bytes: Vec<u8>,
    /// Messages that are not read yet: dictionaries, then record batches.
    blocks: VecDeque<Block>,
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
    let mut number = 0;
    *at = messages.at;
    while let Some(found) = messages.next()? {
        let message = found.message();
        match message.header_type() {
            MessageHeader::RecordBatch => {
                let batch = message.header_as_record_batch().ok_or_else(no_header)?;
                let of = Batch {
                    number,
                    batch,
                    found: &found,
                };
                of.push(&mut messages, rows, &columns, &resolved, &dictionaries)?;
                number += 1;
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
    messages.finish()
}

fn no_footer() -> Fault {
    let message = "the file has no footer: it is cut, or not closed";
    Fault::Damage(DamageKind::Cut, message.into())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
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
        let footer = match front.starts_with(MAGIC) {
            true => Some(Footer::read(input)?),
            false => None,
        };
        Ok(Self {
            input,
            at: 0,
            end: len,
            footer,
        })
    }

    fn schema(&mut self) -> Result<Columns, Fault> {
        if let Some(footer) = &self.footer {
            let schema = footer.footer().schema();
            let schema = schema.ok_or_else(|| Fault::wrong("a footer without a schema"))?;
            return Columns::of(schema);
        }
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

    /// The next message; `None` at the end.
    fn next(&mut self) -> Result<Option<Found>, Fault> {
        let Some(footer) = &mut self.footer else {
            return self.read();
        };
        let Some(block) = footer.blocks.pop_front() else {
            return Ok(None);
        };
        self.at = block.offset() as u64;
        let found = self.read()?;
        let same = found.filter(|found| {
            let metadata = found.body.offset - found.at;
            let lens = (block.metaDataLength() as u64, block.bodyLength() as u64);
            (metadata, found.body.len) == lens
        });
        same.map(Some).ok_or_else(|| {
            let message = "a message has another length than the footer says";
            Fault::Damage(DamageKind::Ambiguous, message.into())
        })
    }

    /// The message at this place; `None` at the end mark.
    fn read(&mut self) -> Result<Option<Found>, Fault> {
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
        // Before version 0.15 there was no mark before the length.
        let (prefix, len) = match word(&begin, 0) {
            u32::MAX => (8, word(&begin, 4)),
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

    /// A stream ends with the file.
    fn finish(self) -> Result<(), Fault> {
        if self.footer.is_some() || self.at == self.end {
            return Ok(());
        }
        let message = format!("{} bytes behind the stream's end", self.end - self.at);
        Err(Fault::Damage(DamageKind::Trailing, message))
    }
}

impl Footer {
    fn read(input: &mut Scan<'_>) -> Result<Self, Fault> {
        let len = input.len();
        let tail = len
            .checked_sub(10)
            .filter(|tail| *tail >= 8)
            .ok_or_else(no_footer)?;
        let end: [u8; 10] = input.bytes(tail, 10)?.try_into().expect("10 bytes");
        if &end[4..] != MAGIC {
            return Err(no_footer());
        }
        let size = u32::from_le_bytes(end[..4].try_into().expect("4 bytes"));
        let start = tail.checked_sub(size.into()).filter(|start| *start >= 8);
        let Some(start) = start.filter(|_| size as usize <= METADATA_MAX) else {
            return Err(Fault::wrong(format!("a footer of {size} bytes")));
        };
        let bytes = input.bytes(start, size as usize)?.to_vec();
        let footer = root_as_footer(&bytes)
            .map_err(|error| Fault::wrong(format!("the footer cannot be read: {error}")))?;
        let dictionaries = footer.dictionaries().into_iter().flatten();
        let batches = footer.recordBatches().into_iter().flatten();
        let blocks: VecDeque<Block> = dictionaries.chain(batches).copied().collect();
        side_by_side(blocks.iter().collect(), start)?;
        Ok(Self { bytes, blocks })
    }

    fn footer(&self) -> arrow_ipc::Footer<'_> {
        root_as_footer(&self.bytes).expect("verified when it was read")
    }
}

/// Errors: messages overlap, or there is room for another between them, or before the footer.
fn side_by_side(mut blocks: Vec<&Block>, footer: u64) -> Result<(), Fault> {
    blocks.sort_by_key(|block| block.offset());
    let mut before: Option<u64> = None;
    for block in blocks {
        let numbers = [
            block.offset(),
            block.metaDataLength().into(),
            block.bodyLength(),
        ];
        let [Ok(at), Ok(metadata), Ok(body)] = numbers.map(u64::try_from) else {
            return Err(Fault::wrong("the footer has a negative number"));
        };
        let end = at
            .checked_add(metadata)
            .and_then(|end| end.checked_add(body));
        let end = end.filter(|end| *end <= footer);
        let follows = before.is_none_or(|before| at >= before && at - before < ROOM_MAX);
        before = match end {
            Some(end) if follows => Some(end),
            _ => {
                return Err(Fault::wrong(format!(
                    "the footer has a message at {at}, which is not side by side with the others"
                )));
            }
        };
    }
    match before {
        Some(before) if footer - before > ROOM_MAX => Err(Fault::wrong(format!(
            "{} bytes before the footer, which it does not name",
            footer - before
        ))),
        _ => Ok(()),
    }
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
