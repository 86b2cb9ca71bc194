//! A dataset that can delay each of its functions.

use feedline::Result;
use feedline::dataset::{Dataset, Framed, Parts, Sizes};
use feedline::storage::{Extent, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use std::path::Path;
use std::sync::Arc;

/// Called with the sample id before the answer.
type Hook = Box<dyn Fn(u64) + Send + Sync>;

/// A hundred framed records of 4 bytes.
pub struct Hooked {
    pub sources: Arc<Sources>,
    pub schema: Vec<EncodedField>,
    pub extents: Hook,
    pub open: Hook,
    pub member: Hook,
}

impl Hooked {
    pub fn in_memory() -> Self {
        let mut sources = Sources::new();
        sources.memory(vec![7; 400].into());
        Self::of(sources)
    }

    pub fn in_file(path: &Path) -> Self {
        let mut sources = Sources::new();
        sources.file(path, 400).unwrap();
        Self::of(sources)
    }

    fn of(sources: Sources) -> Self {
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [4]))];
        let nothing = || -> Hook { Box::new(|_| ()) };
        Self {
            sources: Arc::new(sources),
            schema,
            extents: nothing(),
            open: nothing(),
            member: nothing(),
        }
    }
}

impl Dataset for Hooked {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        100
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(4)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        (self.extents)(sample);
        parts.framed(
            0,
            Extent {
                source: SourceId::at(0),
                offset: sample * 4,
                len: 4,
            },
        );
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Hooked {
    fn open<'a>(
        &self,
        sample: u64,
        _: usize,
        bytes: &'a [u8],
        _: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        (self.open)(sample);
        Ok(bytes)
    }
    fn member(&self, sample: u64, _: Option<usize>) -> Option<String> {
        (self.member)(sample);
        None
    }
}
