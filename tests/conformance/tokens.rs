//! Tokens: windows and documents equal a naive walk over the file, and leftover tokens are counted.

use crate::common::numeric;
use crate::common::numeric::{Row, cases, check, fixture, flips_each, one, seen, sweep};
use crate::common::{Dir, assert_says, must_fail, must_say, noise};
use feedline::ErrorKind::{Changed, Config, Decode, Empty, NotFound, Shape, Truncated};
use feedline::dataset::{
    Dataset, DatasetExt, Mds, Megatron, MegatronBuilder, Npy, Npz, Records, SafeTensors, TfRecord,
    Tokens, TokensBuilder, Verify,
};
use feedline::tensor::DType;
use feedline::{Loader, Order};
use proptest::prelude::*;
use std::ops::ControlFlow;

fn file(name: &str) -> std::path::PathBuf {
    fixture("tokens").join(name)
}

fn bytes_of(name: &str) -> Vec<u8> {
    cases("tokens", name)[0].bytes.clone()
}

/// Every window of a file, by a walk.
fn windows(bytes: &[u8], size: usize, window: usize, stride: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut at = 0;
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
        (
            |tokens| tokens.window(16).stride(40).next_token(),
            17,
            40,
            49,
        ),
        (|tokens| tokens.window(100), 100, 100, 0),
        (|tokens| tokens.window(1), 1, 1, 0),
    ];
    for (set, window, stride, leftover) in cases {
        let open = || set(Tokens::builder(DType::U16)).open(file("flat.bin"));
        check(open, &windows(&flat, 2, window, stride));
        let tokens = open().unwrap();
        assert_eq!(
            (tokens.tokens(), tokens.leftover_tokens()),
            (100, leftover),
            "{tokens:?}"
        );
        assert_says(tokens.describe(), &format!("{leftover} left over"));
        assert_eq!(tokens.schema()[0].as_raw().unwrap().dims(), [window]);
    }
}

#[test]
fn windows_do_not_cross_files_and_short_files_are_left_over() {
    let dir = Dir::new();
    let mut expected = Vec::new();
    let mut leftover = 0;
    for (index, tokens) in [30, 3, 0, 16, 47].into_iter().enumerate() {
        let bytes = noise(tokens * 4, index as u64 + 1);
        dir.write(&format!("{index}.bin"), &bytes);
        let own = windows(&bytes, 4, 9, 8);
        leftover += tokens as u64
            - if own.is_empty() {
                0
            } else {
                own.len() as u64 * 8 + 1
            };
        expected.extend(own);
    }
    let open = || {
        Tokens::builder(DType::I32)
            .window(8)
            .next_token()
            .open(dir.path("{0..4}.bin"))
    };
    check(open, &expected);
    let tokens = open().unwrap();
    assert_eq!((tokens.tokens(), tokens.leftover_tokens()), (96, leftover));
    let folder = Tokens::builder(DType::I32)
        .window(8)
        .next_token()
        .open(dir.path(""))
        .unwrap();
    assert_eq!(folder.len(), tokens.len());
}

proptest! {
    #[test]
    fn a_separator_ends_its_document(files in prop::collection::vec(prop::collection::vec(0_u16..4, 0..40), 1..5), header in 0_usize..3) {
        let dir = Dir::new();
        let paths: Vec<_> = files.iter().enumerate().map(|(number, tokens)| {
            let bytes: Vec<u8> = [vec![9; header], tokens.iter().flat_map(|token| token.to_le_bytes()).collect()].concat();
            dir.write(&format!("{number}.bin"), &bytes)
        }).collect();
        let open = || Tokens::builder(DType::U16).separator(3).header(header as u64).index_file(dir.path("ends")).open_files(&paths);
        let right: Vec<Vec<u16>> = files.iter().flat_map(|tokens| tokens.split_inclusive(|token| *token == 3)).map(<[u16]>::to_vec).collect();
        if !files.concat().contains(&3) {
            let error = open().unwrap_err();
            prop_assert!(error.to_string().contains("token 3 does not occur in"), "{}", error);
            return Ok(());
        }
        let first = open().unwrap();
        let read = |documents: &Tokens| (0..documents.len()).map(|sample| bytemuck::pod_collect_to_vec(&documents.read_sample(sample).unwrap()[0])).collect::<Vec<Vec<u16>>>();
        prop_assert_eq!(&read(&first), &right);
        prop_assert_eq!(first.lengths("tokens").unwrap(), right.iter().map(|own| own.len() as u64).collect::<Vec<_>>());
        let kept = open().unwrap();
        prop_assert_eq!((read(&kept), kept.identity()), (right, first.identity()));
    }
}

