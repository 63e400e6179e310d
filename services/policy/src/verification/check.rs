//! Verification of one execution: its claims and their results, derived from its ledger's
//! boundaries. [`super::verifiers`] chooses who computes them again.

use std::collections::{BTreeSet, VecDeque};

use fiec_schemas::trust::{Finding, Segment, Verify};
use fiec_schemas::{BoundaryIndex, Digest, Event, ExecutionId, InstanceId, StatePlace};

use super::claim::{Claim, Trial};
use super::named::Named;
use crate::lifecycle::cluster::NodeIx;
use crate::time::Millis;

/// Most waiting claims of one execution. Beyond it, sampled claims are skipped.
const CLAIMS_LIMIT: usize = 64;
/// Most outputs of one claim. Further outputs begin another claim.
const OUTPUTS_LIMIT: usize = 2_000;

/// Decides whether a boundary is compared, by a digest over the policy service's seed, the
/// execution and the boundary. So a node cannot know which of its work is checked.
pub fn is_drawn(seed: InstanceId, id: ExecutionId, index: BoundaryIndex, share: f64) -> bool {
    let mut bytes = [0; 40];
    bytes[..16].copy_from_slice(seed.0.as_bytes());
    bytes[16..32].copy_from_slice(id.0.as_bytes());
    bytes[32..].copy_from_slice(&index.to_le_bytes());
    let digest = Digest::of(&bytes);
    let mut word = [0; 8];
    word.copy_from_slice(&digest.0[..8]);
    // 53 bits of a digest are a number in [0, 1).
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    let number = (u64::from_le_bytes(word) >> 11) as f64 / (1u64 << 53) as f64;
    number < share
}

/// Whether it is known how far an execution was verified before, by another policy service or an
/// earlier instance of this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recall {
    /// The question must be asked before a verifier is asked.
    Wanted,
    /// The question was asked.
    Asked(Millis),
    /// The answer is known.
    Known,
}

/// Verification state of one execution.
#[derive(Debug, Clone)]
pub struct Check {
    /// How much of it is verified.
    pub mode: Verify,
    /// The last boundary up to which everything is verified.
    pub good: Option<StatePlace>,
    /// The last committed boundary that was seen.
    last: Option<StatePlace>,
    /// False until a boundary with a known predecessor was seen.
    connected: bool,
    /// True if boundaries were committed that were not seen here.
    gap: bool,
    /// Number of commits in the last message seen.
    commits: u64,
    /// It must step back to the last good boundary: the culprit and the reason.
    pub must_step_back: Option<(Option<NodeIx>, String)>,
    /// The claims to compare, in order.
    pub claims: VecDeque<Claim>,
    /// The judgement of the first claim.
    pub trial: Option<Trial>,
    /// The nodes that have agreed so far.
    pub by: BTreeSet<NodeIx>,
    /// Number of verified parts.
    pub segments: u32,
    /// The event to repeat once everything is verified.
    pub completed: Option<Event>,
    /// The result of an earlier verification.
    pub recall: Recall,
    /// No verifier is asked before this moment.
    pub retry_at: Millis,
    /// Number of failed attempts in a row.
    pub failures: u8,
    /// How often the first claim had three different ends.
    pub babels: u8,
    /// Why it waits, for people.
    pub note: Option<String>,
}

impl Check {
    /// A new check. `from_start`: the execution has committed nothing yet.
    pub fn new(mode: Verify, from_start: bool) -> Self {
        Self {
            mode,
            good: None,
            last: None,
            connected: from_start,
            gap: false,
            commits: 0,
            must_step_back: None,
            claims: VecDeque::new(),
            trial: None,
            by: BTreeSet::new(),
            segments: 0,
            completed: None,
            recall: match mode {
                Verify::All => Recall::Wanted,
                _ => Recall::Known,
            },
            retry_at: Millis(0),
            failures: 0,
            babels: 0,
            note: None,
        }
    }

    /// True if its judgement depends on a node.
    pub fn names(&self, node: NodeIx) -> bool {
        let other = |trial: &Trial| trial.other.as_ref().map(|(other, _)| *other);
        let trial = self.trial.as_ref();
        let back = self.must_step_back.as_ref();
        let suspects = [
            trial.and_then(|trial| trial.asked),
            trial.and_then(other),
            back.and_then(|(culprit, _)| *culprit),
        ];
        self.by.contains(&node)
            || suspects.contains(&Some(node))
            || self.claims.iter().any(|claim| claim.node == Some(node))
    }

    fn all(&self) -> bool {
        self.mode == Verify::All
    }

