//! Tokens: windows and documents equal a naive walk over the file, and leftover tokens are counted.

use crate::common::numeric;
use crate::common::numeric::{Row, cases, check, fixture, flips_each, one, seen, sweep};
use crate::common::{Dir, noise};
use feedline::dataset::{Dataset, Megatron, MegatronBuilder, Tokens, TokensBuilder};
use feedline::tensor::DType;
use feedline::{ErrorKind, Loader, Order};

fn file(name: &str) -> std::path::PathBuf {
    fixture("tokens").join(name)
}

fn bytes_of(name: &str) -> Vec<u8> {
    cases("tokens", name)[0].bytes.clone()
}

/// Every window of a file, by a walk.
fn windows(bytes: &[u8], size: usize, window: usize, stride: usize) -> Vec<Row> {
    let (mut rows, mut at) = (Vec::new(), 0);
    while (at + window) * size <= bytes.len() {
        rows.push(one("tokens", &bytes[at * size..(at + window) * size]));
        at += stride;
    }
    rows
}

#[test]
fn windows_of_a_flat_file_equal_a_naive_walk() {
    let flat = bytes_of("flat.bin");
    type Set = fn(TokensBuilder) -> TokensBuilder;
    let cases: [(Set, usize, usize, u64); 7] = [
        (|tokens| tokens.window(16), 16, 16, 4),
        (|tokens| tokens.window(16).next_token(), 17, 16, 3),
        (|tokens| tokens.window(17).overlap(1), 17, 16, 3),
        (|tokens| tokens.window(16).stride(5), 16, 5, 4),
        (|tokens| tokens.window(16).stride(40).next_token(), 17, 40, 49),
        (|tokens| tokens.window(100), 100, 100, 0),
        (|tokens| tokens.window(1), 1, 1, 0),
    ];
    for (set, window, stride, leftover) in cases {
        let open = || set(Tokens::builder(DType::U16)).open(file("flat.bin"));
        check(open, &windows(&flat, 2, window, stride));
        let tokens = open().unwrap();
        assert_eq!((tokens.tokens(), tokens.leftover_tokens()), (100, leftover), "{tokens:?}");
        assert!(tokens.describe().contains(&format!("{leftover} left over")), "{tokens:?}");
        assert_eq!(tokens.schema()[0].as_raw().unwrap().dims(), [window]);
    }
}

#[test]
fn windows_do_not_cross_files_and_short_files_are_left_over() {
    let dir = Dir::new();
    let (mut expected, mut leftover) = (Vec::new(), 0);
    for (index, tokens) in [30, 3, 0, 16, 47].into_iter().enumerate() {
        let bytes = noise(tokens * 4, index as u64 + 1);
        dir.write(&format!("{index}.bin"), &bytes);
        let own = windows(&bytes, 4, 9, 8);
        leftover += tokens as u64 - if own.is_empty() { 0 } else { own.len() as u64 * 8 + 1 };
        expected.extend(own);
    }
    let open = || Tokens::builder(DType::I32).window(8).next_token().open(dir.path("{0..4}.bin"));
    check(open, &expected);
    let tokens = open().unwrap();
    assert_eq!((tokens.tokens(), tokens.leftover_tokens()), (96, leftover));
    let folder = Tokens::builder(DType::I32).window(8).next_token().open(dir.path("")).unwrap();
    assert_eq!(folder.len(), tokens.len());
}

#[test]
fn inputs_and_targets_equal_nanogpt() {
    let flat: Vec<u16> = bytes_of("flat.bin").chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    let tokens = Tokens::builder(DType::U16).window(16).next_token().open(file("flat.bin")).unwrap();
    let loader = Loader::builder(tokens).order(Order::shuffled(1)).batch_size(2).build().unwrap();
    let mut targets = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        let rows = batch.field("tokens").unwrap().as_slice::<u16>().unwrap();
        for (row, id) in rows.chunks(17).zip(batch.ids()) {
            let start = *id as usize * 16;
            assert_eq!((&row[..16], &row[1..]), (&flat[start..start + 16], &flat[start + 1..start + 17]));
            targets.extend(start + 1..start + 17);
        }
    }
    targets.sort_unstable();
    assert_eq!(targets, (1..97).collect::<Vec<_>>());
}