#[test]
fn settings_of_documents_in_flat_files_are_checked() {
    let dir = Dir::new();
    let path = dir.write("a.bin", &[1_u16, 2, 7, 3].map(u16::to_le_bytes).concat());
    let builder = || Tokens::builder(DType::U16).separator(7);
    let refused = |builder: TokensBuilder, kind, words: &str| {
        let error = builder.open(&path).unwrap_err();
        assert!(
            error.kind() == kind && error.to_string().contains(words),
            "{error}"
        );
    };
    refused(
        builder().window(2),
        Config,
        "samples are documents or windows",
    );
    refused(
        builder().separator(1 << 16),
        Config,
        "separator 65536 does not fit u16",
    );
    refused(
        builder().separator(8),
        Config,
        "token 8 does not occur in 1 files",
    );
    refused(
        Tokens::builder(DType::F32).separator(8),
        Config,
        "tokens are whole numbers",
    );
    let whole = builder().index_file(dir.path("ends")).open(&path).unwrap();
    assert_says(
        whole.describe(),
        "2 documents of up to 3 u16 tokens, ended by 7, in 1 files",
    );
    dir.write("a.bin", &[1_u16, 7, 2, 3].map(u16::to_le_bytes).concat());
    refused(
        builder().index_file(dir.path("ends")),
        Changed,
        "ends of documents of another dataset",
    );
}

#[test]
fn inputs_and_targets_equal_nanogpt() {
    let flat: Vec<u16> = bytes_of("flat.bin")
        .chunks(2)
        .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
        .collect();
    let tokens = Tokens::builder(DType::U16)
        .window(16)
        .next_token()
        .open(file("flat.bin"))
        .unwrap();
    let loader = Loader::builder(tokens)
        .order(Order::shuffled(1))
        .batch_size(2)
        .build()
        .unwrap();
    let mut targets = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        let rows = batch.field("tokens").unwrap().as_slice::<u16>().unwrap();
        for (row, id) in rows.chunks(17).zip(batch.ids()) {
            let start = *id as usize * 16;
            assert_eq!(
                (&row[..16], &row[1..]),
                (&flat[start..start + 16], &flat[start + 1..start + 17])
            );
            targets.extend(start + 1..start + 17);
        }
    }
    targets.sort_unstable();
    assert_eq!(targets, (1..97).collect::<Vec<_>>());
}

#[test]
fn llm_c_files_are_recognised_by_their_header() {
    for (name, dtype, size) in [
        ("llmc-gpt2.bin", DType::U16, 2),
        ("llmc-llama3.bin", DType::U32, 4),
    ] {
        type Set = fn(TokensBuilder) -> TokensBuilder;
        let ways: [Set; 3] = [
            |tokens| tokens,
            |tokens| tokens.llm_c(),
            |tokens| tokens.header(1024),
        ];
        for set in ways {
            let open = || set(Tokens::builder(dtype).window(8)).open(file(name));
            check(open, &windows(&bytes_of(name), size, 8, 8));
            assert_eq!(
                (open().unwrap().tokens(), open().unwrap().leftover_tokens()),
                (37, 5)
            );
        }
        let whole = std::fs::read(file(name)).unwrap();
        check(
            || Tokens::builder(dtype).window(8).header(0).open(file(name)),
            &windows(&whole, size, 8, 8),
        );
        let memory = Tokens::builder(dtype).window(8).open_bytes(whole).unwrap();
        assert_eq!(memory.tokens(), 37);
    }
    must_say(
        Tokens::builder(DType::U32)
            .window(8)
            .open(file("llmc-gpt2.bin")),
        "the header says u16 tokens, not u32: set ",
    );
    let error = Tokens::builder(DType::U16)
        .window(8)
        .llm_c()
        .open(file("megatron-u16.idx"))
        .unwrap_err();
    assert_eq!(error.kind(), Decode, "{error}");
}

