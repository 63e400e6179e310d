//! Commands about several executions that are named at once: a batch, an array, or ids that begin
//! alike.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use fiec_broker::last_messages::{LastMessages, Next};
use fiec_broker::{Broker, Ledger, results};
use fiec_schemas::dependency::{Dependency, Group, Target};
use fiec_schemas::messages::{BatchReply, BatchVerb};
use fiec_schemas::{
    ClientId, Event, ExecutionId, Glance, LedgerMessage, PhaseKind, Sequence, Tenant,
};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::{batch, output, wait};
use crate::client;
use crate::context::Global;
use crate::exit::Outcome;

/// Time limit for reading the ledgers of a tenant.
const READ: Duration = Duration::from_secs(60);
/// Longest pause between two looks.
const PAUSE: Duration = Duration::from_secs(2);

/// The group that an id names on its own: one with `*` at its end.
pub fn of_id(id: &str) -> Option<Dependency> {
    let group = Dependency {
        id: Some(id.to_owned()),
        ..Dependency::default()
    };
    id.ends_with('*').then_some(group)
}

/// The group of a batch.
pub fn of_batch(name: &str) -> Dependency {
    Dependency {
        batch: Some(name.to_owned()),
        ..Dependency::default()
    }
}

/// The elements of the array with this id, if it has any.
///
/// # Errors
/// If no policy service answers.
pub async fn of_array(
    broker: &Broker,
    tenant: &Tenant,
    id: &str,
) -> anyhow::Result<Option<Dependency>> {
    if ClientId::new(id).is_err() {
        return Ok(None);
    }
    let array = Dependency {
        array: Some(id.to_owned()),
        ..Dependency::default()
    };
    let reply = status(broker, tenant, &array).await?;
    Ok(reply.error.is_none().then_some(array))
}

/// The group that an id names: with `*` at its end, or an array of that id where no execution has it.
///
/// # Errors
/// If no policy service answers.
pub async fn named(
    broker: &Broker,
    tenant: &Tenant,
    id: &str,
) -> anyhow::Result<Option<Dependency>> {
    if let Some(group) = of_id(id) {
        return Ok(Some(group));
    }
    let execution = super::history::resolve(tenant, id)?;
    match Ledger::new(broker).last(tenant, execution).await {
        Ok(None) => of_array(broker, tenant, id).await,
        // Somebody who may not read ledgers may still ask about single executions.
        Ok(Some(_)) | Err(_) => Ok(None),
    }
}

/// How the executions of a group stand.
async fn status(broker: &Broker, tenant: &Tenant, of: &Dependency) -> anyhow::Result<BatchReply> {
    let about = batch::About {
        verb: BatchVerb::Status,
        tenant,
        of,
        failed: false,
    };
    Ok(batch::drive(broker, about, |_| {}).await?.0)
}

