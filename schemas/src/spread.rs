//! Ranges of tiles that several executions share.
//!
//! If an execution's work is a range of independent tiles, several executions may compute it at
//! once. A **holder** splits off **parts**. Parts are ordinary executions and may split as well:
//!
//! ```text
//! holder   [from ........ x ...... cut)            done up to x, left up to its end
//! parts                            [cut ...... end) [end ........ to)
//!                                   last of the stack     first
//! split      the last tiles that are left become a part: the new last one
//! yielded    with the cause `parts`: the holder's own range is done, it waits for the last part
//! completed  of a part: all of its range is done, with its σ
//! returned   of a part: its holder gets the remaining tiles
//! merged     the holder takes the last part's tiles; its end becomes that part's end
//! ```
//!
//! Each execution has done one piece from its beginning, so σ only needs the end of its range. The
//! parts of a holder form a stack. The last part begins where the holder ends, and is taken back
//! first, so tiles are never out of order.
//!
//! A part's id derives from its holder, the number of earlier splits, and its range. Every reader
//! of a `split` may make the part, and all make the same one. Holder and range alone would not do: a
//! range that came back and is split off again would have the id of the earlier part.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::event::ExecutionState;
use crate::fold::TransitionError;
use crate::ids::{BoundaryIndex, ExecutionId, Timestamp};
use crate::programs::{self, TileRange};
use crate::scheduling::Adjustment;
use crate::submission::{FieldError, Submission};

/// Most parts of one holder at a time, so that a ledger message fits its header.
pub const PARTS_LIMIT: usize = 16;
/// Limits on the number of executions that share a range.
pub const UP_TO: std::ops::RangeInclusive<u32> = 2..=64;

/// A submission's permission to share its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// Most executions that compute it at once, itself and its parts: 2 to 64.
    #[schemars(range(min = 2, max = 64))]
    pub up_to: u32,
}

/// How an execution shares its range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Spreading {
    /// Most executions that compute the whole range at once.
    pub up_to: u32,
    /// Its holder, if it is a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<ExecutionId>,
    /// Number of its splits.
    #[serde(default, skip_serializing_if = "none32")]
    pub splits: u32,
    /// Boundary of the last split or merge, 0 if there is none. It cannot step back before that.
    #[serde(default, skip_serializing_if = "none64")]
    pub since: BoundaryIndex,
    /// The tile after its last one, if known from its submission or a split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<u64>,
    /// True if it has done all tiles that it kept, and waits for the last of its parts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
    /// Parts that it has not taken back. The last one begins where its own range ends. Each other
    /// one begins where the next one ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
}

/// A part of a holder's range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Part {
    /// The execution that computes it.
    pub id: ExecutionId,
    /// The first tile.
    pub from: u64,
    /// The tile after the last one.
    pub to: u64,
}

impl Part {
    /// Its tiles.
    pub fn range(&self) -> TileRange {
        TileRange {
            from: self.from,
            to: self.to,
        }
    }
}

fn none32(n: &u32) -> bool {
    *n == 0
}

fn none64(n: &u64) -> bool {
    *n == 0
}

/// The id of a part with this range, whose holder was split `nth` times before. Everybody who
/// derives it gets the same id. UUIDv8 of BLAKE3.
pub fn part_id(of: ExecutionId, nth: u32, range: TileRange) -> ExecutionId {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"part/").update(of.0.as_bytes());
    hasher.update(&nth.to_le_bytes());
    hasher.update(&range.from.to_le_bytes());
    hasher.update(&range.to.to_le_bytes());
    let mut bytes = [0; 16];
    hasher.finalize_xof().fill(&mut bytes);
    ExecutionId(uuid::Builder::from_custom_bytes(bytes).into_uuid())
}

/// The range of tiles in a submission's parameters, if there is one.
pub fn tiles(params: &serde_json::Value) -> Option<TileRange> {
    let given = params.get("tiles").filter(|given| given.is_object())?;
    TileRange::deserialize(given).ok()
}

fn wrong(rule: impl Into<String>) -> TransitionError {
    TransitionError::Spread { rule: rule.into() }
}

impl Spreading {
    /// The initial state. `None` if the submission's range may not be shared.
    pub fn of(submission: &Submission) -> Option<Self> {
        let Spread { up_to } = submission.spread?;
        Some(Self {
            up_to,
            part_of: None,
            splits: 0,
            since: 0,
            end: tiles(&submission.params).map(|range| range.to),
            waits: false,
            parts: Vec::new(),
        })
    }

    /// The part that is taken back next.
    pub fn last(&self) -> Option<&Part> {
        self.parts.last()
    }

