//! Rows that go from files into device memory by cuFile, against the stand-ins. The same loader on the host is the oracle.
#![cfg(feature = "cuda")]

mod common;
#[path = "common/cufile.rs"]
mod cufile;
#[path = "common/doubles.rs"]
mod doubles;
#[path = "common/kernels.rs"]
mod kernels;
#[path = "common/numeric.rs"]
mod numeric;
#[path = "common/standin.rs"]
mod standin;
#[path = "common/toys.rs"]
mod toys;

#[path = "direct/failures.rs"]
mod failures;
#[path = "direct/formats.rs"]
mod formats;
#[path = "direct/held.rs"]
mod held;
#[path = "direct/route.rs"]
mod route;
