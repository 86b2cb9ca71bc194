//! The scans of a picture that has several. Scan headers are checked as in libjpeg-turbo.
//!
//! Invariants: the tables that a scan names exist; a band is within a block; an MCU has at most 10
//! blocks.

use super::header::{
    BLOCKS_MAX, Component, Factors, Header, Input, Scan, Segment, restart_interval,
};
use super::huffman::{Ac, Band, Dc, HuffmanTable, ZIGZAG};
use super::walk::KeptTable;
use crate::error::{Error, ErrorKind, Result};
use std::ops::Range;

/// Largest number of low bits that a scan may leave to later scans, as in libjpeg-turbo.
const SHIFT_MAX: u8 = 13;

/// Heap bytes of one table, including its symbols.
pub(super) const DC_BYTES: usize = size_of::<KeptTable<Dc>>() + 256;
pub(super) const AC_BYTES: usize = size_of::<KeptTable<Ac>>() + 256;
pub(super) const BAND_BYTES: usize = size_of::<KeptTable<Band>>() + 256;

/// The scans of a picture, in the order of the file.
pub(super) struct Script<'a> {
    pub(super) components: [Component; 4],
    count: usize,
    /// Quantisation table of each component, in natural order.
    pub(super) quants: [[u16; 64]; 4],
    pub(super) scans: Vec<OneScan<'a>>,
    /// How many bits each coefficient of an incomplete picture lacks, if missing coefficients are
    /// estimated.
    pub(super) lacks: Option<Estimated>,
}

