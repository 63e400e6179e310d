//! The matrix of the demo: that of the checkout, or the copy in this binary.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use fiec_dev_servers::default_cache;

/// `examples/data/bcsstk16.mtx`, for a binary that is installed without its sources.
const COPY: &[u8] = include_bytes!("../../../../examples/data/bcsstk16.mtx");
const NAME: &str = "bcsstk16.mtx";

/// The matrix file: below the working directory, in the sources of this build, or written into the
/// user's cache.
///
/// # Errors
/// If it is in neither place, and there is no cache that can be written.
pub fn matrix() -> anyhow::Result<PathBuf> {
    let relative = Path::new("examples/data").join(NAME);
    let built = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(&relative);
    let found = [relative, built]
        .into_iter()
        .find_map(|path| path.canonicalize().ok());
    match found {
        Some(found) => Ok(found),
        None => {
            let cache = default_cache().context("there is no HOME to keep the matrix in")?;
            unpacked(&cache.join("examples"))
        }
    }
}

/// The copy as a file of this folder. It appears whole, or not at all.
fn unpacked(folder: &Path) -> anyhow::Result<PathBuf> {
    let path = folder.join(NAME);
    if std::fs::read(&path).is_ok_and(|there| there == COPY) {
        return Ok(path);
    }
    let write = || {
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        std::io::Write::write_all(&mut file, COPY)?;
        file.persist(&path).map_err(|error| error.error)
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binary_without_its_sources_has_the_same_matrix() {
        let folder = tempfile::tempdir().unwrap();
        let path = unpacked(&folder.path().join("new")).unwrap();
        let original = matrix().unwrap();
        assert_ne!(path, original);
        assert_eq!(
            std::fs::read(&path).unwrap(),
            std::fs::read(original).unwrap()
        );
        // A damaged one is replaced.
        std::fs::write(&path, "half").unwrap();
        assert_eq!(unpacked(&folder.path().join("new")).unwrap(), path);
        assert_eq!(std::fs::read(&path).unwrap(), COPY);
    }
}
