//! `fiec output`: the outputs that an execution has made so far, by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use fiec_broker::Broker;
use fiec_broker::feed;
use fiec_schemas::{Event, ExecutionId, Output, Tenant};
use serde_json::json;
use sqlx::PgPool;
use tokio::sync::OnceCell;

use super::group;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::{sql, transfer, ui};

/// List the outputs of an execution, or fetch one
///
/// Of an array (by its id), and of all ids that begin alike (`seed-*`), it lists or fetches those of
/// each execution.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Execution id, or the id that the client gave
    pub id: String,
    /// The output to fetch [default: list all]
    pub name: Option<String>,
    /// File to write; `-` is standard output [default: a file of its name here]. Of several
    /// executions: a folder, with a folder for each
    #[arg(long, short, requires = "name")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// Fetches all outputs into a folder.
///
/// # Errors
/// If the servers cannot be reached, or a file cannot be written.
pub async fn fetch_all(
    tenant: &Tenant,
    id: &str,
    folder: &Path,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let broker = global.broker("output").await?;
    let Some(known) = known(&broker, tenant, id, global).await? else {
        return Ok(Outcome::Failed);
    };
    let mut outcome = Outcome::Done;
    for (name, Listed { output, .. }) in &known.outputs {
        let Some(file) = below(folder, name) else {
            eprintln!("{name:?} is no file name here; `fiec output {id} NAME -o FILE` fetches it");
            outcome = Outcome::Failed;
            continue;
        };
        make_parent(&file)?;
        transfer::download(&broker, output.digest, &file, name, global.json).await?;
        eprintln!("{}", file.display());
    }
    Ok(outcome)
}

/// Lists the outputs of one of several executions.
///
/// # Errors
/// If the servers cannot be reached.
pub async fn list_of(
    tenant: &Tenant,
    (id, name): (&str, &str),
    global: &Global,
) -> anyhow::Result<Outcome> {
    let broker = global.broker("output").await?;
    let Some(known) = known(&broker, tenant, id, global).await? else {
        return Ok(Outcome::Failed);
    };
    list(&known, Some(name), global.json)?;
    Ok(Outcome::Done)
}

/// Fetches one output into a folder.
///
/// # Errors
/// If the servers cannot be reached, or the file cannot be written.
pub async fn fetch_one(
    tenant: &Tenant,
    id: &str,
    name: &str,
    folder: &Path,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let broker = global.broker("output").await?;
    let Some(known) = known(&broker, tenant, id, global).await? else {
        return Ok(Outcome::Failed);
    };
    let Some(file) = below(folder, name) else {
        eprintln!("{name:?} is no file name here");
        return Ok(Outcome::BadInput);
    };
    if known.outputs.contains_key(name) {
        make_parent(&file)?;
    }
    get(&broker, &known, name, Some(&file), global.json).await
}

/// Makes the folder of a file.
fn make_parent(file: &Path) -> anyhow::Result<()> {
    let Some(parent) = file.parent() else {
        return Ok(());
    };
    std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))
}

/// The path of an output in a folder. `None` if the name would lead out of the folder.
fn below(folder: &Path, name: &str) -> Option<PathBuf> {
    let normal = |part| matches!(part, std::path::Component::Normal(_));
    let inside = !name.is_empty() && Path::new(name).components().all(normal);
    inside.then(|| folder.join(name))
}

/// An output with the commit that made it visible.
#[derive(Clone)]
struct Listed {
    output: Output,
    boundary: u64,
}

/// The known outputs of an execution.
#[derive(Default)]
struct Known {
    /// Outputs by name. The last output of a name counts.
    outputs: BTreeMap<String, Listed>,
    /// All listed outputs.
    all: Vec<Listed>,
    /// Ordinals of the ledger's messages that were read.
    ordinals: BTreeSet<u64>,
    /// True if the last message says that outputs are visible only after verification.
    guarded: bool,
    /// Parts that it has split off. Their outputs belong to the whole.
    parts: BTreeSet<ExecutionId>,
}

