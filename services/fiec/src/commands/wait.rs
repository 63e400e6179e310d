//! `fiec wait ID…` and `fiec submit --wait`: wait until every execution has ended. An outage of the
//! servers does not end the wait: the executions continue meanwhile.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use clap::Args;
use fiec_broker::api::ApiError;
use fiec_broker::{Broker, Ledger};
use fiec_schemas::messages::{ApiReply, ExecutionVerb};
use fiec_schemas::{ExecutionId, Glance, PhaseKind, Tenant, Timestamp};
use indicatif::{ProgressBar, ProgressStyle};

use super::group;
use crate::client;
use crate::context::{Global, TenantArg};
use crate::exit::Outcome;
use crate::sql;
use crate::terminal::safe;

/// Pause between two requests while no policy service answers.
const RETRY: Duration = Duration::from_secs(1);
/// Interval at which the history is asked about executions without a ledger.
const ASK_HISTORY: Duration = Duration::from_secs(5);
/// If more executions live, the last messages of all their ledgers are read together.
const MANY: usize = 1_000;
/// Executions that one query of the history names.
const QUERIED: usize = 10_000;
/// Most executions of many that are named because they failed or were cancelled.
const NAMED: usize = 20;

/// Wait until executions have ended; the exit code is the worst outcome
#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Execution ids, or the ids that the client gave; also an array by its id, and `seed-*`
    #[arg(required_unless_present = "batch")]
    pub id: Vec<String>,
    /// All of a batch: its name, or its UUID; repeatable
    #[arg(long)]
    pub batch: Vec<String>,
    #[command(flatten)]
    pub tenant: TenantArg,
}

/// Runs the command.
///
/// # Errors
/// If the broker cannot be reached at the beginning.
pub async fn run(args: WaitArgs, global: &Global) -> anyhow::Result<Outcome> {
    let broker = global.broker("wait").await?;
    let tenant = &args.tenant.tenant;
    let mut waiting = Waiting::new(&broker, tenant, global);
    let mut outcome = Outcome::Done;
    let mut groups: Vec<_> = args
        .batch
        .iter()
        .map(|name| group::of_batch(name))
        .collect();
    for id in &args.id {
        if let Some(group) = group::of_id(id) {
            groups.push(group);
            continue;
        }
        let reply = waiting.status(id).await?;
        match (&reply.state, super::history::resolve(tenant, id)) {
            (Some(state), _) => waiting.add(state.execution, id.clone()),
            (None, Ok(execution)) if !waiting.recorded(&[execution]).await?.is_empty() => {
                waiting.add(execution, id.clone());
            }
            (None, _) => match group::of_array(&broker, tenant, id).await? {
                Some(array) => groups.push(array),
                None => {
                    eprintln!("{}", reply.error.unwrap_or_default());
                    outcome = outcome.worse(Outcome::BadInput);
                }
            },
        }
    }
    outcome = outcome.worse(waiting.until_all_have_ended().await?);
    for group in &groups {
        outcome = outcome.worse(group::wait(&broker, tenant, group, global).await?);
    }
    Ok(outcome)
}

/// Outcome of an execution in this phase. None: it has not ended.
pub fn outcome_of(phase: PhaseKind) -> Option<Outcome> {
    match phase {
        // The outputs of a returned part belong to its holder: nothing is lost, and nothing else
        // follows.
        PhaseKind::Completed | PhaseKind::Returned => Some(Outcome::Done),
        // It goes on only if somebody retries it.
        PhaseKind::Failed | PhaseKind::Held => Some(Outcome::Failed),
        PhaseKind::Cancelled => Some(Outcome::Cancelled),
        PhaseKind::Pending
        | PhaseKind::Bound
        | PhaseKind::Started
        | PhaseKind::Paused
        | PhaseKind::Verifying => None,
    }
}

/// The end of an execution.
struct Ended {
    outcome: Outcome,
    /// For people: when and how it ended, unless it completed.
    notice: Option<(Timestamp, String)>,
}

/// Executions to wait for.
pub struct Waiting<'a> {
    broker: &'a Broker,
    tenant: &'a Tenant,
    global: &'a Global,
    /// Live executions by id, with their names for people.
    live: BTreeMap<ExecutionId, String>,
    bar: ProgressBar,
    /// Time since which no policy service answers.
    outage: Option<Instant>,
    history: Option<sqlx::PgPool>,
    history_asked: Option<Instant>,
    /// How many of many were named.
    named: usize,
    /// Executions that nodes cannot start, of which a person was told.
    told: BTreeSet<ExecutionId>,
}

