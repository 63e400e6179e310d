//! Programs that cannot be started, and whose fault that is.

use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use fiec_schemas::package::MANIFEST_FILE;
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
            // Without its manifest the node has lost its copy of the package.
            Some(folder)
                if own(folder)
                    && folder.join(MANIFEST_FILE).is_file()
                    && is_broken(Path::new(command), start_error) =>
            {
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
                words.push_str("; the package has no executable file of this name");
            }
            (StartError::NotFound, _) if command.contains('/') => {
                words.push_str("; the interpreter that its first line names is not there");
            }
            (StartError::NotFound, _) => words.push_str(&format!(
                "; no folder of PATH has it (a file of the package is ./{command})"
            )),
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

/// Whether a file of a package cannot be executed on any node: it is missing, or has no execute
/// permission. A missing interpreter, a file system without execution and a binary for another
/// processor are of this node.
fn is_broken(file: &Path, error: StartError) -> bool {
    match (error, std::fs::metadata(file)) {
        (StartError::NotFound, Err(absent)) => absent.kind() == io::ErrorKind::NotFound,
        (StartError::NotExecutable, Ok(there)) => {
            there.is_dir() || there.permissions().mode() & 0o111 == 0
        }
        _ => false,
    }
}

/// Whether a command is started by `env`: by its name, or by the first line of its file. `env` looks
/// for the command itself, and ends with 126 or 127 if it cannot execute it (POSIX, `env`). So does
/// a shell, but that has started: what it does not find then is its script's own fault.
pub fn is_by_env(command: &str) -> bool {
    let is_env = |path: &Path| path.file_name().is_some_and(|name| name == "env");
    if is_env(Path::new(command)) {
        return true;
    }
    let mut head = Vec::new();
    let read = std::fs::File::open(command).and_then(|file| file.take(HEAD).read_to_end(&mut head));
    if !command.contains('/') || read.is_err() {
        return false;
    }
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let interpreter = line.strip_prefix(b"#!").map(String::from_utf8_lossy);
    let interpreter = interpreter
        .as_deref()
        .and_then(|rest| rest.split_whitespace().next());
    interpreter.is_some_and(|path| is_env(Path::new(path)))
}

/// The kernel reads no more of a file to find its interpreter (`BINPRM_BUF_SIZE`).
const HEAD: u64 = 256;

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
        write(MANIFEST_FILE, 0o644, "{}");
        for (command, owner, words) in [
            (no_interpreter.as_str(), Owner::Node, "interpreter"),
            ("no-such-command-of-fiec", Owner::Node, "PATH has it"),
            ("/no/such/command", Owner::Node, "interpreter"),
            (&not_executable, Owner::Program, "no executable file"),
            (&no_format, Owner::Node, "cannot start"),
            (&absent, Owner::Program, "no executable file"),
        ] {
            let error = start(folder.path(), command);
            assert_eq!(error.fault.kind().owner(), owner, "{error}");
            let said = error.to_string();
            assert!(said.contains(words) && said.contains(command), "{said}");
        }
        // The node has lost its copy of the package.
        std::fs::remove_file(folder.path().join(MANIFEST_FILE)).unwrap();
        let error = start(folder.path(), &absent);
        assert_eq!(error.fault.kind().owner(), Owner::Node, "{error}");
    }

    #[test]
    fn only_env_looks_for_a_command_in_place_of_the_node() {
        let folder = tempfile::tempdir().unwrap();
        let is = |text: &str| {
            let file = folder.path().join("run");
            std::fs::write(&file, text).unwrap();
            is_by_env(&file.display().to_string())
        };
        assert!(is("#!/usr/bin/env python3\nprint()\n"));
        assert!(is("#! /bin/env -S python3 -B\n"));
        assert!(!is("#!/bin/sh\nenv python3\n"));
        assert!(!is("#!/opt/env/bin/python\n"));
        assert!(!is(""));
        assert!(is_by_env("env") && is_by_env("/usr/bin/env"));
        assert!(!is_by_env("python3") && !is_by_env("/no/such/file"));
    }
}
