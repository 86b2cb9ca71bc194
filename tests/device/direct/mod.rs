//! Rows read from files into device memory by cuFile, against the stand-ins. The same loader on the
//! host is the oracle.

mod failures;
mod formats;
mod held;
mod route;
