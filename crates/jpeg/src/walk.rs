//! The walk over a scan's MCUs: decodes the needed blocks to samples, and skips the others.

use super::bits::{BitPlace, Bits};
use super::header::{BLOCKS_MAX, Component, Header, Input, SURPLUS, Scan};
use super::huffman::{Ac, Dc, Fault, HuffmanTable, Lookup};
use super::kernels::{self, JpegKernels};
use super::region::RegionLayout;
use super::rows::PixelRows;
use super::seek::{Point, Points, SeekWriter};
use crate::error::{Error, Result};

/// Tables of the last picture, kept because most pictures of a dataset have the same.
#[derive(Default)]
pub(super) struct Tables {
    dc: [Option<Box<KeptTable<Dc>>>; 4],
    ac: [Option<Box<KeptTable<Ac>>>; 4],
}

/// A lookup table, and the Huffman table from which it was made.
pub(super) struct KeptTable<T> {
    counts: [u8; 16],
    symbols: Vec<u8>,
    pub(super) table: T,
}

impl<T: Lookup> KeptTable<T> {
    /// Refills the table if it differs. Files with their own tables are common, so only the first
    /// table allocates memory.
    pub(super) fn update(kept: &mut Option<Box<Self>>, table: Option<HuffmanTable<'_>>) {
        let Some(table) = table else { return };
        let kept = kept.get_or_insert_with(|| {
            Box::new(Self {
                counts: [0; 16],
                symbols: Vec::new(),
                table: T::EMPTY,
            })
        });
        if kept.counts != *table.counts || kept.symbols != table.symbols {
            kept.counts = *table.counts;
            kept.symbols.clear();
            kept.symbols.reserve_exact(256);
            kept.symbols.extend(table.symbols);
            kept.table.fill(table);
        }
    }
}

impl Tables {
    pub(super) fn update(&mut self, scan: &Scan<'_>) {
        for index in 0..4 {
            let used = |which: fn(&Component) -> usize| {
                scan.components().iter().any(|part| which(part) == index)
            };
            KeptTable::update(
                &mut self.dc[index],
                scan.dc[index].filter(|_| used(|part| part.dc)),
            );
            KeptTable::update(
                &mut self.ac[index],
                scan.ac[index].filter(|_| used(|part| part.ac)),
            );
        }
    }
}

/// A block of an MCU: the block's component, and its position in the MCU.
#[derive(Clone, Copy, Default)]
struct Block {
    component: usize,
    x: u32,
    y: u32,
}

/// Tables of a component.
#[derive(Clone, Copy)]
struct Coding<'a> {
    dc: &'a Dc,
    ac: &'a Ac,
    quant: &'a [u16; 64],
}

/// Samples of a block without coefficients.
const GREY: [[u8; 8]; 8] = [[128; 8]; 8];

pub(super) struct Walk<'a> {
    input: &'a [u8],
    header: &'a Header,
    blocks: [Block; BLOCKS_MAX],
    count: usize,
    codings: [Coding<'a>; 4],
    bits: Bits<'a>,
    predictors: [i32; 4],
    /// Index of the next MCU, index at which its restart interval ends or the next seek point is,
    /// and total number of MCUs.
    mcu: u32,
    stop: u32,
    total: u32,
    /// Starts of the restart intervals, and the offset after the last marker; empty without restart
    /// markers.
    starts: &'a [usize],
    points: Option<Points<'a>>,
    /// Whether the walk has jumped to a seek point and not yet confirmed it by reaching the next
    /// one.
    unproven: bool,
    strict: bool,
    /// Whether the rest of the interval is damaged.
    broken: bool,
    pending: Pending<'a>,
}

/// A block that waits for a second one, so that both are transformed together.
struct Pending<'a> {
    coefficients: [[i16; 64]; 2],
    targets: [(usize, u32, u32); 2],
    quants: [&'a [u16; 64]; 2],
    count: usize,
    /// Number of samples of each block, across and down.
    size: u32,
}

