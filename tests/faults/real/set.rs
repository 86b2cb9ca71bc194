//! The data: files of records with computable content.

use feedline::Error;
use feedline::dataset::Records;
use std::fs::File;
use std::path::PathBuf;

use crate::common::noise;

/// Files of records in a folder.
#[derive(Clone, Debug)]
pub struct Set {
    pub dir: PathBuf,
    pub files: usize,
    /// Records in each file.
    pub per_file: usize,
    /// Bytes of a record.
    pub record: usize,
    /// Rows of a batch.
    pub batch: usize,
}

impl Set {
    /// 8 files of 32 records of 4 KiB, 32 batches.
    pub fn usual(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            files: 8,
            per_file: 32,
            record: 4096,
            batch: 8,
        }
    }

    /// The same with other numbers of files and of records in each.
    pub fn sized(self, files: usize, per_file: usize) -> Self {
        Self {
            files,
            per_file,
            ..self
        }
    }

    /// Writes it, and takes it out of the page cache.
    pub fn write(self) -> Self {
        let set = self.write_warm();
        set.cool();
        set
    }

    /// Writes it.
    pub fn write_warm(self) -> Self {
        std::fs::create_dir_all(&self.dir).unwrap();
        for file in 0..self.files {
            std::fs::write(self.path(file), self.bytes(file, 0)).unwrap();
        }
        self
    }

    /// Takes it out of the page cache, so that reads reach storage.
    pub fn cool(&self) {
        for file in 0..self.files {
            if let Ok(file) = File::open(self.path(file)) {
                let _ = file.sync_all();
                let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
            }
        }
    }

    pub fn path(&self, file: usize) -> PathBuf {
        self.dir.join(format!("{file:03}.bin"))
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        (0..self.files).map(|file| self.path(file)).collect()
    }

    pub fn samples(&self) -> usize {
        self.files * self.per_file
    }

    pub fn batches(&self) -> u64 {
        self.samples().div_ceil(self.batch) as u64
    }

    /// Content of a file: the first version, or another version of the same length.
    pub fn bytes(&self, file: usize, version: u64) -> Vec<u8> {
        let samples = (file * self.per_file) as u64..((file + 1) * self.per_file) as u64;
        samples.flat_map(|id| self.sample(id, version)).collect()
    }

    /// Noise; each page begins with its number.
    pub fn sample(&self, id: u64, version: u64) -> Vec<u8> {
        let page = noise(self.record.min(4096), 1 + id + (version << 32));
        let mut bytes: Vec<u8> = page.iter().copied().cycle().take(self.record).collect();
        for (number, page) in bytes.chunks_mut(4096).enumerate() {
            page[0] ^= number as u8;
        }
        bytes
    }

    /// Whether these are a sample's bytes: wholly of the first version or, if files were replaced,
    /// wholly of the second.
    pub fn is_sample(&self, id: u64, bytes: &[u8]) -> bool {
        bytes == self.sample(id, 0)
            || (self.dir.join("replaced").exists() && bytes == self.sample(id, 1))
    }

    pub fn open(&self) -> Result<Records, Error> {
        Records::builder(self.record).open_files(&self.paths())
    }

    pub fn to_text(&self) -> String {
        let numbers = [self.files, self.per_file, self.record, self.batch];
        format!(
            "{} {}",
            numbers.map(|number| number.to_string()).join(" "),
            self.dir.display()
        )
    }

    pub fn from_text(text: &str) -> Self {
        let words: Vec<&str> = text.splitn(5, ' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        Self {
            dir: words[4].into(),
            files: number(0),
            per_file: number(1),
            record: number(2),
            batch: number(3),
        }
    }
}
