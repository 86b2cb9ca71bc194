//! Pictures of several scans: all scans are read side by side, one row of MCUs after the other.
//!
//! ```text
//! scan 1: DC        ──┬ row 0 ─┬ row 1 ─┬ …
//! scan 2: AC 1 to 5 ──┼ row 0 ─┼ row 1 ─┼ …   coefficients of one row ─► samples ─► rows of pixels
//! scan 3: AC 6 to 63 ─┴ row 0 ─┴ row 1 ─┴ …
//! ```
//!
//! What a scan does to a block depends only on what earlier scans made of that block. So no scan
//! needs to be complete before the next one begins, and the coefficients of one row of MCUs are
//! enough. For blocks outside the crop, only the places of their nonzero coefficients are kept,
//! since refinement scans depend on them. No scan is read below the crop.
//!
//! # Limits and invariants
//!
//! * Time is linear in the bytes, and in blocks times scans. [`Script::parse`] limits the scans.
//! * Memory, besides that for pictures of one scan: 136 bytes for each block of a row of MCUs, and
//!   the tables of each scan. For incomplete pictures see [`smooth`](super::smooth).
//! * As in libjpeg-turbo, a component keeps the quantisation table of its first scan. Huffman
//!   tables and restart intervals are those of the last segments before a scan.

use super::bits::{BitPlace, Bits};
use super::header::{Factors, Header, Input};
use super::huffman::{Ac, Band, CODE_MAX, Dc, Fault, ZIGZAG};
use super::kernels::{self, JpegKernels};
use super::region::{Region, RegionLayout};
use super::rows::{PixelRows, sized};
use super::script::{AC_BYTES, BAND_BYTES, Coding, DC_BYTES, OneScan, ScanPart, Script};
use super::smooth::Smoothing;
use super::walk::{KeptTable, ends_here};
use crate::error::{Error, Result};
use std::ops::Range;

/// Tables of a worker for the scans of a script, kept from picture to picture.
#[derive(Default)]
pub(super) struct ScanTables {
    dc: [Option<Box<KeptTable<Dc>>>; 4],
    ac: [Option<Box<KeptTable<Ac>>>; 4],
    band: Option<Box<KeptTable<Band>>>,
}

impl ScanTables {
    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        let dc = self.dc.iter().flatten().count();
        let ac = self.ac.iter().flatten().count();
        dc * DC_BYTES + ac * AC_BYTES + if self.band.is_some() { BAND_BYTES } else { 0 }
    }

    fn update(&mut self, scan: &OneScan<'_>) {
        for part in scan.parts() {
            match scan.coding {
                Coding::Sequential => {
                    KeptTable::update(&mut self.dc[part.dc], scan.dc[part.dc]);
                    KeptTable::update(&mut self.ac[part.ac], scan.ac[part.ac]);
                }
                Coding::DcFirst => KeptTable::update(&mut self.dc[part.dc], scan.dc[part.dc]),
                // Refinement bits of DC have no Huffman codes (G.1.2.1).
                Coding::DcRefine => {}
                // AC scans of a progressive picture have one component (G.1.1.1.1), so one table.
                Coding::AcFirst | Coding::AcRefine => {
                    KeptTable::update(&mut self.band, scan.ac[part.ac])
                }
            }
        }
    }
}

/// Coefficients of one row of MCUs.
#[derive(Default)]
pub(super) struct Coefficients {
    planes: [PlaneRow; 4],
}

#[derive(Default)]
struct PlaneRow {
    /// Coefficients of the crop's blocks, row by row, in natural order.
    blocks: Vec<[i16; 64]>,
    /// For each block of the row of MCUs, a mask of its nonzero coefficients, in the order of the
    /// file.
    filled: Vec<u64>,
    /// Blocks across in an interleaved scan; blocks across and down in a scan of one component.
    padded: u32,
    across: u32,
    down: u32,
    factors: Factors,
    columns: Range<u32>,
    /// Whether the row holds a part of the crop.
    needed: bool,
}

/// A row of blocks of a component.
#[derive(Clone, Copy)]
struct BlockRow {
    component: usize,
    /// Number of samples per side of a block.
    size: u32,
    /// Index of the row in the component, and its index within the row of MCUs.
    y: u32,
    below: u32,
}

