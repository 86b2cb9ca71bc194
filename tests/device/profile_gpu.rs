//! The training step that the example `profile` takes on a CUDA device, against the stand-in
//! driver.
#![allow(unsafe_code)]

use crate::common::cuda::{self as device, case, config, late};
use crate::common::standin;
use crate::gpu::GpuStep;
use crate::measure::{self, Limit};
use crate::step::Step;
use feedline::Loader;
use feedline::dataset::Records;
use std::ffi::c_void;
use std::time::Duration;

const LENGTH: Duration = Duration::from_millis(2);

/// The kernel's work, by this machine's clock.
extern "C" fn spin(_: *const u32, _: *const u32, params: *const *const c_void) {
    // SAFETY: the stand-in calls this with the one parameter of the registration.
    let nanoseconds = unsafe { (*params).cast::<u64>().read() };
    assert_eq!(nanoseconds, LENGTH.as_nanos() as u64);
    std::thread::sleep(Duration::from_nanos(nanoseconds));
}

fn register() {
    standin::cuda().register_kernel("feedline_profile_step", spin, &[8], 0, 0);
}

fn loader(step: &GpuStep) -> Loader {
    let records = Records::builder(1000).open_bytes(vec![7; 200_000]).unwrap();
    Loader::builder(records)
        .batch_size(10)
        .device(device::gpu(0))
        .stream(step.stream())
        .build()
        .unwrap()
}

#[test]
fn gpu_steps_take_their_length_and_the_cpu_waits_for_none() {
    for config in [config(), late()] {
        case(config, |session| {
            register();
            let step = GpuStep::new(0, LENGTH).unwrap();
            let loader = loader(&step);
            let before = session.count("cuStreamSynchronize") + session.count("cuEventSynchronize");
            let tally = measure::run(&loader, Step::Gpu(step), Limit::Epochs(1), || false).unwrap();
            let waits =
                session.count("cuStreamSynchronize") + session.count("cuEventSynchronize") - before;
            // At the end: for the last event, twice more within its difference to the first, and
            // before the kernel goes.
            assert!(waits <= 4, "{waits}");
            assert_eq!((tally.batches, session.count("cuLaunchKernel")), (20, 20));
            assert_eq!(tally.stretch.steps, 19);
            assert!(
                tally.stretch.seconds >= 19.0 * LENGTH.as_secs_f64() * 0.999,
                "{tally:?}"
            );
            let au = tally.stretch.utilisation(LENGTH).unwrap();
            assert!(au > 0.0 && au <= 1.0, "{au}");
            assert!(loader.snapshot().consumer.gpu.is_some());
        });
    }
}

#[test]
fn without_a_length_nothing_is_launched() {
    case(config(), |session| {
        let step = GpuStep::new(0, Duration::ZERO).unwrap();
        let loader = loader(&step);
        let tally = measure::run(&loader, Step::Gpu(step), Limit::Epochs(1), || false).unwrap();
        assert_eq!(
            (tally.stretch.steps, session.count("cuLaunchKernel")),
            (19, 0)
        );
    });
}

#[test]
fn a_refusal_of_the_driver_is_an_error_without_leaks() {
    for (symbol, nth) in [
        ("cuStreamCreate", 0),
        ("cuModuleLoadData", 0),
        ("cuModuleGetFunction", 0),
        ("cuEventCreate", 0),
        ("cuEventCreate", 1),
    ] {
        case(config(), move |session| {
            register();
            session.fail_named(symbol, nth, 2, false);
            let error = GpuStep::new(0, LENGTH).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("OUT_OF_MEMORY"), "{symbol}: {error}");
        });
    }
    case(config(), |session| {
        register();
        let step = GpuStep::new(0, LENGTH).unwrap();
        let loader = loader(&step);
        session.fail_named("cuLaunchKernel", 3, 719, false);
        let tally = measure::run(&loader, Step::Gpu(step), Limit::Epochs(1), || false).unwrap();
        let error = tally.error.unwrap().to_string();
        assert!(
            error.contains("LAUNCH_FAILED") && tally.batches > 0,
            "{error}"
        );
    });
}
