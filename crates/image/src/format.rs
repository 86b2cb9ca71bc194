//! The format of a picture, by its first bytes.

use feedline_base::error::{Error, Result};

/// Format of a file, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Jpeg,
    Png,
    WebP,
    Bmp,
    Gif,
}

impl Format {
    pub(super) fn of(input: &[u8]) -> Result<Self> {
        match input {
            [0xFF, 0xD8, 0xFF, ..] => Ok(Self::Jpeg),
            [0x89, b'P', b'N', b'G', 0x0D, 0x0A, 0x1A, 0x0A, ..] => Ok(Self::Png),
            [
                b'R',
                b'I',
                b'F',
                b'F',
                _,
                _,
                _,
                _,
                b'W',
                b'E',
                b'B',
                b'P',
                ..,
            ] => Ok(Self::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Ok(Self::Gif),
            [b'B', b'M', ..] => Ok(Self::Bmp),
            [] => Err(Error::decode("no bytes at all")),
            _ => Err(unknown(input)),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Jpeg => "JPEG",
            Self::Png => "PNG",
            Self::WebP => "WebP",
            Self::Bmp => "BMP",
            Self::Gif => "GIF",
        }
    }
}

/// The error for an unsupported format, with its name if known, and its first bytes.
fn unknown(input: &[u8]) -> Error {
    let name = match input {
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "TIFF",
        [_, _, _, _, b'f', b't', b'y', b'p', b'a', b'v', b'i', ..] => "AVIF",
        [_, _, _, _, b'f', b't', b'y', b'p', b'h' | b'm', ..] => "HEIF",
        [0xFF, 0x0A, ..] | [0, 0, 0, 12, b'J', b'X', b'L', b' ', ..] => "JPEG XL",
        [0, 0, 0, 12, b'j', b'P', ..] => "JPEG 2000",
        [b'<', ..] => "text (HTML, XML, SVG)",
        _ => "not a picture",
    };
    let start: Vec<_> = input
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let message = format!(
        "{name}, starting with {}, {} bytes; JPEG, PNG, WebP, BMP and GIF are supported",
        start.join(" "),
        input.len()
    );
    Error::decode(message)
}
