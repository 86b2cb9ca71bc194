use crate::common::cuda::*;
use crate::common::runs::Data;
use crate::common::standin::Session;
use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Images, Npy, Records, Tar, Tokens};
use feedline::decode::Bytes;
use feedline::order::{Draws, Groups};
use feedline::tensor::{DType, Field};
use feedline::{LastBatch, Loader, LoaderBuilder, MemoryTerm, Order, Rank, Row};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn in_memory(count: usize, record: usize) -> Arc<dyn Dataset> {
    let classes = (0..count as i64).map(|id| id * 3 - 1).collect();
    Arc::new(Records::builder(record).classes(classes).open_bytes(noise(count * record, 5)).unwrap())
}

/// Settings of a device that must not change batches.
const SETTINGS: [fn(LoaderBuilder) -> LoaderBuilder; 5] = [
    |builder| builder,
    |builder| builder.tuning(|t| t.slots(1).device_batches(2)),
    |builder| builder.tuning(|t| t.slots(2).device_batches(3)),
    |builder| builder.tuning(|t| t.slots(7).device_batches(2)).workers(3),
    |builder| builder.tuning(|t| t.device_batches(9)),
];

/// The lengths of ragged fields lie in device memory, too.
fn check_lens_there(session: &Session, batch: &feedline::Batch) {
    for field in batch.fields() {
        let there = field.device_lens_ptr().unwrap();
        assert_eq!(there.is_some(), field.lens().is_some(), "{field:?}");
        if let (Some(there), Some(lens)) = (there, field.lens()) {
            let bytes: Vec<u8> = lens.iter().flat_map(|len| len.to_ne_bytes()).collect();
            assert_eq!(session.peek(there, bytes.len()), bytes, "{field:?}");
        }
    }
}

/// The offsets of packed fields lie there, too, with as many bytes as they say.
fn check_offsets_there(session: &Session, batch: &feedline::Batch) {
    for field in batch.fields() {
        let there = field.device_offsets_ptr().unwrap();
        assert_eq!(there.is_some(), field.offsets().is_some(), "{field:?}");
        if let (Some(there), Some(offsets)) = (there, field.offsets()) {
            let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_ne_bytes()).collect();
            assert_eq!(session.peek(there, bytes.len()), bytes, "{field:?}");
        }
    }
}

/// Checks that the batches of `pull` equal the host's for all settings, with one and two held at a time.
fn conforms(
    session: &Session,
    what: &str,
    make: &dyn Fn() -> LoaderBuilder,
    pull: &dyn Fn(&Loader) -> feedline::Epoch,
) {
    let right = Got::all(pull(&build(make())));
    assert!(!right.is_empty(), "{what}");
    for (number, set) in SETTINGS.iter().enumerate() {
        let loader = build(set(make().device(gpu(number % 3))));
        let (mut found, mut before) = (Vec::new(), None);
        for batch in pull(&loader) {
            let batch = batch.unwrap();
            found.push(Got::of(&batch).unwrap());
            assert!(batch.fields().all(|field| field.as_bytes().is_err()), "{what}: it is on the device");
            check_lens_there(session, &batch);
            check_offsets_there(session, &batch);
            before = (number == 3).then_some(batch);
        }
        drop(before);
        same(&found, &right, &format!("{what}, settings {number}"));
        let copies = loader.report().total.copy.unwrap();
        assert!(copies.batches >= right.len() as u64 && copies.pageable_slots == 0, "{what}: {copies:?}");
    }
}

/// The same with immediate and with late copies.
fn conforms_late_or_not<M, P>(what: &'static str, make: M, pull: P)
where
    M: Fn() -> LoaderBuilder + Clone + Send + 'static,
    P: Fn(&Loader) -> feedline::Epoch + Clone + Send + 'static,
{
    for config in [config(), late()] {
        let (make, pull) = (make.clone(), pull.clone());
        case(config, move |session| conforms(session, what, &make, &pull));
    }
}

fn epoch_2(loader: &Loader) -> feedline::Epoch {
    loader.epoch(2).unwrap()
}

/// Fields of every dtype, of fixed shape and ragged, filled with noise.
fn every_dtype(builder: LoaderBuilder) -> LoaderBuilder {
    let fixed = DTYPES.map(|dtype| Field::fixed(format!("fixed {dtype}"), dtype, [3, 2]));
    let ragged = DTYPES.map(|dtype| Field::up_to(format!("ragged {dtype}"), dtype, 5));
    let fields: Vec<_> = fixed.into_iter().chain(ragged).collect();
    builder.map_adding(fields.clone(), move |row: &mut Row<'_>, ctx| {
        let mut draws: Draws = ctx.draws("every dtype");
        for field in &fields {
            let index = row.index_of(field.name())?;
            row.bytes_mut(index).fill_with(|| draws.next_u64() as u8);
            if field.is_up_to() {
                row.set_len(index, draws.below(6) as usize)?;
            }
        }
        Ok(())
    })
}

