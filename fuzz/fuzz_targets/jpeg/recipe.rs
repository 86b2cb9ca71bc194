//! JPEGs that no encoder writes: any factors, coefficients, scans, quantisation and Huffman tables
//! that the format has.

#[path = "script.rs"]
mod script;

/// A picture.
pub struct Made {
    pub picture: Vec<u8>,
    /// Not damaged.
    pub intact: bool,
}

/// The picture that these bytes describe: sizes, tables, coefficients.
pub fn picture(bytes: &[u8]) -> Made {
    let mut source = Source::new(bytes);
    let damaged = source.below(8) == 0;
    let heat = Heat::draw(&mut source);
    let frame = Frame::draw(&mut source);
    let mut out = vec![0xFF, 0xD8];
    frame.write_marks(&mut source, &mut out);
    for index in 0..frame.parts.len() {
        heat.write_quants(index as u8, &mut source, &mut out);
    }
    frame.write_header(&mut source, &mut out);
    let tables: Vec<_> = frame
        .parts
        .iter()
        .map(|_| Tables::draw(&heat, &mut source))
        .collect();
    for (index, Tables { dc, ac, band }) in tables.iter().enumerate() {
        segment(0xC4, &dc.body(index as u8), &mut out);
        segment(
            0xC4,
            &if frame.progressive { band } else { ac }.body(0x10 | index as u8),
            &mut out,
        );
    }
    if frame.progressive {
        script::write(&frame, (&tables, &heat), &mut source, &mut out);
    } else {
        let all: Vec<_> = (0..frame.parts.len()).collect();
        let first = if source.below(3) == 0 {
            1 + source.below(all.len())
        } else {
            all.len()
        };
        for which in [&all[..first], &all[first..]]
            .into_iter()
            .filter(|which| !which.is_empty())
        {
            frame.write_scan(which, (&tables, &heat), &mut source, &mut out);
        }
    }
    out.extend([0xFF, 0xD9]);
    for _ in 0..if damaged { 1 + source.below(3) } else { 0 } {
        let at = source.below(out.len());
        out[at] = source.byte();
    }
    Made {
        picture: out,
        intact: !damaged,
    }
}

fn segment(marker: u8, body: &[u8], out: &mut Vec<u8>) {
    out.extend([0xFF, marker]);
    out.extend((body.len() as u16 + 2).to_be_bytes());
    out.extend(body);
}

/// The input's bytes, then those of a generator that they seed.
struct Source<'a> {
    bytes: &'a [u8],
    state: u64,
}

impl<'a> Source<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            state: bytes.iter().fold(1, |state, byte| {
                (state ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)
            }),
        }
    }

    fn byte(&mut self) -> u8 {
        if let Some((byte, rest)) = self.bytes.split_first() {
            self.bytes = rest;
            return *byte;
        }
        self.state = self
            .state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.state >> 56) as u8
    }

    fn word(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn below(&mut self, count: usize) -> usize {
        let drawn = if count > 256 {
            self.word().into()
        } else {
            usize::from(self.byte())
        };
        drawn % count
    }
}

struct Frame {
    width: u16,
    height: u16,
    parts: Vec<Part>,
    /// MCUs between restart markers, or 0.
    restart: u16,
    progressive: bool,
}

/// A component: its factors across and down.
#[derive(Clone, Copy)]
struct Part {
    id: u8,
    h: u8,
    v: u8,
}

impl Frame {
    fn draw(source: &mut Source<'_>) -> Self {
        // Multiples of 8 are compared at a part of the size, too.
        let step = [1, 8][source.below(2)];
        let mut side = || step * (1 + source.below(200 / usize::from(step)) as u16);
        let width = side();
        let height = side();
        let count = [3, 1, 3, 4][source.below(4)];
        let ids = if source.below(4) == 0 {
            *b"RGBA"
        } else {
            [1, 2, 3, 4]
        };
        let usual = source.below(4) > 0;
        let mut parts: Vec<_> = ids[..count]
            .iter()
            .map(|id| Part {
                id: *id,
                h: 1,
                v: 1,
            })
            .collect();
        for part in &mut parts[..if usual { 1 } else { count }] {
            part.h = 1 + source.below(4) as u8;
            part.v = 1 + source.below(4) as u8;
        }
        // More blocks do not fit an MCU.
        if count > 1 && parts.iter().map(|part| part.h * part.v).sum::<u8>() > 10 {
            parts.iter_mut().for_each(|part| (part.h, part.v) = (1, 1));
            parts[0].h = 2;
            parts[0].v = 2;
        }
        let restart = if source.below(3) == 0 {
            1 + source.below(40) as u16
        } else {
            0
        };
        let progressive = source.below(2) == 0;
        Self {
            width,
            height,
            parts,
            restart,
            progressive,
        }
    }

