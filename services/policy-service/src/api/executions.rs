//! Requests about one execution. While it is started only its worker appends, and the request is
//! passed on; otherwise the event is appended here. The answer comes after the append.

use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Entry, outbox, store};
use fiec_schemas::messages::{ApiReply, ControlRequest, ExecutionRequest, Why};
use fiec_schemas::package::Grant;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{
    Binding, Cause, ClientId, Event, ExecutionId, ExecutionState, Phase, Tenant, Timestamp, duty,
};
use tokio::time::Instant;

use super::sight::Sight;
use super::{Answered, Api, parse, somebody, tenant};
use crate::effects::NoReply;
use crate::events::{Ask, Outcome};

/// A submission that was just accepted may not have its ledger yet, for so long beyond the time
/// that a node has to append it.
const NEWBORN: Duration = Duration::from_millis(300);
/// Nobody who asks waits for a node longer than this.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest wait for an execution that moves to run again, before it is changed.
const MOVE: Duration = Duration::from_secs(5);

/// How often a bound execution is looked at again before it is changed, and how long between.
const BOUND_ROUNDS: u32 = 6;
const BOUND_PAUSE: Duration = Duration::from_millis(50);
/// The same for one that was asked to pause and is to be resumed.
const PAUSE_ROUNDS: u32 = 10;
/// How the answer ends where that was not long enough.
pub(super) const NOT_YET: &str = "it can be resumed once it has paused";
/// What the answer says where there is nothing to resume.
pub(super) const NOT_PAUSED: &str = "is not paused, it is";

/// As its client calls it.
fn called(state: &ExecutionState) -> String {
    let client = state.spec.as_ref().and_then(|spec| spec.id.as_ref());
    client.map_or_else(|| state.execution.to_string(), ToString::to_string)
}

/// Whether somebody has asked this of it, and it was not done yet.
pub(super) fn is_asked(state: &ExecutionState, what: &str) -> bool {
    let asked = state.requested.as_ref();
    asked.is_some_and(|asked| asked.what == what)
}

/// What an execution can be given where it runs; what is there to be given, its node knows.
fn check_grant(grant: &Grant) -> Result<(), String> {
    if *grant == Grant::default() {
        return Err(
            "grant: names nothing that is to change; threads, memory_bytes and cpus can".to_owned(),
        );
    }
    let fixed = [
        ("substrate", grant.substrate.is_some()),
        ("device", grant.device.is_some()),
    ];
    if let Some((field, _)) = fixed.into_iter().find(|(_, named)| *named) {
        return Err(format!(
            "grant.{field}: cannot change while it runs; `fiec yield` moves it to another place"
        ));
    }
    Ok(())
}

/// Why a request was not passed on to the node of its execution.
enum NotPassed {
    /// The node does not hold it: nobody else would append.
    NotHeld,
    /// It is about to start there, or to leave; in words.
    Moving(String),
    /// In words.
    Because(String),
}

/// The events by which an execution is changed that no node holds.
fn orphan_events(verb: &str, who: &str, change: Option<&Adjustment>, now: Timestamp) -> Vec<Event> {
    let who = who.to_owned();
    match verb {
        "cancel" => vec![Event::Cancelled { who }],
        "adjust" => vec![Event::Adjusted {
            who,
            change: change.cloned().unwrap_or_default(),
        }],
        _ => {
            let reason = "it was paused while its node did not hold it".to_owned();
            let yielded = Event::Yielded {
                cause: Cause::Orphaned { reason },
                computed_until: now,
            };
            vec![yielded, Event::Paused { who }]
        }
    }
}

