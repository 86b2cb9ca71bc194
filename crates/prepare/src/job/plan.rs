//! A plan: the inputs and settings of a job, cut into tasks.

use super::super::output;
use super::super::pictures::Picture;
use super::super::shards::{MANIFEST, PLAN, ShardSettings, Shards};
use super::super::tokens::TokenSettings;
use super::file::{Input, ShardReader, Writer};
use super::listing::each_picture;
use super::tasks::{bad, share};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::is_url;
use feedline_core::dataset::Dataset;
use feedline_core::storage::listing::{expand, look, names_in, real_path, regular};
use feedline_core::storage::publish::{make_folder, remove_folder, target_of};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The inputs and settings of a job, cut into tasks; see the guide jobs.
pub struct Plan {
    pub(super) reader: ShardReader,
    pub(super) head: Head,
    /// The folder of the plan and of all output.
    pub(super) dir: PathBuf,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Head {
    /// Folder of the inputs; empty if their paths are absolute.
    pub(super) root: String,
    pub(super) tasks: u64,
    pub(super) work: Work,
    #[serde(skip)]
    pub(super) notes: Notes,
}

/// Facts in a plan that do not affect the output.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Notes {
    /// Number of files in the folder that are not inputs, by ending.
    left_out: BTreeMap<String, u64>,
    /// Whether damaged pictures or texts are left out. A task without damage gives the same output
    /// either way.
    skip_damaged: bool,
}

#[derive(PartialEq, Serialize, Deserialize)]
pub(super) enum Work {
    Shards(ShardSettings),
    /// Whole files, one at a time.
    Files {
        settings: String,
    },
    /// The pictures of a folder, many at a time.
    Pictures {
        settings: String,
    },
    Tokens(TokenSettings),
}

impl Work {
    /// Number of units that tasks share: the inputs, or samples or chunks.
    fn units(&self, inputs: u64) -> u64 {
        match self {
            Self::Tokens(settings) => settings.units,
            _ => inputs,
        }
    }
}

impl Shards {
    /// Writes `plan.fdp` into the folder `to`: the pictures of `from`, these settings, and `tasks`
    /// tasks. Task *k* of *n* writes shard *k*: the pictures from position *k/n* to *(k+1)/n* of
    /// the order. Limits of a shard and the number of workers do not apply.
    ///
    /// Lists and measures the pictures once, in bounded memory, except that a folder in a bucket is
    /// listed as a whole. All nodes must reach `from` and `to` by the same paths.
    ///
    /// Errors: those of [`Images::open`](feedline_formats::Images::open); [`ErrorKind::Config`] if
    /// `to` is not empty, if one folder contains the other, or for more tasks than pictures.
    pub fn plan(&self, from: impl AsRef<Path>, to: impl AsRef<Path>, tasks: u64) -> Result<Plan> {
        let from = from.as_ref();
        let to = to.as_ref();
        let root = root_of(from, to)?;
        in_empty(to, || self.plan_in(&root, to, |_, _| Ok(tasks)))
    }

    /// Writes the plan, unless the folder holds an equal plan. `tasks` returns the number of tasks,
    /// given the number of pictures and their total bytes.
    pub(super) fn plan_in(
        &self,
        root: &Path,
        to: &Path,
        tasks: impl FnOnce(u64, u64) -> Result<u64>,
    ) -> Result<Plan> {
        write_pictures(root, to, Work::Shards(self.settings.clone()), tasks)
    }

    /// Like [`plan`](Self::plan), but repeats the folder's pictures until there are `inputs`
    /// inputs. For measurements at scale.
    #[cfg(feature = "unstable")]
    #[doc(hidden)]
    pub fn plan_repeated(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        tasks: u64,
        inputs: u64,
    ) -> Result<Plan> {
        let to = to.as_ref();
        let root = root_of(from.as_ref(), to)?;
        check_empty(to)?;
        let mut pictures = Vec::new();
        each_picture(&root, to, &mut |input| {
            pictures.push(input);
            Ok(())
        })?;
        let root = root.to_string_lossy().into();
        let repeated = pictures
            .iter()
            .cycle()
            .take(usize::try_from(inputs).unwrap_or(usize::MAX));
        write(
            to,
            root,
            Work::Shards(self.settings.clone()),
            |writer, head| {
                head.tasks = tasks;
                repeated.into_iter().try_for_each(|input| writer.add(input))
            },
        )
    }
}

