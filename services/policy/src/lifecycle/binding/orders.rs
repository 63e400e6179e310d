//! Orders to the holders of executions.

use fiec_schemas::limits::EVIDENCE_LIMIT;
use fiec_schemas::messages::{ControlRequest, Destination};
use fiec_schemas::substrate::HOST;
use fiec_schemas::{Cause, Evidence, ExecutionId, NodeId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::places::Claim;
use crate::lifecycle::cluster::watch::Watched;
use crate::lifecycle::cluster::{Execution, NodeIx, Order, Stage, Wanted};
use crate::lifecycle::placement::{Ask, Choice, Leaving, Operators};
use crate::time::Millis;
use crate::{Action, ControlOutcome, Ticket, YieldRefusal};

/// What an execution must leave for this cause: only its device if the device presses, else its
/// node.
pub(crate) fn leaves(e: &Execution, node: NodeIx, cause: &Cause) -> Leaving {
    match cause {
        Cause::Pressure { evidence } if evidence.device.is_some() => {
            Leaving::Place(node, e.device())
        }
        // Another device of the same node may have more memory.
        Cause::Asked { .. } if e.device().is_some() => Leaving::Place(node, e.device()),
        _ => Leaving::Node(node),
    }
}

/// An execution that is preempted, and for which one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GivesWay {
    /// The preempted execution.
    pub id: ExecutionId,
    /// The node that holds it.
    pub node: NodeIx,
    /// The execution that takes its place.
    pub to: ExecutionId,
    /// Expected remaining time of `to`, in ms.
    pub rest_ms: u64,
}

impl Lifecycle {
    pub(crate) fn pressure_on(&self, id: ExecutionId, ix: NodeIx) -> Option<Cause> {
        let now = self.now;
        let e = self.cluster.execution(id)?;
        let node = self.cluster.node(ix);
        if !node.is_fresh(now.mono, &self.config) {
            return None;
        }
        let patience = if self.is_mine(id) {
            0
        } else {
            self.config.order_grace_ms
        };
        let at = Millis(now.mono.0.saturating_sub(patience));
        let floor = self.config.residency_floor_ms;
        let judged = node.judged(self.cluster.profiles.get(e.profile), e.device());
        let watched = node
            .watch(e.profile)?
            .pressing(judged, at, e.arrived, floor)?;
        self.evidence(ix, watched).map(|evidence| Cause::Pressure {
            evidence: Box::new(evidence),
        })
    }

    pub(crate) fn evidence(&self, ix: NodeIx, watched: &Watched) -> Option<Evidence> {
        let now = self.now;
        let node = self.cluster.node(ix);
        let vector = node.vector.as_ref()?;
        Some(Evidence {
            node: node.id.clone(),
            signal: watched.signal,
            device: watched.device.as_deref().map(str::to_owned),
            value: watched.automaton.value()?,
            threshold: watched.threshold,
            since: now.stamp_of(watched.automaton.pressing_since()?),
            vector: vector
                .readings
                .iter()
                .filter(|r| r.value.is_some())
                .take(EVIDENCE_LIMIT)
                .cloned()
                .collect(),
        })
    }

    /// Orders a yield to the chosen place.
    pub(crate) fn order_yield_to(
        &mut self,
        id: ExecutionId,
        choice: Choice,
        cause: Cause,
        ticket: Option<Ticket>,
    ) {
        let profile = self.cluster.execution(id).map(|e| e.profile);
        let profile = profile.and_then(|ix| self.cluster.profiles.get(ix));
        let order = Order {
            to: Some(choice.node),
            claim: Claim::of(profile, choice.device),
            decision: Some(choice.decision),
            ..Order::new(Wanted::Yield, cause)
        };
        self.give_order(id, order, ticket);
    }

    /// Orders a yield without a destination: the execution becomes pending.
    pub(crate) fn order_yield(&mut self, id: ExecutionId, cause: Cause) {
        self.give_order(id, Order::new(Wanted::Yield, cause), None);
    }

