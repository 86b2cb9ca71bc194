//! Table of one shard: rows × fields of (offset, length, CRC32C), packed, in a side file; and its
//! rows during the scan.

use crate::dataset::{Damage, DamageKind, Digest};
use crate::storage::sidefile::Sidefile;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Section of the entries in a side file.
pub(super) const ENTRIES: usize = 1;
/// Maximum fields of a row.
pub const FIELDS_MAX: usize = 16;
/// Maximum bytes between the parts of a sample, in total, if they share one read.
const GAP_MAX: u64 = 16 << 10;
/// Maximum entries of one shard's ledger; one more entry sums up the rest.
const LEDGER_MAX: usize = 1000;
/// Maximum number of reasons for leaving something out that have their own count.
const LEFT_OUT_MAX: usize = 64;

/// Location of one field of one sample. Entries may overlap. If the index has no checksums, nothing
/// reads the bytes of an entry before [`Index::open`](super::Index::open). So `offset` and `len`
/// may also mean something else, such as a length in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Offset in the shard.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// CRC32C of the bytes; in an index without checksums, any number of the format's own.
    pub crc: u32,
}

/// Ledger of a shard: everything that is not in the table.
#[derive(Default)]
pub(super) struct Notes {
    pub(super) damage: Vec<Damage>,
    pub(super) left_out: BTreeMap<String, u64>,
}

impl Notes {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        if self.damage.is_empty() && self.left_out.is_empty() {
            return Vec::new();
        }
        let damage: Vec<Value> = self
            .damage
            .iter()
            .map(|d| json!([d.kind.as_str(), d.offset, d.len, d.samples, d.message]))
            .collect();
        json!({ "damage": damage, "left_out": self.left_out })
            .to_string()
            .into_bytes()
    }

    pub(super) fn from_bytes(bytes: &[u8], path: &Path) -> Option<Self> {
        if bytes.is_empty() {
            return Some(Self::default());
        }
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let mut notes = Self::default();
        let damage = value.get("damage")?.as_array()?;
        let left_out = value.get("left_out")?.as_object()?;
        // A list at its maximum has one more entry, which sums up the rest.
        if damage.len() > LEDGER_MAX + 1 || left_out.len() > LEFT_OUT_MAX + 1 {
            return None;
        }
        for entry in damage {
            let number = |index: usize| entry.get(index)?.as_u64();
            let kind = DamageKind::from_str(entry.get(0)?.as_str()?)?;
            let damage = Damage::new(
                kind,
                number(1)?,
                number(2)?,
                number(3)?,
                entry.get(4)?.as_str()?,
            );
            notes.damage.push(damage.at(path));
        }
        for (reason, count) in left_out {
            notes.left_out.insert(reason.clone(), count.as_u64()?);
        }
        Some(notes)
    }
}

/// Rows of one shard during its scan.
pub struct Rows {
    fields: usize,
    /// Length of the shard.
    shard: u64,
    entries: Vec<Option<Entry>>,
    notes: Notes,
    /// Number of damaged ranges that have no entry in the ledger, because it is full.
    surplus: u64,
}

impl Rows {
    pub(super) fn new(fields: usize, shard: u64) -> Self {
        assert!(
            (1..=FIELDS_MAX).contains(&fields),
            "a format checks its fields first"
        );
        Self {
            fields,
            shard,
            entries: Vec::new(),
            notes: Notes::default(),
            surplus: 0,
        }
    }

    /// Adds a sample: one entry per field, `None` for a missing field.
    ///
    /// Errors: [`ErrorKind::User`] if the number of entries differs from the number of fields, or
    /// an entry extends past the shard's end.
    pub fn push(&mut self, entries: &[Option<Entry>]) -> Result<()> {
        let refused = |message| Err(Error::new(ErrorKind::User, Stage::Index, message));
        if entries.len() != self.fields {
            return refused(format!(
                "a sample has {} entries, but the index has {} fields",
                entries.len(),
                self.fields
            ));
        }
        let past = entries.iter().flatten().find(|entry| {
            entry
                .offset
                .checked_add(entry.len)
                .is_none_or(|end| end > self.shard)
        });
        if let Some(Entry { offset, len, .. }) = past {
            let past = format!(
                "the entry at offset {offset} has {len} bytes, but the shard ends at {}",
                self.shard
            );
            return refused(format!("sample {}: {past}", self.len()));
        }
        self.entries.extend_from_slice(entries);
        Ok(())
    }

