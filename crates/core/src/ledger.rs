//! The ledger: the list of all bad samples that substitutes replaced.
//!
//! ```text
//! row with a bad sample ──► BadSample, kept with the batch ──► batch is handed out ──► Ledger ──► file, a line each
//! ```
//!
//! The loader adds the entries of a batch when it hands out the batch, in order. So the ledger does
//! not depend on workers and holds delivered rows only. Limits: the memory holds one entry per
//! distinct sample, as many as the budget allows; the file gets one line per occurrence. The file
//! is appended to and never read.

use feedline_base::error::{Error, ErrorKind, Result, Stage, one_line};
use feedline_base::setting::Setting;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Limits of the error for an exceeded budget: the number of bad samples that it describes, and of
/// further new ones that it lists by id only.
const NAMED: usize = 10;
const NUMBERED: usize = 1000;

/// A sample that could not be read or decoded, and the outcome for its row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BadSample {
    /// Epoch.
    pub epoch: u64,
    /// Batch in the epoch.
    pub batch: u64,
    /// Row in the batch.
    pub row: u32,
    /// The bad sample: an index in the dataset.
    pub sample: u64,
    /// The sample that replaces it in its row; `None` for a substitute that was bad, too.
    pub substitute: Option<u64>,
    /// The file, if the sample is stored in one.
    pub path: Option<PathBuf>,
    /// The sample's name within that file (its first member in a tar, its Parquet row group), if
    /// the dataset knows one.
    pub member: Option<String>,
    /// Byte offset of the failed read in the file. The read may cover more than this member.
    pub offset: Option<u64>,
    /// Bytes of that read.
    pub length: Option<u64>,
    /// The kind of the error, for programs.
    #[serde(serialize_with = "kind")]
    pub kind: ErrorKind,
    /// The stage that failed.
    #[serde(serialize_with = "stage")]
    pub stage: Stage,
    /// The error's message, for people.
    pub cause: String,
    /// Number of delivered rows that needed the sample. Not in the file, which has a line per
    /// occurrence.
    #[serde(skip)]
    pub times: u64,
}

fn kind<S: serde::Serializer>(kind: &ErrorKind, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(kind.as_str())
}

fn stage<S: serde::Serializer>(stage: &Stage, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(stage.as_str())
}

/// The position of a row: epoch, batch and row.
pub struct RowPlace {
    pub epoch: u64,
    pub batch: u64,
    pub row: u32,
}

impl BadSample {
    /// The entry for the row at `place`, whose `sample` failed with `error`.
    #[doc(hidden)]
    pub fn new(place: RowPlace, sample: u64, error: &Error, member: Option<String>) -> Self {
        let RowPlace { epoch, batch, row } = place;
        let site = error.site();
        let source = std::error::Error::source(error)
            .map(ToString::to_string)
            .unwrap_or_default();
        let joint = if error.message().is_empty() || source.is_empty() {
            ""
        } else {
            ": "
        };
        Self {
            epoch,
            batch,
            row,
            sample,
            substitute: None,
            path: site.path.clone(),
            member,
            offset: site.offset,
            length: site.len,
            kind: error.kind(),
            stage: error.stage(),
            cause: format!("{}{joint}{source}", error.message()),
            times: 0,
        }
    }
}

impl fmt::Display for BadSample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sample {}", self.sample)?;
        if let Some(path) = &self.path {
            // One line for any file name.
            write!(f, " in {path:?}")?;
        }
        if let Some(member) = &self.member {
            write!(f, " ({})", brief(member))?;
        }
        if let (Some(offset), Some(length)) = (self.offset, self.length) {
            write!(f, " at {offset}, {length} bytes")?;
        }
        write!(f, ": {}: {}", self.stage.as_str(), self.kind.as_str())?;
        if self.cause.is_empty() {
            Ok(())
        } else {
            write!(f, ": {}", brief(&self.cause))
        }
    }
}

/// Text from files and from the user's code: one line of at most 500 characters.
fn brief(words: &str) -> String {
    one_line(words).chars().take(500).collect()
}

/// `1 row`, `2 rows`.
fn count_of(count: u64, what: &str) -> String {
    if count == 1 {
        format!("1 {what}")
    } else {
        format!("{count} {what}s")
    }
}

