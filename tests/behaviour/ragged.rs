//! Ragged batches: the rows of a field of varying length side by side. The oracle is the padded
//! batch of the same loader.

use crate::common::formats::tar_member;
use crate::common::runs::Data;
use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Megatron, Tar, TfRecord};
use feedline::decode::Bytes;
use feedline::memory::MemoryTerm;
use feedline::tensor::{DType, Field};
use feedline::{Batch, ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, State, Status};
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum length of `tok`, which has three numbers of 16 bits per element.
const MAX: usize = 40;
const UNIT: usize = 6;

/// Members of so many elements.
fn tar(dir: &Dir, lens: &[usize]) -> Tar {
    let bytes = [
        lens.iter()
            .enumerate()
            .flat_map(|(number, len)| {
                let class = tar_member(&format!("k{number}.cls"), b"7");
                [
                    tar_member(
                        &format!("k{number}.tok"),
                        &noise(*len * UNIT, number as u64 + 1),
                    ),
                    class,
                ]
                .concat()
            })
            .collect::<Vec<_>>(),
        vec![0; 1024],
    ]
    .concat();
    let field = Field::rows_up_to("tok", DType::U16, MAX, [3]);
    let path = dir.path("x.tar");
    // Written again, it would be another file to a loader that has opened it.
    if !path.exists() {
        dir.write("x.tar", &bytes);
    }
    Tar::builder()
        .raw(field, "tok")
        .class("cls")
        .index(false)
        .open(path)
        .unwrap()
}

/// The rows of `name` in the padded batch are those of the ragged one, and nothing lies between
/// them.
fn same(ragged: &Batch, padded: &Batch, name: &str) {
    assert_eq!(
        (ragged.ids(), ragged.status()),
        (padded.ids(), padded.status())
    );
    let values = ragged.field(name).unwrap();
    let right = padded.field(name).unwrap();
    let lens = right.lens().unwrap();
    let unit = right.size_bytes() / right.shape()[..2].iter().product::<usize>();
    let width = right.shape()[1] * unit;
    let bytes: Vec<u8> = (0..padded.len())
        .flat_map(|row| &right.as_bytes().unwrap()[row * width..][..lens[row] as usize * unit])
        .copied()
        .collect();
    assert!(values.as_bytes().unwrap() == bytes, "{name}: {values:?}");
    let mut offsets = vec![0];
    lens.iter()
        .for_each(|len| offsets.push(offsets[offsets.len() - 1] + len));
    assert_eq!(
        (values.offsets().unwrap(), values.lens().unwrap()),
        (&offsets[..], lens),
        "{name}"
    );
    let mut shape = right.shape()[1..].to_vec();
    shape[0] = offsets[padded.len()] as usize;
    assert_eq!(
        (values.shape(), values.size_bytes(), values.dtype()),
        (shape, bytes.len(), right.dtype()),
        "{name}"
    );
    assert!(right.offsets().is_none(), "{name}");
    for part in ragged.micro(3).unwrap() {
        let field = part.field(name).unwrap();
        let first = offsets[part.rows().start] as usize * unit;
        let end = offsets[part.rows().end] as usize * unit;
        assert!(
            field.as_bytes().unwrap() == &bytes[first..end],
            "{name}: {part:?}"
        );
    }
}

/// Both loaders give the same rows for two epochs.
fn check(ragged: &Loader, padded: &Loader, names: &[&str]) -> usize {
    let both = ragged.epochs(0..2).unwrap();
    let mut count = 0;
    for (found, right) in both.zip(padded.epochs(0..2).unwrap()) {
        let found = found.unwrap();
        let right = right.unwrap();
        names.iter().for_each(|name| same(&found, &right, name));
        count += 1;
    }
    assert_eq!(count, 2 * padded.batches_per_epoch());
    count as usize
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn ragged_batches_are_the_padded_ones_without_padding(
        lens in prop::collection::vec(0_usize..=MAX, 1..40),
        (batch, last, seed) in (1_usize..17, 0..4_usize, any::<u64>()),
        (reader, workers, limited) in (0..6_usize, 1..4_usize, any::<bool>()),
    ) {
        let dir = Dir::new();
        let (mode, direct) = self::reader(reader);
        let make = || {
            let loader = Loader::builder(tar(&dir, &lens)).order(Order::shuffled(seed)).batch_size(batch);
            loader.last_batch(ALL_LAST[last]).tuning(|t| t.reader(mode).direct(direct)).workers(workers)
        };
        let padded = match make().build() {
            Ok(loader) => loader,
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::Empty);
                return Ok(());
            }
        };
        let limit = limited.then(|| (lens.iter().sum::<usize>() * 2 + MAX) * UNIT * batch.div_ceil(lens.len()));
        check(&build(make().ragged("tok", limit)), &padded, &["tok"]);
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

