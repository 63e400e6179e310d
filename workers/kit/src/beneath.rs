//! Files in a folder that another process writes to, whatever links it puts there.
//!
//! A link at any part of a path can redirect an open by name, even a link that appears between a
//! check and its use. So the folder is held open, and files in it are reached from its descriptor
//! by the kernel's own rule (`openat2`).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// A rename in the folder may make the kernel ask for a retry.
const TRIES: usize = 16;

/// The symbolic links that are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// None.
    Refused,
    /// Links that stay in the folder. Without `openat2` in the kernel: none.
    Inside,
}

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// Opens the folder at a trusted path, links included.
    ///
    /// # Errors
    /// When it is no folder or cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            fd: rustix::fs::openat(CWD, path, flags, Mode::empty())?,
            path: path.to_owned(),
        })
    }

    /// Its path when it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a folder in it. A symbolic link is an error.
    ///
    /// # Errors
    /// When it is no folder, or lies outside.
    pub fn folder(&self, name: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        Ok(Self {
            fd: open(self.fd.as_fd(), name, flags, Links::Refused)?,
            path: self.path.join(name),
        })
    }

    /// Opens a regular file in it for reading.
    ///
    /// # Errors
    /// When it is no regular file, or lies outside.
    pub fn file(&self, name: &Path, links: Links) -> io::Result<File> {
        // The open must not block on a pipe.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(open(self.fd.as_fd(), name, flags, links)?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("is not a regular file")),
        }
    }

    /// Lists the names in it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Returns the metadata of a name in it, without following a link.
    ///
    /// # Errors
    /// When the name does not exist.
    pub fn look(&self, name: &OsStr) -> io::Result<Stat> {
        Ok(rustix::fs::statat(
            &self.fd,
            name,
            AtFlags::SYMLINK_NOFOLLOW,
        )?)
    }

    /// Removes a file, or the link itself.
    ///
    /// # Errors
    /// When it cannot be removed, or lies outside.
    pub fn remove(&self, name: &Path) -> io::Result<()> {
        let (folder, name) = self.parent_of(name)?;
        let fd = folder.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
        Ok(rustix::fs::unlinkat(fd, name, AtFlags::empty())?)
    }

    /// Moves a file to another folder and replaces a file of that name.
    ///
    /// # Errors
    /// When it cannot be moved, or lies outside.
    pub fn rename(&self, name: &Path, to: &Self, new: &Path) -> io::Result<()> {
        let (folder, name) = self.parent_of(name)?;
        let fd = folder.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
        Ok(rustix::fs::renameat(fd, name, &to.fd, new)?)
    }

    /// Returns the last part of a name, and its folder unless that is this one.
    fn parent_of<'a>(&self, name: &'a Path) -> io::Result<(Option<OwnedFd>, &'a OsStr)> {
        let last = name.file_name().ok_or_else(elsewhere)?;
        match name.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => {
                let flags = OFlags::PATH | OFlags::DIRECTORY;
                let fd = open(self.fd.as_fd(), parent, flags, Links::Refused)?;
                Ok((Some(fd), last))
            }
            _ => Ok((None, last)),
        }
    }
}

fn elsewhere() -> io::Error {
    Errno::XDEV.into()
}

/// Whether an error means that a path leaves its folder or meets a link that must not be followed.
pub fn is_led_away(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::XDEV | Errno::LOOP))
}

fn open(folder: BorrowedFd<'_>, path: &Path, flags: OFlags, links: Links) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    let mut resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    if links == Links::Refused {
        resolve |= ResolveFlags::NO_SYMLINKS;
    }
    for _ in 0..TRIES {
        match rustix::fs::openat2(folder, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            // An older kernel, or a container's filter of system calls.
            Err(Errno::NOSYS | Errno::PERM) => return step_by_step(folder, path, flags),
            opened => return Ok(opened?),
        }
    }
    Err(Errno::AGAIN.into())
}

/// The same without links, one part after the other.
fn step_by_step(folder: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let mut held: Option<OwnedFd> = None;
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else {
            return Err(elsewhere());
        };
        let own = match parts.peek() {
            Some(_) => OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            None => flags,
        };
        let at = held.as_ref().map_or(folder, AsFd::as_fd);
        let opened = rustix::fs::openat(at, name, own | OFlags::NOFOLLOW, Mode::empty());
        held = Some(match opened {
            Err(Errno::NOTDIR) => return Err(Errno::LOOP.into()),
            opened => opened?,
        });
    }
    held.ok_or_else(elsewhere)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn nothing_leads_out_of_a_folder() {
        let all = tempfile::tempdir().unwrap();
        let inside = all.path().join("inside");
        std::fs::create_dir_all(inside.join("sub")).unwrap();
        std::fs::write(all.path().join("secret"), "secret").unwrap();
        std::fs::write(inside.join("sub/own"), "own").unwrap();
        symlink("../secret", inside.join("out")).unwrap();
        symlink(all.path(), inside.join("up")).unwrap();
        symlink("sub/own", inside.join("in")).unwrap();
        let folder = Folder::open(&inside).unwrap();
        let read = |name: &str, links| {
            let opened = folder.file(Path::new(name), links)?;
            io::read_to_string(opened)
        };
        let absolute = all.path().join("secret");
        for links in [Links::Refused, Links::Inside] {
            for name in ["../secret", "sub/../../secret", "out", "up/secret"] {
                let error = read(name, links).unwrap_err();
                assert!(is_led_away(&error), "{name}: {error}");
            }
            let error = read(absolute.to_str().unwrap(), links).unwrap_err();
            assert!(is_led_away(&error), "{error}");
            assert_eq!(read("sub/own", links).unwrap(), "own");
        }
        assert_eq!(read("in", Links::Inside).unwrap(), "own");
        assert!(is_led_away(&read("in", Links::Refused).unwrap_err()));
        assert!(folder.folder(Path::new("up")).is_err());
        assert!(folder.remove(Path::new("up/secret")).is_err());
        let up = folder.rename(Path::new("up/secret"), &folder, Path::new("mine"));
        assert!(up.is_err() && absolute.exists());
        // Without openat2 the rule is stricter, never laxer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        for name in ["../secret", "out", "up/secret", "in"] {
            assert!(step_by_step(folder.fd.as_fd(), Path::new(name), flags).is_err());
        }
        step_by_step(folder.fd.as_fd(), Path::new("sub/own"), flags).unwrap();
    }
}
