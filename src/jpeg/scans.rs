//! Pictures of several scans: all scans are read side by side, one row of MCUs after the other.
//!
//! ```text
//! scan 1: DC        ──┬ row 0 ─┬ row 1 ─┬ …
//! scan 2: AC 1 to 5 ──┼ row 0 ─┼ row 1 ─┼ …   coefficients of one row ─► samples ─► rows of pixels
//! scan 3: AC 6 to 63 ─┴ row 0 ─┴ row 1 ─┴ …
//! ```
//!
//! A scan changes a block by what earlier scans made of that block alone. So no scan needs to be complete before the next
//! one begins, and the coefficients of one row of MCUs are enough. Of blocks beside the crop only the places of their
//! coefficients are kept, since refinements depend on them. No scan is read below the crop.
//!
//! # Limits and invariants
//!
//! * Time is linear in the bytes, and in blocks times scans. [`Script::parse`] limits the scans.
//! * Memory, besides that for pictures of one scan: 136 bytes for each block of a row of MCUs, tables of each scan.
//! * What is coded follows libjpeg-turbo: a component keeps the quantisation table of its first scan, Huffman tables and restart
//!   intervals are those of the last segments before a scan.

use super::bits::{Bits, Place};
use super::header::{BLOCKS_MAX, Component, DAMAGED, Factors, Header, Input, SURPLUS, Scan, Segment};
use super::huffman::{Ac, Band, Dc, Fault, Table, ZIGZAG};
use super::kernels::{self, Kernels};
use super::region::Layout;
use super::rows::Rows;
use super::walk::KeptTable;
use crate::error::{Error, ErrorKind, Result, Stage};
use std::ops::Range;

/// Largest shift of a coefficient that libjpeg-turbo takes.
const SHIFT_MAX: u8 = 13;

/// Heap bytes of tables, with their symbols.
const DC_BYTES: usize = size_of::<KeptTable<Dc>>() + 256;
const AC_BYTES: usize = size_of::<KeptTable<Ac>>() + 256;
const BAND_BYTES: usize = size_of::<KeptTable<Band>>() + 256;

/// What the scans of a picture code, and where.
pub(crate) struct Script<'a> {
    components: [Component; 4],
    count: usize,
    /// Of each component, in natural order.
    quants: [[u16; 64]; 4],
    scans: Vec<OneScan<'a>>,
}

/// A scan of a script.
struct OneScan<'a> {
    coding: Coding,
    /// Components in the order of an MCU, with the numbers of their tables.
    parts: [Part; 4],
    count: usize,
    /// Coefficients, in the order of the file.
    band: Range<usize>,
    /// Bits that later scans add.
    low: u32,
    dc: [Option<Table<'a>>; 4],
    ac: [Option<Table<'a>>; 4],
    /// MCUs between restart markers; 0 without them.
    restart: u32,
    /// Of the file.
    data: Range<usize>,
}

#[derive(Clone, Copy, Default)]
struct Part {
    component: usize,
    dc: usize,
    ac: usize,
}

/// The procedures of the standard, parts F and G.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Sequential,
    DcFirst,
    DcRefine,
    AcFirst,
    AcRefine,
}

impl Coding {
    fn has_dc(self) -> bool {
        matches!(self, Self::Sequential | Self::DcFirst)
    }
}

/// How many low bits each coefficient lacks; [`UNSEEN`] before its first scan.
type Lacks = [[u8; 64]; 4];
const UNSEEN: u8 = u8::MAX;