/// Waits until all of a group have ended. Returns the worst outcome.
///
/// # Errors
/// If an answer cannot be read.
pub async fn wait(
    broker: &Broker,
    tenant: &Tenant,
    of: &Dependency,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let mut pause = Duration::from_millis(100);
    let mut is_silent = false;
    // The last message that was queued when the waiting began. What comes later concerns others.
    let mut queued = None;
    loop {
        match status(broker, tenant, of).await {
            Ok(reply) => {
                is_silent = false;
                // Its submission may still be queued, or some of it.
                let untaken = reply.untaken;
                let queued = *queued.get_or_insert(untaken.map_or(0, |u| u.upto));
                let is_queued = untaken.is_some_and(|u| u.oldest <= queued);
                if let Some(error) = reply.error.filter(|_| !is_queued) {
                    eprintln!("{error}");
                    return Ok(Outcome::BadInput);
                }
                let outcomes = reply.phases.keys().map(|phase| wait::outcome_of(*phase));
                let outcomes: Option<Vec<Outcome>> = outcomes.collect();
                if let (Some(outcomes), false) = (outcomes, is_queued) {
                    if !global.json {
                        batch::name_who_ended_badly(&reply.ended_badly, &reply.phases);
                    }
                    return Ok(outcomes.into_iter().fold(Outcome::Done, Outcome::worse));
                }
            }
            Err(error) if client::is_unreachable(&error) => {
                if !std::mem::replace(&mut is_silent, true) {
                    eprintln!("{error}; still waiting. Running executions continue");
                }
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE);
    }
}

/// A member, as its last message shows it.
struct Member {
    seq: Sequence,
    execution: ExecutionId,
    client_id: Option<ClientId>,
    phase: PhaseKind,
    result: Value,
    /// Why it failed.
    failure: Option<String>,
}

impl Member {
    fn of(message: LedgerMessage, seq: Sequence) -> Self {
        let failure = message.events.iter().rev().find_map(|event| match event {
            Event::Failed { reason, .. } => Some(reason.clone()),
            _ => None,
        });
        let result = message.events.into_iter().find_map(|event| match event {
            Event::Completed { result, .. } => Some(result),
            _ => None,
        });
        let state = message.state;
        Self {
            seq,
            execution: state.execution,
            client_id: state.client_id.clone(),
            phase: state.phase.kind(),
            result: result.unwrap_or(Value::Null),
            failure,
        }
    }

    fn name(&self) -> String {
        match &self.client_id {
            Some(id) => id.to_string(),
            None => self.execution.to_string(),
        }
    }

    /// Orders names as people count: `lr-9` before `lr-10`.
    fn place(&self) -> (String, u64, String) {
        let name = self.name();
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (stem, number) = name.split_at(name.len() - digits);
        let (stem, number) = (stem.to_owned(), number.parse().unwrap_or(0));
        (stem, number, name)
    }
}

/// The members of a group by their last messages, in the order of their names.
async fn members(broker: &Broker, tenant: &Tenant, group: &Group) -> anyhow::Result<Vec<Member>> {
    let mut found: HashMap<ExecutionId, Member> = HashMap::new();
    let Some(mut messages) = LastMessages::of(broker, tenant).await? else {
        return Ok(Vec::new());
    };
    let deadline = Instant::now() + READ;
    loop {
        let (seq, header) = match messages.next(deadline).await? {
            Next::Message { seq, header } => (seq, header),
            Next::Over => break,
            Next::NotYet => anyhow::bail!("the ledgers were not read within {READ:?}"),
        };
        let glance = Glance::read(&header).context("a ledger message cannot be read")?;
        let batch = glance.batch().map(|place| place.id);
        if !group.has(glance.client_id(), batch) {
            continue;
        }
        let mut message = LedgerMessage::decode(&header, seq)?;
        if message.state.phase.kind() == PhaseKind::Completed {
            results::resolve(broker, &mut message).await?;
        }
        let member = Member::of(message, seq);
        // A copy that lags behind may have been read first.
        if found
            .get(&member.execution)
            .is_none_or(|m| m.seq <= member.seq)
        {
            found.insert(member.execution, member);
        }
    }
    let mut members: Vec<Member> = found.into_values().collect();
    members.sort_by_cached_key(Member::place);
    Ok(members)
}

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One JSON array, a member a line.
    Json,
    /// A row for each member, a column for each field of the results.
    Csv,
}

/// Prints the results of a group, and fetches the outputs into a folder for each member.
///
/// # Errors
/// If the servers cannot be reached, or an output cannot be written.
pub async fn results(
    (tenant, of): (&Tenant, &Dependency),
    format: Format,
    folder: Option<&Path>,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let Some(Target::All(group)) = of.target(tenant) else {
        eprintln!("{of} names no batch, no array and no beginning of ids");
        return Ok(Outcome::BadInput);
    };
    let broker = global.broker("result").await?;
    let members = members(&broker, tenant, &group).await?;
    if members.is_empty() {
        eprintln!("tenant {tenant} has no execution of {of}");
        return Ok(Outcome::Failed);
    }
    let text = match format {
        Format::Json => as_json(&members),
        Format::Csv => as_csv(&members)?,
    };
    std::io::stdout().write_all(text.as_bytes())?;
    let mut outcome = Outcome::Done;
    let mut live = 0;
    for member in &members {
        match wait::outcome_of(member.phase) {
            Some(ended) => outcome = outcome.worse(ended),
            None => live += 1,
        }
        if let Some(folder) = folder.filter(|_| member.phase == PhaseKind::Completed) {
            let (name, id) = (member.name(), member.execution.to_string());
            let fetched = output::fetch_all(tenant, &id, &folder.join(name), global).await?;
            outcome = outcome.worse(fetched);
        }
    }
    if live > 0 {
        let all = members.len();
        eprintln!("{live} of {all} have not ended; `fiec wait` waits for their end");
        outcome = outcome.worse(Outcome::Failed);
    }
    Ok(outcome)
}

fn as_json(members: &[Member]) -> String {
    let lines = members.iter().map(|member| {
        let mut fields = Map::new();
        fields.insert("id".to_owned(), json!(member.name()));
        fields.insert("execution".to_owned(), json!(member.execution));
        fields.insert("phase".to_owned(), json!(member.phase.as_str()));
        if member.phase == PhaseKind::Completed {
            fields.insert("result".to_owned(), member.result.clone());
        }
        if let Some(failure) = &member.failure {
            fields.insert("failure".to_owned(), json!(failure));
        }
        Value::Object(fields).to_string()
    });
    format!("[\n{}\n]\n", lines.collect::<Vec<_>>().join(",\n"))
}

