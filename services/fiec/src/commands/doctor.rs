//! `fiec doctor`: what is missing or misconfigured on this machine, and what to do.

mod machine;

use std::time::Duration;

use fiec_broker::copies::{self, Copies};
use fiec_broker::{Broker, BrokerClock, ConnectOptions, without_secrets};
use fiec_recorder::PgTime;
use fiec_schemas::messages::Viability;
use fiec_schemas::{ClockReading, Secret, subjects};
use serde_json::json;
use sqlx::{PgPool, Row as _};

use crate::client;
use crate::commands::nodes;
use crate::context::Global;
use crate::exit::Outcome;
use crate::ui;

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// All is well.
    Ok,
    /// Something works less well, or must be fetched first.
    Warning,
    /// Something will not work.
    Missing,
}

/// A check and its result.
#[derive(Debug, Clone)]
pub struct Check {
    /// Name of the checked part.
    pub name: &'static str,
    /// The result.
    pub status: Status,
    /// Finding of the check.
    pub detail: String,
    /// Action that helps. Empty if all is well.
    pub remedy: String,
}

impl Check {
    /// A check that found no problem.
    pub fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self::bad(name, Status::Ok, detail, "")
    }

    /// A check that found a problem.
    pub fn bad(
        name: &'static str,
        status: Status,
        detail: impl Into<String>,
        remedy: &str,
    ) -> Self {
        Self {
            name,
            status,
            detail: detail.into(),
            remedy: remedy.to_owned(),
        }
    }
}

/// Checks the machine, and the servers if their addresses are known. Prints `more` after these
/// checks.
///
/// # Errors
/// None for findings. The outcome is 0 if all is well and 1 if something is missing.
pub async fn run(global: &Global, more: Vec<Check>) -> anyhow::Result<Outcome> {
    let mut checks = machine::checks();
    let mut clock = None;
    if let Ok(url) = global.nats_url() {
        let (found, known) = broker(&url).await;
        checks.extend(found);
        clock = known;
    }
    if global.database_url().is_ok() {
        checks.extend(database(global, clock.as_ref()).await);
    }
    checks.extend(more);
    let mut outcome = Outcome::Done;
    let mut rows = Vec::new();
    for check in &checks {
        let word = match check.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Missing => {
                outcome = Outcome::Failed;
                "missing"
            }
        };
        if global.json {
            println!(
                "{}",
                json!({"check": check.name, "status": word, "detail": check.detail,
                       "remedy": check.remedy})
            );
        }
        rows.push(vec![
            check.name.to_owned(),
            word.to_owned(),
            check.detail.clone(),
            check.remedy.clone(),
        ]);
    }
    if !global.json {
        println!(
            "{}",
            ui::table(["check", "status", "found", "what to do"], rows)
        );
    }
    Ok(outcome)
}

