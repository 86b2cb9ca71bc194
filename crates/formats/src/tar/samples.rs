//! From members to samples: a sample is a run of members with the same key.
//!
//! Invariant: every sample found in the shard is either a row of the index or an entry in the
//! ledger of damage, never both; samples in the ledger are not handed out. If damage makes the
//! offset of the next header uncertain, the scan accepts no more samples: bytes of a payload may
//! look like a member.

use super::ahead::bring_headers;
use super::elements;
use super::member;
use super::member::{BLOCK, Member, MemberHeader, MemberKind, Step, Stop, split};
use feedline_base::error::Result;
use feedline_base::setting::Setting;
use feedline_core::dataset::index::{Entry, FIELDS_MAX, Rows, Scan};
use feedline_core::dataset::{Damage, DamageKind};
use std::collections::HashMap;

/// Bytes of the end marker.
const MARKER: u64 = 2 * BLOCK;
/// Record size to which most tar writers pad shards.
pub(super) const RECORD: u64 = 20 * BLOCK;
/// Maximum bytes of a class's number.
pub(super) const CLASS_BYTES_MAX: u64 = 32;

/// Maps members to one field.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    /// Accepted endings, in lower case, without the dot. Those of a list have a place for the
    /// number.
    pub(super) endings: Vec<String>,
    pub(super) required: bool,
    pub(super) len: Len,
}

/// Legal lengths of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Len {
    Any,
    /// A class: a short text.
    Class,
    /// Whole elements of `unit` bytes, at most `max` bytes.
    UpTo {
        unit: u64,
        max: u64,
    },
    Exactly(u64),
    /// Any: the members are elements of a list.
    Many,
}

impl Rule {
    /// The element's number, if the rule takes members of this ending; 0 for a field of one member.
    fn takes(&self, ending: &[u8]) -> Option<u32> {
        self.endings
            .iter()
            .find_map(|own| elements::number(own, ending))
    }
}

impl Len {
    fn wrong(self, len: u64) -> Option<String> {
        match self {
            Self::Class if len == 0 || len > CLASS_BYTES_MAX => Some(format!(
                "{len} bytes, a class has 1 to {CLASS_BYTES_MAX} bytes"
            )),
            Self::UpTo { unit, max } if !len.is_multiple_of(unit) || len > max => Some(format!(
                "{len} bytes, at most {max} and whole elements of {unit} expected"
            )),
            Self::Exactly(bytes) if len != bytes => Some(format!("{len} bytes, {bytes} expected")),
            _ => None,
        }
    }
}

/// The sample under construction.
struct Sample {
    key: Vec<u8>,
    start: u64,
    end: u64,
    entries: [Option<Entry>; FIELDS_MAX],
    /// Fields and numbers of the elements of lists.
    elements: Vec<(usize, u32)>,
    wrong: Option<(DamageKind, String)>,
}

impl Sample {
    /// Adds a member to the entry of its list, which reaches from the first member to the last.
    fn add_element(
        &mut self,
        input: &mut Scan<'_>,
        start: u64,
        end: u64,
        field: usize,
        checksums: bool,
    ) -> Result<()> {
        let entry = self.entries[field].get_or_insert(Entry {
            offset: start,
            len: 0,
            crc: 0,
        });
        let from = entry.offset + entry.len;
        let more = end - from;
        if checksums {
            let crc = input.crc(from, more)?;
            entry.crc = crc32c::crc32c_combine(entry.crc, crc, more as usize);
        }
        entry.len += more;
        Ok(())
    }

    /// What is wrong with the numbers of a list.
    fn check_elements(&self, rules: &[Rule]) -> Option<(DamageKind, String)> {
        let mut lists = (0..rules.len()).filter(|field| rules[*field].len == Len::Many);
        lists.find_map(|field| {
            let own = self.elements.iter().filter(|(of, _)| *of == field);
            let mut numbers: Vec<u32> = own.map(|(_, number)| *number).collect();
            numbers.sort_unstable();
            let what = elements::wrong(numbers.into_iter())?;
            let key = String::from_utf8_lossy(&self.key);
            let endings = rules[field].endings.join(", ");
            let message = format!("sample {key:?} has of {endings} {what}");
            Some((DamageKind::Incomplete, message))
        })
    }
}

