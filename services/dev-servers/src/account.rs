//! The user that PostgreSQL runs as when this process is root.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Uid};

use crate::error::{At, Error, Result};

/// An unprivileged user of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl Account {
    /// The user to switch to. `None` unless this process is root.
    pub fn for_servers() -> Option<Self> {
        rustix::process::geteuid().is_root().then(|| {
            let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
            Self::pick(&passwd)
        })
    }

    /// `postgres`, else `nobody`, else 65534. Never a user with uid 0.
    fn pick(passwd: &str) -> Self {
        ["postgres", "nobody"]
            .iter()
            .find_map(|name| Self::find(passwd, |a| a.name == *name))
            .unwrap_or_else(|| Self {
                name: "65534".into(),
                uid: 65534,
                gid: 65534,
            })
    }

    /// The user that owns `path`, unless that is root.
    pub(crate) fn owner_of(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        (meta.uid() != 0).then(|| {
            Self::find(&passwd, |a| a.uid == meta.uid()).unwrap_or_else(|| Self {
                name: meta.uid().to_string(),
                uid: meta.uid(),
                gid: meta.gid(),
            })
        })
    }

    fn find(passwd: &str, wanted: impl Fn(&Self) -> bool) -> Option<Self> {
        passwd.lines().find_map(|line| {
            let mut f = line.split(':');
            let name = f.next()?.to_owned();
            let (uid, gid) = (f.nth(1)?.parse().ok()?, f.next()?.parse().ok()?);
            let account = Self { name, uid, gid };
            (account.uid != 0 && wanted(&account)).then_some(account)
        })
    }

    /// The first folder on the way to `path` that this user cannot enter. `path` itself counts if
    /// it exists. Reads mode bits, not access lists.
    pub(crate) fn blocked_at(&self, path: &Path) -> Option<PathBuf> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        // Links are followed as far as the path exists.
        let real = path
            .ancestors()
            .find_map(|p| p.canonicalize().ok())
            .unwrap_or(path);
        let mut ancestors: Vec<_> = real.ancestors().collect();
        ancestors.reverse();
        ancestors
            .into_iter()
            .find(|p| {
                std::fs::metadata(p).is_ok_and(|m| {
                    let bit = match () {
                        () if m.uid() == self.uid => 0o100,
                        () if m.gid() == self.gid => 0o010,
                        () => 0o001,
                    };
                    m.mode() & bit == 0
                })
            })
            .map(Path::to_owned)
    }

    pub(crate) fn require_reach(&self, path: &Path) -> Result<()> {
        match self.blocked_at(path) {
            None => Ok(()),
            Some(blocked) => Err(Error::Unreachable {
                path: path.to_owned(),
                blocked,
                account: self.name.clone(),
            }),
        }
    }

    pub(crate) fn own(&self, path: &Path) -> Result<()> {
        rustix::fs::chown(
            path,
            Some(Uid::from_raw(self.uid)),
            Some(Gid::from_raw(self.gid)),
        )
        .at("cannot change the owner of", path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n";

    #[test]
    fn the_postgres_user_is_preferred_to_nobody_and_root_is_never_taken() {
        let with = format!("{PASSWD}postgres:x:101:104::/var/lib/postgresql:/bin/bash\n");
        assert_eq!(Account::pick(&with).uid, 101);
        assert_eq!(Account::pick(PASSWD).name, "nobody");
        assert_eq!(Account::pick("postgres:x:0:0::/:/bin/sh").uid, 65534);
    }

    #[test]
    fn a_closed_folder_on_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (open, closed) = (dir.path().join("open"), dir.path().join("closed"));
        for (path, mode) in [(&open, 0o755), (&closed, 0o700)] {
            std::fs::create_dir(path).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
        let stranger = Account {
            name: "x".into(),
            uid: 4_000_000,
            gid: 4_000_000,
        };
        assert_eq!(stranger.blocked_at(&open.join("not/yet")), None);
        assert_eq!(
            stranger.blocked_at(&closed.join("a")),
            Some(closed.canonicalize().unwrap())
        );
    }
}
