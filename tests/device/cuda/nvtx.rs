//! A tool that listens to NVTX sees each iterator, wait, copy and list of operations once. A broken
//! one is told once, and then forgotten.

use super::stalls::Warnings;
use crate::common::child::{here, process, run, told};
use crate::common::doubles::on_machine;
use crate::common::{build, noise, standin};
use feedline::Loader;
use feedline::dataset::Records;
use feedline::device::Finish;
use feedline::device::Gds;
use feedline::tensor::DType;

const BATCHES: u64 = 5;

/// Reads two epochs, one by one and as one iterator; twice.
fn read() {
    on_machine(|machine| {
        let warnings = Warnings::default();
        let _guard = tracing::subscriber::set_default(warnings.clone());
        for _ in 0..2 {
            let records = Records::builder(12).field("image", DType::U8, [2, 2, 3]);
            let records = records
                .open_bytes(noise(12 * 4 * BATCHES as usize, 1))
                .unwrap();
            let builder = Loader::builder(records)
                .batch_size(4)
                .finish("image", Finish::to(DType::F32));
            let loader = build(machine.on_gpu(builder, Gds::Off));
            for epochs in [0..1, 1..2, 2..4] {
                assert!(loader.epochs(epochs).unwrap().all(|batch| batch.is_ok()));
            }
        }
        eprintln!("told {:?}", warnings.0.lock().unwrap());
    });
}

/// What the stand-in for a tool writes of `read`, sorted.
fn calls() -> Vec<String> {
    let mut ranges = Vec::new();
    for (name, count) in [
        ("epoch 0", BATCHES),
        ("epoch 1", BATCHES),
        ("from epoch 2", 2 * BATCHES),
    ] {
        ranges.extend(["start", "end"].map(|call| format!("nvtx {call} {name} {count}")));
        for name in ["wait", "copy", "operations"] {
            ranges.extend((0..count).flat_map(|batch| {
                ["push", "pop"].map(|call| format!("nvtx {call} {name} {batch}"))
            }));
        }
    }
    let mut all = [ranges.clone(), ranges, vec!["nvtx initialize".into()]].concat();
    all.sort();
    all
}

#[test]
fn a_tool_sees_each_range_once_and_a_broken_one_is_told_once() {
    if told().is_some() {
        return read();
    }
    let tool = standin::build("nvtx", include_str!("../../standin/nvtx.rs"), &[]);
    let other = standin::build("no-nvtx", "", &[]);
    let tool = tool.to_str().unwrap();
    let other = other.to_str().unwrap();
    let initialized = || vec!["nvtx initialize".to_string()];
    for (path, mood, expected, why) in [
        (tool, "", calls(), None),
        (tool, "deaf", initialized(), None),
        (
            tool,
            "refuses",
            initialized(),
            Some("its InitializeInjectionNvtx2 failed"),
        ),
        (
            other,
            "",
            vec![],
            Some("undefined symbol: InitializeInjectionNvtx2"),
        ),
        (
            "/nonexistent",
            "",
            vec![],
            Some("/nonexistent: cannot open shared object file"),
        ),
        // As with NVTX's headers, a library that is only preloaded is no tool.
        ("./.", "", vec![], None),
        ("", "", vec![], None),
    ] {
        let mut child = process(&here!(), "read");
        child
            .env("NVTX_INJECTION64_PATH", path)
            .env("FEEDLINE_NVTX", mood)
            .env("LD_PRELOAD", tool);
        let text = run(child);
        if text.contains("skipped: the kernels") {
            return;
        }
        let mut lines: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("nvtx "))
            .collect();
        lines.sort_unstable();
        assert_eq!(lines, expected, "{path} {mood}");
        let words = text
            .lines()
            .find_map(|line| line.strip_prefix("told "))
            .unwrap();
        assert_eq!(
            words.matches("no NVTX ranges").count(),
            usize::from(why.is_some()),
            "{path} {mood}: {words}"
        );
        assert!(words.contains(why.unwrap_or("")), "{path} {mood}: {words}");
    }
}