    /// The last claim if it may grow: it is not under judgement, of the same node, and not too
    /// long.
    fn growing(&mut self, node: NodeIx) -> Option<&mut Claim> {
        let busy = usize::from(self.trial.is_some());
        if self.claims.len() <= busy {
            return None;
        }
        let claim = self.claims.back_mut()?;
        let fits = claim.place.is_some()
            && claim.node == Some(node)
            && claim.found.outputs.len() < OUTPUTS_LIMIT;
        fits.then_some(claim)
    }

    fn push(&mut self, claim: Claim) {
        if self.claims.len() < CLAIMS_LIMIT {
            self.claims.push_back(claim);
        } else if let (true, Some(back)) = (self.all(), self.claims.back_mut()) {
            // No claim may be skipped. The last one grows, and no single node is to blame.
            back.node = back.node.filter(|n| Some(*n) == claim.node);
            back.grow(claim);
        }
    }

    /// Adds a boundary committed by `node`. `drawn`: whether it is compared when only a share is.
    pub fn boundary(
        &mut self,
        place: StatePlace,
        found: Finding,
        node: NodeIx,
        drawn: impl FnOnce() -> bool,
    ) {
        let (whole, gap) = (self.connected, std::mem::take(&mut self.gap));
        let before = self.last.replace(place.clone());
        self.connected = true;
        if self.all() {
            if let Some(claim) = self.growing(node).filter(|_| !gap) {
                claim.grow(Claim::new(None, Some(place), found, None, true));
                return;
            }
        } else if !whole || gap || !drawn() || !self.claims.is_empty() {
            return;
        }
        // If the state before the first seen message is unknown, the claim starts at the beginning.
        let from = before.filter(|_| whole);
        let seen = whole && !gap;
        let node = Some(node).filter(|_| seen);
        let claim = Claim::new(from, Some(place), found, node, seen);
        self.push_or_recall(claim, !seen);
    }

    /// Compares the number of commits in a message, `here` of them in it, with the known number. A
    /// gap makes the next claim incomplete, and blames no node.
    pub fn counted(&mut self, commits: u64, here: u64) {
        self.gap |= self.connected && commits != self.commits + here;
        self.commits = commits;
    }

    /// Adds the end of the program on `node`. `completed` is repeated once that is verified.
    pub fn computed(&mut self, found: Finding, node: Option<NodeIx>, completed: Event) {
        if !self.all() {
            return;
        }
        let (whole, gap) = (self.connected, std::mem::take(&mut self.gap));
        self.connected = true;
        self.completed = Some(completed);
        if let Some(node) = node.filter(|_| !gap)
            && let Some(claim) = self.growing(node)
        {
            claim.grow(Claim::new(None, None, found, None, true));
            return;
        }
        let from = self.last.clone().filter(|_| whole);
        let seen = whole && !gap;
        let claim = Claim::new(from, None, found, node.filter(|_| seen), seen);
        self.push_or_recall(claim, !seen);
    }

    /// Adds a claim. If not all its messages were seen here, the ledger is read before the
    /// comparison.
    fn push_or_recall(&mut self, mut claim: Claim, unseen: bool) {
        if unseen && self.all() {
            claim.unseen = true;
            self.recall = Recall::Wanted;
        }
        self.push(claim);
    }

    /// Handles a step of the ledger back to a boundary.
    pub fn stepped_back(&mut self, to: Option<StatePlace>) {
        self.claims.clear();
        self.trial = None;
        self.completed = None;
        self.must_step_back = None;
        self.gap = false;
        self.good = to.clone();
        self.last = to;
        self.connected = true;
        self.retry_at = Millis(0);
        self.failures = 0;
        self.note = None;
    }

    /// Handles the loss of σ at the start of the first claim: all waiting claims become one from
    /// the beginning on. With a share, they are skipped.
    pub fn begin_anew(&mut self) {
        if self.claims.front().is_none_or(|c| c.from.is_none()) {
            return;
        }
        self.trial = None;
        let mut rest = std::mem::take(&mut self.claims).into_iter();
        let Some(mut claim) = rest.next().filter(|_| self.all()) else {
            return;
        };
        self.good = None;
        claim.from = None;
        rest.for_each(|next| claim.grow(next));
        claim.whole = false;
        claim.node = None;
        self.claims.push_back(claim);
    }

    /// The segment to compute for the first claim.
    pub fn segment(&self) -> Option<Segment> {
        let claim = self.claims.front()?;
        let keep = claim.place.as_ref().map(|p| p.digest);
        Some(Segment {
            from: claim.from.clone(),
            to: claim.place.as_ref().map(|p| p.index),
            keep: keep.filter(|_| self.all()),
        })
    }

