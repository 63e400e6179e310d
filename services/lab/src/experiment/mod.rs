//! `fiec experiment NAME`: the published experiments on this machine, with real processes and real
//! pressure.
//!
//! Each runs as *baseline*, *baseline with load* and *with rebinding*, interleaved. It writes CSV
//! files, figures and a report whose verdicts follow from the measurements. A static load has an
//! additional control: the load is on, but never on the execution's node.

mod container;
mod devices;
mod emulated;
mod figures;
mod files;
mod hops;
mod reallocation;
mod report;
mod run;
mod stand;
mod swing;
mod trace;
mod watch;
mod workload;

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use fiec::context::Global;
use fiec::exit::Outcome;
use fiec::ui::{self, Steps};
use fiec_schemas::Threshold;
use serde_json::json;

use crate::cluster::Cluster;
use devices::Devices;
use run::{Run, Timing, Variant};
use stand::{Place, Stand, Wants};
use workload::Kind;

/// An experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Static memory pressure: CG, one capsule an iteration, and a container as one unit
    Trigger1,
    /// Static pressure on a device: GEMM, LU, QR
    Trigger2,
    /// Three nodes whose offered device memory swings: GEMM, LU, QR
    Trigger3,
    /// A, B, C and back to A, by pressure on each
    MultiHop,
    /// Over-commit against reconfiguration, on emulated devices: on a virtual clock, and with real
    /// processes
    Reallocation,
}

impl Name {
    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Name::Trigger1 => "trigger1",
            Name::Trigger2 => "trigger2",
            Name::Trigger3 => "trigger3",
            Name::MultiHop => "multi-hop",
            Name::Reallocation => "reallocation",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Name::Trigger1 => "Trigger 1: static memory pressure",
            Name::Trigger2 => "Trigger 2: static device pressure",
            Name::Trigger3 => "Trigger 3: oscillating capability",
            Name::MultiHop => "Multi-hop: A, B, C and back to A",
            Name::Reallocation => "Reallocation: over-commit against reconfiguration",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Name::Trigger1 => {
                "While conjugate gradients compute, one capsule an iteration, and while a program does \
                 whose capsules are containers, a load fills the memory of their node and takes three \
                 quarters of its processors."
            }
            Name::Trigger2 => {
                "While a dense program computes, the memory of its device fills up and a load takes \
                 three quarters of the node's processors."
            }
            Name::Trigger3 => {
                "The memory that each of three devices offers follows a sinusoid of its own."
            }
            Name::MultiHop => {
                "A load follows the execution from node to node, and leaves the first one in time for \
                 it to come back."
            }
            Name::Reallocation => "Jobs need more of their devices' memory as they go on.",
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Repeat a published experiment with real processes and real pressure. Writes CSV files, figures
/// and a report
#[derive(Debug, Args)]
pub struct ExperimentArgs {
    /// The experiment
    #[arg(value_enum)]
    pub name: Name,
    /// Runs of each variant [default: 5; with --quick, and for the real part of reallocation: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub runs: Option<u32>,
    /// Take a few seconds a run. Use it to try the experiment, not for figures to quote
    #[arg(long)]
    pub quick: bool,
    /// Folder for the results [default: target/experiments/NAME]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Run this program only: cg or container for trigger1, gemm, lu or qr for trigger2 and
    /// trigger3. For reallocation: run this part only
    #[arg(long, value_parser = ["cg", "container", "gemm", "lu", "qr", "simulated", "real"])]
    pub only: Option<String>,
    /// For trigger2 and trigger3: compute on real or on emulated devices
    #[arg(long, value_enum, default_value_t)]
    pub devices: devices::Choice,
    /// For trigger3: factor by which the envelopes' time passes faster
    #[arg(long, default_value_t = 120.0)]
    pub speed: f64,
}

/// An experiment with all its runs.
struct Experiment {
    name: Name,
    place: Place,
    threshold: Threshold,
    nodes: Vec<String>,
    /// True if the nodes' memory follows envelopes.
    swings: bool,
    /// Notes on the method, for people.
    notes: Vec<String>,
    runs: Vec<Run>,
}

impl Experiment {
    fn of(name: Name, stand: &Stand) -> Self {
        let count = stand.processors.len();
        let nodes = (1..=count).map(|n| Cluster::node(n).to_string()).collect();
        let lists = stand.processors.iter().enumerate();
        let sets = lists.map(|(n, p)| format!("{}: {p:?}", Cluster::node(n + 1)));
        let mut notes = vec![format!(
            "{count} nodes; processors of each, shared with its load: {}",
            sets.collect::<Vec<_>>().join(", ")
        )];
        if !stand.apart {
            notes.push(
                "There are fewer processors here than nodes, so that nodes share them: a move does \
                 not get away from a load on the processors."
                    .to_owned(),
            );
        }
        let Threshold {
            high,
            low,
            dwell_ms,
        } = stand.threshold;
        notes.push(format!(
            "memory: high {high}, low {low}, dwell {dwell_ms} ms; no other signal decides. In the \
             baseline with load the threshold cannot trip."
        ));
        notes.push(match stand.place {
            Place::Host => "Pressure is real: a process inside the node's own memory limit of \
                            512 MiB fills it to 88 %."
                .to_owned(),
            Place::Device => stand
                .devices
                .as_ref()
                .map(Devices::note)
                .unwrap_or_default(),
        });
        Self {
            name,
            place: stand.place,
            threshold: stand.threshold,
            nodes,
            swings: false,
            notes,
            runs: Vec::new(),
        }
    }

