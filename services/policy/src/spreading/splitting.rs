//! Orders members of a spread range to split, if one more node is worth its cost ([`super::growth`]
//! has the rules).
//!
//! A round is bounded: it reviews 256 members, and the next round continues behind them.

use std::ops::Bound;

use fiec_schemas::ExecutionId;
use fiec_schemas::messages::ControlRequest;
use fiec_schemas::spread::PARTS_LIMIT;

use crate::engine::{Action, ControlOutcome, Policy};
use crate::lifecycle::cluster::Stage;
use crate::lifecycle::cluster::execution::Avoided;
use crate::lifecycle::placement::Ask;
use crate::share::regret::move_ms;
use crate::spreading::growth as spread;
use crate::spreading::growth::{Asked, Splittable, Stay};
use crate::time::Millis;

/// Most members in one round.
const WINDOW: usize = 256;
/// Most waiting profiles that are checked for a place.
const PROFILES: usize = 16;

impl Policy {
    /// Reviews the next roots of spread ranges.
    pub(crate) fn grow(&mut self) {
        let from = self.spread.next.map_or(Bound::Unbounded, Bound::Included);
        let mut members = self.spread.members.range((from, Bound::Unbounded));
        let some: Vec<_> = members.by_ref().take(WINDOW).map(|(id, _)| *id).collect();
        self.spread.next = members.next().map(|(id, _)| *id);
        for id in some {
            let whole = self.spread.root_of(id) == id;
            if whole && self.life.is_mine(id) && !self.spread.orphans.contains_key(&id) {
                self.grow_one(id);
            }
        }
    }

