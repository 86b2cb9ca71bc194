//! The control groups of this process (v1 and v2), as folders.

use std::path::{Path, PathBuf};

/// The folders with the limits of `controller`, from the process's own group upwards. `groups` is
/// the text of `/proc/self/cgroup`.
pub fn folders(groups: &str, controller: &str) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        // A v1 mount is named after one controller, or after all controllers that it combines.
        let roots = match controllers {
            "" => vec![String::from("/sys/fs/cgroup")],
            list if list.split(',').any(|name| name == controller) => {
                let mut roots: Vec<_> = [controller, list]
                    .map(|name| format!("/sys/fs/cgroup/{name}"))
                    .into();
                roots.dedup();
                roots
            }
            _ => continue,
        };
        for root in &roots {
            // In a container the path may belong to the host's hierarchy. Then the root of the
            // mount is this process's own group.
            let own = Path::new(root).join(path.trim_start_matches('/'));
            all.extend(
                own.ancestors()
                    .take_while(|folder| folder.starts_with(root))
                    .map(Path::to_path_buf),
            );
        }
    }
    all
}
