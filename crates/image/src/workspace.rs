//! Decodes the bytes of a picture to a row, in a worker's buffers.

use super::format::Format;
use super::geometry::{Crop, Placed, Rect, Size};
use super::limits::{Limits, PictureRoom, over_limit};
use super::orientation::Orientation;
use super::patches::Tiles;
use super::resize::{Pixels, Resizer};
use super::settings::{Filter, Image, Op, PixelLayout};
use super::{buckets, finish, other};
use feedline_base::error::{Error, ErrorKind, Result, Stage, guarded};
use feedline_base::setting::Setting;
use feedline_core::decode::{Ctx, Decoder};
use feedline_core::memory::Row;
use feedline_core::order::Draws;
use feedline_core::tensor::{DType, EncodedField, Encoding, Field};
use feedline_jpeg as jpeg;
use feedline_jpeg::{Header, sized};

/// Purpose string of this decoder's random draws: first the draw for the flip, then the draws for
/// the crop.
pub(super) const PURPOSE: &str = "feedline image";

impl Decoder for Image {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        if !matches!(input.encoding, Encoding::Image | Encoding::Bytes) {
            let how = match input.encoding {
                Encoding::List { .. } => {
                    Setting::Each.hint(|each| format!(": decode it with {each}"))
                }
                _ => ": this decoder takes encoded pictures".into(),
            };
            let message = format!("field `{}` is {}{how}", input.name, input.encoding);
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        self.check()?;
        if let Op::Patches(patches) = self.op {
            return Ok(patches.fields(&input.name, self.values.dtype));
        }
        let shape = |size: &Size| {
            let width = size.width as usize;
            let height = size.height as usize;
            match self.layout {
                PixelLayout::Nhwc => vec![height, width, 3],
                PixelLayout::Nchw => vec![3, height, width],
            }
        };
        let name = &input.name;
        let dtype = self.values.dtype;
        Ok(match &self.buckets {
            None => vec![Field::fixed(name, dtype, shape(&self.op.output()))],
            Some(sizes) => vec![
                Field::in_groups(name, dtype, sizes.iter().map(shape).collect()),
                Field::fixed(format!("{name}.geometry"), DType::I32, [6]),
            ],
        })
    }

    /// [`Limits::memory`].
    fn scratch_bytes(&self) -> usize {
        self.limits.memory
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let done = guarded("a picture", Stage::Decode, || {
            self.decode_one(input, ctx, out)
        });
        if done
            .as_ref()
            .is_err_and(|error| error.kind() == ErrorKind::Panicked)
        {
            // The panic may have left the workspace inconsistent.
            *ctx.scratch().get::<Workspace>() = Workspace::default();
        }
        done
    }
}

impl Image {
    fn decode_one(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let mut draws = ctx.draws(PURPOSE);
        let sample = draws.clone().next_u64();
        let field = ctx.fields().start;
        let limits = Limits {
            memory: self.limits.memory.min(ctx.scratch_limit()),
            ..self.limits
        };
        let points = ctx.seek_points();
        let scratch: &mut Workspace = ctx.scratch().get();
        // Drawn first, so that the flip does not depend on the picture's size.
        let flip = draws.bool(self.flip);
        let group = out.group();
        let of_group = self.of_group(group)?;
        let image = of_group.as_ref().unwrap_or(self);
        let patches = if let Op::Patches(patches) = self.op {
            Some(patches)
        } else {
            None
        };
        let tile = image.op.output();
        let row = out.bytes_mut(field);
        let in_place = patches.is_none() && finish::in_place(self.values, self.layout);
        let encoded = Encoded {
            bytes: input,
            points,
        };
        let picture = scratch.decode(
            encoded,
            image,
            limits,
            &mut draws,
            in_place.then_some(&mut *row),
        )?;
        let Picture {
            orientation,
            stored,
            placed,
            ..
        } = picture;
        self.check_group(&placed, group)?;
        if self.paired && image.op.is_random() {
            let pair = Pair {
                sample,
                size: placed.picture,
            };
            scratch.check_pair(pair)?;
        }
        if in_place {
            if !orientation.is_upright() {
                orientation.turn(&scratch.resized, stored, row);
            }
            if flip {
                finish::flip(row, tile);
            }
        } else {
            let block = patches.map_or(1, |patches| patches.block());
            let tiles = Tiles {
                whole: orientation.size(stored),
                tile,
                block,
            };
            finish::write(
                scratch.upright(orientation, stored),
                tiles,
                flip,
                self.values,
                self.layout,
                row,
            );
            if let Some(patches) = patches {
                patches.describe(tiles, placed.picture, field, out)?;
            }
        }
        if self.buckets.is_some() {
            buckets::write_geometry(&placed, flip, out.bytes_mut(field + 1));
        }
        Ok(())
    }
}

