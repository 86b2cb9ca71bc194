//! What a loader promises on a CUDA device, against the stand-in driver. The same loader on the host is the oracle.
#![cfg(feature = "cuda")]

mod common;
#[path = "common/standin.rs"]
mod standin;

use common::*;
use feedline::{Device, Loader, Order};
use standin::Config;

#[test]
fn every_sample_gets_to_the_device_with_its_bytes() {
    let session = standin::cuda().session(Config::default());
    let dir = Dir::new();
    for (count, record) in [(1, 512), (37, 4096), (300, 100), (70, 5000), (1000, 1), (5, 150_528)] {
        let (path, _) = records_file(&dir, count, record);
        for batch_size in [1, 7, 64] {
            let builder = || Loader::builder(records(&path, record)).order(Order::shuffled(3)).batch_size(batch_size);
            let expected = pull(&build(builder()), 0).unwrap();
            let loader = build(builder().device(Device::cuda(0).unwrap()));
            let mut got = Vec::new();
            for batch in loader.epoch(0).unwrap() {
                let batch = batch.unwrap();
                let bytes = batch.field("record").unwrap().to_vec::<u8>().unwrap();
                got.extend(batch.ids().iter().copied().zip(bytes.chunks(record).map(<[u8]>::to_vec)));
            }
            assert!(got == expected, "{count} × {record}, {batch_size}");
            println!("{}", loader.report());
        }
    }
    println!("{:?}", session.live());
}