impl Known {
    fn add(&mut self, boundary: u64, outputs: Vec<Output>) {
        for output in outputs {
            self.list(Listed { output, boundary });
        }
    }

    fn list(&mut self, listed: Listed) {
        let name = &listed.output.name;
        let before = self.outputs.get(name);
        if before.is_none_or(|b| b.boundary <= listed.boundary) {
            self.outputs.insert(name.clone(), listed.clone());
        }
        self.all.push(listed);
    }

    /// Drops the outputs made after this boundary. The outputs that they had replaced count again.
    fn withdraw(&mut self, beyond: u64) {
        self.outputs.clear();
        for listed in std::mem::take(&mut self.all) {
            if listed.boundary <= beyond {
                self.list(listed);
            }
        }
    }

    /// Adds the outputs of a part.
    fn adopt(&mut self, part: Known) {
        for (name, listed) in part.outputs {
            self.outputs.entry(name).or_insert(listed);
        }
    }

    /// The first gap in the ledger's messages, as ordinals.
    fn missing(&self) -> Option<(u64, u64)> {
        let last = *self.ordinals.last()?;
        let first = (1..=last).find(|o| !self.ordinals.contains(o))?;
        let until = (first..=last).find(|o| self.ordinals.contains(o))?;
        Some((first, until - 1))
    }
}

/// Runs the command.
///
/// # Errors
/// If the servers cannot be reached, or the file cannot be written.
pub async fn run(args: OutputArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("output").await?;
    let (tenant, id) = (&args.tenant.tenant, &args.id);
    if let Some(group) = group::named(&broker, tenant, id).await? {
        let (name, folder) = (args.name.as_deref(), args.output.as_deref());
        return group::outputs((tenant, &group), name, folder, global).await;
    }
    let Some(known) = known(&broker, tenant, id, global).await? else {
        return Ok(Outcome::Failed);
    };
    match &args.name {
        None => {
            list(&known, None, global.json)?;
            Ok(Outcome::Done)
        }
        Some(name) => get(&broker, &known, name, args.output.as_deref(), global.json).await,
    }
}

/// PostgreSQL, if its address is known. The connection is made when it is first needed.
struct History<'a> {
    global: &'a Global,
    pool: OnceCell<Option<PgPool>>,
}

impl History<'_> {
    async fn pool(&self) -> Option<&PgPool> {
        let connect = async || {
            self.global.database_url().ok()?;
            let pool = self.global.database().await;
            pool.inspect_err(|error| eprintln!("the history cannot be read: {error:#}"))
                .ok()
        };
        self.pool.get_or_init(connect).await.as_ref()
    }
}

/// The outputs of one execution without its parts.
async fn of_one(
    broker: &Broker,
    history: &History<'_>,
    tenant: &Tenant,
    execution: ExecutionId,
) -> anyhow::Result<Known> {
    let mut known = Known::default();
    // The stream keeps the last messages of a ledger. PostgreSQL has all of them, a moment later.
    from_ledger(broker, tenant, execution, &mut known).await?;
    let whole = known.missing().is_none() && !known.ordinals.is_empty();
    if !whole && let Some(pool) = history.pool().await {
        from_history(pool, tenant, execution, &mut known).await?;
    }
    Ok(known)
}

fn tell_missing(known: &Known, execution: ExecutionId) {
    if let Some((first, last)) = known.missing() {
        eprintln!(
            "the list may be incomplete: messages {first} to {last} of the ledger of {execution} \
             are no longer in the stream, and PostgreSQL, which has them, was not asked or does \
             not know them yet (--database, FIEC_DATABASE_URL)"
        );
    }
}