/// A scan of a script.
pub(super) struct OneScan<'a> {
    pub(super) coding: Coding,
    /// Components in the order of an MCU, with the numbers of their tables.
    pub(super) parts: [ScanPart; 4],
    count: usize,
    /// Range of coefficients, in the order of the file.
    pub(super) band: Range<usize>,
    /// Number of low bits that later scans add.
    pub(super) low: u32,
    pub(super) dc: [Option<HuffmanTable<'a>>; 4],
    pub(super) ac: [Option<HuffmanTable<'a>>; 4],
    /// MCUs between restart markers; 0 without them.
    pub(super) restart: u32,
    /// Byte range of the coded data in the picture.
    pub(super) data: Range<usize>,
}

#[derive(Clone, Copy, Default)]
pub(super) struct ScanPart {
    pub(super) component: usize,
    pub(super) dc: usize,
    pub(super) ac: usize,
}

/// The coding procedures of the standard, annexes F and G.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
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
pub(super) const UNSEEN: u8 = u8::MAX;

/// How many low bits each of the first 10 coefficients lacks: in the picture, and in the part of it
/// that the last scan does not reach.
pub(super) type Estimated = [[[u8; 10]; 4]; 2];

impl<'a> Script<'a> {
    /// Finds the scans of a picture.
    ///
    /// Errors: more scans than `most`; scans that no decoder accepts; if `strict`, scans that leave
    /// out coefficients.
    pub(crate) fn parse(picture: Input<'a>, most: u32) -> Result<Self> {
        let Input {
            bytes: input,
            header,
            strict,
        } = picture;
        if strict {
            header.end_marker(input)?;
        }
        let mut state = Scan::empty(header);
        let mut script = Self {
            components: [Component::default(); 4],
            count: 0,
            quants: [[0; 64]; 4],
            scans: Vec::new(),
            lacks: None,
        };
        let mut at = 2;
        let mut restart = 0;
        let mut have = [false; 4];
        let mut latched = [false; 4];
        let mut lacks = [[UNSEEN; 64]; 4];
        let mut before = lacks;
        let mut odd = Ok(());
        loop {
            let segment = match Segment::next(input, at) {
                Ok(segment) if segment.marker != 0xD9 => segment,
                Err(error) if strict || script.scans.is_empty() => return Err(error),
                // A strict decode has already found the end marker.
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
                0xC0..=0xC2 => return Err(Error::invalid("JPEG with a second frame header")),
                0xC4 => state.read_huffman(body, start)?,
                0xDB => state.read_quants(body, start, &mut have)?,
                0xDD => restart = restart_interval(body)?,
                0xDA => {
                    if script.scans.len() == most as usize {
                        let message =
                            format!("JPEG of more than {most} scans; the limit is {most}");
                        return Err(Error::new(ErrorKind::Limit, message));
                    }
                    let data = end..end_of_data(picture, end);
                    at = data.end;
                    let scan = script.scan(picture, body, start, &state, restart, data)?;
                    script.latch(&scan, &state, &have, &mut latched)?;
                    for part in scan.parts() {
                        before[part.component] = if script.scans.is_empty() {
                            [0; 64]
                        } else {
                            lacks[part.component]
                        };
                    }
                    odd = odd.and(scan.note(&mut lacks));
                    script.scans.push(scan);
                }
                _ => {}
            }
        }
        if strict {
            odd?;
        }
        if strict
            && lacks[..script.count]
                .iter()
                .any(|lacks| lacks.iter().any(|lacks| *lacks > 0))
        {
            let scans = script.scans.len();
            return Err(Error::damaged(format!(
                "its {scans} scans leave out coefficients"
            )));
        }
        if header.progressive && !strict {
            script.find_estimated(&lacks, &before);
        }
        Ok(script)
    }

    /// Finds the coefficients to estimate, as in libjpeg-turbo, if each component has DC
    /// coefficients.
    fn find_estimated(&mut self, lacks: &Lacks, before: &Lacks) {
        let parts = 0..self.count;
        let complete = parts
            .clone()
            .all(|part| lacks[part][1..10].iter().all(|lacks| *lacks == 0));
        let lacks_steps = parts.clone().any(|part| {
            lacks[part][0] == UNSEEN
                || ZIGZAG[..10]
                    .iter()
                    .any(|k| self.quants[part][usize::from(*k)] == 0)
        });
        if complete || lacks_steps {
            return;
        }
        let first =
            |lacks: &Lacks| std::array::from_fn(|part| std::array::from_fn(|k| lacks[part][k]));
        let before = if self.scans.len() == 1 {
            &[[UNSEEN; 64]; 4]
        } else {
            before
        };
        self.lacks = Some([first(lacks), first(before)]);
    }

    /// Maximum heap bytes of the engine for this picture, besides those of
    /// [`Header::engine_bytes`].
    pub(crate) fn engine_bytes(&self, header: &Header) -> u64 {
        let (h, v) = header.largest_factors();
        let across = u64::from(header.width.div_ceil(8 * h)) * u64::from(h);
        let blocks = across * u64::from(v) * self.count as u64;
        let scans: usize = self
            .scans
            .iter()
            .map(|scan| match scan.coding {
                Coding::Sequential => 4 * (DC_BYTES + AC_BYTES),
                Coding::DcFirst => 4 * DC_BYTES,
                Coding::DcRefine => 0,
                Coding::AcFirst | Coding::AcRefine => BAND_BYTES,
            })
            .sum();
        let mcus = across / u64::from(h) * u64::from(header.height.div_ceil(8 * v));
        let all: u64 = mcus
            * header
                .factors()
                .iter()
                .map(|factors| u64::from(factors.h) * u64::from(factors.v))
                .sum::<u64>();
        // Smoothing keeps all DC coefficients of an incomplete picture, 2 bytes each.
        let smoothing = if self.lacks.is_some() { 2 * all } else { 0 };
        blocks * (128 + 8) + scans as u64 + smoothing
    }

    pub(super) fn components(&self) -> &[Component] {
        &self.components[..self.count]
    }

    fn take_frame(&mut self, state: &Scan<'_>, header: &Header) -> Result<()> {
        self.components = state.components;
        self.count = header.components.into();
        let (h, v) = header.largest_factors();
        state.check_factors(|own| {
            let divides =
                h.is_multiple_of(own.h.max(1).into()) && v.is_multiple_of(own.v.max(1).into());
            divides && (1..=4).contains(&own.h) && (1..=4).contains(&own.v)
        })
    }

    /// Reads a scan header, and checks it as in libjpeg-turbo.
    fn scan(
        &self,
        Input { header, strict, .. }: Input<'_>,
        body: &[u8],
        start: usize,
        state: &Scan<'a>,
        restart: u32,
        data: Range<usize>,
    ) -> Result<OneScan<'a>> {
        let wrong = |what: &str| Err(Error::invalid(format!("JPEG with a scan {what}")).at(start));
        let Some((count, rest)) = body.split_first() else {
            return wrong("header without content");
        };
        let count = usize::from(*count);
        let Some((selectors, [first, last, bits])) = rest.split_at_checked(2 * count) else {
            return wrong("header that is cut");
        };
        // libjpeg-turbo warns about another band in a sequential scan, and decodes all
        // coefficients.
        let (first, last, bits) = if header.progressive || strict {
            (first, last, bits)
        } else {
            (&0, &63, &0)
        };
        let high = bits >> 4;
        let low = bits & 15;
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
            return wrong(&format!(
                "of {count} components, coefficients {first} to {last}, bits {high} and {low}"
            ));
        }
        let mut parts = [ScanPart::default(); 4];
        for (index, [name, tables]) in selectors.as_chunks::<2>().0.iter().enumerate() {
            let Some(component) = header.component(*name) else {
                return wrong("of a component that is not there");
            };
            if parts[..index]
                .iter()
                .any(|part| part.component == component)
            {
                return wrong("that has a component twice");
            }
            parts[index] = ScanPart {
                component,
                dc: usize::from(tables >> 4),
                ac: usize::from(tables & 15),
            };
            let lacks = |used: bool, tables: &[Option<HuffmanTable<'_>>; 4], number: usize| {
                used && tables.get(number).is_none_or(Option::is_none)
            };
            let part = parts[index];
            let has_ac = !matches!(coding, Coding::DcFirst | Coding::DcRefine);
            if lacks(coding.has_dc(), &state.dc, part.dc) || lacks(has_ac, &state.ac, part.ac) {
                return wrong(&format!(
                    "whose component {name} needs a Huffman table that is missing"
                ));
            }
        }
        let blocks = |part: &ScanPart| {
            let Factors { h, v } = self.components[part.component].factors;
            usize::from(h) * usize::from(v)
        };
        if count > 1 && parts[..count].iter().map(blocks).sum::<usize>() > BLOCKS_MAX {
            return wrong("of more than 10 blocks in an MCU");
        }
        let band = usize::from(*first)..usize::from(*last) + 1;
        let dc = state.dc;
        let ac = state.ac;
        Ok(OneScan {
            coding,
            parts,
            count,
            band,
            low: low.into(),
            dc,
            ac,
            restart,
            data,
        })
    }

    /// Stores the quantisation table of each component at its first scan.
    fn latch(
        &mut self,
        scan: &OneScan<'_>,
        state: &Scan<'_>,
        have: &[bool; 4],
        latched: &mut [bool; 4],
    ) -> Result<()> {
        for part in scan.parts() {
            let quant = self.components[part.component].quant;
            if latched[part.component] {
                continue;
            }
            if !have.get(quant).is_some_and(|have| *have) {
                let message = "the JPEG uses a quantisation table that it does not define";
                return Err(Error::invalid(message).at(scan.data.start));
            }
            self.quants[part.component] = state.quants[quant];
            latched[part.component] = true;
        }
        Ok(())
    }
}

