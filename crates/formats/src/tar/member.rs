//! Strict parser of tar members, one header block after the other.
//!
//! ```text
//! offset ──next──► Member { name, where its bytes lie, where the next header is } | End
//!                     ▲ [x, g: PAX records] [L, K: GNU long names] header, padded bytes
//! ```
//!
//! Supported: v7, ustar (with prefix), GNU long names, PAX `path` and `size`, sizes in base 256.
//! Every header's checksum is verified. A shard that two readers could read differently is damaged:
//! a PAX size beside another header size, GNU and PAX names for one member, bytes after a link, …
//! Otherwise one of the readers would look for the next header at a wrong offset, or give the
//! member another name. The format has no checksum for the bytes after an extension header, so
//! their records are parsed without tolerance.

use feedline_base::error::Error;
use feedline_core::dataset::index::Scan;
use feedline_core::dataset::{Damage, DamageKind};

/// Block size: every header and padded payload is a multiple of it.
pub(super) const BLOCK: u64 = 512;
/// Maximum bytes of a long name, and of a block of PAX records.
const NAME_MAX: u64 = 64 << 10;
const PAX_MAX: u64 = 1 << 20;
/// First size that does not fit the octal digits of a header.
const OCTAL_END: u64 = 1 << 33;

/// Reason why the scan stops.
pub(super) enum Stop {
    Damage(Damage),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

type Result<T> = std::result::Result<T, Stop>;

fn damage<T>(kind: DamageKind, offset: u64, len: u64, message: impl Into<String>) -> Result<T> {
    Err(Stop::Damage(Damage::new(kind, offset, len, 0, message)))
}

/// Bytes with members: a shard that is scanned, or a part of one in memory.
pub(super) trait Shard {
    fn len(&self) -> u64;

    /// Errors: the bytes are not there, or cannot be read.
    fn bytes(&mut self, offset: u64, len: usize) -> feedline_base::error::Result<&[u8]>;
}

impl Shard for Scan<'_> {
    fn len(&self) -> u64 {
        Scan::len(self)
    }

    fn bytes(&mut self, offset: u64, len: usize) -> feedline_base::error::Result<&[u8]> {
        Scan::bytes(self, offset, len)
    }
}

/// What the shard contains at an offset.
pub(super) enum Step {
    Member(Member),
    /// A block of zeros instead of a header.
    End,
}

