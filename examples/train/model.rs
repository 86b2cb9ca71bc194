//! A small convolutional network for the CPU: four convolutions, the mean over all positions, and a
//! linear layer. Matrix products are ndarray's; the gradients stand below, each next to its layer.
//!
//! Activations are matrices with a row for each channel and position and a column for each picture.
//! In this order a convolution is a gather of rows and one matrix product, and so is its gradient.

use feedline::order::Draws;
use ndarray::{Array2, ArrayView2, Axis, ShapeError, Zip, s};

/// Width and height of the pictures the network takes.
pub const SIDE: usize = 48;

/// Output channels, kernel size and stride of each convolution. After them, the sides are 12, 6, 6
/// and 3.
const CONVOLUTIONS: [(usize, usize, usize); 4] = [(32, 7, 4), (64, 3, 2), (64, 3, 1), (64, 3, 2)];
const PEAK_LEARNING_RATE: f32 = 0.003;

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
    head: Layer,
    step: usize,
    steps: usize,
}

impl Trainer {
    /// A new network, to be trained in `steps` steps.
    pub fn new(classes: usize, steps: usize, seed: u64) -> Self {
        let mut draws = Draws::new(seed, 0, 0, "weights");
        let mut side = SIDE;
        let mut channels = 3;
        let mut convolutions = Vec::new();
        for (outputs, kernel, stride) in CONVOLUTIONS {
            let layer = Layer::new(outputs, channels * kernel.pow(2), &mut draws);
            convolutions.push(Convolution {
                layer,
                rows: Window {
                    kernel,
                    stride,
                    side,
                }
                .rows(channels),
            });
            side /= stride;
            channels = outputs;
        }
        let head = Layer::new(classes, channels, &mut draws);
        Trainer {
            convolutions,
            head,
            step: 0,
            steps,
        }
    }

    /// One training step. `images` is `[n, 3, SIDE, SIDE]`, normalised; `labels` is `[n]`, each
    /// below the number of classes.
    pub fn train(&mut self, images: &[f32], labels: &[i64]) -> Result<Score, ShapeError> {
        let adam = Adam::at(self.step, self.steps);
        self.step += 1;
        Ok(self.learn(columns(images, labels.len())?, labels, &adam).0)
    }

    /// One step; also the gradient of the loss with respect to `x`.
    fn learn(&mut self, mut x: Array2<f32>, labels: &[i64], adam: &Adam) -> (Score, Array2<f32>) {
        let mut tapes = Vec::new();
        for convolution in &self.convolutions {
            let (y, tape) = convolution.forward(&x);
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
        let x = self
            .convolutions
            .iter()
            .fold(columns(images, labels.len())?, |x, layer| {
                layer.forward(&x).0
            });
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
        x.slice(s![channel * positions..(channel + 1) * positions, n])
            .sum()
            / positions as f32
    })
}

/// The gradient of [`pool`]: each of the `rows` gets an equal share of its channel's.
fn spread(gradient: &Array2<f32>, rows: usize) -> Array2<f32> {
    let positions = rows / gradient.nrows();
    Array2::from_shape_fn((rows, gradient.ncols()), |(row, n)| {
        gradient[(row / positions, n)] / positions as f32
    })
}

/// A column for each picture.
fn columns(images: &[f32], n: usize) -> Result<Array2<f32>, ShapeError> {
    Ok(ArrayView2::from_shape((n, 3 * SIDE * SIDE), images)?
        .t()
        .as_standard_layout()
        .into_owned())
}

/// The mean loss of all pictures as a score, and its gradient with respect to `logits`,
/// `[classes, n]`.
fn cross_entropy(mut logits: Array2<f32>, labels: &[i64]) -> (Score, Array2<f32>) {
    let mut score = Score {
        loss: 0.0,
        correct: 0,
        seen: labels.len(),
    };
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
        Adam {
            rate: PEAK_LEARNING_RATE * part,
            corrections,
        }
    }
}

/// Numbers that the optimizer changes, with the moments of their gradients.
struct Parameter {
    value: Array2<f32>,
    moments: [Array2<f32>; 2],
}

impl Parameter {
    fn new(value: Array2<f32>) -> Self {
        let zeros = Array2::zeros(value.dim());
        Parameter {
            value,
            moments: [zeros.clone(), zeros],
        }
    }

    fn update(&mut self, gradient: &Array2<f32>, adam: &Adam) {
        let [first, second] = &mut self.moments;
        let [a, b] = Adam::DECAYS;
        let [c, d] = adam.corrections;
        Zip::from(&mut self.value)
            .and(first)
            .and(second)
            .and(gradient)
            .for_each(|value, first, second, &g| {
                *first = a * *first + (1.0 - a) * g;
                *second = b * *second + (1.0 - b) * g * g;
                *value -= adam.rate
                    * (Adam::WEIGHT_DECAY * *value + *first / c / ((*second / d).sqrt() + 1e-8));
            });
    }
}

/// A weighted sum of all inputs for each output, and a bias.
struct Layer {
    weight: Parameter,
    bias: Parameter,
}

