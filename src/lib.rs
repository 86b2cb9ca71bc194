//! feedline (skeleton)
mod error;
<<<<<<< HEAD
pub mod memory;
pub mod read;
=======
mod memory;
pub mod order;
>>>>>>> order
pub mod tensor;
pub use error::{Error, ErrorKind, Result, Site, Stage};
pub use memory::{BatchMut, Row, Status};
