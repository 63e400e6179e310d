//! Orders members of a spread range to split, if one more node is worth its cost ([`super::growth`]
//! has the rules).
//!
//! A round is bounded: it reviews 256 members, and the next round continues behind them.

use std::ops::Bound;

use fiec_schemas::ExecutionId;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::spread::PARTS_LIMIT;

use super::Ranges;
use super::growth::{Asked, Splittable, Stay, choose};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::execution::Avoided;
use crate::lifecycle::placement::Ask;
use crate::lifecycle::queue::regret::move_ms;
use crate::time::Millis;
use crate::{Action, ControlOutcome};

/// Most members in one round.
const WINDOW: usize = 256;
/// Most waiting profiles that are checked for a place.
const PROFILES: usize = 16;

/// What others claim of the room that one more member would take.
pub(crate) struct Claims {
    /// A gang gathers places.
    pub gang_gathers: bool,
    /// Why the tenant's quota denies one more.
    pub denied: Option<String>,
}

impl Ranges {
    /// The roots of ranges that are reviewed in this round, one round each
    /// [`crate::SpreadingSettings::look_ms`]. Parts that found no place are given back first.
    pub fn review(&mut self, life: &mut Lifecycle) -> Vec<ExecutionId> {
        let now = life.now.mono;
        if self.members.is_empty() || now.since(self.looked) < life.config.spreading.look_ms {
            return Vec::new();
        }
        self.looked = now;
        self.give_back(life);
        let from = self.next.map_or(Bound::Unbounded, Bound::Included);
        let mut members = self.members.range((from, Bound::Unbounded));
        let some: Vec<_> = members.by_ref().take(WINDOW).map(|(id, _)| *id).collect();
        self.next = members.next().map(|(id, _)| *id);
        let mine = |id: &ExecutionId| {
            let whole = self.root_of(*id) == *id;
            whole && life.is_mine(*id) && !self.orphans.contains_key(id)
        };
        some.into_iter().filter(mine).collect()
    }

    /// The member of a range that would split now, if another place would be worth its cost.
    pub fn candidate(&mut self, life: &Lifecycle, root: ExecutionId) -> Option<Splittable> {
        self.settle_order(life, root);
        self.choose(life, root)
            .map_err(|stay| self.stays(root, stay))
            .ok()
    }

