//! Several pictures in a sample: lists of frames in tar shards, and pairs with one geometry. The
//! oracle is the decoder by itself.

use crate::common::formats::tar_member;
use crate::common::*;
use feedline::dataset::{DamageKind, Dataset, Tar, TarBuilder};
use feedline::decode::{Each, Filter, Image, Single};
use feedline::tensor::EncodedField;
use feedline::{ErrorKind, Loader, OnBadSample, Order};

const SEED: u64 = 5;
const SIDE: u32 = 8;

fn image() -> Image {
    Image::random_resized_crop(SIDE).flip(0.5)
}

/// The row of a picture that is decoded alone.
fn alone(image: Image, picture: &[u8], epoch: u64, id: u64) -> Vec<u8> {
    let mut single = Single::new(image, &EncodedField::image("picture")).unwrap();
    single.decode(picture, SEED, epoch, id).unwrap();
    single.bytes(0).to_vec()
}

fn shard(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let members = members.iter().map(|(name, bytes)| tar_member(name, bytes));
    members.chain([vec![0; 1024]]).collect::<Vec<_>>().concat()
}

fn frame(sample: usize, number: usize) -> Vec<u8> {
    noisy_bmp(40, 30, (sample * 100 + number) as u64)
}

/// Samples of 1 to `most` frames in the order of their names, another member between them.
fn clips(samples: usize, most: usize) -> Vec<(String, Vec<u8>)> {
    let clip = |sample: usize| {
        let mut members: Vec<_> = (0..1 + sample % most)
            .map(|number| {
                (
                    format!("k{sample}.frames.{number}.bmp"),
                    frame(sample, number),
                )
            })
            .collect();
        members.push((format!("k{sample}.frames.cls"), sample.to_string().into()));
        members.sort();
        members
    };
    (0..samples).flat_map(clip).collect()
}

fn frames() -> TarBuilder {
    Tar::builder()
        .images("frames.*.bmp", 12)
        .class("frames.cls")
        .index(false)
}

fn loader(dataset: impl Dataset) -> feedline::LoaderBuilder {
    Loader::builder(dataset)
        .decode_field("image", Each::new(image()))
        .order(Order::shuffled(1))
        .seed(SEED)
        .batch_size(5)
}

#[test]
fn frames_come_in_the_order_of_their_numbers_with_one_geometry() {
    let dir = Dir::new();
    let path = dir.write("x.tar", &shard(&clips(24, 12)));
    for builder in [frames(), frames().checksums(false)] {
        let loader = build(loader(builder.open(&path).unwrap()));
        for epoch in 0..2 {
            let mut seen = 0;
            for batch in loader.epoch(epoch).unwrap() {
                let batch = batch.unwrap();
                let field = batch.field("image").unwrap();
                let bytes = (3 * SIDE * SIDE) as usize;
                let rows = field.as_slice::<u8>().unwrap().chunks(12 * bytes);
                assert_eq!(field.shape(), [batch.len(), 12, 8, 8, 3]);
                let labels = batch.field("label").unwrap();
                let labels = labels.as_slice::<i64>().unwrap();
                for (row, pixels) in rows.enumerate().take(batch.valid()) {
                    let id = batch.ids()[row];
                    let count = 1 + id as usize % 12;
                    assert_eq!(field.lens().unwrap()[row] as usize, count);
                    assert_eq!(labels[row], id as i64);
                    let frames = (0..count)
                        .flat_map(|number| alone(image(), &frame(id as usize, number), epoch, id));
                    let mut expected: Vec<u8> = frames.collect();
                    expected.resize(12 * bytes, 0);
                    assert!(pixels == expected, "sample {id}");
                    seen += 1;
                }
            }
            assert_eq!(seen, 24);
        }
    }
}

#[test]
fn a_gap_or_a_second_member_of_a_number_is_damage_of_its_sample() {
    for (names, words) in [
        (
            &["k1.frames.0.bmp", "k1.frames.2.bmp"][..],
            "2 members but no number 1",
        ),
        (&["k1.frames.1.bmp"], "1 members but no number 0"),
        (&["k1.frames.0.bmp", "k1.frames.00.bmp"], "number 0 twice"),
        (&[], "no member that ends in frames.*.bmp"),
    ] {
        let mut members = clips(1, 1);
        members.extend(names.iter().map(|name| (name.to_string(), frame(1, 0))));
        members.push(("k1.frames.cls".into(), b"1".to_vec()));
        let bytes = shard(&members);
        must_say(frames().open_bytes(bytes.clone()), words);
        let rest = frames().skip_damage(true).open_bytes(bytes).unwrap();
        assert_eq!(
            (rest.len(), rest.damage()[0].kind),
            (1, DamageKind::Incomplete)
        );
    }
}

