//! A small convolutional network for the CPU: four convolutions with batch normalisation, the mean over all positions, and
//! a linear layer. Matrix products are ndarray's; the gradients stand below, each next to its layer.
//!
//! Activations are matrices with a row for each channel and position and a column for each picture. In this order a
//! convolution is a gather of rows and one matrix product, and so is its gradient.

use crate::shapes::Rng;
use ndarray::{Array1, Array2, ArrayView2, Axis, ShapeError, Zip, s};

/// Width and height of the pictures the network takes.
pub const SIDE: usize = 48;

/// Output channels, kernel size and stride of each convolution. After them, the sides are 12, 6, 6 and 3.
const CONVOLUTIONS: [(usize, usize, usize); 4] = [(32, 7, 4), (64, 3, 2), (64, 3, 1), (64, 3, 2)];
const PEAK_LEARNING_RATE: f32 = 0.01;

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
    convolutions: Vec<Convolution>,
    head: Linear,
    step: usize,
    steps: usize,
}

impl Trainer {
    /// A new network, to be trained in `steps` steps.
    pub fn new(classes: usize, steps: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed, 0);
        let (mut side, mut channels) = (SIDE, 3);
        let mut convolutions = Vec::new();
        for (outputs, kernel, stride) in CONVOLUTIONS {
            convolutions.push(Convolution::new(channels, outputs, Window { kernel, stride, side }, &mut rng));
            (side, channels) = (side / stride, outputs);
        }
        let head =
            Linear { weight: Parameter::weight(classes, channels, &mut rng), bias: Parameter::new(classes, 0.0) };
        Trainer { convolutions, head, step: 0, steps }
    }

    /// One training step. `images` is `[n, 3, SIDE, SIDE]`, normalised; `labels` is `[n]`, each below the number of classes.
    pub fn train(&mut self, images: &[f32], labels: &[i64]) -> Result<Score, ShapeError> {
        let adam = Adam::at(self.step, self.steps);
        self.step += 1;
        Ok(self.learn(columns(images, labels.len())?, labels, &adam).0)
    }

    /// One step; also the gradient of the loss with respect to `x`.
    fn learn(&mut self, mut x: Array2<f32>, labels: &[i64], adam: &Adam) -> (Score, Array2<f32>) {
        let mut tapes = Vec::new();
        for convolution in &mut self.convolutions {
            let (y, tape) = convolution.train(&x);
            tapes.push(tape);
            x = y;
        }
        let pooled = pool(&x, self.channels());
        let (score, gradient) = cross_entropy(self.head.forward(&pooled), labels);
        let mut gradient = spread(&self.head.backward(&pooled, &gradient, adam), x.nrows());
        for (convolution, tape) in self.convolutions.iter_mut().zip(tapes).rev() {
            gradient = convolution.backward(tape, gradient, adam);
        }
        (score, gradient)
    }

    /// How well the network does on pictures it does not learn from.
    pub fn evaluate(&self, images: &[f32], labels: &[i64]) -> Result<Score, ShapeError> {
        let mut x = columns(images, labels.len())?;
        for convolution in &self.convolutions {
            x = convolution.forward(&x);
        }
        Ok(cross_entropy(self.head.forward(&pool(&x, self.channels())), labels).0)
    }

    /// Channels of the last convolution.
    fn channels(&self) -> usize {
        self.head.weight.value.ncols()
    }
}

/// The mean of each of the `channels` over its positions: `[channels, n]`.
fn pool(x: &Array2<f32>, channels: usize) -> Array2<f32> {
    let positions = x.nrows() / channels;
    Array2::from_shape_fn((channels, x.ncols()), |(channel, n)| {
        x.slice(s![channel * positions..(channel + 1) * positions, n]).sum() / positions as f32
    })
}

