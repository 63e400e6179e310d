//! Python as the tests use it.
//!
//! numpy and mypy are fetched once by pip into the target folder. Where that fails the tests that
//! need them say so on stderr and are left out; everything else needs `python3` alone.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// What the tests use where it can be had.
const PACKAGES: [&str; 2] = ["numpy>=1.26,<3", "mypy>=1.10,<3"];
/// What the client and the notebook need more.
const CLIENT: [&str; 8] = [
    "numpy>=1.26,<3",
    "nats-py[nkeys]>=2.9,<3",
    "blake3>=1,<2",
    "psycopg[binary]>=3.1,<4",
    "pandas>=2,<4",
    "tqdm>=4.60,<5",
    "nbclient>=0.10,<1",
    "ipykernel>=6,<8",
];

/// Says something on stderr that is seen though the test passes.
pub fn say(text: &str) {
    // Where nobody listens any more, there is nobody to be told.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The project.
pub fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap()
}

/// A `python3` that finds the kit, and perhaps numpy and mypy.
pub struct Python {
    /// Where it looks for modules.
    pub path: OsString,
    /// Whether numpy and mypy are there.
    pub has_packages: bool,
}

impl Python {
    /// The one of this process.
    pub fn get() -> &'static Self {
        static PYTHON: OnceLock<Python> = OnceLock::new();
        PYTHON.get_or_init(|| {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("python-{}", tag()));
            let kit = root().join("workers/python");
            let has_packages = fetch(&folder, &PACKAGES);
            let path = match has_packages {
                true => std::env::join_paths([kit, folder]).unwrap(),
                false => kit.into(),
            };
            Python { path, has_packages }
        })
    }

    /// The one of this process, with what the client and the notebook need. None, after saying so,
    /// where pip cannot get that.
    pub fn of_client() -> Option<&'static Self> {
        static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
        let python = PYTHON.get_or_init(|| {
            let own = Self::get();
            let folder =
                Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("python-client-{}", tag()));
            let is_there = own.has_packages && fetch(&folder, &CLIENT);
            let paths = std::env::split_paths(&own.path).chain([folder]);
            is_there.then(|| Python {
                path: std::env::join_paths(paths).unwrap(),
                has_packages: true,
            })
        });
        python.as_ref()
    }

    /// `python3` with these words, in the environment of a program.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("python3");
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FIEC_") {
                command.env_remove(name);
            }
        }
        command
            .args(words)
            .env("PYTHONPATH", &self.path)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null());
        command
    }
}

/// The version and the platform, since compiled packages fit no other.
pub fn tag() -> String {
    let words = "import sys, sysconfig; print(sysconfig.get_python_version(), \
                 sysconfig.get_platform(), sep='-')";
    let output = Command::new("python3")
        .args(["-c", words])
        .output()
        .expect("python3 is needed; see the README");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Has the packages in the folder; false, after saying so, where pip cannot get them.
pub fn fetch(folder: &Path, packages: &[&str]) -> bool {
    let stamp = folder.join("complete");
    if std::fs::read_to_string(&stamp).is_ok_and(|text| text == packages.join(" ")) {
        return true;
    }
    let fresh = folder.with_extension(format!("new-{}", std::process::id()));
    let output = Command::new("python3")
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-input",
            "--only-binary=:all:",
            // There is no other form of it, and nothing in it is compiled.
            "--no-binary=nkeys",
        ])
        .args([
            "--disable-pip-version-check",
            "--retries",
            "1",
            "--timeout",
            "20",
            "--target",
        ])
        .arg(&fresh)
        .args(packages)
        .output();
    let said = match output {
        Ok(output) if output.status.success() => {
            std::fs::write(fresh.join("complete"), packages.join(" ")).unwrap();
            let _ = std::fs::remove_dir_all(folder);
            // Another run of these tests may have been faster; what it made is as good.
            let _ = std::fs::rename(&fresh, folder);
            return stamp.exists();
        }
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    let _ = std::fs::remove_dir_all(&fresh);
    say(&format!(
        "SKIPPED: what needs {}, since pip cannot get them: {said}",
        packages.join(" or ")
    ));
    false
}

/// What a command that succeeded has said.
#[track_caller]
pub fn success(output: Output) -> (String, String) {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    (out, err)
}

/// Copies a folder.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        match entry.file_type().unwrap().is_dir() {
            true => copy(&from, &to),
            false => drop(std::fs::copy(&from, &to).unwrap()),
        }
    }
}
