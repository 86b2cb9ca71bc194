//! The life of a loader with a fault in it, and its invariants.
//!
//! ```text
//! build ─► epoch: batches ─► perhaps one error, then the end ─► no faults any more: the same epoch, whole ─► drop
//!             └ rows as in a life without faults, but for rows whose bytes were wrong unnoticed
//! ```

use crate::common::got::Got;
use crate::common::workloads::{Notices, Workload};
use feedline::dataset::Dataset;
use feedline::error::Stage;
use feedline::storage::{Direct, Extent, Mode, SourceId};
use feedline::unstable::{Fault, Faulty, Hit, fuzzing};
use feedline::{Device, Error, ErrorKind, Ledger, Loader, LoaderBuilder, OnBadSample, Status};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// A workload, by one reader, to one device.
pub struct Setting {
    pub workload: &'static Workload,
    pub way: (Mode, Direct),
    /// `None`: the host. The GPU is opened once, since its context takes longer than a life.
    pub gpu: Option<Device>,
    /// The policy: whether bad samples get substitutes.
    pub substitutes: bool,
    dataset: Arc<dyn Dataset>,
    /// The expected epoch.
    right: Vec<Got>,
    /// Samples with an extent to read.
    readers_of: BTreeMap<(usize, u64, u64), BTreeSet<u64>>,
    /// Expected content of each sample.
    content: BTreeMap<u64, Content>,
    paths: Vec<PathBuf>,
}

/// Per field: bytes, and the length if it varies.
type Content = Vec<(Vec<u8>, Option<u64>)>;

/// A row with a wrong sample.
struct Missing {
    batch: u64,
    row: usize,
    sample: u64,
    substitute: u64,
}

/// Complaints about a life.
pub type Complaints = Vec<String>;

fn key(extent: &Extent) -> (usize, u64, u64) {
    (extent.source.index(), extent.offset, extent.len)
}

impl Setting {
    pub fn new(
        workload: &'static Workload,
        dataset: Arc<dyn Dataset>,
        way: (Mode, Direct),
        (gpu, substitutes): (Option<Device>, bool),
    ) -> Self {
        let mut readers_of = BTreeMap::<_, BTreeSet<u64>>::new();
        for sample in 0..dataset.len() {
            for extent in fuzzing::extents(&*dataset, sample).unwrap() {
                readers_of.entry(key(&extent)).or_default().insert(sample);
            }
        }
        let paths = dataset
            .sources()
            .ids()
            .map(|id| dataset.sources().path(id))
            .collect();
        let right = Vec::new();
        let content_of = BTreeMap::new();
        let mut setting = Self {
            workload,
            way,
            gpu,
            substitutes,
            dataset,
            right,
            readers_of,
            content: content_of,
            paths,
        };
        setting.right = Got::epoch(
            &setting
                .builder()
                .tuning(|t| t.reader(Mode::Pread))
                .build()
                .unwrap(),
            0,
        );
        for batch in &setting.right {
            let rows = (0..batch.len).map(|row| (batch.ids[row], content(batch, row)));
            setting.content.extend(rows);
        }
        setting
    }

    pub fn name(&self) -> String {
        let device = if self.gpu.is_some() { "GPU" } else { "host" };
        let policy = if self.substitutes {
            ", substitutes"
        } else {
            ""
        };
        format!(
            "{}, {:?} {:?}, {device}{policy}",
            self.workload.name, self.way.0, self.way.1
        )
    }

    fn builder(&self) -> LoaderBuilder {
        let builder = Loader::builder(self.dataset.clone())
            .batch_size(4)
            .tuning(|t| t.slots(2).depth(2))
            .workers(1);
        let builder =
            (self.workload.set)(builder).tuning(|t| t.reader(self.way.0).direct(self.way.1));
        let builder = if self.substitutes {
            builder.on_bad_sample(OnBadSample::Substitute { budget: 1000 })
        } else {
            builder
        };
        match &self.gpu {
            Some(gpu) => builder.device(gpu.clone()).tuning(|t| t.device_batches(2)),
            None => builder,
        }
    }

