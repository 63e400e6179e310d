//! Changes of one execution: cancel, pause, resume, adjust. While it is started, only its worker
//! appends, so the request goes to that worker. Otherwise the event is appended here. The answer
//! comes after the append.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fiec_broker::{AppendError, Draft, Entry, outbox};
use fiec_schemas::messages::{ApiReply, ControlRequest, ExecutionVerb};
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::{
    Binding, BoundaryIndex, Cause, Event, ExecutionId, ExecutionState, Phase, PhaseKind,
    RequestKind, Started, Tenant, Timestamp,
};
use tokio::time::Instant;

use super::sight::Sight;
use super::{Answered, Api};
use crate::effects::NoReply;
use crate::events::Outcome;
use crate::refusal::Refusal;

/// Longest wait for a moving execution to run again before it is changed.
pub(super) const MOVE: Duration = Duration::from_secs(5);

/// How often a bound execution is read again before it is changed, and the pause between reads.
const BOUND_ROUNDS: u32 = 6;
const BOUND_PAUSE: Duration = Duration::from_millis(50);
/// How often an execution with an order to pause is read again before it is resumed.
const PAUSE_ROUNDS: u32 = 10;

/// A change of an execution by an event in its ledger.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    /// Ends it.
    Cancel,
    /// Pauses it until somebody resumes it.
    Pause,
    /// Resumes it.
    Resume,
    /// Changes its priority, thresholds, deadline, memory or nodes.
    Adjust(Adjustment),
    /// Starts it again after it failed or was cancelled, or while it is held.
    Retry {
        /// The boundary to start from. None: the last committed one.
        from: Option<BoundaryIndex>,
        /// Settings that change with it, such as more memory or a later deadline.
        with: Option<Adjustment>,
    },
}

impl Change {
    /// The verb of the request for this change.
    pub(super) fn verb(&self) -> ExecutionVerb {
        match self {
            Self::Cancel => ExecutionVerb::Cancel,
            Self::Pause => ExecutionVerb::Pause,
            Self::Resume => ExecutionVerb::Resume,
            Self::Adjust(_) => ExecutionVerb::Adjust,
            Self::Retry { .. } => ExecutionVerb::Retry,
        }
    }
}

/// A requested change.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    /// The change.
    pub(super) change: &'a Change,
    /// The tenant of the executions.
    pub(super) tenant: &'a Tenant,
    /// The person or program that asks.
    pub(super) who: &'a str,
    /// The lost and silent nodes, as this request sees them.
    pub(super) sight: &'a Sight,
    /// The execution as the asker calls it. `None`: as its client calls it.
    pub(super) name: Option<&'a str>,
}

/// The execution's name for people: its client's id, or its UUID.
pub(super) fn called(state: &ExecutionState) -> String {
    let client = state.client_id.as_ref();
    client.map_or_else(|| state.execution.to_string(), ToString::to_string)
}

/// True if this was requested of the execution and is not done yet.
pub(super) fn is_requested(state: &ExecutionState, what: RequestKind) -> bool {
    let requested = state.requested();
    requested.is_some_and(|requested| requested.what == what)
}

/// True if the execution is paused, or has an order to pause.
pub(super) fn is_paused(state: &ExecutionState) -> bool {
    is_requested(state, RequestKind::Pause) || matches!(state.phase, Phase::Paused { .. })
}

/// Why a request was not passed on to the execution's node.
enum NotPassed {
    /// The node does not hold the execution, so nobody else would append.
    NotHeld,
    /// The node does not answer. It will hear of the cancellation.
    NotHeard,
    /// The node refuses, at least for now.
    Refused(Refusal),
}

/// The events of a change to an execution that no node holds, or whose node must not have a say.
fn orphan_events(change: &Change, who: &str, now: Timestamp) -> Vec<Event> {
    let who = who.to_owned();
    match change {
        Change::Retry { .. } => vec![Event::Retried { who }],
        Change::Cancel => vec![Event::Cancelled { who }],
        Change::Adjust(adjustment) => vec![Event::Adjusted {
            who,
            change: adjustment.clone(),
        }],
        Change::Resume => vec![Event::Resumed { who }],
        Change::Pause => {
            let reason = "the execution was paused while no node held it".to_owned();
            let yielded = Event::Yielded {
                cause: Cause::Orphaned { reason },
                computed_until: now,
            };
            vec![yielded, Event::Paused { who }]
        }
    }
}

