//! Loaders of every kind for the conformance: samples and batches of all sizes, formats,
//! transforms, and parts of an order.

use crate::common::toys::Chunks;
use crate::common::{ALL_LAST, noise};
use crate::conformance::numbers;
use feedline::dataset::{DatasetExt, Images, Npy, Tar, Tokens};
use feedline::decode::Bytes;
use feedline::order::Groups;
use feedline::tensor::{DType, Field};
use feedline::{Error, LastBatch, Loader, LoaderBuilder, OnBadSample, Order, Rank};
use std::path::Path;

pub type Kind = (String, Box<dyn Fn() -> LoaderBuilder>);

fn kind(name: impl Into<String>, make: impl Fn() -> LoaderBuilder + 'static) -> Kind {
    (name.into(), Box::new(make))
}

/// All of them, with their data in a folder.
pub fn all(folder: &Path) -> std::io::Result<Vec<Kind>> {
    let mut all = of_sizes();
    all.extend(kept());
    all.extend(parts_of_orders());
    all.extend(of_formats(folder)?);
    Ok(all)
}

fn of_sizes() -> Vec<Kind> {
    let mut kinds = Vec::new();
    for (count, record) in [
        (1, 512),
        (17, 4096),
        (40, 100),
        (30, 5000),
        (70, 1),
        (5, 150_528),
    ] {
        for rows in [1, 7, 64] {
            kinds.push(kind(
                format!("{count} × {record}, batches of {rows}"),
                move || {
                    numbers(count, record)
                        .order(Order::shuffled(3))
                        .batch_size(rows)
                },
            ));
        }
    }
    kinds
}

/// Some fields of a loader, of which the others must not be copied.
fn kept() -> Vec<Kind> {
    let all = || {
        let fields = [
            Field::fixed("wide", DType::F32, [2048]),
            Field::rows_up_to("ragged", DType::U16, 3000, [2]),
        ];
        numbers(26, 5000).map_adding(fields, |row, ctx| {
            let wide = row.index_of("wide")?;
            let ragged = row.index_of("ragged")?;
            row.slice_mut::<f32>(wide)?.fill(ctx.id() as f32);
            row.bytes_mut(ragged).fill(ctx.id() as u8);
            row.set_len(ragged, ctx.id() as usize * 40)
        })
    };
    let subsets: [&[&str]; 7] = [
        &["record"],
        &["label"],
        &["wide"],
        &["ragged"],
        &["record", "ragged"],
        &["wide", "label"],
        &["record", "label", "wide", "ragged"],
    ];
    let mut kinds = Vec::new();
    for keep in subsets {
        for (rows, last) in [
            (16, LastBatch::Keep),
            (10, LastBatch::Keep),
            (10, LastBatch::Pad),
        ] {
            let make = move || {
                let builder = all().keep(keep.iter().copied()).order(Order::shuffled(2));
                builder.batch_size(rows).last_batch(last)
            };
            kinds.push(kind(
                format!("{keep:?} of batches of {rows}, {last:?}"),
                make,
            ));
            if keep.contains(&"ragged") && last == LastBatch::Keep {
                kinds.push(kind(
                    format!("{keep:?} of batches of {rows}, ragged"),
                    move || make().ragged("ragged", None),
                ));
            }
        }
    }
    kinds
}

/// Last batches, of arrays of less than a page and of many; ranks; a run that goes on.
fn parts_of_orders() -> Vec<Kind> {
    let all = || numbers(50, 32).order(Order::shuffled(4));
    let mut kinds = Vec::new();
    for last in ALL_LAST {
        for record in [24, 9000] {
            kinds.push(kind(format!("53 × {record}, {last:?}"), move || {
                numbers(53, record)
                    .order(Order::shuffled(9))
                    .batch_size(8)
                    .last_batch(last)
            }));
        }
    }
    for (rank, world) in [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)] {
        kinds.push(kind(format!("rank {rank} of {world}"), move || {
            let rank = Rank::new(rank, world).expect("below the world");
            all().global_batch(7).rank(rank).last_batch(LastBatch::Mask)
        }));
    }
    let first = all().batch_size(7).build().expect("a loader on the host");
    first
        .epoch(0)
        .expect("an epoch")
        .take(3)
        .for_each(|batch| drop(batch.expect("a batch")));
    let state = first.state().expect("a state");
    kinds.push(kind("a resumed run", move || {
        all().batch_size(7).resume(state.clone())
    }));
    kinds
}

fn transformed() -> LoaderBuilder {
    let builder = numbers(40, 64).order(Order::shuffled(8)).batch_size(6);
    let builder = builder.map_adding([Field::fixed("drawn", DType::U64, [])], |row, ctx| {
        let drawn = ctx.draws("drawn").next_u64();
        let field = row.index_of("drawn")?;
        row.slice_mut::<u64>(field)?[0] = drawn;
        row.bytes_mut(0)[0] ^= drawn as u8;
        Ok(())
    });
    builder.map_batch_adding([Field::fixed("mixed", DType::F32, [2])], |batch, ctx| {
        let mut draws = ctx.draws("mixed");
        let field = batch.index_of("mixed")?;
        batch
            .slice_mut::<f32>(field)?
            .fill_with(|| draws.next_f64() as f32);
        Ok(())
    })
}

