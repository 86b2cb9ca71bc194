//! A small convolutional network for the CPU, in candle: four convolutions with batch
//! normalisation, the mean over all positions, and a linear layer.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, BatchNorm, Linear, Module, ModuleT, Optimizer, ParamsAdamW, loss};

use crate::shapes::Rng;

/// Width and height of the pictures the network takes.
pub const SIDE: usize = 48;

/// Output channels, kernel size and stride of each convolution. After them, the sides are 12, 6, 6
/// and 3.
const CONVOLUTIONS: [(usize, usize, usize); 4] = [(32, 7, 4), (64, 3, 2), (64, 3, 1), (64, 3, 2)];
const PEAK_LEARNING_RATE: f64 = 0.01;

/// Sums over some pictures.
#[derive(Default)]
pub struct Score {
    loss: f64,
    correct: usize,
    seen: usize,
}

impl Score {
    pub fn loss(&self) -> f64 {
        self.loss / self.seen as f64
    }

    /// In percent.
    pub fn accuracy(&self) -> f64 {
        100.0 * self.correct as f64 / self.seen as f64
    }

    pub fn seen(&self) -> usize {
        self.seen
    }
}

impl std::ops::AddAssign for Score {
    fn add_assign(&mut self, other: Self) {
        self.loss += other.loss;
        self.correct += other.correct;
        self.seen += other.seen;
    }
}

/// The network and its optimizer.
pub struct Trainer {
    model: Model,
    optimizer: AdamW,
    step: usize,
    steps: usize,
}

impl Trainer {
    /// A new network, to be trained in `steps` steps.
    pub fn new(classes: usize, steps: usize, seed: u64) -> Result<Self> {
        keep_freed_memory();
        let mut parameters = Parameters { rng: Rng::new(seed, 0), vars: Vec::new() };
        let model = Model::new(classes, &mut parameters)?;
        let optimizer = AdamW::new(parameters.vars, ParamsAdamW::default())?;
        Ok(Trainer { model, optimizer, step: 0, steps })
    }

    /// One training step. `images` is `[n, 3, SIDE, SIDE]`, normalised; `labels` is `[n]`.
    pub fn train(&mut self, images: &[f32], labels: &[i64]) -> Result<Score> {
        self.optimizer.set_learning_rate(learning_rate(self.step as f64 / self.steps as f64));
        self.step += 1;
        let (loss, score) = self.score(images, labels, true)?;
        self.optimizer.backward_step(&loss)?;
        Ok(score)
    }

    /// How well the network does on pictures it does not learn from.
    pub fn evaluate(&self, images: &[f32], labels: &[i64]) -> Result<Score> {
        Ok(self.score(images, labels, false)?.1)
    }

    fn score(&self, images: &[f32], labels: &[i64], train: bool) -> Result<(Tensor, Score)> {
        let seen = labels.len();
        // A copy, since candle's tensors own their memory.
        let images = Tensor::from_slice(images, (seen, 3, SIDE, SIDE), &Device::Cpu)?;
        let target = Tensor::from_slice(labels, seen, &Device::Cpu)?;
        let logits = self.model.forward(&images, train)?;
        let loss = loss::cross_entropy(&logits, &target)?;
        let predicted = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        let correct = predicted.iter().zip(labels).filter(|(p, l)| i64::from(**p) == **l).count();
        let sum = f64::from(loss.to_scalar::<f32>()?) * seen as f64;
        Ok((loss, Score { loss: sum, correct, seen }))
    }
}

/// Linear warm-up, then half a cosine down to 0. `done` is the part of the training that is done.
fn learning_rate(done: f64) -> f64 {
    const WARM_UP: f64 = 0.1;
    let part = if done < WARM_UP {
        done / WARM_UP
    } else {
        0.5 + 0.5 * (std::f64::consts::PI * (done - WARM_UP) / (1.0 - WARM_UP)).cos()
    };
    PEAK_LEARNING_RATE * part
}

/// What the optimizer changes, drawn from a seed. (candle's own generator for the CPU takes none.)
struct Parameters {
    rng: Rng,
    vars: Vec<Var>,
}

impl Parameters {
    /// He's initialisation: the values of a layer keep their variance through ReLU.
    fn weight(&mut self, outputs: usize, inputs: usize) -> Result<Tensor> {
        let deviation = (2.0 / inputs as f32).sqrt();
        let values = (0..outputs * inputs).map(|_| deviation * self.rng.normal()).collect();
        self.add(Var::from_vec(values, (outputs, inputs), &Device::Cpu)?)
    }

    fn zeros(&mut self, n: usize) -> Result<Tensor> {
        self.add(Var::zeros(n, DType::F32, &Device::Cpu)?)
    }

