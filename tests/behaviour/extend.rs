//! Datasets, decoders, transforms and samplers of users: what they may do, and what the loader says
//! of their mistakes.

use crate::common::formats::tar_member;
use crate::common::toys::Sampled;
use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Framed, Parts, Records, Sizes, Tar};
use feedline::decode::{Bytes, Ctx, Decoder};
use feedline::error::Stage;
use feedline::order::{Sampler, identity_of};
use feedline::storage::{Extent, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Error, ErrorKind, Loader, OnBadSample, Order, Result, Row};
use std::sync::Arc;

/// The mistake of a user's code, at sample 5.
#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    SamplerPanics,
    ExtentsPanics,
    CheckPanics,
    OpenPanics,
    CheckErrs,
    OpenErrs,
    DecoderPanics,
    DecoderErrs,
    DecoderForgetsALength,
    DecoderTakesTwice,
    LongerThanPromised,
    OpensMoreThanPromised,
    HasNoFrames,
}

/// Texts of 8 bytes; two fields share each, in a frame.
struct Texts {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    mistake: Mistake,
}

impl Texts {
    fn new(dir: &Dir, mistake: Mistake) -> Self {
        let mut sources = Sources::new();
        sources
            .file(dir.write("texts", &noise(20 * 8, 3)), 160)
            .unwrap();
        let schema = vec![EncodedField::bytes("text"), EncodedField::bytes("copy")];
        Self {
            sources: Arc::new(sources),
            schema,
            mistake,
        }
    }

    fn errs(&self, sample: u64, mistake: Mistake) -> bool {
        sample == 5 && self.mistake == mistake
    }
}

impl Dataset for Texts {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        20
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    /// The extent that both fields share counts once.
    fn sizes(&self) -> Sizes {
        Sizes {
            opened_bytes_max: 8,
            ..Sizes::new(8)
        }
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        assert!(!self.errs(sample, Mistake::ExtentsPanics), "a bug");
        let len = if self.errs(sample, Mistake::LongerThanPromised) {
            9
        } else {
            8
        };
        let extent = Extent {
            source: SourceId::at(0),
            offset: sample * 8,
            len,
        };
        parts.framed(0, extent);
        parts.framed(1, extent);
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        (self.mistake != Mistake::HasNoFrames).then_some(self)
    }
}

impl Framed for Texts {
    fn check(&self, sample: u64, _: usize, _: &[u8]) -> Result<()> {
        assert!(!self.errs(sample, Mistake::CheckPanics), "a bug");
        match self.errs(sample, Mistake::CheckErrs) {
            true => Err(Error::decode("bad byte").with_range(3, 1)),
            false => Ok(()),
        }
    }
    fn open<'a>(
        &self,
        sample: u64,
        _: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        assert!(!self.errs(sample, Mistake::OpenPanics), "a bug");
        if self.errs(sample, Mistake::OpenErrs) {
            return Err(Error::decode("bad byte").with_range(3, 1));
        }
        buffer.extend_from_slice(bytes);
        if self.errs(sample, Mistake::OpensMoreThanPromised) {
            buffer.push(0);
        }
        Ok(buffer)
    }
}

struct Sequence(Mistake);

impl Sampler for Sequence {
    fn len(&self) -> u64 {
        20
    }
    fn id(&self, _: u64, position: u64) -> u64 {
        assert!(self.0 != Mistake::SamplerPanics || position != 4, "a bug");
        position
    }
    fn identity(&self) -> u64 {
        identity_of([20])
    }
}

/// Copies the bytes to a field of up to 20, and writes behind them.
struct Scribbler(Mistake);

impl Decoder for Scribbler {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        Ok(vec![
            Field::up_to(&input.name, DType::U8, 20),
            Field::fixed(format!("{}_sum", input.name), DType::U64, []),
        ])
    }
    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        assert!(ctx.id() != 5 || self.0 != Mistake::DecoderPanics, "a bug");
        if self.0 == Mistake::DecoderForgetsALength && ctx.id() == 5 {
            out.slice_mut::<u8>(ctx.fields().start)?[0] = 1;
            return Ok(());
        }
        let text = ctx.fields().start;
        let sum = ctx.fields().start + 1;
        out.set_len(text, input.len())?;
        let mut fields = out.split();
        let bytes = fields.take::<u8>(text)?;
        let total = fields.take::<u64>(sum)?;
        bytes.fill(b'!');
        bytes[..input.len()].copy_from_slice(input);
        total[0] = input.iter().map(|byte| u64::from(*byte)).sum();
        match self.0 {
            Mistake::DecoderErrs if ctx.id() == 5 => Err(Error::user("no such voice")),
            Mistake::DecoderTakesTwice if ctx.id() == 5 => fields.take::<u8>(text).map(|_| ()),
            _ => Ok(()),
        }
    }
}

