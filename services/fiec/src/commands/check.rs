//! `fiec check PROGRAM`: the four invariants of a capsule program.

use clap::Args;

use super::run_local::{ProgramArgs, Throttle};
use crate::context::Global;
use crate::exit::Outcome;
use crate::local::check::{Invariant, check};
use crate::ui;

/// Test a program's determinism, boundary completeness, isolation and forward independence
///
/// Without --data-dir the program has no inputs.
#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub program: ProgramArgs,
    /// Resume at no more than this many boundaries [default: at every boundary]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub resume_at_most: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// If a process cannot be started, or the undisturbed program fails.
pub fn run(args: &CheckArgs, global: &Global) -> anyhow::Result<Outcome> {
    // Not the working folder: it is usually large, and other programs write there.
    let none = tempfile::tempdir()?;
    let mut subject = match args.program.subject(none.path()) {
        Ok(subject) => subject,
        Err(error) => {
            eprintln!("fiec: {error:#}");
            return Ok(Outcome::BadInput);
        }
    };
    subject.fresh_home = true;
    let steps = ui::Steps::new(global.json);
    let mut told = Throttle::default();
    let report = check(&subject, args.resume_at_most, &mut |text| {
        told.tell(&steps, text);
    })?;
    steps.done(&format!(
        "{} boundaries, {} processes",
        report.boundaries, report.processes
    ));
    if global.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        for invariant in Invariant::ALL {
            for line in report.in_words(invariant) {
                println!("{line}");
            }
        }
        for note in &report.notes {
            println!("note: {note}");
        }
        for covered in &report.covered {
            println!("covered: {covered}");
        }
    }
    Ok(match report.holds() {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}