impl<'a> Script<'a> {
    /// Finds the scans of a picture.
    ///
    /// Errors: more scans than `most`; scans that no decoder takes; if `strict`, scans that leave out coefficients.
    pub(crate) fn parse(picture: Input<'a>, most: u32) -> Result<Self> {
        let Input { bytes: input, header, strict } = picture;
        if strict {
            header.end_marker(input)?;
        }
        let mut state = Scan::empty(header);
        let mut script =
            Self { components: [Component::default(); 4], count: 0, quants: [[0; 64]; 4], scans: Vec::new() };
        let (mut at, mut restart) = (2, 0);
        let (mut have, mut latched, mut lacks) = ([false; 4], [false; 4], [[UNSEEN; 64]; 4]);
        let mut odd = Ok(());
        loop {
            let segment = match Segment::next(input, at) {
                Ok(segment) if segment.marker != 0xD9 => segment,
                Err(error) if script.scans.is_empty() => return Err(error),
                // A strict decode looks for the end marker.
                _ => break,
            };
            let Segment { marker, start, end } = segment;
            let body = &input[start..end];
            at = end;
            match marker {
                0xC0..=0xC2 if script.count == 0 => {
                    state.read_frame(body);
                    script.take_frame(&state, header)?;
                }
                0xC0..=0xC2 => return Err(Error::decode("JPEG with a second frame header")),
                0xC4 => state.read_huffman(body, start)?,
                0xDB => state.read_quants(body, start, &mut have)?,
                0xDD => {
                    let cut = || Error::decode("JPEG with a cut restart interval");
                    restart = u32::from(u16::from_be_bytes(*body.first_chunk().ok_or_else(cut)?));
                }
                0xDA => {
                    if script.scans.len() == most as usize {
                        let message = format!("JPEG of more than {most} scans; the limit is {most}");
                        return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
                    }
                    let data = end..end_of_data(input, end);
                    at = data.end;
                    let scan = script.scan(header, (body, start), &state, (restart, data))?;
                    script.latch(&scan, &state, (&have, &mut latched))?;
                    odd = odd.and(scan.note(&mut lacks));
                    script.scans.push(scan);
                }
                _ => {}
            }
        }
        if strict {
            odd?;
        }
        let missing = |lacks: &[u8; 64]| lacks.iter().any(|lacks| *lacks > 0);
        if strict && lacks[..script.count].iter().any(missing) {
            let scans = script.scans.len();
            return Err(Error::decode(format!("{DAMAGED}: its {scans} scans leave out coefficients")));
        }
        Ok(script)
    }