#[test]
fn framed_bytes_without_frames_are_an_error() {
    let dir = Dir::new();
    let texts = Arc::new(Texts::new(&dir, Mistake::HasNoFrames));
    let builder = Loader::builder(texts.clone()).decode_field("text", Bytes::up_to(8));
    let loader = build(builder.keep(["text"]).batch_size(1));
    let part = texts.clone().subset([0]).unwrap();
    let plain = [
        texts.read_sample(0).unwrap_err(),
        part.read_sample(0).unwrap_err(),
    ];
    for error in plain.into_iter().chain([pull(&loader, 0).unwrap_err()]) {
        assert!(
            error
                .to_string()
                .contains("gave a framed part, but its `framed` is `None`"),
            "{error}"
        );
        assert_eq!(
            (error.kind(), error.site().sample),
            (ErrorKind::User, Some(0))
        );
    }
}

#[test]
fn mistakes_of_users_code_name_that_code_and_the_sample() {
    let dir = Dir::new();
    let cases = [
        (
            Mistake::SamplerPanics,
            Stage::Order,
            ErrorKind::Panicked,
            "epoch 0, position 4: the sampler: a bug",
        ),
        (
            Mistake::ExtentsPanics,
            Stage::Read,
            ErrorKind::Panicked,
            "the dataset's `extents`: a bug",
        ),
        (
            Mistake::CheckPanics,
            Stage::Decode,
            ErrorKind::Panicked,
            "the dataset's `check`: a bug",
        ),
        (
            Mistake::OpenPanics,
            Stage::Decode,
            ErrorKind::Panicked,
            "the dataset's `open`: a bug",
        ),
        (
            Mistake::DecoderPanics,
            Stage::Decode,
            ErrorKind::Panicked,
            "a bug",
        ),
        (
            Mistake::DecoderErrs,
            Stage::Decode,
            ErrorKind::User,
            "no such voice",
        ),
        (
            Mistake::DecoderForgetsALength,
            Stage::Decode,
            ErrorKind::Shape,
            "written, but its length was not set",
        ),
        (
            Mistake::DecoderTakesTwice,
            Stage::Decode,
            ErrorKind::Shape,
            "field `text` is taken twice",
        ),
        (
            Mistake::LongerThanPromised,
            Stage::Read,
            ErrorKind::User,
            "9 bytes, the dataset's `sample_bytes_max` is 8",
        ),
        (
            Mistake::OpensMoreThanPromised,
            Stage::Decode,
            ErrorKind::User,
            "gave 9 bytes, the dataset's `opened_bytes_max` is 8",
        ),
    ];
    for (mistake, stage, kind, words) in cases {
        for (mode, direct) in readers() {
            let builder =
                Loader::builder(Texts::new(&dir, mistake)).order(Order::sampler(Sequence(mistake)));
            let decoders = builder
                .decode_field("text", Scribbler(mistake))
                .decode_field("copy", Bytes::up_to(9));
            let loader = build(
                decoders
                    .batch_size(4)
                    .tuning(|t| t.reader(mode).direct(direct)),
            );
            let error = pull(&loader, 0).unwrap_err();
            assert_eq!(
                (error.stage(), error.kind()),
                (stage, kind),
                "{mode:?} {direct:?}: {error}"
            );
            assert!(
                error.message().contains(words),
                "{mode:?} {direct:?}: {error}"
            );
            let sample = if mistake == Mistake::SamplerPanics {
                None
            } else {
                Some(5)
            };
            assert_eq!(
                (error.site().sample, error.site().batch),
                (sample, Some(1)),
                "{mode:?} {direct:?}: {error}"
            );
            let placed = error.site().path.is_some() || mistake == Mistake::SamplerPanics;
            assert!(
                placed || mistake == Mistake::ExtentsPanics,
                "{mode:?} {direct:?}: {error}"
            );
            assert_eq!(
                error.site().field.is_some(),
                stage == Stage::Decode,
                "{mode:?} {direct:?}: {error}"
            );
        }
    }
}

