//! `fiec run --local PROGRAM`: runs a program without any server, cut at its boundaries, and
//! compares it with its undisturbed run.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use fiec_schemas::package::{DeviceGrant, Protocol};
use serde_json::{Value, json};

use super::serve::parse_bytes;
use crate::context::Global;
use crate::exit::Outcome;
use crate::local::{self, Subject};
use crate::ui;

/// Protocol of a single file.
#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum ProtocolArg {
    /// An open socket; the protocol of the kits
    Frames,
    /// JSON lines over a Unix socket
    JsonLines,
    /// One process for each capsule, with its state in a folder
    StateDir,
}

impl From<ProtocolArg> for Protocol {
    fn from(arg: ProtocolArg) -> Self {
        match arg {
            ProtocolArg::Frames => Self::Frames,
            ProtocolArg::JsonLines => Self::JsonLines,
            ProtocolArg::StateDir => Self::StateDir,
        }
    }
}

/// A program and its inputs.
#[derive(Debug, Args)]
pub struct ProgramArgs {
    /// A built-in program, or a package: its folder, its fiec.json, or a single file
    pub program: String,
    /// Its parameters: JSON, or @FILE
    #[arg(long, short, value_name = "JSON", default_value = "{}")]
    pub params: String,
    /// Protocol of a single file
    #[arg(long)]
    pub protocol: Option<ProtocolArg>,
    /// Folder of inputs, from which relative file names start
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// A file that parameters name by its digest; repeatable
    #[arg(long, value_name = "FILE")]
    pub object: Vec<PathBuf>,
}

fn params(text: &str) -> anyhow::Result<Value> {
    let read = match text.strip_prefix('@') {
        None => text.to_owned(),
        Some("-") => {
            let mut all = String::new();
            std::io::stdin()
                .read_to_string(&mut all)
                .context("cannot read standard input")?;
            all
        }
        Some(path) => {
            std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?
        }
    };
    fiec_schemas::values::check(read.as_bytes(), "params")?;
    serde_json::from_str(&read).context("--params is not JSON")
}

impl ProgramArgs {
    /// Opens the program. Without `--data-dir`, inputs are in `folder`.
    ///
    /// # Errors
    /// If the program does not exist, or an argument breaks a rule.
    pub fn subject(&self, folder: &Path) -> anyhow::Result<Subject> {
        let params = params(&self.params)?;
        let protocol = self.protocol.map(Into::into);
        let folder = self.data_dir.as_deref().unwrap_or(folder);
        let subject = Subject::open(&self.program, protocol, params, folder)?;
        for file in &self.object {
            subject.objects.file(file)?;
        }
        Ok(subject)
    }
}

/// Run a program here without any server
///
/// With --yield-every the program is also cut at boundaries, resumed in fresh processes, and
/// compared with its undisturbed run.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Run on this machine, without any server
    #[arg(long, required = true)]
    pub local: bool,
    #[command(flatten)]
    pub program: ProgramArgs,
    /// Stop at every N-th boundary and continue in a fresh process
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub yield_every: Option<u64>,
    /// Device to compute on, if the program can; `fiec device` lists the devices
    #[arg(long, value_name = "UUID")]
    pub device: Option<String>,
    /// Most device memory, e.g. 2GiB [default: all free memory]
    #[arg(long, value_name = "SIZE", requires = "device", value_parser = parse_bytes)]
    pub device_memory: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// If a process cannot be started, or the program fails.
pub fn run(args: &RunArgs, global: &Global) -> anyhow::Result<Outcome> {
    let mut subject = match args.program.subject(Path::new(".")) {
        Ok(subject) => subject,
        Err(error) => {
            eprintln!("fiec: {error:#}");
            return Ok(Outcome::BadInput);
        }
    };
    subject.echo = true;
    subject.grant.device = args.device.clone().map(|uuid| DeviceGrant {
        uuid,
        memory_bytes: args.device_memory,
    });
    let steps = ui::Steps::new(global.json);
    let mut told = Throttle::default();
    let whole = local::run(&subject, args.yield_every, false, &mut |text| {
        told.tell(&steps, &format!("undisturbed: {text}"));
    })?;
    steps.done(&format!(
        "undisturbed: {} capsules in {:.2} s",
        whole.capsules, whole.seconds
    ));
    let Some(every) = args.yield_every else {
        print(
            global,
            &json!({"program": subject.program, "undisturbed": whole}),
            || {
                println!("{}", whole.result);
            },
        );
        return Ok(Outcome::Done);
    };
    subject.echo = false;
    let cut = local::run(&subject, Some(every), true, &mut |text| {
        told.tell(&steps, &format!("cut: {text}"));
    })?;
    steps.done(&format!(
        "yielded every {every} boundaries: {} processes in {:.2} s",
        cut.processes, cut.seconds
    ));
    let differences = whole.differences(&cut);
    let compared = whole
        .boundaries
        .keys()
        .filter(|index| cut.boundaries.contains_key(index))
        .count();
    let all = json!({
        "program": subject.program, "equal": differences.is_empty(), "differences": differences,
        "boundaries_compared": compared, "undisturbed": whole, "cut": cut,
    });
    print(global, &all, || {
        println!("{}", whole.result);
        if differences.is_empty() {
            println!(
                "equal: σ at {compared} boundaries, {} outputs and the result have the same bits \
                 in 1 and in {} processes",
                whole.outputs.len(),
                cut.processes
            );
        } else {
            println!("NOT equal, undisturbed and cut:");
            for difference in &differences {
                println!("  {difference}");
            }
        }
    });
    Ok(match differences.is_empty() {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

fn print(global: &Global, json: &Value, words: impl FnOnce()) {
    match global.json {
        true => println!("{json}"),
        false => words(),
    }
}

/// Limits progress messages to a few a second.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Option<std::time::Instant>,
}

impl Throttle {
    /// Shows a message, unless another one was shown just before.
    pub fn tell(&mut self, steps: &ui::Steps, text: &str) {
        use std::io::IsTerminal as _;
        // A pipe gets a line for each message, so fewer.
        let pause = match std::io::stderr().is_terminal() {
            true => std::time::Duration::from_millis(100),
            false => std::time::Duration::from_secs(5),
        };
        let now = std::time::Instant::now();
        let began = *self.last.get_or_insert(now);
        if now - began >= pause {
            self.last = Some(now);
            steps.step(text);
        }
    }
}