    /// Gives an order, and repeats it until an answer or a boundary comes.
    pub(crate) fn give_order(&mut self, id: ExecutionId, order: Order, ticket: Option<Ticket>) {
        let now = self.now;
        self.cluster.set_order(id, order);
        // The order is reviewed again even if the shell never answers.
        self.cluster
            .set_due(id, now.mono.plus(self.config.order_repeat_ms));
        self.send_order(id, ticket);
    }

    pub(crate) fn send_order(&mut self, id: ExecutionId, ticket: Option<Ticket>) {
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        let (Some(order), Stage::Started(from, _)) = (e.order(), e.stage) else {
            return;
        };
        let from = self.cluster.node(from).id.clone();
        let (execution, epoch, cause) = (id, e.epoch, order.cause.clone());
        let to = order.to.map(|to| self.cluster.node(to));
        let request = match (order.wants, to) {
            (Wanted::Park(keep), _) => ControlRequest::Park {
                execution,
                epoch,
                cause,
                keep,
            },
            (Wanted::Unpark, _) => ControlRequest::Unpark {
                execution,
                epoch,
                reason: cause.in_words(),
            },
            (Wanted::Yield, None) => ControlRequest::Yield {
                execution,
                epoch,
                cause,
                to: None,
                decision: None,
            },
            (Wanted::Yield, Some(to)) => {
                let Some(descriptor) = &to.descriptor else {
                    return;
                };
                let profile = self.cluster.profiles.get(e.profile);
                let substrate = to.devices.id_of(order.claim.device()).to_owned();
                self.out.push(Action::Control {
                    node: to.id.clone(),
                    request: ControlRequest::Prepare {
                        execution,
                        tenant: e.tenant.clone(),
                        program: profile.map_or_else(String::new, |p| p.program.clone()),
                        state_bytes: e.state_bytes,
                        substrate: Some(substrate.clone()).filter(|place| place != HOST),
                    },
                    ticket: None,
                });
                ControlRequest::Yield {
                    execution,
                    epoch,
                    cause,
                    to: Some(Destination {
                        node: to.id.clone(),
                        instance: descriptor.instance,
                        substrate,
                    }),
                    decision: order.decision.clone(),
                }
            }
        };
        self.out.push(Action::Control {
            node: from,
            request,
            ticket,
        });
    }

    /// Handles the holder's answer to an order.
    pub(crate) fn ordered(&mut self, id: ExecutionId, epoch: u64, outcome: ControlOutcome) {
        let now = self.now;
        let Some(e) = self.cluster.execution_mut(id) else {
            return;
        };
        let Stage::Started(ix, _) = e.stage else {
            return;
        };
        if e.epoch != epoch || e.order().is_none() {
            return;
        }
        match outcome {
            ControlOutcome::Taken => {
                if let Some(order) = &mut e.extra().order {
                    order.taken = true;
                }
                self.cluster
                    .set_due(id, now.mono.plus(self.config.order_repeat_ms));
            }
            ControlOutcome::Refused(reason) => {
                if e.order()
                    .is_some_and(|o| matches!(o.wants, Wanted::Park(_)))
                {
                    self.cannot_park(id);
                }
                self.retry_order(id, ix, &reason);
            }
            // It says nothing of whether the program can be parked.
            ControlOutcome::Moving(reason) => self.retry_order(id, ix, &reason),
            ControlOutcome::NotHeld => {
                self.suspect(ix);
                self.retry_order(id, ix, "it does not hold the execution");
            }
            ControlOutcome::NoAnswer => self.retry_order(id, ix, "it did not answer"),
        }
    }

    pub(crate) fn retry_order(&mut self, id: ExecutionId, ix: NodeIx, reason: &str) {
        let now = self.now;
        let order = self.cluster.clear_order(id);
        let until = now.mono.plus(self.config.order_retry_ms);
        let note = format!(
            "{} did not take the order to {}: {reason}",
            self.cluster.node(ix).id,
            order.map_or("yield", |order| order.wants.as_str())
        );
        self.avoid(id, ix, until, note);
    }