#[test]
fn mistakes_in_transforms_are_of_the_stage_map() {
    let dir = Dir::new();
    let (file, _) = records_file(&dir, 20, 8);
    let start = || Loader::builder(records(&file, 8)).batch_size(4);
    let cases = [
        start().map(|row, _| row.index_of("tokens").map(|_| ())),
        start().map(|row, _| row.slice_mut::<f64>(0).map(|_| ())),
        start().map_batch(|batch, _| batch.index_of("tokens").map(|_| ())),
        start().map_batch(|_, _| Err(Error::user("no"))),
    ];
    for (number, builder) in cases.into_iter().enumerate() {
        let error = pull(&build(builder), 0).unwrap_err();
        assert_eq!(error.stage(), Stage::Map, "{number}: {error}");
    }
}

#[test]
fn a_sampler_that_panics_for_its_identity_is_refused_when_the_loader_is_built() {
    struct Broken;
    impl Sampler for Broken {
        fn len(&self) -> u64 {
            20
        }
        fn id(&self, _: u64, position: u64) -> u64 {
            position
        }
        fn identity(&self) -> u64 {
            panic!("no seed")
        }
    }
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 20, 8);
    let error = Loader::builder(records(&path, 8))
        .order(Order::sampler(Broken))
        .build()
        .unwrap_err();
    assert_eq!(
        (error.stage(), error.kind()),
        (Stage::Order, ErrorKind::Panicked),
        "{error}"
    );
}