#[test]
fn headers_of_all_files_of_a_pattern_are_looked_at() {
    let dir = Dir::new();
    let whole = std::fs::read(file("llmc-gpt2.bin")).unwrap();
    let tokens = bytes_of("llmc-gpt2.bin");
    dir.write("1.bin", b"");
    dir.write("2.bin", &whole);
    dir.write("3.bin", &whole);
    let open = || Tokens::builder(DType::U16).window(8).open(dir.path(""));
    check(
        open,
        &[windows(&tokens, 2, 8, 8), windows(&tokens, 2, 8, 8)].concat(),
    );
    let with = |at: usize, value: i32| {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    let cases = [
        (
            with(4, 2),
            "version 2 of llm.c's header with magic 20240520; only version 1 is supported",
        ),
        (
            with(0, 20_240_326),
            "an llm.c model, tokenizer or evaluation file",
        ),
        (
            with(8, 38),
            "the header says 38 u16 tokens, 74 bytes follow it",
        ),
        (
            with(8, 36),
            "the header says 36 u16 tokens, 74 bytes follow it",
        ),
        (with(8, -1), "the header says 4294967295 u16 tokens"),
        (
            whole[..1000].to_vec(),
            "the header says 37 u16 tokens, 0 bytes follow it",
        ),
        (
            tokens.clone(),
            "a header of 0 bytes here, but 1024 in the files before",
        ),
    ];
    for (bytes, words) in cases {
        let path = dir.write("3.bin", &bytes);
        let error = must_say(open(), words);
        assert_eq!(error.site().path.as_deref(), Some(&*path), "{error}");
    }
}

#[test]
fn files_of_other_formats_are_no_tokens() {
    let dir = Dir::new();
    let sum = "0123456789abcdef".repeat(4);
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sum}\nsize 12345\n")
            .into_bytes();
    let pointer = &pointer[..];
    let cases: [(&[u8], &str); 9] = [
        (
            &std::fs::read(fixture("npy").join("dtype-uint16.npy")).unwrap(),
            "a NumPy array: read it as source npy",
        ),
        (
            &std::fs::read(fixture("npy").join("table.npz")).unwrap(),
            "a zip archive",
        ),
        (
            &std::fs::read(fixture("safetensors").join("numpy.safetensors")).unwrap(),
            "a safetensors file",
        ),
        (
            &std::fs::read(fixture("tfrecord").join("plain.tfrecord.gz")).unwrap(),
            "a gzip file",
        ),
        (
            &std::fs::read(file("megatron-u16.idx")).unwrap(),
            "a Megatron index",
        ),
        (pointer, "git lfs pull"),
        // pickle.dumps([1, 2], protocol=4) and protocol=2
        (
            b"\x80\x04\x95\x09\0\0\0\0\0\0\0]\x94(K\x01K\x02e.",
            "a pickle",
        ),
        (b"\x80\x02]q\0(K\x01K\x02e.\0", "a pickle"),
        (b"PAR1\x15\x04\x15\x10", "a Parquet file"),
    ];
    for (bytes, words) in cases {
        let path = dir.write("a.bin", bytes);
        let error = must_fail(
            Tokens::builder(DType::U8).window(1).open(&path),
            Decode,
            words,
        );
        assert_says(&error, "`header(0)` reads its bytes as tokens");
        let all = Tokens::builder(DType::U8)
            .window(1)
            .header(0)
            .open(&path)
            .unwrap();
        assert_eq!(all.tokens(), bytes.len() as u64);
    }
    for head in [
        &b""[..],
        b"PK",
        b"\x1f\x8b\x08\x20\0\0\0\0\0\x03",
        b"\x80\x04\x95",
        b"version 2 of",
        &[0; 12],
    ] {
        let tokens = Tokens::builder(DType::U8)
            .window(1)
            .open_bytes([head, b"tokens"].concat())
            .unwrap();
        assert_eq!(
            tokens.tokens(),
            head.len() as u64 + 6,
            "half of a magic names no format"
        );
    }
    let path = dir.write("a.bin", pointer);
    dir.write("a.idx", &std::fs::read(file("megatron-u16.idx")).unwrap());
    dir.write("index.json", pointer);
    let opened: [feedline::Result<u64>; 7] = [
        Records::builder(1).open(&path).map(|data| data.len()),
        Megatron::builder()
            .window(1)
            .open(dir.path("a"))
            .map(|data| data.len()),
        Npy::open(&path).map(|data| data.len()),
        Npz::open(&path).map(|data| data.len()),
        SafeTensors::open(&path).map(|data| data.len()),
        TfRecord::builder()
            .index(false)
            .open(&path)
            .map(|data| data.len()),
        Mds::open(dir.path("")).map(|data| data.len()),
    ];
    for (index, opened) in opened.into_iter().enumerate() {
        let error = opened.unwrap_err().to_string();
        assert!(
            error.contains("git lfs pull") && error.contains("path="),
            "{index}: {error}"
        );
    }
}

