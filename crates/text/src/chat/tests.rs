//! Texts against those of Jinja2 3.1.6 as `transformers` 5.24 sets it up; the fixture has them, and
//! `python/tests/test_tokens.py` renders them anew.

use super::*;
use feedline_core::decode::Single;
use feedline_core::tensor::EncodedField;
use std::path::PathBuf;

const SPECIAL: [(&str, &str); 1] = [("bos_token", "<s>")];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn chat(source: &str) -> Result<Chat> {
    let tokenizer = crate::Tokenizer::open(fixtures().join("tokenizers/bpe.json"))?;
    Chat::new(tokenizer, ChatTemplate::new(source, SPECIAL)?, 64).today("2026-11-30")
}

#[test]
fn snippets_are_rendered_as_by_jinja2() {
    let json = std::fs::read_to_string(fixtures().join("chat/snippets.json")).unwrap();
    let table: serde_json::Value = serde_json::from_str(&json).unwrap();
    let line = table["line"].as_str().unwrap();
    let rows = table["rows"].as_array().unwrap();
    assert!(rows.len() > 60);
    for row in rows {
        let source = row[0].as_str().unwrap();
        let text = chat(source).and_then(|chat| chat.text(line.as_bytes()));
        match (row[1].as_str(), text) {
            (Some(expected), text) => assert_eq!(text.unwrap(), expected, "{source}"),
            (None, Err(error)) => {
                assert!(error.to_string().contains("raised"), "{source}: {error}")
            }
            (None, Ok(text)) => panic!("{source}: {text:?}, but Jinja2 raises an error"),
        }
    }
}

#[test]
fn tokens_of_a_generation_block_count_for_the_loss() {
    let source = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\
                  {% else %}{{ m.content }}{% endif %}{% endfor %}";
    let mut single = Single::new(chat(source).unwrap(), &EncodedField::bytes("line")).unwrap();
    let line = r#"[{"role": "user", "content": "hé"}, {"role": "assistant", "content": "🙂b"}]"#;
    single.decode(line.as_bytes(), 0, 0, 0).unwrap();
    let names: Vec<_> = single.fields().iter().map(|field| field.name()).collect();
    assert_eq!(names, ["input_ids", "loss"]);
    let len = single.len_of(0).unwrap();
    assert_eq!(single.len_of(1), Some(len));
    let ids = single.bytes(0)[..4 * len].chunks(4);
    let ids: Vec<i32> = ids
        .map(|id| i32::from_ne_bytes(id.try_into().unwrap()))
        .collect();
    // By `apply_chat_template(…, return_assistant_tokens_mask=True)`.
    assert_eq!(ids, [75, 131, 106, 176, 257, 251, 228, 69]);
    assert_eq!(single.bytes(1)[..len], [0, 0, 0, 1, 1, 1, 1, 1]);
}

#[test]
fn what_is_not_rendered_here_is_refused_by_name_and_line() {
    for (source, message) in [
        ("{% do x.append(1) %}", "`do`"),
        ("\n{{ x | groupby('a') }}", "line 2: the filter `groupby`"),
        ("{{ x is escaped }}", "the test `escaped`"),
        ("{{ x.casefold() }}", "the method `casefold`"),
        ("{{ x.__class__ }}", "the attribute `__class__`"),
        ("{{ cycler('a') }}", "the variable `cycler`"),
        ("{% for x in y recursive %}{% endfor %}", "a recursive loop"),
        ("{{ '\\N{BULLET}' }}", "the escape \\N"),
        ("{{ f(*x) }}", "arguments by *"),
        ("{% extends 'x' %}", "unknown statement"),
        ("{{ x", "line 1: unexpected end"),
        ("a\x1cb", "only Python takes for a space"),
    ] {
        let error = ChatTemplate::new(source, SPECIAL).err().expect(message);
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

#[test]
fn what_only_running_shows_is_an_error_and_no_text() {
    let source = "{% if tools %}{{ loop_ }}{% endif %}{{ messages[0].content }}";
    let late = "{% for m in messages %}{{ tools }}{% endfor %}{% set tools = 1 %}";
    for (source, line, kind, message) in [
        (source, "[]", ErrorKind::Decode, "the conversation is empty"),
        (source, "{}", ErrorKind::Decode, "no list of messages"),
        (source, "[1]", ErrorKind::Decode, "a message is no object"),
        (
            source,
            r#"{"messages": [{}], "tools": 1}"#,
            ErrorKind::Decode,
            "`tools` is not a list",
        ),
        (
            source,
            r#"[{"content": "\ud800"}]"#,
            ErrorKind::Decode,
            "half of a surrogate pair",
        ),
        (source, "[{]", ErrorKind::Decode, "expected"),
        (
            late,
            "[{}]",
            ErrorKind::Config,
            "set after an inner block reads it",
        ),
        (
            "{{ range }}",
            "[{}]",
            ErrorKind::Config,
            "a value of type function is printed",
        ),
        (
            "{{ strftime_now('%c') }}",
            "[{}]",
            ErrorKind::Config,
            "with the format",
        ),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "[{}]",
            ErrorKind::Config,
            "macros inside each other",
        ),
        (
            "{{ 9223372036854775807 + 1 }}",
            "[{}]",
            ErrorKind::Config,
            "no integer of 64 bits",
        ),
    ] {
        let error = chat(source)
            .unwrap()
            .text(line.as_bytes())
            .err()
            .expect(message);
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.kind(), kind, "{error}");
    }
    let tokenizer = crate::Tokenizer::open(fixtures().join("tokenizers/bpe.json")).unwrap();
    let template = ChatTemplate::new("{{ strftime_now('%Y') }}", SPECIAL).unwrap();
    let error = Chat::new(tokenizer, template, 8).text(b"[{}]").unwrap_err();
    assert!(error.to_string().contains("give it by `today`"), "{error}");
}
