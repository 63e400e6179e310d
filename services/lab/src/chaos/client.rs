//! The client: it submits lines until they are answered, and asks for pauses, resumptions, cancels
//! and changes. Each definite answer is noted. After a request without an answer nothing more is
//! asked of that execution: the request may still be carried out at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::bail;
use bytes::Bytes;
use fiec::client;
use fiec_broker::Broker;
use fiec_schemas::messages::{ApiReply, ExecutionVerb, RefusalCode};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{ExecutionId, Tenant};
use tokio::time::{Instant, sleep};

use super::load::{Line, Role};
use super::schedule::Dice;
use crate::judge::oracles::answers::{Answers, Said};

/// Pause before a line without an answer is sent again.
const AGAIN: Duration = Duration::from_millis(300);
/// Longest time until a line is answered.
const PATIENCE: Duration = Duration::from_secs(180);
/// Most executions among which it asks for changes: the last ones, which hardly have ended yet.
const ASKED: usize = 24;

/// What the client knows of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// It may run.
    Live,
    /// It was said to be paused.
    Paused,
    /// It was cancelled, or a request had no answer.
    Left,
    /// Nothing is asked of it while the faults go on.
    Kept(Role),
}

/// The client and what it was told.
pub struct Client {
    broker: Broker,
    answers: Answers,
    known: BTreeMap<ExecutionId, (Tenant, Known)>,
    /// All of them, in the order of their lines.
    order: Vec<ExecutionId>,
    /// The accepted lines.
    lines: Vec<Line>,
    /// Members of gangs.
    members: BTreeSet<ExecutionId>,
    /// The slow ones that were said to be paused.
    paused: BTreeSet<ExecutionId>,
}

impl Client {
    /// A client that notes its answers there.
    pub fn new(broker: Broker, answers: Answers) -> Self {
        Self {
            broker,
            answers,
            known: BTreeMap::new(),
            members: BTreeSet::new(),
            order: Vec::new(),
            lines: Vec::new(),
            paused: BTreeSet::new(),
        }
    }

    /// The executions of accepted lines that end by themselves.
    pub fn executions(&self) -> impl Iterator<Item = (ExecutionId, &Tenant)> {
        let known = self.known.iter();
        let passing = known.filter(|(_, (_, is))| !matches!(is, Known::Kept(_)));
        passing.map(|(id, (tenant, _))| (*id, tenant))
    }

    /// The executions of accepted lines that stay, with their roles.
    pub fn kept(&self) -> Vec<(ExecutionId, Tenant, Role)> {
        let kept = self.known.iter().filter_map(|(id, (tenant, is))| match is {
            Known::Kept(role) => Some((*id, tenant.clone(), *role)),
            _ => None,
        });
        kept.collect()
    }

    /// Sends a line until it is answered.
    ///
    /// # Errors
    /// If it is refused, or never answered.
    pub async fn submit(&mut self, line: Line) -> anyhow::Result<()> {
        self.send(&line).await?;
        for id in line.executions()? {
            let is = match line.role {
                Role::Passes => Known::Live,
                Role::Member => {
                    self.members.insert(id);
                    Known::Live
                }
                kept => Known::Kept(kept),
            };
            self.known.insert(id, (line.tenant.clone(), is));
            self.order.push(id);
        }
        self.lines.push(line);
        Ok(())
    }

