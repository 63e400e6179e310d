//! Image archives without the names of their images.
//!
//! All programs of a node share an engine's store. An archive that is loaded with its names would
//! move another owner's name, so the names are removed first. The image is then known by its id
//! alone.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Seek as _, Write as _};
use std::path::{Component, Path, PathBuf};

use serde_json::Value;
use tar::{Archive, Builder, EntryType};

use crate::program::ProgramError;

/// Largest list of images in an archive, in bytes.
const LIST_LIMIT: u64 = 1 << 20;
/// Names of an image in the index of an OCI archive.
const NAMES: [&str; 2] = [
    "org.opencontainers.image.ref.name",
    "io.containerd.image.name",
];

/// Copies the archive at `path` without the images' names. The copy is positioned at its start.
///
/// # Errors
/// Permanent if it is no plain tar of images, transient if it cannot be read or copied.
pub fn without_names(path: &Path) -> Result<File, ProgramError> {
    let cannot = |error: io::Error| {
        let text = format!("cannot read image archive {}: {error}", path.display());
        match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::Other => ProgramError::Permanent(text),
            _ => ProgramError::Transient(text),
        }
    };
    File::open(path).and_then(copy).map_err(cannot)
}

fn copy(from: File) -> io::Result<File> {
    let mut archive = Archive::new(BufReader::new(from));
    let mut to = Builder::new(BufWriter::new(tempfile::tempfile()?));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let (name, mut header) = (plain(&entry.path()?)?, entry.header().clone());
        let kind = header.entry_type();
        if kind.is_symlink() || kind.is_hard_link() {
            let target = entry.link_name()?.unwrap_or_default().into_owned();
            let name =
                listed(&name).map_or(Ok(&name), |_| Err(invalid("a list of images is a link")))?;
            to.append_link(&mut header, name, target)?;
            continue;
        }
        if kind == EntryType::XGlobalHeader {
            continue;
        }
        if !matches!(
            kind,
            EntryType::Regular | EntryType::Continuous | EntryType::Directory
        ) {
            return Err(invalid(
                "the archive contains entries other than files, folders and links",
            ));
        }
        // Its header may state another size than the actual one.
        header.set_size(entry.size());
        match listed(&name) {
            None => to.append_data(&mut header, &name, &mut entry)?,
            Some(List::Repositories) => {}
            Some(list) => {
                let text = anonymous(list, &mut entry)?;
                header.set_entry_type(EntryType::Regular);
                header.set_size(text.len() as u64);
                to.append_data(&mut header, &name, &text[..])?;
            }
        }
    }
    let mut file = to.into_inner()?.into_inner().map_err(io::Error::from)?;
    file.flush()?;
    file.rewind()?;
    Ok(file)
}

/// A file of an archive that names images.
enum List {
    /// Of docker, with `RepoTags`.
    Manifest,
    /// Of OCI, with annotations.
    Index,
    /// Of docker before it had a manifest: contains only names.
    Repositories,
}

fn listed(name: &Path) -> Option<List> {
    match name.to_str()? {
        "manifest.json" => Some(List::Manifest),
        "index.json" => Some(List::Index),
        "repositories" => Some(List::Repositories),
        _ => None,
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

/// Removes `.` from a path, as engines do.
fn plain(path: &Path) -> io::Result<PathBuf> {
    let mut all = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => all.push(part),
            Component::CurDir => {}
            _ => return Err(invalid("a path in it leaves its folder")),
        }
    }
    match all.as_os_str().is_empty() {
        // The folder itself.
        true => Ok(PathBuf::from(".")),
        false => Ok(all),
    }
}

fn anonymous(list: List, entry: &mut impl io::Read) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    entry.take(LIST_LIMIT + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LIST_LIMIT {
        return Err(invalid("a list of images is over 1 MiB"));
    }
    let mut value: Value =
        serde_json::from_slice(&text).map_err(|_| invalid("a list of images is no JSON"))?;
    let images = match list {
        List::Manifest => value.as_array_mut(),
        _ => value.get_mut("manifests").and_then(Value::as_array_mut),
    };
    for image in images.into_iter().flatten() {
        if let Some(tags) = image.get_mut("RepoTags") {
            *tags = Value::Null;
        }
        if let Some(notes) = image.get_mut("annotations").and_then(Value::as_object_mut) {
            notes.retain(|name, _| !NAMES.contains(&name.as_str()));
        }
    }
    serde_json::to_vec(&value).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tar::Header;

    fn made(files: &[(&str, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut tar = Builder::new(file.reopen().unwrap());
        for (name, text) in files {
            let mut header = Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, *text).unwrap();
        }
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        tar.append_link(&mut header, "b/layer.tar", "../a/layer.tar")
            .unwrap();
        tar.finish().unwrap();
        file
    }

    #[test]
    fn an_archive_moves_no_name_of_another_image_and_keeps_all_else() {
        let long = format!("{}/layer.tar", "d".repeat(150));
        let archive = made(&[
            (&long, b"layer"),
            ("repositories", br#"{"python":{"3":"ab"}}"#),
            ("./manifest.json", br#"[{"Config":"c.json","RepoTags":["python:3"],"Layers":["l"]}]"#),
            (
                "index.json",
                br#"{"manifests":[{"digest":"sha256:1","annotations":{"io.containerd.image.name":"python:3","org.opencontainers.image.ref.name":"3","x":"y"}}]}"#,
            ),
        ]);
        let mut copy = Archive::new(without_names(archive.path()).unwrap());
        let mut found = Vec::new();
        for entry in copy.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            assert!(!text.contains("python"), "{text}");
            found.push((entry.path().unwrap().display().to_string(), text));
        }
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, [&long, "manifest.json", "index.json", "b/layer.tar"]);
        assert_eq!(found[0].1, "layer");
        let manifest: Value = serde_json::from_str(&found[1].1).unwrap();
        assert_eq!(manifest[0]["Config"], "c.json");
        assert_eq!(manifest[0]["RepoTags"], Value::Null);
        assert!(
            found[2].1.contains(r#""annotations":{"x":"y"}"#),
            "{}",
            found[2].1
        );
    }

    #[test]
    fn a_size_that_stands_before_the_header_hides_no_list_of_images() {
        let hidden = std::fs::read(made(&[("manifest.json", br#"[{"RepoTags":["a"]}]"#)])).unwrap();
        let hidden = &hidden[..1_024];
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut tar = Builder::new(file.reopen().unwrap());
        tar.append_pax_extensions([("size", &b"1024"[..])]).unwrap();
        let mut header = Header::new_ustar();
        header.set_path("layer").unwrap();
        header.set_size(0);
        header.set_cksum();
        let out = tar.get_mut();
        out.write_all(header.as_bytes()).unwrap();
        out.write_all(hidden).unwrap();
        tar.finish().unwrap();
        let mut copy = Archive::new(without_names(file.path()).unwrap());
        let entries = copy.entries().unwrap().map(Result::unwrap);
        let found: Vec<_> = entries
            .map(|e| (e.path().unwrap().display().to_string(), e.size()))
            .collect();
        assert_eq!(found, [("layer".to_owned(), 1_024)]);
    }

    #[test]
    fn what_is_no_tar_of_images_is_refused_for_good() {
        let noise = made(&[("manifest.json", b"no json")]);
        assert!(without_names(noise.path()).unwrap_err().is_permanent());
        std::fs::write(noise.path(), vec![7; 2048]).unwrap();
        assert!(without_names(noise.path()).unwrap_err().is_permanent());
        assert!(
            !without_names(Path::new("/nonexistent.tar"))
                .unwrap_err()
                .is_permanent()
        );
    }
}
