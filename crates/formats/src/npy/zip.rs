//! The part of a zip archive's directory that `.npz` needs. Finds stored members without reading
//! them.
//!
//! ```text
//! | local header, name, extra | data | … | central directory | (zip64 end, its locator) | end of central directory |
//! ```
//!
//! Limits: a directory of 64 MiB, 65,536 members, one disk. Invariants: the directory ends where
//! its end record starts and has the end record's number of entries; no two members overlap; every
//! local header agrees with the directory. So a reader of local headers and a reader of the
//! directory see the same archive.

use crate::{fetched, number, twice};
use feedline_base::error::{ErrorKind, Result};
use feedline_core::storage::Blob;
use std::cmp::Ordering;

const END: &[u8] = b"PK\x05\x06";
const END_BYTES: u64 = 22;
const END64: &[u8] = b"PK\x06\x06";
const END64_BYTES: u64 = 56;
const LOCATOR: &[u8] = b"PK\x06\x07";
const LOCATOR_BYTES: u64 = 20;
const ENTRY: &[u8] = b"PK\x01\x02";
const ENTRY_BYTES: usize = 46;
const LOCAL: &[u8] = b"PK\x03\x04";
const LOCAL_BYTES: u64 = 30;

const DIRECTORY_MAX: u64 = 64 << 20;
const MEMBERS_MAX: u64 = 1 << 16;
/// Maximum bytes of the comment after the end record.
const COMMENT_MAX: u64 = u16::MAX as u64;

const ENCRYPTED: u64 = 1;
/// Flag of a streamed member: its sizes follow the data, and its local header has zeros instead.
const STREAMED: u64 = 1 << 3;
/// Other flags that change what the data means: patches, strong encryption, masked headers.
const STRANGE: u64 = 1 << 5 | 1 << 6 | 1 << 13;

/// A member of the archive, by its directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) method: u64,
    pub(crate) crc: u32,
    /// Length in the archive, and length when unpacked, in bytes.
    pub(crate) packed: u64,
    pub(crate) unpacked: u64,
    flags: u64,
    local: u64,
    /// Latest possible end of the member: the start of the next member or of the directory.
    limit: u64,
}

/// Reads all members, in the order of the directory.
///
/// Errors: [`ErrorKind::Truncated`] without an end record, [`ErrorKind::Decode`] for an
/// inconsistent directory.
pub(crate) fn members(input: &Blob) -> Result<Vec<Member>> {
    let directory = Directory::find(input)?;
    let bytes = input.read(directory.start, directory.size, "the central directory")?;
    let mut members = Vec::new();
    let mut rest = &bytes[..];
    for _ in 0..directory.count {
        let at = directory.start + (bytes.len() - rest.len()) as u64;
        let (member, used) = entry(input, rest, at)?;
        members.push(member);
        rest = &rest[used..];
    }
    if !rest.is_empty() {
        let at = directory.start + directory.size - rest.len() as u64;
        let message = format!(
            "the directory has bytes after its {} entries",
            directory.count
        );
        return Err(input.wrong(message, at, rest.len() as u64));
    }
    bound(input, &mut members, directory.start)?;
    Ok(members)
}

/// Offset of a stored member's data. Errors: [`ErrorKind::Decode`] if its local header and the
/// directory disagree.
pub(crate) fn data_of(input: &Blob, member: &Member) -> Result<u64> {
    let name = &member.name;
    let wrong = |message: String| Err(input.wrong(message, member.local, LOCAL_BYTES));
    if member.method != 0 {
        let how = if member.method == 8 {
            "deflated".into()
        } else {
            format!("packed by method {}", member.method)
        };
        let message =
            format!("`{name}` is {how}: write the archive with np.savez, not np.savez_compressed");
        return wrong(message);
    }
    if member.flags & (ENCRYPTED | STRANGE) != 0 {
        return wrong(format!(
            "`{name}` is encrypted or patched (flags {:#x})",
            member.flags
        ));
    }
    if member.packed != member.unpacked {
        return wrong(format!(
            "`{name}` is stored, but has {} bytes in the archive and {} unpacked",
            member.packed, member.unpacked
        ));
    }
    let head: [u8; LOCAL_BYTES as usize] = input.array(member.local, "a local header")?;
    let field = |at: usize, bytes: usize| number(&head[at..at + bytes]);
    let name_len = field(26, 2);
    let extra_len = field(28, 2);
    let rest = input.read(
        member.local + LOCAL_BYTES,
        name_len + extra_len,
        "a local header",
    )?;
    let (own_name, extra) = rest.split_at(name_len as usize);
    if &head[..4] != LOCAL
        || own_name != name.as_bytes()
        || field(6, 2) != member.flags
        || field(8, 2) != 0
    {
        return wrong(format!(
            "the local header of `{name}` is not the one that the directory names"
        ));
    }
    let mut sizes = [field(22, 4), field(18, 4)];
    let crc = field(14, 4);
    if extend(extra, &mut sizes).is_none() {
        return wrong(format!(
            "the local header of `{name}` has a broken extra field"
        ));
    }
    let same = crc == u64::from(member.crc) && sizes == [member.unpacked, member.packed];
    let left_out = member.flags & STREAMED != 0 && crc == 0 && sizes == [0, 0];
    if !same && !left_out {
        return wrong(format!(
            "the local header of `{name}` has another size or checksum than the directory"
        ));
    }
    let start = member.local + LOCAL_BYTES + name_len + extra_len;
    if start
        .checked_add(member.packed)
        .is_none_or(|end| end > member.limit)
    {
        return wrong(format!(
            "`{name}` overlaps the entry that starts at {}",
            member.limit
        ));
    }
    Ok(start)
}

