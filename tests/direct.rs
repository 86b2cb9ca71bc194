//! Rows that go from files into device memory by cuFile, against the stand-ins. The same loader on the host is the oracle.
#![cfg(feature = "cuda")]

mod common;
#[path = "common/cufile.rs"]
mod cufile;
#[path = "common/doubles.rs"]
mod doubles;
#[path = "common/kernels.rs"]
mod kernels;
#[path = "common/standin.rs"]
mod standin;

use common::*;
use cufile::Route;
use doubles::{CuFileMachine, with_kernels};
use feedline::dataset::Records;
use feedline::{Device, Gds, Loader, LoaderBuilder, Order};
use standin::{Config, Live};

/// All rows of an epoch by id, of every field.
fn rows_of(builder: LoaderBuilder) -> Vec<(u64, Vec<Vec<u8>>)> {
    let loader = build(builder);
    let mut rows = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        for part in batch.micro(batch.len()).unwrap() {
            let fields = part.fields().map(|field| {
                let mut bytes = vec![0; field.size_bytes()];
                field.read_into(&mut bytes).unwrap();
                bytes
            });
            rows.push((part.ids()[0], fields.collect()));
        }
    }
    rows
}

#[test]
fn rows_read_directly_are_those_of_the_host_whatever_their_size_and_order() {
    let session = standin::cuda().session(Config::default());
    if !with_kernels(&session) {
        return;
    }
    let machine = CuFileMachine::new(Route::P2p);
    let dir = Dir::new();
    for (count, record, header) in
        [(37, 4096, 0), (300, 100, 0), (70, 5000, 0), (9, 150_528, 0), (40, 8192, 4096), (40, 8192, 17)]
    {
        let mut bytes = noise(header, 1);
        bytes.extend(noise(count * record, 2));
        let path = dir.write(&format!("{count}x{record}+{header}"), &bytes);
        for (order, batch) in [(Order::sequential(), 7), (Order::shuffled(3), 16), (Order::shuffled(3), 1)] {
            let builder = || {
                let labels = (0..count as i64).collect::<Vec<_>>();
                let records = Records::builder(record).header(header as u64).classes(labels).open(&path).unwrap();
                Loader::builder(records).order(order.clone()).batch_size(batch)
            };
            let expected = rows_of(builder());
            let direct = builder()
                .device(Device::cuda(0).unwrap())
                .gds(Gds::Require)
                .cufile_at(machine.cufile.path(), machine.root());
            assert!(rows_of(direct) == expected, "{count} × {record} + {header}, {batch}");
        }
    }
    assert_eq!(session.live(), Live::default());
    assert_eq!(machine.cufile.violations(), Vec::<String>::new());
}