impl OneScan<'_> {
    pub(super) fn parts(&self) -> &[ScanPart] {
        &self.parts[..self.count]
    }

    /// Notes the bits that are still missing after this scan. Errors: the scan needs coefficients
    /// that no earlier scan has, or repeats coefficients.
    fn note(&self, lacks: &mut Lacks) -> Result<()> {
        let refines = matches!(self.coding, Coding::DcRefine | Coding::AcRefine);
        let mut done = Ok(());
        for part in self.parts() {
            let lacks = &mut lacks[part.component];
            let expected = if refines { self.low as u8 + 1 } else { UNSEEN };
            let unready = self.band.start > 0 && lacks[0] == UNSEEN;
            // A sequential component may be coded again.
            let odd = self.coding != Coding::Sequential
                && lacks[self.band.clone()]
                    .iter()
                    .any(|lacks| *lacks != expected);
            if unready || odd {
                let what = if refines || unready {
                    "needs coefficients that no earlier scan has"
                } else {
                    "repeats coefficients"
                };
                done = Err(Error::damaged(format!("a scan {what}")).at(self.data.start));
            }
            lacks[self.band.clone()].fill(self.low as u8);
        }
        done
    }
}

/// Offset of the first marker from `at` on that is not a restart marker. If decoding is not strict,
/// an undefined marker counts as damage within the data, which continue after it.
fn end_of_data(picture: Input<'_>, at: usize) -> usize {
    let data = &picture.bytes[at..];
    at + memchr::memchr_iter(0xFF, data)
        .find(|found| match data.get(found + 1) {
            Some(0 | 0xD0..=0xD7 | 0xFF) => false,
            Some(marker) => picture.strict || *marker >= 0xC0,
            None => true,
        })
        .unwrap_or(data.len())
}
