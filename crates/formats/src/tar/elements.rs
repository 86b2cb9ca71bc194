//! Lists in tar shards: members whose endings have a number are the elements of one field.
//!
//! ```text
//! shard  │ header │ frames.1.jpg │ header │ frames.0.jpg │ header │ cls │ …
//!        └─────────────── one entry of the index ────────┘
//! read   └─► members found again ─► in the order of their numbers ─► `Many`
//! ```
//!
//! Limits: numbers from 0 without gaps. The members in between are read, too,
//! so those of a list should follow each other. Invariant: the scan has checked the numbers, and
//! they are checked again when the members are read.

use super::member::{self, Member, MemberKind, Shard, Step, Stop, split};
use feedline_base::error::{Error, Result};
use feedline_core::decode::Many;
use std::ops::Range;

/// The place of the number in an ending of a list.
pub(super) const NUMBER: char = '*';

/// The element's number, if `ending` is that of an element: `frames.*.jpg` takes `frames.12.jpg`.
/// Numbers beyond 32 bits are the largest one. 0 if a pattern without a number is the ending itself.
pub(super) fn number(pattern: &str, ending: &[u8]) -> Option<u32> {
    let Some((before, after)) = pattern.split_once(NUMBER) else {
        return (pattern.as_bytes() == ending).then_some(0);
    };
    let digits = ending
        .strip_prefix(before.as_bytes())?
        .strip_suffix(after.as_bytes())?;
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| {
        digits.iter().fold(0, |number: u32, digit| {
            number
                .saturating_mul(10)
                .saturating_add(u32::from(digit - b'0'))
        })
    })
}

/// What is wrong with the ascending numbers of a list: one is missing, or there twice.
pub(super) fn wrong(sorted: impl ExactSizeIterator<Item = u32>) -> Option<String> {
    let count = sorted.len();
    let mut places = (0..).zip(sorted);
    let (expected, found) = places.find(|(expected, found)| expected != found)?;
    Some(if found > expected {
        format!("{count} members but no number {expected}")
    } else {
        format!("number {found} twice")
    })
}

impl Shard for &[u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn bytes(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..)?.get(..len))
            .ok_or_else(|| Error::decode("a list's members are cut"))
    }
}

/// Frames the elements among the members in `span`, in the order of their numbers.
///
/// Errors: [`ErrorKind::Decode`](feedline_base::error::ErrorKind::Decode) if the members are not
/// those that the scan found.
pub(super) fn frame(mut span: &[u8], patterns: &[String], out: &mut Vec<u8>) -> Result<()> {
    let mut found: Vec<(u32, Range<usize>)> = Vec::new();
    let mut at = 0;
    while at < span.len() as u64 {
        let member = match member::next(&mut span, at) {
            Ok(Step::Member(member)) => member,
            Ok(Step::End) => return Err(Error::decode("zeros among the members of a list")),
            Err(Stop::Damage(damage)) => return Err(Error::decode(damage.message)),
            Err(Stop::Failed(error)) => return Err(error),
        };
        at = member.next;
        if let Some(number) = number_of(&member, patterns) {
            let start = member.data as usize;
            found.push((number, start..start + member.len as usize));
        }
    }
    found.sort_unstable_by_key(|(number, _)| *number);
    if let Some(what) = wrong(found.iter().map(|(number, _)| *number)) {
        return Err(Error::decode(format!("a list of {what}")));
    }
    let start = out.len();
    out.resize(start + Many::head_bytes(found.len()), 0);
    let lens = found.iter().map(|(_, range)| range.len());
    Many::write_head(lens, &mut out[start..])?;
    for (_, range) in found {
        out.extend_from_slice(&span[range]);
    }
    Ok(())
}

fn number_of(member: &Member, patterns: &[String]) -> Option<u32> {
    if member.kind != MemberKind::Regular {
        return None;
    }
    let (_, ending) = split(&member.name).ok()?;
    patterns.iter().find_map(|own| number(own, &ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_takes_one_number_in_its_place() {
        for (pattern, ending, expected) in [
            ("frames.*.jpg", "frames.12.jpg", Some(12)),
            ("frames.*.jpg", "frames.007.jpg", Some(7)),
            ("*.jpg", "3.jpg", Some(3)),
            ("frames.*.jpg", "frames..jpg", None),
            ("frames.*.jpg", "frames.1a.jpg", None),
            ("frames.*.jpg", "frames.-1.jpg", None),
            ("frames.*.jpg", "frames.0000000012.jpg", Some(12)),
            ("frames.*.jpg", "frames.99999999999.jpg", Some(u32::MAX)),
            ("a.*.a", "a.a", None),
            ("jpg", "jpg", Some(0)),
            ("jpg", "1.jpg", None),
        ] {
            assert_eq!(
                number(pattern, ending.as_bytes()),
                expected,
                "{pattern} {ending}"
            );
        }
    }

    #[test]
    fn numbers_with_a_gap_or_twice_are_wrong() {
        for (numbers, expected) in [
            (&[][..], None),
            (&[0, 1, 2], None),
            (&[1], Some("1 members but no number 0")),
            (&[0, 1, 3], Some("3 members but no number 2")),
            (&[0, 1, 1, 2], Some("number 1 twice")),
        ] {
            assert_eq!(wrong(numbers.iter().copied()).as_deref(), expected);
        }
    }
}
