//! Aspect-ratio buckets: each picture is scaled and cropped to the bucket size with the nearest
//! aspect ratio. All pictures of a batch have one size.

use super::geometry::{Placed, Rect, Size};
use super::settings::{Image, Op};
use feedline_base::error::{Error, ErrorKind, Result, Stage, config};
use feedline_core::order::Groups;

impl Image {
    /// Scales and crops each picture to the size (width, height) in `sizes` with the nearest aspect
    /// ratio. The picture is scaled until it covers that size, and the rest is cut off: centrally,
    /// or at [random](Self::random_crop). Equals Pillow's `resize` and `crop`.
    ///
    /// All pictures of a batch have one size, so the order must have [groups](Self::groups). The
    /// field `NAME.geometry` (six `i32`) follows the picture's field: height and width of the
    /// picture, top and left of the crop in the scaled (and [flipped](Self::flip)) picture, height
    /// and width of the bucket. SDXL is conditioned on these values.
    ///
    /// ```no_run
    /// # use feedline_image::Image;
    ///
    /// let decoder = Image::buckets([(1024, 1024), (768, 1360), (1360, 768)]).random_crop(true);
    /// let sizes = vec![(2000, 1500); 80_000]; // of all pictures, e.g. from a metadata table
    /// let groups = decoder.groups(sizes)?.budget(16 << 20).multiple_of(8); // pixels of a batch, over all ranks
    /// # Ok::<(), feedline_core::Error>(())
    /// ```
    ///
    /// `build()` refuses an empty list, more than 256 sizes, and an order without groups. If a
    /// picture's nearest size is not the size of its group, its sample is an error
    /// ([`ErrorKind::Shape`]). Each size has its own last batch; see `last_batch_share`.
    pub fn buckets(sizes: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let buckets: Vec<Size> = sizes
            .into_iter()
            .map(|(width, height)| Size::new(width, height))
            .collect();
        let size = buckets
            .iter()
            .copied()
            .max_by_key(|size| size.pixels())
            .unwrap_or(Size::new(0, 0));
        Self {
            buckets: Some(buckets.into()),
            ..Self::new(Op::Cover {
                size,
                random: false,
            })
        }
    }

    /// Whether the crop of [`buckets`](Self::buckets) has a random position; it is central by
    /// default. `build()` refuses it for other crops.
    #[must_use]
    pub fn random_crop(mut self, anywhere: bool) -> Self {
        match &mut self.op {
            Op::Cover { random, .. } => *random = anywhere,
            _ => self.misplace("random_crop", "buckets"),
        }
        self
    }

    /// Groups pictures of these sizes (width, height), one per sample of the dataset, by their
    /// nearest [bucket](Self::buckets). If [`exif_orientation`](Self::exif_orientation) is set, the
    /// sizes must be those of upright pictures.
    ///
    /// Errors: [`ErrorKind::Config`] if the decoder has no buckets, or if a side is 0 (the error
    /// names the sample); [`ErrorKind::Limit`] for more than 2^32 samples.
    pub fn groups(&self, sizes: impl IntoIterator<Item = (u32, u32)>) -> Result<Groups> {
        let buckets = self.buckets.as_deref().ok_or_else(|| {
            config("these settings give pictures of one size, which have no groups: set buckets")
        })?;
        self.check()?;
        let numbers = of_sizes(sizes, |size| nearest(buckets, size) as u8)?;
        Groups::of_lengths(
            numbers.into(),
            &buckets.iter().map(|size| size.pixels()).collect::<Vec<_>>(),
        )
    }

    /// The numbers of patches of pictures of these sizes (width, height), which `picture_sizes`
    /// returns. Use them as lengths for [`Groups::by_length`], with a budget of patches.
    ///
    /// Errors: [`ErrorKind::Config`] if the decoder makes no [patches](Self::patches), or if a side
    /// is 0 (the error names the sample).
    pub fn patch_counts(&self, sizes: impl IntoIterator<Item = (u32, u32)>) -> Result<Vec<u64>> {
        let Op::Patches(patches) = self.op else {
            return Err(config("these settings give one size and no patches"));
        };
        self.check()?;
        of_sizes(sizes, |size| {
            patches.output(size).pixels() / u64::from(patches.size).pow(2)
        })
    }

    /// The decoder for pictures of one group; `None` without buckets.
    pub(super) fn of_group(&self, group: Option<usize>) -> Result<Option<Self>> {
        let (Some(buckets), Op::Cover { random, .. }) = (&self.buckets, self.op) else {
            return Ok(None);
        };
        let size = group.and_then(|group| buckets.get(group)).copied();
        Ok(Some(Self {
            op: Op::Cover {
                size: size.ok_or_else(|| {
                    Error::new(
                        ErrorKind::Config,
                        Stage::Decode,
                        "pictures in buckets need batches of one group each",
                    )
                })?,
                random,
            },
            buckets: None,
            ..*self
        }))
    }

    /// Refuses a picture whose nearest bucket is not the one of its group.
    pub(super) fn check_group(&self, placed: &Placed, group: Option<usize>) -> Result<()> {
        let (Some(buckets), Some(group)) = (&self.buckets, group) else {
            return Ok(());
        };
        let own = nearest(buckets, placed.picture);
        let Size { width, height } = placed.picture;
        if own == group {
            return Ok(());
        }
        let message = format!(
            "the picture has {width}x{height} pixels and belongs to group {own}, but its \
             batch is of group {group}: the order was made for another size"
        );
        Err(Error::new(ErrorKind::Shape, Stage::Decode, message))
    }
}

/// Index of the bucket whose aspect ratio differs from the picture's by the smallest factor; the
/// first one on a tie.
fn nearest(buckets: &[Size], picture: Size) -> usize {
    let ratio = |size: &Size| (f64::from(size.width) / f64::from(size.height)).ln();
    let distance = |bucket: &Size| (ratio(bucket) - ratio(&picture)).abs();
    buckets
        .iter()
        .enumerate()
        .min_by(|a, b| distance(a.1).total_cmp(&distance(b.1)))
        .map_or(0, |(number, _)| number)
}

/// Applies `number` to the size (width, height) of each picture. Errors: [`ErrorKind::Config`] for
/// a side of 0, naming the sample.
fn of_sizes<T>(
    sizes: impl IntoIterator<Item = (u32, u32)>,
    number: impl Fn(Size) -> T,
) -> Result<Vec<T>> {
    (0..)
        .zip(sizes)
        .map(|(sample, (width, height))| match width.min(height) {
            0 => Err(config(format!("a picture of {width}x{height} pixels")).with_sample(sample)),
            _ => Ok(number(Size::new(width, height))),
        })
        .collect()
}

/// Writes the row of the geometry field.
pub(super) fn write_geometry(placed: &Placed, flip: bool, row: &mut [u8]) {
    let Size { width, height } = placed.picture;
    let Rect { left, top, size } = placed.window;
    let whole = placed.whole;
    let left = if flip {
        whole.width - left - size.width
    } else {
        left
    };
    let numbers = [height, width, top, left, size.height, size.width];
    for (place, number) in row.chunks_exact_mut(4).zip(numbers) {
        place.copy_from_slice(&i32::try_from(number).unwrap_or(i32::MAX).to_ne_bytes());
    }
}