/// Scans one shard.
pub(super) struct TarSamples<'a> {
    pub(super) rules: &'a [Rule],
    pub(super) checksums: bool,
    /// Shards may be padded with zeros to a multiple of this many bytes.
    pub(super) padding: u64,
    sample: Option<Sample>,
    /// Offset at which each key was found, to detect a key that occurs again.
    keys: HashMap<Vec<u8>, u64>,
}

impl<'a> TarSamples<'a> {
    pub(super) fn new(rules: &'a [Rule], checksums: bool, padding: u64) -> Self {
        Self {
            rules,
            checksums,
            padding,
            sample: None,
            keys: HashMap::new(),
        }
    }

    pub(super) fn scan(mut self, input: &mut Scan<'_>, rows: &mut Rows) -> Result<()> {
        if input.len() >= 2 && input.bytes(0, 2)? == [0x1f, 0x8b] {
            let message = "a gzip file: a compressed shard has no random access; unpack it first";
            rows.damage(Damage::new(
                DamageKind::Unsupported,
                0,
                input.len(),
                0,
                message,
            ));
            return Ok(());
        }
        if !self.checksums {
            bring_headers(input)?;
        }
        let mut at = 0;
        let stopped = loop {
            match member::next(input, at) {
                Ok(Step::End) => match self.tail(input, at) {
                    Ok(()) => break None,
                    Err(stop) => break Some(stop),
                },
                Ok(Step::Member(member)) => {
                    let next = member.next;
                    match self.member(input, at, member, rows) {
                        Ok(()) => at = next,
                        Err(stop) => break Some(stop),
                    }
                }
                Err(stop) => break Some(stop),
            }
        };
        match stopped {
            None => self.flush(rows),
            Some(Stop::Failed(error)) => Err(error),
            Some(Stop::Damage(damage)) => self.stop(input, rows, at, damage),
        }
    }

    /// Checks the bytes after the last member: the end marker, then zeros up to the padding.
    fn tail(&self, input: &mut Scan<'_>, at: u64) -> std::result::Result<(), Stop> {
        let stop = |kind, offset, len, message: String| {
            Err(Stop::Damage(Damage::new(kind, offset, len, 0, message)))
        };
        let tail = input.len() - at;
        if let Some(offset) = not_zero(input, at)? {
            let block = offset / BLOCK * BLOCK;
            let mut bytes = [0; BLOCK as usize];
            let whole = input.len() - block >= BLOCK;
            if whole {
                bytes.copy_from_slice(input.bytes(block, BLOCK as usize)?);
            }
            let what = match (
                offset - at < MARKER,
                whole && MemberHeader::parse(&bytes).is_ok(),
            ) {
                (true, true) => "a zeroed header before another member",
                (true, false) => "half an end marker",
                (false, true) => {
                    "an end marker or zeroed bytes, then another member (a second archive?)"
                }
                (false, false) => "nonzero bytes after the end marker",
            };
            let kind = if offset - at < MARKER {
                DamageKind::Zeroed
            } else {
                DamageKind::Trailing
            };
            return stop(kind, offset, input.len() - offset, what.into());
        }
        if tail < MARKER {
            let message =
                format!("the shard ends after {tail} bytes of its end marker of {MARKER}");
            return stop(DamageKind::Cut, at, tail, message);
        }
        let padded = |record: u64| (at + MARKER).checked_next_multiple_of(record);
        let whole = [Some(at + MARKER), padded(RECORD), padded(self.padding)];
        if !whole.contains(&Some(input.len())) {
            let message = format!(
                "{tail} zero bytes at the end, where a marker of {MARKER} or padding to a \
                 multiple of {RECORD} is expected: zeroed or cut"
            );
            let see = Setting::Padding.hint(|padding| format!("; see {padding}"));
            return stop(DamageKind::Zeroed, at, tail, message + &see);
        }
        Ok(())
    }