    /// True if a load is on for a while and progress is measured in that time.
    fn is_static(&self) -> bool {
        matches!(self.name, Name::Trigger1 | Name::Trigger2)
    }
}

/// Runs an experiment. Ends with 1 if a promise was broken: equal bits, monotonic progress, a move.
///
/// # Errors
/// If a part could not be started, or an expected event did not come in time.
pub async fn run(args: ExperimentArgs, global: &Global) -> anyhow::Result<Outcome> {
    let steps = Steps::new(global.json);
    let nodes = match args.name {
        Name::Trigger2 => 2,
        Name::Trigger3 => 3,
        Name::Trigger1 | Name::MultiHop | Name::Reallocation => 0,
    };
    let devices = match (nodes > 0).then(|| devices::here(args.devices, nodes)) {
        None if args.devices == devices::Choice::Real => {
            let name = args.name;
            eprintln!("fiec: experiment {name} --devices real: it computes on no real device");
            return Ok(Outcome::BadInput);
        }
        None => None,
        Some(Ok(devices)) => {
            steps.step(&devices.note());
            Some(devices)
        }
        Some(Err(why)) => {
            eprintln!("fiec: experiment {} --devices real: {why}", args.name);
            return Ok(Outcome::NoDevice);
        }
    };
    let experiment = match (args.name, devices) {
        (Name::Trigger3, Some(devices)) => swing::run(&args, devices, &steps).await,
        (Name::MultiHop, _) => hops::run(&args, &steps).await,
        (Name::Reallocation, _) => return reallocation::run(&args, global).await,
        (Name::Trigger1 | Name::Trigger2 | Name::Trigger3, devices) => {
            fixed(&args, devices, &steps).await
        }
    }
    .with_context(|| format!("experiment {}", args.name))?;
    let out = args.out.clone();
    let folder =
        out.unwrap_or_else(|| PathBuf::from("target/experiments").join(args.name.as_str()));
    files::write(&folder, &experiment)?;
    let claims = report::claims(&experiment);
    let broken = claims.iter().any(|c| c.promised && !c.holds);
    if global.json {
        for row in report::summary_json(&experiment) {
            println!("{row}");
        }
        let found = |c: &report::Claim| json!({"agrees": c.holds, "claim": c.claim, "found": c.found, "promised": c.promised});
        println!(
            "{}",
            json!({"experiment": args.name.as_str(), "ok": !broken, "folder": folder,
                   "claims": claims.iter().map(found).collect::<Vec<_>>()})
        );
    } else {
        println!("{}", ui::table(report::HEAD, report::summary(&experiment)));
        let rows = claims.into_iter().map(|c| {
            let mark = if c.holds { "agrees" } else { "differs" };
            [mark.to_owned(), c.claim, c.found]
        });
        println!("{}", ui::table(["", "claim", "found"], rows));
        println!("report: {}", folder.join("report.md").display());
    }
    Ok(if broken {
        Outcome::Failed
    } else {
        Outcome::Done
    })
}

fn wanted(args: &ExperimentArgs, name: &str) -> bool {
    args.only.as_deref().is_none_or(|only| only == name)
}

/// The number of runs of each variant.
fn runs(args: &ExperimentArgs) -> u32 {
    args.runs.unwrap_or(if args.quick { 1 } else { 5 })
}

/// Static pressure: triggers 1 and 2.
async fn fixed(
    args: &ExperimentArgs,
    devices: Option<Devices>,
    steps: &Steps,
) -> anyhow::Result<Experiment> {
    let kinds: &[Kind] = match &devices {
        None => &[Kind::Cg],
        Some(_) => &[Kind::Gemm, Kind::Lu, Kind::Qr],
    };
    let (dwell_ms, lead, window) = match (&devices, args.quick) {
        (None, false) => (1_000, 2.0, 24.0),
        (None, true) => (200, 0.5, 4.0),
        (Some(_), false) => (300, 1.0, 8.0),
        (Some(_), true) => (150, 0.5, 4.0),
    };
    let timing = Timing { lead, window };
    let real = devices.as_ref().is_some_and(|d| d.of(0).is_some());
    // An emulated device is slower than the host on which it is sized.
    let share = match devices.is_some() && !real {
        true => 0.8,
        false => 1.15,
    };
    let seconds = (lead + window) * share;
    let mut workloads = Vec::new();
    for kind in kinds.iter().filter(|k| wanted(args, k.name())) {
        steps.step(&format!(
            "sizing {} and running it undisturbed",
            kind.name()
        ));
        workloads.push(workload::prepare(*kind, devices.as_ref(), seconds).await?);
    }
    let mut without = None;
    if args.name == Name::Trigger1 && wanted(args, "container") {
        steps.step("making an image and sizing a program whose capsules are containers");
        match container::prepare(seconds).await? {
            Ok(unit) => workloads.push(unit),
            Err(why) => without = Some(why),
        }
    }
    ensure!(
        !workloads.is_empty(),
        "nothing to run: {} has no program {}{}",
        args.name,
        args.only.as_deref().unwrap_or_default(),
        without
            .as_deref()
            .map_or(String::new(), |why| format!(" here ({why})"))
    );
    let stand = Stand::start(Wants::new(2, devices, dwell_ms), steps).await?;
    if workloads.iter().any(|w| w.program == container::PROGRAM) {
        container::push(&stand.cluster.environment("program")).await?;
    }
    let mut experiment = Experiment::of(args.name, &stand);
    experiment.notes.push(format!(
        "The load comes {lead} s after the first capsule began: memory, and then three computing threads \
         on each processor of the node. It stays for {window} s, over which progress is measured."
    ));
    if let Some(why) = &without {
        let note = format!("Left out: a container as one unit, since none runs here ({why}).");
        experiment.notes.push(note);
    } else if args.name == Name::Trigger1 {
        experiment.notes.push(
            "The container is that of `examples/container`: each capsule is a container of its own, \
             on the processors and under the memory limit of its node, and what moves is its state."
                .to_owned(),
        );
    }
    if real {
        experiment.notes.push(
            "On the device the load computes as well. Where the device's memory is too small for a \
             program that takes so long, lead and load are as much shorter as its run is."
                .to_owned(),
        );
    }
    let total = runs(args);
    for number in 1..=total {
        for workload in &workloads {
            let timing = match real {
                true => timing.within(workload.seconds / seconds),
                false => timing,
            };
            for variant in Variant::STATIC {
                let (name, what) = (workload.name, variant.name());
                steps.step(&format!("{name}, {what}, run {number} of {total}"));
                let run = run::static_load(&stand, workload, variant, number, timing).await;
                let run = run.with_context(|| format!("{name}, {what}, run {number}"))?;
                experiment.runs.push(run);
            }
        }
    }
    stand.cluster.stop().await;
    steps.done("stopped");
    Ok(experiment)
}
