//! Inputs of the policy in a trace: owned copies of [`Input`] with stable names.

use fiec_policy::holds::{Fate, Seen};
use fiec_policy::verify::Named;
use fiec_policy::{ControlOutcome, Input, LedgerView, ProbeOutcome, Ticket};
use fiec_schemas::messages::Holding;
use fiec_schemas::quota::{Quota, Reservations};
use fiec_schemas::trust::{Proof, Quarantine, SignedProof, Verdict, VerifiedUpTo};
use fiec_schemas::{
    ExecutionId, HardwareVector, InstanceId, NodeDescriptor, NodeFlags, NodeId, Phase, Sequence,
    Submission, Tenant,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::text::MARK;

/// A recorded input.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Recorded {
    Ledger(Message),
    Reread(Message),
    Spec {
        execution: ExecutionId,
        spec: Box<Submission>,
    },
    Appended {
        execution: ExecutionId,
        seq: Sequence,
        epoch: u64,
        phase: Phase,
    },
    Vanished {
        execution: ExecutionId,
    },
    Container {
        program: String,
    },
    Descriptor {
        descriptor: Box<NodeDescriptor>,
    },
    Gone {
        node: NodeId,
    },
    Flags {
        node: NodeId,
        flags: NodeFlags,
    },
    Proof {
        node: NodeId,
        signed: SignedProof,
        /// None: the proof does not count.
        judged: Option<Proof>,
    },
    Quarantine {
        node: NodeId,
        quarantine: Quarantine,
    },
    Verdict {
        verdict: Verdict,
    },
    Recalled {
        execution: ExecutionId,
        up_to: UpTo,
        named: Named,
    },
    Vector {
        vector: HardwareVector,
        age_ms: u64,
    },
    Probe {
        node: NodeId,
        /// None: no instance answered.
        answered: Option<InstanceId>,
    },
    Holdings {
        node: NodeId,
        instance: InstanceId,
        held: Vec<Holding>,
    },
    Ordered {
        execution: ExecutionId,
        epoch: u64,
        answer: OrderReply,
    },
    SplitAnswered {
        execution: ExecutionId,
        epoch: u64,
        answer: OrderReply,
    },
    Ended {
        execution: ExecutionId,
        seen: Ending,
    },
    Aged {
        up_to: Sequence,
    },
    Quota {
        tenant: Tenant,
        quota: Option<Quota>,
    },
    Reserved {
        tenant: Tenant,
        table: Option<(Sequence, Reservations)>,
        answer: bool,
    },
    Replica {
        id: InstanceId,
        leaving: bool,
    },
    Yield {
        ticket: Ticket,
        execution: ExecutionId,
        to: Option<NodeId>,
        who: String,
    },
    Tenant {
        tenant: Tenant,
        weight: f64,
    },
    Connected {
        connected: bool,
    },
    Lost,
    Loaded,
    Tick,
}

/// A ledger message, as far as the policy reads it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    seq: Sequence,
    /// The view as JSON; [`LedgerView::read`] reads it.
    message: Value,
}

/// An answer to an order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OrderReply {
    Taken,
    Refused,
    Moving,
    NotHeld,
    NoAnswer,
}

/// The last message of a ledger.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Lives,
    Vanished,
    Completed,
    Failed,
    Cancelled,
    Returned,
}

/// How far an execution is verified.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpTo {
    /// It cannot be read now.
    Unknown,
    Nothing,
    Stored(VerifiedUpTo),
}