    pub(crate) fn split(
        &mut self,
        own: ExecutionId,
        part: ExecutionId,
        nth: u32,
        range: TileRange,
    ) -> Result<(), TransitionError> {
        let TileRange { from, to } = range;
        if nth != self.splits {
            return Err(wrong(format!(
                "the range was split {} times before, not {nth}",
                self.splits
            )));
        }
        if from >= to || part != part_id(own, nth, range) {
            return Err(wrong(format!("{part} is not the part of {from} to {to}")));
        }
        if self.end.is_some_and(|end| end != to) || self.waits {
            return Err(wrong(format!(
                "tiles {from} to {to} are not the end of the remaining range"
            )));
        }
        if self.parts.len() >= PARTS_LIMIT {
            return Err(wrong(format!(
                "the execution already has {PARTS_LIMIT} parts, which is the limit"
            )));
        }
        self.splits += 1;
        self.end = Some(from);
        self.parts.push(Part { id: part, from, to });
        Ok(())
    }

    pub(crate) fn wait(&mut self) -> Result<(), TransitionError> {
        if self.parts.is_empty() {
            return Err(wrong("the execution has no parts to wait for"));
        }
        self.waits = true;
        Ok(())
    }

    pub(crate) fn merge(&mut self, part: ExecutionId) -> Result<(), TransitionError> {
        let last = self.parts.pop_if(|last| last.id == part);
        let Some(last) = last else {
            return Err(wrong(format!("{part} is not the last of its parts")));
        };
        self.end = Some(last.to);
        self.waits = false;
        Ok(())
    }

    pub(crate) fn give_back(&mut self, to: ExecutionId) -> Result<(), TransitionError> {
        if self.part_of != Some(to) {
            return Err(wrong(format!("the execution is not a part of {to}")));
        }
        if !self.parts.is_empty() {
            return Err(wrong("the part still has parts of its own"));
        }
        Ok(())
    }

    pub(crate) fn may_complete(&self) -> Result<(), TransitionError> {
        match self.parts.len() {
            0 => Ok(()),
            n => Err(wrong(format!(
                "the execution cannot complete while {n} of its parts are not merged"
            ))),
        }
    }

    pub(crate) fn step_back(
        &mut self,
        found: BoundaryIndex,
        last: BoundaryIndex,
    ) -> Result<(), TransitionError> {
        if found < self.since {
            return Err(wrong(format!(
                "a step back to boundary {found}, before its range was split or merged ({})",
                self.since
            )));
        }
        self.waits &= found == last;
        Ok(())
    }
}

impl Submission {
    /// The submission of a part: the same submission, for this range. Fields about when and with
    /// which others the whole starts are left out. Its deadline is the same moment (`submitted_at`
    /// is the holder's).
    pub fn part(&self, range: TileRange, submitted_at: Timestamp) -> Self {
        let mut part = Self {
            id: None,
            batch: None,
            expected_s: None,
            after: Vec::new(),
            at_once: None,
            gang: None,
            array: None,
            ..self.clone()
        };
        if let Some(deadline) = &mut part.deadline {
            deadline.at = Some(deadline.moment(submitted_at));
            deadline.within_s = None;
        }
        if let Some(params) = part.params.as_object_mut() {
            let range = serde_json::json!({ "from": range.from, "to": range.to });
            params.insert("tiles".to_owned(), range);
        }
        part
    }
}

impl Adjustment {
    /// The same change for a part of an execution submitted at `submitted_at`. A deadline keeps its
    /// moment.
    pub fn for_part(&self, submitted_at: Timestamp) -> Self {
        let mut change = self.clone();
        if let Some(deadline) = &mut change.deadline {
            deadline.at = Some(deadline.moment(submitted_at));
            deadline.within_s = None;
        }
        change
    }
}

impl ExecutionState {
    /// A part before any message, submitted at `submitted_at`. `submission` is the part's
    /// ([`Submission::part`] of the holder's). The holder's adjustments apply to it.
    pub fn unborn_part(
        holder: &Self,
        part: &Part,
        submission: Arc<Submission>,
        submitted_at: Timestamp,
    ) -> Self {
        let tenant = holder.tenant.clone();
        let mut state = Self::unborn(tenant, part.id, submission, None, submitted_at);
        let changed = holder.adjusted.as_ref();
        state.adjusted = changed.map(|change| Box::new(change.for_part(holder.submitted_at)));
        let up_to = holder.spread.as_ref().map(|spread| spread.up_to);
        state.spread = Some(Box::new(Spreading {
            up_to: up_to.unwrap_or(*UP_TO.start()),
            part_of: Some(holder.execution),
            splits: 0,
            since: 0,
            end: Some(part.to),
            waits: false,
            parts: Vec::new(),
        }));
        state
    }

    /// Parts that it has not taken back.
    pub fn parts(&self) -> &[Part] {
        self.spread.as_ref().map_or(&[], |spread| &spread.parts)
    }

    /// Its holder, if it is a part.
    pub fn part_of(&self) -> Option<ExecutionId> {
        self.spread.as_ref()?.part_of
    }
}