async fn from_ledger(
    broker: &Broker,
    tenant: &Tenant,
    execution: ExecutionId,
    known: &mut Known,
) -> anyhow::Result<()> {
    for item in feed::of_execution(broker, tenant, execution).await? {
        let message = item.message()?;
        known.ordinals.insert(message.state.ordinal);
        known.guarded = message.state.guarded;
        let parts = message.state.parts().iter().map(|part| part.id);
        known.parts.extend(parts);
        for event in message.events {
            match event {
                Event::Boundary(boundary) => known.add(boundary.index, boundary.outputs),
                Event::SteppedBack { to, .. } => known.withdraw(to.map_or(0, |to| to.index)),
                Event::Completed {
                    outputs, capsules, ..
                } => known.add(capsules, outputs),
                _ => {}
            }
        }
    }
    Ok(())
}

async fn from_history(
    pool: &PgPool,
    tenant: &Tenant,
    execution: ExecutionId,
    known: &mut Known,
) -> anyhow::Result<()> {
    let query =
        format!("SELECT ordinal FROM executions WHERE id = '{execution}' AND tenant = '{tenant}'");
    let rows = sql::query(pool, query).await?;
    let Some(last) = rows.get(0, "ordinal").and_then(|text| text.parse().ok()) else {
        return Ok(());
    };
    known.ordinals.extend(1..=last);
    let query = format!("SELECT part FROM spread_splits WHERE holder = '{execution}'");
    let rows = sql::query(pool, query).await?;
    let parts =
        (0..rows.rows.len()).filter_map(|row| rows.get(row, "part")?.parse::<ExecutionId>().ok());
    known.parts.extend(parts);
    let rows = sql::query(
        pool,
        format!(
            "SELECT index, outputs::text FROM boundaries \
             WHERE execution = '{execution}' AND outputs IS NOT NULL AND withdrawn_at IS NULL \
             UNION ALL SELECT capsules, outputs::text FROM executions \
             WHERE id = '{execution}' AND outputs IS NOT NULL ORDER BY 1"
        ),
    )
    .await?;
    for row in 0..rows.rows.len() {
        let index = rows.get(row, "index").and_then(|text| text.parse().ok());
        let outputs = rows.get(row, "outputs").unwrap_or("[]");
        let outputs: Vec<Output> = serde_json::from_str(outputs)
            .with_context(|| format!("outputs of {execution} in PostgreSQL"))?;
        known.add(index.unwrap_or(0), outputs);
    }
    Ok(())
}

/// The outputs of an execution and its parts. If none is visible, says so on stderr and returns
/// `None`.
async fn known(
    broker: &Broker,
    tenant: &Tenant,
    id: &str,
    global: &Global,
) -> anyhow::Result<Option<Known>> {
    let execution = super::history::resolve(tenant, id)?;
    let history = History {
        global,
        pool: OnceCell::new(),
    };
    let mut known = of_one(broker, &history, tenant, execution).await?;
    if known.ordinals.is_empty() {
        eprintln!("tenant {tenant} has no execution {}", id);
        return Ok(None);
    }
    tell_missing(&known, execution);
    let mut seen = BTreeSet::from([execution]);
    let mut parts = std::mem::take(&mut known.parts);
    while let Some(part) = parts.pop_first() {
        if seen.insert(part) {
            let mut made = of_one(broker, &history, tenant, part).await?;
            tell_missing(&made, part);
            parts.append(&mut made.parts);
            known.adopt(made);
        }
    }
    if known.guarded {
        eprintln!(
            "outputs of {id} are visible after other nodes have verified them (\"verify\": \"all\"); \
             `fiec status {id}` shows the progress"
        );
        return Ok(None);
    }
    Ok(Some(known))
}