/// The gradient of [`pool`]: each of the `rows` gets an equal share of its channel's.
fn spread(gradient: &Array2<f32>, rows: usize) -> Array2<f32> {
    let positions = rows / gradient.nrows();
    Array2::from_shape_fn((rows, gradient.ncols()), |(row, n)| gradient[(row / positions, n)] / positions as f32)
}

/// A column for each picture.
fn columns(images: &[f32], n: usize) -> Result<Array2<f32>, ShapeError> {
    Ok(ArrayView2::from_shape((n, 3 * SIDE * SIDE), images)?.t().as_standard_layout().into_owned())
}

/// The mean loss of all pictures as a score, and its gradient with respect to `logits`, `[classes, n]`.
fn cross_entropy(mut logits: Array2<f32>, labels: &[i64]) -> (Score, Array2<f32>) {
    let mut score = Score { loss: 0.0, correct: 0, seen: labels.len() };
    for (mut column, &label) in logits.axis_iter_mut(Axis(1)).zip(labels) {
        let label = label as usize;
        let max = column.fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        score.correct += usize::from(column[label] == max);
        column.mapv_inplace(|logit| (logit - max).exp());
        column /= column.sum();
        score.loss -= f64::from(column[label].max(f32::MIN_POSITIVE).ln());
        column[label] -= 1.0;
    }
    logits /= labels.len() as f32;
    (score, logits)
}

/// AdamW's settings for one step.
struct Adam {
    rate: f32,
    /// What the moments, which begin at 0, still lack.
    corrections: [f32; 2],
}

impl Adam {
    const DECAYS: [f32; 2] = [0.9, 0.999];
    const WEIGHT_DECAY: f32 = 0.01;

    /// Linear warm-up, then half a cosine down to 0.
    fn at(step: usize, steps: usize) -> Self {
        const WARM_UP: f32 = 0.1;
        let done = step as f32 / steps as f32;
        let part = if done < WARM_UP {
            done / WARM_UP
        } else {
            0.5 + 0.5 * (std::f32::consts::PI * (done - WARM_UP) / (1.0 - WARM_UP)).cos()
        };
        let corrections = Self::DECAYS.map(|decay| 1.0 - decay.powi(step as i32 + 1));
        Adam { rate: PEAK_LEARNING_RATE * part, corrections }
    }
}

/// Numbers that the optimizer changes, with the moments of their gradients.
struct Parameter {
    value: Array2<f32>,
    moments: [Array2<f32>; 2],
}

impl Parameter {
    /// A column of `n` equal numbers.
    fn new(n: usize, value: f32) -> Self {
        Self::from(Array2::from_elem((n, 1), value))
    }

    /// He's initialisation: the values of a layer keep their variance through ReLU.
    fn weight(outputs: usize, inputs: usize, rng: &mut Rng) -> Self {
        let deviation = (2.0 / inputs as f32).sqrt();
        Self::from(Array2::from_shape_fn((outputs, inputs), |_| deviation * rng.normal()))
    }

    fn from(value: Array2<f32>) -> Self {
        let zeros = Array2::zeros(value.dim());
        Parameter { value, moments: [zeros.clone(), zeros] }
    }

    fn update(&mut self, gradient: &Array2<f32>, adam: &Adam) {
        let [first, second] = &mut self.moments;
        let ([a, b], [c, d]) = (Adam::DECAYS, adam.corrections);
        Zip::from(&mut self.value).and(first).and(second).and(gradient).for_each(|value, first, second, &g| {
            *first = a * *first + (1.0 - a) * g;
            *second = b * *second + (1.0 - b) * g * g;
            *value -= adam.rate * (Adam::WEIGHT_DECAY * *value + *first / c / ((*second / d).sqrt() + 1e-8));
        });
    }
}

/// The last layer: from the means of the channels to one number for each class.
struct Linear {
    weight: Parameter,
    bias: Parameter,
}

impl Linear {
    fn forward(&self, x: &Array2<f32>) -> Array2<f32> {
        self.weight.value.dot(x) + &self.bias.value
    }

