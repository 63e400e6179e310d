//! Who must act next on an execution, and by when. It is derived from the state in the ledger
//! alone.
//!
//! | phase | who | what | by when |
//! |---|---|---|---|
//! | pending | policy service | bind it | no limit: the ledger does not say whether a node has room |
//! | pending, waits for its parts | policy service | bind it once its last part ended | no limit |
//! | bound | worker | start it | [`START_MS`] after the binding |
//! | bound, later than that | policy service | bind it to another node | [`REBIND_MS`] after that |
//! | started | worker | commit or end | no limit: a program may compute for hours between commits |
//! | started, cancel requested | worker | cancel it | [`REQUEST_MS`] after the request |
//! | started, pause requested | worker | pause it | the same, or [`INTERVALS`] mean intervals between its commits if that is longer; no limit before its first commit |
//! | parked | policy service | continue or move it | no limit: others have its place |
//! | parked, something requested | worker | do it | [`REQUEST_MS`] after both |
//! | paused | a person | resume it | no limit |
//! | held | a person | retry it, or cancel it | no limit |
//! | verifying | policy service | have it verified | no limit: other nodes compute it again |
//! | ended | recorder | record its end | no limit: the ledger does not say what is recorded |
//!
//! An overdue duty is a reason to look, not a proof of a fault. An execution may also wait that
//! long in a node's queue while no other node has room, and a large state may take that long to
//! arrive at its node.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::event::{Bound, ExecutionState, Phase, RequestKind, Started};
use crate::ids::{NodeId, Timestamp};

/// Time for a worker to start a bound execution, in ms. After it, the policy service binds the
/// execution to another node. It is twice the time that the policy service allows a busy node.
pub const START_MS: u64 = 120_000;
/// Time for the policy service to bind an execution that was not started to another node, in ms.
pub const REBIND_MS: u64 = 60_000;
/// Time for a worker to do a request, in ms.
pub const REQUEST_MS: u64 = 60_000;
/// Time for a worker to pause an execution, in mean intervals between two commits: a pause happens
/// at a boundary.
pub const INTERVALS: u64 = 4;

/// Who must act next.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Actor {
    /// The worker that holds the binding.
    Worker,
    /// A policy service.
    PolicyService,
    /// The recorder.
    Recorder,
    /// A person.
    Person,
}

impl Actor {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Worker,
        Self::PolicyService,
        Self::Recorder,
        Self::Person,
    ];

    /// The name in metrics and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::PolicyService => "policy_service",
            Self::Recorder => "recorder",
            Self::Person => "person",
        }
    }
}

/// The task that must be done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Bind it to a node.
    Bind,
    /// Bind it after the last of its parts has ended.
    AwaitParts,
    /// Start it.
    Start,
    /// Bind it to another node, because it was not started.
    Rebind,
    /// Commit its next boundary, or end it.
    Compute,
    /// Cancel it, as requested.
    Cancel,
    /// Pause it, as requested.
    Pause,
    /// Continue it where it is parked, or move it.
    Unpark,
    /// Resume it.
    Resume,
    /// Retry it.
    Retry,
    /// Let other nodes verify it.
    Verify,
    /// Record its end, if there is a recorder.
    Record,
}

impl Task {
    /// Words for people, to follow "must".
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::Bind => "bind it to a node",
            Self::AwaitParts => "bind it once the last of its parts ended",
            Self::Start => "start it",
            Self::Rebind => "bind it to another node, since it was not started",
            Self::Compute => "commit its next boundary or end",
            Self::Cancel => "cancel it, as requested",
            Self::Pause => "pause it, as requested",
            Self::Unpark => "resume it where it is parked, or move it",
            Self::Resume => "resume it (`fiec resume`)",
            Self::Retry => "retry it (`fiec retry`), or cancel it",
            Self::Verify => "have it verified by other nodes",
            Self::Record => "record its end",
        }
    }
}

/// Who must act next on an execution, and by when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Duty {
    /// Who.
    pub who: Actor,
    /// The worker's node; only for a worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// The task.
    pub what: Task,
    /// The time limit. Absent if nothing in the ledger sets one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Timestamp>,
}

impl Duty {
    /// True after the time limit.
    pub fn is_overdue(&self, now: Timestamp) -> bool {
        self.by.is_some_and(|by| by < now)
    }

    /// A sentence for people.
    pub fn in_words(&self) -> String {
        let who = match (self.who, &self.node) {
            (Actor::Worker, Some(node)) => format!("worker {node}"),
            (Actor::Worker, None) => "its worker".to_owned(),
            (Actor::PolicyService, _) => "a policy service".to_owned(),
            (Actor::Recorder, _) => "the recorder".to_owned(),
            (Actor::Person, _) => "a person".to_owned(),
        };
        let by = self.by.map(|by| format!(", by {by}")).unwrap_or_default();
        format!("{who} must {}{by}", self.what.in_words())
    }
}

