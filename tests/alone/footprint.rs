//! Memory stays within the plan, and does not grow with the dataset. Each test is a process: memory
//! belongs to the whole of it.

use crate::common::*;
use feedline::dataset::{Dataset, DatasetExt, Framed, Parts, Records, Sizes};
use feedline::decode::Bytes;
use feedline::storage::Sources;
use feedline::tensor::EncodedField;
use feedline::{Loader, Order, Result};
use std::sync::Arc;

const RECORD: usize = 512;
const MIB: usize = 1 << 20;

/// Anonymous and shared memory of the process, in bytes.
fn anonymous() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = |key: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap();
        line.trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<usize>()
            .unwrap()
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
            std::fs::File::create(&path)
                .unwrap()
                .set_len(count * RECORD as u64)
                .unwrap();
            let before = anonymous();
            let budget = 48 * MIB;
            let builder = Loader::builder(records(&path, RECORD))
                .order(Order::shuffled(3))
                .batch_size(256);
            let loader = build(
                builder
                    .workers(2)
                    .memory_budget(budget)
                    .tuning(|t| t.reader(mode).direct(direct)),
            );
            assert!(loader.plan().total() <= budget);
            for batch in loader.epoch(0).unwrap().take(30) {
                assert!(
                    batch
                        .unwrap()
                        .field("record")
                        .unwrap()
                        .as_bytes()
                        .unwrap()
                        .iter()
                        .all(|byte| *byte == 0)
                );
            }
            let more = anonymous().saturating_sub(before);
            assert!(
                more <= budget + 32 * MIB,
                "{mode:?} {direct:?}, {count} records: {} MiB",
                more / MIB
            );
            used.push(more);
        }
        assert!(
            used[1] <= used[0] + 4 * MIB,
            "{mode:?} {direct:?}: {used:?} bytes"
        );
    }
}

/// Records in place of pictures, with seek points of 1 kB each if they are asked for them.
struct Pictures(Records, [EncodedField; 1], Vec<u8>);

impl Dataset for Pictures {
    fn schema(&self) -> &[EncodedField] {
        &self.1
    }
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn sources(&self) -> &Arc<Sources> {
        self.0.sources()
    }
    fn sizes(&self) -> Sizes {
        self.0.sizes()
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.0.extents(sample, parts)
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Pictures {
    fn seek_points<'a>(
        &'a self,
        sample: u64,
        _: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        buffer.clear();
        buffer.extend_from_slice(&self.2);
        buffer[..8].copy_from_slice(&sample.to_le_bytes());
        Ok(buffer)
    }
}

/// `FEEDLINE_PICTURES=1280000` has the size of ImageNet: a side file of 1.3 GB.
#[test]
fn a_large_side_file_takes_no_memory() {
    if !alone(&here!()) {
        return;
    }
    let pictures =
        std::env::var("FEEDLINE_PICTURES").map_or(100_000, |count| count.parse().unwrap());
    let dir = Dir::new();
    let path = dir.path("data.bin");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(pictures * 64)
        .unwrap();
    let open = || {
        let records = Records::builder(64).open(&path).unwrap();
        Pictures(records, [EncodedField::bytes("picture")], vec![7; 1000])
    };
    let side = dir.path("points");
    drop(
        open()
            .facts(&side)
            .seek_points()
            .open_joined([Ok(open())])
            .unwrap(),
    );
    let first = |dataset: Arc<dyn Dataset>| {
        let before = anonymous();
        let started = std::time::Instant::now();
        let loader = build(
            Loader::builder(dataset)
                .decode_field("picture", Bytes::up_to(64))
                .order(Order::shuffled(3))
                .batch_size(256)
                .workers(1),
        );
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        assert_eq!(batch.len(), 256);
        (anonymous().saturating_sub(before), started.elapsed())
    };
    let plain = first(Arc::new(open()));
    let before = anonymous();
    let started = std::time::Instant::now();
    let seekable = Arc::new(open().facts(&side).seek_points().open().unwrap());
    assert!(!seekable.built() && seekable.points_bytes() == pictures * 1000);
    let opened = (anonymous().saturating_sub(before), started.elapsed());
    let with = first(seekable.clone());
    for sample in (0..pictures).step_by(101) {
        let mut buffer = Vec::new();
        assert_eq!(
            seekable.seek_points(sample, 0, &mut buffer).unwrap()[..9],
            [&sample.to_le_bytes()[..], &[7]].concat()
        );
    }
    let bytes = std::fs::metadata(side).unwrap().len();
    println!(
        "{bytes} bytes beside {pictures} pictures: opened {opened:?}, first batch {with:?}, without {plain:?}"
    );
    let more = (opened.0 + with.0).saturating_sub(plain.0);
    assert!(more <= 20 * MIB, "{more} bytes more than without");
}