impl<'a> Walk<'a> {
    /// `starts` come from [`starts`]; `points` must belong to this picture.
    pub(super) fn new(
        Input {
            bytes: input,
            header,
            strict,
        }: Input<'a>,
        scan: &'a Scan<'a>,
        tables: &'a Tables,
        starts: &'a [usize],
        points: Option<Points<'a>>,
    ) -> Result<Self> {
        let coding =
            |component: &Component| match (&tables.dc[component.dc], &tables.ac[component.ac]) {
                (Some(dc), Some(ac)) => Ok(Coding {
                    dc: &dc.table,
                    ac: &ac.table,
                    quant: &scan.quants[component.quant],
                }),
                _ => Err(Error::invalid(
                    "the JPEG uses a Huffman table that it does not define",
                )),
            };
        let mut codings = [coding(&scan.components()[0])?; 4];
        let mut blocks = [Block::default(); BLOCKS_MAX];
        let mut count = 0;
        let alone = scan.components().len() == 1;
        for (index, component) in scan.components().iter().enumerate() {
            codings[index] = coding(component)?;
            let (h, v) = if alone {
                (1, 1)
            } else {
                (component.factors.h, component.factors.v)
            };
            for (y, x) in (0..v).flat_map(|y| (0..h).map(move |x| (y, x))) {
                blocks[count] = Block {
                    component: index,
                    x: x.into(),
                    y: y.into(),
                };
                count += 1;
            }
        }
        let total = header.mcus();
        let stop = if header.restart == 0 {
            total
        } else {
            header.restart.min(total)
        };
        let coefficients = [[0; 64]; 2];
        let targets = [(0, 0, 0); 2];
        let quants = [codings[0].quant; 2];
        let pending = Pending {
            coefficients,
            targets,
            quants,
            count: 0,
            size: 8,
        };
        Ok(Self {
            input,
            header,
            blocks,
            count,
            codings,
            bits: Bits::new(
                input,
                BitPlace {
                    byte: header.scan,
                    bit: 0,
                },
            ),
            predictors: [0; 4],
            mcu: 0,
            stop: points.as_ref().and_then(Points::next_mcu).unwrap_or(stop),
            total,
            starts,
            points,
            unproven: false,
            strict,
            broken: false,
            pending,
        })
    }

    /// Decodes the needed blocks of a row of MCUs.
    pub(super) fn row(
        &mut self,
        layout: &RegionLayout,
        row: u32,
        rows: &mut PixelRows,
        kernels: &JpegKernels,
    ) -> Result<()> {
        self.advance(row * layout.mcus.0 + layout.mcu_columns.start)?;
        for column in layout.mcu_columns.clone() {
            if self.mcu == self.stop {
                self.cross()?;
            }
            let done = if self.broken {
                Ok(())
            } else {
                self.decode(layout, column, row, rows, kernels)
            };
            self.settle(done)?;
            if self.broken {
                // Pending blocks of this MCU must not be stored over the grey.
                self.pending.flush(rows, kernels);
                self.grey(layout, column, row, rows);
            }
            self.mcu += 1;
        }
        self.pending.flush(rows, kernels);
        Ok(())
    }

    /// Skips MCUs up to `target`.
    fn advance(&mut self, target: u32) -> Result<()> {
        if self.header.restart > 0 && target / self.header.restart > self.mcu / self.header.restart
        {
            self.next_interval(target)?;
        }
        if self
            .points
            .as_ref()
            .and_then(Points::next_mcu)
            .is_some_and(|next| next <= target)
        {
            self.prove()?;
            self.jump(target);
        }
        self.pass_until(target)
    }

    fn pass_until(&mut self, target: u32) -> Result<()> {
        while self.mcu < target {
            if self.mcu == self.stop {
                self.cross()?;
            }
            let done = if self.broken { Ok(()) } else { self.pass() };
            self.settle(done)?;
            self.mcu += 1;
        }
        Ok(())
    }

    /// Begins the next restart interval, or compares with a seek point.
    #[cold]
    fn cross(&mut self) -> Result<()> {
        let Some(point) = self.points.as_mut().and_then(Points::take) else {
            return self.next_interval(self.mcu);
        };
        if point != self.point() {
            return Err(Error::invalid("the seek points belong to another picture"));
        }
        self.unproven = false;
        self.stop_at_next_point();
        Ok(())
    }