    fn backward(&mut self, x: &Array2<f32>, gradient: &Array2<f32>, adam: &Adam) -> Array2<f32> {
        let below = self.weight.value.t().dot(gradient);
        self.weight.update(&gradient.dot(&x.t()), adam);
        self.bias.update(&gradient.sum_axis(Axis(1)).insert_axis(Axis(1)), adam);
        below
    }
}

/// A convolution, batch normalisation and ReLU.
struct Convolution {
    weight: Parameter,
    gamma: Parameter,
    beta: Parameter,
    /// Running mean and variance of each output channel: they stand in for the batch's where nothing is learned.
    running: [Array1<f32>; 2],
    /// The input row under the kernel for each input channel, place in the kernel and output position; none beyond the border.
    rows: Vec<Option<usize>>,
}

/// What the gradient of a [`Convolution`] needs of its forward pass.
struct Tape {
    inputs: usize,
    under_kernel: Array2<f32>,
    normalised: Array2<f32>,
    deviation: Array2<f32>,
    positive: Array2<bool>,
}

impl Convolution {
    const EPSILON: f32 = 1e-5;
    const MOMENTUM: f32 = 0.1;

    fn new(inputs: usize, outputs: usize, window: Window, rng: &mut Rng) -> Self {
        Convolution {
            weight: Parameter::weight(outputs, inputs * window.kernel.pow(2), rng),
            gamma: Parameter::new(outputs, 1.0),
            beta: Parameter::new(outputs, 0.0),
            running: [Array1::zeros(outputs), Array1::ones(outputs)],
            rows: window.rows(inputs),
        }
    }

    fn forward(&self, x: &Array2<f32>) -> Array2<f32> {
        let [mean, variance] = &self.running;
        let z = self.weight.value.dot(&self.gather(x)) - mean.view().insert_axis(Axis(1));
        let normalised = z / variance.mapv(|variance| (variance + Self::EPSILON).sqrt()).insert_axis(Axis(1));
        let y = normalised * &self.gamma.value + &self.beta.value;
        self.fold(y.mapv_into(|y| y.max(0.0)), x.ncols())
    }

    /// The forward pass with the batch's own mean and variance.
    fn train(&mut self, x: &Array2<f32>) -> (Array2<f32>, Tape) {
        let under_kernel = self.gather(x);
        let z = self.weight.value.dot(&under_kernel);
        let (mean, variance) = (z.sum_axis(Axis(1)) / z.ncols() as f32, z.var_axis(Axis(1), 0.0));
        let deviation = variance.mapv(|variance| (variance + Self::EPSILON).sqrt()).insert_axis(Axis(1));
        let normalised = (z - mean.view().insert_axis(Axis(1))) / &deviation;
        for (running, now) in self.running.iter_mut().zip([mean, variance]) {
            *running += &((now - &*running) * Self::MOMENTUM);
        }
        let y = &normalised * &self.gamma.value + &self.beta.value;
        let positive = y.mapv(|y| y > 0.0);
        let y = self.fold(y.mapv_into(|y| y.max(0.0)), x.ncols());
        (y, Tape { inputs: x.nrows(), under_kernel, normalised, deviation, positive })
    }

    /// Learns from the gradient of the output and returns that of the input.
    fn backward(&mut self, tape: Tape, gradient: Array2<f32>, adam: &Adam) -> Array2<f32> {
        let mut gradient = gradient.into_shape_with_order(tape.positive.dim()).expect("as many numbers as the output");
        gradient.zip_mut_with(&tape.positive, |gradient, positive| *gradient *= f32::from(u8::from(*positive)));
        let columns = gradient.ncols() as f32;
        let beta = gradient.sum_axis(Axis(1)).insert_axis(Axis(1));
        let gamma = (&gradient * &tape.normalised).sum_axis(Axis(1)).insert_axis(Axis(1));
        let scale = &self.gamma.value / &tape.deviation;
        let gradient = (gradient - &beta / columns - tape.normalised * &(&gamma / columns)) * scale;
        let below = self.scatter(&self.weight.value.t().dot(&gradient), tape.inputs);
        self.weight.update(&gradient.dot(&tape.under_kernel.t()), adam);
        self.gamma.update(&gamma, adam);
        self.beta.update(&beta, adam);
        below
    }