#[test]
fn fields_of_every_dtype_equal_the_hosts() {
    let data = in_memory(21, 40);
    let make = move || every_dtype(Loader::builder(data.clone())).order(Order::shuffled(4)).batch_size(8);
    conforms_late_or_not("every dtype", make, epoch_2);
}

#[test]
fn every_sample_of_any_size_reaches_the_device() {
    case(config(), |session| {
        let dir = Dir::new();
        for (count, record) in [(1, 512), (37, 4096), (120, 100), (70, 5000), (200, 1), (5, 150_528)] {
            let (path, _) = records_file(&dir, count, record);
            for rows in [1, 7, 64] {
                let make = || Loader::builder(records(&path, record)).order(Order::shuffled(3)).batch_size(rows);
                conforms(session, &format!("{count} × {record}, {rows}"), &make, &epoch_2);
            }
        }
    });
}

#[test]
fn the_last_batch_equals_the_hosts() {
    for last in ALL_LAST {
        // 53 = 6 × 8 + 5; arrays of many pages and of less than one.
        for record in [24, 9000] {
            let data = in_memory(53, record);
            let make = move || Loader::builder(data.clone()).order(Order::shuffled(4)).batch_size(8).last_batch(last);
            conforms_late_or_not("last batch", make, epoch_2);
        }
    }
}

#[test]
fn transforms_of_samples_and_batches_come_before_the_copy() {
    let data = in_memory(40, 64);
    let make = move || {
        let builder = Loader::builder(data.clone()).order(Order::shuffled(8)).batch_size(6);
        let builder = builder.map_adding([Field::fixed("drawn", DType::U64, [])], |row, ctx| {
            let (drawn, field) = (ctx.draws("drawn").next_u64(), row.index_of("drawn")?);
            row.slice_mut::<u64>(field)?[0] = drawn;
            row.bytes_mut(0)[0] ^= drawn as u8;
            Ok(())
        });
        builder.map_batch_adding([Field::fixed("mixed", DType::F32, [2])], |batch, ctx| {
            let (mut draws, field) = (ctx.draws("mixed"), batch.index_of("mixed")?);
            batch.slice_mut::<f32>(field)?.fill_with(|| draws.next_f64() as f32);
            Ok(())
        })
    };
    conforms_late_or_not("transforms", make, epoch_2);
}

#[cfg(feature = "image")]
#[test]
fn decoded_pictures_equal_the_hosts() {
    use feedline::{dataset::Images, decode::Image};
    for config in [config(), late()] {
        case(config, |session| {
            let dir = Dir::new();
            for (number, name) in
                ["420.jpg", "422.jpg", "444.jpg", "gray.jpg", "restart.jpg", "palette.png"].iter().enumerate()
            {
                let bytes = std::fs::read(fixture("images").join(name)).unwrap();
                dir.write(&format!("set/{}/{name}", number % 2), &bytes);
            }
            let make = || {
                let images = Images::open(dir.path("set")).unwrap();
                Loader::builder(images)
                    .decode(Image::random_resized_crop(32).flip(0.5))
                    .order(Order::shuffled(1))
                    .batch_size(4)
            };
            conforms(session, "pictures", &make, &epoch_2);
        });
    }
}

#[test]
fn tokens_tar_and_npy_equal_the_hosts() {
    let tokens = || {
        Loader::builder(Tokens::builder(DType::U16).window(16).next_token().open(fixture("tokens/flat.bin")).unwrap())
    };
    conforms_late_or_not("tokens", move || tokens().batch_size(2), epoch_2);
    let tar = || {
        let tar = Tar::builder().raw(Field::up_to("bin", DType::U8, 600), "bin").class("cls").index(false);
        Loader::builder(tar.open(fixture("tar/webdataset.tar")).unwrap())
    };
    conforms_late_or_not("tar", move || tar().batch_size(3).order(Order::shuffled(2)), epoch_2);
    let npy = || {
        let npy = Npy::builder().field("x", fixture("npy/ragged-*.npy")).up_to("x", 5);
        Loader::builder(npy.open().unwrap())
    };
    conforms_late_or_not("npy", move || npy().batch_size(3), epoch_2);
}

