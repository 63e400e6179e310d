//! A folder of state as bytes and back.
//!
//! σ: magic `FIECDIR1`, then each regular file in the byte order of its path. A file is: length of
//! the path `u32`, the path (relative, with `/` between its parts), length `u64`, contents. Little
//! endian. Empty folders are not kept. The file `yield` at the top is not part of σ.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use crate::beneath::{self, Folder, Links};
use crate::program::ProgramError;

const MAGIC: &[u8; 8] = b"FIECDIR1";
/// The file that orders a program to yield.
pub const YIELD_FILE: &str = "yield";
/// Most files in a state or a folder of outputs.
const FILES_LIMIT: usize = 1 << 20;
/// Deepest folder in it.
const DEPTH_LIMIT: usize = 64;

/// A file in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its path from the folder.
    pub name: PathBuf,
    /// Its size.
    pub bytes: u64,
}

impl Found {
    /// Bytes that it takes in σ beside its contents.
    fn head(&self) -> u64 {
        12 + self.name.as_os_str().len() as u64
    }
}

fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ProgramError {
    let path = path.to_owned();
    move |error| io_error(what, &path, error)
}

fn io_error(what: &str, path: &Path, error: io::Error) -> ProgramError {
    ProgramError::of_files(what, path, &error)
}

/// Opens the folder `name` of a run, in which a program works.
///
/// # Errors
/// Permanent, with its name, if the program has replaced the folder.
pub fn root(run: &Folder, name: &str) -> Result<Folder, ProgramError> {
    run.folder(Path::new(name)).map_err(|error| {
        let path = run.path().join(name);
        match beneath::is_led_away(&error) || error.kind() == io::ErrorKind::NotADirectory {
            true => ProgramError::Permanent(format!(
                "the folder {name} of the run is a symbolic link or no folder any more ({}): a \
                 program works in the folders that it was given",
                path.display()
            )),
            false => io_error("open", &path, error),
        }
    })
}

fn walk(
    folder: &Folder,
    under: &Path,
    depth: usize,
    what: &str,
    found: &mut Vec<Found>,
) -> Result<(), ProgramError> {
    let refuse = |name: &Path, rule: &str| {
        Err(ProgramError::Permanent(format!(
            "{what} {:?} {rule}; only regular files and folders may lie there",
            name.display()
        )))
    };
    for own in folder.names().map_err(io("list", folder.path()))? {
        let name = under.join(&own);
        let path = folder.path().join(&own);
        let meta = folder.look(&own).map_err(io("look at", &path))?;
        let kind = match FileType::from_raw_mode(meta.st_mode) {
            FileType::Directory => {
                if depth >= DEPTH_LIMIT {
                    return refuse(&name, "lies too deep");
                }
                let inner = folder.folder(Path::new(&own)).map_err(io("open", &path))?;
                walk(&inner, &name, depth + 1, what, found)?;
                continue;
            }
            FileType::RegularFile if meta.st_nlink > 1 => "is a hard link: it has another name",
            FileType::RegularFile if found.len() >= FILES_LIMIT => {
                "is one file too many (limit 1048576)"
            }
            FileType::RegularFile => {
                let bytes = u64::try_from(meta.st_size).unwrap_or_default();
                found.push(Found { name, bytes });
                continue;
            }
            FileType::Symlink => "is a symbolic link",
            FileType::Fifo => "is a named pipe",
            FileType::Socket => "is a socket",
            _ => "is a device",
        };
        return refuse(&name, kind);
    }
    Ok(())
}

/// Lists the files below a folder, in the byte order of their paths. `what` names their kind in
/// messages.
///
/// # Errors
/// Permanent, with its name, if an entry is neither a file nor a folder.
pub fn scan(folder: &Folder, what: &str) -> Result<Vec<Found>, ProgramError> {
    let mut found = Vec::new();
    walk(folder, Path::new(""), 0, what, &mut found)?;
    found.sort_by(|a, b| {
        a.name
            .as_os_str()
            .as_bytes()
            .cmp(b.name.as_os_str().as_bytes())
    });
    Ok(found)
}

/// Returns the files of a state, and its size in bytes.
///
/// # Errors
/// See [`scan`].
pub fn look(folder: &Folder) -> Result<(Vec<Found>, u64), ProgramError> {
    let mut found = scan(folder, "state file")?;
    found.retain(|file| file.name != Path::new(YIELD_FILE));
    let bytes = found
        .iter()
        .map(|file| file.head() + file.bytes)
        .sum::<u64>();
    Ok((found, bytes + MAGIC.len() as u64))
}