const FILES: [(&str, &[u8]); 7] = [
    (
        "pictures/a/420.jpg",
        include_bytes!("../fixtures/images/420.jpg"),
    ),
    (
        "pictures/a/gray.jpg",
        include_bytes!("../fixtures/images/gray.jpg"),
    ),
    (
        "pictures/b/444.jpg",
        include_bytes!("../fixtures/images/444.jpg"),
    ),
    (
        "pictures/b/palette.png",
        include_bytes!("../fixtures/images/palette.png"),
    ),
    (
        "shard.tar",
        include_bytes!("../fixtures/tar/webdataset.tar"),
    ),
    (
        "ragged-0.npy",
        include_bytes!("../fixtures/npy/ragged-0.npy"),
    ),
    (
        "ragged-3.npy",
        include_bytes!("../fixtures/npy/ragged-3.npy"),
    ),
];

fn write(folder: &Path) -> std::io::Result<()> {
    ["pictures/a", "pictures/b", "lengths/a"]
        .iter()
        .try_for_each(|name| std::fs::create_dir_all(folder.join(name)))?;
    FILES
        .iter()
        .try_for_each(|(name, bytes)| std::fs::write(folder.join(name), bytes))?;
    std::fs::write(folder.join("chunks.bin"), noise(37 * 700, 3))?;
    std::fs::write(folder.join("tokens.bin"), noise(2 * 200, 4))?;
    (0..60).try_for_each(|number| {
        std::fs::write(
            folder.join(format!("lengths/a/{number:02}.jpg")),
            noise(1 + number * 977 % 5000, number as u64),
        )
    })
}

fn of_formats(folder: &Path) -> std::io::Result<Vec<Kind>> {
    write(folder)?;
    let at = |name: &str| folder.join(name);
    let tokens = at("tokens.bin");
    let tar = at("shard.tar");
    let npy = at("ragged-*.npy");
    let chunks = at("chunks.bin");
    let packed = at("lengths");
    let groups = at("lengths");
    let mut kinds = vec![
        kind("transforms of samples and batches", transformed),
        kind("substitutes of bad samples", || {
            let builder = numbers(60, 64).order(Order::shuffled(2)).batch_size(5);
            builder
                .on_bad_sample(OnBadSample::Substitute { budget: 3 })
                .map(|_, ctx| match ctx.id() {
                    7 | 8 | 31 => Err(Error::user("odd")),
                    _ => Ok(()),
                })
        }),
        kind("tokens", move || {
            let tokens = Tokens::builder(DType::U16)
                .window(16)
                .next_token()
                .open(&tokens)
                .expect("tokens");
            Loader::builder(tokens).batch_size(2)
        }),
        kind("tar", move || {
            let fields = Tar::builder()
                .raw(Field::up_to("bin", DType::U8, 600), "bin")
                .class("cls");
            Loader::builder(fields.index(false).open(&tar).expect("a shard"))
                .batch_size(3)
                .order(Order::shuffled(2))
        }),
        kind("npy", move || {
            let npy = Npy::builder()
                .field("x", &npy)
                .up_to("x", 5)
                .open()
                .expect("arrays");
            Loader::builder(npy).batch_size(3)
        }),
        kind("windows of chunks", move || {
            let chunks = Chunks::open(&chunks, &[7, 1, 0, 13, 5, 9, 2], 700).ragged();
            Loader::builder(chunks)
                .order(Order::windowed(4, 2).lanes(2))
                .batch_size(5)
        }),
        kind("packed fields", move || {
            let images = Images::open(&packed).expect("files");
            let builder = Loader::builder(images).decode_field("image", Bytes::packed(5000));
            builder.order(Order::shuffled(3)).batch_size(8)
        }),
        kind("batches of groups", move || {
            let images = Images::open(&groups).expect("files");
            let bounds = [1000, 3000, 5000];
            let groups =
                Groups::by(images.lengths("image").expect("lengths"), &bounds).expect("groups");
            let groups = groups.budget(15_000).up_to("image", &bounds);
            let builder = Loader::builder(images).decode_field("image", Bytes::up_to(5000));
            builder
                .order(Order::shuffled(3).grouped(groups))
                .last_batch(LastBatch::Mask)
        }),
    ];
    let pictures = at("pictures");
    kinds.push(kind("decoded pictures", move || {
        let crop = feedline::decode::Image::random_resized_crop(32).flip(0.5);
        let images = Images::open(&pictures).expect("pictures");
        Loader::builder(images)
            .decode(crop)
            .order(Order::shuffled(1))
            .batch_size(4)
    }));
    Ok(kinds)
}
