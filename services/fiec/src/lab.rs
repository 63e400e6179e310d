//! The commands of `fiec-lab`, which `fiec` starts as cargo starts its sub-commands.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Arg, Command, value_parser};
use rustix::fs::{Access, access};

/// Name of the program.
const PROGRAM: &str = "fiec-lab";

/// The load of the experiments, which people do not start.
const HIDDEN: &str = "burn";

/// The commands, each with its line in `fiec --help`.
const COMMANDS: [(&str, &str); 10] = [
    (
        "demo",
        "Run the whole path on this machine under real memory pressure",
    ),
    (
        "up",
        "Start a private cluster on this machine and keep it until Ctrl-C",
    ),
    ("bench", "Measure the product, each figure with its floor"),
    (
        "experiment",
        "Repeat the published experiments on this machine",
    ),
    (
        "simulate",
        "Play a scenario against the policy on a virtual clock",
    ),
    ("replay", "Play recorded history under another policy"),
    ("trace", "Print the policy's inputs and actions, for `diff`"),
    (
        "chaos",
        "Kill, stop and restart every process under a mixed load, and check that nothing is lost",
    ),
    ("pressure", "Fill a node's memory"),
    ("burn", "Take processors or a device"),
];

/// True if the lab has this command.
pub fn has(name: &str) -> bool {
    COMMANDS.iter().any(|(known, _)| *known == name)
}

/// Lists the lab's commands in the help. The lab itself reads their arguments.
pub fn with_commands(command: Command) -> Command {
    COMMANDS.iter().fold(command, |command, (name, line)| {
        let arguments = Arg::new("arguments")
            .num_args(0..)
            .trailing_var_arg(true)
            .allow_hyphen_values(true)
            .value_parser(value_parser!(OsString));
        command.subcommand(
            Command::new(*name)
                .about(format!("[{PROGRAM}] {line}"))
                .hide(*name == HIDDEN)
                .disable_help_flag(true)
                .after_help(format!("`fiec {name} --help` lists its options."))
                .arg(arguments),
        )
    })
}

/// The program's file: beside this executable, or on `PATH`.
pub fn find() -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| own.parent().map(|folder| folder.join(PROGRAM)));
    beside
        .filter(|file| is_executable(file))
        .or_else(|| on_path(PROGRAM))
}

/// A program in one of the absolute folders on `PATH`.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
    let mut files = folders.map(|folder| folder.join(program));
    files.find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.is_file() && access(file, Access::EXEC_OK).is_ok()
}

/// Replaces this process by the lab, with the same arguments. Returns only if that fails.
pub fn start(name: &str) -> anyhow::Error {
    let Some(lab) = find() else {
        return anyhow!(
            "`fiec {name}` is a command of {PROGRAM} (demo, development servers, benches, \
             experiments, simulator), which is neither beside this program nor on PATH: run \
             `cargo build --release --package {PROGRAM}` in FIEC's sources and copy \
             target/release/{PROGRAM} beside this program"
        );
    };
    let error = std::process::Command::new(&lab)
        .args(std::env::args_os().skip(1))
        .exec();
    anyhow::Error::new(error).context(format!("cannot start {}", lab.display()))
}