impl Plan {
    /// Opens `plan.fdp`; `path` is the file or its folder. Errors: those of opening;
    /// [`ErrorKind::Decode`] for a file that is not a plan or is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let reader = match ShardReader::open(path) {
            Err(error) if error.kind() == ErrorKind::NotAFile => {
                ShardReader::open(&path.join(PLAN))
            }
            reader => reader,
        };
        let reader = reader.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                error.with_note("name the folder or the file of a plan; `plan` creates one")
            }
            _ => error,
        })?;
        let head = serde_json::from_str(&reader.settings);
        let head = head.and_then(|head: Head| {
            Ok(Head {
                notes: serde_json::from_str(&reader.notes)?,
                ..head
            })
        });
        let mut head = head.map_err(|source| {
            let message = "another version of this program wrote the settings of the plan";
            Error::new(ErrorKind::Decode, Stage::Index, message)
                .with_source(source)
                .with_path(reader.path())
        })?;
        match &mut head.work {
            Work::Shards(settings) => settings.skip_damaged = head.notes.skip_damaged,
            Work::Tokens(settings) => settings.skip_damaged = head.notes.skip_damaged,
            Work::Files { .. } | Work::Pictures { .. } => {}
        }
        let units = head.work.units(reader.inputs);
        if head.tasks == 0 || head.tasks > units {
            let message = format!("a plan of {} tasks for {units} inputs", head.tasks);
            return Err(
                Error::new(ErrorKind::Decode, Stage::Index, message).with_path(reader.path())
            );
        }
        let dir = reader
            .path()
            .parent()
            .filter(|dir| !dir.as_os_str().is_empty())
            .unwrap_or(Path::new("."))
            .to_path_buf();
        Ok(Self { reader, head, dir })
    }

    /// Writes `plan.fdp` into the folder `to`, for work on whole files by
    /// [`run_files`](Self::run_files). `pattern`: a file, a folder (its files with one of
    /// `endings`; all files if `endings` is empty), or a pattern such as `train-{0000..0127}.tar`.
    /// Task *k* of *n* gets the files from *k/n* to *(k+1)/n*. The plan stores `settings` for the
    /// program.
    ///
    /// Errors: a missing file; [`ErrorKind::Config`] if `to` is not empty, or for more tasks than
    /// files.
    pub fn of_files(
        pattern: impl AsRef<Path>,
        endings: &[&str],
        settings: &str,
        to: impl AsRef<Path>,
        tasks: u64,
    ) -> Result<Self> {
        let files = expand(pattern, endings)?.files;
        let to = to.as_ref();
        let work = Work::Files {
            settings: settings.into(),
        };
        in_empty(to, || {
            write(to, String::new(), work, |writer, head| {
                head.tasks = tasks;
                files.iter().try_for_each(|file| add_file(writer, file))
            })
        })
    }

    /// Like [`of_files`](Self::of_files), for the pictures of a folder in the order of
    /// [`Images::open`](feedline_formats::Images::open). Lists them in bounded memory. Errors:
    /// those of both functions.
    pub fn of_pictures(
        folder: impl AsRef<Path>,
        settings: &str,
        to: impl AsRef<Path>,
        tasks: u64,
    ) -> Result<Self> {
        let to = to.as_ref();
        let root = root_of(folder.as_ref(), to)?;
        let work = Work::Pictures {
            settings: settings.into(),
        };
        in_empty(to, || write_pictures(&root, to, work, |_, _| Ok(tasks)))
    }

    /// Number of tasks, at least 1.
    pub fn tasks(&self) -> u64 {
        self.head.tasks
    }

    /// Number of inputs.
    pub fn inputs(&self) -> u64 {
        self.reader.inputs
    }

    /// Bytes of all inputs.
    pub fn bytes(&self) -> u64 {
        self.reader.bytes
    }

    /// Number of files in the input folder that are not inputs, by ending.
    pub fn left_out(&self) -> &BTreeMap<String, u64> {
        &self.head.notes.left_out
    }

    /// Whether the plan was made by [`TokenFiles::plan`](crate::TokenFiles::plan).
    pub fn is_of_tokens(&self) -> bool {
        matches!(self.head.work, Work::Tokens(_))
    }

    /// The settings of [`of_files`](Self::of_files) and [`of_pictures`](Self::of_pictures), or those
    /// that [`TokenFiles::keep`](crate::TokenFiles::keep) keeps; `None` for a plan made by
    /// [`Shards::plan`].
    pub fn settings(&self) -> Option<&str> {
        match &self.head.work {
            Work::Files { settings } | Work::Pictures { settings } => Some(settings),
            Work::Tokens(settings) => Some(&settings.kept),
            Work::Shards(_) => None,
        }
    }

    /// A hash of settings and inputs: plans with equal ids have the same output.
    pub fn id(&self) -> u64 {
        self.reader.id
    }

    pub(super) fn id_text(&self) -> String {
        format!("{:016x}", self.id())
    }

    /// The folder of the inputs.
    pub(super) fn root(&self) -> &Path {
        Path::new(&self.head.root)
    }

    /// The input with this number.
    pub(super) fn picture(&self, sample: u64) -> Result<Picture> {
        let Input {
            name,
            class,
            len,
            version,
        } = self.reader.get(sample)?;
        Ok(Picture {
            sample,
            path: self.root().join(name),
            len,
            version,
            class,
        })
    }

    /// The inputs of a task; for tokens, its samples or chunks.
    pub(super) fn share(&self, task: u64) -> Range<u64> {
        share(task, self.tasks(), self.head.work.units(self.inputs()))
    }

    /// The path of a task's record.
    pub(super) fn record(&self, task: u64) -> PathBuf {
        self.records().join(format!("{task:06}.tsv"))
    }

    /// The folder of the records.
    pub(super) fn records(&self) -> PathBuf {
        self.dir.join(TASKS)
    }
}

