//! Contents of generated files: the formats, filled with incompressible bytes that are identical in
//! every run.
//!
//! ```text
//! (sample number) ──► noise, or a picture like a photograph ──► records │ TFRecord │ npz │ npy │ tar │ Parquet │ .jpg
//! ```
//!
//! Limits: a sample must fit into memory, an npz file into 4 GiB. Pictures are crops of one
//! texture, so they resemble each other; their sizes vary by 40 %.

#[path = "../../tests/common/formats.rs"]
mod formats;

use formats::tar_member;
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use std::io::{self, Write};
use std::ops::Range;

/// Contents of one kind of file.
#[derive(Debug)]
pub enum Content {
    Records {
        bytes: usize,
    },
    TfRecord {
        bytes: usize,
    },
    /// A sample is a run of tokens of `width` bytes each.
    Tokens {
        width: usize,
        bytes: usize,
    },
    /// An array of `f32`.
    Npy {
        bytes: usize,
    },
    /// An array `x` of bytes, and a number `y`.
    Npz {
        bytes: usize,
    },
    /// A column `record` of bytes.
    #[cfg(feature = "parquet")]
    Parquet {
        bytes: usize,
    },
    Images(Texture),
    Tar(Texture),
}

/// Tokens are below this, as in GPT-2.
const VOCABULARY: u64 = 50_257;
/// Maximum bytes of a Parquet row group, plus one row.
#[cfg(feature = "parquet")]
const GROUP_BYTES: usize = 64 << 20;

impl Content {
    /// Writes the file of these samples. `done` receives the number of bytes written, and may
    /// return an error to stop.
    pub fn write<W: Write + Send>(
        &self,
        out: W,
        samples: Range<u64>,
        mut done: impl FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        #[cfg(feature = "parquet")]
        if let Self::Parquet { bytes } = self {
            return parquet(out, *bytes, samples, done);
        }
        let mut out = out;
        let mut sample = Vec::new();
        let mut framed = Vec::new();
        for number in samples {
            framed.clear();
            self.sample(number, &mut sample, &mut framed)?;
            out.write_all(&framed)?;
            done(framed.len() as u64)?;
        }
        if let Self::Tar(_) = self {
            out.write_all(&[0; 1024])?;
        }
        out.flush()
    }

    /// Appends a sample in its file format. `bytes` is reusable space for its contents.
    fn sample(&self, number: u64, bytes: &mut Vec<u8>, out: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::Records { bytes: len } => noise(number, *len, out),
            Self::TfRecord { bytes: len } => {
                noise(number, *len, bytes);
                tfrecord(bytes, out);
            }
            Self::Tokens { width, bytes: len } => tokens(number, *width, len / width, out),
            Self::Npy { bytes: len } => {
                floats(number, len / 4, bytes);
                npy("<f4", &format!("({},)", len / 4), bytes, out);
            }
            Self::Npz { bytes: len } => {
                noise(number, *len, bytes);
                npz(number, bytes, out);
            }
            #[cfg(feature = "parquet")]
            Self::Parquet { .. } => {}
            Self::Images(texture) => texture.picture(number, out)?,
            Self::Tar(texture) => {
                bytes.clear();
                texture.picture(number, bytes)?;
                out.extend(tar_member(&format!("{number:09}.jpg"), bytes));
                out.extend(tar_member(
                    &format!("{number:09}.cls"),
                    (number % 1000).to_string().as_bytes(),
                ));
            }
        }
        Ok(())
    }
}

/// A small generator with incompressible output.
struct Draws(u64);

