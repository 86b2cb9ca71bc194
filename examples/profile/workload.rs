//! The workloads of MLPerf Storage, from its configurations (mlcommons/storage): the data of one
//! accelerator, and the length of its training step.
//!
//! Limits: bytes of a sample are means. Generated samples have constant sizes, except pictures.

use crate::source::Source;
use clap::ValueEnum;
use std::fmt;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    Unet3d,
    Resnet50,
    Cosmoflow,
    Retinanet,
    Flux,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Accelerator {
    A100,
    H100,
    B200,
}

/// Storage format of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Npz,
    TfRecord,
    Jpeg,
    Parquet,
}

/// One training job on one accelerator.
#[derive(Debug, PartialEq)]
pub struct Benchmark {
    pub workload: Workload,
    pub accelerator: Accelerator,
    pub format: Format,
    pub batch: usize,
    pub sample_bytes: u64,
    /// Samples per file.
    pub samples_per_file: u64,
    pub step_s: f64,
    /// Required accelerator utilisation: 0 to 1.
    pub au_target: f64,
}

use Accelerator::{A100, B200, H100};
use Format::{Jpeg, Npz, Parquet, TfRecord};
use Workload::{Cosmoflow, Flux, Resnet50, Retinanet, Unet3d};

type Samples = (usize, u64, u64);
const UNET3D: Samples = (7, 146_600_628, 1);
const RESNET50: Samples = (400, 114_660, 1251);
const COSMOFLOW: Samples = (1, 2_828_486, 1);

pub const BENCHMARKS: [Benchmark; 13] = [
    of(Unet3d, A100, Npz, UNET3D, 0.636, 0.9),
    of(Unet3d, H100, Npz, UNET3D, 0.323, 0.9),
    of(Unet3d, B200, Npz, UNET3D, 0.162, 0.9),
    of(Resnet50, A100, TfRecord, RESNET50, 0.435, 0.9),
    of(Resnet50, H100, TfRecord, RESNET50, 0.224, 0.9),
    of(Cosmoflow, A100, TfRecord, COSMOFLOW, 0.00551, 0.7),
    of(Cosmoflow, H100, TfRecord, COSMOFLOW, 0.0035, 0.7),
    of(Retinanet, A100, Jpeg, (16, 153_600, 1), 0.21, 0.85),
    of(Retinanet, H100, Jpeg, (16, 153_600, 1), 0.18, 0.85),
    of(Retinanet, B200, Jpeg, (24, 322_957, 1), 0.04755, 0.85),
    of(Flux, A100, Jpeg, (8, 307_200, 1), 1.1, 0.8),
    of(Flux, H100, Jpeg, (8, 307_200, 1), 0.85, 0.8),
    of(Flux, B200, Parquet, (48, 2_164_832, 96), 1.35, 0.9),
];

const fn of(
    workload: Workload,
    accelerator: Accelerator,
    format: Format,
    (batch, sample_bytes, samples_per_file): Samples,
    step_s: f64,
    au_target: f64,
) -> Benchmark {
    Benchmark {
        workload,
        accelerator,
        format,
        batch,
        sample_bytes,
        samples_per_file,
        step_s,
        au_target,
    }
}

impl Benchmark {
    /// Errors: an unknown combination, with the known ones.
    pub fn find(workload: Workload, accelerator: Accelerator) -> Result<&'static Self, String> {
        BENCHMARKS
            .iter()
            .find(|benchmark| {
                benchmark.workload == workload && benchmark.accelerator == accelerator
            })
            .ok_or_else(|| {
                let all: Vec<String> = BENCHMARKS.iter().map(ToString::to_string).collect();
                format!(
                    "MLPerf Storage has no {workload} for {accelerator}: use one of {}",
                    all.join(", ")
                )
            })
    }

    pub fn step(&self) -> Duration {
        Duration::from_secs_f64(self.step_s)
    }

    /// Errors: a format that this build cannot read.
    pub fn source(&self) -> Result<Source, String> {
        match self.format {
            Npz => Ok(Source::Npz),
            TfRecord => Ok(Source::Tfrecord),
            Jpeg => Ok(Source::Images),
            #[cfg(feature = "parquet")]
            Parquet => Ok(Source::Parquet),
            #[cfg(not(feature = "parquet"))]
            Parquet => Err(format!(
                "{self} reads Parquet: build this program with `--features parquet`"
            )),
        }
    }
}

impl fmt::Display for Benchmark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.workload, self.accelerator)
    }
}

/// The name on the command line.
macro_rules! display {
    ($($kind:ty)*) => {
        $(impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
            }
        })*
    };
}

display!(Workload Accelerator Source);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_combination_error_lists_the_known_ones() {
        for workload in [Resnet50, Cosmoflow] {
            let error = Benchmark::find(workload, B200).unwrap_err();
            assert!(
                error.starts_with(&format!("MLPerf Storage has no {workload} for b200")),
                "{error}"
            );
            assert_eq!(error.matches(" on ").count(), BENCHMARKS.len());
        }
    }

    #[test]
    fn parquet_is_refused_unless_built_in() {
        let flux = Benchmark::find(Flux, B200).unwrap().source();
        assert_eq!(flux.is_ok(), cfg!(feature = "parquet"));
        assert!(flux.map_or_else(
            |error| error.contains("--features parquet"),
            |source| source.to_string() == "parquet"
        ));
    }
}
