//! `.finish`: floats made from pictures as the last step have the same bytes on the host and on the
//! stand-in GPU, and equal the rule, which is computed here again.

use crate::common::doubles::*;
use crate::common::standin;
use crate::common::*;
use feedline::dataset::{Records, SafeTensors};
use feedline::device::Finish;
use feedline::device::Gds;
use feedline::error::Stage;
use feedline::memory::MemoryTerm;
use feedline::tensor::{DType, Field, bf16, f16};
use feedline::{Device, ErrorKind, LastBatch, Loader, LoaderBuilder, Order, Rank};
use std::collections::BTreeMap;

const MEAN: [f32; 4] = [0.485, 0.456, 0.406, 0.5];
const STD: [f32; 4] = [0.229, 0.224, 0.225, 0.3];
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Settings of the rule.
#[derive(Clone, Debug)]
struct Made {
    dtype: DType,
    first: bool,
    dims: [usize; 3],
    flip: f64,
    /// Mean and std are per channel; else there are none.
    normal: bool,
}

impl Made {
    fn finish(&self) -> Finish {
        let [.., channels] = self.dims;
        let mut finish = Finish::to(self.dtype).flip(self.flip);
        if self.normal {
            finish = finish.mean_std(&MEAN[..channels], &STD[..channels]);
        }
        if self.first {
            finish.channels_first()
        } else {
            finish
        }
    }

    fn bytes(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.size()
    }

    /// A value by the formula: each operation rounded.
    fn value(&self, channel: usize, x: u8) -> Vec<u8> {
        let (mean, std) = if self.normal {
            (MEAN[channel], STD[channel])
        } else {
            (0.0, 1.0)
        };
        let scaled = f32::from(x) / 255.0;
        let centred = scaled - mean;
        let y = centred / std;
        match self.dtype {
            DType::F16 => f16::from_f32(y).to_ne_bytes().to_vec(),
            DType::BF16 => bf16::from_f32(y).to_ne_bytes().to_vec(),
            _ => y.to_ne_bytes().to_vec(),
        }
    }

    /// A whole picture, mirrored or not.
    fn picture(&self, pixels: &[u8], mirrored: bool) -> Vec<u8> {
        let [height, width, channels] = self.dims;
        let size = self.dtype.size();
        let mut out = vec![0; self.bytes()];
        for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
            for c in 0..channels {
                let from = if mirrored { width - 1 - x } else { x };
                let value = self.value(c, pixels[(y * width + from) * channels + c]);
                let at = if self.first {
                    (c * height + y) * width + x
                } else {
                    (y * width + x) * channels + c
                };
                out[at * size..][..size].copy_from_slice(&value);
            }
        }
        out
    }

    /// Whether a row is the picture mirrored; fails when it is neither.
    #[track_caller]
    fn is_mirrored(&self, row: &[u8], pixels: &[u8]) -> bool {
        let mirrored = row == self.picture(pixels, true);
        let is_picture = mirrored || row == self.picture(pixels, false);
        assert!(is_picture, "{self:?}: neither it nor its mirror image");
        mirrored
    }
}

/// Bytes of `count` pictures.
fn pixels(count: usize, dims: [usize; 3]) -> Vec<u8> {
    noise(count * dims.iter().product::<usize>(), 5)
}

/// A loader of these pictures in memory, with a label each.
fn pictures(count: usize, dims: [usize; 3]) -> LoaderBuilder {
    let records = Records::builder(dims.iter().product()).field("image", DType::U8, dims);
    let records = records.classes((0..count as i64).collect());
    Loader::builder(records.open_bytes(pixels(count, dims)).unwrap())
}

/// Three batches of pictures that become numbers of this dtype.
fn finished(dtype: DType) -> LoaderBuilder {
    let builder = pictures(10, [4, 4, 3]).batch_size(4);
    builder.finish("image", Finish::to(dtype))
}

/// A loader on the GPU whose rows are copied there.
fn staged(machine: &Machine, builder: LoaderBuilder) -> Loader {
    build(machine.on_gpu(builder, Gds::Off))
}

