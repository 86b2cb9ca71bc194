//! Loader settings for reading, decoding and delivery, shared by measuring examples.

use crate::source::{one_of, with};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use feedline::dataset::{Dataset, DatasetExt};
use feedline::decode::{Bytes, Image, Limits, PixelLayout};
use feedline::device::Gds;
use feedline::storage::{Cache, Direct, Mode};
use feedline::tensor::{DType, Encoding};
use feedline::{Device, Loader, LoaderBuilder, Order, Rank};
use std::error::Error;
use std::sync::Arc;

/// Settings of the loader.
#[derive(Args)]
pub struct Settings {
    /// Rows per batch
    #[arg(long, default_value_t = 256, value_parser = at_least_one())]
    pub batch: usize,
    /// Decode workers [default: one per core]
    #[arg(long, value_parser = at_least_one())]
    pub workers: Option<usize>,
    /// Batches in memory at once, including the consumer's [default: 4 to 16 by their size]
    #[arg(long, value_parser = at_least_one())]
    pub slots: Option<usize>,
    /// Images: RandomResizedCrop to N × N pixels, with horizontal flip
    #[arg(long, default_value_t = 224, value_parser = clap::value_parser!(u32).range(1..))]
    pub crop: u32,
    /// Images: element type of the batch (floats are normalised with ImageNet's mean and deviation)
    #[arg(long, default_value = "u8", value_parser = one_of(&TYPES))]
    pub dtype: DType,
    /// Images: order of dimensions
    #[arg(long, default_value = "nhwc", value_parser = one_of(&LAYOUTS))]
    pub layout: PixelLayout,
    /// Images: pixels of the largest one
    #[arg(long, default_value_t = Limits::default().pixels)]
    pub max_pixels: u64,
    /// Images: turn JPEGs upright by their EXIF data [default: as stored]
    #[arg(long)]
    pub exif_orientation: bool,
    /// Storage reader
    #[arg(long, default_value = "auto", value_parser = one_of(&READERS))]
    pub reader: Mode,
    /// Whether reads bypass the page cache
    #[arg(long, default_value = "auto", value_parser = one_of(&BYPASS))]
    pub direct: Direct,
    /// Maximum reads in flight [default: 32; 128 for io_uring through the page cache]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub depth: Option<u32>,
    /// Shuffle with this seed [default: sequential]
    #[arg(long)]
    pub shuffle: Option<u64>,
    /// Shuffle within groups of this many chunks: row groups, compressed shards, or runs of some 32
    /// MiB [default: over all samples]
    #[arg(long, requires = "shuffle")]
    pub window: Option<usize>,
    /// Device of the batches: auto, host or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: Device,
    /// GPUDirect Storage for raw fields: auto, require or off
    #[arg(long, default_value = "auto")]
    pub gds: Gds,
    /// Memory budget in MiB [default: the need of the other settings]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub budget_mib: Option<u32>,
    /// Objects and files on network mounts: keep them in this folder on a local disk
    #[arg(long)]
    pub cache: Option<std::path::PathBuf>,
    /// Limit of this folder in GiB, such as 0.5 [default: the disk less 5 %, at most 8 GiB]
    #[arg(long, requires = "cache", value_parser = gibibytes)]
    pub cache_gib: Option<f64>,
    /// Rank of this process and number of all, such as 0/4 [default: the only process]
    #[arg(long, value_parser = shard)]
    pub shard: Option<Rank>,
    /// Drop the files from the page cache first
    #[arg(long)]
    pub cold: bool,
}

const TYPES: [(&str, DType); 4] = [
    ("u8", DType::U8),
    ("f32", DType::F32),
    ("f16", DType::F16),
    ("bf16", DType::BF16),
];
const LAYOUTS: [(&str, PixelLayout); 2] =
    [("nhwc", PixelLayout::Nhwc), ("nchw", PixelLayout::Nchw)];
const READERS: [(&str, Mode); 4] = [
    ("auto", Mode::Auto),
    ("uring", Mode::Uring),
    ("pread", Mode::Pread),
    ("mmap", Mode::Mmap),
];
const BYPASS: [(&str, Direct); 3] = [
    ("auto", Direct::Auto),
    ("on", Direct::On),
    ("off", Direct::Off),
];

impl Settings {
    /// Whether reads always bypass the page cache.
    #[allow(dead_code, reason = "not every example warns of cached files")]
    pub fn past_cache(&self) -> bool {
        self.direct == Direct::On
    }