/// Checks the broker. Returns its clock for further checks.
async fn broker(url: &Secret) -> (Vec<Check>, Option<BrokerClock>) {
    let mut options = ConnectOptions::new(url.clone(), "fiec doctor");
    options.timeout = Duration::from_secs(3);
    let broker = match Broker::connect(options).await {
        Ok(broker) => broker,
        Err(error) => {
            let found = Check::bad(
                "NATS",
                Status::Missing,
                error.to_string(),
                "start the server, or correct --nats",
            );
            return (vec![found], None);
        }
    };
    let server = broker.client.server_info();
    let mut checks = vec![Check::ok(
        "NATS",
        format!(
            "{} at {}, max payload {}",
            server.version,
            without_secrets(url.expose()),
            server.max_payload
        ),
    )];
    checks.push(match broker.js.get_stream(subjects::LEDGER_STREAM).await {
        Ok(stream) => Check::ok(
            "ledger stream",
            format!("{} messages", stream.cached_info().state.messages),
        ),
        Err(error) => Check::bad(
            "ledger stream",
            Status::Missing,
            error.to_string(),
            "run `fiec setup` once against this server",
        ),
    });
    checks.push(match copies::read_streams(&broker).await {
        Ok(streams) => copies_of(&Copies::of(&streams)),
        // The checks above say that the broker does not answer.
        Err(error) => Check::bad("copies", Status::Warning, error.to_string(), ""),
    });
    let (mut far, mut amiss) = (Vec::new(), Vec::new());
    checks.push(match client::me(&broker).nodes().await {
        Ok(reply) => {
            far.extend(
                nodes::far_clocks(&reply.nodes)
                    .map(|(node, words)| format!("the clock of {node} is {words}")),
            );
            let unwell = nodes::set_aside(&reply.nodes).chain(nodes::stuck(&reply.nodes));
            amiss.extend(unwell.map(|(node, words)| format!("{node}: {words}")));
            let viable = reply
                .nodes
                .iter()
                .filter(|n| n.viability == Viability::Viable)
                .count();
            let detail = format!("{viable} of {} nodes are viable", reply.nodes.len());
            if viable > 0 {
                Check::ok("policy service and nodes", detail)
            } else {
                Check::bad(
                    "policy service and nodes",
                    Status::Warning,
                    detail,
                    "start a worker with `fiec worker`",
                )
            }
        }
        Err(error) => Check::bad(
            "policy service and nodes",
            Status::Missing,
            error.to_string(),
            "start one with `fiec policy`",
        ),
    });
    if !amiss.is_empty() {
        checks.push(Check::bad(
            "nodes",
            Status::Warning,
            amiss.join("; "),
            "`fiec nodes` shows them",
        ));
    }
    // If the broker does not answer, the checks above report it.
    if broker.measure_clock().await.is_err() {
        return (checks, None);
    }
    let own = broker.clock().reading().filter(|own| own.is_far());
    far.extend(own.map(|own| format!("this machine's is {}", own.in_words())));
    checks.push(clocks("clocks", &far));
    (checks, Some(broker.clock().clone()))
}

/// Reports streams that have other numbers of copies than the rest.
fn copies_of(copies: &Copies) -> Check {
    match copies.mixture() {
        None => {
            let each = copies.common().unwrap_or(0);
            Check::ok("copies", format!("{each} of each stream"))
        }
        Some(mixture) => Check::bad(
            "copies",
            Status::Warning,
            format!("streams differ: {mixture}"),
            "run `fiec setup --replicas N` with the number that all should have",
        ),
    }
}

/// Reports clocks that differ from the broker's.
fn clocks(name: &'static str, far: &[String]) -> Check {
    if far.is_empty() {
        return Check::ok(name, "agree with the broker's");
    }
    Check::bad(
        name,
        Status::Warning,
        far.join("; "),
        "set it (NTP); times are recorded by the broker's clock",
    )
}

/// Checks PostgreSQL's clock. Views use it as the end of what has not ended.
async fn database_clock(pool: &PgPool, clock: &BrokerClock) -> anyhow::Result<Check> {
    let asked = clock.now();
    let row = sqlx::query("SELECT clock_timestamp() AS at")
        .fetch_one(pool)
        .await?;
    let at = row.try_get::<PgTime, _>("at")?.0;
    let within_us = clock.now().micros().saturating_sub(asked.micros());
    let reading = ClockReading {
        ahead_us: at.micros().saturating_sub(asked.micros()),
        within_us: u64::try_from(within_us).unwrap_or(0),
    };
    let far = reading
        .is_far()
        .then(|| format!("it is {}", reading.in_words()));
    Ok(clocks("PostgreSQL's clock", far.as_slice()))
}

async fn database(global: &Global, clock: Option<&BrokerClock>) -> Vec<Check> {
    let mut checks = vec![executions(global).await];
    if let (Some(clock), Ok(pool)) = (clock, global.database().await)
        && let Ok(found) = database_clock(&pool, clock).await
    {
        checks.push(found);
    }
    checks
}

async fn executions(global: &Global) -> Check {
    let lag = async {
        let pool = global.database().await?;
        crate::sql::query(
            &pool,
            "SELECT count(*)::text AS n FROM executions".to_owned(),
        )
        .await
    };
    match lag.await {
        Ok(rows) => Check::ok(
            "PostgreSQL",
            format!(
                "{} executions in the history",
                rows.get(0, "n").unwrap_or("0")
            ),
        ),
        Err(error) => Check::bad(
            "PostgreSQL",
            Status::Missing,
            format!("{error:#}"),
            "start the server, correct --database, or run `fiec setup`",
        ),
    }
}
