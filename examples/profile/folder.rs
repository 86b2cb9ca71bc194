//! Temporary folders for tests.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Beside the test program, which is on a disk.
        let program = std::env::current_exe().unwrap();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = program
            .ancestors()
            .nth(3)
            .unwrap()
            .join("tmp")
            .join(format!("profile-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