#[test]
fn a_verification_names_code_field_and_member_and_checks_the_bounds() {
    let dir = Dir::new();
    let cases = [
        (Mistake::CheckPanics, "the dataset's `check`: a bug"),
        (Mistake::OpenPanics, "the dataset's `open`: a bug"),
        (
            Mistake::LongerThanPromised,
            "9 bytes, the dataset's `sample_bytes_max` is 8",
        ),
        (
            Mistake::OpensMoreThanPromised,
            "9 bytes, the dataset's `opened_bytes_max` is 8",
        ),
    ];
    for (mistake, words) in cases {
        let verify = feedline::dataset::Verify::default();
        let (done, damaged) = verify
            .run(&Texts::new(&dir, mistake), |_| {
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        assert_eq!((done.damaged, damaged.len()), (1, 1), "{words}");
        assert!(
            damaged[0].message().contains(words) && damaged[0].site().sample == Some(5),
            "{}",
            damaged[0]
        );
    }
}

#[test]
fn bytes_behind_the_length_are_zero_whoever_wrote_there() {
    let dir = Dir::new();
    let start = || {
        let builder = Loader::builder(Texts::new(&dir, Mistake::None))
            .keep(["text", "text_sum"])
            .batch_size(7);
        builder
            .decode_field("text", Scribbler(Mistake::None))
            .decode_field("copy", Bytes::up_to(8))
    };
    const TEXT: usize = 0;
    let cases = [
        (8, start()),
        (
            8,
            start().map(|row, _| row.slice_mut::<u8>(TEXT).map(|bytes| bytes.fill(b'?'))),
        ),
        (
            3,
            start().map(move |row, _| {
                row.set_len(TEXT, 3)
                    .map(|()| row.bytes_mut(TEXT).fill(b'?'))
            }),
        ),
        (
            8,
            start().map(|row, _| row.split().take::<u8>(TEXT).map(|bytes| bytes.fill(b'?'))),
        ),
        (
            2,
            start().map_batch(|batch, _| {
                let text = batch.index_of("text")?;
                batch.slice_mut::<u8>(text)?.fill(b'?');
                batch.lens_mut(text).unwrap().fill(2);
                Ok(())
            }),
        ),
        (
            5,
            start().map_batch(|batch, _| {
                let text = batch.index_of("text")?;
                let sum = batch.index_of("text_sum")?;
                let mut fields = batch.split();
                let bytes = fields.take::<u8>(text)?;
                let lens = fields.take_lens(text)?.unwrap();
                let sums = fields.take::<u64>(sum)?;
                assert!(fields.take::<u8>(text).is_err() && fields.take_lens(text).is_err());
                lens.fill(5);
                bytes.fill(b'?');
                sums.fill(1);
                Ok(())
            }),
        ),
    ];
    for (number, (len, builder)) in cases.into_iter().enumerate() {
        for batch in build(builder).epoch(0).unwrap() {
            let batch = batch.unwrap();
            let field = batch.field("text").unwrap();
            assert!(
                field
                    .lens()
                    .unwrap()
                    .iter()
                    .take(batch.valid())
                    .all(|found| *found == len),
                "case {number}"
            );
            for row in field
                .as_slice::<u8>()
                .unwrap()
                .chunks(20)
                .take(batch.valid())
            {
                assert!(
                    row[len as usize..].iter().all(|byte| *byte == 0),
                    "case {number}: {row:?}"
                );
                assert!(
                    row[..len as usize].iter().any(|byte| *byte != 0),
                    "case {number}: {row:?}"
                );
            }
        }
    }
    let longer = start().map_batch(|batch, _| {
        let text = batch.index_of("text")?;
        batch.lens_mut(text).unwrap()[2] = 21;
        Ok(())
    });
    let error = pull(&build(longer), 0).unwrap_err();
    assert!(
        error
            .message()
            .contains("row 2 of field `text` has length 21, but the maximum is 20"),
        "{error}"
    );
}

/// Tar members of these lengths, two per sample.
fn tar(dir: &Dir, lens: &[usize]) -> Tar {
    let mut bytes = Vec::new();
    for (number, len) in lens.iter().enumerate() {
        bytes.extend(tar_member(
            &format!("k{number}.txt"),
            &noise(*len, number as u64),
        ));
        bytes.extend(tar_member(&format!("k{number}.cls"), b"7"));
    }
    bytes.extend([0; 1024]);
    Tar::builder()
        .field(EncodedField::bytes("text"), "txt")
        .class("cls")
        .open(dir.write("x.tar", &bytes))
        .unwrap()
}

#[test]
fn errors_of_decoders_name_the_member() {
    struct Refuses;
    impl Decoder for Refuses {
        fn outputs(&self, _: &EncodedField) -> Result<Vec<Field>> {
            Ok(vec![Field::fixed("x", DType::U8, [])])
        }
        fn decode(&self, _: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
            out.slice_mut::<u8>(ctx.fields().start)?[0] = 1;
            if ctx.id() == 2 {
                Err(Error::decode("not a WAV").within("chunk 3"))
            } else {
                Ok(())
            }
        }
    }
    let dir = Dir::new();
    let both = || {
        let mut bytes = Vec::new();
        for number in 0..4 {
            bytes.extend(tar_member(&format!("k{number}.txt"), b"text"));
            bytes.extend(tar_member(&format!("k{number}.wav"), &noise(30, number)));
        }
        bytes.extend([0; 1024]);
        let fields = Tar::builder()
            .field(EncodedField::bytes("text"), "txt")
            .field(EncodedField::bytes("sound"), "wav");
        fields.open(dir.write("both.tar", &bytes)).unwrap()
    };
    for (mode, direct) in readers() {
        let loader = Loader::builder(both())
            .decode_field("text", Bytes::up_to(9))
            .decode_field("sound", Refuses);
        let error = pull(
            &build(
                loader
                    .tuning(|t| t.reader(mode).direct(direct))
                    .batch_size(4),
            ),
            0,
        )
        .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("both.tar member=k2.wav field=sound offset="),
            "{error}"
        );
        let loader = Loader::builder(tar(&dir, &[30, 10, 20, 40])).decode_field("text", Refuses);
        let error = pull(
            &build(
                loader
                    .tuning(|t| t.reader(mode).direct(direct))
                    .batch_size(4),
            ),
            0,
        )
        .unwrap_err();
        assert_eq!(error.site().member.as_deref(), Some("k2.txt"), "{error}");
        assert!(
            error.to_string().contains("chunk 3: not a WAV: path="),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("x.tar member=k2.txt field=text offset="),
            "{error}"
        );
    }
}

#[test]
fn lengths_of_samples_come_from_the_index() {
    let dir = Dir::new();
    let lens = [30, 10, 0, 40_000];
    let tar = tar(&dir, &lens);
    assert_eq!(tar.lengths("text").unwrap(), lens.map(|len| len as u64));
    assert_eq!(tar.lengths("label").unwrap(), [1; 4]);
    let chosen = tar.subset([3, 1]).unwrap();
    assert_eq!(chosen.lengths("text").unwrap(), [40_000, 10]);
    let texts = Texts::new(&dir, Mistake::None);
    for (field, said) in [
        ("text", "the index has no lengths of field `text`"),
        ("txt", "no field `txt`"),
    ] {
        let error = texts.lengths(field).unwrap_err();
        assert!(
            error.kind() == ErrorKind::Config && error.to_string().contains(said),
            "{error}"
        );
    }
}

#[test]
fn packed_rows_take_lengths_of_the_index_or_move_together() {
    let dir = Dir::new();
    let texts = |decoder: Bytes| {
        Loader::builder(Texts::new(&dir, Mistake::None))
            .keep(["text"])
            .decode_field("text", decoder)
            .batch_size(4)
    };
    let error = texts(Bytes::packed(8).batch_bytes(80)).build().unwrap_err();
    let words = "the bytes per batch of field `text` cannot be limited: the dataset's `field_bytes` gives no lengths for it";
    assert_eq!(error.message(), words);
    let batch = first(&build(texts(Bytes::packed(12))));
    assert_eq!(
        batch.field("text").unwrap().offsets().unwrap(),
        [0, 8, 16, 24, 32]
    );
    // Members that lie side by side are read together, and the index has the length of each.
    let lens = [30, 10, 5, 200];
    let builder = Loader::builder(tar(&dir, &lens))
        .decode_field("text", Bytes::packed(200))
        .batch_size(4);
    let loader = build(builder.map_batch(|batch, _| {
        let text = batch.index_of("text")?;
        let class = batch.index_of("label")?;
        assert_eq!(batch.offsets(text).unwrap(), [0, 30, 40, 45, 245]);
        assert!(batch.offsets(class).is_none());
        Ok(())
    }));
    let batch = first(&loader);
    for (row, len) in lens.iter().enumerate() {
        assert_eq!(
            batch.field("text").unwrap().row::<u8>(row).unwrap(),
            noise(*len, row as u64)
        );
    }
}

#[test]
fn states_do_not_resume_in_another_sampler() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 20, 8);
    let builder = |stride| {
        // Its identity forgets the stride.
        let strides = Sampled(|| 20, move |_, position| position * stride % 20);
        Loader::builder(records(&path, 8))
            .order(Order::sampler(strides))
            .batch_size(4)
    };
    let state = build(builder(7)).state().unwrap();
    assert!(builder(7).resume(state.clone()).build().is_ok());
    assert_eq!(
        builder(11).resume(state).build().unwrap_err().kind(),
        ErrorKind::State
    );
}