#[test]
fn windows_of_chunks_equal_the_hosts() {
    for config in [config(), late()] {
        case(config, |session| {
            let dir = Dir::new();
            for in_memory in [false, true] {
                let data = Data::chunks(&dir, &[7, 1, 0, 13, 5, 9, 2], true, in_memory);
                let make = || data.builder().order(Order::windowed(4, 2).lanes(2)).batch_size(5);
                conforms(session, "chunks", &make, &epoch_2);
            }
        });
    }
}

#[test]
fn several_epochs_in_one_iterator_equal_the_hosts() {
    let data = in_memory(31, 100);
    let make = move || Loader::builder(data.clone()).order(Order::shuffled(4)).batch_size(8);
    conforms_late_or_not("epochs", make.clone(), |loader: &Loader| loader.epochs(1..5).unwrap());
    conforms_late_or_not("steps", make, |loader: &Loader| loader.steps(11).unwrap());
}

#[test]
fn every_rank_gets_its_part() {
    for world in [2, 3] {
        for rank in 0..world {
            let data = in_memory(50, 32);
            let make = move || {
                let rank = Rank::new(rank, world).unwrap();
                let builder = Loader::builder(data.clone()).order(Order::shuffled(4)).global_batch(7).rank(rank);
                builder.last_batch(LastBatch::Mask)
            };
            conforms_late_or_not("shards", make, epoch_2);
        }
    }
}

#[test]
fn a_resumed_run_has_the_hosts_batches() {
    let data = in_memory(50, 32);
    let first = build(Loader::builder(data.clone()).order(Order::shuffled(4)).batch_size(7));
    for batch in first.epoch(0).unwrap().take(3) {
        batch.unwrap();
    }
    let state = first.state().unwrap();
    let make = move || Loader::builder(data.clone()).order(Order::shuffled(4)).batch_size(7).resume(state.clone());
    let pull = |loader: &Loader| loader.epochs(loader.next_epoch()..3).unwrap();
    conforms_late_or_not("resumed", make, pull);
}

