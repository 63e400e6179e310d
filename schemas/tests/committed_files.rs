//! The committed JSON Schemas and golden messages are those of the types. To renew them after a
//! change of a type: `FIEC_UPDATE=1 cargo test -p fiec-schemas`, and look at the difference.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fiec_schemas::event::{Event, LedgerMessage};
use fiec_schemas::messages::{CapsuleBinding, CapsuleMessage, Handover, SubmitReply};
use fiec_schemas::programs::TileRange;
use fiec_schemas::spread::{PARTS_LIMIT, part_id};
use fiec_schemas::{
    BoundaryEvent, Candidate, Cause, Decision, Digest, Evidence, ExecutionId, ExecutionState,
    FieldError, InstanceId, LineError, NodeId, Reading, Signal, Submission, Tenant, Threshold,
    Timestamp,
};
use serde_json::Value;
use uuid::Uuid;

fn committed(folder: &str, name: &str, now: &Value) {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(folder)
        .join(format!("{name}.json"));
    let text = format!("{}\n", serde_json::to_string_pretty(now).unwrap());
    if std::env::var_os("FIEC_UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == text,
        "{} is stale: run FIEC_UPDATE=1 cargo test -p fiec-schemas and read the difference",
        path.display()
    );
}

#[test]
fn committed_schemas_are_those_of_the_types() {
    let all = fiec_schemas::json_schema::all();
    for (name, schema) in &all {
        committed("json", name, schema);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("json");
    let files = std::fs::read_dir(folder).unwrap().count();
    assert_eq!(
        files,
        all.len(),
        "a schema file belongs to no type any more"
    );
}

fn state() -> ExecutionState {
    ExecutionState::unborn(
        Tenant::new("lab").unwrap(),
        ExecutionId(Uuid::from_u128(0x0192_0000_0000_7000_8000_0000_0000_0001)),
        Arc::new(
            Submission::parse(br#"{"program":"cg@1","params":{"matrix":{"poisson2d":{"n":64}}}}"#)
                .unwrap(),
        ),
        None,
        Timestamp::from_micros(1_790_000_000_000_000),
    )
}

fn handover_message() -> LedgerMessage {
    let at = Timestamp::from_micros(1_790_000_001_000_000);
    let node = |n: &str| NodeId::new(n).unwrap();
    let bound = |epoch, n: &str, cause, decision| Event::Bound {
        epoch,
        node: node(n),
        instance: InstanceId(Uuid::from_u128(0x0192_0000_0000_7000_8000_0000_0000_00aa)),
        substrate: "host".to_owned(),
        cause,
        decision,
    };
    let reading = Reading {
        signal: Signal::Memory,
        device: None,
        value: Some(0.93),
        raw: Some(499_289_948.0),
        limit: Some(536_870_912.0),
        unit: "bytes".to_owned(),
        source: "cgroup v2 memory.current".to_owned(),
        at,
        missing: None,
        envelope: None,
    };
    let evidence = Evidence {
        node: node("n1"),
        signal: Signal::Memory,
        device: None,
        value: 0.93,
        threshold: Threshold {
            high: 0.8,
            low: 0.6,
            dwell_ms: 2_000,
        },
        since: Timestamp::from_micros(1_790_000_000_500_000),
        vector: vec![reading],
    };
    let cause = Cause::Pressure {
        evidence: Box::new(evidence),
    };
    let decision = Decision {
        candidates: vec![
            Candidate {
                node: node("n2"),
                substrate: None,
                score: Some(0.9),
                rejected: vec![],
            },
            Candidate {
                node: node("n1"),
                substrate: None,
                score: None,
                rejected: vec!["memory is at 93 %, over 80 %".to_owned()],
            },
        ],
        omitted: 0,
        entrusted: None,
    };
    let first = state()
        .after(
            &[Event::Submitted, bound(1, "n1", Cause::Initial, None)],
            "policy/a",
            at,
            None,
        )
        .unwrap();
    let events = vec![
        Event::Started {
            epoch: 1,
            computing_since: at,
        },
        Event::Boundary(BoundaryEvent {
            index: 12,
            digest: Digest::of(b"state"),
            bytes: 5,
            computed_at: at,
            compute_us: 1_234,
            of: Some(24),
            note: Some("case 1/1, residual 1e-3".to_owned()),
            outputs: vec![],
            energy: None,
        }),
        Event::Yielded {
            cause: cause.clone(),
            computed_until: at,
        },
        bound(2, "n2", cause, Some(decision)),
    ];
    let next = first
        .after(&events, "worker/n1", at, Some(Digest::of(b"before")))
        .unwrap();
    LedgerMessage {
        v: 1,
        events,
        state: next.into(),
        sig: None,
    }
}

/// The message in which an execution splits off the last part that it may have.
fn split_message() -> LedgerMessage {
    let at = Timestamp::from_micros(1_790_000_002_000_000);
    let line = br#"{"program":"gemm@1","params":{"a":{"random":{"n":8192}},"b":{"random":{"n":8192}},"tiles":{"from":0,"to":256}},"spread":{"up_to":17}}"#;
    let mut state = ExecutionState::unborn(
        Tenant::new("lab").unwrap(),
        ExecutionId(Uuid::from_u128(0x0192_0000_0000_7000_8000_0000_0000_0002)),
        Arc::new(Submission::parse(line).unwrap()),
        None,
        at,
    );
    let bound = Event::Bound {
        epoch: 1,
        node: NodeId::new("n1").unwrap(),
        instance: InstanceId(Uuid::from_u128(0x0192_0000_0000_7000_8000_0000_0000_00aa)),
        substrate: "host".to_owned(),
        cause: Cause::Initial,
        decision: None,
    };
    let started = Event::Started {
        epoch: 1,
        computing_since: at,
    };
    let mut events = vec![Event::Submitted, bound, started];
    for nth in 0..16 {
        state = state.after(&events, "worker/n1", at, None).unwrap();
        let range = TileRange {
            from: 240 - 10 * u64::from(nth),
            to: state.spread.as_ref().unwrap().end.unwrap(),
        };
        let index = u64::from(nth) + 1;
        let boundary = Event::Boundary(BoundaryEvent {
            index,
            digest: Digest::of(b"state"),
            bytes: 104,
            computed_at: at,
            compute_us: 1_234,
            of: Some(index + 80),
            note: None,
            outputs: vec![],
            energy: None,
        });
        let split = Event::Split {
            part: part_id(state.execution, nth, range),
            nth,
            from: range.from,
            to: range.to,
        };
        events = vec![boundary, split];
    }
    let state = state.after(&events, "worker/n1", at, None).unwrap();
    LedgerMessage {
        v: 1,
        events,
        state: state.into(),
        sig: None,
    }
}

#[test]
fn a_message_with_as_many_parts_as_there_may_be_leaves_room_in_its_header() {
    let message = split_message();
    assert_eq!(message.state.parts().len(), PARTS_LIMIT);
    let value = serde_json::to_value(&message).unwrap();
    committed("golden", "split-ledger-message", &value);
    let size = message.encode().unwrap().len();
    let limit = fiec_schemas::limits::EVENT_HEADER_LIMIT;
    let rest = handover_message().encode().unwrap().len();
    assert!(size + rest < limit, "{size} + {rest} bytes");
}

#[test]
fn golden_messages_are_what_is_written_and_read() {
    let message = handover_message();
    let value = serde_json::to_value(&message).unwrap();
    committed("golden", "handover-ledger-message", &value);
    assert_eq!(
        serde_json::from_value::<LedgerMessage>(value).unwrap(),
        message
    );

    let capsule = CapsuleMessage {
        v: 1,
        bindings: vec![CapsuleBinding {
            seq: 42,
            digest: Digest::of(b"header"),
            state: message.state.clone(),
        }],
        server: Some("NDEV".to_owned()),
    };
    let value = serde_json::to_value(&capsule).unwrap();
    committed("golden", "capsule-message", &value);
    assert_eq!(
        serde_json::from_value::<CapsuleMessage>(value).unwrap(),
        capsule
    );

    let part = Handover::Part {
        execution: message.state.execution,
        epoch: 2,
        part: 0,
        parts: 1,
        digest: Digest::of(b"state"),
        bytes: 5,
        ledger: None,
        delta: None,
    };
    committed(
        "golden",
        "handover-part",
        &serde_json::to_value(&part).unwrap(),
    );

    let reply = SubmitReply {
        errors: vec![LineError::of(
            3,
            FieldError::new(
                "viability.memory.low",
                "must be below high, but 0.9 is not below 0.8",
            ),
        )],
        ..SubmitReply::default()
    };
    committed(
        "golden",
        "submit-reply",
        &serde_json::to_value(&reply).unwrap(),
    );
}

#[test]
fn a_full_handover_message_fits_its_header() {
    let size = handover_message().encode().unwrap().len();
    assert!(
        size < fiec_schemas::limits::EVENT_HEADER_LIMIT / 2,
        "{size} bytes"
    );
}

#[test]
fn the_submission_schema_and_the_parser_agree() {
    let (_, schema) = fiec_schemas::json_schema::all()
        .into_iter()
        .find(|(name, _)| *name == "submission")
        .unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    for (line, good) in [
        (r#"{"program":"synthetic@1"}"#, true),
        (
            r#"{"program":"synthetic@1","commit":{"every":4},"retries":1}"#,
            true,
        ),
        (
            r#"{"program":"synthetic@1","viability":{"memory":{"high":0.8,"low":0.6,"dwell_ms":5}}}"#,
            true,
        ),
        (r#"{"program":"synthetic@1","colour":1}"#, false),
        (r#"{"program":7}"#, false),
        (r#"{"program":"synthetic@1","commit":"sometimes"}"#, false),
        (r#"{"program":"synthetic@1","id":"a b"}"#, false),
        (r#"{}"#, false),
    ] {
        let value: Value = serde_json::from_str(line).unwrap();
        assert_eq!(validator.is_valid(&value), good, "schema on {line}");
        assert_eq!(
            Submission::parse(line.as_bytes()).is_ok(),
            good,
            "parser on {line}"
        );
    }
}