    /// Sends the lines again of which an execution has no ledger, as one does after the broker has
    /// lost what it had acknowledged.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn submit_lost(&self, ledgers: &BTreeSet<ExecutionId>) -> anyhow::Result<()> {
        for line in &self.lines {
            if !line.executions()?.iter().all(|id| ledgers.contains(id)) {
                self.send(line).await?;
            }
        }
        Ok(())
    }

    async fn send(&self, line: &Line) -> anyhow::Result<()> {
        let body = Bytes::from(serde_json::to_vec(&line.submission)?);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let me = client::me(&self.broker);
            if let Ok(reply) = me.submit(&line.tenant, body.clone(), false).await {
                if let Some(error) = reply.errors.first() {
                    bail!(
                        "a line of the load was refused: {error}: {}",
                        line.submission
                    );
                }
                if reply.error.is_none() && !reply.accepted.is_empty() {
                    break;
                }
            }
            if Instant::now() >= deadline {
                bail!(
                    "a line is not answered within {PATIENCE:?}: {}",
                    line.submission
                );
            }
            sleep(AGAIN).await;
        }
        for id in line.executions()? {
            self.answers.note(id, Said::Accepted);
        }
        Ok(())
    }

    /// Asks for one change of one execution.
    pub async fn ask(&mut self, dice: &mut Dice) {
        let is_open = |id: &&ExecutionId| {
            let known = self.known.get(id);
            known.is_some_and(|(_, is)| matches!(is, Known::Live | Known::Paused))
        };
        let open = self.order.iter().rev().filter(is_open).take(ASKED);
        let open: Vec<ExecutionId> = open.copied().collect();
        let Some(id) = open.get(dice.below(open.len() as u64) as usize) else {
            return;
        };
        let Some((_, known)) = self.known.get(id) else {
            return;
        };
        let verb = match (known, dice.below(8)) {
            (Known::Paused, _) => ExecutionVerb::Resume,
            (_, 0) if !self.members.contains(id) => ExecutionVerb::Cancel,
            (_, 1) => ExecutionVerb::Yield,
            (_, 2 | 3) => ExecutionVerb::Adjust,
            _ => ExecutionVerb::Pause,
        };
        self.change(*id, verb, dice).await;
    }

    /// Pauses a slow execution, or resumes it after a confirmed pause.
    pub async fn toggle(&mut self, dice: &mut Dice) {
        let kept = self.kept();
        let slow = kept.iter().filter(|(.., role)| *role == Role::Slow);
        let slow: Vec<_> = slow.collect();
        let Some((id, tenant, _)) = slow.get(dice.below(slow.len() as u64) as usize) else {
            return;
        };
        let pauses = !self.paused.contains(id);
        let verb = match pauses {
            true => ExecutionVerb::Pause,
            false => ExecutionVerb::Resume,
        };
        let name = id.to_string();
        let reply = client::me(&self.broker)
            .execution(verb, tenant, &name, None)
            .await;
        let refusal = reply.map(|reply| reply.refusal);
        match (refusal, pauses) {
            (Ok(None), true) => {
                self.paused.insert(*id);
                self.answers.note(*id, Said::Paused);
            }
            (Ok(None), false) => {
                self.paused.remove(id);
                self.answers.note(*id, Said::Resumed);
            }
            (Ok(Some(code)), _) if !is_unclear(code) => {}
            (Ok(Some(_)) | Err(_), _) => self.answers.note(*id, Said::Unknown),
        }
    }

    async fn change(&mut self, id: ExecutionId, verb: ExecutionVerb, dice: &mut Dice) {
        let Some((tenant, known)) = self.known.get_mut(&id) else {
            return;
        };
        let name = id.to_string();
        let me = client::me(&self.broker);
        let reply: Result<ApiReply, _> = match verb {
            ExecutionVerb::Adjust => {
                let change = Adjustment {
                    priority: i16::try_from(dice.below(10)).ok(),
                    ..Adjustment::default()
                };
                me.adjust(tenant, &name, change).await
            }
            verb => me.execution(verb, tenant, &name, None).await,
        };
        let said = match reply {
            // It may be done at any time.
            Err(_) => {
                self.answers.note(id, Said::Unknown);
                *known = Known::Left;
                return;
            }
            Ok(reply) => match (reply.refusal, verb) {
                (Some(code), _) if is_unclear(code) => {
                    self.answers.note(id, Said::Unknown);
                    *known = Known::Left;
                    return;
                }
                (Some(_), _) => return,
                (None, ExecutionVerb::Pause) => (Said::Paused, Known::Paused),
                (None, ExecutionVerb::Resume) => (Said::Resumed, Known::Live),
                (None, ExecutionVerb::Cancel) => (Said::Cancelled, Known::Left),
                (None, _) => return,
            },
        };
        self.answers.note(id, said.0);
        *known = said.1;
    }

    /// Asks once for a pause or a cancel of an execution that stays.
    pub async fn end_stay(&self, verb: ExecutionVerb, id: ExecutionId, tenant: &Tenant) {
        let name = id.to_string();
        let asked = client::me(&self.broker)
            .execution(verb, tenant, &name, None)
            .await;
        if asked.is_ok_and(|reply| reply.error.is_none()) {
            let said = match verb {
                ExecutionVerb::Pause => Said::Paused,
                _ => Said::Cancelled,
            };
            self.answers.note(id, said);
        }
    }

    /// Resumes what is paused, and retries what is held, as the ledgers say, so that all can end.
    pub async fn let_go_on(&mut self, rests: &[(ExecutionId, Tenant, ExecutionVerb)]) {
        for (id, tenant, verb) in rests {
            let name = id.to_string();
            let asked = client::me(&self.broker)
                .execution(*verb, tenant, &name, None)
                .await;
            if asked.is_ok_and(|reply| reply.error.is_none()) {
                let said = match verb {
                    ExecutionVerb::Retry => Said::Retried,
                    _ => Said::Resumed,
                };
                self.answers.note(*id, said);
            }
        }
    }
}

/// True if the request may be carried out although it was refused.
fn is_unclear(code: RefusalCode) -> bool {
    matches!(
        code,
        RefusalCode::Unanswered | RefusalCode::Broker | RefusalCode::NodeSilent
    )
}