/// Checks that both devices deliver the same; gives the host's batches.
fn both(machine: &Machine, make: &dyn Fn() -> LoaderBuilder, what: &str) -> Vec<Got> {
    let host = build(make());
    let gpu = staged(machine, make());
    assert_eq!(gpu.spec(), host.spec(), "{what}");
    let right = Got::epoch(&host, 0);
    same(&Got::epoch(&gpu, 0), &right, what);
    right
}

/// Rows of the field `image` by id; blank ones left out.
fn rows(batches: &[Got]) -> BTreeMap<u64, Vec<u8>> {
    let mut rows = BTreeMap::new();
    for batch in batches {
        let bytes = batch.bytes("image");
        let all = bytes.chunks(bytes.len() / batch.ids.len());
        let all = batch.ids.iter().copied().zip(all.map(<[u8]>::to_vec));
        rows.extend(all.filter(|(id, _)| *id != u64::MAX));
    }
    rows
}

#[test]
fn every_finished_dtype_and_layout_follows_the_rule() {
    on_machine(|machine| {
        for (number, channels) in (0..).zip([1, 2, 3, 4, 3]) {
            for (dtype, first, flip) in DTYPES.iter().flat_map(|dtype| {
                [(false, 0.0), (true, 0.5), (false, 0.5), (true, 1.0)]
                    .map(|(first, flip)| (*dtype, first, flip))
            }) {
                // Widths that a thread handles in one piece, and others.
                let dims = [[5, 7, channels], [3, 8, channels]][number % 2];
                let made = Made {
                    dtype,
                    first,
                    dims,
                    flip,
                    normal: number < 4,
                };
                let make = || {
                    pictures(11, dims)
                        .batch_size(4)
                        .order(Order::shuffled(3))
                        .finish("image", made.finish())
                };
                let batches = both(machine, &make, &format!("{made:?}"));
                let pixels = pixels(11, dims);
                let found = rows(&batches);
                assert_eq!(found.len(), 11);
                let mirrored = found.iter().filter(|(id, row)| {
                    let bytes = dims.iter().product::<usize>();
                    made.is_mirrored(row, &pixels[**id as usize * bytes..][..bytes])
                });
                match (mirrored.count(), flip) {
                    (0, 0.0) | (11, 1.0) | (1..11, 0.5) => {}
                    (count, _) => panic!("{count} of 11 with probability {flip}"),
                }
            }
        }
    });
}

#[test]
fn mirroring_depends_on_seed_epoch_and_sample_alone() {
    on_machine(|machine| {
        let dims = [4, 6, 3];
        let base = || {
            let finish = Finish::to(DType::F16).flip(0.5);
            pictures(40, dims)
                .order(Order::shuffled(3))
                .finish("image", finish)
        };
        let rows_of = |loader: Loader, epoch| rows(&Got::epoch(&loader, epoch));
        let right = rows_of(build(base().batch_size(8)), 0);
        for (workers, batch) in [(1, 1), (3, 7), (2, 40)] {
            let make = || base().workers(workers).batch_size(batch);
            let here = rows_of(build(make()), 0);
            assert!(here == right, "host, {workers} workers, {batch}");
            let there = rows_of(staged(machine, make()), 0);
            assert!(there == right, "GPU, {workers} workers, {batch}");
        }
        let mut together = BTreeMap::new();
        for rank in 0..3 {
            let shard = base().global_batch(9).rank(Rank::new(rank, 3).unwrap());
            together.extend(rows_of(staged(machine, shard), 0));
        }
        assert!(together == right, "three ranks");
        // Other samples have another order, but each sample is drawn independently.
        let sequential = base().order(Order::sequential()).seed(3).batch_size(8);
        let found = rows_of(staged(machine, sequential), 0);
        assert!(found == right, "another order");
        for (builder, epoch) in [(base().seed(4), 0), (base(), 1)] {
            let other = rows_of(staged(machine, builder.batch_size(8)), epoch);
            let is_anew = other.keys().eq(right.keys()) && other != right;
            assert!(is_anew, "other seeds and epochs draw anew");
        }
    });
}