    /// Adds a row of entries that are numbers of the format's own, not places in the shard.
    /// Errors: [`ErrorKind::User`] if the number of entries differs from the number of fields.
    #[doc(hidden)]
    pub fn push_numbers(&mut self, entries: &[Entry]) -> Result<()> {
        let shard = std::mem::replace(&mut self.shard, u64::MAX);
        let entries: Vec<_> = entries.iter().copied().map(Some).collect();
        let pushed = self.push(&entries);
        self.shard = shard;
        pushed
    }

    /// Number of samples so far.
    #[allow(clippy::len_without_is_empty, reason = "a scan begins without samples")]
    pub fn len(&self) -> usize {
        self.entries.len() / self.fields
    }

    /// Adds an entry to the ledger.
    pub fn damage(&mut self, damage: Damage) {
        let ledger = &mut self.notes.damage;
        match ledger.get_mut(LEDGER_MAX) {
            None => ledger.push(damage),
            Some(last) => {
                self.surplus += 1;
                last.message = format!(
                    "{} more entries, the last: {}",
                    self.surplus, damage.message
                );
                last.len = (damage.offset + damage.len).max(last.offset + last.len) - last.offset;
                last.samples += damage.samples;
            }
        }
    }

    /// Counts an item left out by rule: this is not damage, but the dataset reports it.
    pub fn leave_out(&mut self, reason: &str) {
        match self.notes.left_out.get_mut(reason) {
            Some(count) => *count += 1,
            None => {
                let reason = if self.notes.left_out.len() < LEFT_OUT_MAX {
                    reason
                } else {
                    "others"
                };
                *self.notes.left_out.entry(reason.to_string()).or_default() += 1;
            }
        }
    }

    /// Returns the table, in memory. `seal` completes its record.
    pub(super) fn finish(
        mut self,
        path: &Path,
        seal: impl FnOnce(&mut ShardRecord),
    ) -> Result<Table> {
        let len = self.len();
        let Ok(rows) = u32::try_from(len) else {
            let message = format!("{len} samples in one shard; the limit is {}", u32::MAX);
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
        };
        self.notes
            .damage
            .iter_mut()
            .for_each(|damage| damage.path = path.to_path_buf());
        let form = Form::for_entries(&self.entries);
        let notes = self.notes.to_bytes();
        let mut bytes = Vec::with_capacity(self.entries.len() * form.bytes());
        self.entries
            .iter()
            .for_each(|entry| form.write(*entry, &mut bytes));
        let mut record = ShardRecord {
            rows: rows.into(),
            fields: self.fields as u64,
            form: form.code(),
            notes_bytes: notes.len() as u64,
            places: places(&self.entries, self.fields),
            ..ShardRecord::default()
        };
        for (row, entries) in (0..).zip(self.entries.chunks(self.fields)) {
            let bytes = TableSpan::of(entries.iter().flatten().copied()).bytes();
            if bytes > record.bytes_max {
                record.bytes_max = bytes;
                record.largest = row;
            }
        }
        seal(&mut record);
        drop(self.entries);
        let side = Arc::new(Sidefile::held(&[
            bytemuck::bytes_of(&record),
            &bytes,
            &notes,
        ]));
        Ok(Table {
            side,
            record,
            form,
            notes: self.notes,
        })
    }
}

