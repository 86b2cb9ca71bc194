//! A part of a dataset: chosen by a keyed split, which needs no memory, or by a list of ids.

use crate::dataset::DatasetExt;
use crate::order::subset;
use crate::order::subset::SplitPart;
use feedline_base::error::Result;
use feedline_core::dataset::forward::{forward, frames_of, own};
use feedline_core::dataset::{
    Chunked, Dataset, Digest, Framed, Parts, Sizes, Strings, chunks, unordered,
};
use feedline_core::order::Key;
use std::sync::Arc;

/// Part of a dataset. Its ids count from 0; [`Subset::origin`] gives the id in the whole. A subset
/// of a dataset with chunks has no windowed order.
pub struct Subset<D> {
    whole: Arc<D>,
    choice: SubsetChoice,
}

/// Cheap: the index is shared.
#[allow(
    clippy::missing_trait_methods,
    reason = "`clone_from` has nothing to reuse"
)]
impl<D> Clone for Subset<D> {
    fn clone(&self) -> Self {
        Self {
            whole: self.whole.clone(),
            choice: self.choice.clone(),
        }
    }
}

#[derive(Clone)]
enum SubsetChoice {
    Split { part: SplitPart, key: u64 },
    Ids(Arc<[u64]>),
}

impl<D: Dataset> Subset<D> {
    pub(crate) fn split(whole: Arc<D>, fraction: f64, key: u64) -> Result<(Self, Self)> {
        whole_ids(&*whole)?;
        let (first, second) = subset::split(whole.len(), fraction, Key::new(key))?;
        let part = |part| Self {
            whole: whole.clone(),
            choice: SubsetChoice::Split { part, key },
        };
        Ok((part(first), part(second)))
    }

    pub(crate) fn of_ids(whole: Arc<D>, ids: Vec<u64>) -> Result<Self> {
        whole_ids(&*whole)?;
        let choice = SubsetChoice::Ids(subset::listed(ids, whole.len())?);
        Ok(Self { whole, choice })
    }

    /// Id of `sample` in the whole dataset. `sample` must be below `len`.
    pub fn origin(&self, sample: u64) -> u64 {
        match &self.choice {
            SubsetChoice::Split { part, .. } => part.id(sample),
            SubsetChoice::Ids(ids) => ids[sample as usize],
        }
    }

    /// The whole dataset.
    pub fn whole(&self) -> &Arc<D> {
        &self.whole
    }
}

/// Refuses a mix, because its order covers the whole dataset.
fn whole_ids(whole: &impl Dataset) -> Result<()> {
    unordered(whole, "take parts of its sources, then mix them")
}

impl<D: Dataset> Dataset for Subset<D> {
    own!(framed unordered);
    forward!(self => self.whole; schema sources);

    fn len(&self) -> u64 {
        match &self.choice {
            SubsetChoice::Split { part, .. } => part.len(),
            SubsetChoice::Ids(ids) => ids.len() as u64,
        }
    }

    fn sizes(&self) -> Sizes {
        let ids = match &self.choice {
            SubsetChoice::Split { .. } => 0,
            SubsetChoice::Ids(ids) => size_of_val(&**ids),
        };
        let whole = self.whole.sizes();
        Sizes {
            largest_sample: None,
            index_bytes: whole.index_bytes + ids,
            ..whole
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.whole.extents(self.origin(sample), parts)
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.whole.chunked().map(|_| self as &dyn Chunked)
    }

    fn keys(&self) -> Result<Option<Strings>> {
        let Some(whole) = self.whole.keys()? else {
            return Ok(None);
        };
        let ids = (0..self.len()).map(|sample| self.origin(sample) as usize);
        Ok(Some(ids.map(|id| whole.get(id)).collect()))
    }

    fn identity(&self) -> u64 {
        let digest = Digest::new("subset").word(self.whole.identity());
        match &self.choice {
            SubsetChoice::Split { part, key } => digest
                .word(0)
                .word(*key)
                .word(self.whole.len())
                .word(part.start())
                .word(part.len())
                .end(),
            SubsetChoice::Ids(ids) => ids
                .iter()
                .fold(digest.word(1), |digest, id| digest.word(*id))
                .end(),
        }
    }

    fn describe(&self) -> String {
        format!("{} samples of {}", self.len(), self.whole.describe())
    }
}

impl<D: Dataset> Framed for Subset<D> {
    frames_of!(self, sample => (&*self.whole, self.origin(sample)); check open make field_bytes member seek_points);

    /// Rows have the same size in all parts of a dataset.
    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        self.whole.field_bytes_max(field).map(Some)
    }
}

/// The chunks of the whole; the subset uses some of their samples.
impl<D: Dataset> Chunked for Subset<D> {
    forward!(self => chunks(&self.whole); starts chunk_extents chunk_bytes open_chunk chunk_name);

    fn is_whole(&self) -> bool {
        false
    }

    fn inner(&self, sample: u64) -> u64 {
        chunks(&self.whole).inner(self.origin(sample))
    }
}