impl Layer {
    /// He's initialisation: the values of a layer keep their variance through ReLU.
    fn new(outputs: usize, inputs: usize, draws: &mut Draws) -> Self {
        let most = (6.0 / inputs as f64).sqrt();
        let weight =
            Array2::from_shape_fn((outputs, inputs), |_| draws.range_f64(-most, most) as f32);
        Self {
            weight: Parameter::new(weight),
            bias: Parameter::new(Array2::zeros((outputs, 1))),
        }
    }

    fn forward(&self, x: &Array2<f32>) -> Array2<f32> {
        self.weight.value.dot(x) + &self.bias.value
    }

    fn backward(&mut self, x: &Array2<f32>, gradient: &Array2<f32>, adam: &Adam) -> Array2<f32> {
        let below = self.weight.value.t().dot(gradient);
        self.weight.update(&gradient.dot(&x.t()), adam);
        self.bias
            .update(&gradient.sum_axis(Axis(1)).insert_axis(Axis(1)), adam);
        below
    }
}

/// A convolution and ReLU: a layer over the rows under its kernel.
struct Convolution {
    layer: Layer,
    /// The input row under the kernel for each input channel, place in the kernel and output
    /// position; none beyond the border.
    rows: Vec<Option<usize>>,
}

/// What the gradient of a [`Convolution`] needs of its forward pass.
struct Tape {
    inputs: usize,
    under_kernel: Array2<f32>,
    positive: Array2<bool>,
}

impl Convolution {
    fn forward(&self, x: &Array2<f32>) -> (Array2<f32>, Tape) {
        let under_kernel = self.gather(x);
        let y = self.layer.forward(&under_kernel);
        let positive = y.mapv(|y| y > 0.0);
        let y = self.fold(y.mapv_into(|y| y.max(0.0)), x.ncols());
        (
            y,
            Tape {
                inputs: x.nrows(),
                under_kernel,
                positive,
            },
        )
    }

    /// Learns from the gradient of the output and returns that of the input.
    fn backward(&mut self, tape: Tape, gradient: Array2<f32>, adam: &Adam) -> Array2<f32> {
        let mut gradient = gradient
            .into_shape_with_order(tape.positive.dim())
            .expect("as many numbers as the output");
        gradient.zip_mut_with(&tape.positive, |gradient, positive| {
            *gradient *= f32::from(u8::from(*positive))
        });
        let below = self.layer.backward(&tape.under_kernel, &gradient, adam);
        self.scatter(&below, tape.inputs)
    }

    /// From a row for each channel to one for each channel and position.
    fn fold(&self, y: Array2<f32>, n: usize) -> Array2<f32> {
        let rows = y.len() / n;
        y.into_shape_with_order((rows, n))
            .expect("as many numbers as before")
    }

    /// A row for each input channel and place in the kernel, a column for each output position and
    /// picture.
    fn gather(&self, x: &Array2<f32>) -> Array2<f32> {
        let n = x.ncols();
        let mut under_kernel = Vec::with_capacity(self.rows.len() * n);
        for row in &self.rows {
            match row {
                Some(row) => under_kernel.extend(x.row(*row)),
                None => under_kernel.resize(under_kernel.len() + n, 0.0),
            }
        }
        let shape = (
            self.layer.weight.value.ncols(),
            under_kernel.len() / self.layer.weight.value.ncols(),
        );
        Array2::from_shape_vec(shape, under_kernel).expect("a row for each weight")
    }

    /// The gradient of [`gather`](Self::gather): the sum over all places to which an input row
    /// went.
    fn scatter(&self, gradient: &Array2<f32>, inputs: usize) -> Array2<f32> {
        let n = gradient.len() / self.rows.len();
        let gradient = gradient
            .to_shape((self.rows.len(), n))
            .expect("as many numbers as were gathered");
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
        (output * self.stride + k)
            .checked_sub(self.kernel / 2)
            .filter(|&input| input < self.side)
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
        let mut draws = Draws::new(5, 1, 0, "pictures");
        Array2::from_shape_fn((3 * SIDE * SIDE, n), |_| draws.range_f64(-1.7, 1.7) as f32)
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let mut trainer = Trainer::new(3, 10, 1);
        let labels = [0, 2, 1, 1];
        let x = pictures(4);
        let still = Adam {
            rate: 0.0,
            corrections: [1.0, 1.0],
        };
        let (_, gradient) = trainer.learn(x.clone(), &labels, &still);
        let length = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        let mut loss = |step: f32| {
            trainer
                .learn(&x + &(&gradient * (step / length)), &labels, &still)
                .0
                .loss()
        };
        let slope = (loss(0.02) - loss(-0.02)) / 0.04;
        assert!(
            (slope / f64::from(length) - 1.0).abs() < 0.02,
            "slope {slope}, gradient {length}"
        );
    }

    #[test]
    fn the_network_learns_a_few_pictures_by_heart() {
        let mut trainer = Trainer::new(3, 30, 1);
        let labels = [0, 2, 1, 1];
        let x = pictures(4).t().as_standard_layout().into_owned();
        let images = x.as_slice().expect("standard layout");
        let losses: Vec<f64> = (0..30)
            .map(|_| trainer.train(images, &labels).unwrap().loss())
            .collect();
        assert!(losses[29] < 0.02 && losses[0] > 0.5, "{losses:?}");
    }
}