#[test]
fn transforms_see_bytes_before_they_become_floats() {
    on_machine(|machine| {
        let dims = [5, 4, 3];
        let made = Made {
            dtype: DType::F32,
            first: true,
            dims,
            flip: 0.0,
            normal: true,
        };
        let map = |builder: LoaderBuilder| {
            builder.map(move |row, _| {
                let image = row.index_of("image")?;
                row.slice_mut::<u8>(image)?
                    .iter_mut()
                    .for_each(|byte| *byte = 255 - *byte);
                Ok(())
            })
        };
        // Transforms of whole batches run after the last row, so the host finishes late.
        let map_batch = |builder: LoaderBuilder| {
            builder.map_batch_adding([Field::fixed("sum", DType::U64, [])], |batch, _| {
                let image = batch.index_of("image")?;
                let sum = batch.index_of("sum")?;
                let pixels = batch.slice_mut::<u8>(image)?;
                pixels
                    .iter_mut()
                    .for_each(|byte| *byte = byte.wrapping_add(3));
                let total = pixels.iter().map(|byte| u64::from(*byte)).sum();
                batch.slice_mut::<u64>(sum)?.fill(total);
                Ok(())
            })
        };
        type Change<'a> = &'a dyn Fn(LoaderBuilder) -> LoaderBuilder;
        type Rule = fn(u8) -> u8;
        let cases: [(Change<'_>, Rule); 3] = [
            (&map, |byte| 255 - byte),
            (&map_batch, |byte| byte.wrapping_add(3)),
            (&|builder| map_batch(map(builder)), |byte| {
                (255 - byte).wrapping_add(3)
            }),
        ];
        for (number, (change, rule)) in cases.into_iter().enumerate() {
            for last in [LastBatch::Keep, LastBatch::Mask] {
                let make = || {
                    change(pictures(10, dims).batch_size(4).last_batch(last))
                        .finish("image", made.finish())
                };
                let batches = both(machine, &make, &format!("case {number}, {last:?}"));
                let pixels = pixels(10, dims);
                for (id, row) in rows(&batches) {
                    let mut pixels = pixels[id as usize * 60..][..60].to_vec();
                    pixels.iter_mut().for_each(|byte| *byte = rule(*byte));
                    let is_mirrored = made.is_mirrored(&row, &pixels);
                    assert!(!is_mirrored, "case {number}, sample {id}");
                }
            }
        }
    });
}

#[test]
fn padding_rows_are_pictures_and_blank_rows_are_zero() {
    on_machine(|machine| {
        // Black is not zero when there is a mean.
        let dims = [3, 5, 3];
        for (map_batch, dtype) in [(false, DType::F32), (true, DType::BF16)] {
            let made = Made {
                dtype,
                first: false,
                dims,
                flip: 0.5,
                normal: true,
            };
            for last in ALL_LAST {
                let make = || {
                    let builder = pictures(10, dims).batch_size(4).last_batch(last);
                    let builder = match map_batch {
                        true => builder.map_batch(|_, _| Ok(())),
                        false => builder,
                    };
                    builder.finish("image", made.finish())
                };
                // Twice, so that slots and buffers hold old data.
                let gpu = staged(machine, make());
                let host = build(make());
                for epoch in 0..2 {
                    let batches = Got::epoch(&host, epoch);
                    same(&Got::epoch(&gpu, epoch), &batches, "again");
                    for batch in &batches {
                        let rows = batch.bytes("image").chunks(made.bytes());
                        for (id, row) in batch.ids.iter().zip(rows) {
                            let is_zero = row.iter().all(|byte| *byte == 0);
                            assert_eq!(*id == u64::MAX, is_zero, "{last:?}, {id}");
                        }
                    }
                    let ids = || batches.iter().flat_map(|batch| &batch.ids);
                    let rows = ids().count();
                    let blank = ids().filter(|id| **id == u64::MAX).count();
                    let right = match last {
                        LastBatch::Mask => (12, 2),
                        LastBatch::Pad => (12, 0),
                        LastBatch::Drop => (8, 0),
                        _ => (10, 0),
                    };
                    assert_eq!((rows, blank), right, "{last:?}");
                }
            }
        }
    });
}

/// A safetensors file with two pictures and a label for each of 9 samples.
fn pair(dir: &Dir) -> std::path::PathBuf {
    let header = r#"{"left":{"dtype":"U8","shape":[9,4,6,3],"data_offsets":[0,648]},"label":{"dtype":"I64","shape":[9],"data_offsets":[648,720]},"right":{"dtype":"U8","shape":[9,8,2,1],"data_offsets":[720,864]}}"#;
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let len = (header.len() as u64).to_le_bytes();
    let bytes = [&len[..], header.as_bytes(), &noise(864, 8)].concat();
    dir.write("pair.safetensors", &bytes)
}

#[test]
fn two_finished_fields_keep_their_names_and_places() {
    on_machine(|machine| {
        let dir = Dir::new();
        let path = pair(&dir);
        let finished = || {
            let builder = Loader::builder(SafeTensors::open(&path).unwrap())
                .batch_size(4)
                .order(Order::shuffled(1));
            let left = Finish::to(DType::F32)
                .mean_std(&MEAN[..3], &STD[..3])
                .channels_first()
                .flip(0.5);
            builder
                .finish("right", Finish::to(DType::BF16).flip(0.5))
                .finish("left", left)
        };
        let spec = [
            Field::fixed("left", DType::F32, [3, 4, 6]),
            Field::fixed("label", DType::I64, []),
            Field::fixed("right", DType::BF16, [8, 2, 1]),
        ];
        let whole = build(finished());
        assert_eq!(whole.spec(), spec);
        let whole = Got::epoch(&whole, 0);
        assert_eq!(whole[0].fields[0].shape, [4, 3, 4, 6]);
        let mut draws = (0, 0);
        for batch in &whole {
            let rows = batch
                .bytes("left")
                .chunks(288)
                .zip(batch.bytes("right").chunks(32));
            for (id, (left, right)) in batch.ids.iter().zip(rows) {
                let bytes = noise(864, 8);
                let [of_left, of_right] = [[4, 6, 3], [8, 2, 1]].map(|dims| Made {
                    dtype: if dims[2] == 3 {
                        DType::F32
                    } else {
                        DType::BF16
                    },
                    first: dims[2] == 3,
                    dims,
                    flip: 0.5,
                    normal: dims[2] == 3,
                });
                let left = of_left.is_mirrored(left, &bytes[*id as usize * 72..][..72]);
                let right = of_right.is_mirrored(right, &bytes[720 + *id as usize * 16..][..16]);
                draws = (draws.0 + usize::from(left != right), draws.1 + 1);
            }
        }
        assert!(draws.1 == 9 && draws.0 > 0, "each field is drawn by itself");
        for keep in [&[0, 1, 2][..], &[0], &[2, 1], &[1]] {
            let fields: Vec<_> = keep.iter().map(|at| spec[*at].clone()).collect();
            let make = || finished().keep(fields.iter().map(Field::name));
            assert_eq!(build(make()).spec(), fields);
            let batches = both(machine, &make, &format!("{keep:?}"));
            for (batch, whole) in batches.iter().zip(&whole) {
                let is_there = |field: &Array| whole.fields.contains(field);
                assert!(batch.fields.iter().all(is_there), "{keep:?}");
            }
        }
    });
}

#[test]
fn build_refuses_a_field_that_cannot_be_finished() {
    on_machine(|machine| {
        let f32 = || Finish::to(DType::F32);
        let [half, whole] = [DType::F16, DType::I32].map(Finish::to);
        let two_means = f32().mean_std(&[0.5; 2], &[1.0; 2]);
        let no_field =
            "names `picture`, which is not a field of the batch; its fields are image, label";
        let twice = "field `image` is finished twice";
        let no_dtype = "`image` cannot be finished: the dtype is";
        let no_mean = "`image` cannot be finished: 2 values of mean";
        let cases = [
            (vec![("picture", f32())], no_field),
            (vec![("image", f32()), ("image", half)], twice),
            (vec![("label", f32())], "field `label` cannot be finished"),
            (vec![("image", whole)], no_dtype),
            (vec![("image", f32().flip(2.0))], "flip probability is 2"),
            (vec![("image", two_means)], no_mean),
        ];
        for (finishes, words) in cases {
            for on_gpu in [false, true] {
                let mut builder = pictures(3, [2, 2, 3]);
                for (field, finish) in finishes.clone() {
                    builder = builder.finish(field, finish);
                }
                if on_gpu {
                    builder = machine.on_gpu(builder, Gds::Auto);
                }
                let error = builder.build().unwrap_err();
                let seen = (error.kind(), error.stage());
                assert_eq!(seen, (ErrorKind::Config, Stage::Build), "{error}");
                assert!(error.to_string().contains(words), "{words}: {error}");
            }
        }
        let five = Records::builder(20)
            .field("image", DType::U8, [2, 2, 5])
            .open_bytes([0; 20])
            .unwrap();
        let builder = Loader::builder(five).finish("image", f32());
        let said = builder.build().unwrap_err().to_string();
        let is_told = said.contains("1 to 4 channels") && said.contains("[2, 2, 5]");
        assert!(is_told, "{said}");
        let builder = pictures(3, [2, 2, 3]).keep(["label"]);
        let error = builder.finish("label", f32()).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    });
}

#[test]
fn finished_pictures_equal_those_of_the_decoder() {
    use feedline::dataset::Images;
    use feedline::decode::{Image, PixelLayout};
    on_machine(|machine| {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/images");
        let dir = Dir::new();
        for (class, names) in [
            ("a", ["420.jpg", "444.jpg", "gray.jpg"]),
            ("b", ["422.jpg", "restart.jpg", "progressive.jpg"]),
        ] {
            for name in names {
                let bytes = std::fs::read(root.join(name)).unwrap();
                dir.write(&format!("{class}/{name}"), &bytes);
            }
        }
        for dtype in DTYPES {
            let by_decoder = Image::resize(31, 44)
                .dtype(dtype)
                .normalize([MEAN[0], MEAN[1], MEAN[2]], [STD[0], STD[1], STD[2]]);
            let by_decoder = by_decoder.layout(PixelLayout::Nchw);
            let open = || Loader::builder(Images::open(dir.path("")).unwrap()).batch_size(4);
            let decoded = Got::epoch(&build(open().decode(by_decoder)), 0);
            let finish = Finish::to(dtype)
                .mean_std(&MEAN[..3], &STD[..3])
                .channels_first();
            let make = || {
                open()
                    .decode(Image::resize(31, 44))
                    .finish("image", finish.clone())
            };
            let batches = both(machine, &make, "decoded");
            same(&batches, &decoded, "decoder and finish");
        }
    });
}

#[test]
fn a_byte_for_each_value_crosses_the_bus_and_one_for_each_flip() {
    on_machine(|machine| {
        let dims = [32, 32, 3];
        let count = 40;
        let batch = 8;
        let bytes = 32 * 32 * 3;
        for (flip, each) in [(0.0, 0), (0.5, 1)] {
            let make = || {
                let finish = Finish::to(DType::F32).channels_first().flip(flip);
                pictures(count, dims)
                    .batch_size(batch)
                    .keep(["image"])
                    .finish("image", finish)
            };
            let loader = staged(machine, make());
            let right = Got::epoch(&build(make()), 0);
            same(&Got::epoch(&loader, 0), &right, "bytes");
            let copies = loader.report().total.copy.unwrap();
            // The gap between two arrays may be copied, too: less than a page per batch.
            let least = count as u64 * (bytes + each);
            let batches = (count / batch) as u64;
            assert_eq!(copies.batches, batches);
            let copied = copies.bytes;
            let legal = least..least + batches * 4096;
            assert!(legal.contains(&copied), "{copied} of {least}");
            let plan = loader.plan();
            let pixels = 8 * bytes as usize;
            let slots = plan.term(MemoryTerm::SLOTS);
            assert_eq!(slots.each, pixels.next_multiple_of(4096) + 4096);
            // A batch has room for floats alone; two areas hold the bytes of all batches.
            let device = plan.term(MemoryTerm::DEVICE);
            let staging = plan.term(MemoryTerm::STAGING);
            assert_eq!((device.count, staging.count), (3, 2));
            assert!(device.each < 5 * pixels && staging.each / pixels == 1);
        }
    });
}

#[test]
fn kernels_that_do_not_load_are_an_error_of_build() {
    on_machine(|machine| {
        let before = leaked();
        let jit = "JIT_COMPILER_NOT_FOUND: PTX JIT compiler library not found (221): the driver compiles the kernels";
        for (symbol, calls, code, words) in [
            ("cuModuleLoadData", 1, 221, jit),
            ("cuModuleGetFunction", 3, 500, "NOT_FOUND"),
            // The table of results.
            ("cuMemAlloc_v2", 1, 304, "OPERATING_SYSTEM"),
            ("cuMemcpyHtoDAsync_v2", 1, 1, "INVALID_VALUE"),
        ] {
            for call in 0..calls {
                let nth = machine.session.count(symbol) + call;
                machine.session.fail_named(symbol, nth, code, false);
                let builder = machine.on_gpu(finished(DType::F32), Gds::Off);
                let error = builder.build().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Device, "{error}");
                let symbol = symbol.trim_end_matches("_v2");
                let words = format!("{symbol}: CUDA_ERROR_{words}");
                assert!(error.to_string().contains(&words), "{error}");
                assert_eq!(machine.session.live(), standin::Live::default());
                assert_eq!(leaked(), before);
            }
        }
        // Other loaders do not need them.
        let loads = machine.session.count("cuModuleLoadData");
        let loader = staged(machine, pictures(10, [4, 4, 3]).batch_size(4));
        assert_eq!(Got::epoch(&loader, 0).len(), 3);
        assert_eq!(machine.session.count("cuModuleLoadData"), loads);
        let batches = both(machine, &|| finished(DType::F32), "afterwards");
        let right = Got::epoch(&build(finished(DType::F32)), 0);
        same(&batches, &right, "afterwards");
    });
}

