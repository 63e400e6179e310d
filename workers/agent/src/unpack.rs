//! Unpacks a package's artifact: only regular files inside the folder, whatever the tar says.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use fiec_schemas::package::{FILES_LIMIT, FOLDERS_LIMIT};

/// Most nested folders.
const DEPTH_LIMIT: usize = 64;
/// Longest path of a file, in bytes. The kernel takes no longer ones.
const PATH_LIMIT: u64 = 4_096;

fn bad(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// Returns the path of an entry if it stays inside: plain names only.
fn inside(path: &Path) -> io::Result<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            _ => {
                return Err(bad(format!(
                    "{path:?} is outside the package's folder; the package was not used"
                )));
            }
        }
    }
    if clean.as_os_str().is_empty() || clean.components().count() > DEPTH_LIMIT {
        return Err(bad(format!("{path:?} is no name of a file in a package")));
    }
    Ok(clean)
}

/// Reads the path of the next entry from an entry of its own, which long paths have.
fn read_long_path(entry: &mut tar::Entry<'_, impl Read>) -> io::Result<PathBuf> {
    let mut path = Vec::new();
    entry.take(PATH_LIMIT + 1).read_to_end(&mut path)?;
    if path.len() as u64 > PATH_LIMIT {
        return Err(bad(format!("a path has more than {PATH_LIMIT} bytes")));
    }
    // A NUL ends it.
    path.pop_if(|last| *last == 0);
    Ok(OsString::from_vec(path).into())
}

