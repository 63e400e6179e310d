//! Makes a package's artifact: a tar. Its bytes depend only on the names, contents and execute
//! permissions of the files, not on this machine or the time.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, Cursor, Read, Seek as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use fiec_broker::store;
use fiec_schemas::package::{
    ARTIFACT_LIMIT, FILES_LIMIT, FOLDERS_LIMIT, MANIFEST_FILE, Manifest, Protocol,
};
use fiec_schemas::{Digest, FieldError};

/// Why a package cannot be made. Names the file, and the field if the error is in the manifest.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct BadPackage {
    path: PathBuf,
    reason: String,
}

impl BadPackage {
    fn new(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    fn because<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> Self {
        move |error| Self::new(path, error)
    }
}

/// Content of the manifest for a package of a single file.
#[derive(Debug, Clone)]
pub struct Single {
    /// Protocol that the program speaks.
    pub protocol: Protocol,
    /// The command. `None`: the file itself.
    pub entry: Option<Vec<String>>,
    /// Outputs that it may make.
    pub outputs: Vec<String>,
}

/// An artifact that is ready to be stored.
#[derive(Debug)]
pub struct Packed {
    /// The package's manifest.
    pub manifest: Manifest,
    /// The tar, read from its beginning. It is deleted when this value is dropped.
    pub artifact: File,
    /// Its digest.
    pub digest: Digest,
    /// Its size.
    pub bytes: u64,
    /// Its files by name, with their bytes; the manifest is one of them.
    pub files: Vec<(String, u64)>,
}

/// Folders that runs on this machine leave behind. They are no part of a program.
const WORKING: [&str; 2] = [".fiec", "__pycache__"];

struct Item {
    source: Source,
    bytes: u64,
    executable: bool,
}

enum Source {
    File(PathBuf),
    Text(Vec<u8>),
}

/// Packs a folder that has a manifest.
///
/// # Errors
/// If a file cannot be in a package, or the manifest breaks a rule.
pub fn pack_folder(folder: &Path) -> Result<Packed, BadPackage> {
    let path = folder.join(MANIFEST_FILE);
    let file = File::open(&path).map_err(|error| {
        BadPackage::new(
            &path,
            format!(
                "{error}; a package's folder needs a manifest, e.g. \
                 {{\"entry\": [\"./run.sh\"], \"protocol\": \"state_dir\"}}"
            ),
        )
    })?;
    let manifest = Manifest::read(file).map_err(|error| in_manifest(&path, &error))?;
    let mut items = BTreeMap::new();
    collect(folder, "", &mut items)?;
    pack(folder, manifest, items)
}

/// Packs a single file with a generated manifest.
///
/// # Errors
/// If the file cannot be in a package, or the manifest breaks a rule.
pub fn pack_file(file: &Path, single: Single) -> Result<Packed, BadPackage> {
    let name = file
        .file_name()
        .and_then(|name| name.to_str())
        .ok_or_else(|| BadPackage::new(file, "its name is no UTF-8"))?;
    if name == MANIFEST_FILE {
        return Err(BadPackage::new(
            file,
            "is a manifest; give the folder that it lies in",
        ));
    }
    let found = std::fs::metadata(file).map_err(BadPackage::because(file))?;
    let manifest = Manifest {
        entry: single.entry.unwrap_or_else(|| vec![format!("./{name}")]),
        protocol: single.protocol,
        outputs: single.outputs,
        limits: Default::default(),
        image: None,
        network: false,
    };
    manifest
        .check()
        .map_err(|error| in_manifest(file, &error))?;
    let text = serde_json::to_vec_pretty(&manifest).map_err(BadPackage::because(file))?;
    let program = Item {
        source: Source::File(file.to_owned()),
        bytes: found.len(),
        executable: true,
    };
    let made = Item {
        bytes: text.len() as u64,
        source: Source::Text(text),
        executable: false,
    };
    let items = BTreeMap::from([(name.to_owned(), program), (MANIFEST_FILE.to_owned(), made)]);
    pack(file, manifest, items)
}

fn in_manifest(path: &Path, error: &FieldError) -> BadPackage {
    match error.field.as_str() {
        "" => BadPackage::new(path, &error.reason),
        field => BadPackage::new(path, format!("field {field}: {}", error.reason)),
    }
}

fn collect(
    folder: &Path,
    prefix: &str,
    items: &mut BTreeMap<String, Item>,
) -> Result<(), BadPackage> {
    for entry in std::fs::read_dir(folder).map_err(BadPackage::because(folder))? {
        let path = entry.map_err(BadPackage::because(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(name) = name else {
            return Err(BadPackage::new(&path, "its name is no UTF-8"));
        };
        if WORKING.contains(&name) {
            continue;
        }
        let name = format!("{prefix}{name}");
        let found = std::fs::symlink_metadata(&path).map_err(BadPackage::because(&path))?;
        if found.is_dir() {
            collect(&path, &format!("{name}/"), items)?;
        } else if found.is_file() {
            let item = Item {
                bytes: found.len(),
                executable: found.permissions().mode() & 0o111 != 0,
                source: Source::File(path),
            };
            items.insert(name, item);
        } else {
            let what = if found.is_symlink() {
                "a link"
            } else {
                "no regular file"
            };
            return Err(BadPackage::new(
                &path,
                format!("is {what}; a package holds regular files only: put a copy in its place"),
            ));
        }
    }
    Ok(())
}

fn pack(
    path: &Path,
    manifest: Manifest,
    items: BTreeMap<String, Item>,
) -> Result<Packed, BadPackage> {
    let all: u64 = items.values().map(|item| item.bytes).sum();
    if all > ARTIFACT_LIMIT || items.len() > FILES_LIMIT {
        return Err(BadPackage::new(
            path,
            format!(
                "{} files with {all} bytes; at most {FILES_LIMIT} files with {ARTIFACT_LIMIT} \
                 bytes can be pushed",
                items.len()
            ),
        ));
    }
    let folders: HashSet<&Path> = items
        .keys()
        .flat_map(|name| Path::new(name).ancestors().skip(1))
        .collect();
    // The package's own folder is one of them.
    if folders.len() > FOLDERS_LIMIT + 1 {
        return Err(BadPackage::new(
            path,
            format!(
                "{} folders; at most {FOLDERS_LIMIT} can be pushed",
                folders.len() - 1
            ),
        ));
    }
    check_entry(path, &manifest, &items)?;
    let file = tempfile::tempfile().map_err(BadPackage::because(path))?;
    let mut tar = tar::Builder::new(BufWriter::new(file));
    for (name, item) in &items {
        append(&mut tar, name, item)?;
    }
    let because = || BadPackage::because(path);
    let mut buffer = tar.into_inner().map_err(because())?;
    buffer.flush().map_err(because())?;
    let mut artifact = buffer
        .into_inner()
        .map_err(|error| BadPackage::new(path, error.error()))?;
    artifact.rewind().map_err(because())?;
    let (digest, bytes) = store::digest_of(&artifact).map_err(because())?;
    artifact.rewind().map_err(because())?;
    if bytes > ARTIFACT_LIMIT {
        return Err(BadPackage::new(
            path,
            format!("its tar has {bytes} bytes, and {ARTIFACT_LIMIT} is the most"),
        ));
    }
    Ok(Packed {
        manifest,
        artifact,
        digest,
        bytes,
        files: items
            .into_iter()
            .map(|(name, item)| (name, item.bytes))
            .collect(),
    })
}

/// Checks that an entry that is a path exists and is executable.
fn check_entry(
    path: &Path,
    manifest: &Manifest,
    items: &BTreeMap<String, Item>,
) -> Result<(), BadPackage> {
    // In a container, the entry is a path in the image.
    let Some(program) = manifest.entry.first().filter(|_| manifest.image.is_none()) else {
        return Ok(());
    };
    if !program.contains('/') {
        if !items.contains_key(program) {
            return Ok(());
        }
        let reason = format!("{program:?} is looked up in PATH; the package's file is ./{program}");
        return Err(in_manifest(path, &FieldError::new("entry", reason)));
    }
    let parts = program
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".");
    let name = parts.collect::<Vec<_>>().join("/");
    let reason = match items.get(&name) {
        Some(item) if item.executable => return Ok(()),
        Some(_) => format!("{program:?} may not be executed: chmod +x it"),
        None => format!("{program:?} is not in the package"),
    };
    Err(in_manifest(path, &FieldError::new("entry", reason)))
}

fn append(
    tar: &mut tar::Builder<BufWriter<File>>,
    name: &str,
    item: &Item,
) -> Result<(), BadPackage> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(item.bytes);
    header.set_mode(if item.executable { 0o755 } else { 0o644 });
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    let (path, source): (&Path, Box<dyn Read>) = match &item.source {
        Source::Text(text) => (Path::new(name), Box::new(Cursor::new(text))),
        Source::File(path) => {
            let file = File::open(path).map_err(BadPackage::because(path))?;
            (path, Box::new(file))
        }
    };
    let mut counted = Counted {
        inner: source.take(item.bytes),
        count: 0,
    };
    tar.append_data(&mut header, name, &mut counted)
        .map_err(BadPackage::because(path))?;
    if counted.count != item.bytes {
        return Err(BadPackage::new(path, "changed while it was being packed"));
    }
    Ok(())
}

struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let found = self.inner.read(buffer)?;
        self.count += found as u64;
        Ok(found)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MANIFEST: &str = r#"{"entry":["./bin/run.sh"],"protocol":"state_dir"}"#;

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(MANIFEST_FILE), MANIFEST).unwrap();
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        let run = dir.path().join("bin/run.sh");
        std::fs::write(&run, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&run, PermissionsExt::from_mode(0o700)).unwrap();
        dir
    }

    #[test]
    fn the_same_files_give_the_same_bytes_whenever_and_by_whomever() {
        let (a, b) = (folder(), folder());
        let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let file = File::options()
            .write(true)
            .open(b.path().join("bin/run.sh"))
            .unwrap();
        file.set_modified(old).unwrap();
        file.set_permissions(PermissionsExt::from_mode(0o755))
            .unwrap();
        let (a, b) = (
            pack_folder(a.path()).unwrap(),
            pack_folder(b.path()).unwrap(),
        );
        assert_eq!((a.digest, a.bytes), (b.digest, b.bytes));
        let names: Vec<_> = b.files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["bin/run.sh", "fiec.json"]);
        // These bytes are registered, so this digest must never change.
        assert_eq!(a.bytes % 512, 0);
    }

    #[test]
    fn what_local_runs_leave_behind_is_no_part_of_a_package() {
        let dir = folder();
        let before = pack_folder(dir.path()).unwrap();
        for left in [".fiec", "__pycache__", "bin/__pycache__"] {
            let left = dir.path().join(left);
            std::fs::create_dir(&left).unwrap();
            std::fs::write(left.join("x"), "x").unwrap();
        }
        let after = pack_folder(dir.path()).unwrap();
        assert_eq!((after.digest, after.files), (before.digest, before.files));
    }

    #[test]
    fn what_was_packed_comes_out_on_a_node_as_it_was() {
        let dir = folder();
        let deep = format!("{}/{}", "long-name-of-a-folder".repeat(5), "x".repeat(120));
        let path = dir.path().join(&deep);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, [9; 1_000]).unwrap();
        let packed = pack_folder(dir.path()).unwrap();
        let into = dir.path().join("unpacked");
        let contents = fiec_agent::unpack::unpack(&packed.artifact, &into, packed.bytes).unwrap();
        assert!(contents.bytes <= packed.bytes);
        assert_eq!(std::fs::read(into.join(&deep)).unwrap(), [9; 1_000]);
        let mode = |name: &str| {
            let found = std::fs::metadata(into.join(name)).unwrap();
            found.permissions().mode() & 0o777
        };
        assert_eq!((mode("bin/run.sh"), mode(&deep)), (0o555, 0o444));
        let text = std::fs::read(into.join(MANIFEST_FILE)).unwrap();
        assert_eq!(Manifest::parse(&text).unwrap(), packed.manifest);
    }

    #[test]
    fn an_entry_that_names_a_file_of_the_package_as_a_command_is_refused() {
        let dir = folder();
        for (entry, words) in [("tool", "the package's file is ./tool"), ("no-file", "")] {
            std::fs::write(dir.path().join("tool"), "#!/bin/sh\n").unwrap();
            let manifest = format!(r#"{{"entry":["{entry}"],"protocol":"state_dir"}}"#);
            std::fs::write(dir.path().join(MANIFEST_FILE), manifest).unwrap();
            let error = pack_folder(dir.path()).err().map(|e| e.to_string());
            assert_eq!(error.is_some(), !words.is_empty(), "{error:?}");
            assert!(error.unwrap_or_default().contains(words));
        }
    }

    #[test]
    fn a_link_a_missing_manifest_and_an_entry_that_cannot_run_are_named() {
        let dir = folder();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("bin/link")).unwrap();
        let error = pack_folder(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("bin/link") && error.contains("is a link"),
            "{error}"
        );

        let dir = folder();
        std::fs::remove_file(dir.path().join(MANIFEST_FILE)).unwrap();
        let error = pack_folder(dir.path()).unwrap_err().to_string();
        assert!(error.contains(MANIFEST_FILE), "{error}");

        let dir = folder();
        let run = dir.path().join("bin/run.sh");
        std::fs::set_permissions(&run, PermissionsExt::from_mode(0o600)).unwrap();
        let error = pack_folder(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("field entry") && error.contains("chmod"),
            "{error}"
        );
        std::fs::remove_file(&run).unwrap();
        let error = pack_folder(dir.path()).unwrap_err().to_string();
        assert!(error.contains("not in the package"), "{error}");
    }

    #[test]
    fn a_single_file_gets_a_manifest() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("steps.sh");
        std::fs::write(&file, "#!/bin/sh\n").unwrap();
        let single = Single {
            protocol: Protocol::StateDir,
            entry: None,
            outputs: vec!["*".to_owned()],
        };
        let packed = pack_file(&file, single).unwrap();
        assert_eq!(packed.manifest.entry, ["./steps.sh"]);
        let mut archive = tar::Archive::new(packed.artifact);
        let names: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path().unwrap().display().to_string())
            .collect();
        assert_eq!(names, [MANIFEST_FILE, "steps.sh"]);
    }
}