#[test]
fn llm_c_files_are_recognised_by_their_header() {
    for (name, dtype, size) in [("llmc-gpt2.bin", DType::U16, 2), ("llmc-llama3.bin", DType::U32, 4)] {
        let open = || Tokens::builder(dtype).window(8).llm_c().open(file(name));
        check(open, &windows(&bytes_of(name), size, 8, 8));
        assert_eq!((open().unwrap().tokens(), open().unwrap().leftover_tokens()), (37, 5));
        // Without `llm_c` the header counts as tokens.
        let plain = Tokens::builder(dtype).window(8).header(1024).open(file(name)).unwrap();
        assert_eq!(plain.len(), 4);
    }
    let error = Tokens::builder(DType::U32).window(8).llm_c().open(file("llmc-gpt2.bin")).unwrap_err();
    assert!(error.to_string().contains("the header says u16 tokens, not u32"), "{error}");
    let error = Tokens::builder(DType::U16).window(8).llm_c().open(file("megatron-u16.idx")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
}

#[test]
fn an_impossible_setting_is_a_typed_error() {
    let dir = Dir::new();
    dir.write("odd.bin", &[0; 33]);
    dir.write("short.bin", &[0; 8]);
    dir.write("other.bin", &noise(2000, 3));
    let of = |dtype| Tokens::builder(dtype);
    let cases = [
        (of(DType::U16).window(4).open(dir.path("odd.bin")), ErrorKind::Truncated, "1 over"),
        (of(DType::I64).window(4).header(3).open(dir.path("odd.bin")), ErrorKind::Truncated, "6 over"),
        (
            of(DType::U16).window(5).open(dir.path("short.bin")),
            ErrorKind::Empty,
            "4 tokens in 1 files make no window of 5",
        ),
        (of(DType::U16).window(4).next_token().open(dir.path("short.bin")), ErrorKind::Empty, "no window of 5"),
        (of(DType::U16).window(4).header(9).open(dir.path("short.bin")), ErrorKind::Truncated, "less than the header"),
        (of(DType::U16).open(dir.path("short.bin")), ErrorKind::Config, "`window`"),
        (of(DType::U16).window(4).stride(0).open(dir.path("short.bin")), ErrorKind::Config, "0 apart"),
        (of(DType::U16).window(4).overlap(4).open(dir.path("short.bin")), ErrorKind::Config, "0 apart"),
        (of(DType::F32).window(1).open(dir.path("short.bin")), ErrorKind::Config, "whole numbers"),
        (of(DType::U16).window(4).open(dir.path("gone.bin")), ErrorKind::NotFound, "gone.bin"),
        (of(DType::U16).window(4).llm_c().open(dir.path("other.bin")), ErrorKind::Decode, "not a token file of llm.c"),
    ];
    for (index, (result, kind, words)) in cases.into_iter().enumerate() {
        let error = result.err().unwrap_or_else(|| panic!("case {index} was accepted"));
        assert_eq!(error.kind(), kind, "case {index}: {error}");
        assert!(error.to_string().contains(words), "case {index}: {error}");
    }
    let error = of(DType::U16).window(4).open(dir.path("odd.bin")).unwrap_err();
    assert_eq!((error.site().offset, error.site().len), (Some(32), Some(1)));
}

#[test]
fn tokens_in_memory_need_no_file() {
    let tokens = Tokens::builder(DType::U8).window(3).open_bytes(*b"abcdefgh").unwrap();
    assert_eq!((tokens.len(), tokens.leftover_tokens()), (2, 2));
    let rows = numeric::load(tokens).unwrap();
    assert_eq!(rows[&1], one("tokens", b"def"));
}

/// Lengths of the sequences, and the sequences of each document, in the fixtures.
const SEQUENCES: [usize; 6] = [5, 0, 7, 3, 1, 9];
const DOCUMENTS: [std::ops::Range<usize>; 4] = [0..1, 1..3, 3..3, 3..6];

/// Sequences of the fixture `name`, with `size` bytes per token.
fn sequences(name: &str, size: usize) -> Vec<Vec<u8>> {
    let mut rest = &bytes_of(&format!("{name}.bin"))[..];
    let mut take = |len: usize| {
        let (own, other) = rest.split_at(len * size);
        rest = other;
        own.to_vec()
    };
    SEQUENCES.iter().map(|len| take(*len)).collect()
}

#[test]
fn megatron_documents_and_sequences_equal_the_writers() {
    for (name, size) in [("megatron-u16", 2), ("megatron-i32", 4)] {
        let sequences = sequences(name, size);
        let documents: Vec<Row> =
            DOCUMENTS.iter().map(|range| one("tokens", &sequences[range.clone()].concat())).collect();
        for prefix in [name.to_string(), format!("{name}.idx"), format!("{name}.bin")] {
            check(|| Megatron::builder().documents(13).open(file(&prefix)), &documents);
        }
        let rows: Vec<Row> = sequences.iter().map(|bytes| one("tokens", bytes)).collect();
        check(|| Megatron::builder().sequences(20).open(file(name)), &rows);
        let all = windows(&sequences.concat(), size, 5, 4);
        check(|| Megatron::builder().window(4).next_token().open(file(name)), &all);
        let megatron = Megatron::builder().window(4).next_token().open(file(name)).unwrap();
        assert_eq!((megatron.tokens(), megatron.sequences(), megatron.documents()), (25, 6, 4));
        assert_eq!(megatron.leftover_tokens(), 0);
    }
}

#[test]
fn long_documents_are_an_error_or_cut_and_counted() {
    let open = |builder: MegatronBuilder| builder.open(file("megatron-u16"));
    let error = open(Megatron::builder().documents(6)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shape);
    assert_eq!(error.site().sample, Some(1));
    assert!(error.to_string().contains("2 of the documents are longer than 6 tokens, the first has 7"), "{error}");
    let cut = open(Megatron::builder().documents(6).cut(true)).unwrap();
    assert_eq!((cut.len(), cut.leftover_tokens()), (4, 1 + 7));
    assert!(cut.describe().contains("2 cut by 8, 1 empty"), "{cut:?}");
    let expected: Vec<Row> = {
        let sequences = sequences("megatron-u16", 2);
        let short = |bytes: Vec<u8>| one("tokens", &bytes[..bytes.len().min(12)]);
        DOCUMENTS.iter().map(|range| short(sequences[range.clone()].concat())).collect()
    };
    check(|| open(Megatron::builder().documents(6).cut(true)), &expected);
    for builder in [
        Megatron::builder(),
        Megatron::builder().documents(0),
        Megatron::builder().documents(5).window(3),
        Megatron::builder().window(3).cut(true),
    ] {
        assert_eq!(open(builder).unwrap_err().kind(), ErrorKind::Config);
    }
}

#[test]
fn an_index_that_contradicts_itself_or_its_tokens_is_refused() {
    let dir = Dir::new();
    let (idx, bin) =
        (std::fs::read(file("megatron-u16.idx")).unwrap(), std::fs::read(file("megatron-u16.bin")).unwrap());
    let with = |at: usize, bytes: &[u8]| {
        let mut out = idx.clone();
        out[at..at + bytes.len()].copy_from_slice(bytes);
        out
    };
    let (offsets, documents) = (34 + 6 * 4, 34 + 6 * 12);
    let negative = (-5_i32).to_le_bytes();
    let cases = [
        ("the magic", with(0, b"X"), ErrorKind::Decode, "not an index"),
        ("the version", with(9, &[2]), ErrorKind::Decode, "not an index"),
        ("floats", with(17, &[6]), ErrorKind::Decode, "float"),
        ("an unknown dtype", with(17, &[9]), ErrorKind::Decode, "dtype 9"),
        ("another dtype", with(17, &[4]), ErrorKind::Decode, "sequence 1 starts at 10"),
        ("endless sequences", with(18, &[0xff; 8]), ErrorKind::Truncated, "over 2^64"),
        ("many sequences", with(18, &[7]), ErrorKind::Truncated, "need 158 bytes, the index has 146"),
        ("few sequences", with(18, &[5]), ErrorKind::Decode, "need 134"),
        ("a negative length", with(34, &negative), ErrorKind::Decode, "length of -5"),
        ("another length", with(34, &[4]), ErrorKind::Decode, "sequence 1 starts at 10"),
        ("another offset", with(offsets + 8, &[9]), ErrorKind::Decode, "sequence 1 starts at 9"),
        ("a late first document", with(documents, &[1]), ErrorKind::Decode, "first document"),
        ("documents that go back", with(documents + 16, &[0]), ErrorKind::Decode, "ends with sequence 0"),
        ("a document behind the end", with(documents + 16, &[9]), ErrorKind::Decode, "ends with sequence 9"),
        ("an early last document", with(documents + 32, &[5]), ErrorKind::Decode, "ends with sequence 5 of 6"),
        ("bytes over", [&idx[..], b"x"].concat(), ErrorKind::Decode, "147"),
    ];
    dir.write("a.bin", &bin);
    for (what, bytes, kind, words) in cases {
        dir.write("a.idx", &bytes);
        for builder in
            [Megatron::builder().documents(99), Megatron::builder().sequences(99), Megatron::builder().window(2)]
        {
            let error = builder.open(dir.path("a")).err().unwrap_or_else(|| panic!("{what} was accepted"));
            assert!(error.kind() == kind && error.to_string().contains(words), "{what}: {error}");
        }
    }
    dir.write("a.idx", &idx);
    for (bytes, kind) in [(&bin[..48], ErrorKind::Truncated), (&[&bin[..], b"xx"].concat(), ErrorKind::Decode)] {
        dir.write("a.bin", bytes);
        let error = Megatron::builder().window(2).open(dir.path("a")).unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains("the index says 25 u16 tokens"), "{error}");
    }
}

