//! `completions` and `man`: the files that a package installs beside the binary. Both come from the
//! definition of the command line, so that they cannot differ from `--help`.

use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Command, ValueEnum};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::exit::Outcome;

/// The command that users type.
const NAME: &str = "fiec";

/// The shells that have a script.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

impl From<CompletionShell> for Shell {
    fn from(shell: CompletionShell) -> Self {
        match shell {
            CompletionShell::Bash => Shell::Bash,
            CompletionShell::Zsh => Shell::Zsh,
            CompletionShell::Fish => Shell::Fish,
        }
    }
}

/// Print a script that completes the words of `fiec` in a shell
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: CompletionShell,
}

/// Write the manual pages, one for each command
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder of the pages, e.g. /usr/local/share/man/man1; it is created if it is missing
    pub folder: PathBuf,
}

/// Prints the completion script of a shell.
///
/// # Errors
/// If stdout cannot be written.
pub fn completions(args: &CompletionsArgs, command: &Command) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    let mut command = without_hidden(command);
    clap_complete::generate(Shell::from(args.shell), &mut command, NAME, &mut script);
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(&script).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("stdout"),
        _ => Ok(Outcome::Done),
    }
}

/// Writes a page for each command that is not hidden: `fiec.1`, `fiec-submit.1`,
/// `fiec-node-envelope.1`.
///
/// # Errors
/// If the folder or a page cannot be written.
pub fn man(args: &ManArgs, command: Command) -> anyhow::Result<Outcome> {
    let folder = &args.folder;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    std::fs::create_dir_all(folder)
        .and_then(|()| write_pages(&command, folder))
        .with_context(|| format!("cannot write the manual pages to {}", folder.display()))?;
    println!("the manual pages are in {}", folder.display());
    Ok(Outcome::Done)
}

fn write_pages(command: &Command, folder: &Path) -> std::io::Result<()> {
    for below in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        write_pages(below, folder)?;
    }
    Man::new(command.clone())
        .source(concat!("fiec ", env!("CARGO_PKG_VERSION")))
        .manual("FIEC")
        .generate_to(folder)
        .map(|_| ())
}

/// The command without its hidden sub-commands: `clap_complete` would offer them.
fn without_hidden(command: &Command) -> Command {
    let arguments: Vec<_> = command.get_arguments().cloned().collect();
    let visible = command.get_subcommands().filter(|c| !c.is_hide_set());
    let about = command.get_about().cloned().unwrap_or_default();
    Command::new(NAME)
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .args(arguments)
        .subcommands(visible.cloned())
}