impl Draws {
    fn of(number: u64) -> Self {
        // Consecutive numbers must not give similar streams.
        let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((mixed ^ (mixed >> 31)) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }
}

/// Replaces the contents of `out` with noise.
fn noise(number: u64, len: usize, out: &mut Vec<u8>) {
    out.clear();
    out.resize(len.next_multiple_of(8), 0);
    let mut draws = Draws::of(number);
    for word in out.chunks_exact_mut(8) {
        word.copy_from_slice(&draws.next().to_le_bytes());
    }
    out.truncate(len);
}

fn tokens(number: u64, width: usize, count: usize, out: &mut Vec<u8>) {
    let mut draws = Draws::of(number);
    for _ in 0..count {
        out.extend_from_slice(&draws.below(VOCABULARY).to_le_bytes()[..width]);
    }
}

/// Numbers from 0 to 1 that use all mantissa bits.
fn floats(number: u64, count: usize, out: &mut Vec<u8>) {
    let mut draws = Draws::of(number);
    out.clear();
    out.extend(
        (0..count).flat_map(|_| ((draws.next() >> 40) as f32 / (1_u32 << 24) as f32).to_le_bytes()),
    );
}

fn tfrecord(payload: &[u8], out: &mut Vec<u8>) {
    let masked = |bytes: &[u8]| {
        crc32c::crc32c(bytes)
            .rotate_right(15)
            .wrapping_add(0xa282_ead8)
            .to_le_bytes()
    };
    let len = (payload.len() as u64).to_le_bytes();
    out.extend_from_slice(&len);
    out.extend_from_slice(&masked(&len));
    out.extend_from_slice(payload);
    out.extend_from_slice(&masked(payload));
}

fn npy(descr: &str, shape: &str, data: &[u8], out: &mut Vec<u8>) {
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // A multiple of 64 with magic, version, length and the line's end.
    let len = (10 + dict.len() + 1).next_multiple_of(64) - 10;
    out.extend_from_slice(b"\x93NUMPY\x01\x00");
    out.extend_from_slice(&(len as u16).to_le_bytes());
    out.extend_from_slice(format!("{dict:<width$}\n", width = len - 1).as_bytes());
    out.extend_from_slice(data);
}

/// In the form of `np.savez`: a zip of uncompressed members.
fn npz(label: u64, x: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    let mut directory = Vec::new();
    for (name, descr, shape, data) in [
        ("x.npy", "|u1", format!("({},)", x.len()), x),
        (
            "y.npy",
            "<i8",
            "()".to_string(),
            &(label % 1000).to_le_bytes()[..],
        ),
    ] {
        let at = (out.len() - start) as u32;
        // Placeholder for the header: checksum and length are known after writing.
        out.extend_from_slice(&[0; 30]);
        out.extend_from_slice(name.as_bytes());
        let data_at = out.len();
        npy(descr, &shape, data, out);
        let crc = crc32fast::hash(&out[data_at..]);
        let len = (out.len() - data_at) as u32;
        let mut common = vec![20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0];
        for number in [crc, len, len, name.len() as u32] {
            common.extend_from_slice(&number.to_le_bytes());
        }
        out[start + at as usize..][..4].copy_from_slice(b"PK\x03\x04");
        out[start + at as usize + 4..][..26].copy_from_slice(&common);
        directory.extend_from_slice(b"PK\x01\x02\x14\x00");
        directory.extend_from_slice(&common);
        directory.extend_from_slice(&[0; 10]);
        directory.extend_from_slice(&at.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
    }
    let at = (out.len() - start) as u32;
    out.extend_from_slice(&directory);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0\x02\0\x02\0");
    out.extend_from_slice(&(directory.len() as u32).to_le_bytes());
    out.extend_from_slice(&at.to_le_bytes());
    out.extend_from_slice(&[0; 2]);
}

#[cfg(feature = "parquet")]
fn parquet<W: Write + Send>(
    out: W,
    bytes: usize,
    samples: Range<u64>,
    mut done: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    use arrow_array::{ArrayRef, FixedSizeBinaryArray, RecordBatch};
    use arrow_schema::{DataType, Field, Schema};
    use std::sync::Arc;
    let width = i32::try_from(bytes)
        .map_err(|_| io::Error::other("a sample is too large for a Parquet column"))?;
    let schema = Arc::new(Schema::new(vec![Field::new(
        "record",
        DataType::FixedSizeBinary(width),
        false,
    )]));
    let plain = parquet::file::properties::WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
        .set_write_batch_size(1)
        .build();
    let mut writer = parquet::arrow::ArrowWriter::try_new(out, schema.clone(), Some(plain))
        .map_err(io::Error::other)?;
    let rows = (GROUP_BYTES / bytes.max(1)).max(1) as u64;
    let mut sample = Vec::new();
    let mut start = samples.start;
    while start < samples.end {
        let end = samples.end.min(start.saturating_add(rows));
        let mut values = Vec::with_capacity(bytes * (end - start) as usize);
        for number in start..end {
            noise(number, bytes, &mut sample);
            values.extend_from_slice(&sample);
        }
        let column: ArrayRef = Arc::new(
            FixedSizeBinaryArray::try_new(width, values.into(), None).map_err(io::Error::other)?,
        );
        let batch = RecordBatch::try_new(schema.clone(), vec![column]).map_err(io::Error::other)?;
        writer
            .write(&batch)
            .and_then(|()| writer.flush())
            .map_err(io::Error::other)?;
        done(bytes as u64 * (end - start))?;
        start = end;
    }
    writer.into_inner().map_err(io::Error::other)?.flush()
}

/// Width and height of the texture in pixels.
const SIDE: usize = 1024;
const QUALITY: u8 = 90;

/// The source of the pictures: as rough and smooth as a photograph, and periodic.
#[derive(Debug)]
pub struct Texture {
    /// RGB.
    pixels: Vec<u8>,
    /// Mean pixels of a picture.
    area: f64,
}

impl Texture {
    /// A texture for pictures with this many encoded bytes on average.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let mut pixels = vec![128_i32; SIDE * SIDE * 3];
        for (step, height) in [(128, 56), (32, 28), (8, 20), (1, 9)] {
            add_octave(&mut pixels, step, height);
        }
        let pixels = pixels
            .into_iter()
            .map(|value| value.clamp(0, 255) as u8)
            .collect();
        let mut texture = Self { pixels, area: 0.0 };
        let width = 1024;
        let height = 768;
        let mut probe = Vec::new();
        texture.cut(&mut Draws::of(0), width, height, &mut probe)?;
        texture.area = bytes as f64 * (width * height) as f64 / probe.len() as f64;
        Ok(texture)
    }

    /// Appends an encoded picture of 60 to 140 % of the mean size.
    fn picture(&self, number: u64, out: &mut Vec<u8>) -> io::Result<()> {
        let mut draws = Draws::of(number);
        let area = self.area * (0.6 + 0.8 * draws.below(1 << 20) as f64 / (1 << 20) as f64);
        let width = (area * 4.0 / 3.0).sqrt().clamp(16.0, 16_000.0);
        let height = (area / width).clamp(16.0, 16_000.0);
        self.cut(&mut draws, width as usize, height as usize, out)
    }

    fn cut(
        &self,
        draws: &mut Draws,
        width: usize,
        height: usize,
        out: &mut Vec<u8>,
    ) -> io::Result<()> {
        let left = draws.below(SIDE as u64) as usize;
        let top = draws.below(SIDE as u64) as usize;
        let shade = draws.below(64) as u8;
        let mut pixels = Vec::with_capacity(width * height * 3);
        for y in 0..height {
            let row = &self.pixels[(top + y) % SIDE * SIDE * 3..][..SIDE * 3];
            pixels.extend(
                row.iter()
                    .cycle()
                    .skip(left * 3)
                    .take(width * 3)
                    .map(|value| value.saturating_add(shade)),
            );
        }
        let mut encoder = Encoder::new(&mut *out, QUALITY);
        encoder.set_sampling_factor(SamplingFactor::F_2_2);
        encoder
            .encode(&pixels, width as u16, height as u16, ColorType::Rgb)
            .map_err(io::Error::other)
    }
}

/// Adds noise that is smooth over `step` pixels with amplitude `height`.
fn add_octave(pixels: &mut [i32], step: usize, height: i32) {
    let cells = SIDE / step;
    let mut draws = Draws::of(step as u64);
    let knots: Vec<i32> = (0..cells * cells * 3)
        .map(|_| draws.below(2 * height as u64 + 1) as i32 - height)
        .collect();
    let knot =
        |x: usize, y: usize, channel: usize| knots[(y % cells * cells + x % cells) * 3 + channel];
    for (index, value) in pixels.iter_mut().enumerate() {
        let channel = index % 3;
        let x = index / 3 % SIDE;
        let y = index / 3 / SIDE;
        let cell_x = x / step;
        let right = (x % step) as i32;
        let cell_y = y / step;
        let down = (y % step) as i32;
        let across = |y: usize| {
            knot(cell_x, y, channel) * (step as i32 - right) + knot(cell_x + 1, y, channel) * right
        };
        let both = across(cell_y) * (step as i32 - down) + across(cell_y + 1) * down;
        *value += both / (step * step) as i32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &Content, samples: Range<u64>) -> Vec<u8> {
        let mut out = Vec::new();
        content.write(&mut out, samples, |_| Ok(())).unwrap();
        out
    }

    #[test]
    fn samples_with_equal_numbers_have_equal_bytes() {
        let records = Content::Records { bytes: 1001 };
        let all = file(&records, 0..5);
        assert_eq!(all.len(), 5005);
        assert_eq!(file(&records, 3..5), all[3003..]);
        let mut samples: Vec<&[u8]> = all.chunks(1001).collect();
        samples.sort_unstable();
        samples.dedup();
        assert_eq!(samples.len(), 5);
    }

    #[test]
    fn picture_sizes_vary_around_the_requested_mean() {
        let content = Content::Images(Texture::new(30_000).unwrap());
        let sizes: Vec<usize> = (0..16)
            .map(|number| file(&content, number..number + 1).len())
            .collect();
        let mean = sizes.iter().sum::<usize>() / sizes.len();
        assert!((24_000..36_000).contains(&mean), "{sizes:?}");
        let least = sizes.iter().min().unwrap();
        let most = sizes.iter().max().unwrap();
        assert!(10 * most > 13 * least, "{sizes:?}");
    }
}
