//! From a path and a few settings to a dataset with its decoders.

use crate::error::config;
use feedline::dataset::{Dataset, Images, Records, Tar, Tokens};
use feedline::decode::{Bytes, Image, PixelLayout};
use feedline::tensor::{DType, Encoding};
use feedline::{Loader, LoaderBuilder, Result};
use std::path::PathBuf;
use std::sync::Arc;

/// What the data is. Each setting is for the sources named; with others it is refused, not ignored.
pub struct Source {
    pub kind: String,
    pub path: PathBuf,
    /// records
    pub record_bytes: Option<usize>,
    /// tokens
    pub token: Option<String>,
    /// tokens
    pub seq_len: Option<usize>,
    /// wds: endings of the picture, as in `jpg;png`
    pub image: Option<String>,
    /// wds: endings of the other members
    pub columns: Option<Vec<String>>,
}

/// What becomes of pictures.
pub struct Pictures {
    pub size: Option<u32>,
    pub augment: bool,
    pub dtype: String,
    pub layout: String,
}

impl Source {
    /// The dataset in a builder, with a decoder for each field that needs one.
    pub fn builder(&self, pictures: &Pictures) -> Result<LoaderBuilder> {
        let dataset = self.open()?;
        let (schema, longest) = (dataset.schema().to_vec(), dataset.sample_bytes_max());
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        schema.into_iter().try_fold(Loader::builder(dataset), |builder, field| {
            Ok(match field.encoding {
                Encoding::Image => builder.decode_field(&field.name, pictures.decoder()?),
                Encoding::Bytes => builder.decode_field(&field.name, Bytes::up_to(longest)),
                _ => builder,
            })
        })
    }

    fn open(&self) -> Result<Arc<dyn Dataset>> {
        self.refuse_foreign()?;
        let path = &self.path;
        Ok(match self.kind.as_str() {
            "images" => Arc::new(Images::open(path)?),
            "records" => {
                let bytes = self.record_bytes.ok_or_else(|| config("source \"records\" needs record_bytes"))?;
                Arc::new(Records::builder(bytes).open(path)?)
            }
            "tokens" => {
                let token = dtype(self.token.as_deref().unwrap_or("u16"))?;
                Arc::new(Tokens::builder(token).window(self.seq_len.unwrap_or(2048)).open(path)?)
            }
            "wds" => Arc::new(self.tar().open(path)?),
            other => return Err(config(format!("source {other:?}: there are images, records, tokens and wds"))),
        })
    }

    fn refuse_foreign(&self) -> Result<()> {
        let given = [
            ("record_bytes", self.record_bytes.is_some(), "records"),
            ("token", self.token.is_some(), "tokens"),
            ("seq_len", self.seq_len.is_some(), "tokens"),
            ("image", self.image.is_some(), "wds"),
            ("columns", self.columns.is_some(), "wds"),
        ];
        match given.iter().find(|(_, given, kind)| *given && self.kind != *kind) {
            Some((name, _, kind)) => Err(config(format!("{name} is for source {kind:?}, not {:?}", self.kind))),
            None => Ok(()),
        }
    }

    /// Without settings the first sample says what members there are.
    fn tar(&self) -> feedline::dataset::TarBuilder {
        let builder = self.image.iter().fold(Tar::builder(), |builder, endings| builder.image(endings));
        self.columns.iter().flatten().fold(builder, |builder, ending| {
            if ending == "cls" || ending.ends_with(".cls") { builder.class(ending) } else { builder.bytes(ending) }
        })
    }
}

impl Pictures {
    /// For training a random part and a flip; else the middle, as validation usually has it.
    fn decoder(&self) -> Result<Image> {
        let size = self.size.ok_or_else(|| config("the source has pictures: decode_size (pixels) is missing"))?;
        let image = if self.augment {
            Image::random_resized_crop(size).flip(0.5)
        } else {
            Image::center_crop(size.saturating_mul(8) / 7, size)
        };
        let layout = match self.layout.as_str() {
            "nhwc" => PixelLayout::Nhwc,
            "nchw" => PixelLayout::Nchw,
            other => return Err(config(format!("layout {other:?}: there are nhwc and nchw"))),
        };
        let (dtype, image) = (dtype(&self.dtype)?, image.layout(layout));
        if dtype == DType::U8 {
            return Ok(image);
        }
        // Mean and deviation of ImageNet, as pretrained models expect.
        Ok(image.dtype(dtype).normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    }
}

fn dtype(name: &str) -> Result<DType> {
    use DType::{BF16, F16, F32, I32, I64, U8, U16, U32};
    let all = [U8, U16, U32, I32, I64, F16, BF16, F32];
    let names = || all.map(DType::name).join(", ");
    all.into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| config(format!("element type {name:?}: there are {}", names())))
}
