//! From a path and a few settings to a dataset with its decoders.

use crate::error::config;
use feedline::dataset::{Dataset, Images, Records, Tar, Tokens};
use feedline::decode::{Bytes, Image, PixelLayout};
use feedline::device::Finish;
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

/// Mean and standard deviation, in units of 0..=1: one per channel, or one for all.
pub type Normalize = [Vec<f32>; 2];

/// What becomes of pictures.
pub struct Pictures {
    pub size: Option<u32>,
    pub augment: Option<bool>,
    /// What `augment` comes to.
    pub random: bool,
    pub float_dtype: Option<String>,
    pub normalize: Option<Normalize>,
    pub channels_first: bool,
}

impl Source {
    /// The dataset in a builder, with a decoder for each field that needs one.
    pub fn builder(&self, pictures: &Pictures) -> Result<LoaderBuilder> {
        let dataset = self.open()?;
        let (schema, longest) = (dataset.schema().to_vec(), dataset.sample_bytes_max());
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        if schema.iter().all(|field| field.encoding != Encoding::Image) {
            pictures.refuse()?;
        }
        schema.into_iter().try_fold(Loader::builder(dataset), |builder, field| {
            Ok(match field.encoding {
                Encoding::Image => {
                    let builder = builder.decode_field(&field.name, pictures.decoder()?);
                    pictures.finish()?.into_iter().fold(builder, |builder, finish| builder.finish(&field.name, finish))
                }
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
    /// For training a random part and a flip; else the middle, as validation usually has it. Bytes in any case.
    fn decoder(&self) -> Result<Image> {
        let size = self.size.ok_or_else(|| config("the source has pictures: decode_size (pixels) is missing"))?;
        let image = if self.random {
            Image::random_resized_crop(size).flip(0.5)
        } else {
            Image::center_crop(size.saturating_mul(8) / 7, size)
        };
        // Floats get their layout when they are made.
        let planes = self.channels_first && self.float_dtype.is_none();
        Ok(image.layout(if planes { PixelLayout::Nchw } else { PixelLayout::Nhwc }))
    }

    /// What makes floats of them.
    fn finish(&self) -> Result<Option<Finish>> {
        let Some(name) = &self.float_dtype else {
            return match self.normalize {
                None => Ok(None),
                Some(_) => Err(config("normalize makes floats: say float_dtype, \"f32\", \"f16\" or \"bf16\"")),
            };
        };
        let mut finish = Finish::to(dtype(name)?);
        if let Some([mean, std]) = &self.normalize {
            finish = finish.mean_std(mean, std);
        }
        Ok(Some(if self.channels_first { finish.channels_first() } else { finish }))
    }

    /// For a source that has none.
    fn refuse(&self) -> Result<()> {
        let given = [
            ("decode_size", self.size.is_some()),
            ("augment", self.augment.is_some()),
            ("float_dtype", self.float_dtype.is_some()),
            ("normalize", self.normalize.is_some()),
            ("channels_first", self.channels_first),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(config(format!("{name} is for pictures, and the source has none"))),
            None => Ok(()),
        }
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