/// Hash of the locations of all entries.
fn places(entries: &[Option<Entry>], fields: usize) -> u64 {
    let mut digest = Digest::new("shard's table").word((entries.len() / fields) as u64);
    for entry in entries {
        let (offset, len) = entry.map_or((u64::MAX, u64::MAX), |entry| (entry.offset, entry.len));
        digest = digest.word(offset).word(len);
    }
    digest.end()
}

/// An index file's record of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct ShardRecord {
    /// Hash of the shard's path, in a file of several shards; else 0.
    pub(super) hash: u64,
    pub(super) purpose: u64,
    /// The shard's version.
    pub(super) len: u64,
    pub(super) modified: u64,
    pub(super) ends: u64,
    pub(super) rows: u64,
    pub(super) fields: u64,
    pub(super) form: u64,
    /// Bytes of the largest sample, and that sample's row.
    pub(super) bytes_max: u64,
    pub(super) largest: u64,
    /// Hash of the locations (offset and length) of all entries.
    pub(super) places: u64,
    /// Offsets of the shard's entries and notes in their sections.
    pub(super) entries: u64,
    pub(super) notes: u64,
    pub(super) notes_bytes: u64,
}

impl ShardRecord {
    /// Bytes of all entries of the shard; `None` if the record's numbers contradict each other.
    pub(super) fn entries_bytes(&self) -> Option<u64> {
        let form = Form::from_code(self.form)?;
        // A shard has no more samples than bytes.
        let possible = (self.largest < self.rows || self.rows == 0)
            && self.rows <= self.len.min(u32::MAX.into());
        self.rows
            .checked_mul(self.fields)?
            .checked_mul(form.bytes() as u64)
            .filter(|_| possible)
    }
}

/// Packed form of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Offset in units of 2^shift bytes, length, CRC.
    Compact { shift: u32 },
    /// Offset and length in two words each, the lower word first; CRC.
    Wide,
}

/// Bytes of an entry in its longest form.
const ENTRY_MAX: usize = 20;
/// Length that marks a missing entry.
const ABSENT: u32 = u32::MAX;
const WIDE: u64 = 1 << 8;

impl Form {
    fn for_entries(entries: &[Option<Entry>]) -> Self {
        let mut bits = 0;
        let mut offset_max = 0;
        let mut len_max = 0;
        for entry in entries.iter().flatten() {
            bits |= entry.offset;
            offset_max = offset_max.max(entry.offset);
            len_max = len_max.max(entry.len);
        }
        let shift = bits.trailing_zeros().min(31);
        let compact = offset_max >> shift <= u64::from(u32::MAX) && len_max < u64::from(ABSENT);
        if compact {
            Self::Compact { shift }
        } else {
            Self::Wide
        }
    }

    pub(super) fn from_code(code: u64) -> Option<Self> {
        match code {
            WIDE => Some(Self::Wide),
            shift if shift < 32 => Some(Self::Compact {
                shift: shift as u32,
            }),
            _ => None,
        }
    }

    fn code(self) -> u64 {
        match self {
            Self::Compact { shift } => shift.into(),
            Self::Wide => WIDE,
        }
    }

    /// Bytes of an entry.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Compact { .. } => 12,
            Self::Wide => ENTRY_MAX,
        }
    }

    fn write(self, entry: Option<Entry>, out: &mut Vec<u8>) {
        let Entry { offset, len, crc } = entry.unwrap_or(Entry {
            offset: 0,
            len: u64::MAX,
            crc: 0,
        });
        match self {
            Self::Compact { shift } => {
                out.extend_from_slice(bytemuck::bytes_of(&[
                    (offset >> shift) as u32,
                    len as u32,
                    crc,
                ]));
            }
            Self::Wide => {
                out.extend_from_slice(bytemuck::bytes_of(&[offset, len]));
                out.extend_from_slice(bytemuck::bytes_of(&crc));
            }
        }
    }

    /// Unpacks an entry; `bytes` are exactly its bytes.
    fn read(self, bytes: &[u8]) -> Option<Entry> {
        let (entry, absent) = match self {
            Self::Compact { shift } => {
                let [offset, len, crc]: [u32; 3] = bytemuck::pod_read_unaligned(bytes);
                (
                    Entry {
                        offset: u64::from(offset) << shift,
                        len: len.into(),
                        crc,
                    },
                    len == ABSENT,
                )
            }
            Self::Wide => {
                let [offset, len]: [u64; 2] = bytemuck::pod_read_unaligned(&bytes[..16]);
                (
                    Entry {
                        offset,
                        len,
                        crc: bytemuck::pod_read_unaligned(&bytes[16..]),
                    },
                    len == u64::MAX,
                )
            }
        };
        (!absent).then_some(entry)
    }
}