    /// Maximum heap bytes of the engine for this picture, besides those of [`Header::engine_bytes`].
    pub(crate) fn engine_bytes(&self, header: &Header) -> u64 {
        let (h, v) = header.largest_factors();
        let across = u64::from(header.width.div_ceil(8 * h)) * u64::from(h);
        let blocks = across * u64::from(v) * self.count as u64;
        let scan = |scan: &OneScan<'_>| match scan.coding {
            Coding::Sequential => 4 * (DC_BYTES + AC_BYTES),
            Coding::DcFirst => 4 * DC_BYTES,
            Coding::DcRefine => 0,
            Coding::AcFirst | Coding::AcRefine => BAND_BYTES,
        };
        let scans: usize = self.scans.iter().map(scan).sum();
        blocks * (128 + 8) + scans as u64
    }

    pub(super) fn components(&self) -> &[Component] {
        &self.components[..self.count]
    }

    fn take_frame(&mut self, state: &Scan<'_>, header: &Header) -> Result<()> {
        (self.components, self.count) = (state.all_components(), header.components.into());
        let (h, v) = header.largest_factors();
        state.check_factors(|own| {
            let divides = h.is_multiple_of(own.h.max(1).into()) && v.is_multiple_of(own.v.max(1).into());
            divides && (1..=4).contains(&own.h) && (1..=4).contains(&own.v)
        })
    }

    /// Reads a scan header, and checks it as libjpeg-turbo does.
    fn scan(
        &self,
        header: &Header,
        (body, start): (&[u8], usize),
        state: &Scan<'a>,
        (restart, data): (u32, Range<usize>),
    ) -> Result<OneScan<'a>> {
        let wrong = |what: &str| Err(located(format!("JPEG with a scan {what}"), start));
        let Some((count, rest)) = body.split_first() else { return wrong("header without content") };
        let count = usize::from(*count);
        let Some((selectors, [first, last, bits])) = rest.split_at_checked(2 * count) else {
            return wrong("header that is cut");
        };
        let (high, low) = (bits >> 4, bits & 15);
        let coding = match (header.progressive, first, high) {
            (false, ..) => Coding::Sequential,
            (true, 0, 0) => Coding::DcFirst,
            (true, 0, _) => Coding::DcRefine,
            (true, _, 0) => Coding::AcFirst,
            (true, ..) => Coding::AcRefine,
        };
        let legal = match coding {
            Coding::Sequential => (*first, *last, *bits) == (0, 63, 0),
            Coding::DcFirst | Coding::DcRefine => *last == 0,
            Coding::AcFirst | Coding::AcRefine => first <= last && *last < 64 && count == 1,
        };
        if !legal || low > SHIFT_MAX || (high > 0 && high != low + 1) || !(1..=4).contains(&count) {
            return wrong(&format!("of {count} components, coefficients {first} to {last}, bits {high} and {low}"));
        }
        let mut parts = [Part::default(); 4];
        for (index, [name, tables]) in selectors.as_chunks::<2>().0.iter().enumerate() {
            let Some(component) = header.component(*name) else { return wrong("of a component that is not there") };
            if parts[..index].iter().any(|part| part.component == component) {
                return wrong("that has a component twice");
            }
            parts[index] = Part { component, dc: usize::from(tables >> 4), ac: usize::from(tables & 15) };
            let lacks = |used: bool, tables: &[Option<Table<'_>>; 4], number: usize| {
                used && tables.get(number).is_none_or(Option::is_none)
            };
            let (part, has_ac) = (parts[index], !matches!(coding, Coding::DcFirst | Coding::DcRefine));
            if lacks(coding.has_dc(), &state.dc, part.dc) || lacks(has_ac, &state.ac, part.ac) {
                return wrong(&format!("whose component {name} needs a Huffman table that is missing"));
            }
        }
        let blocks = |part: &Part| {
            let Factors { h, v } = self.components[part.component].factors;
            usize::from(h) * usize::from(v)
        };
        if count > 1 && parts[..count].iter().map(blocks).sum::<usize>() > BLOCKS_MAX {
            return wrong("of more than 10 blocks in an MCU");
        }
        let band = usize::from(*first)..usize::from(*last) + 1;
        let (dc, ac) = (state.dc, state.ac);
        Ok(OneScan { coding, parts, count, band, low: low.into(), dc, ac, restart, data })
    }

    /// A component has the quantisation table of its first scan.
    fn latch(
        &mut self,
        scan: &OneScan<'_>,
        state: &Scan<'_>,
        (have, latched): (&[bool; 4], &mut [bool; 4]),
    ) -> Result<()> {
        for part in scan.parts() {
            let quant = self.components[part.component].quant;
            if latched[part.component] {
                continue;
            }
            if !have.get(quant).is_some_and(|have| *have) {
                return Err(located("JPEG without a quantisation table that it names".into(), scan.data.start));
            }
            self.quants[part.component] = state.quants[quant];
            latched[part.component] = true;
        }
        Ok(())
    }
}

impl OneScan<'_> {
    fn parts(&self) -> &[Part] {
        &self.parts[..self.count]
    }

    /// Notes what is still lacking behind this scan. Errors: it refines bits that are not there, or codes what is there.
    fn note(&self, lacks: &mut Lacks) -> Result<()> {
        let refines = matches!(self.coding, Coding::DcRefine | Coding::AcRefine);
        for part in self.parts() {
            let lacks = &mut lacks[part.component];
            let expected = if refines { self.low as u8 + 1 } else { UNSEEN };
            let unready = self.band.start > 0 && lacks[0] == UNSEEN;
            // A sequential component may come again.
            let odd =
                self.coding != Coding::Sequential && lacks[self.band.clone()].iter().any(|lacks| *lacks != expected);
            if unready || odd {
                let message = format!("{DAMAGED}: a scan that does not follow the scans before it");
                return Err(located(message, self.data.start));
            }
            lacks[self.band.clone()].fill(self.low as u8);
        }
        Ok(())
    }
}

/// Offset of the first marker from `at` on that is no restart marker.
fn end_of_data(input: &[u8], at: usize) -> usize {
    let data = &input[at..];
    let ends = |found: &usize| !matches!(data.get(found + 1), Some(0 | 0xD0..=0xD7 | 0xFF));
    at + memchr::memchr_iter(0xFF, data).find(ends).unwrap_or(data.len())
}