    fn grow_one(&mut self, root: ExecutionId) {
        let now = self.life.now;
        self.settle_order(root);
        let weighed = self.weigh(root);
        let growth = self.spread.growth.entry(root).or_default();
        let one = match weighed {
            Ok(one) => one,
            Err(stays) => {
                growth.stays = Some(stays);
                return;
            }
        };
        let (Some(e), Some(member)) = (
            self.life.cluster().execution(one.id),
            self.spread.members.get(&one.id),
        ) else {
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
        let within = self.life.config.spread_answer_ms + capsules as u64;
        growth.asked = Some(Asked {
            execution: one.id,
            epoch: e.epoch,
            splits: member.spreading.splits,
            at: now.mono,
            until: now.mono.plus(within),
            refused: None,
        });
        growth.stays = Some(Stay::Asked(one.id));
        self.life.out.push(Action::Control {
            node: self.life.cluster().node(ix).id.clone(),
            request: ControlRequest::Split {
                execution: one.id,
                epoch: e.epoch,
            },
            ticket: None,
        });
    }

    /// Evaluates the result of the last order.
    fn settle_order(&mut self, root: ExecutionId) {
        let now = self.life.now;
        let retry = self.life.config.order_retry_ms;
        let Some(growth) = self.spread.growth.get_mut(&root) else {
            return;
        };
        let Some(asked) = &growth.asked else {
            return;
        };
        let e = self.life.cluster().execution(asked.execution);
        let (Some(e), Some(member)) = (e, self.spread.members.get(&asked.execution)) else {
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

    /// Chooses the member that splits, or says why none does.
    fn weigh(&mut self, root: ExecutionId) -> Result<Splittable, Stay> {
        let now = self.life.now;
        let growth = self.spread.growth.get(&root);
        if let Some(asked) = growth.and_then(|g| g.asked.as_ref()) {
            return Err(Stay::Asked(asked.execution));
        }
        let (live, unborn) = self.spread.those_of(root);
        let up_to = self.spread.members.get(&root);
        let up_to = up_to.map_or(0, |m| m.spreading.up_to as usize);
        if live.len() + unborn.len() >= up_to {
            self.no_room_since(root);
            return Err(Stay::Full);
        }
        let settles = live.iter().find(|id| {
            let e = self.life.cluster().execution(**id);
            e.is_none_or(|e| !e.computes() || e.is_appending())
        });
        if let Some(id) = unborn.first().or(settles) {
            let id = *id;
            self.no_room_since(root);
            return Err(Stay::Settling(id));
        }
        let splittable: Vec<_> = live.iter().filter_map(|id| self.splittable(*id)).collect();
        let (least, moves) = (
            self.life.config.spread_least_ms,
            self.life.config.spread_moves,
        );
        let chosen = spread::choose(&splittable, least, moves)?;
        if self.others_wait() {
            self.no_room_since(root);
            return Err(Stay::Others);
        }
        if let Some(denied) = self.denies_one_more(chosen.id) {
            return Err(Stay::Quota(denied));
        }
        if !self.has_room(chosen.id, &live) {
            self.no_room_since(root);
            return Err(Stay::NoRoom);
        }
        let growth = self.spread.growth.entry(root).or_default();
        let since = *growth.room_since.get_or_insert(now.mono);
        if now.mono.since(since) < self.life.config.spread_dwell_ms {
            return Err(Stay::Soon);
        }
        if now.mono < growth.not_before {
            return Err(Stay::Later {
                ms: growth.not_before.since(now.mono),
                because: growth.because.clone(),
            });
        }
        Ok(chosen)
    }

    fn no_room_since(&mut self, root: ExecutionId) {
        if let Some(growth) = self.spread.growth.get_mut(&root) {
            growth.room_since = None;
        }
    }

    /// The remaining range of a member that could be split now.
    fn splittable(&self, id: ExecutionId) -> Option<Splittable> {
        let now = self.life.now;
        let (e, member) = (
            self.life.cluster().execution(id)?,
            self.spread.members.get(&id)?,
        );
        if !matches!(e.stage, Stage::Started(..)) {
            return None;
        }
        let told = e.was_told(now.mono);
        let full = member.spreading.parts.len() >= PARTS_LIMIT;
        let failing = self.spread.failing.contains_key(&id);
        if member.requested || e.order().is_some() || told || full || failing {
            return None;
        }
        let rhythm = self.life.rhythms.get(&id);
        let each_ms = rhythm?.quantile(0.5)?;
        let moves_ms = move_ms(e, rhythm, &self.life.take_up);
        Some(Splittable {
            id,
            left: member.left?,
            each_ms,
            move_ms: moves_ms + member.inputs_ms(each_ms),
        })
    }

    /// True if another waiting execution has a place, or a gang gathers places.
    fn others_wait(&mut self) -> bool {
        if self.life.cluster().changed.newcomers {
            return true;
        }
        let waits = |id| {
            let e = self.life.cluster().execution(id);
            e.is_some_and(|e| e.stage == Stage::Pending)
        };
        let mut gangs = self.holds.gangs.values();
        let gathers = gangs.any(|gang| {
            let members = gang.complete();
            members.is_some_and(|ids| ids.into_iter().any(waits))
        });
        if gathers {
            return true;
        }
        let profiles: Vec<_> = self.life.waiting.profiles().take(PROFILES).collect();
        profiles.into_iter().any(|profile| {
            let ask = Ask::new(profile);
            self.life.choose(&ask).is_some()
        })
    }

    /// True if one more execution like this finds a place: on a node without a member, or on any
    /// free device if the members run on devices.
    fn has_room(&mut self, like: ExecutionId, live: &[ExecutionId]) -> bool {
        let Some(e) = self.life.cluster().execution(like) else {
            return false;
        };
        let here = live.iter().filter(|_| e.device().is_none());
        let here = here.filter_map(|id| self.life.cluster().execution(*id)?.stage.node());
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
        self.life.choose(&ask).is_some()
    }

    /// Handles the answer to an order to split.
    pub(crate) fn split_answered(&mut self, id: ExecutionId, epoch: u64, outcome: ControlOutcome) {
        let refused = match outcome {
            ControlOutcome::Taken => return,
            ControlOutcome::Refused(reason) | ControlOutcome::Moving(reason) => reason,
            ControlOutcome::NotHeld => "its node does not hold it".to_owned(),
            ControlOutcome::NoAnswer => "its node did not answer".to_owned(),
        };
        let root = self.spread.root_of(id);
        let growth = self.spread.growth.get_mut(&root);
        if let Some(asked) = growth.and_then(|g| g.asked.as_mut())
            && (asked.execution, asked.epoch) == (id, epoch)
        {
            asked.refused = Some(refused);
        }
    }
}