/// The folder of the records.
const TASKS: &str = "tasks";

/// Writes the inputs that `list` adds, then the settings with the number of tasks that `list` sets,
/// and opens the plan.
fn write(
    dir: &Path,
    root: String,
    work: Work,
    list: impl FnOnce(&mut Writer, &mut Head) -> Result<()>,
) -> Result<Plan> {
    let skip_damaged = match &work {
        Work::Shards(settings) => settings.skip_damaged,
        Work::Tokens(settings) => settings.skip_damaged,
        Work::Files { .. } | Work::Pictures { .. } => false,
    };
    let notes = Notes {
        skip_damaged,
        ..Notes::default()
    };
    let mut head = Head {
        root,
        tasks: 0,
        work,
        notes,
    };
    let mut writer = Writer::create(dir.join(PLAN))?;
    list(&mut writer, &mut head)?;
    let tasks = head.tasks;
    let units = head.work.units(writer.inputs);
    if tasks == 0 {
        return Err(bad("a plan of 0 tasks: use at least 1"));
    }
    if tasks > units {
        return Err(bad(format!(
            "{tasks} tasks for {units} inputs: use at most {units} tasks"
        )));
    }
    let json = serde_json::to_string(&head)
        .and_then(|head_json| Ok((head_json, serde_json::to_string(&head.notes)?)));
    let (settings, notes) =
        json.map_err(|source| bad("the settings cannot be written as JSON").with_source(source))?;
    let id = writer.id(&settings);
    let path = dir.join(PLAN);
    match writer.finish(&settings, &notes) {
        // An existing plan with equal inputs and settings stays.
        Err(error)
            if error.kind() == ErrorKind::Config
                && !Plan::open(&path).is_ok_and(|there| there.id() == id) =>
        {
            return Err(bad("the output folder holds another plan").with_path(path));
        }
        Err(error) if error.kind() != ErrorKind::Config => return Err(error),
        _ => {}
    }
    make_folder(&dir.join(TASKS)).map_err(|source| output::failed(source, dir))?;
    Plan::open(dir.join(PLAN))
}

/// Adds a whole file.
fn add_file(writer: &mut Writer, file: &Path) -> Result<()> {
    let name = absolute(file)?;
    let meta = regular(&name)?;
    writer.add(&Input {
        name,
        class: None,
        len: meta.len,
        version: meta.version,
    })
}

