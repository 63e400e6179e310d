//! What belongs to a phase goes along with the execution or ends with the phase.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;

use fiec_schemas::scheduling::{Adjustment, Keep};
use fiec_schemas::{
    Cause, Event, ExecutionId, ExecutionState, InstanceId, NodeId, Phase, PhaseKind, RequestKind,
    Submission, Tenant, Timestamp,
};
use serde_json::json;
use uuid::Uuid;

const AT: Timestamp = Timestamp::from_micros(5_000_000);

fn unborn(submission: &str) -> ExecutionState {
    ExecutionState::unborn(
        Tenant::new("lab").unwrap(),
        ExecutionId(Uuid::from_u128(7)),
        Arc::new(Submission::parse(submission.as_bytes()).unwrap()),
        None,
        AT,
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

fn then(state: &ExecutionState, events: &[Event]) -> ExecutionState {
    state.after(events, "test", AT, None).unwrap()
}

fn started(submission: &str) -> ExecutionState {
    let events = [
        Event::Submitted,
        bound(1, Cause::Initial),
        Event::Started {
            epoch: 1,
            computing_since: AT,
        },
    ];
    then(&unborn(submission), &events)
}

fn requested(submission: &str, what: RequestKind) -> ExecutionState {
    let who = "ops".to_owned();
    then(&started(submission), &[Event::Requested { who, what }])
}

const PLAIN: &str = r#"{"program":"synthetic@1"}"#;
const GUARDED: &str = r#"{"program":"synthetic@1","verify":"all"}"#;

fn orphaned() -> Cause {
    Cause::Orphaned {
        reason: "its worker forgot it".to_owned(),
    }
}

fn yielded() -> Event {
    Event::Yielded {
        cause: orphaned(),
        computed_until: AT,
    }
}

fn computed() -> Event {
    Event::Computed {
        result: json!(1),
        object: None,
        computed_until: AT,
        capsules: 1,
        outputs: vec![],
        energy: None,
    }
}

fn completed() -> Event {
    Event::Completed {
        result: json!(1),
        object: None,
        computed_until: AT,
        capsules: 1,
        outputs: vec![],
        energy: None,
    }
}

fn verified() -> Event {
    Event::Verified {
        by: vec![NodeId::new("n2").unwrap()],
        segments: 1,
    }
}

fn stepped_back() -> Event {
    Event::SteppedBack {
        to: None,
        cause: orphaned(),
    }
}

#[test]
fn a_request_goes_along_until_somebody_has_done_it() {
    let ways: [(&str, Vec<Event>, PhaseKind); 6] = [
        (PLAIN, vec![yielded()], PhaseKind::Pending),
        (PLAIN, vec![bound(2, orphaned())], PhaseKind::Bound),
        (PLAIN, vec![stepped_back()], PhaseKind::Pending),
        (GUARDED, vec![computed()], PhaseKind::Verifying),
        (
            GUARDED,
            vec![computed(), stepped_back()],
            PhaseKind::Pending,
        ),
        (
            PLAIN,
            vec![
                bound(2, orphaned()),
                Event::Started {
                    epoch: 2,
                    computing_since: AT,
                },
            ],
            PhaseKind::Started,
        ),
    ];
    for what in [RequestKind::Cancel, RequestKind::Pause] {
        for (submission, events, phase) in &ways {
            let before = requested(submission, what);
            let after = then(&before, events);
            assert_eq!(after.phase.kind(), *phase);
            assert_eq!(after.requested(), before.requested(), "{phase:?}");
        }
        let refused = Event::Refused {
            reason: "full".to_owned(),
            offer: 0,
            fault: None,
        };
        let after = then(&requested(PLAIN, what), &[bound(2, orphaned()), refused]);
        assert_eq!(after.phase.kind(), PhaseKind::Pending);
        assert!(after.requested().is_some());
    }
}

#[test]
fn a_request_ends_with_what_it_asked_for_or_with_the_execution() {
    let who = || "ops".to_owned();
    let before = requested(PLAIN, RequestKind::Pause);
    let paused = then(&before, &[yielded(), Event::Paused { who: who() }]);
    assert_eq!(paused.requested(), None);
    let resumed = then(&paused, &[Event::Resumed { who: who() }]);
    assert_eq!(resumed.requested(), None);
    for end in [
        completed(),
        Event::Cancelled { who: who() },
        Event::Held {
            reason: "no".to_owned(),
            stderr: String::new(),
            fault: None,
        },
    ] {
        assert_eq!(then(&before, &[end]).requested(), None);
    }
}

#[test]
fn a_parking_ends_with_its_phase_also_within_one_message() {
    let parked = Event::Parked {
        cause: orphaned(),
        keep: Keep::Host,
        computed_until: AT,
    };
    let before = then(&started(PLAIN), &[parked]);
    assert!(before.parked().is_some());
    let again = [
        yielded(),
        bound(2, orphaned()),
        Event::Started {
            epoch: 2,
            computing_since: AT,
        },
    ];
    assert_eq!(then(&before, &again).parked(), None);
}

#[test]
fn a_result_that_was_verified_counts_only_with_its_end() {
    let verifying = then(&started(GUARDED), &[computed()]);
    assert!(verifying.guarded);
    let done = then(&verifying, &[verified(), completed()]);
    assert!(matches!(done.phase, Phase::Completed) && !done.guarded);
    for events in [
        vec![verified()],
        vec![verified(), stepped_back()],
        vec![verified(), Event::Paused { who: "me".into() }],
        vec![completed()],
    ] {
        let refused = verifying.after(&events, "test", AT, None);
        assert!(refused.is_err(), "{events:?}");
    }
}

#[test]
fn json_has_a_request_and_a_parking_beside_the_phase_and_passes_over_what_does_not_belong() {
    let parked = Event::Parked {
        cause: orphaned(),
        keep: Keep::Host,
        computed_until: AT,
    };
    let both = then(&requested(PLAIN, RequestKind::Pause), &[parked]);
    let mut written = serde_json::to_value(&both).unwrap();
    assert_eq!(written["phase"]["is"], "started");
    assert_eq!(written["requested"]["what"], "pause");
    assert_eq!(written["parked"]["keep"], "host");
    let read: ExecutionState = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(read, both);
    written["phase"] = json!({ "is": "paused", "who": "me" });
    let read: ExecutionState = serde_json::from_value(written).unwrap();
    assert_eq!((read.requested(), read.parked()), (None, None));
}

#[test]
fn an_end_keeps_the_submission_and_the_adjustments_for_those_who_need_them_still() {
    let adjusted = Event::Adjusted {
        who: "ops".to_owned(),
        change: Adjustment {
            priority: Some(3),
            ..Adjustment::default()
        },
    };
    let before = then(&started(PLAIN), &[adjusted]);
    assert_eq!(before.ordinal, 2);
    let (who, reason) = ("ops".to_owned(), "no".to_owned());
    let for_a_retry = [
        Event::Cancelled { who },
        Event::Failed {
            reason,
            stderr: String::new(),
            fault: None,
        },
    ];
    for end in for_a_retry {
        let ended = then(&before, &[end]);
        assert!(
            ended.spec.is_some() && ended.adjusted.is_some(),
            "{ended:?}"
        );
    }
    let ended = then(&before, &[completed()]);
    assert!(ended.spec.is_none() && ended.adjusted.is_none());

    // Nothing before this message told the submission.
    let started = Event::Started {
        epoch: 1,
        computing_since: AT,
    };
    let all = [
        Event::Submitted,
        bound(1, Cause::Initial),
        started,
        completed(),
    ];
    let ended = then(&unborn(PLAIN), &all);
    assert_eq!(ended.ordinal, 1);
    assert!(ended.spec.is_some());
}