fn located(message: String, offset: usize) -> Error {
    Error::decode(format!("{message}, at byte {offset} of the picture"))
}

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
        let (dc, ac) = (self.dc.iter().flatten().count(), self.ac.iter().flatten().count());
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
                Coding::DcRefine => {}
                Coding::AcFirst | Coding::AcRefine => KeptTable::update(&mut self.band, scan.ac[part.ac]),
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
    /// Those of the crop, row by row, in natural order.
    blocks: Vec<[i16; 64]>,
    /// Of each block of the row of MCUs: which coefficients are not zero, in the order of the file.
    filled: Vec<u64>,
    /// Blocks across that an MCU's scan has, and those that a scan of one component has.
    padded: u32,
    across: u32,
    down: u32,
    factors: Factors,
    columns: Range<u32>,
    /// Whether the row holds a part of the crop.
    needed: bool,
}

impl PlaneRow {
    /// Where block (x, y) of the row of MCUs is noted, and its coefficients, if it belongs to the crop.
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
    pub(super) fn start(&mut self, header: &Header, layout: &Layout) {
        let most = header.largest_factors();
        self.planes[layout.planes().len()..].iter_mut().for_each(|unused| *unused = PlaneRow::default());
        for (store, plane) in self.planes.iter_mut().zip(layout.planes()) {
            let (h, v) = (u32::from(plane.factors.h), u32::from(plane.factors.v));
            let most = if layout.planes().len() == 1 { (1, 1) } else { most };
            let blocks = |side: u32, own: u32, most: u32| (side * own).div_ceil(most).div_ceil(8);
            store.padded = layout.mcus.0 * h;
            (store.across, store.down) = (blocks(header.width, h, most.0), blocks(header.height, v, most.1));
            (store.factors, store.columns) = (plane.factors, plane.columns.clone());
            resize(&mut store.blocks, store.columns.len() * v as usize, [0; 64]);
            resize(&mut store.filled, (store.padded * v) as usize, 0);
        }
    }

    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        self.planes.iter().map(|plane| 128 * plane.blocks.capacity() + 8 * plane.filled.capacity()).sum()
    }

    /// Begins a row of MCUs, of which a crop needs the coefficients or not.
    fn begin(&mut self, needed: bool) {
        for plane in &mut self.planes {
            plane.filled.fill(0);
            if needed {
                plane.blocks.fill([0; 64]);
            }
            plane.needed = needed;
        }
    }

    /// Turns the row into samples.
    fn transform(&self, layout: &Layout, row: u32, quants: &[[u16; 64]; 4], rows: &mut Rows, kernels: &Kernels) {
        for (index, (store, plane)) in self.planes.iter().zip(layout.planes()).enumerate() {
            let v = u32::from(plane.factors.v);
            for below in (0..v).filter(|below| plane.rows.contains(&(row * v + below))) {
                store.transform((index, plane.block), (row * v + below, below), &quants[index], rows, kernels);
            }
        }
    }
}

impl PlaneRow {
    fn transform(
        &self,
        (component, size): (usize, u32),
        (y, below): (u32, u32),
        quant: &[u16; 64],
        rows: &mut Rows,
        kernels: &Kernels,
    ) {
        let mut waiting: Option<(u32, &[i16; 64])> = None;
        let blocks = &self.blocks[below as usize * self.columns.len()..];
        for (x, block) in self.columns.clone().zip(blocks) {
            if size == 1 {
                rows.store(component, (x, y), 1, &[[kernels::mean(block[0], quant[0]); 8]; 8]);
                continue;
            }
            let product = u32::from(block[0].unsigned_abs()) * u32::from(quant[0]);
            let only_dc = self.filled[(below * self.padded + x) as usize] >> 1 == 0;
            if only_dc && (size != 2 || product <= kernels::QUARTER_MAX) {
                rows.store(component, (x, y), size, &[[kernels::flat(block[0], quant[0]); 8]; 8]);
                continue;
            }
            let Some((before, first)) = waiting.take() else {
                waiting = Some((x, block));
                continue;
            };
            let samples = kernels.samples(size, [first, block], [quant; 2]);
            for (x, samples) in [before, x].into_iter().zip(&samples) {
                rows.store(component, (x, y), size, bytemuck::must_cast_ref(samples));
            }
        }
        if let Some((x, block)) = waiting {
            let samples = kernels.samples(size, [block; 2], [quant; 2]);
            rows.store(component, (x, y), size, bytemuck::must_cast_ref(&samples[0]));
        }
    }
}

