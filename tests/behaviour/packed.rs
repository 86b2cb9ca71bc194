//! Packed fields: encoded bytes of varying length, side by side in a batch. The oracle writes them
//! one after the other.

use crate::common::*;
use feedline::dataset::Images;
use feedline::decode::Bytes;
use feedline::memory::MemoryTerm;
use feedline::tensor::{DType, Field};
use feedline::{Batch, ErrorKind, LastBatch, Loader, LoaderBuilder, OnBadSample, Order, Status};
use proptest::prelude::*;

/// Files of these lengths in one class; their bytes are not pictures.
fn files(dir: &Dir, lens: &[usize]) -> Vec<Vec<u8>> {
    lens.iter()
        .enumerate()
        .map(|(number, len)| {
            let bytes = noise(*len, number as u64 + 1);
            dir.write(&format!("class/{number:05}.jpg"), &bytes);
            bytes
        })
        .collect()
}

fn packed(dir: &Dir, decoder: Bytes) -> LoaderBuilder {
    Loader::builder(Images::open(dir.path("")).unwrap()).decode_field("image", decoder)
}

/// Expected bytes and offsets of a batch by its ids; blank rows have no bytes.
fn oracle(batch: &Batch, files: &[Vec<u8>]) -> (Vec<u8>, Vec<u64>) {
    let mut bytes = Vec::new();
    let mut offsets = vec![0];
    for id in batch.ids() {
        bytes.extend(files.get(*id as usize).into_iter().flatten());
        offsets.push(bytes.len() as u64);
    }
    (bytes, offsets)
}

