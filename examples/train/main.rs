//! Learns to tell pictures apart, from files that come through io_uring and O_DIRECT, in a few
//! minutes on a CPU.
//!
//! ```text
//! cargo run --release --example train                     # makes a small set of shapes first
//! cargo run --release --example train -- --data DIR       # your own pictures, a folder per class
//! ```
//!
//! The network computes on the CPU. `examples/pytorch/train.py` trains on a GPU.

mod model;
mod shapes;

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use feedline::dataset::{Dataset, DatasetExt, Images};
use feedline::decode::{Image, PixelLayout};
use feedline::storage::{Direct, Mode};
use feedline::tensor::DType;
use feedline::{Batch, ErrorKind, Loader, LoaderBuilder, Order};
use indicatif::{ProgressBar, ProgressStyle};
use model::{SIDE, Score, Trainer};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Share of the pictures that the network never learns from.
const HELD_OUT: f64 = 0.15;
/// Pictures per class of the made set.
const PER_CLASS: usize = 450;
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];

/// Trains a small convolutional network on the CPU, fed by feedline.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Folder with a folder of pictures per class
    /// [default: a set of shapes, made once below target/]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Passes over the training pictures
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Pictures per step
    #[arg(long, default_value_t = 16, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch: usize,
    /// Decode workers; the network computes on the other cores
    #[arg(long, default_value_t = 1, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    workers: usize,
    /// Seed of the network, the order and the augmentation
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

type Anyhow<T> = Result<T, Box<dyn Error>>;

fn main() {
    if let Err(error) = run(&Args::parse()) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Anyhow<()> {
    let begin = Instant::now();
    let dir = match &args.data {
        Some(dir) => dir.clone(),
        None => made_shapes()?,
    };
    let images = Images::open(&dir)?;
    let classes = images.classes().len();
    if classes < 2 {
        return Err(format!(
            "{}: {classes} class folders; there must be two or more, each with the pictures of one class",
            dir.display()
        )
        .into());
    }
    println!("{}", images.describe());
    let (held_out, training) = images.split(HELD_OUT, args.seed)?;
    println!(
        "{} to learn from, {} held out",
        training.len(),
        held_out.len()
    );

    if held_out.len() == 0 {
        return Err("too few pictures: none is left to test with".into());
    }

    let augmented = decoder(
        Image::random_resized_crop(SIDE as u32)
            .scale(0.5, 1.0)
            .flip(0.5),
    );
    let order = Order::shuffled(args.seed);
    let loader = open(
        || {
            Loader::builder(training.clone())
                .decode(augmented.clone())
                .order(order.clone())
        },
        args,
    )?;
    println!("memory\n{}", loader.plan());

    let steps = loader.batches_per_epoch() * args.epochs;
    let mut trainer = Trainer::new(classes, steps as usize, args.seed);
    for epoch in 0..args.epochs {
        let (score, seconds) = train_epoch(&loader, &mut trainer, epoch)?;
        println!(
            "epoch {:2}  loss {:.3}  accuracy {:5.1} %  {:5.0} images/s",
            epoch + 1,
            score.loss(),
            score.accuracy(),
            score.seen() as f64 / seconds,
        );
    }

    let plain = decoder(Image::resize(SIDE as u32, SIDE as u32));
    let test = open(
        || Loader::builder(held_out.clone()).decode(plain.clone()),
        args,
    )?;
    let mut score = Score::default();
    for batch in test.epoch(0)? {
        let batch = batch?;
        let (images, labels) = tensors(&batch)?;
        score += trainer.evaluate(images, labels)?;
    }
    println!("\n{}\n", loader.report());
    println!(
        "held-out accuracy {:.1} % of {} pictures; {:.0} s in all",
        score.accuracy(),
        score.seen(),
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

fn decoder(image: Image) -> Image {
    image
        .dtype(DType::F32)
        .layout(PixelLayout::Nchw)
        .normalize(MEAN, STD)
}

/// The loader with io_uring past the page cache, to show the whole way; where that is refused,
/// whatever works.
fn open(make: impl Fn() -> LoaderBuilder, args: &Args) -> Anyhow<Loader> {
    let make = || make().batch_size(args.batch).workers(args.workers);
    match make()
        .tuning(|t| t.reader(Mode::Uring).direct(Direct::Auto))
        .build()
    {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            println!("note: {error}");
            Ok(make().build()?)
        }
        result => Ok(result?),
    }
}

fn train_epoch(loader: &Loader, trainer: &mut Trainer, epoch: u64) -> Anyhow<(Score, f64)> {
    let begin = Instant::now();
    let batches = loader.epoch(epoch)?;
    let bar = progress(
        batches.len() as u64,
        &format!("epoch {:2}", epoch + 1),
        "batches",
    );
    let mut score = Score::default();
    for batch in batches {
        let batch = batch?;
        let (images, labels) = tensors(&batch)?;
        score += trainer.train(images, labels)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((score, begin.elapsed().as_secs_f64()))
}

/// `[n, 3, SIDE, SIDE]` and `[n]`: views of the batch's memory, no copy.
fn tensors(batch: &Batch) -> Anyhow<(&[f32], &[i64])> {
    Ok((
        batch.field("image")?.as_slice()?,
        batch.field("label")?.as_slice()?,
    ))
}

/// The folder of the made set. Its name tells what it was made from, so that another set gets
/// another folder.
fn made_shapes() -> Anyhow<PathBuf> {
    // In the checkout if cargo runs it, else in the present folder.
    let root = match std::env::var_os("CARGO_MANIFEST_DIR") {
        Some(examples) => Path::new(&examples).join(".."),
        None => PathBuf::new(),
    };
    let dir = root.join(format!("target/feedline-shapes/plain-{PER_CLASS}"));
    let bar = progress(
        (PER_CLASS * shapes::CLASSES.len()) as u64,
        "making pictures",
        "pictures",
    );
    let made = shapes::make_shapes(&dir, PER_CLASS, 1, |done| bar.set_position(done));
    bar.finish_and_clear();
    made.map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
    Ok(dir)
}

/// Drawn on terminals only.
fn progress(len: u64, what: &str, unit: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(&format!("{what} {{wide_bar}} {{pos}}/{{len}} {unit}"));
    ProgressBar::new(len).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