/// Appends the bytes of a state that consists of these files.
///
/// # Errors
/// When a file cannot be read or has changed its size.
pub fn pack(folder: &Folder, files: &[Found], out: &mut Vec<u8>) -> Result<(), ProgramError> {
    out.extend_from_slice(MAGIC);
    for file in files {
        let name = file.name.as_os_str().as_bytes();
        out.extend_from_slice(&(name.len() as u32).to_le_bytes());
        out.extend_from_slice(name);
        out.extend_from_slice(&file.bytes.to_le_bytes());
        let path = folder.path().join(&file.name);
        let begin = out.len();
        folder
            .file(&file.name, Links::Refused)
            .and_then(|from| from.take(file.bytes + 1).read_to_end(out))
            .map_err(io("read", &path))?;
        if (out.len() - begin) as u64 != file.bytes {
            return Err(ProgramError::Transient(format!(
                "{} changes while no capsule runs",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Lists the files in a state's bytes, in order: path and contents.
///
/// # Errors
/// Permanent if the bytes are no state of a folder.
pub fn list(bytes: &[u8]) -> Result<Vec<(PathBuf, &[u8])>, ProgramError> {
    let wrong = |why: &str| ProgramError::Permanent(format!("not a state of a folder: {why}"));
    let mut rest = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| wrong("it does not begin with FIECDIR1"))?;
    let mut take = |n: u64| {
        let n = usize::try_from(n).ok().filter(|n| *n <= rest.len());
        let (part, left) = rest.split_at(n.ok_or_else(|| wrong("it is cut off"))?);
        rest = left;
        Ok::<_, ProgramError>((part, left.is_empty()))
    };
    let mut files: Vec<(PathBuf, &[u8])> = Vec::new();
    let mut done = bytes.len() == MAGIC.len();
    while !done {
        let (length, _) = take(4)?;
        let length = u32::from_le_bytes(length.try_into().map_err(|_| wrong("it is cut off"))?);
        let (name, _) = take(length.into())?;
        let plain = |part: &[u8]| !matches!(part, b"" | b"." | b"..") && !part.contains(&0);
        if !name.split(|b| *b == b'/').all(plain) {
            return Err(wrong("it has a path that leaves its folder"));
        }
        let path = PathBuf::from(std::ffi::OsString::from_vec(name.to_vec()));
        if files
            .last()
            .is_some_and(|(last, _)| last.as_os_str().as_bytes() >= name)
        {
            return Err(wrong("its paths are out of order"));
        }
        let (size, _) = take(8)?;
        let size = u64::from_le_bytes(size.try_into().map_err(|_| wrong("it is cut off"))?);
        let (contents, end) = take(size)?;
        files.push((path, contents));
        done = end;
    }
    Ok(files)
}

/// Writes a state's files into an empty folder.
///
/// # Errors
/// Permanent where the bytes are no state.
pub fn unpack(bytes: &[u8], folder: &Path) -> Result<(), ProgramError> {
    for (name, contents) in list(bytes)? {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io("make", parent))?;
        }
        File::create_new(&path)
            .and_then(|mut to| to.write_all(contents))
            .map_err(io("write", &path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(folder: &Path) -> Vec<u8> {
        let folder = &Folder::open(folder).unwrap();
        let (files, bytes) = look(folder).unwrap();
        let mut out = Vec::new();
        pack(folder, &files, &mut out).unwrap();
        assert_eq!(out.len() as u64, bytes);
        out
    }

    #[test]
    fn a_folder_survives_its_bytes_which_do_not_depend_on_the_order_of_writing() {
        let [a, b, c] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let files: [(&str, &[u8]); 5] = [
            ("z", b"last"),
            ("sub/deep/x", b""),
            ("sub-x", b"\0\xff"),
            ("a b", b"1"),
            ("yield", b"never"),
        ];
        for (folder, order) in [
            (&a, files.to_vec()),
            (&b, files.iter().rev().copied().collect()),
        ] {
            for (name, contents) in order {
                let path = folder.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, contents).unwrap();
            }
        }
        let bytes = packed(a.path());
        assert_eq!(bytes, packed(b.path()));
        unpack(&bytes, c.path()).unwrap();
        assert_eq!(bytes, packed(c.path()));
        assert!(!c.path().join("yield").exists());
        assert_eq!(fs::read(c.path().join("sub-x")).unwrap(), b"\0\xff");
        assert_eq!(list(b"FIECDIR1").unwrap(), []);
    }

    #[test]
    fn bytes_that_are_no_state_are_refused_wherever_they_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), b"123").unwrap();
        fs::write(folder.path().join("b"), b"4").unwrap();
        let bytes = packed(folder.path());
        let ends = [8, 8 + 4 + 1 + 8 + 3];
        for cut in (0..bytes.len()).filter(|cut| !ends.contains(cut)) {
            assert!(
                list(&bytes[..cut]).unwrap_err().is_permanent(),
                "cut at {cut}"
            );
        }
        for path in [&b"../x"[..], b"/x", b"a//b", b"", b".", b"a\0"] {
            let mut evil = MAGIC.to_vec();
            evil.extend_from_slice(&(path.len() as u32).to_le_bytes());
            evil.extend_from_slice(path);
            evil.extend_from_slice(&0u64.to_le_bytes());
            let error = list(&evil).unwrap_err().to_string();
            assert!(error.contains("leaves its folder"), "{path:?}: {error}");
        }
    }

    #[test]
    fn links_and_special_files_are_refused_by_name() {
        type Make = fn(&Path);
        let cases: [(&str, &str, Make); 4] = [
            ("link", "symbolic link", |at| {
                std::os::unix::fs::symlink("/etc/passwd", at.join("link")).unwrap();
            }),
            ("twin", "hard link", |at| {
                fs::write(at.join("twin"), b"x").unwrap();
                fs::hard_link(at.join("twin"), at.join("twin2")).unwrap();
            }),
            ("pipe", "named pipe", |at| {
                let path = at.join("pipe");
                let mode = rustix::fs::Mode::RUSR;
                rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0)
                    .unwrap();
            }),
            ("sub/socket", "socket", |at| {
                fs::create_dir(at.join("sub")).unwrap();
                std::os::unix::net::UnixListener::bind(at.join("sub/socket")).unwrap();
            }),
        ];
        for (name, rule, make) in cases {
            let folder = tempfile::tempdir().unwrap();
            make(folder.path());
            let error = look(&Folder::open(folder.path()).unwrap()).unwrap_err();
            let text = error.to_string();
            assert!(error.is_permanent(), "{text}");
            assert!(text.contains(name) && text.contains(rule), "{text}");
        }
    }
}