/// The duty on an execution with this state, seen at `now`.
pub fn of(state: &ExecutionState, now: Timestamp) -> Duty {
    let node = state.phase.binding().map(|binding| binding.node.clone());
    let duty = Standing::of(state).duty(now);
    Duty {
        node: node.filter(|_| duty.who == Actor::Worker),
        ..duty
    }
}

/// The fields that a duty depends on, without names. Small enough to keep for 100,000 executions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Waits for a binding.
    Pending {
        /// True if it waits for its parts first.
        awaits_parts: bool,
    },
    /// Bound, not started.
    Bound {
        /// When it was bound.
        at: Timestamp,
    },
    /// Started.
    Started {
        /// True if it is parked.
        is_parked: bool,
        /// The request that is not done yet.
        request: Option<Request>,
    },
    /// Waits for somebody to resume it.
    Paused,
    /// Waits for somebody to retry it.
    Held,
    /// Other nodes compute it again.
    Verifying,
    /// Ended.
    Ended,
}

/// A request to the worker that holds an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// [`Task::Cancel`] or [`Task::Pause`].
    pub what: Task,
    /// The time limit, if there is one.
    pub by: Option<Timestamp>,
}

/// The fields that the time limit of a request depends on.
#[derive(Debug, Clone, Copy)]
pub struct Requested {
    /// The request in the ledger.
    pub what: RequestKind,
    /// When it was requested.
    pub at: Timestamp,
    /// When the execution was bound to its present worker.
    pub bound_at: Timestamp,
    /// When it was parked, if it is.
    pub parked_at: Option<Timestamp>,
    /// Commits so far.
    pub commits: u64,
    /// Computing time up to the last commit, in µs.
    pub compute_us: u64,
}

impl Request {
    /// The request with its time limit.
    pub fn of(requested: Requested) -> Self {
        let from = requested.at.max(requested.bound_at);
        let soon = from.max(requested.parked_at.unwrap_or(from));
        let soon = soon.plus_ms(REQUEST_MS);
        let what = match requested.what {
            RequestKind::Cancel => Task::Cancel,
            RequestKind::Pause => Task::Pause,
        };
        if what == Task::Cancel || requested.parked_at.is_some() {
            let by = Some(soon);
            return Self { what, by };
        }
        let mean_us = requested.compute_us.checked_div(requested.commits);
        let by = mean_us.map(|mean| soon.max(from.plus_ms(mean.saturating_mul(INTERVALS) / 1_000)));
        Self { what, by }
    }
}

impl Standing {
    /// The standing of an execution with this state.
    pub fn of(state: &ExecutionState) -> Self {
        match &state.phase {
            Phase::Pending { .. } => Self::Pending {
                awaits_parts: state.spread.as_ref().is_some_and(|spread| spread.waits),
            },
            Phase::Bound(Bound { binding, .. }) => Self::Bound { at: binding.at },
            Phase::Started(Started {
                binding,
                requested,
                parked,
            }) => Self::Started {
                is_parked: parked.is_some(),
                request: requested.as_ref().map(|requested| {
                    Request::of(Requested {
                        what: requested.what,
                        at: requested.at.unwrap_or(state.at),
                        bound_at: binding.at,
                        parked_at: parked.map(|parked| parked.at),
                        commits: state.totals.commits,
                        compute_us: state.totals.compute_us,
                    })
                }),
            },
            Phase::Paused { .. } => Self::Paused,
            Phase::Held { .. } => Self::Held,
            Phase::Verifying { .. } => Self::Verifying,
            Phase::Completed | Phase::Failed | Phase::Cancelled | Phase::Returned => Self::Ended,
        }
    }