/// The bad samples that a loader has substituted so far. See
/// `LoaderBuilder::on_bad_sample`.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Ledger {
    /// Distinct bad samples in the order of their first row, each as it was in that row.
    pub samples: Vec<BadSample>,
    /// Rows of delivered batches that hold a substitute.
    pub substituted: u64,
    /// The ledger's file, if there is one.
    pub path: Option<PathBuf>,
    /// The first error of writing the file. Training and the list in memory continue.
    pub not_written: Option<String>,
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = count_of(self.substituted, "row");
        let samples = count_of(self.samples.len() as u64, "bad sample");
        write!(f, "{rows} substituted, {samples}")?;
        match (&self.path, &self.not_written) {
            (Some(path), Some(why)) => {
                write!(f, "; {} could not be written: {why}", path.display())
            }
            (Some(path), None) => write!(f, ", in {}", path.display()),
            (None, _) => Ok(()),
        }
    }
}

/// The ledger of a loader, with its file.
pub struct LedgerWriter {
    pub ledger: Ledger,
    /// Position of each sample in the list.
    places: BTreeMap<u64, usize>,
    file: Option<File>,
    /// Whether the file's last line may be incomplete.
    torn: bool,
    budget: u64,
}

impl LedgerWriter {
    /// Opens a ledger for at most `budget` distinct bad samples. The file at `path` gets every
    /// occurrence.
    ///
    /// Errors: those of opening the file for appending; [`ErrorKind::NotAFile`].
    pub fn open(budget: u64, path: Option<&Path>) -> Result<Self> {
        let file = path.map(open).transpose()?;
        let ledger = Ledger {
            path: path.map(Path::to_path_buf),
            ..Ledger::default()
        };
        Ok(Self {
            ledger,
            places: BTreeMap::new(),
            file,
            torn: false,
            budget,
        })
    }

    /// Adds the bad samples of a batch that is handed out.
    ///
    /// Errors: [`ErrorKind::BadSamples`] over the budget; then the batch is not handed out, and
    /// none of its entries is kept.
    pub fn add(&mut self, bad: Vec<BadSample>) -> Result<()> {
        if let Some(error) = self.refuse(&bad) {
            return Err(error);
        }
        let mut lines = Vec::new();
        for mut entry in bad {
            if self.file.is_some() {
                // All fields are strings and numbers, so JSON refuses only a path that is not
                // UTF-8.
                let line = serde_json::to_vec(&entry).or_else(|_| {
                    let name = entry
                        .path
                        .as_ref()
                        .map(|path| path.to_string_lossy().into_owned().into());
                    serde_json::to_vec(&BadSample {
                        path: name,
                        ..entry.clone()
                    })
                });
                lines.extend(line.unwrap_or_default());
                lines.push(b'\n');
            }
            let counts = u64::from(entry.substitute.is_some());
            self.ledger.substituted += counts;
            if let Some(place) = self.places.get(&entry.sample) {
                self.ledger.samples[*place].times += counts;
                continue;
            }
            entry.times = counts;
            self.places.insert(entry.sample, self.ledger.samples.len());
            self.ledger.samples.push(entry);
        }
        self.write(&lines);
        Ok(())
    }

    /// The error if the samples `bad` exceed the budget.
    pub fn refuse(&self, bad: &[BadSample]) -> Option<Error> {
        let fresh: BTreeMap<u64, &BadSample> = bad
            .iter()
            .rev()
            .filter(|bad| !self.places.contains_key(&bad.sample))
            .map(|bad| (bad.sample, bad))
            .collect();
        let count = (self.ledger.samples.len() + fresh.len()) as u64;
        (!fresh.is_empty() && count > self.budget)
            .then(|| self.exceeded(count, &fresh.into_values().collect::<Vec<_>>()))
    }

    /// Writes a batch's lines in one call, so that a killed run leaves whole lines.
    fn write(&mut self, lines: &[u8]) {
        let Some(file) = &mut self.file else { return };
        if lines.is_empty() {
            return;
        }
        let torn = if self.torn {
            file.write_all(b"\n")
        } else {
            Ok(())
        };
        let written = torn.and_then(|()| file.write_all(lines));
        self.torn = written.is_err();
        if let Err(error) = written {
            self.ledger
                .not_written
                .get_or_insert_with(|| error.to_string());
        }
    }

