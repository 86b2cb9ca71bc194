//! The scans of a picture of several: any order, bands, bits, interleaving and restart intervals,
//! and any codes in them.

use super::{Bits, Codes, Frame, Heat, Part, Source, Tables, segment};

/// Scans that may leave a part of a band to others.
const SPLIT: usize = 12;

/// Bits that a coefficient lacks before its first scan.
const UNSEEN: u8 = u8::MAX;

/// A component: its blocks and what its coefficients still lack.
struct Plane {
    part: Part,
    lacks: [u8; 64],
    /// Of each block, with those of an MCU's padding: which coefficients are not zero.
    filled: Vec<u64>,
    padded: usize,
    across: usize,
    down: usize,
}

/// Coefficients `start..end`, from bit `low` on; the first bits, or one more.
struct Scan {
    start: usize,
    end: usize,
    low: u8,
    first: bool,
    /// Blocks left in the restart interval; blocks that end without a code.
    left: usize,
    ended: usize,
}

/// Writes all scans of a progressive picture.
pub(super) fn write(
    frame: &Frame,
    (tables, heat): (&[Tables], &Heat),
    source: &mut Source<'_>,
    out: &mut Vec<u8>,
) {
    let most = |side: fn(&Part) -> u8| usize::from(frame.parts.iter().map(side).max().unwrap_or(1));
    let h = most(|part| part.h);
    let v = most(|part| part.v);
    let width = usize::from(frame.width);
    let height = usize::from(frame.height);
    let mcus = (width.div_ceil(8 * h), height.div_ceil(8 * v));
    let plane = |part: &Part| {
        let own_h = usize::from(part.h);
        let own_v = usize::from(part.v);
        let padded = mcus.0 * own_h;
        let across = (width * own_h).div_ceil(h).div_ceil(8);
        let down = (height * own_v).div_ceil(v).div_ceil(8);
        Plane {
            part: *part,
            lacks: [UNSEEN; 64],
            filled: vec![0; padded * mcus.1 * own_v],
            padded,
            across,
            down,
        }
    };
    let mut planes: Vec<_> = frame.parts.iter().map(plane).collect();
    let mut restart = frame.restart;
    for number in 0.. {
        let Some((which, mut scan)) = draw(&planes, number, source) else {
            return;
        };
        if source.below(8) == 0 {
            restart = source.below(40) as u16;
            segment(0xDD, &restart.to_be_bytes(), out);
        }
        let selectors = which
            .iter()
            .flat_map(|index| [planes[*index].part.id, (index << 4 | index) as u8]);
        let bits = if scan.first {
            scan.low
        } else {
            (scan.low + 1) << 4 | scan.low
        };
        let band = [scan.start as u8, scan.end as u8 - 1, bits];
        segment(
            0xDA,
            &std::iter::once(which.len() as u8)
                .chain(selectors)
                .chain(band)
                .collect::<Vec<_>>(),
            out,
        );
        let mut bits = Bits {
            out,
            word: 0,
            count: 0,
        };
        let alone = which.len() == 1;
        let all = if alone {
            planes[which[0]].across * planes[which[0]].down
        } else {
            mcus.0 * mcus.1
        };
        let mut predictors = [0; 4];
        for mcu in 0..all {
            let interval = if restart == 0 { all } else { restart.into() };
            if mcu > 0 && mcu % interval == 0 {
                bits.flush();
                predictors = [0; 4];
                bits.out
                    .extend([0xFF, 0xD0 + ((mcu / interval - 1) % 8) as u8]);
            }
            scan.left = (interval - mcu % interval).min(all - mcu);
            for index in &which {
                let plane = &mut planes[*index];
                let (h, v) = if alone {
                    (1, 1)
                } else {
                    (plane.part.h.into(), plane.part.v.into())
                };
                let across = if alone { plane.across } else { mcus.0 };
                for (y, x) in (0..v).flat_map(|y| (0..h).map(move |x| (y, x))) {
                    let at = (mcu / across * v + y) * plane.padded + mcu % across * h + x;
                    let coded = (
                        &tables[*index],
                        &mut predictors[*index],
                        &mut plane.filled[at],
                    );
                    scan.write_block(coded, heat, source, &mut bits);
                }
            }
        }
        bits.flush();
        which
            .iter()
            .for_each(|index| planes[*index].lacks[scan.start..scan.end].fill(scan.low));
    }
}