/// The result of one execution, as CSV: a row under its columns.
///
/// # Errors
/// If it cannot be written.
pub fn one_as_csv(name: &str, execution: ExecutionId, result: Value) -> anyhow::Result<String> {
    as_csv(&[Member {
        seq: 0,
        execution,
        client_id: ClientId::new(name).ok(),
        phase: PhaseKind::Completed,
        result,
        failure: None,
    }])
}

/// A result that is no object is the column `result`.
fn as_csv(members: &[Member]) -> anyhow::Result<String> {
    let fields = |member: &Member| -> BTreeMap<String, Value> {
        match &member.result {
            Value::Object(fields) => fields.clone().into_iter().collect(),
            Value::Null => BTreeMap::new(),
            other => BTreeMap::from([("result".to_owned(), other.clone())]),
        }
    };
    let columns: BTreeSet<String> = members.iter().flat_map(|m| fields(m).into_keys()).collect();
    let mut table = csv::Writer::from_writer(Vec::new());
    let own = columns.iter().map(String::as_str);
    table.write_record(["id", "phase"].into_iter().chain(own).chain(["failure"]))?;
    for member in members {
        let found = fields(member);
        let cells = columns.iter().map(|column| match found.get(column) {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => String::new(),
        });
        let own = [member.name(), member.phase.as_str().to_owned()];
        let failure = member.failure.clone().unwrap_or_default();
        table.write_record(own.into_iter().chain(cells).chain([failure]))?;
    }
    Ok(String::from_utf8(table.into_inner()?)?)
}

/// Lists the outputs of each member, or fetches one of each into a folder.
///
/// # Errors
/// If the servers cannot be reached, or a file cannot be written.
pub async fn outputs(
    (tenant, of): (&Tenant, &Dependency),
    name: Option<&str>,
    folder: Option<&Path>,
    global: &Global,
) -> anyhow::Result<Outcome> {
    let Some(Target::All(group)) = of.target(tenant) else {
        return Ok(Outcome::BadInput);
    };
    let broker = global.broker("output").await?;
    let mut outcome = Outcome::Done;
    for member in members(&broker, tenant, &group).await? {
        let (own, id) = (member.name(), member.execution.to_string());
        let one = match name {
            None => output::list_of(tenant, (&id, &own), global).await?,
            Some(name) => {
                let folder = folder.unwrap_or_else(|| Path::new(".")).join(own);
                output::fetch_one(tenant, &id, name, &folder, global).await?
            }
        };
        outcome = outcome.worse(one);
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, phase: PhaseKind, result: Value) -> Member {
        Member {
            seq: 1,
            execution: ExecutionId(uuid::Uuid::nil()),
            client_id: ClientId::new(name).ok(),
            phase,
            result,
            failure: (phase == PhaseKind::Failed).then(|| "it said \"no\", twice".to_owned()),
        }
    }

    fn some() -> Vec<Member> {
        let mut all = vec![
            member(
                "lr-10",
                PhaseKind::Completed,
                json!({"loss": 0.5, "note": "a,b"}),
            ),
            member("lr-9", PhaseKind::Failed, Value::Null),
            member(
                "lr-0",
                PhaseKind::Completed,
                json!({"loss": 0.25, "at": [1, 2]}),
            ),
        ];
        all.sort_by_cached_key(Member::place);
        all
    }

    #[test]
    fn results_are_rows_in_the_order_of_their_numbers_with_a_column_for_each_field() {
        let text = as_csv(&some()).unwrap();
        assert_eq!(
            text,
            "id,phase,at,loss,note,failure\n\
             lr-0,completed,\"[1,2]\",0.25,,\n\
             lr-9,failed,,,,\"it said \"\"no\"\", twice\"\n\
             lr-10,completed,,0.5,\"a,b\",\n"
        );
    }

    #[test]
    fn results_are_one_json_array() {
        let all: Vec<Value> = serde_json::from_str(&as_json(&some())).unwrap();
        assert_eq!((all.len(), &all[2]["result"]["loss"]), (3, &json!(0.5)));
        assert_eq!(
            (&all[1]["id"], &all[1]["result"]),
            (&json!("lr-9"), &Value::Null)
        );
        assert!(all[1]["failure"].is_string());
    }
}