/// The field of an audio decoder: frames of 80 bands.
#[test]
fn rows_of_several_dimensions_may_vary_in_length() {
    let field = Field::rows_up_to("mel", DType::F32, 100, [80]);
    assert_eq!(
        (field.dims(), field.row_bytes(), field.is_up_to()),
        (vec![100, 80], 32_000, true)
    );
}

#[test]
fn a_range_of_a_decoder_is_a_place_in_the_file() {
    struct Ranged;
    impl Decoder for Ranged {
        fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
            Ok(vec![Field::fixed(&input.name, DType::U8, [1])])
        }
        fn decode(&self, _: &[u8], _: &mut Ctx<'_>, _: &mut Row<'_>) -> Result<()> {
            Err(Error::decode("bad byte").with_range(3, 1))
        }
    }
    let dir = Dir::new();
    let error = pull(
        &build(Loader::builder(tar(&dir, &[30])).decode_field("text", Ranged)),
        0,
    )
    .unwrap_err();
    assert_eq!(
        (error.site().offset, error.site().len),
        (Some(512 + 3), Some(1)),
        "{error}"
    );
    // A verification says the same.
    let verify = feedline::dataset::Verify::default().decode_field("text", Ranged);
    let (_, seen) = verify
        .run(&tar(&dir, &[30]), |_| std::ops::ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(
        (seen[0].site().offset, seen[0].site().len),
        (Some(512 + 3), Some(1)),
        "{:?}",
        seen[0]
    );
    // Unpacked bytes have no place.
    let texts = Loader::builder(Texts::new(&dir, Mistake::None)).decode_field("text", Ranged);
    let error = pull(&build(texts.decode_field("copy", Bytes::up_to(9))), 0).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("bad byte; at byte 3 of the unpacked field: path="),
        "{error}"
    );
    assert_eq!(
        (error.site().offset, error.site().len),
        (Some(0), Some(8)),
        "{error}"
    );
}

