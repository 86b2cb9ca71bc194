//! The life of a loader with a fault in it, and what must be true of it.
//!
//! ```text
//! build ─► epoch: batches ─► perhaps one error, then the end ─► no faults any more: the same epoch, whole ─► drop
//!             └ rows as in a life without faults, but for rows whose bytes were wrong unnoticed
//! ```

use crate::got::Got;
use crate::workloads::{Notices, Workload};
use feedline::dataset::{Dataset, fuzzing};
use feedline::read::{Direct, Extent, Fault, Faulty, Hit, Mode};
use feedline::{Device, Error, ErrorKind, Loader, LoaderBuilder, Stage};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

/// A workload, by one reader, to one device.
pub struct Setting {
    pub workload: &'static Workload,
    pub way: (Mode, Direct),
    pub gpu: bool,
    dataset: Arc<dyn Dataset>,
    /// The epoch as it must be.
    right: Vec<Got>,
    /// The samples for which an extent is read.
    readers_of: BTreeMap<(usize, u64, u64), BTreeSet<u64>>,
    paths: Vec<PathBuf>,
}

/// What went wrong with a life: sentences.
pub type Complaints = Vec<String>;

fn key(extent: &Extent) -> (usize, u64, u64) {
    (extent.source.index(), extent.offset, extent.len)
}

impl Setting {
    pub fn new(workload: &'static Workload, dataset: Arc<dyn Dataset>, way: (Mode, Direct), gpu: bool) -> Self {
        let mut readers_of = BTreeMap::<_, BTreeSet<u64>>::new();
        for sample in 0..dataset.len() {
            for extent in fuzzing::extents(&*dataset, sample).unwrap() {
                readers_of.entry(key(&extent)).or_default().insert(sample);
            }
        }
        let paths = dataset.sources().ids().map(|id| dataset.sources().path(id)).collect();
        let mut setting = Self { workload, way, gpu, dataset, right: Vec::new(), readers_of, paths };
        setting.right = Got::epoch(&setting.builder().reader(Mode::Pread).build().unwrap(), 0);
        setting
    }

    pub fn name(&self) -> String {
        let device = if self.gpu { "GPU" } else { "host" };
        format!("{}, {:?} {:?}, {device}", self.workload.name, self.way.0, self.way.1)
    }

    fn builder(&self) -> LoaderBuilder {
        let builder = Loader::builder(self.dataset.clone()).batch_size(4).slots(2).workers(1).depth(2);
        let builder = (self.workload.set)(builder).reader(self.way.0).direct(self.way.1);
        if self.gpu { builder.device(Device::cuda(0).unwrap()).device_batches(2) } else { builder }
    }

    /// One life; what was wrong with it.
    pub fn live(&self, faulty: &Arc<Faulty>) -> Complaints {
        let mut complaints = Complaints::new();
        let loader = match self.builder().faulty(faulty.clone()).build() {
            Ok(loader) => loader,
            Err(error) => return vec![format!("not built: {error}")],
        };
        let (found, error) = receive(&loader, &mut complaints);
        let hits = faulty.hits();
        faulty.heal();
        self.check_rows(&found, &error, &hits, &mut complaints);
        if let Some(error) = &error {
            self.check_error(error, &hits, found.len(), &mut complaints);
        } else if found.len() != self.right.len() {
            complaints.push(format!("{} batches of {} and no error", found.len(), self.right.len()));
        }
        let told = loader.report();
        let samples: usize = found.iter().map(|batch| batch.valid).sum();
        if (told.batches, told.samples) != (found.len() as u64, samples as u64) {
            complaints.push(format!("{samples} samples received, the report has {}", told.samples));
        }
        let (again, error) = receive(&loader, &mut complaints);
        if let Some(error) = error {
            complaints.push(format!("afterwards, without faults: {error}"));
        } else if again != self.right {
            complaints.push("afterwards, without faults, other batches".into());
        }
        complaints
    }