impl Image {
    /// Width and height of a picture as it is decoded, according to its header.
    #[doc(hidden)]
    pub fn size_of(&self, input: &[u8]) -> Result<(u32, u32)> {
        let Size { width, height } = match Format::of(input)? {
            Format::Jpeg => {
                let header = Header::parse(input).map_err(|error| Error::of_jpeg(error, input))?;
                let orientation = if self.orient {
                    orientation_of(&header, input)
                } else {
                    Orientation::default()
                };
                orientation.size(size_of(&header))
            }
            format => other::size(format, input)?,
        };
        Ok((width, height))
    }

    /// Whether pictures are turned upright.
    #[doc(hidden)]
    pub fn turns(&self) -> bool {
        self.orient
    }
}

pub(super) fn size_of(header: &Header) -> Size {
    Size::new(header.width, header.height)
}

/// The EXIF orientation of `input`, to which the header belongs.
fn orientation_of(header: &Header, input: &[u8]) -> Orientation {
    header
        .exif(input)
        .map(Orientation::of_exif)
        .unwrap_or_default()
}

/// The error of the JPEG `input`. If only strict decoding refuses it, the error names that setting.
fn refused(error: jpeg::Error, input: &[u8]) -> Error {
    let is_strict = error.kind() == jpeg::ErrorKind::Damaged;
    Setting::Strict
        .there()
        .into_iter()
        .filter(|_| is_strict)
        .fold(Error::of_jpeg(error, input), |error, strict| {
            error.with_note(&format!("{strict} decodes the readable part"))
        })
}

/// An encoded picture and its seek points.
#[derive(Clone, Copy)]
pub(super) struct Encoded<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) points: &'a [u8],
}

#[cfg(test)]
impl<'a> Encoded<'a> {
    /// A picture without seek points.
    pub(super) fn alone(bytes: &'a [u8]) -> Self {
        Self { bytes, points: &[] }
    }
}

/// A JPEG, ready to be decoded.
#[derive(Clone, Copy)]
struct Coded<'a> {
    picture: jpeg::Input<'a>,
    scans: &'a jpeg::Scans<'a>,
    points: &'a [u8],
}

/// A worker's buffers. They grow to the largest picture within the limits, and are kept.
#[derive(Default)]
pub(super) struct Workspace {
    /// The decoded part of a picture that is not scaled row by row, RGB.
    pub(super) pixels: Vec<u8>,
    /// The resized pixels, before the last pass (flip, dtype, layout).
    pub(super) resized: Vec<u8>,
    /// `resized`, turned upright.
    pub(super) upright: Vec<u8>,
    pub(super) resizer: Resizer,
    pub(super) jpeg: jpeg::Decoder,
    /// The last paired picture.
    pub(super) pair: Option<Pair>,
}

/// A picture with one crop for all pictures of its sample.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    /// The sample's first draw, which tells it from others.
    sample: u64,
    size: Size,
}

/// A picture that was decoded, cropped and scaled.
pub(super) struct Picture {
    /// The size at which it was decoded.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests ask for it"))]
    pub(super) size: Size,
    /// The size of the output before it is turned upright.
    pub(super) stored: Size,
    pub(super) orientation: Orientation,
    pub(super) placed: Placed,
}

impl Workspace {
    /// Refuses a picture whose size differs from that of the last picture of the same sample.
    fn check_pair(&mut self, pair: Pair) -> Result<()> {
        let before = self.pair.replace(pair);
        let Some(other) = before.filter(|other| other.sample == pair.sample) else {
            return Ok(());
        };
        if other.size == pair.size {
            return Ok(());
        }
        // The sample may be decoded once more, from its first picture on.
        self.pair = None;
        let message = format!(
            "pictures of {}x{} and {}x{} pixels in one sample: one random crop needs equal sizes",
            other.size.width, other.size.height, pair.size.width, pair.size.height
        );
        Err(Error::new(ErrorKind::Shape, Stage::Decode, message))
    }

    /// Decodes, crops and scales a picture: into `row` if there is one and the picture is upright,
    /// otherwise as stored into `self.resized`.
    pub(super) fn decode(
        &mut self,
        encoded: Encoded<'_>,
        image: &Image,
        limits: Limits,
        draws: &mut Draws,
        row: Option<&mut [u8]>,
    ) -> Result<Picture> {
        let input = encoded.bytes;
        if input.len() > limits.bytes {
            return Err(over_limit(format!(
                "{} encoded bytes; the limit is {}",
                input.len(),
                limits.bytes
            )));
        }
        match Format::of(input)? {
            Format::Jpeg => self.decode_jpeg(encoded, image, limits, draws, row),
            format => {
                let crop = |size| image.op.crop(size, &mut draws.clone());
                let resizing = |size| resizing(&crop(size), image);
                // Keep less than the memory limit counts for the tables of other formats.
                self.jpeg.release_beyond(1 << 20);
                let Self {
                    pixels, resizer, ..
                } = self;
                let mut room = PictureRoom {
                    limits,
                    encoded: input.len(),
                    resizing: &resizing,
                    pixels,
                    resizer,
                };
                let size = other::decode(format, input, &mut room)?;
                let crop = crop(size);
                self.resize(Rect::of(size), &crop, image.filter, row);
                let orientation = Orientation::default();
                Ok(Picture {
                    size,
                    stored: crop.window.size,
                    orientation,
                    placed: crop.placed(size),
                })
            }
        }
    }