#[test]
fn damaged_token_files_never_change_samples_silently() {
    let dir = Dir::new();
    for name in ["megatron-u16.idx", "megatron-u16.bin", "llmc-gpt2.bin"] {
        dir.write(name, &std::fs::read(file(name)).unwrap());
    }
    type Look = fn(&Dir) -> feedline::Result<numeric::Seen>;
    let looks: [(&str, usize, Look); 2] = [
        ("megatron-u16.idx", 146, |dir| seen(Megatron::builder().documents(30).open(dir.path("megatron-u16")))),
        ("llmc-gpt2.bin", 40, |dir| {
            seen(Tokens::builder(DType::U16).window(9).llm_c().open(dir.path("llmc-gpt2.bin")))
        }),
    ];
    for (name, flipped, look) in looks {
        let (cuts, flips) = sweep(&dir, name, 0..flipped, || look(&dir));
        assert_eq!((cuts.harmless, cuts.values, cuts.structure.len()), (0, 0, 0), "{name}: {cuts:?}");
        match name {
            // Where one document ends and the next starts is stored only once: a flip that keeps them ascending moves
            // the boundary. Ends of sequences are stored twice.
            "megatron-u16.idx" => {
                let moved = flips.structure.len();
                assert!(moved <= 4 && (moved == 4 || flips_each() < 8), "{:?}", flips.structure);
                assert_eq!(flips.refused + moved, flipped * flips_each(), "{flips:?}");
                assert!(flips.structure.iter().all(|what| document_start(what)), "{:?}", flips.structure);
            }
            _ => {
                assert!(flips.structure.is_empty() && flips.values == 0, "{flips:?}");
                // Bytes 12 … 1023 of llm.c's header have no meaning.
                assert_eq!(flips.harmless, (flipped - 12) * flips_each(), "{flips:?}");
            }
        }
    }
}

/// Whether the damage is in a document's start.
fn document_start(what: &str) -> bool {
    let byte = what.split("byte ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    byte.is_some_and(|byte| byte >= 34 + 6 * 12)
}

proptest::proptest! {
    #[test]
    fn no_megatron_bytes_make_the_parser_panic(bytes in numeric::mangled([&50_u64.to_le_bytes()[..], &std::fs::read(fixture("tokens").join("megatron-u16.idx")).unwrap()].concat())) {
        feedline::unstable::fuzzing::megatron(&bytes);
    }
}

#[test]
fn the_fuzzed_parsers_accept_whole_files() {
    assert!(feedline::unstable::fuzzing::megatron(
        &[&50_u64.to_le_bytes()[..], &std::fs::read(fixture("tokens").join("megatron-u16.idx")).unwrap()].concat()
    ));
}