    /// The duty, seen at `now`, without the worker's node.
    pub fn duty(self, now: Timestamp) -> Duty {
        let (who, what, by) = match self {
            Self::Pending { awaits_parts } => {
                let what = match awaits_parts {
                    true => Task::AwaitParts,
                    false => Task::Bind,
                };
                (Actor::PolicyService, what, None)
            }
            Self::Bound { at } => {
                let start = at.plus_ms(START_MS);
                if now <= start {
                    (Actor::Worker, Task::Start, Some(start))
                } else {
                    let by = Some(start.plus_ms(REBIND_MS));
                    (Actor::PolicyService, Task::Rebind, by)
                }
            }
            Self::Started {
                request: Some(request),
                ..
            } => (Actor::Worker, request.what, request.by),
            Self::Started {
                is_parked: true, ..
            } => (Actor::PolicyService, Task::Unpark, None),
            Self::Started { .. } => (Actor::Worker, Task::Compute, None),
            Self::Paused => (Actor::Person, Task::Resume, None),
            Self::Held => (Actor::Person, Task::Retry, None),
            Self::Verifying => (Actor::PolicyService, Task::Verify, None),
            Self::Ended => (Actor::Recorder, Task::Record, None),
        };
        Duty {
            who,
            node: None,
            what,
            by,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::event::{BoundaryEvent, Cause, Event};
    use crate::ids::{Digest, ExecutionId, InstanceId, Tenant};
    use crate::scheduling::Keep;
    use crate::submission::Submission;

    /// A moment, in seconds.
    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_micros(seconds * 1_000_000)
    }

    fn then(state: &ExecutionState, seconds: i64, events: &[Event]) -> ExecutionState {
        state.after(events, "test", at(seconds), None).unwrap()
    }

    fn pending(submission: &str) -> ExecutionState {
        let spec: Submission = serde_json::from_str(submission).unwrap();
        let tenant = Tenant::new("t").unwrap();
        let id = ExecutionId(uuid::Uuid::from_u128(7));
        let unborn = ExecutionState::unborn(tenant, id, Arc::new(spec), None, at(0));
        then(&unborn, 0, &[Event::Submitted])
    }

    fn bound(state: &ExecutionState, seconds: i64) -> ExecutionState {
        let event = Event::Bound {
            epoch: state.epoch + 1,
            node: "n1".parse().unwrap(),
            instance: InstanceId(uuid::Uuid::from_u128(1)),
            substrate: "host".to_owned(),
            cause: Cause::Lost { silent_ms: 1 },
            decision: None,
        };
        then(state, seconds, &[event])
    }

    fn started(seconds: i64) -> ExecutionState {
        let bound = bound(&pending(r#"{"program":"p@1"}"#), seconds);
        let event = Event::Started {
            epoch: bound.epoch,
            computing_since: at(seconds),
        };
        then(&bound, seconds, &[event])
    }

    /// A boundary with this many seconds of computing.
    fn commit(state: &ExecutionState, seconds: i64, took: u64) -> ExecutionState {
        let event = BoundaryEvent {
            index: state.boundary_index() + 1,
            digest: Digest::of(b""),
            bytes: 0,
            computed_at: at(seconds),
            compute_us: took * 1_000_000,
            of: None,
            note: None,
            outputs: Vec::new(),
            energy: None,
        };
        then(state, seconds, &[Event::Boundary(event)])
    }

    fn request(state: &ExecutionState, seconds: i64, what: RequestKind) -> ExecutionState {
        let event = Event::Requested {
            who: "ann".to_owned(),
            what,
        };
        then(state, seconds, &[event])
    }

    #[track_caller]
    fn owes(state: &ExecutionState, now: i64, who: Actor, what: Task, by: Option<i64>) {
        let duty = of(state, at(now));
        assert_eq!((duty.who, duty.what), (who, what), "{state:?}");
        assert_eq!(duty.by, by.map(at), "{state:?}");
        assert_eq!(duty.node.is_some(), who == Actor::Worker, "{duty:?}");
        assert_eq!(duty.is_overdue(at(now)), by.is_some_and(|by| by < now));
    }

    const LATER: i64 = 1_000_000;

    #[test]
    fn an_execution_without_a_place_is_the_policy_services_without_a_limit() {
        let state = pending(r#"{"program":"p@1"}"#);
        owes(&state, LATER, Actor::PolicyService, Task::Bind, None);
    }

    #[test]
    fn a_holder_that_waits_for_its_parts_is_bound_once_they_ended() {
        let mut state = pending(r#"{"program":"p@1","spread":{"up_to":2}}"#);
        state.spread.as_mut().unwrap().waits = true;
        owes(&state, LATER, Actor::PolicyService, Task::AwaitParts, None);
    }

    #[test]
    fn a_worker_must_start_what_is_bound_to_it_and_then_the_policy_service_must_rebind_it() {
        let state = bound(&pending(r#"{"program":"p@1"}"#), 10);
        owes(&state, 10, Actor::Worker, Task::Start, Some(130));
        owes(&state, 130, Actor::Worker, Task::Start, Some(130));
        owes(&state, 131, Actor::PolicyService, Task::Rebind, Some(190));
        owes(&state, 191, Actor::PolicyService, Task::Rebind, Some(190));
        assert!(of(&state, at(191)).is_overdue(at(191)));
        assert!(!of(&state, at(190)).is_overdue(at(190)));
    }

    #[test]
    fn a_program_may_compute_for_as_long_as_it_likes() {
        owes(&started(10), LATER, Actor::Worker, Task::Compute, None);
        let state = commit(&started(10), 20, 10);
        owes(&state, LATER, Actor::Worker, Task::Compute, None);
    }

    #[test]
    fn a_cancel_has_a_limit_that_later_commits_do_not_move() {
        let state = request(&started(10), 100, RequestKind::Cancel);
        owes(&state, 100, Actor::Worker, Task::Cancel, Some(160));
        let state = commit(&state, 1_000, 900);
        owes(&state, 1_000, Actor::Worker, Task::Cancel, Some(160));
    }

    #[test]
    fn a_request_of_an_earlier_version_counts_from_the_last_message() {
        let mut state = request(&started(10), 100, RequestKind::Cancel);
        let Phase::Started(started) = &mut state.phase else {
            panic!("{}", state.phase.as_str());
        };
        started.requested.as_mut().unwrap().at = None;
        owes(&state, 100, Actor::Worker, Task::Cancel, Some(160));
    }

    #[test]
    fn a_request_that_outlives_a_binding_counts_from_the_next_one() {
        let state = bound(&request(&started(10), 100, RequestKind::Cancel), 1_000);
        owes(&state, 1_000, Actor::Worker, Task::Start, Some(1_120));
        let event = Event::Started {
            epoch: 2,
            computing_since: at(1_010),
        };
        let state = then(&state, 1_010, &[event]);
        owes(&state, 1_010, Actor::Worker, Task::Cancel, Some(1_060));
    }

    #[test]
    fn a_pause_waits_for_a_boundary_of_the_length_that_its_boundaries_have() {
        let state = request(&started(10), 100, RequestKind::Pause);
        owes(&state, LATER, Actor::Worker, Task::Pause, None);
        let short = request(&commit(&started(10), 11, 1), 100, RequestKind::Pause);
        owes(&short, 100, Actor::Worker, Task::Pause, Some(160));
        let long = request(&commit(&started(10), 610, 600), 700, RequestKind::Pause);
        owes(&long, 700, Actor::Worker, Task::Pause, Some(700 + 4 * 600));
    }

    #[test]
    fn what_is_parked_is_the_policy_services_and_a_request_to_it_the_workers() {
        let parked = Event::Parked {
            cause: Cause::Balance,
            keep: Keep::Device,
            computed_until: at(50),
        };
        let state = then(&started(10), 50, std::slice::from_ref(&parked));
        owes(&state, LATER, Actor::PolicyService, Task::Unpark, None);
        let asked = request(&state, 100, RequestKind::Pause);
        owes(&asked, 100, Actor::Worker, Task::Pause, Some(160));
        let asked_before = then(
            &request(&started(10), 20, RequestKind::Pause),
            50,
            &[parked],
        );
        owes(&asked_before, 100, Actor::Worker, Task::Pause, Some(110));
    }

    #[test]
    fn a_paused_execution_waits_for_a_person() {
        let event = Event::Paused {
            who: "ann".to_owned(),
        };
        let state = then(&pending(r#"{"program":"p@1"}"#), 5, &[event]);
        owes(&state, LATER, Actor::Person, Task::Resume, None);
    }

    #[test]
    fn a_held_execution_waits_for_a_person() {
        let event = Event::Held {
            reason: "no".to_owned(),
            stderr: String::new(),
            fault: None,
        };
        let state = then(&started(10), 20, &[event]);
        owes(&state, LATER, Actor::Person, Task::Retry, None);
    }

    #[test]
    fn a_computed_execution_waits_for_its_verification() {
        let mut state = started(10);
        state.guarded = true;
        let event = Event::Computed {
            result: serde_json::Value::Null,
            object: None,
            computed_until: at(20),
            capsules: 1,
            outputs: Vec::new(),
            energy: None,
        };
        let state = then(&state, 20, &[event]);
        owes(&state, LATER, Actor::PolicyService, Task::Verify, None);
    }

    #[test]
    fn an_execution_that_ended_is_the_recorders() {
        let event = Event::Cancelled {
            who: "ann".to_owned(),
        };
        let state = then(&started(10), 20, &[event]);
        owes(&state, LATER, Actor::Recorder, Task::Record, None);
    }

    #[test]
    fn words_name_the_worker_and_the_time() {
        let state = bound(&pending(r#"{"program":"p@1"}"#), 10);
        assert_eq!(
            of(&state, at(10)).in_words(),
            "worker n1 must start it, by 1970-01-01T00:02:10.000000Z"
        );
        assert_eq!(
            of(&pending(r#"{"program":"p@1"}"#), at(10)).in_words(),
            "a policy service must bind it to a node"
        );
    }
}