    /// Notes that these nodes confirm the first claim. Returns true if nothing is left to compare
    /// of an execution that has ended.
    pub fn confirmed(&mut self, by: &[NodeIx]) -> bool {
        self.trial = None;
        self.failures = 0;
        self.babels = 0;
        self.note = None;
        let Some(claim) = self.claims.pop_front() else {
            return false;
        };
        self.by.extend(by);
        self.segments = self.segments.saturating_add(1);
        if !self.all() {
            return false;
        }
        // The verifier has kept σ apart from the ledger, which forgets it.
        let kept = claim.place.map(|place| StatePlace { seq: None, ..place });
        if let (Some(kept), Some(next)) = (&kept, self.claims.front_mut()) {
            next.from = Some(kept.clone());
        }
        if kept.is_some() && self.last.as_ref().map(|p| p.index) == kept.as_ref().map(|p| p.index) {
            self.last.clone_from(&kept);
        }
        let ended = kept.is_none();
        if !ended {
            self.good = kept;
        }
        ended && self.claims.is_empty()
    }

    /// Other replicas may verify it from now on.
    pub fn forget_recall(&mut self) {
        if self.all() {
            self.recall = Recall::Wanted;
        }
    }

    /// Adds the outputs that the ledger names to the claims.
    pub fn named(&mut self, named: &Named) {
        let first = self.claims.front_mut();
        if first.is_some_and(|claim| named.completes(claim)) {
            // The verifier was compared with an incomplete claim.
            self.trial = None;
        }
        for claim in self.claims.iter_mut().skip(1) {
            named.completes(claim);
        }
    }

    /// Applies an earlier verification: up to a boundary whose σ was kept, in how many parts, and
    /// by which nodes. Claims before that boundary are dropped. Nothing changes if this check is as
    /// far already.
    pub fn recalled(&mut self, up_to: Option<(StatePlace, Vec<NodeIx>, u32)>) {
        self.recall = Recall::Known;
        let Some((good, by, segments)) = up_to else {
            return;
        };
        let further = |place: &StatePlace| place.index >= good.index;
        let reached = self
            .claims
            .back()
            .is_some_and(|c| c.found.index >= good.index);
        if self.good.as_ref().is_some_and(further) || !reached {
            return;
        }
        let before = self.claims.len();
        let passed = |c: &Claim| c.place.as_ref().is_some_and(|p| p.index <= good.index);
        while self.claims.front().is_some_and(passed) {
            self.claims.pop_front();
        }
        let mut changed = before != self.claims.len();
        if let Some(front) = self.claims.front_mut().filter(|c| c.ends().0 <= good.index) {
            changed |= front.ends().0 < good.index;
            front.begin_at(good.clone());
        }
        if changed {
            self.trial = None;
        }
        if self.last.as_ref().map(|p| p.index) == Some(good.index) {
            self.last = Some(good.clone());
        }
        self.by.extend(by);
        self.segments = self.segments.saturating_add(segments);
        self.good = Some(good);
    }