fn check(batch: &Batch, files: &[Vec<u8>]) {
    let (bytes, offsets) = oracle(batch, files);
    let field = batch.field("image").unwrap();
    assert_eq!(
        (field.as_slice::<u8>().unwrap(), field.offsets().unwrap()),
        (&bytes[..], &offsets[..])
    );
    assert_eq!(
        (field.shape(), field.size_bytes(), field.dtype()),
        (vec![bytes.len()], bytes.len(), DType::U8)
    );
    let lens: Vec<_> = offsets.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(field.lens().unwrap(), lens);
    let mut row = 0;
    for part in batch.micro(3).unwrap() {
        let field = part.field("image").unwrap();
        assert_eq!(field.offsets().unwrap().len(), part.len() + 1);
        for number in 0..part.len() {
            let range = offsets[row] as usize..offsets[row + 1] as usize;
            assert_eq!(field.row::<u8>(number).unwrap(), &bytes[range]);
            row += 1;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn packed_batches_equal_the_oracle(
        lens in prop::collection::vec(1_usize..9000, 1..40),
        (batch, last, seed) in (1_usize..17, 0..4_usize, any::<u64>()),
        (reader, workers, declared) in (0..6_usize, 1..4_usize, any::<bool>()),
    ) {
        let dir = Dir::new();
        let files = files(&dir, &lens);
        let largest = lens.iter().copied().max().unwrap();
        let decoder = Bytes::packed(largest);
        // Large enough for the largest rows in any order.
        let decoder = if declared { decoder.batch_bytes(lens.iter().sum::<usize>() * 2 + largest * batch) } else { decoder };
        let (mode, direct) = self::reader(reader);
        let loader = packed(&dir, decoder).order(Order::shuffled(seed)).batch_size(batch).last_batch(ALL_LAST[last]);
        let loader = match loader.tuning(|t| t.reader(mode).direct(direct)).workers(workers).build() {
            Ok(loader) => loader,
            Err(error) => {
                prop_assert!(error.kind() == ErrorKind::Empty && ALL_LAST[last] == LastBatch::Drop);
                return Ok(());
            }
        };
        for epoch in 0..2 {
            for batch in loader.epoch(epoch).unwrap() {
                check(&batch.unwrap(), &files);
            }
        }
    }
}

#[test]
fn packed_bytes_leave_as_two_dlpack_arrays() {
    let dir = Dir::new();
    files(&dir, &[3, 5]);
    let loader = packed(&dir, Bytes::packed(5))
        .batch_size(2)
        .build()
        .unwrap();
    let tensors = first(&loader).into_dlpack();
    let image = tensors
        .fields
        .iter()
        .find(|(name, _)| name == "image")
        .unwrap();
    assert_eq!(
        (image.1.shape(), image.1.dtype()),
        ([8].as_slice(), DType::U8)
    );
    let (name, offsets) = &tensors.offsets[0];
    assert_eq!(
        (name.as_str(), offsets.shape(), offsets.dtype()),
        ("image", [3].as_slice(), DType::U64)
    );
}

#[test]
fn a_substitute_has_no_bytes_in_a_packed_field() {
    let dir = Dir::new();
    let files = files(&dir, &[10, 20, 30, 40]);
    let loader = packed(&dir, Bytes::packed(40)).batch_size(4);
    let odd =
        |row: &mut feedline::Row<'_>| row.bytes_mut(0).len() == 20 && row.len_of(0) == Some(20);
    let loader = loader
        .map(move |row, _| fail_if(odd(row), "not this one"))
        .on_bad_sample(OnBadSample::Substitute { budget: 1 })
        .build()
        .unwrap();
    let batch = first(&loader);
    assert_eq!(batch.status()[1], Status::Substitute as u8);
    let field = batch.field("image").unwrap();
    assert_eq!(field.offsets().unwrap(), [0, 10, 10, 40, 80]);
    assert_eq!(
        field.as_slice::<u8>().unwrap(),
        [&files[0][..], &files[2], &files[3]].concat()
    );
}

#[test]
fn rows_too_large_for_a_packed_field_are_errors() {
    let dir = Dir::new();
    files(&dir, &[10, 20, 30]);
    let cases = [
        (Bytes::packed(20), "takes at most 20, the sample has 30"),
        (
            Bytes::packed(30).batch_bytes(40),
            "has room for 40 bytes of a batch, 30 are taken and the sample has 30",
        ),
    ];
    for (decoder, words) in cases {
        let loader = packed(&dir, decoder).batch_size(3).build().unwrap();
        let error = loader.epoch(0).unwrap().next().unwrap().unwrap_err();
        assert_eq!(
            (error.kind(), error.site().sample),
            (ErrorKind::Shape, Some(2)),
            "{error}"
        );
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn build_refuses_limits_of_packed_fields_without_known_lengths() {
    let dir = Dir::new();
    files(&dir, &[10]);
    let tight = packed(&dir, Bytes::packed(10).batch_bytes(9))
        .build()
        .unwrap_err();
    assert!(
        tight
            .to_string()
            .contains("batch_bytes is 9, less than the 10 of one row"),
        "{tight}"
    );
    let builder = || packed(&dir, Bytes::packed(10));
    let limited = builder()
        .map_adding([Field::packed("x", 9, Some(20))], |_, _| Ok(()))
        .build()
        .unwrap_err();
    assert_eq!(limited.kind(), ErrorKind::Config);
    assert!(
        limited
            .message()
            .contains("field `x` cannot be limited: a transform adds it"),
        "{limited}"
    );
    let late = builder()
        .map_batch_adding([Field::packed("x", 9, None)], |_, _| Ok(()))
        .build()
        .unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Config);
    assert!(
        late.message()
            .contains("a batch transform cannot add the packed field `x`"),
        "{late}"
    );
}

#[test]
fn a_file_shrunk_after_indexing_fails_its_sample() {
    let dir = Dir::new();
    files(&dir, &[10, 20]);
    let loader = packed(&dir, Bytes::packed(64))
        .batch_size(2)
        .build()
        .unwrap();
    let plan = loader.plan().term(MemoryTerm::SLOTS).each;
    assert!(plan >= 2 * 64, "the plan counts rows x max: {plan}");
    dir.write("class/00001.jpg", &noise(5, 1));
    let error = loader.epoch(0).unwrap().next().unwrap().unwrap_err();
    assert_eq!(error.site().sample, Some(1), "{error}");
}