    /// Repeats an order that was accepted long ago without a boundary since. The destination stays
    /// if it is still good, else another one is chosen.
    pub(crate) fn repeat_order(&mut self, id: ExecutionId) {
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        let Stage::Started(from, _) = e.stage else {
            return;
        };
        if e.order().is_none() {
            return;
        }
        let Some(order) = self.cluster.clear_order(id) else {
            return;
        };
        match (order.wants, order.to) {
            // Whether to resume is decided again.
            (Wanted::Unpark, _) => return,
            (Wanted::Park(_), _) | (Wanted::Yield, None) => {
                return self.give_order(id, order, None);
            }
            (Wanted::Yield, Some(_)) => {}
        }
        let Some(e) = self.cluster.execution(id) else {
            return;
        };
        let mut ask = Ask {
            only: order.to,
            avoid: Vec::new(),
            ..Ask::of(e)
        }
        .leaves(Some(leaves(e, from, &order.cause)));
        let choose = match order.cause {
            Cause::Operator { .. } => Self::choose_for_operator,
            _ => Self::choose,
        };
        let mut choice = choose(self, &ask);
        if choice.is_none() {
            ask.only = None;
            choice = choose(self, &ask);
        }
        if let Some(choice) = choice {
            self.order_yield_to(id, choice, order.cause, None);
        }
    }

    pub(crate) fn plan_yield(
        &mut self,
        id: ExecutionId,
        to: Option<&NodeId>,
    ) -> Result<(Choice, bool), YieldRefusal> {
        let now = self.now;
        let e = self.cluster.execution(id).ok_or(YieldRefusal::NotLive)?;
        if e.is_appending() {
            return Err(YieldRefusal::Busy);
        }
        let (from, started) = match e.stage {
            Stage::Pending => return Err(YieldRefusal::Pending),
            Stage::Paused => return Err(YieldRefusal::Paused),
            Stage::Held => return Err(YieldRefusal::HasFailed),
            Stage::Verifying => return Err(YieldRefusal::Verifying),
            Stage::Bound(from, _) => (from, false),
            Stage::Started(from, _) => (from, true),
        };
        let only = match to {
            Some(name) if !self.has_node(name) => {
                return Err(YieldRefusal::UnknownNode(self.no_such(name)));
            }
            Some(name) => self.cluster.find(name),
            None => None,
        };
        if only == Some(from) {
            let here = self.cluster.node(from).id.clone();
            return Err(YieldRefusal::AlreadyThere(here));
        }
        let ask = Ask {
            leaving: Some(Leaving::Node(from)),
            only,
            avoid: Vec::new(),
            ..Ask::of(e)
        };
        self.choose_for_operator(&ask)
            .map(|choice| (choice, started))
            .ok_or_else(|| {
                let extra = self.cluster.execution(id).and_then(|e| e.extra.as_ref());
                let change = extra.and_then(|x| x.adjusted.as_deref());
                let operators = change.map(|change| Operators {
                    execution: id,
                    change,
                });
                let review = self.review(now, &ask, operators);
                let rejected = review.candidates.into_iter();
                let mut rejected = rejected.map(|c| (c.node, c.rejected));
                match to {
                    Some(to) => YieldRefusal::Rejected {
                        to: to.clone(),
                        reasons: rejected
                            .filter(|(node, _)| node == to)
                            .flat_map(|(_, reasons)| reasons)
                            .collect(),
                    },
                    None => {
                        let from = &self.cluster.node(from).id;
                        let others: Vec<_> = rejected.by_ref().filter(|(n, _)| n != from).collect();
                        match others.is_empty() {
                            true => YieldRefusal::NoOther,
                            false => YieldRefusal::NoPlace(others),
                        }
                    }
                }
            })
    }
}
