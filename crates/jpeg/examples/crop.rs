//! Decodes a crop of a JPEG and prints it as a PPM: `crop FILE LEFT,TOP,WIDTH,HEIGHT [1|2|4|8] > crop.ppm`.
//! With a fourth argument the crop is one of the picture at that fraction of its size.

use feedline_jpeg::{Decoder, Header, Input, Region, RowSink, Scans};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

/// More scans than this are refused: each of them passes the picture once.
const SCANS_MAX: u32 = 100;

struct Pixels {
    rgb: Vec<u8>,
    row_bytes: usize,
}

impl RowSink for Pixels {
    fn row(&mut self, y: u32) -> &mut [u8] {
        &mut self.rgb[y as usize * self.row_bytes..][..self.row_bytes]
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("crop: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<(), Box<dyn Error>> {
    let (file, crop, scale) = match args {
        [file, crop] => (file, crop, 1),
        [file, crop, scale] => (file, crop, scale.parse()?),
        _ => return Err("usage: crop FILE LEFT,TOP,WIDTH,HEIGHT [1|2|4|8]".into()),
    };
    if ![1, 2, 4, 8].contains(&scale) {
        return Err(format!("a scale of 1/{scale}: use 1, 2, 4 or 8").into());
    }
    let numbers = crop
        .split(',')
        .map(str::parse)
        .collect::<Result<Vec<u32>, _>>()?;
    let [left, top, width, height] = numbers[..] else {
        return Err(format!("{crop:?} is not LEFT,TOP,WIDTH,HEIGHT").into());
    };
    let bytes = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    let header = Header::parse(&bytes)?;
    let across = header.width.div_ceil(scale);
    let down = header.height.div_ceil(scale);
    let inside = |start: u32, length: u32, end: u32| {
        length > 0 && start.checked_add(length).is_some_and(|stop| stop <= end)
    };
    if !inside(left, width, across) || !inside(top, height, down) {
        return Err(format!("{crop} is not within {across}x{down} pixels").into());
    }
    let picture = Input {
        bytes: &bytes,
        header: &header,
        strict: true,
    };
    let row_bytes = 3 * width as usize;
    let mut pixels = Pixels {
        rgb: vec![0; row_bytes * height as usize],
        row_bytes,
    };
    let region = Region {
        left,
        top,
        width,
        height,
    };
    let scans = Scans::of(picture, SCANS_MAX)?;
    Decoder::default().decode(picture, &scans, &[], region, scale, &mut pixels)?;
    let mut out = std::io::stdout().lock();
    write!(out, "P6\n{width} {height}\n255\n")?;
    out.write_all(&pixels.rgb)?;
    Ok(())
}