    /// Runs one life; gives its complaints.
    pub fn live(&self, faulty: &Arc<Faulty>) -> Complaints {
        let mut complaints = Complaints::new();
        let loader = match self.builder().tuning(|t| t.faulty(faulty.clone())).build() {
            Ok(loader) => loader,
            Err(error) => return vec![format!("not built: {error}")],
        };
        let (found, error) = receive(&loader, &mut complaints);
        let hits = faulty.hits();
        faulty.heal();
        let missing = self.check_rows(&found, &error, &hits, &mut complaints);
        self.check_ledger(&loader.ledger(), &hits, &missing, &mut complaints);
        if let Some(error) = &error {
            self.check_error(error, &hits, found.len(), &mut complaints);
        } else if found.len() != self.right.len() {
            complaints.push(format!(
                "{} batches of {} and no error",
                found.len(),
                self.right.len()
            ));
        }
        let told = loader.report().total.consumer;
        let samples: usize = found.iter().map(|batch| batch.valid).sum();
        if (told.batches, told.samples) != (found.len() as u64, samples as u64) {
            complaints.push(format!(
                "{samples} samples received, the report has {}",
                told.samples
            ));
        }
        let (again, error) = receive(&loader, &mut complaints);
        if let Some(error) = error {
            complaints.push(format!("afterwards, without faults: {error}"));
        } else if again != self.right {
            complaints.push("afterwards, without faults, other batches".into());
        }
        complaints
    }

    /// Checks ids, order and bytes: only a fault allows a substitute, and only a faulty read allows
    /// wrong bytes.
    fn check_rows(
        &self,
        found: &[Got],
        error: &Option<Error>,
        hits: &[Hit],
        complaints: &mut Complaints,
    ) -> Vec<Missing> {
        let silent: Vec<&Hit> = hits
            .iter()
            .filter(|hit| matches!(hit.fault, Fault::Flipped | Fault::Elsewhere))
            .collect();
        let mut suspects = BTreeSet::new();
        for hit in &silent {
            match self.readers_of.get(&key(&hit.extent)) {
                Some(samples) => suspects.extend(samples),
                None => complaints.push(format!("nobody's read: {:?}", hit.extent)),
            }
        }
        let mut wrong = BTreeSet::new();
        let mut missing = Vec::new();
        for (found, right) in found.iter().zip(&self.right) {
            self.compare(found, right, &mut wrong, &mut missing, complaints);
        }
        if !wrong.is_subset(&suspects) {
            complaints.push(format!(
                "samples {wrong:?} are wrong, of {suspects:?} some bytes were"
            ));
        }
        if self.workload.notices == Notices::EveryBit && !wrong.is_empty() {
            complaints.push(format!("samples {wrong:?} are wrong, and nobody noticed"));
        }
        if error.is_some() || silent.is_empty() {
            return missing;
        }
        match self.workload.notices {
            Notices::EveryBit if missing.is_empty() => {
                complaints.push("wrong bytes, and nobody noticed".into())
            }
            // An extent partly in the page cache is read once more.
            Notices::Nothing if self.way.0 != Mode::Auto && wrong != suspects => {
                complaints.push(format!(
                    "samples {wrong:?} are wrong, and {suspects:?} had to be"
                ));
            }
            _ => {}
        }
        missing
    }

    /// Samples with wrong bytes, and rows with another sample; all other rows must be as expected.
    fn compare(
        &self,
        found: &Got,
        right: &Got,
        wrong: &mut BTreeSet<u64>,
        missing: &mut Vec<Missing>,
        complaints: &mut Complaints,
    ) {
        let outside = |got: &Got| {
            let fields: Vec<_> = got
                .fields
                .iter()
                .map(|field| (field.dtype, field.shape.clone()))
                .collect();
            (got.epoch, got.index, got.len, got.valid, fields)
        };
        if outside(found) != outside(right) {
            return complaints.push(format!(
                "batch {:?} in place of {:?}",
                outside(found),
                outside(right)
            ));
        }
        for row in 0..right.len {
            let id = found.ids[row];
            let status = found.status[row];
            if (id, status) != (right.ids[row], right.status[row]) {
                if !self.substitutes || status != Status::Substitute as u8 || id == right.ids[row] {
                    complaints.push(format!(
                        "sample {id} with status {status} in place of {}",
                        right.ids[row]
                    ));
                    continue;
                }
                missing.push(Missing {
                    batch: right.index,
                    row,
                    sample: right.ids[row],
                    substitute: id,
                });
            }
            if self.content.get(&id) != Some(&content(found, row)) {
                wrong.insert(id);
            }
        }
    }