impl Recorded {
    /// The recorded form of an input.
    ///
    /// # Errors
    /// If JSON cannot hold a ledger message.
    pub fn of(input: &Input<'_>) -> Result<Self, serde_json::Error> {
        Ok(match input {
            Input::Ledger(view) => Self::Ledger(Message::of(view)?),
            Input::Reread(view) => Self::Reread(Message::of(view)?),
            Input::Spec { execution, spec } => Self::Spec {
                execution: *execution,
                spec: Box::new((*spec).clone()),
            },
            Input::Appended {
                execution,
                seq,
                epoch,
                phase,
            } => Self::Appended {
                execution: *execution,
                seq: *seq,
                epoch: *epoch,
                phase: (*phase).clone(),
            },
            Input::Vanished { execution } => Self::Vanished {
                execution: *execution,
            },
            Input::Container(program) => Self::Container {
                program: (*program).to_owned(),
            },
            Input::Descriptor(descriptor) => Self::Descriptor {
                descriptor: descriptor.clone(),
            },
            Input::Gone(node) => Self::Gone {
                node: (*node).clone(),
            },
            Input::Flags(node, flags) => Self::Flags {
                node: (*node).clone(),
                flags: flags.clone(),
            },
            Input::Proof {
                node,
                signed,
                judged,
            } => Self::Proof {
                node: (*node).clone(),
                signed: (*signed).clone(),
                judged: judged.as_ref().ok().cloned(),
            },
            Input::Quarantine(node, quarantine) => Self::Quarantine {
                node: (*node).clone(),
                quarantine: quarantine.clone(),
            },
            Input::Verdict(verdict) => Self::Verdict {
                verdict: verdict.clone(),
            },
            Input::Recalled {
                execution,
                up_to,
                named,
            } => Self::Recalled {
                execution: *execution,
                up_to: match up_to {
                    Err(_) => UpTo::Unknown,
                    Ok(None) => UpTo::Nothing,
                    Ok(Some(up_to)) => UpTo::Stored(up_to.clone()),
                },
                named: named.clone(),
            },
            Input::Vector(vector, age_ms) => Self::Vector {
                vector: vector.clone(),
                age_ms: *age_ms,
            },
            Input::Probe(node, outcome) => Self::Probe {
                node: (*node).clone(),
                answered: match outcome {
                    ProbeOutcome::Answered(instance) => Some(*instance),
                    ProbeOutcome::Silent => None,
                },
            },
            Input::Holdings {
                node,
                instance,
                held,
            } => Self::Holdings {
                node: (*node).clone(),
                instance: *instance,
                held: held.to_vec(),
            },
            Input::Ordered {
                execution,
                epoch,
                outcome,
            } => Self::Ordered {
                execution: *execution,
                epoch: *epoch,
                answer: OrderReply::of(outcome),
            },
            Input::SplitAnswered {
                execution,
                epoch,
                outcome,
            } => Self::SplitAnswered {
                execution: *execution,
                epoch: *epoch,
                answer: OrderReply::of(outcome),
            },
            Input::Ended { execution, seen } => Self::Ended {
                execution: *execution,
                seen: Ending::of(*seen),
            },
            Input::Aged(up_to) => Self::Aged { up_to: *up_to },
            Input::Quota(tenant, quota) => Self::Quota {
                tenant: (*tenant).clone(),
                quota: quota.clone(),
            },
            Input::Reserved {
                tenant,
                table,
                answer,
            } => Self::Reserved {
                tenant: (*tenant).clone(),
                table: table.map(|(seq, table)| (seq, table.clone())),
                answer: *answer,
            },
            Input::Replica { id, leaving } => Self::Replica {
                id: *id,
                leaving: *leaving,
            },
            Input::Yield {
                ticket,
                execution,
                to,
                who,
            } => Self::Yield {
                ticket: *ticket,
                execution: *execution,
                to: to.cloned(),
                who: (*who).to_owned(),
            },
            Input::Tenant { tenant, weight } => Self::Tenant {
                tenant: (*tenant).clone(),
                weight: *weight,
            },
            Input::Connected(connected) => Self::Connected {
                connected: *connected,
            },
            Input::Lost => Self::Lost,
            Input::Loaded => Self::Loaded,
            Input::Tick => Self::Tick,
        })
    }

    /// Its kind and its JSON; `Null` if it has no more than its kind.
    ///
    /// # Errors
    /// If JSON cannot hold a value.
    pub fn describe(&self) -> Result<(String, Value), serde_json::Error> {
        match serde_json::to_value(self)? {
            // A variant with fields is an object of one field, which has the variant's name.
            Value::Object(variant) => Ok(variant.into_iter().next().unwrap_or_default()),
            Value::String(kind) => Ok((kind, Value::Null)),
            other => Ok((other.to_string(), Value::Null)),
        }
    }

    /// Reads the kind and the JSON of a line.
    ///
    /// # Errors
    /// If there is no such kind, or the JSON has another form.
    pub fn read(kind: &str, body: Option<&str>) -> Result<Self, serde_json::Error> {
        let name = Value::String(kind.to_owned());
        let whole = match body {
            None => name,
            Some(body) => Value::Object(
                [(kind.to_owned(), serde_json::from_str(body)?)]
                    .into_iter()
                    .collect(),
            ),
        };
        serde_json::from_value(whole)
    }