    fn exceeded(&self, count: u64, fresh: &[&BadSample]) -> Error {
        // New bad samples come first, because the ledger does not hold them yet.
        let mut said: Vec<_> = fresh
            .iter()
            .rev()
            .take(NAMED)
            .map(ToString::to_string)
            .collect();
        if fresh.len() > NAMED {
            let rest = fresh[..fresh.len() - NAMED].iter().rev();
            let numbers: Vec<_> = rest
                .clone()
                .take(NUMBERED)
                .map(|bad| bad.sample.to_string())
                .collect();
            let more = if rest.len() > NUMBERED {
                format!(" and {} more", rest.len() - NUMBERED)
            } else {
                String::new()
            };
            said.push(format!("samples {}{more}", numbers.join(", ")));
        }
        let before = &self.ledger.samples;
        let described = before.iter().rev().take(NAMED.saturating_sub(fresh.len()));
        said.extend(described.clone().map(ToString::to_string));
        match (before.len() - described.len(), &self.ledger.path) {
            (0, _) => {}
            (before, Some(path)) => {
                said.push(format!("and {before} earlier ones, in {}", path.display()))
            }
            (before, None) => said.push(format!(
                "and {before} earlier ones{}",
                Setting::Ledger.hint(|ledger| format!(", see {ledger}"))
            )),
        }
        let bad = count;
        let count = count_of(count, "bad sample");
        let budget = self.budget;
        let message = format!("{count}, the budget is {budget}: {}", said.join("; "));
        let error =
            Error::new(ErrorKind::BadSamples, Stage::Batch, message).with_amounts(bad, budget);
        let Some(last) = fresh.last() else {
            return error;
        };
        let error = error.with_sample(last.sample).with_batch(last.batch);
        let error = last
            .path
            .iter()
            .fold(error, |error, path| error.with_path(path));
        match (last.offset, last.length) {
            (Some(offset), Some(length)) => error.with_range(offset, length),
            _ => error,
        }
    }
}

