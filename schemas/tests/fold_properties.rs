//! The fold's invariants under arbitrary sequences of events. Progress grows, the epoch grows by
//! one with each binding, nothing follows an end, and the last message alone gives the state.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;

use fiec_schemas::scheduling::{Adjustment, Keep};
use fiec_schemas::{
    BoundaryEvent, Cause, Decision, Digest, Entrusted, Event, ExecutionId, ExecutionState, Fault,
    InstanceId, LedgerMessage, NodeId, Phase, RequestKind, StartError, StatePlace, Submission,
    Tenant, Timestamp,
};
use proptest::prelude::*;
use uuid::Uuid;

fn unborn() -> ExecutionState {
    ExecutionState::unborn(
        Tenant::new("lab").unwrap(),
        ExecutionId(Uuid::from_u128(7)),
        Arc::new(Submission::parse(br#"{"program":"synthetic@1"}"#).unwrap()),
        None,
        Timestamp::from_micros(1_000_000),
    )
}

fn bound(epoch: u64, cause: Cause) -> Event {
    Event::Bound {
        epoch,
        node: NodeId::new("n1").unwrap(),
        instance: InstanceId(Uuid::from_u128(1)),
        substrate: "host".to_owned(),
        cause,
        decision: None,
    }
}

fn cause(kind: u8) -> Cause {
    match kind % 3 {
        0 => Cause::Initial,
        1 => Cause::Lost { silent_ms: 5_000 },
        _ => Cause::Drain {
            who: "ops".to_owned(),
        },
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    let at = Timestamp::from_micros(2_000_000);
    prop_oneof![
        Just(Event::Submitted),
        (0u64..6, 0u8..3).prop_map(|(epoch, kind)| bound(epoch, cause(kind))),
        (0u64..6).prop_map(move |epoch| Event::Started {
            epoch,
            computing_since: at
        }),
        (0u64..9, 0u64..2_000_000).prop_map(move |(index, bytes)| Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(&index.to_le_bytes()),
            bytes,
            computed_at: at,
            compute_us: 5,
            of: None,
            note: None,
            outputs: vec![],
            energy: None,
        })),
        (0u8..3).prop_map(move |kind| Event::Yielded {
            cause: cause(kind),
            computed_until: at
        }),
        Just(Event::Refused {
            reason: "full".to_owned(),
            offer: 0,
            fault: None,
        }),
        Just(Event::Paused {
            who: "me".to_owned()
        }),
        Just(Event::Resumed {
            who: "me".to_owned()
        }),
        (-100i16..100).prop_map(|priority| Event::Adjusted {
            who: "me".to_owned(),
            change: Adjustment {
                priority: Some(priority),
                ..Adjustment::default()
            },
        }),
        Just(Event::Parked {
            cause: Cause::Drain {
                who: "ops".to_owned()
            },
            keep: Keep::Device,
            computed_until: at,
        }),
        Just(Event::Unparked {
            reason: "me".to_owned(),
            computing_since: at,
        }),
        Just(Event::Requested {
            who: "me".to_owned(),
            what: RequestKind::Cancel
        }),
        Just(Event::Crashed {
            attempt: 1,
            exit: "status 1".to_owned(),
            stderr: String::new(),
            backoff_ms: 200,
            fault: None,
        }),
        Just(Event::Completed {
            result: serde_json::Value::Null,
            object: None,
            computed_until: at,
            capsules: 3,
            outputs: vec![],
            energy: None,
        }),
        Just(Event::Held {
            reason: "test".into(),
            stderr: String::new(),
            fault: Some(Box::new(Fault::Reported)),
        }),
        Just(Event::Retried { who: "me".into() }),
        Just(Event::Failed {
            reason: "no".to_owned(),
            stderr: String::new(),
            fault: None,
        }),
        Just(Event::Computed {
            result: serde_json::Value::Null,
            object: None,
            computed_until: Timestamp::from_micros(4),
            capsules: 9,
            outputs: vec![],
            energy: None,
        }),
        Just(verified()),
        proptest::option::of(0u64..9).prop_map(|to| Event::SteppedBack {
            to: to.map(|index| StatePlace {
                index,
                digest: Digest::of(&index.to_le_bytes()),
                bytes: 8,
                seq: Some(0),
                ordinal: 0,
            }),
            cause: Cause::Corrupt {
                node: None,
                reason: "test".into(),
            },
        }),
        Just(Event::Cancelled {
            who: "me".to_owned()
        }),
    ]
}

/// The events of one message.
fn any_message() -> impl Strategy<Value = Vec<Event>> {
    let completed = Event::Completed {
        result: serde_json::Value::Null,
        object: None,
        computed_until: Timestamp::from_micros(4),
        capsules: 9,
        outputs: vec![],
        energy: None,
    };
    prop_oneof![
        30 => any_event().prop_map(|event| vec![event]),
        1 => Just(vec![verified(), completed]),
    ]
}

fn verified() -> Event {
    Event::Verified {
        by: vec![NodeId::new("n9").unwrap()],
        segments: 1,
    }
}

proptest! {
    #[test]
    fn no_sequence_of_events_breaks_the_invariants(
        messages in proptest::collection::vec(any_message(), 1..60),
        guarded: bool,
    ) {
        let mut state = unborn();
        state.guarded = guarded;
        let mut prev = None;
        let mut sequence = 0;
        for events in messages {
            let before = state.clone();
            let next = state.after(&events, "test", Timestamp::from_micros(3_000_000), prev);
            let Ok(next) = next else { continue };
            let event = events.last().unwrap();
            let is_retried = matches!(event, Event::Retried { .. });
            let was_over = before.phase.is_terminal();
            prop_assert!(!was_over || is_retried, "{event:?} after {}", before.phase.as_str());
            if matches!(before.phase, Phase::Completed | Phase::Returned) {
                prop_assert!(!is_retried);
            }
            prop_assert!(next.ordinal == before.ordinal + 1);
            prop_assert!(next.epoch == before.epoch || next.epoch == before.epoch + 1);
            if matches!(event, Event::SteppedBack { .. }) {
                prop_assert!(next.boundary_index() <= before.boundary_index());
                prop_assert!(next.totals.steps_back == before.totals.steps_back + 1);
                let waits = matches!(
                    next.phase,
                    Phase::Pending { .. } | Phase::Paused { .. } | Phase::Held { .. }
                );
                prop_assert!(waits, "{}", next.phase.as_str());
            } else {
                prop_assert!(next.boundary_index() >= before.boundary_index());
                prop_assert!(next.totals.steps_back == before.totals.steps_back);
            }
            let is_completed = matches!(event, Event::Completed { .. });
            if guarded && is_completed {
                prop_assert!(matches!(events[0], Event::Verified { .. }), "unverified");
            }
            prop_assert!(next.guarded == (guarded && !is_completed));
            if matches!(next.phase, Phase::Verifying { .. }) {
                prop_assert!(next.epoch > 0);
            }
            prop_assert!(next.totals.commits >= before.totals.commits);
            let crashes = match event {
                Event::Crashed { .. } => before.crashes_since_commit + 1,
                Event::Retried { .. } => 0,
                _ if next.totals.commits > before.totals.commits => 0,
                _ => before.crashes_since_commit,
            };
            prop_assert_eq!(next.crashes_since_commit, crashes);
            prop_assert!(u64::from(crashes) <= next.totals.crashes);
            if matches!(event, Event::Started { .. }) {
                prop_assert!(matches!(before.phase, Phase::Bound(_)));
            }
            if next.parked().is_some() {
                prop_assert!(!matches!(event, Event::Boundary(_)), "a commit while it waits");
            }
            if let Event::Adjusted { change, .. } = event {
                let adjusted = next.adjusted.as_ref().unwrap();
                prop_assert_eq!(adjusted.priority, change.priority);
            }
            let message =
                LedgerMessage { v: 1, events, state: next.clone().into(), sig: None };
            let header = message.encode().unwrap();
            sequence += 1;
            let read = LedgerMessage::decode(&header, sequence).unwrap();
            let mut resolved = next;
            resolved.resolve(sequence);
            prop_assert_eq!(&*read.state, &resolved);
            prev = Some(Digest::of(header.as_bytes()));
            state = resolved;
        }
    }

    #[test]
    fn a_first_binding_that_its_node_appends_makes_what_it_makes_apart(
        events in proptest::collection::vec(any_event(), 0..6),
    ) {
        let (decided, appended) = (Timestamp::from_micros(3_000_000), Timestamp::from_micros(4_000_000));
        let bound = |entrusted| Event::Bound {
            epoch: 1,
            node: NodeId::new("n1").unwrap(),
            instance: InstanceId(Uuid::from_u128(1)),
            substrate: "host".to_owned(),
            cause: Cause::Initial,
            decision: Some(Decision { candidates: vec![], omitted: 0, entrusted }),
        };
        let told = [Event::Submitted, bound(None)];
        let told = unborn().after(&told, "policy/a", decided, None).unwrap();
        let more = told.with_more(&events, "worker/n1/i", appended);
        let entrusted = Entrusted { by: "policy/a".to_owned(), at: decided };
        let mut whole = vec![Event::Submitted, bound(Some(entrusted))];
        whole.extend(events);
        let whole = unborn().after(&whole, "worker/n1/i", appended, None);
        prop_assert_eq!(more, whole);
    }
}

#[test]
fn facts_that_become_true_together_travel_in_one_message() {
    let at = Timestamp::from_micros(5_000_000);
    let state = unborn()
        .after(
            &[Event::Submitted, bound(1, Cause::Initial)],
            "policy/a",
            at,
            None,
        )
        .unwrap();
    assert!(matches!(state.phase, Phase::Bound(_)));
    let boundary = BoundaryEvent {
        index: 4,
        digest: Digest::of(b"x"),
        bytes: 1,
        computed_at: at,
        compute_us: 10,
        of: Some(9),
        note: None,
        outputs: vec![],
        energy: None,
    };
    let state = state
        .after(
            &[
                Event::Started {
                    epoch: 1,
                    computing_since: at,
                },
                Event::Boundary(boundary),
                Event::Yielded {
                    cause: Cause::Drain { who: "ops".into() },
                    computed_until: at,
                },
                bound(2, Cause::Drain { who: "ops".into() }),
            ],
            "worker/n1",
            at,
            None,
        )
        .unwrap();
    assert_eq!(
        (state.epoch, state.boundary_index(), state.totals.rebindings),
        (2, 4, 1)
    );
}

#[test]
fn a_binding_may_be_taken_from_a_started_node_only_when_it_is_lost() {
    let at = Timestamp::from_micros(5_000_000);
    let bound = |epoch, cause| Event::Bound {
        epoch,
        node: NodeId::new("n2").unwrap(),
        instance: InstanceId(Uuid::from_u128(2)),
        substrate: "host".to_owned(),
        cause,
        decision: None,
    };
    let started = unborn()
        .after(
            &[
                Event::Submitted,
                bound(1, Cause::Initial),
                Event::Started {
                    epoch: 1,
                    computing_since: at,
                },
            ],
            "t",
            at,
            None,
        )
        .unwrap();
    assert!(
        started
            .after(&[bound(2, Cause::Balance)], "t", at, None)
            .is_err()
    );
    assert!(
        started
            .after(&[bound(2, Cause::Lost { silent_ms: 6_000 })], "t", at, None)
            .is_ok()
    );
}

#[test]
fn a_fault_of_a_node_costs_no_attempt() {
    let at = Timestamp::from_micros(5_000_000);
    let started = |epoch| Event::Started {
        epoch,
        computing_since: at,
    };
    let fault = |fault| Some(Box::new(fault));
    let cannot_start = || {
        fault(Fault::CannotStart {
            command: "python3".to_owned(),
            error: StartError::NotFound,
        })
    };
    let refused = |fault| Event::Refused {
        reason: "no".to_owned(),
        offer: 1,
        fault,
    };
    let not_taken = |fault| Cause::NotTaken {
        reason: "no".to_owned(),
        fault,
    };
    let yielded = |cause| Event::Yielded {
        cause,
        computed_until: at,
    };
    let crashed = Event::Crashed {
        attempt: 1,
        exit: "exit status 1".to_owned(),
        stderr: String::new(),
        backoff_ms: 0,
        fault: fault(Fault::Exited { status: 1 }),
    };
    let lost = || Cause::Lost { silent_ms: 5_000 };
    let mut state = unborn();
    // Crashes, faults of nodes, faults of the infrastructure.
    for (events, counted) in [
        (vec![Event::Submitted, bound(1, Cause::Initial)], (0, 0, 0)),
        (vec![refused(cannot_start())], (0, 1, 0)),
        // The binding after a refusal does not tell its fault once more.
        (vec![bound(2, not_taken(cannot_start()))], (0, 1, 0)),
        (vec![refused(None)], (0, 1, 0)),
        (
            vec![bound(3, not_taken(None)), started(3), crashed],
            (1, 1, 0),
        ),
        (vec![yielded(not_taken(fault(Fault::DiskFull)))], (1, 2, 0)),
        (vec![bound(4, Cause::Initial)], (1, 2, 0)),
        // Nothing was computed on a node that went away before it started.
        (vec![bound(5, lost()), started(5)], (1, 2, 0)),
        (vec![bound(6, lost()), started(6)], (1, 3, 0)),
        (vec![yielded(not_taken(fault(Fault::Broker)))], (1, 3, 1)),
    ] {
        state = state.after(&events, "t", at, None).unwrap();
        let totals = &state.totals;
        let found = (
            totals.crashes,
            totals.node_faults,
            totals.infrastructure_faults,
        );
        assert_eq!(found, counted, "{events:?}");
    }
    assert_eq!(state.crashes_since_commit, 1);
}
