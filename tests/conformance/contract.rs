//! What every format and every wrapper keeps, over one table of small datasets:
//! `tests/common/workloads.rs`.

use crate::common::Dir;
use crate::common::workloads::WORKLOADS;
use feedline::dataset::{Concat, Dataset, DatasetExt};
use feedline::unstable::{Fingerprint, fuzzing};
use std::sync::Arc;

type Any = Arc<dyn Dataset>;
/// Fields of every sample.
type Rows = Vec<Vec<Vec<u8>>>;

fn rows(dataset: &dyn Dataset) -> Rows {
    match dataset.chunked() {
        Some(chunks) => (0..chunks.starts().len() - 1)
            .flat_map(|chunk| fuzzing::chunk(dataset, chunk).unwrap())
            .collect(),
        None => (0..dataset.len())
            .map(|sample| fuzzing::sample(dataset, sample).unwrap())
            .collect(),
    }
}

fn members(dataset: &dyn Dataset) -> Vec<Option<String>> {
    (0..dataset.len())
        .map(|sample| {
            dataset
                .framed()
                .and_then(|framed| framed.member(sample, Some(0)))
        })
        .collect()
}

fn lengths(dataset: &Any) -> Vec<Option<Vec<u64>>> {
    dataset
        .schema()
        .iter()
        .map(|field| dataset.lengths(&field.name).ok())
        .collect()
}

fn bytes_max(dataset: &Any) -> Vec<u64> {
    (0..dataset.schema().len())
        .map(|field| dataset.field_bytes_max(field).unwrap())
        .collect()
}

#[test]
fn sizes_and_lengths_are_those_of_the_bytes() {
    for workload in WORKLOADS {
        let dir = Dir::new();
        let name = workload.name;
        let dataset = (workload.open)(&dir);
        let rows = rows(&*dataset);
        let sizes = dataset.sizes();
        assert_eq!(rows.len() as u64, dataset.len(), "{name}");
        if dataset.chunked().is_none() {
            let stored = |sample| -> u64 {
                let mut extents = fuzzing::extents(&*dataset, sample).unwrap();
                extents.dedup();
                extents.iter().map(|extent| extent.len).sum()
            };
            let most = (0..dataset.len()).map(stored).max().unwrap();
            assert_eq!(sizes.sample_bytes_max, most, "{name}");
            assert!(
                sizes
                    .largest_sample
                    .is_none_or(|sample| stored(sample) == most),
                "{name}"
            );
        }
        for (field, (lengths, most)) in lengths(&dataset)
            .into_iter()
            .zip(bytes_max(&dataset))
            .enumerate()
        {
            let found: Vec<u64> = rows.iter().map(|row| row[field].len() as u64).collect();
            // In elements; `lengths.rs` compares them.
            assert!(
                lengths.is_none_or(|lengths| lengths.len() == found.len()),
                "{name}: field {field}"
            );
            assert!(
                found.iter().all(|bytes| *bytes <= most),
                "{name}: field {field}"
            );
        }
    }
}

#[test]
fn a_dataset_opened_again_is_the_same() {
    for workload in WORKLOADS {
        let dir = Dir::new();
        let name = workload.name;
        let first = (workload.open)(&dir);
        let print = Fingerprint::of(&*first).unwrap();
        // It writes the files again.
        let again = (workload.open)(&dir);
        assert_eq!(print, Fingerprint::of(&*again).unwrap(), "{name}");
        assert_eq!(
            (first.schema(), first.sizes()),
            (again.schema(), again.sizes()),
            "{name}"
        );
        assert!(
            first.describe().contains(&first.len().to_string()),
            "{name}: {}",
            first.describe()
        );
    }
}

/// Rows, names and lengths pass unchanged through every wrapper.
#[test]
fn wrappers_forget_nothing() {
    for workload in WORKLOADS {
        let dir = Dir::new();
        let dataset = (workload.open)(&dir);
        let same = |what: &str, wrapped: Any, ids: &[u64]| {
            let what = format!("{}, {what}", workload.name);
            let of = |all: &Rows| {
                ids.iter()
                    .map(|id| all[*id as usize].clone())
                    .collect::<Rows>()
            };
            assert_eq!(wrapped.len(), ids.len() as u64, "{what}");
            assert!(rows(&*wrapped) == of(&rows(&*dataset)), "{what}");
            let named = members(&*dataset);
            if named.iter().any(Option::is_some) {
                assert!(
                    ids.iter()
                        .map(|id| &named[*id as usize])
                        .eq(&members(&*wrapped)),
                    "{what}"
                );
            }
            let known: Vec<_> = lengths(&dataset)
                .into_iter()
                .map(|lengths| {
                    lengths.map(|all| ids.iter().map(|id| all[*id as usize]).collect::<Vec<_>>())
                })
                .collect();
            assert_eq!(lengths(&wrapped), known, "{what}");
            assert_eq!(bytes_max(&wrapped), bytes_max(&dataset), "{what}");
            let own = wrapped.sizes();
            let inner = dataset.sizes();
            assert_eq!(own.sample_bytes_max, inner.sample_bytes_max, "{what}");
            assert_eq!(own.opened_bytes_max, inner.opened_bytes_max, "{what}");
            assert!(own.index_bytes >= inner.index_bytes, "{what}");
        };
        let all: Vec<u64> = (0..dataset.len()).collect();
        let twice = [&all[..], &all].concat();
        same(
            "two",
            Arc::new(Concat::new([dataset.clone(), dataset.clone()]).unwrap()),
            &twice,
        );
        same(
            "in memory",
            Arc::new(dataset.clone().in_memory().unwrap()),
            &all,
        );
        same(
            "checked",
            Arc::new(
                dataset
                    .clone()
                    .facts(dir.path("sums"))
                    .checksums()
                    .open()
                    .unwrap(),
            ),
            &all,
        );
        same(
            "seekable",
            Arc::new(
                dataset
                    .clone()
                    .facts(dir.path("points"))
                    .seek_points()
                    .open()
                    .unwrap(),
            ),
            &all,
        );
        if dataset.chunked().is_none() {
            let turned: Vec<u64> = all.iter().rev().copied().collect();
            same(
                "subset",
                Arc::new(dataset.clone().subset(turned.clone()).unwrap()),
                &turned,
            );
        }
    }
}