fn open(path: &Path) -> Result<File> {
    // With `O_NONBLOCK`, a FIFO at the path is an error, not a wait for a reader.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let opened = OpenOptions::new()
        .append(true)
        .create(true)
        .custom_flags(flags)
        .open(path);
    let failed =
        |error| Error::os(Stage::Build, "the ledger cannot be written", error).with_path(path);
    let file = opened.map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(Error::new(ErrorKind::NotAFile, Stage::Build, "the ledger").with_path(path));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad(sample: u64, row: u32, substitute: Option<u64>) -> BadSample {
        let error = Error::new(
            ErrorKind::Truncated,
            Stage::Read,
            "4 bytes expected, 1 read",
        )
        .with_path("/data/a.bin")
        .with_range(8, 4)
        .with_source("end of file");
        BadSample {
            substitute,
            ..BadSample::new(
                RowPlace {
                    epoch: 1,
                    batch: 2,
                    row,
                },
                sample,
                &error,
                Some("cat.jpg".into()),
            )
        }
    }

    #[test]
    fn a_bad_sample_counts_once_against_the_budget() {
        let mut writer = LedgerWriter::open(2, None).unwrap();
        writer
            .add(vec![bad(5, 0, Some(9)), bad(5, 3, Some(1))])
            .unwrap();
        writer
            .add(vec![bad(7, 0, Some(9)), bad(5, 1, Some(2))])
            .unwrap();
        let times: Vec<_> = writer
            .ledger
            .samples
            .iter()
            .map(|entry| (entry.sample, entry.times))
            .collect();
        assert_eq!(
            (times, writer.ledger.substituted),
            (vec![(5, 3), (7, 1)], 4)
        );
    }

    #[test]
    fn a_bad_substitute_counts_against_the_budget_but_not_as_row() {
        let mut writer = LedgerWriter::open(1, None).unwrap();
        let error = writer
            .add(vec![bad(5, 0, Some(9)), bad(8, 0, None)])
            .unwrap_err();
        // The batch is not handed out, and none of its entries counts.
        assert_eq!(
            (error.kind(), writer.ledger.substituted),
            (ErrorKind::BadSamples, 0)
        );
        assert!(writer.ledger.samples.is_empty());
        let mut writer = LedgerWriter::open(2, None).unwrap();
        writer
            .add(vec![bad(5, 0, Some(9)), bad(8, 0, None)])
            .unwrap();
        assert_eq!(
            (writer.ledger.substituted, writer.ledger.samples.len()),
            (1, 2)
        );
    }

    #[test]
    fn over_the_budget_the_error_lists_the_new_bad_samples() {
        let mut writer = LedgerWriter::open(11, None).unwrap();
        writer
            .add((0..11).map(|sample| bad(sample, 0, Some(99))).collect())
            .unwrap();
        let text = writer
            .add(vec![bad(11, 0, Some(99))])
            .unwrap_err()
            .to_string();
        let of = |sample: u64| {
            format!(
                "sample {sample} in \"/data/a.bin\" (cat.jpg) at 8, 4 bytes: read: \
                 truncated: 4 bytes expected, 1 read: end of file"
            )
        };
        let site = "path=/data/a.bin offset=8 len=4 sample=11 batch=2";
        let first = "batch: too many bad samples: 12 bad samples, the budget is 11";
        let ten = (2..12).rev().map(of).collect::<Vec<_>>().join("; ");
        assert_eq!(
            text,
            format!("{first}: {ten}; and 2 earlier ones, see `Loader::ledger`: {site}")
        );

        let text = writer
            .add((11..26).map(|sample| bad(sample, 0, None)).collect())
            .unwrap_err()
            .to_string();
        assert!((16..26).all(|sample| text.contains(&of(sample))), "{text}");
        assert!(
            text.contains("; samples 15, 14, 13, 12, 11; and 11 earlier ones"),
            "{text}"
        );
        assert!(!text.contains('\n'), "{text}");
    }

    #[test]
    fn the_file_has_a_line_for_each_time_and_is_appended_to() {
        let path = std::env::temp_dir().join(format!("feedline-ledger-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        for _ in 0..2 {
            let mut writer = LedgerWriter::open(9, Some(&path)).unwrap();
            writer
                .add(vec![bad(5, 0, Some(9)), bad(5, 1, Some(3))])
                .unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let line = "{\"epoch\":1,\"batch\":2,\"row\":0,\"sample\":5,\"substitute\":9,\"path\":\"/data/a.bin\",\"member\":\"cat.jpg\",\"offset\":8,\"length\":4,\"kind\":\"truncated\",\"stage\":\"read\",\"cause\":\"4 bytes expected, 1 read: end of file\"}";
        assert_eq!((text.lines().next(), text.lines().count()), (Some(line), 4));
    }

    #[test]
    fn foreign_text_stays_on_one_line_after_a_torn_one() {
        let entry = BadSample {
            cause: "a\nb\u{1b}[2J".into(),
            member: Some("x\ny".into()),
            ..bad(1, 0, Some(2))
        };
        assert!(!entry.to_string().contains(char::is_control), "{entry}");
        let path =
            std::env::temp_dir().join(format!("feedline-ledger-torn-{}", std::process::id()));
        std::fs::write(&path, "{\"half").unwrap();
        let mut writer = LedgerWriter::open(1, Some(&path)).unwrap();
        writer.torn = true;
        writer.add(vec![entry]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(
            text.lines().count() == 2 && text.lines().nth(1).unwrap().starts_with("{\"epoch\""),
            "{text}"
        );
    }

    #[test]
    fn a_path_that_is_not_utf_8_is_written_all_the_same() {
        use std::os::unix::ffi::OsStrExt;
        let path =
            std::env::temp_dir().join(format!("feedline-ledger-utf8-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let name = std::ffi::OsStr::from_bytes(b"/data/\xff.jpg");
        let entry = BadSample {
            path: Some(name.into()),
            ..bad(1, 0, Some(2))
        };
        LedgerWriter::open(1, Some(&path))
            .unwrap()
            .add(vec![entry])
            .unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(
            text.contains("/data/\u{fffd}.jpg") && text.contains("\"sample\":1,"),
            "{text}"
        );
    }

    #[test]
    fn an_unusable_ledger_is_an_error_and_a_full_disk_is_noted() {
        let error = LedgerWriter::open(1, Some(Path::new("/nowhere/ledger")))
            .err()
            .unwrap();
        assert_eq!(
            (error.kind(), error.site().path.as_deref()),
            (ErrorKind::NotFound, Some(Path::new("/nowhere/ledger")))
        );
        assert!(LedgerWriter::open(1, Some(Path::new("/dev/null"))).is_err());
        let mut writer = LedgerWriter::open(1, None).unwrap();
        writer.file = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        writer.add(vec![bad(5, 0, Some(9))]).unwrap();
        assert!(
            writer
                .ledger
                .not_written
                .as_ref()
                .unwrap()
                .contains("No space"),
            "{:?}",
            writer.ledger
        );
    }
}
