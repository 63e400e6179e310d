//! The command line: the lab's commands and the product's.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fiec::cli::{complete, start};
use fiec::context::Global;
use fiec::exit::{HELP, Outcome};

use crate::{bench, chaos, demo, doctor, experiment, load, replay, simulate, trace, up};

/// FIEC's lab: demo, servers for development, benches, experiments and the simulator, beside all
/// commands of `fiec`
#[derive(Debug, Parser)]
#[command(name = "fiec-lab", version, after_help = HELP, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Lab(LabCommand),
    #[command(flatten)]
    Product(Box<fiec::cli::Command>),
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    Demo(demo::DemoArgs),
    Up(up::UpArgs),
    Bench(bench::BenchArgs),
    Experiment(experiment::ExperimentArgs),
    Simulate(simulate::SimulateArgs),
    Replay(replay::ReplayArgs),
    Trace(trace::TraceArgs),
    Chaos(chaos::ChaosArgs),
    Pressure(load::memory::PressureArgs),
    #[command(hide = true)]
    Burn(load::processors::BurnArgs),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let Cli { global, command } = Cli::parse();
    match command {
        Command::Lab(command) => complete(&global, false, run(command, &global)),
        Command::Product(command) => match *command {
            fiec::cli::Command::Doctor => complete(&global, false, doctor::run(&global)),
            command => start(command, &global),
        },
    }
}

async fn run(command: LabCommand, global: &Global) -> anyhow::Result<Outcome> {
    match command {
        LabCommand::Demo(args) => demo::run(args, global.json).await,
        LabCommand::Up(args) => up::run(args, global.json).await,
        LabCommand::Bench(args) => bench::run(args, global).await,
        LabCommand::Experiment(args) => experiment::run(args, global).await,
        LabCommand::Simulate(args) => simulate::run(&args, global),
        LabCommand::Replay(args) => replay::run(args, global).await,
        LabCommand::Trace(args) => trace::run(&args),
        LabCommand::Chaos(args) => chaos::run(args, global.json).await,
        LabCommand::Pressure(args) => load::memory::run(&args).map(|()| Outcome::Done),
        LabCommand::Burn(args) => load::processors::run(&args).map(|()| Outcome::Done),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn fiec_starts_every_command_of_the_lab_and_lists_all_that_are_not_hidden() {
        let commands = |command: clap::Command| -> BTreeSet<(String, bool)> {
            let all = command.get_subcommands();
            all.map(|c| (c.get_name().to_owned(), c.is_hide_set()))
                .collect()
        };
        let listed = fiec::lab::with_commands(clap::Command::new("fiec"));
        let own = LabCommand::augment_subcommands(clap::Command::new("fiec-lab"));
        assert_eq!(commands(listed), commands(own));
    }
}
