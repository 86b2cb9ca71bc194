//! The scenarios: an action on the copy, and feedline's promise for it.

use crate::job::{Act, Kind, When};

/// A scenario: one row of the table for each policy.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub name: &'static str,
    /// Folder for `--keep`.
    pub folder: &'static str,
    pub what: What,
    pub policies: Policies,
    pub promise: Promise,
}

impl Scenario {
    /// Whether its name or folder contains the word.
    pub fn is_called(&self, word: &str) -> bool {
        self.name.contains(word) || self.folder.contains(word)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Act(Act),
    Damage(Kind, When),
    /// Damage, then this act in place of an epoch.
    Both(Act, Kind, When),
    /// Flips header bits, one file and bit at a time.
    Headers,
    /// Ever fewer descriptors.
    Descriptors,
    /// Killed and resumed.
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policies {
    /// The default.
    Fail,
    Both,
}

/// Condition for a row to be ok.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Every sample, with its bytes.
    Exact,
    /// Every sample, or substitutes that the ledger names, or an error.
    ///
    /// The error names the file for damage before opening, and also offset and sample for later
    /// damage.
    Noticed,
    /// As `Noticed`, if a checksum can detect it: only bytes have changed.
    Checksum,
    /// A typed error.
    Refused,
    /// Every sample, or any error.
    Survives,
}

const fn damage(name: &'static str, folder: &'static str, kind: Kind, when: When) -> Scenario {
    let promise = match kind {
        Kind::Flipped | Kind::FlippedHeader | Kind::Replaced => Promise::Checksum,
        _ => Promise::Noticed,
    };
    Scenario {
        name,
        folder,
        what: What::Damage(kind, when),
        policies: Policies::Both,
        promise,
    }
}

const fn act(name: &'static str, folder: &'static str, act: Act, promise: Promise) -> Scenario {
    Scenario {
        name,
        folder,
        what: What::Act(act),
        policies: Policies::Fail,
        promise,
    }
}

const fn with(
    name: &'static str,
    folder: &'static str,
    what: What,
    policies: Policies,
    promise: Promise,
) -> Scenario {
    Scenario {
        name,
        folder,
        what,
        policies,
        promise,
    }
}

use When::{Before, Indexed};

/// The first is the oracle of the others.
pub const SCENARIOS: [Scenario; 24] = [
    act("intact", "intact", Act::Oracle, Promise::Exact),
    damage("cut in half, before", "cut", Kind::Cut, Before),
    damage(
        "cut in half, when indexed",
        "cut-indexed",
        Kind::Cut,
        Indexed,
    ),
    damage("emptied, before", "emptied", Kind::Emptied, Before),
    damage(
        "emptied, when indexed",
        "emptied-indexed",
        Kind::Emptied,
        Indexed,
    ),
    damage("removed, before", "removed", Kind::Removed, Before),
    damage(
        "removed, when indexed",
        "removed-indexed",
        Kind::Removed,
        Indexed,
    ),
    with(
        "removed; then an older state",
        "removed-state",
        What::Both(Act::Older, Kind::Removed, Before),
        Policies::Fail,
        Promise::Refused,
    ),
    damage(
        "other file, same length",
        "replaced-indexed",
        Kind::Replaced,
        Indexed,
    ),
    damage(
        "a bit in each of some files",
        "flipped",
        Kind::Flipped,
        Before,
    ),
    with(
        "a bit in a header or index",
        "flipped-header",
        What::Headers,
        Policies::Fail,
        Promise::Checksum,
    ),
    damage("grown, before", "grown", Kind::Grown, Before),
    damage("grown, when indexed", "grown-indexed", Kind::Grown, Indexed),
    damage(
        "no permission, before",
        "forbidden",
        Kind::Forbidden,
        Before,
    ),
    damage(
        "no permission, when indexed",
        "forbidden-indexed",
        Kind::Forbidden,
        Indexed,
    ),
    damage("a FIFO, before", "fifo", Kind::Fifo, Before),
    damage("a FIFO, when indexed", "fifo-indexed", Kind::Fifo, Indexed),
    damage("a folder, before", "folder", Kind::Folder, Before),
    damage(
        "a folder, when indexed",
        "folder-indexed",
        Kind::Folder,
        Indexed,
    ),
    with(
        "fewer and fewer descriptors",
        "descriptors",
        What::Descriptors,
        Policies::Fail,
        Promise::Survives,
    ),
    act("no io_uring (pread)", "pread", Act::Pread, Promise::Exact),
    act(
        "stopped for a second",
        "stopped",
        Act::Stopped,
        Promise::Exact,
    ),
    with(
        "kill -9, then resumed",
        "killed",
        What::Kill,
        Policies::Fail,
        Promise::Exact,
    ),
    act("intact, again", "again", Act::Read, Promise::Exact),
];