fn changed(name: &str, state: Arc<ExecutionState>) -> ApiReply {
    ApiReply {
        message: format!("{name} is {}", state.phase.as_str()),
        state: Some(state),
        ..ApiReply::default()
    }
}

impl Api {
    /// Changes one execution, without its parts.
    pub(super) async fn change_one(
        &self,
        asked: Asked<'_>,
        mut entry: Entry,
    ) -> Answered<ApiReply> {
        let Asked {
            change,
            tenant,
            who,
            sight,
            ..
        } = asked;
        let id = entry.message.state.execution;
        let own_name = || called(&entry.message.state);
        let name = asked.name.map_or_else(own_name, str::to_owned);
        let deadline = Instant::now() + MOVE;
        let mut round = 0;
        while round < 16 {
            round += 1;
            let phase = entry.message.state.phase.clone();
            let now = self.effects.broker.now();
            let events = match (change, &phase) {
                (Change::Retry { from, with }, _) => {
                    self.retry_events(asked, *from, with.as_ref(), &entry.message.state)
                        .await?
                }
                // Its node was silent, and has done it all the same.
                (Change::Cancel, Phase::Cancelled) if round > 1 => {
                    let state = entry.message.state.clone();
                    return Ok(changed(&name, state));
                }
                (_, p) if p.is_terminal() => {
                    let phase = p.kind();
                    return Err(Refusal::Ended { name, phase });
                }
                (Change::Resume, Phase::Paused { .. }) => orphan_events(change, who, now),
                // It pauses at its next boundary. Wait for that.
                (Change::Resume, Phase::Started(_))
                    if is_requested(&entry.message.state, RequestKind::Pause) =>
                {
                    if round >= PAUSE_ROUNDS {
                        return Err(Refusal::Pausing { name });
                    }
                    entry = self.a_moment_later(tenant, id).await?;
                    continue;
                }
                (Change::Resume, p) => {
                    let phase = p.kind();
                    return Err(Refusal::NotPaused { name, phase });
                }
                (Change::Pause, Phase::Held { .. }) => return Err(Refusal::IsHeld { name }),
                (Change::Pause, Phase::Paused { who }) => {
                    let who = who.clone();
                    return Err(Refusal::AlreadyPaused { name, who });
                }
                // Its worker starts it in a moment with the old settings. Wait for that, and pass
                // the change on.
                (Change::Adjust(_), Phase::Bound(_)) if round < BOUND_ROUNDS => {
                    entry = self.a_moment_later(tenant, id).await?;
                    continue;
                }
                (_, Phase::Started(Started { binding, .. })) if !sight.is_lost(&binding.node) => {
                    let passed = self.pass_on(asked, id, &name, binding).await;
                    let failed = match passed {
                        Ok(reply) => return Ok(reply),
                        Err(failed) => failed,
                    };
                    // It may have moved while the node was asked.
                    if let Some(newer) = self.moved_on(tenant, id, &entry).await? {
                        entry = newer;
                        continue;
                    }
                    match failed {
                        NotPassed::Refused(Refusal::Moving { .. }) if Instant::now() < deadline => {
                            entry = self.a_moment_later(tenant, id).await?;
                            round -= 1;
                            continue;
                        }
                        NotPassed::Refused(refusal) => return Err(refusal),
                        NotPassed::NotHeld | NotPassed::NotHeard => orphan_events(change, who, now),
                    }
                }
                // Its node is lost.
                (Change::Pause, Phase::Started(_)) => orphan_events(change, who, now),
                (Change::Pause, _) => vec![Event::Paused {
                    who: who.to_owned(),
                }],
                (Change::Cancel | Change::Adjust(_), _) => orphan_events(change, who, now),
            };
            let draft = Draft::new(&entry.into(), events.clone(), &self.effects.author, now)?;
            let room = self.room().await?;
            match self.effects.ledger.append(draft, Bytes::new()).await {
                Ok(tip) => {
                    let state = tip.state.clone();
                    room.send(Outcome::Changed(Box::new(tip), events));
                    self.settle_outbox(&state).await;
                    let mut reply = changed(&name, state);
                    if let Change::Resume | Change::Retry { .. } = change {
                        reply.message =
                            format!("{name} continues as soon as a node is free for it");
                    }
                    return Ok(reply);
                }
                Err(AppendError::Conflict) => {
                    let last = self.effects.ledger.last(tenant, id).await?;
                    let Some(last) = last else {
                        return Err(Refusal::LedgerGone { name });
                    };
                    entry = last;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(Refusal::Overtaken { name })
    }

    /// Pauses, and reads the last message of an execution that is about to change.
    pub(super) async fn a_moment_later(&self, tenant: &Tenant, id: ExecutionId) -> Answered<Entry> {
        tokio::time::sleep(BOUND_PAUSE).await;
        let last = self.effects.ledger.last(tenant, id).await?;
        let name = || id.to_string();
        last.ok_or_else(|| Refusal::LedgerGone { name: name() })
    }

    /// Publishes the outputs that an execution owes if it ended without a worker.
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
            "the emitted messages may not be published");
    }

    /// The last message, if it differs from `entry`.
    async fn moved_on(
        &self,
        tenant: &Tenant,
        id: ExecutionId,
        seen: &Entry,
    ) -> Answered<Option<Entry>> {
        let last = self.effects.ledger.last(tenant, id).await?;
        Ok(last.filter(|last| {
            last.seq != seen.seq
                && !matches!(
                    (&last.message.state.phase, &seen.message.state.phase),
                    (Phase::Started(a), Phase::Started(b)) if a.binding.seq == b.binding.seq
                )
        }))
    }

    /// Asks the execution's node to make the change.
    async fn pass_on(
        &self,
        asked: Asked<'_>,
        execution: ExecutionId,
        name: &str,
        binding: &Binding,
    ) -> Result<ApiReply, NotPassed> {
        let (node, sight, name) = (&binding.node, asked.sight, name.to_owned());
        let who = asked.who.to_owned();
        let (request, when) = match asked.change {
            Change::Cancel => (ControlRequest::Cancel { execution, who }, "now"),
            Change::Adjust(change) => {
                let change = change.clone();
                let request = ControlRequest::Adjust {
                    execution,
                    who,
                    change,
                };
                (request, "at its next boundary")
            }
            Change::Pause => (
                ControlRequest::Pause { execution, who },
                "at its next boundary",
            ),
            Change::Resume | Change::Retry { .. } => {
                let phase = PhaseKind::Started;
                return Err(NotPassed::Refused(Refusal::NotPaused { name, phase }));
            }
        };
        let reason = match sight.silence_of(node) {
            Some(reason) => {
                if let Change::Cancel = asked.change {
                    self.effects.leave_word(node, &request).await;
                }
                reason
            }
            None => {
                let timeout = self.options.control_timeout;
                let verb = asked.change.verb();
                match self.effects.control(node, &request, timeout).await {
                    Ok(_) => {
                        return Ok(ApiReply {
                            message: format!("{node} will {verb} {name} {when}"),
                            ..ApiReply::default()
                        });
                    }
                    Err(NoReply::NotHeld(_)) => return Err(NotPassed::NotHeld),
                    Err(NoReply::Moving(reason)) => {
                        let node = node.clone();
                        return Err(NotPassed::Refused(Refusal::Moving { name, node, reason }));
                    }
                    Err(NoReply::Refused(reason)) => {
                        let node = node.clone();
                        return Err(NotPassed::Refused(Refusal::NodeRefused { node, reason }));
                    }
                    Err(NoReply::Silent(reason)) => {
                        sight.was_silent(node, &reason);
                        reason
                    }
                }
            }
        };
        // A cancellation loses nothing that anybody still wants, so the node is not waited for: the
        // event fences it. A pause or a change would throw away what it has not committed.
        if let Change::Cancel = asked.change {
            return Err(NotPassed::NotHeard);
        }
        let node = node.clone();
        Err(NotPassed::Refused(Refusal::NodeSilent {
            name,
            node,
            reason,
        }))
    }
}
