//! Traces the files and addresses that a process touches, by `strace` if it is available.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// System calls that name a path or an address.
const CALLS: &str = "open,openat,openat2,creat,mkdir,mkdirat,rmdir,rename,renameat,renameat2,\
                     unlink,unlinkat,truncate,link,linkat,symlink,symlinkat,mknod,mknodat,\
                     chmod,fchmodat,connect";
/// Most paths of each kind that are kept.
const KEPT: usize = 10_000;

/// Checks that tracing works here. Fails with the reason.
pub fn works() -> Result<(), String> {
    let tried = Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null", "true"])
        .stdin(Stdio::null())
        .output();
    match tried {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            let last = text.lines().last().unwrap_or("it failed without a word");
            Err(format!("strace may not trace here: {last}"))
        }
        Err(error) => Err(format!("strace cannot be run: {error}")),
    }
}

/// Command prefix that traces a program into this file.
pub fn command(file: &Path) -> Vec<String> {
    let words = [
        "strace",
        "-f",
        "-qq",
        "-y",
        "-s",
        "4096",
        "-e",
        "signal=none",
    ];
    let mut words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    words.push("-e".to_owned());
    words.push(format!("trace={CALLS}"));
    words.push("-o".to_owned());
    words.push(file.to_string_lossy().into_owned());
    words
}

/// Files and addresses that were touched.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Paths that were made, changed, removed, or opened for writing.
    pub written: BTreeSet<PathBuf>,
    /// Paths that were opened for reading.
    pub read: BTreeSet<PathBuf>,
    /// Addresses that were connected to, except this machine's own.
    pub connected: BTreeSet<String>,
}

/// The strings among a call's arguments, unescaped.
fn strings(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut bytes = text.bytes().peekable();
    while let Some(byte) = bytes.next() {
        if byte != b'"' {
            continue;
        }
        let mut string = Vec::new();
        while let Some(byte) = bytes.next() {
            match byte {
                b'"' => break,
                b'\\' => {
                    let Some(escaped) = bytes.next() else { break };
                    match escaped {
                        b'n' => string.push(b'\n'),
                        b't' => string.push(b'\t'),
                        b'0'..=b'7' => {
                            let mut value = u32::from(escaped - b'0');
                            for _ in 0..2 {
                                let Some(digit @ b'0'..=b'7') = bytes.peek().copied() else {
                                    break;
                                };
                                value = value * 8 + u32::from(digit - b'0');
                                bytes.next();
                            }
                            string.push(value as u8);
                        }
                        other => string.push(other),
                    }
                }
                byte => string.push(byte),
            }
        }
        found.push(String::from_utf8_lossy(&string).into_owned());
    }
    found
}

/// The folder of a descriptor in the form of `-y`: `AT_FDCWD</a/b>`.
fn annotated(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('<')?;
    rest.split_once('>').map(|(path, _)| path)
}

impl Touched {
    fn keep(set: &mut BTreeSet<PathBuf>, path: PathBuf) {
        if set.len() < KEPT {
            set.insert(path);
        }
    }

    fn call(&mut self, folders: &mut BTreeMap<u32, PathBuf>, pid: u32, text: &str) {
        let Some((name, rest)) = text.split_once('(') else {
            return;
        };
        let Some((arguments, result)) = rest.rsplit_once(" = ") else {
            return;
        };
        if let Some((_, after)) = arguments.split_once("AT_FDCWD<")
            && let Some((folder, _)) = after.split_once('>')
        {
            folders.insert(pid, PathBuf::from(folder));
        }
        if name == "connect" {
            return self.connect(arguments);
        }
        if result.starts_with('-') || result.starts_with('?') {
            return;
        }
        if matches!(name, "open" | "openat" | "openat2" | "creat") {
            let writes = name == "creat"
                || ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_TMPFILE"]
                    .iter()
                    .any(|flag| arguments.contains(flag));
            if let Some(path) = annotated(result) {
                let path = PathBuf::from(path.trim_end_matches(" (deleted)"));
                let set = match writes {
                    true => &mut self.written,
                    false => &mut self.read,
                };
                Self::keep(set, path);
            }
            return;
        }
        // The first argument of `symlink` and `symlinkat` is the link's target, which is not
        // touched.
        let skip = usize::from(name.starts_with("symlink"));
        let here = folders.get(&pid).cloned().unwrap_or_default();
        let mut at = arguments;
        for path in strings(arguments).into_iter().skip(skip) {
            let mut base = here.clone();
            if name.contains("at")
                && let Some(folder) = annotated(at)
            {
                base = PathBuf::from(folder);
                at = at.split_once('>').map_or("", |(_, rest)| rest);
            }
            Self::keep(&mut self.written, base.join(path));
        }
    }