    /// After a jump, walks to the next seek point, which shows whether the jump was right.
    fn prove(&mut self) -> Result<()> {
        match self
            .points
            .as_ref()
            .and_then(Points::next_mcu)
            .filter(|_| self.unproven)
        {
            Some(next) => self.pass_until(next).and_then(|()| self.cross()),
            None => Ok(()),
        }
    }

    /// Jumps to the last seek point up to `target`, if there is one ahead.
    fn jump(&mut self, target: u32) {
        let Some(point) = self
            .points
            .as_mut()
            .and_then(|points| points.take_until(target))
        else {
            return;
        };
        // A point at the current MCU saves nothing.
        if point.mcu > self.mcu {
            self.unproven = true;
            self.mcu = point.mcu;
            self.predictors = point.predictors;
            self.bits = Bits::new(self.input, point.place);
        }
        self.stop_at_next_point();
    }

    fn stop_at_next_point(&mut self) {
        self.stop = self
            .points
            .as_ref()
            .and_then(Points::next_mcu)
            .unwrap_or(self.total);
    }

    fn point(&self) -> Point {
        Point {
            mcu: self.mcu,
            place: self.bits.place(),
            predictors: self.predictors,
        }
    }

    /// Skips through the whole scan, and writes its seek points.
    pub(super) fn survey(mut self, mut points: SeekWriter) -> Result<Vec<u8>> {
        while self.mcu < self.total {
            self.pass_until(self.mcu.saturating_add(points.step).min(self.total))?;
            points.push(self.point());
        }
        self.finish()?;
        Ok(points.finish(self.input, self.header, self.bits.next_byte()))
    }

    /// Starts the restart interval that holds `mcu`.
    fn next_interval(&mut self, mcu: u32) -> Result<()> {
        debug_assert!(
            self.header.restart > 0,
            "pictures without markers have one interval"
        );
        let number = mcu / self.header.restart;
        if self.mcu == self.stop {
            self.check_end()?;
        }
        self.broken = (number as usize) + 1 >= self.starts.len();
        if !self.broken {
            self.bits = Bits::new(
                self.input,
                BitPlace {
                    byte: self.starts[number as usize],
                    bit: 0,
                },
            );
        }
        self.predictors = [0; 4];
        self.mcu = number * self.header.restart;
        self.stop = (self.mcu + self.header.restart).min(self.total);
        Ok(())
    }

    /// Checks that the data end with an interval.
    fn check_end(&self) -> Result<()> {
        if self.broken || !self.strict {
            return Ok(());
        }
        ends_here(&self.bits, self.input, format_args!("MCU {}", self.mcu))
    }

