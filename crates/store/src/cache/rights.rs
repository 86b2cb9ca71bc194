//! The access rights of a cache: only the owner may use its folders and files (0700 and 0600). In a
//! folder that its group may write to, the group may use them, too (0770 and 0660). No file is
//! opened through a link.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Flags of every open: links are not followed, and a pipe does not block the open.
const NO_LINK: i32 = rustix::fs::OFlags::NOFOLLOW
    .union(rustix::fs::OFlags::NONBLOCK)
    .bits() as i32;

/// The mode of a new folder: for its owner, and for its group if the group may write to the parent
/// folder.
pub(super) fn rights_below(above: &Path) -> io::Result<u32> {
    Ok(if above.metadata()?.mode() & 0o020 == 0 {
        0o700
    } else {
        0o770
    })
}

/// Creates a folder with the mode of `rights_below`, unless it exists.
pub(super) fn make_folder(path: &Path) -> io::Result<()> {
    let rights = rights_below(path.parent().unwrap_or(path))?;
    match DirBuilder::new().mode(rights).create(path) {
        // The process's umask may remove the group's rights.
        Ok(()) if rights != 0o700 => std::fs::set_permissions(path, Permissions::from_mode(rights)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Creates a file, which must not exist yet.
pub(super) fn new_file(path: &Path) -> io::Result<File> {
    let rights = rights_below(path.parent().unwrap_or(path))? & 0o660;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(rights)
        .open(path)?;
    if rights != 0o600 {
        file.set_permissions(Permissions::from_mode(rights))?;
    }
    Ok(file)
}

/// Opens an existing file for reading, or also for writing.
pub(super) fn open_file(path: &Path, write: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(NO_LINK)
        .open(path)
}

/// Opens a file for reading and writing; creates it if it is missing.
pub(super) fn open_or_make(path: &Path) -> io::Result<File> {
    match new_file(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open_file(path, true),
        made => made,
    }
}