/// One member.
pub(super) struct Member {
    pub(super) name: Vec<u8>,
    /// Name in the member's own header, if an extension header gives another.
    pub(super) short_name: Option<Vec<u8>>,
    pub(super) kind: MemberKind,
    /// Offset and length of the data.
    pub(super) data: u64,
    pub(super) len: u64,
    /// Offset of the next header.
    pub(super) next: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberKind {
    Regular,
    /// A member without bytes of its own. The string says its kind.
    Other(&'static str),
}

/// Splits a member's name into its key (the path up to the first dot after the last slash) and its
/// ending (the rest, in lower case). `Err` names the rule that keeps the name out of all samples.
pub(super) fn split(name: &[u8]) -> std::result::Result<(&[u8], Vec<u8>), &'static str> {
    let base = name
        .iter()
        .rposition(|byte| *byte == b'/')
        .map_or(0, |slash| slash + 1);
    // WebDataset's notes: `__name__`, or a folder of that name.
    let first = name.split(|byte| *byte == b'/').next().unwrap_or_default();
    if first.len() >= 4 && first.starts_with(b"__") && first.ends_with(b"__") {
        return Err("notes");
    }
    match name[base..].iter().position(|byte| *byte == b'.') {
        Some(0) => Err("hidden"),
        Some(dot) => Ok((
            &name[..base + dot],
            name[base + dot + 1..].to_ascii_lowercase(),
        )),
        None => Err("without ending"),
    }
}

/// Parses the member at `start`: the offset of its first extension header, or of its own header.
pub(super) fn next(scan: &mut impl Shard, start: u64) -> Result<Step> {
    let mut at = start;
    let mut long: Option<Vec<u8>> = None;
    let mut long_link = false;
    let mut pax: Option<Pax> = None;
    loop {
        let block = block(scan, start, at)?;
        if block == [0; BLOCK as usize] {
            if at == start {
                return Ok(Step::End);
            }
            return damage(
                DamageKind::Header,
                start,
                at - start,
                "an extension header, then no member",
            );
        }
        let header = match MemberHeader::parse(&block) {
            Ok(header) => header,
            Err((kind, message)) => return damage(kind, at, BLOCK, message),
        };
        let twice = |what: &str| {
            damage(
                DamageKind::Ambiguous,
                at,
                BLOCK,
                format!("{what} for the same member"),
            )
        };
        match header.flag {
            b'L' | b'K' => {
                let bytes = extension(scan, at, header.size, NAME_MAX)?;
                let name = bytes
                    .split(|byte| *byte == 0)
                    .next()
                    .unwrap_or_default()
                    .to_vec();
                if bytes[name.len()..].iter().any(|byte| *byte != 0) {
                    return damage(
                        DamageKind::Header,
                        at,
                        BLOCK,
                        "a GNU long name with bytes after its end",
                    );
                }
                let again = if header.flag == b'L' {
                    long.replace(name).is_some()
                } else {
                    std::mem::replace(&mut long_link, true)
                };
                if again {
                    return twice("two GNU long names");
                }
            }
            b'x' => {
                let records = Pax::parse(extension(scan, at, header.size, PAX_MAX)?, at)?;
                if pax.replace(records).is_some() {
                    return twice("two PAX headers");
                }
            }
            b'g' => {
                let records = Pax::parse(extension(scan, at, header.size, PAX_MAX)?, at)?;
                if pax.is_some() || long.is_some() || long_link {
                    return twice("a global PAX header between the headers");
                }
                if records.path.is_some() || records.size.is_some() {
                    return damage(
                        DamageKind::Ambiguous,
                        at,
                        BLOCK,
                        "a global PAX header with a path or size for all members",
                    );
                }
            }
            _ => {
                return member(scan.len(), at, header, long, pax.unwrap_or_default())
                    .map(Step::Member);
            }
        }
        // `extension` has checked that the bytes are within the shard.
        at += BLOCK + header.size.next_multiple_of(BLOCK);
    }
}

/// Reads one header block.
fn block(scan: &mut impl Shard, start: u64, at: u64) -> Result<[u8; BLOCK as usize]> {
    let rest = scan.len() - at;
    if rest >= BLOCK {
        let mut block = [0; BLOCK as usize];
        block.copy_from_slice(scan.bytes(at, BLOCK as usize)?);
        return Ok(block);
    }
    match (rest, at == start) {
        (0, true) => damage(
            DamageKind::NoEnd,
            at,
            0,
            "the shard ends without its end marker (1024 zero bytes): members after it \
             may be lost",
        ),
        (0, false) => damage(
            DamageKind::Cut,
            start,
            at - start,
            "the shard ends after an extension header",
        ),
        _ => damage(
            DamageKind::Cut,
            at,
            rest,
            format!("the shard ends after {rest} bytes of a header of 512"),
        ),
    }
}

/// Reads the payload of an extension header.
fn extension(scan: &mut impl Shard, at: u64, size: u64, limit: u64) -> Result<&[u8]> {
    if size > limit {
        let message = format!("an extension header of {size} bytes; the limit is {limit}");
        return damage(DamageKind::Header, at, BLOCK, message);
    }
    room(scan.len(), at, size)?;
    Ok(scan.bytes(at + BLOCK, size as usize)?)
}

/// Offset of the header after the one at `at`; damage if the shard ends before it.
fn room(shard: u64, at: u64, size: u64) -> Result<u64> {
    let next = size
        .checked_next_multiple_of(BLOCK)
        .and_then(|padded| (at + BLOCK).checked_add(padded));
    match next.filter(|next| *next <= shard) {
        Some(next) => Ok(next),
        None => {
            let there = shard - at - BLOCK;
            let message = format!(
                "a member of {size} bytes (padded to blocks of 512), the shard has {there} left"
            );
            damage(DamageKind::Cut, at, shard - at, message)
        }
    }
}

fn member(
    shard: u64,
    at: u64,
    header: MemberHeader,
    long: Option<Vec<u8>>,
    pax: Pax,
) -> Result<Member> {
    let ambiguous = |message: String| damage(DamageKind::Ambiguous, at, BLOCK, message);
    let kind = match header.flag {
        b'0' | 0 | b'7' => MemberKind::Regular,
        b'1' => MemberKind::Other("link"),
        b'2' => MemberKind::Other("symlink"),
        b'3' | b'4' => MemberKind::Other("device"),
        b'5' => MemberKind::Other("folder"),
        b'6' => MemberKind::Other("FIFO"),
        b'V' => MemberKind::Other("volume name"),
        flag => {
            let what = match flag {
                b'S' => "a sparse file (GNU)".to_string(),
                b'M' => "a file continued from another volume (GNU)".into(),
                flag => format!("type flag {:?}", flag as char),
            };
            return damage(
                DamageKind::Unsupported,
                at,
                BLOCK,
                format!("{what}: not supported"),
            );
        }
    };
    if pax.sparse {
        return damage(
            DamageKind::Unsupported,
            at,
            BLOCK,
            "a sparse file (PAX): not supported",
        );
    }
    if long.is_some() && (pax.path.is_some() || pax.size.is_some()) {
        return ambiguous(
            "the member has both a GNU long name and a PAX path or size; tar readers \
             disagree which one counts"
                .into(),
        );
    }
    let size = match pax.size {
        // The sizes may differ in one case only: the size does not fit the header, so the writer
        // put 0.
        Some(size) if size != header.size && !(size >= OCTAL_END && header.size == 0) => {
            return ambiguous(format!(
                "{size} bytes by the PAX header, {} by the header itself",
                header.size
            ));
        }
        Some(size) => size,
        None => header.size,
    };
    let (name, short_name) = match long.or(pax.path) {
        Some(name) => (name, Some(header.name)),
        None => (header.name, None),
    };
    if name.is_empty() {
        return damage(DamageKind::Header, at, BLOCK, "a member without a name");
    }
    // Old writers mark folders this way.
    let kind = if name.ends_with(b"/") && kind == MemberKind::Regular {
        MemberKind::Other("folder")
    } else {
        kind
    };
    if let (MemberKind::Other(what), 1..) = (kind, size) {
        return ambiguous(format!(
            "a {what} with {size} bytes: some readers skip them, others do not"
        ));
    }
    Ok(Member {
        name,
        short_name,
        kind,
        data: at + BLOCK,
        len: size,
        next: room(shard, at, size)?,
    })
}

/// Parsed fields of a header block.
pub(super) struct MemberHeader {
    name: Vec<u8>,
    /// Payload length.
    pub(super) size: u64,
    flag: u8,
}

impl MemberHeader {
    /// Checks and parses a block that is not all zero.
    pub(super) fn parse(
        block: &[u8; BLOCK as usize],
    ) -> std::result::Result<Self, (DamageKind, String)> {
        let wrong = |message: String| Err((DamageKind::Header, message));
        let found: u64 = block[..148]
            .iter()
            .chain(&block[156..])
            .map(|byte| u64::from(*byte))
            .sum::<u64>()
            + 8 * 32;
        match number(&block[148..156]) {
            Ok(stored) if stored == found => {}
            Ok(stored) => {
                return wrong(format!("header checksum {stored} expected, {found} found"));
            }
            Err(what) => return wrong(format!("not a header: {what} as its checksum")),
        }
        let size = match number(&block[124..136]) {
            Ok(size) => size,
            Err(what) => return wrong(format!("{what} as the size")),
        };
        let flag = block[156];
        let text = |range: std::ops::Range<usize>| {
            block[range]
                .split(|byte| *byte == 0)
                .next()
                .unwrap_or_default()
        };
        let mut name = text(0..100).to_vec();
        match &block[257..263] {
            b"ustar\0" => {
                let prefix = text(345..500);
                if !prefix.is_empty() {
                    name = [prefix, b"/", &name].concat();
                }
            }
            // These formats have no prefix, but some readers take one from any header.
            b"ustar " | b"\0\0\0\0\0\0"
                if matches!(flag, b'0' | 0 | b'7') && !text(345..500).is_empty() =>
            {
                return Err((
                    DamageKind::Ambiguous,
                    "a header of GNU or v7 tar with a prefix".into(),
                ));
            }
            b"ustar " | b"\0\0\0\0\0\0" => {}
            magic => {
                return wrong(format!(
                    "magic {:?}: not v7, ustar or GNU tar",
                    String::from_utf8_lossy(magic)
                ));
            }
        }
        Ok(Self { name, size, flag })
    }