impl Api {
    pub(super) async fn execution(
        &self,
        verb: &str,
        tenant_text: &str,
        payload: &[u8],
    ) -> Answered<ApiReply> {
        let tenant = tenant(tenant_text)?;
        let request: ExecutionRequest = parse(payload)?;
        let who = somebody(&request.who);
        let entry = self.find(&tenant, &request.id).await?;
        let (id, asked) = (entry.message.state.execution, request.id.clone());
        let answer = match verb {
            "status" => self.status(entry).await,
            "why" => self.why(entry).await,
            "yield" => {
                let to = request.to;
                let said = self
                    .ask(|reply| Ask::Yield {
                        execution: id,
                        to,
                        who,
                        reply,
                    })
                    .await?;
                Ok(ApiReply {
                    message: said?,
                    ..ApiReply::default()
                })
            }
            "reconfigure" => {
                let grant = request.grant.unwrap_or_default();
                self.reconfigure(&tenant, entry, grant, who).await
            }
            "adjust" => self.adjust(&tenant, entry, request.change, who).await,
            _ => {
                let sight = self.sight().await;
                self.change((verb, None), &tenant, entry, &who, &sight)
                    .await
            }
        };
        // Whoever asks knows it by the name that was given.
        answer.map_err(|words| words.replace(&id.to_string(), &asked))
    }

