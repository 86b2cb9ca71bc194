//! Keys of a listing that cannot be paths in a tree of folders: they are cut out of the page, and
//! counted.
//!
//! ```text
//! <Contents><Key>a/b.tar</Key>…</Contents> ─► stays
//! <Contents><Key>a//b.tar</Key>…</Contents> ─► cut out, noted   (empty or relative part, control character)
//! <Contents><Key>a/b/</Key>…</Contents> ────► cut out            (the mark that some tools leave for a folder)
//! ```
//!
//! The client library would refuse the whole page because of one such key. The elements have the
//! names that S3, Google's store and Azure use.

use object_store::path::Path as Key;

/// Elements of a page, each with the element of its key.
const ELEMENTS: [(&str, &str); 4] = [
    ("Contents", "Key"),
    ("CommonPrefixes", "Prefix"),
    ("Blob", "Name"),
    ("BlobPrefix", "Name"),
];

/// The page without keys that cannot be paths. `odd` gets these keys, except marks of folders.
pub(super) fn without_odd(page: String, odd: &mut Vec<String>) -> String {
    ELEMENTS.iter().fold(page, |page, (element, name)| {
        let start = format!("<{element}>");
        let end = format!("</{element}>");
        if !page.contains(&start) {
            return page;
        }
        let mut kept = String::with_capacity(page.len());
        let mut rest = page.as_str();
        while let Some((before, after)) = rest.split_once(&start) {
            kept.push_str(before);
            let Some((inside, behind)) = after.split_once(&end) else {
                return page;
            };
            rest = behind;
            let key = key_in(inside, name);
            let is_object = matches!(*element, "Contents" | "Blob");
            match key.as_deref().map(|key| (key, why_odd(key))) {
                Some((key, None)) if is_object && key.ends_with('/') => {}
                Some((key, Some(_))) => odd.push(key.into()),
                _ => kept.extend([&start, inside, &end]),
            }
        }
        kept + rest
    })
}

/// Why a key cannot be in a folder.
pub(super) fn why_odd(key: &str) -> Option<&'static str> {
    if key.contains(|c: char| c.is_ascii_control()) {
        return Some("a control character such as a tab or line break");
    }
    (key.starts_with('/') || Key::parse(key).is_err())
        .then_some("an empty part (//) or a relative one (. or ..)")
}

fn key_in(inside: &str, name: &str) -> Option<String> {
    let (_, after) = inside.split_once(&format!("<{name}>"))?;
    Some(unescaped(after.split_once(&format!("</{name}>"))?.0))
}

/// Unescapes XML text. Unknown entities stay as they are.
fn unescaped(text: &str) -> String {
    let mut pieces = text.split('&');
    let mut out = pieces.next().unwrap_or_default().to_string();
    for piece in pieces {
        let found = piece
            .split_once(';')
            .and_then(|(entity, rest)| Some((character(entity)?, rest)));
        match found {
            Some((character, rest)) => {
                out.push(character);
                out.push_str(rest);
            }
            None => {
                out.push('&');
                out.push_str(piece);
            }
        }
    }
    out
}

fn character(entity: &str) -> Option<char> {
    match entity {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => {
            let number = entity.strip_prefix('#')?;
            let hex = number
                .strip_prefix(['x', 'X'])
                .map(|hex| u32::from_str_radix(hex, 16));
            char::from_u32(hex.unwrap_or_else(|| number.parse()).ok()?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_loses_its_odd_keys_and_nothing_else() {
        let of = |element: &str, name: &str, key: &str| {
            format!("<{element}><{name}>{key}</{name}><Size>1</Size></{element}>")
        };
        for (object, prefix, name, folder) in [
            ("Contents", "CommonPrefixes", "Key", "Prefix"),
            ("Blob", "BlobPrefix", "Name", "Name"),
        ] {
            let page = |keys: &[&str], folders: &[&str]| {
                let keys: String = keys.iter().map(|key| of(object, name, key)).collect();
                let folders: String = folders.iter().map(|key| of(prefix, folder, key)).collect();
                format!("<R><Prefix>set//</Prefix>{keys}{folders}<Next>x//</Next></R>")
            };
            let mut odd = Vec::new();
            let good = ["set/a&amp;b", "set/%20 #", "set/&#252;"];
            let given = page(
                &[
                    "set/a&amp;b",
                    "/lead",
                    "set/x//y",
                    "set/%20 #",
                    "set/./f",
                    "set/d/../e",
                    "set/a&#x7f;",
                    "set/m/",
                    "set/&#252;",
                ],
                &["set/x//", "set/s/"],
            );
            assert_eq!(without_odd(given, &mut odd), page(&good, &["set/s/"]));
            odd.sort();
            assert_eq!(
                odd,
                [
                    "/lead",
                    "set/./f",
                    "set/a\u{7f}",
                    "set/d/../e",
                    "set/x//",
                    "set/x//y"
                ]
            );
        }
        for broken in ["<Contents><Key>a//b", "<Contents></Contents>", "no page"] {
            assert_eq!(without_odd(broken.into(), &mut Vec::new()), broken);
        }
    }
}
