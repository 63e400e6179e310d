//! `fiec program`: registers packages of programs, lists programs, and shows one.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use fiec_broker::registry::{self, Registered};
use fiec_schemas::package::{self, MANIFEST_FILE, ProgramName, ProgramRecord, Protocol};
use fiec_schemas::{Timestamp, programs};
use serde_json::json;

use crate::context::{Global, who};
use crate::exit::Outcome;
use crate::package::{BadPackage, Packed, Single, pack_file, pack_folder};
use crate::{transfer, ui};

/// Register your own programs, and list the registered ones
#[derive(Debug, Args)]
pub struct ProgramArgs {
    #[command(subcommand)]
    command: ProgramCommand,
}

#[derive(Debug, Subcommand)]
enum ProgramCommand {
    /// Register a program from a folder with a fiec.json, or a single file; a version is never
    /// replaced
    Push(PushArgs),
    /// List the built-in and the registered programs
    List,
    /// Show the manifest of a program's package
    Show(ShowArgs),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum ProtocolArg {
    Frames,
    JsonLines,
    StateDir,
}

impl From<ProtocolArg> for Protocol {
    fn from(protocol: ProtocolArg) -> Self {
        match protocol {
            ProtocolArg::Frames => Self::Frames,
            ProtocolArg::JsonLines => Self::JsonLines,
            ProtocolArg::StateDir => Self::StateDir,
        }
    }
}

/// Options of `fiec program push`.
#[derive(Debug, Args)]
pub struct PushArgs {
    /// NAME@VERSION of the program
    program: ProgramName,
    /// A folder with a fiec.json, or a single executable file
    path: PathBuf,
    /// For a single file: its protocol
    #[arg(long)]
    protocol: Option<ProtocolArg>,
    /// For a single file: its command, e.g. "python3 -u main.py"; spaces separate the words, and it
    /// runs in the file's folder [default: the file itself]
    #[arg(long, value_name = "COMMAND")]
    entry: Option<String>,
    /// For a single file: an output that it can make, a name or a pattern with `*`; repeatable
    #[arg(long, value_name = "NAME")]
    output: Vec<String>,
}

/// A program.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// NAME@VERSION
    program: ProgramName,
}

/// Runs the command.
///
/// # Errors
/// If the servers cannot be reached.
pub async fn run(args: ProgramArgs, global: &Global) -> anyhow::Result<Outcome> {
    match args.command {
        ProgramCommand::Push(args) => push(args, global).await,
        ProgramCommand::List => list(global).await,
        ProgramCommand::Show(args) => show(&args.program, global).await,
    }
}

fn pack(args: PushArgs) -> Result<Packed, String> {
    let path: &Path = &args.path;
    let flags = args.protocol.is_some() || args.entry.is_some() || !args.output.is_empty();
    let words = |error: BadPackage| error.to_string();
    if path.is_dir() {
        if flags {
            return Err(format!(
                "{}: --protocol, --entry and --output are for a single file; a folder says it in \
                 its {MANIFEST_FILE}",
                path.display()
            ));
        }
        return pack_folder(path).map_err(words);
    }
    if let Err(error) = path.metadata() {
        return Err(format!("{}: {error}", path.display()));
    }
    let Some(protocol) = args.protocol else {
        return Err(format!(
            "{}: a single file needs --protocol state_dir, json_lines or frames",
            path.display()
        ));
    };
    let single = Single {
        protocol: protocol.into(),
        entry: args
            .entry
            .map(|entry| entry.split_whitespace().map(str::to_owned).collect()),
        outputs: args.output,
    };
    pack_file(path, single).map_err(words)
}

/// True for the name of a built-in program, in every version.
fn is_reserved(program: &ProgramName) -> bool {
    programs::BUILT_IN
        .iter()
        .any(|built_in| built_in.split_once('@').map(|(name, _)| name) == Some(program.name()))
}

/// Most files of a package that are listed.
const LISTED: usize = 20;

