//! The largest possible ledger messages. Every field is at its limit. Every text consists of
//! control bytes, which take six times as many bytes in JSON.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use fiec_schemas::energy::{Energy, EnergyTotals, Measured};
use fiec_schemas::envelope::EnvelopeNow;
use fiec_schemas::event::{Entrusted, Left, Outbox, Totals};
use fiec_schemas::limits::{
    self, CANDIDATES_LIMIT, CPUS_LIMIT, EVENT_HEADER_LIMIT, EVIDENCE_LIMIT, INLINE_RESULT_LIMIT,
    INLINE_SUBMISSION_LIMIT, NODES_LIMIT, OUTPUTS_LIMIT, WORD_LIMIT,
};
use fiec_schemas::package::{DeviceGrant, Grant};
use fiec_schemas::scheduling::{Adjustment, Deadline, Keep, OnMiss, Parked, Rule};
use fiec_schemas::series::{NAME_LIMIT, NAMES_LIMIT, POINTS_LIMIT, Point, Series, SeriesName};
use fiec_schemas::spread::{PARTS_LIMIT, Part, Spreading};
use fiec_schemas::{
    BatchId, BatchPlace, Binding, BoundaryEvent, Candidate, Cause, Contract, Decision, Digest,
    Event, Evidence, ExecutionId, ExecutionState, Fault, InstanceId, LedgerMessage, NodeId, Output,
    Phase, Reading, RequestKind, Requested, ResultObject, Signal, StartError, Started, StatePlace,
    Submission, Tenant, Threshold, Timestamp,
};
use serde_json::Value;
use uuid::Uuid;

/// The number with the most digits.
const NUMBER: f64 = -f64::MIN_POSITIVE;
/// Every time takes the same number of bytes.
const AT: Timestamp = Timestamp::from_micros(0);

/// A text beyond every limit.
fn long() -> String {
    "\u{1}".repeat(10_000)
}

fn node() -> NodeId {
    NodeId::new("n".repeat(64)).unwrap()
}

fn id() -> ExecutionId {
    ExecutionId(Uuid::from_u128(u128::MAX))
}

fn threshold() -> Threshold {
    Threshold {
        high: NUMBER,
        low: NUMBER,
        dwell_ms: u32::MAX,
    }
}

fn energy() -> Option<Energy> {
    Energy::of(Some(u64::MAX), Some(u64::MAX))
}

fn reading() -> Reading {
    Reading {
        signal: Signal::MemoryStall,
        device: Some(long()),
        value: Some(NUMBER),
        raw: Some(NUMBER),
        limit: Some(NUMBER),
        unit: long(),
        source: long(),
        at: AT,
        missing: None,
        envelope: Some(EnvelopeNow {
            cap: NUMBER,
            source: long(),
        }),
    }
}

fn pressure() -> Cause {
    Cause::Pressure {
        evidence: Box::new(Evidence {
            node: node(),
            signal: Signal::MemoryStall,
            device: Some(long()),
            value: NUMBER,
            threshold: threshold(),
            since: AT,
            vector: vec![reading(); 2 * EVIDENCE_LIMIT],
        }),
    }
}

/// The longest fault.
fn fault() -> Option<Box<Fault>> {
    Some(Box::new(Fault::CannotStart {
        command: long(),
        error: StartError::NotExecutable,
    }))
}

fn decision() -> Decision {
    let candidate = Candidate {
        node: node(),
        substrate: Some(long()),
        score: Some(NUMBER),
        rejected: vec![long(); 20],
    };
    Decision {
        candidates: vec![candidate; 2 * CANDIDATES_LIMIT],
        omitted: u32::MAX,
        entrusted: Some(Entrusted { by: long(), at: AT }),
    }
}

/// Outputs that just fit.
fn outputs() -> Vec<Output> {
    let output = Output {
        name: "\u{1}".repeat(255),
        digest: Digest([255; 32]),
        bytes: u64::MAX,
    };
    let mut outputs = vec![output];
    while limits::outputs_len(&outputs) <= OUTPUTS_LIMIT {
        outputs.push(outputs[0].clone());
    }
    outputs.pop();
    let written = serde_json::to_string(&outputs).unwrap().len();
    assert!(
        written <= limits::outputs_len(&outputs) + 2,
        "{written} bytes, counted as {}",
        limits::outputs_len(&outputs)
    );
    outputs
}