/// How a sample's parts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableSpan {
    /// One read of an extent that contains all parts.
    Shared { offset: u64, len: u64 },
    /// One read per part; holds the sum of their bytes.
    Apart(u64),
}

impl TableSpan {
    fn of(entries: impl Iterator<Item = Entry>) -> Self {
        let mut start = u64::MAX;
        let mut end = 0;
        let mut bytes = 0_u64;
        let mut count = 0;
        for entry in entries {
            start = start.min(entry.offset);
            end = end.max(entry.offset.saturating_add(entry.len));
            bytes = bytes.saturating_add(entry.len);
            count += 1;
        }
        if count > 1 && end - start <= bytes.saturating_add(GAP_MAX) {
            return Self::Shared {
                offset: start,
                len: end - start,
            };
        }
        Self::Apart(bytes)
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Shared { len, .. } => len,
            Self::Apart(bytes) => bytes,
        }
    }
}

/// Buffer for the entries of a row.
pub(super) type RowBytes = [u8; FIELDS_MAX * ENTRY_MAX];

/// The entries of a row, packed.
pub(super) struct IndexRow<'a> {
    form: Form,
    bytes: &'a [u8],
}

impl IndexRow<'_> {
    pub(super) fn entry(&self, field: usize) -> Option<Entry> {
        let each = self.form.bytes();
        self.form.read(&self.bytes[field * each..][..each])
    }

    /// How the fields are read.
    pub(super) fn span(&self) -> TableSpan {
        TableSpan::of(
            self.bytes
                .chunks_exact(self.form.bytes())
                .filter_map(|bytes| self.form.read(bytes)),
        )
    }
}

/// Table of one shard, in a side file.
pub(super) struct Table {
    pub(super) side: Arc<Sidefile>,
    pub(super) record: ShardRecord,
    pub(super) form: Form,
    pub(super) notes: Notes,
}

impl Table {
    /// Number of samples.
    pub(super) fn rows(&self) -> u32 {
        self.record.rows as u32
    }

    /// Errors: those of the side file.
    pub(super) fn entry(&self, row: usize, field: usize) -> Result<Option<Entry>> {
        let number = row as u64 * self.record.fields + field as u64;
        Ok(self
            .entries(number, &mut [0; ENTRY_MAX][..self.form.bytes()])?
            .entry(0))
    }

    /// The entries of a row, borrowed from memory or read into `room`. Errors: those of the side
    /// file.
    pub(super) fn row<'a>(&'a self, row: usize, room: &'a mut RowBytes) -> Result<IndexRow<'a>> {
        let fields = self.record.fields;
        self.entries(
            row as u64 * fields,
            &mut room[..fields as usize * self.form.bytes()],
        )
    }

    /// Reads consecutive entries, from number `first` on, as many as fill `room`.
    fn entries<'a>(&'a self, first: u64, room: &'a mut [u8]) -> Result<IndexRow<'a>> {
        let start = self.record.entries + first * self.form.bytes() as u64;
        let read = self.side.bytes(ENTRIES, start, room.len(), || room);
        let bytes = read.map_err(|error| {
            error.with_note("delete the index file, so that the shard is scanned again")
        })?;
        Ok(IndexRow {
            form: self.form,
            bytes,
        })
    }
}