/// Writes the plan of a dataset, whose files are the inputs.
pub(super) fn write_dataset(
    dataset: &dyn Dataset,
    to: &Path,
    work: Work,
    tasks: u64,
) -> Result<Plan> {
    let sources = dataset.sources();
    if sources.ids().any(|id| sources.bytes_of(id).is_some()) {
        return Err(bad("data in memory: a plan needs files"));
    }
    write(to, String::new(), work, |writer, head| {
        head.tasks = tasks;
        let mut files = sources.ids().map(|id| sources.path(id));
        files.try_for_each(|file| add_file(writer, &file))
    })
}

fn absolute(path: &Path) -> Result<PathBuf> {
    if is_url(path) {
        return Ok(path.to_path_buf());
    }
    let full = std::path::absolute(path);
    full.map_err(|source| {
        Error::os(Stage::Index, "cannot make the path absolute", source).with_path(path)
    })
}

fn write_pictures(
    root: &Path,
    to: &Path,
    work: Work,
    tasks: impl FnOnce(u64, u64) -> Result<u64>,
) -> Result<Plan> {
    let text = root
        .to_str()
        .ok_or_else(|| bad("a plan needs a folder whose path is UTF-8").with_path(root))?;
    write(to, text.into(), work, |writer, head| {
        let mut bytes = 0_u64;
        head.notes.left_out = each_picture(root, to, &mut |input| {
            bytes = bytes.saturating_add(input.len);
            writer.add(&input)
        })?;
        head.tasks = tasks(writer.inputs, bytes)?;
        Ok(())
    })
}

/// The folder's path without links. Errors: a folder that cannot be opened; [`ErrorKind::Config`]
/// if one of the folders contains the other, since output would be listed as input.
pub(super) fn root_of(folder: &Path, to: &Path) -> Result<PathBuf> {
    check_local(to)?;
    let from = real_path(folder).map_err(|source| {
        Error::os(Stage::Index, "cannot open the folder", source).with_path(folder)
    })?;
    let to = real(to);
    if from.starts_with(&to) || to.starts_with(&from) {
        let message = format!(
            "the input folder {} and the output folder overlap; use separate ones",
            from.display()
        );
        return Err(bad(message).with_path(to));
    }
    Ok(from)
}

/// Resolves symbolic links in the part of the path that exists.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    for ancestor in absolute.ancestors() {
        if let Ok(found) = real_path(ancestor) {
            let rest = absolute.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return found.join(rest);
        }
    }
    absolute
}

/// Calls `work` if the output folder is empty or new. After an error, a new folder is removed.
pub(super) fn in_empty(to: &Path, work: impl FnOnce() -> Result<Plan>) -> Result<Plan> {
    check_local(to)?;
    let new = look(to).is_err();
    let planned = check_empty(to).and_then(|()| work());
    if new && planned.is_err() {
        remove_folder(to);
    }
    planned
}

fn check_local(to: &Path) -> Result<()> {
    match is_url(to) {
        true => Err(bad("the output of a plan is a folder, not a bucket").with_path(to)),
        false => Ok(()),
    }
}

/// Creates the output folder, or checks that it is empty except for hidden files of interrupted
/// plans.
fn check_empty(to: &Path) -> Result<()> {
    make_folder(to).map_err(|source| output::failed(source, to))?;
    let names = names_in(to)?.into_iter().map(|(name, _)| name);
    let others: Vec<_> = names
        .filter(|name| target_of(&name.to_string_lossy()).is_none())
        .collect();
    let Some(first) = others.first() else {
        return Ok(());
    };
    let holds = |name: &str| others.iter().any(|other| other == name);
    let (message, path) = match () {
        () if holds(PLAN) => (
            "the output folder holds a plan: run and finish it, or choose another folder",
            to.join(PLAN),
        ),
        () if holds(MANIFEST) => (
            "the output folder holds finished output: choose another folder, or remove this one",
            to.join(MANIFEST),
        ),
        () => (
            "the output folder is not empty: choose another folder",
            to.join(first),
        ),
    };
    Err(Error::new(ErrorKind::Config, Stage::Write, message).with_path(path))
}