/// `of`: the execution, where several are listed.
fn list(known: &Known, of: Option<&str>, json: bool) -> anyhow::Result<()> {
    if json {
        for Listed { output, boundary } in known.outputs.values() {
            let mut line = json!({"name": output.name, "bytes": output.bytes,
                                  "digest": output.digest, "boundary": boundary});
            if let (Some(of), Some(fields)) = (of, line.as_object_mut()) {
                fields.insert("id".to_owned(), json!(of));
            }
            println!("{line}");
        }
        return Ok(());
    }
    if let Some(of) = of {
        println!("{of}");
    }
    if known.outputs.is_empty() {
        eprintln!("the execution has no outputs yet");
        return Ok(());
    }
    let rows = known.outputs.values().map(|Listed { output, boundary }| {
        vec![
            output.name.clone(),
            ui::bytes(output.bytes),
            output.digest.to_string(),
            boundary.to_string(),
        ]
    });
    println!(
        "{}",
        ui::table(["name", "size", "digest", "boundary"], rows)
    );
    Ok(())
}

async fn get(
    broker: &Broker,
    known: &Known,
    name: &str,
    into: Option<&Path>,
    json: bool,
) -> anyhow::Result<Outcome> {
    let Some(Listed { output, boundary }) = known.outputs.get(name) else {
        let names: Vec<&str> = known.outputs.keys().map(String::as_str).take(20).collect();
        let there = if names.is_empty() {
            "none so far".to_owned()
        } else {
            names.join(", ")
        };
        eprintln!("the execution has no output {name:?}; its outputs: {there}");
        return Ok(Outcome::Failed);
    };
    if into.is_some_and(|into| into.as_os_str() == "-") {
        transfer::print(broker, output.digest).await?;
        return Ok(Outcome::Done);
    }
    // A program's name for an output is no path on this machine, so only its last part counts.
    let default = Path::new(name).file_name().map(PathBuf::from);
    let Some(into) = into.map(Path::to_owned).or(default) else {
        eprintln!("{name:?} is no file name here; say where to write it with -o FILE");
        return Ok(Outcome::BadInput);
    };
    let bytes = transfer::download(broker, output.digest, &into, name, json).await?;
    if json {
        println!(
            "{}",
            json!({"name": name, "bytes": bytes, "digest": output.digest,
                   "boundary": boundary, "file": into})
        );
    } else {
        println!("wrote {} ({})", into.display(), ui::bytes(bytes));
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::Digest;

    fn output(name: &str, text: &str) -> Output {
        Output {
            name: name.to_owned(),
            digest: Digest::of(text.as_bytes()),
            bytes: text.len() as u64,
        }
    }

    #[test]
    fn the_last_of_several_outputs_of_one_name_counts() {
        let mut known = Known::default();
        known.add(3, vec![output("x", "new")]);
        known.add(1, vec![output("x", "old"), output("y", "other")]);
        let found = &known.outputs["x"];
        assert_eq!(
            (found.boundary, found.output.digest),
            (3, Digest::of(b"new"))
        );
        assert_eq!(known.outputs.len(), 2);
    }

    #[test]
    fn outputs_beyond_a_step_back_are_withdrawn_and_can_be_made_again() {
        let mut known = Known::default();
        known.add(2, vec![output("a", "kept")]);
        known.add(5, vec![output("a", "wrong"), output("b", "wrong")]);
        known.withdraw(2);
        assert!(!known.outputs.contains_key("b"));
        assert_eq!(known.outputs["a"].output.digest, Digest::of(b"kept"));
        known.add(4, vec![output("b", "right")]);
        assert_eq!(known.outputs["b"].output.digest, Digest::of(b"right"));
    }

    #[test]
    fn an_output_is_written_into_its_folder_and_nowhere_else() {
        let folder = Path::new("/tmp/results");
        let inside = below(folder, "plots/a.png");
        assert_eq!(inside, Some(folder.join("plots/a.png")));
        for name in ["", "../x", "/etc/passwd", "a/../../x", "."] {
            assert_eq!(below(folder, name), None, "{name}");
        }
    }

    #[test]
    fn what_is_missing_of_a_ledger_is_told() {
        let mut known = Known::default();
        known.ordinals.extend([7, 8, 9]);
        assert_eq!(known.missing(), Some((1, 6)));
        known.ordinals.extend(1..=6);
        assert_eq!(known.missing(), None);
    }
}