    fn member(
        &mut self,
        input: &mut Scan<'_>,
        at: u64,
        member: Member,
        rows: &mut Rows,
    ) -> std::result::Result<(), Stop> {
        if let MemberKind::Other(what) = member.kind {
            rows.leave_out(what);
            return Ok(());
        }
        let (key, ending) = match split(&member.name) {
            Ok(split) => split,
            // A name in an extension header has no checksum: it may leave a member out only if the
            // header's own name agrees.
            Err(rule)
                if member
                    .short_name
                    .as_ref()
                    .is_none_or(|name| split(name).is_err()) =>
            {
                rows.leave_out(rule);
                return Ok(());
            }
            Err(rule) => {
                let message = format!(
                    "member {:?} is {rule} by its long name, but not by its short name",
                    String::from_utf8_lossy(&member.name)
                );
                return Err(Stop::Damage(Damage::new(
                    DamageKind::Ambiguous,
                    at,
                    member.next - at,
                    0,
                    message,
                )));
            }
        };
        if self.sample.as_ref().is_none_or(|sample| sample.key != key) {
            self.flush(rows)?;
            self.sample = Some(self.begin(key, at));
        }
        let rules = self.rules;
        let checksums = self.checksums;
        let Some(sample) = &mut self.sample else {
            return Ok(());
        };
        sample.end = member.next;
        let taken = rules
            .iter()
            .enumerate()
            .find_map(|(field, rule)| Some((field, rule.takes(&ending)?)));
        let Some((field, number)) = taken else {
            rows.leave_out(&format!(".{}", short(&ending)));
            return Ok(());
        };
        if rules[field].len == Len::Many {
            sample.elements.push((field, number));
            sample.add_element(input, at, member.next, field, checksums)?;
            return Ok(());
        }
        if let Some(what) = rules[field].len.wrong(member.len) {
            let message = format!(
                "member {:?} has {what}",
                String::from_utf8_lossy(&member.name)
            );
            sample
                .wrong
                .get_or_insert((DamageKind::Incomplete, message));
            return Ok(());
        }
        let crc = if checksums {
            input.crc(member.data, member.len)?
        } else {
            0
        };
        if sample.entries[field]
            .replace(Entry {
                offset: member.data,
                len: member.len,
                crc,
            })
            .is_some()
        {
            let endings = rules[field].endings.join(", ");
            let message = format!(
                "two members of sample {:?} end in {endings}",
                String::from_utf8_lossy(&sample.key)
            );
            sample.wrong.get_or_insert((DamageKind::Duplicate, message));
        }
        Ok(())
    }

    fn begin(&mut self, key: &[u8], start: u64) -> Sample {
        let wrong = self.keys.get(key).map(|first| {
            let message = format!(
                "key {:?} occurred before, at offset {first}; members of a sample must \
                 follow each other",
                String::from_utf8_lossy(key)
            );
            (DamageKind::Duplicate, message)
        });
        if wrong.is_none() {
            self.keys.insert(key.to_vec(), start);
        }
        Sample {
            key: key.to_vec(),
            start,
            end: start,
            entries: [None; FIELDS_MAX],
            elements: Vec::new(),
            wrong,
        }
    }

    /// Ends the sample: it becomes a row or an entry of the ledger.
    fn flush(&mut self, rows: &mut Rows) -> Result<()> {
        let Some(sample) = self.sample.take() else {
            return Ok(());
        };
        let missing = self
            .rules
            .iter()
            .zip(&sample.entries)
            .find(|(rule, entry)| rule.required && entry.is_none());
        let unnumbered = sample.check_elements(self.rules);
        let wrong = sample.wrong.or(unnumbered).or_else(|| {
            let endings = missing?.0.endings.join(", ");
            let message = format!(
                "sample {:?} has no member that ends in {endings}",
                String::from_utf8_lossy(&sample.key)
            );
            Some((DamageKind::Incomplete, message))
        });
        match wrong {
            Some((kind, message)) => {
                rows.damage(Damage::new(
                    kind,
                    sample.start,
                    sample.end - sample.start,
                    1,
                    message,
                ));
                Ok(())
            }
            None => rows.push(&sample.entries[..self.rules.len()]),
        }
    }

