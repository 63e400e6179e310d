//! How the processes of programs are started: what they see of their worker's environment, and what
//! they may do. Every place that starts one uses this, whatever the program's protocol.

mod environment;
mod keeper;
mod threads;
mod values;
mod walls;

use std::process::Command;

use fiec_schemas::variables::CUDA_DEVICES_ENV;
use serde::{Deserialize, Serialize};

pub use environment::{Environment, NotPassed, Passed};
pub use keeper::{KEEPER, Said, children, has_left_others, keep_if_asked};
pub use threads::counts as thread_counts;
pub use values::Values;
pub use walls::{Kind, hide, spawn};

/// Carries the rules to the worker's own child, which starts the programs of some protocols.
pub const RULES_ENV: &str = "FIEC_LAUNCH";

/// Processes and threads that a user's programs may add to those of the machine.
pub const PROCESSES: u32 = 4_096;

/// A node's rules for the programs that it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// What they see.
    pub environment: Environment,
    /// Processes and threads that they may add to those of the machine. It does not bind root.
    pub processes: u32,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            environment: Environment::default(),
            processes: PROCESSES,
        }
    }
}

impl Rules {
    /// The rules that the worker gave to this process; the default ones if it gave none.
    pub fn received() -> Self {
        let text = std::env::var(RULES_ENV).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Prepares the command of the worker's own child: it gets these rules, and what it needs for
    /// itself.
    pub fn prepare_own(&self, command: &mut Command) {
        self.environment.apply(command, environment::is_of_own);
        if let Ok(text) = serde_json::to_string(self) {
            command.env(RULES_ENV, text);
        }
    }

    /// Prepares the command of a program. It sees the device with this UUID, or none, and the
    /// variables that its submission sets.
    pub fn prepare(&self, command: &mut Command, device: Option<&str>, values: &Values) {
        self.environment.apply(command, environment::is_basic);
        command.env(CUDA_DEVICES_ENV, device.unwrap_or_default());
        let is_given = |name: &str| {
            let mut given = command.get_envs();
            given.any(|(given, value)| given == name && value.is_some())
        };
        let counts = threads::counts(values);
        let missing: Vec<_> = counts.filter(|(name, _)| !is_given(name)).collect();
        command.envs(missing);
        command.envs(values.iter());
    }
}