impl PlaneRow {
    /// The mask of block (x, y) of the row of MCUs, and its coefficients if it belongs to the crop.
    #[inline(always)]
    fn block(&mut self, x: u32, y: u32) -> (&mut u64, Option<&mut [i16; 64]>) {
        let filled = &mut self.filled[(y * self.padded + x) as usize];
        if !self.needed || !self.columns.contains(&x) {
            return (filled, None);
        }
        let at = y as usize * self.columns.len() + (x - self.columns.start) as usize;
        (filled, self.blocks.get_mut(at))
    }
}

impl Coefficients {
    pub(super) fn start(&mut self, header: &Header, layout: &RegionLayout) {
        self.planes[layout.planes().len()..]
            .iter_mut()
            .for_each(|unused| *unused = PlaneRow::default());
        for (component, (store, plane)) in self.planes.iter_mut().zip(layout.planes()).enumerate() {
            let h = u32::from(plane.factors.h);
            let v = u32::from(plane.factors.v);
            store.padded = layout.mcus.0 * h;
            (store.across, store.down) = header.blocks(component);
            store.factors = plane.factors;
            store.columns = plane.columns.clone();
            sized(&mut store.blocks, store.columns.len() * v as usize, [0; 64]);
            sized(&mut store.filled, (store.padded * v) as usize, 0);
        }
    }

    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        self.planes
            .iter()
            .map(|plane| 128 * plane.blocks.capacity() + 8 * plane.filled.capacity())
            .sum()
    }

    /// Begins a row of MCUs. `needed` says whether the crop needs its coefficients.
    fn begin(&mut self, needed: bool) {
        for plane in &mut self.planes {
            // Masks are needed outside the crop, too: the bits of a refinement scan depend on them.
            plane.filled.fill(0);
            if needed {
                plane.blocks.fill([0; 64]);
            }
            plane.needed = needed;
        }
    }

    /// Adds estimated coefficients to the row.
    pub(super) fn smooth(
        &mut self,
        layout: &RegionLayout,
        row: u32,
        quants: &[[u16; 64]; 4],
        smoothing: &Smoothing,
    ) {
        for (index, (store, plane)) in self.planes.iter_mut().zip(layout.planes()).enumerate() {
            let v = u32::from(plane.factors.v);
            let across = store.columns.len();
            for below in (0..v).filter(|below| plane.rows.contains(&(row * v + below))) {
                let blocks = &mut store.blocks[below as usize * across..][..across];
                if smoothing.estimate(
                    index,
                    store.columns.start,
                    row * v + below,
                    &quants[index],
                    blocks,
                ) {
                    // No block may be transformed as if it had only its DC coefficient.
                    store.filled[(below * store.padded) as usize..][..store.padded as usize]
                        .fill(u64::MAX);
                }
            }
        }
    }

    /// Turns the row into samples.
    pub(super) fn transform(
        &self,
        layout: &RegionLayout,
        row: u32,
        quants: &[[u16; 64]; 4],
        rows: &mut PixelRows,
        kernels: &JpegKernels,
    ) {
        for (index, (store, plane)) in self.planes.iter().zip(layout.planes()).enumerate() {
            let v = u32::from(plane.factors.v);
            for below in (0..v).filter(|below| plane.rows.contains(&(row * v + below))) {
                let blocks = BlockRow {
                    component: index,
                    size: plane.block,
                    y: row * v + below,
                    below,
                };
                store.transform(blocks, &quants[index], rows, kernels);
            }
        }
    }
}

impl PlaneRow {
    /// Appends the DC coefficients of the row to `to`, with zeros for the padding of MCUs.
    fn copy_dc(&self, to: &mut Vec<i16>) {
        let across = self.columns.len();
        for row in self.blocks.chunks_exact(across.max(1)) {
            to.extend(row.iter().map(|block| block[0]));
            to.extend((across..self.padded as usize).map(|_| 0));
        }
    }

