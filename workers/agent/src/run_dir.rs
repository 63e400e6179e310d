//! The run folder. A user who can write there can have this user's processes ended, so it belongs
//! to this user alone.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use fiec_schemas::NodeId;

/// Only its owner reads, writes or enters it.
const PRIVATE: u32 = 0o700;
/// Rights of others to write.
const WRITABLE: u32 = 0o022;

/// Returns the default of a node's run folder: in the user's run-time folder (`XDG_RUNTIME_DIR`) if
/// it exists, else in the shared temporary folder. There its name contains the user's number.
/// Another user can take that name first, but [`secure`] detects that.
pub fn default_of(node: &NodeId) -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    default_in(own.filter(|folder| folder.is_absolute()), node)
}

fn default_in(own: Option<PathBuf>, node: &NodeId) -> PathBuf {
    match own {
        Some(folder) => folder.join(format!("fiec-{node}")),
        None => {
            let user = rustix::process::geteuid().as_raw();
            std::env::temp_dir().join(format!("fiec-{user}-{node}"))
        }
    }
}

/// Makes the folder with mode 0700, or checks an existing one: no link, owned by this user,
/// writable by nobody else.
///
/// # Errors
/// The problem with it, and the remedy.
pub fn secure(folder: &Path) -> io::Result<()> {
    check(folder, rustix::process::geteuid().as_raw())
}

fn check(folder: &Path, user: u32) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::DirBuilder::new().mode(PRIVATE).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(io::Error::other(format!(
                "{} cannot be created ({error}): name another folder with --run-dir",
                folder.display()
            )));
        }
        _ => {}
    }
    // Metadata of the name itself, not of a link's target.
    let found = std::fs::symlink_metadata(folder)?;
    let refuse = |what: String, help: &str| {
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} {what}: {help}", folder.display()),
        ))
    };
    let elsewhere = "remove it, or name another folder with --run-dir";
    if !found.is_dir() {
        return refuse("is no folder".to_owned(), elsewhere);
    }
    if found.uid() != user {
        let owner = found.uid();
        return refuse(
            format!("belongs to user {owner}, not to user {user} who runs this worker"),
            elsewhere,
        );
    }
    if found.mode() & WRITABLE != 0 {
        return refuse(
            format!(
                "may be written by others (mode {:o})",
                found.mode() & 0o7777
            ),
            "end its agent, check its contents, then remove it or `chmod 700` it",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn node() -> NodeId {
        NodeId::new("n1").unwrap()
    }

    fn refused(folder: &Path, user: u32) -> String {
        let error = check(folder, user).unwrap_err().to_string();
        assert!(error.contains(folder.to_str().unwrap()), "{error}");
        error
    }

    #[test]
    fn a_run_folder_is_made_for_its_user_alone_and_found_again() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("runs").join("n1");
        secure(&folder).unwrap();
        let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, PRIVATE);
        secure(&folder).unwrap();
    }

    #[test]
    fn a_run_folder_of_somebody_else_is_refused_with_what_to_do() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("n1");
        std::fs::create_dir(&folder).unwrap();
        let owner = std::fs::metadata(&folder).unwrap().uid();
        // The error that the other user would get.
        let said = refused(&folder, owner + 1);
        assert!(said.contains(&format!("belongs to user {owner}")), "{said}");
        assert!(said.contains("--run-dir"), "{said}");
    }

    #[test]
    fn a_run_folder_that_others_may_write_or_that_is_a_link_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let (folder, link) = (base.path().join("n1"), base.path().join("link"));
        std::fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        let user = rustix::process::geteuid().as_raw();
        assert!(refused(&link, user).contains("no folder"));
        let open = std::fs::Permissions::from_mode(0o770);
        std::fs::set_permissions(&folder, open).unwrap();
        let said = refused(&folder, user);
        assert!(said.contains("770") && said.contains("chmod 700"), "{said}");
        let file = base.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(refused(&file, user).contains("no folder"));
    }

    #[test]
    fn the_default_is_the_users_own_folder_or_a_name_with_the_users_number() {
        let own = default_in(Some("/run/user/7".into()), &node());
        assert_eq!(own, Path::new("/run/user/7/fiec-n1"));
        let user = rustix::process::geteuid().as_raw();
        let shared = default_in(None, &node());
        assert_eq!(shared, std::env::temp_dir().join(format!("fiec-{user}-n1")));
    }
}