/// Makes `to` as long as given. What it holds is of no importance.
fn resize<T: Clone>(to: &mut Vec<T>, len: usize, value: T) {
    if to.capacity() < len {
        // Freed first, because the old content is not needed.
        *to = Vec::new();
        to.reserve_exact(len);
    }
    to.resize(len, value);
}

/// The readers of all scans.
pub(super) struct Readers<'a> {
    script: &'a Script<'a>,
    readers: Vec<Reader<'a>>,
}

impl<'a> Readers<'a> {
    pub(super) fn new(picture: Input<'a>, script: &'a Script<'a>, tables: &'a mut Vec<ScanTables>) -> Self {
        if tables.len() < script.scans.len() {
            tables.resize_with(script.scans.len(), ScanTables::default);
        }
        tables.iter_mut().zip(&script.scans).for_each(|(tables, scan)| tables.update(scan));
        let readers = script.scans.iter().zip(&*tables).enumerate();
        let reader = |(number, (scan, tables))| Reader::new(picture, script, (number, scan), tables);
        Self { script, readers: readers.map(reader).collect() }
    }

    /// Reads a row of MCUs, and turns it into samples if it is `needed`.
    pub(super) fn row(
        &mut self,
        layout: &Layout,
        (row, needed): (u32, bool),
        to: &mut Coefficients,
        (rows, kernels): (&mut Rows, &Kernels),
    ) -> Result<()> {
        to.begin(needed);
        self.readers.iter_mut().try_for_each(|reader| reader.row(row, to))?;
        if needed {
            to.transform(layout, row, &self.script.quants, rows, kernels);
        }
        Ok(())
    }

    /// Checks the ends of all scans, if they were read so far.
    pub(super) fn finish(&self) -> Result<()> {
        self.readers.iter().filter(|reader| reader.mcu == reader.total).try_for_each(Reader::finish)
    }
}

/// A scan being read.
struct Reader<'a> {
    scan: &'a OneScan<'a>,
    tables: &'a ScanTables,
    number: usize,
    input: &'a [u8],
    strict: bool,
    bits: Bits<'a>,
    predictors: [i32; 4],
    /// Blocks that end without a code of their own.
    ended: u32,
    /// The next MCU; the end of its restart interval; all of them.
    mcu: u32,
    stop: u32,
    total: u32,
    /// The rest of the interval is damaged.
    broken: bool,
}