    fn transform(
        &self,
        place: BlockRow,
        quant: &[u16; 64],
        rows: &mut PixelRows,
        kernels: &JpegKernels,
    ) {
        let BlockRow {
            component,
            size,
            y,
            below,
        } = place;
        let mut waiting: Option<(u32, &[i16; 64])> = None;
        let blocks = &self.blocks[below as usize * self.columns.len()..];
        for (x, block) in self.columns.clone().zip(blocks) {
            if size == 1 {
                rows.store(
                    component,
                    x,
                    y,
                    1,
                    &[[kernels::mean(block[0], quant[0]); 8]; 8],
                );
                continue;
            }
            let product = u32::from(block[0].unsigned_abs()) * u32::from(quant[0]);
            // Bit 0 is DC. Without AC coefficients, all samples of a block are equal.
            let only_dc = self.filled[(below * self.padded + x) as usize] >> 1 == 0;
            if only_dc && (size != 2 || product <= kernels::QUARTER_MAX) {
                rows.store(
                    component,
                    x,
                    y,
                    size,
                    &[[kernels::flat(block[0], quant[0]); 8]; 8],
                );
                continue;
            }
            let Some((before, first)) = waiting.take() else {
                waiting = Some((x, block));
                continue;
            };
            let samples = kernels.samples(size, [first, block], [quant; 2]);
            for (x, samples) in [before, x].into_iter().zip(&samples) {
                rows.store(component, x, y, size, bytemuck::must_cast_ref(samples));
            }
        }
        if let Some((x, block)) = waiting {
            let samples = kernels.samples(size, [block; 2], [quant; 2]);
            rows.store(component, x, y, size, bytemuck::must_cast_ref(&samples[0]));
        }
    }
}

/// Reads the DC coefficients of a whole picture for smoothing; `None` if the picture is complete
/// and needs none.
pub(super) fn survey(
    picture: Input<'_>,
    script: &Script<'_>,
    tables: &mut Vec<ScanTables>,
    coefficients: &mut Coefficients,
) -> Result<Option<Smoothing>> {
    let header = picture.header;
    let Some(lacks) = script.lacks else {
        return Ok(None);
    };
    let width = header.width.div_ceil(8);
    let height = header.height.div_ceil(8);
    let layout = RegionLayout::new(
        header,
        script.components(),
        Region {
            left: 0,
            top: 0,
            width,
            height,
        },
        8,
    );
    let mut smoothing = Smoothing::new(header, &layout, lacks);
    coefficients.start(header, &layout);
    let mut readers = Readers::new(picture, script, tables);
    for row in 0..layout.mcus.1 {
        readers.read(row, true, coefficients)?;
        smoothing
            .planes()
            .zip(&coefficients.planes)
            .for_each(|(to, plane)| plane.copy_dc(to));
    }
    smoothing.end_in(readers.end_row(&layout), header);
    Ok(Some(smoothing))
}

/// The readers of all scans.
pub(super) struct Readers<'a> {
    readers: Vec<ScanReader<'a>>,
}

impl<'a> Readers<'a> {
    pub(super) fn new(
        picture: Input<'a>,
        script: &'a Script<'a>,
        tables: &'a mut Vec<ScanTables>,
    ) -> Self {
        if tables.len() < script.scans.len() {
            tables.resize_with(script.scans.len(), ScanTables::default);
        }
        tables
            .iter_mut()
            .zip(&script.scans)
            .for_each(|(tables, scan)| tables.update(scan));
        let readers = script.scans.iter().zip(&*tables).enumerate();
        Self {
            readers: readers
                .map(|(number, (scan, tables))| ScanReader::new(picture, number, scan, tables))
                .collect(),
        }
    }

    /// Reads a row of MCUs. Its coefficients are kept if it is `needed`.
    pub(super) fn read(&mut self, row: u32, needed: bool, to: &mut Coefficients) -> Result<()> {
        to.begin(needed);
        self.readers
            .iter_mut()
            .try_for_each(|reader| match reader.strict {
                true => reader.row::<true>(row, to),
                false => reader.row::<false>(row, to),
            })
    }

    /// The row of MCUs in which the last scan ends, complete or not.
    fn end_row(&self, layout: &RegionLayout) -> u32 {
        self.readers.last().map_or(0, |reader| {
            let last = reader.mcu.saturating_sub(1);
            let mcu = if reader.broken || reader.behind == Some(last) {
                reader.broken_at
            } else {
                last
            };
            match reader.scan.parts() {
                [part] => {
                    let factors = layout.planes()[part.component].factors;
                    mcu / reader.across / u32::from(factors.v)
                }
                _ => mcu / layout.mcus.0,
            }
        })
    }

