//! Rows read from files into device memory by cuFile, against the stand-ins. The same loader on the
//! host is the oracle.

mod failures;
mod formats;
mod held;
mod route;

use crate::common::doubles::Machine;
use feedline::Report;
use feedline::profile::snapshot::DirectReads;

/// What the report says of reads by cuFile.
fn direct_reads(report: &Report) -> DirectReads {
    let copy = report.total.copy.as_ref().unwrap();
    copy.direct.clone().unwrap()
}

/// cuFile refuses its next read.
fn fail_next_read(machine: &Machine) {
    let read = machine.reads() as u64;
    machine.double.cufile.fail_read(read, 5044);
}
