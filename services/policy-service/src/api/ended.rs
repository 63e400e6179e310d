//! Why an execution has ended as it has, or is held, from the last message of its ledger.

use fiec_schemas::event::Totals;
use fiec_schemas::messages::{Remedy, Why};
use fiec_schemas::{Event, Fault, LedgerMessage, Owner, Phase};

/// How it ended, whose fault that was, and what would help. `name`: the execution as its asker calls
/// it.
pub(super) fn why(message: &LedgerMessage, name: &str) -> Why {
    let state = &message.state;
    let told = message.events.iter().rev().find_map(ending);
    let fault = told.as_ref().and_then(|(_, fault)| *fault);
    let (how, kind) = match (told, &state.phase) {
        (Some((how, fault)), _) => (how, fault.map(Fault::kind)),
        // A message that only keeps what would drop out by its age.
        (None, Phase::Held { reason, fault }) => (format!("is held: {reason}"), *fault),
        (None, phase) => (phase.as_str().to_owned(), None),
    };
    let whose = kind.map_or_else(String::new, |kind| format!("; {}", whose(kind.owner())));
    let mut would_help: Vec<String> = fault.and_then(would_help).into_iter().collect();
    let mut remedies = Vec::new();
    // A retry has the same package.
    let is_in_vain = matches!(fault, Some(Fault::BrokenPackage));
    if state.phase.kind().can_be_retried() && !is_in_vain {
        let then = match (fault, would_help.is_empty()) {
            (Some(Fault::Reported | Fault::Limit), false) => "or ",
            (_, false) => "then ",
            (_, true) => "",
        };
        let from = match &state.boundary {
            Some(boundary) => format!("continues from boundary {}", boundary.index),
            None => "starts from the beginning".to_owned(),
        };
        would_help.push(format!(
            "{then}`fiec retry {name}`: it {from}, with the same program and parameters"
        ));
        remedies.push(Remedy::Retry {
            more_memory_than: fault.and_then(memory_limit),
        });
    }
    Why {
        summary: format!("{name} {how}{whose}{}", faults(&state.totals)),
        would_help,
        remedies,
        phase: state.phase.kind(),
        candidates: Vec::new(),
        place: None,
        cause: None,
        decision: None,
        thresholds: Vec::new(),
        would_move: Vec::new(),
        would_go_to: None,
        waits_for: Vec::new(),
        next: None,
    }
}

/// The words and the fault of an event that ends an execution.
fn ending(event: &Event) -> Option<(String, Option<&Fault>)> {
    Some(match event {
        Event::Completed { capsules, .. } => (format!("completed after {capsules} capsules"), None),
        Event::Failed { reason, fault, .. } => (format!("failed: {reason}"), fault.as_deref()),
        Event::Held { reason, fault, .. } => (format!("is held: {reason}"), fault.as_deref()),
        Event::Cancelled { who } => (format!("was cancelled by {who}"), None),
        Event::Returned { to } => (
            format!("ended early; its holder {to} computes the remaining tiles"),
            None,
        ),
        _ => return None,
    })
}

const fn whose(owner: Owner) -> &'static str {
    match owner {
        Owner::Program => "the fault is its program's",
        Owner::Node => "the fault is its node's",
        Owner::Infrastructure => "the fault is the infrastructure's",
        Owner::Submission => "that follows from its submission",
    }
}

/// The faults of its whole life, as the end of a sentence.
fn faults(totals: &Totals) -> String {
    let all = [
        (totals.crashes, "crash", "crashes", "of the program"),
        (totals.node_faults, "fault", "faults", "of nodes"),
        (
            totals.infrastructure_faults,
            "fault",
            "faults",
            "of the infrastructure",
        ),
    ];
    let some: Vec<_> = all
        .iter()
        .filter(|(count, ..)| *count > 0)
        .map(|(count, one, several, whose)| {
            let what = if *count == 1 { one } else { several };
            format!("{count} {what} {whose}")
        })
        .collect();
    match some.is_empty() {
        true => String::new(),
        false => format!(". In its life: {}", some.join(", ")),
    }
}

/// The memory that was not enough, in bytes.
fn memory_limit(fault: &Fault) -> Option<u64> {
    match fault {
        Fault::OutOfMemory { limit_bytes, .. } => Some(*limit_bytes),
        _ => None,
    }
}

fn would_help(fault: &Fault) -> Option<String> {
    Some(match fault {
        Fault::BrokenPackage => {
            "a new version of the package whose `entry` is one of its files, with execute \
             permission; a new submission names it"
                .to_owned()
        }
        Fault::Limit => "what the reason names, changed in the manifest of a new version of the \
                         package; a new submission names it"
            .to_owned(),
        Fault::Reported => {
            "the program or its parameters corrected, in a new submission".to_owned()
        }
        Fault::ComputedLimit => {
            "`fiec retry`: it may then compute as long again; a higher `limit.computed_s` in new \
             submissions"
                .to_owned()
        }
        Fault::OutOfMemory { limit_bytes, .. } => format!(
            "a node with more memory than {} MiB (`fiec retry --memory`, and `requires.memory_bytes` \
             in new submissions), or fewer slots on the node, which share it",
            limit_bytes.div_ceil(1 << 20)
        ),
        Fault::DataLost => "an earlier boundary (`fiec retry --from-boundary`)".to_owned(),
        Fault::Dependency { id } | Fault::Part { id } => {
            format!("`fiec why {id}` says why that one failed")
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_schemas::{ExecutionState, PhaseKind, Submission, Tenant, Timestamp};
    use std::sync::Arc;

    fn said(event: Event) -> Why {
        let state = ExecutionState::unborn(
            Tenant::new("lab").unwrap(),
            fiec_schemas::ExecutionId(uuid::Uuid::from_u128(7)),
            Arc::new(Submission::of("synthetic@1")),
            None,
            Timestamp::from_micros(1),
        );
        let events = vec![Event::Submitted, event];
        let at = Timestamp::from_micros(2);
        let state = state.after(&events, "policy/a", at, None).unwrap();
        let state = state.into();
        let message = LedgerMessage {
            v: 1,
            events,
            state,
            sig: None,
        };
        why(&message, "job-7")
    }

    #[test]
    fn a_failure_says_whose_fault_it_was_and_what_would_help() {
        let failed = |fault| Event::Failed {
            reason: "no".to_owned(),
            stderr: String::new(),
            fault: Some(Box::new(fault)),
        };
        let program = said(failed(Fault::BrokenPackage));
        assert_eq!(
            program.summary,
            "job-7 failed: no; the fault is its program's"
        );
        assert!(program.would_help[0].contains("entry"));
        // It would fail again.
        assert!(program.remedies.is_empty() && program.would_help.len() == 1);
        let reported = said(failed(Fault::Reported));
        assert!(reported.would_help[0].contains("new submission"));
        assert_eq!(
            reported.would_help[1],
            "or `fiec retry job-7`: it starts from the beginning, with the same program and \
             parameters"
        );
        assert_eq!(
            reported.remedies,
            [Remedy::Retry {
                more_memory_than: None
            }]
        );
        let lost = said(failed(Fault::DataLost));
        assert_eq!(
            lost.summary,
            "job-7 failed: no; the fault is the infrastructure's. In its life: 1 fault of the \
             infrastructure"
        );
        let who = "ann".to_owned();
        let cancelled = said(Event::Cancelled { who });
        assert_eq!(cancelled.summary, "job-7 was cancelled by ann");
        assert_eq!(cancelled.phase, PhaseKind::Cancelled);
    }
}