fn causes() -> Vec<Cause> {
    let reason = long;
    let who = long;
    vec![
        Cause::Initial,
        pressure(),
        Cause::Operator { who: who() },
        Cause::Drain { who: who() },
        Cause::Lost {
            silent_ms: u64::MAX,
        },
        Cause::NotTaken {
            reason: reason(),
            fault: fault(),
        },
        Cause::Resumed,
        Cause::Balance,
        Cause::Corrupt {
            node: Some(node()),
            reason: reason(),
        },
        Cause::Preempted {
            rule: Rule::TimeSlice,
            by: Some(id()),
            reason: reason(),
        },
        Cause::Reallocated {
            upgrade: false,
            reason: reason(),
        },
        Cause::Asked { reason: reason() },
        Cause::Revoked { who: who(), at: AT },
        Cause::Unviable { reason: reason() },
        Cause::Orphaned { reason: reason() },
        Cause::Parts,
        Cause::PartFailed {
            part: id(),
            reason: reason(),
        },
    ]
}

/// The longest cause except pressure, and pressure.
fn worst_causes() -> [Cause; 2] {
    let longest = causes()
        .into_iter()
        .filter(|cause| !matches!(cause, Cause::Pressure { .. }))
        .max_by_key(|cause| {
            let mut event = [yielded(cause.clone())];
            limits::fit(&mut event);
            serde_json::to_string(&event).unwrap().len()
        });
    [longest.unwrap(), pressure()]
}

fn yielded(cause: Cause) -> Event {
    Event::Yielded {
        cause,
        computed_until: AT,
    }
}

fn bound(cause: Cause) -> Event {
    Event::Bound {
        epoch: u64::MAX,
        node: node(),
        instance: InstanceId(Uuid::from_u128(u128::MAX)),
        substrate: long(),
        cause,
        decision: Some(decision()),
    }
}

fn started() -> Event {
    Event::Started {
        epoch: u64::MAX,
        computing_since: AT,
    }
}

fn outbox() -> Outbox {
    Outbox {
        seq: u64::MAX,
        digest: Digest([255; 32]),
        bytes: u32::MAX,
        count: u32::MAX,
        through: u64::MAX,
    }
}

fn boundary() -> Event {
    Event::Boundary(BoundaryEvent {
        index: u64::MAX,
        digest: Digest([255; 32]),
        bytes: u64::MAX,
        computed_at: AT,
        compute_us: u64::MAX,
        of: Some(u64::MAX),
        note: Some(long()),
        outputs: outputs(),
        energy: energy(),
    })
}

/// The most points, of the most and the longest names.
fn noted() -> Event {
    let point = Point {
        boundary: u64::MAX,
        mean: NUMBER,
        lowest: NUMBER,
        highest: NUMBER,
        reports: u64::MAX,
    };
    let points = vec![point; POINTS_LIMIT / NAMES_LIMIT];
    let name = |n| SeriesName::new(&format!("{}{n:02}", "n".repeat(NAME_LIMIT - 2))).unwrap();
    let series = (0..NAMES_LIMIT).map(|n| (name(n), points.clone()));
    Event::Noted {
        numbers: Series(series.collect()),
    }
}

fn split() -> Event {
    Event::Split {
        part: id(),
        nth: u32::MAX,
        from: u64::MAX,
        to: u64::MAX,
    }
}

fn completed() -> Event {
    Event::Completed {
        result: Value::String("\u{1}".repeat((INLINE_RESULT_LIMIT - 2) / 6)),
        object: Some(ResultObject {
            digest: Digest([255; 32]),
            bytes: u32::MAX,
        }),
        computed_until: AT,
        capsules: u64::MAX,
        outputs: outputs(),
        energy: energy(),
    }
}