    /// A loader of `dataset` with these settings. Without `decode` it delivers pictures as stored.
    ///
    /// Errors: of reading the lengths of stored bytes.
    pub fn loader(
        &self,
        dataset: Arc<dyn Dataset>,
        decode: bool,
    ) -> feedline::Result<LoaderBuilder> {
        let mut builder = self.configure(Loader::builder(dataset.clone()));
        for (number, field) in dataset.schema().iter().enumerate() {
            builder = match field.encoding {
                Encoding::Image if decode => builder.decode_field(&field.name, self.pictures()),
                Encoding::Image | Encoding::Bytes => {
                    let most = dataset.field_bytes_max(number)?.max(1) as usize;
                    builder.decode_field(&field.name, Bytes::up_to(most))
                }
                _ => builder,
            };
        }
        Ok(builder)
    }

    fn pictures(&self) -> Image {
        let decoder = Image::random_resized_crop(self.crop)
            .flip(0.5)
            .dtype(self.dtype)
            .layout(self.layout);
        let decoder = decoder
            .limits(Limits::of_pixels(self.max_pixels))
            .exif_orientation(self.exif_orientation);
        if self.dtype == DType::U8 {
            return decoder;
        }
        decoder.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    }

    fn configure(&self, builder: LoaderBuilder) -> LoaderBuilder {
        let builder = builder
            .batch_size(self.batch)
            .order(match (self.shuffle, self.window) {
                (None, _) => Order::sequential(),
                (Some(seed), None) => Order::shuffled(seed),
                (Some(seed), Some(chunks)) => Order::windowed(seed, chunks),
            })
            .tuning(|t| t.reader(self.reader).direct(self.direct).gds(self.gds))
            .device(self.device.clone());
        let builder = with(builder, self.shard, LoaderBuilder::rank);
        let builder = with(builder, self.workers, LoaderBuilder::workers);
        let builder = with(builder, self.depth, |builder, depth| {
            builder.tuning(|t| t.depth(depth))
        });
        let builder = with(builder, self.slots, |builder, slots| {
            builder.tuning(|t| t.slots(slots))
        });
        let builder = with(builder, self.budget_mib, |builder, _| {
            builder.memory_budget(self.budget())
        });
        with(
            builder,
            self.cache.as_ref().map(Cache::at),
            |builder, cache| {
                let limit = self.cache_gib.map(|gib| (gib * f64::from(1 << 30)) as u64);
                builder.cache(with(cache, limit, Cache::capacity))
            },
        )
    }

    /// Most bytes of memory.
    pub fn budget(&self) -> usize {
        self.budget_mib
            .map_or(usize::MAX, |mib| (mib as usize) << 20)
    }
}

/// Parser of arguments: an integer of at least 1.
fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// Parser of arguments: a number of seconds above 0.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        _ => Err("expected a number of seconds above 0".into()),
    }
}

/// Parser of arguments: a size in GiB, also 0.
fn gibibytes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(gib) if gib.is_finite() && gib >= 0.0 => Ok(gib),
        _ => Err("expected a number of GiB".into()),
    }
}

/// Parser of arguments: `rank/world`.
fn shard(text: &str) -> Result<Rank, String> {
    let numbers = text
        .split_once('/')
        .and_then(|(rank, world)| Some((rank.parse().ok()?, world.parse().ok()?)));
    let (rank, world) = numbers.ok_or("expected rank/world, such as 0/4")?;
    Rank::new(rank, world).map_err(|error| error.to_string())
}

/// Drops the files from the page cache. Pages in use stay, and so do unwritten ones: hence the
/// sync.
pub fn drop_from_cache(dataset: &impl Dataset) -> Result<(), Box<dyn Error>> {
    let sources = dataset.sources();
    for id in sources.ids().filter(|id| sources.bytes_of(*id).is_none()) {
        let path = sources.path(id);
        if path
            .as_os_str()
            .as_encoded_bytes()
            .windows(3)
            .any(|three| three == b"://")
        {
            return Err(format!(
                "{}: an object has no pages in the page cache; leave out --cold",
                path.display()
            )
            .into());
        }
        let file =
            std::fs::File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        // Unwritten pages cannot be dropped. Read-only media refuse to sync, and have none.
        let _ = file.sync_data();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}
