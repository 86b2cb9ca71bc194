//! Memory stays within the plan, and does not grow with the dataset. One test: memory belongs to the whole process.

use crate::common::*;
use feedline::{Loader, Order};

const RECORD: usize = 512;
const MIB: usize = 1 << 20;

/// Anonymous and shared memory of the process, in bytes.
fn anonymous() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap()
    };
    (kib("RssAnon:") + kib("RssShmem:")) * 1024
}

#[test]
fn memory_stays_within_the_plan_for_any_number_of_records() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    for (mode, direct) in readers() {
        let mut used = Vec::new();
        for count in [10_000_u64, 100_000_000] {
            let path = dir.path(&format!("{count}.bin"));
            // A hole: 51 GB that take no space on the disk.
            std::fs::File::create(&path).unwrap().set_len(count * RECORD as u64).unwrap();
            let before = anonymous();
            let budget = 48 * MIB;
            let builder = Loader::builder(records(&path, RECORD)).order(Order::shuffled(3)).batch_size(256);
            let loader = build(builder.workers(2).memory_budget(budget).tuning(|t| t.reader(mode).direct(direct)));
            assert!(loader.plan().total() <= budget);
            for batch in loader.epoch(0).unwrap().take(30) {
                assert!(batch.unwrap().field("record").unwrap().as_bytes().unwrap().iter().all(|byte| *byte == 0));
            }
            let more = anonymous().saturating_sub(before);
            assert!(more <= budget + 32 * MIB, "{mode:?} {direct:?}, {count} records: {} MiB", more / MIB);
            used.push(more);
        }
        assert!(used[1] <= used[0] + 4 * MIB, "{mode:?} {direct:?}: {used:?} bytes");
    }
}