    /// Checks the end of each scan that was read completely.
    pub(super) fn finish(&self) -> Result<()> {
        self.readers
            .iter()
            .filter(|reader| reader.mcu == reader.total)
            .try_for_each(ScanReader::finish)
    }
}

/// A scan being read.
struct ScanReader<'a> {
    scan: &'a OneScan<'a>,
    tables: &'a ScanTables,
    number: usize,
    input: &'a [u8],
    strict: bool,
    bits: Bits<'a>,
    predictors: [i32; 4],
    /// Number of blocks still to come in an end-of-band run. They have no codes of their own.
    ended: u32,
    /// Index of the next MCU, end of its restart interval, and total number of MCUs.
    mcu: u32,
    stop: u32,
    total: u32,
    /// Whether the rest of the interval is damaged.
    broken: bool,
    /// The last MCU in which damage was found, unless it directly follows a damaged interval.
    broken_at: u32,
    /// The first MCU after a damaged interval. As in libjpeg-turbo, it does not matter whether its
    /// own data exist.
    behind: Option<u32>,
    /// MCUs per row in a scan of one component.
    across: u32,
}

impl<'a> ScanReader<'a> {
    fn new(
        picture: Input<'a>,
        number: usize,
        scan: &'a OneScan<'a>,
        tables: &'a ScanTables,
    ) -> Self {
        let Input {
            bytes: input,
            header,
            strict,
        } = picture;
        let (across, down) = header.blocks(scan.parts[0].component);
        // With one component, an MCU is one block, and blocks that pad an interleaved MCU are not
        // coded (A.2.2).
        let total = if scan.parts().len() == 1 {
            across * down
        } else {
            header.mcus()
        };
        let stop = if scan.restart == 0 {
            total
        } else {
            scan.restart.min(total)
        };
        let bits = Bits::new(
            input,
            BitPlace {
                byte: scan.data.start,
                bit: 0,
            },
        );
        Self {
            scan,
            tables,
            number,
            input,
            strict,
            bits,
            predictors: [0; 4],
            ended: 0,
            mcu: 0,
            stop,
            total,
            broken: false,
            broken_at: 0,
            behind: None,
            across,
        }
    }

    /// Reads a row of MCUs. `STRICT` must equal `self.strict`.
    fn row<const STRICT: bool>(&mut self, row: u32, to: &mut Coefficients) -> Result<()> {
        let low = self.scan.low;
        let band = self.scan.band.clone();
        let part = self.scan.parts[0];
        match (self.scan.coding, &self.tables.band) {
            (Coding::Sequential, _) => {
                self.blocks(row, to, |reader, bits, part, (filled, block)| {
                    let (Some(dc), Some(ac)) =
                        (&reader.tables.dc[part.dc], &reader.tables.ac[part.ac])
                    else {
                        return Err(Fault::Code);
                    };
                    // Each DC value is coded as the difference from the component's previous block.
                    let predictor = &mut reader.predictors[part.component];
                    *predictor = predictor.wrapping_add(dc.table.read(bits)?.1);
                    let Some(block) = block else {
                        return ac.table.skip(bits);
                    };
                    block[0] = *predictor as i16;
                    // This is not an exact mask of the nonzero coefficients, which is enough
                    // because no scan refines them.
                    *filled |= if ac.table.read(bits, block)? > 1 {
                        2
                    } else {
                        0
                    };
                    Ok(())
                })
            }
            (Coding::DcFirst, _) => self.blocks(row, to, |reader, bits, part, (_, block)| {
                let Some(dc) = &reader.tables.dc[part.dc] else {
                    return Err(Fault::Code);
                };
                let difference = match dc.table.read(bits) {
                    Err(_) if !STRICT => zero(bits),
                    found => found?.1,
                };
                let predictor = &mut reader.predictors[part.component];
                *predictor = predictor.wrapping_add(difference);
                // Differences are of values without their `low` bits (the point transform, A.4), so
                // the predictor is not shifted.
                if let Some(block) = block {
                    block[0] = predictor.wrapping_shl(low) as i16;
                }
                Ok(())
            }),
            (Coding::DcRefine, _) => self.blocks(row, to, |_, bits, _, (_, block)| {
                bits.refill();
                let bit = bits.take(1) as i16;
                // DC was shifted right arithmetically (A.4): this is a bit of its two's complement.
                if let Some(block) = block {
                    block[0] |= bit << low;
                }
                Ok(())
            }),
            (Coding::AcFirst, Some(table)) => {
                // `ended` is kept by the reader, because an end-of-band run may cross rows of MCUs.
                self.blocks_of(part, row, to, |reader, bits, (filled, block)| {
                    reader.ended = ac_first::<STRICT>(
                        &table.table,
                        bits,
                        band.clone(),
                        low,
                        reader.ended,
                        filled,
                        block,
                    )?;
                    Ok(())
                })
            }
            (Coding::AcRefine, Some(table)) => {
                self.blocks_of(part, row, to, |reader, bits, (filled, block)| {
                    reader.ended = ac_refine::<STRICT>(
                        &table.table,
                        bits,
                        band.clone(),
                        low,
                        reader.ended,
                        filled,
                        block,
                    )?;
                    Ok(())
                })
            }
            _ => Err(Error::invalid(
                "the JPEG uses a Huffman table that it does not define",
            )),
        }
    }