/// The next scan, and its components; nothing if all bits are there.
fn draw(planes: &[Plane], number: usize, source: &mut Source<'_>) -> Option<(Vec<usize>, Scan)> {
    let open: Vec<_> = (0..planes.len())
        .filter(|index| planes[*index].lacks.iter().any(|lacks| *lacks > 0))
        .collect();
    let index = open[source
        .below(open.len().max(1))
        .min(open.len().checked_sub(1)?)];
    let lacks = &planes[index].lacks;
    let missing: Vec<_> = (1..64).filter(|k| lacks[*k] > 0).collect();
    let dc = lacks[0] == UNSEEN || missing.is_empty() || (lacks[0] > 0 && source.below(2) == 0);
    let start = if dc {
        0
    } else {
        missing[if number < SPLIT {
            source.below(missing.len())
        } else {
            0
        }]
    };
    let longest = if dc {
        1
    } else {
        lacks[start..]
            .iter()
            .take_while(|other| **other == lacks[start])
            .count()
    };
    let len = if number < SPLIT && source.below(2) == 0 {
        1 + source.below(longest)
    } else {
        longest
    };
    let first = lacks[start] == UNSEEN;
    let low = if first {
        [0, 1, 2, 0][source.below(4)]
    } else {
        lacks[start] - 1
    };
    let mut which = vec![index];
    if dc && source.below(4) > 0 {
        which = (0..planes.len())
            .filter(|other| planes[*other].lacks[0] == lacks[0])
            .collect();
        let blocks = which
            .iter()
            .map(|other| planes[*other].part.h * planes[*other].part.v)
            .sum::<u8>();
        which.truncate(if blocks > 10 { 1 } else { 4 });
    }
    Some((
        which,
        Scan {
            start,
            end: start + len,
            low,
            first,
            left: 0,
            ended: 0,
        },
    ))
}

impl Scan {
    fn write_block(
        &mut self,
        (tables, predictor, filled): (&Tables, &mut i32, &mut u64),
        heat: &Heat,
        source: &mut Source<'_>,
        bits: &mut Bits<'_>,
    ) {
        match (self.start, self.first) {
            (0, true) => heat.write_dc((&tables.dc, predictor), source, bits),
            (0, false) => bits.push(source.byte().into(), 1),
            _ => self.write_band((&tables.band, filled), heat, source, bits),
        }
    }

    /// AC coefficients: (run, value) pairs, as a decoder counts them, with a bit for each that is
    /// there before a refinement.
    fn write_band(
        &mut self,
        (codes, filled): (&Codes, &mut u64),
        heat: &Heat,
        source: &mut Source<'_>,
        bits: &mut Bits<'_>,
    ) {
        let old = if self.first { 0 } else { *filled };
        let mut next = self.start;
        let refine = |from: usize, to: usize, source: &mut Source<'_>, bits: &mut Bits<'_>| {
            (from..to)
                .filter(|k| old >> k & 1 > 0)
                .for_each(|_| bits.push(source.byte().into(), 1));
        };
        while self.ended == 0 && next < self.end {
            let kind = source.byte();
            let run = source.below(heat.run + 1);
            let run = if kind == 255 { 15 } else { run };
            let place = (next..self.end).filter(|k| old >> k & 1 == 0).nth(run);
            if kind < heat.last || place.is_none() {
                self.end_block(codes, source, bits);
                break;
            }
            let place = place.unwrap_or(self.end);
            let size = if kind == 255 {
                0
            } else {
                1 + if self.first { source.below(heat.ac) } else { 0 }
            };
            codes.write((run << 4 | size) as u8, bits);
            bits.push(source.word().into(), size);
            refine(next, place, source, bits);
            *filled |= u64::from(size > 0) << place;
            next = place + 1;
        }
        if self.ended > 0 {
            refine(next, self.end, source, bits);
            self.ended -= 1;
        }
    }

    /// Ends this block, and perhaps others behind it.
    fn end_block(&mut self, codes: &Codes, source: &mut Source<'_>, bits: &mut Bits<'_>) {
        let size = source.below(15).min(self.left.ilog2() as usize);
        let more = usize::from(source.word()) % (1 << size);
        let more = more.min(self.left - (1 << size));
        codes.write((size << 4) as u8, bits);
        bits.push(more, size);
        self.ended = (1 << size) + more;
    }
}