/// Creates the folders above a file of a package, and returns how many are new.
fn create_folders(root: &Path, file: &Path) -> io::Result<usize> {
    let mut folder = root.to_owned();
    let mut new = 0;
    for part in file.parent().into_iter().flat_map(Path::components) {
        folder.push(part);
        match std::fs::create_dir(&folder) {
            Ok(()) => new += 1,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(new)
}

/// The files of an artifact.
#[derive(Debug, Default)]
pub struct Contents {
    /// Their paths in its folder.
    pub files: Vec<PathBuf>,
    /// Their bytes in total.
    pub bytes: u64,
}

/// Unpacks a tar into a new folder, with at most `limit` bytes of files. After an error the
/// caller removes the partial folder.
///
/// # Errors
/// A link, a device, a path that leaves the folder, too many files, folders or bytes, or a file
/// system error.
pub fn unpack(artifact: impl Read, into: &Path, limit: u64) -> io::Result<Contents> {
    unpack_within(artifact, into, limit, FOLDERS_LIMIT)
}

fn unpack_within(
    artifact: impl Read,
    into: &Path,
    limit: u64,
    folders_limit: usize,
) -> io::Result<Contents> {
    std::fs::create_dir(into)?;
    let mut archive = tar::Archive::new(artifact);
    let (mut contents, mut folders) = (Contents::default(), 0);
    let mut long_path = None;
    // Raw: otherwise the library reads a long path or a PAX header into memory, whatever its size.
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        if kind.is_gnu_longname() {
            long_path = Some(read_long_path(&mut entry)?);
            continue;
        }
        let path = match long_path.take() {
            Some(path) => path,
            None => entry.path()?.into_owned(),
        };
        if !kind.is_file() {
            return Err(bad(format!(
                "{path:?} is not a regular file ({kind:?}); a package contains regular files only"
            )));
        }
        contents.bytes = contents.bytes.saturating_add(entry.size());
        if contents.bytes > limit || contents.files.len() >= FILES_LIMIT {
            return Err(bad(format!(
                "the package unpacks to more than the allowed {limit} bytes or {FILES_LIMIT} files"
            )));
        }
        let path = inside(&path)?;
        folders += create_folders(into, &path)?;
        if folders > folders_limit {
            return Err(bad(format!(
                "the package unpacks to more than the allowed {folders_limit} folders"
            )));
        }
        let target = into.join(&path);
        let executable = entry.header().mode()? & 0o111 != 0;
        // Never through a link and never twice: the folder is new and has no links.
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&target)
            .map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => bad(format!("{path:?} is there twice")),
                _ => error,
            })?;
        let size = entry.size();
        let copied = io::copy(&mut entry.by_ref().take(size), &mut file)?;
        if copied < size {
            return Err(bad(format!("{path:?} is cut off")));
        }
        // Read-only: the cache's copy serves every execution.
        let mode = if executable { 0o555 } else { 0o444 };
        file.set_permissions(PermissionsExt::from_mode(mode))?;
        contents.files.push(path);
    }
    // Synced before its name marks it as complete. Some file systems cannot sync: then a crash of
    // the machine may leave a folder that must be removed by hand.
    if let Err(error) = rustix::fs::syncfs(File::open(into)?) {
        tracing::debug!(%error, "cannot sync the cache's file system");
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tar::{Builder, EntryType, Header};

    fn entry(kind: EntryType, path: &str, body: &[u8], mode: u32) -> Vec<u8> {
        let mut header = Header::new_gnu();
        // Written directly: the library's own setter refuses the paths that are tested here.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(body.len() as u64);
        if kind.is_symlink() {
            header.set_link_name("/etc/passwd").unwrap();
        }
        header.set_cksum();
        let mut builder = Builder::new(Vec::new());
        builder.append(&header, body).unwrap();
        builder.into_inner().unwrap()
    }

    fn file(path: &str, body: &[u8]) -> Vec<u8> {
        entry(EntryType::Regular, path, body, 0o644)
    }

    fn reason(tar: &[u8], limit: u64) -> String {
        let dir = tempfile::tempdir().unwrap();
        let error = unpack(tar, &dir.path().join("p"), limit).unwrap_err();
        assert!(!dir.path().join("x").exists());
        error.to_string()
    }

    #[test]
    fn plain_files_come_out_read_only_with_their_bit_to_execute() {
        let dir = tempfile::tempdir().unwrap();
        let into = dir.path().join("p");
        let run = entry(EntryType::Regular, "bin/run.sh", b"#!/bin/sh\n", 0o755);
        assert_eq!(unpack(&run[..], &into, 100).unwrap().bytes, 10);
        let mode = std::fs::metadata(into.join("bin/run.sh"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o555);
        assert_eq!(std::fs::read(into.join("bin/run.sh")).unwrap().len(), 10);
    }

    #[test]
    fn what_leads_out_links_and_too_much_are_refused() {
        assert!(reason(&file("../x", b"a"), 100).contains("outside the package"));
        assert!(reason(&file("a/../../x", b"a"), 100).contains("outside the package"));
        assert!(reason(&file("/tmp/x", b"a"), 100).contains("outside the package"));
        let link = entry(EntryType::Symlink, "x", b"", 0o777);
        assert!(reason(&link, 100).contains("not a regular file"));
        let hard = entry(EntryType::Link, "x", b"", 0o777);
        assert!(reason(&hard, 100).contains("not a regular file"));
        let device = entry(EntryType::Char, "x", b"", 0o666);
        assert!(reason(&device, 100).contains("not a regular file"));
        assert!(reason(&file("x", &[0; 200]), 100).contains("100 bytes"));
        let long = entry(EntryType::GNULongName, "x", &[b'a'; 8_192], 0o644);
        assert!(reason(&long, 100).contains("4096 bytes"));
        let pax = entry(EntryType::XHeader, "x", b"12 path=a/b\n", 0o644);
        assert!(reason(&pax, 100).contains("not a regular file"));
        let mut twice = file("x", b"a");
        twice.truncate(1024);
        twice.extend(file("x", b"b"));
        let dir = tempfile::tempdir().unwrap();
        let error = unpack(&twice[..], &dir.path().join("p"), 100).unwrap_err();
        assert!(error.to_string().contains("twice"), "{error}");
    }

    #[test]
    fn more_folders_than_allowed_are_refused() {
        let mut builder = Builder::new(Vec::new());
        for path in ["a/b/c/x", "a/b/d/x", "a/b/d/y", "e/x", "z"] {
            let mut header = Header::new_gnu();
            header.set_path(path).unwrap();
            header.set_mode(0o644);
            header.set_size(0);
            header.set_cksum();
            builder.append(&header, &[][..]).unwrap();
        }
        let tar = builder.into_inner().unwrap();
        let dir = tempfile::tempdir().unwrap();
        unpack_within(&tar[..], &dir.path().join("five"), 0, 5).unwrap();
        let refused = unpack_within(&tar[..], &dir.path().join("four"), 0, 4).unwrap_err();
        assert!(refused.to_string().contains("4 folders"), "{refused}");
    }

    #[test]
    fn a_tar_that_is_cut_off_is_refused() {
        let whole = file("x", &[7; 3_000]);
        let dir = tempfile::tempdir().unwrap();
        assert!(unpack(&whole[..2_000], &dir.path().join("p"), 10_000).is_err());
    }
}