    /// Notes a failed attempt. The next one is delayed.
    pub fn failed(&mut self, now: Millis, wait_ms: u64, note: String) {
        let doublings = self.failures.min(5);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = now.plus(wait_ms.saturating_mul(1 << doublings));
        self.note = Some(note);
        if let Some(trial) = &mut self.trial {
            trial.asked = None;
            if trial.other.is_none() {
                self.trial = None;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may end so")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn place(index: u64) -> StatePlace {
        StatePlace {
            index,
            digest: Digest::of(&index.to_le_bytes()),
            bytes: 8,
            seq: Some(index + 100),
            ordinal: index,
        }
    }

    fn finding(index: u64) -> Finding {
        Finding {
            index,
            digest: Digest::of(&index.to_le_bytes()),
            outputs: BTreeMap::from([(format!("o{index}"), Digest::of(b"o"))]),
        }
    }

    fn trial() -> Trial {
        Trial {
            question: 1,
            asked: Some(NodeIx::made_up(9)),
            heard: Millis(0),
            other: None,
            proofs_since: None,
        }
    }

    #[test]
    fn a_share_draws_about_that_many_and_always_the_same() {
        let (seed, id) = (
            InstanceId(uuid::Uuid::from_u128(1)),
            ExecutionId(uuid::Uuid::from_u128(2)),
        );
        let drawn = |share| {
            (0..10_000)
                .filter(|i| is_drawn(seed, id, *i, share))
                .count()
        };
        assert_eq!((drawn(0.0), drawn(1.0)), (0, 10_000));
        assert!((400..600).contains(&drawn(0.05)), "{}", drawn(0.05));
        assert_eq!(drawn(0.05), drawn(0.05));
        let other = InstanceId(uuid::Uuid::from_u128(3));
        assert!((0..100).any(|i| is_drawn(seed, id, i, 0.5) != is_drawn(other, id, i, 0.5)));
    }

    #[test]
    fn one_nodes_boundaries_grow_into_one_claim_until_it_is_judged() {
        let mut check = Check::new(Verify::All, true);
        for i in 1..=3 {
            check.boundary(place(i), finding(i), NodeIx::made_up(0), || false);
        }
        assert_eq!(check.claims.len(), 1);
        assert_eq!(check.claims[0].ends(), (0, 3));
        assert_eq!(check.claims[0].found.outputs.len(), 3);
        check.trial = Some(trial());
        check.boundary(place(4), finding(4), NodeIx::made_up(0), || false);
        check.boundary(place(5), finding(5), NodeIx::made_up(1), || false);
        let ends: Vec<_> = check.claims.iter().map(|c| (c.ends(), c.node)).collect();
        assert_eq!(
            ends,
            [
                ((0, 3), Some(NodeIx::made_up(0))),
                ((3, 4), Some(NodeIx::made_up(0))),
                ((4, 5), Some(NodeIx::made_up(1)))
            ]
        );
        assert!(!check.confirmed(&[NodeIx::made_up(9)]));
        assert_eq!(
            check.good.as_ref().map(|p| (p.index, p.seq)),
            Some((3, None))
        );
        assert_eq!(
            check.claims[0].from, check.good,
            "the next one begins where σ was kept"
        );
    }

    #[test]
    fn what_was_verified_before_is_passed_over_and_a_part_across_it_is_cut_there() {
        let kept = |index| StatePlace {
            seq: None,
            ..place(index)
        };
        let ends = |check: &Check| {
            let claims = check.claims.iter();
            claims.map(Claim::ends).collect::<Vec<_>>()
        };
        // A service that has just started has seen only the last message.
        let mut fresh = Check::new(Verify::All, false);
        assert_eq!(fresh.recall, Recall::Wanted);
        fresh.boundary(place(9), finding(9), NodeIx::made_up(0), || false);
        fresh.recalled(Some((kept(5), vec![NodeIx::made_up(3)], 2)));
        assert_eq!((ends(&fresh), fresh.recall), (vec![(5, 9)], Recall::Known));
        assert_eq!((fresh.segments, fresh.by.len()), (2, 1));
        // Another service has seen everything, and compares the outputs made since.
        let mut other = Check::new(Verify::All, true);
        for i in 1..=9 {
            other.boundary(
                place(i),
                finding(i),
                NodeIx::made_up(u32::from(i > 7)),
                || false,
            );
        }
        other.recalled(Some((kept(5), vec![], 1)));
        assert_eq!(ends(&other), [(5, 7), (7, 9)]);
        let (front, names) = (&other.claims[0], ["o6", "o7"]);
        assert!(front.found.outputs.keys().eq(names), "{front:?}");
        assert_eq!((front.whole, front.node), (true, Some(NodeIx::made_up(0))));
        assert_eq!(other.segment().unwrap().from, Some(kept(5)));
        // An earlier boundary, or one that this ledger has not reached, changes nothing.
        let before = format!("{other:?}");
        other.recalled(Some((kept(4), vec![NodeIx::made_up(7)], 9)));
        other.recalled(Some((kept(10), vec![NodeIx::made_up(7)], 9)));
        other.recalled(None);
        assert_eq!(before, format!("{other:?}"));
        // All known claims were verified: the next one begins where σ was kept.
        other.recalled(Some((kept(9), vec![], 1)));
        assert_eq!(ends(&other), []);
        other.boundary(place(10), finding(10), NodeIx::made_up(0), || false);
        assert_eq!(other.segment().unwrap().from, Some(kept(9)));
    }

    #[test]
    fn its_judgement_depends_on_each_node_that_agreed_is_suspected_or_has_a_claim() {
        let node = NodeIx::made_up;
        let named = |check: &Check| (0..9).filter(|i| check.names(node(*i))).collect::<Vec<_>>();
        let mut check = Check::new(Verify::All, true);
        assert!(named(&check).is_empty());
        check.must_step_back = Some((Some(node(1)), "its bits differ from all others'".to_owned()));
        assert_eq!(named(&check), [1]);
        check.by.insert(node(2));
        assert_eq!(named(&check), [1, 2]);
        check.trial = Some(Trial {
            asked: Some(node(3)),
            other: Some((node(4), finding(1))),
            ..trial()
        });
        assert_eq!(named(&check), [1, 2, 3, 4]);
        check.boundary(place(1), finding(1), node(5), || false);
        assert_eq!(named(&check), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn all_is_verified_only_when_the_end_is() {
        let mut check = Check::new(Verify::All, true);
        check.boundary(place(1), finding(1), NodeIx::made_up(0), || false);
        check.trial = Some(trial());
        check.computed(finding(2), Some(NodeIx::made_up(0)), Event::Submitted);
        assert!(!check.confirmed(&[NodeIx::made_up(1)]));
        assert!(check.confirmed(&[NodeIx::made_up(2)]));
        assert_eq!((check.segments, check.by.len()), (2, 2));
    }

    #[test]
    fn what_was_before_the_first_message_seen_is_compared_begin_anew_and_blames_nobody() {
        let mut check = Check::new(Verify::All, false);
        check.boundary(place(7), finding(7), NodeIx::made_up(0), || false);
        let claim = &check.claims[0];
        assert_eq!(
            (claim.ends(), claim.node, claim.whole),
            ((0, 7), None, false)
        );
        let mut found = finding(7);
        found.outputs.insert("earlier".into(), Digest::of(b"x"));
        assert!(
            claim.agrees(&found),
            "outputs that are not known here do not disagree"
        );
        found.digest = Digest::of(b"wrong");
        assert!(!claim.agrees(&found));
    }

    #[test]
    fn a_share_compares_drawn_boundaries_whose_beginning_is_known() {
        let mut check = Check::new(Verify::Share(0.5), false);
        check.boundary(place(7), finding(7), NodeIx::made_up(0), || true);
        assert!(check.claims.is_empty());
        check.boundary(place(8), finding(8), NodeIx::made_up(0), || false);
        assert!(check.claims.is_empty());
        check.boundary(place(9), finding(9), NodeIx::made_up(0), || true);
        assert_eq!(check.claims[0].ends(), (8, 9));
        assert_eq!(check.segment().unwrap().keep, None);
    }

    #[test]
    fn boundaries_that_were_not_seen_make_an_incomplete_claim_that_blames_nobody() {
        let mut check = Check::new(Verify::All, true);
        check.counted(1, 1);
        check.boundary(place(1), finding(1), NodeIx::made_up(0), || false);
        check.counted(4, 1);
        check.boundary(place(4), finding(4), NodeIx::made_up(0), || false);
        let claim = &check.claims[1];
        assert_eq!(
            (claim.ends(), claim.node, claim.whole),
            ((1, 4), None, false)
        );
        check.counted(5, 1);
        check.boundary(place(5), finding(5), NodeIx::made_up(0), || false);
        assert_eq!(check.claims[2].node, Some(NodeIx::made_up(0)));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Boundary(u32),
        Try,
        Confirm,
        Back,
        Gone,
    }

    proptest! {
        /// For any sequence of events, steps back included: claims follow each other without a gap,
        /// begin at the last verified boundary, and end at the last boundary.
        #[test]
        fn claims_cover_what_is_not_verified_without_a_gap(
            steps in proptest::collection::vec(prop_oneof![
                4 => (0u32..3).prop_map(Step::Boundary),
                2 => Just(Step::Try),
                2 => Just(Step::Confirm),
                1 => Just(Step::Back),
                1 => Just(Step::Gone),
            ], 1..200)
        ) {
            let mut check = Check::new(Verify::All, true);
            let mut at = 0;
            for step in steps {
                match step {
                    Step::Boundary(node) => {
                        at += 1;
                        check.boundary(place(at), finding(at), NodeIx::made_up(node), || false);
                    }
                    Step::Try if !check.claims.is_empty() => check.trial = Some(trial()),
                    Step::Confirm if check.trial.is_some() => {
                        check.confirmed(&[NodeIx::made_up(9)]);
                    }
                    Step::Back => {
                        let good = check.good.clone();
                        at = good.as_ref().map_or(0, |p| p.index);
                        check.stepped_back(good);
                    }
                    Step::Gone => check.begin_anew(),
                    _ => {}
                }
                let good = check.good.as_ref().map_or(0, |p| p.index);
                let mut from = good;
                for claim in &check.claims {
                    let (begins, ends) = claim.ends();
                    prop_assert_eq!(begins, from);
                    prop_assert!(ends > begins);
                    from = ends;
                }
                prop_assert_eq!(from, at);
            }
        }
    }
}
