//! Compares the contents of a folder before and after a run.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fiec_schemas::Digest;

/// Most bytes of a file whose content is compared. For larger files, size and time of change count.
const READ_LIMIT: u64 = 64 << 20;
/// Most files that are read.
const FILES_LIMIT: usize = 200_000;

#[derive(Debug, Clone, PartialEq, Eq)]
enum What {
    Folder,
    File(Option<Digest>, u64, Option<(i64, i64)>),
    Other(u32),
}

/// A folder's contents.
#[derive(Debug, Default)]
pub struct Tree {
    entries: BTreeMap<PathBuf, What>,
    /// The folder has more files than were read.
    pub cut: bool,
}

impl Tree {
    /// Reads a folder. Skips unreadable files.
    pub fn of(root: &Path) -> Self {
        let mut tree = Self::default();
        tree.walk(root, Path::new(""));
        tree
    }

    fn walk(&mut self, root: &Path, under: &Path) {
        let Ok(entries) = std::fs::read_dir(root.join(under)) else {
            return;
        };
        for entry in entries.flatten() {
            if self.entries.len() >= FILES_LIMIT {
                self.cut = true;
                return;
            }
            let name = under.join(entry.file_name());
            let Ok(meta) = entry.metadata() else {
                continue;
            };
            let what = if meta.is_dir() {
                self.walk(root, &name);
                What::Folder
            } else if meta.is_file() && meta.len() <= READ_LIMIT {
                let bytes = std::fs::read(entry.path()).ok();
                What::File(bytes.map(|bytes| Digest::of(&bytes)), meta.len(), None)
            } else if meta.is_file() {
                let changed = (meta.mtime(), meta.mtime_nsec());
                What::File(None, meta.len(), Some(changed))
            } else {
                What::Other(meta.mode())
            };
            self.entries.insert(name, what);
        }
    }

    /// Differences to `after`, in words.
    pub fn changes(&self, after: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for (name, what) in &after.entries {
            match self.entries.get(name) {
                None => found.push(format!("{} is new", name.display())),
                Some(before) if before != what => {
                    found.push(format!("{} was changed", name.display()));
                }
                _ => {}
            }
        }
        let gone = self
            .entries
            .keys()
            .filter(|n| !after.entries.contains_key(*n));
        found.extend(gone.map(|name| format!("{} was removed", name.display())));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_changed_or_removed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["same", "other", "gone"] {
            std::fs::write(at(name), name).unwrap();
        }
        let before = Tree::of(folder.path());
        assert!(before.changes(&Tree::of(folder.path())).is_empty());
        // The same length as before.
        std::fs::write(at("other"), "rehto").unwrap();
        std::fs::remove_file(at("gone")).unwrap();
        std::fs::create_dir(at("sub")).unwrap();
        std::fs::write(at("sub/new"), "").unwrap();
        let changes = before.changes(&Tree::of(folder.path()));
        assert_eq!(
            changes,
            [
                "other was changed",
                "sub is new",
                "sub/new is new",
                "gone was removed"
            ]
        );
    }
}