    /// Reads the blocks of a row of MCUs of a scan that may have several components.
    #[inline(always)]
    fn blocks(
        &mut self,
        row: u32,
        to: &mut Coefficients,
        mut read: impl FnMut(
            &mut Self,
            &mut Bits<'a>,
            ScanPart,
            (&mut u64, Option<&mut [i16; 64]>),
        ) -> Result<(), Fault>,
    ) -> Result<()> {
        let scan = self.scan;
        if let [part] = scan.parts() {
            return self.blocks_of(*part, row, to, |reader, bits, block| {
                read(reader, bits, *part, block)
            });
        }
        let first = &to.planes[scan.parts[0].component];
        for column in 0..first.padded / u32::from(first.factors.h) {
            if !self.begin()? {
                continue;
            }
            let mut bits = self.bits.clone();
            let done = scan.parts().iter().try_for_each(|part| {
                let plane = &mut to.planes[part.component];
                let h = u32::from(plane.factors.h);
                let v = u32::from(plane.factors.v);
                // An interleaved MCU has `v` rows of `h` blocks of each component (A.2.3).
                (0..v).try_for_each(|y| {
                    (0..h).try_for_each(|x| {
                        read(self, &mut bits, *part, plane.block(column * h + x, y))
                    })
                })
            });
            self.bits = bits;
            self.settle(done)?;
        }
        Ok(())
    }

    /// Reads the blocks of a row of MCUs of a scan of one component, which is not interleaved.
    #[inline(always)]
    fn blocks_of(
        &mut self,
        part: ScanPart,
        row: u32,
        to: &mut Coefficients,
        mut read: impl FnMut(
            &mut Self,
            &mut Bits<'a>,
            (&mut u64, Option<&mut [i16; 64]>),
        ) -> Result<(), Fault>,
    ) -> Result<()> {
        let plane = &mut to.planes[part.component];
        let v = u32::from(plane.factors.v);
        let down = plane.down;
        let across = plane.across;
        // `v` rows of blocks belong to a row of interleaved MCUs; the last one may have fewer.
        for y in 0..v.min(down.saturating_sub(row * v)) {
            for x in 0..across {
                if !self.begin()? {
                    continue;
                }
                // A copy stays in registers.
                let mut bits = self.bits.clone();
                let done = read(self, &mut bits, plane.block(x, y));
                self.bits = bits;
                self.settle(done)?;
            }
        }
        Ok(())
    }

    /// Begins an MCU. Returns `false` if the MCU has no valid data and must not be read.
    #[inline(always)]
    fn begin(&mut self) -> Result<bool> {
        if self.mcu == self.stop {
            self.restart()?;
        }
        self.mcu += 1;
        Ok(!self.broken)
    }

    #[inline(always)]
    fn settle(&mut self, done: Result<(), Fault>) -> Result<()> {
        match done {
            // Check for an overrun, too: the zeros supplied after the data may look like valid
            // codes.
            Ok(()) if !self.bits.overrun() => Ok(()),
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
            if self.behind != Some(self.mcu - 1) {
                self.broken_at = self.mcu - 1;
            }
            return Ok(());
        }
        let what = fault.words();
        let scan = self.number + 1;
        let mcu = self.mcu - 1;
        let total = self.total;
        let what = format!("{what}, in MCU {mcu} of {total} of scan {scan}");
        Err(Error::damaged(what).at(self.bits.place().byte))
    }