fn computed() -> Event {
    match completed() {
        Event::Completed {
            result,
            object,
            computed_until,
            capsules,
            outputs,
            energy,
        } => Event::Computed {
            result,
            object,
            computed_until,
            capsules,
            outputs,
            energy,
        },
        other => panic!("{other:?}"),
    }
}

fn crashed() -> Event {
    Event::Crashed {
        attempt: u32::MAX,
        exit: long(),
        stderr: long(),
        backoff_ms: u64::MAX,
        fault: fault(),
    }
}

fn failed() -> Event {
    Event::Failed {
        reason: long(),
        stderr: long(),
        fault: fault(),
    }
}

fn held() -> Event {
    Event::Held {
        reason: long(),
        stderr: long(),
        fault: fault(),
    }
}

fn adjustment() -> Adjustment {
    Adjustment {
        priority: Some(i16::MIN),
        deadline: Some(Deadline {
            within_s: Some(u32::MAX),
            at: Some(AT),
            on_miss: OnMiss::Fail,
        }),
        viability: Signal::ALL.map(|signal| (signal, threshold())).into(),
        nodes: Some(vec![node(); NODES_LIMIT]),
        exclude: Some(vec![node(); NODES_LIMIT]),
        memory_bytes: Some(u64::MAX),
        device_memory_bytes: Some(u64::MAX),
    }
}

/// The largest event of each kind. A new kind does not compile until it is here.
fn every_event() -> Vec<Event> {
    let place = StatePlace {
        index: u64::MAX,
        digest: Digest([255; 32]),
        bytes: u64::MAX,
        seq: Some(u64::MAX),
        ordinal: u64::MAX,
    };
    let [cause, pressure] = worst_causes();
    let mut all = vec![
        Event::Submitted,
        bound(cause.clone()),
        bound(pressure.clone()),
        started(),
        boundary(),
        noted(),
        Event::Emitted { outbox: outbox() },
        Event::Refused {
            reason: long(),
            offer: u32::MAX,
            fault: fault(),
        },
        Event::Paused { who: long() },
        Event::Retried { who: long() },
        held(),
        Event::Resumed { who: long() },
        Event::Requested {
            who: long(),
            what: RequestKind::Cancel,
        },
        split(),
        Event::Merged { part: id() },
        Event::Returned { to: id() },
        Event::Healed {
            kept: u64::MAX,
            lost: u64::MAX,
            over: Digest([255; 32]),
        },
        Event::Reconfigured {
            who: long(),
            grant: Grant {
                substrate: Some(long()),
                threads: Some(u32::MAX),
                cpus: vec![99_999; CPUS_LIMIT],
                memory_bytes: Some(u64::MAX),
                device: Some(DeviceGrant {
                    uuid: long(),
                    memory_bytes: Some(u64::MAX),
                }),
            },
        },
        Event::Adjusted {
            who: long(),
            change: adjustment(),
        },
        Event::Unparked {
            reason: long(),
            computing_since: AT,
        },
        crashed(),
        completed(),
        computed(),
        Event::Verified {
            by: vec![node(); 2 * NODES_LIMIT],
            segments: u32::MAX,
        },
        failed(),
        Event::Cancelled { who: long() },
    ];
    for cause in [cause, pressure] {
        all.push(yielded(cause.clone()));
        all.push(Event::Parked {
            cause: cause.clone(),
            keep: Keep::Device,
            computed_until: AT,
        });
        all.push(Event::SteppedBack {
            to: Some(place.clone()),
            cause,
        });
    }
    let mut kinds: Vec<u32> = all.iter().map(kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds.len(), 28, "an event is missing");
    all
}

