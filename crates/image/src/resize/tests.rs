//! Both tables of kernels against the formula, pixel by pixel.

use super::*;

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(end)) as u32
    }

    fn unit(&mut self) -> f64 {
        f64::from(self.below(1 << 24)) / f64::from(1 << 24)
    }

    /// A start and a length of at least `least`, within `side`: whole numbers or fractions.
    fn span(&mut self, side: u32) -> (f64, f64) {
        match self.below(3) {
            0 => (0.0, side.into()),
            1 => {
                let start = self.below(side);
                (start.into(), (1 + self.below(side - start)).into())
            }
            _ => {
                let start = self.unit() * 0.9 * f64::from(side);
                (
                    start,
                    (f64::from(side) - start) * (0.01 + 0.99 * self.unit()),
                )
            }
        }
    }
}

const FILTERS: [Filter; 4] = [
    Filter::Nearest,
    Filter::Bilinear,
    Filter::Bicubic,
    Filter::Lanczos3,
];

fn random_plan(random: &mut Random, longest: u32) -> ResizePlan {
    let mut size = || {
        let most = [3, 20, longest][random.below(3) as usize];
        Size::new(1 + random.below(most), 1 + random.below(most))
    };
    let picture = size();
    let output = size();
    let (left, width) = random.span(picture.width);
    let (top, height) = random.span(picture.height);
    let window = match random.below(2) {
        0 => Rect::of(output),
        _ => {
            let left = random.below(output.width);
            let top = random.below(output.height);
            let width = 1 + random.below(output.width - left);
            Rect {
                left,
                top,
                size: Size::new(width, 1 + random.below(output.height - top)),
            }
        }
    };
    let filter = FILTERS[random.below(4) as usize];
    ResizePlan {
        picture,
        area: CropPart {
            left,
            top,
            width,
            height,
        },
        output,
        window,
        filter,
    }
}

fn weight(filter: Filter, x: f64) -> f64 {
    let x = x.abs();
    let sinc = |x: f64| {
        if x == 0.0 {
            1.0
        } else {
            (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI)
        }
    };
    match filter {
        Filter::Bilinear if x < 1.0 => 1.0 - x,
        Filter::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
        Filter::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5,
        Filter::Lanczos3 if x < 3.0 => sinc(x) * sinc(x / 3.0),
        _ => 0.0,
    }
}

/// One output value, of a line of source values.
fn value(line: &[u8], from: f64, length: f64, whole: u32, at: u32, filter: Filter) -> u8 {
    let to = ((from + length) as f32).min(line.len() as f32);
    let from = from as f32;
    let scale = f64::from(to - from) / f64::from(whole);
    if filter == Filter::Nearest {
        let place = (0..at).fold(f64::from(from) + scale * 0.5, |place, _| place + scale);
        return line[(place as usize).min(line.len() - 1)];
    }
    let radius = [1.0, 2.0, 3.0][FILTERS.iter().position(|one| *one == filter).unwrap() - 1]
        * scale.max(1.0);
    let center = f64::from(from) + (f64::from(at) + 0.5) * scale;
    let end = ((center + radius + 0.5) as usize).min(line.len());
    let pixels = (center - radius + 0.5).max(0.0) as usize..end;
    let shrink = 1.0 / scale.max(1.0);
    let weights: Vec<_> = pixels
        .clone()
        .map(|x| weight(filter, (x as f64 - center + 0.5) * shrink))
        .collect();
    let all: f64 = weights.iter().sum();
    let products = pixels
        .zip(weights)
        .map(|(x, w)| i64::from(line[x]) * (w / all * 4_194_304.0).round() as i64);
    ((products.sum::<i64>() + (1 << 21)) >> 22).clamp(0, 255) as u8
}

/// The whole picture's resize by the formula, then its crop.
fn oracle(pixels: &[u8], plan: &ResizePlan) -> Vec<u8> {
    let ResizePlan {
        picture,
        area,
        output,
        window,
        filter,
    } = *plan;
    let width = picture.width as usize;
    let height = picture.height as usize;
    let columns: Vec<Vec<u8>> = (3 * window.left..3 * window.right())
        .map(|k| {
            let x = k / 3;
            let channel = k as usize % 3;
            let row = |y: usize| {
                (0..width)
                    .map(|x| pixels[3 * (y * width + x) + channel])
                    .collect::<Vec<_>>()
            };
            (0..height)
                .map(|y| value(&row(y), area.left, area.width, output.width, x, filter))
                .collect()
        })
        .collect();
    let rows = window.top..window.bottom();
    rows.flat_map(|y| {
        columns
            .iter()
            .map(move |line| value(line, area.top, area.height, output.height, y, filter))
    })
    .collect()
}

fn tables() -> Vec<Kernels> {
    #[cfg(target_arch = "x86_64")]
    let fast = avx2::kernels();
    #[cfg(not(target_arch = "x86_64"))]
    let fast = None;
    std::iter::once(kernels::SCALAR).chain(fast).collect()
}

fn with(kernels: Kernels) -> Resizer {
    Resizer {
        passes: Passes::with(kernels),
        band: Vec::new(),
    }
}

fn picture(random: &mut Random, size: Size) -> Vec<u8> {
    let extreme = random.below(2) == 0;
    (0..3 * size.width * size.height)
        .map(|_| {
            if extreme {
                255 * random.below(2) as u8
            } else {
                random.below(256) as u8
            }
        })
        .collect()
}