struct Directory {
    start: u64,
    size: u64,
    count: u64,
}

impl Directory {
    fn find(input: &Blob) -> Result<Self> {
        let (end_at, end) = end_record(input)?;
        let field = |at: usize, bytes: usize| number(&end[at..at + bytes]);
        let mut counts = [field(8, 2), field(10, 2)];
        let mut size = field(12, 4);
        let mut start = field(16, 4);
        let mut disks = [field(4, 2), field(6, 2)];
        let mut behind = end_at;
        if let Some((at, end64)) = end64_record(input, end_at)? {
            let field = |at: usize, bytes: usize| number(&end64[at..at + bytes]);
            let fuller = [field(24, 8), field(32, 8), field(40, 8), field(48, 8)];
            let fits = |narrow: u64, limit: u64, wide: u64| narrow == limit || narrow == wide;
            if !(fits(counts[0], 0xffff, fuller[0])
                && fits(counts[1], 0xffff, fuller[1])
                && fits(size, 0xffff_ffff, fuller[2])
                && fits(start, 0xffff_ffff, fuller[3]))
            {
                return Err(input.wrong(
                    "the two end records of the archive disagree",
                    at,
                    END64_BYTES,
                ));
            }
            counts = [fuller[0], fuller[1]];
            size = fuller[2];
            start = fuller[3];
            if disks.iter().all(|disk| matches!(disk, 0 | 0xffff)) {
                disks = [field(16, 4), field(20, 4)];
            }
            behind = at;
        }
        let wrong = |message: String| Err(input.wrong(message, end_at, END_BYTES));
        if disks != [0, 0] || counts[0] != counts[1] {
            return wrong("the archive is spread over several disks".into());
        }
        if start.checked_add(size) != Some(behind) {
            return wrong(format!(
                "the directory of {size} bytes at {start} does not end where its end record \
                 starts, at {behind}"
            ));
        }
        if size > DIRECTORY_MAX || counts[0] > MEMBERS_MAX {
            let message = format!(
                "too large: a directory of {size} bytes, {} members",
                counts[0]
            );
            return Err(input.error(ErrorKind::Limit, message, start, size));
        }
        Ok(Self {
            start,
            size,
            count: counts[0],
        })
    }
}

/// Finds the end record: the last one whose comment ends exactly at the end of the file, or else,
/// like Python's zipfile, the last one with extra bytes after it. Returns its offset and bytes.
fn end_record(input: &Blob) -> Result<(u64, [u8; END_BYTES as usize])> {
    let mut longer = None;
    // Few archives have a comment.
    for window in [END_BYTES, END_BYTES + COMMENT_MAX] {
        let len = window.min(input.len());
        let start = input.len() - len;
        let tail = input.read(start, len, "the end record")?;
        for at in memchr::memmem::rfind_iter(&tail, END) {
            let rest = &tail[at..];
            let Some(end) = rest.first_chunk::<{ END_BYTES as usize }>() else {
                continue;
            };
            match (number(&end[20..22]) + END_BYTES).cmp(&(rest.len() as u64)) {
                Ordering::Equal => return Ok((start + at as u64, *end)),
                Ordering::Less => longer = longer.or(Some((start + at as u64, *end))),
                Ordering::Greater => {}
            }
        }
    }
    if let Some(found) = longer {
        return Ok(found);
    }
    fetched(input)?;
    let message = "not a zip archive, or truncated: it has no end record";
    Err(input.error(ErrorKind::Truncated, message, 0, input.len()))
}