    /// Writes what decides about colours besides the components' names.
    fn write_marks(&self, source: &mut Source<'_>, out: &mut Vec<u8>) {
        let marks = source.byte();
        if marks & 1 > 0 {
            segment(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0", out);
        }
        if marks & 2 > 0 {
            segment(
                0xEE,
                &[b"Adobe\0\x64\0\0\0\0", &[marks >> 2 & 3][..]].concat(),
                out,
            );
        }
    }

    fn write_header(&self, source: &mut Source<'_>, out: &mut Vec<u8>) {
        let mut body = vec![8];
        body.extend([self.height, self.width].map(u16::to_be_bytes).concat());
        body.push(self.parts.len() as u8);
        body.extend(
            self.parts
                .iter()
                .zip(0..)
                .flat_map(|(part, index)| [part.id, part.h << 4 | part.v, index]),
        );
        segment(
            if self.progressive {
                0xC2
            } else {
                0xC0 + source.below(2) as u8
            },
            &body,
            out,
        );
        if self.restart > 0 {
            segment(0xDD, &self.restart.to_be_bytes(), out);
        }
    }

    /// Writes a sequential scan of these components.
    fn write_scan(
        &self,
        which: &[usize],
        (tables, heat): (&[Tables], &Heat),
        source: &mut Source<'_>,
        out: &mut Vec<u8>,
    ) {
        let selectors = which
            .iter()
            .flat_map(|index| [self.parts[*index].id, (index << 4 | index) as u8]);
        let body: Vec<u8> = std::iter::once(which.len() as u8)
            .chain(selectors)
            .chain([0, 63, 0])
            .collect();
        segment(0xDA, &body, out);
        let alone = which.len() == 1;
        let mcus = |side: u16, factor: fn(&Part) -> u8| {
            let most = usize::from(self.parts.iter().map(factor).max().unwrap_or(1));
            let own = usize::from(factor(&self.parts[which[0]]));
            let blocks = (usize::from(side) * own).div_ceil(most).div_ceil(8);
            if alone {
                blocks
            } else {
                usize::from(side).div_ceil(8 * most)
            }
        };
        let mcus = mcus(self.width, |part| part.h) * mcus(self.height, |part| part.v);
        let mut predictors = [0; 4];
        let mut bits = Bits {
            out,
            word: 0,
            count: 0,
        };
        for mcu in 0..mcus {
            if self.restart > 0 && mcu > 0 && mcu % usize::from(self.restart) == 0 {
                bits.flush();
                predictors = [0; 4];
                bits.out.extend([
                    0xFF,
                    0xD0 + ((mcu / usize::from(self.restart) - 1) % 8) as u8,
                ]);
            }
            for index in which {
                let part = self.parts[*index];
                for _ in 0..if alone { 1 } else { part.h * part.v } {
                    heat.write_block(
                        (&tables[*index], &mut predictors[*index]),
                        source,
                        &mut bits,
                    );
                }
            }
        }
        bits.flush();
    }
}

/// Huffman tables of a component: those of sequential scans, and of the AC coefficients of
/// progressive ones.
struct Tables {
    dc: Codes,
    ac: Codes,
    band: Codes,
}

impl Tables {
    fn draw(heat: &Heat, source: &mut Source<'_>) -> Self {
        let (dc, ac) = heat.sizes;
        let values = (0..16).flat_map(move |run| (1..=ac).map(move |size| run << 4 | size as u8));
        Self {
            dc: Codes::draw((0..=dc as u8).collect(), source),
            ac: Codes::draw(
                [0, 0xF0].into_iter().chain(values.clone()).collect(),
                source,
            ),
            band: Codes::draw((0..16).map(|run| run << 4).chain(values).collect(), source),
        }
    }
}

/// A Huffman table: some symbols with codes of 1, 2, 3 … bits, and the rest with longer ones of one
/// length.
struct Codes {
    symbols: Vec<u8>,
    short: usize,
    /// Bits of the other codes beyond those of the longest short one.
    more: usize,
}

impl Codes {
    fn draw(mut symbols: Vec<u8>, source: &mut Source<'_>) -> Self {
        let turn = source.below(symbols.len());
        symbols.rotate_left(turn);
        // libjpeg-turbo refuses codes of ones alone.
        let more = symbols.len().ilog2() as usize + 1;
        Self {
            symbols,
            short: 1 + source.below(16 - more),
            more,
        }
    }

