//! Lines, values and files against tables and naive oracles.

use super::json::{DEPTH_MAX, check};
use super::path::KeyPath;
use super::value::{Numbers, Take};
use super::*;
use ErrorKind::{Config, Decode, Limit, Shape, Truncated};
use feedline_core::dataset::sample::{Plain, read};
use feedline_core::decode::Many;
use feedline_core::tensor::DType;
use proptest::prelude::*;
use std::io::Write;

fn text(path: &str) -> Take {
    Take::Text(KeyPath::parse(path).unwrap())
}

fn numbers(field: Field, path: &str) -> Take {
    Take::Numbers(KeyPath::parse(path).unwrap(), Numbers::of(&field).unwrap())
}

fn opened(take: &Take, line: &[u8], missing: bool) -> Result<Vec<u8>> {
    check(line)?;
    let mut buffer = Vec::new();
    let bytes = take.open(line, missing, &mut buffer)?.to_vec();
    let most = take.made_max(line.len() as u64);
    assert!(buffer.len() as u64 <= most, "{} over {most}", buffer.len());
    Ok(bytes)
}

fn texts(framed: &[u8]) -> Vec<String> {
    let many = Many::parse(framed).unwrap();
    many.iter()
        .map(|text| String::from_utf8(text.to_vec()).unwrap())
        .collect()
}

