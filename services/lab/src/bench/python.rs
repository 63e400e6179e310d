//! The Python kit for the benches: finds it, or says why not.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::process::Command;

use super::figures::Figure;

/// Asks python3 for its version and the kit's folder.
const QUESTION: &str = "import sys
if sys.version_info < (3, 10):
    sys.exit('it is ' + sys.version.split()[0] + '; the kit needs 3.10 or newer')
import os, fiec
print(os.path.dirname(os.path.dirname(os.path.abspath(fiec.__file__))))";
/// Longest time of a short command.
const ANSWER: Duration = Duration::from_secs(20);
/// Longest time of the kit's own bench.
const MEASURED: Duration = Duration::from_secs(120);

/// The kit: the folder with the module `fiec`.
#[derive(Debug)]
pub struct Kit {
    folder: PathBuf,
}

impl Kit {
    /// The kit of this checkout, or the one that is installed.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn find() -> Result<Self, String> {
        let relative = Path::new("workers/python");
        let built = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(relative);
        let checkout = [relative.to_owned(), built]
            .into_iter()
            .filter(|path| path.join("fiec/__init__.py").exists())
            .find_map(|path| path.canonicalize().ok());
        let mut command = python(&["-c", QUESTION]);
        if let Some(path) = checkout {
            command.env("PYTHONPATH", path);
        }
        let said = answer(command, ANSWER).await;
        let said = said.map_err(|error| format!("python3: {error:#}"))?;
        Ok(Self {
            folder: PathBuf::from(said.trim()),
        })
    }

    /// Writes a package that ends in its first capsule: the program, the kit beside it, and the
    /// manifest, as the kit's README has it.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn package(&self, folder: &Path) -> anyhow::Result<()> {
        let (from, to) = (self.folder.join("fiec"), folder.join("fiec"));
        std::fs::create_dir_all(&to)?;
        for entry in std::fs::read_dir(&from)? {
            let path = entry?.path();
            if let (true, Some(name)) = (path.is_file(), path.file_name()) {
                std::fs::copy(&path, to.join(name))
                    .with_context(|| format!("cannot copy {}", path.display()))?;
            }
        }
        let program = "import fiec\n\n\ndef main(run: fiec.Run) -> object:\n    return {}\n\n\n\
                       fiec.main(main)\n";
        std::fs::write(folder.join("launch.py"), program)?;
        let manifest = json!({"entry": ["python3", "-B", "launch.py"], "protocol": "frames"});
        std::fs::write(folder.join("fiec.json"), manifest.to_string())?;
        Ok(())
    }

    /// The figures of `python3 -m fiec.bench`.
    ///
    /// # Errors
    /// When it fails, or prints a line that is no figure.
    pub async fn bench(&self) -> anyhow::Result<Vec<Figure>> {
        let mut command = python(&["-m", "fiec.bench", "--json"]);
        command.env("PYTHONPATH", &self.folder);
        let said = answer(command, MEASURED).await?;
        let figure = |line| -> anyhow::Result<Figure> {
            let value: Value = serde_json::from_str(line)?;
            Ok(serde_json::from_value(value)?)
        };
        said.lines()
            .map(|line| figure(line).with_context(|| format!("no figure: {line}")))
            .collect()
    }
}

/// `python3` with these words, without input.
pub(super) fn python(words: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.arg("-B").args(words).stdin(Stdio::null());
    command
}

/// The output of a command, or why it failed.
pub(super) async fn answer(mut command: Command, within: Duration) -> anyhow::Result<String> {
    let output: Output = tokio::time::timeout(within, command.kill_on_drop(true).output())
        .await
        .with_context(|| format!("no answer within {within:?}"))?
        .context("it cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    ensure!(
        output.status.success(),
        "{}",
        last.unwrap_or("it failed without a word")
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