    /// Checks the end of the scan, if the walk has reached it.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.prove()?;
        if self.mcu < self.total {
            return Ok(());
        }
        self.check_end()?;
        // With restart markers, `starts` has checked the marker.
        let marker = self.bits.end_marker().unwrap_or(0);
        if self.strict && self.header.restart == 0 && !may_follow(marker) {
            return Err(Error::damaged(format!(
                "marker {marker:02x} after its data"
            )));
        }
        Ok(())
    }

    /// Turns an MCU's fault into an error, or into grey.
    #[inline(always)]
    fn settle(&mut self, done: Result<(), Fault>) -> Result<()> {
        match done {
            Ok(()) if !self.bits.overrun() || self.broken => Ok(()),
            Ok(()) => self.fault(Fault::End),
            Err(fault) => self.fault(fault),
        }
    }

    #[cold]
    fn fault(&mut self, fault: Fault) -> Result<()> {
        let fault = if self.bits.overrun() {
            Fault::End
        } else {
            fault
        };
        if !self.strict {
            self.broken = true;
            return Ok(());
        }
        let what = fault.words();
        let mcu = self.mcu;
        let total = self.total;
        let what = format!("{what}, in MCU {mcu} of {total}");
        Err(Error::damaged(what).at(self.bits.place().byte))
    }

    /// Skips the next MCU without decoding its samples.
    fn pass(&mut self) -> Result<(), Fault> {
        // A copy stays in registers.
        let mut bits = self.bits.clone();
        let done = self.pass_blocks(&mut bits);
        self.bits = bits;
        done
    }

    #[inline(always)]
    fn pass_blocks(&mut self, bits: &mut Bits<'a>) -> Result<(), Fault> {
        for block in &self.blocks[..self.count] {
            let coding = &self.codings[block.component];
            let predictor = &mut self.predictors[block.component];
            *predictor = predictor.wrapping_add(coding.dc.read(bits)?.1);
            coding.ac.skip(bits)?;
        }
        Ok(())
    }

    /// Decodes an MCU.
    fn decode(
        &mut self,
        layout: &RegionLayout,
        column: u32,
        row: u32,
        rows: &mut PixelRows,
        kernels: &JpegKernels,
    ) -> Result<(), Fault> {
        let mut bits = self.bits.clone();
        let done = match layout.scale {
            1 => self.decode_blocks::<true>(&mut bits, layout, column, row, rows, kernels),
            _ => self.decode_blocks::<false>(&mut bits, layout, column, row, rows, kernels),
        };
        self.bits = bits;
        done
    }

    /// With `FULL`, the compiler knows that blocks have 8 × 8 samples.
    #[inline(always)]
    fn decode_blocks<const FULL: bool>(
        &mut self,
        bits: &mut Bits<'a>,
        layout: &RegionLayout,
        column: u32,
        row: u32,
        rows: &mut PixelRows,
        kernels: &JpegKernels,
    ) -> Result<(), Fault> {
        for block in &self.blocks[..self.count] {
            let coding = &self.codings[block.component];
            let predictor = &mut self.predictors[block.component];
            *predictor = predictor.wrapping_add(coding.dc.read(bits)?.1);
            let plane = &layout.planes()[block.component];
            let x = column * u32::from(plane.factors.h) + block.x;
            let y = row * u32::from(plane.factors.v) + block.y;
            if !plane.columns.contains(&x) || !plane.rows.contains(&y) {
                coding.ac.skip(bits)?;
                continue;
            }
            let size = if FULL { 8 } else { plane.block };
            if size == 1 {
                coding.ac.skip(bits)?;
                let sample = kernels::mean(*predictor as i16, coding.quant[0]);
                rows.store(block.component, x, y, 1, &[[sample; 8]; 8]);
                continue;
            }
            let pending = &mut self.pending;
            if !FULL && pending.size != size {
                pending.flush(rows, kernels);
                pending.size = size;
            }
            let coefficients = &mut pending.coefficients[pending.count & 1];
            coefficients[0] = *predictor as i16;
            let read = coding.ac.read(bits, coefficients);
            if read == Ok(1) {
                let dc = coefficients[0];
                let quant = coding.quant[0];
                let product = u32::from(dc.unsigned_abs()) * u32::from(quant);
                if size != 2 || product <= kernels::QUARTER_MAX {
                    rows.store(
                        block.component,
                        x,
                        y,
                        size,
                        &[[kernels::flat(dc, quant); 8]; 8],
                    );
                    continue;
                }
            }
            if let Err(fault) = read {
                *coefficients = [0; 64];
                return Err(fault);
            }
            pending.targets[pending.count & 1] = (block.component, x, y);
            pending.quants[pending.count & 1] = coding.quant;
            pending.count += 1;
            if pending.count == 2 {
                pending.flush_as(size, rows, kernels);
            }
        }
        Ok(())
    }

    #[cold]
    fn grey(&mut self, layout: &RegionLayout, column: u32, row: u32, rows: &mut PixelRows) {
        for block in &self.blocks[..self.count] {
            let plane = &layout.planes()[block.component];
            let x = column * u32::from(plane.factors.h) + block.x;
            let y = row * u32::from(plane.factors.v) + block.y;
            if plane.columns.contains(&x) && plane.rows.contains(&y) {
                rows.store(block.component, x, y, plane.block, &GREY);
            }
        }
    }
}