    /// Continues after the next restart marker.
    #[cold]
    fn restart(&mut self) -> Result<()> {
        self.check_end()?;
        // Restart markers are numbered 0 to 7 in turn, from 0 after the first interval (B.2.1).
        let number = ((self.mcu / self.scan.restart + 7) % 8) as u8;
        self.behind = self.broken.then_some(self.mcu);
        let (place, found) = self.find_restart(number);
        if self.strict && !found {
            let message = format!(
                "restart marker {number} is missing in scan {}",
                self.number + 1
            );
            return Err(Error::damaged(message).at(self.bits.place().byte));
        }
        self.bits = Bits::new(
            self.input,
            BitPlace {
                byte: place,
                bit: 0,
            },
        );
        // Without its marker the interval has no data, which the next MCU detects.
        self.broken = self.broken && !found;
        // Each interval is decoded independently, so no state crosses its marker (E.2.4).
        self.ended = 0;
        self.predictors = [0; 4];
        // Without a further marker, the rest of the scan is one interval.
        let last = !found && place == self.scan.data.end;
        self.stop = if last {
            self.total
        } else {
            (self.mcu + self.scan.restart).min(self.total)
        };
        Ok(())
    }

    /// Where the coded data continue, and whether a restart interval begins there. As in
    /// libjpeg-turbo, this skips restart markers that belong to the two intervals before, stops in
    /// front of markers of the next two intervals, and accepts all other markers.
    fn find_restart(&self, number: u8) -> (usize, bool) {
        let start = self.bits.end().unwrap_or(self.input.len());
        let end = self.scan.data.end;
        let data = self.input.get(start..end).unwrap_or_default();
        for at in memchr::memchr_iter(0xFF, data) {
            let Some(marker @ 0xD0..=0xD7) = data.get(at + 1) else {
                continue;
            };
            match marker.wrapping_sub(number) & 7 {
                0 => return (start + at + 2, true),
                _ if self.strict => break,
                1 | 2 => return (start + at, false),
                6 | 7 => {}
                _ => return (start + at + 2, true),
            }
        }
        (end, false)
    }

    /// Checks the end of a scan.
    fn finish(&self) -> Result<()> {
        self.check_end()?;
        let end = self.bits.end().unwrap_or(self.input.len());
        let data = self.scan.data.end;
        // Some cameras also write a restart marker after the last interval.
        if self.strict && !self.broken && end + 2 < data {
            let message = format!(
                "one restart marker too many for the intervals of scan {}",
                self.number + 1
            );
            return Err(Error::damaged(message).at(end));
        }
        Ok(())
    }

    /// Checks that the data end with the interval.
    fn check_end(&self) -> Result<()> {
        if self.broken || !self.strict {
            return Ok(());
        }
        ends_here(
            &self.bits,
            self.input,
            format_args!("MCU {} of scan {}", self.mcu, self.number + 1),
        )
    }
}

/// Skips bits that no code begins with: as in libjpeg-turbo, one more than the longest code. They
/// count as symbol 0.
#[cold]
fn zero(bits: &mut Bits<'_>) -> i32 {
    bits.skip(CODE_MAX as u32 + 1);
    0
}

/// Reads the first bits of AC coefficients (G.1.2.2). `ended` is the number of blocks left in an
/// end-of-band run; returns the number left after this block. If not `STRICT`, damage has the same
/// result as in libjpeg-turbo.
#[inline(always)]
fn ac_first<const STRICT: bool>(
    table: &Band,
    bits: &mut Bits<'_>,
    band: Range<usize>,
    low: u32,
    ended: u32,
    filled: &mut u64,
    mut block: Option<&mut [i16; 64]>,
) -> Result<u32, Fault> {
    // Within an end-of-band run, the block's band is zero, and no bit is coded.
    if ended > 0 {
        return Ok(ended - 1);
    }
    let mut next = band.start;
    while next < band.end {
        let (run, value) = match table.read(bits) {
            Err(_) if !STRICT => return Ok(zero(bits) as u32),
            found => found?,
        };
        next += run as usize;
        if value == 0 {
            if run < 15 {
                // EOBn: `run` more bits give the length of the run, which includes this block.
                return Ok((1 << run) - 1 + bits.take(run));
            }
            // ZRL: 16 zeros, of which `run` counted 15.
            next += 1;
            continue;
        }
        if next >= band.end {
            if STRICT {
                return Err(Fault::Long);
            }
            // Like libjpeg-turbo, stores the value past the end of the band, but never past the
            // block's last place.
            next = next.min(63);
        }
        let value = (value << low) as i16;
        *filled = *filled & !(1 << next) | u64::from(value != 0) << next;
        if let Some(block) = &mut block {
            block[usize::from(ZIGZAG[next])] = value;
        }
        next += 1;
    }
    Ok(0)
}