impl<'a> Reader<'a> {
    fn new(
        picture: Input<'a>,
        script: &Script<'_>,
        (number, scan): (usize, &'a OneScan<'a>),
        tables: &'a ScanTables,
    ) -> Self {
        let Input { bytes: input, header, strict } = picture;
        let total = match scan.parts() {
            [part] => {
                let (most, own) = (header.largest_factors(), script.components[part.component].factors);
                let blocks = |side: u32, own: u8, most: u32| (side * u32::from(own)).div_ceil(most).div_ceil(8);
                blocks(header.width, own.h, most.0) * blocks(header.height, own.v, most.1)
            }
            _ => header.mcus(),
        };
        let stop = if scan.restart == 0 { total } else { scan.restart.min(total) };
        let bits = Bits::new(input, Place { byte: scan.data.start, bit: 0 });
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
        }
    }

    /// Reads a row of MCUs.
    fn row(&mut self, row: u32, to: &mut Coefficients) -> Result<()> {
        let (low, band) = (self.scan.low, self.scan.band.clone());
        let part = self.scan.parts[0];
        match (self.scan.coding, &self.tables.band) {
            (Coding::Sequential, _) => self.blocks(row, to, |reader, bits, part, (filled, block)| {
                let (Some(dc), Some(ac)) = (&reader.tables.dc[part.dc], &reader.tables.ac[part.ac]) else {
                    return Err(Fault::Code);
                };
                let predictor = &mut reader.predictors[part.component];
                *predictor = predictor.wrapping_add(dc.table.read(bits)?);
                let Some(block) = block else { return ac.table.skip(bits) };
                block[0] = *predictor as i16;
                // Not exactly those that are not zero, but no scan refines these.
                *filled |= if ac.table.read(bits, block)? > 1 { 2 } else { 0 };
                Ok(())
            }),
            (Coding::DcFirst, _) => self.blocks(row, to, |reader, bits, part, (_, block)| {
                let Some(dc) = &reader.tables.dc[part.dc] else { return Err(Fault::Code) };
                let predictor = &mut reader.predictors[part.component];
                *predictor = predictor.wrapping_add(dc.table.read(bits)?);
                if let Some(block) = block {
                    block[0] = predictor.wrapping_shl(low) as i16;
                }
                Ok(())
            }),
            (Coding::DcRefine, _) => self.blocks(row, to, |_, bits, _, (_, block)| {
                bits.refill();
                let bit = bits.take(1) as i16;
                if let Some(block) = block {
                    block[0] |= bit << low;
                }
                Ok(())
            }),
            (Coding::AcFirst, Some(table)) => self.blocks_of(part, row, to, |reader, bits, (filled, block)| {
                reader.ended = ac_first(&table.table, bits, (band.clone(), low), reader.ended, (filled, block))?;
                Ok(())
            }),
            (Coding::AcRefine, Some(table)) => self.blocks_of(part, row, to, |reader, bits, (filled, block)| {
                reader.ended = ac_refine(&table.table, bits, (band.clone(), low), reader.ended, (filled, block))?;
                Ok(())
            }),
            _ => Err(Error::decode("JPEG without a Huffman table that it names")),
        }
    }

    /// Reads the blocks of a row of MCUs of a scan that may have several components.
    #[inline(always)]
    fn blocks(
        &mut self,
        row: u32,
        to: &mut Coefficients,
        mut read: impl FnMut(&mut Self, &mut Bits<'a>, Part, (&mut u64, Option<&mut [i16; 64]>)) -> Result<(), Fault>,
    ) -> Result<()> {
        let scan = self.scan;
        if let [part] = scan.parts() {
            return self.blocks_of(*part, row, to, |reader, bits, block| read(reader, bits, *part, block));
        }
        let first = &to.planes[scan.parts[0].component];
        for column in 0..first.padded / u32::from(first.factors.h) {
            if !self.begin()? {
                continue;
            }
            let mut bits = self.bits.clone();
            let done = scan.parts().iter().try_for_each(|part| {
                let plane = &mut to.planes[part.component];
                let (h, v) = (u32::from(plane.factors.h), u32::from(plane.factors.v));
                (0..v).try_for_each(|y| {
                    (0..h).try_for_each(|x| read(self, &mut bits, *part, plane.block(column * h + x, y)))
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
        part: Part,
        row: u32,
        to: &mut Coefficients,
        mut read: impl FnMut(&mut Self, &mut Bits<'a>, (&mut u64, Option<&mut [i16; 64]>)) -> Result<(), Fault>,
    ) -> Result<()> {
        let plane = &mut to.planes[part.component];
        let (v, down, across) = (u32::from(plane.factors.v), plane.down, plane.across);
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

    /// Begins an MCU; `false` if it is to be left as it is.
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
            Ok(()) if !self.bits.overrun() => Ok(()),
            Ok(()) => self.fault(Fault::End),
            Err(fault) => self.fault(fault),
        }
    }

    #[cold]
    fn fault(&mut self, fault: Fault) -> Result<()> {
        let fault = if self.bits.overrun() { Fault::End } else { fault };
        if !self.strict {
            self.broken = true;
            return Ok(());
        }
        let (what, scan, mcu, total) = (fault.words(), self.number + 1, self.mcu - 1, self.total);
        Err(located(format!("{DAMAGED}: {what}, in MCU {mcu} of {total} of scan {scan}"), self.bits.place().byte))
    }

    /// Goes on behind the next restart marker.
    #[cold]
    fn restart(&mut self) -> Result<()> {
        self.check_end()?;
        let number = (self.mcu / self.scan.restart + 7) % 8;
        let marker = self.bits.end().and_then(|end| Segment::next(self.input, end).ok());
        let found = marker.filter(|marker| matches!(marker.marker, 0xD0..=0xD7) && marker.end <= self.scan.data.end);
        let right = found.is_some_and(|found| u32::from(found.marker & 7) == number);
        if self.strict && !right {
            let message = format!("{DAMAGED}: restart marker {number} is missing in scan {}", self.number + 1);
            return Err(located(message, self.bits.place().byte));
        }
        (self.broken, self.ended, self.predictors) = (found.is_none(), 0, [0; 4]);
        if let Some(found) = found {
            self.bits = Bits::new(self.input, Place { byte: found.end, bit: 0 });
        }
        // Without one, nothing further on has one.
        self.stop = if self.broken { self.total } else { (self.mcu + self.scan.restart).min(self.total) };
        Ok(())
    }

    /// Checks the end of a scan.
    fn finish(&self) -> Result<()> {
        self.check_end()?;
        let (end, data) = (self.bits.end().unwrap_or(self.input.len()), self.scan.data.end);
        // Some cameras write a restart marker behind the last interval, too.
        if self.strict && !self.broken && end + 2 < data {
            let message = format!("{DAMAGED}: a restart marker more than scan {} has intervals", self.number + 1);
            return Err(located(message, end));
        }
        Ok(())
    }

    /// Checks that the data end with the interval.
    fn check_end(&self) -> Result<()> {
        if self.broken || !self.strict {
            return Ok(());
        }
        let next = self.bits.next_byte();
        let left = self.bits.end().unwrap_or(self.input.len()) - next;
        if left > SURPLUS {
            let message =
                format!("{DAMAGED}: {left} bytes of data are left after MCU {} of scan {}", self.mcu, self.number + 1);
            return Err(located(message, next));
        }
        Ok(())
    }
}

/// First bits of AC coefficients (G.1.2.2). Takes and gives the number of blocks that end without a code.
#[inline(always)]
fn ac_first(
    table: &Band,
    bits: &mut Bits<'_>,
    (band, low): (Range<usize>, u32),
    ended: u32,
    (filled, mut block): (&mut u64, Option<&mut [i16; 64]>),
) -> Result<u32, Fault> {
    if ended > 0 {
        return Ok(ended - 1);
    }
    let mut next = band.start;
    while next < band.end {
        let (run, value) = table.read(bits)?;
        next += run as usize;
        if value == 0 {
            if run < 15 {
                return Ok((1 << run) - 1 + bits.take(run));
            }
            next += 1;
            continue;
        }
        if next >= band.end {
            return Err(Fault::Long);
        }
        let value = (value << low) as i16;
        *filled |= u64::from(value != 0) << next;
        if let Some(block) = &mut block {
            block[usize::from(ZIGZAG[next])] = value;
        }
        next += 1;
    }
    Ok(0)
}

/// One more bit of AC coefficients (G.1.2.3). Takes and gives the number of blocks without a code for new coefficients.
#[inline(always)]
fn ac_refine(
    table: &Band,
    bits: &mut Bits<'_>,
    (band, low): (Range<usize>, u32),
    mut ended: u32,
    (filled, mut block): (&mut u64, Option<&mut [i16; 64]>),
) -> Result<u32, Fault> {
    let old = *filled;
    let mut next = band.start;
    while ended == 0 && next < band.end {
        let (run, value) = table.read(bits)?;
        if value == 0 && run < 15 {
            ended = (1 << run) + bits.take(run);
            break;
        }
        if !(-1..=1).contains(&value) {
            return Err(Fault::Code);
        }
        // The place of the zero behind `run` others.
        let mut zeros = !old & (u64::MAX << next);
        for _ in 0..run {
            zeros &= zeros.wrapping_sub(1);
        }
        let place = (zeros.trailing_zeros() as usize).min(band.end);
        refine(bits, old, next..place, low, block.as_deref_mut());
        if value != 0 {
            if place == band.end {
                return Err(Fault::Long);
            }
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

/// Reads a bit for each of these coefficients that is `old`.
#[inline(always)]
fn refine(bits: &mut Bits<'_>, old: u64, range: Range<usize>, low: u32, block: Option<&mut [i16; 64]>) {
    if range.is_empty() {
        return;
    }
    let mut places = old & (u64::MAX << range.start) & (u64::MAX >> (64 - range.end));
    if places == 0 {
        return;
    }
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
        if bits.take(1) > 0 && *value & bit == 0 {
            *value = value.wrapping_add(if *value < 0 { -bit } else { bit });
        }
    }
}
