//! Seek points of a picture in memory, as a dataset makes them.

use feedline::Result;
use feedline::dataset::{Dataset, DatasetExt, Framed, Parts, Records, Sizes};
use feedline::storage::Sources;
use feedline::tensor::EncodedField;
use std::sync::Arc;

/// One picture.
struct One {
    record: Records,
    schema: [EncodedField; 1],
}

impl Dataset for One {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }

    fn len(&self) -> u64 {
        1
    }

    fn sources(&self) -> &Arc<Sources> {
        self.record.sources()
    }

    fn sizes(&self) -> Sizes {
        self.record.sizes()
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.record.extents(sample, parts)
    }
}

/// Empty if the picture can have none.
pub fn of(picture: &[u8]) -> Vec<u8> {
    let record = Records::builder(picture.len()).open_bytes(picture).expect("a record");
    let one = One { record, schema: [EncodedField::image("image")] };
    let file = std::env::temp_dir().join(format!("feedline-fuzz-points-{}", std::process::id()));
    let seekable = one.seekable(&file).expect("a file that can be written");
    std::fs::remove_file(&file).expect("a file that can be removed");
    seekable.seek_points(0, 0, &mut Vec::new()).to_vec()
}