    /// Ids, order and bytes; bytes may only be wrong where a read was.
    fn check_rows(&self, found: &[Got], error: &Option<Error>, hits: &[Hit], complaints: &mut Complaints) {
        let silent: Vec<&Hit> =
            hits.iter().filter(|hit| matches!(hit.fault, Fault::Flipped | Fault::Elsewhere)).collect();
        let mut suspects = BTreeSet::new();
        for hit in &silent {
            match self.readers_of.get(&key(&hit.extent)) {
                Some(samples) => suspects.extend(samples),
                None => complaints.push(format!("nobody's read: {:?}", hit.extent)),
            }
        }
        let mut wrong = BTreeSet::new();
        for (found, right) in found.iter().zip(&self.right) {
            wrong.extend(wrong_rows(found, right, complaints));
        }
        if !wrong.is_subset(&suspects) {
            complaints.push(format!("samples {wrong:?} are wrong, of {suspects:?} some bytes were"));
        }
        if self.workload.notices == Notices::EveryBit && !wrong.is_empty() {
            complaints.push(format!("samples {wrong:?} are wrong, and nobody noticed"));
        }
        if error.is_some() || silent.is_empty() {
            return;
        }
        match self.workload.notices {
            Notices::EveryBit => complaints.push("wrong bytes, and no error".into()),
            // What the page cache had in part is read once more.
            Notices::Nothing if self.way.0 != Mode::Auto && wrong != suspects => {
                complaints.push(format!("samples {wrong:?} are wrong, and {suspects:?} had to be"));
            }
            _ => {}
        }
    }

    /// One typed error that names path, place, sample and code.
    fn check_error(&self, error: &Error, hits: &[Hit], batch: usize, complaints: &mut Complaints) {
        let mut lacks = |what: &str| complaints.push(format!("{what}: {error}"));
        let site = error.site();
        if hits.is_empty() {
            lacks("an error without a fault");
        }
        if matches!(error.kind(), ErrorKind::Panicked | ErrorKind::Cancelled | ErrorKind::Stalled) {
            lacks("of that kind");
        }
        let hit_paths: BTreeSet<&PathBuf> = hits.iter().map(|hit| &self.paths[hit.extent.source.index()]).collect();
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
        let of_hit = |hit: &Hit| hit.extent.len == 0 || Some((hit.extent.offset, hit.extent.len)) == place;
        if place.is_none() || read && !hits.iter().any(of_hit) {
            lacks("not the place");
        }
        // A page of a map that is not to be had is EFAULT to who copies it, and EIO to everybody else.
        let code = |code: i32| if self.way.0 == Mode::Mmap && code == 14 { 5 } else { code };
        let coded = |hit: &Hit| if let Fault::Error(errno) = hit.fault { Some(code(errno)) } else { None };
        let codes: BTreeSet<i32> = hits.iter().filter_map(coded).collect();
        if !codes.is_empty() && !codes.iter().any(|code| error.to_string().contains(&format!("(os error {code})"))) {
            lacks("not the code");
        }
    }
}

/// The epoch, and the error that it ended with.
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

/// Samples of a batch that have other bytes than they should; all else must be the same.
fn wrong_rows(found: &Got, right: &Got, complaints: &mut Complaints) -> BTreeSet<u64> {
    let outside = |got: &Got| (got.epoch, got.index, got.len, got.valid, got.ids.clone(), got.status.clone());
    if outside(found) != outside(right) || found.fields.len() != right.fields.len() {
        complaints.push(format!("batch {:?} in place of {:?}", outside(found), outside(right)));
        return BTreeSet::new();
    }
    let mut wrong = BTreeSet::new();
    for (found_field, right_field) in found.fields.iter().zip(&right.fields) {
        if (&found_field.shape, found_field.dtype) != (&right_field.shape, right_field.dtype) {
            complaints.push(format!("a field of {:?}", found_field.shape));
            continue;
        }
        let each = (right_field.bytes.len() / right.len).max(1);
        let rows = found_field.bytes.chunks(each).zip(right_field.bytes.chunks(each));
        let differ = rows.enumerate().filter(|(_, (found, right))| found != right).map(|(row, _)| row);
        let lens = found_field.lens.iter().flatten().zip(right_field.lens.iter().flatten());
        let lens = lens.enumerate().filter(|(_, (found, right))| found != right).map(|(row, _)| row);
        wrong.extend(differ.chain(lens).map(|row| right.ids[row]));
    }
    wrong
}
