//! Environments by allow-list: a secret that nobody thought of stays with the worker.

use std::ffi::OsStr;
use std::fmt;
use std::process::Command;
use std::str::FromStr;

use fiec_schemas::variables::{is_fiecs, is_variable};
use serde::{Deserialize, Serialize};

use super::threads;

/// What every program sees of the worker's environment, besides all `LC_…`.
const BASIC: [&str; 11] = [
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TMPDIR",
    "TZ",
    "USER",
];

/// What the worker's own child sees besides, and all `CUDA_…` and `NVIDIA_…`: where to find container
/// engines, and what to log.
const OF_OWN: [&str; 9] = [
    "CONTAINERS_CONF",
    "CONTAINERS_REGISTRIES_CONF",
    "CONTAINERS_STORAGE_CONF",
    "CONTAINER_HOST",
    "DOCKER_CONFIG",
    "DOCKER_HOST",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "XDG_RUNTIME_DIR",
];

pub(super) fn is_basic(name: &str) -> bool {
    name.starts_with("LC_") || BASIC.contains(&name)
}

pub(super) fn is_of_own(name: &str) -> bool {
    is_basic(name)
        || OF_OWN.contains(&name)
        || name.starts_with("CUDA_")
        || name.starts_with("NVIDIA_")
        || name == crate::flips::BIT_FLIPS_ENV
}

/// What programs see of the environment of the process that starts them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Environment {
    /// The basic variables, and these.
    Passed(Vec<Passed>),
    /// All but FIEC's own: the program runs for the user who started it, on this machine.
    Users,
}

impl Default for Environment {
    fn default() -> Self {
        Self::Passed(Vec::new())
    }
}

impl Environment {
    /// Gives a command these variables and those that `is_needed` names, and no others.
    pub(super) fn apply(&self, command: &mut Command, is_needed: impl Fn(&str) -> bool) {
        let is_seen = |name: &OsStr| {
            let Some(name) = name.to_str() else {
                return *self == Self::Users;
            };
            match self {
                Self::Passed(more) => is_needed(name) || more.iter().any(|more| more.0 == name),
                Self::Users => !name.starts_with("FIEC_") || is_needed(name),
            }
        };
        command.env_clear();
        command.envs(std::env::vars_os().filter(|(name, _)| is_seen(name)));
    }
}

/// The name of a variable that an operator lets programs see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passed(String);

/// A name that cannot be passed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotPassed {
    /// It is no name.
    #[error("must be the name of a variable: letters, digits and `_`, no digit first")]
    NoName,
    /// FIEC sets it.
    #[error("is set by FIEC, and cannot be passed")]
    Own,
    /// It says how many threads compute.
    #[error(
        "changes the bits of results, which must not depend on the node; a submission may set it: \
         `\"env\": {{\"OMP_NUM_THREADS\": \"4\"}}`"
    )]
    Bits,
}

impl FromStr for Passed {
    type Err = NotPassed;

    fn from_str(name: &str) -> Result<Self, NotPassed> {
        if !is_variable(name) {
            return Err(NotPassed::NoName);
        }
        if is_fiecs(name) {
            return Err(NotPassed::Own);
        }
        if threads::is_count(name) {
            return Err(NotPassed::Bits);
        }
        Ok(Self(name.to_owned()))
    }
}

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_passed_by_its_name_and_none_of_fiecs_own() {
        assert_eq!(" HUB".parse::<Passed>(), Err(NotPassed::NoName));
        for name in ["", "1A", "A=B", "A B"] {
            assert_eq!(name.parse::<Passed>(), Err(NotPassed::NoName), "{name:?}");
        }
        for name in ["FIEC_NATS_URL", "CUDA_VISIBLE_DEVICES"] {
            assert_eq!(name.parse::<Passed>(), Err(NotPassed::Own), "{name:?}");
        }
        assert_eq!("MKL_NUM_THREADS".parse::<Passed>(), Err(NotPassed::Bits));
        assert_eq!("HUB_2".parse::<Passed>().unwrap().to_string(), "HUB_2");
    }

    #[test]
    fn a_command_gets_what_is_named_and_no_other_variable() {
        let mut command = Command::new("env");
        let cargo: Passed = "CARGO_PKG_NAME".parse().unwrap();
        Environment::Passed(vec![cargo]).apply(&mut command, is_basic);
        let names: Vec<_> = command
            .get_envs()
            .map(|(name, _)| name.to_owned())
            .collect();
        assert!(
            names.iter().any(|name| name == "CARGO_PKG_NAME"),
            "{names:?}"
        );
        assert!(names.iter().any(|name| name == "PATH"), "{names:?}");
        let others = names.iter().filter(|name| *name != "CARGO_PKG_NAME");
        for name in others {
            assert!(is_basic(name.to_str().unwrap()), "{name:?}");
        }
    }
}