    /// The last message of the execution of this UUID or client's id.
    async fn find(&self, tenant: &Tenant, id: &str) -> Answered<Entry> {
        let uuid = id.parse::<ExecutionId>().ok();
        let client = id
            .parse::<ClientId>()
            .ok()
            .map(|c| ExecutionId::from_client(tenant, &c));
        if uuid.is_none() && client.is_none() {
            return Err(format!("{id:?} is neither a UUID nor a client's id"));
        }
        let deadline = Instant::now() + self.options.entrust.min(PATIENCE) + NEWBORN;
        loop {
            for execution in [uuid, client].into_iter().flatten() {
                let found = self.effects.ledger.last(tenant, execution).await;
                if let Some(entry) = found.map_err(|error| error.to_string())? {
                    return Ok(entry);
                }
            }
            if Instant::now() > deadline {
                return Err(format!(
                    "tenant {tenant} has no execution {id}; one that ended long ago is in PostgreSQL only (`fiec history`)"
                ));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn status(&self, entry: Entry) -> Answered<ApiReply> {
        let id = entry.message.state.execution;
        // The state is the ledger's; progress is a courtesy of the core.
        let progress = self
            .ask(|reply| Ask::Progress(id, reply))
            .await
            .ok()
            .flatten();
        let progress = progress.filter(|p| p.epoch == entry.message.state.epoch);
        Ok(ApiReply {
            state: Some(entry.message.state),
            progress,
            ..ApiReply::default()
        })
    }

    async fn why(&self, entry: Entry) -> Answered<ApiReply> {
        let state = entry.message.state;
        let (id, name) = (state.execution, called(&state));
        if state.phase.is_terminal() {
            return Err(format!(
                "{name} is {}; `fiec history {name}` tells its decisions",
                state.phase.as_str()
            ));
        }
        let why = self.ask(|reply| Ask::Why(id, reply)).await?;
        let mut why = why.ok_or_else(|| format!("{name} is not known yet; try again"))?;
        why.next = Some(duty::of(&state, self.effects.broker.now()));
        if let Some(binding) = state.phase.binding() {
            self.tell_binding(binding, &mut why).await;
        }
        Ok(ApiReply {
            why: Some(why),
            state: Some(state),
            ..ApiReply::default()
        })
    }

    /// Why it was bound to where it is, and whom that was chosen from: as its ledger says, while
    /// that still has the message.
    async fn tell_binding(&self, binding: &Binding, why: &mut Why) {
        let read = self.effects.ledger.by_sequence(binding.seq);
        let found = match tokio::time::timeout(self.options.control_timeout, read).await {
            Ok(Ok(entry)) => entry.message,
            Ok(Err(_)) | Err(_) => {
                why.summary += "; why it was bound there is in PostgreSQL (`fiec history`)";
                return;
            }
        };
        let from = found.state.author.strip_prefix("worker/");
        let from = from.and_then(|author| author.split('/').next()?.parse().ok());
        let moved_on = |event: &Event| matches!(event, Event::Yielded { .. });
        let handover = found.events.iter().any(moved_on);
        for event in found.events {
            if let Event::Bound {
                cause, decision, ..
            } = event
            {
                why.summary += &format!("; bound there: {}", cause.in_words());
                if let Some(place) = &mut why.place {
                    place.from = from.clone().filter(|_| handover);
                }
                (why.cause, why.decision) = (Some(cause), decision);
            }
        }
    }

    /// Changes something about an execution, and says what that comes to.
    async fn adjust(
        &self,
        tenant: &Tenant,
        entry: Entry,
        change: Option<Adjustment>,
        who: String,
    ) -> Answered<ApiReply> {
        let change = change.unwrap_or_default();
        change
            .check()
            .map_err(|error| format!("change.{}: {}", error.field, error.reason))?;
        let id = entry.message.state.execution;
        let name = called(&entry.message.state);
        let (told, said) = (Box::new(change.clone()), change.in_words());
        let foreseen = self.ask(|reply| Ask::Foresee(id, told, reply)).await?;
        let sight = self.sight().await;
        let (mut reply, parts) = self
            .change_whole(("adjust", Some(change)), tenant, entry, &who, &sight)
            .await?;
        reply.message = match foreseen {
            Ok(words) if words.is_empty() => format!("{name} is changed: {said}"),
            Ok(words) => format!("{name} is changed: {words}"),
            Err(words) => format!("{name} is changed, but {words}"),
        };
        reply.message += &parts;
        Ok(reply)
    }

    /// Changes one execution; `sight`: the nodes as they were seen for this request.
    pub(super) async fn change_one(
        &self,
        (verb, adjustment): (&str, Option<Adjustment>),
        tenant: &Tenant,
        mut entry: Entry,
        who: &str,
        sight: &Sight,
    ) -> Answered<ApiReply> {
        let id = entry.message.state.execution;
        let name = called(&entry.message.state);
        let deadline = Instant::now() + MOVE;
        let mut round = 0;
        while round < 16 {
            round += 1;
            let phase = entry.message.state.phase.clone();
            let events = match (verb, &phase) {
                (_, p) if p.is_terminal() => {
                    return Err(format!("{name} is {} already", p.as_str()));
                }
                ("resume", Phase::Paused { .. }) => vec![Event::Resumed {
                    who: who.to_owned(),
                }],
                // It pauses in a moment.
                ("resume", Phase::Started(_)) if is_asked(&entry.message.state, "pause") => {
                    if round >= PAUSE_ROUNDS {
                        return Err(format!(
                            "{name} has not come to the boundary at which it pauses; {NOT_YET}"
                        ));
                    }
                    entry = self.a_moment_later(tenant, id).await?;
                    continue;
                }
                ("resume", p) => return Err(format!("{name} {NOT_PAUSED} {}", p.as_str())),
                ("pause", Phase::Paused { who }) => {
                    return Err(format!("{name} was paused by {who} already"));
                }
                // Its worker starts it in a moment, and would have to be told anew.
                ("adjust", Phase::Bound(_)) if round < BOUND_ROUNDS => {
                    entry = self.a_moment_later(tenant, id).await?;
                    continue;
                }
                ("cancel" | "pause" | "adjust", Phase::Started(binding))
                    if verb == "pause" || !sight.is_lost(&binding.node) =>
                {
                    let asked = (verb, adjustment.as_ref());
                    let passed = self.pass_on(asked, &entry, binding, who, sight).await;
                    let failed = match passed {
                        Ok(reply) => return Ok(reply),
                        Err(failed) => failed,
                    };
                    // It may have moved on while it was asked.
                    if let Some(newer) = self.moved_on(tenant, id, &entry).await? {
                        entry = newer;
                        continue;
                    }
                    match failed {
                        NotPassed::Moving(_) if Instant::now() < deadline => {
                            entry = self.a_moment_later(tenant, id).await?;
                            round -= 1;
                            continue;
                        }
                        NotPassed::NotHeld => {
                            orphan_events(verb, who, adjustment.as_ref(), self.effects.broker.now())
                        }
                        NotPassed::Moving(error) | NotPassed::Because(error) => {
                            return Err(error);
                        }
                    }
                }
                ("cancel" | "adjust", _) => {
                    orphan_events(verb, who, adjustment.as_ref(), self.effects.broker.now())
                }
                ("pause", _) => vec![Event::Paused {
                    who: who.to_owned(),
                }],
                _ => return Err(format!("there is no request {verb}")),
            };
            let draft = Draft::new(
                &entry.into(),
                events.clone(),
                &self.effects.author,
                self.effects.broker.now(),
            )
            .map_err(|error| error.to_string())?;
            let room = self.room().await?;
            match self.effects.ledger.append(draft, Bytes::new()).await {
                Ok(tip) => {
                    let state = tip.state.clone();
                    room.send(Outcome::Changed(Box::new(tip), events));
                    self.settle_outbox(&state).await;
                    self.forget_state(&state).await;
                    let message = match verb {
                        "resume" => format!("{name} goes on as soon as a node takes it"),
                        _ => format!("{name} is {}", state.phase.as_str()),
                    };
                    return Ok(ApiReply {
                        message,
                        state: Some(state),
                        ..ApiReply::default()
                    });
                }
                Err(AppendError::Conflict) => {
                    let last = self.effects.ledger.last(tenant, id).await;
                    entry = last
                        .map_err(|error| error.to_string())?
                        .ok_or_else(|| format!("the ledger of {name} is gone"))?;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(format!(
            "{name} moves on faster than it can be changed; try again"
        ))
    }

    /// The last message of an execution that is about to move on.
    async fn a_moment_later(&self, tenant: &Tenant, id: ExecutionId) -> Answered<Entry> {
        tokio::time::sleep(BOUND_PAUSE).await;
        let last = self.effects.ledger.last(tenant, id).await;
        last.map_err(|error| error.to_string())?
            .ok_or_else(|| format!("the ledger of {id} is gone"))
    }

    /// Asks the worker: a program is given another grant while it runs. One that moves is waited
    /// for, and its next worker is asked.
    async fn reconfigure(
        &self,
        tenant: &Tenant,
        mut entry: Entry,
        grant: Grant,
        who: String,
    ) -> Answered<ApiReply> {
        check_grant(&grant)?;
        let deadline = Instant::now() + MOVE;
        loop {
            let state = &entry.message.state;
            let (execution, name) = (state.execution, called(state));
            let moving = match &state.phase {
                Phase::Started(binding) => {
                    let node = &binding.node;
                    let request = ControlRequest::Reconfigure {
                        execution,
                        epoch: state.epoch,
                        grant: grant.clone(),
                        who: who.clone(),
                    };
                    let timeout = self.options.control_timeout;
                    match self.effects.control(node, &request, timeout).await {
                        Ok(_) => {
                            return Ok(ApiReply {
                                message: format!(
                                    "{node} will give it to {name} at its next boundary"
                                ),
                                ..ApiReply::default()
                            });
                        }
                        Err(NoReply::Refused(reason)) => {
                            return Err(format!("{node} did not take it: {reason}"));
                        }
                        Err(NoReply::NotHeld(reason) | NoReply::Moving(reason)) => {
                            format!("{name} is moving ({node}: {reason}); try again once it runs")
                        }
                        Err(NoReply::Silent(reason)) => format!(
                            "{name} runs on {node}, which does not answer ({reason}); try again"
                        ),
                    }
                }
                Phase::Bound(_) => format!("{name} is bound; try again once it runs"),
                // It has run, and goes on in a moment.
                Phase::Pending if state.epoch > 0 => {
                    format!("{name} is pending; try again once it runs")
                }
                phase => {
                    return Err(format!(
                        "{name} is {}; only one that runs can be given more or less",
                        phase.as_str()
                    ));
                }
            };
            if Instant::now() >= deadline {
                return Err(moving);
            }
            entry = self.a_moment_later(tenant, execution).await?;
        }
    }

    /// Publishes what an execution owes that ends with no worker to do so.
    async fn settle_outbox(&self, state: &ExecutionState) {
        if state.outbox.is_none() || !state.phase.is_terminal() {
            return;
        }
        let settled = outbox::settle(&self.effects.broker, state);
        let failure = match tokio::time::timeout(self.options.control_timeout, settled).await {
            Ok(Ok(_)) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "not in time".to_owned(),
        };
        tracing::warn!(execution = %state.execution, failure,
            "what was emitted may not be published");
    }

    /// Drops the large σ of an execution that ends with no worker to do so.
    async fn forget_state(&self, state: &ExecutionState) {
        let Some(place) = state
            .boundary
            .as_ref()
            .filter(|_| state.phase.is_terminal())
        else {
            return;
        };
        let dropped = store::drop_last(&self.effects.broker, state.execution, place);
        let failure = match tokio::time::timeout(self.options.control_timeout, dropped).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "not in time".to_owned(),
        };
        tracing::warn!(execution = %state.execution, failure,
            "a large state was not dropped; it stays until its bucket's age limit");
    }

    /// The last message, where it differs from the one at hand.
    async fn moved_on(
        &self,
        tenant: &Tenant,
        id: ExecutionId,
        seen: &Entry,
    ) -> Answered<Option<Entry>> {
        let last = self
            .effects
            .ledger
            .last(tenant, id)
            .await
            .map_err(|error| error.to_string())?;
        Ok(last.filter(|last| {
            last.seq != seen.seq
                && !matches!(
                    (&last.message.state.phase, &seen.message.state.phase),
                    (Phase::Started(a), Phase::Started(b)) if a.seq == b.seq
                )
        }))
    }

    async fn pass_on(
        &self,
        (verb, adjustment): (&str, Option<&Adjustment>),
        entry: &Entry,
        binding: &Binding,
        who: &str,
        sight: &Sight,
    ) -> Result<ApiReply, NotPassed> {
        let (execution, who) = (entry.message.state.execution, who.to_owned());
        let name = called(&entry.message.state);
        let request = match adjustment {
            Some(change) => ControlRequest::Adjust {
                execution,
                who,
                change: change.clone(),
            },
            None if verb == "cancel" => ControlRequest::Cancel { execution, who },
            None => ControlRequest::Pause { execution, who },
        };
        let node = &binding.node;
        let silent = |reason: String| {
            format!(
                "{name} runs on {node}, which does not answer ({reason}); should the node be lost, \
                 the execution is bound anew within seconds, and the request can be made again"
            )
        };
        if let Some(reason) = sight.silence_of(node) {
            return Err(NotPassed::Because(silent(reason)));
        }
        match self
            .effects
            .control(node, &request, self.options.control_timeout)
            .await
        {
            Ok(_) => {
                let when = if verb == "cancel" {
                    "now"
                } else {
                    "at its next boundary"
                };
                Ok(ApiReply {
                    message: format!("{node} will {verb} {name} {when}"),
                    ..ApiReply::default()
                })
            }
            Err(NoReply::NotHeld(_)) => Err(NotPassed::NotHeld),
            Err(NoReply::Moving(reason)) => Err(NotPassed::Moving(format!(
                "{name} is moving ({node}: {reason}); try again once it runs"
            ))),
            Err(NoReply::Refused(reason)) => Err(NotPassed::Because(format!(
                "{node} did not take it: {reason}"
            ))),
            Err(NoReply::Silent(reason)) => {
                sight.was_silent(node, &reason);
                Err(NotPassed::Because(silent(reason)))
            }
        }
    }
}