    /// Whether the payload belongs to the next header.
    pub(super) fn extends(&self) -> bool {
        matches!(self.flag, b'x' | b'g' | b'L' | b'K')
    }

    /// Name and payload length of a regular file, for estimates; `None` for other members.
    pub(super) fn regular(&self) -> Option<(&[u8], u64)> {
        matches!(self.flag, b'0' | 0 | b'7').then_some((&self.name, self.size))
    }
}

/// Parses a number in octal digits (leading spaces, trailing spaces or NULs) or in base 256.
fn number(field: &[u8]) -> std::result::Result<u64, String> {
    let wrong = || format!("{:?}", String::from_utf8_lossy(field));
    if field[0] & 0x80 != 0 {
        let (high, low) = field[1..].split_at(field.len().saturating_sub(9));
        if field[0] != 0x80 || high.iter().any(|byte| *byte != 0) {
            return Err("a negative number or one over 2^64".into());
        }
        return Ok(low
            .iter()
            .fold(0, |number, byte| number << 8 | u64::from(*byte)));
    }
    let start = field
        .iter()
        .position(|byte| *byte != b' ')
        .ok_or_else(wrong)?;
    let digits = field[start..]
        .iter()
        .take_while(|byte| matches!(byte, b'0'..=b'7'))
        .count();
    let rest = &field[start + digits..];
    if digits == 0 || rest.iter().any(|byte| !matches!(byte, 0 | b' ')) {
        return Err(wrong());
    }
    // At most 12 digits of 3 bits.
    Ok(field[start..start + digits]
        .iter()
        .fold(0, |number, digit| number << 3 | u64::from(digit - b'0')))
}

/// Parsed PAX records.
#[derive(Default)]
struct Pax {
    path: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// Keywords of the standard. All others must belong to a vendor, see [`vendor`].
const KEYWORDS: [&[u8]; 13] = [
    b"atime",
    b"charset",
    b"comment",
    b"ctime",
    b"gid",
    b"gname",
    b"hdrcharset",
    b"linkpath",
    b"mtime",
    b"path",
    b"size",
    b"uid",
    b"uname",
];

impl Pax {
    fn parse(bytes: &[u8], at: u64) -> Result<Self> {
        let mut pax = Self::default();
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some((keyword, value, after)) = record(rest) else {
                let offset = at + BLOCK + (bytes.len() - rest.len()) as u64;
                return damage(
                    DamageKind::Header,
                    offset,
                    rest.len() as u64,
                    "not a PAX record (LENGTH KEY=VALUE)",
                );
            };
            rest = after;
            if let Err((kind, message)) = pax.take(keyword, value) {
                return damage(kind, at, BLOCK + bytes.len() as u64, message);
            }
        }
        Ok(pax)
    }

