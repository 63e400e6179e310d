//! Outputs of a foreign program: finished files that are taken away at a boundary, so that no
//! later capsule can change them, and read when a commit carries them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Package, pack};
use crate::program::{Capsule, ProgramError};

/// Longest name in bytes.
const NAME_LIMIT: usize = 255;

/// Where outputs are made, and where they wait for the next commit.
pub struct Outputs {
    folder: PathBuf,
    taken: PathBuf,
    waiting: BTreeMap<String, PathBuf>,
    count: u64,
}

fn cannot(what: &str, path: &Path, error: std::io::Error) -> ProgramError {
    ProgramError::Transient(format!("cannot {what} {}: {error}", path.display()))
}

impl Outputs {
    /// Made in `folder`; those that were taken lie in `taken`.
    pub fn new(folder: PathBuf, taken: PathBuf) -> Self {
        Self {
            folder,
            taken,
            waiting: BTreeMap::new(),
            count: 0,
        }
    }

    /// Forgets those that wait.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }

    fn take(&mut self, package: &Package, name: &str) -> Result<(), ProgramError> {
        if !package.manifest.declares(name) {
            let declared = match &package.manifest.outputs[..] {
                [] => "none".to_owned(),
                names => names.join(", "),
            };
            return Err(ProgramError::Permanent(format!(
                "{} made output {name:?}, which its manifest does not declare (outputs: {declared})",
                package.program
            )));
        }
        if name.len() > NAME_LIMIT {
            return Err(ProgramError::Permanent(format!(
                "{} made an output whose name has {} bytes (limit {NAME_LIMIT})",
                package.program,
                name.len()
            )));
        }
        let from = self.folder.join(name);
        let to = self.taken.join(self.count.to_string());
        self.count += 1;
        fs::rename(&from, &to).map_err(|error| cannot("take output", &from, error))?;
        self.waiting.insert(name.to_owned(), to);
        Ok(())
    }

    /// Takes every file.
    ///
    /// # Errors
    /// Where one is not declared, or is no regular file.
    pub fn take_all(&mut self, package: &Package) -> Result<(), ProgramError> {
        for file in pack::scan(&self.folder, "output")? {
            let Some(name) = file.name.to_str() else {
                return Err(ProgramError::Permanent(format!(
                    "{} made output {:?}, whose name is not UTF-8",
                    package.program,
                    file.name.display()
                )));
            };
            self.take(package, name)?;
        }
        Ok(())
    }

    /// Takes the files of these names.
    ///
    /// # Errors
    /// Where one is not declared, is not there, or is no regular file.
    pub fn take_named(&mut self, package: &Package, names: &[String]) -> Result<(), ProgramError> {
        if names.is_empty() {
            return Ok(());
        }
        let found = pack::scan(&self.folder, "output")?;
        for name in names {
            if !found.iter().any(|file| file.name == Path::new(name)) {
                return Err(ProgramError::Permanent(format!(
                    "{} says that output {name:?} is complete, but no such file lies in the \
                     folder of outputs",
                    package.program
                )));
            }
            self.take(package, name)?;
        }
        Ok(())
    }

    /// Declares those that wait to the run time.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn declare(&mut self, cx: &mut Capsule) -> Result<(), ProgramError> {
        for (name, path) in std::mem::take(&mut self.waiting) {
            let bytes = fs::read(&path).map_err(|error| cannot("read output", &path, error))?;
            cx.output(name, bytes);
            // Should it stay, it goes with its folder.
            let _ = fs::remove_file(path);
        }
        Ok(())
    }
}
