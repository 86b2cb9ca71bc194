//! Selects the tasks of one process: an equal part of all tasks, a list, or the launcher's choice.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::order::Rank;
use std::fmt;
use std::ops::Range;

/// Tasks of a plan, for one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tasks(Choice);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    Part(u64, u64),
    List(Vec<Range<u64>>),
}

impl Tasks {
    /// All tasks.
    pub const fn all() -> Self {
        Self(Choice::Part(0, 1))
    }

    /// Part `part` of `parts` equal parts, counted from 0. Errors: [`ErrorKind::Config`] unless
    /// `part < parts`.
    pub fn part(part: u64, parts: u64) -> Result<Self> {
        match parts {
            0 => Err(bad("0 parts: use at least 1")),
            _ if part < parts => Ok(Self(Choice::Part(part, parts))),
            _ => Err(bad(format!(
                "part {part} of {parts}: parts are counted from 0 to {}",
                parts - 1
            ))),
        }
    }

    /// Tasks by number, such as `3,17,40-44`, as Slurm writes them. Errors: [`ErrorKind::Config`]
    /// for anything else.
    pub fn list(text: &str) -> Result<Self> {
        let range = |item: &str| {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            Some((
                first.trim().parse::<u64>().ok()?,
                last.trim().parse::<u64>().ok()?,
            ))
        };
        let ranges = text.split(',').map(|item| match range(item) {
            Some((first, last)) if first <= last => Ok(first..last.saturating_add(1)),
            Some(_) => Err(bad(format!(
                "the range {item:?} in {text:?} ends before it begins"
            ))),
            None => Err(bad(format!(
                "{item:?} in {text:?} is not a task; write tasks as 3,17,40-44"
            ))),
        });
        Ok(Self(Choice::List(ranges.collect::<Result<_>>()?)))
    }

    /// The choice of the launcher: the task `SLURM_ARRAY_TASK_ID` in an array job of Slurm; else
    /// the part of [`Rank::from_env`].
    ///
    /// Errors: [`ErrorKind::Config`] as in `Rank::from_env`, for an array job whose elements have
    /// several ranks each, and without a launcher, since every process would then run all tasks.
    pub fn from_env() -> Result<Self> {
        let variable = |name: &str| {
            std::env::var(name)
                .ok()
                .filter(|value: &String| !value.is_empty())
        };
        let Some(id) = variable("SLURM_ARRAY_TASK_ID") else {
            let rank = Rank::from_env()?;
            if !Rank::is_launched() {
                return Err(bad(
                    "no launcher gives this process a task or a rank: name a part, such as \
                     --part 0/8",
                ));
            }
            return Self::part(rank.number().into(), rank.world().into());
        };
        if let Some(ranks) = variable("SLURM_NTASKS").filter(|ranks| ranks != "1") {
            return Err(bad(format!(
                "SLURM_ARRAY_TASK_ID={id} names one task, but SLURM_NTASKS={ranks} processes \
                 would share it; use --ntasks=1, or name a part"
            )));
        }
        Self::list(&id).map_err(|_| bad(format!("SLURM_ARRAY_TASK_ID={id} is not a task")))
    }

    /// The ranges of tasks. Errors: [`ErrorKind::Config`] for a task that the plan lacks.
    pub(super) fn of(&self, tasks: u64) -> Result<Vec<Range<u64>>> {
        match &self.0 {
            Choice::Part(part, parts) => Ok(vec![share(*part, *parts, tasks)]),
            Choice::List(ranges) => match ranges.iter().find(|range| range.end > tasks) {
                None => Ok(ranges.clone()),
                Some(range) => {
                    let wrong = Numbers(std::slice::from_ref(range));
                    let last = tasks.max(1) - 1;
                    Err(bad(format!(
                        "task {wrong} of a plan of {tasks} tasks, counted from 0 to {last}"
                    )))
                }
            },
        }
    }
}

/// The numbers below `all` in part `part` of `parts`; parts differ by at most one in length.
pub(super) fn share(part: u64, parts: u64, all: u64) -> Range<u64> {
    let start = |part: u64| (u128::from(part) * u128::from(all) / u128::from(parts)) as u64;
    start(part)..start(part + 1)
}

/// Numbers as ranges, such as `3,17,40-44`.
pub(super) struct Numbers<'a>(pub(super) &'a [Range<u64>]);

impl fmt::Display for Numbers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match range.end - range.start {
                1 => write!(f, "{comma}{}", range.start)?,
                _ => write!(f, "{comma}{}-{}", range.start, range.end - 1)?,
            }
        }
        Ok(())
    }
}

pub(super) fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_tasks_reads_as_slurm_writes_it() {
        for (text, expected) in [
            ("3", "3"),
            ("3,17,40-44", "3,17,40-44"),
            (" 1 , 2-2 ", "1,2"),
            ("5-9,5", "5-9,5"),
        ] {
            let ranges = Tasks::list(text).unwrap().of(100).unwrap();
            assert_eq!(Numbers(&ranges).to_string(), expected);
        }
        for text in [
            "",
            "a",
            "-1",
            "3-",
            "4-3",
            "1,,2",
            "1.5",
            "99999999999999999999",
        ] {
            assert_eq!(
                Tasks::list(text).unwrap_err().kind(),
                ErrorKind::Config,
                "{text}"
            );
        }
    }

    #[test]
    fn parts_hold_every_task_once_and_differ_by_one() {
        for (tasks, parts) in [(1, 1), (10, 3), (3, 10), (1000, 7), (u64::MAX, 3)] {
            let shares: Vec<_> = (0..parts).map(|part| share(part, parts, tasks)).collect();
            assert_eq!((shares[0].start, shares[shares.len() - 1].end), (0, tasks));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            let lens = shares.iter().map(|share| share.end - share.start);
            assert!(
                lens.clone().max().unwrap() - lens.min().unwrap() <= 1,
                "{tasks} tasks, {parts} parts"
            );
        }
        for (part, parts) in [(0, 0), (3, 3), (9, 3)] {
            assert_eq!(
                Tasks::part(part, parts).unwrap_err().kind(),
                ErrorKind::Config
            );
        }
    }
}
