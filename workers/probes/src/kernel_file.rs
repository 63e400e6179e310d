//! Files of the kernel that are read repeatedly. They stay open and are read from offset 0.
//!
//! An open file of `/proc/<pid>` belongs to that process permanently. Once the process ends, reads
//! fail, even if its number is reused. An open file of a removed cgroup fails likewise.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A small text file of procfs or cgroupfs.
pub(crate) struct KernelFile {
    path: PathBuf,
    file: Option<File>,
    text: Vec<u8>,
    reopen: bool,
}

impl KernelFile {
    /// A file that is opened at the first read, and again after a failed one.
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            file: None,
            text: Vec::new(),
            reopen: true,
        }
    }

    /// A file that is opened now and never again: it belongs to the present process of that number.
    pub(crate) fn pinned(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let file = File::open(&path)?;
        Ok(Self {
            path,
            file: Some(file),
            text: Vec::new(),
            reopen: false,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the whole text.
    pub(crate) fn read(&mut self) -> io::Result<&str> {
        self.read_up_to(64 << 10)
    }

    /// Reads at most `most` bytes, or fewer if one read returns fewer.
    pub(crate) fn read_up_to(&mut self, most: usize) -> io::Result<&str> {
        let result = self.fill(most);
        if result.is_err() && self.reopen {
            self.file = None;
        }
        let length = result?;
        std::str::from_utf8(&self.text[..length])
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// Reads the text as one number.
    pub(crate) fn number(&mut self) -> io::Result<u64> {
        let text = self.read_up_to(64)?.trim();
        text.parse()
            .map_err(|_| invalid(format!("expected a number, got {text:?}")))
    }

    fn fill(&mut self, most: usize) -> io::Result<usize> {
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(File::open(&self.path)?),
        };
        let mut length = 0;
        while length < most {
            let want = most.min((length + 4096).next_multiple_of(4096));
            if self.text.len() < want {
                self.text.resize(want, 0);
            }
            match file.read_at(&mut self.text[length..want], length as u64) {
                Ok(0) => break,
                // These files are one record, so a short read has all of it. Another read would
                // make the kernel generate it again, only to report its end.
                Ok(n) if n < want - length => {
                    length += n;
                    break;
                }
                Ok(n) => length += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(length)
    }
}

pub(crate) fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Returns the number after `key` on the line that starts with it, such as `MemTotal:  123 kB` or
/// `inactive_file 123`. `key` includes the separator.
pub(crate) fn field(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(key))
        .and_then(|rest| rest.split_ascii_whitespace().next())
        .and_then(|word| word.parse().ok())
}

/// Returns a field of `/proc/meminfo` in bytes.
pub(crate) fn meminfo(text: &str, key: &str) -> Option<u64> {
    field(text, key).map(|kib| kib * 1024)
}

/// Logs a failure once.
#[derive(Default)]
pub(crate) struct Once(bool);

impl Once {
    pub(crate) fn warn(&mut self, probe: &'static str, what: &str) {
        if !std::mem::replace(&mut self.0, true) {
            tracing::warn!(probe, "{what}; said once, readings are marked missing");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_key() {
        let text = "total_inactive_file 7\ninactive_file 5\n";
        assert_eq!(field(text, "inactive_file "), Some(5));
        assert_eq!(field(text, "total_inactive_file "), Some(7));
        assert_eq!(field(text, "active_file "), None);
        assert_eq!(meminfo("MemTotal:       2 kB\n", "MemTotal:"), Some(2048));
    }

    #[test]
    fn a_file_is_read_anew_each_time_even_beyond_a_page() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "x".repeat(10_000)).unwrap();
        let mut file = KernelFile::new(&path);
        assert_eq!(file.read().unwrap().len(), 10_000);
        std::fs::write(&path, "42\n").unwrap();
        assert_eq!(file.number().unwrap(), 42);
        std::fs::write(&path, "nonsense\n").unwrap();
        assert!(file.number().unwrap_err().to_string().contains("nonsense"));
    }
}
