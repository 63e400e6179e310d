//! Programs that cannot be started, and whose fault that is.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use fiec_schemas::{Fault, StartError};

/// A program that could not be started.
#[derive(Debug, thiserror::Error)]
#[error("{words}")]
pub struct NotStarted {
    /// Whose fault it is.
    pub fault: Fault,
    words: String,
}

impl NotStarted {
    /// `command` could not be executed. `folder`: the package's, if it is one.
    pub fn of(command: &str, folder: Option<&Path>, error: &io::Error) -> Self {
        let start_error = StartError::of(error);
        let own = |folder: &Path| Path::new(command).starts_with(folder);
        let fault = match folder {
            Some(folder) if own(folder) && is_broken(Path::new(command), start_error) => {
                Fault::BrokenPackage
            }
            _ => Fault::CannotStart {
                command: command.to_owned(),
                error: start_error,
            },
        };
        let mut words = format!("cannot start {command}: {error}");
        match (start_error, &fault) {
            (_, Fault::BrokenPackage) => {
                words.push_str("; the package has no such file that may be executed");
            }
            (StartError::NotFound, _) if command.contains('/') => {
                words.push_str("; the interpreter that its first line names is not there");
            }
            (StartError::NotFound, _) => {
                let path = std::env::var_os("PATH").unwrap_or_default();
                words.push_str(&format!("; PATH is {}", path.display()));
            }
            _ => {}
        }
        Self { fault, words }
    }
}

impl From<io::Error> for NotStarted {
    /// Something around the child, such as its pipes, could not be made.
    fn from(error: io::Error) -> Self {
        Self {
            fault: Fault::CannotStart {
                command: "a child".to_owned(),
                error: StartError::of(&error),
            },
            words: format!("cannot start a child: {error}"),
        }
    }
}

/// Whether a file of a package cannot be executed on any node: it is missing, has no execute
/// permission, or no format that the kernel knows. A missing interpreter and a file system without
/// execution are of this node.
fn is_broken(file: &Path, error: StartError) -> bool {
    match (error, std::fs::metadata(file)) {
        (StartError::NotFound, Err(absent)) => absent.kind() == io::ErrorKind::NotFound,
        (StartError::NotExecutable, Ok(there)) => {
            there.is_dir() || there.permissions().mode() & 0o111 == 0
        }
        (StartError::NoFormat, _) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Owner;

    /// Why this file of a package, or this command, does not start.
    fn start(folder: &Path, command: &str) -> NotStarted {
        let error = std::process::Command::new(command).spawn().unwrap_err();
        NotStarted::of(command, Some(folder), &error)
    }

    #[test]
    fn what_a_package_lacks_is_its_own_fault_and_what_a_node_lacks_is_the_nodes() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, mode: u32, text: &str| {
            let file = folder.path().join(name);
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            file.display().to_string()
        };
        let no_interpreter = write("a", 0o755, "#!/no/such/interpreter\n");
        let not_executable = write("b", 0o644, "#!/bin/sh\n");
        let no_format = write("c", 0o755, "\u{1}\n");
        let absent = folder.path().join("d").display().to_string();
        for (command, owner, words) in [
            (no_interpreter.as_str(), Owner::Node, "interpreter"),
            ("no-such-command-of-fiec", Owner::Node, "PATH is "),
            ("/no/such/command", Owner::Node, "interpreter"),
            (&not_executable, Owner::Program, "no such file"),
            (&no_format, Owner::Program, "no such file"),
            (&absent, Owner::Program, "no such file"),
        ] {
            let error = start(folder.path(), command);
            assert_eq!(error.fault.kind().owner(), owner, "{error}");
            let said = error.to_string();
            assert!(said.contains(words) && said.contains(command), "{said}");
        }
    }
}