    /// Ends the scan: no byte after `at` can be trusted. Keeps the sample before `at` if it is
    /// certainly complete.
    fn stop(
        &mut self,
        input: &mut Scan<'_>,
        rows: &mut Rows,
        at: u64,
        mut damage: Damage,
    ) -> Result<()> {
        let mut key = Vec::new();
        if let Some(sample) = self.sample.take() {
            key.clone_from(&sample.key);
            // More elements may follow those of a list.
            let is_open = self.rules.iter().any(|rule| rule.len == Len::Many);
            if sample.wrong.is_none()
                && !is_open
                && sample.entries[..self.rules.len()]
                    .iter()
                    .all(Option::is_some)
            {
                rows.push(&sample.entries[..self.rules.len()])?;
            } else {
                damage.samples += 1;
                damage.len = damage.offset + damage.len - sample.start.min(damage.offset);
                damage.offset = sample.start.min(damage.offset);
                let name = String::from_utf8_lossy(&key).into_owned();
                damage.message = format!("{}; sample {name:?} is incomplete", damage.message);
            }
        }
        let rest = recognise(input, at.max(damage.offset), key)?;
        damage.samples += rest;
        if input.len() > damage.offset + damage.len {
            damage.len = input.len() - damage.offset;
            damage.message = format!(
                "{}; no samples are read from there to the end of the shard",
                damage.message
            );
        }
        rows.damage(damage);
        Ok(())
    }
}

/// Once the scan accepts no more samples, it examines the bytes from `at` up to this offset. The
/// limit for stores exists because a store may report any length.
fn looked_at(input: &Scan<'_>, at: u64) -> u64 {
    const OF_OBJECT: u64 = 64 << 20;
    let most = if input.asks_a_store() {
        OF_OBJECT
    } else {
        u64::MAX
    };
    input.len().min(at.saturating_add(most))
}

/// Offset of the first nonzero byte from `at` on.
fn not_zero(input: &mut Scan<'_>, mut at: u64) -> Result<Option<u64>> {
    const ZEROES: [u8; BLOCK as usize] = [0; BLOCK as usize];
    let end = looked_at(input, at);
    while at < end {
        let len = (end - at).min(BLOCK) as usize;
        let bytes = input.bytes(at, len)?;
        if bytes != &ZEROES[..len] {
            let first = bytes.iter().position(|byte| *byte != 0).unwrap_or(0);
            return Ok(Some(at + first as u64));
        }
        at += len as u64;
    }
    Ok(None)
}

/// Estimates how many samples begin after `at`; `key` is the key of the sample before `at`.
fn recognise(input: &mut Scan<'_>, at: u64, mut key: Vec<u8>) -> Result<u64> {
    let mut at = at / BLOCK * BLOCK;
    let mut found = 0;
    let end = looked_at(input, at);
    while at + BLOCK <= end {
        let mut block = [0; BLOCK as usize];
        block.copy_from_slice(input.bytes(at, BLOCK as usize)?);
        at += BLOCK;
        let Ok(header) = MemberHeader::parse(&block) else {
            continue;
        };
        let Some((name, size)) = header.regular() else {
            continue;
        };
        if let Ok((own, _)) = split(name)
            && own != key
        {
            key = own.to_vec();
            found += 1;
        }
        let next = size
            .checked_next_multiple_of(BLOCK)
            .and_then(|padded| at.checked_add(padded));
        at = next.filter(|next| *next <= input.len()).unwrap_or(at);
    }
    Ok(found)
}

/// Shortens an ending for display.
fn short(ending: &[u8]) -> String {
    String::from_utf8_lossy(&ending[..ending.len().min(32)]).into_owned()
}