#[test]
fn a_range_of_framed_bytes_is_a_place_in_the_file_for_every_reader_of_a_sample() {
    for mistake in [Mistake::CheckErrs, Mistake::OpenErrs] {
        let dir = Dir::new();
        let texts = || Texts::new(&dir, mistake);
        let mut loader = Loader::builder(texts());
        for field in ["text", "copy"] {
            loader = loader.decode_field(field, Bytes::up_to(8));
        }
        let (_, seen) = feedline::dataset::Verify::default()
            .run(&texts(), |_| std::ops::ControlFlow::Continue(()))
            .unwrap();
        let errors = [
            pull(&build(loader), 0).unwrap_err(),
            texts().read_sample(5).unwrap_err(),
        ];
        for error in errors.iter().chain(&seen) {
            assert_eq!(
                (error.site().offset, error.site().len),
                (Some(5 * 8 + 3), Some(1)),
                "{error}"
            );
        }
        assert_eq!(seen.len(), 1);
    }
}

#[test]
fn substitutes_stay_empty_in_packed_rows_of_any_decoder() {
    struct Packs;
    impl Decoder for Packs {
        fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
            Ok(vec![Field::packed(&input.name, 100, None)])
        }
        fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
            if ctx.id() == 2 {
                return Err(Error::decode("not a text"));
            }
            let field = ctx.fields().start;
            out.set_len(field, input.len())?;
            out.slice_mut::<u8>(field)?.copy_from_slice(input);
            Ok(())
        }
    }
    let dir = Dir::new();
    let loader = Loader::builder(tar(&dir, &[30, 10, 5, 40]))
        .decode_field("text", Packs)
        .batch_size(4);
    let loader = build(loader.on_bad_sample(OnBadSample::Substitute { budget: 1 }));
    let batch = first(&loader);
    assert_eq!(
        batch.field("text").unwrap().lens().unwrap(),
        [30, 10, 0, 40]
    );
}

#[test]
fn added_fields_are_zero_until_a_transform_writes_them() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 20, 8);
    let write = |name: &'static str| {
        move |row: &mut Row<'_>, ctx: &mut Ctx<'_>| {
            if ctx.id() % 2 == 1 {
                return Ok(());
            }
            let field = row.index_of(name)?;
            row.copy_from(field, &[7, 8])
        }
    };
    let loader = Loader::builder(records(&path, 8))
        .batch_size(4)
        .tuning(|t| t.slots(3));
    let loader = loader.map_adding([Field::up_to("a", DType::U8, 3)], write("a"));
    let loader = loader.map_adding([Field::up_to("b", DType::U8, 3)], write("b"));
    let loader = build(loader.map_batch_adding([Field::up_to("c", DType::U8, 3)], |_, _| Ok(())));
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        for (name, len) in [("a", 2), ("b", 2), ("c", 0)] {
            let view = batch.field(name).unwrap();
            assert_eq!(view.lens().unwrap(), [len, 0, len, 0]);
            let own: &[u8] = if len > 0 {
                &[7, 8, 0, 0, 0, 0]
            } else {
                &[0; 6]
            };
            assert_eq!(view.as_slice::<u8>().unwrap(), own.repeat(2));
        }
    }
}