    fn connect(&mut self, arguments: &str) {
        let address = strings(arguments).pop().unwrap_or_default();
        let is_own = address.starts_with("127.") || address == "::1" || address == "0.0.0.0";
        if arguments.contains("AF_INET") && !is_own && self.connected.len() < KEPT {
            self.connected.insert(address);
        }
    }

    /// Parses the output of `strace`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(file: &Path) -> std::io::Result<Self> {
        let mut touched = Self::default();
        let mut folders = BTreeMap::new();
        let mut unfinished: BTreeMap<u32, String> = BTreeMap::new();
        for line in BufReader::new(File::open(file)?).split(b'\n') {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            let Some((pid, text)) = line.trim_start().split_once(' ') else {
                continue;
            };
            let (Ok(pid), text) = (pid.parse(), text.trim_start()) else {
                continue;
            };
            if let Some(begin) = text.strip_suffix("<unfinished ...>") {
                unfinished.insert(pid, begin.to_owned());
            } else if let Some((_, end)) = text
                .strip_prefix("<... ")
                .and_then(|rest| rest.split_once("resumed>"))
            {
                let whole = unfinished.remove(&pid).unwrap_or_default() + end;
                touched.call(&mut folders, pid, &whole);
            } else {
                touched.call(&mut folders, pid, text);
            }
        }
        Ok(touched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_addresses_are_read_from_what_strace_writes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = r#"12  openat(AT_FDCWD</w>, "in\"p\303\274t", O_RDONLY|O_CLOEXEC) = 3</w/in"püt>
12  openat(AT_FDCWD</w>, "out", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3</w/out>
12  openat(AT_FDCWD</w>, "missing", O_RDWR) = -1 ENOENT (No such file or directory)
12  mkdir("d", 0777)                  = 0
13  renameat2(AT_FDCWD</w>, "a", 5</x/y>, "b", RENAME_NOREPLACE <unfinished ...>
12  unlinkat(7</x>, "gone", 0)        = 0
13  <... renameat2 resumed>)          = 0
13  symlink("/nowhere", "/w/link")    = 0
14  connect(3<socket:[1]>, {sa_family=AF_INET, sin_port=htons(9), sin_addr=inet_addr("10.1.1.1")}, 16) = -1 EINPROGRESS (Operation now in progress)
14  connect(3<socket:[1]>, {sa_family=AF_INET, sin_port=htons(9), sin_addr=inet_addr("127.0.0.1")}, 16) = 0
14  connect(3<socket:[1]>, {sa_family=AF_UNIX, sun_path="/run/x"}, 110) = 0
14  exit_group(0)                     = ?
"#;
        std::fs::write(file.path(), text).unwrap();
        let touched = Touched::read(file.path()).unwrap();
        let paths = |set: &BTreeSet<PathBuf>| -> Vec<String> {
            set.iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(paths(&touched.read), ["/w/in\"püt"]);
        assert_eq!(
            paths(&touched.written),
            ["/w/a", "/w/d", "/w/link", "/w/out", "/x/gone", "/x/y/b"]
        );
        assert_eq!(touched.connected, BTreeSet::from(["10.1.1.1".to_owned()]));
    }
}