    pub(super) fn decode_jpeg(
        &mut self,
        encoded: Encoded<'_>,
        image: &Image,
        limits: Limits,
        draws: &mut Draws,
        row: Option<&mut [u8]>,
    ) -> Result<Picture> {
        let input = encoded.bytes;
        let header = Header::parse(input).map_err(|error| refused(error, input))?;
        if image.strict {
            header
                .check_stray()
                .map_err(|error| refused(error, input))?;
        }
        let orientation = if image.orient {
            orientation_of(&header, input)
        } else {
            Orientation::default()
        };
        let row = row.filter(|_| orientation.is_upright());
        let stored = size_of(&header);
        let upright = orientation.size(stored);
        let crop = image.op.crop(upright, draws);
        let placed = crop.placed(upright);
        let crop = orientation.stored(crop, stored);
        let scale = image.scale_of(&crop);
        let size = stored.divided(scale);
        let crop = if scale == 1 {
            crop
        } else {
            crop.scaled(scale, size)
        };
        let pixels = &mut self.pixels;
        let resizer = &mut self.resizer;
        let resizing = |_| resizing(&crop, image);
        let mut room = PictureRoom {
            limits,
            encoded: input.len(),
            resizing: &resizing,
            pixels,
            resizer,
        };
        let picture = jpeg::Input {
            bytes: input,
            header: &header,
            strict: image.strict,
        };
        room.admit(stored)?;
        let scans =
            &jpeg::Scans::of(picture, limits.scans).map_err(|error| refused(error, input))?;
        let bytes = scans.engine_bytes(&header);
        room.take(stored, 0, bytes)?;
        self.jpeg.release_beyond(bytes);
        let coded = Coded {
            picture,
            scans,
            points: encoded.points,
        };
        self.decode_rows(coded, image.filter, &crop, scale, row)?;
        Ok(Picture {
            size,
            stored: crop.window.size,
            orientation,
            placed,
        })
    }

    /// Decodes the rows of a JPEG at 1 / `scale` of its size, and scales each while it is in the
    /// cache.
    fn decode_rows(
        &mut self,
        coded: Coded<'_>,
        filter: Filter,
        crop: &Crop,
        scale: u32,
        row: Option<&mut [u8]>,
    ) -> Result<()> {
        let Rect {
            left,
            top,
            size: Size { width, height },
        } = crop.needed(filter);
        let region = jpeg::Region {
            left,
            top,
            width,
            height,
        };
        let out = target(row, &mut self.resized, crop);
        let mut rows = self.resizer.start(&crop.plan(filter), out);
        self.jpeg
            .decode(
                coded.picture,
                coded.scans,
                coded.points,
                region,
                scale,
                &mut rows,
            )
            .map_err(|error| refused(error, coded.picture.bytes))?;
        rows.finish();
        Ok(())
    }

    /// `self.resized`, turned upright.
    pub(super) fn upright(&mut self, orientation: Orientation, stored: Size) -> &[u8] {
        if orientation.is_upright() {
            return &self.resized;
        }
        orientation.turn(
            &self.resized,
            stored,
            sized(&mut self.upright, self.resized.len(), 0),
        );
        &self.upright
    }

    /// Crops and scales the pixels, which cover `there` of the picture, into `row` or else into
    /// `self.resized`.
    pub(super) fn resize(
        &mut self,
        there: Rect,
        crop: &Crop,
        filter: Filter,
        row: Option<&mut [u8]>,
    ) {
        let seen = crop.view.common(there);
        let stride = 3 * there.size.width as usize;
        let start =
            stride * (seen.top - there.top) as usize + 3 * (seen.left - there.left) as usize;
        let bytes = &self.pixels[start..3 * there.size.pixels() as usize];
        // The plan's coordinates are relative to the view.
        let place = Rect {
            left: seen.left - crop.view.left,
            top: seen.top - crop.view.top,
            size: seen.size,
        };
        let out = target(row, &mut self.resized, crop);
        self.resizer.resize(
            Pixels {
                bytes,
                stride,
                there: place,
            },
            &crop.plan(filter),
            out,
        );
    }
}

/// The buffer for the crop's output: `row`, or `resized`.
fn target<'a>(row: Option<&'a mut [u8]>, resized: &'a mut Vec<u8>, crop: &Crop) -> &'a mut [u8] {
    row.unwrap_or_else(|| sized(resized, 3 * crop.window.size.pixels() as usize, 0))
}

/// Maximum heap bytes for resizing: the resizer's, and two copies of the largest output before its
/// last pass (as stored, and turned upright). The output buffers are kept from earlier pictures.
fn resizing(crop: &Crop, image: &Image) -> u64 {
    crop.plan(image.filter).heap_bytes() + 6 * image.op.most_pixels()
}
