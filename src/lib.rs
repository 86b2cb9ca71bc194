//! feedline (skeleton)
pub mod decode;
mod error;
pub mod memory;
pub mod order;
pub mod read;
pub mod tensor;
pub use error::{Error, ErrorKind, Result, Site, Stage};
pub use memory::{BatchMut, Row, Status};
