//! Batches as plain values, from any device, for comparisons in tests.

#![allow(dead_code, reason = "each test binary uses its own part")]

use feedline::tensor::DType;
use feedline::{Batch, Loader, Result};

/// A field of a batch as plain values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
    pub lens: Option<Vec<u64>>,
    pub bytes: Vec<u8>,
}

/// A batch as plain values, from any device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Got {
    pub epoch: u64,
    pub index: u64,
    pub len: usize,
    pub valid: usize,
    pub ids: Vec<u64>,
    pub status: Vec<u8>,
    pub fields: Vec<Array>,
}

impl Got {
    /// Errors: as in reading it back.
    pub fn of(batch: &Batch) -> Result<Self> {
        let mut fields = Vec::new();
        for field in batch.fields() {
            let mut bytes = vec![0; field.size_bytes()];
            field.read_into(&mut bytes)?;
            fields.push(Array {
                name: field.name().into(),
                dtype: field.dtype(),
                shape: field.shape(),
                strides: field.strides(),
                lens: field.lens().map(<[u64]>::to_vec),
                bytes,
            });
        }
        Ok(Self {
            epoch: batch.epoch(),
            index: batch.index(),
            len: batch.len(),
            valid: batch.valid(),
            ids: batch.ids().to_vec(),
            status: batch.status().to_vec(),
            fields,
        })
    }

    /// All batches of an iterator.
    pub fn all(batches: impl Iterator<Item = Result<Batch>>) -> Vec<Self> {
        batches
            .map(|batch| Self::of(&batch.unwrap()).unwrap())
            .collect()
    }

    pub fn epoch(loader: &Loader, epoch: u64) -> Vec<Self> {
        Self::all(loader.epoch(epoch).unwrap())
    }

    /// All batches of an epoch, or its final error.
    pub fn try_epoch(loader: &Loader, epoch: u64) -> Result<Vec<Self>> {
        loader
            .epoch(epoch)?
            .map(|batch| Self::of(&batch?))
            .collect()
    }

    pub fn bytes(&self, field: &str) -> &[u8] {
        let mut fields = self.fields.iter();
        &fields.find(|array| array.name == field).unwrap().bytes
    }
}

/// The bytes of a field in all batches, one after the other.
pub fn bytes_of(batches: &[Got], field: &str) -> Vec<u8> {
    let bytes = batches.iter().flat_map(|got| got.bytes(field));
    bytes.copied().collect()
}

/// Fails with the first difference only, not with all batches.
#[track_caller]
pub fn same(found: &[Got], right: &[Got], what: &str) {
    for (at, (found, right)) in found.iter().zip(right).enumerate() {
        if found == right {
            continue;
        }
        for (found, right) in found.fields.iter().zip(&right.fields) {
            let mut pairs = found.bytes.iter().zip(&right.bytes);
            let differs = pairs.position(|(found, right)| found != right);
            let name = &found.name;
            assert_eq!(
                differs, None,
                "{what}: batch {at}, field {name}: first byte that differs"
            );
        }
        let bare = |got: &Got| {
            let mut got = got.clone();
            for field in &mut got.fields {
                field.bytes = vec![field.bytes.len() as u8];
            }
            format!("{got:?}")
        };
        panic!("{what}: batch {at} is {}, not {}", bare(found), bare(right));
    }
    assert_eq!(found.len(), right.len(), "{what}: how many");
}
