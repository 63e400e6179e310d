//! `fiec trace`: the policy's inputs and actions in a run, as text that `diff` compares.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use fiec::exit::Outcome;
use fiec_policy::Policy;
use fiec_simulator::Scenario;
use fiec_simulator::trace::{Recorder, TraceError, replay, sources};

use crate::simulate;

/// The committed scenarios, in the root of the sources.
const SCENARIOS: &str = "services/simulator/scenarios";

const HELP: &str = "\
Examples:
  fiec trace services/simulator/scenarios/calm.json > new.txt
  diff old.txt new.txt | head                  # the first step that differs
  fiec trace --replay old.txt | diff old.txt - # each step that differs on the same inputs

A line has the step's number first, so it stays where it is if another step has one action more.
`~` stands for a sentence. The digests are in services/simulator/traces.txt and
services/policy/tests/traces.txt. The traces of the policy's own tests:
  FIEC_TRACES=DIR cargo test -p fiec-policy";

/// Print the inputs and actions of the policy in a run, without sentences, for `diff`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct TraceArgs {
    /// Scenario files, and `seed:N` for drawn scenarios
    #[arg(required_unless_present_any = ["list", "out", "replay"])]
    pub names: Vec<String>,
    /// List the names whose digests are committed
    #[arg(long, conflicts_with_all = ["names", "out", "replay"])]
    pub list: bool,
    /// Write a file for each NAME into this folder; without NAME for each of the list
    #[arg(long, value_name = "DIR", conflicts_with = "replay")]
    pub out: Option<PathBuf>,
    /// Give the inputs of this trace to the policy of today, and print them with its actions
    #[arg(long, value_name = "FILE", conflicts_with = "names")]
    pub replay: Option<PathBuf>,
}

/// Prints or writes traces.
///
/// # Errors
/// If a file cannot be written.
pub fn run(args: &TraceArgs) -> anyhow::Result<Outcome> {
    if let Some(file) = &args.replay {
        return replay_file(file);
    }
    let names = match args.list || args.names.is_empty() {
        true => list(),
        false => Ok(args.names.clone()),
    };
    let runs = match names.and_then(|names| names.into_iter().map(Run::read).collect()) {
        Ok(runs) => runs,
        Err(error) => return Ok(refuse(&error)),
    };
    print(args, runs)
}

fn print(args: &TraceArgs, runs: Vec<Run>) -> anyhow::Result<Outcome> {
    if let Some(folder) = &args.out {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    for run in runs {
        match &args.out {
            _ if args.list => println!("{}", run.name),
            None => unless_closed(run.record(std::io::stdout()))?,
            Some(folder) => {
                let path = folder.join(run.file_name());
                let file = File::create(&path).map_err(TraceError::Io);
                file.and_then(|file| run.record(file))
                    .with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
    }
    Ok(Outcome::Done)
}

fn replay_file(path: &Path) -> anyhow::Result<Outcome> {
    let file = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(error) => {
            let error = anyhow::Error::new(error);
            return Ok(refuse(
                &error.context(format!("cannot read {}", path.display())),
            ));
        }
    };
    let mut make = |config: &fiec_policy::Config, id| Policy::new(config.clone(), id);
    match replay(file, &Recorder::to(std::io::stdout()), &mut make) {
        Err(error @ TraceError::Unreadable { .. }) => {
            let error = anyhow::Error::new(error);
            Ok(refuse(&error.context(path.display().to_string())))
        }
        replayed => unless_closed(replayed.map(drop)).map(|()| Outcome::Done),
    }
}

fn refuse(error: &anyhow::Error) -> Outcome {
    eprintln!("fiec: {error:#}");
    Outcome::BadInput
}

/// A reader that closes early, like `head`, is no failure.
fn unless_closed(written: Result<(), TraceError>) -> anyhow::Result<()> {
    match written {
        Err(TraceError::Io(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// The names whose digests are committed.
fn list() -> anyhow::Result<Vec<String>> {
    let files = sources::scenarios(Path::new(SCENARIOS)).with_context(|| {
        format!("cannot read {SCENARIOS}: run this in the root of FIEC's sources, or give a NAME")
    })?;
    let files = files.iter().map(|file| file.display().to_string());
    let seeds = sources::SEEDS.map(sources::name_of_seed);
    Ok(files.chain(seeds).collect())
}

/// A traced run.
struct Run {
    name: String,
    scenario: Scenario,
}

impl Run {
    fn read(name: String) -> anyhow::Result<Self> {
        let scenario = match sources::seed_of(&name) {
            Some(seed) => sources::drawn(seed),
            None => simulate::read(Path::new(&name))?,
        };
        Ok(Self { name, scenario })
    }

    fn file_name(&self) -> String {
        let stem = match sources::seed_of(&self.name) {
            Some(seed) => format!("seed-{seed}"),
            None => {
                let stem = Path::new(&self.name).file_stem().unwrap_or_default();
                stem.display().to_string()
            }
        };
        format!("{stem}.txt")
    }

    fn record(&self, to: impl Write + 'static) -> Result<(), TraceError> {
        sources::record(&self.scenario, &Recorder::to(to)).map(drop)
    }
}
