//! Actions of the policy in a trace.

use fiec_policy::holds::reserve::Change;
use fiec_policy::{Action, Good};
use serde_json::{Value, json};

/// The kind of an action and its JSON.
pub fn describe(action: &Action) -> Result<(&'static str, Value), serde_json::Error> {
    Ok(match action {
        Action::Append {
            execution,
            tenant,
            expected,
            events,
            ticket,
        } => (
            "append",
            json!({
                "execution": execution, "tenant": tenant, "expected": expected,
                "events": serde_json::to_value(events)?, "ticket": ticket,
            }),
        ),
        Action::Keep {
            execution,
            tenant,
            expected,
        } => (
            "keep",
            json!({"execution": execution, "tenant": tenant, "expected": expected}),
        ),
        Action::SendCapsule {
            execution,
            tenant,
            seq,
        } => (
            "send_capsule",
            json!({"execution": execution, "tenant": tenant, "seq": seq}),
        ),
        Action::Control {
            node,
            request,
            ticket,
        } => (
            "control",
            json!({"node": node, "request": serde_json::to_value(request)?, "ticket": ticket}),
        ),
        Action::Probe(node) => ("probe", json!({"node": node})),
        Action::Forget { node, instance } => {
            ("forget", json!({"node": node, "instance": instance}))
        }
        Action::AskHoldings(node) => ("ask_holdings", json!({"node": node})),
        Action::FetchSpec {
            execution,
            seq,
            tenant,
        } => (
            "fetch_spec",
            json!({"execution": execution, "seq": seq, "tenant": tenant}),
        ),
        Action::Quarantine {
            node,
            contract,
            substrate,
            reason: _,
        } => (
            "quarantine",
            json!({"node": node, "contract": contract, "substrate": substrate}),
        ),
        Action::StepBack {
            execution,
            tenant,
            culprit,
            good,
            cause,
        } => (
            "step_back",
            json!({
                "execution": execution, "tenant": tenant, "culprit": culprit,
                "cause": serde_json::to_value(cause)?,
                "to": match good {
                    Good::Known(place) => json!({"known": place}),
                    Good::BeforeIt => json!("before_the_culprit"),
                },
            }),
        ),
        Action::Recall { execution, tenant } => {
            ("recall", json!({"execution": execution, "tenant": tenant}))
        }
        Action::Verified {
            execution,
            up_to,
            drop,
        } => (
            "verified",
            json!({"execution": execution, "up_to": serde_json::to_value(up_to)?, "drop": drop}),
        ),
        Action::DropKept { execution, digest } => (
            "drop_kept",
            json!({"execution": execution, "digest": digest}),
        ),
        Action::Lookup { execution, tenant } => {
            ("lookup", json!({"execution": execution, "tenant": tenant}))
        }
        Action::MakePart {
            part,
            holder,
            tenant,
        } => (
            "make_part",
            json!({"part": part, "holder": holder, "tenant": tenant}),
        ),
        Action::Reserve {
            tenant,
            quota,
            change,
        } => (
            "reserve",
            json!({
                "tenant": tenant, "quota": serde_json::to_value(quota)?, "change": reservation(change),
            }),
        ),
        Action::Record(record) => ("record", json!({"record": serde_json::to_value(record)?})),
        Action::Refuse(ticket, _) => ("refuse", json!({"ticket": ticket})),
    })
}

fn reservation(change: &Change) -> Value {
    let Change {
        free,
        take,
        adopt,
        amend,
        sets,
        fence,
    } = change;
    json!({
        "free": free, "take": take, "adopt": adopt, "amend": amend, "sets": sets, "fence": fence,
    })
}
