//! Table of one shard: rows × fields of (offset, length, CRC32C), packed; and its rows during the scan.

use crate::dataset::damage::{Damage, DamageKind};
use crate::error::{Error, ErrorKind, Result, Stage};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Words before the entries: the header of the index file, defined in `file`.
pub(super) const HEADER: usize = 17;
/// Maximum fields of a row.
pub const FIELDS_MAX: usize = 16;
/// Maximum bytes between two parts of a sample that share one read.
const GAP_MAX: u64 = 16 << 10;
/// Maximum entries of one shard's ledger; one more entry sums up the rest.
const LEDGER_MAX: usize = 1000;
/// Maximum reasons for leaving out that have a count of their own.
const LEFT_OUT_MAX: usize = 64;

/// Place of one field of one sample. Entries may overlap. Without checksums nothing reads an entry before
/// [`Index::open`](super::Index::open) does: its two numbers may also be others, such as a length in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Offset in the shard.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// CRC32C of the bytes; meaningless in an index without checksums.
    pub crc: u32,
}

/// Ledger of a shard: everything that is not in the table.
#[derive(Default)]
pub(super) struct Notes {
    pub(super) damage: Vec<Damage>,
    pub(super) left_out: BTreeMap<String, u64>,
}

impl Notes {
    fn to_bytes(&self) -> Vec<u8> {
        if self.damage.is_empty() && self.left_out.is_empty() {
            return Vec::new();
        }
        let entry = |d: &Damage| json!([d.kind.as_str(), d.offset, d.len, d.samples, d.message]);
        let damage: Vec<Value> = self.damage.iter().map(entry).collect();
        json!({ "damage": damage, "left_out": self.left_out }).to_string().into_bytes()
    }

    pub(super) fn from_bytes(bytes: &[u8], path: &Path) -> Option<Self> {
        if bytes.is_empty() {
            return Some(Self::default());
        }
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let mut notes = Self::default();
        for entry in value.get("damage")?.as_array()? {
            let number = |index: usize| entry.get(index)?.as_u64();
            let kind = DamageKind::from_str(entry.get(0)?.as_str()?)?;
            let damage = Damage::new(kind, number(1)?, number(2)?, number(3)?, entry.get(4)?.as_str()?);
            notes.damage.push(damage.at(path));
        }
        for (reason, count) in value.get("left_out")?.as_object()? {
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
    /// Number of damages without an entry of their own.
    surplus: u64,
}

impl Rows {
    pub(super) fn new(fields: usize, shard: u64) -> Self {
        assert!((1..=FIELDS_MAX).contains(&fields), "a format checks its fields first");
        Self { fields, shard, entries: Vec::new(), notes: Notes::default(), surplus: 0 }
    }

    /// Adds a sample: one entry per field, `None` for a missing field.
    ///
    /// Errors: [`ErrorKind::User`] for another number of entries than of fields, or an entry past the shard's end.
    pub fn push(&mut self, entries: &[Option<Entry>]) -> Result<()> {
        let refused = |message| Err(Error::new(ErrorKind::User, Stage::Index, message));
        if entries.len() != self.fields {
            return refused(format!("a sample of {} entries, the index has {} fields", entries.len(), self.fields));
        }
        let is_past = |entry: &&Entry| entry.offset.checked_add(entry.len).is_none_or(|end| end > self.shard);
        if let Some(Entry { offset, len, .. }) = entries.iter().flatten().find(is_past) {
            let past = format!("an entry of {len} bytes at offset {offset}, the shard has {}", self.shard);
            return refused(format!("sample {}: {past}", self.len()));
        }
        self.entries.extend_from_slice(entries);
        Ok(())
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
                last.message = format!("{} entries more, the last: {}", self.surplus, damage.message);
                last.len = (damage.offset + damage.len).max(last.offset + last.len) - last.offset;
                last.samples += damage.samples;
            }
        }
    }

    /// Counts something left out by rule: not damage, but the dataset reports it.
    pub fn leave_out(&mut self, reason: &str) {
        match self.notes.left_out.get_mut(reason) {
            Some(count) => *count += 1,
            None => {
                let reason = if self.notes.left_out.len() < LEFT_OUT_MAX { reason } else { "others" };
                *self.notes.left_out.entry(reason.to_string()).or_default() += 1;
            }
        }
    }