fn features() -> TfRecord {
    let builder = TfRecord::builder()
        .index(false)
        .floats(Field::up_to("boxes", DType::F32, 12), "boxes");
    builder
        .ints(Field::up_to("ids", DType::I64, 11), "ids")
        .open(fixture("tfrecord/example.tfrecord"))
        .unwrap()
}

#[test]
fn fields_of_every_origin_can_be_ragged() {
    let dir = Dir::new();
    let documents = || {
        Megatron::builder()
            .documents(1000)
            .open(fixture("tokens/megatron-u16"))
            .unwrap()
    };
    let name = documents().schema()[0].name.clone();
    let make = |ragged: Option<Option<usize>>| {
        let loader = Loader::builder(documents())
            .order(Order::shuffled(3))
            .batch_size(3);
        build(
            ragged
                .into_iter()
                .fold(loader, |loader, limit| loader.ragged(&name, limit)),
        )
    };
    for limit in [None, Some(1 << 16)] {
        check(&make(Some(limit)), &make(None), &[&name]);
    }

    let make = || {
        Loader::builder(features())
            .order(Order::shuffled(3))
            .batch_size(4)
    };
    check(
        &build(make().ragged("boxes", None).ragged("ids", None)),
        &build(make()),
        &["boxes", "ids"],
    );
    // Lengths that were measured can limit a batch.
    let measured = features()
        .facts(dir.path("lengths"))
        .lengths()
        .open()
        .unwrap();
    let limited = Loader::builder(measured)
        .order(Order::shuffled(3))
        .batch_size(4)
        .ragged("ids", Some(400));
    check(&build(limited), &build(make()), &["ids"]);

    let data = Data::chunks(&dir, &[3, 5, 1, 4], true, false);
    for order in [
        Order::windowed(3, 2),
        Order::shuffled(2),
        Order::sequential(),
    ] {
        let make = || data.builder().order(order.clone()).batch_size(4);
        check(
            &build(make().ragged("head", None)),
            &build(make()),
            &["head"],
        );
    }
}

#[test]
fn rows_of_decoders_and_transforms_can_be_ragged() {
    let dir = Dir::new();
    let lens = [30, 10, 5, 40, 0, 22, 17];
    let add = |builder: LoaderBuilder| {
        let field = Field::rows_up_to("mel", DType::F32, 50, [2]);
        builder
            .order(Order::shuffled(1))
            .batch_size(3)
            .map_adding([field], |row, ctx| {
                let tokens = row.index_of("tok")?;
                let mel = row.index_of("mel")?;
                let len = row.len_of(tokens).unwrap_or(0);
                row.set_len(tokens, len / 2)?;
                row.slice_mut::<f32>(mel)?.fill(ctx.id() as f32);
                row.set_len(mel, 50 - len)
            })
    };
    let make = || add(Loader::builder(tar(&dir, &lens)));
    check(
        &build(make().ragged("mel", None).ragged("tok", None)),
        &build(make()),
        &["mel", "tok"],
    );

    // A decoder of bytes in chunks, whose lengths no index has.
    let text = tar_member("0.txt", b"abc");
    let texts = [text, tar_member("1.txt", b"defgh"), vec![0; 1024]].concat();
    let open = || {
        Tar::builder()
            .bytes("txt")
            .open_bytes(texts.clone())
            .unwrap()
    };
    let make = || {
        Loader::builder(open())
            .decode_field("txt", Bytes::cut_to(4))
            .batch_size(2)
    };
    check(&build(make().ragged("txt", None)), &build(make()), &["txt"]);
}

#[test]
fn transforms_of_batches_see_values_and_offsets() {
    let dir = Dir::new();
    let lens = [3, 0, 2];
    let loader = Loader::builder(tar(&dir, &lens))
        .batch_size(3)
        .ragged("tok", None)
        .map_batch(|batch, _| {
            let tokens = batch.index_of("tok")?;
            assert_eq!(
                (batch.shape(tokens), batch.offsets(tokens)),
                (vec![5, 3], Some(&[0, 3, 3, 5][..]))
            );
            assert!(batch.lens_mut(tokens).is_none() && batch.rows_mut::<u16>(tokens).is_err());
            batch
                .slice_mut::<u16>(tokens)?
                .iter_mut()
                .for_each(|value| *value = 9);
            Ok(())
        });
    let batch = first(&build(loader));
    assert_eq!(
        batch.field("tok").unwrap().as_slice::<u16>().unwrap(),
        [9; 15]
    );
    assert_eq!(batch.field("tok").unwrap().row::<u16>(2).unwrap(), [9; 6]);
}

#[test]
fn a_state_of_padded_batches_resumes_ragged_ones() {
    let dir: Dir = Dir::new();
    let lens: Vec<usize> = (0..23).map(|k| k * 7 % MAX).collect();
    let make = || {
        Loader::builder(tar(&dir, &lens))
            .order(Order::shuffled(5))
            .batch_size(4)
    };
    let padded = build(make());
    let first = padded.steps(3).unwrap().count();
    let state = State::from_bytes(&padded.state().unwrap().to_bytes()).unwrap();
    let ragged = build(make().ragged("tok", None).resume(state));
    let rest = ragged.steps(5).unwrap().zip(padded.steps(5).unwrap());
    let count = rest
        .map(|(found, right)| same(&found.unwrap(), &right.unwrap(), "tok"))
        .count();
    assert_eq!((first, count), (3, 5));
}

