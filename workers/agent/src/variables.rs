//! The variables of a submission, with the content of the files that it names on this node.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use fiec_kit::beneath::{Folder, Links};
use fiec_kit::launch::Values;
use fiec_schemas::variables::{VARIABLE_FILE_LIMIT, Variable, VariableFile, Variables, is_value};
use fiec_schemas::{Secret, Submission};

use crate::cache::NotCached;
use crate::shared::Shared;

/// Reads them.
///
/// # Errors
/// The variable whose file is not there, or is no value.
pub(crate) async fn read(shared: &Shared, spec: &Submission) -> Result<Values, NotCached> {
    if spec.env.is_empty() {
        return Ok(Values::default());
    }
    let (env, folder) = (spec.env.clone(), shared.options.secret_dir.clone());
    let read = tokio::task::spawn_blocking(move || all(env, folder));
    let read = read.await.map_err(NotCached::because("env"))?;
    read.map_err(NotCached)
}

fn all(env: Variables, folder: Option<PathBuf>) -> Result<Values, String> {
    let read = env.into_iter().map(|(name, value)| {
        let value = match value {
            Variable::Text(text) => Secret::from(text),
            Variable::File(VariableFile { file }) => {
                let folder = folder.as_deref().ok_or_else(|| {
                    format!(
                        "env.{name}: the node has no folder for it (`fiec worker --secret-dir`)"
                    )
                })?;
                content(folder, &file)
                    .map_err(|error| format!("env.{name}: the node's file {file:?}: {error}"))?
            }
        };
        Ok((name, value))
    });
    read.collect()
}

fn content(folder: &Path, name: &str) -> io::Result<Secret> {
    let bad = |words: &str| io::Error::new(io::ErrorKind::InvalidData, words);
    let file = Folder::open(folder)?.file(Path::new(name), Links::Inside)?;
    let mut text = String::new();
    let limit = VARIABLE_FILE_LIMIT;
    file.take(limit + 1).read_to_string(&mut text)?;
    if text.len() as u64 > limit {
        return Err(bad(&format!("has more than {limit} bytes")));
    }
    let value = text.strip_suffix('\n').unwrap_or(&text);
    if !is_value(value) {
        return Err(bad("has several lines, or a NUL"));
    }
    Ok(value.into())
}