#[test]
fn a_list_that_no_sample_has_is_empty_beside_a_class() {
    let members = [0, 1].map(|sample| (format!("k{sample}.cls"), sample.to_string().into()));
    let builder = Tar::builder().images("frames.*.bmp", 2).optional();
    let tar = builder.class("cls").index(false);
    let tar = tar.open_bytes(shard(&members)).unwrap();
    for batch in build(loader(tar)).epoch(0).unwrap() {
        let batch = batch.unwrap();
        let lens = batch.field("image").unwrap().lens().unwrap();
        assert!(lens.iter().all(|len| *len == 0));
    }
}

#[test]
fn a_list_in_a_damaged_shard_is_never_short() {
    let whole = shard(&clips(3, 3));
    let dir = Dir::new();
    let path = dir.write("x.tar", &whole);
    let all = pull(&build(loader(frames().open(&path).unwrap())), 0).unwrap();
    for end in (512..whole.len()).step_by(512) {
        let cut = frames().skip_damage(true).open_bytes(&whole[..end]);
        let Ok(cut) = cut else { continue };
        for row in pull(&build(loader(cut).order(Order::sequential())), 0).unwrap() {
            assert!(all.contains(&row), "cut at {end}");
        }
    }
}

#[test]
fn too_many_elements_and_a_damaged_one_follow_the_policy_for_bad_samples() {
    let mut members = clips(8, 3);
    let few = || Tar::builder().images("frames.*.bmp", 2).class("frames.cls");
    let two_bad = OnBadSample::Substitute { budget: 2 };
    for (number, words) in [
        (2, "list `image` has 3 elements, the limit is 2"),
        (1, "element 1: "),
    ] {
        let dataset = few().open_bytes(shard(&members)).unwrap();
        let error = pull(&build(loader(dataset).order(Order::sequential())), 0).unwrap_err();
        assert_eq!(error.site().sample, Some(number));
        assert_says(&error, words);
        let dataset = few().open_bytes(shard(&members)).unwrap();
        let budget = OnBadSample::Substitute { budget: 3 };
        let policy = if number == 2 { two_bad } else { budget };
        assert!(pull(&build(loader(dataset).on_bad_sample(policy)), 0).is_ok());
        let second = members
            .iter_mut()
            .find(|(name, _)| name == "k1.frames.1.bmp");
        second.unwrap().1.truncate(60);
    }
}

#[test]
fn an_ending_that_does_not_suit_its_field_is_refused() {
    for (builder, words) in [
        (Tar::builder().images("frames.jpg", 2), "needs one `*`"),
        (
            Tar::builder().image("frames.*.jpg"),
            "is of a list: give the maximum",
        ),
        (
            Tar::builder()
                .images("frames.*.jpg", 2)
                .bytes("frames.0.jpg"),
            "two fields take members",
        ),
    ] {
        let error = builder.open_bytes(shard(&clips(1, 1)));
        must_fail(error, ErrorKind::Config, words);
    }
}

fn pairs(size_of_second: (u32, u32)) -> Tar {
    let pair = |sample: u64| {
        let (width, height) = size_of_second;
        [
            (format!("k{sample}.left.bmp"), noisy_bmp(40, 30, sample)),
            (
                format!("k{sample}.right.bmp"),
                noisy_bmp(width, height, sample),
            ),
        ]
    };
    let members: Vec<_> = (0..16).flat_map(pair).collect();
    let fields = Tar::builder().field(EncodedField::image("left"), "left.bmp");
    let fields = fields.field(EncodedField::image("right"), "right.bmp");
    fields.open_bytes(shard(&members)).unwrap()
}

#[test]
fn pictures_of_one_size_in_a_sample_are_cut_alike() {
    // Both are the same picture, so their pixels are equal only if their geometry is.
    for (left, right, same) in [
        (image(), image().paired(true), true),
        (
            image().filter(Filter::Nearest),
            image().filter(Filter::Nearest),
            true,
        ),
        (image(), Image::random_resized_crop(SIDE).flip(0.0), false),
    ] {
        let loader = Loader::builder(pairs((40, 30)))
            .decode_field("left", left)
            .decode_field("right", right)
            .order(Order::shuffled(3));
        for batch in build(loader).epoch(1).unwrap() {
            let batch = batch.unwrap();
            let [left, right] = ["left", "right"].map(|name| batch.field(name).unwrap());
            assert_eq!(left.as_bytes().unwrap() == right.as_bytes().unwrap(), same);
        }
    }
}

#[test]
fn a_pair_of_two_sizes_is_a_bad_sample_if_it_is_paired() {
    for (image, words) in [
        (
            image().paired(true),
            "pictures of 40x30 and 20x15 pixels in one sample",
        ),
        (image(), ""),
        (Image::resize(SIDE, SIDE).paired(true), ""),
    ] {
        let loader = Loader::builder(pairs((20, 15)))
            .decode_field("left", image.clone())
            .decode_field("right", image);
        match pull(&build(loader), 0) {
            Err(error) => assert_says(error, words),
            Ok(rows) => assert_eq!((rows.len(), words), (16, "")),
        }
    }
}
