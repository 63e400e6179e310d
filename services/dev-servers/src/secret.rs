//! Passwords of the private servers. Other users of the machine can also reach loopback ports.
//! Access to these servers is the right to run programs as the user who started them.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use crate::error::{At, Result};

/// The user of both servers.
pub(crate) const USER: &str = "fiec";

/// 122 random bits as hex digits.
pub(crate) fn random() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// Reads the password in the file at `path`. Makes the file if it is missing.
pub(crate) fn keep(path: &Path) -> Result<String> {
    match std::fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => {
            set_mode(path, 0o600)?;
            Ok(text.trim().to_owned())
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).at("cannot read the password in", path)
        }
        _ => {
            let password = random();
            write(path, &password)?;
            Ok(password)
        }
    }
}

/// Writes a file that only its owner can read.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    // Remove the old file first: another process may have it open.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).at("cannot replace", path);
        }
        _ => {}
    }
    let mut options = OpenOptions::new();
    let file: std::io::Result<File> = options.write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .at("cannot write", path)
}

/// Makes a folder and its missing parents with this mode. Keeps an existing folder.
pub(crate) fn create_folder(path: &Path, mode: u32) -> Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .at("cannot create", path)
}

/// Sets the mode of a file or folder of this user.
pub(crate) fn set_mode(path: &Path, mode: u32) -> Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .at("cannot set the mode of", path)
}