async fn push(args: PushArgs, global: &Global) -> anyhow::Result<Outcome> {
    let program = args.program.clone();
    if is_reserved(&program) {
        eprintln!(
            "{program}: the name {} belongs to a built-in program; choose another",
            program.name()
        );
        return Ok(Outcome::BadInput);
    }
    let packed = match pack(args) {
        Ok(packed) => packed,
        Err(error) => {
            eprintln!("{error}");
            return Ok(Outcome::BadInput);
        }
    };
    let broker = global.broker("program").await?;
    if let Some(there) = registry::find(&broker, &program).await?
        && there.artifact != packed.digest
    {
        return Ok(taken(&there, &packed));
    }
    let label = program.to_string();
    let (digest, bytes) = (packed.digest, packed.bytes);
    let artifact = packed.artifact.try_clone()?;
    transfer::upload(&broker, artifact, digest, bytes, &label, global.json).await?;
    let record = ProgramRecord {
        program: label,
        manifest: packed.manifest.clone(),
        artifact: digest,
        bytes,
        pushed_at: Timestamp::now(),
        pushed_by: who(),
    };
    // Register last: before this, nobody can submit the program, and an interrupted push has no
    // effect.
    let existing = match registry::register(&broker, &program, &record).await? {
        Registered::New => false,
        Registered::Same(_) => true,
        Registered::Taken(there) => return Ok(taken(&there, &packed)),
    };
    let names: Vec<&str> = packed.files.iter().map(|(name, _)| name.as_str()).collect();
    if global.json {
        println!(
            "{}",
            json!({"program": record.program, "artifact": digest, "bytes": bytes,
                   "files": packed.files.len(), "names": names, "existing": existing})
        );
    } else {
        let word = if existing {
            "is there already, with the same files"
        } else {
            "registered"
        };
        println!(
            "{program} {word}: {} files, an archive of {}, {}",
            packed.files.len(),
            ui::bytes(bytes),
            digest.short()
        );
        // The package's own files stand at its top.
        let mut files: Vec<_> = packed.files.iter().collect();
        files.sort_by_key(|(name, _)| name.matches('/').count());
        for (name, bytes) in files.into_iter().take(LISTED) {
            println!("  {name}  {}", ui::bytes(*bytes));
        }
        if packed.files.len() > LISTED {
            println!("  … {} more", packed.files.len() - LISTED);
        }
    }
    Ok(Outcome::Done)
}

fn taken(there: &ProgramRecord, packed: &Packed) -> Outcome {
    eprintln!(
        "{} is registered with other files (artifact {}, pushed by {} at {}; yours is {}): a \
         version never changes, so push yours under another one",
        there.program,
        there.artifact.short(),
        there.pushed_by,
        there.pushed_at,
        packed.digest.short()
    );
    Outcome::BadInput
}

fn protocol(record: &ProgramRecord) -> String {
    let protocol = serde_json::to_value(record.manifest.protocol).unwrap_or_default();
    let word = protocol.as_str().unwrap_or_default();
    match &record.manifest.image {
        Some(image) => format!("{word} in {image}"),
        None => word.to_owned(),
    }
}

async fn list(global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("program").await?;
    let records = registry::list(&broker).await?;
    if global.json {
        for program in programs::BUILT_IN {
            println!("{}", json!({"program": program, "built_in": true}));
        }
        for record in &records {
            println!("{}", serde_json::to_string(record)?);
        }
        return Ok(Outcome::Done);
    }
    let built_in = programs::BUILT_IN.iter().map(|program| {
        let mut row = vec![(*program).to_owned(), "built in".to_owned()];
        row.resize(5, String::new());
        row
    });
    let pushed = records.iter().map(|record| {
        vec![
            record.program.clone(),
            protocol(record),
            ui::bytes(record.bytes),
            record.pushed_at.to_string(),
            record.pushed_by.clone(),
        ]
    });
    let head = ["program", "protocol", "size", "pushed", "by"];
    println!("{}", ui::table(head, built_in.chain(pushed)));
    Ok(Outcome::Done)
}

async fn show(program: &ProgramName, global: &Global) -> anyhow::Result<Outcome> {
    let name = program.to_string();
    if package::is_built_in(&name) {
        if global.json {
            println!("{}", json!({"program": name, "built_in": true}));
        } else {
            println!("{name} is built in");
        }
        return Ok(Outcome::Done);
    }
    let broker = global.broker("program").await?;
    let Some(record) = registry::find(&broker, program).await? else {
        eprintln!("{}", package::unregistered(&name).reason);
        return Ok(Outcome::Failed);
    };
    if global.json {
        println!("{}", serde_json::to_string(&record)?);
        return Ok(Outcome::Done);
    }
    println!("{:<10} {}", "program", record.program);
    println!("{:<10} {}", "protocol", protocol(&record));
    println!("{:<10} {}", "artifact", record.artifact);
    println!("{:<10} {}", "size", ui::bytes(record.bytes));
    println!(
        "{:<10} {} by {}",
        "pushed", record.pushed_at, record.pushed_by
    );
    println!("{}", serde_json::to_string_pretty(&record.manifest)?);
    Ok(Outcome::Done)
}