    /// Gives it as an input to `take`.
    ///
    /// # Errors
    /// If a ledger message has another form.
    pub fn give<T>(self, take: impl FnOnce(Input<'_>) -> T) -> Result<T, String> {
        let input = match &self {
            Self::Ledger(message) => return message.give(|view| take(Input::Ledger(view))),
            Self::Reread(message) => return message.give(|view| take(Input::Reread(view))),
            Self::Spec { execution, spec } => Input::Spec {
                execution: *execution,
                spec,
            },
            Self::Appended {
                execution,
                seq,
                epoch,
                phase,
            } => Input::Appended {
                execution: *execution,
                seq: *seq,
                epoch: *epoch,
                phase,
            },
            Self::Vanished { execution } => Input::Vanished {
                execution: *execution,
            },
            Self::Container { program } => Input::Container(program),
            Self::Descriptor { descriptor } => Input::Descriptor(descriptor.clone()),
            Self::Gone { node } => Input::Gone(node),
            Self::Flags { node, flags } => Input::Flags(node, flags.clone()),
            Self::Proof {
                node,
                signed,
                judged,
            } => Input::Proof {
                node,
                signed,
                judged: judged.clone().ok_or_else(|| MARK.to_owned()),
            },
            Self::Quarantine { node, quarantine } => Input::Quarantine(node, quarantine.clone()),
            Self::Verdict { verdict } => Input::Verdict(verdict.clone()),
            Self::Recalled {
                execution,
                up_to,
                named,
            } => Input::Recalled {
                execution: *execution,
                up_to: match up_to {
                    UpTo::Unknown => Err(MARK.to_owned()),
                    UpTo::Nothing => Ok(None),
                    UpTo::Stored(up_to) => Ok(Some(up_to.clone())),
                },
                named: named.clone(),
            },
            Self::Vector { vector, age_ms } => Input::Vector(vector.clone(), *age_ms),
            Self::Probe { node, answered } => {
                let outcome = answered.map_or(ProbeOutcome::Silent, ProbeOutcome::Answered);
                Input::Probe(node, outcome)
            }
            Self::Holdings {
                node,
                instance,
                held,
            } => Input::Holdings {
                node,
                instance: *instance,
                held,
            },
            Self::Ordered {
                execution,
                epoch,
                answer,
            } => Input::Ordered {
                execution: *execution,
                epoch: *epoch,
                outcome: answer.outcome(),
            },
            Self::SplitAnswered {
                execution,
                epoch,
                answer,
            } => Input::SplitAnswered {
                execution: *execution,
                epoch: *epoch,
                outcome: answer.outcome(),
            },
            Self::Ended { execution, seen } => Input::Ended {
                execution: *execution,
                seen: seen.seen(),
            },
            Self::Aged { up_to } => Input::Aged(*up_to),
            Self::Quota { tenant, quota } => Input::Quota(tenant, quota.clone()),
            Self::Reserved {
                tenant,
                table,
                answer,
            } => Input::Reserved {
                tenant,
                table: table.as_ref().map(|(seq, table)| (*seq, table)),
                answer: *answer,
            },
            Self::Replica { id, leaving } => Input::Replica {
                id: *id,
                leaving: *leaving,
            },
            Self::Yield {
                ticket,
                execution,
                to,
                who,
            } => Input::Yield {
                ticket: *ticket,
                execution: *execution,
                to: to.as_ref(),
                who,
            },
            Self::Tenant { tenant, weight } => Input::Tenant {
                tenant,
                weight: *weight,
            },
            Self::Connected { connected } => Input::Connected(*connected),
            Self::Lost => Input::Lost,
            Self::Loaded => Input::Loaded,
            Self::Tick => Input::Tick,
        };
        Ok(take(input))
    }
}

impl Message {
    fn of(view: &LedgerView<'_>) -> Result<Self, serde_json::Error> {
        let mut message = serde_json::to_value(view)?;
        drop_absent(&mut message);
        Ok(Self {
            seq: view.seq,
            message,
        })
    }

    fn give<T>(&self, take: impl FnOnce(&LedgerView<'_>) -> T) -> Result<T, String> {
        let text = self.message.to_string();
        let view = LedgerView::read(&text, self.seq).map_err(|error| error.to_string())?;
        Ok(take(&view))
    }
}

/// Removes the fields of a view that its message does not have. The submission stays as it is.
fn drop_absent(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(drop_absent),
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            let others = fields.iter_mut().filter(|(name, _)| *name != "spec");
            others.for_each(|(_, field)| drop_absent(field));
        }
        _ => {}
    }
}

impl OrderReply {
    fn of(outcome: &ControlOutcome) -> Self {
        match outcome {
            ControlOutcome::Taken => Self::Taken,
            ControlOutcome::Refused(_) => Self::Refused,
            ControlOutcome::Moving(_) => Self::Moving,
            ControlOutcome::NotHeld => Self::NotHeld,
            ControlOutcome::NoAnswer => Self::NoAnswer,
        }
    }

    fn outcome(&self) -> ControlOutcome {
        match self {
            Self::Taken => ControlOutcome::Taken,
            Self::Refused => ControlOutcome::Refused(MARK.to_owned()),
            Self::Moving => ControlOutcome::Moving(MARK.to_owned()),
            Self::NotHeld => ControlOutcome::NotHeld,
            Self::NoAnswer => ControlOutcome::NoAnswer,
        }
    }
}

impl Ending {
    fn of(seen: Seen) -> Self {
        match seen {
            Seen::Lives => Self::Lives,
            Seen::Vanished => Self::Vanished,
            Seen::Ended(Fate::Completed) => Self::Completed,
            Seen::Ended(Fate::Failed) => Self::Failed,
            Seen::Ended(Fate::Cancelled) => Self::Cancelled,
            Seen::Ended(Fate::Returned) => Self::Returned,
        }
    }

    fn seen(&self) -> Seen {
        match self {
            Self::Lives => Seen::Lives,
            Self::Vanished => Seen::Vanished,
            Self::Completed => Seen::Ended(Fate::Completed),
            Self::Failed => Seen::Ended(Fate::Failed),
            Self::Cancelled => Seen::Ended(Fate::Cancelled),
            Self::Returned => Seen::Ended(Fate::Returned),
        }
    }
}
