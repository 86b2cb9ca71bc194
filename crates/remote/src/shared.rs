//! Answers that the processes of a machine share: the first one asks, the others wait for it and
//! read its file.
//!
//! ```text
//! once ──► the file is whole ──► its answer
//!             │ no
//!             └─► lock ──► whole by now? ─no─► ask ──► write in place ──► unlock
//! ```
//!
//! A file is `feedline 1 HASH NAME\n` and the answer; HASH covers both. A half-written file has
//! another hash, so readers need no lock. Where the folder cannot be written, each process asks
//! for itself. A file system without locks lets several ask.

use feedline_base::error::Result;
use feedline_base::metadata::fnv;
use feedline_base::process::Process;
use std::fs::{DirBuilder, File, FileTimes, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Interval between two looks at another process's lock.
const LOOK: Duration = Duration::from_millis(20);

/// Maximum bytes of an answer.
const ANSWER: u64 = 1 << 30;

#[derive(Clone, Debug)]
pub(super) struct Shared {
    folder: PathBuf,
}

/// A locked file. It is unlocked when it is dropped, but not by a forked child.
struct Turn {
    file: File,
    process: Process,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.process.is_forked() {
            let _ = self.file.unlock();
        }
    }
}

impl Shared {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{:016x}", fnv(name.as_bytes())))
    }

    /// The answer with this name: a kept one that is younger than `life`, or that of `ask`.
    ///
    /// Errors: those of `ask`.
    pub(super) async fn once(
        &self,
        name: String,
        life: Duration,
        ask: impl Future<Output = Result<Vec<u8>>> + Send,
    ) -> Result<Vec<u8>> {
        let shared = self.clone();
        let known = name.clone();
        if let Some(found) = blocking(move || shared.kept(&known, life)).await {
            return Ok(found);
        }
        let turn = self.turn(&name).await;
        let shared = self.clone();
        let known = name.clone();
        if let Some(found) = blocking(move || shared.kept(&known, life)).await {
            return Ok(found);
        }
        let answer = ask.await?;
        if let Some(turn) = turn {
            let kept = answer.clone();
            // An answer that cannot be kept is asked for again.
            let _ = blocking(move || Some(keep(&turn, &name, &kept))).await;
        }
        Ok(answer)
    }

    fn kept(&self, name: &str, life: Duration) -> Option<Vec<u8>> {
        let mut file = File::open(self.path(name)).ok()?;
        let meta = file.metadata().ok()?;
        let age = meta.modified().ok()?.elapsed().unwrap_or_default();
        if age > life || meta.len() > ANSWER {
            return None;
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let start = bytes.iter().position(|byte| *byte == b'\n')? + 1;
        let is_whole = bytes[..start] == *head(name, &bytes[start..]).as_bytes();
        is_whole.then(|| bytes.split_off(start))
    }

    /// Locks the file of a name. `None` if it cannot be written or locked.
    async fn turn(&self, name: &str) -> Option<Turn> {
        let path = self.path(name);
        let folder = self.folder.clone();
        let opened = blocking(move || {
            let mut folders = DirBuilder::new();
            folders.recursive(true).mode(0o700).create(folder).ok()?;
            let mut options = File::options();
            options.read(true).write(true).create(true).mode(0o600);
            options.open(path).ok()
        });
        let file = opened.await?;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => tokio::time::sleep(LOOK).await,
                Err(TryLockError::Error(_)) => return None,
            }
        }
        let process = Process::current();
        Some(Turn { file, process })
    }

    /// Time that is left of a pause of all processes.
    pub(super) fn paused(&self, name: &str) -> Option<Duration> {
        let until = self.path(name).metadata().ok()?.modified().ok()?;
        until.duration_since(SystemTime::now()).ok()
    }

    /// Sets a pause for all processes, unless a longer one is set.
    pub(super) async fn pause(&self, name: &str, time: Duration) {
        if self.paused(name).is_some_and(|left| left >= time) {
            return;
        }
        if let Some(turn) = self.turn(name).await {
            let times = FileTimes::new().set_modified(SystemTime::now() + time);
            let _ = turn.file.set_times(times);
        }
    }
}

fn keep(turn: &Turn, name: &str, answer: &[u8]) -> std::io::Result<()> {
    let mut file = &turn.file;
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(head(name, answer).as_bytes())?;
    file.write_all(answer)
}

fn head(name: &str, answer: &[u8]) -> String {
    let hash = fnv(name.as_bytes()) ^ fnv(answer);
    format!("feedline 1 {hash:016x} {name}\n")
}

/// Runs file system calls, which may block, beside the network threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn an_answer_is_asked_for_once_and_again_if_its_file_is_damaged_or_old() {
        let folder = std::env::temp_dir().join(format!("feedline-shared-{}", std::process::id()));
        let shared = Shared::new(folder.join("new"));
        let asked = AtomicUsize::new(0);
        let long = Duration::from_secs(3600);
        let once = |life| {
            let ask = async {
                tokio::time::sleep(LOOK).await;
                asked.fetch_add(1, Ordering::Relaxed);
                Ok(b"some\nanswer".to_vec())
            };
            shared.once("a name".into(), life, ask)
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let both = futures_util::future::join(once(long), once(long)).await;
            assert_eq!(both.0.unwrap(), both.1.unwrap());
            assert_eq!(asked.load(Ordering::Relaxed), 1);
            std::fs::write(
                shared.path("a name"),
                "feedline 1 0123456789abcdef a name\nsome",
            )
            .unwrap();
            assert_eq!(once(long).await.unwrap(), b"some\nanswer");
            assert_eq!(asked.load(Ordering::Relaxed), 2);
            drop(once(Duration::ZERO).await);
            assert_eq!(asked.load(Ordering::Relaxed), 3);
            shared.pause("quota", long).await;
            shared.pause("quota", LOOK).await;
            assert!(shared.paused("quota").is_some_and(|left| left > long / 2));
        });
        std::fs::remove_dir_all(folder).unwrap();
    }
}