#[test]
fn a_field_that_a_decoder_leaves_alone_is_zero() {
    struct Even;
    impl Decoder for Even {
        fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
            Ok(vec![Field::up_to(&input.name, DType::U8, 40)])
        }
        fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
            if ctx.id() % 2 == 1 {
                Ok(())
            } else {
                out.copy_from(ctx.fields().start, input)
            }
        }
    }
    let dir = Dir::new();
    let lens = [30, 9, 20, 9, 9, 9, 40, 40];
    let loader = Loader::builder(tar(&dir, &lens))
        .decode_field("text", Even)
        .batch_size(1);
    // Three slots, so that an even sample was in each row before.
    let loader = build(loader.tuning(|tuning| tuning.slots(3)));
    for (id, batch) in loader.epoch(0).unwrap().enumerate() {
        let batch = batch.unwrap();
        let text = batch.field("text").unwrap();
        let len = text.lens().unwrap()[0];
        let bytes = text.as_slice::<u8>().unwrap();
        assert_eq!(len, if id % 2 == 0 { lens[id] as u64 } else { 0 });
        assert!(
            bytes[len as usize..].iter().all(|byte| *byte == 0),
            "sample {id}: {bytes:?}"
        );
    }
}

#[test]
fn an_added_field_without_a_length_is_an_error() {
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 20, 8);
    let start = |sized: bool| {
        build(Loader::builder(records(&path, 8)).batch_size(4).map_adding(
            [Field::up_to("list", DType::U8, 3)],
            move |row, _| {
                let field = row.index_of("list")?;
                row.slice_mut::<u8>(field)?[0] = 7;
                if sized { row.set_len(field, 1) } else { Ok(()) }
            },
        ))
    };
    let error = pull(&start(false), 0).unwrap_err();
    assert_eq!(
        (error.stage(), error.kind()),
        (Stage::Map, ErrorKind::Shape),
        "{error}"
    );
    assert!(
        error
            .message()
            .contains("`list` was written, but its length was not set"),
        "{error}"
    );
    let batch = first(&start(true));
    assert_eq!(batch.field("list").unwrap().lens().unwrap(), [1; 4]);
}

/// Records beside a field without stored bytes.
struct Numbered {
    records: Records,
    schema: Vec<EncodedField>,
    makes: bool,
}

impl Numbered {
    fn new(makes: bool) -> Self {
        let records = Records::builder(2).open_bytes(noise(40, 3)).unwrap();
        let number = EncodedField::raw(Field::fixed("number", DType::I64, []));
        let schema = [records.schema(), &[number]].concat();
        Self {
            records,
            schema,
            makes,
        }
    }
}

impl Dataset for Numbered {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        self.records.len()
    }
    fn sources(&self) -> &Arc<Sources> {
        self.records.sources()
    }
    fn sizes(&self) -> Sizes {
        self.records.sizes()
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.records.extents(sample, parts)?;
        parts.made(1);
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Numbered {
    fn make(&self, sample: u64, field: usize, out: &mut [u8]) -> Result<()> {
        assert_eq!((field, out.len()), (1, 8));
        if !self.makes {
            return Err(Error::user("no number").with_sample(sample));
        }
        out.copy_from_slice(&(3 * sample as i64).to_ne_bytes());
        Ok(())
    }
}

/// Delivers the number in a field of its own.
struct Negative;

impl Decoder for Negative {
    fn outputs(&self, _: &EncodedField) -> Result<Vec<Field>> {
        Ok(vec![Field::fixed("negative", DType::I64, [])])
    }
    fn decode(&self, input: &[u8], _: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let number = i64::from_ne_bytes(input.try_into().unwrap());
        out.slice_mut::<i64>("negative")?[0] = -number;
        Ok(())
    }
}

#[test]
fn a_made_field_is_written_into_its_row_or_given_to_a_decoder() {
    let read = Numbered::new(true).read_sample(7).unwrap();
    assert_eq!(read[1], 21_i64.to_ne_bytes());
    let plain = || Loader::builder(Numbered::new(true)).batch_size(3);
    let decoded = plain().decode_field("number", Negative);
    for (builder, name, sign) in [(plain(), "number", 1), (decoded, "negative", -1)] {
        let loader = builder.build().unwrap();
        let mut found = Vec::new();
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            let numbers = batch.field(name).unwrap().as_slice::<i64>().unwrap();
            found.extend_from_slice(&numbers[..batch.valid()]);
        }
        assert!(found.into_iter().eq((0..20).map(|id| sign * 3 * id)));
    }
    let failing = Loader::builder(Numbered::new(false)).build().unwrap();
    let error = failing.epoch(0).unwrap().next().unwrap().unwrap_err();
    assert_eq!(error.site().sample, Some(0), "{error}");
    assert!(error.message().contains("no number"), "{error}");
}