fn kind(event: &Event) -> u32 {
    match event {
        Event::Submitted => 0,
        Event::Bound { .. } => 1,
        Event::Started { .. } => 2,
        Event::Boundary(_) => 3,
        Event::Emitted { .. } => 4,
        Event::Yielded { .. } => 5,
        Event::Refused { .. } => 6,
        Event::Paused { .. } => 7,
        Event::Resumed { .. } => 8,
        Event::Requested { .. } => 9,
        Event::Split { .. } => 10,
        Event::Merged { .. } => 11,
        Event::Returned { .. } => 12,
        Event::Reconfigured { .. } => 13,
        Event::Adjusted { .. } => 14,
        Event::Parked { .. } => 15,
        Event::Unparked { .. } => 16,
        Event::Crashed { .. } => 17,
        Event::Completed { .. } => 18,
        Event::Computed { .. } => 19,
        Event::Verified { .. } => 20,
        Event::SteppedBack { .. } => 21,
        Event::Failed { .. } => 22,
        Event::Cancelled { .. } => 23,
        Event::Healed { .. } => 24,
        Event::Held { .. } => 25,
        Event::Retried { .. } => 26,
        Event::Noted { .. } => 27,
    }
}

/// The largest submission that a ledger message contains.
fn submission() -> Submission {
    let mut submission = Submission::of("synthetic@1");
    submission.labels = BTreeMap::from([("k".to_owned(), String::new())]);
    let room = INLINE_SUBMISSION_LIMIT - submission.to_json().len();
    submission.labels = BTreeMap::from([("k".to_owned(), "x".repeat(room))]);
    assert_eq!(submission.to_json().len(), INLINE_SUBMISSION_LIMIT);
    submission
}

/// The largest state.
fn state() -> ExecutionState {
    let tenant = Tenant::new("t".repeat(64)).unwrap();
    let mut word = long();
    limits::cut(&mut word, WORD_LIMIT);
    let mut state = ExecutionState::unborn(tenant, id(), Arc::new(submission()), None, AT);
    assert!(state.spec.is_some());
    let measured = || {
        Some(Measured {
            uj: u64::MAX,
            intervals: u64::MAX,
        })
    };
    state.ordinal = u64::MAX;
    state.prev = Some(Digest([255; 32]));
    state.author = word.clone();
    state.at = AT;
    state.contract = Contract::Statistical;
    state.guarded = true;
    state.batch = Some(BatchPlace {
        id: BatchId(Uuid::from_u128(u128::MAX)),
        line: u32::MAX,
    });
    state.phase = Phase::Started(Started {
        binding: Binding {
            node: node(),
            instance: InstanceId(Uuid::from_u128(u128::MAX)),
            substrate: word.clone(),
            seq: u64::MAX,
            at: AT,
        },
        requested: Some(Requested {
            what: RequestKind::Cancel,
            who: word,
            at: Some(AT),
        }),
        parked: Some(Parked {
            keep: Keep::Device,
            at: AT,
        }),
    });
    state.epoch = u64::MAX;
    state.boundary = Some(StatePlace {
        index: u64::MAX,
        digest: Digest([255; 32]),
        bytes: u64::MAX,
        seq: Some(u64::MAX),
        ordinal: u64::MAX,
    });
    state.moved_at = Some(AT);
    let left = Left {
        node: node(),
        at: AT,
    };
    state.left = vec![left; 8];
    state.adjusted = Some(Box::new(adjustment()));
    let part = Part {
        id: id(),
        from: u64::MAX,
        to: u64::MAX,
    };
    state.spread = Some(Box::new(Spreading {
        up_to: u32::MAX,
        part_of: Some(id()),
        splits: u32::MAX,
        since: u64::MAX,
        end: Some(u64::MAX),
        waits: true,
        parts: vec![part; PARTS_LIMIT],
    }));
    state.outbox = Some(outbox());
    state.crashes_since_commit = u32::MAX;
    state.lost_unstarted = true;
    state.deaths = vec![node(); 8];
    state.totals = Totals {
        commits: u64::MAX,
        state_bytes: u64::MAX,
        rebindings: u64::MAX,
        pressure: u64::MAX,
        crashes: u64::MAX,
        node_faults: u64::MAX,
        infrastructure_faults: u64::MAX,
        compute_us: u64::MAX,
        steps_back: u64::MAX,
        energy: Some(EnergyTotals {
            host: measured(),
            device: measured(),
        }),
    };
    state
}

/// Bytes of the message with these events and the largest state.
fn size(mut events: Vec<Event>) -> usize {
    limits::fit(&mut events);
    let message = LedgerMessage {
        v: 1,
        events,
        state: state().into(),
        sig: Some("s".repeat(128)),
    };
    serde_json::to_string(&message).unwrap().len()
}