impl Pending<'_> {
    fn flush(&mut self, rows: &mut PixelRows, kernels: &JpegKernels) {
        if self.count > 0 {
            self.flush_as(self.size, rows, kernels);
        }
    }

    #[inline(always)]
    fn flush_as(&mut self, size: u32, rows: &mut PixelRows, kernels: &JpegKernels) {
        let [first, second] = &self.coefficients;
        let samples = kernels.samples(size, [first, second], self.quants);
        for (samples, (component, x, y)) in samples[..self.count].iter().zip(self.targets) {
            rows.store(component, x, y, size, bytemuck::must_cast_ref(samples));
        }
        self.coefficients = [[0; 64]; 2];
        self.count = 0;
    }
}

/// Finds the starts of the restart intervals by their markers, and the offset after the last
/// marker. `starts` is empty without restart markers, and shorter for a damaged picture.
///
/// Errors, if `strict`: markers out of order, too few or too many; no end marker.
pub(super) fn starts(picture: Input<'_>, starts: &mut Vec<usize>) -> Result<()> {
    let Input {
        bytes: input,
        header,
        strict,
    } = picture;
    starts.clear();
    let coded = &input[header.scan..];
    let end_marker = || {
        if strict {
            header.end_marker(input).map(|_| ())
        } else {
            Ok(())
        }
    };
    if header.restart == 0 {
        return end_marker();
    }
    let count = header.intervals();
    starts.reserve_exact((count + 1).min(2 * coded.len() + 2));
    starts.push(header.scan);
    // With the right number of markers nothing is lost; some encoders number them differently.
    let complete = !strict
        && memchr::memchr_iter(0xFF, coded)
            .filter(|at| matches!(coded.get(at + 1), Some(0xD0..=0xD7)))
            .count()
            + 1
            == count;
    let damage = |at: usize, message: String| Err(Error::damaged(message).at(header.scan + at));
    for at in memchr::memchr_iter(0xFF, coded) {
        let marker = match coded.get(at + 1) {
            // An escaped data byte, or fill before a marker.
            Some(0 | 0xFF) => continue,
            Some(marker) => *marker,
            None => break,
        };
        let done = starts.len();
        let restart = matches!(marker, 0xD0..=0xD7);
        // Some cameras also write a restart marker after the last interval.
        let one_more = done == count && restart && coded[at + 2..].first() == Some(&0xFF);
        if strict && !one_more && (restart != (done < count) || (!restart && !may_follow(marker))) {
            return damage(
                at,
                format!("marker {marker:02x} after {done} of {count} restart intervals"),
            );
        }
        if strict && restart && usize::from(marker & 7) != (done - 1) % 8 {
            return damage(
                at,
                format!(
                    "restart marker {} in place of {}",
                    marker & 7,
                    (done - 1) % 8
                ),
            );
        }
        if !restart && marker != 0xD9 && !(strict && done == count) {
            // Damage.
            continue;
        }
        let next = header.scan + at + 2;
        if !restart || strict || complete {
            starts.push(next);
        } else {
            // As in libjpeg-turbo, an interval whose marker is missing has no data, and markers of
            // earlier intervals are skipped.
            let ahead = |done: usize| marker.wrapping_sub(done as u8 - 1) & 7;
            while starts.len() < count && matches!(ahead(starts.len()), 1 | 2) {
                starts.push(next - 2);
            }
            if !matches!(ahead(starts.len()), 6 | 7) {
                starts.push(next);
            }
        }
        if !restart || starts.len() > count {
            return end_marker();
        }
    }
    end_marker()?;
    starts.push(input.len());
    Ok(())
}

/// Checks that the data end with the interval, after `last`.
pub(super) fn ends_here(
    bits: &Bits<'_>,
    input: &[u8],
    last: std::fmt::Arguments<'_>,
) -> Result<()> {
    let next = bits.next_byte();
    match bits.end().unwrap_or(input.len()) - next {
        ..=SURPLUS => Ok(()),
        left => {
            let what = format!("{left} bytes of data are left after {last}");
            Err(Error::damaged(what).at(next))
        }
    }
}

/// Whether this marker may follow the data.
fn may_follow(marker: u8) -> bool {
    matches!(marker, 0xC4 | 0xD9 | 0xDB..=0xDD | 0xE0..=0xEF | 0xFE)
}