#[test]
fn substitutes_have_their_own_values_or_none_in_limited_batches() {
    let dir = Dir::new();
    let lens = [3, 4, 2, 5];
    let make = |limit| {
        let bad = |row: &mut feedline::Row<'_>| row.len_of(0) == Some(2);
        let loader = Loader::builder(tar(&dir, &lens))
            .batch_size(4)
            .ragged("tok", limit);
        let loader = loader.map(move |row, _| fail_if(bad(row), "no"));
        let loader = build(loader.on_bad_sample(OnBadSample::Substitute { budget: 1 }));
        first(&loader)
    };
    let batch = make(None);
    let substitute = batch.ids()[2] as usize;
    assert_eq!(
        (batch.status()[2], lens[substitute] == 2),
        (Status::Substitute as u8, false)
    );
    let row = batch.field("tok").unwrap();
    assert_eq!(
        bytemuck_bytes(row.row::<u16>(2).unwrap()),
        noise(lens[substitute] * UNIT, substitute as u64 + 1)
    );
    assert_eq!(
        bytemuck_bytes(row.row::<u16>(3).unwrap()),
        noise(5 * UNIT, 4)
    );
    let batch = make(Some(100 * UNIT));
    assert_eq!(
        batch.field("tok").unwrap().offsets().unwrap(),
        [0, 3, 7, 7, 12]
    );
    assert_eq!(
        bytemuck_bytes(batch.field("tok").unwrap().row::<u16>(3).unwrap()),
        noise(5 * UNIT, 4)
    );
}

fn bytemuck_bytes(values: &[u16]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

#[test]
fn limited_batches_reserve_no_more_and_refuse_a_sample_that_does_not_fit() {
    let dir = Dir::new();
    let lens = [30, 20, 10];
    let make = || Loader::builder(tar(&dir, &lens)).batch_size(3);
    let slot = |loader: &Loader| loader.plan().term(MemoryTerm::SLOTS).each;
    let wide = |builder: LoaderBuilder| builder.batch_size(1000).build().unwrap();
    let padded = slot(&wide(make()));
    let whole = slot(&wide(make().ragged("tok", None)));
    let limited = slot(&wide(make().ragged("tok", Some(MAX * UNIT))));
    assert!(
        whole >= padded && whole < padded + 3 * 8192,
        "{whole}, {padded}"
    );
    assert!(
        limited < padded - 999 * MAX * UNIT + 2 * 8192,
        "{limited}, {padded}"
    );

    let loader = build(make().ragged("tok", Some(50 * UNIT)));
    let error = loader.epoch(0).unwrap().next().unwrap().unwrap_err();
    assert_eq!(
        (error.kind(), error.site().sample),
        (ErrorKind::Shape, Some(2)),
        "{error}"
    );
    assert!(
        error
            .message()
            .contains("has room for 300 bytes of a batch, 300 are taken and the sample has 60"),
        "{error}"
    );
}

#[test]
fn build_refuses_what_cannot_be_ragged() {
    let dir = Dir::new();
    let tar = || Loader::builder(tar(&dir, &[3]));
    let chunks: Arc<dyn Dataset> = Data::chunks(&dir, &[3], true, false).dataset;
    let list = || [Field::up_to("list", DType::U8, 3)];
    let cases = [
        (
            tar().ragged("tik", None),
            "`ragged` names `tik`, which is not a field of the batch; its fields are tok, label",
        ),
        (
            tar().ragged("label", None),
            "field `label` has a fixed shape, so there is nothing to pack: leave it out of `ragged`",
        ),
        (
            tar().ragged("tok", Some(9)),
            "field `tok`: the limit of 9 bytes per batch is less than the 240 of one row",
        ),
        (
            tar()
                .map_batch_adding(list(), |_, _| Ok(()))
                .ragged("list", None),
            "a batch transform cannot add the packed field `list`: rows are packed before it runs",
        ),
        (
            tar()
                .map_adding(list(), |_, _| Ok(()))
                .ragged("list", Some(9)),
            "the bytes per batch of field `list` cannot be limited: a transform adds it",
        ),
        (
            Loader::builder(features()).ragged("ids", Some(900)),
            "the bytes per batch of field `ids` cannot be limited: the dataset's `field_bytes` gives no lengths for it",
        ),
        (
            Loader::builder(chunks).ragged("head", Some(900)),
            "the bytes per batch of field `head` cannot be limited: it is stored in chunks",
        ),
    ];
    for (builder, words) in cases {
        let error = builder.build().unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
    }
}