#[test]
fn the_largest_event_of_every_kind_fits_with_the_largest_state() {
    for event in every_event() {
        let name = serde_json::to_value(&event).unwrap()["type"].to_string();
        // `started` is in one message with the event that follows it.
        let size = size(vec![started(), event]);
        println!("{name}: {size} bytes");
        assert!(size <= EVENT_HEADER_LIMIT, "{name}: {size} bytes");
    }
}

#[test]
fn the_largest_message_of_every_combination_fits() {
    let [cause, pressure] = worst_causes();
    let who = || Event::Paused { who: long() };
    for (name, events) in [
        (
            "handover",
            vec![
                started(),
                boundary(),
                noted(),
                yielded(pressure.clone()),
                bound(pressure.clone()),
            ],
        ),
        (
            "handover for another reason",
            vec![
                started(),
                boundary(),
                noted(),
                yielded(cause.clone()),
                bound(cause.clone()),
            ],
        ),
        (
            "crash that leaves",
            vec![
                started(),
                crashed(),
                yielded(pressure.clone()),
                bound(pressure.clone()),
            ],
        ),
        ("crash that fails", vec![started(), crashed(), failed()]),
        (
            "pause at a boundary",
            vec![
                started(),
                boundary(),
                noted(),
                yielded(pressure.clone()),
                who(),
            ],
        ),
        (
            "park at a boundary",
            vec![
                started(),
                boundary(),
                noted(),
                Event::Parked {
                    cause: pressure,
                    keep: Keep::Device,
                    computed_until: AT,
                },
            ],
        ),
        (
            "first message that completes with σ",
            vec![
                Event::Submitted,
                bound(Cause::Initial),
                started(),
                boundary(),
                noted(),
                completed(),
            ],
        ),
        (
            "completion after a verification",
            vec![
                Event::Verified {
                    by: vec![node(); NODES_LIMIT],
                    segments: u32::MAX,
                },
                completed(),
            ],
        ),
        (
            "split, merge and messages at a boundary",
            vec![
                started(),
                boundary(),
                noted(),
                Event::Merged { part: id() },
                split(),
                Event::Emitted { outbox: outbox() },
            ],
        ),
    ] {
        let size = size(events);
        println!("{name}: {size} bytes");
        assert!(size <= EVENT_HEADER_LIMIT, "{name}: {size} bytes");
    }
}

#[test]
fn a_handover_says_its_readings_once() {
    let mut events = vec![yielded(pressure()), bound(pressure())];
    limits::fit(&mut events);
    let readings = |event: &Event| match event {
        Event::Yielded {
            cause: Cause::Pressure { evidence },
            ..
        }
        | Event::Bound {
            cause: Cause::Pressure { evidence },
            ..
        } => evidence.vector.len(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        events.iter().map(readings).collect::<Vec<_>>(),
        [0, EVIDENCE_LIMIT]
    );
    let mut alone = [yielded(pressure())];
    limits::fit(&mut alone);
    assert_eq!(readings(&alone[0]), EVIDENCE_LIMIT);
}

#[test]
fn a_text_is_cut_by_its_length_in_json_between_two_characters() {
    for (text, limit, beginning, end) in [
        ("abc", 3, "abc", "abc"),
        ("abcd", 3, "abc", "bcd"),
        ("a\u{1}b", 6, "a", "b"),
        ("a\u{1}b", 7, "a\u{1}", "\u{1}b"),
        ("éé", 3, "é", "é"),
        ("\"\"\n", 3, "\"", "\n"),
        ("", 0, "", ""),
        ("x", 0, "", ""),
    ] {
        let (mut front, mut back) = (text.to_owned(), text.to_owned());
        limits::cut(&mut front, limit);
        limits::cut_front(&mut back, limit);
        assert_eq!((&*front, &*back), (beginning, end), "{text:?} to {limit}");
        for cut in [front, back] {
            let written = serde_json::to_string(&cut).unwrap().len() - 2;
            assert_eq!(written, limits::text_len(&cut));
            assert!(written <= limit);
        }
    }
}