/// Checks the field `spread` of a submission.
pub(crate) fn check(spec: &Submission) -> Result<(), FieldError> {
    let Some(Spread { up_to }) = spec.spread else {
        return Ok(());
    };
    let refuse = |field: &str, rule: String| Err(FieldError::new(field, rule));
    if !UP_TO.contains(&up_to) {
        return refuse(
            "spread.up_to",
            format!("must be from 2 to 64, but is {up_to}"),
        );
    }
    for (given, field) in [
        (spec.gang.is_some(), "gang"),
        (spec.verify.is_some(), "verify"),
    ] {
        if given {
            return refuse("spread", format!("cannot be given together with {field}"));
        }
    }
    let built_in = programs::BUILT_IN.contains(&spec.program.as_str());
    if built_in && spec.program != programs::GEMM {
        let rule = format!(
            "{} has no range of tiles that could be shared: leave it out, or use gemm@1 or a \
             program of your own that splits",
            spec.program
        );
        return refuse("spread", rule);
    }
    match spec.params.get("tiles") {
        Some(_) if spec.array.is_some() => Ok(()),
        Some(given) if tiles(&spec.params).is_none_or(|range| range.count() == 0) => refuse(
            "params.tiles",
            format!(r#"must be {{"from": …, "to": …}} with from below to, but is {given}"#),
        ),
        None if !built_in => refuse(
            "params.tiles",
            r#"must be given as {"from": …, "to": …}, since it is to be shared"#.to_owned(),
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bad_field_is_named_with_its_rule() {
        let gemm = r#""program":"gemm@1","params":{"a":{"random":{"n":8}},"b":{"random":{"n":8}}}"#;
        let own = r#""program":"sweep@1","params":{"tiles":{"from":0,"to":9}}"#;
        for (start, fields, field, word) in [
            (gemm, r#""spread":{"up_to":1}"#, "spread.up_to", "2 to 64"),
            (gemm, r#""spread":{"up_to":65}"#, "spread.up_to", "2 to 64"),
            (
                gemm,
                r#""spread":{"up_to":2},"verify":"none""#,
                "spread",
                "verify",
            ),
            (
                gemm,
                r#""spread":{"up_to":2},"gang":{"name":"g","size":2}"#,
                "spread",
                "gang",
            ),
            (
                r#""program":"synthetic@1""#,
                r#""spread":{"up_to":2}"#,
                "spread",
                "no range",
            ),
            (
                r#""program":"sweep@1""#,
                r#""spread":{"up_to":2}"#,
                "params.tiles",
                "given",
            ),
            (
                r#""program":"sweep@1","params":{"tiles":[1,2]}"#,
                r#""spread":{"up_to":2}"#,
                "params.tiles",
                "[1,2]",
            ),
        ] {
            let error = Submission::parse(format!("{{{start},{fields}}}").as_bytes()).unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.reason.contains(word), "{error}");
        }
        for start in [gemm, own] {
            let line = format!(r#"{{{start},"spread":{{"up_to":64}},"array":{{"count":3}}}}"#);
            Submission::parse(line.as_bytes()).unwrap();
        }
    }

    #[test]
    fn a_part_is_the_same_submission_for_its_range_alone_and_due_at_the_same_moment() {
        let whole = Submission::parse(
            br#"{"id":"w","batch":"b","program":"gemm@1","after":[{"id":"x"}],"at_once":2,
                 "params":{"a":{"random":{"n":8}},"b":{"random":{"n":8}},"tile":2},
                 "deadline":{"within_s":5},"expected_s":9,"priority":3,"spread":{"up_to":3}}"#,
        )
        .unwrap();
        let part = whole.part(
            TileRange { from: 4, to: 6 },
            Timestamp::from_micros(2_000_000),
        );
        let text = String::from_utf8(part.to_json()).unwrap();
        assert_eq!(Submission::parse(text.as_bytes()).unwrap(), part);
        assert_eq!(tiles(&part.params), Some(TileRange { from: 4, to: 6 }));
        let due = part.deadline.unwrap();
        assert_eq!(due.at, Some(Timestamp::from_micros(7_000_000)));
        assert_eq!((part.priority, part.spread), (3, whole.spread));
        for gone in ["\"id\"", "batch", "after", "at_once", "expected_s"] {
            assert!(!text.contains(gone), "{text}");
        }
    }

    #[test]
    fn half_of_what_is_left_is_given_away_as_long_as_a_tile_stays() {
        for (from, to, half) in [(0, 1, None), (3, 5, Some((4, 5))), (0, 9, Some((5, 9)))] {
            let found = TileRange { from, to }.last_half();
            assert_eq!(found.map(|r| (r.from, r.to)), half);
        }
        assert_eq!(TileRange { from: 5, to: 5 }.last_half(), None);
    }
}