/// Reads one more bit of AC coefficients (G.1.2.3). `ended` is the number of blocks left in an
/// end-of-band run; returns the number left after this block.
#[inline(always)]
fn ac_refine<const STRICT: bool>(
    table: &Band,
    bits: &mut Bits<'_>,
    band: Range<usize>,
    low: u32,
    mut ended: u32,
    filled: &mut u64,
    mut block: Option<&mut [i16; 64]>,
) -> Result<u32, Fault> {
    // Only coefficients of earlier scans have correction bits, not those that this scan adds.
    let old = *filled;
    let mut next = band.start;
    while ended == 0 && next < band.end {
        let (run, mut value) = match table.read(bits) {
            Err(_) if !STRICT => (0, zero(bits)),
            found => found?,
        };
        if value == 0 && run < 15 {
            // EOBn, with this block included: its old coefficients still have correction bits.
            ended = (1 << run) + bits.take(run);
            break;
        }
        if !(-1..=1).contains(&value) {
            if STRICT {
                return Err(Fault::Code);
            }
            // A new coefficient has one value bit. Of a longer, damaged value, only the first bit
            // is read.
            *bits = bits.back(31 - value.unsigned_abs().leading_zeros());
            value = value.signum();
        }
        // A run counts only coefficients that are still zero. The new coefficient replaces the zero
        // after `run` other zeros.
        let mut zeros = !old & (u64::MAX << next);
        for _ in 0..run {
            zeros &= zeros.wrapping_sub(1);
        }
        let place = (zeros.trailing_zeros() as usize).min(band.end);
        // The sign of the new coefficient follows its code; the correction bits of the coefficients
        // before it follow the sign.
        refine(bits, old, next..place, low, block.as_deref_mut());
        // Without a value this is ZRL, whose 16th zero stays zero.
        if value != 0 {
            if place == band.end && STRICT {
                return Err(Fault::Long);
            }
            let place = place.min(63);
            *filled |= 1 << place;
            if let Some(block) = &mut block {
                block[usize::from(ZIGZAG[place])] = (value << low) as i16;
            }
        }
        next = place + 1;
    }
    if ended > 0 {
        refine(bits, old, next..band.end, low, block);
        ended -= 1;
    }
    Ok(ended)
}

/// Reads a correction bit for each coefficient of the range that is nonzero in `old`.
#[inline(always)]
fn refine(
    bits: &mut Bits<'_>,
    old: u64,
    range: Range<usize>,
    low: u32,
    block: Option<&mut [i16; 64]>,
) {
    if range.is_empty() {
        return;
    }
    let mut places = old & (u64::MAX << range.start) & (u64::MAX >> (64 - range.end));
    if places == 0 {
        return;
    }
    // Outside the crop, the bits are only skipped: they do not change which values are nonzero.
    let Some(block) = block else {
        let mut left = places.count_ones();
        while left > 0 {
            bits.refill();
            let count = left.min(16);
            bits.skip(count);
            left -= count;
        }
        return;
    };
    let bit = 1_i16 << low;
    bits.refill();
    let mut read = 0;
    while places != 0 {
        if read == super::bits::FULL {
            bits.refill();
            read = 0;
        }
        let value = &mut block[usize::from(ZIGZAG[places.trailing_zeros() as usize & 63])];
        places &= places - 1;
        read += 1;
        // AC values were truncated towards zero, unlike DC, so the bit extends the magnitude. As in
        // libjpeg-turbo, a bit that is already set is not added again.
        if bits.take(1) > 0 && *value & bit == 0 {
            *value = value.wrapping_add(if *value < 0 { -bit } else { bit });
        }
    }
}
