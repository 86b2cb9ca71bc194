//! Decoders: bytes of one encoded field in, rows of the batch out.
//!
//! ```text
//! bytes of one field ──Decoder::decode──► its rows in the slot     (on a decode worker; never waits)
//!        ▲                    │
//!   untrusted            Ctx: sample id, random draws, the worker's scratch memory
//! ```
//!
//! Invariants:
//! * All workers share a decoder. Its state, such as a tokenizer, does not change; each worker's
//!   own memory is in [`Scratch`].
//! * All randomness comes from [`Ctx::draws`], so a sample's row depends only on (seed, epoch, id,
//!   draw number).
//! * A decoder checks sizes against limits before it allocates memory.
//! * The pipeline catches a decoder's panic and reports the sample.
//!
//! Encoded bytes can also be delivered unchanged, for a decoder on the device:
//!
//! ```no_run
//! use feedline::{Loader, dataset::Images, decode::Bytes};
//!
//! // Each JPEG has at most 16 MiB, and the 256 JPEGs of a batch at most 64 MiB.
//! let encoded = Bytes::packed(16 << 20).batch_bytes(64 << 20);
//! let loader = Loader::builder(Images::open("train/")?).decode_field("image", encoded).batch_size(256).build()?;
//! for batch in loader.epoch(0)? {
//!     let batch = batch?;
//!     let jpegs = batch.field("image")?;
//!     let bytes = jpegs.as_slice::<u8>()?;
//!     let offsets = jpegs.offsets().unwrap();
//!     assert_eq!(jpegs.row::<u8>(7)?, &bytes[offsets[7] as usize..offsets[8] as usize]);
//! }
//! # Ok::<(), feedline::Error>(())
//! ```

#[doc(inline)]
pub use feedline_core::decode::{Bytes, Ctx, Decoder, Each, Many, Raw, Scratch, Single, ToIds};
#[cfg(feature = "image")]
#[doc(inline)]
pub use feedline_image::{Filter, Image, Limits, PixelLayout};
#[cfg(feature = "tokenizers")]
#[doc(inline)]
pub use feedline_text::{Chat, ChatTemplate, Tokenize, Tokenizer};
