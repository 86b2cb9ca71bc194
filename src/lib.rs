//! feedline (skeleton)
mod error;
mod memory;
pub mod order;
pub mod tensor;
pub use error::{Error, ErrorKind, Result, Site, Stage};
pub use memory::{BatchMut, Row, Status};