/// Offset and bytes of the zip64 end record, if any.
fn end64_record(input: &Blob, end_at: u64) -> Result<Option<(u64, [u8; END64_BYTES as usize])>> {
    let Some(locator_at) = end_at.checked_sub(LOCATOR_BYTES) else {
        return Ok(None);
    };
    let locator: [u8; LOCATOR_BYTES as usize] = input.array(locator_at, "the zip64 locator")?;
    if &locator[..4] != LOCATOR {
        return Ok(None);
    }
    let at = number(&locator[8..16]);
    let wrong = |message: &str| Err(input.wrong(message, locator_at, LOCATOR_BYTES));
    if at.checked_add(END64_BYTES) != Some(locator_at) {
        return wrong("the zip64 locator does not point at the record before it");
    }
    let end: [u8; END64_BYTES as usize] = input.array(at, "the zip64 end record")?;
    let many_disks = number(&locator[4..8]) != 0 || number(&locator[16..20]) > 1;
    if &end[..4] != END64 || number(&end[4..12]) != END64_BYTES - 12 || many_disks {
        return wrong("the zip64 end record is broken");
    }
    Ok(Some((at, end)))
}

/// Parses the directory entry at the start of `rest`, at offset `at`. Returns it and its length.
fn entry(input: &Blob, rest: &[u8], at: u64) -> Result<(Member, usize)> {
    let wrong = |message: String| Err(input.wrong(message, at, rest.len() as u64));
    let Some(head) = rest.get(..ENTRY_BYTES).filter(|head| &head[..4] == ENTRY) else {
        return wrong("an entry of the directory is broken or missing".into());
    };
    let field = |at: usize, bytes: usize| number(&head[at..at + bytes]);
    let name_len = field(28, 2) as usize;
    let extra_len = field(30, 2) as usize;
    let comment_len = field(32, 2) as usize;
    let used = ENTRY_BYTES + name_len + extra_len + comment_len;
    let Some(tail) = rest.get(ENTRY_BYTES..used) else {
        return wrong("an entry of the zip directory is truncated".into());
    };
    let Ok(name) = std::str::from_utf8(&tail[..name_len]) else {
        return wrong("a member's name is not UTF-8".into());
    };
    // The unpacked size, packed size and offset, in the order of the zip64 extra field, which holds
    // those values that exceed 32 bits.
    let mut wide = [field(24, 4), field(20, 4), field(42, 4)];
    if extend(&tail[name_len..name_len + extra_len], &mut wide).is_none() {
        return wrong(format!("the extra field of `{name}` is broken"));
    }
    if !matches!(field(34, 2), 0 | 0xffff) {
        return wrong(format!("`{name}` lies on another disk"));
    }
    let [unpacked, packed, local] = wide;
    let flags = field(8, 2);
    let method = field(10, 2);
    let crc = field(16, 4) as u32;
    Ok((
        Member {
            name: name.into(),
            method,
            crc,
            packed,
            unpacked,
            flags,
            local,
            limit: 0,
        },
        used,
    ))
}

/// Replaces the saturated values by those in the zip64 part of an extra field; `None` if the field
/// is broken.
fn extend(mut extra: &[u8], values: &mut [u64]) -> Option<()> {
    let mut seen = false;
    while !extra.is_empty() {
        let (head, rest) = extra.split_at_checked(4)?;
        let (mut body, rest) = rest.split_at_checked(number(&head[2..]) as usize)?;
        extra = rest;
        if number(&head[..2]) != 1 {
            continue;
        }
        if std::mem::replace(&mut seen, true) {
            return None;
        }
        for value in values.iter_mut().filter(|value| **value == 0xffff_ffff) {
            let (wide, rest) = body.split_at_checked(8)?;
            *value = number(wide);
            body = rest;
        }
    }
    Some(())
}

/// Sets the `limit` of each member. Errors: duplicate names, members with the same start.
fn bound(input: &Blob, members: &mut [Member], directory: u64) -> Result<()> {
    if let Some(name) = twice(members.iter().map(|member| member.name.as_str())) {
        return Err(input.wrong(format!("two members are called `{name}`"), directory, 0));
    }
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_unstable_by_key(|index| members[*index].local);
    let mut limit = directory;
    for index in order.into_iter().rev() {
        let member = &mut members[index];
        if member.local >= limit {
            let message = format!(
                "`{}` starts at {}, where another member or the directory starts",
                member.name, member.local
            );
            return Err(input.wrong(message, member.local, LOCAL_BYTES));
        }
        member.limit = limit;
        limit = member.local;
    }
    if limit != 0 && !members.is_empty() {
        return Err(input.wrong("there are bytes before the first member", 0, limit));
    }
    Ok(())
}