#[test]
fn an_impossible_setting_is_a_typed_error() {
    let dir = Dir::new();
    dir.write("odd.bin", &[0; 33]);
    dir.write("short.bin", &[0; 8]);
    dir.write("other.bin", &noise(2000, 3));
    let of = |dtype| Tokens::builder(dtype);
    let cases = [
        (
            of(DType::U16).window(4).open(dir.path("odd.bin")),
            Truncated,
            "1 left over",
        ),
        (
            of(DType::I64).window(4).header(3).open(dir.path("odd.bin")),
            Truncated,
            "6 left over",
        ),
        (
            of(DType::U16).window(5).open(dir.path("short.bin")),
            Empty,
            "4 tokens in 1 files are too few for a window of 5",
        ),
        (
            of(DType::U16)
                .window(4)
                .next_token()
                .open(dir.path("short.bin")),
            Empty,
            "for a window of 5",
        ),
        (
            of(DType::U16)
                .window(4)
                .header(9)
                .open(dir.path("short.bin")),
            Truncated,
            "less than the header",
        ),
        (
            of(DType::U16).open(dir.path("short.bin")),
            Config,
            "`window`",
        ),
        (
            of(DType::U16)
                .window(4)
                .stride(0)
                .open(dir.path("short.bin")),
            Config,
            "a stride of 0",
        ),
        (
            of(DType::U16)
                .window(4)
                .overlap(4)
                .open(dir.path("short.bin")),
            Config,
            "a stride of 0",
        ),
        (
            of(DType::F32).window(1).open(dir.path("short.bin")),
            Config,
            "whole numbers",
        ),
        (
            of(DType::U16).window(4).open(dir.path("gone.bin")),
            NotFound,
            "gone.bin",
        ),
        (
            of(DType::U16).window(4).llm_c().open(dir.path("other.bin")),
            Decode,
            "not a token file of llm.c",
        ),
    ];
    for (index, (result, kind, words)) in cases.into_iter().enumerate() {
        let error = result
            .err()
            .unwrap_or_else(|| panic!("case {index} was accepted"));
        assert_eq!(error.kind(), kind, "case {index}: {error}");
        assert!(error.to_string().contains(words), "case {index}: {error}");
    }
    let error = of(DType::U16)
        .window(4)
        .open(dir.path("odd.bin"))
        .unwrap_err();
    assert_eq!((error.site().offset, error.site().len), (Some(32), Some(1)));
}