#[test]
fn a_line_is_one_object_or_an_error_with_its_place() {
    let deep = |levels: u32| {
        let lists = levels as usize - 1;
        format!(r#"{{"a":{}1{}}}"#, "[".repeat(lists), "]".repeat(lists))
    };
    let good = [
        r#"{}"#,
        " {\t} \r",
        r#"{"a":[1,-0.5e+3,NaN,-Infinity,true,null,{"b":"\u00e9\n\ud800"}]}"#,
        &deep(DEPTH_MAX),
    ];
    for line in good {
        check(line.as_bytes()).unwrap();
    }
    let bad: [(&[u8], ErrorKind, u64); 24] = [
        (b"", Truncated, 0),
        (b"{", Truncated, 1),
        (br#"{"a":"x"#, Truncated, 5),
        (br#"{"a":[1,2"#, Truncated, 9),
        (br#"{"a"}"#, Decode, 4),
        (br#"{"a":1,}"#, Decode, 7),
        (br#"{"a":[1,]}"#, Decode, 8),
        (br#"{"a":1]"#, Decode, 6),
        (br#"{"a":[1}"#, Decode, 7),
        (br#"{"a":01}"#, Decode, 5),
        (br#"{"a":1.}"#, Decode, 7),
        (br#"{"a":+1}"#, Decode, 5),
        (br#"{"a":nul}"#, Decode, 5),
        (br#"{"a":"\x"}"#, Decode, 6),
        (br#"{"a":"\u12g4"}"#, Decode, 6),
        (b"{\"a\":\"\t\"}", Decode, 6),
        (b"{\"a\":\"\0\"}", Decode, 6),
        (b"{\"a\":\"\xff\"}", Decode, 6),
        (b"\0\0\0", Decode, 0),
        (b"\xef\xbb\xbf{}", Decode, 0),
        (br#"{} {}"#, Decode, 3),
        (b"{a:1}", Decode, 1),
        (br#"[1]"#, Shape, 0),
        (br#""a""#, Shape, 0),
    ];
    for (line, kind, at) in bad {
        let error = check(line).unwrap_err();
        let shown = String::from_utf8_lossy(line);
        assert_eq!(
            (error.kind(), error.site().offset),
            (kind, Some(at)),
            "{shown}: {error}"
        );
    }
    let error = check(deep(DEPTH_MAX + 1).as_bytes()).unwrap_err();
    assert_eq!(error.kind(), Limit);
}

#[test]
fn values_are_found_by_their_path() {
    let line = br#" {"a.b":{"c":[{"x":"1"},{"x":"\u0032","y":0},{"x":""}]},"t":"old","t":"\ud83d\ude00\n\/",
        "te\u0078t":"esc","n":{"m":[[1,2],[3,4]]},"s":[1,"]",{"q":"}"}],"z":null, "last" : "z" }"#;
    for (path, expected) in [
        ("t", "\u{1f600}\n/"),
        ("text", "esc"),
        ("last", "z"),
        (r#""a.b".c[1].x"#, "2"),
        (r#""\u0074ext""#, "esc"),
        ("s[2].q", "}"),
    ] {
        let found = opened(&text(path), line, false).unwrap();
        assert_eq!(String::from_utf8(found).unwrap(), expected, "{path}");
    }
    let list = Take::Texts(KeyPath::parse(r#""a.b".c[].x"#).unwrap(), 3);
    assert_eq!(texts(&opened(&list, line, false).unwrap()), ["1", "2", ""]);
    let raw = Take::Json(KeyPath::parse("s").unwrap());
    assert_eq!(opened(&raw, line, false).unwrap(), br#"[1,"]",{"q":"}"}]"#);
    let square = numbers(Field::fixed("m", DType::U8, [2, 2]), "n.m");
    assert_eq!(opened(&square, line, false).unwrap(), [1, 2, 3, 4]);
    let column = numbers(Field::up_to("m", DType::U8, 9), "n.m[][0]");
    assert_eq!(opened(&column, line, false).unwrap(), [1, 3]);
}

#[test]
fn a_path_that_cannot_be_is_refused() {
    for path in [
        "", ".", "a.", "a..b", "[]", "a[", "a[x]", "a]b", "a\"b", "\"a", r#""\x""#, "a:b",
    ] {
        assert_eq!(KeyPath::parse(path).unwrap_err().kind(), Config, "{path}");
    }
    assert!(KeyPath::parse(&"a.".repeat(40)).is_err());
    assert!(Jsonl::builder().text("a[]").open_bytes(*b"{}").is_err());
    assert!(Jsonl::builder().texts("a", 3).open_bytes(*b"{}").is_err());
    assert!(
        Jsonl::builder()
            .text("a")
            .json("a")
            .open_bytes(*b"{}")
            .is_err()
    );
}

#[test]
fn numbers_come_only_whole_and_in_range() {
    let scalar = |dtype| numbers(Field::fixed("n", dtype, []), "n");
    let line = |value: &str| format!(r#"{{"n":{value}}}"#).into_bytes();
    type Row = (DType, &'static str, std::result::Result<Vec<u8>, ErrorKind>);
    let rows: [Row; 22] = [
        (DType::U8, "255", Ok(vec![255])),
        (DType::U8, "256", Err(Decode)),
        (DType::U8, "-1", Err(Decode)),
        (DType::I8, "-128", Ok(vec![128])),
        (
            DType::I64,
            "-9223372036854775808",
            Ok(i64::MIN.to_ne_bytes().into()),
        ),
        (DType::I64, "9223372036854775808", Err(Decode)),
        (
            DType::U64,
            "18446744073709551615",
            Ok(u64::MAX.to_ne_bytes().into()),
        ),
        (DType::U64, "18446744073709551616", Err(Decode)),
        (DType::I32, "-0", Ok(vec![0; 4])),
        (DType::I32, "1.0", Err(Shape)),
        (DType::I32, "1e2", Err(Shape)),
        (DType::I32, "true", Err(Shape)),
        (DType::I32, "NaN", Err(Shape)),
        (DType::I32, "\"1\"", Err(Shape)),
        (DType::I32, "[1]", Err(Shape)),
        (DType::Bool, "true", Ok(vec![1])),
        (DType::Bool, "1", Err(Shape)),
        (DType::F32, "1e38", Ok(1e38_f32.to_ne_bytes().into())),
        (DType::F32, "1e39", Err(Decode)),
        (DType::F64, "-1e400", Err(Decode)),
        (
            DType::F64,
            "Infinity",
            Ok(f64::INFINITY.to_ne_bytes().into()),
        ),
        (DType::F16, "65504", Ok(vec![0xff, 0x7b])),
    ];
    for (dtype, value, expected) in rows {
        let found = opened(&scalar(dtype), &line(value), false);
        assert_eq!(
            found.map_err(|error| error.kind()),
            expected,
            "{dtype} {value}"
        );
    }
    let nan = opened(&scalar(DType::F32), &line("NaN"), false).unwrap();
    assert!(f32::from_ne_bytes(nan.try_into().unwrap()).is_nan());
}

#[test]
fn counts_and_missing_values_are_errors_or_zeros() {
    let pair = numbers(Field::fixed("n", DType::U8, [2]), "n");
    let some = numbers(Field::up_to("n", DType::U8, 2), "n");
    let each = numbers(Field::up_to("n", DType::U8, 2), "n[].x");
    let list = Take::Texts(KeyPath::parse("n[].x").unwrap(), 2);
    for (take, line, zeros) in [
        (&pair, r#"{"n":[1]}"#, None),
        (&pair, r#"{"n":[1,2,3]}"#, None),
        (&pair, r#"{"n":1}"#, None),
        (&pair, r#"{}"#, Some(vec![0, 0])),
        (&pair, r#"{"n":null}"#, Some(vec![0, 0])),
        (&pair, r#"{"n":[1,null]}"#, None),
        (&some, r#"{"n":[1,2,3]}"#, None),
        (&some, r#"{"m":1}"#, Some(vec![])),
        (&each, r#"{"n":[{"x":7},{}]}"#, Some(vec![7, 0])),
        (&each, r#"{"n":null}"#, Some(vec![])),
        (&each, r#"{"n":[3]}"#, None),
        (&each, r#"{"n":{}}"#, None),
        (&list, r#"{"n":[{"x":"a"},{"x":"b"},{"x":"c"}]}"#, None),
        (&list, r#"{"n":[{"x":1}]}"#, None),
        (&text("n"), r#"{"n":1}"#, None),
        (&text("n"), r#"{"n":null}"#, Some(vec![])),
        (&text("n.m"), r#"{"n":"m"}"#, None),
        (&text("n[1]"), r#"{"n":["a"]}"#, Some(vec![])),
    ] {
        let error = opened(take, line.as_bytes(), false).unwrap_err();
        assert_eq!(error.kind(), Shape, "{line}: {error}");
        assert!(error.site().offset.is_some(), "{error}");
        assert_eq!(opened(take, line.as_bytes(), true).ok(), zeros, "{line}");
    }
    let half = opened(&text("n"), br#"{"n":"\udc00"}"#, false).unwrap_err();
    assert!(
        half.to_string().contains("half of a surrogate pair"),
        "{half}"
    );
}

/// A value and one of its texts.
#[derive(Clone, Debug)]
enum Tree {
    Word(&'static str),
    Text(String),
    List(Vec<Tree>),
    Object(Vec<(String, Tree)>),
}

fn any_text() -> impl Strategy<Value = String> {
    let letters = prop_oneof![
        any::<char>(),
        prop::char::range('a', 'c'),
        Just('"'),
        Just('\\'),
        Just('\0'),
    ];
    prop::collection::vec(letters, 0..40).prop_map(|letters| letters.into_iter().collect())
}

fn any_tree() -> impl Strategy<Value = Tree> {
    const WORDS: [&str; 7] = [
        "0",
        "-1.5e3",
        "true",
        "null",
        "NaN",
        "Infinity",
        "12345678901234567890",
    ];
    let leaf = prop_oneof![
        prop::sample::select(&WORDS[..]).prop_map(Tree::Word),
        any_text().prop_map(Tree::Text),
    ];
    let key = prop::sample::select(&["a", "b", "c.d", "\u{e9}", ""][..]);
    leaf.prop_recursive(4, 40, 6, move |inner| {
        let member = (key.clone().prop_map(String::from), inner.clone());
        prop_oneof![
            prop::collection::vec(inner, 0..6).prop_map(Tree::List),
            prop::collection::vec(member, 0..6).prop_map(Tree::Object),
        ]
    })
}

/// Writes a string with escapes that `style` chooses.
fn write_text(text: &str, style: u8, out: &mut String) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            '\n' if style & 1 == 0 => out.push_str("\\n"),
            _ if letter < ' ' || style & 2 == 2 => {
                let mut units = [0; 2];
                for unit in letter.encode_utf16(&mut units) {
                    *out += &format!("\\u{unit:04x}");
                }
            }
            _ => out.push(letter),
        }
    }
    out.push('"');
}

impl Tree {
    fn write(&self, style: u8, out: &mut String) {
        let space = if style & 4 == 4 { " \t" } else { "" };
        match self {
            Tree::Word(word) => out.push_str(word),
            Tree::Text(text) => write_text(text, style, out),
            Tree::List(list) => {
                out.push('[');
                for (index, one) in list.iter().enumerate() {
                    *out += if index > 0 { "," } else { "" };
                    *out += space;
                    one.write(style, out);
                    *out += space;
                }
                out.push(']');
            }
            Tree::Object(members) => {
                out.push('{');
                for (index, (key, value)) in members.iter().enumerate() {
                    *out += if index > 0 { "," } else { "" };
                    *out += space;
                    write_text(key, style, out);
                    *out += space;
                    out.push(':');
                    *out += space;
                    value.write(style, out);
                }
                *out += space;
                out.push('}');
            }
        }
    }

    /// The last member with this key.
    fn get(&self, key: &str) -> Option<&Tree> {
        match self {
            Tree::Object(members) => members
                .iter()
                .rfind(|(name, _)| name == key)
                .map(|(_, v)| v),
            _ => None,
        }
    }
}

fn as_text(tree: Option<&Tree>) -> Option<String> {
    match tree {
        Some(Tree::Text(text)) => Some(text.clone()),
        _ => None,
    }
}

/// Text and id of every sample, by chunks if there are some.
fn all(lines: &Jsonl) -> Result<Vec<Vec<Vec<u8>>>> {
    if lines.plans.is_none() {
        return (0..lines.len()).map(|id| read(lines, id)).collect();
    }
    let mut rows = Vec::new();
    for chunk in 0..lines.starts().len() - 1 {
        let open = Plain::new(lines).chunk(chunk)?;
        let row = |row| {
            (0..2)
                .map(|field| open.row(field, row).unwrap().to_vec())
                .collect()
        };
        rows.extend((0..open.rows()).map(row));
    }
    Ok(rows)
}

fn pair() -> JsonlBuilder {
    Jsonl::builder()
        .text("t")
        .numbers(Field::fixed("n", DType::U32, []), "n")
}

fn packed(packing: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for part in parts {
        match packing {
            0 => out.extend_from_slice(part),
            1 => {
                let mut member = flate2::write::GzEncoder::new(&mut out, Default::default());
                member.write_all(part).unwrap();
                member.finish().unwrap();
            }
            _ => {
                let mut frame = zstd::Encoder::new(&mut out, 1).unwrap();
                frame.include_checksum(true).unwrap();
                frame.write_all(part).unwrap();
                frame.finish().unwrap();
            }
        }
    }
    out
}

#[test]
fn flipped_or_cut_files_lose_nothing_unsaid() {
    let line = |k: u32| {
        format!(
            "{{\"t\":\"{}\",\"n\":{k}}}\n",
            "ab\\n".repeat(k as usize % 9)
        )
    };
    let text: String = (0..40).map(line).collect();
    let right = all(&pair().open_bytes(text.as_bytes()).unwrap()).unwrap();
    let parts: Vec<&[u8]> = text.as_bytes().chunks(350).collect();
    for packing in 0..3 {
        let whole = packed(packing, &parts);
        let lines = pair().open_bytes(&whole[..]).unwrap();
        assert_eq!(all(&lines).unwrap(), right);
        assert_eq!(
            packing > 0,
            lines.plans.is_some_and(|plans| plans.all.len() > 1)
        );
        for at in 0..whole.len() {
            let found = pair()
                .open_bytes(&whole[..at])
                .and_then(|lines| all(&lines));
            // A file cut between two lines, of compressed ones between two members, is a shorter one.
            if let Ok(rows) = found {
                assert_eq!(rows, right[..rows.len()]);
                assert!(
                    packing > 0 || whole[..at + 1].ends_with(b"\n") || whole[..at].ends_with(b"\n")
                );
            }
            if packing > 0 {
                let mut flipped = whole.clone();
                flipped[at] ^= 1 << (at % 8);
                let strict = pair()
                    .open_bytes(&flipped[..])
                    .and_then(|lines| all(&lines));
                assert!(
                    strict.is_err() || strict.is_ok_and(|rows| rows == right),
                    "byte {at}"
                );
                let lenient = pair().skip_damage(true).open_bytes(flipped);
                for row in lenient.and_then(|lines| all(&lines)).unwrap_or_default() {
                    assert!(right.contains(&row), "byte {at} of packing {packing}");
                }
            }
        }
    }
}

/// Mostly whole numbers, sometimes what no list has.
fn numbers_in_a_list() -> impl Strategy<Value = String> {
    let number = prop_oneof![40 => "0|[1-9][0-9]{0,8}", 1 => "-1|0[0-9]|[0-9]\\.5|[eE\\]a\u{ff}]"];
    let between = prop_oneof![80 => Just(","), 40 => Just(", "), 1 => Just(" ,"), 1 => Just(",  "), 1 => Just(",,"), 1 => Just(" "), 1 => Just("")];
    let parts = prop::collection::vec((between, number), 0..40);
    parts.prop_map(|parts| {
        parts
            .into_iter()
            .enumerate()
            .map(|(place, (between, number))| {
                if place == 0 {
                    number
                } else {
                    format!("{between}{number}")
                }
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn lines_in_members_are_those_of_the_plain_file(
        texts in prop::collection::vec((any_text(), any::<u32>(), 0_u8..6), 1..60),
        sizes in prop::collection::vec(1_usize..900, 1..12),
        packing in 0_u8..3,
        ends in any::<bool>(),
    ) {
        let mut file = String::new();
        let mut right = Vec::new();
        let mut empty = 0;
        for (text, number, style) in &texts {
            write_text("n", *style, { file += "{"; &mut file });
            file += &format!(":{number},\"t\":");
            write_text(text, *style, &mut file);
            file += if style & 1 == 1 { "}\r\n" } else { "}\n" };
            right.push(vec![text.clone().into_bytes(), number.to_ne_bytes().to_vec()]);
            if *style == 5 {
                file += " \n";
                empty += 1;
            }
        }
        let file = if ends { file.as_str() } else { file.trim_end() };
        let empty = if ends || texts.last().is_some_and(|last| last.2 != 5) { empty } else { empty - 1 };
        let mut parts = Vec::new();
        let mut rest = file.as_bytes();
        for size in sizes.iter().cycle() {
            let (part, more) = rest.split_at((*size).min(rest.len()));
            parts.push(part);
            rest = more;
            if rest.is_empty() {
                break;
            }
        }
        let lines = pair().open_bytes(packed(packing, &parts)).unwrap();
        prop_assert_eq!(all(&lines).unwrap(), right);
        prop_assert_eq!(lines.left_out().values().sum::<u64>(), empty);
    }

    #[test]
    fn texts_are_those_of_a_naive_walk(members in prop::collection::vec(any_tree(), 1..5), style in 0_u8..8) {
        let keys = ["a", "b", "c.d", "a", "b"];
        let members = keys.iter().map(|key| key.to_string()).zip(members).collect();
        let tree = Tree::Object(members);
        let mut line = String::new();
        tree.write(style, &mut line);
        check(line.as_bytes()).unwrap();
        let of = |path: &str| {
            let found = opened(&text(path), line.as_bytes(), false);
            found.ok().map(|text| String::from_utf8(text).unwrap())
        };
        prop_assert_eq!(of("a"), as_text(tree.get("a")));
        prop_assert_eq!(of("\"c.d\""), as_text(tree.get("c.d")));
        prop_assert_eq!(of("a.b"), as_text(tree.get("a").and_then(|a| a.get("b"))));
        let list = |tree: Option<&Tree>| match tree {
            Some(Tree::List(list)) => list.iter().map(|one| as_text(Some(one))).collect(),
            _ => None,
        };
        let each = Take::Texts(KeyPath::parse("a[]").unwrap(), 10);
        let found = opened(&each, line.as_bytes(), false).ok().map(|framed| texts(&framed));
        prop_assert_eq!(found, list(tree.get("a")));
    }

    #[test]
    fn lists_of_numbers_are_read_as_by_another_parser(list in numbers_in_a_list()) {
        let line = format!("{{\"a\":[{list}]}}");
        let right = serde_json::from_str::<serde_json::value::Value>(&line);
        prop_assert_eq!(check(line.as_bytes()).is_ok(), right.is_ok(), "{}", line);
        let whole = right.ok().and_then(|value| serde_json::from_value::<Vec<i32>>(value["a"].clone()).ok());
        let read = opened(&numbers(Field::up_to("a", DType::I32, 50), "a"), line.as_bytes(), false);
        if whole.is_some() || check(line.as_bytes()).is_ok() {
            let read = read.ok().map(|bytes| bytes.chunks(4).map(|four| i32::from_ne_bytes(four.try_into().unwrap())).collect::<Vec<_>>());
            prop_assert_eq!(read, whole, "{}", line);
        }
    }

    #[test]
    fn a_damaged_line_is_refused_as_by_another_parser(
        tree in any_tree(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in any::<prop::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let mut line = String::new();
        Tree::Object(vec![("a".into(), tree)]).write(0, &mut line);
        let mut line = line.into_bytes();
        for (at, byte) in changes {
            let at = at.index(line.len());
            line[at] = byte;
        }
        line.truncate(if cuts { cut.index(line.len()) } else { line.len() });
        // The other parser has no such numbers, and takes half pairs for errors.
        let own = line.iter().any(|byte| matches!(byte, b'N' | b'I')) || line.windows(2).any(|pair| pair == b"\\u");
        let right = serde_json::from_slice::<serde_json::value::Value>(&line);
        let far = right.as_ref().is_err_and(|error| error.to_string().contains("out of range"));
        if !own && !far {
            prop_assert_eq!(check(&line).is_ok(), right.is_ok_and(|value| value.is_object()), "{}", String::from_utf8_lossy(&line));
        }
        // Whatever the bytes are, nothing panics, and little is written.
        for take in [text("a"), text("a[0].b"), numbers(Field::up_to("a", DType::F32, 5), "a"), Take::Json(KeyPath::parse("a").unwrap())] {
            let mut buffer = Vec::new();
            let _ = take.open(&line, true, &mut buffer);
            prop_assert!(buffer.len() <= line.len().max(20));
        }
    }
}
