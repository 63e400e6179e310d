//! Outputs of a foreign program: finished files. They are moved away at a boundary, so that no
//! later capsule can change them, and read when a commit carries them.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use super::{Package, pack};
use crate::beneath::{Folder, Links};
use crate::program::{Capsule, ProgramError};
use crate::room::Room;

/// Longest name in bytes.
const NAME_LIMIT: usize = 255;

/// The name in a run of the folder where outputs are made.
pub const FOLDER: &str = "outputs";

/// Outputs that were moved away and wait for the next commit, each in a file named by its number.
#[derive(Default)]
pub struct Outputs {
    waiting: BTreeMap<String, String>,
    count: u64,
}

/// The folders of a run and of the files that were moved away.
pub struct Places<'a> {
    /// The run's.
    pub run: &'a Folder,
    /// A folder that no program writes to.
    pub taken: &'a Folder,
}

fn cannot(what: &str, path: &Path, error: std::io::Error) -> ProgramError {
    ProgramError::of_files(what, path, &error)
}

impl Outputs {
    /// Forgets the waiting outputs.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }

    fn take(
        &mut self,
        package: &Package,
        (made, taken): (&Folder, &Folder),
        name: &str,
    ) -> Result<(), ProgramError> {
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
        let to = self.count.to_string();
        self.count += 1;
        made.rename(Path::new(name), taken, Path::new(&to))
            .map_err(|error| cannot("take output", &made.path().join(name), error))?;
        self.waiting.insert(name.to_owned(), to);
        Ok(())
    }

    /// Takes every file.
    ///
    /// # Errors
    /// Where one is not declared, or is no regular file.
    pub fn take_all(&mut self, package: &Package, places: &Places<'_>) -> Result<(), ProgramError> {
        let made = pack::root(places.run, FOLDER)?;
        for file in pack::scan(&made, "output")? {
            let Some(name) = file.name.to_str() else {
                return Err(ProgramError::Permanent(format!(
                    "{} made output {:?}, whose name is not UTF-8",
                    package.program,
                    file.name.display()
                )));
            };
            self.take(package, (&made, places.taken), name)?;
        }
        Ok(())
    }

    /// Takes the files of these names.
    ///
    /// # Errors
    /// Where one is not declared, is not there, or is no regular file.
    pub fn take_named(
        &mut self,
        package: &Package,
        places: &Places<'_>,
        names: &[String],
    ) -> Result<(), ProgramError> {
        if names.is_empty() {
            return Ok(());
        }
        let made = pack::root(places.run, FOLDER)?;
        let found = pack::scan(&made, "output")?;
        for name in names {
            if !found.iter().any(|file| file.name == Path::new(name)) {
                return Err(ProgramError::Permanent(format!(
                    "{} reports that output {name:?} is complete, but the folder of outputs has no \
                     such file",
                    package.program
                )));
            }
            self.take(package, (&made, places.taken), name)?;
        }
        Ok(())
    }

    /// Declares the waiting outputs to the run time.
    ///
    /// # Errors
    /// When one cannot be read, or there is no room for all of them.
    pub fn declare(
        &mut self,
        room: &Room,
        places: &Places<'_>,
        cx: &mut Capsule,
    ) -> Result<(), ProgramError> {
        let mut all = 0;
        for (name, number) in std::mem::take(&mut self.waiting) {
            let number = Path::new(&number);
            let cannot = |error| cannot("read output", Path::new(&name), error);
            // Another process may have put a link there between the check and the move.
            let file = places.taken.file(number, Links::Refused);
            let mut file = file.map_err(cannot)?;
            let size = file.metadata().map_err(cannot)?.len();
            all += size;
            room.check(0, all)
                .map_err(|error| ProgramError::Permanent(format!("output {name:?}: {error}")))?;
            let mut bytes = Vec::new();
            // Not more, should another process still write to it.
            (&mut file)
                .take(size)
                .read_to_end(&mut bytes)
                .map_err(cannot)?;
            cx.output(name, bytes);
            // If it cannot be removed, it is removed with its folder.
            let _ = places.taken.remove(number);
        }
        Ok(())
    }
}