    fn take(
        &mut self,
        keyword: &[u8],
        value: &[u8],
    ) -> std::result::Result<(), (DamageKind, String)> {
        let ambiguous =
            |what: &str| Err((DamageKind::Ambiguous, format!("{what} in a PAX header")));
        match keyword {
            b"path" if value.is_empty() || value.contains(&0) => {
                ambiguous("an empty path or one with a NUL")
            }
            b"path" => match self.path.replace(value.to_vec()) {
                Some(_) => ambiguous("two paths"),
                None => Ok(()),
            },
            b"size" => match decimal(value).map(|size| self.size.replace(size)) {
                Some(None) => Ok(()),
                Some(Some(_)) => ambiguous("two sizes"),
                None => Err((
                    DamageKind::Header,
                    format!("PAX size {:?}", String::from_utf8_lossy(value)),
                )),
            },
            _ if keyword.starts_with(b"GNU.sparse.") => {
                self.sparse = true;
                Ok(())
            }
            _ if KEYWORDS.contains(&keyword) || vendor(keyword) => Ok(()),
            _ => {
                let message = format!("unknown PAX keyword {:?}", String::from_utf8_lossy(keyword));
                Err((DamageKind::Header, message))
            }
        }
    }
}

/// Whether a keyword is `VENDOR.keyword` or one of the lower-case families.
fn vendor(keyword: &[u8]) -> bool {
    let Some(dot) = keyword.iter().position(|byte| *byte == b'.') else {
        return false;
    };
    let name = &keyword[..dot];
    let capitals = name.len() > 1
        && name
            .iter()
            .all(|byte| byte.is_ascii_uppercase() || *byte == b'_');
    capitals || matches!(name, b"realtime" | b"security" | b"com")
}

/// Parses `LENGTH KEY=VALUE\n` at the start of `bytes` into key, value and the remaining bytes.
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(8).position(|byte| *byte == b' ')?;
    let len = usize::try_from(decimal(&bytes[..space])?).ok()?;
    if len <= space + 1 || len > bytes.len() {
        return None;
    }
    let (record, after) = bytes.split_at(len);
    let record = record[space + 1..].strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], after))
}

fn decimal(digits: &[u8]) -> Option<u64> {
    let canonical = !digits.is_empty()
        && digits.iter().all(u8::is_ascii_digit)
        && (digits.len() == 1 || digits[0] != b'0');
    canonical
        .then(|| std::str::from_utf8(digits).ok()?.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_split_into_keys_and_endings_like_webdataset() {
        type Split = std::result::Result<(&'static str, &'static str), &'static str>;
        let table: [(&str, Split); 11] = [
            ("a.jpg", Ok(("a", "jpg"))),
            ("a.seg.PNG", Ok(("a", "seg.png"))),
            ("d.x/a.jpg", Ok(("d.x/a", "jpg"))),
            ("../../etc/a.jpg", Ok(("../../etc/a", "jpg"))),
            ("./a.", Ok(("./a", ""))),
            ("a", Err("without ending")),
            ("d.x/a", Err("without ending")),
            (".a.jpg", Err("hidden")),
            ("d/._a.jpg", Err("hidden")),
            ("__notes__", Err("notes")),
            ("__notes__/a.jpg", Err("notes")),
        ];
        for (name, expected) in table {
            let found = split(name.as_bytes());
            let found = found.map(|(key, ending)| (key.to_vec(), ending));
            assert_eq!(
                found,
                expected.map(|(key, ending)| (key.as_bytes().to_vec(), ending.as_bytes().to_vec())),
                "{name}"
            );
        }
    }
}
