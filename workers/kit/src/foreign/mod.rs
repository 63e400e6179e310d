//! Programs of packages: separate processes that keep their state in a folder
//! ([`Protocol::StateDir`]) or speak JSON lines ([`Protocol::JsonLines`]), natively or in a
//! container. To the run time each is an [`Instance`] like a built-in.
//!
//! Such a program cannot take this process down. Its messages are bounded and checked, its output is
//! passed through, and its descendants are ended with it. A program that neither ends nor reaches a
//! boundary is ended at its own limit.

pub mod container;
mod guard;
mod image;
mod json_lines;
mod lines;
mod outputs;
pub mod pack;
mod patience;
mod process;
mod state_dir;
mod trial;
mod work;

use fiec_schemas::package::{Grant, Protocol};
use serde_json::Value;

pub use crate::frames::Package;
use crate::program::{Inputs, ProgramError};
use crate::programs::Instance;
use crate::room::Room;
pub use guard::{end_with_socket, own_orphans, serves_no_more};

/// Largest result in bytes, as JSON. A larger one must be an output.
pub const RESULT_LIMIT: u64 = fiec_schemas::limits::RESULT_LIMIT as u64;

/// Names the folder that is σ.
pub const STATE_DIR_ENV: &str = "FIEC_STATE_DIR";
/// Names the Unix socket.
pub const SOCKET_PATH_ENV: &str = "FIEC_SOCKET";
/// Names the JSON file of parameters.
pub const PARAMS_ENV: &str = "FIEC_PARAMS";
/// Names the folder of inputs.
pub const INPUTS_ENV: &str = "FIEC_INPUTS";
/// Names the folder of the objects that parameters name by `{"object": "<digest>"}`, each under its
/// digest.
pub const OBJECTS_ENV: &str = "FIEC_OBJECTS";
/// Names the folder in which finished files are outputs.
pub const OUTPUTS_ENV: &str = "FIEC_OUTPUTS";
/// Names the folder in which finished files are messages to the outside.
pub const OUTBOX_ENV: &str = "FIEC_OUTBOX";
/// Names the file that a result is written to.
pub const RESULT_ENV: &str = "FIEC_RESULT";
/// Names the file of a capsule's numbers in the environment.
pub const NUMBERS_ENV: &str = "FIEC_NUMBERS";
/// The index of the boundary to continue from.
pub const BOUNDARY_ENV: &str = "FIEC_BOUNDARY";
/// The grant as JSON.
pub const GRANT_ENV: &str = "FIEC_GRANT";
/// The execution.
pub const EXECUTION_ENV: &str = "FIEC_EXECUTION";

/// Starts a program of a package. Its process starts with the first capsule.
///
/// # Errors
/// When the package is incomplete, an object of the parameters cannot be fetched, or a needed
/// container engine is missing.
pub fn start(
    package: &Package,
    params: &Value,
    inputs: &mut Inputs,
) -> Result<Box<dyn Instance>, ProgramError> {
    let Package {
        folder,
        manifest,
        program,
        values: _,
    } = package;
    manifest.check().map_err(|error| {
        ProgramError::Permanent(format!("the manifest of {program} is not valid: {error}"))
    })?;
    if !folder.is_dir() {
        return Err(ProgramError::Transient(format!(
            "the folder of {program}, {}, is not there",
            folder.display()
        )));
    }
    match manifest.protocol {
        Protocol::StateDir => Ok(Box::new(state_dir::StateDir::start(
            package, params, inputs,
        )?)),
        Protocol::JsonLines => Ok(Box::new(json_lines::JsonLines::start(
            package, params, inputs,
        )?)),
        Protocol::Frames => Err(ProgramError::Permanent(format!(
            "{program} speaks frames itself: its agent starts its entry in place of this process"
        ))),
    }
}

/// Checks the size of σ.
fn check_state(package: &Package, grant: &Grant, bytes: u64) -> Result<(), ProgramError> {
    let room = Room::of(Some(package), grant);
    room.check(bytes, 0)
        .map_err(|error| ProgramError::Permanent(format!("{}: {error}", package.program)))
}