    pub(super) fn finish(mut self, path: &Path) -> Result<Table> {
        let len = self.len();
        let Ok(rows) = u32::try_from(len) else {
            let message = format!("{len} samples in one shard, {} are the limit", u32::MAX);
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
        };
        self.notes.damage.iter_mut().for_each(|damage| damage.path = path.to_path_buf());
        let form = Form::for_entries(&self.entries);
        let notes = self.notes.to_bytes();
        let mut words = vec![0_u32; HEADER];
        words.reserve_exact(self.entries.len() * form.stride() + notes.len().div_ceil(4));
        self.entries.iter().for_each(|entry| form.write(*entry, &mut words));
        words.resize(words.len() + notes.len().div_ceil(4), 0);
        let end = words.len() * 4 - notes.len().next_multiple_of(4);
        bytemuck::cast_slice_mut::<u32, u8>(&mut words)[end..end + notes.len()].copy_from_slice(&notes);
        let fields = self.fields;
        let notes_bytes = notes.len();
        let mut table = Table { words, rows, fields, form, notes_bytes, bytes_max: 0, largest: 0, notes: self.notes };
        for row in 0..len {
            let bytes = table.span(row).bytes();
            if bytes > table.bytes_max {
                (table.bytes_max, table.largest) = (bytes, row as u32);
            }
        }
        Ok(table)
    }
}

/// Packed form of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Offset in units of 2^shift bytes, length, CRC.
    Compact { shift: u32 },
    /// Offset and length in two words each, the lower first; CRC.
    Wide,
}

/// Length that marks a missing entry.
const ABSENT: u32 = u32::MAX;
const WIDE: u32 = 1 << 8;

impl Form {
    fn for_entries(entries: &[Option<Entry>]) -> Self {
        let (mut bits, mut offset_max, mut len_max) = (0, 0, 0);
        for entry in entries.iter().flatten() {
            bits |= entry.offset;
            offset_max = offset_max.max(entry.offset);
            len_max = len_max.max(entry.len);
        }
        let shift = bits.trailing_zeros().min(31);
        let compact = offset_max >> shift <= u64::from(u32::MAX) && len_max < u64::from(ABSENT);
        if compact { Self::Compact { shift } } else { Self::Wide }
    }

    pub(super) fn from_code(code: u32) -> Option<Self> {
        match code {
            WIDE => Some(Self::Wide),
            shift if shift < 32 => Some(Self::Compact { shift }),
            _ => None,
        }
    }

    pub(super) fn code(self) -> u32 {
        match self {
            Self::Compact { shift } => shift,
            Self::Wide => WIDE,
        }
    }

    /// Words of an entry.
    pub(super) fn stride(self) -> usize {
        match self {
            Self::Compact { .. } => 3,
            Self::Wide => 5,
        }
    }

    fn write(self, entry: Option<Entry>, words: &mut Vec<u32>) {
        match (self, entry) {
            (Self::Compact { .. }, None) => words.extend([0, ABSENT, 0]),
            (Self::Wide, None) => words.extend([0, 0, ABSENT, ABSENT, 0]),
            (Self::Compact { shift }, Some(e)) => words.extend([(e.offset >> shift) as u32, e.len as u32, e.crc]),
            (Self::Wide, Some(e)) => {
                words.extend([e.offset as u32, (e.offset >> 32) as u32, e.len as u32, (e.len >> 32) as u32, e.crc]);
            }
        }
    }

    fn read(self, words: &[u32]) -> Option<Entry> {
        let wide = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        match (self, words) {
            (Self::Compact { shift }, [at, len, crc]) => {
                (*len != ABSENT).then(|| Entry { offset: u64::from(*at) << shift, len: u64::from(*len), crc: *crc })
            }
            (Self::Wide, [offset, offset_high, len, len_high, crc]) => {
                let len = wide(*len, *len_high);
                (len != u64::MAX).then(|| Entry { offset: wide(*offset, *offset_high), len, crc: *crc })
            }
            _ => None,
        }
    }
}

/// Reads of a sample's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    /// One read of one extent with all parts.
    Shared { offset: u64, len: u64 },
    /// One read per part; holds the sum of their bytes.
    Apart(u64),
}

impl Span {
    fn bytes(self) -> u64 {
        match self {
            Self::Shared { len, .. } => len,
            Self::Apart(bytes) => bytes,
        }
    }
}

/// Table of one shard: the words of its index file, unchanged: header, entries, notes.
pub(super) struct Table {
    pub(super) words: Vec<u32>,
    pub(super) rows: u32,
    pub(super) fields: usize,
    pub(super) form: Form,
    pub(super) notes_bytes: usize,
    pub(super) bytes_max: u64,
    pub(super) largest: u32,
    pub(super) notes: Notes,
}

impl Table {
    pub(super) fn entry(&self, row: usize, field: usize) -> Option<Entry> {
        let stride = self.form.stride();
        let start = HEADER + (row * self.fields + field) * stride;
        self.form.read(&self.words[start..start + stride])
    }

    pub(super) fn span(&self, row: usize) -> Span {
        let (mut start, mut end, mut bytes, mut count) = (u64::MAX, 0, 0_u64, 0);
        for entry in (0..self.fields).filter_map(|field| self.entry(row, field)) {
            start = start.min(entry.offset);
            end = end.max(entry.offset.saturating_add(entry.len));
            bytes = bytes.saturating_add(entry.len);
            count += 1;
        }
        if count > 1 && end - start <= bytes.saturating_add(GAP_MAX) {
            return Span::Shared { offset: start, len: end - start };
        }
        Span::Apart(bytes)
    }
}