#[test]
fn a_token_that_is_not_in_the_vocabulary_is_an_error_of_its_sample() {
    let dir = Dir::new();
    let ids = [5_u32, 7, 70_000, 8, 9, 11];
    let bytes = ids.map(u32::to_le_bytes).concat();
    let path = dir.write("a.bin", &bytes);
    let open = |dtype, size| {
        Tokens::builder(dtype)
            .window(2)
            .vocabulary(size)
            .open(&path)
    };
    check(|| open(DType::U32, 70_001), &windows(&bytes, 4, 2, 2));
    let negative = dir.write("b.bin", &[3_i32, -1].map(i32::to_le_bytes).concat());
    let cases = [
        (
            open(DType::U32, 70_000),
            1,
            "token 70000, but `vocabulary(70000)` ends the ids at 69999: the tokens may not",
        ),
        // 70,000 as two tokens of 16 bits: 4,464 and 1.
        (
            open(DType::U16, 4464),
            2,
            "token 4464, but `vocabulary(4464)` ends the ids at 4463",
        ),
        (open(DType::I64, 100), 0, "token 34359808368, but"),
        (
            Tokens::builder(DType::I32)
                .window(2)
                .vocabulary(9)
                .open(negative),
            0,
            "a negative token, but",
        ),
    ];
    for (tokens, sample, words) in cases {
        let tokens = std::sync::Arc::new(tokens.unwrap());
        let (done, _) = Verify::new()
            .run(&tokens, |_| ControlFlow::Continue(()))
            .unwrap();
        assert!(done.damaged > 0, "{words}");
        let loader = Loader::builder(tokens).batch_size(1).build().unwrap();
        let error = loader.epoch(0).unwrap().find_map(Result::err).unwrap();
        assert_eq!(
            (error.kind(), error.site().sample),
            (Decode, Some(sample)),
            "{error}"
        );
        assert!(error.message().starts_with(words), "{error}");
    }
    for (dtype, size, words) in [
        (DType::U16, 65_537, "1 to 2^16 ids"),
        (DType::I8, 0, "1 to 2^7 ids"),
    ] {
        must_fail(open(dtype, size), Config, words);
    }
    let documents = || Megatron::builder().documents(100);
    let checked = documents()
        .vocabulary(1 << 16)
        .open(file("megatron-u16"))
        .unwrap();
    let lengths = checked.lengths("tokens").unwrap();
    assert_eq!(
        lengths,
        documents()
            .open(file("megatron-u16"))
            .unwrap()
            .lengths("tokens")
            .unwrap()
    );
}

#[test]
fn tokens_in_memory_need_no_file() {
    let tokens = Tokens::builder(DType::U8)
        .window(3)
        .open_bytes(*b"abcdefgh")
        .unwrap();
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
        let documents: Vec<Row> = DOCUMENTS
            .iter()
            .map(|range| one("tokens", &sequences[range.clone()].concat()))
            .collect();
        for prefix in [
            name.to_string(),
            format!("{name}.idx"),
            format!("{name}.bin"),
        ] {
            check(
                || Megatron::builder().documents(13).open(file(&prefix)),
                &documents,
            );
        }
        let rows: Vec<Row> = sequences.iter().map(|bytes| one("tokens", bytes)).collect();
        check(|| Megatron::builder().sequences(20).open(file(name)), &rows);
        let all = windows(&sequences.concat(), size, 5, 4);
        check(
            || Megatron::builder().window(4).next_token().open(file(name)),
            &all,
        );
        let megatron = Megatron::builder()
            .window(4)
            .next_token()
            .open(file(name))
            .unwrap();
        assert_eq!(
            (
                megatron.tokens(),
                megatron.sequences(),
                megatron.documents()
            ),
            (25, 6, 4)
        );
        assert_eq!(megatron.leftover_tokens(), 0);
    }
}