    /// Orders the candidate of a range to split, if there is a place for one more that nobody else
    /// claims.
    pub fn grow(
        &mut self,
        life: &mut Lifecycle,
        root: ExecutionId,
        one: Splittable,
        claims: Claims,
    ) {
        let now = life.now;
        if let Err(stay) = self.has_place(life, root, one.id, claims) {
            return self.stays(root, stay);
        }
        let growth = self.growth.entry(root).or_default();
        let (Some(e), Some(member)) = (life.cluster().execution(one.id), self.members.get(&one.id))
        else {
            return;
        };
        let Stage::Started(ix, _) = e.stage else {
            return;
        };
        // The split happens at the next boundary, which may be a capsule away.
        let capsules = 4.0 * one.each_ms.clamp(0.0, 1e9);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped"
        )]
        let within = life.config.spreading.answer_ms + capsules as u64;
        growth.asked = Some(Asked {
            execution: one.id,
            epoch: e.epoch,
            splits: member.spreading.splits,
            until: now.mono.plus(within),
            refused: None,
        });
        growth.stays = Some(Stay::Asked(one.id));
        life.push(Action::Control {
            node: life.cluster().node(ix).id.clone(),
            request: ControlRequest::Split {
                execution: one.id,
                epoch: e.epoch,
            },
            ticket: None,
        });
    }

    /// Evaluates the result of the last order.
    fn settle_order(&mut self, life: &Lifecycle, root: ExecutionId) {
        let now = life.now;
        let retry = life.config.order_retry_ms;
        let Some(growth) = self.growth.get_mut(&root) else {
            return;
        };
        let Some(asked) = &growth.asked else {
            return;
        };
        let e = life.cluster().execution(asked.execution);
        let (Some(e), Some(member)) = (e, self.members.get(&asked.execution)) else {
            growth.asked = None;
            return;
        };
        if member.spreading.splits > asked.splits {
            growth.grown();
        } else if asked.refused.is_some() || now.mono >= asked.until {
            growth.in_vain(now.mono, retry);
        } else if e.epoch != asked.epoch || !e.computes() {
            growth.asked = None;
        }
    }

    /// Notes why a range is not spread further. Others must have room without a break.
    fn stays(&mut self, root: ExecutionId, stay: Stay) {
        let growth = self.growth.entry(root).or_default();
        if matches!(
            stay,
            Stay::Full | Stay::Settling(_) | Stay::Others | Stay::NoRoom
        ) {
            growth.room_since = None;
        }
        growth.stays = Some(stay);
    }

    /// Chooses the member that splits, or says why none does.
    fn choose(&self, life: &Lifecycle, root: ExecutionId) -> Result<Splittable, Stay> {
        let growth = self.growth.get(&root);
        if let Some(asked) = growth.and_then(|g| g.asked.as_ref()) {
            return Err(Stay::Asked(asked.execution));
        }
        let (live, unborn) = self.those_of(root);
        let up_to = self.members.get(&root);
        let up_to = up_to.map_or(0, |m| m.spreading.up_to as usize);
        if live.len() + unborn.len() >= up_to {
            return Err(Stay::Full);
        }
        let settles = live.iter().find(|id| {
            let e = life.cluster().execution(**id);
            e.is_none_or(|e| !e.computes() || e.is_appending())
        });
        if let Some(id) = unborn.first().or(settles) {
            return Err(Stay::Settling(*id));
        }
        let splittable: Vec<_> = live
            .iter()
            .filter_map(|id| self.splittable(life, *id))
            .collect();
        let (least, moves) = (life.config.spreading.least_ms, life.config.spreading.moves);
        choose(&splittable, least, moves)
    }

    /// Checks that there has been a place for one more long enough.
    fn has_place(
        &mut self,
        life: &mut Lifecycle,
        root: ExecutionId,
        like: ExecutionId,
        claims: Claims,
    ) -> Result<(), Stay> {
        let now = life.now;
        if life.cluster().changed.newcomers || claims.gang_gathers || others_wait(life) {
            return Err(Stay::Others);
        }
        if let Some(denied) = claims.denied {
            return Err(Stay::Quota(denied));
        }
        if !self.has_room(life, root, like) {
            return Err(Stay::NoRoom);
        }
        let growth = self.growth.entry(root).or_default();
        let since = *growth.room_since.get_or_insert(now.mono);
        if now.mono.since(since) < life.config.spreading.dwell_ms {
            return Err(Stay::Soon);
        }
        if now.mono < growth.not_before {
            return Err(Stay::Later {
                ms: growth.not_before.since(now.mono),
                because: growth.because.clone(),
            });
        }
        Ok(())
    }

    /// The remaining range of a member that could be split now.
    fn splittable(&self, life: &Lifecycle, id: ExecutionId) -> Option<Splittable> {
        let now = life.now;
        let (e, member) = (life.cluster().execution(id)?, self.members.get(&id)?);
        if !matches!(e.stage, Stage::Started(..)) {
            return None;
        }
        let told = e.was_told(now.mono);
        let full = member.spreading.parts.len() >= PARTS_LIMIT;
        let failing = self.failing.contains_key(&id);
        if member.requested || e.order().is_some() || told || full || failing {
            return None;
        }
        let rhythm = life.rhythm(id);
        let each_ms = rhythm?.quantile(0.5)?;
        let moves_ms = move_ms(e, rhythm, life.take_up());
        Some(Splittable {
            id,
            left: member.left?,
            each_ms,
            move_ms: moves_ms + member.inputs_ms(each_ms),
        })
    }

    /// True if one more execution like this finds a place: on a node without a member, or on any
    /// free device if the members run on devices.
    fn has_room(&self, life: &mut Lifecycle, root: ExecutionId, like: ExecutionId) -> bool {
        let Some(e) = life.cluster().execution(like) else {
            return false;
        };
        let (live, _) = self.those_of(root);
        let here = live.iter().filter(|_| e.device().is_none());
        let here = here.filter_map(|id| life.cluster().execution(*id)?.stage.node());
        let avoid: Vec<_> = here
            .map(|node| Avoided {
                node,
                until: Millis(u64::MAX),
                refusals: 0,
            })
            .collect();
        let ask = Ask {
            avoid,
            free_slot: true,
            ..Ask::new(e.profile)
        };
        life.choose(&ask).is_some()
    }

    /// Handles the answer to an order to split.
    pub fn answered(&mut self, id: ExecutionId, epoch: u64, outcome: ControlOutcome) {
        let refused = match outcome {
            ControlOutcome::Taken => return,
            ControlOutcome::Refused(reason) | ControlOutcome::Moving(reason) => reason,
            ControlOutcome::NotHeld => "its node does not hold it".to_owned(),
            ControlOutcome::NoAnswer => "its node did not answer".to_owned(),
        };
        let root = self.root_of(id);
        let growth = self.growth.get_mut(&root);
        if let Some(asked) = growth.and_then(|g| g.asked.as_mut())
            && (asked.execution, asked.epoch) == (id, epoch)
        {
            asked.refused = Some(refused);
        }
    }
}

/// True if another waiting execution has a place.
fn others_wait(life: &mut Lifecycle) -> bool {
    let profiles: Vec<_> = life.waiting().profiles().take(PROFILES).collect();
    profiles.into_iter().any(|profile| life.is_open(profile))
}