    /// As in a segment.
    fn body(&self, which: u8) -> Vec<u8> {
        let mut counts = [0; 16];
        counts[..self.short].fill(1);
        counts[self.short + self.more - 1] += (self.symbols.len() - self.short) as u8;
        [&[which], &counts[..], &self.symbols].concat()
    }

    fn write(&self, symbol: u8, bits: &mut Bits<'_>) {
        let index = self
            .symbols
            .iter()
            .position(|other| *other == symbol)
            .expect("a symbol of this table");
        match index.checked_sub(self.short) {
            None => bits.push((1 << (index + 1)) - 2, index + 1),
            Some(rest) => bits.push(
                (((1 << self.short) - 1) << self.more) + rest,
                self.short + self.more,
            ),
        }
    }
}

/// How large and how many coefficients are.
struct Heat {
    /// The coefficients of a block are at most 4000 together, as encoders write them: no sum
    /// overflows.
    calm: bool,
    /// Most bits that tables have codes for; those of 8-bit samples, or more.
    sizes: (usize, usize),
    /// Most bits.
    dc: usize,
    ac: usize,
    /// Most zeros before a coefficient.
    run: usize,
    /// Of 256 coefficients, how many are a block's last.
    last: u8,
}

impl Heat {
    fn draw(source: &mut Source<'_>) -> Self {
        let calm = source.below(2) == 0;
        let sizes = if source.below(4) == 0 {
            (15, 15)
        } else {
            (11, 10)
        };
        let ac = 1 + source.below(if calm { 3 } else { sizes.1 });
        Self {
            calm,
            sizes,
            dc: source.below(sizes.0 + 1),
            ac,
            run: source.below(16),
            last: source.byte(),
        }
    }

    /// Steps of quantisation: small ones, a slope, or anything.
    fn write_quants(&self, index: u8, source: &mut Source<'_>, out: &mut Vec<u8>) {
        let wide = source.below(3) == 0;
        let any = source.below(4) == 0;
        let start = source.byte();
        let slope = source.byte() % 32;
        let mut body = vec![u8::from(wide) << 4 | index];
        for k in 0..64 {
            let value = match any {
                _ if self.calm => 1 + u16::from(source.byte() % 8),
                true => source.word(),
                false => 1 + u16::from(start) + k * u16::from(slope),
            };
            match wide {
                true => body.extend(value.to_be_bytes()),
                false => body.push(value.min(255) as u8),
            }
        }
        segment(0xDB, &body, out);
    }

    fn write_dc(
        &self,
        (codes, predictor): (&Codes, &mut i32),
        source: &mut Source<'_>,
        bits: &mut Bits<'_>,
    ) {
        let mut size = source.below(self.dc + 1);
        let mut value = i32::from(source.word());
        if self.calm {
            let next = value % 64 - 32;
            value = next - std::mem::replace(predictor, next);
            size = (32 - value.unsigned_abs().leading_zeros()) as usize;
            value -= i32::from(value < 0);
        }
        codes.write(size as u8, bits);
        bits.push(value as usize, size);
    }

    fn write_block(
        &self,
        (tables, predictor): (&Tables, &mut i32),
        source: &mut Source<'_>,
        bits: &mut Bits<'_>,
    ) {
        let ac = &tables.ac;
        self.write_dc((&tables.dc, predictor), source, bits);
        let mut next = 1;
        while next < 64 {
            let kind = source.byte();
            let run = source.below(self.run + 1);
            if kind < self.last || next + run > 63 {
                return ac.write(0, bits);
            }
            if kind == 255 && next + 16 <= 64 {
                ac.write(0xF0, bits);
                next += 16;
                continue;
            }
            let size = 1 + source.below(self.ac);
            ac.write((run << 4 | size) as u8, bits);
            bits.push(usize::from(source.word()), size);
            next += run + 1;
        }
    }
}

/// Coded data.
struct Bits<'a> {
    out: &'a mut Vec<u8>,
    word: usize,
    count: usize,
}

impl Bits<'_> {
    /// The lowest `count` bits, at most 16.
    fn push(&mut self, bits: usize, count: usize) {
        self.word = self.word << count | bits & ((1 << count) - 1);
        self.count += count;
        while self.count >= 8 {
            self.count -= 8;
            let byte = (self.word >> self.count) as u8;
            self.out.push(byte);
            if byte == 0xFF {
                self.out.push(0);
            }
        }
        self.word &= 0xFF;
    }

    /// Fills the last byte with ones.
    fn flush(&mut self) {
        self.push(0x7F, (8 - self.count) % 8);
    }
}