#[test]
fn long_documents_are_an_error_or_cut_and_counted() {
    let open = |builder: MegatronBuilder| builder.open(file("megatron-u16"));
    let error = open(Megatron::builder().documents(6)).unwrap_err();
    assert_eq!(error.kind(), Shape);
    assert_eq!(error.site().sample, Some(1));
    assert_says(
        &error,
        "2 of the documents are longer than 6 tokens, the first has 7",
    );
    let cut = open(Megatron::builder().documents(6).cut(true)).unwrap();
    assert_eq!((cut.len(), cut.leftover_tokens()), (4, 1 + 7));
    assert_says(cut.describe(), "2 cut by 8 tokens, 1 empty");
    let expected: Vec<Row> = {
        let sequences = sequences("megatron-u16", 2);
        let short = |bytes: Vec<u8>| one("tokens", &bytes[..bytes.len().min(12)]);
        DOCUMENTS
            .iter()
            .map(|range| short(sequences[range.clone()].concat()))
            .collect()
    };
    check(
        || open(Megatron::builder().documents(6).cut(true)),
        &expected,
    );
    for builder in [
        Megatron::builder(),
        Megatron::builder().documents(0),
        Megatron::builder().documents(5).window(3),
        Megatron::builder().window(3).cut(true),
    ] {
        assert_eq!(open(builder).unwrap_err().kind(), Config);
    }
}

#[test]
fn a_multimodal_index_is_read_where_all_sequences_are_text() {
    let dir = Dir::new();
    let idx = std::fs::read(file("megatron-u16.idx")).unwrap();
    dir.write("a.bin", &std::fs::read(file("megatron-u16.bin")).unwrap());
    let open = || Megatron::builder().sequences(20).open(dir.path("a"));
    dir.write("a.idx", &[&idx[..], &[0; 6]].concat());
    let rows: Vec<Row> = sequences("megatron-u16", 2)
        .iter()
        .map(|bytes| one("tokens", bytes))
        .collect();
    check(open, &rows);
    dir.write("a.idx", &[&idx[..], &[0, 0, 1, 0, 0, 0]].concat());
    let error = open().unwrap_err();
    assert_eq!(
        (error.kind(), error.site().offset),
        (Decode, Some(146 + 2)),
        "{error}"
    );
    assert_says(&error, "a multimodal index: this sequence has mode 1");
}