#[test]
fn the_state_of_a_device_loader_equals_the_hosts() {
    case(late(), |_| {
        let data = in_memory(50, 32);
        let make = || Loader::builder(data.clone()).order(Order::shuffled(4)).batch_size(7);
        let (host, device) = (build(make()), build(make().device(gpu(0))));
        let (mut here, mut there) = (host.epochs(0..3).unwrap(), device.epochs(0..3).unwrap());
        loop {
            assert_eq!(host.state().unwrap().to_bytes(), device.state().unwrap().to_bytes());
            match (here.next(), there.next()) {
                (Some(here), Some(there)) => drop((here.unwrap(), there.unwrap())),
                (None, None) => return,
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn unused_fields_are_not_copied_to_the_device() {
    for config in [config(), late()] {
        case(config, |session| {
            let data = in_memory(26, 5000);
            let add = |builder: LoaderBuilder| {
                builder.map_adding(
                    [Field::fixed("wide", DType::F32, [2048]), Field::up_to("ragged", DType::U16, 3000)],
                    |row, ctx| {
                        let (wide, ragged) = (row.index_of("wide")?, row.index_of("ragged")?);
                        row.slice_mut::<f32>(wide)?.fill(ctx.id() as f32);
                        row.bytes_mut(ragged).fill(ctx.id() as u8);
                        row.set_len(ragged, ctx.id() as usize * 40)
                    },
                )
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
            for keep in subsets {
                for (rows, last) in [(16, LastBatch::Keep), (10, LastBatch::Keep), (10, LastBatch::Pad)] {
                    let make = || {
                        let builder = add(Loader::builder(data.clone())).keep(keep.iter().copied());
                        builder.order(Order::shuffled(2)).batch_size(rows).last_batch(last)
                    };
                    conforms(session, &format!("{keep:?}"), &make, &epoch_2);
                    let loader = build(make().device(gpu(0)));
                    let batches = Got::epoch(&loader, 2);
                    let arrays = batches.iter().flat_map(|batch| &batch.fields);
                    let kept: usize = arrays
                        .clone()
                        .map(|array| array.bytes.len() + array.lens.as_ref().map_or(0, |lens| 8 * lens.len()))
                        .sum();
                    let bytes = loader.report().total.copy.unwrap().bytes as usize;
                    // Arrays that are copied together are at most a page apart.
                    let between = arrays.count() * 2 * 4096;
                    assert!((kept..=kept + between).contains(&bytes), "{keep:?}: {bytes} of {kept}");
                }
            }
        });
    }
}

#[test]
fn only_the_bytes_of_ragged_rows_are_copied_to_the_device() {
    for config in [config(), late()] {
        case(config, |session| {
            let data = in_memory(26, 40);
            let make = || {
                let field = Field::rows_up_to("mel", DType::U16, 3000, [2]);
                let builder = Loader::builder(data.clone()).map_adding([field], |row, ctx| {
                    let mel = row.index_of("mel")?;
                    row.slice_mut::<u16>(mel)?.fill(ctx.id() as u16);
                    row.set_len(mel, ctx.id() as usize * 40)
                });
                builder.keep(["mel"]).order(Order::shuffled(2)).batch_size(10)
            };
            conforms(session, "ragged", &|| make().ragged("mel", None), &epoch_2);
            let copied = |builder: LoaderBuilder| {
                let loader = build(builder.device(gpu(0)));
                let fields: Vec<_> = Got::epoch(&loader, 2).into_iter().flat_map(|batch| batch.fields).collect();
                let values: usize = fields.iter().map(|array| array.bytes.len()).sum();
                (values, loader.report().total.copy.unwrap().bytes as usize)
            };
            let (values, bytes) = copied(make().ragged("mel", None));
            assert_eq!(values, (0..26).sum::<usize>() * 40 * 4);
            // Lengths and offsets, and what lies between arrays that are copied together.
            assert!((values..values + 3 * (21 * 8 + 2 * 4096)).contains(&bytes), "{bytes} of {values}");
            let (padded, all) = copied(make());
            assert!(all >= padded && padded == 26 * 3000 * 4, "{all} of {padded}");
        });
    }
}

#[test]
fn the_smallest_legal_budget_is_enough_on_a_device() {
    case(late(), |_| {
        let dir = Dir::new();
        let (path, _) = records_file(&dir, 90, 3000);
        let make = || {
            Loader::builder(records(&path, 3000))
                .order(Order::shuffled(3))
                .batch_size(7)
                .workers(2)
                .tuning(|t| t.depth(2))
        };
        let right = Got::epoch(&build(make()), 0);
        let on_device =
            |budget: usize| make().device(gpu(0)).tuning(|t| t.device_batches(2)).memory_budget(budget).build();
        let (mut least, mut most) = (0, build(make().device(gpu(0))).plan().total());
        while most - least > 1 {
            let middle = least + (most - least) / 2;
            match on_device(middle) {
                Ok(_) => most = middle,
                Err(error) => {
                    assert_eq!(error.kind(), feedline::ErrorKind::Budget, "{error}");
                    least = middle;
                }
            }
        }
        let loader = on_device(most).unwrap();
        assert_eq!(loader.plan().term(MemoryTerm::SLOTS).count, 2);
        same(&Got::epoch(&loader, 0), &right, "smallest budget");
        same(&Got::epoch(&loader, 0), &right, "and again");
    });
}

#[test]
fn packed_fields_arrive_as_on_the_host() {
    let make = || {
        let dir = Dir::new();
        for number in 0..37_usize {
            dir.write(&format!("class/{number:02}.jpg"), &noise(1 + number * 977 % 5000, number as u64));
        }
        Arc::new(dir)
    };
    let dir = make();
    let loader = move || {
        let images = Images::open(dir.path("")).unwrap();
        Loader::builder(images).decode_field("image", Bytes::packed(5000)).order(Order::shuffled(3)).batch_size(8)
    };
    conforms_late_or_not("packed", loader, |loader| loader.epochs(0..2).unwrap());
}

#[test]
fn batches_of_groups_arrive_with_the_shape_of_their_group() {
    let dir = Dir::new();
    for number in 0..60_usize {
        dir.write(&format!("class/{number:02}.jpg"), &noise(1 + number * 977 % 5000, number as u64));
    }
    let dir = Arc::new(dir);
    let loader = move || {
        let images = Images::open(dir.path("")).unwrap();
        let bounds = [1000, 3000, 5000];
        let groups = Groups::by(images.lengths("image").unwrap(), &bounds).unwrap();
        let groups = groups.budget(15_000).up_to("image", &bounds);
        let loader = Loader::builder(images).decode_field("image", Bytes::up_to(5000));
        loader.order(Order::shuffled(3).grouped(groups)).last_batch(LastBatch::Mask)
    };
    conforms_late_or_not("groups", loader, |loader| loader.epochs(0..2).unwrap());
}