fn whole(pixels: &[u8], size: Size) -> Pixels<'_> {
    Pixels {
        bytes: pixels,
        stride: 3 * size.width as usize,
        there: Rect::of(size),
    }
}

fn resized(resizer: &mut Resizer, pixels: Pixels<'_>, plan: &ResizePlan) -> Vec<u8> {
    let mut out = vec![0; 3 * (plan.window.size.width * plan.window.size.height) as usize];
    resizer.resize(pixels, plan, &mut out);
    out
}

#[test]
fn both_tables_of_kernels_equal_the_formula() {
    let mut random = Random(1);
    let mut resizers: Vec<_> = tables().into_iter().map(with).collect();
    for case in 0..600 {
        let plan = random_plan(&mut random, 70);
        let pixels = picture(&mut random, plan.picture);
        let expected = oracle(&pixels, &plan);
        for (table, resizer) in resizers.iter_mut().enumerate() {
            let same = resized(resizer, whole(&pixels, plan.picture), &plan) == expected;
            assert!(same, "case {case}, table {table}: {plan:?}");
        }
    }
}

#[test]
fn the_needed_part_of_a_picture_gives_what_the_whole_gives() {
    let mut random = Random(2);
    let mut resizer = Resizer::default();
    for case in 0..2000 {
        let plan = random_plan(&mut random, 90);
        let pixels = picture(&mut random, plan.picture);
        let expected = resized(&mut resizer, whole(&pixels, plan.picture), &plan);
        let there = plan.needed();
        let stride = 3 * plan.picture.width as usize;
        let row = 3 * there.size.width as usize;
        let start = |y: u32| y as usize * stride + 3 * there.left as usize;
        let part: Vec<u8> = (there.top..there.bottom())
            .flat_map(|y| &pixels[start(y)..][..row])
            .copied()
            .collect();
        // A buffer that ends with the part's last pixel.
        let pixels = Pixels {
            bytes: &part,
            stride: row,
            there,
        };
        assert_eq!(
            resized(&mut resizer, pixels, &plan),
            expected,
            "case {case}: {plan:?}"
        );
        let mut out = vec![0; expected.len()];
        let mut rows = resizer.start(&plan, &mut out);
        // From the first row again, as after seek points that fail.
        for (y, from) in (0..)
            .zip(part.chunks_exact(row))
            .take(random.below(9) as usize)
        {
            rows.row(y).copy_from_slice(from);
        }
        (0..)
            .zip(part.chunks_exact(row))
            .for_each(|(y, from)| rows.row(y).copy_from_slice(from));
        rows.finish();
        assert_eq!(out, expected, "case {case}, row by row: {plan:?}");
    }
}

#[test]
fn long_supports_equal_the_formula() {
    let mut random = Random(3);
    for filter in FILTERS {
        let size = Size::new(6000, 2);
        let pixels = picture(&mut random, size);
        for picture in [size, Size::new(2, 6000)] {
            let area = CropPart {
                left: 0.0,
                top: 0.0,
                width: picture.width.into(),
                height: picture.height.into(),
            };
            let output = Size::new(3, 2);
            let plan = ResizePlan {
                picture,
                area,
                output,
                window: Rect::of(output),
                filter,
            };
            let expected = oracle(&pixels, &plan);
            for table in tables() {
                let out = resized(&mut with(table), whole(&pixels, picture), &plan);
                assert_eq!(out, expected, "{plan:?}");
            }
        }
    }
}

#[test]
fn heap_bytes_stay_within_the_announced_bound_and_do_not_grow_when_repeated() {
    let mut random = Random(4);
    for table in tables() {
        for _ in 0..1000 {
            let plan = random_plan(&mut random, 90);
            let pixels = picture(&mut random, plan.picture);
            let mut resizer = with(table);
            let first = resized(&mut resizer, whole(&pixels, plan.picture), &plan);
            let bytes = resizer.bytes();
            assert!(
                bytes as u64 <= plan.heap_bytes(),
                "{bytes} of {}: {plan:?}",
                plan.heap_bytes()
            );
            assert_eq!(
                resized(&mut resizer, whole(&pixels, plan.picture), &plan),
                first
            );
            assert_eq!(resizer.bytes(), bytes);
            resizer.release();
            assert_eq!(resizer.bytes(), 0);
        }
    }
}

#[test]
fn the_longest_sides_are_legal() {
    for (picture, output) in [
        ((65_535, 1), (1, 1)),
        ((1, 65_535), (2, 1)),
        ((1, 2), (65_535, 1)),
        ((2, 1), (1, 65_535)),
    ] {
        let picture = Size::new(picture.0, picture.1);
        let output = Size::new(output.0, output.1);
        let pixels = vec![255; 3 * (picture.width * picture.height) as usize];
        let area = CropPart {
            left: 0.0,
            top: 0.0,
            width: picture.width.into(),
            height: picture.height.into(),
        };
        for (table, filter) in tables()
            .into_iter()
            .flat_map(|table| FILTERS.map(|filter| (table, filter)))
        {
            let plan = ResizePlan {
                picture,
                area,
                output,
                window: Rect::of(output),
                filter,
            };
            let out = resized(&mut with(table), whole(&pixels, picture), &plan);
            assert!(out.iter().all(|value| *value == 255), "{plan:?}");
        }
    }
}
