//! Ids against those of Python's `tokenizers` 0.23.3; `python/tests/test_tokens.py` compares anew.

use super::*;
use feedline_core::decode::Single;
use feedline_core::tensor::{DType, EncodedField};

/// Tokenizer, text, ids.
const IDS: &[(&str, &str, &[u32])] = &[
    (
        "bpe",
        "Größe <s>🙂",
        &[
            0, 42, 85, 131, 118, 131, 257, 72, 224, 0, 176, 257, 251, 228,
        ],
    ),
    ("bpe", "", &[0]),
    ("bpe", "a  b\0\n", &[0, 68, 224, 278, 192, 202]),
    (
        "wordpiece",
        "Größe <s>🙂",
        &[1, 47, 200, 171, 125, 31, 59, 33, 114, 2],
    ),
    ("wordpiece", "", &[1, 2]),
    ("wordpiece", "a  b\0\n", &[1, 41, 42, 2]),
    (
        "unigram",
        "Größe <s>🙂",
        &[3, 137, 15, 243, 242, 5, 3, 1, 3, 241, 2],
    ),
    ("unigram", "", &[2]),
    ("unigram", "a  b\0\n", &[24, 3, 3, 32, 0, 18, 2]),
];

pub(super) fn fixture(name: &str) -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers");
    Tokenizer::open(folder.join(format!("{name}.json"))).unwrap()
}

fn single(tokenize: Tokenize) -> Result<Single> {
    Single::new(tokenize, &EncodedField::bytes("text"))
}

#[test]
fn ids_are_those_of_python() {
    for (name, text, expected) in IDS {
        let mut ids = vec![7];
        fixture(name).encode(text, true, &mut ids).unwrap();
        assert_eq!(ids[1..], **expected, "{name} {text:?}");
    }
}

#[test]
fn a_longer_text_is_cut_between_its_special_tokens() {
    let text = b"Hello, tokens";
    let mut all = Vec::new();
    let tokenizer = fixture("wordpiece");
    tokenizer.encode("Hello, tokens", false, &mut all).unwrap();
    let front = [&[1][..], &all[..3], &[2]].concat();
    let end = [&[1][..], &all[all.len() - 3..], &[2]].concat();
    let base = || Tokenize::new(tokenizer.clone(), 5).dtype(DType::U32);
    for (tokenize, expected) in [
        (base().cut(), front),
        (base().cut_left(), end),
        (base().cut().special_tokens(false), all[..5].to_vec()),
    ] {
        let mut single = single(tokenize).unwrap();
        single.decode(text, 0, 0, 0).unwrap();
        let ids = single.bytes(0).chunks(4);
        let ids: Vec<u32> = ids
            .map(|id| u32::from_ne_bytes(id.try_into().unwrap()))
            .collect();
        assert_eq!(ids, expected);
        assert_eq!(single.len_of(0), Some(5));
    }
    let error = single(base()).unwrap().decode(text, 0, 0, 0).unwrap_err();
    assert!(error.to_string().contains("takes at most 5"), "{error}");
}

#[test]
fn rows_have_the_chosen_dtype_and_zeros_after_the_ids() {
    for dtype in [DType::U16, DType::I32, DType::U32, DType::I64] {
        let tokenize = Tokenize::new(fixture("bpe"), 8).dtype(dtype).named("ids");
        let mut single = single(tokenize).unwrap();
        for text in [&b"a  b\n"[..], b"b"] {
            single.decode(text, 0, 0, 0).unwrap();
        }
        let mut expected = vec![0; 8 * dtype.size()];
        expected[dtype.size()] = 69;
        assert_eq!(single.bytes(0), expected);
        assert_eq!(single.len_of(0), Some(2));
        assert_eq!(single.fields()[0].name(), "ids");
    }
}

#[test]
fn what_cannot_be_tokenized_is_refused() {
    let wide = br#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","unk_token":"u","vocab":{"u":70000}}}"#;
    let wide = || Tokenizer::from_bytes(wide).unwrap();
    let dropout =
        br#"{"version":"1.0","added_tokens":[],"model":{"type":"BPE","dropout":0.1,"vocab":{},"merges":[]}}"#;
    let refusals = [
        (Tokenizer::from_bytes(b"{}").err(), "not a tokenizer.json"),
        (Tokenizer::from_bytes(dropout).err(), "dropout 0.1"),
        (
            Tokenizer::open("/nonexistent").err(),
            "not found: path=/nonexistent",
        ),
        (
            single(Tokenize::new(wide(), 4).dtype(DType::U16)).err(),
            "ids up to 70000, more than u16 holds",
        ),
        (
            single(Tokenize::new(wide(), 4).dtype(DType::F32)).err(),
            "choose u16",
        ),
        (
            single(Tokenize::new(fixture("wordpiece"), 2)).err(),
            "2 of them are special",
        ),
        (
            single(Tokenize::new(wide(), 4))
                .unwrap()
                .decode(b"ab\xff", 0, 0, 0)
                .err(),
            "not UTF-8 at byte 2",
        ),
    ];
    for (error, message) in refusals {
        let error = error.expect(message);
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn a_tokenizer_says_its_vocabulary_and_digest() {
    let tokenizer = fixture("bpe");
    assert_eq!(tokenizer.vocabulary(), 400);
    assert_eq!(tokenizer.special_ids(), [0, 1, 2, 3]);
    assert_eq!(tokenizer.id_of("</s>"), Some(1));
    assert_eq!(tokenizer.id_of("nothing"), None);
    assert_eq!(tokenizer.digest(), tokenizer.clone().digest());
    assert_ne!(tokenizer.digest(), fixture("unigram").digest());
}