#[test]
fn loaders_of_one_device_share_the_module() {
    on_machine(|machine| {
        let device = Device::cuda(0).unwrap();
        let make = || build(finished(DType::F32).device(device.clone()));
        let one = make();
        let other = make();
        assert_eq!(machine.session.count("cuModuleLoadData"), 1);
        let right = Got::epoch(&build(finished(DType::F32)), 0);
        same(&Got::epoch(&one, 0), &right, "one");
        drop(one);
        same(&Got::epoch(&other, 0), &right, "the other");
        drop(other);
        assert_eq!(machine.session.count("cuModuleUnload"), 1);
        same(&Got::epoch(&make(), 0), &right, "a later one");
        assert_eq!(machine.session.count("cuModuleLoadData"), 2);
    });
}

#[test]
fn a_launch_that_fails_is_one_error_and_the_next_epoch_is_whole() {
    on_machine(|machine| {
        let right = Got::epoch(&build(finished(DType::F16)), 0);
        let loader = staged(machine, finished(DType::F16));
        for launch in 0..3 {
            let symbol = "cuLaunchKernel";
            let nth = machine.session.count(symbol) + launch;
            machine.session.fail_named(symbol, nth, 701, false);
            let mut batches = loader.epoch(0).unwrap();
            for right in &right[..launch as usize] {
                let found = Got::of(&batches.next().unwrap().unwrap()).unwrap();
                same(&[found], std::slice::from_ref(right), "before");
            }
            let error = batches.next().unwrap().unwrap_err();
            let words = "cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(error.site().batch, Some(launch));
            assert!(batches.next().is_none());
            drop(batches);
            same(&Got::epoch(&loader, 0), &right, "the next one");
        }
    });
}