    /// Checks that only faulty samples have substitutes, and that the ledger names each with its
    /// cause.
    fn check_ledger(
        &self,
        ledger: &Ledger,
        hits: &[Hit],
        missing: &[Missing],
        complaints: &mut Complaints,
    ) {
        let of_source = |source: SourceId| {
            let all = self
                .readers_of
                .iter()
                .filter(move |((own, ..), _)| *own == source.index());
            all.flat_map(|(_, samples)| samples)
        };
        let mut touched = BTreeSet::<u64>::new();
        for hit in hits {
            match self.readers_of.get(&key(&hit.extent)) {
                Some(samples) => touched.extend(samples),
                None => touched.extend(of_source(hit.extent.source)),
            }
        }
        if ledger.substituted != missing.len() as u64 {
            complaints.push(format!(
                "{} rows substituted, the ledger says {}",
                missing.len(),
                ledger.substituted
            ));
        }
        for Missing {
            batch,
            row,
            sample,
            substitute,
        } in missing
        {
            if !touched.contains(sample) {
                complaints.push(format!("sample {sample} is missing, and had no fault"));
            }
            let Some(entry) = ledger.samples.iter().find(|entry| entry.sample == *sample) else {
                complaints.push(format!("sample {sample} is missing, and not in the ledger"));
                continue;
            };
            let place = (entry.batch, entry.row as usize, entry.substitute);
            // An entry stays as first written, perhaps when the sample failed as a substitute.
            let as_itself = entry.times == 1 && entry.substitute.is_some();
            if as_itself && place != (*batch, *row, Some(*substitute)) {
                complaints.push(format!("row {row} of batch {batch}: {entry:?}"));
            }
        }
        for entry in &ledger.samples {
            let named = entry
                .path
                .as_ref()
                .is_some_and(|path| self.paths.contains(path));
            if !named || entry.offset.is_none() || entry.length.is_none() || entry.cause.is_empty()
            {
                complaints.push(format!("the ledger lacks path, place or cause: {entry:?}"));
            }
        }
    }

    /// Checks for one typed error with path, place, sample and code.
    fn check_error(&self, error: &Error, hits: &[Hit], batch: usize, complaints: &mut Complaints) {
        let mut lacks = |what: &str| complaints.push(format!("{what}: {error}"));
        let site = error.site();
        if hits.is_empty() {
            lacks("an error without a fault");
        }
        if matches!(
            error.kind(),
            ErrorKind::Panicked | ErrorKind::Cancelled | ErrorKind::Stalled
        ) {
            lacks("of that kind");
        }
        let hit_paths: BTreeSet<&PathBuf> = hits
            .iter()
            .map(|hit| &self.paths[hit.extent.source.index()])
            .collect();
        match &site.path {
            None => lacks("no path"),
            Some(path) if !hit_paths.contains(path) => lacks("another path"),
            Some(_) => {}
        }
        match site.sample {
            None => lacks("no sample"),
            Some(sample) if sample >= self.dataset.len() => lacks("no such sample"),
            Some(_) => {}
        }
        if site.batch != Some(batch as u64) {
            lacks("not that batch");
        }
        let place = site.offset.zip(site.len);
        let read = matches!(error.stage(), Stage::Read | Stage::Open);
        if place.is_none()
            || read
                && !hits.iter().any(|hit| {
                    hit.extent.len == 0 || Some((hit.extent.offset, hit.extent.len)) == place
                })
        {
            lacks("not the place");
        }
        let mut codes: BTreeSet<i32> = hits
            .iter()
            .filter_map(|hit| {
                if let Fault::Error(code) = hit.fault {
                    Some(code)
                } else {
                    None
                }
            })
            .collect();
        // An unreadable page of a map is EFAULT in a kernel copy, and EIO elsewhere.
        if self.way.0 == Mode::Mmap && codes.contains(&14) {
            codes.insert(5);
        }
        if !codes.is_empty()
            && !codes
                .iter()
                .any(|code| error.to_string().contains(&format!("(os error {code})")))
        {
            lacks("not the code");
        }
    }
}

/// The epoch's batches, and its final error.
fn receive(loader: &Loader, complaints: &mut Complaints) -> (Vec<Got>, Option<Error>) {
    let mut found = Vec::new();
    let mut batches = match loader.epoch(0) {
        Ok(batches) => batches,
        Err(error) => return (found, Some(error)),
    };
    for batch in &mut batches {
        match batch.and_then(|batch| Got::of(&batch)) {
            Ok(got) => found.push(got),
            Err(error) => {
                if batches.next().is_some() {
                    complaints.push(format!("something comes after the error: {error}"));
                }
                return (found, Some(error));
            }
        }
    }
    (found, None)
}

/// Bytes and lengths of a row, field by field.
fn content(got: &Got, row: usize) -> Content {
    got.fields
        .iter()
        .map(|field| {
            let each = field.bytes.len() / got.len;
            (
                field.bytes[row * each..][..each].to_vec(),
                field.lens.as_ref().map(|lens| lens[row]),
            )
        })
        .collect()
}