impl<'a> Waiting<'a> {
    /// An empty set of executions.
    pub fn new(broker: &'a Broker, tenant: &'a Tenant, global: &'a Global) -> Self {
        Self {
            broker,
            tenant,
            global,
            live: BTreeMap::new(),
            bar: ProgressBar::hidden(),
            outage: None,
            history: None,
            history_asked: None,
            named: 0,
            told: BTreeSet::new(),
        }
    }

    /// Adds an execution.
    pub fn add(&mut self, execution: ExecutionId, name: String) {
        self.live.insert(execution, name);
    }

    fn say(&self, words: &str) {
        self.bar.suspend(|| eprintln!("{words}"));
    }

    /// Requests the status until a policy service answers.
    async fn status(&mut self, id: &str) -> anyhow::Result<ApiReply> {
        loop {
            match client::me(self.broker)
                .execution(ExecutionVerb::Status, self.tenant, id, None)
                .await
            {
                Ok(reply) => {
                    if let Some(since) = self.outage.take() {
                        let seconds = since.elapsed().as_secs();
                        self.say(&format!("answered again after {seconds} s; still waiting"));
                    }
                    return Ok(reply);
                }
                Err(error @ ApiError::Unreachable(_)) => {
                    if self.outage.is_none() {
                        self.outage = Some(Instant::now());
                        self.say(&format!(
                            "{error}; still waiting. Running executions continue; Ctrl-C ends only this \
                             command"
                        ));
                    }
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The phases of executions without a ledger that have ended, if the history can be reached.
    ///
    /// # Errors
    /// When the history has a phase that this version does not know.
    async fn recorded(
        &mut self,
        executions: &[ExecutionId],
    ) -> anyhow::Result<Vec<(ExecutionId, PhaseKind)>> {
        if self.history.is_none() && self.global.database_url().is_ok() {
            self.history = self.global.database().await.ok();
        }
        let mut ended = Vec::new();
        let Some(history) = &self.history else {
            return Ok(ended);
        };
        for part in executions.chunks(QUERIED) {
            let ids: Vec<String> = part.iter().map(|id| format!("'{id}'")).collect();
            let query = format!(
                "SELECT id, phase FROM executions WHERE id IN ({})",
                ids.join(", ")
            );
            let Ok(rows) = sql::query(history, query).await else {
                break;
            };
            for row in 0..rows.rows.len() {
                let id = rows.get(row, "id").and_then(|id| id.parse().ok());
                if let (Some(id), Some(phase)) = (id, rows.get(row, "phase")) {
                    let phase = sql::parse_phase(id, phase)?;
                    ended.extend(outcome_of(phase).map(|_| (id, phase)));
                }
            }
        }
        Ok(ended)
    }

    /// [`Self::recorded`], unless the history was asked a moment ago.
    async fn recorded_lately(
        &mut self,
        executions: &[ExecutionId],
    ) -> anyhow::Result<Vec<(ExecutionId, PhaseKind)>> {
        let is_early = |at: Instant| at.elapsed() < ASK_HISTORY;
        if executions.is_empty() || self.history_asked.is_some_and(is_early) {
            return Ok(Vec::new());
        }
        let ended = self.recorded(executions).await?;
        self.history_asked = Some(Instant::now()).filter(|_| ended.len() < executions.len());
        Ok(ended)
    }

    fn draw_bar(&mut self) {
        if self.global.json || !std::io::stderr().is_terminal() {
            return;
        }
        self.bar = ProgressBar::new(self.live.len() as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:40.cyan} {pos}/{len} {msg} {elapsed}")
        {
            self.bar.set_style(style);
        }
    }

    /// Waits for all executions. Returns the worst outcome.
    ///
    /// # Errors
    /// If an answer cannot be read.
    pub async fn until_all_have_ended(mut self) -> anyhow::Result<Outcome> {
        self.draw_bar();
        let mut worst = Outcome::Done;
        let mut pause = Duration::from_millis(20);
        while !self.live.is_empty() {
            let before = self.live.len();
            let ended = match self.live.len() > MANY {
                true => self.ended_of_many().await?,
                false => None,
            };
            if let Some(ended) = ended {
                for (id, phase) in ended {
                    let outcome = outcome_of(phase).unwrap_or(Outcome::Done);
                    let name = self.live.remove(&id).unwrap_or_default();
                    if outcome != Outcome::Done {
                        self.name_one_of_many(&name, id, phase);
                    }
                    self.bar.inc(1);
                    worst = worst.worse(outcome);
                }
            } else {
                // One after the other, a thousand a round, so that waiting does not load the cluster.
                let round: Vec<ExecutionId> = self.live.keys().copied().take(MANY).collect();
                let mut notices = Vec::new();
                for id in round {
                    if let Some(Ended { outcome, notice }) = self.look(id).await? {
                        self.live.remove(&id);
                        self.bar.inc(1);
                        worst = worst.worse(outcome);
                        notices.extend(notice);
                    }
                }
                // A failure comes before the failures that it caused.
                notices.sort();
                for (_, words) in notices {
                    self.say(&words);
                }
            }
            if self.live.len() == before {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            } else {
                pause = Duration::from_millis(20);
            }
        }
        self.bar.finish_and_clear();
        Ok(worst)
    }

    /// The phases of those that have ended. None if the ledgers cannot be read together, by this
    /// user or at this moment.
    ///
    /// # Errors
    /// When the history has a phase that this version does not know.
    async fn ended_of_many(&mut self) -> anyhow::Result<Option<Vec<(ExecutionId, PhaseKind)>>> {
        let live: Vec<ExecutionId> = self.live.keys().copied().collect();
        let ledger = Ledger::new(self.broker);
        let Ok(last) = ledger.last_of_many(self.tenant, &live).await else {
            return Ok(None);
        };
        let mut missing: BTreeSet<_> = live.into_iter().collect();
        let mut ended = Vec::new();
        for (id, header) in last {
            missing.remove(&id);
            if let Ok(glance) = Glance::read(&header) {
                let phase = glance.phase();
                ended.extend(outcome_of(phase).map(|_| (id, phase)));
            }
        }
        // They are still queued, or their ledgers are gone.
        let missing: Vec<_> = missing.into_iter().collect();
        ended.extend(self.recorded_lately(&missing).await?);
        Ok(Some(ended))
    }

    fn name_one_of_many(&mut self, name: &str, id: ExecutionId, phase: PhaseKind) {
        self.named += 1;
        match self.named.cmp(&NAMED) {
            _ if self.global.json => {}
            Ordering::Less => self.say(&format!("{name} is {phase}; see `fiec history {id}`")),
            Ordering::Equal => self.say(&format!(
                "{name} is {phase}; others are not named: `fiec batch status` and `fiec ls` do"
            )),
            Ordering::Greater => {}
        }
    }

    /// How an execution has ended, if it has.
    async fn look(&mut self, id: ExecutionId) -> anyhow::Result<Option<Ended>> {
        let reply = self.status(&id.to_string()).await?;
        let Some(state) = reply.state else {
            // It is still queued, or its ledger is gone.
            let ended = self.recorded_lately(&[id]).await?;
            let outcome = ended.first().and_then(|(_, phase)| outcome_of(*phase));
            return Ok(outcome.map(|outcome| Ended {
                outcome,
                notice: None,
            }));
        };
        if let Some(arriving) = &reply.arriving {
            self.bar.set_message(arriving.in_words());
        }
        if let Some(progress) = &reply.progress {
            self.bar.set_message(match (progress.of, &progress.note) {
                (_, Some(note)) => safe(note).into_owned(),
                (Some(of), None) => format!("capsule {}/{of}", progress.boundary),
                (None, None) => format!("capsule {}", progress.boundary),
            });
        }
        let known_as = match &state.client_id {
            Some(client) => client.to_string(),
            None => id.to_string(),
        };
        let Some(outcome) = outcome_of(state.phase.kind()) else {
            let fails = state.totals.node_faults > 0;
            let waits = state.phase.kind() == PhaseKind::Pending;
            if waits && fails && !self.global.json && self.told.insert(id) {
                let faults = state.totals.node_faults;
                self.say(&format!(
                    "{known_as} waits; faults of nodes so far: {faults}. See `fiec why {known_as}`"
                ));
            }
            return Ok(None);
        };
        let mut notice = None;
        if outcome != Outcome::Done && !self.global.json {
            let words = super::watch::ending(self.broker, &state).await;
            let words = words.unwrap_or_else(|| state.phase.as_str().to_owned());
            let name = self.live.get(&id).map_or("", String::as_str);
            notice = Some((
                state.at,
                format!("{name} {words}; see `fiec history {known_as}`"),
            ));
        }
        Ok(Some(Ended { outcome, notice }))
    }
}