    fn ones(&mut self, n: usize) -> Result<Tensor> {
        self.add(Var::ones(n, DType::F32, &Device::Cpu)?)
    }

    fn add(&mut self, var: Var) -> Result<Tensor> {
        let tensor = var.as_tensor().clone();
        self.vars.push(var);
        Ok(tensor)
    }
}

/// Each step frees large tensors, and glibc gives their pages back to the kernel, only to ask for them again. A large
/// block that was freed once raises the size from which it does: training is then a third faster.
fn keep_freed_memory() {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(30 << 20)));
}

struct Model {
    convolutions: Vec<Convolution>,
    head: Linear,
}

impl Model {
    fn new(classes: usize, parameters: &mut Parameters) -> Result<Self> {
        let (mut side, mut channels) = (SIDE, 3);
        let mut convolutions = Vec::new();
        for (outputs, kernel, stride) in CONVOLUTIONS {
            let window = Window { kernel, stride, side };
            convolutions.push(Convolution::new(channels, outputs, window, parameters)?);
            (side, channels) = (side / stride, outputs);
        }
        let bias = parameters.zeros(classes)?;
        let head = Linear::new(parameters.weight(classes, channels)?, Some(bias));
        Ok(Model { convolutions, head })
    }

    /// From `[n, 3, SIDE, SIDE]` to one number for each picture and class: `[n, classes]`.
    fn forward(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let n = images.dim(0)?;
        let mut x = images.flatten_from(1)?.t()?.contiguous()?;
        for convolution in &self.convolutions {
            x = convolution.forward(&x, train)?;
        }
        let channels = self.head.weight().dim(1)?;
        let mean = x.reshape((channels, (), n))?.mean(1)?;
        self.head.forward(&mean.t()?)
    }
}

/// A convolution, batch normalisation and ReLU.
///
/// Input and output have a row for each channel and position and a column for each picture. In
/// this order the convolution is a gather of rows and one matrix product, and so is its gradient.
/// On a CPU that takes less than half the time of candle's `Conv2d`, whose gradient is a transposed
/// convolution without SIMD.
struct Convolution {
    weight: Tensor,
    norm: BatchNorm,
    /// The rows under the kernel, for each channel, place in the kernel and output position.
    rows: Tensor,
}

impl Convolution {
    fn new(inputs: usize, outputs: usize, window: Window, parameters: &mut Parameters) -> Result<Self> {
        let mean = Tensor::zeros(outputs, DType::F32, &Device::Cpu)?;
        let variance = Tensor::ones(outputs, DType::F32, &Device::Cpu)?;
        let (gamma, beta) = (parameters.ones(outputs)?, parameters.zeros(outputs)?);
        Ok(Convolution {
            weight: parameters.weight(outputs, inputs * window.kernel.pow(2))?,
            norm: BatchNorm::new(outputs, mean, variance, gamma, beta, 1e-5)?,
            rows: Tensor::new(window.rows(inputs), &Device::Cpu)?,
        })
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let n = x.dim(1)?;
        let under_kernel = x.index_select(&self.rows, 0)?.reshape((self.weight.dim(1)?, ()))?;
        let x = self.weight.matmul(&under_kernel)?;
        // `BatchNorm` takes the channels in the second dimension.
        let x = self.norm.forward_t(&x.unsqueeze(0)?, train)?;
        x.relu()?.reshape(((), n))
    }
}

/// An index for which candle's `index_select` gives zeros, and its gradient nothing.
const PADDING: u32 = u32::MAX;

/// How a kernel moves over a square input. Half the kernel reaches over the border.
struct Window {
    kernel: usize,
    stride: usize,
    side: usize,
}

impl Window {
    fn rows(&self, channels: usize) -> Vec<u32> {
        let mut rows = Vec::new();
        for channel in 0..channels {
            for (kernel_y, kernel_x) in pairs(self.kernel) {
                for (y, x) in pairs(self.side / self.stride) {
                    let position = self.input(y, kernel_y).zip(self.input(x, kernel_x));
                    rows.push(position.map_or(PADDING, |(y, x)| ((channel * self.side + y) * self.side + x) as u32));
                }
            }
        }
        rows
    }

    /// The input's row (or column) under place `k` of the kernel; none beyond the border.
    fn input(&self, output: usize, k: usize) -> Option<usize> {
        (output * self.stride + k).checked_sub(self.kernel / 2).filter(|&input| input < self.side)
    }
}

/// All pairs of two numbers below `n`, in order.
fn pairs(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n * n).map(move |i| (i / n, i % n))
}