    /// From a row for each channel to one for each channel and position.
    fn fold(&self, y: Array2<f32>, n: usize) -> Array2<f32> {
        let rows = y.len() / n;
        y.into_shape_with_order((rows, n)).expect("as many numbers as before")
    }

    /// A row for each input channel and place in the kernel, a column for each output position and picture.
    fn gather(&self, x: &Array2<f32>) -> Array2<f32> {
        let n = x.ncols();
        let mut under_kernel = Vec::with_capacity(self.rows.len() * n);
        for row in &self.rows {
            match row {
                Some(row) => under_kernel.extend(x.row(*row)),
                None => under_kernel.resize(under_kernel.len() + n, 0.0),
            }
        }
        let shape = (self.weight.value.ncols(), under_kernel.len() / self.weight.value.ncols());
        Array2::from_shape_vec(shape, under_kernel).expect("a row for each weight")
    }

    /// The gradient of [`gather`](Self::gather): the sum over all places to which an input row went.
    fn scatter(&self, gradient: &Array2<f32>, inputs: usize) -> Array2<f32> {
        let n = gradient.len() / self.rows.len();
        let gradient = gradient.to_shape((self.rows.len(), n)).expect("as many numbers as were gathered");
        let mut below = Array2::zeros((inputs, n));
        for (row, gradient) in self.rows.iter().zip(gradient.rows()) {
            if let Some(row) = row {
                let mut below = below.row_mut(*row);
                below += &gradient;
            }
        }
        below
    }
}

/// How a kernel moves over a square input. Half the kernel reaches over the border.
struct Window {
    kernel: usize,
    stride: usize,
    side: usize,
}

impl Window {
    fn rows(&self, channels: usize) -> Vec<Option<usize>> {
        let mut rows = Vec::new();
        for channel in 0..channels {
            for (kernel_y, kernel_x) in pairs(self.kernel) {
                for (y, x) in pairs(self.side / self.stride) {
                    let position = self.input(y, kernel_y).zip(self.input(x, kernel_x));
                    rows.push(position.map(|(y, x)| (channel * self.side + y) * self.side + x));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pictures(n: usize) -> Array2<f32> {
        let mut rng = Rng::new(5, 1);
        Array2::from_shape_fn((3 * SIDE * SIDE, n), |_| rng.normal())
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let (mut trainer, labels, x) = (Trainer::new(3, 10, 1), [0, 2, 1, 1], pictures(4));
        let still = Adam { rate: 0.0, corrections: [1.0, 1.0] };
        let (_, gradient) = trainer.learn(x.clone(), &labels, &still);
        let length = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        let mut loss = |step: f32| trainer.learn(&x + &(&gradient * (step / length)), &labels, &still).0.loss();
        let slope = (loss(0.02) - loss(-0.02)) / 0.04;
        assert!((slope / f64::from(length) - 1.0).abs() < 0.02, "slope {slope}, gradient {length}");
    }

    #[test]
    fn the_network_learns_a_few_pictures_by_heart() {
        let (mut trainer, labels, x) =
            (Trainer::new(3, 30, 1), [0, 2, 1, 1], pictures(4).t().as_standard_layout().into_owned());
        let images = x.as_slice().expect("standard layout");
        let losses: Vec<f64> = (0..30).map(|_| trainer.train(images, &labels).unwrap().loss()).collect();
        assert!(losses[29] < 0.02 && losses[0] > 0.5, "{losses:?}");
    }
}