#[test]
fn an_index_that_contradicts_itself_or_its_tokens_is_refused() {
    let dir = Dir::new();
    let idx = std::fs::read(file("megatron-u16.idx")).unwrap();
    let bin = std::fs::read(file("megatron-u16.bin")).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut out = idx.clone();
        out[at..at + bytes.len()].copy_from_slice(bytes);
        out
    };
    let offsets = 34 + 6 * 4;
    let documents = 34 + 6 * 12;
    let negative = (-5_i32).to_le_bytes();
    let cases = [
        ("the magic", with(0, b"X"), Decode, "not a Megatron index"),
        ("the version", with(9, &[2]), Decode, "not a Megatron index"),
        ("floats", with(17, &[6]), Decode, "float"),
        ("an unknown dtype", with(17, &[9]), Decode, "dtype 9"),
        (
            "another dtype",
            with(17, &[4]),
            Decode,
            "sequence 1 starts at byte 10",
        ),
        (
            "endless sequences",
            with(18, &[0xff; 8]),
            Truncated,
            "over 2^64",
        ),
        (
            "many sequences",
            with(18, &[7]),
            Truncated,
            "need 158 bytes, the index has 146",
        ),
        ("few sequences", with(18, &[5]), Decode, "need 134"),
        (
            "a negative length",
            with(34, &negative),
            Decode,
            "length of -5",
        ),
        (
            "another length",
            with(34, &[4]),
            Decode,
            "sequence 1 starts at byte 10",
        ),
        (
            "another offset",
            with(offsets + 8, &[9]),
            Decode,
            "sequence 1 starts at byte 9",
        ),
        (
            "a late first document",
            with(documents, &[1]),
            Decode,
            "first document",
        ),
        (
            "documents that go back",
            with(documents + 16, &[0]),
            Decode,
            "ends with sequence 0",
        ),
        (
            "a document behind the end",
            with(documents + 16, &[9]),
            Decode,
            "ends with sequence 9",
        ),
        (
            "an early last document",
            with(documents + 32, &[5]),
            Decode,
            "ends with sequence 5 of 6",
        ),
        ("bytes over", [&idx[..], b"x"].concat(), Decode, "147"),
    ];
    dir.write("a.bin", &bin);
    for (what, bytes, kind, words) in cases {
        dir.write("a.idx", &bytes);
        for builder in [
            Megatron::builder().documents(99),
            Megatron::builder().sequences(99),
            Megatron::builder().window(2),
        ] {
            let error = builder
                .open(dir.path("a"))
                .err()
                .unwrap_or_else(|| panic!("{what} was accepted"));
            assert!(
                error.kind() == kind && error.to_string().contains(words),
                "{what}: {error}"
            );
        }
    }
    dir.write("a.idx", &idx);
    for (bytes, kind) in [
        (&bin[..48], Truncated),
        (&[&bin[..], b"xx"].concat(), Decode),
    ] {
        dir.write("a.bin", bytes);
        must_fail(
            Megatron::builder().window(2).open(dir.path("a")),
            kind,
            "the index says 25 u16 tokens",
        );
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
        ("megatron-u16.idx", 146, |dir| {
            seen(
                Megatron::builder()
                    .documents(30)
                    .open(dir.path("megatron-u16")),
            )
        }),
        ("llmc-gpt2.bin", 40, |dir| {
            seen(
                Tokens::builder(DType::U16)
                    .window(9)
                    .llm_c()
                    .open(dir.path("llmc-gpt2.bin")),
            )
        }),
    ];
    for (name, flipped, look) in looks {
        let (cuts, flips) = sweep(&dir, name, 0..flipped, || look(&dir));
        assert_eq!(
            (cuts.harmless, cuts.values, cuts.structure.len()),
            (0, 0, 0),
            "{name}: {cuts:?}"
        );
        match name {
            // Where one document ends and the next starts is stored only once: a flip that keeps
            // them ascending moves the boundary. Ends of sequences are stored twice.
            "megatron-u16.idx" => {
                let moved = flips.structure.len();
                assert!(
                    moved <= 4 && (moved == 4 || flips_each() < 8),
                    "{:?}",
                    flips.structure
                );
                assert_eq!(flips.refused + moved, flipped * flips_each(), "{flips:?}");
                assert!(
                    flips.structure.iter().all(|what| document_start(what)),
                    "{:?}",
                    flips.structure
                );
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
    let byte = what
        .split("byte ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    byte.is_some_and(|byte| byte >= 34 + 6 * 12)
}

proptest::proptest! {
    #[test]
    fn no_megatron_bytes_make_the_parser_panic(bytes in numeric::mangled([&50_u64.to_le_bytes()[..], &std::fs::read(fixture("tokens").join("megatron-u16.idx")).unwrap()].concat())) {
        feedline::unstable::fuzzing::headers(&bytes);
    }
}

#[test]
fn the_fuzzed_parsers_accept_whole_files() {
    let file = [
        &50_u64.to_le_bytes()[..],
        &std::fs::read(fixture("tokens").join("megatron-u16.idx")).unwrap(),
    ]
    .concat();
    assert_eq!(feedline::unstable::fuzzing::headers(&file), 1);
}
